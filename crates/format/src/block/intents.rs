//! A page of the write-intent map.
//!
//! ```text
//!  0  4  magic "LWIM"        8  8  epoch of the run that wrote it      24  4  pages that the log then had
//!  4  4  CRC-32C of 8..4096 16  8  number of the page                  28  4  its generation, the low 32 bits
//!                                                                      32     4,064 bytes of bits, region 0 first
//! ```
//!
//! A bit that is not set says that the map on the device knows all that became of its region. That holds only of a map whose
//! log is as long as it was when the page was written: a log that has lost its end to damage looks like a shorter one.

use super::log::Reach;
use crate::{PAGE_SIZE, le};

/// Regions of a page.
pub const REGIONS_PER_PAGE: usize = (PAGE_SIZE - HEADER) * 8;
const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"LWIM";

/// Writes page `number` with `bits` (one a region, eight to a byte, at most 4,064 bytes) to `out`: what a map says whose log
/// reaches as far as `reach`.
///
/// # Panics
/// If `out` is not a page or `bits` are too many.
pub fn encode(out: &mut [u8], number: u64, epoch: u64, reach: Reach, bits: &[u8]) {
    assert!(out.len() == PAGE_SIZE && bits.len() <= PAGE_SIZE - HEADER, "not a page of intents");
    out.fill(0);
    out[..4].copy_from_slice(&MAGIC);
    out[8..16].copy_from_slice(&epoch.to_le_bytes());
    out[16..24].copy_from_slice(&number.to_le_bytes());
    // (A log of 16 TiB would be of a device that no layout has.)
    out[24..28].copy_from_slice(&(reach.pages as u32).to_le_bytes());
    out[28..32].copy_from_slice(&(reach.generation as u32).to_le_bytes());
    out[HEADER..HEADER + bits.len()].copy_from_slice(bits);
    let crc = crc32c::crc32c(&out[8..]);
    out[4..8].copy_from_slice(&crc.to_le_bytes());
}

/// The bits of page `number`, or nothing if the page is not whole: then every region of it counts as set. And how far the
/// log must reach for them to hold, if the page says so (earlier versions did not): `generation` is the superblock's, which
/// completes what the page has of one.
pub fn decode(page: &[u8], number: u64, generation: u64) -> Option<(&[u8], Option<Reach>)> {
    if page.len() != PAGE_SIZE || page[..4] != MAGIC || le(&page[16..24]) != number {
        return None;
    }
    if le(&page[4..8]) as u32 != crc32c::crc32c(&page[8..]) {
        return None;
    }
    let reach = (le(&page[24..32]) != 0).then(|| {
        let behind = (generation as u32).wrapping_sub(le(&page[28..32]) as u32).cast_signed();
        Reach {
            generation: generation.saturating_add_signed(-i64::from(behind)),
            pages: le(&page[24..28]),
        }
    });
    Some((&page[HEADER..], reach))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_comes_back_and_damage_is_seen() {
        let mut page = vec![0; PAGE_SIZE];
        let reach = Reach { generation: (7 << 32) + 5, pages: 11 };
        encode(&mut page, 3, 9, reach, &[1, 2, 3]);
        let of = |generation| {
            let (bits, reach) = decode(&page, 3, generation).unwrap();
            assert_eq!(&bits[..4], &[1, 2, 3, 0]);
            reach
        };
        // What a page has of a generation is completed by one that is near.
        for generation in [reach.generation - 1, reach.generation, reach.generation + (1 << 20)] {
            assert_eq!(of(generation), Some(reach));
        }
        assert_ne!(of(5), Some(reach));
        assert_eq!(decode(&page, 4, 5), None);
        for at in [0, 5, 9, 17, 25, 30, 40, 4095] {
            let mut bad = page.clone();
            bad[at] ^= 0x10;
            assert_eq!(decode(&bad, 3, 5), None, "byte {at}");
        }
    }
}
