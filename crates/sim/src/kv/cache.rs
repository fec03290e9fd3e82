//! The engine of `larder kv` under a virtual clock.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Deref;

use larder_base::lock::Single;
use larder_base::{AppId, ByteSize, Expiry, HashKey, Nanos, Now, ObjectHash, UnixSecs};
use larder_engine::dram::{Arena, CompactArena, Contents, Key};
use larder_engine::index::IndexError;
use larder_engine::kv::AppStats;
use larder_engine::kv::api::{
    Delete, Effects, Fetched, FlashRead, Get, Location, Op, Outcome, Reply,
    Request as EngineRequest, Store, StoreMode, Tier,
};
use larder_engine::kv::node::defaults::{self, SizeError};
use larder_engine::kv::node::{
    self, Maintenance, MaintenanceEffects, Node, PlanError, Study, StudyError, Totals, Turn,
};
use larder_engine::kv::record::{AppsSetup, RecordedShard, RunSetup, SetupError};
use larder_engine::kv::{ClockMode, LogStats, Resizable, SegmentIo, ShardStats};
use larder_format::GeometryError;
use larder_policy::admission::{AdmissionConfig, AdmissionPolicy as _, ModelReport};
use larder_policy::application::ApplicationsConfig;
use larder_policy::budget::WriteBudgetConfig;
use larder_policy::learn;
use larder_trace::{Op as TraceOp, Request};

use super::apps::Apps;
use super::counters::Counters;
use super::flash::{Flash, ID_LEN};
use super::given::{Drawn, Sizes};
use crate::device::DeviceOp;

/// What a [`HybridCache`] is built from.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// DRAM and flash.
    pub sizes: Sizes,
    /// What a read does to CLOCK.
    pub clock_mode: ClockMode,
    /// Largest CLOCK value: 1 for one bit, 3 for two.
    pub clock_max: u8,
    /// How much of the flash may be hot, percent.
    pub hot_percent: u8,
    /// How much of a reclaimed segment may go back to DRAM, percent.
    pub reinsert_percent: u8,
    /// Admission.
    pub admission: AdmissionConfig,
    /// The write budget.
    pub budget: WriteBudgetConfig,
    /// Shares of applications.
    pub applications: ApplicationsConfig,
    /// What the trace's applications are called, by number. Others are called by their numbers, and 0 is the default's.
    pub names: BTreeMap<u32, String>,
    /// Seed of the hash key and of all draws.
    pub seed: u64,
}

impl Default for CacheConfig {
    /// `larder kv`'s defaults over 16 MiB of DRAM for objects and 112 MiB of flash.
    fn default() -> CacheConfig {
        CacheConfig {
            sizes: Sizes::Study(study_of(16 << 20, 112 << 20)),
            clock_mode: defaults::CLOCK_MODE,
            clock_max: defaults::CLOCK_MAX,
            hot_percent: defaults::HOT_PERCENT,
            reinsert_percent: defaults::REINSERT_PERCENT,
            admission: AdmissionConfig::default(),
            budget: WriteBudgetConfig::default(),
            applications: ApplicationsConfig::default(),
            names: BTreeMap::new(),
            seed: 1,
        }
    }
}

/// Mean bytes of a record in a study that does not state it.
pub const STUDY_OBJECT: u64 = 320;

/// Sizes of a study of records of [`STUDY_OBJECT`] bytes in one shard, so much DRAM for objects and so much flash.
pub fn study_of(dram: u64, flash: u64) -> Study {
    let max_item = MAX_VALUE + 512;
    Study { dram, flash, segment: 0, shards: 1, object: STUDY_OBJECT, max_item }
}

/// Why a cache cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A size that no server takes.
    #[error("{what} {value} {source}")]
    Size {
        /// Which.
        what: &'static str,
        /// Its value.
        value: ByteSize,
        /// Why.
        source: SizeError,
    },
    /// Memory that a server does not divide so.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Flash that a server does not divide.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// Sizes with which a study cannot work.
    #[error(transparent)]
    Study(#[from] StudyError),
    /// Shards and log cannot be built.
    #[error(transparent)]
    Setup(#[from] SetupError),
    /// The index cannot be made.
    #[error(transparent)]
    Index(#[from] IndexError),
}

#[derive(Default)]
struct Sink {
    hit: Option<Tier>,
    verifies: Vec<FlashRead>,
    wake: bool,
}

impl Effects for Sink {
    fn reply(&mut self, reply: Reply<'_>) {
        if let Reply::Item(item) = reply {
            self.hit = Some(item.tier);
        }
    }
    fn verify(&mut self, read: FlashRead) {
        self.verifies.push(read);
    }
    fn wake_cleaner(&mut self) {
        self.wake = true;
    }
}

/// Models are fitted at once; nothing else that maintenance gives out matters here.
#[derive(Default)]
struct Fit(Option<(learn::TrainingSet, u64)>);

impl MaintenanceEffects for Fit {
    fn train(&mut self, samples: learn::TrainingSet, seed: u64) {
        self.0 = Some((samples, seed));
    }
}

/// Values longer than this are cut; also the longest that the engine is configured to take.
pub const MAX_VALUE: u64 = 1 << 20;
/// A request that is to come.
#[derive(Clone, Copy)]
struct Ahead {
    id: u64,
    key_len: u8,
    hash: ObjectHash,
    /// Whatever is there is replaced, and not read.
    write: bool,
    /// It is in DRAM.
    in_dram: bool,
    /// Where on flash it may be.
    on_flash: Option<Location>,
}

/// How many announced requests after its announcement an object's header is asked for, then the index of what is not in
/// DRAM, then what says where it is on flash, then what flash holds of it.
const WARM_AFTER: [usize; 4] = [3, 6, 9, 11];

/// An object that a request is about.
struct Object {
    id: u64,
    key_len: u8,
    hash: ObjectHash,
    app: AppId,
}

/// What is asked of it.
enum Asked {
    Get,
    Delete,
    Touch(Expiry),
    Set { size: usize, expiry: Expiry },
}

/// Unix seconds at the trace's start.
pub const EPOCH: u32 = 1_000_000_000;

/// A node and an in-memory device, driven by a trace: a read that misses is followed by a set of the recorded size,
/// writes and deletions are done as recorded, flash reads complete at once, and maintenance runs whenever a shard
/// is short of room, and every second. Values are a fixed pattern.
///
/// Bytes of keys and values are left out, on flash and in DRAM: an object is 48 bytes there. Over [`Arena`]
/// ([`HybridCache::with_bytes`]) the shards are a server's to the last byte, and every decision is the same.
pub struct HybridCache<M = CompactArena> {
    /// What it was built from.
    setup: RunSetup,
    node: Node<Single, M>,
    apps: Apps,
    maintenance: Maintenance<Vec<u8>>,
    /// When maintenance is due.
    due: Nanos,
    device: Flash,
    values: Contents,
    sink: Sink,
    counters: Counters,
    /// Requests that were announced, in their order.
    ahead: VecDeque<Ahead>,
    /// Of any object, to be made that of one.
    key: Key,
    now: Now,
}

impl HybridCache {
    /// An empty cache.
    ///
    /// # Errors
    /// Sizes that cannot work, parameters out of range.
    pub fn new(config: &CacheConfig) -> Result<HybridCache, CacheError> {
        HybridCache::over(config, &Drawn::from_seed(config.seed), CompactArena::new)
    }
}

impl HybridCache<Arena> {
    /// An empty cache whose DRAM holds all bytes of its objects, as a server's does.
    ///
    /// # Errors
    /// As [`HybridCache::new`].
    pub fn with_bytes(config: &CacheConfig) -> Result<HybridCache<Arena>, CacheError> {
        HybridCache::over(config, &Drawn::from_seed(config.seed), |bytes, _| Arena::new(bytes))
    }

    /// The same, with what a server's start has drawn.
    ///
    /// # Errors
    /// As [`HybridCache::new`].
    pub fn with_bytes_of(
        config: &CacheConfig,
        drawn: &Drawn,
    ) -> Result<HybridCache<Arena>, CacheError> {
        HybridCache::over(config, drawn, |bytes, _| Arena::new(bytes))
    }
}

impl<M: Resizable> HybridCache<M> {
    fn over(
        config: &CacheConfig,
        drawn: &Drawn,
        memory: impl Fn(usize, Contents) -> M,
    ) -> Result<HybridCache<M>, CacheError> {
        let salt = drawn.salt;
        let (plan, flash) = config.sizes.divide(&config.admission, salt)?;
        let cache = node::Cache {
            max_item: config.sizes.max_item(),
            no_eviction: false,
            clock_mode: config.clock_mode,
            clock_max: config.clock_max,
            hot_percent: config.hot_percent,
            reinsert_percent: config.reinsert_percent,
            admission: config.admission.clone(),
            budget: config.budget.clone(),
            applications: AppsSetup { config: config.applications.clone(), names: Vec::new() },
        };
        let start = node::Start {
            larder: drawn.larder.clone(),
            uuid: drawn.uuid.clone(),
            hash_key: HashKey(drawn.hash_key),
            cas_base: drawn.cas_base,
            cas_bits: drawn.cas_bits,
            seed: drawn.seed,
            flash,
            log: (flash.segments > 0).then_some(drawn.log),
        };
        let setup = node::run_setup(&cache, &plan, &start)?;
        let values = Contents::zeros();
        let mut shards = Vec::with_capacity(plan.shards);
        for shard in 0..plan.shards {
            shards.push(setup.shard_over(shard, memory(plan.arena_bytes, values.clone()))?);
        }
        let node = Node::new(&setup, Some(plan), shards)?;
        let maintenance = Maintenance::new(&node, setup.build_log()?, drawn.training_seed, 0);
        Ok(HybridCache {
            setup,
            node,
            apps: Apps::new(config.names.clone()),
            maintenance,
            due: Nanos::ZERO,
            device: Flash::new(salt, flash.segments, flash.segment_bytes, values.clone()),
            values,
            sink: Sink::default(),
            counters: Counters::default(),
            ahead: VecDeque::new(),
            key: Contents::key_of(0, ID_LEN as u8),
            now: Now { mono: Nanos::ZERO, wall: UnixSecs(EPOCH) },
        })
    }

    /// From now on what the flash is told is kept for [`HybridCache::take_device_ops`].
    pub fn record_device_ops(&mut self) {
        self.device.ops.get_or_insert_default();
    }

    /// Moves what the flash was told since the last call to the end of `to`.
    pub fn take_device_ops(&mut self, to: &mut Vec<DeviceOp>) {
        if let Some(ops) = &mut self.device.ops {
            to.append(ops);
        }
    }

    /// Announces a request: what is announced comes in this order, before anything that is not. What is needed of memory
    /// is fetched ahead, which changes how long it takes and nothing else.
    pub fn announce(&mut self, r: &Request) {
        let hash = self.node.hash(self.key.set(r.id, key_len(r)));
        let HybridCache { node, device, ahead, key, .. } = self;
        let shard_of = |hash| node.lock(node.shard_of(hash));
        shard_of(hash).warm(hash);
        let [object, index, place, flash] = WARM_AFTER.map(|after| ahead.len().checked_sub(after));
        if let Some(near) = object {
            let near = ahead[near].hash;
            shard_of(near).warm_object(near);
        }
        if let Some(near) = index {
            let near = &mut ahead[near];
            let key = key.set(near.id, near.key_len);
            near.in_dram = shard_of(near.hash).warm_index(near.hash, key);
        }
        if let Some(near) = place
            && !ahead[near].in_dram
        {
            let near = &mut ahead[near];
            near.on_flash = shard_of(near.hash).warm_flash(near.hash, near.write);
            if let Some(at) = &near.on_flash {
                device.warm_place(at);
            }
        }
        if let Some(near) = flash
            && let Some(at) = &ahead[near].on_flash
        {
            device.warm(at);
        }
        ahead.push_back(Ahead {
            id: r.id,
            key_len: key_len(r),
            hash,
            write: !r.op.is_read() && !r.op.is_removal() && r.op != TraceOp::Touch,
            in_dram: false,
            on_flash: None,
        });
    }

    /// Carries out one request of a trace; one without a time happens a microsecond after the one before it. Block
    /// operations count as reads and writes of an object. Returns where a read was answered from.
    pub fn request(&mut self, r: &Request) -> Option<Tier> {
        let mono = r.time.unwrap_or(Nanos(self.now.mono.0 + 1000)).max(self.now.mono);
        let wall = EPOCH.saturating_add((mono.0 / 1_000_000_000) as u32);
        self.now = Now { mono, wall: UnixSecs(wall) };
        self.counters.requests += 1;
        let key_len = key_len(r);
        let hash = match self.ahead.pop_front() {
            Some(a) if (a.id, a.key_len) == (r.id, key_len) => a.hash,
            _ => self.node.hash(self.key.set(r.id, key_len)),
        };
        let app = self.apps.of(&self.node, r.app);
        let size = r.size.min(MAX_VALUE) as usize;
        let bytes = (usize::from(key_len) + size) as u64;
        let object = Object { id: r.id, key_len, hash, app };
        let expiry = match r.ttl {
            0 => Expiry::NEVER,
            ttl => Expiry::at(UnixSecs(self.now.wall.0.saturating_add(ttl))),
        };
        let mut tier = None;
        if r.op.is_read() {
            self.counters.gets += 1;
            self.counters.get_bytes += bytes;
            tier = self.execute(&object, Asked::Get);
            match tier {
                Some(tier) => {
                    self.counters.hit_bytes += bytes;
                    self.counters.hits_dram += u64::from(tier == Tier::Dram);
                    self.counters.hits_flash += u64::from(tier == Tier::Flash);
                }
                None => {
                    self.counters.miss_bytes += bytes;
                    self.set(&object, size, expiry);
                }
            }
        } else if r.op.is_removal() {
            self.execute(&object, Asked::Delete);
        } else if r.op == TraceOp::Touch {
            self.execute(&object, Asked::Touch(expiry));
        } else {
            self.set(&object, size, expiry);
        }
        if mono >= self.due {
            self.maintain();
        }
        tier
    }

    fn set(&mut self, object: &Object, size: usize, expiry: Expiry) {
        self.counters.set_bytes += (usize::from(object.key_len) + size) as u64;
        self.execute(object, Asked::Set { size, expiry });
    }

    fn execute(&mut self, object: &Object, asked: Asked) -> Option<Tier> {
        let &Object { id, key_len, hash, app } = object;
        let HybridCache { node, device, sink, now, values, key, .. } = self;
        let key = key.set(id, key_len);
        let op = match asked {
            Asked::Get => Op::Get(Get::default()),
            Asked::Delete => Op::Delete(Delete::default()),
            Asked::Touch(expiry) => Op::Touch(expiry),
            Asked::Set { size, expiry } => Op::Store(Store {
                mode: StoreMode::Set,
                value: values.value(size),
                flags: 0,
                expiry,
                compare_cas: None,
                new_cas: None,
                invalidate: false,
                vivify: None,
            }),
        };
        let request = EngineRequest { key, hash, app, op };
        let mut read: Option<FlashRead> = None;
        sink.hit = None;
        loop {
            let fetched = read
                .as_ref()
                .map(|read| Fetched { read, bytes: device.span(read, (id, key.len())) });
            match node.execute(*now, &request, fetched, sink) {
                Outcome::Done => break,
                Outcome::Read(next) => read = Some(next),
            }
        }
        let hit = sink.hit;
        for read in sink.verifies.drain(..) {
            node.verify(*now, &read, device.verify(&read));
        }
        if std::mem::take(&mut sink.wake) {
            self.maintain();
        }
        hit
    }

    /// Has maintenance do all that is due.
    fn maintain(&mut self) {
        let HybridCache { setup, node, maintenance, device, now, .. } = self;
        let mut fit = Fit::default();
        loop {
            let turn = maintenance.turn(*now, node, device, &mut fit);
            if let Some((set, seed)) = fit.0.take() {
                let model = setup.train(&set, seed).ok();
                self.counters.models += u64::from(model.is_some());
                maintenance.fitted(*now, node, set.app, model);
                continue;
            }
            if let Turn::At(next) = turn {
                self.due = next;
                return;
            }
        }
    }

    fn shards(&self) -> impl Iterator<Item = impl Deref<Target = RecordedShard<M>> + '_> {
        (0..self.node.shards()).map(|shard| self.node.lock(shard))
    }

    /// What shards and log were built from.
    pub fn setup(&self) -> &RunSetup {
        &self.setup
    }

    /// When maintenance is due.
    pub fn due(&self) -> Nanos {
        self.due
    }

    /// All counters of the node.
    pub fn totals(&self) -> Totals {
        self.node.totals(self.now.mono)
    }

    /// The bytes of a segment of the flash, as reclaim would read them. `None` where there is no such segment.
    pub fn segment(&mut self, segment: u16) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.setup.segment_bytes as usize];
        SegmentIo::read(&mut self.device, segment, &mut bytes).ok().map(|()| bytes)
    }

    /// Virtual time.
    pub fn now(&self) -> Nanos {
        self.now.mono
    }

    /// What was done so far.
    pub fn counters(&self) -> Counters {
        let shards = self.shard_stats();
        let log = self.log_stats();
        Counters {
            flash_bytes: log.bytes_written,
            flash_record_bytes: log.record_bytes_written,
            dram_evictions: shards.evictions,
            flash_dropped: shards.flash_dropped,
            flash_dropped_unread: shards.flash_dropped_unread,
            reinserted: shards.reinserted,
            flash_reads: shards.flash_reads,
            ..self.counters
        }
    }

    /// The shards' counters, added up.
    pub fn shard_stats(&self) -> ShardStats {
        let mut sum = ShardStats::default();
        for shard in self.shards() {
            sum.add(shard.stats());
        }
        sum
    }

    /// What each application that did anything has done and has, by name.
    pub fn applications(&self) -> BTreeMap<String, AppStats> {
        let mut all = BTreeMap::new();
        for id in 0..AppId::COUNT {
            let app = AppId(id as u16);
            let mut sum = AppStats::default();
            self.shards().for_each(|shard| sum.add(shard.apps().of(app)));
            if sum != AppStats::default() {
                all.insert(self.node.name(app), sum);
            }
        }
        all
    }

    /// Bytes of flash for segments.
    pub fn flash_capacity(&self) -> u64 {
        u64::from(self.setup.segments) * u64::from(self.setup.segment_bytes)
    }

    /// The log's counters.
    pub fn log_stats(&self) -> LogStats {
        self.maintenance.log().map(|log| *log.stats()).unwrap_or_default()
    }

    /// Objects in DRAM.
    pub fn dram_objects(&self) -> u64 {
        self.shards().map(|s| s.dram_objects() as u64).sum()
    }

    /// Bytes of DRAM for objects.
    pub fn dram_capacity(&self) -> u64 {
        self.shards().map(|s| s.dram_capacity() as u64).sum()
    }

    /// Objects that the flash index leads to.
    pub fn flash_objects(&self) -> u64 {
        self.shards().map(|s| s.index().len()).sum()
    }

    /// Bytes of DRAM for everything but the objects: tables, index, policy, segment buffers.
    pub fn metadata_memory(&self) -> u64 {
        let tables = self.shards().map(|s| -> usize {
            s.memory().iter().filter(|(what, _)| *what != "objects").map(|(_, bytes)| bytes).sum()
        });
        (tables.sum::<usize>() + self.maintenance.log().map_or(0, |log| log.memory_bytes())) as u64
    }

    /// Bytes of memory that simulating it takes, everything counted.
    pub fn simulator_memory(&self) -> u64 {
        let objects: usize = self.shards().map(|s| s.object_memory_held()).sum();
        let spared: usize = self.shards().map(|s| s.spared_bytes()).sum();
        objects as u64 + self.metadata_memory() - spared as u64 + self.stand_in_memory()
    }

    /// Bytes of memory that the simulated flash takes.
    pub fn stand_in_memory(&self) -> u64 {
        self.device.memory_bytes() as u64
    }

    /// Bytes of DRAM that the admission policy takes.
    pub fn admission_memory(&self) -> u64 {
        self.shards().map(|s| s.admission().memory_bytes() as u64).sum()
    }

    /// What every shard's policy says of its classifiers.
    pub fn models(&self) -> Vec<ModelReport> {
        self.shards().flat_map(|s| s.admission().models()).collect()
    }

    /// Checks every shard. For tests.
    ///
    /// # Errors
    /// What does not hold.
    pub fn validate(&self) -> Result<(), String> {
        self.node.validate()
    }
}

/// Bytes of a request's key as it is simulated.
pub(crate) fn key_len(r: &Request) -> u8 {
    r.key_bytes().clamp(ID_LEN as u32, 250) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::Server;
    use larder_trace::generate;

    fn config(policy: &str) -> CacheConfig {
        CacheConfig {
            sizes: Sizes::Study(Study { shards: 2, object: 300, ..study_of(512 << 10, 3 << 20) }),
            admission: AdmissionConfig::from_name(policy).unwrap(),
            ..CacheConfig::default()
        }
    }

    fn sized(policy: &str, change: impl Fn(&mut Study)) -> CacheConfig {
        let mut config = config(policy);
        if let Sizes::Study(study) = &mut config.sizes {
            change(study);
        }
        config
    }

    fn run(config: &CacheConfig, requests: &[Request]) -> HybridCache {
        let mut cache = HybridCache::new(config).unwrap();
        for r in requests {
            cache.request(r);
        }
        cache.validate().unwrap();
        cache
    }

    fn zipf(requests: u64) -> Vec<Request> {
        let spec =
            format!("zipf?objects=40000&requests={requests}&writes=0.05&deletes=0.01&rate=1000");
        generate::parse(&spec).unwrap().map(|r| r.unwrap()).collect()
    }

    /// Sizes that are spread like the exponential of a normal of unit variance (half of the objects are smaller than 0.6 of the mean).
    fn spread(requests: u64) -> Vec<Request> {
        let mut all = zipf(requests);
        for r in &mut all {
            let mut rng = larder_base::Rng::new(r.id.wrapping_add(1));
            let (u, v) = (rng.unit().max(1e-9), rng.unit());
            let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
            r.size = (180.0 * normal.exp()) as u64 + 8;
        }
        all
    }

    /// A policy that weighs reads against sizes fills flash with small objects: the index that is sized for the mean has room for them.
    #[test]
    fn the_index_has_room_for_the_objects_that_are_chosen() {
        let requests = spread(200_000);
        let config = sized("expected_reads", |study| (study.object, study.flash) = (360, 2 << 20));
        let cache = run(&config, &requests);
        let totals = cache.node.totals(cache.now.mono);
        let s = totals.shards;
        assert!(s.flash_written_objects > 5_000, "{s:?}");
        assert!(totals.index_full.is_none(), "{:?}", totals.index_full);
        assert!(s.forced_evictions * 50 < s.flash_written_objects, "{s:?}");
    }

    /// An object that is not packed in a page takes several slots of the index, and one for whose size it was told has as many.
    #[test]
    fn the_index_has_room_for_blocks() {
        let mut requests = zipf(60_000);
        requests.iter_mut().for_each(|r| r.size = 4096);
        let config = sized("all", |study| {
            (study.object, study.flash, study.dram) = (4160, 16 << 20, 1 << 20);
        });
        let cache = run(&config, &requests);
        let s = cache.node.totals(cache.now.mono).shards;
        assert!(s.flash_written_objects > 8_000, "{s:?}");
        assert!(s.forced_evictions * 1000 < s.flash_written_objects, "{s:?}");
    }

    #[test]
    fn counters_add_up_and_runs_repeat() {
        let requests = zipf(60_000);
        let cache = run(&config("all"), &requests);
        let c = cache.counters();
        let s = cache.shard_stats();
        assert_eq!(c.requests, 60_000);
        assert_eq!(c.gets, s.hits_dram + s.hits_flash + s.misses);
        assert_eq!((c.hits_dram, c.hits_flash), (s.hits_dram, s.hits_flash));
        assert_eq!(c.set_bytes, s.set_bytes);
        assert!(c.hits_flash > 1000 && c.hit_ratio() > 0.3, "{c:?}");
        assert!(c.flash_bytes > 3 << 20 && c.clwa() > 0.1 && c.clwa() < c.clwa_of_misses());
        assert_eq!(c, run(&config("all"), &requests).counters());
        let mut other = config("all");
        other.seed = 2;
        assert_ne!(c, run(&other, &requests).counters());
    }

    /// Every answer, every place on flash that is read or written and every counter, request by request, with values left
    /// out and with all bytes there.
    fn compare_with_bytes(config: &CacheConfig, requests: &[Request]) -> HybridCache {
        let mut lean = HybridCache::new(config).unwrap();
        let mut whole = HybridCache::with_bytes(config).unwrap();
        lean.record_device_ops();
        whole.record_device_ops();
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for (i, r) in requests.iter().enumerate() {
            assert_eq!(lean.request(r), whole.request(r), "request {i}: {r:?}");
            lean.take_device_ops(&mut ours);
            whole.take_device_ops(&mut theirs);
            assert_eq!(ours, theirs, "request {i}: {r:?}");
            ours.clear();
            theirs.clear();
            assert_eq!(
                (lean.dram_objects(), lean.flash_objects(), lean.metadata_memory()),
                (whole.dram_objects(), whole.flash_objects(), whole.metadata_memory()),
            );
            for (a, b) in lean.shards().zip(whole.shards()) {
                assert_eq!(a.stats(), b.stats(), "request {i}: {r:?}");
                assert_eq!(a.dram_free_bytes(), b.dram_free_bytes());
                assert_eq!(a.dram_capacity(), b.dram_capacity());
            }
        }
        assert_eq!(lean.counters(), whole.counters());
        assert_eq!(lean.models(), whole.models());
        for i in 0..AppId::COUNT {
            for (a, b) in lean.shards().zip(whole.shards()) {
                assert_eq!(a.apps().of(AppId(i as u16)), b.apps().of(AppId(i as u16)));
            }
        }
        lean.validate().unwrap();
        whole.validate().unwrap();
        let s = lean.shard_stats();
        assert_eq!((s.flash_corrupt, s.flash_read_errors), (0, 0));
        assert!(s.hits_dram > 500 && s.hits_flash > 500 && s.flash_written_objects > 500, "{s:?}");
        lean
    }

    #[test]
    fn leaving_bytes_out_changes_no_decision() {
        let specs = [
            "memcachier?objects=9000&requests=45000&rate=50",
            "zipf?objects=20000&requests=45000&writes=0.1&deletes=0.02&rate=1000",
        ];
        for (spec, policy, bits) in
            [(specs[0], "flashiness", 3), (specs[0], "all", 1), (specs[1], "ghost", 3)]
        {
            let requests: Vec<Request> =
                generate::parse(spec).unwrap().map(|r| r.unwrap()).collect();
            let config = CacheConfig { clock_max: bits, ..config(policy) };
            compare_with_bytes(&config, &requests);
        }
        // Ids of eight bytes, times to live, objects of many sizes and some that flash or DRAM cannot take.
        let mut rng = larder_base::Rng::new(5);
        let requests: Vec<Request> = zipf(40_000)
            .into_iter()
            .map(|mut r| {
                r.id = larder_trace::mix(r.id);
                r.app = (r.id % 300) as u32;
                r.key_size = 4 + (r.id % 60) as u32;
                r.size = match r.id % 97 {
                    0 => 200_000,
                    1..8 => 3000 + r.id % 9000,
                    _ => r.id % 900,
                };
                r.ttl = if rng.chance(0.2) { 1 + rng.below(40) as u32 } else { 0 };
                r
            })
            .collect();
        let config = sized("all", |s| s.segment = 32 << 10);
        let cache = compare_with_bytes(&config, &requests);
        assert!(cache.shard_stats().expired > 100 && cache.shard_stats().evictions_direct > 0);
    }

    #[test]
    fn an_object_takes_at_most_64_bytes_of_memory() {
        // Little DRAM and much, and flash that is full or hardly used. Flashiness keeps samples, which are a fixed amount.
        for (dram, flash, policy, keys) in [
            (14, 98, "flashiness", 1_450_000),
            (12, 36, "reject_first", 620_000),
            (3, 45, "all", 620_000),
            (64, 64, "flashiness", 800_000),
            (40, 40, "reject_first", 600_000),
            (8, 384, "flashiness", 700_000),
            (8, 256, "reject_first", 500_000),
        ] {
            let config = CacheConfig {
                sizes: Sizes::Study(Study { object: 300, ..study_of(dram << 20, flash << 20) }),
                admission: AdmissionConfig::from_name(policy).unwrap(),
                ..CacheConfig::default()
            };
            let spec = format!("memcachier?objects={keys}&requests={keys}&rate=20000");
            let mut cache = HybridCache::new(&config).unwrap();
            for r in generate::parse(&spec).unwrap() {
                cache.request(&r.unwrap());
            }
            let objects = cache.dram_objects() + cache.flash_objects();
            let each = cache.simulator_memory() as f64 / objects as f64;
            assert!(objects > 100_000, "{objects}");
            let parts = cache.node.lock(0).memory();
            assert!(
                each < 64.0,
                "{dram} and {flash} MiB, {policy}: {each} bytes for each of {objects}, {} in DRAM; {} on flash, {} for DRAM; {parts:?}",
                cache.dram_objects(),
                cache.stand_in_memory(),
                cache.node.lock(0).object_memory_held(),
            );
        }
    }

    /// What a server would take is told all the same, whatever is not there yet.
    #[test]
    fn tables_that_are_not_filled_take_little() {
        for (policy, least) in [("flashiness", 4), ("reject_first", 4), ("all", 3)] {
            let config = sized(policy, |s| (s.dram, s.flash) = (8 << 20, 256 << 20));
            let cache = run(&config, &zipf(2000));
            let whole = HybridCache::with_bytes(&config).unwrap();
            assert_eq!(cache.metadata_memory(), whole.metadata_memory());
            let spared: usize = cache.shards().map(|s| s.spared_bytes()).sum();
            // Of so many bytes for each object that flash could hold.
            let could_hold = (256 << 20) / 300;
            assert!(spared > could_hold * least, "{policy}: {spared}");
            assert_eq!(whole.shards().map(|s| s.spared_bytes()).sum::<usize>(), 0);
        }
    }

    #[test]
    fn announcing_changes_nothing() {
        let requests = zipf(30_000);
        let plain = run(&config("all"), &requests).counters();
        let mut cache = HybridCache::new(&config("all")).unwrap();
        let mut coming = requests.iter();
        coming.by_ref().take(10).for_each(|r| cache.announce(r));
        for (i, r) in requests.iter().enumerate() {
            // Now and then one comes that was not announced, or not as announced.
            match coming.next() {
                Some(next) if i % 7 != 3 => cache.announce(next),
                _ => {}
            }
            cache.request(r);
        }
        assert_eq!(cache.counters(), plain);
    }

    #[test]
    fn flash_serves_more_than_its_dram_alone() {
        let requests = zipf(60_000);
        let mut never = config("probability");
        never.admission.probability.probability = 0.0;
        let without = run(&never, &requests).counters();
        let with = run(&config("all"), &requests).counters();
        assert_eq!((without.flash_bytes, without.hits_flash), (0, 0));
        assert!(with.hit_ratio() > without.hit_ratio() + 0.05, "{without:?} {with:?}");
    }

    /// Sets alone, of keys that never come again: nothing speaks for any of them.
    fn scan(objects: u64, value: u64) -> Vec<Request> {
        let spec = format!("fill?objects={objects}&value={value}");
        generate::parse(&spec).unwrap().map(|r| r.unwrap()).collect()
    }

    #[test]
    fn an_empty_flash_is_filled_once_and_then_left_to_the_policy() {
        for policy in ["flashiness", "ghost", "reject_first"] {
            let mut c = config(policy);
            let filled = run(&c, &scan(60_000, 257)).counters();
            // Give or take what is open when the first segment is reclaimed. reject_first takes a key in fourteen for one that it has
            // seen, of 18 MB.
            let mistaken = if policy == "reject_first" { 2 << 20 } else { 0 };
            let once = 3000 << 10..(4000 << 10) + mistaken;
            assert!(once.contains(&filled.flash_bytes), "{policy}: {filled:?}");
            c.admission.first_fill = false;
            let few = run(&c, &scan(60_000, 257)).counters().flash_bytes;
            assert!(few < (64 << 10) + mistaken, "{policy}: {few}");
            // Nor where a budget has nothing to lend.
            c.admission.first_fill = true;
            c.budget = WriteBudgetConfig {
                tbw: Some(ByteSize(1 << 40)),
                first_fill: false,
                ..WriteBudgetConfig::default()
            };
            let few = run(&c, &scan(60_000, 257)).counters().flash_bytes;
            assert!(few < (64 << 10) + mistaken, "{policy}: {few}");
        }
    }

    #[test]
    fn large_objects_reach_flash_through_little_memory() {
        let c = sized("all", |s| {
            (s.dram, s.flash, s.segment, s.object) = (4 << 20, 64 << 20, 256 << 10, 20_000);
        });
        // 12 records fill a segment; the 13th waits and is not evicted.
        let cache = run(&c, &scan(2500, 20_000));
        let (c, s) = (cache.counters(), cache.shard_stats());
        assert!(c.dram_evictions < 25 && s.evictions_direct < 25, "{c:?} {s:?}");
        assert!(c.flash_record_bytes > 2100 * 20_000, "{c:?}");
        assert!(c.flash_record_bytes * 100 > c.flash_bytes * 93, "{c:?}");
    }

    #[test]
    fn models_are_trained_and_installed_everywhere() {
        let mut config = config("flashiness");
        config.admission.flashiness.first_training_samples = 32;
        let cache = run(&config, &zipf(120_000));
        assert!(cache.counters().models >= 1, "{:?}", cache.counters());
        let models = cache.models();
        assert_eq!(models.len(), 2);
        assert!(models.iter().all(|m| m.version >= 1), "{models:?}");
        assert!(cache.admission_memory() > 0);
    }

    #[test]
    fn sizes_that_cannot_work_are_refused() {
        let refused = |change: fn(&mut Study)| {
            HybridCache::new(&sized("all", change)).err().unwrap().to_string()
        };
        assert!(refused(|s| s.dram = 1000).contains("dram is 1000"));
        assert!(refused(|s| s.flash = 10).contains("flash is 10"));
        assert!(refused(|s| s.shards = 3).contains("shards is 3"));
    }

    /// What a server is told, divided as a server divides it: everything is in the memory.
    #[test]
    fn memory_is_what_a_server_has_with_everything_in_it() {
        for policy in ["flashiness", "reject_first", "all"] {
            let server =
                Server { memory: 4 << 20, flash: 26 << 20, object: 280, max_item: 1 << 20 };
            let c = CacheConfig { sizes: Sizes::Server(server), ..config(policy) };
            let cache = HybridCache::with_bytes(&c).unwrap();
            let all = cache.dram_capacity() + cache.metadata_memory();
            assert!(all <= 4 << 20 && all > 3800 << 10, "{policy}: {all}");
            let (plan, _) = server.divide(&c.admission, 1).unwrap();
            let planned = (plan.arena_bytes * plan.shards) as u64;
            // An arena is of whole blocks, and ends with one.
            assert!(planned - cache.dram_capacity() < 64 * plan.shards as u64, "{policy}");
            // A sample of a tenth has a tenth.
            let c = CacheConfig { sizes: Sizes::Sample(server, 0.1), ..c };
            let tenth = HybridCache::with_bytes(&c).unwrap().dram_capacity();
            assert!(tenth.abs_diff(cache.dram_capacity() / 10) < 256, "{policy}: {tenth}");
        }
        let refused = |memory, flash| {
            let server = Server { memory, flash, object: 280, max_item: 1 << 20 };
            let c = CacheConfig { sizes: Sizes::Server(server), ..config("all") };
            HybridCache::new(&c).err().unwrap().to_string()
        };
        assert_eq!(refused(1000, 0), "memory 1000 B must be at least 1 MiB");
        assert!(refused(4 << 20, 1 << 20).contains("flash 1 MiB must be at least 16 MiB"));
        assert!(refused(4 << 20, 1 << 30).contains("more than half of the memory, which is 4 MiB"));
    }

    /// Without flash a cache is DRAM alone: nothing is written, and everything is evicted.
    #[test]
    fn a_server_without_flash_is_simulated_too() {
        let server = Server { memory: 2 << 20, flash: 0, object: 280, max_item: 64 << 10 };
        let c = CacheConfig { sizes: Sizes::Server(server), ..config("flashiness") };
        let cache = run(&c, &zipf(60_000));
        let counts = cache.counters();
        assert_eq!((counts.flash_bytes, counts.hits_flash), (0, 0));
        assert!(counts.hits_dram > 10_000 && counts.dram_evictions > 1000, "{counts:?}");
    }
}
