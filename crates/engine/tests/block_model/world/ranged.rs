//! Changes of whole ranges by clients, and an operator who locks a range.

use larder_engine::block::node::operator::distrust::LossesIo;
use larder_engine::block::node::operator::{Ask, Operation};
use larder_engine::block::node::record::RecordedMaintenance;
use larder_engine::block::{GROUP_LINES, LineId, OpId, PartKind, Verdict};
use larder_format::block::Layout;

use super::attaching::{At, CutOff};
use super::node::operators;
use super::{PER_LINE, SHARDS, TURNS, VOLUME_LINES, World};

/// Slots or groups that an operation looks at in one turn.
pub(super) const TURN: u32 = 7;

impl World {
    /// A zeroing of a whole stretch. Of the stretch's region only the beginning is in use; half of the ranges have all of it.
    pub(super) fn begin_range(&mut self) {
        let (first, len) = self.any_part();
        let zeroings = |(_, o): (&OpId, &crate::parts::Op)| {
            o.got.len() as u64 >= VOLUME_LINES * (PER_LINE - 1) && !o.operators
        };
        let locked = self.ops.iter().filter(|&o| zeroings(o)).count();
        self.seen.ranges += 1;
        self.seen.queued += u64::from(locked >= TURNS);
        let asked = if self.next_op.is_multiple_of(2) { self.per_region() } else { len };
        self.submit_longer(PartKind::Zero, first, len, asked, Verdict::Admit);
    }

    /// An operator drops what is cached of a stretch.
    pub(super) fn begin_drop(&mut self) {
        let part = self.any_part();
        self.begin_dropping(part, false);
    }

    fn begin_dropping(&mut self, (first, len): (u64, u64), forgets: bool) {
        let op = operators(OpId(self.next_op));
        self.next_op += 1;
        self.seen.drops += 1;
        self.script.push(format!("{} {op:?} drops {first} {len}", self.time));
        let lines = self.lines_at(op, first, len);
        self.begin_op(op, PartKind::Prefetch, first, len, true);
        let operation = match forgets {
            true => Operation::losses(op, SHARDS, lines).with_patience(None),
            false => Operation::drop_lines(op, SHARDS, [lines]),
        };
        if !forgets && op.0.is_multiple_of(5) {
            self.impatient.insert(op);
        }
        self.operations.insert(op, operation.in_turns_of(TURN));
        self.operate(op);
    }

    /// The backing store forgets what was not flushed, of a stretch: a server that was killed and started anew. What is cached of
    /// it is dropped before any client hears of it; at times it takes a while until somebody looks.
    pub(super) fn begin_forgetting(&mut self) {
        let (first, len) = self.any_part();
        self.begins_to_forget(first, first + len);
        if self.rng.chance(0.5) {
            self.spell();
        }
        if !self.device.borrow().blown {
            self.begin_dropping((first, len), true);
        }
    }

    /// What an operation asks for next, beside lines that it was given and turns of its own.
    pub(super) fn next_of(&mut self, operation: &mut Operation) -> Ask {
        loop {
            if self.given.remove(&operation.id()) {
                operation.given();
            }
            let ask = self.ask_of(operation);
            match ask {
                Ask::Again => {}
                Ask::Lines if self.given.contains(&operation.id()) => {}
                ask => return ask,
            }
        }
    }

    /// An operator's operation goes on as far as it can.
    pub(super) fn operate(&mut self, op: OpId) {
        let Some(mut operation) = self.operations.remove(&op) else { return };
        loop {
            let ask = self.next_of(&mut operation);
            let asks_log = matches!(ask, Ask::Do(_));
            // While the log's thread is at work it is not asked.
            if asks_log && (self.maintenance.is_none() || self.device.borrow().blown) {
                self.forgetting.insert(op);
                break;
            }
            match ask {
                Ask::Over => return self.finish_op(op, false),
                Ask::Lines if self.impatient.remove(&op) => {
                    self.seen.given_up_lines += 1;
                    self.give_up_lines(&mut operation);
                    self.given.remove(&op);
                    return self.finish_op(op, false);
                }
                Ask::Do(step) => {
                    let io = &mut At { world: self, of: op };
                    if operation.losses_step(step, io) == Err(CutOff) {
                        break;
                    }
                }
                _ => break,
            }
        }
        self.operations.insert(op, operation);
    }

    /// The log's thread may be asked again.
    pub(super) fn forget(&mut self) {
        for op in std::mem::take(&mut self.forgetting) {
            self.operate(op);
        }
    }

    fn lines_at(&self, op: OpId, at: u64, len: u64) -> (LineId, LineId) {
        let whole = op.0.is_multiple_of(2);
        let region = self.layout.region_groups * u64::from(GROUP_LINES);
        let first = at / PER_LINE;
        let last = (at + len - 1) / PER_LINE;
        (LineId(first), LineId(if whole { first / region * region + region - 1 } else { last }))
    }

    /// A shard has given an operation its part of the lines.
    pub(super) fn lines_given(&mut self, op: OpId) {
        self.given.insert(op);
        // An attachment goes on when the log's thread can.
        self.operate(op);
    }
}

/// A stretch that its store has forgotten.
impl LossesIo for At<'_, OpId> {
    fn layout(&self) -> Layout {
        self.world.layout
    }

    /// What forgets uses its stretch, and nothing moves that is used.
    fn is_there(&mut self) -> bool {
        true
    }

    /// They are counted when they are settled, each alone: of a store that all volumes have.
    fn losses(&mut self) -> u64 {
        0
    }

    fn unflushed(&mut self, (first, last): (u32, u32)) -> Result<Vec<(u32, u32)>, CutOff> {
        let unflushed = |m: &RecordedMaintenance| m.unflushed(first, last);
        Ok(self.world.maintenance.as_ref().map_or_else(Vec::new, unflushed))
    }

    fn settle(&mut self, _: u64, dropped: u64) {
        self.world.seen.distrusted += dropped;
        let op = &self.world.ops[&self.of];
        let (at, len) = (op.at, op.got.len() as u64);
        self.world.has_forgotten(at, at + len);
    }
}
