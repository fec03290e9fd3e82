//! From a line to its shard, its set and its tag, and back.
//!
//! A group's number is permuted by a keyed bijection over `2^bits` numbers; the permuted number, divided by the shards
//! and then by the sets of groups of a shard, leaves a tag. Nothing is lost on the way, so a slot with its tag names
//! exactly one line: a tag that is equal *is* the same line, not probably the same.

use super::api::{GROUP_LINES, GroupId, LineId};

/// Bits of a tag in a map's entry.
pub const TAG_BITS: u32 = 26;
/// Most bits of a group number: 2^36 groups are 2^40 lines, 4 PiB of 4 KiB lines.
pub const MAX_GROUP_BITS: u32 = 36;

/// A keyed permutation of `0..2^bits`: four rounds of an unbalanced Feistel network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permutation {
    low: u32,
    high: u32,
    keys: [u64; 4],
}

fn round(key: u64, value: u64) -> u64 {
    let mut z = value.wrapping_add(key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 32)
}

impl Permutation {
    /// The permutation of `0..2^bits` under `key`. `bits` is 2 to 36.
    pub fn new(bits: u32, key: u64) -> Permutation {
        debug_assert!((2..=MAX_GROUP_BITS).contains(&bits));
        let low = bits / 2;
        let keys = std::array::from_fn(|i| round(key, i as u64 + 1));
        Permutation { low, high: bits - low, keys }
    }

    fn mask(bits: u32) -> u64 {
        (1 << bits) - 1
    }

    /// The image of `value`.
    pub fn apply(&self, value: u64) -> u64 {
        let mut low = value & Self::mask(self.low);
        let mut high = value >> self.low;
        for pair in self.keys.chunks_exact(2) {
            high ^= round(pair[0], low) & Self::mask(self.high);
            low ^= round(pair[1], high) & Self::mask(self.low);
        }
        high << self.low | low
    }

    /// The value whose image is `image`.
    pub fn invert(&self, image: u64) -> u64 {
        let mut low = image & Self::mask(self.low);
        let mut high = image >> self.low;
        for pair in self.keys.chunks_exact(2).rev() {
            low ^= round(pair[1], high) & Self::mask(self.low);
            high ^= round(pair[0], low) & Self::mask(self.high);
        }
        high << self.low | low
    }
}

/// How the line space falls on shards and sets. The same for every shard of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placing {
    permutation: Permutation,
    bits: u32,
    shards: u64,
    /// Sets of groups in a shard: each holds `ways` groups' worth of lines.
    group_sets: u64,
}

/// Where a group falls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which set of groups of the shard.
    pub group_set: u32,
    /// What distinguishes it from other groups that fall there.
    pub tag: u32,
}

impl Placing {
    /// A placing over `shards` shards (1 to 64) of `group_sets` sets of groups each, under `key`.
    ///
    /// # Panics
    /// If there are no shards or sets.
    pub fn new(shards: u32, group_sets: u32, key: u64) -> Placing {
        assert!(shards > 0 && group_sets > 0, "a cache without room");
        let divisor = u64::from(shards) * u64::from(group_sets);
        let bits = (TAG_BITS + divisor.ilog2()).min(MAX_GROUP_BITS);
        Placing {
            permutation: Permutation::new(bits, key),
            bits,
            shards: u64::from(shards),
            group_sets: u64::from(group_sets),
        }
    }

    /// Groups in the line space: volumes must fit in it together.
    pub fn groups(&self) -> u64 {
        1 << self.bits
    }

    /// Lines in the line space.
    pub fn lines(&self) -> u64 {
        self.groups() * u64::from(GROUP_LINES)
    }

    /// The shard that serves `group`.
    pub fn shard(&self, group: GroupId) -> u32 {
        (self.permutation.apply(group.0) % self.shards) as u32
    }

    /// Where `group` falls in its shard.
    pub fn place(&self, group: GroupId) -> Place {
        let rest = self.permutation.apply(group.0) / self.shards;
        Place { group_set: (rest % self.group_sets) as u32, tag: (rest / self.group_sets) as u32 }
    }

    /// The line of place `place` and place `index` in its group, in shard `shard`: the inverse of the above.
    pub fn line(&self, shard: u32, place: Place, index: u32) -> LineId {
        let rest = u64::from(place.tag) * self.group_sets + u64::from(place.group_set);
        GroupId(self.permutation.invert(rest * self.shards + u64::from(shard))).line(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_permutation_is_one() {
        for bits in 2..12 {
            let p = Permutation::new(bits, 0x1234);
            let mut seen = vec![false; 1 << bits];
            for value in 0..1u64 << bits {
                let image = p.apply(value);
                assert!(!std::mem::replace(&mut seen[image as usize], true), "{bits} {value}");
                assert_eq!(p.invert(image), value);
            }
        }
    }

    #[test]
    fn neighbours_spread() {
        let placing = Placing::new(4, 1000, 7);
        let mut counts = vec![0u32; 1000];
        for group in 0..100_000 {
            counts[placing.place(GroupId(group)).group_set as usize] += 1;
        }
        assert!(counts.iter().all(|&c| (50..160).contains(&c)), "{counts:?}");
    }

    proptest! {
        #[test]
        fn a_place_names_one_line(shards in 1u32..64, sets in 1u32..1_000_000, key: u64, line: u64) {
            let placing = Placing::new(shards, sets, key);
            let line = LineId(line % placing.lines());
            let place = placing.place(line.group());
            prop_assert!(place.tag < 1 << TAG_BITS);
            prop_assert!(place.group_set < sets);
            prop_assert_eq!(placing.line(placing.shard(line.group()), place, line.index()), line);
        }
    }
}
