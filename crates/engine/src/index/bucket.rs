//! One bucket of the index: 64 bytes, 17 slots of 30 bits and 2 bits that say how many of them are taken in pairs.
//!
//! ```text
//! word k (k = 0..8)   63..60 nibble k | 59..30 slot 2k+1 | 29..0 slot 2k
//! slot                29..28 CLOCK | 27..24 function | 23..12 segment | 11..0 tag
//! nibbles 7..0        31..30 width  | 29..0 slot 16, laid out as any other slot
//! ```
//!
//! Sixteen slots lie whole within a word, so that changing one is a single store. The seventeenth (the *spread* slot) is
//! made of the four bits that each word has left; its CLOCK lies in one nibble, so that a hit is a single store there too.
//!
//! Wide entries take a whole word: slot 2k is laid out as above, but its 4 function bits and the 30 bits of slot 2k+1 are
//! payload: the extent's length in 12 bits, and in 22 bits where it starts, of whose highest bits as many as are needed say in which run
//! of 4,095 segments the segment lies ([`Runs`]). They fill words from the end of the bucket: the width 0, 1, 2 or 3 says that the
//! last 0, 1, 3 or 7 words belong to wide entries. A slot whose segment is 0 is empty and then zero throughout.

use larder_format::geometry::{SMALL_SEGMENTS, run_bits};

use super::{Entry, Place};

/// 64-bit words in a bucket: one cache line.
pub(super) const WORDS: usize = 8;
/// Slots in a bucket.
pub(super) const SLOTS: usize = 17;
/// The slot made of the nibbles.
pub(super) const SPREAD: usize = 16;
/// Words given to wide entries, by width. Small steps at first, because most buckets of a cache of small objects have one
/// or two wide entries; never all words, because small entries that meet two such buckets would be forced out of the
/// spread slot (0, 2, 4, 8 forces out 1 in 200 where half the objects are wide, this none: `larder bench index`).
pub(super) const PAIRS: [usize; 4] = [0, 1, 3, 7];
/// The widest width.
pub(super) const MAX_WIDTH: usize = PAIRS.len() - 1;

const SLOT_MASK: u64 = (1 << 30) - 1;
const PAIR_MASK: u64 = (1 << 60) - 1;
/// The tag fields of a word's two slots; shifted left by 12, the segment fields.
const FIELDS: u64 = 0xfff | 0xfff << 30;
/// One bit above each of [`FIELDS`].
const FLAGS: u64 = 1 << 12 | 1 << 42;

const SEGMENT_SHIFT: u32 = 12;
const FUNCTION_SHIFT: u32 = 24;
const CLOCK_SHIFT: u32 = 28;
/// Bits of an extent's start, in 64-byte units.
const START_BITS: u32 = 22;
/// Payload bits of a wide entry that lie in slot 2k, where small entries have their function.
const LOW_PAYLOAD_BITS: u32 = 4;

/// By width: the slots that hold small entries.
const SMALL: [u32; 4] = [small(0), small(1), small(2), small(3)];
/// By width: the slots at which an entry, small or wide, can begin.
const STARTS: [u32; 4] = [starts(0), starts(1), starts(2), starts(3)];

const fn starts(width: usize) -> u32 {
    small(width) | (0x5555 & !small(width))
}

const fn small(width: usize) -> u32 {
    ((1 << (2 * (WORDS - PAIRS[width]))) - 1) | (1 << SPREAD)
}

const _: () = assert!(WORDS * 64 == SLOTS * 30 + 2 && SMALL[0] == 0x1_ffff);

/// A bucket's words, read once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Line(pub(super) [u64; WORDS]);

/// For the two 12-bit fields of `x`: in its flag bit, whether each is not zero; other bits are anything. What is added
/// carries out of a field unless it is zero.
#[inline]
fn filled_fields(x: u64) -> u64 {
    (x & FIELDS) + FIELDS
}

/// The bits of `even` at positions 0, 2, 4, … and those of `odd` between them.
#[inline]
fn interleave(even: u32, odd: u32) -> u32 {
    // Both at a time: each bit of either half moves away from the others.
    let mut both = even | odd << 16;
    both = (both | both << 4) & 0x0f0f_0f0f;
    both = (both | both << 2) & 0x3333_3333;
    both = (both | both << 1) & 0x5555_5555;
    both & 0xffff | both >> 15
}

/// As positions, the flags that are set in words 0 to 7.
#[inline]
fn flagged(flags: impl Iterator<Item = u64>) -> u32 {
    // Flags of word k to bits k and 30 + k.
    let all = flags.zip((5..=12).rev()).fold(0, |all, (flags, by)| all | (flags & FLAGS) >> by);
    interleave(all as u32 & 0xff, (all >> 30) as u32 & 0xff)
}

/// A look for a tag at a bucket's words, which says quickly what is so mostly: that it is not there.
#[derive(Clone, Copy)]
pub(super) struct Seek {
    both: u64,
    /// Less the flags of fields that hold the tag.
    none: u64,
    /// The tag of the spread slot.
    spread: u64,
}

impl Seek {
    #[inline]
    pub(super) fn of(tag: u16) -> Seek {
        Seek { both: u64::from(tag) | u64::from(tag) << 30, none: FLAGS, spread: 0 }
    }

    /// Looks at word `k`.
    #[inline]
    pub(super) fn look(self, (k, word): (usize, u64)) -> Seek {
        let spread = if k < 3 { word >> 60 << (4 * k) } else { 0 };
        Seek {
            none: self.none & filled_fields(word ^ self.both),
            spread: self.spread | spread,
            ..self
        }
    }

    /// After all eight words: whether no slot holds the tag, nor half of a wide entry that looks like it.
    #[inline]
    pub(super) fn is_vain(self) -> bool {
        self.none == FLAGS && self.spread != self.both & 0xfff
    }
}

impl Line {
    /// The eight nibbles: width and spread slot.
    #[inline]
    fn nibbles(&self) -> u32 {
        let mut all = 0;
        for (k, word) in self.0.iter().enumerate() {
            all |= ((word >> 60) as u32) << (4 * k);
        }
        all
    }

    /// How many words belong to wide entries, as an index into [`PAIRS`].
    #[inline]
    pub(super) fn width(&self) -> usize {
        (self.0[7] >> 62) as usize
    }

    /// The 30 bits of slot `pos` (0..17).
    #[inline]
    pub(super) fn slot(&self, pos: usize) -> u32 {
        if pos == SPREAD {
            self.nibbles() & SLOT_MASK as u32
        } else {
            ((self.0[pos / 2] >> (30 * (pos % 2))) & SLOT_MASK) as u32
        }
    }

    /// The 60 bits of the pair in `word`.
    #[inline]
    pub(super) fn pair(&self, word: usize) -> u64 {
        self.0[word] & PAIR_MASK
    }

    /// Whether the slot at `pos` belongs to the words of wide entries.
    #[inline]
    pub(super) fn is_wide(&self, pos: usize) -> bool {
        SMALL[self.width()] & 1 << pos == 0
    }

    /// The positions, as bits, of live entries whose tag is `tag`.
    #[inline]
    pub(super) fn matches(&self, tag: u16) -> u32 {
        let both = u64::from(tag) | u64::from(tag) << 30;
        let spread = (self.0[0] >> 60 | self.0[1] >> 60 << 4 | self.0[2] >> 60 << 8) as u16 == tag;
        let found = flagged(self.0.iter().map(|word| !filled_fields(word ^ both)));
        let mut found = (found | u32::from(spread) << SPREAD) & STARTS[self.width()];
        // Of one slot in a hundred or so it must be asked whether it is empty, not of all.
        for pos in positions(found) {
            if slot_segment(self.slot(pos)) == 0 {
                found &= !(1 << pos);
            }
        }
        found
    }

    /// The positions, as bits, of all live entries.
    #[inline]
    pub(super) fn live(&self) -> u32 {
        let found = flagged(self.0.iter().map(|word| filled_fields(word >> SEGMENT_SHIFT)));
        // The segment's three nibbles.
        let hit = (self.0[3] | self.0[4] | self.0[5]) >> 60 != 0;
        (found | u32::from(hit) << SPREAD) & STARTS[self.width()]
    }

    /// The positions of live small entries.
    #[inline]
    pub(super) fn live_small(&self) -> u32 {
        self.live() & SMALL[self.width()]
    }

    /// The positions of live wide entries (each the even slot of its word).
    #[inline]
    pub(super) fn live_wide(&self) -> u32 {
        self.live() & !SMALL[self.width()]
    }

    /// The positions free for small entries.
    #[inline]
    pub(super) fn free_small(&self) -> u32 {
        !self.live() & SMALL[self.width()]
    }

    /// The positions free for wide entries at the present width.
    #[inline]
    pub(super) fn free_wide(&self) -> u32 {
        !self.live() & STARTS[self.width()] & !SMALL[self.width()]
    }

    /// The small positions that the next larger width takes away.
    #[inline]
    pub(super) fn taken_by_widening(&self) -> u32 {
        let width = self.width();
        if width == MAX_WIDTH { 0 } else { SMALL[width] & !SMALL[width + 1] }
    }

    /// The tag of the entry at `pos`.
    #[inline]
    pub(super) fn tag(&self, pos: usize) -> u16 {
        slot_tag(self.slot(pos))
    }

    /// The entry at `pos`, as [`Self::raw`] encodes it.
    #[inline]
    pub(super) fn raw(&self, pos: usize) -> Raw {
        if self.is_wide(pos) {
            Raw(self.pair(pos / 2) | WIDE)
        } else {
            Raw(u64::from(self.slot(pos)))
        }
    }

    /// The bucket with `slot` at small position `pos`.
    #[inline]
    pub(super) fn with_slot(mut self, pos: usize, slot: u32) -> Line {
        if pos == SPREAD {
            let all = slot | self.nibbles() & 3 << 30;
            for (k, word) in self.0.iter_mut().enumerate() {
                *word = *word & PAIR_MASK | u64::from(all >> (4 * k) & 15) << 60;
            }
        } else {
            let shift = 30 * (pos % 2);
            let word = &mut self.0[pos / 2];
            *word = *word & !(SLOT_MASK << shift) | u64::from(slot) << shift;
        }
        self
    }

    /// The bucket with `pair` in the word at position `pos` (even).
    #[inline]
    pub(super) fn with_pair(mut self, pos: usize, pair: u64) -> Line {
        let word = &mut self.0[pos / 2];
        *word = *word & !PAIR_MASK | pair & PAIR_MASK;
        self
    }

    /// The bucket with another width: one word differs.
    #[inline]
    pub(super) fn with_width(mut self, width: usize) -> Line {
        self.0[7] = self.0[7] & !(3 << 62) | (width as u64) << 62;
        self
    }

    /// The bucket with another CLOCK at `pos`: one word differs, for the spread slot too.
    #[inline]
    pub(super) fn with_clock(self, pos: usize, clock: u8) -> Line {
        let change = |slot: u32| slot & !(3 << CLOCK_SHIFT) | u32::from(clock) << CLOCK_SHIFT;
        // Of a wide entry, too, only the even slot changes, whose CLOCK lies where a small entry has it.
        self.with_slot(pos, change(self.slot(pos)))
    }
}

/// How segments beyond 4,095 are told apart: wide entries give up this many bits of where their extent starts to the run of 4,095 segments
/// that it is in, and extents start at multiples of 64 bytes, doubled for each bit. Small entries lie in the first run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Runs(u8);

impl Runs {
    /// For so many segments.
    pub(super) fn of(segments: u16) -> Runs {
        Runs(run_bits(segments) as u8)
    }

    fn bits(self) -> u32 {
        u32::from(self.0)
    }
}

/// Bit 63 of a [`Raw`] marks a wide entry.
const WIDE: u64 = 1 << 63;

/// An entry with its tag as it is stored: 30 bits of a small entry, or 60 bits of a wide one and a mark.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Raw(pub(super) u64);

/// The tag of a slot's 30 bits.
#[inline]
pub(super) fn slot_tag(slot: u32) -> u16 {
    (slot & 0xfff) as u16
}

/// The segment of a slot's 30 bits; 0 in one that is empty.
#[inline]
fn slot_segment(slot: u32) -> u32 {
    slot >> SEGMENT_SHIFT & 0xfff
}

/// The CLOCK of a slot's 30 bits.
#[inline]
pub(super) fn slot_clock(slot: u32) -> u8 {
    (slot >> CLOCK_SHIFT & 3) as u8
}

impl Raw {
    /// Encodes `entry` under `tag`.
    ///
    /// # Panics
    /// If a field of `entry` is out of its range: these are the caller's own numbers, never input.
    pub(super) fn encode(tag: u16, entry: &Entry, runs: Runs) -> Raw {
        let segment = entry.segment;
        assert!(segment > 0, "segment 0");
        let (run, number) = ((segment - 1) / SMALL_SEGMENTS, (segment - 1) % SMALL_SEGMENTS + 1);
        assert!(entry.clock <= 3, "CLOCK {} outside 0..=3", entry.clock);
        let head = u64::from(tag)
            | u64::from(number) << SEGMENT_SHIFT
            | u64::from(entry.clock) << CLOCK_SHIFT;
        match entry.place {
            Place::Page { function } => {
                assert!(run == 0, "segment {segment} outside 1..=4095");
                assert!(function < 16, "function {function} outside 0..16");
                Raw(head | u64::from(function) << FUNCTION_SHIFT)
            }
            Place::Extent { start64, length } => {
                let bits = runs.bits();
                assert!(start64 < 1 << START_BITS, "extent start {start64} outside 22 bits");
                assert!(
                    start64.trailing_zeros() >= bits,
                    "extent start {start64} in units of {bits} bits"
                );
                assert!((1..1 << 12).contains(&length), "extent length {length} outside 1..=4095");
                assert!(
                    u32::from(run) < 1 << bits,
                    "segment {segment} in run {run} of {bits} bits"
                );
                let start = u64::from(start64 >> bits) | u64::from(run) << (START_BITS - bits);
                let payload = start | u64::from(length) << START_BITS;
                let low = payload & ((1 << LOW_PAYLOAD_BITS) - 1);
                Raw(WIDE | head | low << FUNCTION_SHIFT | (payload >> LOW_PAYLOAD_BITS) << 30)
            }
        }
    }

    /// Whether it is a wide entry.
    #[inline]
    pub(super) fn is_wide(self) -> bool {
        self.0 & WIDE != 0
    }

    /// The 30 bits of a small entry, or the even slot of a wide one.
    #[inline]
    pub(super) fn slot(self) -> u32 {
        (self.0 & SLOT_MASK) as u32
    }

    /// The tag.
    #[inline]
    pub(super) fn tag(self) -> u16 {
        slot_tag(self.slot())
    }

    /// The CLOCK.
    #[inline]
    pub(super) fn clock(self) -> u8 {
        slot_clock(self.slot())
    }

    /// The entry; its segment is 0 if the slot was empty.
    #[inline]
    pub(super) fn entry(self, runs: Runs) -> Entry {
        let mut segment = (self.0 >> SEGMENT_SHIFT & 0xfff) as u16;
        let function = self.0 >> FUNCTION_SHIFT & 15;
        let place = if self.is_wide() {
            let payload = function | (self.0 & PAIR_MASK) >> 30 << LOW_PAYLOAD_BITS;
            let bits = runs.bits();
            let start = (payload & ((1 << START_BITS) - 1)) as u32;
            let run = (start >> (START_BITS - bits)) as u16;
            // (Of what something else wrote any number may come out: there is no such segment then.)
            segment = segment.saturating_add(run * SMALL_SEGMENTS);
            Place::Extent {
                start64: (start << bits) & ((1 << START_BITS) - 1),
                length: (payload >> START_BITS) as u16,
            }
        } else {
            Place::Page { function: function as u8 }
        };
        Entry { segment, place, clock: self.clock() }
    }

    /// What an empty place of the same kind holds.
    #[inline]
    pub(super) fn cleared(self) -> Raw {
        Raw(self.0 & WIDE)
    }

    /// Whether bits are set in a slot that is empty.
    #[inline]
    pub(super) fn is_dirty(self) -> bool {
        self.0 & PAIR_MASK != 0
    }

    /// Whether it is the same object as `other`: equal but for CLOCK.
    #[inline]
    pub(super) fn same_object(self, other: Raw) -> bool {
        (self.0 ^ other.0) & !(3 << CLOCK_SHIFT) == 0
    }
}

/// The positions set in `mask`, from the lowest.
#[inline]
pub(super) fn positions(mut mask: u32) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let pos = mask.trailing_zeros() as usize;
        (mask != 0).then(|| {
            mask &= mask - 1;
            pos
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;
    use larder_format::geometry::MAX_SEGMENTS;

    fn random_entry(rng: &mut Rng, wide: bool, runs: Runs) -> (u16, Entry) {
        let bits = runs.bits();
        let (place, last) = if wide {
            let start64 = (rng.below(1 << 22) as u32) >> bits << bits;
            (Place::Extent { start64, length: rng.range(1, 4095) as u16 }, 4095 << bits)
        } else {
            (Place::Page { function: rng.below(16) as u8 }, 4095)
        };
        // The ends too.
        let segment = [1, 4095, 4096.min(last), last, rng.range(1, last)][rng.below(5) as usize];
        let entry = Entry { segment: segment as u16, place, clock: rng.below(4) as u8 };
        (rng.below(4096) as u16, entry)
    }

    fn is_vain(line: &Line, tag: u16) -> bool {
        line.0.iter().copied().enumerate().fold(Seek::of(tag), Seek::look).is_vain()
    }

    #[test]
    fn every_slot_keeps_its_bits_and_disturbs_no_other() {
        let mut rng = Rng::new(1);
        let all = [1, 4095, 4096, 8190, 16_380, 32_760, MAX_SEGMENTS].map(Runs::of);
        let widths = || STARTS.into_iter().enumerate();
        for (runs, (width, starts)) in
            all.into_iter().cycle().take(140).flat_map(|runs| widths().map(move |w| (runs, w)))
        {
            let mut line = Line([0; WORDS]).with_width(width);
            let mut expected = Vec::new();
            for pos in positions(starts) {
                let (tag, entry) = random_entry(&mut rng, line.is_wide(pos), runs);
                let raw = Raw::encode(tag, &entry, runs);
                line = if raw.is_wide() {
                    line.with_pair(pos, raw.0)
                } else {
                    line.with_slot(pos, raw.slot())
                };
                expected.push((pos, tag, entry));
            }
            assert_eq!(line.width(), width);
            assert_eq!(line.live(), starts);
            assert_eq!((line.free_small(), line.free_wide()), (0, 0));
            for &(pos, tag, entry) in &expected {
                assert_eq!((line.tag(pos), line.raw(pos).entry(runs)), (tag, entry));
                let want = expected.iter().filter(|e| e.1 == tag).fold(0, |m, e| m | 1 << e.0);
                assert_eq!(line.matches(tag), want);
                assert!(!is_vain(&line, tag));
                for clock in 0..4 {
                    let changed = line.with_clock(pos, clock);
                    assert_eq!(changed.raw(pos).entry(runs), Entry { clock, ..entry });
                    assert!(line.0.iter().zip(&changed.0).filter(|(a, b)| a != b).count() <= 1);
                    assert!(
                        expected.iter().all(|e| e.0 == pos || changed.raw(e.0) == line.raw(e.0))
                    );
                }
            }
        }
    }

    #[test]
    fn an_empty_slot_matches_no_tag() {
        for (width, starts) in STARTS.into_iter().enumerate() {
            let line = Line([0; WORDS]).with_width(width);
            assert!((0..4096).all(|tag| line.matches(tag) == 0));
            // An empty slot looks like tag 0, no other.
            assert!((0..4096).all(|tag| is_vain(&line, tag) == (tag != 0)));
            assert_eq!(line.free_small() | line.free_wide(), starts);
        }
    }
}
