//! `cache_memlimit`: another limit on DRAM while the server runs. Objects get what is gained or lose what is taken; the
//! flash index, buffers and tables stay as the start divided them.
//!
//! The command is answered as soon as the limit has been found possible; a background thread then takes the shards there,
//! each locked for about a millisecond at a time.

use std::sync::atomic::Ordering;

use larder_base::ByteSize;
use larder_engine::kv::node::{Next, PlanError, Resizing};
use larder_runtime::Clock;

use super::KvStore;

/// Why the limit stays as it is.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error("{wanted} of DRAM is more than the {machine} that this process may use")]
    Machine { wanted: ByteSize, machine: ByteSize },
    #[error(
        "with -M (--disable-evictions) the limit can be raised, but not lowered: objects would be lost"
    )]
    NoEviction,
    #[error(
        "while a run is recorded the limit stays: what follows from another one is not in a record"
    )]
    Recording,
    #[error("the system has no memory to grow by: {0}")]
    System(#[from] std::collections::TryReserveError),
}

impl KvStore {
    /// Sets the limit on DRAM to `bytes`, if that can be.
    pub(super) fn change_memory(&self, bytes: u64) -> Result<(), MemoryError> {
        let before = self.memory.load(Ordering::Relaxed);
        if bytes < before && self.no_eviction {
            return Err(MemoryError::NoEviction);
        }
        if self.recorder.is_some() {
            return Err(MemoryError::Recording);
        }
        // A client must not bring the machine down with a number.
        let machine = larder_runtime::machine::usable_memory().unwrap_or(u64::MAX);
        if bytes > before.max(machine) {
            let (wanted, machine) = (ByteSize(bytes), ByteSize(machine));
            return Err(MemoryError::Machine { wanted, machine });
        }
        self.plan.resized(bytes)?;
        self.memory.store(bytes, Ordering::Relaxed);
        tracing::info!("memory limit {}, it was {}", ByteSize(bytes), ByteSize(before));
        for thread in super::locked(&self.threads).iter() {
            thread.thread().unpark();
        }
        Ok(())
    }

    /// Takes the shards to the limit that was set last. `divided` is the one they have.
    pub(super) fn follow_memory_limit(&self, clock: &Clock, divided: &mut u64) {
        if self.memory.load(Ordering::Relaxed) == *divided {
            return;
        }
        for _ in 0..2 {
            match self.divide(clock, || self.memory.load(Ordering::Relaxed)) {
                Ok(Some(limit)) => {
                    *divided = limit;
                    // Tables of other sizes, and what clients had under way: what the allocator keeps of that is nobody's.
                    larder_runtime::machine::release_free_memory();
                    return;
                }
                Ok(None) => return,
                Err((wanted, error)) => {
                    tracing::error!(%error, "the memory limit stays at {}", ByteSize(*divided));
                    // Some shards have grown already: the next turn takes them back. What a client has set since stays.
                    let relaxed = Ordering::Relaxed;
                    self.memory.compare_exchange(wanted, *divided, relaxed, relaxed).ok();
                }
            }
        }
    }

    /// Takes the shards to the limit that `newest` says, a step at a time, and asks it anew before every step. Returns the limit
    /// when all are there, `None` when the store stops.
    ///
    /// # Errors
    /// The limit that could not be had, and why.
    pub(super) fn divide(
        &self,
        clock: &Clock,
        mut newest: impl FnMut() -> u64,
    ) -> Result<Option<u64>, (u64, MemoryError)> {
        let limit = newest();
        let mut resizing = Resizing::new(self.plan, limit, self.no_eviction)
            .map_err(|e| (limit, MemoryError::from(e)))?;
        loop {
            if self.stopping() {
                return Ok(None);
            }
            let limit = newest();
            let i = match resizing.next(limit).map_err(|e| (limit, MemoryError::from(e)))? {
                Next::Done(limit) => return Ok(Some(limit)),
                Next::Shard(i) => i,
            };
            let cell = &self.cells[i];
            let mut locked = cell.lock();
            let shard = locked.unrecorded();
            let there = resizing
                .step(clock.now(), i, shard)
                .map_err(|e| (resizing.limit(), MemoryError::from(e)))?;
            if there {
                larder_runtime::machine::prefer_huge_pages(shard.object_memory_mut());
            }
            drop(locked);
            self.watch.tell_all(clock.now(), std::slice::from_ref(cell));
        }
    }
}
