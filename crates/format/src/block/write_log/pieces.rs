//! Checksums of payload: a CRC-32C for each 4 KiB of a record, counted from the record's first byte; the last piece may be
//! shorter. So part of a record can be read and verified without the rest, and a copy of a record keeps its checksums.

use std::ops::Range;

/// Bytes of a piece.
pub const PIECE: usize = 4096;

/// Pieces of a payload of `bytes`.
pub fn count(bytes: u64) -> u64 {
    bytes.div_ceil(PIECE as u64)
}

/// The checksums of a payload.
pub fn sums(payload: &[u8]) -> impl Iterator<Item = u32> + '_ {
    payload.chunks(PIECE).map(crc32c::crc32c)
}

/// What to read so that the bytes `part` of a payload of `length` bytes can be verified: `part`, rounded out to whole
/// pieces. Its start divided by [`PIECE`] is the first piece for [`check`].
pub fn cover(part: Range<u64>, length: u64) -> Range<u64> {
    let piece = PIECE as u64;
    let end = part.end.min(length);
    if part.start >= end {
        return 0..0;
    }
    part.start / piece * piece..end.div_ceil(piece).saturating_mul(piece).min(length)
}

/// Verifies `bytes`, which begin with piece `first` of a payload whose checksums are `sums`.
///
/// # Errors
/// The first piece that is damaged, or that there is no checksum for.
pub fn check(sums: &[u32], first: usize, bytes: &[u8]) -> Result<(), usize> {
    for (number, piece) in (first..).zip(bytes.chunks(PIECE)) {
        if sums.get(number) != Some(&crc32c::crc32c(piece)) {
            return Err(number);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_part_is_verified_alone(
            seed: u64, length in 1usize..20_000, start in 0usize..20_000, len in 1usize..9_000, rot: usize,
        ) {
            let mut payload = vec![0; length];
            larder_base::Rng::new(seed).fill(&mut payload);
            let sums: Vec<u32> = sums(&payload).collect();
            prop_assert_eq!(sums.len() as u64, count(length as u64));
            let part = cover(start as u64..(start + len) as u64, length as u64);
            let (from, to) = (part.start as usize, part.end as usize);
            let end = (start + len).min(length);
            prop_assert!(start >= end || from <= start && end <= to);
            let first = from / PIECE;
            prop_assert_eq!(check(&sums, first, &payload[from..to]), Ok(()));
            let rot = rot % length;
            payload[rot] ^= 4;
            let hit = (from..to).contains(&rot);
            let want = if hit { Err(rot / PIECE) } else { Ok(()) };
            prop_assert_eq!(check(&sums, first, &payload[from..to]), want);
        }
    }

    #[test]
    fn pieces_without_a_checksum_and_cut_pieces_are_damaged() {
        let payload = [7; 5000];
        let sums: Vec<u32> = sums(&payload).collect();
        assert_eq!(check(&sums, 0, &payload[..4999]), Err(1));
        assert_eq!(check(&sums[..1], 0, &payload), Err(1));
        assert_eq!(check(&sums, usize::MAX, &[]), Ok(()));
        assert_eq!(cover(9..4, 100), 0..0);
        assert_eq!(cover(u64::MAX - 1..u64::MAX, u64::MAX), u64::MAX / 4096 * 4096..u64::MAX);
    }
}
