//! The cache in front of volumes: the engine behind locks, its bytes, its log's thread, and what each worker does.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`open`](mod@open) | formatting, opening, and what survives |
//! | `region` | memory of the map that outlives the process |
//! | `notes` | notes that say that what is on a device must not be used |
//! | [`without`] | a start without the cache device |
//! | `takeback` | a cache that was given up is used again |
//! | `cache` | the cache as a program that embeds it sees it; `builder`: how it is opened; `workers`: its threads |
//! | `shard` | the engine's types, with the daemon's bytes and volumes |
//! | `node` | what the engine's queues share: shards behind mutexes, mailboxes, what is decided for all |
//! | `cached` | a worker's requests: carries out what its queue in the engine asks for |
//! | [`service`] | what a worker does requests with |
//! | [`volume`] | volumes by name; [`health`]: how a volume's store does; [`told`]: who has been told that a store may have lost writes |
//! | `record` | `--record` |
//! | `log` | the thread of the map's log, which also writes fills |
//! | `hand` | a cache without threads |
//! | `lane` | a thread's own way to the volumes |
//! | `queue` | the same for threads of a program that embeds the cache |
//! | `grow` | a volume grows while it is served, and moves if it must |
//! | `node_limits` | selection and shares. What they come to is decided in [`limits`]; `budget`: the write budget's file; `select`: the file of what is selected; `state_dir`: the directory that has both |
//! | `running` | a cache that runs, and how it ends |
//! | `operators` | what an operator asks is carried through: lines are dropped, whatever waits for lines; `attach`: volumes come and go; `explain`: why a block is not cached |
//! | `distrust` | lines of a store that forgot writes, or that somebody else has changed |
//! | `check` | whether what is cached is what it should be |
//! | [`inspect`] | the same of a device that is not in use |
//! | `prefetch` | what an operator wants to be cached ahead |
//! | `tables` | what only a sparse cache has: its file, and pages of its table that are not in memory |
//! | `census` | a thread that counts lines and takes out those of trimmed ranges |
//! | `watch` | threads that look after stores, one a volume: losses, changes by others, what detectors of metadata wish to see |
//!
//! A request stays on the worker that took it. What the engine asks for on behalf of another worker's request (one that
//! waited for a line that this worker has brought) goes to that worker's inbox. Fills and everything durable is the
//! log's thread's affair: no client waits for it, but for the first write to a cached line of a region that was quiet.

mod aside;
mod attach;
mod attached;
mod attended;
pub mod back;
mod budget;
mod builder;
mod cache;
mod cached;
mod census;
mod changing;
mod check;
mod distrust;
mod explain;
mod flusher;
mod grow;
mod hand;
pub mod health;
pub mod inspect;
mod lane;
pub mod later;
mod log;
mod node;
mod node_limits;
mod notes;
pub mod open;
mod operators;
mod prefetch;
mod queue;
mod record;
mod region;
mod running;
mod select;
pub mod service;
mod shard;
mod state_dir;
mod steps;
mod tables;
mod takeback;
#[cfg(test)]
mod tests;
pub mod told;
pub mod volume;
mod watch;
pub mod without;
mod workers;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use larder_base::Nanos;
use larder_engine::block::address::Placing;
use larder_engine::block::node::StoredShard;
use larder_engine::block::node::calls::{self, OP_BITS};
use larder_engine::block::node::failing::{FlashError, page_slots};
use larder_engine::block::node::looks::Looks as _;
use larder_engine::block::node::maintenance::Inbox;
use larder_engine::block::{BlockStats, LineId, LogStats, OpId, Sum};
use larder_format::block::Layout;
use larder_policy::block::{Rule, VerdictCounts};
use larder_runtime::{FileHandle, FlashDevice, Payload};
use rustix::event::{EventfdFlags, eventfd};

pub use aside::AsideVolume;
pub use attach::Detaching;
pub use attached::{Attached, Totals};
pub use attended::Asker;
pub use builder::Builder;
pub use cache::{Cache, CachedVolume, Pending};
pub use cached::Cached;
pub use changing::{All, Changing, One};
pub use check::{CheckFault, CheckReport, CheckWish};
pub use explain::{DirtyOf, Explanation, LineOf, SlotOf, named};
pub use hand::ByHand;
use hand::Hand;
pub use lane::Lane;
pub use larder_engine::block::node::counters::{VolumeCounters, VolumeCounts};
pub use larder_engine::block::node::share::{Portion, Share};
use node_limits::NodeLimits;
pub use node_limits::{BudgetNow, Latencies, RulesConfig};
pub use open::{CacheConfig, CacheError, FormatConfig, Warmth};
pub use prefetch::{Prefetched, Prefetching};
pub use queue::{Completion, Full, Queue};
pub use running::Running;
use shard::{Fx, LockedShard, Message, Out};
pub use takeback::TakingBack;
pub use told::Told;
pub use volume::{Client, Volume, VolumeError, Volumes};

/// Nothing panics while it holds one of these locks, and what they guard is whole after each operation.
fn locked<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From the rate of less time nothing follows for a drive's life.
const LEAST_LIFE: Nanos = Nanos::from_secs(60);

/// A worker's inbox.
struct Mailbox {
    inbox: Mutex<Vec<(OpId, Message)>>,
    event: std::os::fd::OwnedFd,
    /// Of the operators', who wait for it.
    changed: Condvar,
}

impl Mailbox {
    fn wake(&self) {
        self.changed.notify_all();
        // Full means that it will wake anyway.
        let _ = rustix::io::write(self.event.as_fd(), &1u64.to_ne_bytes());
    }
}

/// What tells the time since the start.
enum Time {
    Runs(Instant),
    /// It stands until it is set.
    Given(AtomicU64),
}

/// What waits for the log's thread.
#[derive(Default)]
struct LogInbox {
    /// What queues and operators have left.
    mail: Inbox<Payload, log::Task>,
    /// The thread has ended.
    stopped: bool,
}

/// What has happened, over all shards.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheStats {
    /// The engine's counters, summed.
    pub engine: BlockStats,
    /// The log's counters.
    pub log: LogStats,
    /// What admission said.
    pub verdicts: VerdictCounts,
    /// Lines that may be cached at a time.
    pub slots: u64,
    /// Bytes of DRAM of the map.
    pub map_bytes: u64,
    /// The cache is in use; otherwise volumes are in pass-through.
    pub enabled: bool,
    /// Regions whose bit is set.
    pub regions_set: u64,
    /// Bytes written to the cache device: lines, the map's log and snapshots.
    pub flash_bytes: u64,
    /// What clients did, those of volumes that are detached by now among them.
    pub totals: Totals,
    /// Bytes that clients wrote.
    pub client_bytes: u64,
    /// Bytes that were filled because a read missed.
    pub read_fill_bytes: u64,
    /// The write budget.
    pub budget: BudgetNow,
    /// Years that the drive lasts at the rate since the start; `None` if its endurance is not known, nothing was written, or
    /// the start is less than a minute ago: a cache that fills says nothing of years then.
    pub life_years: Option<f64>,
}

impl CacheStats {
    /// Cache-level write amplification: bytes written to flash for each byte written to the cache, by clients or because a
    /// read missed. `None` before the first.
    pub fn clwa(&self) -> Option<f64> {
        let into = self.client_bytes + self.read_fill_bytes;
        (into > 0).then(|| self.flash_bytes as f64 / into as f64)
    }
}

/// A cache device with its volumes. Shared by all workers.
pub struct Core {
    layout: Layout,
    /// That of the pages of its table, if it is sparse.
    generation: u64,
    placing: Placing,
    device: FlashDevice,
    file: FileHandle,
    shards: Vec<Mutex<LockedShard>>,
    volumes: RwLock<BTreeMap<String, Arc<Attached>>>,
    /// Of volumes that were detached. Changed with `volumes` locked.
    retired: Mutex<Totals>,
    mailboxes: Vec<Mailbox>,
    log_inbox: Mutex<LogInbox>,
    log_wake: Condvar,
    log_stats: Mutex<(LogStats, u64)>,
    enabled: AtomicBool,
    flash_errors: AtomicU64,
    /// The last failure of the cache device, in words.
    last_flash_error: Mutex<String>,
    time: Time,
    /// Of a cache without threads, what they do else.
    hand: OnceLock<Hand>,
    #[cfg(test)]
    faults: tests::Faults,
    /// Writes down what is decided, if that was asked for.
    recorder: Option<record::Recording>,
    node_limits: NodeLimits,
    operators: operators::Operators,
    changing: Changing,
    /// Outlives the process; kept for its lock.
    region: region::Region,
    /// There was no cache at the start: the device is none that was formatted.
    stand_in: bool,
    /// Itself, for threads that end when it does.
    me: OnceLock<std::sync::Weak<Core>>,
    /// Volumes that write back, where there is a write log.
    back: OnceLock<back::Back>,
    /// Volumes that are known and not attached.
    aside: Mutex<aside::AsideVolumes>,
    config: CacheConfig,
    state_dir: state_dir::StateDir,
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("layout", &self.layout).finish_non_exhaustive()
    }
}

impl Core {
    /// Nobody does what is asked of the log's thread any more: who waits for it hears of that.
    fn has_stopped(&self) {
        let mut inbox = locked(&self.log_inbox);
        inbox.stopped = true;
        inbox.mail.forget_tasks();
    }

    /// Leaves something in maintenance's inbox by `f`, and wakes the thread if that says so.
    fn leave_for_log(&self, f: impl FnOnce(&mut Inbox<Payload, log::Task>) -> bool) {
        let wake = f(&mut locked(&self.log_inbox).mail);
        if wake {
            self.log_wake.notify_one();
        }
    }

    /// Bytes of a line.
    pub fn line_bytes(&self) -> u32 {
        self.layout.line
    }

    /// The layout of the device.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Who attaches, detaches or resizes a volume takes it here, and its store, so that nobody else does the same beside it. (What the
    /// [`Cache`] does so takes them itself.)
    pub fn changing(&self) -> &Changing {
        &self.changing
    }

    /// Whether the cache is used; otherwise the volumes are in pass-through.
    pub fn is_enabled(&self) -> bool {
        self.enabled.load(Ordering::Relaxed)
    }

    fn now(&self) -> Nanos {
        match &self.time {
            Time::Runs(start) => Nanos(start.elapsed().as_nanos() as u64),
            Time::Given(now) => Nanos(now.load(Ordering::SeqCst)),
        }
    }

    /// When that time is, if time runs.
    fn instant(&self, at: Nanos) -> Option<Instant> {
        match &self.time {
            Time::Runs(start) => start.checked_add(Duration::from_nanos(at.0)),
            Time::Given(_) => None,
        }
    }

    /// The volume of that name.
    pub fn volume(&self, name: &str) -> Option<Arc<Attached>> {
        self.volumes.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    /// All volumes.
    pub fn volumes(&self) -> Vec<Arc<Attached>> {
        self.volumes.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }

    /// The cache device.
    pub fn path(&self) -> &Path {
        &self.node_limits.path
    }

    /// Names the cache device.
    pub fn uuid(&self) -> &str {
        &self.node_limits.uuid
    }

    /// How it was configured.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Why the cache is out of use, if it is.
    pub fn why_given_up(&self) -> Option<String> {
        let why = locked(&self.node_limits.given_up).clone()?;
        Some(match &*locked(&self.node_limits.not_noted) {
            None => why,
            Some(error) => format!(
                "{why}; that could not be noted for the next start ({error}): it is tried again; until it is, format the device before \
                 a start uses it"
            ),
        })
    }

    /// How a volume is cached where no range says otherwise, and how many ranges do.
    pub fn selected_of(&self, volume: &Attached) -> (Rule, u64) {
        let selection = self.node_limits.selection.read().unwrap_or_else(PoisonError::into_inner);
        (selection.whole(volume.id), selection.selected(volume.id).count() as u64)
    }

    /// Latencies of requests since the start.
    pub fn latencies(&self) -> Latencies {
        self.node_limits.latencies()
    }

    /// Time since it was opened.
    pub fn uptime(&self) -> Nanos {
        self.now()
    }

    /// The file of the cache was removed: it is used as long as it is open, and no other start will find it.
    pub fn is_unlinked(&self) -> bool {
        !self.stand_in && self.device.is_unlinked()
    }

    /// What the drive under the cache reports of its wear, where it does.
    pub fn wear(&self) -> Option<larder_runtime::Wear> {
        larder_runtime::Wear::of(&self.device)
    }

    /// What clients did with all volumes since the start.
    fn totals(&self) -> Totals {
        // A volume that is detached meanwhile is in one of the two, and not in both.
        let volumes = self.volumes.read().unwrap_or_else(PoisonError::into_inner);
        let mut totals = *locked(&self.retired);
        volumes.values().for_each(|volume| totals.add(volume));
        totals
    }

    /// Counters now.
    pub fn stats(&self) -> CacheStats {
        let (mut sum, mut map_bytes) = (BlockStats::default(), 0);
        for shard in 0..self.layout.shards {
            let (stats, map) = self.figures(shard);
            sum.add(&stats);
            map_bytes += map;
        }
        let line = u64::from(self.layout.line);
        let totals = self.totals();
        let (log, regions_set) = *locked(&self.log_stats);
        let now = self.now();
        let written_back = self.back.get().map_or(0, |back| back.log().bytes());
        let flash_bytes = sum.flash_lines_written * line + log.bytes + written_back;
        let rate = flash_bytes as f64 / now.as_secs_f64().max(1.0);
        CacheStats {
            engine: sum,
            log,
            verdicts: totals.verdicts,
            slots: self.layout.capacity(),
            map_bytes,
            enabled: self.is_enabled(),
            regions_set,
            flash_bytes,
            totals,
            client_bytes: totals.write_bytes,
            read_fill_bytes: totals.filled_by_reads * line,
            budget: self.node_limits.budget_now(now),
            life_years: (flash_bytes > 0 && now >= LEAST_LIFE)
                .then(|| self.node_limits.limits.life_years(rate))
                .flatten(),
        }
    }

    /// Lines in the cache, by a walk over the map: it takes its time. None are once it was given up.
    pub fn count_lines(&self) -> u64 {
        if !self.is_enabled() {
            return 0;
        }
        (0..self.layout.shards).map(|shard| u64::from(self.lines(shard))).sum()
    }

    /// Calls shard `shard` on behalf of worker `me`, if it is one: see [`calls::call`].
    #[inline]
    fn with<R>(
        &self,
        shard: u32,
        me: Option<usize>,
        out: &mut Out,
        f: impl FnOnce(&mut StoredShard, &mut Fx<'_>) -> R,
    ) -> R {
        calls::call(self, shard, me, out, f)
    }

    /// The first byte of a line.
    fn at(&self, line: LineId) -> u64 {
        line.0 * u64::from(self.layout.line)
    }

    /// What page `page` of the table of `shard` says, if `bytes` are that.
    fn decode_page(
        &self,
        shard: u32,
        page: u32,
        bytes: &[u8],
    ) -> Result<Vec<Option<Sum>>, FlashError> {
        page_slots(&self.layout, self.generation, (shard, page), bytes)
    }

    /// A read or write of the cache device failed: it is counted, and said now and then. What follows queues and maintenance
    /// decide, who are told what failed.
    fn flash_failed(&self, what: &str, error: &std::io::Error) -> FlashError {
        let failed = FlashError::from(error);
        let count = self.flash_errors.fetch_add(1, Ordering::Relaxed) + 1;
        *locked(&self.last_flash_error) = error.to_string();
        if failed == FlashError::Device && (count <= 10 || count.is_power_of_two()) {
            tracing::warn!(
                count,
                "the cache device did not {what}: {error}; what the stores have too is served by them"
            );
        }
        failed
    }

    /// The file system under the cache is full: how long nothing is filled yet, if so, and how often that has begun.
    pub fn filling_rests(&self) -> (Option<Nanos>, u64) {
        let backoff = &self.node_limits.limits.backoff;
        (backoff.left(self.now()), backoff.pauses())
    }

    fn new_mailbox() -> std::io::Result<Mailbox> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox { inbox: Mutex::default(), event, changed: Condvar::new() })
    }
}

/// Replaces a file as a whole: after a power cut it is the old one or the new one. Only its owner may read it, as the volumes
/// that it speaks of.
fn store_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    let temporary = path.with_extension("tmp");
    // One that was left there may be open to others.
    match std::fs::remove_file(&temporary) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file =
        std::fs::File::options().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    std::fs::File::open(dir)?.sync_all()
}
