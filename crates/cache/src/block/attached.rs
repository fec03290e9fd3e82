//! A volume as the cache knows it.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use larder_base::Nanos;
use larder_engine::block::node;
use larder_engine::block::node::counters::VolumeCounters;
use larder_engine::block::node::flushes::PATIENCE;
use larder_engine::block::node::share::{Account, ShareLines};
use larder_engine::block::node::start::places::Decided;
use larder_engine::block::node::{owners, setup};
use larder_engine::block::volumes::Found;
use larder_format::block::{BlockSuperblock, Volume as VolumeRecord};
use larder_policy::block::detect::Detector;
use larder_policy::block::{BlockKind, Reason, VerdictCounts, VolumeId};

use larder_runtime::RingChoice;
use larder_volume::Alone;
use larder_volume::identity::is_change;

use super::attended::{is_attended, is_unwanted, waits_for};
use super::back::Saves;
use super::flusher::Flusher;
use super::locked;
use super::open::{CacheConfig, CacheError};
use super::operators::LOOK;
use super::volume::Volume;

/// What clients did with all volumes since the start, with those that are detached by now: nothing here falls.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// Reads that ended.
    pub reads: u64,
    /// Of them, answered without asking the store or waiting for it.
    pub read_hits: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes, zeroes and trims that ended.
    pub writes: u64,
    /// Bytes written (trims and zeroes have none).
    pub write_bytes: u64,
    /// Lines that began to be filled by reads that missed.
    pub filled_by_reads: u64,
    /// Admission's verdicts.
    pub verdicts: VerdictCounts,
}

impl Totals {
    /// Adds what was done with a volume so far.
    pub(super) fn add(&mut self, volume: &Attached) {
        let c = volume.counters.counts();
        self.read_hits += c.read_hits;
        self.reads += c.reads;
        self.read_bytes += c.read_bytes;
        self.writes += c.writes;
        self.write_bytes += c.write_bytes;
        self.filled_by_reads += c.filled_by_reads;
        self.verdicts.add(&volume.verdicts());
    }
}

/// A volume as the cache knows it.
pub struct Attached {
    /// Its name.
    pub name: String,
    /// Its number, for policies.
    pub id: VolumeId,
    base: AtomicU64,
    pub(super) gate: Gate,
    /// Bytes: it may grow.
    bytes: AtomicU64,
    /// Bytes that it had, where its store has become smaller and what is dirty of it may lie beyond the end. It is only read then.
    had: Option<u64>,
    /// Bytes of a line.
    line: u64,
    /// What clients did.
    pub counters: VolumeCounters,
    /// Its lines in the cache, and how many it may have.
    pub(super) account: Account,
    /// Changes of its store by others for which all of its lines were dropped.
    pub(super) accounted: AtomicU64,
    /// Something is selected of it.
    pub(super) selected: AtomicBool,
    /// Its attachment number, if it writes back; else 0.
    pub(super) attachment: AtomicU32,
    /// Its store was not as the cache had left it when it came: when that was, and how it is known.
    changed: OnceLock<(Instant, &'static str)>,
    /// It changes over between writing through and writing back, or goes: by one at a time.
    pub(super) changing: Arc<AtomicBool>,
    /// An operator has had it written through.
    pub(super) through_by_choice: AtomicBool,
    /// Its marker says that another has its store: whatever clients ask for fails.
    pub(super) others: AtomicBool,
    /// What the write budget makes of it.
    pub(super) saves: Mutex<Saves>,
    pub(super) admission: Mutex<node::StoredAdmission>,
    /// Verdicts on its requests that no policy gave.
    governed: Mutex<VerdictCounts>,
    /// Only where admission makes a difference between metadata and data.
    pub(super) detector: Option<Mutex<Detector>>,
    /// Makes its store durable, as long as it is attached.
    pub(super) flusher: Arc<Flusher>,
    pub(super) volume: Arc<Volume>,
}

/// Who may work on a volume by its place in the line space. Closed, the volume moves. Held, it changes over: what is destaged goes on.
#[derive(Debug, Default)]
pub(super) struct Gate {
    inside: AtomicU64,
    closed: AtomicBool,
    held: AtomicBool,
}

impl Gate {
    /// No client enters any more until [`Gate::release`].
    pub(super) fn hold(&self) {
        self.held.store(true, Ordering::SeqCst);
    }

    pub(super) fn release(&self) {
        self.held.store(false, Ordering::SeqCst);
    }

    /// Nobody enters any more until it is opened.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    pub(super) fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
    }

    /// Whether one more is inside now, so that its volume stays where it lies in the line space until it leaves. Not when it
    /// is closed or held.
    pub(super) fn enter(&self) -> bool {
        let open = self.enter_destage();
        if open && self.held.load(Ordering::SeqCst) {
            self.leave();
            return false;
        }
        open
    }

    /// The same for what is destaged.
    pub(super) fn enter_destage(&self) -> bool {
        // Counted first: who closes the gate and finds nobody inside knows that who comes later sees it closed.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let open = !self.closed.load(Ordering::SeqCst);
        if !open {
            self.leave();
        }
        open
    }

    pub(super) fn leave(&self) {
        self.inside.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether nobody is inside. Who looks in at a closed gate is counted for a moment.
    pub(super) fn is_empty(&self) -> bool {
        self.inside.load(Ordering::SeqCst) == 0
    }
}

impl std::fmt::Debug for Attached {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attached").field("name", &self.name).field("base", &self.base()).finish()
    }
}

impl owners::Governed for Attached {
    fn id(&self) -> VolumeId {
        self.id
    }

    fn bytes(&self) -> u64 {
        Attached::bytes(self)
    }

    fn account(&self) -> &Account {
        &self.account
    }

    fn select(&self, selected: bool) {
        self.selected.store(selected, Ordering::Relaxed);
    }
}

impl owners::Volume for Attached {
    fn base(&self) -> u64 {
        Attached::base(self)
    }
}

impl Attached {
    /// The volume `volume`, whose stretch of the line space is that of `record`.
    ///
    /// # Errors
    /// When its store gives no session, or admission's tables would be too large.
    pub(super) fn new(
        volume: &Arc<Volume>,
        id: VolumeId,
        record: &VolumeRecord,
        superblock: &BlockSuperblock,
        config: &CacheConfig,
    ) -> Result<Arc<Attached>, CacheError> {
        let layout = superblock.layout;
        let line = u64::from(layout.line);
        let fail = |reason: String| CacheError::NotYet { name: volume.name().to_owned(), reason };
        let session = volume.backing().session().map_err(|e| fail(e.to_string()))?;
        let session = Alone::new(session).map_err(|e| fail(format!("a session's poll: {e}")))?;
        let admission = setup::admission(&config.admission, superblock, record.bytes)?;
        let detector = setup::detector(&admission, record.bytes).map(Mutex::new);
        let share = config.rules.share(volume.name());
        let share = ShareLines::new(share, layout.capacity(), layout.line).map_err(fail)?;
        let bytes = record.bytes.min(volume.capabilities().size);
        let had = (bytes < record.bytes).then_some(record.bytes);
        if had.is_some() {
            volume.keep_read_only();
        }
        Ok(Arc::new(Attached {
            name: volume.name().to_owned(),
            id,
            had,
            base: AtomicU64::new(
                record.first_group * larder_format::block::layout::GROUP_LINES * line,
            ),
            gate: Gate::default(),
            bytes: AtomicU64::new(bytes),
            line,
            attachment: AtomicU32::new(0),
            changed: OnceLock::new(),
            changing: Arc::default(),
            through_by_choice: AtomicBool::new(false),
            others: AtomicBool::new(false),
            saves: Mutex::default(),
            counters: VolumeCounters::default(),
            account: Account::new(share),
            accounted: AtomicU64::new(0),
            selected: AtomicBool::new(false),
            admission: Mutex::new(admission),
            governed: Mutex::default(),
            detector,
            flusher: Arc::new(match config.ring {
                RingChoice::Caller => Flusher::by_hand(session, volume.clone()),
                _ => Flusher::new(session, volume.clone()),
            }),
            volume: volume.clone(),
        }))
    }

    /// It has come, as was decided: what is cached of it is used, or not.
    pub(super) fn came(&self, decided: &Decided) {
        let changed = matches!(&decided.outcome, Ok(taken) if taken.found == Found::Changed);
        if let Some(why) = decided.cold.filter(|why| changed && is_change(why)) {
            // (It comes once.)
            let _ = self.changed.set((Instant::now(), why));
        }
    }

    /// How long ago it came, if its store had been changed by something else since the cache left it, or was another one; and how that is known.
    pub fn came_changed(&self) -> Option<(Duration, &'static str)> {
        self.changed.get().map(|(since, why)| (since.elapsed(), *why))
    }

    /// Makes durable what was written before: by whomever, or by an earlier run that was cut short, ahead of the bit that
    /// says so (the header of the engine's `shard.rs`). The cache must not remember what the store may still forget.
    ///
    /// # Errors
    /// When its store cannot.
    pub(super) fn make_durable(&self) -> Result<(), CacheError> {
        self.make_durable_within(PATIENCE)
    }

    /// The same, within `timeout`.
    ///
    /// # Errors
    /// When its store cannot.
    pub(super) fn make_durable_within(&self, timeout: Nanos) -> Result<(), CacheError> {
        let durable = self.volume.capabilities().read_only || self.is_flushed_within(timeout);
        durable.then_some(()).ok_or_else(|| self.is_not_durable(timeout))
    }

    fn is_flushed_within(&self, timeout: Nanos) -> bool {
        if !is_attended() {
            return self.flusher.flush(Duration::from_nanos(timeout.0));
        }
        let _waits = waits_for(&format!("store '{}'", self.volume.backing().uri()));
        let (number, until) =
            (self.flusher.want(), Instant::now() + Duration::from_nanos(timeout.0));
        loop {
            let durable = self.flusher.wait(number, LOOK);
            if durable.is_some() || is_unwanted() || Instant::now() >= until {
                return durable == Some(true);
            }
        }
    }

    /// The error of a store that could not be made durable in that time.
    pub(super) fn is_not_durable(&self, timeout: Nanos) -> CacheError {
        CacheError::NotYet {
            name: self.name.clone(),
            reason: format!(
                "its store cannot make durable what was written before ('{}', tried for up to {} s): see to the store and try again",
                self.volume.backing().uri(),
                timeout.as_secs_f64()
            ),
        }
    }

    /// Its first byte in the line space. It changes only while nobody is inside its [`Gate`].
    pub(super) fn base(&self) -> u64 {
        self.base.load(Ordering::Acquire)
    }

    /// Where a byte of the line space lies in it.
    pub(super) fn offset_of(&self, at: u64) -> u64 {
        at.saturating_sub(self.base())
    }

    /// It lies there from now on: nobody is inside, and no line of it is cached.
    pub(super) fn set_base(&self, base: u64) {
        self.base.store(base, Ordering::Release);
    }

    /// Its size, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    /// How many bytes it had, where its store has become smaller and it is only read for that.
    pub(super) fn had(&self) -> Option<u64> {
        self.had
    }

    /// Bytes of it that may be cached: whole lines.
    pub fn cached_bytes(&self) -> u64 {
        self.bytes() / self.line * self.line
    }

    /// It has grown.
    pub(super) fn set_bytes(&self, bytes: u64) {
        self.bytes.fetch_max(bytes, Ordering::AcqRel);
        self.volume.set_size(bytes);
    }

    /// The volume as it is exported.
    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    /// Its floor and ceiling, in lines.
    pub fn share(&self) -> (u64, Option<u64>) {
        let share = self.account.share();
        (share.floor, share.ceiling)
    }

    /// Verdicts on its requests: admission's, and those of shares, selection, room and the write budget.
    pub fn verdicts(&self) -> VerdictCounts {
        let mut verdicts = *locked(&self.governed);
        verdicts.add(locked(&self.admission).verdicts());
        verdicts
    }

    /// Requests of it are refused, and no policy was asked.
    pub(super) fn refused(&self, reason: Reason, times: u64) {
        locked(&self.governed).rejected[reason as usize] += times;
    }

    /// Its lines in the cache, about.
    pub fn lines(&self) -> u64 {
        self.account.lines()
    }

    /// What bytes of the volume hold, as far as known.
    pub(super) fn classify(&self, offset: u64, bytes: u64) -> BlockKind {
        self.detector.as_ref().map_or(BlockKind::Unknown, |d| locked(d).classify(offset, bytes))
    }

    /// Bytes of the volume pass by.
    pub(super) fn pass(&self, offset: u64, bytes: &[u8]) {
        if let Some(detector) = &self.detector {
            locked(detector).pass(offset, bytes);
        }
    }

    /// File systems that were recognised on it: kind and first byte.
    pub fn file_systems(&self) -> Vec<(&'static str, u64)> {
        self.detector.as_ref().map_or_else(Vec::new, |d| locked(d).file_systems().collect())
    }
}
