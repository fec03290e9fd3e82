//! What a client's operation goes through: one queue a thread, which owns everything and locks nothing.
//!
//! A read or write is cut into parts ([`cut`](super::cut)); rules, no-space pause, budget and admission say what of it may come
//! to flash ([`limits`](super::limits)); the shards are called part by part. What they ask of the store for one operation becomes one request
//! where it lies side by side ([`coalesce`](super::coalesce)); a stream of reads that misses is read ahead of
//! ([`readahead`]). A zeroing or trim of a large range takes its lines as a whole ([`ranged`](super::ranged)). What lies behind
//! the last whole line of a volume is a part like any other, but never cached. A flush and a status pass the queue too, and go
//! straight to the store. All of that holds when the cache is given up as well.
//!
//! A queue is called with each event, and then [`Queue::turn`] with what has piled up. When that is done, and how many requests
//! are submitted or answers sent together, is the host's choice.

mod ends;
mod logged;
mod node;
mod range;

use std::collections::{BTreeMap, VecDeque};

use larder_base::Nanos;
use larder_format::block::Layout;
use larder_policy::block::{BlockAccess, BlockKind, BlockOp, Rule, Verdict as PolicyVerdict};

use super::calls::{Fx, Load, Message, OP_BITS, Out, Shard, Told, call};
use super::coalesce::{Piece, Pieces};
use super::cut::cut;
use super::event::{
    Answer, Came, Effects, Host, JobId, Op, ShardIo, State, StoreOp, Submit, Volume, Why,
};
use super::limits::{Admits as _, Allows as _};
use super::ranged::{self, Discard, Progress};
use super::readahead::{self, ReadAhead, Streams};
use crate::block::address::Placing;
use crate::block::api::{GROUP_LINES, IoFailed, LineId, OpId, Part, PartKind, Sum, Verdict};
use crate::block::planted::{Fault, Planted};
use crate::block::writeback::log::Found;
use logged::{Destages, Epoch, LogJob, Parking};
pub use node::Node;
use node::{Judging, allowed};

/// What a queue is built from.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Bytes of a line.
    pub line_bytes: u32,
    /// How many shards there are.
    pub shards: u32,
    /// Groups of a region of the write-intent map.
    pub region_groups: u64,
    /// Which shard has which group.
    pub placing: Placing,
    /// How far streams of reads are read ahead of, bytes; 0: not at all.
    pub ahead: u64,
    /// A zeroing or trim of more groups than this has its range as a whole.
    pub range_groups: u64,
    /// Slots or groups of a range that are looked at in one turn at a shard.
    pub range_steps: u32,
    /// Where fewer groups of a shard may have lines of a range, the lines go at once.
    pub least_void: u64,
}

impl Config {
    /// Of a cache with this layout, whose streams are read ahead of so many bytes.
    pub fn new(layout: &Layout, placing: Placing, ahead: u64) -> Config {
        Config {
            line_bytes: layout.line,
            shards: layout.shards,
            region_groups: layout.region_groups,
            placing,
            ahead,
            range_groups: ranged::GROUPS,
            range_steps: ranged::STEP,
            least_void: ranged::LEAST_VOID,
        }
    }

    fn line(&self, at: u64) -> LineId {
        LineId(at / u64::from(self.line_bytes))
    }

    fn shard(&self, at: u64) -> u32 {
        self.placing.shard(self.line(at).group())
    }

    fn region(&self, line: LineId) -> u32 {
        (line.group().0 / self.region_groups) as u32
    }

    fn group_bytes(&self) -> u64 {
        u64::from(self.line_bytes) * u64::from(GROUP_LINES)
    }
}

/// What an operation is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One that shards are told of.
    Part(PartKind),
    Flush,
    Status {
        one: bool,
    },
}

/// An operation under way.
struct Operation<H: Host> {
    volume: H::Volume,
    /// `None`: no client waits for it, something is read ahead.
    ticket: Option<H::Ticket>,
    kind: Kind,
    /// First byte in the line space (in the volume, where it has no place there), and how many.
    at: u64,
    len: u64,
    bytes: Option<H::Bytes>,
    fua: bool,
    may_punch: bool,
    fast: bool,
    /// What it waits for.
    pending: u32,
    failure: Option<H::Failure>,
    extents: H::Extents,
    /// Of a change that has its range as a whole: how far it is.
    range: Option<Progress>,
    holds: BlockKind,
    began: Nanos,
    /// Shards are told of it, and its volume counts it.
    placed: bool,
    asked_store: bool,
    /// It is a change or a flush of a volume that writes back: the log has it.
    logged: bool,
    /// It brings dirty data to the store.
    destages: Option<Destages>,
    /// Of a status: what the log has of its range.
    dirty: Vec<(u64, u64, bool)>,
    /// Some of its bytes came with a read of the store, its own or another's, that it waited for.
    waited: bool,
    from_flash: u64,
    shared: u64,
}

/// A request to a store under way.
enum Job {
    /// An operation that shards are not told of, or the store's part of one that has its range as a whole.
    Whole(OpId),
    /// What shards have asked for.
    Pieces(OpId, Pieces),
}

/// Things under numbers that are used again.
struct Jobs {
    items: Vec<Option<Job>>,
    free: Vec<u32>,
}

impl Jobs {
    fn add(&mut self, job: Job) -> JobId {
        let at = self.free.pop().unwrap_or_else(|| {
            self.items.push(None);
            self.items.len() as u32 - 1
        });
        self.items[at as usize] = Some(job);
        JobId(at)
    }

    fn take(&mut self, job: JobId) -> Option<Job> {
        let item = self.items.get_mut(job.0 as usize)?.take();
        if item.is_some() {
            self.free.push(job.0);
        }
        item
    }
}

/// The operations of one thread. See the [module](self).
pub struct Queue<H: Host> {
    me: usize,
    config: Config,
    ops: BTreeMap<OpId, Operation<H>>,
    next_op: u64,
    jobs: Jobs,
    inbox: VecDeque<(OpId, Message<H::Bytes>)>,
    out: Out<H::Bytes>,
    streams: Streams,
    /// Requests for volumes that move.
    postponed: VecDeque<Submit<H>>,
    /// Writes of lines that could not be paid for: the budget's file is to say more first.
    unpaid: VecDeque<(OpId, Message<H::Bytes>)>,
    /// Answers that wait until what a store may have lost is out of the cache.
    untold: Vec<(H::Volume, u64, Answer<H>)>,
    /// Reads of the write log under way, under numbers that are used again.
    log_jobs: Vec<Option<LogJob>>,
    /// The log was given changes that it is to make a batch of when all that came at once have come.
    gathered: bool,
    /// By volume, what is copied out of the way in the log.
    parking: BTreeMap<u32, Parking<H::Bytes>>,
    /// By volume, what is read for its journal.
    epochs: BTreeMap<u32, Epoch<H::Bytes>>,
    /// Used again by each operation.
    parts: Vec<(u64, u32)>,
    verdicts: Vec<Verdict>,
    kinds: Vec<BlockKind>,
    fault: Fault,
}

impl<H: Host> Queue<H> {
    /// The queue of thread `me`.
    pub fn new(me: usize, config: Config) -> Queue<H> {
        Queue {
            me,
            config,
            ops: BTreeMap::new(),
            next_op: 0,
            jobs: Jobs { items: Vec::new(), free: Vec::new() },
            inbox: VecDeque::new(),
            out: Out::default(),
            streams: Streams::new(config.ahead, config.group_bytes()),
            postponed: VecDeque::new(),
            unpaid: VecDeque::new(),
            untold: Vec::new(),
            log_jobs: Vec::new(),
            gathered: false,
            parking: BTreeMap::new(),
            epochs: BTreeMap::new(),
            parts: Vec::new(),
            verdicts: Vec::new(),
            kinds: Vec::new(),
            fault: Fault::default(),
        }
    }

    /// The same where reads of `least` bytes, one after the other, are a stream: for volumes that are small.
    #[must_use]
    pub fn with_least(mut self, least: u64) -> Queue<H> {
        self.streams = Streams::new(self.config.ahead, self.config.group_bytes()).with_least(least);
        self
    }

    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Planted) {
        self.streams.plant(fault);
        self.fault = Fault::of(Some(fault));
    }

    /// Operations that have begun and not ended: clients', and what is read ahead.
    pub fn under_way(&self) -> usize {
        self.ops.len()
    }

    /// What it was built from: its thread, and from how many bytes on reads are a stream.
    pub(in crate::block) fn built_from(&self) -> (usize, Config, u64) {
        (self.me, self.config, self.streams.least())
    }

    /// Whether operations wait for volumes that move, writes for the budget, or answers for lines to go.
    pub(in crate::block) fn has_put_off(&self) -> bool {
        !self.postponed.is_empty() || !self.unpaid.is_empty() || !self.untold.is_empty()
    }

    /// Whether no operation waits, has begun or is to be told of.
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && !self.has_put_off() && self.inbox.is_empty()
    }

    /// Whether [`Queue::turn`] has nothing to do.
    pub fn is_settled(&self) -> bool {
        self.inbox.is_empty() && !self.gathered
    }

    // ---- what comes ----

    /// A client asks for something.
    pub fn submit<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        submit: Submit<H>,
    ) {
        let Submit { volume, ticket, op, holds } = submit;
        let state = node.state(&volume);
        let why = match state {
            State::Detached => Some(Why::Detached),
            State::Lost => Some(Why::Lost),
            State::Served | State::Unplaced => None,
        };
        if let Some(why) = why {
            let bytes = match op {
                Op::Write { bytes, .. } => Some(bytes),
                _ => None,
            };
            let outcome = Err(H::failure(why));
            return fx.answer(Answer { ticket, outcome, bytes, losses: None, ended: None });
        }
        // Where it lies in the line space is what it is done by.
        let mut placed = state == State::Served && !matches!(op, Op::Flush | Op::Status { .. });
        // A flush of the log is of a volume that stays with it.
        placed |= matches!(op, Op::Flush) && node.attachment(&volume).is_some();
        if placed && !node.enter(&volume) {
            return self.postponed.push_back(Submit { volume, ticket, op, holds });
        }
        let base = if placed { node.base(&volume) } else { 0 };
        let mut operation = self.operation(volume, Some(ticket), holds, now, placed);
        operation.at = base;
        let place = |at: u64| base.wrapping_add(at);
        let o = &mut operation;
        match op {
            Op::Read { at, len } => {
                (o.kind, o.at, o.len) = (Kind::Part(PartKind::Read), place(at), len);
            }
            Op::Write { at, len, bytes, fua } => {
                (o.kind, o.at, o.len) = (Kind::Part(PartKind::Write), place(at), len);
                (o.bytes, o.fua) = (Some(bytes), fua);
            }
            Op::Zero { at, len, fua, may_punch, fast } => {
                (o.kind, o.at, o.len) = (Kind::Part(PartKind::Zero), place(at), len);
                (o.fua, o.may_punch, o.fast) = (fua, may_punch, fast);
            }
            Op::Trim { at, len, fua } => {
                (o.kind, o.at, o.len) = (Kind::Part(PartKind::Trim), place(at), len);
                o.fua = fua;
            }
            Op::Advise { at, len } => {
                let len = len.min(readahead::MOST_ADVICE);
                (o.kind, o.at, o.len) = (Kind::Part(PartKind::Prefetch), place(at), len);
            }
            Op::Status { at, len, one } => {
                (o.kind, o.at, o.len) = (Kind::Status { one }, place(at), len);
            }
            Op::Flush => {}
        }
        let attachment = node.attachment(&operation.volume);
        match (attachment, operation.kind) {
            (Some(attachment), Kind::Part(kind)) if kind.changes() && placed => {
                self.begin_logged(node, now, fx, attachment, operation);
            }
            (Some(attachment), Kind::Flush) => {
                self.flush_logged(node, now, fx, attachment, operation);
            }
            (Some(attachment), Kind::Status { .. }) => {
                let range = operation.at..operation.at + operation.len;
                let dirty = node.log(|log| log.dirty(attachment, range));
                operation.dirty = dirty.unwrap_or_default();
                if self.fault.is(Planted::DirtyCalledHole) {
                    operation.dirty.clear();
                }
                self.straight(node, now, fx, operation);
            }
            (_, Kind::Part(_)) if placed => self.begin(node, now, fx, operation, Verdict::Admit),
            _ => self.straight(node, now, fx, operation),
        }
    }

    /// An operation of which nothing was said yet but on which volume it is, and for whom.
    fn operation(
        &self,
        volume: H::Volume,
        ticket: Option<H::Ticket>,
        holds: BlockKind,
        began: Nanos,
        placed: bool,
    ) -> Operation<H> {
        Operation {
            volume,
            ticket,
            kind: Kind::Flush,
            at: 0,
            len: 0,
            bytes: None,
            fua: false,
            may_punch: false,
            fast: false,
            pending: 0,
            failure: None,
            extents: H::Extents::default(),
            range: None,
            holds,
            began,
            placed,
            asked_store: false,
            logged: false,
            destages: None,
            dirty: Vec::new(),
            waited: false,
            from_flash: 0,
            shared: 0,
        }
    }

    fn next_id(&mut self) -> OpId {
        let id = OpId((self.me as u64) << OP_BITS | self.next_op);
        self.next_op = (self.next_op + 1) & ((1 << OP_BITS) - 1);
        id
    }

    /// An operation that shards are not told of goes to the store as it is.
    fn straight<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        mut op: Operation<H>,
    ) {
        if op.kind == Kind::Part(PartKind::Prefetch) {
            // There is nothing to bring it into.
            return self.finish(node, now, fx, op);
        }
        let id = self.next_id();
        op.pending = 1;
        let (at, len) = (op.at, op.len);
        self.ops.insert(id, op);
        self.ask_store(node, fx, id, Job::Whole(id), (at, len));
    }

    /// Begins an operation by parts. `advice` is what holds for one that is read ahead.
    fn begin<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        mut op: Operation<H>,
        advice: Verdict,
    ) {
        let Kind::Part(kind) = op.kind else { return };
        let id = self.next_id();
        let (at, end) = (op.at, op.at + op.len);
        let (base, mut whole) = (node.base(&op.volume), node.whole(&op.volume));
        if op.ticket.is_none() && self.streams.ignores_end() {
            whole = u64::MAX;
        }
        if kind.changes() {
            let regions = self.region_of(at)..=self.region_of(at + op.len.max(1) - 1);
            node.changing(now, regions);
        }
        if let Some(bytes) = op.bytes.as_ref().filter(|_| op.destages.is_none()) {
            node.pass(&op.volume, at.wrapping_sub(base), bytes);
        }
        if kind.changes()
            && kind != PartKind::Write
            && op.len.div_ceil(self.config.group_bytes()) > self.config.range_groups
        {
            return self.begin_range(node, now, id, op);
        }
        let line = u64::from(self.config.line_bytes);
        let mut parts = std::mem::take(&mut self.parts);
        let mut verdicts = std::mem::take(&mut self.verdicts);
        parts.clear();
        verdicts.clear();
        let volume = &op.volume;
        let rule = |at: u64| node.rule(volume, at.wrapping_sub(base), line);
        let rule = node.selects(volume).then_some(rule);
        // What the log has of a read does not come from below.
        let from = at.wrapping_sub(base);
        let found = match node.attachment(volume) {
            Some(attachment) if kind == PartKind::Read => {
                Self::look(node, attachment, from, op.len)
            }
            _ => None,
        };
        // Of a tail the log may have something in the middle: then there are two.
        let mut tails = Vec::new();
        match &found {
            None => tails.extend(cut((at, end), whole, line, rule, &mut parts)),
            Some(found) => {
                for found in found {
                    let Found::Clean(from, len) = *found else { continue };
                    let from = base.wrapping_add(from);
                    let rule = rule.as_ref();
                    tails.extend(cut((from, from + len), whole, line, rule, &mut parts));
                }
            }
        }
        let mut of_ahead = Verdict::Reject;
        match kind {
            PartKind::Write if op.destages.is_some() && advice == Verdict::Reject => {
                let of = |&part: &(u64, u32)| Self::by_rule(node, now, volume, part);
                verdicts.extend(parts.iter().map(of));
            }
            PartKind::Read | PartKind::Write => {
                let mut kinds = std::mem::take(&mut self.kinds);
                let said = (&mut kinds, &mut verdicts);
                of_ahead = self.judge(node, now, &op, kind, &parts, said);
                self.kinds = kinds;
            }
            PartKind::Prefetch => {
                allowed(node).keep_advised(
                    now,
                    &mut parts,
                    |part| u64::from(part.1),
                    |part| match op.ticket.is_none() && self.streams.ignores_rule() {
                        true => Rule::ByPolicy,
                        false => node.rule(volume, part.0.wrapping_sub(base), u64::from(part.1)),
                    },
                    |reason| node.refused(volume, reason),
                );
                verdicts.resize(parts.len(), advice);
            }
            PartKind::Zero | PartKind::Trim => verdicts.resize(parts.len(), Verdict::Admit),
        }
        let ahead = match kind {
            PartKind::Read => self.streams.read(at, end - at, whole, of_ahead),
            _ => None,
        };
        if kind != PartKind::Prefetch {
            parts.append(&mut tails);
            verdicts.resize(parts.len(), Verdict::Reject);
        }
        // One stands for its beginning: it is not over before all parts are begun.
        let logged =
            found.iter().flatten().filter(|found| !matches!(found, Found::Clean(..))).count();
        op.pending = 1 + (parts.len() + logged) as u32;
        let mut bytes = op.bytes.clone();
        if op.destages.is_some() && self.fault.is(Planted::NewerRecordFilled) {
            bytes = self.newer(&op).or(bytes);
        }
        let volume = ahead.is_some().then(|| op.volume.clone());
        self.ops.insert(id, op);
        for (&(from, len), &verdict) in parts.iter().zip(&verdicts) {
            let part = Part { op: id, kind, at: from, len, verdict };
            self.call(node, self.config.shard(from), Told::Part(part), |s, fx| {
                if let Some(bytes) = &bytes {
                    fx.held.keep_payload(id, at, bytes);
                }
                s.submit(now, part, fx);
            });
        }
        (self.parts, self.verdicts) = (parts, verdicts);
        if let Some(found) = found {
            self.read_logged(node, now, fx, id, (from, found));
        }
        self.step(node, now, fx, id, None);
        if let (Some(volume), Some(ahead)) = (volume, ahead) {
            self.read_ahead(node, now, fx, &volume, ahead);
        }
    }

    fn region_of(&self, at: u64) -> u32 {
        self.config.region(self.config.line(at))
    }

    /// What admission and all that comes before it say of the parts of a read or write, and of what is read ahead of it.
    fn judge<N: Node<H>>(
        &self,
        node: &N,
        now: Nanos,
        op: &Operation<H>,
        kind: PartKind,
        parts: &[(u64, u32)],
        (kinds, out): (&mut Vec<BlockKind>, &mut Vec<Verdict>),
    ) -> Verdict {
        let (volume, base) = (&op.volume, node.base(&op.volume));
        let kind_of = |at, len| match op.holds {
            BlockKind::Unknown => node.kind(volume, at, len),
            stated => stated,
        };
        let offset = op.at.wrapping_sub(base);
        let access = BlockAccess {
            volume: node.id(volume),
            offset,
            bytes: op.len,
            op: if kind == PartKind::Read { BlockOp::Read } else { BlockOp::Write },
            kind: kind_of(offset, op.len),
            now,
        };
        // What bytes hold is asked before admission is locked: whoever looks into bytes that pass is not in its way.
        kinds.clear();
        if op.holds == BlockKind::Unknown && parts.len() > 1 {
            let of = |&(at, len): &(u64, u32)| kind_of(at.wrapping_sub(base), u64::from(len));
            kinds.extend(parts.iter().map(of));
        }
        let kind_at = |part: usize| kinds.get(part).copied().unwrap_or(access.kind);
        let parts = parts.iter().enumerate();
        let parts = parts.map(|(i, &(at, len))| (at.wrapping_sub(base), len, kind_at(i)));
        let rule = |at, len| node.rule(volume, at, len);
        let (limits, line_bytes) = (allowed(node), self.config.line_bytes);
        let asks = Judging { limits, access: &access, line_bytes, parts, rule, out };
        node.asks(volume, asks)
    }

    /// What is said of a part that is worth no place unless the operator has said so.
    fn by_rule<N: Node<H>>(
        node: &N,
        now: Nanos,
        volume: &H::Volume,
        (at, len): (u64, u32),
    ) -> Verdict {
        if !node.selects(volume) {
            return Verdict::Reject;
        }
        let len = u64::from(len);
        let rule = node.rule(volume, at.wrapping_sub(node.base(volume)), len);
        if rule != Rule::Always || allowed(node).refuses(rule, now, len).is_some() {
            return Verdict::Reject;
        }
        node.admission(volume, |admission| admission.count(PolicyVerdict::Admit));
        Verdict::Admit
    }

    /// Reads a stretch of the line space before anybody asks for it.
    fn read_ahead<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        volume: &H::Volume,
        mut ahead: ReadAhead,
    ) {
        let ReadAhead { from, to, verdict } = ahead;
        if !node.enter(volume) {
            return;
        }
        let base = node.base(volume);
        let offset = |at: u64| at.wrapping_sub(base);
        // The stream may be of before it moved.
        let ends = self.ends_at(node, volume);
        if offset(from) <= offset(to) && offset(to) <= offset(ends) {
            let line = u64::from(self.config.line_bytes);
            if node.selects(volume) {
                let rule = |at: u64| node.rule(volume, offset(at), line);
                ahead.to = self.streams.same_rule((from, to), base, line, rule);
            }
            let rule = node.rule(volume, offset(from), line);
            while let Some((at, len)) =
                ahead.next(|bytes| allowed(node).refuses(rule, now, bytes).is_some())
            {
                if !node.enter(volume) {
                    break;
                }
                let mut op = self.operation(volume.clone(), None, BlockKind::Unknown, now, true);
                (op.kind, op.at, op.len) = (Kind::Part(PartKind::Prefetch), at, len);
                self.begin(node, now, fx, op, verdict);
            }
        }
        volume.leave();
    }

    /// Where what may be read ahead of a volume ends.
    fn ends_at<N: Node<H>>(&self, node: &N, volume: &H::Volume) -> u64 {
        if self.streams.ignores_end() {
            node.base(volume).wrapping_sub(1)
        } else {
            node.whole(volume)
        }
    }

    fn call<N: Node<H>>(
        &mut self,
        node: &N,
        shard: u32,
        told: Told,
        f: impl FnOnce(&mut N::Shard, &mut Fx<'_, H, N>),
    ) {
        node.telling(shard, told);
        call(node, shard, Some(self.me), &mut self.out, f);
        self.take_mail(node);
    }

    // ---- what it was told ----

    /// Takes what is in the mailbox.
    pub fn take_mail<N: Node<H>>(&mut self, node: &N) {
        node.drain(self.me, &mut self.inbox);
    }

    /// What has to be looked at now and then: operations on volumes that moved, answers that wait for lines to go.
    pub fn tick<N: Node<H>>(&mut self, node: &N, now: Nanos, fx: &mut impl Effects<H>) {
        for submit in std::mem::take(&mut self.postponed) {
            self.submit(node, now, fx, submit);
        }
        self.tell(node, fx);
    }

    /// Does what shards have asked for. Returns whether that was anything.
    pub fn turn<N: Node<H>>(&mut self, node: &N, now: Nanos, fx: &mut impl Effects<H>) -> bool {
        let any = !self.is_settled();
        loop {
            while let Some((id, message)) = self.inbox.pop_front() {
                self.handle(node, now, fx, id, message);
            }
            if !std::mem::take(&mut self.gathered) {
                return any;
            }
            self.log_gathered(node, now, fx);
        }
    }

    fn handle<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        id: OpId,
        message: Message<H::Bytes>,
    ) {
        match message {
            Message::Deliver { at, len, bytes, came } => {
                let Some(op) = self.ops.get_mut(&id) else { return };
                let len = u64::from(len);
                match came {
                    Came::Flash => op.from_flash += len,
                    Came::AtHand | Came::Store { own: false } => op.shared += len,
                    Came::Store { own: true } => {}
                }
                if let Came::Store { .. } = came {
                    op.waited = true;
                } else {
                    // A detector sees what comes from the cache too: after a restart, nothing else may pass by for a long time.
                    node.pass(&op.volume, at.wrapping_sub(node.base(&op.volume)), &bytes);
                }
                if let Some(ticket) = &mut op.ticket {
                    fx.deliver(ticket, at.wrapping_sub(op.at), bytes);
                }
            }
            Message::Done { failed } => {
                if self.ops.get(&id).is_some_and(|op| op.range.is_some()) {
                    return self.range_given(node, now, fx, id);
                }
                self.step(node, now, fx, id, failed.then(|| H::failure(Why::Failed)));
            }
            Message::Logged { failed } => {
                self.step(node, now, fx, id, failed.then(|| H::failure(Why::Failed)));
            }
            Message::Destage(attachment) => self.destage(node, now, fx, attachment),
            Message::Journal { attachment, flushed, done } => {
                self.journal_ended(node, now, fx, (attachment, flushed), done);
            }
            Message::Marked { attachment, done } => {
                self.destager(node, now, fx, attachment, |log, out, asks| {
                    log.marked(now, attachment, done, out, asks);
                });
            }
            Message::Through { kind, at, len, bytes, may_punch } => {
                self.through(node, now, fx, id, (kind, at, len), bytes, may_punch);
            }
            Message::FlushThrough => self.flush_through(node, now, fx, id),
            Message::ForDevice(asked) => self.for_device(node, now, fx, *asked),
            Message::IntentsReady => self.range_ready(node, now, fx, id),
            Message::RangeTurn => self.range_turn(node, now, id),
            Message::FlashRead { io, slot, line, lines } => fx.flash_read(io, slot, line, lines),
            Message::FlashWrite { .. } | Message::Merge { .. } => {
                // They leave in the order in which they came.
                if !self.unpaid.is_empty() {
                    self.unpaid.push_back((id, message));
                } else if let Err(message) = self.write_flash(node, now, fx, message) {
                    self.unpaid.push_back((id, message));
                    node.ask_budget(id);
                }
            }
            Message::BudgetKept => self.pay(node, now, fx),
            Message::Load(Load { shard, io, page }) => fx.load(ShardIo { shard, io }, page),
            Message::BackingRead(first) => {
                let pieces = Pieces::gather(id, first, true, &mut self.inbox, Message::waiting);
                let Some(op) = self.ops.get_mut(&id) else {
                    return self.fetched(node, now, id, &pieces, None);
                };
                op.asked_store = true;
                let reader =
                    (op.kind == Kind::Part(PartKind::Read)).then(|| (op.at, op.volume.clone()));
                let range = (pieces.at(), u64::from(pieces.len()));
                self.read_store(node, fx, id, Job::Pieces(id, pieces), range);
                let Some((at, volume)) = reader else { return };
                if let Some(ahead) = self.streams.missed(at, node.whole(&volume)) {
                    self.read_ahead(node, now, fx, &volume, ahead);
                }
            }
            Message::BackingChange(first) => {
                let pieces = Pieces::gather(id, first, false, &mut self.inbox, Message::waiting);
                if !self.ops.contains_key(&id) {
                    return self.changed(node, now, &pieces, Err(IoFailed));
                }
                let range = (pieces.at(), u64::from(pieces.len()));
                self.ask_store(node, fx, id, Job::Pieces(id, pieces), range);
            }
        }
    }

    // ---- what is written to flash ----

    /// Lines leave for flash, if they can be paid for; else what asks for it comes back.
    fn write_flash<N: Node<H>>(
        &self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        message: Message<H::Bytes>,
    ) -> Result<(), Message<H::Bytes>> {
        let lines = match message {
            Message::FlashWrite { lines, .. } => lines,
            _ => u32::from(!self.fault.is(Planted::MergeNotCharged)),
        };
        let bytes = u64::from(lines) * u64::from(self.config.line_bytes);
        if bytes > 0 && !node.pay(now, bytes) {
            if !self.fault.is(Planted::WriteNotAwaited) {
                return Err(message);
            }
            let _ = node.limits().charge(now, bytes);
        }
        match message {
            Message::FlashWrite { io, slot, lines, bytes } => {
                fx.flash_write(io, slot, lines, bytes)
            }
            Message::Merge { io, merge, bytes } => fx.merge(io, merge, bytes),
            _ => {}
        }
        Ok(())
    }

    /// The budget's file was seen to: writes that wait for it go on, as far as it goes.
    fn pay<N: Node<H>>(&mut self, node: &N, now: Nanos, fx: &mut impl Effects<H>) {
        while let Some((id, message)) = self.unpaid.pop_front() {
            if let Err(message) = self.write_flash(node, now, fx, message) {
                self.unpaid.push_front((id, message));
                return node.ask_budget(id);
            }
        }
    }

    // ---- the store ----

    /// Bytes `at..at + len` (in the line space, if it has a place there) are read from the store on behalf of `id`.
    fn read_store<N: Node<H>>(
        &mut self,
        node: &N,
        fx: &mut impl Effects<H>,
        id: OpId,
        job: Job,
        (at, len): (u64, u64),
    ) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        let base = if op.placed { node.base(&op.volume) } else { 0 };
        let job = self.jobs.add(job);
        let ahead = op.ticket.is_none();
        fx.store_read(job, &op.volume, at.wrapping_sub(base), len as u32, ahead);
    }

    /// The store is asked for what `id` does, of the same bytes.
    fn ask_store<N: Node<H>>(
        &mut self,
        node: &N,
        fx: &mut impl Effects<H>,
        id: OpId,
        job: Job,
        (at, len): (u64, u64),
    ) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        op.asked_store = true;
        let from = at.wrapping_sub(op.at);
        let at = at.wrapping_sub(if op.placed { node.base(&op.volume) } else { 0 });
        let (fua, may_punch, fast) = (op.fua, op.may_punch, op.fast);
        let change = match (op.kind, &op.bytes) {
            (Kind::Part(PartKind::Write), Some(bytes)) => {
                StoreOp::Write { at, len, bytes: H::part(bytes, from, len), fua }
            }
            (Kind::Part(PartKind::Zero), _) => StoreOp::Zero { at, len, fua, may_punch, fast },
            (Kind::Part(PartKind::Trim), _) => StoreOp::Trim { at, len, fua },
            (Kind::Status { one }, _) => StoreOp::Status { at, len, one },
            (Kind::Flush, _) => StoreOp::Flush,
            (Kind::Part(_), _) => {
                let job = self.jobs.add(job);
                return fx.store_read(job, &op.volume, at, len as u32, false);
            }
        };
        let job = self.jobs.add(job);
        fx.store_change(job, &op.volume, change);
    }

    /// What the store was asked to read has come, or not.
    fn fetched<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        id: OpId,
        pieces: &Pieces,
        bytes: Option<H::Bytes>,
    ) {
        for Piece { shard, io, at, len } in pieces.iter() {
            let bytes =
                bytes.as_ref().map(|whole| H::apart(whole, at - pieces.at(), u64::from(len)));
            self.call(node, shard, Told::StoreRead(io, bytes.is_some()), |s, fx| match bytes {
                Some(bytes) => {
                    fx.held.keep_fetched(io, at, bytes);
                    fx.held.hears_of(Some((io, id)));
                    s.backing_read(now, io, Ok(()), fx);
                    fx.held.hears_of(None);
                }
                None => s.backing_read(now, io, Err(IoFailed), fx),
            });
        }
    }

    /// What the store was asked to change is changed, or not.
    fn changed<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        pieces: &Pieces,
        result: Result<(), IoFailed>,
    ) {
        for Piece { shard, io, .. } in pieces.iter() {
            let told = Told::StoreChanged(io, result.is_ok());
            self.call(node, shard, told, |s, fx| s.backing_changed(now, io, result, fx));
        }
    }
}

impl<H: Host> Drop for Queue<H> {
    fn drop(&mut self) {
        self.ops.values().filter(|op| op.placed).for_each(|op| op.volume.leave());
    }
}
