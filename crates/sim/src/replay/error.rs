//! Why a record cannot be replayed.

use larder_engine::block::record::BlockSetupError;
use larder_engine::kv::record::SetupError;
use larder_format::recording::{BadRecord, FrameError};

/// Why a record cannot be replayed. Nothing is said of the engine then.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("byte {offset}: {source}")]
    Read {
        /// Where.
        offset: u64,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file is not what it should be.
    #[error("byte {offset}: {source}")]
    Frame {
        /// Where.
        offset: u64,
        /// What is wrong.
        source: FrameError,
    },
    /// A record in a sound chunk makes no sense.
    #[error("{stream}, record {number} (in the chunk at byte {offset}): {source}")]
    Record {
        /// Whose.
        stream: String,
        /// Which.
        number: u64,
        /// Where its chunk begins.
        offset: u64,
        /// What is wrong.
        source: BadRecord,
    },
    /// Chunks that do not follow one another, or streams that there are not.
    #[error("byte {offset}: {what}")]
    Order {
        /// Where.
        offset: u64,
        /// What is wrong.
        what: String,
    },
    /// The setup is not JSON of the right kind.
    #[error("the setup cannot be read: {0}")]
    Json(#[from] serde_json::Error),
    /// The setup is of no run.
    #[error("the setup cannot be used: {0}")]
    Setup(#[from] SetupError),
    /// The setup is of no run of the block cache.
    #[error("the setup cannot be used: {0}")]
    BlockSetup(#[from] BlockSetupError),
    /// What the log writes takes more memory than allowed.
    #[error(
        "record {record} of the log: what is on flash takes {held} of memory by now, and {left} are left of what may be \
         used: replay it on a larger machine, or record with less flash"
    )]
    FlashMemory {
        /// The step at which it was too much.
        record: u64,
        /// What it takes.
        held: larder_base::ByteSize,
        /// What is left beside shards and index.
        left: larder_base::ByteSize,
    },
    /// Replaying takes more memory than allowed.
    #[error(
        "replaying takes about {need} of memory for the same DRAM as the server had, and {limit} may be used: replay it \
         on a larger machine, or record a server with less"
    )]
    Memory {
        /// What it takes.
        need: larder_base::ByteSize,
        /// What it may.
        limit: larder_base::ByteSize,
    },
}
