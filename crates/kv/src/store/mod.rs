//! The store behind `larder kv`: the engine's shards behind their locks, the flash beneath them, the cleaner and the
//! trainer beside them.
//!
//! ```text
//!  workers ── execute ──▶ [ shard ][ shard ] …  ◀── stage, publish, reclaim ── cleaner ── whole segments ──▶ flash
//!     └──── reads through their own rings ─────────────────────────────────────────────────────────────────▶ flash
//! ```

mod bell;
mod capture;
mod cleaner;
mod error;
mod former;
mod memory_file;
mod open;
mod record;
mod run;
mod stats;
mod warm;
mod watched;

#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use larder_base::lock::Threads;
use larder_base::{AppId, ByteSize, Now, ObjectHash, UnixSecs};
use larder_engine::kv::api::{
    Effects, Fetched as EngineFetched, FlashRead, Item, Op, Outcome, Request,
};
use larder_engine::kv::node::{Crawler, Node, Plan};
use larder_format::Geometry;
use larder_policy::application::ApplicationError;
use larder_runtime::{DataDir, Device, DeviceError, FlashDevice, SharedDir, Wear};

use self::bell::Bell;
use crate::connection::{Engine, Fetched, Step};
use crate::server::{Span, Store, TellEvicted};
use crate::stats::StoreStats;

pub use capture::CaptureStats;
pub use error::StoreError;
pub use larder_engine::kv::node::start::Warmth;
pub use open::{Opened, StoreConfig, open};
pub use record::{RecordConfig, RecordStats};

/// The flash as the store uses it.
struct Flash {
    device: Arc<dyn Device>,
    path: String,
    geometry: Geometry,
    admission: String,
    dir: DataDir,
    superblock: Mutex<open::Superblocks>,
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

/// The store.
pub struct KvStore {
    /// The shards behind their locks.
    node: Node<Threads>,
    flash: Option<Flash>,
    bell: Bell,
    /// Whom to tell of evictions.
    tell: OnceLock<Box<TellEvicted>>,
    threads: Mutex<cleaner::Background>,
    baseline: Mutex<StoreStats>,
    plan: Plan,
    training: larder_policy::learn::TrainParams,
    recorder: Option<record::Recorder>,
    capture: Option<capture::Capture>,
    /// Where a stop saves what is in DRAM.
    memory_file: Option<memory_file::Keeper>,
    /// A stop is not to take its time.
    hurry: Arc<AtomicBool>,
    /// Keeps runs with flash from the data directory while this one is without.
    _shared_dir: Option<SharedDir>,
}

impl KvStore {
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
        self.node.hash(key)
    }

    #[inline]
    fn app(&self, key: &[u8]) -> AppId {
        self.node.app(key)
    }

    fn fits(&self, key_len: usize, value_len: usize) -> bool {
        self.node.fits(key_len, value_len)
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
        let mut effects = watched::Telling { inner: effects, store: self, now };
        if let Some(capture) = &self.capture
            && capture.samples(request.hash)
        {
            let mut watched = capture::Sizing { inner: &mut effects, found: None };
            return match self.node.execute(now, request, fetched, &mut watched) {
                Outcome::Done => {
                    capture.take(now, request, watched.found);
                    Step::Done
                }
                Outcome::Read(read) => Step::Read(read),
            };
        }
        match self.node.execute(now, request, fetched, &mut effects) {
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
        self.node.list(now, cursor, show)
    }

    fn flush_all(&self, now: Now, at: UnixSecs) {
        self.node.flush_all(now, at);
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
        self.node.verify(now, read, bytes);
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
        self.bell.ring();
    }

    fn watch_evictions(&self, on: bool) {
        self.node.watch_evictions(on);
    }

    fn on_evictions(&self, tell: Box<TellEvicted>) {
        // The server that came first is the one that serves.
        let _ = self.tell.set(tell);
    }

    fn set_crawler(&self, on: bool) {
        self.node.set_crawler(on);
    }

    fn crawl(&self) -> bool {
        let begun = self.node.crawl();
        if begun {
            self.wake_cleaner();
        }
        begun
    }

    fn crawler(&self) -> Crawler {
        self.node.crawler()
    }

    fn application(&self, name: &str) -> Result<AppId, ApplicationError> {
        self.node.application(name)
    }

    fn set_memory_limit(&self, bytes: u64) -> bool {
        let before = self.memory_limit();
        let machine = larder_runtime::machine::usable_memory().unwrap_or(u64::MAX);
        match self.node.set_memory_limit(bytes, machine) {
            Ok(()) => {
                tracing::info!("memory limit {}, it was {}", ByteSize(bytes), ByteSize(before));
                self.bell.ring();
                true
            }
            Err(error) => {
                tracing::warn!(%error, "cache_memlimit refused");
                false
            }
        }
    }

    fn memory_limit(&self) -> u64 {
        self.node.memory_limit()
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
        self.node.flushed_at()
    }

    fn shutdown(&self, now: Now) {
        self.stop(now);
    }
}
