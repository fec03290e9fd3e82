//! A page of the write-intent map.
//!
//! ```text
//!  0  4  magic "LWIM"        8  8  epoch of the run that wrote it      24  8  zero
//!  4  4  CRC-32C of 8..4096 16  8  number of the page                  32     4,064 bytes of bits, region 0 first
//! ```

use crate::{PAGE_SIZE, le};

/// Regions of a page.
pub const REGIONS_PER_PAGE: usize = (PAGE_SIZE - HEADER) * 8;
const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"LWIM";

/// Writes page `number` with `bits` (one a region, eight to a byte, at most 4,064 bytes) to `out`.
///
/// # Panics
/// If `out` is not a page or `bits` are too many.
pub fn encode(out: &mut [u8], number: u64, epoch: u64, bits: &[u8]) {
    assert!(out.len() == PAGE_SIZE && bits.len() <= PAGE_SIZE - HEADER, "not a page of intents");
    out.fill(0);
    out[..4].copy_from_slice(&MAGIC);
    out[8..16].copy_from_slice(&epoch.to_le_bytes());
    out[16..24].copy_from_slice(&number.to_le_bytes());
    out[HEADER..HEADER + bits.len()].copy_from_slice(bits);
    let crc = crc32c::crc32c(&out[8..]);
    out[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// The bits of page `number`, or nothing if the page is not whole: then every region of it counts as set.
pub fn decode(page: &[u8], number: u64) -> Option<&[u8]> {
    if page.len() != PAGE_SIZE || page[..4] != MAGIC || le(&page[16..24]) != number {
        return None;
    }
    (le(&page[4..8]) as u32 == crc32c::crc32c(&page[8..])).then(|| &page[HEADER..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_comes_back_and_damage_is_seen() {
        let mut page = vec![0; PAGE_SIZE];
        encode(&mut page, 3, 9, &[1, 2, 3]);
        assert_eq!(&decode(&page, 3).unwrap()[..4], &[1, 2, 3, 0]);
        assert_eq!(decode(&page, 4), None);
        for at in [0, 5, 9, 17, 40, 4095] {
            let mut bad = page.clone();
            bad[at] ^= 0x10;
            assert_eq!(decode(&bad, 3), None, "byte {at}");
        }
    }
}
