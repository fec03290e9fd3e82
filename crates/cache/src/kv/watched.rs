//! Evictions on their way from the shards, which note them, to whoever watches.

use larder_base::Now;
use larder_engine::kv::Evicted;
use larder_engine::kv::api::{Effects, FlashRead, Reply};

use super::Core;

impl Core {
    /// Tells who watches, if somebody is there to be told.
    pub(super) fn tell(&self, now: Now, evicted: &[Evicted], lost: u64) {
        if let Some(tell) = self.tell.get() {
            tell(now, evicted, lost);
        }
    }
}

/// Passes effects on, and tells of evictions.
pub(super) struct Telling<'x, X> {
    pub(super) inner: &'x mut X,
    pub(super) cache: &'x Core,
    pub(super) now: Now,
}

impl<X: Effects> Effects for Telling<'_, X> {
    #[inline]
    fn reply(&mut self, reply: Reply<'_>) {
        self.inner.reply(reply);
    }

    #[inline]
    fn verify(&mut self, read: FlashRead) {
        self.inner.verify(read);
    }

    #[inline]
    fn wake_cleaner(&mut self) {
        self.inner.wake_cleaner();
    }

    fn evicted(&mut self, evicted: Vec<Evicted>, lost: u64) {
        self.cache.tell(self.now, &evicted, lost);
    }
}
