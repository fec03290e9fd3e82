//! The store behind `larder kv`: the engine's shards behind their locks, the flash beneath them, the cleaner and the
//! trainer beside them.
//!
//! ```text
//!  workers ── execute ──▶ [ shard ][ shard ] …  ◀── stage, publish, reclaim ── cleaner ── whole segments ──▶ flash
//!     └──── reads through their own rings ─────────────────────────────────────────────────────────────────▶ flash
//! ```

mod capture;
mod cleaner;
mod error;
mod former;
mod memory;
mod memory_file;
mod open;
mod record;
mod run;
mod stats;
mod warm;
mod watched;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};

use larder_base::{AppId, KeyHasher, Now, ObjectHash, UnixSecs};
use larder_engine::kv::api::{
    Effects, Fetched as EngineFetched, FlashRead, Item, Op, Outcome, Request,
};
use larder_engine::kv::node::{Plan, Training};
use larder_engine::kv::record::{TapedLog, TapedShard};
use larder_engine::kv::{KvShard, OwnerOf, Shards, object_fits};
use larder_format::Geometry;
use larder_policy::application::{ApplicationError, Applications, Lookup};
use larder_policy::budget::KeptBudget;
use larder_runtime::{AlignedBuf, DataDir, Device, DeviceError, FlashDevice, SharedDir, Wear};

use crate::connection::{Engine, Fetched, Step};
use crate::server::{Crawler, Span, Store, TellEvicted};
use crate::stats::StoreStats;

pub use capture::CaptureStats;
pub use error::StoreError;
pub use open::{Opened, StoreConfig, open};
pub use record::{RecordConfig, RecordStats};
pub use warm::Warmth;

/// A shard and its lock, on cache lines of its own.
#[repr(align(128))]
struct Cell {
    shard: Mutex<TapedShard>,
    /// Times that a thread found the lock taken.
    waits: AtomicU64,
}

impl Cell {
    #[inline]
    fn lock(&self) -> MutexGuard<'_, TapedShard> {
        match self.shard.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::WouldBlock) => {
                self.waits.fetch_add(1, Ordering::Relaxed);
                self.shard.lock().unwrap_or_else(PoisonError::into_inner)
            }
            // A thread died inside: the assertion that failed has been reported, and refusing every later request of
            // the shard would help nobody. Records are verified when they are read.
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
        }
    }
}

/// The flash as the store uses it.
struct Flash {
    device: Arc<dyn Device>,
    path: String,
    geometry: Geometry,
    admission: String,
    log: Mutex<TapedLog<AlignedBuf>>,
    /// How many threads wait for the log: the cleaner, which takes it again and again, lets them go first.
    log_wanted: AtomicU64,
    dir: DataDir,
    /// How many applications the data directory knows.
    applications_kept: AtomicUsize,
    superblock: Mutex<open::Superblocks>,
    /// What of the write budget the data directory knows.
    kept_budget: Mutex<KeptBudget>,
    read_errors: AtomicU64,
    /// Keeps the shared memory locked.
    region: warm::Region,
    /// The same device, to ask what the drive under it says of its wear.
    drive: Option<Arc<FlashDevice>>,
    /// What it said last.
    wear: Mutex<Option<Wear>>,
    /// Why a checkpoint would not be believed, if it would not.
    no_checkpoint: Option<&'static str>,
}

/// What the cleaner waits on.
#[derive(Default)]
struct Bell {
    state: Mutex<BellState>,
    changed: Condvar,
    /// The cleaner rests.
    rested: Condvar,
    stop: AtomicBool,
}

#[derive(Default)]
struct BellState {
    rung: bool,
    resting: bool,
}

/// The store.
pub struct KvStore {
    hasher: KeyHasher,
    cells: Box<[Cell]>,
    applications: RwLock<Applications>,
    /// How many there are, to be asked without the lock.
    applications_known: AtomicUsize,
    /// What ends a key's prefix: a key without it needs no look at the applications.
    delimiter: Option<u8>,
    max_object: u32,
    /// Objects are never evicted (`-M`).
    no_eviction: bool,
    /// `-m`, or what a client has set since.
    memory: AtomicU64,
    flash: Option<Flash>,
    bell: Arc<Bell>,
    crawler: cleaner::CrawlerState,
    watch: watched::Evictions,
    threads: Mutex<Vec<std::thread::JoinHandle<()>>>,
    baseline: Mutex<StoreStats>,
    flushed_at: std::sync::atomic::AtomicU32,
    plan: Plan,
    training: larder_policy::learn::TrainParams,
    /// When classifiers are trained.
    schedule: Mutex<Training>,
    recorder: Option<record::Recorder>,
    capture: Option<capture::Capture>,
    /// Where a stop saves what is in DRAM.
    memory_file: Option<memory_file::Keeper>,
    /// A stop is not to take its time.
    hurry: Arc<AtomicBool>,
    /// Keeps runs with flash from the data directory while this one is without.
    _shared_dir: Option<SharedDir>,
}

/// The shards to the log: each locked for one call.
struct LockedShards<'a>(&'a [Cell]);

impl Shards for LockedShards<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }
    fn shard_of(&self, hash: ObjectHash) -> usize {
        OwnerOf::shard_of(hash, self.0.len())
    }
    fn with<R>(&mut self, shard: usize, f: impl FnOnce(&mut KvShard) -> R) -> R {
        self.0[shard].lock().log_call(f)
    }
}

impl KvStore {
    #[inline]
    fn cell(&self, hash: ObjectHash) -> &Cell {
        &self.cells[OwnerOf::shard_of(hash, self.cells.len())]
    }

    fn flash(&self) -> Option<&Flash> {
        self.flash.as_ref()
    }

    /// How the memory was divided.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A request in the log.
#[cold]
fn trace(request: &Request<'_>, again: bool) {
    let key = request.key.escape_ascii();
    // With what was read from flash.
    let after = if again { ", read from flash" } else { "" };
    match &request.op {
        Op::Get(_) => tracing::trace!("get {key}{after}"),
        Op::Store(store) => {
            let mode = format!("{:?}", store.mode).to_lowercase();
            tracing::trace!("{mode} {key} {} bytes{after}", store.value.len());
        }
        Op::Delete(_) => tracing::trace!("delete {key}{after}"),
        Op::Arith(_) => tracing::trace!("arithmetic {key}{after}"),
        Op::Touch(_) => tracing::trace!("touch {key}{after}"),
        Op::Peek => tracing::trace!("look at {key}{after}"),
    }
}

impl Engine for KvStore {
    type Read = FlashRead;

    fn hash(&self, key: &[u8]) -> ObjectHash {
        self.hasher.hash(key)
    }

    #[inline]
    fn app(&self, key: &[u8]) -> AppId {
        if self.delimiter.is_none_or(|d| !key.contains(&d)) {
            return AppId::DEFAULT;
        }
        let known = self.applications.read().unwrap_or_else(PoisonError::into_inner).lookup(key);
        match known {
            Lookup::Known(app) => app,
            Lookup::New => {
                let mut applications =
                    self.applications.write().unwrap_or_else(PoisonError::into_inner);
                let app = applications.assign(key);
                self.applications_known.store(applications.len(), Ordering::Relaxed);
                app
            }
        }
    }

    fn fits(&self, key_len: usize, value_len: usize) -> bool {
        object_fits(key_len, value_len, self.max_object)
    }

    fn read_len(&self, read: &FlashRead) -> usize {
        read.at.len as usize
    }

    fn execute<X: Effects>(
        &self,
        now: Now,
        request: &Request<'_>,
        fetched: Option<Fetched<'_, FlashRead>>,
        effects: &mut X,
    ) -> Step<FlashRead> {
        if tracing::level_filters::LevelFilter::current()
            == tracing::level_filters::LevelFilter::TRACE
        {
            trace(request, fetched.is_some());
        }
        let fetched = fetched.map(|f| EngineFetched { read: f.read, bytes: f.bytes });
        if let Some(capture) = &self.capture
            && capture.samples(request.hash)
        {
            let mut watched = capture::Sizing { inner: effects, found: None };
            let outcome =
                self.cell(request.hash).lock().execute(now, request, fetched, &mut watched);
            return match outcome {
                Outcome::Done => {
                    capture.take(now, request, watched.found);
                    Step::Done
                }
                Outcome::Read(read) => Step::Read(read),
            };
        }
        let mut shard = self.cell(request.hash).lock();
        let outcome = shard.execute(now, request, fetched, effects);
        if self.watch.on() {
            self.watch.tell(now, shard);
        }
        match outcome {
            Outcome::Done => Step::Done,
            Outcome::Read(read) => Step::Read(read),
        }
    }

    fn list(
        &self,
        now: Now,
        cursor: u64,
        show: &mut dyn FnMut(&[u8], &Item<'_>, usize),
    ) -> Option<u64> {
        // Shard above, place in its table below.
        let (shard, at) = ((cursor >> 32) as usize, cursor as u32);
        let next = self.cells.get(shard)?.lock().list(now, at, show);
        match next {
            Some(at) => Some((shard as u64) << 32 | u64::from(at)),
            None if shard + 1 < self.cells.len() => Some((shard as u64 + 1) << 32),
            None => None,
        }
    }

    fn flush_all(&self, now: Now, at: UnixSecs) {
        for cell in &self.cells {
            cell.lock().flush(now, (at > now.wall).then_some(at));
        }
        self.flushed_at.store(at.0, Ordering::Relaxed);
    }
}

impl Store for KvStore {
    fn device(&self) -> Option<Arc<dyn Device>> {
        self.flash().map(|f| f.device.clone())
    }

    fn span(&self, read: &FlashRead) -> Span {
        let start = self.flash().map_or(0, |f| f.geometry.offset(read.at.segment));
        Span { offset: start + u64::from(read.at.offset), len: read.at.len }
    }

    fn verify_span(&self, read: &FlashRead) -> Span {
        self.span(read)
    }

    fn verify(&self, now: Now, read: &FlashRead, bytes: Option<&[u8]>) {
        self.cell(read.hash).lock().verify(now, read, bytes);
    }

    fn read_failed(&self, error: &DeviceError) {
        if let Some(flash) = self.flash() {
            // The first failures are worth a line each; a dead drive would fill the log.
            let before = flash.read_errors.fetch_add(1, Ordering::Relaxed);
            if before < 10 || before.is_multiple_of(10_000) {
                tracing::error!(%error, failures = before + 1, "a read of flash failed; the object is forgotten");
            }
        }
    }

    fn wake_cleaner(&self) {
        locked(&self.bell.state).rung = true;
        self.bell.changed.notify_one();
    }

    fn watch_evictions(&self, on: bool) {
        self.watch.turn(on, &self.cells);
    }

    fn on_evictions(&self, tell: Box<TellEvicted>) {
        self.watch.tell_to(tell);
    }

    fn set_crawler(&self, on: bool) {
        self.crawler.turn(on);
    }

    fn crawl(&self) -> bool {
        let begun = self.crawler.begin();
        if begun {
            self.wake_cleaner();
        }
        begun
    }

    fn crawler(&self) -> Crawler {
        self.crawler.report()
    }

    fn application(&self, name: &str) -> Result<AppId, ApplicationError> {
        let mut applications = self.applications.write().unwrap_or_else(PoisonError::into_inner);
        let app = applications.register(name);
        self.applications_known.store(applications.len(), Ordering::Relaxed);
        app
    }

    fn set_memory_limit(&self, bytes: u64) -> bool {
        match self.change_memory(bytes) {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "cache_memlimit refused");
                false
            }
        }
    }

    fn memory_limit(&self) -> u64 {
        self.memory.load(Ordering::Relaxed)
    }

    fn stats(&self, now: Now) -> StoreStats {
        self.collect_stats(now)
    }

    fn reset_stats(&self) {
        // Taken before the lock, which `collect_stats` takes too.
        let raw = self.raw_stats(Now::default());
        *locked(&self.baseline) = raw;
    }

    fn oldest(&self) -> UnixSecs {
        UnixSecs(self.flushed_at.load(Ordering::Relaxed))
    }

    fn shutdown(&self, now: Now) {
        self.stop(now);
    }
}
