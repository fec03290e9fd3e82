//! Opening a store: device, superblock, memory, recovery; and closing it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use larder_base::lock::Threads;
use larder_base::{ByteSize, HashKey, Nanos, Now, UnixSecs, Words};
use larder_engine::kv::node::start::{
    self, Closed, Drawn, FlashFound, Heads, Left, NO_BIRTHS, Shape, StartIo, StopIo, Superblocks,
    Warmth,
};
use larder_engine::kv::node::{
    self, AdmissionNeed, AtRest, LogStart, Maintenance, Node, Plan, StateIo, defaults,
};
use larder_engine::kv::record::{AppsSetup, RunSetup};
use larder_engine::kv::{ClockMode, FlashGeometry, IoFailed, SegmentIo};
use larder_format::signature::{HEAD_BYTES, TAIL_BYTES};
use larder_format::superblock::choose;
use larder_format::{PAGE_SIZE, Signature, Superblock, SuperblockError, Uuid};
use larder_policy::admission::AdmissionConfig;
use larder_policy::application::ApplicationsConfig;
use larder_policy::budget::{BudgetState, WriteBudgetConfig};
use larder_runtime::{
    AlignedBuf, Clock, DataDir, Device, DeviceError, DeviceOptions, FlashDevice, Wear,
};

use super::capture::Capture;
use super::cleaner::{APPLICATIONS, BUDGET, Disk};
use super::former::{self, Division};
use super::memory_file::{Loaded, MemoryFile};
use super::notifier::Notifier;
use super::own_files::own_file;
use super::record::{RecordConfig, Recorder};
use super::run::{self, FlashOfRun};
use super::warm::{Region, ShardWords, Writing, remove_checkpoint, write_checkpoint};
use super::{CacheError, Core, Flash, locked};
use super::{CacheStats, CaptureConfig};

mod alone;

/// Version of the data directory.
pub(super) const DATA_DIR_VERSION: u32 = 1;

/// What a store is opened with.
#[derive(Clone, Debug)]
pub struct CacheConfig {
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

/// The head of a flash.
struct Head<'a>(&'a dyn Device);

impl Heads for Head<'_> {
    type Error = larder_runtime::DeviceError;

    fn write(&mut self, copy: usize, superblock: &Superblock) -> Result<(), Self::Error> {
        let mut page = AlignedBuf::zeroed(PAGE_SIZE);
        page.copy_from_slice(&superblock.encode()[..]);
        self.0.write_at((copy * PAGE_SIZE) as u64, &page)
    }
    fn sync(&mut self) -> Result<(), Self::Error> {
        self.0.sync()
    }
}

/// What admission needs of the memory.
pub(super) fn need(config: &CacheConfig) -> AdmissionNeed<'_> {
    AdmissionNeed::of(&config.admission)
}

pub(super) fn random<const N: usize>() -> Result<[u8; N], CacheError> {
    larder_runtime::machine::random_bytes()
        .map_err(|source| CacheError::System { what: "get random numbers", source })
}

/// Opens a cache and starts its threads.
///
/// # Errors
/// See [`CacheError`]: nothing has been overwritten then, unless formatting was asked for.
pub fn open(config: &CacheConfig, clock: &Arc<Clock>) -> Result<(Arc<Core>, Opened), CacheError> {
    started(prepare_any(config, clock)?, clock)
}

/// Starts the threads of a cache.
fn started(ready: Ready, clock: &Arc<Clock>) -> Result<(Arc<Core>, Opened), CacheError> {
    let Ready { store, opened, maintenance } = ready;
    let store = Arc::new(store);
    tracing::info!("{}", store.memory_divided(clock.now()));
    if let Some(told) = store.largest_for_flash() {
        tracing::info!("{told}");
    }
    store
        .start_threads(clock, maintenance)
        .map_err(|source| CacheError::System { what: "start a thread", source })?;
    Ok((store, opened))
}

/// A cache that has no threads yet, with flash or without.
pub(super) fn prepare_any(config: &CacheConfig, clock: &Arc<Clock>) -> Result<Ready, CacheError> {
    let Some(path) = &config.flash else { return alone::prepare(config, clock) };
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
        DeviceError::SizeDiffers { .. } if path.is_file() => CacheError::FileSize(e),
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
    let ready = prepare(config, clock, dir, medium, memory_file)?;
    undo.0.clear();
    Ok(ready)
}

/// The file for what is in DRAM, if there is to be one.
fn memory_file(config: &CacheConfig, undo: &mut Undo) -> Result<Option<MemoryFile>, CacheError> {
    let Some(path) = &config.memory_file else { return Ok(None) };
    if let Some(what) = own_file(&config.data_dir, config.flash.as_deref(), path) {
        let why = format!("it {what}, and would be overwritten: name another file with -e");
        return Err(CacheError::MemoryFile { path: path.clone(), why });
    }
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
    config: &CacheConfig,
    file: Option<&mut MemoryFile>,
    setup: &RunSetup,
    node: &Node<Threads>,
    clock: &Clock,
) -> Result<Loaded, CacheError> {
    let Some(file) = file else { return Ok(Loaded::default()) };
    let applications = setup.applications.applications()?;
    let loaded = file.load(node, applications, clock, &config.hurry);
    if config.hurry.load(Ordering::Relaxed) {
        return Err(CacheError::Stopped);
    }
    Ok(loaded)
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
pub(super) fn random_run() -> Result<u64, CacheError> {
    Ok(u64::from_le_bytes(random()?).max(1))
}

#[cfg(test)]
pub(super) fn open_on(
    config: &CacheConfig,
    clock: &Arc<Clock>,
    dir: DataDir,
    medium: Medium,
    memory_file: Option<MemoryFile>,
) -> Result<(Arc<Core>, Opened), CacheError> {
    started(prepare(config, clock, dir, medium, memory_file)?, clock)
}

/// A cache that has no threads yet.
pub(super) struct Ready {
    pub(super) store: Core,
    pub(super) opened: Opened,
    pub(super) maintenance: Maintenance<AlignedBuf>,
}

/// Opens a store on this medium.
pub(super) fn prepare(
    config: &CacheConfig,
    clock: &Arc<Clock>,
    dir: DataDir,
    medium: Medium,
    mut memory_file: Option<MemoryFile>,
) -> Result<Ready, CacheError> {
    let began = clock.now();
    let Medium { path, device, drive, why_buffered } = medium;
    let path = &path;
    let (mut superblocks, formatted) = superblocks(config, path, device.as_ref(), clock.now())?;
    let superblock = superblocks.current().clone();
    let geometry = superblock.geometry;
    let last = run::last(&dir);
    let left_flash = last.as_ref().ok().and_then(|last| last.flash.as_ref());
    let left_flash = left_flash.map(|flash| flash.uuid.clone());
    let left_flash = left_flash.filter(|uuid| *uuid != superblock.uuid.to_string());
    let last = last.and_then(|last| last.note().check_flash(&superblock).map(|()| last));
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
    let capacity = ByteSize(geometry.capacity());
    let budget_rate = node::budget_rate(&config.budget, capacity, budget_state, budget_at)?;
    let names: Vec<Vec<u8>> =
        saved(APPLICATIONS).and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default();

    let mut region = Region::open(&superblock, &plan, &geometry, path, &config.data_dir);
    let shape = Shape::new(&superblock, &plan);
    let drawn = Drawn { began: began.wall, cas: random_run()?, run: random_run()? };
    let begun = {
        let known = last.as_ref().map(|last| last.note().last_run()).map_err(Clone::clone);
        let left = Left::new(&superblock, formatted, known.as_ref().map_err(Clone::clone));
        let is_new = region.is_new();
        let Region { header, words, .. } = &mut region;
        left.begin(shape, header, is_new, drawn, || {
            words.load_checkpoint(&dir, &superblock, &geometry, plan.buckets, is_new, &config.hurry)
        })
    };
    if config.hurry.load(Ordering::Relaxed) {
        if begun.gives_memory_back() {
            region.release();
        }
        return Err(CacheError::Stopped);
    }
    if begun.is_warm()
        && let Some(record) = &config.record
    {
        return Err(CacheError::RecordWarm { path: record.file.clone(), flash: path.clone() });
    }
    if let Some(file) = &mut memory_file {
        let flash = FlashFound { superblock: &superblock, formatted };
        file.prove(last.as_ref(), Some(flash), config.max_item);
        file.check_recorded(config)?;
    }
    let latest = [begun.latest(), memory_file.as_ref().and_then(MemoryFile::latest)];
    for latest in latest.into_iter().flatten() {
        warnings.extend(not_before(clock, latest, "--format-flash once"));
    }
    let next = begun.superblock();
    let cas_base = next.cas_base;
    let (table_words, shard_words) = region.words.split();
    let (table, generations) = begun.table(table_words);
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
    let (node, kept, dropped) = build_node(&setup, plan, shard_words, generations.as_deref())?;
    let loaded = load(config, memory_file.as_mut(), &setup, &node, clock).inspect_err(|_| {
        if begun.gives_memory_back() {
            region.release();
        }
    })?;
    let watchers = Watchers::start(config, &setup, clock)?;
    // From here on the run owns the flash: the checkpoint of the last one proves nothing any more.
    // The settings that go with the division, not those that would have divided otherwise.
    let mut this =
        kept_from.unwrap_or_else(|| FlashOfRun::new(next, path, &plan, config.flash_object_size));
    this.path = path.display().to_string();
    let mut durable = Durable {
        dir: &dir,
        this: Some(this),
        memory_file: memory_file.as_ref(),
        superblocks: &mut superblocks,
        device: device.as_ref(),
        clock,
        latest: region.latest(),
        no_checkpoint: None,
        warnings: &mut warnings,
    };
    let keeper = begun.take_over(&mut region.header, memory_file.is_some(), &mut durable)?;
    let no_checkpoint = durable.no_checkpoint;
    region.own();
    // The memory of a flash that this directory has left for another one is of no use any more.
    if let Some(uuid) = left_flash {
        Region::forget(&uuid);
    }

    let why_private = region.why_private.clone();
    let buffers = (0..3).map(|_| AlignedBuf::zeroed(geometry.segment_bytes() as usize)).collect();
    let log = setup.log_over(table, buffers)?;
    let mut maintenance = Maintenance::new(&node, log, cas_base, names_known);
    let flash = Flash {
        path: path.display().to_string(),
        geometry,
        admission: config.admission.policy.as_str().to_owned(),
        device,
        dir,
        superblock: Mutex::new(superblocks),
        read_errors: Default::default(),
        region,
        no_checkpoint,
        wear: Mutex::new(drive.as_deref().and_then(Wear::of)),
        drive,
    };
    let mut store = store(config, setup, plan, node, &mut maintenance, Some(flash), watchers);
    notes.extend(loaded.note);
    warnings.extend(loaded.warning);
    store.memory_file = memory_file.zip(keeper).map(|(file, keeper)| file.keeper(keeper, None));
    let opened = Opened {
        warmth: Some(begun.warmth().clone()),
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
    Ok(Ready { store, opened, maintenance })
}

/// What a start with flash makes durable.
struct Durable<'a> {
    dir: &'a DataDir,
    this: Option<FlashOfRun>,
    memory_file: Option<&'a MemoryFile>,
    superblocks: &'a mut Superblocks,
    device: &'a dyn Device,
    clock: &'a Clock,
    latest: Option<&'static AtomicU64>,
    no_checkpoint: Option<&'static str>,
    warnings: &'a mut Vec<String>,
}

impl StartIo for Durable<'_> {
    type Error = CacheError;

    fn write_run(&mut self, run: u64) -> Result<(), CacheError> {
        match run::write(self.dir, run, self.this.take(), self.memory_file.map(MemoryFile::name)) {
            Ok(true) => {}
            Ok(false) => {
                self.warnings.push(format!(
                    "{NO_BIRTHS}: a restart of this machine makes the cache cold; the index stays in this machine's memory until \
                     then"
                ));
                self.no_checkpoint = Some(NO_BIRTHS);
            }
            Err(error) => {
                self.warnings.push(format!("{error}: the next start is cold"));
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn forget_run(&mut self) -> Result<(), CacheError> {
        Ok(run::forget(self.dir)?)
    }

    fn write_superblock(&mut self, next: &Superblock) -> Result<(), CacheError> {
        Ok(self.superblocks.write(&mut Head(self.device), next.clone())?)
    }

    fn keep_time(&mut self) {
        if let Some(latest) = self.latest {
            self.clock.keep_in(latest);
        }
    }

    fn remove_checkpoint(&mut self) -> Result<(), CacheError> {
        Ok(remove_checkpoint(self.dir)?)
    }

    fn void_memory_file(&mut self) {
        self.warnings.extend(self.memory_file.and_then(|file| file.void().err()));
    }
}

/// What a stop with flash makes durable.
struct Closing<'a> {
    core: &'a Core,
    disk: Disk<'a>,
    flash: &'a Flash,
    superblocks: &'a mut Superblocks,
    now: Now,
}

impl SegmentIo for Closing<'_> {
    type Buffer = AlignedBuf;
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.disk.write(segment, bytes)
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        self.disk.read(segment, bytes)
    }
}

impl StateIo for Closing<'_> {
    fn keep_names(&mut self, names: &[Vec<u8>]) -> bool {
        self.disk.keep_names(names)
    }
    fn keep_budget(&mut self, state: BudgetState) -> bool {
        self.disk.keep_budget(state)
    }
}

impl StopIo for Closing<'_> {
    fn sync(&mut self) -> Result<(), String> {
        self.flash.device.sync().map_err(|e| e.to_string())
    }

    fn write_checkpoint(&mut self, table: &Words, rest: &AtRest<'_>) -> (Result<(), String>, u64) {
        if let Some(why) = self.flash.no_checkpoint {
            return (Err(why.to_owned()), 0);
        }
        let (dir, geometry) = (&self.flash.dir, &self.flash.geometry);
        let mut writing = Writing { at: self.now.wall, hurry: &self.core.hurry, bytes: 0 };
        let (indexes, apps) = (&rest.indexes, rest.apps);
        let current = self.superblocks.current();
        let written = write_checkpoint(dir, current, geometry, &mut writing, table, indexes, apps);
        (written.map_err(|e| e.to_string()), writing.bytes)
    }

    fn write_superblock(&mut self, stopped: &Superblock) -> Result<(), String> {
        let device = self.flash.device.as_ref();
        self.superblocks.write(&mut Head(device), stopped.clone()).map_err(|e| e.to_string())
    }

    fn release(&mut self) {
        self.flash.region.release();
    }

    fn keep_dram(&mut self, closed: Option<&Closed>) {
        if let Some(closed) = closed {
            self.core.say_closed(closed);
        }
        self.core.save_memory(self.now);
    }
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
    config: &CacheConfig,
    path: &Path,
    device: &dyn Device,
    now: Now,
) -> Result<(Superblocks, bool), CacheError> {
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
                    return Err(CacheError::OtherSize {
                        path: path.to_owned(),
                        formatted: ByteSize(formatted),
                        wanted: ByteSize(wanted),
                    });
                }
                chosen
                    .superblock
                    .check_device(size)
                    .map_err(|source| CacheError::Superblock { path: path.to_owned(), source })?;
                return Ok((Superblocks::found(chosen), false));
            }
            Err(SuperblockError::None) => {}
            Err(e @ SuperblockError::Damaged) => {
                return Err(CacheError::Damaged { path: path.to_owned(), why: e.to_string() });
            }
            Err(source) => return Err(CacheError::Superblock { path: path.to_owned(), source }),
        }
        let mut tail = vec![0; (TAIL_BYTES as u64).min(size) as usize];
        device.read_at(size - tail.len() as u64, &mut tail)?;
        if let Some(found) = Signature::detect(&head).or_else(|| Signature::detect_tail(&tail)) {
            return Err(CacheError::Foreign { path: path.to_owned(), what: found.name.to_owned() });
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
    let (uuid, secret) = (Uuid(random()?), HashKey(random()?));
    let first = Superblock::format(uuid, secret, geometry, now.wall);
    // Both copies are void before the new one is written: an old one must not win after a torn write.
    device.write_at(0, &AlignedBuf::zeroed(2 * PAGE_SIZE))?;
    device.sync()?;
    let mut superblocks = Superblocks::formatted(first.clone());
    superblocks.write(&mut Head(device), first)?;
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
    config: &CacheConfig,
    parts: &Parts,
    names: Vec<Vec<u8>>,
) -> Result<RunSetup, CacheError> {
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
        cas_bits: start::cas_bits(parts.plan.shards),
        seed: parts.cas_base,
        flash: parts.geometry,
        log: parts.log,
    };
    Ok(node::run_setup(&cache, &parts.plan, &start)?)
}

/// The node: its shards attached to what is in their words when `generations` are given, else empty.
fn build_node(
    setup: &RunSetup,
    plan: Plan,
    words: Vec<ShardWords>,
    generations: Option<&[u64]>,
) -> Result<(Node<Threads>, u64, u64), CacheError> {
    let one = |i: usize, words: ShardWords| -> Result<_, CacheError> {
        let (mut shard, report) = setup.shard_in(i, words.index, generations)?;
        shard.keep_flash_bytes(words.apps, generations.is_some());
        larder_runtime::machine::prefer_huge_pages(shard.object_memory_mut());
        Ok((shard, report))
    };
    let (mut kept, mut dropped) = (0, 0);
    let mut shards = Vec::with_capacity(setup.shards.len());
    for built in in_parallel(words, one)? {
        let (shard, report) = built?;
        kept += report.kept;
        dropped += report.dropped;
        shards.push(shard);
    }
    Ok((Node::new(setup, Some(plan), shards)?, kept, dropped))
}

/// What looks on while the store runs.
#[derive(Default)]
struct Watchers {
    recorder: Option<Recorder>,
    capture: Option<Capture>,
}

impl Watchers {
    fn start(
        config: &CacheConfig,
        setup: &RunSetup,
        clock: &Clock,
    ) -> Result<Watchers, CacheError> {
        let capture = match &config.capture {
            None => None,
            Some(capture) => {
                let salt = u64::from_le_bytes(random()?);
                Some(Capture::start(capture, clock.now(), random()?, salt)?)
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
) -> Result<Vec<R>, CacheError> {
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
                .map_err(|source| CacheError::System { what: "start a thread", source })?;
        }
        work();
        Ok::<(), CacheError>(())
    })?;
    let mut done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    done.sort_by_key(|(i, _)| *i);
    Ok(done.into_iter().map(|(_, result)| result).collect())
}

fn store(
    config: &CacheConfig,
    setup: RunSetup,
    plan: Plan,
    node: Node<Threads>,
    maintenance: &mut Maintenance<AlignedBuf>,
    flash: Option<Flash>,
    watchers: Watchers,
) -> Core {
    if let Some(recorder) = &watchers.recorder {
        for shard in 0..node.shards() {
            if let Some(tape) = recorder.tape(shard) {
                node.record(shard, tape);
            }
        }
        let stream = setup.maintenance_stream();
        if let Some(own) = recorder.machine_tape(stream) {
            let log = flash.as_ref().and_then(|_| recorder.tape(node.shards()));
            maintenance.record(log, own);
        }
        if let Some(tape) = recorder.machine_tape(stream + 1) {
            node.record_applications(tape);
        }
    }
    Core {
        node,
        flash,
        notifier: Notifier::default(),
        tell: OnceLock::new(),
        threads: Mutex::default(),
        baseline: Mutex::new(CacheStats::default()),
        setup,
        plan,
        recorder: watchers.recorder,
        capture: watchers.capture,
        memory_file: None,
        hurry: config.hurry.clone(),
        _shared_dir: None,
    }
}

impl Core {
    /// After the last request, of a cache with flash: everything becomes durable, in the engine's order.
    pub(super) fn write_down(
        &self,
        flash: &Flash,
        maintenance: &mut Maintenance<AlignedBuf>,
        now: Now,
    ) {
        let mut superblocks = locked(&flash.superblock);
        let current = superblocks.current().clone();
        let disk = Disk(Some(flash));
        let mut closing = Closing { core: self, disk, flash, superblocks: &mut superblocks, now };
        maintenance.stop(now, &self.node, &current, &mut closing);
    }

    /// Says what the flash has come to.
    fn say_closed(&self, closed: &Closed) {
        let (kept, lost) = (closed.on_flash, closed.in_dram);
        // What becomes of them with a memory file is said when it is known.
        let in_dram = match self.memory_file {
            Some(_) => String::new(),
            None if kept > 0 => format!("; {lost} in DRAM alone are lost"),
            None => format!(": {lost} objects in DRAM are lost"),
        };
        match &closed.checkpoint {
            Ok(()) => {
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
