//! The naive index that the real one is measured by: a sorted list of (family, entry), and operations on both.

use larder_base::{ObjectHash, Rng, Words};
pub(super) use larder_format::geometry::{MAX_SEGMENTS, SMALL_SEGMENTS};

use super::super::bucket::positions;
use super::super::*;

/// A multiset of what an index holds, sorted.
pub(super) type Contents = Vec<(Family, Entry)>;

/// A hash of the given parts, all other bits zero.
pub(super) fn hash_of(bucket_bits: u32, tag: u16) -> ObjectHash {
    ObjectHash(u128::from(bucket_bits) << 88 | u128::from(tag) << 52)
}

/// One of `tags` tags and any bucket.
pub(super) fn random_hash(rng: &mut Rng, tags: u64) -> ObjectHash {
    hash_of(rng.next_u64() as u32, (rng.below(tags) * 37 % 4096) as u16)
}

/// Of a flash of as many segments as can be numbered: a wide one lies in any run of 4,095.
pub(super) fn random_entry(rng: &mut Rng, wide: f64, clock_max: u8) -> Entry {
    let (place, run) = if rng.chance(wide) {
        let start64 = 16 * rng.below(1 << 18) as u32;
        (Place::Extent { start64, length: rng.range(1, 4095) as u16 }, rng.below(16))
    } else {
        (Place::Page { function: rng.below(16) as u8 }, 0)
    };
    Entry {
        segment: rng.range(1, 40) as u16 + run as u16 * SMALL_SEGMENTS,
        place,
        clock: rng.below(u64::from(clock_max) + 1) as u8,
    }
}

/// Where everything in `index` lies: bucket, family, entry.
pub(super) fn layout(index: &FlashIndex) -> Vec<(u32, Family, Entry)> {
    let mut all = Vec::new();
    for bucket in 0..index.buckets {
        let line = index.line(bucket);
        for pos in positions(line.live()) {
            let tag = line.tag(pos);
            let first = bucket % index.base;
            let pair = first.min(index.second(first, tag));
            all.push((
                bucket,
                Family(u64::from(pair) << 12 | u64::from(tag)),
                line.raw(pos).entry(index.runs),
            ));
        }
    }
    all
}

pub(super) fn contents(index: &FlashIndex) -> Contents {
    let mut all: Contents =
        layout(index).into_iter().map(|(_, family, entry)| (family, entry)).collect();
    all.sort_unstable();
    all
}

/// The elements of sorted `a` that sorted `b` lacks, as multisets.
pub(super) fn minus<T: Ord + Copy>(a: &[T], b: &[T]) -> Vec<T> {
    let mut rest = Vec::new();
    let mut at = 0;
    for &x in a {
        while at < b.len() && b[at] < x {
            at += 1;
        }
        if at < b.len() && b[at] == x {
            at += 1;
        } else {
            rest.push(x);
        }
    }
    rest
}

/// One change of an index.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Insert(ObjectHash, Entry),
    Remove(ObjectHash, u16, Place),
    RemoveMatching(ObjectHash),
    Hit(ObjectHash, u16, Place, ClockMode),
    Sweep(u32),
    DropSegment(u16),
    Grow,
    Shrink,
}

/// An index of so many buckets, with words for as many as it can grow to.
pub(super) fn with_room(buckets: u32, clock: ClockBits) -> FlashIndex {
    let words = Words::heap(FlashIndex::words_for(FlashIndex::most_buckets(buckets)));
    FlashIndex::create_in(words, buckets, clock).unwrap().of_segments(MAX_SEGMENTS)
}

/// Draws changes that often meet what is there: hashes of inserted entries are remembered and used again.
pub(super) struct Source {
    pub(super) rng: Rng,
    pub(super) tags: u64,
    pub(super) wide: f64,
    pub(super) clock_max: u8,
    /// The share of changes that make it larger or smaller, more of them the first.
    pub(super) steps: f64,
    known: Vec<(ObjectHash, Entry)>,
}

impl Source {
    pub(super) fn new(seed: u64, tags: u64, wide: f64, clock_max: u8) -> Source {
        Source { rng: Rng::new(seed), tags, wide, clock_max, steps: 0.0, known: Vec::new() }
    }

    pub(super) fn draw(&mut self) -> Change {
        let known = |s: &mut Source| {
            let some =
                (!s.known.is_empty()).then(|| s.known[s.rng.below(s.known.len() as u64) as usize]);
            some.unwrap_or_else(|| {
                (random_hash(&mut s.rng, s.tags), random_entry(&mut s.rng, s.wide, s.clock_max))
            })
        };
        if self.steps > 0.0 && self.rng.chance(self.steps) {
            return if self.rng.chance(0.6) { Change::Grow } else { Change::Shrink };
        }
        match self.rng.below(100) {
            0..60 => {
                let (hash, entry) = if self.rng.chance(0.02) {
                    known(self)
                } else {
                    (
                        random_hash(&mut self.rng, self.tags),
                        random_entry(&mut self.rng, self.wide, self.clock_max),
                    )
                };
                self.known.push((hash, entry));
                Change::Insert(hash, entry)
            }
            60..75 => {
                let (hash, entry) = known(self);
                Change::Remove(hash, entry.segment, entry.place)
            }
            75..83 => Change::RemoveMatching(known(self).0),
            83..96 => {
                let (hash, entry) = known(self);
                let mode =
                    if self.rng.chance(0.5) { ClockMode::SetMax } else { ClockMode::Increment };
                Change::Hit(hash, entry.segment, entry.place, mode)
            }
            96..99 => Change::Sweep(self.rng.range(1, 3) as u32),
            _ => Change::DropSegment(self.rng.range(1, 40) as u16),
        }
    }
}

/// Applies `change` to `index` alone.
pub(super) fn apply(index: &mut FlashIndex, change: Change) {
    match change {
        Change::Insert(hash, entry) => drop(index.insert(hash, entry)),
        Change::Remove(hash, segment, place) => drop(index.remove(hash, segment, place)),
        Change::RemoveMatching(hash) => drop(index.remove_matching(hash)),
        Change::Hit(hash, segment, place, mode) => drop(index.hit(hash, segment, place, mode)),
        Change::Sweep(buckets) => drop(index.sweep(buckets, |_| ())),
        Change::DropSegment(segment) => drop(index.drop_segment(segment)),
        Change::Grow => drop(index.grow()),
        Change::Shrink => drop(index.shrink()),
    }
}
