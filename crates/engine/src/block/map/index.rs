//! From a line to its slot when a line may lie anywhere: a hash table of slot numbers, 5.33 bytes a slot.
//!
//! ```text
//! cell   32 bits   0: empty, else tag | slot + 1       as many bits for the slot as the shard's slots need
//! ```
//!
//! Linear probing in a table of 4/3 cells a slot; what is removed leaves no mark, its successors move up (Knuth, vol. 3,
//! 6.4, algorithm R). The line itself is not here: a cell whose tag fits is looked up in the slot's entry. Lost with the
//! process, and made anew from the entries.

use super::super::api::SlotId;

/// The hash table of one shard.
#[derive(Debug)]
pub(super) struct Index {
    cells: Vec<u32>,
    slot_bits: u32,
}

impl Index {
    /// A table for up to `slots` slots.
    pub(super) fn new(slots: u32) -> Index {
        let cells = u64::from(slots) * 4 / 3 + 8;
        Index { cells: vec![0; cells as usize], slot_bits: 32 - slots.leading_zeros() }
    }

    /// Bytes of memory.
    pub(super) fn memory_bytes(&self) -> u64 {
        self.cells.capacity() as u64 * 4
    }

    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.cells.len() as u128) >> 64) as usize
    }

    fn tag(&self, hash: u64) -> u32 {
        // The low bits: the high ones have chosen the place.
        if self.slot_bits >= 32 { 0 } else { (hash as u32) << self.slot_bits }
    }

    fn slot(&self, cell: u32) -> SlotId {
        let mask = ((1u64 << self.slot_bits) - 1) as u32;
        SlotId((cell & mask) - 1)
    }

    fn next(&self, at: usize) -> usize {
        if at + 1 == self.cells.len() { 0 } else { at + 1 }
    }

    /// Where the cell of the slot with `hash` is for which `is` holds.
    fn locate(&self, hash: u64, is: impl Fn(SlotId) -> bool) -> Option<usize> {
        let (mut at, tag) = (self.home(hash), self.tag(hash));
        let mask = !(((1u64 << self.slot_bits) - 1) as u32);
        loop {
            match self.cells[at] {
                0 => return None,
                cell if cell & mask == tag & mask && is(self.slot(cell)) => return Some(at),
                _ => at = self.next(at),
            }
        }
    }

    /// The slot with `hash` for which `is` holds.
    pub(super) fn find(&self, hash: u64, is: impl Fn(SlotId) -> bool) -> Option<SlotId> {
        self.locate(hash, is).map(|at| self.slot(self.cells[at]))
    }

    /// Puts in `slot`, whose line has `hash`. It must not be there already.
    pub(super) fn insert(&mut self, hash: u64, slot: SlotId) {
        let mut at = self.home(hash);
        while self.cells[at] != 0 {
            at = self.next(at);
        }
        self.cells[at] = self.tag(hash) | (slot.0 + 1);
    }

    /// Takes out `slot`, whose line has `hash`, if it is there. `hash_of` tells the hash of the other slots.
    pub(super) fn remove(&mut self, hash: u64, slot: SlotId, hash_of: impl Fn(SlotId) -> u64) {
        let Some(mut hole) = self.locate(hash, |s| s == slot) else { return };
        let mut at = hole;
        loop {
            at = self.next(at);
            if self.cells[at] == 0 {
                break;
            }
            let home = self.home(hash_of(self.slot(self.cells[at])));
            // It may move up unless its home lies behind the hole, on the way from there to where it is.
            let stays =
                if hole <= at { hole < home && home <= at } else { hole < home || home <= at };
            if !stays {
                self.cells[hole] = self.cells[at];
                hole = at;
            }
        }
        self.cells[hole] = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use larder_base::Rng;

    use super::*;

    #[test]
    fn agrees_with_a_tree() {
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let slots = rng.range(1, 60) as u32;
            // Few different hashes, so that there are long runs, over the end of the table too.
            let spread = rng.range(1, 64);
            let mut index = Index::new(slots);
            let mut tree: BTreeMap<u32, u64> = BTreeMap::new();
            for _ in 0..2_000 {
                let slot = rng.below(u64::from(slots)) as u32;
                match tree.get(&slot).copied() {
                    Some(hash) => {
                        index.remove(hash, SlotId(slot), |s| tree[&s.0]);
                        tree.remove(&slot);
                    }
                    None => {
                        let hash = u64::MAX / spread * rng.below(spread) + rng.below(3);
                        index.insert(hash, SlotId(slot));
                        tree.insert(slot, hash);
                    }
                }
                for (&slot, &hash) in &tree {
                    assert_eq!(index.find(hash, |s| s.0 == slot), Some(SlotId(slot)), "{seed}");
                }
                assert_eq!(index.cells.iter().filter(|&&c| c != 0).count(), tree.len());
            }
        }
    }
}
