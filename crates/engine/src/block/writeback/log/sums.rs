//! Checksums of payload in the log.

use std::collections::{BTreeMap, VecDeque};

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

/// The checksums of a volume's records behind the frontier: four bytes for each, and those of longer ones beside.
#[derive(Debug, Default)]
pub(super) struct AllSums {
    one: VecDeque<u32>,
    /// By sequence: those of writes that have not exactly one.
    many: BTreeMap<u64, Box<[u32]>>,
}

impl AllSums {
    /// So many records come at once.
    pub(super) fn reserve(&mut self, records: usize) {
        self.one.reserve_exact(records);
    }

    /// Those of the next record, if it is a write.
    pub(super) fn push(&mut self, sequence: u64, sums: Option<Sums>) {
        let one = match sums {
            Some(Sums::One(one)) => one,
            Some(Sums::Many(many)) => {
                self.many.insert(sequence, many);
                0
            }
            None => 0,
        };
        self.one.push_back(one);
    }

    /// Those of the first record are not needed any more.
    pub(super) fn pop(&mut self, sequence: u64) {
        self.one.pop_front();
        self.many.remove(&sequence);
    }

    /// There are none any more.
    pub(super) fn lose(&mut self, sequence: u64) {
        self.many.insert(sequence, Box::default());
    }

    /// Those of a record behind the frontier.
    pub(super) fn get(&self, sequence: u64, frontier: u64) -> Option<Sums> {
        let one = self.one.get(sequence.checked_sub(frontier + 1)? as usize)?;
        Some(self.many.get(&sequence).map_or(Sums::One(*one), |many| Sums::Many(many.clone())))
    }
}
