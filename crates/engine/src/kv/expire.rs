//! Expired objects leave DRAM though nobody asks for them.
//!
//! A pass goes over the table of objects, a window of buckets a call. It begins when something may have expired: the
//! earliest expiry that any object in DRAM was given is kept, from above. A pass over much memory takes many seconds, so that it
//! costs little of any one.

use larder_base::{Expiry, Now};
use larder_policy::admission::Departure;

use super::shard::KvShard;
use crate::dram::{Block, ObjectHeader, ObjectMemory};

/// Buckets that one call looks at: bounds how long the shard stays locked.
const WINDOW: u32 = 512;

/// Buckets looked at in one second of wall time at least, and the seconds that a pass over a large table takes.
const LEAST_A_SECOND: u32 = 1 << 16;
const SECONDS_A_PASS: u32 = 32;

/// Where the search for expired objects stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sweep {
    /// No object in DRAM expires before this second, but for what the pass under way will come to.
    earliest: u32,
    /// The bucket that the pass under way comes to next.
    at: Option<u32>,
    /// Buckets left in this second.
    left: u32,
    second: u32,
    /// Objects removed. Not among the shard's counters, which a record's digests cover: older records go on replaying.
    removed: u64,
    /// Flushed objects in whose place their key was stored again; uncounted there for the same reason.
    pub(super) replaced: u64,
}

impl Default for Sweep {
    fn default() -> Sweep {
        Sweep { earliest: u32::MAX, at: None, left: 0, second: 0, removed: 0, replaced: 0 }
    }
}

impl Sweep {
    /// The table was built anew: where a pass stood means nothing any more.
    pub(super) fn restart(&mut self) {
        (self.earliest, self.at) = (0, None);
    }

    /// An object in DRAM has been given this expiry.
    #[inline]
    pub(super) fn note(&mut self, expiry: Expiry) {
        if expiry != Expiry::NEVER {
            self.earliest = self.earliest.min(expiry.0);
        }
    }
}

impl<M: ObjectMemory> KvShard<M> {
    /// Whether a pass of [`KvShard::expire`] is under way.
    pub fn is_expiring(&self) -> bool {
        self.sweep.at.is_some()
    }

    /// Whether [`KvShard::expire`] would do anything.
    pub fn expiry_is_due(&self, now: Now, all: bool) -> bool {
        let due = self.sweep.at.is_some() || self.sweep.earliest <= now.wall.0;
        all || due || self.flush_announced().is_some_and(|at| at <= now.wall)
    }

    /// Objects that [`KvShard::expire`] has removed.
    pub fn expired_unasked(&self) -> u64 {
        self.sweep.removed
    }

    /// Objects that were gone by a flush when their key was stored again, as far as flushed objects are remembered.
    pub fn flushed_replaced(&self) -> u64 {
        self.sweep.replaced
    }

    /// Removes expired objects from DRAM, a bounded number of buckets at a time. `all`: to the end of the pass under way, or of
    /// a new one, whatever is known of expiries and however much was done this second. Returns whether it should be called
    /// again at once.
    pub fn expire(&mut self, now: Now, all: bool) -> bool {
        self.flush_if_due(now);
        let width = self.table.width();
        let mut at = match self.sweep.at {
            Some(at) => at,
            None if all || self.sweep.earliest <= now.wall.0 => {
                self.sweep.earliest = u32::MAX;
                0
            }
            None => return false,
        };
        if self.sweep.second != now.wall.0 {
            self.sweep.second = now.wall.0;
            self.sweep.left = LEAST_A_SECOND.max(width / SECONDS_A_PASS);
        }
        let window = if all { WINDOW } else { WINDOW.min(self.sweep.left) };
        let end = width.min(at.saturating_add(window));
        self.sweep.left = self.sweep.left.saturating_sub(end.saturating_sub(at));
        let mut gone: Vec<(Block, ObjectHeader)> = Vec::new();
        while at < end {
            for (block, h) in self.table.chain(&self.arena, at) {
                if h.expiry.is_past(now.wall) {
                    gone.push((block, h));
                } else {
                    self.sweep.note(h.expiry);
                }
            }
            at += 1;
        }
        for (block, h) in gone {
            let hash = self.hash_of(block, &h);
            self.sweep.removed += 1;
            self.remove_dram(hash, block, &h, Some((now, Departure::Removed)));
        }
        let more = end < width;
        self.sweep.at = more.then_some(end);
        more && (all || self.sweep.left > 0)
    }
}
