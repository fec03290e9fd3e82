//! Checksums of payload in the log.

use std::collections::BTreeSet;

use super::super::table::Table;

/// The checksums of a record's payload: one for each 4 KiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sums {
    /// Of a payload of up to 4 KiB, which most are.
    One(u32),
    /// Of others; none without payload.
    Many(Box<[u32]>),
}

impl Sums {
    /// These.
    pub fn new(sums: &[u32]) -> Sums {
        match sums {
            [one] => Sums::One(*one),
            many => Sums::Many(many.into()),
        }
    }

    /// As they are.
    pub fn as_slice(&self) -> &[u32] {
        match self {
            Sums::One(one) => std::slice::from_ref(one),
            Sums::Many(many) => many,
        }
    }
}

/// The number of a record that has not exactly one is this, with its own number among those.
const LONG: u64 = 1 << 32;

/// The checksums of a volume's records behind the frontier.
#[derive(Debug, Default)]
pub(super) struct AllSums {
    /// Of each record its sum, if it has one.
    one: Table<1>,
    /// Those of the others, all in a row,
    many: Table<1>,
    /// and of each of those how many sums of others came before its own, in all.
    first: Table<1>,
    /// How many of `many` and `first` have come, and gone.
    come: [u64; 2],
    gone: [u64; 2],
    /// Records, by sequence, that have none any more.
    lost: BTreeSet<u64>,
}

impl AllSums {
    /// So many records come at once.
    pub(super) fn reserve(&mut self, records: usize) {
        self.one.reserve(records);
    }

    /// Those of the next record.
    pub(super) fn push(&mut self, sums: Option<&Sums>) {
        let sums = sums.map_or(&[][..], Sums::as_slice);
        if let [one] = sums {
            return self.one.push([u64::from(*one)]);
        }
        self.one.push([LONG + self.come[1]]);
        self.first.push([self.come[0]]);
        sums.iter().for_each(|&sum| self.many.push([sum.into()]));
        self.come[0] += sums.len() as u64;
        self.come[1] += 1;
    }

    /// Those of the first record, which has this sequence, are not needed any more.
    pub(super) fn pop(&mut self, sequence: u64) {
        self.lost.remove(&sequence);
        if self.one.pop().is_none_or(|[one]| one < LONG) {
            return;
        }
        self.first.pop();
        self.gone[1] += 1;
        let next = self.first.first().map_or(self.come[0], |[next]| next);
        while self.gone[0] < next {
            self.many.pop();
            self.gone[0] += 1;
        }
    }

    /// There are none any more.
    pub(super) fn lose(&mut self, sequence: u64) {
        self.lost.insert(sequence);
    }

    /// Those of a record behind the frontier.
    pub(super) fn get(&self, sequence: u64, frontier: u64) -> Option<Sums> {
        let one = self.one.column(sequence.checked_sub(frontier + 1)? as usize, 0)?;
        if self.lost.contains(&sequence) {
            return Some(Sums::new(&[]));
        }
        if one < LONG {
            return Some(Sums::One(one as u32));
        }
        let at = ((one - LONG) - self.gone[1]) as usize;
        let first = self.first.column(at, 0)?;
        let next = self.first.column(at + 1, 0).unwrap_or(self.come[0]);
        let sum = |n: u64| self.many.column((n - self.gone[0]) as usize, 0).map(|sum| sum as u32);
        (first..next).map(sum).collect::<Option<Box<[u32]>>>().map(Sums::Many)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_record_has_the_sums_that_came_with_it() {
        let mut sums = AllSums::default();
        let of = |n: u32| Sums::new(&(0..n % 4).map(|i| n * 10 + i).collect::<Vec<u32>>());
        (1..=300).for_each(|n| sums.push((n % 4 > 0).then(|| of(n)).as_ref()));
        sums.lose(250);
        for frontier in 0..300u64 {
            let want = |n: u64| if n == 250 { Sums::new(&[]) } else { of(n as u32) };
            for n in frontier + 1..=300 {
                assert_eq!(sums.get(n, frontier), Some(want(n)));
            }
            assert_eq!((sums.get(frontier, frontier), sums.get(301, frontier)), (None, None));
            sums.pop(frontier + 1);
        }
        let left = [&sums.one, &sums.many, &sums.first];
        assert!(left.iter().all(|table| table.is_empty()) && sums.lost.is_empty());
    }
}
