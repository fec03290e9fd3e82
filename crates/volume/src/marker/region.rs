//! A marker in 8 KiB that are there before it is: of an NBD export, or of memory.
//!
//! Zeros are no marker. A first write that was cut short is none either: it leaves one copy that begins as a marker does beside zeros,
//! which no later write does.

use larder_format::block::marker::{MAGIC, Marker, MarkerError};

use super::place::copy_at;

/// What is written whole or not at all, bytes.
pub(crate) const SECTOR: usize = 512;

/// Something that can be written.
pub(crate) trait Region {
    /// Why it could not be.
    type Error;

    /// Writes these bytes there, durable when it returns.
    fn put(&mut self, at: u64, bytes: &[u8]) -> Result<(), Self::Error>;
}

/// It is what is there before the first marker is complete.
pub(crate) fn is_nothing([a, b]: &[Vec<u8>; 2]) -> bool {
    let zero = |copy: &[u8]| copy.iter().all(|&b| b == 0);
    let torn =
        |copy: &[u8]| copy.starts_with(&MAGIC) && Marker::decode(copy) == Err(MarkerError::Damaged);
    (zero(a) && (zero(b) || torn(b))) || (zero(b) && torn(a))
}

/// Both copies where nothing was.
pub(crate) fn create<R: Region>(
    region: &mut R,
    first: usize,
    bytes: &[u8],
) -> Result<(), R::Error> {
    // So that whatever is torn of the rest is known for what it is.
    region.put(copy_at(first), &bytes[..SECTOR])?;
    replace(region, first, bytes)
}

/// Both copies, one after the other.
pub(crate) fn replace<R: Region>(
    region: &mut R,
    first: usize,
    bytes: &[u8],
) -> Result<(), R::Error> {
    region.put(copy_at(first), bytes)?;
    region.put(copy_at(first + 1), bytes)
}

/// Zeros.
#[cfg(any(test, feature = "testing", feature = "nbd"))]
pub(crate) fn clear<R: Region>(region: &mut R) -> Result<(), R::Error> {
    use larder_format::block::marker::COPY_BYTES;
    // A copy that is torn stands beside one that is whole; or beside zeros, and then it still begins as a marker does.
    region.put(copy_at(1), &[0; COPY_BYTES])?;
    region.put(SECTOR as u64, &[0; COPY_BYTES - SECTOR])?;
    region.put(copy_at(0), &[0; SECTOR])
}
