//! What an operator has given up of volumes since it could not be read: a list at the end of each copy of a superblock.

use super::{BlockSuperblock, BlockSuperblockError, COPY_BYTES, VOLUMES_AT, stride};
use crate::le;

/// Bytes of one.
pub(super) const GIVEN_UP_BYTES: usize = 24;
/// Most that a device has.
pub const MOST_GIVEN_UP: usize = 1_000;

/// Records of a volume that were given up as a whole, since they could not be read: what they were written over counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GivenUp {
    /// Attachment number of the volume.
    pub attachment: u32,
    /// The first record. 0: it is no record, but what FRONTIERs of positions up to `last` list as unreadable.
    pub first: u64,
    /// The last.
    pub last: u64,
}

impl GivenUp {
    pub(super) fn encode(&self) -> [u8; GIVEN_UP_BYTES] {
        let mut out = [0; GIVEN_UP_BYTES];
        out[..4].copy_from_slice(&self.attachment.to_le_bytes());
        out[8..16].copy_from_slice(&self.first.to_le_bytes());
        out[16..24].copy_from_slice(&self.last.to_le_bytes());
        out
    }

    pub(super) fn decode(entry: &[u8], attachments: u32) -> Result<GivenUp, BlockSuperblockError> {
        let attachment = le(&entry[..4]) as u32;
        let found = GivenUp { attachment, first: le(&entry[8..16]), last: le(&entry[16..24]) };
        let field = |field, value| Err(BlockSuperblockError::Field { field, value });
        if attachment == 0 || attachment > attachments {
            return field("attachment number of what was given up", attachment.into());
        }
        if found.first > found.last {
            return field("first record that was given up", found.first);
        }
        Ok(found)
    }
}

impl BlockSuperblock {
    /// What was given up of the volume with this attachment number, as first and last.
    pub fn given_up_of(&self, attachment: u32) -> Vec<(u64, u64)> {
        let mine = self.given_up.iter().filter(|given| given.attachment == attachment);
        mine.map(|given| (given.first, given.last)).collect()
    }

    /// This was given up of the volume with this attachment number, and nothing else. What counts no more for its volume is gone is forgotten. False: there is
    /// no room for so much, and nothing is changed.
    #[must_use]
    pub fn give_up(&mut self, attachment: u32, all: &[(u64, u64)]) -> bool {
        let written = || self.volumes.iter().filter_map(|volume| volume.write_back);
        let dirty = |of: u32| written().any(|w| w.attachment == of && w.holds.may_be_dirty());
        let others = self.given_up.iter().filter(|g| g.attachment != attachment);
        let mut list: Vec<GivenUp> = others.filter(|g| dirty(g.attachment)).copied().collect();
        list.extend(all.iter().map(|&(first, last)| GivenUp { attachment, first, last }));
        let volumes = self.volumes.len() * stride(self.write_log.is_some());
        let room = (COPY_BYTES - VOLUMES_AT).saturating_sub(volumes) / GIVEN_UP_BYTES;
        if list.len() > room.min(MOST_GIVEN_UP) {
            return false;
        }
        self.given_up = list;
        true
    }
}
