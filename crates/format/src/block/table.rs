//! A page of the table of a sparse cache: which of its slots have their lines.
//!
//! ```text
//!  0  4  magic "LMTP"        8  8  generation of the superblock    24  40  zero
//!  4  4  CRC-32C of 8..4096 16  8  page number, over all shards    64      1,008 slots of 4 bytes: checksum 3, then
//!                                                                          0x80 for a line and 0 for none
//! ```
//!
//! A slot has but one line that may lie in it, so its number need not be there. Pages are written where they lie. One that
//! is not whole, of another generation or all zeros says that nothing is there: what is lost so is refetched.

use crate::{PAGE_SIZE, le};

/// Slots of a page.
pub const SLOTS_PER_PAGE: usize = (PAGE_SIZE - HEADER) / 4;
/// Groups of a page.
pub const GROUPS_PER_PAGE: u32 = (SLOTS_PER_PAGE / 16) as u32;
const HEADER: usize = 64;
const MAGIC: [u8; 4] = *b"LMTP";
const LINE: u32 = 0x80 << 24;

/// Writes page `number` to `out`: the checksum of the line in each slot, if one is there.
///
/// # Panics
/// If `out` is not a page or the slots are more than [`SLOTS_PER_PAGE`].
pub fn encode(
    out: &mut [u8],
    generation: u64,
    number: u64,
    slots: impl ExactSizeIterator<Item = Option<u32>>,
) {
    assert!(out.len() == PAGE_SIZE && slots.len() <= SLOTS_PER_PAGE, "not a page of the table");
    out.fill(0);
    out[..4].copy_from_slice(&MAGIC);
    out[8..16].copy_from_slice(&generation.to_le_bytes());
    out[16..24].copy_from_slice(&number.to_le_bytes());
    for (bytes, sum) in out[HEADER..].chunks_exact_mut(4).zip(slots) {
        let word = sum.map_or(0, |sum| sum & !(0xff << 24) | LINE);
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    let crc = crc32c::crc32c(&out[8..]);
    out[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// The slots of page `number`, or nothing if the page is not that, and whole.
pub fn decode(
    page: &[u8],
    generation: u64,
    number: u64,
) -> Option<impl Iterator<Item = Option<u32>> + '_> {
    let whole = page.len() == PAGE_SIZE
        && page[..4] == MAGIC
        && le(&page[8..16]) == generation
        && le(&page[16..24]) == number
        && le(&page[4..8]) as u32 == crc32c::crc32c(&page[8..]);
    whole.then(|| {
        page[HEADER..].chunks_exact(4).map(|bytes| {
            let word = le(bytes) as u32;
            (word & LINE != 0).then_some(word & !(0xff << 24))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_comes_back_and_damage_is_seen() {
        let slots: Vec<Option<u32>> =
            (0..SLOTS_PER_PAGE as u32).map(|i| (i % 3 == 0).then_some(i * 16_411)).collect();
        let slots: Vec<_> = slots.into_iter().map(|s| s.map(|s| s & 0xff_ffff)).collect();
        let mut page = vec![0; PAGE_SIZE];
        encode(&mut page, 7, 3, slots.iter().copied());
        assert!(decode(&page, 7, 3).unwrap().eq(slots.iter().copied()));
        assert!(decode(&page, 8, 3).is_none() && decode(&page, 7, 4).is_none());
        for at in [0, 5, 9, 17, 40, 70, 4095] {
            let mut bad = page.clone();
            bad[at] ^= 0x10;
            assert!(decode(&bad, 7, 3).is_none(), "byte {at}");
        }
        assert!(decode(&[0; PAGE_SIZE], 0, 0).is_none());
    }
}
