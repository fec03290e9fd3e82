//! The write log of a cache device: its segments, and the records, overlay, destager and throttle of each volume that writes back.
//!
//! One machine under one lock. It knows bytes only as handles that it passes on. What it asks for it leaves in [`Asks`]; whoever has called it
//! carries that out when the lock is free:
//!
//! ```text
//! append ─▶ waiting ─▶ a batch, numbered (`batches`) ─▶ written ─▶ answered at its due time ─▶ dirty ─▶ destaged (`destage`) ─▶ let go
//! ```
//!
//! * A write waits until fewer than [`Config::depth`] batches are on their way; then all that wait become one batch. So a batch is as large as the device is
//!   slow (group commit).
//! * Sequence and dependency are given when the batch is formed [depnow], over all clients of the volume [global].
//! * A write is answered when its batch and all before it are written [ackorder], not before the throttle says so; then the overlay shows it, the position
//!   rises and the answer leaves, all three at once [visible].
//! * A FLUSH takes the acknowledged position and joins the next flush of the device that begins [flushlog]. FUA is the same for one write.
//!
//! Rules in brackets are those of `models/write_back.py`.

mod batches;
mod closing;
mod destage;
mod due;
mod failing;
mod footers;
mod looked;
mod lying;
mod marks;
mod memory;
mod parking;
mod put_aside;
mod rereading;
mod slowed;
mod start;
mod sums;
mod times;
mod unreadable;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use larder_base::Nanos;
use larder_format::Uuid;
use larder_format::block::write_log::{SegmentGeometry, footer};

pub use batches::ToWrite;
pub use closing::{Kept, Said, Stands};
pub use destage::{Asked, Lies, Status};
pub use looked::FRESH;
use lying::{pin, unpin};
pub use marks::{MarkState, NOBODY};
pub use memory::{MEMORY_OF_BLOCK, most_on_its_way};
pub use parking::Parks;
use sums::AllSums;
pub use sums::Sums;
use times::{Marks, Times};
use unreadable::Unreadable;
pub use unreadable::{GivingUp, NotGivenUp};

use super::bounds::LogSize;
use super::destager::{self, Destager, Pace};
use super::economy::Economy;
use super::overlay::{Holds, Overlay, Stretch};
use super::planted::{Fault, Planted};
use super::recovery::RecoveredIn;
use super::scan::Scan;
use super::segments::{self, Segments};
use super::table::Table;
use super::throttle::{Age, Throttle};
use super::volume_log::{Kind, VolumeLog};
use crate::block::api::OpId;

/// Most bytes of a record: longer writes are cut. Half of what a batch carries, so that a FRONTIER fits beside it.
pub const MOST_RECORD: u64 = 512 << 10;
/// What was written is flushed behind the back of clients after so many bytes,
const FLUSH_BYTES: u64 = 8 << 20;
/// or after this time, so that a FLUSH finds little to do.
const FLUSH_EVERY: Nanos = Nanos::from_millis(50);
/// How often a batch or a flush that failed is tried again.
const TRIES: u32 = 3;

/// What a log is built from.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The cache.
    pub cache: Uuid,
    /// Its run: the superblock's epoch.
    pub run: u64,
    /// First byte of the log's area on the device.
    pub at: u64,
    /// How large a segment is, and a sector.
    pub geometry: SegmentGeometry,
    /// How many segments there are.
    pub segments: u32,
    /// Batches under way at a time.
    pub depth: u32,
    /// Bytes that are on their way from here to stores and journals, of all volumes together, at most.
    pub memory: u64,
    /// Nanoseconds since the Unix epoch at the time 0 of its caller.
    pub wall: u64,
}

impl Config {
    /// How large it is.
    fn log_size(&self) -> LogSize {
        LogSize { segments: self.segments, segment: self.geometry.bytes() }
    }

    /// What its segments are built from.
    fn segments(&self) -> segments::Config {
        let sector = self.geometry.sector();
        segments::Config {
            segments: self.segments,
            room: self.geometry.bytes() - sector,
            footer: (footer::END_BYTES as u32, sector),
            reserve: self.log_size().reserve(0),
        }
    }
}

/// A volume that writes back.
#[derive(Clone, Copy, Debug)]
pub struct Attach {
    /// Its attachment number.
    pub attachment: u32,
    /// Its UUID.
    pub volume: Uuid,
    /// Its generation (G).
    pub generation: u64,
    /// In which order its store gets what was written, and when.
    pub destage: destager::Config,
    /// Bytes of the log that it may hold, where that is stated; else it shares what others leave.
    pub bound: Option<u64>,
    /// How old what is dirty may become.
    pub age: Option<Age>,
    /// Its records up to this one are durable in its store.
    pub frontier: u64,
    /// The last epoch of its journal.
    pub epoch: u64,
    /// Number of its marker that was last known durable.
    pub marker: u64,
    /// It has one, which says what is left of a log that fails.
    pub marked: bool,
}

/// A part of a client's write, zeroing or trim.
#[derive(Debug)]
pub struct Append<B> {
    /// Who is answered.
    pub op: OpId,
    /// The volume's attachment number.
    pub attachment: u32,
    /// What it does.
    pub kind: Kind,
    /// First byte in the volume.
    pub at: u64,
    /// Bytes; of a write at most [`MOST_RECORD`].
    pub len: u64,
    /// A write's bytes.
    pub bytes: Option<B>,
    /// Their checksums.
    pub sums: Sums,
    /// Answered when it is durable.
    pub fua: bool,
    /// A hole will do.
    pub may_punch: bool,
}

/// What the log asks for, and whom it answers. Whoever has called it carries it out, in any order, when the log is unlocked.
#[derive(Debug)]
pub struct Asks<B> {
    /// Batches to be written: [`WriteLog::written`].
    pub writes: Vec<ToWrite<B>>,
    /// The device is to be flushed: [`WriteLog::flushed`] with this.
    pub flush: Option<u64>,
    /// Parts and flushes that are over, and whether they have failed. They are handed on under the lock, in this order.
    pub answers: Vec<(OpId, bool)>,
    /// Volumes whose destager may have something to do: [`WriteLog::step`].
    pub steps: Vec<u32>,
    /// Changes, and FLUSHes (`None`), that are to go to the store itself: their volume writes back no more.
    pub through: Vec<(OpId, Option<Append<B>>)>,
    /// The device has failed, for this reason: nothing else on it is to be used either.
    pub gives_up: Option<&'static str>,
}

impl<B> Default for Asks<B> {
    fn default() -> Asks<B> {
        Asks {
            writes: Vec::new(),
            flush: None,
            answers: Vec::new(),
            steps: Vec::new(),
            through: Vec::new(),
            gives_up: None,
        }
    }
}

impl<B> Asks<B> {
    /// What another call has asked for, too.
    pub fn add(&mut self, more: Asks<B>) {
        self.writes.extend(more.writes);
        self.flush = self.flush.or(more.flush);
        self.answers.extend(more.answers);
        self.steps.extend(more.steps);
        self.through.extend(more.through);
        self.gives_up = self.gives_up.or(more.gives_up);
    }
}

/// What of a read lies where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found<B> {
    /// Below the log: first byte, bytes.
    Clean(u64, u64),
    /// Zeros.
    Zeros(u64, u64),
    /// Bytes that cannot be read any more.
    Unreadable(u64, u64),
    /// In the log.
    Logged(Piece),
    /// In a log that has failed, and here because it may not be durable there: first byte, bytes.
    Kept(u64, u64, Kept<B>),
}

/// A stretch of a record in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte in the volume.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// Where on the device the 4 KiB pieces begin that cover it,
    pub place: u64,
    /// how many bytes they have,
    pub bytes: u32,
    /// and how many of those come before the first that is asked for.
    pub skip: u32,
    /// What their checksums are.
    pub sums: Sums,
    /// What has it: pinned until [`WriteLog::unpin`].
    pub pin: Pin,
}

/// What keeps bytes of the log where they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// The segment of this batch.
    Batch(u64),
    /// The parked segment of this generation.
    Parked(u64),
}

/// Somebody who waits for an answer.
#[derive(Clone, Copy, Debug)]
struct Pending {
    /// `None`: he was told already that it failed.
    op: Option<OpId>,
    fua: bool,
}

/// A FLUSH or FUA.
#[derive(Clone, Copy, Debug)]
struct Flushing {
    op: OpId,
    attachment: u32,
    position: u64,
    batch: u64,
}

/// One volume.
#[derive(Debug)]
struct Attached {
    attachment: u32,
    uuid: Uuid,
    generation: u64,
    log: VolumeLog,
    overlay: Overlay,
    /// What of it cannot be read though its records are gone, below the overlay [bad]; the same behind the window that is under way; and how often records
    /// could not be read that may yet be.
    bad: Unreadable,
    listing: Option<Unreadable>,
    unread: BTreeMap<u64, (u32, u64)>,
    /// Those that were lost so, and are read again.
    rereads: rereading::Rereads,
    /// Bytes that could not be read and were given up by an operator's word, in this run.
    given_up: u64,
    /// Records of which clients have read something: their lines may be worth a place when the store has them.
    read: Marks,
    /// Of its records, in the order of their sequence, the first behind the frontier.
    sums: AllSums,
    /// Of those that are not answered, likewise.
    pending: VecDeque<Pending>,
    /// Of the first records behind the frontier, those that are parked: sequence, and generation of the segment.
    parked: Table<2>,
    /// When records were answered that are dirty. Marks change no bytes, and have no age.
    since: Times,
    age: Option<Age>,
    /// What was the first behind the frontier when a window was begun for its age, perhaps in vain.
    pressed: u64,
    /// Bytes a second that the last windows brought to the store.
    speed: Option<f64>,
    /// Epochs that ended at no mark though they were to, and whether the last one did.
    missed_marks: u64,
    off_mark: bool,
    throttle: Throttle,
    /// The write budget has it answer no faster than its store.
    slow: bool,
    /// What it may hold of the log, where that is stated.
    stated: Option<u64>,
    destager: Destager,
    /// Memory of the epoch that is on its way to the journal.
    epoch_memory: u64,
    pace: Pace,
    /// All up to here is durable in the store, whether the log knows it or not.
    stored: u64,
    /// Until all up to here is there the store alone may be no image.
    joins: u64,
    /// A batch says so, if that is not durable yet.
    noting: Option<u64>,
    /// It has what the next FRONTIER is to say.
    untold: bool,
    marker: u64,
    /// All of it is to be destaged as soon as can be.
    draining: u32,
    /// It is put aside: nothing of it is destaged, and it takes no part in the room that there is.
    aside: bool,
    /// Its store is somebody else's: nothing of it is destaged. Its marker may say that nothing is dirty: no change is logged.
    halted: bool,
    refuses: bool,
    /// Bytes that came to the store so far.
    destaged: u64,
    /// It has a marker, and when that was looked at.
    marked: bool,
    looked: looked::Looked,
    /// How far it is, if the log has failed.
    closing: Option<closing::Closing>,
    marks: marks::Marks,
}

/// How far a start is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Start {
    /// Volumes are being attached.
    Found,
    /// What was found is flushed: a segment may be free by a FRONTIER that is not durable yet.
    Flushed,
    /// The first batch of the run is wanted,
    Wanted,
    /// is under way,
    Begun(u64),
    /// is durable.
    Started,
}

/// The write log. See the [module](self).
#[derive(Debug)]
pub struct WriteLog<B> {
    config: Config,
    segments: Segments,
    /// What the next batch calls the last one.
    before: u64,
    volumes: BTreeMap<u32, Attached>,
    waiting: VecDeque<Append<B>>,
    /// There was no room for them, or for a FRONTIER.
    full: bool,
    /// Batches under way, by number: what is tried again if it fails, and how often it was.
    writing: BTreeMap<u64, (ToWrite<B>, u32)>,
    /// What of a volume is being copied out of the way, the hash of the last batch of each parked segment of this run, and how many batches were
    /// parked.
    parking: Option<parking::Parking>,
    /// Payload that is not known durable.
    kept: closing::Payloads<B>,
    parked_before: BTreeMap<u64, u64>,
    parks_written: u64,
    /// How often reads of a record for a copy have failed, by attachment number and sequence, and when they are tried again.
    park_tries: BTreeMap<(u32, u64), u32>,
    park_after: Nanos,
    /// What becomes of segments that are full.
    footers: footers::Footers<B>,
    memory: memory::Memory,
    flushes: Vec<Flushing>,
    /// What the flush of the device that is under way makes durable.
    flushing: Option<u64>,
    /// Somebody waits for the next one.
    flush_wanted: bool,
    /// A mark was asked for by somebody who carries nothing out.
    mark_waits: bool,
    /// Bytes that were written and not flushed, and since when there are any.
    unflushed: u64,
    unflushed_since: Option<Nanos>,
    /// Bytes that were written so far.
    bytes: u64,
    /// Why nothing is logged any more.
    closed: Option<&'static str>,
    /// A flush has failed: what was not durable by then never counts as durable.
    unsure: bool,
    start: Start,
    economy: Economy,
    fault: Fault,
}

impl<B: Clone> WriteLog<B> {
    /// The log of a device that was just formatted.
    pub fn new(config: Config) -> WriteLog<B> {
        WriteLog::with(config, Segments::new(config.segments()), 0)
    }

    /// The log as a start has found it, and read with `scan`. Its volumes are to be attached ([`WriteLog::attach`]) and given what was found
    /// of them ([`WriteLog::recover`]), then it is started ([`WriteLog::start`]).
    pub fn found<R>(config: Config, found: &RecoveredIn<R>, scan: &Scan) -> WriteLog<B> {
        // A crash may have left batches of generations that no header names any more: not of more than there are segments.
        let generation = found.generation.max(scan.generation) + u64::from(config.segments);
        let last = (generation, found.chain.next.saturating_sub(1));
        let mut segments = Segments::found(config.segments(), &found.live, &found.parked, last);
        segments.doubt();
        let footers = footers::Footers::found(found, scan);
        WriteLog {
            start: Start::Found,
            footers,
            ..WriteLog::with(config, segments, found.chain.before)
        }
    }

    fn with(config: Config, segments: Segments, before: u64) -> WriteLog<B> {
        WriteLog {
            config,
            segments,
            before,
            volumes: BTreeMap::new(),
            waiting: VecDeque::new(),
            full: false,
            writing: BTreeMap::new(),
            parking: None,
            kept: closing::Payloads::default(),
            parked_before: BTreeMap::new(),
            parks_written: 0,
            park_tries: BTreeMap::new(),
            park_after: Nanos::ZERO,
            footers: footers::Footers::default(),
            memory: memory::Memory::new(config.memory),
            flushes: Vec::new(),
            flushing: None,
            flush_wanted: false,
            mark_waits: false,
            unflushed: 0,
            unflushed_since: None,
            bytes: 0,
            closed: None,
            unsure: false,
            start: Start::Started,
            economy: Economy::default(),
            fault: Fault::default(),
        }
    }

    /// Plants a fault, also in the volumes that there are.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Fault) {
        self.fault = fault;
        self.segments.plant(fault);
        for volume in self.volumes.values_mut() {
            volume.log.plant(fault);
            volume.destager.plant(fault);
        }
    }

    // ---- volumes ----

    /// A volume writes back from now on.
    pub fn attach(&mut self, now: Nanos, attach: Attach) {
        let Attach {
            attachment,
            volume: uuid,
            generation,
            destage,
            bound,
            age,
            frontier,
            epoch,
            marker,
            marked,
        } = attach;
        #[allow(unused_mut, reason = "faults are planted in tests")]
        let mut volume = Attached {
            attachment,
            uuid,
            generation,
            parked: Table::default(),
            log: VolumeLog::new(destage.order, frontier),
            overlay: Overlay::default(),
            bad: Unreadable::default(),
            listing: None,
            unread: BTreeMap::new(),
            rereads: rereading::Rereads::default(),
            read: Marks::default(),
            given_up: 0,
            sums: AllSums::default(),
            pending: VecDeque::new(),
            since: Times::default(),
            age,
            pressed: 0,
            speed: None,
            missed_marks: 0,
            off_mark: false,
            throttle: Throttle::new(0, now),
            slow: self.economy.is_slow(),
            stated: bound,
            destager: Destager::new(destage, epoch),
            epoch_memory: 0,
            pace: destage.pace,
            stored: frontier,
            joins: 0,
            noting: None,
            untold: true,
            marker,
            draining: 0,
            aside: false,
            halted: false,
            refuses: false,
            destaged: 0,
            marked,
            looked: looked::Looked::default(),
            closing: None,
            marks: marks::Marks::default(),
        };
        #[cfg(feature = "planted")]
        {
            volume.log.plant(self.fault);
            volume.destager.plant(self.fault);
        }
        self.volumes.insert(attachment, volume);
        self.closes_late(attachment);
        self.divide();
    }

    /// Records of a volume are not needed any more. Returns what they held of the log, and their bytes.
    fn settle(&mut self, attachment: u32, position: u64) -> (u64, u64) {
        self.kept.let_go(attachment, position);
        let Some(volume) = self.volumes.get_mut(&attachment) else { return (0, 0) };
        let (segments, sums) = (&mut self.segments, &mut volume.sums);
        let (mut room, mut bytes) = (0, 0);
        let parked = &mut volume.parked;
        volume.log.let_go(position, &mut volume.overlay, |sequence, logged| {
            room += u64::from(logged.room());
            bytes += logged.len;
            sums.pop(sequence);
            match parked.first().filter(|[of, _]| *of == sequence) {
                Some([_, generation]) => {
                    parked.pop();
                    segments.let_go_parked(generation, Some(1));
                }
                None => segments.let_go(logged.batch),
            }
        });
        volume.since.let_go(position);
        while volume.unread.first_key_value().is_some_and(|(&sequence, _)| sequence <= position) {
            volume.unread.pop_first();
        }
        volume.rereads.let_go(position);
        volume.read.let_go(position);
        if volume.log.is_clean() {
            volume.since.clear();
        }
        volume.marks.stored(volume.log.frontier());
        (room, bytes)
    }

    /// A volume writes back no more. What it still holds is void.
    pub fn detach(&mut self, attachment: u32) {
        let Some(mut volume) = self.volumes.remove(&attachment) else { return };
        self.memory.give(attachment, volume.epoch_memory).for_each(drop);
        self.memory.leave(attachment);
        let segments = &mut self.segments;
        let last = volume.log.last();
        let parked = &mut volume.parked;
        volume.log.let_go(last, &mut volume.overlay, |sequence, logged| {
            match parked.first().filter(|[of, _]| *of == sequence) {
                Some([_, generation]) => {
                    parked.pop();
                    segments.let_go_parked(generation, Some(1));
                }
                None => segments.let_go(logged.batch),
            }
        });
        self.footers.forget(attachment);
        self.waiting.retain(|append| append.attachment != attachment);
        self.flushes.retain(|flush| flush.attachment != attachment);
        self.divide();
    }

    /// Volumes have come or gone: what they may hold of the log is divided anew ([`LogSize::divide`]).
    fn divide(&mut self) {
        let (size, all) = (self.config.log_size(), self.volumes.len());
        self.segments.set_reserve(size.reserve(all));
        // What volumes hold that are put aside is nobody's.
        let aside: u64 = self.volumes.values().filter(|v| v.aside).map(|v| v.log.held()).sum();
        let served = || self.volumes.values().filter(|v| !v.aside);
        let stated: Vec<Option<u64>> = served().map(|v| v.stated).collect();
        let bounds = size.divide(&stated, all, aside);
        let served = self.volumes.values_mut().filter(|v| !v.aside);
        for (volume, bound) in served.zip(bounds) {
            volume.throttle.set_bound(bound);
        }
    }

    /// The marker of a volume is durable with this number.
    pub fn set_marker(&mut self, attachment: u32, marker: u64) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            (volume.marker, volume.untold) = (marker, true);
        }
    }

    /// Number of a volume's marker that was last known durable.
    pub fn marker(&self, attachment: u32) -> Option<u64> {
        self.volumes.get(&attachment).map(|volume| volume.marker)
    }

    // ---- clients ----

    /// A part of a client's change comes: it will be answered.
    pub fn append(&mut self, now: Nanos, append: Append<B>, asks: &mut Asks<B>) {
        self.gather(append, asks);
        self.gathered(now, asks);
    }

    /// The same, and others come at once, before [`WriteLog::gathered`]: they are to be one batch.
    pub fn gather(&mut self, append: Append<B>, asks: &mut Asks<B>) {
        if self.closed.is_some() {
            return self.append_closed(append, asks);
        }
        let around = self.economy.is_spent() && self.fault.is(Planted::ThroughAroundDirt);
        if !self.volumes.contains_key(&append.attachment) || around {
            return asks.through.push((append.op, Some(append)));
        }
        self.wait_or_refuse(append, asks);
    }

    /// All have come that came at once.
    pub fn gathered(&mut self, now: Nanos, asks: &mut Asks<B>) {
        if self.closed.is_some() {
            return;
        }
        self.form(now, asks);
        if !self.waiting.is_empty() && self.writing.is_empty() {
            // There is no room: volumes that would destage later do so now.
            asks.steps.extend(self.volumes.keys());
        }
    }

    /// A client's FLUSH comes: it will be answered.
    pub fn flush(&mut self, now: Nanos, attachment: u32, op: OpId, asks: &mut Asks<B>) {
        let Some(volume) = self.volumes.get(&attachment) else {
            return asks.through.push((op, None));
        };
        if volume.halted {
            return asks.answers.push((op, true));
        }
        let position = volume.log.acknowledged();
        self.promise(Flushing { op, attachment, position, batch: 0 }, asks);
        self.flush_device(now, asks);
    }

    /// All up to a position of a volume is to be durable before `op` is answered.
    fn promise(&mut self, mut flush: Flushing, asks: &mut Asks<B>) {
        let Some(volume) = self.volumes.get_mut(&flush.attachment) else { return };
        // (What is parked is durable if anything is.)
        flush.batch = volume.log.batch_of(flush.position).map_or(0, |batch| batch.max(1));
        if flush.batch <= self.segments.durable() || self.fault.is(Planted::FlushNotAwaited) {
            volume.log.promise(flush.position);
            asks.answers.push((flush.op, false));
            return asks.steps.push(flush.attachment);
        }
        // Who waits for a volume that is put aside waits until it is given up, or stays after all.
        let unsure = self.unsure && !volume.aside;
        if volume.closing.as_ref().map_or(unsure, |closing| !volume.marked || closing.stands()) {
            return asks.answers.push((flush.op, true));
        }
        self.flush_wanted = true;
        self.flushes.push(flush);
    }

    /// Where the bytes of a range lie, for a client that reads them. Batches that have some are pinned.
    pub fn look(&mut self, attachment: u32, range: Range<u64>, mut each: impl FnMut(Found<B>)) {
        let Some(volume) = self.volumes.get_mut(&attachment) else {
            return each(Found::Clean(range.start, range.end - range.start));
        };
        let (segments, config, kept) = (&mut self.segments, &self.config, &self.kept);
        let mut read = std::mem::take(&mut volume.read);
        volume.overlay.look(range, |stretch| match stretch {
            Stretch::Clean(at, len) => {
                let mut from = at;
                for bad in volume.bad.within(at..at + len) {
                    if from < bad.start {
                        each(Found::Clean(from, bad.start - from));
                    }
                    each(Found::Unreadable(bad.start, bad.end - bad.start));
                    from = bad.end;
                }
                if from < at + len {
                    each(Found::Clean(from, at + len - from));
                }
            }
            Stretch::Dirty(dirty) => match (dirty.holds, volume.lies(config, kept, &dirty)) {
                (_, Some(Lies::Here(bytes))) => {
                    read.insert(dirty.sequence);
                    each(Found::Kept(dirty.at, dirty.len, bytes));
                }
                (_, Some(Lies::Log(piece))) => {
                    pin(segments, piece.pin);
                    read.insert(dirty.sequence);
                    each(Found::Logged(piece));
                }
                (Holds::Zeros | Holds::Trimmed, _) => each(Found::Zeros(dirty.at, dirty.len)),
                _ => each(Found::Unreadable(dirty.at, dirty.len)),
            },
        });
        volume.read = read;
    }

    /// Whether a client has read something of a record since it was logged.
    pub fn was_read(&self, attachment: u32, sequence: u64) -> bool {
        self.volumes.get(&attachment).is_some_and(|volume| volume.read.contains(sequence))
    }

    /// A batch that [`WriteLog::look`] has pinned has been read.
    pub fn unpin(&mut self, now: Nanos, of: Pin, asks: &mut Asks<B>) {
        unpin(&mut self.segments, of);
        // Its segment may be what others wait for.
        self.form(now, asks);
    }

    /// Whether anything of a range is dirty, or cannot be read.
    pub fn is_dirty(&self, attachment: u32, range: &Range<u64>) -> bool {
        let is =
            |v: &Attached| v.overlay.touches(range) || v.bad.within(range.clone()).next().is_some();
        self.volumes.get(&attachment).is_some_and(is)
    }

    // ---- the device ----

    /// A batch was written, or not.
    pub fn written(&mut self, now: Nanos, number: u64, done: bool, asks: &mut Asks<B>) {
        if footers::is_footer(number) {
            return self.footer_written(now, number, done, asks);
        }
        let Some((write, tries)) = self.writing.remove(&number) else { return };
        if !done {
            if self.closed.is_some() {
                return;
            }
            if tries + 1 < TRIES {
                asks.writes.push(write.clone());
                self.writing.insert(number, (write, tries + 1));
            } else {
                self.close(now, "a batch of the write log could not be written", asks);
            }
            return;
        }
        self.bytes += u64::from(write.len);
        if Self::is_parked(number) {
            self.copy_written();
            return self.flush_device(now, asks);
        }
        self.unflushed += u64::from(write.len);
        self.unflushed_since.get_or_insert(now);
        self.segments.ended(number);
        self.acknowledge(now, asks);
        self.form(now, asks);
        self.flush_device(now, asks);
    }

    /// What is written, in order, is answered as far as the throttles let it be.
    fn acknowledge(&mut self, now: Nanos, asks: &mut Asks<B>) {
        let written = self.counts_written();
        let ignored = self.fault.is(Planted::AgeIgnored);
        let mut promises = Vec::new();
        for (&attachment, volume) in &mut self.volumes {
            if volume.stands() {
                continue;
            }
            let mut any = false;
            while let Some(logged) = volume.log.answerable(written) {
                let due = volume.due(now, u64::from(logged.room()));
                let due = due.filter(|_| !volume.is_over(now) || ignored || volume.halted);
                if due.is_none_or(|due| due > now) {
                    // What is at the bound is not destaged before it is durable: that is not left to the clock.
                    let waits = due.is_none() || volume.is_slowed();
                    self.flush_wanted |= waits && volume.destager.is_idle();
                    break;
                }
                volume.throttle.acknowledged(now);
                volume.log.answer(&mut volume.overlay);
                volume.answered_at(volume.log.acknowledged(), now);
                any = true;
                let pending = volume.pending.pop_front();
                let Some(Pending { op: Some(op), fua }) = pending else { continue };
                if volume.halted {
                    asks.answers.push((op, true));
                } else if fua {
                    let position = volume.log.acknowledged();
                    promises.push(Flushing { op, attachment, position, batch: 0 });
                } else {
                    asks.answers.push((op, false));
                }
            }
            if any && volume.may_begin(self.closed.map_or(self.segments.durable(), |_| u64::MAX)) {
                asks.steps.push(attachment);
            }
        }
        promises.into_iter().for_each(|flush| self.promise(flush, asks));
    }

    /// Begins a flush of the device, if one is wanted and none is under way.
    fn flush_device(&mut self, now: Nanos, asks: &mut Asks<B>) {
        let behind = self.unflushed >= FLUSH_BYTES
            || self.unflushed_since.is_some_and(|since| now.0 >= since.0 + FLUSH_EVERY.0);
        let covers = self.segments.flush_begins();
        let anything = covers > self.segments.durable() || self.copy_waits();
        if self.flushing.is_some()
            || self.closed.is_some()
            || !(self.flush_wanted || behind)
            || !anything
        {
            return;
        }
        self.flush_wanted = false;
        self.copy_flushes();
        (self.unflushed, self.unflushed_since) = (0, None);
        self.flushing = Some(covers);
        asks.flush = Some(covers);
    }

    /// A flush of the device has ended: all up to the batch `covers` is durable, or may not be.
    pub fn flushed(&mut self, now: Nanos, covers: u64, done: bool, asks: &mut Asks<B>) {
        if self.flushing.take() != Some(covers) {
            return;
        }
        if !done {
            // What was not flushed may be gone though it can be read: it is not tried again.
            self.unsure = true;
            return self.close(now, "the cache device could not be flushed", asks);
        }
        let early = self.fault.is(Planted::FlushBegunBefore);
        self.segments.flushed(if early { self.segments.written() } else { covers });
        self.copy_flushed();
        self.seal(asks);
        let durable = self.segments.durable();
        self.kept.durable(durable);
        match self.start {
            Start::Flushed => self.start = Start::Wanted,
            Start::Begun(first) if first <= durable => self.starts(asks),
            _ => {}
        }
        let ready: Vec<Flushing> =
            self.flushes.extract_if(.., |flush| flush.batch <= durable).collect();
        for Flushing { op, attachment, position, .. } in ready {
            if let Some(volume) = self.volumes.get_mut(&attachment) {
                volume.log.promise(position);
            }
            asks.answers.push((op, false));
        }
        // A FRONTIER that was not written when this flush began is waited for as well, and so is a copy.
        let copied = self.copy_waits() && !self.fault.is(Planted::CopyForgotten);
        self.flush_wanted = !self.flushes.is_empty() || self.segments.has_said() || copied;
        self.noted(now, durable);
        let durable = self.counts_durable();
        let begins = self.volumes.iter().filter(|(_, volume)| volume.may_begin(durable));
        asks.steps.extend(begins.map(|(&attachment, _)| attachment));
        self.form(now, asks);
        self.acknowledge(now, asks);
        self.flush_device(now, asks);
    }

    /// Bytes that were written to the log so far, by this run.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Why nothing is logged any more, if that is so.
    pub fn closed(&self) -> Option<&'static str> {
        self.closed
    }
}

impl Attached {
    /// The record of this sequence, the last of those that are answered, is answered now.
    fn answered_at(&mut self, sequence: u64, now: Nanos) {
        if sequence == self.log.frontier() + 1 {
            // What was answered before is not dirty any more.
            self.since.clear();
        }
        self.since.push(sequence, (!self.log.is_mark(sequence)).then_some(now));
    }

    /// Whether its destager waits for what there is now: the first record behind its frontier, answered and durable up to this batch.
    fn may_begin(&self, durable: u64) -> bool {
        let first = self.log.frontier() + 1;
        let logged = self.log.record(first).filter(|_| first <= self.log.acknowledged());
        let idle = self.destager.is_idle() && !self.aside && !self.halted;
        idle && logged.is_some_and(|logged| logged.batch <= durable)
    }

    /// When its destager goes on by itself, if there is anything for it.
    fn wakes(&self, durable: u64) -> Option<Nanos> {
        if self.awaits_look().is_some() {
            let marks = self.closing.as_ref().and_then(closing::Closing::wakes);
            return marks.into_iter().chain(self.asks_again()).min();
        }
        if let Some(closing) = &self.closing {
            let rests = self.aside || self.halted;
            let paused = closing.begun() && !self.destager.is_idle() && !rests;
            return closing.wakes().or(self.destager.wakes().filter(|_| paused));
        }
        let may_begin = self.may_begin(durable);
        let any = !self.destager.is_idle() || may_begin;
        let oldest = self.age.zip(self.oldest());
        let aged = oldest.map(|(age, oldest)| age.presses(oldest));
        let aged = aged.filter(|_| may_begin && self.pressed != self.log.frontier() + 1);
        let wakes = self.destager.wakes().filter(|_| any).into_iter().chain(aged).min();
        wakes.filter(|_| !self.aside && !self.halted)
    }

    /// When the oldest write was answered that is dirty.
    fn oldest(&self) -> Option<Nanos> {
        let any = self.log.acknowledged() > self.log.frontier();
        self.since.first().filter(|_| any)
    }

    /// Nothing is answered, since the oldest that is dirty is too old. (Of one that is put aside nobody waits for that.)
    fn is_over(&self, now: Nanos) -> bool {
        let age = self.age.filter(|age| age.hard && !self.aside);
        age.zip(self.oldest()).is_some_and(|(age, oldest)| age.is_over(now, oldest))
    }

    /// Nothing is answered before some of it is destaged.
    fn is_stopped(&self, now: Nanos) -> bool {
        self.log.held() >= self.throttle.bound() || self.is_over(now)
    }

    /// When its next record, which holds `room`, may be answered. If all that it holds waits for that, nothing else makes room: at once.
    fn due(&self, now: Nanos, room: u64) -> Option<Nanos> {
        // Nor does anything for one that is put aside: those who wait have gone. Of one that is another's they are told that it failed.
        if self.aside || self.halted || self.log.acknowledged() == self.log.frontier() {
            return Some(now);
        }
        match self.is_slowed() {
            true => self.throttle.due_slowed(now, self.log.held(), room),
            false => self.throttle.due(now, self.log.held(), room),
        }
    }
}
