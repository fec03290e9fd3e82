//! Memory of what is dirty, and memory for what is on its way from the log to stores and journals: one sum for the whole node, however many volumes
//! write back.
//!
//! A stretch is in memory from when it is read until the store has it, an epoch until the journal has it. Whoever gets none is called again when some is
//! given back. While somebody waits nobody has more than an equal part, so that a volume with a slow store does not keep all of it. Whoever has nothing gets
//! what it needs for one stretch or epoch, however much others have: a store that stands may never give back what it has, and nobody waits for it. So one
//! volume has at most the sum, and each other at most one stretch, or an epoch of its equal part, beyond it.

use std::collections::{BTreeMap, BTreeSet};

use larder_format::block::write_log::pieces;

use super::super::bounds::LogSize;
use super::super::overlay::{Dirty, Holds};
use super::{MOST_RECORD, WriteLog};

/// Bytes of memory that 4 KiB of the log take at most that are dirty: records, overlay, checksums, times, and what containers have to spare
/// (`tests/writeback_memory.rs`). No record holds less than 4 KiB of the log.
pub const MEMORY_OF_BLOCK: u64 = 40;

/// Bytes that are on their way from the log to stores and journals at most, where so many volumes write back, so many of them through a journal, and the sum is
/// `most`: one volume has that, and each other a stretch or an epoch beyond it. See the [module](self).
pub fn most_on_its_way(most: u64, volumes: u64, journaled: u64) -> u64 {
    let others = volumes.saturating_sub(1);
    let stretch = Dirty { at: 0, len: MOST_RECORD, sequence: 0, holds: Holds::Bytes }.memory();
    let epoch = (most / volumes.max(1)).max(stretch);
    let epochs = journaled.min(others);
    most.max(stretch) + (others - epochs) * stretch + epochs * epoch
}

impl<B> WriteLog<B> {
    /// How large it is.
    pub fn size(&self) -> LogSize {
        self.config.log_size()
    }

    /// Bytes of memory that what is dirty takes at most, if all of the log is; beside what is on its way to stores.
    pub fn most_memory(&self) -> u64 {
        self.size().bytes() / pieces::PIECE as u64 * MEMORY_OF_BLOCK
    }
}

/// The sum, and who has what of it. See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Memory {
    most: u64,
    taken: u64,
    /// What each volume has, by attachment number.
    by: BTreeMap<u32, u64>,
    /// Volumes that got none.
    waiting: BTreeSet<u32>,
}

impl Memory {
    pub(super) fn new(most: u64) -> Memory {
        Memory { most, ..Memory::default() }
    }

    /// What one of so many volumes has of it while others wait.
    pub(super) fn part(&self, volumes: usize) -> u64 {
        self.most / volumes.max(1) as u64
    }

    /// Takes so much for one of so many volumes, if it may have that. Else it waits: [`Memory::give`] says when it may be asked again.
    pub(super) fn take(&mut self, attachment: u32, bytes: u64, volumes: usize) -> bool {
        let mine = self.by.get(&attachment).copied().unwrap_or(0);
        let others = self.waiting.iter().any(|&waits| waits != attachment);
        let fair = !others || mine + bytes <= self.part(volumes);
        let may = bytes == 0 || mine == 0 || (fair && self.taken + bytes <= self.most);
        if !may {
            self.waiting.insert(attachment);
            return false;
        }
        self.waiting.remove(&attachment);
        self.taken += bytes;
        *self.by.entry(attachment).or_default() += bytes;
        true
    }

    /// Gives back so much of what a volume has taken. Returns who waits.
    pub(super) fn give(&mut self, attachment: u32, bytes: u64) -> impl Iterator<Item = u32> {
        let mine = self.by.get_mut(&attachment);
        let bytes = mine.map_or(0, |mine| {
            let bytes = bytes.min(*mine);
            *mine -= bytes;
            bytes
        });
        self.by.retain(|_, mine| *mine > 0);
        self.taken -= bytes;
        self.waiting.iter().copied().filter(move |_| bytes > 0)
    }

    /// A volume asks for nothing more. What it has it gives back yet.
    pub(super) fn leave(&mut self, attachment: u32) {
        self.waiting.remove(&attachment);
    }

    /// What is taken.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_taken_than_there_is_but_for_one_that_needs_more() {
        let mut memory = Memory::new(100);
        assert!(memory.take(1, 60, 2) && memory.take(1, 40, 2) && !memory.take(1, 1, 2));
        assert_eq!(memory.give(1, 60).collect::<Vec<u32>>(), [1]);
        assert!(memory.take(2, 60, 2));
        assert_eq!((memory.taken(), memory.give(1, 40).count()), (100, 1));
        assert!(memory.take(1, 200, 2), "it has none");
        assert!(!memory.take(2, 1, 2) && !memory.take(1, 1, 2));
        assert_eq!(memory.give(2, 60).collect::<Vec<u32>>(), [1, 2]);
        assert!(memory.take(2, 60, 2));
        // More than was taken is not given back.
        assert_eq!(memory.give(2, 90).count(), 1);
        assert_eq!(memory.taken(), 200);
    }

    #[test]
    fn what_a_start_says_of_memory_has_the_stretches_beyond_the_sum() {
        let (most, stretch) = (4 << 20, (512 << 10) + 4096);
        let mut memory = Memory::new(most);
        while memory.take(1, stretch, 3) {}
        assert!(memory.take(2, stretch, 3) && memory.take(3, stretch, 3));
        assert!(memory.taken() > most && memory.taken() <= most_on_its_way(most, 3, 0));
        // An epoch of its equal part is more than a stretch.
        assert!(memory.take(4, most / 4, 4) && memory.taken() <= most_on_its_way(most, 4, 1));
        assert_eq!(most_on_its_way(most, 1, 1), most);
        assert_eq!(most_on_its_way(most, 2, 0), most + stretch);
    }

    #[test]
    fn while_one_waits_none_has_more_than_its_part() {
        let mut memory = Memory::new(100);
        assert!(memory.take(1, 90, 2) && memory.take(2, 10, 2) && !memory.take(2, 20, 2));
        assert_eq!(memory.give(1, 10).count(), 1);
        // There is room for this one, which has more than its part.
        assert!(!memory.take(1, 10, 2));
        assert!(memory.take(2, 10, 2));
        assert_eq!(memory.taken(), 100);
        memory.leave(1);
        memory.give(2, 20).for_each(drop);
        assert!(memory.take(2, 10, 2) && memory.take(2, 10, 2));
    }

    #[test]
    fn what_one_never_gives_back_keeps_no_other_from_its_first_stretch() {
        let mut memory = Memory::new(100);
        assert!(memory.take(1, 50, 3) && memory.take(1, 50, 3));
        for _ in 0..3 {
            assert!(memory.take(2, 50, 3), "one stands");
            assert!(!memory.take(2, 50, 3) && memory.take(3, 30, 3));
            memory.give(2, 50).for_each(drop);
            memory.give(3, 30).for_each(drop);
        }
        assert_eq!(memory.taken(), 100);
    }
}
