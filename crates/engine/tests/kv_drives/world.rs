//! A cache over drives in memory, and what its clients know.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::lock::Single;
use larder_base::{Expiry, HashKey, Killed, Nanos, Now, Rng, UnixSecs, Words};
use larder_engine::kv::api::{
    Delete, Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_engine::kv::node::start::drives::{
    DrivesDrawn, FoundDrive, Member, assemble, flash_of, lead,
};
use larder_engine::kv::node::start::{Closed, Drawn, LastRun, Left, Shape, StartIo, StopIo};
use larder_engine::kv::node::{
    AdmissionNeed, AtRest, Cache, DriveEffects, DriveUpkeep, LogStart, Maintenance,
    MaintenanceEffects, Node, Plan, REGION_HEADER, RegionLayout, Start, StateIo, Turn, defaults,
    run_setup,
};
use larder_engine::kv::record::AppsSetup;
use larder_engine::kv::{FlashGeometry, FlashLog, IoFailed, SegmentIo, SegmentTable};
use larder_format::{Superblock, Uuid};
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::{BudgetState, WriteBudgetConfig};

const MEMORY: u64 = 3 << 20;
const MAX_ITEM: u64 = 48 << 10;
/// Keys of random operations.
const KEYS: u64 = 2000;
/// Of these, keys of a fifth of the operations.
const HOT: u64 = 60;

/// A drive, in or out of the machine.
#[derive(Clone, Default)]
pub(crate) struct Drive {
    bytes: u64,
    superblock: Option<Superblock>,
    segments: Vec<Vec<u8>>,
    fails: bool,
    hangs: bool,
}

impl Drive {
    fn new(bytes: u64) -> Drive {
        Drive { bytes, ..Drive::default() }
    }

    fn read(&self, segment: u16, offset: u32, len: u32) -> Option<Vec<u8>> {
        let at = usize::from(segment).min(self.segments.len());
        let behind = self.segments[at..].iter().flatten();
        let bytes: Vec<u8> = behind.skip(offset as usize).take(len as usize).copied().collect();
        (!self.fails && bytes.len() == len as usize).then_some(bytes)
    }
}

/// A segment at a time, of one drive.
struct Io<'a> {
    drive: &'a mut Drive,
    segment_bytes: usize,
    fuse: &'a Arc<AtomicU64>,
    rng: &'a mut Rng,
}

impl SegmentIo for Io<'_> {
    type Buffer = Vec<u8>;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        let count = usize::from(segment) + 1;
        if self.drive.segments.len() < count {
            self.drive.segments.resize(count, vec![0; self.segment_bytes]);
        }
        let to = &mut self.drive.segments[usize::from(segment)];
        if self.drive.fails {
            let cut = self.rng.below(bytes.len() as u64) as usize;
            to[..cut].copy_from_slice(&bytes[..cut]);
            return Err(IoFailed);
        }
        if self.fuse.load(Ordering::Relaxed) < 1000 && self.rng.chance(0.2) {
            let cut = self.rng.below(bytes.len() as u64) as usize;
            to[..cut].copy_from_slice(&bytes[..cut]);
            resume_unwind(Box::new(Killed));
        }
        to.copy_from_slice(bytes);
        Ok(())
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        let read = self.drive.read(segment, 0, bytes.len() as u32).ok_or(IoFailed)?;
        bytes.copy_from_slice(&read);
        Ok(())
    }
}

impl StateIo for Io<'_> {
    fn keep_names(&mut self, _: &[Vec<u8>]) -> bool {
        true
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

#[derive(Default)]
struct Fx;

impl MaintenanceEffects for Fx {
    fn train(&mut self, _: larder_policy::learn::TrainingSet, _: u64) {}
}
impl DriveEffects for Fx {}

#[derive(Default)]
struct Sink {
    item: Option<Vec<u8>>,
    touched: bool,
    verifies: Vec<FlashRead>,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        self.touched = matches!(reply, Reply::Touched);
        self.item = match reply {
            Reply::Item(item) => Some(item.value.to_vec()),
            _ => None,
        };
    }
    fn verify(&mut self, read: FlashRead) {
        self.verifies.push(read);
    }
    fn wake_cleaner(&mut self) {}
}

/// What one process has.
struct Running {
    node: Node<Single>,
    maintenance: Maintenance<Vec<u8>>,
    further: Vec<DriveUpkeep<Vec<u8>>>,
    flash: FlashGeometry,
    /// By order in the machine, the place of each drive.
    places: Vec<usize>,
}

/// What the operator does between two runs.
pub(crate) enum Change {
    TakeOut(usize),
    /// Every drive that is out, as it was then.
    PutBack,
    Replace(usize),
    Add(u64),
}

/// A checkpoint of a clean stop.
struct Checkpoint {
    tables: BTreeMap<usize, Vec<u64>>,
    indexes: Vec<Vec<u64>>,
    run: u64,
}

pub(crate) struct World {
    rng: Rng,
    now: Now,
    drives: Vec<Drive>,
    out: Vec<Drive>,
    /// Memory that outlives a process, with its layout.
    region: Option<(RegionLayout, &'static [AtomicU64])>,
    checkpoint: Option<Checkpoint>,
    last_run: Option<u64>,
    division: Option<(usize, u32)>,
    fuse: Arc<AtomicU64>,
    running: Option<Running>,
    /// The latest version of each key, and when it expires; `None` where it was deleted.
    model: BTreeMap<u64, Option<(Vec<u8>, Expiry)>>,
    versions: u64,
    faults: bool,
    budget: WriteBudgetConfig,
    pub(crate) warm: u64,
    pub(crate) kept: u64,
    pub(crate) flash_hits: u64,
    pub(crate) put_back: u64,
}

impl World {
    pub(crate) fn new(seed: u64, drives: &[u64]) -> World {
        let mut world = World {
            rng: Rng::new(seed ^ 0x5eed),
            now: Now { mono: Nanos::from_secs(1), wall: UnixSecs(1_000_000) },
            drives: drives.iter().map(|bytes| Drive::new(*bytes)).collect(),
            out: Vec::new(),
            region: None,
            checkpoint: None,
            last_run: None,
            division: None,
            fuse: Arc::new(AtomicU64::new(u64::MAX)),
            running: None,
            model: BTreeMap::new(),
            versions: 0,
            faults: true,
            budget: WriteBudgetConfig::default(),
            warm: 0,
            kept: 0,
            flash_hits: 0,
            put_back: 0,
        };
        world.start();
        world
    }

    /// No faults but those that the test makes.
    pub(crate) fn calm(&mut self) {
        self.faults = false;
        for drive in &mut self.drives {
            drive.fails = false;
        }
    }

    // ---- starts and stops ----

    /// Starts, as often as it is killed on the way.
    pub(crate) fn start(&mut self) {
        loop {
            let dies = self.faults && self.rng.chance(0.2);
            let stores = if dies { self.rng.below(100) } else { u64::MAX };
            self.fuse = Arc::new(AtomicU64::new(stores));
            match catch_unwind(AssertUnwindSafe(|| self.start_once())) {
                Ok(()) => {
                    self.fuse.store(u64::MAX, Ordering::Relaxed);
                    return;
                }
                Err(e) if e.is::<Killed>() => {}
                Err(e) => resume_unwind(e),
            }
        }
    }

    fn start_once(&mut self) {
        let found: Vec<_> = self
            .drives
            .iter()
            .map(|d| FoundDrive { superblock: d.superblock.as_ref(), bytes: d.bytes })
            .collect();
        let drawn = DrivesDrawn {
            uuid: Uuid([3; 16]),
            hash_key: HashKey([4; 16]),
            names: (0..16).map(|_| self.rng.next_u64().max(1)).collect(),
            now: self.now.wall,
        };
        let members = assemble(&found, MEMORY, MAX_ITEM, &drawn).unwrap();
        let flash = flash_of(&members);
        for (drive, member) in self.drives.iter_mut().zip(&members) {
            if member.fresh {
                drive.superblock = Some(member.superblock.clone());
            }
        }
        let admission = AdmissionConfig::from_name("all").unwrap();
        let need = AdmissionNeed::of(&admission);
        // An index that may be there stays as it was divided.
        let kept = self.division.filter(|_| self.region.is_some() || self.checkpoint.is_some());
        let plan =
            kept.and_then(|kept| Plan::keeping(MEMORY, MAX_ITEM, (flash, 512), need, kept).ok());
        let plan =
            plan.unwrap_or_else(|| Plan::over(MEMORY, MAX_ITEM, Some((flash, 512)), need).unwrap());
        self.division = Some((plan.shards, plan.buckets));
        let layout = RegionLayout { flash, shards: plan.shards, buckets: plan.buckets };
        let mut is_new = false;
        let same = |(old, _): &&mut (RegionLayout, &'static [AtomicU64])| {
            old.words() == layout.words() && old.shards == layout.shards
        };
        let region = match self.region.as_mut().filter(same) {
            Some((old, words)) => {
                *old = layout;
                *words
            }
            None => {
                is_new = true;
                let words: Vec<AtomicU64> =
                    (0..layout.words()).map(|_| AtomicU64::new(0)).collect();
                let words: &'static [AtomicU64] = words.leak();
                self.region = Some((layout, words));
                words
            }
        };
        let words = |range: std::ops::Range<usize>| {
            let mut words = Words::from_static(&region[range]);
            words.share_fuse(self.fuse.clone());
            words
        };
        let mut header = words(0..REGION_HEADER);
        let mut tables: Vec<(usize, Words)> = (0..flash.places())
            .map(|place| (place, layout.table(place)))
            .filter(|(_, range)| !range.is_empty())
            .map(|(place, range)| (place, words(range)))
            .collect();
        let first = larder_engine::index::FlashIndex::words_for(plan.buckets);
        let mut indexes: Vec<Words> = (0..plan.shards)
            .map(|i| {
                let at = layout.index(i).start;
                words(at..at + first)
            })
            .collect();
        let first = lead(&members, self.last_run);
        let superblock = members[first].superblock.clone();
        let last = self.last_run.map(|run| LastRun { run, proves_checkpoint: Ok(()) });
        let known = last.as_ref().ok_or_else(|| "a new directory".to_owned());
        let left = Left::new(&superblock, members[first].fresh, known);
        let left = members.iter().fold(left, |left, other| left.beside(&other.superblock));
        let drawn = Drawn {
            began: self.now.wall,
            cas: self.rng.next_u64(),
            run: self.rng.next_u64().max(1),
        };
        let shape = Shape::new(&superblock, &layout);
        let checkpoint = self.checkpoint.as_ref();
        let begun = left.begin(shape, &mut header, is_new, drawn, || {
            let found = checkpoint.filter(|c| c.run == superblock.run).ok_or("there is none")?;
            if found.indexes.iter().map(Vec::len).ne(indexes.iter().map(Words::len)) {
                return Err("of another configuration".to_owned());
            }
            let fill = |to: &mut Words, from: &[u64]| {
                from.iter().enumerate().for_each(|(i, word)| to.store(i, *word));
            };
            for (place, table) in &mut tables {
                if let Some(from) = found.tables.get(place).filter(|t| t.len() == table.len()) {
                    fill(table, from);
                }
            }
            indexes.iter_mut().zip(&found.indexes).for_each(|(to, from)| fill(to, from));
            Ok(UnixSecs(1))
        });
        self.warm += u64::from(begun.is_warm());
        let next = begun.superblock().clone();
        let place_of = |member: &Member| usize::from(member.part().place);
        let tables: Vec<(usize, SegmentTable)> = tables
            .into_iter()
            .map(|(place, words)| {
                let i = members.iter().position(|m| place_of(m) == place).unwrap();
                let found = self.drives[i].superblock.as_ref().unwrap();
                let kept = !members[i].fresh && begun.agrees(found);
                (place, begun.table_of(words, kept))
            })
            .collect();
        let generations = begun.generations(&flash, &tables);
        let cache = Cache {
            max_item: MAX_ITEM as u32,
            no_eviction: false,
            clock_mode: defaults::CLOCK_MODE,
            clock_max: 3,
            hot_percent: defaults::HOT_PERCENT,
            reinsert_percent: defaults::REINSERT_PERCENT,
            admission,
            budget: self.budget.clone(),
            applications: AppsSetup::default(),
        };
        let start = Start {
            larder: String::new(),
            uuid: next.uuid.to_string(),
            hash_key: next.hash_key,
            cas_base: next.cas_base,
            cas_bits: larder_engine::kv::node::start::cas_bits(plan.shards),
            seed: 1,
            flash,
            log: Some(LogStart {
                generation_floor: next.first_generation(),
                budget_state: None,
                budget_at: self.now.mono,
            }),
        };
        let setup = run_setup(&cache, &plan, &start).unwrap();
        setup.validate().unwrap();
        let mut shards = Vec::new();
        for (i, index) in indexes.into_iter().enumerate() {
            let (shard, report) = setup.shard_in(i, index, generations.as_deref()).unwrap();
            self.kept += report.kept;
            shards.push(shard);
        }
        let node = Node::new(&setup, Some(plan), shards).unwrap();
        let mut taking = Taking { world: self, members: &members };
        begun.take_over(&mut header, false, &mut taking).unwrap();
        let segment = flash.segment_bytes as usize;
        let mut logs: Vec<_> = tables
            .into_iter()
            .map(|(place, table)| {
                setup.log_of(place, table, None, vec![vec![0; segment]; 3]).unwrap().unwrap()
            })
            .collect();
        let first = logs.remove(0);
        let maintenance = Maintenance::new(&node, Some(first), 1, 0);
        let further = logs.into_iter().map(|log| DriveUpkeep::new(&node, log)).collect();
        let places = members.iter().map(place_of).collect();
        self.running = Some(Running { node, maintenance, further, flash, places });
    }

    /// The process ends.
    pub(crate) fn end(&mut self, clean: bool) {
        self.fuse = Arc::new(AtomicU64::new(u64::MAX));
        if !clean {
            self.running = None;
            return;
        }
        let Some(mut running) = self.running.take() else { return };
        let now = self.now;
        let order = running.further.iter().map(DriveUpkeep::drive).collect::<Vec<_>>();
        for (upkeep, place) in running.further.iter_mut().zip(order) {
            let at = running.places.iter().position(|p| *p == place).unwrap();
            let mut io = Io {
                drive: &mut self.drives[at],
                segment_bytes: running.flash.segment_bytes as usize,
                fuse: &self.fuse,
                rng: &mut self.rng,
            };
            upkeep.drain(now, &running.node, &mut io);
        }
        let run = self.last_run.unwrap();
        let mut io =
            Stopping { world: self, places: running.places.clone(), flash: running.flash, run };
        running.maintenance.stop(now, &running.node, &running.further, &mut io);
    }

    /// The process ends in some way, and the operator changes something, or not.
    pub(crate) fn end_and_change(&mut self) {
        let clean = self.rng.chance(0.4);
        self.end(clean);
        if !clean && self.rng.chance(0.15) {
            // A power cut: the memory goes.
            self.region = None;
        }
        for drive in &mut self.drives {
            drive.fails = false;
        }
        let changes = self.rng.below(3);
        for _ in 0..changes {
            let one = self.rng.below(self.drives.len() as u64) as usize;
            let change = match self.rng.below(6) {
                0 if self.drives.len() > 1 => Change::TakeOut(one),
                1 if !self.out.is_empty() => Change::PutBack,
                2 => Change::Replace(one),
                3 if self.drives.len() < 4 => Change::Add((2 << 20) + self.rng.below(2 << 20)),
                _ => continue,
            };
            self.change(&change);
        }
        // The order in which they are named says nothing.
        if self.rng.chance(0.3) {
            self.drives.rotate_left(1);
        }
    }

    pub(crate) fn change(&mut self, change: &Change) {
        assert!(self.running.is_none());
        match change {
            Change::TakeOut(i) => self.out.push(self.drives.remove(*i)),
            Change::PutBack => {
                while let Some(drive) = self.out.pop() {
                    // It may have been replaced under its name by nothing: a machine has room for six.
                    if self.drives.len() < 6 {
                        self.put_back += 1;
                        self.drives.push(drive);
                    }
                }
            }
            Change::Replace(i) => {
                let new = Drive::new(self.drives[*i].bytes);
                let old = std::mem::replace(&mut self.drives[*i], new);
                self.out.push(old);
            }
            Change::Add(bytes) => self.drives.push(Drive::new(*bytes)),
        }
        // All of them new: nothing is left of the cache.
        if self.drives.iter().all(|drive| drive.superblock.is_none()) {
            self.out.clear();
        }
    }

    // ---- requests ----

    /// Random operations, with turns of the logs between them; a kill may come at any store.
    pub(crate) fn operate(&mut self, steps: usize) {
        if self.rng.chance(0.5) {
            self.fuse.store(self.rng.below(20_000), Ordering::Relaxed);
        }
        let run = AssertUnwindSafe(|| {
            for _ in 0..steps {
                self.step();
            }
        });
        match catch_unwind(run) {
            Ok(()) => self.fuse.store(u64::MAX, Ordering::Relaxed),
            Err(e) if e.is::<Killed>() => self.running = None,
            Err(e) => resume_unwind(e),
        }
        if self.running.is_none() {
            self.start();
        }
    }

    fn step(&mut self) {
        self.now.mono = Nanos(self.now.mono.0 + self.rng.below(20_000_000));
        self.now.wall.0 += u32::from(self.rng.chance(0.01));
        // Some change while they are on their way to flash.
        let key = if self.rng.chance(0.2) { self.rng.below(HOT) } else { self.rng.below(KEYS) };
        match self.rng.below(20) {
            0..=8 => {
                let len = match self.rng.below(10) {
                    0 => self.rng.below(40_000),
                    1..=3 => self.rng.below(6_000),
                    _ => self.rng.below(900),
                };
                self.store(key, len as usize);
            }
            9 => self.delete(key),
            10 | 11 => self.touch(key),
            12..=15 => drop(self.get(key)),
            16 if self.faults => {
                let one = self.rng.below(self.drives.len() as u64) as usize;
                self.drives[one].fails = self.rng.chance(0.3);
            }
            _ => {
                for _ in 0..self.rng.below(40) {
                    self.turn();
                }
            }
        }
    }

    /// A turn of some log.
    fn turn(&mut self) -> bool {
        let Running { node, maintenance, further, flash, places } = self.running.as_mut().unwrap();
        let which = self.rng.below(1 + further.len() as u64) as usize;
        let place = match which {
            0 => maintenance.log().unwrap().part().drive,
            i => further[i - 1].drive(),
        };
        let at = places.iter().position(|p| *p == place).unwrap();
        if self.drives[at].hangs {
            return false;
        }
        let mut io = Io {
            drive: &mut self.drives[at],
            segment_bytes: flash.segment_bytes as usize,
            fuse: &self.fuse,
            rng: &mut self.rng,
        };
        let turn = match which {
            0 => {
                maintenance.wake();
                maintenance.turn(self.now, node, &mut io, &mut Fx)
            }
            i => {
                further[i - 1].wake();
                further[i - 1].turn(self.now, node, &mut io, &mut Fx)
            }
        };
        turn == Turn::Again
    }

    fn settle(&mut self) {
        let mut idle = 0;
        while idle < 12 {
            idle = if self.turn() { 0 } else { idle + 1 };
        }
    }

    /// The value, whether flash was read, and whether the object was touched.
    fn execute(&mut self, key: u64, op: Op<'_>) -> (Option<Vec<u8>>, bool, bool) {
        let name = format!("key{key}");
        let key = name.as_bytes();
        let Running { node, flash, places, .. } = self.running.as_mut().unwrap();
        let request = Request { key, hash: node.hash(key), app: node.app(key), op };
        let (mut sink, mut read) = (Sink::default(), None::<FlashRead>);
        let fetch = |read: &FlashRead| {
            let (place, segment) = flash.at(read.at.segment)?;
            let at = places.iter().position(|p| *p == place)?;
            self.drives[at].read(segment, read.at.offset, read.at.len)
        };
        loop {
            let bytes = read.as_ref().and_then(fetch);
            let fetched = read.as_ref().map(|read| Fetched { read, bytes: bytes.as_deref() });
            match node.execute(self.now, &request, fetched, &mut sink) {
                Outcome::Done => break,
                Outcome::Read(next) => read = Some(next),
            }
        }
        for verify in std::mem::take(&mut sink.verifies) {
            let bytes = fetch(&verify);
            node.verify(self.now, &verify, bytes.as_deref());
        }
        (sink.item, read.is_some(), sink.touched)
    }

    fn store(&mut self, key: u64, len: usize) {
        self.versions += 1;
        let mut value = format!("{key}/{}/", self.versions).into_bytes();
        value.resize(value.len().max(len), b'x');
        // It may be killed before it is answered: then either version is right, and the old one is not known to be gone.
        self.model.remove(&key);
        self.execute(
            key,
            Op::Store(Store {
                mode: StoreMode::Set,
                value: &value,
                flags: 0,
                expiry: Expiry::NEVER,
                compare_cas: None,
                new_cas: None,
                invalidate: false,
                vivify: None,
            }),
        );
        self.model.insert(key, Some((value, Expiry::NEVER)));
    }

    /// It gets another expiry, and keeps its CAS.
    fn touch(&mut self, key: u64) {
        let soon = UnixSecs(self.now.wall.0 + 1 + self.rng.below(4) as u32);
        let expiry = if self.rng.chance(0.5) { Expiry::at(soon) } else { Expiry::NEVER };
        let before = self.model.remove(&key);
        let (.., touched) = self.execute(key, Op::Touch(expiry));
        if let Some(before) = before {
            let after = before.map(|(value, was)| (value, if touched { expiry } else { was }));
            self.model.insert(key, after);
        }
    }

    fn delete(&mut self, key: u64) {
        self.model.remove(&key);
        self.execute(key, Op::Delete(Delete::default()));
        self.model.insert(key, None);
    }

    /// What is there, and whether flash was read.
    fn get(&mut self, key: u64) -> (bool, bool) {
        let (found, read, _) = self.execute(key, Op::Get(Get::default()));
        if let Some(found) = &found {
            assert!(found.starts_with(format!("{key}/").as_bytes()), "another key's value");
            match self.model.get(&key) {
                Some(Some((latest, expiry))) => {
                    assert!(found == latest, "key {key}: an old value");
                    assert!(!expiry.is_past(self.now.wall), "key {key} had expired");
                }
                Some(None) => panic!("key {key} was deleted"),
                None => {}
            }
        }
        self.flash_hits += u64::from(found.is_some() && read);
        (found.is_some(), found.is_some() && read)
    }

    // ---- what tests ask ----

    pub(crate) fn store_all(&mut self, keys: std::ops::Range<u64>, len: usize) {
        for key in keys {
            self.store(key, len);
            if key.is_multiple_of(16) {
                self.settle();
            }
        }
        self.settle();
    }

    pub(crate) fn get_share(&mut self, keys: std::ops::Range<u64>) -> f64 {
        let all = keys.end - keys.start;
        keys.filter(|key| self.get(*key).0).count() as f64 / all as f64
    }

    pub(crate) fn flash_hit_share(&mut self, keys: std::ops::Range<u64>) -> f64 {
        let all = keys.end - keys.start;
        keys.filter(|key| self.get(*key).1).count() as f64 / all as f64
    }

    fn log_of(&self, drive: usize) -> &FlashLog<Vec<u8>> {
        let running = self.running.as_ref().unwrap();
        let place = running.places[drive];
        let first = running.maintenance.log().unwrap();
        if first.part().drive == place {
            return first;
        }
        running.further.iter().find(|upkeep| upkeep.drive() == place).unwrap().log()
    }

    /// Bytes written to a drive, by its order in the machine, in this run.
    pub(crate) fn written(&self, drive: usize) -> u64 {
        self.log_of(drive).stats().bytes_written
    }

    pub(crate) fn capacity(&self, drive: usize) -> u64 {
        self.log_of(drive).flash().capacity()
    }

    pub(crate) fn segment_bytes(&self) -> u64 {
        self.running.as_ref().unwrap().flash.segment_bytes.into()
    }

    /// Objects that left DRAM with nobody asking admission.
    pub(crate) fn lost(&self) -> u64 {
        self.running.as_ref().unwrap().node.totals(self.now.mono).shards.evictions_unjudged
    }

    pub(crate) fn fail(&mut self, drive: usize, fails: bool) {
        self.drives[drive].fails = fails;
    }

    pub(crate) fn hang(&mut self, drive: usize, hangs: bool) {
        self.drives[drive].hangs = hangs;
        let running = self.running.as_ref().unwrap();
        running.node.set_busy(running.places[drive], hangs);
    }

    /// The drive's write budget is spent for good.
    pub(crate) fn spend(&mut self, drive: usize) {
        let now = self.now;
        let running = self.running.as_mut().unwrap();
        let place = running.places[drive];
        let first = running.maintenance.log_mut().unwrap();
        let log = if first.part().drive == place {
            first
        } else {
            running.further.iter_mut().find(|u| u.drive() == place).unwrap().log_mut()
        };
        let capacity = larder_base::ByteSize(log.flash().capacity());
        let slow = WriteBudgetConfig {
            tbw: Some(larder_base::ByteSize(1 << 30)),
            years: 30.0,
            first_fill: false,
            ..WriteBudgetConfig::default()
        };
        let budget = larder_policy::budget::WriteBudget::new(&slow, capacity, None, now.mono);
        *log.budget_mut() = budget.unwrap();
        let all = log.budget_mut().available(now.mono);
        log.budget_mut().grant(now.mono, all);
    }

    /// So many seconds pass.
    pub(crate) fn pass(&mut self, seconds: u64) {
        self.now.mono = self.now.mono + Nanos::from_secs(seconds);
        self.now.wall.0 += seconds as u32;
    }
}

/// A start makes things durable; it may be killed between any two.
struct Taking<'a> {
    world: &'a mut World,
    members: &'a [Member],
}

impl Taking<'_> {
    fn may_die(&mut self) {
        if self.world.faults && self.world.rng.chance(0.05) {
            resume_unwind(Box::new(Killed));
        }
    }
}

impl StartIo for Taking<'_> {
    type Error = ();
    fn write_run(&mut self, run: u64) -> Result<(), ()> {
        self.may_die();
        self.world.last_run = Some(run);
        Ok(())
    }
    fn forget_run(&mut self) -> Result<(), ()> {
        self.world.last_run = None;
        Ok(())
    }
    fn write_superblock(&mut self, next: &Superblock) -> Result<(), ()> {
        for i in 0..self.members.len() {
            self.may_die();
            let says = &self.members[i].superblock;
            let lead = says.part.unwrap().drive == next.part.unwrap().drive;
            self.world.drives[i].superblock =
                Some(if lead { next.clone() } else { says.following(next) });
        }
        Ok(())
    }
    fn keep_time(&mut self) {
        self.may_die();
    }
    fn remove_checkpoint(&mut self) -> Result<(), ()> {
        self.may_die();
        self.world.checkpoint = None;
        Ok(())
    }
    fn void_memory_file(&mut self) {}
}

struct Stopping<'a> {
    world: &'a mut World,
    places: Vec<usize>,
    flash: FlashGeometry,
    run: u64,
}

impl Stopping<'_> {
    fn at(&self, place: usize) -> usize {
        self.places.iter().position(|p| *p == place).unwrap()
    }
    fn io(&mut self) -> Io<'_> {
        let first = self.at(*self.places.iter().min().unwrap());
        let World { drives, fuse, rng, .. } = &mut *self.world;
        let segment_bytes = self.flash.segment_bytes as usize;
        Io { drive: &mut drives[first], segment_bytes, fuse, rng }
    }
}

impl SegmentIo for Stopping<'_> {
    type Buffer = Vec<u8>;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.io().write(segment, bytes)
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        self.io().read(segment, bytes)
    }
}

impl StateIo for Stopping<'_> {
    fn keep_names(&mut self, _: &[Vec<u8>]) -> bool {
        true
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

impl StopIo for Stopping<'_> {
    fn sync(&mut self, drive: usize) -> Result<(), String> {
        match self.world.drives[self.at(drive)].fails {
            true => Err("it fails".to_owned()),
            false => Ok(()),
        }
    }
    fn write_checkpoint(
        &mut self,
        tables: &[(usize, &Words)],
        rest: &AtRest<'_>,
    ) -> (Result<(), String>, u64) {
        let all = |w: &Words| (0..w.len()).map(|i| w.load(i)).collect();
        self.world.checkpoint = Some(Checkpoint {
            tables: tables.iter().map(|(place, words)| (*place, all(words))).collect(),
            indexes: rest.indexes.iter().map(|index| index.used().collect()).collect(),
            run: self.run,
        });
        (Ok(()), 1)
    }
    fn write_superblock(&mut self, drive: usize) -> Result<(), String> {
        let at = self.at(drive);
        let current = self.world.drives[at].superblock.as_ref().unwrap();
        self.world.drives[at].superblock = Some(current.stop(current.cas_base));
        Ok(())
    }
    fn release(&mut self) {
        self.world.region = None;
    }
    fn keep_dram(&mut self, _: Option<&Closed>) {}
}
