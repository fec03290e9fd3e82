//! The block cache: lines of slow volumes on fast flash, write-through, never wrong.
//!
//! [`BlockShard`] is the engine: a state machine that is told of parts of clients' operations and of completions, and
//! asks for I/O through [`BlockEffects`]. It sees no bytes, no clock, no thread. [`map`] says which line lies where, for
//! each placement; [`address`] computes a line's place.

pub mod address;
pub mod api;
mod clean;
mod fill;
mod left;
pub mod log;
pub mod map;
mod merge;
pub mod node;
mod paging;
mod planted;
mod ranges;
mod read;
pub mod record;
mod regions;
mod shard;
mod slots;
mod table;
mod voids;
pub mod volumes;
mod write;
pub mod writeback;

pub use api::{
    BlockEffects, BlockLimits, BlockStats, GROUP_LINES, GroupId, IoFailed, IoId, LineId, Merge,
    OpId, Part, PartKind, SlotId, Source, Sum, UnknownWriteMode, Verdict, WriteMode,
};
pub use log::{
    FoundPage, LogFailed, LogIo, LogShards, LogStats, LogStep, MapLog, Recovered, read_table,
};
pub use paging::TableChange;
pub use planted::{Fault, Planted};
pub use shard::{BlockConfig, BlockShard, MapRecord, Regions};
