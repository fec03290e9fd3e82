//! `larder block flush`, and what is said of volumes that write back when one is attached and in a status.

use larder_base::ByteSize;
use larder_block::cache::back::{BackConfig, LEAST_BOUND, check_mark};
use larder_block::control::protocol::{Request, WriteBack};
use larder_block::control::status::VolumeStatus;
use serde::Deserialize;

use super::control::{Daemon, duration, read};
use crate::error::CliError;

/// Shown under the flags of `flush`.
const EXAMPLES: &str = "\
Examples:
  # Before the cache device is taken out of a running host:
  larder block flush
  # One volume, for a snapshot of its store:
  larder block flush db

To take a volume to another cache, or its store out of use: `larder block detach`,
which flushes it and makes its marker clean.
Ends with 0 if all that was dirty came to the stores, with 1 if something did not.";

/// Brings all that is dirty of volumes that write back to their stores. Ctrl-C ends the waiting, not the destaging
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct FlushArgs {
    /// The volume. None: all that write back
    volume: Option<String>,
    /// Wait no longer than this; then it ends with 1, and the daemon goes on as before. None: without end
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    #[command(flatten)]
    daemon: Daemon,
}

/// Names a point at which the data of a volume that writes back is consistent; returns when it is durable on flash
///
/// Nothing is destaged for it. `larder block status` shows the last mark of a volume that its store has.
#[derive(Debug, clap::Args)]
pub(crate) struct MarkArgs {
    /// The volume
    volume: String,
    /// What the point is called: 1 to 255 bytes
    name: String,
    /// Wait no longer than this; then it ends with 1, and the mark may still come
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: u64,
    #[command(flatten)]
    daemon: Daemon,
}

pub(crate) fn mark(args: &MarkArgs) -> Result<(), CliError> {
    check_mark(&args.name).map_err(CliError::Usage)?;
    let (volume, name) = (args.volume.clone(), args.name.clone());
    let request = Request::Mark { volume, name, seconds: Some(args.timeout) };
    args.daemon.print(&request, |answer| {
        let sequence = answer["sequence"].as_u64().unwrap_or_default();
        Ok(format!("{}: mark '{}' is durable on flash, write {sequence}", args.volume, args.name))
    })
}

/// What became of one volume.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Flushed {
    volume: String,
    destaged: bool,
    dirty_bytes: u64,
    held_bytes: u64,
    trouble: Option<String>,
    writes_through: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Answer {
    volumes: Vec<Flushed>,
    interrupted: bool,
    timed_out: bool,
}

pub(crate) fn flush(args: &FlushArgs) -> Result<(), CliError> {
    let answer =
        args.daemon.ask(&Request::Flush { volume: args.volume.clone(), seconds: args.timeout })?;
    let told: Answer = read(&answer)?;
    args.daemon.show(&answer, |_| Ok(text(&told)))?;
    outcome(&told)
}

fn text(told: &Answer) -> String {
    if told.volumes.is_empty() {
        return "no volume writes back: there is nothing to destage".to_owned();
    }
    // What is dirty counts once, and what the log holds of it, as the lines before have said, with each version and header.
    let left = |one: &Flushed| {
        let (dirty, held) = (ByteSize(one.dirty_bytes), ByteSize(one.held_bytes));
        format!("{held} of the write log left, {dirty} of the volume are dirty")
    };
    let line = |one: &Flushed| {
        let what = match (one.destaged, &one.trouble) {
            (true, _) if one.writes_through => "it writes through: nothing is dirty".to_owned(),
            (true, _) => "all of it is durable in its store".to_owned(),
            (false, None) => left(one),
            (false, Some(why)) => format!("{}: {why}", left(one)),
        };
        format!("{}: {what}", one.volume)
    };
    told.volumes.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// The failure that `flush` ends with, if something did not come to its store: details were printed.
fn outcome(told: &Answer) -> Result<(), CliError> {
    let left: Vec<&Flushed> = told.volumes.iter().filter(|v| !v.destaged).collect();
    if left.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = left.iter().map(|v| format!("'{}'", v.volume)).collect();
    let why = match (told.interrupted, told.timed_out) {
        (true, _) => "interrupted: ",
        (false, true) => "--timeout: ",
        _ => "",
    };
    Err(CliError::Runtime(format!(
        "{why}not all of {} came to its store: see `larder block status` and flush again",
        names.join(", ")
    )))
}

/// Shown under the flags of `write`.
const WRITE_EXAMPLES: &str = "\
Examples:
  # Bursts of writes are to come, and are answered by local flash:
  larder block write db back:ordered
  # All that is dirty comes to the store, then writes do:
  larder block write db through";

/// Has a volume that is served write back from now on, or through; its clients stay. A restart goes by `serve --write` again
#[derive(Debug, clap::Args)]
#[command(after_help = WRITE_EXAMPLES)]
pub(crate) struct WriteArgs {
    /// The volume
    volume: String,
    /// `through`, or back:any, back:ordered or back:journaled, as for `larder block serve --write`
    #[arg(value_name = "MODE")]
    mode: String,
    #[command(flatten)]
    how: HowArgs,
    /// Wait no longer than this for its store; then it writes as before, and this ends with 1. None: without end
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    #[command(flatten)]
    daemon: Daemon,
}

pub(crate) fn write(args: &WriteArgs) -> Result<(), CliError> {
    let through = args.mode == "through";
    if through && args.how.is_stated() {
        return Err(CliError::Usage(
            "--dirty-max, --dirty-age-max, --marker, --no-marker, --store-moved, --journal and --journal-local are for a volume that is to write back: leave them \
             out with 'through'"
                .to_owned(),
        ));
    }
    if !through && let Err(e) = args.mode.parse::<BackConfig>() {
        let what = "'through' has it write through";
        return Err(CliError::Usage(format!("MODE '{}': {e}; {what}", args.mode)));
    }
    let mode = Some(args.mode.clone()).filter(|_| !through);
    let request = Request::Write {
        volume: args.volume.clone(),
        back: args.how.said(mode)?,
        seconds: args.timeout,
    };
    args.daemon.print(&request, |answer| {
        let name = &args.volume;
        Ok(match answer["write"].as_str() {
            Some(mode) => format!("{name}: writes back from now on, {mode}; the daemon's next start goes by the flags of `larder block serve` again"),
            None => format!(
                "{name}: writes through from now on, and its store has everything; the daemon's next start goes by the flags of `larder block serve` again"
            ),
        })
    })
}

/// Flags of `attach` for a volume that writes back.
#[derive(Debug, clap::Args)]
pub(super) struct BackArgs {
    /// It writes back: back:any, back:ordered or back:journaled, as for `larder block serve --write`
    #[arg(long, value_name = "MODE")]
    write: Option<String>,
    #[command(flatten)]
    how: HowArgs,
}

impl BackArgs {
    /// What the daemon is told.
    pub(super) fn said(&self) -> Result<WriteBack, CliError> {
        self.how.said(self.write.clone())
    }
}

/// How a volume writes back, beside its mode.
#[derive(Debug, clap::Args)]
struct HowArgs {
    /// What it may hold of the write log [default: as the daemon was started with, else an equal share]
    #[arg(long, value_name = "SIZE")]
    dirty_max: Option<ByteSize>,
    /// How old what is dirty may become, in seconds: as this is neared it is destaged, and beyond it there is an alarm. With ,hard no write is
    /// answered while the oldest is older. Not with destage=none [default: as the daemon was started with, else 60]
    #[arg(long, value_name = "SECONDS[,hard]")]
    dirty_age_max: Option<String>,
    /// Where its marker is: a path, or the URI of an NBD export or object store
    #[arg(long, value_name = "PLACE", conflicts_with = "no_marker")]
    marker: Option<String>,
    /// It has no marker: nothing notices that its cache is lost, or an older one comes back
    #[arg(long)]
    no_marker: bool,
    /// Its store is the one that it had, moved or renamed, or a whole copy of it made since its cache was last used: you vouch for that
    #[arg(long)]
    store_moved: bool,
    /// Where its journal is, with back:journaled: a path, or the URI of an NBD export or object store
    #[arg(long, value_name = "PLACE")]
    journal: Option<String>,
    /// Its journal may be on the daemon's host where its store is not: it then covers the loss of the cache device, and not that of the host
    #[arg(long)]
    journal_local: bool,
}

impl HowArgs {
    fn is_stated(&self) -> bool {
        let bounds = self.dirty_max.is_some() || self.dirty_age_max.is_some();
        let places = self.marker.is_some() || self.journal.is_some();
        bounds || places || self.no_marker || self.store_moved || self.journal_local
    }

    /// What the daemon is told, with the mode.
    fn said(&self, write: Option<String>) -> Result<WriteBack, CliError> {
        if let Some(most) = self.dirty_max.filter(|most| *most < LEAST_BOUND) {
            return Err(CliError::Usage(format!(
                "--dirty-max {most}: must be at least {LEAST_BOUND}"
            )));
        }
        Ok(WriteBack {
            write,
            dirty_max: self.dirty_max.map(|size| size.0),
            dirty_age_max: self.dirty_age_max.clone(),
            marker: self.marker.as_deref().map(from_here).transpose()?,
            no_marker: self.no_marker,
            store_moved: self.store_moved,
            journal: self.journal.as_deref().map(from_here).transpose()?,
            journal_local: self.journal_local,
        })
    }
}

/// The daemon may run in another directory: a relative path is meant from this one.
fn from_here(place: &str) -> Result<String, CliError> {
    if place.is_empty() {
        return Err(CliError::Usage(
            "--marker and --journal name a place, and '' is none: give a path, or the URI of an NBD export or object store".to_owned(),
        ));
    }
    let is_uri = place.contains("://") || place.starts_with("file:");
    if is_uri || place.starts_with('/') {
        return super::control::from_here(place);
    }
    let path = std::path::absolute(place)
        .map_err(|e| CliError::Runtime(format!("'{place}': the working directory: {e}")))?;
    Ok(path.display().to_string())
}

/// Characters of the name of a mark in a table.
const MOST_NAME: usize = 16;

/// The columns of a status about volumes that write back, those of words first.
pub(super) const HEAD: [&str; 13] = [
    "volume",
    "write-back",
    "state",
    "mark in store",
    "dirty",
    "log held",
    "of",
    "oldest",
    "log freed/s",
    "time left",
    "generation",
    "stored up to write",
    "epoch",
];
/// How many of them are words.
pub(super) const WORDS: usize = 4;

/// The name of a mark in a table: its first characters.
fn mark_text(mark: &str) -> String {
    let mut name: String = mark.chars().filter(|c| !c.is_control()).take(MOST_NAME).collect();
    if mark.chars().nth(MOST_NAME).is_some() {
        name.push('…');
    }
    name
}

/// What stands in them, if it writes back.
pub(super) fn row(v: &VolumeStatus) -> Option<Vec<String>> {
    let back = v.write_back.as_ref()?;
    let unfenced = if back.fenced { "" } else { ", unfenced" };
    let state = v.back_state().unwrap_or_default() + unfenced;
    let stated = back.stated_bytes.filter(|&stated| stated != back.bound_bytes);
    let stated = stated.map_or_else(String::new, |n| format!(" ({} stated)", ByteSize(n)));
    let mark = back.stored_mark.as_deref().map_or_else(|| "–".to_owned(), mark_text);
    let or_none = |seconds: Option<f64>| seconds.map_or_else(|| "–".into(), duration);
    Some(vec![
        v.name.clone(),
        back.mode.trim_start_matches("back:").to_owned(),
        state,
        mark,
        ByteSize(back.dirty_bytes).to_string(),
        ByteSize(back.held_bytes).to_string(),
        ByteSize(back.bound_bytes).to_string() + &stated,
        or_none(back.oldest_seconds),
        ByteSize(back.destage_bytes_per_second as u64).to_string(),
        or_none(back.seconds_left),
        back.generation.to_string(),
        format!("{} of {}", back.frontier, back.acknowledged),
        back.epoch.map_or_else(|| "–".into(), |epoch| epoch.to_string()),
    ])
}

#[cfg(test)]
mod tests {
    use larder_block::control::status::BackVolume;

    use super::*;

    #[test]
    fn a_flush_says_what_is_left_and_fails_if_something_is() {
        let one = |name: &str, destaged, dirty_bytes, trouble: Option<&str>| Flushed {
            volume: name.into(),
            destaged,
            dirty_bytes,
            held_bytes: 2 * dirty_bytes,
            trouble: trouble.map(str::to_owned),
            writes_through: name == "t",
        };
        let none = Answer::default();
        assert!(text(&none).contains("no volume writes back") && outcome(&none).is_ok());
        let all = Answer { volumes: vec![one("a", true, 0, None)], ..Answer::default() };
        assert!(text(&all).contains("a: all of it is durable") && outcome(&all).is_ok());
        let through = Answer { volumes: vec![one("t", true, 0, None)], ..Answer::default() };
        assert!(text(&through).contains("t: it writes through: nothing is dirty"));
        assert!(outcome(&through).is_ok());
        let some = Answer {
            timed_out: false,
            volumes: vec![
                one("a", true, 0, None),
                one("b", false, 8 << 20, None),
                one("c", false, 4096, Some("its store is away")),
            ],
            interrupted: true,
        };
        let said = text(&some);
        assert!(
            said.contains("b: 16 MiB of the write log left, 8 MiB of the volume are dirty")
                && said.contains("is away"),
            "{said}"
        );
        let error = outcome(&some).unwrap_err().to_string();
        assert!(error.contains("interrupted") && error.contains("'b', 'c'"), "{error}");
        assert!(!error.contains("'a'"), "{error}");
    }

    #[test]
    fn a_row_says_how_far_the_store_is_what_is_stated_and_that_nothing_keeps_others_out() {
        let back = BackVolume {
            mode: "back:journaled".into(),
            bound_bytes: 10 << 20,
            stated_bytes: Some(40 << 20),
            frontier: 12,
            acknowledged: 14,
            epoch: Some(3),
            ..BackVolume::default()
        };
        let of = |back: BackVolume| {
            let volume = VolumeStatus { write_back: Some(back), ..VolumeStatus::default() };
            row(&volume).unwrap()
        };
        let all = of(back.clone());
        assert_eq!(all.len(), HEAD.len());
        for words in ["ok, unfenced", "10 MiB (40 MiB stated)", "12 of 14", "3"] {
            assert!(all.iter().any(|cell| cell == words), "{words}: {all:?}");
        }
        let (fenced, stated_bytes, epoch) = (true, Some(10 << 20), None);
        let all = of(BackVolume { fenced, stated_bytes, epoch, ..back });
        assert_eq!((&*all[2], &*all[6], &*all[12]), ("ok", "10 MiB", "–"));
    }

    #[test]
    fn a_long_name_of_a_mark_is_cut_short_in_a_table() {
        assert_eq!(mark_text("nightly"), "nightly");
        assert_eq!(mark_text(&"ä".repeat(40)), format!("{}…", "ä".repeat(MOST_NAME)));
        assert_eq!(mark_text("a\u{1b}b"), "ab");
    }

    #[test]
    fn a_marker_is_meant_from_where_the_command_runs() {
        let here = std::env::current_dir().unwrap();
        assert_eq!(from_here("m").unwrap(), here.join("m").display().to_string());
        assert_eq!(from_here("/m").unwrap(), "/m");
        assert_eq!(from_here("file:m").unwrap(), format!("file:{}", here.join("m").display()));
        assert_eq!(from_here("nbd://h/e").unwrap(), "nbd://h/e");
    }
}
