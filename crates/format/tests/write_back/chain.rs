//! The rules of the chain, against a reference that is as slow as it is plain, and against what a writer did.

use std::collections::BTreeMap;

use larder_base::Rng;
use larder_format::block::write_log::chain::{Reading, counting, known_durable, read};
use larder_format::block::write_log::{Link, Verdict, Walk};
use proptest::prelude::*;

/// Which batch counts as `number`, as the rules say it: it is not void, and none of its number is preferred to it.
fn batch(links: &[Link], oldest: u64, number: u64) -> Option<&Link> {
    let live = || links.iter().filter(|link| link.generation >= oldest);
    // A batch is void if an equal or lower number has a later run.
    let void = |b: &Link| live().any(|other| other.number <= b.number && other.run > b.run);
    live().filter(|b| b.number == number && !void(b)).max_by_key(|b| b.generation)
}

/// What numbers from `first` on are, and where the log ends.
fn reference(links: &[Link], oldest: u64, first: u64) -> (Vec<(u64, Verdict)>, u64) {
    let known = links.iter().map(|link| link.known).max().unwrap_or(0);
    let batch = |number| batch(links, oldest, number);
    // At or below the number known durable a batch is lost if it is missing or if its successor, known durable itself,
    // names another.
    let lost = |number: u64| match batch(number) {
        None => true,
        Some(b) => number < known && batch(number + 1).is_some_and(|after| after.before != b.hash),
    };
    let mut out = Vec::new();
    for number in first.. {
        if number <= known {
            let verdict = if lost(number) { Verdict::Damage } else { Verdict::Follows };
            out.push((number, verdict));
            continue;
        }
        // Above it, the log ends at the first that is missing or has another predecessor. What comes behind a lost batch, and
        // the first of all, cannot be compared.
        let predecessor = number - 1;
        let free = number == first || predecessor <= known && lost(predecessor);
        let follows = batch(number).is_some_and(|b| {
            free || batch(predecessor).is_some_and(|before| b.before == before.hash)
        });
        if !follows {
            return (out, number);
        }
        out.push((number, Verdict::Follows));
    }
    unreachable!("numbers do not end")
}

fn stepwise(links: &[Link], oldest: u64, first: u64) -> (Vec<(u64, Verdict)>, u64) {
    let count = counting(links, oldest);
    let of = |number| count.iter().map(|&i| &links[i]).find(|link| link.number == number);
    let mut walk = Walk::new(first, known_durable(links));
    let mut out = Vec::new();
    loop {
        let number = walk.next();
        match walk.step(of(number), of(number + 1)) {
            Verdict::EndOfTail => break,
            verdict => out.push((number, verdict)),
        }
    }
    assert_eq!(walk.step(of(walk.next()), of(walk.next() + 1)), Verdict::EndOfTail);
    (out, walk.next())
}

fn check(links: &[Link], oldest: u64, first: u64) -> Reading {
    let (want, next) = reference(links, oldest, first);
    assert_eq!(stepwise(links, oldest, first), (want.clone(), next));
    let reading = read(links, oldest, first);
    let follows = want.iter().filter(|(_, verdict)| *verdict == Verdict::Follows);
    let batches: Vec<Link> = reading.batches.iter().map(|&i| links[i]).collect();
    let wanted: Vec<Link> = follows.map(|(n, _)| *batch(links, oldest, *n).unwrap()).collect();
    assert_eq!(batches, wanted);
    let damaged = want.iter().filter(|(_, verdict)| *verdict == Verdict::Damage).map(|(n, _)| *n);
    assert!(reading.damaged.iter().cloned().flatten().eq(damaged), "{reading:?}");
    assert!(reading.damaged.windows(2).all(|two| two[0].end < two[1].start), "{reading:?}");
    assert_eq!(reading.next, next);
    let last = batches.last().filter(|last| last.number + 1 == next);
    assert_eq!(reading.before, last.map_or(0, |last| last.hash));
    reading
}

#[test]
fn a_number_known_durable_that_is_far_away_takes_no_time() {
    let number = u64::MAX - 1;
    let far = Link { number, run: 1, generation: 1, hash: 1, before: 0, known: number - 1 };
    let near = Link { number: 5, hash: 2, known: 4, ..far };
    let reading = read(&[far, near], 1, 3);
    assert_eq!(reading.batches, [1, 0]);
    assert_eq!(reading.damaged, [3..5, 6..number]);
    assert_eq!((reading.next, reading.before), (u64::MAX, 1));
    assert_eq!(read(&[], 0, 7), Reading { batches: vec![], damaged: vec![], next: 7, before: 0 });
}

/// A writer: runs that are cut short, each with a log that goes on where the last was read to end.
struct Writer {
    rng: Rng,
    /// At each position what is durable there, and what is written and may be lost.
    places: BTreeMap<u64, (Option<Link>, Option<Link>)>,
    /// The batches of the log, by what the writer knows.
    log: Vec<Link>,
    known: u64,
    run: u64,
    generation: u64,
    next: (u64, u64),
    lost: Vec<u64>,
}

impl Writer {
    fn append(&mut self) {
        if self.rng.chance(0.2) {
            self.generation += 1;
        }
        let (number, before) = self.next;
        let (run, generation, known) = (self.run, self.generation, self.known);
        // Odd: no hash is the 0 of a batch that has none before it.
        let hash = self.rng.next_u64() | 1;
        let link = Link { number, run, generation, hash, before, known };
        self.places.entry(number).or_default().1 = Some(link);
        self.log.push(link);
        self.next = (number + 1, hash);
    }

    fn flush(&mut self) {
        for (durable, written) in self.places.values_mut() {
            *durable = written.take().or(*durable);
        }
        self.known = self.next.0 - 1;
    }

    /// A power cut: each unflushed write is there, not there, or has torn what was there before.
    fn cut(&mut self) {
        for (durable, written) in self.places.values_mut() {
            if let Some(link) = written.take() {
                match self.rng.below(4) {
                    0 | 1 => *durable = Some(link),
                    2 => {}
                    _ => *durable = None,
                }
            }
        }
    }

    /// Damage to a durable batch of the log; only where one behind it knew it durable, or it looks like a torn tail.
    fn rot(&mut self) {
        let there = self.log.iter().filter(|link| !self.lost.contains(&link.number));
        let said = there.map(|link| link.known).max().unwrap_or(0);
        if said > 0 {
            let number = self.rng.range(1, said);
            if !self.lost.contains(&number) {
                self.places.insert(number, (None, None));
                self.lost.push(number);
            }
        }
    }

    fn readable(&self) -> Vec<Link> {
        self.places.values().filter_map(|(durable, _)| *durable).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Any batches at all, few numbers and few hashes, so that all rules meet.
    #[test]
    fn any_batches_are_judged_by_the_rules(seed: u64, count in 0usize..14, first in 1u64..4, oldest in 0u64..3) {
        let mut rng = Rng::new(seed);
        let mut links: Vec<Link> = Vec::new();
        for n in 0..count as u64 {
            let number = rng.range(1, 9);
            let before = match rng.below(4) {
                0 => rng.range(1, 4),
                _ => links
                    .iter()
                    .filter(|link| link.number + 1 == number)
                    .max_by_key(|link| link.run)
                    .map_or(0, |link| link.hash),
            };
            let known = if rng.chance(0.3) { rng.below(number) } else { 0 };
            let link =
                Link { number, run: rng.range(1, 3), generation: rng.below(4), hash: 100 + n, before, known };
            // No writer writes two of one run, segment and number.
            let same = |other: &Link| {
                (other.number, other.run, other.generation) == (number, link.run, link.generation)
            };
            if !links.iter().any(same) {
                links.push(link);
            }
        }
        rng.shuffle(&mut links);
        check(&links, oldest, first);
    }

    /// Power cuts: what was durable is there, in one piece, and what follows is what the same writer wrote next. Nothing of an
    /// earlier run comes back behind the end.
    #[test]
    fn power_cuts_leave_a_prefix(seed: u64, runs in 1u64..7) {
        let mut writer = Writer {
            rng: Rng::new(seed),
            places: BTreeMap::new(),
            log: Vec::new(),
            known: 0,
            run: 0,
            generation: 1,
            next: (1, 0),
            lost: Vec::new(),
        };
        for _ in 0..runs {
            writer.run += writer.rng.range(1, 3);
            for _ in 0..writer.rng.below(12) {
                if writer.rng.chance(0.25) { writer.flush() } else { writer.append() }
            }
            writer.cut();
            let links = writer.readable();
            let reading = check(&links, 0, 1);
            prop_assert!(reading.damaged.is_empty(), "{:?}", reading);
            let found: Vec<Link> = reading.batches.iter().map(|&i| links[i]).collect();
            prop_assert!(found.len() as u64 >= writer.known, "durable batches are lost");
            prop_assert_eq!(&found[..], &writer.log[..found.len()]);
            // The next run goes on from there; what it recovered is flushed first.
            writer.log = found;
            writer.next = (reading.next, reading.before);
            writer.known = reading.next - 1;
        }
    }

    /// Damage to what was durable is told apart from an end, and nothing behind it is given up.
    #[test]
    fn damage_is_no_end(seed: u64, runs in 1u64..6) {
        let mut writer = Writer {
            rng: Rng::new(seed),
            places: BTreeMap::new(),
            log: Vec::new(),
            known: 0,
            run: 0,
            generation: 1,
            next: (1, 0),
            lost: Vec::new(),
        };
        for _ in 0..runs {
            writer.run += 1;
            for _ in 0..writer.rng.below(12) {
                if writer.rng.chance(0.3) { writer.flush() } else { writer.append() }
            }
            writer.cut();
            let end = check(&writer.readable(), 0, 1).next;
            prop_assert!(end > writer.known);
            writer.log.retain(|link| link.number < end);
            for _ in 0..writer.rng.below(3) {
                writer.rot();
            }
            let links = writer.readable();
            let reading = check(&links, 0, 1);
            prop_assert_eq!(reading.next, end);
            let lost: Vec<u64> = reading.damaged.iter().cloned().flatten().collect();
            let mut want = writer.lost.clone();
            want.sort_unstable();
            prop_assert_eq!(lost, want);
            let found: Vec<Link> = reading.batches.iter().map(|&i| links[i]).collect();
            let want = writer.log.iter().filter(|link| !writer.lost.contains(&link.number));
            prop_assert!(want.eq(found.iter()), "{:?}", found);
            writer.next = (reading.next, reading.before);
            writer.known = reading.next - 1;
        }
    }
}
