use std::collections::{BTreeMap, HashMap};

use larder_base::{Nanos, Rng};

use super::*;
use crate::block::{BlockAdmission, BlockKind, BlockSetup};

const LINE: u64 = 4096;
const LINES: u64 = 2048;

/// A cache of lines that evicts what was not used for longest.
struct Cache {
    admission: BlockAdmission,
    /// Instead of what admission says, if stated: the share that is admitted, by chance.
    chance: Option<(f64, Rng)>,
    used: HashMap<u64, u64>,
    order: BTreeMap<u64, u64>,
    clock: u64,
    reads: u64,
    hits: u64,
    offered: u64,
    admitted: u64,
    written: u64,
}

impl Cache {
    fn new(admission: &str) -> Cache {
        let setup =
            BlockSetup { line_bytes: LINE as u32, lines: LINES, backing_bytes: 1 << 32, seed: 5 };
        let admission = BlockAdmission::new(&admission.parse().unwrap(), &setup).unwrap();
        Cache {
            admission,
            chance: None,
            used: HashMap::new(),
            order: BTreeMap::new(),
            clock: 0,
            reads: 0,
            hits: 0,
            offered: 0,
            admitted: 0,
            written: 0,
        }
    }

    fn count(&mut self) {
        (self.reads, self.hits, self.offered, self.admitted, self.written) = (0, 0, 0, 0, 0);
    }

    fn put(&mut self, line: u64) {
        self.clock += 1;
        if let Some(was) = self.used.insert(line, self.clock) {
            self.order.remove(&was);
        }
        self.order.insert(self.clock, line);
    }

    fn request(&mut self, op: BlockOp, first: u64, count: u64) {
        let (volume, kind) = (VolumeId(0), BlockKind::Unknown);
        let (offset, bytes, now) = (first * LINE, count * LINE, Nanos::ZERO);
        let observed =
            self.admission.observe(&BlockAccess { volume, offset, bytes, op, kind, now });
        for n in first..first + count {
            let cached = self.used.contains_key(&n);
            if op == BlockOp::Read {
                self.reads += 1;
                self.hits += u64::from(cached);
            }
            if cached {
                self.put(n);
                self.written += u64::from(op == BlockOp::Write);
                continue;
            }
            let line = LineId { volume, offset: n * LINE };
            let candidate = BlockCandidate { line, op, kind, observed, victim: None };
            self.offered += 1;
            let free = self.used.len() < LINES as usize;
            let verdict = match &mut self.chance {
                Some((share, rng)) => match rng.chance(*share) {
                    true => Verdict::Admit,
                    false => Verdict::Reject(Reason::FewReads),
                },
                None => match self.admission.judge(&candidate) {
                    Verdict::IfFree if !free => {
                        self.admission.without_slot(&candidate);
                        continue;
                    }
                    _ => self.admission.admit(&candidate),
                },
            };
            if let Verdict::Reject(_) = verdict {
                continue;
            }
            if !free && let Some((_, oldest)) = self.order.pop_first() {
                self.used.remove(&oldest);
            }
            self.put(n);
            self.admitted += 1;
            self.written += 1;
        }
    }

    fn ratio(&self) -> f64 {
        self.hits as f64 / self.reads.max(1) as f64
    }
}

/// Reads of a working set that fits, and from time to time a scan through ten times the cache.
fn with_scans(admission: &str) -> f64 {
    let mut cache = Cache::new(admission);
    let (mut rng, mut at) = (Rng::new(2), 1 << 20);
    let mut of_set = (0, 0);
    for i in 0..200_000 {
        if i == 100_000 {
            of_set = (0, 0);
        }
        let hits = cache.hits;
        cache.request(BlockOp::Read, rng.below(LINES / 2) * 7, 1);
        of_set = (of_set.0 + cache.hits - hits, of_set.1 + 1);
        // In each round of the set a scan of twice the cache, in requests of four lines.
        if i % LINES < LINES / 2 {
            cache.request(BlockOp::Read, at, 4);
            at += 4;
        }
    }
    of_set.0 as f64 / f64::from(of_set.1)
}

#[test]
fn a_scan_leaves_the_working_set_where_it_is() {
    let [all, sseqr, expected] = ["all", "sseqr(length=64k)", "expected_reads"].map(with_scans);
    assert!(all < 0.9, "the scan must matter: {all}");
    assert!(expected > 0.98 && expected > sseqr - 0.01, "{expected}, sseqr {sseqr}, all {all}");
}

/// A scan that no detector of sequences knows: each line once, in no order.
#[test]
fn lines_that_are_never_read_again_leave_the_working_set_where_it_is() {
    let run = |admission: &str| {
        let mut cache = Cache::new(admission);
        let (mut rng, mut of_set) = (Rng::new(2), (0u64, 0u64));
        for i in 0..150_000u64 {
            let hits = cache.hits;
            cache.request(BlockOp::Read, rng.below(LINES * 3 / 4) * 7, 1);
            if i > 75_000 {
                of_set = (of_set.0 + cache.hits - hits, of_set.1 + 1);
            }
            cache.request(BlockOp::Read, (1 << 20) + (i * 7919) % (1 << 20), 1);
        }
        of_set.0 as f64 / of_set.1 as f64
    };
    let (all, expected) = (run("all"), run("expected_reads"));
    assert!(expected > 0.97 && all < 0.85, "{expected}, all {all}");
}

/// One half of what is asked for is read again soon, the other hardly ever.
fn hot_and_cold(cache: &mut Cache, seed: u64) {
    let mut rng = Rng::new(seed);
    for i in 0..300_000u64 {
        if i == 100_000 {
            cache.count();
        }
        let line =
            if rng.chance(0.5) { rng.below(LINES * 3 / 4) } else { (1 << 20) + rng.below(1 << 18) };
        let op = if rng.chance(0.2) { BlockOp::Write } else { BlockOp::Read };
        // Far enough apart that no two make a run.
        cache.request(op, line * 37, 1);
    }
}

#[test]
fn it_beats_chance_at_equal_writes() {
    let mut learnt = Cache::new("expected_reads(least=0.3)");
    hot_and_cold(&mut learnt, 3);
    // The share by which chance writes as much.
    let (mut low, mut high) = (0.0, 1.0);
    let mut chance = Cache::new("all");
    for _ in 0..12 {
        let share = (low + high) / 2.0;
        chance = Cache::new("all");
        chance.chance = Some((share, Rng::new(7)));
        hot_and_cold(&mut chance, 3);
        if chance.written > learnt.written { high = share } else { low = share }
    }
    let writes = chance.written as f64 / learnt.written as f64;
    assert!((0.95..1.05).contains(&writes), "{writes}");
    assert!(
        learnt.ratio() > chance.ratio() + 0.05,
        "{} against {} by chance at {} writes",
        learnt.ratio(),
        chance.ratio(),
        learnt.written
    );
}

/// Lines that are written many times for each read cost more than they give.
#[test]
fn lines_that_are_mostly_written_are_left_out() {
    let run = |admission: &str| {
        let mut cache = Cache::new(admission);
        let mut rng = Rng::new(4);
        for i in 0..200_000 {
            if i == 100_000 {
                cache.count();
            }
            // A fifth of the accesses read a set, the others write another.
            let (op, at) = match rng.chance(0.2) {
                true => (BlockOp::Read, rng.below(LINES / 2)),
                false => (BlockOp::Write, (1 << 20) + rng.below(LINES / 2)),
            };
            cache.request(op, at * 37, 1);
        }
        (cache.ratio(), cache.written)
    };
    let (all, expected) = (run("all"), run("expected_reads(least=0.5)"));
    assert!(expected.0 > all.0 - 0.005, "{expected:?} {all:?}");
    assert!(expected.1 * 10 < all.1, "{expected:?} {all:?}");
}

#[test]
fn the_same_seed_decides_the_same_and_memory_stays() {
    let run = || {
        let mut cache = Cache::new("expected_reads");
        let memory = cache.admission.memory_bytes();
        hot_and_cold(&mut cache, 9);
        assert_eq!(cache.admission.memory_bytes(), memory);
        (cache.hits, cache.written, *cache.admission.verdicts())
    };
    let (first, second) = (run(), run());
    assert_eq!(first, second);
    assert!(first.2.rejected(Reason::FewReads) > 0 && first.2.admitted > 0, "{first:?}");
}

#[test]
fn every_line_has_a_kind() {
    for op in [BlockOp::Read, BlockOp::Write] {
        for number in 0..=u8::MAX {
            let hints = Hints::of_number(number);
            assert_eq!(number <= Hints::MOST, hints.number() == number);
            for reads in 0..8 {
                for away in 0..8 {
                    let past = Past { reads, writes: 3, away, held: false };
                    let kind = Kind::new(op, hints, past, past);
                    let [coarse, middle, fine] = kind.depths();
                    assert!(usize::from(kind.0) < FINE && fine < FINE, "{kind:?}");
                    assert!(coarse < COARSE && middle < MIDDLE);
                }
            }
        }
    }
}

/// What is stated of memory before it is made covers what is made, beside the streams.
#[test]
fn memory_is_as_stated() {
    for lines in [1, 1000, 100_000] {
        for memory in [1, 2, 16] {
            let config = ExpectedReadsConfig { memory, ..ExpectedReadsConfig::default() };
            let setup = BlockSetup { line_bytes: 4096, lines, backing_bytes: 1 << 40, seed: 1 };
            let made = ExpectedReads::new(&config, &setup).memory_bytes() as u128;
            let stated = ExpectedReads::bytes_for(&config, lines);
            assert!(made.abs_diff(stated) < 4 << 10, "{made}, stated {stated}");
        }
    }
}

/// A working set of which each line is read ever again, and lines that are read twice within half a lifetime and never again: nothing
/// that comes in is worth as much as what it would displace, though it is read.
#[test]
fn lines_that_are_read_less_than_those_that_would_leave_are_kept_out() {
    let run = |admission: &str| {
        let mut cache = Cache::new(admission);
        let mut rng = Rng::new(8);
        let mut of_set = (0u64, 0u64);
        for i in 0..300_000u64 {
            if i == 150_000 {
                (of_set, cache.written) = ((0, 0), 0);
            }
            let hits = cache.hits;
            cache.request(BlockOp::Read, rng.below(LINES * 9 / 10) * 37, 1);
            of_set = (of_set.0 + cache.hits - hits, of_set.1 + 1);
            let line = if rng.chance(0.9) { i } else { i.saturating_sub(1 + rng.below(LINES / 8)) };
            cache.request(BlockOp::Read, (1 << 22) + line * 37, 1);
        }
        (of_set.0 as f64 / of_set.1 as f64, cache.written)
    };
    let (free, priced) = (run("expected_reads(least=0,price=0)"), run("expected_reads(least=0)"));
    assert!(free.0 < 0.75 && priced.0 > 0.95, "{priced:?}, without a price {free:?}");
    assert!(priced.1 * 5 < free.1, "{priced:?}, without a price {free:?}");
}

/// A policy that would admit next to nothing fills the cache once: what is seldom read again costs one write, and what is written again
/// and again would cost more.
#[test]
fn the_cache_is_filled_once_with_what_is_not_written_again() {
    let mut cache = Cache::new("expected_reads(least=20)");
    let mut rng = Rng::new(6);
    for n in 0..40 * LINES {
        let line = if rng.chance(0.95) { n } else { n.saturating_sub(100 + rng.below(100)) };
        cache.request(BlockOp::Read, line * 37, 1);
        // Five lines that take turns.
        cache.request(BlockOp::Write, (1 << 24) + n % 5 * 37, 1);
    }
    assert_eq!(
        (cache.used.len() as u64, cache.written),
        (LINES, LINES),
        "each line is written once"
    );
    assert!(!cache.used.contains_key(&(1 << 24)), "what is written all the time is left out");
    let few = cache.admission.verdicts().rejected(Reason::FewReads);
    assert!(few > 70 * LINES, "nothing displaces: {few}");
}
