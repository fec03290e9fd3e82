//! What one thread does beside the queues: it owns the map's log, says when fills and records are written, which ranges have
//! their bits, which flush of a store is wanted, when the cache is given up, and how a run ends.
//!
//! Nobody else has the log. What queues leave for this thread is in an [`Inbox`]; it is taken out ([`Maintenance::take`]), then
//! comes a [turn](Maintenance::turn), which does one thing each time and says when to come again. It may block, on I/O of the
//! map's log alone ([`LogIo`]): a client's first write to a region waits for this thread. Fills, copies, pages of the table
//! and flushes of stores are [`Effects`], whose ends it is told. In which order is said by [`round`](super::round), when the next
//! round is due by [`Maintenance::wakes`].

mod census;
mod inbox;
mod shards;
mod stop;
pub mod takeback;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use larder_base::Nanos;
use larder_format::block::BlockSuperblock;
use larder_format::block::log::Held;
use larder_policy::block::VolumeId;

use super::attachment;
use super::calls::{Copying, Fill, Load};
use super::charged::{Charged, Charges};
use super::event::ShardIo;
use super::failing::FlashError;
use super::flushes::{Flushes, Numbers};
use super::ranged::Bits;
use crate::block::api::{IoFailed, SlotId, Sum};
use crate::block::log::{LogIo, LogShards, LogStats, LogStep};
use crate::block::paging::TableChange;
use crate::block::planted::Planted;
use crate::block::record::{BlockTape, RecordedLog};
use crate::block::shard::MapRecord;
pub use census::{Census, Lines, MOST_LOOKS, ROUND, SWEEP_STEP};
#[cfg(feature = "planted")]
pub use inbox::InboxFault;
pub use inbox::{Inbox, Left, Work};
pub use shards::{AtNode, LoggedShard, Shards, Stores};
use stop::Stop;

/// Stands for a shard where a whole range asks for bits.
const RANGE: u32 = u32::MAX;

/// When what is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Fills are nobody's hurry: they are gathered for so long, unless there are `batch` of them. It saves waking this thread
    /// for every line.
    pub gather: Nanos,
    /// Fills that are begun at once.
    pub batch: usize,
    /// Nor are records: they are gathered for so long. A batch takes two flushes of the device, and a page of flash for a few
    /// records as for many; what it costs is what a power cut takes of the lines that came last.
    pub records: Nanos,
    /// The same where fills wait for slots to be durably empty, or the cleaner for segments.
    pub commit: Nanos,
    /// Steps of the log in a row, before what is left to do waits for `commit`.
    pub steps: usize,
    /// When nothing else is due it looks at the log after so long: for records that nobody is in a hurry for, and regions that
    /// have become quiet.
    pub tick: Nanos,
    /// While fills, copies or loads are under way it is looked so often which have ended: a line is published so long after it
    /// was written at most.
    pub fills: Nanos,
    /// The same for flushes of stores.
    pub flushes: Nanos,
    /// Regions that somebody is in a hurry for are looked at whenever their store has been flushed, for so long after they
    /// were asked for last.
    pub hurry: Nanos,
    /// At the end, fills under way are waited for so long at most;
    pub drain: Nanos,
    /// lines of ranges that were trimmed are taken out of the map for so long at most,
    pub sweep: Nanos,
    /// and stores may take so long to become durable.
    pub flush: Nanos,
}

impl Default for Pace {
    fn default() -> Pace {
        Pace {
            gather: Nanos::from_millis(2),
            batch: 64,
            records: Nanos::from_millis(100),
            commit: Nanos::from_millis(10),
            steps: 16,
            tick: Nanos::from_millis(200),
            fills: Nanos::from_millis(2),
            flushes: Nanos::from_millis(20),
            hurry: Nanos::from_secs(1),
            drain: Nanos::from_secs(10),
            sweep: Nanos::from_secs(3),
            flush: Nanos::from_secs(5),
        }
    }
}

/// When the next turn is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// At once: there is more to do.
    Again,
    /// Then, or as soon as the inbox says so.
    At(Nanos),
    /// Never: the run is over. All bits are cleared, or some stay.
    Over {
        /// Whether all bits are cleared: the next start finds every line.
        settled: bool,
    },
}

/// What maintenance has done by others. What is asked for here may be carried out in any order, behind the call.
pub trait Effects<B> {
    /// Write lines; [`Maintenance::flash_written`]. They have been charged to the write budget.
    fn fill(&mut self, fill: Fill<B>);
    /// Move lines; [`Maintenance::flash_written`], with the checksums of what was written. They have been charged as well, when
    /// they are read.
    fn copy(&mut self, copying: Copying);
    /// Read a page of the table; [`Maintenance::page_loaded`].
    fn load(&mut self, load: Load);
    /// Make everything durable that the store of this volume has answered before now; [`Maintenance::store_flushed`] with this
    /// number. Of one store there is one at a time.
    fn store_flush(&mut self, store: VolumeId, number: u64);
    /// The durable map cannot be kept: no later start may use what is on the device. This is to be noted durably elsewhere. It is asked for
    /// again, at each tick, if it could not be, unless the device itself says it.
    ///
    /// # Errors
    /// Why it is not noted.
    fn note_given_up(&mut self, superblock: &BlockSuperblock) -> Result<(), String>;
    /// It is noted nowhere, not on the device either, for this reason; `None`: it is noted by now.
    fn unnoted(&mut self, _why: Option<&str>) {}
    /// No later start may use what is in memory.
    fn disown(&mut self);
    /// From now on no line is used any more, for this reason.
    fn given_up(&mut self, why: &str);
    /// The run ends, and this store has not made durable what it has answered last.
    fn not_durable(&mut self, _store: VolumeId) {}
    /// By what the store of the volume of this name is known now; `None` if the volume is not served. Asked when the run ends in
    /// good order.
    fn identity(&mut self, volume: &str) -> Option<[u8; 64]>;
    /// The run has ended in good order: the next start may use what is there.
    fn stopped(&mut self) {}
    /// At the end lines of trimmed ranges are still taken out of the map; or there are some when time is over (`late`).
    fn sweeping(&mut self, _late: bool) {}
}

/// Regions that somebody wants to be durable soon.
#[derive(Clone, Copy, Debug)]
struct Hurry {
    first: u32,
    last: u32,
    until: Nanos,
}

/// Owned by one thread. See the [module](self).
pub struct Maintenance {
    pace: Pace,
    log: Option<RecordedLog>,
    /// What the superblock was when the cache was given up: where volumes lie in the line space, in memory alone.
    former: Option<BlockSuperblock>,
    stats: LogStats,
    bits: Bits,
    flushes: Flushes,
    stores: BTreeMap<VolumeId, Numbers>,
    hurried: Option<Hurry>,
    /// Fills, copies and loads that have not ended.
    under_way: usize,
    /// The log is to step for bits.
    asked: bool,
    /// It is to step whatever the time.
    forced: bool,
    /// Steps that are left of those in a row.
    stepping: usize,
    /// When records were last written, and whether somebody waits for them.
    logged: Nanos,
    commit: bool,
    /// When the next turn is due, and when it was last looked what has ended of what is under way.
    due: Nanos,
    looked: Nanos,
    stop: Stop,
    /// That the cache was given up nothing says to a later start; then it is tried again.
    unnoted: Option<Nanos>,
    #[cfg(feature = "planted")]
    fault: Option<Planted>,
}

impl Maintenance {
    /// Maintenance over this log. Without one the cache was given up; `superblock` is what it had.
    pub fn new(pace: Pace, log: Option<RecordedLog>, superblock: BlockSuperblock) -> Maintenance {
        Maintenance {
            pace,
            former: log.is_none().then_some(superblock),
            stats: log.as_ref().map_or_else(LogStats::default, |log| log.stats()),
            log,
            bits: Bits::default(),
            flushes: Flushes::default(),
            stores: BTreeMap::new(),
            hurried: None,
            under_way: 0,
            asked: false,
            forced: false,
            stepping: 0,
            logged: Nanos::ZERO,
            commit: true,
            due: Nanos::ZERO,
            looked: Nanos::ZERO,
            stop: Stop::No,
            unnoted: None,
            #[cfg(feature = "planted")]
            fault: None,
        }
    }

    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Planted) {
        self.fault = Some(fault);
        self.flushes.plant(fault);
    }

    #[cfg(feature = "planted")]
    fn planted(&self, fault: Planted) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(feature = "planted"))]
    #[inline(always)]
    fn planted(&self, _: Planted) -> bool {
        false
    }

    // ---- to look at ----

    /// When what is done.
    pub fn pace(&self) -> &Pace {
        &self.pace
    }

    /// What the cache had when it was given up, if it was.
    pub fn former(&self) -> Option<&BlockSuperblock> {
        self.former.as_ref()
    }

    /// The superblock in force; none when the cache was given up.
    pub fn superblock(&self) -> Option<&BlockSuperblock> {
        self.log.as_ref().map(|log| log.superblock())
    }

    /// The superblock in force, or that which the cache had when it was given up: where volumes lie in the line space. Each has
    /// its place there all the same, since it is by their lines that changes which share bytes wait for one another.
    pub fn line_space(&self) -> Option<&BlockSuperblock> {
        self.superblock().or(self.former.as_ref())
    }

    /// The log's counters, those of one that was given up too.
    pub fn stats(&self) -> LogStats {
        self.stats
    }

    /// Regions with a bit.
    pub fn regions_set(&self) -> usize {
        self.log.as_ref().map_or(0, |log| log.regions_set())
    }

    /// Whether a region has its bit.
    pub fn is_set(&self, region: u32) -> bool {
        self.log.as_ref().is_some_and(|log| log.is_set(region))
    }

    /// Whether fills, copies or loads are under way.
    pub fn is_busy(&self) -> bool {
        self.under_way > 0
    }

    /// Regions of `first..=last` whose lines may hold what their store has not made durable, as runs: none of a cache that was
    /// given up.
    pub fn unflushed(&self, first: u32, last: u32) -> Vec<(u32, u32)> {
        self.log.as_ref().map_or_else(Vec::new, |log| log.unflushed(first, last))
    }

    /// What is under way or waits in all shards, and slots that the durable map does not know as they are.
    pub fn unsettled(&self, shards: &mut impl Shards) -> usize {
        // Where the cache was given up nothing is recorded any more.
        let recorded = self.log.is_some();
        let mut of = |shard| {
            let records = if recorded { shards.records_waiting(shard) } else { 0 };
            shards.unsettled(shard) + records
        };
        (0..shards_of(self.line_space())).map(&mut of).sum()
    }

    /// Whether the end of the run has begun.
    pub fn is_stopping(&self) -> bool {
        !matches!(self.stop, Stop::No)
    }

    /// When the next round is due if nobody leaves anything for it before: for its turn, or for a look at what is under way.
    pub fn wakes(&self) -> Nanos {
        let look = |is_under_way: bool, after| is_under_way.then(|| self.looked + after);
        let fills = look(self.is_busy(), self.pace.fills);
        let flushes = look(self.is_flushing(), self.pace.flushes);
        [fills, flushes].into_iter().flatten().fold(self.due, Nanos::min)
    }

    fn is_flushing(&self) -> bool {
        self.stores.values().any(Numbers::is_under_way)
    }

    /// Whether a turn may find something to do that is in no inbox. Where not, turns at ticks may be left out: see
    /// [`Maintenance::idled`].
    pub fn has_work(&self, shards: &mut impl Shards) -> bool {
        self.commit
            || self.asked
            || self.forced
            || self.stepping > 0
            || self.is_busy()
            || self.is_flushing()
            || self.is_stopping()
            || self.unnoted.is_some()
            || self.regions_set() > 0
            || (0..shards.shards()).any(|shard| shards.records_waiting(shard) > 0)
    }

    /// Records what the log is told from now on; it must be that of a device without lines.
    pub fn record(&mut self, tape: BlockTape) {
        if let Some(log) = &mut self.log {
            log.record(tape);
        }
    }

    /// Ends recording.
    pub fn end_recording(&mut self) {
        if let Some(log) = &mut self.log {
            log.end_recording();
        }
    }

    /// Hands on what is on the log's tape.
    pub fn flush_chunk(&mut self) {
        if let Some(log) = &mut self.log {
            log.flush_chunk();
        }
    }

    // ---- what it is told ----

    /// Takes what was left for it. A turn is due then.
    pub fn take<B>(
        &mut self,
        now: Nanos,
        work: Work<B>,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) {
        let Work { fills, copies, loads, asks, ranges, budget, commit, give_up } = work;
        self.commit |= commit;
        if !budget.is_empty() {
            // Clients wait for what is written then.
            io.claim();
            budget.into_iter().for_each(|op| shards.budget_kept(op));
        }
        if let Some(why) = give_up {
            self.give_up(now, &why, shards, io, fx);
        }
        if self.log.is_none() {
            // No line is used any more, and none is written.
            let fills = fills.iter().map(|f| ShardIo { shard: f.shard, io: f.io });
            let copies = copies.iter().map(|c| ShardIo { shard: c.shard, io: c.io });
            fills.chain(copies).for_each(|io| shards.flash_written(now, io, Err(IoFailed)));
            let loads = loads.iter().map(|l| ShardIo { shard: l.shard, io: l.io });
            loads.for_each(|io| shards.page_loaded(now, io, Err(IoFailed)));
        } else if !self.stop.is_past_fills() {
            // At the end what begins now would not be waited for, and nobody misses it.
            self.under_way += fills.len() + copies.len() + loads.len();
            let line = self.superblock().map_or(0, |sb| sb.layout.line);
            fills.iter().for_each(|fill| io.lines(fill.lines, line));
            if !self.planted(Planted::CopyNotCharged) {
                copies.iter().for_each(|copying| io.lines(copying.lines, line));
            }
            fills.into_iter().for_each(|fill| fx.fill(fill));
            loads.into_iter().for_each(|load| fx.load(load));
            copies.into_iter().for_each(|copying| fx.copy(copying));
        }
        let Some(log) = &mut self.log else {
            // No bit is needed.
            ranges.into_iter().for_each(|(op, ..)| shards.bits_ready(op));
            asks.into_iter().for_each(|(shard, region)| shards.intent_ready(now, shard, region));
            return;
        };
        self.asked |= !asks.is_empty() || !ranges.is_empty();
        for (op, first, last) in ranges {
            (first..=last).for_each(|region| log.ask(RANGE, region));
            self.bits.wait(op, first, last);
        }
        asks.into_iter().for_each(|(shard, region)| log.ask(shard, region));
    }

    /// A fill or a copy has ended: the checksums of what was written, or why not.
    pub fn flash_written(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: ShardIo,
        sums: Result<&[u32], FlashError>,
    ) {
        self.ended();
        shards.flash_ended(now, sums.map(|_| ()));
        shards.flash_written(now, io, sums.map_err(IoFailed::from));
    }

    /// A page of the table was read: the checksum of the line in each slot, or why not.
    pub fn page_loaded(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: ShardIo,
        slots: Result<&[Option<Sum>], FlashError>,
    ) {
        self.ended();
        shards.flash_ended(now, slots.map(|_| ()));
        shards.page_loaded(now, io, slots.map_err(IoFailed::from));
    }

    /// One of its I/Os has ended, of which the shard was told by somebody else: while this machine was at work.
    pub fn ended(&mut self) {
        self.under_way = self.under_way.saturating_sub(1);
    }

    /// The flush of a store that began with this number has ended, or is not to be believed.
    pub fn store_flushed(&mut self, now: Nanos, store: VolumeId, number: u64, durable: bool) {
        let late = self.planted(Planted::FlushNumberedLate);
        let Some(numbers) = self.stores.get_mut(&store) else { return };
        numbers.ended(if late { numbers.latest() } else { number }, durable);
        if let (Some(hurry), Some(log)) = (self.hurried.filter(|h| now < h.until), &mut self.log) {
            log.hurry(hurry.first, hurry.last);
            self.forced = true;
        }
    }

    /// The volume is not attached any more.
    pub fn forget_store(&mut self, store: VolumeId) {
        self.stores.remove(&store);
    }

    /// Bits that are asked for and that the log has not set.
    pub(in crate::block) fn bits_asked(&self) -> usize {
        self.log.as_ref().map_or(0, |log| log.bits_asked())
    }

    /// What has ended of what is under way was told, as far as it has by now.
    pub fn has_looked(&mut self, now: Nanos) {
        self.looked = now;
    }

    /// Turns at the ticks before `now` were left out, at each of which [nothing was to do](Maintenance::has_work): all is as if they
    /// had been. For a host whose time may pass at once.
    pub fn idled(&mut self, now: Nanos) {
        let since = now.saturating_sub(self.logged).0;
        if let Some(ticks) = since.saturating_sub(1).checked_div(self.pace.tick.0) {
            self.logged = self.logged + Nanos(ticks * self.pace.tick.0);
            self.due = self.logged + self.pace.tick;
        }
    }

    /// Steps whatever the time with the next turn.
    pub fn force(&mut self) {
        self.forced = true;
    }

    // ---- turns ----

    /// Does one thing, and says when to come again.
    pub fn turn<B>(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) -> Turn {
        io.claim();
        self.note_again(now, fx);
        let turn = match self.stop {
            Stop::No => self.work(now, shards, io, fx),
            _ => self.go_on_to_stop(now, shards, io, fx),
        };
        self.due = match turn {
            Turn::Again => Nanos::ZERO,
            Turn::At(at) => at,
            Turn::Over { .. } => Nanos(u64::MAX),
        };
        turn
    }

    /// Tries again to have noted that the cache was given up: if it is due, and at each turn of a stop.
    fn note_again<B>(&mut self, now: Nanos, fx: &mut impl Effects<B>) {
        let Some(due) = self.unnoted else { return };
        let due = now >= due || self.is_stopping();
        let Some(former) = self.former.as_ref().filter(|_| due) else { return };
        let noted = fx.note_given_up(former);
        fx.unnoted(noted.as_ref().err().map(String::as_str));
        self.unnoted = noted.is_err().then_some(now + self.pace.tick);
    }

    fn work<B>(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) -> Turn {
        if std::mem::take(&mut self.asked) {
            // Bits are what comes first, and clients wait for them.
            self.step(now, shards, io, fx);
        }
        let pace = if self.commit { self.pace.commit } else { self.pace.records };
        let due = now.saturating_sub(self.logged) >= pace;
        if std::mem::take(&mut self.forced) || (due && self.stepping == 0) {
            self.stepping = self.pace.steps.max(1);
        }
        if self.stepping > 0 {
            let more = self.step(now, shards, io, fx);
            self.stepping = if more { self.stepping - 1 } else { 0 };
            if self.stepping == 0 {
                // With more to do it is not the only thing to do.
                (self.commit, self.logged) = (more, now);
            }
        }
        self.flush_stores(fx);
        if self.stepping > 0 {
            return Turn::Again;
        }
        Turn::At(self.logged + if self.commit { self.pace.commit } else { self.pace.tick })
    }

    /// One step of the log. Returns whether there is more to do.
    fn step<B>(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) -> bool {
        let Some(mut log) = self.log.take() else { return false };
        let outcome = log.step(now, &mut self.as_seen(now, shards, &[]), io);
        self.stats = log.stats();
        self.log = Some(log);
        match outcome {
            Ok(step) => step == LogStep::Worked,
            Err(error) => {
                self.give_up(now, &error.to_string(), shards, io, fx);
                false
            }
        }
    }

    /// The shards as the log sees them, for the time of a call. Of `flushed` stores it is known whether they are durable.
    fn as_seen<'a, S>(
        &'a mut self,
        now: Nanos,
        shards: &'a mut S,
        flushed: &'a [(VolumeId, bool)],
    ) -> AsSeen<'a, S> {
        self.flushes.begin_turn();
        AsSeen {
            now,
            shards,
            bits: &mut self.bits,
            flushes: &mut self.flushes,
            stores: &mut self.stores,
            hurried: self.hurried.filter(|h| now < h.until).map(|h| (h.first, h.last)),
            flushed,
        }
    }

    /// Flushes that are wanted begin, one at a time of each store.
    fn flush_stores<B>(&mut self, fx: &mut impl Effects<B>) {
        for (&store, numbers) in &mut self.stores {
            if numbers.is_wanted() && !numbers.is_under_way() {
                fx.store_flush(store, numbers.begin());
            }
        }
    }

    // ---- what is asked of it ----

    /// Makes regions `first..=last`, in which nothing is under way, durable, and clears their bits as soon as their store is.
    /// Returns how many bits are left: whoever waits for them asks again.
    pub fn hurry<B>(
        &mut self,
        now: Nanos,
        (first, last): (u32, u32),
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) -> u64 {
        self.hurried = Some(Hurry { first, last, until: now + self.pace.hurry });
        if let Some(log) = &mut self.log {
            log.hurry(first, last);
        }
        let steps = (0..self.pace.steps).take_while(|_| self.step(now, shards, io, fx)).count();
        self.commit |= steps == self.pace.steps;
        self.flush_stores(fx);
        let set = |log: &RecordedLog| (first..=last).filter(|&r| log.is_set(r)).count() as u64;
        self.log.as_ref().filter(|log| log.regions_set() > 0).map_or(0, set)
    }

    /// Changes the superblock; with `anew`, what the durable map says of lines is void too (see
    /// [`MapLog::begin_anew`](crate::block::MapLog::begin_anew)). Returns false if the cache is given up, by this too: then it is changed in
    /// memory alone. `change` may be called for each of two superblocks.
    pub fn change_superblock<B>(
        &mut self,
        now: Nanos,
        anew: bool,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
        mut change: impl FnMut(&mut BlockSuperblock),
    ) -> bool {
        if let Some(mut log) = self.log.take() {
            let seen = &mut self.as_seen(now, shards, &[]);
            let outcome = attachment::change(&mut log, anew, seen, io, &mut change);
            self.stats = log.stats();
            self.log = Some(log);
            match outcome {
                Ok(()) => return true,
                Err(error) => self.give_up(now, &error.to_string(), shards, io, fx),
            }
        }
        if let Some(former) = &mut self.former {
            change(former);
        }
        false
    }

    /// The durable map cannot be kept: no line is used any more, in this run or in the next.
    ///
    /// What says so to the next start comes first, in the order of a [start](super::start) that the device fails: the note,
    /// memory, the device. Only then do changes go on without bits, which neither map knows.
    pub fn give_up<B>(
        &mut self,
        now: Nanos,
        why: &str,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) {
        let Some(mut log) = self.log.take() else { return };
        self.former = Some(log.superblock().clone());
        let early = self.planted(Planted::GivenUpBeforeNoted);
        if early {
            self.goes_on_without(now, why, shards, fx);
        }
        if !self.planted(Planted::GivenUpValid) {
            let noted = fx.note_given_up(log.superblock());
            if !self.planted(Planted::GivenUpOwned) {
                fx.disown();
            }
            // If the device takes it after all, nothing else is needed.
            let said = self.planted(Planted::GivenUpOnDevice)
                || log.update(io, BlockSuperblock::forget_volumes).is_ok();
            if let Some(why) = noted.err().filter(|_| !said) {
                fx.unnoted(Some(&why));
                self.unnoted = Some(now + self.pace.tick);
            }
        }
        log.end_recording();
        self.stats = log.stats();
        if !early {
            self.goes_on_without(now, why, shards, fx);
        }
    }

    /// No line is used any more in this run.
    fn goes_on_without<B>(
        &mut self,
        now: Nanos,
        why: &str,
        shards: &mut impl Shards,
        fx: &mut impl Effects<B>,
    ) {
        (self.stepping, self.commit, self.hurried) = (0, false, None);
        fx.given_up(why);
        for shard in 0..shards_of(self.former.as_ref()) {
            shards.disable(now, shard);
        }
        self.bits.give_up().for_each(|op| shards.bits_ready(op));
    }

    /// The cache is used again, with this log.
    pub(in crate::block) fn resume(&mut self, log: RecordedLog) {
        self.stats = log.stats();
        (self.log, self.former, self.unnoted) = (Some(log), None, None);
        self.bits.clear();
        self.flushes.clear();
        self.commit = true;
    }
}

fn shards_of(superblock: Option<&BlockSuperblock>) -> u32 {
    superblock.map_or(0, |sb| sb.layout.shards)
}

/// See [`Maintenance::as_seen`].
struct AsSeen<'a, S> {
    now: Nanos,
    shards: &'a mut S,
    bits: &'a mut Bits,
    flushes: &'a mut Flushes,
    stores: &'a mut BTreeMap<VolumeId, Numbers>,
    hurried: Option<(u32, u32)>,
    flushed: &'a [(VolumeId, bool)],
}

impl<S: Shards> LogShards for AsSeen<'_, S> {
    fn records_waiting(&mut self, shard: u32) -> usize {
        self.shards.records_waiting(shard)
    }

    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        self.shards.take_records(shard, most, out);
    }

    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        self.shards.take_pages(shard, most, out);
    }

    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        self.shards.emptied(shard, out);
    }

    fn records_durable(&mut self, shard: u32) {
        self.shards.records_durable(self.now, shard);
    }

    fn records_lost(&mut self, shard: u32) {
        self.shards.records_lost(shard);
    }

    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        self.shards.state(shard, first, most, out);
    }

    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        let hurried = self.hurried.is_some_and(|(a, b)| (a..=b).contains(&region));
        (hurried || self.shards.is_left_alone(self.now, region)) && self.shards.quiet(shard, region)
    }

    fn intent_ready(&mut self, shard: u32, region: u32) {
        self.flushes.anew(region);
        if shard != RANGE {
            return self.shards.intent_ready(self.now, shard, region);
        }
        let shards = &mut *self.shards;
        self.bits.durable(region, |op| shards.bits_ready(op));
    }

    fn flush_backing(&mut self, region: u32) -> Result<(), IoFailed> {
        // What is nobody's any more is never used again before it is dropped.
        let store = self.shards.store_of(region).ok_or(IoFailed)?;
        let said = |durable| if durable { Ok(()) } else { Err(IoFailed) };
        if let Some((_, durable)) = self.flushed.iter().find(|f| f.0 == store) {
            return said(*durable);
        }
        let numbers = std::cell::RefCell::new(self.stores.entry(store).or_default());
        let want = || numbers.borrow_mut().want();
        let ended = |number| numbers.borrow().is_durable(number);
        said(self.flushes.is_durable(region, store.0.into(), want, ended))
    }
}
