//! A small set of hashes that is asked at every step of the CLOCK hand.

/// A set of 32-bit hashes: open addressing in a table that is at most half full (Knuth, TAOCP 6.4, algorithms L and R). An ordered set of
/// some thousand would take ten times as long to ask.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// A power of two of them, or none; 0 is empty.
    slots: Box<[u32]>,
    /// Those in the table.
    used: usize,
    /// Whether 0 is one of the set.
    zero: bool,
}

/// The fewest slots of a table.
const LEAST: usize = 64;

impl Marks {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.used + usize::from(self.zero)
    }

    /// Whether there are none.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.used == 0 && !self.zero
    }

    /// Where looking for a hash begins. There must be slots.
    #[inline]
    fn home(&self, hash: u32) -> usize {
        // The upper bits of a product depend on all bits of the hash: a shard's hashes have some in common.
        let mixed = u64::from(hash.wrapping_mul(0x9e37_79b9));
        ((mixed * self.slots.len() as u64) >> 32) as usize
    }

    /// The slot that holds a hash, or the empty one where it belongs. There must be slots.
    #[inline]
    fn slot_of(&self, hash: u32) -> usize {
        let mut slot = self.home(hash);
        while self.slots[slot] != hash && self.slots[slot] != 0 {
            slot = (slot + 1) & (self.slots.len() - 1);
        }
        slot
    }

    /// Whether it is one of the set.
    #[inline]
    pub(super) fn contains(&self, hash: u32) -> bool {
        if hash == 0 {
            return self.zero;
        }
        self.used > 0 && self.slots[self.slot_of(hash)] == hash
    }

    /// Adds it.
    pub(super) fn insert(&mut self, hash: u32) {
        if hash == 0 {
            self.zero = true;
            return;
        }
        if 2 * (self.used + 1) > self.slots.len() {
            let twice = vec![0; (2 * self.slots.len()).max(LEAST)].into_boxed_slice();
            for hash in std::mem::replace(&mut self.slots, twice) {
                if hash != 0 {
                    let slot = self.slot_of(hash);
                    self.slots[slot] = hash;
                }
            }
        }
        let slot = self.slot_of(hash);
        self.used += usize::from(self.slots[slot] == 0);
        self.slots[slot] = hash;
    }

    /// Takes it out. Returns whether it was there.
    #[inline]
    pub(super) fn remove(&mut self, hash: u32) -> bool {
        if hash == 0 {
            return std::mem::take(&mut self.zero);
        }
        if self.used == 0 {
            return false;
        }
        let slot = self.slot_of(hash);
        let found = self.slots[slot] == hash;
        if found {
            self.empty(slot);
        }
        found
    }

    /// Empties a slot and moves up those behind it that would not be found any more.
    fn empty(&mut self, mut hole: usize) {
        self.used -= 1;
        let mask = self.slots.len() - 1;
        let mut slot = hole;
        loop {
            self.slots[hole] = 0;
            loop {
                slot = (slot + 1) & mask;
                let hash = self.slots[slot];
                if hash == 0 {
                    return;
                }
                // It may move to the hole if that is not before where looking for it begins.
                let from_home = slot.wrapping_sub(self.home(hash)) & mask;
                if from_home >= slot.wrapping_sub(hole) & mask {
                    self.slots[hole] = hash;
                    hole = slot;
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use larder_base::Rng;

    use super::*;

    #[test]
    fn is_an_ordered_set_that_is_asked_the_same() {
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let (mut marks, mut set) = (Marks::default(), BTreeSet::new());
            // Few different ones, among them many that begin at the same place.
            let hash = |rng: &mut Rng| match seed % 3 {
                0 => rng.below(100) as u32,
                1 => (rng.below(400) as u32) << 20,
                _ => rng.next_u64() as u32,
            };
            let mut known = vec![0];
            for step in 0..20_000 {
                let one = hash(&mut rng);
                let old = known[rng.below(known.len() as u64) as usize];
                // More and more, then fewer.
                if rng.chance(if step < 8_000 { 0.6 } else { 0.4 }) {
                    marks.insert(one);
                    set.insert(one);
                    known.push(one);
                } else {
                    assert_eq!(marks.remove(old), set.remove(&old), "seed {seed} step {step}");
                }
                assert_eq!(marks.contains(one), set.contains(&one), "seed {seed} step {step}");
                assert_eq!(marks.contains(old), set.contains(&old), "seed {seed} step {step}");
                assert_eq!((marks.len(), marks.is_empty()), (set.len(), set.is_empty()));
            }
            assert!(set.iter().all(|hash| marks.contains(*hash)));
            assert!(marks.slots.len() <= (4 * known.len()).max(LEAST));
        }
    }
}
