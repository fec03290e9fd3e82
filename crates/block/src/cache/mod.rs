//! The cache in front of volumes: the engine behind locks, its bytes, its log's thread, and what each worker does.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`open`](mod@open) | formatting, opening, and what survives |
//! | `cell` | a shard behind its lock, with the bytes that it speaks of |
//! | `service` | a worker's requests, by way of the engine |
//! | `record` | `--record` |
//! | `log` | the thread of the map's log, which also writes fills |
//!
//! A request stays on the worker that took it. What the engine asks for on behalf of another worker's request (one that
//! waited for a line that this worker has brought) goes to that worker's inbox. Fills and everything durable is the
//! log's thread's affair: no client waits for it, but for the first write to a region that has been quiet.

mod cell;
mod log;
pub mod open;
mod record;
mod service;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Instant;

use larder_base::Nanos;
use larder_engine::block::address::Placing;
use larder_engine::block::record::{TapedAdmission, TapedShard};
use larder_engine::block::{BlockStats, LineId, LogStats, OpId, Verdict as EngineVerdict};
use larder_format::block::{BlockSuperblock, Layout};
use larder_policy::block::{
    BlockAccess, BlockCandidate, BlockKind, BlockOp, LineId as PolicyLine, VerdictCounts, Victim,
    VolumeId,
};
use larder_runtime::{FileHandle, FlashDevice};
use rustix::event::{EventfdFlags, eventfd};

use crate::server::Volume;
use cell::{Cell, Copying, Fill, Fx, Message, Out};
pub use open::{CacheConfig, CacheError, FormatConfig, Warmth};
pub use service::Cached;

/// Nothing panics while it holds one of these locks, and what they guard is whole after each operation.
fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bits of an operation's number that count; above them is the worker's number.
const OP_BITS: u32 = 48;

/// A volume as the cache knows it.
pub struct Attached {
    /// Its name.
    pub name: String,
    /// Its number, for policies.
    pub id: VolumeId,
    /// Its first byte in the line space.
    pub base: u64,
    /// Bytes of it that may be cached: whole lines.
    pub cached_bytes: u64,
    /// Bytes.
    pub bytes: u64,
    admission: Mutex<TapedAdmission>,
    backing: Mutex<Option<log::Flusher>>,
    volume: Arc<Volume>,
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached").field("name", &self.name).field("base", &self.base).finish()
    }
}

/// A worker's inbox.
struct Door {
    inbox: Mutex<Vec<(OpId, Message)>>,
    event: std::os::fd::OwnedFd,
}

impl Door {
    fn wake(&self) {
        // Full means that it will wake anyway.
        let _ = rustix::io::write(self.event.as_fd(), &1u64.to_ne_bytes());
    }
}

/// What waits for the log's thread.
#[derive(Default)]
struct LogInbox {
    fills: Vec<Fill>,
    copies: Vec<Copying>,
    asks: Vec<(u32, u32)>,
    ranges: Vec<(OpId, u32, u32)>,
    commit: bool,
    stop: bool,
}

/// What has happened, over all shards.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheStats {
    /// The engine's counters, summed.
    pub engine: BlockStats,
    /// The log's counters.
    pub log: LogStats,
    /// What admission said.
    pub verdicts: VerdictCounts,
    /// Slots of the cache.
    pub slots: u64,
    /// Bytes of DRAM of the map.
    pub map_bytes: u64,
    /// The cache is in use; otherwise volumes are in pass-through.
    pub enabled: bool,
    /// Regions whose bit is set.
    pub regions_set: u64,
}

/// A cache device with its volumes. Shared by all workers.
pub struct Cache {
    layout: Layout,
    placing: Placing,
    device: FlashDevice,
    file: FileHandle,
    shards: Vec<Mutex<Cell>>,
    volumes: RwLock<BTreeMap<String, Arc<Attached>>>,
    doors: Vec<Door>,
    log_inbox: Mutex<LogInbox>,
    log_wake: Condvar,
    log_stats: Mutex<(LogStats, u64)>,
    enabled: AtomicBool,
    flash_errors: AtomicU64,
    start: Instant,
    /// Writes down what is decided, if that was asked for.
    recorder: Option<record::Recording>,
    /// Outlives the process; kept for its lock.
    region: open::Region,
    config: CacheConfig,
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").field("layout", &self.layout).finish_non_exhaustive()
    }
}

/// A cache that runs; [`CacheHandle::stop`] makes the next start warm after a reboot too.
pub struct CacheHandle {
    cache: Arc<Cache>,
    thread: Option<JoinHandle<()>>,
    /// How the map was found.
    pub warmth: Warmth,
}

impl CacheHandle {
    /// The cache.
    pub fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// Makes everything durable. No worker may be using the cache any more.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        locked(&self.cache.log_inbox).stop = true;
        self.cache.log_wake.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

impl Drop for CacheHandle {
    fn drop(&mut self) {
        self.end();
    }
}

impl Cache {
    /// Bytes of a line.
    pub fn line_bytes(&self) -> u32 {
        self.layout.line
    }

    /// The layout of the device.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Whether the cache is used; otherwise the volumes are in pass-through.
    pub fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Relaxed)
    }

    fn now(&self) -> Nanos {
        Nanos(self.start.elapsed().as_nanos() as u64)
    }

    /// The volume of that name.
    pub fn volume(&self, name: &str) -> Option<Arc<Attached>> {
        self.volumes.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// All volumes.
    pub fn volumes(&self) -> Vec<Arc<Attached>> {
        self.volumes.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    fn volume_of(&self, line: LineId) -> Option<Arc<Attached>> {
        let at = line.0 * u64::from(self.layout.line);
        let volumes = self.volumes.read().unwrap_or_else(PoisonError::into_inner);
        volumes.values().find(|v| v.base <= at && at < v.base + v.bytes).cloned()
    }

    /// Counters now.
    pub fn stats(&self) -> CacheStats {
        let (mut sum, mut map_bytes) = (BlockStats::default(), 0);
        for cell in &self.shards {
            let cell = locked(cell);
            sum.add(&cell.shard.stats());
            map_bytes += cell.shard.map().memory_bytes();
        }
        let mut verdicts = VerdictCounts::default();
        for volume in self.volumes() {
            verdicts.add(locked(&volume.admission).verdicts());
        }
        let (log, regions_set) = *locked(&self.log_stats);
        CacheStats {
            engine: sum,
            log,
            verdicts,
            slots: self.layout.slots(),
            map_bytes,
            enabled: self.is_enabled(),
            regions_set,
        }
    }

    /// Lines in the cache, by a walk over the map: it takes its time.
    pub fn count_lines(&self) -> u64 {
        self.shards.iter().map(|cell| u64::from(locked(cell).shard.map().count())).sum()
    }

    /// Calls shard `shard` on behalf of worker `me`, if it is one. What the engine asks for goes into the inboxes of those
    /// whom it concerns; `me` is to look into its own afterwards, and is not woken.
    ///
    /// The messages, one's own too, are put there before the shard is let go: the end of an operation, which may be
    /// found by any worker, comes behind the bytes that were delivered for it, by whomever.
    fn with<R>(
        &self,
        shard: u32,
        me: Option<usize>,
        out: &mut Out,
        f: impl FnOnce(&mut TapedShard, &mut Fx<'_>) -> R,
    ) -> R {
        let mut wake = 0u128;
        let result = {
            let mut cell = locked(&self.shards[shard as usize]);
            let Cell { shard: engine, tables } = &mut *cell;
            let result = f(engine, &mut Fx { tables, out, shard, cache: self });
            for (op, message) in out.messages.drain(..) {
                let worker = (op.0 >> OP_BITS) as usize;
                if self.put(worker, op, message) && Some(worker) != me {
                    wake |= 1 << (worker % 128);
                }
            }
            result
        };
        while wake != 0 {
            let worker = wake.trailing_zeros();
            wake &= wake - 1;
            for door in self.doors.iter().skip(worker as usize).step_by(128) {
                door.wake();
            }
        }
        if out.wakes_log() {
            let mut inbox = locked(&self.log_inbox);
            let before = inbox.fills.len();
            inbox.fills.append(&mut out.fills);
            let copies = !out.copies.is_empty() && inbox.copies.is_empty();
            inbox.copies.append(&mut out.copies);
            let after = inbox.fills.len();
            // It sleeps until there is something, and then until there is something urgent or a batch of fills.
            let wake = !out.asks.is_empty()
                || (out.commit && !inbox.commit)
                || (before == 0 && after > 0)
                || copies
                || (before < log::BATCH && after >= log::BATCH);
            inbox.asks.append(&mut out.asks);
            inbox.commit |= std::mem::take(&mut out.commit);
            drop(inbox);
            if wake {
                self.log_wake.notify_one();
            }
        }
        result
    }

    /// Puts a message into a worker's inbox. Returns whether it is to be woken.
    fn put(&self, worker: usize, op: OpId, message: Message) -> bool {
        let mut inbox = locked(&self.doors[worker].inbox);
        inbox.push((op, message));
        inbox.len() == 1
    }

    fn send(&self, worker: usize, op: OpId, message: Message) {
        if self.put(worker, op, message) {
            self.doors[worker].wake();
        }
    }

    fn prefer(&self, line: LineId, victim: LineId) -> bool {
        let (Some(of), Some(victims)) = (self.volume_of(line), self.volume_of(victim)) else {
            return true;
        };
        let at = |v: &Attached, l: LineId| PolicyLine {
            volume: v.id,
            offset: l.0 * u64::from(self.layout.line) - v.base,
        };
        let candidate = BlockCandidate {
            line: at(&of, line),
            op: BlockOp::Read,
            kind: BlockKind::default(),
            observed: Default::default(),
            victim: Some(Victim { line: at(&victims, victim), kind: BlockKind::default() }),
        };
        locked(&of.admission).admit(&candidate).is_admit()
    }

    /// What admission says of an access, part by part of `parts` (first byte in the volume).
    fn judge(
        &self,
        volume: &Attached,
        op: BlockOp,
        offset: u64,
        bytes: u64,
        parts: impl Iterator<Item = u64>,
        out: &mut Vec<EngineVerdict>,
    ) {
        let mut admission = locked(&volume.admission);
        let kind = BlockKind::default();
        let observed = admission.observe(&BlockAccess {
            volume: volume.id,
            offset,
            bytes,
            op,
            kind,
            now: self.now(),
        });
        let compete = admission.wants_victim();
        let line = u64::from(self.layout.line);
        for at in parts {
            let line = PolicyLine { volume: volume.id, offset: at / line * line };
            let candidate = BlockCandidate { line, op, kind, observed, victim: None };
            // With a victim to be compared it is counted when that is known.
            let verdict =
                if compete { admission.judge(&candidate) } else { admission.admit(&candidate) };
            out.push(match (verdict.is_admit(), compete) {
                (true, false) => EngineVerdict::Admit,
                (true, true) => EngineVerdict::Compete,
                (false, _) => EngineVerdict::Reject,
            });
        }
    }

    /// A read or write of the cache device failed: it is counted, and said now and then.
    fn flash_failed(&self, what: &str, error: &dyn std::fmt::Display) {
        let count = self.flash_errors.fetch_add(1, Ordering::Relaxed) + 1;
        if count <= 10 || count.is_power_of_two() {
            tracing::warn!(
                count,
                "the cache device did not {what}: {error}; served by the backing store"
            );
        }
    }

    fn new_door() -> std::io::Result<Door> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Door { inbox: Mutex::default(), event })
    }

    fn superblock_of(device: &FlashDevice) -> Result<BlockSuperblock, CacheError> {
        open::read_superblock(device)
    }
}
