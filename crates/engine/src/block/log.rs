//! Making the map durable: the log of records, its snapshots, and the write-intent map.
//!
//! One [`MapLog`] serves all shards of a device, on a thread of its own: nothing here is on the way of a client's read,
//! and of its writes only the first to a cached line of a region that has been quiet. What it promises the shards is in the header of
//! `shard.rs`; what lies on the device in `larder_format::block`.
//!
//! A batch is: take the shards' records; flush (the lines that they name become durable); write them; flush; tell the
//! shards. A **snapshot** replaces a log that is nearly full: from then on records go to the other log, of the next
//! generation, while the state of every slot is copied beside it; when that is durable the superblock is turned to it.
//! Until then recovery reads the old snapshot, the old log, and the new log.
//!
//! **A log that was damaged** would look like one that ended earlier, and lines that were dropped or moved since would be back
//! with their old bytes. So what was promised by a log is noted with how far it reached, in the superblock (with every
//! change of it) and in the write-intent map (with every bit that is set or cleared). A log that is shorter, or shows that it was
//! longer ([`MapLog::is_whole`]), proves nothing: the cache is cold. Only the last batch may be lost and not missed, until something is
//! noted behind it: nothing relies on it that checksums would not find (see `left.rs`).
//!
//! Where the placement is sparse there is a table instead, whose pages are written where they lie: see `log/tables.rs`.

mod tables;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use larder_base::Nanos;
use larder_format::PAGE_SIZE;
use larder_format::block::log::{
    Held, LogHead, LogPage, RECORDS_PER_PAGE, Reach, Record, SLOTS_PER_PAGE,
};
use larder_format::block::superblock::COPY_BYTES;
use larder_format::block::{BlockSuperblock, Layout, intents, log as pages};

use super::api::{IoFailed, SlotId};
use super::paging::TableChange;
use super::planted::Planted;
use super::shard::MapRecord;
pub use tables::{FoundPage, read_table};

/// Records taken from a shard for one batch.
const BATCH: usize = 4096;
/// Snapshot pages written in one step.
const SNAPSHOT_STEP: u64 = 256;
/// Regions whose bits are cleared together.
const CLEAR_STEP: usize = 256;

/// The cache device, as the log uses it. Addresses are bytes; lengths are whole pages.
pub trait LogIo {
    /// Reads.
    ///
    /// # Errors
    /// If the device does not deliver.
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed>;
    /// Writes; durable after the next flush.
    ///
    /// # Errors
    /// If the device does not take it.
    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed>;
    /// Makes everything durable that was written before, lines included.
    ///
    /// # Errors
    /// If the device cannot.
    fn flush(&mut self) -> Result<(), IoFailed>;
    /// Gives the space of a stretch back: it reads as zeros from now on, durably after the next flush. Asked for where the
    /// placement is sparse only.
    ///
    /// # Errors
    /// If the device cannot: any part of it may be zeros.
    fn punch(&mut self, _at: u64, _len: u64) -> Result<(), IoFailed> {
        Err(IoFailed)
    }
    /// Where, from `at` on, the device has anything but a hole, if it can tell; `None` behind the last.
    fn next_data(&mut self, at: u64) -> Option<u64> {
        Some(at)
    }
}

impl<I: LogIo> LogIo for &mut I {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        (**self).read(at, out)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        (**self).write(at, bytes)
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        (**self).flush()
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        (**self).punch(at, len)
    }

    fn next_data(&mut self, at: u64) -> Option<u64> {
        (**self).next_data(at)
    }
}

/// The shards, as the log uses them: each call is one of `BlockShard`, under its lock.
pub trait LogShards {
    /// `BlockShard::records_waiting`.
    fn records_waiting(&mut self, shard: u32) -> usize;
    /// `BlockShard::take_records`.
    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>);
    /// `BlockShard::take_pages`. Asked for where the placement is sparse only.
    fn take_pages(&mut self, _shard: u32, _most: usize, _out: &mut Vec<TableChange>) {}
    /// `BlockShard::emptied`. Asked for where the placement is sparse only.
    fn emptied(&mut self, _shard: u32, _out: &mut Vec<(SlotId, u32)>) {}
    /// `BlockShard::records_durable`.
    fn records_durable(&mut self, shard: u32);
    /// `BlockShard::records_lost`.
    fn records_lost(&mut self, shard: u32);
    /// `BlockShard::state` of up to `most` slots from `first` on.
    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>);
    /// `BlockShard::quiet`.
    fn quiet(&mut self, shard: u32, region: u32) -> bool;
    /// `BlockShard::intent_ready`.
    fn intent_ready(&mut self, shard: u32, region: u32);
    /// Makes everything durable that was written to the backing store of the volume that `region` belongs to.
    ///
    /// # Errors
    /// If the backing store cannot: the bit stays.
    fn flush_backing(&mut self, region: u32) -> Result<(), IoFailed>;
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogStep {
    /// Something: call again at once.
    Worked,
    /// Nothing to do until a shard asks, or until this much later a region may be quiet.
    Idle,
}

/// The durable map could not be kept: the cache must not be used any more in this run, and not be warm in the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cache device did not take {what}")]
pub struct LogFailed {
    /// What was to be written.
    pub what: &'static str,
}

/// What a snapshot under way has done.
#[derive(Clone, Copy, Debug)]
struct Snapshot {
    next: u64,
    /// An earlier run has begun it, and written to the log that goes on behind it.
    is_older: bool,
}

/// Counters of the log; all only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Records written.
    pub records: u64,
    /// Batches written.
    pub batches: u64,
    /// Snapshots finished.
    pub snapshots: u64,
    /// Bytes written to the device by the log, snapshots and the write-intent map.
    pub bytes: u64,
    /// Regions whose bit was set.
    pub intents_set: u64,
    /// Regions whose bit was cleared.
    pub intents_cleared: u64,
}

/// The durable side of the map. See the module's header.
#[derive(Debug)]
pub struct MapLog {
    superblock: BlockSuperblock,
    /// The superblock may not be durable: it is what a run has left that may have been killed before its flush, or a change of it
    /// has failed. The other copy must not be written before it is, or a power cut could take both.
    doubtful: bool,
    /// Where records go: generation, area, next page.
    generation: u64,
    area: u32,
    next: u64,
    /// Pages that the log of the generation before had, as far as they count.
    before: u64,
    /// Everything that was known to be in the log was there at the start.
    whole: bool,
    snapshot: Option<Snapshot>,
    /// The map in memory may have changes that no record was made of: nothing is proved quiet before a snapshot.
    resync: bool,
    bits: Vec<u8>,
    /// Regions with a bit, and when they were last asked for.
    set: BTreeMap<u32, Nanos>,
    /// None of them was asked for, or found in use, before this: until it is long enough ago none is looked at.
    earliest: Nanos,
    asked: VecDeque<(u32, u32)>,
    /// Regions that are looked at whenever they were asked for last: the next of them, and the last.
    hurried: Option<(u32, u32)>,
    idle: Nanos,
    stats: LogStats,
    #[cfg(feature = "planted")]
    pub(super) fault: Option<Planted>,
}

/// What was found on the device.
#[derive(Debug)]
pub struct Recovered {
    /// The log, ready to go on. Its superblock is the one that was given: raise the epoch and write it before the first
    /// step.
    pub log: MapLog,
    /// Records that were read.
    pub records: u64,
    /// Slots of pages of the snapshot that were damaged: those of which no record said anything later, which are free now, are
    /// lost, and must be [held](super::map::Map::hold).
    pub damaged: Vec<std::ops::Range<u64>>,
}

impl MapLog {
    /// Bits that are asked for and that no step has set.
    pub(in crate::block) fn bits_asked(&self) -> usize {
        self.asked.len()
    }

    /// Reads the durable map. `put` is given the state of every slot of the device, the latest last; lines of regions
    /// that [`MapLog::is_set`] must not be used. With `shared`, the map itself survived in memory: `put` is not called,
    /// only the end of the log is sought, and the first thing the log does is a snapshot. Until that is durable the log may say
    /// anything of slots that are free in memory: it may have lost its last batch. `BlockShard::quiet` is not asked before.
    ///
    /// # Errors
    /// If the device cannot be read.
    pub fn recover(
        superblock: BlockSuperblock,
        shared: bool,
        idle: Nanos,
        io: &mut impl LogIo,
        mut put: impl FnMut(u64, Held),
    ) -> Result<Recovered, IoFailed> {
        let layout = superblock.layout;
        let mut damaged = Vec::new();
        let shared = shared && !layout.is_sparse();
        if !shared && superblock.snapshot && !layout.is_sparse() {
            read_pages(
                io,
                layout.snapshot_at(superblock.area),
                layout.snapshot_pages,
                |number, page| {
                    let first = number * SLOTS_PER_PAGE as u64;
                    let last = (first + SLOTS_PER_PAGE as u64).min(layout.slots());
                    match pages::decode_snapshot(page, superblock.generation, number) {
                        Some(slots) => {
                            (first..last).zip(slots).for_each(|(slot, held)| put(slot, held))
                        }
                        None => damaged.push(first..last),
                    }
                    true
                },
            )?;
        }
        let mut records = 0;
        let mut apply = |page: LogPage| {
            records += page.records.len() as u64;
            for Record { slot, holds } in page.records {
                if slot < layout.slots() && !shared {
                    put(slot, holds);
                }
            }
        };
        let mut generation = superblock.generation;
        let mut area = superblock.area;
        // (A log without pages has none: with a table there is nothing to read.)
        let ruling = read_log(io, &layout, generation, area, 0, &mut apply)?;
        // A snapshot that was under way when the last run ended: its log follows ours.
        let ahead = read_log(io, &layout, generation + 1, 1 - area, ruling.epoch, &mut apply)?;
        let reaches = |reach: Reach| match reach.generation.checked_sub(superblock.generation) {
            // What the snapshot was made of.
            None => true,
            Some(0) => ruling.pages >= reach.pages,
            Some(1) => ahead.pages >= reach.pages,
            Some(_) => false,
        };
        let mut whole =
            !ruling.gap && !ahead.gap && ruling.pages >= ahead.before && reaches(superblock.reach);
        let (mut next, mut before) = (ruling.pages, 0);
        let mut snapshot = None;
        if ahead.pages > 0 {
            (generation, area, next) = (generation + 1, 1 - area, ahead.pages);
            before = ruling.pages;
            snapshot = Some(Snapshot { next: 0, is_older: true });
        }
        let mut bits = vec![0u8; (layout.intent_pages() as usize) * intents::REGIONS_PER_PAGE / 8];
        read_pages(io, layout.intents_at(), layout.intent_pages(), |number, page| {
            let per = intents::REGIONS_PER_PAGE / 8;
            let out = &mut bits[number as usize * per..][..per];
            match intents::decode(page, number, superblock.generation) {
                Some((found, reach)) => {
                    out.copy_from_slice(&found[..per]);
                    whole &= reach.is_none_or(reaches);
                }
                // Formatting leaves zeros, and the first start writes every page. Later zeros are what a device gives back
                // that has lost a page.
                None if superblock.epoch == 0 && page.iter().all(|&b| b == 0) => {}
                // Not whole: any region of it may have its bit.
                None => out.fill(0xff),
            }
            true
        })?;
        let set = ones(&bits)
            .filter(|&region| region < layout.regions)
            .map(|region| (region, Nanos::ZERO))
            .collect();
        let log = MapLog {
            generation,
            area,
            next,
            before,
            whole,
            snapshot,
            // What is damaged is written anew, too.
            resync: shared || !damaged.is_empty(),
            bits,
            set,
            doubtful: true,
            ..MapLog::fresh(superblock, idle)
        };
        Ok(Recovered { log, records, damaged })
    }

    /// The log of a device that was formatted a moment ago, unread.
    pub fn fresh(superblock: BlockSuperblock, idle: Nanos) -> MapLog {
        let pages = superblock.layout.intent_pages() as usize;
        MapLog {
            generation: superblock.generation,
            area: superblock.area,
            superblock,
            doubtful: false,
            next: 0,
            before: 0,
            whole: true,
            snapshot: None,
            resync: false,
            bits: vec![0u8; pages * intents::REGIONS_PER_PAGE / 8],
            set: BTreeMap::new(),
            earliest: Nanos::ZERO,
            asked: VecDeque::new(),
            hurried: None,
            idle,
            stats: LogStats::default(),
            #[cfg(feature = "planted")]
            fault: None,
        }
    }

    /// Whether `region` has its bit: the durable map does not know what the backing store has there.
    pub fn is_set(&self, region: u32) -> bool {
        self.set.contains_key(&region) && !self.planted(Planted::IntentsNotRead)
    }

    /// Regions of `first..=last` whose lines may hold what the backing store has answered and not made durable, as runs, first
    /// and last. Exact while nothing is under way in them: no line that was changed is cached before its region's bit is set,
    /// and a bit goes only when a flush has covered all changes of its region.
    pub fn unflushed(&self, first: u32, last: u32) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        if first > last || self.planted(Planted::UnflushedTrusted) {
            return runs;
        }
        for (&region, _) in self.set.range(first..=last) {
            match runs.last_mut() {
                Some((_, end)) if *end + 1 == region => *end = region,
                _ => runs.push((region, region)),
            }
        }
        runs
    }

    /// Whether all was read that the device is known to have had. If not, pages of the log were damaged: no line that
    /// the durable map names may be used, and it must [begin anew](MapLog::begin_anew) before the first step.
    pub fn is_whole(&self) -> bool {
        self.whole || self.planted(Planted::ShortLogBelieved)
    }

    /// Number of regions with a bit.
    pub fn regions_set(&self) -> usize {
        self.set.len()
    }

    /// The superblock in force.
    pub fn superblock(&self) -> &BlockSuperblock {
        &self.superblock
    }

    /// Counters.
    pub fn stats(&self) -> LogStats {
        self.stats
    }

    /// How far the log has come: all before is durable.
    fn reach(&self) -> Reach {
        match self.snapshot {
            // (A log that has no page yet says nothing of the one before.)
            Some(_) if self.next == 0 => {
                Reach { generation: self.generation - 1, pages: self.before }
            }
            _ => Reach { generation: self.generation, pages: self.next },
        }
    }

    /// Changes the superblock, and makes it durable: first one copy, then the other, so that damage to one undoes nothing.
    ///
    /// # Errors
    /// If the device does not take it: the change is not in force, or in one copy only.
    pub fn update(
        &mut self,
        io: &mut impl LogIo,
        change: impl FnOnce(&mut BlockSuperblock),
    ) -> Result<(), LogFailed> {
        let mut next = self.superblock.clone();
        next.reach = self.reach();
        change(&mut next);
        if self.superblock.epoch == 0 && next.epoch > 0 {
            let pages = 0..next.layout.intent_pages() as u32;
            self.write_bits(&pages.map(|n| n * intents::REGIONS_PER_PAGE as u32).collect(), io)?;
        }
        if std::mem::replace(&mut self.doubtful, true) {
            self.flush(io, "a flush of its superblock")?;
        }
        for _ in 0..2 {
            next.sequence += 1;
            let at = (next.copy() * COPY_BYTES) as u64;
            self.write(io, at, &next.encode(), "its superblock")?;
            self.flush(io, "a flush of its superblock")?;
            // This copy is whole and durable. Whatever becomes of the other, which a write that fails may tear, the next write is there.
            self.superblock.sequence = next.sequence;
        }
        (self.superblock, self.doubtful) = (next, false);
        Ok(())
    }

    /// The durable map is empty from now on, whatever was in it: for a start that does not use lines which it still
    /// names. They cannot come back, not even after a power cut in the next moment. The first thing that the log does is
    /// a snapshot of what is used. `change` is made in the same write.
    ///
    /// # Errors
    /// If the device does not take it: nothing has changed.
    pub fn begin_anew(
        &mut self,
        io: &mut impl LogIo,
        change: impl FnOnce(&mut BlockSuperblock),
    ) -> Result<(), LogFailed> {
        if self.superblock.layout.is_sparse() {
            // There is no list to begin: a page that differs is written as it is before this is in force.
            return self.update(io, change);
        }
        self.update(io, |sb| {
            change(sb);
            // Far from every log that was ever written.
            sb.generation += 1 << 20;
            sb.snapshot = false;
            sb.reach = Reach::default();
        })?;
        (self.generation, self.area, self.next) =
            (self.superblock.generation, self.superblock.area, 0);
        (self.snapshot, self.resync) = (None, true);
        (self.before, self.whole) = (0, true);
        Ok(())
    }

    /// The log of a device whose durable map becomes empty now, whatever is on it: of a cache that was given up and is taken
    /// back. `superblock` is what rules there, or later; `epoch` is one that no run had. Counters go on from `stats`. What was
    /// written when this fails is an empty map, or the one before.
    ///
    /// # Errors
    /// If the device does not take it.
    pub fn take_back(
        mut superblock: BlockSuperblock,
        epoch: u64,
        idle: Nanos,
        stats: LogStats,
        io: &mut impl LogIo,
    ) -> Result<MapLog, LogFailed> {
        // As after a format: the first change of the superblock writes every page of the write-intent map before it.
        superblock.epoch = 0;
        // Far from every log that was ever written.
        superblock.generation += 1 << 20;
        superblock.snapshot = false;
        let mut log = MapLog { stats, doubtful: true, ..MapLog::fresh(superblock, idle) };
        log.update(io, |sb| sb.epoch = epoch)?;
        Ok(log)
    }

    /// Shard `shard` asks for the bit of `region`.
    pub fn ask(&mut self, shard: u32, region: u32) {
        self.asked.push_back((shard, region));
    }

    /// Looks at regions `first..=last` with the next steps, once, however lately they were asked for: the bits of those that
    /// are quiet, and whose store is durable, go.
    pub fn hurry(&mut self, first: u32, last: u32) {
        self.hurried = (first <= last).then_some((first, last));
    }

    /// Regions whose bits may be due: their time has come, or somebody is in a hurry.
    fn due(&mut self, now: Nanos, idle: Nanos) -> Vec<u32> {
        if let Some((first, last)) = self.hurried.take() {
            let due = self.set.range(first..=last).map(|(&r, _)| r);
            let due: Vec<u32> = due.take(CLEAR_STEP).collect();
            let next = due.last().filter(|_| due.len() == CLEAR_STEP).map_or(last, |&r| r);
            self.hurried = (next < last).then_some((next + 1, last));
            if !due.is_empty() {
                return due;
            }
        }
        // After a trim of a whole volume there are half a million.
        if now.saturating_sub(self.earliest) < idle {
            return Vec::new();
        }
        let due: Vec<u32> = self
            .set
            .iter()
            .filter(|(_, at)| now.saturating_sub(**at) >= idle)
            .map(|(&r, _)| r)
            .take(CLEAR_STEP)
            .collect();
        if due.len() < CLEAR_STEP {
            // They may be asked for again at this moment, but not before.
            let rest = self.set.values().filter(|at| now.saturating_sub(**at) < idle).min();
            self.earliest = rest.copied().unwrap_or(now).min(now);
        }
        due
    }

    fn write(
        &mut self,
        io: &mut impl LogIo,
        at: u64,
        bytes: &[u8],
        what: &'static str,
    ) -> Result<(), LogFailed> {
        self.stats.bytes += bytes.len() as u64;
        io.write(at, bytes).map_err(|IoFailed| LogFailed { what })
    }

    fn flush(&mut self, io: &mut impl LogIo, what: &'static str) -> Result<(), LogFailed> {
        io.flush().map_err(|IoFailed| LogFailed { what })
    }

    /// Does the next thing that is due.
    ///
    /// # Errors
    /// If the device fails. What waited for the log must then be released by disabling the shards.
    pub fn step(
        &mut self,
        now: Nanos,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<LogStep, LogFailed> {
        if !self.asked.is_empty() {
            self.set_bits(now, shards, io)?;
            return Ok(LogStep::Worked);
        }
        if self.planted(Planted::ClearedBeforeLog) && self.clear_bits(now, self.idle, shards, io)? {
            return Ok(LogStep::Worked);
        }
        if self.room() < 2 * self.batch_pages() && self.snapshot.is_none() {
            self.begin_snapshot();
        }
        let waiting: usize = (0..self.shards()).map(|s| shards.records_waiting(s)).sum();
        if waiting > 0 && self.room() >= self.batch_pages() {
            self.batch(BATCH, shards, io)?;
            // A snapshot gets its turn under load too.
            if self.snapshot.is_some() {
                self.snapshot_step(shards, io)?;
            }
            return Ok(LogStep::Worked);
        }
        if self.resync && self.snapshot.is_none() {
            self.begin_snapshot();
        }
        if self.snapshot.is_some() {
            self.snapshot_step(shards, io)?;
            return Ok(LogStep::Worked);
        }
        if self.clear_bits(now, self.idle, shards, io)? {
            return Ok(LogStep::Worked);
        }
        Ok(LogStep::Idle)
    }

    /// Makes everything durable and clears every bit, for a clean stop: no change may be under way. Returns whether all
    /// bits are cleared (a backing store that cannot be flushed keeps its).
    ///
    /// # Errors
    /// If the cache device fails.
    pub fn settle(
        &mut self,
        now: Nanos,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<bool, LogFailed> {
        while !self.asked.is_empty()
            || self.resync
            || self.snapshot.is_some()
            || (0..self.shards()).any(|s| shards.records_waiting(s) > 0)
        {
            self.step(now, shards, io)?;
        }
        while self.clear_bits(now, Nanos::ZERO, shards, io)? {}
        Ok(self.set.is_empty())
    }

    /// Makes everything durable that the shards have to record, as far as they go on having more.
    ///
    /// # Errors
    /// If the device fails.
    pub fn write_out(
        &mut self,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<(), LogFailed> {
        while (0..self.shards()).any(|s| shards.records_waiting(s) > 0) {
            self.batch(BATCH, shards, io)?;
        }
        Ok(())
    }

    fn shards(&self) -> u32 {
        self.superblock.layout.shards
    }

    /// Pages left in the log; a table is never full.
    fn room(&self) -> u64 {
        if self.superblock.layout.is_sparse() {
            return u64::MAX;
        }
        self.superblock.layout.log_pages - self.next
    }

    fn batch_pages(&self) -> u64 {
        batch_pages(&self.superblock.layout)
    }

    fn batch(
        &mut self,
        most: usize,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<(), LogFailed> {
        let layout = self.superblock.layout;
        if layout.is_sparse() {
            return self.table_batch(shards, io);
        }
        let budget = (self.room().min(self.batch_pages()) as usize * RECORDS_PER_PAGE)
            / self.shards() as usize;
        let mut records = Vec::new();
        let mut taken = Vec::new();
        for shard in 0..self.shards() {
            taken.clear();
            shards.take_records(shard, most.min(budget), &mut taken);
            let first = u64::from(shard) * u64::from(layout.shard_slots());
            records.extend(taken.iter().map(|r| Record {
                slot: first + u64::from(r.slot.0),
                holds: r.holds.map(|(line, sum)| (line.0, sum.0)),
            }));
        }
        if records.is_empty() {
            // What waited is being updated by now. No batch becomes durable, so no shard is told of one.
            return Ok(());
        }
        let outcome = self.write_batch(&records, io);
        for shard in 0..self.shards() {
            match outcome {
                Ok(()) => shards.records_durable(shard),
                Err(_) => shards.records_lost(shard),
            }
        }
        outcome
    }

    fn write_batch(&mut self, records: &[Record], io: &mut impl LogIo) -> Result<(), LogFailed> {
        if records.iter().any(|r| r.holds.is_some()) && !self.planted(Planted::RecordBeforeData) {
            self.flush(io, "a flush of its lines")?;
        }
        let count = records.len().div_ceil(RECORDS_PER_PAGE);
        let mut bytes = vec![0u8; count * PAGE_SIZE];
        for ((page, chunk), number) in
            bytes.chunks_exact_mut(PAGE_SIZE).zip(records.chunks(RECORDS_PER_PAGE)).zip(self.next..)
        {
            let head = LogHead {
                generation: self.generation,
                number,
                epoch: self.superblock.epoch,
                batch: self.next,
                before: self.before,
            };
            pages::encode_log(page, head, chunk);
        }
        let at = self.superblock.layout.log_at(self.area) + self.next * PAGE_SIZE as u64;
        self.write(io, at, &bytes, "records of its map")?;
        self.flush(io, "a flush of its map")?;
        self.next += count as u64;
        self.stats.records += records.len() as u64;
        self.stats.batches += 1;
        Ok(())
    }

    fn begin_snapshot(&mut self) {
        self.before = self.next;
        self.generation += 1;
        self.area = 1 - self.area;
        self.next = 0;
        self.snapshot = Some(Snapshot { next: 0, is_older: false });
    }

    fn snapshot_step(
        &mut self,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<(), LogFailed> {
        let Some(Snapshot { next, is_older }) = self.snapshot else { return Ok(()) };
        let layout = self.superblock.layout;
        let until = (next + SNAPSHOT_STEP).min(layout.snapshot_pages);
        let mut slots: Vec<Held> = Vec::new();
        let mut slot = next * SLOTS_PER_PAGE as u64;
        let last = (until * SLOTS_PER_PAGE as u64).min(layout.slots());
        while slot < last {
            let per = u64::from(layout.shard_slots());
            let (shard, first) = ((slot / per) as u32, (slot % per) as u32);
            let most = (last - slot).min(per - u64::from(first)) as u32;
            shards.state(shard, SlotId(first), most, &mut slots);
            slot += u64::from(most);
        }
        let mut bytes = vec![0u8; (until - next) as usize * PAGE_SIZE];
        for ((page, chunk), number) in
            bytes.chunks_exact_mut(PAGE_SIZE).zip(slots.chunks(SLOTS_PER_PAGE)).zip(next..)
        {
            pages::encode_snapshot(page, self.generation, number, chunk);
        }
        let at = layout.snapshot_at(self.area) + next * PAGE_SIZE as u64;
        self.write(io, at, &bytes, "a snapshot of its map")?;
        if until < layout.snapshot_pages {
            self.snapshot = Some(Snapshot { next: until, is_older });
            return Ok(());
        }
        // The lines that it names, and itself.
        self.flush(io, "a flush of a snapshot")?;
        let (generation, area) = (self.generation, self.area);
        self.update(io, |sb| {
            (sb.generation, sb.area, sb.snapshot) = (generation, area, true);
        })?;
        self.snapshot = None;
        // What an earlier run wrote to the log behind this snapshot overrides it. If the map in memory is not known to agree, another is made.
        self.resync &= is_older;
        self.stats.snapshots += 1;
        Ok(())
    }

    fn write_bits(
        &mut self,
        regions: &BTreeSet<u32>,
        io: &mut impl LogIo,
    ) -> Result<(), LogFailed> {
        let per = intents::REGIONS_PER_PAGE;
        let numbers: BTreeSet<u64> = regions.iter().map(|&r| u64::from(r) / per as u64).collect();
        for number in numbers {
            let mut page = vec![0u8; PAGE_SIZE];
            let bits = &self.bits[number as usize * per / 8..][..per / 8];
            intents::encode(&mut page, number, self.superblock.epoch, self.reach(), bits);
            let at = self.superblock.layout.intents_at() + number * PAGE_SIZE as u64;
            self.write(io, at, &page, "its write-intent map")?;
        }
        self.flush(io, "a flush of its write-intent map")
    }

    fn set_bits(
        &mut self,
        now: Nanos,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<(), LogFailed> {
        let asked: Vec<(u32, u32)> = self.asked.iter().copied().collect();
        let new: BTreeSet<u32> =
            asked.iter().map(|a| a.1).filter(|r| !self.set.contains_key(r)).collect();
        if !new.is_empty() {
            for &region in &new {
                self.bits[region as usize / 8] |= 1 << (region % 8);
            }
            self.write_bits(&new, io)?;
            self.stats.intents_set += new.len() as u64;
        }
        self.asked.clear();
        // A step that finds nothing to do is in no record: whether one has looked meanwhile must not matter.
        let looked = |&(first, last): &(u32, u32)| self.set.range(first..=last).next().is_none();
        self.hurried = self.hurried.filter(|range| !looked(range));
        self.earliest = self.earliest.min(now);
        for (shard, region) in asked {
            self.set.insert(region, now);
            shards.intent_ready(shard, region);
        }
        Ok(())
    }

    fn clear_bits(
        &mut self,
        now: Nanos,
        idle: Nanos,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<bool, LogFailed> {
        if self.resync || self.snapshot.is_some() || !self.asked.is_empty() {
            return Ok(false);
        }
        let due = self.due(now, idle);
        // All are asked before the backing stores are made durable: one flush covers every region of a volume.
        let mut asked = BTreeSet::new();
        for region in due {
            // Every shard is asked: what one has forgotten it will ask for again, and the bit is still there.
            let shards_quiet = (0..self.shards()).filter(|&s| shards.quiet(s, region)).count();
            if shards_quiet == self.shards() as usize {
                asked.insert(region);
            } else {
                self.set.insert(region, now);
            }
        }
        let mut quiet = BTreeSet::new();
        for region in asked {
            if shards.flush_backing(region).is_ok() {
                quiet.insert(region);
            } else {
                self.set.insert(region, now);
            }
        }
        if quiet.is_empty() {
            return Ok(self.hurried.is_some());
        }
        // Everything that happened before this moment, in all shards: each has at most its slots' worth.
        loop {
            let waiting = (0..self.shards()).map(|s| shards.records_waiting(s)).max().unwrap_or(0);
            if waiting == 0 || self.planted(Planted::ClearedBeforeLog) {
                break;
            }
            if self.room() < self.batch_pages() {
                // Another time, with a fresh log.
                for &region in &quiet {
                    self.set.insert(region, now);
                }
                self.begin_snapshot();
                return Ok(true);
            }
            let before = waiting;
            self.batch(BATCH, shards, io)?;
            let after = (0..self.shards()).map(|s| shards.records_waiting(s)).max().unwrap_or(0);
            if after >= before {
                // Clients are faster than the log, or all that waits is being updated: another time.
                for &region in &quiet {
                    self.set.insert(region, now);
                }
                return Ok(false);
            }
        }
        for region in &quiet {
            self.bits[*region as usize / 8] &= !(1 << (region % 8));
            self.set.remove(region);
        }
        self.write_bits(&quiet, io)?;
        self.stats.intents_cleared += quiet.len() as u64;
        Ok(true)
    }
}

/// The numbers of the bits that are set. Nearly all are clear, so they are compared in long pieces first.
fn ones(bits: &[u8]) -> impl Iterator<Item = u32> {
    const PIECE: usize = 512;
    let pieces =
        bits.chunks(PIECE).enumerate().filter(|(_, piece)| **piece != [0; PIECE][..piece.len()]);
    let bytes =
        pieces.flat_map(|(n, piece)| (n * PIECE..).zip(piece)).filter(|(_, byte)| **byte != 0);
    bytes.flat_map(|(i, byte)| {
        (0..8).filter(move |b| byte & 1 << b != 0).map(move |b| i as u32 * 8 + b)
    })
}

/// Reads `count` pages from `at` on, a MiB at a time, until `each` says that it has enough.
fn read_pages(
    io: &mut impl LogIo,
    at: u64,
    count: u64,
    mut each: impl FnMut(u64, &[u8]) -> bool,
) -> Result<(), IoFailed> {
    let step = 256u64;
    let mut bytes = vec![0u8; step.min(count) as usize * PAGE_SIZE];
    let mut number = 0;
    while number < count {
        let n = step.min(count - number);
        let part = &mut bytes[..n as usize * PAGE_SIZE];
        io.read(at + number * PAGE_SIZE as u64, part)?;
        for (page, number) in part.chunks_exact(PAGE_SIZE).zip(number..) {
            if !each(number, page) {
                return Ok(());
            }
        }
        number += n;
    }
    Ok(())
}

/// What [`read_log`] found.
struct FoundLog {
    /// Its pages.
    pages: u64,
    /// The epoch of the last.
    epoch: u64,
    /// What it says of the log before it.
    before: u64,
    /// It was longer: a page lies behind its end that was written when what is missing was durable.
    gap: bool,
}

/// Reads the log of `generation` in `area`, from pages of `epoch` on.
fn read_log(
    io: &mut impl LogIo,
    layout: &Layout,
    generation: u64,
    area: u32,
    epoch: u64,
    apply: &mut impl FnMut(LogPage),
) -> Result<FoundLog, IoFailed> {
    let mut found = FoundLog { pages: 0, epoch, before: 0, gap: false };
    let mut ended = false;
    // The batch behind the one that a damaged page was of begins within one batch.
    let look_behind = 2 * batch_pages(layout);
    read_pages(io, layout.log_at(area), layout.log_pages, |number, page| {
        match pages::decode_log(page, generation, number) {
            Some(page) if !ended && page.head.epoch >= found.epoch => {
                found.pages = number + 1;
                found.epoch = page.head.epoch;
                found.before = page.head.before;
                apply(page);
            }
            Some(page) => {
                ended = true;
                found.gap |= page.head.batch > found.pages;
            }
            None => ended = true,
        }
        !(found.gap || ended && number >= found.pages + look_behind)
    })?;
    Ok(found)
}

/// Pages that a batch may take.
fn batch_pages(layout: &Layout) -> u64 {
    let most = (BATCH * layout.shards as usize).div_ceil(RECORDS_PER_PAGE) as u64 + 1;
    most.min(layout.log_pages / 4)
}
