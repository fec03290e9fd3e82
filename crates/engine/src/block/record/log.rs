//! The log of the map with the tape that records it.

use std::ops::Deref;

use larder_base::Nanos;
use larder_format::block::log::Held;
use larder_format::block::{BlockSuperblock, Layout};

use super::digest::{Answers, Digest};
use super::tape::{Again, BlockTape, Replayed, StreamReader, unknown};
use crate::block::api::{IoFailed, SlotId, Sum};
use crate::block::log::{LogFailed, LogIo, LogShards, LogStep, MapLog};
use crate::block::paging::TableChange;
use crate::block::shard::MapRecord;
use larder_format::recording::BadRecord;
use larder_format::recording::bytes::{put, unzigzag, zigzag};

const ASK: u8 = 0;
const STEP: u8 = 1;
const SETTLE: u8 = 2;
const UPDATE: u8 = 3;
const WRITE_OUT: u8 = 4;
const BEGIN_ANEW: u8 = 5;
const HURRY: u8 = 6;

/// What the log heard during one call: yes or no, and numbers.
#[derive(Default)]
pub(in crate::block) struct Heard {
    pub digest: Digest,
    pub answers: Answers,
    pub numbers: Vec<u64>,
}

/// Shards and device as they answer, noted.
pub(in crate::block) struct Noting<'a, S> {
    pub inner: &'a mut S,
    pub heard: &'a std::cell::RefCell<Heard>,
    pub layout: Layout,
}

impl<S: LogShards> LogShards for Noting<'_, S> {
    fn records_waiting(&mut self, shard: u32) -> usize {
        let count = self.inner.records_waiting(shard);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[1, shard.into()]);
        heard.numbers.push(count as u64);
        count
    }

    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        let from = out.len();
        self.inner.take_records(shard, most, out);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[2, shard.into(), most as u64]);
        let taken = &out[from..];
        heard.numbers.push(taken.len() as u64);
        heard.answers.push(taken.iter().any(|r| r.holds.is_some()));
    }

    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        let from = out.len();
        self.inner.take_pages(shard, most, out);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[12, shard.into(), most as u64]);
        let taken = &out[from..];
        heard.numbers.push(taken.len() as u64);
        for change in taken {
            // What lies in the pages is the shard's decision; where they go is the log's.
            let numbers = match *change {
                TableChange::Page { page, .. } => [page.into(), 0],
                TableChange::Cleared { first, count } => [first.into(), count.into()],
            };
            heard.numbers.extend(numbers);
        }
    }

    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        let from = out.len();
        self.inner.emptied(shard, out);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[13, shard.into()]);
        let runs = &out[from..];
        heard.numbers.push(runs.len() as u64);
        let mut end = 0;
        for &(first, count) in runs {
            // From the end of the one before: small numbers.
            heard.numbers.extend([zigzag(i64::from(first.0) - end), count.into()]);
            end = i64::from(first.0) + i64::from(count);
        }
    }

    fn records_durable(&mut self, shard: u32) {
        self.heard.borrow_mut().digest.all(&[3, shard.into()]);
        self.inner.records_durable(shard);
    }

    fn records_lost(&mut self, shard: u32) {
        self.heard.borrow_mut().digest.all(&[4, shard.into()]);
        self.inner.records_lost(shard);
    }

    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        let from = out.len();
        self.inner.state(shard, first, most, out);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[5, shard.into(), first.0.into(), most.into()]);
        heard.numbers.push((out.len() - from) as u64);
    }

    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        let quiet = self.inner.quiet(shard, region);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[6, shard.into(), region.into()]);
        heard.answers.push(quiet);
        quiet
    }

    fn intent_ready(&mut self, shard: u32, region: u32) {
        self.heard.borrow_mut().digest.all(&[7, shard.into(), region.into()]);
        self.inner.intent_ready(shard, region);
    }

    fn flush_backing(&mut self, region: u32) -> Result<(), IoFailed> {
        let outcome = self.inner.flush_backing(region);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[8, region.into()]);
        heard.answers.push(outcome.is_ok());
        outcome
    }
}

impl<S: LogIo> LogIo for Noting<'_, S> {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        let outcome = self.inner.read(at, out);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[9, at, out.len() as u64]);
        heard.answers.push(outcome.is_ok());
        outcome
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        let outcome = self.inner.write(at, bytes);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[10, at, bytes.len() as u64]);
        // Of the write-intent map every bit is the log's own decision; what records and snapshots say is the shards'.
        let intents = self.layout.intents_at()..self.layout.snapshot_at(0);
        if intents.contains(&at) {
            heard.digest.add(crc32c::crc32c(bytes).into());
        }
        heard.answers.push(outcome.is_ok());
        outcome
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        let outcome = self.inner.flush();
        let mut heard = self.heard.borrow_mut();
        heard.digest.add(11);
        heard.answers.push(outcome.is_ok());
        outcome
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        let outcome = self.inner.punch(at, len);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[14, at, len]);
        heard.answers.push(outcome.is_ok());
        outcome
    }
}

fn note_step(digest: &mut Digest, outcome: &Result<LogStep, LogFailed>) {
    digest.add(match outcome {
        Ok(LogStep::Worked) => 0,
        Ok(LogStep::Idle) => 1,
        Err(_) => 2,
    });
}

fn note_settled(digest: &mut Digest, outcome: &Result<bool, LogFailed>) {
    digest.add(match outcome {
        Ok(false) => 0,
        Ok(true) => 1,
        Err(_) => 2,
    });
}

/// A log that records what it is told, if it has a tape. To look at it, it is a [`MapLog`].
pub struct RecordedLog {
    log: MapLog,
    tape: Option<Box<BlockTape>>,
}

impl Deref for RecordedLog {
    type Target = MapLog;
    fn deref(&self) -> &MapLog {
        &self.log
    }
}

impl RecordedLog {
    /// A log without a tape.
    pub fn new(log: MapLog) -> RecordedLog {
        RecordedLog { log, tape: None }
    }

    /// Records from now on; the log must be that of a device without lines.
    pub fn record(&mut self, tape: BlockTape) {
        self.tape = Some(Box::new(tape));
    }

    /// Hands on what is on the tape.
    pub fn flush_chunk(&mut self) {
        if self.tape.as_mut().is_some_and(|tape| !tape.flush_chunk()) {
            self.tape = None;
        }
    }

    /// [`MapLog::begin_anew`]. What else is changed is the caller's affair, and not compared.
    ///
    /// # Errors
    /// As there.
    pub fn begin_anew(
        &mut self,
        io: &mut impl LogIo,
        change: impl FnOnce(&mut BlockSuperblock),
    ) -> Result<(), LogFailed> {
        let outcome = self.log.begin_anew(io, change);
        if self.tape.is_some() && outcome.is_ok() {
            self.keep(BEGIN_ANEW, Nanos::ZERO, &Heard::default());
        }
        outcome
    }

    /// Ends recording: hands on what is on the tape.
    pub fn end_recording(&mut self) {
        self.flush_chunk();
        self.tape = None;
    }

    fn keep(&mut self, tag: u8, now: Nanos, heard: &Heard) {
        let fields = |out: &mut Vec<u8>| {
            put(out, heard.numbers.len() as u64);
            heard.numbers.iter().for_each(|&n| put(out, n));
        };
        if let Some(tape) = &mut self.tape
            && !tape.push(tag, now, fields, &heard.answers, heard.digest)
        {
            self.tape = None;
        }
    }

    /// [`MapLog::ask`].
    pub fn ask(&mut self, shard: u32, region: u32) {
        self.log.ask(shard, region);
        if self.tape.is_some() {
            let numbers = vec![shard.into(), region.into()];
            self.keep(ASK, Nanos::ZERO, &Heard { numbers, ..Heard::default() });
        }
    }

    /// [`MapLog::hurry`].
    pub fn hurry(&mut self, first: u32, last: u32) {
        self.log.hurry(first, last);
        if self.tape.is_some() {
            let numbers = vec![first.into(), last.into()];
            self.keep(HURRY, Nanos::ZERO, &Heard { numbers, ..Heard::default() });
        }
    }

    /// [`MapLog::step`].
    ///
    /// # Errors
    /// The log's.
    pub fn step(
        &mut self,
        now: Nanos,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<LogStep, LogFailed> {
        if self.tape.is_none() {
            return self.log.step(now, shards, io);
        }
        let (outcome, mut heard) = decide(&mut self.log, shards, io, |l, s, i| l.step(now, s, i));
        note_step(&mut heard.digest, &outcome);
        // Nothing is looked for hundreds of times a second: it is not worth a record.
        if outcome != Ok(LogStep::Idle) || heard.answers.count > 0 {
            self.keep(STEP, now, &heard);
        }
        outcome
    }

    /// [`MapLog::settle`].
    ///
    /// # Errors
    /// The log's.
    pub fn settle(
        &mut self,
        now: Nanos,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<bool, LogFailed> {
        if self.tape.is_none() {
            return self.log.settle(now, shards, io);
        }
        let (outcome, mut heard) = decide(&mut self.log, shards, io, |l, s, i| l.settle(now, s, i));
        note_settled(&mut heard.digest, &outcome);
        self.keep(SETTLE, now, &heard);
        outcome
    }

    /// [`MapLog::write_out`].
    ///
    /// # Errors
    /// The log's.
    pub fn write_out(
        &mut self,
        shards: &mut impl LogShards,
        io: &mut impl LogIo,
    ) -> Result<(), LogFailed> {
        if self.tape.is_none() {
            return self.log.write_out(shards, io);
        }
        let (outcome, mut heard) = decide(&mut self.log, shards, io, |l, s, i| l.write_out(s, i));
        heard.digest.add(outcome.is_err().into());
        self.keep(WRITE_OUT, Nanos::ZERO, &heard);
        outcome
    }

    /// [`MapLog::update`]. What is changed is the caller's affair, and not compared.
    ///
    /// # Errors
    /// The log's.
    pub fn update(
        &mut self,
        io: &mut impl LogIo,
        change: impl FnOnce(&mut BlockSuperblock),
    ) -> Result<(), LogFailed> {
        let outcome = self.log.update(io, change);
        if self.tape.is_some() && outcome.is_ok() {
            self.keep(UPDATE, Nanos::ZERO, &Heard::default());
        }
        outcome
    }

    /// Reads the next record of a stream, tells the log the same, and says what was decided then and now.
    ///
    /// # Errors
    /// A record that makes no sense.
    pub fn replay(&mut self, reader: &mut StreamReader<'_>) -> Replayed {
        let begun = reader.begin()?;
        let c = &mut reader.cursor;
        // Every number takes a byte at least.
        let count = c.at_most(c.left() as u64, "how many numbers")?;
        let numbers = (0..count).map(|_| c.varint("number")).collect::<Result<Vec<_>, _>>()?;
        let ended = reader.end()?;
        let now = begun.now;
        let next = std::cell::Cell::new(0);
        let layout = self.log.superblock().layout;
        let (number, answers) = (0, &ended.answers);
        let told = || Told { numbers: &numbers, number, answers, answer: &next, layout };
        let (mut world, mut device) = (told(), told());
        let log = &mut self.log;
        let (input, digest) = match begun.tag {
            ASK => {
                let &[shard, region] = &numbers[..] else {
                    let (what, value) = ("how many numbers", count);
                    return Err(BadRecord::Value { what, value, must: "a shard and a region" });
                };
                let regions = u64::from(log.superblock().layout.regions);
                if shard > u64::from(u32::MAX) || region >= regions {
                    let what = "a region that is asked for";
                    return Err(BadRecord::Value {
                        what,
                        value: region,
                        must: "one of the device",
                    });
                }
                log.ask(shard as u32, region as u32);
                (
                    format!("the bit of region {region}, asked for by shard {shard}"),
                    Digest::default(),
                )
            }
            HURRY => {
                let &[first, last] = &numbers[..] else {
                    let (what, value) = ("how many numbers", count);
                    return Err(BadRecord::Value { what, value, must: "two regions" });
                };
                let region = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
                log.hurry(region(first), region(last));
                (format!("regions {first} to {last}, in a hurry"), Digest::default())
            }
            STEP => {
                let (outcome, mut heard) =
                    decide(log, &mut world, &mut device, |l, s, i| l.step(now, s, i));
                note_step(&mut heard.digest, &outcome);
                ("a step".to_owned(), heard.digest)
            }
            SETTLE => {
                let (outcome, mut heard) =
                    decide(log, &mut world, &mut device, |l, s, i| l.settle(now, s, i));
                note_settled(&mut heard.digest, &outcome);
                ("the end of the run".to_owned(), heard.digest)
            }
            WRITE_OUT => {
                let (outcome, mut heard) =
                    decide(log, &mut world, &mut device, |l, s, i| l.write_out(s, i));
                heard.digest.add(outcome.is_err().into());
                ("what is left to be written".to_owned(), heard.digest)
            }
            UPDATE => {
                // The device of a replay takes everything.
                let _ = log.update(&mut Taken, |_| {});
                ("another superblock".to_owned(), Digest::default())
            }
            BEGIN_ANEW => {
                let _ = log.begin_anew(&mut Taken, |_| {});
                ("an empty map on the device".to_owned(), Digest::default())
            }
            other => return Err(unknown(other)),
        };
        Ok(Again { nanos: now.0, input, recorded: ended.digest, replayed: digest.finish() })
    }
}

/// Calls the log with what it hears noted.
fn decide<S: LogShards, I: LogIo, R>(
    log: &mut MapLog,
    shards: &mut S,
    io: &mut I,
    call: impl FnOnce(&mut MapLog, &mut Noting<'_, S>, &mut Noting<'_, I>) -> R,
) -> (R, Heard) {
    let heard = std::cell::RefCell::new(Heard::default());
    let layout = log.superblock().layout;
    let mut shards = Noting { inner: shards, heard: &heard, layout };
    let mut io = Noting { inner: io, heard: &heard, layout };
    let result = call(log, &mut shards, &mut io);
    (result, heard.into_inner())
}

/// A device that takes everything and holds nothing.
struct Taken;

impl LogIo for Taken {
    fn read(&mut self, _at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        out.fill(0);
        Ok(())
    }
    fn write(&mut self, _at: u64, _bytes: &[u8]) -> Result<(), IoFailed> {
        Ok(())
    }
    fn flush(&mut self) -> Result<(), IoFailed> {
        Ok(())
    }
}

/// Shards and device of a replay: they answer as was recorded, and both take yes and no in the order of all calls.
pub(in crate::block) struct Told<'a> {
    pub numbers: &'a [u64],
    pub number: usize,
    pub answers: &'a Answers,
    pub answer: &'a std::cell::Cell<u64>,
    pub layout: Layout,
}

impl Told<'_> {
    /// A run `first, count` of `of` pages.
    fn run(&mut self, of: u32) -> (u32, u32) {
        let first = self.number().min(u64::from(of.max(1) - 1)) as u32;
        (first, self.number().min(u64::from(of - first)) as u32)
    }

    pub(in crate::block) fn number(&mut self) -> u64 {
        self.number += 1;
        // Asked for more than was recorded: the digest differs then.
        self.numbers.get(self.number - 1).copied().unwrap_or(0)
    }

    pub(in crate::block) fn answer(&mut self) -> bool {
        let at = self.answer.get();
        self.answer.set(at + 1);
        // A device that fails ends what would otherwise go on.
        self.answers.get(at).unwrap_or(false)
    }

    fn outcome(&mut self) -> Result<(), IoFailed> {
        if self.answer() { Ok(()) } else { Err(IoFailed) }
    }
}

/// As many as a shard can have.
const MOST: u64 = 1 << 17;

impl LogShards for Told<'_> {
    fn records_waiting(&mut self, _shard: u32) -> usize {
        usize::try_from(self.number()).unwrap_or(usize::MAX)
    }

    fn take_records(&mut self, _shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        let count = self.number().min(most as u64).min(MOST);
        let holds = self.answer().then_some((crate::block::LineId(0), Sum(0)));
        for at in 0..count {
            out.push(MapRecord { slot: SlotId(0), holds: holds.filter(|_| at == 0) });
        }
    }

    fn take_pages(&mut self, _shard: u32, most: usize, out: &mut Vec<TableChange>) {
        // (One behind the other: as many as it takes numbers.)
        let count = self.number().min(self.numbers.len() as u64);
        let mut pages = 0;
        for _ in 0..count {
            let change = match self.run(self.layout.table_pages()) {
                (page, 0) => TableChange::Page { page, slots: Vec::new() },
                (first, count) => TableChange::Cleared { first, count },
            };
            pages += usize::from(matches!(change, TableChange::Page { .. }));
            if pages <= most {
                out.push(change);
            }
        }
    }

    fn emptied(&mut self, _shard: u32, out: &mut Vec<(SlotId, u32)>) {
        let count = self.number().min(self.numbers.len() as u64);
        let slots = i64::from(self.layout.shard_slots());
        let mut end = 0i64;
        for _ in 0..count {
            let first = end.saturating_add(unzigzag(self.number())).clamp(0, slots);
            let count = self.number().min((slots - first) as u64) as u32;
            out.push((SlotId(first as u32), count));
            end = first + i64::from(count);
        }
    }

    fn records_durable(&mut self, _shard: u32) {}

    fn records_lost(&mut self, _shard: u32) {}

    fn state(&mut self, _shard: u32, _first: SlotId, most: u32, out: &mut Vec<Held>) {
        let count = self.number().min(most.into());
        out.extend((0..count).map(|_| None));
    }

    fn quiet(&mut self, _shard: u32, _region: u32) -> bool {
        self.answer()
    }

    fn intent_ready(&mut self, _shard: u32, _region: u32) {}

    fn flush_backing(&mut self, _region: u32) -> Result<(), IoFailed> {
        self.outcome()
    }
}

impl LogIo for Told<'_> {
    fn read(&mut self, _at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        out.fill(0);
        self.outcome()
    }

    fn write(&mut self, _at: u64, _bytes: &[u8]) -> Result<(), IoFailed> {
        self.outcome()
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        self.outcome()
    }

    fn punch(&mut self, _at: u64, _len: u64) -> Result<(), IoFailed> {
        self.outcome()
    }
}
