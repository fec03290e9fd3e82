//! Where the parts of a cache device lie.

use larder_base::ByteSize;

use super::intents::REGIONS_PER_PAGE;
use super::log::{RECORDS_PER_PAGE, SLOTS_PER_PAGE};
use super::superblock::COPY_BYTES;
use super::table::GROUPS_PER_PAGE;
use crate::PAGE_SIZE;

const MIB: u64 = 1 << 20;
/// Lines of a group (`larder_engine::block::GROUP_LINES`; fixed by the format).
pub const GROUP_LINES: u64 = 16;
/// Most ways of a set.
pub const MOST_WAYS: u32 = 16;
/// Most bits of a tag.
const TAG_BITS: u32 = 26;
const MAX_GROUP_BITS: u32 = 36;
/// Most regions of the write-intent map: half a MiB of bits.
pub const MAX_REGIONS: u64 = 1 << 22;
/// All volumes together may have this many bytes, or 64 times the device's, whichever is more.
const SPACE: u64 = 16 << 40;
/// Fewest log pages: room for a batch from every shard.
const MIN_LOG_PAGES: u64 = 64;

/// Fewest segments of a shard whose slots are a log.
pub const LEAST_SEGMENTS: u64 = 8;
/// A segment has at most so many bytes, and as many of them as there are segments enough.
const SEGMENT: u64 = 8 << 20;
const GOOD_SEGMENTS: u64 = 128;

/// What a sparse cache has room for, unless it is told: sixteen times its size, within these. A file of ext4 has less than
/// 16 TiB.
const SPAN: std::ops::RangeInclusive<u64> = 4 << 40..=14 << 40;

/// Why a device cannot be laid out as asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// No power of two between 4 KiB and 64 KiB.
    #[error("a line of {0} bytes: it must be 4096, 8192, 16384, 32768 or 65536")]
    Line(u32),
    /// Not between 1 and 16.
    #[error("a set of {0} ways: between 1 (direct-mapped) and {MOST_WAYS} are possible")]
    Ways(u32),
    /// Not between 1 and 64.
    #[error("{0} shards: between 1 and 64 are possible")]
    Shards(u32),
    /// No power of two, or one that a shard cannot have.
    #[error("segments of {0} lines: a power of two up to 65536 is possible")]
    Segment(u32),
    /// Too small for one set in each shard.
    #[error(
        "{} are too few for a cache device with these lines, ways and shards: at least {} are needed",
        ByteSize(*device),
        ByteSize(*least)
    )]
    TooSmall {
        /// Bytes of the device.
        device: u64,
        /// Bytes that are needed.
        least: u64,
    },
    /// A sparse cache with room for less than it holds, or for more than can be.
    #[error(
        "room for volumes of {span} bytes: between the cache's size ({size}) and {most} bytes are possible"
    )]
    Span {
        /// Bytes of the line space that was asked for.
        span: u64,
        /// Bytes of the cache.
        size: u64,
        /// Most that can be.
        most: u64,
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

/// The layout of a device; everything follows from size, line, ways (or lines of a segment) and shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes of the device in use; of a sparse one, of the file as it seems to be.
    pub device: u64,
    /// Bytes of a line.
    pub line: u32,
    /// Ways of a set of groups; 1 for a log.
    pub ways: u32,
    /// Lines of a segment, if the slots of each shard are a log of segments (fully associative placement); 0 for sets.
    pub segment: u32,
    /// Shards.
    pub shards: u32,
    /// Sets of groups in each shard; for a log, its slots by sixteen.
    pub group_sets: u32,
    /// Groups of a region of the write-intent map (a power of two).
    pub region_groups: u64,
    /// Number of regions.
    pub regions: u32,
    /// Lines that a sparse cache may hold at a time; 0 for other placements, where every slot may have one.
    pub most_lines: u64,
    /// Groups of a page of the table of a sparse cache; 0 for others.
    pub page_groups: u32,
    /// Pages of a snapshot, or of the table of a sparse cache.
    pub snapshot_pages: u64,
    /// Pages of a log.
    pub log_pages: u64,
    /// First byte of the slots.
    pub data: u64,
}

/// Where a line may lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In one slot of each of so many ways; with one way the cache is direct-mapped.
    Sets(u32),
    /// Anywhere in its shard: the slots are a log of segments.
    Full,
    /// In one slot that is no other line's, of a sparse file with room for volumes of so many bytes together (0: as many
    /// as is usual).
    Sparse(u64),
}

impl std::fmt::Display for Placement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Placement::Sets(1) => f.write_str("direct"),
            Placement::Sets(ways) => write!(f, "set:{ways}"),
            Placement::Full => f.write_str("full"),
            Placement::Sparse(_) => f.write_str("sparse"),
        }
    }
}

/// A text that names no placement.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is not a placement: write direct, set:W with W from 1 to {MOST_WAYS}, full, sparse or sparse:SPAN"
)]
pub struct UnknownPlacement {
    /// The text.
    pub text: String,
}

/// `direct`, `set:W`, `full`, `sparse`, or `sparse:SPAN` with a size.
impl std::str::FromStr for Placement {
    type Err = UnknownPlacement;

    fn from_str(text: &str) -> Result<Placement, UnknownPlacement> {
        let span = |span: &str| span.parse().ok().map(|s: ByteSize| s.0).filter(|&s| s > 0);
        let found = match (text, text.split_once(':')) {
            ("direct", _) => Some(Placement::Sets(1)),
            ("full", _) => Some(Placement::Full),
            ("sparse", _) => Some(Placement::Sparse(0)),
            (_, Some(("set", ways))) => {
                let ways = ways.parse().ok().filter(|ways| (1..=MOST_WAYS).contains(ways));
                ways.map(Placement::Sets)
            }
            (_, Some(("sparse", bytes))) => span(bytes).map(Placement::Sparse),
            _ => None,
        };
        found.ok_or_else(|| UnknownPlacement { text: text.to_owned() })
    }
}

impl Layout {
    /// The layout of a device with this placement.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn of(
        device: u64,
        line: u32,
        placement: Placement,
        shards: u32,
    ) -> Result<Layout, LayoutError> {
        match placement {
            Placement::Sets(ways) => Self::new(device, line, ways, shards),
            Placement::Full => Self::full(device, line, shards),
            Placement::Sparse(span) => Self::sparse(device, line, span, shards),
        }
    }

    /// The placement of its lines.
    pub fn placement(&self) -> Placement {
        match (self.segment, self.page_groups) {
            (_, 1..) => Placement::Sparse(self.slots() * u64::from(self.line)),
            (0, _) => Placement::Sets(self.ways),
            _ => Placement::Full,
        }
    }

    /// The layout of a device of `device` bytes.
    ///
    /// # Errors
    /// A parameter that cannot be, or a device too small or too large for them.
    pub fn new(device: u64, line: u32, ways: u32, shards: u32) -> Result<Layout, LayoutError> {
        if !line.is_power_of_two() || !(4096..=65_536).contains(&line) {
            return Err(LayoutError::Line(line));
        }
        if !(1..=MOST_WAYS).contains(&ways) {
            return Err(LayoutError::Ways(ways));
        }
        if !(1..=64).contains(&shards) {
            return Err(LayoutError::Shards(shards));
        }
        Self::find(device, line, ways, 0, shards)
    }

    /// The layout of a device whose slots are a log of segments: a line may lie anywhere in its shard.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn full(device: u64, line: u32, shards: u32) -> Result<Layout, LayoutError> {
        let share = device / u64::from(shards.max(1)) / GOOD_SEGMENTS;
        let bytes = SEGMENT.min(share).max(u64::from(line) * GROUP_LINES);
        let lines = (bytes / u64::from(line.max(512))).max(1);
        let lines = if lines.is_power_of_two() { lines } else { lines.next_power_of_two() / 2 };
        Self::full_of(device, line, shards, lines as u32)
    }

    /// The same with segments of `segment` lines.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn full_of(
        device: u64,
        line: u32,
        shards: u32,
        segment: u32,
    ) -> Result<Layout, LayoutError> {
        if !line.is_power_of_two() || !(4096..=65_536).contains(&line) {
            return Err(LayoutError::Line(line));
        }
        if !segment.is_power_of_two() || segment > 65_536 {
            return Err(LayoutError::Segment(segment));
        }
        if !(1..=64).contains(&shards) {
            return Err(LayoutError::Shards(shards));
        }
        Self::find(device, line, 1, segment, shards)
    }

    /// The layout of a sparse file that holds `size` bytes of lines at most, before volumes of `span` bytes together (0: as
    /// many as is usual).
    ///
    /// # Errors
    /// As [`Layout::new`]; [`LayoutError::Span`].
    pub fn sparse(size: u64, line: u32, span: u64, shards: u32) -> Result<Layout, LayoutError> {
        let (least, most) = SPAN.into_inner();
        let usual = size.saturating_mul(16).clamp(least, most).max(size);
        let span = if span == 0 { usual } else { span };
        Self::sparse_of(size, line, span, shards, GROUPS_PER_PAGE)
    }

    /// The same with so many groups in a page of the table.
    ///
    /// # Errors
    /// As [`Layout::sparse`].
    pub fn sparse_of(
        size: u64,
        line: u32,
        span: u64,
        shards: u32,
        page_groups: u32,
    ) -> Result<Layout, LayoutError> {
        if !line.is_power_of_two() || !(4096..=65_536).contains(&line) {
            return Err(LayoutError::Line(line));
        }
        if !(1..=64).contains(&shards) {
            return Err(LayoutError::Shards(shards));
        }
        let group_bytes = u64::from(line) * GROUP_LINES;
        let least = group_bytes * u64::from(shards);
        if size < least {
            return Err(LayoutError::TooSmall { device: size, least });
        }
        if !(1..=GROUPS_PER_PAGE).contains(&page_groups) {
            return Err(LayoutError::Segment(page_groups));
        }
        // Whole pages in every shard, and slots that 32 bits can number.
        let page_bytes = group_bytes * u64::from(page_groups) * u64::from(shards);
        let most_pages = u64::from(u32::MAX) / (u64::from(page_groups) * GROUP_LINES);
        let most = (most_pages * page_bytes).min((1 << MAX_GROUP_BITS) * group_bytes).min(1 << 60);
        if !(size..=most).contains(&span) {
            return Err(LayoutError::Span { span, size, most });
        }
        let pages = span.div_ceil(page_bytes).min(most_pages);
        let group_sets = (pages * u64::from(page_groups)) as u32;
        let divisor = u64::from(group_sets) * u64::from(shards);
        let (region_groups, regions) = regions_of(divisor, line);
        let mut layout = Layout {
            device: 0,
            line,
            ways: 1,
            segment: 0,
            shards,
            group_sets,
            region_groups,
            regions,
            most_lines: size / u64::from(line),
            page_groups,
            snapshot_pages: pages * u64::from(shards),
            log_pages: 0,
            data: 0,
        };
        layout.data = layout.log_at(0).next_multiple_of(MIB);
        layout.device = layout.data + layout.slots() * u64::from(line);
        Ok(layout)
    }

    fn find(
        device: u64,
        line: u32,
        ways: u32,
        segment: u32,
        shards: u32,
    ) -> Result<Layout, LayoutError> {
        // What a shard is made of: sets, or segments.
        let unit = if segment == 0 { 1 } else { u64::from(segment).div_ceil(GROUP_LINES) };
        let least = if segment == 0 {
            1
        } else {
            (LEAST_SEGMENTS * u64::from(segment)).div_ceil(GROUP_LINES).next_multiple_of(unit)
        };
        let set_bytes = u64::from(line) * GROUP_LINES * u64::from(ways) * u64::from(shards);
        // Metadata grow with the slots: come down from what would fit without any.
        let mut sets = device / set_bytes / unit * unit;
        if sets * GROUP_LINES * u64::from(ways) >= u64::from(u32::MAX) {
            return Err(LayoutError::TooLarge { device, shards, line });
        }
        while sets >= least {
            let layout = Self::with_sets(device, line, (ways, segment), shards, sets as u32);
            let need = layout.data + sets * set_bytes;
            if need <= device {
                return Ok(layout);
            }
            sets -= (need - device).div_ceil(set_bytes).next_multiple_of(unit).min(sets);
        }
        let few = Self::with_sets(device, line, (ways, segment), shards, least as u32);
        Err(LayoutError::TooSmall { device, least: few.data + least * set_bytes })
    }

    fn with_sets(
        device: u64,
        line: u32,
        (ways, segment): (u32, u32),
        shards: u32,
        group_sets: u32,
    ) -> Layout {
        let divisor = u64::from(shards) * u64::from(group_sets);
        let space = space_groups(device, line, divisor);
        let (region_groups, regions) = regions_of(space, line);
        let slots = divisor * u64::from(ways) * GROUP_LINES;
        let snapshot_pages = slots.div_ceil(SLOTS_PER_PAGE as u64);
        let log_pages = (slots / 2).div_ceil(RECORDS_PER_PAGE as u64).max(MIN_LOG_PAGES);
        let mut layout = Layout {
            device,
            line,
            ways,
            segment,
            shards,
            group_sets,
            region_groups,
            regions,
            most_lines: 0,
            page_groups: 0,
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

    /// Segments of a shard: 0 unless its slots are a log.
    pub fn segments(&self) -> u32 {
        self.shard_slots().checked_div(self.segment).unwrap_or(0)
    }

    /// Slots of the device.
    pub fn slots(&self) -> u64 {
        u64::from(self.shard_slots()) * u64::from(self.shards)
    }

    /// Whether each line has a slot that is no other's.
    pub fn is_sparse(&self) -> bool {
        self.page_groups > 0
    }

    /// Lines that may be cached at a time.
    pub fn capacity(&self) -> u64 {
        if self.is_sparse() { self.most_lines } else { self.slots() }
    }

    /// Pages of the table of a shard of a sparse cache; 0 for others.
    pub fn table_pages(&self) -> u32 {
        self.group_sets.checked_div(self.page_groups).unwrap_or(0)
    }

    /// First byte of page `page` of the table of `shard`.
    pub fn table_at(&self, shard: u32, page: u32) -> u64 {
        self.snapshot_at(0) + self.table_number(shard, page) * PAGE_SIZE as u64
    }

    /// The number of that page, over all shards.
    pub fn table_number(&self, shard: u32, page: u32) -> u64 {
        u64::from(shard) * u64::from(self.table_pages()) + u64::from(page)
    }

    /// Lines in the line space.
    pub fn space_lines(&self) -> u64 {
        let divisor = u64::from(self.shards) * u64::from(self.group_sets);
        if self.is_sparse() {
            return divisor * GROUP_LINES;
        }
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

/// Groups of a region, and the number of regions, of a line space of `space` groups: regions of 1 MiB or more, as small as
/// their number allows.
fn regions_of(space: u64, line: u32) -> (u64, u32) {
    let mib_groups = (MIB / (u64::from(line) * GROUP_LINES)).max(1);
    let region_groups = space.div_ceil(MAX_REGIONS).max(mib_groups).next_power_of_two();
    (region_groups, space.div_ceil(region_groups) as u32)
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

    #[test]
    fn a_log_is_whole_segments() {
        let layout = Layout::full(64 << 30, 4096, 8).unwrap();
        assert_eq!((layout.segment, layout.ways), (2048, 1));
        assert_eq!(layout.segments() * layout.segment, layout.shard_slots());
        let small = Layout::full(256 << 20, 4096, 8).unwrap();
        assert!(small.segments() >= 100 && small.segment >= 16, "{small:?}");
        assert_eq!(Layout::full_of(1 << 30, 4096, 8, 48), Err(LayoutError::Segment(48)));
        let Err(LayoutError::TooSmall { least, .. }) = Layout::full(1 << 20, 4096, 8) else {
            panic!()
        };
        assert!(Layout::full(least, 4096, 8).unwrap().segments() >= 8);
    }

    #[test]
    fn a_sparse_cache_has_a_slot_for_each_line() {
        let layout = Layout::sparse(100 << 30, 4096, 0, 8).unwrap();
        assert_eq!(layout.capacity() * 4096, 100 << 30);
        assert_eq!(layout.slots(), layout.space_lines());
        assert!(layout.space_lines() * 4096 >= 4 << 40 && layout.device < 15 << 40);
        assert_eq!(layout.placement(), Placement::Sparse(layout.slots() * 4096));
        let last = layout.table_at(7, layout.table_pages() - 1) + PAGE_SIZE as u64;
        assert!(layout.intents_at() + layout.intent_pages() * 4096 <= layout.table_at(0, 0));
        assert!(last <= layout.data);
        assert!(layout.slot_at(7, layout.shard_slots() - 1) + 4096 <= layout.device);
        let small = Layout::sparse(1 << 20, 4096, 0, 64);
        assert_eq!(small, Err(LayoutError::TooSmall { device: 1 << 20, least: 4 << 20 }));
        let less = Layout::sparse(1 << 30, 4096, 1 << 29, 8);
        assert!(matches!(less, Err(LayoutError::Span { .. })), "{less:?}");
        assert!(Layout::sparse(1 << 30, 4096, 1 << 61, 8).is_err());
    }

    proptest! {
        #[test]
        fn parts_do_not_overlap(
            device in 1u64 << 20..1 << 44, line in 12u32..=16, ways in 0u32..=16, shards in 1u32..=64,
        ) {
            let layout = match ways {
                0 => Layout::full(device, 1 << line, shards),
                _ => Layout::new(device, 1 << line, ways, shards),
            };
            if let Ok(l) = layout {
                prop_assert_eq!(l.segments() * l.segment, if ways == 0 { l.shard_slots() } else { 0 });
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
