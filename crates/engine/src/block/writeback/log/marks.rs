//! Marks: consistency points that an application names. A mark is a record of the log, with a sequence of its own and no bytes of the volume. It
//! stands for what had been answered when it was asked for; where epochs end at marks, one may end there from then on.

use std::collections::{BTreeMap, VecDeque};

use larder_format::block::write_log::{pieces, record};

use super::super::overlay::Dirty;
use super::super::planted::Planted;
use super::super::volume_log::Kind;
use super::{Append, Asks, Piece, Sums, WriteLog};
use crate::block::api::OpId;

/// Whoever asks for a mark is no queue, and hears of it by [`WriteLog::mark_state`].
pub const NOBODY: OpId = OpId(u64::MAX);

/// What has become of a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MarkState {
    /// It is on its way to the log.
    Waits,
    /// It is durable with this sequence, and so is all that was answered before it was asked for.
    Durable(u64),
    /// Nothing is logged any more, or its volume has gone.
    Failed,
}

/// A mark of a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mark {
    /// Its name; empty where a start has found it and could not read it.
    name: String,
    /// Its sequence; 0 where only its name is known, or as long as it has none.
    sequence: u64,
    /// All up to here is what it stands for.
    position: u64,
    /// Its batch; 0 of one that was durable at the start.
    batch: u64,
}

/// The marks of a volume.
#[derive(Debug, Default)]
pub(super) struct Marks {
    /// Those that the store does not have, in their order. The last ones wait for a batch.
    all: VecDeque<Mark>,
    /// How many of them have come to one.
    formed: usize,
    /// The last that the store has.
    stored: Option<Mark>,
    /// How many were asked for, and how many of those have come to a batch.
    asked: u64,
    numbered: u64,
    /// Those that have, as long as somebody waits for them: by number, sequence and batch.
    awaited: BTreeMap<u64, (u64, u64)>,
}

impl Marks {
    /// What the next one that comes to a batch stands for.
    pub(super) fn next(&self) -> Option<u64> {
        self.all.get(self.formed).map(|mark| mark.position)
    }

    /// The next one has its sequence, and stands for all up to `position`.
    pub(super) fn formed(&mut self, sequence: u64, position: u64, batch: u64) {
        self.numbered += 1;
        self.awaited.insert(self.numbered, (sequence, batch));
        if let Some(mark) = self.all.get_mut(self.formed) {
            (mark.sequence, mark.position, mark.batch) = (sequence, position, batch);
            self.formed += 1;
        }
    }

    /// A start has found one.
    pub(super) fn found(&mut self, sequence: u64, position: u64) {
        self.all.push_back(Mark { name: String::new(), sequence, position, batch: 0 });
        self.formed += 1;
    }

    /// Those that have come to no batch come to none: whoever waits for one hears that.
    pub(super) fn none_comes(&mut self) {
        self.all.truncate(self.formed);
        self.numbered = self.asked;
    }

    /// The store has all up to here.
    pub(super) fn stored(&mut self, position: u64) {
        while self.formed > 0 && self.all.front().is_some_and(|mark| mark.position <= position) {
            self.stored = self.all.pop_front();
            self.formed -= 1;
        }
    }

    /// The last one whose image all up to `position` has.
    fn at(&self, position: u64) -> Option<&Mark> {
        self.all.iter().rev().find(|mark| mark.position <= position).or(self.stored.as_ref())
    }
}

impl<B: Clone> WriteLog<B> {
    /// A mark of that name stands for all that was answered of a volume; `bytes` are those of the name, which has at most
    /// [`record::MAX_MARK`]. Returns its number for [`WriteLog::mark_state`], which is asked until it is not [`MarkState::Waits`] any more, or
    /// [`WriteLog::forget_mark`]; `None` if the volume does not write back, nothing is logged any more, or the name is none.
    pub fn mark(
        &mut self,
        attachment: u32,
        name: &str,
        bytes: B,
        asks: &mut Asks<B>,
    ) -> Option<u64> {
        record::mark_name(name.as_bytes())?;
        let closed = self.closed.is_some();
        let volume = self.volumes.get_mut(&attachment).filter(|v| !closed && !v.halted)?;
        let position = match volume.destager.is_journaled() {
            true => volume.log.acknowledged(),
            // Its own sequence, which it does not have yet.
            false => u64::MAX,
        };
        let name = name.to_owned();
        let sums: Vec<u32> = pieces::sums(name.as_bytes()).collect();
        self.waiting.push_back(Append {
            op: NOBODY,
            attachment,
            kind: Kind::Mark,
            at: 0,
            len: name.len() as u64,
            bytes: Some(bytes),
            sums: Sums::new(&sums),
            fua: false,
            may_punch: false,
        });
        volume.marks.all.push_back(Mark { name, sequence: 0, position, batch: u64::MAX });
        volume.marks.asked += 1;
        volume.log.mark(position);
        self.mark_waits = true;
        asks.steps.push(attachment);
        Some(volume.marks.asked)
    }

    /// What has become of the mark of this number. Whoever waits for it hears once that it is durable.
    pub fn mark_state(&mut self, attachment: u32, number: u64) -> MarkState {
        let (durable, closed) = (self.segments.durable(), self.closed.is_some());
        let Some(volume) = self.volumes.get_mut(&attachment) else { return MarkState::Failed };
        if volume.halted {
            // It would be a point of what another has.
            return MarkState::Failed;
        }
        match volume.marks.awaited.get(&number) {
            Some(&(sequence, batch))
                if batch <= durable || self.fault.is(Planted::MarkNotAwaited) =>
            {
                volume.marks.awaited.remove(&number);
                MarkState::Durable(sequence)
            }
            None if closed || number <= volume.marks.numbered => MarkState::Failed,
            Some(_) if closed => MarkState::Failed,
            _ => MarkState::Waits,
        }
    }

    /// Nobody waits any more for the mark of this number: it comes all the same.
    pub fn forget_mark(&mut self, attachment: u32, number: u64) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.marks.awaited.remove(&number);
        }
    }

    /// Whether the record of this sequence of a volume is a mark. For models, which have to know in what order things came to the log.
    #[cfg(feature = "planted")]
    pub fn is_mark(&self, attachment: u32, sequence: u64) -> bool {
        self.volumes.get(&attachment).is_some_and(|volume| volume.log.is_mark(sequence))
    }

    /// The name of the last mark of a volume that is durable, in the log or in the store; empty if it could not be read.
    pub fn last_mark(&self, attachment: u32) -> Option<&str> {
        let marks = &self.volumes.get(&attachment)?.marks;
        let durable = self.segments.durable();
        let last = marks.all.iter().rev().find(|mark| mark.batch <= durable);
        last.or(marks.stored.as_ref()).map(|mark| mark.name.as_str())
    }

    /// The name of the last mark of a volume whose image is in all up to `position`, with the marks that are durable right behind it.
    pub fn mark_at(&self, attachment: u32, position: u64) -> Option<&str> {
        let volume = self.volumes.get(&attachment)?;
        let mark = volume.marks.at(volume.log.stands_for(position, self.segments.durable()));
        mark.map(|mark| mark.name.as_str()).filter(|name| !name.is_empty())
    }

    /// The name of the last mark of a volume that its store has.
    pub fn stored_mark(&self, attachment: u32) -> Option<&str> {
        self.mark_at(attachment, self.volumes.get(&attachment)?.log.frontier())
    }

    /// The marks that a start has found, with where their names lie: they are read, and told by [`WriteLog::name_mark`].
    pub fn unnamed_marks(&self, attachment: u32) -> Vec<(u64, Piece)> {
        let Some(volume) = self.volumes.get(&attachment) else { return Vec::new() };
        let piece = |mark: &Mark| {
            let logged = volume.log.record(mark.sequence)?;
            let (at, len, holds) = (logged.at, logged.len, logged.holds());
            let dirty = Dirty { at, len, sequence: mark.sequence, holds };
            Some((mark.sequence, volume.piece(&self.config, &dirty)?))
        };
        volume.marks.all.iter().filter(|mark| mark.name.is_empty()).filter_map(piece).collect()
    }

    /// The name of a mark that a start has found: the bytes that its piece names. What is not as its checksum says stays without a name.
    pub fn name_mark(&mut self, attachment: u32, sequence: u64, piece: &Piece, bytes: &[u8]) {
        let whole = pieces::check(piece.sums.as_slice(), 0, bytes).is_ok();
        let Some(name) = record::mark_name(bytes).filter(|_| whole) else { return };
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        let of = volume.marks.all.iter_mut().find(|mark| mark.sequence == sequence);
        if let Some(mark) = of {
            name.clone_into(&mut mark.name);
        }
    }

    /// The store of a volume that was just attached has the mark of this name: its marker or its journal says so.
    pub fn had_mark(&mut self, attachment: u32, name: String) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.marks.stored = Some(Mark { name, sequence: 0, position: 0, batch: 0 });
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use larder_base::Nanos;
    use larder_format::Uuid;
    use larder_format::block::write_log::SegmentGeometry;

    use super::super::super::destager::{Config as Destage, Destager, Pace};
    use super::super::super::throttle::Age;
    use super::super::super::volume_log::{Cuts, Grain, Order};
    use super::super::{Asked, Attach, Config};
    use super::*;

    pub(in super::super) const NOW: Nanos = Nanos::from_secs(1);

    fn destage(order: Order) -> Destage {
        Destage { order, pace: Pace::Async, most: 1 << 20, depth: 8 }
    }

    pub(in super::super) fn log(order: Order) -> WriteLog<Vec<u8>> {
        let mut log = WriteLog::new(Config {
            cache: Uuid([1; 16]),
            run: 1,
            at: 0,
            geometry: SegmentGeometry::new(1 << 20, 4096).unwrap(),
            segments: 16,
            depth: 2,
            memory: 64 << 20,
            wall: 0,
        });
        log.attach(
            NOW,
            Attach {
                attachment: 1,
                volume: Uuid([2; 16]),
                generation: 1,
                destage: destage(order),
                bound: None,
                age: None,
                frontier: 0,
                epoch: 0,
                marker: 1,
                marked: true,
            },
        );
        log.looked(1, NOW, &mut Asks::default());
        log
    }

    /// Carries out what the log asks of its device, until it asks for no more. Returns the records that were written.
    pub(in super::super) fn carry(
        log: &mut WriteLog<Vec<u8>>,
        mut asks: Asks<Vec<u8>>,
    ) -> Vec<OpId> {
        let mut answers = Vec::new();
        loop {
            answers.extend(asks.answers.iter().map(|answer| answer.0));
            let mut next = Asks::default();
            for write in &asks.writes {
                log.written(NOW, write.number, true, &mut next);
            }
            if let Some(covers) = asks.flush {
                log.flushed(NOW, covers, true, &mut next);
            }
            if asks.writes.is_empty() && asks.flush.is_none() {
                return answers;
            }
            asks = next;
        }
    }

    pub(in super::super) fn append(op: u64) -> Append<Vec<u8>> {
        let bytes = vec![op as u8; 4096];
        let sums = Sums::new(&pieces::sums(&bytes).collect::<Vec<_>>());
        let (op, kind) = (OpId(op), Kind::Write);
        Append {
            op,
            attachment: 1,
            kind,
            at: 0,
            len: 4096,
            bytes: Some(bytes),
            sums,
            fua: false,
            may_punch: false,
        }
    }

    fn write(log: &mut WriteLog<Vec<u8>>, op: u64) {
        let mut asks = Asks::default();
        log.append(NOW, append(op), &mut asks);
        assert!(carry(log, asks).contains(&OpId(op)));
    }

    /// Asks for a mark, and has it written.
    fn mark(log: &mut WriteLog<Vec<u8>>, name: &str) -> Vec<Asked<Vec<u8>>> {
        let mut asks = Asks::default();
        let number = log.mark(1, name, name.as_bytes().to_vec(), &mut asks).unwrap();
        assert_eq!(log.mark_state(1, number), MarkState::Waits);
        assert_eq!(asks.steps, [1]);
        let (mut out, mut asks) = (Vec::new(), Asks::default());
        log.step(NOW, 1, &mut out, &mut asks);
        carry(log, asks);
        assert!(matches!(log.mark_state(1, number), MarkState::Durable(_)));
        let mut asks = Asks::default();
        log.step(NOW, 1, &mut out, &mut asks);
        out
    }

    #[test]
    fn an_epoch_ends_at_what_was_answered_before_its_mark() {
        let mut log = log(Order::Journaled(Cuts::Marks));
        write(&mut log, 1);
        let mut out = Vec::new();
        log.step(NOW, 1, &mut out, &mut Asks::default());
        assert!(out.is_empty(), "no epoch before a mark");
        let out = mark(&mut log, "snapshot");
        let [Asked::Journal { last: 1, pieces, .. }] = &out[..] else { panic!("{out:?}") };
        assert_eq!(pieces.len(), 1);
        assert_eq!(log.status(NOW, 1).unwrap().dirty, 4096);
        assert_eq!((log.last_mark(1), log.stored_mark(1)), (Some("snapshot"), None));
        assert_eq!((log.mark_at(1, 0), log.mark_at(1, 1)), (None, Some("snapshot")));
        log.settle(1, 1);
        assert_eq!(log.stored_mark(1), Some("snapshot"));
    }

    #[test]
    fn no_time_is_left_while_something_waits_for_its_mark_though_an_epoch_was_destaged_just_now() {
        let mut log = log(Order::Journaled(Cuts::Marks));
        let left = |log: &WriteLog<Vec<u8>>| log.status(NOW, 1).unwrap().left;
        write(&mut log, 1);
        mark(&mut log, "first");
        let volume = log.volumes.get_mut(&1).unwrap();
        volume.throttle.destaged(NOW, 1 << 20);
        // It is on its way, and nothing is behind it.
        assert!(left(&log).is_some());
        // What comes now is no part of it.
        write(&mut log, 2);
        assert_eq!(left(&log), None);
        let mut asks = Asks::default();
        log.drain(1, true, &mut asks);
        assert!(left(&log).is_some(), "all of it is to go");
        // Nothing is on its way, and nothing may begin.
        let mut log = super::tests::log(Order::Journaled(Cuts::Marks));
        write(&mut log, 1);
        log.volumes.get_mut(&1).unwrap().throttle.destaged(NOW, 1 << 20);
        assert_eq!(left(&log), None);
    }

    #[test]
    fn who_waits_no_longer_for_a_drain_leaves_another_his() {
        let mut log = log(Order::Journaled(Cuts::Marks));
        write(&mut log, 1);
        let (mut out, mut asks) = (Vec::new(), Asks::default());
        for draining in [true, true, false, false, true, true, false] {
            log.drain(1, draining, &mut asks);
        }
        carry(&mut log, asks);
        let mut asks = Asks::default();
        log.step(NOW, 1, &mut out, &mut asks);
        carry(&mut log, asks);
        log.step(NOW, 1, &mut out, &mut Asks::default());
        assert!(matches!(out[..], [Asked::Journal { last: 1, .. }]), "{out:?}");
    }

    #[test]
    fn marks_alone_go_to_no_journal() {
        let mut log = log(Order::Journaled(Cuts::Flushes));
        let out = mark(&mut log, "nothing");
        assert_eq!(out, [Asked::Flush]);
        assert_eq!(log.status(NOW, 1).unwrap().dirty, 0);
    }

    /// Destaged at the bound alone, so that marks stay in the log behind what the store has.
    #[test]
    fn a_mark_with_nothing_dirty_before_it_is_in_the_store_and_ages_nothing() {
        let mut log = log(Order::Ordered(Grain::Flush));
        let pace = Destage { pace: Pace::AtBound, ..destage(Order::Ordered(Grain::Flush)) };
        log.volumes.get_mut(&1).unwrap().destager = Destager::new(pace, 0);
        log.volumes.get_mut(&1).unwrap().pace = Pace::AtBound;
        assert!(mark(&mut log, "first").is_empty());
        let status = log.status(NOW, 1).unwrap();
        assert_eq!((status.dirty, status.oldest, status.left), (0, None, Some(Nanos::ZERO)));
        assert_eq!(log.stored_mark(1), Some("first"));
        let later = NOW + Nanos::from_secs(100);
        let mut asks = Asks::default();
        log.append(later, append(1), &mut asks);
        for write in std::mem::take(&mut asks.writes) {
            log.written(later, write.number, true, &mut asks);
        }
        carry(&mut log, asks);
        let status = log.status(later, 1).unwrap();
        assert_eq!((status.dirty, status.oldest), (4096, Some(later)));
        assert_eq!(status.left, None, "nothing is destaged before it is asked for");
        mark(&mut log, "second");
        assert_eq!((log.last_mark(1), log.stored_mark(1)), (Some("second"), Some("first")));
        // The store has the write, and the mark behind it.
        log.settle(1, 2);
        let status = log.status(later, 1).unwrap();
        assert_eq!((status.dirty, status.oldest), (0, None));
        assert_eq!(log.stored_mark(1), Some("second"));
    }

    #[test]
    fn a_mark_that_would_come_too_late_is_known_before_it_is_named() {
        let mut log = log(Order::Journaled(Cuts::Marks));
        log.volumes.get_mut(&1).unwrap().destager =
            Destager::new(Destage { most: 8192, ..destage(Order::Journaled(Cuts::Marks)) }, 0);
        (1..=2).for_each(|op| write(&mut log, op));
        assert_eq!(log.status(NOW, 1).unwrap().large_mark, None);
        write(&mut log, 3);
        assert_eq!(log.status(NOW, 1).unwrap().large_mark, Some((3 * 4096, 8192)));
        // Of an epoch that the memory does not hold the same is so.
        log.volumes.get_mut(&1).unwrap().destager =
            Destager::new(destage(Order::Journaled(Cuts::Marks)), 0);
        assert_eq!(log.status(NOW, 1).unwrap().large_mark, None);
        log.memory = super::super::memory::Memory::new(4096);
        assert_eq!(log.status(NOW, 1).unwrap().large_mark, Some((3 * 4096, 4096)));
    }

    #[test]
    fn a_closed_log_takes_no_marks_and_fails_those_that_wait() {
        let mut log = log(Order::Any);
        let mut asks = Asks::default();
        let number = log.mark(1, "late", b"late".to_vec(), &mut asks).unwrap();
        log.close(NOW, "a test", &mut asks);
        assert_eq!(log.mark_state(1, number), MarkState::Failed);
        assert_eq!(log.mark(1, "later", b"later".to_vec(), &mut asks), None);
        assert_eq!(log.mark_state(2, 1), MarkState::Failed);
    }

    /// Steps that the volume takes now.
    fn steps(log: &mut WriteLog<Vec<u8>>, now: Nanos) -> Vec<Asked<Vec<u8>>> {
        let (mut out, mut asks) = (Vec::new(), Asks::default());
        log.step(now, 1, &mut out, &mut asks);
        carry(log, asks);
        out
    }

    /// A volume that holds all that it may, and more: writes wait.
    pub(in super::super) fn full(order: Order) -> WriteLog<Vec<u8>> {
        let mut log = log(order);
        log.volumes.get_mut(&1).unwrap().stated = Some(16 << 10);
        log.divide();
        for op in 1..=8 {
            let mut asks = Asks::default();
            log.append(NOW, append(op), &mut asks);
            carry(&mut log, asks);
        }
        let mut asks = Asks::default();
        log.flush(NOW, 1, OpId(99), &mut asks);
        carry(&mut log, asks);
        log
    }

    #[test]
    fn a_full_log_waits_for_a_mark_or_misses_one_as_it_was_told() {
        let mut waits = full(Order::Journaled(Cuts::Marks));
        assert!(steps(&mut waits, NOW).is_empty());
        let status = waits.status(NOW, 1).unwrap();
        assert!(status.no_mark && status.positions[1] < status.positions[3], "{status:?}");
        // What waits for room is behind what was answered: the mark stands for that, and makes room.
        let mut asks = Asks::default();
        waits.mark(1, "now", b"now".to_vec(), &mut asks).unwrap();
        let out = steps(&mut waits, NOW);
        let [Asked::Journal { last, .. }] = &out[..] else { panic!("{out:?}") };
        assert_eq!(*last, status.positions[1]);
        assert_eq!(waits.status(NOW, 1).unwrap().missed_marks, 0);

        let mut cuts = full(Order::Journaled(Cuts::MarksOrFull));
        let out = steps(&mut cuts, NOW);
        assert!(matches!(&out[..], [Asked::Journal { .. }]), "{out:?}");
        let status = cuts.status(NOW, 1).unwrap();
        assert_eq!((status.missed_marks, status.off_mark), (1, true));
    }

    /// Where nothing comes to the store nothing makes room, and the writes that wait stay where they are.
    #[test]
    fn a_mark_comes_to_the_log_though_writes_wait_at_the_bound() {
        let mut log = full(Order::Ordered(Grain::Flush));
        assert!(!log.waiting.is_empty(), "nothing waits");
        let writes = log.waiting.len();
        for name in ["first", "second"] {
            let mut asks = Asks::default();
            let number = log.mark(1, name, name.as_bytes().to_vec(), &mut asks).unwrap();
            log.follow(NOW, &mut asks);
            carry(&mut log, asks);
            assert!(matches!(log.mark_state(1, number), MarkState::Durable(_)));
            assert_eq!((log.last_mark(1), log.waiting.len()), (Some(name), writes));
        }
        // So many as hold as much again do, and no more.
        let more = (0..100).filter(|_| {
            let mut asks = Asks::default();
            let number = log.mark(1, "more", b"more".to_vec(), &mut asks).unwrap();
            log.follow(NOW, &mut asks);
            carry(&mut log, asks);
            log.mark_state(1, number) != MarkState::Waits
        });
        assert!((1..8).contains(&more.count()));
    }

    #[test]
    fn what_is_half_as_old_as_it_may_be_is_destaged_though_no_flush_came() {
        let mut log = log(Order::Journaled(Cuts::Flushes));
        log.volumes.get_mut(&1).unwrap().age =
            Some(Age { most: Nanos::from_secs(60), hard: false });
        write(&mut log, 1);
        let mut asks = Asks::default();
        log.due(NOW + Nanos::from_millis(60), &mut asks);
        carry(&mut log, asks);
        assert!(steps(&mut log, NOW).is_empty());
        let half = NOW + Nanos::from_secs(30);
        assert_eq!(log.wakes(NOW), Some(half));
        assert!(steps(&mut log, half - Nanos(1)).is_empty());
        let mut asks = Asks::default();
        log.due(half, &mut asks);
        assert_eq!(asks.steps, [1]);
        log.looked(1, half, &mut asks);
        let out = steps(&mut log, half);
        assert!(matches!(&out[..], [Asked::Journal { last: 1, .. }]), "{out:?}");
    }
}
