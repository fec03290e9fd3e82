//! What the images hold, and random ones.

use larder_base::Rng;
use larder_format::Uuid;
use larder_format::block::journal::{Commit, Descriptors, ExtentKind, JournalExtent};
use larder_format::block::marker::{Marker, MarkerState, Order};
use larder_format::block::write_log::record::{MAX_RANGE, MAX_VOLUME};
use larder_format::block::write_log::{
    Batch, Extent, Flags, Footer, Frontier, Head, Item, Kind, Parked, Place, Record, Room,
    SegmentGeometry, SegmentHeader, Shape, VolumeFrontier, batch, pieces,
};

pub(crate) const CACHE: Uuid =
    Uuid(*b"\x6b\x0f\x4d\x8a\x01\x02\x43\x04\x85\x06\x07\x08\x09\x0a\x0b\x0c");
pub(crate) const VOLUME: Uuid = Uuid(*b"a volume's UUID.");
pub(crate) const GENERATION: u64 = 0x0102_0304_0506;
const TIME: u64 = 1_800_000_000_123_456_789;

pub(crate) fn geometry() -> SegmentGeometry {
    SegmentGeometry::new(64 << 10, 512).unwrap()
}

pub(crate) fn place(at: u32) -> Place {
    Place { cache: CACHE, generation: GENERATION, at, segment: geometry().bytes() }
}

pub(crate) fn frontier() -> Frontier {
    let volume = |attachment, unreadable| VolumeFrontier {
        attachment,
        frontier: 1000,
        last: 1000 + u64::from(attachment),
        marker: 77,
        unreadable,
    };
    let bad =
        vec![Extent { offset: 0, length: 512 }, Extent { offset: MAX_VOLUME - 4096, length: 4096 }];
    Frontier {
        oldest_generation: GENERATION - 3,
        oldest_batch: 0x1122_3344_5566,
        volumes: vec![volume(1, vec![]), volume(2, bad), volume(u32::MAX, vec![])],
    }
}

/// A FRONTIER, a write of more than a piece, a mark, ranges, and a write whose payload was lost.
pub(crate) fn records() -> Vec<(Record, Vec<u8>)> {
    let record = |sequence, kind, offset, length, flags| Record {
        attachment: 2,
        generation: 9,
        sequence,
        dependency: 1000,
        offset,
        length,
        kind,
        flags,
    };
    let none = Flags::default();
    let (fua, punch) = (Flags { fua: true, ..none }, Flags { may_punch: true, ..none });
    let lost = Flags { unreadable: true, ..none };
    let bytes = |n: u32| (0..n).map(|i| (i.wrapping_mul(31) >> 3) as u8).collect();
    let table = frontier().encode();
    vec![
        (Record::frontier(table.len()), table),
        (record(1001, Kind::Write, MAX_VOLUME - 5000, 5000, fua), bytes(5000)),
        (record(1002, Kind::Mark, 0, 5, fua), b"no\xc3\xabl".to_vec()),
        (record(1003, Kind::Zero, 4096, MAX_RANGE, punch), vec![]),
        (record(1004, Kind::Trim, 1 << 40, 1 << 30, none), vec![]),
        (record(1005, Kind::Write, 512, 1 << 20, lost), vec![]),
        (record(1006, Kind::Write, 3, 700, none), bytes(700)),
    ]
}

pub(crate) fn head() -> Head {
    Head {
        cache: CACHE,
        generation: GENERATION,
        at: 512,
        parked: 0,
        number: 0x1122_3344_5577,
        run: 5,
        before: 0x8877_6655_4433_2211,
        known: 0x1122_3344_5575,
        time: TIME,
    }
}

pub(crate) fn items(records: &[(Record, Vec<u8>)]) -> Vec<Item<'_>> {
    records.iter().map(|(record, payload)| Item { record: *record, payload, sums: None }).collect()
}

/// Writes a batch for sectors of `sector` bytes.
pub(crate) fn write(head: &Head, records: &[(Record, Vec<u8>)], sector: u32) -> (Vec<u8>, Batch) {
    let shape = Shape::of(records.iter().map(|(record, _)| record)).unwrap();
    let mut out = vec![0xaa; shape.bytes(sector) as usize];
    let batch = batch::encode(&mut out, head, &items(records));
    (out, batch)
}

pub(crate) fn batch_bytes() -> Vec<u8> {
    write(&head(), &records(), 512).0
}

pub(crate) fn segment_header() -> SegmentHeader {
    SegmentHeader {
        cache: CACHE,
        generation: GENERATION,
        first: 1,
        run: 5,
        time: TIME,
        geometry: SegmentGeometry::new(8 << 20, 4096).unwrap(),
        parked: Some(Parked { attachment: 2, volume: VOLUME, generation: 9 }),
    }
}

pub(crate) fn segment_bytes() -> Vec<u8> {
    let mut out = vec![0xaa; 4096];
    segment_header().encode(&mut out);
    out
}

pub(crate) fn footer() -> Footer {
    let mut room = Room::new(geometry());
    let mut head = head();
    let mut batches: Vec<Batch> = Vec::new();
    for records in [records(), records().split_off(6), records().split_off(3)] {
        let shape = Shape::of(records.iter().map(|(record, _)| record)).unwrap();
        head.at = room.take(shape).unwrap();
        let batch = write(&head, &records, 512).1;
        head = Head { number: head.number + 1, before: batch.hash, ..head };
        batches.push(batch);
    }
    // One that was lost before the footer was written.
    batches.remove(1);
    Footer { cache: CACHE, generation: GENERATION, parked: 0, known: head.number, batches }
}

pub(crate) fn marker(number: u64) -> Marker {
    Marker {
        number,
        state: MarkerState::Closed,
        volume: VOLUME,
        identity: std::array::from_fn(|i| i as u8),
        cache: CACHE,
        run: 5,
        host: "knoten-ä.example".to_owned(),
        generation: 9,
        attachment: 2,
        frontier: 1006,
        time: TIME,
        mark: Some("noël".to_owned()),
        order: Order::Journaled,
        applied: 44,
        joins: 0,
        probes: false,
    }
}

pub(crate) fn markers() -> [Vec<u8>; 2] {
    let clean = Marker {
        state: MarkerState::Clean,
        order: Order::Any,
        host: String::new(),
        mark: None,
        ..marker(78)
    };
    [clean.encode(), marker(77).encode()]
}

pub(crate) fn descriptors() -> Descriptors {
    let extent =
        |offset, length, kind, may_punch| JournalExtent { offset, length, kind, may_punch };
    let extents = vec![
        extent(0, 5000, ExtentKind::Data, false),
        extent(5000, MAX_RANGE, ExtentKind::Zero, true),
        extent(1 << 50, 512, ExtentKind::Trim, false),
        extent(MAX_VOLUME - 8192, 8192, ExtentKind::Data, false),
    ];
    let data: Vec<u8> = (0..13_192u32).map(|i| (i.wrapping_mul(37) >> 4) as u8).collect();
    let sums = pieces::sums(&data[..5000]).chain(pieces::sums(&data[5000..])).collect();
    Descriptors { volume: VOLUME, cache: CACHE, epoch: 45, generation: 9, extents, sums }
}

pub(crate) fn commit() -> Commit {
    let descriptors = descriptors();
    Commit::of(&descriptors, &descriptors.encode(), 1006, TIME, Some("noël".to_owned()))
}

/// Any records that fit a batch, at most `most` of them, with payloads of `largest` bytes at most.
pub(crate) fn any_records(rng: &mut Rng, most: u64, largest: u64) -> Vec<(Record, Vec<u8>)> {
    let (mut out, mut shape) = (Vec::new(), Shape::default());
    for i in 0..rng.range(1, most) {
        let (record, payload) = if i == 0 && rng.chance(0.3) {
            let table = frontier().encode();
            (Record::frontier(table.len()), table)
        } else {
            any_record(rng, largest)
        };
        match shape.with(&record) {
            Some(larger) => shape = larger,
            None => break,
        }
        out.push((record, payload));
    }
    out
}

fn any_record(rng: &mut Rng, largest: u64) -> (Record, Vec<u8>) {
    let kinds = [Kind::Write, Kind::Write, Kind::Zero, Kind::Trim, Kind::Mark];
    let kind = kinds[rng.below(kinds.len() as u64) as usize];
    let length = match kind {
        Kind::Mark => rng.range(1, 255),
        Kind::Write if rng.chance(0.5) => 512 * rng.range(1, largest / 512),
        Kind::Write => rng.range(1, largest),
        _ => 1 + (rng.next_u64() >> rng.range(23, 63)) % MAX_RANGE,
    };
    let ranged = kind != Kind::Mark;
    let sequence = 1 + (rng.next_u64() >> rng.range(1, 62));
    let record = Record {
        attachment: 1 + rng.below(u64::from(u32::MAX)) as u32,
        generation: rng.next_u64(),
        sequence,
        dependency: rng.below(sequence),
        offset: if ranged { rng.next_u64() % (MAX_VOLUME - length + 1) } else { 0 },
        length,
        kind,
        flags: Flags {
            fua: rng.chance(0.5),
            may_punch: matches!(kind, Kind::Zero | Kind::Trim) && rng.chance(0.5),
            unreadable: matches!(kind, Kind::Write | Kind::Mark) && rng.chance(0.2),
        },
    };
    let mut payload = vec![0; record.payload_bytes() as usize];
    rng.fill(&mut payload);
    (record, payload)
}
