//! Dirty data of a cache device that is not in use: `larder block export`, and what `check` says of it.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use larder_base::ByteSize;
use larder_block::cache::CacheError;
use larder_block::cache::back::offline::{
    self, DirtyFault, DirtyReport, DirtyVolume, ExportWish, Exported,
};
use larder_runtime::DeviceError;

use super::control::quantity;
use super::format::failed;
use crate::error::CliError;
use crate::progress;

/// Shown under the flags of `export`.
const EXAMPLES: &str = "\
Examples:
  # The store is gone: what the cache has of it, at its offsets in a sparse file:
  larder block export /flash/cache db /backup/db.dirty
  # A whole image, from a copy of the store that is older:
  larder block export /flash/cache db /backup/db.img --base /backup/db.old

Ends with 0 if all that is dirty is in the file, with 1 if something could not be read.";

/// Writes what is dirty of a volume to a new file, from a cache device that is not in use and is only read
///
/// Each byte is at its offset in the volume, as it was written last; what was zeroed or trimmed is zeros. The file is FILE.partial until it is whole.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ExportArgs {
    /// The cache device
    cache: PathBuf,
    /// The volume
    volume: String,
    /// The file: it must not be there yet
    file: PathBuf,
    /// An image of the store that the file begins as; it is only read. None: zeros where nothing is dirty
    #[arg(long, value_name = "IMAGE")]
    base: Option<PathBuf>,
    /// Answer in JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn export(args: &ExportArgs) -> Result<(), CliError> {
    let usage = |what: String| Err(CliError::Usage(what));
    if !args.cache.exists() {
        return usage(format!(
            "'{}': there is no such file or device: name a cache device",
            args.cache.display()
        ));
    }
    if args.file.symlink_metadata().is_ok() {
        return usage(format!(
            "'{}' is there already, and is not overwritten: name another file",
            args.file.display()
        ));
    }
    let dir = args.file.parent().filter(|dir| !dir.as_os_str().is_empty());
    if let Some(dir) = dir.filter(|dir| !dir.is_dir()) {
        return usage(format!(
            "'{}': there is no directory '{}': make it, or name another file",
            args.file.display(),
            dir.display()
        ));
    }
    if let Some(base) = args.base.as_ref().filter(|base| !base.exists()) {
        return usage(format!("--base '{}': there is no such file or device", base.display()));
    }
    let wish = ExportWish {
        cache: args.cache.clone(),
        volume: args.volume.clone(),
        file: args.file.clone(),
        base: args.base.clone(),
    };
    let mut bar = None;
    let begun = Instant::now();
    let mut show = |done: u64, total: u64| {
        if begun.elapsed() >= progress::SILENT {
            let bar = bar.get_or_insert_with(|| progress::bar(total.max(1)));
            bar.set_message(format!("{} of {}", ByteSize(done), ByteSize(total)));
            bar.set_position(done);
        }
        true
    };
    let done = offline::export(&wish, &mut show);
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let done = done.map_err(|e| {
        let in_use = matches!(&e, CacheError::Device(DeviceError::InUse { .. }));
        match failed(e) {
            CliError::Runtime(text) if in_use => CliError::Runtime(format!(
                "{text}; a volume that is served is brought to its store by `larder block flush`"
            )),
            e => e,
        }
    })?;
    let Some(done) = done else {
        return Err(CliError::Runtime("interrupted: there is no file".to_owned()));
    };
    let text = match args.json {
        true => serde_json::to_string_pretty(&done)
            .map_err(|e| CliError::Runtime(format!("the answer cannot be printed: {e}")))?,
        false => exported_text(&done),
    };
    writeln!(std::io::stdout().lock(), "{}", text.trim_end())
        .map_err(|e| CliError::Runtime(format!("standard output: {e}")))?;
    verdict(&done)
}

fn exported_text(done: &Exported) -> String {
    let mut text = format!(
        "{}: {} in {}, up to write {}, written to '{}' in {:.1} s",
        done.volume,
        ByteSize(done.bytes),
        quantity(done.extents, "extent"),
        done.last,
        done.file,
        done.seconds
    );
    if done.bytes == 0 && done.unreadable_bytes == 0 && !done.gap {
        text = format!("{}: nothing of it is dirty; '{}' says so", done.volume, done.file);
    }
    if done.zeros > 0 {
        text.push_str(&format!("\n  {} of them are zeros, or were trimmed", ByteSize(done.zeros)));
    }
    if let Some(base) = done.base_bytes.filter(|&base| base != done.volume_bytes) {
        text.push_str(&format!(
            "\n  ATTENTION: the base has {}, and the volume {}: is it the volume's?",
            ByteSize(base),
            ByteSize(done.volume_bytes)
        ));
    }
    if done.carried {
        text.push_str("\n  the volume was put aside with what is dirty (detach --keep-dirty), and waits to be attached with this cache");
    }
    for lost in &done.unreadable {
        text.push_str(&format!(
            "\n  bytes {} to {}: they could not be read, and are not in the file",
            lost.offset,
            lost.offset + lost.bytes
        ));
    }
    if done.gap {
        text.push_str(&format!(
            "\n  writes from number {} on are lost, of bytes that nobody knows: the file has what came before",
            done.last + 1
        ));
    }
    text
}

/// The failure that `export` ends with, if not all is in the file: what it is was printed.
fn verdict(done: &Exported) -> Result<(), CliError> {
    let mut why = Vec::new();
    if done.unreadable_bytes > 0 {
        why.push(format!("{} could not be read", ByteSize(done.unreadable_bytes)));
    }
    if done.gap {
        why.push("writes behind the last one are lost".to_owned());
    }
    match why.is_empty() {
        true => Ok(()),
        false => Err(CliError::Runtime(format!("volume '{}': {}", done.volume, why.join("; ")))),
    }
}

/// What `check` says of dirty data.
pub(super) fn log_rows(log: &DirtyReport) -> Vec<(&'static str, String)> {
    let mut said = format!("{} looked at", ByteSize(log.looked_at));
    for (n, what) in [
        (log.damaged_batches, "batches DAMAGED"),
        (log.unreadable_bytes, "bytes UNREADABLE"),
        (log.damaged_segments, "segments with a damaged header, as a power cut leaves one"),
    ] {
        if n > 0 {
            said.push_str(&format!("; {n} {what}"));
        }
    }
    let mut rows = vec![("dirty data", said)];
    rows.extend(log.volumes.iter().map(|v| ("", volume_text(v))));
    rows
}

fn volume_text(v: &DirtyVolume) -> String {
    let mut text = format!("{}: ", v.name);
    match v.sequences {
        None => text.push_str("nothing dirty"),
        Some((first, last)) => text.push_str(&format!(
            "{} dirty in {}, writes {first} to {last}",
            ByteSize(v.bytes),
            quantity(v.records, "record")
        )),
    }
    if v.gap {
        text.push_str(", then a GAP");
    }
    if v.lost_bytes > 0 {
        text.push_str(&format!(", {} of them LOST", ByteSize(v.lost_bytes)));
    }
    text
}

/// Lines on what is wrong with dirty data.
pub(super) fn log_faults(log: &DirtyReport) -> String {
    let line = |f: &DirtyFault| {
        let place = match (f.volume.is_empty(), f.offset) {
            (true, _) => "write log".to_owned(),
            (false, None) => format!("dirty data of {}", f.volume),
            (false, Some(at)) => {
                let write = match f.sequence {
                    0 => String::new(),
                    n => format!(" (write {n})"),
                };
                format!("dirty bytes {at} to {} of {}{write}", at + f.bytes, f.volume)
            }
        };
        format!("  {place}: {}; {}\n", f.what, f.remedy)
    };
    let mut text: String = log.faults.iter().map(line).collect();
    let more = log.faulty - log.faults.len() as u64;
    if more > 0 {
        text.push_str(&format!("  and {more} more faults of dirty data\n"));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_of_dirty_data_names_volume_bytes_and_remedy() {
        let volume = DirtyVolume {
            name: "db".into(),
            bytes: 8192,
            records: 2,
            sequences: Some((3, 4)),
            lost_bytes: 4096,
            ..DirtyVolume::default()
        };
        let fault = DirtyFault {
            volume: "db".into(),
            offset: Some(4096),
            bytes: 4096,
            sequence: 4,
            what: "it cannot be read".into(),
            remedy: "export".into(),
        };
        let log = DirtyReport {
            volumes: vec![volume],
            faulty: 2,
            faults: vec![fault],
            ..DirtyReport::default()
        };
        let rows = log_rows(&log);
        assert!(rows[1].1.contains("8 KiB dirty in 2 records, writes 3 to 4"), "{rows:?}");
        assert!(rows[1].1.contains("4 KiB of them LOST"), "{rows:?}");
        let faults = log_faults(&log);
        assert!(
            faults.contains("dirty bytes 4096 to 8192 of db (write 4): it cannot be read; export")
        );
        assert!(faults.contains("and 1 more"), "{faults}");
    }

    #[test]
    fn an_export_that_lacks_something_fails_and_lists_it() {
        let whole = Exported {
            volume: "db".into(),
            bytes: 8192,
            extents: 2,
            last: 9,
            ..Exported::default()
        };
        assert!(verdict(&whole).is_ok());
        assert!(exported_text(&whole).contains("8 KiB in 2 extents, up to write 9"));
        let lost = Exported {
            unreadable_bytes: 512,
            unreadable: vec![offline::Stretched { offset: 1024, bytes: 512 }],
            gap: true,
            ..whole
        };
        let text = exported_text(&lost);
        assert!(text.contains("bytes 1024 to 1536") && text.contains("number 10"), "{text}");
        let why = verdict(&lost).unwrap_err().to_string();
        assert!(why.contains("512") && why.contains("are lost"), "{why}");
    }
}
