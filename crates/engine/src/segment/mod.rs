//! Segments under construction: where each object goes, and what it costs; and the way back, from what a segment holds to
//! the index entries that stand for it.

mod builder;

use larder_base::ObjectHash;
use larder_format::PAGE_SIZE;
use larder_format::page::{EXTENT_ALIGN, Kind, Walked};

use crate::index::Place;

pub use builder::{
    Choice, FUNCTIONS, Fill, FullMark, MAX_EXTENT_PAGES, NoRoom, Placed, SegmentBuilder,
};

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
            pages: u16::try_from(walked.record.len().div_ceil(PAGE_SIZE)).ok()?,
        }),
    }
}

/// The bytes of the segment that must be read to look for an object at `place`: offset and length. `pages` is the number of
/// pages of the segment. A page is one aligned page; an extent begins at a multiple of 64 bytes and is cut off at the
/// segment's end. `None` when the place lies outside of the segment, which no entry of this segment does.
pub fn span(place: Place, hash: ObjectHash, pages: u32) -> Option<(u32, u32)> {
    let page_bytes = PAGE_SIZE as u32;
    let segment_bytes = pages.checked_mul(page_bytes)?;
    match place {
        Place::Page { function } => Some((hash.page(function, pages) * page_bytes, page_bytes)),
        Place::Extent { start64, pages } => {
            let start = start64.checked_mul(EXTENT_ALIGN as u32)?;
            let rest = segment_bytes.checked_sub(start).filter(|&rest| rest > 0)?;
            Some((start, rest.min(u32::from(pages) * page_bytes)))
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
                let (at, len) = span(entry.place, hash, 64).unwrap();
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
        let outside = Place::Extent { start64: 64 * 64, pages: 1 };
        assert_eq!(span(outside, ObjectHash(0), 64), None);
    }
}
