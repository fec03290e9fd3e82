//! A start's scan of a write log whose segments and batches say what the fuzzer has them say, with checksums that hold, and bytes changed here and
//! there: nothing that is asked for twice is there twice, and what is recovered of a volume runs on without a gap.
#![no_main]

use larder_engine::block::writeback::recovery::Records as _;
use larder_engine::block::writeback::{Fault, recovery, scan};
use larder_format::Uuid;
use larder_format::block::superblock::WriteLogArea;
use larder_format::block::write_log::{
    Flags, Frontier, Head, Item, Kind, Record, SegmentGeometry, SegmentHeader, Shape, batch,
};
use libfuzzer_sys::fuzz_target;

const CACHE: Uuid = Uuid([1; 16]);
const SEGMENTS: u32 = 3;
const SEGMENT: usize = 1 << 20;
/// Batches lie in the first bytes of a segment.
const USED: usize = 64 << 10;

fn header(image: &mut [u8], segment: usize, generation: u64, geometry: SegmentGeometry) {
    let header = SegmentHeader {
        cache: CACHE,
        generation,
        first: 1,
        run: 1,
        time: 0,
        geometry,
        parked: None,
    };
    let sector = geometry.sector() as usize;
    header.encode(&mut image[segment * SEGMENT..][..sector]);
}

fuzz_target!(|data: &[u8]| {
    let geometry = SegmentGeometry::new(SEGMENT as u32, 512).expect("a segment");
    let area = WriteLogArea { at: 1 << 20, segments: SEGMENTS, geometry };
    let mut image = vec![0u8; SEGMENT * SEGMENTS as usize];
    let mut ends = [512usize; SEGMENTS as usize];
    let mut sequence = 0;
    for step in data.chunks_exact(8) {
        let segment = usize::from(step[0]) % SEGMENTS as usize;
        let generation = u64::from(step[0] >> 4) + 1;
        let start = segment * SEGMENT;
        match step[1] % 8 {
            0 => header(&mut image, segment, generation, geometry),
            1 => {
                let at = usize::from(u16::from_le_bytes([step[2], step[3]])) % (USED - 4);
                image[start + at..][..4].copy_from_slice(&step[4..]);
            }
            2 => ends[segment] = 512 * (1 + usize::from(step[2]) % 64),
            kind => {
                sequence = if step[2] < 200 { sequence + 1 } else { u64::from(step[2]) - 199 };
                let frontier = Frontier {
                    volumes: Vec::new(),
                    oldest_generation: u64::from(step[6] >> 4) + 1,
                    oldest_batch: u64::from(step[6] & 15) + 1,
                };
                let table = frontier.encode();
                let payload = match kind {
                    3 => table,
                    _ => vec![step[3]; usize::from(step[3]) + 1],
                };
                let kind = match kind {
                    3 => Kind::Frontier,
                    4 => Kind::Zero,
                    5 => Kind::Trim,
                    _ => Kind::Write,
                };
                let record = match kind {
                    Kind::Frontier => Record::frontier(payload.len()),
                    kind => Record {
                        attachment: 1 + u32::from(step[7] & 1),
                        generation: 1,
                        sequence,
                        dependency: 0,
                        offset: u64::from(step[4]) * 512,
                        length: payload.len() as u64,
                        kind,
                        flags: Flags::default(),
                    },
                };
                let Some(shape) = Shape::of([&record]) else { continue };
                let bytes = shape.bytes(512) as usize;
                let at = ends[segment];
                if at + bytes > USED {
                    continue;
                }
                let head = Head {
                    cache: CACHE,
                    generation,
                    at: at as u32,
                    parked: 0,
                    number: u64::from(step[5]) + 1,
                    run: u64::from(step[7] >> 4),
                    before: u64::from(step[6]),
                    known: u64::from(step[6] & 7).min(u64::from(step[5])),
                    time: 0,
                };
                let payload =
                    if matches!(kind, Kind::Zero | Kind::Trim) { &[][..] } else { &payload };
                let item = Item { record, payload, sums: None };
                batch::encode(&mut image[start + at..][..bytes], &head, &[item]);
                ends[segment] = at + bytes;
            }
        }
    }
    let mut read = |at: u64, out: &mut [u8]| {
        let at = (at - (1 << 20)) as usize;
        out.copy_from_slice(image.get(at..at + out.len()).ok_or(scan::ReadFailed)?);
        Ok(())
    };
    let scanned = scan::scan(&area, CACHE, &mut read);
    let found = recovery::recover(&scanned.batches, &[(1, 0), (2, 0)], Fault::default());
    let packed: recovery::RecoveredPacked =
        recovery::recover_in(&scanned.batches, &[(1, 0), (2, 0)], Fault::default());
    for (number, volume) in &found.volumes {
        let mine = &packed.volumes[number];
        assert_eq!(mine.records.each().collect::<Vec<_>>(), volume.records);
        assert_eq!((mine.last, mine.gap), (volume.last, volume.gap));
        let mut before = volume.frontier;
        for dirty in &volume.records {
            let record = dirty.entry.record;
            assert!(record.sequence > before, "{record:?}");
            before = record.sequence;
            assert!(dirty.entry.place + record.payload_bytes() <= image.len() as u64);
            let _ = scanned.sums(&dirty.entry);
        }
        assert!(before <= volume.last.max(volume.frontier));
    }
});
