//! Two copies of a superblock of any bytes; half of the time with a checksum that holds, to get past it.
#![no_main]

use larder_format::superblock::{MAGIC, VERSION, choose};
use larder_format::{PAGE_SIZE, Signature, Superblock};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let (a, b) = data.split_at(data.len().min(PAGE_SIZE));
    if let Ok(chosen) = choose(a, b) {
        assert_eq!(Superblock::decode(&chosen.superblock.encode()[..]), Ok(chosen.superblock));
    }
    let _ = Signature::detect(data);
    let _ = Signature::detect_tail(data);

    let mut page = vec![0; PAGE_SIZE];
    page[..8].copy_from_slice(&MAGIC);
    page[12..16].copy_from_slice(&VERSION.to_le_bytes());
    let body = &data[..data.len().min(PAGE_SIZE - 16)];
    page[16..16 + body.len()].copy_from_slice(body);
    let crc = crc32c::crc32c(&page[12..]);
    page[8..12].copy_from_slice(&crc.to_le_bytes());
    if let Ok(superblock) = Superblock::decode(&page) {
        assert_eq!(Superblock::decode(&superblock.encode()[..]).as_ref(), Ok(&superblock));
        let _ = (superblock.start(1, 2), superblock.stop(1), superblock.first_generation());
    }
});
