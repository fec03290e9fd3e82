//! The shards of one cache behind their locks, and what any thread may ask of them.
//!
//! The node owns the locks, so that which are taken, in which order and for how long is decided once, whoever runs the cache: their
//! kind is a type parameter ([`LockKind`]). Each method takes one shard's lock at a time and lets go of it before it takes
//! another; only [`Node::at_rest`] holds all. The order is: a shard, then the names of applications, then what maintenance has
//! published. Where the program has debug assertions [`Threads`](larder_base::lock::Threads) checks it.
//!
//! What is called where a request is served are typed methods, not one event that is matched again: the call knows what it wants.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use larder_base::lock::{Lock, LockKind, Rank, SharedLock};
use larder_base::{AppId, ByteSize, KeyHasher, Nanos, Now, ObjectHash, UnixSecs};
use larder_policy::application::{ApplicationError, Lookup};
use larder_policy::learn::{Model, TrainingSet};

use super::expiry::{Crawler, CrawlerState};
use super::maintenance::LogReport;
use super::plan::{Plan, PlanError};
use super::record::RecordedApplications;
use super::training::Trained;
use super::turns::Turns;
use crate::dram::{Arena, ObjectMemory};
use crate::index::FlashIndex;
use crate::kv::api::{Effects, Fetched, FlashRead, Item, Op, Outcome, Reply, Request};
use crate::kv::config::object_fits;
use crate::kv::evicted::Evicted;
use crate::kv::index_room::IndexFull;
use crate::kv::log::{IoFailed, OwnerOf, SegmentIo, Shards, Standing};
use crate::kv::record::{
    Decision, Input, MachineTape, RecordedShard, RunSetup, SetupError, Tape, replay,
};
use crate::kv::saved::Saved;
use crate::kv::shard::KvShard;
use crate::kv::too_large::TooLarge;
use crate::kv::wait::{self, Room};

const SHARD: Rank = Rank::new(1, "a shard");
const APPLICATIONS: Rank = Rank::new(2, "the names of applications");
const REPORT: Rank = Rank::new(3, "what maintenance has published");
const TURNS: Rank = Rank::new(4, "whose turn it is among drives");

/// A lock on cache lines of its own.
#[repr(align(128))]
struct Apart<T>(T);

/// Shards, each behind its lock.
type Cells<L, M> = Box<[Apart<<L as LockKind>::Lock<RecordedShard<M>>>]>;

/// The shards of one cache behind their locks. See the [module](self).
pub struct Node<L: LockKind, M = Arena> {
    hasher: KeyHasher,
    cells: Cells<L, M>,
    applications: L::Shared<RecordedApplications>,
    /// How many there are, to be asked without the lock.
    pub(super) names_known: AtomicUsize,
    /// What ends a key's prefix: a key without it needs no look at the applications.
    delimiter: Option<u8>,
    max_object: u32,
    no_eviction: bool,
    /// How the memory was divided at the start; without it the limit stays.
    plan: Option<Plan>,
    /// The limit on the memory, or what was set since: shards follow.
    pub(super) memory: AtomicU64,
    pub(super) recording: AtomicBool,
    watching: AtomicBool,
    /// Nothing is served any more: the cache is being closed.
    refusing: AtomicBool,
    pub(super) crawler: CrawlerState,
    flushed_at: AtomicU32,
    /// How many names were known on disk last, the default included.
    names_kept: AtomicUsize,
    /// The logs that are at work, a bit for each drive.
    making_room: AtomicU32,
    /// What is said of each log, in no order.
    pub(super) report: L::Lock<Vec<LogReport>>,
    /// With several drives, whose turn it is, and bytes of a segment.
    turns: Option<(L::Lock<Turns>, u64)>,
}

/// Why the limit on the memory stays as it is.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// What a server cannot divide.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// More than the machine has.
    #[error("{wanted} of DRAM is more than the {machine} that this process may use")]
    Machine {
        /// The limit.
        wanted: ByteSize,
        /// What the process may use.
        machine: ByteSize,
    },
    /// Objects would be lost.
    #[error("without evictions the limit can be raised, but not lowered: objects would be lost")]
    NoEviction,
    /// A limit is no input of a record.
    #[error(
        "while a run is recorded the limit stays: what follows from another one is not in a record"
    )]
    Recording,
    /// The system refused.
    #[error("the system has no memory to grow by: {0}")]
    System(#[from] std::collections::TryReserveError),
    /// A cache that is as large as a study wants it.
    #[error("the memory of this cache was not divided by a plan")]
    NoPlan,
}

/// All shards of a node that nobody uses any more, locked: what a checkpoint is written of.
pub struct AtRest<'a> {
    /// Each shard's flash index.
    pub indexes: Vec<&'a FlashIndex>,
    /// Bytes on flash by application, for each shard.
    pub apps: &'a [Vec<u64>],
    /// Objects on flash.
    pub on_flash: u64,
    /// Objects in DRAM.
    pub in_dram: usize,
}

impl<L: LockKind, M: ObjectMemory> Node<L, M> {
    /// A node of these shards, which were built from `setup`. With `plan` its limit on the memory may change.
    ///
    /// # Errors
    /// Applications that cannot be.
    pub fn new(
        setup: &RunSetup,
        plan: Option<Plan>,
        shards: impl IntoIterator<Item = KvShard<M>>,
    ) -> Result<Node<L, M>, SetupError> {
        let applications = setup.applications.applications()?;
        let cells = shards.into_iter().map(|s| Apart(L::Lock::new(SHARD, RecordedShard::new(s))));
        Ok(Node {
            hasher: setup.hasher(),
            cells: cells.collect(),
            names_known: applications.len().into(),
            applications: L::Shared::new(APPLICATIONS, RecordedApplications::new(applications)),
            delimiter: setup.applications.config.delimiter.bytes().next(),
            max_object: setup.shard.max_object,
            no_eviction: setup.shard.no_eviction,
            memory: plan.map_or(0, |plan| plan.memory).into(),
            plan,
            recording: false.into(),
            watching: false.into(),
            refusing: false.into(),
            crawler: CrawlerState::new(),
            flushed_at: 0.into(),
            names_kept: 0.into(),
            making_room: 0.into(),
            report: L::Lock::new(REPORT, Vec::new()),
            turns: (!setup.flash().drives.is_one()).then(|| {
                let lock = L::Lock::new(TURNS, Turns::default());
                (lock, u64::from(setup.segment_bytes))
            }),
        })
    }

    /// How many shards there are.
    pub fn shards(&self) -> usize {
        self.cells.len()
    }

    /// The shard of a hash.
    #[inline]
    pub fn shard_of(&self, hash: ObjectHash) -> usize {
        OwnerOf::shard_of(hash, self.cells.len())
    }

    /// Locks a shard: for a start or a stop, and to look at it. What is changed past its tape is not recorded.
    #[inline]
    pub fn lock(
        &self,
        shard: usize,
    ) -> <L::Lock<RecordedShard<M>> as Lock<RecordedShard<M>>>::Guard<'_> {
        self.cells[shard].0.lock()
    }

    /// How often a shard's lock was found taken.
    pub fn waits(&self, shard: usize) -> u64 {
        self.cells[shard].0.waits()
    }

    /// The hash of a key.
    #[inline]
    pub fn hash(&self, key: &[u8]) -> ObjectHash {
        self.hasher.hash(key)
    }

    /// Whether an object of these lengths is within the limit.
    pub fn fits(&self, key_len: usize, value_len: usize) -> bool {
        object_fits(key_len, value_len, self.max_object)
    }

    // ---- requests ----

    /// [`KvShard::execute`] by the shard of the key, whose lock is held meanwhile, [`Effects`] included.
    #[inline]
    pub fn execute(
        &self,
        now: Now,
        request: &Request<'_>,
        fetched: Option<Fetched<'_>>,
        fx: &mut impl Effects,
    ) -> Outcome {
        let mut shard = self.lock(self.shard_of(request.hash));
        if self.refusing.load(Ordering::Relaxed) {
            drop(shard);
            fx.reply(refusal(&request.op));
            return Outcome::Done;
        }
        let outcome = shard.execute(now, request, fetched, fx);
        if self.is_watched() {
            let (evicted, lost) = shard.unrecorded().take_evicted();
            drop(shard);
            if !evicted.is_empty() || lost > 0 {
                fx.evicted(evicted, lost);
            }
        }
        outcome
    }

    /// Whether a write should be put off, to be asked about again some milliseconds later: it is large, and room for it is being made.
    /// `since` is `None` at first, and kept by the caller while it is put off: no write waits for more than a second.
    pub fn room(&self, now: Now, key: &[u8], value_len: usize, since: &mut Option<Nanos>) -> Room {
        if !wait::is_large(value_len) {
            return Room::Now;
        }
        let began = since.take();
        if !wait::may_wait(now.mono, began) || self.refusing.load(Ordering::Relaxed) {
            return Room::Now;
        }
        let mut shard = self.lock(self.shard_of(self.hash(key)));
        if !shard.lacks_room(key.len(), value_len) {
            return Room::Now;
        }
        let called = shard.has_called() || self.making_room.load(Ordering::Relaxed) != 0;
        let room = match began {
            None if shard.await_room(now, key.len(), value_len) => Room::Called,
            _ if called => Room::Later,
            _ => return Room::Now,
        };
        *since = began.or(Some(now.mono));
        room
    }

    /// From the return of this call on requests change nothing: reads miss, nothing is stored. What a stop writes down stays true
    /// though somebody still asks.
    pub fn refuse(&self) {
        self.refusing.store(true, Ordering::Relaxed);
        // Who has a lock may not have seen it; who comes behind does.
        for shard in 0..self.shards() {
            drop(self.lock(shard));
        }
    }

    /// What a verification that [`Effects::verify`] asked for came to; `None`: it was not read. Each is answered once.
    pub fn verify(&self, now: Now, read: &FlashRead, bytes: Option<&[u8]>) {
        self.lock(self.shard_of(read.hash)).verify(now, read, bytes);
    }

    /// From second `at` on, what was stored before it is gone; at once, if that is not to come. Returns whether it is: not after
    /// [`refuse`](Self::refuse), when it may be gone from some shards, and is not behind the next start.
    #[must_use = "a node that is being closed forgets nothing"]
    pub fn flush_all(&self, now: Now, at: UnixSecs) -> bool {
        for shard in 0..self.shards() {
            let mut shard = self.lock(shard);
            if self.refusing.load(Ordering::Relaxed) {
                return false;
            }
            shard.flush(now, (at > now.wall).then_some(at));
        }
        self.flushed_at.store(at.0, Ordering::Relaxed);
        true
    }

    /// The wall second of the last flush; 0 if there was none.
    pub fn flushed_at(&self) -> UnixSecs {
        UnixSecs(self.flushed_at.load(Ordering::Relaxed))
    }

    /// A start has found out when the last flush was.
    pub fn set_flushed_at(&self, at: UnixSecs) {
        self.flushed_at.store(at.0, Ordering::Relaxed);
    }

    /// Shows some of the objects in DRAM from `cursor` on, which is 0 at first. Says where to go on; `None` after the last.
    pub fn list(
        &self,
        now: Now,
        cursor: u64,
        show: impl FnMut(&[u8], &Item<'_>, usize),
    ) -> Option<u64> {
        // Shard above, place in its table below.
        let (shard, at) = ((cursor >> 32) as usize, cursor as u32);
        if shard >= self.shards() {
            return None;
        }
        match self.lock(shard).list(now, at, show) {
            Some(at) => Some((shard as u64) << 32 | u64::from(at)),
            None if shard + 1 < self.shards() => Some((shard as u64 + 1) << 32),
            None => None,
        }
    }

    // ---- applications ----

    /// The application of a key.
    #[inline]
    pub fn app(&self, key: &[u8]) -> AppId {
        if self.delimiter.is_none_or(|d| !key.contains(&d)) {
            return AppId::DEFAULT;
        }
        let known = self.applications.read().lookup(key);
        match known {
            Lookup::Known(app) => app,
            Lookup::New => self.change_names(|names| names.assign(key)),
        }
    }

    /// The application of this name.
    ///
    /// # Errors
    /// The name cannot be one, or there are too many.
    pub fn application(&self, name: &str) -> Result<AppId, ApplicationError> {
        self.change_names(|names| names.register(name))
    }

    #[cold]
    fn change_names<R>(&self, change: impl FnOnce(&mut RecordedApplications) -> R) -> R {
        let mut names = self.applications.write();
        let answer = change(&mut names);
        self.names_known.store(names.len(), Ordering::Release);
        answer
    }

    /// Names of applications by number, from 1 on.
    pub fn names(&self) -> Vec<Vec<u8>> {
        self.applications.read().names().map(<[u8]>::to_vec).collect()
    }

    /// What an application is called.
    pub fn name(&self, app: AppId) -> String {
        self.applications.read().name(app)
    }

    /// So many names are known on disk, the default included.
    pub(super) fn set_names_kept(&self, names: usize) {
        self.names_kept.store(names, Ordering::Release);
    }

    /// Whether all names are known on disk.
    pub(super) fn names_are_kept(&self) -> bool {
        self.names_kept.load(Ordering::Acquire) >= self.names_known.load(Ordering::Acquire)
    }

    // ---- drives ----

    /// The log of this drive is at work, or is not any more.
    pub(super) fn set_making_room(&self, drive: usize, is: bool) {
        let bit = 1 << drive;
        if is {
            self.making_room.fetch_or(bit, Ordering::Relaxed);
        } else {
            self.making_room.fetch_and(!bit, Ordering::Relaxed);
        }
    }

    /// What is said of a log from now on.
    pub(super) fn publish(&self, report: LogReport) {
        let mut all = self.report.lock();
        match all.iter_mut().find(|other| other.drive == report.drive) {
            Some(mine) => *mine = report,
            None => all.push(report),
        }
    }

    /// A drive's log begins.
    pub(super) fn join(&self, drive: usize) {
        if let Some((turns, _)) = &self.turns {
            turns.lock().join(drive);
        }
    }

    /// Nobody sees to a drive's log any more: others are not kept waiting for it.
    pub fn leave(&self, drive: usize) {
        if let Some((turns, _)) = &self.turns {
            turns.lock().leave(drive);
        }
    }

    /// The log of this drive begins to write or read, or has ended. The node sees to that itself; a test may have it go on.
    pub fn set_busy(&self, drive: usize, busy: bool) {
        if let Some((turns, _)) = &self.turns {
            turns.lock().set_busy(drive, busy);
        }
    }

    // ---- the limit on the memory ----

    /// The limit on the memory, bytes: as the start divided it, or as it was set since.
    pub fn memory_limit(&self) -> u64 {
        self.memory.load(Ordering::Relaxed)
    }

    /// Sets the limit on the memory to `bytes`, if that can be; maintenance takes the shards there. The process may use `machine`
    /// bytes: a client must not bring the machine down with a number.
    ///
    /// # Errors
    /// Why it cannot be.
    pub fn set_memory_limit(&self, bytes: u64, machine: u64) -> Result<(), MemoryError> {
        let plan = self.plan.as_ref().ok_or(MemoryError::NoPlan)?;
        let before = self.memory_limit();
        if bytes < before && self.no_eviction {
            return Err(MemoryError::NoEviction);
        }
        if self.recording.load(Ordering::Relaxed) {
            return Err(MemoryError::Recording);
        }
        if bytes > before.max(machine) {
            let (wanted, machine) = (ByteSize(bytes), ByteSize(machine));
            return Err(MemoryError::Machine { wanted, machine });
        }
        // What indexes have grown by is not the objects'.
        let taken: u64 = (0..self.shards()).map(|i| self.lock(i).index_taken() as u64).sum();
        Plan { fixed: plan.fixed + taken, ..*plan }.resized(bytes)?;
        self.memory.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn plan(&self) -> Option<&Plan> {
        self.plan.as_ref()
    }

    pub(super) fn evicts(&self) -> bool {
        !self.no_eviction
    }

    // ---- who looks on ----

    /// Notes evictions from DRAM for whoever wants to know of them, or stops.
    pub fn watch_evictions(&self, on: bool) {
        if self.watching.swap(on, Ordering::Relaxed) == on {
            return;
        }
        for shard in 0..self.shards() {
            self.lock(shard).unrecorded().watch_evictions(on);
        }
    }

    /// Whether evictions are noted.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.watching.load(Ordering::Relaxed)
    }

    /// Takes the evictions that a shard has noted, and the number of those that there was no room for.
    pub fn take_evicted(&self, shard: usize) -> (Vec<Evicted>, u64) {
        self.lock(shard).unrecorded().take_evicted()
    }

    /// Turns the removal of expired objects on or off.
    pub fn set_crawler(&self, on: bool) {
        self.crawler.turn(on);
    }

    /// Has maintenance look through all objects for expired ones. False when that is turned off.
    pub fn crawl(&self) -> bool {
        self.crawler.begin()
    }

    /// What removes expired objects.
    pub fn crawler(&self) -> Crawler {
        self.crawler.report()
    }

    // ---- records ----

    /// Records a shard from now on; it must be new.
    pub fn record(&self, shard: usize, tape: Tape) {
        self.recording.store(true, Ordering::Relaxed);
        self.lock(shard).record(tape);
    }

    /// Records which names of applications are given numbers, from now on; there must have been no request.
    pub fn record_applications(&self, tape: MachineTape) {
        self.applications.write().record(tape);
    }

    /// Hands on what is on the tapes of shards and applications.
    pub fn flush_chunk(&self) {
        for shard in 0..self.shards() {
            self.lock(shard).flush_chunk();
        }
        self.applications.write().flush_chunk();
    }

    /// Ends recording of the names of applications, and says how many records their stream has.
    pub fn end_recording_applications(&self) -> Option<u64> {
        self.applications.write().end_recording()
    }

    /// Ends recording of the shards, and says how many records the stream of each has.
    pub fn end_recording(&self) -> Vec<u64> {
        let all = (0..self.shards()).map(|shard| self.lock(shard).end_recording().unwrap_or(0));
        all.collect()
    }

    /// Gives a shard a recorded input and says what it decides. `bytes` are what flash holds where the input says that it was read.
    pub fn replay(
        &self,
        shard: usize,
        now: Now,
        input: &Input<'_>,
        bytes: Option<&[u8]>,
    ) -> Decision {
        replay(self.lock(shard).unrecorded(), now, input, bytes)
    }

    // ---- starts and stops ----

    /// Puts an object back that a stop has saved; see [`KvShard::restore`].
    pub fn restore(&self, now: Now, saved: &Saved<'_>, away: u32) -> bool {
        let hash = self.hash(saved.key);
        self.lock(self.shard_of(hash)).unrecorded().restore(now, hash, saved, away)
    }

    /// The objects in DRAM as a stop saves them, one after the other; see [`KvShard::save`].
    ///
    /// # Errors
    /// Those of `keep`, which end it.
    pub fn save<E>(
        &self,
        now: Now,
        mut keep: impl FnMut(&Saved<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        (0..self.shards()).try_for_each(|i| self.lock(i).unrecorded().save(now, &mut keep))
    }

    /// The latest of the flushes that clients have announced and that are still to come.
    pub fn announced_flush(&self, now: Now) -> Option<UnixSecs> {
        let announced = |i| self.lock(i).unrecorded().announced_flush(now);
        (0..self.shards()).filter_map(announced).max()
    }

    /// What a client had announced before a stop is to come still.
    pub fn announce_flush(&self, now: Now, at: UnixSecs) {
        for shard in 0..self.shards() {
            self.lock(shard).unrecorded().flush(now, Some(at));
        }
    }

    /// Locks everything, when the last request has been answered.
    pub fn at_rest<R>(&self, f: impl FnOnce(&AtRest<'_>) -> R) -> R {
        let guards: Vec<_> = self.cells.iter().map(|cell| cell.0.lock_beside()).collect();
        let apps: Vec<Vec<u64>> = guards.iter().map(|g| g.apps().flash_bytes().collect()).collect();
        let on_flash = guards.iter().map(|g| g.index().len()).sum();
        let in_dram = guards.iter().map(|g| g.dram_objects()).sum();
        let indexes = guards.iter().map(|g| g.index()).collect();
        f(&AtRest { indexes, apps: &apps, on_flash, in_dram })
    }

    /// Objects in DRAM.
    pub fn dram_objects(&self) -> usize {
        (0..self.shards()).map(|shard| self.lock(shard).dram_objects()).sum()
    }

    /// Objects in DRAM, and the bytes that they take.
    pub fn in_dram(&self) -> (u64, u64) {
        let one = |i| {
            let shard = self.lock(i);
            let bytes = shard.dram_capacity() - shard.dram_free_bytes();
            (shard.dram_objects() as u64, bytes as u64)
        };
        (0..self.shards()).map(one).fold((0, 0), |sum, part| (sum.0 + part.0, sum.1 + part.1))
    }

    /// Whether the flash index is too small for the objects that come to flash of late.
    pub fn index_full(&self) -> Option<IndexFull> {
        let (mut capacity, mut objects) = (0, 0);
        let mut lost = Vec::with_capacity(self.shards());
        for i in 0..self.shards() {
            let shard = self.lock(i);
            capacity = shard.config().flash.capacity();
            objects += FlashIndex::objects_for(shard.index().buckets());
            lost.push(shard.index_short());
        }
        IndexFull::of(capacity, objects, lost.into_iter())
    }

    /// The largest object that can be stored: bytes of key, value and header.
    pub fn largest_object(&self) -> u32 {
        self.lock(0).config().max_object
    }

    /// Objects that flash cannot hold for their size, and the longest record that it takes.
    pub fn too_large(&self) -> TooLarge {
        let mut all = TooLarge::default();
        (0..self.shards()).for_each(|i| all.add(self.lock(i).too_large()));
        all
    }

    /// Checks every shard. For tests.
    ///
    /// # Errors
    /// What does not hold.
    pub fn validate(&self) -> Result<(), String> {
        (0..self.shards()).try_for_each(|shard| self.lock(shard).validate())
    }
}

/// A drive's reads and writes: while they last, the turn may be another's.
pub(super) struct Busy<'a, L: LockKind, M, I> {
    pub(super) node: &'a Node<L, M>,
    pub(super) drive: usize,
    pub(super) io: &'a mut I,
}

impl<L: LockKind, M: ObjectMemory, I: SegmentIo> SegmentIo for Busy<'_, L, M, I> {
    type Buffer = I::Buffer;

    fn begins_at(&mut self, first: u32) {
        self.io.begins_at(first);
    }
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        self.node.set_busy(self.drive, true);
        let written = self.io.write(segment, bytes);
        self.node.set_busy(self.drive, false);
        written
    }
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        self.node.set_busy(self.drive, true);
        let read = self.io.read(segment, bytes);
        self.node.set_busy(self.drive, false);
        read
    }
}

/// The shards to a log, and to which drive it had to pass the turn.
pub(super) struct InTurn<'a, L: LockKind, M> {
    pub(super) node: &'a Node<L, M>,
    pub(super) whose: usize,
    pub(super) passed: Option<usize>,
}

impl<L: LockKind, M: ObjectMemory> Shards<M> for InTurn<'_, L, M> {
    fn count(&self) -> usize {
        self.node.shards()
    }
    fn shard_of(&self, hash: ObjectHash) -> usize {
        self.node.shard_of(hash)
    }
    fn with<R>(&mut self, shard: usize, f: impl FnOnce(&mut KvShard<M>) -> R) -> R {
        self.node.lock(shard).log_call(f)
    }
    fn take_turns(&self) -> bool {
        self.node.turns.is_some()
    }
    fn is_turn(&mut self, standing: &Standing) -> bool {
        let Some((turns, segment)) = &self.node.turns else { return true };
        self.whose = turns.lock().whose(standing, *segment);
        self.whose == standing.drive
    }
    fn pass(&mut self) {
        self.passed = Some(self.whose);
    }
}

/// The shards to the log and to training: each locked for one call.
pub(super) struct OneByOne<'a, L: LockKind, M>(pub(super) &'a Node<L, M>);

impl<L: LockKind, M: ObjectMemory> Shards<M> for OneByOne<'_, L, M> {
    fn count(&self) -> usize {
        self.0.shards()
    }
    fn shard_of(&self, hash: ObjectHash) -> usize {
        self.0.shard_of(hash)
    }
    fn with<R>(&mut self, shard: usize, f: impl FnOnce(&mut KvShard<M>) -> R) -> R {
        self.0.lock(shard).log_call(f)
    }
}

impl<L: LockKind, M: ObjectMemory> Trained for OneByOne<'_, L, M> {
    type Model = Model;

    fn count(&self) -> usize {
        self.0.shards()
    }
    fn training_due(&mut self, shard: usize, now: Now) -> Option<AppId> {
        self.0.lock(shard).training_due(now)
    }
    fn take_training_set(&mut self, shard: usize, app: AppId, now: Now) -> Option<TrainingSet> {
        self.0.lock(shard).take_training_set(app, now)
    }
    fn install(&mut self, shard: usize, app: AppId, model: Model, now: Now) {
        self.0.lock(shard).install(app, model, now);
    }
}

/// Who replays a record: brings a shard up to the call that the log is about to make, and is told what that came to.
pub trait Follow {
    /// The log is about to call this shard.
    fn before(&mut self, shard: usize);
    /// What the shard decided on the call.
    fn after(&mut self, shard: usize, decision: Decision);
}

/// The shards to the log of a replay.
pub(super) struct Followed<'a, L: LockKind, M, F> {
    pub(super) node: &'a Node<L, M>,
    pub(super) follow: &'a mut F,
}

impl<L: LockKind, M: ObjectMemory, F: Follow> Shards<M> for Followed<'_, L, M, F> {
    fn count(&self) -> usize {
        self.node.shards()
    }
    fn shard_of(&self, hash: ObjectHash) -> usize {
        self.node.shard_of(hash)
    }
    fn with<R>(&mut self, shard: usize, f: impl FnOnce(&mut KvShard<M>) -> R) -> R {
        self.follow.before(shard);
        let (answer, decision) = self.node.lock(shard).decide_log_call(f);
        self.follow.after(shard, decision);
        answer
    }
}

/// What a cache that is being closed answers.
fn refusal(op: &Op<'_>) -> Reply<'static> {
    match op {
        Op::Get(_) | Op::Peek => Reply::Miss,
        Op::Store(_) => Reply::OutOfMemory,
        Op::Delete(_) | Op::Arith(_) | Op::Touch(_) => Reply::NotFound,
    }
}
