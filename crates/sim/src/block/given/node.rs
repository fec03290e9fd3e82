//! What the queue shares with maintenance: shards, mailboxes, volumes, and what is decided for all of them. One thread has all of it, so that
//! every lock is a cell.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use larder_base::Nanos;
use larder_engine::block::node;
use larder_engine::block::node::calls::{Calls, Mail, Out, Questions, thread_of};
use larder_engine::block::node::event::Ended;
use larder_engine::block::node::failing::{FlashError, page_slots};
use larder_engine::block::node::held::Held;
use larder_engine::block::node::limits::{self, Limits};
use larder_engine::block::node::maintenance::{Inbox, Stores};
use larder_engine::block::node::owners::{self, Owners, Placed};
use larder_engine::block::node::queue::Node;
use larder_engine::block::node::quiet::{Changes, QUIET};
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::node::share::{Account, Pins};
use larder_engine::block::writeback::log::WriteLog;
use larder_engine::block::{GROUP_LINES, GroupId, LineId, OpId, Source, Sum};
use larder_format::block::Layout;
use larder_policy::block::{BlockKind, LineId as PolicyLine, Reason, Rule, Selection, VolumeId};

use super::back::Back;
use super::bytes::{Carried, House};
use super::medium::Medium;
use super::volume::{Attached, Known};

/// Who has mailboxes: the queue, who would prefetch, and an operator. The first stays.
const MAILBOXES: usize = 3;
pub(super) const QUEUE: usize = 0;
pub(super) const OPERATOR: usize = MAILBOXES - 1;

/// A shard, with the bytes that it may still ask for.
pub(super) type Cells<B> = RefCell<(node::StoredShard, Held<House<B>>)>;

/// See the [module](self).
pub(super) struct GivenNode<B: Carried> {
    pub layout: Layout,
    /// That of the pages of a table.
    generation: u64,
    pub cells: Vec<Cells<B>>,
    pub now: Cell<Nanos>,
    mailboxes: [RefCell<Mail<House<B>>>; MAILBOXES],
    pub inbox: RefCell<Inbox<B>>,
    pub medium: Medium,
    pub selection: RefCell<Selection>,
    pins: Pins,
    pub volumes: RefCell<BTreeMap<String, Rc<Attached>>>,
    placed: RefCell<Placed<Rc<Attached>>>,
    changes: Changes,
    turns: RefCell<Turns>,
    /// The write log, if volumes write back.
    pub back: Option<Back<B>>,
    /// Why the cache was given up, if it was.
    pub given_up: RefCell<Option<String>>,
}

impl<B: Carried> GivenNode<B> {
    pub(super) fn new(
        layout: Layout,
        generation: u64,
        shards: impl Iterator<Item = node::StoredShard>,
        medium: Medium,
    ) -> GivenNode<B> {
        GivenNode {
            layout,
            generation,
            cells: shards.map(|shard| RefCell::new((shard, Held::default()))).collect(),
            now: Cell::default(),
            mailboxes: Default::default(),
            inbox: RefCell::default(),
            medium,
            selection: RefCell::default(),
            pins: Pins::new(layout.capacity() * u64::from(layout.line)),
            volumes: RefCell::default(),
            placed: RefCell::default(),
            changes: Changes::new(layout.regions, QUIET),
            turns: RefCell::default(),
            back: None,
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
        !self.mailboxes[thread].borrow().is_empty()
    }

    /// What waits in a mailbox.
    pub(super) fn take_mail(&self, thread: usize) -> Mail<House<B>> {
        self.mailboxes[thread].take()
    }

    /// What a page of the table says.
    pub(super) fn decode_page(
        &self,
        shard: u32,
        page: u32,
        bytes: &[u8],
    ) -> Result<Vec<Option<Sum>>, FlashError> {
        page_slots(&self.layout, self.generation, (shard, page), bytes)
    }

    // ---- volumes ----

    /// All volumes, by name.
    pub(super) fn all(&self) -> Vec<Rc<Attached>> {
        self.volumes.borrow().values().cloned().collect()
    }

    /// The volumes have changed, or where they lie.
    pub(super) fn placed(&self) {
        self.placed.borrow_mut().set(self.all());
        self.govern();
    }

    /// What is selected has changed, or how long a volume is.
    pub(super) fn govern(&self) {
        self.placed.borrow().govern(&self.selection.borrow(), &self.pins);
    }

    fn rule_of(&self, volume: &Attached, offset: u64, bytes: u64) -> Rule {
        match volume.selected.get() {
            true => self.selection.borrow().rule(volume.id, offset, bytes),
            false => Rule::ByPolicy,
        }
    }
}

impl<B: Carried> Owners for GivenNode<B> {
    type Volume = Rc<Attached>;

    fn pins(&self) -> &Pins {
        &self.pins
    }

    fn shards(&self) -> u32 {
        self.layout.shards
    }

    fn owner(&self, line: LineId) -> Option<Rc<Attached>> {
        self.placed.borrow().at(self.at(line)).cloned()
    }

    fn id(&self, volume: &Rc<Attached>) -> VolumeId {
        volume.id
    }

    fn account<'a>(&'a self, volume: &'a Rc<Attached>) -> &'a Account {
        &volume.account
    }

    fn selects(&self, volume: &Rc<Attached>) -> bool {
        volume.selected.get()
    }

    fn is_pinned(&self, volume: &Rc<Attached>, line: LineId) -> bool {
        let offset = volume.offset_of(self.at(line));
        self.rule_of(volume, offset, self.line_bytes()) == Rule::Always
    }

    fn refused(&self, volume: &Rc<Attached>, reason: Reason) {
        volume.refused(reason);
    }
}

impl<B: Carried> Questions for GivenNode<B> {
    fn line_bytes(&self) -> u32 {
        self.layout.line
    }

    fn prefer(&self, line: LineId, victim: LineId) -> bool {
        owners::prefer(self, line, victim, |of, its| {
            let look = |v: &Attached, line: LineId| {
                let offset = v.offset_of(self.at(line));
                (PolicyLine { volume: v.id, offset }, v.classify(offset, self.line_bytes()))
            };
            let (at, over) = (look(of, line), look(its, victim));
            limits::prefer(&mut of.admission.borrow_mut(), at, over)
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

    fn filling(&self, line: LineId, lines: u32, source: Source) {
        let Some(volume) = self.owner(line) else { return };
        volume.counters.filling(lines, source);
    }

    fn stays(&self, op: OpId) -> bool {
        thread_of(op) == QUEUE
    }
}

impl<B: Carried> Calls<House<B>> for GivenNode<B> {
    type Shard = node::StoredShard;

    fn shard<R>(
        &self,
        shard: u32,
        f: impl FnOnce(&mut node::StoredShard, &mut Held<House<B>>) -> R,
    ) -> R {
        let (shard, held) = &mut *self.cells[shard as usize].borrow_mut();
        f(shard, held)
    }

    fn mailbox<R>(&self, thread: usize, f: impl FnOnce(&mut Mail<House<B>>) -> R) -> R {
        f(&mut self.mailboxes[thread].borrow_mut())
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
        self.placed.borrow().within(at, at + bytes).map(|v| v.id)
    }

    fn stores(&self) -> Vec<VolumeId> {
        self.volumes.borrow().values().map(|v| v.id).collect()
    }
}

impl<B: Carried> Node<House<B>> for GivenNode<B> {
    type Admission = node::StoredAdmission;

    fn is_enabled(&self) -> bool {
        self.given_up.borrow().is_none()
    }

    fn limits(&self) -> &Limits {
        &self.medium.limits
    }

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
        let _ = self.inbox.borrow_mut().ask_bits(self.now.get(), op, first, last);
    }

    fn give_up(&self, now: Nanos, why: String) {
        let _ = self.inbox.borrow_mut().give_up(now, why);
    }

    fn attachment(&self, volume: &Known) -> Option<u32> {
        self.back.as_ref()?.attachment(&volume.attached)
    }

    fn log<R>(&self, f: impl FnOnce(&mut WriteLog<B>) -> R) -> Option<R> {
        Some(f(&mut self.back.as_ref()?.log.borrow_mut()))
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

    fn admission<R>(&self, volume: &Known, f: impl FnOnce(&mut node::StoredAdmission) -> R) -> R {
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
        attached.counters.ended(ended, || attached.classify(ended.at, ended.len));
    }
}
