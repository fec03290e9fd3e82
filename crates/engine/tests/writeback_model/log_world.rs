//! The crash model of the whole write log: two or three volumes, each in its own order, on one log of few segments with real bytes.
//!
//! What it has of a queue is the least that the log needs: overlapping changes wait for one another, reads read what
//! [`WriteLog::look`] names, and whatever is asked for ends some time, in any order, well or not. What must hold is what
//! `models/write_back.py` says. A sector says which write filled it, so every check is exact.

mod check;
mod clients;
mod closing;
mod damage;
mod device;
mod looks;
mod start;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use larder_base::{Nanos, Rng};
use larder_engine::block::OpId;
#[cfg(feature = "planted")]
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::Planted;
use larder_engine::block::writeback::destager::{self, Pace};
use larder_engine::block::writeback::log::{
    Append, Asked, Asks, Config, Found, Kept, Lies, Parks, Piece, Said, Sums, ToWrite, WriteLog,
};
use larder_engine::block::writeback::overlay::{Dirty, Holds};
use larder_engine::block::writeback::throttle::Age;
use larder_engine::block::writeback::volume_log::{Kind, Order};
use larder_format::Uuid;
use larder_format::block::write_log::{SegmentGeometry, pieces};
use larder_policy::budget::Means;

use device::{LogDevice, Store};

use super::world::ORDERS;

/// Bytes of a sector of a volume.
const SECTOR: u64 = 512;
/// Where the log's area begins on its device.
const AT: u64 = 8192;
const CACHE: Uuid = Uuid([7; 16]);
/// One history of so many tries the loss of the cache at every I/O.
const LOSES: u64 = 16;
/// Not yet.
const NEVER: u64 = u64::MAX;

/// Payload, which a failure does not print.
#[derive(Clone)]
struct Bytes(Rc<Vec<u8>>);

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

type Checked = Result<(), String>;

/// What a history is made of.
#[derive(Clone, Copy, Default)]
pub(super) struct Setup {
    /// All volumes in this order (a letter of [`ORDERS`]), or each in any.
    pub(super) order: Option<char>,
    pub(super) fault: Option<Planted>,
    /// The log's device fails some time.
    pub(super) fails: bool,
    /// What is in the log rots, and reads of it fail.
    pub(super) rots: bool,
    /// Batches are lost: the history ends at the start that finds that.
    pub(super) damages: bool,
    /// The steps are printed.
    pub(super) trace: bool,
}

/// A change that was issued. Its number is its place in `World::writes`; a sector that it fills has this number.
struct Write {
    sectors: Range<u64>,
    kind: Kind,
    fua: bool,
    /// When it was issued, and answered; and when somebody knew that it is done: its client, or who saw it.
    issued: u64,
    answered: u64,
    /// The time of that.
    at: Option<Nanos>,
    done: u64,
    /// When the last FLUSH was issued that had been answered when this was.
    level: u64,
    /// Its place in the volume's log, from 1: its sequence. 0 as long as it waits for others.
    sequence: u64,
}

/// What a client waits for.
enum Op {
    Write(usize, u64),
    /// With when it was issued.
    Flush(usize, u64),
}

/// A stretch of a read that goes on.
struct Reading {
    volume: usize,
    found: Found<Bytes>,
    /// Of its sectors the last write that was answered when it began.
    fresh: Vec<u64>,
}

/// What is under way.
enum Io {
    Write {
        write: ToWrite<Bytes>,
        bytes: Rc<Vec<u8>>,
    },
    Flush {
        covers: u64,
        mark: usize,
    },
    Step(usize),
    Read(Reading),
    Store {
        volume: usize,
        dirty: Dirty,
        lies: Option<Lies<Bytes>>,
    },
    FlushStore(usize),
    Mark {
        volume: usize,
        said: Said,
        frontier: u64,
    },
    Park {
        volume: usize,
        parks: Parks,
    },
    /// Of a marker, since then.
    Look(usize, Nanos),
}

struct Volume {
    attachment: u32,
    letter: char,
    destage: destager::Config,
    bound: u64,
    age: Option<Age>,
    store: Store,
    /// Numbers of the writes, by sequence.
    log: Vec<u64>,
    /// So many of them have come to a batch: in which order is known.
    placed: usize,
    /// Writes that wait for others that they overlap.
    blocked: VecDeque<(OpId, u64)>,
    /// When the last FLUSH was issued that has been answered.
    level: u64,
    /// The number of its marker.
    marker: u64,
    /// What it may hold beside what is not answered: a start may find more.
    may_hold: u64,
    /// What its marker says of a log that has failed, and its frontier.
    said: Option<(Said, u64)>,
    /// Sectors that the slots have, which outlive a crash.
    slots: BTreeMap<u64, u64>,
    /// A start has found a failed log: no more writes come, and a sector reads as this.
    view: Option<Vec<u64>>,
    /// It writes through.
    over: bool,
    /// The marker says that until the store has all up to here it alone may be no image.
    said_joins: u64,
    /// It is put aside, or is about to be: clients ask nothing of it.
    aside: bool,
    /// Another holder has taken it.
    taken: Option<Nanos>,
    /// What it had let go of when it came, and has by now.
    begun: u64,
    let_go: u64,
}

pub(super) struct World {
    rng: Rng,
    setup: Setup,
    now: Nanos,
    /// Counts what clients do and hear.
    tick: u64,
    /// A store has failed: what waits at a bound may, in the end.
    stores_failed: bool,
    /// Volumes of which writes have failed just now.
    failed_of: BTreeSet<usize>,
    config: Config,
    device: LogDevice,
    log: WriteLog<Bytes>,
    volumes: Vec<Volume>,
    /// From 1; 0 is nobody.
    writes: Vec<Write>,
    /// Writes of which payload rots, and how often in a row others were not given.
    rotten: BTreeSet<u64>,
    misses: BTreeMap<u64, u32>,
    ops: BTreeMap<OpId, Op>,
    next_op: u64,
    /// Marks that somebody waits for: volume, number, and what the log calls it.
    marks: Vec<(usize, u64, u64)>,
    ios: Vec<Io>,
    /// The store of this volume does not answer.
    stuck: Option<usize>,
    /// Of a thousand I/Os so many fail.
    failures: u64,
    /// The log's device has begun to fail.
    failing: bool,
    /// It may do so in this history.
    may_fail: bool,
    /// Volumes are put aside with what is dirty, and taken up.
    carries: bool,
    /// Others take volumes, and looks at markers take their time; so often the first holder found that.
    second: bool,
    pub(super) found_taken: u64,
    /// Nothing crashes for long.
    is_calm: bool,
    /// The loss of the cache is tried at every I/O.
    loses: bool,
    /// So often it was.
    pub(super) lost: u64,
    /// There is a write budget, which has more or less left.
    purse: Option<Rng>,
    /// What it has.
    means: Means,
    /// The share of looks at a footer's write that end it, and at a batch's.
    footers: f64,
    batches: f64,
    /// How often the log was asked what it says durably.
    looks: u64,
    /// While a start goes on, of each volume how much of its log it has found.
    starting: Option<Vec<u64>>,
    /// Bytes of the log's device that starts are not given.
    withheld: Vec<u64>,
    /// A start has found that batches are lost. Volumes that it called damaged, and not.
    ended: bool,
    pub(super) gaps: u64,
    pub(super) whole: u64,
    /// What cannot be read has stopped a volume for good.
    pub(super) stopped: bool,
    /// Sectors that could not be read, and were written again.
    pub(super) mended: u64,
    /// Segments of which starts have read the footer.
    pub(super) sealed: u64,
}

impl World {
    pub(super) fn new(seed: u64, setup: Setup) -> World {
        let mut rng = Rng::new(seed);
        let sector = if rng.chance(0.2) { 4096 } else { 512 };
        let segment = if sector == 4096 || rng.chance(0.3) { 32 << 10 } else { 16 << 10 };
        let geometry = SegmentGeometry::new(segment, sector).unwrap();
        let segments = if rng.chance(0.5) { 8 } else { rng.range(9, 16) as u32 };
        let depth = rng.range(1, 4) as u32;
        let memory = if rng.chance(0.5) { 64 << 20 } else { rng.range(1, 40_000) };
        let (cache, run, at, wall) = (CACHE, 1, AT, 1 << 60);
        let config = Config { cache, run, at, geometry, segments, depth, memory, wall };
        let bytes = AT as usize + (segments * segment) as usize;
        let area = u64::from(segments * segment);
        let failures = [0, 0, 10, 40][rng.below(4) as usize];
        let may_fail = setup.fails || setup.fault.is_none() && rng.chance(0.3);
        let may_fail = may_fail && !setup.rots && !setup.damages;
        let volumes = (0..rng.range(2, 3)).map(|i| volume(i, &mut rng, setup, area)).collect();
        let none = Write {
            sectors: 0..0,
            kind: Kind::Zero,
            fua: false,
            issued: 0,
            answered: 0,
            at: None,
            done: 0,
            level: 0,
            sequence: 0,
        };
        let mut world = World {
            rng,
            setup,
            now: Nanos(0),
            tick: 0,
            stores_failed: false,
            failed_of: BTreeSet::new(),
            config,
            device: LogDevice::new(bytes, sector as usize),
            log: WriteLog::new(config),
            volumes,
            writes: vec![none],
            rotten: BTreeSet::new(),
            misses: BTreeMap::new(),
            ops: BTreeMap::new(),
            next_op: 0,
            marks: Vec::new(),
            ios: Vec::new(),
            stuck: None,
            failures,
            failing: false,
            may_fail,
            carries: seed % 4 == 3,
            second: seed % 8 == 4 && setup.fault.is_none_or(|f| f == Planted::OldLookCounts),
            found_taken: 0,
            is_calm: seed % 8 == 5,
            loses: seed % LOSES == 9,
            lost: 0,
            purse: (seed % 8 == 6).then(|| Rng::new(seed)),
            means: Means::Plenty,
            footers: if seed % 8 == 5 { 0.02 } else { 0.05 },
            batches: if seed % 8 == 2 { 0.2 } else { 1.0 },
            looks: 0,
            starting: None,
            withheld: Vec::new(),
            ended: false,
            gaps: 0,
            whole: 0,
            stopped: false,
            mended: 0,
            sealed: 0,
        };
        world.plant();
        for v in 0..world.volumes.len() {
            world.attach(v, 0);
        }
        world
    }

    fn plant(&mut self) {
        #[cfg(feature = "planted")]
        self.log.plant(Fault::of(self.setup.fault));
    }

    fn says(&self, what: impl FnOnce() -> String) {
        if self.setup.trace {
            println!("{:>9.3} ms  {}", self.now.0 as f64 / 1e6, what());
        }
    }

    /// One of a thousand I/Os fails, or as many as may.
    fn fails(&mut self) -> bool {
        self.failures > 0 && self.rng.below(1000) < self.failures
    }

    /// Likewise of the log's device, which rots or fails.
    fn log_fails(&mut self) -> bool {
        !self.setup.rots && !self.setup.damages && self.fails()
    }

    /// Carries out what the log asks for, and hears whom it answers.
    fn carry(&mut self, asks: Asks<Bytes>) -> Checked {
        self.place_marks()?;
        for write in asks.writes {
            let bytes = flat(&write);
            self.says(|| format!("batch {} at {} of {} bytes", write.number, write.at, write.len));
            self.ios.push(Io::Write { write, bytes });
        }
        if let Some(covers) = asks.flush {
            self.says(|| format!("log flush up to batch {covers} begins"));
            self.ios.push(Io::Flush { covers, mark: self.device.mark() });
        }
        for attachment in asks.steps {
            let volume = attachment as usize - 1;
            if !self.ios.iter().any(|io| matches!(io, Io::Step(v) if *v == volume)) {
                self.ios.push(Io::Step(volume));
            }
        }
        self.started();
        for (op, failed) in asks.answers {
            self.answered(op, failed)?;
        }
        for (op, append) in asks.through {
            self.through(op, append.as_ref())?;
        }
        // (Once all that failed at once is known.)
        for v in std::mem::take(&mut self.failed_of) {
            self.admit(v)?;
        }
        self.hear_marks()?;
        self.check_said()?;
        self.check_held()
    }

    fn carry_out(&mut self, volume: usize, out: Vec<Asked<Bytes>>) -> Checked {
        for asked in out {
            match asked {
                Asked::Store(dirty, lies) => {
                    self.check_taken(volume)?;
                    self.ios.push(Io::Store { volume, dirty, lies });
                }
                Asked::Look => self.ios.push(Io::Look(volume, self.now)),
                Asked::Mark(said, frontier) => self.ios.push(Io::Mark { volume, said, frontier }),
                Asked::Flush => self.ios.push(Io::FlushStore(volume)),
                Asked::Park(parks) => self.ios.push(Io::Park { volume, parks }),
                Asked::Journal { .. } | Asked::FlushJournal => {}
            }
        }
        Ok(())
    }

    /// One of what is under way ends.
    fn end(&mut self, which: usize) -> Checked {
        self.ends(which)?;
        if self.loses { self.lose_cache() } else { Ok(()) }
    }

    fn ends(&mut self, which: usize) -> Checked {
        let (mut out, mut asks) = (Vec::new(), Asks::default());
        let now = self.now;
        self.look_in_time(&mut asks);
        let volume = match self.ios.swap_remove(which) {
            Io::Look(volume, began) => {
                if !self.look_ends(volume, began, &mut asks)? {
                    return Ok(());
                }
                volume
            }
            Io::Write { write, bytes } => {
                let done = !(self.log_fails() || self.failing && self.rng.chance(0.7));
                let some = (!done).then(|| self.device.part(&mut self.rng, bytes.len()));
                self.device.write(write.at, bytes, some);
                self.says(|| format!("batch {} written: {done}", write.number));
                self.log.written(now, write.number, done, &mut asks);
                0
            }
            Io::Flush { covers, mark } => {
                // It ends for good, and so does the history.
                let fails = self.log_fails() && self.rng.chance(0.1);
                let done = !(fails || self.failing && self.rng.chance(0.5));
                self.device.flush(mark, done);
                self.says(|| format!("log flushed up to batch {covers}: {done}"));
                self.log.flushed(now, covers, done, &mut asks);
                0
            }
            Io::Step(volume) => {
                self.log.step(now, self.volumes[volume].attachment, &mut out, &mut asks);
                volume
            }
            Io::Read(reading) => {
                self.read_ends(&reading)?;
                0
            }
            Io::Park { volume, parks } => {
                let mut read = Vec::new();
                for (sequence, piece) in parks {
                    let bytes = match &piece {
                        Some(piece) if self.reads(volume, sequence, piece)? => {
                            Some(self.device.read(piece.place, piece.bytes as usize).to_vec())
                        }
                        _ => None,
                    };
                    let bytes = bytes.map(|bytes| Bytes(Rc::new(bytes)));
                    read.push((sequence, piece, bytes));
                }
                self.says(|| {
                    let of = |(n, piece, _): &(u64, Option<Piece>, _)| {
                        format!("{n} from {:?}", piece.as_ref().map(|p| (p.place, p.bytes, p.pin)))
                    };
                    let all: Vec<String> = read.iter().map(of).collect();
                    format!("v{volume}: parked: {}", all.join(", "))
                });
                let attachment = self.volumes[volume].attachment;
                self.log.parked(now, attachment, read, &mut asks);
                volume
            }
            Io::Mark { volume, said, frontier } => {
                let done = !self.fails();
                self.says(|| format!("v{volume}: marker {said:?} up to {frontier}: {done}"));
                if done {
                    self.is_said(volume, said, frontier);
                    if said == Said::Clean {
                        self.check_over(volume)?;
                    }
                }
                let attachment = self.volumes[volume].attachment;
                self.log.marked(now, attachment, done, &mut out, &mut asks);
                volume
            }
            Io::Store { volume, dirty, lies } => {
                let attachment = self.volumes[volume].attachment;
                self.joins(volume)?;
                let reads = match &lies {
                    Some(Lies::Log(piece)) => self.reads(volume, dirty.sequence, piece)?,
                    // It was parked as lost meanwhile.
                    None if dirty.holds == Holds::Bytes => {
                        let number = self.volumes[volume].log[dirty.sequence as usize - 1];
                        !self.rotten.contains(&number)
                    }
                    _ => true,
                };
                let numbers = match reads {
                    true => self.destaged(volume, &dirty, lies.as_ref())?,
                    false => Vec::new(),
                };
                if let Some(piece) = lies.as_ref().and_then(Lies::piece) {
                    self.log.unpin(now, piece.pin, &mut asks);
                }
                if !reads {
                    self.says(|| format!("v{volume}: {} cannot be read", dirty.sequence));
                    self.log.unread(now, attachment, &dirty);
                }
                let done = reads && !self.fails();
                for (sector, number) in numbers {
                    if done || self.rng.chance(0.5) {
                        self.volumes[volume].store.write(sector, number);
                    }
                    // A log that fails gives the slots up: nothing is said of them any more.
                    if self.uses_slots(volume) {
                        self.volumes[volume].slots.remove(&sector);
                    }
                }
                self.stores_failed |= !done;
                let outcome = done.then_some(self.volumes[volume].store.life);
                self.says(|| {
                    let (from, to) = (dirty.at / SECTOR, (dirty.at + dirty.len) / SECTOR);
                    format!("v{volume}: store has {from}..{to} of {}: {done}", dirty.sequence)
                });
                self.log.stored(now, attachment, (dirty.memory(), outcome), &mut out, &mut asks);
                volume
            }
            Io::FlushStore(volume) => {
                let done = !self.fails();
                let store = &mut self.volumes[volume].store;
                if done {
                    store.flush()
                } else {
                    store.lose(&mut self.rng);
                    self.drop_slots(volume);
                }
                self.stores_failed |= !done;
                let store = &mut self.volumes[volume].store;
                let outcome = done.then_some(store.life);
                self.says(|| format!("v{volume}: store flushed: {outcome:?}"));
                let attachment = self.volumes[volume].attachment;
                self.log.store_flushed(now, attachment, outcome, &mut out, &mut asks);
                volume
            }
        };
        self.carry_out(volume, out)?;
        self.carry(asks)
    }

    /// Time passes, and what is due is done. The budget is asked first, as a server does.
    fn due(&mut self) -> Checked {
        let mut asks = Asks::default();
        if self.purse.is_some() {
            self.log.afford(self.now, self.means, &mut asks);
        }
        self.log.due(self.now, &mut asks);
        self.carry(asks)
    }

    fn pass(&mut self) -> Checked {
        let wakes = self.log.wakes(self.now);
        match self.rng.below(4) {
            0 => self.now.0 += self.rng.below(60_000_000),
            _ => self.now = wakes.unwrap_or(self.now).max(self.now),
        }
        self.due()
    }

    pub(super) fn play(&mut self, steps: u64) -> Checked {
        let steps = if self.is_calm { 4 * steps } else { steps };
        for _ in 0..steps {
            if self.ended {
                return Ok(());
            }
            self.now.0 += self.rng.below(200_000);
            self.afford()?;
            if self.rng.below(200) == 0 {
                let some = self.rng.below(self.volumes.len() as u64) as usize;
                self.stuck = self.rng.chance(0.5).then_some(some);
            }
            if self.may_fail && self.log.is_started() && self.rng.below(400) == 0 {
                self.failing = true;
            }
            if self.setup.rots && self.log.is_started() && self.rng.below(60) == 0 {
                self.rot();
            }
            // Where batches take their time markers are refreshed all the time.
            if self.batches < 1.0 && self.log.is_started() && self.rng.chance(0.1) {
                self.refresh();
            }
            match self.rng.below(1_000) {
                0..360 if !self.log.is_started() => {}
                0..240 => self.issue()?,
                240..250 => self.mark()?,
                250..300 => self.flush()?,
                300..360 => self.read()?,
                360..385 => self.refresh(),
                385..930 => {
                    let n = self.ios.len() as u64;
                    if n > 0 {
                        let which = self.rng.below(n) as usize;
                        let stuck = self.stuck.is_some()
                            && match self.ios[which] {
                                Io::Store { volume, .. } | Io::FlushStore(volume) => {
                                    self.stuck == Some(volume)
                                }
                                _ => false,
                            };
                        // Reads take their time, and footers more of it.
                        let share = match &self.ios[which] {
                            Io::Read(_) => 0.05,
                            Io::Write { write, .. } if write.number >> 62 == 1 => self.footers,
                            Io::Write { .. } => self.batches,
                            _ => 1.0,
                        };
                        let slow = share < 1.0 && !self.rng.chance(share);
                        if !stuck && !slow {
                            self.end(which)?;
                        }
                    }
                }
                930..960 => self.pass()?,
                960..970 => {
                    let v = self.rng.below(self.volumes.len() as u64) as usize;
                    self.volumes[v].store.crash(&mut self.rng);
                    self.drop_slots(v);
                    self.says(|| format!("v{v}: store crashes"));
                    if self.loses {
                        self.lose_cache()?;
                    }
                }
                // In some runs there is one long life, in which segments come round.
                970..995 if self.is_calm && self.rng.chance(0.95) => {}
                970..985 => self.lose_cache()?,
                985..990 => self.restart(false)?,
                990..995 => self.restart(true)?,
                _ if self.carries => {
                    let v = self.rng.below(self.volumes.len() as u64) as usize;
                    self.changes_side(v)?;
                }
                _ if self.second => self.pauses()?,
                _ => {}
            }
            if self.log.wakes(self.now).is_some_and(|at| at <= self.now) && self.rng.chance(0.5) {
                self.due()?;
            }
            if self.log.closed().is_some()
                && self.rng.chance(if self.log.is_started() { 0.01 } else { 0.1 })
            {
                let power = self.rng.chance(0.5);
                self.restart(power)?;
            }
            if self.volumes.iter().all(|volume| volume.over) {
                break;
            }
        }
        if self.ended {
            return Ok(());
        }
        self.settle()?;
        self.lose_cache()
    }

    /// All devices answer again: all that waits ends, and all comes to the stores.
    fn settle(&mut self) -> Checked {
        (self.failures, self.failing) = (0, false);
        self.volumes.iter_mut().for_each(|volume| volume.taken = None);
        if self.log.closed().is_some() && !self.log.is_started() {
            self.restart(false)?;
        }
        self.says(|| "no more failures".to_owned());
        self.quiet()?;
        // One that is put aside may have all the room that others wait for.
        for v in 0..self.volumes.len() {
            if self.volumes[v].aside {
                self.changes_side(v)?;
            }
        }
        self.quiet()?;
        let mut asks = Asks::default();
        if self.setup.rots {
            // All that rots is found, and then written again.
            for volume in &self.volumes {
                self.log.drain(volume.attachment, true, &mut asks);
            }
            self.carry(asks)?;
            self.quiet()?;
            // What is behind something that was missing is found when that is there.
            for _ in 0..100 {
                let mended = self.mended;
                self.mend()?;
                self.quiet()?;
                if self.mended == mended {
                    break;
                }
            }
            // What one that is stopped holds of a small log may be what others wait for.
            if (0..self.volumes.len()).any(|v| self.is_stopped(v)) {
                self.stopped = true;
                return Ok(());
            }
        }
        if !self.log.is_started() {
            return Err(format!("a start does not come to its end: {:?}", self.log));
        }
        if !self.marks.is_empty() {
            return Err(format!("marks {:?} are not durable: {:?}", self.marks, self.log));
        }
        if !self.ops.is_empty() {
            let why =
                format!("{} operations are not answered, and nothing is under way", self.ops.len());
            let how = self.volumes.iter().map(|v| self.log.status(self.now, v.attachment));
            let how: Vec<_> = how.collect();
            return Err(format!("{why}: {how:?}, {:?}", self.log));
        }
        let mut asks = Asks::default();
        for volume in &self.volumes {
            self.log.drain(volume.attachment, true, &mut asks);
        }
        self.carry(asks)?;
        self.quiet()?;
        for (v, volume) in self.volumes.iter().enumerate() {
            if volume.over || self.is_stopped(v) {
                continue;
            }
            if !self.log.is_clean(volume.attachment) || self.log.closed().is_some() {
                return Err(format!("v{v} does not come to its store: {:?}", self.log));
            }
            for sector in 0..volume.store.sectors() {
                let (has, want) = (volume.store.see(sector), self.last(v, sector, NEVER));
                if has != want {
                    return Err(format!(
                        "v{v}: all is destaged, sector {sector} has {has}, not {want}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// A volume is put aside with what is dirty; or taken up, if it is; or stays after all.
    fn changes_side(&mut self, v: usize) -> Checked {
        let mut asks = Asks::default();
        let attachment = self.volumes[v].attachment;
        let aside = &mut self.volumes[v].aside;
        *aside = !*aside;
        if *aside {
            self.log.put_aside(attachment);
            self.says(|| format!("v{v}: put aside"));
        } else if self.log.closed().is_none()
            && self.log.is_settled(attachment)
            && self.log.is_durable(attachment)
        {
            let frontier = self.log.status(self.now, attachment).map_or(0, |s| s.positions[0]);
            let attach = self.attach_of(v, frontier);
            self.log.take_up(self.now, attach, &mut asks);
            self.says(|| format!("v{v}: taken up from {frontier} on"));
        } else {
            self.log.resume(attachment, &mut asks);
            self.says(|| format!("v{v}: stays"));
        }
        // What was answered meanwhile, nobody waited for.
        let held = self.log.status(self.now, attachment).map_or(0, |s| s.held.0);
        self.volumes[v].may_hold = self.volumes[v].may_hold.max(held);
        self.carry(asks)
    }

    /// The write budget has more or less left, now and then.
    fn afford(&mut self) -> Checked {
        const ALL: [Means; 4] = [Means::Spent, Means::Short, Means::Enough, Means::Plenty];
        let Some(purse) = &mut self.purse else { return Ok(()) };
        if purse.below(40) > 0 {
            return Ok(());
        }
        let means = ALL[purse.below(4) as usize];
        self.means = means;
        self.says(|| format!("the write budget: {means:?}"));
        let mut asks = Asks::default();
        self.log.afford(self.now, means, &mut asks);
        self.carry(asks)
    }

    /// Goes on until nothing is under way and nothing is due.
    fn quiet(&mut self) -> Checked {
        self.stuck = None;
        let (mut idle, mut in_vain) = (0, 0);
        for _ in 0..100_000 {
            if !self.ios.is_empty() {
                if !self.ios.iter().all(|io| matches!(io, Io::Step(_) | Io::Park { .. })) {
                    in_vain = 0;
                }
                let which = self.rng.below(self.ios.len() as u64) as usize;
                self.end(which)?;
                idle = 0;
                continue;
            }
            let Some(wakes) = self.log.wakes(self.now) else {
                // Clients may come no more: what is begun is not left to what they would bring about.
                return match self.log.is_parking() {
                    true => Err(format!("a copy waits for nothing: {:?}", self.log)),
                    false => Ok(()),
                };
            };
            // One that is stopped looks whether it still is, from time to time, and what cannot be read is read again.
            in_vain += 1;
            let stays = |v| self.is_stopped(v) || self.rereads(v);
            if in_vain > 100 && (0..self.volumes.len()).any(stays) {
                return Ok(());
            }
            if wakes > self.now {
                idle = 0;
            }
            self.now = wakes.max(self.now);
            self.due()?;
            idle += 1;
            if idle > 3 {
                return Err(format!("it wakes at {wakes:?} again and again: {:?}", self.log));
            }
        }
        Err(format!("it does not come to an end: {:?}, {:?}", self.now, self.log))
    }
}

fn volume(i: u64, rng: &mut Rng, setup: Setup, area: u64) -> Volume {
    let any = ORDERS[rng.below(3) as usize].2;
    let letter = setup.order.unwrap_or(any);
    let order = ORDERS.iter().find(|o| o.2 == letter).map_or(Order::Any, |o| o.1);
    let pace = match rng.below(6) {
        0 => Pace::AtBound,
        1 => Pace::Periodic(Nanos::from_millis(rng.range(1, 200))),
        _ => Pace::Async,
    };
    let most = [4 << 10, 32 << 10, 1 << 20][rng.below(3) as usize];
    let destage = destager::Config { order, pace, most, depth: rng.range(1, 4) as u32 };
    let age = (pace != Pace::AtBound && rng.chance(0.6)).then(|| Age {
        most: Nanos::from_millis([1, 10, 50, 500][rng.below(4) as usize]),
        hard: rng.chance(0.6),
    });
    let bound = [24 << 10, 64 << 10, area / 3, area][rng.below(4) as usize];
    Volume {
        attachment: i as u32 + 1,
        letter,
        destage,
        bound,
        age,
        store: Store::new(rng.range(24, 96)),
        said: None,
        slots: BTreeMap::new(),
        view: None,
        over: false,
        log: Vec::new(),
        placed: 0,
        blocked: VecDeque::new(),
        level: 0,
        marker: 0,
        may_hold: bound,
        said_joins: 0,
        aside: false,
        taken: None,
        begun: 0,
        let_go: 0,
    }
}

/// A batch as the device gets it.
fn flat(write: &ToWrite<Bytes>) -> Rc<Vec<u8>> {
    let mut bytes = write.head.clone();
    bytes.resize(write.len as usize, 0);
    for (at, payload) in &write.payload {
        bytes[*at as usize..*at as usize + payload.0.len()].copy_from_slice(&payload.0);
    }
    Rc::new(bytes)
}

/// What a write fills a sector with: who it is, and where.
fn fill(volume: usize, number: u64, sector: u64) -> [u8; SECTOR as usize] {
    let mut bytes = [0; SECTOR as usize];
    let word = |i: u64| number << 24 ^ sector << 8 ^ (volume as u64) << 4 ^ i << 56;
    for (i, eight) in bytes.chunks_exact_mut(8).enumerate() {
        eight.copy_from_slice(&word(i as u64 % 64 + 1).to_le_bytes());
    }
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// Which write filled it, if one did, and it is whole.
fn filled(volume: usize, sector: u64, bytes: &[u8]) -> Option<u64> {
    let number = u64::from_le_bytes(bytes[..8].try_into().ok()?);
    (bytes == fill(volume, number, sector)).then_some(number)
}
