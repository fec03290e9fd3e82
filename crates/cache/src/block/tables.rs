//! What only a sparse cache has: its file, and pages of its table that are not in memory.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use larder_base::ByteSize;
use larder_engine::block::node::failing::FlashError;
use larder_engine::block::node::looks::{Entry, Looks as _, Pages};
use larder_engine::block::{SlotId, Sum};
use larder_format::block::Layout;
use larder_format::{PAGE_SIZE, block::Placement};
use larder_runtime::{AlignedBuf, Device, DeviceError, DeviceOptions, FileOp, FlashDevice};

use super::Core;
use super::open::{CacheError, FormatConfig};

/// Makes the file of a sparse cache, empty and as large as it is to seem. Nothing that was there is left.
pub(super) fn make_file(config: &FormatConfig) -> Result<Layout, CacheError> {
    let path = config.path.display().to_string();
    let not = |reason: &str| CacheError::NotSparse { path: path.clone(), reason: reason.into() };
    let failed = |e: std::io::Error| not(&e.to_string());
    let Placement::Sparse(span) = config.placement else {
        return Err(not("another placement is asked for"));
    };
    let found = std::fs::metadata(&config.path).ok();
    if found.as_ref().is_some_and(|f| !f.is_file()) {
        return Err(not("it is no file, and a raw device cannot give space back"));
    }
    let size = config.size.ok_or_else(|| {
        not("its size is missing, which says how many bytes it may hold (its file seems larger)")
    })?;
    let layout = Layout::sparse(size.0, config.line, span, config.shards)
        .map_err(|source| CacheError::Layout { path: path.clone(), source })?;
    let made = found.is_none();
    // One that is in use is locked, whatever its size.
    let lock = match found.map(|_| FlashDevice::open(&DeviceOptions::new(&config.path))) {
        None | Some(Err(DeviceError::TooSmall { .. } | DeviceError::SizeMissing { .. })) => None,
        Some(opened) => Some(opened?),
    };
    let file = File::options()
        .write(true)
        .create(true)
        // It holds what the volumes do.
        .mode(0o600)
        .truncate(false)
        .open(&config.path)
        .map_err(failed)?;
    let sized = file.set_len(0).and_then(|()| file.set_len(layout.device));
    drop((file, lock));
    let outcome = sized
        .map_err(|e| {
            not(&format!(
                "a file that seems to have {} cannot be made ({e}): give it less room with sparse:SPAN, the sum of the \
                 volumes' sizes",
                ByteSize(layout.device)
            ))
        })
        .and_then(|()| try_holes(config, &layout).map_err(|e| not(&e)));
    if outcome.is_err() && made {
        // What cannot be used leaves no file behind.
        let _ = std::fs::remove_file(&config.path);
    }
    outcome.map(|()| layout)
}

/// Whether a hole can be made.
fn try_holes(config: &FormatConfig, layout: &Layout) -> Result<(), String> {
    let device = FlashDevice::open(&DeviceOptions::new(&config.path)).map_err(|e| e.to_string())?;
    let zeros = AlignedBuf::zeroed(PAGE_SIZE);
    device
        .write_at(layout.data, &zeros)
        .and_then(|()| device.punch(layout.data, PAGE_SIZE as u64))
        .map_err(|e| e.to_string())
}

impl Core {
    /// A page of the table was read, or not: `tell` is to tell the shard.
    pub(super) fn page_read(
        &self,
        shard: u32,
        page: u32,
        (op, result): (FileOp, std::io::Result<()>),
        tell: impl FnOnce(Result<&[Option<Sum>], FlashError>),
    ) {
        let slots = match (op, result) {
            (FileOp::Read { buf, .. }, Ok(())) => self.decode_page(shard, page, &buf),
            (_, Err(e)) => Err(self.flash_failed("read", &e)),
            _ => Err(FlashError::Device),
        };
        tell(slots.as_deref().map_err(|&e| e));
    }

    /// The lines in slots `from..from + count` of a shard: also those of which the page is not in memory. One that is
    /// changed meanwhile is looked at again.
    pub(super) fn table_entries(&self, shard: u32, from: u32, count: u32) -> Vec<Entry> {
        let Pages { here: mut found, absent, slots: per } = self.pages(shard, from, count);
        for page in absent {
            let mut bytes = vec![0u8; PAGE_SIZE];
            if self.device.read_at(self.layout.table_at(shard, page), &mut bytes).is_err() {
                continue;
            }
            let Ok(slots) = self.decode_page(shard, page, &bytes) else { continue };
            let slots = (page * per..).zip(slots).filter(|s| (from..from + count).contains(&s.0));
            found.extend(slots.filter_map(|(slot, sum)| {
                Some((SlotId(slot), self.placing.line_in(shard, slot), sum?))
            }));
        }
        found.sort_by_key(|entry| entry.0);
        found
    }
}
