//! One connection: what is to be sent, what is in flight, what has come back.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use larder_trace::Op;
use mio::{Interest, Registry, Token};

use crate::content::{Values, push_key, push_number};
use crate::options::Target;
use crate::source::Item;

/// What a request in flight is counted as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Get,
    Set,
    Fill,
    Delete,
    Other,
}

/// A request whose reply has not come.
pub(crate) struct Flight {
    pub(crate) item: Item,
    pub(crate) kind: Kind,
    /// When it was sent, or should have been (timed replay): nanoseconds since the start.
    pub(crate) since: u64,
    /// The version that a store carries.
    pub(crate) version: u32,
}

enum Stream {
    Tcp(mio::net::TcpStream),
    Unix(mio::net::UnixStream),
}

impl Stream {
    fn connect(target: &Target) -> io::Result<Stream> {
        match target {
            Target::Tcp(address) => {
                let stream = TcpStream::connect_timeout(address, Duration::from_secs(10))?;
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                Ok(Stream::Tcp(mio::net::TcpStream::from_std(stream)))
            }
            Target::Unix(path) => {
                let stream = UnixStream::connect(path)?;
                stream.set_nonblocking(true)?;
                Ok(Stream::Unix(mio::net::UnixStream::from_std(stream)))
            }
        }
    }

    fn register(&mut self, registry: &Registry, token: Token) -> io::Result<()> {
        // Edge-triggered: one registration, no changes while running.
        let interest = Interest::READABLE | Interest::WRITABLE;
        match self {
            Stream::Tcp(s) => registry.register(s, token, interest),
            Stream::Unix(s) => registry.register(s, token, interest),
        }
    }

    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.read(buf),
            Stream::Unix(s) => s.read(buf),
        }
    }

    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.write(buf),
            Stream::Unix(s) => s.write(buf),
        }
    }
}

const BUFFER: usize = 64 << 10;
/// No more is encoded while so much waits to be sent.
const OUT_LIMIT: usize = 1 << 20;

pub(crate) struct Connection {
    stream: Stream,
    out: Vec<u8>,
    out_at: usize,
    input: Vec<u8>,
    start: usize,
    end: usize,
    /// Bytes that the parser wants before it looks again.
    pub(crate) need: usize,
    pub(crate) flights: VecDeque<Flight>,
    pub(crate) queue: VecDeque<Item>,
    pub(crate) sent: u64,
    pub(crate) received: u64,
}

/// Received bytes: whether more may be waiting.
pub(crate) enum Received {
    Drained,
    Full,
    Closed,
}

impl Connection {
    pub(crate) fn connect(
        target: &Target,
        registry: &Registry,
        token: Token,
    ) -> io::Result<Connection> {
        let mut stream = Stream::connect(target)?;
        stream.register(registry, token)?;
        Ok(Connection {
            stream,
            out: Vec::with_capacity(BUFFER),
            out_at: 0,
            input: vec![0; BUFFER],
            start: 0,
            end: 0,
            need: 1,
            flights: VecDeque::new(),
            queue: VecDeque::new(),
            sent: 0,
            received: 0,
        })
    }

    /// Whether another request may be encoded.
    pub(crate) fn has_room(&self, depth: usize) -> bool {
        self.flights.len() < depth && self.out.len() - self.out_at < OUT_LIMIT
    }

    /// Appends a request to what is to be sent.
    pub(crate) fn encode(
        &mut self,
        item: &Item,
        kind: Kind,
        version: u32,
        prefix: &[u8],
        values: &Values,
    ) {
        let r = &item.request;
        let out = &mut self.out;
        let (verb, stores): (&[u8], bool) = match (kind, r.op) {
            (Kind::Get, _) => (b"get ", false),
            (Kind::Fill, _) => (b"set ", true),
            (_, Op::Add) => (b"add ", true),
            (_, Op::Replace) => (b"replace ", true),
            (_, Op::Append) => (b"append ", true),
            (_, Op::Prepend) => (b"prepend ", true),
            (_, Op::Delete | Op::Trim) => (b"delete ", false),
            (_, Op::Incr) => (b"incr ", false),
            (_, Op::Decr) => (b"decr ", false),
            (_, Op::Touch) => (b"touch ", false),
            // A trace holds no token for cas: it is replayed as the store that it was.
            _ => (b"set ", true),
        };
        out.extend_from_slice(verb);
        push_key(out, prefix, r.app, r.id, r.key_bytes());
        // Beyond 30 days the protocol would take a number of seconds for a date.
        let ttl = u64::from(r.ttl.min(30 * 86_400));
        if stores {
            out.extend_from_slice(b" 0 ");
            push_number(out, ttl);
            out.push(b' ');
            push_number(out, r.size);
            out.extend_from_slice(b"\r\n");
            values.push(out, item.object, version, r.size as usize);
        } else if matches!(r.op, Op::Incr | Op::Decr) && kind == Kind::Other {
            out.extend_from_slice(b" 1");
        } else if r.op == Op::Touch && kind == Kind::Other {
            out.push(b' ');
            push_number(out, ttl);
        }
        out.extend_from_slice(b"\r\n");
    }

    /// Sends what can be sent.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        while self.out_at < self.out.len() {
            match self.stream.write(&self.out[self.out_at..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => {
                    self.out_at += n;
                    self.sent += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if self.out_at == self.out.len() {
            self.out.clear();
            self.out_at = 0;
        } else if self.out_at > OUT_LIMIT {
            self.out.drain(..self.out_at);
            self.out_at = 0;
        }
        Ok(())
    }

    /// Reads once.
    pub(crate) fn receive(&mut self) -> io::Result<Received> {
        if self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let wanted = self.need.max(self.end + 1);
        if self.input.len() < wanted {
            self.input.resize(wanted.next_power_of_two(), 0);
        }
        loop {
            return match self.stream.read(&mut self.input[self.end..]) {
                Ok(0) => Ok(Received::Closed),
                Ok(n) => {
                    self.end += n;
                    self.received += n as u64;
                    // After a short read the socket is empty; the next bytes raise an edge.
                    Ok(if self.end == self.input.len() {
                        Received::Full
                    } else {
                        Received::Drained
                    })
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Received::Drained),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => Err(e),
            };
        }
    }

    /// The bytes that have come and are not parsed.
    pub(crate) fn unparsed(&self) -> &[u8] {
        &self.input[self.start..self.end]
    }

    /// Drops the first `n` bytes of [`Connection::unparsed`].
    pub(crate) fn consume(&mut self, n: usize) {
        self.start += n;
        self.need = 1;
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }
}
