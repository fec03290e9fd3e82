//! A log that has failed: its device could not be flushed, or writes to it keep failing. Nothing is logged any more.
//!
//! What was written and not flushed may be gone though it can be read, so its payload is kept here until it is known durable, and is destaged from
//! here. Step by step, for each volume:
//!
//! ```text
//! marker: closing │ windows: store, flush, marker: closed(F) │ all of it is there, marker: clean │ writes that waited go to the store itself
//! ```
//!
//! A FLUSH is answered when the marker says that the store has what it covers [closed]; without a marker it fails. A start that finds such a marker
//! goes on likewise, with what is durable in the log from F on. Rules in brackets are those of `models/write_back.py`.

use std::collections::{BTreeMap, VecDeque};

use larder_base::{ByteSize, Nanos};

use super::super::overlay::{Dirty, Holds};
use super::super::planted::Planted;
use super::super::volume_log::{Kind, VolumeLog};
use super::{Append, Asked, Asks, Attached, Flushing, Start, WriteLog};

/// Most bytes of payload that are kept because they are not known durable: more writes wait for a flush of the device.
const MOST_KEPT: u64 = 64 << 20;
/// A marker that could not be written is written again after so long.
const MARK_PAUSE: Nanos = Nanos::from_secs(1);

/// What a marker is to say of a volume: of one whose log has failed, or that joins what may not come to the store at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Said {
    /// The log has failed: what is durable in it counts, and no slot of the volume.
    Closing,
    /// The same, and the store has all up to the frontier durably.
    Closed,
    /// The store has everything.
    Clean,
    /// What it said before, and that until the store has all up to this record it alone may be no image.
    Joins {
        /// That record.
        last: u64,
        /// The log has failed: it says `Closed`.
        closed: bool,
    },
}

/// Why a volume of a log that has failed is not written any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Stands {
    /// So much cannot be read, and cannot be written over.
    #[error(
        "its write log has failed, and {0} of what was written cannot be read from it: no more comes to its store until the cache is opened anew, which reads its device once more"
    )]
    Unreadable(ByteSize),
    /// All of it is in its store, and nothing can say so.
    #[error("its write log has failed, and its marker cannot say that its store has all of it")]
    Untold,
}

/// Bytes of a record's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept<B> {
    /// The payload,
    pub bytes: B,
    /// and how much of it comes before the first that is wanted.
    pub skip: u64,
}

/// How far a volume of a failed log is.
#[derive(Debug)]
pub(super) struct Closing {
    /// What its marker is to say.
    wants: Option<Said>,
    /// It is being written.
    under_way: bool,
    /// When it is to be written again.
    after: Option<Nanos>,
    /// The marker says that the log has failed, if there is one: destage goes on.
    begun: bool,
    /// The store does not get everything, or that could not be said: nothing may be written any more.
    stands: bool,
}

impl Closing {
    fn new(marked: bool) -> Closing {
        let wants = marked.then_some(Said::Closing);
        Closing { wants, under_way: false, after: None, begun: !marked, stands: false }
    }

    /// Destage goes on.
    pub(super) fn begun(&self) -> bool {
        self.begun
    }

    /// Nothing may be written any more.
    pub(super) fn stands(&self) -> bool {
        self.stands
    }

    /// When a marker is to be written again.
    pub(super) fn wakes(&self) -> Option<Nanos> {
        self.after
    }
}

#[derive(Debug)]
struct Payload<B> {
    batch: u64,
    of: (u32, u64),
    len: u64,
    bytes: B,
}

/// Payload of records that are not known durable.
#[derive(Debug)]
pub(super) struct Payloads<B> {
    /// As long as the log works, in the order of the batches.
    queue: VecDeque<Payload<B>>,
    len: u64,
    /// Of a log that has failed, by attachment number and sequence: batch, and bytes.
    failed: BTreeMap<(u32, u64), (u64, B)>,
}

impl<B> Default for Payloads<B> {
    fn default() -> Payloads<B> {
        Payloads { queue: VecDeque::new(), len: 0, failed: BTreeMap::new() }
    }
}

impl<B: Clone> Payloads<B> {
    /// Whether no more may come.
    pub(super) fn is_full(&self) -> bool {
        self.len >= MOST_KEPT
    }

    /// A record's payload, of `len` bytes.
    pub(super) fn keep(&mut self, batch: u64, of: (u32, u64), len: u64, bytes: B) {
        self.len += len;
        self.queue.push_back(Payload { batch, of, len, bytes });
    }

    /// All batches up to this one are durable.
    pub(super) fn durable(&mut self, batch: u64) {
        while self.queue.front().is_some_and(|payload| payload.batch <= batch) {
            self.len -= self.queue.pop_front().map_or(0, |payload| payload.len);
        }
        self.failed.retain(|_, (of, _)| *of > batch);
    }

    fn fails(&mut self) {
        let by_record = |payload: Payload<B>| (payload.of, (payload.batch, payload.bytes));
        self.failed = self.queue.drain(..).map(by_record).collect();
        self.len = 0;
    }

    /// Records of a volume up to this one are not needed any more.
    pub(super) fn let_go(&mut self, attachment: u32, sequence: u64) {
        while let Some((&of, _)) =
            self.failed.range((attachment, 0)..=(attachment, sequence)).next()
        {
            self.failed.remove(&of);
        }
    }

    /// The bytes of a dirty stretch, if the log has failed and may not have them.
    pub(super) fn of(&self, attachment: u32, log: &VolumeLog, dirty: &Dirty) -> Option<Kept<B>> {
        if self.failed.is_empty() || dirty.holds != Holds::Bytes {
            return None;
        }
        let (_, bytes) = self.failed.get(&(attachment, dirty.sequence))?;
        let skip = dirty.at - log.record(dirty.sequence)?.at;
        Some(Kept { bytes: bytes.clone(), skip })
    }
}

impl Attached {
    /// Its log has failed, and nothing of it may be written any more.
    pub(super) fn stands(&self) -> bool {
        self.closing.as_ref().is_some_and(Closing::stands)
    }
}

impl<B: Clone> WriteLog<B> {
    /// Nothing is logged any more, for this reason. What is logged comes to the stores, and is answered as if it were written; then the volumes are
    /// written through.
    pub fn close(&mut self, now: Nanos, why: &'static str, asks: &mut Asks<B>) {
        if self.closed.is_some() {
            return;
        }
        (self.closed, self.full, self.parking) = (Some(why), false, None);
        asks.gives_up = Some(why);
        self.kept.fails();
        if self.start != Start::Started {
            return asks.answers.extend(self.waiting.drain(..).map(|append| (append.op, true)));
        }
        // Whoever waits for a mark hears that nothing is logged any more.
        self.waiting.retain(|append| append.kind != Kind::Mark);
        for (&attachment, volume) in &mut self.volumes {
            volume.marks.none_comes();
            volume.destager.lists_no_more();
            volume.stored = volume.stored.min(volume.said_by(volume.destager.is_noting()));
            // What is put aside stays as it is: it was durable in the log before its marker said so, is not destaged here, and no client has it. The
            // next start finds it, or one with another cache is refused. One that is not aside for good is resumed, and then begins as others do.
            if !volume.aside {
                volume.closing = Some(Closing::new(volume.marked));
                asks.steps.push(attachment);
            }
        }
        let unmarked = |flush: &mut Flushing| {
            self.volumes.get(&flush.attachment).is_none_or(|volume| !volume.marked)
        };
        asks.answers.extend(self.flushes.extract_if(.., unmarked).map(|flush| (flush.op, true)));
        self.acknowledge(now, asks);
    }

    /// In place of [`WriteLog::start`] where a marker says that the log has failed in a former run: what was found comes to the stores, and nothing
    /// is logged any more. The device is not written, and need not be flushed: nothing that was not promised is promised for having been found.
    pub fn start_closed(&mut self, now: Nanos, asks: &mut Asks<B>) {
        if self.start != Start::Found {
            return;
        }
        // Nothing of it counts as durable: a FLUSH waits until the store has what it covers.
        self.starts(asks);
        self.close(now, "the write log has failed in a former run", asks);
        asks.gives_up = None;
    }

    /// A volume of a log that has failed meanwhile is destaged after all: it goes the way of the others.
    pub(super) fn closes_late(&mut self, attachment: u32) {
        let failed = self.closed.is_some() && self.start == Start::Started;
        let volume = self.volumes.get_mut(&attachment);
        if let Some(volume) = volume.filter(|volume| failed && volume.closing.is_none()) {
            volume.closing = Some(Closing::new(volume.marked));
        }
    }

    /// Whether it has failed, has no volume any more, and nothing of it is under way: another may begin on its device ([`WriteLog::follows`]).
    pub fn is_over(&self) -> bool {
        let written = self.writing.is_empty() && !self.footers.is_writing();
        self.closed.is_some()
            && self.volumes.is_empty()
            && written
            && self.flushing.is_none()
            && !self.segments.is_pinned()
    }

    /// Whether it has this volume: served, or put aside.
    pub fn has(&self, attachment: u32) -> bool {
        self.volumes.contains_key(&attachment)
    }

    /// Whether it has any.
    pub fn has_any(&self) -> bool {
        !self.volumes.is_empty()
    }

    /// It takes the place of one that [is over](WriteLog::is_over): what was counted goes on.
    pub fn follows(&mut self, former: &WriteLog<B>) {
        self.bytes += former.bytes;
    }

    /// Why a volume of a log that has failed is not written any more, if it is not.
    pub fn stands(&self, attachment: u32) -> Option<Stands> {
        let volume = self.volumes.get(&attachment).filter(|volume| volume.stands())?;
        Some(match volume.unreadable_bytes() {
            0 => Stands::Untold,
            bytes => Stands::Unreadable(ByteSize(bytes)),
        })
    }

    /// All batches up to here count as written: what is not is here.
    pub(super) fn counts_written(&self) -> u64 {
        self.closed.map_or(self.segments.written(), |_| u64::MAX)
    }

    /// All batches up to here may be destaged.
    pub(super) fn counts_durable(&self) -> u64 {
        self.closed.map_or(self.segments.durable(), |_| u64::MAX)
    }

    /// A change comes to a log that has failed: it waits until its volume writes through.
    pub(super) fn append_closed(&mut self, append: Append<B>, asks: &mut Asks<B>) {
        let aside = self.is_aside(append.attachment);
        match self.volumes.get(&append.attachment).map(|volume| &volume.closing) {
            None => asks.through.push((append.op, Some(append))),
            Some(Some(closing)) if !closing.stands => self.waiting.push_back(append),
            // It may stay yet.
            Some(None) if aside => self.waiting.push_back(append),
            Some(_) => asks.answers.push((append.op, true)),
        }
    }

    /// A step of a volume whose log has failed. Returns whether its destage may go on.
    pub(super) fn begun(&self, attachment: u32) -> bool {
        let closing = self.volumes.get(&attachment).and_then(|volume| volume.closing.as_ref());
        // (A log that fails before a start has ended destages nothing.)
        closing.map_or(self.closed.is_none(), |closing| closing.begun)
    }

    /// Asks for the marker that is wanted of a volume whose log has failed.
    pub(super) fn ask_marker(
        &mut self,
        now: Nanos,
        attachment: u32,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
    ) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        // (The marker of one that is halted is another's.)
        let Some(closing) = volume.closing.as_ref().filter(|c| !c.stands && !volume.halted) else {
            return;
        };
        if volume.destager.is_saying() {
            // One at a time.
            return;
        }
        let (noting, clean) = (volume.destager.is_noting(), volume.is_clean());
        // What cannot be read keeps it from its end: nobody can write over it any more.
        if closing.begun && closing.wants.is_none() && !closing.under_way {
            let missing = volume.log.is_clean() && volume.destager.is_idle() && !clean;
            if missing || volume.stops(u64::MAX, None) {
                return self.stand(attachment, asks);
            }
        }
        let Some(closing) = volume.closing.as_mut() else { return };
        if closing.wants.is_none() && closing.begun {
            if noting && (!volume.marked || self.fault.is(Planted::ClosedUnmarked)) {
                asks.steps.push(attachment);
                return self.stored_for_good(now, attachment, asks);
            }
            closing.wants = match (noting, clean) {
                (true, _) => Some(Said::Closed),
                (_, true) => Some(Said::Clean),
                _ => None,
            };
        }
        let due = closing.after.is_none_or(|after| after <= now) && !closing.under_way;
        if let Some(said) = closing.wants.filter(|_| due) {
            (closing.under_way, closing.after) = (true, None);
            out.push(Asked::Mark(said, volume.stored));
        }
    }

    /// The marker of a volume whose log has failed says what [`Asked::Mark`] wanted, durably, or could not be written. (Of a volume without
    /// one: this cache says that it holds nothing of it, or cannot.)
    pub fn marked(
        &mut self,
        now: Nanos,
        attachment: u32,
        done: bool,
        out: &mut Vec<Asked<B>>,
        asks: &mut Asks<B>,
    ) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        if volume.destager.is_saying() {
            self.said(now, attachment, done, out, asks);
            return self.ask_marker(now, attachment, out, asks);
        }
        let Some(closing) = volume.closing.as_mut().filter(|closing| closing.under_way) else {
            return;
        };
        closing.under_way = false;
        match (closing.wants.filter(|_| done), volume.marked) {
            (None, true) => closing.after = Some(now + MARK_PAUSE),
            (None, false) => {
                self.stand(attachment, asks);
            }
            (Some(Said::Clean), _) => self.goes_through(attachment, asks),
            (Some(said), _) => {
                (closing.wants, closing.begun) = (None, true);
                if said == Said::Closed {
                    self.stored_for_good(now, attachment, asks);
                }
                self.step(now, attachment, out, asks);
            }
        }
    }

    /// Nothing of a volume can be written any more.
    fn stand(&mut self, attachment: u32, asks: &mut Asks<B>) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            if let Some(closing) = &mut volume.closing {
                closing.stands = true;
            }
            // What was written may be nowhere but in memory, and comes to no store.
            asks.answers
                .extend(volume.pending.drain(..).filter_map(|pending| Some((pending.op?, true))));
        }
        let mine = |append: &mut Append<B>| append.attachment == attachment;
        let failed = extract(&mut self.waiting, mine);
        asks.answers.extend(failed.into_iter().map(|append| (append.op, true)));
        let mine = |flush: &mut Flushing| flush.attachment == attachment;
        asks.answers.extend(self.flushes.extract_if(.., mine).map(|flush| (flush.op, true)));
    }

    /// The store has a window durably, and the marker says so: FLUSHes that waited for that are answered.
    fn stored_for_good(&mut self, now: Nanos, attachment: u32, asks: &mut Asks<B>) {
        self.let_go(now, attachment);
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        let stored = volume.log.frontier();
        let over =
            |flush: &mut Flushing| flush.attachment == attachment && flush.position <= stored;
        for flush in self.flushes.extract_if(.., over) {
            volume.log.promise(flush.position);
            asks.answers.push((flush.op, false));
        }
        // There is room.
        self.acknowledge(now, asks);
    }

    /// The store has all of a volume, and the marker says so: it is written through from now on.
    fn goes_through(&mut self, attachment: u32, asks: &mut Asks<B>) {
        self.volumes.remove(&attachment);
        self.memory.leave(attachment);
        self.footers.forget(attachment);
        let mine = |flush: &mut Flushing| flush.attachment == attachment;
        asks.answers.extend(self.flushes.extract_if(.., mine).map(|flush| (flush.op, false)));
        let mine = |append: &mut Append<B>| append.attachment == attachment;
        let through = extract(&mut self.waiting, mine);
        asks.through.extend(through.into_iter().map(|append| (append.op, Some(append))));
    }
}

impl Attached {
    /// Nothing of it is dirty, or on its way.
    fn is_clean(&self) -> bool {
        self.log.is_clean() && self.bad.is_empty() && self.destager.is_idle()
    }
}

/// Takes out what `f` says, in order.
pub(super) fn extract<T>(from: &mut VecDeque<T>, mut f: impl FnMut(&mut T) -> bool) -> Vec<T> {
    let mut taken = Vec::new();
    let mut left = VecDeque::with_capacity(from.len());
    for mut each in from.drain(..) {
        if f(&mut each) {
            taken.push(each);
        } else {
            left.push_back(each);
        }
    }
    *from = left;
    taken
}

#[cfg(test)]
mod tests {
    use super::super::super::volume_log::{Grain, Order};
    use super::super::marks::tests::{NOW, append, log};
    use super::*;
    use crate::block::OpId;

    /// The store has all of it, and nothing can say so: whoever waits at it waits for nothing.
    #[test]
    fn who_waits_at_a_volume_that_can_never_be_written_is_answered() {
        let mut log = log(Order::Ordered(Grain::Flush));
        log.volumes.get_mut(&1).unwrap().marked = false;
        let (mut out, mut asks) = (Vec::new(), Asks::default());
        log.close(NOW, "a test", &mut asks);
        log.append(NOW, append(1), &mut asks);
        log.flush(NOW, 1, OpId(2), &mut asks);
        log.step(NOW, 1, &mut out, &mut asks);
        assert!(matches!(out[..], [Asked::Mark(Said::Clean, 0)]), "{out:?}");
        assert!(!asks.answers.iter().any(|answer| answer.0 == OpId(1)), "it waits");
        assert_eq!(log.stands(1), None);
        log.marked(NOW, 1, false, &mut out, &mut asks);
        assert_eq!(log.stands(1), Some(Stands::Untold));
        assert!(asks.answers.contains(&(OpId(1), true)), "{:?}", asks.answers);
        assert!(asks.answers.iter().any(|answer| answer.0 == OpId(2)), "{:?}", asks.answers);
        // So is whoever comes later.
        let mut asks = Asks::default();
        log.append(NOW, append(3), &mut asks);
        assert_eq!(asks.answers, [(OpId(3), true)]);
        log.step(NOW, 1, &mut out, &mut asks);
        assert_eq!(out.len(), 1, "nothing is asked any more: {out:?}");
    }
}
