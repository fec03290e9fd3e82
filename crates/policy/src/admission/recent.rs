//! Keys seen recently: two Bloom filters that take turns.

use larder_base::LazyWords;

/// Bits of one block: a cache line.
const BLOCK_WORDS: usize = 8;
/// Bits set per key.
const PROBES: u32 = 4;
/// Bits per key of one filter when it is full. With 16 a window costs 2.7 times as much, and what a shorter window forgets costs more
/// hits than the keys that are taken for others'.
const BITS_PER_KEY: u64 = 6;
/// Percent of a filter's words in use from which on one that grows is an array.
const WHOLE_FROM: usize = 60;

/// Remembers at least the last `window` distinct keys, and no key from more than two windows ago. No key within the window
/// is forgotten; a key that was not seen is reported as seen with a probability of about 7 %: 5.7 % by the old filter, and by the
/// young one more as it fills.
///
/// Two blocked Bloom filters (Putze, Sanders and Singler, 2007): keys go into the young one; when it holds `window` keys,
/// the old one is cleared and becomes the young one. A byte and a half per key of the window.
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
        blocks.saturating_mul(BLOCK_WORDS as u64 * 64) / BITS_PER_KEY
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
        // The block comes from the upper bits; four 9-bit positions from a remix of all.
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

    /// The share of fresh keys that are taken for seen ones, once the memory has been filled twice.
    fn measured(window: u64) -> f64 {
        let mut keys = RecentKeys::new(window);
        let mut rng = Rng::new(1);
        for _ in 0..2 * window {
            keys.note(rng.next_u64());
        }
        let fresh = (0..20 * window).filter(|_| keys.note(rng.next_u64())).count();
        fresh as f64 / (20 * window) as f64
    }

    /// The chance that all bits of an absent key are set in a blocked filter of so many keys a block in the mean: the number of a
    /// block's keys is Poisson's, and each of them sets `PROBES` of its 512 bits.
    fn closed_form(mean: f64) -> f64 {
        let bits = (BLOCK_WORDS * 64) as f64;
        let (mut sum, mut chance) = (0.0, (-mean).exp());
        for keys in 0..400 {
            let set = 1.0 - (1.0 - 1.0 / bits).powf(f64::from(keys) * f64::from(PROBES));
            sum += chance * set.powf(f64::from(PROBES));
            chance *= mean / f64::from(keys + 1);
        }
        sum
    }

    #[test]
    fn false_positives_are_those_of_the_closed_form() {
        for window in [5_000, 20_000, 100_000] {
            // A key that is taken for a seen one is not noted in the young filter where that one takes it for noted: it has as many
            // different keys when it is full as it counts.
            let full = (window as f64) / (RecentKeys::bytes_for(window) as f64 / 128.0);
            let old = closed_form(full);
            let young = (0..100).map(|i| closed_form(full * (f64::from(i) + 0.5) / 100.0));
            let expected = old + (1.0 - old) * young.sum::<f64>() / 100.0;
            let rate = measured(window);
            assert!((rate / expected - 1.0).abs() < 0.06, "{window}: {rate}, not {expected}");
            assert!((0.06..0.09).contains(&rate), "{rate}");
        }
    }

    #[test]
    fn a_key_of_the_window_takes_a_byte_and_a_half() {
        let bytes = RecentKeys::bytes_for(1 << 20);
        assert!((bytes as f64 / f64::from(1 << 20) - 1.5).abs() < 0.001, "{bytes}");
        assert_eq!(RecentKeys::new(1 << 20).memory_bytes() as u64, bytes);
    }

    #[test]
    fn one_that_grows_answers_the_same() {
        let (mut whole, mut grown) = (RecentKeys::new(5000), RecentKeys::new(5000));
        grown.grow_as_filled();
        let mut rng = Rng::new(4);
        for i in 0..40_000 {
            let key = spread(rng.below(12_000));
            assert_eq!(whole.note(key), grown.note(key), "{i}");
            if i == 40 {
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
        let mut again = 0;
        for _ in 0..200 {
            let key = rng.next_u64();
            keys.note(key);
            assert!(keys.note(key));
            for _ in 0..2400 {
                keys.note(rng.next_u64());
            }
            again += u32::from(keys.note(key));
        }
        // Some are taken for seen: as many as of keys that never were.
        assert!(again < 40, "{again}");
    }

    #[test]
    fn window_and_bytes_agree() {
        for bytes in [128usize, 4096, 100_000, 1 << 20] {
            let window = RecentKeys::window_for(bytes);
            assert!(RecentKeys::bytes_for(window) <= bytes as u64);
            assert!(window * 3 / 2 + 512 > bytes as u64);
        }
    }
}
