//! A worker: one thread, one poll, the connections dealt to it, and a service of its own.
//!
//! A turn of its loop: wait; take what is ready (read a connection, hand its requests to the service); start what the
//! service has collected, with one system call for each of its rings; take what has ended; send the replies. Of many
//! requests or replies some are passed on before the others are looked at ([`Batch`]).

use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_base::ByteSize;
use larder_net::stream::{Received, Stream};
use larder_runtime::{AlignedBuf, Batch, BufferPool, Pile};
use mio::{Events, Interest, Poll, Token};
use slab::Slab;
use tracing::level_filters::LevelFilter;
use tracing::{debug, info, trace, warn};

use super::export::{self, Catalogue, Exported};
use super::guests::Guest;
use super::words::{errno, extent};
use super::{Dealt, Shared};
use crate::cache::service::{Answer, Service};
use crate::cache::told::Told;
use crate::cache::volume::Client;
use crate::nbd::server::{Command, Connection, Event, Request};
use crate::nbd::wire::Errno;
use crate::rate_limited::RateLimited;

/// Token of the waker.
pub(super) const WAKE: Token = Token(usize::MAX);
/// The first token for the service; below are the connections.
pub(super) const SERVICE: usize = 1 << 40;
/// Reads of one connection's socket in one turn, before the others have theirs.
const READS_PER_TURN: u32 = 8;
/// Connections that wait for buffers are tried again after this.
const STARVED_RETRY: Duration = Duration::from_millis(5);
/// How often connections are looked for that do not go on.
const SCAN: Duration = Duration::from_secs(1);
/// A connection on which nothing came or went for so long lets go of memory that waits for more.
const REST: Duration = Duration::from_secs(1);
/// A client through whose connection so many bytes have gone is taken to be one that reads what it asks for. More than a socket
/// swallows for one that does not. Bytes.
const PROOF: u64 = 16 << 20;
/// With so many bytes in one [`STRETCH`], 64 KiB a second, a client goes on that keeps memory while others wait for it: with one
/// byte now and then it does not.
const ENOUGH: u64 = (64 << 10) / 5;
const STRETCH: Duration = Duration::from_millis(200);
/// Looks for clients that keep memory in vain, while others wait for it: in the time after which they are closed.
const LOOKS: u32 = 8;
/// So many buffers at a time are given back to the system, which takes it a microsecond each.
const TRIM: usize = 4096;
/// With so many bytes given back, the allocator is asked for what it has beside them.
const FREED: usize = 4 << 20;
/// How long the thread asks to run at a time: short, so that it soon has its turn behind the threads of clients and of stores
/// on this machine. What it has to do in a turn takes less.
const SLICE: Duration = Duration::from_micros(100);
/// How long a stopping server waits for requests that have begun, and a closing connection for its last replies.
const DRAIN: Duration = Duration::from_secs(10);

struct Conn {
    stream: Stream,
    /// Counts it among those of its peer's address.
    _guest: Option<Guest>,
    proto: Connection<Exported>,
    /// The poll has said that there is something to read, and no read has found the end of it.
    readable: bool,
    /// The poll has said that the peer sends no more: then a short read is not the last one, since the end of the
    /// stream came with the same edge.
    hung_up: bool,
    /// The socket takes no more; the poll will tell.
    blocked: bool,
    /// The poll is asked for that. Not all the time: a unix socket says that it is writable whenever its peer has read
    /// something, and that would wake this thread once for every reply.
    watches_room: bool,
    /// TLS begins when the output has been sent.
    starting_tls: bool,
    /// To be closed once its requests are answered and the replies sent; since when.
    closing: Option<Instant>,
    /// In the list of those with something to send.
    dirty: bool,
    /// In the list of those that go on in the next turn.
    again: bool,
    /// In the list of those that wait for buffers.
    starved: bool,
    /// When it came.
    began: Instant,
    /// When a byte last went in or out.
    moved: Instant,
    /// How fast they do.
    pace: Pace,
    /// It has nothing and waits for a long buffer; since when.
    waits: Option<Instant>,
    /// Bytes that came and went since others last had to wait for what it kept.
    passed: u64,
    /// Counts it among its volume's clients, from its first request on.
    client: Option<Client>,
    /// From the end of its handshake on.
    told: Option<Told>,
}

impl Conn {
    /// Whose it is, for the log.
    fn peer(&self) -> String {
        let peer = self.stream.peer();
        peer.map_or_else(|| "a client of a unix socket".into(), |peer| peer.to_string())
    }

    /// It could go on, and keeps what others may want: it reads no replies, or stopped in the middle of a write.
    fn could_go_on(&mut self) -> bool {
        // Room that the poll has told of is not taken yet.
        (self.blocked || self.watches_room) && !self.proto.output().is_empty()
            || self.proto.partial() && self.proto.under_way() == 0 && !self.starved
    }

    /// To be called again and again: whether its bytes move.
    fn look(&mut self, now: Instant) {
        let could = self.could_go_on();
        self.pace.look(now, could);
    }

    /// For how long its client has kept memory without going on, or by a byte now and then.
    fn dawdles(&mut self, now: Instant) -> Option<Duration> {
        self.look(now);
        self.could_go_on().then(|| now.saturating_duration_since(self.pace.went))
    }

    /// Bytes have gone in or out.
    fn passes(&mut self, bytes: usize, now: Instant) {
        self.moved = now;
        self.passed += bytes as u64;
        self.pace.bytes += bytes as u64;
        self.pace.last = now;
    }

    /// Its client, who sends no more, has broken off: all that came has been read, and it does not say goodbye. Whoever wants its
    /// answers does (NBD_CMD_DISC).
    fn left(&mut self) -> bool {
        loop {
            let space = self.proto.space();
            if space.is_empty() {
                // There is more than fits.
                return false;
            }
            match self.stream.read(space) {
                Ok(Received::Some(n) | Received::Last(n)) if n > 0 => self.proto.received(n),
                Ok(Received::Some(_)) => {}
                Ok(Received::Last(_)) => return false,
                // It is read again, and found to have ended.
                Ok(Received::End) | Err(_) => {
                    self.readable = true;
                    return !self.proto.says_goodbye();
                }
            }
        }
    }

    /// Who gets the next long buffer: of those that have nothing, first who is known to read and to finish what it
    /// writes, else who has waited for longest.
    fn rank(&self) -> (bool, bool, Option<Instant>) {
        (self.waits.is_none(), self.passed < PROOF, self.waits)
    }
}

/// Whether bytes go in or out as fast as they must.
struct Pace {
    /// Of the stretch of time that is looked at.
    begun: Instant,
    bytes: u64,
    last: Instant,
    /// When the last of many bytes went, or when it could not go on.
    went: Instant,
}

impl Pace {
    fn new(now: Instant) -> Pace {
        Pace { begun: now, bytes: 0, last: now, went: now }
    }

    fn look(&mut self, now: Instant, could_go_on: bool) {
        if !could_go_on {
            *self = Pace::new(now);
        } else if self.bytes >= ENOUGH {
            *self = Pace { begun: now, bytes: 0, went: self.last, ..*self };
        } else if now.saturating_duration_since(self.begun) >= STRETCH {
            (self.begun, self.bytes) = (now, 0);
        }
    }
}

struct Slot {
    /// Counts the connections that have had this slot: what ends for an earlier one is told apart.
    life: u32,
    conn: Option<Box<Conn>>,
}

/// Whom a request is for, and what its answer needs.
#[derive(Clone, Copy)]
struct Ticket {
    slot: usize,
    life: u32,
    cookie: u64,
    kind: Kind,
    /// Bytes of its buffer.
    held: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    Read { offset: u64 },
    Write,
    Status { len: u32, one: bool },
    Other,
}

pub(super) struct Worker<S> {
    index: usize,
    shared: Arc<Shared>,
    poll: Poll,
    service: S,
    pool: BufferPool,
    slots: Vec<Slot>,
    free: Vec<usize>,
    tickets: Slab<Ticket>,
    /// Answered since replies were last sent.
    answered: Pile,
    dirty: Vec<usize>,
    again: Vec<usize>,
    starved: Vec<usize>,
    /// The next long buffer is this one's.
    first: Option<usize>,
    now: Instant,
    next_scan: Instant,
    next_look: Instant,
    drain_until: Option<Instant>,
    /// It has, or may have, requests under way.
    busy: Option<Busy>,
    /// Bytes that the pool gave back since the allocator was asked.
    freed: usize,
    /// Something was asked since the last scan.
    asked: bool,
    /// When a line was last said about clients that TLS keeps out, and how many were not said since.
    tls_lines: RateLimited,
    /// The same about clients that make way for others.
    way_lines: RateLimited,
}

impl<S: Service> Worker<S> {
    pub(super) fn new(index: usize, shared: Arc<Shared>, poll: Poll, mut service: S) -> Worker<S> {
        service.lend();
        let now = Instant::now();
        Worker {
            index,
            pool: BufferPool::new(shared.config.buffer_bytes),
            busy: Some(Busy::one_of(&shared)),
            shared,
            poll,
            service,
            slots: Vec::new(),
            free: Vec::new(),
            tickets: Slab::new(),
            answered: Pile::default(),
            dirty: Vec::new(),
            again: Vec::new(),
            starved: Vec::new(),
            first: None,
            now,
            next_scan: now + SCAN,
            next_look: now,
            drain_until: None,
            freed: 0,
            asked: false,
            tls_lines: RateLimited::default(),
            way_lines: RateLimited::default(),
        }
    }

    /// Serves until the server stops.
    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(256);
        if let Err(error) = larder_runtime::prefer_slices(SLICE) {
            debug!(%error, "worker {} cannot ask for shorter slices", self.index);
        }
        loop {
            if let Err(e) = self.poll.poll(&mut events, self.timeout())
                && e.kind() != ErrorKind::Interrupted
            {
                warn!("worker {} cannot poll: {e}", self.index);
                break;
            }
            self.turn(&events, Instant::now());
            if self.shared.stopping() && self.drained() {
                break;
            }
        }
        for slot in 0..self.slots.len() {
            self.close(slot);
        }
    }

    /// Does what there is to do, after these events.
    fn turn(&mut self, events: &Events, now: Instant) {
        self.now = now;
        for event in events {
            match event.token() {
                WAKE => self.take_new(),
                Token(token) if token >= SERVICE => self.service.ready(event, self.now),
                Token(slot) => {
                    let Some(conn) = self.slots.get_mut(slot).and_then(|s| s.conn.as_mut()) else {
                        continue;
                    };
                    conn.hung_up |= event.is_read_closed() || event.is_error();
                    conn.readable |= event.is_readable() || conn.hung_up;
                    if event.is_write_closed() || event.is_error() {
                        conn.proto.deafen();
                    }
                    if event.is_writable() || event.is_write_closed() || event.is_error() {
                        conn.blocked = false;
                        mark(&mut self.dirty, &mut conn.dirty, slot);
                    }
                    self.advance(slot);
                }
            }
        }
        self.take_answers();
        for slot in std::mem::take(&mut self.again) {
            if let Some(conn) = self.slots[slot].conn.as_mut() {
                conn.again = false;
                self.advance(slot);
            }
        }
        self.feed();
        // Who has something already leaves it what it waits for.
        let hunger = self.hunger();
        self.pool.set_aside(hunger);
        self.service.flush(self.now);
        // What was there at once, in memory, is answered in the same turn.
        self.take_answers();
        self.send_replies();
        if hunger > 0 && self.now >= self.next_look {
            self.make_room();
        }
        if self.now >= self.next_scan {
            self.scan();
        }
    }

    /// Sends all replies that there are.
    fn send_replies(&mut self) {
        self.answered.clear();
        let mut dirty = std::mem::take(&mut self.dirty);
        for slot in dirty.drain(..) {
            self.send(slot);
        }
        if self.dirty.is_empty() {
            // The list's memory is kept.
            self.dirty = dirty;
        }
    }

    /// Lets connections that wait for buffers try again. The first that gets none is promised the next long one: nobody who asks
    /// for less, or came later, takes it away.
    fn feed(&mut self) {
        let mut starved = std::mem::take(&mut self.starved);
        starved.sort_by_key(|&slot| self.slots[slot].conn.as_ref().map(|conn| conn.rank()));
        self.promise(None);
        for slot in starved {
            let Some(conn) = self.slots[slot].conn.as_mut() else { continue };
            conn.starved = false;
            self.advance(slot);
            let waits = |conn: &Conn| self.pool.could_hold(conn.proto.hungry());
            if self.first.is_none()
                && self.slots[slot].conn.as_ref().is_some_and(|c| c.waits.is_some() && waits(c))
            {
                self.promise(Some(slot));
            }
        }
    }

    /// The next long buffer is that connection's, or whoever's.
    fn promise(&mut self, first: Option<usize>) {
        self.first = first;
        let conn = first.and_then(|slot| self.slots[slot].conn.as_ref());
        self.pool.promise(conn.map_or(0, |conn| conn.proto.hungry()));
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.again.is_empty() || !self.dirty.is_empty() {
            return Some(Duration::ZERO);
        }
        if self.drain_until.is_some() {
            return Some(Duration::from_millis(20));
        }
        let unfinished = self.pool.allocated() > 0 || self.freed > 0 || self.asked;
        let scan = (unfinished || self.free.len() < self.slots.len()).then_some(self.next_scan);
        // Buffers come back at the end of a turn too, when it has tried already.
        let retry = (!self.starved.is_empty()).then(|| Instant::now() + STARVED_RETRY);
        let at = [scan, retry, self.service.wake_at()].into_iter().flatten().min()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    fn take_new(&mut self) {
        loop {
            // The lock is let go before the connection is set up.
            let next = self.shared.workers[self.index].queue.lock().pop_front();
            let Some(mut dealt) = next else { return };
            let counters = &self.shared.counters;
            if counters.connections.load(Ordering::Relaxed) > self.shared.config.connections
                && !self.make_way()
            {
                // Another worker may have one that asks nothing.
                dealt.asked += 1;
                let workers = self.shared.workers.len();
                if dealt.asked < workers && !self.shared.stopping() {
                    self.shared.hand((self.index + 1) % workers, dealt);
                    continue;
                }
                let counters = &self.shared.counters;
                counters.connections.fetch_sub(1, Ordering::Relaxed);
                self.shared.refused("all of them ask something, or have not been there for long");
                continue;
            }
            let Dealt { mut stream, tls, guest, .. } = dealt;
            let slot = self.free.pop().unwrap_or_else(|| {
                self.slots.push(Slot { life: 0, conn: None });
                self.slots.len() - 1
            });
            let reads = Interest::READABLE;
            if let Err(e) = self.poll.registry().register(stream.source(), Token(slot), reads) {
                warn!("a connection cannot be polled: {e}");
                self.free.push(slot);
                self.shared.counters.connections.fetch_sub(1, Ordering::Relaxed);
                continue;
            }
            self.slots[slot].conn = Some(Box::new(Conn {
                proto: Connection::new(tls, self.shared.config.limits),
                stream,
                _guest: guest,
                readable: false,
                hung_up: false,
                blocked: false,
                watches_room: false,
                starting_tls: false,
                closing: None,
                dirty: true,
                again: false,
                starved: false,
                began: self.now,
                moved: self.now,
                pace: Pace::new(self.now),
                waits: None,
                passed: 0,
                client: None,
                told: None,
            }));
            // The server speaks first.
            self.dirty.push(slot);
        }
    }

    /// Of the connections that have never asked anything, the one that has been silent for longest makes way for another, if
    /// that is long enough. One that has asked is a disk that somebody uses: it stays. Returns whether one did.
    fn make_way(&mut self) -> bool {
        let silent = |conn: &Conn| {
            let long = self.now.saturating_duration_since(conn.moved);
            (conn.client.is_none() && long >= self.shared.config.gives_way).then_some(long)
        };
        let conns = self.slots.iter().enumerate();
        let found = conns.filter_map(|(slot, s)| Some((silent(s.conn.as_ref()?)?, slot))).max();
        let Some((long, slot)) = found else { return false };
        self.shared.counters.made_way.fetch_add(1, Ordering::Relaxed);
        if let Some(unsaid) = self.way_lines.wrong(self.now) {
            info!(
                "a connection is closed: it has asked nothing for {:.0} s, and there are too many{unsaid}",
                long.as_secs_f64()
            );
        }
        self.close(slot);
        true
    }

    /// Reads what there is and takes requests, until something is missing or the connection has had its turn.
    fn advance(&mut self, slot: usize) {
        let first = self.first == Some(slot);
        if first {
            self.promise(None);
        }
        let mut reads = 0;
        loop {
            let Some(conn) = self.slots[slot].conn.as_mut() else { return };
            if conn.closing.is_some() || conn.starting_tls {
                break;
            }
            conn.look(self.now);
            let event = conn.proto.poll(&Catalogue(&self.shared.volumes), &mut self.pool);
            if conn.told.is_none() {
                conn.told = conn.proto.export().map(|volume| Told::new(volume));
            }
            match event {
                Event::NeedInput if !conn.readable => break,
                Event::NeedInput if reads == READS_PER_TURN => {
                    mark(&mut self.again, &mut conn.again, slot);
                    break;
                }
                Event::NeedInput => {
                    reads += 1;
                    match conn.stream.read(conn.proto.space()) {
                        Ok(Received::Some(n)) => {
                            conn.passes(n, self.now);
                            conn.proto.received(n);
                        }
                        Ok(Received::Last(n)) => {
                            conn.readable = conn.hung_up && n > 0;
                            if n > 0 {
                                conn.passes(n, self.now);
                            }
                            conn.proto.received(n);
                        }
                        // Without a word of leave; what is under way is done, and the answers go nowhere.
                        Ok(Received::End) => {
                            if conn.stream.is_handshaking() {
                                let peer = conn.peer();
                                self.tls_refused(
                                    &peer,
                                    "it went away in the middle of TLS's handshake",
                                );
                                let Some(conn) = self.slots[slot].conn.as_mut() else { return };
                                conn.closing = Some(self.now);
                                continue;
                            }
                            conn.closing = Some(self.now);
                        }
                        Err(e) => {
                            if e.kind() == ErrorKind::InvalidData {
                                let peer = conn.peer();
                                self.tls_refused(&peer, &e.to_string());
                            }
                            debug!("a connection ended: {e}");
                            self.close(slot);
                            return;
                        }
                    }
                }
                Event::Request(request) => self.take(slot, request),
                Event::Starved if conn.hung_up && !conn.proto.is_deaf() && conn.left() => {
                    conn.proto.deafen();
                }
                Event::Starved => {
                    mark(&mut self.starved, &mut conn.starved, slot);
                    break;
                }
                Event::StartTls => conn.starting_tls = true,
                Event::Close(reason) => {
                    if let Some(reason) = reason {
                        self.shared.counters.broken.fetch_add(1, Ordering::Relaxed);
                        info!("a client broke the protocol: {reason}");
                    }
                    conn.closing = Some(self.now);
                }
            }
        }
        let Some(conn) = self.slots[slot].conn.as_mut() else { return };
        let abandoned = conn.proto.abandoned();
        if abandoned > 0 {
            self.shared.counters.abandoned.fetch_add(abandoned, Ordering::Relaxed);
            debug!("{} left without {abandoned} of its answers", conn.peer());
        }
        conn.waits = (conn.proto.hungry() > 0).then(|| conn.waits.unwrap_or(self.now));
        if conn.closing.is_some() || !conn.proto.output().is_empty() {
            mark(&mut self.dirty, &mut conn.dirty, slot);
        }
        if first && conn.waits.is_some() {
            self.promise(Some(slot));
        }
    }

    /// Counts a client that TLS keeps out, and says so now and then.
    fn tls_refused(&mut self, peer: &str, why: &str) {
        self.shared.counters.tls_refused.fetch_add(1, Ordering::Relaxed);
        if let Some(unsaid) = self.tls_lines.wrong(self.now) {
            warn!("{peer} is refused: {why}{unsaid}");
        }
    }

    /// Hands a request to the service.
    fn take(&mut self, slot: usize, Request { cookie, command }: Request) {
        let life = self.slots[slot].life;
        let Some(conn) = self.slots[slot].conn.as_mut() else { return };
        let Some(volume) = conn.proto.export() else { return };
        if LevelFilter::current() == LevelFilter::TRACE {
            trace!("{}: {}", conn.peer(), command.in_words());
        }
        conn.client.get_or_insert_with(|| Client::new(volume));
        let (kind, held) = match &command {
            Command::Read { offset, buf } => (Kind::Read { offset: *offset }, buf.capacity()),
            Command::Write { buf, .. } => (Kind::Write, buf.capacity()),
            Command::BlockStatus { len, one, .. } => (Kind::Status { len: *len, one: *one }, 0),
            _ => (Kind::Other, 0),
        };
        let index = self.tickets.insert(Ticket { slot, life, cookie, kind, held });
        self.asked = true;
        self.shared.counters.requests.fetch_add(1, Ordering::Relaxed);
        self.service.submit(volume, index as u64, export::command(command));
    }

    fn take_answers(&mut self) {
        while let Some(answer) = self.service.pop() {
            self.answer(answer);
            if self.answered.is_full(Batch::BLOCKS.send) {
                self.send_replies();
            }
        }
        while let Some(buf) = self.service.spent() {
            self.pool.give(buf);
        }
    }

    fn answer(&mut self, Answer { ticket, mut outcome, buf, lent, losses }: Answer) {
        let index = ticket as usize;
        let Ticket { slot, life, cookie, kind, held } = self.tickets.remove(index);
        let conn = match self.slots.get_mut(slot) {
            Some(entry) if entry.life == life => entry.conn.as_mut(),
            _ => None,
        };
        let give = |pool: &mut BufferPool, buf: Option<AlignedBuf>| {
            if let Some(buf) = buf {
                pool.give(buf);
            }
        };
        if let Some(told) = conn.as_ref().and_then(|conn| conn.told.as_ref()) {
            outcome = told.hear(losses, outcome);
        }
        if outcome.is_err() {
            self.shared.counters.failed.fetch_add(1, Ordering::Relaxed);
        }
        let Some(conn) = conn else { return give(&mut self.pool, buf) };
        match (outcome, kind, buf) {
            (Ok(_), Kind::Read { offset }, Some(buf)) => conn.proto.data(cookie, offset, buf, lent),
            (Ok(extents), Kind::Status { len, one }, _) if !extents.is_empty() => {
                conn.proto.extents(cookie, len, one, extents.into_iter().map(extent));
            }
            (Ok(_), Kind::Write, buf) => {
                conn.proto.written(cookie, held);
                give(&mut self.pool, buf);
            }
            (Ok(_), Kind::Other, _) => conn.proto.done(cookie),
            (Ok(_), _, buf) => {
                // A service that breaks its word: no data is better than wrong data.
                conn.proto.fail(cookie, held, Errno::Io, "an answer without what was asked for");
                give(&mut self.pool, buf);
            }
            (Err(failure), _, buf) => {
                conn.proto.fail(cookie, held, errno(failure.kind), &failure.message);
                give(&mut self.pool, buf);
            }
        }
        mark(&mut self.dirty, &mut conn.dirty, slot);
    }

    /// Sends what is to be sent, and closes the connection if that was the last of it.
    fn send(&mut self, slot: usize) {
        let Some(conn) = self.slots[slot].conn.as_mut() else { return };
        conn.dirty = false;
        conn.look(self.now);
        while !conn.blocked && !conn.proto.output().is_empty() {
            let output = conn.proto.output();
            let result = if output.parts() == 1 {
                let first = output.first();
                conn.stream.write(first).map(|n| (n, n < first.len()))
            } else {
                let slices = output.slices();
                let offered: usize = slices.iter().map(|s| s.len()).sum();
                conn.stream.write_vectored(&slices).map(|n| (n, n < offered))
            };
            match result {
                Ok((n, short)) => {
                    conn.proto.output().sent(n);
                    // A short write means a full socket: the poll tells when it takes more.
                    conn.blocked = short && conn.stream.is_plain();
                    conn.passes(n, self.now);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => conn.blocked = true,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    debug!("a connection ended: {e}");
                    self.close(slot);
                    return;
                }
            }
        }
        if !conn.blocked && conn.stream.wants_write() {
            match conn.stream.flush() {
                Ok(()) => conn.moved = self.now,
                Err(e) if e.kind() == ErrorKind::WouldBlock => conn.blocked = true,
                Err(e) => {
                    debug!("a connection ended: {e}");
                    self.close(slot);
                    return;
                }
            }
        }
        if conn.blocked != conn.watches_room {
            // Asking for it looks at the socket once more: room that came meanwhile is told too.
            let room = conn.blocked.then_some(Interest::WRITABLE);
            let interest = room.map_or(Interest::READABLE, |room| Interest::READABLE | room);
            let registry = self.poll.registry();
            if let Err(e) = registry.reregister(conn.stream.source(), Token(slot), interest) {
                warn!("a connection cannot be polled: {e}");
                self.close(slot);
                return;
            }
            conn.watches_room = conn.blocked;
        }
        conn.proto.recycle(&mut self.pool);
        conn.proto.output().set_stuck(conn.blocked);
        conn.proto.settle(&mut self.pool);
        let sent_all = conn.proto.output().is_empty() && !conn.stream.wants_write();
        if conn.closing.is_some() && conn.proto.under_way() == 0 && sent_all {
            self.close(slot);
            return;
        }
        if conn.starting_tls && sent_all {
            // The handshake offers TLS only where there is a certificate.
            let Some(certificate) = &self.shared.certificate else { return self.close(slot) };
            match certificate.session() {
                Ok(session) => conn.stream.start_tls(session),
                Err(e) => {
                    warn!("TLS cannot begin: {e}");
                    self.close(slot);
                    return;
                }
            }
            conn.starting_tls = false;
            conn.proto.tls_started();
            mark(&mut self.again, &mut conn.again, slot);
        }
        // It may go on now that something was sent.
        if conn.starved {
            mark(&mut self.again, &mut conn.again, slot);
        }
    }

    fn close(&mut self, slot: usize) {
        if let Some(conn) = self.slots[slot].conn.as_ref().filter(|c| c.proto.lacks_tls()) {
            let peer = conn.peer();
            self.tls_refused(&peer, "it spoke plainly where TLS is required");
        }
        let entry = &mut self.slots[slot];
        let Some(mut conn) = entry.conn.take() else { return };
        entry.life = entry.life.wrapping_add(1);
        if self.first == Some(slot) {
            self.promise(None);
        }
        self.free.push(slot);
        conn.proto.give_back(&mut self.pool);
        conn.stream.close();
        // It goes with the descriptor at the latest.
        let _ = self.poll.registry().deregister(conn.stream.source());
        self.shared.counters.connections.fetch_sub(1, Ordering::Relaxed);
    }

    /// Looks for connections that do not go on.
    fn scan(&mut self) {
        self.next_scan = self.now + SCAN;
        let timeout = self.shared.config.timeout;
        for slot in 0..self.slots.len() {
            let Some(conn) = self.slots[slot].conn.as_mut() else { continue };
            let idle = self.now.saturating_duration_since(conn.moved);
            conn.look(self.now);
            if idle >= REST {
                conn.proto.rest(&mut self.pool);
            }
            let why = if conn.proto.export().is_some_and(|v| v.is_closing()) {
                "its volume is put aside"
            } else if conn.closing.is_some_and(|at| at + DRAIN <= self.now) {
                "it does not read its last replies"
            } else if conn.began + timeout <= self.now && !conn.proto.in_transmission() {
                if conn.stream.is_handshaking() {
                    self.shared.counters.tls_refused.fetch_add(1, Ordering::Relaxed);
                }
                "it does not finish the handshake"
            } else {
                continue;
            };
            info!("a connection is closed: {why}");
            self.close(slot);
        }
        self.trim();
    }

    /// Somebody waits for a long buffer: closes connections that keep memory without going on, those first that have for longest,
    /// until it can be had.
    fn make_room(&mut self) {
        let (timeout, impatience) = (self.shared.config.timeout, self.shared.config.impatience);
        self.next_look = self.now + impatience.min(SCAN) / LOOKS;
        let conns = self.starved.iter().filter_map(|&slot| self.slots[slot].conn.as_ref());
        let Some(since) = conns.filter_map(|conn| conn.waits).min() else { return };
        let waited = self.now.saturating_duration_since(since);
        let mut found = Vec::new();
        for slot in 0..self.slots.len() {
            let Some(conn) = self.slots[slot].conn.as_mut() else { continue };
            // The poll tells of room only when there is much of it: a client that reads slowly may have made some.
            if conn.blocked && conn.proto.keeps() > 0 {
                conn.blocked = false;
                self.send(slot);
            }
            let Some(conn) = self.slots[slot].conn.as_mut() else { continue };
            let limit = if conn.proto.keeps() > 0 { impatience } else { timeout };
            if let Some(long) = conn.dawdles(self.now).filter(|&long| long.min(waited) >= limit) {
                conn.passed = 0;
                found.push((long, slot));
            }
        }
        found.sort_by_key(|&(long, _)| std::cmp::Reverse(long));
        for (long, slot) in found {
            let first = self.first.and_then(|first| self.slots[first].conn.as_ref());
            let wants = first.map_or(0, |conn| conn.proto.hungry());
            self.pool.promise(0);
            let enough = self.pool.lets_long(wants);
            self.pool.promise(wants);
            if enough {
                break;
            }
            info!(
                "a connection is closed: it keeps {} of memory and has done nothing for {:.0} s, and others wait for some",
                ByteSize(self.slots[slot].conn.as_ref().map_or(0, |c| c.proto.keeps()) as u64),
                long.as_secs_f64(),
            );
            self.close(slot);
        }
    }

    /// The longest request that waits for a buffer though its connection has none.
    fn hunger(&self) -> usize {
        let conns = self.starved.iter().filter_map(|&slot| self.slots[slot].conn.as_ref());
        conns.map(|conn| conn.proto.hungry()).max().unwrap_or(0)
    }

    /// Gives memory back that was not needed for a while.
    fn trim(&mut self) {
        let mut gone = self.pool.trim(TRIM);
        if !std::mem::take(&mut self.asked) {
            gone += self.service.rest();
        }
        self.freed += gone;
        if gone == 0 && self.freed > 0 {
            if self.freed >= FREED {
                // Replies that were queued beside the buffers, and reads of stores.
                larder_runtime::machine::release_free_memory();
            }
            self.freed = 0;
        }
    }

    /// While the server stops: what has begun is finished, as far as it does not take too long. What others have under way may need this worker: it
    /// destages volumes, and has mail.
    fn drained(&mut self) -> bool {
        self.take_new();
        let until = *self.drain_until.get_or_insert(self.now + DRAIN);
        let mut left = false;
        for slot in 0..self.slots.len() {
            let Some(conn) = self.slots[slot].conn.as_mut() else { continue };
            let idle = conn.proto.under_way() == 0
                && conn.proto.output().is_empty()
                && !conn.stream.wants_write();
            if idle || self.now >= until {
                self.close(slot);
            } else {
                left = true;
            }
        }
        if !left {
            self.busy = None;
        }
        self.shared.busy.load(Ordering::SeqCst) == 0 || self.now >= until
    }
}

/// One of the workers that have, or may have, requests under way.
struct Busy(Arc<Shared>);

impl Busy {
    fn one_of(shared: &Arc<Shared>) -> Busy {
        shared.busy.fetch_add(1, Ordering::SeqCst);
        Busy(shared.clone())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Puts a slot into a list, once.
fn mark(list: &mut Vec<usize>, flag: &mut bool, slot: usize) {
    if !*flag {
        *flag = true;
        list.push(slot);
    }
}

#[cfg(test)]
#[path = "worker_tests.rs"]
mod tests;
