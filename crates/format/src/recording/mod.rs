//! The container of a recording: what machines were told and decided, in chunks of streams. What the records say is the
//! engine's; [`bytes`] has the numbers they are made of.
//!
//! ```text
//! file    "LRDRECRD", u32 version 2, u32 bytes of the setup, u32 CRC-32C of the setup, the setup (JSON), chunks …, end
//! chunk   u32 0x4b4e4843, u16 stream, u16 kind (0 records, 1 end), u32 payload bytes (at most 128 KiB), u32 records,
//!         u64 number of the first record in its stream, u32 CRC-32C of these fields and the payload; payload
//! end     u8 why recording ended, u32 streams, u64 records of each stream
//! ```
//! The end belongs to the stream [`END_STREAM`]. Integers are little-endian. A file without an end was cut short.

pub mod bytes;
mod frame;

pub use bytes::{BadRecord, Cursor};
pub use frame::{
    CHUNK_HEADER, Chunk, ChunkHeader, ChunkSink, END_STREAM, Ended, FILE_HEADER, FrameError,
    MAX_PAYLOAD, MAX_SETUP, VERSION, end_bytes, end_chunk, file_header, parse_end,
    parse_file_header, seal,
};
