//! The store and a node of one thread, request by request: every answer, every counter and every byte on flash is the same.
//!
//! The store has its locks, a flash file, a data directory and shared memory; the other has the engine's node alone, over memory. Both are
//! told the same times, maintenance is done before the next request. Runs end in good order or as
//! by a kill, and are gone on with.
//!
//! What this cannot show: models, of which these few requests train none; and what comes of threads: a cleaner that comes late, or a verification that ends behind the next write.

use std::path::Path;
use std::sync::Arc;

use larder_base::lock::{LockKind, Single};
use larder_base::{ByteSize, Expiry, Nanos, Now, Rng, UnixSecs, Words};
use larder_engine::kv::api::{
    Arith, Delete, Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request, Store as Write,
    StoreMode,
};
use larder_engine::kv::node::start::Warmth;
use larder_engine::kv::node::{Maintenance, MaintenanceEffects, Node, Plan, StateIo, Turn};
use larder_engine::kv::record::RunSetup;
use larder_engine::kv::{IoFailed, Resizable, SegmentIo, SegmentTable};
use larder_format::Geometry;
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::BudgetState;
use larder_policy::learn::{TrainParams, TrainingSet, train};
use larder_runtime::{AlignedBuf, Clock, DataDir, Device, DeviceOptions, FlashDevice};

use super::harness::config;
use crate::kv::cleaner::Disk;
use crate::kv::open::{Medium, Ready, prepare};
use crate::kv::warm::Region;
use crate::kv::{CacheConfig, Core, locked};

const FLASH: u64 = 4 << 20;
const KEYS: u64 = 6_000;

/// An answer with all that it shows.
#[derive(Default, Debug, PartialEq)]
struct Sink {
    said: Vec<String>,
    verifies: Vec<FlashRead>,
    woken: bool,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        self.said.push(format!("{reply:?}"));
    }
    fn verify(&mut self, read: FlashRead) {
        self.verifies.push(read);
    }
    fn wake_cleaner(&mut self) {
        self.woken = true;
    }
}

/// Fits models at once.
#[derive(Default)]
struct Fit(Option<(TrainingSet, u64)>);

impl MaintenanceEffects for Fit {
    fn train(&mut self, samples: TrainingSet, seed: u64) {
        self.0 = Some((samples, seed));
    }
}

/// A node with its maintenance and what it reads and writes, driven in lockstep.
struct Side<'a, L: LockKind, M, B, I> {
    node: &'a Node<L, M>,
    maintenance: &'a mut Maintenance<B>,
    io: I,
    due: &'a mut Nanos,
}

/// Reads of requests.
trait Reads {
    fn fetch(&self, read: &FlashRead) -> Vec<u8>;
}

impl<L: LockKind, M: Resizable, B: AsRef<[u8]> + AsMut<[u8]>, I: SegmentIo + StateIo + Reads>
    Side<'_, L, M, B, I>
{
    fn execute(&mut self, now: Now, key: &[u8], op: Op<'_>) -> Sink {
        let request = Request { key, hash: self.node.hash(key), app: self.node.app(key), op };
        let (mut sink, mut read) = (Sink::default(), None::<(FlashRead, Vec<u8>)>);
        loop {
            let fetched = read.as_ref().map(|(read, bytes)| Fetched { read, bytes: Some(bytes) });
            match self.node.execute(now, &request, fetched, &mut sink) {
                Outcome::Done => break,
                Outcome::Read(next) => {
                    sink.said.push(format!("{next:?}"));
                    read = Some((next, self.io.fetch(&next)));
                }
            }
        }
        for read in &sink.verifies {
            self.node.verify(now, read, Some(&self.io.fetch(read)));
        }
        if sink.woken || now.mono >= *self.due {
            self.maintain(now);
        }
        sink
    }

    fn maintain(&mut self, now: Now) {
        let mut fit = Fit::default();
        loop {
            let turn = self.maintenance.turn(now, self.node, &mut self.io, &mut fit);
            if let Some((set, seed)) = fit.0.take() {
                let model = train(&set, &TrainParams::default(), seed).ok();
                self.maintenance.fitted(now, self.node, set.app, model);
            } else if let Turn::At(at) = turn {
                *self.due = at;
                return;
            }
        }
    }

    fn state(&self, now: Now) -> String {
        format!("{:?}", self.node.totals(now.mono))
    }
}

/// The store's own device and files.
struct Served<'a>(Disk<'a>);

impl SegmentIo for Served<'_> {
    type Buffer = AlignedBuf;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.0.write(segment, bytes)
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        self.0.read(segment, bytes)
    }
}

impl StateIo for Served<'_> {
    fn keep_names(&mut self, names: &[Vec<u8>]) -> bool {
        self.0.keep_names(names)
    }
    fn keep_budget(&mut self, state: BudgetState) -> bool {
        self.0.keep_budget(state)
    }
}

impl Reads for Served<'_> {
    fn fetch(&self, read: &FlashRead) -> Vec<u8> {
        let (flash, _) = self.0.0.unwrap();
        let mut bytes = vec![0; read.at.len as usize];
        let at = flash.address(read.at.segment, u64::from(read.at.offset));
        flash.device.read_at(at, &mut bytes).unwrap();
        bytes
    }
}

/// Flash in memory.
struct InMemory {
    geometry: Geometry,
    bytes: Vec<u8>,
    names: Vec<Vec<u8>>,
}

impl InMemory {
    fn at(&self, segment: u16) -> std::ops::Range<usize> {
        let at = self.geometry.offset(segment) as usize;
        at..at + self.geometry.segment_bytes() as usize
    }
}

impl SegmentIo for &mut InMemory {
    type Buffer = Vec<u8>;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        let at = self.at(segment);
        self.bytes[at].copy_from_slice(bytes);
        Ok(())
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        bytes.copy_from_slice(&self.bytes[self.at(segment)]);
        Ok(())
    }
}

impl StateIo for &mut InMemory {
    fn keep_names(&mut self, names: &[Vec<u8>]) -> bool {
        self.names = names.to_vec();
        true
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

impl Reads for &mut InMemory {
    fn fetch(&self, read: &FlashRead) -> Vec<u8> {
        let at = self.at(read.at.segment).start + read.at.offset as usize;
        self.bytes[at..at + read.at.len as usize].to_vec()
    }
}

/// What a run of the node alone leaves to the next: segment table, indexes, bytes on flash by application.
type Words3 = (Vec<u64>, Vec<Vec<u64>>, Vec<Vec<u64>>);

fn copied(words: &[u64]) -> Words {
    let mut copy = Words::heap(words.len());
    words.iter().enumerate().for_each(|(i, word)| copy.store(i, *word));
    copy
}

fn all(words: &Words) -> Vec<u64> {
    (0..words.len()).map(|i| words.load(i)).collect()
}

fn left(node: &Node<Single>, maintenance: &Maintenance<Vec<u8>>) -> Words3 {
    let table = all(maintenance.log().unwrap().table().words());
    node.at_rest(|rest| {
        (table, rest.indexes.iter().map(|i| i.used().collect()).collect(), rest.apps.to_vec())
    })
}

/// A node like the store's, which goes on from what the last one has left.
fn alone(
    setup: &RunSetup,
    plan: &Plan,
    left: Option<Words3>,
    names_kept: usize,
) -> (Node<Single>, Maintenance<Vec<u8>>) {
    let buffers = vec![vec![0; setup.segment_bytes as usize]; 3];
    let (shards, log) = match left {
        None => {
            let shards = (0..plan.shards).map(|i| setup.build_shard(i).unwrap());
            (shards.collect::<Vec<_>>(), setup.build_log().unwrap())
        }
        Some((table, indexes, apps)) => {
            let mut table = SegmentTable::attach(copied(&table));
            table.raise_generation(setup.log.as_ref().unwrap().generation_floor);
            let generations = table.live_generations();
            let shard = |(i, (index, apps)): (usize, (&Vec<u64>, &Vec<u64>))| {
                let (mut shard, _) = setup.shard_in(i, copied(index), Some(&generations)).unwrap();
                shard.keep_flash_bytes(copied(apps), true);
                shard
            };
            let shards = indexes.iter().zip(&apps).enumerate().map(shard).collect();
            (shards, setup.log_over(table, buffers).unwrap())
        }
    };
    let node = Node::new(setup, Some(*plan), shards).unwrap();
    let maintenance = Maintenance::new(&node, log, setup.shards[0].cas_base, names_kept);
    (node, maintenance)
}

fn open(config: &CacheConfig, path: &Path, clock: &Arc<Clock>) -> Ready {
    let options = DeviceOptions { size: Some(ByteSize(FLASH)), ..DeviceOptions::new(path) };
    let device: Arc<dyn Device> = Arc::new(FlashDevice::open(&options).unwrap());
    let (path, size) = (path.to_owned(), config.flash_size);
    let medium = Medium { path, size, device, drive: None, why_buffered: None };
    let dir = DataDir::open(&config.data_dir, 1).unwrap();
    prepare(config, clock, dir, vec![medium], None).unwrap()
}

/// A random request: key, operation, and its value.
fn request(rng: &mut Rng, now: Now, run: &mut impl FnMut(&[u8], Op<'_>)) {
    let skewed = rng.unit() * rng.unit();
    let n = (skewed * KEYS as f64) as u64;
    let key = format!("app{}:key{n}", n % 3).into_bytes();
    let expiry = match rng.below(8) {
        0 => Expiry::at(UnixSecs(now.wall.0 + 1 + rng.below(60) as u32)),
        _ => Expiry::NEVER,
    };
    let len = if rng.chance(0.03) { 9_000 } else { 100 + rng.below(1_500) };
    let mut value = vec![0; len as usize];
    rng.fill(&mut value);
    let set = |mode| Write {
        mode,
        value: &value,
        flags: n as u32,
        expiry,
        compare_cas: None,
        new_cas: None,
        invalidate: false,
        vivify: None,
    };
    match rng.below(20) {
        0..=11 => run(&key, Op::Get(Get::default())),
        12..=15 => run(&key, Op::Store(set(StoreMode::Set))),
        16 => run(&key, Op::Store(set(StoreMode::Add))),
        17 => run(&key, Op::Delete(Delete::default())),
        18 => run(&key, Op::Touch(expiry)),
        _ => {
            run(&key, Op::Arith(Arith { delta: 1, vivify: Some((expiry, n)), ..Arith::default() }))
        }
    }
}

fn lockstep(policy: &str, seed: u64, requests: u64) {
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let path = dir.path().join("flash");
    let mut admission = AdmissionConfig::from_name(policy).unwrap();
    admission.flashiness.first_training_samples = 50;
    let config = CacheConfig { admission, ..config(dir.path().join("data")) };
    let clock = Arc::new(Clock::start());
    let mut rng = Rng::new(seed);
    let began = clock.now().wall;
    let mut now = Now { mono: Nanos::from_secs(10), wall: began };
    let mut memory: Option<(InMemory, Words3)> = None;
    let (mut hits_flash, mut reclaimed) = (0, 0);
    for run in 0..5 {
        let Ready { store, opened, mut maintenance, .. } = open(&config, &path, &clock);
        let setup = store.setup().clone();
        let expected = match run {
            0 => matches!(opened.warmth, Some(Warmth::Cold(_))),
            // After a kill, and after a stop in good order.
            1 | 3 => opened.warmth == Some(Warmth::Memory),
            _ => matches!(opened.warmth, Some(Warmth::Checkpoint)),
        };
        assert!(expected, "run {run}: {:?}", opened.warmth);
        let geometry = store.flash().unwrap().drives[0].geometry;
        let (mut flash, words) = match memory.take() {
            Some((flash, words)) => (flash, Some(words)),
            None => {
                (InMemory { geometry, bytes: vec![0; FLASH as usize], names: Vec::new() }, None)
            }
        };
        let (node, mut other) = alone(&setup, store.plan(), words, flash.names.len());
        let (mut due_a, mut due_b) = (Nanos::ZERO, Nanos::ZERO);
        for i in 0..requests {
            now.mono = Nanos(now.mono.0 + rng.below(8_000_000));
            now.wall = UnixSecs(began.0 + (now.mono.0 / 1_000_000_000) as u32);
            let mut a = Side {
                node: &store.node,
                maintenance: &mut maintenance,
                io: Served(Disk::first(store.flash())),
                due: &mut due_a,
            };
            let mut b =
                Side { node: &node, maintenance: &mut other, io: &mut flash, due: &mut due_b };
            request(&mut rng, now, &mut |key, op| {
                let said = a.execute(now, key, op);
                assert_eq!(said, b.execute(now, key, op), "{policy}, run {run}, request {i}");
                hits_flash +=
                    u64::from(said.said.len() > 1 && said.said[1].contains("tier: Flash"));
            });
            if run == 2 && i == requests / 2 {
                assert!(a.node.flush_all(now, UnixSecs(now.wall.0 + 2)));
                assert!(b.node.flush_all(now, UnixSecs(now.wall.0 + 2)));
            }
            if i.is_multiple_of(97) {
                let same = || format!("{policy}, run {run}, request {i}");
                // The store's lock counts who waits; here nobody does.
                assert_eq!(a.state(now), b.state(now), "{}", same());
                assert_eq!(*a.due, *b.due, "{}", same());
            }
            if i.is_multiple_of(2_000) || i + 1 == requests {
                bytes_are_equal(&store, &flash);
            }
        }
        let all = store.node.totals(now.mono);
        reclaimed += all.log.unwrap().stats.segments_reclaimed;
        if run % 2 == 1 {
            other.drain(now, &node, &mut &mut flash);
            store.close(Some(maintenance), Vec::new(), now);
            bytes_are_equal(&store, &flash);
        }
        if run == 4 {
            Region::forget(
                &locked(&store.flash().unwrap().drives[0].superblock).current().uuid.to_string(),
            );
        }
        let words = left(&node, &other);
        memory = Some((flash, words));
    }
    assert!(hits_flash > 50, "{policy}: {hits_flash}");
    assert!(policy != "all" || reclaimed > 0, "{reclaimed}");
}

/// Every segment, live or not.
fn bytes_are_equal(store: &Core, memory: &InMemory) {
    let flash = store.flash().unwrap();
    let geometry = flash.drives[0].geometry;
    for segment in 1..=geometry.segments() {
        let mut bytes = vec![0; geometry.segment_bytes() as usize];
        flash.device.read_at(geometry.offset(segment), &mut bytes).unwrap();
        assert!(bytes == memory.bytes[memory.at(segment)], "segment {segment} differs");
    }
}

#[test]
fn the_store_and_the_node_alone_answer_and_write_the_same() {
    for (policy, seed) in [("all", 1), ("reject_first", 2), ("flashiness", 3), ("ghost", 4)] {
        lockstep(policy, seed, 12_000);
    }
}
