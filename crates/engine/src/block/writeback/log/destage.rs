//! Of each volume, window after window goes to the store. The [`Destager`](super::super::destager) says what; here it meets the log.

use std::ops::Range;

use larder_base::Nanos;

use super::super::bounds::is_nearly_full;
use super::super::destager::{self, Pace};
use super::super::overlay::{Dirty, Holds, Stretch};
use super::super::throttle::{Age, is_delayed};
use super::super::volume_log::{Cuts, Order};
use super::memory::Memory;
use super::unreadable::{self, Unreadable};
use super::{Asks, Attached, Kept, Parks, Piece, Said, WriteLog, pin};

/// Where the bytes of a stretch lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lies<B> {
    /// In the log.
    Log(Piece),
    /// Here: the log has failed, and may not have them.
    Here(Kept<B>),
}

impl<B> Lies<B> {
    /// What is to be read for them.
    pub fn piece(&self) -> Option<&Piece> {
        match self {
            Lies::Log(piece) => Some(piece),
            Lies::Here(_) => None,
        }
    }
}

/// What a destager asks of a queue that has the volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked<B> {
    /// Write this stretch to the store: [`WriteLog::stored`]. What it has of the log is pinned until [`WriteLog::unpin`].
    Store(Dirty, Option<Lies<B>>),
    /// Flush the store: [`WriteLog::store_flushed`].
    Flush,
    /// Write an epoch with its commit to the journal: [`WriteLog::journaled`].
    Journal {
        /// Its number.
        epoch: u64,
        /// The last sequence that it holds.
        last: u64,
        /// Its stretches, in the order of the volume.
        pieces: Vec<(Dirty, Option<Lies<B>>)>,
    },
    /// Flush the journal's device: [`WriteLog::journal_flushed`].
    FlushJournal,
    /// Read these records, so that they are copied out of the way, or count again though they could not be read: [`WriteLog::parked`].
    Park(Parks),
    /// Have the marker say this, with the frontier: [`WriteLog::marked`]. One at a time.
    Mark(Said, u64),
    /// Look at the marker: [`WriteLog::looked`] if it names no other holder, and [`WriteLog::look_ended`] in any case. One at a time.
    Look,
}

/// How a volume is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// Bytes that are dirty, each counted once.
    pub dirty: u64,
    /// Bytes of the log that it holds, and may hold.
    pub held: (u64, u64),
    /// What it may hold as it was stated; more than it may now where that does not fit any more.
    pub stated: Option<u64>,
    /// It holds so much of that that its writes are delayed;
    pub delayed: bool,
    /// it holds nearly all that it may: it is as slow as its store.
    pub nearly_full: bool,
    /// When the oldest dirty write was answered, or found by a start.
    pub oldest: Option<Nanos>,
    /// How old it may become,
    pub age: Option<Age>,
    /// and whether it is older.
    pub is_old: bool,
    /// Bytes of log a second that are destaged; 0 where that has been nothing of late, or next to nothing.
    pub rate: f64,
    /// How long it takes until all of it is in the store, at the rate of now; `None` where nothing is on its way, or no rate is known.
    pub left: Option<Nanos>,
    /// All up to here is in the store; answered; promised; the last.
    pub positions: [u64; 4],
    /// All up to here is in the store, and in the log, durable, where it is a mark behind that.
    pub image: u64,
    /// The last epoch that was begun.
    pub epoch: u64,
    /// How often the store or the journal has failed since it last worked.
    pub failures: u32,
    /// Bytes of log that were destaged so far.
    pub destaged: u64,
    /// Bytes that cannot be read any more, also of what is in the log no more: reads of them fail until they are written again.
    pub unreadable: u64,
    /// What cannot be read stops it: nothing comes to the store before that is written again.
    pub is_stopped: bool,
    /// The same, because no more stretches can be listed as unreadable, and what is to come to the store next would leave more: one that is written again
    /// in its midst is two.
    pub unlisted: bool,
    /// Bytes that could not be read and were given up by an operator's word, since the start.
    pub given_up: u64,
    /// What is on its way to the store, or was when a run ended, has something newer in place of what cannot be read: until it is there the store alone may be
    /// no image.
    pub joins: bool,
    /// For want of write budget it is answered no faster than its store.
    pub slowed: bool,
    /// Where epochs end at marks alone: those that ended elsewhere,
    pub missed_marks: u64,
    /// whether what the store is at since is no mark,
    pub off_mark: bool,
    /// and whether none that would do has come though the log fills up or ages.
    pub no_mark: bool,
    /// Of those that wait the first, else one that is named now, has so many bytes before it, and an epoch takes no more than so many.
    pub large_mark: Option<(u64, u64)>,
}

/// Takes what the destager asks for.
struct Takes<'a> {
    memory: &'a mut Memory,
    attachment: u32,
    /// How many volumes share the memory.
    volumes: usize,
    /// What is listed as unreadable; what is to be after a window that begins, and how many stretches that may be.
    bad: Unreadable,
    listing: Option<Unreadable>,
    lists: Option<usize>,
    /// What cannot be read may be read yet, and there is time: nothing is left out.
    patient: bool,
    store: Vec<Dirty>,
    flush: bool,
    journal: Option<(u64, u64, Vec<Dirty>)>,
    flush_journal: bool,
    note: Option<u64>,
    /// The volume has a marker, and what that is to say of a window that joins.
    marked: bool,
    joins: Option<u64>,
}

impl<'a> Takes<'a> {
    fn new(
        memory: &'a mut Memory,
        attachment: u32,
        volumes: usize,
        (bad, lists): (Unreadable, Option<usize>),
    ) -> Takes<'a> {
        Takes {
            bad,
            listing: None,
            lists,
            patient: false,
            memory,
            attachment,
            volumes,
            store: Vec::new(),
            flush: false,
            journal: None,
            flush_journal: false,
            note: None,
            marked: false,
            joins: None,
        }
    }
}

impl destager::Effects for Takes<'_> {
    fn takes(&mut self, bytes: u64) -> bool {
        self.memory.take(self.attachment, bytes, self.volumes)
    }
    fn epoch(&self, most: u64) -> u64 {
        most.min(self.memory.part(self.volumes))
    }
    fn lists(&mut self, stored: &[Dirty], skipped: &[Dirty]) -> bool {
        let after = self.bad.after(stored, skipped);
        let fits = match self.lists {
            // There is room for what was listed before.
            Some(lists) => after.count() <= lists.max(self.bad.count()),
            None => skipped.is_empty(),
        };
        self.listing = fits.then_some(after);
        fits
    }
    fn leaves_out(&self) -> bool {
        !self.patient
    }
    fn joins(&mut self, last: u64) -> bool {
        self.joins = Some(last).filter(|_| self.marked);
        self.marked
    }
    fn store(&mut self, _piece: u32, dirty: Dirty) {
        self.store.push(dirty);
    }
    fn flush_store(&mut self) {
        self.flush = true;
    }
    fn journal(&mut self, epoch: u64, last: u64, pieces: &[Dirty]) {
        self.journal = Some((epoch, last, pieces.to_vec()));
    }
    fn flush_journal(&mut self) {
        self.flush_journal = true;
    }
    fn note(&mut self, frontier: u64) {
        self.note = Some(frontier);
    }
}

impl<B: Clone> WriteLog<B> {
    /// Begins what may begin of a volume's destage.
    pub fn step(
        &mut self,
        now: Nanos,
        attachment: u32,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
    ) {
        if std::mem::take(&mut self.mark_waits) {
            self.form(now, asks);
        }
        if !self.begun(attachment) {
            return self.ask_marker(now, attachment, out, asks);
        }
        let durable = self.counts_durable();
        let starved = self.full;
        self.destage(now, attachment, out, asks, |volume, takes| {
            if volume.aside || volume.halted {
                return volume.destager.rest(takes);
            }
            let (hurry, anywhere) = volume.presses(now, starved);
            if let Some((age, rate)) = volume.age.zip(volume.speed) {
                volume.destager.limit(age.window(rate));
            }
            takes.patient = volume.rereads.is_patient() && !hurry;
            let idle = volume.destager.is_idle();
            volume.destager.step(&volume.log, now, durable, (hurry, anywhere), takes);
            if hurry {
                volume.pressed = volume.log.frontier() + 1;
            }
            if let Some(last) = volume.destager.last().filter(|_| idle) {
                volume.begins(last);
            }
        });
        let parks = self.park(now, attachment).or_else(|| self.reread(now, attachment));
        out.extend(parks.map(Asked::Park));
        self.ask_marker(now, attachment, out, asks);
    }

    /// A stretch came to the store, or not: the memory that it took ([`Dirty::memory`]), and the incarnation of the store that has it.
    pub fn stored(
        &mut self,
        now: Nanos,
        attachment: u32,
        (memory, outcome): (u64, destager::Outcome),
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
    ) {
        asks.steps.extend(self.memory.give(attachment, memory));
        self.destage(now, attachment, out, asks, |v, takes| v.destager.stored(now, outcome, takes));
    }

    /// The store was flushed, or not.
    pub fn store_flushed(
        &mut self,
        now: Nanos,
        attachment: u32,
        outcome: destager::Outcome,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
    ) {
        self.destage(now, attachment, out, asks, |v, takes| {
            v.destager.flushed(now, outcome, takes)
        });
    }

    /// The journal has an epoch, volatile perhaps, or not.
    pub fn journaled(
        &mut self,
        now: Nanos,
        attachment: u32,
        done: bool,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
    ) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            let memory = std::mem::take(&mut volume.epoch_memory);
            asks.steps.extend(self.memory.give(attachment, memory));
        }
        self.destage(now, attachment, out, asks, |v, takes| v.destager.journaled(now, done, takes));
    }

    /// The journal's device was flushed, or not.
    pub fn journal_flushed(
        &mut self,
        now: Nanos,
        attachment: u32,
        done: bool,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
    ) {
        self.destage(now, attachment, out, asks, |volume, takes| {
            volume.destager.journal_flushed(now, done, takes);
        });
    }

    /// The marker says, or does not, that until a window is over the store alone is no image.
    pub(super) fn said(
        &mut self,
        now: Nanos,
        attachment: u32,
        done: bool,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
    ) {
        self.destage(now, attachment, out, asks, |v, takes| v.destager.said(now, done, takes));
    }

    fn destage(
        &mut self,
        now: Nanos,
        attachment: u32,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
        f: impl FnOnce(&mut Attached, &mut Takes<'_>),
    ) {
        let (volumes, starved) = (self.volumes.len(), self.full);
        let lists = self.lists(attachment);
        let sees = self.volumes.get(&attachment).is_some_and(|volume| self.sees(volume, now));
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        volume.makes_way(now, starved);
        volume.destager.halt(volume.halted);
        volume.destager.see(sees, volume.aside);
        let bad = (volume.bad.clone(), lists);
        let mut takes = Takes::new(&mut self.memory, attachment, volumes, bad);
        takes.marked = volume.marked;
        let idle = volume.destager.is_idle();
        f(volume, &mut takes);
        volume.ask_look(now, out);
        if volume.destager.is_idle() {
            if !idle {
                asks.steps.push(attachment);
            }
            // A window that is dropped, or none that could begin.
            volume.listing = None;
        } else if let Some(listing) = takes.listing {
            volume.listing = Some(listing);
        }
        if volume.destager.joins() {
            volume.joins = volume.joins.max(volume.destager.last().unwrap_or(0));
        }
        if let Some(last) = takes.joins {
            let closed = volume.closing.is_some();
            out.push(Asked::Mark(Said::Joins { last, closed }, volume.log.frontier()));
        }
        let piece = |dirty: &Dirty| volume.lies(&self.config, &self.kept, dirty);
        out.extend(takes.store.iter().map(|dirty| Asked::Store(*dirty, piece(dirty))));
        if let Some((epoch, last, pieces)) = takes.journal {
            volume.epoch_memory = pieces.iter().map(Dirty::memory).sum();
            let piece = |dirty: &Dirty| volume.lies(&self.config, &self.kept, dirty);
            let pieces = pieces.iter().map(|dirty| (*dirty, piece(dirty))).collect();
            out.push(Asked::Journal { epoch, last, pieces });
        }
        for asked in out.iter() {
            match asked {
                Asked::Store(_, Some(Lies::Log(piece))) => pin(&mut self.segments, piece.pin),
                Asked::Journal { pieces, .. } => {
                    let pieces = pieces.iter().filter_map(|(_, lies)| lies.as_ref()?.piece());
                    pieces.for_each(|piece| pin(&mut self.segments, piece.pin));
                }
                _ => {}
            }
        }
        if takes.flush {
            out.push(Asked::Flush);
        }
        if takes.flush_journal {
            out.push(Asked::FlushJournal);
        }
        if let Some(frontier) = takes.note {
            volume.stored = volume.stored.max(frontier);
            if volume.closing.is_some() {
                return self.ask_marker(now, attachment, out, asks);
            }
            // What is said already says less.
            volume.untold = true;
            if !self.fault.is(super::super::Planted::OlderFrontierCounts) {
                volume.noting = None;
            }
            self.note(now, attachment, asks);
        }
    }

    /// The log is to know how far a volume's store is.
    fn note(&mut self, now: Nanos, attachment: u32, asks: &mut Asks<B>) {
        if self.fault.is(super::super::Planted::FrontierNotNoted) {
            self.let_go(now, attachment);
            asks.steps.push(attachment);
            return;
        }
        self.form(now, asks);
    }

    /// All batches up to this one are durable: windows of which one of them says that the store has them are over.
    pub(super) fn noted(&mut self, now: Nanos, durable: u64) {
        let noted = |v: &Attached| v.noting.is_some_and(|batch| batch <= durable);
        let ready: Vec<u32> =
            self.volumes.iter().filter(|(_, v)| noted(v)).map(|(&n, _)| n).collect();
        for attachment in ready {
            if let Some(volume) = self.volumes.get_mut(&attachment) {
                volume.noting = None;
            }
            self.let_go(now, attachment);
        }
    }

    /// A volume's window is over: what it held of the log is let go.
    pub(super) fn let_go(&mut self, now: Nanos, attachment: u32) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        let began = volume.destager.began();
        let Some(position) = volume.destager.noted() else { return };
        volume.listed(unreadable::forgets(self.fault));
        let (room, bytes) = self.settle(attachment, position);
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        volume.throttle.destaged(now, room);
        volume.destaged += room;
        let took = began.map_or(0, |began| now.saturating_sub(began).0).max(1_000);
        let speed = bytes as f64 * 1e9 / took as f64;
        volume.speed = Some(volume.speed.map_or(speed, |before| (before + speed) / 2.0));
    }

    /// All of a volume is to be destaged as soon as can be, or no longer: by each who has asked for it.
    pub fn drain(&mut self, attachment: u32, draining: bool, asks: &mut Asks<B>) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.draining = match draining {
                true => volume.draining + 1,
                false => volume.draining.saturating_sub(1),
            };
            asks.steps.push(attachment);
        }
    }

    /// Whether a volume has nothing dirty, nothing that is missing in its store since it could not be read, and nothing on its way.
    pub fn is_clean(&self, attachment: u32) -> bool {
        let clean = |v: &Attached| {
            let there = v.log.is_clean() && v.bad.is_empty();
            there && v.destager.is_idle() && v.pending.is_empty()
        };
        self.volumes.get(&attachment).is_none_or(clean)
            && !self.waiting.iter().any(|append| append.attachment == attachment)
    }

    /// How a volume is doing.
    pub fn status(&self, now: Nanos, attachment: u32) -> Option<Status> {
        let volume = self.volumes.get(&attachment)?;
        let log = &volume.log;
        let unlisted = volume.destager.is_unlisted() && self.closed.is_none();
        let part = self.memory.part(self.volumes.len());
        Some(Status {
            dirty: volume.overlay.bytes(),
            held: (log.held(), volume.throttle.bound()),
            stated: volume.stated,
            delayed: is_delayed(log.held(), volume.throttle.bound()),
            nearly_full: is_nearly_full(log.held(), volume.throttle.bound()),
            oldest: volume.oldest(),
            age: volume.age,
            is_old: volume
                .age
                .zip(volume.oldest())
                .is_some_and(|(age, oldest)| age.is_over(now, oldest)),
            rate: volume.throttle.known_rate(now).unwrap_or(0.0),
            left: volume.left((now, self.counts_durable(), self.full), part),
            positions: [log.frontier(), log.acknowledged(), log.promised(), log.last()],
            image: log.stands_for(log.frontier(), self.segments.durable()),
            epoch: volume.destager.epoch(),
            failures: volume.destager.failures(),
            destaged: volume.destaged,
            unreadable: volume.unreadable_bytes(),
            is_stopped: unlisted || volume.stops(self.counts_durable(), self.lists(attachment)),
            unlisted,
            given_up: volume.given_up,
            joins: volume.joins > log.frontier(),
            slowed: volume.is_slowed(),
            missed_marks: volume.missed_marks,
            off_mark: volume.off_mark,
            no_mark: volume.lacks_mark((now, self.counts_durable(), self.full), part),
            large_mark: volume.large_mark(part),
        })
    }

    /// A marker says that until the store of a volume has all up to this record it alone may be no image.
    pub fn set_joins(&mut self, attachment: u32, last: u64) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.joins = volume.joins.max(last.min(volume.log.last()));
        }
    }

    /// What a marker is to say of that; 0 if the store is an image.
    pub fn joins(&self, attachment: u32) -> u64 {
        let joins = |volume: &&Attached| volume.joins > volume.log.frontier();
        self.volumes.get(&attachment).filter(joins).map_or(0, |volume| volume.joins)
    }

    /// What a marker is to say of the journal: the last epoch of which the store has all durably.
    pub fn applied(&self, attachment: u32) -> u64 {
        self.volumes.get(&attachment).map_or(0, |volume| volume.destager.applied())
    }

    /// Bytes that are on their way to stores and journals.
    pub fn memory(&self) -> u64 {
        self.memory.taken()
    }

    /// The volumes, by attachment number.
    pub fn attached(&self) -> impl Iterator<Item = u32> {
        self.volumes.keys().copied()
    }

    /// When a volume's destage goes on by time.
    pub fn pace(&self, attachment: u32) -> Option<Pace> {
        self.volumes.get(&attachment).map(|volume| volume.pace)
    }

    /// How many bytes of a range are dirty, and when the oldest record that shows there was logged, or found by a start; `None` where none are.
    pub fn dirty_since(&self, attachment: u32, range: Range<u64>) -> Option<(u64, Nanos)> {
        let volume = self.volumes.get(&attachment)?;
        let (mut bytes, mut oldest) = (0, u64::MAX);
        volume.overlay.look(range, |stretch| {
            if let Stretch::Dirty(dirty) = stretch {
                bytes += dirty.len;
                oldest = oldest.min(dirty.sequence);
            }
        });
        if bytes == 0 {
            return None;
        }
        Some((bytes, volume.since.of(oldest)?))
    }

    /// The dirty stretches of a range, and those that cannot be read: first byte, bytes, and whether they read as zeros.
    pub fn dirty(&self, attachment: u32, range: Range<u64>) -> Vec<(u64, u64, bool)> {
        let mut all = Vec::new();
        let Some(volume) = self.volumes.get(&attachment) else { return all };
        volume.overlay.look(range, |stretch| match stretch {
            Stretch::Dirty(dirty) => {
                all.push((dirty.at, dirty.len, dirty.holds == Holds::Zeros));
            }
            Stretch::Clean(at, len) => {
                let bad = volume.bad.within(at..at + len);
                all.extend(bad.map(|bad| (bad.start, bad.end - bad.start, false)));
            }
        });
        all
    }
}

impl Attached {
    /// Whether what may be destaged goes to the store whatever its time is, and whether an epoch may end anywhere. `starved`: the log has no
    /// room.
    fn presses(&self, now: Nanos, starved: bool) -> (bool, bool) {
        let full = is_delayed(self.log.held(), self.bound_now(now));
        let aged = self.age.zip(self.oldest());
        let aged = aged.is_some_and(|(age, oldest)| age.presses(oldest) <= now);
        // No mark comes any more to a log that has failed.
        let draining = self.draining > 0 || self.closing.is_some();
        let hurry = draining || starved || full || aged;
        let anywhere = match self.destager.order() {
            Order::Journaled(Cuts::Marks) => draining,
            Order::Journaled(Cuts::MarksOrFull) => draining || starved || self.is_stopped(now),
            _ => hurry,
        };
        (hurry, anywhere)
    }

    /// While clients write, destage goes as fast as it must.
    fn makes_way(&mut self, now: Nanos, starved: bool) {
        let depth = self.destager.depth();
        let (hurry, _) = self.presses(now, starved);
        let under_way = self.throttle.destages(now, self.log.held(), depth);
        let hurry = hurry || self.is_slowed();
        self.destager.keep_under_way(under_way.filter(|_| !hurry));
    }

    /// How long it takes until all of it is in the store; see [`Status::left`].
    fn left(&self, (now, durable, starved): (Nanos, u64, bool), part: u64) -> Option<Nanos> {
        if self.overlay.bytes() == 0 {
            return Some(Nanos::ZERO);
        }
        let (hurry, anywhere) = self.presses(now, starved);
        let moves = match self.destager.is_idle() {
            true => (hurry || self.pace == Pace::Async) && self.may_cut(anywhere, part),
            false => self.destager.failures() == 0,
        };
        // (Where marks alone count, what comes behind the last one rests until the next.)
        let waits = self.wants_marks() && !anywhere && !self.log.is_cut(self.log.acknowledged());
        let waits = waits || self.awaits_look().is_some();
        let rests =
            self.aside || self.halted || waits || self.lacks_mark((now, durable, starved), part);
        self.throttle.time_left(now, self.log.held()).filter(|_| moves && !rests)
    }

    /// Whether an epoch may begin with what is answered, once that is durable: one may end behind the frontier. A window may always.
    fn may_cut(&self, anywhere: bool, part: u64) -> bool {
        let most = self.epoch_most(part);
        !self.destager.is_journaled() || self.log.next(u64::MAX, most, anywhere, true).is_some()
    }

    /// Most bytes of an epoch, where a volume has `part` of the memory for what is on its way.
    fn epoch_most(&self, part: u64) -> u64 {
        self.destager.most().min(part)
    }

    /// Whether epochs are to end at marks alone.
    pub(super) fn wants_marks(&self) -> bool {
        matches!(self.destager.order(), Order::Journaled(cuts) if cuts.are_marks())
    }

    /// An epoch begins that holds all up to `last`: does it end where it is to?
    fn begins(&mut self, last: u64) {
        if self.wants_marks() {
            self.off_mark = !self.log.is_cut(last);
            self.missed_marks += u64::from(self.off_mark);
        }
    }

    /// The first mark that waits, or that is named now, does not fit into an epoch. (One that is told to go on ends anywhere.)
    fn large_mark(&self, part: u64) -> Option<(u64, u64)> {
        let most = self.epoch_most(part);
        let large = || self.log.too_large(most);
        let waits = self.wants_marks() && self.draining == 0 && self.closing.is_none();
        waits.then(large).flatten().map(|bytes| (bytes, most))
    }

    /// What is dirty waits for a mark, and room or its age do not.
    fn lacks_mark(&self, (now, durable, starved): (Nanos, u64, bool), part: u64) -> bool {
        let (hurry, _) = self.presses(now, starved);
        self.wants_marks()
            && hurry
            && self.may_begin(durable)
            && self.log.next(durable, self.epoch_most(part), false, true).is_none()
    }
}
