//! One connection to the server: its socket around the protocol's state machine.

use std::io::{self, ErrorKind, Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mio::event::{Event as Ready, Source};
use mio::net::{TcpStream, UnixStream};
use mio::{Interest, Registry, Token};

use super::stops::{Known, Stops};
use super::words::{asked_for, ended, request};
use super::{Peer, Place, Timeouts};
use crate::op::{Done, FailureKind, Op};
use larder_nbd::client::{Client, Event, Negotiated};
use larder_nbd::wire::transmission;
use larder_runtime::make_room;

/// Why a connection ends whose server has refused a request with `ESHUTDOWN`.
pub(super) const STOPPING: &str = "the server is stopping";
/// Reads of the socket in one turn, before others have theirs.
const READS_PER_TURN: u32 = 32;

/// What a turn has brought.
#[derive(Debug)]
pub(super) enum News {
    /// The handshake is over; to be answered with [`Link::up`] or [`Link::down`].
    Ready(Negotiated),
    /// A request has been answered.
    Done(Done),
}

/// What an operation adds to the load of a connection.
fn weight(op: &Op) -> usize {
    let moved = match op {
        Op::Read { buf, .. } => buf.len(),
        Op::Write { data, .. } => data.len(),
        _ => 0,
    };
    moved + 1024
}

enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    fn source(&mut self) -> &mut dyn Source {
        match self {
            Socket::Tcp(s) => s,
            Socket::Unix(s) => s,
        }
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => s.read(buf),
            Socket::Unix(s) => s.read(buf),
        }
    }

    fn write(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => s.write_vectored(slices),
            Socket::Unix(s) => s.write_vectored(slices),
        }
    }

    /// A connection that was begun without waiting is there, or why not.
    fn connected(&self) -> io::Result<bool> {
        let (error, peer) = match self {
            Socket::Tcp(s) => (s.take_error()?, s.peer_addr().map(drop)),
            Socket::Unix(s) => (s.take_error()?, s.peer_addr().map(drop)),
        };
        match (error, peer) {
            (Some(e), _) => Err(e),
            (None, Ok(())) => Ok(true),
            (None, Err(e)) if e.kind() == ErrorKind::NotConnected => Ok(false),
            (None, Err(e)) => Err(e),
        }
    }
}

struct Wire {
    socket: Socket,
    client: Client,
    connected: bool,
    readable: bool,
    /// The end of the stream came with an edge: then a short read is not the last one.
    hung_up: bool,
    writable: bool,
    /// The poll is asked for room to write: only while there is none, since a unix socket tells of it whenever its peer has
    /// read something.
    watches_room: bool,
    /// The handshake is over and was found good.
    up: bool,
    /// How large the export is, as far as this connection was told.
    size: u64,
    /// Its server offers FLUSH.
    flushes: bool,
    /// Its server is not told that something is to be durable: it does not know FUA, and need not.
    plain: bool,
    /// As other sessions know it.
    known: Arc<Known>,
    /// Its server is stopping: nothing more is asked of it, and it ends when all has been answered.
    leaves: bool,
    /// To be asked again of the server that comes.
    refused: Vec<(u64, Op)>,
    /// Bytes to be moved for requests that were not answered, and something for each request.
    load: usize,
    /// When the connection was begun, or something was last heard or began to be waited for.
    heard: Instant,
}

/// See the [module](self).
pub(super) struct Link {
    token: Token,
    wire: Option<Box<Wire>>,
    retry: Option<Instant>,
    pause: Duration,
    /// Which of several addresses is next.
    address: usize,
}

impl Link {
    pub(super) fn new(token: Token) -> Link {
        Link { token, wire: None, retry: None, pause: Duration::ZERO, address: 0 }
    }

    pub(super) fn is_up(&self) -> bool {
        self.wire.as_ref().is_some_and(|w| w.up)
    }

    /// It is up, and its server takes requests, as far as is known.
    pub(super) fn takes_requests(&self) -> bool {
        self.wire.as_ref().is_some_and(|w| w.up && !w.leaves)
    }

    /// How large the export is, as far as it was told.
    pub(super) fn size(&self) -> u64 {
        self.wire.as_ref().map_or(0, |w| w.size)
    }

    /// Nothing is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.wire.as_ref().is_none_or(|w| w.client.in_flight() == 0)
    }

    /// How much it has to do: bytes to be moved, and something for each request.
    pub(super) fn load(&self) -> usize {
        self.wire.as_ref().map_or(0, |w| w.load)
    }

    pub(super) fn wants_connection(&self, now: Instant) -> bool {
        self.wire.is_none() && self.retry.is_none_or(|at| at <= now)
    }

    /// Begins a connection.
    ///
    /// # Errors
    /// Why it cannot even be begun.
    pub(super) fn connect(
        &mut self,
        peer: &Peer,
        registry: &Registry,
        stops: &Stops,
        now: Instant,
    ) -> Result<(), String> {
        let known = stops.connection();
        let (socket, name) = match &peer.place {
            Place::Socket(path) => {
                let socket = UnixStream::connect(path).inspect(make_room);
                (socket.map(Socket::Unix), path.display().to_string())
            }
            Place::Addresses(list) => {
                let address = list[self.address % list.len()];
                self.address += 1;
                let socket = TcpStream::connect(address).inspect(|s| {
                    // Small requests go at once; without it they go too, later.
                    let _ = s.set_nodelay(true);
                });
                (socket.map(Socket::Tcp), address.to_string())
            }
        };
        let mut socket = socket.map_err(|e| match e.kind() {
            ErrorKind::NotFound => format!(
                "there is no socket '{name}': start the server, or name the socket that it listens at"
            ),
            _ => format!("{name}: {e}"),
        })?;
        match &socket {
            Socket::Tcp(s) => known.is_at(s),
            Socket::Unix(s) => known.is_at(s),
        }
        registry
            .register(socket.source(), self.token, Interest::READABLE | Interest::WRITABLE)
            .map_err(|e| format!("{name}: {e}"))?;
        self.wire = Some(Box::new(Wire {
            socket,
            client: Client::new(&peer.export),
            connected: false,
            readable: true,
            hung_up: false,
            writable: true,
            // A connection that was begun without waiting is there when it can be written to.
            watches_room: true,
            up: false,
            size: 0,
            flushes: false,
            plain: false,
            known,
            leaves: false,
            refused: Vec::new(),
            load: 0,
            heard: now,
        }));
        Ok(())
    }

    /// Its server offers FLUSH.
    pub(super) fn flushes(&self) -> bool {
        self.wire.as_ref().is_some_and(|w| w.flushes)
    }

    /// The handshake was found good. `durable`: what the server answers is.
    pub(super) fn up(&mut self, negotiated: &Negotiated, durable: bool) {
        if let Some(wire) = &mut self.wire {
            wire.up = true;
            wire.size = negotiated.size;
            wire.flushes = negotiated.has(transmission::SEND_FLUSH);
            wire.plain = durable && !negotiated.has(transmission::SEND_FUA);
        }
        self.retry = None;
    }

    /// Ends the connection and gives back what was not answered.
    pub(super) fn down(
        &mut self,
        registry: &Registry,
        now: Instant,
        pause: (Duration, Duration),
    ) -> Vec<(u64, Op)> {
        // At once the first time: most servers that go come back, or were never away.
        self.retry = Some(now + self.pause);
        self.pause = (self.pause * 2).clamp(pause.0, pause.1);
        let Some(mut wire) = self.wire.take() else { return Vec::new() };
        // It goes with the descriptor at the latest.
        let _ = registry.deregister(wire.socket.source());
        let mut left = std::mem::take(&mut wire.refused);
        let unanswered = wire.client.abandon().into_iter();
        left.extend(unanswered.map(|(token, request)| (token, asked_for(request))));
        left
    }

    pub(super) fn ready(&mut self, event: &Ready) {
        if let Some(wire) = &mut self.wire {
            wire.hung_up |= event.is_read_closed() || event.is_error();
            wire.readable |= event.is_readable() || wire.hung_up;
            wire.writable |= event.is_writable() || event.is_write_closed() || event.is_error();
        }
    }

    pub(super) fn submit(&mut self, token: u64, op: Op, now: Instant) {
        if let Some(wire) = &mut self.wire {
            let op = if wire.plain { op.without_fua() } else { op };
            if wire.client.in_flight() == 0 {
                wire.heard = now;
            }
            wire.load += weight(&op);
            wire.known.is_busy(true);
            wire.client.submit(token, request(op));
        }
    }

    /// Silence that has lasted too long.
    ///
    /// # Errors
    /// What there was to be heard, and was not.
    pub(super) fn check(&self, now: Instant, timeout: Timeouts) -> Result<(), String> {
        match (&self.wire, self.deadline(timeout)) {
            (Some(wire), Some(at)) if at <= now => Err(if wire.up {
                format!("no answer for {} s", timeout.silence.as_secs_f32())
            } else {
                format!("no connection within {} s", timeout.connect.as_secs_f32())
            }),
            _ => Ok(()),
        }
    }

    /// When something was last heard, or began to be waited for.
    pub(super) fn heard(&self) -> Option<Instant> {
        self.wire.as_ref().map(|w| w.heard)
    }

    /// It was up, and what there was to be heard was not.
    pub(super) fn is_silent(&self, now: Instant, timeout: Timeouts) -> bool {
        self.is_up() && self.check(now, timeout).is_err()
    }

    /// When there is something to do even if the socket says nothing.
    pub(super) fn wake_at(&self, timeout: Timeouts) -> Option<Instant> {
        match &self.wire {
            // A turn has ended before the socket was drained.
            Some(wire) if wire.connected && wire.readable => Some(wire.heard),
            _ => self.deadline(timeout),
        }
    }

    fn deadline(&self, timeout: Timeouts) -> Option<Instant> {
        match &self.wire {
            None => self.retry,
            Some(wire) if !wire.up => Some(wire.heard + timeout.connect),
            Some(wire) if wire.client.in_flight() > 0 => Some(wire.heard + timeout.silence),
            Some(_) => None,
        }
    }

    /// Sends what there is. What goes wrong is found by the next read.
    pub(super) fn send(&mut self) {
        if let Some(wire) = &mut self.wire {
            // The connection's end is seen by `turn` as well, which can say so.
            let _ = wire.send();
        }
    }

    /// Has the poll tell of room to write if there is none, and else not. To be called before the poll is.
    ///
    /// # Errors
    /// Why the connection is of no more use.
    pub(super) fn watch(&mut self, registry: &Registry) -> Result<(), String> {
        let Some(wire) = &mut self.wire else { return Ok(()) };
        let wanted = !wire.connected || !wire.writable;
        if wanted != wire.watches_room {
            let room = wanted.then_some(Interest::WRITABLE);
            let interest = room.map_or(Interest::READABLE, |room| Interest::READABLE | room);
            // It looks at the socket once more: room that came meanwhile is told too.
            let socket = wire.socket.source();
            registry.reregister(socket, self.token, interest).map_err(|e| e.to_string())?;
            wire.watches_room = wanted;
        }
        Ok(())
    }

    /// Takes the leave that the protocol knows.
    pub(super) fn goodbye(&mut self) {
        if let Some(wire) = &mut self.wire {
            wire.client.disconnect();
            let _ = wire.send();
        }
        self.wire = None;
    }

    /// Reads and sends what there is.
    ///
    /// # Errors
    /// Why the connection is of no more use.
    pub(super) fn turn(
        &mut self,
        now: Instant,
        stops: &Stops,
        news: &mut Vec<News>,
    ) -> Result<(), String> {
        let Some(wire) = &mut self.wire else { return Ok(()) };
        wire.leaves |= stops.has_stopped(&wire.known);
        if wire.leaves {
            self.pause = self.pause.max(super::PAUSE.0);
        }
        let good = wire.turn(now, stops, news)?;
        if wire.client.in_flight() == 0 {
            wire.known.is_busy(false);
            // (Marked idle first: whoever finds out that the server stops closes connections that are.)
            wire.leaves |= stops.has_stopped(&wire.known);
            if wire.leaves {
                // It waits for its clients to take their leave.
                wire.client.disconnect();
                let _ = wire.send();
                return Err(STOPPING.into());
            }
        }
        if good && !wire.leaves {
            self.pause = Duration::ZERO;
        }
        Ok(())
    }
}

impl Wire {
    /// Reads and sends what there is. Whether a request was answered.
    fn turn(&mut self, now: Instant, stops: &Stops, news: &mut Vec<News>) -> Result<bool, String> {
        let wire = self;
        let mut good = false;
        if !wire.connected {
            if !wire.socket.connected().map_err(|e| e.to_string())? {
                return Ok(false);
            }
            wire.connected = true;
        }
        wire.send().map_err(|e| e.to_string())?;
        let mut reads = 0;
        while wire.readable && reads < READS_PER_TURN {
            reads += 1;
            let space = wire.client.space();
            let wanted = space.len();
            match wire.socket.read(space) {
                Ok(0) if wire.leaves => return Err(STOPPING.into()),
                Ok(0) => return Err("the server closed the connection".into()),
                Ok(n) => {
                    wire.heard = now;
                    // A short read has drained the socket; the poll tells of more.
                    wire.readable = n == wanted || wire.hung_up;
                    wire.client.received(n);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => wire.readable = false,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e.to_string()),
            }
            loop {
                match wire.client.poll() {
                    Event::NeedInput => break,
                    Event::Ready(negotiated) => news.push(News::Ready(negotiated)),
                    Event::Done(done) => {
                        let done = ended(done);
                        wire.load = wire.load.saturating_sub(weight(&done.op));
                        if matches!(&done.outcome, Err(e) if e.kind == FailureKind::Gone) {
                            wire.leaves = true;
                            stops.stopped(&wire.known);
                            wire.refused.push((done.token, done.op));
                        } else if wire.leaves && done.op.changes() && !done.op.is_durable() {
                            // It may go with the server, and no client was told.
                            wire.refused.push((done.token, done.op));
                        } else {
                            good = true;
                            news.push(News::Done(done));
                        }
                    }
                    Event::Close(reason) => return Err(reason),
                }
            }
            // The handshake speaks in turns.
            if !wire.up {
                wire.send().map_err(|e| e.to_string())?;
            }
        }
        Ok(good)
    }

    fn send(&mut self) -> io::Result<()> {
        while self.connected && self.writable && !self.client.output().is_empty() {
            let output = self.client.output();
            let slices = output.slices();
            let wanted: usize = slices.iter().map(|s| s.len()).sum();
            match self.socket.write(&slices) {
                Ok(n) => {
                    // A short write means a full socket.
                    self.writable = n == wanted;
                    output.sent(n);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => self.writable = false,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }
}
