//! Lines that were evicted not long ago, by a fingerprint of 16 bits.

/// Fingerprints in a bucket, 16 bytes.
const WAYS: usize = 8;

/// A table of evicted lines. Each bucket of eight is a FIFO, so that together they forget in about the order of eviction.
/// 0 is no fingerprint. A line that was never evicted is taken for a ghost once in about 8,000 times.
#[derive(Debug)]
pub struct Ghosts {
    buckets: Vec<[u16; WAYS]>,
}

impl Ghosts {
    /// Room for at least `lines` lines; none for 0.
    pub fn new(lines: u64) -> Ghosts {
        Ghosts { buckets: vec![[0; WAYS]; lines.div_ceil(WAYS as u64) as usize] }
    }

    fn place(&self, hash: u64) -> Option<(usize, u16)> {
        if self.buckets.is_empty() {
            return None;
        }
        let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let bucket = ((u128::from(mixed) * self.buckets.len() as u128) >> 64) as usize;
        Some((bucket, (mixed as u16).max(1)))
    }

    /// A line was evicted.
    pub fn remember(&mut self, hash: u64) {
        if let Some((bucket, print)) = self.place(hash) {
            self.buckets[bucket].rotate_right(1);
            self.buckets[bucket][0] = print;
        }
    }

    /// Whether the line was evicted lately; if so, that is forgotten.
    pub fn take(&mut self, hash: u64) -> bool {
        let Some((bucket, print)) = self.place(hash) else { return false };
        let bucket = &mut self.buckets[bucket];
        let Some(at) = bucket.iter().position(|&p| p == print) else { return false };
        bucket[at..].rotate_left(1);
        bucket[WAYS - 1] = 0;
        true
    }

    /// Bytes of memory.
    pub fn memory_bytes(&self) -> usize {
        self.buckets.capacity() * WAYS * 2
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    #[test]
    fn remembers_about_as_many_as_it_has_room_for() {
        let mut ghosts = Ghosts::new(8_000);
        let mut rng = Rng::new(1);
        let lines: Vec<u64> = (0..20_000).map(|_| rng.next_u64()).collect();
        lines.iter().for_each(|&l| ghosts.remember(l));
        let known = |ghosts: &mut Ghosts, range: std::ops::Range<usize>| {
            lines[range].iter().filter(|&&l| ghosts.take(l)).count()
        };
        assert!(known(&mut ghosts, 0..4_000) < 120, "the oldest are forgotten");
        assert!(known(&mut ghosts, 16_000..20_000) > 3_400, "the newest are not");
        assert_eq!(known(&mut ghosts, 16_000..16_500), 0, "taken once");
        let strangers = (0..100_000).filter(|_| ghosts.take(rng.next_u64())).count();
        assert!(strangers < 40, "{strangers}");
    }

    #[test]
    fn none_is_possible() {
        let mut none = Ghosts::new(0);
        none.remember(5);
        assert!(!none.take(5));
        assert_eq!(none.memory_bytes(), 0);
    }
}
