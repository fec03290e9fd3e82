//! Readers, writers and generators of workloads.
//!
//! [`open`] takes a trace's name (a file in any of the formats of [`Format`], compressed or not, or `gen:…`) and gives
//! a stream of [`Request`]s in bounded memory.

#![forbid(unsafe_code)]

mod error;
mod extents;
mod format;
pub mod generate;
mod hash;
mod input;
mod native;
mod open;
mod output;
mod pages;
mod read;
mod request;
mod stats;
mod value_sizes;
mod write;

pub use error::{BadRecord, Place, TraceError};
pub use format::Format;
pub use hash::{HashOf, Hashed, TraceHash};
pub use input::Compression;
pub use native::NativeWriter;
pub use open::{Options, Trace, open, read};
pub use output::{OutputFile, is_same_file};
pub use pages::Pages;
pub use read::kv::CsvColumns;
pub use read::{FileReader, Progress, Reader};
pub use request::{Class, Op, Request, hash_key, key_id, mix};
pub use stats::{BlockStats, Collector, Stats};
pub use value_sizes::{BadSizes, ValueSizes};
pub use write::Writer;
