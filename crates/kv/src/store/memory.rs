//! `cache_memlimit`: another limit on DRAM while the server runs. Objects get what is gained or lose what is taken; the
//! flash index, buffers and tables stay as the start divided them.
//!
//! The command is answered as soon as the limit has been found possible; a background thread then takes the shards there,
//! each locked for about a millisecond at a time.

use std::sync::atomic::Ordering;

use larder_base::ByteSize;
use larder_runtime::Clock;

use super::KvStore;
use super::plan::{Plan, PlanError};

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
        loop {
            let wanted = self.memory.load(Ordering::Relaxed);
            let plan = self.plan.resized(wanted).map_err(MemoryError::from);
            match plan.and_then(|plan| self.divide(clock, &plan)) {
                Ok(true) => *divided = wanted,
                Ok(false) if !self.stopping() => continue,
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(%error, "the memory limit stays at {}", ByteSize(*divided));
                    self.memory.store(*divided, Ordering::Relaxed);
                    // Some shards have grown already.
                    if let Ok(plan) = self.plan.resized(*divided) {
                        self.divide(clock, &plan).ok();
                    }
                }
            }
            return;
        }
    }

    /// Takes the shards to `plan`, as long as its limit is the one that was set last: a higher one that holds no more is
    /// not grown to first. Returns whether they are there.
    pub(super) fn divide(&self, clock: &Clock, plan: &Plan) -> Result<bool, MemoryError> {
        let over = || self.stopping() || self.memory.load(Ordering::Relaxed) != plan.memory;
        for cell in &self.cells {
            if over() {
                return Ok(false);
            }
            if !self.no_eviction {
                cell.lock().unrecorded().set_marks(plan.free_low, plan.free_high);
            }
            while cell.lock().unrecorded().resize(clock.now(), plan.arena_bytes)? {
                if over() {
                    return Ok(false);
                }
            }
            let mut shard = cell.lock();
            larder_runtime::machine::prefer_huge_pages(shard.unrecorded().object_memory_mut());
        }
        Ok(true)
    }
}
