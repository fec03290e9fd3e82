//! What a superblock says of write-back: where the log lies, and what it has to do with each volume.

use larder_base::ByteSize;

use super::BlockSuperblockError;
use crate::block::marker::Order;
use crate::block::write_log::segment::SEGMENT_BYTES;
use crate::block::write_log::{SegmentGeometry, SegmentGeometryError};
use crate::le;
use crate::superblock::Uuid;

/// Fewest segments of a write log: a few live ones, and those of the reserve.
pub const LEAST_LOG_SEGMENTS: u32 = 8;
/// The smallest segment of a write log, bytes; only tests want less than
/// [`SEGMENT_BYTES`].
pub const LEAST_SEGMENT: u32 = 64 << 10;
/// Most bytes of a write log: 32 bits number the checksums in it.
pub const MOST_LOG_BYTES: u64 = 1 << 40;

/// Bytes that the entry of a volume has more where there is a write log.
pub(super) const ENTRY_BYTES: usize = 72;

const AREA_BYTES: usize = 20;
const MIB: u64 = 1 << 20;
/// A log that begins here, or before, ends at a byte that a file can have.
const LAST_AT: u64 = i64::MAX as u64 - MOST_LOG_BYTES;

/// Where the write log of a device lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteLogArea {
    /// Its first byte, a multiple of 1 MiB.
    pub at: u64,
    /// How many segments it has.
    pub segments: u32,
    /// How large they are.
    pub geometry: SegmentGeometry,
}

/// Why there can be no such write log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteLogAreaError {
    /// Segments or sectors cannot be.
    #[error(transparent)]
    Geometry(#[from] SegmentGeometryError),
    /// Too small a segment for a log.
    #[error(
        "segments of {0} bytes are too small for a write log: at least {LEAST_SEGMENT} bytes are needed"
    )]
    Segment(u32),
    /// Too few segments.
    #[error(
        "{} are too few for a write log: at least {} are needed; give it more, or format without one",
        ByteSize(*bytes),
        ByteSize(*least)
    )]
    Small {
        /// Bytes that were asked for.
        bytes: u64,
        /// Bytes that are needed.
        least: u64,
    },
    /// More than can be.
    #[error(
        "{} are too many for a write log: at most {} are possible, ask for fewer",
        ByteSize(*bytes),
        ByteSize(*most)
    )]
    Large {
        /// Bytes that were asked for.
        bytes: u64,
        /// Most that can be.
        most: u64,
    },
    /// No device can have so much before it.
    #[error("{0} bytes before a write log are too many: format a smaller cache")]
    Far(u64),
}

impl WriteLogArea {
    /// A log of at most `bytes` behind a layout that ends at `layout_device`, on a device that writes sectors of `sector` bytes as
    /// a whole or not at all: whole segments of [`SEGMENT_BYTES`].
    ///
    /// # Errors
    /// [`WriteLogAreaError`]: above all fewer than [`LEAST_LOG_SEGMENTS`] segments.
    pub fn of(
        layout_device: u64,
        bytes: u64,
        sector: u32,
    ) -> Result<WriteLogArea, WriteLogAreaError> {
        let geometry = SegmentGeometry::new(SEGMENT_BYTES, sector)?;
        Self::with_segments(layout_device, bytes, geometry)
    }

    /// The same with segments of another size.
    ///
    /// # Errors
    /// As [`WriteLogArea::of`].
    pub fn with_segments(
        layout_device: u64,
        bytes: u64,
        geometry: SegmentGeometry,
    ) -> Result<WriteLogArea, WriteLogAreaError> {
        use WriteLogAreaError as E;
        let segment = u64::from(geometry.bytes());
        if geometry.bytes() < LEAST_SEGMENT {
            return Err(E::Segment(geometry.bytes()));
        }
        let least = u64::from(LEAST_LOG_SEGMENTS) * segment;
        if bytes < least {
            return Err(E::Small { bytes, least });
        }
        if bytes > MOST_LOG_BYTES {
            return Err(E::Large { bytes, most: MOST_LOG_BYTES });
        }
        let segments = (bytes / segment) as u32;
        if layout_device > LAST_AT - MIB {
            return Err(E::Far(layout_device));
        }
        Ok(WriteLogArea { at: layout_device.next_multiple_of(MIB), segments, geometry })
    }

    /// Bytes that it has.
    pub fn bytes(&self) -> u64 {
        u64::from(self.segments) * u64::from(self.geometry.bytes())
    }

    /// The first byte behind it: what the device must have.
    pub fn end(&self) -> u64 {
        self.at.saturating_add(self.bytes())
    }

    /// The first byte of a segment.
    pub fn segment_at(&self, segment: u32) -> u64 {
        self.at.saturating_add(u64::from(segment) * u64::from(self.geometry.bytes()))
    }

    pub(super) fn encode(&self) -> [u8; AREA_BYTES] {
        let mut out = [0; AREA_BYTES];
        out[..8].copy_from_slice(&self.at.to_le_bytes());
        out[8..12].copy_from_slice(&self.segments.to_le_bytes());
        out[12..16].copy_from_slice(&self.geometry.bytes().to_le_bytes());
        out[16..20].copy_from_slice(&self.geometry.sector().to_le_bytes());
        out
    }

    /// Reads the area of a log that lies behind `layout_device`.
    pub(super) fn decode(
        bytes: &[u8],
        layout_device: u64,
    ) -> Result<WriteLogArea, BlockSuperblockError> {
        let wrong = |field, value| BlockSuperblockError::Field { field, value };
        let (at, segments) = (le(&bytes[..8]), le(&bytes[8..12]) as u32);
        let (segment, sector) = (le(&bytes[12..16]) as u32, le(&bytes[16..20]) as u32);
        let geometry = SegmentGeometry::new(segment, sector).ok();
        let geometry = geometry.filter(|g| g.bytes() >= LEAST_SEGMENT).ok_or_else(|| {
            match matches!(sector, 512 | 4096) {
                true => wrong("bytes of a segment of the write log", segment.into()),
                false => wrong("bytes of a sector of the write log", sector.into()),
            }
        })?;
        let found = WriteLogArea { at, segments, geometry };
        let behind = at.is_multiple_of(MIB) && at >= layout_device;
        if !behind || at > LAST_AT {
            return Err(wrong("first byte of the write log", at));
        }
        if segments < LEAST_LOG_SEGMENTS || found.bytes() > MOST_LOG_BYTES {
            return Err(wrong("segments of the write log", segments.into()));
        }
        Ok(found)
    }
}

/// What the log of this cache holds of a volume. The volume's marker decides what that is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldsState {
    /// Nothing is known of it.
    Nothing,
    /// Nothing that the store lacks, since this generation was detached.
    Clean,
    /// Perhaps data of this generation that the store lacks.
    Open,
    /// The same, while a volume is taken up that was carried: data of the generation before counts until the marker has this one.
    TakingUp,
    /// Data that the store lacks, put aside.
    Carried,
}

const STATES: [HoldsState; 5] = [
    HoldsState::Nothing,
    HoldsState::Clean,
    HoldsState::Open,
    HoldsState::TakingUp,
    HoldsState::Carried,
];

impl HoldsState {
    /// Whether the log may hold data that the store lacks.
    pub fn may_be_dirty(self) -> bool {
        matches!(self, HoldsState::Open | HoldsState::TakingUp | HoldsState::Carried)
    }
}

/// A volume that is written back, or was: what the cache's own superblock says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrittenBack {
    /// The volume's UUID: another one's than any other volume's of the device.
    pub volume: Uuid,
    /// Its attachment number on this device, from 1; 0 while it has none, and then the log holds nothing of it.
    pub attachment: u32,
    /// The sequence behind which it was attached under this number.
    pub began: u64,
    /// What the log holds of it.
    pub holds: HoldsState,
    /// Its generation (G), from 1; 0 while nothing is known.
    pub generation: u64,
    /// The number of its marker that was last known durable.
    pub marker: u64,
    /// The run of this cache that attached it last, or went on with it: the marker that this cache has written is of no later one. A run that
    /// only keeps what is dirty of it leaves this as it was.
    pub run: u64,
    /// In which order its store gets what was written.
    pub order: Order,
    /// What an operator has given up of it.
    pub cut: Option<Cut>,
}

/// Records of a volume up to a sequence count below a byte alone: what they have behind it was given up, since its store ends there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The first byte of the volume that does not count.
    pub end: u64,
    /// The last record of which that is so, from 1.
    pub last: u64,
}

impl WrittenBack {
    /// Whether it can stand beside `other` on one device.
    pub(super) fn is_apart(&self, other: &WrittenBack) -> bool {
        self.volume != other.volume && (self.attachment != other.attachment || self.attachment == 0)
    }

    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut out = [0; ENTRY_BYTES];
        let state = STATES.iter().position(|&state| state == self.holds);
        out[..16].copy_from_slice(&self.volume.0);
        out[16..20].copy_from_slice(&self.attachment.to_le_bytes());
        out[20] = state.expect("all are listed") as u8 + 1;
        out[21] = self.order.code();
        out[24..32].copy_from_slice(&self.began.to_le_bytes());
        out[32..40].copy_from_slice(&self.generation.to_le_bytes());
        out[40..48].copy_from_slice(&self.marker.to_le_bytes());
        if let Some(Cut { end, last }) = self.cut {
            out[48..56].copy_from_slice(&end.to_le_bytes());
            out[56..64].copy_from_slice(&last.to_le_bytes());
        }
        out[64..72].copy_from_slice(&self.run.to_le_bytes());
        out
    }

    /// Reads an entry of [`ENTRY_BYTES`]: nothing if it is all zero.
    pub(super) fn decode(entry: &[u8]) -> Result<Option<WrittenBack>, BlockSuperblockError> {
        let field = |field, value: u64, right: bool| {
            if right { Ok(()) } else { Err(BlockSuperblockError::Field { field, value }) }
        };
        let (state, order) = (entry[20], entry[21]);
        let Some(state) = state.checked_sub(1) else {
            let stray = entry.iter().position(|&b| b != 0);
            let value = stray.map_or(0, |at| entry[at].into());
            field("write-back of a volume that has none", value, stray.is_none())?;
            return Ok(None);
        };
        let holds = STATES.get(usize::from(state)).copied();
        field("what the log holds of a volume", u64::from(state) + 1, holds.is_some())?;
        let kept = Order::of(order);
        field("order of a volume", order.into(), kept.is_some())?;
        let (Some(holds), Some(order)) = (holds, kept) else { return Ok(None) };
        let (end, last) = (le(&entry[48..56]), le(&entry[56..64]));
        let given = le(&entry[22..24]);
        field("byte 214 of a volume", given, given == 0 || (given == 1 && last > 0))?;
        field("byte 240 of a volume", end, end == 0 || last > 0)?;
        let found = WrittenBack {
            volume: Uuid(entry[..16].try_into().expect("16 bytes")),
            attachment: le(&entry[16..20]) as u32,
            began: le(&entry[24..32]),
            holds,
            generation: le(&entry[32..40]),
            marker: le(&entry[40..48]),
            run: le(&entry[64..72]),
            order,
            cut: (last > 0).then_some(Cut { end, last }),
        };
        let known = holds != HoldsState::Nothing;
        field("attachment number", found.attachment.into(), found.attachment > 0 || !known)?;
        field("generation of a volume", found.generation, found.generation > 0 || !known)?;
        field("generation of a volume", found.generation, found.generation < u64::MAX)?;
        Ok(Some(found))
    }
}
