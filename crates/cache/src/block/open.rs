//! Formatting a cache device, and opening it. What survives is decided in the engine ([`start`]):
//!
//! | what was | how the map is found |
//! | --- | --- |
//! | `kill -9` | in shared memory, exactly as far as the stores had come |
//! | a clean stop | from snapshot and log |
//! | a power cut, a reboot | from snapshot and log, without the regions whose bit is set in the write-intent map |
//! | a cache that was given up | not at all |
//!
//! A volume's lines are used only if its backing store is known to be as the cache left it: `larder_volume::identity` says
//! what proves that. A store that cannot tell starts cold, unless the operator vouches for it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, OnceLock, RwLock};
use std::time::Instant;

use larder_base::{ByteSize, Nanos, Rng, UnixSecs};
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Making, Map, Replacement, Shape};
use larder_engine::block::node;
use larder_engine::block::node::defaults::{self, SizeError};
use larder_engine::block::node::quiet::QUIET;
use larder_engine::block::node::setup;
pub use larder_engine::block::node::start::Warmth;
use larder_engine::block::node::start::places::{Comer, Decided, NoPlace};
use larder_engine::block::node::start::{self, Left, Refused, Setup, Started, Without};
use larder_engine::block::volumes::CannotCome;
use larder_engine::block::{Fault, WriteMode};
use larder_format::block::superblock::{self, COPY_BYTES, MAX_NAME, WriteLogArea};
use larder_format::block::{
    BlockSuperblock, BlockSuperblockError, Layout, LayoutError, Placement, Volume as VolumeRecord,
};
use larder_format::{PAGE_SIZE, Signature, Uuid};
use larder_policy::block::{BlockAdmissionConfig, BlockAdmissionError, EvictionBy, VictimPolicy};
use larder_runtime::record::RecordConfig;
use larder_runtime::{
    Device, DeviceError, DeviceOptions, FileHandle, FileQueue, FlashDevice, Geometry, RingChoice,
};

use super::aside::Aside;
use super::back::{self, BackConfig, JournalAt, MarkerAt, NoJournal, offline};
use super::budget::{BudgetFile, Purse};
use super::changing::Changing;
use super::hand::{ByHand, Hand};
use super::log::{CacheIo, LogThread};
use super::node_limits::{NodeLimits, RulesConfig};
use super::notes::{AtStart, Voided};
use super::operators::Operators;
use super::record::{self, Recording};
use super::region::Region;
use super::shard::LockedShard;
use super::state_dir::StateDir;
use super::{Attached, Core, Running, Time, census, locked, tables};
use crate::block::volume::Volume;
use larder_volume::identity::IDENTITY_BYTES;

/// Depth of the queue for fills, and its threads where io_uring cannot be had.
const FILL_DEPTH: u32 = 256;
const FILL_THREADS: u32 = 4;

/// How a device is to be formatted.
#[derive(Clone, Debug)]
pub struct FormatConfig {
    /// File or device.
    pub path: PathBuf,
    /// Its size; needed for a file that is not there, and of a sparse cache the bytes of lines that it may hold.
    pub size: Option<ByteSize>,
    /// Bytes of a line.
    pub line: u32,
    /// Where a line may lie.
    pub placement: Placement,
    /// Shards.
    pub shards: u32,
    /// Bytes of the write log, for volumes that write back; none: there is none.
    pub write_log: Option<ByteSize>,
    /// Whatever is on it may go,
    pub yes: bool,
    /// and that, too, which a cache there holds and no store has.
    pub discard_dirty: bool,
}

/// How a cache is to work.
#[derive(Clone, Debug)]
pub struct CacheConfig {
    /// What writes do to it.
    pub write: WriteMode,
    /// Which line goes.
    pub replacement: Replacement,
    /// Which segment of a log is reclaimed ([`Placement::Full`]).
    pub reclaim: VictimPolicy,
    /// Who makes room in a log.
    pub evict: EvictionBy,
    /// What is admitted.
    pub admission: BlockAdmissionConfig,
    /// Bytes that may be on their way to flash behind replies, over all shards; beyond, lines are not cached.
    pub fill_memory: ByteSize,
    /// How far is read ahead of clients that read in sequence; 0: not at all.
    pub readahead: ByteSize,
    /// Workers that will use it.
    pub workers: usize,
    /// Beside them, queues that a program's threads may have at a time.
    pub queues: usize,
    /// Rings.
    pub ring: RingChoice,
    /// Volumes whose stores cannot tell whether they changed are taken as unchanged.
    pub trust_unchanged: bool,
    /// Where it is noted that a cache was given up, what is selected, and what the write budget must remember.
    pub state_dir: PathBuf,
    /// Writes down what is decided.
    pub record: Option<RecordConfig>,
    /// What has the last word over admission.
    pub rules: RulesConfig,
    /// Volumes that write back, by name.
    pub back: BTreeMap<String, BackConfig>,
    /// How volumes write back that come later, and are not among those.
    pub back_by_default: Option<BackConfig>,
    /// Where the marker of a volume is, of any that is not beside its store.
    pub markers: BTreeMap<String, MarkerAt>,
    /// Volumes whose stores are those that they were, though they are known by other names, or are copies: the operator says so.
    pub moved: BTreeSet<String>,
    /// Where the journal of a volume is, of any that is not beside its store.
    pub journals: BTreeMap<String, JournalAt>,
    /// Volumes that come later, when their stores are there: what is dirty of them is kept until then.
    pub awaited: BTreeSet<String>,
}

impl CacheConfig {
    /// What is served where nobody says otherwise, with `state_dir` for notes.
    pub fn new(state_dir: PathBuf) -> CacheConfig {
        CacheConfig {
            write: defaults::WRITE,
            replacement: defaults::REPLACEMENT,
            reclaim: defaults::RECLAIM,
            evict: defaults::evict(),
            admission: BlockAdmissionConfig::default(),
            fill_memory: defaults::FILL_MEMORY,
            readahead: defaults::READAHEAD,
            workers: defaults::WORKERS,
            queues: 0,
            ring: RingChoice::Auto,
            trust_unchanged: false,
            state_dir,
            record: None,
            rules: RulesConfig::default(),
            back: BTreeMap::new(),
            back_by_default: None,
            markers: BTreeMap::new(),
            moved: BTreeSet::new(),
            journals: BTreeMap::new(),
            awaited: BTreeSet::new(),
        }
    }

    /// Who goes when room is needed.
    pub(super) fn making(&self) -> Making {
        let CacheConfig { replacement, reclaim, evict, .. } = *self;
        Making { replacement, reclaim, evict }
    }
}

/// Why a cache cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The device refuses.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// It cannot be one.
    #[error(
        "'{path}' is no block cache: {reason}; name the file or device that `larder block format` made"
    )]
    NotACache {
        /// What was named.
        path: String,
        /// Why not.
        reason: String,
    },
    /// No cache is on it, or none that can be used.
    #[error("cache '{path}': {source}")]
    Superblock {
        /// The device.
        path: String,
        /// What is wrong.
        source: BlockSuperblockError,
    },
    /// It cannot be laid out.
    #[error("cache '{path}': {source}")]
    Layout {
        /// The device.
        path: String,
        /// What is wrong.
        source: LayoutError,
    },
    /// Something is there.
    #[error(
        "'{path}' holds {what}: formatting would destroy it, and it is not said that this is meant"
    )]
    Occupied {
        /// The device.
        path: String,
        /// What was recognised.
        what: String,
    },
    /// A cache is there that holds what no store has.
    #[error(
        "'{path}' holds a Larder block cache with writes that no store has ({volumes}): formatting would give them up for good. Serve them until they are in their \
         stores, or discard them"
    )]
    Dirty {
        /// The device.
        path: String,
        /// The volumes, and how much of each.
        volumes: String,
    },
    /// A volume that does not fit what is known of it.
    #[error("volume '{name}': {reason}")]
    Volume {
        /// Its name.
        name: String,
        /// What is wrong, and what to do.
        reason: String,
    },
    /// A volume for which something does not answer, or is not to be had now: it may go another time.
    #[error("volume '{name}': {reason}")]
    NotYet {
        /// Its name.
        name: String,
        /// What does not answer, and what to do.
        reason: String,
    },
    /// A volume that is journaled, and has no journal.
    #[error("volume '{name}': {why}")]
    Journal {
        /// Its name.
        name: String,
        /// Why it has none, and what to do.
        why: NoJournal,
    },
    /// A volume that is to write back, to a store that nobody can ask to make durable what it has answered.
    #[error(
        "volume '{name}': it is to write back, and its store '{store}' offers no flush: what it has answered may be lost after the cache has let go \
         of it; have its server offer FLUSH, or vouch that what it has answered is durable"
    )]
    CannotFlush {
        /// Its name.
        name: String,
        /// Its store.
        store: String,
    },
    /// Admission cannot be had.
    #[error("admission: {0}")]
    Admission(#[from] BlockAdmissionError),
    /// A sparse cache is a file that may have holes.
    #[error(
        "'{path}' cannot be a sparse cache: {reason}; choose another placement, or a file on ext4, XFS, btrfs or tmpfs"
    )]
    NotSparse {
        /// The device.
        path: String,
        /// Why not.
        reason: String,
    },
    /// It cannot be recorded.
    #[error("record '{path}': {reason}")]
    Record {
        /// The file.
        path: String,
        /// Why not.
        reason: String,
    },
    /// A record begins with an empty cache, and this one is not.
    #[error(
        "cache '{path}' is not empty, and a record begins with an empty cache: format it, or record nothing"
    )]
    NotEmpty {
        /// The device.
        path: String,
    },
    /// The write budget cannot be had.
    #[error(transparent)]
    Budget(#[from] larder_policy::budget::BudgetError),
    /// The system refuses something else.
    #[error("{what}: {reason}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// Why not.
        reason: String,
    },
}

impl CacheError {
    /// It may go another time without anything being changed: what does not answer may answer then.
    pub fn may_pass(&self) -> bool {
        match self {
            CacheError::NotYet { .. } | CacheError::Device(_) | CacheError::System { .. } => true,
            CacheError::Journal { why: NoJournal::Place(error), .. } => error.may_pass(),
            _ => false,
        }
    }

    /// Whether there is no cache to be had at all: nothing there, or nothing that is one or can be read. Another process's is
    /// one, and so is one of another format.
    pub fn is_of_no_cache(&self) -> bool {
        match self {
            CacheError::NotACache { .. } => true,
            CacheError::Device(error) => {
                matches!(error, DeviceError::Open { .. } | DeviceError::Io { .. })
            }
            CacheError::Superblock { source, .. } => matches!(
                source,
                BlockSuperblockError::Damaged | BlockSuperblockError::Shrunk { .. }
            ),
            _ => false,
        }
    }
}

/// A cache that may be there holds nothing that no store has.
fn none_dirty(path: &Path) -> Result<(), CacheError> {
    // (What cannot be opened, or is no cache, is told by what comes next.)
    let Ok(device) = FlashDevice::open(&DeviceOptions::new(path)) else { return Ok(()) };
    let sb = match read_superblock(&device) {
        Ok(sb) => sb,
        Err(CacheError::Superblock {
            source:
                why @ (BlockSuperblockError::FormerWriteLog
                | BlockSuperblockError::Dirty
                | BlockSuperblockError::Feature { .. }),
            ..
        }) => {
            let volumes = format!("none can be seen: {why}");
            return Err(CacheError::Dirty { path: path.display().to_string(), volumes });
        }
        Err(_) => return Ok(()),
    };
    let Some(report) = offline::look(&device, &sb, &mut |_, _| true) else { return Ok(()) };
    if report.volumes.is_empty() {
        return Ok(());
    }
    let each = |v: &offline::DirtyVolume| match (v.bytes, v.gap) {
        (bytes, true) => format!("volume '{}': {} and more", v.name, ByteSize(bytes)),
        (0, false) => format!(
            "volume '{}': none that can be seen, and its store is not known to be whole",
            v.name
        ),
        (bytes, false) => format!("volume '{}': {}", v.name, ByteSize(bytes)),
    };
    let volumes: Vec<String> = report.volumes.iter().map(each).collect();
    Err(CacheError::Dirty { path: path.display().to_string(), volumes: volumes.join(", ") })
}

/// Formats a device. Nothing is written if it cannot be done.
///
/// # Errors
/// [`CacheError`]; in particular [`CacheError::Occupied`] for a device that holds something, without `yes`, and [`CacheError::Dirty`] for one that
/// holds what no store has, without `discard_dirty`.
pub fn format(config: &FormatConfig, seed: [u8; 32], now: UnixSecs) -> Result<Layout, CacheError> {
    let path = config.path.display().to_string();
    let mut options = DeviceOptions::new(&config.path);
    if let Some(size) = config.size {
        options = options.size(size);
    }
    if !config.discard_dirty
        && std::fs::metadata(&config.path).is_ok_and(|m| !m.is_file() || m.len() > 0)
    {
        none_dirty(&config.path)?;
    }
    if !config.yes && std::fs::metadata(&config.path).is_ok() {
        let device = FlashDevice::open(&DeviceOptions::new(&config.path))?;
        if let Some(what) = occupied(&device)? {
            return Err(CacheError::Occupied { path, what });
        }
    }
    let log = config.write_log.map_or(0, |bytes| bytes.0);
    if let Placement::Sparse(_) = config.placement {
        // The file is made anew: what it was is asked before.
        let former = std::fs::metadata(&config.path).ok().filter(|f| f.is_file());
        let former = former.and_then(|_| FlashDevice::open(&DeviceOptions::new(&config.path)).ok());
        let former = former.and_then(|device| read_superblock(&device).ok());
        let layout = tables::make_file(config)?;
        former.iter().for_each(Region::forget);
        let device = FlashDevice::open(&options.size(ByteSize(layout.device)))?;
        let area = log_area(&device, &layout, log)?;
        return write_head(&device, layout, area, seed, now);
    }
    // The write log has the end of the device, behind what is laid out.
    let of = |size: u64| {
        let rest = match log {
            0 => size,
            log => size.saturating_sub(log) >> 20 << 20,
        };
        Layout::of(rest, config.line, config.placement, config.shards)
            .map_err(|source| CacheError::Layout { path: path.clone(), source })
    };
    // What cannot be laid out leaves no file behind.
    if let Some(size) = config.size {
        let layout = of(size.0)?;
        if log > 0 {
            WriteLogArea::of(layout.device, log, 512).map_err(|e| no_log(&path, &e))?;
        }
    }
    let device = FlashDevice::open(&options)?;
    let layout = of(device.geometry().size)?;
    let area = log_area(&device, &layout, log)?;
    write_head(&device, layout, area, seed, now)
}

fn no_log(path: &str, error: &impl std::fmt::Display) -> CacheError {
    let reason = format!("'{path}': {error}");
    CacheError::System { what: "the write log", reason }
}

/// Where the write log of so many bytes goes, if there is to be one.
fn log_area(
    device: &FlashDevice,
    layout: &Layout,
    bytes: u64,
) -> Result<Option<WriteLogArea>, CacheError> {
    if bytes == 0 {
        return Ok(None);
    }
    let Geometry { size, block } = device.geometry();
    let sector = if block <= 512 { 512 } else { 4096 };
    let name = device.name();
    let area = WriteLogArea::of(layout.device, bytes, sector).map_err(|e| no_log(name, &e))?;
    if area.end() > size {
        let reason = format!("it would end at byte {}, and the device has {size}", area.end());
        return Err(no_log(name, &reason));
    }
    Ok(Some(area))
}

/// Makes a device with this layout an empty cache.
fn write_head(
    device: &FlashDevice,
    layout: Layout,
    area: Option<WriteLogArea>,
    seed: [u8; 32],
    now: UnixSecs,
) -> Result<Layout, CacheError> {
    if let Ok(former) = read_superblock(device) {
        Region::forget(&former);
    }
    // The map has its room from now on: on a file system that fills up, lines do not fit, and the cache goes on. (The table
    // of a sparse one lies in holes, and has none for what was never cached.)
    if !layout.is_sparse()
        && let Err(error) = device.allocate(layout.data)
    {
        if device.was_created() {
            // It is empty; that there is no room is said all the same.
            let _ = std::fs::remove_file(device.name().as_ref());
        }
        return Err(error.into());
    }
    let mut rng = Rng::new(u64::from_le_bytes(seed[16..24].try_into().expect("8 bytes")));
    let uuid = Uuid(seed[..16].try_into().expect("16 bytes"));
    // First no superblock, then an empty write-intent map, then the superblock: a format that is cut short leaves none.
    let zeros = vec![0u8; 1 << 20];
    let head = layout.intents_at() + layout.intent_pages() * PAGE_SIZE as u64;
    fill_zeros(device, 0..head, &zeros)?;
    device.sync()?;
    // The log is written once: on room that was only set aside each flush of it would be one of the file system's journal too.
    if let Some(area) = &area
        && let Err(error) = fill_zeros(device, area.at..area.end(), &zeros)
    {
        if device.was_created() {
            // There is no room for it, and no superblock: nothing is left behind.
            let _ = std::fs::remove_file(device.name().as_ref());
        }
        return Err(error.into());
    }
    let generation = rng.next_u64() >> 16;
    let mut sb = BlockSuperblock::format(uuid, rng.next_u64(), generation, layout, now);
    if let Some(area) = area {
        sb.set_write_log(area);
    }
    device.write_at((sb.copy() * COPY_BYTES) as u64, &sb.encode())?;
    device.sync()?;
    Ok(layout)
}

fn fill_zeros(device: &FlashDevice, of: Range<u64>, zeros: &[u8]) -> Result<(), DeviceError> {
    let mut at = of.start;
    while at < of.end {
        let n = (of.end - at).min(zeros.len() as u64) as usize;
        device.write_at(at, &zeros[..n])?;
        at += n as u64;
    }
    Ok(())
}

/// Bytes of DRAM that the map of a device of this layout takes at most, but for what replacement policies add.
pub fn map_memory(layout: &Layout) -> u64 {
    let (entries, rest) = Map::words(Shape::of(layout));
    ((entries + rest) * 8) as u64 * u64::from(layout.shards)
}

/// The same at most, with what replacement policies and segments add: for the lines, and beside them.
pub fn most_map_memory(layout: &Layout) -> (u64, u64) {
    let (lines, rest) = Map::most_bytes(Shape::of(layout));
    (lines * u64::from(layout.shards), rest * u64::from(layout.shards))
}

/// What is on a device, if anything is.
fn occupied(device: &FlashDevice) -> Result<Option<String>, CacheError> {
    let size = device.geometry().size;
    let mut head = vec![0u8; (128 << 10).min(size as usize)];
    device.read_at(0, &mut head)?;
    if head.starts_with(&superblock::MAGIC)
        || head.get(COPY_BYTES..).is_some_and(|h| h.starts_with(&superblock::MAGIC))
    {
        return Ok(Some("a Larder block cache".into()));
    }
    if let Some(found) = Signature::detect(&head) {
        return Ok(Some(found.to_string()));
    }
    let mut tail = vec![0u8; (64 << 10).min(size as usize)];
    let from = (size - tail.len() as u64) / 512 * 512;
    let take = (size - from) as usize;
    tail.truncate(take);
    device.read_at(from, &mut tail)?;
    if let Some(found) = Signature::detect_tail(&tail) {
        return Ok(Some(found.to_string()));
    }
    // What has no signature may begin anywhere: the first megabytes whole, and places all over the rest.
    let step = PAGE_SIZE as u64;
    let dense = (0..DENSE_LOOKS).map(|n| n * LOOK_BYTES);
    let spread = (1..SPREAD_LOOKS).map(|n| size / SPREAD_LOOKS * n / step * step);
    let mut look = vec![0u8; LOOK_BYTES as usize];
    for at in dense.chain(spread).filter(|at| at + LOOK_BYTES <= size) {
        device.read_at(at, &mut look)?;
        if let Some(nonzero) = look.iter().position(|&b| b != 0) {
            return Ok(Some(format!("unknown data (not zero) at byte {}", at + nonzero as u64)));
        }
    }
    Ok(None)
}

/// Bytes that [`occupied`] reads at a time.
const LOOK_BYTES: u64 = 128 << 10;
/// Looks at the beginning, without gaps: 8 MiB.
const DENSE_LOOKS: u64 = 64;
/// Looks over all of the device, 32 MiB in all.
const SPREAD_LOOKS: u64 = 256;

/// The layout of the cache on the device at `path`.
///
/// # Errors
/// [`CacheError`] when there is none that can be used.
pub fn layout_of(path: &Path) -> Result<Layout, CacheError> {
    Ok(read_superblock(&open_device(&DeviceOptions::new(path))?)?.layout)
}

/// Where the write log of the cache at `path` lies, if it has one.
///
/// # Errors
/// As [`layout_of`].
pub fn write_log_of(path: &Path) -> Result<Option<WriteLogArea>, CacheError> {
    Ok(read_superblock(&open_device(&DeviceOptions::new(path))?)?.write_log)
}

/// Opens what must have been formatted.
pub(super) fn open_device(options: &DeviceOptions) -> Result<FlashDevice, CacheError> {
    let no_cache = |device: &str, reason: String| {
        Err(CacheError::NotACache { path: device.to_owned(), reason })
    };
    match FlashDevice::open(options) {
        Err(DeviceError::TooSmall { device, size, .. }) => {
            no_cache(&device, format!("it has only {size} bytes"))
        }
        Err(DeviceError::SizeMissing { device }) => {
            let reason = match Path::new(&*device).exists() {
                true => "it is empty",
                false => "there is no such file",
            };
            no_cache(&device, reason.to_owned())
        }
        opened => Ok(opened?),
    }
}

/// The superblock that rules `device`.
pub(super) fn read_superblock(device: &FlashDevice) -> Result<BlockSuperblock, CacheError> {
    let path = device.name().to_string();
    let size = device.geometry().size;
    let mut copies = vec![0u8; 2 * COPY_BYTES];
    if size < copies.len() as u64 {
        return Err(not_a_cache(path));
    }
    device.read_at(0, &mut copies)?;
    let (a, b) = copies.split_at(COPY_BYTES);
    let sb = superblock::choose(a, b).and_then(|sb| sb.check_device(size).map(|()| sb));
    sb.map_err(|source| match source {
        BlockSuperblockError::None => not_a_cache(path),
        source => CacheError::Superblock { path, source },
    })
}

/// What was never formatted may hold somebody's data: nobody is told to format it.
fn not_a_cache(path: String) -> CacheError {
    CacheError::NotACache { path, reason: "it has no superblock of one".to_owned() }
}

impl Attached {
    /// What tells later whether the store changed: zeros if that cannot be found out.
    pub(super) fn identity(&self) -> [u8; 64] {
        self.volume.backing().identity().map_or([0; IDENTITY_BYTES], |i| i.encode())
    }
}

/// Opens a cache device with its volumes, and starts its log's thread.
///
/// # Errors
/// [`CacheError`]: nothing is changed on the device then, unless it is the device that fails or the system that gives no thread, and no volume either.
pub fn open(
    path: &Path,
    config: CacheConfig,
    volumes: &[Arc<Volume>],
) -> Result<Running, CacheError> {
    open_as(path, config, volumes, None)
}

/// The same without threads: whoever has what it returns calls [`Running::turn`], and the cache has one worker, whose requests go through
/// [`Core::with_lane`]. All I/O is done on the calling thread.
///
/// # Errors
/// As [`open`].
pub fn open_by_hand(
    path: &Path,
    mut config: CacheConfig,
    volumes: &[Arc<Volume>],
    by: ByHand,
) -> Result<Running, CacheError> {
    (config.workers, config.queues, config.ring) = (1, 0, RingChoice::Caller);
    open_as(path, config, volumes, Some(by))
}

fn open_as(
    path: &Path,
    config: CacheConfig,
    volumes: &[Arc<Volume>],
    by_hand: Option<ByHand>,
) -> Result<Running, CacheError> {
    let wrong =
        |what, size, e: SizeError| CacheError::System { what, reason: format!("{size}: {e}") };
    defaults::check_fill_memory(config.fill_memory)
        .map_err(|e| wrong("memory for fills", config.fill_memory, e))?;
    defaults::check_readahead(config.readahead)
        .map_err(|e| wrong("read-ahead", config.readahead, e))?;
    let device = open_device(&DeviceOptions::new(path))?;
    if let Some(why) = device.why_buffered() {
        tracing::info!("the cache device is used through the page cache: {why}");
    }
    let sb = read_superblock(&device)?;
    // One that was formatted by an earlier version has room for its map from now on.
    if !sb.layout.is_sparse()
        && let Err(error) = device.allocate(sb.layout.data)
    {
        tracing::warn!("the map of the cache has not all of its room: {error}");
    }
    // A start that is refused changes nothing.
    back::check(&config, path, volumes, &sb)?;
    let voided = Voided::find(&config.state_dir, &sb, path);
    let comers = volumes.iter().map(|spec| comer(spec, config.trust_unchanged));
    let comers = comers.collect::<Result<Vec<_>, _>>()?;
    let (region, words, why_private) = Region::open(&sb, path, &config.state_dir)?;
    if let Some(why) = why_private {
        tracing::warn!("the map does not outlive the process: {why}");
    }
    let budget = BudgetFile::new(&config, &sb);
    let node_limits = NodeLimits::new(&config, &sb, path.to_owned(), &budget)?;
    let setup = Setup {
        shape: Shape::of(&sb.layout),
        making: config.making(),
        config: setup::shard_config(config.write, config.fill_memory, &sb.layout),
        idle: QUIET,
        empty: config.record.is_some(),
        random: match by_hand {
            Some(ByHand::Given { random, .. }) => random,
            _ => random()?,
        },
        fault: Fault::default(),
    };
    let purse = Purse { limits: &node_limits.limits, file: &budget };
    let io = &mut CacheIo::of(&device, purse, Nanos::ZERO);
    let mut notes = AtStart { dir: &config.state_dir, superblock: &sb, voided: &voided };
    let mut memory = locked(&region.memory);
    let left = Left { superblock: sb.clone(), voided: voided.why(), memory: &mut memory, words };
    let judged = left.judge(&comers, &setup, io);
    drop(memory);
    let judged = judged.map_err(|why| refused(why, &device, &config))?;
    let records: Vec<_> = judged.places().volumes().cloned().collect();
    let superblock = judged.superblock();
    let needed = Needed::new(&config, &device, superblock, (volumes, &records), &node_limits)?;
    let ready = judged.stores_durable(|record| match needed.attached.get(&record.name) {
        Some(volume) => volume.make_durable(),
        None => Ok(()),
    })?;
    let started = ready.take_over(&mut locked(&region.memory), io, &mut notes);
    let started = started.map_err(|why| refused(why, &device, &config))?;
    let places = match &started {
        Started::With(begun) => &begun.places,
        Started::Without(without) => &without.places,
    };
    places.decided.iter().for_each(say_cold);
    for decided in &places.decided {
        if let Some(volume) = needed.attached.get(&decided.coming.name) {
            volume.came(decided);
        }
    }
    let (superblock, shards, log, given_up, warmth) = match started {
        Started::With(begun) => {
            let start::Begun { log, shards, warmth, dropped, damaged, .. } = *begun;
            if damaged {
                tracing::error!(
                    "'{}': pages of the map's log are damaged{}. If that happens again, replace the device",
                    device.name(),
                    match warmth {
                        Warmth::Memory => "; the map in memory is whole, and is written anew",
                        _ => ": the cache is cold",
                    }
                );
            }
            if dropped > 0 {
                tracing::info!(
                    "{dropped} lines are dropped: nothing proves that they are as the volumes are"
                );
            }
            (log.superblock().clone(), shards, Some(node::StoredLog::new(log)), None, warmth)
        }
        Started::Without(without) => {
            let Without { superblock, shards, why, .. } = *without;
            tracing::error!(
                "the cache '{}' is not used: {why}. Volumes go on without it (pass-through); replace the cache device, format \
                 it and start again, or start again when it can be read: it is cold then",
                device.name()
            );
            (superblock, shards, None, Some(why), Warmth::Cold("it is not used".to_owned()))
        }
    };
    let begun = Begun {
        device,
        superblock,
        region,
        shards: shards.into_iter().map(node::StoredShard::new).collect(),
        needed,
        node_limits,
        budget,
        log,
        given_up,
        warmth,
        stand_in: false,
        by_hand,
    };
    let running = begin(config, begun)?;
    back::start(running.cache(), &sb)?;
    Ok(running)
}

/// By chance.
pub(super) fn random() -> Result<u32, CacheError> {
    let random = larder_runtime::machine::random();
    let random = random
        .map_err(|e| CacheError::System { what: "a random number", reason: e.to_string() })?;
    Ok((random >> 32) as u32)
}

/// Why a start was refused, in words.
fn refused(why: Refused, device: &FlashDevice, config: &CacheConfig) -> CacheError {
    let fail = |reason: String| CacheError::System { what: "the cache device", reason };
    match why {
        Refused::Volume(no_place) => cannot_come(&no_place),
        Refused::Memory(entry) => {
            CacheError::System { what: "the map in memory", reason: entry.to_string() }
        }
        Refused::NotEmpty => CacheError::NotEmpty { path: device.name().to_string() },
        Refused::NotRecorded(why) => {
            fail(format!("{why}, and nothing could be recorded without it: replace it"))
        }
        Refused::NotNoted { why, reason } => fail(format!(
            "{why}, and it cannot be noted in '{}' that what is on it must not be used again: {reason}; replace the device, or \
             name a state directory that can be written to",
            config.state_dir.display(),
        )),
    }
}

/// What a run needs beside its device, and what may not be had: a start that is refused for it changes nothing.
pub(super) struct Needed {
    attached: BTreeMap<String, Arc<Attached>>,
    file: FileHandle,
    mailboxes: Vec<super::Mailbox>,
    fills: FileQueue,
    record: Option<record::Prepared>,
}

impl Needed {
    /// For these volumes, whose places are those of `records`.
    ///
    /// # Errors
    /// [`CacheError`]: the first that cannot be had.
    pub(super) fn new(
        config: &CacheConfig,
        device: &FlashDevice,
        superblock: &BlockSuperblock,
        (volumes, records): (&[Arc<Volume>], &[VolumeRecord]),
        node_limits: &NodeLimits,
    ) -> Result<Needed, CacheError> {
        let mut attached = BTreeMap::new();
        for (spec, record) in volumes.iter().zip(records) {
            let volume = Attached::new(spec, node_limits.next_id(), record, superblock, config)?;
            attached.insert(spec.name().to_owned(), volume);
        }
        let system =
            |what| move |e: std::io::Error| CacheError::System { what, reason: e.to_string() };
        let raw = device.raw().ok_or_else(|| CacheError::System {
            what: "the cache device",
            reason: "it has no descriptor".into(),
        })?;
        let fd: OwnedFd = raw.try_clone_to_owned().map_err(system("a descriptor"))?;
        // Two more, for who is no worker: who prefetches, and operators.
        let mailboxes = (0..config.workers + config.queues + 2)
            .map(|_| Core::new_mailbox())
            .collect::<Result<_, _>>()
            .map_err(system("eventfd"))?;
        let fills = FileQueue::open(config.ring, FILL_DEPTH, FILL_THREADS)
            .map_err(|reason| CacheError::System { what: "a ring", reason })?;
        let block = setup::shard_config(config.write, config.fill_memory, &superblock.layout);
        let record = config.record.as_ref();
        let record = record.map(|r| record::Prepared::new(r, superblock, block, config, &attached));
        Ok(Needed {
            file: FileHandle::new(fd, device.read_unit()),
            mailboxes,
            fills,
            record: record.transpose()?,
            attached,
        })
    }
}

/// What a cache begins with.
pub(super) struct Begun {
    pub device: FlashDevice,
    pub superblock: BlockSuperblock,
    pub region: Region,
    pub shards: Vec<node::StoredShard>,
    pub needed: Needed,
    pub node_limits: NodeLimits,
    pub budget: BudgetFile,
    /// None without a cache.
    pub log: Option<node::StoredLog>,
    /// Why it is not used, if it is not.
    pub given_up: Option<String>,
    pub warmth: Warmth,
    /// The device is none that was formatted.
    pub stand_in: bool,
    /// Without threads.
    pub by_hand: Option<ByHand>,
}

/// Begins a run: from here on volumes are served.
///
/// # Errors
/// [`CacheError`].
pub(super) fn begin(config: CacheConfig, begun: Begun) -> Result<Running, CacheError> {
    let Begun { device, superblock, region, shards, needed, node_limits, log, .. } = begun;
    let Begun { given_up, warmth, stand_in, by_hand, budget, .. } = begun;
    let Needed { attached, file, mailboxes, fills, record } = needed;
    let layout = superblock.layout;
    let placing = Placing::of(&layout, superblock.key);
    let generation = superblock.generation;
    node_limits.set_volumes(attached.values().cloned().collect());
    let recorder = record.map(|r| Recording::start(r, &superblock, &config, &attached));
    let recorder = recorder.transpose()?;
    let shards = shards.into_iter().map(|shard| Mutex::new(LockedShard::new(shard))).collect();
    let system = |what| move |e: std::io::Error| CacheError::System { what, reason: e.to_string() };
    let cache = Arc::new(Core {
        state_dir: StateDir::new(&config.state_dir, config.ring != RingChoice::Caller),
        layout,
        generation,
        placing,
        device,
        file,
        shards,
        volumes: RwLock::new(attached),
        retired: Mutex::default(),
        mailboxes,
        log_inbox: Mutex::default(),
        log_wake: Condvar::new(),
        log_stats: Mutex::default(),
        enabled: given_up.is_none().into(),
        flash_errors: 0.into(),
        last_flash_error: Mutex::default(),
        time: match by_hand {
            Some(ByHand::Given { now, .. }) => Time::Given(now.0.into()),
            _ => Time::Runs(Instant::now()),
        },
        hand: OnceLock::new(),
        #[cfg(test)]
        faults: super::tests::Faults::default(),
        recorder,
        node_limits,
        operators: Operators::default(),
        changing: Changing::default(),
        region,
        stand_in,
        me: OnceLock::new(),
        back: OnceLock::new(),
        aside: Mutex::new(Aside::of(&superblock, &[])),
        config,
    });
    let _ = cache.me.set(Arc::downgrade(&cache));
    let log = log.map(|mut log| {
        cache.begin_recording(&mut log);
        log
    });
    *locked(&cache.node_limits.given_up) = given_up;
    let thread = LogThread::new(cache.clone(), log, superblock, fills, budget);
    if by_hand.is_some() {
        Hand::take(&cache, thread).map_err(system("a lane"))?;
        cache.restore_selection(&cache.volumes());
        return Ok(Running { cache, thread: None, census: None, ended: false, warmth });
    }
    let thread = std::thread::Builder::new()
        .name("block-log".into())
        .spawn(move || thread.run())
        .map_err(system("a thread"))?;
    cache.restore_selection(&cache.volumes());
    let counted = cache.clone();
    let census = std::thread::Builder::new()
        .name("block-census".into())
        .spawn(move || census::run(&counted))
        .map_err(system("a thread"))?;
    Ok(Running { cache, thread: Some(thread), census: Some(census), ended: false, warmth })
}

/// A volume as it comes, and what its store is known by; `trust` vouches for one that cannot tell whether it was changed.
///
/// # Errors
/// A name that is too long, or a store that does not say.
pub(super) fn comer(spec: &Arc<Volume>, trust: bool) -> Result<Comer, CacheError> {
    let fail = |reason: String| CacheError::Volume { name: spec.name().to_owned(), reason };
    if spec.name().len() > MAX_NAME {
        return Err(fail(format!(
            "the name is longer than {MAX_NAME} bytes: choose a shorter one"
        )));
    }
    let bytes = spec.backing().capabilities().size;
    let identity = spec
        .backing()
        .identity()
        .map_err(|e| CacheError::NotYet { name: spec.name().to_owned(), reason: e.to_string() })?;
    Ok(Comer {
        name: spec.name().to_owned(),
        bytes,
        identity: identity.encode(),
        proves: Box::new(move |then, let_go| identity.proves(then, let_go, trust)),
    })
}

/// Why a volume cannot come, in words.
pub(super) fn cannot_come(NoPlace { name, bytes, why }: &NoPlace) -> CacheError {
    let reason = match why {
        CannotCome::Shrunk(had) => format!(
            "it has {bytes} bytes but had {had} when it was last attached: restore its size, attach it under another name, or \
             forget what was (`larder block drop`)"
        ),
        CannotCome::TooMany(most) => format!(
            "the cache knows {most} volumes already: `larder block drop` forgets one that is not attached"
        ),
        CannotCome::NoRoom => format!(
            "{bytes} bytes do not fit in the line space of this cache: `larder block drop` forgets volumes that are not attached"
        ),
    };
    CacheError::Volume { name: name.clone(), reason }
}

/// Says why what was cached of a volume is not used, if it is not.
pub(super) fn say_cold(decided: &Decided) {
    if let Some(why) = decided.cold {
        let name = &decided.coming.name;
        tracing::warn!("volume '{name}': what was cached is dropped: {why}");
    }
}
