//! Direct-mapped and set-associative placement, 7 bytes of DRAM a slot.
//!
//! ```text
//! entry   32 bits   valid 1 | held 1 | rank 4 | tag 26       two to a word of `entries`
//! sum     24 bits   checksum of the line                      eight to three words of `sums`
//!
//! valid held
//!   0    0    free: the durable map says so too; a line may be written here
//!   0    1    held: empty, but the durable map may still name a line here (or a write to it is under way)
//!   1    0    a line lies here
//!   1    1    reserved for dirty lines (write-back): refused when attaching
//! ```
//!
//! A set of *groups* has `ways` ways of [`GROUP_LINES`] slots; line `i` of a group competes with line `i` of the groups
//! that fall into the same set of groups. Lines of a group that are in the same way are neighbours on the device, so
//! that one read gets them all.
//!
//! Both arrays are [`Words`]: in shared memory they outlive the process. Every change is ordered so that a kill between
//! any two stores leaves nothing that attaching would take for a line that is not there: an entry becomes valid after its
//! checksum is written, and is made invalid before anything happens to its slot.

use larder_base::Words;
use larder_policy::block::{SlotBits, SlotPolicy};

use super::super::address::{Place, Placing, TAG_BITS};
use super::super::api::{GROUP_LINES, GroupId, LineId, SlotId, Sum};
use super::{BadEntry, Choice, Replacement, Rival, Slot};

const VALID: u32 = 1 << 31;
const HELD: u32 = 1 << 30;
const RANK_SHIFT: u32 = TAG_BITS;
const RANK_MASK: u32 = 0xf << RANK_SHIFT;
const TAG_MASK: u32 = (1 << TAG_BITS) - 1;
/// Most ways of a set: what a rank of four bits can order.
pub const MAX_WAYS: u32 = 16;

/// The map of one shard with sets.
#[derive(Debug)]
pub struct Sets {
    entries: Words,
    sums: Words,
    placing: Placing,
    shard: u32,
    group_sets: u32,
    ways: u32,
    replacement: Replacement,
    /// SIEVE and S3-FIFO: the policy, and what of its bits does not fit in a rank.
    policy: Option<(SlotPolicy, Extra)>,
}

/// Four bits more of each slot, beside the rank.
#[derive(Debug)]
struct Extra(Vec<u8>);

impl Extra {
    fn get(&self, slot: SlotId) -> u8 {
        self.0[slot.0 as usize / 2] >> (4 * (slot.0 % 2)) & 0xf
    }

    fn set(&mut self, slot: SlotId, bits: u8) {
        let (byte, shift) = (slot.0 as usize / 2, 4 * (slot.0 % 2));
        self.0[byte] = self.0[byte] & !(0xf << shift) | (bits & 0xf) << shift;
    }
}

/// The slots as [`SlotPolicy`] sees them: those of a set are neighbours.
struct Bits<'a> {
    entries: &'a mut Words,
    extra: &'a mut Extra,
    ways: u32,
}

impl Bits<'_> {
    fn slot(&self, number: u64) -> SlotId {
        let (set, way) = (number / u64::from(self.ways), (number % u64::from(self.ways)) as u32);
        let (group_set, index) = (set as u32 / GROUP_LINES, (set % u64::from(GROUP_LINES)) as u32);
        SlotId((group_set * self.ways + way) * GROUP_LINES + index)
    }
}

/// The number of `slot` for [`SlotPolicy`].
fn number(slot: SlotId, ways: u32) -> u64 {
    let (row, index) = (slot.0 / GROUP_LINES, slot.0 % GROUP_LINES);
    let set = u64::from(row / ways) * u64::from(GROUP_LINES) + u64::from(index);
    set * u64::from(ways) + u64::from(row % ways)
}

impl SlotBits for Bits<'_> {
    fn get(&self, number: u64) -> u8 {
        let slot = self.slot(number);
        let rank = (load_entry(self.entries, slot) & RANK_MASK) >> RANK_SHIFT;
        rank as u8 | self.extra.get(slot) << 4
    }

    fn set(&mut self, number: u64, bits: u8) {
        let slot = self.slot(number);
        let entry = load_entry(self.entries, slot);
        let new = entry & !RANK_MASK | u32::from(bits & 0xf) << RANK_SHIFT;
        if new != entry {
            store_entry(self.entries, slot, new);
        }
        self.extra.set(slot, bits >> 4);
    }
}

fn load_entry(entries: &Words, slot: SlotId) -> u32 {
    (entries.load(slot.0 as usize / 2) >> (32 * (slot.0 % 2))) as u32
}

fn store_entry(entries: &mut Words, slot: SlotId, entry: u32) {
    let (word, shift) = (slot.0 as usize / 2, 32 * (slot.0 % 2));
    let rest = entries.load(word) & !(u64::from(u32::MAX) << shift);
    entries.store(word, rest | u64::from(entry) << shift);
}

impl Sets {
    /// Slots of a shard of `group_sets` sets of `ways` ways.
    pub fn slots(group_sets: u32, ways: u32) -> u32 {
        group_sets * ways * GROUP_LINES
    }

    /// Words that the entries and the checksums of `slots` slots take.
    pub fn words(slots: u32) -> (usize, usize) {
        (slots.div_ceil(2) as usize, (slots as usize).div_ceil(8) * 3)
    }

    /// A map in `entries` and `sums`, which are zero or were one of the same shape: `group_sets` and ways.
    ///
    /// # Panics
    /// If the ways are not 1 to [`MAX_WAYS`].
    pub fn new(
        entries: Words,
        sums: Words,
        placing: Placing,
        shard: u32,
        (group_sets, ways): (u32, u32),
        replacement: Replacement,
    ) -> Sets {
        assert!((1..=MAX_WAYS).contains(&ways), "a set of {ways} ways");
        let slots = Self::slots(group_sets, ways);
        let policy = matches!(replacement, Replacement::Sieve | Replacement::S3fifo).then(|| {
            let policy = SlotPolicy::new(replacement, ways, u64::from(slots) / 8);
            (policy, Extra(vec![0; slots.div_ceil(2) as usize]))
        });
        Sets { entries, sums, placing, shard, group_sets, ways, replacement, policy }
    }

    /// Bytes of memory: 7 a slot, and with SIEVE half a byte more, with S3-FIFO three quarters.
    pub fn memory_bytes(&self) -> u64 {
        let (entries, sums) = Self::words(self.len());
        let policy =
            self.policy.as_ref().map_or(0, |(p, extra)| p.memory_bytes() + extra.0.capacity());
        ((entries + sums) * 8 + policy) as u64
    }

    /// The second array, and how many of its words are the map's.
    pub(super) fn rest(&self) -> &Words {
        &self.sums
    }

    pub(super) fn rest_mut(&mut self) -> &mut Words {
        &mut self.sums
    }

    pub(super) fn own_rest(&self) -> usize {
        Self::words(self.len()).1
    }

    /// A copy of the words as they are: entries and checksums.
    pub fn snapshot(&self) -> (Words, Words) {
        (self.entries.snapshot(), self.sums.snapshot())
    }

    /// Number of slots.
    pub(super) fn len(&self) -> u32 {
        Self::slots(self.group_sets, self.ways)
    }

    /// The number of the shard whose map it is.
    pub fn shard(&self) -> u32 {
        self.shard
    }

    /// How the line space is placed.
    pub fn placing(&self) -> &Placing {
        &self.placing
    }

    fn entry(&self, slot: SlotId) -> u32 {
        load_entry(&self.entries, slot)
    }

    fn set_entry(&mut self, slot: SlotId, entry: u32) {
        store_entry(&mut self.entries, slot, entry);
    }

    fn with_policy<R>(&mut self, f: impl FnOnce(&mut SlotPolicy, &mut Bits<'_>) -> R) -> Option<R> {
        let (policy, extra) = self.policy.as_mut()?;
        Some(f(policy, &mut Bits { entries: &mut self.entries, extra, ways: self.ways }))
    }

    /// The checksum of the line in `slot`.
    pub fn sum(&self, slot: SlotId) -> Sum {
        let (word, shift) = Self::sum_place(slot);
        let mut sum = self.sums.load(word) >> shift;
        if shift > 40 {
            sum |= self.sums.load(word + 1) << (64 - shift);
        }
        Sum(sum as u32 & Sum::MASK)
    }

    fn set_sum(&mut self, slot: SlotId, sum: Sum) {
        let (word, shift) = Self::sum_place(slot);
        let (mask, value) = (u128::from(Sum::MASK) << shift, u128::from(sum.0) << shift);
        let low = self.sums.load(word);
        self.sums.store(word, low & !(mask as u64) | value as u64);
        if shift > 40 {
            let high = self.sums.load(word + 1);
            self.sums.store(word + 1, high & !((mask >> 64) as u64) | (value >> 64) as u64);
        }
    }

    fn sum_place(slot: SlotId) -> (usize, u32) {
        let bit = u64::from(slot.0) * 24;
        ((bit / 64) as usize, (bit % 64) as u32)
    }

    fn slot_at(&self, group_set: u32, way: u32, index: u32) -> SlotId {
        SlotId((group_set * self.ways + way) * GROUP_LINES + index)
    }

    fn line_of(&self, slot: SlotId, entry: u32) -> LineId {
        let index = slot.0 % GROUP_LINES;
        let group_set = slot.0 / GROUP_LINES / self.ways;
        self.placing.line(self.shard, Place { group_set, tag: entry & TAG_MASK }, index)
    }

    /// What `slot` holds.
    pub fn get(&self, slot: SlotId) -> Slot {
        let entry = self.entry(slot);
        match (entry & VALID != 0, entry & HELD != 0) {
            (true, _) => Slot::Line(self.line_of(slot, entry)),
            (false, true) => Slot::Held,
            (false, false) => Slot::Free,
        }
    }

    /// The slot where `line` lies.
    pub fn find(&self, line: LineId) -> Option<SlotId> {
        let place = self.placing.place(line.group());
        (0..self.ways)
            .map(|way| self.slot_at(place.group_set, way, line.index()))
            .find(|&slot| self.entry(slot) & (VALID | TAG_MASK) == VALID | place.tag)
    }

    /// The slots where the lines of `group` lie.
    pub fn find_all(&self, group: GroupId) -> [Option<SlotId>; GROUP_LINES as usize] {
        let place = self.placing.place(group);
        let mut found = [None; GROUP_LINES as usize];
        for way in 0..self.ways {
            let first = self.slot_at(place.group_set, way, 0);
            // Sixteen entries that begin with a word.
            for pair in 0..GROUP_LINES / 2 {
                let word = self.entries.load((first.0 / 2 + pair) as usize);
                for (half, entry) in [word as u32, (word >> 32) as u32].into_iter().enumerate() {
                    if entry & (VALID | TAG_MASK) == VALID | place.tag {
                        let index = 2 * pair + half as u32;
                        found[index as usize] = Some(SlotId(first.0 + index));
                    }
                }
            }
        }
        found
    }

    fn ways_of(&self, slot: SlotId) -> impl Iterator<Item = SlotId> + use<> {
        let index = slot.0 % GROUP_LINES;
        let first = slot.0 / GROUP_LINES / self.ways * self.ways;
        (first..first + self.ways).map(move |way| SlotId(way * GROUP_LINES + index))
    }

    fn rank(&self, slot: SlotId) -> u32 {
        (self.entry(slot) & RANK_MASK) >> RANK_SHIFT
    }

    fn set_rank(&mut self, slot: SlotId, rank: u32) {
        let entry = self.entry(slot);
        if (entry & RANK_MASK) >> RANK_SHIFT != rank {
            self.set_entry(slot, entry & !RANK_MASK | rank << RANK_SHIFT);
        }
    }

    /// The line in `slot` was used.
    pub fn hit(&mut self, slot: SlotId) {
        match self.replacement {
            Replacement::Lru => self.bring_to_front(slot),
            Replacement::Clock => self.set_rank(slot, 3),
            Replacement::Fifo => {}
            Replacement::Sieve | Replacement::S3fifo => {
                let number = number(slot, self.ways);
                self.with_policy(|policy, bits| policy.hit(bits, number));
            }
        }
    }

    /// Rank 0 is the most recently used; the others move back one place.
    fn bring_to_front(&mut self, slot: SlotId) {
        if self.ways == 1 {
            return;
        }
        let old = self.rank(slot);
        for other in self.ways_of(slot) {
            let rank = self.rank(other);
            if other != slot && rank <= old && rank + 1 < MAX_WAYS {
                self.set_rank(other, rank + 1);
            }
        }
        self.set_rank(slot, 0);
    }

    /// A slot for `line`, which lies in none: a free one, else a held one, else the one whose line is to be evicted.
    /// `busy` tells slots that must not be touched. Nothing is changed but ranks.
    pub fn choose(&mut self, line: LineId, busy: impl Fn(SlotId, Slot) -> bool) -> Option<Choice> {
        let place = self.placing.place(line.group());
        let first = self.slot_at(place.group_set, 0, line.index());
        let of = |slot, now| Choice {
            slot,
            free: now == Slot::Free,
            rival: match now {
                Slot::Line(line) => Some(Rival { slot, line, goes: true }),
                Slot::Free | Slot::Held => None,
            },
        };
        if self.policy.is_some() {
            return self.choose_by_policy(first, busy).map(|slot| of(slot, self.get(slot)));
        }
        loop {
            let best = self
                .ways_of(first)
                .map(|slot| (slot, self.get(slot)))
                .filter(|&(slot, now)| !busy(slot, now))
                .max_by_key(|&(slot, now)| match now {
                    Slot::Free => 100,
                    Slot::Held => 50,
                    Slot::Line(_) if self.replacement == Replacement::Clock => {
                        3 - self.rank(slot).min(3)
                    }
                    Slot::Line(_) => self.rank(slot),
                })?;
            if self.replacement == Replacement::Clock
                && matches!(best.1, Slot::Line(_))
                && self.rank(best.0) > 0
            {
                // No way is at zero: all are counted down, those that are busy too.
                for slot in self.ways_of(first) {
                    self.set_rank(slot, self.rank(slot).saturating_sub(1));
                }
                continue;
            }
            return Some(of(best.0, best.1));
        }
    }

    /// Whether `line`, which lies in no slot, could have one in which nothing lies.
    pub(super) fn has_free(&self, line: LineId, busy: impl Fn(SlotId, Slot) -> bool) -> bool {
        let place = self.placing.place(line.group());
        let first = self.slot_at(place.group_set, 0, line.index());
        self.ways_of(first).any(|slot| match self.entry(slot) & (VALID | HELD) {
            0 => !busy(slot, Slot::Free),
            HELD => !busy(slot, Slot::Held),
            _ => false,
        })
    }

    fn choose_by_policy(
        &mut self,
        first: SlotId,
        busy: impl Fn(SlotId, Slot) -> bool,
    ) -> Option<SlotId> {
        let ways: Vec<(SlotId, Slot)> = self
            .ways_of(first)
            .map(|slot| (slot, self.get(slot)))
            .filter(|&(slot, now)| !busy(slot, now))
            .collect();
        if ways.is_empty() {
            return None;
        }
        for empty in [Slot::Free, Slot::Held] {
            if let Some((slot, _)) = ways.iter().find(|w| w.1 == empty) {
                return Some(*slot);
            }
        }
        let set = number(first, self.ways) / u64::from(self.ways);
        let count = self.ways;
        let victim = self.with_policy(|policy, bits| {
            policy.victim(bits, set, |n| ways.iter().any(|w| number(w.0, count) == n))
        })??;
        ways.iter().map(|w| w.0).find(|&slot| number(slot, count) == victim)
    }

    /// The line in `slot` makes room: like [`Sets::hold`], and the policy remembers it.
    pub fn evict(&mut self, slot: SlotId) {
        if self.policy.is_some()
            && let Slot::Line(line) = self.get(slot)
        {
            let (hash, number) = (self.placing.hash(line), number(slot, self.ways));
            self.with_policy(|policy, bits| policy.evict(bits, number, hash));
        }
        self.hold(slot);
    }

    /// Empties `slot`: from now on it is held.
    pub fn hold(&mut self, slot: SlotId) {
        let entry = self.entry(slot);
        self.set_entry(slot, entry & !VALID | HELD);
    }

    /// The durable map knows that `slot`, which is held, is empty.
    pub fn free(&mut self, slot: SlotId) {
        let entry = self.entry(slot);
        debug_assert_eq!(entry & (VALID | HELD), HELD, "slot {} is not held", slot.0);
        self.set_entry(slot, entry & !HELD);
    }

    /// The bytes of `line` are in `slot`, which is empty, and have checksum `sum`.
    pub fn publish(&mut self, slot: SlotId, line: LineId, sum: Sum) {
        debug_assert!(!matches!(self.get(slot), Slot::Line(_)), "slot {} is taken", slot.0);
        self.set_sum(slot, sum);
        let place = self.placing.place(line.group());
        debug_assert!(self.ways_of(slot).any(|s| s == slot));
        let before = self.entry(slot);
        // An update in place: the line was here all the time.
        let same = before & (HELD | TAG_MASK) == HELD | place.tag;
        self.set_entry(slot, VALID | before & RANK_MASK | place.tag);
        match self.replacement {
            Replacement::Lru | Replacement::Fifo => self.bring_to_front(slot),
            Replacement::Clock => self.set_rank(slot, 1),
            Replacement::Sieve | Replacement::S3fifo if same => {}
            Replacement::Sieve | Replacement::S3fifo => {
                let (hash, number) = (self.placing.hash(line), number(slot, self.ways));
                self.with_policy(|policy, bits| policy.insert(bits, number, hash));
            }
        }
    }

    /// Puts what was durable into `slot`: `line` with `sum`, or nothing; later states last. A line that cannot lie there
    /// (a damaged record) leaves the slot held, and so does one that is found elsewhere later: the durable map has it,
    /// this one does not.
    pub fn restore(&mut self, slot: SlotId, holds: Option<(LineId, Sum)>) {
        self.set_entry(slot, 0);
        let Some((line, sum)) = holds else { return };
        let group_set = slot.0 / GROUP_LINES / self.ways;
        let fits = line.0 < self.placing.lines()
            && self.placing.shard(line.group()) == self.shard
            && line.index() == slot.0 % GROUP_LINES
            && self.placing.place(line.group()).group_set == group_set;
        if fits {
            // The later record is right; what lay elsewhere has a record to come, or lost it.
            if let Some(older) = self.find(line) {
                self.hold(older);
            }
            self.set_sum(slot, sum);
            self.set_entry(slot, VALID | self.placing.place(line.group()).tag);
        } else {
            self.set_entry(slot, HELD);
        }
    }

    /// Whether every entry is one that this version writes.
    ///
    /// # Errors
    /// The first that is not.
    pub fn validate(&self) -> Result<(), BadEntry> {
        for slot in 0..self.len() {
            let entry = self.entry(SlotId(slot));
            let bad = entry & VALID != 0 && entry & HELD != 0;
            let foreign = entry & VALID != 0 && {
                let line = self.line_of(SlotId(slot), entry);
                line.0 >= self.placing.lines()
            };
            if bad || foreign {
                return Err(BadEntry { shard: self.shard, slot, entry: u64::from(entry) });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(group_sets: u32, ways: u32, replacement: Replacement) -> Sets {
        let (entries, sums) = Sets::words(Sets::slots(group_sets, ways));
        let placing = Placing::new(2, group_sets, 99);
        Sets::new(
            Words::heap(entries),
            Words::heap(sums),
            placing,
            1,
            (group_sets, ways),
            replacement,
        )
    }

    /// Lines that fall into the same set, in this shard.
    fn rivals(map: &Sets, count: usize) -> Vec<LineId> {
        let target = (0..)
            .map(super::super::super::api::GroupId)
            .find(|&g| map.placing.shard(g) == 1)
            .map(|g| map.placing.place(g).group_set)
            .unwrap();
        (0..map.placing.groups())
            .map(super::super::super::api::GroupId)
            .filter(|&g| map.placing.shard(g) == 1 && map.placing.place(g).group_set == target)
            .map(|g| g.line(5))
            .take(count)
            .collect()
    }

    #[test]
    fn what_is_published_is_found_with_its_sum() {
        let mut map = map(8, 4, Replacement::Lru);
        let lines = rivals(&map, 4);
        for (i, &line) in lines.iter().enumerate() {
            let choice = map.choose(line, |_, _| false).unwrap();
            assert!(choice.free);
            map.publish(choice.slot, line, Sum(0xabc000 + i as u32));
        }
        for (i, &line) in lines.iter().enumerate() {
            let slot = map.find(line).unwrap();
            assert_eq!(map.get(slot), Slot::Line(line));
            assert_eq!(map.sum(slot), Sum(0xabc000 + i as u32));
        }
        map.validate().unwrap();
    }

    #[test]
    fn lru_evicts_in_order_of_use() {
        let mut map = map(4, 4, Replacement::Lru);
        let lines = rivals(&map, 5);
        for &line in &lines[..4] {
            let slot = map.choose(line, |_, _| false).unwrap().slot;
            map.publish(slot, line, Sum(1));
        }
        map.hit(map.find(lines[0]).unwrap());
        let choice = map.choose(lines[4], |_, _| false).unwrap();
        assert_eq!(choice.rival.unwrap().line, lines[1]);
        let busy = choice.slot;
        let next = map.choose(lines[4], |slot, _| slot == busy).unwrap();
        assert_eq!(next.rival.unwrap().line, lines[2]);
        map.hold(busy);
        let held = map.choose(lines[4], |_, _| false).unwrap();
        assert!(!held.free && held.rival.is_none());
        map.free(busy);
        assert!(map.choose(lines[4], |_, _| false).unwrap().free);
        assert_eq!(map.find(lines[1]), None);
    }

    #[test]
    fn a_group_is_found_as_its_lines_are() {
        let mut map = map(4, 3, Replacement::Clock);
        let lines = rivals(&map, 5);
        let group = lines[0].group();
        for line in (0..GROUP_LINES).filter(|i| i % 3 != 1).map(|i| group.line(i)).chain(lines) {
            let choice = map.choose(line, |_, _| false).filter(|choice| choice.free);
            if let Some(choice) = choice.filter(|_| map.find(line).is_none()) {
                map.publish(choice.slot, line, Sum(1));
            }
        }
        for group in
            (0..map.placing.groups().min(400)).map(GroupId).filter(|&g| map.placing.shard(g) == 1)
        {
            let by_line: Vec<_> = (0..GROUP_LINES).map(|i| map.find(group.line(i))).collect();
            assert_eq!(map.find_all(group)[..], by_line[..]);
        }
        assert!(map.find_all(group).iter().flatten().count() >= 10);
    }

    #[test]
    fn sums_do_not_touch_their_neighbours() {
        let mut map = map(2, 1, Replacement::Clock);
        for slot in 0..map.len() {
            map.set_sum(SlotId(slot), Sum((slot * 0x01_0203) & Sum::MASK));
        }
        map.set_sum(SlotId(10), Sum(Sum::MASK));
        for slot in (0..map.len()).filter(|&s| s != 10) {
            assert_eq!(map.sum(SlotId(slot)), Sum((slot * 0x01_0203) & Sum::MASK));
        }
        assert_eq!(map.sum(SlotId(10)), Sum(Sum::MASK));
    }

    #[test]
    fn a_slot_costs_seven_bytes() {
        let (entries, sums) = Sets::words(1 << 20);
        assert_eq!((entries + sums) * 8, 7 << 20);
    }
}
