//! Of each volume, window after window goes to the store. The [`Destager`](super::super::destager) says what; here it meets the log.

use std::ops::Range;

use larder_base::Nanos;

use super::super::destager::{self, Pace};
use super::super::overlay::{Dirty, Holds};
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
    /// Read these records, so that they are copied out of the way: [`WriteLog::parked`].
    Park(Parks),
    /// Have the marker say this, with the frontier: [`WriteLog::marked`].
    Mark(Said, u64),
}

/// How a volume is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Status {
    /// Bytes that are dirty, each counted once.
    pub dirty: u64,
    /// Bytes of the log that it holds, and may hold.
    pub held: (u64, u64),
    /// When the oldest dirty write was logged.
    pub oldest: Option<Nanos>,
    /// Bytes of log a second that are destaged.
    pub rate: f64,
    /// All up to here is in the store; answered; promised; the last.
    pub positions: [u64; 4],
    /// The last epoch that was begun.
    pub epoch: u64,
    /// How often the store or the journal has failed since it last worked.
    pub failures: u32,
    /// Bytes of log that were destaged so far.
    pub destaged: u64,
}

/// Takes what the destager asks for.
#[derive(Default)]
struct Takes {
    store: Vec<Dirty>,
    flush: bool,
    journal: Option<(u64, u64, Vec<Dirty>)>,
    flush_journal: bool,
    note: Option<u64>,
}

impl destager::Effects for Takes {
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
        if !self.begun(attachment) {
            return self.mark(now, attachment, out, asks);
        }
        let durable = self.counts_durable();
        let starved = self.full || self.closed.is_some();
        self.destage(now, attachment, out, asks, |volume, takes| {
            let bound = volume.throttle.bound();
            let full = volume.log.held() * 2 >= bound;
            let hurry = volume.draining || starved || full;
            volume.destager.step(&volume.log, now, durable, (hurry, hurry), takes);
        });
        out.extend(self.park(now, attachment).map(Asked::Park));
        self.mark(now, attachment, out, asks);
    }

    /// A stretch came to the store, or not: the incarnation of the store that has it.
    pub fn stored(
        &mut self,
        now: Nanos,
        attachment: u32,
        outcome: destager::Outcome,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
    ) {
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

    fn destage(
        &mut self,
        now: Nanos,
        attachment: u32,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
        f: impl FnOnce(&mut Attached, &mut Takes),
    ) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        let mut takes = Takes::default();
        f(volume, &mut takes);
        let piece = |dirty: &Dirty| volume.lies(&self.config, &self.kept, dirty);
        out.extend(takes.store.iter().map(|dirty| Asked::Store(*dirty, piece(dirty))));
        if let Some((epoch, last, pieces)) = takes.journal {
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
                return self.mark(now, attachment, out, asks);
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
        let Some(position) = volume.destager.noted() else { return };
        let bytes = self.settle(attachment, position);
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        volume.throttle.destaged(now, bytes);
        volume.destaged += bytes;
    }

    /// All of a volume is to be destaged as soon as can be, or no longer.
    pub fn drain(&mut self, attachment: u32, draining: bool, asks: &mut Asks<B>) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.draining = draining;
            asks.steps.push(attachment);
        }
    }

    /// Whether a volume has nothing dirty, and nothing on its way.
    pub fn is_clean(&self, attachment: u32) -> bool {
        let clean = |v: &Attached| v.log.is_clean() && v.destager.is_idle() && v.pending.is_empty();
        self.volumes.get(&attachment).is_none_or(clean)
            && !self.waiting.iter().any(|append| append.attachment == attachment)
    }

    /// How a volume is doing.
    pub fn status(&self, now: Nanos, attachment: u32) -> Option<Status> {
        let volume = self.volumes.get(&attachment)?;
        let log = &volume.log;
        Some(Status {
            dirty: volume.overlay.bytes(),
            held: (log.held(), volume.throttle.bound()),
            oldest: volume.since.front().map(|&(_, since)| since),
            rate: volume.throttle.rate_at(now),
            positions: [log.frontier(), log.acknowledged(), log.promised(), log.last()],
            epoch: volume.destager.epoch(),
            failures: volume.destager.failures(),
            destaged: volume.destaged,
        })
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
            if let super::super::overlay::Stretch::Dirty(dirty) = stretch {
                bytes += dirty.len;
                oldest = oldest.min(dirty.sequence);
            }
        });
        let at = volume.since.partition_point(|&(sequence, _)| sequence <= oldest);
        let since = volume.since.get(at.checked_sub(1)?)?.1;
        (bytes > 0).then_some((bytes, since))
    }

    /// The dirty stretches of a range: first byte, bytes, and whether they read as zeros.
    pub fn dirty(&self, attachment: u32, range: Range<u64>) -> Vec<(u64, u64, bool)> {
        let mut all = Vec::new();
        let Some(volume) = self.volumes.get(&attachment) else { return all };
        volume.overlay.look(range, |stretch| {
            if let super::super::overlay::Stretch::Dirty(dirty) = stretch {
                all.push((dirty.at, dirty.len, dirty.holds == Holds::Zeros));
            }
        });
        all
    }
}
