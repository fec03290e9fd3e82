//! The marker beside a backing store: whether a cache holds data that the store does not have, and which cache.
//!
//! ```text
//!    0   8  magic "LARDERWM"                            | fixed in every version
//!    8   4  CRC-32C of bytes 12..4096                   |
//!   12   4  format version                              |
//!   16   8  marker number: raised at each write         |
//!   24  16  UUID of the volume
//!   40  16  UUID of the cache
//!   56   8  the cache's run: its superblock's epoch
//!   64   8  generation of the volume (G)
//!   72   8  F: all up to this sequence was durable in the store when this was written
//!   80   8  time of the last write that F covers
//!   88   8  last epoch of the journal that was applied, and flushed
//!   96   4  attachment number of the volume on the cache: F counts its sequences
//!  100   1  state: 0 clean, 1 dirty, 2 carried, 3 closing, 4 closed
//!  101   1  order: 0 any, 1 ordered by flushes, 2 ordered by completions, 3 journaled
//!  102   2  length of the host's name
//!  104   2  length of the mark's name, 0 for none
//!  106   6  zero
//!  112  64  identity of the backing store
//!  176 255  name of the host, UTF-8
//!  431 255  name of the last mark that F covers, UTF-8
//!  686   8  until the store has all up to this sequence it alone may be no image that ever was; 0 if it is one
//!  694   1  1: the first sector of the store may hold a probe of a journal's place in place of zeros
//!  695      zero
//! ```
//!
//! There are two copies of 4 KiB; a marker goes to the copy that its number names ([`Marker::copy`]), so a torn write leaves
//! the one before. A change of state is complete when both copies have it: with one alone, damage to that copy would bring
//! back what the other says. The same bytes head a journal. Times are in nanoseconds since the Unix epoch.

use super::write_log::record::MAX_MARK;
use crate::le;
use crate::superblock::Uuid;

/// What a marker begins with.
pub const MAGIC: [u8; 8] = *b"LARDERWM";
/// The version that this code reads and writes.
pub const VERSION: u32 = 1;
/// Bytes of a copy.
pub const COPY_BYTES: usize = 4096;
/// Most bytes of a host's name.
pub const MAX_HOST: usize = 255;

const CRC_FROM: usize = 12;
const HOST_AT: usize = 176;
const MARK_AT: usize = HOST_AT + MAX_HOST;
const JOINS_AT: usize = MARK_AT + MAX_MARK;
const PROBES_AT: usize = JOINS_AT + 8;

/// What the cache that a marker names holds of the volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkerState {
    /// Nothing that the store lacks.
    Clean,
    /// Perhaps data that the store lacks, in its log.
    Dirty,
    /// The same, put aside: whoever has the cache may take it up.
    Carried,
    /// The log failed and is being drained: what is durable on the cache counts.
    Closing,
    /// The log failed; the store has all up to F, and what is durable on the cache counts from there on.
    Closed,
}

/// In which order the store gets what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// In any.
    Any,
    /// What a flush covers comes before what was written later.
    Flush,
    /// What was complete comes before what was issued later.
    Completion,
    /// All of an epoch, or nothing of it.
    Journaled,
}

const STATES: [MarkerState; 5] = [
    MarkerState::Clean,
    MarkerState::Dirty,
    MarkerState::Carried,
    MarkerState::Closing,
    MarkerState::Closed,
];
const ORDERS: [Order; 4] = [Order::Any, Order::Flush, Order::Completion, Order::Journaled];

impl Order {
    /// Its number on flash.
    pub(super) fn code(self) -> u8 {
        ORDERS.iter().position(|&order| order == self).expect("all are listed") as u8
    }

    /// The order of this number, if there is one.
    pub(super) fn of(code: u8) -> Option<Order> {
        ORDERS.get(usize::from(code)).copied()
    }
}

/// What a marker says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marker {
    /// Raised at each write of the marker.
    pub number: u64,
    /// What the cache holds.
    pub state: MarkerState,
    /// The volume.
    pub volume: Uuid,
    /// Identity of the backing store: a copy of the store has another.
    pub identity: [u8; 64],
    /// The cache; of a clean marker, the last one.
    pub cache: Uuid,
    /// The cache's run: its superblock's epoch.
    pub run: u64,
    /// Name of the host that wrote this.
    pub host: String,
    /// Generation of the volume (G).
    pub generation: u64,
    /// Attachment number of the volume on the cache: `frontier` counts its sequences.
    pub attachment: u32,
    /// F: all up to this sequence was durable in the store when this was written.
    pub frontier: u64,
    /// Time of the last write that F covers.
    pub time: u64,
    /// The last mark that F covers.
    pub mark: Option<String>,
    /// In which order the store gets what was written.
    pub order: Order,
    /// The last epoch of the journal that was applied, and flushed.
    pub applied: u64,
    /// Until the store has all up to this sequence it alone may be no image that ever was: what could not be read was written again, and comes there with
    /// all behind it. 0, or up to `frontier`: it is one.
    pub joins: u64,
    /// It is being found out whether the place of the volume's journal is the store by another name: the first sector of the store may hold a
    /// [probe](probe) in place of zeros. Nothing was answered under this marker yet.
    pub probes: bool,
}

/// The sector that is written to a journal's place, over zeros, to find out whether the store has it then. It begins as a marker does, whose first write
/// was cut short: a place of a journal or marker that holds it holds nothing. `random` is like nothing else.
pub fn probe(random: [u8; 16]) -> [u8; PROBE_BYTES] {
    let mut out = [0; PROBE_BYTES];
    out[..8].copy_from_slice(&MAGIC);
    // It is no marker's.
    out[12..16].copy_from_slice(&u32::MAX.to_le_bytes());
    out[PROBE_AT..PROBE_AT + PROBE_WORDS.len()].copy_from_slice(PROBE_WORDS);
    let at = PROBE_BYTES - 4 - random.len();
    out[at..PROBE_BYTES - 4].copy_from_slice(&random);
    let crc = crc32c::crc32c(&out[..PROBE_BYTES - 4]);
    out[PROBE_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    out
}

/// Whether these bytes begin with a [`probe`]: zeros were there.
pub fn is_probe(bytes: &[u8]) -> bool {
    let Some((sector, _)) = bytes.split_at_checked(PROBE_BYTES) else { return false };
    let crc = le(&sector[PROBE_BYTES - 4..]) as u32;
    sector.starts_with(&MAGIC)
        && sector[PROBE_AT..].starts_with(PROBE_WORDS)
        && crc == crc32c::crc32c(&sector[..PROBE_BYTES - 4])
}

/// Bytes of a [`probe`]: a sector.
pub const PROBE_BYTES: usize = 512;
const PROBE_AT: usize = 16;
const PROBE_WORDS: &[u8] =
    b"These 512 bytes were zeros. Larder was finding out whether a journal's place is this store by another name; write zeros here.";

/// Why there is no marker.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MarkerError {
    /// Neither copy begins with the magic number.
    #[error("there is no marker")]
    None,
    /// No copy is whole, and there is at least a trace of one.
    #[error("both copies of the marker are damaged")]
    Damaged,
    /// Written by another version.
    #[error(
        "the marker was written by version {found} of the format, this program reads version {VERSION}: use a Larder that reads version {found}"
    )]
    Version {
        /// What the marker says.
        found: u32,
    },
    /// A field cannot be, though the checksum holds.
    #[error("the marker says {field} = {value}, which cannot be")]
    Field {
        /// Which.
        field: &'static str,
        /// What it says.
        value: u64,
    },
}

impl Marker {
    /// The copy that it goes to, 0 or 1.
    pub fn copy(&self) -> usize {
        (self.number % 2) as usize
    }

    /// The bytes of this copy.
    ///
    /// # Panics
    /// If the host's name is longer than [`MAX_HOST`], or the mark's is empty or longer than
    /// [`MAX_MARK`].
    pub fn encode(&self) -> Vec<u8> {
        let mark = self.mark.as_deref().unwrap_or("");
        assert!(self.host.len() <= MAX_HOST, "the host's name is too long");
        assert!(mark.len() <= MAX_MARK, "the mark's name is too long");
        assert_eq!(self.mark.is_none(), mark.is_empty(), "the mark has no name");
        let mut out = vec![0; COPY_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.number.to_le_bytes());
        put(24, &self.volume.0);
        put(40, &self.cache.0);
        put(56, &self.run.to_le_bytes());
        put(64, &self.generation.to_le_bytes());
        put(72, &self.frontier.to_le_bytes());
        put(80, &self.time.to_le_bytes());
        put(88, &self.applied.to_le_bytes());
        put(96, &self.attachment.to_le_bytes());
        let code = |at: Option<usize>| at.expect("all are listed") as u8;
        put(100, &[code(STATES.iter().position(|&state| state == self.state))]);
        put(101, &[self.order.code()]);
        put(102, &(self.host.len() as u16).to_le_bytes());
        put(104, &(mark.len() as u16).to_le_bytes());
        put(112, &self.identity);
        put(HOST_AT, self.host.as_bytes());
        put(MARK_AT, mark.as_bytes());
        put(JOINS_AT, &self.joins.to_le_bytes());
        put(PROBES_AT, &[u8::from(self.probes)]);
        let crc = crc32c::crc32c(&out[CRC_FROM..]);
        out[8..12].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads one copy; [`choose`] is what a start needs.
    ///
    /// # Errors
    /// [`MarkerError::None`] without the magic number, `Damaged` with a wrong checksum or too few bytes; the others as they say.
    pub fn decode(bytes: &[u8]) -> Result<Marker, MarkerError> {
        use MarkerError as E;
        if !bytes.starts_with(&MAGIC) {
            return Err(E::None);
        }
        let bytes = bytes.get(..COPY_BYTES).ok_or(E::Damaged)?;
        let u64_at = |at: usize| le(&bytes[at..at + 8]);
        let u32_at = |at: usize| le(&bytes[at..at + 4]) as u32;
        let uuid_at = |at: usize| Uuid(bytes[at..at + 16].try_into().expect("16 bytes"));
        if u32_at(8) != crc32c::crc32c(&bytes[CRC_FROM..]) {
            return Err(E::Damaged);
        }
        if u32_at(12) != VERSION {
            return Err(E::Version { found: u32_at(12) });
        }
        let field = |field, value: u64| E::Field { field, value };
        let text = |name, len_at: usize, at: usize, most: usize| {
            let len = le(&bytes[len_at..len_at + 2]);
            let text = bytes[at..at + most].get(..len as usize).ok_or(field(name, len))?;
            std::str::from_utf8(text).map(str::to_owned).map_err(|_| field(name, len))
        };
        let (state, order) = (bytes[100], bytes[101]);
        let mark = text("length of the mark's name", 104, MARK_AT, MAX_MARK)?;
        Ok(Marker {
            number: u64_at(16),
            state: *STATES.get(usize::from(state)).ok_or(field("state", state.into()))?,
            volume: uuid_at(24),
            identity: bytes[112..HOST_AT].try_into().expect("64 bytes"),
            cache: uuid_at(40),
            run: u64_at(56),
            host: text("length of the host's name", 102, HOST_AT, MAX_HOST)?,
            generation: u64_at(64),
            attachment: u32_at(96),
            frontier: u64_at(72),
            time: u64_at(80),
            mark: (!mark.is_empty()).then_some(mark),
            order: Order::of(order).ok_or(field("order", order.into()))?,
            applied: u64_at(88),
            joins: u64_at(JOINS_AT),
            probes: match bytes[PROBES_AT] {
                0 => false,
                1 => true,
                other => return Err(field("whether there may be a probe", other.into())),
            },
        })
    }
}

/// The marker that rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// It.
    pub marker: Marker,
    /// The copy that it was read from.
    pub copy: usize,
    /// Whether the other copy is whole, too. If it is not, it may have been the newer one.
    pub other_whole: bool,
}

/// The copy with the higher number of those whose checksum holds. If that one cannot be read otherwise, because of its version
/// or a field, it is refused, even if the other copy could be read.
///
/// # Errors
/// As [`Marker::decode`]; `Damaged` if no copy is whole and at least one has the magic number.
pub fn choose(a: &[u8], b: &[u8]) -> Result<Chosen, MarkerError> {
    use MarkerError as E;
    let read = |bytes: &[u8]| {
        let decoded = Marker::decode(bytes);
        let whole = !matches!(decoded, Err(E::None | E::Damaged));
        (decoded, whole.then(|| le(&bytes[16..24])))
    };
    let (copy, decoded, other) = match (read(a), read(b)) {
        ((Err(E::None), None), (Err(E::None), None)) => return Err(E::None),
        ((_, None), (_, None)) => return Err(E::Damaged),
        ((_, x), (b, y)) if y > x => (1, b, x),
        ((a, _), (_, y)) => (0, a, y),
    };
    Ok(Chosen { marker: decoded?, copy, other_whole: other.is_some() })
}
