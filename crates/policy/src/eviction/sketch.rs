//! A counting Bloom filter that estimates how often something was seen.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Counters of 16 bits, addressed by double hashing (Kirsch and Mitzenmacher 2006). Sized as libCacheSim's
/// `minimalIncrementCBF` for a false-positive rate of 0.1 %: 14.38 counters per entry, 10 functions; addresses from
/// XXH64 of the object's 64-bit id under the same two seeds, so that W-TinyLFU decides as libCacheSim's 2024 release.
///
/// A large filter takes memory as it fills: it begins with the counters that are not zero.
#[derive(Debug)]
pub(super) struct CountingBloom {
    len: u32,
    counters: Counters,
}

#[derive(Debug)]
enum Counters {
    /// Those that are not zero, by address.
    Few(HashMap<u32, u16, BuildHasherDefault<Spread>>),
    All(Vec<u16>),
}

/// Up to so many counters (32 MiB) all are there from the beginning.
const SMALL: u32 = 1 << 24;
/// Otherwise all are when one in so many is not zero; an entry of the map takes some 20 bytes then, and a counter two.
const SPARSE: u32 = 32;

/// Hashes an address, which is a remainder of a hash already.
#[derive(Debug, Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&b| self.write_u32(u32::from(b)));
    }

    fn write_u32(&mut self, n: u32) {
        self.0 = (self.0 ^ u64::from(n)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

const FUNCTIONS: u32 = 10;
const SEEDS: [u64; 2] = [0x1234_5678, 0x1234_4321];

impl CountingBloom {
    pub(super) fn new(entries: u64) -> CountingBloom {
        let per_entry = -(0.001f64.ln()) / 0.480_453_013_918_201;
        let len = (per_entry * entries as f64).ceil().min(f64::from(i32::MAX)) as u32;
        let len = len.max(2 * FUNCTIONS);
        let counters = if len <= SMALL {
            Counters::All(vec![0; len as usize])
        } else {
            Counters::Few(HashMap::default())
        };
        CountingBloom { len, counters }
    }

    fn addresses(&self, id: u64) -> impl Iterator<Item = u32> + use<> {
        let a = xxh64(id, SEEDS[0]) as u32;
        let b = xxh64(id, SEEDS[1]) as u32;
        let len = self.len;
        (0..FUNCTIONS).map(move |i| a.wrapping_add(i.wrapping_mul(b)) % len)
    }

    pub(super) fn add(&mut self, id: u64) {
        let addresses = self.addresses(id);
        let few = match &mut self.counters {
            Counters::All(all) => {
                for at in addresses {
                    all[at as usize] = all[at as usize].saturating_add(1);
                }
                return;
            }
            Counters::Few(few) => few,
        };
        for at in addresses {
            let counter = few.entry(at).or_insert(0);
            *counter = counter.saturating_add(1);
        }
        if few.len() > (self.len / SPARSE) as usize {
            let mut all = vec![0; self.len as usize];
            few.iter().for_each(|(&at, &counter)| all[at as usize] = counter);
            self.counters = Counters::All(all);
        }
    }

    pub(super) fn estimate(&self, id: u64) -> u16 {
        let addresses = self.addresses(id);
        let least = match &self.counters {
            Counters::All(all) => addresses.map(|at| all[at as usize]).min(),
            Counters::Few(few) => addresses.map(|at| few.get(&at).copied().unwrap_or(0)).min(),
        };
        least.unwrap_or(0)
    }

    /// Forgets half of everything.
    pub(super) fn halve(&mut self) {
        match &mut self.counters {
            Counters::All(all) => all.iter_mut().for_each(|counter| *counter >>= 1),
            Counters::Few(few) => few.retain(|_, counter| {
                *counter >>= 1;
                *counter > 0
            }),
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        match &self.counters {
            Counters::All(all) => all.capacity() * 2,
            // Address and counter, a byte of the table's own, and an eighth of it empty.
            Counters::Few(few) => few.capacity() * 8 * 9 / 7,
        }
    }
}

/// XXH64 of the eight little-endian bytes of `value` (xxHash specification, version 0.1.1, inputs under 32 bytes).
fn xxh64(value: u64, seed: u64) -> u64 {
    const P1: u64 = 0x9e37_79b1_85eb_ca87;
    const P2: u64 = 0xc2b2_ae3d_27d4_eb4f;
    const P3: u64 = 0x1656_67b1_9e37_79f9;
    const P4: u64 = 0x85eb_ca77_c2b2_ae63;
    const P5: u64 = 0x27d4_eb2f_1656_67c5;
    let mut h = seed.wrapping_add(P5).wrapping_add(8);
    h ^= value.wrapping_mul(P2).rotate_left(31).wrapping_mul(P1);
    h = h.rotate_left(27).wrapping_mul(P1).wrapping_add(P4);
    h ^= h >> 33;
    h = h.wrapping_mul(P2);
    h ^= h >> 29;
    h = h.wrapping_mul(P3);
    h ^ (h >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_below_the_truth() {
        let mut sketch = CountingBloom::new(1_000);
        for id in 0..1_000u64 {
            for _ in 0..id % 5 {
                sketch.add(id);
            }
        }
        let over = (0..1_000u64).filter(|&id| u64::from(sketch.estimate(id)) != id % 5).count();
        assert!((0..1_000u64).all(|id| u64::from(sketch.estimate(id)) >= id % 5));
        assert!(over < 10, "{over} of 1000 estimates are too high");
        sketch.halve();
        assert_eq!(sketch.estimate(4), 2);
    }

    #[test]
    fn a_large_filter_counts_alike_while_it_fills() {
        // Just above what begins whole, and the same with all counters.
        let mut sketch = CountingBloom::new(1_200_000);
        let mut whole = CountingBloom { len: sketch.len, counters: Counters::All(Vec::new()) };
        whole.counters = Counters::All(vec![0; sketch.len as usize]);
        assert!(matches!(sketch.counters, Counters::Few(_)));
        let mut turned = false;
        for id in 0..80_000u64 {
            for s in [&mut sketch, &mut whole] {
                s.add(id / 2);
                if id == 30_000 {
                    s.halve();
                }
            }
            if id % 997 == 0 {
                assert!((0..=id / 2).step_by(31).all(|i| sketch.estimate(i) == whole.estimate(i)));
            }
            if id == 40_000 {
                assert!(sketch.memory_bytes() * 3 < whole.memory_bytes());
            }
            turned |= matches!(sketch.counters, Counters::All(_));
        }
        assert!(!turned, "40,000 objects are few");
        (0..90_000).for_each(|id| sketch.add(1 << 40 | id));
        assert!(matches!(sketch.counters, Counters::All(_)));
        (0..90_000).for_each(|id| whole.add(1 << 40 | id));
        assert!((0..40_000).all(|id| sketch.estimate(id) == whole.estimate(id)));
    }

    #[test]
    fn the_hash_is_xxh64() {
        // python-xxhash 3: xxh64(struct.pack("<Q", 1), seed=0), and of 0x0123456789abcdef with seed 0x12345678.
        assert_eq!(xxh64(1, 0), 0x9f29_cb17_a2a4_9995);
        assert_eq!(xxh64(0x0123_4567_89ab_cdef, 0x1234_5678), 0x04bd_840e_8f44_109e);
    }
}
