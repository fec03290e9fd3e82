//! A division for studies, which fix the DRAM for objects.
//!
//! A paper's figure and a comparison of policies at equal DRAM say how much memory *objects* have. Everything beside them (index,
//! admission, tables, buffers) comes on top then, and is ample, so that it decides nothing. No server divides its memory so: what
//! one does with `-m` is [`Plan::new`].

use larder_format::geometry::{MAX_SEGMENT_BYTES, MAX_SEGMENTS};

use super::plan::Plan;
use crate::index::FlashIndex;
use crate::kv::config::FlashGeometry;

/// What a shard's arena can address.
const MAX_ARENA: u64 = 16 << 30;
/// Bytes for admission of each object that flash can hold, and of a shard.
const ADMISSION_PER_OBJECT: u64 = 20;
const ADMISSION: u64 = 4 << 20;

/// Sizes that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {value}: it must be {must}")]
pub struct StudyError {
    /// Which setting.
    pub what: &'static str,
    /// Its value.
    pub value: u64,
    /// What it must be.
    pub must: String,
}

/// What a study fixes. Sizes are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Study {
    /// DRAM for objects.
    pub dram: u64,
    /// Flash.
    pub flash: u64,
    /// Bytes of a segment; 0 chooses: a 256th of the flash, but at most a 48th of the DRAM, a power of two.
    pub segment: u32,
    /// Shards: 1, 2 or 4.
    pub shards: u32,
    /// Mean bytes of a record.
    pub object: u64,
    /// Largest object.
    pub max_item: u64,
}

/// The smallest segments with which `flash` has no more than [`MAX_SEGMENTS`]: a power of two, if `arena` has room for
/// five of those.
fn least_segment(flash: u64, arena: u64) -> u64 {
    let least = flash.div_ceil(u64::from(MAX_SEGMENTS));
    let (power, pages) = (least.next_power_of_two(), least.next_multiple_of(4096));
    if 5 * power <= arena { power } else { pages }
}

impl Study {
    /// Divides it. `salt` is mixed into the records' checksums.
    ///
    /// # Errors
    /// Sizes that cannot work.
    pub fn divide(&self, salt: u32) -> Result<(Plan, FlashGeometry), StudyError> {
        let refused = |what, value, must| Err(StudyError { what, value, must });
        let shards = u64::from(self.shards);
        if !matches!(shards, 1 | 2 | 4) {
            return refused("shards", shards, "1, 2 or 4".to_owned());
        }
        let most_segments = u64::from(MAX_SEGMENTS);
        let most = most_segments * MAX_SEGMENT_BYTES;
        if self.flash > most {
            let must = format!(
                "at most {MAX_SEGMENTS} segments of {MAX_SEGMENT_BYTES} bytes, {most} in all"
            );
            return refused("flash", self.flash, must);
        }
        let arena = self.dram / shards;
        let segment = match self.segment {
            0 => {
                let wanted = (self.flash / 256).min(self.dram / 48).clamp(16 << 10, 4 << 20);
                // Small segments are for small memories; the flash has no more than MAX_SEGMENTS of them.
                (1u64 << wanted.ilog2()).max(least_segment(self.flash, arena))
            }
            given => u64::from(given),
        };
        if !segment.is_multiple_of(4096) || !(4096..=MAX_SEGMENT_BYTES).contains(&segment) {
            let must = format!("a multiple of 4096, at most {MAX_SEGMENT_BYTES}");
            return refused("segment", segment, must);
        }
        let segments = self.flash / segment;
        if !(8..=most_segments).contains(&segments) {
            let must = format!("8 to {MAX_SEGMENTS} segments of {segment} bytes");
            return refused("flash", self.flash, must);
        }
        // What is staged counts as free: leave room for what two open segments hold.
        let room = (arena / 32).max(5 * segment / 2).min(arena / 2);
        if !(64 << 10..=MAX_ARENA).contains(&arena) || arena < 3 * segment {
            let must = format!(
                "enough for 64 KiB and three segments of {segment} bytes a shard, and at most 16 GiB a shard"
            );
            return refused("dram", self.dram, must);
        }
        let flash =
            FlashGeometry { salt, segments: segments as u16, segment_bytes: segment as u32 };
        let objects = (flash.capacity() / self.object.max(64)).max(1024) / shards;
        // Twice the slots: the mean record is an estimate, and forced evictions are not what is studied here.
        let buckets = FlashIndex::buckets_for(objects * 2);
        let plan = Plan {
            shards: shards as usize,
            arena_bytes: arena as usize,
            buckets,
            region_words: Plan::region_words(flash.segments, shards as usize, buckets),
            admission_bytes: (objects * ADMISSION_PER_OBJECT + ADMISSION) as usize,
            access_times: 1024.max(objects as usize / 16),
            objects,
            free_low: room as usize,
            free_high: (room + arena / 16) as usize,
            memory: self.dram,
            fixed: 0,
            staged: 2 * segment / shards,
            max_item: self.max_item,
        };
        Ok((plan, flash))
    }
}
