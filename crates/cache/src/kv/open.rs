//! Opening a store: device, superblock, memory, recovery; and closing it.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use larder_base::lock::Threads;
use larder_base::{ByteSize, HashKey, Nanos, Now, UnixSecs, Words};
use larder_engine::kv::node::start::drives::Member;
use larder_engine::kv::node::start::{
    self, Closed, Drawn, FlashFound, Left, NO_BIRTHS, Shape, StartIo, StopIo, Warmth,
};
use larder_engine::kv::node::{
    self, AdmissionNeed, AtRest, DriveUpkeep, LogStart, Maintenance, Node, Plan, RegionLayout,
    StateIo, defaults,
};
use larder_engine::kv::record::{AppsSetup, RunSetup};
use larder_engine::kv::{ClockMode, FlashGeometry, IoFailed, SegmentIo};
use larder_format::{Superblock, Uuid};
use larder_policy::admission::AdmissionConfig;
use larder_policy::application::ApplicationsConfig;
use larder_policy::budget::{BudgetState, WriteBudgetConfig};
use larder_runtime::{
    AlignedBuf, Clock, DataDir, Device, DeviceError, DeviceOptions, FlashDevice, JoinedDevices,
    Wear,
};

use super::capture::Capture;
use super::cleaner::{APPLICATIONS, BUDGET, Disk, budget_name};
use super::former::{self, Division};
use super::memory_file::{Loaded, MemoryFile};
use super::notifier::Notifier;
use super::own_files::own_file;
use super::record::{RecordConfig, Recorder};
use super::run::{self, FlashOfRun, RunFile};
use super::warm::{Region, ShardWords, Writing, remove_checkpoint, write_checkpoint};
use super::{CacheError, Core, Drive, Flash, locked};
use super::{CacheStats, CaptureConfig};

mod alone;
mod drives;

pub(super) use drives::Medium;
use drives::{AllTaken, Head, Taken};

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
    /// Further drives, each with a log, a write budget and an account of its wear of its own.
    pub further: Vec<FlashFile>,
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

/// A further drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlashFile {
    /// File or device.
    pub path: PathBuf,
    /// Bytes of it; `None` for what is there.
    pub size: Option<u64>,
}

impl CacheConfig {
    /// All files and devices that are flash.
    fn flash_paths(&self) -> impl Iterator<Item = &Path> + Clone {
        self.flash.iter().map(PathBuf::as_path).chain(self.further.iter().map(|f| f.path.as_path()))
    }
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
    let Ready { store, opened, maintenance, further } = ready;
    let store = Arc::new(store);
    tracing::info!("{}", store.memory_divided(clock.now()));
    if let Some(told) = store.largest_for_flash() {
        tracing::info!("{told}");
    }
    store
        .start_threads(clock, maintenance, further)
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
    drives::each_once(config.flash_paths())?;
    if let Some(record) = config.record.as_ref().filter(|_| !config.further.is_empty()) {
        return Err(CacheError::RecordSeveral(record.file.clone()));
    }
    // What cannot be served is not made anew.
    let remake = config.format_flash && config.flash_size.is_some();
    if let Some(size) = config.flash_size.filter(|_| remake && config.further.is_empty()) {
        let geometry = Plan::geometry(config.memory, size, u64::from(config.max_item))?;
        let flash = Some((&geometry, config.flash_object_size));
        Plan::new(config.memory, u64::from(config.max_item), flash, need(config))?;
    }
    let first = FlashFile { path: path.clone(), size: config.flash_size };
    let files: Vec<&FlashFile> = std::iter::once(&first).chain(&config.further).collect();
    let mut open = |file: &FlashFile, remake: bool| {
        let options = DeviceOptions {
            size: file.size.map(ByteSize),
            least: Plan::LEAST_FLASH,
            remake,
            ..DeviceOptions::new(&file.path)
        };
        let device = FlashDevice::open(&options)?;
        if device.was_created() {
            undo.0.push(file.path.clone());
        }
        Ok(device)
    };
    let mut devices = Vec::new();
    for file in &files {
        devices.push(match open(file, false) {
            Ok(device) => Some(device),
            // It is made anew once all the others are known to be right.
            Err(DeviceError::SizeDiffers { .. }) if config.format_flash => None,
            Err(e @ DeviceError::SizeDiffers { .. }) if file.path.is_file() => {
                return Err(CacheError::FileSize(e));
            }
            Err(e) => return Err(e.into()),
        });
    }
    if files.len() > 1 && devices.iter().any(Option::is_none) {
        drives::can_be(config, &files, &devices)?;
    }
    let mut media = Vec::new();
    for (file, device) in files.into_iter().zip(devices) {
        let FlashFile { path, size } = file;
        let device = match device {
            Some(device) => device,
            None => open(file, true).map_err(|e| match e {
                DeviceError::SizeDiffers { .. } if path.is_file() => CacheError::FileSize(e),
                e => e.into(),
            })?,
        };
        let why_buffered = device.why_buffered().map(str::to_owned);
        let drive = Arc::new(device);
        let device: Arc<dyn Device> = drive.clone();
        let (path, size) = (path.clone(), *size);
        media.push(Medium { path, size, device, drive: Some(drive), why_buffered });
    }
    let memory_file = memory_file(config, &mut undo)?;
    let ready = prepare(config, clock, dir, media, memory_file)?;
    undo.0.clear();
    Ok(ready)
}

/// The file for what is in DRAM, if there is to be one.
fn memory_file(config: &CacheConfig, undo: &mut Undo) -> Result<Option<MemoryFile>, CacheError> {
    let Some(path) = &config.memory_file else { return Ok(None) };
    if let Some(what) = own_file(&config.data_dir, config.flash_paths(), path) {
        let why = format!("it {what}, and would be overwritten: name another file with -e");
        return Err(CacheError::MemoryFile { path: path.clone(), why });
    }
    let file = MemoryFile::look(path)?;
    if file.made {
        undo.0.push(path.clone());
    }
    Ok(Some(file))
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
    started(prepare(config, clock, dir, vec![medium], memory_file)?, clock)
}

/// A cache that has no threads yet.
pub(super) struct Ready {
    pub(super) store: Core,
    pub(super) opened: Opened,
    pub(super) maintenance: Maintenance<AlignedBuf>,
    pub(super) further: Vec<DriveUpkeep<AlignedBuf>>,
}

/// Opens a store on these media.
pub(super) fn prepare(
    config: &CacheConfig,
    clock: &Arc<Clock>,
    dir: DataDir,
    media: Vec<Medium>,
    mut memory_file: Option<MemoryFile>,
) -> Result<Ready, CacheError> {
    let began = clock.now();
    let AllTaken { mut drives, flash: geometry, mut notes, mut warnings } =
        drives::take(config, media, clock.now())?;
    let members = drives.iter().map(|t| Member { superblock: t.says.clone(), fresh: t.fresh });
    let members: Vec<Member> = members.collect();
    let last = run::last(&dir);
    let lead = start::drives::lead(&members, last.as_ref().ok().map(|last| last.run));
    let (superblock, formatted) = (members[lead].superblock.clone(), members[lead].fresh);
    let path = &drives[lead].medium.path.clone();
    let left_flash = last.as_ref().ok().and_then(|last| last.flash.as_ref());
    let left_flash = left_flash.map(|flash| flash.uuid.clone());
    let left_flash = left_flash.filter(|uuid| *uuid != superblock.uuid.to_string());
    let last = last.and_then(|last| last.note().check_flash(&superblock).map(|()| last));
    warnings.extend(absent(last.as_ref().ok(), &drives));
    let divided = former::division(config, path, &superblock, geometry, last.as_ref().ok(), &dir)?;
    let (plan, kept_from) = match divided {
        Division::New(plan) => (plan, None),
        Division::Kept { plan, from, said } => {
            notes.extend(said);
            (plan, Some(from))
        }
    };

    let saved = |name: &str| std::fs::read(dir.join(name)).ok();
    let state_of = |taken: &Taken| -> Option<BudgetState> {
        if taken.fresh {
            return None;
        }
        // What it spent when it was alone is its own still.
        let was_alone = taken.superblocks.current().part.is_none();
        let own = saved(&budget_name(taken.says.part.as_ref()));
        let kept = own.or_else(|| saved(BUDGET).filter(|_| was_alone))?;
        serde_json::from_slice(&kept).ok()
    };
    drives.sort_by_key(|taken| taken.place);
    let states: Vec<Option<BudgetState>> = drives.iter().map(state_of).collect();
    let budget_state = states.first().copied().flatten();
    let budget_at = clock.now().mono;
    // Each drive has a budget of its own.
    let mut budget_rate = Some(0.0);
    for (taken, state) in drives.iter().zip(&states) {
        let capacity = ByteSize(taken.says.geometry.capacity());
        let rate = node::budget_rate(&config.budget, capacity, *state, budget_at)?;
        budget_rate = budget_rate.zip(rate).map(|(a, b): (f64, f64)| a + b);
    }
    let names: Vec<Vec<u8>> =
        saved(APPLICATIONS).and_then(|b| serde_json::from_slice(&b).ok()).unwrap_or_default();

    let layout = RegionLayout { flash: geometry, shards: plan.shards, buckets: plan.buckets };
    let mut region = Region::open(&superblock, &plan, &layout, path, &config.data_dir);
    let shape = Shape::new(&superblock, &layout);
    let drawn = Drawn { began: began.wall, cas: random_run()?, run: random_run()? };
    let begun = {
        let known = last.as_ref().map(|last| last.note().last_run()).map_err(Clone::clone);
        let left = Left::new(&superblock, formatted, known.as_ref().map_err(Clone::clone));
        let left = members.iter().fold(left, |left, other| left.beside(&other.superblock));
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
    let mut tables = Vec::with_capacity(table_words.len());
    for (place, words) in table_words {
        let Some(taken) = drives.iter().find(|taken| taken.place == place) else { continue };
        let kept = !taken.fresh && (drives.len() == 1 || begun.agrees(taken.superblocks.current()));
        if begun.is_warm() && !kept && !taken.fresh {
            warnings.push(format!(
                "flash '{}' is not as the last run left it: it begins empty, the others go on",
                taken.medium.path.display()
            ));
        }
        tables.push((place, begun.table_of(words, kept)));
    }
    let generations = begun.generations(&geometry, &tables);
    let parts = Parts {
        plan,
        uuid: superblock.uuid,
        hash_key: superblock.hash_key,
        geometry,
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
    let others = drives.iter().filter(|taken| taken.medium.path != *path);
    this.further = others.map(|taken| taken.medium.path.display().to_string()).collect();
    let mut durable = Durable {
        dir: &dir,
        this: Some(this),
        memory_file: memory_file.as_ref(),
        drives: &mut drives,
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
    let mut logs = Vec::with_capacity(tables.len());
    for ((place, table), state) in tables.into_iter().zip(states) {
        let buffers = (0..3).map(|_| AlignedBuf::zeroed(geometry.segment_bytes as usize)).collect();
        logs.extend(setup.log_of(place, table, state, buffers)?);
    }
    let mut logs = logs.into_iter();
    let mut maintenance = Maintenance::new(&node, logs.next(), cas_base, names_known);
    let further: Vec<_> = logs.map(|log| DriveUpkeep::new(&node, log)).collect();
    let why_buffered = drives.iter_mut().find_map(|taken| taken.medium.why_buffered.take());
    let formatted = drives.iter().all(|taken| taken.fresh);
    let drives: Vec<Drive> = drives.into_iter().map(Drive::of).collect();
    let device: Arc<dyn Device> = match &drives[..] {
        [one] if geometry.drives.is_one() => one.device.clone(),
        all => {
            let mut places = vec![None; geometry.places()];
            all.iter().for_each(|drive| places[drive.place] = Some(drive.device.clone()));
            Arc::new(JoinedDevices::new(places))
        }
    };
    let flash = Flash {
        admission: config.admission.policy.as_str().to_owned(),
        device,
        drives,
        flash: geometry,
        run: begun.superblock().run,
        dir,
        region,
        no_checkpoint,
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
    Ok(Ready { store, opened, maintenance, further })
}

impl Drive {
    fn of(taken: Taken) -> Drive {
        let Taken { place, medium, superblocks, says, .. } = taken;
        let Medium { path, device, drive, .. } = medium;
        Drive {
            place,
            path: path.display().to_string(),
            budget: budget_name(says.part.as_ref()),
            device,
            geometry: superblocks.current().geometry,
            superblock: Mutex::new(superblocks),
            read_errors: Default::default(),
            wear: Mutex::new(drive.as_deref().and_then(Wear::of)),
            drive,
        }
    }
}

/// Drives of the last run that are not here.
fn absent(last: Option<&RunFile>, drives: &[Taken]) -> Option<String> {
    let last = last?.flash.as_ref()?;
    let here =
        |path: &String| drives.iter().any(|taken| taken.medium.path.as_os_str() == path.as_str());
    let all = std::iter::once(&last.path).chain(&last.further);
    let gone: Vec<_> = all.filter(|path| !here(path)).map(String::as_str).collect();
    // One that is known may be here by another name.
    let known = drives.iter().filter(|taken| !taken.fresh).count();
    if gone.is_empty() || last.further.is_empty() || known > last.further.len() {
        return None;
    }
    Some(format!(
        "flash '{}' took part in the last run, and is not named now: what is there is forgotten, the others go on",
        gone.join("', '")
    ))
}

/// What a start with flash makes durable.
struct Durable<'a> {
    dir: &'a DataDir,
    this: Option<FlashOfRun>,
    memory_file: Option<&'a MemoryFile>,
    drives: &'a mut [Taken],
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
        let leads = |taken: &Taken| match (taken.says.part, next.part) {
            (Some(mine), Some(lead)) => mine.drive == lead.drive,
            _ => true,
        };
        for taken in self.drives.iter_mut().filter(|taken| leads(taken)) {
            taken.superblocks.write(&mut Head(taken.medium.device.as_ref()), next.clone())?;
        }
        // One that does not take it serves all the same, and is not believed by the next start.
        for taken in self.drives.iter_mut().filter(|taken| !leads(taken)) {
            let says = taken.says.following(next);
            let head = &mut Head(taken.medium.device.as_ref());
            if let Err(error) = taken.superblocks.write(head, says) {
                let path = taken.medium.path.display();
                self.warnings.push(format!(
                    "flash '{path}' cannot be written ({error}): what is on it now will be forgotten at the next start, the others go on"
                ));
            }
        }
        Ok(())
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
    fn sync(&mut self, drive: usize) -> Result<(), String> {
        let drive = self.flash.drive(drive).ok_or("there is no such drive")?;
        drive.device.sync().map_err(|e| e.to_string())
    }

    fn write_checkpoint(
        &mut self,
        tables: &[(usize, &Words)],
        rest: &AtRest<'_>,
    ) -> (Result<(), String>, u64) {
        let flash = self.flash;
        if let Some(why) = flash.no_checkpoint {
            return (Err(why.to_owned()), 0);
        }
        let of_run = |place: &usize| {
            let current = locked(&flash.drive(*place)?.superblock).current().clone();
            (current.run == flash.run).then_some(current)
        };
        let Some(current) = tables.iter().find_map(|(place, _)| of_run(place)) else {
            return (Err("no drive says that it is of this run".to_owned()), 0);
        };
        let mut writing = Writing { at: self.now.wall, hurry: &self.core.hurry, bytes: 0 };
        let (indexes, apps) = (&rest.indexes, rest.apps);
        let written = write_checkpoint(
            &flash.dir,
            &current,
            &flash.flash,
            &mut writing,
            tables,
            indexes,
            apps,
        );
        (written.map_err(|e| e.to_string()), writing.bytes)
    }

    fn write_superblock(&mut self, drive: usize) -> Result<(), String> {
        let drive = self.flash.drive(drive).ok_or("there is no such drive")?;
        let mut superblocks = locked(&drive.superblock);
        let current = superblocks.current();
        if current.run != self.flash.run {
            return Err("it does not say that it is of this run".to_owned());
        }
        let stopped = current.stop(current.cas_base);
        superblocks.write(&mut Head(drive.device.as_ref()), stopped).map_err(|e| e.to_string())
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
        if !setup.flash().drives.is_one() {
            shard.forget_share(report.kept, report.dropped);
        }
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
        mut further: Vec<DriveUpkeep<AlignedBuf>>,
        now: Now,
    ) {
        // What further drives hold bears numbers of applications, which are known on disk before.
        maintenance.keep_ahead(now, &self.node, 0, &mut Disk::first(Some(flash)));
        for upkeep in &mut further {
            let mut disk = Disk(Some((flash, upkeep.drive())));
            upkeep.drain(now, &self.node, &mut disk);
        }
        let mut closing = Closing { core: self, disk: Disk::first(Some(flash)), flash, now };
        maintenance.stop(now, &self.node, &further, &mut closing);
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
