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
//! file    "LRDRECRD", u32 version 2, u32 bytes of the setup, u32 CRC-32C of the setup, the setup (JSON), chunks …, end
//! chunk   u32 0x4b4e4843, u16 stream, u16 kind (0 records, 1 end), u32 payload bytes (at most 128 KiB), u32 records,
//!         u64 number of the first record in its stream, u32 CRC-32C of these fields and the payload; payload
//! end     u8 why recording ended, u32 streams, u64 records of each stream
//! record  input, decision: see `input` and `decision`; times are differences within the chunk
//! ```
//! Streams `0..shards` are the shards', `shards` is the log's; the end belongs to [`END_STREAM`]. Integers are
//! little-endian. A file without an end was cut short.

pub(crate) mod bytes;
mod decision;
mod frame;
mod input;
mod setup;
mod tape;
mod taped;

pub use bytes::{BadRecord, Cursor};
pub use decision::{Decision, What, replay};
pub use frame::{
    CHUNK_HEADER, ChunkHeader, END_STREAM, Ended, FILE_HEADER, FrameError, MAX_PAYLOAD, MAX_SETUP,
    VERSION, end_bytes, end_chunk, file_header, parse_end, parse_file_header, seal,
};
pub use input::{Clocks, Got, Input, Io, MAX_KEPT_VALUE, Op as RecordedOp, decode};
pub use setup::{AppsSetup, LogSetup, RunSetup, SetupError, ShardSeed, ShardSetup};
pub use tape::{Chunk, ChunkSink, Tape};
pub use taped::{TapedLog, TapedShard};
