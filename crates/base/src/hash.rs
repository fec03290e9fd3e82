//! The keyed 128-bit hash of a key, and which of its bits serve what.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::rng::splitmix;

/// The secret of a flash device, kept in its superblock: clients who choose keys cannot choose where they fall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashKey(pub [u8; 16]);

/// Hashes keys under one [`HashKey`] (SipHash-1-3, 128 bits).
#[derive(Clone, Copy, Debug)]
pub struct KeyHasher {
    seeded: SipHasher13,
}

impl KeyHasher {
    /// A hasher under `key`.
    pub fn new(key: HashKey) -> KeyHasher {
        KeyHasher { seeded: SipHasher13::new_with_key(&key.0) }
    }

    /// The hash of an object's key.
    pub fn hash(&self, key: &[u8]) -> ObjectHash {
        let mut h = self.seeded;
        h.write(key);
        let out = h.finish128();
        ObjectHash(u128::from(out.h1) << 64 | u128::from(out.h2))
    }
}

/// A key's 128-bit hash. Disjoint bits serve disjoint uses, so that no use biases another:
///
/// ```text
/// 127..120  virtual shard (256 of them, fixed by the format)
/// 119..64   primary bucket in the flash index, and the DRAM table
///  63..52   tag in the flash index (12 bits)
///  51..0    the 16 page functions
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectHash(pub u128);

impl ObjectHash {
    /// Number of virtual shards: fixed by the format, so that the number of locks may change at run time.
    pub const VIRTUAL_SHARDS: u32 = 256;

    /// The virtual shard, 0..256.
    #[inline]
    pub fn virtual_shard(self) -> u8 {
        (self.0 >> 120) as u8
    }

    /// 56 bits that choose a bucket, scaled to `0..buckets` by multiplication (any number of buckets, not only powers
    /// of two).
    #[inline]
    pub fn bucket(self, buckets: u32) -> u32 {
        let bits = (self.0 >> 88) as u32;
        ((u64::from(bits) * u64::from(buckets)) >> 32) as u32
    }

    /// The 12-bit tag.
    #[inline]
    pub fn tag(self) -> u16 {
        (self.0 >> 52) as u16 & 0xfff
    }

    /// The page that function `function` (0..16) names among `pages`.
    #[inline]
    pub fn page(self, function: u8, pages: u32) -> u32 {
        let low = self.0 as u64 & ((1 << 52) - 1);
        let mixed = splitmix(low ^ (u64::from(function) << 56));
        (((mixed >> 32) * u64::from(pages)) >> 32) as u32
    }

    /// 32 bits for the DRAM table and for comparing before the key is touched.
    #[inline]
    pub fn dram(self) -> u32 {
        (self.0 >> 64) as u32
    }

    /// 64 bits that stand for the key in sketches, samplers and side tables.
    #[inline]
    pub fn fingerprint(self) -> u64 {
        (self.0 >> 32) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keyed_and_spread() {
        let a = KeyHasher::new(HashKey([1; 16]));
        let b = KeyHasher::new(HashKey([2; 16]));
        assert_ne!(a.hash(b"key"), b.hash(b"key"));
        assert_eq!(a.hash(b"key"), a.hash(b"key"));
        let mut pages = vec![0u32; 64];
        for i in 0..64_000u32 {
            pages[a.hash(&i.to_le_bytes()).page(3, 64) as usize] += 1;
        }
        assert!(pages.iter().all(|&c| (800..1200).contains(&c)), "{pages:?}");
    }

    #[test]
    fn functions_differ() {
        let h = KeyHasher::new(HashKey([9; 16])).hash(b"x");
        let mut seen: Vec<u32> = (0..16).map(|f| h.page(f, 1 << 20)).collect();
        seen.sort_unstable();
        seen.dedup();
        assert!(seen.len() >= 15);
    }
}
