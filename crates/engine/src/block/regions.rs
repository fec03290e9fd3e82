//! Sets of regions: a bit each, as far up as there ever were any.

/// Regions of the line space.
#[derive(Clone, Debug, Default)]
pub(super) struct RegionSet {
    words: Vec<u64>,
    len: u64,
}

/// The bits of word `at` that stand for regions `from..=last`.
fn mask(at: usize, from: u32, last: u32) -> u64 {
    let (begin, end) = ((at * 64) as u64, (at * 64 + 63) as u64);
    if end < u64::from(from) || begin > u64::from(last) {
        return 0;
    }
    let low = u64::MAX << u64::from(from).saturating_sub(begin);
    let high = u64::MAX >> end.saturating_sub(u64::from(last));
    low & high
}

impl RegionSet {
    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn set(&mut self, region: u32) {
        let word = region as usize / 64;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        let bit = 1 << (region % 64);
        self.len += u64::from(self.words[word] & bit == 0);
        self.words[word] |= bit;
    }

    pub(super) fn clear(&mut self, region: u32) {
        if let Some(word) = self.words.get_mut(region as usize / 64) {
            let bit = 1 << (region % 64);
            self.len -= u64::from(*word & bit != 0);
            *word &= !bit;
        }
    }

    pub(super) fn clear_all(&mut self) {
        (self.words, self.len) = (Vec::new(), 0);
    }

    pub(super) fn has(&self, region: u32) -> bool {
        self.words.get(region as usize / 64).is_some_and(|word| word >> (region % 64) & 1 != 0)
    }

    /// The first of the regions from `from` to `last` that is in the set.
    pub(super) fn next(&self, from: u32, last: u32) -> Option<u32> {
        let mut at = from;
        while at <= last {
            let left = self.words.get(at as usize / 64)? >> (at % 64);
            if left != 0 {
                return Some(at + left.trailing_zeros()).filter(|&region| region <= last);
            }
            at = (at / 64 + 1).checked_mul(64)?;
        }
        None
    }

    /// How many of the regions from `from` to `last` are in the set.
    pub(super) fn count(&self, from: u32, last: u32) -> u64 {
        let words = from as usize / 64..(last as usize / 64 + 1).min(self.words.len());
        words.map(|at| u64::from((self.words[at] & mask(at, from, last)).count_ones())).sum()
    }

    /// Adds those of the regions from `from` to `last` that `other` has.
    pub(super) fn add_from(&mut self, other: &RegionSet, from: u32, last: u32) {
        let end = (last as usize / 64 + 1).min(other.words.len());
        if end > self.words.len() {
            self.words.resize(end, 0);
        }
        for at in from as usize / 64..end {
            let new = other.words[at] & mask(at, from, last) & !self.words[at];
            self.words[at] |= new;
            self.len += u64::from(new.count_ones());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use larder_base::Rng;

    use super::*;

    #[test]
    fn agrees_with_a_tree() {
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let (mut set, mut tree) = (RegionSet::default(), BTreeSet::new());
            let (mut other, mut other_tree) = (RegionSet::default(), BTreeSet::new());
            for _ in 0..600 {
                let region = rng.below(500) as u32;
                let (from, last) = (region, region + rng.below(200) as u32);
                match rng.below(10) {
                    0..4 => {
                        set.set(region);
                        tree.insert(region);
                    }
                    4..7 => {
                        set.clear(region);
                        tree.remove(&region);
                    }
                    7..9 => {
                        other.set(region);
                        other_tree.insert(region);
                    }
                    _ => {
                        set.add_from(&other, from, last);
                        tree.extend(other_tree.range(from..=last));
                    }
                }
                let within = tree.range(from..=last);
                assert_eq!(set.count(from, last), within.clone().count() as u64, "seed {seed}");
                assert_eq!(set.next(from, last), within.copied().next(), "seed {seed}");
                assert_eq!(set.has(region), tree.contains(&region), "seed {seed}");
                assert_eq!((set.len(), set.is_empty()), (tree.len() as u64, tree.is_empty()));
            }
            set.clear_all();
            assert!(set.is_empty() && set.next(0, u32::MAX).is_none());
        }
    }
}
