//! The oracle against an exhaustive search of all decisions, and against the engine.

use std::path::Path;

use larder_base::{Nanos, Rng};
use larder_trace::Op;

use super::*;
use crate::kv::workload::{Workload, footprint};

/// A cache so small that every sequence of decisions can be tried.
const TINY: Sizes = Sizes { dram: 250, segment: 404, segments: 3 };

/// The model by the shortest means: vectors, looking ahead by scanning, and decisions from a tape.
struct Reference<'a> {
    requests: &'a [Request],
    memory: Memory,
    /// Bit by bit: whether to write. What it does not say is no, and is added.
    tape: Vec<bool>,
    used: usize,
    /// Objects in DRAM with the request of their last use; those that leave first stand first.
    dram: Vec<(u64, usize)>,
    open: Vec<u64>,
    sealed: Vec<Vec<u64>>,
    written: u64,
    hits: u64,
}

impl Reference<'_> {
    /// Of the first request for the object: sizes do not change here.
    fn size(&self, id: u64) -> u64 {
        self.requests.iter().find(|r| r.id == id).map_or(0, |r| 16 + r.size)
    }

    fn decide(&mut self) -> bool {
        if self.used == self.tape.len() {
            self.tape.push(false);
        }
        self.used += 1;
        self.tape[self.used - 1]
    }

    fn on_flash(&self, id: u64) -> bool {
        self.open.contains(&id) || self.sealed.iter().any(|s| s.contains(&id))
    }

    fn forget(&mut self, id: u64) {
        // Dead records keep their room: 0 stands for them.
        self.dram.retain(|d| d.0 != id);
        for segment in self.sealed.iter_mut().chain([&mut self.open]) {
            segment.iter_mut().filter(|x| **x == id).for_each(|x| *x |= DEAD);
        }
    }

    fn used(&self, segment: &[u64]) -> u64 {
        segment.iter().map(|id| 21 + self.size(id & !DEAD)).sum()
    }

    fn bring(&mut self, id: u64, now: usize) {
        self.forget(id);
        let dram = |id| (32 + self.size(id)).next_multiple_of(8);
        let mut held: u64 = self.dram.iter().map(|d| dram(d.0)).sum();
        held += dram(id);
        self.dram.push((id, now));
        while held > TINY.dram {
            let at = match self.memory {
                Memory::Lru => (0..self.dram.len()).min_by_key(|&d| self.dram[d].1),
                // The latest next read first; of those that are never read, whichever came first in the trace.
                Memory::NextRead => (0..self.dram.len()).min_by_key(|&d| {
                    let id = self.dram[d].0;
                    let next = self.next_read(id, self.dram[d].1).unwrap_or(u32::MAX as usize);
                    (usize::MAX - next, self.requests.iter().position(|r| r.id == id))
                }),
            };
            let (id, _) = self.dram.remove(at.unwrap());
            held -= (32 + self.size(id)).next_multiple_of(8);
            if self.decide() {
                self.write(id);
            }
        }
    }

    fn next_read(&self, id: u64, after: usize) -> Option<usize> {
        let next = (after + 1..self.requests.len()).find(|&i| self.requests[i].id == id)?;
        (self.requests[next].op == Op::Get).then_some(next)
    }

    fn write(&mut self, id: u64) {
        let mut turns = 0;
        while self.used(&self.open) + 21 + self.size(id) > 400 {
            self.written += 404;
            let full = std::mem::take(&mut self.open);
            self.sealed.push(full);
            if self.sealed.len() > 2 {
                for id in self.sealed.remove(0) {
                    if id & DEAD == 0 && turns < 3 && self.decide() {
                        self.open.push(id);
                    }
                }
            }
            turns += 1;
        }
        self.open.push(id);
    }

    fn run(&mut self) {
        for i in 0..self.requests.len() {
            let r = self.requests[i];
            if r.op.is_removal() {
                self.forget(r.id);
                continue;
            }
            let in_dram = self.dram.iter().position(|d| d.0 == r.id);
            if r.op == Op::Get && (in_dram.is_some() || self.on_flash(r.id)) {
                self.hits += 1;
                if let Some(at) = in_dram {
                    self.dram[at].1 = i;
                }
            } else {
                self.bring(r.id, i);
            }
        }
    }
}

const DEAD: u64 = 1 << 40;

/// The most hits that any decisions have, by the bytes that they write.
fn exhaustive(requests: &[Request], memory: Memory) -> Vec<(u64, u64)> {
    let mut best: std::collections::BTreeMap<u64, u64> = std::collections::BTreeMap::new();
    let mut tape = Vec::new();
    loop {
        let mut reference = Reference {
            requests,
            memory,
            tape,
            used: 0,
            dram: Vec::new(),
            open: Vec::new(),
            sealed: Vec::new(),
            written: 0,
            hits: 0,
        };
        reference.run();
        let most = best.entry(reference.written).or_default();
        *most = reference.hits.max(*most);
        tape = reference.tape;
        tape.truncate(reference.used);
        while tape.last() == Some(&true) {
            tape.pop();
        }
        match tape.last_mut() {
            Some(last) => *last = true,
            None => break,
        }
    }
    best.into_iter().collect()
}

fn search(budget: u64, warmup: usize, sizes: Sizes) -> Search {
    Search {
        sizes,
        warmup,
        counted_from: warmup,
        budget,
        memory: Memory::NextRead,
        objective: Objective::Requests,
        tolerance: 0.01,
        most_runs: 24,
    }
}

fn hits(c: &Counters) -> u64 {
    c.hits_dram + c.hits_flash
}

/// On traces of at most 12 requests no decision of the oracle's has more hits than the best of all decisions that write as much, in
/// either order of leaving DRAM; and mostly it is the best.
#[test]
fn never_above_the_best_of_all_decisions() {
    let mut rng = Rng::new(17);
    let (mut cases, mut equal, mut more) = (0, 0, 0);
    for _ in 0..300 {
        let n = 6 + rng.below(7) as usize;
        let requests: Vec<Request> = (0..n)
            .map(|_| {
                let id = 1 + rng.below(5);
                let op = match rng.below(12) {
                    0 => Op::Set,
                    1 => Op::Delete,
                    _ => Op::Get,
                };
                Request { op, ..Request::get(id, 40 + 25 * id) }
            })
            .collect();
        let known = Known::of(&requests).unwrap();
        for memory in [Memory::Lru, Memory::NextRead] {
            let all = exhaustive(&requests, memory);
            let none = all.first().unwrap().1;
            for budget in [404, 808, 2020] {
                let found = Search { memory, ..search(budget, 0, TINY) }.find(&known);
                let spent = found.counters.flash_bytes;
                let within =
                    |most: u64| all.iter().filter(move |a| a.0 <= most).map(|a| a.1).max().unwrap();
                assert!(
                    hits(&found.counters) <= within(spent),
                    "{requests:?} {memory:?} {found:?} {all:?}"
                );
                assert!(
                    spent <= budget && hits(&found.counters) >= none.min(within(0)),
                    "{found:?}"
                );
                cases += 1;
                equal += u64::from(hits(&found.counters) == within(budget));
                more += u64::from(within(budget) > within(0));
            }
        }
    }
    assert!(cases == 1800 && equal * 100 >= cases * 90 && more > 100, "{equal} of {cases}, {more}");
}

fn gets(ids: &[u64]) -> Vec<Request> {
    ids.iter().map(|&id| Request::get(id, 100)).collect()
}

/// Where the best is obvious, it is found: what is read again is written, what is not is not.
#[test]
fn obvious_choices() {
    // DRAM holds one object of 152 bytes; 1 and 2 take turns, the others come once.
    let requests = gets(&[1, 2, 1, 2, 3, 1, 2, 4, 1, 2, 5]);
    let known = Known::of(&requests).unwrap();
    for memory in [Memory::Lru, Memory::NextRead] {
        let all = exhaustive(&requests, memory);
        let most = all.iter().map(|a| a.1).max().unwrap();
        assert_eq!(most, 6);
    }
    let lru = Search { memory: Memory::Lru, ..search(4040, 0, TINY) };
    let found = lru.find(&known);
    assert_eq!(hits(&found.counters), 6, "{found:?}");
    // They fit into a segment that is never full: nothing was written, but for what DRAM and that segment hold.
    assert_eq!(found.counters.flash_bytes, 0);
    // What is overwritten or removed before it is read is not worth a write.
    let mut requests = gets(&[1, 2, 3, 4, 1, 2, 3, 4]);
    for r in &mut requests[4..] {
        r.op = Op::Set;
    }
    let known = Known::of(&requests).unwrap();
    let found = lru.find(&known);
    assert_eq!((found.whole.flash_record_bytes, hits(&found.counters)), (0, 0));
}

/// What has expired is no hit, and reads after that are none that a write is worth.
#[test]
fn objects_expire() {
    let at = |seconds: u64, id| Request {
        time: Some(Nanos(seconds * 1_000_000_000)),
        ttl: 10,
        ..Request::get(id, 100)
    };
    // 1 is read twice while its first version lives, then once more; of 2 nothing is left when it is read.
    let requests =
        [at(0, 1), at(1, 2), at(2, 3), at(5, 1), at(6, 4), at(7, 1), at(11, 1), at(12, 2)];
    let known = Known::of(&requests).unwrap();
    let found = Search { memory: Memory::Lru, ..search(4040, 0, TINY) }.find(&known);
    assert_eq!(hits(&found.counters), 2, "{found:?}");
    assert_eq!(found.whole.flash_record_bytes, 21 + 4 + 16 + 100);
}

/// A third of the requests warms up, as in the other studies.
fn study(workload: &str, requests: u64) -> (Vec<Request>, kv::Sizes, usize) {
    let requests = Workload::named(workload).unwrap().requests(1, requests, Path::new("")).unwrap();
    let (bytes, objects) = footprint(&requests);
    let cache = bytes / 5;
    let dram = cache / 8;
    let study = kv::study_of(dram, cache - dram);
    let object = bytes / objects + 40;
    let warmup = requests.len() / 3;
    (requests, kv::Sizes::Study(larder_engine::kv::node::Study { object, ..study }), warmup)
}

/// At equal writes the engine's `all` never hits more. Budgets are kept to, and spent where so much is worth writing.
#[test]
fn better_than_all_at_equal_writes() {
    for workload in ["memcachier", "churn", "sessions", "scan"] {
        let (requests, sizes, warmup) = study(workload, 60_000);
        let known = Known::of(&requests).unwrap();
        let all = all(&requests, sizes, warmup, 1).unwrap();
        let model = Sizes::of(&sizes).unwrap();
        let mut last = u64::MAX;
        for level in [1.0, 0.3, 0.1] {
            let budget = (all.flash_bytes as f64 * level) as u64;
            let found = search(budget, warmup, model).find(&known);
            if level == 1.0 {
                assert!(hits(&found.counters) >= hits(&all), "{workload}: {found:?} {all:?}");
            }
            if (workload, level) == ("churn", 0.1) {
                assert!(found.writes >= 0.98, "{found:?}");
            }
            assert!(found.writes <= 1.02 && hits(&found.counters) <= last, "{workload} {level}");
            last = hits(&found.counters);
        }
        let bytes =
            Search { objective: Objective::Bytes, ..search(all.flash_bytes / 4, warmup, model) };
        let by_number = search(all.flash_bytes / 4, warmup, model).find(&known);
        let by_bytes = bytes.find(&known);
        assert!(by_bytes.counters.hit_bytes >= by_number.counters.hit_bytes, "{workload}");
    }
}
