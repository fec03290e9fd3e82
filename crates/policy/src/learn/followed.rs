//! The objects that a sampler follows: found by fingerprint, and given back in the order of their deadlines.
//!
//! They lie in one array without gaps. A table with open addressing (linear probing; what is removed lets those behind it
//! move up) leads there from fingerprints, and a binary heap of their numbers has the next to close at its top: a look-up is
//! two cache lines, of which most look-ups need one.

use larder_base::{AppId, Nanos};

use super::features::Packed;

/// An object that is followed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tracked {
    pub(super) fingerprint: u64,
    /// End of the window in which another access may be kept.
    pub(super) window_end: Nanos,
    /// When the label closes.
    pub(super) deadline: Nanos,
    pub(super) x: Packed,
    pub(super) app: AppId,
    /// Accesses offered in the window.
    pub(super) offered: u32,
    /// Reads since the kept access.
    pub(super) reads: u32,
    /// Where in the heap it is.
    pub(super) place: u32,
    /// What the caller noted at the kept access (its prediction, say).
    pub(super) note: u8,
    /// Of [`Tracked::LATE`], [`Tracked::FROZEN`], [`Tracked::MISSED`].
    pub(super) marks: u8,
}

const _: () = assert!(size_of::<Tracked>() == 64, "one cache line's worth");

impl Tracked {
    /// One of its reads came late.
    pub(super) const LATE: u8 = 1;
    /// Reads no longer count: it was updated, removed, or left.
    pub(super) const FROZEN: u8 = 2;
    /// It was missed and is expected to be fetched again.
    pub(super) const MISSED: u8 = 4;

    pub(super) fn has(&self, mark: u8) -> bool {
        self.marks & mark != 0
    }

    pub(super) fn count(&mut self, now: Nanos, horizon: Nanos) {
        self.reads = self.reads.saturating_add(1);
        if now + Nanos(horizon.0 / 2) >= self.deadline {
            self.marks |= Tracked::LATE;
        }
    }

    /// By which they close.
    fn order(&self) -> (Nanos, u64) {
        (self.deadline, self.fingerprint)
    }
}

/// No object.
const NONE: u32 = u32::MAX;
/// Objects by which the array grows: it is no larger than it must be.
const STEP: usize = 256;
const LEAST_TABLE: usize = 64;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Followed {
    all: Vec<Tracked>,
    /// Numbers in `all`, a power of two of places, of which at most two thirds are taken.
    table: Vec<u32>,
    /// Numbers in `all`: none closes before the one at half its place.
    heap: Vec<u32>,
}

impl Followed {
    /// Bytes that one takes at most, where there are thousands.
    pub(super) const MOST_BYTES: usize = size_of::<Tracked>() + 4 + 4 * 3 + 8;

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    fn home(&self, fingerprint: u64) -> usize {
        // The followed are those of small fingerprints: their upper bits are alike.
        let mixed = fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.table.len() - 1)
    }

    /// The place in the table of an object, or the free one where looking for it ends.
    #[inline]
    fn probe(&self, fingerprint: u64) -> usize {
        let mut at = self.home(fingerprint);
        loop {
            match self.table[at] {
                NONE => return at,
                number if self.all[number as usize].fingerprint == fingerprint => return at,
                _ => at = (at + 1) & (self.table.len() - 1),
            }
        }
    }

    /// The number of an object that is followed, until the next one is inserted or taken.
    #[inline]
    pub(super) fn find(&self, fingerprint: u64) -> Option<u32> {
        if self.table.is_empty() {
            return None;
        }
        Some(self.table[self.probe(fingerprint)]).filter(|&number| number != NONE)
    }

    /// The object of this number. Deadlines are changed by [`Followed::set_deadline`].
    #[inline]
    pub(super) fn at(&mut self, number: u32) -> &mut Tracked {
        &mut self.all[number as usize]
    }

    /// Adds an object, which must not be there.
    pub(super) fn insert(&mut self, t: Tracked) {
        if (self.all.len() + 1) * 3 > self.table.len() * 2 {
            let places = (self.table.len() * 2).max(LEAST_TABLE);
            self.fill_table(places);
        }
        if self.all.len() == self.all.capacity() {
            self.all.reserve_exact(STEP);
            self.heap.reserve_exact(self.all.capacity() - self.heap.len());
        }
        let (number, place) = (self.all.len() as u32, self.heap.len());
        let at = self.probe(t.fingerprint);
        self.table[at] = number;
        self.all.push(Tracked { place: place as u32, ..t });
        self.heap.push(number);
        self.rise(place);
    }

    /// When the first label closes.
    #[inline]
    pub(super) fn first_deadline(&self) -> Option<Nanos> {
        self.heap.first().map(|&number| self.all[number as usize].deadline)
    }

    /// Takes out the object whose label closes first; of several, that of the least fingerprint.
    pub(super) fn take_first(&mut self) -> Option<Tracked> {
        let number = *self.heap.first()?;
        let last = self.heap.pop()?;
        if last != number {
            self.put(0, last);
            self.sink(0);
        }
        let taken = self.all[number as usize];
        self.forget(taken.fingerprint);
        // The last of the array comes into the gap.
        let moved = self.all.len() as u32 - 1;
        if moved != number {
            let at = self.probe(self.all[moved as usize].fingerprint);
            self.table[at] = number;
            self.heap[self.all[moved as usize].place as usize] = number;
        }
        self.all.swap_remove(number as usize);
        Some(taken)
    }

    /// Changes when an object's label closes.
    pub(super) fn set_deadline(&mut self, number: u32, deadline: Nanos) {
        let t = &mut self.all[number as usize];
        t.deadline = deadline;
        let place = t.place as usize;
        self.rise(place);
        self.sink(self.all[number as usize].place as usize);
    }

    /// Drops those whose fingerprint is above `most`.
    pub(super) fn keep_to(&mut self, most: u64) {
        self.all.retain(|t| t.fingerprint <= most);
        self.fill_table(self.table.len());
        self.heap.clear();
        for number in 0..self.all.len() {
            self.heap.push(number as u32);
            self.all[number].place = number as u32;
            self.rise(number);
        }
    }

    /// Heap bytes in use.
    pub(super) fn memory_bytes(&self) -> usize {
        self.all.capacity() * size_of::<Tracked>()
            + (self.table.capacity() + self.heap.capacity()) * size_of::<u32>()
    }

    /// Makes the table anew, with so many places.
    fn fill_table(&mut self, places: usize) {
        self.table.clear();
        self.table.reserve_exact(places);
        self.table.resize(places, NONE);
        for number in 0..self.all.len() {
            let at = self.probe(self.all[number].fingerprint);
            self.table[at] = number as u32;
        }
    }

    /// Takes an object out of the table.
    fn forget(&mut self, fingerprint: u64) {
        let mask = self.table.len() - 1;
        let mut gap = self.probe(fingerprint);
        let mut at = gap;
        loop {
            at = (at + 1) & mask;
            let number = self.table[at];
            if number == NONE {
                break;
            }
            // One moves up if looking for it passes the gap on its way to where it is.
            let home = self.home(self.all[number as usize].fingerprint);
            if (at.wrapping_sub(home) & mask) >= (at.wrapping_sub(gap) & mask) {
                self.table[gap] = number;
                gap = at;
            }
        }
        self.table[gap] = NONE;
    }

    fn order(&self, place: usize) -> (Nanos, u64) {
        self.all[self.heap[place] as usize].order()
    }

    fn put(&mut self, place: usize, number: u32) {
        self.heap[place] = number;
        self.all[number as usize].place = place as u32;
    }

    fn rise(&mut self, mut place: usize) {
        let number = self.heap[place];
        let order = self.order(place);
        while place > 0 {
            let above = (place - 1) / 2;
            if self.order(above) < order {
                break;
            }
            self.put(place, self.heap[above]);
            place = above;
        }
        self.put(place, number);
    }

    fn sink(&mut self, mut place: usize) {
        let number = self.heap[place];
        let order = self.order(place);
        loop {
            let mut below = 2 * place + 1;
            if below >= self.heap.len() {
                break;
            }
            if below + 1 < self.heap.len() && self.order(below + 1) < self.order(below) {
                below += 1;
            }
            if order < self.order(below) {
                break;
            }
            self.put(place, self.heap[below]);
            place = below;
        }
        self.put(place, number);
    }

    /// Checks that everything leads everywhere. For tests.
    #[cfg(test)]
    pub(super) fn validate(&self) {
        assert_eq!(self.all.len(), self.heap.len());
        assert_eq!(self.table.iter().filter(|&&n| n != NONE).count(), self.all.len());
        for (number, t) in self.all.iter().enumerate() {
            assert_eq!(self.find(t.fingerprint), Some(number as u32));
            assert_eq!(self.heap[t.place as usize] as usize, number);
            let place = t.place as usize;
            assert!(place == 0 || self.order((place - 1) / 2) < self.order(place));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use larder_base::Rng;

    use super::super::DIMENSIONS;
    use super::*;

    fn tracked(fingerprint: u64, deadline: u64) -> Tracked {
        Tracked {
            fingerprint,
            window_end: Nanos::ZERO,
            deadline: Nanos(deadline),
            x: Packed::of(&[0; DIMENSIONS]),
            app: AppId(0),
            offered: 1,
            reads: 0,
            place: 0,
            note: 0,
            marks: 0,
        }
    }

    /// Against a map that is searched whole.
    #[test]
    fn equals_a_naive_map() {
        let mut rng = Rng::new(3);
        let mut all = Followed::default();
        let mut naive: BTreeMap<u64, u64> = BTreeMap::new();
        // Few values, so that deadlines are alike and fingerprints come back.
        for step in 0..60_000u64 {
            let fingerprint = rng.below(1 << 12);
            let deadline = step / 4 + rng.below(300);
            match (rng.below(10), all.find(fingerprint)) {
                (0..7, None) => {
                    all.insert(tracked(fingerprint, deadline));
                    naive.insert(fingerprint, deadline);
                }
                (0..7, Some(at)) => {
                    assert_eq!(all.at(at).fingerprint, fingerprint);
                    all.set_deadline(at, Nanos(deadline));
                    naive.insert(fingerprint, deadline);
                }
                (_, found) => {
                    assert_eq!(found.is_some(), naive.contains_key(&fingerprint));
                    let first = naive.iter().map(|(&f, &d)| (d, f)).min();
                    assert_eq!(all.first_deadline(), first.map(|(d, _)| Nanos(d)));
                    let taken = all.take_first().map(|t| (t.deadline.0, t.fingerprint));
                    assert_eq!(taken, first);
                    if let Some((_, f)) = taken {
                        naive.remove(&f);
                    }
                }
            }
            if step % 5000 == 4999 {
                let most = rng.below(1 << 12);
                all.keep_to(most);
                naive.retain(|&f, _| f <= most);
            }
            if step % 500 == 0 {
                all.validate();
            }
            assert_eq!(all.len(), naive.len());
        }
    }

    #[test]
    fn bytes_are_few() {
        let mut all = Followed::default();
        for n in 0..8192u64 {
            all.insert(tracked(n << 50 | n, n));
            if n >= 2000 {
                let each = all.memory_bytes() / all.len();
                assert!(each <= Followed::MOST_BYTES, "{each} bytes for each of {n}");
            }
        }
        all.keep_to(3000 << 50);
        all.validate();
        assert_eq!(all.len(), 3000);
    }
}
