//! How an index grows and shrinks while it is in use: one bucket at a time, in place, and no key is read.
//!
//! That is linear hashing (Litwin, VLDB 1980), by bits that follow from an entry's *tag* and its bucket of the base ([`lot`]) where others
//! take bits of the hash, which a slot has not kept. Of a base of n buckets the first is split first: its entries whose lot ends in 1 move to
//! a new bucket, number n, behind the last one; then the second, and so on. When all are split there are 2n, and the first is split by the next
//! bit. So bucket `b + n k` holds what bucket `b` of the base would, of the lots that end in k. Where an entry lies follows from its bucket of
//! the base and its tag, and so does its other bucket.
//!
//! ```text
//! base 4, 6 buckets     0 (…0)   1 (…0)   2   3   4: 0 (…1)   5: 1 (…1)
//!                                         ^ split next, into 6
//! ```
//!
//! An entry's two buckets are split by bits that have nothing to do with each other. Were it the tag's own bits for both, its buckets
//! would lie in the same half of a doubled index, and splitting the buckets of one half would make no room in the other. As it is, an
//! index can be filled to 97 % at any number of buckets in between, since entries move from what is not split yet to what is.
//!
//! The price: k bits of the tag say nothing more within a bucket once the index has 2^k times its base, so that a probe for a key that is
//! not there meets 2^k times as many false candidates (0.8 in a hundred probes of an index of its base, at full load). Hence
//! [`MOST_TIMES`]. Which keys cannot be told apart does not change: a [`Family`](super::Family) goes by the base.
//!
//! # Kill safety
//! What moves is first written to the new bucket, which nobody looks at before the number of buckets, one word, says that it is there; then
//! it is cleared where it was. What a cut leaves in the old bucket is found to be of another one when the index is attached, and dropped.
//! A bucket that is taken back has its entries in hand while the number changes: a cut loses those of one bucket, which a cache may.

use super::bucket::{Line, Raw, SLOTS, SPREAD, WORDS, positions};
use super::candidates::Candidates;
use super::{FlashIndex, HEADER_WORDS, distinct, least_width};

/// An index grows to so many times its base, at most: three bits of a lot.
pub(super) const MOST_TIMES: u64 = 8;

/// By which bits bucket `bucket` of the base is split, for an entry of `tag`: as many as an index can grow by.
#[inline]
fn lot(bucket: u32, tag: u16) -> u32 {
    // Fibonacci hashing: of a product the highest bits depend on all of the factor.
    (bucket.wrapping_mul(0x9e37_79b1) ^ u32::from(tag).wrapping_mul(0x85eb_ca6b)) >> 29
}

/// Where what belongs to a bucket of the base lies now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spots {
    base: u32,
    /// Bits of the lot by which all buckets are split.
    mask: u32,
    /// Buckets that those make.
    full: u32,
    /// So many of these are split by one more bit, which is at `next`.
    split: u32,
    next: u32,
}

impl Spots {
    /// Of an index of so many buckets that began with `base`.
    pub(super) fn new(base: u32, buckets: u32) -> Spots {
        let next = (buckets / base).max(1).ilog2();
        let full = base << next;
        Spots { base, mask: (1 << next) - 1, full, split: buckets - full, next }
    }

    #[inline]
    pub(super) fn of(&self, bucket: u32, tag: u16) -> u32 {
        if self.split | self.mask == 0 {
            return bucket;
        }
        let lot = lot(bucket, tag);
        let spot = bucket + self.base * (lot & self.mask);
        if spot < self.split { spot + self.full * (lot >> self.next & 1) } else { spot }
    }

    /// Whether an entry of `tag` in the bucket which is split next moves to the new one.
    fn moves(&self, tag: u16) -> bool {
        lot(self.split % self.base, tag) >> self.next & 1 == 1
    }
}

impl FlashIndex {
    /// Most buckets that an index can have which began with `base`.
    pub fn most_buckets(base: u32) -> u32 {
        let most = u64::from(base).saturating_mul(MOST_TIMES);
        // A power of two times the base, and a number.
        most.min(u64::from(u32::MAX / 2)).max(u64::from(base)) as u32
    }

    /// Buckets before any was split.
    pub fn base_buckets(&self) -> u32 {
        self.base
    }

    /// Buckets that the words have room for, and the index can have.
    pub fn room(&self) -> u32 {
        let room = (self.words.len() - HEADER_WORDS) / WORDS;
        Self::most_buckets(self.base).min(u32::try_from(room).unwrap_or(u32::MAX))
    }

    /// Words that the index takes now, from the first on.
    pub fn used_words(&self) -> usize {
        Self::words_for(self.buckets)
    }

    /// Those words, for a checkpoint.
    pub fn used(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        (0..self.used_words()).map(|word| self.words.load(word))
    }

    /// Whether what lies in `bucket` under `tag` is looked for there.
    pub(super) fn belongs(&self, bucket: u32, tag: u16) -> bool {
        self.spots.of(bucket % self.base, tag) == bucket
    }

    /// Makes sure that words for so many buckets can be used. Returns false where there is no memory for them.
    pub fn supply(&mut self, buckets: u32) -> bool {
        buckets <= self.room() && self.words.supply(Self::words_for(buckets))
    }

    /// Gives back what words of buckets that are not there any more can be given back.
    pub fn give_back(&mut self) {
        let used = self.used_words();
        self.words.give_back(used);
    }

    /// Splits one bucket: there is one more afterwards. [`FlashIndex::supply`] has been asked for it. Returns false, and does nothing, where
    /// there can be no more.
    pub fn grow(&mut self) -> bool {
        if self.buckets >= self.room() {
            return false;
        }
        let (from, to) = (self.spots.split, self.buckets);
        let line = self.line(from);
        let moving: u32 = positions(line.live())
            .filter(|&pos| self.spots.moves(line.tag(pos)))
            .fold(0, |m, pos| m | 1 << pos);
        let mut moved = [Raw::default(); SLOTS];
        let mut count = 0;
        for pos in positions(moving) {
            moved[count] = line.raw(pos);
            count += 1;
        }
        let moved = Line::of(&moved[..count]);
        // Nobody looks there yet, and what an earlier index has left there goes.
        self.update(to, &self.line(to), &moved);
        self.set_buckets(to + 1);
        let mut left = line;
        for pos in positions(moving).filter(|&pos| pos != SPREAD) {
            left = if left.is_wide(pos) { left.with_pair(pos, 0) } else { left.with_slot(pos, 0) };
        }
        self.update(from, &line, &left);
        if moving & 1 << SPREAD != 0 {
            self.write(from, SPREAD, Raw::default());
        }
        self.settle(from);
        true
    }

    /// Takes the last bucket back: there is one less afterwards, and what was in it is inserted where it belongs then. Returns what was forced
    /// out for that; `None`, and nothing is done, where there are no more buckets than at first.
    pub fn shrink(&mut self) -> Option<Candidates> {
        if self.buckets <= self.base {
            return None;
        }
        let last = self.buckets - 1;
        let line = self.line(last);
        let all: [Option<Raw>; SLOTS] =
            std::array::from_fn(|pos| (line.live() & 1 << pos != 0).then(|| line.raw(pos)));
        self.set_buckets(last);
        self.update(last, &line, &Line([0; WORDS]));
        let mut done = self.nothing_done();
        // Which bucket it was split from.
        let into = self.spots.split;
        for raw in all.into_iter().flatten() {
            self.count_out(raw);
            let both = [into, self.other(into, raw.tag())];
            self.insert_raw(distinct(&both), raw, &mut done);
        }
        Some(done.forced)
    }

    fn set_buckets(&mut self, buckets: u32) {
        self.words.store(1, u64::from(buckets));
        self.buckets = buckets;
        self.spots = Spots::new(self.base, buckets);
        if self.hand >= buckets {
            self.hand = 0;
        }
    }
}

impl Line {
    /// A bucket of these entries alone, as many as one of its width can hold.
    fn of(entries: &[Raw]) -> Line {
        let wide = entries.iter().filter(|raw| raw.is_wide()).count();
        let mut line = Line([0; WORDS]).with_width(least_width(wide as u32));
        for raw in entries {
            let free = if raw.is_wide() { line.free_wide() } else { line.free_small() };
            let pos = free.trailing_zeros() as usize;
            line = match raw.is_wide() {
                true => line.with_pair(pos, raw.0),
                false => line.with_slot(pos, raw.slot()),
            };
        }
        line
    }
}
