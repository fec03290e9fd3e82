//! What lies on flash, as bytes: superblock, records, segments, checkpoints.
//!
//! Everything here is a function over bytes: no file is opened, no clock read. Integers are little endian.
//!
//! ```text
//! flash   0        4 KiB     8 KiB            1 MiB
//!         +--------+---------+----------------+-----------+-----------+-- ... --+-----------+
//!         | super- | super-  | reserved, zero | segment 1 | segment 2 |         | segment n |   n <= 65,520
//!         | block A| block B |                |           |           |         |           |
//!         +--------+---------+----------------+-----------+-----------+-- ... --+-----------+
//! small   a segment of 4 KiB pages; records back to back from the start of a page, zeros after the last
//! large   a segment of records at multiples of 64 bytes, zeros between and after them; the last may go on in the next segment
//! ```
//!
//! There is no directory and no log on flash. The index lives in DRAM and outlives the process in shared memory (and a
//! clean stop in a [`checkpoint`] file); what a segment holds is found by walking its records ([`walk`]).

#![forbid(unsafe_code)]

pub mod block;
pub mod checkpoint;
pub mod geometry;
pub mod memory_file;
pub mod page;
pub mod record;
pub mod recording;
pub mod signature;
pub mod superblock;

pub use geometry::{Geometry, GeometryError};
pub use page::{Find, Kind, Walk, find, find_extent, walk};
pub use record::{
    Claimed, Filling, Record, RecordMeta, claimed, encode_head, encode_into, record_len,
};
pub use signature::Signature;
pub use superblock::{Superblock, SuperblockError, Uuid};

/// The unit of a small segment, and of every flash read of a small object: 4 KiB.
pub const PAGE_SIZE: usize = 4096;

/// Reads a little-endian integer of `bytes.len()` (at most 8) bytes.
pub(crate) fn le(bytes: &[u8]) -> u64 {
    debug_assert!(bytes.len() <= 8);
    bytes.iter().rev().fold(0, |value, &b| value << 8 | u64::from(b))
}
