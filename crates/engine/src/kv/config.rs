//! What a shard is built from.

use std::sync::Arc;

use larder_base::KeyHasher;
use larder_format::Geometry;
use larder_format::geometry::{Numbers, SMALL_SEGMENTS, run_bits};
use larder_format::page::EXTENT_ALIGN;
use larder_policy::application::Shares;

use super::log::SegmentTable;
use crate::segment::LONGEST_EXTENT;

/// How a read changes an object's CLOCK value (Flashield §4.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClockMode {
    /// Set it to its maximum: approximates LRU.
    #[default]
    SetMax,
    /// Add one: approximates MFU.
    Increment,
}

/// Bytes beside key and value, as they count towards the largest object: more than any header takes.
const HEADER: usize = 64;

/// Whether a cache whose largest object is `max_object` bytes takes one with a key and a value of so many bytes.
pub fn object_fits(key_len: usize, value_len: usize, max_object: u32) -> bool {
    key_len.saturating_add(value_len).saturating_add(HEADER) <= max_object as usize
}

/// Drives that one cache can have.
pub const MOST_DRIVES: usize = 16;

/// The segments of one of several drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveSegments {
    /// Which numbers they have.
    pub numbers: Numbers,
    /// How many there are; 0 where there is no such drive.
    pub segments: u16,
}

impl DriveSegments {
    const NONE: DriveSegments = DriveSegments { numbers: Numbers::ALONE, segments: 0 };
}

/// The drives of a cache, by place: where one was taken out, none is. Without any there is one drive, which has all segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drives {
    all: [DriveSegments; MOST_DRIVES],
    /// How many there are.
    count: u8,
}

impl Drives {
    /// One drive.
    pub const ONE: Drives = Drives { all: [DriveSegments::NONE; MOST_DRIVES], count: 0 };

    /// These, by place.
    ///
    /// # Panics
    /// If there are more than [`MOST_DRIVES`].
    pub fn of(drives: &[DriveSegments]) -> Drives {
        let mut all = Drives::ONE;
        all.all[..drives.len()].copy_from_slice(drives);
        all.count = drives.iter().filter(|drive| drive.segments > 0).count() as u8;
        all
    }

    /// Whether the segments are not told apart by drives.
    pub fn is_one(&self) -> bool {
        self.count == 0
    }

    /// The drives, by place.
    pub fn all(&self) -> &[DriveSegments; MOST_DRIVES] {
        &self.all
    }
}

/// The flash as a shard needs to know it, over all drives; to a log it is its drive's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashGeometry {
    /// Mixed into every record's checksum.
    pub salt: u32,
    /// Segments, numbered from 1; 0 means there is no flash. With several drives the highest number that there can be.
    pub segments: u16,
    /// Bytes per segment, a multiple of 4,096.
    pub segment_bytes: u32,
    /// Which drive has which segments.
    pub drives: Drives,
}

/// Which part of a cache's flash a log is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The place of its drive.
    pub drive: usize,
    /// Which numbers its segments have.
    pub numbers: Numbers,
    /// Large records begin at multiples of so many bytes.
    pub extent_align: usize,
}

impl From<&Geometry> for FlashGeometry {
    /// One drive, whose salt is not known.
    fn from(geometry: &Geometry) -> FlashGeometry {
        let (segments, segment_bytes) = (geometry.segments(), geometry.segment_bytes());
        FlashGeometry { salt: 0, segments, segment_bytes, drives: Drives::ONE }
    }
}

impl FlashGeometry {
    /// No flash.
    pub const NONE: FlashGeometry =
        FlashGeometry { salt: 0, segments: 0, segment_bytes: 4096, drives: Drives::ONE };

    /// Drives with this salt and segments of so many bytes, by place, whose segments have numbers up to `segments`: whichever drives there
    /// are, since how an entry is read follows from that.
    ///
    /// # Panics
    /// If there are more than [`MOST_DRIVES`].
    pub fn of_drives(
        salt: u32,
        segment_bytes: u32,
        segments: u16,
        drives: &[DriveSegments],
    ) -> FlashGeometry {
        FlashGeometry { salt, segments, segment_bytes, drives: Drives::of(drives) }
    }

    /// Drives, at least one.
    pub fn drive_count(&self) -> usize {
        usize::from(self.drives.count.max(1))
    }

    /// Words of the segment tables of all drives.
    pub fn table_words(&self) -> usize {
        let words =
            |drive| self.part(drive).map_or(0, |(own, _)| SegmentTable::words_for(own.segments));
        (0..MOST_DRIVES).map(words).sum::<usize>().next_multiple_of(8)
    }

    /// Pages of 4 KiB per segment.
    pub fn pages(&self) -> u32 {
        self.segment_bytes / 4096
    }

    /// Bytes of all segments.
    pub fn capacity(&self) -> u64 {
        let segments = match self.drives.is_one() {
            true => u64::from(self.segments),
            false => self.drives.all.iter().map(|drive| u64::from(drive.segments)).sum(),
        };
        segments * u64::from(self.segment_bytes)
    }

    /// The drive at a place, with its part of the flash: its own geometry, and how its log's segments are numbered. `None` where there is
    /// none.
    pub fn part(&self, drive: usize) -> Option<(FlashGeometry, Part)> {
        let extent_align = self.extent_align();
        if self.drives.is_one() {
            let part = Part { drive, numbers: Numbers::ALONE, extent_align };
            return (drive == 0).then_some((*self, part));
        }
        let DriveSegments { numbers, segments } = *self.drives.all.get(drive)?;
        let own = FlashGeometry { segments, drives: Drives::ONE, ..*self };
        (segments > 0).then_some((own, Part { drive, numbers, extent_align }))
    }

    /// The place of the drive that has the segment of this number, and its own number for it.
    #[inline]
    pub fn at(&self, number: u16) -> Option<(usize, u16)> {
        if self.drives.is_one() {
            return (1..=self.segments).contains(&number).then_some((0, number));
        }
        let mut drives = self.drives.all.iter().enumerate().filter(|(_, d)| d.segments > 0);
        drives.find_map(|(i, d)| Some((i, d.numbers.segment(number, d.segments)?)))
    }

    /// Places of drives, those between them that are empty included.
    pub fn places(&self) -> usize {
        self.drives.all.iter().rposition(|drive| drive.segments > 0).map_or(1, |last| last + 1)
    }

    /// Bytes from the beginning of a segment to the end of its drive.
    pub fn to_end(&self, number: u16) -> u64 {
        let Some((drive, segment)) = self.at(number) else { return 0 };
        let segments = match self.drives.is_one() {
            true => self.segments,
            false => self.drives.all[drive].segments,
        };
        u64::from(segments - segment + 1) * u64::from(self.segment_bytes)
    }

    /// The last segment of the zone of segment `s`: an eighth of the flash (of its `small` first segments, which can hold small objects), a quarter where that is few. A record may go on from segment to segment, but not
    /// beyond its zone: within one, segments are filled and reclaimed in the order of their numbers, so that none loses its end
    /// before its beginning.
    pub fn zone_end(&self, s: u16, small: u16) -> u16 {
        let zone = self.zone(small);
        (s.saturating_sub(1) / zone).saturating_add(1).saturating_mul(zone).min(self.segments)
    }

    /// Segments of a zone.
    fn zone(&self, small: u16) -> u16 {
        // So that a zone that is kept for large records leaves some of those that can hold small ones.
        let segments = self.segments.min(small);
        (segments / 8).max((segments / 4).min(8)).max(1)
    }

    /// Large records begin at multiples of so many bytes.
    pub fn extent_align(&self) -> usize {
        EXTENT_ALIGN << run_bits(self.segments)
    }

    /// The longest record that can lie on this flash, bytes: on each of its drives.
    pub fn longest_record(&self) -> u64 {
        if !self.drives.is_one() {
            let each = (0..MOST_DRIVES).filter_map(|i| self.part(i));
            let longest = |(own, part): (FlashGeometry, Part)| own.longest(part.numbers.small);
            return each.map(longest).min().unwrap_or(0);
        }
        self.longest(SMALL_SEGMENTS)
    }

    fn longest(&self, small: u16) -> u64 {
        let zone = u64::from(self.zone(small).min(self.segments)) * u64::from(self.segment_bytes);
        zone.min(LONGEST_EXTENT as u64)
    }
}

/// What a shard is built from.
#[derive(Clone, Debug)]
pub struct ShardConfig {
    /// Bytes of the arena for objects.
    pub arena_bytes: usize,
    /// Largest object: key, value and 64 bytes beside them.
    pub max_object: u32,
    /// Buckets of the flash index at first.
    pub index_buckets: u32,
    /// Buckets to which it may grow, in memory of the arena; no more than at first: it stays as it is.
    pub index_most: u32,
    /// Answer "out of memory" instead of evicting (memcached's `-M`).
    pub no_eviction: bool,
    /// What a read does to CLOCK.
    pub clock_mode: ClockMode,
    /// Largest CLOCK value: 1 for one bit, 3 for two.
    pub clock_max: u8,
    /// The cleaner is woken when free arena bytes fall below this.
    pub free_low: usize,
    /// The cleaner stops when free and staged arena bytes reach this.
    pub free_high: usize,
    /// The flash device.
    pub flash: FlashGeometry,
    /// Number of shards over which the flash is spread.
    pub shards: u32,
    /// Records smaller than this stay in DRAM.
    pub flash_min_record: u32,
    /// The first CAS unique; the shard counts on from here.
    pub cas_base: u64,
    /// Entries of the table of last accesses to objects on flash.
    pub access_times: usize,
    /// Shares of the applications.
    pub shares: Arc<Shares>,
    /// Hashes keys as the caller of the shard does.
    pub hasher: KeyHasher,
}
