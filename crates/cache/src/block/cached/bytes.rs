//! Bytes on their way to the cache device.

use larder_runtime::{AlignedBuf, Payload};

/// CRC-32C of each line.
pub(in crate::block) fn crcs(bytes: &[u8], line: usize) -> Vec<u32> {
    bytes.chunks(line).map(crc32c::crc32c).collect()
}

/// The same bytes where direct I/O takes them from.
pub(in crate::block) fn aligned(bytes: Payload) -> Payload {
    if (bytes.as_ptr() as usize).is_multiple_of(4096) {
        return bytes;
    }
    copy(&bytes)
}

pub(in crate::block) fn copy(bytes: &[u8]) -> Payload {
    let mut copy = AlignedBuf::zeroed(bytes.len());
    copy.copy_from_slice(bytes);
    Payload::new(copy)
}
