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
    for (i, piece) in bytes.chunks(PIECE).enumerate() {
        let number = first.saturating_add(i);
        if sums.get(number) != Some(&crc32c::crc32c(piece)) {
            return Err(number);
        }
    }
    Ok(())
}
