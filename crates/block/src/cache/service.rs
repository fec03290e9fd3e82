//! A worker's requests, by way of the engine.

mod bytes;
mod client_op;
mod held;
mod ranged;
mod submit;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use larder_engine::block::node::coalesce::{Piece, Pieces};
use larder_engine::block::node::cut::cut;
use larder_engine::block::node::ranged::{Progress, is_whole};
use larder_engine::block::node::readahead::{ReadAhead, Streams};
use larder_engine::block::{
    GROUP_LINES, IoFailed, IoId, LineId, Merge, OpId, Part, PartKind, Verdict,
};
use larder_format::PAGE_SIZE;
use larder_policy::block::{BlockKind, BlockOp};
use larder_runtime::{AlignedBuf, FileDone, FileOp, FileQueue, Payload, RingChoice};
use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};

use bytes::copy;
pub(super) use bytes::{aligned, crcs};
use client_op::ClientOp;
use submit::Postponed;

use super::attached::{Inside, count};
use super::cell::{Load, Message, Out};
use super::spare::Spare;
use super::{Attached, Cache, OP_BITS, locked};
use crate::backing::{Session, TOKENS};
use crate::nbd::server::Command;
use crate::op::{Done, Failure, FailureKind, Op};
use crate::server::Volume;
use crate::server::service::{Answer, Lingering, Service};

/// Depth of a worker's queue on the cache device.
const DEPTH: u32 = 256;
/// Threads of that queue where io_uring cannot be had.
const THREADS: u32 = 8;
/// The ticket of what no client waits for.
const NOBODY: u64 = u64::MAX;
/// Pieces of a read from the store share its buffer up to this length, bytes: beyond, each has its own.
const SHARED: u32 = 256 << 10;
/// Replies to reads of this length and longer are lent, not copied together, where they may be.
const LENT: u64 = 32 << 10;

/// A volume and this worker's way to its store.
struct Known {
    /// Kept, so that its place in memory is nobody else's.
    volume: Arc<Volume>,
    session: usize,
    attached: Option<Arc<Attached>>,
}

/// An operation of a store under way.
enum BackingJob {
    /// A request that goes straight through.
    Ticket {
        known: usize,
        ticket: u64,
    },
    /// A piece of an operation that is not the engine's: a range.
    Piece {
        op: OpId,
        at: u64,
    },
    Fetch {
        op: OpId,
        pieces: Pieces,
    },
    Change {
        op: OpId,
        pieces: Pieces,
    },
}

/// An operation of the cache device under way.
enum FlashJob {
    Read {
        shard: u32,
        io: IoId,
        line: LineId,
    },
    Write {
        shard: u32,
        io: IoId,
        bytes: Payload,
    },
    /// A page of the table.
    Load(Load),
    /// A line is read, so that bytes are laid over it; then it is written, with the checksums before and after.
    MergeRead {
        shard: u32,
        io: IoId,
        merge: Merge,
        bytes: Payload,
    },
    MergeWrite {
        shard: u32,
        io: IoId,
        sums: (u32, u32),
    },
}

/// Things under numbers that are used again.
struct Jobs<T> {
    items: Vec<Option<T>>,
    free: Vec<usize>,
}

impl<T> Jobs<T> {
    fn new() -> Jobs<T> {
        Jobs { items: Vec::new(), free: Vec::new() }
    }

    fn add(&mut self, item: T) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            self.items.push(None);
            self.items.len() - 1
        });
        self.items[at] = Some(item);
        at as u64
    }

    fn take(&mut self, at: u64) -> Option<T> {
        let item = self.items.get_mut(at as usize)?.take();
        if item.is_some() {
            self.free.push(at as usize);
        }
        item
    }
}

/// One worker's requests through the cache.
pub struct Cached {
    cache: Arc<Cache>,
    me: usize,
    registry: Registry,
    first_token: usize,
    flash: FileQueue,
    sessions: Vec<Option<Box<dyn Session>>>,
    known: Vec<Option<Known>>,
    by_volume: BTreeMap<usize, usize>,
    ops: BTreeMap<OpId, ClientOp>,
    next_op: u64,
    backing_jobs: Jobs<BackingJob>,
    flash_jobs: Jobs<FlashJob>,
    inbox: VecDeque<(OpId, Message)>,
    out: Out,
    ended: VecDeque<Answer>,
    /// See `held`.
    held: Vec<(Arc<Volume>, Answer)>,
    lingering: Lingering,
    spare: Spare,
    streams: Streams,
    verdicts: Vec<Verdict>,
    /// Detached volumes that were let go of so far.
    gone: u64,
    /// Whether reads may be answered with bytes that others have too.
    lends: bool,
    /// Requests for volumes that move.
    postponed: VecDeque<Postponed>,
}

impl Cached {
    /// The service of worker `me`; its descriptors are registered there, from that token on.
    ///
    /// # Errors
    /// When a ring or a descriptor cannot be had.
    pub fn new(
        cache: Arc<Cache>,
        me: usize,
        registry: Registry,
        first_token: usize,
        choice: RingChoice,
    ) -> io::Result<Cached> {
        let flash = FileQueue::open(choice, DEPTH, THREADS).map_err(io::Error::other)?;
        let watch = |fd: i32, token: usize| {
            registry.register(&mut SourceFd(&fd), Token(token), Interest::READABLE)
        };
        watch(flash.as_raw_fd(), first_token)?;
        watch(cache.doors[me].event.as_raw_fd(), first_token + 1)?;
        let streams =
            Streams::new(cache.config.readahead.0, u64::from(cache.line_bytes() * GROUP_LINES));
        Ok(Cached {
            cache,
            me,
            registry,
            first_token,
            flash,
            sessions: Vec::new(),
            known: Vec::new(),
            by_volume: BTreeMap::new(),
            ops: BTreeMap::new(),
            next_op: 0,
            backing_jobs: Jobs::new(),
            flash_jobs: Jobs::new(),
            inbox: VecDeque::new(),
            out: Out::default(),
            ended: VecDeque::new(),
            held: Vec::new(),
            lingering: Lingering::default(),
            spare: Spare::default(),
            streams,
            verdicts: Vec::new(),
            gone: 0,
            lends: false,
            postponed: VecDeque::new(),
        })
    }

    /// The volume as this worker knows it; its session is opened when it is first wanted.
    fn known(&mut self, volume: &Arc<Volume>) -> Result<usize, Failure> {
        let key = Arc::as_ptr(volume) as usize;
        if let Some(&at) = self.by_volume.get(&key) {
            return Ok(at);
        }
        let failure = |text: String| Failure::new(FailureKind::Failed, text);
        let mut session = volume.backing().session().map_err(|e| failure(e.to_string()))?;
        let index = self.sessions.iter().position(Option::is_none).unwrap_or(self.sessions.len());
        session
            .attach(&self.registry, self.first_token + 2 + index * TOKENS)
            .map_err(|e| failure(format!("a session's descriptor: {e}")))?;
        if index == self.sessions.len() {
            self.sessions.push(None);
        }
        self.sessions[index] = Some(session);
        // Another volume may have its name by now.
        let attached = self.cache.volume(volume.name()).filter(|a| Arc::ptr_eq(a.volume(), volume));
        let known = Known { volume: volume.clone(), session: index, attached };
        let at = self.known.iter().position(Option::is_none).unwrap_or(self.known.len());
        if at == self.known.len() {
            self.known.push(None);
        }
        self.known[at] = Some(known);
        self.by_volume.insert(key, at);
        Ok(at)
    }

    /// Lets go of volumes that were put aside, so that their stores can be closed.
    fn let_go(&mut self) {
        let gone = self.cache.governor.gone.load(Ordering::SeqCst);
        if gone == self.gone {
            return;
        }
        let mut all = true;
        for at in 0..self.known.len() {
            let Some(known) = self.known[at].as_ref().filter(|k| k.volume.is_closed()) else {
                continue;
            };
            let session = known.session;
            if self.sessions[session].as_ref().is_some_and(|s| s.in_flight() > 0) {
                all = false;
                continue;
            }
            if let Some(mut open) = self.sessions[session].take() {
                open.detach(&self.registry);
            }
            let key = Arc::as_ptr(&known.volume) as usize;
            self.by_volume.remove(&key);
            self.known[at] = None;
        }
        if all {
            self.gone = gone;
        }
    }

    fn attached(&self, known: usize) -> Option<&Arc<Attached>> {
        self.known[known].as_ref()?.attached.as_ref()
    }

    /// Asks the store of a volume. It is known as long as anything is under way for it.
    fn ask_store(&mut self, known: usize, job: BackingJob, op: Op) {
        let job = self.backing_jobs.add(job);
        if let Some(known) = &self.known[known]
            && let Some(session) = &mut self.sessions[known.session]
        {
            session.submit(job, op);
        }
    }

    fn through(&mut self, known: usize, ticket: u64, op: Op) {
        self.ask_store(known, BackingJob::Ticket { known, ticket }, op);
    }

    fn call(
        &mut self,
        shard: u32,
        f: impl FnOnce(&mut larder_engine::block::record::TapedShard, &mut super::cell::Fx<'_>),
    ) {
        let mut out = std::mem::take(&mut self.out);
        self.cache.with(shard, Some(self.me), &mut out, f);
        self.out = out;
        self.take_inbox();
    }

    /// Begins an operation on a volume that is cached.
    fn begin(&mut self, mut op: ClientOp) {
        let Some(attached) = self.attached(op.known).cloned() else { return };
        let id = OpId((self.me as u64) << OP_BITS | self.next_op);
        self.next_op = (self.next_op + 1) & ((1 << OP_BITS) - 1);
        let line_bytes = u64::from(self.cache.line_bytes());
        let group_bytes = line_bytes * u64::from(GROUP_LINES);
        let end = op.at + op.len;
        let cached_end = attached.base() + attached.cached_bytes();
        // The part that stands for its beginning: it is not over before all parts are begun.
        op.pending = 1;
        let (at, kind, payload, tag) = (op.at, op.kind, op.payload.clone(), op.tag);
        let advice = op.advice;
        if kind.changes() {
            self.cache.changing(at, op.len);
        }
        if let Some(payload) = &payload {
            attached.pass(at - attached.base(), payload);
        }
        let whole_range = kind.changes()
            && kind != PartKind::Write
            && is_whole(end.saturating_sub(at), group_bytes);
        if whole_range {
            let (first, last) = (LineId(at / line_bytes), LineId((end - 1) / line_bytes));
            op.range = Some(Progress::new(first, last, self.cache.layout.shards));
        }
        self.ops.insert(id, op);
        if whole_range {
            if locked(&self.cache.governor.ranges).enter(id) {
                self.lock_next(id);
            }
            return;
        }
        let mut parts: Vec<(u64, u32)> = Vec::with_capacity(1);
        let selected = attached.selected.load(Ordering::Relaxed);
        let rule = |at: u64| self.cache.governor.rule(&attached, at - attached.base(), line_bytes);
        let rule = selected.then_some(rule);
        let tail = cut((at, end), cached_end, line_bytes, rule, &mut parts);
        let mut verdicts = std::mem::take(&mut self.verdicts);
        verdicts.clear();
        let mut of_ahead = Verdict::Reject;
        match kind {
            PartKind::Read | PartKind::Write => {
                let what = if kind == PartKind::Read { BlockOp::Read } else { BlockOp::Write };
                of_ahead = self.cache.judge(
                    &attached,
                    what,
                    (at - attached.base(), end - at),
                    tag,
                    parts.iter().map(|p| (p.0 - attached.base(), p.1)),
                    &mut verdicts,
                );
            }
            PartKind::Prefetch => {
                let governor = &self.cache.governor;
                governor.limits.keep_advised(
                    self.cache.now(),
                    &mut parts,
                    |part| u64::from(part.1),
                    |part| governor.rule(&attached, part.0 - attached.base(), u64::from(part.1)),
                    |reason| attached.refused(reason, 1),
                );
                verdicts.resize(parts.len(), advice);
            }
            _ => verdicts.resize(parts.len(), Verdict::Admit),
        }
        let ahead = (kind == PartKind::Read)
            .then(|| {
                let volume_end = attached.base() + attached.cached_bytes();
                self.streams.read(at, end - at, volume_end, of_ahead)
            })
            .flatten();
        if let Some(tail) = tail.filter(|_| kind != PartKind::Prefetch) {
            parts.push(tail);
            verdicts.push(Verdict::Reject);
        }
        if let Some(op) = self.ops.get_mut(&id) {
            op.pending += parts.len() as u32;
        }
        let now = self.cache.now();
        for (&(from, len), &verdict) in parts.iter().zip(&verdicts) {
            let group = LineId(from / line_bytes).group();
            let shard = self.cache.placing.shard(group);
            let part = Part { op: id, kind, at: from, len, verdict };
            self.call(shard, |s, fx| {
                if let Some(payload) = &payload {
                    fx.tables.keep_payload(id, at, payload);
                }
                s.submit(now, part, fx);
            });
        }
        self.verdicts = verdicts;
        let known = self.ops.get(&id).map(|op| op.known);
        self.step(id, None);
        if let (Some(known), Some(ahead)) = (known, ahead) {
            self.read_ahead(known, ahead);
        }
    }

    /// The store was asked for a read at `at`.
    fn missed(&mut self, known: usize, at: u64) {
        let Some(end) = self.attached(known).map(|a| a.base() + a.cached_bytes()) else { return };
        if let Some(ahead) = self.streams.missed(at, end) {
            self.read_ahead(known, ahead);
        }
    }

    /// Reads a stretch of the line space before anybody asks for it.
    fn read_ahead(&mut self, known: usize, mut ahead: ReadAhead) {
        let ReadAhead { from, to, verdict } = ahead;
        let Some(attached) = self.attached(known) else { return };
        let Some(inside) = Inside::enter(attached) else { return };
        // The stream may be of before it moved.
        if from < attached.base() || to > attached.base() + attached.cached_bytes() {
            return;
        }
        let line = u64::from(self.cache.line_bytes());
        let rule = |at: u64| self.cache.governor.rule(attached, at - attached.base(), line);
        ahead.to = self.streams.same_rule((from, to), attached.base(), line, rule);
        let (attached, rule) = (attached.clone(), rule(from));
        let limits = &self.cache.clone().governor.limits;
        while let Some((at, len)) =
            ahead.next(|bytes| limits.refuses(rule, self.cache.now(), bytes).is_some())
        {
            let op = ClientOp::new(NOBODY, known, PartKind::Prefetch, at, len);
            let Some(of) = Inside::enter(&attached) else { break };
            self.begin(ClientOp { advice: verdict, _inside: Some(of), ..op });
        }
        drop(inside);
    }

    /// Bytes of an operation that are not the engine's go straight to the store.
    fn piece(&mut self, id: OpId, at: u64, len: u32) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        op.pending += 1;
        op.asked_store = true;
        let known = op.known;
        let Some(store_op) = self.store_op(id, None, at, len) else { return };
        self.ask_store(known, BackingJob::Piece { op: id, at }, store_op);
    }

    /// What the store is asked on behalf of `id`.
    fn store_op(&mut self, id: OpId, read: Option<()>, at: u64, len: u32) -> Option<Op> {
        let op = self.ops.get(&id)?;
        let base = self.attached(op.known)?.base();
        let offset = at - base;
        let (fua, may_punch, fast) = (op.fua, op.may_punch, op.fast);
        Some(match op.kind {
            _ if read.is_some() => Op::Read { offset, buf: self.spare.take(len as usize) },
            PartKind::Read | PartKind::Prefetch => {
                Op::Read { offset, buf: self.spare.take(len as usize) }
            }
            PartKind::Write => {
                let data = op.payload.as_ref()?.part((at - op.at) as usize, len as usize);
                Op::Write { offset, data, fua }
            }
            PartKind::Zero => Op::WriteZeroes { offset, len, fua, may_punch, fast },
            PartKind::Trim => Op::Trim { offset, len, fua },
        })
    }

    /// One thing that `id` waited for is over.
    fn step(&mut self, id: OpId, failure: Option<Failure>) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        if failure.is_some() && op.failure.is_none() {
            op.failure = failure;
        }
        op.pending -= 1;
        if op.pending > 0 {
            return;
        }
        let Some(op) = self.ops.remove(&id) else { return };
        if op.range.is_some() {
            self.next_range(id);
        }
        if op.ticket == NOBODY {
            if !op.asked_store {
                self.streams.was_there(op.at);
            }
            return;
        }
        self.count(&op);
        let mut op = op;
        let lent = op.take_lent();
        let outcome = op.failure.map_or(Ok(Vec::new()), Err);
        // A write's bytes may still be the source of a fill: then the buffer comes back later, or not at all.
        let buf = match (op.buf, op.payload) {
            (Some(buf), _) => Some(buf),
            (None, Some(payload)) => self.lingering.payload(payload),
            (None, None) => None,
        };
        let answer = Answer { lent, ..Answer::new(op.ticket, outcome, buf) };
        self.give(op.known, op.fua, answer);
    }

    fn count(&self, op: &ClientOp) {
        let Some(attached) = self.attached(op.known) else { return };
        let counters = &attached.counters;
        let nanos = op.begun.elapsed().as_nanos() as u64;
        let governor = &self.cache.governor;
        count(&counters.failed, u64::from(op.failure.is_some()));
        match op.kind {
            PartKind::Read => {
                let hit = op.is_hit();
                count(&counters.reads, 1);
                count(&counters.read_bytes, op.len);
                count(&counters.read_hits, u64::from(hit));
                let holds = match op.tag {
                    BlockKind::Unknown => attached.classify(op.at - attached.base(), op.len),
                    tag => tag,
                };
                if holds == BlockKind::Metadata {
                    count(&counters.metadata_reads, 1);
                    count(&counters.metadata_hits, u64::from(hit));
                }
                governor.record(self.me, |l| {
                    if hit { l.hit.record(nanos) } else { l.miss.record(nanos) }
                });
            }
            PartKind::Write | PartKind::Zero | PartKind::Trim => {
                count(&counters.writes, 1);
                if op.kind == PartKind::Write {
                    count(&counters.write_bytes, op.len);
                }
                governor.record(self.me, |l| l.write.record(nanos));
            }
            PartKind::Prefetch => {}
        }
    }

    // ---- messages and completions ----

    fn handle(&mut self, id: OpId, message: Message) {
        match message {
            Message::Deliver { at, bytes, waited } => {
                if !waited {
                    self.show_hit(id, at, &bytes);
                }
                if let Some(op) = self.ops.get_mut(&id) {
                    op.waited_for_store |= waited;
                    if self.lends && op.len >= LENT {
                        op.lent.push((at, bytes));
                    } else {
                        op.copy(at, &bytes);
                    }
                }
            }
            Message::Done { failed } => {
                if self.ops.get(&id).is_some_and(|op| op.range.is_some()) {
                    return self.range_part_done(id);
                }
                let failure =
                    failed.then(|| Failure::new(FailureKind::Failed, "the backing store failed"));
                self.step(id, failure);
            }
            Message::IntentsReady => self.range_ready(id),
            Message::RangeTurn => match self.ops.contains_key(&id) {
                true => self.lock_next(id),
                false => self.next_range(id),
            },
            Message::FlashRead { shard, io, slot, line, lines } => {
                let buf = self.spare.take(lines as usize * self.cache.line_bytes() as usize);
                let offset = self.cache.layout.slot_at(shard, slot.0);
                let job = self.flash_jobs.add(FlashJob::Read { shard, io, line });
                self.flash.submit(job, &self.cache.file, FileOp::Read { offset, buf });
            }
            Message::FlashWrite { shard, io, slot, bytes } => {
                let data = aligned(bytes);
                let bytes = data.clone();
                let job = self.flash_jobs.add(FlashJob::Write { shard, io, bytes });
                self.flash.submit(job, &self.cache.file, self.cache.write_of(shard, slot, data));
            }
            Message::Load(load) => {
                let buf = AlignedBuf::zeroed(PAGE_SIZE);
                let offset = self.cache.layout.table_at(load.shard, load.page);
                let job = self.flash_jobs.add(FlashJob::Load(load));
                self.flash.submit(job, &self.cache.file, FileOp::Read { offset, buf });
            }
            Message::Merge { shard, io, merge, bytes } => {
                let buf = AlignedBuf::zeroed(self.cache.line_bytes() as usize);
                let offset = self.cache.layout.slot_at(shard, merge.from.0);
                let job = self.flash_jobs.add(FlashJob::MergeRead { shard, io, merge, bytes });
                self.flash.submit(job, &self.cache.file, FileOp::Read { offset, buf });
            }
            Message::BackingRead { shard, io, at, len } => {
                if let Some(op) = self.ops.get_mut(&id) {
                    op.asked_store = true;
                }
                let first = Piece { shard, io, at, len };
                let pieces = Pieces::gather(id, first, true, &mut self.inbox, Message::waiting);
                match self.store_op(id, Some(()), pieces.at(), pieces.len()) {
                    Some(op) => {
                        let ClientOp { known, kind, at, .. } = self.ops[&id];
                        self.ask_store(known, BackingJob::Fetch { op: id, pieces }, op);
                        if kind == PartKind::Read {
                            self.missed(known, at);
                        }
                    }
                    None => self.fetched(&pieces, None),
                }
            }
            Message::BackingChange { shard, io, at, len } => {
                let first = Piece { shard, io, at, len };
                let pieces = Pieces::gather(id, first, false, &mut self.inbox, Message::waiting);
                match self.store_op(id, None, pieces.at(), pieces.len()) {
                    Some(op) => {
                        let known = self.ops[&id].known;
                        self.ask_store(known, BackingJob::Change { op: id, pieces }, op);
                    }
                    None => self.changed(&pieces, Err(IoFailed)),
                }
            }
        }
    }

    /// The detector sees what comes from the cache too: after a restart, nothing else may pass by for a long time.
    fn show_hit(&self, id: OpId, at: u64, bytes: &[u8]) {
        if let Some(op) = self.ops.get(&id)
            && let Some(attached) = self.attached(op.known)
        {
            attached.pass(at - attached.base(), bytes);
        }
    }

    /// What the store was asked to read has come, or not.
    fn fetched(&mut self, pieces: &Pieces, buf: Option<AlignedBuf>) {
        let now = self.cache.now();
        let whole = buf.map(|buf| self.spare.share(buf));
        for Piece { shard, io, at, len } in pieces.iter() {
            let bytes = whole.as_ref().map(|whole| {
                let part = whole.part((at - pieces.at()) as usize, len as usize);
                // A line that waits to be filled must not hold a megabyte.
                if pieces.len() <= SHARED { part } else { copy(&part) }
            });
            self.call(shard, |s, fx| match bytes {
                Some(bytes) => {
                    fx.tables.keep_buffer(io, at, bytes);
                    fx.tables.hears_of(Some(io));
                    s.backing_read(now, io, Ok(()), fx);
                    fx.tables.hears_of(None);
                }
                None => s.backing_read(now, io, Err(IoFailed), fx),
            });
        }
    }

    /// What the store was asked to change is changed, or not.
    fn changed(&mut self, pieces: &Pieces, result: Result<(), IoFailed>) {
        let now = self.cache.now();
        for Piece { shard, io, .. } in pieces.iter() {
            self.call(shard, |s, fx| s.backing_changed(now, io, result, fx));
        }
    }

    fn take_inbox(&mut self) {
        let mut inbox = locked(&self.cache.doors[self.me].inbox);
        self.inbox.extend(inbox.drain(..));
    }

    fn handle_all(&mut self) {
        while let Some((id, message)) = self.inbox.pop_front() {
            self.handle(id, message);
        }
    }

    fn flash_done(&mut self, FileDone { token, op, result }: FileDone) {
        let now = self.cache.now();
        let line_bytes = u64::from(self.cache.line_bytes());
        match (self.flash_jobs.take(token), op) {
            (Some(FlashJob::Read { shard, io, line }), FileOp::Read { buf, .. }) => match result {
                Ok(()) => {
                    self.cache.flash_works();
                    let crcs = crcs(&buf, line_bytes as usize);
                    let bytes = self.spare.share(buf);
                    self.call(shard, |s, fx| {
                        fx.tables.keep_buffer(io, line.0 * line_bytes, bytes);
                        s.flash_read(now, io, Ok(&crcs), fx);
                    });
                }
                Err(e) => {
                    self.cache.flash_failed("read", &e);
                    self.call(shard, |s, fx| s.flash_read(now, io, Err(IoFailed), fx));
                }
            },
            (Some(FlashJob::Load(Load { shard, io, page })), op) => {
                let cache = self.cache.clone();
                cache.page_read(shard, page, (op, result), |slots| {
                    self.call(shard, |s, fx| s.page_loaded(now, io, slots, fx));
                });
            }
            (
                Some(FlashJob::MergeRead { shard, io, merge, bytes }),
                FileOp::Read { mut buf, .. },
            ) if result.is_ok() => {
                let before = crc32c::crc32c(&buf);
                let first = (merge.at - merge.line.0 * line_bytes) as usize;
                buf[first..first + bytes.len()].copy_from_slice(&bytes);
                let sums = (before, crc32c::crc32c(&buf));
                let job = self.flash_jobs.add(FlashJob::MergeWrite { shard, io, sums });
                let op = self.cache.write_of(shard, merge.to, Payload::new(buf));
                self.flash.submit(job, &self.cache.file, op);
            }
            (
                Some(
                    FlashJob::MergeRead { shard, io, .. } | FlashJob::MergeWrite { shard, io, .. },
                ),
                op,
            ) if result.is_err() => {
                if let Err(e) = result {
                    let what = if matches!(op, FileOp::Read { .. }) { "read" } else { "write" };
                    self.cache.flash_failed(what, &e);
                }
                self.call(shard, |s, fx| s.merged(now, io, Err(IoFailed), fx));
            }
            (Some(FlashJob::MergeWrite { shard, io, sums }), _) => {
                self.call(shard, |s, fx| s.merged(now, io, Ok(sums), fx));
            }
            (Some(FlashJob::Write { shard, io, bytes }), _) => match result {
                Ok(()) => {
                    self.cache.flash_works();
                    let crcs = crcs(&bytes, line_bytes as usize);
                    self.call(shard, |s, fx| s.flash_written(now, io, Ok(&crcs), fx));
                }
                Err(e) => {
                    self.cache.flash_failed("write", &e);
                    self.call(shard, |s, fx| s.flash_written(now, io, Err(IoFailed), fx));
                }
            },
            _ => {}
        }
    }

    fn backing_done(&mut self, Done { token, op, outcome }: Done) {
        let failure = outcome.as_ref().err().cloned();
        match self.backing_jobs.take(token) {
            Some(BackingJob::Ticket { known, ticket }) => {
                let durable = op.is_durable();
                let buf = self.lingering.buffer(op);
                self.give(known, durable, Answer::new(ticket, outcome, buf));
            }
            Some(BackingJob::Piece { op: id, at }) => {
                if let (Op::Read { buf: from, .. }, Some(client)) = (&op, self.ops.get_mut(&id))
                    && let Some(buf) = &mut client.buf
                {
                    let start = (at - client.at) as usize;
                    buf[start..start + from.len()].copy_from_slice(from);
                }
                drop(op);
                self.range_over(id);
                self.step(id, failure);
            }
            Some(BackingJob::Fetch { op: id, pieces }) => {
                self.note(id, failure);
                let at = pieces.at();
                if let (Op::Read { buf, .. }, Ok(_)) = (&op, &outcome)
                    && let Some(known) = self.ops.get(&id).map(|o| o.known)
                    && let Some(attached) = self.attached(known)
                {
                    attached.pass(at - attached.base(), buf);
                }
                let buf = match (op, outcome) {
                    (Op::Read { buf, .. }, Ok(_)) => Some(buf),
                    _ => None,
                };
                self.fetched(&pieces, buf);
            }
            Some(BackingJob::Change { op: id, pieces }) => {
                drop(op);
                self.note(id, failure);
                self.changed(&pieces, outcome.map(|_| ()).map_err(|_| IoFailed));
            }
            None => {}
        }
    }

    /// An operation of session `at` failed.
    fn store_failed(&self, at: usize, failure: &Failure) {
        if let Some(known) = self.known.iter().flatten().find(|k| k.session == at) {
            known.volume.health().failed(known.volume.name(), failure, Instant::now());
        }
    }

    /// What the store said is more use to the client than that it failed.
    fn note(&mut self, id: OpId, failure: Option<Failure>) {
        if let Some(failure) = failure
            && let Some(op) = self.ops.get_mut(&id)
        {
            op.failure.get_or_insert(failure);
        }
    }

    fn turn(&mut self) {
        self.give_held();
        loop {
            self.handle_all();
            let mut any = false;
            while let Some(done) = self.flash.pop() {
                any = true;
                self.flash_done(done);
            }
            for at in 0..self.sessions.len() {
                while let Some(done) = self.sessions[at].as_mut().and_then(|s| s.pop()) {
                    any = true;
                    if let Err(failure) = &done.outcome {
                        self.store_failed(at, failure);
                    }
                    self.backing_done(done);
                }
            }
            if !any && self.inbox.is_empty() {
                return;
            }
        }
    }
}

impl Service for Cached {
    fn submit(&mut self, volume: &Arc<Volume>, ticket: u64, command: Command) {
        self.submit_tagged(volume, ticket, command, BlockKind::Unknown);
    }

    fn ready(&mut self, event: &Event, now: Instant) {
        match event.token().0 - self.first_token {
            0 => {}
            1 => {
                let mut count = [0u8; 8];
                // EAGAIN means that nothing was signalled.
                let _ = rustix::io::read(self.cache.doors[self.me].event.as_fd(), &mut count);
                self.take_inbox();
            }
            at => {
                if let Some(Some(session)) = self.sessions.get_mut((at - 2) / TOKENS) {
                    session.ready((at - 2) % TOKENS, event, now);
                }
            }
        }
        self.turn();
    }

    fn flush(&mut self, now: Instant) {
        self.let_go();
        self.submit_postponed();
        for session in self.sessions.iter_mut().flatten() {
            if session.wake_at().is_some_and(|when| when <= now) {
                session.turn(now);
            }
        }
        self.turn();
        for session in self.sessions.iter_mut().flatten() {
            session.flush(now);
        }
        self.flash.flush();
    }

    fn pop(&mut self) -> Option<Answer> {
        if self.ended.is_empty() {
            self.turn();
        }
        self.ended.pop_front()
    }

    fn lend(&mut self) {
        self.lends = true;
    }

    fn rest(&mut self) -> usize {
        self.spare.rest()
    }

    fn spent(&mut self) -> Option<AlignedBuf> {
        self.lingering.pop()
    }

    fn wake_at(&self) -> Option<Instant> {
        self.sessions.iter().flatten().filter_map(|s| s.wake_at()).min()
    }
}
