//! Carries out what a worker's queue asks for: I/O of the cache device and of stores, buffers, answers.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use larder_engine::block::node::event::{Answer as Over, Effects, JobId, ShardIo, StoreOp};
use larder_engine::block::node::logged::{JournalPart, LogIo, tell_log};
use larder_engine::block::writeback::log::{Said, ToWrite};
use larder_engine::block::{LineId, Merge, SlotId};
use larder_format::PAGE_SIZE;
use larder_runtime::{AlignedBuf, FileOp, FileQueue, Payload};
use mio::Registry;
use slab::Slab;

use super::super::Core;
use super::super::shard::{Daemon, Known, KnownVolume, Load};
use super::bytes::aligned;
use super::client::Client;
use super::spare::{Batches, Spare};
use crate::block::service::{Answer, DeferredFree};
use crate::block::volume::Volume;
use larder_volume::op::{Done, Extent, Failure, FailureKind, Op};
use larder_volume::{Session, TOKENS};

/// An operation of the cache device under way.
pub(super) enum FlashJob {
    Read {
        io: ShardIo,
        line: LineId,
    },
    Write {
        io: ShardIo,
        bytes: Payload,
    },
    /// A page of the table.
    Load(Load),
    /// A line is read, so that bytes are laid over it; then it is written, with the checksums before and after.
    MergeRead {
        io: ShardIo,
        merge: Merge,
        bytes: Payload,
    },
    MergeWrite {
        io: ShardIo,
        sums: (u32, u32),
    },
    /// A batch of the write log.
    LogWrite(u64),
    /// All batches up to this one become durable.
    LogFlush(u64),
    /// Bytes of the write log: of what is read the first that are wanted, and how many are.
    LogRead {
        io: LogIo,
        from: usize,
        len: usize,
    },
}

/// Reads of the log are rounded out to this, whatever the device's sector is.
const UNIT: u64 = 4096;

/// See the [module](self).
pub(super) struct Carrier {
    pub cache: Arc<Core>,
    registry: Registry,
    /// Token of the first session.
    first_token: usize,
    pub flash: FileQueue,
    pub flash_jobs: Slab<FlashJob>,
    /// By the number of the volume in `known`, opened when they are first wanted.
    pub sessions: Vec<Option<Box<dyn Session>>>,
    known: Vec<Option<Known>>,
    by_volume: BTreeMap<usize, usize>,
    /// Operations of stores that have ended without one.
    pub at_once: VecDeque<Done>,
    pub ended: VecDeque<Answer>,
    pub deferred: DeferredFree,
    pub spare: Spare,
    /// Of batches of the write log.
    pub batches: Batches,
    /// Whether reads may be answered with bytes that others have too.
    pub lends: bool,
    /// Detached volumes that were let go of so far.
    gone: u64,
    /// This thread does all I/O itself, when it is asked for: no descriptor says that something has ended.
    pub by_hand: bool,
}

impl Carrier {
    pub(super) fn new(
        cache: Arc<Core>,
        registry: Registry,
        first_token: usize,
        flash: FileQueue,
        by_hand: bool,
    ) -> Carrier {
        Carrier {
            cache,
            registry,
            first_token,
            flash,
            flash_jobs: Slab::new(),
            sessions: Vec::new(),
            known: Vec::new(),
            by_volume: BTreeMap::new(),
            at_once: VecDeque::new(),
            ended: VecDeque::new(),
            deferred: DeferredFree::default(),
            spare: Spare::default(),
            batches: Batches::default(),
            lends: false,
            gone: 0,
            by_hand,
        }
    }

    /// The volume as this worker knows it.
    pub(super) fn known(&mut self, volume: &Arc<Volume>) -> Known {
        let key = Arc::as_ptr(volume) as usize;
        if let Some(&at) = self.by_volume.get(&key)
            && let Some(known) = &self.known[at]
        {
            return known.clone();
        }
        let at = self.known.iter().position(Option::is_none).unwrap_or(self.known.len());
        if at == self.known.len() {
            self.known.push(None);
            self.sessions.push(None);
        }
        // Another volume may have its name by now.
        let attached = self.cache.volume(volume.name()).filter(|a| Arc::ptr_eq(a.volume(), volume));
        let known = Known(Arc::new(KnownVolume { volume: volume.clone(), session: at, attached }));
        self.known[at] = Some(known.clone());
        self.by_volume.insert(key, at);
        if !known.is_gone() {
            // A store that is far away is connected to ahead of the first miss; if that fails, it is tried again then.
            let _ = self.session(&known);
        }
        known
    }

    /// The session on a volume's store.
    fn session(&mut self, known: &Known) -> Result<&mut Box<dyn Session>, Failure> {
        let at = known.0.session;
        if self.sessions[at].is_none() {
            let failure = |text: String| Failure::new(FailureKind::Failed, text);
            let mut session =
                known.0.volume.backing().session().map_err(|e| failure(e.to_string()))?;
            session
                .attach(&self.registry, self.first_token + at * TOKENS)
                .map_err(|e| failure(format!("a session's descriptor: {e}")))?;
            self.sessions[at] = Some(session);
        }
        let none = || Failure::new(FailureKind::Failed, "no session");
        self.sessions[at].as_mut().ok_or_else(none)
    }

    /// Lets go of volumes that were put aside, so that their stores can be closed.
    pub(super) fn let_go(&mut self) {
        let gone = self.cache.node_limits.gone.load(Ordering::SeqCst);
        if gone == self.gone {
            return;
        }
        let mut all = true;
        for at in 0..self.known.len() {
            let Some(known) = self.known[at].as_ref().filter(|k| k.is_gone()) else { continue };
            // The queue has it as long as an operation is under way.
            let used = Arc::strong_count(&known.0) > 1;
            if used || self.sessions[at].as_ref().is_some_and(|s| s.in_flight() > 0) {
                all = false;
                continue;
            }
            if let Some(mut open) = self.sessions[at].take() {
                open.detach(&self.registry);
            }
            self.by_volume.remove(&(Arc::as_ptr(&known.0.volume) as usize));
            self.known[at] = None;
        }
        if all {
            self.gone = gone;
        }
    }

    /// Nothing was asked of the cache device or of a store that is not over and told.
    pub(super) fn is_idle(&self) -> bool {
        self.flash_jobs.is_empty()
            && self.at_once.is_empty()
            && self.ended.is_empty()
            && self.sessions.iter().flatten().all(|session| session.in_flight() == 0)
    }

    /// The next operation that has ended of the session number `at`.
    pub(super) fn pop_session(&mut self, at: usize) -> Option<Done> {
        let session = self.sessions[at].as_mut()?;
        if self.by_hand && session.in_flight() > 0 {
            let now = Instant::now();
            session.flush(now);
            session.turn(now);
        }
        session.pop()
    }

    /// The volume whose session is number `at`.
    pub(super) fn volume_of(&self, at: usize) -> Option<&Arc<Volume>> {
        self.known.get(at)?.as_ref().map(|known| &known.0.volume)
    }

    /// Starts what was asked of the cache device and of stores.
    pub(super) fn start(&mut self, now: Instant) {
        for session in self.sessions.iter_mut().flatten() {
            session.flush(now);
        }
        self.flash.flush();
    }

    fn ask(&mut self, JobId(job): JobId, volume: &Known, op: Op) {
        match self.session(volume) {
            Ok(session) => session.submit(job.into(), op),
            Err(failure) => {
                self.at_once.push_back(Done { token: job.into(), op, outcome: Err(failure) });
            }
        }
    }

    fn read(&mut self, job: FlashJob, offset: u64, buf: AlignedBuf) {
        let job = self.flash_jobs.insert(job) as u64;
        self.flash.submit(job, &self.cache.file, FileOp::Read { offset, buf });
    }

    pub(super) fn write(&mut self, job: FlashJob, shard: u32, slot: SlotId, data: Payload) {
        let job = self.flash_jobs.insert(job) as u64;
        let offset = self.cache.layout.slot_at(shard, slot.0);
        let op = FileOp::Write { offset, data, durable: false };
        self.flash.submit(job, &self.cache.file, op);
    }
}

impl Effects<Daemon> for Carrier {
    #[inline]
    fn flash_read(&mut self, io: ShardIo, slot: SlotId, line: LineId, lines: u32) {
        let buf = self.spare.take(lines as usize * self.cache.layout.line as usize);
        let offset = self.cache.layout.slot_at(io.shard, slot.0);
        self.read(FlashJob::Read { io, line }, offset, buf);
    }

    fn flash_write(&mut self, io: ShardIo, slot: SlotId, _lines: u32, bytes: Payload) {
        let data = aligned(bytes);
        self.write(FlashJob::Write { io, bytes: data.clone() }, io.shard, slot, data);
    }

    fn merge(&mut self, io: ShardIo, merge: Merge, bytes: Payload) {
        let buf = AlignedBuf::zeroed(self.cache.layout.line as usize);
        let offset = self.cache.layout.slot_at(io.shard, merge.from.0);
        self.read(FlashJob::MergeRead { io, merge, bytes }, offset, buf);
    }

    fn load(&mut self, ShardIo { shard, io }: ShardIo, page: u32) {
        let offset = self.cache.layout.table_at(shard, page);
        let load = FlashJob::Load(Load { shard, io, page });
        self.read(load, offset, AlignedBuf::zeroed(PAGE_SIZE));
    }

    fn store_read(&mut self, job: JobId, volume: &Known, at: u64, len: u32, _ahead: bool) {
        let buf = self.spare.take(len as usize);
        self.ask(job, volume, Op::Read { offset: at, buf });
    }

    fn store_change(&mut self, job: JobId, volume: &Known, change: StoreOp<Payload>) {
        let op = match change {
            StoreOp::Write { at: offset, bytes: data, fua, .. } => Op::Write { offset, data, fua },
            StoreOp::Zero { at: offset, len, fua, may_punch, fast } => {
                Op::WriteZeroes { offset, len: len as u32, fua, may_punch, fast }
            }
            StoreOp::Trim { at: offset, len, fua } => Op::Trim { offset, len: len as u32, fua },
            StoreOp::Flush => Op::Flush,
            StoreOp::Status { at: offset, len, one } => {
                let (len, op) = (len as u32, Op::Status { offset, len: len as u32, one });
                if !volume.0.volume.capabilities().status {
                    // The store cannot say: all of it may be data.
                    let outcome = Ok(vec![Extent { len, hole: false, zero: false }]);
                    return self.at_once.push_back(Done { token: job.0.into(), op, outcome });
                }
                op
            }
        };
        self.ask(job, volume, op);
    }

    fn log_write(&mut self, write: ToWrite<Payload>) {
        let mut buf = self.batches.take(write.len as usize);
        let mut end = write.head.len();
        buf[..end].copy_from_slice(&write.head);
        for (from, bytes) in &write.payload {
            let from = *from as usize;
            buf[end..from].fill(0);
            end = from + bytes.len();
            buf[from..end].copy_from_slice(bytes);
        }
        buf[end..].fill(0);
        let job = self.flash_jobs.insert(FlashJob::LogWrite(write.number)) as u64;
        let op = FileOp::Write { offset: write.at, data: Payload::new(buf), durable: false };
        self.flash.submit(job, &self.cache.file, op);
    }

    fn log_flush(&mut self, covers: u64) {
        let job = self.flash_jobs.insert(FlashJob::LogFlush(covers)) as u64;
        self.flash.submit(job, &self.cache.file, FileOp::Sync);
    }

    fn log_read(&mut self, io: LogIo, at: u64, len: u32) {
        let first = at / UNIT * UNIT;
        let end = (at + u64::from(len)).next_multiple_of(UNIT);
        let buf = self.spare.take((end - first) as usize);
        let job = FlashJob::LogRead { io, from: (at - first) as usize, len: len as usize };
        self.read(job, first, buf);
    }

    fn journal_write(
        &mut self,
        attachment: u32,
        epoch: u64,
        last: u64,
        parts: Vec<JournalPart<Payload>>,
    ) {
        let written = self.cache.back.get().and_then(|back| back.written(attachment));
        if let Some(journal) = written.as_ref().and_then(|written| written.journal.as_ref()) {
            let back = self.cache.back.get();
            let mark = back.and_then(|b| b.log().mark_at(attachment, last).map(str::to_owned));
            journal.write((epoch, last, mark), parts);
        }
    }

    fn journal_flush(&mut self, attachment: u32) {
        let written = self.cache.back.get().and_then(|back| back.written(attachment));
        if let Some(journal) = written.as_ref().and_then(|written| written.journal.as_ref()) {
            journal.flush();
        }
    }

    fn marker_write(&mut self, attachment: u32, said: Said, frontier: u64) {
        if !self.by_hand {
            let cache = Arc::downgrade(&self.cache);
            let write = move || {
                if let Some(cache) = cache.upgrade() {
                    cache.mark_and_tell(attachment, said, frontier);
                }
            };
            // A marker may hang with its store.
            let spawned = std::thread::Builder::new().name("block-marker".into()).spawn(write);
            if spawned.is_ok() {
                return;
            }
        }
        self.cache.mark_and_tell(attachment, said, frontier);
    }

    fn marker_look(&mut self, attachment: u32) {
        if self.by_hand {
            return self.cache.look_and_tell(attachment);
        }
        let cache = Arc::downgrade(&self.cache);
        let look = move || {
            if let Some(cache) = cache.upgrade() {
                cache.look_and_tell(attachment);
            }
        };
        // It may hang with its store.
        let spawned = std::thread::Builder::new().name("block-marker".into()).spawn(look);
        if spawned.is_err() {
            // It is asked for again.
            let now = self.cache.now();
            tell_log(&*self.cache, now, |log, asks| log.look_ended(now, attachment, asks));
        }
    }

    fn deliver_zeros(&mut self, client: &mut Client, at: u64, len: u64) {
        client.zero(at, len);
    }

    fn volume(&mut self, attachment: u32) -> Option<Known> {
        let attached = self.cache.back.get()?.volume(attachment)?;
        Some(self.known(attached.volume()))
    }

    #[inline]
    fn deliver(&mut self, client: &mut Client, at: u64, bytes: Payload) {
        client.take(at, bytes, self.lends);
    }

    fn answer(&mut self, answer: Over<Daemon>) {
        let Over { ticket: mut client, outcome, bytes, losses, .. } = answer;
        let lent = if outcome.is_ok() { client.take_lent() } else { Vec::new() };
        // A write's bytes may still be the source of a fill: then the buffer comes back later, or not at all.
        let buf = match (client.buf, bytes) {
            (Some(buf), _) => Some(buf),
            (None, Some(bytes)) => self.deferred.payload(bytes),
            (None, None) => None,
        };
        let ticket = client.ticket;
        self.ended.push_back(Answer { ticket, outcome, buf, lent, losses });
    }
}
