//! What can be wrong with a trace.

use std::fmt;
use std::io;

/// What to do where a format cannot be told.
fn remedy(known: &str) -> String {
    if known.is_empty() { String::new() } else { format!("; name it with --format ({known})") }
}

/// Where in a file a record lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Line number, from 1.
    Line(u64),
    /// Byte offset in the decompressed stream, from 0.
    Byte(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Line(n) => write!(f, "line {n}"),
            Place::Byte(n) => write!(f, "byte {n}"),
        }
    }
}

/// A record that does not follow its format.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file}, {place}: expected {expected}, found {found} (format {format})")]
pub struct BadRecord {
    /// The file's name as given.
    pub file: String,
    /// Where the record starts.
    pub place: Place,
    /// The format's name.
    pub format: &'static str,
    /// What should have been there.
    pub expected: String,
    /// What was there, shortened.
    pub found: String,
}

/// Why a trace could not be read, written or generated.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The file could not be opened or created.
    #[error("cannot open trace '{file}': {source}")]
    Open {
        /// The file's name as given.
        file: String,
        /// The reason.
        source: io::Error,
    },
    /// Reading or decompressing failed.
    #[error("cannot read trace '{file}' at {place} of its decompressed contents: {source}")]
    Read {
        /// The file's name as given.
        file: String,
        /// How far reading had come.
        place: Place,
        /// The reason.
        source: io::Error,
    },
    /// Writing failed.
    #[error("cannot write trace '{file}': {source}")]
    Write {
        /// The file's name as given.
        file: String,
        /// The reason.
        source: io::Error,
    },
    /// A request that the format to be written cannot hold.
    #[error(
        "request {request} of the trace, {what}, does not fit: {limit}; write another format (--to)"
    )]
    DoesNotFit {
        /// Its number, from 1.
        request: u64,
        /// What it has.
        what: String,
        /// What the format holds.
        limit: &'static str,
    },
    /// A record does not follow its format.
    #[error("{0}; --skip-bad passes over such records")]
    Record(Box<BadRecord>),
    /// A file without a single request: [`BadRecord::found`] says what was passed over.
    #[error(transparent)]
    NoRequest(Box<BadRecord>),
    /// No format fits the file.
    #[error("cannot tell the format of '{file}': {reason}{}", remedy(known))]
    Undetected {
        /// The file's name as given.
        file: String,
        /// What was looked at and found.
        reason: String,
        /// The names of all formats; none where naming one would not help.
        known: String,
    },
    /// A format name that does not exist.
    #[error("unknown trace format '{name}'; known are {known}")]
    UnknownFormat {
        /// The name as given.
        name: String,
        /// The names of all formats.
        known: String,
    },
    /// A generator's specification or a column list is wrong.
    #[error("'{spec}': {problem}")]
    Spec {
        /// The text as given.
        spec: String,
        /// What is wrong and what would be right.
        problem: String,
    },
}

impl TraceError {
    pub(crate) fn spec(spec: &str, problem: impl Into<String>) -> TraceError {
        TraceError::Spec { spec: spec.to_owned(), problem: problem.into() }
    }
}

/// What a decoder expected and what it found; the reader adds file and place.
#[derive(Debug)]
pub(crate) struct Bad {
    pub(crate) expected: String,
    pub(crate) found: String,
}

impl Bad {
    /// `expected` was not met by the bytes `found`.
    pub(crate) fn new(expected: impl Into<String>, found: &[u8]) -> Bad {
        Bad { expected: expected.into(), found: quote(found) }
    }

    pub(crate) fn text(expected: impl Into<String>, found: impl Into<String>) -> Bad {
        Bad { expected: expected.into(), found: found.into() }
    }
}

/// The bytes in quotes, printable and short.
pub(crate) fn quote(bytes: &[u8]) -> String {
    const SHOWN: usize = 80;
    let cut = &bytes[..bytes.len().min(SHOWN)];
    let mut out = String::from("'");
    out.push_str(&cut.escape_ascii().to_string());
    out.push('\'');
    if bytes.len() > SHOWN {
        out.push_str(&format!(" … ({} bytes)", bytes.len()));
    }
    out
}
