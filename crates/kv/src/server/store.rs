//! What a server needs of the store behind it, beyond executing requests.

use std::sync::Arc;

use larder_base::{AppId, Now, UnixSecs};
use larder_cache::kv::Core;
pub use larder_cache::kv::{Span, TellEvicted};
use larder_engine::kv::api::FlashRead;
use larder_engine::kv::node::Crawler;
use larder_policy::application::ApplicationError;
use larder_runtime::Device;

use crate::connection::Engine;
use crate::stats::CacheStats;

/// A store that workers share: the engine's shards, the flash beneath them, the cleaner.
pub trait Store: Engine<Read: Send> + Send + Sync + 'static {
    /// The flash that workers read from; `None` when there is DRAM alone.
    fn device(&self) -> Option<Arc<dyn Device>> {
        None
    }

    /// Where a read lies. Never called without a [`Store::device`].
    fn span(&self, _read: &Self::Read) -> Span {
        Span { offset: 0, len: 0 }
    }

    /// Where a background read lies. Never called without a [`Store::device`].
    fn verify_span(&self, _read: &FlashRead) -> Span {
        Span { offset: 0, len: 0 }
    }

    /// The bytes of a background read, `None` when it failed or was not made. Each that was asked for is answered once.
    fn verify(&self, _now: Now, _read: &FlashRead, _bytes: Option<&[u8]>) {}

    /// A read failed: the store counts it and decides whether the flash is still good.
    fn read_failed(&self, _error: &larder_runtime::DeviceError) {}

    /// Free room is short: the cleaner should run.
    fn wake_cleaner(&self) {}

    /// The id of an application that has a listener of its own. A store that does not tell applications apart has one.
    ///
    /// # Errors
    /// The name cannot be one, or there are too many.
    fn application(&self, _name: &str) -> Result<AppId, ApplicationError> {
        Ok(AppId::DEFAULT)
    }

    /// `cache_memlimit`, bytes. False when the limit cannot be changed to that.
    fn set_memory_limit(&self, _bytes: u64) -> bool {
        false
    }

    /// The limit on DRAM in force, bytes; 0 when there is none.
    fn memory_limit(&self) -> u64 {
        0
    }

    /// Whether expired objects are removed in the background; changes it.
    fn set_crawler(&self, _on: bool) {}

    /// Begins to look through all objects for expired ones. False when that is turned off.
    fn crawl(&self) -> bool {
        false
    }

    /// What removes expired objects in the background.
    fn crawler(&self) -> Crawler {
        Crawler::default()
    }

    /// Whether evictions from DRAM are to be told to whoever [`Store::on_evictions`] named.
    fn watch_evictions(&self, _on: bool) {}

    /// Whom to tell of evictions, and how many there were besides. Given once, before the first request.
    fn on_evictions(&self, _tell: Box<TellEvicted>) {}

    /// What it holds and has done.
    fn stats(&self, now: Now) -> CacheStats;

    /// `stats reset`: counters of events go back to zero, not those of what is held.
    fn reset_stats(&self) {}

    /// Wall second before which everything was flushed, for `stats settings`; 0 when nothing was.
    fn oldest(&self) -> UnixSecs {
        UnixSecs(0)
    }

    /// Writes down what a warm restart needs. Called once, after the last request.
    fn shutdown(&self, _now: Now) {}
}

/// The model serves too, in tests.
#[cfg(any(test, feature = "testing"))]
impl Store for crate::model::ModelEngine {
    fn stats(&self, _now: Now) -> CacheStats {
        let items = self.len() as u64;
        CacheStats { items, dram_items: items, ..CacheStats::default() }
    }
}

/// The cache itself.
impl Store for Core {
    fn device(&self) -> Option<Arc<dyn Device>> {
        Core::device(self)
    }
    fn span(&self, read: &FlashRead) -> Span {
        Core::span(self, read)
    }
    fn verify_span(&self, read: &FlashRead) -> Span {
        Core::span(self, read)
    }
    fn verify(&self, now: Now, read: &FlashRead, bytes: Option<&[u8]>) {
        Core::verify(self, now, read, bytes);
    }
    fn read_failed(&self, error: &larder_runtime::DeviceError) {
        Core::read_failed(self, error);
    }
    fn wake_cleaner(&self) {
        Core::wake_cleaner(self);
    }
    fn application(&self, name: &str) -> Result<AppId, ApplicationError> {
        Core::application(self, name)
    }
    fn set_memory_limit(&self, bytes: u64) -> bool {
        Core::set_memory_limit(self, bytes)
    }
    fn memory_limit(&self) -> u64 {
        Core::memory_limit(self)
    }
    fn set_crawler(&self, on: bool) {
        Core::set_crawler(self, on);
    }
    fn crawl(&self) -> bool {
        Core::crawl(self)
    }
    fn crawler(&self) -> Crawler {
        Core::crawler(self)
    }
    fn watch_evictions(&self, on: bool) {
        Core::watch_evictions(self, on);
    }
    fn on_evictions(&self, tell: Box<TellEvicted>) {
        Core::on_evictions(self, tell);
    }
    fn stats(&self, now: Now) -> CacheStats {
        Core::stats(self, now)
    }
    fn reset_stats(&self) {
        Core::reset_stats(self);
    }
    fn oldest(&self) -> UnixSecs {
        self.flushed_at()
    }
    fn shutdown(&self, now: Now) {
        Core::shutdown(self, now);
    }
}
