//! The connection: its input, its requests under way, its replies.

use std::sync::Arc;

use larder_runtime::{AlignedBuf, BufferPool, Payload};

use super::export::{Export, ExportInfo, Exports};
use super::handshake::{ALLOCATION_ID, Agreed, Handshake, MAX_OPTION, Step, TlsPolicy};
use crate::output::Output;
use crate::wire::{
    Errno, Extent, RequestHeader, chunk, chunk_header, command, flag, simple_reply, state,
};

/// Bytes of input that are not a payload being received: several requests, or one option.
const INPUT: usize = 64 << 10;
/// A refused write's payload is read and thrown away up to this length, so that the connection can go on.
const MAX_SKIP: u32 = 64 << 20;
/// Reads at least this long are looked through for zeroes, to be sent as a hole.
const HOLE: usize = 4096;
/// With so many bytes of short replies unsent, errors come without their message and block statuses with one extent.
const TERSE: usize = 16 << 10;

const _: () = assert!(INPUT > MAX_OPTION + 16);

/// What a connection may hold at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Requests that were taken and not answered.
    pub requests: u32,
    /// Bytes of payloads, of requests under way and of replies not yet sent. One request of the largest size is always
    /// let through. Less, if the pool has not as much left as the connection would have: and half of it is left to those
    /// that have nothing.
    pub bytes: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { requests: 256, bytes: 64 << 20 }
    }
}

/// What is asked for. Ranges lie within the export and are not empty.
#[derive(Debug)]
pub enum Command {
    /// Fill the buffer, of the range's length, from `offset`; answer with [`Connection::data`].
    Read {
        /// Start, bytes.
        offset: u64,
        /// As long as the range; contents unspecified.
        buf: AlignedBuf,
    },
    /// Write the buffer at `offset`.
    Write {
        /// Start, bytes.
        offset: u64,
        /// What to write.
        buf: AlignedBuf,
        /// Answer only once it is durable.
        fua: bool,
    },
    /// Make durable what has been answered.
    Flush,
    /// The range is no longer needed.
    Trim {
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Answer only once it is durable.
        fua: bool,
    },
    /// The range shall read as zeroes.
    WriteZeroes {
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        len: u32,
        /// Answer only once it is durable.
        fua: bool,
        /// A hole will do.
        may_punch: bool,
        /// Fail with [`Errno::NotSup`] at once unless it is faster than writing zeroes.
        fast: bool,
    },
    /// The range will be read soon.
    Cache {
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        len: u32,
    },
    /// Which parts are holes or zeroes; answer with [`Connection::extents`].
    BlockStatus {
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        len: u32,
        /// The first extent is enough.
        one: bool,
    },
}

impl Command {
    /// What is asked for, for a log: without the bytes.
    pub fn in_words(&self) -> String {
        let fua = |fua: bool| if fua { ", durably" } else { "" };
        match self {
            Command::Read { offset, buf } => format!("read {} at {offset}", buf.len()),
            Command::Write { offset, buf, fua: f } => {
                format!("write {} at {offset}{}", buf.len(), fua(*f))
            }
            Command::Flush => "flush".to_owned(),
            Command::Trim { offset, len, fua: f } => format!("trim {len} at {offset}{}", fua(*f)),
            Command::WriteZeroes { offset, len, fua: f, .. } => {
                format!("write zeroes {len} at {offset}{}", fua(*f))
            }
            Command::Cache { offset, len } => format!("cache {len} at {offset}"),
            Command::BlockStatus { offset, len, .. } => format!("block status {len} at {offset}"),
        }
    }
}

/// A request to be answered.
#[derive(Debug)]
pub struct Request {
    /// The client's name for it.
    pub cookie: u64,
    /// What is asked for.
    pub command: Command,
}

/// What came of the input so far.
#[derive(Debug)]
pub enum Event {
    /// More is needed.
    NeedInput,
    /// A request.
    Request(Request),
    /// No buffer is to be had, or the connection's limits are reached: call [`Connection::poll`] again when something
    /// was answered, sent, or given back to the pool.
    Starved,
    /// Send the output, then begin TLS, then [`Connection::tls_started`].
    StartTls,
    /// Answer what is under way, send the output and close. The reason is `None` if the client said so.
    Close(Option<String>),
}

enum Phase<E> {
    Handshake(Handshake),
    Transmission { export: Arc<E>, about: ExportInfo, agreed: Agreed },
}

/// A write's payload on its way in.
struct Incoming {
    cookie: u64,
    offset: u64,
    fua: bool,
    buf: AlignedBuf,
    filled: usize,
}

/// A connection, generic over what is exported.
pub struct Connection<E> {
    phase: Phase<E>,
    limits: Limits,
    /// The input; `start..end` has not been looked at. Empty while nothing comes for long.
    input: Box<[u8]>,
    start: usize,
    end: usize,
    incoming: Option<Incoming>,
    /// Bytes of a refused payload still to come, and the answer that waits for them.
    skip: u64,
    skipped: Option<(u64, u16, Errno, &'static str)>,
    out: Output,
    /// Requests taken and not answered.
    under_way: u32,
    /// Bytes of their buffers.
    held: usize,
    /// Bytes that the pool counts for memory that is not its own.
    charged: usize,
    /// It has nothing under way and nothing to send, and there is no buffer for it: of so many bytes.
    hungry: usize,
    closed: Option<Option<String>>,
    /// Nobody is there to read an answer: what only asks for one is not begun.
    deaf: bool,
    /// Requests that were not begun for that.
    abandoned: u64,
}

impl<E: Export> Connection<E> {
    /// A connection that has just been accepted; its greeting is in the output.
    pub fn new(tls: TlsPolicy, limits: Limits) -> Connection<E> {
        let mut out = Output::default();
        Connection {
            phase: Phase::Handshake(Handshake::new(tls, &mut out)),
            limits,
            input: Box::default(),
            start: 0,
            end: 0,
            incoming: None,
            skip: 0,
            skipped: None,
            out,
            under_way: 0,
            held: 0,
            charged: 0,
            hungry: 0,
            closed: None,
            deaf: false,
            abandoned: 0,
        }
    }

    /// Where the next bytes from the peer go: into a payload's own buffer when one is on its way. Never empty while
    /// [`Connection::poll`] asks for input.
    pub fn space(&mut self) -> &mut [u8] {
        if self.start == self.end
            && let Some(incoming) = &mut self.incoming
        {
            return &mut incoming.buf[incoming.filled..];
        }
        if self.input.is_empty() {
            self.input = vec![0; INPUT].into_boxed_slice();
        }
        if self.start == self.end {
            // From the beginning again: with less room, what has come would take several reads.
            (self.start, self.end) = (0, 0);
        } else if self.end == self.input.len() && self.start > 0 {
            self.input.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.input[self.end..]
    }

    /// The first `n` bytes of [`Connection::space`] have been filled.
    ///
    /// # Panics
    /// If there is not so much space.
    pub fn received(&mut self, n: usize) {
        if self.start == self.end
            && let Some(incoming) = &mut self.incoming
        {
            incoming.filled += n;
            assert!(incoming.filled <= incoming.buf.len());
            return;
        }
        self.end += n;
        assert!(self.end <= self.input.len());
    }

    /// What is to be sent.
    pub fn output(&mut self) -> &mut Output {
        &mut self.out
    }

    /// Requests taken and not answered.
    pub fn under_way(&self) -> u32 {
        self.under_way
    }

    /// A message has begun to arrive and is not complete.
    pub fn partial(&self) -> bool {
        self.incoming.is_some() || self.skip > 0 || self.start != self.end
    }

    /// The peer is gone: what it asked to be told, and what is not begun, is left. Its changes are carried out.
    pub fn deafen(&mut self) {
        self.deaf = true;
    }

    /// See [`Connection::deafen`].
    pub fn is_deaf(&self) -> bool {
        self.deaf
    }

    /// Requests that were left since this was last asked.
    pub fn abandoned(&mut self) -> u64 {
        std::mem::take(&mut self.abandoned)
    }

    /// All that comes from the peer has come: whether it says goodbye at the end, as one does that waits for its answers.
    pub fn says_goodbye(&self) -> bool {
        let mut at = self.start;
        while let Some(bytes) = self.input.get(at..self.end).and_then(|rest| rest.first_chunk())
            && let Ok(header) = RequestHeader::decode(bytes)
        {
            if header.command == command::DISC {
                return true;
            }
            let payload = if header.command == command::WRITE { header.length as usize } else { 0 };
            at += RequestHeader::LEN + payload;
        }
        false
    }

    /// TLS is required, and the client asked for something else.
    pub fn lacks_tls(&self) -> bool {
        matches!(&self.phase, Phase::Handshake(handshake) if handshake.lacks_tls())
    }

    /// The handshake is over.
    pub fn in_transmission(&self) -> bool {
        matches!(self.phase, Phase::Transmission { .. })
    }

    /// The export, once one has been chosen.
    pub fn export(&self) -> Option<&Arc<E>> {
        match &self.phase {
            Phase::Handshake(_) => None,
            Phase::Transmission { export, .. } => Some(export),
        }
    }

    /// From here on the bytes are those inside TLS.
    pub fn tls_started(&mut self) {
        if let Phase::Handshake(handshake) = &mut self.phase {
            handshake.tls_started();
        }
    }

    /// A connection that ends: the buffers it holds go back to the pool.
    pub fn give_back(&mut self, pool: &mut BufferPool) {
        if let Some(incoming) = self.incoming.take() {
            pool.give(incoming.buf);
        }
        self.out.clear();
        self.recycle(pool);
        pool.charge(std::mem::take(&mut self.charged), 0);
    }

    /// Nothing came or went for long: memory that waits for more is let go of.
    pub fn rest(&mut self, pool: &mut BufferPool) {
        if self.start == self.end {
            self.input = Box::default();
            (self.start, self.end) = (0, 0);
        }
        self.out.shrink();
        self.settle(pool);
    }

    /// Has the pool count what waits to be sent in memory that is not its own.
    pub fn settle(&mut self, pool: &mut BufferPool) {
        // Where others could use it, it is not kept for the next time.
        if self.out.is_empty() && self.out.own() > pool.room() / 64 {
            self.out.shrink();
        }
        let own = self.out.own();
        if own != self.charged {
            pool.charge(self.charged, own);
            self.charged = own;
        }
    }

    /// Bytes that it has of the pool, by its requests and replies.
    fn has(&self) -> usize {
        let incoming = self.incoming.as_ref().map_or(0, |i| i.buf.capacity());
        self.held + incoming + self.out.held() + self.charged
    }

    /// Bytes of the pool that its client keeps: replies that it has not read, and a write that it has not finished.
    pub fn keeps(&self) -> usize {
        self.out.held() + self.incoming.as_ref().map_or(0, |i| i.buf.capacity())
    }

    /// It waits for a buffer of so many bytes though it has nothing of the pool: others have it all. 0 if it does not.
    pub fn hungry(&self) -> usize {
        self.hungry
    }

    /// Gives buffers that have been sent back to the pool.
    pub fn recycle(&mut self, pool: &mut BufferPool) {
        while let Some(buf) = self.out.recycle() {
            pool.give(buf);
        }
    }

    /// Looks at the input. To be called until it asks for input, starves or closes.
    pub fn poll<X: Exports<Export = E>>(&mut self, exports: &X, pool: &mut BufferPool) -> Event {
        if let Some(reason) = &self.closed {
            return Event::Close(reason.clone());
        }
        loop {
            if self.incoming.is_some() || self.skip > 0 {
                if let Some(event) = self.payload() {
                    return event;
                }
                continue;
            }
            if let Phase::Handshake(handshake) = &mut self.phase {
                let input = &self.input[self.start..self.end];
                match handshake.step(input, exports, &mut self.out) {
                    Step::NeedInput => return Event::NeedInput,
                    Step::Consumed(n) => self.start += n,
                    Step::StartTls(n) => {
                        self.start += n;
                        return Event::StartTls;
                    }
                    Step::Chosen(n, export, agreed) => {
                        self.start += n;
                        let about = export.info();
                        self.phase = Phase::Transmission { export, about, agreed };
                    }
                    Step::Aborted => return self.close(None),
                    Step::Close(reason) => return self.close(Some(reason)),
                }
                continue;
            }
            let Some(bytes) = self.input[self.start..self.end].first_chunk() else {
                return Event::NeedInput;
            };
            let header = match RequestHeader::decode(bytes) {
                Ok(header) => header,
                Err(magic) => {
                    return self.close(Some(format!("a request begins with {magic:#010x}")));
                }
            };
            if let Some(event) = self.request(header, pool) {
                return event;
            }
        }
    }

    fn close(&mut self, reason: Option<String>) -> Event {
        self.closed = Some(reason.clone());
        Event::Close(reason)
    }

    /// Goes on with a payload: `None` when there is something else to do.
    fn payload(&mut self) -> Option<Event> {
        if self.skip > 0 {
            let n = self.skip.min((self.end - self.start) as u64);
            self.start += n as usize;
            self.skip -= n;
            if self.skip > 0 {
                // Whatever came is used up: the whole input is space again.
                (self.start, self.end) = (0, 0);
                return Some(Event::NeedInput);
            }
            if let Some((cookie, kind, errno, why)) = self.skipped.take() {
                self.refuse(cookie, kind, errno, why);
            }
            return None;
        }
        let incoming = self.incoming.as_mut()?;
        let n = (incoming.buf.len() - incoming.filled).min(self.end - self.start);
        incoming.buf[incoming.filled..incoming.filled + n]
            .copy_from_slice(&self.input[self.start..self.start + n]);
        incoming.filled += n;
        self.start += n;
        if incoming.filled < incoming.buf.len() {
            return Some(Event::NeedInput);
        }
        let Incoming { cookie, offset, fua, buf, .. } = self.incoming.take()?;
        self.under_way += 1;
        self.held += buf.capacity();
        Some(Event::Request(Request { cookie, command: Command::Write { offset, buf, fua } }))
    }

    /// One request's header: `None` when the input is to be looked at again.
    fn request(&mut self, header: RequestHeader, pool: &mut BufferPool) -> Option<Event> {
        let Phase::Transmission { about, agreed, .. } = &self.phase else { return None };
        let RequestHeader { flags, command: kind, cookie, offset, length } = header;
        if kind == command::DISC {
            self.start += RequestHeader::LEN;
            return Some(self.close(None));
        }
        let is_write = kind == command::WRITE;
        if is_write && length > MAX_SKIP {
            return Some(self.close(Some(format!("a write of {length} bytes"))));
        }
        if let Err((errno, why)) = check(about, *agreed, &header) {
            self.start += RequestHeader::LEN;
            if is_write && length > 0 {
                self.skip = u64::from(length);
                self.skipped = Some((cookie, kind, errno, why));
            } else {
                self.refuse(cookie, kind, errno, why);
            }
            return None;
        }
        if self.deaf && matches!(kind, command::READ | command::CACHE | command::BLOCK_STATUS) {
            self.start += RequestHeader::LEN;
            self.abandoned += 1;
            return None;
        }
        let payload =
            if matches!(kind, command::READ | command::WRITE) { length as usize } else { 0 };
        self.hungry = 0;
        let busy = self.under_way > 0 || !self.out.is_empty();
        let has = self.has();
        if self.under_way >= self.limits.requests
            || self.out.len() > self.limits.bytes
            || (busy && has + payload > self.limits.bytes.min(pool.spare()))
        {
            return Some(Event::Starved);
        }
        // A long one leaves something for those that come after it, unless nobody is there.
        if pool.is_long(payload) && !pool.lets_long(payload) {
            self.hungry = if busy { 0 } else { payload };
            return Some(Event::Starved);
        }
        let fua = flags & flag::FUA != 0;
        let buf = if payload > 0 {
            let Some(buf) = pool.take(payload) else {
                self.hungry = if busy { 0 } else { payload };
                return Some(Event::Starved);
            };
            Some(buf)
        } else {
            None
        };
        self.start += RequestHeader::LEN;
        let command = match (kind, buf) {
            (command::READ, Some(buf)) => {
                self.held += buf.capacity();
                Command::Read { offset, buf }
            }
            (command::WRITE, Some(buf)) => {
                self.incoming = Some(Incoming { cookie, offset, fua, buf, filled: 0 });
                return None;
            }
            (command::TRIM, _) => Command::Trim { offset, len: length, fua },
            (command::WRITE_ZEROES, _) => Command::WriteZeroes {
                offset,
                len: length,
                fua,
                may_punch: flags & flag::NO_HOLE == 0,
                fast: flags & flag::FAST_ZERO != 0,
            },
            (command::CACHE, _) => Command::Cache { offset, len: length },
            (command::BLOCK_STATUS, _) => {
                Command::BlockStatus { offset, len: length, one: flags & flag::REQ_ONE != 0 }
            }
            // `check` lets no other command pass.
            _ => Command::Flush,
        };
        self.under_way += 1;
        Some(Event::Request(Request { cookie, command }))
    }

    fn structured(&self) -> bool {
        matches!(&self.phase, Phase::Transmission { agreed, .. } if agreed.structured)
    }

    fn answered(&mut self, held: usize) {
        self.under_way = self.under_way.saturating_sub(1);
        self.held = self.held.saturating_sub(held);
    }

    /// Answers a request that carries nothing back.
    pub fn done(&mut self, cookie: u64) {
        self.answered(0);
        self.out.push(&simple_reply(0, cookie));
    }

    /// Answers a write; its buffer may be used again.
    pub fn written(&mut self, cookie: u64, held: usize) {
        self.answered(held);
        self.out.push(&simple_reply(0, cookie));
    }

    /// Answers a read of `offset` with the whole buffer, or with `lent` instead, if there is any: as many bytes. The buffer is
    /// given back when they are sent, so that what waits for a client counts against what it may hold.
    pub fn data(&mut self, cookie: u64, offset: u64, buf: AlignedBuf, lent: Vec<Payload>) {
        self.answered(buf.capacity());
        let len = buf.len();
        debug_assert!(lent.is_empty() || lent.iter().map(|p| p.len()).sum::<usize>() == len);
        if !self.structured() {
            self.out.push(&simple_reply(0, cookie));
            self.out.push_read(buf, lent);
            return;
        }
        let zero = match lent.as_slice() {
            [] => is_zero(&buf),
            lent => lent.iter().all(|part| is_zero(part)),
        };
        if len >= HOLE && zero {
            self.out.push(&chunk_header(chunk::DONE, chunk::OFFSET_HOLE, cookie, 12));
            self.out.push(&offset.to_be_bytes());
            self.out.push(&(len as u32).to_be_bytes());
            self.out.spend(buf);
            return;
        }
        self.out.push(&chunk_header(chunk::DONE, chunk::OFFSET_DATA, cookie, len as u32 + 8));
        self.out.push(&offset.to_be_bytes());
        self.out.push_read(buf, lent);
    }

    /// Answers a block status request of `len` bytes. Extents beyond its end are cut.
    ///
    /// # Panics
    /// If there is no extent.
    pub fn extents(
        &mut self,
        cookie: u64,
        len: u32,
        one: bool,
        extents: impl IntoIterator<Item = Extent>,
    ) {
        self.answered(0);
        let mut left = len;
        let mut body = ALLOCATION_ID.to_be_bytes().to_vec();
        let one = one || self.out.copied() > TERSE;
        for extent in extents.into_iter().take(if one { 1 } else { usize::MAX }) {
            let now = extent.len.min(left);
            if now == 0 {
                break;
            }
            let mut flags = 0;
            if extent.hole {
                flags |= state::HOLE;
            }
            if extent.zero {
                flags |= state::ZERO;
            }
            body.extend_from_slice(&now.to_be_bytes());
            body.extend_from_slice(&flags.to_be_bytes());
            left -= now;
        }
        assert!(body.len() > 4, "a status has at least one extent");
        self.out.push(&chunk_header(chunk::DONE, chunk::BLOCK_STATUS, cookie, body.len() as u32));
        self.out.push(&body);
    }

    /// Answers a request with an error. `held` is the capacity of the buffer that it carried, 0 without one.
    pub fn fail(&mut self, cookie: u64, held: usize, errno: Errno, message: &str) {
        self.answered(held);
        self.error(cookie, errno, message);
    }

    /// Refuses a request that was never taken.
    fn refuse(&mut self, cookie: u64, kind: u16, errno: Errno, why: &str) {
        let message = format!("{}: {why}", command::name(kind));
        self.error(cookie, errno, &message);
    }

    fn error(&mut self, cookie: u64, errno: Errno, message: &str) {
        if !self.structured() {
            self.out.push(&simple_reply(errno.code(), cookie));
            return;
        }
        let most = if self.out.copied() > TERSE { 0 } else { 1000 };
        let mut end = message.len().min(most);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        let message = &message.as_bytes()[..end];
        let len = 6 + message.len() as u32;
        self.out.push(&chunk_header(chunk::DONE, chunk::ERROR, cookie, len));
        self.out.push(&errno.code().to_be_bytes());
        self.out.push(&(message.len() as u16).to_be_bytes());
        self.out.push(message);
    }
}

/// Whether a request may be carried out.
fn check(
    about: &ExportInfo,
    agreed: Agreed,
    header: &RequestHeader,
) -> Result<(), (Errno, &'static str)> {
    let RequestHeader { flags, command: kind, offset, length, .. } = *header;
    // FUA may come with any command; it means something where something is written.
    let allowed = flag::FUA
        | match kind {
            command::READ if agreed.structured => flag::DF,
            command::WRITE_ZEROES if about.fast_zero => flag::NO_HOLE | flag::FAST_ZERO,
            command::WRITE_ZEROES => flag::NO_HOLE,
            command::BLOCK_STATUS => flag::REQ_ONE,
            _ => 0,
        };
    let known = match kind {
        command::READ | command::WRITE | command::FLUSH => true,
        command::TRIM => about.trim,
        command::WRITE_ZEROES => about.write_zeroes,
        command::CACHE => about.cache,
        command::BLOCK_STATUS => agreed.allocation,
        _ => false,
    };
    let writes = matches!(kind, command::WRITE | command::TRIM | command::WRITE_ZEROES);
    if writes && about.read_only {
        return Err((Errno::Perm, "the export is read-only"));
    }
    if !known && kind == command::BLOCK_STATUS {
        return Err((Errno::Inval, "no metadata context was agreed upon"));
    }
    if !known {
        return Err((Errno::Inval, "this command is not offered"));
    }
    if flags & !allowed != 0 {
        return Err((Errno::Inval, "a flag that does not belong to this command"));
    }
    if kind == command::FLUSH {
        return if offset == 0 && length == 0 {
            Ok(())
        } else {
            Err((Errno::Inval, "offset and length must be zero"))
        };
    }
    if length == 0 {
        return Err((Errno::Inval, "the length is zero"));
    }
    if offset.checked_add(u64::from(length)).is_none_or(|end| end > about.size) {
        let grows = matches!(kind, command::WRITE | command::WRITE_ZEROES);
        let errno = if grows { Errno::NoSpc } else { Errno::Inval };
        return Err((errno, "the range ends beyond the export"));
    }
    if matches!(kind, command::READ | command::WRITE) && length > about.block.maximum {
        return Err((Errno::Inval, "longer than the advertised maximum"));
    }
    Ok(())
}

/// Whether all bytes are zero. Data is recognised by its first bytes most of the time.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    bytes.chunks(4096).all(|page| {
        let (head, rest) = page.split_at(page.len().min(16));
        head.iter().all(|&b| b == 0) && {
            let words = rest.chunks_exact(64);
            let tail = words.remainder();
            words.map(|w| w.iter().fold(0, |a, b| a | b)).all(|b| b == 0)
                && tail.iter().all(|&b| b == 0)
        }
    })
}
