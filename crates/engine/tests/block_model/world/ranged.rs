//! Changes of whole ranges by clients, and an operator who locks a range.

use larder_engine::block::node::ranged::{Discard, Progress};
use larder_engine::block::{GROUP_LINES, LineId, OpId, PartKind, Verdict};

use super::node::operators;
use super::{PER_LINE, SHARDS, TURNS, VOLUME_LINES, World};

impl World {
    /// A zeroing of a whole stretch. Of the stretch's region only the beginning is in use; half of the ranges have all of it.
    pub(super) fn begin_range(&mut self) {
        let (first, len) = self.any_part();
        let zeroings = |(_, o): (&OpId, &crate::parts::Op)| {
            o.got.len() as u64 >= VOLUME_LINES * (PER_LINE - 1) && o.range.is_none()
        };
        let locked = self.ops.iter().filter(|&o| zeroings(o)).count();
        self.seen.ranges += 1;
        self.seen.queued += u64::from(locked >= TURNS);
        let asked = if self.next_op.is_multiple_of(2) { self.per_region() } else { len };
        self.submit_longer(PartKind::Zero, first, len, asked, Verdict::Admit);
    }

    /// An operator drops what is cached of a stretch.
    pub(super) fn begin_drop(&mut self) {
        let (first, len) = self.any_part();
        let op = operators(OpId(self.next_op));
        self.next_op += 1;
        self.seen.drops += 1;
        self.script.push(format!("{} {op:?} drops {first} {len}", self.time));
        let (from, to) = self.lines_at(op, first, len);
        let progress = Progress::new(from, to, SHARDS);
        self.begin_op(op, PartKind::Prefetch, first, len, Some(progress));
        self.lock_next(op);
    }

    /// The backing store forgets what was not flushed, of a stretch: a server that was killed and started anew. What is cached of
    /// it is dropped before any client hears of it.
    pub(super) fn begin_forgetting(&mut self) {
        self.forgetting.insert(operators(OpId(self.next_op)));
        self.begin_drop();
    }

    /// Nothing is under way in the stretch: the store has forgotten, and the lines go that may not be so any more. While the
    /// log's thread is at work it is not asked.
    pub(super) fn forget(&mut self) {
        let locked = |op: &OpId| {
            let range = self.ops.get(op).and_then(|o| o.range);
            range.is_some_and(|r| r.next().is_none())
        };
        let ready: Vec<OpId> = self.forgetting.iter().copied().filter(locked).collect();
        if self.maintenance.is_none() || self.device.borrow().blown {
            return;
        }
        for op in ready {
            // (Where one is unlocked the next may be given.)
            if !self.forgetting.remove(&op) {
                continue;
            }
            let (first, last) = self.lines_of(op);
            let (at, len) = (self.ops[&op].at, self.ops[&op].got.len() as u64);
            let region = (first.group().0 / self.layout.region_groups) as u32;
            let unflushed = self.maintenance.as_ref().map(|m| m.unflushed(region, region));
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

    pub(super) fn unlock(&mut self, op: OpId) {
        let now = self.now();
        for shard in 0..self.shards.len() {
            self.call(shard, |s, fx| s.unlock_range(now, op, fx));
        }
        self.finish_op(op, false);
    }

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
        let progress = self.ops[&op].range.expect("a range");
        let shard = progress.next().expect("a shard") as usize;
        let now = self.now();
        self.call(shard, |s, fx| s.lock_range(now, op, progress.first, progress.last, fx));
    }

    /// One more shard has given the range.
    pub(super) fn range_given(&mut self, op: OpId) {
        let Some(range) = self.ops.get_mut(&op).and_then(|o| o.range.as_mut()) else { return };
        if range.given().is_some() {
            self.lock_next(op);
        } else if self.given_to_attachment(op) {
            // It goes on when the log's thread can.
        } else if self.forgetting.contains(&op) {
            self.forget();
        } else {
            let (first, last) = self.lines_of(op);
            for shard in &mut self.shards {
                let mut discard = Discard::lines(first, last, 7);
                while discard.turn(shard) {}
            }
            self.unlock(op);
        }
    }
}
