//! What a shard is built from.

use std::sync::Arc;

use larder_base::KeyHasher;
use larder_format::geometry::{SMALL_SEGMENTS, run_bits};
use larder_format::page::EXTENT_ALIGN;
use larder_policy::application::Shares;

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

/// The flash device as a shard needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashGeometry {
    /// Mixed into every record's checksum.
    pub salt: u32,
    /// Segments, numbered from 1; 0 means there is no flash.
    pub segments: u16,
    /// Bytes per segment, a multiple of 4,096.
    pub segment_bytes: u32,
}

impl FlashGeometry {
    /// Pages of 4 KiB per segment.
    pub fn pages(&self) -> u32 {
        self.segment_bytes / 4096
    }

    /// Bytes of all segments.
    pub fn capacity(&self) -> u64 {
        u64::from(self.segments) * u64::from(self.segment_bytes)
    }

    /// The last segment of the zone of segment `s`: an eighth of the flash (of its first 4,095 segments), a quarter where that is few. A record may go on from segment to segment, but not
    /// beyond its zone: within one, segments are filled and reclaimed in the order of their numbers, so that none loses its end
    /// before its beginning.
    pub fn zone_end(&self, s: u16) -> u16 {
        let zone = self.zone();
        (s.saturating_sub(1) / zone).saturating_add(1).saturating_mul(zone).min(self.segments)
    }

    /// Segments of a zone.
    fn zone(&self) -> u16 {
        // So that a zone that is kept for large records leaves some of those that can hold small ones.
        let segments = self.segments.min(SMALL_SEGMENTS);
        (segments / 8).max((segments / 4).min(8)).max(1)
    }

    /// Large records begin at multiples of so many bytes.
    pub fn extent_align(&self) -> usize {
        EXTENT_ALIGN << run_bits(self.segments)
    }

    /// The longest record that can lie on this flash, bytes.
    pub fn longest_record(&self) -> u64 {
        let zone = u64::from(self.zone().min(self.segments)) * u64::from(self.segment_bytes);
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
