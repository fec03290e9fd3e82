//! The key-value engine: shards over DRAM and flash, and the log that moves objects between them.

mod access_times;
mod ahead;
pub mod api;
mod clean;
mod config;
mod evicted;
mod expire;
mod flash;
mod index_room;
mod index_size;
mod log;
mod marks;
pub mod node;
mod ops;
mod planted;
pub mod record;
mod resize;
mod saved;
mod shard;
mod stats;
mod too_large;
mod validate;
mod wait;

pub use clean::{Destination, Heat, StageReport, StageSink, Staged};
pub use config::{
    ClockMode, DriveSegments, Drives, FlashGeometry, MOST_DRIVES, Part, ShardConfig, object_fits,
};
pub use evicted::Evicted;
pub use index_room::IndexFull;
pub use index_size::IndexSteps;
pub use log::{
    Ends, FlashLog, IoFailed, LogConfig, LogStats, OwnerOf, SegmentIo, SegmentState, SegmentTable,
    Shards, Step,
};
pub use planted::Planted;
pub use resize::Resizable;
pub use saved::Saved;
pub use shard::KvShard;
pub use stats::{AppStats, AppTable, ShardStats};
pub use too_large::TooLarge;
pub use wait::Room;
