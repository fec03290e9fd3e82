//! What a cache is built from: shards, admission and the write budget, sized for a device.

use larder_base::{ByteSize, Nanos};
use larder_format::PAGE_SIZE;
use larder_format::block::{BlockSuperblock, Layout};
use larder_policy::block::detect::Detector;
use larder_policy::block::{BlockAdmission, BlockAdmissionConfig, BlockAdmissionError, BlockSetup};
use larder_policy::budget::{BudgetError, BudgetState, KeptBudget, WriteBudget, WriteBudgetConfig};

use super::super::map::Map;
use super::super::record::{RecordedAdmission, RecordedLog, RecordedShard};
use super::super::{BlockConfig, BlockLimits, BlockShard, GROUP_LINES, MapLog, Regions, WriteMode};
use super::backoff::Backoff;
use super::limits::Limits;
use super::quiet::QUIET;

/// Lines of a shard that may be on their way to flash behind replies, of `memory` for all shards.
pub fn fills(memory: ByteSize, layout: &Layout) -> u32 {
    let lines = memory.0 / u64::from(layout.line) / u64::from(layout.shards);
    // A group at least: a cache that fills nothing is none.
    u32::try_from(lines).unwrap_or(u32::MAX).max(GROUP_LINES)
}

/// How the shards of a cache work.
pub fn shard_config(write: WriteMode, fill_memory: ByteSize, layout: &Layout) -> BlockConfig {
    BlockConfig {
        line_bytes: layout.line,
        write,
        limits: BlockLimits { fills: fills(fill_memory, layout), ..BlockLimits::default() },
        regions: Regions { groups: layout.region_groups, count: layout.regions },
    }
}

/// A shard over this map, without a tape.
pub fn shard(config: BlockConfig, map: Map) -> RecordedShard {
    RecordedShard::new(BlockShard::new(config, map))
}

/// Admission of a volume of so many bytes in the cache of this superblock, without a tape. It hashes with the cache's key: where lines lie and which of
/// them share a counter is of the device, the same in each run and nothing that a client can choose.
///
/// # Errors
/// When its tables would be too large.
pub fn admission(
    config: &BlockAdmissionConfig,
    superblock: &BlockSuperblock,
    backing_bytes: u64,
) -> Result<RecordedAdmission, BlockAdmissionError> {
    let BlockSuperblock { layout, key: seed, .. } = *superblock;
    let (line_bytes, lines) = (layout.line, layout.capacity());
    let setup = BlockSetup { line_bytes, lines, backing_bytes, seed };
    BlockAdmission::new(config, &setup).map(RecordedAdmission::new)
}

/// What recognises metadata on a volume of so many bytes: only where its admission makes a difference between metadata and data.
pub fn detector(admission: &RecordedAdmission, backing_bytes: u64) -> Option<Detector> {
    admission.prefers_metadata().then(|| Detector::new(backing_bytes, Detector::DEFAULT_BLOCKS))
}

/// What keeps lines from flash: the write budget, where the drive's endurance is stated. `file` is what an earlier run has left of it, `kept` whether
/// there is a file that is to know of what is written before it is.
///
/// # Errors
/// When what is stated of the drive cannot be meant.
pub fn limits(
    config: &WriteBudgetConfig,
    layout: &Layout,
    file: Option<BudgetState>,
    kept: bool,
) -> Result<Limits, BudgetError> {
    let line = u64::from(layout.line);
    let lines = ByteSize(layout.capacity() * line);
    let budget = WriteBudget::new(config, lines, file, Nanos::ZERO)?;
    if config.endurance(lines).is_none() {
        // (What is wrong with the rest of it was said all the same.)
        return Ok(Limits::new(None, Backoff::default()));
    }
    // Bytes that come at once: lines of a group, or a page of the map's log for each.
    let unit = u64::from(GROUP_LINES) * line.max(PAGE_SIZE as u64);
    let kept = kept.then(|| KeptBudget::new(&budget, lines, unit));
    Ok(Limits::new(Some((budget, kept)), Backoff::default()))
}

/// The log of a cache that was formatted a moment ago, without a tape.
pub fn fresh_log(superblock: BlockSuperblock) -> RecordedLog {
    RecordedLog::new(MapLog::fresh(superblock, QUIET))
}
