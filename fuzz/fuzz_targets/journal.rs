//! Descriptors and commit of a journal: any bytes, with checksums that hold.
#![no_main]

use larder_format::Uuid;
use larder_format::block::journal::{COMMIT_BYTES, Commit, Descriptors};
use libfuzzer_sys::fuzz_target;

const VOLUME: Uuid = Uuid([1; 16]);

fn sealed(magic: &[u8; 8], data: &[u8], bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    let n = data.len().min(bytes - 32);
    out[32..32 + n].copy_from_slice(&data[..n]);
    out[..8].copy_from_slice(magic);
    out[12..16].copy_from_slice(&1u32.to_le_bytes());
    out[16..32].copy_from_slice(&VOLUME.0);
    let crc = crc32c::crc32c(&out[12..]);
    out[8..12].copy_from_slice(&crc.to_le_bytes());
    out
}

fuzz_target!(|data: &[u8]| {
    let _ = Descriptors::decode(data, VOLUME);
    let commit = Commit::decode(data, VOLUME);
    let _ = commit.map(|commit| commit.covers(data));
    let bytes = sealed(b"LARDERWJ", data, (32 + data.len()).next_multiple_of(4096));
    if let Ok(found) = Descriptors::decode(&bytes, VOLUME) {
        let again = found.encode();
        assert_eq!(Descriptors::decode(&again, VOLUME).as_ref(), Ok(&found));
        assert!(Commit::of(&found, &again, 1, 2, None).covers(&again));
        for entry in found.entries() {
            assert!(entry.data.end <= 1 << 40 && entry.sums.len() <= found.sums.len());
        }
    }
    if let Ok(found) = Commit::decode(&sealed(b"LARDERWC", data, COMMIT_BYTES), VOLUME) {
        assert_eq!(Commit::decode(&found.encode(), VOLUME), Ok(found));
    }
});
