//! The block cache's on-flash pages of any bytes, with checksums that hold: superblock, log, snapshot, table, intents.
#![no_main]

use larder_base::UnixSecs;
use larder_format::block::superblock::{BlockSuperblock, FEATURE_WRITE_LOG, WriteLogArea};
use larder_format::block::{Layout, intents, log, superblock, table};
use larder_format::{PAGE_SIZE, Uuid};
use libfuzzer_sys::fuzz_target;

/// A page with that beginning and the fuzzer's bytes behind it, sealed.
fn page(magic: &[u8], generation: u64, number: u64, data: &[u8]) -> Vec<u8> {
    let mut page = vec![0; PAGE_SIZE];
    let n = data.len().min(PAGE_SIZE - 24);
    page[24..24 + n].copy_from_slice(&data[..n]);
    page[..4].copy_from_slice(magic);
    page[8..16].copy_from_slice(&generation.to_le_bytes());
    page[16..24].copy_from_slice(&number.to_le_bytes());
    let crc = crc32c::crc32c(&page[8..]);
    page[4..8].copy_from_slice(&crc.to_le_bytes());
    page
}

/// A superblock with a write log, if the first byte is odd, and the fuzzer's bytes over its fields, each where a pair of bytes
/// says; sealed.
fn sealed_superblock(data: &[u8]) -> Option<Vec<u8>> {
    let (first, data) = data.split_first()?;
    let layout = Layout::new(64 << 20, 4096, 4, 2).ok()?;
    let mut sb = BlockSuperblock::format(Uuid([7; 16]), 99, 5, layout, UnixSecs(1));
    if first % 2 == 1 {
        sb.set_write_log(WriteLogArea::of(layout.device, 64 << 20, 512).ok()?);
    }
    let mut bytes = sb.encode();
    for change in data.chunks_exact(4) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % 4096;
        bytes[at..at + 2].copy_from_slice(&change[2..]);
    }
    let crc = crc32c::crc32c(&bytes[12..]);
    bytes[8..12].copy_from_slice(&crc.to_le_bytes());
    Some(bytes)
}

fuzz_target!(|data: &[u8]| {
    if let Some(Ok(found)) = sealed_superblock(data).map(|bytes| BlockSuperblock::decode(&bytes)) {
        assert_eq!(found.write_log.is_some(), found.incompatible & FEATURE_WRITE_LOG != 0);
        let again = BlockSuperblock::decode(&found.encode());
        assert_eq!(again.as_ref(), Ok(&found));
    }
    let (a, b) = data.split_at(data.len() / 2);
    if let Ok(chosen) = superblock::choose(a, b) {
        let again = BlockSuperblock::decode(&chosen.encode());
        assert_eq!(again.as_ref(), Ok(&chosen));
    }
    if let Ok(found) = BlockSuperblock::decode(data) {
        let again = BlockSuperblock::decode(&found.encode());
        assert_eq!(again.as_ref(), Ok(&found));
    }
    if let Some(found) = log::decode_log(&page(b"LMLG", 7, 3, data), 7, 3) {
        assert!(found.records.len() <= log::RECORDS_PER_PAGE);
        let mut out = vec![0; PAGE_SIZE];
        log::encode_log(&mut out, found.head, &found.records);
        assert_eq!(log::decode_log(&out, 7, 3), Some(found));
    }
    if let Some(slots) = log::decode_snapshot(&page(b"LMSN", 7, 3, data), 7, 3) {
        assert!(slots.count() <= log::SLOTS_PER_PAGE);
    }
    if let Some(slots) = table::decode(&page(b"LMTP", 7, 3, data), 7, 3) {
        let slots: Vec<_> = slots.collect();
        assert_eq!(slots.len(), table::SLOTS_PER_PAGE);
        let mut out = vec![0; PAGE_SIZE];
        table::encode(&mut out, 7, 3, slots.iter().copied());
        assert!(table::decode(&out, 7, 3).is_some_and(|again| again.eq(slots)));
    }
    assert!(intents::decode(&page(b"LWIM", 0, 3, data), 3, 7).is_some());
    assert!(log::decode_log(data, 7, 3).is_none() || data.len() == PAGE_SIZE);
});
