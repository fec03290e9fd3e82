//! Segments: headers, FRONTIERs, how full a segment is, and footers.

use larder_base::Rng;
use larder_format::Uuid;
use larder_format::block::write_log::footer::{self, END_BYTES};
use larder_format::block::write_log::frontier::{FrontierError, MAX_FRONTIER, MAX_UNREADABLE};
use larder_format::block::write_log::segment::MIN_SEGMENT;
use larder_format::block::write_log::{
    Batch, Extent, Flags, Footer, Frontier, Head, Kind, PartError, Record, Room, SegmentGeometry,
    SegmentGeometryError, SegmentHeader, Shape, VolumeFrontier, batch,
};
use proptest::prelude::*;

use crate::nothing_but_itself_is_read;
use crate::samples::{
    CACHE, GENERATION, any_records, footer, frontier, geometry, head, place, segment_bytes,
    segment_header, write,
};

#[test]
fn a_header_comes_back_and_nothing_else_does() {
    let bytes = segment_bytes();
    assert_eq!(SegmentHeader::decode(&bytes, CACHE), Ok(segment_header()));
    assert!(bytes[512..].iter().all(|&b| b == 0));
    nothing_but_itself_is_read(&bytes[..512], |bytes| SegmentHeader::decode(bytes, CACHE));
    let main = SegmentHeader { parked: None, geometry: geometry(), ..segment_header() };
    let mut bytes = [1; 512];
    main.encode(&mut bytes);
    assert_eq!(SegmentHeader::decode(&bytes, CACHE), Ok(main));
    let other = SegmentHeader::decode(&bytes, Uuid([1; 16]));
    assert_eq!(other, Err(PartError::Cache { found: CACHE }));
    bytes[12] = 9;
    let crc = crc32c::crc32c(&bytes[12..]).to_le_bytes();
    bytes[8..12].copy_from_slice(&crc);
    assert_eq!(SegmentHeader::decode(&bytes, CACHE), Err(PartError::Version { found: 9 }));
}

#[test]
fn geometries_that_cannot_be_are_refused() {
    for (bytes, sector) in
        [(MIN_SEGMENT - 4096, 512), (1 << 31, 512), (20_000, 512), (1 << 20, 1024)]
    {
        let refused = SegmentGeometry::new(bytes, sector);
        assert_eq!(refused, Err(SegmentGeometryError { bytes, sector }));
    }
    assert!(SegmentGeometry::new(MIN_SEGMENT, 4096).is_ok());
}

#[test]
fn a_frontier_comes_back_whole_or_not_at_all() {
    let bytes = frontier().encode();
    assert_eq!(bytes.len(), frontier().bytes());
    assert_eq!(Frontier::decode(&bytes), Ok(frontier()));
    assert_eq!(frontier().volume(2), Some(&frontier().volumes[1]));
    assert_eq!(frontier().volume(3), None);
    for cut in 0..bytes.len() {
        let cut = Frontier::decode(&bytes[..cut]);
        assert!(matches!(cut, Err(FrontierError::Length { .. })), "{cut:?}");
    }
    let longer = [&bytes[..], &[0]].concat();
    assert!(matches!(Frontier::decode(&longer), Err(FrontierError::Length { .. })));
    // The batch vouches for the bytes. A table without that says what it says, or is refused: no two say the same.
    let mut bad = bytes.clone();
    for bit in 0..bytes.len() * 8 {
        bad[bit / 8] ^= 1 << (bit % 8);
        if let Ok(found) = Frontier::decode(&bad) {
            assert!(found != frontier() && found.encode() == bad, "bit {bit} flipped");
        }
        bad[bit / 8] ^= 1 << (bit % 8);
    }
}

#[test]
fn a_frontier_that_cannot_be_is_refused() {
    let refused = |change: &dyn Fn(&mut Frontier), field, value| {
        let mut bad = frontier();
        change(&mut bad);
        assert_eq!(bad.check(), Err(FrontierError::Field { field, value }));
    };
    refused(&|f| f.volumes.swap(0, 1), "attachment number", 1);
    refused(&|f| f.volumes[0].attachment = 0, "attachment number", 0);
    refused(&|f| f.volumes[0].frontier = 2000, "frontier", 2000);
    refused(&|f| f.volumes[1].unreadable[0].length = 0, "bytes of an extent", 0);
    refused(&|f| f.volumes[1].unreadable[1].length = 4097, "bytes of an extent", 4097);
    refused(&|f| f.volumes[1].unreadable[1].offset = 511, "offset of an extent", 511);
    let bad = (0..=MAX_UNREADABLE as u64).map(|i| Extent { offset: i * 8, length: 8 });
    let bad: Vec<_> = bad.collect();
    refused(&|f| f.volumes[2].unreadable = bad.clone(), "unreadable extents", 1003);
    let mut bytes = frontier().encode();
    bytes[32 + 4] = 1;
    let taken = Frontier::decode(&bytes);
    assert!(
        matches!(taken, Err(FrontierError::Field { .. })),
        "an extent of another volume: {taken:?}"
    );
    let volume = |n: u32| VolumeFrontier {
        attachment: n + 1,
        frontier: 0,
        last: 0,
        marker: 0,
        unreadable: if n == 0 { bad[..MAX_UNREADABLE].to_vec() } else { vec![] },
    };
    let largest = Frontier { volumes: (0..1024).map(volume).collect(), ..frontier() };
    assert_eq!(largest.encode().len(), MAX_FRONTIER);
    assert_eq!(Frontier::decode(&largest.encode()), Ok(largest));
}

#[test]
fn a_footer_comes_back_and_nothing_else_does() {
    let geometry = geometry();
    let bytes = footer().encode(geometry);
    let read = |bytes: &[u8]| Footer::decode(bytes, CACHE, GENERATION, geometry);
    assert_eq!(read(&bytes), Ok(footer()));
    // The end of a segment, whatever lies before the footer.
    let longer = [&[0xaa; 700][..], &bytes].concat();
    assert_eq!(read(&longer), Ok(footer()));
    let need = bytes.len();
    assert_eq!(read(&bytes[need - END_BYTES..]), Err(PartError::Short { have: END_BYTES, need }));
    let mut bad = bytes.clone();
    for bit in 0..bytes.len() * 8 {
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&bad).is_err(), "bit {bit} flipped");
        bad[bit / 8] ^= 1 << (bit % 8);
    }
    for cut in 1..bytes.len() {
        assert!(read(&bytes[..bytes.len() - cut]).is_err(), "cut at its end");
        assert!(read(&bytes[cut..]).is_err(), "cut at its beginning");
    }
    let found = GENERATION;
    let stale = Footer::decode(&bytes, CACHE, GENERATION + 8, geometry);
    assert_eq!(stale, Err(PartError::Generation { found }));
    let other = Footer::decode(&bytes, Uuid([1; 16]), GENERATION, geometry);
    assert_eq!(other, Err(PartError::Cache { found: CACHE }));
    assert_eq!(read(&[0; 4096]), Err(PartError::Absent));
}

#[test]
fn a_footer_names_the_record_that_cannot_be() {
    let bytes = footer().encode(geometry());
    let mut bad = bytes.clone();
    // The third record: a mark.
    bad[2 * 56 + 2 * 48 + 46] = 9;
    let n = bad.len();
    let body = n - END_BYTES;
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bad[body + 12..]), &bad[..body]);
    bad[body + 8..body + 12].copy_from_slice(&crc.to_le_bytes());
    let read = Footer::decode(&bad, CACHE, GENERATION, geometry());
    assert_eq!(read, Err(PartError::Record { number: 2, field: "kind", value: 9 }));
}

/// Fills a segment with batches until one does not fit, and seals it.
fn fill(
    geometry: SegmentGeometry,
    mut next: impl FnMut() -> Vec<(Record, Vec<u8>)>,
) -> (Vec<u8>, Footer) {
    let mut segment = vec![0; geometry.bytes() as usize];
    let mut room = Room::new(geometry);
    let mut batches: Vec<Batch> = Vec::new();
    let mut head = Head { number: 1, known: 0, before: 0, ..head() };
    loop {
        let records = next();
        let shape = Shape::of(records.iter().map(|(record, _)| record)).unwrap();
        let Some(at) = room.take(shape) else { break };
        head.at = at;
        let (bytes, batch) = write(&head, &records, geometry.sector());
        segment[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        head = Head { number: head.number + 1, before: batch.hash, ..head };
        batches.push(batch);
    }
    assert_eq!(Room::behind(geometry, &batches), room);
    let known = head.number - 1;
    let footer = Footer { cache: CACHE, generation: GENERATION, parked: 0, known, batches };
    let bytes = footer.encode(geometry);
    assert_eq!(bytes.len(), room.footer_bytes() as usize);
    assert!(room.used() as usize + bytes.len() <= segment.len());
    let at = segment.len() - bytes.len();
    segment[at..].copy_from_slice(&bytes);
    (segment, footer)
}

#[test]
fn a_footer_takes_no_more_than_its_part() {
    let geometry = SegmentGeometry::new(8 << 20, 512).unwrap();
    let record = |kind, length| Record {
        attachment: 1,
        generation: 1,
        sequence: 1,
        dependency: 0,
        offset: 0,
        length,
        kind,
        flags: Flags::default(),
    };
    let part = |kind, length, count: usize| {
        let record = record(kind, length);
        let records = vec![(record, vec![0; record.payload_bytes() as usize]); count];
        let (segment, footer) = fill(geometry, || records.clone());
        let bytes = footer.encode(geometry).len();
        (bytes * 1000).div_ceil(segment.len())
    };
    assert_eq!(part(Kind::Write, 4096, 1), 23);
    assert_eq!(part(Kind::Write, 4096, 64), 13);
    assert_eq!(part(Kind::Write, 512, 2048), 77);
    assert_eq!(part(Kind::Zero, 4096, 1), 169);
    assert_eq!(part(Kind::Zero, 4096, 2048), 493);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]
    #[test]
    fn a_full_segment_is_read_with_or_without_its_footer(seed: u64, wide: bool, largest in 1u64..9000) {
        let mut rng = Rng::new(seed);
        let sector = if wide { 4096 } else { 512 };
        let geometry = SegmentGeometry::new(128 << 10, sector).unwrap();
        let (segment, footer) = fill(geometry, || any_records(&mut rng, 9, largest.max(512)));
        let found = Footer::decode(&segment, CACHE, GENERATION, geometry);
        prop_assert_eq!(found.as_ref(), Ok(&footer));
        let mut at = sector;
        for batch in &footer.batches {
            let place = batch::Place { segment: geometry.bytes(), ..place(at) };
            let read = batch::decode(&segment[at as usize..], &place);
            prop_assert_eq!(read.as_ref(), Ok(batch));
            at += batch.bytes(sector);
        }
        let need = footer::bytes(
            footer.batches.len() as u32,
            footer.batches.iter().map(|batch| batch.contents.shape().records()).sum(),
            footer.batches.iter().map(|batch| batch.contents.shape().sums()).sum(),
            sector,
        );
        prop_assert!(at + need <= geometry.bytes());
    }

    #[test]
    fn sealed_garbage_in_a_footer_is_refused_or_read_as_it_is(seed: u64) {
        let mut rng = Rng::new(seed);
        let mut bytes = footer().encode(geometry());
        let body = bytes.len() - END_BYTES;
        for _ in 0..rng.range(1, 4) {
            let from = if rng.chance(0.5) { 0 } else { body as u64 + 12 };
            let at = rng.range(from, if from == 0 { 500 } else { body as u64 + 70 }) as usize;
            bytes[at] = if rng.chance(0.5) { rng.next_u64() as u8 } else { bytes[at] ^ 1 };
        }
        let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[body + 12..]), &bytes[..body]);
        bytes[body + 8..body + 12].copy_from_slice(&crc.to_le_bytes());
        if let Ok(found) = Footer::decode(&bytes, CACHE, GENERATION, geometry()) {
            let again = found.encode(geometry());
            prop_assert_eq!(Footer::decode(&again, CACHE, GENERATION, geometry()), Ok(found));
        }
    }

    #[test]
    fn any_frontier_comes_back(seed: u64, volumes in 0u32..40) {
        let mut rng = Rng::new(seed);
        let mut attachment = 0;
        let mut volume = |_| {
            attachment += rng.range(1, 9) as u32;
            let last = rng.next_u64() >> rng.range(0, 63);
            let mut end = 0;
            let unreadable = (0..rng.below(5))
                .map(|_| {
                    let extent = Extent { offset: end + rng.below(1 << 50), length: rng.range(1, 1 << 50) };
                    end = extent.offset + extent.length;
                    extent
                })
                .collect();
            let frontier = last - last.min(rng.below(99));
            VolumeFrontier { attachment, frontier, last, marker: last ^ 5, unreadable }
        };
        let volumes = (0..volumes).map(&mut volume).collect();
        let table = Frontier { oldest_generation: seed, oldest_batch: !seed, volumes };
        prop_assert_eq!(Frontier::decode(&table.encode()), Ok(table));
    }

    #[test]
    fn any_bytes_are_a_frontier_or_refused(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), small: bool) {
        if small && bytes.len() >= 32 {
            bytes[16..32].fill(0);
            bytes[16] = ((bytes.len() - 32) / 32) as u8;
            bytes[20] = ((bytes.len() - 32) % 32 / 16) as u8;
        }
        if let Ok(found) = Frontier::decode(&bytes) {
            prop_assert_eq!(found.encode(), bytes);
        }
    }
}
