//! The key-value cache: the engine's node, the flash beneath it, the cleaner and the trainer beside it.
//!
//! ```text
//!  callers ── execute ──▶ [ shard ][ shard ] …  ◀── stage, publish, reclaim ── cleaner ── whole segments ──▶ flash
//!     └──── reads, by their own rings or by the cache's threads ───────────────────────────────────────────▶ flash
//! ```
//!
//! A [`Core`] is asked in two ways. Programs with event loops of their own, such as the server, call [`Core::execute`] with the time,
//! carry out the reads that it names ([`Core::span`]) and call again with the bytes. All others use [`Core::get`],
//! [`Core::insert`] and their kin, which do that by themselves.

mod builder;
mod cache;
mod capture;
mod cleaner;
mod collect;
mod error;
mod former;
mod memory_file;
mod notifier;
mod open;
mod own_files;
mod reads;
mod record;
mod run;
mod stats;
mod upkeep;
mod warm;
mod watched;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use larder_base::lock::Threads;
use larder_base::{AppId, ByteSize, Nanos, Now, ObjectHash, UnixSecs};
use larder_engine::kv::api::{Effects, Fetched, FlashRead, Item, Op, Outcome, Request};
use larder_engine::kv::node::{Crawler, Node, Plan, Totals};
use larder_engine::kv::record::RunSetup;
use larder_engine::kv::{Evicted, FlashGeometry, Room};
use larder_format::Geometry;
use larder_policy::application::ApplicationError;
use larder_runtime::{DataDir, Device, DeviceError, FlashDevice, JoinedDevices, SharedDir, Wear};

use self::notifier::Notifier;

pub use builder::Builder;
pub use cache::{Cache, Closed, LONGEST_KEY, Lookup, NotStored};
pub use capture::{CaptureConfig, CaptureStats};
pub use error::CacheError;
pub use larder_engine::kv::node::start::Warmth;
pub use open::{CacheConfig, FlashFile, Opened, open};
pub use own_files::{LOG, flash_in_the_way, own_file};
pub use reads::ring_for;
pub use record::{RecordConfig, RecordStats};
pub use stats::{AppStats, CacheStats, DriveStats, FlashStats, TuningStats};
pub use upkeep::{Upkeep, open_without_threads};

/// Where a read lies on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Bytes from the start of the device.
    pub offset: u64,
    /// Bytes to read.
    pub len: u32,
}

/// Takes evicted objects, and the number of those that could not be kept to be told.
pub type TellEvicted = dyn Fn(Now, &[Evicted], u64) + Send + Sync;

/// One drive of the flash.
struct Drive {
    /// Its place among the drives.
    place: usize,
    path: String,
    /// The file of its write budget.
    budget: String,
    device: Arc<dyn Device>,
    /// The same device, to ask what the drive under it says of its wear.
    drive: Option<Arc<FlashDevice>>,
    /// What it said last.
    wear: Mutex<Option<Wear>>,
    geometry: Geometry,
    superblock: Mutex<larder_engine::kv::node::start::Superblocks>,
    read_errors: AtomicU64,
}

/// The flash as the cache uses it.
struct Flash {
    /// What is read: the drive, or all of them joined.
    device: Arc<dyn Device>,
    /// By place.
    drives: Vec<Drive>,
    flash: FlashGeometry,
    /// The number of this run.
    run: u64,
    admission: String,
    dir: DataDir,
    /// Keeps the shared memory locked.
    region: warm::Region,
    /// Why a checkpoint would not be believed, if it would not.
    no_checkpoint: Option<&'static str>,
}

impl Flash {
    /// The drive at a place.
    fn drive(&self, place: usize) -> Option<&Drive> {
        self.drives.iter().find(|drive| drive.place == place)
    }

    /// Where bytes of a segment lie on the device that is read.
    fn address(&self, segment: u16, offset: u64) -> u64 {
        let Some((place, own)) = self.flash.at(segment) else { return u64::MAX };
        let Some(drive) = self.drive(place) else { return u64::MAX };
        let at = drive.geometry.offset(own) + offset;
        if self.flash.drives.is_one() { at } else { JoinedDevices::address(place, at) }
    }

    /// As messages name it.
    fn name(&self) -> String {
        self.drives.iter().map(|drive| drive.path.as_str()).collect::<Vec<_>>().join(", ")
    }
}

/// A key-value cache in DRAM and on flash, shared by any number of threads that read flash by means of their own.
pub struct Core {
    /// The shards behind their locks.
    node: Node<Threads>,
    flash: Option<Flash>,
    notifier: Notifier,
    /// Whom to tell of evictions.
    tell: OnceLock<Box<TellEvicted>>,
    threads: Mutex<cleaner::Background>,
    baseline: Mutex<CacheStats>,
    /// What it was built from.
    setup: RunSetup,
    plan: Plan,
    recorder: Option<record::Recorder>,
    capture: Option<capture::Capture>,
    /// Where a stop saves what is in DRAM.
    memory_file: Option<memory_file::Keeper>,
    /// A stop is not to take its time.
    hurry: Arc<AtomicBool>,
    /// Keeps runs with flash from the data directory while this one is without.
    _shared_dir: Option<SharedDir>,
}

impl Core {
    fn flash(&self) -> Option<&Flash> {
        self.flash.as_ref()
    }

    /// What shards and log were built from.
    pub fn setup(&self) -> &RunSetup {
        &self.setup
    }

    /// All counters of the node, from which [`Core::stats`] are made.
    pub fn totals(&self, now: Now) -> Totals {
        self.node.totals(now.mono)
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

impl Core {
    /// The hash of a key.
    pub fn hash(&self, key: &[u8]) -> ObjectHash {
        self.node.hash(key)
    }

    /// The application that a key belongs to.
    #[inline]
    pub fn app(&self, key: &[u8]) -> AppId {
        self.node.app(key)
    }

    /// Whether an object of these lengths, in bytes, is within the configured limit.
    pub fn fits(&self, key_len: usize, value_len: usize) -> bool {
        self.node.fits(key_len, value_len)
    }

    /// Executes one request, or says what must be read first: then the caller reads [`Core::span`] of it and calls again with the
    /// same request and the bytes, or with none if they could not be had. What `effects` is told is carried out after the call.
    pub fn execute<X: Effects>(
        &self,
        now: Now,
        request: &Request<'_>,
        fetched: Option<Fetched<'_>>,
        effects: &mut X,
    ) -> Outcome {
        if tracing::level_filters::LevelFilter::current()
            == tracing::level_filters::LevelFilter::TRACE
        {
            trace(request, fetched.is_some());
        }
        let mut effects = watched::Telling { inner: effects, cache: self, now };
        if let Some(capture) = &self.capture
            && capture.samples(request.hash)
        {
            let mut watched = capture::Sizing { inner: &mut effects, found: None };
            let outcome = self.node.execute(now, request, fetched, &mut watched);
            if matches!(outcome, Outcome::Done) {
                capture.take(now, request, watched.found);
            }
            return outcome;
        }
        self.node.execute(now, request, fetched, &mut effects)
    }

    /// Whether a write should be put off; see [`Node::room`](larder_engine::kv::node::Node::room).
    #[inline]
    pub fn waits_for_room(
        &self,
        now: Now,
        key: &[u8],
        value_len: usize,
        since: &mut Option<Nanos>,
    ) -> bool {
        let room = self.node.room(now, key, value_len, since);
        if room == Room::Called {
            self.wake_cleaner();
        }
        room != Room::Now
    }

    /// Shows some of the objects in DRAM from `cursor` (0 at first) on: key, properties, bytes taken. Says where to go on;
    /// `None` after the last.
    pub fn list(
        &self,
        now: Now,
        cursor: u64,
        show: &mut dyn FnMut(&[u8], &Item<'_>, usize),
    ) -> Option<u64> {
        self.node.list(now, cursor, show)
    }

    /// From second `at` on, objects written before it are gone. `at` may lie in the future; when it does not, every
    /// object that exists goes now, also those written in this very second. A later call replaces one still to come.
    /// Returns whether they are: not from a cache that is being closed.
    #[must_use = "a cache that is being closed forgets nothing"]
    pub fn flush_all(&self, now: Now, at: UnixSecs) -> bool {
        self.node.flush_all(now, at)
    }

    /// The flash that callers read from; `None` when there is DRAM alone.
    pub fn device(&self) -> Option<Arc<dyn Device>> {
        self.flash().map(|f| f.device.clone())
    }

    /// Where a read lies on the [`Core::device`].
    pub fn span(&self, read: &FlashRead) -> Span {
        let at = u64::from(read.at.offset);
        let offset = self.flash().map_or(at, |flash| flash.address(read.at.segment, at));
        Span { offset, len: read.at.len }
    }

    /// Reads on the calling thread. `None`: the device failed, which is counted and logged.
    pub fn read(&self, read: &FlashRead) -> Option<Vec<u8>> {
        let flash = self.flash()?;
        let span = self.span(read);
        let mut bytes = vec![0; span.len as usize];
        match flash.device.read_at(span.offset, &mut bytes) {
            Ok(()) => Some(bytes),
            Err(error) => {
                self.read_failed(&error);
                None
            }
        }
    }

    /// From the return of this call on reads miss, and nothing is stored: [`Core::shutdown`] begins with it.
    pub fn refuse(&self) {
        self.node.refuse();
    }

    /// The bytes of a read that [`Effects::verify`] asked for, `None` when it failed or was not made. Each is answered once.
    pub fn verify(&self, now: Now, read: &FlashRead, bytes: Option<&[u8]>) {
        self.node.verify(now, read, bytes);
    }

    /// A read of the device failed: it is counted and logged.
    pub fn read_failed(&self, error: &DeviceError) {
        if let Some(flash) = self.flash() {
            let of = |drive: &&Drive| Some(drive.device.name()) == error.device();
            let Some(drive) = flash.drives.iter().find(of).or(flash.drives.first()) else { return };
            // The first failures are worth a line each; a dead drive would fill the log.
            let before = drive.read_errors.fetch_add(1, Ordering::Relaxed);
            if before < 10 || before.is_multiple_of(10_000) {
                tracing::error!(%error, failures = before + 1, "a read of flash failed; the object is forgotten");
            }
        }
    }

    /// What [`Effects::wake_cleaner`] asked for.
    pub fn wake_cleaner(&self) {
        self.notifier.notify();
    }

    /// Whether evictions from DRAM are to be told to whom [`Core::on_evictions`] named.
    pub fn watch_evictions(&self, on: bool) {
        self.node.watch_evictions(on);
    }

    /// Whom to tell of evictions. The first call counts.
    pub fn on_evictions(&self, tell: Box<TellEvicted>) {
        let _ = self.tell.set(tell);
    }

    /// Whether expired objects are removed in the background; changes it.
    pub fn set_crawler(&self, on: bool) {
        self.node.set_crawler(on);
    }

    /// Begins to look through all objects for expired ones. False when that is turned off.
    pub fn crawl(&self) -> bool {
        let begun = self.node.crawl();
        if begun {
            self.wake_cleaner();
        }
        begun
    }

    /// What removes expired objects in the background.
    pub fn crawler(&self) -> Crawler {
        self.node.crawler()
    }

    /// The number of a named application.
    ///
    /// # Errors
    /// The name cannot be one, or there are too many.
    pub fn application(&self, name: &str) -> Result<AppId, ApplicationError> {
        self.node.application(name)
    }

    /// Changes the limit on DRAM, bytes. False, with a line in the log, when that cannot be.
    pub fn set_memory_limit(&self, bytes: u64) -> bool {
        let before = self.memory_limit();
        let machine = larder_runtime::machine::usable_memory().unwrap_or(u64::MAX);
        match self.node.set_memory_limit(bytes, machine) {
            Ok(()) => {
                tracing::info!("memory limit {}, it was {}", ByteSize(bytes), ByteSize(before));
                self.notifier.notify();
                true
            }
            Err(error) => {
                tracing::warn!(%error, "another memory limit is refused");
                false
            }
        }
    }

    /// The limit on DRAM in force, bytes.
    pub fn memory_limit(&self) -> u64 {
        self.node.memory_limit()
    }

    /// What the cache holds and has done.
    pub fn stats(&self, now: Now) -> CacheStats {
        self.collect_stats(now)
    }

    /// Counters of events go back to zero, not those of what is held.
    pub fn reset_stats(&self) {
        // Taken before the lock, which `collect_stats` takes too.
        let raw = self.raw_stats(Now::default());
        *locked(&self.baseline) = raw;
    }

    /// Wall second before which everything was flushed; 0 when nothing was.
    pub fn flushed_at(&self) -> UnixSecs {
        self.node.flushed_at()
    }
}
