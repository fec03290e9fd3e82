//! Where what outlives the process lies in memory: the segment tables, the shards' indexes, each shard's bytes on flash by application.
//!
//! ```text
//! one drive:  header | segment table | applications, shard by shard | index of shard 0 | of shard 1 | …
//! several:    header | applications  | a table for each place of a drive, of the longest | index of shard 0 | …
//! ```
//!
//! With several drives each place has addresses for the longest table, and memory for that of its drive: which drives there are can change
//! without anything else moving.

use std::ops::Range;

use larder_base::AppId;
use larder_format::PAGE_SIZE;
use larder_format::geometry::MAX_SEGMENTS;

use crate::index::FlashIndex;
use crate::kv::config::{FlashGeometry, MOST_DRIVES};
use crate::kv::log::SegmentTable;

/// Words of a page of memory.
const PAGE_WORDS: usize = PAGE_SIZE / 8;

/// Words of the region's header.
pub const REGION_HEADER: usize = 64;

/// Words for each shard's bytes on flash by application, rounded up to whole cache lines.
const APP_WORDS: usize = AppId::COUNT.next_multiple_of(8);

/// Which words of the region hold what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionLayout {
    /// The flash.
    pub flash: FlashGeometry,
    /// Shards.
    pub shards: usize,
    /// Buckets of each one's index before it grew.
    pub buckets: u32,
}

impl RegionLayout {
    /// Words that the tables have addresses for.
    pub fn table_words(&self) -> usize {
        match self.flash.drives.is_one() {
            true => SegmentTable::words_for(self.flash.segments),
            false => MOST_DRIVES * Self::slot(),
        }
    }

    /// The same of the place of one of several drives.
    fn slot() -> usize {
        SegmentTable::words_for(MAX_SEGMENTS).next_multiple_of(PAGE_WORDS)
    }

    /// Words of the table of the drive at a place; none where there is no drive.
    pub fn table(&self, drive: usize) -> Range<usize> {
        let Some((own, _)) = self.flash.part(drive) else { return 0..0 };
        let words = SegmentTable::words_for(own.segments);
        let at = match self.flash.drives.is_one() {
            true => REGION_HEADER,
            false => {
                let apps = REGION_HEADER + self.shards * APP_WORDS;
                apps.next_multiple_of(PAGE_WORDS) + drive * Self::slot()
            }
        };
        at..at + words
    }

    /// Shard `i`'s bytes on flash by application.
    pub fn apps(&self, i: usize) -> Range<usize> {
        let table = match self.flash.drives.is_one() {
            true => self.table_words().next_multiple_of(8),
            false => 0,
        };
        let at = REGION_HEADER + table + i * APP_WORDS;
        at..at + AppId::COUNT
    }

    /// The index of shard `i`, and what it may grow to: behind all that keeps its size, so that there is room behind each. Memory is taken for
    /// what it has.
    pub fn index(&self, i: usize) -> Range<usize> {
        let tables = match self.flash.drives.is_one() {
            true => self.table_words().next_multiple_of(8),
            false => 0,
        };
        let first = REGION_HEADER + tables + self.shards * APP_WORDS;
        let mut first = first.next_multiple_of(PAGE_WORDS);
        if !self.flash.drives.is_one() {
            first += self.table_words();
        }
        let each = FlashIndex::words_for(FlashIndex::most_buckets(self.buckets));
        let at = first + i * each.next_multiple_of(PAGE_WORDS);
        at..at + each
    }

    /// All words.
    pub fn words(&self) -> usize {
        self.index(self.shards).start
    }

    /// What has memory from the beginning.
    pub fn backed(&self) -> Vec<Range<usize>> {
        let first = FlashIndex::words_for(self.buckets);
        let mut all = Vec::new();
        if self.flash.drives.is_one() {
            all.push(0..self.index(0).start);
        } else {
            all.push(0..self.apps(self.shards).start);
            let tables = (0..MOST_DRIVES).map(|drive| self.table(drive));
            all.extend(tables.filter(|table| !table.is_empty()));
        }
        all.extend((0..self.shards).map(|i| {
            let at = self.index(i).start;
            at..at + first
        }));
        all
    }
}

#[cfg(test)]
mod tests {
    use larder_format::geometry::{Numbers, SMALL_SEGMENTS};

    use super::*;
    use crate::kv::config::{DriveSegments, Drives};

    #[test]
    fn parts_lie_apart_and_stay_where_they_are_when_a_drive_goes() {
        let numbers =
            |small_before| Numbers { small_before, small: 100, large_before: SMALL_SEGMENTS };
        let drive =
            |small_before, segments| DriveSegments { numbers: numbers(small_before), segments };
        let layout = |drives| RegionLayout {
            flash: FlashGeometry { salt: 1, segments: 300, segment_bytes: 1 << 20, drives },
            shards: 4,
            buckets: 1000,
        };
        let two = layout(Drives::of(&[drive(0, 100), drive(100, 50)]));
        for layout in [layout(Drives::ONE), two] {
            let mut parts: Vec<_> = (0..MOST_DRIVES).map(|i| layout.table(i)).collect();
            parts.extend((0..4).flat_map(|i| [layout.apps(i), layout.index(i)]));
            parts.retain(|part| !part.is_empty());
            parts.sort_by_key(|part| part.start);
            assert!(parts[0].start >= REGION_HEADER);
            assert!(parts.windows(2).all(|w| w[0].end <= w[1].start), "{parts:?}");
            assert!(parts.last().unwrap().end <= layout.words());
            let pages =
                |part: &Range<usize>| part.start / PAGE_WORDS..part.end.div_ceil(PAGE_WORDS);
            let backed: Vec<_> = layout.backed().iter().map(pages).collect();
            assert!(backed.windows(2).all(|w| w[0].end <= w[1].start), "{backed:?}");
        }
        let without =
            layout(Drives::of(&[DriveSegments { segments: 0, ..drive(0, 0) }, drive(100, 50)]));
        assert_eq!((without.words(), without.table(1)), (two.words(), two.table(1)));
        assert!(without.table(0).is_empty());
        assert_eq!(without.index(3), two.index(3));
    }
}
