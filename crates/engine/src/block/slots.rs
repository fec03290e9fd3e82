//! A set of slots: at most a bit for each slot of the shard, in pieces that are there while they are needed.
//!
//! A trim of a whole volume puts nearly every slot of the cache in it. A tree of slot numbers would then take several bytes a
//! slot, and most of the time.

use std::collections::BTreeMap;

use super::api::SlotId;

/// Words of a piece.
const WORDS: usize = 64;
/// Slots of a piece.
const SLOTS: u32 = 64 * WORDS as u32;

/// Slots, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct SlotSet {
    /// Pieces with a bit at least.
    pieces: BTreeMap<u32, Box<[u64; WORDS]>>,
    len: usize,
}

fn place(slot: SlotId) -> (u32, usize, u64) {
    let within = slot.0 % SLOTS;
    (slot.0 / SLOTS, within as usize / 64, 1 << (within % 64))
}

impl SlotSet {
    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether `slot` is one of them.
    pub(super) fn contains(&self, slot: SlotId) -> bool {
        let (piece, word, bit) = place(slot);
        self.pieces.get(&piece).is_some_and(|words| words[word] & bit != 0)
    }

    /// Adds `slot`, if it is not there.
    pub(super) fn insert(&mut self, slot: SlotId) {
        let (piece, word, bit) = place(slot);
        let words = self.pieces.entry(piece).or_insert_with(|| Box::new([0; WORDS]));
        self.len += usize::from(words[word] & bit == 0);
        words[word] |= bit;
    }

    /// Takes `slot` out, if it is there.
    pub(super) fn remove(&mut self, slot: SlotId) {
        let (piece, word, bit) = place(slot);
        let Some(words) = self.pieces.get_mut(&piece).filter(|w| w[word] & bit != 0) else {
            return;
        };
        words[word] &= !bit;
        self.len -= 1;
        if words.iter().all(|&w| w == 0) {
            self.pieces.remove(&piece);
        }
    }

    /// Takes out the first ones, `most` at most.
    pub(super) fn take(&mut self, most: usize) -> Vec<SlotId> {
        let mut out = Vec::with_capacity(most.min(self.len));
        while out.len() < most
            && let Some(mut piece) = self.pieces.first_entry()
        {
            let first = piece.key() * SLOTS;
            for (word, at) in piece.get_mut().iter_mut().zip(0..) {
                while *word != 0 && out.len() < most {
                    out.push(SlotId(first + at * 64 + word.trailing_zeros()));
                    *word &= *word - 1;
                }
            }
            if piece.get().iter().all(|&w| w == 0) {
                piece.remove();
            }
        }
        self.len -= out.len();
        out
    }
}

impl Extend<SlotId> for SlotSet {
    fn extend<I: IntoIterator<Item = SlotId>>(&mut self, slots: I) {
        slots.into_iter().for_each(|slot| self.insert(slot));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use larder_base::Rng;

    use super::*;

    #[test]
    fn agrees_with_a_tree() {
        for seed in 0..50 {
            let mut rng = Rng::new(seed);
            let range = [10, 5_000, 40_000][rng.below(3) as usize];
            let (mut set, mut tree) = (SlotSet::default(), BTreeSet::new());
            for _ in 0..3_000 {
                let slot = SlotId(rng.below(range) as u32);
                match rng.below(100) {
                    0..60 => {
                        set.insert(slot);
                        tree.insert(slot);
                    }
                    60..98 => {
                        set.remove(slot);
                        tree.remove(&slot);
                    }
                    _ => {
                        let most = rng.below(400) as usize;
                        let taken: Vec<SlotId> = tree.iter().copied().take(most).collect();
                        tree.retain(|slot| !taken.contains(slot));
                        assert_eq!(set.take(most), taken, "seed {seed}");
                    }
                }
                assert_eq!((set.len(), set.contains(slot)), (tree.len(), tree.contains(&slot)));
            }
            assert_eq!(set.take(usize::MAX), tree.into_iter().collect::<Vec<_>>());
            assert!(set.pieces.is_empty(), "seed {seed}");
        }
    }
}
