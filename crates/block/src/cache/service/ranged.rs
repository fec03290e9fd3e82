//! Changes of whole ranges: locked in every shard, with their bits, then dropped and changed at once.

use larder_engine::block::node::ranged::{Discard, LEAST_VOID, STEP};
use larder_engine::block::{LineId, OpId};

use super::super::locked;
use super::Cached;

impl Cached {
    /// A range is over: another may lock its lines.
    pub(super) fn next_range(&self, id: OpId) {
        self.cache.next_range(id);
    }

    pub(super) fn lock_next(&mut self, id: OpId) {
        let Some(range) = self.ops.get(&id).and_then(|op| op.range) else { return };
        let Some(shard) = range.next() else { return };
        let now = self.cache.now();
        self.call(shard, |s, fx| s.lock_range(now, id, range.first, range.last, fx));
    }

    pub(super) fn range_part_done(&mut self, id: OpId) {
        let Some(range) = self.ops.get_mut(&id).and_then(|op| op.range.as_mut()) else { return };
        if range.given().is_some() {
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
            let mut discard = Discard::lines(first, last, STEP);
            if self.cache.is_enabled() {
                discard = discard.voiding(LEAST_VOID);
            }
            let mut more = true;
            while more {
                self.call(shard, |s, _| more = discard.turn(s));
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
