//! The write log: what clients wrote and the backing stores do not have yet.
//!
//! The log is a row of segments of one size ([`segment::SEGMENT_BYTES`]), taken from a free list:
//!
//! ```text
//! 0         one sector                                               footer at         segment's end
//! +---------+----------------+---------+---------+-- ... --+---------+----------------+
//! | segment | batch: FRONTIER| batch   | batch   |         | batch   | footer, once   |
//! | header  | comes first    |         |         |         |         | the segment is |
//! |         |                |         |         |         |         | sealed         |
//! +---------+----------------+---------+---------+-- ... --+---------+----------------+
//!
//! batch     header: head, records, a CRC-32C for each 4 KiB of payload | payload | zeros to the end of the sector
//! ```
//!
//! * [`mod@batch`]: what one device write carries. The header's checksum covers all of the header; the payload is verified
//!   piece by piece ([`pieces`]), so a part of a long write can be read alone.
//! * [`record`]: one change of a volume, or a mark, or a FRONTIER.
//! * [`frontier`]: the payload of a FRONTIER: how far each volume's store has come, and where the log begins.
//! * [`segment`]: the header of a segment, and when a segment is full.
//! * [`footer`]: what all headers of a sealed segment said.
//! * [`chain`]: which batches count, and where the log ends.
//!
//! A segment belongs to the main chain, or is *parked*: it has records of one volume alone, copied out of the way. Each
//! parked segment is a chain of its own, with batch numbers from 1; the rules of [`chain`] hold in it as in the main chain.
//!
//! Integers are little endian. All sizes and positions are in bytes, all times in nanoseconds since the Unix epoch.

pub mod batch;
pub mod chain;
pub mod footer;
pub mod frontier;
pub mod pieces;
pub mod record;
pub mod segment;

use larder_base::{HashKey, KeyHasher};

use crate::superblock::Uuid;

pub use batch::{Batch, Head, Item, Place};
pub use chain::{Link, Verdict, Walk};
pub use footer::Footer;
pub use frontier::{Extent, Frontier, VolumeFrontier};
pub use record::{Contents, Entry, Flags, Kind, Record, Shape};
pub use segment::{Parked, Room, SegmentGeometry, SegmentGeometryError, SegmentHeader};

/// The version of the log's format that this code reads and writes.
pub const VERSION: u32 = 1;
/// Headers of batches are multiples of this, and each record's payload begins at one.
pub const BLOCK: usize = 512;

/// Why bytes are not the batch, segment header or footer that was looked for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartError {
    /// They lack the magic number: nothing of this kind was written here.
    #[error("nothing of this kind is here")]
    Absent,
    /// It is longer than the bytes at hand, if it is whole: more must be read.
    #[error("{need} bytes are needed, {have} are at hand")]
    Short {
        /// Bytes at hand.
        have: usize,
        /// Bytes that it has.
        need: usize,
    },
    /// The checksum does not hold: a write that a power cut tore, or damage.
    #[error("the checksum does not hold: torn or damaged")]
    Torn,
    /// Of a version that this code does not know.
    #[error(
        "written by version {found} of the format, this program reads version {VERSION}: use a Larder that reads version {found}"
    )]
    Version {
        /// The version it names.
        found: u32,
    },
    /// Another cache wrote it.
    #[error("written by the cache {found}")]
    Cache {
        /// The cache that wrote it.
        found: Uuid,
    },
    /// It is of the segment's earlier (or later) use.
    #[error("of generation {found} of the segment")]
    Generation {
        /// The generation it names.
        found: u64,
    },
    /// It was written to another position in the segment.
    #[error("written for position {found} of the segment")]
    Place {
        /// The position it names.
        found: u32,
    },
    /// A field cannot be, though the checksum holds: whoever wrote it made an error.
    #[error("{field} = {value} cannot be")]
    Field {
        /// Which.
        field: &'static str,
        /// What it says.
        value: u64,
    },
    /// A record cannot be, though the checksum holds.
    #[error("record {number}: {field} = {value} cannot be")]
    Record {
        /// Which, from 0.
        number: u32,
        /// Which field.
        field: &'static str,
        /// What it says.
        value: u64,
    },
}

/// A field that cannot be: its name and value.
pub(crate) type Wrong = (&'static str, u64);

/// Refuses a field unless it is `right`.
pub(crate) fn must(field: &'static str, value: u64, right: bool) -> Result<(), Wrong> {
    if right { Ok(()) } else { Err((field, value)) }
}

impl From<Wrong> for PartError {
    fn from((field, value): Wrong) -> PartError {
        PartError::Field { field, value }
    }
}

/// 128 bits that stand for `bytes`: SipHash-1-3 with a UUID as its key. It tells versions of the same thing apart; it is no
/// protection from somebody who makes collisions.
pub(crate) fn hash(key: Uuid, bytes: &[u8]) -> u128 {
    KeyHasher::new(HashKey(key.0)).hash(bytes).0
}
