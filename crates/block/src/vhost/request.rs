//! What a chain of descriptors asks for.
//!
//! Everything here comes from the guest and is believed of nothing: each descriptor is read once, every address is looked
//! up in the memory that the front end has shared, chains and loops have an end, and the range lies within the volume
//! before anything is done. What cannot even be answered (no byte for the status) is [`Malformed`].

use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, Permissions};

use super::config::{MAX_QUEUE_SIZE, MAX_RANGE_SECTORS, MAX_RANGES, SECTOR, Shape};

/// Kinds of requests (virtio 1.2, 5.2.6).
pub mod kind {
    /// Read.
    pub const IN: u32 = 0;
    /// Write.
    pub const OUT: u32 = 1;
    /// Flush.
    pub const FLUSH: u32 = 4;
    /// The device's name.
    pub const GET_ID: u32 = 8;
    /// Discard.
    pub const DISCARD: u32 = 11;
    /// Write zeroes.
    pub const WRITE_ZEROES: u32 = 13;
}

/// How a request ended.
pub mod status {
    /// Done.
    pub const OK: u8 = 0;
    /// Failed.
    pub const IOERR: u8 = 1;
    /// Not known.
    pub const UNSUPP: u8 = 2;
}

const INDIRECT: u16 = 4;
const WRITE: u16 = 2;
const NEXT: u16 = 1;
/// Bytes of a descriptor.
const DESCRIPTOR: u64 = 16;
/// Bytes of a request's header.
const HEADER: usize = 16;
/// Bytes of a range of a discard.
const RANGE: usize = 16;
/// Bytes of a name.
const ID: usize = 20;

/// A table of descriptors: a queue's.
#[derive(Clone, Copy, Debug)]
pub struct Table {
    /// Where it lies.
    pub at: GuestAddress,
    /// Descriptors.
    pub len: u16,
}

/// A piece of guest memory, which was there when it was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where it begins.
    pub at: GuestAddress,
    /// Bytes, not zero.
    pub len: u32,
}

/// A range of the volume, bytes. It lies within it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Start.
    pub offset: u64,
    /// Length, not zero.
    pub len: u32,
    /// A hole will do.
    pub unmap: bool,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// Read `len` bytes from `offset` into the pieces.
    Read {
        /// Start.
        offset: u64,
        /// Bytes, not zero.
        len: u32,
        /// Where they go.
        into: Vec<Piece>,
    },
    /// Write `len` bytes at `offset` from the pieces.
    Write {
        /// Start.
        offset: u64,
        /// Bytes, not zero.
        len: u32,
        /// Where they are.
        from: Vec<Piece>,
    },
    /// Make durable what was answered.
    Flush,
    /// Forget the ranges.
    Discard(Vec<Range>),
    /// Make the ranges read as zeroes.
    WriteZeroes(Vec<Range>),
    /// The name, into up to 20 bytes.
    Id(Vec<Piece>),
    /// Nothing to be done.
    Nothing,
    /// Answered with a status at once.
    Refused {
        /// The status.
        status: u8,
        /// For the log.
        why: &'static str,
    },
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parsed {
    /// Its first descriptor, by which it is answered.
    pub head: u16,
    /// Where the status goes.
    pub status: GuestAddress,
    /// What is asked for.
    pub what: What,
}

/// A chain that cannot be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// A descriptor's number is beyond its table.
    #[error("descriptor {index} is beyond a table of {len}")]
    Index {
        /// Its number.
        index: u32,
        /// The table's length.
        len: u32,
    },
    /// The chain goes on and on.
    #[error("a chain of more than {MAX_QUEUE_SIZE} descriptors, or in a circle")]
    Endless,
    /// A descriptor or what it points to is not in the memory that was shared.
    #[error("{len} bytes at {at:#x} are not in the guest's memory")]
    Memory {
        /// Where.
        at: u64,
        /// How many bytes.
        len: u64,
    },
    /// A table within a table, one that goes on, or of an impossible length.
    #[error("an indirect table that cannot be one")]
    Table,
    /// Something to be read behind something to be written.
    #[error("what is to be read comes behind what is to be written")]
    Order,
    /// Nowhere to put the status.
    #[error("no byte for the status")]
    NoStatus,
}

/// Reads the chain that begins with descriptor `head`.
///
/// # Errors
/// [`Malformed`] when there is nowhere to put an answer, or the chain itself is broken.
pub fn parse<M: GuestMemory>(
    memory: &M,
    table: Table,
    head: u16,
    shape: &Shape,
) -> Result<Parsed, Malformed> {
    let (mut given, mut taken) = walk(memory, table, head)?;
    let last = taken.last_mut().ok_or(Malformed::NoStatus)?;
    last.len -= 1;
    // The piece was looked up as a whole: its last byte has an address.
    let status = GuestAddress(last.at.0 + u64::from(last.len));
    if last.len == 0 {
        taken.pop();
    }
    let mut header = [0u8; HEADER];
    let what = if gather(memory, &mut given, &mut header)? {
        classify(memory, &header, given, taken, shape)?
    } else {
        refused("its header is cut short")
    };
    Ok(Parsed { head, status, what })
}

fn refused(why: &'static str) -> What {
    What::Refused { status: status::IOERR, why }
}

/// The pieces that the device reads, and those that it writes.
fn walk<M: GuestMemory>(
    memory: &M,
    table: Table,
    head: u16,
) -> Result<(Vec<Piece>, Vec<Piece>), Malformed> {
    let (mut base, mut len) = (table.at, u32::from(table.len));
    let mut index = u32::from(head);
    let mut indirect = false;
    let (mut given, mut taken) = (Vec::new(), Vec::new());
    for _ in 0..=MAX_QUEUE_SIZE {
        if index >= len {
            return Err(Malformed::Index { index, len });
        }
        let outside = Malformed::Memory { at: base.0, len: u64::from(len) * DESCRIPTOR };
        let at = base.checked_add(u64::from(index) * DESCRIPTOR).ok_or(outside)?;
        let mut raw = [0u8; DESCRIPTOR as usize];
        memory.read_slice(&mut raw, at).map_err(|_| outside)?;
        let address = GuestAddress(word(&raw, 0));
        let bytes = word(&raw, 8) as u32;
        let (flags, next) = ((word(&raw, 8) >> 32) as u16, (word(&raw, 8) >> 48) as u16);
        if flags & INDIRECT != 0 {
            let whole = bytes != 0 && bytes.is_multiple_of(DESCRIPTOR as u32);
            if indirect || flags & NEXT != 0 || !whole {
                return Err(Malformed::Table);
            }
            (base, len, index) = (address, bytes / DESCRIPTOR as u32, 0);
            indirect = true;
            continue;
        }
        let writes = flags & WRITE != 0;
        if bytes > 0 {
            let access = if writes { Permissions::Write } else { Permissions::Read };
            if !memory.check_range(address, bytes as usize, access) {
                return Err(Malformed::Memory { at: address.0, len: u64::from(bytes) });
            }
            match (writes, taken.is_empty()) {
                (true, _) => taken.push(Piece { at: address, len: bytes }),
                (false, true) => given.push(Piece { at: address, len: bytes }),
                (false, false) => return Err(Malformed::Order),
            }
        }
        if flags & NEXT == 0 {
            return Ok((given, taken));
        }
        index = u32::from(next);
    }
    Err(Malformed::Endless)
}

fn word(raw: &[u8], at: usize) -> u64 {
    let mut bytes = [0u8; 8];
    bytes.copy_from_slice(&raw[at..at + 8]);
    u64::from_le_bytes(bytes)
}

fn total(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|p| u64::from(p.len)).sum()
}

/// Takes the first bytes of the pieces. `false`: there are not as many.
fn gather<M: GuestMemory>(
    memory: &M,
    pieces: &mut Vec<Piece>,
    into: &mut [u8],
) -> Result<bool, Malformed> {
    if total(pieces) < into.len() as u64 {
        return Ok(false);
    }
    let mut done = 0;
    let mut used = 0;
    for piece in pieces.iter_mut() {
        let n = (into.len() - done).min(piece.len as usize);
        memory
            .read_slice(&mut into[done..done + n], piece.at)
            .map_err(|_| Malformed::Memory { at: piece.at.0, len: n as u64 })?;
        done += n;
        piece.at = GuestAddress(piece.at.0 + n as u64);
        piece.len -= n as u32;
        if piece.len > 0 {
            break;
        }
        used += 1;
    }
    pieces.drain(..used);
    Ok(true)
}

fn classify<M: GuestMemory>(
    memory: &M,
    header: &[u8; HEADER],
    mut given: Vec<Piece>,
    taken: Vec<Piece>,
    shape: &Shape,
) -> Result<What, Malformed> {
    let kind = word(header, 0) as u32;
    let sector = word(header, 8);
    Ok(match kind {
        kind::IN | kind::OUT => {
            let data = if kind == kind::IN { taken } else { given };
            let len = total(&data);
            if kind == kind::OUT && shape.read_only {
                return Ok(refused("a write to a volume that is only read"));
            }
            if len > u64::from(shape.max_transfer) || !len.is_multiple_of(SECTOR) {
                return Ok(refused("its data are too long, or not whole sectors"));
            }
            if !inside(sector, len / SECTOR, shape) {
                return Ok(refused("it goes beyond the end of the volume"));
            }
            let (offset, len) = (sector * SECTOR, len as u32);
            match kind {
                _ if len == 0 => What::Nothing,
                kind::IN => What::Read { offset, len, into: data },
                _ => What::Write { offset, len, from: data },
            }
        }
        kind::FLUSH => What::Flush,
        kind::GET_ID => What::Id(taken),
        kind::DISCARD | kind::WRITE_ZEROES => {
            if shape.read_only {
                return Ok(refused("a change of a volume that is only read"));
            }
            let zeroes = kind == kind::WRITE_ZEROES;
            if !zeroes && !shape.discard {
                return Ok(What::Refused { status: status::UNSUPP, why: "no discard here" });
            }
            let len = total(&given);
            if len == 0
                || !len.is_multiple_of(RANGE as u64)
                || len > u64::from(MAX_RANGES) * RANGE as u64
            {
                return Ok(refused("not one to 32 whole ranges"));
            }
            let mut ranges = Vec::with_capacity(len as usize / RANGE);
            let mut raw = [0u8; RANGE];
            while gather(memory, &mut given, &mut raw)? {
                let (sector, sectors) = (word(&raw, 0), word(&raw, 8) as u32);
                let flags = (word(&raw, 8) >> 32) as u32;
                // Bit 0 is "unmap", and of zeroes alone.
                if flags & !u32::from(zeroes) != 0 {
                    return Ok(What::Refused { status: status::UNSUPP, why: "unknown flags" });
                }
                if sectors > MAX_RANGE_SECTORS || !inside(sector, u64::from(sectors), shape) {
                    return Ok(refused("a range too long, or beyond the end of the volume"));
                }
                if sectors > 0 {
                    let len = sectors * SECTOR as u32;
                    ranges.push(Range { offset: sector * SECTOR, len, unmap: flags & 1 != 0 });
                }
            }
            match (ranges.is_empty(), zeroes) {
                (true, _) => What::Nothing,
                (false, true) => What::WriteZeroes(ranges),
                (false, false) => What::Discard(ranges),
            }
        }
        _ => What::Refused { status: status::UNSUPP, why: "a request of an unknown kind" },
    })
}

fn inside(sector: u64, sectors: u64, shape: &Shape) -> bool {
    sector.checked_add(sectors).is_some_and(|end| end <= shape.sectors)
}

/// Copies the guest's bytes into `into`, which is as long as they are: what the guest does to them afterwards matters to
/// nobody, least of all to a checksum.
///
/// # Errors
/// When the memory is not there any more.
pub fn copy_in<M: GuestMemory>(
    memory: &M,
    pieces: &[Piece],
    into: &mut [u8],
) -> Result<(), Malformed> {
    let mut at = 0;
    for piece in pieces {
        let n = (piece.len as usize).min(into.len() - at);
        memory
            .read_slice(&mut into[at..at + n], piece.at)
            .map_err(|_| Malformed::Memory { at: piece.at.0, len: n as u64 })?;
        at += n;
    }
    Ok(())
}

/// Copies `from` into the guest's memory, as far as the pieces go. Returns the bytes written.
///
/// # Errors
/// When the memory is not there any more.
pub fn copy_out<M: GuestMemory>(
    memory: &M,
    from: &[u8],
    pieces: &[Piece],
) -> Result<u32, Malformed> {
    let mut at = 0;
    for piece in pieces {
        let n = (piece.len as usize).min(from.len() - at);
        memory
            .write_slice(&from[at..at + n], piece.at)
            .map_err(|_| Malformed::Memory { at: piece.at.0, len: n as u64 })?;
        at += n;
    }
    Ok(at as u32)
}

/// A volume's name as drivers read it: 20 bytes, zeroes behind a shorter one.
pub fn id(name: &str) -> [u8; ID] {
    let mut out = [0u8; ID];
    let end = (0..=ID.min(name.len())).rev().find(|&n| name.is_char_boundary(n)).unwrap_or(0);
    out[..end].copy_from_slice(&name.as_bytes()[..end]);
    out
}
