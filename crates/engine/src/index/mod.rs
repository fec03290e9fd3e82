//! The flash index: where on flash an object may lie, in at most 4 bytes of DRAM per object.
//!
//! It answers *candidates*, never "the" answer: it holds no keys, only 12-bit tags, so that a probe names the segment
//! and place of every entry whose tag fits and the reader compares keys. At the load it is sized for
//! ([`FlashIndex::buckets_for`]) that is 0.8 false candidates per hundred probes of absent keys.
//!
//! An object has two buckets of one cache line each (`bucket.rs` shows the layout). The second follows from the first
//! and the tag alone (*partial-key cuckoo hashing*, Fan et al., "Cuckoo Filter", CoNEXT 2014, section 3.1; here by
//! subtraction instead of exclusive or, so that the number of buckets need not be a power of two): an entry can move
//! between its buckets though its key is on flash. Flashield (section 4.1) keeps a 10-bit Bloom filter share per object
//! and a multiple-choice table instead, and evicts when every choice is taken; here an insertion first moves others
//! out of the way, up to two of them in a chain, which holds 98 % load where plain two-choice insertion holds 90 %.
//!
//! It grows and shrinks bucket by bucket, in place, without a key being read (`grow.rs`).
//!
//! # Kill safety
//! The index lives in [`Words`] that may survive the process. A kill can fall between any two stores; what it leaves,
//! [`FlashIndex::attach`] accepts:
//! - an entry is written, removed or marked by one store (all but the spread slot's lie whole in one word);
//! - entries that move are first overwritten or cleared where they were and then written where they go: a cut loses those
//!   in hand, which a cache may, and never doubles one, so that a removal cannot leave a second copy to rise again;
//! - the spread slot takes several stores: its bucket is named in a journal word first, and attaching wipes the bucket
//!   that a live journal names.
//!
//! A removal is complete once [`FlashIndex::remove`] has returned; of one that was cut, either may be found.

mod attach;
mod bucket;
mod candidates;
mod grow;
mod insert;
mod search;
#[cfg(test)]
mod tests;

use larder_base::{ObjectHash, Words};

pub use attach::{Attached, IndexError};
pub use candidates::Candidates;
pub use insert::Inserted;

use grow::Spots;

use bucket::{Line, PAIRS, Raw, Runs, SLOTS, SPREAD, Seek, WORDS, positions};

/// Words before the first bucket: one line of the index's own, one of its owner's.
const HEADER_WORDS: usize = 2 * WORDS;
/// Header word that names the bucket whose spread slot is being changed, plus one; 0 when none is.
const JOURNAL: usize = 2;
/// Header word that says how many buckets there were before any was split; 0 in memory that was written before indexes could grow.
const BASE: usize = 3;
/// First of the header words that belong to the owner.
const OWNER: usize = WORDS;

/// What the index knows of an object on flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Entry {
    /// The segment, 1 to [`MAX_SEGMENTS`](larder_format::geometry::MAX_SEGMENTS); of a place in a page one of the first
    /// [`SMALL_SEGMENTS`](larder_format::geometry::SMALL_SEGMENTS).
    pub segment: u16,
    /// Where in the segment.
    pub place: Place,
    /// CLOCK, 0..=3: 0 makes it a ghost (readable, dropped when its segment is reclaimed).
    pub clock: u8,
}

/// Where in its segment an object lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// Packed into a page with others: which of the 16 page functions names that page
    /// ([`ObjectHash::page`]). Takes one slot, 30 bits.
    Page {
        /// 0..16.
        function: u8,
    },
    /// An extent of its own, for a large object. Takes two slots.
    Extent {
        /// Where it starts, in units of 64 bytes from the segment's start: 22 bits, of which the lowest are 0 where there are more than
        /// 4,095 segments ([`run_bits`](larder_format::geometry::run_bits)).
        start64: u32,
        /// How much must be read from there, 12 bits, above 0: [`extent_bytes`](crate::segment::extent_bytes).
        length: u16,
    },
}

/// The highest CLOCK value in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClockBits {
    /// One bit: 0 and 1.
    One,
    /// Two bits: 0 to 3.
    #[default]
    Two,
}

impl ClockBits {
    /// The highest value.
    pub fn max(self) -> u8 {
        match self {
            ClockBits::One => 1,
            ClockBits::Two => 3,
        }
    }
}

/// What a hit does to an entry's CLOCK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClockMode {
    /// To the highest value: an approximation of least recently used.
    #[default]
    SetMax,
    /// One up: an approximation of least frequently used.
    Increment,
}

/// What [`FlashIndex::sweep`] did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    /// Entries whose CLOCK went from 1 to 0.
    pub ghosts_made: u64,
    /// Entries looked at.
    pub visited: u64,
}

/// Two hashes of one family have the same tag and the same two buckets: the index cannot tell them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Family(u64);

/// The index of one shard. See the [module](self).
#[derive(Debug)]
pub struct FlashIndex {
    words: Words,
    buckets: u32,
    /// Buckets before any was split, and what follows from both (`grow.rs`).
    base: u32,
    spots: Spots,
    clock_max: u8,
    runs: Runs,
    len: u64,
    wide: u64,
    hot: u64,
    /// The bucket that the CLOCK hand visits next.
    hand: u32,
}

impl FlashIndex {
    /// Slots per bucket; a small entry takes one, a wide entry two.
    pub const SLOTS_PER_BUCKET: u32 = SLOTS as u32;
    /// Bytes per bucket.
    pub const BUCKET_BYTES: u32 = (WORDS * 8) as u32;
    /// Share of the slots that small entries fill in an index sized by [`Self::buckets_for`]. Under steady FIFO turnover
    /// it costs no forced evictions in tens of millions of insertions (`larder bench index`), and leaves room for shards
    /// that get more than their share.
    pub const TARGET_LOAD: f64 = 0.98;
    /// Slots to plan for each wide entry: two, and its share of the words that wide entries take in advance. Measured
    /// over shares of wide entries from 1 % to all: fewer than 1 forced eviction in 10,000 insertions.
    pub const SLOTS_PER_WIDE: f64 = 2.7;
    /// Header words that belong to the owner of the index ([`Self::owner_word`]).
    pub const OWNER_WORDS: usize = 8;

    /// Words that an index of `buckets` buckets needs.
    pub fn words_for(buckets: u32) -> usize {
        HEADER_WORDS + buckets as usize * WORDS
    }

    /// Buckets for `objects` small objects at [`Self::TARGET_LOAD`]; at least one.
    pub fn buckets_for(objects: u64) -> u32 {
        Self::buckets_for_mix(objects, 0)
    }

    /// Small objects that [`Self::buckets_for`] gives so many buckets.
    pub fn objects_for(buckets: u32) -> u64 {
        (f64::from(buckets) * SLOTS as f64 * Self::TARGET_LOAD) as u64
    }

    /// Buckets for `small` small and `wide` large objects; at least one, at most `u32::MAX`.
    pub fn buckets_for_mix(small: u64, wide: u64) -> u32 {
        let slots = small as f64 + wide as f64 * Self::SLOTS_PER_WIDE;
        // A conversion from a float saturates.
        ((slots / (SLOTS as f64 * Self::TARGET_LOAD)).ceil() as u32).max(1)
    }

    /// The entries that may be `hash`'s object: those of its tag in its two buckets, those of the first bucket first.
    /// Identical entries of different objects are given once (they name the same place). Reads two cache lines.
    #[inline]
    pub fn probe(&self, hash: ObjectHash) -> Candidates {
        let (tag, both) = self.buckets_of(hash);
        let mut found = Candidates::new(self.runs);
        for &bucket in distinct(&both) {
            if let Some((line, matches)) = self.matching(bucket, tag) {
                positions(matches).for_each(|pos| found.push_distinct(line.raw(pos)));
            }
        }
        found
    }

    /// The first entry of [`Self::probe`].
    #[inline]
    pub fn first(&self, hash: ObjectHash) -> Option<Entry> {
        let (tag, both) = self.buckets_of(hash);
        distinct(&both).iter().find_map(|&bucket| {
            let (line, matches) = self.matching(bucket, tag)?;
            Some(line.raw(matches.trailing_zeros() as usize).entry(self.runs))
        })
    }

    /// Where the index takes memory as it is filled: asks for what says where `hash`'s two cache lines are, before
    /// [`Self::warm`].
    #[inline]
    pub fn expect(&self, hash: ObjectHash) {
        let (_, both) = self.buckets_of(hash);
        for bucket in both {
            self.words.expect(HEADER_WORDS + bucket as usize * WORDS);
        }
    }

    /// Fetches `hash`'s two cache lines. Called for many hashes in a row before what needs them, it lets their cache
    /// misses overlap: worth it in batches (a segment that is published or reclaimed), not for one.
    #[inline]
    pub fn warm(&self, hash: ObjectHash) {
        let (_, [first, second]) = self.buckets_of(hash);
        for bucket in [first, second] {
            self.words.prefetch(HEADER_WORDS + bucket as usize * WORDS);
        }
    }

    /// The CLOCK of the entry for (`hash`, `segment`, `place`), if there is one.
    pub fn contains(&self, hash: ObjectHash, segment: u16, place: Place) -> Option<u8> {
        self.find(hash, segment, place).map(|(bucket, pos)| self.line(bucket).raw(pos).clock())
    }

    /// Removes the entry for (`hash`, `segment`, `place`). When several objects have identical entries, one of them
    /// goes: they are interchangeable.
    pub fn remove(&mut self, hash: ObjectHash, segment: u16, place: Place) -> Option<Entry> {
        let (bucket, pos) = self.find(hash, segment, place)?;
        let raw = self.clear(bucket, pos);
        self.settle(bucket);
        Some(raw.entry(self.runs))
    }

    /// Removes every entry that may be `hash`'s object, with those of other objects that share its tag and buckets
    /// ([`Self::family`]). What an overwrite does: afterwards no older version can be found, whatever happens. The
    /// caller verifies the removed entries and gives the innocent ones back by [`Self::restore`].
    pub fn remove_matching(&mut self, hash: ObjectHash) -> Candidates {
        let (tag, both) = self.buckets_of(hash);
        let mut removed = Candidates::new(self.runs);
        for &bucket in distinct(&both) {
            if let Some((_, matches)) = self.matching(bucket, tag) {
                for pos in positions(matches) {
                    removed.push(self.clear(bucket, pos));
                }
                self.settle(bucket);
            }
        }
        removed
    }

    /// Puts back an entry that [`Self::remove_matching`] took and that turned out not to be `hash`'s object. Its owner
    /// is of the same [`Family`], so it is found again as before, though its own hash is unknown here.
    ///
    /// In the meantime its segment may have been reclaimed, or its owner may have been overwritten or deleted, which
    /// would not have found the entry: the caller must forget an entry whose family was written to since, or whose
    /// segment's generation changed, instead of restoring it.
    pub fn restore(&mut self, hash: ObjectHash, entry: Entry) -> Inserted {
        self.insert(hash, entry)
    }

    /// The family of `hash`.
    pub fn family(&self, hash: ObjectHash) -> Family {
        // By where they were before any bucket was split: a split tells no two keys apart that were not.
        let (tag, first) = (hash.tag(), hash.bucket(self.base));
        let second = self.second(first, tag);
        Family(u64::from(first.min(second)) << 12 | u64::from(tag))
    }

    /// Counts an access to the entry for (`hash`, `segment`, `place`): `None` if there is no such entry, else whether
    /// it was a ghost and now is none. At most one store.
    pub fn hit(
        &mut self,
        hash: ObjectHash,
        segment: u16,
        place: Place,
        mode: ClockMode,
    ) -> Option<bool> {
        let (bucket, pos) = self.find(hash, segment, place)?;
        let line = self.line(bucket);
        let clock = line.raw(pos).clock();
        let next = match mode {
            ClockMode::SetMax => self.clock_max,
            ClockMode::Increment => (clock + 1).min(self.clock_max),
        };
        if next != clock {
            self.update(bucket, &line, &line.with_clock(pos, next));
        }
        self.hot += u64::from(clock == 0);
        Some(clock == 0)
    }

    /// Turns the CLOCK hand over the next `buckets` buckets (at most once round): every CLOCK above 0 goes one down,
    /// and `ghost` is told of those that come to 0.
    pub fn sweep(&mut self, buckets: u32, mut ghost: impl FnMut(&Entry)) -> Sweep {
        let mut done = Sweep::default();
        for _ in 0..buckets.min(self.buckets) {
            let before = self.line(self.hand);
            let mut line = before;
            for pos in positions(before.live()) {
                done.visited += 1;
                let clock = before.raw(pos).clock();
                if clock > 0 {
                    line = line.with_clock(pos, clock - 1);
                }
                if clock == 1 {
                    done.ghosts_made += 1;
                    ghost(&line.raw(pos).entry(self.runs));
                }
            }
            // Every CLOCK lies within one word: no store leaves a half-changed entry.
            self.update(self.hand, &before, &line);
            self.hand = (self.hand + 1) % self.buckets;
        }
        self.hot -= done.ghosts_made;
        done
    }

    /// Removes all entries of `segment` by walking the whole index; returns how many. For a segment that was lost;
    /// reclaim removes object by object.
    pub fn drop_segment(&mut self, segment: u16) -> u64 {
        let mut dropped = 0;
        for bucket in 0..self.buckets {
            let line = self.line(bucket);
            let mut here = 0;
            for pos in positions(line.live()) {
                if line.raw(pos).entry(self.runs).segment == segment {
                    self.clear(bucket, pos);
                    here += 1;
                }
            }
            if here > 0 {
                self.settle(bucket);
            }
            dropped += here;
        }
        dropped
    }

    /// Removes every entry, bucket by bucket: a cut leaves the rest.
    pub fn clear_all(&mut self) {
        for bucket in 0..self.buckets {
            let live = self.line(bucket).live();
            if live != 0 {
                positions(live).for_each(|pos| {
                    self.clear(bucket, pos);
                });
                self.settle(bucket);
            }
        }
    }

    /// Shows every entry.
    pub fn for_each(&self, mut f: impl FnMut(&Entry)) {
        for bucket in 0..self.buckets {
            let line = self.line(bucket);
            positions(line.live()).for_each(|pos| f(&line.raw(pos).entry(self.runs)));
        }
    }

    /// Number of entries.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of wide entries.
    pub fn wide(&self) -> u64 {
        self.wide
    }

    /// Number of entries that are no ghosts.
    pub fn hot(&self) -> u64 {
        self.hot
    }

    /// Number of ghosts.
    pub fn ghosts(&self) -> u64 {
        self.len - self.hot
    }

    /// Number of slots.
    pub fn capacity(&self) -> u64 {
        u64::from(self.buckets) * SLOTS as u64
    }

    /// Number of buckets: what [`Self::sweep`] takes for one turn.
    pub fn buckets(&self) -> u32 {
        self.buckets
    }

    /// Share of the slots in use; a wide entry uses two.
    pub fn load(&self) -> f64 {
        (self.len + self.wide) as f64 / self.capacity() as f64
    }

    /// Bytes of memory: the words and this structure.
    pub fn memory_bytes(&self) -> u64 {
        (self.used_words() * 8 + size_of::<Self>()) as u64
    }

    /// Bytes by which it is smaller than [`Self::memory_bytes`] says, where its words take memory as they are filled.
    pub fn spared_bytes(&self) -> usize {
        (self.used_words() * 8).saturating_sub(self.words.held_bytes())
    }

    /// Header word `index` (0..8) of the owner, kept with the index: for example an epoch of flushes. 0 at first.
    ///
    /// # Panics
    /// If `index` is not below [`Self::OWNER_WORDS`].
    pub fn owner_word(&self, index: usize) -> u64 {
        assert!(index < Self::OWNER_WORDS);
        self.words.load(OWNER + index)
    }

    /// Changes header word `index` of the owner: one store.
    ///
    /// # Panics
    /// If `index` is not below [`Self::OWNER_WORDS`].
    pub fn set_owner_word(&mut self, index: usize, value: u64) {
        assert!(index < Self::OWNER_WORDS);
        self.words.store(OWNER + index, value);
    }

    /// The memory it lives in, for tests that cut it ([`Words::set_fuse`]) or take a snapshot.
    pub fn words_mut(&mut self) -> &mut Words {
        &mut self.words
    }

    /// The tag of `hash` and its two buckets, the primary one first.
    #[inline]
    fn buckets_of(&self, hash: ObjectHash) -> (u16, [u32; 2]) {
        let (tag, first) = (hash.tag(), hash.bucket(self.base));
        let second = self.second(first, tag);
        (tag, [self.spots.of(first, tag), self.spots.of(second, tag)])
    }

    /// The other bucket of an entry in `bucket` with `tag`.
    #[inline]
    fn other(&self, bucket: u32, tag: u16) -> u32 {
        let first = if bucket < self.base { bucket } else { bucket % self.base };
        self.spots.of(self.second(first, tag), tag)
    }

    /// The same before any bucket was split: (F(tag) − bucket) mod n, so that the other of the other is the first again.
    #[inline]
    fn second(&self, bucket: u32, tag: u16) -> u32 {
        // F: Fibonacci hashing with an odd constant, xorshift and again, scaled to 0..n by multiplication.
        let mut mixed = (u64::from(tag) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
        let n = u64::from(self.base);
        let sum = ((mixed * n) >> 32) + n - u64::from(bucket);
        (if sum >= n { sum - n } else { sum }) as u32
    }

    #[inline]
    fn line(&self, bucket: u32) -> Line {
        Line(self.words.load_line(HEADER_WORDS + bucket as usize * WORDS))
    }

    /// A bucket and the positions in it of live entries with this tag, unless there is none.
    #[inline]
    fn matching(&self, bucket: u32, tag: u16) -> Option<(Line, u32)> {
        let at = HEADER_WORDS + bucket as usize * WORDS;
        if self.words.fold_line(at, Seek::of(tag), Seek::look).is_some_and(Seek::is_vain) {
            return None;
        }
        let line = self.line(bucket);
        let matches = line.matches(tag);
        (matches != 0).then_some((line, matches))
    }

    #[inline]
    fn find(&self, hash: ObjectHash, segment: u16, place: Place) -> Option<(u32, usize)> {
        let (tag, both) = self.buckets_of(hash);
        let wanted = Raw::encode(tag, &Entry { segment, place, clock: 0 }, self.runs);
        distinct(&both).iter().find_map(|&bucket| {
            let (line, matches) = self.matching(bucket, tag)?;
            positions(matches)
                .find(|&pos| line.raw(pos).same_object(wanted))
                .map(|pos| (bucket, pos))
        })
    }

    /// Stores those words of `line` that differ from what the bucket holds, `before`. The caller sees to it that every
    /// state in between is sound.
    #[inline]
    fn update(&mut self, bucket: u32, before: &Line, line: &Line) {
        let base = HEADER_WORDS + bucket as usize * WORDS;
        for (k, (old, &word)) in before.0.iter().zip(&line.0).enumerate() {
            if *old != word {
                self.words.store(base + k, word);
            }
        }
    }

    /// Puts `raw` where an entry of its kind may be, without counting.
    fn write(&mut self, bucket: u32, pos: usize, raw: Raw) {
        let line = self.line(bucket);
        if raw.is_wide() {
            self.update(bucket, &line, &line.with_pair(pos, raw.0));
        } else if pos == SPREAD {
            self.words.store(JOURNAL, u64::from(bucket) + 1);
            self.update(bucket, &line, &line.with_slot(pos, raw.slot()));
            self.words.store(JOURNAL, 0);
        } else {
            self.update(bucket, &line, &line.with_slot(pos, raw.slot()));
        }
    }

    /// Removes the entry at `pos` and counts it out. The caller settles the bucket.
    fn clear(&mut self, bucket: u32, pos: usize) -> Raw {
        let raw = self.line(bucket).raw(pos);
        self.write(bucket, pos, raw.cleared());
        self.count_out(raw);
        raw
    }

    #[inline]
    fn count_in(&mut self, raw: Raw) {
        self.len += 1;
        self.wide += u64::from(raw.is_wide());
        self.hot += u64::from(raw.clock() > 0);
    }

    #[inline]
    fn count_out(&mut self, raw: Raw) {
        self.len -= 1;
        self.wide -= u64::from(raw.is_wide());
        self.hot -= u64::from(raw.clock() > 0);
    }

    /// Gives words that wide entries no longer need back to small ones: afterwards the width is the least that holds
    /// the bucket's wide entries.
    fn settle(&mut self, bucket: u32) {
        let line = self.line(bucket);
        let wide = line.live_wide();
        let width = least_width(wide.count_ones());
        if width >= line.width() {
            return;
        }
        let kept = 2 * (WORDS - PAIRS[width]);
        let mut free = line.free_wide() >> kept << kept;
        for from in positions(wide).take_while(|&pos| pos < kept) {
            let raw = line.raw(from);
            // Cleared before it is written: a cut may lose it but not double it.
            self.write(bucket, from, raw.cleared());
            self.write(bucket, free.trailing_zeros() as usize, raw);
            free &= free - 1;
        }
        let line = self.line(bucket);
        self.update(bucket, &line, &line.with_width(width));
    }
}

/// The least width that holds `wide` wide entries.
fn least_width(wide: u32) -> usize {
    PAIRS.iter().position(|&pairs| pairs >= wide as usize).unwrap_or(bucket::MAX_WIDTH)
}

/// Both buckets, or the one that is both.
fn distinct(both: &[u32; 2]) -> &[u32] {
    if both[0] == both[1] { &both[..1] } else { both }
}
