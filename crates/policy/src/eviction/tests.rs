//! Every policy against its naive model: hits and victims, request by request.

use larder_base::Rng;
use proptest::prelude::*;

use super::naive::{self, Naive, Rank};
use super::*;

/// A request, or a delete where `size` is 0.
type Step = (u32, u32);

/// A driver with a map from tags to slots.
struct Driver {
    policy: AnyPolicy,
    slots: Vec<Slot>,
    gone: Departures,
}

impl Driver {
    fn new(kind: EvictionKind, capacity: u64, unit: Unit) -> Driver {
        let gone = Departures::new();
        Driver { policy: kind.build(capacity, unit), slots: vec![Slot::NONE; 256], gone }
    }

    fn request(&mut self, tag: u32, size: u32, next: u64, victims: &mut Vec<u32>) -> bool {
        let access = Access { tag, size, fingerprint: u64::from(tag), next };
        let slot = self.slots[tag as usize];
        let outcome = self.policy.request(&access, slot, &mut self.gone);
        for departure in self.gone.drain() {
            if departure.fate != Fate::Ghost {
                self.slots[departure.tag as usize] = Slot::NONE;
            }
            if departure.fate != Fate::Forgotten {
                victims.push(departure.tag);
            }
        }
        self.slots[tag as usize] = outcome.slot;
        outcome.hit
    }

    fn remove(&mut self, tag: u32) {
        let slot = std::mem::replace(&mut self.slots[tag as usize], Slot::NONE);
        if !slot.is_none() {
            self.policy.remove(slot);
        }
    }
}

fn compare(kind: EvictionKind, capacity: u64, steps: &[Step], model: &mut dyn Naive) {
    let mut driver = Driver::new(kind, capacity, Unit::Bytes);
    let (mut victims, mut expected) = (Vec::new(), Vec::new());
    for (at, &(tag, size)) in steps.iter().enumerate() {
        if size == 0 {
            driver.remove(tag);
            model.remove(tag);
            continue;
        }
        victims.clear();
        expected.clear();
        let hit = driver.request(tag, size, Access::NEVER, &mut victims);
        let expected_hit = model.request(tag, u64::from(size), &mut expected);
        assert_eq!(hit, expected_hit, "{kind} at step {at}: hit");
        assert_eq!(victims, expected, "{kind} at step {at}: victims");
        assert!(driver.policy.used() <= capacity, "{kind} holds more than its capacity");
    }
}

/// Skewed requests; sizes follow from the tag, or are 1.
fn steps(seed: u64, len: usize, tags: u64, sized: bool) -> Vec<Step> {
    let mut rng = Rng::new(seed);
    (0..len)
        .map(|_| {
            let tag = rng.below(tags).min(rng.below(tags)).min(rng.below(tags) + tags / 3) as u32;
            if rng.chance(0.02) {
                return (tag, 0);
            }
            (tag, if sized { 1 + tag * 7 % 13 } else { 1 })
        })
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 48,
        rng_seed: proptest::test_runner::RngSeed::Fixed(7),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn victims_are_those_of_the_models(
        seed in any::<u64>(),
        capacity in 1u64..60,
        tags in 4u64..120,
        sized in any::<bool>(),
    ) {
        let steps = steps(seed, 600, tags, sized);
        let c = capacity;
        compare(EvictionKind::Lru, c, &steps, &mut naive::OneQueue::new(c, true, 0));
        compare(EvictionKind::Fifo, c, &steps, &mut naive::OneQueue::new(c, false, 0));
        for bits in 1..=3 {
            let mut model = naive::OneQueue::new(c, false, (1 << bits) - 1);
            compare(EvictionKind::Clock(bits), c, &steps, &mut model);
        }
        compare(EvictionKind::Sieve, c, &steps, &mut naive::Sieve::new(c));
        compare(EvictionKind::Lfu, c, &steps, &mut naive::Ranked::new(c, Rank::Lfu));
        compare(EvictionKind::Gdsf, c, &steps, &mut naive::Ranked::new(c, Rank::Gdsf));
        compare(EvictionKind::S3Fifo(S3FifoRelease::R2024), c, &steps, &mut naive::S3Fifo::new(c));
        compare(EvictionKind::Slru, c, &steps, &mut naive::Slru::new(c));
        compare(EvictionKind::TwoQ, c, &steps, &mut naive::TwoQ::new(c));
        if !sized {
            compare(EvictionKind::Arc, c, &steps, &mut naive::Arc::new(c as usize));
        }
    }

    #[test]
    fn w_tinylfu_is_its_model(seed in any::<u64>(), capacity in 8usize..400) {
        let mut driver = Driver::new(EvictionKind::WTinyLfu, capacity as u64, Unit::Objects);
        let mut model = naive::WTinyLfu::new(capacity);
        let (mut victims, mut expected) = (Vec::new(), Vec::new());
        for (tag, size) in steps(seed, 1_500, 250, false) {
            if size == 0 {
                driver.remove(tag);
                model.remove(tag);
                continue;
            }
            let hit = driver.request(tag, 1, Access::NEVER, &mut victims);
            prop_assert_eq!(hit, model.request(tag, 1, &mut expected));
            prop_assert_eq!(&victims, &expected);
        }
    }

    #[test]
    fn belady_hits_what_it_should(seed in any::<u64>(), capacity in 1usize..40) {
        let trace: Vec<u32> = steps(seed, 500, 80, false).iter().map(|s| s.0).collect();
        let expected = naive::belady_hits(&trace, capacity);
        let mut driver = Driver::new(EvictionKind::Belady, capacity as u64, Unit::Objects);
        for (at, &tag) in trace.iter().enumerate() {
            let ahead = trace[at + 1..].iter().position(|&t| t == tag);
            let next = ahead.map_or(Access::NEVER, |n| (at + 1 + n) as u64);
            prop_assert_eq!(driver.request(tag, 1, next, &mut Vec::new()), expected[at]);
        }
    }

    /// Whatever the requests: a hit is what was taken in and has not left, and capacity holds.
    #[test]
    fn departures_account_for_everything(
        seed in any::<u64>(),
        capacity in 1u64..80,
        sized in any::<bool>(),
    ) {
        for kind in EvictionKind::ALL {
            let mut driver = Driver::new(kind, capacity, Unit::Bytes);
            let mut resident = std::collections::BTreeSet::new();
            let mut victims = Vec::new();
            for (tag, size) in steps(seed, 800, 100, sized) {
                if size == 0 {
                    driver.remove(tag);
                    resident.remove(&tag);
                    continue;
                }
                victims.clear();
                let hit = driver.request(tag, size, Access::NEVER, &mut victims);
                prop_assert_eq!(hit, resident.contains(&tag), "{}", kind);
                for victim in &victims {
                    prop_assert!(resident.remove(victim), "{} evicted a stranger", kind);
                }
                if !hit && !driver.slots[tag as usize].is_none() {
                    resident.insert(tag);
                }
                prop_assert!(driver.policy.used() <= capacity, "{}", kind);
            }
            let sum: u64 = resident.iter().map(|t| if sized { 1 + u64::from(t * 7 % 13) } else { 1 }).sum();
            prop_assert_eq!(driver.policy.used(), sum, "{}", kind);
        }
    }
}
