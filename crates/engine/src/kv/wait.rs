//! A large write that comes faster than flash takes what is before it.
//!
//! A write finds room at any time, but a large one at a price: what is on its way to flash, or wanted there, goes instead. So while room
//! is being made for it, it may wait a moment: a client that sends large objects is then as fast as the drive, and loses none of them.
//! Small ones never wait.

use larder_base::Nanos;

use super::ahead;
use super::shard::KvShard;
use crate::dram::{ObjectMemory, footprint};

/// A write waits for so long at most: most clients wait no longer for an answer.
const LONGEST: Nanos = Nanos::from_secs(1);

/// Whether a write that has waited `since` then may wait longer.
pub(super) fn may_wait(now: Nanos, since: Option<Nanos>) -> bool {
    since.is_none_or(|since| now.saturating_sub(since) < LONGEST)
}

/// Whether a value of so many bytes waits for room at all.
pub(super) fn is_large(value_len: usize) -> bool {
    value_len >= ahead::LEAST
}

/// What a write that finds no room at once does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// It is executed: there is room, or none is being made.
    Now,
    /// It is put off, and asked about again some milliseconds later.
    Later,
    /// The same, and maintenance is called.
    Called,
}

impl<M: ObjectMemory> KvShard<M> {
    /// Whether an object of these lengths would displace what is not asked to go.
    pub fn lacks_room(&self, key_len: usize, value_len: usize) -> bool {
        let bytes = self.arena.object_bytes(key_len, value_len, u32::MAX, u64::MAX);
        self.config.flash.segments > 0
            && footprint(bytes) <= self.arena.capacity()
            && !self.arena.has_room(bytes)
    }

    /// Maintenance has been called, and has not come.
    pub fn has_called(&self) -> bool {
        self.cleaner_woken
    }

    /// Room for an object of these lengths is to be made, as for one that has found none. Returns whether maintenance is called for it.
    pub fn await_room(&mut self, key_len: usize, value_len: usize) -> bool {
        let bytes = self.arena.object_bytes(key_len, value_len, u32::MAX, u64::MAX);
        self.ahead.missed(footprint(bytes), self.arena.capacity());
        let calls = !self.cleaner_woken && self.is_short();
        self.cleaner_woken |= calls;
        calls
    }
}
