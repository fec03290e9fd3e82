//! The journal of an order that applies all of an epoch or nothing: descriptors, data and commit of an epoch.
//!
//! ```text
//! 0        4 KiB    8 KiB    12 KiB
//! +--------+--------+--------+-------------+------ ... ------+
//! | header | header | commit | descriptors | data            |
//! | copy 0 | copy 1 |        |             |                 |
//! +--------+--------+--------+-------------+------ ... ------+
//!
//! descriptors   0   8  magic "LARDERWJ"                     48   8  epoch
//!               8   4  CRC-32C from byte 12 to the end      56   8  generation of the volume (G)
//!              12   4  format version                       64   8  bytes of the data
//!              16  16  UUID of the volume                   72   4  extents
//!              32  16  UUID of the cache                    76   4  checksums
//!                                                           80  16  zero
//!              96      extents of 16 bytes, ascending; none overlaps another
//!                      checksums of 4 bytes, for each 4 KiB of each extent's data
//!                      zeros to a multiple of 4 KiB
//!
//! extent        0   8  offset in the volume                 14   1  kind: 1 data, 2 zero, 3 trim
//!               8   6  bytes                                15   1  flags: 2 may punch
//!
//! commit        0   8  magic "LARDERWC"                     64   8  last sequence: F when the epoch is applied
//!               8   4  CRC-32C of bytes 12..512             72   8  time of the last write
//!              12   4  format version                       80  16  hash over the descriptors
//!              16  16  UUID of the volume                   96   8  bytes of the data
//!              32  16  UUID of the cache                   104   4  bytes of the descriptors
//!              48   8  epoch                               108   4  extents
//!              56   8  generation of the volume (G)        112   2  length of the mark's name, 0 for none
//!                                                          114 255  name of the last mark, UTF-8
//!                                                          369 143  zero
//! ```
//!
//! The header is a [`marker`](super::marker). The data of each extent begins at the next multiple of 512; ZERO and TRIM have
//! none. The commit may be written before, with or after what it covers, as long as one flush follows all of it: it holds only
//! if the descriptors have its hash (SipHash-1-3-128 of all their bytes under the volume's UUID), and they have the checksums
//! of the data. It fits into a sector. Times are in nanoseconds since the Unix epoch.

use std::ops::Range;

use super::write_log::record::{MAX_MARK, MAX_RANGE, MAX_VOLUME, pack, unpack};
use super::write_log::{BLOCK, Wrong, hash, must, pieces};
use crate::superblock::Uuid;
use crate::{PAGE_SIZE, le};

/// The version that this code reads and writes.
pub const VERSION: u32 = 1;
/// Where the commit lies in a journal.
pub const COMMIT_AT: u64 = 2 * PAGE_SIZE as u64;
/// Where the descriptors begin.
pub const DESCRIPTORS_AT: u64 = 3 * PAGE_SIZE as u64;
/// Bytes of a commit.
pub const COMMIT_BYTES: usize = 512;
/// Bytes of each of the two parts of a journal that lies in a file, a block device or an export: those of the largest epoch, and what is said of them, however
/// small its extents are. Epochs go to them in turn.
pub const PART_BYTES: u64 = 64 << 20;
/// Bytes of one request to such a place.
pub const REQUEST_BYTES: u64 = 1 << 20;
/// Requests of a volume to it that are under way at a time.
pub const REQUESTS: usize = 8;
/// Most bytes of data of an extent.
pub const MAX_DATA_EXTENT: u64 = 1 << 30;
/// Most bytes of data of an epoch.
pub const MAX_DATA: u64 = 1 << 40;
/// Most bytes of descriptors of an epoch.
pub const MAX_DESCRIPTORS: u64 = 1 << 30;

const DESCRIPTORS_MAGIC: [u8; 8] = *b"LARDERWJ";
const COMMIT_MAGIC: [u8; 8] = *b"LARDERWC";
const CRC_FROM: usize = 12;
const HEAD_BYTES: usize = 96;
const EXTENT_BYTES: usize = 16;
const MARK_AT: usize = 114;
const MAY_PUNCH: u8 = 2;

/// Why bytes are no part of a journal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JournalError {
    /// They lack the magic number.
    #[error("nothing of this kind is here")]
    Absent,
    /// It is longer than the bytes at hand, if it is whole.
    #[error("{need} bytes are needed, {have} are at hand")]
    Short {
        /// Bytes at hand.
        have: usize,
        /// Bytes that it has.
        need: u64,
    },
    /// The checksum does not hold: torn, or damaged.
    #[error("the checksum does not hold: torn or damaged")]
    Torn,
    /// Of a version that this code does not know.
    #[error(
        "written by version {found} of the format, this program reads version {VERSION}: use a Larder that reads version {found}"
    )]
    Version {
        /// The version it names.
        found: u32,
    },
    /// It is another volume's.
    #[error("of the volume {found}")]
    Volume {
        /// The volume it names.
        found: Uuid,
    },
    /// A field cannot be, though the checksum holds.
    #[error("{field} = {value} cannot be")]
    Field {
        /// Which.
        field: &'static str,
        /// What it says.
        value: u64,
    },
}

impl From<Wrong> for JournalError {
    fn from((field, value): Wrong) -> JournalError {
        JournalError::Field { field, value }
    }
}

/// What an extent will hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// The bytes of its data.
    Data,
    /// Zeros.
    Zero,
    /// Whatever the store gives for a range that is needed no more.
    Trim,
}

/// A stretch of the volume after the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalExtent {
    /// First byte in the volume.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// What it will hold.
    pub kind: ExtentKind,
    /// Whether the store may give up the space of the range, as long as it reads as zeros. Never of data.
    pub may_punch: bool,
}

impl JournalExtent {
    fn data_bytes(&self) -> u64 {
        if self.kind == ExtentKind::Data { self.length } else { 0 }
    }

    fn check(&self) -> Result<(), Wrong> {
        let data = self.kind == ExtentKind::Data;
        let most = if data { MAX_DATA_EXTENT } else { MAX_RANGE };
        must("bytes of an extent", self.length, (1..=most).contains(&self.length))?;
        must("offset of an extent", self.offset, self.offset <= MAX_VOLUME - self.length)?;
        must("flags of an extent", MAY_PUNCH.into(), !(data && self.may_punch))
    }
}

/// How much of a journal an epoch takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    extents: u32,
    sums: u32,
    data: u64,
}

impl Size {
    /// With one extent more; nothing if no journal has room for it.
    pub fn with(self, extent: &JournalExtent) -> Option<Size> {
        let mine = extent.data_bytes();
        let start = if mine == 0 { self.data } else { self.data.next_multiple_of(BLOCK as u64) };
        let data = start.checked_add(mine).filter(|&data| data <= MAX_DATA)?;
        let sums = u32::try_from(pieces::count(mine)).ok()?;
        let extents = self.extents.checked_add(1)?;
        let size = Size { extents, sums: self.sums.checked_add(sums)?, data };
        (size.descriptors_bytes() <= MAX_DESCRIPTORS).then_some(size)
    }

    /// With these extents.
    pub fn of<'a>(extents: impl IntoIterator<Item = &'a JournalExtent>) -> Option<Size> {
        extents.into_iter().try_fold(Size::default(), Size::with)
    }

    /// Bytes of the descriptors.
    pub fn descriptors_bytes(self) -> u64 {
        let contents = u64::from(self.extents) * EXTENT_BYTES as u64 + u64::from(self.sums) * 4;
        (HEAD_BYTES as u64 + contents).next_multiple_of(PAGE_SIZE as u64)
    }

    /// Bytes of the data: they begin where the descriptors end.
    pub fn data_bytes(self) -> u64 {
        self.data
    }

    /// Bytes of a journal that has room for the epoch.
    pub fn journal_bytes(self) -> u64 {
        DESCRIPTORS_AT + self.descriptors_bytes() + self.data
    }
}

/// What an epoch changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptors {
    /// The volume.
    pub volume: Uuid,
    /// The cache that wrote it.
    pub cache: Uuid,
    /// Number of the epoch.
    pub epoch: u64,
    /// Generation of the volume (G).
    pub generation: u64,
    /// The extents, ascending; none overlaps another.
    pub extents: Vec<JournalExtent>,
    /// The checksums of their data, of each extent in its turn ([`pieces::sums`]).
    pub sums: Vec<u32>,
}

/// An extent, and what belongs to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalEntry<'a> {
    /// The extent.
    pub extent: &'a JournalExtent,
    /// Where its data lies, from the first byte of the data; empty without data.
    pub data: Range<u64>,
    /// The checksums of its pieces.
    pub sums: &'a [u32],
}

impl Descriptors {
    /// Refuses what no epoch can be.
    fn check(&self) -> Result<Size, Wrong> {
        let mut end = 0;
        for extent in &self.extents {
            extent.check()?;
            must("offset of an extent", extent.offset, extent.offset >= end)?;
            end = extent.offset + extent.length;
        }
        let count = self.extents.len() as u64;
        let size = Size::of(&self.extents).ok_or(("extents", count))?;
        must("checksums", self.sums.len() as u64, self.sums.len() == size.sums as usize)?;
        Ok(size)
    }

    /// Each extent with its data's place and checksums.
    pub fn entries(&self) -> impl Iterator<Item = JournalEntry<'_>> {
        let (mut end, mut sums) = (0u64, &self.sums[..]);
        self.extents.iter().map(move |extent| {
            let bytes = extent.data_bytes();
            let mine;
            (mine, sums) = sums.split_at((pieces::count(bytes) as usize).min(sums.len()));
            if bytes == 0 {
                return JournalEntry { extent, data: 0..0, sums: mine };
            }
            let start = end.next_multiple_of(BLOCK as u64);
            end = start + bytes;
            JournalEntry { extent, data: start..end, sums: mine }
        })
    }

    /// The descriptors, whole pages of them.
    ///
    /// # Panics
    /// If the extents are not ascending or overlap, one cannot be, the checksums are not theirs in number, or all are too
    /// much for a journal.
    pub fn encode(&self) -> Vec<u8> {
        let size =
            self.check().unwrap_or_else(|(field, value)| panic!("no epoch: {field} = {value}"));
        let mut out = vec![0; size.descriptors_bytes() as usize];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &DESCRIPTORS_MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.volume.0);
        put(32, &self.cache.0);
        put(48, &self.epoch.to_le_bytes());
        put(56, &self.generation.to_le_bytes());
        put(64, &size.data.to_le_bytes());
        put(72, &size.extents.to_le_bytes());
        put(76, &size.sums.to_le_bytes());
        let mut at = HEAD_BYTES;
        for extent in &self.extents {
            let kind = match extent.kind {
                ExtentKind::Data => 1,
                ExtentKind::Zero => 2,
                ExtentKind::Trim => 3,
            };
            put(at, &extent.offset.to_le_bytes());
            put(at + 8, &pack(extent.length, kind, if extent.may_punch { MAY_PUNCH } else { 0 }));
            at += EXTENT_BYTES;
        }
        for sum in &self.sums {
            put(at, &sum.to_le_bytes());
            at += 4;
        }
        let crc = crc32c::crc32c(&out[CRC_FROM..]);
        out[8..12].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads descriptors of `volume` from `bytes`, which begin with them. Whether they are those of a commit is for
    /// [`Commit::covers`] to say.
    ///
    /// # Errors
    /// Any [`JournalError`]. `Short` says how many bytes they have, if they are whole.
    pub fn decode(bytes: &[u8], volume: Uuid) -> Result<Descriptors, JournalError> {
        use JournalError as E;
        if !bytes.starts_with(&DESCRIPTORS_MAGIC) {
            return Err(E::Absent);
        }
        let short = |need| E::Short { have: bytes.len(), need };
        let head = bytes.get(..HEAD_BYTES).ok_or(short(PAGE_SIZE as u64))?;
        let u64_at = |at: usize| le(&head[at..at + 8]);
        let u32_at = |at: usize| le(&head[at..at + 4]) as u32;
        let size = Size { extents: u32_at(72), sums: u32_at(76), data: u64_at(64) };
        let need = size.descriptors_bytes();
        let all =
            usize::try_from(need).ok().and_then(|need| bytes.get(..need)).ok_or(short(need))?;
        if u32_at(8) != crc32c::crc32c(&all[CRC_FROM..]) {
            return Err(E::Torn);
        }
        if u32_at(12) != VERSION {
            return Err(E::Version { found: u32_at(12) });
        }
        let uuid_at = |at: usize| Uuid(head[at..at + 16].try_into().expect("16 bytes"));
        if uuid_at(16) != volume {
            return Err(E::Volume { found: uuid_at(16) });
        }
        let (extents, rest) = all[HEAD_BYTES..].split_at(size.extents as usize * EXTENT_BYTES);
        let extents =
            extents.chunks_exact(EXTENT_BYTES).map(|bytes| -> Result<JournalExtent, Wrong> {
                let (length, kind, flags) = unpack(&bytes[8..]);
                let kind = match kind {
                    1 => ExtentKind::Data,
                    2 => ExtentKind::Zero,
                    3 => ExtentKind::Trim,
                    _ => return Err(("kind of an extent", kind.into())),
                };
                must("flags of an extent", flags.into(), flags & !MAY_PUNCH == 0)?;
                Ok(JournalExtent { offset: le(&bytes[..8]), length, kind, may_punch: flags != 0 })
            });
        let found = Descriptors {
            volume,
            cache: uuid_at(32),
            epoch: u64_at(48),
            generation: u64_at(56),
            extents: extents.collect::<Result<_, Wrong>>()?,
            sums: rest[..size.sums as usize * 4]
                .chunks_exact(4)
                .map(|sum| le(sum) as u32)
                .collect(),
        };
        let right = found.check()?;
        must("bytes of the data", size.data, size.data == right.data)?;
        Ok(found)
    }
}

/// What makes an epoch count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Commit {
    /// The volume.
    pub volume: Uuid,
    /// The cache that wrote it.
    pub cache: Uuid,
    /// Number of the epoch.
    pub epoch: u64,
    /// Generation of the volume (G).
    pub generation: u64,
    /// The last sequence of the epoch: F when it is applied.
    pub last: u64,
    /// Time of the last write of the epoch.
    pub time: u64,
    /// The last mark in it.
    pub mark: Option<String>,
    /// Extents of the epoch.
    pub extents: u32,
    /// Bytes of the descriptors.
    pub descriptors: u32,
    /// Bytes of the data.
    pub data: u64,
    /// Hash over the descriptors.
    pub hash: u128,
}

impl Commit {
    /// The commit of `descriptors`, which were encoded to `bytes`.
    ///
    /// # Panics
    /// If the descriptors cannot be, as [`Descriptors::encode`].
    pub fn of(
        descriptors: &Descriptors,
        bytes: &[u8],
        last: u64,
        time: u64,
        mark: Option<String>,
    ) -> Commit {
        let size = Size::of(&descriptors.extents).expect("an epoch that fits");
        Commit {
            volume: descriptors.volume,
            cache: descriptors.cache,
            epoch: descriptors.epoch,
            generation: descriptors.generation,
            last,
            time,
            mark,
            extents: size.extents,
            descriptors: bytes.len() as u32,
            data: size.data,
            hash: hash(descriptors.volume, bytes),
        }
    }

    /// Whether it commits the descriptors in these bytes, all of them.
    pub fn covers(&self, bytes: &[u8]) -> bool {
        bytes.len() == self.descriptors as usize && hash(self.volume, bytes) == self.hash
    }

    /// The bytes of the commit.
    ///
    /// # Panics
    /// If the mark's name is empty or longer than [`MAX_MARK`].
    pub fn encode(&self) -> [u8; COMMIT_BYTES] {
        let mark = self.mark.as_deref().unwrap_or("");
        assert!(mark.len() <= MAX_MARK, "the mark's name is too long");
        assert_eq!(self.mark.is_none(), mark.is_empty(), "the mark has no name");
        let mut out = [0; COMMIT_BYTES];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &COMMIT_MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.volume.0);
        put(32, &self.cache.0);
        put(48, &self.epoch.to_le_bytes());
        put(56, &self.generation.to_le_bytes());
        put(64, &self.last.to_le_bytes());
        put(72, &self.time.to_le_bytes());
        put(80, &self.hash.to_le_bytes());
        put(96, &self.data.to_le_bytes());
        put(104, &self.descriptors.to_le_bytes());
        put(108, &self.extents.to_le_bytes());
        put(112, &(mark.len() as u16).to_le_bytes());
        put(MARK_AT, mark.as_bytes());
        let crc = crc32c::crc32c(&out[CRC_FROM..]);
        out[8..12].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Reads the commit of an epoch of `volume`.
    ///
    /// # Errors
    /// Any [`JournalError`].
    pub fn decode(bytes: &[u8], volume: Uuid) -> Result<Commit, JournalError> {
        use JournalError as E;
        if !bytes.starts_with(&COMMIT_MAGIC) {
            return Err(E::Absent);
        }
        let short = E::Short { have: bytes.len(), need: COMMIT_BYTES as u64 };
        let bytes = bytes.get(..COMMIT_BYTES).ok_or(short)?;
        let u64_at = |at: usize| le(&bytes[at..at + 8]);
        let u32_at = |at: usize| le(&bytes[at..at + 4]) as u32;
        let uuid_at = |at: usize| Uuid(bytes[at..at + 16].try_into().expect("16 bytes"));
        if u32_at(8) != crc32c::crc32c(&bytes[CRC_FROM..]) {
            return Err(E::Torn);
        }
        if u32_at(12) != VERSION {
            return Err(E::Version { found: u32_at(12) });
        }
        if uuid_at(16) != volume {
            return Err(E::Volume { found: uuid_at(16) });
        }
        let len = le(&bytes[112..114]);
        let field = E::Field { field: "length of the mark's name", value: len };
        let mark = bytes[MARK_AT..MARK_AT + MAX_MARK].get(..len as usize);
        let mark = mark.and_then(|mark| std::str::from_utf8(mark).ok()).ok_or(field)?;
        Ok(Commit {
            volume,
            cache: uuid_at(32),
            epoch: u64_at(48),
            generation: u64_at(56),
            last: u64_at(64),
            time: u64_at(72),
            mark: (!mark.is_empty()).then(|| mark.to_owned()),
            extents: u32_at(108),
            descriptors: u32_at(104),
            data: u64_at(96),
            hash: u128::from_le_bytes(bytes[80..96].try_into().expect("16 bytes")),
        })
    }
}
