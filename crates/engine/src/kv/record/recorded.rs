//! A shard, and the log, with the tape that records them: a branch on every call when there is none.

use std::ops::Deref;

use larder_base::{AppId, Now, UnixSecs};
use larder_policy::admission::AdmissionPolicy;
use larder_policy::learn::{Model, TrainingSet};

use super::decision::{self, Decision, What, mix_all};
use super::input::{Input, Io};
use super::tape::Tape;
use crate::dram::{Arena, ObjectMemory};
use crate::kv::api::{Effects, Fetched, FlashRead, Outcome, Request};
use crate::kv::log::{FlashLog, IoFailed, SegmentIo, Shards, Step};
use crate::kv::shard::KvShard;

/// A shard that records what it is told, if it has a tape. Everything that changes a shard goes through here: to look at it, it
/// is a [`KvShard`]; to change it past the tape takes [`RecordedShard::unrecorded`].
pub struct RecordedShard<M = Arena> {
    shard: KvShard<M>,
    tape: Option<Box<Tape>>,
}

impl<M> Deref for RecordedShard<M> {
    type Target = KvShard<M>;
    fn deref(&self) -> &KvShard<M> {
        &self.shard
    }
}

impl<M: ObjectMemory> RecordedShard<M> {
    /// A shard without a tape.
    pub fn new(shard: KvShard<M>) -> RecordedShard<M> {
        RecordedShard { shard, tape: None }
    }

    /// Records from now on; the shard must be new.
    pub fn record(&mut self, tape: Tape) {
        self.tape = Some(Box::new(tape));
    }

    /// The shard itself, for what is not recorded: before the first input, or when recording has ended.
    #[inline]
    pub fn unrecorded(&mut self) -> &mut KvShard<M> {
        &mut self.shard
    }

    /// Hands on what is on the tape.
    pub fn flush_chunk(&mut self) {
        self.keep(|tape| tape.flush_chunk());
    }

    /// Ends recording: hands on what is on the tape and says how many records the stream has.
    pub fn end_recording(&mut self) -> Option<u64> {
        let mut tape = self.tape.take()?;
        // Whether it was taken is the sink's to know: it counts what it was given.
        let _ = tape.flush_chunk();
        Some(tape.records())
    }

    fn keep(&mut self, push: impl FnOnce(&mut Tape) -> bool) {
        if let Some(tape) = &mut self.tape
            && !push(tape)
        {
            self.tape = None;
        }
    }

    /// [`KvShard::execute`].
    #[inline]
    pub fn execute(
        &mut self,
        now: Now,
        req: &Request<'_>,
        fetched: Option<Fetched<'_>>,
        fx: &mut impl Effects,
    ) -> Outcome {
        if self.tape.is_none() {
            return self.shard.execute(now, req, fetched, fx);
        }
        let read = fetched.map(|f| f.read);
        let (outcome, decision, got) = decision::execute(&mut self.shard, now, req, fetched, fx);
        self.keep(|tape| tape.request(now, req, read.map(|r| (r, got)), &decision));
        outcome
    }

    /// [`KvShard::verify`].
    pub fn verify(&mut self, now: Now, read: &FlashRead, bytes: Option<&[u8]>) {
        if self.tape.is_none() {
            return self.shard.verify(now, read, bytes);
        }
        let (decision, got) = decision::verify(&mut self.shard, now, read, bytes);
        self.keep(|tape| tape.push(now, &Input::Verify { read: *read, got }, &decision));
    }

    /// [`KvShard::flush`].
    pub fn flush(&mut self, now: Now, at: Option<UnixSecs>) {
        self.shard.flush(now, at);
        if self.tape.is_some() {
            let decision = decision::plain(&self.shard, What::Done, 0);
            self.keep(|tape| tape.push(now, &Input::Flush { at }, &decision));
        }
    }

    /// [`KvShard::make_free_room`].
    pub fn make_free_room(&mut self, now: Now) -> bool {
        if self.tape.is_none() {
            return self.shard.make_free_room(now);
        }
        let (more, decision) = decision::free_room(&mut self.shard, now);
        self.keep(|tape| tape.push(now, &Input::FreeRoom, &decision));
        more
    }

    /// [`KvShard::await_room`].
    pub fn await_room(&mut self, now: Now, key_len: usize, value_len: usize) -> bool {
        let calls = self.shard.await_room(key_len, value_len);
        if self.tape.is_some() {
            let decision = decision::plain(&self.shard, What::Done, u64::from(calls));
            let input = Input::Await { key_len, value_len };
            self.keep(|tape| tape.push(now, &input, &decision));
        }
        calls
    }

    /// [`KvShard::expire`].
    pub fn expire(&mut self, now: Now, all: bool) -> bool {
        if self.tape.is_none() {
            return self.shard.expire(now, all);
        }
        let (more, decision) = decision::expire(&mut self.shard, now, all);
        self.keep(|tape| tape.push(now, &Input::Expire { all }, &decision));
        more
    }

    /// What the log does to a shard.
    pub fn log_call<R>(&mut self, call: impl FnOnce(&mut KvShard<M>) -> R) -> R {
        if self.tape.is_none() {
            return call(&mut self.shard);
        }
        let (answer, decision) = decision::log_call(&mut self.shard, call);
        self.keep(|tape| tape.push(Now::default(), &Input::LogCall, &decision));
        answer
    }

    /// What the log does to a shard, and what the shard decided on it.
    pub fn decide_log_call<R>(&mut self, call: impl FnOnce(&mut KvShard<M>) -> R) -> (R, Decision) {
        decision::log_call(&mut self.shard, call)
    }

    /// [`AdmissionPolicy::training_due`].
    pub fn training_due(&mut self, now: Now) -> Option<AppId> {
        if self.tape.is_none() {
            return self.shard.admission_mut().training_due(now.mono);
        }
        let (due, decision) = decision::training_due(&mut self.shard, now);
        self.keep(|tape| tape.push(now, &Input::TrainingDue, &decision));
        due
    }

    /// [`AdmissionPolicy::take_training_set`].
    pub fn take_training_set(&mut self, app: AppId, now: Now) -> Option<TrainingSet> {
        if self.tape.is_none() {
            return self.shard.admission_mut().take_training_set(app, now.mono);
        }
        let (set, decision) = decision::training_set(&mut self.shard, app, now);
        self.keep(|tape| tape.push(now, &Input::TrainingSet { app }, &decision));
        set
    }

    /// [`AdmissionPolicy::install`].
    pub fn install(&mut self, app: AppId, model: Model, now: Now) {
        if self.tape.is_some() {
            let input = Input::Install { app, model: Box::new(model.clone()) };
            self.shard.admission_mut().install(app, model, now.mono);
            let decision = decision::plain(&self.shard, What::Done, 0);
            self.keep(|tape| tape.push(now, &input, &decision));
        } else {
            self.shard.admission_mut().install(app, model, now.mono);
        }
    }
}

/// The log, and the tape that records its steps, if it has one.
pub struct RecordedLog<B> {
    log: FlashLog<B>,
    tape: Option<Box<Tape>>,
}

impl<B> Deref for RecordedLog<B> {
    type Target = FlashLog<B>;
    fn deref(&self) -> &FlashLog<B> {
        &self.log
    }
}

/// What a step did with the device.
#[derive(Clone, Copy, Debug, Default)]
struct Touched {
    io: Io,
    wrote: bool,
    segment: u16,
}

/// Notes what input and output come to.
struct WatchedIo<'i, I> {
    inner: &'i mut I,
    touched: Touched,
}

impl<I: SegmentIo> SegmentIo for WatchedIo<'_, I> {
    type Buffer = I::Buffer;

    fn begins_at(&mut self, first: u32) {
        self.inner.begins_at(first);
    }

    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        let result = self.inner.write(segment, bytes);
        let io = if result.is_ok() { Io::Ok } else { Io::Failed };
        self.touched = Touched { io, wrote: true, segment };
        result
    }

    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        let result = self.inner.read(segment, bytes);
        let io = if result.is_ok() { Io::Ok } else { Io::Failed };
        self.touched = Touched { io, wrote: false, segment };
        result
    }
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> RecordedLog<B> {
    /// A log without a tape.
    pub fn new(log: FlashLog<B>) -> RecordedLog<B> {
        RecordedLog { log, tape: None }
    }

    /// Records from now on; the log must be new.
    pub fn record(&mut self, tape: Tape) {
        self.tape = Some(Box::new(tape));
    }

    /// The log itself, for what is not recorded: when recording has ended.
    pub fn unrecorded(&mut self) -> &mut FlashLog<B> {
        &mut self.log
    }

    /// Hands on what is on the tape.
    pub fn flush_chunk(&mut self) {
        if self.tape.as_mut().is_some_and(|tape| !tape.flush_chunk()) {
            self.tape = None;
        }
    }

    /// Ends recording: hands on what is on the tape and says how many records the stream has.
    pub fn end_recording(&mut self) -> Option<u64> {
        let mut tape = self.tape.take()?;
        let _ = tape.flush_chunk();
        Some(tape.records())
    }

    /// [`FlashLog::step`].
    pub fn step<M: ObjectMemory>(
        &mut self,
        now: Now,
        shards: &mut impl Shards<M>,
        io: &mut impl SegmentIo,
    ) -> Step {
        if self.tape.is_none() {
            return self.log.step(now, shards, io);
        }
        let (step, decision, outcome) = self.decide(now, shards, io);
        let kept = |tape: &mut Box<Tape>| tape.push(now, &Input::Step { io: outcome }, &decision);
        if self.tape.as_mut().is_some_and(|tape| !kept(tape)) {
            self.tape = None;
        }
        step
    }

    /// One step, what was decided in it, and what its input or output came to.
    pub fn decide<M: ObjectMemory>(
        &mut self,
        now: Now,
        shards: &mut impl Shards<M>,
        io: &mut impl SegmentIo,
    ) -> (Step, Decision, Io) {
        let mut io = WatchedIo { inner: io, touched: Touched::default() };
        let step = self.log.step(now, shards, &mut io);
        let touched = io.touched;
        let (what, detail) = match (touched.io, step) {
            (Io::None, Step::Idle) => (What::Idle, 0),
            (Io::None, Step::Worked) => (What::Worked, 0),
            _ if touched.wrote => (What::Wrote, u64::from(touched.segment)),
            _ => (What::ReadSegment, u64::from(touched.segment)),
        };
        let s = self.log.stats();
        let table = self.log.table().words();
        let state = mix_all(
            touched.io as u64,
            &[
                s.segments_written,
                s.bytes_written,
                s.record_bytes_written,
                s.segments_reclaimed,
                s.bytes_reclaim_read,
                s.bytes_reinserted,
                s.write_errors,
                s.read_errors,
                s.ghosts_made,
                u64::from(s.degraded),
                s.live_segments,
                s.last_lifetime_millis,
                self.log.budget().spent(),
                table.load(0),
                table.load(1),
            ],
        );
        (step, Decision::of(what, detail, state), touched.io)
    }
}
