//! The engine of `larder block` under a virtual clock.
//!
//! [`BlockSim`] runs the very code: shards, the log that makes their map durable, and admission as the
//! daemon asks it. What they ask for is answered by models: a drive (the translation layer and the channels of
//! `larder sim run`), and a store ([`Store`](crate::device::Store): a filer behind a network, or disks). Volumes need no size: the line space is
//! given to them in stretches, as they are touched.
//!
//! Requests come when the trace says, or as soon as another one has been answered ([`Load`]); at most `depth` are under way.

mod back;
mod error;
mod given;
mod journal;
mod log;
mod node;
mod shares;
mod space;
mod sparse;
mod spec;
#[cfg(test)]
mod tests;
mod world;

use std::collections::{BTreeMap, VecDeque};

use larder_base::{Nanos, UnixSecs, Words};
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Map, Shape};
use larder_engine::block::node::calls::{Message, send};
use larder_engine::block::node::event::{JobId, Op, ShardIo, Submit};
use larder_engine::block::node::failing::FlashError;
use larder_engine::block::node::logged::LogIo;
use larder_engine::block::node::looks::Looks;
use larder_engine::block::node::maintenance::{Census, Lines, Maintenance, Pace};
use larder_engine::block::node::queue::{Config, Queue};
use larder_engine::block::node::record::{RecordedMaintenance, RecordedQueue};
use larder_engine::block::node::setup;
use larder_engine::block::node::share::Count;
use larder_engine::block::node::{StoredShard, defaults};
use larder_engine::block::{BlockConfig, BlockStats, GroupId, LineId, OpId, PartKind};
use larder_format::Uuid;
use larder_format::block::superblock::MAX_VOLUMES;
use larder_format::block::{BlockSuperblock, Layout, Placement};
use larder_policy::block::{BlockKind, VerdictCounts, VolumeId};
use larder_trace::{Class, Op as TraceOp, Request, mix};

pub(crate) use error::BlockError;
pub use given::{
    Carried, Given, GivenAnswer, GivenBlock, GivenError, GivenLeft, Octets, Warmth, WritesBack,
};
pub use spec::{Block, Load, Select};
pub(crate) use world::Answered;

use crate::device::drive::{Drive, DriveError};
use crate::device::store::{StoreCounts, StoreModel};
use crate::device::{Store, Timing};
use journal::Journals;
use node::{Blank, Late, Run, Sim, SimNode};
use shares::Shares;
use space::NoPlace;
use spec::Wrong;
use world::{Event, Whose, World};

/// Of a request at most this much counts; no device takes more at once.
const MOST_REQUEST: u64 = 1 << 30;
/// CRC-32C of every line: the engine compares what it is given, and the bytes are left out.
const CRCS: [u32; 4096] = [0; 4096];

/// Why a run cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Stop {
    /// More volumes than a cache device can know.
    Volumes,
    /// The trace touches more than the line space holds.
    Space(u64),
    /// The trace touches a volume behind the end that is stated of it.
    Beyond {
        /// Its number.
        volume: u32,
        /// The byte.
        offset: u64,
        /// What it has, bytes.
        bytes: u64,
    },
    /// Admission for another volume takes too much memory.
    Admission(String),
    /// The table of a sparse cache takes more of the drive than there is for it.
    Table,
}

impl From<NoPlace> for Stop {
    fn from(why: NoPlace) -> Stop {
        match why {
            NoPlace::Full(bytes) => Stop::Space(bytes),
            NoPlace::Beyond { volume, offset, bytes } => Stop::Beyond { volume, offset, bytes },
        }
    }
}

/// Counts of engine, admission and store since counting began.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sums {
    pub engine: BlockStats,
    pub verdicts: VerdictCounts,
    pub store: StoreCounts,
    pub line_bytes_written: u64,
    pub map_bytes_written: u64,
    /// Bytes of the write log, and those of them whose writes came to the store.
    pub log_bytes_written: u64,
    pub destaged: u64,
    /// Bytes and epochs that were written to journals.
    pub journal_bytes_written: u64,
    pub epochs: u64,
    /// Pages of the table of a sparse cache that were read.
    pub table_reads: u64,
}

/// How shards work.
fn shard_config(spec: &Block, layout: &Layout) -> Result<BlockConfig, Wrong> {
    Ok(setup::shard_config(spec.write_mode()?, spec.fill_memory, layout))
}

/// Checksums of so many lines: all the same.
fn sums(lines: u32) -> &'static [u32] {
    &CRCS[..(lines as usize).min(CRCS.len())]
}

/// The key of the placement under `seed`: a device whose superblock has it places every line where the simulator does.
pub fn placement_key(seed: u64) -> u64 {
    mix(seed ^ 0x626c_6f63_6b00)
}

/// A block cache under simulation. See the [module](self).
pub(crate) struct BlockSim {
    node: SimNode,
    queue: RecordedQueue<Sim>,
    maintenance: RecordedMaintenance,
    /// When its next round is scheduled, and when the log's I/O of the last is over.
    log_due: Option<Nanos>,
    log_free: Nanos,
    /// It has nothing to do, until something happens.
    log_idles: bool,
    /// What its round leaves for others when that is over.
    late: Option<Late>,
    /// Flushes of stores that are over, and of which it was not told.
    flushed: VecDeque<(VolumeId, u64)>,
    /// What a flush of the drive takes.
    flush: Nanos,
    map_bytes_written: u64,
    map_memory: u64,
    world: World,
    load: Load,
    depth: usize,
    census: Census,
    /// When who has time comes next, and whether that is waited for since lines are to be swept.
    census_next: Nanos,
    census_due: bool,
    /// When something is due in the write log.
    writes_due: Option<Nanos>,
    /// A client flushes after so many writes of a volume; how many there were since.
    flush_every: u64,
    unflushed: BTreeMap<u32, u64>,
}

impl BlockSim {
    /// An empty cache on a device that was formatted a moment ago, before `store`; journals of its volumes lie on a device like `journal`.
    ///
    /// # Errors
    /// A key whose value cannot be meant, a budget or a drive that cannot be had.
    pub(crate) fn new(
        spec: &Block,
        (store, journal): (&Store, &Store),
        timing: &Timing,
        drive: impl FnOnce(u64) -> Result<Drive, DriveError>,
        seed: u64,
    ) -> Result<BlockSim, BlockError> {
        let wrong = |(key, value, must): Wrong| BlockError::Key { key, value, must };
        let line = u32::try_from(spec.line.0).unwrap_or(u32::MAX);
        let placement = spec.placement().map_err(wrong)?;
        let sparse = matches!(placement, Placement::Sparse(_));
        let back = back::Stated::of(spec).map_err(wrong)?;
        // The write log has the end of the device.
        let flash = spec.flash.0 - back.map_or(0, |back| back.bytes());
        let size = if sparse { sparse::line_bytes(flash) } else { flash };
        let layout = Layout::of(size, line, placement, spec.shards)
            .map_err(|e| wrong(("flash", spec.flash.to_string(), e.to_string())))?;
        let key = placement_key(seed);
        let superblock =
            BlockSuperblock::format(Uuid([0; 16]), key, mix(key) >> 16, layout, UnixSecs(0));
        let placing = Placing::of(&layout, key);
        let making = spec.making().map_err(wrong)?;
        let config = shard_config(spec, &layout).map_err(wrong)?;
        let mut map_memory = 0;
        let shards = (0..layout.shards).map(|i| {
            let shape = Shape::of(&layout);
            let (entries, sums) = Map::words(shape);
            let (entries, sums) = (Words::heap(entries), Words::heap(sums));
            let map = Map::new(entries, sums, placing, i, shape, making);
            let shard = setup::shard(config, map);
            map_memory += shard.map().memory_bytes();
            shard
        });
        let shards: Vec<StoredShard> = shards.collect();
        let generation = superblock.generation;
        let log = setup::fresh_log(superblock.clone());
        let volume =
            if spec.volume.0 > 0 { spec.volume.0 } else { spec.flash.0.saturating_mul(16) };
        let log_at = if sparse { flash } else { layout.device }.next_multiple_of(4096);
        let drive = drive(match &back {
            Some(back) => log_at + back.bytes(),
            None if sparse => flash,
            None => layout.device,
        })?;
        let limits = setup::limits(&spec.write_budget, &layout, None, false)?;
        let stated = spec.stated_shares().map_err(wrong)?;
        let selection = spec.selection().map_err(wrong)?;
        let shares = Shares::new(stated.into_iter(), selection, &layout)
            .map_err(|(volume, why)| wrong(("shares", format!("of volume {volume}"), why)))?;
        let mut node = SimNode::new(
            superblock.clone(),
            shards.into_iter(),
            spec.admission().map_err(wrong)?,
            (volume, spec.volume.0),
            (limits, shares),
        )
        .map_err(|e| wrong(("admission", format!("'{}'", spec.admission), e.to_string())))?;
        let back = back.map(|back| back.log(log_at, defaults::DESTAGE_DEPTH));
        node.back = back.transpose().map_err(wrong)?;
        let files = sparse.then(|| sparse::Files::new(layout, placing, generation, flash));
        let flush = Nanos((timing.flash_flush_us * 1000.0) as u64);
        let store = StoreModel::new(store, timing, seed);
        let journals = Journals::new(StoreModel::new(journal, timing, seed));
        let world = World::new(layout, drive, (store, journals), files, flush);
        let mut sim = BlockSim {
            node,
            queue: RecordedQueue::new(Queue::new(
                0,
                Config::new(&layout, placing, spec.readahead.0),
            )),
            maintenance: RecordedMaintenance::new(Maintenance::new(
                Pace::default(),
                Some(log),
                superblock,
            )),
            log_due: None,
            log_free: Nanos::ZERO,
            log_idles: false,
            late: None,
            flushed: VecDeque::new(),
            flush,
            map_bytes_written: 0,
            map_memory,
            world,
            load: spec.load,
            depth: spec.depth as usize,
            census: Census::default(),
            census_next: Nanos::ZERO,
            census_due: false,
            writes_due: None,
            flush_every: spec.flush_every,
            unflushed: BTreeMap::new(),
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
            let comes = Nanos(request.time.unwrap_or_default().0.max(self.world.now.0));
            self.run_until(comes);
        }
        while (self.world.asked.len() >= self.depth || self.is_held(request.app)) && self.turn() {}
        if self.world.files.as_ref().is_some_and(|f| f.full) {
            return Err(Stop::Table);
        }
        let came = match self.load {
            Load::Open => request.time.unwrap_or_default(),
            Load::Closed => self.world.now,
        };
        self.submit(number, came, request)?;
        answered.append(&mut self.world.answered);
        Ok(true)
    }

    /// Lets what is under way come to its end, behind replies too: what a request does is counted whenever it came.
    pub(crate) fn finish(&mut self, answered: &mut Vec<Answered>) {
        // What is destaged goes on behind all of them, and is not waited for.
        let unsettled =
            |sim: &BlockSim| sim.node.back.is_none() && sim.node.any(|s| s.unsettled() > 0);
        while (!self.world.asked.is_empty() || unsettled(self)) && self.turn() {}
        answered.append(&mut self.world.answered);
    }

    /// The time.
    pub(crate) fn now(&self) -> Nanos {
        self.world.now
    }

    /// Counts since the start.
    pub(crate) fn sums(&self) -> Sums {
        let mut engine = BlockStats::default();
        self.node.each(|s| engine.add(&s.stats()));
        Sums {
            engine,
            verdicts: self.node.verdicts(),
            store: self.world.store.counts(),
            line_bytes_written: self.world.line_bytes_written,
            map_bytes_written: self.map_bytes_written,
            log_bytes_written: self.world.log_bytes_written,
            destaged: self.node.back.as_ref().map_or(0, |b| b.destaged(self.world.now)),
            journal_bytes_written: self.world.journals.bytes,
            epochs: self.world.journals.written,
            table_reads: self.world.files.as_ref().map_or(0, |f| f.reads),
        }
    }

    /// Of [`sums`](Self::sums), what is cheap: bytes written.
    pub(crate) fn sums_of_writes(&self) -> Sums {
        Sums {
            line_bytes_written: self.world.line_bytes_written,
            map_bytes_written: self.map_bytes_written,
            log_bytes_written: self.world.log_bytes_written,
            ..Sums::default()
        }
    }

    /// Counting begins, of drive and store.
    pub(crate) fn reset(&mut self) {
        self.world.drive.reset();
        self.world.store.reset();
        if let Some(back) = &self.node.back {
            back.reset(self.world.now);
        }
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
        self.node.layout.capacity()
    }

    /// Lines in it, by a walk over the map.
    pub(crate) fn lines(&self) -> u64 {
        let mut lines = 0;
        self.node.each(|s| lines += u64::from(s.map().count()));
        lines
    }

    /// DRAM of the map, and of admission, bytes.
    pub(crate) fn memory(&self) -> (u64, u64) {
        (self.map_memory, self.node.admission_bytes())
    }

    // ---- time ----

    fn run_until(&mut self, until: Nanos) {
        while self.world.next_at().is_some_and(|at| at <= until) && self.turn() {}
        self.rest_until(until);
        self.set_now(until);
    }

    fn set_now(&mut self, now: Nanos) {
        self.world.now = now;
        self.node.now.set(now);
    }

    /// What ends next, with all of the same kind that ends by then: as a server takes what has completed. Returns whether there was
    /// anything.
    fn turn(&mut self) -> bool {
        let Some((at, whose)) = self.world.next() else { return false };
        self.rest_until(at);
        let now = Nanos(self.world.now.0.max(at.0));
        self.set_now(now);
        match whose {
            Whose::Device | Whose::Store => {
                // What is begun meanwhile ends in a turn of its own, if it takes no time.
                for whose in [Whose::Device, Whose::Store] {
                    while let Some((at, event)) = self.world.take(whose, now) {
                        self.ended(at, event);
                    }
                }
            }
            Whose::Log => {
                while let Some((at, event)) = self.world.take(whose, now) {
                    self.ended(at, event);
                    self.wake_log(now);
                }
            }
            Whose::Round => {
                while let Some((at, event)) = self.world.take(whose, now) {
                    self.ended(at, event);
                }
            }
        }
        self.serve();
        true
    }

    /// Something has ended, `at` which it was to.
    fn ended(&mut self, at: Nanos, event: Event) {
        let now = self.world.now;
        let BlockSim { node, queue, world, .. } = self;
        match event {
            Event::FlashRead { shard, io, line, lines } => {
                let bytes = Blank(u64::from(lines) * u64::from(node.layout.line));
                let read = Ok((sums(lines), bytes));
                queue.flash_read(node, now, ShardIo { shard, io }, line, read);
            }
            Event::FlashWritten { shard, io, lines } => {
                queue.flash_written(node, now, ShardIo { shard, io }, Ok(sums(lines)));
            }
            Event::FlashFull { shard, io } => {
                queue.flash_written(node, now, ShardIo { shard, io }, Err(FlashError::NoSpace));
            }
            Event::Loaded { shard, io, page } => {
                let slots = world.files.as_ref().map(|f| f.page(shard, page));
                let slots = slots.as_deref().ok_or(FlashError::Damaged);
                queue.page_loaded(node, now, ShardIo { shard, io }, slots);
            }
            Event::Merged { shard, io } => {
                queue.merged(node, now, ShardIo { shard, io }, Ok((CRCS[0], CRCS[0])));
            }
            Event::LogWritten { batch } => queue.log_written(node, now, world, batch, true),
            Event::LogFlushed { covers } => queue.log_flushed(node, now, world, covers, true),
            Event::LogRead { io, len } => {
                let read = Some((sums(len.div_ceil(4096)), Blank(len.into())));
                queue.log_read(node, now, world, LogIo(io), read);
            }
            Event::WritesDue => {
                // Superseded by an earlier one?
                if self.writes_due == Some(at) {
                    self.writes_due = None;
                }
            }
            Event::StoreRead { job, len } => {
                queue.store_read(node, now, world, JobId(job), Ok(Blank(len.into())));
            }
            Event::StoreChanged { job } => {
                queue.store_changed(node, now, world, JobId(job), Ok(()));
            }
            Event::JournalWritten { attachment } => match world.journals.ended(now, attachment) {
                Some(ends) => world.journal_goes_on(attachment, ends),
                None => journaled(node, attachment, false),
            },
            Event::JournalFlushed { attachment } => journaled(node, attachment, true),
            Event::Census => {
                self.census_due = false;
                self.round(now);
            }
            Event::Log => self.step_log(at),
            Event::Logged => self.logged(now),
        }
    }

    // ---- requests ----

    fn submit(&mut self, number: u64, came: Nanos, request: &Request) -> Result<(), Stop> {
        let volume = request.app;
        if !self.node.knows(volume) && self.node.volumes() >= MAX_VOLUMES {
            return Err(Stop::Volumes);
        }
        if self.node.add_volume(volume).map_err(|e| Stop::Admission(e.to_string()))? {
            self.write_back(volume)?;
        }
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
        let line = u64::from(self.node.layout.line);
        // What of it are neighbours in the line space is an operation of its own.
        let (mut offset, end) = (request.offset, request.offset + bytes);
        let mut runs = Vec::with_capacity(1);
        while offset < end {
            let (at, left) =
                self.node.space.borrow_mut().map(volume, offset).map_err(Stop::from)?;
            let len = left.min(end - offset);
            self.node.note(LineId(at / line), LineId((at + len - 1) / line), class);
            let whole = self.node.whole(at + left, offset + left, offset + len);
            runs.push((offset, len, Run { volume, base: at.wrapping_sub(offset), whole, number }));
            offset += len;
        }
        let now = self.world.now;
        let answer = Answered {
            came,
            done: now,
            kind,
            class,
            bytes,
            hit: kind == PartKind::Read,
            from_flash: 0,
            shared: 0,
            reached_store: false,
            failed: false,
            flush: false,
        };
        let ticket = self.world.begin(volume, answer, runs.len() as u32);
        for (at, len, volume) in runs {
            let op = match kind {
                PartKind::Read => Op::Read { at, len },
                PartKind::Write => Op::Write { at, len, bytes: Blank(len), fua: false },
                _ => Op::Trim { at, len, fua: false },
            };
            let submit = Submit { volume, ticket, op, holds: class };
            self.queue.submit(&self.node, now, &mut self.world, submit);
        }
        self.serve();
        if kind != PartKind::Read {
            self.flush_after(answer, volume);
        }
        Ok(())
    }

    /// A client has written, and perhaps it flushes now.
    fn flush_after(&mut self, write: Answered, volume: u32) {
        let unflushed = self.unflushed.entry(volume).or_default();
        *unflushed += 1;
        if self.flush_every == 0 || *unflushed < self.flush_every {
            return;
        }
        *unflushed = 0;
        while (self.world.asked.len() >= self.depth || self.is_held(volume)) && self.turn() {}
        let now = self.world.now;
        let answer =
            Answered { came: now.max(write.came), done: now, bytes: 0, flush: true, ..write };
        let ticket = self.world.begin(volume, answer, 1);
        let run = Run { volume, base: 0, whole: 0, number: 0 };
        let submit = Submit { volume: run, ticket, op: Op::Flush, holds: BlockKind::Unknown };
        self.queue.submit(&self.node, now, &mut self.world, submit);
        self.serve();
    }

    /// A volume changes over, and its clients wait. (Nor does the trace go on meanwhile: those of others wait, too.)
    fn is_held(&self, volume: u32) -> bool {
        self.node.back.as_ref().is_some_and(|back| back.is_held(volume))
    }

    /// A volume has come: it writes back, if volumes do.
    fn write_back(&mut self, volume: u32) -> Result<(), Stop> {
        let Some(back) = &self.node.back else { return Ok(()) };
        let (base, left) = self.node.space.borrow_mut().map(volume, 0)?;
        let whole = self.node.whole(base + left, left, 0);
        self.world.written_back.push(Run { volume, base, whole, number: 0 });
        back.attach(&self.node, self.world.now, (volume, self.world.written_back.len() as u32));
        Ok(())
    }

    /// What the shards have asked for at once goes its way: first what clients wait for.
    fn serve(&mut self) {
        let now = self.world.now;
        loop {
            self.queue.take_mail(&self.node);
            let any = self.queue.turn(&self.node, now, &mut self.world);
            if !any {
                break;
            }
        }
        self.wake_writes(now);
        if self.node.any(|s| s.wants_sweep()) && !std::mem::replace(&mut self.census_due, true) {
            self.world.at(Nanos(self.census_next.0.max(now.0)), Event::Census);
        }
        self.wake_log(now);
    }

    /// Who has time: void lines leave the map, and lines are counted. How long the thread that does it takes is not modelled.
    fn round(&mut self, now: Nanos) {
        let mut lines = Counted { node: &self.node, lines: BTreeMap::new() };
        self.census_next = self.census.round(|| now, &mut lines);
    }

    /// Nothing is to be done before `at`: rounds of who has time that a server has meanwhile are left out.
    fn rest_until(&mut self, at: Nanos) {
        if self.census_due {
            return;
        }
        let counts = self.node.shares.are_counted();
        while let Some(round) = self.census.idled(self.census_next, at, counts) {
            self.round(round);
        }
    }
}

/// A journal has an epoch, or was flushed: the queue is told.
fn journaled(node: &SimNode, attachment: u32, flushed: bool) {
    send(node, OpId(0), Message::Journal { attachment, flushed, done: true });
}

/// Shards whose lines are swept and counted.
struct Counted<'a> {
    node: &'a SimNode,
    lines: BTreeMap<u32, u64>,
}

impl Lines for Counted<'_> {
    fn shards(&self) -> u32 {
        self.node.layout.shards
    }

    fn sweep(&mut self, shard: u32, steps: u32) -> bool {
        self.node.sweep(shard, steps)
    }

    fn count(&mut self, shard: u32, count: &mut Count) -> bool {
        if !self.node.shares.are_counted() {
            return false;
        }
        let (space, line) = (self.node.space.borrow(), u64::from(self.node.layout.line));
        let of = |group: GroupId| space.unmap(group.line(0).0 * line).map(|v| VolumeId(v.0));
        Looks::count(self.node, shard, count, of, |volume, lines| {
            *self.lines.entry(volume.0).or_default() += lines;
        })
    }

    fn counted(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        if self.node.shares.are_counted() {
            self.node.shares.set(&lines);
        }
    }
}
