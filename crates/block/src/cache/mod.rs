//! The engine between workers and stores: what [`larder_engine::block`] asks for, done with bytes.
//!
//! | module | what it is |
//! | --- | --- |
//! | `ops` | clients' operations under way, each in the table of the worker that took it |
//! | `effects` | what a shard asks for while it is locked, collected to be done afterwards |
//! | `service` | a worker's part: its ring on the cache device, its sessions with the stores |
//!
//! # Locks
//!
//! A shard first, then a worker's table of operations; never the other way round, and never two of a kind. I/O is begun
//! when the shard has been let go.
//!
//! Admission is behind a lock of its own, which is taken last.
//!
//! # What a restart finds
//!
//! Nothing: the map is in memory alone, so that its records are durable as soon as they are taken and no region has to
//! be marked before it is written to.

mod effects;
mod ops;
mod service;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use larder_base::{ByteSize, Nanos, Words};
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Map, Replacement};
use larder_engine::block::{
    BlockConfig, BlockLimits, BlockShard, BlockStats, GROUP_LINES, LineId, Regions, Verdict,
    WriteMode,
};
use larder_policy::block::{
    BlockAccess, BlockAdmission, BlockAdmissionConfig, BlockAdmissionError, BlockCandidate,
    BlockKind, BlockOp, BlockSetup, LineId as PolicyLine, Observed, Victim, VolumeId,
};
use larder_runtime::{Device, FileHandle, FlashDevice, Payload};
use rustix::event::{EventfdFlags, eventfd};

use crate::server::Volume;
use ops::OpTable;
pub use service::CacheService;

/// Where the lines begin on the device: what lies before is for what describes it.
const DATA_START: u64 = 1 << 20;
/// So many errors of the cache device, and it is used no more.
const MOST_ERRORS: u32 = 16;
/// Shards, each behind one lock.
const SHARDS: u32 = 8;

/// How a cache is to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Bytes of a line: a power of two, 4 KiB to 64 KiB.
    pub line_bytes: u32,
    /// Ways of a set, 1 (direct-mapped) to 16.
    pub ways: u32,
    /// Who goes first.
    pub replacement: Replacement,
    /// What writes do.
    pub write: WriteMode,
    /// Bounds of each shard.
    pub limits: BlockLimits,
    /// Of the permutation that spreads lines; any number.
    pub key: u64,
}

impl Default for CacheOptions {
    fn default() -> CacheOptions {
        CacheOptions {
            line_bytes: 4096,
            ways: 8,
            replacement: Replacement::Lru,
            write: WriteMode::HddSsd,
            limits: BlockLimits::default(),
            key: 0x1a5d_e12f,
        }
    }
}

/// Why there is no cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// An option out of its range.
    #[error("a cache with {what} of {value} cannot be: {remedy}")]
    Option {
        /// Which.
        what: &'static str,
        /// As given.
        value: u64,
        /// What would do.
        remedy: &'static str,
    },
    /// The device has too little room.
    #[error(
        "cache device '{device}' has {}, and {} are needed for one set of each shard: give it more",
        ByteSize(*.size), ByteSize(*.needed)
    )]
    TooSmall {
        /// Its path.
        device: String,
        /// Its size, bytes.
        size: u64,
        /// Bytes that would do.
        needed: u64,
    },
    /// The volumes are larger than what can be told apart.
    #[error(
        "volume '{volume}' of {} does not fit: with this cache device, all volumes together have up to {}; use larger lines",
        ByteSize(*.size), ByteSize(*.most)
    )]
    LineSpace {
        /// Its name.
        volume: String,
        /// Its size, bytes.
        size: u64,
        /// Bytes of all of them.
        most: u64,
    },
    /// The system refuses something.
    #[error("the cache cannot be opened: {what}: {reason}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// Why.
        reason: String,
    },
}

/// A shard with the buffers of the reads that it has not released.
struct Cell {
    shard: BlockShard,
    /// By I/O: the first byte's address in the line space, and the bytes.
    bufs: BTreeMap<u32, (u64, Payload)>,
}

/// A worker as others see it: its clients' operations, and those among them that others have finished.
struct Desk {
    ops: Mutex<OpTable>,
    ended: Mutex<Vec<u32>>,
    event: OwnedFd,
}

/// Nothing panics while it holds one of these locks; what a shard holds is for the engine to keep whole.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Volumes by their first byte in the line space.
type Spaces = BTreeMap<u64, Arc<Volume>>;

/// The cache that workers share.
pub struct Cache {
    options: CacheOptions,
    placing: Placing,
    slots_per_shard: u32,
    shards: Vec<Mutex<Cell>>,
    device: Arc<FlashDevice>,
    file: FileHandle,
    desks: Vec<Desk>,
    spaces: RwLock<Spaces>,
    begun: Instant,
    errors: AtomicU32,
    /// The device is used no more.
    disabled: AtomicBool,
    admission: Option<Mutex<BlockAdmission>>,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("options", &self.options).finish_non_exhaustive()
    }
}

impl Cache {
    /// An empty cache on `device`, for so many workers.
    ///
    /// # Errors
    /// [`CacheError`].
    pub fn open(
        device: Arc<FlashDevice>,
        options: CacheOptions,
        workers: usize,
    ) -> Result<Cache, CacheError> {
        let line = options.line_bytes;
        if !line.is_power_of_two() || !(4096..=65536).contains(&line) {
            let remedy = "lines have 4, 8, 16, 32 or 64 KiB";
            return Err(CacheError::Option { what: "lines", value: line.into(), remedy });
        }
        if !(1..=16).contains(&options.ways) {
            let remedy = "sets have 1 to 16 ways";
            return Err(CacheError::Option { what: "ways", value: options.ways.into(), remedy });
        }
        let system = |what, reason: String| CacheError::System { what, reason };
        let size = device.geometry().size;
        let set_bytes = u64::from(options.ways * GROUP_LINES) * u64::from(line);
        let sets = size.saturating_sub(DATA_START) / set_bytes;
        let shards = u64::from(SHARDS);
        if sets < shards {
            return Err(CacheError::TooSmall {
                device: device.name().to_string(),
                size,
                needed: DATA_START + shards * set_bytes,
            });
        }
        let most = u64::from(u32::MAX) / u64::from(options.ways * GROUP_LINES);
        let group_sets = (sets / shards).min(most) as u32;
        let placing = Placing::new(SHARDS, group_sets, options.key);
        let slots = Map::slots(group_sets, options.ways);
        let words = Map::words(slots);
        let groups = placing.groups();
        let config = BlockConfig {
            line_bytes: line,
            write: options.write,
            limits: options.limits,
            // One region: nothing is marked, since nothing outlives the process.
            regions: Regions { groups, count: 1 },
        };
        let cells = (0..SHARDS).map(|shard| {
            let (entries, sums) = (Words::heap(words.0), Words::heap(words.1));
            let ways = options.ways;
            let map =
                Map::new(entries, sums, placing, shard, group_sets, ways, options.replacement);
            Mutex::new(Cell { shard: BlockShard::new(config, map), bufs: BTreeMap::new() })
        });
        let raw =
            device.raw().ok_or_else(|| system("the device", "it has no descriptor".into()))?;
        let fd = raw.try_clone_to_owned().map_err(|e| system("the device", e.to_string()))?;
        let file = FileHandle::new(fd, device.read_unit());
        let mut desks = Vec::new();
        for _ in 0..workers.max(1) {
            let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
                .map_err(|e| system("an eventfd", e.to_string()))?;
            desks.push(Desk { ops: Mutex::default(), ended: Mutex::default(), event });
        }
        Ok(Cache {
            options,
            placing,
            slots_per_shard: slots,
            shards: cells.collect(),
            file,
            device,
            desks,
            spaces: RwLock::default(),
            begun: Instant::now(),
            errors: AtomicU32::new(0),
            disabled: AtomicBool::new(false),
            admission: None,
        })
    }

    /// With admission as `config` has it, with tables for volumes of so many bytes together. Without, everything that is
    /// read or written in whole lines is cached.
    ///
    /// # Errors
    /// When its tables would be unreasonably large.
    pub fn with_admission(
        mut self,
        config: &BlockAdmissionConfig,
        backing_bytes: u64,
    ) -> Result<Cache, BlockAdmissionError> {
        let line_bytes = self.options.line_bytes;
        let lines = u64::from(self.slots_per_shard) * u64::from(SHARDS);
        let setup = BlockSetup { line_bytes, lines, backing_bytes, seed: self.options.key };
        self.admission = Some(Mutex::new(BlockAdmission::new(config, &setup)?));
        Ok(self)
    }

    /// Bytes of memory that admission's tables take.
    pub fn admission_bytes(&self) -> u64 {
        self.admission.as_ref().map_or(0, |a| locked(a).memory_bytes() as u64)
    }

    /// The options it was opened with.
    pub fn options(&self) -> &CacheOptions {
        &self.options
    }

    /// Bytes of lines that it can hold.
    pub fn capacity(&self) -> u64 {
        u64::from(self.slots_per_shard) * u64::from(SHARDS) * u64::from(self.options.line_bytes)
    }

    /// Bytes of memory that the map takes.
    pub fn map_bytes(&self) -> u64 {
        let words = Map::words(self.slots_per_shard);
        (words.0 + words.1) as u64 * 8 * u64::from(SHARDS)
    }

    /// The cache device.
    pub fn device(&self) -> &Arc<FlashDevice> {
        &self.device
    }

    /// What the shards have done, together.
    pub fn stats(&self) -> BlockStats {
        let mut all = BlockStats::default();
        for cell in &self.shards {
            let one = locked(cell).shard.stats();
            all.read_lines += one.read_lines;
            all.read_hits += one.read_hits;
            all.read_shared += one.read_shared;
            all.write_lines += one.write_lines;
            all.write_hits += one.write_hits;
            all.fills += one.fills;
            all.fill_rejected += one.fill_rejected;
            all.fill_dropped += one.fill_dropped;
            all.fill_cancelled += one.fill_cancelled;
            all.evicted += one.evicted;
            all.updated += one.updated;
            all.dropped += one.dropped;
            all.corrupt += one.corrupt;
            all.flash_errors += one.flash_errors;
            all.backing_errors += one.backing_errors;
            all.flash_lines_written += one.flash_lines_written;
            all.waited += one.waited;
            all.longest_wait = all.longest_wait.max(one.longest_wait);
        }
        all
    }

    /// Whether the device is still used: after too many of its errors, every read is a miss.
    pub fn in_use(&self) -> bool {
        !self.disabled.load(Ordering::Relaxed)
    }

    /// Gives a volume its place in the line space. To be called once for each, before it is exported.
    ///
    /// # Errors
    /// [`CacheError::LineSpace`].
    pub fn attach(&self, volume: &Arc<Volume>) -> Result<(), CacheError> {
        let group = u64::from(self.options.line_bytes) * u64::from(GROUP_LINES);
        let most = self.placing.groups().saturating_mul(group);
        let mut spaces = self.spaces.write().unwrap_or_else(PoisonError::into_inner);
        let start = spaces
            .last_key_value()
            .map_or(0, |(start, last)| (start + last.about().size).next_multiple_of(group));
        let size = volume.about().size;
        if start.checked_add(size).is_none_or(|end| end > most) {
            return Err(CacheError::LineSpace { volume: volume.name().into(), size, most });
        }
        spaces.insert(start, volume.clone());
        Ok(())
    }

    /// The first byte of a volume in the line space.
    fn base(&self, volume: &Arc<Volume>) -> Option<u64> {
        let spaces = self.spaces.read().unwrap_or_else(PoisonError::into_inner);
        spaces.iter().find(|(_, v)| Arc::ptr_eq(v, volume)).map(|(start, _)| *start)
    }

    /// Whose byte `at` of the line space is, and where that volume begins.
    fn volume_at(&self, at: u64) -> Option<(u64, Arc<Volume>)> {
        let spaces = self.spaces.read().unwrap_or_else(PoisonError::into_inner);
        spaces.range(..=at).next_back().map(|(start, volume)| (*start, volume.clone()))
    }

    fn now(&self) -> Nanos {
        Nanos(self.begun.elapsed().as_nanos() as u64)
    }

    /// As admission knows a volume.
    fn volume_id(&self, base: u64) -> VolumeId {
        let group = u64::from(self.options.line_bytes) * u64::from(GROUP_LINES);
        // By its first group: no two volumes have the same.
        VolumeId((base / group) as u32)
    }

    /// Tells admission of an access. `None` where there is none to tell.
    fn observe(&self, base: u64, op: BlockOp, start: u64, len: u64) -> Option<Observed> {
        let admission = self.admission.as_ref()?;
        let access = BlockAccess {
            volume: self.volume_id(base),
            offset: start - base,
            bytes: len,
            op,
            kind: BlockKind::Unknown,
            now: self.now(),
        };
        Some(locked(admission).observe(&access))
    }

    /// What admission says of the line at `at`, of an access that it has observed.
    fn judge(&self, base: u64, op: BlockOp, at: u64, observed: Observed) -> Verdict {
        let Some(admission) = &self.admission else { return Verdict::Admit };
        let line = PolicyLine { volume: self.volume_id(base), offset: at - base };
        let kind = BlockKind::Unknown;
        let candidate = BlockCandidate { line, op, kind, observed, victim: None };
        let admission = locked(admission);
        match admission.judge(&candidate).is_admit() {
            false => Verdict::Reject,
            true if admission.wants_victim() => Verdict::Compete,
            true => Verdict::Admit,
        }
    }

    /// Whether admission would rather have `line` than `victim`.
    fn prefers(&self, line: LineId, victim: LineId) -> bool {
        let Some(admission) = &self.admission else { return true };
        let policy_line = |line: LineId| {
            let at = line.0 * u64::from(self.options.line_bytes);
            let (base, _) = self.volume_at(at)?;
            Some(PolicyLine { volume: self.volume_id(base), offset: at - base })
        };
        let (Some(line), Some(victim)) = (policy_line(line), policy_line(victim)) else {
            return true;
        };
        let kind = BlockKind::Unknown;
        let victim = Some(Victim { line: victim, kind });
        let (op, observed) = (BlockOp::Read, Observed::default());
        locked(admission).judge(&BlockCandidate { line, op, kind, observed, victim }).is_admit()
    }

    /// Where a slot lies on the device, bytes.
    fn slot_at(&self, shard: u32, slot: u32) -> u64 {
        let slots = u64::from(shard) * u64::from(self.slots_per_shard) + u64::from(slot);
        DATA_START + slots * u64::from(self.options.line_bytes)
    }

    /// One more error of the cache device: true for the one that is too many.
    fn device_failed(&self, what: &str, error: &std::io::Error) -> bool {
        let count = self.errors.fetch_add(1, Ordering::Relaxed) + 1;
        if count <= MOST_ERRORS {
            tracing::warn!("cache device '{}': {what} failed: {error}", self.device.name());
        }
        count == MOST_ERRORS && !self.disabled.swap(true, Ordering::SeqCst)
    }
}
