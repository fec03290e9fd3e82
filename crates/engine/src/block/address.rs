//! From a line to its shard, its set and its tag, and back.
//!
//! The line space is cut into **laps** of as many groups as all shards have sets of groups. A lap meets every set once: its
//! groups go to the sets one after the other, from a place on that a keyed hash of the lap's number says. So neighbours
//! never compete, and a volume (or a hot part of one) fits whole wherever it is no larger than the cache, as with Azor's
//! plain remainder; but what is a power of two apart, as file systems lay out their metadata, does not meet in one set,
//! as it would with a plain remainder. (Scattering every group by a hash, the usual way, makes a cache of 8 ways that is
//! filled to four fifths by one volume lose a tenth of it to sets that overflow.)
//!
//! The tag is the lap's number. Nothing is lost on the way, so a slot with its tag names exactly one line: a tag that is
//! equal *is* the same line, not probably the same.
//!
//! Where every line has a slot of its own (`sparse`) there is a single lap, which begins at the first set.

use larder_format::block::Layout;

use super::api::{GROUP_LINES, GroupId, LineId};

/// Bits of a tag in a map's entry.
pub const TAG_BITS: u32 = 26;
/// Most bits of a group number: 2^36 groups are 2^40 lines, 4 PiB of 4 KiB lines.
pub const MAX_GROUP_BITS: u32 = 36;

fn hash(key: u64, value: u64) -> u64 {
    let mut z = value.wrapping_add(key).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 32)
}

/// How the line space falls on shards and sets. The same for every shard of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placing {
    key: u64,
    bits: u32,
    shards: u64,
    /// Sets of groups in a shard: each holds `ways` groups' worth of lines.
    group_sets: u64,
    /// There is but one lap, and it begins at the first set.
    single: bool,
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
            key: hash(key, u64::MAX),
            bits,
            shards: u64::from(shards),
            group_sets: u64::from(group_sets),
            single: false,
        }
    }

    /// One in which every group has a set of its own: they go to the shards in turn, in order.
    ///
    /// # Panics
    /// If there are no shards or sets.
    pub fn single(shards: u32, group_sets: u32, key: u64) -> Placing {
        Placing { single: true, ..Self::new(shards, group_sets, key) }
    }

    /// That of a device.
    pub fn of(layout: &Layout, key: u64) -> Placing {
        if layout.is_sparse() {
            Self::single(layout.shards, layout.group_sets, key)
        } else {
            Self::new(layout.shards, layout.group_sets, key)
        }
    }

    /// Groups in the line space: volumes must fit in it together.
    pub fn groups(&self) -> u64 {
        if self.single { self.lap() } else { 1 << self.bits }
    }

    /// Lines in the line space.
    pub fn lines(&self) -> u64 {
        self.groups() * u64::from(GROUP_LINES)
    }

    /// A hash of `line` that nobody can foresee who does not know the key.
    pub fn hash(&self, line: LineId) -> u64 {
        hash(self.key.rotate_left(32), line.0)
    }

    /// Groups of a lap: the sets of all shards.
    fn lap(&self) -> u64 {
        self.shards * self.group_sets
    }

    /// The set, of all shards' sets, where lap number `lap` begins.
    fn begin(&self, lap: u64) -> u64 {
        if self.single { 0 } else { hash(self.key, lap) % self.lap() }
    }

    /// The lap of `group`, and its set of all shards' sets.
    fn lap_and_set(&self, group: GroupId) -> (u64, u64) {
        let lap = group.0 / self.lap();
        (lap, (group.0 % self.lap() + self.begin(lap)) % self.lap())
    }

    /// Number of shards.
    pub fn shards(&self) -> u64 {
        self.shards
    }

    /// The first group from `group` on that `shard` serves.
    pub fn next_of(&self, shard: u32, group: GroupId) -> GroupId {
        // In a lap the shards follow each other, over its end too: it is a multiple of their number.
        let mut group = group;
        loop {
            let (lap, set) = self.lap_and_set(group);
            let ahead = (u64::from(shard) + self.shards - set % self.shards) % self.shards;
            if group.0 % self.lap() + ahead < self.lap() {
                return GroupId(group.0 + ahead);
            }
            group = GroupId((lap + 1) * self.lap());
        }
    }

    /// The shard that serves `group`.
    pub fn shard(&self, group: GroupId) -> u32 {
        (self.lap_and_set(group).1 % self.shards) as u32
    }

    /// Where `group` falls in its shard.
    pub fn place(&self, group: GroupId) -> Place {
        let (lap, set) = self.lap_and_set(group);
        Place { group_set: (set / self.shards) as u32, tag: lap as u32 }
    }

    /// The line that lies in slot `slot` of shard `shard`, where there is but one lap.
    pub fn line_in(&self, shard: u32, slot: u32) -> LineId {
        let lines = GROUP_LINES;
        self.line(shard, Place { group_set: slot / lines, tag: 0 }, slot % lines)
    }

    /// The line of place `place` and place `index` in its group, in shard `shard`: the inverse of the above.
    pub fn line(&self, shard: u32, place: Place, index: u32) -> LineId {
        let (lap, set) =
            (u64::from(place.tag), u64::from(place.group_set) * self.shards + u64::from(shard));
        let from_begin = (set + self.lap() - self.begin(lap)) % self.lap();
        GroupId(lap * self.lap() + from_begin).line(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// How many groups of `groups` fall into each set.
    fn counts(placing: &Placing, groups: impl Iterator<Item = u64>) -> Vec<u32> {
        let mut counts = vec![0u32; placing.lap() as usize];
        for group in groups {
            let place = placing.place(GroupId(group));
            let shard = placing.shard(GroupId(group));
            counts[(u64::from(place.group_set) * placing.shards + u64::from(shard)) as usize] += 1;
        }
        counts
    }

    #[test]
    fn what_is_no_larger_than_the_cache_fits_whole() {
        let placing = Placing::new(4, 250, 7);
        // Eight ways: eight laps fill every set exactly.
        assert!(counts(&placing, 0..8000).iter().all(|&c| c == 8));
        // A volume that begins anywhere: a set more or less at its two ends.
        assert!(counts(&placing, 12_345..12_345 + 7000).iter().all(|&c| (6..=8).contains(&c)));
    }

    #[test]
    fn powers_of_two_spread() {
        // The power of two is the number of sets: a plain remainder would put all into one.
        let placing = Placing::new(4, 256, 7);
        let counts = counts(&placing, (0..4096).map(|i| i * 1024));
        assert!(counts.iter().all(|&c| c < 20), "{counts:?}");
    }

    proptest! {
        #[test]
        fn the_next_group_of_a_shard(shards in 1u32..64, sets in 1u32..50, key: u64, from in 0u64..100_000) {
            let placing = Placing::new(shards, sets, key);
            for shard in 0..shards {
                let wanted = (from..).find(|&g| placing.shard(GroupId(g)) == shard).unwrap();
                prop_assert_eq!(placing.next_of(shard, GroupId(from)), GroupId(wanted));
            }
        }

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
