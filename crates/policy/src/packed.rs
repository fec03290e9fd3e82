//! Cache lines of entries that take three bytes each.

use larder_base::LazyWords;
use larder_base::bytes::{equal, greatest};

/// Entries of a set, in the 64 bytes of a cache line; a byte is left over.
pub(crate) const WAYS: usize = 21;
/// Words of a set.
pub(crate) const SET_WORDS: usize = 8;
const ENTRY_BYTES: usize = 3;
const ENTRY_BITS: usize = ENTRY_BYTES * 8;
const ENTRY: u64 = (1 << ENTRY_BITS) - 1;

/// Where a key's entry is among `sets` sets: at which word its set begins, and the tag by which it is known there.
#[inline]
pub(crate) fn place(fingerprint: u64, sets: u64) -> (usize, u32) {
    let set = (u128::from(fingerprint) * u128::from(sets)) >> 64;
    // The set comes from the upper bits, the tag from the lower; a tag of zero would look like an empty place.
    (set as usize * SET_WORDS, (fingerprint as u32 & 0x3ff).max(1))
}

/// A set, read whole. Its entries are looked at all at once, by their bytes: one after another they would take several hundred instructions,
/// a tenth of a request.
pub(crate) struct Set([u64; SET_WORDS]);

/// Bytes that are an entry's first (lowest), and those that are its last: a bit for each byte of the line.
const FIRST: u64 = bytes_of_entries(0);
const LAST: u64 = bytes_of_entries(ENTRY_BYTES - 1);
/// The low five bits of each first byte: when the entry was touched last.
const EPOCHS: [u64; SET_WORDS] = epochs();
const EPOCH: u8 = 0x1f;

const fn bytes_of_entries(of: usize) -> u64 {
    let (mut bytes, mut way) = (0, 0);
    while way < WAYS {
        bytes |= 1 << (way * ENTRY_BYTES + of);
        way += 1;
    }
    bytes
}

const fn epochs() -> [u64; SET_WORDS] {
    let (mut bits, mut way) = ([0; SET_WORDS], 0);
    while way < WAYS {
        bits[way * ENTRY_BITS / 64] |= (EPOCH as u64) << (way * ENTRY_BITS % 64);
        way += 1;
    }
    bits
}

/// The same byte eight times.
#[inline]
fn repeated(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

impl Set {
    /// The set whose words begin at `start`.
    #[inline]
    pub(crate) fn load(words: &LazyWords, start: usize) -> Set {
        Set(words.line(start))
    }

    /// Writes it where it was loaded.
    #[inline]
    pub(crate) fn save(&self, words: &mut LazyWords, start: usize) {
        words.set_line(start, &self.0);
    }

    /// The word in which an entry begins, and how far up in it.
    #[inline]
    fn at(way: usize) -> (usize, usize) {
        (way * ENTRY_BITS / 64, way * ENTRY_BITS % 64)
    }

    /// The low 24 bits of an entry.
    #[inline]
    pub(crate) fn entry(&self, way: usize) -> u32 {
        let (word, up) = Self::at(way);
        let mut bits = self.0[word] >> up;
        if up + ENTRY_BITS > 64 {
            bits |= self.0[word + 1] << (64 - up);
        }
        (bits & ENTRY) as u32
    }

    /// Replaces an entry.
    #[inline]
    pub(crate) fn put(&mut self, way: usize, bits: u32) {
        let (word, up) = Self::at(way);
        let bits = u64::from(bits) & ENTRY;
        self.0[word] = self.0[word] & !(ENTRY << up) | bits << up;
        if up + ENTRY_BITS > 64 {
            let below = 64 - up;
            self.0[word + 1] = self.0[word + 1] & !(ENTRY >> below) | bits >> below;
        }
    }

    /// Which of the entries has this tag in its upper ten bits, of those that are `kept`.
    #[inline]
    pub(crate) fn find(&self, tag: u32, kept: impl Fn(u32) -> bool) -> Option<usize> {
        // Eight of the ten bits are a byte of their own.
        let mut alike = equal(&self.0, (tag >> 2) as u8) & LAST;
        while alike != 0 {
            let way = alike.trailing_zeros() as usize / ENTRY_BYTES;
            let bits = self.entry(way);
            if bits >> 14 == tag && kept(bits) {
                return Some(way);
            }
            alike &= alike - 1;
        }
        None
    }

    /// The first bytes of the places that are empty.
    #[inline]
    fn empty(&self) -> u64 {
        let zero = equal(&self.0, 0);
        zero & zero >> 1 & zero >> 2 & FIRST
    }

    /// How far the low five bits of each entry are behind `epoch`, at its first byte; all others are zero.
    #[inline]
    fn ages(&self, epoch: u32) -> [u64; SET_WORDS] {
        // No byte borrows from the next.
        let now = repeated(epoch as u8 & EPOCH | (EPOCH + 1));
        std::array::from_fn(|word| (now - (self.0[word] & EPOCHS[word])) & EPOCHS[word])
    }

    /// The first place that is empty, or else the first entry whose low five bits are furthest behind `epoch`.
    #[inline]
    pub(crate) fn oldest(&self, epoch: u32) -> usize {
        let mut first = self.empty();
        if first == 0 {
            let ages = self.ages(epoch);
            first = equal(&ages, greatest(&ages)) & FIRST;
        }
        first.trailing_zeros() as usize / ENTRY_BYTES
    }

    /// Which entries' low five bits are 24 or more behind `epoch`.
    #[inline]
    pub(crate) fn old(&self, epoch: u32) -> impl Iterator<Item = usize> + use<> {
        // Those that have the upper two of the five bits; mostly there are none.
        let ages = self.ages(epoch);
        let any = ages.iter().fold(0, |any, age| any | age & age << 1);
        let mut old = 0;
        if any & repeated(16) != 0 {
            old = equal(&ages.map(|age| age & repeated(24)), 24) & !self.empty();
        }
        std::iter::from_fn(move || {
            let way = (old != 0).then(|| old.trailing_zeros() as usize / ENTRY_BYTES)?;
            old &= old - 1;
            Some(way)
        })
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    /// Sets of entries at random, some of them empty.
    fn random(rng: &mut Rng) -> (Set, [u32; WAYS]) {
        let (mut set, mut entries) = (Set([0; SET_WORDS]), [0; WAYS]);
        let full = rng.below(4) != 0;
        let few = rng.below(2) == 0;
        for (way, entry) in entries.iter_mut().enumerate() {
            if full || rng.chance(0.7) {
                let tag = if few { 1 + rng.below(9) } else { 1 + rng.below(1023) };
                *entry = (tag << 14 | rng.below(1 << 14)) as u32;
                set.put(way, *entry);
            }
        }
        (set, entries)
    }

    #[test]
    fn an_entry_is_what_was_put_beside_any_others() {
        let mut rng = Rng::new(1);
        for _ in 0..1000 {
            let (mut set, mut entries) = random(&mut rng);
            for _ in 0..10 {
                let (way, bits) = (rng.below(WAYS as u64) as usize, rng.below(1 << 24) as u32);
                set.put(way, bits);
                entries[way] = bits;
                assert_eq!(std::array::from_fn(|way| set.entry(way)), entries);
            }
        }
    }

    /// Beside the entries looked at one after another.
    #[test]
    fn entries_looked_at_at_once_are_those_looked_at_in_turn() {
        let mut rng = Rng::new(2);
        for _ in 0..20_000 {
            let (set, entries) = random(&mut rng);
            let epoch = rng.below(32) as u32;
            let age = |bits: u32| if bits == 0 { 32 } else { epoch.wrapping_sub(bits) & 31 };
            let tag = entries[rng.below(WAYS as u64) as usize] >> 14;
            for tag in [tag, tag ^ 1, tag ^ 1 << 9, 1 + rng.below(1023) as u32] {
                if tag == 0 {
                    continue;
                }
                for least in [8, 32] {
                    let in_turn = entries.iter().position(|&e| e >> 14 == tag && age(e) < least);
                    assert_eq!(set.find(tag, |e| age(e) < least), in_turn, "{tag} in {entries:?}");
                }
            }
            let oldest = (1..WAYS)
                .fold(0, |of, way| if age(entries[way]) > age(entries[of]) { way } else { of });
            assert_eq!(set.oldest(epoch), oldest, "{epoch} in {entries:?}");
            let old = (0..WAYS).filter(|&way| entries[way] != 0 && age(entries[way]) >= 24);
            assert!(set.old(epoch).eq(old), "{epoch} in {entries:?}");
        }
    }
}
