//! Segments under construction: where each object goes, and what it costs; and the way back, from what a segment holds to
//! the index entries that stand for it.

mod builder;

use larder_base::ObjectHash;
use larder_format::PAGE_SIZE;
use larder_format::page::{EXTENT_ALIGN, Kind, Walked};

use crate::index::Place;

pub use builder::{Choice, FUNCTIONS, Fill, FullMark, NoRoom, Placed, Rest, SegmentBuilder};

/// Lengths of extents below this are pages; from here on each is so many more.
const COARSE_FROM: u64 = 1 << 11;
/// Pages of a coarse step: 512 KiB, at most a sixteenth of an extent.
const COARSE: u64 = 128;
/// The longest record that an extent can hold: 1 GiB, and what comes before such a value.
pub const LONGEST_EXTENT: usize = (COARSE_FROM + (COARSE_FROM - 1) * COARSE) as usize * PAGE_SIZE;

const _: () = assert!(LONGEST_EXTENT >= larder_format::record::MAX_RECORD_LEN);

/// What the index keeps as the length of an extent for a record of `bytes` bytes: 12 bits, above 0. Up to 8 MiB it counts pages,
/// beyond half MiBs. `None` beyond [`LONGEST_EXTENT`].
pub fn extent_length(bytes: usize) -> Option<u16> {
    let pages = bytes.div_ceil(PAGE_SIZE).max(1) as u64;
    let length = match pages.checked_sub(COARSE_FROM) {
        None => pages,
        Some(beyond) => COARSE_FROM + beyond.div_ceil(COARSE),
    };
    (length < 2 * COARSE_FROM).then_some(length as u16)
}

/// What a read of an extent must cover, bytes: the record, and less than a page, or less than half a MiB where it is longer than
/// 8 MiB.
pub fn extent_bytes(length: u16) -> u64 {
    let length = u64::from(length);
    let coarse = length.saturating_sub(COARSE_FROM);
    (length.min(COARSE_FROM) + coarse * COARSE) * PAGE_SIZE as u64
}

/// The place under which the index knows a record that a walk has met, so that reclaim can look up and remove its entry.
/// `pages` is the number of pages of the segment. `None` when no function of the key names the page: then the record is
/// not one that a [`SegmentBuilder`] placed under this hash key.
pub fn place_of(kind: Kind, walked: &Walked<'_>, hash: ObjectHash, pages: u32) -> Option<Place> {
    match kind {
        Kind::Small => {
            let page = u32::try_from(walked.offset / PAGE_SIZE).ok()?;
            // The builder, too, takes the lowest of the functions that name a page.
            let function = (0..FUNCTIONS).find(|&f| hash.page(f, pages) == page)?;
            Some(Place::Page { function })
        }
        Kind::Large => Some(Place::Extent {
            start64: u32::try_from(walked.offset / EXTENT_ALIGN).ok()?,
            length: extent_length(walked.record.len())?,
        }),
    }
}

/// The bytes that must be read to look for an object at `place`: offset in the segment, and length. `pages` is the number of
/// pages of the segment, `to_end` the bytes from its start to the end of the flash. A page is one aligned page; an extent begins at a
/// multiple of 64 bytes, may run on into the segments that follow, and is cut off at the end of the flash. `None` when the place
/// lies outside of the segment, which no entry of this segment does.
pub fn span(place: Place, hash: ObjectHash, pages: u32, to_end: u64) -> Option<(u32, u32)> {
    let page_bytes = PAGE_SIZE as u32;
    let segment_bytes = pages.checked_mul(page_bytes)?;
    match place {
        Place::Page { function } => Some((hash.page(function, pages) * page_bytes, page_bytes)),
        Place::Extent { start64, length } => {
            let start = start64.checked_mul(EXTENT_ALIGN as u32)?;
            let rest = to_end.checked_sub(u64::from(start)).filter(|_| start < segment_bytes)?;
            Some((start, u32::try_from(rest.min(extent_bytes(length))).ok()?))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use larder_base::{HashKey, KeyHasher, Rng, Words};
    use larder_format::{Filling, RecordMeta, find, find_extent, walk};

    use super::*;
    use crate::index::{ClockBits, Entry, FlashIndex};

    /// The whole way: placed, indexed, found by what the index says, and reclaimed by what the segment says.
    #[test]
    fn from_the_builder_to_the_index_and_back() {
        let hasher = KeyHasher::new(HashKey([2; 16]));
        let mut rng = Rng::new(31);
        let buckets = FlashIndex::buckets_for(6000);
        let words = Words::heap(FlashIndex::words_for(buckets));
        let mut index = FlashIndex::create(words, ClockBits::default()).unwrap();
        let mut truth = BTreeMap::new();
        let mut segments = Vec::new();
        for segment in 1..=6u16 {
            let kind = if segment % 3 == 0 { Kind::Large } else { Kind::Small };
            let filling = Filling { salt: 1, segment, generation: u64::from(segment) + 9 };
            let mut builder = SegmentBuilder::new(kind, filling, vec![9u8; 64 * PAGE_SIZE]);
            let mut i = 0u32;
            while !builder.is_full_enough() {
                i += 1;
                let key = format!("{segment}/{i}").into_bytes();
                let most = if kind == Kind::Small { 900 } else { 9000 };
                let value = vec![i as u8; rng.below(most) as usize];
                let hash = hasher.hash(&key);
                if let Ok(placed) = builder.offer(hash, &RecordMeta::default(), &key, &value) {
                    let inserted =
                        index.insert(hash, Entry { segment, place: placed.into(), clock: 1 });
                    assert!(inserted.forced.is_empty());
                    truth.insert(key, value);
                }
            }
            segments.push((kind, filling, builder.finish().0));
        }
        for (key, value) in &truth {
            let hash = hasher.hash(key);
            let found = index.probe(hash).iter().find_map(|entry| {
                let (_, filling, bytes) = &segments[usize::from(entry.segment) - 1];
                let (at, len) = span(entry.place, hash, 64, 64 * 4096).unwrap();
                let bytes = &bytes[at as usize..][..len as usize];
                match entry.place {
                    Place::Page { .. } => find(bytes, key, *filling).found(),
                    Place::Extent { .. } => find_extent(bytes, key, *filling).found(),
                }
            });
            assert_eq!(found.unwrap().value(), value);
        }
        for (kind, filling, bytes) in &segments {
            for walked in walk(bytes, *kind, *filling) {
                let hash = hasher.hash(walked.record.key());
                let place = place_of(*kind, &walked, hash, 64).unwrap();
                assert!(index.remove(hash, filling.segment, place).is_some(), "{walked:?}");
            }
        }
        assert!(index.is_empty());
        let outside = Place::Extent { start64: 64 * 64, length: 1 };
        assert_eq!(span(outside, ObjectHash(0), 64, u64::MAX), None);
        let at_end = Place::Extent { start64: 64 * 64 - 1, length: 2 };
        assert_eq!(span(at_end, ObjectHash(0), 64, 64 * 4096), Some((262_080, 64)));
        assert_eq!(span(at_end, ObjectHash(0), 64, 128 * 4096), Some((262_080, 8192)));
    }

    /// A length covers its record, is the least that does, and twelve bits are enough for a GiB.
    #[test]
    fn lengths_of_extents() {
        for bytes in [1, 4096, 4097, (8 << 20) - 4096, 8 << 20, (8 << 20) + 1, 60 << 20, 1 << 30] {
            let length = extent_length(bytes).unwrap();
            let covers = extent_bytes(length);
            assert!(length > 0 && length < 1 << 12 && covers >= bytes as u64, "{bytes}: {length}");
            assert!(extent_bytes(length - 1) < bytes as u64, "{bytes}: {length}");
            assert!(covers - (bytes as u64) < 4096 || covers <= bytes as u64 * 17 / 16, "{bytes}");
        }
        assert_eq!(extent_length(LONGEST_EXTENT + 1), None);
        assert_eq!(extent_bytes(u16::MAX >> 4), LONGEST_EXTENT as u64);
    }
}
