//! The thread of the map's log, which also writes fills: what no client waits for.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use larder_base::Nanos;
use larder_engine::block::node::attachment;
use larder_engine::block::node::flushes::Flushes;
use larder_engine::block::node::quiet::QUIET;
use larder_engine::block::node::ranged::Bits;
use larder_engine::block::record::{TapedLog, TapedShard};
use larder_engine::block::{
    IoFailed, IoId, LogIo, LogShards, LogStep, MapRecord, SlotId, TableChange,
};
use larder_format::PAGE_SIZE;
use larder_format::block::log::Held;
use larder_format::block::{BlockSuperblock, VolumeState};
use larder_runtime::{AlignedBuf, Device, FileOp, FileQueue, FlashDevice, Payload};

use super::cell::{Copying, Fill, Load, Message, Out};
use super::governor::Governor;
use super::service::{aligned, crcs};
use super::{Cache, LogInbox, locked};

/// How long the thread sleeps at most: then it looks for regions that have become quiet.
const TICK: Duration = Duration::from_millis(200);
/// Fills are nobody's hurry: they are gathered for so long, unless there are [`BATCH`] of them. It saves waking this thread
/// for every line.
const PACE: Duration = Duration::from_millis(2);
/// Nor are records: they are gathered for so long. A batch takes two flushes of the device, and a page of flash for a few
/// records as for many; what it costs is what a power cut takes of the lines that came last.
const RECORDS_PACE: Duration = Duration::from_millis(100);
/// The same where fills wait for slots to be durably empty, or the cleaner for segments.
const COMMIT_PACE: Duration = Duration::from_millis(10);
/// Steps of the log before other things have their turn.
const STEPS: usize = 16;
/// Fills that are begun at once.
pub(super) const BATCH: usize = 64;
/// At the end, fills under way are waited for in turns of so long.
const FILL_WAIT: Duration = Duration::from_millis(100);
/// At the end, lines of ranges that were trimmed are taken out of the map for so long at most.
const SWEEP_WAIT: Duration = Duration::from_secs(3);
/// Tapes are handed on so often.
const HAND_ON: Duration = Duration::from_secs(1);
/// For a backing store to become durable at the end, or when its volume is put aside.
const FLUSH_WAIT: Duration = Duration::from_secs(5);

/// Something to be done on the log's thread.
pub(super) type Errand = Box<dyn FnOnce(&mut LogThread) + Send>;

/// The device, as the log uses it. What it writes counts against the write budget before it is written: who is killed in
/// between has gained nothing.
pub(super) struct CacheIo<'a> {
    pub device: &'a FlashDevice,
    pub governor: &'a Governor,
    pub now: Nanos,
}

impl<'a> CacheIo<'a> {
    pub(super) fn of(cache: &'a Cache) -> CacheIo<'a> {
        CacheIo { device: &cache.device, governor: &cache.governor, now: cache.now() }
    }
}

impl LogIo for CacheIo<'_> {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        self.device.read_at(at, out).map_err(|error| {
            tracing::warn!(%error, "the map of the cache cannot be read");
            IoFailed
        })
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        self.governor.spend_on_log(self.now, bytes.len() as u64);
        self.device.write_at(at, bytes).map_err(|error| {
            tracing::warn!(%error, "the map of the cache cannot be written");
            IoFailed
        })
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        self.device.sync().map_err(|error| {
            tracing::warn!(%error, "the cache device cannot be made durable");
            IoFailed
        })
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        self.device.punch(at, len).map_err(|error| {
            tracing::warn!(%error, "no hole can be made in the file of the cache");
            IoFailed
        })
    }

    fn next_data(&mut self, at: u64) -> Option<u64> {
        self.device.next_data(at)
    }
}

/// An I/O of lines that no client waits for.
enum Job {
    /// The first half of a copy.
    Read(Copying),
    /// A fill, or the second half: whose, and the bytes.
    Write(u32, IoId, Payload),
    /// A page of the table.
    Load(Load),
}

pub(super) struct LogThread {
    cache: Arc<Cache>,
    log: Option<TapedLog>,
    fills: FileQueue,
    /// Fills and copies under way, by token.
    writing: Vec<Option<Job>>,
    free: Vec<usize>,
    out: Out,
    /// Ranges that wait for their bits.
    ranges: Bits,
    /// When records were last written, and whether somebody waits for them.
    logged: Instant,
    commit: bool,
    /// When the tapes were last handed on.
    handed_on: Instant,
    /// Regions that were quiet when a flush of their store was wanted. Stores are known by their volumes' first bytes.
    flushes: Flushes,
    /// Regions whose bits are to go at once, first and last.
    hurried: Option<(u32, u32)>,
    /// Where volumes lie in the line space once the cache was given up: in memory alone.
    former: Option<BlockSuperblock>,
}

impl LogThread {
    /// Without a log the cache has been given up; `superblock` is what it had.
    pub(super) fn new(
        cache: Arc<Cache>,
        log: Option<TapedLog>,
        superblock: BlockSuperblock,
        fills: FileQueue,
    ) -> LogThread {
        LogThread {
            cache,
            former: log.is_none().then_some(superblock),
            log,
            fills,
            writing: Vec::new(),
            free: Vec::new(),
            out: Out::default(),
            ranges: Bits::default(),
            logged: Instant::now(),
            commit: true,
            handed_on: Instant::now(),
            flushes: Flushes::default(),
            hurried: None,
        }
    }

    pub(super) fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// What the cache had when it was given up, if it was.
    pub(super) fn given_up(&self) -> Option<BlockSuperblock> {
        self.former.clone().filter(|_| self.log.is_none())
    }

    /// Whether I/O of this thread is under way.
    pub(super) fn is_busy(&self) -> bool {
        self.busy() > 0
    }

    /// The cache is used again, with this log.
    pub(super) fn resume(&mut self, log: TapedLog) {
        *locked(&self.cache.log_stats) = (log.stats(), log.regions_set() as u64);
        (self.log, self.former) = (Some(log), None);
        self.ranges.clear();
        self.flushes.clear();
        self.commit = true;
    }

    /// The superblock in force; none when the cache was given up.
    pub(super) fn superblock(&self) -> Option<&BlockSuperblock> {
        self.log.as_ref().map(|log| log.superblock())
    }

    /// The superblock in force, or that which the cache had when it was given up: where volumes lie in the line space. Each has
    /// its place there all the same, since it is by their lines that changes which share bytes wait for one another.
    pub(super) fn line_space(&self) -> Option<&BlockSuperblock> {
        self.superblock().or(self.former.as_ref())
    }

    /// Changes the superblock; with `anew`, what the durable map says of lines is void too (see [`attachment::change`]).
    /// Returns false if the cache is given up: then it is changed in memory alone.
    pub(super) fn change_superblock(
        &mut self,
        anew: bool,
        change: impl FnOnce(&mut BlockSuperblock),
    ) -> bool {
        let Some(mut log) = self.log.take() else {
            if let Some(former) = &mut self.former {
                change(former);
            }
            return false;
        };
        let cache = self.cache.clone();
        let io = &mut CacheIo::of(&cache);
        let outcome = attachment::change(&mut log, anew, &mut Shards::new(self), io, change);
        match outcome {
            Ok(()) => {
                self.log = Some(log);
                true
            }
            Err(error) => {
                self.give_up(log, &error);
                false
            }
        }
    }

    /// Makes regions `first..=last`, in which nothing is under way, durable and clears their bits at once, as far as the
    /// store takes part. Returns how many bits are left.
    pub(super) fn hurry(&mut self, first: u32, last: u32) -> u64 {
        self.hurried = Some((first, last));
        // In a moment from now they have been quiet for long enough.
        self.commit |= self.step_log(QUIET + Nanos::from_secs(1), STEPS);
        self.hurried = None;
        match &self.log {
            Some(log) if log.regions_set() > 0 => {
                (first..=last).filter(|&r| log.is_set(r)).count() as u64
            }
            _ => 0,
        }
    }

    /// Regions of `first..=last` whose lines may hold what their store has not made durable, as runs: none of a cache that was
    /// given up.
    pub(super) fn unflushed(&self, first: u32, last: u32) -> Vec<(u32, u32)> {
        self.log.as_ref().map_or_else(Vec::new, |log| log.unflushed(first, last))
    }

    /// What is under way or waits in all shards, and slots that the durable map does not know as they are.
    pub(super) fn unsettled(&self) -> usize {
        let of = |cell: &std::sync::Mutex<super::cell::Cell>| {
            let cell = locked(cell);
            // Where the cache was given up nothing is recorded any more.
            let records = self.log.as_ref().map_or(0, |_| cell.shard.records_waiting());
            cell.shard.unsettled() + records
        };
        self.cache.shards.iter().map(of).sum()
    }

    pub(super) fn run(mut self) {
        loop {
            let stop = self.wait();
            self.take_work();
            if stop {
                break;
            }
            self.hand_on_tapes();
        }
        self.settle();
        self.cache.end_recording();
    }

    /// Once a second, so that a quiet stream's last records are in the file too.
    fn hand_on_tapes(&mut self) {
        if self.cache.recorder.is_none() || self.handed_on.elapsed() < HAND_ON {
            return;
        }
        self.handed_on = Instant::now();
        self.cache.hand_on_tapes();
        if let Some(log) = &mut self.log {
            log.hand_on();
        }
    }

    /// Waits for something to do. Returns whether it is the end.
    fn wait(&mut self) -> bool {
        let mut inbox = locked(&self.cache.log_inbox);
        let urgent = |i: &LogInbox| {
            i.stop
                || !i.asks.is_empty()
                || !i.ranges.is_empty()
                || !i.loads.is_empty()
                || !i.jobs.is_empty()
                || i.give_up.is_some()
        };
        let sleep = |inbox, time, idle: &dyn Fn(&LogInbox) -> bool| {
            self.cache
                .log_wake
                .wait_timeout_while(inbox, time, |i| !urgent(i) && idle(i))
                .unwrap_or_else(PoisonError::into_inner)
                .0
        };
        if self.busy() == 0 {
            let tick =
                if self.commit { COMMIT_PACE.saturating_sub(self.logged.elapsed()) } else { TICK };
            inbox = sleep(inbox, tick, &|i| !i.commit && i.fills.is_empty() && i.copies.is_empty());
        }
        inbox.gathers = true;
        inbox = sleep(inbox, PACE, &|i| i.fills.len() < BATCH);
        inbox.gathers = false;
        inbox.stop
    }

    fn busy(&self) -> usize {
        self.writing.len() - self.free.len()
    }

    fn take_work(&mut self) {
        let (fills, copies, asks, loads, ranges, jobs, give_up) = {
            let mut inbox = locked(&self.cache.log_inbox);
            self.commit |= std::mem::take(&mut inbox.commit);
            (
                std::mem::take(&mut inbox.fills),
                std::mem::take(&mut inbox.copies),
                std::mem::take(&mut inbox.asks),
                std::mem::take(&mut inbox.loads),
                std::mem::take(&mut inbox.ranges),
                std::mem::take(&mut inbox.jobs),
                inbox.give_up.take(),
            )
        };
        if let Some(why) = give_up
            && let Some(log) = self.log.take()
        {
            self.give_up(log, &why);
        }
        for fill in fills {
            self.write(fill);
        }
        for load in loads {
            let offset = self.cache.layout.table_at(load.shard, load.page);
            let token = self.begin(Job::Load(load));
            let buf = AlignedBuf::zeroed(PAGE_SIZE);
            self.fills.submit(token, &self.cache.file, FileOp::Read { offset, buf });
        }
        for copying in copies {
            let Copying { shard, from, lines, .. } = copying;
            let buf = AlignedBuf::zeroed(lines as usize * self.cache.line_bytes() as usize);
            let offset = self.cache.layout.slot_at(shard, from.0);
            let token = self.begin(Job::Read(copying));
            self.fills.submit(token, &self.cache.file, FileOp::Read { offset, buf });
        }
        self.fills.flush();
        let pace = if self.commit { COMMIT_PACE } else { RECORDS_PACE };
        let asked = !asks.is_empty() || !ranges.is_empty();
        let due = !jobs.is_empty() || self.logged.elapsed() >= pace;
        for (op, first, last) in ranges {
            match &mut self.log {
                Some(log) => {
                    (first..=last).for_each(|region| log.ask(RANGE, region));
                    self.ranges.wait(op, first, last);
                }
                None => {
                    self.cache.send((op.0 >> super::OP_BITS) as usize, op, Message::IntentsReady)
                }
            }
        }
        if let Some(log) = &mut self.log {
            asks.into_iter().for_each(|(shard, region)| log.ask(shard, region));
        } else {
            for (shard, region) in asks {
                self.with(shard, |s, now, fx| s.intent_ready(now, region, fx));
            }
        }
        if asked {
            // Bits are what comes first, and clients wait for them.
            self.step_log(Nanos::ZERO, 1);
        }
        if due {
            // With more to do it is not the only thing to do.
            self.commit = self.step_log(Nanos::ZERO, STEPS);
            self.logged = Instant::now();
        }
        jobs.into_iter().for_each(|job| job(self));
        self.end_fills();
    }

    fn with<R>(
        &mut self,
        shard: u32,
        f: impl FnOnce(&mut TapedShard, larder_base::Nanos, &mut super::cell::Fx<'_>) -> R,
    ) -> R {
        let now = self.cache.now();
        self.cache.with(shard, None, &mut self.out, |s, fx| f(s, now, fx))
    }

    // ---- fills ----

    fn begin(&mut self, job: Job) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.writing.push(None);
            self.writing.len() - 1
        });
        self.writing[at] = Some(job);
        at as u64
    }

    fn write(&mut self, Fill { shard, io, slot, bytes }: Fill) {
        let data = aligned(bytes);
        let token = self.begin(Job::Write(shard, io, data.clone()));
        self.fills.submit(token, &self.cache.file, self.cache.write_of(shard, slot, data));
    }

    fn end_fills(&mut self) {
        let line = self.cache.line_bytes() as usize;
        while let Some(done) = self.fills.pop() {
            let at = done.token as usize;
            let Some(job) = self.writing[at].take() else { continue };
            self.free.push(at);
            match (job, done.result, done.op) {
                (Job::Load(Load { shard, io, page }), result, op) => {
                    let cache = self.cache.clone();
                    cache.page_read(shard, page, (op, result), |slots| {
                        self.with(shard, |s, now, fx| s.page_loaded(now, io, slots, fx));
                    });
                }
                (
                    Job::Read(Copying { shard, io, to: slot, .. }),
                    Ok(()),
                    FileOp::Read { buf, .. },
                ) => {
                    self.write(Fill { shard, io, slot, bytes: Payload::new(buf) });
                }
                (Job::Write(shard, io, bytes), Ok(()), _) => {
                    self.cache.flash_works();
                    let crcs = crcs(&bytes, line);
                    self.with(shard, |s, now, fx| s.flash_written(now, io, Ok(&crcs), fx));
                }
                (Job::Read(Copying { shard, io, .. }) | Job::Write(shard, io, _), result, op) => {
                    let what = if matches!(op, FileOp::Read { .. }) { "read" } else { "write" };
                    if let Err(e) = result {
                        self.cache.flash_failed(what, &e);
                    }
                    self.with(shard, |s, now, fx| s.flash_written(now, io, Err(IoFailed), fx));
                }
            }
        }
        self.fills.flush();
    }

    // ---- the log ----

    /// Up to `steps` steps; `ahead` is added to the time. Returns whether there is more to do.
    fn step_log(&mut self, ahead: Nanos, steps: usize) -> bool {
        for _ in 0..steps {
            let Some(mut log) = self.log.take() else { return false };
            let cache = self.cache.clone();
            let now = cache.now() + ahead;
            let outcome = log.step(now, &mut Shards::new(self), &mut CacheIo::of(&cache));
            *locked(&cache.log_stats) = (log.stats(), log.regions_set() as u64);
            match outcome {
                Ok(LogStep::Worked) => self.log = Some(log),
                Ok(LogStep::Idle) => {
                    self.log = Some(log);
                    return false;
                }
                Err(error) => {
                    self.give_up(log, &error);
                    return false;
                }
            }
        }
        true
    }

    /// The durable map cannot be kept: no line is used any more, in this run or in the next.
    pub(super) fn give_up(&mut self, mut log: TapedLog, error: &dyn std::fmt::Display) {
        *locked(&self.cache.governor.given_up) = Some(error.to_string());
        tracing::error!(
            "the cache is given up: {error}. Volumes go on without it (pass-through); replace the cache device, format \
             it and start again, or, when it works again, `larder block take-back`"
        );
        self.former = Some(log.superblock().clone());
        self.cache.void(&mut log);
        log.end_recording();
        self.cache.enabled.store(false, std::sync::atomic::Ordering::SeqCst);
        for shard in 0..self.cache.layout.shards {
            self.with(shard, |s, now, fx| s.disable(now, fx));
        }
        for op in self.ranges.give_up() {
            self.cache.send((op.0 >> super::OP_BITS) as usize, op, Message::IntentsReady);
        }
    }

    /// The end: all is made durable, and the volumes are put aside in good order.
    fn settle(&mut self) {
        let until = Instant::now() + Duration::from_secs(10);
        while self.busy() > 0 && Instant::now() < until {
            self.fills.wait(FILL_WAIT);
            self.take_work();
        }
        let Some(mut log) = self.log.take() else { return };
        let cache = self.cache.clone();
        // What of a trim is left keeps its bits, and is not used by the next start either.
        let begun = Instant::now();
        let mut left = cache.sweep(FILL_WAIT);
        if left {
            tracing::info!(
                "stopping: lines of trimmed ranges are taken out of the map, for {} s at most",
                SWEEP_WAIT.as_secs()
            );
        }
        while left && begun.elapsed() < SWEEP_WAIT {
            left = cache.sweep(FILL_WAIT);
        }
        if left {
            tracing::info!(
                "lines of ranges that were trimmed are left in the map: the next start drops what is cached in these regions"
            );
        }
        let now = cache.now();
        self.hurried = Some((0, u32::MAX));
        let settled = log.settle(now, &mut Shards::new(self), &mut CacheIo::of(&cache));
        log.end_recording();
        if let Err(error) = settled {
            return self.give_up(log, &error);
        }
        let outcome = log.update(&mut CacheIo::of(&cache), |sb| {
            sb.clean_epoch = sb.epoch;
            for volume in &mut sb.volumes {
                let Some(attached) = cache.volume(&volume.name) else { continue };
                if volume.state == VolumeState::Attached {
                    volume.state = VolumeState::Detached;
                    volume.identity = attached.identity();
                }
            }
        });
        match outcome {
            Ok(()) => {
                cache.region.release();
                tracing::info!("the cache is stopped; the next start finds it as it is");
            }
            Err(error) => self.give_up(log, &error),
        }
    }
}

/// Stands for a shard where a whole range asks for bits.
const RANGE: u32 = u32::MAX;

/// The shards as the log sees them.
struct Shards<'a> {
    thread: &'a mut LogThread,
    /// Volumes that were flushed during this step, by their first byte, and whether that worked.
    flushed: Vec<(u64, bool)>,
}

impl<'a> Shards<'a> {
    fn new(thread: &'a mut LogThread) -> Shards<'a> {
        thread.flushes.begin_turn();
        Shards { thread, flushed: Vec::new() }
    }
}

impl LogShards for Shards<'_> {
    fn records_waiting(&mut self, shard: u32) -> usize {
        locked(&self.thread.cache.shards[shard as usize]).shard.records_waiting()
    }

    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        locked(&self.thread.cache.shards[shard as usize]).shard.take_records(most, out);
    }

    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        locked(&self.thread.cache.shards[shard as usize]).shard.take_pages(most, out);
    }

    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        locked(&self.thread.cache.shards[shard as usize]).shard.emptied(out);
    }

    fn records_durable(&mut self, shard: u32) {
        self.thread.with(shard, |s, now, fx| s.records_durable(now, fx));
    }

    fn records_lost(&mut self, shard: u32) {
        locked(&self.thread.cache.shards[shard as usize]).shard.records_lost();
    }

    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        locked(&self.thread.cache.shards[shard as usize]).shard.state(first, most, out);
    }

    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        let hurried = self.thread.hurried.is_some_and(|(a, b)| (a..=b).contains(&region));
        let cache = &self.thread.cache;
        if !hurried && !cache.governor.changes.is_quiet(cache.now(), region) {
            return false;
        }
        locked(&self.thread.cache.shards[shard as usize]).shard.quiet(region)
    }

    fn intent_ready(&mut self, shard: u32, region: u32) {
        self.thread.flushes.anew(region);
        if shard != RANGE {
            self.thread.with(shard, |s, now, fx| s.intent_ready(now, region, fx));
            return;
        }
        let cache = self.thread.cache.clone();
        self.thread.ranges.durable(region, |op| {
            cache.send((op.0 >> super::OP_BITS) as usize, op, Message::IntentsReady);
        });
    }

    fn flush_backing(&mut self, region: u32) -> Result<(), IoFailed> {
        let cache = &self.thread.cache;
        let bytes = cache.layout.region_groups
            * u64::from(larder_engine::block::GROUP_LINES)
            * u64::from(cache.layout.line);
        let at = u64::from(region) * bytes;
        let owner = cache
            .volumes()
            .into_iter()
            .find(|v| v.base() < at + bytes && at < v.base() + v.bytes());
        let Some(volume) = owner else {
            // Nobody's any more: its lines are never used again before they are dropped.
            return Err(IoFailed);
        };
        let hurried = self.thread.hurried.is_some_and(|(a, b)| (a..=b).contains(&region));
        let flusher = locked(&volume.backing);
        let Some(flusher) = &*flusher else { return Err(IoFailed) };
        let answer = |durable: bool| if durable { Ok(()) } else { Err(IoFailed) };
        if hurried {
            // The log asks for all its regions before the first flush: one is enough, and one that fails too.
            if let Some((_, durable)) = self.flushed.iter().find(|f| f.0 == volume.base()) {
                return answer(*durable);
            }
            let durable = flusher.flush(FLUSH_WAIT);
            self.flushed.push((volume.base(), durable));
            return answer(durable);
        }
        let (want, ended) = (|| flusher.want(), |number| flusher.is_durable(number));
        answer(self.thread.flushes.is_durable(region, volume.base(), want, ended))
    }
}

const _: fn() = || {
    fn is_send<T: Send>() {}
    is_send::<super::region::Region>();
};
