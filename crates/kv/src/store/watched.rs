//! Evictions on their way from the shards, which note them, to whoever watches.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{MutexGuard, OnceLock};

use larder_base::Now;
use larder_engine::kv::record::TapedShard;

use super::Cell;
use crate::server::TellEvicted;

/// Whether and whom to tell.
#[derive(Default)]
pub(super) struct Evictions {
    on: AtomicBool,
    tell: OnceLock<Box<TellEvicted>>,
}

impl Evictions {
    #[inline]
    pub(super) fn on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    pub(super) fn turn(&self, on: bool, cells: &[Cell]) {
        if self.on.swap(on, Ordering::Relaxed) == on {
            return;
        }
        for cell in cells {
            cell.lock().unrecorded().watch_evictions(on);
        }
    }

    pub(super) fn tell_to(&self, tell: Box<TellEvicted>) {
        // The server that came first is the one that serves.
        let _ = self.tell.set(tell);
    }

    /// Tells what the shard has noted, once it is unlocked.
    pub(super) fn tell(&self, now: Now, mut shard: MutexGuard<'_, TapedShard>) {
        let (evicted, lost) = shard.unrecorded().take_evicted();
        drop(shard);
        if let Some(tell) = self.tell.get()
            && (!evicted.is_empty() || lost > 0)
        {
            tell(now, &evicted, lost);
        }
    }

    /// The same for all shards: what the cleaner, or another memory limit, has evicted.
    pub(super) fn tell_all(&self, now: Now, cells: &[Cell]) {
        if self.on() {
            for cell in cells {
                self.tell(now, cell.lock());
            }
        }
    }
}
