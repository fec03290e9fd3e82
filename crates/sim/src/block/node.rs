//! What the simulator's queue shares with its log: shards, mailbox, and what is decided for all volumes. One thread has all of
//! it, so that every lock is a cell: one that is taken twice panics.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use larder_base::Nanos;
use larder_engine::block::node;
use larder_engine::block::node::calls::{Calls, Mail, Out, Questions};
use larder_engine::block::node::event::{Ended, Host, State, Volume, Why};
use larder_engine::block::node::held::Held;
use larder_engine::block::node::limits::{self, Limits};
use larder_engine::block::node::maintenance::{Inbox, Stores};
use larder_engine::block::node::owners::{self, Owners, Seen};
use larder_engine::block::node::queue::Node;
use larder_engine::block::node::quiet::{Changes, QUIET};
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::node::setup;
use larder_engine::block::node::share::{Account, Pins};
use larder_engine::block::writeback::log::{Sums, WriteLog};
use larder_engine::block::{GROUP_LINES, GroupId, LineId, OpId};
use larder_format::block::{BlockSuperblock, Layout};
use larder_policy::block::{
    BlockAdmissionConfig, BlockAdmissionError, BlockKind, LineId as PolicyLine, Reason, Rule,
    Verdict as PolicyVerdict, VerdictCounts, VolumeId,
};

use super::back::Back;
use super::shares::{Sharer, Shares};
use super::space::Space;

/// The types that the simulator brings: no bytes, only their number.
pub(super) struct Sim;

/// So many bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blank(pub u64);

impl Host for Sim {
    type Bytes = Blank;
    type Volume = Run;
    /// Number of the request.
    type Ticket = u64;
    type Failure = ();
    type Extents = ();

    fn part(_bytes: &Blank, _from: u64, len: u64) -> Blank {
        Blank(len)
    }

    fn apart(_bytes: &Blank, _from: u64, len: u64) -> Blank {
        Blank(len)
    }

    fn failure(_why: Why) {}

    /// Nothing is looked at: zeros, as many as there are.
    fn sums(bytes: &Blank) -> Sums {
        Sums::new(super::sums(bytes.0.div_ceil(4096) as u32))
    }
}

/// Bytes of a volume that are neighbours in the line space: of a volume whose size nobody knows it is given stretch by stretch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    pub volume: u32,
    /// Where byte 0 of the volume would lie (modulo 2⁶⁴).
    pub base: u64,
    /// Where what may be cached ends.
    pub whole: u64,
    /// On behalf of which request of the trace.
    pub number: u64,
}

impl Volume for Run {
    fn state(&self) -> State {
        State::Served
    }

    fn base(&self) -> u64 {
        self.base
    }

    fn whole(&self) -> u64 {
        self.whole
    }
}

/// What a turn of maintenance has for others: it is theirs when the turn's I/O is over.
#[derive(Default)]
pub(super) struct Late {
    mail: Mail<Sim>,
    out: Out<Blank>,
    ranges: Vec<(OpId, u32, u32)>,
}

/// See the [module](self).
pub(super) struct SimNode {
    /// Of the device as it was formatted: no volume is in it.
    superblock: BlockSuperblock,
    pub layout: Layout,
    /// Shards, with the bytes that they may still ask for.
    pub cells: Vec<RefCell<(node::StoredShard, Held<Sim>)>>,
    /// The time.
    pub now: Cell<Nanos>,
    mail: RefCell<Mail<Sim>>,
    pub inbox: RefCell<Inbox<Blank>>,
    /// Maintenance is at work: what its calls leave for others.
    late: RefCell<Option<Late>>,
    /// What keeps lines from flash.
    pub limits: Limits,
    /// What volumes may have of the cache.
    pub shares: Shares,
    pub space: RefCell<Space>,
    pub changes: Changes,
    turns: RefCell<Turns>,
    admission: BlockAdmissionConfig,
    /// Bytes of a volume, as far as admission is told.
    pub volume_bytes: u64,
    /// That is what a volume has, and no guess.
    knows_volumes: bool,
    pub admissions: RefCell<BTreeMap<u32, node::StoredAdmission>>,
    /// Lines last seen as metadata; kept where that makes a difference.
    metadata: RefCell<BTreeSet<LineId>>,
    knows_metadata: bool,
    /// The write log, if it writes back.
    pub back: Option<Back>,
}

impl SimNode {
    pub(super) fn new(
        superblock: BlockSuperblock,
        shards: impl Iterator<Item = node::StoredShard>,
        admission: BlockAdmissionConfig,
        (volume_bytes, stretch): (u64, u64),
        (limits, shares): (Limits, Shares),
    ) -> Result<SimNode, BlockAdmissionError> {
        let layout = superblock.layout;
        let mut node = SimNode {
            superblock,
            layout,
            cells: shards.map(|shard| RefCell::new((shard, Held::default()))).collect(),
            mail: RefCell::default(),
            now: Cell::default(),
            inbox: RefCell::default(),
            late: RefCell::default(),
            limits,
            shares,
            space: RefCell::new(Space::new(&layout, stretch)),
            changes: Changes::new(layout.regions, QUIET),
            turns: RefCell::default(),
            admission,
            volume_bytes,
            knows_volumes: stretch > 0,
            admissions: RefCell::default(),
            metadata: RefCell::default(),
            knows_metadata: false,
            back: None,
        };
        // What cannot be set up is found before anything runs.
        node.knows_metadata = node.new_admission()?.prefers_metadata();
        Ok(node)
    }

    fn new_admission(&self) -> Result<node::StoredAdmission, BlockAdmissionError> {
        setup::admission(&self.admission, &self.superblock, self.volume_bytes)
    }

    /// How many volumes there are.
    pub(super) fn volumes(&self) -> usize {
        self.admissions.borrow().len()
    }

    pub(super) fn knows(&self, volume: u32) -> bool {
        self.admissions.borrow().contains_key(&volume)
    }

    /// A volume comes, if it is not known. Returns whether it does.
    pub(super) fn add_volume(&self, volume: u32) -> Result<bool, BlockAdmissionError> {
        if !self.knows(volume) {
            let admission = self.new_admission()?;
            self.admissions.borrow_mut().insert(volume, admission);
            self.shares.comes(volume, self.volume_bytes);
            return Ok(true);
        }
        Ok(false)
    }

    pub(super) fn verdicts(&self) -> VerdictCounts {
        let mut sum = VerdictCounts::default();
        self.admissions.borrow().values().for_each(|a| sum.add(a.verdicts()));
        sum
    }

    /// DRAM of admission, bytes.
    pub(super) fn admission_bytes(&self) -> u64 {
        self.admissions.borrow().values().map(|a| a.memory_bytes() as u64).sum()
    }

    /// Maintenance is at work from now on, until [`SimNode::has_worked`], and has left this so far.
    pub(super) fn works(&self, late: Late) {
        *self.late.borrow_mut() = Some(late);
    }

    /// It is not any more. Returns what it has left for others.
    pub(super) fn has_worked(&self) -> Late {
        self.late.borrow_mut().take().unwrap_or_default()
    }

    /// What it has left comes to those for whom it is.
    pub(super) fn give(&self, late: Late) {
        let Late { mail, mut out, ranges } = late;
        self.mail.borrow_mut().extend(mail);
        if out.is_for_maintenance() {
            self.maintain(&mut out);
        }
        ranges.into_iter().for_each(|(op, first, last)| self.ask_bits(op, first, last));
    }

    /// Does `f` with each shard.
    pub(super) fn each(&self, mut f: impl FnMut(&mut node::StoredShard)) {
        self.cells.iter().for_each(|cell| f(&mut cell.borrow_mut().0));
    }

    /// Whether `f` is true of any shard.
    pub(super) fn any(&self, f: impl Fn(&node::StoredShard) -> bool) -> bool {
        self.cells.iter().any(|cell| f(&cell.borrow().0))
    }

    /// Where what may be cached ends of a stretch that ends at `end` of the line space and at byte `stretch_end` of its
    /// volume, for a request of it that ends at byte `request_end`: the volume's whole lines, if its size is stated and nothing
    /// beyond is asked for.
    pub(super) fn whole(&self, end: u64, stretch_end: u64, request_end: u64) -> u64 {
        if !self.knows_volumes || request_end > self.volume_bytes {
            return end;
        }
        let beyond = stretch_end.saturating_sub(self.volume_bytes);
        let line = u64::from(self.layout.line);
        end.saturating_sub(beyond) / line * line
    }

    /// Takes note of what a request says of the lines from `first` to `last`: in the place of a detector, which looks into bytes.
    pub(super) fn note(&self, first: LineId, last: LineId, class: BlockKind) {
        if !self.knows_metadata || class == BlockKind::Unknown {
            return;
        }
        let mut metadata = self.metadata.borrow_mut();
        for line in (first.0..=last.0).map(LineId) {
            if class == BlockKind::Metadata {
                metadata.insert(line);
            } else {
                metadata.remove(&line);
            }
        }
    }

    fn kind_of(&self, line: LineId) -> BlockKind {
        match self.metadata.borrow().contains(&line) {
            true => BlockKind::Metadata,
            false => BlockKind::Unknown,
        }
    }

    /// The volume that has a line, by its number, and the line's first byte in it.
    fn place(&self, line: LineId) -> Option<(u32, u64)> {
        self.space.borrow().unmap(line.0 * u64::from(self.layout.line))
    }

    /// A line as admission knows it, and what it holds.
    fn seen(&self, volume: &Sharer, line: LineId) -> Seen {
        let offset = self.place(line).map_or(0, |(_, offset)| offset);
        (PolicyLine { volume: volume.id, offset }, self.kind_of(line))
    }

    fn count(&self, volume: u32, reason: Reason) {
        if let Some(admission) = self.admissions.borrow_mut().get_mut(&volume) {
            admission.count(PolicyVerdict::Reject(reason));
        }
    }
}

impl Owners for SimNode {
    type Volume = Arc<Sharer>;

    fn pins(&self) -> &Pins {
        &self.shares.pins
    }

    fn shards(&self) -> u32 {
        self.layout.shards
    }

    fn owner(&self, line: LineId) -> Option<Arc<Sharer>> {
        self.shares.of(self.place(line)?.0)
    }

    fn id(&self, volume: &Arc<Sharer>) -> VolumeId {
        volume.id
    }

    fn account<'a>(&'a self, volume: &'a Arc<Sharer>) -> &'a Account {
        &volume.account
    }

    fn selects(&self, volume: &Arc<Sharer>) -> bool {
        volume.is_selected()
    }

    fn is_pinned(&self, _: &Arc<Sharer>, line: LineId) -> bool {
        let rule = |(volume, offset)| {
            let bytes = u64::from(self.layout.line);
            self.shares.selection().rule(VolumeId(volume), offset, bytes)
        };
        self.place(line).is_some_and(|place| rule(place) == Rule::Always)
    }

    fn refused(&self, volume: &Arc<Sharer>, reason: Reason) {
        self.count(volume.id.0, reason);
    }
}

impl Questions for SimNode {
    fn line_bytes(&self) -> u32 {
        self.layout.line
    }

    fn prefer(&self, line: LineId, victim: LineId) -> bool {
        owners::prefer(self, line, victim, |of, its| {
            let (at, over) = (self.seen(of, line), self.seen(its, victim));
            let mut admissions = self.admissions.borrow_mut();
            let admission = admissions.get_mut(&of.id.0);
            admission.is_none_or(|a| limits::prefer(a, at, over))
        })
    }

    fn keep(&self, victim: LineId, line: Option<LineId>) -> bool {
        owners::keep(self, victim, line)
    }

    fn keep_groups(&self, first: GroupId, last: GroupId, lines: u32) -> bool {
        owners::keep_groups(self, first, last, lines)
    }

    fn may_grow(&self, line: LineId) -> bool {
        owners::may_grow(self, line)
    }
}

impl Calls<Sim> for SimNode {
    type Shard = node::StoredShard;

    fn shard<R>(
        &self,
        shard: u32,
        f: impl FnOnce(&mut node::StoredShard, &mut Held<Sim>) -> R,
    ) -> R {
        let (shard, held) = &mut *self.cells[shard as usize].borrow_mut();
        f(shard, held)
    }

    fn mailbox<R>(&self, _thread: usize, f: impl FnOnce(&mut Mail<Sim>) -> R) -> R {
        match &mut *self.late.borrow_mut() {
            Some(late) => f(&mut late.mail),
            None => f(&mut self.mail.borrow_mut()),
        }
    }

    /// The only queue looks into its mailbox at each turn.
    fn notify(&self, _thread: usize) {}

    fn maintain(&self, out: &mut Out<Blank>) {
        match &mut *self.late.borrow_mut() {
            Some(Late { out: all, .. }) => {
                all.fills.append(&mut out.fills);
                all.copies.append(&mut out.copies);
                all.asks.append(&mut out.asks);
                all.loads.append(&mut out.loads);
                all.commit |= std::mem::take(&mut out.commit);
            }
            // Nobody is asleep.
            None => drop(self.inbox.borrow_mut().leave(self.now.get(), out)),
        }
    }
}

impl Stores for SimNode {
    /// Each volume has one of its own: a region is one volume's.
    fn store_of(&self, region: u32) -> Option<VolumeId> {
        let lines = self.layout.region_groups * u64::from(GROUP_LINES);
        self.place(LineId(u64::from(region) * lines)).map(|(volume, _)| VolumeId(volume))
    }

    fn stores(&self) -> Vec<VolumeId> {
        self.admissions.borrow().keys().copied().map(VolumeId).collect()
    }
}

impl Node<Sim> for SimNode {
    type Admission = node::StoredAdmission;

    fn is_enabled(&self) -> bool {
        true
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    /// (No budget of a simulation is kept in a file: there is none to wait for.)
    fn ask_budget(&self, op: OpId) {
        let _ = self.inbox.borrow_mut().ask_budget(self.now.get(), op);
    }

    fn changes(&self) -> &Changes {
        &self.changes
    }

    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        f(&mut self.turns.borrow_mut())
    }

    fn ask_bits(&self, op: OpId, first: u32, last: u32) {
        match &mut *self.late.borrow_mut() {
            Some(late) => late.ranges.push((op, first, last)),
            None => drop(self.inbox.borrow_mut().ask_bits(self.now.get(), op, first, last)),
        }
    }

    fn give_up(&self, now: Nanos, why: String) {
        let _ = self.inbox.borrow_mut().give_up(now, why);
    }

    fn attachment(&self, volume: &Run) -> Option<u32> {
        self.back.as_ref()?.attachment(volume.volume)
    }

    fn log<R>(&self, f: impl FnOnce(&mut WriteLog<Blank>) -> R) -> Option<R> {
        Some(f(&mut self.back.as_ref()?.log.borrow_mut()))
    }

    fn id(&self, volume: &Run) -> VolumeId {
        VolumeId(volume.volume)
    }

    fn selects(&self, volume: &Run) -> bool {
        self.shares.selection().selects(VolumeId(volume.volume))
    }

    fn rule(&self, volume: &Run, at: u64, len: u64) -> Rule {
        self.shares.selection().rule(VolumeId(volume.volume), at, len)
    }

    fn kind(&self, volume: &Run, at: u64, len: u64) -> BlockKind {
        if !self.knows_metadata {
            return BlockKind::Unknown;
        }
        let line = u64::from(self.layout.line);
        let first = volume.base.wrapping_add(at) / line;
        let last = first + (at % line + len.max(1) - 1) / line;
        let metadata = self.metadata.borrow();
        let known = metadata.range(LineId(first)..=LineId(last)).next();
        known.map_or(BlockKind::Unknown, |_| BlockKind::Metadata)
    }

    fn admission<R>(&self, volume: &Run, f: impl FnOnce(&mut node::StoredAdmission) -> R) -> R {
        let mut admissions = self.admissions.borrow_mut();
        f(admissions.get_mut(&volume.volume).expect("a volume that was added"))
    }

    fn refused(&self, volume: &Run, reason: Reason) {
        self.count(volume.volume, reason);
    }

    /// There are no bytes to look at: requests say what they hold.
    fn pass(&self, _volume: &Run, _at: u64, _bytes: &Blank) {}

    /// Requests are counted when they are answered.
    fn ended(&self, _volume: &Run, _me: usize, _now: Nanos, _ended: &Ended) {}
}
