//! Batches: what is written comes back, and nothing else does.

use larder_base::Rng;
use larder_format::Uuid;
use larder_format::block::write_log::batch::{self, DamagedPayload, HEAD_BYTES, MAX_HEADER};
use larder_format::block::write_log::record::{
    MAX_MARK, MAX_PAYLOAD, MAX_RANGE, MAX_RECORDS, MAX_VOLUME, mark_name,
};
use larder_format::block::write_log::{
    Batch, Flags, Frontier, Head, Item, Kind, PartError, Place, Record, Shape, pieces,
};
use proptest::prelude::*;

use crate::samples::{any_records, batch_bytes, frontier, head, items, place, records, write};

fn seal(bytes: &mut [u8], header: usize) {
    let crc = crc32c::crc32c(&bytes[12..header]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
}

/// The head and a record, put together by hand from the table of the module's documentation.
#[test]
fn it_lies_as_documented() {
    let record = Record {
        attachment: 0x0403_0201,
        generation: 0x1817_1615_1413_1211,
        sequence: 0x2827_2625_2423_2221,
        dependency: 0x0827_2625_2423_2221,
        offset: 0x3837_3635_3433_3231,
        length: 0x0000_0043_4241,
        kind: Kind::Trim,
        flags: Flags { fua: true, may_punch: true, unreadable: false },
    };
    let (bytes, batch) = write(&head(), &[(record, vec![])], 512);
    let mut want = Vec::new();
    want.extend(b"LARDERWB");
    want.extend([0; 4]);
    want.extend([1, 0, 0, 0, 0, 2, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0]);
    want.extend(head().cache.0);
    want.extend([0x06, 0x05, 0x04, 0x03, 0x02, 0x01, 0, 0]);
    want.extend([0x77, 0x55, 0x44, 0x33, 0x22, 0x11, 0, 0]);
    want.extend([5, 0, 0, 0, 0, 0, 0, 0]);
    want.extend([0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]);
    want.extend([0x75, 0x55, 0x44, 0x33, 0x22, 0x11, 0, 0]);
    want.extend(head().time.to_le_bytes());
    want.extend([0; 32]);
    want.extend([0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x28]);
    want.extend([0x21, 0x22, 0x23, 0x24, 0x25, 0x26, 0x27, 0x08]);
    want.extend([0x31, 0x32, 0x33, 0x34, 0x35, 0x36, 0x37, 0x38]);
    want.extend([0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
    want.extend([1, 2, 3, 4, 0, 0, 0, 0, 0x41, 0x42, 0x43, 0, 0, 0, 3, 3]);
    want.resize(512, 0);
    seal(&mut want, 512);
    assert_eq!(bytes, want);
    assert_eq!(batch.hash, 0x69d0_5cc1_f8a8_c174, "the hash of a head is fixed by the format");
}

#[test]
fn the_sample_comes_back() {
    let (bytes, written) = write(&head(), &records(), 512);
    let batch = batch::decode(&bytes, &place(512)).unwrap();
    assert_eq!(batch, written);
    assert_eq!(batch.bytes(512) as usize, bytes.len());
    let shape = batch.contents.shape();
    let payload = &bytes[shape.header_bytes() as usize..];
    assert_eq!(batch.check_payload(payload), Ok(()));
    for (entry, (record, bytes)) in batch.contents.entries().zip(records()) {
        let mine = &payload[entry.payload.start as usize..entry.payload.end as usize];
        assert_eq!((*entry.record, mine), (record, &bytes[..]));
        match record.kind {
            Kind::Mark => assert_eq!(mark_name(mine), Some("noël")),
            Kind::Frontier => assert_eq!(Frontier::decode(mine), Ok(frontier())),
            _ => {}
        }
    }
    assert_eq!(mark_name(&[b'a'; MAX_MARK + 1]), None);
    assert_eq!((mark_name(&[]), mark_name(&[0xff])), (None, None));
}

#[test]
fn every_flip_and_cut_is_refused_or_harmless() {
    let good = batch_bytes();
    let whole = batch::decode(&good, &place(512)).unwrap();
    let shape = whole.contents.shape();
    let (header, end) = (shape.header_bytes(), shape.header_bytes() + shape.payload_bytes());
    let covered: Vec<_> = whole.contents.entries().map(|entry| entry.payload).collect();
    let mut bad = good.clone();
    for bit in 0..good.len() * 8 {
        bad[bit / 8] ^= 1 << (bit % 8);
        let read = batch::decode(&bad, &place(512));
        if bit / 8 < header as usize {
            assert!(read.is_err(), "bit {bit} flipped");
        } else {
            let at = (bit / 8) as u32 - header;
            let record = covered.iter().position(|payload| payload.contains(&at));
            let want = record.map_or(Ok(()), |record| {
                let piece = (at - covered[record].start) / pieces::PIECE as u32;
                Err(DamagedPayload { record: record as u32, piece })
            });
            let batch = read.unwrap();
            assert_eq!(batch.check_payload(&bad[header as usize..]), want, "bit {bit} flipped");
            assert_eq!(batch, whole);
        }
        bad[bit / 8] ^= 1 << (bit % 8);
    }
    for cut in 0..good.len() {
        match batch::decode(&good[..cut], &place(512)) {
            Err(PartError::Absent) => assert!(cut < 8),
            Err(PartError::Short { have, need }) => {
                assert!(have == cut && cut < header as usize);
                assert_eq!(need, if cut < HEAD_BYTES { 512 } else { header as usize });
            }
            Ok(batch) => {
                assert!(cut >= header as usize && batch == whole);
                let read = batch.check_payload(&good[header as usize..cut]);
                assert_eq!(read.is_ok(), cut >= end as usize, "cut to {cut} bytes");
            }
            Err(other) => panic!("cut to {cut} bytes: {other}"),
        }
    }
}

#[test]
fn a_batch_is_known_by_its_cache_its_segment_and_its_place() {
    let good = batch_bytes();
    let other = Uuid([1; 16]);
    let here = place(512);
    let read = |place: Place| batch::decode(&good, &place);
    assert_eq!(read(Place { cache: other, ..here }), Err(PartError::Cache { found: here.cache }));
    let found = here.generation;
    assert_eq!(read(Place { generation: 7, ..here }), Err(PartError::Generation { found }));
    assert_eq!(read(Place { at: 1024, ..here }), Err(PartError::Place { found: 512 }));
    let end = 512 + good.len() as u32;
    assert!(read(Place { segment: end, ..here }).is_ok());
    let short = read(Place { segment: end - 512, ..here });
    assert!(matches!(short, Err(PartError::Field { field: "end of the batch", .. })), "{short:?}");
    let mut newer = good.clone();
    newer[12] = 2;
    let header = Shape::of(records().iter().map(|(r, _)| r)).unwrap().header_bytes() as usize;
    seal(&mut newer, header);
    assert_eq!(batch::decode(&newer, &here), Err(PartError::Version { found: 2 }));
    assert_eq!(batch::decode(&[0; 4096], &here), Err(PartError::Absent));
}

/// A sealed header that says what cannot be, as only an error of whoever wrote it makes one.
#[test]
fn sealed_nonsense_names_the_record_and_the_field() {
    let good = batch_bytes();
    let header = Shape::of(records().iter().map(|(r, _)| r)).unwrap().header_bytes() as usize;
    let read = |at: usize, value: &[u8]| {
        let mut bad = good.clone();
        bad[at..at + value.len()].copy_from_slice(value);
        seal(&mut bad, header);
        batch::decode(&bad, &place(512)).unwrap_err()
    };
    let record = |number, field, value| PartError::Record { number, field, value };
    let at = |n: usize, field: usize| HEAD_BYTES + n * 48 + field;
    assert_eq!(read(at(1, 0), &[0; 8]), record(1, "sequence", 0));
    assert_eq!(read(at(2, 8), &1002u64.to_le_bytes()), record(2, "dependency", 1002));
    assert_eq!(read(at(3, 16), &[0xff; 8]), record(3, "offset", u64::MAX));
    assert_eq!(read(at(4, 32), &[0; 4]), record(4, "attachment number", 0));
    assert_eq!(read(at(6, 36), &[1]), record(6, "payload position", 6145));
    assert_eq!(read(at(5, 40), &[0; 6]), record(5, "length", 0));
    assert_eq!(read(at(4, 46), &[6]), record(4, "kind", 6));
    assert_eq!(read(at(4, 46), &[5]), record(4, "length", 1 << 30));
    assert_eq!(read(at(4, 47), &[8]), record(4, "flags", 8));
    assert_eq!(read(at(4, 47), &[4]), record(4, "flags", 4), "a range has nothing to lose");
    assert_eq!(read(20, &[0; 4]), PartError::Field { field: "records", value: 0 });
    assert_eq!(read(20, &[0xff; 4]), PartError::Field { field: "records", value: u32::MAX.into() });
    assert_eq!(read(24, &[0; 4]), PartError::Field { field: "payload bytes", value: 0 });
    assert_eq!(read(16, &[0, 4, 0, 0]), PartError::Torn, "a longer header has another checksum");
    let known = read(80, &[0xff; 8]);
    assert_eq!(known, PartError::Field { field: "batch known durable", value: u64::MAX });
}

#[test]
fn the_largest_batches_fit() {
    let record = |length| Record {
        attachment: 1,
        generation: 1,
        sequence: 1,
        dependency: 0,
        offset: 0,
        length,
        kind: Kind::Write,
        flags: Flags::default(),
    };
    // One write of 1 MiB; 2,048 of 512 bytes, each with a checksum; and as many that end in a piece which is not full.
    let one = Shape::of([&record(1 << 20)]).unwrap();
    assert_eq!((one.payload_bytes(), one.sums(), one.bytes(4096)), (MAX_PAYLOAD, 256, 1_052_672));
    assert_eq!(one.with(&record(1)), None);
    let many = (0..MAX_RECORDS).try_fold(Shape::default(), |shape, _| shape.with(&record(512)));
    assert_eq!(many.unwrap().with(&Record { kind: Kind::Zero, ..record(1) }), None);
    assert!(many.unwrap().header_bytes() as usize <= MAX_HEADER);
    let longest =
        (0..).try_fold(Shape::default(), |shape: Shape, n| match shape.with(&record(513)) {
            Some(larger) => Ok(larger),
            None => Err((shape, n)),
        });
    let (shape, n) = longest.unwrap_err();
    assert_eq!((shape.records(), shape.sums(), n), (1024, 1024, 1024));
    let records = vec![(record(512), vec![7; 512]); MAX_RECORDS as usize];
    let (bytes, written) = write(&head(), &records, 4096);
    let far = Place { segment: 8 << 20, ..place(512) };
    assert_eq!(batch::decode(&bytes, &far), Ok(written));
}

#[test]
fn ranges_and_offsets_reach_their_bounds_and_no_further() {
    let record = |kind, offset, length| Record {
        attachment: 1,
        generation: u64::MAX,
        sequence: u64::MAX,
        dependency: u64::MAX - 1,
        offset,
        length,
        kind,
        flags: Flags::default(),
    };
    for (offset, length) in [(MAX_VOLUME - MAX_RANGE, MAX_RANGE), (MAX_VOLUME - 1, 1)] {
        let zero = record(Kind::Zero, offset, length);
        let (bytes, written) = write(&head(), &[(zero, vec![])], 512);
        assert_eq!(batch::decode(&bytes, &place(512)).unwrap(), written);
        assert_eq!(written.contents.records(), [zero]);
        assert_eq!(record(Kind::Zero, offset + 1, length).check(), Err(("offset", offset + 1)));
    }
    let long = record(Kind::Trim, 0, MAX_RANGE + 1).check();
    assert_eq!(long, Err(("length", MAX_RANGE + 1)));
    let long = record(Kind::Write, 0, (1 << 20) + 1).check();
    assert_eq!(long, Err(("length", (1 << 20) + 1)));
}

#[test]
#[should_panic = "a FRONTIER is the first of its batch"]
fn a_frontier_is_not_written_behind_other_records() {
    let mut records = records();
    records.swap(0, 1);
    write(&head(), &records, 512);
}

#[test]
fn a_copy_keeps_the_checksums_of_what_was_written() {
    let (bytes, first) = write(&head(), &records(), 512);
    let mut payload = bytes[first.contents.shape().header_bytes() as usize..].to_vec();
    let lost = first.contents.entries().nth(1).unwrap().payload;
    payload[lost.start as usize + 4500] ^= 1;
    let copied: Vec<Item<'_>> = first
        .contents
        .entries()
        .skip(1)
        .map(|entry| Item {
            record: *entry.record,
            payload: &payload[entry.payload.start as usize..entry.payload.end as usize],
            sums: Some(entry.sums),
        })
        .collect();
    let shape = Shape::of(copied.iter().map(|item| &item.record)).unwrap();
    let mut out = vec![0; shape.bytes(512) as usize];
    let head = Head { parked: 2, number: 1, known: 0, before: 0, ..head() };
    batch::encode(&mut out, &head, &copied);
    let copy = batch::decode(&out, &place(512)).unwrap();
    let damaged = copy.check_payload(&out[shape.header_bytes() as usize..]);
    assert_eq!(damaged, Err(DamagedPayload { record: 0, piece: 1 }));
}

fn again(batch: &Batch) -> Batch {
    let zeros = vec![0; MAX_PAYLOAD as usize];
    let items: Vec<Item<'_>> = batch
        .contents
        .entries()
        .map(|entry| Item {
            record: *entry.record,
            payload: &zeros[..entry.payload.len()],
            sums: Some(entry.sums),
        })
        .collect();
    let mut out = vec![0; batch.contents.shape().header_bytes() as usize];
    let written = batch::encode_header(&mut out, &batch.head, &items);
    let place = Place {
        cache: batch.head.cache,
        generation: batch.head.generation,
        at: batch.head.at,
        segment: u32::MAX,
    };
    assert_eq!(batch::decode(&out, &place).as_ref(), Ok(&written));
    written
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn any_batch_comes_back(seed: u64, most in 1u64..80, largest in 1u64..40_000, wide: bool) {
        let mut rng = Rng::new(seed);
        let records = any_records(&mut rng, most, largest.max(512));
        let number = 1 + (rng.next_u64() >> 1);
        let head = Head {
            number,
            known: rng.below(number),
            run: rng.next_u64(),
            before: rng.next_u64(),
            parked: rng.next_u64() as u32,
            time: rng.next_u64(),
            ..head()
        };
        let sector = if wide { 4096 } else { 512 };
        let (bytes, written) = write(&head, &records, sector);
        prop_assert_eq!(bytes.len() % sector as usize, 0);
        let place = Place { segment: 8 << 20, ..place(512) };
        let batch = batch::decode(&bytes, &place).unwrap();
        prop_assert_eq!(&batch, &written);
        prop_assert_eq!(batch.head, head);
        let payload = &bytes[batch.contents.shape().header_bytes() as usize..];
        prop_assert_eq!(batch.check_payload(payload), Ok(()));
        prop_assert_eq!(batch.contents.records().len(), records.len());
        let mut end = 0;
        for (entry, (record, bytes)) in batch.contents.entries().zip(&records) {
            prop_assert_eq!(entry.record, record);
            let mine = &payload[entry.payload.start as usize..entry.payload.end as usize];
            prop_assert_eq!(mine, &bytes[..]);
            if !mine.is_empty() {
                prop_assert!(payload[end..entry.payload.start as usize].iter().all(|&b| b == 0));
                end = entry.payload.end as usize;
            }
        }
        prop_assert!(payload[end..].iter().all(|&b| b == 0));
        // A header alone, for a write that gathers, is the same.
        let mut header = vec![1; written.contents.shape().header_bytes() as usize];
        batch::encode_header(&mut header, &head, &items(&records));
        prop_assert_eq!(&header[..], &bytes[..header.len()]);
    }

    #[test]
    fn sealed_garbage_is_refused_or_read_as_it_is(seed: u64) {
        let mut rng = Rng::new(seed);
        let (mut bytes, batch) = write(&head(), &any_records(&mut rng, 12, 2000), 512);
        let header = batch.contents.shape().header_bytes() as usize;
        for _ in 0..rng.range(1, 4) {
            let at = 12 + rng.below(header as u64 - 12) as usize;
            bytes[at] = if rng.chance(0.5) { rng.next_u64() as u8 } else { bytes[at] ^ 1 };
        }
        let header = u32::from_le_bytes(bytes[16..20].try_into().unwrap()) as usize;
        if (512..=bytes.len()).contains(&header) {
            seal(&mut bytes, header);
        }
        let place = Place { segment: 8 << 20, ..place(512) };
        if let Ok(found) = batch::decode(&bytes, &place) {
            prop_assert_eq!(&again(&found).contents, &found.contents);
        }
    }
}
