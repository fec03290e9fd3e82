//! Looking at a cache device that is not in use: superblock, snapshot, log, write-intent map and every line, by what the
//! device itself says. Nothing is written.

use std::path::Path;
use std::time::Instant;

use larder_engine::block::address::Placing;
use larder_engine::block::map::Slot;
use larder_engine::block::node::start::Found;
use larder_engine::block::{
    FoundPage, GROUP_LINES, IoFailed, LineId, LogIo, SlotId, Sum, read_table,
};
use larder_format::block::superblock::{COPY_BYTES, HoldsState};
use larder_format::block::{BlockSuperblock, BlockSuperblockError, VolumeState};
use larder_runtime::{AlignedBuf, Device, DeviceOptions, FlashDevice};
use serde::{Deserialize, Serialize};

use super::back::offline::{self, DirtyReport};
use super::back::order_words;
use super::check::CheckFault;
use super::open::{CacheError, open_device, read_superblock};

/// Bytes that are read at a time.
const BATCH: u64 = 1 << 20;
/// Faults that are listed.
const MOST_LISTED: usize = 100;

/// A volume that the device has lines of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct InspectedVolume {
    /// Its name.
    pub name: String,
    /// Its size, bytes.
    pub bytes: u64,
    /// It was put aside in good order; otherwise it was attached when the last run ended.
    pub detached: bool,
    /// Its lines in the durable map.
    pub lines: u64,
    /// What the write log has to do with it.
    pub write_back: Option<InspectedBack>,
}

/// What a device says of a volume that wrote back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InspectedBack {
    /// The write log may hold what its store lacks.
    pub dirty: bool,
    /// It was put aside with what is dirty, and waits to be taken up, by this cache on any host.
    pub carried: bool,
    /// In which order the store gets what was written: `any`, `ordered` or `ordered,grain=completion`.
    pub order: String,
    /// Its generation.
    pub generation: u64,
}

/// What was found on a device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Inspection {
    /// The device.
    pub path: String,
    /// Its name in every start.
    pub uuid: String,
    /// Bytes of a line.
    pub line_bytes: u32,
    /// Where a line may lie: direct, set:W, full or sparse.
    pub placement: String,
    /// Lines that fit.
    pub slots: u64,
    /// The last run was stopped in good order. If not, a map in memory may be ahead of the device's.
    pub clean: bool,
    /// Copies of the superblock that are damaged.
    pub superblocks_damaged: u64,
    /// Pages of the snapshot, or after a clean stop of the table, that are damaged.
    pub snapshot_pages_damaged: u64,
    /// Pages of the write-intent map that are damaged: their regions count as written to.
    pub intent_pages_damaged: u64,
    /// The log is shorter than it is known to have been: pages of it are damaged, and the next start is cold.
    pub log_gap: bool,
    /// Bytes of the write log; `None`: there is none.
    pub write_log_bytes: Option<u64>,
    /// Records of the log.
    pub records: u64,
    /// Regions that were being written to.
    pub regions_marked: u64,
    /// Lines in the durable map.
    pub lines: u64,
    /// Of them, in regions that were being written to: after a power cut they are not used. What they hold is not a fault.
    pub in_doubt: u64,
    /// Of them, of no volume that the device knows: they are not used.
    pub of_no_volume: u64,
    /// Lines that do not have their checksum.
    pub corrupt: u64,
    /// Lines that cannot be read.
    pub unreadable: u64,
    /// The volumes.
    pub volumes: Vec<InspectedVolume>,
    /// The first faults of lines.
    pub faults: Vec<CheckFault>,
    /// The dirty data in the write log; none where every store has everything.
    pub dirty_data: Option<DirtyReport>,
    /// It was not looked at to the end.
    pub interrupted: bool,
    /// Seconds that it took.
    pub seconds: f64,
}

impl Inspection {
    /// How many faults there are.
    pub fn faulty(&self) -> u64 {
        self.superblocks_damaged
            + self.snapshot_pages_damaged
            + self.intent_pages_damaged
            + u64::from(self.log_gap)
            + self.corrupt
            + self.unreadable
            + self.dirty_data.as_ref().map_or(0, |log| log.faulty)
    }
}

/// A device that is only read.
struct ReadOnly<'a>(&'a FlashDevice);

impl LogIo for ReadOnly<'_> {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        self.0.read_at(at, out).map_err(|error| {
            tracing::warn!(%error, "the map of the cache cannot be read");
            IoFailed
        })
    }

    fn write(&mut self, _: u64, _: &[u8]) -> Result<(), IoFailed> {
        Err(IoFailed)
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        Err(IoFailed)
    }

    fn next_data(&mut self, at: u64) -> Option<u64> {
        self.0.next_data(at)
    }
}

/// Looks at the device at `path`. `go_on` hears how many slots, and lines' worth of dirty data, of how many were looked at, and may say no.
///
/// # Errors
/// When it is in use, is no cache, or is one that this version does not know: then nothing can be said about its lines.
pub fn inspect(
    path: &Path,
    go_on: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Inspection, CacheError> {
    let begun = Instant::now();
    let device = open_device(&DeviceOptions::new(path).read_only())?;
    let sb = read_superblock(&device)?;
    let layout = sb.layout;
    let mut found = Inspection {
        path: path.display().to_string(),
        uuid: sb.uuid.to_string(),
        line_bytes: layout.line,
        placement: layout.placement().to_string(),
        slots: layout.capacity(),
        clean: sb.is_clean(),
        write_log_bytes: sb.write_log.map(|log| log.bytes()),
        superblocks_damaged: damaged_copies(&device)?,
        ..Inspection::default()
    };
    found.volumes = sb
        .volumes
        .iter()
        .map(|v| InspectedVolume {
            name: v.name.clone(),
            bytes: v.bytes,
            detached: v.state == VolumeState::Detached,
            lines: 0,
            write_back: v.write_back.filter(|w| w.holds != HoldsState::Nothing).map(|w| {
                InspectedBack {
                    dirty: w.holds.may_be_dirty(),
                    carried: w.holds == HoldsState::Carried,
                    order: order_words(w.order).to_owned(),
                    generation: w.generation,
                }
            }),
        })
        .collect();
    let durable = Found::of(&sb, &mut ReadOnly(&device)).map_err(unreadable)?;
    found.records = durable.records;
    found.snapshot_pages_damaged = durable.snapshot_damaged;
    found.intent_pages_damaged = durable.intents_damaged;
    found.regions_marked = durable.regions_set();
    found.log_gap = !durable.is_whole;
    // Dirty data is nowhere else: it comes first.
    let line = u64::from(layout.line);
    let mut dirty = 0;
    let mut in_lines = |done: u64, all: u64| {
        dirty = all / line;
        go_on(done / line, dirty + layout.slots())
    };
    found.dirty_data = offline::look(&device, &sb, &mut in_lines);
    found.interrupted = found.dirty_data.as_ref().is_some_and(|log| log.interrupted);
    let mut slots = |done: u64, all: u64| go_on(dirty + done, dirty + all);
    let go_on = &mut slots;
    if found.interrupted {
        found.seconds = begun.elapsed().as_secs_f64();
        return Ok(found);
    }
    let step = (BATCH / line).max(1) as u32;
    if layout.is_sparse() {
        look_at_table(&device, &sb, &durable, &mut found, go_on)?;
        found.seconds = begun.elapsed().as_secs_f64();
        return Ok(found);
    }
    for (shard, map) in (0u32..).zip(&durable.maps) {
        for from in (0..map.len()).step_by(step as usize) {
            if !go_on(u64::from(shard) * u64::from(map.len()) + u64::from(from), layout.slots()) {
                found.interrupted = true;
                found.seconds = begun.elapsed().as_secs_f64();
                return Ok(found);
            }
            let slots = (from..(from + step).min(map.len())).map(SlotId);
            let lines: Vec<(SlotId, LineId, Sum)> = slots
                .filter_map(|slot| match map.get(slot) {
                    Slot::Line(line) => Some((slot, line, map.sum(slot))),
                    Slot::Free | Slot::Held => None,
                })
                .collect();
            let in_doubt = |line| durable.in_doubt(line);
            look(&device, &sb, shard, &lines, &in_doubt, &mut found);
        }
    }
    found.seconds = begun.elapsed().as_secs_f64();
    Ok(found)
}

fn unreadable(IoFailed: IoFailed) -> CacheError {
    CacheError::System {
        what: "the map on the cache device",
        reason: "it cannot be read: replace the device, or format it anew".into(),
    }
}

/// The lines of a sparse cache, as its table has them.
fn look_at_table(
    device: &FlashDevice,
    sb: &BlockSuperblock,
    durable: &Found,
    found: &mut Inspection,
    go_on: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<(), CacheError> {
    let layout = sb.layout;
    let placing = Placing::of(&layout, sb.key);
    let per = layout.shard_slots() / layout.table_pages();
    let damaged = read_table(sb, &mut ReadOnly(device), |page: FoundPage<'_>| {
        let number = layout.table_number(page.shard, page.page);
        found.interrupted |= !go_on(number * u64::from(per), layout.slots());
        let (false, Some(slots)) = (found.interrupted, page.slots) else { return false };
        let first = page.page * per;
        let lines: Vec<(SlotId, LineId, Sum)> = (first..)
            .zip(slots.iter())
            .filter_map(|(slot, sum)| {
                Some((SlotId(slot), placing.line_in(page.shard, slot), (*sum)?))
            })
            .collect();
        let in_doubt = |line| durable.in_doubt(line);
        look(device, sb, page.shard, &lines, &in_doubt, found);
        false
    })
    .map_err(unreadable)?;
    // One that was being written when the power failed is not whole.
    if sb.is_clean() {
        found.snapshot_pages_damaged += damaged;
    }
    Ok(())
}

/// Copies of the superblock that are neither whole nor empty.
fn damaged_copies(device: &FlashDevice) -> Result<u64, CacheError> {
    let mut copies = vec![0u8; 2 * COPY_BYTES];
    device.read_at(0, &mut copies)?;
    let damaged = copies.chunks(COPY_BYTES).filter(|copy| match BlockSuperblock::decode(copy) {
        Err(BlockSuperblockError::None) => copy.iter().any(|&b| b != 0),
        Err(_) => true,
        Ok(_) => false,
    });
    Ok(damaged.count() as u64)
}

/// Compares lines of one shard, whose slots are close together, with their checksums.
fn look(
    device: &FlashDevice,
    sb: &BlockSuperblock,
    shard: u32,
    lines: &[(SlotId, LineId, Sum)],
    in_doubt: &dyn Fn(LineId) -> bool,
    found: &mut Inspection,
) {
    let bytes = sb.layout.line as usize;
    let mut own = AlignedBuf::zeroed(bytes);
    for run in lines.chunk_by(|a, b| a.0.0 + 1 == b.0.0) {
        let mut buf = AlignedBuf::zeroed(run.len() * bytes);
        let whole = device.read_at(sb.layout.slot_at(shard, run[0].0.0), &mut buf).is_ok();
        for (i, &(slot, line, sum)) in run.iter().enumerate() {
            let at = sb.layout.slot_at(shard, slot.0);
            found.lines += 1;
            let group = line.group().0;
            let owner = sb
                .volumes
                .iter()
                .position(|v| v.first_group <= group && group < v.first_group + v.groups);
            match owner {
                Some(owner) => found.volumes[owner].lines += 1,
                None => found.of_no_volume += 1,
            }
            if in_doubt(line) {
                found.in_doubt += 1;
                continue;
            }
            if owner.is_none() {
                continue;
            }
            let read = whole || device.read_at(at, &mut own).is_ok();
            let data = if whole { &buf[i * bytes..(i + 1) * bytes] } else { &own[..] };
            let what = if !read {
                found.unreadable += 1;
                "it cannot be read"
            } else if Sum::of(line, crc32c::crc32c(data)) != sum {
                found.corrupt += 1;
                "it does not have its checksum"
            } else {
                continue;
            };
            if found.faults.len() < MOST_LISTED {
                let volume = owner.map(|o| &sb.volumes[o]);
                let first = volume.map_or(0, |v| v.first_group) * u64::from(GROUP_LINES);
                found.faults.push(CheckFault {
                    volume: volume.map_or_else(String::new, |v| v.name.clone()),
                    offset: (line.0 - first) * u64::from(sb.layout.line),
                    device_offset: at,
                    what: what.to_owned(),
                });
            }
        }
    }
}
