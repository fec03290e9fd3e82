//! What each segment is to the log, in words that may outlive the process.

use larder_base::Words;
use larder_format::Kind;
use larder_format::page::EXTENT_ALIGN;

use crate::segment::Fill;

/// What a segment is to the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentState {
    /// Nothing in it is of use.
    Free,
    /// Being filled in memory.
    Filling,
    /// Written and published.
    Live(Kind),
    /// Its entries are being removed.
    Reclaiming(Kind),
    /// Its last write failed.
    Failed,
}

/// States and generations of all segments, in words that may outlive the process.
///
/// ```text
/// word 0: the segment to fill next    word 1: the highest generation given out
/// word 1 + s: segment s: state in bits 56..60, generation below
/// word 1 + n + s: segment s of n: where its first record begins in bits 0..23, where its last begins that goes on in the next segment, plus
///                 one, in bits 23..46, both in units of 64 bytes; bit 46: that record was not finished
/// ```
#[derive(Debug)]
pub struct SegmentTable {
    pub(super) words: Words,
}

impl SegmentTable {
    /// Words for a table of `segments`.
    pub fn words_for(segments: u16) -> usize {
        2 + 2 * usize::from(segments)
    }

    /// A table of free segments.
    pub fn create(mut words: Words) -> SegmentTable {
        for i in 0..words.len() {
            words.store(i, 0);
        }
        SegmentTable { words }
    }

    /// The table another process left: what was being filled or reclaimed is free.
    pub fn attach(words: Words) -> SegmentTable {
        let mut table = SegmentTable { words };
        for s in 1..=table.segments() {
            if !matches!(table.state(s), SegmentState::Live(_)) {
                table.set(s, SegmentState::Free, 0);
            }
        }
        table
    }

    /// Generations given out from now on are above `floor`: no two runs on one device share any.
    pub fn raise_generation(&mut self, floor: u64) {
        if self.words.load(1) < floor {
            self.words.store(1, floor);
        }
    }

    fn segments(&self) -> u16 {
        ((self.words.len() - 2) / 2) as u16
    }

    fn ends_at(&self, s: u16) -> usize {
        1 + usize::from(self.segments()) + usize::from(s)
    }

    /// Where the records of segment `s` begin and end.
    pub fn ends(&self, s: u16) -> Ends {
        let word = self.words.load(self.ends_at(s));
        let bytes = |units: u64| (units & UNITS) as usize * EXTENT_ALIGN;
        let cut = ((word >> UNIT_BITS) & UNITS).checked_sub(1).map(bytes);
        Ends { begins: bytes(word), cut, lost: word & LOST != 0 }
    }

    pub(super) fn set_ends(&mut self, s: u16, fill: &Fill) {
        let units = |bytes: u64| (bytes / EXTENT_ALIGN as u64) & UNITS;
        let cut = fill.cut.map_or(0, |at| units(at) + 1);
        self.words.store(self.ends_at(s), units(fill.begins) | (cut << UNIT_BITS));
    }

    /// The record that goes on from segment `s` will not be finished.
    pub(super) fn set_lost(&mut self, s: u16) {
        let at = self.ends_at(s);
        self.words.store(at, self.words.load(at) | LOST);
    }

    /// State of segment `s`.
    pub fn state(&self, s: u16) -> SegmentState {
        match self.words.load(1 + usize::from(s)) >> 56 {
            1 => SegmentState::Filling,
            2 => SegmentState::Live(Kind::Small),
            3 => SegmentState::Live(Kind::Large),
            4 => SegmentState::Reclaiming(Kind::Small),
            5 => SegmentState::Reclaiming(Kind::Large),
            6 => SegmentState::Failed,
            _ => SegmentState::Free,
        }
    }

    /// Generation of the present filling of segment `s`.
    pub fn generation(&self, s: u16) -> u64 {
        self.words.load(1 + usize::from(s)) & ((1 << 56) - 1)
    }

    pub(super) fn set(&mut self, s: u16, state: SegmentState, generation: u64) {
        let code: u64 = match state {
            SegmentState::Free => 0,
            SegmentState::Filling => 1,
            SegmentState::Live(Kind::Small) => 2,
            SegmentState::Live(Kind::Large) => 3,
            SegmentState::Reclaiming(Kind::Small) => 4,
            SegmentState::Reclaiming(Kind::Large) => 5,
            SegmentState::Failed => 6,
        };
        self.words.store(1 + usize::from(s), code << 56 | generation);
    }

    /// For [`KvShard::attach`]: the generation of every live segment, 0 for the others; index 0 is unused.
    pub fn live_generations(&self) -> Vec<u64> {
        let mut all = vec![0; usize::from(self.segments()) + 1];
        for s in 1..=self.segments() {
            if matches!(self.state(s), SegmentState::Live(_)) {
                all[usize::from(s)] = self.generation(s);
            }
        }
        all
    }

    /// The words, for a checkpoint.
    pub fn words(&self) -> &Words {
        &self.words
    }

    /// The words, for tests that burn a fuse.
    pub fn words_mut(&mut self) -> &mut Words {
        &mut self.words
    }
}

/// Where the records of a segment begin and end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// Bytes before the first: the end of one that began in an earlier segment.
    pub begins: usize,
    /// Where the last begins, bytes, if it goes on in the next segment.
    pub cut: Option<usize>,
    /// It was never finished.
    pub lost: bool,
}

/// Bits of a place in a segment, in units of [`EXTENT_ALIGN`].
const UNIT_BITS: u32 = 23;
const UNITS: u64 = (1 << UNIT_BITS) - 1;
/// What goes on from a segment was not finished.
const LOST: u64 = 1 << (2 * UNIT_BITS);
