//! The connection: requests out, replies in.

use std::collections::BTreeMap;

use super::handshake::{Handshake, Negotiated, Step};
use super::pending::Pending;
use super::request::{Done, Failure, Request};
use crate::output::Output;
use crate::wire::{
    Errno, RequestHeader, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, be16, be32, be64, chunk,
    command, flag, state,
};

/// Bytes of input that are not data being received.
const INPUT: usize = 64 << 10;
/// The longest error chunk, bytes.
const MAX_ERROR: usize = 8 << 10;

/// What came of the input so far.
#[derive(Debug)]
pub enum Event {
    /// More is needed.
    NeedInput,
    /// The handshake is over.
    Ready(Negotiated),
    /// A request has been answered.
    Done(Done),
    /// The connection is of no more use; [`Client::abandon`] gives back what was not answered.
    Close(String),
}

/// What the bytes to come are.
#[derive(Debug)]
enum Receiving {
    Header,
    /// Data of a read: `filled..end` of its buffer is still to come.
    Data {
        cookie: u64,
        filled: usize,
        end: usize,
        last: bool,
    },
    /// Extents of a status; of this many bytes.
    Extents {
        cookie: u64,
        left: u32,
        last: bool,
    },
}

enum Phase {
    Handshake(Handshake),
    Transmission(Negotiated),
}

/// A connection to a server.
pub struct Client {
    phase: Phase,
    input: Box<[u8]>,
    start: usize,
    end: usize,
    receiving: Receiving,
    out: Output,
    pending: BTreeMap<u64, Pending>,
    next_cookie: u64,
    closed: Option<String>,
}

impl Client {
    /// A connection that has just been made, to use the export of that name.
    pub fn new(export: &str) -> Client {
        Client {
            phase: Phase::Handshake(Handshake::new(export)),
            input: vec![0; INPUT].into_boxed_slice(),
            start: 0,
            end: 0,
            receiving: Receiving::Header,
            out: Output::default(),
            pending: BTreeMap::new(),
            next_cookie: 1,
            closed: None,
        }
    }

    /// What was agreed upon, once the handshake is over.
    pub fn negotiated(&self) -> Option<&Negotiated> {
        match &self.phase {
            Phase::Handshake(_) => None,
            Phase::Transmission(negotiated) => Some(negotiated),
        }
    }

    /// Requests sent or to be sent, and not answered.
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// What is to be sent.
    pub fn output(&mut self) -> &mut Output {
        &mut self.out
    }

    /// Where the next bytes from the server go: into the buffer of the read that they belong to, when that is known.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start == self.end
            && let Receiving::Data { cookie, filled, end, .. } = self.receiving
            && let Some(Pending { request: Request::Read { buf, .. }, .. }) =
                self.pending.get_mut(&cookie)
        {
            return &mut buf[filled..end];
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.end == self.input.len() {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.input[self.end..]
    }

    /// The first `n` bytes of [`Client::space`] have been filled.
    ///
    /// # Panics
    /// If there is not so much space.
    pub fn received(&mut self, n: usize) {
        if self.start == self.end
            && let Receiving::Data { filled, end, .. } = &mut self.receiving
        {
            *filled += n;
            assert!(*filled <= *end);
            return;
        }
        self.end += n;
        assert!(self.end <= self.input.len());
    }

    /// Sends a request. To be called only after [`Event::Ready`], with what the server has said that it can do, and
    /// a payload within its largest size.
    pub fn submit(&mut self, token: u64, request: Request) {
        let fua = |on: bool| if on { flag::FUA } else { 0 };
        let (command, flags) = match &request {
            Request::Read { .. } => (command::READ, 0),
            Request::Write { fua: on, .. } => (command::WRITE, fua(*on)),
            Request::Flush => (command::FLUSH, 0),
            Request::Trim { fua: on, .. } => (command::TRIM, fua(*on)),
            Request::WriteZeroes { fua: on, may_punch, fast, .. } => (
                command::WRITE_ZEROES,
                fua(*on)
                    | if *may_punch { 0 } else { flag::NO_HOLE }
                    | if *fast { flag::FAST_ZERO } else { 0 },
            ),
            Request::Status { one, .. } => {
                (command::BLOCK_STATUS, if *one { flag::REQ_ONE } else { 0 })
            }
        };
        let (offset, length) = request.range();
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let header = RequestHeader { flags, command, cookie, offset, length: length as u32 };
        self.out.push(&header.encode());
        if let Request::Write { data, .. } = &request {
            self.out.push_shared(data);
        }
        self.pending.insert(cookie, Pending::new(token, request));
    }

    /// Says goodbye, if the handshake is over.
    pub fn disconnect(&mut self) {
        if self.negotiated().is_some() {
            let command = command::DISC;
            let header = RequestHeader { flags: 0, command, cookie: 0, offset: 0, length: 0 };
            self.out.push(&header.encode());
        }
    }

    /// Everything that was not answered, in the order in which it was submitted, with its tokens.
    pub fn abandon(&mut self) -> Vec<(u64, Request)> {
        self.out.clear();
        self.receiving = Receiving::Header;
        std::mem::take(&mut self.pending).into_values().map(|p| (p.token, p.request)).collect()
    }

    /// Looks at the input. To be called until it asks for input or closes.
    pub fn poll(&mut self) -> Event {
        if let Some(reason) = &self.closed {
            return Event::Close(reason.clone());
        }
        loop {
            let step = match &mut self.phase {
                Phase::Handshake(handshake) => {
                    match handshake.step(&self.input[self.start..self.end], &mut self.out) {
                        Step::NeedInput => return Event::NeedInput,
                        Step::Consumed(n) => {
                            self.start += n;
                            continue;
                        }
                        Step::Ready(n, negotiated) => {
                            self.start += n;
                            self.phase = Phase::Transmission(negotiated);
                            return Event::Ready(negotiated);
                        }
                        Step::Close(reason) => Err(reason),
                    }
                }
                Phase::Transmission(negotiated) => {
                    let negotiated = *negotiated;
                    self.reply(&negotiated)
                }
            };
            match step {
                Ok(Some(event)) => return event,
                Ok(None) => {}
                Err(reason) => {
                    self.closed = Some(reason.clone());
                    return Event::Close(reason);
                }
            }
        }
    }

    /// One step of a reply: `None` when there is more to look at.
    fn reply(&mut self, negotiated: &Negotiated) -> Result<Option<Event>, String> {
        match self.receiving {
            Receiving::Header => self.header(negotiated),
            Receiving::Data { cookie, filled, end, last } => {
                let n = (end - filled).min(self.end - self.start);
                if n > 0
                    && let Some(Pending { request: Request::Read { buf, .. }, .. }) =
                        self.pending.get_mut(&cookie)
                {
                    buf[filled..filled + n]
                        .copy_from_slice(&self.input[self.start..self.start + n]);
                    self.start += n;
                }
                if filled + n < end {
                    self.receiving = Receiving::Data { cookie, filled: filled + n, end, last };
                    return Ok(Some(Event::NeedInput));
                }
                self.receiving = Receiving::Header;
                if last { self.finish(cookie).map(Some) } else { Ok(None) }
            }
            Receiving::Extents { cookie, left, last } => {
                if left == 0 {
                    self.receiving = Receiving::Header;
                    return if last { self.finish(cookie).map(Some) } else { Ok(None) };
                }
                let Some(bytes) = self.input[self.start..self.end].first_chunk::<8>() else {
                    return Ok(Some(Event::NeedInput));
                };
                let (len, flags) = (be32(bytes, 0), be32(bytes, 4));
                let pending = self.pending.get_mut(&cookie).ok_or("extents of no request")?;
                pending.extent(len, flags & state::HOLE != 0, flags & state::ZERO != 0)?;
                self.start += 8;
                self.receiving = Receiving::Extents { cookie, left: left - 8, last };
                Ok(None)
            }
        }
    }

    fn header(&mut self, negotiated: &Negotiated) -> Result<Option<Event>, String> {
        let input = &self.input[self.start..self.end];
        if input.len() < 16 {
            return Ok(Some(Event::NeedInput));
        }
        let cookie = be64(input, 8);
        let unknown = || format!("a reply to no request (cookie {cookie})");
        match be32(input, 0) {
            SIMPLE_REPLY_MAGIC => {
                let pending = self.pending.get_mut(&cookie).ok_or_else(unknown)?;
                let error = Errno::from_code(be32(input, 4));
                self.start += 16;
                match (&pending.request, error) {
                    (Request::Read { .. } | Request::Status { .. }, None)
                        if negotiated.structured =>
                    {
                        Err("a simple reply where a structured one was agreed upon".into())
                    }
                    (Request::Read { offset, buf }, None) => {
                        let (offset, end) = (*offset, buf.len());
                        pending.piece(offset, end as u64)?;
                        self.receiving = Receiving::Data { cookie, filled: 0, end, last: true };
                        Ok(None)
                    }
                    (_, error) => {
                        pending.failure = error.map(|errno| Failure::new(errno, ""));
                        self.finish(cookie).map(Some)
                    }
                }
            }
            STRUCTURED_REPLY_MAGIC if negotiated.structured => {
                if input.len() < 20 {
                    return Ok(Some(Event::NeedInput));
                }
                if !self.pending.contains_key(&cookie) {
                    return Err(unknown());
                }
                let (flags, kind, len) = (be16(input, 4), be16(input, 6), be32(input, 16));
                self.chunk(negotiated, cookie, kind, len, flags & chunk::DONE != 0)
            }
            magic => Err(format!("a reply begins with {magic:#010x}")),
        }
    }

    fn chunk(
        &mut self,
        negotiated: &Negotiated,
        cookie: u64,
        kind: u16,
        len: u32,
        last: bool,
    ) -> Result<Option<Event>, String> {
        let odd = || format!("a chunk of type {kind:#x} and {len} bytes");
        let body = &self.input[self.start + 20..self.end];
        let pending = self.pending.get_mut(&cookie).ok_or_else(odd)?;
        match kind {
            chunk::NONE if len == 0 && last => {
                self.start += 20;
                return self.finish(cookie).map(Some);
            }
            chunk::OFFSET_DATA if len >= 9 => {
                if body.len() < 8 {
                    return Ok(Some(Event::NeedInput));
                }
                let len = len as usize - 8;
                let filled = pending.piece(be64(body, 0), len as u64)?;
                self.start += 28;
                self.receiving = Receiving::Data { cookie, filled, end: filled + len, last };
                return Ok(None);
            }
            chunk::OFFSET_HOLE if len == 12 => {
                if body.len() < 12 {
                    return Ok(Some(Event::NeedInput));
                }
                let hole = be32(body, 8);
                let start = pending.piece(be64(body, 0), u64::from(hole))?;
                if let Request::Read { buf, .. } = &mut pending.request {
                    buf[start..start + hole as usize].fill(0);
                }
                self.start += 32;
            }
            chunk::BLOCK_STATUS if len >= 12 && (len - 4).is_multiple_of(8) => {
                if body.len() < 4 {
                    return Ok(Some(Event::NeedInput));
                }
                if !matches!(pending.request, Request::Status { .. })
                    || pending.status
                    || negotiated.allocation != Some(be32(body, 0))
                {
                    return Err("a block status that nobody asked for".into());
                }
                pending.status = true;
                self.start += 24;
                self.receiving = Receiving::Extents { cookie, left: len - 4, last };
                return Ok(None);
            }
            _ if kind & chunk::ERROR_BIT != 0 && len >= 6 && len as usize <= MAX_ERROR => {
                let Some(body) = body.get(..len as usize) else {
                    return Ok(Some(Event::NeedInput));
                };
                let message = usize::from(be16(body, 4));
                let Some(message) = body.get(6..6 + message) else {
                    return Err("an error's message is longer than its chunk".into());
                };
                let Some(errno) = Errno::from_code(be32(body, 0)) else {
                    return Err("an error chunk without an error".into());
                };
                if pending.failure.is_none() {
                    let text = String::from_utf8_lossy(message);
                    let text: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
                    pending.failure = Some(Failure::new(errno, text));
                }
                self.start += 20 + len as usize;
            }
            _ => return Err(odd()),
        }
        if last { self.finish(cookie).map(Some) } else { Ok(None) }
    }

    fn finish(&mut self, cookie: u64) -> Result<Event, String> {
        let pending = self.pending.get(&cookie).ok_or("the end of no request")?;
        // An incomplete reply leaves its request pending, for it to be sent again on another connection.
        pending.whole()?;
        let Some(Pending { token, request, failure, extents, .. }) = self.pending.remove(&cookie)
        else {
            return Err("the end of no request".into());
        };
        let outcome = match failure {
            None => Ok(extents),
            Some(failure) => Err(failure),
        };
        Ok(Event::Done(Done { token, request, outcome }))
    }
}
