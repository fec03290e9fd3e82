//! Replays what `larder kv --record` and `larder block serve --record` wrote: the same engine, under the times that were recorded, decision by decision.
//!
//! - [`RecordFile`]: the file, checked, with the streams in it.
//! - [`replay`]: feeds them to shards and log, and reports the first decision that differs.
//! - [`replay_block`]: the same for the block cache, whose streams need nothing of each other.
//! - [`flip_decision`]: changes one recorded decision, so that tests can see it found.
//!
//! Shards run in the order in which the log asks for them: before each of its calls the shard in question is brought up to it
//! (see [`larder_engine::kv::record`]). Maintenance and the names of applications are replayed alone, each from what it was told and answered.

mod beside;
mod block;
mod error;
mod flash;
mod flip;
mod reader;
mod run;

pub use block::{BlockReport, replay_block};
pub use error::ReplayError;
pub use flip::{flip_block_decision, flip_decision};
pub use reader::{RecordFile, Recorded, Setup, Stream, recorded_by};
pub use run::{Difference, Report, replay};
