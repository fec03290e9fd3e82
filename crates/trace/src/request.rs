//! One request of a workload, whatever its source.

use std::fmt;

use larder_base::Nanos;

/// What a request asks for. The first eleven are of the key-value cache, the last three of the block cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Op {
    /// Read an object.
    Get = 0,
    /// Store an object whatever is there.
    Set = 1,
    /// Store only if absent.
    Add = 2,
    /// Store only if present.
    Replace = 3,
    /// Extend at the end.
    Append = 4,
    /// Extend at the front.
    Prepend = 5,
    /// Store if unchanged since it was read.
    Cas = 6,
    /// Remove.
    Delete = 7,
    /// Add to a number.
    Incr = 8,
    /// Subtract from a number.
    Decr = 9,
    /// Change the expiry.
    Touch = 10,
    /// Read a range of a volume.
    Read = 11,
    /// Write a range of a volume.
    Write = 12,
    /// Discard a range of a volume.
    Trim = 13,
}

impl Op {
    /// Every operation, in the order of their codes.
    pub const ALL: [Op; 14] = [
        Op::Get,
        Op::Set,
        Op::Add,
        Op::Replace,
        Op::Append,
        Op::Prepend,
        Op::Cas,
        Op::Delete,
        Op::Incr,
        Op::Decr,
        Op::Touch,
        Op::Read,
        Op::Write,
        Op::Trim,
    ];

    /// The operation with this code (its place in [`Op::ALL`]).
    pub fn from_code(code: u8) -> Option<Op> {
        Op::ALL.get(usize::from(code)).copied()
    }

    /// The name used in reports: memcached's command, or `read`, `write`, `trim`.
    pub fn name(self) -> &'static str {
        match self {
            Op::Get => "get",
            Op::Set => "set",
            Op::Add => "add",
            Op::Replace => "replace",
            Op::Append => "append",
            Op::Prepend => "prepend",
            Op::Cas => "cas",
            Op::Delete => "delete",
            Op::Incr => "incr",
            Op::Decr => "decr",
            Op::Touch => "touch",
            Op::Read => "read",
            Op::Write => "write",
            Op::Trim => "trim",
        }
    }

    /// Whether it reads data (a get or a block read).
    pub fn is_read(self) -> bool {
        matches!(self, Op::Get | Op::Read)
    }

    /// Whether it brings new data.
    pub fn is_write(self) -> bool {
        matches!(
            self,
            Op::Set
                | Op::Add
                | Op::Replace
                | Op::Append
                | Op::Prepend
                | Op::Cas
                | Op::Incr
                | Op::Decr
                | Op::Write
        )
    }

    /// Whether it removes data (a delete or a trim).
    pub fn is_removal(self) -> bool {
        matches!(self, Op::Delete | Op::Trim)
    }

    /// Whether it addresses a range of a volume rather than an object.
    pub fn is_block(self) -> bool {
        matches!(self, Op::Read | Op::Write | Op::Trim)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a block operation touches, as far as the source says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Class {
    /// Not stated.
    #[default]
    Unstated = 0,
    /// Contents of files.
    Data = 1,
    /// A file system's own: inodes, directories, journals.
    Metadata = 2,
}

impl Class {
    /// Every class, in the order of their codes.
    pub const ALL: [Class; 3] = [Class::Unstated, Class::Data, Class::Metadata];

    /// The class with this code (its place in [`Class::ALL`]).
    pub fn from_code(code: u64) -> Option<Class> {
        usize::try_from(code).ok().and_then(|c| Class::ALL.get(c)).copied()
    }

    /// The name used in reports; empty where nothing is stated.
    pub fn name(self) -> &'static str {
        match self {
            Class::Unstated => "",
            Class::Data => "data",
            Class::Metadata => "metadata",
        }
    }
}

/// One request.
///
/// For key-value operations `size` is the value's size and `offset` is 0. For block operations `offset` and `size` are
/// bytes of the volume `app`, and `id` is the first 512-byte sector, until the request is split into pages
/// ([`crate::Pages`]), when `id` is the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Time since the first request of the trace; `None` where the source has no times. Never goes back.
    pub time: Option<Nanos>,
    /// The object. Numbers are kept as they are; other keys are hashed, the same way in every release and format.
    pub id: u64,
    /// First byte, of block operations.
    pub offset: u64,
    /// Bytes of the value, or of the I/O. Zero where the source does not say (a get that missed, say).
    pub size: u64,
    /// Bytes of the key; 0 where the source does not say.
    pub key_size: u32,
    /// Time to live in seconds; 0 is none.
    pub ttl: u32,
    /// Application, tenant, volume or device.
    pub app: u32,
    /// The operation.
    pub op: Op,
    /// Data or file-system metadata, of block operations whose source says so.
    pub class: Class,
    /// The client that asked, of workloads with several before one server; 0 otherwise.
    pub host: u16,
}

impl Request {
    /// Bytes of keys of which the source does not say how long they are: of those that are sent to a server and of those that are
    /// simulated.
    pub const UNSTATED_KEY: u32 = 16;

    /// Bytes of the key, [`UNSTATED_KEY`](Self::UNSTATED_KEY) where the source does not say.
    pub fn key_bytes(&self) -> u32 {
        if self.key_size == 0 { Self::UNSTATED_KEY } else { self.key_size }
    }

    /// A get of `size` bytes without a time.
    pub fn get(id: u64, size: u64) -> Request {
        Request {
            time: None,
            id,
            offset: 0,
            size,
            key_size: 0,
            ttl: 0,
            app: 0,
            op: Op::Get,
            class: Class::Unstated,
            host: 0,
        }
    }

    /// A block operation on volume `app`.
    pub fn block(op: Op, app: u32, offset: u64, size: u64) -> Request {
        // A second volume's sectors must not meet the first one's; 48 bits of sectors are 128 PiB.
        let id = (offset / 512) ^ (u64::from(app) << 48);
        Request { id, offset, app, op, ..Request::get(0, size) }
    }
}

/// The id of a key that is not a number: FNV-1a with a final mix (SplitMix64's). It is part of the native format's and
/// the tests' contract and never changes.
pub fn hash_key(key: &[u8]) -> u64 {
    let mut h: u64 = 0xcbf2_9ce4_8422_2325;
    for &b in key {
        h = (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    mix(h)
}

/// SplitMix64's output function: a bijection that spreads neighbouring numbers.
pub fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A key as an id: a decimal number that fits 64 bits and is written without leading zeros stays itself, anything else
/// is hashed.
pub fn key_id(key: &[u8]) -> u64 {
    let plain = !key.is_empty() && key.len() <= 20 && (key[0] != b'0' || key.len() == 1);
    if plain && let Some(n) = parse_u64(key) {
        return n;
    }
    hash_key(key)
}

/// A decimal number; `None` on anything else, and on overflow.
pub(crate) fn parse_u64(text: &[u8]) -> Option<u64> {
    if text.is_empty() || text.len() > 20 {
        return None;
    }
    let mut n: u64 = 0;
    for &b in text {
        let digit = b.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        n = n.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    Some(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_pinned() {
        assert_eq!(key_id(b"42"), 42);
        assert_eq!(key_id(b"18446744073709551615"), u64::MAX);
        assert_ne!(key_id(b"042"), 42);
        assert_eq!(key_id(b"82131353f9ddc8c6"), hash_key(b"82131353f9ddc8c6"));
        assert_eq!(hash_key(b"a"), mix(0xaf63_dc4c_8601_ec8c));
        assert_ne!(key_id(b"18446744073709551616"), 0);
    }

    #[test]
    fn op_codes_round_trip() {
        for (code, op) in Op::ALL.iter().enumerate() {
            assert_eq!(Op::from_code(code as u8), Some(*op));
            assert_eq!(*op as usize, code);
        }
        assert_eq!(Op::from_code(14), None);
    }
}
