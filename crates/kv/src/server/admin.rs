//! The server's side of a connection's administrative commands.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::shared::{Shared, lock};
use super::stats;
use super::store::Store;
use crate::connection::{Admin, DebugTime, PrefixUse};
use crate::watch::{Topics, Watcher};

pub(super) struct WorkerAdmin<S> {
    shared: Arc<Shared>,
    store: Arc<S>,
    /// The worker whose connections may watch; `None`: they may not (UDP).
    worker: Option<usize>,
    /// What the connection at work has become.
    watcher: Option<Arc<Watcher>>,
}

impl<S: Store> WorkerAdmin<S> {
    pub(super) fn new(shared: Arc<Shared>, store: Arc<S>, worker: Option<usize>) -> WorkerAdmin<S> {
        WorkerAdmin { shared, store, worker, watcher: None }
    }

    /// The connection at work has asked to watch: this is what it is told.
    pub(super) fn take_watcher(&mut self) -> Option<Arc<Watcher>> {
        self.watcher.take()
    }

    /// A connection that watched is gone.
    pub(super) fn unwatch(&self, watcher: &Arc<Watcher>) {
        self.shared.hub.remove(watcher);
        self.shared.hub.turn_evictions(|on| self.store.watch_evictions(on));
    }
}

impl<S: Store> Admin for WorkerAdmin<S> {
    fn stats(&mut self, arguments: &[u8], out: &mut Vec<u8>) {
        let mut words = arguments.split(|b| *b == b' ').filter(|w| !w.is_empty());
        let shared = &*self.shared;
        match words.next() {
            None => {
                let (stats, crawler) = (self.store.stats(shared.clock.now()), self.store.crawler());
                stats::general(shared, &stats, crawler, out);
            }
            Some(b"reset") => {
                shared.reset_stats();
                self.store.reset_stats();
                out.extend_from_slice(b"RESET\r\n");
                return;
            }
            Some(b"settings") => {
                let (memory, oldest) = (self.store.memory_limit(), self.store.oldest());
                let crawler = self.store.crawler();
                stats::settings(shared, memory, oldest, crawler, out);
            }
            Some(b"items") => stats::items(&self.store.stats(shared.clock.now()), out),
            Some(b"slabs") => stats::slabs(shared, &self.store.stats(shared.clock.now()), out),
            Some(b"sizes") => stats::stat(out, "sizes_status", "disabled"),
            Some(b"conns") => stats::conns(shared, out),
            Some(b"extstore") => stats::extstore(&self.store.stats(shared.clock.now()), out),
            Some(b"larder") => stats::larder(shared, &self.store.stats(shared.clock.now()), out),
            // memcached lists the keys of one slab class, as far as it likes. There are no classes: the list is empty.
            Some(b"cachedump") if words.next().is_some() && words.next().is_some() => {}
            Some(b"cachedump") => {
                out.extend_from_slice(b"CLIENT_ERROR bad command line format\r\n");
                return;
            }
            Some(b"detail") if !shared.config.dump_enabled => {
                out.extend_from_slice(b"CLIENT_ERROR stats detail not allowed\r\n");
                return;
            }
            Some(b"detail") => {
                match words.next() {
                    Some(b"on") => {
                        shared.detail.store(true, Ordering::Relaxed);
                        out.extend_from_slice(b"OK\r\n");
                    }
                    Some(b"off") => {
                        shared.detail.store(false, Ordering::Relaxed);
                        out.extend_from_slice(b"OK\r\n");
                    }
                    Some(b"dump") => lock(&shared.prefixes).dump(out),
                    _ => out.extend_from_slice(b"CLIENT_ERROR usage: stats detail on|off|dump\r\n"),
                }
                return;
            }
            Some(_) => {
                out.extend_from_slice(b"ERROR\r\n");
                return;
            }
        }
        out.extend_from_slice(b"END\r\n");
    }

    fn verbosity(&mut self, level: u32) {
        self.shared.verbosity.store(level, Ordering::Relaxed);
        if let Some(tell) = self.shared.on_verbosity.get() {
            tell(level);
        }
    }

    fn memory_limit(&mut self, mebibytes: u32) -> bool {
        self.store.set_memory_limit(u64::from(mebibytes) << 20)
    }

    fn refresh_certs(&mut self) -> Option<Result<(), String>> {
        let certificates = self.shared.certificates.as_ref()?;
        Some(match certificates.reload(self.shared.now_secs()) {
            Ok(()) => {
                tracing::info!("TLS certificates read again: a client has asked for it");
                Ok(())
            }
            Err(e) => {
                tracing::error!("the former TLS certificates stay in use: {e}");
                Err(e.to_string())
            }
        })
    }

    fn watch(&mut self, topics: Topics) -> Result<(), &'static [u8]> {
        let worker = match self.worker {
            Some(worker) if self.shared.config.watch_enabled => worker,
            _ => return Err(b"CLIENT_ERROR watch commands not allowed"),
        };
        match self.shared.hub.add(topics, worker) {
            Some(watcher) => self.watcher = Some(watcher),
            None => return Err(b"WATCHER_TOO_MANY log watcher limit reached"),
        }
        self.shared.hub.turn_evictions(|on| self.store.watch_evictions(on));
        Ok(())
    }

    fn crawler(&mut self, on: bool) {
        self.store.set_crawler(on);
    }

    fn crawl(&mut self) -> bool {
        self.store.crawl()
    }

    fn debug_time(&mut self, how: DebugTime) {
        match how {
            DebugTime::Pause => self.shared.clock.debug_pause(true),
            DebugTime::Resume => self.shared.clock.debug_pause(false),
            DebugTime::Jump(secs) => self.shared.clock.debug_advance(secs),
        }
    }

    fn prefix_use(&mut self, key: &[u8], how: PrefixUse) {
        lock(&self.shared.prefixes).record(key, how);
    }
}
