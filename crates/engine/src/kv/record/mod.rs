//! Records of a run: what every shard and the log were told, and what they decided, so that the same code under a virtual
//! clock can be shown to decide alike.
//!
//! A *stream* is what one shard, or the log, was told, in its order: there is no order over all shards, and none is needed.
//! The log calls shards; each call is a record of that shard's stream ([`Input::LogCall`]), which says where among its
//! requests it fell. Who replays runs the log, and before each call brings the shard in question up to it: shards and log then
//! see what they saw, whichever way the threads were interleaved.
//!
//! What is recorded are **inputs** (requests with their time, flushes, what flash reads and writes came to, models) and after each
//! the **decision**: the answer, what was evicted, and a digest of the shard's counters, hands and tables. Values are
//! recorded by their length, since nothing depends on their bytes, but for those short enough to be numbers, which
//! `incr` reads. What flash holds is not recorded: replay writes the same segments, with other bytes in the values.
//!
//! ```text
//! record  input, decision: see `input` and `decision`; times are differences within the chunk
//! ```
//! Records lie in the chunks of a file ([`larder_format::recording`]). Streams `0..shards` are the shards', then comes the log's, where
//! there is flash, then that of maintenance (when it comes, what it asks for and what it is answered) and that of the names of
//! applications. Those two need no other stream to be replayed: [`MachineReader`] reads them.

mod decision;
mod input;
mod machine;
mod recorded;
mod setup;
mod tape;

pub use crate::record::{Again, Replayed};
pub(in crate::kv) use decision::replay;
pub use decision::{Decision, What};
pub use input::{Clocks, Got, Input, Io, MAX_KEPT_VALUE, Op as RecordedOp, decode};
pub(in crate::kv) use machine::{Heard, unknown};
pub use machine::{MachineReader, MachineTape};
pub use recorded::{RecordedLog, RecordedShard};
pub use setup::{
    AppsSetup, DriveSetup, LogSetup, RunSetup, SetupError, ShardSeed, ShardSetup, Whose,
};
pub use tape::Tape;
