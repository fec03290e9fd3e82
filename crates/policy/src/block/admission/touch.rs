//! `touch_count`: how often each segment of a volume was touched lately, in rotating bitmaps of small counters.
//!
//! Source: Fusion-io, "Flash based Caching" (Flash Memory Summit 2013), "Touch count algorithms": segments of the disk map to
//! bits of a bitmap to save memory; parameters are segment length, bits per segment, threshold, number of bitmaps and the
//! rotation. One bitmap counts at a time; a rotation starts the next one empty and drops the oldest, so that the sum over
//! all of them forgets by steps.

use larder_base::Nanos;

use super::config::Rotation;
use crate::block::access::mix;
use crate::block::{BlockAccess, VolumeId};

/// Groups of the retired bitmap that are cleared with each access, ahead of the rotation that needs it empty.
const CLEARED_PER_ACCESS: usize = 4;

/// See the [module](self).
///
/// ```text
/// words: [group 0: bitmap 0, 1, .. B][group 1: bitmap 0, 1, .. B] ..    B bitmaps and one that is being cleared
/// a word: 64 / bits counters of neighbouring numbers; a number is the hash of volume and segment
/// ```
///
/// The words of a group are neighbours, so the sum over all bitmaps costs one or two cache lines.
#[derive(Debug)]
pub(super) struct TouchCount {
    words: Vec<u64>,
    /// Bitmaps that count, without the one being cleared.
    bitmaps: usize,
    current: usize,
    bits: u32,
    mask: u64,
    seed: u64,
    segment_shift: u32,
    rotation: Rotation,
    /// Distinct counters that the current bitmap may have before it is rotated.
    fresh_limit: u64,
    fresh: u64,
    accesses: u64,
    since: Option<Nanos>,
    cleared: usize,
}

/// Sizes of the tables, as computed from parameters and cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct TouchShape {
    pub(super) segment: u64,
    pub(super) bits: u32,
    pub(super) bitmaps: u32,
    pub(super) rotation: Rotation,
    /// A power of two.
    pub(super) counters: u64,
    pub(super) cache_bytes: u64,
    pub(super) seed: u64,
}

impl TouchCount {
    pub(super) fn new(shape: &TouchShape) -> TouchCount {
        let groups = (shape.counters * u64::from(shape.bits)).div_ceil(64).max(1) as usize;
        let bitmaps = shape.bitmaps as usize;
        let half = shape.counters / 2;
        let fresh_limit = match shape.rotation {
            Rotation::Cache(share) => {
                let lines = (shape.cache_bytes / shape.segment) as f64;
                ((lines * share / bitmaps as f64) as u64).clamp(1, half.max(1))
            }
            Rotation::Accesses(_) | Rotation::Seconds(_) => half.max(1),
            Rotation::Never => u64::MAX,
        };
        TouchCount {
            words: vec![0; groups * (bitmaps + 1)],
            bitmaps,
            current: 0,
            bits: shape.bits,
            mask: shape.counters - 1,
            seed: shape.seed,
            segment_shift: shape.segment.trailing_zeros(),
            rotation: shape.rotation,
            fresh_limit,
            fresh: 0,
            accesses: 0,
            since: None,
            cleared: groups,
        }
    }

    /// One touch for each segment that `start..end` of the access's volume has a byte in.
    pub(super) fn observe(&mut self, access: &BlockAccess, start: u64, end: u64) {
        let since = *self.since.get_or_insert(access.now);
        let due = match self.rotation {
            Rotation::Accesses(n) => self.accesses >= n,
            Rotation::Seconds(n) => access.now.saturating_sub(since) >= Nanos::from_secs(n),
            Rotation::Cache(_) | Rotation::Never => false,
        };
        if due {
            self.rotate(access.now);
        }
        self.accesses += 1;
        self.clear(CLEARED_PER_ACCESS);
        let mut segment = start >> self.segment_shift;
        while segment <= end.saturating_sub(1).max(start) >> self.segment_shift {
            self.touch(access.volume, segment, access.now);
            segment += 1;
        }
    }

    fn place(&self, volume: VolumeId, segment: u64) -> (usize, u32) {
        let number = mix(self.seed, volume, segment) & self.mask;
        let per_word = u64::from(64 / self.bits);
        let group = (number / per_word) as usize * (self.bitmaps + 1);
        (group, (number % per_word) as u32 * self.bits)
    }

    fn touch(&mut self, volume: VolumeId, segment: u64, now: Nanos) {
        let (group, shift) = self.place(volume, segment);
        let top = (1u64 << self.bits) - 1;
        let word = &mut self.words[group + self.current];
        let count = *word >> shift & top;
        if count < top {
            *word += 1 << shift;
        }
        if count == 0 {
            self.fresh += 1;
            if self.fresh > self.fresh_limit {
                self.rotate(now);
                // The touch that was one too many counts in the new bitmap.
                self.words[group + self.current] += 1 << shift;
                self.fresh = 1;
            }
        }
    }

    /// Touches of the segment of `offset` that are remembered.
    pub(super) fn touches(&self, volume: VolumeId, offset: u64) -> u32 {
        let (group, shift) = self.place(volume, offset >> self.segment_shift);
        let top = (1u64 << self.bits) - 1;
        let spare = (self.current + 1) % (self.bitmaps + 1);
        let words = self.words[group..=group + self.bitmaps].iter().enumerate();
        words.filter(|&(at, _)| at != spare).map(|(_, word)| (word >> shift & top) as u32).sum()
    }

    pub(super) fn segment_bytes(&self) -> u64 {
        1 << self.segment_shift
    }

    /// The next bitmap counts, the oldest is forgotten and will be cleared.
    fn rotate(&mut self, now: Nanos) {
        self.clear(usize::MAX);
        self.current = (self.current + 1) % (self.bitmaps + 1);
        self.cleared = 0;
        self.fresh = 0;
        self.accesses = 0;
        self.since = Some(now);
    }

    /// Clears up to `groups` more of the bitmap that will count next.
    fn clear(&mut self, groups: usize) {
        let stride = self.bitmaps + 1;
        let spare = (self.current + 1) % stride;
        let end = self.cleared.saturating_add(groups).min(self.words.len() / stride);
        for group in self.cleared..end {
            self.words[group * stride + spare] = 0;
        }
        self.cleared = end.max(self.cleared);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.words.capacity() * 8
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};

    use larder_base::Rng;

    use super::*;
    use crate::block::{BlockKind, BlockOp};

    fn shape(rotation: Rotation) -> TouchShape {
        TouchShape {
            segment: 65536,
            bits: 2,
            bitmaps: 3,
            rotation,
            counters: 1 << 16,
            cache_bytes: 64 << 20,
            seed: 7,
        }
    }

    fn access(offset: u64, bytes: u64, now: Nanos) -> BlockAccess {
        let (op, kind) = (BlockOp::Read, BlockKind::Unknown);
        BlockAccess { volume: VolumeId(0), offset, bytes, op, kind, now }
    }

    fn observe(touch: &mut TouchCount, offset: u64, bytes: u64, secs: u64) {
        let a = access(offset, bytes, Nanos::from_secs(secs));
        touch.observe(&a, a.offset, a.end());
    }

    #[test]
    fn counts_saturate_and_span_segments() {
        let mut touch = TouchCount::new(&shape(Rotation::Never));
        for _ in 0..10 {
            observe(&mut touch, 65536 - 512, 1024, 0);
        }
        assert_eq!(touch.touches(VolumeId(0), 0), 3);
        assert_eq!(touch.touches(VolumeId(0), 65536), 3);
        assert_eq!(touch.touches(VolumeId(0), 131_072), 0);
        assert_eq!(touch.touches(VolumeId(1), 0), 0);
    }

    #[test]
    fn rotation_forgets_by_steps() {
        for (rotation, secs) in [(Rotation::Seconds(10), 10), (Rotation::Accesses(4), 0)] {
            let mut touch = TouchCount::new(&shape(rotation));
            let mut seen = Vec::new();
            for step in 0..6 {
                // Two touches in each of the first two periods.
                for i in 0..4u64 {
                    let place = if step < 2 && i < 2 { 0 } else { (step * 10 + i + 5) << 16 };
                    observe(&mut touch, place, 512, step * secs);
                }
                seen.push(touch.touches(VolumeId(0), 0));
            }
            assert_eq!(seen, [2, 4, 4, 2, 0, 0], "{rotation:?}");
        }
    }

    #[test]
    fn a_cache_full_of_segments_rotates() {
        // 64 MiB of 64 KiB segments: 1024; over 3 bitmaps 341 each.
        let mut touch = TouchCount::new(&shape(Rotation::Cache(1.0)));
        observe(&mut touch, 0, 512, 0);
        for segment in 1..900u64 {
            observe(&mut touch, segment << 16, 512, 0);
        }
        assert_eq!(touch.touches(VolumeId(0), 0), 1, "within the last three bitmaps");
        for segment in 900..1800u64 {
            observe(&mut touch, segment << 16, 512, 0);
        }
        assert_eq!(touch.touches(VolumeId(0), 0), 0);
    }

    #[test]
    fn a_model_with_exact_counts_agrees() {
        for bits in [1, 2, 4, 8] {
            let mut touch = TouchCount::new(&TouchShape {
                bits,
                counters: 1 << 20,
                ..shape(Rotation::Accesses(500))
            });
            let top = (1u32 << bits) - 1;
            let mut model: VecDeque<BTreeMap<u64, u32>> = VecDeque::from([BTreeMap::new()]);
            let mut rng = Rng::new(u64::from(bits));
            for i in 0..5_000u32 {
                if i > 0 && i % 500 == 0 {
                    model.push_back(BTreeMap::new());
                    if model.len() > 3 {
                        model.pop_front();
                    }
                }
                let segment = rng.below(200);
                observe(&mut touch, segment << 16, 4096, 0);
                let count = model.back_mut().unwrap().entry(segment).or_insert(0);
                *count = (*count + 1).min(top);
                let probe = rng.below(200);
                let wanted: u32 = model.iter().map(|m| m.get(&probe).copied().unwrap_or(0)).sum();
                assert_eq!(touch.touches(VolumeId(0), probe << 16), wanted, "bits {bits} step {i}");
            }
        }
    }

    #[test]
    fn the_end_of_the_address_space_is_survived() {
        let mut touch = TouchCount::new(&shape(Rotation::Never));
        observe(&mut touch, u64::MAX - 10, u64::MAX, 0);
        observe(&mut touch, 0, 0, 0);
        assert_eq!(touch.touches(VolumeId(0), u64::MAX), 1);
    }
}
