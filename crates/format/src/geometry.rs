//! How a flash device is divided into segments.

use larder_base::ByteSize;

use crate::PAGE_SIZE;
use crate::page::EXTENT_ALIGN;

/// Where the first segment begins. What lies before it belongs to the superblocks; 1 MiB keeps every segment aligned to
/// whatever erase or stripe unit partitions are aligned to.
pub const SEGMENTS_AT: u64 = 1 << 20;
/// Segments that can hold small objects, from the first on: an entry of the index has 12 bits for the number, and 0 stands for an empty
/// slot there.
pub const SMALL_SEGMENTS: u16 = 4095;
/// Segments at all. Those behind the first [`SMALL_SEGMENTS`] hold large objects alone, whose entries say in up to 4 bits more in which
/// run of so many segments they lie ([`run_bits`]).
pub const MAX_SEGMENTS: u16 = 16 * SMALL_SEGMENTS;
/// The fewest segments that a FIFO of two kinds of segment can turn in.
pub const MIN_SEGMENTS: u16 = 4;
/// The smallest segment that [`Geometry::plan`] chooses.
pub const PLANNED_SEGMENT_BYTES: u64 = 1 << 20;
/// The smallest segment at all, for tests with tiny devices.
pub const MIN_SEGMENT_BYTES: u64 = 2 * PAGE_SIZE as u64;
/// The largest segment: the index has 22 bits for where a large object starts, in units of 64 bytes.
pub const MAX_SEGMENT_BYTES: u64 = (1 << 22) * EXTENT_ALIGN as u64;
/// What planned segment sizes are rounded up to.
const PLANNED_MULTIPLE: u64 = 64 << 10;

/// Bits that say in which run of [`SMALL_SEGMENTS`] a segment of so many lies. Those bits are taken from where a large object begins: it begins at
/// a multiple of 64 bytes, doubled for each.
pub fn run_bits(segments: u16) -> u32 {
    let runs = segments.div_ceil(SMALL_SEGMENTS).max(1);
    runs.next_power_of_two().trailing_zeros()
}

/// Which numbers the segments of one of several drives have in their cache: the first `small` of them lie among the first
/// [`SMALL_SEGMENTS`], so that each drive can hold small objects, the rest behind those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// The number of its first segment, less one.
    pub small_before: u16,
    /// Segments that can hold small objects, or more than there are.
    pub small: u16,
    /// The number of the first segment behind those, less one; at least [`SMALL_SEGMENTS`].
    pub large_before: u16,
}

impl Numbers {
    /// Those of a drive that is the only one: each segment has its own number.
    pub const ALONE: Numbers =
        Numbers { small_before: 0, small: SMALL_SEGMENTS, large_before: SMALL_SEGMENTS };

    /// The number of the drive's segment `segment`, counted from 1.
    #[inline]
    pub fn number(&self, segment: u16) -> u16 {
        match segment.checked_sub(self.small) {
            Some(behind) if behind > 0 => self.large_before.saturating_add(behind),
            _ => self.small_before.saturating_add(segment),
        }
    }

    /// The drive's segment of this number, if it has `segments`.
    #[inline]
    pub fn segment(&self, number: u16, segments: u16) -> Option<u16> {
        let small = self.small.min(segments);
        let behind = match number > SMALL_SEGMENTS {
            true => number.checked_sub(self.large_before).map(|at| small.saturating_add(at)),
            false => number.checked_sub(self.small_before).filter(|at| *at <= small),
        };
        behind.filter(|s| *s > 0 && *s <= segments && self.number(*s) == number)
    }

    /// The highest number that `segments` of them have.
    pub fn highest(&self, segments: u16) -> u16 {
        self.number(segments)
    }

    /// Whether `segments` of them have numbers that can be, where those end at `most`, and small objects some of them.
    pub fn can_be(&self, segments: u16, most: u16) -> bool {
        let small = self.small.min(segments);
        let large = segments - small;
        self.small > 0
            && u32::from(self.small_before) + u32::from(small) <= SMALL_SEGMENTS.into()
            && self.large_before >= SMALL_SEGMENTS
            && (large == 0 || u32::from(self.large_before) + u32::from(large) <= most.into())
    }

    /// Ranges of numbers, less one, that so many segments take: those that can hold small objects, and the rest.
    fn ranges(&self, segments: u16) -> [(u16, u16); 2] {
        let small = self.small.min(segments);
        let end = |before: u16, count: u16| (before, before.saturating_add(count));
        [end(self.small_before, small), end(self.large_before, segments - small)]
    }

    /// Numbers up to `most` for a drive of so many segments, between those that are taken. `small` of them can hold small objects, or fewer
    /// where no gap is that large.
    pub fn beside(
        taken: &[(Numbers, u16)],
        segments: u16,
        small: u16,
        most: u16,
    ) -> Option<Numbers> {
        // Gaps of one of the two ranges: where each begins, and how many numbers it has.
        let gaps = |which: usize, from: u16, to: u16| {
            let mut ranges: Vec<_> = taken.iter().map(|(n, all)| n.ranges(*all)[which]).collect();
            ranges.push((to, to));
            ranges.sort_unstable();
            let mut at = from;
            let mut gaps = Vec::new();
            for (start, end) in ranges {
                gaps.push((at, start.saturating_sub(at)));
                at = at.max(end);
            }
            gaps
        };
        let wanted = small.min(segments);
        let all = gaps(0, 0, SMALL_SEGMENTS);
        let (small_before, room) = *all
            .iter()
            .find(|(_, room)| *room >= wanted)
            .or_else(|| all.iter().max_by_key(|(_, room)| *room))?;
        let small = wanted.min(room);
        let large = segments - small;
        let all = gaps(1, SMALL_SEGMENTS, most.max(SMALL_SEGMENTS));
        let large_before = match all.iter().find(|(_, room)| *room >= large) {
            _ if large == 0 => SMALL_SEGMENTS,
            found => found?.0,
        };
        let numbers = Numbers { small_before, small, large_before };
        numbers.can_be(segments, most).then_some(numbers)
    }

    /// Whether two drives, of so many segments, have a number in common.
    pub fn overlap(&self, segments: u16, other: &Numbers, others: u16) -> bool {
        let meet = |a: (u16, u16), b: (u16, u16)| a.0 < b.1 && b.0 < a.1;
        let (mine, theirs) = (self.ranges(segments), other.ranges(others));
        meet(mine[0], theirs[0]) || meet(mine[1], theirs[1])
    }
}

const _: () = assert!(SEGMENTS_AT.is_multiple_of(PAGE_SIZE as u64));
const _: () = assert!(MAX_SEGMENT_BYTES <= u32::MAX as u64);

/// Why a device cannot be divided.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// Too small.
    #[error(
        "{device} of flash are too small: at least {needed} are needed (1 MiB for superblocks and {MIN_SEGMENTS} segments of {segment})"
    )]
    TooSmall {
        /// The device.
        device: ByteSize,
        /// What it should have.
        needed: ByteSize,
        /// The segment size that was asked for or planned.
        segment: ByteSize,
    },
    /// More than segments can be numbered.
    #[error(
        "{device} of flash are more than one cache can number ({MAX_SEGMENTS} segments of {segment} = {limit}): {remedy}"
    )]
    TooLarge {
        /// The device.
        device: ByteSize,
        /// The segment size.
        segment: ByteSize,
        /// What that segment size reaches.
        limit: ByteSize,
        /// What to do.
        remedy: &'static str,
    },
    /// Not a segment size.
    #[error(
        "a segment of {0} bytes cannot be: it must be a multiple of 4,096 bytes, at least {min} and at most {max}",
        min = ByteSize(MIN_SEGMENT_BYTES), max = ByteSize(MAX_SEGMENT_BYTES)
    )]
    SegmentSize(u64),
}

/// The division of a flash device into segments 1..=`segments` of one size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    device_bytes: u64,
    segment_bytes: u32,
    segments: u16,
}

impl Geometry {
    /// The division of a device of `device_bytes`: segments of 1 MiB, or as large as 4,095 of them must be, or where that is too large as
    /// [`MAX_SEGMENTS`] of them must be.
    ///
    /// # Errors
    /// When it is too small or too large to be divided.
    pub fn plan(device_bytes: u64) -> Result<Geometry, GeometryError> {
        Geometry::plan_within(device_bytes, MAX_SEGMENT_BYTES)
    }

    /// The same with segments that are no larger than `most` bytes, as long as they can be numbered.
    ///
    /// # Errors
    /// When it is too small or too large to be divided.
    pub fn plan_within(device_bytes: u64, most: u64) -> Result<Geometry, GeometryError> {
        let usable = device_bytes.saturating_sub(SEGMENTS_AT);
        let among =
            |segments: u16| usable.div_ceil(u64::from(segments)).next_multiple_of(PLANNED_MULTIPLE);
        let most = most.min(MAX_SEGMENT_BYTES).next_multiple_of(PLANNED_MULTIPLE);
        let even = among(SMALL_SEGMENTS).min(most).max(among(MAX_SEGMENTS));
        if even > MAX_SEGMENT_BYTES {
            return Err(GeometryError::TooLarge {
                device: ByteSize(device_bytes),
                segment: ByteSize(MAX_SEGMENT_BYTES),
                limit: ByteSize(SEGMENTS_AT + u64::from(MAX_SEGMENTS) * MAX_SEGMENT_BYTES),
                remedy: "give it less, or run several caches on parts of it",
            });
        }
        Geometry::with_segment(device_bytes, even.max(PLANNED_SEGMENT_BYTES))
    }

    /// The division of a device of `device_bytes` into segments of `segment_bytes`.
    pub fn with_segment(device_bytes: u64, segment_bytes: u64) -> Result<Geometry, GeometryError> {
        if !(MIN_SEGMENT_BYTES..=MAX_SEGMENT_BYTES).contains(&segment_bytes)
            || !segment_bytes.is_multiple_of(PAGE_SIZE as u64)
        {
            return Err(GeometryError::SegmentSize(segment_bytes));
        }
        let segments = device_bytes.saturating_sub(SEGMENTS_AT) / segment_bytes;
        if segments < u64::from(MIN_SEGMENTS) {
            return Err(GeometryError::TooSmall {
                device: ByteSize(device_bytes),
                needed: ByteSize(SEGMENTS_AT + u64::from(MIN_SEGMENTS) * segment_bytes),
                segment: ByteSize(segment_bytes),
            });
        }
        if segments > u64::from(MAX_SEGMENTS) {
            return Err(GeometryError::TooLarge {
                device: ByteSize(device_bytes),
                segment: ByteSize(segment_bytes),
                limit: ByteSize(SEGMENTS_AT + u64::from(MAX_SEGMENTS) * segment_bytes),
                remedy: "choose larger segments",
            });
        }
        // Both casts fit: checked against the limits above.
        Ok(Geometry {
            device_bytes,
            segment_bytes: segment_bytes as u32,
            segments: segments as u16,
        })
    }

    /// Bytes of the device when it was divided.
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// Bytes of a segment.
    pub fn segment_bytes(&self) -> u32 {
        self.segment_bytes
    }

    /// Number of segments; they are numbered from 1.
    pub fn segments(&self) -> u16 {
        self.segments
    }

    /// Pages of a segment.
    pub fn pages(&self) -> u32 {
        self.segment_bytes / PAGE_SIZE as u32
    }

    /// Bytes that can hold records.
    pub fn capacity(&self) -> u64 {
        u64::from(self.segments) * u64::from(self.segment_bytes)
    }

    /// Where a segment begins on the device.
    ///
    /// # Panics
    /// When there is no such segment.
    pub fn offset(&self, segment: u16) -> u64 {
        assert!((1..=self.segments).contains(&segment), "segment {segment} of {}", self.segments);
        SEGMENTS_AT + u64::from(segment - 1) * u64::from(self.segment_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_reach_over_all_sizes() {
        let mut device = 5 << 20;
        while device <= 15 << 40 {
            let g = Geometry::plan(device).unwrap();
            assert!(g.segments() >= MIN_SEGMENTS && g.segments() <= MAX_SEGMENTS);
            // What one run of segments reaches is not divided into more.
            assert!(g.segments() <= SMALL_SEGMENTS || device > (1 << 40) - (1 << 30), "{g:?}");
            let end = g.offset(g.segments()) + u64::from(g.segment_bytes());
            assert!(end <= device);
            // Less than one segment is left over, and no more than 64 KiB per segment is rounded away.
            assert!(device - end < u64::from(g.segment_bytes()), "{device}");
            if device > 8 << 30 {
                assert!(device - end <= device / 20, "{g:?}");
            }
            device += device / 7;
        }
        assert_eq!(Geometry::plan(4 << 30).unwrap().segments(), 4095);
        // With a bound there are more of them, as long as there are numbers.
        let g = Geometry::plan_within(1 << 40, 16 << 20).unwrap();
        assert!(
            (16 << 20..17 << 20).contains(&g.segment_bytes()) && g.segments() > 65_000,
            "{g:?}"
        );
        assert_eq!(Geometry::plan(8 << 40).unwrap().segments(), 32_767);
    }

    #[test]
    fn refusals_name_the_figure() {
        let small = Geometry::plan(3 << 20).unwrap_err().to_string();
        assert!(small.contains("3 MiB") && small.contains("5 MiB"), "{small}");
        let large = Geometry::plan(17 << 40).unwrap_err().to_string();
        assert!(large.contains("17 TiB") && large.contains("give it less"), "{large}");
        assert_eq!(Geometry::with_segment(1 << 30, 5000), Err(GeometryError::SegmentSize(5000)));
        assert!(Geometry::with_segment(1 << 40, 8192).is_err());
        assert!(Geometry::with_segment(0, 8192).is_err());
        assert!(Geometry::with_segment(u64::MAX, 1 << 20).is_err());
    }

    #[test]
    fn numbers_of_drives_lead_back_to_their_segments() {
        let drives = [
            (Numbers { small_before: 0, small: 2000, large_before: 4095 }, 9000),
            (Numbers { small_before: 2000, small: 500, large_before: 4095 + 7000 }, 2000),
            (Numbers { small_before: 2500, small: 700, large_before: 4095 }, 600),
        ];
        let mut given = std::collections::BTreeSet::new();
        for (numbers, segments) in drives {
            for s in 1..=segments {
                let number = numbers.number(s);
                assert!(given.insert(number), "{number} twice");
                assert_eq!(number <= SMALL_SEGMENTS, s <= numbers.small);
                for (other, all) in drives {
                    let back = (other == numbers).then_some(s);
                    assert_eq!(other.segment(number, all), back, "{number} {other:?}");
                }
            }
            assert_eq!(numbers.segment(0, segments), None);
        }
        for (i, (a, of_a)) in drives.iter().enumerate() {
            for (j, (b, of_b)) in drives.iter().enumerate() {
                assert_eq!(a.overlap(*of_a, b, *of_b), i == j);
            }
        }
        let mut taken: Vec<_> = Vec::new();
        for segments in [600, 5000, 900, 900] {
            let numbers = Numbers::beside(&taken, segments, 1000, MAX_SEGMENTS).unwrap();
            assert!(taken.iter().all(|(n, all)| !n.overlap(*all, &numbers, segments)));
            taken.push((numbers, segments));
        }
        assert_eq!(taken[1].0, Numbers { small_before: 600, small: 1000, large_before: 4095 });
        assert_eq!(Numbers::beside(&taken, 60_000, 1000, MAX_SEGMENTS), None);
        assert_eq!(Numbers::beside(&[(Numbers::ALONE, 4095)], 10, 10, MAX_SEGMENTS), None);
        // What one leaves is another's.
        let (gone, all) = taken.remove(1);
        assert_eq!(Numbers::beside(&taken, all, 1000, MAX_SEGMENTS), Some(gone));
        let less = Numbers::beside(&taken, 4400, 2000, MAX_SEGMENTS).unwrap();
        assert!(taken.iter().all(|(n, all)| !n.overlap(*all, &less, 4400)), "{less:?}");
        assert_eq!(Numbers::beside(&taken, 5000, 1000, 4095 + 3999), None);
        for s in [1, 4095, 4096, MAX_SEGMENTS] {
            assert_eq!(Numbers::ALONE.number(s), s);
            assert_eq!(Numbers::ALONE.segment(s, MAX_SEGMENTS), Some(s));
        }
    }

    #[test]
    fn runs_are_counted_in_bits() {
        for (segments, bits) in [
            (0, 0),
            (1, 0),
            (4095, 0),
            (4096, 1),
            (8190, 1),
            (8191, 2),
            (32_760, 3),
            (MAX_SEGMENTS, 4),
        ] {
            assert_eq!(run_bits(segments), bits, "{segments}");
        }
    }
}
