//! One command at work: the engine, the context and the output, without the input buffer that the command lies in.

use larder_base::{AppId, Now, UnixSecs};
use larder_engine::kv::api::{Arith, Delete, Get, Item, Op, Reply, Request, Store, Tier};

use super::buffers::{BigBuffers, Output, Pending, PendingKind};
use super::context::{ConnContext, ConnStats, PrefixUse};
use super::dump::Dump;
use super::engine::{Engine, Fetched, Sink, Step};
use super::watched::{Outcome, class_of};
use super::{Progress, READS_MAX, SMALL};
use crate::protocol::meta::MetaLine;
use crate::protocol::number::parse_u32;
use crate::protocol::tokens::{Tokens, trim_end_of_line};
use crate::protocol::{LINE_MAX, answer, reply};

/// What a command means for input and state.
#[derive(Debug)]
pub(super) enum Act<R> {
    /// Finished; so many bytes of input are used up.
    Done(usize),
    /// Nothing happened yet; the same bytes come again.
    Wait(Progress),
    /// So many bytes are used up, keys follow; stop for this reason, if any.
    Keys(usize, Keys, Option<Progress>),
    /// Call again with this many bytes.
    Body(usize),
    /// Refused: so many bytes of line are used up, and a body of so many is dropped.
    Swallow(usize, u64),
    /// So many bytes are used up, and the rest of the line is dropped.
    SwallowLine(usize),
    /// A change needs this from flash; then the same bytes come again.
    Block(R),
    /// Used up; a listing follows.
    Dump(usize, Dump),
    /// Used up; from now on the connection is told what happens.
    Watch(usize),
    /// Used up; close.
    Close(usize),
    /// Used up; close, as the client wants it.
    Quit(usize),
    /// Used up; the server stops, gracefully or not.
    Shutdown(usize, bool),
}

/// A get, gets, gat or gats whose keys are being worked off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Keys {
    pub(super) op: Get,
    pub(super) with_cas: bool,
    /// A key was seen.
    pub(super) any: bool,
}

/// Where a login stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AuthStep {
    NeedLine,
    NeedBody(usize),
    Again,
    Welcome,
    Close,
}

/// How one read went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadStep {
    /// Answered, or queued.
    Done,
    /// Nothing happened; try again then.
    Wait(Progress),
}

/// Longest body of a login, bytes.
const AUTH_MAX: u32 = 16384;

pub(super) struct Turn<'t, 'c, E: Engine> {
    pub(super) now: Now,
    pub(super) engine: &'t E,
    pub(super) ctx: &'t mut ConnContext<'c, E::Read>,
    pub(super) big: &'t BigBuffers,
    pub(super) out: &'t mut Output<E::Read>,
    /// Bytes for the change that comes again.
    pub(super) fetched: Option<Fetched<'t, E::Read>>,
}

/// The form of the answer to a read.
#[derive(Clone, Copy)]
pub(super) enum Shape<'a> {
    Text { key: &'a [u8], with_cas: bool, touch: bool },
    Meta(&'a MetaLine<'a>),
    Debug(&'a MetaLine<'a>),
}

impl Shape<'_> {
    fn key(&self) -> &[u8] {
        match self {
            Shape::Text { key, .. } => key,
            Shape::Meta(meta) | Shape::Debug(meta) => meta.key(),
        }
    }

    /// Bytes of value that the answer to a found object carries.
    fn value_len(&self, item: &Item<'_>) -> usize {
        match self {
            Shape::Text { .. } => item.value.len(),
            Shape::Meta(meta) if meta.wants_value(item) => item.value.len(),
            Shape::Meta(_) | Shape::Debug(_) => 0,
        }
    }

    /// Whether asking again gives the same answer.
    fn repeatable(&self, item: &Item<'_>) -> bool {
        match self {
            Shape::Text { .. } => true,
            Shape::Meta(meta) => !item.won && !meta.shows_access,
            Shape::Debug(_) => false,
        }
    }

    #[inline]
    fn write(
        &self,
        out: &mut Vec<u8>,
        found: Option<&Item<'_>>,
        stats: &mut ConnStats,
        now: UnixSecs,
    ) {
        match (self, found) {
            (Shape::Text { key, with_cas, .. }, Some(item)) => {
                reply::value(out, key, item, *with_cas)
            }
            (Shape::Text { .. }, None) => {}
            (Shape::Meta(meta), Some(item)) => meta.write_item(out, item, now),
            (Shape::Meta(meta), None) if meta.quiet => {}
            (Shape::Meta(meta), None) => meta.write_status(out, b"EN"),
            (Shape::Debug(meta), Some(item)) => meta.write_debug(out, item, now),
            (Shape::Debug(_), None) => reply::line(out, b"EN"),
        }
        let touch = match self {
            Shape::Text { touch, .. } => *touch,
            // A miss of mg with T counts as a missed get.
            Shape::Meta(meta) => meta.touches() && found.is_some(),
            Shape::Debug(_) => {
                stats.cmd_meta += 1;
                return;
            }
        };
        match (touch, found) {
            (true, Some(_)) => {
                stats.cmd_touch += 1;
                stats.touch_hits += 1;
            }
            (true, None) => {
                stats.cmd_touch += 1;
                stats.touch_misses += 1;
            }
            (false, Some(_)) => {
                stats.cmd_get += 1;
                stats.get_hits += 1;
            }
            (false, None) => {
                stats.cmd_get += 1;
                stats.get_misses += 1;
            }
        }
        if found.is_some_and(|item| item.tier == Tier::Flash) {
            stats.get_flash_hits += 1;
        }
    }
}

/// The same where objects have no CAS (`-C`): what is stored has 0, and what compares finds no match, as in memcached.
#[cold]
fn without_cas(op: Op<'_>) -> Op<'_> {
    let new_cas = Some(0);
    match op {
        Op::Get(get) => Op::Get(Get { new_cas, ..get }),
        Op::Store(store) => Op::Store(Store {
            new_cas,
            compare_cas: store.compare_cas.map(|_| u64::MAX),
            invalidate: false,
            ..store
        }),
        Op::Delete(delete) => Op::Delete(Delete { new_cas, ..delete }),
        Op::Arith(arith) => Op::Arith(Arith { new_cas, ..arith }),
        Op::Touch(_) | Op::Peek => op,
    }
}

impl<E: Engine> Turn<'_, '_, E> {
    /// The application of a key: the listener's, or else the one of its prefix.
    #[inline]
    fn app_of(&self, key: &[u8]) -> AppId {
        self.ctx.app.unwrap_or_else(|| self.engine.app(key))
    }

    /// Answers with a line, unless the client asked for silence.
    #[inline]
    pub(super) fn say(&mut self, noreply: bool, text: &[u8]) {
        if !noreply {
            reply::line(self.out.tail(), text);
        }
    }

    /// Answers that the line is wrong.
    pub(super) fn bad(&mut self, noreply: bool, text: &[u8], line_len: usize) -> Act<E::Read> {
        self.ctx.stats.malformed += 1;
        self.say(noreply, text);
        Act::Done(line_len)
    }

    /// Whether a change must wait for earlier reads.
    pub(super) fn behind_reads(&self) -> bool {
        !self.out.pending.is_empty()
    }

    /// Executes a read and answers it, or queues it for flash. `request` is what is kept while it waits.
    #[inline]
    pub(super) fn read(
        &mut self,
        op: Op<'_>,
        shape: Shape<'_>,
        kind: PendingKind,
        changes: bool,
        request: &[u8],
    ) -> ReadStep {
        let key = shape.key();
        let hash = self.engine.hash(key);
        if !self.out.pending.is_empty() {
            // What a meta command shows of an object (accesses, a win) depends on the reads before it, and must not
            // depend on those after it. A key that gat names twice may expire at the first.
            let plain = matches!(shape, Shape::Text { .. }) && !changes;
            let meets = |p: &Pending<E::Read>| {
                p.hash == hash && !(plain && matches!(p.kind, PendingKind::Text { .. }))
            };
            if self.out.pending.len() >= READS_MAX || self.out.pending.iter().any(meets) {
                return ReadStep::Wait(Progress::WaitingForFlash);
            }
        }
        let op = if self.ctx.config.cas_enabled { op } else { without_cas(op) };
        let request_to_engine = Request { key, hash, app: self.app_of(key), op };
        let (big, now) = (self.big, self.now.wall);
        let mut refused = false;
        let mut held = 0;
        let (mut hit, mut seen) = (false, (0, 0));
        let cas_enabled = self.ctx.config.cas_enabled;
        let tail = self.out.tail();
        let stats = &mut *self.ctx.stats;
        let on_reply = |reply: Reply<'_>| match reply {
            Reply::Item(mut item) => {
                if !cas_enabled {
                    item.cas = 0;
                }
                let len = shape.value_len(&item);
                if len > SMALL {
                    if !big.output.try_take(len) {
                        if shape.repeatable(&item) {
                            refused = true;
                            return;
                        }
                        big.output.take(len);
                    }
                    held = len;
                }
                hit = true;
                seen = (class_of(&item), item.value.len());
                shape.write(tail, Some(&item), stats, now);
            }
            _ => shape.write(tail, None, stats, now),
        };
        let step = self.engine.execute(
            self.now,
            &request_to_engine,
            None,
            &mut Sink { side: &mut *self.ctx.side, on_reply },
        );
        match step {
            Step::Done if refused => return ReadStep::Wait(Progress::WaitingForMemory),
            Step::Done => {
                self.out.held += held;
                if self.ctx.detail {
                    self.ctx.admin.prefix_use(key, PrefixUse::Get { hit });
                }
                if self.ctx.watch.is_some() {
                    self.tell_get(key, seen.0, seen.1);
                }
            }
            Step::Read(read) => {
                let len = self.engine.read_len(&read);
                let held = if len > SMALL { len } else { 0 };
                if held > 0 && !big.output.try_take(held) {
                    return ReadStep::Wait(Progress::WaitingForMemory);
                }
                let token = self.out.token();
                self.ctx.reads.push((token, read));
                self.out.pending.push_back(Pending {
                    token,
                    read,
                    request: request.into(),
                    hash,
                    kind,
                    changes,
                    answered: false,
                    answer: Vec::new(),
                    after: Vec::new(),
                    held,
                });
            }
        }
        ReadStep::Done
    }

    /// Goes on with a queued read whose bytes have come.
    pub(super) fn complete(&mut self, index: usize, bytes: Option<&[u8]>) {
        let pending = &mut self.out.pending[index];
        let line = std::mem::take(&mut pending.request);
        let (read, kind, hash) = (pending.read, pending.kind, pending.hash);
        let meta = match kind {
            PendingKind::Text { .. } => None,
            PendingKind::MetaGet | PendingKind::MetaDebug => MetaLine::parse(&line, 2).ok(),
        };
        let (shape, op) = match (kind, &meta) {
            (PendingKind::Text { op, with_cas }, _) => {
                (Shape::Text { key: &line, with_cas, touch: op.touch.is_some() }, Op::Get(op))
            }
            (PendingKind::MetaGet, Some(meta)) => (Shape::Meta(meta), meta.get(self.now).0),
            (PendingKind::MetaDebug, Some(meta)) => (Shape::Debug(meta), Op::Peek),
            // The line parsed when it was queued.
            (_, None) => unreachable!("a queued line was parsed before"),
        };
        let key = shape.key();
        let app = self.app_of(key);
        let op = if self.ctx.config.cas_enabled { op } else { without_cas(op) };
        let cas_enabled = self.ctx.config.cas_enabled;
        let mut answer = Vec::new();
        let (mut hit, mut seen) = (false, (0, 0));
        let (stats, now) = (&mut *self.ctx.stats, self.now.wall);
        let on_reply = |reply: Reply<'_>| match reply {
            Reply::Item(mut item) => {
                if !cas_enabled {
                    item.cas = 0;
                }
                hit = true;
                seen = (class_of(&item), item.value.len());
                shape.write(&mut answer, Some(&item), stats, now);
            }
            _ => shape.write(&mut answer, None, stats, now),
        };
        let step = self.engine.execute(
            self.now,
            &Request { key, hash, app, op },
            Some(Fetched { read: &read, bytes }),
            &mut Sink { side: &mut *self.ctx.side, on_reply },
        );
        let done = matches!(step, Step::Done);
        if done && self.ctx.detail {
            self.ctx.admin.prefix_use(key, PrefixUse::Get { hit });
        }
        if done && self.ctx.watch.is_some() {
            self.tell_get(key, seen.0, seen.1);
        }
        let pending = &mut self.out.pending[index];
        let needs = match step {
            Step::Done => answer.len(),
            Step::Read(next) => {
                pending.read = next;
                self.ctx.reads.push((pending.token, next));
                self.engine.read_len(&next)
            }
        };
        let needs = if needs > SMALL { needs } else { 0 };
        if needs > pending.held {
            self.big.output.take(needs - pending.held);
        } else {
            self.big.output.give(pending.held - needs);
        }
        pending.held = needs;
        if done {
            pending.answered = true;
            pending.answer = answer;
            self.out.settle();
        } else {
            pending.request = line;
        }
    }

    /// Whether a store must be put off: room for its value is being made.
    #[inline]
    pub(super) fn waits_for_room(&mut self, key: &[u8], value_len: usize) -> bool {
        // What has been read from flash for it is not read twice.
        if self.fetched.is_some() {
            return false;
        }
        let since = &mut self.out.room_since;
        let waited = since.is_some();
        let waits = self.engine.waits_for_room(self.now, key, value_len, since);
        self.ctx.stats.room_waits += u64::from(waits && !waited);
        waits
    }

    /// Executes a change. `on_reply` writes the answer; a returned read blocks the connection.
    #[inline]
    pub(super) fn change(
        &mut self,
        key: &[u8],
        op: Op<'_>,
        mut on_reply: impl FnMut(Reply<'_>, &mut Vec<u8>, &mut ConnStats),
    ) -> Option<E::Read> {
        debug_assert!(self.out.pending.is_empty(), "changes wait for earlier reads");
        let op = if self.ctx.config.cas_enabled { op } else { without_cas(op) };
        let request = Request { key, hash: self.engine.hash(key), app: self.app_of(key), op };
        let looked = if self.ctx.watch.is_some() { self.look(&request) } else { None };
        let mut outcome = Outcome::default();
        let watched = self.ctx.watch.is_some();
        let tail = self.out.tail();
        let stats = &mut *self.ctx.stats;
        let fetched = self.fetched.take();
        let step = self.engine.execute(
            self.now,
            &request,
            fetched,
            &mut Sink {
                side: &mut *self.ctx.side,
                on_reply: |reply: Reply<'_>| {
                    if watched {
                        outcome = Outcome::of(&reply, &op);
                    }
                    on_reply(reply, tail, stats);
                },
            },
        );
        match step {
            Step::Done => {
                if watched {
                    self.tell_change(key, &op, looked.unwrap_or(outcome), outcome);
                }
                None
            }
            Step::Read(read) => Some(read),
        }
    }

    /// A long line without an end in sight: the keys of a get are worked off as they come, anything else is hung up on.
    pub(super) fn endless_line(&mut self, bytes: &[u8]) -> Act<E::Read> {
        let spaces = bytes.iter().take_while(|b| **b == b' ').count();
        let rest = &bytes[spaces..];
        let (gets, get) = (rest.starts_with(b"gets "), rest.starts_with(b"get "));
        if spaces > 100 || !(gets || get) {
            self.ctx.stats.malformed += 1;
            return Act::Close(bytes.len());
        }
        if spaces > 0 {
            self.ctx.stats.malformed += 1;
            self.say(false, answer::ERROR);
            return Act::SwallowLine(bytes.len());
        }
        if self.out.pending.iter().any(|p| p.changes) {
            return Act::Wait(Progress::WaitingForFlash);
        }
        let keys = Keys { op: Get::default(), with_cas: gets, any: false };
        Act::Keys(if gets { 5 } else { 4 }, keys, None)
    }

    /// The first commands of a connection that must log in: `set <any> <any> <any> <bytes>`, body `user password`.
    pub(super) fn auth(&mut self, bytes: &[u8], body: Option<usize>) -> (usize, AuthStep) {
        let Some(len) = body else {
            let Some(at) = memchr::memchr(b'\n', bytes) else {
                let step =
                    if bytes.len() > LINE_MAX { AuthStep::Close } else { AuthStep::NeedLine };
                return (0, step);
            };
            if at < 6 {
                return (at + 1, AuthStep::Close);
            }
            let tokens = Tokens::new(trim_end_of_line(&bytes[..at + 1]));
            let size = tokens.get(4).and_then(parse_u32);
            let step = match size {
                Some(size) if bytes.starts_with(b"set") && size <= AUTH_MAX => {
                    AuthStep::NeedBody(size as usize + 2)
                }
                Some(_) if bytes.starts_with(b"set") => {
                    self.say(false, b"CLIENT_ERROR auth token too long");
                    AuthStep::Again
                }
                _ => {
                    self.say(false, b"CLIENT_ERROR unauthenticated");
                    AuthStep::Again
                }
            };
            return (at + 1, step);
        };
        if bytes.len() < len {
            return (0, AuthStep::NeedBody(len));
        }
        let Some(login) = bytes[..len].strip_suffix(b"\r\n") else {
            self.say(false, b"CLIENT_ERROR bad command line termination");
            return (len, AuthStep::Again);
        };
        let Some(space) = login.iter().position(|b| *b == b' ') else {
            self.say(false, b"CLIENT_ERROR bad authentication token format");
            return (len, AuthStep::Again);
        };
        self.ctx.stats.auth_cmds += 1;
        if self
            .ctx
            .config
            .auth
            .as_ref()
            .is_none_or(|file| file.check(&login[..space], &login[space + 1..]))
        {
            self.say(false, b"STORED");
            (len, AuthStep::Welcome)
        } else {
            self.ctx.stats.auth_errors += 1;
            self.say(false, b"CLIENT_ERROR authentication failure");
            (len, AuthStep::Again)
        }
    }
}
