//! The log of segments on its own: every I/O ends at once, and the durable map is never behind.

use std::collections::BTreeMap;

use larder_base::{Rng, Words};
use larder_policy::block::{EvictionBy, Replacement, VictimPolicy};

use super::super::address::Placing;
use super::super::api::{LineId, SlotId, Sum};
use super::{Clean, Making, Map, Shape, Slot, Want};

const SHAPE: Shape = Shape::Full { segments: 24, lines: 16 };

fn every_making() -> impl Iterator<Item = Making> {
    let evicts = [EvictionBy::Cache, EvictionBy::Gc { keep: 0.0 }, EvictionBy::Gc { keep: 0.3 }];
    Replacement::ALL.into_iter().flat_map(move |replacement| {
        VictimPolicy::ALL.into_iter().flat_map(move |reclaim| {
            evicts.into_iter().map(move |evict| Making { replacement, reclaim, evict })
        })
    })
}

fn map(shape: Shape, making: Making) -> Map {
    let (entries, rest) = Map::words(shape);
    let placing = Placing::new(1, shape.slots() / 16, 99);
    let mut map = Map::new(Words::heap(entries), Words::heap(rest), placing, 0, shape, making);
    map.begin();
    map
}

/// A map with what a shard does to it, and what must be in it.
struct Driver {
    map: Map,
    lines: BTreeMap<LineId, Sum>,
    pinned: u64,
    copied: u64,
}

impl Driver {
    fn new(making: Making, pinned: u64) -> Driver {
        Driver { map: map(SHAPE, making), lines: BTreeMap::new(), pinned, copied: 0 }
    }

    fn drop_slot(&mut self, slot: SlotId) {
        let Slot::Line(line) = self.map.get(slot) else { panic!("{slot:?} has no line") };
        self.map.evict(slot);
        self.map.free(slot);
        assert!(self.lines.remove(&line).is_some());
        assert_eq!(self.map.find(line), None);
    }

    fn clean(&mut self) {
        let mut copies = Vec::new();
        loop {
            let pinned = self.pinned;
            let moving: Vec<SlotId> = copies.iter().map(|&(_, from, _)| from).collect();
            let next = self.map.next_clean(
                |line| line.0 < pinned,
                |_| false,
                |slot, _| moving.contains(&slot),
            );
            match next {
                Some(Clean::Drop(slot)) => self.drop_slot(slot),
                Some(Clean::Copy { line, from, to }) => copies.push((line, from, to)),
                None if copies.is_empty() => return,
                None => {
                    for (line, from, to) in copies.drain(..) {
                        let sum = self.map.sum(from);
                        self.map.hold(from);
                        self.map.publish(to, line, sum);
                        self.map.unreserve(to);
                        self.map.copied();
                        self.map.free(from);
                        self.copied += 1;
                    }
                }
            }
        }
    }

    /// Caches `line`; returns its slot if there was room.
    fn put(&mut self, line: LineId, sum: Sum) -> Option<SlotId> {
        if let Some(old) = self.map.find(line) {
            self.map.drop_line(old);
            self.map.free(old);
            self.lines.remove(&line);
        }
        let pinned = self.pinned;
        let choice = self.map.choose(
            line,
            |_, now| matches!(now, Slot::Line(l) if l.0 < pinned),
            Want::Place,
        )?;
        assert!(choice.free);
        if let Some(rival) = choice.rival.filter(|r| r.goes) {
            self.drop_slot(rival.slot);
        }
        self.map.reserve(choice.slot);
        self.map.publish(choice.slot, line, sum);
        self.map.unreserve(choice.slot);
        self.lines.insert(line, sum);
        self.clean();
        Some(choice.slot)
    }

    fn check(&self) {
        self.map.validate().unwrap();
        assert_eq!(self.map.count() as usize, self.lines.len());
        for (&line, &sum) in &self.lines {
            let slot = self.map.find(line).unwrap();
            assert_eq!((self.map.get(slot), self.map.sum(slot)), (Slot::Line(line), sum));
        }
    }
}

#[test]
fn a_slot_costs_at_most_sixteen_bytes() {
    let shape = Shape::Full { segments: 128, lines: 2048 };
    for making in every_making() {
        let map = map(shape, making);
        let bytes = map.memory_bytes() as f64 / f64::from(shape.slots());
        assert!((14.0..=16.0).contains(&bytes), "{bytes} bytes a slot with {making:?}");
    }
}

#[test]
fn every_way_of_making_room_keeps_what_it_says() {
    for (seed, making) in every_making().enumerate() {
        let mut rng = Rng::new(seed as u64);
        let mut driver = Driver::new(making, 0);
        let mut refused = 0;
        for step in 0..6_000u32 {
            let line = LineId(rng.below(600));
            match driver.map.find(line) {
                Some(slot) if rng.chance(0.7) => driver.map.hit(slot),
                Some(slot) if rng.chance(0.1) => {
                    driver.map.drop_line(slot);
                    driver.map.free(slot);
                    driver.lines.remove(&line);
                }
                _ => refused += u32::from(driver.put(line, Sum(step & Sum::MASK)).is_none()),
            }
            if step % 97 == 0 {
                driver.check();
            }
        }
        driver.check();
        // There is always room for more, and the cache is not left empty.
        assert_eq!(refused, 0, "{making:?}");
        let least = if making.evict == EvictionBy::Cache { 200 } else { 180 };
        // Segments so small cost more than their lines' sixteen bytes, and what is said of them is enough.
        let (lines, rest) = Map::most_bytes(SHAPE);
        let bytes = driver.map.memory_bytes();
        assert!(lines == 16 * u64::from(SHAPE.slots()) && bytes <= lines + rest, "{bytes}");
        assert!(driver.lines.len() > least, "{} lines with {making:?}", driver.lines.len());
    }
}

#[test]
fn slots_of_a_segment_are_given_out_in_order() {
    let mut driver = Driver::new(Making::default(), 0);
    for line in 0..100u32 {
        let slot = driver.put(LineId(u64::from(line)), Sum(line)).unwrap();
        assert_eq!(slot, SlotId(line));
    }
    // What is written again goes to another slot.
    assert_eq!(driver.put(LineId(3), Sum(7)), Some(SlotId(100)));
    driver.check();
}

#[test]
fn lines_that_must_stay_survive_cleaning() {
    for making in every_making() {
        let mut driver = Driver::new(making, 40);
        (0..40).for_each(|line| assert!(driver.put(LineId(line), Sum(line as u32)).is_some()));
        for line in 1_000..8_000 {
            assert!(driver.put(LineId(line), Sum(1)).is_some(), "{making:?}");
        }
        for line in 0..40 {
            assert!(driver.map.find(LineId(line)).is_some(), "line {line} with {making:?}");
        }
        driver.check();
        assert!(driver.copied >= 40, "they have moved");
    }
}

#[test]
fn a_cache_of_nothing_but_lines_that_must_stay_comes_to_rest() {
    for making in every_making() {
        let mut driver = Driver::new(making, u64::MAX);
        let mut taken = 0;
        for line in 0..2_000 {
            taken += u32::from(driver.put(LineId(line), Sum(1)).is_some());
        }
        driver.check();
        assert!((64..2_000).contains(&taken), "{taken} with {making:?}");
        // One leaves: as soon as that is enough for a segment, there is room again.
        for line in 0..64 {
            if let Some(slot) = driver.map.find(LineId(line)) {
                driver.drop_slot(slot);
            }
        }
        driver.clean();
        assert!(driver.put(LineId(9_999), Sum(1)).is_some(), "{making:?}");
    }
}

#[test]
fn lines_in_use_outlive_others_when_the_cleaner_evicts() {
    let making = Making {
        replacement: Replacement::Clock,
        reclaim: VictimPolicy::Fifo,
        evict: EvictionBy::Gc { keep: 0.5 },
    };
    let mut driver = Driver::new(making, 0);
    (0..50).for_each(|line| {
        driver.put(LineId(line), Sum(1));
        driver.put(LineId(line + 50), Sum(1));
    });
    for line in 1_000..4_000u64 {
        driver.put(LineId(line), Sum(1));
        let used = driver.map.find(LineId(line % 50));
        driver.map.hit(used.expect("a line in use"));
    }
    assert!((0..50).all(|line| driver.map.find(LineId(line)).is_some()));
    assert!((50..100).all(|line| driver.map.find(LineId(line)).is_none()));
}

#[test]
fn what_a_run_leaves_is_attached_by_the_next() {
    for (seed, making) in every_making().enumerate() {
        let mut rng = Rng::new(seed as u64);
        let mut driver = Driver::new(making, 0);
        for step in 0..2_000 {
            driver.put(LineId(rng.below(900)), Sum(step));
        }
        let (entries, rest) = driver.map.snapshot();
        let placing = *driver.map.placing();
        // By another policy, in memory that is the same.
        let other = Making { evict: EvictionBy::Cache, ..Making::default() };
        driver.map = Map::new(entries, rest, placing, 0, SHAPE, other);
        driver.map.begin();
        driver.check();
        driver.clean();
        for step in 0..2_000 {
            assert!(driver.put(LineId(rng.below(900)), Sum(step)).is_some(), "{making:?}");
        }
        driver.check();
    }
}

#[test]
fn garbage_in_memory_is_found_and_a_line_is_nowhere_twice() {
    let mut driver = Driver::new(Making::default(), 0);
    for line in 0..100 {
        driver.put(LineId(line), Sum(5));
    }
    let placing = *driver.map.placing();
    let mut rng = Rng::new(1);
    for _ in 0..2_000 {
        let (mut entries, rest) = driver.map.snapshot();
        let at = rng.below(150) as usize;
        let value = match rng.below(3) {
            0 => rng.next_u64(),
            1 => rng.next_u64() >> rng.below(64),
            _ => entries.load(rng.below(150) as usize),
        };
        entries.store(at, value);
        let mut map = Map::new(entries, rest, placing, 0, SHAPE, Making::default());
        map.begin();
        if map.validate().is_ok() {
            for slot in (0..map.len()).map(SlotId) {
                if let Slot::Line(line) = map.get(slot) {
                    assert_eq!(map.find(line), Some(slot));
                    assert!(line.0 < placing.lines());
                }
            }
        }
    }
}
