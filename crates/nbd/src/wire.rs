//! Numbers, flags and headers of the protocol. All integers are sent most significant byte first.

use std::fmt;

/// `NBDMAGIC`: the first eight bytes that any server sends.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`: a newstyle server's second eight bytes, and the start of each option.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The second eight bytes of an oldstyle server, which nothing here talks to.
pub const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;
/// Start of each reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Start of each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Start of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Start of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;

/// The longest string of the protocol (export names, messages), bytes.
pub const MAX_STRING: usize = 4096;
/// The longest payload of one request that this implementation takes or asks for, bytes. Servers commonly refuse more.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// The one metadata context that the protocol itself defines.
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Handshake flags, server and client alike.
pub mod handshake {
    /// The server speaks fixed newstyle; the client too.
    pub const FIXED_NEWSTYLE: u16 = 1;
    /// The 124 zeroes after an export's flags may be left out; the client agrees.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options of the handshake.
pub mod option {
    /// Choose an export and begin; cannot be answered with an error.
    pub const EXPORT_NAME: u32 = 1;
    /// End the session.
    pub const ABORT: u32 = 2;
    /// Name the exports.
    pub const LIST: u32 = 3;
    /// Go on under TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Choose an export and begin.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Name the metadata contexts.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;

    /// The option's name in messages.
    pub fn name(option: u32) -> &'static str {
        match option {
            EXPORT_NAME => "EXPORT_NAME",
            ABORT => "ABORT",
            LIST => "LIST",
            STARTTLS => "STARTTLS",
            INFO => "INFO",
            GO => "GO",
            STRUCTURED_REPLY => "STRUCTURED_REPLY",
            LIST_META_CONTEXT => "LIST_META_CONTEXT",
            SET_META_CONTEXT => "SET_META_CONTEXT",
            _ => "an unknown option",
        }
    }
}

/// Types of replies to options.
pub mod reply {
    /// Done, or the end of a list.
    pub const ACK: u32 = 1;
    /// One export of a list.
    pub const SERVER: u32 = 2;
    /// One piece of information about an export.
    pub const INFO: u32 = 3;
    /// One metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// Set in every error.
    pub const ERROR: u32 = 1 << 31;
    /// The option is not known here.
    pub const ERR_UNSUP: u32 = ERROR + 1;
    /// The option is known and not allowed.
    pub const ERR_POLICY: u32 = ERROR + 2;
    /// The option is malformed or comes at the wrong time.
    pub const ERR_INVALID: u32 = ERROR + 3;
    /// TLS first.
    pub const ERR_TLS_REQD: u32 = ERROR + 5;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = ERROR + 6;
    /// The server is about to stop.
    pub const ERR_SHUTDOWN: u32 = ERROR + 7;
    /// The client must ask for block sizes and keep to them.
    pub const ERR_BLOCK_SIZE_REQD: u32 = ERROR + 8;
    /// The option is longer than the server takes.
    pub const ERR_TOO_BIG: u32 = ERROR + 9;
}

/// Types of information about an export.
pub mod info {
    /// Size and transmission flags.
    pub const EXPORT: u16 = 0;
    /// The export's name.
    pub const NAME: u16 = 1;
    /// A line for people.
    pub const DESCRIPTION: u16 = 2;
    /// Smallest, preferred and largest size of a request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags: what an export can do.
pub mod transmission {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1;
    /// Nothing may be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// FLUSH may be sent.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// The flag FUA may be set.
    pub const SEND_FUA: u16 = 1 << 3;
    /// TRIM may be sent.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// WRITE_ZEROES may be sent.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// The flag DF may be set.
    pub const SEND_DF: u16 = 1 << 7;
    /// What is flushed on one connection is flushed on all.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// CACHE may be sent.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// The flag FAST_ZERO may be set.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Types of requests.
pub mod command {
    /// Read a range.
    pub const READ: u16 = 0;
    /// Write a range.
    pub const WRITE: u16 = 1;
    /// End the session.
    pub const DISC: u16 = 2;
    /// Make writes durable.
    pub const FLUSH: u16 = 3;
    /// A range is no longer needed.
    pub const TRIM: u16 = 4;
    /// A range will be read soon.
    pub const CACHE: u16 = 5;
    /// A range shall read as zeroes.
    pub const WRITE_ZEROES: u16 = 6;
    /// Which parts of a range are holes or zeroes.
    pub const BLOCK_STATUS: u16 = 7;

    /// The command's name in messages.
    pub fn name(command: u16) -> &'static str {
        match command {
            READ => "READ",
            WRITE => "WRITE",
            DISC => "DISC",
            FLUSH => "FLUSH",
            TRIM => "TRIM",
            CACHE => "CACHE",
            WRITE_ZEROES => "WRITE_ZEROES",
            BLOCK_STATUS => "BLOCK_STATUS",
            _ => "an unknown command",
        }
    }
}

/// Flags of requests.
pub mod flag {
    /// The reply waits until what was written is durable.
    pub const FUA: u16 = 1;
    /// Zeroes must be written out, not left as a hole.
    pub const NO_HOLE: u16 = 1 << 1;
    /// A read is answered in one piece.
    pub const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
    /// Zeroes only if that is faster than writing them.
    pub const FAST_ZERO: u16 = 1 << 4;
}

/// Types and flags of chunks of structured replies.
pub mod chunk {
    /// Flag: the reply's last chunk.
    pub const DONE: u16 = 1;
    /// Nothing but the end of a reply.
    pub const NONE: u16 = 0;
    /// A part of what was read.
    pub const OFFSET_DATA: u16 = 1;
    /// A part of what was read that is all zeroes.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents of one metadata context.
    pub const BLOCK_STATUS: u16 = 5;
    /// Set in every error.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// The request failed.
    pub const ERROR: u16 = ERROR_BIT + 1;
    /// The request failed at an offset.
    pub const ERROR_OFFSET: u16 = ERROR_BIT + 2;
}

/// States of `base:allocation`.
pub mod state {
    /// Not allocated.
    pub const HOLE: u32 = 1;
    /// Reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// The errors that the protocol knows. Others are [`Errno::Io`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted: the export is read-only.
    Perm = 1,
    /// Input or output failed.
    Io = 5,
    /// No memory.
    NoMem = 12,
    /// The request is malformed or beyond the end.
    Inval = 22,
    /// No space, or a write beyond the end.
    NoSpc = 28,
    /// Too long to be answered in one piece.
    Overflow = 75,
    /// Cannot be done, or not fast.
    NotSup = 95,
    /// The server is about to stop.
    Shutdown = 108,
}

impl Errno {
    /// The number sent.
    pub fn code(self) -> u32 {
        self as u32
    }

    /// What a number received means; `None` for zero, which is no error.
    pub fn from_code(code: u32) -> Option<Errno> {
        Some(match code {
            0 => return None,
            1 => Errno::Perm,
            12 => Errno::NoMem,
            22 => Errno::Inval,
            28 => Errno::NoSpc,
            75 => Errno::Overflow,
            95 => Errno::NotSup,
            108 => Errno::Shutdown,
            _ => Errno::Io,
        })
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Errno::Perm => "not permitted (EPERM)",
            Errno::Io => "input/output error (EIO)",
            Errno::NoMem => "out of memory (ENOMEM)",
            Errno::Inval => "invalid request (EINVAL)",
            Errno::NoSpc => "no space (ENOSPC)",
            Errno::Overflow => "too long for one piece (EOVERFLOW)",
            Errno::NotSup => "not supported (ENOTSUP)",
            Errno::Shutdown => "the server is stopping (ESHUTDOWN)",
        })
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

/// The 16 bits at `at`.
///
/// # Panics
/// If they are not there.
pub fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// The 32 bits at `at`.
///
/// # Panics
/// If they are not there.
pub fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// The 64 bits at `at`.
///
/// # Panics
/// If they are not there.
pub fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// Of [`flag`].
    pub flags: u16,
    /// Of [`command`].
    pub command: u16,
    /// Comes back in the reply.
    pub cookie: u64,
    /// Start of the range, bytes.
    pub offset: u64,
    /// Length of the range, bytes.
    pub length: u32,
}

impl RequestHeader {
    /// Its length, bytes.
    pub const LEN: usize = 28;

    /// As sent.
    pub fn encode(&self) -> [u8; RequestHeader::LEN] {
        let mut out = [0; RequestHeader::LEN];
        out[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        out[4..6].copy_from_slice(&self.flags.to_be_bytes());
        out[6..8].copy_from_slice(&self.command.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        out[16..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..].copy_from_slice(&self.length.to_be_bytes());
        out
    }

    /// As received: the magic found instead, if it is not a request's.
    ///
    /// # Errors
    /// The number that stands where [`REQUEST_MAGIC`] should.
    pub fn decode(bytes: &[u8; RequestHeader::LEN]) -> Result<RequestHeader, u32> {
        let magic = be32(bytes, 0);
        if magic != REQUEST_MAGIC {
            return Err(magic);
        }
        Ok(RequestHeader {
            flags: be16(bytes, 4),
            command: be16(bytes, 6),
            cookie: be64(bytes, 8),
            offset: be64(bytes, 16),
            length: be32(bytes, 24),
        })
    }
}

/// The 16 bytes of a simple reply before its data.
pub fn simple_reply(error: u32, cookie: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    out[4..8].copy_from_slice(&error.to_be_bytes());
    out[8..].copy_from_slice(&cookie.to_be_bytes());
    out
}

/// The 20 bytes of a chunk before its payload.
pub fn chunk_header(flags: u16, kind: u16, cookie: u64, length: u32) -> [u8; 20] {
    let mut out = [0; 20];
    out[..4].copy_from_slice(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
    out[4..6].copy_from_slice(&flags.to_be_bytes());
    out[6..8].copy_from_slice(&kind.to_be_bytes());
    out[8..16].copy_from_slice(&cookie.to_be_bytes());
    out[16..].copy_from_slice(&length.to_be_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_as_the_specification_lays_it_out() {
        let header = RequestHeader {
            flags: flag::FUA | flag::NO_HOLE,
            command: command::WRITE_ZEROES,
            cookie: 0x0102_0304_0506_0708,
            offset: 0x1112_1314_1516_1718,
            length: 0x2122_2324,
        };
        let bytes = header.encode();
        #[rustfmt::skip]
        assert_eq!(bytes, [
            0x25, 0x60, 0x95, 0x13, 0, 3, 0, 6, 1, 2, 3, 4, 5, 6, 7, 8,
            0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x21, 0x22, 0x23, 0x24,
        ]);
        assert_eq!(RequestHeader::decode(&bytes), Ok(header));
        let mut bad = bytes;
        bad[0] = 0x26;
        assert_eq!(RequestHeader::decode(&bad), Err(0x2660_9513));
    }

    #[test]
    fn replies_as_the_specification_lays_them_out() {
        assert_eq!(
            simple_reply(5, 9),
            [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 9]
        );
        assert_eq!(
            chunk_header(chunk::DONE, chunk::OFFSET_DATA, 9, 12),
            [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 12]
        );
    }

    #[test]
    fn errors_keep_their_numbers() {
        for errno in [
            Errno::Perm,
            Errno::Io,
            Errno::NoMem,
            Errno::Inval,
            Errno::NoSpc,
            Errno::Overflow,
            Errno::NotSup,
            Errno::Shutdown,
        ] {
            assert_eq!(Errno::from_code(errno.code()), Some(errno));
        }
        assert_eq!(Errno::from_code(0), None);
        assert_eq!(Errno::from_code(4711), Some(Errno::Io));
    }
}
