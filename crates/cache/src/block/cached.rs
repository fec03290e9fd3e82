//! A worker's requests, by way of the engine: what its [queue](larder_engine::block::node::queue) asks for is carried out here.

pub(super) mod bytes;
mod carrier;
pub(super) mod client;
mod spare;

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Instant;

use larder_base::Nanos;
use larder_engine::block::node::event::{JobId, Op as Asked, Submit};
use larder_engine::block::node::queue::{Config, Queue};
use larder_engine::block::node::record::RecordedQueue;
use larder_format::block::write_log::pieces;
use larder_policy::block::BlockKind;
use larder_runtime::{AlignedBuf, Batch, FileDone, FileOp, FileQueue, Payload, Pile, RingChoice};
use mio::event::Event;
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};

use super::shard::{Daemon, Load};
use super::{Core, locked};
pub(super) use bytes::{aligned, crcs};
use carrier::{Carrier, FlashJob};
use client::Client;

use larder_volume::TOKENS;

use super::service::{Answer, Command, Service};
use super::volume::Volume;
use larder_volume::op::{Done, Op};

/// Depth of a worker's queue on the cache device.
const DEPTH: u32 = 256;
/// Threads of that queue where io_uring cannot be had.
const THREADS: u32 = 8;

/// One worker's requests through the cache.
pub struct Cached {
    cache: Arc<Core>,
    me: usize,
    first_token: usize,
    queue: RecordedQueue<Daemon>,
    io: Carrier,
    /// Requests of which something may be asked of the cache device or a store, and is not started yet.
    piled: Pile,
    /// When the write log has something to do by time.
    log_wakes: Option<Nanos>,
}

impl Cached {
    /// The service of worker `me`; its descriptors are registered there, from that token on.
    ///
    /// # Errors
    /// When a ring or a descriptor cannot be had.
    pub fn new(
        cache: Arc<Core>,
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
        watch(cache.mailboxes[me].event.as_raw_fd(), first_token + 1)?;
        let config = Config::new(&cache.layout, cache.placing, cache.config.readahead.0);
        let at_once = choice == RingChoice::Caller;
        let io = Carrier::new(cache.clone(), registry, first_token + 2, flash, at_once);
        let mut queue = RecordedQueue::new(Queue::new(me, config));
        if let Some(tape) = cache.queue_tape(me) {
            queue.record(tape);
        }
        Ok(Cached { cache, me, first_token, queue, io, piled: Pile::default(), log_wakes: None })
    }

    /// [`Service::submit`] of a program that knows what the range holds: admission need not find out. (Of what is cached it
    /// is not kept: there metadata is what the [detector](larder_policy::block) takes for it.)
    pub fn submit_tagged(
        &mut self,
        volume: &Arc<Volume>,
        ticket: u64,
        command: Command,
        holds: BlockKind,
    ) {
        let mut ticket = Client::new(ticket, None);
        let op = match command {
            Command::Read { offset: at, buf } => {
                let len = buf.len() as u64;
                ticket.buf = Some(buf);
                Asked::Read { at, len }
            }
            Command::Write { offset: at, buf, fua } => {
                let len = buf.len() as u64;
                Asked::Write { at, len, bytes: Payload::new(buf), fua }
            }
            Command::Flush => Asked::Flush,
            Command::Trim { offset: at, len, fua } => Asked::Trim { at, len: len.into(), fua },
            Command::WriteZeroes { offset: at, len, fua, may_punch, fast } => {
                Asked::Zero { at, len: len.into(), fua, may_punch, fast }
            }
            Command::Advise { offset: at, len } => Asked::Advise { at, len: len.into() },
            Command::Status { offset: at, len, one } => Asked::Status { at, len: len.into(), one },
        };
        let volume = self.io.known(volume);
        // What changes a volume that writes back goes to the log: all of a turn together.
        let logged = matches!(op, Asked::Write { .. } | Asked::Trim { .. } | Asked::Zero { .. })
            && volume.writes_back();
        let submit = Submit { volume, ticket, op, holds };
        self.queue.submit(&*self.cache, self.cache.now(), &mut self.io, submit);
        // Who does all I/O on its own thread says when that is.
        if !logged && !self.io.by_hand && self.piled.is_full(Batch::BLOCKS.submit) {
            self.flush(Instant::now());
        }
    }

    fn flash_done(&mut self, FileDone { token, op, result }: FileDone) {
        let (cache, now) = (&*self.cache, self.cache.now());
        #[cfg(test)]
        let result = cache.faults.of(&op, result);
        let line_bytes = cache.layout.line as usize;
        match (self.io.flash_jobs.try_remove(token as usize), op) {
            (Some(FlashJob::Read { io, line }), FileOp::Read { buf, .. }) => match result {
                Ok(()) => {
                    let crcs = crcs(&buf, line_bytes);
                    let bytes = self.io.spare.share(buf);
                    self.queue.flash_read(cache, now, io, line, Ok((&crcs, bytes)));
                }
                Err(e) => {
                    let failed = cache.flash_failed("read", &e);
                    self.queue.flash_read(cache, now, io, line, Err(failed));
                }
            },
            (Some(FlashJob::Load(Load { shard, io, page })), op) => {
                let io = larder_engine::block::node::event::ShardIo { shard, io };
                cache.page_read(shard, page, (op, result), |slots| {
                    self.queue.page_loaded(cache, now, io, slots);
                });
            }
            (Some(FlashJob::MergeRead { io, merge, bytes }), FileOp::Read { mut buf, .. })
                if result.is_ok() =>
            {
                let before = crc32c::crc32c(&buf);
                let first = (merge.at - merge.line.0 * line_bytes as u64) as usize;
                buf[first..first + bytes.len()].copy_from_slice(&bytes);
                let sums = (before, crc32c::crc32c(&buf));
                let job = FlashJob::MergeWrite { io, sums };
                self.io.write(job, io.shard, merge.to, Payload::new(buf));
            }
            (Some(FlashJob::MergeRead { io, .. } | FlashJob::MergeWrite { io, .. }), op)
                if result.is_err() =>
            {
                if let Err(e) = result {
                    let what = if matches!(op, FileOp::Read { .. }) { "read" } else { "write" };
                    let failed = cache.flash_failed(what, &e);
                    self.queue.merged(cache, now, io, Err(failed));
                }
            }
            (Some(FlashJob::MergeWrite { io, sums }), _) => {
                self.queue.merged(cache, now, io, Ok(sums));
            }
            (Some(FlashJob::Write { io, bytes }), _) => match result {
                Ok(()) => {
                    let crcs = crcs(&bytes, line_bytes);
                    self.queue.flash_written(cache, now, io, Ok(&crcs));
                }
                Err(e) => {
                    let failed = cache.flash_failed("write", &e);
                    self.queue.flash_written(cache, now, io, Err(failed));
                }
            },
            (Some(FlashJob::LogWrite(batch)), op) => {
                if let FileOp::Write { data, .. } = op {
                    data.into_buf().into_iter().for_each(|buf| self.io.batches.give(buf));
                }
                let done = result.map_err(|e| cache.flash_failed("write the log", &e)).is_ok();
                self.queue.log_written(cache, now, &mut self.io, batch, done);
            }
            (Some(FlashJob::LogFlush(covers)), _) => {
                let done = result.map_err(|e| cache.flash_failed("flush the log", &e)).is_ok();
                self.queue.log_flushed(cache, now, &mut self.io, covers, done);
            }
            (Some(FlashJob::LogRead { io, from, len }), FileOp::Read { buf, .. }) => {
                let read = result.map_err(|e| cache.flash_failed("read the log", &e)).ok();
                let bytes = read.map(|()| self.io.spare.share(buf).part(from, len));
                let sums = bytes.as_deref().map(|bytes| pieces::sums(bytes).collect::<Vec<_>>());
                let read = sums.as_deref().zip(bytes);
                self.queue.log_read(cache, now, &mut self.io, io, read);
            }
            _ => {}
        }
    }

    /// What the write log has by time.
    fn log_due(&mut self) {
        if self.cache.back.get().is_some() {
            let now = self.cache.now();
            self.log_wakes = self.queue.log_due(&*self.cache, now, &mut self.io);
        }
    }

    fn store_done(&mut self, Done { token, op, outcome }: Done) {
        let (cache, now) = (&*self.cache, self.cache.now());
        let (queue, job) = (&mut self.queue, JobId(token as u32));
        match op {
            Op::Read { buf, .. } => {
                let read = outcome.map(|_| self.io.spare.share(buf));
                queue.store_read(cache, now, &mut self.io, job, read);
            }
            op => {
                // The queue has the bytes of a write: it is to be the last who has.
                drop(op);
                queue.store_changed(cache, now, &mut self.io, job, outcome);
            }
        }
    }

    /// Whether a request has ended that was not taken yet.
    pub(super) fn has_answers(&self) -> bool {
        !self.io.ended.is_empty()
    }

    /// Nothing is under way for anybody, and no answer was left.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_idle()
            && self.io.is_idle()
            && locked(&self.cache.mailboxes[self.me].inbox).is_empty()
    }

    /// Buffers of writes that were still needed when those ended, and may be still.
    #[cfg(test)]
    pub(super) fn deferred(&self) -> usize {
        self.io.deferred.len()
    }

    /// Does all there is to do now, mail included. For a cache without threads, whose I/O is over when it is asked for. Returns whether there was
    /// something.
    pub(super) fn step(&mut self) -> bool {
        let mail = !locked(&self.cache.mailboxes[self.me].inbox).is_empty();
        self.queue.take_mail(&*self.cache);
        self.io.let_go();
        self.queue.tick(&*self.cache, self.cache.now(), &mut self.io);
        let did = self.turn();
        did || mail
    }

    /// Returns whether something has ended or begun.
    fn turn(&mut self) -> bool {
        let mut did = false;
        self.queue.tell(&*self.cache, &mut self.io);
        self.log_due();
        loop {
            let mut any = false;
            if !self.queue.is_settled() {
                did = true;
                self.queue.turn(&*self.cache, self.cache.now(), &mut self.io);
            }
            while let Some(done) = self.io.flash.pop() {
                any = true;
                self.flash_done(done);
            }
            for at in 0..self.io.sessions.len() {
                while let Some(done) = self.io.pop_session(at) {
                    any = true;
                    if let (Err(failure), Some(volume)) = (&done.outcome, self.io.volume_of(at)) {
                        volume.health().failed(volume.name(), failure, Instant::now());
                    }
                    self.store_done(done);
                }
            }
            while let Some(done) = self.io.at_once.pop_front() {
                any = true;
                self.store_done(done);
            }
            did |= any;
            if !any && self.queue.is_settled() {
                if did {
                    self.log_due();
                }
                if !self.queue.is_settled() {
                    continue;
                }
                return did;
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
                let _ = rustix::io::read(self.cache.mailboxes[self.me].event.as_fd(), &mut count);
                self.queue.take_mail(&*self.cache);
            }
            at => {
                if let Some(Some(session)) = self.io.sessions.get_mut((at - 2) / TOKENS) {
                    session.ready((at - 2) % TOKENS, event, now);
                }
            }
        }
        self.turn();
    }

    fn flush(&mut self, now: Instant) {
        self.io.let_go();
        self.queue.tick(&*self.cache, self.cache.now(), &mut self.io);
        for session in self.io.sessions.iter_mut().flatten() {
            if session.wake_at().is_some_and(|when| when <= now) {
                session.turn(now);
            }
        }
        self.turn();
        self.piled.clear();
        self.io.start(now);
    }

    fn pop(&mut self) -> Option<Answer> {
        if self.io.ended.is_empty() {
            self.turn();
        }
        self.io.ended.pop_front()
    }

    fn lend(&mut self) {
        self.io.lends = true;
    }

    fn rest(&mut self) -> usize {
        self.io.spare.rest() + self.io.batches.rest()
    }

    fn spent(&mut self) -> Option<AlignedBuf> {
        self.io.deferred.pop()
    }

    fn wake_at(&self) -> Option<Instant> {
        let sessions = self.io.sessions.iter().flatten().filter_map(|s| s.wake_at());
        let log = self.log_wakes.and_then(|at| self.cache.instant(at));
        sessions.chain(log).min()
    }
}
