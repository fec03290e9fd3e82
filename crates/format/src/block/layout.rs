//! Where the parts of a cache device lie.

use super::intents::REGIONS_PER_PAGE;
use super::log::{RECORDS_PER_PAGE, SLOTS_PER_PAGE};
use super::superblock::COPY_BYTES;
use crate::PAGE_SIZE;

const MIB: u64 = 1 << 20;
/// Lines of a group (`larder_engine::block::GROUP_LINES`; fixed by the format).
pub const GROUP_LINES: u64 = 16;
/// Most bits of a tag.
const TAG_BITS: u32 = 26;
const MAX_GROUP_BITS: u32 = 36;
/// Most regions of the write-intent map: half a MiB of bits.
pub const MAX_REGIONS: u64 = 1 << 22;
/// All volumes together may have this many bytes, or 64 times the device's, whichever is more.
const SPACE: u64 = 16 << 40;
/// Fewest log pages: room for a batch from every shard.
const MIN_LOG_PAGES: u64 = 64;

/// Why a device cannot be laid out as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// No power of two between 4 KiB and 64 KiB.
    #[error("a line of {0} bytes: it must be 4096, 8192, 16384, 32768 or 65536")]
    Line(u32),
    /// Not between 1 and 16.
    #[error("a set of {0} ways: between 1 (direct-mapped) and 16 are possible")]
    Ways(u32),
    /// Not between 1 and 64.
    #[error("{0} shards: between 1 and 64 are possible")]
    Shards(u32),
    /// Too small for one set in each shard.
    #[error(
        "{device} bytes are too few for a cache device with these lines, ways and shards: at least {least} are needed"
    )]
    TooSmall {
        /// Bytes of the device.
        device: u64,
        /// Bytes that are needed.
        least: u64,
    },
    /// More than 2^32 slots in a shard.
    #[error(
        "{device} bytes are too many for {shards} shards of lines of {line} bytes: format with larger lines"
    )]
    TooLarge {
        /// Bytes of the device.
        device: u64,
        /// Shards.
        shards: u32,
        /// Bytes of a line.
        line: u32,
    },
}

/// The layout of a device; everything follows from size, line, ways and shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of the device in use.
    pub device: u64,
    /// Bytes of a line.
    pub line: u32,
    /// Ways of a set of groups.
    pub ways: u32,
    /// Shards.
    pub shards: u32,
    /// Sets of groups in each shard.
    pub group_sets: u32,
    /// Groups of a region of the write-intent map (a power of two).
    pub region_groups: u64,
    /// Number of regions.
    pub regions: u32,
    /// Pages of a snapshot.
    pub snapshot_pages: u64,
    /// Pages of a log.
    pub log_pages: u64,
    /// First byte of the slots.
    pub data: u64,
}

impl Layout {
    /// The layout of a device of `device` bytes.
    ///
    /// # Errors
    /// A parameter that cannot be, or a device too small or too large for them.
    pub fn new(device: u64, line: u32, ways: u32, shards: u32) -> Result<Layout, LayoutError> {
        if !line.is_power_of_two() || !(4096..=65_536).contains(&line) {
            return Err(LayoutError::Line(line));
        }
        if !(1..=16).contains(&ways) {
            return Err(LayoutError::Ways(ways));
        }
        if !(1..=64).contains(&shards) {
            return Err(LayoutError::Shards(shards));
        }
        let set_bytes = u64::from(line) * GROUP_LINES * u64::from(ways) * u64::from(shards);
        // Metadata grow with the slots: come down from what would fit without any.
        let mut sets = device / set_bytes;
        if sets * GROUP_LINES * u64::from(ways) > u64::from(u32::MAX) {
            return Err(LayoutError::TooLarge { device, shards, line });
        }
        while sets > 0 {
            let layout = Self::with_sets(device, line, ways, shards, sets as u32);
            let need = layout.data + sets * set_bytes;
            if need <= device {
                return Ok(layout);
            }
            sets -= (need - device).div_ceil(set_bytes).min(sets);
        }
        let one = Self::with_sets(device, line, ways, shards, 1);
        Err(LayoutError::TooSmall { device, least: one.data + set_bytes })
    }

    fn with_sets(device: u64, line: u32, ways: u32, shards: u32, group_sets: u32) -> Layout {
        let divisor = u64::from(shards) * u64::from(group_sets);
        let space = space_groups(device, line, divisor);
        // Regions of 1 MiB or more, as small as their number allows.
        let mib_groups = (MIB / (u64::from(line) * GROUP_LINES)).max(1);
        let region_groups = space.div_ceil(MAX_REGIONS).max(mib_groups).next_power_of_two();
        let regions = space.div_ceil(region_groups) as u32;
        let slots = divisor * u64::from(ways) * GROUP_LINES;
        let snapshot_pages = slots.div_ceil(SLOTS_PER_PAGE as u64);
        let log_pages = (slots / 2).div_ceil(RECORDS_PER_PAGE as u64).max(MIN_LOG_PAGES);
        let mut layout = Layout {
            device,
            line,
            ways,
            shards,
            group_sets,
            region_groups,
            regions,
            snapshot_pages,
            log_pages,
            data: 0,
        };
        layout.data = (layout.log_at(1) + log_pages * PAGE_SIZE as u64).next_multiple_of(MIB);
        layout
    }

    /// Slots of a shard.
    pub fn shard_slots(&self) -> u32 {
        self.group_sets * self.ways * GROUP_LINES as u32
    }

    /// Slots of the device.
    pub fn slots(&self) -> u64 {
        u64::from(self.shard_slots()) * u64::from(self.shards)
    }

    /// Lines in the line space.
    pub fn space_lines(&self) -> u64 {
        let divisor = u64::from(self.shards) * u64::from(self.group_sets);
        space_groups(self.device, self.line, divisor) * GROUP_LINES
    }

    /// First byte of slot `slot` of `shard`.
    pub fn slot_at(&self, shard: u32, slot: u32) -> u64 {
        let number = u64::from(shard) * u64::from(self.shard_slots()) + u64::from(slot);
        self.data + number * u64::from(self.line)
    }

    /// Pages of the write-intent map.
    pub fn intent_pages(&self) -> u64 {
        u64::from(self.regions).div_ceil(REGIONS_PER_PAGE as u64)
    }

    /// First byte of the write-intent map.
    pub fn intents_at(&self) -> u64 {
        2 * COPY_BYTES as u64
    }

    /// First byte of snapshot `area` (0 or 1).
    pub fn snapshot_at(&self, area: u32) -> u64 {
        let first = self.intents_at() + self.intent_pages() * PAGE_SIZE as u64;
        first + u64::from(area) * (self.snapshot_pages + self.log_pages) * PAGE_SIZE as u64
    }

    /// First byte of log `area` (0 or 1).
    pub fn log_at(&self, area: u32) -> u64 {
        self.snapshot_at(area) + self.snapshot_pages * PAGE_SIZE as u64
    }
}

/// Groups of the line space: what tags can tell apart, and no more than volumes will need.
fn space_groups(device: u64, line: u32, divisor: u64) -> u64 {
    let by_tags = 1u64 << (TAG_BITS + divisor.ilog2()).min(MAX_GROUP_BITS);
    by_tags.min(SPACE.max(device.saturating_mul(64)) / (u64::from(line) * GROUP_LINES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn metadata_take_less_than_a_percent() {
        let layout = Layout::new(64 << 30, 4096, 8, 8).unwrap();
        assert!(layout.data * 100 < layout.device, "{layout:?}");
        let wasted = layout.device - layout.data - layout.slots() * 4096;
        assert!(wasted < 64 << 20, "{wasted}");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        assert_eq!(Layout::new(1 << 30, 5000, 1, 1), Err(LayoutError::Line(5000)));
        assert_eq!(Layout::new(1 << 30, 4096, 17, 1), Err(LayoutError::Ways(17)));
        assert_eq!(Layout::new(1 << 30, 4096, 1, 0), Err(LayoutError::Shards(0)));
        let Err(LayoutError::TooSmall { least, .. }) = Layout::new(1 << 20, 4096, 8, 8) else {
            panic!()
        };
        assert!(Layout::new(least, 4096, 8, 8).is_ok());
    }

    proptest! {
        #[test]
        fn parts_do_not_overlap(
            device in 1u64 << 20..1 << 44, line in 12u32..=16, ways in 1u32..=16, shards in 1u32..=64,
        ) {
            if let Ok(l) = Layout::new(device, 1 << line, ways, shards) {
                prop_assert!(l.intents_at() + l.intent_pages() * 4096 <= l.snapshot_at(0));
                prop_assert!(l.log_at(0) + l.log_pages * 4096 <= l.snapshot_at(1));
                prop_assert!(l.log_at(1) + l.log_pages * 4096 <= l.data);
                let last = l.slot_at(shards - 1, l.shard_slots() - 1);
                prop_assert!(last + u64::from(l.line) <= device);
                prop_assert!(u64::from(l.regions) <= MAX_REGIONS);
                prop_assert!(u64::from(l.regions) * l.region_groups * GROUP_LINES >= l.space_lines());
            }
        }
    }
}
