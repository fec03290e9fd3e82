//! The engine of `larder block` under a virtual clock.
//!
//! [`BlockSim`] runs the very code: [`BlockShard`]s, the [`MapLog`](larder_engine::block::MapLog) that makes their map durable, and admission as the
//! daemon asks it. What they ask for is answered by models: a drive (the translation layer and the channels of
//! `larder sim run`), and a store ([`Store`]: a filer behind a network, or disks). Volumes need no size: the line space is
//! given to them in stretches, as they are touched.
//!
//! Requests come when the trace says, or as soon as another one has been answered ([`Load`]); at most `depth` are under way.

mod log;
mod shares;
mod space;
mod sparse;
mod spec;
mod store;
#[cfg(test)]
mod tests;
mod world;

use std::collections::BTreeMap;

use larder_base::{ByteSize, Nanos, UnixSecs, Words};
use larder_engine::block::MapLog;
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Map, Shape};
use larder_engine::block::node::backoff::Backoff;
use larder_engine::block::node::coalesce::{Piece, Pieces};
use larder_engine::block::node::cut::cut;
use larder_engine::block::node::limits::Limits;
use larder_engine::block::node::quiet::{Changes, QUIET};
use larder_engine::block::node::ranged::{self, Bits, Discard, LEAST_VOID, Progress, STEP, Turns};
use larder_engine::block::node::readahead::ReadAhead;
use larder_engine::block::node::share::Count;
use larder_engine::block::record::{TapedLog, TapedShard};
use larder_engine::block::{
    BlockConfig, BlockLimits, BlockShard, BlockStats, GROUP_LINES, GroupId, IoFailed, LineId, OpId,
    Part, PartKind, Regions, Verdict,
};
use larder_format::Uuid;
use larder_format::block::superblock::MAX_VOLUMES;
use larder_format::block::{BlockSuperblock, Layout, Placement};
use larder_policy::block::{BlockAccess, BlockKind, BlockOp, Rule, VerdictCounts, VolumeId};
use larder_policy::budget::WriteBudget;
use larder_trace::{Class, Op as TraceOp, Request, mix};

pub use spec::{Block, Load, Store, StoreKind};
pub(crate) use store::{StoreCounts, StoreModel};
pub(crate) use world::Answered;

use crate::experiment::drive::Drive;
use crate::experiment::{ExperimentError, Timing};
use shares::Shares;
use spec::Wrong;
use world::{Ahead, Event, Fx, Op, Range, StoreAsk, World};

/// Of a request at most this much counts; no device takes more at once.
const MOST_REQUEST: u64 = 1 << 30;
/// How long after a trim its void lines are swept, and how many slots at a time: as in the daemon.
const SWEEP: Nanos = Nanos::from_millis(100);
const SWEEP_STEP: u32 = 512;
/// How often the lines of volumes are counted where a share is stated: as in the daemon.
const COUNT: Nanos = Nanos::from_secs(1);
/// Nothing is selected in a simulation.
const NO_RULE: Option<fn(u64) -> Rule> = None;
/// CRC-32C of every line: the engine compares what it is given, and the bytes are left out.
const CRCS: [u32; 4096] = [0; 4096];

/// Why a run cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// More volumes than a cache device can know.
    Volumes,
    /// The trace touches more than the line space holds.
    Space(u64),
    /// Admission for another volume takes too much memory.
    Admission(String),
    /// The table of a sparse cache takes more of the drive than there is for it.
    Table,
}

/// Counts of engine, admission and store since counting began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub engine: BlockStats,
    pub verdicts: VerdictCounts,
    pub store: StoreCounts,
    pub line_bytes_written: u64,
    pub map_bytes_written: u64,
    /// Pages of the table of a sparse cache that were read.
    pub table_reads: u64,
}

/// What a shard may have under way, as in the daemon.
fn limits(spec: &Block, layout: &Layout) -> BlockLimits {
    let lines = spec.fill_memory.0 / u64::from(layout.line) / u64::from(layout.shards);
    let fills = u32::try_from(lines).unwrap_or(u32::MAX).max(GROUP_LINES);
    BlockLimits { fills, ..BlockLimits::default() }
}

/// The key of the placement under `seed`: a device whose superblock has it places every line where the simulator does.
pub fn placement_key(seed: u64) -> u64 {
    mix(seed ^ 0x626c_6f63_6b00)
}

/// A block cache under simulation. See the [module](self).
pub(crate) struct BlockSim {
    shards: Vec<TapedShard>,
    placing: Placing,
    log: TapedLog,
    log_due: Option<Nanos>,
    log_free: Nanos,
    flush: Nanos,
    map_bytes_written: u64,
    map_memory: u64,
    world: World,
    now: Nanos,
    load: Load,
    depth: usize,
    parts: Vec<(u64, u32)>,
    verdicts: Vec<Verdict>,
    range_turns: Turns,
    /// Ranges that wait for their bits.
    range_bits: Bits,
    changes: Changes,
    /// The lines of volumes are going to be counted.
    counts: bool,
}

impl BlockSim {
    /// An empty cache on a device that was formatted a moment ago.
    pub(crate) fn new(
        spec: &Block,
        store: &Store,
        timing: &Timing,
        drive: impl FnOnce(u64) -> Result<Drive, ExperimentError>,
        seed: u64,
    ) -> Result<BlockSim, ExperimentError> {
        let name = spec.name.as_deref().unwrap_or("block");
        let wrong = |(field, value, must): Wrong| ExperimentError::Value {
            key: format!("cache '{name}' {field}"),
            value,
            must,
        };
        let line = u32::try_from(spec.line.0).unwrap_or(u32::MAX);
        let placement = spec.placement().map_err(wrong)?;
        let sparse = matches!(placement, Placement::Sparse(_));
        let size = if sparse { sparse::line_bytes(spec.flash.0) } else { spec.flash.0 };
        let layout = Layout::of(size, line, placement, spec.shards)
            .map_err(|e| wrong(("flash", spec.flash.to_string(), e.to_string())))?;
        let key = placement_key(seed);
        let superblock =
            BlockSuperblock::format(Uuid([0; 16]), key, mix(key) >> 16, layout, UnixSecs(0));
        let placing = Placing::of(&layout, key);
        let making = spec.making().map_err(wrong)?;
        let config = BlockConfig {
            line_bytes: line,
            write: spec.write_mode().map_err(wrong)?,
            limits: limits(spec, &layout),
            regions: Regions { groups: layout.region_groups, count: layout.regions },
        };
        let mut map_memory = 0;
        let shards = (0..layout.shards).map(|i| {
            let shape = Shape::of(&layout);
            let (entries, sums) = Map::words(shape);
            let (entries, sums) = (Words::heap(entries), Words::heap(sums));
            let map = Map::new(entries, sums, placing, i, shape, making);
            let shard = BlockShard::new(config, map);
            map_memory += shard.map().memory_bytes();
            TapedShard::new(shard)
        });
        let shards: Vec<TapedShard> = shards.collect();
        let generation = superblock.generation;
        let log = MapLog::fresh(superblock, QUIET);
        let volume =
            if spec.volume.0 > 0 { spec.volume.0 } else { spec.flash.0.saturating_mul(16) };
        let mut world = World::new(
            layout,
            drive(if sparse { spec.flash.0 } else { layout.device })?,
            StoreModel::new(store, timing, seed),
            spec.admission().map_err(wrong)?,
            (volume, spec.volume.0),
            spec.readahead.0,
            seed,
        )
        .map_err(|e| wrong(("admission", format!("'{}'", spec.admission), e.to_string())))?;
        world.files = sparse.then(|| sparse::Files::new(layout, placing, generation, spec.flash.0));
        let lines = ByteSize(layout.capacity() * u64::from(layout.line));
        let budget = WriteBudget::new(&spec.write_budget, lines, None, Nanos::ZERO);
        let budget =
            budget.map_err(|source| ExperimentError::Budget { name: name.to_owned(), source })?;
        let stated = spec.stated_shares().map_err(wrong)?;
        world.shares = Shares::new(stated.into_iter(), &layout)
            .map_err(|(volume, why)| wrong(("shares", format!("of volume {volume}"), why)))?;
        world.limits = Limits::new(Some((budget, None)), Backoff::default());
        let mut sim = BlockSim {
            shards,
            placing,
            log: TapedLog::new(log),
            log_due: None,
            log_free: Nanos::ZERO,
            flush: Nanos((timing.flash_flush_us * 1000.0) as u64),
            map_bytes_written: 0,
            map_memory,
            world,
            now: Nanos::ZERO,
            load: spec.load,
            depth: spec.depth as usize,
            parts: Vec::new(),
            verdicts: Vec::new(),
            range_turns: Turns::default(),
            range_bits: Bits::default(),
            changes: Changes::new(layout.regions, QUIET),
            counts: false,
        };
        sim.wake_log(Nanos::ZERO);
        Ok(sim)
    }

    /// Takes request number `number` of the trace; what is over by then goes to `answered`. Returns whether it is one for
    /// a block cache.
    pub(crate) fn request(
        &mut self,
        number: u64,
        request: &Request,
        answered: &mut Vec<Answered>,
    ) -> Result<bool, Stop> {
        if !request.op.is_block() || request.size == 0 {
            return Ok(false);
        }
        if self.load == Load::Open {
            let comes = Nanos(request.time.unwrap_or_default().0.max(self.now.0));
            self.run_until(comes);
        }
        while self.world.ops.len() >= self.depth && self.turn() {}
        if self.world.files.as_ref().is_some_and(|f| f.full) {
            return Err(Stop::Table);
        }
        let came = match self.load {
            Load::Open => request.time.unwrap_or_default(),
            Load::Closed => self.now,
        };
        self.submit(number, came, request)?;
        answered.append(&mut self.world.answered);
        Ok(true)
    }

    /// Lets what is under way come to its end, behind replies too: what a request does is counted whenever it came.
    pub(crate) fn finish(&mut self, answered: &mut Vec<Answered>) {
        while (!self.world.ops.is_empty() || self.shards.iter().any(|s| s.unsettled() > 0))
            && self.turn()
        {}
        answered.append(&mut self.world.answered);
    }

    /// The time.
    pub(crate) fn now(&self) -> Nanos {
        self.now
    }

    /// Counts since the start.
    pub(crate) fn sums(&self) -> Sums {
        let mut engine = BlockStats::default();
        self.shards.iter().for_each(|s| engine.add(&s.stats()));
        Sums {
            engine,
            verdicts: self.world.verdicts(),
            store: self.world.store.counts(),
            line_bytes_written: self.world.line_bytes_written,
            map_bytes_written: self.map_bytes_written,
            table_reads: self.world.files.as_ref().map_or(0, |f| f.reads),
        }
    }

    /// Of [`sums`](Self::sums), what is cheap: bytes written.
    pub(crate) fn sums_of_writes(&self) -> Sums {
        Sums {
            line_bytes_written: self.world.line_bytes_written,
            map_bytes_written: self.map_bytes_written,
            ..Sums::default()
        }
    }

    /// Counting begins, of drive and store.
    pub(crate) fn reset(&mut self) {
        self.world.drive.reset();
        self.world.store.reset();
    }

    /// The drive under the cache.
    pub(crate) fn drive(&self) -> &Drive {
        &self.world.drive
    }

    /// The store behind it.
    pub(crate) fn store(&self) -> &StoreModel {
        &self.world.store
    }

    /// Lines that the cache may hold.
    pub(crate) fn slots(&self) -> u64 {
        self.world.layout.capacity()
    }

    /// Lines in it, by a walk over the map.
    pub(crate) fn lines(&self) -> u64 {
        self.shards.iter().map(|s| u64::from(s.map().count())).sum()
    }

    /// DRAM of the map, and of admission, bytes.
    pub(crate) fn memory(&self) -> (u64, u64) {
        (self.map_memory, self.world.admission_bytes())
    }

    // ---- time ----

    fn run_until(&mut self, until: Nanos) {
        while self.world.next_at().is_some_and(|at| at <= until) && self.turn() {}
        self.now = until;
    }

    /// The next thing that ends. Returns whether there was one.
    fn turn(&mut self) -> bool {
        let Some((now, event)) = self.world.next_event() else { return false };
        self.now = Nanos(self.now.0.max(now.0));
        let sums = |lines: u32| &CRCS[..(lines as usize).min(CRCS.len())];
        match event {
            Event::FlashRead { shard, io, lines } => {
                self.call(shard, |s, now, fx| s.flash_read(now, io, Ok(sums(lines)), fx));
            }
            Event::FlashWritten { shard, io, lines } => {
                self.call(shard, |s, now, fx| s.flash_written(now, io, Ok(sums(lines)), fx));
            }
            Event::FlashFull { shard, io } => {
                self.world.limits.backoff.full(self.now);
                self.call(shard, |s, now, fx| s.flash_written(now, io, Err(IoFailed), fx));
            }
            Event::Loaded { shard, io, page } => {
                let slots = self.world.files.as_ref().map(|f| f.page(shard, page));
                let slots = slots.as_deref().ok_or(IoFailed);
                self.call(shard, |s, now, fx| s.page_loaded(now, io, slots, fx));
            }
            Event::Merged { shard, io } => {
                let same = (CRCS[0], CRCS[0]);
                self.call(shard, |s, now, fx| s.merged(now, io, Ok(same), fx));
            }
            Event::StoreRead { shard, io } => {
                self.call(shard, |s, now, fx| s.backing_read(now, io, Ok(()), fx));
            }
            Event::StoreChanged { shard, io } => {
                self.call(shard, |s, now, fx| s.backing_changed(now, io, Ok(()), fx));
            }
            Event::RangeChanged { range } => self.range_over(range),
            Event::Sweep => self.sweep(),
            Event::Count => self.count(),
            Event::Log => self.step_log(now),
        }
        self.serve();
        true
    }

    fn call(&mut self, shard: u32, f: impl FnOnce(&mut TapedShard, Nanos, &mut Fx<'_>)) {
        let mut fx = Fx { world: &mut self.world, shard, now: self.now };
        f(&mut self.shards[shard as usize], self.now, &mut fx);
    }

    // ---- requests ----

    fn submit(&mut self, number: u64, came: Nanos, request: &Request) -> Result<(), Stop> {
        self.count_soon();
        let volume = request.app;
        if !self.world.admissions.contains_key(&volume)
            && self.world.admissions.len() >= MAX_VOLUMES
        {
            return Err(Stop::Volumes);
        }
        self.world.add_volume(volume).map_err(|e| Stop::Admission(e.to_string()))?;
        let class = match request.class {
            Class::Unstated => BlockKind::Unknown,
            Class::Data => BlockKind::Data,
            Class::Metadata => BlockKind::Metadata,
        };
        let kind = match request.op {
            TraceOp::Read => PartKind::Read,
            TraceOp::Write => PartKind::Write,
            _ => PartKind::Trim,
        };
        let bytes = request.size.min(MOST_REQUEST).min(u64::MAX - request.offset);
        let op = self.world.new_op();
        let line = u64::from(self.world.layout.line);
        let group = line * u64::from(GROUP_LINES);
        let mut parts = std::mem::take(&mut self.parts);
        parts.clear();
        let mut ranges: Vec<(u64, u64)> = Vec::new();
        let region_groups = self.world.layout.region_groups;
        // Where the first byte lies, and how far its neighbours are cached.
        let mut place = (0, 0);
        let (mut offset, end) = (request.offset, request.offset + bytes);
        while offset < end {
            let (at, left) =
                self.world.space.map(volume, offset).map_err(|f| Stop::Space(f.bytes))?;
            let run = left.min(end - offset);
            if offset == request.offset {
                place = (at, self.world.end_of_volume(at + left, request.offset + left));
            }
            let (first, last) = (LineId(at / line), LineId((at + run - 1) / line));
            self.world.note(first, last, class);
            if kind != PartKind::Read {
                let region = |line: LineId| (line.group().0 / region_groups) as u32;
                self.changes.changing(self.now, region(first)..=region(last));
            }
            if kind == PartKind::Trim && ranged::is_whole(run, group) {
                ranges.push((at, run));
            } else {
                cut((at, at + run), u64::MAX, line, NO_RULE, &mut parts);
            }
            offset += run;
        }
        let state = Op {
            came,
            kind,
            class,
            bytes,
            number,
            at: place.0,
            end: place.1,
            // One for the beginning: it is not over before all parts are begun.
            pending: 1 + (parts.len() + ranges.len()) as u32,
            from_flash: 0,
            shared: 0,
            reached_store: false,
            failed: false,
        };
        self.world.ops.insert(op, state);
        let mut verdicts = std::mem::take(&mut self.verdicts);
        let mut of_ahead = Verdict::Reject;
        if kind == PartKind::Trim {
            verdicts.clear();
            verdicts.resize(parts.len(), Default::default());
        } else {
            let what = if kind == PartKind::Read { BlockOp::Read } else { BlockOp::Write };
            let (volume, offset) = (VolumeId(volume), request.offset);
            let access =
                BlockAccess { volume, offset, bytes, op: what, kind: class, now: self.now };
            of_ahead = self.world.judge(&access, &parts, &mut verdicts);
        }
        let ahead = (kind == PartKind::Read)
            .then(|| self.world.streams.read(place.0, bytes, place.1, of_ahead))
            .flatten();
        for (&(at, len), &verdict) in parts.iter().zip(&verdicts) {
            let shard = self.placing.shard(LineId(at / line).group());
            let part = Part { op, kind, at, len, verdict };
            self.call(shard, |s, now, fx| s.submit(now, part, fx));
        }
        for (at, len) in ranges {
            self.begin_range(op, at, len);
        }
        (self.parts, self.verdicts) = (parts, verdicts);
        self.world.step(self.now, op, false);
        if let Some(ahead) = ahead {
            self.read_ahead(ahead, number);
        }
        self.serve();
        Ok(())
    }

    /// What the shards have asked for at once goes its way.
    fn serve(&mut self) {
        self.serve_ranges();
        self.serve_store();
        self.wake_log(self.now);
    }

    /// What shards ask of the store becomes as few requests as may be. A miss may have a stream read ahead of.
    fn serve_store(&mut self) {
        while let Some((op, ask)) = self.world.store_asks.pop_front() {
            let (first, kind) = match ask {
                StoreAsk::Read(piece) => (piece, PartKind::Read),
                StoreAsk::Change(piece, kind) => (piece, kind),
                StoreAsk::Other => continue,
            };
            let (reads, queue) = (kind == PartKind::Read, &mut self.world.store_asks);
            let pieces = Pieces::gather(op, first, reads, queue, StoreAsk::waiting);
            let (at, len) = (pieces.at(), u64::from(pieces.len()));
            let done = self.world.ask_store(self.now, op, kind, at, len);
            for Piece { shard, io, .. } in pieces.iter() {
                let event = match reads {
                    true => Event::StoreRead { shard, io },
                    false => Event::StoreChanged { shard, io },
                };
                self.world.at(done, event);
            }
            let reader = self.world.ops.get(&op).filter(|o| reads && o.kind == PartKind::Read);
            let Some(&Op { at, end, number, .. }) = reader else { continue };
            if let Some(ahead) = self.world.streams.missed(at, end) {
                self.read_ahead(ahead, number);
            }
        }
    }

    // ---- reading ahead ----

    /// Reads a stretch of the line space before anybody asks for it.
    fn read_ahead(&mut self, mut ahead: ReadAhead, number: u64) {
        let line = u64::from(self.world.layout.line);
        let (now, verdict) = (self.now, ahead.verdict);
        while let Some((at, len)) =
            ahead.next(|bytes| self.world.limits.refuses(Rule::ByPolicy, now, bytes).is_some())
        {
            let op = self.world.new_op();
            // One for the beginning.
            self.world.aheads.insert(op, Ahead { at, pending: 1, number, asked_store: false });
            let mut parts = Vec::with_capacity(4);
            cut((at, at + len), u64::MAX, line, NO_RULE, &mut parts);
            for (at, len) in parts {
                let part = Part { op, kind: PartKind::Prefetch, at, len, verdict };
                self.world.begin_ahead(op);
                let shard = self.placing.shard(LineId(at / line).group());
                self.call(shard, |s, now, fx| s.submit(now, part, fx));
            }
            self.world.step_ahead(op);
        }
    }

    // ---- ranges ----

    fn begin_range(&mut self, op: OpId, at: u64, len: u64) {
        let line = u64::from(self.world.layout.line);
        let id = self.world.new_op();
        let (first, last) = (LineId(at / line), LineId((at + len - 1) / line));
        let progress = Progress::new(first, last, self.world.layout.shards);
        self.world.ranges.insert(id, Range { op, at, len, progress });
        if self.range_turns.enter(id) {
            self.lock_next(id);
        }
    }

    fn lock_next(&mut self, id: OpId) {
        let Some(progress) = self.world.ranges.get(&id).map(|r| r.progress) else { return };
        let Some(shard) = progress.next() else { return };
        self.call(shard, |s, now, fx| s.lock_range(now, id, progress.first, progress.last, fx));
    }

    fn serve_ranges(&mut self) {
        while let Some(id) = self.world.given.pop_front() {
            let Some(range) = self.world.ranges.get_mut(&id) else { continue };
            if range.progress.next().is_some() {
                if range.progress.given().is_some() {
                    self.lock_next(id);
                    continue;
                }
                let groups = self.world.layout.region_groups;
                let region = |line: LineId| (line.group().0 / groups) as u32;
                let (first, last) = (region(range.progress.first), region(range.progress.last));
                self.ask_range(id, first, last);
                continue;
            }
            // Its bits are durable: the lines go, then the store changes.
            let Range { op, at, len, progress: Progress { first, last, .. } } = *range;
            for shard in &mut self.shards {
                let mut discard = Discard::lines(first, last, STEP).voiding(LEAST_VOID);
                while discard.turn(shard) {}
            }
            let done = self.world.ask_store(self.now, op, PartKind::Trim, at, len);
            self.world.at(done, Event::RangeChanged { range: id });
        }
    }

    fn range_over(&mut self, id: OpId) {
        for shard in 0..self.world.layout.shards {
            self.call(shard, |s, now, fx| s.unlock_range(now, id, fx));
        }
        if let Some(range) = self.world.ranges.remove(&id) {
            self.world.step(self.now, range.op, false);
        }
        if let Some(next) = self.range_turns.leave(id) {
            self.lock_next(next);
        }
        if self.shards.iter().any(|s| s.wants_sweep()) {
            self.world.at(self.now + SWEEP, Event::Sweep);
        }
    }

    /// Counts the lines of each volume. As long as there is anything else to be done, and with the next request, it is counted
    /// again.
    fn count(&mut self) {
        let mut counts: BTreeMap<u32, u64> = BTreeMap::new();
        let World { layout, space, .. } = &self.world;
        let of = |group: GroupId| {
            let (volume, _) = space.unmap(group.line(0).0 * u64::from(layout.line));
            Some(VolumeId(volume))
        };
        for shard in &self.shards {
            let mut count = Count::default();
            while count.turn(shard, of, |volume, lines| {
                *counts.entry(volume.0).or_default() += lines;
            }) {}
        }
        self.world.shares.set(&counts);
        self.counts = false;
        if self.world.next_at().is_some() {
            self.count_soon();
        }
    }

    fn count_soon(&mut self) {
        if self.world.shares.is_any() && !std::mem::replace(&mut self.counts, true) {
            self.world.at(self.now + COUNT, Event::Count);
        }
    }

    /// Lines of ranges that were made void leave the map. How long the thread that does it takes is not modelled.
    fn sweep(&mut self) {
        for shard in &mut self.shards {
            while shard.sweep(SWEEP_STEP) {}
        }
    }
}
