//! The payload of a FRONTIER: how far each volume's store has come, and where the log begins.
//!
//! ```text
//! table    0   8  generation of the oldest segment of the main chain that is live
//!          8   8  number of its first batch
//!         16   4  volumes, at most 1,024
//!         20   4  unreadable extents, at most 1,000
//!         24   8  zero
//!         32      volumes of 32 bytes, ascending by attachment number
//!                 extents of 16 bytes: those of the first volume, ascending, then of the second, ...
//!
//! volume   0   4  attachment number, from 1               16   8  last sequence that was assigned
//!          4   4  its unreadable extents                  24   8  number of its marker that was last known durable
//!          8   8  frontier: all up to here is in the store
//!
//! extent   0   8  offset in the volume                     8   8  bytes
//! ```
//!
//! A FRONTIER names all volumes that have, or may have, records in the log: a start needs no older one. An unreadable extent
//! lies at or before the frontier: the record was skipped because its payload was lost, and reads are EIO until something
//! newer covers it. The table has no checksum of its own: the batch has those of its pieces.

use super::record::MAX_VOLUME;
use super::{Wrong, must};
use crate::le;

/// Most volumes that a FRONTIER names.
pub const MAX_VOLUMES: usize = 1024;
/// Most unreadable extents of all volumes together.
pub const MAX_UNREADABLE: usize = 1000;
/// Most bytes of a table.
pub const MAX_FRONTIER: usize =
    TABLE_BYTES + MAX_VOLUMES * VOLUME_BYTES + MAX_UNREADABLE * EXTENT_BYTES;

const TABLE_BYTES: usize = 32;
const VOLUME_BYTES: usize = 32;
const EXTENT_BYTES: usize = 16;

/// Bytes of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first.
    pub offset: u64,
    /// How many.
    pub length: u64,
}

/// How far a volume has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeFrontier {
    /// Its attachment number, from 1.
    pub attachment: u32,
    /// All its records up to this sequence are in the store.
    pub frontier: u64,
    /// The last sequence that was assigned to a record of this batch or one before: a start that does not find it knows that records
    /// are lost.
    pub last: u64,
    /// The number of its marker that was last known durable.
    pub marker: u64,
    /// What was skipped because it could not be read: ascending, none overlaps another.
    pub unreadable: Vec<Extent>,
}

/// What a FRONTIER says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frontier {
    /// Generation of the oldest segment of the main chain that is live.
    pub oldest_generation: u64,
    /// Number of the first batch of that segment.
    pub oldest_batch: u64,
    /// The volumes, ascending by attachment number.
    pub volumes: Vec<VolumeFrontier>,
}

/// Why a payload is no FRONTIER's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrontierError {
    /// It has not as many bytes as its counts say.
    #[error("the table has {have} bytes, {need} are needed")]
    Length {
        /// Bytes that there are.
        have: usize,
        /// Bytes that it should have.
        need: usize,
    },
    /// A field cannot be.
    #[error("{field} = {value} cannot be")]
    Field {
        /// Which.
        field: &'static str,
        /// What it says.
        value: u64,
    },
}

impl From<Wrong> for FrontierError {
    fn from((field, value): Wrong) -> FrontierError {
        FrontierError::Field { field, value }
    }
}

impl Frontier {
    /// Bytes of its table.
    pub fn bytes(&self) -> usize {
        let extents: usize = self.volumes.iter().map(|volume| volume.unreadable.len()).sum();
        TABLE_BYTES + self.volumes.len() * VOLUME_BYTES + extents * EXTENT_BYTES
    }

    /// The volume with this attachment number.
    pub fn volume(&self, attachment: u32) -> Option<&VolumeFrontier> {
        let at = self.volumes.binary_search_by_key(&attachment, |volume| volume.attachment).ok()?;
        self.volumes.get(at)
    }

    /// Refuses what no FRONTIER can say.
    ///
    /// # Errors
    /// [`FrontierError::Field`].
    pub fn check(&self) -> Result<(), FrontierError> {
        must("volumes", self.volumes.len() as u64, self.volumes.len() <= MAX_VOLUMES)?;
        let mut before = 0;
        let mut extents = 0;
        for volume in &self.volumes {
            must("attachment number", volume.attachment.into(), volume.attachment > before)?;
            before = volume.attachment;
            must("frontier", volume.frontier, volume.frontier <= volume.last)?;
            extents += volume.unreadable.len();
            let mut end = 0;
            for extent in &volume.unreadable {
                must("offset of an extent", extent.offset, extent.offset >= end)?;
                must("bytes of an extent", extent.length, extent.length > 0)?;
                let reach = extent.offset.checked_add(extent.length);
                end = reach.filter(|&end| end <= MAX_VOLUME).ok_or(FrontierError::Field {
                    field: "bytes of an extent",
                    value: extent.length,
                })?;
            }
        }
        Ok(must("unreadable extents", extents as u64, extents <= MAX_UNREADABLE)?)
    }

    /// The table.
    ///
    /// # Panics
    /// If [`Frontier::check`] refuses it.
    pub fn encode(&self) -> Vec<u8> {
        assert_eq!(self.check(), Ok(()), "no FRONTIER");
        let extents: usize = self.volumes.iter().map(|volume| volume.unreadable.len()).sum();
        let mut out = Vec::with_capacity(self.bytes());
        out.extend(self.oldest_generation.to_le_bytes());
        out.extend(self.oldest_batch.to_le_bytes());
        out.extend((self.volumes.len() as u32).to_le_bytes());
        out.extend((extents as u32).to_le_bytes());
        out.extend([0; 8]);
        for volume in &self.volumes {
            out.extend(volume.attachment.to_le_bytes());
            out.extend((volume.unreadable.len() as u32).to_le_bytes());
            out.extend(volume.frontier.to_le_bytes());
            out.extend(volume.last.to_le_bytes());
            out.extend(volume.marker.to_le_bytes());
        }
        for extent in self.volumes.iter().flat_map(|volume| &volume.unreadable) {
            out.extend(extent.offset.to_le_bytes());
            out.extend(extent.length.to_le_bytes());
        }
        out
    }

    /// Reads a table: all of a FRONTIER's payload, verified.
    ///
    /// # Errors
    /// Any [`FrontierError`].
    pub fn decode(bytes: &[u8]) -> Result<Frontier, FrontierError> {
        let length = |need| FrontierError::Length { have: bytes.len(), need };
        let (table, rest) = bytes.split_at_checked(TABLE_BYTES).ok_or(length(TABLE_BYTES))?;
        let (volumes, extents) = (le(&table[16..20]) as usize, le(&table[20..24]) as usize);
        must("volumes", volumes as u64, volumes <= MAX_VOLUMES)?;
        must("unreadable extents", extents as u64, extents <= MAX_UNREADABLE)?;
        must("byte 24", le(&table[24..32]), le(&table[24..32]) == 0)?;
        let need = TABLE_BYTES + volumes * VOLUME_BYTES + extents * EXTENT_BYTES;
        if bytes.len() != need {
            return Err(length(need));
        }
        let (rows, extents) = rest.split_at(volumes * VOLUME_BYTES);
        let mut extents = extents.chunks_exact(EXTENT_BYTES);
        let mut volumes = Vec::with_capacity(volumes);
        for row in rows.chunks_exact(VOLUME_BYTES) {
            let count = le(&row[4..8]) as usize;
            must("unreadable extents of a volume", count as u64, count <= extents.len())?;
            let mine = extents.by_ref().take(count);
            volumes.push(VolumeFrontier {
                attachment: le(&row[..4]) as u32,
                frontier: le(&row[8..16]),
                last: le(&row[16..24]),
                marker: le(&row[24..32]),
                unreadable: mine
                    .map(|extent| Extent { offset: le(&extent[..8]), length: le(&extent[8..]) })
                    .collect(),
            });
        }
        must("extents of no volume", extents.len() as u64, extents.len() == 0)?;
        let found = Frontier {
            oldest_generation: le(&table[..8]),
            oldest_batch: le(&table[8..16]),
            volumes,
        };
        found.check()?;
        Ok(found)
    }
}
