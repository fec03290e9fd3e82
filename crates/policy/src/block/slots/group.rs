//! The order of a group's slots: a permutation.

use super::MOST_WAYS;

/// The rank of each way, 0 for the newest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    ranks: [u8; MOST_WAYS as usize],
    ways: u32,
}

impl Order {
    /// The bits that hold a rank.
    pub(super) fn mask(rank_bits: u32) -> u8 {
        ((1u32 << rank_bits) - 1) as u8
    }

    /// The order that `rank_of` tells; where that is no permutation, the ranks it tells are a preference and ways of equal rank follow each
    /// other.
    pub(super) fn new(ways: u32, rank_of: impl Fn(u32) -> u8) -> Order {
        let mut ranks = [0; MOST_WAYS as usize];
        let mut seen = 0u64;
        for way in 0..ways {
            let rank = rank_of(way);
            ranks[way as usize] = rank;
            seen |= 1 << rank;
        }
        let mut order = Order { ranks, ways };
        if seen != (1u64 << ways) - 1 {
            order.repair();
        }
        order
    }

    #[cold]
    fn repair(&mut self) {
        let told = self.ranks;
        let before = |a: u32, b: u32| (told[a as usize], a) < (told[b as usize], b);
        for way in 0..self.ways {
            self.ranks[way as usize] =
                (0..self.ways).filter(|&other| before(other, way)).count() as u8;
        }
    }

    pub(super) fn rank(&self, way: u32) -> u32 {
        u32::from(self.ranks[way as usize])
    }

    /// The way of this rank.
    pub(super) fn at(&self, rank: u32) -> u32 {
        (0..self.ways).find(|&way| self.rank(way) == rank).unwrap_or(0)
    }

    pub(super) fn make_newest(&mut self, way: u32) {
        let old = self.ranks[way as usize];
        for rank in &mut self.ranks[..self.ways as usize] {
            *rank += u8::from(*rank < old);
        }
        self.ranks[way as usize] = 0;
    }

    pub(super) fn make_oldest(&mut self, way: u32) {
        let old = self.ranks[way as usize];
        for rank in &mut self.ranks[..self.ways as usize] {
            *rank -= u8::from(*rank > old);
        }
        self.ranks[way as usize] = (self.ways - 1) as u8;
    }

    /// Ways from the oldest to the newest.
    pub(super) fn oldest_first(&self) -> impl Iterator<Item = u32> + use<> {
        let mut by_rank = [0u8; MOST_WAYS as usize];
        for way in 0..self.ways {
            by_rank[usize::from(self.ranks[way as usize])] = way as u8;
        }
        (0..self.ways).rev().map(move |rank| u32::from(by_rank[rank as usize]))
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    #[test]
    fn any_bits_give_a_permutation() {
        let mut rng = Rng::new(4);
        for _ in 0..2_000 {
            let ways = rng.range(1, 32) as u32;
            let mut bytes = [0u8; 32];
            rng.fill(&mut bytes);
            let mut order = Order::new(ways, |way| bytes[way as usize] & 31);
            if rng.chance(0.5) {
                order.make_newest(rng.below(u64::from(ways)) as u32);
            } else {
                order.make_oldest(rng.below(u64::from(ways)) as u32);
            }
            let mut ranks: Vec<u32> = (0..ways).map(|way| order.rank(way)).collect();
            assert!((0..ways).all(|rank| order.rank(order.at(rank)) == rank));
            ranks.sort_unstable();
            assert!(ranks.iter().copied().eq(0..ways), "{ranks:?}");
        }
    }
}
