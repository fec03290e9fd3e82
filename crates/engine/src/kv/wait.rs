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

impl<M: ObjectMemory> KvShard<M> {
    /// Whether there is no room for an object of these lengths but what a write would have to evict for, though maintenance has been
    /// called, or is (`called`).
    pub fn room_is_awaited(&self, called: bool, key_len: usize, value_len: usize) -> bool {
        if self.config.flash.segments == 0 || !(called || self.cleaner_woken) {
            return false;
        }
        let bytes = self.arena.object_bytes(key_len, value_len, u32::MAX, u64::MAX);
        // With twice its room free, what lies in between is moved aside.
        let free = self.arena.free_bytes();
        free < 2 * footprint(bytes) && !self.arena.has_room(bytes)
    }
}
