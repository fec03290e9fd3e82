//! `cache_memlimit`: another limit on DRAM while the server runs. Objects get what is gained or lose what is taken; the
//! flash index, buffers and tables stay as the start divided them.

use std::sync::atomic::Ordering;

use larder_base::{ByteSize, Now};

use super::plan::PlanError;
use super::{KvStore, locked};

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
    #[error("the system has no memory to grow by: {0}")]
    System(#[from] std::collections::TryReserveError),
}

impl KvStore {
    /// Sets the limit on DRAM to `bytes`. Shards are locked for about a millisecond at a time; the caller waits until all
    /// of it is done.
    pub(super) fn change_memory(&self, now: Now, bytes: u64) -> Result<(), MemoryError> {
        let _one_at_a_time = locked(&self.resizing);
        let before = self.memory.load(Ordering::Relaxed);
        if bytes < before && self.no_eviction {
            return Err(MemoryError::NoEviction);
        }
        // A client must not bring the machine down with a number.
        let machine = larder_runtime::machine::usable_memory().unwrap_or(u64::MAX);
        if bytes > before.max(machine) {
            return Err(MemoryError::Machine {
                wanted: ByteSize(bytes),
                machine: ByteSize(machine),
            });
        }
        let result = self.divide(now, bytes);
        if result.is_err() {
            // Some shards may have grown already.
            self.divide(now, before)?;
        } else {
            self.memory.store(bytes, Ordering::Relaxed);
            tracing::info!("memory limit {}, it was {}", ByteSize(bytes), ByteSize(before));
        }
        result
    }

    fn divide(&self, now: Now, bytes: u64) -> Result<(), MemoryError> {
        let plan = self.plan.resized(bytes)?;
        for cell in &self.cells {
            let smaller = cell.lock().dram_capacity() > plan.arena_bytes;
            cell.lock().set_marks(
                if self.no_eviction { 0 } else { plan.free_low },
                if self.no_eviction { 0 } else { plan.free_high },
            );
            while cell.lock().resize(now, plan.arena_bytes)? {}
            if !smaller {
                larder_runtime::machine::prefer_huge_pages(cell.lock().object_memory_mut());
            }
        }
        Ok(())
    }
}
