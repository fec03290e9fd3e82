//! Changes of large ranges, of which only so many lock their lines at a time.

use std::collections::VecDeque;

use larder_engine::block::OpId;

/// Ranges that may be locked, or wait to be, in the shards. Each is looked at whenever an operation ends.
const MOST: usize = 8;

/// Who may lock a range, and who waits for that. What waits is bounded by what connections may have under way.
#[derive(Debug, Default)]
pub(super) struct RangeQueue {
    holders: Vec<OpId>,
    waiting: VecDeque<OpId>,
}

impl RangeQueue {
    /// Whether `op` may begin; otherwise it waits for its turn.
    pub(super) fn enter(&mut self, op: OpId) -> bool {
        if self.holders.len() < MOST {
            self.holders.push(op);
            return true;
        }
        self.waiting.push_back(op);
        false
    }

    /// `op` is over. Returns whose turn it is.
    pub(super) fn leave(&mut self, op: OpId) -> Option<OpId> {
        let before = self.holders.len();
        self.holders.retain(|&h| h != op);
        if self.holders.len() == before {
            return None;
        }
        let next = self.waiting.pop_front()?;
        self.holders.push(next);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_at_a_time_and_in_order() {
        let mut queue = RangeQueue::default();
        let ops: Vec<OpId> = (0..20).map(OpId).collect();
        let begun: Vec<bool> = ops.iter().map(|&op| queue.enter(op)).collect();
        assert_eq!(begun.iter().filter(|b| **b).count(), MOST);
        assert_eq!(queue.leave(OpId(15)), None, "it only waits");
        for (i, &op) in ops.iter().enumerate() {
            assert_eq!(queue.leave(op), ops.get(i + MOST).copied());
        }
        assert!(queue.holders.is_empty() && queue.waiting.is_empty());
    }
}
