//! `larder block prefetch`, `check` and `resize`.

use std::io::Write;
use std::path::{Path, PathBuf};

use larder_base::ByteSize;
use larder_block::cache::inspect::{self, Inspection};
use larder_block::cache::{CacheError, CheckFault, CheckReport, Prefetched};
use larder_block::control::protocol::Request;
use larder_runtime::DeviceError;

use super::control::{Daemon, moved, quantity, read, two_columns};
use super::format::failed;
use crate::error::CliError;
use crate::progress;

/// Shown under the flags of `check`.
const CHECK_EXAMPLES: &str = "\
Examples:
  # What a running daemon has cached, against its checksums and the stores:
  larder block check --compare
  # A cache device that is not in use; it is only read. Dirty data in its write log
  # is verified too, without the stores:
  larder block check /flash/cache

Ends with 0 if nothing is wrong, with 1 if something is.";

/// Brings what is not cached of a volume into the cache, past admission; gives way to clients. Ctrl-C ends it
#[derive(Debug, clap::Args)]
pub(crate) struct PrefetchArgs {
    /// The volume
    volume: String,
    /// Bytes START..END of it (1g..2g, ..4m, 8m..). None: all of it, as far as the cache has room
    #[arg(value_name = "RANGE")]
    ranges: Vec<String>,
    /// Ranges are in sectors of 512 bytes
    #[arg(long)]
    lba: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Looks whether what is cached has its checksum, and on demand whether it is what the stores hold
#[derive(Debug, clap::Args)]
#[command(after_help = CHECK_EXAMPLES)]
pub(crate) struct CheckArgs {
    /// A cache device that is not in use, which is only read. None: what a running daemon has cached
    path: Option<PathBuf>,
    /// Only lines of this volume
    #[arg(long, value_name = "NAME", conflicts_with = "path")]
    volume: Option<String>,
    /// Compare lines with their stores too
    #[arg(long, conflicts_with = "path")]
    compare: bool,
    /// Drop what is wrong: it is read from its store from then on
    #[arg(long, conflicts_with = "path")]
    drop: bool,
    #[command(flatten)]
    daemon: Daemon,
}

/// Gives a volume the size that its store has grown to, or grows both; clients see it when they connect again
#[derive(Debug, clap::Args)]
pub(crate) struct ResizeArgs {
    /// The volume
    volume: String,
    /// Make its file, or its volume in an object store, this large first. None: the store has grown already
    size: Option<ByteSize>,
    #[command(flatten)]
    daemon: Daemon,
}

/// `n` of something, and that they are.
fn quantity_is(n: u64, what: &str) -> String {
    format!("{} {}", quantity(n, what), if n == 1 { "is" } else { "are" })
}

pub(crate) fn resize(args: &ResizeArgs) -> Result<(), CliError> {
    let request = Request::Resize { volume: args.volume.clone(), bytes: args.size.map(|s| s.0) };
    args.daemon.print(&request, |answer| {
        let bytes = |name: &str| answer[name].as_u64().unwrap_or(0);
        let (before, now) = (bytes("bytes_before"), bytes("bytes"));
        if before == now {
            return Ok(format!("{}: {} as before{}", args.volume, ByteSize(now), moved(answer)));
        }
        let told = bytes("told");
        let again = match bytes("clients").saturating_sub(told) {
            0 => String::new(),
            1 => "; 1 client keeps the old size until it connects again".to_owned(),
            n => format!("; {n} clients keep the old size until they connect again"),
        };
        let clients = match told {
            0 => again,
            n => format!("; {} told of it{again}", quantity_is(n, "disk")),
        };
        let cold = match answer["moved"].as_bool() {
            Some(true) => {
                "; another volume lies right behind it, so it has moved, and nothing of it is cached"
            }
            _ => "",
        };
        Ok(format!(
            "{}: grown from {} to {}{cold}{clients}{}",
            args.volume,
            ByteSize(before),
            ByteSize(now),
            moved(answer)
        ))
    })
}

pub(crate) fn prefetch(args: &PrefetchArgs) -> Result<(), CliError> {
    let ranges = super::select::ranges(&args.daemon, &args.volume, &args.ranges, args.lba)?;
    let request = Request::Prefetch { volume: args.volume.clone(), ranges };
    let answer = args.daemon.ask(&request)?;
    let p: Prefetched = read(&answer)?;
    args.daemon.show(&answer, |_| {
        let bytes = |lines: u64| ByteSize(lines * u64::from(p.line_bytes));
        let rate = bytes(p.brought).0 as f64 / p.seconds.max(0.001);
        let mut text = format!(
            "{}: {} brought in {:.1} s ({}/s), {} were cached already",
            args.volume,
            bytes(p.brought),
            p.seconds,
            ByteSize(rate as u64),
            bytes(p.cached_before)
        );
        for (lines, why) in [
            (p.never, "is selected never to be cached"),
            (p.budget, "is beyond the write budget"),
            (p.no_place, "found no place that is not kept by others, had no room on the file system, or lost its place again"),
            (p.failed, "could not be read from the store"),
        ] {
            if lines > 0 {
                text.push_str(&format!("\n  {} {why}", bytes(lines)));
            }
        }
        if p.full {
            text.push_str(
                "\n  it went no further: the cache, or the volume's ceiling, has no room for more",
            );
        }
        if p.interrupted {
            text.push_str("\n  it was interrupted: what was brought stays");
        }
        Ok(text)
    })?;
    outcome(&args.volume, &p)
}

/// The failure that a prefetch ends with, where it has not done what it was asked for: details were printed.
fn outcome(volume: &str, p: &Prefetched) -> Result<(), CliError> {
    let bytes = |lines: u64| ByteSize(lines * u64::from(p.line_bytes));
    let why = if p.interrupted {
        "the prefetch was interrupted: not everything was asked for".to_owned()
    } else if p.failed > 0 {
        format!(
            "{} could not be read from its store: see to the store and prefetch again",
            bytes(p.failed)
        )
    } else if p.brought > 0 || p.cached_before > 0 {
        // Asked for again, it finds what it brought before.
        return Ok(());
    } else if p.full || p.no_place > 0 {
        "nothing was brought: no room in the cache; `larder block status` shows what is pinned, and shares".to_owned()
    } else if p.budget > 0 {
        "nothing was brought: the write budget has nothing left; try again later".to_owned()
    } else {
        return Ok(());
    };
    Err(CliError::Runtime(format!("volume '{volume}': {why}")))
}

fn faults(all: &[CheckFault]) -> String {
    let line = |f: &CheckFault| {
        let of = if f.volume.is_empty() { "no volume that is attached" } else { &f.volume };
        format!(
            "  line at byte {} of {of}, at byte {} of the device: {}\n",
            f.offset, f.device_offset, f.what
        )
    };
    all.iter().map(line).collect()
}

/// The failure that `check` ends with, if it found something: what it is was printed.
fn verdict(faulty: u64, interrupted: bool) -> Result<(), CliError> {
    if faulty > 0 {
        return Err(CliError::Runtime(format!("{} found", quantity(faulty, "fault"))));
    }
    match interrupted {
        true => Err(CliError::Runtime("interrupted: not everything was looked at".to_owned())),
        false => Ok(()),
    }
}

pub(crate) fn check(args: &CheckArgs) -> Result<(), CliError> {
    if let Some(path) = &args.path {
        return check_device(path, args.daemon.json());
    }
    let request =
        Request::Check { volume: args.volume.clone(), compare: args.compare, drop: args.drop };
    let answer = args.daemon.ask(&request)?;
    let found: CheckReport = read(&answer)?;
    args.daemon.show(&answer, |_| Ok(report_text(&found, args)))?;
    verdict(found.faulty(), found.interrupted)
}

fn report_text(r: &CheckReport, args: &CheckArgs) -> String {
    let bytes = |lines: u64| ByteSize(lines * u64::from(r.line_bytes));
    let mut text = format!(
        "{} looked at in {:.1} s: {} without their checksum, {} unreadable",
        bytes(r.lines),
        r.seconds,
        quantity(r.corrupt, "line"),
        r.unreadable
    );
    if args.compare {
        text.push_str(&format!(
            "; {} compared, {} differ",
            bytes(r.compared),
            quantity(r.differing, "line")
        ));
        if r.unanswered > 0 {
            text.push_str(&format!(
                ", {} not compared: the store did not answer",
                bytes(r.unanswered)
            ));
        }
    }
    if r.unattached > 0 {
        text.push_str(&format!("; {} are of volumes that are not attached", bytes(r.unattached)));
    }
    if r.dropped > 0 {
        text.push_str(&format!("; {} dropped", quantity(r.dropped, "line")));
    }
    text.push('\n');
    text + &faults(&r.faults)
}

/// A device that is not in use.
fn check_device(path: &Path, json: bool) -> Result<(), CliError> {
    if !path.exists() {
        return Err(CliError::Usage(format!(
            "'{}': there is no such file or device: name a cache device",
            path.display()
        )));
    }
    let mut bar = None;
    let mut show = |done: u64, total: u64| {
        let bar = bar.get_or_insert_with(|| {
            let bar = progress::bar(total.max(1));
            bar.set_message("lines looked at");
            bar
        });
        bar.set_position(done);
        true
    };
    let found = inspect::inspect(path, &mut show);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let found = found.map_err(|e| {
        let more = match &e {
            CacheError::Device(DeviceError::InUse { .. }) => {
                "; what a running daemon has cached is looked at by `larder block check --state-dir DIR`, with the daemon's state directory"
            }
            _ => "",
        };
        match failed(e) {
            CliError::Runtime(text) => CliError::Runtime(format!("{text}{more}")),
            e => e,
        }
    })?;
    let text = match json {
        true => serde_json::to_string_pretty(&found)
            .map_err(|e| CliError::Runtime(format!("the answer cannot be printed: {e}")))?,
        false => inspection_text(&found),
    };
    writeln!(std::io::stdout().lock(), "{}", text.trim_end())
        .map_err(|e| CliError::Runtime(format!("standard output: {e}")))?;
    verdict(found.faulty(), found.interrupted)
}

fn inspection_text(i: &Inspection) -> String {
    let bytes = |lines: u64| ByteSize(lines * u64::from(i.line_bytes));
    let damaged = |n: u64, what: &str| match n {
        0 => "whole".to_owned(),
        n => format!("{} DAMAGED", quantity(n, what)),
    };
    let ended = match i.clean {
        true => "in good order",
        false => "cut short: a map in memory may be ahead of what is looked at here",
    };
    let line = ByteSize(u64::from(i.line_bytes));
    let mut rows = vec![
        ("cache", format!("{}: {}, {} lines of {line}", i.path, i.placement, i.slots)),
        ("last run ended", ended.to_owned()),
        ("superblock", damaged(i.superblocks_damaged, "copy").replace("copys", "copies")),
        ("snapshot", damaged(i.snapshot_pages_damaged, "page")),
        ("log", format!("{} records{}", i.records, if i.log_gap { ", and a GAP" } else { "" })),
        ("write log", i.write_log_bytes.map_or_else(|| "none".into(), |n| ByteSize(n).to_string())),
        (
            "write-intent map",
            format!(
                "{}, {} marked",
                damaged(i.intent_pages_damaged, "page"),
                quantity(i.regions_marked, "region")
            ),
        ),
        (
            "lines",
            format!(
                "{} ({}): {} without their checksum, {} unreadable",
                i.lines,
                bytes(i.lines),
                i.corrupt,
                i.unreadable
            ),
        ),
    ];
    if i.in_doubt > 0 {
        let text = format!(
            "{} in regions that were being written to: not used after a power cut",
            i.in_doubt
        );
        rows.push(("", text));
    }
    if i.of_no_volume > 0 {
        rows.push(("", format!("{} of no volume: not used", i.of_no_volume)));
    }
    for v in &i.volumes {
        // (A clean stop leaves volumes as a detach does.)
        let mut state = match v.detached {
            true => "left in good order by a stop or a detach",
            false => "in use when the run ended",
        }
        .to_owned();
        let log = i.dirty_data.as_ref().and_then(|d| d.volumes.iter().find(|l| l.name == v.name));
        let nothing = log.is_some_and(|l| l.sequences.is_none() && !l.gap && l.lost_bytes == 0);
        if let Some(back) = &v.write_back {
            let holds = if back.carried {
                "PUT ASIDE WITH WHAT ITS STORE LACKS: attach it with this cache, on any host"
            } else if back.dirty && nothing {
                "it was not detached, and nothing of it is dirty: served with this cache again, its marker becomes clean"
            } else if back.dirty {
                "the write log MAY HOLD WHAT ITS STORE LACKS"
            } else {
                "its store has everything"
            };
            state.push_str(&format!(
                "; wrote back ({}), generation {}: {holds}",
                back.order, back.generation
            ));
        }
        rows.push((
            "volume",
            format!("{}: {}, {} cached, {state}", v.name, ByteSize(v.bytes), bytes(v.lines)),
        ));
    }
    if let Some(log) = &i.dirty_data {
        rows.extend(super::export::log_rows(log));
    }
    let dirty = i.dirty_data.as_ref().map_or_else(String::new, super::export::log_faults);
    two_columns(rows) + &faults(&i.faults) + &dirty
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_of_which_nothing_is_dirty_is_not_said_to_lack_anything() {
        use larder_block::cache::back::offline::{DirtyReport, DirtyVolume};
        use larder_block::cache::inspect::{InspectedBack, InspectedVolume};
        let back = InspectedBack { dirty: true, order: "ordered".into(), ..Default::default() };
        let volume =
            InspectedVolume { name: "db".into(), write_back: Some(back), ..Default::default() };
        let said = |sequences| {
            let of = DirtyVolume { name: "db".into(), sequences, ..DirtyVolume::default() };
            let log = DirtyReport { volumes: vec![of], ..DirtyReport::default() };
            let (volumes, dirty_data) = (vec![volume.clone()], Some(log));
            inspection_text(&Inspection { volumes, dirty_data, ..Inspection::default() })
        };
        assert!(!said(None).contains("MAY HOLD"), "{}", said(None));
        assert!(said(Some((1, 2))).contains("MAY HOLD"), "{}", said(Some((1, 2))));
    }

    #[test]
    fn a_prefetch_that_brought_nothing_fails_and_says_why() {
        let none = Prefetched { lines: 8, line_bytes: 4096, ..Prefetched::default() };
        let said =
            |p: Prefetched| outcome("v", &p).err().map(|e| e.to_string()).unwrap_or_default();
        assert_eq!(said(Prefetched { cached_before: 8, ..none.clone() }), "");
        assert_eq!(said(Prefetched { never: 8, ..none.clone() }), "", "it was told not to");
        assert_eq!(said(Prefetched { brought: 4, no_place: 4, ..none.clone() }), "");
        // The same once more: what fits is there.
        assert_eq!(said(Prefetched { cached_before: 4, no_place: 4, ..none.clone() }), "");
        assert_eq!(said(Prefetched { cached_before: 4, full: true, ..none.clone() }), "");
        assert_eq!(said(Prefetched { cached_before: 4, budget: 4, ..none.clone() }), "");
        assert!(said(Prefetched { no_place: 8, ..none.clone() }).contains("no room"));
        assert!(said(Prefetched { full: true, ..none.clone() }).contains("no room"));
        assert!(said(Prefetched { budget: 8, ..none.clone() }).contains("write budget"));
        assert!(
            said(Prefetched { brought: 7, failed: 1, ..none.clone() })
                .contains(&ByteSize(4096).to_string())
        );
        assert!(said(Prefetched { interrupted: true, ..none }).contains("interrupted"));
    }
}
