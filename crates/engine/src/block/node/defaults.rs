//! What a block cache is where nobody says otherwise: the servers' flags, the library and the simulator begin with these. And the least
//! and the most of what can be said.

use larder_base::ByteSize;
use larder_format::block::Placement;
use larder_policy::block::{EvictionBy, VictimPolicy};

use super::readahead;
use crate::block::WriteMode;
use crate::block::map::{Making, Replacement};
use crate::block::writeback::volume_log::Order;

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
/// The least and the most of it. What volumes that write back have on their way to their stores may have as much again.
pub const FILL_MEMORY_BOUNDS: (ByteSize, ByteSize) = (ByteSize::mib(1), ByteSize::gib(1024));
/// How far is read ahead of clients that read in sequence.
pub const READAHEAD: ByteSize = readahead::DEFAULT;
/// Batches of the write log under way at a time.
pub const LOG_DEPTH: u32 = 2;
/// Bytes of what goes to a store in one window, at most.
pub const WINDOW: ByteSize = ByteSize::mib(64);
/// Bytes of an epoch, at most: it is in memory when it goes to the journal.
pub const EPOCH: ByteSize = ByteSize::mib(16);
/// Bytes of what goes to a volume's store at once in this order, at most: of a window, or of an epoch.
pub fn window(order: Order) -> u64 {
    match order {
        Order::Journaled(_) => EPOCH.0,
        Order::Any | Order::Ordered(_) => WINDOW.0,
    }
}

/// Requests to the store of a volume that are under way at a time for its destage.
pub const DESTAGE_DEPTH: u32 = 64;
/// The write log has one part in so many of a cache device that is to have one,
pub const LOG_PART: u64 = 10;
/// and at most this.
pub const LOG_MOST: ByteSize = ByteSize::gib(8);
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

/// What was said of who makes room in a log of segments, for a cache that is none. It reads as what follows the setting's name and value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it is of the placement full alone, and this cache has {placement}: leave it out")]
pub struct OfFullAlone {
    /// Which setting: `reclaim` or `evict`.
    pub what: &'static str,
    /// Its value, as it is written.
    pub value: String,
    /// What the cache is.
    pub placement: Placement,
}

/// Whether what is said of who makes room is said of this placement: which segment is reclaimed, and who evicts, are of a log of segments.
///
/// # Errors
/// [`OfFullAlone`], where something other than the default is said.
pub fn check_making(making: &Making, placement: Placement) -> Result<(), OfFullAlone> {
    let Making { reclaim, evict, .. } = *making;
    let (what, value) = match placement {
        Placement::Full => return Ok(()),
        _ if reclaim != RECLAIM => ("reclaim", reclaim.to_string()),
        _ if evict != self::evict() => ("evict", evict.to_string()),
        _ => return Ok(()),
    };
    Err(OfFullAlone { what, value, placement })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_makes_room_is_said_of_a_log_of_segments_alone() {
        let usual = Making::default();
        let greedy = Making { reclaim: VictimPolicy::Greedy, ..usual };
        let by_cache = Making { evict: EvictionBy::Cache, ..usual };
        let others = [Placement::Sets(8), Placement::Sets(1), Placement::Sparse(64 << 20)];
        for making in [usual, greedy, by_cache] {
            assert_eq!(check_making(&making, Placement::Full), Ok(()));
        }
        for placement in others {
            assert_eq!(check_making(&usual, placement), Ok(()));
            let refused = |making| check_making(&making, placement).unwrap_err();
            let (of_reclaim, of_evict) = (refused(greedy), refused(by_cache));
            assert_eq!((of_reclaim.what, &of_reclaim.value[..]), ("reclaim", "greedy"));
            assert_eq!((of_evict.what, &of_evict.value[..]), ("evict", "cache"));
        }
        let said = check_making(&greedy, Placement::Sets(8)).unwrap_err().to_string();
        assert_eq!(
            said,
            "it is of the placement full alone, and this cache has set:8: leave it out"
        );
    }
}
