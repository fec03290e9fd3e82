//! What lies beside the backing store: the marker and the journal.

use larder_base::Rng;
use larder_format::Uuid;
use larder_format::block::journal::{
    COMMIT_AT, COMMIT_BYTES, Commit, DESCRIPTORS_AT, Descriptors, ExtentKind, JournalError,
    JournalExtent, Size,
};
use larder_format::block::marker::{
    self, COPY_BYTES, Chosen, Marker, MarkerError, MarkerState, Order, choose,
};
use larder_format::block::write_log::pieces;
use larder_format::block::write_log::record::{MAX_RANGE, MAX_VOLUME};
use proptest::prelude::*;

use crate::nothing_but_itself_is_read;
use crate::samples::{VOLUME, commit, descriptors, marker, markers};

#[test]
fn a_marker_comes_back_and_nothing_else_does() {
    let bytes = marker(77).encode();
    assert_eq!(Marker::decode(&bytes), Ok(marker(77)));
    nothing_but_itself_is_read(&bytes, Marker::decode);
}

#[test]
fn the_marker_with_the_higher_number_rules() {
    let [even, odd] = markers();
    let newer = Marker::decode(&even).unwrap();
    assert_eq!((newer.copy(), marker(77).copy()), (0, 1));
    let chosen = Chosen { marker: newer.clone(), copy: 0, other_whole: true };
    assert_eq!(choose(&even, &odd), Ok(chosen.clone()));
    assert_eq!(choose(&odd, &even), Ok(Chosen { copy: 1, ..chosen }));
    for (torn, other_whole) in [(vec![], false), (vec![0; COPY_BYTES], false), (odd.clone(), true)]
    {
        let chosen = Chosen { marker: newer.clone(), copy: 0, other_whole };
        assert_eq!(choose(&even, &torn), Ok(chosen));
    }
    let mut torn = even.clone();
    torn[COPY_BYTES - 1] ^= 1;
    let chosen = Chosen { marker: marker(77), copy: 1, other_whole: false };
    assert_eq!(choose(&torn, &odd), Ok(chosen));
    assert_eq!(choose(&torn, &[]), Err(MarkerError::Damaged));
    assert_eq!(choose(&[], &torn[..100]), Err(MarkerError::Damaged));
    assert_eq!(choose(&[0; COPY_BYTES], b"something else"), Err(MarkerError::None));
}

fn seal(bytes: &mut [u8]) {
    let crc = crc32c::crc32c(&bytes[12..]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn a_newer_marker_that_cannot_be_read_is_not_passed_over() {
    let [mut even, odd] = markers();
    even[12] = 2;
    seal(&mut even);
    assert_eq!(choose(&even, &odd), Err(MarkerError::Version { found: 2 }));
    let [mut even, odd] = markers();
    even[100] = 5;
    seal(&mut even);
    let refused = choose(&even, &odd);
    assert_eq!(refused, Err(MarkerError::Field { field: "state", value: 5 }));
    // An older one may be what it likes.
    even[16..24].copy_from_slice(&70u64.to_le_bytes());
    seal(&mut even);
    assert_eq!(choose(&even, &odd).map(|chosen| chosen.copy), Ok(1));
}

#[test]
fn an_epoch_comes_back_and_nothing_else_does() {
    let bytes = descriptors().encode();
    assert_eq!(Descriptors::decode(&bytes, VOLUME), Ok(descriptors()));
    nothing_but_itself_is_read(&bytes, |bytes| Descriptors::decode(bytes, VOLUME));
    let longer = [&bytes[..], &[1; 99]].concat();
    assert_eq!(Descriptors::decode(&longer, VOLUME), Ok(descriptors()));
    let size = Size::of(&descriptors().extents).unwrap();
    assert_eq!((size.descriptors_bytes(), size.data_bytes()), (4096, 5120 + 8192));
    assert_eq!(size.journal_bytes(), DESCRIPTORS_AT + 4096 + 13_312);
    assert!(COMMIT_AT + COMMIT_BYTES as u64 <= DESCRIPTORS_AT);
    let places: Vec<_> = descriptors().entries().map(|entry| entry.data).collect();
    assert_eq!(places, [0..5000, 0..0, 0..0, 5120..13_312]);
    let data: Vec<u8> = (0..13_192u32).map(|i| (i.wrapping_mul(37) >> 4) as u8).collect();
    let epoch = descriptors();
    let entries: Vec<_> = epoch.entries().collect();
    assert_eq!(pieces::check(entries[0].sums, 0, &data[..5000]), Ok(()));
    assert_eq!(pieces::check(entries[3].sums, 0, &data[5000..]), Ok(()));
    let other = Descriptors::decode(&bytes, Uuid([1; 16]));
    assert_eq!(other, Err(JournalError::Volume { found: VOLUME }));
}

#[test]
fn a_commit_covers_its_descriptors_alone() {
    let commit = commit();
    let bytes = commit.encode();
    assert_eq!(Commit::decode(&bytes, VOLUME).as_ref(), Ok(&commit));
    nothing_but_itself_is_read(&bytes, |bytes| Commit::decode(bytes, VOLUME));
    let mut covered = descriptors().encode();
    assert!(commit.covers(&covered));
    for bit in 0..covered.len() * 8 {
        covered[bit / 8] ^= 1 << (bit % 8);
        assert!(!commit.covers(&covered), "bit {bit} flipped");
        covered[bit / 8] ^= 1 << (bit % 8);
    }
    assert!(!commit.covers(&covered[..4095]) && !commit.covers(&[]));
    // Those of another epoch, though whole and of the same length.
    let next = Descriptors { epoch: 46, ..descriptors() }.encode();
    assert!(next.len() == covered.len() && !commit.covers(&next));
    let other = Commit::decode(&bytes, Uuid([1; 16]));
    assert_eq!(other, Err(JournalError::Volume { found: VOLUME }));
}

#[test]
fn extents_that_cannot_be_are_refused() {
    let bytes = descriptors().encode();
    let read = |at: usize, value: &[u8]| {
        let mut bad = bytes.clone();
        bad[at..at + value.len()].copy_from_slice(value);
        seal(&mut bad);
        Descriptors::decode(&bad, VOLUME).unwrap_err()
    };
    let field = |field, value| JournalError::Field { field, value };
    let at = |n: usize, byte: usize| 96 + n * 16 + byte;
    assert_eq!(read(at(1, 0), &4999u64.to_le_bytes()), field("offset of an extent", 4999));
    assert_eq!(read(at(3, 0), &[0xff; 8]), field("offset of an extent", u64::MAX));
    assert_eq!(read(at(2, 8), &[0; 6]), field("bytes of an extent", 0));
    assert_eq!(read(at(2, 14), &[0]), field("kind of an extent", 0));
    assert_eq!(read(at(2, 15), &[1]), field("flags of an extent", 1));
    assert_eq!(read(at(0, 15), &[2]), field("flags of an extent", 2));
    assert_eq!(read(at(2, 14), &[1]), field("checksums", 4));
    assert_eq!(read(64, &[0; 8]), field("bytes of the data", 0));
    assert_eq!(read(12, &[2]), JournalError::Version { found: 2 });
    let many = Descriptors::decode(&[&bytes[..72], &[0xff; 8], &bytes[80..]].concat(), VOLUME);
    assert!(matches!(many, Err(JournalError::Short { have: 4096, .. })), "{many:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_marker_comes_back(
        seed: u64, state in 0usize..5, order in 0usize..4, host in "\\PC{0,60}", mark in "\\PC{0,60}",
    ) {
        use MarkerState as S;
        let mut rng = Rng::new(seed);
        let mut word = || rng.next_u64();
        let marker = Marker {
            number: word(),
            state: [S::Clean, S::Dirty, S::Carried, S::Closing, S::Closed][state],
            volume: Uuid([word() as u8; 16]),
            identity: [word() as u8; 64],
            cache: Uuid([word() as u8; 16]),
            run: word(),
            host,
            generation: word(),
            attachment: word() as u32,
            frontier: word(),
            time: word(),
            mark: (!mark.is_empty()).then_some(mark),
            order: [Order::Any, Order::Flush, Order::Completion, Order::Journaled][order],
            applied: word(),
            joins: word(),
            probes: word() & 1 == 1,
        };
        prop_assert_eq!(Marker::decode(&marker.encode()), Ok(marker));
    }

    #[test]
    fn sealed_garbage_beside_a_store_is_refused_or_read_as_it_is(seed: u64) {
        let mut rng = Rng::new(seed);
        let mut spoil = |bytes: &mut [u8], from: u64, to: u64| {
            for _ in 0..rng.range(1, 4) {
                let at = rng.range(from, to) as usize;
                bytes[at] = if rng.chance(0.5) { rng.next_u64() as u8 } else { bytes[at] ^ 1 };
            }
            seal(bytes);
        };
        let mut bytes = marker(77).encode();
        spoil(&mut bytes, 12, 500);
        if let Ok(found) = Marker::decode(&bytes) {
            prop_assert_eq!(marker::Marker::decode(&found.encode()), Ok(found));
        }
        let mut bytes = descriptors().encode();
        spoil(&mut bytes, 12, 200);
        if let Ok(found) = Descriptors::decode(&bytes, VOLUME) {
            prop_assert_eq!(Descriptors::decode(&found.encode(), VOLUME), Ok(found));
        }
        let mut bytes = commit().encode();
        spoil(&mut bytes, 12, 200);
        if let Ok(found) = Commit::decode(&bytes, VOLUME) {
            prop_assert_eq!(Commit::decode(&found.encode(), VOLUME), Ok(found));
        }
    }

    #[test]
    fn any_epoch_comes_back(seed: u64, count in 0u64..200) {
        let mut rng = Rng::new(seed);
        let (mut extents, mut sums, mut end) = (Vec::new(), Vec::new(), 0u64);
        for _ in 0..count {
            let kind = [ExtentKind::Data, ExtentKind::Zero, ExtentKind::Trim][rng.below(3) as usize];
            let data = kind == ExtentKind::Data;
            let length = rng.range(1, if data { 20_000 } else { MAX_RANGE });
            let offset = end + rng.below(3) * rng.below(1 << 40);
            end = offset + length;
            prop_assert!(end < MAX_VOLUME);
            if data {
                sums.extend((0..pieces::count(length)).map(|_| rng.next_u64() as u32));
            }
            let may_punch = !data && rng.chance(0.5);
            extents.push(JournalExtent { offset, length, kind, may_punch });
        }
        let epoch = Descriptors {
            volume: VOLUME,
            cache: Uuid([3; 16]),
            epoch: rng.next_u64(),
            generation: rng.next_u64(),
            extents,
            sums,
        };
        let bytes = epoch.encode();
        let commit = Commit::of(&epoch, &bytes, rng.next_u64(), rng.next_u64(), None);
        let size = Size::of(&epoch.extents).unwrap();
        prop_assert_eq!(bytes.len() as u64, size.descriptors_bytes());
        prop_assert_eq!((commit.data, u64::from(commit.extents)), (size.data_bytes(), count));
        prop_assert!(commit.covers(&bytes));
        let read = Commit::decode(&commit.encode(), VOLUME);
        prop_assert_eq!(read.as_ref(), Ok(&commit));
        let mut end = 0u64;
        for entry in epoch.entries().filter(|entry| !entry.data.is_empty()) {
            prop_assert_eq!(entry.data.start, end.next_multiple_of(512));
            prop_assert_eq!(entry.data.end - entry.data.start, entry.extent.length);
            end = entry.data.end;
        }
        prop_assert_eq!(end, size.data_bytes());
        prop_assert_eq!(Descriptors::decode(&bytes, VOLUME), Ok(epoch));
    }
}
