//! A short list of entries, without allocation.

use super::Entry;
use super::bucket::{Raw, Runs};

/// Entries that may be an object's.
#[derive(Clone, Copy, Debug)]
pub struct Candidates {
    raw: [Raw; Candidates::CAPACITY],
    len: u8,
    omitted: u8,
    runs: Runs,
}

impl Candidates {
    /// How many a list holds. An index at full load gives more than one in 120 probes, more than two in 30,000.
    pub const CAPACITY: usize = 8;

    pub(super) fn new(runs: Runs) -> Candidates {
        Candidates { raw: [Raw::default(); Candidates::CAPACITY], len: 0, omitted: 0, runs }
    }

    /// Number of entries.
    #[inline]
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// Whether there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many entries there would have been beyond [`Self::CAPACITY`]. A probe leaves them unfound; what removes
    /// entries has removed them as well, and they are forgotten.
    pub fn omitted(&self) -> usize {
        usize::from(self.omitted)
    }

    /// Entry `index`, if there are so many.
    pub fn get(&self, index: usize) -> Option<Entry> {
        self.raw[..self.len()].get(index).map(|raw| raw.entry(self.runs))
    }

    /// The entries, in the order in which to try them.
    #[inline]
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Entry> + '_ {
        self.raw[..self.len()].iter().map(|raw| raw.entry(self.runs))
    }

    #[inline]
    pub(super) fn push(&mut self, raw: Raw) {
        match self.raw.get_mut(usize::from(self.len)) {
            Some(free) => {
                *free = raw;
                self.len += 1;
            }
            None => self.omitted = self.omitted.saturating_add(1),
        }
    }

    #[inline]
    pub(super) fn push_distinct(&mut self, raw: Raw) {
        if !self.raw[..self.len()].iter().any(|known| known.same_object(raw)) {
            self.push(raw);
        }
    }
}
