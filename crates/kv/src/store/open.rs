//! Opening a store: device, superblock, memory, recovery; and closing it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, RwLock};

use larder_base::{AppId, ByteSize, HashKey, Nanos, Now, Words};
use larder_engine::index::{Attached, FlashIndex};
use larder_engine::kv::record::{
    AppsSetup, LogSetup, RunSetup, ShardSeed, ShardSetup, TapedLog, TapedShard,
};
use larder_engine::kv::{ClockMode, FlashGeometry, FlashLog, KvShard, LogConfig, SegmentTable};
use larder_format::signature::{HEAD_BYTES, TAIL_BYTES};
use larder_format::superblock::choose;
use larder_format::{PAGE_SIZE, Signature, Superblock, SuperblockError, Uuid};
use larder_policy::admission::AdmissionConfig;
use larder_policy::application::ApplicationsConfig;
use larder_policy::budget::{BudgetState, WriteBudget, WriteBudgetConfig};
use larder_runtime::{AlignedBuf, Clock, DataDir, Device, DeviceOptions, FlashDevice, Wear};

use super::capture::{Capture, CaptureConfig};
use super::plan::Plan;
use super::record::{RecordConfig, Recorder};
use super::warm::{Region, ShardWords, Warmth, remove_checkpoint, write_checkpoint};
use super::{Bell, Cell, Flash, KvStore, StoreError, locked};
use crate::stats::StoreStats;

/// Version of the data directory.
const DATA_DIR_VERSION: u32 = 1;
const BUDGET: &str = "budget.json";
const APPLICATIONS: &str = "applications.json";

/// What a store is opened with.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// DRAM for everything that grows with the cache.
    pub memory: u64,
    /// Largest object.
    pub max_item: u32,
    /// Answer "out of memory" instead of evicting.
    pub no_eviction: bool,
    /// Largest CLOCK value.
    pub clock_max: u8,
    /// What a read does to CLOCK.
    pub clock_mode: ClockMode,
    /// Where state is kept.
    pub data_dir: PathBuf,
    /// File or device; `None` for DRAM alone.
    pub flash: Option<PathBuf>,
    /// Bytes of flash; `None` for what is there.
    pub flash_size: Option<u64>,
    /// Mean size of an object on flash.
    pub flash_object_size: u32,
    /// Format the flash whatever it holds.
    pub format_flash: bool,
    /// Admission.
    pub admission: AdmissionConfig,
    /// Write budget.
    pub budget: WriteBudgetConfig,
    /// Applications.
    pub applications: ApplicationsConfig,
    /// Record the run.
    pub record: Option<RecordConfig>,
    /// Capture a sample of the requests.
    pub capture: Option<CaptureConfig>,
}

/// What opening found and did, for the log.
#[derive(Clone, Debug)]
pub struct Opened {
    /// How warm the start is; `None` without flash.
    pub warmth: Option<Warmth>,
    /// Objects on flash that were kept.
    pub kept: u64,
    /// Index entries that were dropped because their segments were not whole.
    pub dropped: u64,
    /// Why flash goes through the page cache, if it does.
    pub why_buffered: Option<String>,
    /// Why the index will not survive the process, if it will not.
    pub why_private: Option<String>,
    /// The flash was formatted.
    pub formatted: bool,
    /// Bytes of flash in use.
    pub flash_bytes: u64,
    /// Bytes per second that the write budget allows.
    pub budget: Option<f64>,
    /// How long recovery took.
    pub recovery: Nanos,
}

/// The superblock in force and where it lies.
pub(super) struct Superblocks {
    pub(super) current: Superblock,
    copy: usize,
}

impl Superblocks {
    fn write(
        &mut self,
        device: &dyn Device,
        next: Superblock,
    ) -> Result<(), larder_runtime::DeviceError> {
        let other = 1 - self.copy;
        let mut page = AlignedBuf::zeroed(PAGE_SIZE);
        page.copy_from_slice(&next.encode()[..]);
        device.write_at((other * PAGE_SIZE) as u64, &page)?;
        device.sync()?;
        self.copy = other;
        self.current = next;
        Ok(())
    }
}

fn random(out: &mut [u8]) -> Result<(), StoreError> {
    std::fs::File::open("/dev/urandom")
        .and_then(|mut f| f.read_exact(out))
        .map_err(|source| StoreError::System { what: "read /dev/urandom", source })
}

/// Opens a store and starts its threads.
///
/// # Errors
/// See [`StoreError`]: nothing has been overwritten then, unless formatting was asked for.
pub fn open(
    config: &StoreConfig,
    clock: &Arc<Clock>,
) -> Result<(Arc<KvStore>, Opened), StoreError> {
    let Some(path) = &config.flash else { return open_in_dram(config, clock) };
    let dir = DataDir::open(&config.data_dir, DATA_DIR_VERSION)?;
    let mut undo = Undo(dir.made().to_vec());
    let options = DeviceOptions {
        size: config.flash_size.map(ByteSize),
        least: Plan::LEAST_FLASH,
        ..DeviceOptions::new(path)
    };
    let device = FlashDevice::open(&options)?;
    if device.was_created() {
        undo.0.push(path.clone());
    }
    let why_buffered = device.why_buffered().map(str::to_owned);
    let drive = Arc::new(device);
    let device: Arc<dyn Device> = drive.clone();
    let medium = Medium { path: path.clone(), device, drive: Some(drive), why_buffered };
    let opened = open_on(config, clock, dir, medium)?;
    undo.0.clear();
    Ok(opened)
}

/// The flash of a store, open.
pub(super) struct Medium {
    /// As messages name it.
    pub(super) path: PathBuf,
    pub(super) device: Arc<dyn Device>,
    /// The same device, if it is one that can be asked for its wear.
    pub(super) drive: Option<Arc<FlashDevice>>,
    /// Why it goes through the page cache, if it does.
    pub(super) why_buffered: Option<String>,
}

fn open_in_dram(
    config: &StoreConfig,
    clock: &Arc<Clock>,
) -> Result<(Arc<KvStore>, Opened), StoreError> {
    let began = clock.now();
    let plan = Plan::new(config.memory, u64::from(config.max_item), None)?;
    let mut secret = [0; 16];
    random(&mut secret)?;
    let words = (0..plan.shards)
        .map(|_| ShardWords {
            index: Words::heap(FlashIndex::words_for(plan.buckets)),
            apps: Words::heap(AppId::COUNT),
        })
        .collect();
    let mut uuid = [0; 16];
    random(&mut uuid)?;
    let parts = Parts {
        plan,
        uuid: Uuid(uuid),
        hash_key: HashKey(secret),
        geometry: FlashGeometry { salt: 0, segments: 0, segment_bytes: 4096 },
        cas_base: u64::from(began.wall.0) * 1_000_000_000,
        budget_rate: None,
    };
    let setup = run_setup(config, &parts, Vec::new(), None)?;
    let (cells, _, _) = cells(&setup, words, None)?;
    let watchers = Watchers::start(config, &setup, clock)?;
    let store = Arc::new(store(config, &parts, &setup, cells, None, watchers)?);
    store
        .start_threads(clock)
        .map_err(|source| StoreError::System { what: "start a thread", source })?;
    let opened = Opened {
        warmth: None,
        kept: 0,
        dropped: 0,
        why_buffered: None,
        why_private: None,
        formatted: false,
        flash_bytes: 0,
        budget: None,
        recovery: clock.now().mono.saturating_sub(began.mono),
    };
    Ok((store, opened))
}

pub(super) fn open_on(
    config: &StoreConfig,
    clock: &Arc<Clock>,
    dir: DataDir,
    medium: Medium,
) -> Result<(Arc<KvStore>, Opened), StoreError> {
    let began = clock.now();
    let Medium { path, device, drive, why_buffered } = medium;
    let path = &path;
    let (mut superblocks, formatted) = superblocks(config, path, device.as_ref(), clock.now())?;
    let superblock = superblocks.current.clone();
    let geometry = superblock.geometry;
    let plan = Plan::new(
        config.memory,
        u64::from(config.max_item),
        Some((&geometry, config.flash_object_size)),
    )?;

    let saved = |name: &str| std::fs::read(dir.join(name)).ok();
    let budget_state: Option<BudgetState> =
        saved(BUDGET).filter(|_| !formatted).and_then(|b| serde_json::from_slice(&b).ok());
    let budget_at = clock.now().mono;
    let budget =
        WriteBudget::new(&config.budget, ByteSize(geometry.capacity()), budget_state, budget_at)?;
    let names: Vec<Vec<u8>> =
        saved(APPLICATIONS).and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default();

    let mut region = Region::open(&superblock, &plan, &geometry);
    let mut warmth = match region.is_of(&superblock, &plan, &geometry) {
        Ok(()) => Warmth::Memory,
        Err(why_not_memory) => {
            region.disown();
            if !superblock.is_clean() {
                Warmth::Cold(why_not_memory)
            } else {
                match region.load_checkpoint(&dir, &superblock, &geometry) {
                    Ok(()) => Warmth::Checkpoint,
                    Err(why) => Warmth::Cold(why),
                }
            }
        }
    };
    if formatted {
        warmth = Warmth::Cold("the flash has just been formatted".to_owned());
    }
    let warm = !matches!(warmth, Warmth::Cold(_));
    if warm && let Some(record) = &config.record {
        return Err(StoreError::RecordWarm { path: record.file.clone(), flash: path.clone() });
    }
    let cas_base =
        (u64::from(began.wall.0) * 1_000_000_000).max(superblock.cas_base.saturating_add(1 << 48));
    let next = superblock.start(cas_base);
    region.announce(&next);
    let (table_words, shard_words) = region.split();
    let mut table =
        if warm { SegmentTable::attach(table_words) } else { SegmentTable::create(table_words) };
    table.raise_generation(next.first_generation());
    let parts = Parts {
        plan,
        uuid: superblock.uuid,
        hash_key: superblock.hash_key,
        geometry: FlashGeometry {
            salt: superblock.salt(),
            segments: geometry.segments(),
            segment_bytes: geometry.segment_bytes(),
        },
        cas_base,
        budget_rate: budget.rate(),
    };
    let log_setup = LogSetup {
        hot_percent: 70,
        reinsert_percent: 20,
        retry_after: Nanos::from_secs(5).0,
        generation_floor: next.first_generation(),
        budget: config.budget.clone(),
        budget_state,
        budget_at: budget_at.0,
    };
    let log_config = LogConfig {
        flash: parts.geometry,
        hot_percent: log_setup.hot_percent,
        reinsert_percent: log_setup.reinsert_percent,
        retry_after: Nanos(log_setup.retry_after),
    };
    let names_known = names.len();
    let setup = run_setup(config, &parts, names, Some(log_setup))?;
    let generations = table.live_generations();
    let (cells, kept, dropped) = cells(&setup, shard_words, warm.then_some(&generations[..]))?;
    let watchers = Watchers::start(config, &setup, clock)?;
    // From here on the run owns the flash: the checkpoint of the last one proves nothing any more.
    superblocks.write(device.as_ref(), next.clone())?;
    region.own(&next, &plan, &geometry);
    remove_checkpoint(&dir)?;

    let why_private = region.why_private.clone();
    let buffers = (0..3).map(|_| AlignedBuf::zeroed(geometry.segment_bytes() as usize)).collect();
    let budget_rate = budget.rate();
    let flash = Flash {
        path: path.display().to_string(),
        geometry,
        admission: config.admission.policy.as_str().to_owned(),
        log: Mutex::new(TapedLog::new(FlashLog::new(log_config, table, budget, buffers))),
        device,
        dir,
        applications_kept: (names_known + 1).into(),
        superblock: Mutex::new(superblocks),
        log_wanted: Default::default(),
        read_errors: Default::default(),
        region,
        wear: Mutex::new(drive.as_deref().and_then(Wear::of)),
        drive,
    };
    let store = Arc::new(store(config, &parts, &setup, cells, Some(flash), watchers)?);
    store
        .start_threads(clock)
        .map_err(|source| StoreError::System { what: "start a thread", source })?;
    let opened = Opened {
        warmth: Some(warmth),
        kept,
        dropped,
        why_buffered,
        why_private,
        formatted,
        flash_bytes: geometry.capacity(),
        budget: budget_rate,
        recovery: clock.now().mono.saturating_sub(began.mono),
    };
    Ok((store, opened))
}

/// Removes what this start has made, if it is dropped before the start has succeeded: one that is refused leaves nothing
/// behind.
struct Undo(Vec<PathBuf>);

impl Drop for Undo {
    fn drop(&mut self) {
        for path in self.0.iter().rev() {
            // A directory goes only if nothing else has come into it.
            let is_dir = std::fs::symlink_metadata(path).is_ok_and(|m| m.is_dir());
            let _ = if is_dir { std::fs::remove_dir(path) } else { std::fs::remove_file(path) };
        }
    }
}

/// Reads the superblock, or formats a device that holds nothing (or whatever it holds, if that was asked for).
fn superblocks(
    config: &StoreConfig,
    path: &Path,
    device: &dyn Device,
    now: Now,
) -> Result<(Superblocks, bool), StoreError> {
    let size = device.geometry().size;
    let mut head = vec![0; (HEAD_BYTES as u64).min(size) as usize];
    device.read_at(0, &mut head)?;
    let page = |i: usize| head.get(i * PAGE_SIZE..(i + 1) * PAGE_SIZE).unwrap_or(&[]);
    if !config.format_flash {
        match choose(page(0), page(1)) {
            Ok(chosen) => {
                let formatted = chosen.superblock.geometry.device_bytes();
                if let Some(wanted) = config.flash_size
                    && wanted != formatted
                {
                    return Err(StoreError::OtherSize {
                        path: path.to_owned(),
                        formatted: ByteSize(formatted),
                        wanted: ByteSize(wanted),
                    });
                }
                chosen
                    .superblock
                    .check_device(size)
                    .map_err(|source| StoreError::Superblock { path: path.to_owned(), source })?;
                return Ok((Superblocks { current: chosen.superblock, copy: chosen.copy }, false));
            }
            Err(SuperblockError::None) => {}
            Err(e @ SuperblockError::Damaged) => {
                return Err(StoreError::Damaged { path: path.to_owned(), why: e.to_string() });
            }
            Err(source) => return Err(StoreError::Superblock { path: path.to_owned(), source }),
        }
        let mut tail = vec![0; (TAIL_BYTES as u64).min(size) as usize];
        device.read_at(size - tail.len() as u64, &mut tail)?;
        if let Some(found) = Signature::detect(&head).or_else(|| Signature::detect_tail(&tail)) {
            return Err(StoreError::Foreign { path: path.to_owned(), what: found.name.to_owned() });
        }
    }
    let geometry = Plan::geometry(config.memory, size, u64::from(config.max_item))?;
    // What cannot be served is not formatted.
    Plan::new(
        config.memory,
        u64::from(config.max_item),
        Some((&geometry, config.flash_object_size)),
    )?;
    let (mut uuid, mut secret) = ([0; 16], [0; 16]);
    random(&mut uuid)?;
    random(&mut secret)?;
    let first = Superblock::format(Uuid(uuid), HashKey(secret), geometry, now.wall);
    // Both copies are void before the new one is written: an old one must not win after a torn write.
    device.write_at(0, &AlignedBuf::zeroed(2 * PAGE_SIZE))?;
    device.sync()?;
    let mut superblocks = Superblocks { current: first.clone(), copy: 1 };
    superblocks.write(device, first)?;
    if let Ok(former) = choose(page(0), page(1)) {
        Region::forget(&former.superblock);
    }
    Ok((superblocks, true))
}

struct Parts {
    plan: Plan,
    uuid: Uuid,
    hash_key: HashKey,
    geometry: FlashGeometry,
    cas_base: u64,
    budget_rate: Option<f64>,
}

/// All that shards are built from, as a record states it: what is recorded is what runs.
fn run_setup(
    config: &StoreConfig,
    parts: &Parts,
    names: Vec<Vec<u8>>,
    log: Option<LogSetup>,
) -> Result<RunSetup, StoreError> {
    let plan = &parts.plan;
    // Without flash nothing is admitted anywhere, and no policy needs its tables.
    let admission = if parts.geometry.segments == 0 {
        AdmissionConfig::from_name("all")?
    } else {
        let mut admission = config.admission.clone();
        // One setting for whoever wants every byte accounted for.
        admission.first_fill &= config.budget.first_fill;
        admission
    };
    let room = |bytes: usize| if config.no_eviction { 0 } else { bytes as u64 };
    Ok(RunSetup {
        larder: env!("CARGO_PKG_VERSION").to_owned(),
        uuid: parts.uuid.to_string(),
        hash_key: parts.hash_key.0,
        salt: parts.geometry.salt,
        segments: parts.geometry.segments,
        segment_bytes: parts.geometry.segment_bytes,
        shard: ShardSetup {
            arena_bytes: plan.arena_bytes as u64,
            max_object: config.max_item,
            no_eviction: config.no_eviction,
            clock_increment: config.clock_mode == ClockMode::Increment,
            clock_max: config.clock_max,
            free_low: room(plan.free_low),
            free_high: room(plan.free_high),
            flash_min_record: 0,
            access_times: plan.access_times as u64,
            buckets: plan.buckets,
            admission_memory: plan.admission_bytes as u64,
            objects: plan.objects,
            share_bits: (1.0 / plan.shards as f64).to_bits(),
            budget_rate_bits: parts.budget_rate.map(f64::to_bits),
        },
        shards: (0..plan.shards as u64)
            .map(|i| ShardSeed {
                // Each shard counts in a part of its own of the 2^48 numbers that a start may give out: no two keys ever
                // show the same one.
                cas_base: parts.cas_base.saturating_add(i << 44),
                seed: parts.cas_base ^ i,
            })
            .collect(),
        admission,
        applications: AppsSetup { config: config.applications.clone(), names },
        log,
    })
}

/// The shards: attached to what is in their words when `generations` are given, else empty.
fn cells(
    setup: &RunSetup,
    words: Vec<ShardWords>,
    generations: Option<&[u64]>,
) -> Result<(Box<[Cell]>, u64, u64), StoreError> {
    let one = |i: usize, words: ShardWords| -> Result<(KvShard, Attached), StoreError> {
        let (shard_config, admission) = (setup.shard_config(i)?, setup.admission(i)?);
        let (mut shard, report) = match generations {
            None => (KvShard::new(shard_config, admission, words.index)?, Attached::default()),
            Some(generations) => {
                KvShard::attach(shard_config, admission, words.index, generations)?
            }
        };
        shard.keep_flash_bytes(words.apps, generations.is_some());
        larder_runtime::machine::prefer_huge_pages(shard.object_memory_mut());
        Ok((shard, report))
    };
    let (mut kept, mut dropped) = (0, 0);
    let mut cells = Vec::with_capacity(setup.shards.len());
    for built in in_parallel(words, one)? {
        let (shard, report) = built?;
        kept += report.kept;
        dropped += report.dropped;
        cells.push(Cell { shard: Mutex::new(TapedShard::new(shard)), waits: Default::default() });
    }
    Ok((cells.into_boxed_slice(), kept, dropped))
}

/// What looks on while the store runs.
#[derive(Default)]
struct Watchers {
    recorder: Option<Recorder>,
    capture: Option<Capture>,
}

impl Watchers {
    fn start(
        config: &StoreConfig,
        setup: &RunSetup,
        clock: &Clock,
    ) -> Result<Watchers, StoreError> {
        let capture = match &config.capture {
            None => None,
            Some(capture) => {
                let (mut secret, mut salt) = ([0; 16], [0; 8]);
                random(&mut secret)?;
                random(&mut salt)?;
                let salt = u64::from_le_bytes(salt);
                Some(Capture::start(capture, clock.now(), secret, salt)?)
            }
        };
        let recorder = config.record.as_ref().map(|r| Recorder::start(r, setup)).transpose()?;
        Ok(Watchers { recorder, capture })
    }
}

/// What `f` makes of each item and its number, in their order, by as many threads as there are processors: attaching is
/// one pass over the index of a shard.
fn in_parallel<T: Send, R: Send>(
    items: Vec<T>,
    f: impl Fn(usize, T) -> R + Sync,
) -> Result<Vec<R>, StoreError> {
    let threads = larder_runtime::machine::processors().min(items.len());
    let todo = Mutex::new(items.into_iter().enumerate());
    let done = Mutex::new(Vec::new());
    let work = || {
        loop {
            let next = locked(&todo).next();
            let Some((i, item)) = next else { return };
            let result = f(i, item);
            locked(&done).push((i, result));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            std::thread::Builder::new()
                .name("larder-attach".into())
                .spawn_scoped(scope, work)
                .map_err(|source| StoreError::System { what: "start a thread", source })?;
        }
        work();
        Ok::<(), StoreError>(())
    })?;
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_by_key(|(i, _)| *i);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

fn store(
    config: &StoreConfig,
    parts: &Parts,
    setup: &RunSetup,
    cells: Box<[Cell]>,
    flash: Option<Flash>,
    watchers: Watchers,
) -> Result<KvStore, StoreError> {
    if let Some(recorder) = &watchers.recorder {
        for (i, cell) in cells.iter().enumerate() {
            if let Some(tape) = recorder.tape(i) {
                cell.lock().record(tape);
            }
        }
        if let (Some(flash), Some(tape)) = (&flash, recorder.tape(cells.len())) {
            locked(&flash.log).record(tape);
        }
    }
    let applications = setup.applications.applications()?;
    Ok(KvStore {
        hasher: setup.hasher(),
        cells,
        applications_known: applications.len().into(),
        applications: RwLock::new(applications),
        delimiter: config.applications.delimiter.bytes().next(),
        max_object: config.max_item,
        no_eviction: config.no_eviction,
        memory: config.memory.into(),
        flash,
        bell: Arc::new(Bell::default()),
        threads: Mutex::new(Vec::new()),
        baseline: Mutex::new(StoreStats::default()),
        flushed_at: Default::default(),
        plan: parts.plan,
        training: config.admission.flashiness.training,
        recorder: watchers.recorder,
        capture: watchers.capture,
    })
}

fn remember(flash: &Flash, name: &str, bytes: Result<Vec<u8>, serde_json::Error>) {
    let written = bytes
        .map_err(|e| e.to_string())
        .and_then(|b| flash.dir.replace(name, &b).map_err(|e| e.to_string()));
    if let Err(error) = written {
        tracing::warn!(%error, name, "could not be written; the next start does without");
    }
}

impl KvStore {
    /// Writes down which id stands for which application, if there are new ones since the last time: records on flash
    /// bear ids, and must not outlive what they mean. The cleaner calls it before it takes an object to flash.
    pub(super) fn remember_applications(&self, flash: &Flash) {
        let known = self.applications_known.load(Ordering::Relaxed);
        if flash.applications_kept.swap(known, Ordering::Relaxed) == known {
            return;
        }
        let names: Vec<Vec<u8>> = {
            let apps = self.applications.read().unwrap_or_else(std::sync::PoisonError::into_inner);
            apps.names().map(<[u8]>::to_vec).collect()
        };
        remember(flash, APPLICATIONS, serde_json::to_vec(&names));
    }

    /// After the last request: checkpoint, superblock of a clean stop, what the budget must remember.
    pub(super) fn write_down(&self, flash: &Flash, now: Now) {
        let mut log = locked(&flash.log);
        let state = log.unrecorded().budget_mut().state(now.mono);
        remember(flash, BUDGET, serde_json::to_vec(&state));
        self.remember_applications(flash);
        let mut superblocks = locked(&flash.superblock);
        let mut guards: Vec<_> = self.cells.iter().map(Cell::lock).collect();
        let written = (|| -> Result<(), String> {
            flash.device.sync().map_err(|e| e.to_string())?;
            let apps: Vec<Vec<u64>> =
                guards.iter().map(|g| g.apps().flash_bytes().collect()).collect();
            let words: Vec<&Words> =
                guards.iter_mut().map(|g| &*g.unrecorded().index_words()).collect();
            write_checkpoint(
                &flash.dir,
                &superblocks.current,
                &flash.geometry,
                now.wall,
                log.table().words(),
                &words,
                &apps,
            )
            .map_err(|e| e.to_string())?;
            let stop = superblocks.current.stop(superblocks.current.cas_base);
            superblocks.write(flash.device.as_ref(), stop).map_err(|e| e.to_string())
        })();
        match written {
            Ok(()) => {
                flash.region.release();
                tracing::info!("checkpoint written; the next start is warm");
            }
            Err(error) => tracing::warn!(
                %error,
                "no checkpoint; the next start is warm only if this machine's memory keeps the index until then"
            ),
        }
    }
}
