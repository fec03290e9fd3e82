//! A worker's part of the cache.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Instant;

use larder_engine::block::map::Slot;
use larder_engine::block::{
    BlockShard, GROUP_LINES, IoFailed, IoId, LineId, Part, PartKind, Verdict,
};
use larder_policy::block::BlockOp;
use larder_runtime::{AlignedBuf, Device, FileDone, FileOp, FileQueue, PAGE, Payload, RingChoice};
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};

use super::effects::{Action, Fx};
use super::ops::{self, Kind, OpState};
use super::{Cache, Cell, locked};
use crate::backing::Session;
use crate::nbd::server::Command;
use crate::nbd::wire::Errno;
use crate::op::{Done, Failure, Op, Outcome};
use crate::server::Volume;
use crate::server::service::{Answer, Lingering, Service};

/// Operations of the ring on the cache device that are under way at a time.
const DEPTH: u32 = 512;
/// Threads, where there is no io_uring.
const THREADS: u32 = 8;
/// Changes of more groups than this take the range as a whole instead of being split.
const SPLIT_AT_MOST: u64 = 64;
/// Slots or groups of a range that are looked at under one lock.
const DROP_STEPS: u32 = 4096;

/// Tokens of the descriptors.
const RING: usize = 0;
const DESK: usize = 1;
const SESSIONS: usize = 2;

/// An I/O under way, by its token.
enum LocalIo {
    Free,
    FlashRead {
        shard: u32,
        io: IoId,
        start: u64,
    },
    FlashWrite {
        shard: u32,
        io: IoId,
        crcs: Vec<u32>,
    },
    /// The buffer is made `len` long again: what lies beyond the volume's end reads as zeroes.
    BackingRead {
        shard: u32,
        io: IoId,
        start: u64,
        len: usize,
    },
    Change {
        shard: u32,
        io: IoId,
    },
    /// A flush or a status, for a client's ticket.
    Direct {
        ticket: u64,
    },
    /// The change of a locked range.
    Range {
        index: u32,
    },
}

#[derive(Default)]
struct LocalIos {
    list: Vec<LocalIo>,
    free: Vec<usize>,
}

impl LocalIos {
    fn insert(&mut self, io: LocalIo) -> u64 {
        match self.free.pop() {
            Some(index) => {
                self.list[index] = io;
                index as u64
            }
            None => {
                self.list.push(io);
                self.list.len() as u64 - 1
            }
        }
    }

    fn remove(&mut self, token: u64) -> LocalIo {
        let Some(entry) = self.list.get_mut(token as usize) else { return LocalIo::Free };
        self.free.push(token as usize);
        std::mem::replace(entry, LocalIo::Free)
    }
}

/// See the [module](self).
pub struct CacheService {
    cache: Arc<Cache>,
    worker: usize,
    registry: Registry,
    first_token: usize,
    ring: FileQueue,
    sessions: Vec<Box<dyn Session>>,
    /// By the volume's first byte in the line space.
    by_base: BTreeMap<u64, (Arc<Volume>, usize)>,
    ios: LocalIos,
    answers: Vec<Answer>,
    lingering: Lingering,
    /// What could not even be begun.
    failed: Vec<(LocalIo, Failure)>,
    /// Operations of this worker's that are to be looked at.
    ended: Vec<u32>,
    /// Empty but for their memory.
    actions: Vec<Action>,
    parts: Vec<Part>,
}

impl CacheService {
    /// Worker `worker`'s, which registers its descriptors there, from that token on.
    ///
    /// # Errors
    /// When there is no ring to be had.
    pub fn new(
        cache: Arc<Cache>,
        worker: usize,
        registry: Registry,
        first_token: usize,
        ring: RingChoice,
    ) -> io::Result<CacheService> {
        let ring = FileQueue::open(ring, DEPTH, THREADS).map_err(io::Error::other)?;
        let desk = cache.desks.get(worker).ok_or_else(|| io::Error::other("no such worker"))?;
        for (fd, token) in [(ring.as_raw_fd(), RING), (desk.event.as_raw_fd(), DESK)] {
            let token = Token(first_token + token);
            registry.register(&mut SourceFd(&fd), token, Interest::READABLE)?;
        }
        Ok(CacheService {
            cache,
            worker,
            registry,
            first_token,
            ring,
            sessions: Vec::new(),
            by_base: BTreeMap::new(),
            ios: LocalIos::default(),
            answers: Vec::new(),
            lingering: Lingering::default(),
            failed: Vec::new(),
            ended: Vec::new(),
            actions: Vec::new(),
            parts: Vec::new(),
        })
    }

    /// The volume that has byte `at` of the line space, its first byte there, and the session on its store.
    fn session(&mut self, at: u64) -> Result<(u64, Arc<Volume>, usize), Failure> {
        let failure = |text: String| Failure::new(Errno::Io, text);
        let unknown = || failure("a volume that is not attached to the cache".into());
        let known = self.by_base.range(..=at).next_back();
        if let Some((base, (volume, index))) = known
            && at - base < volume.about().size
        {
            return Ok((*base, volume.clone(), *index));
        }
        let (base, volume) = self.cache.volume_at(at).ok_or_else(unknown)?;
        let session = volume.backing().session().map_err(|e| failure(e.to_string()))?;
        let index = self.sessions.len();
        let token = Token(self.first_token + SESSIONS + index);
        self.registry
            .register(&mut SourceFd(&session.fd()), token, Interest::READABLE)
            .map_err(|e| failure(format!("a session's descriptor: {e}")))?;
        self.sessions.push(session);
        self.by_base.insert(base, (volume.clone(), index));
        Ok((base, volume, index))
    }

    /// Calls a shard, with a buffer that has just been read if there is one, and begins what it asks for.
    fn with_shard(
        &mut self,
        shard: u32,
        failure: Option<Failure>,
        read: Option<(IoId, u64, Payload)>,
        call: impl FnOnce(&mut BlockShard, &mut Fx<'_>),
    ) {
        let cache = self.cache.clone();
        let mut actions = std::mem::take(&mut self.actions);
        let mut starts: Vec<u64> = Vec::new();
        {
            let mut cell = locked(&cache.shards[shard as usize]);
            let Cell { shard, bufs } = &mut *cell;
            if let Some((io, start, data)) = read {
                bufs.insert(io.0, (start, data));
            }
            let mut fx = Fx {
                cache: &cache,
                worker: self.worker,
                bufs,
                actions: &mut actions,
                ended: &mut self.ended,
                failure,
                commit: false,
                intents: Vec::new(),
            };
            call(shard, &mut fx);
            // Nothing outlives the process, so a region is marked as soon as that is asked for, and the map's records
            // are durable as soon as they are taken.
            let mut records = Vec::new();
            loop {
                if let Some(region) = fx.intents.pop() {
                    shard.intent_ready(cache.now(), region, &mut fx);
                } else if std::mem::take(&mut fx.commit) && shard.records_waiting() > 0 {
                    records.clear();
                    shard.take_records(usize::MAX, &mut records);
                    shard.records_durable(cache.now(), &mut fx);
                } else {
                    break;
                }
            }
            // A line that is being read stays where it is, so its slot still says which one it is.
            for action in fx.actions.iter() {
                if let Action::FlashRead { slot, .. } = action
                    && let Slot::Line(line) = shard.map().get(*slot)
                {
                    starts.push(line.0 * u64::from(cache.options.line_bytes));
                }
            }
        }
        let mut starts = starts.into_iter();
        for action in actions.drain(..) {
            self.begin(shard, action, &mut starts);
        }
        self.actions = actions;
    }

    fn begin(&mut self, shard: u32, action: Action, starts: &mut impl Iterator<Item = u64>) {
        let line_bytes = self.cache.options.line_bytes as usize;
        match action {
            Action::FlashRead { io, slot, lines } => {
                let Some(start) = starts.next() else {
                    let failure = Failure::new(Errno::Io, "a read of an empty slot");
                    self.failed.push((LocalIo::FlashRead { shard, io, start: 0 }, failure));
                    return;
                };
                let offset = self.cache.slot_at(shard, slot.0);
                let buf = AlignedBuf::zeroed(lines as usize * line_bytes);
                let token = self.ios.insert(LocalIo::FlashRead { shard, io, start });
                self.ring.submit(token, &self.cache.file, FileOp::Read { offset, buf });
            }
            Action::FlashWrite { io, slot, data } => {
                let crcs: Vec<u32> = data.chunks_exact(line_bytes).map(crc32c::crc32c).collect();
                if crcs.is_empty() {
                    let failure = Failure::new(Errno::Io, "a write of nothing");
                    self.failed.push((LocalIo::FlashWrite { shard, io, crcs }, failure));
                    return;
                }
                let offset = self.cache.slot_at(shard, slot.0);
                let data = aligned(data, self.cache.file.unit());
                let token = self.ios.insert(LocalIo::FlashWrite { shard, io, crcs });
                let op = FileOp::Write { offset, data, durable: false };
                self.ring.submit(token, &self.cache.file, op);
            }
            Action::BackingRead { io, at, len } => {
                let len = len as usize;
                let local = LocalIo::BackingRead { shard, io, start: at, len };
                match self.session(at) {
                    Err(failure) => self.failed.push((local, failure)),
                    Ok((base, volume, index)) => {
                        let offset = at - base;
                        let mut buf = AlignedBuf::zeroed(len);
                        buf.set_len((volume.about().size - offset).min(len as u64) as usize);
                        let token = self.ios.insert(local);
                        self.sessions[index].submit(token, Op::Read { offset, buf });
                    }
                }
            }
            Action::Change { io, op, kind, at, len } => {
                let local = LocalIo::Change { shard, io };
                let begun = self.session(at).and_then(|(base, _, index)| {
                    let change = self.change(op, kind, at, len, at - base)?;
                    Ok((index, change))
                });
                match begun {
                    Err(failure) => self.failed.push((local, failure)),
                    Ok((index, change)) => {
                        let token = self.ios.insert(local);
                        self.sessions[index].submit(token, change);
                    }
                }
            }
        }
    }

    /// What a change asks of the store, at `offset` of the volume.
    fn change(
        &self,
        op: larder_engine::block::OpId,
        part: PartKind,
        at: u64,
        len: u32,
        offset: u64,
    ) -> Result<Op, Failure> {
        let gone = || Failure::new(Errno::Io, "a change of no operation");
        let (worker, index) = ops::place(op);
        let mut table = locked(&self.cache.desks.get(worker).ok_or_else(gone)?.ops);
        let op = table.get(index).ok_or_else(gone)?;
        match (&op.kind, part) {
            (Kind::Write { data, fua }, PartKind::Write) => {
                let data = data.part((at - op.start) as usize, len as usize);
                Ok(Op::Write { offset, data, fua: *fua })
            }
            (&Kind::Zero { fua, may_punch, fast }, PartKind::Zero) => {
                Ok(Op::WriteZeroes { offset, len, fua, may_punch, fast })
            }
            (&Kind::Trim { fua }, PartKind::Trim) => Ok(Op::Trim { offset, len, fua }),
            _ => Err(gone()),
        }
    }

    /// Submits an operation in parts: one for each group, more where admission judges its lines apart.
    fn split(&mut self, index: u32, kind: PartKind, base: u64, start: u64, len: u64) {
        let line_bytes = u64::from(self.cache.options.line_bytes);
        let group = line_bytes * u64::from(GROUP_LINES);
        let op = ops::id(self.worker, index);
        let access = match kind {
            PartKind::Read => Some(BlockOp::Read),
            PartKind::Write => Some(BlockOp::Write),
            // What is asked for is cached; zeroes and trims are not.
            PartKind::Prefetch | PartKind::Zero | PartKind::Trim => None,
        };
        let observed =
            access.and_then(|access| Some((access, self.cache.observe(base, access, start, len)?)));
        let end = start + len;
        let mut at = start;
        let mut parts = std::mem::take(&mut self.parts);
        while at < end {
            let mut until = (at / group * group + group).min(end);
            let mut verdict = Verdict::Admit;
            if let Some((access, observed)) = observed {
                let judge = |line: u64| self.cache.judge(base, access, line, observed);
                let mut line = at / line_bytes * line_bytes;
                verdict = judge(line);
                line += line_bytes;
                while line < until && judge(line) == verdict {
                    line += line_bytes;
                }
                until = until.min(line);
            }
            parts.push(Part { op, kind, at, len: (until - at) as u32, verdict });
            at = until;
        }
        if let Some(op) = locked(&self.cache.desks[self.worker].ops).get(index) {
            op.left += parts.len() as u32;
        }
        for part in parts.drain(..) {
            let line = LineId(part.at / line_bytes);
            let shard = self.cache.placing.shard(line.group());
            let now = self.cache.now();
            self.with_shard(shard, None, None, |shard, fx| shard.submit(now, part, fx));
        }
        self.parts = parts;
    }

    /// Takes the lines of a range for a change of it, in every shard.
    fn lock_range(&mut self, index: u32, start: u64, len: u64) {
        let op = ops::id(self.worker, index);
        let (first, last) = self.lines(start, len);
        if let Some(op) = locked(&self.cache.desks[self.worker].ops).get(index) {
            op.left += self.cache.shards.len() as u32;
        }
        for shard in 0..self.cache.shards.len() as u32 {
            let now = self.cache.now();
            self.with_shard(shard, None, None, |shard, fx| {
                shard.lock_range(now, op, first, last, fx);
            });
        }
    }

    fn lines(&self, start: u64, len: u64) -> (LineId, LineId) {
        let line_bytes = u64::from(self.cache.options.line_bytes);
        (LineId(start / line_bytes), LineId((start + len - 1) / line_bytes))
    }

    /// A range is locked in every shard: its lines go, and then the store is told.
    fn change_range(&mut self, index: u32, start: u64, len: u64, part: PartKind) {
        let (first, last) = self.lines(start, len);
        for cell in &self.cache.shards {
            let mut cursor = Some(0);
            while let Some(from) = cursor {
                // Let go in between: others need the shard too.
                cursor = locked(cell).shard.drop_range(first, last, from, DROP_STEPS);
            }
        }
        let op = ops::id(self.worker, index);
        let begun = self.session(start).and_then(|(base, _, session)| {
            // A client's length has 32 bits.
            Ok((session, self.change(op, part, start, len as u32, start - base)?))
        });
        match begun {
            Err(failure) => self.failed.push((LocalIo::Range { index }, failure)),
            Ok((session, change)) => {
                let token = self.ios.insert(LocalIo::Range { index });
                self.sessions[session].submit(token, change);
            }
        }
    }

    /// The change of a locked range has ended.
    fn range_changed(&mut self, index: u32, outcome: Outcome) {
        let op = ops::id(self.worker, index);
        for shard in 0..self.cache.shards.len() as u32 {
            let now = self.cache.now();
            self.with_shard(shard, None, None, |shard, fx| shard.unlock_range(now, op, fx));
        }
        let mut table = locked(&self.cache.desks[self.worker].ops);
        if let Some(op) = table.get(index) {
            op.failure = outcome.err();
            op.range = false;
            op.left = 0;
        }
        drop(table);
        self.ended.push(index);
    }

    /// An operation of this worker's has nothing left to wait for.
    fn end(&mut self, index: u32) {
        let mut table = locked(&self.cache.desks[self.worker].ops);
        let Some(op) = table.get(index) else { return };
        if op.left > 0 {
            return;
        }
        if op.range {
            op.left = 1;
            let (start, len, part) = (op.start, op.len, op.kind.part());
            drop(table);
            self.change_range(index, start, len, part);
            return;
        }
        let ticket = op.ticket;
        let outcome = op.failure.take().map_or(Ok(Vec::new()), Err);
        let answered = std::mem::replace(&mut op.answered, true);
        if op.holds > 0 {
            drop(table);
            if !answered {
                self.answers.push(Answer { ticket, outcome, buf: None });
            }
            return;
        }
        let op = table.remove(index);
        drop(table);
        let buf = match op.map(|op| op.kind) {
            Some(Kind::Read(buf)) => Some(buf),
            Some(Kind::Write { data, .. }) => self.lingering.payload(data),
            _ => None,
        };
        if answered {
            self.lingering.keep(buf);
        } else {
            self.answers.push(Answer { ticket, outcome, buf });
        }
    }

    /// An I/O has ended, with the buffer of a read.
    fn completed(&mut self, io: LocalIo, outcome: Outcome, buf: Option<AlignedBuf>) {
        let now = self.cache.now();
        match io {
            LocalIo::Free => {}
            LocalIo::FlashRead { shard, io, start } => {
                let line_bytes = self.cache.options.line_bytes as usize;
                let read = match (outcome, buf) {
                    (Ok(_), Some(buf)) => Some(Payload::new(buf)),
                    _ => None,
                };
                let crcs: Vec<u32> = read.as_deref().map_or(Vec::new(), |bytes| {
                    bytes.chunks_exact(line_bytes).map(crc32c::crc32c).collect()
                });
                let good = read.is_some();
                let read = read.map(|data| (io, start, data));
                self.with_shard(shard, None, read, |shard, fx| {
                    shard.flash_read(now, io, if good { Ok(&crcs) } else { Err(IoFailed) }, fx);
                });
            }
            LocalIo::FlashWrite { shard, io, crcs } => {
                let good = outcome.is_ok();
                self.with_shard(shard, None, None, |shard, fx| {
                    shard.flash_written(now, io, if good { Ok(&crcs) } else { Err(IoFailed) }, fx);
                });
            }
            LocalIo::BackingRead { shard, io, start, len } => {
                let (result, failure, read) = match (outcome, buf) {
                    (Ok(_), Some(mut buf)) => {
                        buf.set_len(len);
                        (Ok(()), None, Some((io, start, Payload::new(buf))))
                    }
                    (outcome, _) => (Err(IoFailed), outcome.err(), None),
                };
                self.with_shard(shard, failure, read, |shard, fx| {
                    shard.backing_read(now, io, result, fx);
                });
            }
            LocalIo::Change { shard, io } => {
                let result = outcome.as_ref().map(drop).map_err(|_| IoFailed);
                self.with_shard(shard, outcome.err(), None, |shard, fx| {
                    shard.backing_changed(now, io, result, fx);
                });
            }
            LocalIo::Direct { ticket } => self.answers.push(Answer { ticket, outcome, buf: None }),
            LocalIo::Range { index } => self.range_changed(index, outcome),
        }
    }

    fn flash_ended(&mut self, FileDone { token, op, result }: FileDone) {
        let io = self.ios.remove(token);
        let (what, buf) = match op {
            FileOp::Read { buf, .. } => ("a read", Some(buf)),
            _ => ("a write", None),
        };
        let outcome = match result {
            Ok(()) => Ok(Vec::new()),
            Err(e) => {
                if self.cache.device_failed(what, &e) {
                    self.disable();
                }
                Err(Failure::new(Errno::Io, e.to_string()))
            }
        };
        self.completed(io, outcome, buf);
    }

    /// The cache device is of no more use: clients go on without it.
    fn disable(&mut self) {
        let device = self.cache.device.name().clone();
        tracing::error!(
            "cache device '{device}' fails too often: its volumes go on without a cache"
        );
        for shard in 0..self.cache.shards.len() as u32 {
            let now = self.cache.now();
            self.with_shard(shard, None, None, |shard, fx| shard.disable(now, fx));
        }
    }

    /// Takes whatever has ended, until nothing is left.
    fn pump(&mut self) {
        loop {
            let mut more = false;
            while let Some(done) = self.ring.pop() {
                self.flash_ended(done);
                more = true;
            }
            for index in 0..self.sessions.len() {
                while let Some(Done { token, op, outcome }) = self.sessions[index].pop() {
                    let io = self.ios.remove(token);
                    let buf = if let Op::Read { buf, .. } = op { Some(buf) } else { None };
                    self.completed(io, outcome, buf);
                    more = true;
                }
            }
            while let Some((io, failure)) = self.failed.pop() {
                self.completed(io, Err(failure), None);
                more = true;
            }
            let mut mail = std::mem::take(&mut *locked(&self.cache.desks[self.worker].ended));
            self.ended.append(&mut mail);
            for index in std::mem::take(&mut self.ended) {
                self.end(index);
                more = true;
            }
            if !more {
                return;
            }
        }
    }
}

/// The same bytes, at an address that direct transfers take.
fn aligned(data: Payload, unit: u32) -> Payload {
    if unit == 1 || (data.as_ptr() as usize).is_multiple_of(PAGE) {
        return data;
    }
    let mut buf = AlignedBuf::zeroed(data.len());
    buf.copy_from_slice(&data);
    Payload::new(buf)
}

impl Service for CacheService {
    fn submit(&mut self, volume: &Arc<Volume>, ticket: u64, command: Command) {
        let Some(base) = self.cache.base(volume) else {
            let failure = Failure::new(Errno::Io, "the volume is not attached to the cache");
            let buf = match command {
                Command::Read { buf, .. } | Command::Write { buf, .. } => Some(buf),
                _ => None,
            };
            self.answers.push(Answer { ticket, outcome: Err(failure), buf });
            return;
        };
        let direct = |op: Op| (op, LocalIo::Direct { ticket });
        let (kind, offset, len) = match command {
            Command::Read { offset, buf } => {
                let len = buf.len() as u64;
                (Kind::Read(buf), offset, len)
            }
            Command::Write { offset, buf, fua } => {
                let len = buf.len() as u64;
                (Kind::Write { data: Payload::new(buf), fua }, offset, len)
            }
            Command::Trim { offset, len, fua } => (Kind::Trim { fua }, offset, u64::from(len)),
            Command::WriteZeroes { offset, len, fua, may_punch, fast } => {
                (Kind::Zero { fua, may_punch, fast }, offset, u64::from(len))
            }
            Command::Cache { offset, len } => (Kind::Prefetch, offset, u64::from(len)),
            // Both copies of what was answered are as the store has them: what it says, holds.
            Command::Flush => return self.direct(base, direct(Op::Flush)),
            Command::BlockStatus { offset, len, one } if volume.about().status => {
                return self.direct(base, direct(Op::Status { offset, len, one }));
            }
            Command::BlockStatus { len, .. } => {
                let outcome = Ok(vec![crate::op::Extent { len, hole: false, zero: false }]);
                self.answers.push(Answer { ticket, outcome, buf: None });
                return;
            }
        };
        let part = kind.part();
        let start = base + offset;
        let group = u64::from(self.cache.options.line_bytes) * u64::from(GROUP_LINES);
        let moves_nothing = matches!(part, PartKind::Zero | PartKind::Trim);
        let range = moves_nothing && len > SPLIT_AT_MOST * group;
        let state = OpState {
            ticket,
            start,
            len,
            kind,
            // Until it is submitted; each part adds one.
            left: 1,
            holds: 0,
            failure: None,
            answered: false,
            range,
        };
        let index = locked(&self.cache.desks[self.worker].ops).insert(state);
        if range {
            self.lock_range(index, start, len);
        } else {
            self.split(index, part, base, start, len);
        }
        let mut table = locked(&self.cache.desks[self.worker].ops);
        if let Some(op) = table.get(index) {
            op.left -= 1;
            if op.left == 0 {
                drop(table);
                self.ended.push(index);
            }
        }
    }

    fn ready(&mut self, token: usize, now: Instant) {
        let index = token - self.first_token;
        if index >= SESSIONS
            && let Some(session) = self.sessions.get_mut(index - SESSIONS)
        {
            session.turn(now);
        }
    }

    fn flush(&mut self, now: Instant) {
        for index in 0..self.sessions.len() {
            if self.sessions[index].wake_at().is_some_and(|at| at <= now) {
                self.sessions[index].turn(now);
            }
        }
        self.pump();
        self.ring.flush();
        for session in &mut self.sessions {
            session.flush(now);
        }
    }

    fn pop(&mut self) -> Option<Answer> {
        if self.answers.is_empty() {
            self.pump();
        }
        self.answers.pop()
    }

    fn spent(&mut self) -> Option<AlignedBuf> {
        self.lingering.pop()
    }

    fn wake_at(&self) -> Option<Instant> {
        self.sessions.iter().filter_map(|s| s.wake_at()).min()
    }
}

impl CacheService {
    /// An operation that the cache has no part in.
    fn direct(&mut self, base: u64, (op, io): (Op, LocalIo)) {
        match self.session(base) {
            Ok((_, _, index)) => {
                let token = self.ios.insert(io);
                self.sessions[index].submit(token, op);
            }
            Err(failure) => self.failed.push((io, failure)),
        }
    }
}
