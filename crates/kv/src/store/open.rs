//! Opening a store: device, superblock, memory, recovery; and closing it.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use larder_base::{ByteSize, HashKey, Nanos, Now, UnixSecs, Words};
use larder_engine::index::Attached;
use larder_engine::kv::node::{self, AdmissionNeed, LogStart, Plan, Training, defaults};
use larder_engine::kv::record::{AppsSetup, RunSetup, TapedLog, TapedShard};
use larder_engine::kv::{ClockMode, FlashGeometry, FlashLog, KvShard, SegmentTable};
use larder_format::signature::{HEAD_BYTES, TAIL_BYTES};
use larder_format::superblock::choose;
use larder_format::{PAGE_SIZE, Signature, Superblock, SuperblockError, Uuid};
use larder_policy::admission::AdmissionConfig;
use larder_policy::application::ApplicationsConfig;
use larder_policy::budget::{BudgetState, KeptBudget, WriteBudget, WriteBudgetConfig};
use larder_runtime::{
    AlignedBuf, Clock, DataDir, Device, DeviceError, DeviceOptions, FlashDevice, Wear,
};

use super::capture::Capture;
use super::former::{self, Division};
use super::memory_file::{Loaded, MemoryFile};
use super::record::{RecordConfig, Recorder};
use super::run::{self, FlashOfRun, NO_BIRTHS};
use super::warm::{
    NotOurs, Region, ShardWords, Warmth, Writing, remove_checkpoint, write_checkpoint,
};
use super::{Bell, Cell, Flash, KvStore, StoreError, locked};
use crate::config::CaptureConfig;
use crate::stats::StoreStats;

mod alone;

/// Version of the data directory.
pub(super) const DATA_DIR_VERSION: u32 = 1;
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
    /// File that keeps what is in DRAM over a stop in good order.
    pub memory_file: Option<PathBuf>,
    /// Record the run.
    pub record: Option<RecordConfig>,
    /// Capture a sample of the requests.
    pub capture: Option<CaptureConfig>,
    /// Set while a store opens, it ends the start; while one stops, the stop, with what is there.
    pub hurry: Arc<AtomicBool>,
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
    /// What the operator may want to know: one line each.
    pub notes: Vec<String>,
    /// What the operator should know: one line each.
    pub warnings: Vec<String>,
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

/// CAS uniques of a shard, as a power of two: a start may give out 2^48.
const CAS_BITS: u32 = 44;

/// What admission needs of the memory.
pub(super) fn need(config: &StoreConfig) -> AdmissionNeed<'_> {
    AdmissionNeed::of(&config.admission)
}

pub(super) fn random(out: &mut [u8]) -> Result<(), StoreError> {
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
    let Some(path) = &config.flash else { return alone::open(config, clock) };
    let dir = former::open_dir(&config.data_dir)?;
    let mut undo = Undo(dir.made().to_vec());
    if !dir.made().is_empty() {
        undo.0.push(run::path(dir.path()));
    }
    // What cannot be served is not made anew.
    let remake = config.format_flash && config.flash_size.is_some();
    if let Some(size) = config.flash_size.filter(|_| remake) {
        let geometry = Plan::geometry(config.memory, size, u64::from(config.max_item))?;
        let flash = Some((&geometry, config.flash_object_size));
        Plan::new(config.memory, u64::from(config.max_item), flash, need(config))?;
    }
    let options = DeviceOptions {
        size: config.flash_size.map(ByteSize),
        least: Plan::LEAST_FLASH,
        remake,
        ..DeviceOptions::new(path)
    };
    let device = FlashDevice::open(&options).map_err(|e| match e {
        DeviceError::SizeDiffers { .. } if path.is_file() => StoreError::FileSize(e),
        e => e.into(),
    })?;
    if device.was_created() {
        undo.0.push(path.clone());
    }
    let why_buffered = device.why_buffered().map(str::to_owned);
    let drive = Arc::new(device);
    let device: Arc<dyn Device> = drive.clone();
    let medium = Medium { path: path.clone(), device, drive: Some(drive), why_buffered };
    let memory_file = memory_file(config, &mut undo)?;
    let opened = open_on(config, clock, dir, medium, memory_file)?;
    undo.0.clear();
    Ok(opened)
}

/// The file for what is in DRAM, if there is to be one.
fn memory_file(config: &StoreConfig, undo: &mut Undo) -> Result<Option<MemoryFile>, StoreError> {
    let Some(path) = &config.memory_file else { return Ok(None) };
    let file = MemoryFile::look(path)?;
    if file.made {
        undo.0.push(path.clone());
    }
    Ok(Some(file))
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

/// What is in DRAM is put back from the file, if it can be believed. An error if the start is to end.
fn load(
    config: &StoreConfig,
    file: Option<&mut MemoryFile>,
    setup: &RunSetup,
    cells: &[Cell],
    clock: &Clock,
) -> Result<Loaded, StoreError> {
    let Some(file) = file else { return Ok(Loaded::default()) };
    let applications = setup.applications.applications()?;
    let loaded = file.load(cells, &setup.hasher(), applications, clock, &config.hurry);
    if config.hurry.load(Ordering::Relaxed) {
        return Err(StoreError::Stopped);
    }
    Ok(loaded)
}

/// The number of the run is written: the file is void, and what came of it is told.
fn settle(
    store: &mut KvStore,
    file: &MemoryFile,
    loaded: Loaded,
    notes: &mut Vec<String>,
    warnings: &mut Vec<String>,
) {
    *store.flushed_at.get_mut() = loaded.flushed_at;
    notes.extend(loaded.note);
    warnings.extend(loaded.warning);
    warnings.extend(file.void().err());
}

/// The clock does not tell a time before `latest`, at which the last run judged something. Tells so if the system's does.
fn not_before(clock: &Clock, latest: UnixSecs, anew: &str) -> Option<String> {
    let behind = clock.not_before(latest)?;
    Some(format!(
        "the system's clock is {} s behind the time at which this cache was last in use (Unix time {}): expiry counts on from \
         that time, so that nothing comes back that had expired. If that time was the wrong one, {anew} begins anew by the \
         system's clock, and loses what is cached",
        behind.as_millis().div_ceil(1000),
        latest.0
    ))
}

/// A number that no other start has.
pub(super) fn random_run() -> Result<u64, StoreError> {
    let mut bytes = [0; 8];
    random(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes).max(1))
}

/// Where the CAS of a start begin: by chance how far on, so that two lines of runs that began with copies of one flash give no
/// number out twice, nor a server whose clock was set back.
fn cas_base(began: Now, least: u64) -> Result<u64, StoreError> {
    let base = (u64::from(began.wall.0) * 1_000_000_000).max(least);
    Ok(base.saturating_add(random_run()? >> 18))
}

pub(super) fn open_on(
    config: &StoreConfig,
    clock: &Arc<Clock>,
    dir: DataDir,
    medium: Medium,
    mut memory_file: Option<MemoryFile>,
) -> Result<(Arc<KvStore>, Opened), StoreError> {
    let began = clock.now();
    let Medium { path, device, drive, why_buffered } = medium;
    let path = &path;
    let (mut superblocks, formatted) = superblocks(config, path, device.as_ref(), clock.now())?;
    let superblock = superblocks.current.clone();
    let geometry = superblock.geometry;
    let last = run::last(&dir);
    // The shared memory of a flash that this directory has left for another one is of no use any more.
    if let Ok(last) = &last
        && let Some(flash) = &last.flash
        && flash.uuid != superblock.uuid.to_string()
    {
        Region::forget(&flash.uuid);
    }
    let last = last.and_then(|last| run::is_of(&last, &superblock).map(|()| last));
    let (mut notes, mut warnings) = (Vec::new(), Vec::new());
    let divided = former::division(config, path, &superblock, last.as_ref().ok(), &dir)?;
    let (plan, kept_from) = match divided {
        Division::New(plan) => (plan, None),
        Division::Kept { plan, from, said } => {
            notes.extend(said);
            (plan, Some(from))
        }
    };

    let saved = |name: &str| std::fs::read(dir.join(name)).ok();
    let budget_state: Option<BudgetState> =
        saved(BUDGET).filter(|_| !formatted).and_then(|b| serde_json::from_slice(&b).ok());
    let budget_at = clock.now().mono;
    let budget =
        WriteBudget::new(&config.budget, ByteSize(geometry.capacity()), budget_state, budget_at)?;
    let names: Vec<Vec<u8>> =
        saved(APPLICATIONS).and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default();

    let mut region = Region::open(&superblock, &plan, &geometry, path, &config.data_dir);
    // The latest time that the last run told: what had expired by then stays so.
    let mut latest = None;
    let in_memory = match &last {
        Err(why) => Err(NotOurs::Other(why.clone())),
        Ok(last) => region.is_of(&superblock, last.run, &plan, &geometry),
    };
    let mut warmth = match (in_memory, &last) {
        (Ok(()), _) => {
            latest = region.latest().map(|l| l.load(Ordering::Relaxed).min(u64::from(u32::MAX)));
            Warmth::Memory
        }
        // Whoever has used the flash since, on whatever copy of it, a checkpoint from before proves nothing.
        (Err(NotOurs::Other(why)), _) | (Err(NotOurs::Absent(why)), Err(_)) => {
            region.disown();
            Warmth::Cold(why)
        }
        (Err(NotOurs::Absent(why)), Ok(last)) => {
            region.disown();
            if last.run != superblock.run {
                Warmth::Cold("the flash has been used by another run since".to_owned())
            } else if !superblock.is_clean() {
                Warmth::Cold(why)
            } else if let Err(why) = last.proves_checkpoint() {
                Warmth::Cold(why)
            } else {
                match region.load_checkpoint(&dir, &superblock, &geometry, &config.hurry) {
                    Ok(written) => {
                        latest = Some(u64::from(written.0));
                        Warmth::Checkpoint
                    }
                    Err(why) => Warmth::Cold(why),
                }
            }
        }
    };
    if formatted {
        warmth = Warmth::Cold("the flash has just been formatted".to_owned());
    }
    let warm = !matches!(warmth, Warmth::Cold(_));
    if config.hurry.load(Ordering::Relaxed) {
        if warmth != Warmth::Memory {
            // The checkpoint is there still.
            region.release();
        }
        return Err(StoreError::Stopped);
    }
    if warm && let Some(record) = &config.record {
        return Err(StoreError::RecordWarm { path: record.file.clone(), flash: path.clone() });
    }
    if warm && let Some(latest) = latest.map(|latest| UnixSecs(latest as u32)) {
        warnings.extend(not_before(clock, latest, "--format-flash once"));
    }
    if let Some(file) = &mut memory_file {
        let why = "the flash has just been formatted".to_owned();
        let last = if formatted { Err(&why) } else { last.as_ref() };
        file.prove(last, Some((superblock.uuid, superblock.run)), config.max_item);
        if let Some(latest) = file.latest() {
            warnings.extend(not_before(clock, latest, "--format-flash once"));
        }
    }
    let cas_base = cas_base(began, superblock.cas_base.saturating_add(1 << 48))?;
    let next = superblock.start(cas_base, random_run()?);
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
        log: Some(LogStart { generation_floor: next.first_generation(), budget_state, budget_at }),
    };
    let (names_known, mut names) = (names.len(), names);
    if let Some(file) = &memory_file {
        names.extend(file.new_names(&names, config.applications.shares.len()));
    }
    let setup = run_setup(config, &parts, names)?;
    let generations = table.live_generations();
    let (cells, kept, dropped) = cells(&setup, shard_words, warm.then_some(&generations[..]))?;
    let loaded = load(config, memory_file.as_mut(), &setup, &cells, clock).inspect_err(|_| {
        if warmth != Warmth::Memory {
            // The checkpoint is there still.
            region.release();
        }
    })?;
    let watchers = Watchers::start(config, &setup, clock)?;
    // From here on the run owns the flash: the checkpoint of the last one proves nothing any more.
    // The settings that go with the division, not those that would have divided otherwise.
    let mut this =
        kept_from.unwrap_or_else(|| FlashOfRun::new(&next, path, &plan, config.flash_object_size));
    this.path = path.display().to_string();
    let file = memory_file.as_ref().map(MemoryFile::name);
    let mut no_checkpoint = None;
    match run::write(&dir, next.run, Some(this), file) {
        Ok(true) => {}
        Ok(false) => {
            warnings.push(format!(
                "{NO_BIRTHS}: a restart of this machine makes the cache cold; the index stays in this machine's memory until then"
            ));
            no_checkpoint = Some(NO_BIRTHS);
        }
        // What the directory says then is not what the flash says: nothing outdated can come of it.
        Err(error) => warnings.push(format!("{error}: the next start is cold")),
    }
    superblocks.write(device.as_ref(), next.clone())?;
    if let Some(latest) = region.latest() {
        clock.keep_in(latest);
    }
    region.own(&next, &plan, &geometry);
    remove_checkpoint(&dir)?;

    let why_private = region.why_private.clone();
    let buffers = (0..3).map(|_| AlignedBuf::zeroed(geometry.segment_bytes() as usize)).collect();
    let budget_rate = budget.rate();
    let kept_budget = KeptBudget::new(
        &budget,
        ByteSize(geometry.capacity()),
        u64::from(geometry.segment_bytes()),
    );
    let flash = setup.log_config().map(|log_config| Flash {
        path: path.display().to_string(),
        geometry,
        admission: config.admission.policy.as_str().to_owned(),
        log: Mutex::new(TapedLog::new(FlashLog::new(log_config, table, budget, buffers))),
        device,
        dir,
        applications_kept: (names_known + 1).into(),
        superblock: Mutex::new(superblocks),
        kept_budget: Mutex::new(kept_budget),
        log_wanted: Default::default(),
        read_errors: Default::default(),
        region,
        no_checkpoint,
        wear: Mutex::new(drive.as_deref().and_then(Wear::of)),
        drive,
    });
    let mut store = store(config, &parts, &setup, cells, flash, watchers)?;
    if let Some(file) = memory_file {
        settle(&mut store, &file, loaded, &mut notes, &mut warnings);
        store.memory_file = Some(file.keeper(next.run, cas_base, Some(next.uuid), None));
    }
    let store = Arc::new(store);
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
        notes,
        warnings,
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
        need(config),
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
        Region::forget(&former.superblock.uuid.to_string());
    }
    Ok((superblocks, true))
}

struct Parts {
    plan: Plan,
    uuid: Uuid,
    hash_key: HashKey,
    geometry: FlashGeometry,
    cas_base: u64,
    log: Option<LogStart>,
}

/// All that shards and log are built from.
fn run_setup(
    config: &StoreConfig,
    parts: &Parts,
    names: Vec<Vec<u8>>,
) -> Result<RunSetup, StoreError> {
    let cache = node::Cache {
        max_item: config.max_item,
        no_eviction: config.no_eviction,
        clock_mode: config.clock_mode,
        clock_max: config.clock_max,
        hot_percent: defaults::HOT_PERCENT,
        reinsert_percent: defaults::REINSERT_PERCENT,
        admission: config.admission.clone(),
        budget: config.budget.clone(),
        applications: AppsSetup { config: config.applications.clone(), names },
    };
    let start = node::Start {
        larder: env!("CARGO_PKG_VERSION").to_owned(),
        uuid: parts.uuid.to_string(),
        hash_key: parts.hash_key,
        cas_base: parts.cas_base,
        cas_bits: CAS_BITS,
        seed: parts.cas_base,
        flash: parts.geometry,
        log: parts.log,
    };
    Ok(node::run_setup(&cache, &parts.plan, &start)?)
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
        crawler: super::cleaner::CrawlerState::new(true),
        watch: super::watched::Evictions::default(),
        threads: Mutex::new(Vec::new()),
        baseline: Mutex::new(StoreStats::default()),
        flushed_at: Default::default(),
        plan: parts.plan,
        training: config.admission.flashiness.training,
        schedule: Mutex::new(Training::new(parts.cas_base)),
        recorder: watchers.recorder,
        capture: watchers.capture,
        memory_file: None,
        hurry: config.hurry.clone(),
        _shared_dir: None,
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

fn keep_budget(flash: &Flash, state: BudgetState) {
    let written = serde_json::to_vec(&state)
        .map_err(|e| e.to_string())
        .and_then(|b| flash.dir.replace(BUDGET, &b).map_err(|e| e.to_string()));
    if let Err(error) = written {
        tracing::warn!(
            %error,
            "the write budget could not be written down; the next start knows less of what was written to flash, and \
             allows more"
        );
    }
}

impl KvStore {
    /// What the write budget must remember over a kill is in the data directory, ahead of what is written, before so many
    /// bytes more are. The cleaner calls it before each step, and nobody else takes from the budget then.
    pub(super) fn keep_budget(&self, flash: &Flash, now: Now, bytes: u64) {
        let mut kept = locked(&flash.kept_budget);
        let due = kept.due(now.mono, locked(&flash.log).budget(), bytes);
        if let Some(state) = due {
            keep_budget(flash, state);
            kept.kept(now.mono, state);
        }
    }

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
        // What the checkpoint can come to at most, should this be killed while it is written.
        self.keep_budget(flash, now, self.plan.region_words as u64 * 9);
        let mut log = locked(&flash.log);
        self.remember_applications(flash);
        let mut superblocks = locked(&flash.superblock);
        let mut guards: Vec<_> = self.cells.iter().map(Cell::lock).collect();
        let mut writing = Writing { at: now.wall, hurry: &self.hurry, bytes: 0 };
        let written = (|| -> Result<(), String> {
            flash.device.sync().map_err(|e| e.to_string())?;
            if let Some(why) = flash.no_checkpoint {
                return Err(why.to_owned());
            }
            let apps: Vec<Vec<u64>> =
                guards.iter().map(|g| g.apps().flash_bytes().collect()).collect();
            let words: Vec<&Words> =
                guards.iter_mut().map(|g| &*g.unrecorded().index_words()).collect();
            write_checkpoint(
                &flash.dir,
                &superblocks.current,
                &flash.geometry,
                &mut writing,
                log.table().words(),
                &words,
                &apps,
            )
            .map_err(|e| e.to_string())?;
            let stop = superblocks.current.stop(superblocks.current.cas_base);
            superblocks.write(flash.device.as_ref(), stop).map_err(|e| e.to_string())
        })();
        let budget = log.unrecorded().budget_mut();
        budget.charge(now.mono, writing.bytes);
        let state = budget.state(now.mono);
        keep_budget(flash, state);
        let kept: u64 = guards.iter().map(|g| g.index().len()).sum();
        let lost: usize = guards.iter().map(|g| g.dram_objects()).sum();
        // What becomes of them with a memory file is said when it is known.
        let in_dram = match self.memory_file {
            Some(_) => String::new(),
            None if kept > 0 => format!("; {lost} in DRAM alone are lost"),
            None => format!(": {lost} objects in DRAM are lost"),
        };
        match written {
            Ok(()) => {
                flash.region.release();
                if kept > 0 {
                    tracing::info!(
                        "checkpoint written; the next start is warm with {kept} objects on flash{in_dram}"
                    );
                } else {
                    tracing::info!(
                        "checkpoint written; nothing is on flash, so the next start is empty{in_dram}"
                    );
                }
            }
            Err(error) => tracing::warn!(
                %error,
                "no checkpoint; the next start is warm only if this machine's memory keeps the index until then"
            ),
        }
    }
}
