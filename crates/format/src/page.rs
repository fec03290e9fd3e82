//! Finding a key in a page or an extent, and walking all records of a segment.

use std::ops::Range;

use crate::PAGE_SIZE;
use crate::record::{Filling, Raw, Record, Step, step};

/// The two kinds of segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Records of at most [`SMALL_MAX`] bytes, packed in pages that functions of the key's hash name.
    Small,
    /// Longer records at multiples of [`EXTENT_ALIGN`], each known by its exact extent.
    Large,
}

/// The longest record of a small segment. A quarter of a page: a page then wastes at most 1,024 bytes, in practice a few
/// tens, because the cleaner offers smaller objects too.
pub const SMALL_MAX: usize = 1024;

/// Records of a large segment start at multiples of this; the index counts starts in this unit.
pub const EXTENT_ALIGN: usize = 64;

/// What a search found.
#[derive(Clone, Copy, Debug)]
pub enum Find<'a> {
    /// The record of this key, verified.
    Found(Record<'a>),
    /// The key is not here, and that is proved: every record that is here was verified.
    Absent,
    /// The bytes are not what was written: another filling, a torn write, rot. Nothing is known of the key.
    Corrupt,
}

impl<'a> Find<'a> {
    /// The record, if found.
    pub fn found(self) -> Option<Record<'a>> {
        match self {
            Find::Found(record) => Some(record),
            Find::Absent | Find::Corrupt => None,
        }
    }
}

/// Looks for `key` in a page of a small segment (any length up to [`PAGE_SIZE`] will do).
///
/// The way to a hit reads headers up to the key and then the checksum of that one record. Only when the key does not turn
/// up (one probe in a hundred, the index's false candidates) is the checksum of every record taken: a flipped length
/// can hide a record, and `Absent` must not be said of a key that is there (an index entry that was doubted would be
/// put back, and an old version with it).
pub fn find<'a>(page: &'a [u8], key: &[u8], filling: Filling) -> Find<'a> {
    let mut at = 0;
    loop {
        match step(&page[at..]) {
            Step::Record(raw) => {
                if raw.key() == key && !raw.is_dead() {
                    return verified(raw, filling.seed());
                }
                at += raw.len();
            }
            Step::Malformed => return Find::Corrupt,
            Step::End => break,
        }
    }
    if is_whole(page, filling.seed()) { Find::Absent } else { Find::Corrupt }
}

/// Where the record of `key` lies in a page that is still being filled. Looks at keys alone, not at checksums.
pub fn locate(page: &[u8], key: &[u8]) -> Option<Range<usize>> {
    let mut at = 0;
    while let Step::Record(raw) = step(&page[at..]) {
        if raw.key() == key && !raw.is_dead() {
            return Some(at..at + raw.len());
        }
        at += raw.len();
    }
    None
}

/// Looks for `key` in the bytes of one large object's extent, which begin with its record and may run past it.
pub fn find_extent<'a>(extent: &'a [u8], key: &[u8], filling: Filling) -> Find<'a> {
    let Step::Record(raw) = step(extent) else { return Find::Corrupt };
    match raw.verify(filling.seed()) {
        Some(record) if record.key() == key && !raw.is_dead() => Find::Found(record),
        Some(_) => Find::Absent,
        None => Find::Corrupt,
    }
}

fn verified(raw: Raw<'_>, seed: u32) -> Find<'_> {
    raw.verify(seed).map_or(Find::Corrupt, Find::Found)
}

/// Whether every record of a page verifies and only zeros follow the last.
fn is_whole(page: &[u8], seed: u32) -> bool {
    let mut at = 0;
    loop {
        match step(&page[at..]) {
            Step::Record(raw) => {
                if raw.verify(seed).is_none() {
                    return false;
                }
                at += raw.len();
            }
            Step::Malformed => return false,
            Step::End => return page[at..].iter().all(|&b| b == 0),
        }
    }
}

/// One record met on a [`walk`].
#[derive(Clone, Copy, Debug)]
pub struct Walked<'a> {
    /// Where it starts, in bytes from the start of what is walked.
    pub offset: usize,
    /// The record, verified and not dead.
    pub record: Record<'a>,
}

/// Walks all living records of a segment (or of a whole number of its first pages), in the order of their places. For
/// reclaim.
///
/// Any bytes will do. What does not verify is skipped and counted ([`Walk::corrupt`]); in a small segment the damage
/// ends with the page, in a large one the walk goes on at the next multiple of 64 at which a record verifies.
pub fn walk(bytes: &[u8], kind: Kind, filling: Filling) -> Walk<'_> {
    // A claimed length costs the checksum of that many bytes to refute, and damaged bytes may claim 16 MiB every 64
    // bytes. Past this much vain work the rest of a damaged large segment is given up.
    let patience = bytes.len().saturating_mul(4).saturating_add(1 << 20);
    Walk { bytes, kind, seed: filling.seed(), at: 0, corrupt: 0, damaged: false, patience }
}

/// The iterator that [`walk`] returns.
#[derive(Clone, Debug)]
pub struct Walk<'a> {
    bytes: &'a [u8],
    kind: Kind,
    seed: u32,
    at: usize,
    corrupt: u64,
    /// Large segments: inside a damaged stretch that has been counted.
    damaged: bool,
    patience: usize,
}

impl Walk<'_> {
    /// Of a large segment, only the records that begin and end in this part of it: before lies the end of a record of an earlier
    /// segment, behind it one that goes on in the next.
    #[must_use]
    pub fn within(mut self, part: Range<usize>) -> Self {
        self.bytes = &self.bytes[..part.end.min(self.bytes.len())];
        self.at = part.start;
        self
    }

    /// Damaged places met so far: when it is not zero after the walk, the index may still hold entries of records that
    /// the walk could not show.
    pub fn corrupt(&self) -> u64 {
        self.corrupt
    }
}

impl<'a> Iterator for Walk<'a> {
    type Item = Walked<'a>;

    fn next(&mut self) -> Option<Walked<'a>> {
        match self.kind {
            Kind::Small => self.next_small(),
            Kind::Large => self.next_large(),
        }
    }
}

impl<'a> Walk<'a> {
    fn next_small(&mut self) -> Option<Walked<'a>> {
        while self.at < self.bytes.len() {
            let offset = self.at;
            let next_page = (offset / PAGE_SIZE + 1) * PAGE_SIZE;
            let rest = &self.bytes[offset..next_page.min(self.bytes.len())];
            match step(rest) {
                Step::Record(raw) => {
                    self.at += raw.len();
                    match raw.verify(self.seed) {
                        Some(record) if !raw.is_dead() => return Some(Walked { offset, record }),
                        Some(_) => {}
                        // Its length is in doubt, but what follows is verified on its own.
                        None => self.corrupt += 1,
                    }
                }
                Step::Malformed => {
                    self.corrupt += 1;
                    self.at = next_page;
                }
                Step::End => {
                    self.corrupt += u64::from(rest.iter().any(|&b| b != 0));
                    self.at = next_page;
                }
            }
        }
        None
    }

    fn next_large(&mut self) -> Option<Walked<'a>> {
        while self.at < self.bytes.len() {
            let offset = self.at;
            let rest = &self.bytes[offset..];
            if let Step::Record(raw) = step(rest) {
                if let Some(record) = raw.verify(self.seed) {
                    self.damaged = false;
                    self.at = (offset + raw.len()).next_multiple_of(EXTENT_ALIGN);
                    if raw.is_dead() {
                        continue;
                    }
                    return Some(Walked { offset, record });
                }
                self.patience = self.patience.saturating_sub(raw.len());
            }
            let unit = &rest[..EXTENT_ALIGN.min(rest.len())];
            if unit.iter().any(|&b| b != 0) && !self.damaged {
                self.damaged = true;
                self.corrupt += 1;
            }
            self.at = if self.patience == 0 { self.bytes.len() } else { offset + EXTENT_ALIGN };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use larder_base::Rng;

    use super::*;
    use crate::record::tests::{FILLING, any_meta};
    use crate::record::{RecordMeta, encode_into, mark_dead, record_len};

    /// A page of random records, and what it holds.
    fn page(rng: &mut Rng) -> (Vec<u8>, BTreeMap<Vec<u8>, Vec<u8>>) {
        let mut page = vec![0; PAGE_SIZE];
        let mut truth = BTreeMap::new();
        let mut at = 0;
        while rng.chance(0.97) {
            let meta = any_meta(rng);
            let mut key = vec![0; rng.range(1, 40) as usize];
            let mut value = vec![0; rng.below(600) as usize];
            rng.fill(&mut key);
            rng.fill(&mut value);
            if truth.contains_key(&key)
                || at + record_len(&meta, key.len(), value.len()) > PAGE_SIZE
            {
                continue;
            }
            at += encode_into(&mut page[at..], &meta, &key, &value, FILLING);
            truth.insert(key, value);
        }
        (page, truth)
    }

    #[test]
    fn find_against_a_map() {
        let mut rng = Rng::new(1);
        for _ in 0..200 {
            let (page, truth) = page(&mut rng);
            for (key, value) in &truth {
                assert_eq!(find(&page, key, FILLING).found().unwrap().value(), value);
            }
            assert!(matches!(
                find(&page, b"no such key in any page of all", FILLING),
                Find::Absent
            ));
            let mut walk = walk(&page, Kind::Small, FILLING);
            let walked: BTreeMap<_, _> = walk
                .by_ref()
                .map(|w| (w.record.key().to_vec(), w.record.value().to_vec()))
                .collect();
            assert_eq!(walked, truth);
            assert_eq!(walk.corrupt(), 0);
        }
    }

    /// Every single flipped bit of a page: the right value, or none; and never `Absent` for a key that is there.
    #[test]
    fn every_flipped_bit_is_caught() {
        let mut rng = Rng::new(2);
        let (page, truth) = loop {
            let made = page(&mut rng);
            if made.1.len() >= 8 {
                break made;
            }
        };
        for bit in 0..PAGE_SIZE * 8 {
            let mut bad = page.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let mut corrupt = 0;
            for (key, value) in &truth {
                match find(&bad, key, FILLING) {
                    Find::Found(r) => assert_eq!(r.value(), value, "bit {bit}"),
                    Find::Absent => panic!("bit {bit}: a key that is there was called absent"),
                    Find::Corrupt => corrupt += 1,
                }
            }
            assert!(matches!(find(&bad, b"none", FILLING), Find::Corrupt), "bit {bit}");
            let mut walk = walk(&bad, Kind::Small, FILLING);
            for w in walk.by_ref() {
                assert_eq!(truth.get(w.record.key()).map(Vec::as_slice), Some(w.record.value()));
            }
            assert!(walk.corrupt() > 0, "bit {bit}");
            assert!(corrupt <= truth.len());
        }
    }

    #[test]
    fn every_flipped_bit_of_an_extent_is_caught() {
        let mut rng = Rng::new(6);
        let meta = any_meta(&mut rng);
        let mut value = vec![0; 1500];
        rng.fill(&mut value);
        let len = record_len(&meta, 7, value.len());
        let mut extent = vec![0; PAGE_SIZE];
        encode_into(&mut extent, &meta, b"the key", &value, FILLING);
        // What follows the record in the last page of an extent is the next record: any bytes.
        rng.fill(&mut extent[len..]);
        for bit in 0..len * 8 {
            extent[bit / 8] ^= 1 << (bit % 8);
            assert!(
                matches!(find_extent(&extent, b"the key", FILLING), Find::Corrupt),
                "bit {bit}"
            );
            extent[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(find_extent(&extent, b"the key", FILLING).found().unwrap().value(), value);
        assert!(matches!(find_extent(&extent, b"another", FILLING), Find::Absent));
    }

    #[test]
    fn mutated_pages_never_lie() {
        let mut rng = Rng::new(3);
        for _ in 0..300 {
            let (page, truth) = page(&mut rng);
            for _ in 0..30 {
                let mut bad = page.clone();
                mutate(&mut bad, &mut rng);
                for (key, value) in &truth {
                    if let Find::Found(r) = find(&bad, key, FILLING) {
                        assert_eq!(r.value(), value);
                    }
                }
                for w in walk(&bad, Kind::Small, FILLING) {
                    assert_eq!(
                        truth.get(w.record.key()).map(Vec::as_slice),
                        Some(w.record.value())
                    );
                }
            }
        }
    }

    fn mutate(bytes: &mut Vec<u8>, rng: &mut Rng) {
        for _ in 0..rng.range(1, 8) {
            let len = bytes.len() as u64;
            if len == 0 {
                return;
            }
            let at = rng.below(len) as usize;
            match rng.below(5) {
                0 => bytes[at] ^= 1 << rng.below(8),
                1 => bytes[at] = rng.next_u64() as u8,
                2 => bytes.truncate(at),
                3 => {
                    let from = rng.below(len) as usize;
                    let n = rng.below(256).min(len - from.max(at) as u64) as usize;
                    bytes.copy_within(from..from + n, at);
                }
                _ => {
                    let n = rng.below(512).min(len - at as u64) as usize;
                    bytes[at..at + n].fill(0);
                }
            }
        }
    }

    #[test]
    fn random_bytes_are_never_records() {
        let mut rng = Rng::new(4);
        let mut bytes = vec![0; 3 * PAGE_SIZE];
        for round in 0..2000 {
            rng.fill(&mut bytes);
            let some = &bytes[..rng.below(bytes.len() as u64) as usize];
            for kind in [Kind::Small, Kind::Large] {
                assert_eq!(walk(some, kind, FILLING).count(), 0, "round {round}");
            }
            let one = &some[..some.len().min(PAGE_SIZE)];
            assert!(find(one, b"k", FILLING).found().is_none());
            assert!(find_extent(one, b"k", FILLING).found().is_none());
        }
        for len in 0..64 {
            assert!(matches!(find(&bytes[..len], b"k", FILLING), Find::Absent | Find::Corrupt));
            assert!(find_extent(&bytes[..len], b"k", FILLING).found().is_none());
        }
    }

    type ByOffset = BTreeMap<usize, (Vec<u8>, Vec<u8>)>;

    fn large(rng: &mut Rng) -> (Vec<u8>, ByOffset) {
        let mut bytes = vec![0; 1 << 17];
        let mut truth = BTreeMap::new();
        let mut at = 0;
        loop {
            let meta = any_meta(rng);
            let key = format!("key{at}").into_bytes();
            let mut value = vec![0; rng.range(1000, 9000) as usize];
            rng.fill(&mut value);
            if at + record_len(&meta, key.len(), value.len()) > bytes.len() {
                return (bytes, truth);
            }
            let len = encode_into(&mut bytes[at..], &meta, &key, &value, FILLING);
            truth.insert(at, (key, value));
            at = (at + len).next_multiple_of(EXTENT_ALIGN);
        }
    }

    #[test]
    fn a_damaged_large_segment_loses_only_the_damaged() {
        let mut rng = Rng::new(5);
        for _ in 0..300 {
            let (mut bytes, truth) = large(&mut rng);
            assert_eq!(walk(&bytes, Kind::Large, FILLING).count(), truth.len());
            let bit = rng.below(bytes.len() as u64 * 8) as usize;
            bytes[bit / 8] ^= 1 << (bit % 8);
            let mut walk = walk(&bytes, Kind::Large, FILLING);
            let mut seen = 0;
            for w in walk.by_ref() {
                let (key, value) = &truth[&w.offset];
                assert_eq!((w.record.key(), w.record.value()), (&key[..], &value[..]));
                seen += 1;
            }
            // A flip in the padding between two records harms nobody and may go unseen.
            assert!(seen == truth.len() || (seen == truth.len() - 1 && walk.corrupt() == 1));
        }
    }

    #[test]
    fn a_hostile_large_segment_costs_bounded_work() {
        let mut bytes = vec![0; 1 << 22];
        for unit in bytes.chunks_mut(EXTENT_ALIGN) {
            // The longest claim that still fits, everywhere: 65,536 claims of up to 4 MiB each.
            unit[..9].copy_from_slice(&[1, 2, 3, 4, 0, 0, 8, 200, 0]);
        }
        let mut walk = walk(&bytes, Kind::Large, FILLING);
        assert_eq!(walk.by_ref().count(), 0);
        assert_eq!(walk.corrupt(), 1);
        assert_eq!(walk.patience, 0);
    }

    #[test]
    fn dead_records_are_skipped() {
        let mut page = vec![0; PAGE_SIZE];
        let meta = RecordMeta::default();
        let first = encode_into(&mut page, &meta, b"key", b"old", FILLING);
        encode_into(&mut page[first..], &meta, b"key", b"new", FILLING);
        assert_eq!(find(&page, b"key", FILLING).found().unwrap().value(), b"old");
        assert!(mark_dead(&mut page, FILLING));
        assert_eq!(find(&page, b"key", FILLING).found().unwrap().value(), b"new");
        assert_eq!(walk(&page, Kind::Small, FILLING).count(), 1);
        assert!(mark_dead(&mut page[first..], FILLING));
        assert!(matches!(find(&page, b"key", FILLING), Find::Absent));
    }
}
