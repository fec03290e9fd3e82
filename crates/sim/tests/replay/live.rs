//! A run as a server has it, in one thread: requests whose reads come late, a log that steps when it likes, a device that
//! fails and rots, models that are trained.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use larder_base::lock::Single;
use larder_base::{AppId, Expiry, KeyHasher, Nanos, Now, Rng, UnixSecs};
use larder_engine::kv::api::{
    Arith, Delete, Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
    Tier,
};
use larder_engine::kv::node::{Maintenance, MaintenanceEffects, Node, StateIo};
use larder_engine::kv::record::{
    AppsSetup, LogSetup, MachineTape, RunSetup, ShardSeed, ShardSetup, Tape,
};
use larder_engine::kv::{IoFailed, SegmentIo};
use larder_format::recording::{Chunk, ChunkSink, Ended, end_chunk, file_header, seal};
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::{BudgetState, WriteBudgetConfig};
use larder_policy::learn::{TrainParams, TrainingSet, train};

const SHARDS: usize = 4;
const SEGMENTS: u16 = 12;
const SEGMENT: u32 = 32 << 10;

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<Chunk>>>);

impl ChunkSink for Kept {
    fn put(&mut self, chunk: Chunk) -> bool {
        self.0.lock().unwrap().push(chunk);
        true
    }
    fn is_open(&self) -> bool {
        true
    }
}

struct Device {
    segments: Vec<Vec<u8>>,
    rng: Rng,
    failed: u64,
}

impl SegmentIo for Device {
    type Buffer = Vec<u8>;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        if self.rng.chance(0.03) {
            self.failed += 1;
            return Err(IoFailed);
        }
        self.segments[usize::from(segment)] = bytes.to_vec();
        Ok(())
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        if self.rng.chance(0.03) {
            self.failed += 1;
            return Err(IoFailed);
        }
        bytes.copy_from_slice(&self.segments[usize::from(segment)]);
        Ok(())
    }
}

impl StateIo for Device {
    fn keep_names(&mut self, _: &[Vec<u8>]) -> bool {
        true
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

/// What maintenance wants fitted.
#[derive(Default)]
struct Wanted(Option<(TrainingSet, u64)>);

impl MaintenanceEffects for Wanted {
    fn train(&mut self, samples: TrainingSet, seed: u64) {
        self.0 = Some((samples, seed));
    }
}

#[derive(Default)]
struct Sink {
    hit_flash: bool,
    verifies: Vec<FlashRead>,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        self.hit_flash = matches!(reply, Reply::Item(item) if item.tier == Tier::Flash);
    }
    fn verify(&mut self, read: FlashRead) {
        self.verifies.push(read);
    }
    fn wake_cleaner(&mut self) {}
}

/// A request as its client sent it.
#[derive(Clone)]
struct Sent {
    key: Vec<u8>,
    value: Vec<u8>,
    kind: u64,
    number: u64,
    expiry: Expiry,
}

impl Sent {
    fn request(&self, hasher: &KeyHasher) -> Request<'_> {
        let (n, expiry) = (self.number, self.expiry);
        let store = |mode| Store {
            mode,
            value: &self.value,
            flags: n as u32,
            expiry,
            compare_cas: n.is_multiple_of(16).then_some(n),
            new_cas: (n % 16 == 1).then_some(n),
            invalidate: n.is_multiple_of(32),
            vivify: (n % 4 == 2).then_some(expiry),
        };
        let op = match self.kind {
            0..=29 => Op::Store(store(StoreMode::Set)),
            30 => Op::Store(store(StoreMode::Add)),
            31 => Op::Store(store(StoreMode::Replace)),
            32 => Op::Store(store(StoreMode::Append)),
            33 => Op::Store(store(StoreMode::Prepend)),
            34 => Op::Delete(Delete {
                mark_stale: n.is_multiple_of(3),
                drop_value: n.is_multiple_of(5),
                touch: n.is_multiple_of(2).then_some(expiry),
                ..Delete::default()
            }),
            35 | 36 => Op::Arith(Arith {
                decrement: n.is_multiple_of(2),
                delta: n % 1000,
                vivify: n.is_multiple_of(3).then_some((expiry, n)),
                ..Arith::default()
            }),
            37 => Op::Touch(expiry),
            38 => Op::Peek,
            39 => Op::Get(Get {
                touch: n.is_multiple_of(2).then_some(expiry),
                vivify: n.is_multiple_of(3).then_some(expiry),
                recache_below: n.is_multiple_of(5).then_some(30),
                meta: true,
                ..Get::default()
            }),
            _ => Op::Get(Get::default()),
        };
        let app = AppId(u16::from(self.key[0] % 3));
        Request { key: &self.key, hash: hasher.hash(&self.key), app, op }
    }
}

/// What a run came to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) executed: u64,
    pub(crate) hits_flash: u64,
    pub(crate) late: u64,
    pub(crate) value_bytes: u64,
    pub(crate) segments_written: u64,
    pub(crate) segments_reclaimed: u64,
    pub(crate) evictions: u64,
    pub(crate) corrupt: u64,
    pub(crate) failed_io: u64,
}

pub(crate) struct Live {
    setup: RunSetup,
    node: Node<Single>,
    maintenance: Maintenance<Vec<u8>>,
    wanted: Wanted,
    device: Device,
    kept: Kept,
    hasher: KeyHasher,
    rng: Rng,
    now: Now,
    waiting: VecDeque<(Sent, FlashRead)>,
    verifying: VecDeque<FlashRead>,
    counts: Counts,
}

fn setup(policy: &str, seed: u64, flash: bool) -> RunSetup {
    let mut admission = AdmissionConfig::from_name(policy).unwrap();
    admission.flashiness.first_training_samples = 200;
    RunSetup {
        kv: RunSetup::VERSION,
        larder: "test".to_owned(),
        uuid: "none".to_owned(),
        hash_key: [seed as u8; 16],
        salt: 77,
        segments: if flash { SEGMENTS } else { 0 },
        segment_bytes: if flash { SEGMENT } else { 4096 },
        drives: Vec::new(),
        shard: ShardSetup {
            arena_bytes: 144 << 10,
            max_object: 16 << 10,
            no_eviction: false,
            clock_increment: seed.is_multiple_of(2),
            clock_max: 3,
            free_low: 48 << 10,
            free_high: 64 << 10,
            flash_min_record: 0,
            access_times: 256,
            buckets: 64,
            index_most: 0,
            admission_memory: 256 << 10,
            objects: 1_000,
            share_bits: 0.25f64.to_bits(),
            budget_rate_bits: None,
        },
        shards: (0..SHARDS as u64)
            .map(|i| ShardSeed { cas_base: 1_000_000 + (i << 40), seed: seed ^ i })
            .collect(),
        admission,
        applications: AppsSetup::default(),
        log: flash.then(|| LogSetup {
            hot_percent: 70,
            reinsert_percent: 20,
            retry_after: Nanos::from_millis(50).0,
            generation_floor: 99,
            budget: WriteBudgetConfig::default(),
            budget_state: None,
            budget_at: 5,
        }),
    }
}

impl Live {
    pub(crate) fn new(policy: &str, seed: u64, flash: bool) -> Live {
        Live::with(policy, seed, flash, |_| {})
    }

    /// With admission as `change` leaves it.
    pub(crate) fn with(
        policy: &str,
        seed: u64,
        flash: bool,
        change: impl FnOnce(&mut AdmissionConfig),
    ) -> Live {
        let mut setup = setup(policy, seed, flash);
        change(&mut setup.admission);
        setup.validate().unwrap();
        let kept = Kept::default();
        let tape = |i: usize| Tape::new(i as u16, Box::new(kept.clone()));
        let shards = (0..SHARDS).map(|i| setup.build_shard(i).unwrap());
        let node = Node::new(&setup, None, shards).unwrap();
        (0..SHARDS).for_each(|i| node.record(i, tape(i)));
        let mut maintenance = Maintenance::new(&node, setup.build_log().unwrap(), seed, 0);
        let stream = setup.maintenance_stream();
        let machine = |i: usize| MachineTape::new(i as u16, Box::new(kept.clone()));
        maintenance.record(flash.then(|| tape(SHARDS)), machine(stream));
        node.record_applications(machine(stream + 1));
        let hasher = setup.hasher();
        let segments = vec![vec![0; SEGMENT as usize]; usize::from(SEGMENTS) + 1];
        Live {
            setup,
            node,
            maintenance,
            wanted: Wanted::default(),
            device: Device { segments, rng: Rng::new(seed + 1), failed: 0 },
            kept,
            hasher,
            rng: Rng::new(seed),
            now: Now { mono: Nanos(1_000), wall: UnixSecs(1_700_000_000) },
            waiting: VecDeque::new(),
            verifying: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    /// What flash holds at a place, or nothing, or something else.
    fn fetch(&mut self, read: &FlashRead) -> Option<Vec<u8>> {
        let at = read.at;
        if self.rng.chance(0.01) {
            self.counts.failed_io += 1;
            return None;
        }
        let behind = self.device.segments[usize::from(at.segment)..].iter().flatten();
        let mut bytes: Vec<u8> =
            behind.skip(at.offset as usize).take(at.len as usize).copied().collect();
        if self.rng.chance(0.01) {
            let n = bytes.len() as u64;
            for _ in 0..n / 16 {
                let i = self.rng.below(n) as usize;
                bytes[i] ^= 0x55;
            }
        }
        Some(bytes)
    }

    fn execute(&mut self, sent: Sent, read: Option<FlashRead>) {
        let bytes = read.as_ref().and_then(|read| self.fetch(read));
        let request = sent.request(&self.hasher);
        let fetched = read.as_ref().map(|read| Fetched { read, bytes: bytes.as_deref() });
        let mut sink = Sink::default();
        let outcome = self.node.execute(self.now, &request, fetched, &mut sink);
        self.counts.executed += 1;
        self.counts.hits_flash += u64::from(sink.hit_flash);
        self.verifying.extend(sink.verifies);
        if let Outcome::Read(read) = outcome {
            self.waiting.push_back((sent, read));
        }
    }

    fn send(&mut self) {
        // Few keys are wanted often: squared, twice.
        let (a, b) = (self.rng.unit(), self.rng.unit());
        let key = (a * a * b * 9_000.0) as u64;
        let kind = self.rng.below(100);
        let numeric = key.is_multiple_of(7);
        let len = if numeric || self.rng.chance(0.1) {
            self.rng.below(20)
        } else if self.rng.chance(0.02) {
            self.rng.below(9_000)
        } else {
            30 + self.rng.below(400)
        };
        let number = self.rng.next_u64() >> 20;
        let mut value = vec![0; len as usize];
        if numeric {
            value = (number % 100_000).to_string().into_bytes();
        } else {
            self.rng.fill(&mut value);
        }
        self.counts.value_bytes += value.len() as u64;
        let wall = self.now.wall;
        let expiry = match self.rng.below(10) {
            0 => Expiry::at(UnixSecs(wall.0 + self.rng.below(20) as u32)),
            _ => Expiry::NEVER,
        };
        let key = format!("{}{key}", (b'a' + (key % 5) as u8) as char).into_bytes();
        self.execute(Sent { key, value, kind, number, expiry }, None);
    }

    fn step(&mut self) {
        let Live { node, maintenance, device, wanted, .. } = self;
        maintenance.turn(self.now, node, device, wanted);
    }

    /// Fits what is wanted: its models come back late.
    fn train(&mut self) {
        let Some((set, seed)) = self.wanted.0.take() else { return };
        let model = train(&set, &TrainParams::default(), seed).ok();
        self.maintenance.fitted(self.now, &self.node, set.app, model);
    }

    pub(crate) fn run(&mut self, requests: u64) {
        for i in 0..requests {
            self.now.mono = Nanos(self.now.mono.0 + self.rng.below(2_000_000));
            let seconds = (self.now.mono.0 / 1_000_000_000) as u32;
            self.now.wall = UnixSecs(1_700_000_000 + seconds);
            self.send();
            // Reads come back in some order, some only after the segment has gone.
            while self.waiting.len() > 40 || !self.waiting.is_empty() && self.rng.chance(0.6) {
                let n = self.rng.below(self.waiting.len() as u64) as usize;
                self.counts.late += u64::from(n > 0);
                if let Some((sent, read)) = self.waiting.remove(n) {
                    self.execute(sent, Some(read));
                }
            }
            while self.verifying.len() > 20 || !self.verifying.is_empty() && self.rng.chance(0.5) {
                let Some(read) = self.verifying.pop_front() else { break };
                let bytes = self.fetch(&read);
                self.node.verify(self.now, &read, bytes.as_deref());
            }
            for _ in 0..self.rng.below(3) {
                self.step();
            }
            if i.is_multiple_of(50) {
                self.train();
            }
            if i.is_multiple_of(97) {
                self.maintenance.wake();
            }
            if i.is_multiple_of(1_111) {
                let name = if i.is_multiple_of(2) { "app" } else { "" };
                self.node.app(format!("app{}:key", i % 7).as_bytes());
                // The empty name is none.
                self.node.application(name).ok();
                self.node.crawl();
            }
            if i == requests / 2 || i == requests / 3 {
                let later = UnixSecs(self.now.wall.0 + 2);
                let at = if i == requests / 3 { later } else { self.now.wall };
                assert!(self.node.flush_all(self.now, at));
            }
        }
    }

    pub(crate) fn counts(&self) -> Counts {
        let mut counts = self.counts;
        counts.failed_io += self.device.failed;
        self.node.validate().unwrap();
        for shard in (0..SHARDS).map(|i| self.node.lock(i)) {
            counts.evictions += shard.stats().evictions;
            counts.corrupt += shard.stats().flash_corrupt;
        }
        if let Some(log) = self.maintenance.log() {
            counts.segments_written = log.stats().segments_written;
            counts.segments_reclaimed = log.stats().segments_reclaimed;
        }
        counts
    }

    /// The file.
    pub(crate) fn finish(mut self, why: Ended) -> Vec<u8> {
        let mut records = self.node.end_recording();
        records.extend(self.maintenance.end_recording());
        records.extend(self.node.end_recording_applications());
        let text = serde_json::to_vec(&self.setup).unwrap();
        let mut out = file_header(&text).unwrap();
        for chunk in self.kept.0.lock().unwrap().iter() {
            out.extend_from_slice(&seal(chunk.stream, chunk.first, chunk.records, &chunk.payload));
            out.extend_from_slice(&chunk.payload);
        }
        out.extend_from_slice(&end_chunk(why, &records));
        out
    }
}
