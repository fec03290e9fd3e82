//! What one thread does beside the requests: it owns the flash log with its write budget, when classifiers are trained, which
//! expired objects leave, the way to another limit of the memory, and what must be on disk ahead of all that.
//!
//! Nobody else has the log, so nobody waits for a segment that is written. What others want to know of it is a copy of its counters,
//! which is published in the node after each step. The thread calls [`Maintenance::turn`], which does little each time and says
//! when to come again. It may block: on I/O of whole segments ([`SegmentIo`]) and of small files ([`StateIo`]), never on a request.
//!
//! Without flash it keeps room free ahead of writes in the same way.

use larder_base::lock::{Lock, LockKind};
use larder_base::{AppId, ByteSize, Nanos, Now};
use larder_policy::budget::{BudgetState, KeptBudget, WriteBudget};
use larder_policy::learn::{Model, TrainingSet};

use super::expiry::Expiring;
use super::node::{Follow, Followed, MemoryError, Node, OneByOne};
use super::resizing::{Next, Resizing};
use super::training::Training;
use crate::dram::ObjectMemory;
use crate::kv::evicted::Evicted;
use crate::kv::log::{FlashLog, LogStats, SegmentIo, Step};
use crate::kv::record::{Decision, RecordedLog, Tape};
use crate::kv::resize::Resizable;

/// It looks at everything this often at least.
const EVERY: Nanos = Nanos::from_secs(1);
/// Turns that find room wanting, after which training is seen to all the same.
const BUSY: u32 = 1024;

/// Small files, as an argument. What cannot be written is told the operator by who carries it out; the next start knows less then.
pub trait StateIo {
    /// Keeps which number stands for which application, by number from 1 on, before a record on flash bears a new one.
    fn keep_names(&mut self, names: &[Vec<u8>]);
    /// Keeps what the write budget must remember over a kill, before what it speaks of is written.
    fn keep_budget(&mut self, state: BudgetState);
}

/// Takes what maintenance gives out.
pub trait MaintenanceEffects {
    /// Fit a model of these samples, with this seed: [`Maintenance::fitted`] is told what came of it. It may take long, and is not
    /// asked for again before.
    fn train(&mut self, samples: TrainingSet, seed: u64);
    /// These were evicted from DRAM, and `lost` more that are not known by name.
    fn evicted(&mut self, _now: Now, _evicted: Vec<Evicted>, _lost: u64) {}
    /// Flash is out of use since writes fail, or in use again.
    fn degraded(&mut self, _degraded: bool) {}
    /// All shards have what the limit on the memory gives them.
    fn memory_followed(&mut self, _limit: u64) {}
    /// The limit on the memory stays at `limit`.
    fn memory_refused(&mut self, _limit: u64, _why: MemoryError) {}
    /// The memory of a shard's objects, which has another size now. Its lock is held.
    fn resized(&mut self, _memory: &mut [u8]) {}
}

/// When the next turn is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// At once: there is more to do.
    Again,
    /// Then, or as soon as a shard calls.
    At(Nanos),
}

/// What is published of the log.
#[derive(Clone, Debug, Default)]
pub struct LogReport {
    /// Its counters.
    pub stats: LogStats,
    /// Bytes of memory that it takes.
    pub memory_bytes: usize,
    pub(super) budget: Option<WriteBudget>,
}

/// The log, and what must be known of it on disk.
struct Flash<B> {
    log: RecordedLog<B>,
    kept_budget: KeptBudget,
    segment_bytes: u64,
    /// How many applications are known on disk, the default included.
    names_kept: usize,
    degraded: bool,
}

/// Owned by one thread. See the [module](self).
pub struct Maintenance<B> {
    flash: Option<Flash<B>>,
    expiring: Expiring,
    training: Training,
    /// The limit that the shards have.
    divided: u64,
    resizing: Option<Resizing>,
    /// Shards may differ from that limit: a change was begun.
    uneven: bool,
    /// The last turn found nothing more to do.
    rested: bool,
    /// Some shard may be short of room.
    wanted: bool,
    /// The shard for which room is made next, without flash.
    room_at: usize,
    /// Turns in a row that made room.
    busy: u32,
    next: Nanos,
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
        let flash = log.map(|log| {
            let capacity = ByteSize(log.flash().capacity());
            let segment_bytes = u64::from(log.flash().segment_bytes);
            Flash {
                kept_budget: KeptBudget::new(log.budget(), capacity, segment_bytes),
                log: RecordedLog::new(log),
                segment_bytes,
                names_kept: names_kept + 1,
                degraded: false,
            }
        });
        let maintenance = Maintenance {
            flash,
            expiring: Expiring::default(),
            training: Training::new(seed),
            divided: node.memory_limit(),
            resizing: None,
            uneven: false,
            rested: true,
            wanted: false,
            room_at: 0,
            busy: 0,
            next: Nanos::ZERO,
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
        self.wanted |= std::mem::take(&mut self.rested);
        let mut again = self.expiring.step(now, node);
        if self.wanted {
            self.wanted = self.make_room(now, node, io, fx);
            again |= self.wanted;
        }
        self.busy = if self.wanted { self.busy + 1 } else { 0 };
        if now.mono >= self.next && node.recording.load(std::sync::atomic::Ordering::Relaxed) {
            // So that a quiet shard's last requests are in the file too.
            node.flush_chunk();
            if let Some(flash) = &mut self.flash {
                flash.log.flush_chunk();
            }
        }
        again |= self.follow_limit(now, node, fx);
        // What is wanted at once goes first.
        if (!self.wanted || self.busy > BUSY) && self.training.is_due(now.mono) {
            self.busy = 0;
            if let Some((samples, seed)) = self.training.look(now, &mut OneByOne(node)) {
                fx.train(samples, seed);
            }
        }
        if now.mono >= self.next || !again {
            self.next = now.mono + EVERY;
        }
        if again {
            return Turn::Again;
        }
        self.rested = true;
        let training = if self.training.is_fitting() { self.next } else { self.training.next() };
        Turn::At(self.next.min(training))
    }

    /// A shard has called since the last turn.
    pub fn wake(&mut self) {
        self.wanted = true;
    }

    /// What came of fitting a model of `app`. Another turn is due then.
    pub fn fitted<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        app: AppId,
        model: Option<Model>,
    ) {
        self.training.fitted(now, &mut OneByOne(node), app, model);
    }

    /// Whether [`Maintenance::fitted`] is awaited.
    pub fn is_fitting(&self) -> bool {
        self.training.is_fitting()
    }

    /// One step towards the room that shards want. Returns whether there may be more to do.
    fn make_room<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        io: &mut (impl SegmentIo + StateIo),
        fx: &mut impl MaintenanceEffects,
    ) -> bool {
        let more = match &mut self.flash {
            Some(flash) => {
                flash.keep_names(node, io);
                // What one step may take from the budget: three segments, and what one has for padding.
                flash.keep_budget(now, 4 * flash.segment_bytes, io);
                let step = flash.log.step(now, &mut OneByOne(node), io);
                let degraded = flash.log.stats().degraded;
                if std::mem::replace(&mut flash.degraded, degraded) != degraded {
                    fx.degraded(degraded);
                }
                self.publish(node);
                step == Step::Worked
            }
            None => loop {
                if self.room_at == node.shards() {
                    self.room_at = 0;
                    break false;
                }
                if node.lock(self.room_at).make_free_room(now) {
                    break true;
                }
                self.room_at += 1;
            },
        };
        if node.is_watched() {
            (0..node.shards()).for_each(|shard| tell(now, node, shard, fx));
        }
        more
    }

    /// One step towards the limit on the memory that was set last. Returns whether there are more.
    fn follow_limit<L: LockKind, M: Resizable>(
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
        use std::sync::atomic::Ordering::Relaxed;
        fx.memory_refused(self.divided, why);
        self.resizing = None;
        self.uneven &= wanted != self.divided;
        // What a client has set since stays.
        node.memory.compare_exchange(wanted, self.divided, Relaxed, Relaxed).ok();
        self.uneven
    }

    fn publish<L: LockKind, M>(&self, node: &Node<L, M>) {
        let Some(flash) = &self.flash else { return };
        let memory_bytes = flash.log.memory_bytes();
        let mut report = node.report.lock();
        report.stats = *flash.log.stats();
        report.memory_bytes = memory_bytes;
        report.budget = Some(flash.log.budget().clone());
    }

    // ---- records ----

    /// Records the log from now on; it must be new.
    pub fn record(&mut self, tape: Tape) {
        if let Some(flash) = &mut self.flash {
            flash.log.record(tape);
        }
    }

    /// Ends recording of the log, and says how many records its stream has.
    pub fn end_recording(&mut self) -> Option<u64> {
        self.flash.as_mut()?.log.end_recording()
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

    /// Writes out what is staged, however little, after the last request and behind the end of the record.
    pub fn drain<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        io: &mut (impl SegmentIo + StateIo),
    ) {
        let Some(flash) = &mut self.flash else { return };
        flash.keep_names(node, io);
        // The padding of two segments.
        flash.keep_budget(now, 2 * flash.segment_bytes, io);
        flash.log.unrecorded().drain(now, &mut OneByOne(node), io);
        self.publish(node);
    }

    /// The log. `None` without flash.
    pub fn log(&self) -> Option<&FlashLog<B>> {
        self.flash.as_ref().map(|flash| &*flash.log)
    }

    /// The log, for tests and for what a stop alone does.
    pub fn log_mut(&mut self) -> Option<&mut FlashLog<B>> {
        self.flash.as_mut().map(|flash| flash.log.unrecorded())
    }

    /// Names and budget are on disk, before so many bytes more are written.
    pub fn keep_ahead<L: LockKind, M: ObjectMemory>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        bytes: u64,
        io: &mut impl StateIo,
    ) {
        if let Some(flash) = &mut self.flash {
            flash.keep_budget(now, bytes, io);
            flash.keep_names(node, io);
        }
    }

    /// So many bytes were written beside the segments; what the budget must remember is on disk.
    pub fn charge<L: LockKind, M>(
        &mut self,
        now: Now,
        node: &Node<L, M>,
        bytes: u64,
        io: &mut impl StateIo,
    ) {
        let Some(flash) = &mut self.flash else { return };
        let budget = flash.log.unrecorded().budget_mut();
        budget.charge(now.mono, bytes);
        io.keep_budget(budget.state(now.mono));
        self.publish(node);
    }
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> Flash<B> {
    /// Records on flash bear numbers of applications, and must not outlive what they mean.
    fn keep_names<L: LockKind, M: ObjectMemory>(
        &mut self,
        node: &Node<L, M>,
        io: &mut impl StateIo,
    ) {
        let known = node.names_known.load(std::sync::atomic::Ordering::Acquire);
        if self.names_kept != known {
            let names = node.names();
            self.names_kept = names.len() + 1;
            io.keep_names(&names);
        }
    }

    /// The file of the write budget is ahead of what is written, before so many bytes more are.
    fn keep_budget(&mut self, now: Now, bytes: u64, io: &mut impl StateIo) {
        if let Some(state) = self.kept_budget.due(now.mono, self.log.budget(), bytes) {
            io.keep_budget(state);
            self.kept_budget.kept(now.mono, state);
        }
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
