//! A division for studies, which fix the DRAM for objects.
//!
//! A paper's figure and a comparison of policies at equal DRAM say how much memory *objects* have. Everything beside them (index,
//! admission, tables, buffers) comes on top then, and is what a server has there whose memory leaves its objects this much: the
//! plan says how much memory that is.

use larder_format::geometry::{MAX_SEGMENT_BYTES, SMALL_SEGMENTS};

use super::plan::{AdmissionNeed, Plan};
use crate::kv::config::{Drives, FlashGeometry};

/// What a shard's arena can address.
const MAX_ARENA: u64 = 16 << 30;

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

/// The smallest segments with which `flash` has no more than [`SMALL_SEGMENTS`]: a power of two, if `arena` has room for
/// five of those.
fn least_segment(flash: u64, arena: u64) -> u64 {
    let least = flash.div_ceil(u64::from(SMALL_SEGMENTS));
    let (power, pages) = (least.next_power_of_two(), least.next_multiple_of(4096));
    if 5 * power <= arena { power } else { pages }
}

impl Study {
    /// Divides it, with what admission needs. `salt` is mixed into the records' checksums.
    ///
    /// # Errors
    /// Sizes that cannot work.
    pub fn divide(
        &self,
        need: AdmissionNeed<'_>,
        salt: u32,
    ) -> Result<(Plan, FlashGeometry), StudyError> {
        let refused = |what, value, must| Err(StudyError { what, value, must });
        let shards = u64::from(self.shards);
        if !matches!(shards, 1 | 2 | 4) {
            return refused("shards", shards, "1, 2 or 4".to_owned());
        }
        let most_segments = u64::from(SMALL_SEGMENTS);
        let most = most_segments * MAX_SEGMENT_BYTES;
        if self.flash > most {
            let must = format!(
                "at most {SMALL_SEGMENTS} segments of {MAX_SEGMENT_BYTES} bytes, {most} in all"
            );
            return refused("flash", self.flash, must);
        }
        let arena = self.dram / shards;
        let segment = match self.segment {
            0 => {
                let wanted = (self.flash / 256).min(self.dram / 48).clamp(16 << 10, 4 << 20);
                // Small segments are for small memories; the flash has no more than SMALL_SEGMENTS of them.
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
            let must = format!("8 to {SMALL_SEGMENTS} segments of {segment} bytes");
            return refused("flash", self.flash, must);
        }
        if !(64 << 10..=MAX_ARENA).contains(&arena) || arena < 3 * segment {
            let must = format!(
                "enough for 64 KiB and three segments of {segment} bytes a shard, and at most 16 GiB a shard"
            );
            return refused("dram", self.dram, must);
        }
        let (segments, segment_bytes) = (segments as u16, segment as u32);
        let flash = FlashGeometry { salt, segments, segment_bytes, drives: Drives::ONE };
        let of = (flash, self.object);
        Ok((Plan::around(arena, shards as usize, self.max_item, of, need), flash))
    }
}

#[cfg(test)]
mod tests {
    use larder_format::Geometry;
    use larder_format::geometry::SEGMENTS_AT;
    use larder_policy::admission::AdmissionConfig;

    use super::*;

    /// Figures of a study are those of a server: one that has the memory which the plan names divides it so.
    #[test]
    fn what_is_beside_the_objects_is_what_a_server_has() {
        for policy in ["flashiness", "ghost", "reject_first", "all"] {
            let config = AdmissionConfig::from_name(policy).unwrap();
            for (dram, flash) in [(3 << 20, 26 << 20), (12 << 20, 150 << 20), (7 << 19, 1 << 29)] {
                let study = Study {
                    dram,
                    flash,
                    segment: (flash as u32 / 2048).next_power_of_two().max(64 << 10),
                    shards: 1,
                    object: 320,
                    // Of objects so large, all that do not fit one shard's memory four times are in one shard.
                    max_item: dram / 3,
                };
                let need = AdmissionNeed::of(&config);
                let (p, g) = study.divide(need, 1).unwrap();
                assert_eq!((p.arena_bytes as u64, p.shards), (dram, 1));
                // A flash has its superblocks beside the segments, a study's has none.
                let all = flash + SEGMENTS_AT;
                let divided = Geometry::with_segment(all, u64::from(g.segment_bytes)).unwrap();
                assert_eq!(divided.capacity(), g.capacity());
                let of = Some((&divided, study.object as u32));
                let server = Plan::new(p.memory, study.max_item, of, need).unwrap();
                let near = |a: usize, b: usize| a.abs_diff(b) * 100 <= a.max(b);
                assert_eq!(server.shards, 1);
                assert!(near(server.arena_bytes, p.arena_bytes), "{policy}: {server:?} {p:?}");
                assert!(near(server.admission_bytes, p.admission_bytes), "{server:?} {p:?}");
                assert!(near(server.access_times, p.access_times), "{server:?} {p:?}");
                assert!(near(server.buckets as usize, p.buckets as usize), "{server:?} {p:?}");
                assert!(near(server.free_low, p.free_low), "{server:?} {p:?}");
                assert!(near(server.free_high, p.free_high), "{server:?} {p:?}");
                let all = p.fixed + dram;
                assert!(all <= p.memory && all > p.memory * 96 / 100, "{p:?}");
            }
        }
    }

    /// Where a server would refuse it for want of memory.
    #[test]
    fn a_window_that_is_stated_has_what_it_takes() {
        for policy in ["ghost", "reject_first"] {
            let mut config = AdmissionConfig::from_name(policy).unwrap();
            (config.ghost.window, config.reject_first.window) = (1 << 20, 1 << 20);
            let (dram, flash, object, max_item) = (1 << 20, 4 << 20, 320, 4096);
            let study = Study { dram, flash, segment: 64 << 10, shards: 1, object, max_item };
            let (p, _) = study.divide(AdmissionNeed::of(&config), 1).unwrap();
            assert!(p.admission_bytes as u64 >= config.window_bytes(1), "{policy}: {p:?}");
            assert_eq!(p.arena_bytes as u64, dram);
            assert!(p.memory > p.fixed + dram, "{policy}: {p:?}");
        }
    }
}
