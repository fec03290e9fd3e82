//! Records of runs (`larder kv --record`): the records of a chunk, and whole files.
#![no_main]

use std::io::Cursor as Bytes;

use larder_base::{HashKey, KeyHasher};
use larder_engine::kv::record::{Clocks, Cursor, decode};
use larder_sim::replay::{RecordFile, replay};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let (hasher, filler) = (KeyHasher::new(HashKey([1; 16])), [0; 256]);
    let (mut cursor, mut clocks) = (Cursor::new(data), Clocks::default());
    while cursor.position() < data.len() {
        if decode(&mut cursor, &mut clocks, &hasher, &filler).is_err() {
            break;
        }
    }
    if let Ok(mut file) = RecordFile::open(Bytes::new(data)) {
        let _ = replay(&mut file, 64 << 20, &mut |_| {});
    }
});
