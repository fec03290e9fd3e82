//! Changes of ranges too large to be split into parts: a trim of a volume is one thing.
//!
//! Eight at a time lock their lines, shard by shard in ascending order, so that two of them cannot wait for each other. When
//! every shard has given its lines, the bits of the range's regions must be durable ([`Bits`]). Then the lines go
//! ([`Discard`]), the store changes, and the shards are unlocked.

use std::collections::VecDeque;

use crate::block::api::{LineId, OpId};
use crate::block::record::RecordedShard;
use crate::block::shard::BlockShard;

/// Ranges that may be locked, or wait to be, in the shards. Each is looked at whenever an operation ends.
const MOST: usize = 8;
/// A change of more groups than this has its range as a whole.
pub const GROUPS: u64 = 256;
/// Slots or groups that are looked at in one turn at a shard.
pub const STEP: u32 = 4096;
/// Where fewer groups of a shard may have lines of a range, the lines go at once.
pub const LEAST_VOID: u64 = 64;

/// Who of the clients may lock a range, and who waits for that. (An operator's range, of which there is one at a time, waits for no
/// turn: the trims of a store that hangs must not keep another volume from being detached.)
///
/// What waits is bounded by what clients may have under way.
#[derive(Debug)]
pub struct Turns {
    most: usize,
    holders: Vec<OpId>,
    waiting: VecDeque<OpId>,
}

impl Default for Turns {
    fn default() -> Turns {
        Turns::of(MOST)
    }
}

impl Turns {
    /// So many may lock a range at a time.
    pub fn of(most: usize) -> Turns {
        Turns { most, holders: Vec::new(), waiting: VecDeque::new() }
    }

    /// Whether `op` may begin; otherwise it waits for its turn.
    pub fn enter(&mut self, op: OpId) -> bool {
        if self.holders.len() < self.most {
            self.holders.push(op);
            return true;
        }
        self.waiting.push_back(op);
        false
    }

    /// `op` is over, or waits no longer. Returns whose turn it is.
    pub fn leave(&mut self, op: OpId) -> Option<OpId> {
        let before = self.holders.len();
        self.holders.retain(|&h| h != op);
        if self.holders.len() == before {
            self.waiting.retain(|&w| w != op);
            return None;
        }
        let next = self.waiting.pop_front()?;
        self.holders.push(next);
        Some(next)
    }
}

/// How far a range is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Its first line.
    pub first: LineId,
    /// Its last line.
    pub last: LineId,
    /// Shards that have given it.
    given: u32,
    shards: u32,
}

impl Progress {
    /// Of lines `first..=last`, in so many shards.
    pub fn new(first: LineId, last: LineId, shards: u32) -> Progress {
        Progress { first, last, given: 0, shards }
    }

    /// Which shard is to lock it next.
    pub fn next(&self) -> Option<u32> {
        (self.given < self.shards).then_some(self.given)
    }

    /// One more shard has given it. Returns [`Progress::next`].
    pub fn given(&mut self) -> Option<u32> {
        self.given += 1;
        self.next()
    }
}

/// Ranges that wait for the bits of their regions.
#[derive(Debug, Default)]
pub struct Bits {
    /// Whose, first and last region, and how many bits are missing.
    waiting: Vec<(OpId, u32, u32, u32)>,
}

impl Bits {
    /// `op` waits for the bits of `first..=last`, each of which is asked for now.
    pub fn wait(&mut self, op: OpId, first: u32, last: u32) {
        self.waiting.push((op, first, last, last - first + 1));
    }

    /// The bit of `region` is durable. Says of which ranges it was the last to be awaited.
    pub fn durable(&mut self, region: u32, mut ready: impl FnMut(OpId)) {
        self.waiting.retain_mut(|(op, first, last, missing)| {
            if (*first..=*last).contains(&region) {
                *missing -= 1;
                if *missing == 0 {
                    ready(*op);
                }
            }
            *missing > 0
        });
    }

    /// No bit is durable any more, and none is needed: all are ready that wait.
    pub fn give_up(&mut self) -> impl Iterator<Item = OpId> + use<> {
        std::mem::take(&mut self.waiting).into_iter().map(|w| w.0)
    }

    /// Nobody waits any more.
    pub fn clear(&mut self) {
        self.waiting.clear();
    }
}

/// A shard whose lines go.
pub trait Discards {
    /// See [`BlockShard::void_range`].
    fn void_range(
        &mut self,
        first: LineId,
        last: LineId,
        least: u64,
    ) -> [Option<(LineId, LineId)>; 2];
    /// See [`BlockShard::drop_range`].
    fn drop_range(&mut self, first: LineId, last: LineId, cursor: u64, steps: u32) -> Option<u64>;
}

impl Discards for BlockShard {
    fn void_range(
        &mut self,
        first: LineId,
        last: LineId,
        least: u64,
    ) -> [Option<(LineId, LineId)>; 2] {
        BlockShard::void_range(self, first, last, least)
    }

    fn drop_range(&mut self, first: LineId, last: LineId, cursor: u64, steps: u32) -> Option<u64> {
        BlockShard::drop_range(self, first, last, cursor, steps)
    }
}

impl Discards for RecordedShard {
    fn void_range(
        &mut self,
        first: LineId,
        last: LineId,
        least: u64,
    ) -> [Option<(LineId, LineId)>; 2] {
        RecordedShard::void_range(self, first, last, least)
    }

    fn drop_range(&mut self, first: LineId, last: LineId, cursor: u64, steps: u32) -> Option<u64> {
        RecordedShard::drop_range(self, first, last, cursor, steps)
    }
}

/// Takes the lines of a locked range out of one shard, turn by turn.
#[derive(Debug)]
pub struct Discard {
    /// What is left: first and last line.
    left: [Option<(LineId, LineId)>; 2],
    /// Whether regions may be made void at once instead, of at least so many groups.
    void: Option<u64>,
    cursor: u64,
    steps: u32,
}

impl Discard {
    /// Lines `first..=last` go one by one, `steps` of them looked at in a turn.
    pub fn lines(first: LineId, last: LineId, steps: u32) -> Discard {
        Discard { left: [Some((first, last)), None], void: None, cursor: 0, steps }
    }

    /// The same where the bits of the range's regions are durable: what is large is made void at once, and swept later.
    #[must_use]
    pub fn voiding(self, least: u64) -> Discard {
        Discard { void: Some(least), ..self }
    }

    /// One turn. Returns whether there is more to do.
    pub fn turn(&mut self, shard: &mut impl Discards) -> bool {
        if let (Some(least), Some((first, last))) = (self.void.take(), self.left[0]) {
            self.left = shard.void_range(first, last, least);
            return self.left.iter().any(Option::is_some);
        }
        let Some(at) = self.left.iter().position(Option::is_some) else { return false };
        let Some((first, last)) = self.left[at] else { return false };
        match shard.drop_range(first, last, self.cursor, self.steps) {
            Some(cursor) => self.cursor = cursor,
            None => (self.left[at], self.cursor) = (None, 0),
        }
        self.left.iter().any(Option::is_some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn so_many_at_a_time_and_in_order() {
        let mut turns = Turns::default();
        let ops: Vec<OpId> = (0..20).map(OpId).collect();
        let begun: Vec<bool> = ops.iter().map(|&op| turns.enter(op)).collect();
        assert_eq!(begun.iter().filter(|b| **b).count(), MOST);
        assert_eq!(turns.leave(OpId(15)), None, "it only waits, and does so no longer");
        let order: Vec<OpId> = ops.iter().copied().filter(|op| op.0 != 15).collect();
        for (i, &op) in order.iter().enumerate() {
            assert_eq!(turns.leave(op), order.get(i + MOST).copied());
        }
        assert!(turns.holders.is_empty() && turns.waiting.is_empty());
    }

    #[test]
    fn shard_by_shard() {
        let mut progress = Progress::new(LineId(0), LineId(9), 3);
        let mut locked = vec![progress.next().unwrap()];
        while let Some(next) = progress.given() {
            locked.push(next);
        }
        assert_eq!(locked, [0, 1, 2]);
    }

    #[test]
    fn a_range_waits_for_all_of_its_bits() {
        let mut bits = Bits::default();
        bits.wait(OpId(1), 3, 5);
        bits.wait(OpId(2), 5, 5);
        let mut ready = Vec::new();
        for region in [2, 3, 4, 6, 5, 5] {
            bits.durable(region, |op| ready.push((region, op.0)));
        }
        assert_eq!(ready, [(5, 1), (5, 2)]);
        bits.wait(OpId(3), 0, 1);
        assert_eq!(bits.give_up().collect::<Vec<_>>(), [OpId(3)]);
    }

    /// A shard of lines 0 to 99, of which the cursor is the next line.
    struct Lines(Vec<u64>, u32);

    impl Discards for Lines {
        fn void_range(
            &mut self,
            first: LineId,
            last: LineId,
            least: u64,
        ) -> [Option<(LineId, LineId)>; 2] {
            // Whole tens are void at once.
            let (a, b) = (first.0.next_multiple_of(least), (last.0 + 1) / least * least);
            self.0.retain(|l| !(a..b).contains(l));
            let edge = |from: u64, to: u64| (from < to).then(|| (LineId(from), LineId(to - 1)));
            [edge(first.0, a), edge(b, last.0 + 1)]
        }

        fn drop_range(
            &mut self,
            first: LineId,
            last: LineId,
            cursor: u64,
            steps: u32,
        ) -> Option<u64> {
            self.1 += 1;
            let from = first.0 + cursor;
            let to = (from + u64::from(steps)).min(last.0 + 1);
            self.0.retain(|l| !(from..to).contains(l));
            (to <= last.0).then_some(to - first.0)
        }
    }

    #[test]
    fn lines_go_turn_by_turn_or_with_their_regions() {
        for (voiding, turns) in [(false, 10), (true, 3)] {
            let mut shard = Lines((0..100).collect(), 0);
            let mut discard = Discard::lines(LineId(5), LineId(74), 7);
            if voiding {
                discard = discard.voiding(10);
            }
            let mut count = 1;
            while discard.turn(&mut shard) {
                count += 1;
                assert!(count < 100);
            }
            assert_eq!(count, turns);
            assert_eq!(shard.0, (0..5).chain(75..100).collect::<Vec<u64>>());
        }
    }
}
