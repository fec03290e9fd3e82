//! One run: engine, device, clock, faults and kills, all from one seed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use larder_base::lock::Single;
use larder_base::{Expiry, HashKey, KeyHasher, Killed, Nanos, Now, Rng, UnixSecs};
use larder_engine::index::Place;
use larder_engine::kv::api::{
    Arith, Delete, Effects, Fetched, FlashRead, Get, Op, Outcome, Reply, Request, Store, StoreMode,
};
use larder_engine::kv::node::start::Warmth;
use larder_engine::kv::node::{Maintenance, MaintenanceEffects, Node, StateIo, Turn};
use larder_engine::kv::{IoFailed, OwnerOf, Planted, Saved, SegmentIo};
use larder_engine::segment::span;
use larder_format::{Claimed, Filling, Find, find, find_extent};
use larder_policy::budget::BudgetState;
use larder_policy::learn::{TrainParams, TrainingSet, train};

use crate::dram::{Back, MemoryFiles};
use crate::heads::Pages;
use crate::model::{Model, Version, number};
use crate::seen::Seen;
use crate::starts::{BIG, Directory, Kept, Machine, NotStarted, has_big, stop};

pub(super) const SHARDS: usize = 2;
pub(super) const SEGMENTS: u16 = 12;
pub(super) const SEGMENT_BYTES: u32 = 8 << 10;
const KEYS: usize = 80;

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Options {
    pub(crate) planted: Option<Planted>,
}

pub(super) struct Disk {
    segments: Vec<Vec<u8>>,
    rng: Rng,
    fault_rate: f64,
    errors: u64,
    /// Names that could not be kept.
    unkept_names: u64,
    fuse: Option<Arc<AtomicU64>>,
}

impl Disk {
    pub(super) fn fails(&mut self) -> bool {
        let fails = self.rng.chance(self.fault_rate);
        self.errors += u64::from(fails);
        fails
    }

    /// The directory has these names, or it fails: then it may have them or not.
    pub(super) fn keep_names(&mut self, kept: &mut Vec<Vec<u8>>, names: &[Vec<u8>]) -> bool {
        let (fails, made) = (self.rng.chance(0.2), self.rng.chance(0.3));
        if !fails || made {
            *kept = names.to_vec();
        }
        self.unkept_names += u64::from(fails);
        !fails
    }
}

impl Disk {
    /// Bytes from a place on, into the segments that follow.
    fn at(&self, segment: u16, offset: u32, len: u32) -> Vec<u8> {
        let behind = self.segments[usize::from(segment)..].iter().flatten();
        behind.skip(offset as usize).take(len as usize).copied().collect()
    }
}

impl SegmentIo for Disk {
    type Buffer = Vec<u8>;

    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        if self.fails() {
            // Some of it may be there, some not.
            let cut = self.rng.below(bytes.len() as u64) as usize;
            self.segments[usize::from(segment)][..cut].copy_from_slice(&bytes[..cut]);
            return Err(IoFailed);
        }
        if let Some(fuse) = &self.fuse {
            // A kill may fall into the write: then a part of it is there.
            if self.rng.chance(0.1) {
                fuse.store(0, Ordering::Relaxed);
                let cut = self.rng.below(bytes.len() as u64) as usize;
                self.segments[usize::from(segment)][..cut].copy_from_slice(&bytes[..cut]);
                std::panic::resume_unwind(Box::new(Killed));
            }
        }
        self.segments[usize::from(segment)].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        if self.fails() {
            return Err(IoFailed);
        }
        bytes.copy_from_slice(&self.segments[usize::from(segment)]);
        Ok(())
    }
}

/// The device, and the directory beside it.
struct Io<'a> {
    disk: &'a mut Disk,
    names: &'a mut Vec<Vec<u8>>,
}

impl SegmentIo for Io<'_> {
    type Buffer = Vec<u8>;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.disk.write(segment, bytes)
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        self.disk.read(segment, bytes)
    }
}

impl StateIo for Io<'_> {
    fn keep_names(&mut self, names: &[Vec<u8>]) -> bool {
        self.disk.keep_names(self.names, names)
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

/// An operation that owns what it was given.
#[derive(Clone, Debug)]
enum Ask {
    Get(Get),
    Store { mode: StoreMode, value: Vec<u8>, flags: u32, expiry: Expiry, compare_cas: Option<u64> },
    Delete { compare_cas: Option<u64> },
    Arith { decrement: bool, delta: u64 },
    Touch(Expiry),
}

impl Ask {
    fn name(&self) -> String {
        match self {
            Ask::Store { mode, value, compare_cas, expiry, .. } => {
                format!("{mode:?} {} bytes, cas {compare_cas:?}, {expiry:?}", value.len())
            }
            other => format!("{other:?}"),
        }
    }

    fn op(&self) -> Op<'_> {
        match self {
            Ask::Get(get) => Op::Get(*get),
            Ask::Store { mode, value, flags, expiry, compare_cas } => Op::Store(Store {
                mode: *mode,
                value,
                flags: *flags,
                expiry: *expiry,
                compare_cas: *compare_cas,
                new_cas: None,
                invalidate: false,
                vivify: None,
            }),
            Ask::Delete { compare_cas } => {
                Op::Delete(Delete { compare_cas: *compare_cas, ..Delete::default() })
            }
            Ask::Arith { decrement, delta } => {
                Op::Arith(Arith { decrement: *decrement, delta: *delta, ..Arith::default() })
            }
            Ask::Touch(expiry) => Op::Touch(*expiry),
        }
    }
}

/// An answer that owns what it says.
#[derive(Clone, Debug, PartialEq)]
enum Said {
    Item(Version),
    Miss,
    Stored(u64, u32),
    NotStored,
    Exists,
    NotFound,
    Deleted,
    Touched,
    Number(u64, Version),
    NotNumeric,
    TooLarge,
    OutOfMemory,
}

#[derive(Default)]
struct Sink {
    said: Option<Said>,
    twice: bool,
    verifies: Vec<FlashRead>,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        let version = |i: larder_engine::kv::api::Item<'_>| Version {
            value: i.value.to_vec(),
            flags: i.flags,
            cas: i.cas,
            expiry: i.expiry,
        };
        self.twice |= self.said.is_some();
        self.said = Some(match reply {
            Reply::Item(i) => Said::Item(version(i)),
            Reply::Miss => Said::Miss,
            Reply::Stored { cas, size } => Said::Stored(cas, size),
            Reply::NotStored => Said::NotStored,
            Reply::Exists => Said::Exists,
            Reply::NotFound => Said::NotFound,
            Reply::Deleted { .. } => Said::Deleted,
            Reply::Touched => Said::Touched,
            Reply::Number(n, i) => Said::Number(n, version(i)),
            Reply::NotNumeric => Said::NotNumeric,
            Reply::TooLarge => Said::TooLarge,
            Reply::OutOfMemory => Said::OutOfMemory,
        });
    }
    fn verify(&mut self, read: FlashRead) {
        self.verifies.push(read);
    }
    fn wake_cleaner(&mut self) {}
}

struct Waiting {
    key: usize,
    ask: Ask,
    read: FlashRead,
    /// Taken from the device at some moment between the request and its completion.
    bytes: Option<Option<Vec<u8>>>,
}

struct Verifying {
    read: FlashRead,
    bytes: Option<Option<Vec<u8>>>,
}

/// Flash, directory and memory file, each of which may be put back.
struct Copy {
    flash: (Pages, Vec<Vec<u8>>),
    directory: Directory,
    memory: MemoryFiles,
}

pub(crate) struct World {
    rng: Rng,
    options: Options,
    machine: Machine,
    /// Flash, directory and memory file as they were once, for one that puts them back.
    copy: Option<Copy>,
    hasher: KeyHasher,
    keys: Vec<Vec<u8>>,
    now: Now,
    node: Node<Single>,
    maintenance: Maintenance<Vec<u8>>,
    wanted: Wanted,
    disk: Disk,
    model: Model,
    waiting: VecDeque<Waiting>,
    verifying: VecDeque<Verifying>,
    policy: &'static str,
    /// Some runs are without flash. In most worlds none is: each makes the flash cold.
    knows_no_flash: bool,
    /// The run that is under way is.
    alone: bool,
    /// Runs are long: the index fills up.
    ends_seldom: bool,
    seen: Seen,
    transcript: Vec<String>,
    /// Validate after every step and show the whole run on failure: for looking into one seed.
    paranoid: bool,
}

/// Keys of which many share tag and shard.
fn choose_keys(hasher: &KeyHasher, rng: &mut Rng) -> Vec<Vec<u8>> {
    let salt = rng.next_u64();
    let mut by_tag = std::collections::BTreeMap::<(usize, u16), Vec<Vec<u8>>>::new();
    let mut keys: Vec<Vec<u8>> = Vec::new();
    for i in 0u32.. {
        let key = format!("{}:k{salt:x}-{i}", i % 3).into_bytes();
        let h = hasher.hash(&key);
        let group = by_tag.entry((OwnerOf::shard_of(h, SHARDS), h.tag() & 0x3f)).or_default();
        // Within a group the low tag bits agree; keep those whose whole tag agrees with the first of the group.
        if group.first().is_none_or(|f| hasher.hash(f).tag() == h.tag()) {
            group.push(key);
        }
        if group.len() == 4 {
            keys.append(group);
            if keys.len() >= KEYS * 3 / 4 {
                break;
            }
        }
    }
    for i in keys.len()..KEYS {
        keys.push(format!("lone{salt:x}-{i}").into_bytes());
    }
    keys
}

impl World {
    pub(crate) fn new(seed: u64, options: Options) -> World {
        let mut rng = Rng::new(seed);
        let hasher = KeyHasher::new(HashKey([seed as u8; 16]));
        let keys = choose_keys(&hasher, &mut rng);
        let faulty = rng.chance(0.4);
        let disk = Disk {
            segments: vec![vec![0; SEGMENT_BYTES as usize]; usize::from(SEGMENTS) + 1],
            rng: rng.fork(1),
            fault_rate: if faulty { 0.03 } else { 0.0 },
            errors: 0,
            unkept_names: 0,
            fuse: None,
        };
        let policy = ["all", "all", "ghost", "flashiness", "reject_first"][rng.below(5) as usize];
        let buckets = if rng.chance(0.7) { 1 } else { 2 };
        let now = Now { mono: Nanos::from_secs(1), wall: UnixSecs(1_000_000) };
        let mut machine = Machine::new(seed, buckets);
        let (node, maintenance, _) = loop {
            let begun = || machine.start(policy, now, &mut rng, &options, true);
            match catch_unwind(AssertUnwindSafe(begun)) {
                Ok(Ok(started)) => break started.0,
                Ok(Err(NotStarted::Wrong(why))) => panic!("{why}"),
                Ok(Err(NotStarted::Failed)) => {}
                Err(payload) if payload.is::<Killed>() => {}
                Err(payload) => resume_unwind(payload),
            }
        };
        World {
            options,
            machine,
            copy: None,
            hasher,
            keys,
            now,
            node,
            maintenance,
            wanted: Wanted::default(),
            disk,
            model: Model::default(),
            waiting: VecDeque::new(),
            verifying: VecDeque::new(),
            policy,
            knows_no_flash: seed % 4 == 1,
            alone: false,
            ends_seldom: seed % 4 == 2,
            seen: Seen::default(),
            transcript: Vec::new(),
            paranoid: std::env::var("LARDER_PARANOID").is_ok(),
            rng,
        }
    }

    pub(crate) fn seen(&self) -> Seen {
        let mut seen = self.seen;
        for s in (0..SHARDS).map(|i| self.node.lock(i)) {
            let st = s.stats();
            seen.hits_dram += st.hits_dram;
            seen.hits_flash += st.hits_flash;
            seen.false_reads += st.flash_reads_false;
            seen.restored += st.innocents_restored;
            seen.staged_dead += st.staged_dead;
            seen.forced += st.forced_evictions;
            seen.reinserted += st.reinserted;
            seen.brought_in += st.brought_in;
            seen.extents += s.index().wide();
        }
        seen.reclaimed += self.maintenance.log().map_or(0, |log| log.stats().segments_reclaimed);
        seen.io_errors += self.disk.errors;
        seen.unkept_names += self.disk.unkept_names;
        seen
    }

    pub(crate) fn transcript(&self) -> Vec<String> {
        self.transcript.clone()
    }

    pub(crate) fn step(&mut self) -> Result<(), String> {
        self.guarded(World::act)
    }

    fn guarded(&mut self, f: impl FnOnce(&mut World) -> Result<(), String>) -> Result<(), String> {
        match catch_unwind(AssertUnwindSafe(|| f(self))) {
            Ok(result) => result,
            Err(payload) if payload.is::<Killed>() => self.recover(),
            Err(payload) => resume_unwind(payload),
        }
    }

    fn act(&mut self) -> Result<(), String> {
        let what = self.rng.below(1000);
        if self.ends_seldom
            && matches!(what, 815..820 | 978..990 | 996..998)
            && self.rng.chance(0.9)
        {
            return Ok(());
        }
        match what {
            0..620 => self.request()?,
            620..780 => self.complete()?,
            780..815 => self.verify_one(),
            815..820 => self.stop_and_start()?,
            820..960 => {
                let World { node, maintenance, disk, machine, wanted, now, .. } = self;
                let io = &mut Io { disk, names: &mut machine.directory.names };
                if self.rng.chance(0.3) {
                    // What a clean stop does; here it makes small, half-filled segments.
                    maintenance.drain(*now, node, io);
                    return Ok(());
                }
                for _ in 0..self.rng.range(1, 12) {
                    if maintenance.turn(*now, node, io, wanted) != Turn::Again {
                        break;
                    }
                }
                if let Some((set, seed)) = wanted.0.take_if(|_| self.rng.chance(0.5)) {
                    let model = train(&set, &TrainParams::default(), seed).ok();
                    maintenance.fitted(*now, node, set.app, model);
                }
            }
            960..975 => {
                let secs = self.rng.below(3) as u32;
                self.now.wall.0 += secs;
                self.now.mono = self.now.mono + Nanos::from_millis(u64::from(secs) * 1000 + 1);
                self.model.tick(self.now.wall);
            }
            975..978 => self.flush()?,
            978..990 => {
                if self.disk.fuse.is_none() {
                    self.light_fuse();
                }
            }
            990..993 => self.rot(),
            993..994 => self.resize(),
            994..996 => self.expire(),
            996..998 => self.stop_and_start()?,
            _ => self.validate()?,
        }
        if self.paranoid {
            self.validate().map_err(|why| format!("{why}\n{}", self.transcript.join("\n")))?;
        }
        Ok(())
    }

    /// Expired objects leave DRAM, by a pass or a part of one.
    fn expire(&mut self) {
        let all = self.rng.chance(0.5);
        for i in 0..SHARDS {
            while self.node.lock(i).expire(self.now, all) && self.rng.chance(0.9) {}
        }
        // Another pass is maintenance's.
        self.node.crawl();
    }

    /// A shard gets more or less memory.
    fn resize(&mut self) {
        let fold = if has_big(self.machine.superblock()) { 6 } else { 1 };
        let bytes = self.rng.range(fold * (7 << 10), fold * (10 << 10)) as usize;
        let mut shard = self.node.lock(self.rng.below(SHARDS as u64) as usize);
        let shard = shard.unrecorded();
        shard.set_marks(bytes * 5 / 8, bytes * 7 / 8);
        while shard.resize(self.now, bytes).expect("a few KiB can be had") {}
    }

    pub(crate) fn finish(&mut self) -> Result<(), String> {
        while !self.waiting.is_empty() {
            self.guarded(World::complete)?;
        }
        self.validate()
    }

    fn validate(&mut self) -> Result<(), String> {
        self.node.validate()?;
        (0..KEYS).try_for_each(|key| self.no_way_to_the_dead(key))
    }

    /// No index entry leads a key to a record of it that is not its latest version.
    fn no_way_to_the_dead(&mut self, key: usize) -> Result<(), String> {
        let Some(log) = self.maintenance.log() else { return Ok(()) };
        let name = &self.keys[key];
        let hash = self.hasher.hash(name);
        let probed = self.node.lock(self.node.shard_of(hash)).index().probe(hash);
        let pages = SEGMENT_BYTES / 4096;
        for entry in probed.iter() {
            let to_end = u64::from(SEGMENTS + 1 - entry.segment) * u64::from(SEGMENT_BYTES);
            let Some((at, len)) = span(entry.place, hash, pages, to_end) else { continue };
            let bytes = &self.disk.at(entry.segment, at, len)[..];
            let generation = log.table().generation(entry.segment);
            let filling = Filling {
                salt: self.machine.superblock().salt(),
                segment: entry.segment,
                generation,
            };
            let found = match entry.place {
                Place::Page { .. } => find(bytes, name, filling),
                Place::Extent { .. } => find_extent(bytes, name, filling),
            };
            let Find::Found(record) = found else { continue };
            let m = record.meta();
            // What its application's number stands for is on disk, and another start's node knows it.
            let application =
                usize::from(m.app.0).checked_sub(1).map(|i| self.machine.directory.names.get(i));
            let prefix = name.split(|&b| b == b':').next().filter(|p| p.len() < name.len());
            if application.map(|name| name.map(Vec::as_slice)) != prefix.map(Some) {
                return Err(format!("key {key}: a record bears application {}", m.app.0));
            }
            let version = Version {
                value: record.value().to_vec(),
                flags: m.flags,
                cas: m.cas,
                expiry: m.expiry,
            };
            let allowed = self.model.slot(key).allowed.clone();
            // An announced flush may be due and not yet carried out in this shard.
            if !allowed.contains(&version) && !self.model.flush_came() {
                return Err(format!(
                    "key {key}: {entry:?} leads to {version:?}, allowed {allowed:?}"
                ));
            }
        }
        Ok(())
    }

    fn say(&mut self, text: String) {
        if self.paranoid {
            eprintln!("T {text}");
        }
        self.transcript.push(text);
    }

    // ---- requests ----

    fn request(&mut self) -> Result<(), String> {
        let key = self.rng.below(KEYS as u64) as usize;
        let ask = self.ask(key);
        if matches!(ask, Ask::Store { mode: StoreMode::Append | StoreMode::Prepend, .. })
            && self.model.slot(key).allowed.len() > 1
        {
            return Ok(());
        }
        self.execute(key, ask, None)
    }

    fn expiry(&mut self) -> Expiry {
        if self.rng.chance(0.8) {
            Expiry::NEVER
        } else {
            Expiry(self.now.wall.0 + self.rng.range(1, 6) as u32)
        }
    }

    fn value(&mut self) -> Vec<u8> {
        if self.rng.chance(0.15) {
            return self.rng.below(1_000_000).to_string().into_bytes();
        }
        let big = has_big(self.machine.superblock()) && self.rng.chance(0.3);
        let len = match self.rng.chance(0.08) {
            _ if big => self.rng.below(u64::from(BIG) - 300),
            true => self.rng.below(3_000),
            false => self.rng.below(500),
        };
        let mut value = vec![0; len as usize];
        self.rng.fill(&mut value);
        value
    }

    fn ask(&mut self, key: usize) -> Ask {
        let known_cas = self.model.slot(key).allowed.first().map_or(1, |v| v.cas);
        let compare = |rng: &mut Rng| if rng.chance(0.7) { known_cas } else { known_cas ^ 1 };
        match self.rng.below(100) {
            0..45 => {
                let touch = self.rng.chance(0.08).then(|| self.expiry());
                Ask::Get(Get { touch, ..Get::default() })
            }
            45..75 => {
                let mode = match self.rng.below(12) {
                    0 => StoreMode::Add,
                    1 => StoreMode::Replace,
                    2 => StoreMode::Append,
                    3 => StoreMode::Prepend,
                    _ => StoreMode::Set,
                };
                let compare_cas = (mode == StoreMode::Set && self.rng.chance(0.15))
                    .then(|| compare(&mut self.rng));
                let flags = if self.rng.chance(0.5) { 0 } else { self.rng.next_u64() as u32 };
                let (value, expiry) = (self.value(), self.expiry());
                Ask::Store { mode, value, flags, expiry, compare_cas }
            }
            75..88 => {
                let compare_cas = self.rng.chance(0.1).then(|| compare(&mut self.rng));
                Ask::Delete { compare_cas }
            }
            88..95 => {
                Ask::Arith { decrement: self.rng.chance(0.3), delta: self.rng.below(2_000_000) }
            }
            _ => Ask::Touch(self.expiry()),
        }
    }

    fn execute(
        &mut self,
        key: usize,
        ask: Ask,
        fetched: Option<(FlashRead, Option<Vec<u8>>)>,
    ) -> Result<(), String> {
        let name = self.keys[key].clone();
        let hash = self.hasher.hash(&name);
        let req = Request { key: &name, hash, app: self.node.app(&name), op: ask.op() };
        let mut sink = Sink::default();
        let fetched =
            fetched.as_ref().map(|(read, bytes)| Fetched { read, bytes: bytes.as_deref() });
        if self.paranoid {
            eprintln!("X {key} {:x} {} fetched {}", hash.0, ask.name(), fetched.is_some());
        }
        let outcome = self.node.execute(self.now, &req, fetched, &mut sink);
        for read in std::mem::take(&mut sink.verifies) {
            self.verifying.push_back(Verifying { read, bytes: None });
        }
        match (outcome, sink.said) {
            (Outcome::Done, Some(said)) if !sink.twice => {
                self.say(format!("{key} {} -> {said:?}", ask.name()));
                self.check(key, &ask, said).map_err(|why| {
                    if self.paranoid {
                        format!("{why}\n{}", self.transcript.join("\n"))
                    } else {
                        why
                    }
                })
            }
            (Outcome::Read(read), None) => {
                let bytes = self.rng.chance(0.5).then(|| self.read(&read));
                self.waiting.push_back(Waiting { key, ask, read, bytes });
                Ok(())
            }
            (outcome, said) => Err(format!("outcome {outcome:?} with answer {said:?}")),
        }
    }

    fn read(&mut self, read: &FlashRead) -> Option<Vec<u8>> {
        if self.disk.fails() {
            return None;
        }
        let bytes = self.disk.at(read.at.segment, read.at.offset, read.at.len);
        let goes_on =
            |said: Claimed<'_>| said.len + read.at.offset as usize > SEGMENT_BYTES as usize;
        let in_parts = read.at.extent && larder_format::claimed(&bytes).is_some_and(goes_on);
        self.seen.in_parts += u64::from(in_parts);
        Some(bytes)
    }

    fn complete(&mut self) -> Result<(), String> {
        if self.waiting.is_empty() {
            return Ok(());
        }
        let i = self.rng.below(self.waiting.len() as u64) as usize;
        let Some(mut w) = self.waiting.remove(i) else { return Ok(()) };
        let bytes = match w.bytes.take() {
            Some(bytes) => bytes,
            None => self.read(&w.read),
        };
        self.execute(w.key, w.ask, Some((w.read, bytes)))
    }

    fn verify_one(&mut self) {
        if self.verifying.is_empty() {
            return;
        }
        let i = self.rng.below(self.verifying.len() as u64) as usize;
        let Some(mut v) = self.verifying.remove(i) else { return };
        // One that is not read is answered all the same.
        let unread = self.rng.chance(0.1);
        if v.bytes.is_none() && !unread {
            v.bytes = Some(self.read(&v.read));
        }
        let bytes = v.bytes.flatten().filter(|_| !unread);
        self.node.verify(self.now, &v.read, bytes.as_deref());
    }

    fn flush(&mut self) -> Result<(), String> {
        let later = self.rng.chance(0.5);
        let at = UnixSecs(self.now.wall.0 + self.rng.range(1, 4) as u32);
        // Until it is answered it may have happened or not, by shard; and a flush replaces one announced before.
        let announced = self.model.forget_announced_flush();
        assert!(self.node.flush_all(self.now, if later { at } else { self.now.wall }));
        self.model.announce_again(announced);
        self.say(format!("flush later {later} at {at:?} now {:?}", self.now.wall));
        if later {
            self.model.flush_later(at.0);
        } else {
            self.model.flush();
        }
        Ok(())
    }

    fn rot(&mut self) {
        if self.disk.fault_rate > 0.0 {
            let s = self.rng.range(1, u64::from(SEGMENTS)) as usize;
            let at = self.rng.below(u64::from(SEGMENT_BYTES)) as usize;
            self.disk.segments[s][at] ^= 1 << self.rng.below(8);
        }
    }

    // ---- answers ----

    fn check(&mut self, key: usize, ask: &Ask, said: Said) -> Result<(), String> {
        let now = self.now.wall;
        let m = &mut self.model;
        match (ask, said) {
            (Ask::Get(get), Said::Item(mut seen)) => {
                if let Some(touch) = get.touch {
                    if seen.expiry != touch {
                        return Err(format!(
                            "key {key}: touched to {touch:?}, answered {:?}",
                            seen.expiry
                        ));
                    }
                    let old =
                        m.warrants(key, now, |v| v.cas == seen.cas && v.value == seen.value)?;
                    seen.expiry = old.expiry;
                    m.hit(key, now, &seen)?;
                    m.set(key, Version { expiry: touch, ..seen });
                    return Ok(());
                }
                m.hit(key, now, &seen)
            }
            (Ask::Get(_), Said::Miss) => Ok(()),
            (Ask::Store { mode, value, flags, expiry, compare_cas }, Said::Stored(cas, size)) => {
                m.fresh_cas(cas)?;
                let mut new = Version { value: value.clone(), flags: *flags, cas, expiry: *expiry };
                if let Some(wanted) = compare_cas {
                    m.warrants(key, now, |v| v.cas == *wanted)?;
                }
                match mode {
                    StoreMode::Set | StoreMode::Add => {}
                    StoreMode::Replace => {
                        m.warrants(key, now, |_| true)?;
                    }
                    StoreMode::Append | StoreMode::Prepend => {
                        let old =
                            m.warrants(key, now, |v| v.value.len() + value.len() == size as usize)?;
                        new.value = if *mode == StoreMode::Append {
                            [old.value, value.clone()].concat()
                        } else {
                            [value.clone(), old.value].concat()
                        };
                        new.flags = old.flags;
                        new.expiry = old.expiry;
                    }
                }
                if new.value.len() != size as usize {
                    return Err(format!("key {key}: stored {size} bytes of {}", new.value.len()));
                }
                m.set(key, new);
                Ok(())
            }
            (Ask::Store { mode: StoreMode::Add, .. }, Said::NotStored) => {
                m.warrants(key, now, |_| true).map(|_| ())
            }
            (Ask::Store { mode, .. }, Said::NotStored) if *mode != StoreMode::Set => Ok(()),
            (Ask::Store { compare_cas: Some(wanted), .. }, Said::Exists) => {
                m.warrants(key, now, |v| v.cas != *wanted).map(|_| ())
            }
            (Ask::Store { compare_cas: Some(_), .. }, Said::NotFound) => Ok(()),
            (Ask::Store { mode: StoreMode::Append | StoreMode::Prepend, .. }, Said::TooLarge) => {
                Ok(())
            }
            (Ask::Store { .. }, Said::OutOfMemory) => {
                m.remove(key);
                Ok(())
            }
            (Ask::Delete { .. }, Said::Deleted) => {
                m.warrants(key, now, |_| true)?;
                m.remove(key);
                Ok(())
            }
            (Ask::Delete { compare_cas: None }, Said::NotFound) => {
                m.remove(key);
                Ok(())
            }
            (Ask::Delete { compare_cas: Some(_) }, Said::NotFound) => Ok(()),
            (Ask::Delete { compare_cas: Some(wanted) }, Said::Exists) => {
                m.warrants(key, now, |v| v.cas != *wanted).map(|_| ())
            }
            (Ask::Arith { decrement, delta }, Said::Number(n, seen)) => {
                m.fresh_cas(seen.cas)?;
                let old = m.warrants(key, now, |v| {
                    let old = number(&v.value);
                    old.is_some_and(|o| {
                        n == if *decrement {
                            o.saturating_sub(*delta)
                        } else {
                            o.wrapping_add(*delta)
                        }
                    })
                })?;
                let mut text = n.to_string().into_bytes();
                text.resize(text.len().max(old.value.len()), b' ');
                let want = Version { value: text, cas: seen.cas, ..old };
                if want != seen {
                    return Err(format!("key {key}: number shown as {seen:?}, should be {want:?}"));
                }
                m.set(key, want);
                Ok(())
            }
            (Ask::Arith { .. }, Said::NotFound) => Ok(()),
            (Ask::Arith { .. }, Said::NotNumeric) => {
                m.warrants(key, now, |v| number(&v.value).is_none()).map(|_| ())
            }
            (Ask::Touch(expiry), Said::Touched) => {
                let all = m.live(key, now);
                if all.is_empty() {
                    return Err(format!("key {key}: touched what is not there"));
                }
                m.slot(key).allowed =
                    all.into_iter().map(|v| Version { expiry: *expiry, ..v }).collect();
                Ok(())
            }
            (Ask::Touch(_), Said::NotFound) => Ok(()),
            (Ask::Arith { .. } | Ask::Touch(_) | Ask::Get(_), Said::OutOfMemory) => {
                m.remove(key);
                Ok(())
            }
            (ask, said) => Err(format!("key {key}: {ask:?} answered {said:?}")),
        }
    }

    // ---- kills ----

    fn light_fuse(&mut self) {
        let Some(log) = self.maintenance.log_mut() else {
            // Nothing that is stored there outlives the run.
            std::panic::resume_unwind(Box::new(Killed));
        };
        let stores =
            if self.rng.chance(0.7) { self.rng.range(1, 40) } else { self.rng.range(1, 400) };
        let fuse = Arc::new(AtomicU64::new(stores));
        for i in 0..SHARDS {
            self.node.lock(i).unrecorded().index_words().share_fuse(fuse.clone());
        }
        log.table_mut().words_mut().share_fuse(fuse.clone());
        self.disk.fuse = Some(fuse);
    }

    /// Stops in good order and comes back with what was in DRAM, or with a part of it: nothing but the place may differ.
    fn stop_and_start(&mut self) -> Result<(), String> {
        let World { node, maintenance, machine, disk, now, rng, .. } = self;
        stop(node, maintenance, machine, disk, *now, rng);
        if rng.chance(0.1) {
            machine.memory.rot(rng);
        }
        if self.rng.chance(0.2) {
            self.now.wall.0 += 2;
            self.now.mono = self.now.mono + Nanos::from_millis(2_001);
            self.model.tick(self.now.wall);
        }
        if self.rng.chance(0.5) {
            self.put_back_a_copy();
        }
        self.start_anew()
    }

    /// Dies and comes back. The operation that was under way may have happened or not: what it wrote was in DRAM and is
    /// lost, what it removed may be there still. So the latest acknowledged version stays what is allowed.
    fn recover(&mut self) -> Result<(), String> {
        self.seen.kills += 1;
        if self.rng.chance(0.1) {
            self.machine.power_cut(&mut self.rng);
        }
        self.put_back_a_copy();
        self.start_anew()
    }

    /// Somebody copies flash, directory and memory file, and later puts some of them back, while nothing runs.
    fn put_back_a_copy(&mut self) {
        match self.copy.take() {
            None if self.rng.chance(0.4) => {
                self.copy = Some(Copy {
                    flash: (self.machine.copied(), self.disk.segments.clone()),
                    directory: self.machine.directory.clone(),
                    memory: self.machine.memory.copied(),
                });
            }
            Some(Copy { flash, directory, memory }) if self.rng.chance(0.3) => {
                self.seen.copies += 1;
                let which = self.rng.range(1, 7);
                if which & 1 != 0 {
                    self.machine.put_back(flash.0);
                    self.disk.segments = flash.1;
                }
                if which & 2 != 0 {
                    self.machine.memory = memory;
                }
                if which & 4 != 0 {
                    // By itself a directory may come back such that nobody can see it, if the flash was used since: a snapshot of
                    // its file system.
                    let used_since = self.machine.is_flash_of_another_run(&directory);
                    let alone = which == 4 && used_since && !self.machine.memory.is_described();
                    let unnoticed = (alone || !self.machine.births) && self.rng.chance(0.5);
                    self.machine.put_back_directory(directory, unnoticed);
                }
            }
            copy => self.copy = copy,
        }
    }

    /// Another process starts, as often as it is killed on the way.
    fn start_anew(&mut self) -> Result<(), String> {
        self.seen = self.seen();
        self.disk.errors = 0;
        self.disk.fuse = None;
        self.waiting.clear();
        self.verifying.clear();
        let ((node, maintenance, kept), warmth, described) = loop {
            let World { machine, policy, now, rng, options, .. } = self;
            // One without flash is often followed by another.
            let often = if self.alone { 0.6 } else { 0.2 };
            let (named, alone) = (rng.chance(0.8), self.knows_no_flash && rng.chance(often));
            self.alone = alone;
            let described = named && machine.memory.is_described();
            let begun = || {
                if alone {
                    let started = machine.start_alone(policy, *now, rng, options, named)?;
                    return Ok((started, None, described));
                }
                let (started, warmth) = machine.start(policy, *now, rng, options, named)?;
                Ok((started, Some(warmth), described))
            };
            match catch_unwind(AssertUnwindSafe(begun)) {
                Ok(Ok(started)) => break started,
                Ok(Err(NotStarted::Wrong(why))) => return Err(why),
                Ok(Err(NotStarted::Failed)) => self.seen.failed_starts += 1,
                Err(payload) if payload.is::<Killed>() => self.seen.kills_in_starts += 1,
                Err(payload) => resume_unwind(payload),
            }
            if self.rng.chance(0.3) {
                self.machine.power_cut(&mut self.rng);
            }
        };
        let Back { objects, believed } = std::mem::take(&mut self.machine.back);
        match warmth {
            Some(Warmth::Memory) => self.seen.kept_over_kill += kept,
            Some(Warmth::Checkpoint) => self.seen.from_checkpoint += kept,
            Some(Warmth::Cold(_)) => self.seen.cold += 1,
            None => {
                self.seen.alone += 1;
                self.seen.believed_alone += u64::from(believed);
            }
        }
        self.seen.believed += u64::from(believed && warmth.is_some());
        self.seen.disbelieved += u64::from(described && !believed);
        self.seen.put_back += objects.len() as u64;
        if std::mem::take(&mut self.machine.was_cold) && !believed {
            // What was announced went with everything else.
            self.model.forget_announced_flush();
        }
        (self.node, self.maintenance, self.wanted.0) = (node, maintenance, None);
        self.say(format!("start: {warmth:?}, {} objects put back", objects.len()));
        objects.iter().try_for_each(|object| self.check_put_back(object))?;
        self.validate()
    }

    /// What a start has put back is the latest version.
    fn check_put_back(&mut self, object: &Kept) -> Result<(), String> {
        let Saved { flags, cas, expiry, .. } = object.rest;
        let version = Version { value: object.value.clone(), flags, cas, expiry };
        let key = self.keys.iter().position(|key| *key == object.key);
        let key = key.ok_or("a key that was never stored was put back")?;
        let allowed = self.model.live(key, self.now.wall);
        if !allowed.contains(&version) {
            return Err(format!("key {key}: {version:?} was put back, allowed {allowed:?}"));
        }
        Ok(())
    }
}
