//! Each policy in a group against its queues as lists, and all of them over many groups against one queue.

use std::collections::BTreeMap;

use larder_base::Rng;
use proptest::prelude::*;

use super::*;
use crate::block::VolumeId;
use crate::block::access::mix;
use crate::eviction::{
    Access, Clock, Departures, Eviction, Fifo, Lru, S3Fifo, S3FifoRelease, Sieve, Slot,
};

/// One group as lists: keys, newest first.
#[derive(Debug, Default)]
struct Model {
    queue: Vec<u64>,
    visited: Vec<u64>,
    /// SIEVE's hand: the key it is at.
    hand: Option<u64>,
    main: Vec<u64>,
    counts: BTreeMap<u64, u8>,
}

impl Model {
    fn hit(&mut self, kind: Replacement, key: u64) {
        match kind {
            Replacement::Lru => {
                self.queue.retain(|&k| k != key);
                self.queue.insert(0, key);
            }
            Replacement::Sieve => {
                if !self.visited.contains(&key) {
                    self.visited.push(key);
                }
            }
            Replacement::S3fifo => {
                let count = self.counts.entry(key).or_insert(0);
                *count = (*count + 1).min(3);
            }
            Replacement::Fifo => {}
            Replacement::Clock => unreachable!("has no model of its own"),
        }
    }

    fn insert(&mut self, key: u64) {
        self.queue.insert(0, key);
        self.counts.insert(key, 0);
    }

    fn remove(&mut self, key: u64) {
        if self.hand == Some(key) {
            let at = self.queue.iter().position(|&k| k == key).unwrap();
            self.hand = (at > 0).then(|| self.queue[at - 1]);
        }
        self.queue.retain(|&k| k != key);
        self.main.retain(|&k| k != key);
        self.visited.retain(|&k| k != key);
    }

    fn victim(&mut self, kind: Replacement, ways: usize) -> u64 {
        match kind {
            Replacement::Lru | Replacement::Fifo => *self.queue.last().unwrap(),
            Replacement::Sieve => {
                let mut at = match self.hand {
                    Some(key) => self.queue.iter().position(|&k| k == key).unwrap(),
                    None => self.queue.len() - 1,
                };
                loop {
                    let key = self.queue[at];
                    if !self.visited.contains(&key) {
                        self.hand = Some(key);
                        return key;
                    }
                    self.visited.retain(|&k| k != key);
                    at = if at == 0 { self.queue.len() - 1 } else { at - 1 };
                }
            }
            Replacement::S3fifo => loop {
                if self.queue.is_empty() || self.main.len() > ways - (ways / 10).max(1) {
                    let key = *self.main.last().unwrap();
                    let count = self.counts.get_mut(&key).unwrap();
                    if *count == 0 {
                        return key;
                    }
                    *count -= 1;
                    self.main.pop();
                    self.main.insert(0, key);
                } else {
                    let key = *self.queue.last().unwrap();
                    if self.counts[&key] < 2 {
                        return key;
                    }
                    self.counts.insert(key, 0);
                    self.queue.pop();
                    self.main.insert(0, key);
                }
            },
            Replacement::Clock => unreachable!("has no model of its own"),
        }
    }
}

fn agrees(kind: Replacement, ways: u32, seed: u64, steps: u32) {
    let mut policy = SlotPolicy::new(kind, ways, 0);
    let mut bits = vec![0u8; ways as usize * 3];
    // The group in the middle, to see that the others are left alone.
    let (group, first) = (1u64, u64::from(ways));
    let mut keys: Vec<Option<u64>> = vec![None; ways as usize];
    let mut model = Model::default();
    let mut rng = Rng::new(seed);
    for step in 0..steps {
        let key = rng.below(u64::from(ways) * 2);
        if let Some(way) = keys.iter().position(|&k| k == Some(key)) {
            if rng.chance(0.03) {
                policy.remove(&mut bits, first + way as u64);
                model.remove(key);
                keys[way] = None;
            } else {
                policy.hit(&mut bits, first + way as u64);
                model.hit(kind, key);
            }
        } else {
            let way = keys.iter().position(Option::is_none).unwrap_or_else(|| {
                let slot = policy.victim(&mut bits, group, |_| true).unwrap();
                let way = (slot - first) as usize;
                let wanted = model.victim(kind, ways as usize);
                assert_eq!(keys[way], Some(wanted), "{kind} of {ways}, step {step}");
                policy.evict(&mut bits, slot, wanted);
                model.remove(wanted);
                way
            });
            policy.insert(&mut bits, first + way as u64, key);
            model.insert(key);
            keys[way] = Some(key);
        }
        assert!(bits[..ways as usize].iter().all(|&b| b == 0));
        assert!(bits[2 * ways as usize..].iter().all(|&b| b == 0));
        assert!(bits.iter().all(|&b| u32::from(b) < 1 << policy.bits()), "more bits than stated");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn lists_agree(ways in 1u32..=32, seed in any::<u64>()) {
        for kind in [Replacement::Lru, Replacement::Sieve, Replacement::S3fifo, Replacement::Fifo] {
            agrees(kind, ways, seed, 600);
        }
    }

    #[test]
    fn any_bits_give_a_victim_that_may_go(
        seed in any::<u64>(),
        ways in 1u32..=32,
        mask in any::<u32>(),
    ) {
        for kind in Replacement::ALL {
            let mut policy = SlotPolicy::new(kind, ways, 64);
            let mut rng = Rng::new(seed);
            let mut bits = vec![0u8; ways as usize];
            rng.fill(&mut bits);
            let may = |slot: u64| mask >> slot & 1 == 1;
            for round in 0..20u64 {
                let found = policy.victim(&mut bits, 0, may);
                prop_assert_eq!(found.is_some(), (0..u64::from(ways)).any(may), "{} {}", kind, round);
                if let Some(slot) = found {
                    prop_assert!(may(slot));
                    // Asked again without a change it says the same: admission may have refused.
                    if kind != Replacement::Clock {
                        prop_assert_eq!(policy.victim(&mut bits, 0, may), Some(slot));
                    }
                    policy.evict(&mut bits, slot, round);
                    policy.insert(&mut bits, slot, round + 100);
                }
            }
        }
    }
}

#[test]
fn clock_takes_the_unread_first_and_counts_down() {
    let mut policy = SlotPolicy::new(Replacement::Clock, 8, 0);
    let mut bits = vec![0u8; 8];
    for slot in 0..8u64 {
        policy.insert(&mut bits, slot, slot);
        for _ in 0..slot % 4 {
            policy.hit(&mut bits, slot);
        }
    }
    let first = policy.victim(&mut bits, 0, |_| true).unwrap();
    assert!(first.is_multiple_of(4), "slot {first} was never read");
    // Never read again, the rest goes within three turns, the least read first on the whole.
    let mut order = Vec::new();
    let mut gone = [false; 8];
    for _ in 0..8 {
        let slot = policy.victim(&mut bits, 0, |s| !gone[s as usize]).unwrap();
        gone[slot as usize] = true;
        order.push(slot % 4);
    }
    assert!(order[..2].iter().all(|&reads| reads == 0), "{order:?}");
    assert!(order[6..].iter().all(|&reads| reads >= 2), "{order:?}");
}

#[test]
fn bits_are_as_documented() {
    let table =
        [(32, [5, 2, 7, 8, 5]), (16, [4, 2, 6, 7, 4]), (8, [3, 2, 5, 6, 3]), (1, [0, 2, 2, 3, 0])];
    for (ways, wanted) in table {
        assert_eq!(Replacement::ALL.map(|kind| kind.bits(ways)), wanted, "{ways} ways");
    }
    for kind in Replacement::ALL {
        assert_eq!(kind.to_string().parse(), Ok(kind));
    }
    assert!("mru".parse::<Replacement>().unwrap_err().contains("'mru'"));
}

/// Hits of a fully associative cache of `slots` slots in groups of 32, over `keys`.
fn grouped_hits(kind: Replacement, slots: u64, keys: &[u64]) -> u64 {
    let mut policy = SlotPolicy::new(kind, 32, slots * 9 / 10);
    let mut bits = vec![0u8; slots as usize];
    let mut held: Vec<Option<u64>> = vec![None; slots as usize];
    let mut at: BTreeMap<u64, u64> = BTreeMap::new();
    let mut free = (0..slots).rev().collect::<Vec<_>>();
    let mut hits = 0;
    for &key in keys {
        let hash = mix(1, VolumeId(0), key);
        if let Some(&slot) = at.get(&key) {
            policy.hit(&mut bits, slot);
            hits += 1;
            continue;
        }
        let slot = free.pop().unwrap_or_else(|| {
            let group = policy.next_group(slots / 32);
            let slot = policy.victim(&mut bits, group, |_| true).unwrap();
            let old = held[slot as usize].unwrap();
            policy.evict(&mut bits, slot, mix(1, VolumeId(0), old));
            at.remove(&old);
            slot
        });
        policy.insert(&mut bits, slot, hash);
        held[slot as usize] = Some(key);
        at.insert(key, slot);
    }
    hits
}

fn exact_hits(mut policy: impl Eviction, keys: &[u64]) -> u64 {
    let mut slots: BTreeMap<u64, Slot> = BTreeMap::new();
    let mut gone = Departures::new();
    let mut hits = 0;
    for &key in keys {
        let access = Access { tag: key as u32, size: 1, fingerprint: key, next: 0 };
        let outcome =
            policy.request(&access, slots.get(&key).copied().unwrap_or(Slot::NONE), &mut gone);
        hits += u64::from(outcome.hit);
        slots.insert(key, outcome.slot);
        for departure in gone.drain() {
            if departure.fate != crate::eviction::Fate::Ghost {
                slots.remove(&u64::from(departure.tag));
            }
        }
    }
    hits
}

#[test]
fn groups_do_nearly_as_well_as_one_queue() {
    let mut rng = Rng::new(77);
    // Zipf 0.9 over 20,000 lines by inversion, with a scan of 3,000 lines once in a while.
    let mut sums = vec![0.0f64];
    for i in 1..=20_000u32 {
        sums.push(sums[i as usize - 1] + f64::from(i).powf(-0.9));
    }
    let total = sums[20_000];
    let mut keys = Vec::new();
    for round in 0..10u64 {
        for _ in 0..12_000 {
            let x = rng.unit() * total;
            keys.push(sums.partition_point(|&s| s <= x) as u64);
        }
        keys.extend((0..3_000).map(|i| 100_000 + round * 3_000 + i));
    }
    let slots = 2048;
    for kind in Replacement::ALL {
        let exact = match kind {
            Replacement::Lru => exact_hits(Lru::new(slots), &keys),
            Replacement::Clock => exact_hits(Clock::new(slots, 2), &keys),
            Replacement::Sieve => exact_hits(Sieve::new(slots), &keys),
            Replacement::S3fifo => exact_hits(S3Fifo::new(slots, S3FifoRelease::R2025), &keys),
            Replacement::Fifo => exact_hits(Fifo::new(slots), &keys),
        };
        let grouped = grouped_hits(kind, slots, &keys);
        let (e, g) = (exact as f64 / keys.len() as f64, grouped as f64 / keys.len() as f64);
        println!("{kind}: {:.2} % in one queue, {:.2} % in groups of 32", 100.0 * e, 100.0 * g);
        assert!(g > e - 0.015, "{kind}: {g} in groups, {e} in one queue");
    }
}
