//! Maintenance with the tape that records it: what its thread tells it, and what shards, stores and the device said to it.
//!
//! A replay calls the same [`Maintenance`], with a log of its own, over shards and a device that answer as was recorded. So this stream
//! says when the log is called, and that of the log what it does then.

mod told;

use std::cell::{Cell, RefCell};
use std::ops::Deref;

use larder_base::Nanos;
use larder_format::block::BlockSuperblock;
use larder_format::recording::bytes::put;
use larder_format::recording::{BadRecord, Cursor};
use larder_policy::block::VolumeId;

use crate::block::api::{IoId, OpId, SlotId, Sum};
use crate::block::log::{LogIo, MapLog};
use crate::block::node::calls::{Copying, Fill, Load};
use crate::block::node::charged::{Charged, Charges};
use crate::block::node::event::ShardIo;
use crate::block::node::failing::FlashError;
use crate::block::node::limits::Limits;
use crate::block::node::maintenance::takeback::{
    Again as TakenBack, Anew, NotTakenBack, take_back,
};
use crate::block::node::maintenance::{Effects, Maintenance, Pace, Shards, Turn, Work};
use crate::block::node::record::{end_code, end_words, take_end};
use crate::block::record::digest::Digest;
use crate::block::record::log::{Heard, Noting, Told};
use crate::block::record::tape::unknown;
use crate::block::record::{
    Again, BlockRunSetup, BlockSetupError, BlockTape, RecordedLog, Replayed, SharedTape,
    StreamReader,
};
use told::{NotingFx, note_ended};

/// Ranges as large as the device that may wait at a time. Clients have eight; what others ask for is a bit each.
const MOST_RANGES: u64 = 16;
/// Maintenance begins.
const BEGIN: u8 = 0;
const TAKE: u8 = 1;
const FLASH_WRITTEN: u8 = 2;
const PAGE_LOADED: u8 = 3;
const ENDED: u8 = 4;
const STORE_FLUSHED: u8 = 5;
const FORGET_STORE: u8 = 6;
const FORCE: u8 = 7;
const TURN: u8 = 8;
const STOP: u8 = 9;
const HURRY: u8 = 10;
const CHANGE: u8 = 11;
const GIVE_UP: u8 = 12;

/// No run is longer: so that no sum of times overflows, whatever a file says.
const LONGEST: u64 = 1 << 62;
/// Most steps of the log in a row.
const MOST_STEPS: u64 = 1 << 16;

/// Maintenance that records what it is told, if it has a tape. To look at it, it is a [`Maintenance`].
pub struct RecordedMaintenance {
    machine: Maintenance,
    tape: Option<SharedTape>,
}

impl Deref for RecordedMaintenance {
    type Target = Maintenance;
    fn deref(&self) -> &Maintenance {
        &self.machine
    }
}

fn put_all(out: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|&n| put(out, n));
}

fn put_work<B>(out: &mut Vec<u8>, work: &Work<B>) {
    let Work { fills, copies, loads, asks, ranges, budget, commit, give_up } = work;
    put_all(out, &[u64::from(*commit) | u64::from(give_up.is_some()) << 1, fills.len() as u64]);
    for fill in fills {
        put_all(out, &[fill.shard.into(), fill.io.0.into(), fill.slot.0.into()]);
    }
    put(out, copies.len() as u64);
    for Copying { shard, io, from, to, lines } in copies {
        put_all(out, &[(*shard).into(), io.0.into(), from.0.into(), to.0.into(), (*lines).into()]);
    }
    put(out, loads.len() as u64);
    for Load { shard, io, page } in loads {
        put_all(out, &[(*shard).into(), io.0.into(), (*page).into()]);
    }
    put(out, asks.len() as u64);
    for &(shard, region) in asks {
        put_all(out, &[shard.into(), region.into()]);
    }
    put(out, ranges.len() as u64);
    for &(op, first, last) in ranges {
        put_all(out, &[op.0, first.into(), last.into()]);
    }
    put(out, budget.len() as u64);
    budget.iter().for_each(|op| put(out, op.0));
}

/// So many things, each of which takes a byte at least.
fn take_all<T>(
    c: &mut Cursor<'_>,
    mut one: impl FnMut(&mut Cursor<'_>) -> Result<T, BadRecord>,
) -> Result<Vec<T>, BadRecord> {
    let count = c.at_most(c.left() as u64, "how many")?;
    (0..count).map(|_| one(c)).collect()
}

fn take_slot(c: &mut Cursor<'_>) -> Result<SlotId, BadRecord> {
    c.u32("slot").map(SlotId)
}

fn take_io(c: &mut Cursor<'_>) -> Result<IoId, BadRecord> {
    c.u32("number of an I/O").map(IoId)
}

/// Work on a device with so many regions.
fn take_work(c: &mut Cursor<'_>, regions: u32) -> Result<Work<()>, BadRecord> {
    let most = u64::from(regions.max(1) - 1);
    let region = |c: &mut Cursor<'_>| c.at_most(most, "region").map(|region| region as u32);
    let flags = c.at_most(3, "what is wanted")?;
    // (How many lines they are nobody decides upon.)
    let fills = take_all(c, |c| {
        let (shard, io) = (c.u32("shard")?, take_io(c)?);
        Ok(Fill { shard, io, slot: take_slot(c)?, lines: 0, bytes: () })
    })?;
    let copies = take_all(c, |c| {
        let (shard, io) = (c.u32("shard")?, take_io(c)?);
        let (from, to) = (take_slot(c)?, take_slot(c)?);
        Ok(Copying { shard, io, from, to, lines: c.u32("lines")? })
    })?;
    let loads = take_all(c, |c| {
        Ok(Load { shard: c.u32("shard")?, io: take_io(c)?, page: c.u32("page")? })
    })?;
    let asks = take_all(c, |c| Ok((c.u32("shard")?, region(c)?)))?;
    let ranges = take_all(c, |c| {
        let (op, first, last) = (OpId(c.varint("operation")?), region(c)?, region(c)?);
        let (what, value) = ("the last region of a range", u64::from(last));
        let must = "no smaller than the first";
        if last < first {
            Err(BadRecord::Value { what, value, must })
        } else {
            Ok((op, first, last))
        }
    })?;
    let budget = take_all(c, |c| c.varint("operation").map(OpId))?;
    let give_up = (flags & 2 != 0).then(String::new);
    Ok(Work { fills, copies, loads, asks, ranges, budget, commit: flags & 1 != 0, give_up })
}

/// (When it is looked what has ended is no decision of the machine's: a replay is told when it was.)
fn put_pace(out: &mut Vec<u8>, pace: &Pace) {
    let Pace { gather, batch, records, commit, steps, tick, hurry, drain, sweep, flush, .. } =
        *pace;
    put_all(out, &[batch as u64, steps as u64]);
    put_all(out, &[gather, records, commit, tick, hurry, drain, sweep, flush].map(|n| n.0));
}

fn take_pace(c: &mut Cursor<'_>) -> Result<Pace, BadRecord> {
    let batch = c.u32("fills that are begun at once")? as usize;
    let steps = c.at_most(MOST_STEPS, "steps in a row")? as usize;
    let mut time = || c.at_most(LONGEST, "time").map(Nanos);
    let (gather, records, commit, tick) = (time()?, time()?, time()?, time()?);
    let (hurry, drain, sweep, flush) = (time()?, time()?, time()?, time()?);
    let looks = Pace::default();
    Ok(Pace { gather, batch, records, commit, steps, tick, hurry, drain, sweep, flush, ..looks })
}

fn note_turn(digest: &mut Digest, turn: Turn) {
    digest.all(&match turn {
        Turn::Again => [0, 0],
        Turn::At(at) => [1, at.0],
        Turn::Over { settled } => [2, settled.into()],
    });
}

/// Calls the machine with what it hears noted, or as it is where nothing is recorded; `$note` adds what is returned.
macro_rules! told {
    ($self:ident, $tag:expr, $now:expr, $shards:ident, $io:ident, $fx:ident, $input:expr, $note:expr,
     |$m:ident, $s:ident, $i:ident, $f:ident| $call:expr) => {{
        let layout = match &$self.tape {
            Some(_) => $self.machine.line_space().map(|sb| sb.layout),
            None => None,
        };
        let Some(layout) = layout else {
            let ($m, $s, $i, $f) = (&mut $self.machine, $shards, $io, $fx);
            return $call;
        };
        let mut input = Vec::new();
        $input(&mut input);
        let heard = RefCell::new(Heard::default());
        let $m = &mut $self.machine;
        let $s = &mut Noting { inner: $shards, heard: &heard, layout };
        let noting = Noting { inner: &mut $io.io, heard: &heard, layout };
        let $i = &mut Charged::new(noting, &$io.charges, $io.now);
        let $f = &mut NotingFx { inner: $fx, heard: &heard };
        let result = $call;
        let mut heard = heard.into_inner();
        $note(&mut heard.digest, &result);
        $self.keep($tag, $now, &input, &heard);
        result
    }};
}

impl RecordedMaintenance {
    /// Maintenance without a tape.
    pub fn new(machine: Maintenance) -> RecordedMaintenance {
        RecordedMaintenance { machine, tape: None }
    }

    /// Records from now on, the log on a tape of its own; both must be new, and the log that of a device without lines.
    pub fn record(&mut self, tape: SharedTape, log: BlockTape) {
        self.machine.record(log);
        self.record_beside_log(tape);
    }

    /// The same where the log has its tape already.
    pub fn record_beside_log(&mut self, tape: SharedTape) {
        self.tape = Some(tape);
        let mut input = Vec::new();
        put_pace(&mut input, self.machine.pace());
        self.keep(BEGIN, Nanos::ZERO, &input, &Heard::default());
    }

    /// Hands on what is on the tapes.
    pub fn flush_chunk(&mut self) {
        self.machine.flush_chunk();
        if let Some(tape) = &self.tape {
            tape.flush_chunk();
        }
    }

    /// Ends recording: hands on what is on the tapes.
    pub fn end_recording(&mut self) {
        self.machine.end_recording();
        if let Some(tape) = self.tape.take() {
            tape.end_recording();
        }
    }

    fn keep(&mut self, tag: u8, now: Nanos, input: &[u8], heard: &Heard) {
        let fields = |out: &mut Vec<u8>| {
            out.extend_from_slice(input);
            put(out, heard.numbers.len() as u64);
            put_all(out, &heard.numbers);
        };
        let push = |tape: &mut BlockTape| tape.push(tag, now, fields, &heard.answers, heard.digest);
        if let Some(tape) = &self.tape
            && !tape.push(push)
        {
            self.tape = None;
        }
    }

    /// What is told without a question, or an answer.
    fn note(&mut self, tag: u8, now: Nanos, numbers: &[u64]) {
        if self.tape.is_some() {
            let mut input = Vec::new();
            put_all(&mut input, numbers);
            self.keep(tag, now, &input, &Heard::default());
        }
    }

    /// An I/O has ended, of which a shard was told.
    fn note_io(&mut self, tag: u8, now: Nanos, io: ShardIo, code: u64) {
        if self.tape.is_some() {
            let (mut input, mut heard) = (Vec::new(), Heard::default());
            let (shard, number) = (io.shard.into(), io.io.0.into());
            put_all(&mut input, &[shard, number, code]);
            let is_done = u64::from(code == end_code(&Ok(())));
            note_ended(&mut heard.digest, tag == FLASH_WRITTEN, [shard, number, is_done]);
            self.keep(tag, now, &input, &heard);
        }
    }

    /// [`Maintenance::take`].
    pub fn take<B>(
        &mut self,
        now: Nanos,
        work: Work<B>,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) {
        let input = |out: &mut Vec<u8>| put_work(out, &work);
        let note = |_: &mut Digest, (): &()| {};
        told!(self, TAKE, now, shards, io, fx, input, note, |m, s, i, f| m
            .take(now, work, s, i, f));
    }

    /// [`Maintenance::flash_written`].
    pub fn flash_written(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: ShardIo,
        sums: Result<&[u32], FlashError>,
    ) {
        let code = end_code(&sums);
        self.machine.flash_written(now, shards, io, sums);
        self.note_io(FLASH_WRITTEN, now, io, code);
    }

    /// [`Maintenance::page_loaded`].
    pub fn page_loaded(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: ShardIo,
        slots: Result<&[Option<Sum>], FlashError>,
    ) {
        let code = end_code(&slots);
        self.machine.page_loaded(now, shards, io, slots);
        self.note_io(PAGE_LOADED, now, io, code);
    }

    /// [`Maintenance::ended`].
    pub fn ended(&mut self) {
        self.machine.ended();
        self.note(ENDED, Nanos::ZERO, &[]);
    }

    /// [`Maintenance::store_flushed`].
    pub fn store_flushed(&mut self, now: Nanos, store: VolumeId, number: u64, durable: bool) {
        self.machine.store_flushed(now, store, number, durable);
        self.note(STORE_FLUSHED, now, &[store.0.into(), number, durable.into()]);
    }

    /// [`Maintenance::forget_store`].
    pub fn forget_store(&mut self, store: VolumeId) {
        self.machine.forget_store(store);
        self.note(FORGET_STORE, Nanos::ZERO, &[store.0.into()]);
    }

    /// [`Maintenance::has_looked`], which decides nothing.
    pub fn has_looked(&mut self, now: Nanos) {
        self.machine.has_looked(now);
    }

    /// [`Maintenance::idled`], for which a record has no word: recording ends.
    pub fn idled(&mut self, now: Nanos) {
        self.end_recording();
        self.machine.idled(now);
    }

    /// [`Maintenance::force`].
    pub fn force(&mut self) {
        self.machine.force();
        self.note(FORCE, Nanos::ZERO, &[]);
    }

    /// [`Maintenance::turn`].
    pub fn turn<B>(
        &mut self,
        now: Nanos,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) -> Turn {
        let input = |_: &mut Vec<u8>| {};
        let note = |digest: &mut Digest, turn: &Turn| note_turn(digest, *turn);
        told!(self, TURN, now, shards, io, fx, input, note, |m, s, i, f| m.turn(now, s, i, f))
    }

    /// [`Maintenance::stop`].
    pub fn stop(&mut self, now: Nanos) {
        self.machine.stop(now);
        self.note(STOP, now, &[]);
    }

    /// [`Maintenance::hurry`].
    pub fn hurry<B>(
        &mut self,
        now: Nanos,
        regions: (u32, u32),
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) -> u64 {
        let input = |out: &mut Vec<u8>| put_all(out, &[regions.0.into(), regions.1.into()]);
        let note = |digest: &mut Digest, left: &u64| digest.add(*left);
        told!(self, HURRY, now, shards, io, fx, input, note, |m, s, i, f| {
            m.hurry(now, regions, s, i, f)
        })
    }

    /// [`Maintenance::change_superblock`]. What is changed is the caller's affair, and not compared.
    pub fn change_superblock<B>(
        &mut self,
        now: Nanos,
        anew: bool,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
        change: impl FnMut(&mut BlockSuperblock),
    ) -> bool {
        let input = |out: &mut Vec<u8>| put(out, anew.into());
        let note = |digest: &mut Digest, changed: &bool| digest.add((*changed).into());
        told!(self, CHANGE, now, shards, io, fx, input, note, |m, s, i, f| {
            m.change_superblock(now, anew, s, i, f, change)
        })
    }

    /// [`Maintenance::give_up`].
    pub fn give_up<B>(
        &mut self,
        now: Nanos,
        why: &str,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) {
        let input = |_: &mut Vec<u8>| {};
        let note = |_: &mut Digest, (): &()| {};
        told!(self, GIVE_UP, now, shards, io, fx, input, note, |m, s, i, f| {
            m.give_up(now, why, s, i, f)
        });
    }

    /// [`take_back`], for which a record has no word: recording ends.
    ///
    /// # Errors
    /// Those of it.
    pub fn take_back(
        &mut self,
        again: TakenBack,
        io: &mut Charged<impl LogIo, impl Charges>,
        anew: &mut impl Anew,
    ) -> Result<(), NotTakenBack> {
        take_back(&mut self.machine, again, io, anew)?;
        self.end_recording();
        Ok(())
    }
}

/// What maintenance was told.
enum Input {
    Begin(Pace),
    Take(Work<()>),
    FlashWritten(ShardIo, Result<(), FlashError>),
    PageLoaded(ShardIo, Result<(), FlashError>),
    Ended,
    StoreFlushed(VolumeId, u64, bool),
    ForgetStore(VolumeId),
    Force,
    Turn,
    Stop,
    Hurry(u32, u32),
    Change(bool),
    GiveUp,
}

fn take_yes(c: &mut Cursor<'_>, what: &'static str) -> Result<bool, BadRecord> {
    Ok(c.at_most(1, what)? == 1)
}

impl Input {
    fn take(tag: u8, c: &mut Cursor<'_>, regions: u32) -> Result<Input, BadRecord> {
        let shard_io = |c: &mut Cursor<'_>| -> Result<ShardIo, BadRecord> {
            Ok(ShardIo { shard: c.u32("shard")?, io: take_io(c)? })
        };
        let volume = |c: &mut Cursor<'_>| c.u32("volume").map(VolumeId);
        Ok(match tag {
            BEGIN => Input::Begin(take_pace(c)?),
            TAKE => Input::Take(take_work(c, regions)?),
            FLASH_WRITTEN => Input::FlashWritten(shard_io(c)?, take_end(c)?),
            PAGE_LOADED => Input::PageLoaded(shard_io(c)?, take_end(c)?),
            ENDED => Input::Ended,
            STORE_FLUSHED => {
                let (store, number) = (volume(c)?, c.varint("number of a flush")?);
                Input::StoreFlushed(store, number, take_yes(c, "whether a store is durable")?)
            }
            FORGET_STORE => Input::ForgetStore(volume(c)?),
            FORCE => Input::Force,
            TURN => Input::Turn,
            STOP => Input::Stop,
            // Regions that the device has not have no bit.
            HURRY => Input::Hurry(c.u32("region")?, c.u32("region")?.min(regions)),
            CHANGE => Input::Change(take_yes(c, "whether the map begins anew")?),
            GIVE_UP => Input::GiveUp,
            other => return Err(unknown(other)),
        })
    }

    fn describe(&self) -> String {
        let how = |done: bool| if done { "has ended" } else { "has failed" };
        let of = |io: &ShardIo| format!("I/O {} of shard {}", io.io.0, io.shard);
        match self {
            Input::Begin(_) => "maintenance begins".to_owned(),
            Input::Take(Work { fills, copies, loads, asks, ranges, .. }) => format!(
                "work: {} fills, {} copies, {} pages, {} bits, {} ranges",
                fills.len(),
                copies.len(),
                loads.len(),
                asks.len(),
                ranges.len()
            ),
            Input::FlashWritten(io, ended) => {
                format!("{} {}: a fill or a copy", of(io), end_words(ended))
            }
            Input::PageLoaded(io, ended) => {
                format!("{} {}: a page of the table", of(io), end_words(ended))
            }
            Input::Ended => "an I/O has ended".to_owned(),
            Input::StoreFlushed(store, number, done) => {
                format!("flush {number} of the store of volume {} {}", store.0, how(*done))
            }
            Input::ForgetStore(store) => format!("volume {} goes", store.0),
            Input::Force => "the log is to step".to_owned(),
            Input::Turn => "a turn".to_owned(),
            Input::Stop => "the end of the run".to_owned(),
            Input::Hurry(first, last) => format!("regions {first} to {last}, in a hurry"),
            Input::Change(false) => "another superblock".to_owned(),
            Input::Change(true) => "another superblock, and an empty map".to_owned(),
            Input::GiveUp => "the cache is given up".to_owned(),
        }
    }
}

/// Maintenance as it is called again.
pub struct ReplayedMaintenance {
    superblock: BlockSuperblock,
    quiet: Nanos,
    machine: Maintenance,
}

impl ReplayedMaintenance {
    /// Maintenance, before it began, of a device without lines.
    ///
    /// # Errors
    /// A setup that is of no run.
    pub fn of(setup: &BlockRunSetup) -> Result<ReplayedMaintenance, BlockSetupError> {
        let (superblock, quiet) = (setup.superblock()?, Nanos(setup.quiet_nanos));
        let machine = machine(Pace::default(), &superblock, quiet);
        Ok(ReplayedMaintenance { superblock, quiet, machine })
    }

    /// Reads the next record of a stream, tells the machine the same, and says what was decided then and now.
    ///
    /// # Errors
    /// A record that makes no sense.
    pub fn replay(&mut self, reader: &mut StreamReader<'_>) -> Replayed {
        let begun = reader.begin()?;
        let layout = self.superblock.layout;
        let now = begun.now;
        if now.0 > LONGEST {
            let (what, value) = ("the time of a record", now.0);
            return Err(BadRecord::Value { what, value, must: "less than a hundred years" });
        }
        let c = &mut reader.cursor;
        let input = Input::take(begun.tag, c, layout.regions)?;
        let numbers = take_all(c, |c| c.varint("number"))?;
        let ended = reader.end()?;
        if let Input::Take(work) = &input {
            let wants = work.ranges.iter().map(|&(_, first, last)| u64::from(last - first) + 1);
            let value = self.machine.bits_asked() as u64 + wants.sum::<u64>();
            if value > MOST_RANGES * u64::from(layout.regions.max(1)) {
                let what = "the number of bits that are asked for";
                return Err(BadRecord::Value {
                    what,
                    value,
                    must: "what sixteen ranges ask for at most",
                });
            }
        }
        let words = input.describe();
        let answer = Cell::new(0);
        let heard = RefCell::new(Heard::default());
        let answers = &ended.answers;
        let told = || Told { numbers: &numbers, number: 0, answers, answer: &answer, layout };
        let (mut world, mut device, mut host) = (told(), told(), told());
        let s = &mut Noting { inner: &mut world, heard: &heard, layout };
        // A replay writes nothing.
        let noting = Noting { inner: &mut device, heard: &heard, layout };
        let i = &mut Charged::new(noting, Limits::default(), now);
        let f = &mut NotingFx { inner: &mut host, heard: &heard };
        let m = &mut self.machine;
        match input {
            Input::Begin(pace) => *m = machine(pace, &self.superblock, self.quiet),
            Input::Take(work) => m.take(now, work, s, i, f),
            Input::FlashWritten(io, ended) => {
                m.flash_written(now, s, io, ended.map(|()| &[][..]));
            }
            Input::PageLoaded(io, ended) => {
                m.page_loaded(now, s, io, ended.map(|()| &[][..]));
            }
            Input::Ended => m.ended(),
            Input::StoreFlushed(store, number, ok) => m.store_flushed(now, store, number, ok),
            Input::ForgetStore(store) => m.forget_store(store),
            Input::Force => m.force(),
            Input::Turn => {
                let turn = m.turn(now, s, i, f);
                note_turn(&mut heard.borrow_mut().digest, turn);
            }
            Input::Stop => m.stop(now),
            Input::Hurry(first, last) => {
                let left = m.hurry(now, (first, last), s, i, f);
                heard.borrow_mut().digest.add(left);
            }
            Input::Change(anew) => {
                let changed = m.change_superblock(now, anew, s, i, f, |_| {});
                heard.borrow_mut().digest.add(changed.into());
            }
            Input::GiveUp => m.give_up(now, "it was given up", s, i, f),
        }
        let (recorded, replayed) = (ended.digest, heard.into_inner().digest.finish());
        Ok(Again { nanos: now.0, input: words, recorded, replayed })
    }
}

fn machine(pace: Pace, superblock: &BlockSuperblock, quiet: Nanos) -> Maintenance {
    let log = RecordedLog::new(MapLog::fresh(superblock.clone(), quiet));
    Maintenance::new(pace, Some(log), superblock.clone())
}
