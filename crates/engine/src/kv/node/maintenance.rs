//! What one thread does beside the requests: it owns the flash log with its write budget, when classifiers are trained, which
//! expired objects leave, the way to another limit of the memory, and what must be on disk ahead of all that. What comes next is decided
//! in `schedule.rs`, apart from shards, log and files, so that a record of it replays alone.
//!
//! Nobody else has the log, so nobody waits for a segment that is written. What others want to know of it is a copy of its counters,
//! which is published in the node after each step. The thread calls [`Maintenance::turn`], which does little each time and says
//! when to come again. It may block: on I/O of whole segments ([`SegmentIo`]) and of small files ([`StateIo`]), never on a request.
//!
//! Without flash it keeps room free ahead of writes in the same way.

use std::sync::atomic::Ordering::Relaxed;

use larder_base::lock::LockKind;
use larder_base::{AppId, ByteSize, Nanos, Now};
use larder_policy::budget::{BudgetState, KeptBudget, WriteBudget};
use larder_policy::learn::{Model, TrainingSet};

use super::expiry::{Crawler, Expired};
use super::node::{Busy, Follow, Followed, InTurn, MemoryError, Node, OneByOne};
use super::record::RecordedSchedule;
use super::resizing::{Next, Resizing};
use super::schedule::{Around, Stepped, Turn};
use super::training::Trained;
use crate::dram::ObjectMemory;
use crate::kv::evicted::Evicted;
use crate::kv::index_room::IndexFull;
use crate::kv::log::{FlashLog, LogStats, SegmentIo, Step};
use crate::kv::record::{Decision, MachineTape, RecordedLog, Tape};
use crate::kv::resize::Resizable;
use crate::kv::too_large::TooLarge;

/// Small files, as an argument. What cannot be written is told the operator by who carries it out; the next start knows less then.
pub trait StateIo {
    /// Keeps which number stands for which application, by number from 1 on. Returns false if they are not on disk then: they are kept
    /// again, and until they are nothing is written to flash, since a record might bear a new number.
    fn keep_names(&mut self, names: &[Vec<u8>]) -> bool;
    /// Keeps what the write budget must remember over a kill, before what it speaks of is written. Returns false if it is not on disk
    /// then: what that means is decided here ([`KeptBudget::kept`]).
    fn keep_budget(&mut self, state: BudgetState) -> bool;
}

/// Takes what maintenance gives out.
pub trait MaintenanceEffects {
    /// Fit a model of these samples, with this seed: [`Maintenance::fitted`] is told what came of it. It may take long, and is not
    /// asked for again before.
    fn train(&mut self, samples: TrainingSet, seed: u64);
    /// These were evicted from DRAM, and `lost` more that are not known by name.
    fn evicted(&mut self, _now: Now, _evicted: Vec<Evicted>, _lost: u64) {}
    /// The first drive is out of use since writes fail, or in use again.
    fn degraded(&mut self, _degraded: bool) {}
    /// The turn is that of the drive at this place, whose thread may rest: it is to look.
    fn pass(&mut self, _drive: usize) {}
    /// The flash index is too small for the objects that come to flash, or is not any more.
    fn index_full(&mut self, _full: Option<IndexFull>) {}
    /// Objects were met that flash cannot hold for their size: all so far. Told once a minute at most.
    fn too_large(&mut self, _all: TooLarge) {}
    /// All shards have what the limit on the memory gives them.
    fn memory_followed(&mut self, _limit: u64) {}
    /// The limit on the memory stays at `limit`.
    fn memory_refused(&mut self, _limit: u64, _why: MemoryError) {}
    /// The memory of a shard's objects, which has another size now. Its lock is held.
    fn resized(&mut self, _memory: &mut [u8]) {}
}

/// What is published of a log.
#[derive(Clone, Debug, Default)]
pub struct LogReport {
    /// The place of its drive.
    pub drive: usize,
    /// Bytes of its drive.
    pub capacity: u64,
    /// Its counters.
    pub stats: LogStats,
    /// Bytes of memory that it takes.
    pub memory_bytes: usize,
    /// How often the file of the write budget could not be written.
    pub unkept_budgets: u64,
    pub(super) budget: Option<WriteBudget>,
}

/// Objects too large for flash are told of this often at most.
const TOO_LARGE_EVERY: Nanos = Nanos::from_secs(60);

/// A log, and what must be known of it on disk.
pub(super) struct Flash<B> {
    log: RecordedLog<B>,
    kept_budget: KeptBudget,
    segment_bytes: u64,
    /// Segments written when the index was looked at last, and whether it was too small.
    looked: (u64, bool),
    /// How many objects too large for flash were told of, and when the next may be.
    told: (u64, Nanos),
}

/// Where the shards stand on the way to another limit on the memory.
struct Following {
    /// The limit that the shards have.
    divided: u64,
    resizing: Option<Resizing>,
    /// Shards may differ from that limit: a change was begun.
    uneven: bool,
}

/// Owned by one thread. See the [module](self).
pub struct Maintenance<B> {
    flash: Option<Flash<B>>,
    following: Following,
    schedule: RecordedSchedule,
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> Maintenance<B> {
    /// Maintenance of `node`, over this log. Seeds of training follow from `seed`; `names_kept` applications are known on disk, the
    /// default not counted.
    pub fn new<L: LockKind, M: ObjectMemory>(
        node: &Node<L, M>,
        log: Option<FlashLog<B>>,
        seed: u64,
        names_kept: usize,
    ) -> Maintenance<B> {
        let flash = log.map(|log| Flash::new(node, log));
        node.set_names_kept(names_kept + 1);
        let divided = node.memory_limit();
        let maintenance = Maintenance {
            schedule: RecordedSchedule::new(flash.is_some(), seed, names_kept + 1),
            flash,
            following: Following { divided, resizing: None, uneven: false },
        };
        maintenance.publish(node);
        maintenance
    }

    /// Does a little. Whoever calls it again at once, as long as it says so, has everything done that is due.
    pub fn turn<L: LockKind, M: Resizable>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        io: &mut (impl SegmentIo + StateIo),
        fx: &mut impl MaintenanceEffects,
    ) -> Turn {
        let Maintenance { flash, following, schedule } = self;
        schedule.turn(now, &mut Doing { node, flash: flash.as_mut(), following, io, fx })
    }

    /// A shard has called since the last turn.
    pub fn wake(&mut self) {
        self.schedule.wake();
    }

    /// What came of fitting a model of `app`. Another turn is due then.
    pub fn fitted<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        app: AppId,
        model: Option<Model>,
    ) {
        self.schedule.fitted(now, &mut OneByOne(node), app, model);
    }

    /// Whether [`Maintenance::fitted`] is awaited.
    pub fn is_fitting(&self) -> bool {
        self.schedule.is_fitting()
    }

    fn publish<L: LockKind, M: ObjectMemory>(&self, node: &Node<L, M>) {
        if let Some(flash) = &self.flash {
            flash.publish(node);
        }
    }

    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: crate::kv::Planted) {
        self.schedule.plant(fault);
    }

    // ---- records ----

    /// Records from now on, the log on a tape of its own, if there is one; both must be new.
    pub fn record(&mut self, log: Option<Tape>, own: MachineTape) {
        if let (Some(flash), Some(tape)) = (&mut self.flash, log) {
            flash.log.record(tape);
        }
        self.schedule.record(own);
    }

    /// Ends recording, and says how many records the streams have: that of the log, if there is one, then its own.
    pub fn end_recording(&mut self) -> Vec<u64> {
        let log = self.flash.as_mut().map(|flash| flash.log.end_recording().unwrap_or(0));
        log.into_iter().chain([self.schedule.end_recording().unwrap_or(0)]).collect()
    }

    /// A step of the log as a replay takes it, and what was decided in it. `None` without flash.
    pub fn replay<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        io: &mut impl SegmentIo,
        follow: &mut impl Follow,
    ) -> Option<Decision> {
        let flash = self.flash.as_mut()?;
        Some(flash.log.decide(now, &mut Followed { node, follow }, io).1)
    }

    // ---- a stop ----

    /// Writes out what is staged, however little, after the last request and behind the end of the record. Where names cannot be kept
    /// it is not written: it is not on flash then.
    pub fn drain<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        io: &mut (impl SegmentIo + StateIo),
    ) {
        if !self.keep_names(node, io) {
            return;
        }
        if let Some(flash) = &mut self.flash {
            flash.drain(now, node, io);
        }
    }

    /// The log. `None` without flash.
    pub fn log(&self) -> Option<&FlashLog<B>> {
        self.flash.as_ref().map(|flash| &*flash.log)
    }

    /// The log, for tests and for what a stop alone does.
    pub fn log_mut(&mut self) -> Option<&mut FlashLog<B>> {
        self.flash.as_mut().map(|flash| flash.log.unrecorded())
    }

    /// Names, if they can be kept, and the budget are on disk, before so many bytes more are written.
    pub fn keep_ahead<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        bytes: u64,
        io: &mut impl StateIo,
    ) {
        if let Some(flash) = &mut self.flash {
            flash.keep_budget(now, bytes, io);
        }
        self.keep_names(node, io);
    }

    /// Returns false if they are to be kept and could not be.
    fn keep_names<L: LockKind, M: ObjectMemory>(
        &mut self,
        node: &Node<L, M>,
        io: &mut impl StateIo,
    ) -> bool {
        self.flash.is_none() || self.schedule.keep_names(names_known(node), || keep_names(node, io))
    }

    /// So many bytes were written beside the segments; what the budget must remember is on disk.
    pub fn charge<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        bytes: u64,
        io: &mut impl StateIo,
    ) {
        let Some(flash) = &mut self.flash else { return };
        flash.log.unrecorded().budget_mut().charge(now.mono, bytes);
        flash.keep_what_is(now, io);
        self.publish(node);
    }
}

/// What a step of a log came to.
pub(super) struct LogStepped {
    /// There may be more to do.
    pub(super) worked: bool,
    /// The drive is out of use since writes fail.
    pub(super) degraded: bool,
    /// The turn is this other drive's, and there is something to do.
    pub(super) passed: Option<usize>,
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> Flash<B> {
    pub(super) fn new<L: LockKind, M: ObjectMemory>(
        node: &Node<L, M>,
        log: FlashLog<B>,
    ) -> Flash<B> {
        let capacity = ByteSize(log.flash().capacity());
        let segment_bytes = u64::from(log.flash().segment_bytes);
        node.join(log.part().drive);
        Flash {
            kept_budget: KeptBudget::new(log.budget(), capacity, segment_bytes),
            log: RecordedLog::new(log),
            segment_bytes,
            looked: (0, false),
            told: (0, Nanos::ZERO),
        }
    }

    pub(super) fn drive(&self) -> usize {
        self.log.part().drive
    }

    pub(super) fn segment_bytes(&self) -> u64 {
        self.segment_bytes
    }

    pub(super) fn log(&self) -> &FlashLog<B> {
        &self.log
    }

    pub(super) fn log_mut(&mut self) -> &mut FlashLog<B> {
        self.log.unrecorded()
    }

    pub(super) fn publish<L: LockKind, M: ObjectMemory>(&self, node: &Node<L, M>) {
        node.publish(LogReport {
            drive: self.drive(),
            capacity: self.log.flash().capacity(),
            stats: *self.log.stats(),
            memory_bytes: self.log.memory_bytes(),
            unkept_budgets: self.kept_budget.failed(),
            budget: Some(self.log.budget().clone()),
        });
    }

    /// One step of the log.
    pub(super) fn step<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        io: &mut impl SegmentIo,
    ) -> LogStepped {
        let drive = self.drive();
        node.set_making_room(drive, true);
        let mut shards = InTurn { node, whose: drive, passed: None };
        let step = self.log.step(now, &mut shards, &mut Busy { node, drive, io });
        node.set_making_room(drive, step == Step::Worked);
        self.publish(node);
        let degraded = self.log.stats().degraded;
        LogStepped { worked: step == Step::Worked, degraded, passed: shards.passed }
    }

    /// Writes out what is staged.
    pub(super) fn drain<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        io: &mut (impl SegmentIo + StateIo),
    ) {
        // The padding of two segments.
        self.keep_budget(now, 2 * self.segment_bytes, io);
        self.log.unrecorded().drain(now, &mut OneByOne(node), io);
        self.publish(node);
    }

    /// The file of the write budget says what is.
    pub(super) fn keep_what_is(&mut self, now: Now, io: &mut impl StateIo) {
        let state = self.log.unrecorded().budget_mut().state(now.mono);
        let written = io.keep_budget(state);
        self.kept_budget.kept(now.mono, state, written);
    }

    /// The file of the write budget is ahead of what is written, before so many bytes more are.
    pub(super) fn keep_budget(&mut self, now: Now, bytes: u64, io: &mut impl StateIo) {
        if let Some(state) = self.kept_budget.due(now.mono, self.log.budget(), bytes) {
            let written = io.keep_budget(state);
            self.kept_budget.kept(now.mono, state, written);
        }
    }
}

fn names_known<L: LockKind, M>(node: &Node<L, M>) -> usize {
    node.names_known.load(std::sync::atomic::Ordering::Acquire)
}

/// How many names there are now that they are kept, the default's included. `None` if they could not be.
fn keep_names<L: LockKind, M: ObjectMemory>(
    node: &Node<L, M>,
    io: &mut impl StateIo,
) -> Option<usize> {
    let names = node.names();
    let kept = io.keep_names(&names).then_some(names.len() + 1);
    if let Some(kept) = kept {
        node.set_names_kept(kept);
    }
    kept
}

impl Following {
    /// One step towards the limit on the memory that was set last. Returns whether there are more.
    fn step<L: LockKind, M: Resizable>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        fx: &mut impl MaintenanceEffects,
    ) -> bool {
        let limit = node.memory_limit();
        if limit == self.divided && !self.uneven {
            return false;
        }
        let Some(plan) = node.plan() else { return false };
        let resizing = match &mut self.resizing {
            Some(resizing) => resizing,
            None => match Resizing::new(*plan, limit, !node.evicts()) {
                Ok(resizing) => self.resizing.insert(resizing),
                Err(why) => return self.refuse(node, limit, why.into(), fx),
            },
        };
        let shard = match resizing.next(limit) {
            Ok(Next::Shard(shard)) => shard,
            Ok(Next::Done(limit)) => {
                (self.resizing, self.uneven, self.divided) = (None, false, limit);
                fx.memory_followed(limit);
                return false;
            }
            Err(why) => return self.refuse(node, limit, why.into(), fx),
        };
        let mut locked = node.lock(shard);
        let stepped = resizing.step(now, shard, locked.unrecorded());
        if stepped.as_ref().is_ok_and(|there| *there) {
            fx.resized(locked.unrecorded().object_memory_mut());
        }
        drop(locked);
        if node.is_watched() {
            tell(now, node, shard, fx);
        }
        match stepped {
            Ok(_) => self.uneven = true,
            Err(why) => {
                let wanted = resizing.limit();
                return self.refuse(node, wanted, why.into(), fx);
            }
        }
        true
    }

    /// The limit `wanted` cannot be had: shards that have gone some of the way are taken back, once.
    fn refuse<L: LockKind, M>(
        &mut self,
        node: &Node<L, M>,
        wanted: u64,
        why: MemoryError,
        fx: &mut impl MaintenanceEffects,
    ) -> bool {
        fx.memory_refused(self.divided, why);
        self.resizing = None;
        self.uneven &= wanted != self.divided;
        // What a client has set since stays.
        node.memory.compare_exchange(wanted, self.divided, Relaxed, Relaxed).ok();
        self.uneven
    }
}

/// What the schedule wants done, with shards, log and files.
struct Doing<'a, L: LockKind, M, B, I, F> {
    node: &'a Node<L, M>,
    flash: Option<&'a mut Flash<B>>,
    following: &'a mut Following,
    io: &'a mut I,
    fx: &'a mut F,
}

impl<L: LockKind, M: ObjectMemory, B, I, F> Trained for Doing<'_, L, M, B, I, F> {
    type Model = Model;

    fn count(&self) -> usize {
        self.node.shards()
    }
    fn training_due(&mut self, shard: usize, now: Now) -> Option<AppId> {
        OneByOne(self.node).training_due(shard, now)
    }
    fn take_training_set(&mut self, shard: usize, app: AppId, now: Now) -> Option<TrainingSet> {
        OneByOne(self.node).take_training_set(shard, app, now)
    }
    fn install(&mut self, shard: usize, app: AppId, model: Model, now: Now) {
        OneByOne(self.node).install(shard, app, model, now);
    }
}

impl<L, M, B, I, F> Around for Doing<'_, L, M, B, I, F>
where
    L: LockKind,
    M: Resizable,
    B: AsRef<[u8]> + AsMut<[u8]>,
    I: SegmentIo + StateIo,
    F: MaintenanceEffects,
{
    fn crawler(&mut self) -> Crawler {
        self.node.crawler.report()
    }
    fn expire(&mut self, now: Now, shard: usize, all: bool) -> Option<Expired> {
        let mut shard = self.node.lock(shard);
        if !shard.expiry_is_due(now, all) {
            return None;
        }
        let was_under_way = shard.is_expiring();
        Some(Expired { was_under_way, more: shard.expire(now, all) })
    }
    fn crawled(&mut self) {
        self.node.crawler.done();
    }
    fn names_known(&mut self) -> usize {
        names_known(self.node)
    }
    fn keep_names(&mut self) -> Option<usize> {
        keep_names(self.node, self.io)
    }
    fn keep_budget(&mut self, now: Now, segments: u64) {
        if let Some(flash) = &mut self.flash {
            flash.keep_budget(now, segments * flash.segment_bytes, self.io);
        }
    }
    fn step(&mut self, now: Now) -> Stepped {
        let Some(flash) = &mut self.flash else {
            return Stepped { worked: false, degraded: false };
        };
        let stepped = flash.step(now, self.node, self.io);
        if let Some(to) = stepped.passed {
            self.fx.pass(to);
        }
        let written = flash.log.stats().segments_written;
        if written != flash.looked.0 {
            let full = self.node.index_full();
            if full.is_some() != flash.looked.1 {
                self.fx.index_full(full);
            }
            flash.looked = (written, full.is_some());
        }
        Stepped { worked: stepped.worked, degraded: stepped.degraded }
    }
    fn degraded(&mut self, degraded: bool) {
        self.fx.degraded(degraded);
    }
    fn free_room(&mut self, now: Now, shard: usize) -> bool {
        // The log may not work: nobody is to wait for it.
        if let Some(flash) = &self.flash {
            self.node.set_making_room(flash.drive(), false);
        }
        self.node.lock(shard).make_free_room(now)
    }
    fn made_room(&mut self, now: Now) {
        if self.node.is_watched() {
            (0..self.node.shards()).for_each(|shard| tell(now, self.node, shard, self.fx));
        }
    }
    fn hand_on(&mut self, now: Now) {
        if let Some(flash) = &mut self.flash
            && now.mono >= flash.told.1
        {
            let all = self.node.too_large();
            if all.objects > flash.told.0 {
                flash.told = (all.objects, now.mono + TOO_LARGE_EVERY);
                self.fx.too_large(all);
            }
        }
        if self.node.recording.load(Relaxed) {
            self.node.flush_chunk();
            if let Some(flash) = &mut self.flash {
                flash.log.flush_chunk();
            }
        }
    }
    fn follow_limit(&mut self, now: Now) -> bool {
        self.following.step(now, self.node, self.fx)
    }
    fn train(&mut self, samples: TrainingSet, seed: u64) {
        self.fx.train(samples, seed);
    }
}

/// Tells what a shard has noted, once it is unlocked.
fn tell<L: LockKind, M: ObjectMemory>(
    now: Now,
    node: &Node<L, M>,
    shard: usize,
    fx: &mut impl MaintenanceEffects,
) {
    let (evicted, lost) = node.take_evicted(shard);
    if !evicted.is_empty() || lost > 0 {
        fx.evicted(now, evicted, lost);
    }
}
