//! Changes of whole ranges: locked in every shard, with their bits, then dropped and changed at once.

use super::*;
use crate::block::node::calls::send;

impl<H: Host> Queue<H> {
    pub(super) fn begin_range<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        id: OpId,
        mut op: Operation<H>,
    ) {
        let (first, last) = (self.config.line(op.at), self.config.line(op.at + op.len - 1));
        op.range = Some(Progress::new(first, last, self.config.shards));
        op.pending = 1;
        self.ops.insert(id, op);
        if node.enter_turn(id) {
            self.lock_next(node, now, id);
        }
    }

    /// It has its turn, if it still wants it.
    pub(super) fn range_turn<N: Node<H>>(&mut self, node: &N, now: Nanos, id: OpId) {
        match self.ops.contains_key(&id) {
            true => self.lock_next(node, now, id),
            false => self.next_range(node, id),
        }
    }

    /// A range is over: another may lock its lines.
    pub(super) fn next_range<N: Node<H>>(&mut self, node: &N, id: OpId) {
        if let Some(next) = node.leave_turn(id) {
            send(node, next, Message::RangeTurn);
        }
    }

    fn lock_next<N: Node<H>>(&mut self, node: &N, now: Nanos, id: OpId) {
        let Some(range) = self.ops.get(&id).and_then(|op| op.range) else { return };
        let Some(shard) = range.next() else { return };
        let told = Told::Lock(id, range.first, range.last);
        self.call(node, shard, told, |s, fx| s.lock_range(now, id, range.first, range.last, fx));
    }

    /// One more shard has given its lines.
    pub(super) fn range_given<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        id: OpId,
    ) {
        let Some(range) = self.ops.get_mut(&id).and_then(|op| op.range.as_mut()) else { return };
        if range.given().is_some() {
            return self.lock_next(node, now, id);
        }
        let (first, last) = (range.first, range.last);
        if !node.is_enabled() {
            return self.range_ready(node, now, fx, id);
        }
        node.ask_bits(id, self.config.region(first), self.config.region(last));
    }

    /// The bits are durable and every shard has given the range: the lines go, then the store changes.
    pub(super) fn range_ready<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        id: OpId,
    ) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let Some(Progress { first, last, .. }) = op.range else { return };
        op.pending += 1;
        let range = (op.at, op.len);
        for shard in 0..self.config.shards {
            let mut discard = Discard::lines(first, last, self.config.range_steps);
            if node.is_enabled() {
                discard = discard.voiding(self.config.least_void);
            }
            let mut more = true;
            while more {
                self.call(node, shard, Told::Discard, |s, _| more = node.discard(&mut discard, s));
            }
        }
        self.ask_store(node, fx, id, Job::Whole(id), range);
        self.step(node, now, fx, id, None);
    }

    /// The store has changed: the shards may go on with these lines.
    pub(super) fn range_over<N: Node<H>>(&mut self, node: &N, now: Nanos, id: OpId) {
        for shard in 0..self.config.shards {
            self.call(node, shard, Told::Unlock(id), |s, fx| s.unlock_range(now, id, fx));
        }
    }
}
