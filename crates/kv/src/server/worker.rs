//! A worker: one thread, one poll, one ring of flash reads, and the connections dealt to it, which it never gives away.
//!
//! A turn of its loop: wait; take what is ready (read a connection once, execute what came, leave its answers in its
//! buffer); start the flash reads of the whole turn with one system call; publish the counters; send the answers. Of
//! many flash reads some are started, and of many that have ended some are answered, before the others are looked at ([`Batch`]). A
//! request alone on its connection costs three system calls: `epoll_wait`, `read`, `write`.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::{Nanos, Now};
use larder_engine::kv::api::FlashRead;
use larder_net::stream::{Received, Stream};
use larder_runtime::{Batch, Pile, ReadRing};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use tracing::{debug, info, warn};

use super::admin::WorkerAdmin;
use super::listener::NewConn;
use super::shared::{ConnInfo, ConnState, Shared, lock};
use super::store::{Span, Store};
use crate::connection::{ConnContext, ConnStats, Connection, Progress, ReadToken, SideEffects};
use crate::watch::{Ending, Lines, Peer, Watch, Watcher};

/// The waker's token in the poll.
pub(super) const WAKE: Token = Token(usize::MAX);
/// The ring's token in the poll.
const RING: Token = Token(usize::MAX - 1);
/// Reads of one connection's socket in one turn, before the others have theirs.
const READS_PER_TURN: u32 = 4;
/// Turns of a worker's connections after which the next that reads is timed.
const SAMPLE: u32 = 64;
/// How often idle and stalled connections are looked for.
const SCAN: Nanos = Nanos::from_secs(1);
/// The same while requests wait for the budget of large bodies.
const SCAN_WHILE_WAITING: Nanos = Nanos::from_millis(200);
/// How long a closing connection may take to read its last answers.
const LINGER: Nanos = Nanos::from_secs(10);
/// How long a stopping server waits for requests that have begun.
const DRAIN: Nanos = Nanos::from_secs(5);
/// Slices of processor time that a worker asks for. The kernel's own, of one to three milliseconds, are how long a request
/// waits where there are more threads than processors and another worker is at its turn.
const SLICE: Duration = Duration::from_micros(400);
/// A worker that has run for this long yields: slices end at the kernel's next tick only, up to four milliseconds later.
/// Costs a system call in this time at most; meanwhile requests gather, and the next turn serves more of them at once.
const YIELD_AFTER: Nanos = Nanos(30_000);
/// A poll that took this long has slept.
const SLEPT: Nanos = Nanos(10_000);
/// A warning that clients can bring about is not repeated before.
const SAID_AGAIN: Nanos = Nanos::from_secs(10);
/// The ring is looked at when nothing has been heard of reads under way for this long.
const OVERDUE: Nanos = Nanos(ReadRing::OVERDUE.as_nanos() as u64);
/// Connections that wait for memory, or for room in the cache, are tried again after this.
const MEMORY_RETRY: Duration = Duration::from_millis(1);

struct Conn<R> {
    stream: Stream,
    proto: Connection<R>,
    info: Arc<ConnInfo>,
    /// The poll has said that there is something to read, and no read has found the end of it.
    readable: bool,
    /// The socket takes no more; the poll will tell.
    blocked: bool,
    /// The poll watches for the socket to take more.
    wants_writable: bool,
    /// The poll has said that the peer sends no more: then a short read is not the last one, since the end of the
    /// stream came with the same edge.
    hung_up: bool,
    /// The peer sends no more, and all of it has been read.
    ended: bool,
    /// To be closed once its answers are sent; since when.
    closing: Option<Nanos>,
    /// The connection stopped parsing because of what is unsent.
    output_full: bool,
    /// In the list of connections to be flushed at the end of the turn.
    dirty: bool,
    /// In the list of connections that go on in the next turn.
    again: bool,
    /// In the list of connections that wait for memory.
    starved: bool,
    /// Its buffers have been given back.
    shrunk: bool,
    /// Flash reads under way.
    outstanding: u32,
    last_active: Nanos,
    /// When it came, until TLS is agreed upon.
    handshake: Option<Nanos>,
    /// Start of the request that is being timed.
    timed: Option<Nanos>,
    timed_flash: bool,
    /// It is told what happens.
    watcher: Option<Arc<Watcher>>,
}

struct Slot<R> {
    /// Counts the connections that have had this slot: a completion for an earlier one is told apart.
    life: u32,
    conn: Option<Box<Conn<R>>>,
}

/// Whom a flash read is for.
enum Reader {
    Request {
        slot: usize,
        life: u32,
        token: ReadToken,
    },
    Verify(FlashRead),
    /// Free entry of the table.
    Nobody,
}

pub(super) struct Worker<S: Store> {
    index: usize,
    store: Arc<S>,
    shared: Arc<Shared>,
    poll: Poll,
    ring: Option<ReadRing>,
    slots: Vec<Slot<S::Read>>,
    free: Vec<usize>,
    stats: ConnStats,
    reads: Vec<(ReadToken, S::Read)>,
    side: SideEffects,
    admin: WorkerAdmin<S>,
    readers: Vec<Reader>,
    free_readers: Vec<usize>,
    /// Reads are under way, and when the ring is looked at if nothing is heard of them.
    reading: bool,
    next_look: Nanos,
    /// Reads that the ring had no room for.
    backlog: VecDeque<(usize, Span)>,
    /// Reads that could not even be asked for.
    failed: Vec<usize>,
    /// Flash reads that were asked for since any were started.
    asked: Pile,
    /// Flash reads that have ended since answers were last sent.
    ended: Pile,
    dirty: Vec<usize>,
    again: Vec<usize>,
    starved: Vec<usize>,
    now: Now,
    next_scan: Nanos,
    scan_needed: bool,
    sample: u32,
    /// Until then no word of clients that speak the binary protocol.
    binary_said: Nanos,
    /// What this turn tells whoever watches.
    lines: Lines,
    /// Connections of this worker that watch.
    watching: Vec<usize>,
    drain_until: Option<Nanos>,
}

impl<S: Store> Worker<S> {
    pub(super) fn new(
        index: usize,
        store: Arc<S>,
        shared: Arc<Shared>,
        poll: Poll,
        ring: Option<ReadRing>,
    ) -> io::Result<Worker<S>> {
        if let Some(ring) = &ring {
            poll.registry().register(&mut SourceFd(&ring.as_raw_fd()), RING, Interest::READABLE)?;
        }
        let now = shared.clock.now();
        Ok(Worker {
            index,
            admin: WorkerAdmin::new(shared.clone(), store.clone(), Some(index)),
            lines: Lines::new(shared.hub.clone()),
            watching: Vec::new(),
            store,
            shared,
            poll,
            ring,
            reading: false,
            next_look: Nanos::ZERO,
            slots: Vec::new(),
            free: Vec::new(),
            stats: ConnStats::default(),
            reads: Vec::new(),
            side: SideEffects::default(),
            readers: Vec::new(),
            free_readers: Vec::new(),
            backlog: VecDeque::new(),
            failed: Vec::new(),
            asked: Pile::default(),
            ended: Pile::default(),
            dirty: Vec::new(),
            again: Vec::new(),
            starved: Vec::new(),
            now,
            next_scan: now.mono + SCAN,
            scan_needed: false,
            sample: 0,
            binary_said: Nanos::ZERO,
            drain_until: None,
        })
    }

    /// Serves until the server stops.
    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(128);
        if let Err(error) = larder_runtime::prefer_slices(SLICE) {
            debug!(%error, "worker {} cannot ask for shorter slices", self.index);
        }
        // When the thread last gave the processor away, waiting or yielding, and when its last turn ended.
        let (mut running_since, mut turn_end) = (self.now.mono, self.now.mono);
        loop {
            if let Err(e) = self.poll.poll(&mut events, self.timeout())
                && e.kind() != ErrorKind::Interrupted
            {
                warn!("worker {} cannot poll: {e}", self.index);
                return;
            }
            self.now = self.shared.clock.now();
            if self.now.mono.saturating_sub(turn_end) >= SLEPT {
                running_since = self.now.mono;
            }
            let mut completions = !self.failed.is_empty();
            for event in &events {
                match event.token() {
                    WAKE => self.take_new(),
                    RING => completions = true,
                    Token(slot) => {
                        if let Some(conn) = self.slots.get_mut(slot).and_then(|s| s.conn.as_mut()) {
                            // An error or a hang-up is found by the read or the write that it fails.
                            conn.hung_up |= event.is_read_closed();
                            conn.readable |=
                                event.is_readable() || event.is_error() || event.is_read_closed();
                            if event.is_writable() || event.is_write_closed() || event.is_error() {
                                conn.blocked = false;
                                self.mark_dirty(slot);
                            }
                            self.advance(slot);
                        }
                    }
                }
            }
            if completions || self.finds_overdue() {
                self.take_completions();
            }
            for list in [std::mem::take(&mut self.again), std::mem::take(&mut self.starved)] {
                for slot in list {
                    if let Some(conn) = self.slots[slot].conn.as_mut() {
                        conn.again = false;
                        conn.starved = false;
                        self.advance(slot);
                    }
                }
            }
            self.start_reads();
            let reading = self.ring.as_ref().is_some_and(|ring| ring.in_flight() > 0);
            if reading && !self.reading {
                self.next_look = self.now.mono + OVERDUE;
            }
            self.reading = reading;
            if self.side.wake_cleaner {
                self.side.wake_cleaner = false;
                self.store.wake_cleaner();
            }
            self.tell_watchers();
            self.send_answers();
            if self.scan_needed && self.now.mono >= self.next_scan {
                self.scan();
            }
            if !self.lines.is_empty() {
                // Connections have ended since.
                self.tell_watchers();
                self.send_answers();
            }
            if self.shared.stopping() && self.drained() {
                break;
            }
            turn_end = self.shared.clock.now().mono;
            if turn_end.saturating_sub(running_since) >= YIELD_AFTER {
                std::thread::yield_now();
                turn_end = self.shared.clock.now().mono;
                running_since = turn_end;
            }
        }
        for slot in 0..self.slots.len() {
            self.close(slot);
        }
        lock(&self.shared.workers[self.index].stats).clone_from(&self.stats);
    }

    /// Publishes the counters and sends what is due.
    fn send_answers(&mut self) {
        if self.dirty.is_empty() {
            return;
        }
        // Before any answer goes out: whoever has seen an answer finds it counted.
        lock(&self.shared.workers[self.index].stats).clone_from(&self.stats);
        let dirty = std::mem::take(&mut self.dirty);
        for &slot in &dirty {
            self.flush(slot);
        }
        // The list's memory is kept; what flushing added in the meantime is none.
        if self.dirty.is_empty() {
            self.dirty = dirty;
            self.dirty.clear();
        }
    }

    /// Hands out what this turn has to tell, and sends what this worker's watchers have been told, if they took all before.
    fn tell_watchers(&mut self) {
        if !self.lines.is_empty() {
            let (shared, own) = (&self.shared, self.index);
            self.lines.publish(|worker| {
                if worker != own {
                    shared.wake(worker);
                }
            });
        }
        for i in 0..self.watching.len() {
            let slot = self.watching[i];
            if let Some(conn) = self.slots[slot].conn.as_mut()
                && let Some(watcher) = &conn.watcher
                && conn.proto.output().is_empty()
            {
                let lines = watcher.take();
                if !lines.is_empty() {
                    conn.proto.tell(&lines);
                    self.mark_dirty(slot);
                }
            }
        }
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.again.is_empty() || !self.failed.is_empty() {
            return Some(Duration::ZERO);
        }
        if !self.starved.is_empty() {
            return Some(MEMORY_RETRY);
        }
        if self.drain_until.is_some() {
            return Some(Duration::from_millis(20));
        }
        let scan = self.scan_needed.then_some(self.next_scan);
        let look = self.reading.then_some(self.next_look);
        let next = scan.into_iter().chain(look).min()?;
        Some(Duration::from_nanos(next.saturating_sub(self.now.mono).0.max(1_000_000)))
    }

    fn take_new(&mut self) {
        loop {
            // The lock is let go before the connection is set up.
            let next = lock(&self.shared.workers[self.index].queue).pop_front();
            let Some(NewConn { mut stream, info }) = next else { return };
            let slot = self.free.pop().unwrap_or_else(|| {
                self.slots.push(Slot { life: 0, conn: None });
                self.slots.len() - 1
            });
            let reads = Interest::READABLE;
            if let Err(e) = self.poll.registry().register(stream.source(), Token(slot), reads) {
                warn!("a connection from {} cannot be polled: {e}", info.peer);
                self.free.push(slot);
                self.shared.remove_connection(&info);
                drop(stream);
                self.shared.connection_closed();
                continue;
            }
            debug!("connection {} from {}", info.fd, info.peer);
            if self.lines.any() {
                self.lines.came(self.now, &Peer { text: &info.peer }, info.fd);
            }
            self.scan_needed = true;
            self.slots[slot].conn = Some(Box::new(Conn {
                handshake: stream.is_handshaking().then_some(self.now.mono),
                stream,
                proto: Connection::new(&self.shared.protocol, self.shared.big.clone()),
                info,
                readable: false,
                blocked: false,
                wants_writable: false,
                hung_up: false,
                ended: false,
                closing: None,
                output_full: false,
                dirty: false,
                again: false,
                starved: false,
                shrunk: true,
                outstanding: 0,
                last_active: self.now.mono,
                timed: None,
                timed_flash: false,
                watcher: None,
            }));
        }
    }

    fn mark_dirty(&mut self, slot: usize) {
        if let Some(conn) = self.slots[slot].conn.as_mut()
            && !conn.dirty
        {
            conn.dirty = true;
            self.dirty.push(slot);
        }
    }

    fn go_on_later(&mut self, slot: usize) {
        if let Some(conn) = self.slots[slot].conn.as_mut()
            && !conn.again
        {
            conn.again = true;
            self.again.push(slot);
        }
    }

    /// Reads what there is and executes it, until something is missing or the connection has had its turn.
    fn advance(&mut self, slot: usize) {
        let Some(conn) = self.slots[slot].conn.as_mut() else { return };
        if conn.closing.is_some() {
            self.mark_dirty(slot);
            return;
        }
        conn.last_active = self.now.mono;
        conn.shrunk = false;
        self.scan_needed = true;
        self.sample = self.sample.saturating_add(1);
        // Not "each 64th turn, if it can be timed": where a request takes two turns, the 64th would always be the second.
        if self.sample >= SAMPLE && conn.timed.is_none() && conn.readable {
            self.sample = 0;
            conn.timed = Some(self.shared.clock.now().mono);
            conn.timed_flash = false;
        }
        let mut reads = 0;
        let closing = loop {
            // Fetched anew each time round: asking for flash reads needs the whole worker in between.
            let Some(conn) = self.slots[slot].conn.as_mut() else { return };
            if conn.readable && conn.proto.wants_input() && !conn.ended {
                if reads == READS_PER_TURN {
                    self.shared.counters.yields.fetch_add(1, Ordering::Relaxed);
                    self.go_on_later(slot);
                    break false;
                }
                reads += 1;
                let received = match conn.stream.read(conn.proto.space()) {
                    Ok(Received::Some(n)) => n,
                    Ok(Received::Last(n)) => {
                        conn.readable = conn.hung_up && n > 0;
                        n
                    }
                    Ok(Received::End) => {
                        conn.readable = false;
                        conn.ended = true;
                        0
                    }
                    Err(e) => {
                        if e.kind() == ErrorKind::InvalidData {
                            self.shared.counters.tls_errors.fetch_add(1, Ordering::Relaxed);
                        }
                        debug!("connection {}: {e}", conn.info.fd);
                        self.close(slot);
                        return;
                    }
                };
                if received > 0 {
                    self.stats.bytes_read += received as u64;
                    conn.proto.received(received, self.now);
                    conn.info.touch((self.now.mono.0 / 1_000_000_000) as u32);
                    conn.info.set_state(ConnState::Parse);
                }
                if conn.stream.wants_write() && !conn.dirty {
                    // A handshake message that the socket did not take at once.
                    conn.dirty = true;
                    self.dirty.push(slot);
                }
            }
            let mut ctx = ConnContext {
                config: &self.shared.protocol,
                stats: &mut self.stats,
                reads: &mut self.reads,
                side: &mut self.side,
                admin: &mut self.admin,
                detail: self.shared.detail.load(Ordering::Relaxed),
                app: conn.info.app,
                watch: self
                    .lines
                    .any()
                    .then_some(Watch { lines: &mut self.lines, fd: conn.info.fd }),
            };
            let binary = ctx.stats.binary_refused;
            let progress = conn.proto.process(self.now, &*self.store, &mut ctx);
            if self.stats.binary_refused > binary && self.now.mono >= self.binary_said {
                self.binary_said = self.now.mono + SAID_AGAIN;
                let (peer, once) = (
                    &conn.info.peer,
                    "(said at most once in ten seconds; stats larder counts them)",
                );
                if self.shared.protocol.binary_only {
                    warn!(
                        "a connection from {peer} was told that the binary protocol is not spoken, and closed {once}: \
                         start without -B binary to serve it"
                    );
                } else {
                    warn!(
                        "a connection from {peer} began in the binary protocol, which is not spoken: closed {once}. Set \
                         the client to the text protocol"
                    );
                }
            }
            if let Some(watcher) = self.admin.take_watcher() {
                conn.watcher = Some(watcher);
                self.watching.push(slot);
            }
            conn.output_full = progress == Progress::OutputFull;
            conn.outstanding += self.reads.len() as u32;
            conn.timed_flash |= !self.reads.is_empty();
            let mut closing = false;
            let mut once_more = false;
            let state = match progress {
                Progress::NeedInput if conn.ended => {
                    // A partial command will never be completed; reads under way are still answered.
                    closing = conn.outstanding == 0;
                    ConnState::Read
                }
                Progress::NeedInput if conn.readable => {
                    once_more = true;
                    ConnState::Parse
                }
                Progress::NeedInput if conn.proto.state_name() == "conn_nread" => ConnState::Body,
                Progress::NeedInput => ConnState::Read,
                Progress::OutputFull => ConnState::Write,
                Progress::WaitingForFlash => ConnState::Wait,
                Progress::WaitingForMemory | Progress::WaitingForRoom => {
                    if !conn.starved {
                        conn.starved = true;
                        self.starved.push(slot);
                    }
                    ConnState::Wait
                }
                Progress::Close => {
                    closing = true;
                    ConnState::Write
                }
                Progress::Shutdown { graceful } => {
                    debug!("a client asked for shutdown (graceful: {graceful})");
                    (self.shared.on_shutdown)();
                    closing = true;
                    ConnState::Write
                }
            };
            conn.info.set_state(state);
            if !self.reads.is_empty() {
                let life = self.slots[slot].life;
                self.queue_reads(slot, life);
            }
            if !once_more {
                break closing;
            }
        };
        let Some(conn) = self.slots[slot].conn.as_mut() else { return };
        if closing && conn.closing.is_none() {
            conn.closing = Some(self.now.mono);
        }
        if conn.closing.is_some() || !conn.proto.output().is_empty() {
            self.mark_dirty(slot);
        } else if conn.outstanding == 0 && !conn.starved {
            // No answer is due (noreply), or the rest of the request is still to come: what passes now is the client's
            // time, not the server's.
            conn.timed = None;
        }
    }

    /// Gives the reads that a connection asked for a place in the table and puts them into the ring.
    fn queue_reads(&mut self, slot: usize, life: u32) {
        let mut reads = std::mem::take(&mut self.reads);
        for (token, read) in reads.drain(..) {
            let span = self.store.span(&read);
            let key = self.reader(Reader::Request { slot, life, token });
            self.submit(key, span);
        }
        self.reads = reads;
    }

    fn reader(&mut self, reader: Reader) -> usize {
        match self.free_readers.pop() {
            Some(key) => {
                self.readers[key] = reader;
                key
            }
            None => {
                self.readers.push(reader);
                self.readers.len() - 1
            }
        }
    }

    fn submit(&mut self, key: usize, span: Span) {
        match &mut self.ring {
            // Those that came first go first.
            Some(ring) if self.backlog.is_empty() => {
                if ring.submit(key as u64, span.offset, span.len).is_err() {
                    self.backlog.push_back((key, span));
                } else if self.asked.is_full(Batch::OBJECTS.submit) {
                    ring.flush();
                }
            }
            Some(_) => self.backlog.push_back((key, span)),
            None => self.failed.push(key),
        }
    }

    fn start_reads(&mut self) {
        let Some(ring) = &mut self.ring else {
            for read in std::mem::take(&mut self.side.verifies) {
                self.store.verify(self.now, &read, None);
            }
            return;
        };
        while let Some((key, span)) = self.backlog.front() {
            if ring.submit(*key as u64, span.offset, span.len).is_err() {
                break;
            }
            self.backlog.pop_front();
        }
        // Requests go first; the engine bounds how many verifications wait behind them.
        let mut waiting = std::mem::take(&mut self.side.verifies);
        while self.backlog.is_empty()
            && let Some(read) = waiting.last()
        {
            let span = self.store.verify_span(read);
            let key = self.reader(Reader::Verify(*read));
            let full = match &mut self.ring {
                Some(ring) => ring.submit(key as u64, span.offset, span.len).is_err(),
                None => true,
            };
            if full {
                self.readers[key] = Reader::Nobody;
                self.free_readers.push(key);
                break;
            }
            waiting.pop();
        }
        self.side.verifies = waiting;
        self.asked.clear();
        if let Some(ring) = &mut self.ring {
            ring.flush();
        }
    }

    /// Looks at the ring when nothing was heard of reads for long. Returns whether something has ended unheard.
    fn finds_overdue(&mut self) -> bool {
        if !self.reading || self.now.mono < self.next_look {
            return false;
        }
        self.next_look = self.now.mono + OVERDUE;
        let found = self.ring.as_mut().is_some_and(ReadRing::look);
        self.shared.counters.signals_lost.fetch_add(u64::from(found), Ordering::Relaxed);
        found
    }

    fn take_completions(&mut self) {
        self.next_look = self.now.mono + OVERDUE;
        for key in std::mem::take(&mut self.failed) {
            self.completed(key, None);
        }
        // One at a time: completing a request may ask for the next candidate, which needs the ring.
        while let Some(done) = self.ring.as_mut().and_then(ReadRing::pop) {
            let key = done.token() as usize;
            match done.bytes() {
                Ok(bytes) => self.completed(key, Some(bytes)),
                Err(e) => {
                    self.shared.counters.read_errors.fetch_add(1, Ordering::Relaxed);
                    self.store.read_failed(e);
                    self.completed(key, None);
                }
            }
            if let Some(ring) = &mut self.ring {
                ring.recycle(done);
            }
            if self.ended.is_full(Batch::OBJECTS.send) {
                self.tell_watchers();
                self.send_answers();
            }
        }
        self.ended.clear();
    }

    fn completed(&mut self, key: usize, bytes: Option<&[u8]>) {
        let Some(entry) = self.readers.get_mut(key) else { return };
        let reader = std::mem::replace(entry, Reader::Nobody);
        match reader {
            Reader::Nobody => return,
            Reader::Verify(read) => self.store.verify(self.now, &read, bytes),
            Reader::Request { slot, life, token } => {
                if self.slots[slot].life == life
                    && let Some(conn) = self.slots[slot].conn.as_mut()
                {
                    conn.outstanding -= 1;
                    let mut ctx = ConnContext {
                        config: &self.shared.protocol,
                        stats: &mut self.stats,
                        reads: &mut self.reads,
                        side: &mut self.side,
                        admin: &mut self.admin,
                        detail: self.shared.detail.load(Ordering::Relaxed),
                        app: conn.info.app,
                        watch: self
                            .lines
                            .any()
                            .then_some(Watch { lines: &mut self.lines, fd: conn.info.fd }),
                    };
                    conn.proto.flash_done(self.now, &*self.store, &mut ctx, token, bytes);
                    if !self.reads.is_empty() {
                        conn.outstanding += self.reads.len() as u32;
                        self.queue_reads(slot, life);
                    }
                    self.advance(slot);
                }
            }
        }
        self.free_readers.push(key);
    }

    /// Sends what is to be sent, and closes the connection if that was the last of it.
    fn flush(&mut self, slot: usize) {
        let Some(conn) = self.slots[slot].conn.as_mut() else { return };
        conn.dirty = false;
        if conn.blocked {
            return;
        }
        let result = loop {
            let output = conn.proto.output();
            if output.is_empty() {
                break conn.stream.flush();
            }
            let len = output.len();
            match conn.stream.write(output) {
                Ok(n) => {
                    self.stats.bytes_written += n as u64;
                    conn.proto.sent(n, self.now);
                    // A short write means a full socket: no second call to be told so. TLS has taken what it may hold, and says
                    // itself when the socket is full.
                    if n < len && conn.stream.is_plain() {
                        break Err(ErrorKind::WouldBlock.into());
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => break Err(e),
            }
        };
        let registry = self.poll.registry();
        match result {
            Ok(()) => {
                if conn.wants_writable {
                    conn.wants_writable = false;
                    let reads = Interest::READABLE;
                    if registry.reregister(conn.stream.source(), Token(slot), reads).is_err() {
                        self.close(slot);
                        return;
                    }
                }
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {
                conn.blocked = true;
                conn.wants_writable = true;
                conn.info.set_state(ConnState::Write);
                // Set anew also when it was set before: that makes the poll look again, so no edge can be missed
                // between the write and here.
                let both = Interest::READABLE | Interest::WRITABLE;
                if registry.reregister(conn.stream.source(), Token(slot), both).is_err() {
                    self.close(slot);
                    return;
                }
            }
            Err(e) => {
                debug!("connection {}: {e}", conn.info.fd);
                self.close(slot);
                return;
            }
        }
        let Some(conn) = self.slots[slot].conn.as_mut() else { return };
        let sent_all = conn.proto.output().is_empty() && !conn.stream.wants_write();
        if sent_all && conn.outstanding == 0 {
            if let Some(start) = conn.timed.take() {
                let took = self.shared.clock.now().mono.saturating_sub(start).0;
                lock(&self.shared.workers[self.index].latency).record(took, conn.timed_flash);
            }
            if conn.closing.is_some() {
                self.close(slot);
                return;
            }
        }
        if sent_all && conn.watcher.as_ref().is_some_and(|watcher| watcher.has_lines()) {
            // What came while it took the last ones.
            self.go_on_later(slot);
            return;
        }
        if conn.output_full && conn.proto.output().len() < crate::connection::SMALL {
            conn.output_full = false;
            self.shared.counters.yields.fetch_add(1, Ordering::Relaxed);
            self.go_on_later(slot);
        }
    }

    fn close(&mut self, slot: usize) {
        let Some(conn) = &self.slots[slot].conn else { return };
        let why = match () {
            () if conn.ended || conn.proto.has_quit() => Ending::Normal,
            () if self.shared.stopping() => Ending::Shutdown,
            () => Ending::Error,
        };
        self.close_as(slot, why);
    }

    fn close_as(&mut self, slot: usize, why: Ending) {
        let entry = &mut self.slots[slot];
        let Some(mut conn) = entry.conn.take() else { return };
        if self.lines.any() {
            self.lines.went(self.now, &Peer { text: &conn.info.peer }, conn.info.fd, why);
        }
        if let Some(watcher) = conn.watcher.take() {
            self.watching.retain(|&watching| watching != slot);
            self.admin.unwatch(&watcher);
        }
        entry.life = entry.life.wrapping_add(1);
        self.free.push(slot);
        conn.stream.close();
        self.poll.registry().deregister(conn.stream.source()).ok();
        // First out of the table, then the descriptor's number may be used again.
        self.shared.remove_connection(&conn.info);
        debug!("connection {} closed", conn.info.fd);
        drop(conn);
        self.shared.connection_closed();
    }

    /// Looks for connections that are idle, stalled or slow to go.
    fn scan(&mut self) {
        self.next_scan = self.now.mono + SCAN;
        let idle_timeout = self.shared.config.idle_timeout.map(|d| Nanos(d.as_nanos() as u64));
        let handshake =
            self.shared.config.tls.as_ref().map(|t| Nanos(t.handshake.as_nanos() as u64));
        let mut unfinished = 0u32;
        let mut needed = false;
        for slot in 0..self.slots.len() {
            let Some(conn) = self.slots[slot].conn.as_mut() else { continue };
            let idle = self.now.mono.saturating_sub(conn.last_active);
            if conn.closing.is_some_and(|since| self.now.mono.saturating_sub(since) >= LINGER) {
                self.close(slot);
                continue;
            }
            if let (Some(since), Some(limit)) = (conn.handshake, handshake) {
                if !conn.stream.is_handshaking() {
                    conn.handshake = None;
                } else if self.now.mono.saturating_sub(since) >= limit {
                    self.shared.counters.tls_errors.fetch_add(1, Ordering::Relaxed);
                    unfinished += 1;
                    self.close(slot);
                    continue;
                }
            }
            if conn.proto.stalled(self.now) {
                self.stats.big_buffer_stalls += 1;
                debug!(
                    "connection {} closed: it held large buffers without progress",
                    conn.info.fd
                );
                self.close(slot);
                continue;
            }
            // Who watches has nothing to say.
            if idle_timeout.is_some_and(|limit| idle > limit) && conn.watcher.is_none() {
                self.shared.counters.idle_kicks.fetch_add(1, Ordering::Relaxed);
                debug!("connection {} closed: idle", conn.info.fd);
                self.close_as(slot, Ending::Idle);
                continue;
            }
            if !conn.shrunk && idle >= SCAN {
                conn.proto.shrink();
                conn.shrunk = true;
            }
            needed |= !conn.shrunk
                || conn.closing.is_some()
                || conn.handshake.is_some()
                || idle_timeout.is_some()
                || conn.proto.busy();
        }
        if unfinished > 0 {
            info!("{unfinished} connections closed: they did not finish TLS's handshake");
        }
        self.scan_needed = needed;
        if needed && self.shared.big.input.waiting() > 0 {
            // Somebody waits for what a stalled sender holds.
            self.next_scan = self.now.mono + SCAN_WHILE_WAITING;
        }
        lock(&self.shared.workers[self.index].stats).clone_from(&self.stats);
    }

    /// While the server stops: connections without a request under way are closed, the others get some time.
    fn drained(&mut self) -> bool {
        self.take_new();
        let until = match self.drain_until {
            Some(until) => until,
            None => {
                // What has already arrived is still served.
                for slot in 0..self.slots.len() {
                    if let Some(conn) = self.slots[slot].conn.as_mut() {
                        conn.readable = true;
                        self.advance(slot);
                        self.flush(slot);
                    }
                }
                self.start_reads();
                *self.drain_until.insert(self.now.mono + DRAIN)
            }
        };
        let mut left = false;
        for slot in 0..self.slots.len() {
            let Some(conn) = self.slots[slot].conn.as_mut() else { continue };
            let done = conn.outstanding == 0
                && conn.proto.output().is_empty()
                && !conn.stream.wants_write()
                && !conn.again
                && !conn.starved;
            if done || self.now.mono >= until {
                self.close(slot);
            } else {
                left = true;
            }
        }
        !left
    }
}
