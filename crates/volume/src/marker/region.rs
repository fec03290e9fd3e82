//! A marker in 8 KiB that are there before it is: of an NBD export, or of memory.
//!
//! Zeros are no marker. A first write that was cut short is none either: it leaves one copy that begins as a marker does beside zeros,
//! which no later write does.

use larder_format::block::marker::{COPY_BYTES, MAGIC, Marker, MarkerError};

use super::MarkerIoError;
use super::place::copy_at;

/// What is written whole or not at all, bytes.
pub(super) const SECTOR: usize = 512;

/// Something that can be written.
pub(super) trait Region {
    /// Writes these bytes there, durable when it returns.
    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<(), MarkerIoError>;
}

/// It is what is there before the first marker is complete.
pub(super) fn is_nothing([a, b]: &[Vec<u8>; 2]) -> bool {
    let zero = |copy: &[u8]| copy.iter().all(|&b| b == 0);
    let torn =
        |copy: &[u8]| copy.starts_with(&MAGIC) && Marker::decode(copy) == Err(MarkerError::Damaged);
    (zero(a) && (zero(b) || torn(b))) || (zero(b) && torn(a))
}

/// Both copies where nothing was.
pub(super) fn create(
    region: &mut impl Region,
    first: usize,
    bytes: &[u8],
) -> Result<(), MarkerIoError> {
    // So that whatever is torn of the rest is known for what it is.
    region.put(copy_at(first), &bytes[..SECTOR])?;
    replace(region, first, bytes)
}

/// Both copies, one after the other.
pub(super) fn replace(
    region: &mut impl Region,
    first: usize,
    bytes: &[u8],
) -> Result<(), MarkerIoError> {
    region.put(copy_at(first), bytes)?;
    region.put(copy_at(first + 1), bytes)
}

/// Zeros.
pub(super) fn clear(region: &mut impl Region) -> Result<(), MarkerIoError> {
    // A copy that is torn stands beside one that is whole; or beside zeros, and then it still begins as a marker does.
    region.put(copy_at(1), &[0; COPY_BYTES])?;
    region.put(SECTOR as u64, &[0; COPY_BYTES - SECTOR])?;
    region.put(copy_at(0), &[0; SECTOR])
}
