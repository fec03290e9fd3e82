//! memcached's text and meta protocols as bytes: tokens, numbers, flags, reply lines. Nothing here keeps state or knows
//! an engine; [`crate::connection`] drives it.
//!
//! The reference is memcached 1.6.45 (`doc/protocol.txt` and the behaviour of its binary): which error a bad line gets,
//! which errors swallow the body that follows, and which are silenced by `noreply` or `q` is part of the protocol.

pub mod auth;
pub mod base64;
pub mod meta;
pub mod number;
pub mod reply;
pub mod tokens;

use larder_base::{Expiry, Now, UnixSecs};

/// Longest key, bytes. Binary keys of the meta protocol are measured in their base64 form.
pub const KEY_MAX: usize = 250;

/// A command line longer than this without a newline closes the connection, unless it is a `get` or `gets`.
pub const LINE_MAX: usize = 2048;

/// Longest opaque token of the meta protocol, bytes, its letter included.
pub const OPAQUE_MAX: usize = 32;

/// Most tokens in a meta command, command and key included.
pub const META_TOKENS_MAX: usize = 20;

/// Expiry arguments up to this many seconds (30 days) count from now; larger ones are Unix time.
pub const RELATIVE_MAX: i32 = 60 * 60 * 24 * 30;

/// The expiry that an argument on the wire stands for.
pub fn expiry(now: Now, argument: i32) -> Expiry {
    match argument {
        0 => Expiry::NEVER,
        i32::MIN..0 => Expiry::PAST,
        1..=RELATIVE_MAX => Expiry::at(UnixSecs(now.wall.0.saturating_add(argument as u32))),
        absolute => Expiry::at(UnixSecs(absolute as u32)),
    }
}

/// The answers that more than one command gives.
pub mod answer {
    /// A line that does not parse, a key that is too long, a body length out of range.
    pub const BAD_FORMAT: &[u8] = b"CLIENT_ERROR bad command line format";
    /// A body that does not end in CR LF where its length says.
    pub const BAD_CHUNK: &[u8] = b"CLIENT_ERROR bad data chunk";
    /// An expiry that is not a number.
    pub const BAD_EXPTIME: &[u8] = b"CLIENT_ERROR invalid exptime argument";
    /// The value is over the configured limit.
    pub const TOO_LARGE: &[u8] = b"SERVER_ERROR object too large for cache";
    /// No room could be made for the value.
    pub const NO_MEMORY: &[u8] = b"SERVER_ERROR out of memory storing object";
    /// incr or decr of something else than a number.
    pub const NOT_NUMERIC: &[u8] = b"CLIENT_ERROR cannot increment or decrement non-numeric value";
    /// An unknown command.
    pub const ERROR: &[u8] = b"ERROR";
}
