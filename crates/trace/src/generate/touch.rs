//! Parts of which generators with exact totals are made.

use larder_base::Rng;

use super::Zipf;
use super::simple::permute;

/// Kinds of requests in exact numbers and random order: each draw takes a kind with the probability that is left of it.
#[derive(Clone, Debug)]
pub(crate) struct Deck<const N: usize> {
    left: [u64; N],
    total: u64,
}

impl<const N: usize> Deck<N> {
    pub(crate) fn new(counts: [u64; N]) -> Deck<N> {
        Deck { left: counts, total: counts.iter().sum() }
    }

    /// The next kind; the last one for ever when all are drawn.
    pub(crate) fn draw(&mut self, rng: &mut Rng) -> usize {
        if self.total == 0 {
            return N - 1;
        }
        let mut at = rng.below(self.total);
        self.total -= 1;
        for (kind, left) in self.left.iter_mut().enumerate() {
            if at < *left {
                *left -= 1;
                return kind;
            }
            at -= *left;
        }
        N - 1
    }

    /// Whether all are drawn.
    pub(crate) fn is_empty(&self) -> bool {
        self.total == 0
    }

    /// Puts draws of this kind in.
    pub(crate) fn put(&mut self, kind: usize, count: u64) {
        self.left[kind] += count;
        self.total += count;
    }
}

/// Accesses to exactly `wanted` distinct places out of `places`, over a known number of accesses: each is a first one
/// with the probability that makes the numbers come out; the others go back to a place that was touched, by Zipf's law
/// over the order of first touches. Places are scattered.
#[derive(Clone, Debug)]
pub(crate) struct Touch {
    places: u64,
    wanted: u64,
    touched: u64,
    accesses: u64,
    skew: f64,
    /// The law over as many ranks as were touched when it was made.
    zipf: Zipf,
    ranks: u64,
}

impl Touch {
    /// `accesses` at `places`, of which `wanted` are touched (fewer where there are not so many accesses or places).
    pub(crate) fn new(places: u64, wanted: u64, accesses: u64, skew: f64) -> Touch {
        let wanted = wanted.min(places).min(accesses);
        Touch { places, wanted, touched: 0, accesses, skew, zipf: Zipf::new(1, skew), ranks: 1 }
    }

    /// The next place, and whether it is touched for the first time.
    pub(crate) fn draw(&mut self, rng: &mut Rng) -> (u64, bool) {
        let first = self.touched == 0
            || self.touched < self.wanted
                && rng.below(self.accesses.max(1)) < self.wanted - self.touched;
        self.accesses = self.accesses.saturating_sub(1);
        let rank = if first {
            self.touched += 1;
            self.touched - 1
        } else {
            // A law for a few less ranks is near enough: it is made anew when there are 1/64 more.
            if self.touched > self.ranks + self.ranks / 64 {
                self.ranks = self.touched;
                self.zipf = Zipf::new(self.ranks, self.skew);
            }
            self.zipf.draw(rng)
        };
        (permute(rank, self.places), first)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn decks_are_exact() {
        let mut rng = Rng::new(1);
        let mut deck = Deck::new([10, 200, 0]);
        let mut counts = [0; 3];
        for i in 0..213 {
            if i == 100 {
                deck.put(2, 3);
            }
            counts[deck.draw(&mut rng)] += 1;
            assert!(i >= 100 || counts[2] == 0);
        }
        assert_eq!(counts, [10, 200, 3]);
        assert!(deck.is_empty());
        assert_eq!(deck.draw(&mut rng), 2, "the last for ever");
    }

    #[test]
    fn touches_are_exact() {
        for (places, wanted, accesses) in
            [(1000, 300, 5000), (1000, 1000, 1000), (50, 90, 400), (9, 5, 3)]
        {
            let mut rng = Rng::new(accesses);
            let mut touch = Touch::new(places, wanted, accesses, 0.9);
            let mut seen = BTreeSet::new();
            for _ in 0..accesses {
                let (place, first) = touch.draw(&mut rng);
                assert!(place < places);
                assert_eq!(seen.insert(place), first);
            }
            assert_eq!(seen.len() as u64, wanted.min(places).min(accesses));
        }
    }
}
