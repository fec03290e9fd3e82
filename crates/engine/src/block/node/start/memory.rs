//! What binds memory that outlives the process to the run whose map is in it.
//!
//! ```text
//! word 0 magic   1 layout version   2,3 UUID   4 epoch   5 announced epoch   6 shards   7 slots of a shard   8 key
//! ```
//!
//! A start announces its epoch here before the superblock has it, and owns the memory after. So memory with either epoch
//! of the superblock is the last run's, wherever a kill came in between; memory with any other is of a run that another has followed.

use larder_base::Words;
use larder_format::block::BlockSuperblock;

use crate::block::{Fault, Planted};

const MAGIC: u64 = u64::from_le_bytes(*b"LARDERbc");
const LAYOUT: u64 = 2;
const OWNER: usize = 4;
const ANNOUNCED: usize = 5;
/// Words of the header.
pub const HEADER_WORDS: usize = 64;

/// The header of the memory in which maps lie.
#[derive(Debug)]
pub struct Memory {
    header: Words,
    /// An earlier process may have left something in it.
    is_old: bool,
}

/// Makes all words zeros.
pub fn clear(words: &mut Words) {
    for at in 0..words.len() {
        if words.load(at) != 0 {
            words.store(at, 0);
        }
    }
}

impl Memory {
    /// With a header of [`HEADER_WORDS`] words. Memory that was made a moment ago is not old: nothing in it is believed.
    pub fn new(header: Words, is_old: bool) -> Memory {
        Memory { header, is_old }
    }

    fn expected(sb: &BlockSuperblock) -> [(usize, u64); 7] {
        let uuid = u128::from_le_bytes(sb.uuid.0);
        [
            (0, MAGIC),
            (1, LAYOUT),
            (2, uuid as u64),
            (3, (uuid >> 64) as u64),
            (6, u64::from(sb.layout.shards)),
            (7, u64::from(sb.layout.shard_slots())),
            (8, sb.key),
        ]
    }

    /// Whether the maps are those that the last run on the device with this superblock has left.
    ///
    /// # Errors
    /// Why not, in words.
    pub(super) fn is_of(&self, sb: &BlockSuperblock, fault: Fault) -> Result<(), &'static str> {
        if !self.is_old {
            return Err("no memory of an earlier run is there");
        }
        if Memory::expected(sb).iter().any(|&(word, want)| self.header.load(word) != want) {
            return Err("the memory left behind is of another cache");
        }
        let (owner, announced) = (self.header.load(OWNER), self.header.load(ANNOUNCED));
        let is_last = sb.epoch == owner || sb.epoch == announced;
        if !is_last && !fault.is(Planted::MemoryOfAnotherRun) {
            return Err("the cache has been used by another run since");
        }
        Ok(())
    }

    /// Nobody's: no later start believes what is in it.
    pub fn disown(&mut self) {
        self.header.store(0, 0);
    }

    /// The superblock is about to have this epoch.
    pub(super) fn announce(&mut self, epoch: u64) {
        self.header.store(ANNOUNCED, epoch);
    }

    /// The maps are those of the run that this superblock names.
    pub fn own(&mut self, sb: &BlockSuperblock) {
        self.header.store(OWNER, sb.epoch);
        self.header.store(ANNOUNCED, sb.epoch);
        // The magic number last.
        for (word, value) in Memory::expected(sb).into_iter().rev() {
            self.header.store(word, value);
        }
    }

    /// The words as they are.
    pub fn snapshot(&self) -> Words {
        self.header.snapshot()
    }
}
