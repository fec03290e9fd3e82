//! A client connection as a state machine without a socket.
//!
//! The worker reads into [`Connection::space`], calls [`Connection::process`], performs the flash reads that it left in
//! [`ConnContext::reads`] (their bytes come back through [`Connection::flash_done`]) and writes out
//! [`Connection::output`]. Answers leave in the order of their requests.
//!
//! **Order.** While a read waits for flash, later *reads* of the same connection go on, up to [`READS_MAX`] at a time,
//! and their answers queue behind it. A request that may change something waits until all earlier reads are answered,
//! and everything waits behind a change that itself waits for flash. So a client sees its requests take effect in the
//! order in which it sent them.
//!
//! **Memory.** Commands are parsed in place in a buffer of at most 16 KiB. Larger bodies and values take a share of
//! [`BigBuffers`]; with 16 KiB unsent nothing more is parsed. A request that waits (for flash, for memory, for the rest
//! of its body) stays in the input buffer as it came and is parsed anew when it can go on: waiting costs no copy and no
//! state.

mod admin;
mod buffers;
mod context;
mod dump;
mod engine;
mod meta;
mod text;
mod turn;
mod watched;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use larder_base::Now;
use larder_engine::kv::api::FlashRead;

pub use buffers::{BigBuffers, Budget, DEFAULT_BUDGET, DEFAULT_STALL, SMALL};
use buffers::{Input, Output, Pace, Waiting};
pub use context::{Admin, ConnContext, ConnStats, DebugTime, PrefixUse, ProtocolConfig};
use dump::Dump;
pub use engine::{Engine, Fetched, SideEffects, Step};
use turn::{Act, Keys, Turn};

/// Reads of flash that one connection may have outstanding.
pub const READS_MAX: usize = 32;

/// Answer to whatever comes when only the binary protocol was asked for.
const NOT_SPOKEN: &[u8] = b"CLIENT_ERROR the binary protocol is not spoken here\r\n";

/// The first byte of a request in the binary protocol. No text command begins with it.
const BINARY_REQUEST: u8 = 0x80;

/// Names one flash read of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadToken(pub u32);

/// Why [`Connection::process`] returned. Whatever it is, output may wait to be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Progress {
    /// Read more from the client and call again.
    NeedInput,
    /// Too much is unsent, or the connection has had its turn: write, then call again. Do not read.
    OutputFull,
    /// Call again after [`Connection::flash_done`]. Do not read.
    WaitingForFlash,
    /// The shared budget is exhausted: call again when others have made progress (a turn or some milliseconds later).
    /// Do not read.
    WaitingForMemory,
    /// Room for a large value is being made: call again some milliseconds later. Do not read.
    WaitingForRoom,
    /// Write what is left and close.
    Close,
    /// The client asked the server to stop.
    Shutdown {
        /// Finish what is under way first.
        graceful: bool,
    },
}

/// What the connection does with its input.
#[derive(Clone, Copy, Debug)]
enum State<R> {
    /// Nobody has logged in yet; the body length once the line of a login was read.
    Auth(Option<usize>),
    /// At the start of a command line.
    Command,
    /// Inside the keys of a get.
    Keys(Keys),
    /// The command needs this many bytes at once.
    Body(usize),
    /// A body is dropped.
    Swallow(u64),
    /// A line is dropped.
    SwallowLine,
    /// Objects are being listed, from this cursor on.
    Dump(Dump, u64),
    /// It is told what happens; what it sends is dropped.
    Watching,
    /// A change waits for flash.
    Blocked(ReadToken, R),
    /// Nothing more is read.
    Closing,
    /// Nothing more is read, and the server stops.
    ShuttingDown(bool),
}

/// One client connection. See the module.
#[derive(Debug)]
pub struct Connection<R = FlashRead> {
    input: Input,
    out: Output<R>,
    state: State<R>,
    big: Arc<BigBuffers>,
    waits_for_input: Waiting,
    waits_for_output: Waiting,
    /// Of the large body that it holds memory for.
    coming: Option<Pace>,
    /// Of the answers that hold memory.
    going: Option<Pace>,
    /// Share of the output budget that a blocked change's flash read takes.
    blocked_held: usize,
    wants_input: bool,
    /// Nothing has been received yet.
    fresh: bool,
    /// The client has said that it goes.
    quit: bool,
}

impl<R: Copy + std::fmt::Debug> Connection<R> {
    /// A fresh connection.
    pub fn new(config: &ProtocolConfig, big: Arc<BigBuffers>) -> Connection<R> {
        Connection {
            input: Input::new(),
            out: Output::new(),
            state: if config.auth.is_some() { State::Auth(None) } else { State::Command },
            big,
            waits_for_input: Waiting::default(),
            waits_for_output: Waiting::default(),
            coming: None,
            going: None,
            blocked_held: 0,
            wants_input: true,
            fresh: true,
            quit: false,
        }
    }

    /// Whether the worker should read from the client.
    pub fn wants_input(&self) -> bool {
        self.wants_input
    }

    /// Where the next input goes. Empty only when [`Connection::wants_input`] is false.
    pub fn space(&mut self) -> &mut [u8] {
        self.input.space()
    }

    /// Tells that the first `n` bytes of [`Connection::space`] were received.
    pub fn received(&mut self, n: usize, now: Now) {
        self.input.filled(n);
        if self.input.held > 0 {
            self.coming.get_or_insert_with(|| Pace::new(now.mono)).moved(n);
        }
    }

    /// Copies as much of `bytes` as there is room for and tells how much that was.
    pub fn feed(&mut self, bytes: &[u8], now: Now) -> usize {
        let space = self.input.space();
        let n = space.len().min(bytes.len());
        space[..n].copy_from_slice(&bytes[..n]);
        self.received(n, now);
        n
    }

    /// What is to be sent.
    pub fn output(&self) -> &[u8] {
        &self.out.ready[self.out.sent..]
    }

    /// Tells that the first `n` bytes of [`Connection::output`] were sent.
    pub fn sent(&mut self, n: usize, now: Now) {
        assert!(n <= self.output().len(), "more was sent than there is");
        if n == 0 {
            return;
        }
        if self.out.held > 0 {
            self.going.get_or_insert_with(|| Pace::new(now.mono)).moved(n);
        }
        self.out.sent += n;
        if self.out.sent == self.out.ready.len() {
            self.out.ready.clear();
            self.out.sent = 0;
            if self.out.ready.capacity() > 2 * SMALL {
                self.out.ready = Vec::new();
            }
            if self.out.pending.is_empty() && self.out.held > 0 {
                self.big.output.give(self.out.held);
                self.out.held = 0;
            }
        } else if self.out.sent > 2 * SMALL && self.out.sent > self.out.ready.len() / 2 {
            // A client that never quite catches up must not make the buffer grow.
            self.out.ready.drain(..self.out.sent);
            self.out.sent = 0;
        }
    }

    /// Whether this connection holds a share of the large buffers, has moved less than 64 KiB a second for the configured time,
    /// and others wait: then the worker closes it. To be asked about once a second.
    pub fn stalled(&mut self, now: Now) -> bool {
        let input = self.input.held > 0 && matches!(self.state, State::Body(_));
        let output = self.out.held > 0 && !self.output().is_empty();
        let slow = |pace: &mut Option<Pace>, holds: bool, stretch| {
            if !holds {
                *pace = None;
                return false;
            }
            pace.get_or_insert_with(|| Pace::new(now.mono)).is_slow(now.mono, stretch)
        };
        let coming = slow(&mut self.coming, input, self.big.input_stall);
        let going = slow(&mut self.going, output, self.big.stall);
        coming && self.big.input.waiting() > 0 || going && self.big.output.waiting() > 0
    }

    /// Gives back buffers that an idle connection does not need. The worker calls it when nothing came for a while.
    pub fn shrink(&mut self) {
        if self.input.need == 0 {
            self.input.shrink(0);
        }
        if self.out.ready.is_empty() && self.out.pending.is_empty() {
            self.out.ready = Vec::new();
        }
    }

    /// Bytes of memory in buffers.
    pub fn memory(&self) -> usize {
        let pending: usize =
            self.out.pending.iter().map(|p| p.answer.capacity() + p.after.capacity()).sum();
        self.input.capacity() + self.out.ready.capacity() + pending
    }

    /// Whether requests are under way, so that a draining server should wait for this connection.
    pub fn busy(&self) -> bool {
        !self.out.pending.is_empty()
            || self.out.sent < self.out.ready.len()
            || self.input.len() > 0
            || matches!(
                self.state,
                State::Blocked(..) | State::Body(_) | State::Swallow(_) | State::Dump(..)
            )
    }

    /// Whether the client has said that it goes.
    pub fn has_quit(&self) -> bool {
        self.quit
    }

    /// Sends lines to a client that watches.
    pub(crate) fn tell(&mut self, lines: &[u8]) {
        self.out.tail().extend_from_slice(lines);
    }

    /// The name that `stats conns` gives to what the connection does.
    pub fn state_name(&self) -> &'static str {
        match self.state {
            State::Auth(_) | State::Command | State::Keys(_) if self.input.len() > 0 => {
                "conn_parse_cmd"
            }
            State::Auth(_) | State::Command | State::Keys(_) => "conn_read",
            State::Body(_) => "conn_nread",
            State::Swallow(_) | State::SwallowLine => "conn_swallow",
            State::Dump(..) => "conn_mwrite",
            State::Watching => "conn_watch",
            State::Blocked(..) => "conn_io_queue",
            State::Closing | State::ShuttingDown(_) => "conn_closing",
        }
    }

    /// Works off the input until something is missing.
    pub fn process<E: Engine<Read = R>>(
        &mut self,
        now: Now,
        engine: &E,
        ctx: &mut ConnContext<'_, R>,
    ) -> Progress {
        let progress = self.work(now, engine, ctx);
        self.wants_input = progress == Progress::NeedInput;
        let memory = progress == Progress::WaitingForMemory;
        let body = self.input_waits();
        if memory && !self.waits_for_input.is_set() && !self.waits_for_output.is_set() {
            ctx.stats.big_buffer_waits += 1;
        }
        self.waits_for_input.set(&self.big.input, memory && body);
        self.waits_for_output.set(&self.big.output, memory && !body);
        progress
    }

    /// A wait for memory is for the input budget when a large body was announced and not granted.
    fn input_waits(&self) -> bool {
        self.input.need > SMALL && self.input.held < self.input.need
    }

    fn work<E: Engine<Read = R>>(
        &mut self,
        now: Now,
        engine: &E,
        ctx: &mut ConnContext<'_, R>,
    ) -> Progress {
        let mut left = ctx.config.commands_per_turn;
        if self.fresh && self.input.len() > 0 {
            self.fresh = false;
            if self.input.bytes()[0] == BINARY_REQUEST && !ctx.config.binary_only {
                // Its headers hold no end of line: it would wait for an answer for good.
                ctx.stats.binary_refused += 1;
                self.input.consume(self.input.len());
                self.state = State::Closing;
            }
        }
        loop {
            if self.out.unsent() >= SMALL {
                // Finished answers may all stand behind one that waits for flash.
                let sendable = !self.output().is_empty();
                return if sendable { Progress::OutputFull } else { Progress::WaitingForFlash };
            }
            let progress = match self.state {
                State::Command if ctx.config.binary_only && self.input.len() > 0 => {
                    ctx.stats.binary_refused += 1;
                    self.input.consume(self.input.len());
                    self.out.tail().extend_from_slice(NOT_SPOKEN);
                    self.state = State::Closing;
                    None
                }
                State::Command
                    if left == 0 && self.input.len() > 0 && !self.output().is_empty() =>
                {
                    return Progress::OutputFull;
                }
                State::Command => {
                    left = left.saturating_sub(1);
                    self.command(now, engine, ctx, None)
                }
                State::Keys(keys) => {
                    let mut turn = Self::turn(now, engine, ctx, &self.big, &mut self.out);
                    let act = turn.keys(self.input.bytes(), 0, keys);
                    self.apply(act, engine, ctx)
                }
                State::Body(need) if self.input.len() >= need => {
                    self.state = State::Command;
                    self.command(now, engine, ctx, None)
                }
                State::Body(_) => Some(Progress::NeedInput),
                State::Swallow(left) => {
                    let n = left.min(self.input.len() as u64);
                    self.input.consume(n as usize);
                    self.state = if n == left { State::Command } else { State::Swallow(left - n) };
                    (n < left).then_some(Progress::NeedInput)
                }
                State::SwallowLine => match memchr::memchr(b'\n', self.input.bytes()) {
                    Some(at) => {
                        self.input.consume(at + 1);
                        self.state = State::Command;
                        None
                    }
                    None => {
                        self.input.consume(self.input.len());
                        Some(Progress::NeedInput)
                    }
                },
                State::Auth(body) => {
                    let mut turn = Self::turn(now, engine, ctx, &self.big, &mut self.out);
                    let (used, next) = turn.auth(self.input.bytes(), body);
                    self.input.consume(used);
                    self.authenticated(next, body)
                }
                State::Dump(dump, cursor) => {
                    let next = dump.list(now, engine, cursor, self.out.tail());
                    self.state = next.map_or(State::Command, |at| State::Dump(dump, at));
                    None
                }
                State::Watching => {
                    self.input.consume(self.input.len());
                    Some(Progress::NeedInput)
                }
                State::Blocked(..) => Some(Progress::WaitingForFlash),
                State::Closing if !self.out.pending.is_empty() => Some(Progress::WaitingForFlash),
                State::Closing => Some(Progress::Close),
                State::ShuttingDown(_) if !self.out.pending.is_empty() => {
                    Some(Progress::WaitingForFlash)
                }
                State::ShuttingDown(graceful) => Some(Progress::Shutdown { graceful }),
            };
            if let Some(progress) = progress {
                return progress;
            }
        }
    }

    fn authenticated(&mut self, next: turn::AuthStep, before: Option<usize>) -> Option<Progress> {
        self.input.need = 0;
        match next {
            turn::AuthStep::NeedLine => return Some(Progress::NeedInput),
            turn::AuthStep::NeedBody(len) => {
                self.state = State::Auth(Some(len));
                self.input.need = len;
                return (self.input.len() < len || before.is_some()).then_some(Progress::NeedInput);
            }
            turn::AuthStep::Again => self.state = State::Auth(None),
            turn::AuthStep::Welcome => self.state = State::Command,
            turn::AuthStep::Close => self.state = State::Closing,
        }
        None
    }

    fn turn<'t, 'c, E: Engine<Read = R>>(
        now: Now,
        engine: &'t E,
        ctx: &'t mut ConnContext<'c, R>,
        big: &'t BigBuffers,
        out: &'t mut Output<R>,
    ) -> Turn<'t, 'c, E> {
        Turn { now, engine, ctx, big, out, fetched: None }
    }

    /// Executes the command at the front of the input, if its line is complete.
    #[inline]
    fn command<E: Engine<Read = R>>(
        &mut self,
        now: Now,
        engine: &E,
        ctx: &mut ConnContext<'_, R>,
        fetched: Option<Fetched<'_, R>>,
    ) -> Option<Progress> {
        let bytes = self.input.bytes();
        let Some(at) = memchr::memchr(b'\n', &bytes[self.input.searched..]) else {
            if bytes.len() <= crate::protocol::LINE_MAX {
                self.input.searched = bytes.len();
                return Some(Progress::NeedInput);
            }
            let mut turn = Self::turn(now, engine, ctx, &self.big, &mut self.out);
            let act = turn.endless_line(bytes);
            return self.apply(act, engine, ctx);
        };
        let line_len = self.input.searched + at + 1;
        let mut turn = Turn { now, engine, ctx, big: &self.big, out: &mut self.out, fetched };
        let act = turn.command(bytes, line_len);
        // What comes again is told when it is done with.
        let again = matches!(act, Act::Wait(_) | Act::Body(_) | Act::Block(_) | Act::Watch(_));
        if turn.ctx.watch.is_some() && !again {
            turn.tell_command(bytes[..line_len].trim_ascii_end());
        }
        self.apply(act, engine, ctx)
    }

    /// Takes the consequences of a command for input and state.
    #[inline]
    fn apply<E: Engine<Read = R>>(
        &mut self,
        act: Act<R>,
        engine: &E,
        ctx: &mut ConnContext<'_, R>,
    ) -> Option<Progress> {
        match act {
            Act::Done(used) => {
                self.used(used);
                self.state = State::Command;
                None
            }
            Act::Wait(progress) => Some(progress),
            Act::Keys(used, keys, progress) => {
                self.input.consume(used);
                self.state = State::Keys(keys);
                progress
            }
            Act::Body(need) => {
                if need > SMALL && self.input.held < need && self.input.len() < SMALL {
                    // No share for an announcement: what the connection's own buffer holds must have come first.
                    self.input.need = SMALL;
                    self.state = State::Body(SMALL);
                    return None;
                }
                self.input.need = need;
                if need > SMALL && self.input.held < need {
                    if !self.big.input.try_take(need - self.input.held) {
                        return Some(Progress::WaitingForMemory);
                    }
                    self.input.held = need;
                    self.coming = None;
                }
                self.state = State::Body(need);
                None
            }
            Act::Swallow(used, body) => {
                self.used(used);
                self.state = State::Swallow(body);
                None
            }
            Act::SwallowLine(used) => {
                self.used(used);
                self.state = State::SwallowLine;
                None
            }
            Act::Block(read) => {
                let token = self.out.token();
                let len = engine.read_len(&read);
                if len > SMALL {
                    // Not asked for: a change holds everything up behind it, and there is one at most per connection.
                    self.big.output.take(len);
                    self.blocked_held = len;
                }
                ctx.reads.push((token, read));
                self.state = State::Blocked(token, read);
                Some(Progress::WaitingForFlash)
            }
            Act::Dump(used, dump) => {
                self.used(used);
                self.state = State::Dump(dump, 0);
                None
            }
            Act::Watch(used) => {
                self.used(used);
                self.state = State::Watching;
                None
            }
            Act::Quit(used) => {
                self.used(used);
                self.quit = true;
                self.state = State::Closing;
                None
            }
            Act::Close(used) => {
                self.used(used);
                self.state = State::Closing;
                None
            }
            Act::Shutdown(used, graceful) => {
                self.used(used);
                self.state = State::ShuttingDown(graceful);
                None
            }
        }
    }

    /// Drops a finished command from the input, and what its body took.
    #[inline]
    fn used(&mut self, n: usize) {
        self.input.consume(n);
        if self.input.need > 0 {
            self.input.need = 0;
            if self.input.held > 0 {
                self.input.shrink(SMALL);
                self.big.input.give(self.input.held);
                self.input.held = 0;
            }
        }
    }

    /// Takes the bytes of a flash read that was handed out (`None`: the device failed). Call [`Connection::process`]
    /// afterwards. A token that is not outstanding is ignored.
    pub fn flash_done<E: Engine<Read = R>>(
        &mut self,
        now: Now,
        engine: &E,
        ctx: &mut ConnContext<'_, R>,
        token: ReadToken,
        bytes: Option<&[u8]>,
    ) {
        match self.state {
            State::Blocked(waiting, read) if waiting == token => {
                if self.blocked_held > 0 {
                    self.big.output.give(self.blocked_held);
                    self.blocked_held = 0;
                }
                self.state = State::Command;
                self.input.searched = 0;
                let _ = self.command(now, engine, ctx, Some(Fetched { read: &read, bytes }));
            }
            _ => {
                if let Some(index) =
                    self.out.pending.iter().position(|p| p.token == token && !p.answered)
                {
                    let mut turn = Self::turn(now, engine, ctx, &self.big, &mut self.out);
                    turn.complete(index, bytes);
                }
            }
        }
    }
}

impl<R> Drop for Connection<R> {
    fn drop(&mut self) {
        self.waits_for_input.set(&self.big.input, false);
        self.waits_for_output.set(&self.big.output, false);
        let pending: usize = self.out.pending.iter().map(|p| p.held).sum();
        self.big.input.give(self.input.held);
        self.big.output.give(self.out.held + self.blocked_held + pending);
    }
}
