//! A batch of the write log of any bytes, with a checksum that holds; and one that a writer wrote, with two bytes changed.
#![no_main]

use larder_format::Uuid;
use larder_format::block::write_log::{
    Batch, Flags, Head, Item, Kind, Place, Record, Shape, batch,
};
use libfuzzer_sys::fuzz_target;

const PLACE: Place = Place { cache: Uuid([1; 16]), generation: 7, at: 4096, segment: 8 << 20 };

fn seal(bytes: &mut [u8]) {
    let crc = crc32c::crc32c(&bytes[12..]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
}

/// The same header once more.
fn again(batch: &Batch) -> Batch {
    let zeros = vec![0; batch.contents.shape().payload_bytes() as usize];
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
    batch::encode_header(&mut out, &batch.head, &items);
    batch::decode(&out, &PLACE).expect("what was written is read")
}

fuzz_target!(|data: &[u8]| {
    let _ = batch::decode(data, &PLACE);
    // The fuzzer's bytes as a header of this cache, segment and place.
    let mut header = data.to_vec();
    header.resize(data.len().max(128).next_multiple_of(512).min(batch::MAX_HEADER), 0);
    let bytes = (header.len() as u32).to_le_bytes();
    header[..8].copy_from_slice(b"LARDERWB");
    header[12..16].copy_from_slice(&1u32.to_le_bytes());
    header[16..20].copy_from_slice(&bytes);
    header[28..32].copy_from_slice(&PLACE.at.to_le_bytes());
    header[32..48].copy_from_slice(&PLACE.cache.0);
    header[48..56].copy_from_slice(&PLACE.generation.to_le_bytes());
    seal(&mut header);
    if let Ok(found) = batch::decode(&header, &PLACE) {
        assert_eq!(again(&found).contents, found.contents);
        let _ = found.check_payload(data);
    }

    let record = Record {
        attachment: 1,
        generation: 2,
        sequence: 3,
        dependency: 0,
        offset: 512,
        length: 5000,
        kind: Kind::Write,
        flags: Flags::default(),
    };
    let head = Head {
        cache: PLACE.cache,
        generation: PLACE.generation,
        at: PLACE.at,
        parked: 0,
        number: 9,
        run: 4,
        before: 5,
        known: 6,
        time: 7,
    };
    let payload = [3; 5000];
    let mut good = vec![0; Shape::of([&record]).expect("it fits").bytes(512) as usize];
    let written =
        batch::encode(&mut good, &head, &[Item { record, payload: &payload, sums: None }]);
    let mut bad = good.clone();
    if let [low, high, bytes @ ..] = &data[..data.len().min(4)] {
        let at = usize::from(u16::from_le_bytes([*low, *high])) % (bad.len() - 2);
        bad[at..at + bytes.len()].copy_from_slice(bytes);
    }
    match batch::decode(&bad, &PLACE) {
        Ok(found) => {
            assert_eq!(found, written);
            let same = bad[512..5512] == good[512..5512];
            assert_eq!(found.check_payload(&bad[512..]).is_ok(), same);
        }
        Err(_) => assert!(bad[..512] != good[..512]),
    }
});
