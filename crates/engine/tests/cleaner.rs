//! What the cleaner does where memory is short when it comes.

use std::sync::Arc;

use larder_base::{
    AppId, ByteSize, Expiry, HashKey, KeyHasher, Nanos, Now, ObjectHash, UnixSecs, Words,
};
use larder_engine::index::FlashIndex;
use larder_engine::kv::api::{
    Effects, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_engine::kv::{
    ClockMode, FlashGeometry, FlashLog, IoFailed, KvShard, LogConfig, SegmentIo, SegmentTable,
    ShardConfig, Shards, Step,
};
use larder_policy::admission::{Admission, AdmissionConfig, Setup};
use larder_policy::budget::{WriteBudget, WriteBudgetConfig};

const SEGMENTS: u16 = 32;
const SEGMENT_BYTES: u32 = 256 << 10;
const ARENA: usize = 6 << 20;
const NOW: Now = Now { mono: Nanos::from_secs(1), wall: UnixSecs(1_000_000) };

struct Quiet;

impl Effects for Quiet {
    fn reply(&mut self, reply: Reply<'_>) {
        assert!(!matches!(reply, Reply::OutOfMemory), "out of memory");
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

struct One(KvShard);

impl Shards for One {
    fn count(&self) -> usize {
        1
    }
    fn shard_of(&self, _: ObjectHash) -> usize {
        0
    }
    fn with<R>(&mut self, _: usize, f: impl FnOnce(&mut KvShard) -> R) -> R {
        f(&mut self.0)
    }
}

fn hasher() -> KeyHasher {
    KeyHasher::new(HashKey([3; 16]))
}

fn shard() -> One {
    let flash = FlashGeometry { salt: 1, segments: SEGMENTS, segment_bytes: SEGMENT_BYTES };
    let setup = Setup { memory: 64 << 10, seed: 1, objects: 1000, share: 1.0, budget_rate: None };
    let admission = Admission::new(&AdmissionConfig::from_name("all").unwrap(), &setup).unwrap();
    let config = ShardConfig {
        arena_bytes: ARENA,
        max_object: 1 << 20,
        no_eviction: false,
        clock_mode: ClockMode::SetMax,
        clock_max: 3,
        free_low: 1 << 20,
        free_high: 3 << 19,
        flash,
        shards: 1,
        flash_min_record: 0,
        cas_base: 0,
        access_times: 16,
        shares: Arc::default(),
        hasher: hasher(),
    };
    let words = Words::heap(FlashIndex::words_for(FlashIndex::buckets_for(20_000)));
    One(KvShard::new(config, admission, words).unwrap())
}

fn log() -> FlashLog<Vec<u8>> {
    let flash = FlashGeometry { salt: 1, segments: SEGMENTS, segment_bytes: SEGMENT_BYTES };
    let config = LogConfig {
        flash,
        hot_percent: 70,
        reinsert_percent: 20,
        retry_after: Nanos::from_secs(5),
    };
    let table = SegmentTable::create(Words::heap(SegmentTable::words_for(SEGMENTS)));
    let budget = WriteBudget::new(
        &WriteBudgetConfig::default(),
        ByteSize(flash.capacity()),
        None,
        Nanos::ZERO,
    )
    .unwrap();
    FlashLog::new(config, table, budget, vec![vec![0; SEGMENT_BYTES as usize]; 3])
}

fn set(shards: &mut One, key: u64, value: &[u8]) {
    set_until(shards, key, value, Expiry::NEVER);
}

fn set_until(shards: &mut One, key: u64, value: &[u8], expiry: Expiry) {
    let key = key.to_le_bytes();
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
    let hash = hasher().hash(&key);
    let request = Request { key: &key, hash, app: AppId::DEFAULT, op: Op::Store(store) };
    assert_eq!(shards.0.execute(NOW, &request, None, &mut Quiet), Outcome::Done);
}

/// Fills DRAM before the cleaner comes, lets it work, and returns how many were set, and evicted by the cleaner, and the
/// bytes of records written over those of segments.
fn flood(value: usize) -> (u64, u64, f64) {
    let (mut shards, mut log) = (shard(), log());
    let value = vec![b'v'; value];
    let (mut key, mut by_cleaner) = (0, 0);
    for _ in 0..8 {
        // Until little is left: a real cleaner comes late when processors are busy.
        while shards.0.dram_free_bytes() > 128 << 10 {
            set(&mut shards, key, &value);
            key += 1;
        }
        let before = shards.0.stats().evictions;
        while log.step(NOW, &mut shards, &mut Sponge) == Step::Worked {}
        by_cleaner += shards.0.stats().evictions - before;
        shards.0.validate().unwrap();
    }
    assert_eq!(shards.0.stats().evictions_direct, 0);
    let s = log.stats();
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
    let (mut shards, mut log) = (shard(), log());
    // One object in ten is never read; what is staged of them, for a segment that is not full yet, lies between the others.
    let (hot, cold) = (vec![b'h'; 10_000], vec![b'c'; 2_000]);
    let mut key = 0;
    while shards.0.dram_free_bytes() > 256 << 10 {
        set(&mut shards, key, if key % 10 == 0 { &cold } else { &hot });
        key += 1;
    }
    for key in (0..key).filter(|key| key % 10 != 0) {
        let key = key.to_le_bytes();
        let op = Op::Get(Get::default());
        let request = Request { key: &key, hash: hasher().hash(&key), app: AppId::DEFAULT, op };
        assert_eq!(shards.0.execute(NOW, &request, None, &mut Quiet), Outcome::Done);
    }
    let free = shards.0.dram_free_bytes();
    shards.0.set_marks(free + 1, free + (key as usize / 10 - 5) * cold.len());
    while log.step(NOW, &mut shards, &mut Sponge) == Step::Worked {}
    assert_eq!((log.stats().segments_written, shards.0.stats().evictions), (0, 0));
    // Longer than what lies between any two of them, as large as objects may be. It is stored: `Quiet` looks.
    set(&mut shards, u64::MAX, &vec![b'l'; 1_000_000]);
    shards.0.validate().unwrap();
    // What the large one displaced is nowhere; what it did not is published, and nothing else.
    let before = shards.0.dram_objects();
    log.drain(NOW, &mut shards, &mut Sponge);
    shards.0.validate().unwrap();
    assert!(shards.0.dram_objects() < before && !shards.0.index().is_empty());
}

#[test]
fn expired_objects_leave_though_nobody_asks() {
    let mut shards = shard();
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
        while shards.0.expire(now, all) {}
        shards.0.validate().unwrap();
        shards.0.dram_objects()
    };
    // Nothing can have expired: nothing is looked at.
    assert!(!shards.0.expire(later(1), false) && !shards.0.is_expiring());
    assert_eq!(all_gone(&mut shards, later(2), false), 3_750);
    // What is touched down is found too, and a pass that was asked for looks at everything.
    set_until(&mut shards, 2, b"other", Expiry(NOW.wall.0 + 5));
    assert_eq!(all_gone(&mut shards, later(4), true), 3_750);
    assert_eq!(all_gone(&mut shards, later(5), false), 3_749);
    assert_eq!(all_gone(&mut shards, later(1_000), false), 1_250);
    assert_eq!(shards.0.expired_unasked(), 3_750);
    assert_eq!(shards.0.stats().evictions, 0);
}

/// A write that finds no room takes what admission was never asked about: that is counted, for an operator to see.
#[test]
fn what_leaves_dram_unjudged_is_counted() {
    let mut shards = shard();
    let value = vec![b'v'; 1000];
    // The cleaner never comes.
    for key in 0..20_000 {
        set(&mut shards, key, &value);
    }
    let s = *shards.0.stats();
    assert!(s.evictions > 5_000 && s.evictions_unjudged == s.evictions, "{s:?}");
}
