//! What a block cache is where nobody says otherwise: the servers' flags, the library and the simulator begin with these. And the least
//! and the most of what can be said.

use larder_base::ByteSize;
use larder_format::block::Placement;
use larder_policy::block::{EvictionBy, VictimPolicy};

use super::readahead;
use crate::block::WriteMode;
use crate::block::map::Replacement;

/// Bytes of a line.
pub const LINE: u32 = 4096;
/// Where a line may lie.
pub const PLACEMENT: Placement = Placement::Sets(8);
/// Shards.
pub const SHARDS: u32 = 8;
/// Which line goes.
pub const REPLACEMENT: Replacement = Replacement::Lru;
/// Which segment of a log is reclaimed.
pub const RECLAIM: VictimPolicy = VictimPolicy::Fifo;

/// Who makes room in a log.
pub fn evict() -> EvictionBy {
    EvictionBy::default()
}

/// What a write does to the cache.
pub const WRITE: WriteMode = WriteMode::WriteThrough;
/// Lines on their way to flash behind replies, over all shards.
pub const FILL_MEMORY: ByteSize = ByteSize::mib(64);
/// The least and the most of it.
pub const FILL_MEMORY_BOUNDS: (ByteSize, ByteSize) = (ByteSize::mib(1), ByteSize::gib(1024));
/// How far is read ahead of clients that read in sequence.
pub const READAHEAD: ByteSize = readahead::DEFAULT;
/// Threads that serve requests.
pub const WORKERS: usize = 2;

/// A size that cannot be asked for. It reads as what follows the size's name and value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Of [`FILL_MEMORY`].
    #[error(
        "it must be from {} to {}: without any nothing would be cached",
        FILL_MEMORY_BOUNDS.0,
        FILL_MEMORY_BOUNDS.1
    )]
    FillMemory,
    /// Of [`READAHEAD`].
    #[error("it must be at most {} (0: not at all)", readahead::FURTHEST)]
    ReadAhead,
}

/// Whether so many bytes may be on their way to flash.
///
/// # Errors
/// [`SizeError::FillMemory`].
pub fn check_fill_memory(bytes: ByteSize) -> Result<(), SizeError> {
    let (least, most) = FILL_MEMORY_BOUNDS;
    if (least..=most).contains(&bytes) { Ok(()) } else { Err(SizeError::FillMemory) }
}

/// Whether so far can be read ahead.
///
/// # Errors
/// [`SizeError::ReadAhead`].
pub fn check_readahead(bytes: ByteSize) -> Result<(), SizeError> {
    if bytes <= readahead::FURTHEST { Ok(()) } else { Err(SizeError::ReadAhead) }
}
