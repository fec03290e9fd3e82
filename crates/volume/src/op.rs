//! What is asked of a volume or of the store behind it.

use std::fmt;

use larder_runtime::AlignedBuf;
pub use larder_runtime::Payload;

/// The longest operation that moves data, of the stores that set no limit of their own, bytes.
pub const MAX_PAYLOAD: u32 = 32 << 20;

/// One operation. Ranges are in bytes, of any alignment, and must lie within the store.
#[derive(Debug)]
pub enum Op {
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
    /// The range is no longer needed: it may read as anything. A store that knows no trim ignores it.
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
        /// Fail with [`FailureKind::Unsupported`], nothing changed, unless that is faster than writing.
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

impl Op {
    /// In messages.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Read { .. } => "read",
            Op::Write { .. } => "write",
            Op::Flush => "flush",
            Op::Trim { .. } => "trim",
            Op::WriteZeroes { .. } => "write zeroes",
            Op::Status { .. } => "block status",
        }
    }

    /// The range, empty for a flush: start and length in bytes.
    pub fn range(&self) -> (u64, u64) {
        match self {
            Op::Read { offset, buf } => (*offset, buf.len() as u64),
            Op::Write { offset, data, .. } => (*offset, data.len() as u64),
            Op::Flush => (0, 0),
            Op::Trim { offset, len, .. }
            | Op::WriteZeroes { offset, len, .. }
            | Op::Status { offset, len, .. } => (*offset, u64::from(*len)),
        }
    }

    /// Once it has ended well, something is durable: a flush, or a change that is to be.
    pub fn is_durable(&self) -> bool {
        match self {
            Op::Flush => true,
            Op::Write { fua, .. } | Op::Trim { fua, .. } | Op::WriteZeroes { fua, .. } => *fua,
            Op::Read { .. } | Op::Status { .. } => false,
        }
    }

    /// The same, where nothing is to be durable by it.
    #[must_use]
    pub fn without_fua(mut self) -> Op {
        match &mut self {
            Op::Write { fua, .. } | Op::Trim { fua, .. } | Op::WriteZeroes { fua, .. } => {
                *fua = false;
            }
            Op::Read { .. } | Op::Flush | Op::Status { .. } => {}
        }
        self
    }

    /// It changes what the store holds.
    pub fn changes(&self) -> bool {
        matches!(self, Op::Write { .. } | Op::Trim { .. } | Op::WriteZeroes { .. })
    }
}

/// A part of a range in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes, not zero.
    pub len: u32,
    /// Not allocated.
    pub hole: bool,
    /// Reads as zeroes.
    pub zero: bool,
}

/// What went wrong with an operation, without any protocol's numbers: whoever answers a client maps it to its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// Not permitted: the volume is read-only.
    Denied,
    /// Input or output failed.
    Failed,
    /// No memory.
    NoMemory,
    /// The operation is malformed or beyond the end.
    Invalid,
    /// No space, or a write beyond the end.
    NoSpace,
    /// Too long to be done in one piece.
    TooLong,
    /// Cannot be done, or not fast.
    Unsupported,
    /// The volume was detached, or its server is about to stop.
    Gone,
}

impl FailureKind {
    /// What an error of the operating system is.
    pub fn from_os(code: Option<i32>) -> FailureKind {
        use rustix::io::Errno as Os;
        let is = |os: Os| code == Some(os.raw_os_error());
        if is(Os::PERM) || is(Os::ACCESS) || is(Os::ROFS) {
            FailureKind::Denied
        } else if is(Os::NOSPC) || is(Os::DQUOT) || is(Os::FBIG) {
            FailureKind::NoSpace
        } else if is(Os::NOMEM) {
            FailureKind::NoMemory
        } else if is(Os::OPNOTSUPP) {
            FailureKind::Unsupported
        } else {
            FailureKind::Failed
        }
    }
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FailureKind::Denied => "not permitted",
            FailureKind::Failed => "input/output error",
            FailureKind::NoMemory => "out of memory",
            FailureKind::Invalid => "invalid request",
            FailureKind::NoSpace => "no space",
            FailureKind::TooLong => "too long for one piece",
            FailureKind::Unsupported => "not supported",
            FailureKind::Gone => "the volume was detached, or its cache is closed",
        })
    }
}

/// Why an operation failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// What the client is told.
    pub kind: FailureKind,
    /// What people are told.
    pub message: String,
}

impl Failure {
    /// With a message.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.message.is_empty() { self.kind.fmt(f) } else { f.write_str(&self.message) }
    }
}

impl std::error::Error for Failure {}

/// How an operation ended: the extents of a [`Op::Status`], nothing for others.
pub type Outcome = Result<Vec<Extent>, Failure>;

/// An operation that has ended, with its buffers.
#[derive(Debug)]
pub struct Done {
    /// What it was submitted under.
    pub token: u64,
    /// The operation.
    pub op: Op,
    /// How it ended.
    pub outcome: Outcome,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_operating_system() {
        assert_eq!(FailureKind::from_os(Some(122)), FailureKind::NoSpace, "EDQUOT");
        assert_eq!(FailureKind::from_os(Some(30)), FailureKind::Denied, "EROFS");
        assert_eq!(FailureKind::from_os(None), FailureKind::Failed);
    }
}
