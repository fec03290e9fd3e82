//! Rivals against models by the shortest means.

use larder_base::Rng;
use larder_trace::{Op, Request};
use proptest::prelude::*;

use super::*;

fn known(rng: &mut Rng, n: usize, ids: u64) -> (Vec<Request>, Known) {
    let requests: Vec<Request> = (0..n)
        .map(|_| {
            let id = rng.below(ids);
            let op = match rng.below(30) {
                0 => Op::Delete,
                1 => Op::Set,
                _ => Op::Get,
            };
            Request { op, ..Request::get(id, 30 + id * 37 % 300) }
        })
        .collect();
    let known = Known::of(&requests).unwrap();
    (requests, known)
}

/// LRU before a log with reinsertion: vectors, and every look-up a scan.
struct Naive {
    sizes: Sizes,
    setting: Setting,
    dram: Vec<u64>,
    log: Vec<Vec<(u64, bool, u8)>>,
    written: u64,
}

fn value(id: u64) -> u64 {
    30 + id * 37 % 300
}

impl Naive {
    fn used(segment: &[(u64, bool, u8)]) -> u64 {
        segment.iter().map(|r| 21 + 16 + value(r.0)).sum()
    }

    fn holds(&self, id: u64) -> bool {
        self.log.iter().flatten().any(|r| r.0 == id && r.1)
    }

    fn remove(&mut self, id: u64) {
        self.dram.retain(|&d| d != id);
        self.log.iter_mut().flatten().filter(|r| r.0 == id).for_each(|r| r.1 = false);
    }

    fn enter(&mut self, id: u64) {
        let dram = |id| (32 + 16 + value(id)).next_multiple_of(8);
        while self.dram.iter().map(|&d| dram(d)).sum::<u64>() + dram(id) > self.sizes.dram {
            let victim = self.dram.pop().unwrap();
            if !self.holds(victim) && self.setting.chance > 0.0 {
                self.write(victim);
            }
        }
        self.dram.insert(0, id);
    }

    fn write(&mut self, id: u64) {
        let room = self.sizes.room();
        while Self::used(self.log.last().unwrap()) + 37 + value(id) > room {
            self.written += u64::from(self.sizes.segment);
            let mut open = Vec::new();
            if self.log.len() > self.sizes.live() {
                for (id, alive, hits) in self.log.remove(0) {
                    if alive && hits > 0 {
                        open.push((id, true, hits - 1));
                    }
                }
            }
            self.log.push(open);
        }
        self.log.last_mut().unwrap().push((id, true, 0));
    }

    fn request(&mut self, r: &Request) -> bool {
        if r.op == Op::Get {
            if let Some(at) = self.dram.iter().position(|&d| d == r.id) {
                let id = self.dram.remove(at);
                self.dram.insert(0, id);
                return true;
            }
            let turns = self.setting.turns;
            if let Some(record) = self.log.iter_mut().flatten().find(|x| x.0 == r.id && x.1) {
                record.2 = (record.2 + 1).min(turns);
                if self.setting.copy {
                    self.enter(r.id);
                }
                return true;
            }
        }
        self.remove(r.id);
        if r.op != Op::Delete {
            self.enter(r.id);
        }
        false
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn fifo_with_reinsertion_agrees_with_a_naive_model(
        seed in any::<u64>(), dram in 450u64..3000, segments in 2u16..7, turns in 0u8..3, copy in any::<bool>(),
    ) {
        let (requests, known) = known(&mut Rng::new(seed), 1500, 60);
        let sizes = Sizes { dram, segment: 1500, segments };
        let setting = Setting { turns, copy, ..Setting::plain(Kind::Clock) };
        let mut naive =
            Naive { sizes, setting, dram: Vec::new(), log: vec![Vec::new()], written: 0 };
        let mut hits = 0;
        for r in &requests {
            hits += u64::from(naive.request(r) && r.op == Op::Get);
        }
        let found = run(&known, sizes, 0, setting, 1);
        prop_assert_eq!((found.hits_dram + found.hits_flash, found.flash_bytes), (hits, naive.written));
    }

    /// Whatever the design and the setting: reads are hits or misses, the same seed does the same, and where nothing passes nothing is written.
    #[test]
    fn designs_keep_account(seed in any::<u64>(), dram in 450u64..3000) {
        let (_, known) = known(&mut Rng::new(seed), 1000, 80);
        let sizes = Sizes { dram, segment: 4096, segments: 6 };
        for kind in Kind::ALL {
            for setting in Setting::grid(kind) {
                let found = run(&known, sizes, 300, setting, 1);
                prop_assert_eq!(found.requests, 700);
                prop_assert!(found.hits_dram + found.hits_flash <= found.gets);
                prop_assert!(found.hit_bytes + found.miss_bytes == found.get_bytes);
                prop_assert_eq!(run(&known, sizes, 300, setting, 1), found);
                if setting.chance == 0.0 {
                    prop_assert_eq!((found.flash_bytes, found.hits_flash), (0, 0));
                }
            }
        }
    }
}

fn of(ids: &[u64]) -> Known {
    let requests: Vec<Request> = ids.iter().map(|&id| Request::get(id, 100)).collect();
    Known::of(&requests).unwrap()
}

/// DRAM for two objects of 152 bytes.
const TWO: Sizes = Sizes { dram: 400, segment: 4096, segments: 4 };

/// Unread objects leave the FIFO for the ghost; one that comes back from there goes to flash at once; one that was read does without.
#[test]
fn s3_fifo_goes_by_reads_and_ghost() {
    let s3 = Setting { reads: 1, window: 1.0, ..Setting::plain(Kind::S3Fifo) };
    // 1 leaves unread when 3 comes, is in the ghost when it comes back, and hits on flash then.
    let found = run(&of(&[1, 2, 3, 1, 1]), TWO, 0, s3, 1);
    assert_eq!((found.hits_dram, found.hits_flash), (0, 1));
    // Without a ghost it would be in DRAM.
    let found = run(&of(&[1, 2, 3, 1, 1]), TWO, 0, Setting { window: 0.0, ..s3 }, 1);
    assert_eq!((found.hits_dram, found.hits_flash), (1, 0));
    // 1 was read in DRAM: it goes to flash when it leaves.
    let found = run(&of(&[1, 1, 2, 3, 1]), TWO, 0, s3, 1);
    assert_eq!((found.hits_dram, found.hits_flash), (1, 1));
}

#[test]
fn reject_first_admits_the_second_time() {
    let reject = Setting { window: 1.0, ..Setting::plain(Kind::RejectFirst) };
    // 1 leaves when 3 comes, is forgotten; it leaves again when 5 comes, and is found on flash.
    let found = run(&of(&[1, 2, 3, 1, 4, 5, 1]), TWO, 0, reject, 1);
    assert_eq!((found.hits_dram, found.hits_flash), (0, 1));
    let none = run(&of(&[1, 2, 3, 1, 4, 5, 1]), TWO, 0, Setting { window: 0.0, ..reject }, 1);
    assert_eq!(none.hits_flash, 0);
}

/// Sets are written only for as many objects as the threshold says: the higher, the fewer bytes.
#[test]
fn kangaroo_writes_sets_for_several_objects() {
    let drawn = |n: usize, ids: u64| {
        let mut rng = Rng::new(5);
        let all: Vec<Request> = (0..n).map(|_| Request::get(rng.below(ids), 100)).collect();
        Known::of(&all).unwrap()
    };
    let kangaroo = Setting { turns: 1, ..Setting::plain(Kind::Kangaroo) };
    // 2,400 objects of 137 bytes fit into 80 sets of a flash of 100 segments; the log holds 5 of these.
    let many = drawn(60_000, 20_000);
    let sizes = Sizes { dram: 20_000, segment: 4 << 10, segments: 100 };
    let with = |log, together| run(&many, sizes, 0, Setting { log, together, ..kangaroo }, 1);
    let [one, two, four] = [1, 2, 4].map(|together| with(0.05, together));
    assert!(one.flash_bytes > two.flash_bytes && two.flash_bytes > four.flash_bytes);
    assert!(one.hits_flash > four.hits_flash && four.hits_flash > 0, "{one:?} {four:?}");
    // A log that is all of the flash, with sets that are never written, is a log.
    let few = drawn(20_000, 2000);
    let sizes = Sizes { dram: 20_000, segment: 4 << 10, segments: 40 };
    let setting = Setting { log: 1.0, together: usize::MAX, ..kangaroo };
    let nearly = run(&few, sizes, 0, setting, 1);
    let log = run(&few, sizes, 0, Setting { turns: 1, ..Setting::plain(Kind::Clock) }, 1);
    let off = nearly.hits_flash.abs_diff(log.hits_flash) as f64 / log.hits_flash as f64;
    assert!(off < 0.02, "{nearly:?} {log:?}");
}

#[test]
fn hulls_mix_settings() {
    let points = [(0.0, 0.9), (100.0, 0.5), (50.0, 0.8)];
    assert_eq!(hull_at(&points, 100.0), Some(0.5));
    assert_eq!(hull_at(&points, 1e9), Some(0.5));
    // On the line from the first to the second, which is below the third.
    assert!((hull_at(&points, 50.0).unwrap() - 0.7).abs() < 1e-12);
    assert_eq!(hull_at(&points, 0.0), Some(0.9));
    assert_eq!(hull_at(&points[1..], 40.0), None);
}
