//! The keyed 128-bit hash of a key, and which of its bits serve what.

use crate::rng::splitmix;

/// The secret of a flash device, kept in its superblock: clients who choose keys cannot choose where they fall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashKey(pub [u8; 16]);

/// Hashes keys under one [`HashKey`] (SipHash-1-3, 128 bits).
#[derive(Clone, Copy, Debug)]
pub struct KeyHasher {
    /// The state before any bytes.
    seeded: Sip,
}

/// The four words of SipHash (Aumasson and Bernstein, INDOCRYPT 2012), with one round for each word of the message and three
/// at the end. Written here because a key is at hand whole, mostly a few words of it: what buffers pieces takes twice the
/// time.
#[derive(Clone, Copy, Debug)]
struct Sip([u64; 4]);

impl Sip {
    /// The state of the 128-bit form under a secret.
    fn new(secret: &[u8; 16]) -> Sip {
        let (low, high) = (word(&secret[..8]), word(&secret[8..]));
        Sip([
            low ^ 0x736f_6d65_7073_6575,
            // 0xee sets the form of 128 bits apart from that of 64.
            high ^ 0x646f_7261_6e64_6f6d ^ 0xee,
            low ^ 0x6c79_6765_6e65_7261,
            high ^ 0x7465_6462_7974_6573,
        ])
    }

    #[inline(always)]
    fn round(&mut self) {
        let [mut a, mut b, mut c, mut d] = self.0;
        a = a.wrapping_add(b);
        b = b.rotate_left(13) ^ a;
        a = a.rotate_left(32);
        c = c.wrapping_add(d);
        d = d.rotate_left(16) ^ c;
        a = a.wrapping_add(d);
        d = d.rotate_left(21) ^ a;
        c = c.wrapping_add(b);
        b = b.rotate_left(17) ^ c;
        c = c.rotate_left(32);
        self.0 = [a, b, c, d];
    }

    #[inline(always)]
    fn take(&mut self, word: u64) {
        self.0[3] ^= word;
        self.round();
        self.0[0] ^= word;
    }

    #[inline(always)]
    fn half(&mut self) -> u64 {
        (0..3).for_each(|_| self.round());
        self.0[0] ^ self.0[1] ^ self.0[2] ^ self.0[3]
    }
}

/// The first eight bytes, or as many as there are.
#[inline(always)]
fn word(bytes: &[u8]) -> u64 {
    match bytes.first_chunk() {
        Some(eight) => u64::from_le_bytes(*eight),
        None => bytes.iter().rev().fold(0, |word, &b| word << 8 | u64::from(b)),
    }
}

impl KeyHasher {
    /// A hasher under `key`.
    pub fn new(key: HashKey) -> KeyHasher {
        KeyHasher { seeded: Sip::new(&key.0) }
    }

    /// The hash of an object's key.
    pub fn hash(&self, key: &[u8]) -> ObjectHash {
        let mut state = self.seeded;
        let mut words = key.chunks_exact(8);
        for eight in &mut words {
            state.take(word(eight));
        }
        let rest = words.remainder();
        // What is left of the key, and its length modulo 256 above it.
        let left = match key.last_chunk() {
            Some(_) if rest.is_empty() => 0,
            Some(last) => u64::from_le_bytes(*last) >> (64 - 8 * rest.len()),
            None => word(rest),
        };
        state.take(left | (key.len() as u64) << 56);
        state.0[2] ^= 0xee;
        let high = state.half();
        state.0[1] ^= 0xdd;
        let low = state.half();
        ObjectHash(u128::from(high) << 64 | u128::from(low))
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

    /// The hash places objects on flash: it is the one that devices were written under.
    #[test]
    fn hashes_are_siphash_1_3() {
        use siphasher::sip128::{Hasher128, SipHasher13};
        use std::hash::Hasher;
        let mut rng = crate::Rng::new(4);
        for len in 0..600 {
            let (mut secret, mut key) = ([0; 16], vec![0; len]);
            rng.fill(&mut secret);
            rng.fill(&mut key);
            let mut theirs = SipHasher13::new_with_key(&secret);
            theirs.write(&key);
            let theirs = theirs.finish128();
            let theirs = u128::from(theirs.h1) << 64 | u128::from(theirs.h2);
            assert_eq!(KeyHasher::new(HashKey(secret)).hash(&key).0, theirs, "{len} bytes");
        }
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
