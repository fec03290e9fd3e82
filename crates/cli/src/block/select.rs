//! `larder block pin`, `never`, `unpin`, `rules` and `extents`.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use larder_base::ByteSize;
use larder_block::control::protocol::Request;
use larder_runtime::FileExtents;
use serde_json::{Value, json};

use super::control::{Daemon, quantity};
use crate::error::CliError;
use crate::table::Columns;

/// Bytes of a list of ranges that are read.
const MOST_LIST: u64 = 4 << 20;

/// Shown under the flags of `pin` and `never`.
const EXAMPLES: &str = "\
Examples:
  # The whole volume; its first GiB; sectors 2048 to 4095:
  larder block pin disk
  larder block pin disk 0..1g
  larder block pin disk 2048..4096 --lba
  # Swap on a partition is never cached:
  larder block never disk --partition 2
  # A file on a file system that this host has mounted from the volume:
  larder block pin disk --file /mnt/db/index
  # A file inside a guest: the guest says where it lies, the host pins that:
  ssh guest larder block extents /var/lib/db/index \\
    | larder block pin disk --ranges - --label index";

/// Which parts of a volume.
#[derive(Debug, clap::Args)]
struct Parts {
    /// The volume
    volume: String,
    /// Bytes START..END of it (1g..2g, ..4m, 8m..); a line that is partly in a range counts as a whole. None: the whole
    /// volume
    #[arg(value_name = "RANGE")]
    ranges: Vec<String>,
    /// Ranges are in sectors of 512 bytes
    #[arg(long)]
    lba: bool,
    /// A partition, by its number in the volume's GPT or MBR
    #[arg(long, value_name = "N", conflicts_with_all = ["ranges", "file", "list"])]
    partition: Option<u32>,
    /// A file on a file system that is mounted here from the volume: where it lies now
    #[arg(long, value_name = "PATH", conflicts_with_all = ["ranges", "list"])]
    file: Option<PathBuf>,
    /// A file with ranges in bytes, one a line, as `larder block extents` prints them; - for standard input
    #[arg(long = "ranges", value_name = "PATH", conflicts_with = "ranges", id = "list")]
    list: Option<PathBuf>,
    /// A name for the ranges: `unpin --label TEXT` finds them by it. Default with --file: the file's path
    #[arg(long, value_name = "TEXT", default_value = "")]
    label: String,
}

/// Caches parts of a volume always, whatever the admission policy decides, and keeps them from eviction
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PinArgs {
    #[command(flatten)]
    parts: Parts,
    #[command(flatten)]
    daemon: Daemon,
}

/// Never caches parts of a volume, and drops what is cached of them
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct NeverArgs {
    #[command(flatten)]
    parts: Parts,
    #[command(flatten)]
    daemon: Daemon,
}

/// Removes rules that `pin` or `never` gave: those of ranges, of a label, or all rules of the volume
#[derive(Debug, clap::Args)]
pub(crate) struct UnpinArgs {
    #[command(flatten)]
    parts: Parts,
    #[command(flatten)]
    daemon: Daemon,
}

/// Lists what is selected of a volume by `pin` and `never`
#[derive(Debug, clap::Args)]
pub(crate) struct RulesArgs {
    /// The volume
    volume: String,
    #[command(flatten)]
    daemon: Daemon,
}

/// Prints where a file lies on the disk below its file system, for `larder block pin --ranges`
#[derive(Debug, clap::Args)]
pub(crate) struct ExtentsArgs {
    /// The file
    path: PathBuf,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
}

/// `START..END`, of which one may be missing: first byte, and byte after the last if there is one.
fn range(text: &str, lba: bool) -> Result<(u64, Option<u64>), CliError> {
    let wrong = |why: &str| {
        CliError::Usage(format!(
            "'{text}' is no range: {why}; write START..END, as in 1g..2g or 8m.."
        ))
    };
    let (start, end) = text.split_once("..").ok_or_else(|| wrong("it has no '..'"))?;
    let number = |text: &str| -> Result<Option<u64>, CliError> {
        if text.is_empty() {
            return Ok(None);
        }
        let number = if lba {
            text.parse().ok().and_then(|n: u64| n.checked_mul(512))
        } else {
            text.parse::<ByteSize>().ok().map(|b| b.0)
        };
        number.map(Some).ok_or_else(|| wrong(&format!("'{text}' is no address")))
    };
    let (start, end) = (number(start)?.unwrap_or(0), number(end)?);
    if end.is_some_and(|end| end <= start) {
        return Err(wrong("its end is not after its start"));
    }
    Ok((start, end))
}

/// What `larder block extents` has printed.
fn list(path: &Path) -> Result<Vec<(u64, Option<u64>)>, CliError> {
    let name = path.display();
    let mut text = String::new();
    let read = if path == Path::new("-") {
        std::io::stdin().lock().take(MOST_LIST + 1).read_to_string(&mut text)
    } else {
        std::fs::File::open(path).and_then(|f| f.take(MOST_LIST + 1).read_to_string(&mut text))
    };
    read.map_err(|e| {
        CliError::Usage(format!(
            "--ranges '{name}': {e}: name a file that `larder block extents` has written"
        ))
    })?;
    if text.len() as u64 > MOST_LIST {
        return Err(CliError::Usage(format!("'{name}' is larger than 4 MiB: name larger ranges")));
    }
    let lines = text.lines().map(|l| l.split('#').next().unwrap_or("").trim());
    let ranges: Vec<_> =
        lines.filter(|l| !l.is_empty()).map(|l| range(l, false)).collect::<Result<_, _>>()?;
    if ranges.is_empty() {
        return Err(CliError::Usage(format!(
            "'{name}' has no ranges: write one START..END a line"
        )));
    }
    Ok(ranges)
}

/// Ranges as they are asked for, first byte and bytes: where one has no end, it is the volume's.
fn closed(
    daemon: &Daemon,
    volume: &str,
    open: Vec<(u64, Option<u64>)>,
) -> Result<Vec<(u64, u64)>, CliError> {
    let mut end = 0;
    if open.iter().any(|r| r.1.is_none()) {
        let status = daemon.ask(&Request::Status {})?;
        let volumes = status["volumes"].as_array();
        let found = volumes.and_then(|all| all.iter().find(|v| v["name"] == *volume));
        end = found
            .and_then(|v| v["bytes"].as_u64())
            .ok_or_else(|| CliError::Runtime(format!("volume '{volume}': it is not attached")))?;
    }
    // What begins behind the end is refused by the daemon, which says what the volume's size is.
    let bytes =
        |(start, to): (u64, Option<u64>)| (start, to.unwrap_or(end).saturating_sub(start).max(1));
    Ok(open.into_iter().map(bytes).collect())
}

/// Ranges from the command line; none for the whole volume.
pub(super) fn ranges(
    daemon: &Daemon,
    volume: &str,
    texts: &[String],
    lba: bool,
) -> Result<Option<Vec<(u64, u64)>>, CliError> {
    if texts.is_empty() {
        return Ok(None);
    }
    let open = texts.iter().map(|r| range(r, lba)).collect::<Result<_, _>>()?;
    closed(daemon, volume, open).map(Some)
}

impl Parts {
    fn request(&self, daemon: &Daemon, rule: Option<&str>) -> Result<Request, CliError> {
        let mut label = self.label.clone();
        let mut disk_bytes = None;
        let mut open: Option<Vec<(u64, Option<u64>)>> = match &self.list {
            Some(path) => Some(list(path)?),
            None if self.ranges.is_empty() => None,
            None => Some(self.ranges.iter().map(|r| range(r, self.lba)).collect::<Result<_, _>>()?),
        };
        if let Some(path) = &self.file {
            let failed = |e: std::io::Error| {
                CliError::Usage(format!(
                    "--file '{}': {e}: name a file that is there",
                    path.display()
                ))
            };
            if label.is_empty() {
                // It may be gone, when it is to be forgotten.
                let whole = std::fs::canonicalize(path);
                let whole = if rule.is_none() {
                    whole.or_else(|_| std::path::absolute(path))
                } else {
                    whole
                };
                label = whole.map_err(failed)?.display().to_string();
            }
            if rule.is_some() {
                let found = extents(path)?;
                if found.extents.is_empty() {
                    return Err(CliError::Runtime(format!(
                        "'{}' has nothing on the disk yet: write to it first",
                        path.display()
                    )));
                }
                disk_bytes = found.disk.bytes;
                open = Some(
                    found
                        .extents
                        .iter()
                        .map(|e| (e.physical, Some(e.physical + e.bytes)))
                        .collect(),
                );
            }
        }
        if rule.is_none() && !self.label.is_empty() && (open.is_some() || self.partition.is_some())
        {
            return Err(CliError::Usage(format!(
                "--label '{}': unpin forgets either ranges or what bears a label: leave out --label, or the ranges",
                self.label
            )));
        }
        if rule.is_some() && !label.is_empty() && open.is_none() && self.partition.is_none() {
            return Err(CliError::Usage(format!(
                "--label {label}: a label is for parts of a volume: name ranges, --partition, --file or --ranges"
            )));
        }
        let ranges = open.map(|open| closed(daemon, &self.volume, open)).transpose()?;
        Ok(Request::Select {
            volume: self.volume.clone(),
            rule: rule.map(str::to_owned),
            ranges,
            partition: self.partition,
            label,
            disk_bytes,
        })
    }

    fn done(&self, what: &str, answer: &Value) -> String {
        let ranges = answer["ranges"].as_u64().unwrap_or(0);
        let of = match answer["asked_ranges"].as_u64() {
            Some(n) => quantity(n, "range"),
            None if !self.label.is_empty() || self.file.is_some() => {
                "what bears the label".to_owned()
            }
            None => "the whole volume".to_owned(),
        };
        let mut text = format!("{}: {what}: {of}", self.volume);
        if answer["changed"] == false {
            text.push_str(" (no change: that held before)");
        }
        text.push_str(&match ranges {
            0 => "; no range of it has a rule of its own".to_owned(),
            1 => "; 1 range of it has a rule of its own".to_owned(),
            n => format!("; {n} ranges of it have a rule of their own"),
        });
        if let Some(dropped) = answer["dropped_lines"].as_u64().filter(|&n| n > 0) {
            text.push_str(&format!(", {} dropped", quantity(dropped, "line")));
        }
        if let Some(warning) = answer["warning"].as_str() {
            text.push_str(&format!("\nwarning: {warning}"));
        }
        text
    }
}

fn extents(path: &Path) -> Result<FileExtents, CliError> {
    if let Err(e) = path.metadata() {
        return Err(CliError::Usage(format!(
            "'{}': {e}: name a file that is there",
            path.display()
        )));
    }
    let found = FileExtents::of(path).map_err(|e| CliError::Runtime(e.to_string()))?;
    if found.unplaced > 0 {
        // To standard error: what is printed is read by another command.
        let unplaced = ByteSize(found.unplaced);
        let name = path.display();
        let _ = writeln!(
            std::io::stderr(),
            "larder: {unplaced} of '{name}' have no place of their own (compressed, or kept with the inode): left out"
        );
    }
    Ok(found)
}

pub(crate) fn pin(args: &PinArgs) -> Result<(), CliError> {
    let request = args.parts.request(&args.daemon, Some("always"))?;
    args.daemon.print(&request, |answer| {
        Ok(args.parts.done("cached always, and kept from eviction", answer))
    })
}

pub(crate) fn never(args: &NeverArgs) -> Result<(), CliError> {
    let request = args.parts.request(&args.daemon, Some("never"))?;
    args.daemon.print(&request, |answer| Ok(args.parts.done("never cached from now on", answer)))
}

pub(crate) fn unpin(args: &UnpinArgs) -> Result<(), CliError> {
    let request = args.parts.request(&args.daemon, None)?;
    args.daemon.print(&request, |answer| {
        Ok(args.parts.done("cached as the admission policy decides", answer))
    })
}

pub(crate) fn rules(args: &RulesArgs) -> Result<(), CliError> {
    args.daemon.print(&Request::Selected { volume: args.volume.clone() }, |answer| {
        let mut table = Columns::new(1, 3, ["bytes", "rule", "label"]);
        let text = |value: &Value| value.as_str().unwrap_or("").to_owned();
        for range in answer["ranges"].as_array().into_iter().flatten() {
            let bytes = format!("{}..{}", range["start"], range["end"]);
            table.row([bytes, text(&range["rule"]), text(&range["label"])]);
        }
        let whole = text(&answer["whole"]);
        Ok(match table.is_empty() {
            true => format!("all of it: {whole}"),
            false => format!("{}\nall else: {whole}", table.to_text()),
        })
    })
}

pub(crate) fn run_extents(args: &ExtentsArgs) -> Result<(), CliError> {
    let found = extents(&args.path)?;
    let mut out = std::io::stdout().lock();
    let text = if args.json {
        let extents: Vec<Value> = found
            .extents
            .iter()
            .map(|e| json!({ "file_offset": e.logical, "start": e.physical, "bytes": e.bytes }))
            .collect();
        let all = json!({
            "file": args.path,
            "disk": found.disk.name,
            "disk_bytes": found.disk.bytes,
            "unplaced_bytes": found.unplaced,
            "extents": extents,
        });
        format!("{all:#}\n")
    } else {
        let line =
            |e: &larder_runtime::FileExtent| format!("{}..{}\n", e.physical, e.physical + e.bytes);
        let head = format!("# {} on {}\n", args.path.display(), found.disk.name);
        head + &found.extents.iter().map(line).collect::<String>()
    };
    out.write_all(text.as_bytes()).map_err(|e| CliError::Runtime(format!("standard output: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_and_nonsense_refused() {
        assert_eq!(range("1m..2m", false).unwrap(), (1 << 20, Some(2 << 20)));
        assert_eq!(range("..4k", false).unwrap(), (0, Some(4096)));
        assert_eq!(range("8..", true).unwrap(), (4096, None));
        assert_eq!(range("..", false).unwrap(), (0, None));
        for wrong in ["", "5", "2m..1m", "1m..1m", "x..", "..-5", "1..2..3"] {
            let error = range(wrong, false).unwrap_err().to_string();
            assert!(error.contains("START..END"), "{wrong}: {error}");
        }
        assert!(range("99999999999999999999..", true).is_err());
        assert!(range("18446744073709551615..", true).is_err(), "more bytes than can be counted");
    }

    #[test]
    fn a_list_is_read_line_by_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("list");
        std::fs::write(&path, "# /x on nbd0\n\n4096..8192\n12k..16k # more\n").unwrap();
        assert_eq!(list(&path).unwrap(), [(4096, Some(8192)), (12288, Some(16384))]);
        for wrong in ["", "# nothing\n", "4096 8192\n"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(list(&path).is_err(), "{wrong}");
        }
    }
}
