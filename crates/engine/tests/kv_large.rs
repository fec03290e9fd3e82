//! Objects larger than a segment, and as large: they reach flash, are found there whole, and cost little room.

use std::ops::DerefMut;

use larder_base::lock::Single;
use larder_base::{AppId, Expiry, Nanos, Now, Rng, UnixSecs};
use larder_engine::index::FlashIndex;
use larder_engine::kv::api::{
    Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_engine::kv::node::{Maintenance, MaintenanceEffects, Node, StateIo, Turn};
use larder_engine::kv::record::{
    AppsSetup, LogSetup, RecordedShard, RunSetup, ShardSeed, ShardSetup,
};
use larder_engine::kv::{IoFailed, LogStats, Room, SegmentIo, SegmentState, TooLarge};
use larder_format::Kind;
use larder_format::geometry::SMALL_SEGMENTS;
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::{BudgetState, WriteBudgetConfig};
use larder_policy::learn::TrainingSet;

const SEGMENTS: u16 = 256;
const SEGMENT: usize = 256 << 10;
const MIB: usize = 1 << 20;

/// Flash in memory. Fails every `fails`-th write, if that is not 0.
struct Disk {
    bytes: Vec<u8>,
    /// Bytes of a segment.
    segment: usize,
    writes: u64,
    fails: u64,
}

impl Disk {
    fn at(&self, segment: u16) -> usize {
        (usize::from(segment) - 1) * self.segment
    }
}

impl SegmentIo for Disk {
    type Buffer = Vec<u8>;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.writes += 1;
        if self.fails > 0 && self.writes.is_multiple_of(self.fails) {
            return Err(IoFailed);
        }
        let at = self.at(segment);
        self.bytes[at..][..self.segment].copy_from_slice(bytes);
        Ok(())
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        bytes.copy_from_slice(&self.bytes[self.at(segment)..][..self.segment]);
        Ok(())
    }
}

impl StateIo for Disk {
    fn keep_names(&mut self, _: &[Vec<u8>]) -> bool {
        true
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

/// What was told of objects that are too large for flash.
#[derive(Default)]
struct Told(Vec<TooLarge>);

impl MaintenanceEffects for Told {
    fn train(&mut self, _: TrainingSet, _: u64) {}
    fn too_large(&mut self, all: TooLarge) {
        self.0.push(all);
    }
}

/// The answer to a request: whether something was stored or found, and what.
#[derive(Default)]
struct Said {
    found: Option<Vec<u8>>,
    stored: bool,
    /// The shard has called maintenance.
    woken: bool,
}

impl Effects for Said {
    fn reply(&mut self, reply: Reply<'_>) {
        match reply {
            Reply::Item(item) => self.found = Some(item.value.to_vec()),
            Reply::Stored { .. } => self.stored = true,
            _ => {}
        }
    }
    fn verify(&mut self, _: FlashRead) {}
    fn wake_cleaner(&mut self) {
        self.woken = true;
    }
}

struct Cache {
    node: Node<Single>,
    maintenance: Maintenance<Vec<u8>>,
    disk: Disk,
    told: Told,
    seconds: u64,
}

impl Cache {
    /// 16 MiB of memory before 64 MiB of flash.
    fn new(fails: u64) -> Cache {
        Cache::of(fails, SEGMENTS, SEGMENT)
    }

    /// The same memory before so many segments of so many bytes.
    fn of(fails: u64, segments: u16, segment: usize) -> Cache {
        let setup = RunSetup {
            kv: RunSetup::VERSION,
            larder: String::new(),
            uuid: String::new(),
            hash_key: [3; 16],
            salt: 1,
            segments,
            segment_bytes: segment as u32,
            drives: Vec::new(),
            shard: ShardSetup {
                arena_bytes: 16 << 20,
                max_object: 12 << 20,
                no_eviction: false,
                clock_increment: false,
                clock_max: 3,
                free_low: 2 << 20,
                free_high: 3 << 20,
                flash_min_record: 0,
                access_times: 16,
                buckets: FlashIndex::buckets_for(80_000),
                index_most: 0,
                admission_memory: 64 << 10,
                objects: 32_000,
                share_bits: 1f64.to_bits(),
                budget_rate_bits: None,
            },
            shards: vec![ShardSeed { cas_base: 0, seed: 1 }],
            admission: AdmissionConfig::from_name("all").unwrap(),
            applications: AppsSetup::default(),
            log: Some(LogSetup {
                hot_percent: 70,
                reinsert_percent: 0,
                retry_after: Nanos::from_secs(1).0,
                generation_floor: 0,
                budget: WriteBudgetConfig::default(),
                budget_state: None,
                budget_at: 0,
            }),
        };
        let node = Node::new(&setup, None, [setup.build_shard(0).unwrap()]).unwrap();
        let maintenance = Maintenance::new(&node, setup.build_log().unwrap(), 1, 0);
        let bytes = vec![0; usize::from(segments) * segment];
        let disk = Disk { bytes, segment, writes: 0, fails };
        Cache { node, maintenance, disk, told: Told::default(), seconds: 1 }
    }

    fn now(&self) -> Now {
        Now { mono: Nanos::from_secs(self.seconds), wall: UnixSecs(1_000_000) }
    }

    fn shard(&self) -> impl DerefMut<Target = RecordedShard> + '_ {
        self.node.lock(0)
    }

    fn log(&self) -> LogStats {
        *self.maintenance.log().unwrap().stats()
    }

    fn clean(&mut self) {
        self.seconds += 1;
        let now = self.now();
        let Cache { node, maintenance, disk, told, .. } = self;
        while maintenance.turn(now, node, disk, told) == Turn::Again {}
    }

    fn ask(&mut self, key: u64, op: Op<'_>) -> Said {
        let key = key.to_le_bytes();
        let request = Request { key: &key, hash: self.node.hash(&key), app: AppId::DEFAULT, op };
        let mut said = Said::default();
        let mut read: Option<FlashRead> = None;
        loop {
            let bytes = read.map(|read| {
                let at = self.disk.at(read.at.segment) + read.at.offset as usize;
                &self.disk.bytes[at..at + read.at.len as usize]
            });
            let fetched = read.as_ref().map(|read| Fetched { read, bytes });
            match self.node.execute(self.now(), &request, fetched, &mut said) {
                Outcome::Done => return said,
                Outcome::Read(next) => read = Some(next),
            }
        }
    }

    fn set(&mut self, key: u64, len: usize) {
        self.store(key, len);
        self.clean();
    }

    /// A set, and no more.
    fn store(&mut self, key: u64, len: usize) {
        let value = value_of(key, len);
        let store = Store {
            mode: StoreMode::Set,
            value: &value,
            flags: 0,
            expiry: Expiry::NEVER,
            compare_cas: None,
            new_cas: None,
            invalidate: false,
            vivify: None,
        };
        let said = self.ask(key, Op::Store(store));
        assert!(said.stored, "{len} bytes");
        if said.woken {
            self.maintenance.wake();
        }
    }

    /// One turn of maintenance: a step at most.
    fn turn(&mut self) -> Turn {
        let now = self.now();
        let Cache { node, maintenance, disk, told, .. } = self;
        maintenance.turn(now, node, disk, told)
    }

    fn waits(&mut self, key: u64, len: usize, since: &mut Option<Nanos>) -> bool {
        let room = self.node.room(self.now(), &key.to_le_bytes(), len, since);
        if room == Room::Called {
            self.maintenance.wake();
        }
        room != Room::Now
    }

    /// How many of these are there, each as it was set.
    fn answer(&mut self, sizes: &[usize]) -> usize {
        let mut found = 0;
        for (key, &len) in sizes.iter().enumerate() {
            let got = self.ask(key as u64, Op::Get(Get::default())).found;
            assert!(got.as_ref().is_none_or(|got| *got == value_of(key as u64, len)), "key {key}");
            found += usize::from(got.is_some());
        }
        found
    }
}

fn value_of(key: u64, len: usize) -> Vec<u8> {
    let mut value = vec![key as u8; len];
    let edge = len.min(64);
    Rng::new(key).fill(&mut value[..edge]);
    Rng::new(!key).fill(&mut value[len - edge..]);
    value
}

/// Sizes whose bytes are spread evenly over the powers of two between the ends.
fn mix(rng: &mut Rng, total: usize, from: f64, to: f64) -> Vec<usize> {
    let (mut sizes, mut sum) = (Vec::new(), 0);
    while sum < total {
        // By bytes: a size is drawn as often as it is small.
        let size = 1.0 / (1.0 / from + (1.0 / to - 1.0 / from) * rng.unit());
        sizes.push(size as usize);
        sum += size as usize;
    }
    sizes
}

/// The shapes of a cache of large objects, at a sixteenth: 256 MiB of memory before 1 GiB of flash, and 500 MiB in values of 2, 4 and
/// 60 MiB, and of 100 bytes to 8 MiB.
#[test]
fn half_the_flash_in_large_objects_answers() {
    let half = 500 * MIB / 16;
    let of = |size: usize| vec![size; half / size];
    let mut rng = Rng::new(4);
    let mixed = mix(&mut rng, half, 100.0, 512.0 * 1024.0);
    for sizes in [of(2 * MIB / 16), of(4 * MIB / 16), vec![60 * MIB / 16; 8], mixed] {
        let mut cache = Cache::new(0);
        for (key, &len) in sizes.iter().enumerate() {
            cache.set(key as u64, len);
        }
        let found = cache.answer(&sizes);
        let share = found as f64 / sizes.len() as f64;
        assert!(share >= 0.98, "{found} of {} of {} bytes and so on", sizes.len(), sizes[0]);
        assert!(cache.log().segments_written > 50 && cache.told.0.is_empty());
        cache.shard().validate().unwrap();
    }
}

/// A client is faster than the drive: maintenance does one step where half a mebibyte is sent. What is large waits for room, so that what
/// was sent before is not lost.
#[test]
fn large_writes_wait_for_a_slow_drive() {
    let half = 500 * MIB / 16;
    for size in [2 * MIB / 16, 4 * MIB / 16, MIB, 60 * MIB / 16] {
        let sizes = vec![size; half / size];
        let found = [true, false].map(|waits| {
            let mut cache = Cache::new(0);
            let (mut sent, mut turns) = (0, 0);
            for (key, &len) in sizes.iter().enumerate() {
                let (key, mut since) = (key as u64, None);
                while waits && cache.waits(key, len, &mut since) {
                    turns += 1;
                    assert!(turns < 10_000, "{key} of {size} bytes waits for good");
                    cache.turn();
                }
                cache.store(key, len);
                sent += len;
                if sent > MIB / 2 {
                    sent = 0;
                    cache.turn();
                }
            }
            cache.clean();
            cache.shard().validate().unwrap();
            assert_eq!(turns > 10, waits, "{turns}");
            cache.answer(&sizes) as f64 / sizes.len() as f64
        });
        assert!(found[0] >= 0.98 && found[1] < 0.9, "{size}: {found:?}");
    }
}

/// No write waits for more than a second, nor where nobody makes room, nor a small one.
#[test]
fn a_write_does_not_wait_for_good() {
    let mut cache = Cache::new(0);
    let mut since = None;
    for key in 0.. {
        if cache.waits(key, MIB, &mut since) {
            break;
        }
        cache.store(key, MIB);
        assert!(key < 100);
    }
    let began = cache.now().mono;
    assert_eq!(since, Some(began));
    assert!(!cache.waits(1000, (64 << 10) - 1, &mut None));
    assert!(cache.waits(1001, MIB, &mut since));
    assert_eq!(since, Some(began), "the same wait");
    cache.seconds += 1;
    assert!(!cache.waits(1001, MIB, &mut since));
    assert_eq!(since, None);
    // Another waits anew, until maintenance has done what there is to do.
    assert!(cache.waits(1002, MIB, &mut since));
    cache.clean();
    assert!(!cache.waits(1002, MIB, &mut since));
    cache.node.refuse();
    assert!(!cache.waits(1003, MIB, &mut None));
}

/// What is written is records: at most 3 % is lost between them, whatever their size.
#[test]
fn little_of_flash_is_lost_between_records() {
    let mut rng = Rng::new(5);
    for (from, to) in [
        (3e3, 3e3),
        (20e3, 20e3),
        (130e3, 130e3),
        (200e3, 200e3),
        (260e3, 300e3),
        (900e3, 1.1e6),
        (100.0, 512e3),
    ] {
        let mut cache = Cache::new(0);
        // Nearly three times round.
        for (key, len) in mix(&mut rng, 180 * MIB, from, to).into_iter().enumerate() {
            cache.set(key as u64, len);
        }
        let log = cache.log();
        let lost = 1.0 - log.record_bytes_written as f64 / log.bytes_written as f64;
        assert!(lost <= 0.03, "{from} to {to}: {lost:.3} is lost");
        assert!(log.segments_reclaimed > 200, "{log:?}");
        cache.shard().validate().unwrap();
    }
}

/// Objects as long as their key is there: rounds over flash, overwrites of what is on its way, writes that fail in the middle of an object.
#[test]
fn what_is_found_is_what_was_set_last() {
    for fails in [0, 7] {
        let mut rng = Rng::new(6 + fails);
        let mut cache = Cache::new(fails);
        let mut sizes = vec![0usize; 60];
        let mut found = 0;
        for round in 0..700 {
            let key = rng.below(sizes.len() as u64) as usize;
            // Another size is another value.
            let len = 1 + match rng.below(4) {
                0 => rng.below(2_000),
                1 => rng.below(100_000),
                2 => rng.below(700_000),
                _ => rng.below(5 << 20),
            } as usize;
            sizes[key] = len;
            let value = value_of(key as u64, len);
            let store = Store {
                mode: StoreMode::Set,
                value: &value,
                flags: 0,
                expiry: Expiry::NEVER,
                compare_cas: None,
                new_cas: None,
                invalidate: false,
                vivify: None,
            };
            assert!(cache.ask(key as u64, Op::Store(store)).stored);
            cache.seconds += u64::from(round % 8 == 0);
            // Maintenance stops anywhere.
            for _ in 0..rng.below(40) {
                let now = cache.now();
                let Cache { node, maintenance, disk, told, .. } = &mut cache;
                if maintenance.turn(now, node, disk, told) != Turn::Again {
                    break;
                }
            }
            if round % 10 == 0 {
                found += cache.answer(&sizes);
                cache.shard().validate().unwrap();
            }
        }
        let log = cache.log();
        assert!(found > 1_500 && log.segments_reclaimed > 200, "{found} {log:?}");
        assert_eq!(log.write_errors > 0, fails > 0);
        assert_eq!(cache.shard().stats().flash_corrupt, 0);
    }
}

/// A stop writes what has been begun to its end.
#[test]
fn a_stop_finishes_what_goes_on() {
    let mut cache = Cache::new(0);
    let mut sizes = Vec::new();
    // Some object lies in several segments, and the last of those is not written yet.
    for key in 0..9 {
        sizes.push(MIB + 1000 * key);
        cache.set(key as u64, sizes[key]);
    }
    let now = cache.now();
    let Cache { node, maintenance, disk, .. } = &mut cache;
    maintenance.drain(now, node, disk);
    assert_eq!(cache.shard().staged_bytes(), 0);
    cache.shard().validate().unwrap();
    assert_eq!(cache.answer(&sizes), 9);
}

/// An object that this flash cannot hold is counted by reason, and told of, once a minute at most.
#[test]
fn what_flash_cannot_hold_is_told() {
    let mut cache = Cache::new(0);
    for key in 0..20 {
        cache.set(key, 9 * MIB);
    }
    // An eighth of 64 MiB.
    let [told] = &cache.told.0[..] else { panic!("{:?}", cache.told.0) };
    assert_eq!((told.limit, told.longest > 9 << 20), (8 << 20, true));
    cache.seconds += 60;
    cache.clean();
    let [first, then] = &cache.told.0[..] else { panic!("{:?}", cache.told.0) };
    assert!(then.objects > first.objects && then.objects >= 15, "{then:?}");
    assert_eq!(cache.node.too_large(), *then);
    let rejected = cache.node.totals(cache.now().mono).rejected;
    assert!(rejected.contains(&("size", then.objects)), "{rejected:?}");
}

/// Segments of 8 KiB, more than have short numbers.
const FAR: u16 = 9_000;

/// Stores `total` bytes of small and large objects in segments of which not all can hold small ones. Every 20 MiB most of the last `lasting`
/// bytes must be there, and what is there be right.
fn fill_far(small: f64, total: usize, lasting: usize) -> Cache {
    let mut cache = Cache::of(0, FAR, 8 << 10);
    let mut rng = Rng::new(9);
    let (mut sizes, mut sent, mut looked): (Vec<usize>, usize, usize) = (Vec::new(), 0, 0);
    while sent < total {
        let len =
            if rng.chance(small) { rng.range(100, 900) } else { rng.range(1_500, 7_000) } as usize;
        cache.store(sizes.len() as u64, len);
        sizes.push(len);
        sent += len;
        if sizes.len().is_multiple_of(64) {
            cache.clean();
        }
        if sent < looked + 20 * MIB {
            continue;
        }
        looked = sent;
        cache.clean();
        cache.shard().validate().unwrap();
        let table = cache.maintenance.log().unwrap().table();
        let far = SMALL_SEGMENTS + 1..=FAR;
        let wrong = far.filter(|&s| table.state(s) == SegmentState::Live(Kind::Small)).count();
        assert_eq!(wrong, 0);
        let (mut behind, mut found, mut asked) = (0, [0u64; 2], [0u64; 2]);
        for key in (0..sizes.len()).rev() {
            behind += sizes[key];
            let got = cache.ask(key as u64, Op::Get(Get::default())).found;
            let right = got.as_ref().is_none_or(|got| *got == value_of(key as u64, sizes[key]));
            assert!(right, "key {key}");
            if behind < lasting {
                let is_small = usize::from(sizes[key] < 1_000);
                asked[is_small] += 1;
                found[is_small] += u64::from(got.is_some());
            }
        }
        let most = |i: usize| found[i] * 100 >= asked[i] * 98;
        assert!(most(0) && most(1), "{found:?} of {asked:?} after {sent} bytes");
    }
    cache
}

/// An entry of the index has short numbers for 4,095 segments: small objects lie in those, large ones in any of them, at multiples of
/// more than 64 bytes. Both kinds leave in the order in which they came, about, over several rounds.
#[test]
fn more_segments_than_have_short_numbers() {
    // 70 MiB of flash.
    let cache = fill_far(0.25, 240 * MIB, 35 * MIB);
    let table = cache.maintenance.log().unwrap().table();
    let live = |kind, of: std::ops::RangeInclusive<u16>| {
        of.filter(|&s| table.state(s) == SegmentState::Live(kind)).count()
    };
    let (near, far) = (1..=SMALL_SEGMENTS, SMALL_SEGMENTS + 1..=FAR);
    let counts = (live(Kind::Small, near.clone()), live(Kind::Large, near), live(Kind::Large, far));
    assert!(counts.0 > 200 && counts.1 > 3_000 && counts.2 > 4_500, "{counts:?}");
    // What is lost to multiples of 256 bytes, of records of 4 KiB.
    let log = cache.log();
    let lost = 1.0 - log.record_bytes_written as f64 / log.bytes_written as f64;
    assert!(lost < 0.08 && log.segments_reclaimed > 20_000, "{lost} {log:?}");
}

/// Small objects alone have all the segments that can hold them, 32 MiB, in turn.
#[test]
fn small_objects_alone_go_round_where_they_can_lie() {
    let cache = fill_far(1.0, 120 * MIB, 22 * MIB);
    let table = cache.maintenance.log().unwrap().table();
    let live = (1..=SMALL_SEGMENTS).filter(|&s| table.state(s) == SegmentState::Live(Kind::Small));
    assert!(live.count() > 4_000);
}
