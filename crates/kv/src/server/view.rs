//! One look at a running server.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_base::{Nanos, Now};

use super::shared::Shared;
use super::{Store, stats};
use crate::connection::ConnStats;
use crate::stats::{CacheStats, Latency};

/// Lets the live page look into a server.
pub struct View<S> {
    shared: Arc<Shared>,
    store: Arc<S>,
}

/// Everything at one moment. Counters run from the start (or the last `stats reset`).
pub(crate) struct Sample {
    pub(crate) now: Now,
    pub(crate) uptime: Nanos,
    pub(crate) version: &'static str,
    pub(crate) requests: ConnStats,
    pub(crate) connections: u64,
    pub(crate) max_connections: u64,
    pub(crate) total_connections: u64,
    pub(crate) rejected_connections: u64,
    pub(crate) idle_kicks: u64,
    pub(crate) latency: Latency,
    pub(crate) store: CacheStats,
    /// Bytes of the shared buffers in use: requests coming in, answers going out.
    pub(crate) buffers: (u64, u64),
    pub(crate) resident_bytes: u64,
    /// User and system CPU time, microseconds.
    pub(crate) cpu: (u64, u64),
    pub(crate) stopping: bool,
}

impl<S: Store> View<S> {
    pub(crate) fn new(shared: Arc<Shared>, store: Arc<S>) -> View<S> {
        View { shared, store }
    }

    pub(crate) fn sample(&self) -> Sample {
        let shared = &*self.shared;
        let now = shared.clock.now();
        let c = &shared.counters;
        Sample {
            now,
            uptime: now.mono,
            version: env!("CARGO_PKG_VERSION"),
            requests: shared.totals(),
            connections: c.connections.load(Ordering::Relaxed),
            max_connections: u64::from(shared.config.max_connections),
            total_connections: c.total_connections.load(Ordering::Relaxed),
            rejected_connections: c.rejected.load(Ordering::Relaxed),
            idle_kicks: c.idle_kicks.load(Ordering::Relaxed),
            latency: shared.latency(),
            store: self.store.stats(now),
            buffers: (shared.big.input.used(), shared.big.output.used()),
            resident_bytes: larder_runtime::machine::resident_memory().unwrap_or(0),
            cpu: stats::cpu_times(),
            stopping: shared.stopping(),
        }
    }
}
