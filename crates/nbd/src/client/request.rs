//! What is asked of a server, and how it ended.

use std::fmt;

use larder_runtime::{AlignedBuf, Payload};

use crate::wire::{Errno, Extent};

/// One request. Ranges are in bytes, of any alignment, and must lie within the export.
#[derive(Debug)]
pub enum Request {
    /// Fill the buffer, in its length, from `offset`.
    Read {
        /// Start, bytes.
        offset: u64,
        /// What is filled; contents unspecified after an error.
        buf: AlignedBuf,
    },
    /// Write at `offset`.
    Write {
        /// Start, bytes.
        offset: u64,
        /// What to write.
        data: Payload,
        /// Done only once durable.
        fua: bool,
    },
    /// Make durable whatever was done before.
    Flush,
    /// The range is no longer needed: it may read as anything.
    Trim {
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Done only once durable.
        fua: bool,
    },
    /// The range shall read as zeroes.
    WriteZeroes {
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Done only once durable.
        fua: bool,
        /// A hole will do.
        may_punch: bool,
        /// Fail with [`Errno::NotSup`], nothing changed, unless that is faster than writing.
        fast: bool,
    },
    /// Which parts of the range are holes or zeroes.
    Status {
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        len: u32,
        /// The first extent is enough.
        one: bool,
    },
}

impl Request {
    /// The range, empty for a flush: start and length in bytes.
    pub fn range(&self) -> (u64, u64) {
        match self {
            Request::Read { offset, buf } => (*offset, buf.len() as u64),
            Request::Write { offset, data, .. } => (*offset, data.len() as u64),
            Request::Flush => (0, 0),
            Request::Trim { offset, len, .. }
            | Request::WriteZeroes { offset, len, .. }
            | Request::Status { offset, len, .. } => (*offset, u64::from(*len)),
        }
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The number that came.
    pub errno: Errno,
    /// What the server says to people; may be empty.
    pub message: String,
}

impl Failure {
    /// With a message.
    pub fn new(errno: Errno, message: impl Into<String>) -> Failure {
        Failure { errno, message: message.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() { self.errno.fmt(f) } else { f.write_str(&self.message) }
    }
}

impl std::error::Error for Failure {}

/// How a request ended: the extents of a [`Request::Status`], nothing for others.
pub type Outcome = Result<Vec<Extent>, Failure>;

/// A request that has ended, with its buffers.
#[derive(Debug)]
pub struct Done {
    /// What it was submitted under.
    pub token: u64,
    /// The request.
    pub request: Request,
    /// How it ended.
    pub outcome: Outcome,
}
