//! What is kept of records beside themselves: when they were answered, and whether clients have read them.

use std::collections::VecDeque;

use larder_base::Nanos;

use super::super::table::Table;

/// Times are kept in milliseconds.
const UNIT: u64 = 1_000_000;

/// When records were answered that are dirty, to the millisecond before: each time from one sequence on, to the next. Those that change no bytes have
/// none, which is kept as 0.
#[derive(Debug, Default)]
pub(super) struct Times {
    all: Table<2>,
}

impl Times {
    /// The record of this sequence, behind all that there are, was answered now.
    pub(super) fn push(&mut self, sequence: u64, now: Option<Nanos>) {
        let time = now.map_or(0, |now| now.0 / UNIT + 1);
        if self.all.last().is_none_or(|[_, last]| last != time) {
            self.all.push([sequence, time]);
        }
    }

    /// Records up to this one are not needed any more.
    pub(super) fn let_go(&mut self, position: u64) {
        while self.all.column(1, 0).is_some_and(|sequence| sequence <= position + 1) {
            self.all.pop();
        }
    }

    /// There are none.
    pub(super) fn clear(&mut self) {
        self.all.clear();
    }

    /// When the first was answered that has a time.
    pub(super) fn first(&self) -> Option<Nanos> {
        (0..self.all.len()).find_map(|at| self.at(at))
    }

    /// When this one was answered.
    pub(super) fn of(&self, sequence: u64) -> Option<Nanos> {
        let at = self.all.below(0, sequence.saturating_add(1));
        self.at(at.checked_sub(1)?)
    }

    fn at(&self, at: usize) -> Option<Nanos> {
        self.all.column(at, 1)?.checked_sub(1).map(|time| Nanos(time * UNIT))
    }
}

/// Some of the records behind a frontier: a bit for each up to the last of them.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// The first sequence that the words have a bit for: of the multiples of 64.
    first: u64,
    words: VecDeque<u64>,
}

impl Marks {
    /// This one is. It is behind all that were let go.
    pub(super) fn insert(&mut self, sequence: u64) {
        if self.words.is_empty() {
            self.first = sequence / 64 * 64;
        }
        while sequence < self.first {
            self.words.push_front(0);
            self.first -= 64;
        }
        let at = ((sequence - self.first) / 64) as usize;
        while self.words.len() <= at {
            self.words.push_back(0);
        }
        self.words[at] |= 1 << (sequence % 64);
    }

    /// Whether this one is.
    pub(super) fn contains(&self, sequence: u64) -> bool {
        let at = sequence.checked_sub(self.first).map(|behind| (behind / 64) as usize);
        let word = at.and_then(|at| self.words.get(at));
        word.is_some_and(|word| word >> (sequence % 64) & 1 == 1)
    }

    /// Those up to this one are not needed any more.
    pub(super) fn let_go(&mut self, position: u64) {
        while self.first + 63 <= position && self.words.pop_front().is_some() {
            self.first += 64;
        }
        if self.words.capacity() > 64 && self.words.len() * 4 < self.words.capacity() {
            self.words.shrink_to(self.words.len() * 2);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_record_was_answered_in_the_millisecond_that_is_kept() {
        let mut times = Times::default();
        let at = |n: u64| Nanos(n / 3 * 2_500_000 + 17);
        (5..500).for_each(|n| times.push(n, Some(at(n))));
        let kept = |n: u64| Nanos(at(n).0 / UNIT * UNIT);
        assert_eq!((times.of(4), times.first()), (None, Some(kept(5))));
        assert!((5..500).all(|n| times.of(n) == Some(kept(n))));
        times.let_go(200);
        assert!((201..500).all(|n| times.of(n) == Some(kept(n))));
        assert_eq!(times.first(), Some(kept(201)));
        times.clear();
        assert_eq!((times.first(), times.of(300)), (None, None));
        times.push(500, None);
        assert_eq!((times.first(), times.of(500)), (None, None));
        times.push(501, Some(at(501)));
        assert_eq!((times.first(), times.of(500)), (Some(kept(501)), None));
    }

    proptest! {
        #[test]
        fn marks_are_those_of_a_plain_set(
            steps in prop::collection::vec((0..500u64, prop::bool::weighted(0.9)), 0..200),
        ) {
            let (mut marks, mut plain, mut gone) = (Marks::default(), BTreeSet::new(), 0);
            for (n, comes) in steps {
                if comes {
                    marks.insert(gone + 1 + n);
                    plain.insert(gone + 1 + n);
                } else {
                    gone += n / 4;
                    marks.let_go(gone);
                    plain.retain(|&n| n > gone);
                }
                for n in gone + 1..gone + 700 {
                    assert_eq!(marks.contains(n), plain.contains(&n));
                }
            }
        }
    }
}
