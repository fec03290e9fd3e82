//! Records of a run of the block cache: what every shard, the log, maintenance, each thread's queue and each volume's
//! admission were told, and what they decided, so that the same code can be shown to decide alike.
//!
//! The file is that of [`kv::record`](crate::kv::record) (chunks of streams behind a setup), the setup is a
//! [`BlockRunSetup`]. Streams `0..shards` are the shards', the next one is the log's, then come maintenance's and what happens to
//! volumes ([`VolumesTape`]: they come, grow and go), those of the queues, one a worker and one for who prefetches, and those
//! behind them are the volumes' admission: first of those that were there at the beginning, in the setup's order, then of each that came later. The first record of a stream
//! of the latter says of what size it was. No stream needs another: what a shard asks its caller (whether admission would
//! rather have another line), what log and maintenance ask the shards, and what a queue asks of volumes, rules, admission, budget
//! and its mailbox are answers in the stream of who asked, and decisions in the stream of who answered.
//!
//! ```text
//! record   u8 what was told; varint nanoseconds since the record before (zigzag; since 0 at the start of a chunk);
//!          its fields; varint number of answers that it was given, and the answers, eight to a byte;
//!          u32 digest of the decision: everything that was asked for, in its order, and what was returned
//! ```
//!
//! Bytes of lines are not recorded, only the checksums that the engine is given. Of the log's calls to shards numbers are
//! recorded and not the records themselves, which are decisions of the shards. Records of queues and maintenance, which are
//! beside the shards, are [`node::record`](crate::block::node::record)'s.

mod admission;
pub(in crate::block) mod digest;
pub(in crate::block) mod log;
mod setup;
mod shard;
pub(in crate::block) mod tape;
mod volumes;

pub use admission::{RecordedAdmission, later_volume};
pub use log::RecordedLog;
pub use setup::{BlockRunSetup, BlockSetupError, VolumeSetup, Whose};
pub use shard::RecordedShard;
pub use tape::{Again, BlockTape, Replayed, SharedTape, StreamReader};
pub use volumes::{Arrival, ReplayedVolumes, VolumesTape};
