//! What the cleaner does where memory is short when it comes.

use std::ops::DerefMut;

use larder_base::lock::Single;
use larder_base::{AppId, Expiry, Nanos, Now, UnixSecs};
use larder_engine::index::FlashIndex;
use larder_engine::kv::api::{
    Delete, Effects, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_engine::kv::node::{Maintenance, MaintenanceEffects, Node, StateIo, Turn};
use larder_engine::kv::record::{
    AppsSetup, LogSetup, RecordedShard, RunSetup, ShardSeed, ShardSetup,
};
use larder_engine::kv::{IndexFull, IoFailed, SegmentIo};
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::{BudgetState, WriteBudgetConfig};
use larder_policy::learn::TrainingSet;

const SEGMENTS: u16 = 32;
const SEGMENT_BYTES: u32 = 256 << 10;
const ARENA: u64 = 6 << 20;
const NOW: Now = Now { mono: Nanos::from_secs(1), wall: UnixSecs(1_000_000) };

struct Quiet;

impl Effects for Quiet {
    fn reply(&mut self, reply: Reply<'_>) {
        assert!(!matches!(reply, Reply::OutOfMemory), "out of memory");
    }
    fn verify(&mut self, _: FlashRead) {}
    fn wake_cleaner(&mut self) {}
}

/// Whether a get found something.
struct Found(bool);

impl Effects for Found {
    fn reply(&mut self, reply: Reply<'_>) {
        self.0 = matches!(reply, Reply::Item(_));
    }
    fn verify(&mut self, _: FlashRead) {}
    fn wake_cleaner(&mut self) {}
}

/// Takes everything, keeps nothing.
struct Sponge;

impl SegmentIo for Sponge {
    type Buffer = Vec<u8>;
    fn write(&mut self, _: u16, _: &[u8]) -> Result<(), IoFailed> {
        Ok(())
    }
    fn read(&mut self, _: u16, _: &mut [u8]) -> Result<(), IoFailed> {
        Err(IoFailed)
    }
}

impl StateIo for Sponge {
    fn keep_names(&mut self, _: &[Vec<u8>]) -> bool {
        true
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

/// Notes when the flash index is said to be too small, and when it is not any more.
#[derive(Default)]
struct Told(Vec<Option<IndexFull>>);

impl MaintenanceEffects for Told {
    fn train(&mut self, _: TrainingSet, _: u64) {}
    fn index_full(&mut self, full: Option<IndexFull>) {
        self.0.push(full);
    }
}

/// A node of one shard, and its maintenance.
struct One {
    node: Node<Single>,
    maintenance: Maintenance<Vec<u8>>,
    told: Told,
}

impl One {
    fn new() -> One {
        One::with("all")
    }

    fn with(policy: &str) -> One {
        let setup = RunSetup {
            kv: RunSetup::VERSION,
            larder: String::new(),
            uuid: String::new(),
            hash_key: [3; 16],
            salt: 1,
            segments: SEGMENTS,
            segment_bytes: SEGMENT_BYTES,
            drives: Vec::new(),
            shard: ShardSetup {
                arena_bytes: ARENA,
                max_object: 1 << 20,
                no_eviction: false,
                clock_increment: false,
                clock_max: 3,
                free_low: 1 << 20,
                free_high: 3 << 19,
                flash_min_record: 0,
                access_times: 16,
                buckets: FlashIndex::buckets_for(20_000),
                index_most: 0,
                admission_memory: 64 << 10,
                objects: 32_000,
                share_bits: 1f64.to_bits(),
                budget_rate_bits: None,
            },
            shards: vec![ShardSeed { cas_base: 0, seed: 1 }],
            admission: AdmissionConfig {
                first_fill: false,
                ..AdmissionConfig::from_name(policy).unwrap()
            },
            applications: AppsSetup::default(),
            log: Some(LogSetup {
                hot_percent: 70,
                reinsert_percent: 20,
                retry_after: Nanos::from_secs(5).0,
                generation_floor: 0,
                budget: WriteBudgetConfig::default(),
                budget_state: None,
                budget_at: 0,
            }),
        };
        let node = Node::new(&setup, None, [setup.build_shard(0).unwrap()]).unwrap();
        let maintenance = Maintenance::new(&node, setup.build_log().unwrap(), 1, 0);
        One { node, maintenance, told: Told::default() }
    }

    fn shard(&self) -> impl DerefMut<Target = RecordedShard> + '_ {
        self.node.lock(0)
    }

    fn clean(&mut self) {
        let One { node, maintenance, told } = self;
        while maintenance.turn(NOW, node, &mut Sponge, told) == Turn::Again {}
    }
}

fn set(shards: &mut One, key: u64, value: &[u8]) {
    set_until(shards, key, value, Expiry::NEVER);
}

fn op(shards: &mut One, key: u64, op: Op<'_>, fx: &mut impl Effects) {
    let key = key.to_le_bytes();
    let hash = shards.node.hash(&key);
    let request = Request { key: &key, hash, app: AppId::DEFAULT, op };
    assert_eq!(shards.node.execute(NOW, &request, None, fx), Outcome::Done);
}

fn get(shards: &mut One, key: u64) -> bool {
    let mut found = Found(false);
    op(shards, key, Op::Get(Get::default()), &mut found);
    found.0
}

fn set_until(shards: &mut One, key: u64, value: &[u8], expiry: Expiry) {
    let store = Store {
        mode: StoreMode::Set,
        value,
        flags: 0,
        expiry,
        compare_cas: None,
        new_cas: None,
        invalidate: false,
        vivify: None,
    };
    op(shards, key, Op::Store(store), &mut Quiet);
}

/// Fills DRAM before the cleaner comes, lets it work, and returns how many were set, and evicted by the cleaner, and the
/// bytes of records written over those of segments.
fn flood(value: usize) -> (u64, u64, f64) {
    let mut shards = One::new();
    let value = vec![b'v'; value];
    let (mut key, mut by_cleaner) = (0, 0);
    for _ in 0..8 {
        // Until little is left: a real cleaner comes late when processors are busy.
        while shards.shard().dram_free_bytes() > 128 << 10 {
            set(&mut shards, key, &value);
            key += 1;
        }
        let before = shards.shard().stats().evictions;
        shards.clean();
        by_cleaner += shards.shard().stats().evictions - before;
        shards.shard().validate().unwrap();
    }
    assert_eq!(shards.shard().stats().evictions_direct, 0);
    let s = *shards.maintenance.log().unwrap().stats();
    (key, by_cleaner, s.record_bytes_written as f64 / s.bytes_written.max(1) as f64)
}

#[test]
fn what_is_wanted_on_flash_is_not_evicted_while_its_segment_is_full() {
    // Twelve of the first fill a segment, two of the second, and pages of small ones fill up one by one.
    for (value, least_fill) in [(20_000, 0.9), (100_000, 0.7), (257, 0.93), (1_000, 0.9)] {
        let (set, evicted, fill) = flood(value);
        assert_eq!(evicted, 0, "values of {value}: {evicted} of {set} evicted");
        assert!(fill > least_fill, "values of {value}: segments filled to {fill:.3}");
    }
}

#[test]
fn a_set_finds_room_though_what_is_staged_lies_everywhere() {
    let mut shards = One::new();
    // One object in ten is never read; what is staged of them, for a segment that is not full yet, lies between the others.
    let (hot, cold) = (vec![b'h'; 10_000], vec![b'c'; 2_000]);
    let mut key = 0;
    while shards.shard().dram_free_bytes() > 256 << 10 {
        set(&mut shards, key, if key % 10 == 0 { &cold } else { &hot });
        key += 1;
    }
    for key in (0..key).filter(|key| key % 10 != 0) {
        get(&mut shards, key);
    }
    let free = shards.shard().dram_free_bytes();
    shards.shard().unrecorded().set_marks(free + 1, free + (key as usize / 10 - 5) * cold.len());
    shards.clean();
    assert_eq!(
        (
            shards.maintenance.log().unwrap().stats().segments_written,
            shards.shard().stats().evictions
        ),
        (0, 0)
    );
    // Longer than what lies between any two of them, as large as objects may be. It is stored: `Quiet` looks.
    set(&mut shards, u64::MAX, &vec![b'l'; 1_000_000]);
    shards.shard().validate().unwrap();
    // What the large one displaced is nowhere; what it did not is published, and nothing else.
    let before = shards.shard().dram_objects();
    let One { node, maintenance, .. } = &mut shards;
    maintenance.drain(NOW, node, &mut Sponge);
    shards.shard().validate().unwrap();
    assert!(shards.shard().dram_objects() < before);
    assert!(!shards.shard().index().is_empty());
}

#[test]
fn expired_objects_leave_though_nobody_asks() {
    let mut shards = One::new();
    for key in 0..5_000u64 {
        let expiry = match key % 4 {
            0 => Expiry::NEVER,
            1 => Expiry(NOW.wall.0 + 2),
            _ => Expiry(NOW.wall.0 + 1_000),
        };
        set_until(&mut shards, key, b"value", expiry);
    }
    let later = |seconds: u32| Now {
        mono: NOW.mono + Nanos::from_secs(u64::from(seconds)),
        wall: UnixSecs(NOW.wall.0 + seconds),
    };
    let all_gone = |shards: &mut One, now: Now, all: bool| {
        while shards.shard().expire(now, all) {}
        shards.shard().validate().unwrap();
        shards.shard().dram_objects()
    };
    // Nothing can have expired: nothing is looked at.
    assert!(!shards.shard().expire(later(1), false));
    assert!(!shards.shard().is_expiring());
    assert_eq!(all_gone(&mut shards, later(2), false), 3_750);
    // What is touched down is found too, and a pass that was asked for looks at everything.
    set_until(&mut shards, 2, b"other", Expiry(NOW.wall.0 + 5));
    assert_eq!(all_gone(&mut shards, later(4), true), 3_750);
    assert_eq!(all_gone(&mut shards, later(5), false), 3_749);
    assert_eq!(all_gone(&mut shards, later(1_000), false), 1_250);
    assert_eq!(shards.shard().expired_unasked(), 3_750);
    assert_eq!(shards.shard().stats().evictions, 0);
}

/// A write that finds no room asks admission about what it displaces. What is rejected is evicted and known from then on; what is
/// wanted stays for the cleaner.
#[test]
fn what_a_write_displaces_is_judged() {
    let mut shards = One::with("reject_first");
    let value = vec![b'v'; 1000];
    // The cleaner never comes.
    for key in 0..15_000 {
        set(&mut shards, key, &value);
    }
    let s = *shards.shard().stats();
    assert!(s.evictions > 8_500 && s.evictions_direct == s.evictions, "{s:?}");
    // Of the few keys that a filter takes for seen, more than are kept for the cleaner are lost.
    assert!(s.evictions_unjudged * 12 < s.evictions, "{s:?}");
    shards.shard().validate().unwrap();
    // They come back, and the cleaner is in time: their second time counts.
    for key in 0..8_500 {
        set(&mut shards, key, &value);
        if key % 16 == 0 {
            shards.clean();
        }
    }
    let then = *shards.shard().stats();
    assert!(then.flash_written_objects > 2_000, "{then:?}");
    assert!(then.evictions_unjudged - s.evictions_unjudged < 50, "{s:?} {then:?}");
    shards.shard().validate().unwrap();
}

/// What admission wanted when a write would have displaced it is there for the cleaner, and goes to flash without being asked about
/// again.
#[test]
fn what_is_wanted_is_spared_for_the_cleaner() {
    let mut shards = One::new();
    let value = vec![b'v'; 1000];
    let mut key = 0;
    while shards.shard().stats().evictions == 0 {
        set(&mut shards, key, &value);
        key += 1;
    }
    // The first write without room spared as many as it may, then took one.
    let s = *shards.shard().stats();
    assert_eq!((s.evictions, s.evictions_unjudged), (1, 1));
    shards.clean();
    assert!(shards.shard().stats().flash_written_objects > 200);
    shards.shard().validate().unwrap();
}

/// What is wanted on flash and finds no room in the segments that are open waits for the next, and admission is not asked about it again:
/// a policy that draws lots would have it draw until it loses, and one that holds a rate would be charged twice.
#[test]
fn what_waits_for_a_segment_is_not_judged_again() {
    let mut shards = One::with("probability");
    let value = vec![b'v'; 1000];
    for key in 0..300_000 {
        set(&mut shards, key, &value);
        if key % 300 == 0 {
            shards.clean();
        }
    }
    let s = *shards.shard().stats();
    let judged = s.flash_written_objects + s.evictions - s.evictions_unjudged;
    let share = s.flash_written_objects as f64 / judged as f64;
    // One in two, whose standard deviation is 0.1 %, less what waits for a segment at the end: up to 1.4 %. (0.40 where it is asked again.)
    assert!((share - 0.5).abs() < 0.02, "{share}: {s:?}");
    shards.shard().validate().unwrap();
}

/// Where memory is free, but in pieces, a large object gets a run of it by moving what lies between: nothing is evicted for it.
#[test]
fn a_large_object_finds_room_that_is_free_in_pieces() {
    let mut shards = One::new();
    let mut key = 0;
    while shards.shard().dram_free_bytes() > 8 << 10 {
        set(&mut shards, key, &[b'v'; 300]);
        key += 1;
    }
    // Two holes in three objects, none next to more than one other: 3 MB free, and no run of a kilobyte.
    let kept: Vec<u64> = (0..key).filter(|key| key % 3 == 0).collect();
    (0..key).filter(|key| key % 3 != 0).for_each(|key| {
        op(&mut shards, key, Op::Delete(Delete::default()), &mut Quiet);
    });
    shards.shard().validate().unwrap();
    for large in 0..20 {
        set(&mut shards, key + large, &[b'w'; 40_000]);
        shards.shard().validate().unwrap();
    }
    let s = *shards.shard().stats();
    assert_eq!((s.evictions, shards.shard().dram_objects()), (0, kept.len() + 20), "{s:?}");
    for key in kept {
        assert!(get(&mut shards, key), "{key} is gone");
    }
}

/// A write that finds no room takes what admission wants, where the cleaner does not come: that is counted, for an operator to see.
#[test]
fn what_leaves_dram_unjudged_is_counted() {
    let mut shards = One::new();
    let value = vec![b'v'; 1000];
    // The cleaner never comes.
    for key in 0..20_000 {
        set(&mut shards, key, &value);
    }
    let s = *shards.shard().stats();
    assert!(s.evictions > 5_000 && s.evictions_unjudged == s.evictions, "{s:?}");
}

/// An index that was sized for larger objects than come loses some of what is on flash: that is told at once, with the size that would
/// do, and when it is over.
#[test]
fn a_flash_index_that_is_too_small_is_told() {
    let mut shards = One::new();
    let fill = |shards: &mut One, keys: std::ops::Range<u64>, value: usize| {
        let value = vec![b'v'; value];
        for key in keys {
            set(shards, key, &value);
            if key % 16 == 0 {
                shards.clean();
            }
        }
    };
    // 7,000 find room on flash, and the index has some for 20,000.
    fill(&mut shards, 0..15_000, 1000);
    assert!(shards.told.0.is_empty() && shards.node.index_full().is_none());
    // Some 40,000 would.
    let before = *shards.shard().stats();
    fill(&mut shards, 100_000..200_000, 150);
    let s = *shards.shard().stats();
    assert!(s.forced_evictions > 5_000, "{s:?}");
    let full = shards.node.index_full().unwrap();
    assert!((300..500).contains(&full.sized_for), "{full:?}");
    let objects = s.flash_written_objects - before.flash_written_objects;
    let mean = (s.flash_written_bytes - before.flash_written_bytes) / objects;
    assert!(full.fits.abs_diff(mean) < mean / 5 && full.lost > 0.2, "{full:?}, {mean}");
    assert_eq!(shards.node.totals(NOW.mono).index_full, Some(full));
    assert!(shards.told.0.len() == 1 && shards.told.0[0].is_some(), "{:?}", shards.told.0);
    fill(&mut shards, 300_000..360_000, 1000);
    assert!(shards.node.index_full().is_none());
    assert!(shards.told.0.len() == 2 && shards.told.0[1].is_none(), "{:?}", shards.told.0);
    shards.shard().validate().unwrap();
}
