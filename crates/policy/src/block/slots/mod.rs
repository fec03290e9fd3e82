//! Replacement among the slots of a block cache's map, in a few bits for each.
//!
//! The map has billions of slots, so no policy can afford linked lists. Slots are divided into *groups* of at most 32
//! neighbours, and inside a group each policy makes exactly the decisions of its queues; a queue's order is a permutation of
//! the group, one rank a slot. With set-associative placement a group is a set. With fully associative placement a line may lie anywhere: a
//! hand goes over the groups and each gives its turn's victim ([`SlotPolicy::next_group`]), which differs little from one
//! queue over all slots (measured in `docs/block-admission.md`).
//!
//! ```text
//!          bits of a slot     in a group of        32  16   8   1
//! lru      rank                                      5   4   3   0
//! fifo     rank                                      5   4   3   0
//! clock    count:2                                   2   2   2   2
//! sieve    rank, visited:1, hand:1                   7   6   5   2
//! s3fifo   rank, main:1, count:2                     8   7   6   3
//! ```
//!
//! A rank is at the low end, 0 for the newest. Free slots have the highest ranks after [`SlotPolicy::remove`]. Bits that cannot be
//! (a map restored from damaged memory) are put in order where they are met; nothing but the choice of a victim depends on them.

mod ghosts;
mod group;

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use self::ghosts::Ghosts;
use self::group::Order;

/// Slots of the largest group.
pub const MOST_WAYS: u32 = 32;

/// The policy's bits of each slot, wherever the map keeps them.
pub trait SlotBits {
    /// The bits of a slot. Bits above [`SlotPolicy::bits`] are ignored.
    fn get(&self, slot: u64) -> u8;
    /// Replaces them; no bit above [`SlotPolicy::bits`] is set.
    fn set(&mut self, slot: u64, bits: u8);
}

impl SlotBits for [u8] {
    fn get(&self, slot: u64) -> u8 {
        self[slot as usize]
    }

    fn set(&mut self, slot: u64, bits: u8) {
        self[slot as usize] = bits;
    }
}

impl SlotBits for Vec<u8> {
    fn get(&self, slot: u64) -> u8 {
        self[slot as usize]
    }

    fn set(&mut self, slot: u64, bits: u8) {
        self[slot as usize] = bits;
    }
}

/// The replacement policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Replacement {
    /// Least recently used first: Azor's choice.
    #[default]
    Lru,
    /// CLOCK with counts of two bits.
    Clock,
    /// SIEVE (Zhang et al., NSDI '24).
    Sieve,
    /// S3-FIFO (Yang et al., SOSP '23).
    S3fifo,
    /// First in, first out: hits change nothing.
    Fifo,
}

impl Replacement {
    /// Every policy.
    pub const ALL: [Replacement; 5] = [
        Replacement::Lru,
        Replacement::Clock,
        Replacement::Sieve,
        Replacement::S3fifo,
        Replacement::Fifo,
    ];

    /// The name as users write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Replacement::Lru => "lru",
            Replacement::Clock => "clock",
            Replacement::Sieve => "sieve",
            Replacement::S3fifo => "s3fifo",
            Replacement::Fifo => "fifo",
        }
    }

    /// Bits that a slot needs in groups of `ways`.
    pub fn bits(self, ways: u32) -> u32 {
        let rank = rank_bits(ways);
        match self {
            Replacement::Lru | Replacement::Fifo => rank,
            Replacement::Clock => 2,
            Replacement::Sieve => rank + 2,
            Replacement::S3fifo => rank + 3,
        }
    }
}

impl fmt::Display for Replacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Replacement {
    type Err = String;

    fn from_str(text: &str) -> Result<Replacement, String> {
        Replacement::ALL.into_iter().find(|p| p.as_str() == text).ok_or_else(|| {
            let names = Replacement::ALL.map(Replacement::as_str).join(", ");
            format!("there is no replacement policy '{text}': choose one of {names}")
        })
    }
}

fn rank_bits(ways: u32) -> u32 {
    ways.max(1).next_power_of_two().ilog2()
}

/// A replacement policy over groups of slots. See the [module](self).
///
/// The order of calls: a lookup that hits calls [`hit`](Self::hit). One that misses takes a free slot of the group, or asks
/// for a [`victim`](Self::victim) and [`evict`](Self::evict)s it; then [`insert`](Self::insert)s the new line there. Between victim and evict the caller
/// may change its mind (admission).
#[derive(Debug)]
pub struct SlotPolicy {
    kind: Replacement,
    ways: u32,
    rank_bits: u32,
    ghosts: Ghosts,
    /// Where CLOCK begins to look, and which group's turn it is.
    turn: u64,
    group: u64,
}

/// Most of a count.
const COUNT_TOP: u8 = 3;
/// Uses in S3-FIFO's small queue that promote.
const PROMOTE: u8 = 2;

impl SlotPolicy {
    /// A policy over groups of `ways` slots, 1 to [`MOST_WAYS`]. S3-FIFO remembers `ghosts` evicted lines, 2 bytes each; 0
    /// is possible and makes it a filter without memory.
    pub fn new(kind: Replacement, ways: u32, ghosts: u64) -> SlotPolicy {
        let ways = ways.clamp(1, MOST_WAYS);
        let ghosts = Ghosts::new(if kind == Replacement::S3fifo { ghosts } else { 0 });
        SlotPolicy { kind, ways, rank_bits: rank_bits(ways), ghosts, turn: 0, group: 0 }
    }

    /// Which policy.
    pub fn kind(&self) -> Replacement {
        self.kind
    }

    /// Bits that it needs of each slot.
    pub fn bits(&self) -> u32 {
        self.kind.bits(self.ways)
    }

    /// Bytes of memory beside the slots' bits.
    pub fn memory_bytes(&self) -> usize {
        self.ghosts.memory_bytes()
    }

    fn group_of(&self, slot: u64) -> u64 {
        slot / u64::from(self.ways)
    }

    fn flag(&self, place: u32) -> u8 {
        1u8 << (self.rank_bits + place)
    }

    fn count(&self, bits: u8) -> u8 {
        let shift = if self.kind == Replacement::S3fifo { self.rank_bits + 1 } else { 0 };
        bits >> shift & COUNT_TOP
    }

    fn with_count(&self, bits: u8, count: u8) -> u8 {
        let shift = if self.kind == Replacement::S3fifo { self.rank_bits + 1 } else { 0 };
        bits & !(COUNT_TOP << shift) | count << shift
    }

    /// A line was found in `slot`.
    pub fn hit<B: SlotBits + ?Sized>(&self, bits: &mut B, slot: u64) {
        match self.kind {
            Replacement::Lru => {
                if self.ways > 1 && bits.get(slot) & Order::mask(self.rank_bits) != 0 {
                    self.order(bits, slot, |order, way| order.make_newest(way));
                }
            }
            Replacement::Clock | Replacement::S3fifo => {
                let old = bits.get(slot);
                let new = self.with_count(old, (self.count(old) + 1).min(COUNT_TOP));
                if new != old {
                    bits.set(slot, new);
                }
            }
            Replacement::Sieve => {
                let old = bits.get(slot);
                if old & self.flag(0) == 0 {
                    bits.set(slot, old | self.flag(0));
                }
            }
            Replacement::Fifo => {}
        }
    }

    /// A line with this hash was put into `slot`, which was free.
    pub fn insert<B: SlotBits + ?Sized>(&mut self, bits: &mut B, slot: u64, hash: u64) {
        match self.kind {
            Replacement::Lru | Replacement::Fifo => {}
            // CLOCK gives a new line one turn, as it does a line that was read once.
            Replacement::Clock => return bits.set(slot, 0),
            Replacement::Sieve => {
                let hand = bits.get(slot) & self.flag(1);
                bits.set(slot, bits.get(slot) & Order::mask(self.rank_bits) | hand);
            }
            Replacement::S3fifo => {
                let main = if self.ghosts.take(hash) { self.flag(0) } else { 0 };
                bits.set(slot, bits.get(slot) & Order::mask(self.rank_bits) | main);
            }
        }
        self.order(bits, slot, |order, way| order.make_newest(way));
    }

    /// The line in `slot` went away for another reason than room: a trim, an error, a change of the backing store.
    pub fn remove<B: SlotBits + ?Sized>(&self, bits: &mut B, slot: u64) {
        if self.kind == Replacement::Clock {
            return bits.set(slot, 0);
        }
        if self.kind == Replacement::Sieve && bits.get(slot) & self.flag(1) != 0 {
            self.move_hand(bits, slot, true);
        }
        bits.set(slot, bits.get(slot) & Order::mask(self.rank_bits));
        self.order(bits, slot, |order, way| order.make_oldest(way));
    }

    /// The line in `slot`, with this hash, makes room: it was the [`victim`](Self::victim). The slot is free then.
    pub fn evict<B: SlotBits + ?Sized>(&mut self, bits: &mut B, slot: u64, hash: u64) {
        if self.kind == Replacement::S3fifo && bits.get(slot) & self.flag(0) == 0 {
            self.ghosts.remember(hash);
        }
        self.remove(bits, slot);
    }

    /// The slot of `group` whose line should go, among those that `may` go (occupied, not pinned, not in use); `None` if
    /// none may.
    pub fn victim<B: SlotBits + ?Sized>(
        &mut self,
        bits: &mut B,
        group: u64,
        may: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        let first = group * u64::from(self.ways);
        match self.kind {
            Replacement::Lru | Replacement::Fifo => {
                let order = self.load(bits, first);
                order.oldest_first().map(|way| first + u64::from(way)).find(|&slot| may(slot))
            }
            Replacement::Clock => self.clock_victim(bits, first, may),
            Replacement::Sieve => self.sieve_victim(bits, first, may),
            Replacement::S3fifo => self.s3fifo_victim(bits, first, may),
        }
    }

    /// With fully associative placement: the group, of `groups`, from which the next victim comes.
    pub fn next_group(&mut self, groups: u64) -> u64 {
        self.group = if self.group + 1 < groups { self.group + 1 } else { 0 };
        self.group
    }

    /// How hot a line is among those of its group, for choosing which survive a cleaned segment: 0 for the coldest.
    pub fn hotness<B: SlotBits + ?Sized>(&self, bits: &B, slot: u64) -> u8 {
        let now = bits.get(slot);
        let mask = Order::mask(self.rank_bits);
        match self.kind {
            Replacement::Lru | Replacement::Fifo => {
                (self.ways - 1) as u8 - (now & mask).min((self.ways - 1) as u8)
            }
            Replacement::Clock => self.count(now),
            Replacement::Sieve => u8::from(now & self.flag(0) != 0),
            Replacement::S3fifo => self.count(now) + 4 * u8::from(now & self.flag(0) != 0),
        }
    }

    fn clock_victim<B: SlotBits + ?Sized>(
        &mut self,
        bits: &mut B,
        first: u64,
        may: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        // The hand's turns in one step: what the least count is taken from all that it passes in whole turns.
        let ways = u64::from(self.ways);
        self.turn = self.turn.wrapping_add(1);
        let start = self.turn % ways;
        let slots = || (0..ways).map(|i| first + (start + i) % ways).filter(|&slot| may(slot));
        let least = slots().map(|slot| self.count(bits.get(slot))).min()?;
        let victim = slots().find(|&slot| self.count(bits.get(slot)) == least)?;
        let mut before = true;
        for slot in slots() {
            before &= slot != victim;
            let old = bits.get(slot);
            let less = self.count(old).saturating_sub(least + u8::from(before));
            let new = self.with_count(old, less);
            if new != old {
                bits.set(slot, new);
            }
        }
        Some(victim)
    }

    fn sieve_victim<B: SlotBits + ?Sized>(
        &mut self,
        bits: &mut B,
        first: u64,
        may: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        let order = self.load(bits, first);
        let (visited, hand) = (self.flag(0), self.flag(1));
        let slots = || (0..u64::from(self.ways)).map(|i| first + i);
        let at = slots().find(|&slot| bits.get(slot) & hand != 0);
        let oldest = self.ways - 1;
        let mut rank = at.map_or(oldest, |slot| order.rank((slot - first) as u32));
        let mut found = None;
        // Twice around: once to clear what was visited, once to find it cleared.
        for _ in 0..2 * self.ways {
            let slot = first + u64::from(order.at(rank));
            if may(slot) {
                let old = bits.get(slot);
                if old & visited == 0 {
                    found = Some(slot);
                    break;
                }
                bits.set(slot, old & !visited);
            }
            rank = if rank == 0 { oldest } else { rank - 1 };
        }
        // The hand stays at the victim until it is evicted: admission may yet refuse what would take its place.
        for slot in slots() {
            let old = bits.get(slot);
            let new = if found == Some(slot) { old | hand } else { old & !hand };
            if new != old {
                bits.set(slot, new);
            }
        }
        found
    }

    /// SIEVE's hand leaves `slot` for the next newer one, or for nowhere (the oldest, then) if there is none.
    fn move_hand<B: SlotBits + ?Sized>(&self, bits: &mut B, slot: u64, newer: bool) {
        let hand = self.flag(1);
        bits.set(slot, bits.get(slot) & !hand);
        let first = self.group_of(slot) * u64::from(self.ways);
        let order = self.load(bits, first);
        let rank = order.rank((slot - first) as u32);
        if newer && rank > 0 {
            let next = first + u64::from(order.at(rank - 1));
            bits.set(next, bits.get(next) | hand);
        }
    }

    fn s3fifo_victim<B: SlotBits + ?Sized>(
        &mut self,
        bits: &mut B,
        first: u64,
        may: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        let main = self.flag(0);
        let small_capacity = (self.ways / 10).max(1);
        let slots = || (0..u64::from(self.ways)).map(|i| first + i).filter(|&slot| may(slot));
        let mut small = slots().filter(|&slot| bits.get(slot) & main == 0).count() as u32;
        let eligible = slots().count() as u32;
        let mut order = self.load(bits, first);
        // Each step promotes (at most once a slot), lowers a count (at most three times a slot) or ends.
        for _ in 0..5 * self.ways {
            let in_main = eligible - small;
            let from_main = small == 0 || in_main > self.ways - small_capacity;
            let of_queue = |slot: u64| (bits.get(slot) & main != 0) == from_main;
            let oldest = order.oldest_first().map(|way| first + u64::from(way));
            let slot = oldest.into_iter().find(|&slot| may(slot) && of_queue(slot))?;
            let old = bits.get(slot);
            let count = self.count(old);
            if from_main && count > 0 {
                bits.set(slot, self.with_count(old, count - 1));
            } else if !from_main && count >= PROMOTE {
                bits.set(slot, self.with_count(old, 0) | main);
                small -= 1;
            } else {
                return Some(slot);
            }
            order.make_newest((slot - first) as u32);
            self.store(bits, first, &order);
        }
        None
    }

    fn order<B: SlotBits + ?Sized>(
        &self,
        bits: &mut B,
        slot: u64,
        change: impl FnOnce(&mut Order, u32),
    ) {
        let first = self.group_of(slot) * u64::from(self.ways);
        let mut order = self.load(bits, first);
        change(&mut order, (slot - first) as u32);
        self.store(bits, first, &order);
    }

    fn load<B: SlotBits + ?Sized>(&self, bits: &B, first: u64) -> Order {
        let mask = Order::mask(self.rank_bits);
        Order::new(self.ways, |way| bits.get(first + u64::from(way)) & mask)
    }

    fn store<B: SlotBits + ?Sized>(&self, bits: &mut B, first: u64, order: &Order) {
        let mask = Order::mask(self.rank_bits);
        for way in 0..self.ways {
            let slot = first + u64::from(way);
            let old = bits.get(slot);
            let new = old & !mask | order.rank(way) as u8;
            if new != old {
                bits.set(slot, new);
            }
        }
    }
}

#[cfg(test)]
mod tests;
