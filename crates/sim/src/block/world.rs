//! What surrounds the shards: devices that take their time, admission, requests under way.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use larder_base::Nanos;
use larder_engine::block::node::coalesce::{Piece, Waiting};
use larder_engine::block::node::limits::{self, Limits};
use larder_engine::block::node::ranged::Progress;
use larder_engine::block::node::readahead::Streams;
use larder_engine::block::node::share::{self, Stays};
use larder_engine::block::record::TapedAdmission;
use larder_engine::block::{
    BlockEffects, GROUP_LINES, GroupId, IoFailed, IoId, LineId, Merge, OpId, PartKind, SlotId,
    Source, Verdict,
};
use larder_format::block::Layout;
use larder_policy::block::{
    BlockAccess, BlockAdmission, BlockAdmissionConfig, BlockAdmissionError, BlockKind, BlockSetup,
    LineId as PolicyLine, Reason, Rule, Verdict as PolicyVerdict, VerdictCounts, VolumeId,
};

use super::shares::Shares;
use super::space::Space;
use super::sparse::Files;
use super::store::StoreModel;
use crate::experiment::drive::Drive;

/// Something that ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    FlashRead {
        shard: u32,
        io: IoId,
        lines: u32,
    },
    FlashWritten {
        shard: u32,
        io: IoId,
        lines: u32,
    },
    /// The file system has no room for lines.
    FlashFull {
        shard: u32,
        io: IoId,
    },
    /// A page of the table is there.
    Loaded {
        shard: u32,
        io: IoId,
        page: u32,
    },
    Merged {
        shard: u32,
        io: IoId,
    },
    StoreRead {
        shard: u32,
        io: IoId,
    },
    StoreChanged {
        shard: u32,
        io: IoId,
    },
    /// The store's part of a range.
    RangeChanged {
        range: OpId,
    },
    /// Void lines are swept.
    Sweep,
    /// The lines of volumes are counted.
    Count,
    /// The log's turn.
    Log,
}

/// What shards ask for, as far as it matters to requests for the store.
#[derive(Clone, Copy, Debug)]
pub(super) enum StoreAsk {
    Read(Piece),
    Change(Piece, PartKind),
    /// Something else that an operation is told or asks for.
    Other,
}

impl StoreAsk {
    pub(super) fn waiting(&self) -> Waiting {
        match *self {
            StoreAsk::Read(piece) => Waiting::Read(piece),
            StoreAsk::Change(piece, _) => Waiting::Change(piece),
            StoreAsk::Other => Waiting::Other,
        }
    }
}

/// A client's request under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    pub came: Nanos,
    pub kind: PartKind,
    pub class: BlockKind,
    pub bytes: u64,
    pub number: u64,
    /// First byte in the line space, and where what may be cached of its volume ends.
    pub at: u64,
    pub end: u64,
    pub pending: u32,
    /// Bytes that came from flash, and from what others had asked for or brought.
    pub from_flash: u64,
    pub shared: u64,
    pub reached_store: bool,
    pub failed: bool,
}

/// A stretch that is read ahead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    /// First byte in the line space.
    pub at: u64,
    pub pending: u32,
    /// On whose behalf, by number.
    pub number: u64,
    pub asked_store: bool,
}

/// A request that is answered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Answered {
    /// When it came, and when it was answered.
    pub came: Nanos,
    /// When it was answered.
    pub done: Nanos,
    /// Read, write, or trim.
    pub kind: PartKind,
    /// What it holds, as far as the trace says.
    pub class: BlockKind,
    /// Its bytes.
    pub bytes: u64,
    /// Of a read, bytes from flash.
    pub from_flash: u64,
    /// Of a read, bytes that somebody else's request had brought or was bringing.
    pub shared: u64,
    /// Whether the store was asked on its behalf.
    pub reached_store: bool,
    /// Refused: too many waited.
    pub failed: bool,
}

/// A change of a range too large for parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub op: OpId,
    pub at: u64,
    pub len: u64,
    pub progress: Progress,
}

/// Who brings what a read brings.
#[derive(Clone, Copy, Debug)]
enum Brings {
    Flash,
    Store(OpId),
}

/// Everything but shards and log.
pub(super) struct World {
    pub layout: Layout,
    pub drive: Drive,
    /// Of a sparse cache, what lies between its file and the drive.
    pub files: Option<Files>,
    pub store: StoreModel,
    /// What keeps lines from flash.
    pub limits: Limits,
    /// What volumes may have of the cache.
    pub shares: Shares,
    pub space: Space,
    pub admission: BlockAdmissionConfig,
    pub volume_bytes: u64,
    /// That is what a volume has, and no guess.
    knows_volumes: bool,
    pub seed: u64,
    pub admissions: BTreeMap<u32, TapedAdmission>,
    /// Lines last seen as metadata; kept where that makes a difference.
    metadata: BTreeSet<LineId>,
    knows_metadata: bool,
    events: BinaryHeap<Reverse<(Nanos, u64, Event)>>,
    sequence: u64,
    pub ops: BTreeMap<OpId, Op>,
    pub streams: Streams,
    pub aheads: BTreeMap<OpId, Ahead>,
    /// What the store is to be asked, on whose behalf.
    pub store_asks: VecDeque<(OpId, StoreAsk)>,
    next_op: u64,
    reads: BTreeMap<(u32, IoId), Brings>,
    pub ranges: BTreeMap<OpId, Range>,
    /// Ranges that have been given by one more shard, or have all their bits.
    pub given: VecDeque<OpId>,
    pub asks: Vec<(u32, u32)>,
    pub log_wanted: bool,
    /// Somebody waits for pages of the table to be written.
    pub commit_wanted: bool,
    pub answered: Vec<Answered>,
    /// Bytes written to the cache device: lines, and map with log.
    pub line_bytes_written: u64,
}

impl World {
    pub(super) fn new(
        layout: Layout,
        drive: Drive,
        store: StoreModel,
        admission: BlockAdmissionConfig,
        (volume_bytes, stretch): (u64, u64),
        readahead: u64,
        seed: u64,
    ) -> Result<World, BlockAdmissionError> {
        let mut world = World {
            space: Space::new(&layout, stretch),
            layout,
            drive,
            files: None,
            store,
            limits: Limits::default(),
            shares: Shares::default(),
            admission,
            volume_bytes,
            knows_volumes: stretch > 0,
            seed,
            admissions: BTreeMap::new(),
            metadata: BTreeSet::new(),
            knows_metadata: false,
            events: BinaryHeap::new(),
            sequence: 0,
            ops: BTreeMap::new(),
            streams: Streams::new(readahead, u64::from(layout.line) * u64::from(GROUP_LINES)),
            aheads: BTreeMap::new(),
            store_asks: VecDeque::new(),
            next_op: 0,
            reads: BTreeMap::new(),
            ranges: BTreeMap::new(),
            given: VecDeque::new(),
            asks: Vec::new(),
            log_wanted: true,
            commit_wanted: false,
            answered: Vec::new(),
            line_bytes_written: 0,
        };
        // What cannot be set up is found before anything runs.
        world.knows_metadata = world.new_admission()?.prefers_metadata();
        Ok(world)
    }

    fn new_admission(&self) -> Result<BlockAdmission, BlockAdmissionError> {
        let setup = BlockSetup {
            line_bytes: self.layout.line,
            lines: self.layout.capacity(),
            backing_bytes: self.volume_bytes,
            seed: self.seed,
        };
        BlockAdmission::new(&self.admission, &setup)
    }

    pub(super) fn add_volume(&mut self, volume: u32) -> Result<(), BlockAdmissionError> {
        if !self.admissions.contains_key(&volume) {
            let admission = self.new_admission()?;
            self.admissions.insert(volume, TapedAdmission::new(admission));
        }
        Ok(())
    }

    pub(super) fn verdicts(&self) -> VerdictCounts {
        let mut sum = VerdictCounts::default();
        self.admissions.values().for_each(|a| sum.add(a.verdicts()));
        sum
    }

    pub(super) fn new_op(&mut self) -> OpId {
        self.next_op += 1;
        OpId(self.next_op)
    }

    // ---- events ----

    pub(super) fn at(&mut self, at: Nanos, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((at, self.sequence, event)));
    }

    /// When the next thing ends.
    pub(super) fn next_at(&self) -> Option<Nanos> {
        self.events.peek().map(|Reverse((at, ..))| *at)
    }

    pub(super) fn next_event(&mut self) -> Option<(Nanos, Event)> {
        self.events.pop().map(|Reverse((at, _, event))| (at, event))
    }

    // ---- requests ----

    /// One thing that `op` waited for is over.
    pub(super) fn step(&mut self, now: Nanos, op: OpId, failed: bool) {
        let Some(o) = self.ops.get_mut(&op) else { return };
        o.failed |= failed;
        o.pending -= 1;
        if o.pending > 0 {
            return;
        }
        let Some(o) = self.ops.remove(&op) else { return };
        self.answered.push(Answered {
            came: o.came,
            done: now,
            kind: o.kind,
            class: o.class,
            bytes: o.bytes,
            from_flash: o.from_flash,
            shared: o.shared,
            reached_store: o.reached_store,
            failed: o.failed,
        });
    }

    /// Where what may be cached of a volume ends in the line space, whose stretch ends at `end` there and at byte `offset` of
    /// the volume.
    pub(super) fn end_of_volume(&self, end: u64, offset: u64) -> u64 {
        let beyond = if self.knows_volumes { offset.saturating_sub(self.volume_bytes) } else { 0 };
        end.saturating_sub(beyond)
    }

    /// Another part of a stretch that is read ahead begins.
    pub(super) fn begin_ahead(&mut self, op: OpId) {
        if let Some(ahead) = self.aheads.get_mut(&op) {
            ahead.pending += 1;
        }
    }

    /// A part of a stretch that is read ahead is over.
    pub(super) fn step_ahead(&mut self, op: OpId) {
        let Some(ahead) = self.aheads.get_mut(&op) else { return };
        ahead.pending -= 1;
        let Ahead { at, pending, asked_store, .. } = *ahead;
        if pending == 0 {
            self.aheads.remove(&op);
            if !asked_store {
                self.streams.was_there(at);
            }
        }
    }

    fn number(&mut self, op: OpId) -> u64 {
        if let Some(ahead) = self.aheads.get_mut(&op) {
            ahead.asked_store = true;
            return ahead.number;
        }
        let op = self.ranges.get(&op).map_or(op, |r| r.op);
        self.ops.get_mut(&op).map_or(0, |o| {
            o.reached_store = true;
            o.number
        })
    }

    /// An operation is told something, or asks for something that is not the store's: requests for the store on both sides of it
    /// are not one.
    fn told(&mut self, op: OpId) {
        if self.store_asks.back().is_some_and(|last| !matches!(last.1, StoreAsk::Other)) {
            self.store_asks.push_back((op, StoreAsk::Other));
        }
    }

    /// A read, write or trim of the store on behalf of `op`: when it is over.
    pub(super) fn ask_store(
        &mut self,
        now: Nanos,
        op: OpId,
        kind: PartKind,
        at: u64,
        len: u64,
    ) -> Nanos {
        let number = self.number(op);
        let place = self.space.unmap(at);
        match kind {
            PartKind::Read | PartKind::Prefetch => self.store.read(now, number, place, len),
            PartKind::Write => self.store.write(now, place, len, true),
            PartKind::Zero | PartKind::Trim => self.store.write(now, place, len, false),
        }
    }

    /// So many bytes of lines leave for the drive.
    fn charge_lines(&mut self, now: Nanos, bytes: u64) {
        self.line_bytes_written += bytes;
        // (No budget of a simulation is kept in a file.)
        let _ = self.limits.charge(now, bytes);
    }

    /// So many bytes of the map leave for the drive.
    pub(super) fn charge_map(&mut self, now: Nanos, bytes: u64) {
        let _ = self.limits.charge_log(now, bytes);
    }

    // ---- admission ----

    fn policy_line(&self, line: LineId) -> PolicyLine {
        let (volume, offset) = self.space.unmap(line.0 * u64::from(self.layout.line));
        PolicyLine { volume: VolumeId(volume), offset }
    }

    fn kind_of(&self, line: LineId) -> BlockKind {
        if self.metadata.contains(&line) { BlockKind::Metadata } else { BlockKind::Unknown }
    }

    /// Takes note of what a request says of the lines from `first` to `last`.
    pub(super) fn note(&mut self, first: LineId, last: LineId, class: BlockKind) {
        if !self.knows_metadata || class == BlockKind::Unknown {
            return;
        }
        for line in (first.0..=last.0).map(LineId) {
            if class == BlockKind::Metadata {
                self.metadata.insert(line);
            } else {
                self.metadata.remove(&line);
            }
        }
    }

    /// What admission says of an access, for each of its `parts` (addresses in the line space), and of what is read ahead of
    /// it.
    pub(super) fn judge(
        &mut self,
        access: &BlockAccess,
        parts: &[(u64, u32)],
        out: &mut Vec<Verdict>,
    ) -> Verdict {
        let line = self.layout.line;
        let World { admissions, space, limits, metadata, .. } = self;
        let Some(admission) = admissions.get_mut(&access.volume.0) else {
            out.clear();
            return Verdict::Reject;
        };
        let parts = parts.iter().map(|&(at, len)| (space.unmap(at).1, len));
        // What a request says of itself comes before what others have said of the same lines.
        let kind = |at: u64, len: u64| match access.kind {
            BlockKind::Unknown => {
                let first = space.find(access.volume.0, at).unwrap_or(0) / u64::from(line);
                let last = first + (at % u64::from(line) + len.max(1) - 1) / u64::from(line);
                let known = metadata.range(LineId(first)..=LineId(last)).next();
                known.map_or(BlockKind::Unknown, |_| BlockKind::Metadata)
            }
            stated => stated,
        };
        limits::judge(limits, admission, access, line, parts, |_, _| Rule::ByPolicy, kind, out)
    }

    fn prefer(&mut self, line: LineId, victim: LineId) -> bool {
        let (of, its) = (self.policy_line(line), self.policy_line(victim));
        let (kind, its_kind) = (self.kind_of(line), self.kind_of(victim));
        let Some(admission) = self.admissions.get_mut(&of.volume.0) else { return true };
        let preferred = limits::prefer(admission, (of, kind), (its, its_kind));
        if !preferred {
            self.shares.not_taken(its.volume.0, of.volume.0);
        }
        preferred
    }

    fn volume_of(&self, line: LineId) -> u32 {
        self.space.unmap(line.0 * u64::from(self.layout.line)).0
    }

    /// Whether the line at `victim` stays, though the one at `line` would take its place.
    fn keep(&mut self, victim: LineId, line: Option<LineId>) -> bool {
        if !self.shares.is_any() {
            return false;
        }
        let of = line.map(|line| self.volume_of(line));
        match self.shares.keep(self.volume_of(victim), of) {
            Stays::No => false,
            Stays::Yes(reason) => {
                self.refused(of, reason);
                true
            }
        }
    }

    /// Whether the lines of a page of the table stay.
    fn keep_groups(&mut self, first: GroupId, last: GroupId, lines: u32) -> bool {
        if !self.shares.is_any() {
            return false;
        }
        let of = |group: GroupId| {
            let volume = self.volume_of(group.line(0));
            Some((VolumeId(volume), volume))
        };
        let shares = share::of_page((first, last), self.layout.shards.into(), lines.into(), of);
        self.shares.keep_page(shares)
    }

    /// Whether the volume of `line` may have one more.
    fn may_grow(&mut self, line: LineId) -> bool {
        if !self.shares.is_any() {
            return true;
        }
        let volume = self.volume_of(line);
        let grows = self.shares.may_grow(volume);
        if !grows {
            self.refused(Some(volume), Some(Reason::Ceiling));
        }
        grows
    }

    fn refused(&mut self, volume: Option<u32>, reason: Option<Reason>) {
        let admission = volume.and_then(|volume| self.admissions.get_mut(&volume));
        if let (Some(admission), Some(reason)) = (admission, reason) {
            admission.count(PolicyVerdict::Reject(reason));
        }
    }

    /// DRAM of admission, bytes.
    pub(super) fn admission_bytes(&self) -> u64 {
        self.admissions.values().map(|a| a.memory_bytes() as u64).sum()
    }
}

/// What shard `shard` asks for at `now`.
pub(super) struct Fx<'a> {
    pub world: &'a mut World,
    pub shard: u32,
    pub now: Nanos,
}

impl Fx<'_> {
    /// Lines are read from `slot` on: when they are there.
    fn read_lines(&mut self, now: Nanos, slot: SlotId, lines: u32) -> Nanos {
        let World { drive, files, layout, .. } = &mut *self.world;
        match files {
            Some(files) => files.read(drive, now, (self.shard, slot), lines),
            None => drive.read(now, layout.slot_at(self.shard, slot.0), lines * layout.line),
        }
    }

    /// They are written: when that is done. `None`: there is no room for them.
    fn write_lines(&mut self, now: Nanos, slot: SlotId, lines: u32) -> Option<Nanos> {
        let World { drive, files, layout, .. } = &mut *self.world;
        let len = lines * layout.line;
        let done = match files {
            Some(files) => files.write(drive, now, (self.shard, slot), lines)?,
            None => drive.write(now, layout.slot_at(self.shard, slot.0), len),
        };
        self.world.charge_lines(now, u64::from(len));
        Some(done)
    }

    fn write(&mut self, now: Nanos, io: IoId, slot: SlotId, lines: u32) {
        let shard = self.shard;
        match self.write_lines(now, slot, lines) {
            Some(done) => self.world.at(done, Event::FlashWritten { shard, io, lines }),
            None => self.world.at(now, Event::FlashFull { shard, io }),
        }
    }
}

impl BlockEffects for Fx<'_> {
    fn flash_read(&mut self, io: IoId, slot: SlotId, _line: LineId, lines: u32, op: OpId) {
        self.world.told(op);
        let done = self.read_lines(self.now, slot, lines);
        self.world.reads.insert((self.shard, io), Brings::Flash);
        self.world.at(done, Event::FlashRead { shard: self.shard, io, lines });
    }

    fn flash_write(&mut self, io: IoId, slot: SlotId, _line: LineId, lines: u32, _op: OpId) {
        self.write(self.now, io, slot, lines);
    }

    fn fill(&mut self, io: IoId, slot: SlotId, _line: LineId, lines: u32, _source: Source) {
        self.write(self.now, io, slot, lines);
    }

    fn merge(&mut self, io: IoId, merge: Merge, _op: OpId) {
        let read = self.read_lines(self.now, merge.from, 1);
        // (It has its place already.)
        let done = self.write_lines(read, merge.to, 1).unwrap_or(read);
        self.world.at(done, Event::Merged { shard: self.shard, io });
    }

    fn copy(&mut self, io: IoId, from: SlotId, to: SlotId, lines: u32) {
        let read = self.read_lines(self.now, from, lines);
        self.write(read, io, to, lines);
    }

    fn load(&mut self, io: IoId, page: u32, op: OpId) {
        self.world.told(op);
        let World { drive, files, .. } = &mut *self.world;
        let shard = self.shard;
        let done = files.as_mut().map_or(self.now, |f| f.load(drive, self.now, shard, page));
        self.world.at(done, Event::Loaded { shard, io, page });
    }

    fn backing_read(&mut self, io: IoId, at: u64, len: u32, op: OpId) {
        self.world.reads.insert((self.shard, io), Brings::Store(op));
        let piece = Piece { shard: self.shard, io, at, len };
        self.world.store_asks.push_back((op, StoreAsk::Read(piece)));
    }

    fn backing_change(&mut self, io: IoId, op: OpId, kind: PartKind, at: u64, len: u32) {
        let piece = Piece { shard: self.shard, io, at, len };
        self.world.store_asks.push_back((op, StoreAsk::Change(piece, kind)));
    }

    fn deliver(&mut self, source: Source, op: OpId, _at: u64, len: u32) {
        self.world.told(op);
        let brings = match source {
            Source::Io(io) => self.world.reads.get(&(self.shard, io)).copied(),
            Source::Op(by) => Some(Brings::Store(by)),
        };
        let Some(o) = self.world.ops.get_mut(&op) else { return };
        match brings {
            Some(Brings::Flash) => o.from_flash += u64::from(len),
            Some(Brings::Store(by)) if by != op => o.shared += u64::from(len),
            Some(Brings::Store(_)) | None => {}
        }
    }

    fn release(&mut self, io: IoId) {
        self.world.reads.remove(&(self.shard, io));
    }

    fn done(&mut self, op: OpId, result: Result<(), IoFailed>, _holds: bool) {
        self.world.told(op);
        if self.world.ranges.contains_key(&op) {
            self.world.given.push_back(op);
        } else if self.world.aheads.contains_key(&op) {
            self.world.step_ahead(op);
        } else {
            self.world.step(self.now, op, result.is_err());
        }
    }

    fn release_op(&mut self, _op: OpId) {}

    fn intent(&mut self, region: u32) {
        self.world.asks.push((self.shard, region));
        self.world.log_wanted = true;
    }

    fn commit_soon(&mut self) {
        match self.world.files {
            Some(_) => self.world.commit_wanted = true,
            None => self.world.log_wanted = true,
        }
    }

    fn prefer(&mut self, line: LineId, victim: LineId) -> bool {
        self.world.prefer(line, victim)
    }

    fn keep(&mut self, victim: LineId, line: Option<LineId>) -> bool {
        self.world.keep(victim, line)
    }

    fn keep_groups(&mut self, first: GroupId, last: GroupId, lines: u32) -> bool {
        self.world.keep_groups(first, last, lines)
    }

    fn may_grow(&mut self, line: LineId) -> bool {
        self.world.may_grow(line)
    }
}
