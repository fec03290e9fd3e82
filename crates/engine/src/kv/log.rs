//! The flash log: one per drive, over all shards. It fills segments with what the shards stage, writes them,
//! publishes them, and reclaims them in FIFO order.
//!
//! A state machine that does at most one small thing per [`FlashLog::step`]: lock one shard for a moment, or write one
//! segment, or read one. Between two steps anything may happen to the shards; the crash tests rely on it.
//!
//! ```text
//!   free ──open──▶ filling ──write──▶ live ──oldest, room needed──▶ reclaiming ──every shard took back its own──▶ free
//!                     └── write failed: abandoned, objects stay in DRAM ──▶ free (or failed, and tried again later)
//! ```
//!
//! Order, for `kill -9`: a segment is marked live in the [`SegmentTable`] after it is written and before any index entry
//! leads to it; it is marked reclaiming before the first of its entries goes, and its bytes are overwritten only after
//! the last has gone. Attaching drops the entries of every segment that is not live.

mod going_on;
mod table;

use larder_base::{Nanos, Now, ObjectHash};
use larder_format::page::SMALL_MAX;
use larder_format::{Filling, Kind, RecordMeta, record_len};
use larder_policy::admission::AdmissionPolicy;
use larder_policy::budget::WriteBudget;

use super::clean::{Destination, StageSink, Staged, place_of_placed};
use super::config::{FlashGeometry, Part};
use super::shard::KvShard;
pub use table::{Ends, SegmentState, SegmentTable};

use going_on::GoingOn;

use crate::dram::{Arena, Block, ObjectMemory};
use crate::segment::{Fill, NoRoom, SegmentBuilder};

/// The device failed; the runtime has logged how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoFailed;

/// Whole-segment I/O, as an argument: the runtime's device, the simulator's model, a test's fault injector.
pub trait SegmentIo {
    /// Memory for one segment, of the alignment the device wants.
    type Buffer: AsRef<[u8]> + AsMut<[u8]>;
    /// The next write is of a segment whose first record begins at `first`; before lies the end of one that began in an earlier
    /// segment. For who keeps records rather than bytes.
    fn begins_at(&mut self, _first: u32) {}
    /// Writes a whole segment. After `Ok` the bytes survive the death of the process.
    ///
    /// # Errors
    /// When any part could not be written.
    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed>;
    /// Reads a whole segment.
    ///
    /// # Errors
    /// When any part could not be read.
    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed>;
}

/// The shards, each behind whatever lock the runtime has.
pub trait Shards<M = Arena> {
    /// Whether there are several logs, which take turns.
    fn take_turns(&self) -> bool {
        false
    }
    /// Whether it is this log's turn to look for work; `standing` is how it stands.
    fn is_turn(&mut self, _standing: &Standing) -> bool {
        true
    }
    /// Something is to be done, and the turn is another log's.
    fn pass(&mut self) {}
    /// How many.
    fn count(&self) -> usize;
    /// Which one a hash belongs to.
    fn shard_of(&self, hash: ObjectHash) -> usize;
    /// Runs `f` on one of them.
    fn with<R>(&mut self, shard: usize, f: impl FnOnce(&mut KvShard<M>) -> R) -> R;
}

/// How a log stands, where there are several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// The place of its drive.
    pub drive: usize,
    /// Bytes of its drive.
    pub capacity: u64,
    /// Bytes written to it.
    pub written: u64,
    /// It takes writes, and its budget allows some.
    pub takes: bool,
}

/// What the log is built from.
#[derive(Clone, Debug)]
pub struct LogConfig {
    /// The flash device.
    pub flash: FlashGeometry,
    /// Which part of the cache's flash it is.
    pub part: Part,
    /// The largest record that may be offered, bytes.
    pub largest: u64,
    /// Share of the flash that may hold hot data, percent (Flashield §4.3: 70).
    pub hot_percent: u8,
    /// Share of a reclaimed segment that may go back to DRAM, percent.
    pub reinsert_percent: u8,
    /// How long a failed device is left alone before it is tried again.
    pub retry_after: Nanos,
}

/// What the log has done, and how it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStats {
    /// Segments written.
    pub segments_written: u64,
    /// Bytes written to the device, all of them.
    pub bytes_written: u64,
    /// Of these, bytes of records that were alive when they were written.
    pub record_bytes_written: u64,
    /// Segments reclaimed.
    pub segments_reclaimed: u64,
    /// Bytes read by reclaim.
    pub bytes_reclaim_read: u64,
    /// Bytes put back into DRAM by reclaim.
    pub bytes_reinserted: u64,
    /// Segment writes that failed.
    pub write_errors: u64,
    /// Segment reads that failed.
    pub read_errors: u64,
    /// Ghosts made by CLOCK.
    pub ghosts_made: u64,
    /// The device fails: nothing is written until it is tried again (a present state).
    pub degraded: bool,
    /// Live segments (a present state).
    pub live_segments: u64,
    /// How long the last reclaimed segment had lived, milliseconds (a present state).
    pub last_lifetime_millis: u64,
}

impl LogStats {
    /// This log's and another's: flash is out of use where it is on both.
    #[must_use]
    pub fn and(&self, other: &LogStats) -> LogStats {
        let LogStats {
            segments_written,
            bytes_written,
            record_bytes_written,
            segments_reclaimed,
            bytes_reclaim_read,
            bytes_reinserted,
            write_errors,
            read_errors,
            ghosts_made,
            degraded,
            live_segments,
            last_lifetime_millis,
        } = other;
        LogStats {
            segments_written: self.segments_written + segments_written,
            bytes_written: self.bytes_written + bytes_written,
            record_bytes_written: self.record_bytes_written + record_bytes_written,
            segments_reclaimed: self.segments_reclaimed + segments_reclaimed,
            bytes_reclaim_read: self.bytes_reclaim_read + bytes_reclaim_read,
            bytes_reinserted: self.bytes_reinserted + bytes_reinserted,
            write_errors: self.write_errors + write_errors,
            read_errors: self.read_errors + read_errors,
            ghosts_made: self.ghosts_made + ghosts_made,
            degraded: self.degraded && *degraded,
            live_segments: self.live_segments + live_segments,
            // Of a drive that has reclaimed nothing there is none.
            last_lifetime_millis: match (self.last_lifetime_millis, *last_lifetime_millis) {
                (0, one) | (one, 0) => one,
                (a, b) => a.midpoint(b),
            },
        }
    }
}

/// What one step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Nothing to do.
    Idle,
    /// Something was done; there may be more.
    Worked,
}

struct Open<B> {
    builder: SegmentBuilder<B>,
    segment: u16,
    /// What the shards know it by.
    number: u16,
    generation: u64,
    /// By shard.
    staged: Vec<Vec<Staged>>,
    full: bool,
}

struct Written {
    segment: u16,
    generation: u64,
    kind: Kind,
    staged: Vec<Vec<Staged>>,
    ok: bool,
}

struct Reclaim {
    segment: u16,
    kind: Kind,
    readable: bool,
    next_shard: usize,
    budget: u64,
    lifetime: Option<Nanos>,
}

enum Phase {
    Stage,
    Publish { written: Written, next_shard: usize },
    Reclaim(Reclaim),
}

/// The log over one flash device. See the [module](self).
pub struct FlashLog<B> {
    config: LogConfig,
    table: SegmentTable,
    budget: WriteBudget,
    /// Small, large.
    open: [Option<Open<B>>; 2],
    going_on: Option<GoingOn>,
    /// The segments, first and last, that are kept for large records: behind the open one, up to the end of its zone.
    kept: Option<(u16, u16)>,
    /// Small segments of higher generations were filled beside the cursor, while it was beyond those that can be small.
    beside_from: u64,
    /// The last large segment was left with a record that goes on.
    goes_on: bool,
    /// Zones that were passed over since a large record was placed, for want of room for one.
    passed: u32,
    buffers: Vec<B>,
    phase: Phase,
    next_shard: usize,
    /// Shards that have asked for room and not yet got enough.
    cleaning: Vec<bool>,
    /// Shards in a row for which nothing could be done.
    stuck: usize,
    filled_at: Vec<Option<Nanos>>,
    failed_at: Option<Nanos>,
    failures: u32,
    stats: LogStats,
}

/// Zones that are passed over in a row to find room for a record: all of them, twice.
const MOST_PASSED: u32 = 16;
/// Failures in a row after which the device counts as failed.
const MAX_FAILURES: u32 = 3;

impl<B: AsRef<[u8]> + AsMut<[u8]>> FlashLog<B> {
    /// A log over `table`. `buffers` are three segments' worth of memory: one for each open segment and one for reclaim.
    ///
    /// # Panics
    /// If there are not three buffers of a segment each (and there is a flash).
    pub fn new(
        config: LogConfig,
        table: SegmentTable,
        budget: WriteBudget,
        buffers: Vec<B>,
    ) -> FlashLog<B> {
        let bytes = config.flash.segment_bytes as usize;
        assert!(
            config.flash.segments == 0
                || buffers.len() == 3 && buffers.iter().all(|b| b.as_ref().len() == bytes),
            "a log needs three buffers of {bytes} bytes"
        );
        let segments = usize::from(config.flash.segments) + 1;
        let mut log = FlashLog {
            config,
            table,
            budget,
            open: [None, None],
            going_on: None,
            kept: None,
            beside_from: u64::MAX,
            goes_on: false,
            passed: 0,
            buffers,
            phase: Phase::Stage,
            next_shard: 0,
            cleaning: Vec::new(),
            stuck: 0,
            filled_at: vec![None; segments],
            failed_at: None,
            failures: 0,
            stats: LogStats::default(),
        };
        log.stats.live_segments = log.count_live();
        log
    }

    fn count_live(&self) -> u64 {
        (1..=self.config.flash.segments)
            .filter(|&s| matches!(self.table.state(s), SegmentState::Live(_)))
            .count() as u64
    }

    /// The flash that it is of.
    pub fn flash(&self) -> &FlashGeometry {
        &self.config.flash
    }

    /// Counters and present state.
    pub fn stats(&self) -> &LogStats {
        &self.stats
    }

    /// The segment table.
    pub fn table(&self) -> &SegmentTable {
        &self.table
    }

    /// The segment table, for tests.
    pub fn table_mut(&mut self) -> &mut SegmentTable {
        &mut self.table
    }

    /// The write budget.
    pub fn budget(&self) -> &WriteBudget {
        &self.budget
    }

    /// The write budget, to ask for what it must remember.
    pub fn budget_mut(&mut self) -> &mut WriteBudget {
        &mut self.budget
    }

    /// Bytes of memory: buffers, open segments and what is known of staged objects.
    pub fn memory_bytes(&self) -> usize {
        let staged: usize = self
            .open
            .iter()
            .flatten()
            .map(|o| o.staged.iter().map(|s| s.capacity() * size_of::<Staged>()).sum::<usize>())
            .sum();
        3 * self.config.flash.segment_bytes as usize + staged + self.filled_at.len() * 24
    }

    /// Does at most one thing. Call again until [`Step::Idle`], then again when a shard is short of room or after a
    /// second.
    pub fn step<M: ObjectMemory>(
        &mut self,
        now: Now,
        shards: &mut impl Shards<M>,
        io: &mut impl SegmentIo,
    ) -> Step {
        if self.cleaning.len() != shards.count() {
            self.cleaning = vec![false; shards.count()];
        }
        match std::mem::replace(&mut self.phase, Phase::Stage) {
            Phase::Publish { written, next_shard } => {
                self.publish(now, shards, written, next_shard)
            }
            Phase::Reclaim(reclaim) => self.reclaim(now, shards, reclaim),
            Phase::Stage => {
                if let Some(i) = self.open.iter().position(|o| o.as_ref().is_some_and(|o| o.full)) {
                    self.write(now, i, io);
                    return Step::Worked;
                }
                if let Some(going_on) = self.going_on.take() {
                    self.go_on(now, going_on, shards, io);
                    return Step::Worked;
                }
                if shards.take_turns() && !shards.is_turn(&self.standing(now)) {
                    return self.give_way(shards);
                }
                let Some(shard) = self.next_short(shards) else { return Step::Idle };
                if self.usable(now)
                    && let Some(reclaim) = self.prepare(now, io)
                {
                    self.phase = Phase::Reclaim(reclaim);
                    return Step::Worked;
                }
                if self.stage(now, shard, shards) {
                    self.stuck = 0;
                } else {
                    // Not for this shard, now; others may still be helped.
                    self.cleaning[shard] = false;
                    self.stuck += 1;
                    if self.stuck >= shards.count() {
                        self.stuck = 0;
                        return Step::Idle;
                    }
                }
            }
        }
        Step::Worked
    }

    /// Writes out what is staged, however little: at a clean stop.
    pub fn drain<M: ObjectMemory>(
        &mut self,
        now: Now,
        shards: &mut impl Shards<M>,
        io: &mut impl SegmentIo,
    ) {
        loop {
            for open in self.open.iter_mut().flatten() {
                open.full = !open.builder.is_empty();
            }
            let busy = !matches!(self.phase, Phase::Stage)
                || self.going_on.is_some()
                || self.open.iter().flatten().any(|o| o.full);
            if !busy {
                break;
            }
            self.step(now, shards, io);
        }
    }

    fn usable(&mut self, now: Now) -> bool {
        if self.config.flash.segments == 0 {
            return false;
        }
        if let Some(at) = self.failed_at {
            if now.mono.saturating_sub(at) < self.config.retry_after {
                return false;
            }
            self.failed_at = None;
            self.failures = MAX_FAILURES - 1;
        }
        true
    }

    /// How it stands.
    fn standing(&mut self, now: Now) -> Standing {
        let segment = u64::from(self.config.flash.segment_bytes);
        let affords = match self.budget.saved(now.mono) {
            None => true,
            // (What can be saved up may be less than a segment.)
            Some((saved, most)) => saved > 0 && saved >= segment.min(most / 2),
        };
        Standing {
            drive: self.config.part.drive,
            capacity: self.config.flash.capacity(),
            written: self.stats.bytes_written,
            takes: self.usable(now) && affords,
        }
    }

    /// It is another log's turn. Where that can stage nothing, since too much is staged already, what is open here is written as it is.
    fn give_way<M: ObjectMemory>(&mut self, shards: &mut impl Shards<M>) -> Step {
        let looked: Vec<_> = (0..shards.count())
            .map(|i| shards.with(i, |s| (s.is_short(), s.may_stage())))
            .collect();
        if looked.iter().any(|(short, _)| *short) {
            shards.pass();
        }
        let stuck = looked.iter().any(|(short, may_stage)| *short && !may_stage);
        let holds = self.open.iter().flatten().any(|open| !open.builder.is_empty());
        if !holds || !stuck {
            return Step::Idle;
        }
        for open in self.open.iter_mut().flatten() {
            open.full |= !open.builder.is_empty();
        }
        Step::Worked
    }

    /// Which part of the cache's flash it is over.
    pub fn part(&self) -> &Part {
        &self.config.part
    }

    /// What the shards know one of its segments by.
    fn number(&self, segment: u16) -> u16 {
        self.config.part.numbers.number(segment)
    }

    /// The last of its segments that can hold small objects, or a higher number.
    fn last_small(&self) -> u16 {
        self.config.part.numbers.small
    }

    /// The next shard that needs room.
    fn next_short<M: ObjectMemory>(&mut self, shards: &mut impl Shards<M>) -> Option<usize> {
        let n = shards.count();
        for _ in 0..n {
            let shard = self.next_shard;
            self.next_shard = (shard + 1) % n;
            // A shard that called and is not short any more (a request has evicted, a client deleted) must be able to
            // call again.
            let short = shards.with(shard, |s| {
                s.cleaner_came();
                s.is_short()
            });
            if self.cleaning[shard] || short {
                self.cleaning[shard] = true;
                return Some(shard);
            }
        }
        None
    }

    /// Opens segments; when none is free, says what must be reclaimed.
    fn prepare(&mut self, now: Now, io: &mut impl SegmentIo) -> Option<Reclaim> {
        for (i, kind) in [Kind::Small, Kind::Large].into_iter().enumerate() {
            if self.open[i].is_some() || self.buffers.len() < 2 {
                continue;
            }
            let segment = self.next_segment(kind)?;
            match self.table.state(segment) {
                SegmentState::Live(old) => return Some(self.begin_reclaim(now, segment, old, io)),
                SegmentState::Reclaiming(_) | SegmentState::Filling => return None,
                SegmentState::Free | SegmentState::Failed => self.open_segment(i, kind, segment),
            }
        }
        None
    }

    fn open_segment(&mut self, i: usize, kind: Kind, segment: u16) {
        let Some(buffer) = self.buffers.pop() else { return };
        let is_beside = self.is_beside(kind, segment);
        let highest = self.table.words.load(1);
        let generation = highest + 1;
        self.table.words.store(1, generation);
        self.table.set(segment, SegmentState::Filling, generation);
        match self.kept {
            Some((first, last)) if first == segment => {
                self.kept = (first < last).then_some((first + 1, last));
            }
            _ if is_beside => {}
            _ => self.move_cursor(segment),
        }
        if kind == Kind::Large && self.goes_on {
            self.keep_behind(segment);
        }
        let number = self.number(segment);
        let filling = Filling { salt: self.config.flash.salt, segment: number, generation };
        self.open[i] = Some(Open {
            builder: SegmentBuilder::new(kind, filling, buffer)
                .with_align(self.config.part.extent_align),
            number,
            segment,
            generation,
            staged: vec![Vec::new(); self.cleaning.len()],
            full: false,
        });
    }

    /// Segments are filled from the one behind `segment` on.
    fn move_cursor(&mut self, segment: u16) {
        if self.table.words.load(0) < self.last_small().into() && segment >= self.last_small() {
            self.beside_from = self.table.words.load(1);
        }
        self.table.words.store(0, u64::from(segment) % u64::from(self.config.flash.segments));
    }

    /// Returns false when nothing could be done: then the shard is looked at again later.
    fn stage<M: ObjectMemory>(
        &mut self,
        now: Now,
        shard: usize,
        shards: &mut impl Shards<M>,
    ) -> bool {
        let usable = self.failed_at.is_none() && self.config.flash.segments > 0;
        // What both open segments may take, and one object that then finds no room: less would look like a spent budget.
        let segment = u64::from(self.config.flash.segment_bytes);
        let wanted = 2 * segment + segment.max(self.config.largest);
        let saved = self.budget.saved(now.mono);
        let granted = if usable { self.budget.grant(now.mono, wanted) } else { 0 };
        // An empty flash has nothing to lose, as long as the budget has bytes for it.
        let first_fill = self.stats.segments_reclaimed == 0 && self.budget.lends();
        let go_on_to = self.may_go_on_to();
        let may_pass = self.passed < MOST_PASSED;
        let mut sink = Sink {
            open: &mut self.open,
            drive: self.config.part.drive,
            shard,
            granted,
            usable,
            go_on_to,
            may_pass,
            passes: false,
            going_on: None,
        };
        let (report, hot_limit) = shards.with(shard, |s| {
            s.admission_mut().set_first_fill(first_fill);
            if let Some((saved, most)) = saved {
                s.admission_mut().set_saved(saved, most);
            }
            let report = s.stage(now, &mut sink);
            (report, hot_limit(s, self.config.hot_percent))
        });
        let Sink { granted: left, going_on, passes, .. } = sink;
        self.budget.refund(left);
        self.passed = if passes { self.passed + 1 } else { self.passed };
        if let Some(record) = going_on {
            self.keep_behind(record.next - 1);
            (self.going_on, self.passed) = (Some(record), 0);
        }
        if report.satisfied {
            self.cleaning[shard] = false;
        }
        let passed = passes && self.pass_zone();
        // Nothing more can be done in DRAM but to write what is staged.
        let stuck =
            !passed && !report.satisfied && report.staged + report.evicted + report.spared == 0;
        for open in self.open.iter_mut().flatten() {
            open.full |= open.builder.is_full_enough() || stuck && !open.builder.is_empty();
        }
        self.stats.ghosts_made += shards.with(shard, |s| {
            let buckets = s.index().buckets() / 64 + 64;
            s.cool(hot_limit, buckets)
        });
        !stuck || self.open.iter().flatten().any(|o| o.full)
    }

    fn write(&mut self, now: Now, i: usize, io: &mut impl SegmentIo) {
        let Some(mut open) = self.open[i].take() else { return };
        let kind = open.builder.kind();
        let (buffer, fill) = open.builder.finish();
        io.begins_at(fill.begins as u32);
        let ok = io.write(open.segment, buffer.as_ref()).is_ok();
        self.buffers.push(buffer);
        self.table.set_ends(open.segment, &fill);
        self.goes_on = if kind == Kind::Large { fill.cut.is_some() } else { self.goes_on };
        if !ok {
            // What goes on from here does not.
            if kind == Kind::Large
                && let Some(record) = self.going_on.take()
            {
                open.staged[record.shard].push(record.staged);
            }
            let own = self.config.part.numbers;
            for staged in open.staged.iter().flatten().filter(|s| s.segment != open.number) {
                if let Some(began) = own.segment(staged.segment, self.config.flash.segments) {
                    self.table.set_lost(began);
                }
            }
        }
        if ok {
            self.note_written(now, &open.segment, &fill);
            self.failures = 0;
            self.stats.degraded = false;
            self.table.set(open.segment, SegmentState::Live(kind), open.generation);
        } else {
            self.stats.write_errors += 1;
            self.failures += 1;
            if self.failures >= MAX_FAILURES {
                self.failed_at = Some(now.mono);
                self.stats.degraded = true;
            }
            self.table.set(open.segment, SegmentState::Failed, open.generation);
            self.budget.refund(fill.record_bytes);
        }
        let written = Written {
            segment: open.segment,
            generation: open.generation,
            kind,
            staged: open.staged,
            ok,
        };
        self.phase = Phase::Publish { written, next_shard: 0 };
    }

    fn note_written(&mut self, now: Now, segment: &u16, fill: &Fill) {
        self.stats.segments_written += 1;
        self.stats.bytes_written += fill.capacity;
        self.stats.record_bytes_written += fill.record_bytes - fill.dead_bytes;
        self.stats.live_segments += 1;
        self.filled_at[usize::from(*segment)] = Some(now.mono);
        // What was granted was the records; the segment's unused bytes are written too.
        self.budget.charge(now.mono, fill.capacity.saturating_sub(fill.record_bytes));
    }

    fn publish<M: ObjectMemory>(
        &mut self,
        now: Now,
        shards: &mut impl Shards<M>,
        written: Written,
        next_shard: usize,
    ) {
        let staged = &written.staged[next_shard];
        let number = self.number(written.segment);
        let goes_on = self.going_on.as_ref().is_some_and(|record| record.shard == next_shard);
        let goes_on = goes_on && written.kind == Kind::Large;
        let to = Destination { drive: self.config.part.drive, kind: written.kind, goes_on };
        shards.with(next_shard, |s| {
            if written.ok {
                s.publish(now, number, written.generation, to, staged);
            } else {
                s.abandon(to, staged);
            }
        });
        let next_shard = next_shard + 1;
        if next_shard < shards.count() {
            self.phase = Phase::Publish { written, next_shard };
        }
    }

    fn begin_reclaim(
        &mut self,
        now: Now,
        segment: u16,
        kind: Kind,
        io: &mut impl SegmentIo,
    ) -> Reclaim {
        let generation = self.table.generation(segment);
        self.table.set(segment, SegmentState::Reclaiming(kind), generation);
        let mut readable = false;
        if let Some(buffer) = self.buffers.last_mut() {
            readable = io.read(segment, buffer.as_mut()).is_ok();
            self.stats.bytes_reclaim_read += u64::from(self.config.flash.segment_bytes);
        }
        self.stats.read_errors += u64::from(!readable);
        let lifetime =
            self.filled_at[usize::from(segment)].take().map(|at| now.mono.saturating_sub(at));
        if let Some(lifetime) = lifetime {
            self.stats.last_lifetime_millis = lifetime.as_millis();
        }
        let budget = u64::from(self.config.flash.segment_bytes)
            * u64::from(self.config.reinsert_percent)
            / 100;
        Reclaim { segment, kind, readable, next_shard: 0, budget, lifetime }
    }

    fn reclaim<M: ObjectMemory>(
        &mut self,
        now: Now,
        shards: &mut impl Shards<M>,
        mut reclaim: Reclaim,
    ) {
        let shard = reclaim.next_shard;
        let count = shards.count();
        let bytes = self.buffers.last().filter(|_| reclaim.readable).map(AsRef::as_ref);
        let owner = OwnerOf { count, shard };
        // A hash's shard is asked of `shards` before the shard is locked: `mine` must not lock.
        let mine = |hash: ObjectHash| owner.holds(hash);
        debug_assert!(count <= 256);
        let (ends, number) = (self.table.ends(reclaim.segment), self.number(reclaim.segment));
        let share = reclaim.budget / (count - shard) as u64;
        let taken = shards.with(shard, |s| {
            if let Some(lifetime) = reclaim.lifetime {
                s.admission_mut().set_lifetime(now.mono, lifetime);
            }
            s.reclaim(now, number, (reclaim.kind, ends), bytes, share, mine)
        });
        self.stats.bytes_reinserted += taken;
        reclaim.budget = reclaim.budget.saturating_sub(taken.max(share));
        reclaim.next_shard += 1;
        if reclaim.next_shard < count {
            self.phase = Phase::Reclaim(reclaim);
        } else {
            self.table.set(reclaim.segment, SegmentState::Free, 0);
            self.stats.segments_reclaimed += 1;
            self.stats.live_segments -= 1;
        }
    }
}

/// Which shard holds a hash: the 256 virtual shards are dealt out to `count` shards in equal runs.
#[derive(Clone, Copy, Debug)]
pub struct OwnerOf {
    /// Number of shards, a power of two up to 256.
    pub count: usize,
    /// The shard in question.
    pub shard: usize,
}

impl OwnerOf {
    /// The shard of `hash` among `count`.
    pub fn shard_of(hash: ObjectHash, count: usize) -> usize {
        usize::from(hash.virtual_shard()) * count / 256
    }

    /// Whether `hash` belongs to the shard.
    pub fn holds(&self, hash: ObjectHash) -> bool {
        Self::shard_of(hash, self.count) == self.shard
    }
}

/// How many entries of a shard may be hot: its part of the hot data threshold (Flashield §4.3: HDT = usable DRAM + 70 %
/// of the flash) less what is in DRAM, in objects of the mean size that came to flash.
fn hot_limit<M: ObjectMemory>(shard: &KvShard<M>, hot_percent: u8) -> u64 {
    let part = shard.config().flash.capacity() / u64::from(shard.config().shards.max(1));
    let dram_free = shard.dram_free_bytes() as u64;
    let limit = part * u64::from(hot_percent) / 100 + dram_free;
    let s = shard.stats();
    let mean = s.flash_written_bytes.checked_div(s.flash_written_objects).unwrap_or(0).max(64);
    limit / mean
}

struct Sink<'a, B> {
    open: &'a mut [Option<Open<B>>; 2],
    drive: usize,
    shard: usize,
    granted: u64,
    /// Flash takes writes: what finds no open segment may wait for the next.
    usable: bool,
    /// The last segment in which a large record may go on.
    go_on_to: u16,
    going_on: Option<GoingOn>,
    /// Another zone may be gone to where this one has no room for a record, and one is.
    may_pass: bool,
    passes: bool,
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> Sink<'_, B> {
    /// Bytes of a large segment.
    fn segment_bytes(&self) -> u64 {
        self.open[1].as_ref().map_or(0, |open| open.builder.fill().capacity)
    }

    fn of(&mut self, kind: Kind) -> Option<&mut Open<B>> {
        self.open[usize::from(kind == Kind::Large)].as_mut()
    }
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> StageSink for Sink<'_, B> {
    fn drive(&self) -> usize {
        self.drive
    }

    fn offer(
        &mut self,
        hash: ObjectHash,
        meta: &RecordMeta,
        key: &[u8],
        value: &[u8],
        block: Block,
    ) -> Result<(), NoRoom> {
        let bytes = record_len(meta, key.len(), value.len());
        let kind = if bytes > SMALL_MAX { Kind::Large } else { Kind::Small };
        let (shard, go_on_to) = (self.shard, self.go_on_to);
        let refund = u64::from(bytes as u32);
        let Some(open) = self.of(kind) else {
            self.granted += refund;
            return Err(NoRoom::Full);
        };
        let (segment_of, number, generation) = (open.segment, open.number, open.generation);
        let behind = usize::from(go_on_to.saturating_sub(segment_of));
        let beyond = behind * open.builder.fill().capacity as usize;
        let placed = open.builder.offer_beyond(hash, meta, key, value, beyond);
        let placed = placed.map(|(placed, rest)| {
            let place = place_of_placed(placed);
            let bytes = bytes as u32;
            let (segment, cas) = (number, meta.cas);
            let staged = Staged { hash, block, cas, segment, generation, place, bytes };
            let Some(rest) = rest else {
                open.staged[shard].push(staged);
                return None;
            };
            open.full = true;
            Some(GoingOn { shard, staged, rest, began: segment_of, next: segment_of + 1 })
        });
        let placed = placed.map(|going_on| {
            if going_on.is_some() {
                self.going_on = going_on;
            }
        });
        if placed.is_err() {
            self.granted += refund;
            // It finds no room in a segment of its own either.
            let long = kind == Kind::Large && bytes as u64 > self.segment_bytes();
            if long && !self.may_pass {
                return Err(NoRoom::TooLarge);
            }
            self.passes |= long;
        }
        placed
    }

    fn is_full(&self, kind: Kind) -> bool {
        if kind == Kind::Large && self.passes {
            return true;
        }
        self.open[usize::from(kind == Kind::Large)]
            .as_ref()
            .map_or(self.usable, |o| o.full || o.builder.is_full_enough())
    }

    fn close(&mut self, kind: Kind) -> bool {
        let Some(open) = self.of(kind).filter(|o| !o.builder.is_empty()) else { return false };
        open.full = true;
        true
    }

    fn spend(&mut self, bytes: u32) -> bool {
        let bytes = u64::from(bytes);
        if self.granted < bytes {
            return false;
        }
        self.granted -= bytes;
        true
    }
}
