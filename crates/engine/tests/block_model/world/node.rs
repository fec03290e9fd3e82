//! The world as a queue sees it, for the time of a call: shards, what they hold, mailboxes, and what keeps lines from flash.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use larder_base::{Nanos, Rng};
use larder_engine::block::node::calls::{Calls, Mail, Message, Out, Questions, thread_of};
use larder_engine::block::node::charged::Charges;
use larder_engine::block::node::event::Ended;
use larder_engine::block::node::failing::FlashError;
use larder_engine::block::node::held::Held;
use larder_engine::block::node::limits::{Admits, Limits};
use larder_engine::block::node::maintenance::{AtNode, Shards, Stores};
use larder_engine::block::node::operator::{Ask, Operation};
use larder_engine::block::node::owners::Accounts;
use larder_engine::block::node::queue::{Node, Queue};
use larder_engine::block::node::quiet::Changes;
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::{BlockShard, GROUP_LINES, GroupId, LineId, OpId, Verdict};
use larder_policy::block::{
    BlockAccess, BlockCandidate, BlockKind, Observed, Reason, Rule, Verdict as PolicyVerdict,
    VolumeId,
};

use super::in_log::STORE;
use super::volumes::{Store, volume_at};
use super::{LINE, PER_LINE, SHARDS, World};
use crate::parts::{Bytes, Carried, Model, Purse, Said, Stretch};
use crate::shares::Shares;

/// Threads that have mailboxes: the queue's, and an operator's.
pub(super) const OPERATOR: usize = 1;

/// What waits for somebody.
#[derive(Default)]
pub(super) struct Waiting {
    pub(super) mail: [Mail<Model>; 2],
    out: Out<Bytes>,
    /// Ranges that need the bits of regions.
    ranges: Vec<(OpId, u32, u32)>,
    budget: Vec<OpId>,
    /// Parts that were refused: by the budget, and for want of space.
    refused: (u64, u64),
    /// Why the cache is to be given up.
    give_up: Option<String>,
}

impl Waiting {
    fn refuse(&mut self, reason: Reason) {
        match reason {
            Reason::Budget => self.refused.0 += 1,
            Reason::NoSpace => self.refused.1 += 1,
            _ => {}
        }
    }
}

/// Admission that says of everything what a client has been dealt.
pub(super) struct Dealt {
    verdict: Verdict,
    refused: Vec<Reason>,
}

impl Admits for Dealt {
    fn observe(&mut self, _: &BlockAccess) -> Observed {
        Observed::default()
    }

    fn wants_victim(&self) -> bool {
        false
    }

    fn ask(&mut self, _: &BlockCandidate, _: bool) -> Verdict {
        self.verdict
    }

    fn ahead(&self, said: Verdict) -> Verdict {
        said
    }

    fn count(&mut self, verdict: PolicyVerdict) {
        if let PolicyVerdict::Reject(reason) = verdict {
            self.refused.push(reason);
        }
    }
}

/// See the [module](self).
pub(super) struct Now<'a> {
    shards: RefCell<&'a mut Vec<BlockShard>>,
    held: RefCell<&'a mut Vec<Held<Model>>>,
    waiting: RefCell<&'a mut Waiting>,
    turns: RefCell<&'a mut Turns>,
    purse: Purse,
    changes: &'a Changes,
    shares: Rc<Shares>,
    coin: RefCell<Rng>,
    /// Lines begin to be filled that may have free slots only.
    if_free: bool,
    enabled: bool,
    verdict: Verdict,
    /// Admission is locked.
    judging: Cell<bool>,
    /// Lines of a region.
    regions: u64,
    volumes: &'a [Store],
}

impl Questions for Now<'_> {
    fn line_bytes(&self) -> u32 {
        LINE as u32
    }

    fn prefer(&self, line: LineId, victim: LineId) -> bool {
        assert!(!self.if_free, "{victim:?} is to go for {line:?}, which may have a free slot only");
        let preferred = self.coin.borrow_mut().chance(0.5);
        self.shares.prefer(line, victim, preferred)
    }

    fn keep(&self, victim: LineId, line: Option<LineId>) -> bool {
        // (Where it is about room the cleaner asks.)
        let displaces = self.if_free && line.is_some();
        assert!(!displaces, "{victim:?} is to go for {line:?}, which may have a free slot only");
        self.shares.keep(victim, line)
    }

    fn keep_groups(&self, first: GroupId, last: GroupId, lines: u32) -> bool {
        assert!(lines > 0, "nobody goes from {first:?} on");
        assert!(!self.if_free, "{lines} lines are to go for one that may have a free slot only");
        self.shares.keep_page(first, last, lines)
    }

    fn may_grow(&self, line: LineId) -> bool {
        self.shares.may_grow(line)
    }

    /// An operator may go away at any time.
    fn stays(&self, op: OpId) -> bool {
        thread_of(op) != OPERATOR
    }
}

impl Calls<Model> for Now<'_> {
    type Shard = BlockShard;

    fn shard<R>(&self, shard: u32, f: impl FnOnce(&mut BlockShard, &mut Held<Model>) -> R) -> R {
        let (mut shards, mut held) = (self.shards.borrow_mut(), self.held.borrow_mut());
        f(&mut shards[shard as usize], &mut held[shard as usize])
    }

    fn mailbox<R>(&self, thread: usize, f: impl FnOnce(&mut Mail<Model>) -> R) -> R {
        f(&mut self.waiting.borrow_mut().mail[thread])
    }

    fn notify(&self, _: usize) {}

    fn maintain(&self, out: &mut Out<Bytes>) {
        let all = &mut self.waiting.borrow_mut().out;
        all.fills.append(&mut out.fills);
        all.copies.append(&mut out.copies);
        all.asks.append(&mut out.asks);
        all.loads.append(&mut out.loads);
        all.commit |= std::mem::take(&mut out.commit);
    }
}

impl Node<Model> for Now<'_> {
    type Admission = Dealt;

    fn is_enabled(&self) -> bool {
        self.enabled
    }

    fn limits(&self) -> &Limits {
        self.purse.limits()
    }

    fn ask_budget(&self, op: OpId) {
        self.waiting.borrow_mut().budget.push(op);
    }

    fn changes(&self) -> &Changes {
        self.changes
    }

    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        f(&mut self.turns.borrow_mut())
    }

    fn ask_bits(&self, op: OpId, first: u32, last: u32) {
        self.waiting.borrow_mut().ranges.push((op, first, last));
    }

    fn give_up(&self, _: Nanos, why: String) {
        self.waiting.borrow_mut().give_up.get_or_insert(why);
    }

    fn id(&self, volume: &Stretch) -> VolumeId {
        VolumeId((volume.base / LINE / self.regions) as u32)
    }

    fn selects(&self, _: &Stretch) -> bool {
        true
    }

    fn rule(&self, volume: &Stretch, at: u64, len: u64) -> Rule {
        let (first, end) = (volume.base + at, volume.base + at + len);
        let mut lines = (first / LINE..end.div_ceil(LINE)).map(LineId);
        if lines.any(World::is_never) { Rule::Never } else { Rule::ByPolicy }
    }

    fn kind(&self, _: &Stretch, _: u64, _: u64) -> BlockKind {
        assert!(!self.judging.get(), "what bytes hold is asked under admission's lock");
        BlockKind::Unknown
    }

    fn admission<R>(&self, _: &Stretch, f: impl FnOnce(&mut Dealt) -> R) -> R {
        let mut dealt = Dealt { verdict: self.verdict, refused: Vec::new() };
        self.judging.set(true);
        let result = f(&mut dealt);
        self.judging.set(false);
        dealt.refused.into_iter().for_each(|reason| self.waiting.borrow_mut().refuse(reason));
        result
    }

    fn refused(&self, _: &Stretch, reason: Reason) {
        self.waiting.borrow_mut().refuse(reason);
    }

    fn pass(&self, _: &Stretch, _: u64, _: &Bytes) {}

    fn ended(&self, _: &Stretch, _: usize, _: Nanos, _: &Ended) {}
}

impl Accounts for Now<'_> {
    fn dropped(&self, line: LineId, lines: u64) {
        Accounts::dropped(&*self.shares, line, lines);
    }
}

impl Stores for Now<'_> {
    /// All volumes have one.
    fn store_of(&self, region: u32) -> Option<VolumeId> {
        let sectors = self.regions * PER_LINE;
        volume_at(self.volumes, sectors, u64::from(region) * sectors).map(|_| STORE)
    }

    fn stores(&self) -> Vec<VolumeId> {
        vec![STORE]
    }
}

/// The world as the queue sees it now; in a macro, since the queue is the world's too.
macro_rules! now {
    ($world:expr, $if_free:expr, $verdict:expr) => {
        now!($world, $if_free, $verdict, $world.rng.fork(3))
    };
    ($world:expr, $if_free:expr, $verdict:expr, $coin:expr) => {{
        let coin = RefCell::new($coin);
        Now {
            shards: RefCell::new(&mut $world.shards),
            held: RefCell::new(&mut $world.held),
            waiting: RefCell::new(&mut $world.waiting),
            turns: RefCell::new(&mut $world.turns),
            purse: $world.purse.clone(),
            changes: &$world.flushing.changes,
            shares: $world.shares.clone(),
            coin,
            if_free: $if_free,
            enabled: $world.validity.enabled.get(),
            verdict: $verdict,
            judging: Cell::new(false),
            regions: $world.layout.region_groups * u64::from(GROUP_LINES),
            volumes: &$world.volumes,
        }
    }};
}

impl World {
    /// The queue is told something. If fills that begin then may have free slots only (`if_free`), nothing goes for them.
    pub(super) fn tell(
        &mut self,
        if_free: bool,
        verdict: Verdict,
        f: impl FnOnce(&mut Queue<Model>, &Now<'_>, Nanos, &mut Carried),
    ) {
        let sum = |world: &World| {
            let stats = world.shards.iter().map(|s| s.stats());
            let (mut refused, mut evicted) = (0, 0);
            stats.for_each(|s| {
                (refused, evicted) = (refused + s.fill_rejected, evicted + s.evicted)
            });
            (refused, evicted, world.waiting.out.fills.len() as u64)
        };
        let (before, now, mut carried) = (sum(self), self.now(), Carried::default());
        f(&mut self.queue, &now!(self, if_free, verdict), now, &mut carried);
        if if_free {
            let after = sum(self);
            self.seen.free_refused += after.0 - before.0;
            self.seen.free_fills += after.2 - before.2;
            if self.layout.segment == 0 && after.1 != before.1 {
                self.fail("for lines that may have free slots only others are evicted".into());
            }
        }
        self.carry(carried);
        self.go_on();
    }

    /// The shards as maintenance has them at a node, to look at them and to take from them: they ask nobody for anything.
    pub(super) fn look<R>(&mut self, f: impl FnOnce(&mut AtNode<'_, Model, Now<'_>>) -> R) -> R {
        f(&mut AtNode::new(&now!(self, false, Verdict::Admit, Rng::new(0)), SHARDS))
    }

    /// The same, to tell them something.
    pub(super) fn at_node(&mut self, f: impl FnOnce(&mut AtNode<'_, Model, Now<'_>>)) {
        f(&mut AtNode::new(&now!(self, false, Verdict::Admit), SHARDS));
        self.leave_to_maintenance();
        self.go_on();
    }

    /// I/O of maintenance has ended so.
    pub(super) fn flash_ended(&mut self, now: Nanos, ended: Result<(), FlashError>) {
        AtNode::new(&now!(self, false, Verdict::Admit), SHARDS).flash_ended(now, ended);
        self.leave_to_maintenance();
    }

    /// An operator's operation calls the shards. Returns what it asks for.
    pub(super) fn ask_of(&mut self, operation: &mut Operation) -> Ask {
        let (now, mut out) = (self.now(), Out::default());
        let ask = operation.next(&now!(self, false, Verdict::Admit), now, &mut out);
        self.leave_to_maintenance();
        self.go_on();
        ask
    }

    /// An operator's operation lets go of its lines, or of those that it waits for.
    pub(super) fn give_up_lines(&mut self, operation: &mut Operation) {
        let (now, mut out) = (self.now(), Out::default());
        operation.give_up(&now!(self, false, Verdict::Admit), now, &mut out);
        if self.shards.iter().any(|shard| shard.has_range(operation.id())) {
            self.fail(format!("{:?} was given up, and lines are locked for it", operation.id()));
        }
        self.leave_to_maintenance();
        self.go_on();
    }

    /// The queue looks into its mailbox, or is busy elsewhere.
    pub(super) fn go_on(&mut self) {
        // When the power has failed nothing goes on.
        while !self.device.borrow().blown && (self.draining || self.rng.chance(0.9)) {
            let (now, mut carried) = (self.now(), Carried::default());
            let node = now!(self, false, Verdict::Admit);
            self.queue.take_mail(&node);
            if !self.queue.turn(&node, now, &mut carried) {
                break;
            }
            self.carry(carried);
        }
    }

    fn carry(&mut self, Carried(said): Carried) {
        for said in said {
            match said {
                Said::Io(event) => self.begin_io(event),
                Said::Deliver(op, at, bytes) => self.deliver(op, at, &bytes),
                Said::Answer(op, failed) => self.finish_op(op, failed),
            }
        }
        self.leave_to_maintenance();
    }

    /// What shards leave for maintenance.
    fn leave_to_maintenance(&mut self) {
        let Out { fills, copies, asks, loads, commit, .. } = std::mem::take(&mut self.waiting.out);
        self.work.fills.extend(fills);
        self.work.copies.extend(copies);
        self.work.loads.extend(loads);
        self.work.asks.extend(asks);
        self.work.ranges.append(&mut self.waiting.ranges);
        self.seen.unpaid += self.waiting.budget.len() as u64;
        self.work.budget.append(&mut self.waiting.budget);
        self.work.commit |= commit;
        if let Some(why) = self.waiting.give_up.take() {
            self.work.give_up.get_or_insert(why);
        }
        self.begin_fills();
        let (budget, space) = std::mem::take(&mut self.waiting.refused);
        self.seen.over_budget += budget;
        self.seen.no_space += space;
        let mail = std::mem::take(&mut self.waiting.mail[OPERATOR]);
        let given = mail.into_iter().filter(|(_, m)| matches!(m, Message::Done { .. }));
        given.collect::<Vec<_>>().into_iter().for_each(|(op, _)| self.lines_given(op));
    }
}

/// An operator's number for a range.
pub(super) fn operators(op: OpId) -> OpId {
    OpId((OPERATOR as u64) << larder_engine::block::node::calls::OP_BITS | op.0)
}
