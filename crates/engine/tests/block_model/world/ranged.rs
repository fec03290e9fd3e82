//! Changes of whole ranges: locked in every shard, with their bits, then given up and changed at once.

use larder_engine::block::node::ranged::{Discard, Progress};
use larder_engine::block::{GROUP_LINES, LineId, OpId, PartKind};

use super::{PER_LINE, SHARDS, STRETCHES, World};
use crate::parts::RangeOp;

impl World {
    /// A trim or zeroing of a whole stretch, or an operator who drops what is cached of it.
    pub(super) fn begin_range(&mut self, kind: PartKind) {
        let per_region = self.layout.region_groups * u64::from(GROUP_LINES) * PER_LINE;
        let first = self.rng.below(STRETCHES) * per_region;
        let len = self.volume_sectors();
        let op = OpId(self.next_op);
        self.next_op += 1;
        self.seen.ranges += u64::from(kind.changes());
        self.seen.drops += u64::from(!kind.changes());
        self.script.push(format!("{} {op:?} range {first} {len} {kind:?}", self.time));
        let (from, to) = self.lines_at(op, first, len);
        let progress = Progress::new(from, to, SHARDS);
        self.begin_op(op, kind, first, len, Some(RangeOp { progress, intents: false }));
        if self.turns.enter(op) {
            self.lock_next(op);
        } else {
            self.seen.queued += 1;
        }
    }

    /// The backing store forgets what was not flushed, of a stretch: a server that was killed and started anew. What is cached of
    /// it is dropped before any client hears of it.
    pub(super) fn begin_forgetting(&mut self) {
        self.forgetting.insert(OpId(self.next_op));
        self.begin_range(PartKind::Prefetch);
    }

    /// Nothing is under way in the stretch: the store has forgotten, and the lines go that may not be so any more. While the
    /// log's thread is at work it is not asked.
    pub(super) fn forget(&mut self) {
        let locked = |op: &OpId| {
            let range = self.ops.get(op).and_then(|o| o.range);
            range.is_some_and(|r| r.progress.next().is_none())
        };
        let ready: Vec<OpId> = self.forgetting.iter().copied().filter(locked).collect();
        if self.log.is_none() && !self.void {
            return;
        }
        for op in ready {
            self.forgetting.remove(&op);
            let (first, last) = self.lines_of(op);
            let (at, len) = (self.ops[&op].at, self.ops[&op].got.len() as u64);
            let region = (first.group().0 / self.layout.region_groups) as u32;
            let unflushed = self.log.as_ref().map(|log| log.unflushed(region, region));
            if unflushed.is_some_and(|runs| runs == [(region, region)]) {
                for shard in &mut self.shards {
                    let before = shard.stats().dropped;
                    let mut discard = Discard::lines(first, last, 7);
                    while discard.turn(shard) {}
                    self.seen.distrusted += shard.stats().dropped - before;
                }
            }
            // Behind the drop: a process that is killed between the two does not know of it (docs/nbd.md).
            self.flush_is_doubtful();
            self.stretch_loses(at, at + len);
            self.unlock(op);
        }
    }

    fn unlock(&mut self, op: OpId) {
        let now = self.now();
        for shard in 0..self.shards.len() {
            self.call(shard, |s, fx| s.unlock_range(now, op, fx));
        }
        self.finish_op(op);
        if let Some(next) = self.turns.leave(op) {
            self.lock_next(next);
        }
    }

    /// Of the stretch's region only the beginning is in use; half of the ranges have all of it.
    pub(super) fn lines_of(&self, op: OpId) -> (LineId, LineId) {
        self.lines_at(op, self.ops[&op].at, self.ops[&op].got.len() as u64)
    }

    fn lines_at(&self, op: OpId, at: u64, len: u64) -> (LineId, LineId) {
        let whole = op.0.is_multiple_of(2);
        let region = self.layout.region_groups * u64::from(GROUP_LINES);
        let first = at / PER_LINE;
        let last = (at + len - 1) / PER_LINE;
        (LineId(first), LineId(if whole { first / region * region + region - 1 } else { last }))
    }

    pub(super) fn lock_next(&mut self, op: OpId) {
        let progress = self.ops[&op].range.expect("a range").progress;
        let shard = progress.next().expect("a shard") as usize;
        let now = self.now();
        self.call(shard, |s, fx| s.lock_range(now, op, progress.first, progress.last, fx));
    }

    /// All shards gave the range: its bits must be durable before the backing store changes.
    pub(super) fn range_locked(&mut self, op: OpId) {
        if self.forgetting.contains(&op) {
            return self.forget();
        }
        let region = (self.lines_of(op).0.group().0 / self.layout.region_groups) as u32;
        if self.void || !self.ops[&op].kind.changes() {
            self.finish_range(op);
        } else {
            self.asked.push((0, region));
        }
    }

    pub(super) fn finish_range(&mut self, op: OpId) {
        let (first, last) = self.lines_of(op);
        let (at, len) = (self.ops[&op].at, self.ops[&op].got.len() as u64);
        let changes = self.ops[&op].kind.changes();
        // The lines go first: a kill in between finds them gone.
        for shard in 0..self.shards.len() {
            // Only where its bits are durable.
            let least = if changes { 0 } else { u64::MAX };
            let mut discard = Discard::lines(first, last, 7).voiding(least);
            // One turn is enough where all of it is void.
            let more = discard.turn(&mut self.shards[shard]);
            self.seen.voids += u64::from(!more);
            while more && discard.turn(&mut self.shards[shard]) {}
        }
        for s in (at..at + len).filter(|_| changes) {
            self.put_backing(s, 0);
        }
        self.unlock(op);
    }
}
