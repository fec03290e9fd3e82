//! What a block cache is where nobody says otherwise: the servers' flags, the library and the simulator begin with these.

use larder_base::ByteSize;
use larder_format::block::Placement;

use crate::block::WriteMode;

/// Bytes of a line.
pub const LINE: u32 = 4096;
/// Where a line may lie.
pub const PLACEMENT: Placement = Placement::Sets(8);
/// Shards.
pub const SHARDS: u32 = 8;
/// What a write does to the cache.
pub const WRITE: WriteMode = WriteMode::HddSsd;
/// Lines on their way to flash behind replies, over all shards.
pub const FILL_MEMORY: ByteSize = ByteSize::mib(64);
/// How far is read ahead of clients that read in sequence.
pub const READAHEAD: ByteSize = ByteSize::mib(1);
/// Threads that serve requests.
pub const WORKERS: usize = 2;
