//! A thread's queue with the tape that records it.
//!
//! What a queue is told are the calls of its host; what node, volumes, shards and admission said to it meanwhile, and the mail
//! that it took, are answers on its tape. What it told shards and others, and what it asked of its host, is its decision. A
//! replay calls the same [`Queue`] over a node that answers as was recorded.
//!
//! A queue that has nothing to do at a call leaves no record of it.

mod answers;
mod codes;
mod noting;

use std::cell::RefCell;
use std::ops::Deref;

use larder_base::Nanos;
use larder_format::recording::bytes::put;
use larder_format::recording::{BadRecord, Cursor};

use crate::block::address::Placing;
use crate::block::api::{LineId, Sum};
use crate::block::node::event::{Effects, Host, JobId, Op, ShardIo, Submit};
use crate::block::node::failing::FlashError;
use crate::block::node::limits::Limits;
use crate::block::node::logged::LogIo;
use crate::block::node::queue::{Config, Node, Queue};
use crate::block::node::quiet::{Changes, QUIET};
use crate::block::node::readahead::FURTHEST as FURTHEST_AHEAD;
use crate::block::node::record::{end_code, end_words, take_end};
use crate::block::record::digest::{Answers, Digest};
use crate::block::record::tape::unknown;
use crate::block::record::{
    Again, BlockRunSetup, BlockSetupError, Replayed, SharedTape, StreamReader,
};
use answers::{AVolume, Heard, Nothing, Recorded, Replay};
use codes::{FURTHEST, describe, kind_code, kind_of, put_op, take_io, take_op};
use noting::{Notes, Noting, NotingFx};

/// A queue begins: its thread may have had another before.
const BEGIN: u8 = 0;
const SUBMIT: u8 = 1;
const FLASH_READ: u8 = 2;
const FLASH_WRITTEN: u8 = 3;
const MERGED: u8 = 4;
const PAGE_LOADED: u8 = 5;
const STORE_READ: u8 = 6;
const STORE_CHANGED: u8 = 7;
const TAKE_MAIL: u8 = 8;
const TICK: u8 = 9;
const TURN: u8 = 10;
const TELL: u8 = 11;

/// A larger zeroing or trim always has its range as a whole.
const MOST_RANGE_GROUPS: u64 = 1 << 12;

/// What is needed to record.
struct Recording {
    tape: SharedTape,
    notes: RefCell<Notes>,
    /// What the queue is told, as it is recorded.
    input: Vec<u8>,
}

impl Recording {
    /// The queue is about to be told something.
    fn begin(&mut self, input: impl FnOnce(&mut Vec<u8>)) {
        self.input.clear();
        input(&mut self.input);
        let notes = self.notes.get_mut();
        notes.digest = Digest::default();
        notes.heard.clear();
    }

    /// It has decided. `false` when recording has ended.
    #[must_use]
    fn end(&mut self, tag: u8, now: Nanos) -> bool {
        let Recording { tape, notes, input } = self;
        let Notes { digest, heard, .. } = notes.get_mut();
        tape.push(|tape| {
            let fields = |out: &mut Vec<u8>| {
                out.extend_from_slice(input);
                put(out, heard.len() as u64);
                out.extend_from_slice(heard);
            };
            tape.push(tag, now, fields, &Answers::default(), *digest)
        })
    }
}

/// A queue that records what it is told, if it has a tape. To look at it, it is a [`Queue`].
pub struct RecordedQueue<H: Host> {
    queue: Queue<H>,
    recording: Option<Box<Recording>>,
}

impl<H: Host> Deref for RecordedQueue<H> {
    type Target = Queue<H>;
    fn deref(&self) -> &Queue<H> {
        &self.queue
    }
}

/// Calls the queue with what it hears noted, or as it is where nothing is recorded.
macro_rules! told {
    ($self:ident, $tag:expr, $now:expr, $node:ident, $input:expr, |$q:ident, $n:ident| $call:expr) => {{
        let Some(recording) = &mut $self.recording else {
            let ($q, $n) = (&mut $self.queue, $node);
            return $call;
        };
        recording.begin($input);
        let ($q, $n) = (&mut $self.queue, &Noting { inner: $node, notes: &recording.notes });
        let result = $call;
        if !recording.end($tag, $now) {
            $self.recording = None;
        }
        result
    }};
    ($self:ident, $tag:expr, $now:expr, $node:ident, $fx:ident, $input:expr, |$q:ident, $n:ident, $f:ident| $call:expr) => {{
        let Some(recording) = &mut $self.recording else {
            let ($q, $n, $f) = (&mut $self.queue, $node, $fx);
            return $call;
        };
        recording.begin($input);
        let ($q, $n) = (&mut $self.queue, &Noting { inner: $node, notes: &recording.notes });
        let $f = &mut NotingFx { inner: $fx, notes: &recording.notes };
        let result = $call;
        if !recording.end($tag, $now) {
            $self.recording = None;
        }
        result
    }};
}

fn put_io<T>(out: &mut Vec<u8>, io: ShardIo, ended: &Result<T, FlashError>) {
    put(out, io.shard.into());
    put(out, io.io.0.into());
    put(out, end_code(ended));
}

impl<H: Host> RecordedQueue<H> {
    /// A queue without a tape.
    pub fn new(queue: Queue<H>) -> RecordedQueue<H> {
        RecordedQueue { queue, recording: None }
    }

    /// Records from now on; the queue must be new.
    pub fn record(&mut self, tape: SharedTape) {
        let (me, config, least) = self.queue.built_from();
        let notes = RefCell::new(Notes::default());
        let mut recording = Box::new(Recording { tape, notes, input: Vec::new() });
        recording.begin(|out| {
            let Config { ahead, range_groups, range_steps, least_void, .. } = config;
            let numbers = [me as u64, ahead, range_groups, range_steps.into(), least_void, least];
            numbers.iter().for_each(|&n| put(out, n));
        });
        let open = recording.end(BEGIN, Nanos::ZERO);
        self.recording = open.then_some(recording);
    }

    /// [`Queue::submit`].
    #[inline]
    pub fn submit<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        submit: Submit<H>,
    ) {
        let input = |out: &mut Vec<u8>| {
            put_op(out, &submit.op);
            put(out, kind_code(submit.holds));
        };
        told!(self, SUBMIT, now, node, fx, input, |q, n, f| q.submit(n, now, f, submit));
    }

    // Of a run with volumes that write back there is no recording: a host refuses it.

    /// [`Queue::log_read`].
    pub fn log_read<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        io: LogIo,
        read: Option<(&[u32], H::Bytes)>,
    ) {
        self.queue.log_read(node, now, fx, io, read);
    }

    /// [`Queue::log_written`].
    pub fn log_written<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        batch: u64,
        done: bool,
    ) {
        self.queue.log_written(node, now, fx, batch, done);
    }

    /// [`Queue::log_flushed`].
    pub fn log_flushed<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        covers: u64,
        done: bool,
    ) {
        self.queue.log_flushed(node, now, fx, covers, done);
    }

    /// [`Queue::log_due`].
    pub fn log_due<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
    ) -> Option<Nanos> {
        self.queue.log_due(node, now, fx)
    }

    /// [`Queue::flash_read`].
    #[inline]
    pub fn flash_read<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        io: ShardIo,
        line: LineId,
        read: Result<(&[u32], H::Bytes), FlashError>,
    ) {
        let input = |out: &mut Vec<u8>| {
            put_io(out, io, &read);
            put(out, line.0);
        };
        told!(self, FLASH_READ, now, node, input, |q, n| q.flash_read(n, now, io, line, read));
    }

    /// [`Queue::flash_written`].
    pub fn flash_written<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        io: ShardIo,
        crcs: Result<&[u32], FlashError>,
    ) {
        let input = |out: &mut Vec<u8>| put_io(out, io, &crcs);
        told!(self, FLASH_WRITTEN, now, node, input, |q, n| q.flash_written(n, now, io, crcs));
    }

    /// [`Queue::merged`].
    pub fn merged<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        io: ShardIo,
        crcs: Result<(u32, u32), FlashError>,
    ) {
        let input = |out: &mut Vec<u8>| put_io(out, io, &crcs);
        told!(self, MERGED, now, node, input, |q, n| q.merged(n, now, io, crcs));
    }

    /// [`Queue::page_loaded`].
    pub fn page_loaded<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        io: ShardIo,
        slots: Result<&[Option<Sum>], FlashError>,
    ) {
        let input = |out: &mut Vec<u8>| put_io(out, io, &slots);
        told!(self, PAGE_LOADED, now, node, input, |q, n| q.page_loaded(n, now, io, slots));
    }

    /// [`Queue::store_read`].
    pub fn store_read<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        job: JobId,
        read: Result<H::Bytes, H::Failure>,
    ) {
        let input = |out: &mut Vec<u8>| {
            put(out, job.0.into());
            put(out, read.is_ok().into());
        };
        told!(self, STORE_READ, now, node, fx, input, |q, n, f| q.store_read(n, now, f, job, read));
    }

    /// [`Queue::store_changed`].
    pub fn store_changed<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        job: JobId,
        outcome: Result<H::Extents, H::Failure>,
    ) {
        let input = |out: &mut Vec<u8>| {
            put(out, job.0.into());
            put(out, outcome.is_ok().into());
        };
        told!(self, STORE_CHANGED, now, node, fx, input, |q, n, f| {
            q.store_changed(n, now, f, job, outcome)
        });
    }

    /// [`Queue::take_mail`].
    pub fn take_mail<N: Node<H>>(&mut self, node: &N) {
        let Some(recording) = &mut self.recording else { return self.queue.take_mail(node) };
        recording.begin(|_| {});
        self.queue.take_mail(&Noting { inner: node, notes: &recording.notes });
        // There was none.
        if recording.notes.get_mut().heard == [0] {
            return;
        }
        if !recording.end(TAKE_MAIL, Nanos::ZERO) {
            self.recording = None;
        }
    }

    /// [`Queue::tick`].
    pub fn tick<N: Node<H>>(&mut self, node: &N, now: Nanos, fx: &mut impl Effects<H>) {
        if !self.queue.has_put_off() {
            return self.queue.tick(node, now, fx);
        }
        told!(self, TICK, now, node, fx, |_: &mut Vec<u8>| {}, |q, n, f| q.tick(n, now, f));
    }

    /// [`Queue::turn`].
    #[inline]
    pub fn turn<N: Node<H>>(&mut self, node: &N, now: Nanos, fx: &mut impl Effects<H>) -> bool {
        if self.queue.is_settled() {
            return self.queue.turn(node, now, fx);
        }
        told!(self, TURN, now, node, fx, |_: &mut Vec<u8>| {}, |q, n, f| q.turn(n, now, f))
    }

    /// [`Queue::tell`].
    pub fn tell<N: Node<H>>(&mut self, node: &N, fx: &mut impl Effects<H>) {
        if !self.queue.has_put_off() {
            return self.queue.tell(node, fx);
        }
        let no_input = |_: &mut Vec<u8>| {};
        told!(self, TELL, Nanos::ZERO, node, fx, no_input, |q, n, f| q.tell(n, f));
    }
}

/// What a queue was told.
enum Input {
    Begin(Box<Queue<Replay>>, String),
    Submit(Submit<Replay>, u64),
    FlashRead(ShardIo, LineId, Result<(), FlashError>),
    FlashWritten(ShardIo, Result<(), FlashError>),
    Merged(ShardIo, Result<(), FlashError>),
    PageLoaded(ShardIo, Result<(), FlashError>),
    StoreRead(JobId, Result<(), ()>),
    StoreChanged(JobId, Result<(), ()>),
    TakeMail,
    Tick,
    Turn,
    Tell,
}

fn take_done(c: &mut Cursor<'_>) -> Result<bool, BadRecord> {
    Ok(c.at_most(1, "whether it was done")? == 1)
}

fn take_ended(c: &mut Cursor<'_>) -> Result<(ShardIo, Result<(), FlashError>), BadRecord> {
    Ok((take_io(c)?, take_end(c)?))
}

fn take_job(c: &mut Cursor<'_>) -> Result<(JobId, Result<(), ()>), BadRecord> {
    let job = JobId(c.u32("request to a store")?);
    Ok((job, if take_done(c)? { Ok(()) } else { Err(()) }))
}

fn take_begin(c: &mut Cursor<'_>, config: Config) -> Result<Input, BadRecord> {
    let me = c.at_most(0xffff, "thread")?;
    let ahead = c.at_most(FURTHEST_AHEAD.0, "how far is read ahead")?;
    let range_groups = c.at_most(MOST_RANGE_GROUPS, "groups of a range")?;
    let range_steps = c.u32("steps of a range")?;
    let (least_void, least) = (c.varint("least void groups")?, c.varint("bytes of a stream")?);
    let config = Config { ahead, range_groups, range_steps, least_void, ..config };
    let queue = Queue::new(me as usize, config).with_least(least);
    Ok(Input::Begin(
        Box::new(queue),
        format!("the queue of thread {me} begins, {ahead} bytes read ahead"),
    ))
}

impl Input {
    fn take(tag: u8, c: &mut Cursor<'_>, config: Config) -> Result<Input, BadRecord> {
        Ok(match tag {
            BEGIN => take_begin(c, config)?,
            SUBMIT => {
                let op = take_op(c)?;
                let code = c.at_most(3, "what bytes hold")?;
                let must = "a kind that is written";
                let bad = BadRecord::Value { what: "what bytes hold", value: code, must };
                let holds = kind_of(code).ok_or(bad)?;
                let at = match op {
                    Op::Flush => 0,
                    Op::Read { at, .. }
                    | Op::Write { at, .. }
                    | Op::Zero { at, .. }
                    | Op::Trim { at, .. }
                    | Op::Status { at, .. }
                    | Op::Advise { at, .. } => at,
                };
                Input::Submit(Submit { volume: AVolume, ticket: (), op, holds }, at)
            }
            FLASH_READ => {
                let (io, read) = take_ended(c)?;
                // Its first byte is a place too.
                let most = FURTHEST / u64::from(config.line_bytes);
                Input::FlashRead(io, LineId(c.at_most(most, "line")?), read)
            }
            FLASH_WRITTEN => take_ended(c).map(|(io, done)| Input::FlashWritten(io, done))?,
            MERGED => take_ended(c).map(|(io, done)| Input::Merged(io, done))?,
            PAGE_LOADED => take_ended(c).map(|(io, done)| Input::PageLoaded(io, done))?,
            STORE_READ => take_job(c).map(|(job, done)| Input::StoreRead(job, done))?,
            STORE_CHANGED => take_job(c).map(|(job, done)| Input::StoreChanged(job, done))?,
            TAKE_MAIL => Input::TakeMail,
            TICK => Input::Tick,
            TURN => Input::Turn,
            TELL => Input::Tell,
            other => return Err(unknown(other)),
        })
    }

    fn describe(&self) -> String {
        let how = |failed: bool| if failed { "has failed" } else { "has ended" };
        let of = |io: &ShardIo| format!("I/O {} of shard {}", io.io.0, io.shard);
        match self {
            Input::Begin(_, words) => words.clone(),
            Input::Submit(submit, _) => describe(&submit.op),
            Input::FlashRead(io, line, done) => {
                format!("{} {}: a read of flash, of line {}", of(io), end_words(done), line.0)
            }
            Input::FlashWritten(io, done) => {
                format!("{} {}: a write of flash", of(io), end_words(done))
            }
            Input::Merged(io, done) => {
                format!("{} {}: a write of a part of a line", of(io), end_words(done))
            }
            Input::PageLoaded(io, done) => {
                format!("{} {}: a page of the table", of(io), end_words(done))
            }
            Input::StoreRead(job, done) => {
                format!("request {} {}: a read of a store", job.0, how(done.is_err()))
            }
            Input::StoreChanged(job, done) => {
                format!("request {} {}: a change of a store", job.0, how(done.is_err()))
            }
            Input::TakeMail => "mail".to_owned(),
            Input::Tick => "a look at what was put off".to_owned(),
            Input::Turn => "a turn".to_owned(),
            Input::Tell => "answers that wait for lines to go".to_owned(),
        }
    }
}

/// A queue as it is called again.
pub struct ReplayedQueue {
    config: Config,
    queue: Queue<Replay>,
    /// Where the volume begins and ends that was asked for last.
    known: (u64, u64),
    limits: Limits,
    changes: Changes,
}

impl ReplayedQueue {
    /// The queue of a thread, before it began.
    ///
    /// # Errors
    /// A setup that is of no run.
    pub fn of(setup: &BlockRunSetup) -> Result<ReplayedQueue, BlockSetupError> {
        let superblock = setup.superblock()?;
        let placing = Placing::of(&superblock.layout, superblock.key);
        // What does not follow from the layout is recorded.
        let config = Config::new(&superblock.layout, placing, 0);
        let (limits, changes) = (Limits::default(), Changes::new(0, QUIET));
        let queue = Queue::new(0, config);
        Ok(ReplayedQueue { config, queue, known: (0, 0), limits, changes })
    }

    /// Reads the next record of a stream, tells the queue the same, and says what was decided then and now.
    ///
    /// # Errors
    /// A record that makes no sense.
    pub fn replay(&mut self, reader: &mut StreamReader<'_>) -> Replayed {
        let begun = reader.begin()?;
        let input = Input::take(begun.tag, &mut reader.cursor, self.config)?;
        let len = reader.cursor.at_most(reader.cursor.left() as u64, "length of answers")?;
        let bytes = reader.cursor.take(len as usize, "answers")?;
        let ended = reader.end()?;
        let (now, words) = (begun.now, input.describe());
        let at = if let Input::Submit(_, at) = input { at } else { 0 };
        let (base, whole) = self.known;
        let heard = RefCell::new(Heard::new(bytes, self.known, at));
        let notes = RefCell::new(Notes { base, whole, ..Notes::default() });
        let taped = Recorded { heard: &heard, limits: &self.limits, changes: &self.changes };
        let node = &Noting { inner: &taped, notes: &notes };
        let (q, fx) = (&mut self.queue, &mut NotingFx { inner: &mut Nothing, notes: &notes });
        match input {
            Input::Begin(queue, _) => {
                *q = *queue;
                *heard.borrow_mut() = Heard::new(bytes, (0, 0), 0);
            }
            Input::Submit(submit, _) => q.submit(node, now, fx, submit),
            Input::FlashRead(io, line, read) => {
                q.flash_read(node, now, io, line, read.map(|()| (&[][..], ())));
            }
            Input::FlashWritten(io, done) => q.flash_written(node, now, io, done.map(|()| &[][..])),
            Input::Merged(io, done) => q.merged(node, now, io, done.map(|()| (0, 0))),
            Input::PageLoaded(io, done) => q.page_loaded(node, now, io, done.map(|()| &[][..])),
            Input::StoreRead(job, done) => q.store_read(node, now, fx, job, done),
            Input::StoreChanged(job, done) => q.store_changed(node, now, fx, job, done),
            Input::TakeMail => q.take_mail(node),
            Input::Tick => q.tick(node, now, fx),
            Input::Turn => {
                q.turn(node, now, fx);
            }
            Input::Tell => q.tell(node, fx),
        }
        let heard = heard.into_inner();
        self.known = heard.known();
        let decided = notes.into_inner().digest.finish();
        // Who asks otherwise has decided otherwise.
        let replayed = if heard.is_used_up() { decided } else { !ended.digest };
        Ok(Again { nanos: now.0, input: words, recorded: ended.digest, replayed })
    }
}
