//! What a node's maintenance does beside the requests, turn by turn.

use larder_base::lock::Single;
use larder_base::{AppId, Expiry, HashKey, Nanos, Now, UnixSecs};
use larder_engine::index::FlashIndex;
use larder_engine::kv::api::{
    Arith, Delete, Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_engine::kv::node::{
    AdmissionNeed, Cache, LogStart, Maintenance, MaintenanceEffects, Node, Plan, Start, StateIo,
    Turn, defaults, run_setup,
};
use larder_engine::kv::record::{AppsSetup, RunSetup, SetupError};
use larder_engine::kv::{Drives, FlashGeometry, IndexSteps, IoFailed, SegmentIo};
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::BudgetState;
use larder_policy::learn::TrainingSet;

const MAX_ITEM: u64 = 64 << 10;

/// A device in memory, and what is kept beside it.
#[derive(Default)]
struct Disk {
    segments: Vec<Vec<u8>>,
    names: Vec<Vec<u8>>,
    /// Segments written when names were kept last.
    names_at: u64,
    written: u64,
    /// Names cannot be kept.
    is_full: bool,
}

impl SegmentIo for Disk {
    type Buffer = Vec<u8>;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.segments.resize(self.segments.len().max(usize::from(segment) + 1), Vec::new());
        self.segments[usize::from(segment)] = bytes.to_vec();
        self.written += 1;
        Ok(())
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        bytes.copy_from_slice(&self.segments[usize::from(segment)]);
        Ok(())
    }
}

impl Disk {
    fn at(&self, read: &FlashRead) -> Vec<u8> {
        let behind = self.segments[usize::from(read.at.segment)..].iter().flatten();
        behind.skip(read.at.offset as usize).take(read.at.len as usize).copied().collect()
    }
}

impl StateIo for Disk {
    fn keep_names(&mut self, names: &[Vec<u8>]) -> bool {
        if !self.is_full {
            (self.names, self.names_at) = (names.to_vec(), self.written);
        }
        !self.is_full
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

#[derive(Default)]
struct Fx {
    followed: Vec<u64>,
    refused: u32,
}

impl MaintenanceEffects for Fx {
    fn train(&mut self, _: TrainingSet, _: u64) {}
    fn memory_followed(&mut self, limit: u64) {
        self.followed.push(limit);
    }
    fn memory_refused(&mut self, _: u64, _: larder_engine::kv::node::MemoryError) {
        self.refused += 1;
    }
}

#[derive(Default)]
struct Sink {
    hit: bool,
    /// Of an item: its value, flags and CAS, and whether it is stale.
    item: Option<(Vec<u8>, u32, u64, bool)>,
    woken: bool,
    verifies: Vec<FlashRead>,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        self.hit = matches!(reply, Reply::Item(_));
        self.item = match reply {
            Reply::Item(i) => Some((i.value.to_vec(), i.flags, i.cas, i.stale)),
            _ => None,
        };
    }
    fn verify(&mut self, read: FlashRead) {
        self.verifies.push(read);
    }
    fn wake_cleaner(&mut self) {
        self.woken = true;
    }
}

struct Site {
    node: Node<Single>,
    maintenance: Maintenance<Vec<u8>>,
    disk: Disk,
    fx: Fx,
    now: Now,
    plan: Plan,
}

fn setup(memory: u64, flash: Option<u64>) -> (RunSetup, Plan) {
    let (setup, plan) = setup_from(0, memory, flash);
    (setup.unwrap(), plan)
}

/// The same with CAS uniques from `cas_base` on.
fn setup_from(
    cas_base: u64,
    memory: u64,
    flash: Option<u64>,
) -> (Result<RunSetup, SetupError>, Plan) {
    setup_for(cas_base, memory, flash, 1024)
}

/// The same for objects of this size.
fn setup_for(
    cas_base: u64,
    memory: u64,
    flash: Option<u64>,
    object: u32,
) -> (Result<RunSetup, SetupError>, Plan) {
    let admission = AdmissionConfig::from_name("all").unwrap();
    let geometry = flash.map(|flash| Plan::geometry(memory, flash, MAX_ITEM).unwrap());
    let of = geometry.as_ref().map(|geometry| (geometry, object));
    let plan = Plan::new(memory, MAX_ITEM, of, AdmissionNeed::of(&admission)).unwrap();
    let cache = Cache {
        max_item: MAX_ITEM as u32,
        no_eviction: false,
        clock_mode: defaults::CLOCK_MODE,
        clock_max: 3,
        hot_percent: defaults::HOT_PERCENT,
        reinsert_percent: defaults::REINSERT_PERCENT,
        admission,
        budget: Default::default(),
        applications: AppsSetup::default(),
    };
    let (segments, segment_bytes) =
        geometry.map_or((0, 4096), |g| (g.segments(), g.segment_bytes()));
    let start = Start {
        larder: String::new(),
        uuid: String::new(),
        hash_key: HashKey([7; 16]),
        cas_base,
        cas_bits: 44,
        seed: 1,
        flash: FlashGeometry { salt: 1, segments, segment_bytes, drives: Drives::ONE },
        log: flash.map(|_| LogStart::default()),
    };
    (run_setup(&cache, &plan, &start), plan)
}

impl Site {
    fn new(memory: u64, flash: Option<u64>) -> Site {
        let (setup, plan) = setup(memory, flash);
        Site::of(&setup, plan)
    }

    fn of(setup: &RunSetup, plan: Plan) -> Site {
        let shards = (0..plan.shards).map(|i| setup.build_shard(i).unwrap());
        let node = Node::new(setup, Some(plan), shards).unwrap();
        let maintenance = Maintenance::new(&node, setup.build_log().unwrap(), 1, 0);
        let now = Now { mono: Nanos::from_secs(1), wall: UnixSecs(1_000_000) };
        Site { node, maintenance, disk: Disk::default(), fx: Fx::default(), now, plan }
    }

    fn execute(&mut self, key: &str, op: Op<'_>) -> Sink {
        let key = key.as_bytes();
        let request = Request { key, hash: self.node.hash(key), app: self.node.app(key), op };
        let mut sink = Sink::default();
        let outcome = self.node.execute(self.now, &request, None, &mut sink);
        assert!(outcome == Outcome::Done || matches!(op, Op::Get(_)));
        sink
    }

    fn set(&mut self, key: &str, value: &[u8], expiry: Expiry) -> Sink {
        self.execute(
            key,
            Op::Store(Store {
                mode: StoreMode::Set,
                value,
                flags: 0,
                expiry,
                compare_cas: None,
                new_cas: None,
                invalidate: false,
                vivify: None,
            }),
        )
    }

    /// Reads a key that is on flash; false where it is not there.
    fn get_from_flash(&mut self, key: &str) -> bool {
        let key = key.as_bytes();
        let op = Op::Get(Get::default());
        let request = Request { key, hash: self.node.hash(key), app: self.node.app(key), op };
        let (mut sink, mut read) = (Sink::default(), None);
        loop {
            let bytes = read.as_ref().map(|r: &FlashRead| self.disk.at(r));
            let fetched = read.as_ref().map(|read| Fetched { read, bytes: bytes.as_deref() });
            match self.node.execute(self.now, &request, fetched, &mut sink) {
                Outcome::Done => return read.is_some() && sink.hit,
                Outcome::Read(next) => read = Some(next),
            }
        }
    }

    fn turn(&mut self) -> Turn {
        let Site { node, maintenance, disk, fx, now, .. } = self;
        maintenance.turn(*now, node, disk, fx)
    }

    fn rest(&mut self) -> Nanos {
        loop {
            if let Turn::At(at) = self.turn() {
                return at;
            }
        }
    }

    /// Fills DRAM, with maintenance coming whenever it is called.
    fn fill(&mut self, from: u64, keys: u64) {
        self.fill_with(from, keys, 1000);
    }

    fn fill_with(&mut self, from: u64, keys: u64, value: usize) {
        let value = vec![b'v'; value];
        for key in from..from + keys {
            let sink = self.set(&format!("a{}:key{key}", key % 3), &value, Expiry::NEVER);
            for read in sink.verifies {
                self.node.verify(self.now, &read, None);
            }
            if sink.woken {
                self.maintenance.wake();
                self.rest();
            }
        }
    }

    fn held(&self) -> Vec<usize> {
        (0..self.node.shards()).map(|i| self.node.lock(i).object_memory_held()).collect()
    }
}

#[test]
fn room_is_kept_ahead_of_writes_with_flash_and_without() {
    for flash in [None, Some(16 << 20)] {
        let mut site = Site::new(4 << 20, flash);
        site.fill(0, 20_000);
        let all = site.node.totals(site.now.mono);
        assert_eq!(all.shards.evictions_direct, 0, "{flash:?}");
        assert_eq!(all.shards.evictions == 0, flash.is_some(), "{flash:?}: {:?}", all.shards);
        assert_eq!(all.log.map(|log| log.stats.segments_written), flash.map(|_| site.disk.written));
        site.node.validate().unwrap();
        // Nothing is left to do until the next look.
        let at = site.rest();
        assert!(at > site.now.mono && at <= site.now.mono + Nanos::from_secs(1));
    }
}

/// Of the times of reads few are known. What was read once is judged again all the same when its segment is reclaimed.
#[test]
fn what_was_read_once_on_flash_comes_back() {
    let (mut setup, plan) = setup(4 << 20, Some(16 << 20));
    setup.shard.access_times = 4;
    let mut site = Site::of(&setup, plan);
    site.fill(0, 8_000);
    let reads = |key: &u64| site.get_from_flash(&format!("a{}:key{key}", key % 3));
    let read = (0..4_000).step_by(4).filter(reads).count() as u64;
    assert!(read > 900, "{read} are on flash");
    site.fill(100_000, 14_000);
    site.node.validate().unwrap();
    let s = site.node.totals(site.now.mono).shards;
    assert!(s.flash_dropped > 2_000, "{s:?}");
    // The hand has passed some of them, which are lost. By their times four of each shard would be known.
    let back = s.reinserted;
    assert!(back > read / 3 && back < read + read / 10, "{back} of {read} came back");
}

/// A record bears the number of its application: what that stands for is kept before.
/// Objects on flash of so many that were set, the share of those that came to flash for which another was lost, steps of the index, and
/// bytes of objects and index.
fn index_after(site: &mut Site, from: u64, keys: u64, value: usize) -> (u64, f64, IndexSteps, u64) {
    let before = site.node.totals(site.now.mono).shards;
    site.fill_with(from, keys, value);
    site.node.validate().unwrap();
    let all = site.node.totals(site.now.mono);
    let forced = all.shards.forced_evictions - before.forced_evictions;
    let written = all.shards.flash_written_objects - before.flash_written_objects;
    let bytes = (0..site.node.shards()).map(|i| {
        let shard = site.node.lock(i);
        shard.object_memory_held() as u64 + shard.index().memory_bytes()
    });
    (all.flash_objects, forced as f64 / written as f64, all.index_steps, bytes.sum())
}

/// Objects are a third as large as was said: without growth most of the flash is lost to forced evictions.
#[test]
fn the_index_follows_the_objects() {
    let (memory, flash) = (8 << 20, 24 << 20);
    let (setup, plan) = setup_for(0, memory, Some(flash), 280);
    let mut setup = setup.unwrap();
    let given = (plan.shards * plan.arena_bytes) as u64
        + (plan.shards * (FlashIndex::words_for(plan.buckets) * 8 + 256)) as u64;
    let keys = 3 * flash / 97;
    let mut grows = Site::of(&setup, plan);
    let (objects, lost, steps, bytes) = index_after(&mut grows, 0, keys, 62);
    setup.shard.index_most = 0;
    let mut stays = Site::of(&setup, plan);
    let (few, many_lost, none, _) = index_after(&mut stays, 0, keys, 62);
    println!("{objects} objects, {lost:.4} lost, {steps:?}; else {few}, {many_lost:.4} lost");
    assert_eq!(none, IndexSteps::default());
    assert!(many_lost > 0.4 && lost < 0.01, "{many_lost} and {lost}");
    assert!(objects > 2 * few && steps.grown > 8 * plan.shards as u64, "{objects} {few} {steps:?}");
    assert!(bytes <= given, "{bytes} of {given}");
    // Larger ones again: it gives back what it does not need, and objects have it.
    let (_, lost, shrunk, bytes) = index_after(&mut grows, keys, 5 * flash / 1024, 1000);
    println!("{shrunk:?}, {lost:.4} lost");
    assert!(shrunk.shrunk > 0 && lost < 0.01, "{shrunk:?}, {lost} lost");
    assert!(bytes <= given, "{bytes} of {given}");
}

#[test]
fn names_are_kept_before_a_record_bears_them() {
    let mut site = Site::new(4 << 20, Some(16 << 20));
    site.fill(0, 8_000);
    assert!(site.disk.written > 2 && site.disk.names_at == 0, "{}", site.disk.names_at);
    assert_eq!(site.disk.names, [b"a0", b"a1", b"a2"]);
    // A new one makes the file anew, though nothing of it is on flash yet.
    let before = site.disk.written;
    site.set("late:key", b"v", Expiry::NEVER);
    site.maintenance.wake();
    site.turn();
    assert_eq!(
        (site.disk.names.last().unwrap().as_slice(), site.disk.names_at),
        (&b"late"[..], before)
    );
}

/// A run that would give out uniques twice does not begin.
#[test]
fn a_start_without_cas_uniques_is_refused_in_words() {
    let plan = setup(16 << 20, None).1;
    let most = u64::MAX - ((plan.shards as u64) << 44);
    assert!(setup_from(most, 16 << 20, None).0.is_ok());
    for base in [most + 1, u64::MAX] {
        let why = setup_from(base, 16 << 20, None).0.unwrap_err().to_string();
        assert!(why.contains(&base.to_string()) && why.contains("format the flash"), "{why}");
    }
}

/// Names that find no room are kept when there is some, though no other application comes.
#[test]
fn names_that_could_not_be_kept_are_kept_later() {
    let mut site = Site::new(4 << 20, Some(16 << 20));
    site.disk.is_full = true;
    site.fill(0, 300);
    site.maintenance.wake();
    site.rest();
    site.disk.is_full = false;
    site.now.mono = site.now.mono + Nanos::from_secs(1);
    site.maintenance.wake();
    site.rest();
    assert_eq!(site.disk.names, [b"a0", b"a1", b"a2"]);
}

/// A record whose application's number means nothing, or another one, to the next start would be counted as that one's: while the
/// names of new applications cannot be kept nothing is written, nor at a stop. DRAM has room all the same.
#[test]
fn nothing_is_written_to_flash_while_names_cannot_be_kept() {
    let mut site = Site::new(4 << 20, Some(16 << 20));
    site.disk.is_full = true;
    site.fill(0, 8_000);
    let shards = |site: &Site| site.node.totals(site.now.mono).shards;
    assert!(site.disk.written == 0 && shards(&site).evictions > 0, "{:?}", shards(&site));
    assert_eq!(shards(&site).evictions_direct, 0, "{:?}", shards(&site));
    // Once they are kept, flash takes what comes.
    site.disk.is_full = false;
    site.now.mono = site.now.mono + Nanos::from_secs(1);
    site.fill(8_000, 16_000);
    // Until a segment is filled.
    let staged =
        |site: &Site| (0..site.node.shards()).any(|i| site.node.lock(i).staged_bytes() > 0);
    let mut next = 24_000;
    while !staged(&site) {
        site.fill(next, 10);
        next += 10;
    }
    let before = site.disk.written;
    assert!(before > 2 && site.disk.names_at == 0, "{before}");
    // A stop writes what is staged, unless there is a name that it cannot keep.
    site.disk.is_full = true;
    site.set("late:key", b"v", Expiry::NEVER);
    site.maintenance.drain(site.now, &site.node, &mut site.disk);
    assert_eq!((site.disk.written, site.disk.names.len()), (before, 3));
    site.disk.is_full = false;
    site.maintenance.drain(site.now, &site.node, &mut site.disk);
    assert!(site.disk.written > before && site.disk.names_at == before);
    site.node.validate().unwrap();
}

/// Thousands of changes come quicker than memory follows: one that was overtaken is not carried out, or what is resident
/// would go up to the highest of them long after a low one was asked for.
#[test]
fn a_limit_that_was_overtaken_is_not_grown_to() {
    let mut site = Site::new(16 << 20, None);
    let before = site.held();
    site.node.set_memory_limit(128 << 20, u64::MAX).unwrap();
    // By the time that the second shard's turn comes, the limit is the old one again.
    assert_eq!(site.turn(), Turn::Again);
    site.node.set_memory_limit(16 << 20, u64::MAX).unwrap();
    site.rest();
    assert_eq!((&site.fx.followed[..], site.fx.refused), (&[16 << 20][..], 0));
    // But for what is lost where objects do not end at the cut.
    let same = |(a, b): (&usize, &usize)| a.abs_diff(*b) <= b / 16;
    assert!(site.held().iter().zip(&before).all(same), "{before:?}, then {:?}", site.held());
}

/// Changes that come quicker than a walk over the shards: none of them is starved by those before it.
#[test]
fn all_shards_give_up_memory_however_often_the_limit_changes() {
    let mut site = Site::new(24 << 20, None);
    let shards = site.node.shards() as u64;
    assert!(shards > 1, "several shards are what this is about");
    site.node.set_memory_limit(96 << 20, u64::MAX).unwrap();
    site.rest();
    let most = site.plan.resized(18 << 20).unwrap().arena_bytes;
    assert!(site.held().iter().all(|&bytes| bytes > 2 * most), "{:?}", site.held());
    // Another limit at every turn, 17 or 18 MiB, for as long as every shard needs for its steps: who is still large by then was
    // never reached.
    for turn in 0..2 * shards * (96 / shards / 2 + 2) {
        site.node.set_memory_limit((17 + turn % 2) << 20, u64::MAX).unwrap();
        site.turn();
    }
    site.node.set_memory_limit(18 << 20, u64::MAX).unwrap();
    assert!(site.held().iter().all(|&bytes| bytes <= most), "{:?} of {most}", site.held());
    site.rest();
    assert_eq!(site.fx.followed.last(), Some(&(18 << 20)));
}

#[test]
fn expired_objects_leave_in_the_second_in_which_they_expire() {
    let mut site = Site::new(4 << 20, None);
    for key in 0..100 {
        site.set(&format!("key{key}"), b"v", Expiry(site.now.wall.0 + 1 + key % 2));
    }
    site.rest();
    assert_eq!(site.node.dram_objects(), 100);
    for left in [50, 0] {
        site.now.wall.0 += 1;
        site.now.mono = site.now.mono + Nanos::from_secs(1);
        site.rest();
        assert_eq!(site.node.dram_objects(), left);
    }
    // A client asks for a pass over all: it ends, and is not begun twice.
    assert!(site.node.crawl() && site.node.crawler().running);
    site.rest();
    let crawler = site.node.crawler();
    assert!(!crawler.running && crawler.starts == 1);
}

/// Every verification is answered once, and a shard asks for no more than so many before.
#[test]
fn verifications_that_wait_are_bounded_and_counted() {
    let mut site = Site::new(4 << 20, Some(16 << 20));
    site.fill(0, 12_000);
    let objects = site.node.totals(site.now.mono).flash_objects;
    assert!(objects > 5_000, "{objects}");
    let mut waiting = Vec::new();
    for key in 0..12_000u64 {
        let sink = site.set(&format!("a{}:key{key}", key % 3), b"short", Expiry::NEVER);
        waiting.extend(sink.verifies);
    }
    let all = site.node.totals(site.now.mono);
    let most = 64 * site.node.shards();
    assert!(waiting.len() <= most && waiting.len() > most / 2, "{} of {most}", waiting.len());
    assert!(all.unverified > 1_000, "{}", all.unverified);
    site.rest();
    // Once they are answered there is room for others.
    for read in waiting.drain(..) {
        site.node.verify(site.now, &read, None);
    }
    site.fill(20_000, 12_000);
    for key in 20_000..32_000u64 {
        let sink = site.set(&format!("a{}:key{key}", key % 3), b"short", Expiry::NEVER);
        waiting.extend(sink.verifies);
    }
    assert!(!waiting.is_empty() && waiting.len() <= most);
    assert!(site.execute("a0:key31", Op::Get(Get::default())).verifies.is_empty());
    assert_ne!(site.node.app(b"a0:key"), AppId::DEFAULT);
}

/// Numbers far from those that the shard gives out, which take more bytes of an object: given to an object that has no room for
/// them where it lies, by each operation that changes an object in place.
#[test]
fn a_cas_that_a_client_chose_changes_nothing_else_of_an_object() {
    let mut site = Site::new(4 << 20, None);
    let number = |n: &'static [u8], new_cas, flags| {
        Op::Store(Store {
            mode: StoreMode::Set,
            value: n,
            flags,
            expiry: Expiry::NEVER,
            compare_cas: None,
            new_cas,
            invalidate: false,
            vivify: None,
        })
    };
    for (step, flags) in [0, 7, 0, u32::MAX].into_iter().enumerate() {
        for (at, chosen) in [u64::MAX, 1 << 38, (1 << 44) - 1, 3].into_iter().enumerate() {
            let key = format!("key{step}-{at}");
            let stays = [None, Some(chosen)][step / 2];
            site.execute(&key, number(b"100", stays, flags));
            let plus = Arith { delta: 5, new_cas: Some(chosen), ..Arith::default() };
            site.execute(&key, Op::Arith(plus));
            let (value, ..) = site.execute(&key, Op::Peek).item.unwrap();
            assert_eq!(value, b"105");
            // Back to a number of the shard's own, and away from it again.
            site.execute(&key, Op::Arith(Arith { delta: 1, ..Arith::default() }));
            let (value, had, own, stale) = site.execute(&key, Op::Peek).item.unwrap();
            assert_eq!((&value[..], had, stale), (&b"106"[..], flags, false));
            assert!(own % (1 << 44) < 1000, "{own}");
            let mark = Delete { mark_stale: true, new_cas: Some(chosen), ..Delete::default() };
            site.execute(&key, Op::Delete(mark));
            let item = site.execute(&key, Op::Peek).item.unwrap();
            assert_eq!(item, (b"106".to_vec(), flags, chosen, true));
            let drop = Delete { drop_value: true, new_cas: Some(!chosen), ..Delete::default() };
            site.execute(&key, Op::Delete(drop));
            let (value, had, cas, _) = site.execute(&key, Op::Peek).item.unwrap();
            assert_eq!((value.len(), had, cas), (0, 0, !chosen));
        }
    }
    for shard in 0..site.node.shards() {
        site.node.lock(shard).validate().unwrap();
    }
}
