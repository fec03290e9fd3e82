//! Changes of whole ranges: locked in every shard, with their bits, then dropped and changed at once.

use larder_engine::block::{LineId, OpId};

use super::super::cell::Message;
use super::super::{OP_BITS, locked};
use super::{Cached, RangeState};

/// Slots or groups that are looked at under one lock when a range is dropped.
const RANGE_STEP: u32 = 4096;
/// Where fewer groups of a shard may have lines of a range, the lines go at once.
const RANGE_VOID: u64 = 64;

impl Cached {
    /// A range is over: another may lock its lines.
    pub(super) fn next_range(&self, id: OpId) {
        if let Some(next) = locked(&self.cache.governor.ranges).leave(id) {
            let worker = (next.0 >> OP_BITS) as usize;
            self.cache.send(worker, next, Message::RangeTurn);
        }
    }

    pub(super) fn lock_next(&mut self, id: OpId) {
        let Some(RangeState { first, last, locked }) =
            self.ops.get(&id).and_then(|op| op.range.as_ref())
        else {
            return;
        };
        let (first, last, shard) = (*first, *last, *locked);
        let now = self.cache.now();
        // One shard after the other, in order: two ranges cannot wait for each other.
        self.call(shard, |s, fx| s.lock_range(now, id, first, last, fx));
    }

    pub(super) fn range_part_done(&mut self, id: OpId) {
        let Some(range) = self.ops.get_mut(&id).and_then(|op| op.range.as_mut()) else { return };
        range.locked += 1;
        if range.locked < self.cache.layout.shards {
            return self.lock_next(id);
        }
        let (first, last) = (range.first, range.last);
        if !self.cache.is_enabled() {
            return self.range_ready(id);
        }
        let region = |line: LineId| (line.group().0 / self.cache.layout.region_groups) as u32;
        locked(&self.cache.log_inbox).ranges.push((id, region(first), region(last)));
        self.cache.log_wake.notify_one();
    }

    /// The bits are durable and every shard has given the range: the lines go, then the store changes.
    pub(super) fn range_ready(&mut self, id: OpId) {
        let Some(op) = self.ops.get(&id) else { return };
        let Some(range) = &op.range else { return };
        let (first, last, at, len) = (range.first, range.last, op.at, op.len);
        for shard in 0..self.cache.layout.shards {
            let mut left = [Some((first, last)), None];
            if self.cache.is_enabled() {
                self.call(shard, |s, _| left = s.void_range(first, last, RANGE_VOID));
            }
            for (first, last) in left.into_iter().flatten() {
                let mut cursor = Some(0);
                while let Some(from) = cursor {
                    self.call(shard, |s, _| cursor = s.drop_range(first, last, from, RANGE_STEP));
                }
            }
        }
        self.piece(id, at, len as u32);
        self.step(id, None);
    }

    pub(super) fn range_over(&mut self, id: OpId) {
        if self.ops.get(&id).is_none_or(|op| op.range.is_none()) {
            return;
        }
        let now = self.cache.now();
        for shard in 0..self.cache.layout.shards {
            self.call(shard, |s, fx| s.unlock_range(now, id, fx));
        }
    }
}
