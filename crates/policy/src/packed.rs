//! Cache lines of entries that take three bytes each.

use larder_base::LazyWords;

/// Entries of a set, in the 64 bytes of a cache line; a byte is left over.
pub(crate) const WAYS: usize = 21;
/// Words of a set.
pub(crate) const SET_WORDS: usize = 8;
const ENTRY_BYTES: usize = 3;

/// Where a key's entry is among `sets` sets: at which word its set begins, and the tag by which it is known there.
#[inline]
pub(crate) fn place(fingerprint: u64, sets: u64) -> (usize, u32) {
    let set = (u128::from(fingerprint) * u128::from(sets)) >> 64;
    // The set comes from the upper bits, the tag from the lower; a tag of zero would look like an empty place.
    (set as usize * SET_WORDS, (fingerprint as u32 & 0x3ff).max(1))
}

/// A set, read whole.
pub(crate) struct Set([u8; SET_WORDS * 8]);

impl Set {
    /// The set whose words begin at `start`.
    #[inline]
    pub(crate) fn load(words: &LazyWords, start: usize) -> Set {
        let mut set = Set([0; SET_WORDS * 8]);
        for (bytes, word) in set.0.chunks_exact_mut(8).zip(words.line(start)) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        set
    }

    /// Writes what has changed.
    #[inline]
    pub(crate) fn save(&self, words: &mut LazyWords, start: usize) {
        let before = words.line(start);
        for (i, (bytes, before)) in self.0.chunks_exact(8).zip(before).enumerate() {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            let word = u64::from_le_bytes(word);
            if word != before {
                words.set(start + i, word);
            }
        }
    }

    /// The low 24 bits of an entry.
    #[inline]
    pub(crate) fn entry(&self, way: usize) -> u32 {
        let at = way * ENTRY_BYTES;
        u32::from_le_bytes([self.0[at], self.0[at + 1], self.0[at + 2], 0])
    }

    /// Replaces an entry.
    #[inline]
    pub(crate) fn put(&mut self, way: usize, bits: u32) {
        let at = way * ENTRY_BYTES;
        self.0[at..at + ENTRY_BYTES].copy_from_slice(&bits.to_le_bytes()[..ENTRY_BYTES]);
    }

    /// Which of the entries has this tag in its upper ten bits, of those that are `kept`.
    #[inline]
    pub(crate) fn find(&self, tag: u32, kept: impl Fn(u32) -> bool) -> Option<usize> {
        (0..WAYS).find(|&way| {
            let bits = self.entry(way);
            bits >> 14 == tag && kept(bits)
        })
    }
}
