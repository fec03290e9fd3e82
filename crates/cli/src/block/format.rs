//! `larder block format`.

use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use larder_base::{ByteSize, UnixSecs};
use larder_block::cache::{CacheError, FormatConfig, open};
use larder_engine::block::node::defaults;
use larder_format::block::superblock::WriteLogArea;
use larder_format::block::{LayoutError, Placement};
use larder_runtime::DeviceError;

use crate::error::CliError;

/// Shown under the flags.
const EXAMPLES: &str = "\
Examples:
  # A cache of 100 GiB in a file, eight-way set-associative:
  larder block format /flash/cache --size 100g
  # A whole drive, direct-mapped, lines of 16 KiB:
  larder block format /dev/nvme1n1 --placement direct --line 16k --yes
  # A sparse file with 100 GiB of lines at most, before volumes of 8 TiB together:
  larder block format /flash/cache --size 100g --placement sparse:8t
  # With a write log, for volumes that write back (docs/block.md, Write-back):
  larder block format /flash/cache --size 100g --write-log 8g
  # Fully associative; flash is written segment by segment, in order:
  larder block format /dev/nvme1n1 --placement full --yes";

/// Prepare a file or device as a cache
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// File or block device
    path: PathBuf,
    /// Its size; needed for a file that is not there yet. With sparse, how many bytes its lines may take up
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteSize>,
    /// Where a line may lie: direct (one place), set:W (W places, 1 to 16), full (anywhere: a log of segments, which
    /// takes 16 instead of 7 bytes of DRAM a line), or sparse (a place of its own in a sparse file; the map is on the
    /// device and takes a fixed sum of DRAM). sparse:SPAN: with room for volumes of so many bytes together
    #[arg(long, value_name = "P", default_value_t = defaults::PLACEMENT)]
    placement: Placement,
    /// Bytes of a line: 4k, 8k, 16k, 32k or 64k
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(defaults::LINE.into()))]
    line: ByteSize,
    /// Shards, each behind a lock of its own (1 to 64); fewer for a very small cache
    #[arg(long, value_name = "N", default_value_t = defaults::SHARDS)]
    shards: u32,
    /// Bytes of the write log, which volumes that write back need (`larder block serve --write back:ORDER`), in segments of 8 MiB, 64 MiB at
    /// least: what is written while the stores cannot keep up, a few GiB for bursts of seconds, more for minutes. Lines have so much less room. Not with --placement sparse [default: none]
    #[arg(long, value_name = "SIZE")]
    write_log: Option<ByteSize>,
    /// Go on though something is on it already: that is lost
    #[arg(long)]
    yes: bool,
    /// With --yes: go on though the cache that is on it holds writes that no store has. They are lost for good
    #[arg(long, requires = "yes")]
    discard_dirty: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), CliError> {
    let line = u32::try_from(args.line.0)
        .map_err(|_| CliError::Usage(format!("--line {}: 64k is the most", args.line)))?;
    if let Some(size) = args.write_log {
        if matches!(args.placement, Placement::Sparse(_)) {
            return Err(CliError::Usage(format!(
                "--write-log {size}: a cache of --placement {} has no place for a write log: choose direct, set:W or full, or leave --write-log out",
                args.placement
            )));
        }
        WriteLogArea::of(0, size.0, 512)
            .map_err(|e| CliError::Usage(format!("--write-log {size}: {e}")))?;
    }
    let config = FormatConfig {
        path: args.path.clone(),
        size: args.size,
        line,
        placement: args.placement,
        shards: args.shards,
        write_log: args.write_log,
        yes: args.yes,
        discard_dirty: args.discard_dirty,
    };
    // The file is sparse: what is missing would be met when the cache fills.
    let size = args.size.map(|s| s.0).or_else(|| args.path.metadata().ok().map(|m| m.len()));
    if let Some(size) = size
        && let Some(free) = larder_runtime::machine::shortfall(&args.path, size)
    {
        let warning = super::will_not_fit(&args.path, size, free);
        // Not by eprintln, which panics when nobody reads.
        writeln!(std::io::stderr(), "larder: warning: {warning}").ok();
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as u32);
    let layout = open::format(&config, super::seed()?, UnixSecs(now)).map_err(|error| {
        let small = matches!(&error, CacheError::Layout { source: LayoutError::TooSmall { .. }, .. });
        match (failed(error), size, args.write_log) {
            (CliError::Usage(text), Some(size), Some(log)) if small => CliError::Usage(format!(
                "{text}; --size {} less --write-log {log} is what lines have: make one larger, or the other smaller",
                ByteSize(size)
            )),
            (error, ..) => error,
        }
    })?;
    let path = args.path.display();
    if args.write_log.is_some() {
        let log = open::write_log_of(&args.path).map_err(failed)?;
        outln!("{path}: a write log of {}", ByteSize(log.map_or(0, |log| log.bytes())))?;
    }
    let line = ByteSize(u64::from(layout.line));
    if let Placement::Sparse(span) = layout.placement() {
        outln!(
            "{path}: up to {} lines of {line}, of volumes of {} together; the map takes {} of DRAM, whatever is cached",
            layout.capacity(),
            ByteSize(span),
            ByteSize(open::map_memory(&layout)),
        )?;
        return Ok(());
    }
    let (of_lines, rest) = open::most_map_memory(&layout);
    let slots = layout.slots();
    let beside = if layout.segments() > 0 {
        let segments = u64::from(layout.segments()) * u64::from(layout.shards);
        format!(", and {} for {segments} segments", ByteSize(rest))
    } else {
        String::new()
    };
    outln!(
        "{path}: {slots} lines of {line}, {} for the map; it will take up to {} of DRAM ({} bytes a line{beside})",
        ByteSize(layout.data),
        ByteSize(of_lines + rest),
        of_lines / slots,
    )?;
    Ok(())
}

/// What cannot be meant is usage, the rest is not.
pub(super) fn failed(error: CacheError) -> CliError {
    // What lies below names the size as `larder kv` does, and of flags knows nothing else.
    let mut text = error
        .to_string()
        .replace("--flash-size", "--size")
        .replace("its size is missing", "--size is missing")
        .replace("name a state directory", "name a directory by --state-dir")
        .replace(
            "recovered as one that was set back",
            "recovered (`larder block recover --set-back`)",
        )
        .replace(
            "have its store recovered, which",
            "have its store recovered (`larder block recover`), which",
        )
        .replace(
            "have this cache discard what it holds",
            "have this cache discard what it holds (`larder block discard`)",
        )
        .replace("as a volume that writes back", "with --write back:ORDER")
        .replace(
            "name a place for it (a file, or an export of its own), or choose to do without a marker",
            "name one with --marker NAME=PLACE, or do without by --no-marker NAME",
        )
        .replace(
            "name a place for its journal (a file, a block device, or an export of its own), or choose ordered",
            "name one with --journal NAME=PLACE, or choose --write NAME=back:ordered",
        )
        .replace("make it larger, or name another place", "make it larger, or name another place with --journal NAME=PLACE")
        .replace("say that the journal may be local", "say --journal-local")
        .replace(
            "vouch that what it has answered is durable",
            "vouch with --store-durable that what it has answered is durable",
        )
        .replace("say that the store was moved", "say --store-moved")
        .replace("as one that writes through", "without --write back:ORDER")
        .replace("format one that has", "format one that has (`larder block format --write-log`)")
        .replace("serve it as back:", "serve it with --write NAME=back:")
        .replace("serve it too, as back:", "serve it too, with --write NAME=back:")
        .replace("over a copy of the store", "over a copy of the store (`larder block export --base`)")
        .replace("a plain recovery", "`larder block recover` without it")
        .replace("destage all of it before", "destage all of it (`larder block flush`) before");
    text.push_str(match &error {
        CacheError::Occupied { .. } => ": say --yes if it is",
        CacheError::Dirty { .. } => {
            " (`larder block discard`, or all of them by --yes --discard-dirty)"
        }
        CacheError::NotEmpty { .. } => " (`larder block format --yes`, or no --record)",
        _ => "",
    });
    match error {
        CacheError::Device(DeviceError::SizeMissing { .. } | DeviceError::UnderDev { .. })
        | CacheError::Layout { .. }
        | CacheError::Occupied { .. }
        | CacheError::Dirty { .. }
        | CacheError::NotSparse { .. }
        | CacheError::NotEmpty { .. }
        | CacheError::Admission(_)
        | CacheError::Budget(_) => CliError::Usage(text),
        CacheError::Journal { why, .. } if why.is_usage() => CliError::Usage(text),
        _ => CliError::Runtime(text),
    }
}
