//! Maintenance and the names of applications as they are recorded, and as they are called again: alone, with the answers that were
//! recorded.

use larder_base::{AppId, Now};
use larder_format::recording::BadRecord;
use larder_format::recording::bytes::put;
use larder_policy::application::{ApplicationError, Applications};
use larder_policy::learn::{ClassWeights, FeatureSet, TrainingSet};

use super::expiry::{Crawler, Expired};
use super::schedule::{Around, Schedule, Stepped, Turn};
use super::training::Trained;
use crate::kv::record::{Heard, MachineReader, MachineTape, RunSetup, SetupError, unknown};
use crate::record::{Again, Replayed};

const BEGIN: u8 = 0;
const TURN: u8 = 1;
const WAKE: u8 = 2;
const FITTED: u8 = 3;
/// An application is found by a key, or by its name.
const ASSIGN: u8 = 4;
const REGISTER: u8 = 5;

// What is asked for, in a digest.
const CRAWLER: u64 = 1;
const EXPIRE: u64 = 2;
const CRAWLED: u64 = 3;
const NAMES_KNOWN: u64 = 4;
const KEEP_NAMES: u64 = 5;
const KEEP_BUDGET: u64 = 6;
const STEP: u64 = 7;
const DEGRADED: u64 = 8;
const FREE_ROOM: u64 = 9;
const HAND_ON: u64 = 10;
const FOLLOW_LIMIT: u64 = 11;
const TRAINING_DUE: u64 = 12;
const SAMPLES: u64 = 13;
const TRAIN: u64 = 14;
const INSTALL: u64 = 15;
const DECIDED: u64 = 16;

/// Notes questions and answers on their way.
struct Noting<'a, A> {
    inner: &'a mut A,
    heard: Heard,
    /// What is on the tapes was to be handed on.
    handed_on: bool,
}

impl<A> Noting<'_, A> {
    fn ask<R: Copy>(
        &mut self,
        what: u64,
        numbers: &[u64],
        ask: impl FnOnce(&mut A) -> R,
        code: impl FnOnce(R) -> u64,
    ) -> R {
        self.heard.note(what, numbers);
        let answer = ask(self.inner);
        self.heard.answer(code(answer));
        answer
    }
}

impl<A: Trained> Trained for Noting<'_, A> {
    type Model = A::Model;

    fn count(&self) -> usize {
        self.inner.count()
    }
    fn training_due(&mut self, shard: usize, now: Now) -> Option<AppId> {
        let code = |app: Option<AppId>| app.map_or(0, |app| u64::from(app.0) + 1);
        self.ask(TRAINING_DUE, &[shard as u64], |a| a.training_due(shard, now), code)
    }
    fn take_training_set(&mut self, shard: usize, app: AppId, now: Now) -> Option<TrainingSet> {
        self.heard.note(SAMPLES, &[shard as u64, app.0.into()]);
        let set = self.inner.take_training_set(shard, app, now);
        self.heard.answer(set.is_some().into());
        set
    }
    fn install(&mut self, shard: usize, app: AppId, model: A::Model, now: Now) {
        self.heard.note(INSTALL, &[shard as u64, app.0.into()]);
        self.inner.install(shard, app, model, now);
    }
}

impl<A: Around> Around for Noting<'_, A> {
    fn crawler(&mut self) -> Crawler {
        let code = |c: Crawler| u64::from(c.enabled) | u64::from(c.running) << 1;
        self.ask(CRAWLER, &[], A::crawler, code)
    }
    fn expire(&mut self, now: Now, shard: usize, all: bool) -> Option<Expired> {
        let code = |expired: Option<Expired>| match expired {
            None => 0,
            Some(Expired { was_under_way, more }) => {
                1 | u64::from(was_under_way) << 1 | u64::from(more) << 2
            }
        };
        self.ask(EXPIRE, &[shard as u64, all.into()], |a| a.expire(now, shard, all), code)
    }
    fn crawled(&mut self) {
        self.heard.note(CRAWLED, &[]);
        self.inner.crawled();
    }
    fn names_known(&mut self) -> usize {
        self.ask(NAMES_KNOWN, &[], A::names_known, |n| n as u64)
    }
    fn keep_names(&mut self) -> Option<usize> {
        // (The default is always known.)
        self.ask(KEEP_NAMES, &[], A::keep_names, |n| n.map_or(0, |n| n as u64))
    }
    fn keep_budget(&mut self, now: Now, segments: u64) {
        self.heard.note(KEEP_BUDGET, &[segments]);
        self.inner.keep_budget(now, segments);
    }
    fn step(&mut self, now: Now) -> Stepped {
        let code = |s: Stepped| u64::from(s.worked) | u64::from(s.degraded) << 1;
        self.ask(STEP, &[], |a| a.step(now), code)
    }
    fn degraded(&mut self, degraded: bool) {
        self.heard.note(DEGRADED, &[degraded.into()]);
        self.inner.degraded(degraded);
    }
    fn free_room(&mut self, now: Now, shard: usize) -> bool {
        self.ask(FREE_ROOM, &[shard as u64], |a| a.free_room(now, shard), u64::from)
    }
    fn made_room(&mut self, now: Now) {
        // Who wants to know of evictions decides nothing.
        self.inner.made_room(now);
    }
    fn hand_on(&mut self, now: Now) {
        self.heard.note(HAND_ON, &[]);
        self.handed_on = true;
        self.inner.hand_on(now);
    }
    fn follow_limit(&mut self, now: Now) -> bool {
        self.ask(FOLLOW_LIMIT, &[], |a| a.follow_limit(now), u64::from)
    }
    fn train(&mut self, samples: TrainingSet, seed: u64) {
        self.heard.note(TRAIN, &[samples.app.0.into(), seed]);
        self.inner.train(samples, seed);
    }
}

/// The schedule with the tape that records it, if it has one: a branch on every call when there is none.
pub(super) struct RecordedSchedule {
    schedule: Schedule,
    seed: u64,
    flash: bool,
    tape: Option<Box<MachineTape>>,
}

fn note_turn(heard: &mut Heard, turn: Turn) {
    heard.note(
        DECIDED,
        &match turn {
            Turn::Again => [0, 0],
            Turn::At(at) => [1, at.0],
        },
    );
}

impl RecordedSchedule {
    /// See [`Schedule::new`].
    pub(super) fn new(flash: bool, seed: u64, names_kept: usize) -> RecordedSchedule {
        let schedule = Schedule::new(flash, seed, names_kept);
        RecordedSchedule { schedule, seed, flash, tape: None }
    }

    /// Records from now on; the schedule must be new.
    pub(super) fn record(&mut self, tape: MachineTape) {
        self.tape = Some(Box::new(tape));
        let (seed, flash, names) = (self.seed, self.flash, self.schedule.names_kept() as u64);
        let told = |out: &mut Vec<u8>| {
            out.push(flash.into());
            put(out, seed);
            put(out, names);
        };
        self.keep(BEGIN, Now::default(), told, &Heard::default());
    }

    /// Ends recording: hands on what is on the tape and says how many records the stream has.
    pub(super) fn end_recording(&mut self) -> Option<u64> {
        let mut tape = self.tape.take()?;
        let _ = tape.flush_chunk();
        Some(tape.records())
    }

    fn keep(&mut self, kind: u8, now: Now, told: impl FnOnce(&mut Vec<u8>), heard: &Heard) {
        if let Some(tape) = &mut self.tape
            && !tape.push(kind, now, told, heard)
        {
            self.tape = None;
        }
    }

    /// See [`Schedule::turn`].
    pub(super) fn turn(&mut self, now: Now, around: &mut impl Around) -> Turn {
        if self.tape.is_none() {
            return self.schedule.turn(now, around);
        }
        let mut noting = Noting { inner: around, heard: Heard::default(), handed_on: false };
        let turn = self.schedule.turn(now, &mut noting);
        let Noting { mut heard, handed_on, .. } = noting;
        note_turn(&mut heard, turn);
        self.keep(TURN, now, |_| {}, &heard);
        if handed_on && self.tape.as_mut().is_some_and(|tape| !tape.flush_chunk()) {
            self.tape = None;
        }
        turn
    }

    /// See [`Schedule::wake`].
    pub(super) fn wake(&mut self) {
        // Who is wanted already has heard it.
        if self.tape.is_some() && !self.schedule.is_wanted() {
            self.keep(WAKE, Now::default(), |_| {}, &Heard::default());
        }
        self.schedule.wake();
    }

    /// See [`Schedule::fitted`].
    pub(super) fn fitted<A: Trained>(
        &mut self,
        now: Now,
        around: &mut A,
        app: AppId,
        model: Option<A::Model>,
    ) {
        if self.tape.is_none() {
            return self.schedule.fitted(now, around, app, model);
        }
        let there = u8::from(model.is_some());
        let mut noting = Noting { inner: around, heard: Heard::default(), handed_on: false };
        self.schedule.fitted(now, &mut noting, app, model);
        let heard = noting.heard;
        let told = |out: &mut Vec<u8>| {
            put(out, app.0.into());
            out.push(there);
        };
        self.keep(FITTED, now, told, &heard);
    }

    /// See [`Schedule::is_fitting`].
    pub(super) fn is_fitting(&self) -> bool {
        self.schedule.is_fitting()
    }

    /// See [`Schedule::keep_names`]. Behind the end of a record.
    pub(super) fn keep_names(
        &mut self,
        known: usize,
        keep: impl FnOnce() -> Option<usize>,
    ) -> bool {
        self.schedule.keep_names(known, keep)
    }

    #[cfg(feature = "planted")]
    pub(super) fn plant(&mut self, fault: crate::kv::Planted) {
        self.schedule.plant(fault);
    }
}

/// Answers as they were recorded. Who asks for more than was answered hears what says that there is nothing to do.
struct Told<'a> {
    shards: usize,
    answers: std::slice::Iter<'a, u64>,
}

impl Told<'_> {
    fn next(&mut self) -> u64 {
        self.answers.next().copied().unwrap_or(0)
    }
}

impl Trained for Told<'_> {
    /// Shards are told of models in streams of their own.
    type Model = ();

    fn count(&self) -> usize {
        self.shards
    }
    fn training_due(&mut self, _: usize, _: Now) -> Option<AppId> {
        self.next().checked_sub(1).map(|app| AppId(app.min(u64::from(u16::MAX)) as u16))
    }
    fn take_training_set(&mut self, _: usize, app: AppId, _: Now) -> Option<TrainingSet> {
        (self.next() != 0).then(|| TrainingSet {
            app,
            features: FeatureSet::Extended,
            class_weights: ClassWeights::IMPROVED,
            samples: Vec::new(),
        })
    }
    fn install(&mut self, _: usize, _: AppId, (): (), _: Now) {}
}

impl Around for Told<'_> {
    fn crawler(&mut self) -> Crawler {
        let answer = self.next();
        Crawler { enabled: answer & 1 != 0, running: answer & 2 != 0, starts: 0 }
    }
    fn expire(&mut self, _: Now, _: usize, _: bool) -> Option<Expired> {
        let answer = self.next();
        let expired = Expired { was_under_way: answer & 2 != 0, more: answer & 4 != 0 };
        (answer & 1 != 0).then_some(expired)
    }
    fn crawled(&mut self) {}
    fn names_known(&mut self) -> usize {
        self.next() as usize
    }
    fn keep_names(&mut self) -> Option<usize> {
        Some(self.next() as usize).filter(|&n| n > 0)
    }
    fn keep_budget(&mut self, _: Now, _: u64) {}
    fn step(&mut self, _: Now) -> Stepped {
        let answer = self.next();
        Stepped { worked: answer & 1 != 0, degraded: answer & 2 != 0 }
    }
    fn degraded(&mut self, _: bool) {}
    fn free_room(&mut self, _: Now, _: usize) -> bool {
        self.next() != 0
    }
    fn made_room(&mut self, _: Now) {}
    fn hand_on(&mut self, _: Now) {}
    fn follow_limit(&mut self, _: Now) -> bool {
        self.next() != 0
    }
    fn train(&mut self, _: TrainingSet, _: u64) {}
}

/// Maintenance as it is called again.
pub struct ReplayedMaintenance {
    shards: usize,
    schedule: Schedule,
}

impl ReplayedMaintenance {
    /// Maintenance, before it began, of a cache that was built from `setup`.
    pub fn of(setup: &RunSetup) -> ReplayedMaintenance {
        let schedule = Schedule::new(setup.log.is_some(), 0, 0);
        ReplayedMaintenance { shards: setup.shards.len(), schedule }
    }

    /// Reads the next record of the stream, tells the machine the same, and says what was decided then and now.
    ///
    /// # Errors
    /// A record that makes no sense.
    pub fn replay(&mut self, reader: &mut MachineReader<'_>) -> Replayed {
        let (kind, now) = reader.begin()?;
        let c = &mut reader.cursor;
        let (mut app, mut there, mut begun) = (AppId::DEFAULT, false, None);
        let words = match kind {
            BEGIN => {
                let flash = c.at_most(1, "whether there is flash")? == 1;
                let (seed, names) = (c.varint("seed of training")?, c.u32("number of names")?);
                begun = Some(Schedule::new(flash, seed, names as usize));
                "maintenance begins"
            }
            TURN => "a turn",
            WAKE => "a shard wants room",
            FITTED => {
                app = AppId(c.at_most(u64::from(u16::MAX), "application")? as u16);
                there = c.at_most(1, "whether there is a model")? == 1;
                if there { "a model was fitted" } else { "no model could be fitted" }
            }
            other => return Err(unknown(other)),
        };
        let ended = reader.end()?;
        let mut told = Told { shards: self.shards, answers: ended.answers.iter() };
        let mut noting = Noting { inner: &mut told, heard: Heard::default(), handed_on: false };
        match kind {
            TURN => {
                let turn = self.schedule.turn(now, &mut noting);
                note_turn(&mut noting.heard, turn);
            }
            WAKE => self.schedule.wake(),
            // One model at a time is fitted; it is nobody's where none was asked for.
            FITTED => self.schedule.fitted(now, &mut noting, app, there.then_some(())),
            _ => {}
        }
        if let Some(begun) = begun {
            self.schedule = begun;
        }
        let (recorded, replayed) = (ended.digest, noting.heard.digest());
        Ok(Again { nanos: now.mono.0, input: words.to_owned(), recorded, replayed })
    }
}

/// The applications of a node, with the tape that records which names were given numbers.
pub(super) struct RecordedApplications {
    names: Applications,
    tape: Option<Box<MachineTape>>,
}

impl std::ops::Deref for RecordedApplications {
    type Target = Applications;
    fn deref(&self) -> &Applications {
        &self.names
    }
}

fn note_app(heard: &mut Heard, app: Option<AppId>, names: usize) {
    heard.note(DECIDED, &[app.map_or(0, |app| u64::from(app.0) + 1), names as u64]);
}

impl RecordedApplications {
    /// Without a tape.
    pub(super) fn new(names: Applications) -> RecordedApplications {
        RecordedApplications { names, tape: None }
    }

    /// Records from now on; they must be those of the setup.
    pub(super) fn record(&mut self, tape: MachineTape) {
        self.tape = Some(Box::new(tape));
    }

    /// Hands on what is on the tape.
    pub(super) fn flush_chunk(&mut self) {
        if self.tape.as_mut().is_some_and(|tape| !tape.flush_chunk()) {
            self.tape = None;
        }
    }

    /// Ends recording: hands on what is on the tape and says how many records the stream has.
    pub(super) fn end_recording(&mut self) -> Option<u64> {
        let mut tape = self.tape.take()?;
        let _ = tape.flush_chunk();
        Some(tape.records())
    }

    fn keep(&mut self, kind: u8, name: &[u8], app: Option<AppId>) {
        let Some(tape) = &mut self.tape else { return };
        let mut heard = Heard::default();
        note_app(&mut heard, app, self.names.len());
        let told = |out: &mut Vec<u8>| {
            put(out, name.len() as u64);
            out.extend_from_slice(name);
        };
        if !tape.push(kind, Now::default(), told, &heard) {
            self.tape = None;
        }
    }

    /// See [`Applications::assign`].
    pub(super) fn assign(&mut self, key: &[u8]) -> AppId {
        let app = self.names.assign(key);
        self.keep(ASSIGN, key, Some(app));
        app
    }

    /// See [`Applications::register`].
    pub(super) fn register(&mut self, name: &str) -> Result<AppId, ApplicationError> {
        let app = self.names.register(name);
        self.keep(REGISTER, name.as_bytes(), app.as_ref().ok().copied());
        app
    }
}

/// The names of applications as they are asked again.
pub struct ReplayedApplications {
    names: Applications,
}

impl ReplayedApplications {
    /// Those of a cache that was built from `setup`, as it began.
    ///
    /// # Errors
    /// Applications that cannot be.
    pub fn of(setup: &RunSetup) -> Result<ReplayedApplications, SetupError> {
        Ok(ReplayedApplications { names: setup.applications.applications()? })
    }

    /// Reads the next record of the stream, asks the same, and says what was decided then and now.
    ///
    /// # Errors
    /// A record that makes no sense.
    pub fn replay(&mut self, reader: &mut MachineReader<'_>) -> Replayed {
        let (kind, now) = reader.begin()?;
        if kind != ASSIGN && kind != REGISTER {
            return Err(unknown(kind));
        }
        let left = reader.cursor.left() as u64;
        let length = reader.cursor.at_most(left, "length of a name")? as usize;
        let name = reader.cursor.take(length, "name")?;
        let ended = reader.end()?;
        let (app, words) = if kind == ASSIGN {
            (Some(self.names.assign(name)), "the application of key")
        } else {
            let text = std::str::from_utf8(name).map_err(|e| BadRecord::Value {
                what: "the first byte of a name that is no text",
                value: e.valid_up_to() as u64,
                must: "behind its end",
            })?;
            (self.names.register(text).ok(), "the application")
        };
        let mut heard = Heard::default();
        note_app(&mut heard, app, self.names.len());
        let input = format!("{words} '{}'", name.escape_ascii());
        let (recorded, replayed) = (ended.digest, heard.digest());
        Ok(Again { nanos: now.mono.0, input, recorded, replayed })
    }
}
