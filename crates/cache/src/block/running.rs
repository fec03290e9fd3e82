//! A cache that runs, and how it ends.

use std::sync::Arc;
use std::thread::JoinHandle;

use larder_base::Nanos;

use super::{Core, Warmth};

/// A cache that runs; [`Running::stop`] makes the next start warm after a reboot too.
pub struct Running {
    pub(super) cache: Arc<Core>,
    pub(super) thread: Option<JoinHandle<()>>,
    pub(super) census: Option<JoinHandle<()>>,
    pub(super) ended: bool,
    /// How the map was found.
    pub warmth: Warmth,
}

impl Running {
    /// The cache.
    pub fn cache(&self) -> &Arc<Core> {
        &self.cache
    }

    /// Makes everything durable. No worker may be using the cache any more.
    pub fn stop(mut self) {
        self.end();
    }

    /// Of a cache without threads ([`super::open::open_by_hand`]): does all that is due, and tells when there is something to do again. `None` where
    /// threads do it.
    pub fn turn(&self) -> Option<Nanos> {
        self.cache.turn()
    }

    /// Of a cache without threads: ends at once, and nothing more is written; memory that outlives the process stays as it is. The next start is as
    /// after a kill. For tests of that.
    pub fn abandon(mut self) {
        self.cache.abandon();
        self.ended = true;
    }

    fn end(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.cache.end_back();
        self.cache.end_by_hand();
        self.cache.leave_for_log(|inbox| inbox.stop());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
        self.cache.has_stopped();
        if let Some(thread) = self.census.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}
