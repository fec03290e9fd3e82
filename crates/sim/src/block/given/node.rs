//! What the queue shares with maintenance: shards, mailboxes, volumes, and what is decided for all of them. One thread has all of it, so that
//! every lock is a cell.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use larder_base::Nanos;
use larder_engine::block::node::calls::{Calls, Mail, Out, Questions, thread_of};
use larder_engine::block::node::event::Ended;
use larder_engine::block::node::held::Held;
use larder_engine::block::node::limits::{self, Limits};
use larder_engine::block::node::maintenance::{Inbox, Stores};
use larder_engine::block::node::queue::Node;
use larder_engine::block::node::quiet::{Changes, QUIET};
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::node::share::{self, Pins, Side, Stays};
use larder_engine::block::record::{TapedAdmission, TapedShard};
use larder_engine::block::{GROUP_LINES, GroupId, IoFailed, LineId, OpId, PartKind, Source, Sum};
use larder_format::block::{Layout, table};
use larder_policy::block::{BlockKind, LineId as PolicyLine, Reason, Rule, Selection, VolumeId};
use larder_policy::budget::BudgetState;

use super::bytes::{Carried, House};
use super::medium::Medium;
use super::volume::{Attached, Known};

/// Who has mailboxes: the queue, who would prefetch, and an operator. The first stays.
const DOORS: usize = 3;
pub(super) const QUEUE: usize = 0;
pub(super) const DESK: usize = DOORS - 1;

/// A shard, with the bytes that it may still ask for.
pub(super) type Cells<B> = RefCell<(TapedShard, Held<House<B>>)>;

/// See the [module](self).
pub(super) struct GivenNode<B: Carried> {
    pub layout: Layout,
    /// That of the pages of a table.
    generation: u64,
    pub cells: Vec<Cells<B>>,
    pub now: Cell<Nanos>,
    doors: [RefCell<Mail<House<B>>>; DOORS],
    pub inbox: RefCell<Inbox<B>>,
    pub medium: Medium,
    pub selection: RefCell<Selection>,
    pins: Pins,
    pub volumes: RefCell<BTreeMap<String, Rc<Attached>>>,
    /// By first byte in the line space.
    by_base: RefCell<Vec<Rc<Attached>>>,
    changes: Changes,
    turns: RefCell<Turns>,
    /// Why the cache was given up, if it was.
    pub given_up: RefCell<Option<String>>,
}

impl<B: Carried> GivenNode<B> {
    pub(super) fn new(
        layout: Layout,
        generation: u64,
        shards: impl Iterator<Item = TapedShard>,
        medium: Medium,
    ) -> GivenNode<B> {
        GivenNode {
            layout,
            generation,
            cells: shards.map(|shard| RefCell::new((shard, Held::default()))).collect(),
            now: Cell::default(),
            doors: Default::default(),
            inbox: RefCell::default(),
            medium,
            selection: RefCell::default(),
            pins: Pins::new(layout.capacity() * u64::from(layout.line)),
            volumes: RefCell::default(),
            by_base: RefCell::default(),
            changes: Changes::new(layout.regions, QUIET),
            turns: RefCell::default(),
            given_up: RefCell::default(),
        }
    }

    pub(super) fn line_bytes(&self) -> u64 {
        self.layout.line.into()
    }

    fn at(&self, line: LineId) -> u64 {
        line.0 * self.line_bytes()
    }

    /// Whether something waits in a mailbox.
    pub(super) fn has_mail(&self, thread: usize) -> bool {
        !self.doors[thread].borrow().is_empty()
    }

    /// What a page of the table says.
    pub(super) fn decode_page(
        &self,
        shard: u32,
        page: u32,
        bytes: &[u8],
    ) -> Result<Vec<Option<Sum>>, IoFailed> {
        let number = self.layout.table_number(shard, page);
        let slots = table::decode(bytes, self.generation, number).ok_or(IoFailed)?;
        let per = (self.layout.shard_slots() / self.layout.table_pages().max(1)) as usize;
        Ok(slots.take(per).map(|sum| sum.map(Sum)).collect())
    }

    // ---- volumes ----

    /// All volumes, by name.
    pub(super) fn all(&self) -> Vec<Rc<Attached>> {
        self.volumes.borrow().values().cloned().collect()
    }

    /// The volumes have changed, or where they lie.
    pub(super) fn placed(&self) {
        let mut all = self.all();
        all.sort_by_key(|v| v.base());
        *self.by_base.borrow_mut() = all;
        self.govern();
    }

    /// What is selected has changed, or how long a volume is.
    pub(super) fn govern(&self) {
        let selection = self.selection.borrow();
        let (mut governed, mut pinned) = (false, 0);
        for volume in self.by_base.borrow().iter() {
            let selected = selection.selects(volume.id);
            volume.selected.set(selected);
            governed |= selected || volume.account.share().is_any();
            pinned += selection.pinned_bytes(volume.id, volume.bytes());
        }
        self.pins.set(pinned, governed);
    }

    /// The volume at a byte of the line space.
    fn volume_at(&self, at: u64) -> Option<Rc<Attached>> {
        let volumes = self.by_base.borrow();
        let after = volumes.partition_point(|v| v.base() <= at);
        let volume = volumes.get(after.checked_sub(1)?)?;
        volume.has(at).then(|| volume.clone())
    }

    /// Whose a line is.
    pub(super) fn owner(&self, line: LineId) -> Option<Rc<Attached>> {
        self.volume_at(self.at(line))
    }

    fn rule_of(&self, volume: &Attached, offset: u64, bytes: u64) -> Rule {
        match volume.selected.get() {
            true => self.selection.borrow().rule(volume.id, offset, bytes),
            false => Rule::ByPolicy,
        }
    }

    fn is_pinned(&self, volume: &Attached, line: LineId) -> bool {
        let offset = volume.offset_of(self.at(line));
        self.rule_of(volume, offset, self.line_bytes()) == Rule::Always
    }
}

impl<B: Carried> Questions for GivenNode<B> {
    fn line_bytes(&self) -> u32 {
        self.layout.line
    }

    fn prefer(&self, line: LineId, victim: LineId) -> bool {
        let (Some(of), Some(its)) = (self.owner(line), self.owner(victim)) else { return true };
        let look = |v: &Attached, line: LineId| {
            let offset = v.offset_of(self.at(line));
            (PolicyLine { volume: v.id, offset }, v.classify(offset, self.line_bytes()))
        };
        let (at, over) = (look(&of, line), look(&its, victim));
        let preferred = limits::prefer(&mut of.admission.borrow_mut(), at, over);
        if !preferred {
            share::not_taken(&its.account, &of.account);
        }
        preferred
    }

    fn keep(&self, victim: LineId, line: Option<LineId>) -> bool {
        let Some(owner) = self.owner(victim) else { return false };
        let of = line.and_then(|line| self.owner(line).map(|v| (v, line)));
        let pinned = || self.is_pinned(&owner, victim);
        let its = Side { volume: owner.id, account: &owner.account, pinned };
        let comes = of.as_ref().map(|(v, line)| {
            let pinned = || self.is_pinned(v, *line);
            Side { volume: v.id, account: &v.account, pinned }
        });
        match share::keep(&self.pins, &its, comes.as_ref()) {
            Stays::No => false,
            Stays::Yes(reason) => {
                if let (Some(reason), Some((of, _))) = (reason, &of) {
                    of.refused(reason);
                }
                true
            }
        }
    }

    fn keep_groups(&self, first: GroupId, last: GroupId, lines: u32) -> bool {
        let of = |group: GroupId| self.owner(group.line(0)).map(|v| (v.id, v));
        let shards = self.layout.shards;
        let shares = share::of_page((first, last), shards.into(), lines.into(), of);
        let all = (first.0..=last.0)
            .step_by(shards as usize)
            .flat_map(|g| (0..GROUP_LINES).map(move |i| GroupId(g).line(i)));
        let always = |line: LineId| {
            let of = shares.iter().find(|(v, _)| v.has(self.at(line)));
            of.is_some_and(|(v, _)| self.is_pinned(v, line))
        };
        let pinned = || shares.iter().any(|(v, _)| v.selected.get()) && all.clone().any(always);
        let accounts = shares.iter().map(|(v, lines)| (&v.account, *lines));
        share::keep_page(&self.pins, accounts, pinned)
    }

    fn may_grow(&self, line: LineId) -> bool {
        let Some(volume) = self.owner(line) else { return true };
        let grows = volume.account.may_grow();
        if !grows {
            volume.refused(Reason::Ceiling);
        }
        grows
    }

    fn filling(&self, line: LineId, lines: u32, source: Source) {
        let Some(volume) = self.owner(line) else { return };
        volume.count(|counts| {
            counts.filled += u64::from(lines);
            if matches!(source, Source::Io(_)) {
                counts.filled_by_reads += u64::from(lines);
            }
        });
    }

    fn stays(&self, op: OpId) -> bool {
        thread_of(op) == QUEUE
    }
}

impl<B: Carried> Calls<House<B>> for GivenNode<B> {
    type Shard = TapedShard;

    fn shard<R>(&self, shard: u32, f: impl FnOnce(&mut TapedShard, &mut Held<House<B>>) -> R) -> R {
        let (shard, held) = &mut *self.cells[shard as usize].borrow_mut();
        f(shard, held)
    }

    fn mailbox<R>(&self, thread: usize, f: impl FnOnce(&mut Mail<House<B>>) -> R) -> R {
        f(&mut self.doors[thread].borrow_mut())
    }

    /// Everybody looks into his mailbox at each turn.
    fn notify(&self, _thread: usize) {}

    fn maintain(&self, out: &mut Out<B>) {
        // Nobody is asleep.
        let _ = self.inbox.borrow_mut().leave(self.now.get(), out);
    }
}

impl<B: Carried> Stores for GivenNode<B> {
    fn store_of(&self, region: u32) -> Option<VolumeId> {
        let bytes = self.layout.region_groups * u64::from(GROUP_LINES) * self.line_bytes();
        let at = u64::from(region) * bytes;
        let volumes = self.volumes.borrow();
        let owner = volumes.values().find(|v| v.base() < at + bytes && at < v.base() + v.bytes());
        owner.map(|v| v.id)
    }

    fn stores(&self) -> Vec<VolumeId> {
        self.volumes.borrow().values().map(|v| v.id).collect()
    }
}

impl<B: Carried> Node<House<B>> for GivenNode<B> {
    type Admission = TapedAdmission;

    fn is_enabled(&self) -> bool {
        self.given_up.borrow().is_none()
    }

    fn limits(&self) -> &Limits {
        &self.medium.limits
    }

    fn keep_budget(&self, now: Nanos, state: BudgetState) {
        self.medium.claim(now, Some(state));
    }

    fn changes(&self) -> &Changes {
        &self.changes
    }

    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        f(&mut self.turns.borrow_mut())
    }

    fn ask_bits(&self, op: OpId, first: u32, last: u32) {
        let _ = self.inbox.borrow_mut().ask_bits(self.now.get(), op, first, last);
    }

    fn id(&self, volume: &Known) -> VolumeId {
        volume.attached.id
    }

    fn selects(&self, volume: &Known) -> bool {
        volume.attached.selected.get()
    }

    fn rule(&self, volume: &Known, at: u64, len: u64) -> Rule {
        self.rule_of(&volume.attached, at, len)
    }

    fn kind(&self, volume: &Known, at: u64, len: u64) -> BlockKind {
        volume.attached.classify(at, len)
    }

    fn admission<R>(&self, volume: &Known, f: impl FnOnce(&mut TapedAdmission) -> R) -> R {
        f(&mut volume.attached.admission.borrow_mut())
    }

    fn refused(&self, volume: &Known, reason: Reason) {
        volume.attached.refused(reason);
    }

    fn pass(&self, volume: &Known, at: u64, bytes: &B) {
        if let Some(bytes) = bytes.seen() {
            volume.attached.pass(at, bytes);
        }
    }

    fn ended(&self, volume: &Known, _me: usize, _now: Nanos, ended: &Ended) {
        let attached = &volume.attached;
        let holds = match ended.holds {
            BlockKind::Unknown => attached.classify(ended.at, ended.len),
            stated => stated,
        };
        attached.count(|counts| {
            counts.failed += u64::from(ended.failed);
            match ended.kind {
                PartKind::Read => {
                    counts.reads += 1;
                    counts.read_bytes += ended.len;
                    counts.read_hits += u64::from(ended.hit);
                    let metadata = holds == BlockKind::Metadata;
                    counts.metadata_reads += u64::from(metadata);
                    counts.metadata_hits += u64::from(metadata && ended.hit);
                }
                PartKind::Write | PartKind::Zero | PartKind::Trim => {
                    counts.writes += 1;
                    if ended.kind == PartKind::Write {
                        counts.write_bytes += ended.len;
                    }
                }
                PartKind::Prefetch => {}
            }
        });
    }
}
