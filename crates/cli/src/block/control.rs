//! The commands that ask a running `larder block serve`, over its control socket.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use larder_base::ByteSize;
use larder_block::cache::{Explanation, SlotOf};
use larder_block::control::client::{self, ClientError};
use larder_block::control::protocol::{Progress, Request};
use larder_block::control::status::{Counts, FaceStatus, Status, VolumeStatus};
use larder_runtime::latency::Percentiles;
use serde_json::Value;

use super::flush::{self, BackArgs};
use crate::error::CliError;
use crate::progress;
use crate::table::Columns;

/// Where the daemon listens, and how to answer.
#[derive(Debug, clap::Args)]
pub(crate) struct Daemon {
    /// The daemon's control socket [default: block.sock in the state directory]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// The daemon's state directory [default: /var/lib/larder for root, else ~/.local/state/larder]
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Seconds for the daemon to answer, or to begin with what may take long
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    answer_within: u64,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
}

/// The control socket of a daemon with this state directory.
pub(super) fn default_socket(state_dir: &std::path::Path) -> PathBuf {
    state_dir.join("block.sock")
}

impl Daemon {
    /// Whether the answer is wanted in JSON.
    pub(super) fn json(&self) -> bool {
        self.json
    }

    /// Asks, shows how far it is, and returns the answer.
    pub(super) fn ask(&self, request: &Request) -> Result<Value, CliError> {
        let path = match &self.control {
            Some(path) => path.clone(),
            None => default_socket(&super::serve::state_dir(self.state_dir.as_ref())),
        };
        let mut bar = None;
        let waiting = progress::Waiting::begin("the daemon has not answered yet");
        let begun = Instant::now();
        let mut show = |p: &Progress| {
            // (Word that it has begun says nothing else.)
            if *p == Progress::default() {
                return;
            }
            // Where there is something to count, the bar's lines say how far it is, but the first time.
            if p.total == 0 && !p.what.is_empty() {
                waiting.hear(&p.what);
            } else if begun.elapsed() < progress::SILENT {
                let share = p.done as f64 / p.total.max(1) as f64;
                let left = progress::time_left(share, begun.elapsed());
                let comma = if left.is_empty() { "" } else { ", " };
                waiting.hear(&format!("{}{comma}{left}", p.what));
            }
            let bar = bar.get_or_insert_with(|| progress::bar(p.total.max(1)));
            bar.set_length(p.total.max(1));
            bar.set_position(p.done);
            bar.set_message(p.what.clone());
        };
        let within = Some(Duration::from_secs(self.answer_within));
        let outcome = client::ask_within(&path, request, within, &mut show);
        drop(waiting);
        if let Some(bar) = bar {
            bar.finish_and_clear();
        }
        outcome.map_err(|e| match e {
            ClientError::Refused { usage: true, .. } => CliError::Usage(e.to_string()),
            e => CliError::Runtime(e.to_string()),
        })
    }

    /// Asks, and prints the answer: as JSON if that is wanted, else by `people`.
    pub(super) fn print(
        &self,
        request: &Request,
        people: impl FnOnce(&Value) -> Result<String, CliError>,
    ) -> Result<(), CliError> {
        self.show(&self.ask(request)?, people)
    }

    /// Prints an answer.
    pub(super) fn show(
        &self,
        answer: &Value,
        people: impl FnOnce(&Value) -> Result<String, CliError>,
    ) -> Result<(), CliError> {
        let text = if self.json {
            serde_json::to_string_pretty(answer)
                .map_err(|e| CliError::Runtime(format!("the answer cannot be printed: {e}")))?
        } else {
            people(answer)?
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", text.trim_end())
            .map_err(|e| CliError::Runtime(format!("standard output: {e}")))
    }
}

/// An answer in the form that this version gives it.
pub(super) fn read<T: serde::de::DeserializeOwned>(answer: &Value) -> Result<T, CliError> {
    serde_json::from_value(answer.clone()).map_err(|e| {
        CliError::Runtime(format!(
            "the daemon's answer is not understood ({e}): is it of another version?"
        ))
    })
}

/// Shows what a running daemon has done: hit ratios, latencies, bytes to flash, volumes
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    daemon: Daemon,
}

/// Serves another volume, from a cold cache unless its store is known to be unchanged
#[derive(Debug, clap::Args)]
pub(crate) struct AttachArgs {
    /// The volume and its store, as for `larder block serve --volume`
    #[arg(value_name = "NAME=URI")]
    volume: String,
    /// It is only read: exported as such, and writes are refused
    #[arg(long)]
    read_only: bool,
    /// Its store cannot tell whether it was changed while it was not attached (block devices, NBD): you vouch that it was
    /// not. What is cached of it is used
    #[arg(long)]
    trust_unchanged: bool,
    /// What its store has answered is durable, you vouch: it is not flushed. For one that offers no FLUSH and is to write back (NBD)
    #[arg(long)]
    store_durable: bool,
    /// Wait no longer than this, whatever for; then the volume is not attached. None: as long as it takes
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    #[command(flatten)]
    back: BackArgs,
    #[command(flatten)]
    daemon: Daemon,
}

/// Puts a volume aside in good order: waits for its clients to go, makes it durable, remembers what is cached of it
#[derive(Debug, clap::Args)]
pub(crate) struct DetachArgs {
    /// The volume
    volume: String,
    /// Close its clients' connections instead of waiting for them to go
    #[arg(long)]
    disconnect: bool,
    /// Wait no longer than this, whatever for; then the volume stays attached. None: clients are waited for, and what comes to a
    /// store that is reached; all else for 30 s
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    /// Of a volume that writes back: leave what is dirty in the cache, instead of bringing it to the store. Attach it with this
    /// cache again, on this host or another; until then no cache serves it
    #[arg(long)]
    keep_dirty: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Drops every cached line of a volume; one that is not attached is forgotten too
///
/// A daemon that records (--record) does not forget a volume: a recording cannot express it. Lines of an attached volume can
/// be dropped while it records.
#[derive(Debug, clap::Args)]
pub(crate) struct DropArgs {
    /// The volume
    volume: String,
    #[command(flatten)]
    daemon: Daemon,
}

/// Uses a cache again that was given up because its device failed, when that works again: it begins with nothing in it, and
/// volumes are served all the while
#[derive(Debug, clap::Args)]
pub(crate) struct TakeBackArgs {
    /// Wait no longer than this, whatever for; then the cache stays out of use. None: up to 60 s for stores to be made durable and
    /// 20 s with clients waiting
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=86_400))]
    timeout: Option<u64>,
    #[command(flatten)]
    daemon: Daemon,
}

/// Says whether a block is cached and where, or what keeps it from being
#[derive(Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// The volume
    volume: String,
    /// Logical block address: sectors of 512 bytes; with --byte, or with a unit (1g, 8m), bytes
    lba: String,
    /// The address is in bytes
    #[arg(long)]
    byte: bool,
    #[command(flatten)]
    daemon: Daemon,
}

pub(crate) fn status(args: &StatusArgs) -> Result<(), CliError> {
    args.daemon.print(&Request::Status {}, |answer| Ok(status_text(&read(answer)?)))
}

pub(crate) fn attach(args: &AttachArgs) -> Result<(), CliError> {
    let (volume, uri) = args.volume.split_once('=').ok_or_else(|| {
        CliError::Usage(format!(
            "'{}' is not a volume: write NAME=URI, as in disk=file:/srv/disk.img",
            args.volume
        ))
    })?;
    let request = Request::Attach {
        volume: volume.to_owned(),
        uri: from_here(uri)?,
        read_only: args.read_only,
        trust_unchanged: args.trust_unchanged,
        store_durable: args.store_durable,
        back: args.back.said()?,
        seconds: args.timeout,
    };
    args.daemon.print(&request, |answer| {
        let bytes = ByteSize(answer["bytes"].as_u64().unwrap_or(0));
        let back = answer["write"].as_str().map_or_else(String::new, |mode| format!(", {mode}"));
        Ok(match answer["why_cold"].as_str() {
            None => format!("{volume}: {bytes}{back}, warm: what was cached of it is used"),
            Some(why) => format!("{volume}: {bytes}{back}, cold: {why}"),
        })
    })
}

/// The daemon may run in another directory: a relative path is meant from this one.
pub(super) fn from_here(uri: &str) -> Result<String, CliError> {
    let Some(path) = uri.strip_prefix("file:").filter(|p| !p.is_empty() && !p.starts_with('/'))
    else {
        return Ok(uri.to_owned());
    };
    let path = std::path::absolute(path)
        .map_err(|e| CliError::Runtime(format!("'{uri}': the working directory: {e}")))?;
    Ok(format!("file:{}", path.display()))
}

pub(crate) fn detach(args: &DetachArgs) -> Result<(), CliError> {
    let request = Request::Detach {
        volume: args.volume.clone(),
        disconnect: args.disconnect,
        seconds: args.timeout,
        keep_dirty: args.keep_dirty,
    };
    args.daemon.print(&request, |answer| {
        let name = &args.volume;
        let moved = moved(answer);
        if let Some(kept) = answer["kept_dirty_bytes"].as_u64() {
            return Ok(format!(
                "{name}: detached; {} that its store lacks stay in the cache: attach it with this cache device; no other cache serves it{moved}",
                ByteSize(kept)
            ));
        }
        Ok(if answer["was_waiting"] == true {
            format!("{name}: its store is not waited for any more; it was not reached, and nothing was written to it")
        } else if answer["durable"] == true {
            format!("{name}: detached, and durable in its store{moved}")
        } else {
            format!(
                "{name}: detached; its store could not be made durable in time: what was written to it last will be read \
                 from it, not from the cache{moved}"
            )
        })
    })
}

/// What is to be said behind the rest of a store that is not where it was named any more.
pub(super) fn moved(answer: &Value) -> String {
    answer["store_moved"].as_str().map_or_else(String::new, |what| format!("\n  ATTENTION: {what}"))
}

pub(crate) fn drop_lines(args: &DropArgs) -> Result<(), CliError> {
    args.daemon.print(&Request::Drop { volume: args.volume.clone() }, |answer| {
        let gone = if answer["forgotten"] == true {
            "; it was not attached, and is forgotten"
        } else {
            ""
        };
        Ok(format!("{}: {} lines dropped{gone}", args.volume, answer["dropped_lines"]))
    })
}

pub(crate) fn take_back(args: &TakeBackArgs) -> Result<(), CliError> {
    args.daemon.print(&Request::TakeBack { seconds: args.timeout }, |answer| {
        let mut text = "the cache is used again, and begins with nothing in it".to_owned();
        let through = answer["through"].as_array().into_iter().flatten();
        let through: Vec<_> = through.filter_map(|name| name.as_str()).collect();
        if !through.is_empty() {
            text += "; written through until `larder block write NAME back:ORDER` says otherwise: ";
            text += &through.join(", ");
        }
        Ok(text)
    })
}

pub(crate) fn explain(args: &ExplainArgs) -> Result<(), CliError> {
    let offset = address(&args.lba, args.byte)?;
    let request = Request::Explain { volume: args.volume.clone(), offset };
    args.daemon.print(&request, |answer| Ok(explanation_text(&read(answer)?)))
}

/// The byte that is meant: a number alone is one of a sector, unless bytes are asked for.
fn address(text: &str, bytes: bool) -> Result<u64, CliError> {
    let offset = match text.parse::<u64>() {
        Ok(sector) if !bytes => sector.checked_mul(512),
        _ => text.parse::<ByteSize>().ok().map(|size| size.0),
    };
    offset.ok_or_else(|| {
        CliError::Usage(format!(
            "'{text}' is no address: write a sector's number, or bytes with a unit, as in 8m or 1g"
        ))
    })
}

fn explanation_text(e: &Explanation) -> String {
    let mut rows: Vec<(&str, String)> = Vec::new();
    rows.push((
        "line",
        format!("bytes {} to {} of {}", e.line.offset, e.line.offset + e.line.bytes, e.volume),
    ));
    rows.push(match (e.slot, e.device_offset) {
        (Some(SlotOf { shard, slot }), Some(at)) => {
            let since = match e.cached_for_seconds {
                Some(s) => format!("for {}", duration(s)),
                None => "since before the fills that are remembered".to_owned(),
            };
            (
                "cached",
                format!(
                    "yes, {since}: slot {slot} of shard {shard}, at byte {at} of the cache device"
                ),
            )
        }
        _ => ("cached", "no".to_owned()),
    });
    if let Some(dirty) = &e.dirty {
        let since = dirty.for_seconds.map_or_else(String::new, |s| format!(" for {}", duration(s)));
        let said = match dirty.bytes {
            0 => "no: its store has all of it".to_owned(),
            n => {
                format!("{} of it{since}: they are in the write log, not in its store", ByteSize(n))
            }
        };
        rows.push(("dirty", said));
    }
    rows.push(("holds", e.kind.clone()));
    rows.push(("selected", e.selection.clone()));
    rows.push(("a read that misses", e.admission.clone()));
    rows.push(("share", e.share.clone()));
    rows.push(("write budget", e.budget.clone()));
    rows.push(("verdicts so far", verdicts(&e.verdicts)));
    two_columns(rows)
}

fn verdicts(all: &Counts) -> String {
    all.iter().map(|(n, c)| format!("{} {c}", n.replace('_', " "))).collect::<Vec<_>>().join(", ")
}

/// `n` of something that has a plain plural.
pub(super) fn quantity(n: u64, what: &str) -> String {
    if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") }
}

pub(super) fn two_columns(rows: Vec<(&str, String)>) -> String {
    folded(&rows, crate::table::width())
}

/// Names and what there is to say, folded between words where a width is given.
fn folded(rows: &[(&str, String)], columns: Option<usize>) -> String {
    let names = rows.iter().map(|r| r.0.len()).max().unwrap_or(0);
    let room = columns.map_or(usize::MAX, |c| c.saturating_sub(names + 2).max(20));
    let mut out = String::new();
    for (name, text) in rows {
        let (mut line, mut used, mut name) = (String::new(), 0, *name);
        for word in text.split(' ') {
            let long = word.chars().count();
            if used > 0 && used + 1 + long > room {
                out.push_str(&format!("{name:names$}  {line}\n"));
                (line, used, name) = (String::new(), 0, "");
            } else if !line.is_empty() {
                line.push(' ');
                used += 1;
            }
            line.push_str(word);
            used += long;
        }
        out.push_str(&format!("{name:names$}  {line}\n"));
    }
    out
}

pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86400.0),
    }
}

fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".into(), |s| format!("{:.1} %", 100.0 * s))
}

/// What there is to say of volumes that are known and not attached.
const PUT_ASIDE: &str = "these are not attached: their lines stay until other volumes need the room, and are used again when the \
                         volume is attached, if it was detached in good order and its store is unchanged";

/// And of those that can be forgotten.
const FORGOTTEN: &str = "`larder block drop NAME` forgets one of which nothing is dirty";

/// And of those that were put aside with what is dirty.
const CARRIED: &str = "what is dirty is in the write log of this cache alone: attach the volume with it, on any host, with `--write \
                       back:ORDER`; no other cache serves it";

/// The status as people read it.
pub(super) fn status_text(s: &Status) -> String {
    status_in(s, crate::table::width())
}

/// The same in lines of so many characters, where a width is given.
fn status_in(s: &Status, columns: Option<usize>) -> String {
    let c = &s.cache;
    let f = &s.flash;
    let bytes = |lines: u64| ByteSize(lines * u64::from(c.line_bytes));
    let mut rows: Vec<(&str, String)> = Vec::new();
    let state = match &c.given_up {
        None => format!("in use, at the start {}", c.warmth),
        Some(why) => format!("OUT OF USE, volumes are in pass-through: {why}"),
    };
    rows.push(("cache", format!("{}: {state}", c.path)));
    rows.push((
        "",
        format!(
            "{} of {} lines of {} ({}), {}, {}, {}, admission {}",
            c.lines,
            c.slots,
            ByteSize(u64::from(c.line_bytes)),
            percent((c.slots > 0).then(|| c.lines as f64 / c.slots as f64)),
            c.placement,
            c.replacement,
            s.writes(),
            c.admission,
        ),
    ));
    rows.push(("up", duration(s.uptime_seconds as f64)));
    rows.push((
        "hit ratio",
        format!(
            "{} of reads answered without asking the store or waiting for it",
            percent(s.hit_ratio)
        ),
    ));
    let latency = |p: &Percentiles| match p.samples {
        0 => "–".to_owned(),
        n => format!("p50 {:.0} µs, p99 {:.0} µs, max {:.0} µs, of {n}", p.p50, p.p99, p.max),
    };
    rows.push(("hits", latency(&s.latency.hit)));
    rows.push(("misses", latency(&s.latency.miss)));
    rows.push(("writes", latency(&s.latency.write)));
    let clwa = f.clwa.map_or_else(|| "–".into(), |c| format!("{c:.3}"));
    rows.push((
        "flash",
        format!(
            "{} written, for {} written by clients and {} brought by reads: CLWA {clwa}",
            ByteSize(f.bytes_written),
            ByteSize(f.client_bytes),
            ByteSize(f.read_fill_bytes),
        ),
    ));
    let budget = match (f.budget_bytes_per_second, f.budget_available_bytes) {
        (Some(rate), Some(left)) => {
            let life = f.expected_life_years.map_or_else(String::new, |y| {
                format!("; at the rate since the start the drive lasts {y:.1} years")
            });
            format!("{}/s, {} may be written now{life}", ByteSize(rate as u64), ByteSize(left))
        }
        _ => "none: --endurance-tbw or --endurance-dwpd sets one".to_owned(),
    };
    rows.push(("write budget", budget));
    if c.pinned_bytes > 0 {
        let (pinned, most) = (ByteSize(c.pinned_bytes), ByteSize(c.pinned_most_bytes));
        rows.push(("pinned", format!("{pinned}, of at most {most}")));
    }
    if let Some(used) = f.drive_used_percent {
        rows.push(("drive", format!("{used} % of its rated life used, as it reports")));
    }
    rows.push(("verdicts", verdicts(&s.verdicts)));
    rows.push((
        "connections",
        format!(
            "{} open, {} accepted, {} requests",
            s.connections.open, s.connections.accepted, s.connections.requests
        ),
    ));
    if let Some(r) = &s.recording {
        let state = match &r.ended {
            None => "goes on".to_owned(),
            Some(why) => format!("ENDED: {why}"),
        };
        rows.push((
            "recording",
            format!("{} in {} records, {state}", ByteSize(r.bytes), r.records),
        ));
    }
    for alarm in &s.alarms {
        rows.push(("ALARM", alarm.clone()));
    }
    let mut out = folded(&rows, columns);
    out.push('\n');
    let head = ["volume", "size", "cached", "share", "hit ratio", "reads", "writes"];
    out.push_str(&table(columns, &head, 1, s.volumes.iter().map(|v| volume_row(v, &bytes))));
    out.push_str("\n\n");
    let head = ["volume", "rule", "store", "clients", "errors"];
    out.push_str(&table(columns, &head, 3, s.volumes.iter().map(store_row)));
    out.push_str("\n\n");
    let back: Vec<_> = s.volumes.iter().filter_map(flush::row).collect();
    if !back.is_empty() {
        out.push_str(&table(columns, &flush::HEAD, flush::WORDS, back.into_iter()));
        out.push_str("\n\n");
    }
    if !s.put_aside.is_empty() {
        let carried = s.put_aside.iter().any(|v| v.carried_bytes.is_some());
        let mut head = vec!["put aside", "size", "cached"];
        head.extend(carried.then_some("dirty"));
        let rows = s.put_aside.iter().map(|v| {
            let cached = v.lines.map_or_else(|| "–".into(), |lines| bytes(lines).to_string());
            let dirty = v.carried_bytes.map_or_else(|| "–".into(), |n| ByteSize(n).to_string());
            let mut row = vec![v.name.clone(), ByteSize(v.bytes).to_string(), cached];
            row.extend(carried.then_some(dirty));
            row
        });
        out.push_str(&table(columns, &head, 1, rows));
        out.push('\n');
        let all = s.put_aside.iter().all(|v| v.carried_bytes.is_some());
        let more = if all { String::new() } else { format!("; {FORGOTTEN}") };
        out.push_str(&folded(&[("", format!("{PUT_ASIDE}{more}"))], columns));
        if carried {
            out.push_str(&folded(&[("", CARRIED.to_owned())], columns));
        }
        out.push('\n');
    }
    if !s.faces.is_empty() {
        let faces: Vec<_> = s.faces.iter().map(|f| (&*f.address, face_text(f))).collect();
        out.push_str(&folded(&faces, columns));
        out.push('\n');
    }
    let stores: Vec<_> = s.volumes.iter().map(|v| (v.name.as_str(), v.uri.clone())).collect();
    out.push_str(&folded(&stores, columns));
    out
}

/// A disk of a guest or of this host.
fn face_text(f: &FaceStatus) -> String {
    let what = f.device.as_deref().unwrap_or("a guest's disk");
    let mut text = format!("volume {}: {what}", f.volume);
    if f.connected {
        text.push_str(&format!(
            " of {}, {} of {}",
            ByteSize(f.bytes),
            quantity(f.queues, "queue"),
            f.queue_size,
        ));
        if !f.features.is_empty() {
            text.push_str(&format!(", {}", f.features.join(" ")));
        }
    } else {
        text.push_str(", not there now");
    }
    text.push_str(&format!("; {}", quantity(f.requests, "request")));
    for (count, how) in [(f.failed, "failed"), (f.refused, "refused"), (f.resumed, "done again")] {
        if count > 0 {
            text.push_str(&format!(", {count} {how}"));
        }
    }
    text
}

/// Rows under a head, the first columns of words, the others of numbers.
fn table(
    columns: Option<usize>,
    head: &[&str],
    words: usize,
    rows: impl Iterator<Item = Vec<String>>,
) -> String {
    let mut table = Columns::new(1, words, head.iter().copied());
    rows.for_each(|row| table.row(row));
    table.text(columns).trim_end_matches('\n').to_owned()
}

fn volume_row(v: &VolumeStatus, bytes: &dyn Fn(u64) -> ByteSize) -> Vec<String> {
    let share = match (v.floor, v.ceiling) {
        (0, None) => "–".to_owned(),
        (floor, ceiling) => {
            format!(
                "{}..{}",
                bytes(floor),
                ceiling.map_or_else(String::new, |c| bytes(c).to_string())
            )
        }
    };
    vec![
        v.name.clone(),
        ByteSize(v.bytes).to_string(),
        if v.pass_through { "pass-through".into() } else { bytes(v.lines).to_string() },
        share,
        percent(v.hit_ratio()),
        v.reads.to_string(),
        v.writes.to_string(),
    ]
}

fn store_row(v: &VolumeStatus) -> Vec<String> {
    let mut rule = v.rule.clone();
    if v.selected > 0 {
        rule.push_str(&format!(" + {}", v.selected));
    }
    let mut state = match v.store.since_seconds {
        Some(since) => format!("{} for {}", v.store.state, duration(since as f64)),
        None => v.store.state.clone(),
    };
    if v.store.flush == "missing" {
        state.push_str(", no FLUSH");
    }
    vec![v.name.clone(), rule, state, v.clients.to_string(), v.store.failures.to_string()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_block::control::status::{BackVolume, StoreStatus};

    #[test]
    fn addresses() {
        let table =
            [("3", false, 1536), ("3", true, 3), ("1g", false, 1 << 30), ("8m", true, 8 << 20)];
        for (text, bytes, want) in table {
            assert_eq!(address(text, bytes).unwrap(), want, "{text}");
        }
        for wrong in ["x", "", "-1", "99999999999999999999", "18446744073709551615"] {
            let Err(CliError::Usage(said)) = address(wrong, false) else { panic!("{wrong}") };
            assert!(said.contains("as in 8m or 1g"), "{said}");
        }
    }

    #[test]
    fn a_status_fits_a_terminal_of_80_columns() {
        let volume = |name: &str| VolumeStatus {
            name: name.into(),
            uri: "nbd://filer.example:10809/exports-vm1".into(),
            bytes: 2 << 40,
            lines: 123_456_789,
            floor: 12_345_678,
            ceiling: Some(23_456_789),
            reads: 123_456_789,
            read_hits: 99_999_999,
            writes: 987_654_321,
            clients: 12,
            rule: "by-policy".into(),
            selected: 3,
            store: StoreStatus {
                state: "lost".into(),
                since_seconds: Some(100),
                ..StoreStatus::default()
            },
            write_back: Some(BackVolume {
                mode: "back:ordered,grain=completion,destage=periodic:3600".into(),
                dirty_bytes: 123_456_789_012,
                held_bytes: 223_456_789_012,
                bound_bytes: 4 << 40,
                oldest_seconds: Some(59.5),
                destage_bytes_per_second: 123_456_789.0,
                seconds_left: Some(1800.0),
                generation: 17,
                ..BackVolume::default()
            }),
            ..VolumeStatus::default()
        };
        let mut status = Status { volumes: vec![volume("vm1"), volume("db")], ..Status::default() };
        status.cache.line_bytes = 4096;
        let guests = FaceStatus {
            face: "vhost-user-blk".into(),
            address: "vhost:/run/larder.vm1,volume=vm1".into(),
            volume: "vm1".into(),
            connected: true,
            queues: 4,
            queue_size: 128,
            features: vec!["flush".into(), "discard".into()],
            bytes: 2 << 40,
            requests: 123_456_789,
            refused: 1,
            ..FaceStatus::default()
        };
        let text = face_text(&guests);
        assert!(
            text.contains("of 2 TiB, 4 queues of 128, flush discard; 123456789 requests"),
            "{text}"
        );
        assert!(text.ends_with(", 1 refused"), "{text}");
        let gone =
            FaceStatus { device: Some("/dev/ublkb0".into()), connected: false, ..guests.clone() };
        assert!(face_text(&gone).contains("/dev/ublkb0, not there now; "));
        let shown = status_text(&Status { faces: vec![guests, gone], ..status.clone() });
        assert!(shown.contains("vhost:/run/larder.vm1"), "{shown}");
        for line in status_in(&status, Some(80)).lines().skip_while(|l| !l.contains("volume ")) {
            assert!(line.trim_end().chars().count() <= 80, "{line}");
        }
        let rows = [("cache", "word ".repeat(40)), ("", "x".repeat(90)), ("up", "1 s".into())];
        let text = folded(&rows, Some(80));
        assert!(text.lines().filter(|l| !l.contains("xx")).all(|l| l.len() <= 80), "{text}");
        assert!(text.contains("cache  word") && text.contains("\n       word"), "{text}");
        assert_eq!(folded(&rows, None).lines().count(), 3);
    }
}
