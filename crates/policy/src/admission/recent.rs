//! Keys seen recently: two Bloom filters that take turns.

use larder_base::LazyWords;

/// Bits of one block: a cache line.
const BLOCK_WORDS: usize = 8;
/// Bits set per key.
const PROBES: u32 = 6;
/// Bits per key of one filter when it is full.
const BITS_PER_KEY: u64 = 16;
/// Percent of a filter's words in use from which on one that grows is an array.
const WHOLE_FROM: usize = 60;

/// Remembers at least the last `window` distinct keys, and no key from more than two windows ago. No key within the window
/// is forgotten; a key that was not seen is reported as seen with probability at most 0.5 %.
///
/// Two blocked Bloom filters (Putze, Sanders and Singler, 2007): keys go into the young one; when it holds `window` keys,
/// the old one is cleared and becomes the young one. Four bytes per key of the window.
#[derive(Debug)]
pub(super) struct RecentKeys {
    filters: [LazyWords; 2],
    window: u64,
    /// Keys in the young filter.
    filled: u64,
    /// Whether the second filter is the young one.
    second: bool,
}

impl RecentKeys {
    /// Bytes that a memory of `window` keys takes.
    pub(super) fn bytes_for(window: u64) -> u64 {
        let blocks = window.saturating_mul(BITS_PER_KEY).div_ceil(BLOCK_WORDS as u64 * 64).max(1);
        blocks.saturating_mul(BLOCK_WORDS as u64 * 8 * 2)
    }

    /// The longest window that fits in `bytes`.
    pub(super) fn window_for(bytes: usize) -> u64 {
        let blocks = bytes as u64 / (BLOCK_WORDS as u64 * 8 * 2);
        blocks * BLOCK_WORDS as u64 * 64 / BITS_PER_KEY
    }

    pub(super) fn new(window: u64) -> RecentKeys {
        let words = (RecentKeys::bytes_for(window) / 16) as usize;
        RecentKeys {
            filters: std::array::from_fn(|_| LazyWords::whole(words)),
            window: window.max(1),
            filled: 0,
            second: false,
        }
    }

    /// From now on takes memory as it is filled. What was noted is forgotten.
    pub(super) fn grow_as_filled(&mut self) {
        let words = self.filters[0].len();
        self.filters = std::array::from_fn(|_| LazyWords::growing(words, WHOLE_FROM));
        self.filled = 0;
    }

    /// Asks for the lines that noting a key looks at.
    #[inline]
    pub(super) fn warm(&self, fingerprint: u64) {
        for filter in &self.filters {
            filter.warm(Self::block(filter, fingerprint));
        }
    }

    /// Notes a key and says whether it was noted before, within the window.
    pub(super) fn note(&mut self, fingerprint: u64) -> bool {
        let [first, second] = &mut self.filters;
        let (young, old) = if self.second { (second, first) } else { (first, second) };
        // Fetched while the young one is looked at.
        old.warm(Self::block(old, fingerprint));
        if Self::touch(young, fingerprint, true) {
            return true;
        }
        let seen = Self::touch(old, fingerprint, false);
        self.filled += 1;
        if self.filled >= self.window {
            self.filled = 0;
            self.second = !self.second;
            old.clear();
        }
        seen
    }

    /// The first word of a key's block.
    fn block(filter: &LazyWords, fingerprint: u64) -> usize {
        let blocks = (filter.len() / BLOCK_WORDS) as u64;
        ((u128::from(fingerprint) * u128::from(blocks)) >> 64) as usize * BLOCK_WORDS
    }

    /// Whether all bits of the key are set in one filter; sets them if asked.
    fn touch(filter: &mut LazyWords, fingerprint: u64, set: bool) -> bool {
        let block = Self::block(filter, fingerprint);
        let before = filter.line(block);
        let mut line = before;
        // The block comes from the upper bits; six 9-bit positions from a remix of all.
        let mut bits = (fingerprint ^ fingerprint >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mut all = true;
        for _ in 0..PROBES {
            let (word, bit) = ((bits >> 61) as usize, bits >> 55 & 63);
            all &= before[word] >> bit & 1 == 1;
            line[word] |= 1 << bit;
            bits <<= 9;
        }
        if set && !all {
            for (i, (&word, _)) in line.iter().zip(&before).enumerate().filter(|(_, (a, b))| a != b)
            {
                filter.set(block + i, word);
            }
        }
        all
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.filters.iter().map(LazyWords::whole_bytes).sum()
    }

    /// Bytes by which the filters are smaller by now.
    pub(super) fn spared_bytes(&self) -> usize {
        let held: usize = self.filters.iter().map(LazyWords::held_bytes).sum();
        self.memory_bytes().saturating_sub(held)
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    #[test]
    fn false_positives_stay_under_the_stated_bound() {
        const WINDOW: u64 = 20_000;
        let mut keys = RecentKeys::new(WINDOW);
        let mut rng = Rng::new(1);
        let fresh = (0..10 * WINDOW).filter(|_| keys.note(rng.next_u64())).count();
        let rate = fresh as f64 / (10 * WINDOW) as f64;
        assert!(rate < 0.005, "{rate}");
    }

    #[test]
    fn one_that_grows_answers_the_same() {
        let (mut whole, mut grown) = (RecentKeys::new(5000), RecentKeys::new(5000));
        grown.grow_as_filled();
        let mut rng = Rng::new(4);
        for i in 0..40_000 {
            let key = spread(rng.below(12_000));
            assert_eq!(whole.note(key), grown.note(key), "{i}");
            if i == 200 {
                assert!(grown.spared_bytes() > whole.memory_bytes() / 2);
            }
        }
        assert_eq!((whole.spared_bytes(), grown.spared_bytes()), (0, 0));
    }

    /// Spreads small numbers over all 64 bits.
    fn spread(n: u64) -> u64 {
        Rng::new(n).next_u64()
    }

    #[test]
    fn forgets_after_two_windows() {
        let mut keys = RecentKeys::new(1000);
        let mut rng = Rng::new(1);
        assert!(!keys.note(42 << 40));
        for _ in 0..2100 {
            keys.note(rng.next_u64());
        }
        assert!(!keys.note(42 << 40));
        assert!(keys.note(42 << 40));
    }

    #[test]
    fn window_and_bytes_agree() {
        for bytes in [128usize, 4096, 100_000, 1 << 20] {
            let window = RecentKeys::window_for(bytes);
            assert!(RecentKeys::bytes_for(window) <= bytes as u64);
            assert!(window * 4 + 512 > bytes as u64);
        }
    }
}
