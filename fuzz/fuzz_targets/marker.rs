//! The marker beside a backing store: any bytes, with a checksum that holds, alone and as one of two copies.
#![no_main]

use larder_format::block::marker::{COPY_BYTES, MAGIC, Marker, choose};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = Marker::decode(data);
    let (a, b) = data.split_at(data.len() / 2);
    let _ = choose(a, b);
    let sealed = |data: &[u8]| {
        let mut copy = vec![0; COPY_BYTES];
        let n = data.len().min(COPY_BYTES - 16);
        copy[16..16 + n].copy_from_slice(&data[..n]);
        copy[..8].copy_from_slice(&MAGIC);
        copy[12..16].copy_from_slice(&1u32.to_le_bytes());
        let crc = crc32c::crc32c(&copy[12..]);
        copy[8..12].copy_from_slice(&crc.to_le_bytes());
        copy
    };
    let (a, b) = (sealed(a), sealed(b));
    if let Ok(found) = Marker::decode(&a) {
        assert_eq!(Marker::decode(&found.encode()), Ok(found));
    }
    if let Ok(chosen) = choose(&a, &b) {
        assert!(chosen.other_whole);
        for copy in [&a, &b] {
            assert!(
                chosen.marker.number >= u64::from_le_bytes(copy[16..24].try_into().expect("8"))
            );
        }
    }
});
