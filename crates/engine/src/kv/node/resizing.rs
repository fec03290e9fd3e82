//! How shards are taken to another limit of the memory while they serve.
//!
//! Each shard is changed a step at a time, so that it is never locked for long. The limit may change meanwhile: every step is told
//! the newest, so one that was overtaken is not grown to; and however often it changes, every shard gives up what the newest wants
//! given up, not only those that a walk comes to first. Shards grow when none has to shrink any more.

use std::collections::TryReserveError;

use larder_base::Now;

use super::plan::{Plan, PlanError};
use crate::dram::ObjectMemory;
use crate::kv::shard::KvShard;

/// What is to be done next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// [`Resizing::step`] with this shard.
    Shard(usize),
    /// All shards have what this limit gives them.
    Done(u64),
}

/// Shards on their way to another limit.
#[derive(Debug)]
pub struct Resizing {
    /// The division at the start.
    base: Plan,
    plan: Plan,
    no_eviction: bool,
    there: Vec<bool>,
    at: usize,
    shrank: bool,
    may_grow: bool,
}

impl Resizing {
    /// From the division at the start to `limit` bytes. With `no_eviction` no room is kept free.
    ///
    /// # Errors
    /// A limit that cannot be.
    pub fn new(base: Plan, limit: u64, no_eviction: bool) -> Result<Resizing, PlanError> {
        Ok(Resizing {
            base,
            plan: base.resized(limit)?,
            no_eviction,
            there: vec![false; base.shards],
            at: 0,
            shrank: false,
            may_grow: false,
        })
    }

    /// The limit that it goes to.
    pub fn limit(&self) -> u64 {
        self.plan.memory
    }

    /// What is next, if `newest` is the limit by now.
    ///
    /// # Errors
    /// A limit that cannot be.
    pub fn next(&mut self, newest: u64) -> Result<Next, PlanError> {
        if newest != self.plan.memory {
            self.plan = self.base.resized(newest)?;
            self.there.fill(false);
            self.may_grow = false;
        }
        loop {
            if self.at == self.there.len() {
                if !self.there.contains(&false) {
                    return Ok(Next::Done(self.plan.memory));
                }
                self.may_grow = !self.shrank;
                (self.at, self.shrank) = (0, false);
            }
            let shard = self.at;
            self.at += 1;
            if !self.there[shard] {
                return Ok(Next::Shard(shard));
            }
        }
    }

    /// One step of the shard that [`Resizing::next`] has named. Returns whether it has what the limit gives it now.
    ///
    /// # Errors
    /// The system has no memory for it to grow by.
    pub fn step<M: ObjectMemory>(
        &mut self,
        now: Now,
        index: usize,
        shard: &mut KvShard<M>,
    ) -> Result<bool, TryReserveError> {
        let plan = &self.plan;
        let shrinks = shard.shrinks_to(plan.arena_bytes);
        if !shrinks && !self.may_grow {
            return Ok(false);
        }
        self.shrank |= shrinks;
        if !self.no_eviction {
            shard.set_marks(plan.free_low, plan.free_high);
        }
        self.there[index] = !shard.resize(now, plan.arena_bytes)?;
        Ok(self.there[index])
    }
}
