//! A segment: its header, and when it is full.
//!
//! ```text
//! header   0   8  magic "LARDERWS"                         64   4  bytes of the segment
//!          8   4  CRC-32C of bytes 12..512                 68   4  bytes of a sector, 512 or 4096
//!         12   4  format version                           72   4  parked: the volume's attachment number; else 0
//!         16  16  UUID of the cache                        76   4  zero
//!         32   8  generation                               80  16  parked: the volume's UUID; else zero
//!         40   8  number of its first batch                96   8  parked: the volume's generation (G); else 0
//!         48   8  run that began it                       104 408  zero
//!         56   8  when it was begun
//! ```
//!
//! The header fills the first sector with zeros behind it, and may be written together with the first batch. Generations
//! are drawn from one counter for all segments, from 1, and never again: a freed segment keeps its bytes until it is
//! reused, and its generation tells them from what counts.
//!
//! A segment is sealed with a [`footer`](super::footer), which lies at its end and has every record once more. [`Room`]
//! keeps free what the footer will need. Its part of a segment depends on the records:
//!
//! | batches | footer of a segment of 8 MiB |
//! | --- | --- |
//! | one write of 4 KiB each | 2.3 % |
//! | 64 and more writes of 4 KiB each | 1.3 % |
//! | 2,048 writes of 512 bytes each | 7.7 % |
//! | one ZERO or TRIM each | 17 % |
//! | 2,048 ZERO or TRIM each | 49 %, the worst: a record has 48 bytes in the header and 48 in the footer |

use super::footer;
use super::record::Shape;
use super::{Batch, PartError, VERSION, must};
use crate::le;
use crate::superblock::Uuid;

/// Bytes of a segment, unless tests want small ones.
pub const SEGMENT_BYTES: u32 = 8 << 20;
/// Bytes that a segment's header has for itself; the rest of its sector is zero.
pub const HEADER_BYTES: usize = 512;
/// The smallest segment.
pub const MIN_SEGMENT: u32 = 16 << 10;
/// The largest segment.
pub const MAX_SEGMENT: u32 = 1 << 30;

const MAGIC: [u8; 8] = *b"LARDERWS";
const CRC_FROM: usize = 12;

/// Why a log cannot have such segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "segments of {bytes} bytes with sectors of {sector}: a sector has 512 or 4096 bytes, a segment a multiple of 4096, between {MIN_SEGMENT} and {MAX_SEGMENT}"
)]
pub struct SegmentGeometryError {
    /// Bytes of a segment.
    pub bytes: u32,
    /// Bytes of a sector.
    pub sector: u32,
}

/// How large segments and sectors are: the same for all of a log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentGeometry {
    bytes: u32,
    sector: u32,
}

impl SegmentGeometry {
    /// Segments of `bytes` on a device that writes sectors of `sector` bytes as a whole or not at all.
    ///
    /// # Errors
    /// A sector that is neither 512 nor 4096 bytes, or a segment that is no multiple of 4096, or too small or large.
    pub fn new(bytes: u32, sector: u32) -> Result<SegmentGeometry, SegmentGeometryError> {
        let right = (MIN_SEGMENT..=MAX_SEGMENT).contains(&bytes)
            && bytes.is_multiple_of(4096)
            && matches!(sector, 512 | 4096);
        right
            .then_some(SegmentGeometry { bytes, sector })
            .ok_or(SegmentGeometryError { bytes, sector })
    }

    /// Bytes of a segment.
    pub fn bytes(self) -> u32 {
        self.bytes
    }

    /// Bytes of a sector: batches begin at multiples of this, the first behind the header's sector.
    pub fn sector(self) -> u32 {
        self.sector
    }
}

/// The volume that a segment is parked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parked {
    /// Its attachment number, from 1.
    pub attachment: u32,
    /// Its UUID.
    pub volume: Uuid,
    /// Its generation (G).
    pub generation: u64,
}

/// What a segment says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The cache.
    pub cache: Uuid,
    /// Generation of the segment, from 1.
    pub generation: u64,
    /// Number of its first batch, from 1.
    pub first: u64,
    /// The run that began it.
    pub run: u64,
    /// When that was.
    pub time: u64,
    /// How large it is.
    pub geometry: SegmentGeometry,
    /// The volume that it is parked for, unless it is of the main chain.
    pub parked: Option<Parked>,
}

impl SegmentHeader {
    fn check(&self) -> Result<(), (&'static str, u64)> {
        must("generation", self.generation, self.generation > 0)?;
        must("first batch", self.first, self.first > 0)?;
        match self.parked {
            Some(parked) => must("attachment number", 0, parked.attachment > 0),
            None => Ok(()),
        }
    }

    /// Writes the header to `out`, the segment's first sector.
    ///
    /// # Panics
    /// If `out` is not a sector, or generation, first batch or attachment number is 0.
    pub fn encode(&self, out: &mut [u8]) {
        assert_eq!(out.len(), self.geometry.sector as usize, "a sector");
        assert_eq!(self.check(), Ok(()), "no header of a segment");
        out.fill(0);
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(12, &VERSION.to_le_bytes());
        put(16, &self.cache.0);
        put(32, &self.generation.to_le_bytes());
        put(40, &self.first.to_le_bytes());
        put(48, &self.run.to_le_bytes());
        put(56, &self.time.to_le_bytes());
        put(64, &self.geometry.bytes.to_le_bytes());
        put(68, &self.geometry.sector.to_le_bytes());
        if let Some(parked) = &self.parked {
            put(72, &parked.attachment.to_le_bytes());
            put(80, &parked.volume.0);
            put(96, &parked.generation.to_le_bytes());
        }
        let crc = crc32c::crc32c(&out[CRC_FROM..HEADER_BYTES]);
        out[8..12].copy_from_slice(&crc.to_le_bytes());
    }

    /// Reads the header of a segment of this cache from the segment's first bytes.
    ///
    /// # Errors
    /// Any [`PartError`] but `Generation`, `Place` and `Record`.
    pub fn decode(bytes: &[u8], cache: Uuid) -> Result<SegmentHeader, PartError> {
        use PartError as E;
        if !bytes.starts_with(&MAGIC) {
            return Err(E::Absent);
        }
        let short = E::Short { have: bytes.len(), need: HEADER_BYTES };
        let bytes = bytes.get(..HEADER_BYTES).ok_or(short)?;
        let u64_at = |at: usize| le(&bytes[at..at + 8]);
        let u32_at = |at: usize| le(&bytes[at..at + 4]) as u32;
        let uuid_at = |at: usize| Uuid(bytes[at..at + 16].try_into().expect("16 bytes"));
        if u32_at(8) != crc32c::crc32c(&bytes[CRC_FROM..]) {
            return Err(E::Torn);
        }
        if u32_at(12) != VERSION {
            return Err(E::Version { found: u32_at(12) });
        }
        if uuid_at(16) != cache {
            return Err(E::Cache { found: uuid_at(16) });
        }
        let geometry = SegmentGeometry::new(u32_at(64), u32_at(68))
            .map_err(|e| E::Field { field: "bytes of the segment", value: e.bytes.into() })?;
        let parked = Parked { attachment: u32_at(72), volume: uuid_at(80), generation: u64_at(96) };
        let found = SegmentHeader {
            cache,
            generation: u64_at(32),
            first: u64_at(40),
            run: u64_at(48),
            time: u64_at(56),
            geometry,
            parked: (parked.attachment > 0).then_some(parked),
        };
        found.check()?;
        Ok(found)
    }
}

/// How full a segment is. A batch gets a place only if the footer will fit behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    geometry: SegmentGeometry,
    used: u32,
    batches: u32,
    records: u32,
    sums: u32,
}

impl Room {
    /// That of a segment with nothing but its header.
    pub fn new(geometry: SegmentGeometry) -> Room {
        Room { geometry, used: geometry.sector, batches: 0, records: 0, sums: 0 }
    }

    /// That of a segment which has these batches and will be filled up behind the last.
    pub fn behind<'a>(
        geometry: SegmentGeometry,
        batches: impl IntoIterator<Item = &'a Batch>,
    ) -> Room {
        batches.into_iter().fold(Room::new(geometry), |room, batch| {
            let shape = batch.contents.shape();
            let end = batch.head.at.saturating_add(shape.bytes(geometry.sector));
            Room { used: room.used.max(end), ..room.counting(shape) }
        })
    }

    fn counting(self, shape: Shape) -> Room {
        Room {
            batches: self.batches + 1,
            records: self.records + shape.records(),
            sums: self.sums + shape.sums(),
            ..self
        }
    }

    /// Where a batch of this shape may be written, or nothing if the segment is full for it: then it is time for the footer
    /// and another segment.
    pub fn take(&mut self, shape: Shape) -> Option<u32> {
        let end = self.used.checked_add(shape.bytes(self.geometry.sector))?;
        let next = Room { used: end, ..self.counting(shape) };
        let fits = u64::from(end) + u64::from(next.footer_bytes()) <= self.geometry.bytes.into();
        fits.then(|| std::mem::replace(self, next).used)
    }

    /// Bytes in use, the header included: where the next batch begins.
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Bytes that the footer needs for what is there now.
    pub fn footer_bytes(&self) -> u32 {
        footer::bytes(self.batches, self.records, self.sums, self.geometry.sector)
    }
}
