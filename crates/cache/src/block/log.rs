//! The thread of maintenance: what the engine's machine asks for beside the queues' work is carried out here, in the order of the
//! engine's [`round`](larder_engine::block::node::round). No client waits for it, but for the first write to a cached line of a region
//! that was quiet.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use larder_base::Nanos;
use larder_engine::block::node;
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::event::ShardIo;
use larder_engine::block::node::failing::FlashError;
use larder_engine::block::node::maintenance::takeback::{Again, Anew, NotTakenBack};
use larder_engine::block::node::maintenance::{
    AtNode, Effects, Left, Maintenance, Pace, Turn, Work,
};
use larder_engine::block::node::operator::steps::{Change, Recorded};
use larder_engine::block::node::record::RecordedMaintenance;
use larder_engine::block::node::round::{self, Rounds};
use larder_engine::block::{IoFailed, IoId, LogIo, SlotId};
use larder_format::PAGE_SIZE;
use larder_format::block::BlockSuperblock;
use larder_format::block::superblock::WrittenBack;
use larder_policy::block::VolumeId;
use larder_runtime::{AlignedBuf, Device, FileOp, FileQueue, FlashDevice, Payload, plain};
use slab::Slab;

use super::budget::{BudgetFile, Purse};
use super::cached::{aligned, crcs};
use super::flusher::Flusher;
use super::notes::note_given_up;
use super::shard::{Copying, Daemon, Fill, Load};
use super::{Core, locked};

/// Tapes are handed on so often.
const HAND_ON: Nanos = Nanos::from_secs(1);
/// Something to be done on the log's thread.
pub(super) type Task = Box<dyn FnOnce(&mut LogThread) + Send>;

/// The device, as the log uses it.
pub(super) struct CacheIo<'a>(&'a FlashDevice);

/// What is written counts against the write budget before it is written: who is killed in between has gained nothing.
pub(super) type ChargedIo<'a> = Charged<CacheIo<'a>, Purse<'a>>;

impl CacheIo<'_> {
    pub(super) fn of<'a>(device: &'a FlashDevice, purse: Purse<'a>, now: Nanos) -> ChargedIo<'a> {
        Charged::new(CacheIo(device), purse, now)
    }
}

impl LogIo for CacheIo<'_> {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        self.0.read_at(at, out).map_err(|error| {
            tracing::warn!(%error, "the map of the cache cannot be read");
            IoFailed
        })
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        self.0.write_at(at, bytes).map_err(|error| {
            tracing::warn!(%error, "the map of the cache cannot be written");
            IoFailed
        })
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        self.0.sync().map_err(|error| {
            tracing::warn!(%error, "the cache device cannot be made durable");
            IoFailed
        })
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        self.0.punch(at, len).map_err(|error| {
            tracing::warn!(%error, "no hole can be made in the file of the cache");
            IoFailed
        })
    }

    fn next_data(&mut self, at: u64) -> Option<u64> {
        self.0.next_data(at)
    }
}

/// An I/O of lines that no client waits for.
enum Job {
    /// The first half of a copy.
    Read(Copying),
    /// A fill, or the second half: whose, and the bytes.
    Write(ShardIo, Payload),
    /// A page of the table.
    Load(Load),
}

impl Job {
    fn io(&self) -> ShardIo {
        match *self {
            Job::Read(Copying { shard, io, .. }) | Job::Load(Load { shard, io, .. }) => {
                ShardIo { shard, io }
            }
            Job::Write(io, _) => io,
        }
    }
}

/// A flush of a store that maintenance has asked for.
struct Flushing {
    store: VolumeId,
    number: u64,
    /// Who does it, and under which number of its own. None if the volume was gone already.
    by: Option<(Arc<Flusher>, u64)>,
}

impl Flushing {
    fn ended(&self) -> Option<bool> {
        self.by.as_ref().map_or(Some(false), |(flusher, number)| flusher.is_durable(*number))
    }
}

/// Carries out what maintenance asks for.
struct Carrier {
    cache: Arc<Core>,
    fills: FileQueue,
    /// Fills and copies under way, by token.
    writing: Slab<Job>,
    flushing: Vec<Flushing>,
}

/// Whether what was given up of a volume was recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GaveUp {
    Done,
    /// The superblock has no room for so much.
    NoRoom,
    /// It could not be written.
    NotDurable,
}

pub(super) struct LogThread {
    cache: Arc<Core>,
    machine: RecordedMaintenance,
    carrier: Carrier,
    budget: BudgetFile,
    /// When the tapes were last handed on.
    handed_on: Nanos,
}

impl Carrier {
    fn begin(&mut self, job: Job) -> u64 {
        self.writing.insert(job) as u64
    }

    fn write(&mut self, (shard, io): (u32, IoId), slot: SlotId, bytes: Payload) {
        let data = aligned(bytes);
        let token = self.begin(Job::Write(ShardIo { shard, io }, data.clone()));
        let offset = self.cache.layout.slot_at(shard, slot.0);
        self.fills.submit(token, &self.cache.file, FileOp::Write { offset, data, durable: false });
    }

    fn read(&mut self, job: Job, offset: u64, bytes: usize) {
        let token = self.begin(job);
        let buf = AlignedBuf::zeroed(bytes);
        self.fills.submit(token, &self.cache.file, FileOp::Read { offset, buf });
    }

    /// A flush of a store that has ended.
    fn flushed(&mut self) -> Option<(VolumeId, u64, bool)> {
        let ended = |(at, flush): (usize, &Flushing)| flush.ended().map(|durable| (at, durable));
        let (at, durable) = self.flushing.iter().enumerate().find_map(ended)?;
        let Flushing { store, number, .. } = self.flushing.swap_remove(at);
        Some((store, number, durable))
    }
}

impl Effects<Payload> for Carrier {
    fn fill(&mut self, Fill { shard, io, slot, bytes, .. }: Fill) {
        self.write((shard, io), slot, bytes);
    }

    fn copy(&mut self, copying: Copying) {
        let bytes = copying.lines as usize * self.cache.line_bytes() as usize;
        let from = self.cache.layout.slot_at(copying.shard, copying.from.0);
        self.read(Job::Read(copying), from, bytes);
    }

    fn load(&mut self, load: Load) {
        let at = self.cache.layout.table_at(load.shard, load.page);
        self.read(Job::Load(load), at, PAGE_SIZE);
    }

    fn store_flush(&mut self, store: VolumeId, number: u64) {
        let volume = self.cache.volumes().into_iter().find(|v| v.id == store);
        let by = volume.map(|v| (v.flusher.clone(), v.flusher.want()));
        self.flushing.push(Flushing { store, number, by });
    }

    fn disown(&mut self) {
        self.cache.region.disown();
    }

    fn note_given_up(&mut self, superblock: &BlockSuperblock) -> Result<(), String> {
        let dir = &self.cache.config.state_dir;
        // What is noted in a directory that has taken its place no start would find.
        match self.cache.state_dir_trouble() {
            Some(trouble) => Err(trouble),
            None => note_given_up(dir, superblock).map_err(|e| plain(&e).to_string()),
        }
    }

    fn unnoted(&mut self, why: Option<&str>) {
        let dir = self.cache.config.state_dir.display();
        let now = why.map(str::to_owned);
        let before = std::mem::replace(&mut *locked(&self.cache.node_limits.not_noted), now);
        match why {
            Some(error) if before.is_none() => tracing::error!(
                "it cannot be noted in '{dir}' that the cache was given up ({error}): it is tried again; until it is, format the device \
                 before a start uses it"
            ),
            None if before.is_some() => {
                tracing::info!("it is noted in '{dir}' that the cache was given up");
            }
            _ => {}
        }
    }

    fn given_up(&mut self, why: &str) {
        *locked(&self.cache.node_limits.given_up) = Some(why.to_owned());
        tracing::error!(
            "the cache is given up: {why}. Volumes go on without it (pass-through); replace the cache device, format \
             it and start again, or, when it works again, `larder block take-back`"
        );
        self.cache.enabled.store(false, Ordering::SeqCst);
        self.cache.close_log("the cache was given up");
    }

    fn not_durable(&mut self, store: VolumeId) {
        if let Some(volume) = self.cache.volumes().into_iter().find(|v| v.id == store) {
            tracing::warn!(
                "volume '{}': its store has not said that what was written to it last is durable: if it loses that, it loses writes that were \
                 answered and not flushed. The next start reads what was written then from the store",
                volume.name
            );
        }
    }

    fn identity(&mut self, volume: &str) -> Option<[u8; 64]> {
        self.cache.volume(volume).map(|attached| attached.identity())
    }

    fn stopped(&mut self) {
        self.cache.region.release();
        tracing::info!("the cache is stopped; the next start finds it as it is");
    }

    fn sweeping(&mut self, late: bool) {
        if late {
            tracing::info!(
                "lines of ranges that were trimmed are left in the map: the next start drops what is cached in these regions"
            );
        } else {
            tracing::info!(
                "stopping: lines of trimmed ranges are taken out of the map, for {} s at most",
                Pace::default().sweep.as_secs_f64()
            );
        }
    }
}

/// The machine, and what it is called with.
macro_rules! parts {
    ($thread:expr) => {{
        let LogThread { cache, machine, carrier, budget, .. } = $thread;
        let shards = AtNode::<Daemon, Core>::new(cache, cache.layout.shards);
        let now = cache.now();
        let purse = Purse { limits: &cache.node_limits.limits, file: budget };
        (now, machine, shards, CacheIo::of(&cache.device, purse, now), carrier)
    }};
}

impl LogThread {
    /// Without a log the cache has been given up; `superblock` is what it had.
    pub(super) fn new(
        cache: Arc<Core>,
        log: Option<node::StoredLog>,
        superblock: BlockSuperblock,
        fills: FileQueue,
        budget: BudgetFile,
    ) -> LogThread {
        let carrier =
            Carrier { cache: cache.clone(), fills, writing: Slab::new(), flushing: Vec::new() };
        let machine = Maintenance::new(Pace::default(), log, superblock);
        let mut machine = RecordedMaintenance::new(machine);
        if let Some(tape) = cache.maintenance_tape() {
            machine.record_beside_log(tape);
        }
        LogThread { cache, machine, carrier, budget, handed_on: Nanos::ZERO }
    }

    pub(super) fn cache(&self) -> &Arc<Core> {
        &self.cache
    }

    /// The cache is used again: see [`take_back`](larder_engine::block::node::maintenance::takeback::take_back).
    ///
    /// # Errors
    /// Those of it.
    pub(super) fn begin_anew(
        &mut self,
        again: Again,
        anew: &mut impl Anew,
    ) -> Result<(), NotTakenBack> {
        let (_, machine, _, mut io, _) = parts!(self);
        let outcome = machine.take_back(again, &mut io, anew);
        self.publish();
        outcome
    }

    /// The superblock in force; none when the cache was given up.
    pub(super) fn superblock(&self) -> Option<&BlockSuperblock> {
        self.machine.superblock()
    }

    /// See [`Maintenance::line_space`].
    pub(super) fn line_space(&self) -> Option<&BlockSuperblock> {
        self.machine.line_space()
    }

    /// See [`Change::make`].
    pub(super) fn make(&mut self, change: &Change) -> Recorded {
        let (now, machine, mut shards, mut io, fx) = parts!(self);
        change.make(machine, now, &mut shards, &mut io, fx)
    }

    /// What the superblock says of a volume that writes back is changed, durably. `new` makes it of the next attachment number, which is
    /// never used again. Returns it as it is now; nothing if that could not be written.
    pub(super) fn change_write_back(
        &mut self,
        name: &str,
        new: impl Fn(u32) -> WrittenBack,
    ) -> Option<WrittenBack> {
        self.change_volume(name, |sb, at| {
            sb.attachments += 1;
            sb.volumes[at].write_back = Some(new(sb.attachments));
        })
    }

    /// The same of one that there is.
    pub(super) fn change_write_back_of(
        &mut self,
        name: &str,
        change: impl Fn(WrittenBack) -> WrittenBack,
    ) -> Option<WrittenBack> {
        self.change_volume(name, |sb, at| {
            let volume = &mut sb.volumes[at];
            volume.write_back = volume.write_back.map(&change);
        })
    }

    /// What was given up of the volume with this attachment number is this, durably.
    pub(super) fn give_up(&mut self, attachment: u32, given: &[(u64, u64)]) -> GaveUp {
        let (now, machine, mut shards, mut io, fx) = parts!(self);
        let mut fits = true;
        let change = |sb: &mut BlockSuperblock| fits = sb.give_up(attachment, given);
        let durable = machine.change_superblock(now, false, &mut shards, &mut io, fx, change);
        match (fits, durable) {
            (false, _) => GaveUp::NoRoom,
            (true, false) => GaveUp::NotDurable,
            (true, true) => GaveUp::Done,
        }
    }

    fn change_volume(
        &mut self,
        name: &str,
        change: impl Fn(&mut BlockSuperblock, usize),
    ) -> Option<WrittenBack> {
        let (now, machine, mut shards, mut io, fx) = parts!(self);
        let changed = |sb: &mut BlockSuperblock| {
            if let Some(at) = sb.volumes.iter().position(|volume| volume.name == name) {
                change(sb, at);
            }
        };
        let durable = machine.change_superblock(now, false, &mut shards, &mut io, fx, changed);
        let sb = machine.superblock().filter(|_| durable)?;
        sb.volumes.iter().find(|volume| volume.name == name)?.write_back
    }

    /// See [`Maintenance::hurry`].
    pub(super) fn hurry(&mut self, first: u32, last: u32) -> u64 {
        let (now, machine, mut shards, mut io, fx) = parts!(self);
        machine.hurry(now, (first, last), &mut shards, &mut io, fx)
    }

    /// See [`Maintenance::unflushed`].
    pub(super) fn unflushed(&self, first: u32, last: u32) -> Vec<(u32, u32)> {
        self.machine.unflushed(first, last)
    }

    /// See [`Maintenance::unsettled`].
    pub(super) fn unsettled(&mut self) -> usize {
        let (_, machine, mut shards, ..) = parts!(self);
        machine.unsettled(&mut shards)
    }

    /// The volume is put aside.
    pub(super) fn forget_store(&mut self, store: VolumeId) {
        self.machine.forget_store(store);
    }

    pub(super) fn run(mut self) {
        while !matches!(self.wait_and_go_on(), Turn::Over { .. }) {}
    }

    fn wait_and_go_on(&mut self) -> Turn {
        let left = self.wait();
        self.goes_on(left)
    }

    /// One round.
    fn goes_on(&mut self, left: Left<Payload, Task>) -> Turn {
        let turn = round::round(self, left);
        self.publish();
        match turn {
            Turn::Over { .. } => {
                let limits = &self.cache.node_limits.limits;
                Purse { limits, file: &self.budget }.save(self.cache.now());
                self.cache.end_recording();
            }
            _ => self.hand_on_tapes(),
        }
        turn
    }

    /// A round by hand, if one is due.
    pub(super) fn step(&mut self) -> Option<Turn> {
        let mut inbox = locked(&self.cache.log_inbox);
        if self.cache.now() < inbox.mail.due(self.machine.wakes()) {
            return None;
        }
        let left = inbox.mail.take();
        drop(inbox);
        Some(self.goes_on(left))
    }

    /// When the next round is due, by hand.
    pub(super) fn due(&self) -> Nanos {
        locked(&self.cache.log_inbox).mail.due(self.machine.wakes())
    }

    /// Once a second, so that a quiet stream's last records are in the file too.
    fn hand_on_tapes(&mut self) {
        let now = self.cache.now();
        if self.cache.recorder.is_none() || now.saturating_sub(self.handed_on) < HAND_ON {
            return;
        }
        self.handed_on = now;
        self.cache.hand_on_tapes();
        self.machine.flush_chunk();
    }

    /// Waits until the next round is due. Returns what was left for it.
    fn wait(&mut self) -> Left<Payload, Task> {
        let at = self.machine.wakes();
        let mut inbox = locked(&self.cache.log_inbox);
        loop {
            let (until, now) = (inbox.mail.sleep(at), self.cache.now());
            if now >= until {
                return inbox.mail.take();
            }
            let time = Duration::from_nanos(until.saturating_sub(now).0);
            let woken = self.cache.log_wake.wait_timeout(inbox, time);
            inbox = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// What others want to know of the log.
    fn publish(&self) {
        *locked(&self.cache.log_stats) = (self.machine.stats(), self.machine.regions_set() as u64);
    }
}

impl Rounds for LogThread {
    type Bytes = Payload;
    type Task = Task;

    fn now(&self) -> Nanos {
        self.cache.now()
    }

    fn machine(&mut self) -> &mut RecordedMaintenance {
        &mut self.machine
    }

    fn take(&mut self, now: Nanos, work: Work<Payload>) {
        let (_, machine, mut shards, mut io, fx) = parts!(self);
        machine.take(now, work, &mut shards, &mut io, fx);
    }

    fn turn(&mut self, now: Nanos) -> Turn {
        let (_, machine, mut shards, mut io, fx) = parts!(self);
        machine.turn(now, &mut shards, &mut io, fx)
    }

    fn next_flushed(&mut self) -> Option<(VolumeId, u64, bool)> {
        self.carrier.flushed()
    }

    fn begin_io(&mut self) {
        self.carrier.fills.flush();
    }

    fn task(&mut self, task: Task) {
        task(self);
    }

    fn end_io(&mut self) {
        let line = self.cache.line_bytes() as usize;
        while let Some(done) = self.carrier.fills.pop() {
            let Some(job) = self.carrier.writing.try_remove(done.token as usize) else { continue };
            let (now, machine, mut shards, _, carrier) = parts!(&mut *self);
            let cache = &carrier.cache;
            match (job, done.result, done.op) {
                (Job::Load(Load { shard, io, page }), result, op) => {
                    cache.page_read(shard, page, (op, result), |slots| {
                        machine.page_loaded(now, &mut shards, ShardIo { shard, io }, slots);
                    });
                }
                (
                    Job::Read(Copying { shard, io, to: slot, .. }),
                    Ok(()),
                    FileOp::Read { buf, .. },
                ) => {
                    carrier.write((shard, io), slot, Payload::new(buf));
                }
                (Job::Write(io, bytes), Ok(()), _) => {
                    let crcs = crcs(&bytes, line);
                    machine.flash_written(now, &mut shards, io, Ok(&crcs));
                }
                (job, result, op) => {
                    let what = if matches!(op, FileOp::Read { .. }) { "read" } else { "write" };
                    let failed = result
                        .map_or_else(|e| cache.flash_failed(what, &e), |()| FlashError::Device);
                    machine.flash_written(now, &mut shards, job.io(), Err(failed));
                }
            }
        }
        self.carrier.fills.flush();
    }
}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<super::region::Region>();
};
