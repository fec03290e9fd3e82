//! `cache_memlimit`: another limit on DRAM while the server runs. Objects get what is gained or lose what is taken; the
//! flash index, buffers and tables stay as the start divided them.
//!
//! The command is answered as soon as the limit has been found possible; a background thread then takes the shards there,
//! each locked for about a millisecond at a time.

use std::sync::atomic::Ordering;

use larder_base::ByteSize;
use larder_engine::kv::node::PlanError;
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

    /// Takes the shards to the limit that `newest` says, a step at a time, each in turn, and asks it anew before every step. So
    /// a limit that was overtaken is not grown to; and however often the limit changes, every shard gives up what the newest
    /// one wants given up, not only those that a walk comes to first. Shards grow when none has to shrink any more. Returns the
    /// limit when all are there, `None` when the store stops.
    ///
    /// # Errors
    /// The limit that could not be had, and why.
    pub(super) fn divide(
        &self,
        clock: &Clock,
        mut newest: impl FnMut() -> u64,
    ) -> Result<Option<u64>, (u64, MemoryError)> {
        let plan_for =
            |limit: u64| self.plan.resized(limit).map_err(|e| (limit, MemoryError::from(e)));
        let mut plan = plan_for(newest())?;
        let mut there = vec![false; self.cells.len()];
        let mut may_grow = false;
        loop {
            let mut shrank = false;
            for (i, cell) in self.cells.iter().enumerate() {
                if self.stopping() {
                    return Ok(None);
                }
                let limit = newest();
                if limit != plan.memory {
                    plan = plan_for(limit)?;
                    there.fill(false);
                    may_grow = false;
                }
                if there[i] {
                    continue;
                }
                let mut locked = cell.lock();
                let shard = locked.unrecorded();
                let shrinks = shard.object_memory_held() > plan.arena_bytes;
                if !shrinks && !may_grow {
                    continue;
                }
                shrank |= shrinks;
                if !self.no_eviction {
                    shard.set_marks(plan.free_low, plan.free_high);
                }
                let more = shard.resize(clock.now(), plan.arena_bytes);
                there[i] = !more.map_err(|e| (plan.memory, MemoryError::from(e)))?;
                if there[i] {
                    larder_runtime::machine::prefer_huge_pages(shard.object_memory_mut());
                }
                drop(locked);
                self.watch.tell_all(clock.now(), std::slice::from_ref(cell));
            }
            if !there.contains(&false) && newest() == plan.memory {
                return Ok(Some(plan.memory));
            }
            may_grow = !shrank;
        }
    }
}
