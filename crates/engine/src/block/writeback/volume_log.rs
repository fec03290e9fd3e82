//! The writes of one volume in the order in which they are acknowledged, from the frontier to the last: which of them are answered,
//! promised, and may be destaged next.
//!
//! A position is a sequence number; it stands for all records up to it. Of one volume
//!
//! ```text
//! frontier ≤ acknowledged ≤ last        frontier: durable in the store; acknowledged: answered and shown
//! promised ≤ acknowledged               promised: covered by a FLUSH or FUA that was answered
//! ```
//!
//! The *dependency* of a record is the position that its client could build on: the acknowledged position when the sequence was assigned
//! (grain `completion`), or the promised one (grain `flush`). It never falls, so the records that depend on nothing behind the
//! frontier are a prefix of those behind it: the next window. Rules in brackets are those of the executable model,
//! `models/write_back.py`.

use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};

use larder_format::block::marker;
use larder_format::block::write_log::{BLOCK, pieces};

use super::overlay::{Dirty, Holds, Overlay, Stretch};
use super::planted::{Fault, Planted};
use super::table::Table;
use super::void::Void;

/// In which order dirty data comes to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Any: nothing is promised of the store alone.
    Any,
    /// The store alone is always an image that may have existed.
    Ordered(Grain),
    /// Store and journal together are always the log up to a cut.
    Journaled(Cuts),
}

impl Order {
    /// As markers and superblocks have it.
    pub fn marked(self) -> marker::Order {
        match self {
            Order::Any => marker::Order::Any,
            Order::Ordered(Grain::Flush) => marker::Order::Flush,
            Order::Ordered(Grain::Completion) => marker::Order::Completion,
            Order::Journaled(Cuts::Flushes | Cuts::Marks | Cuts::MarksOrFull) => {
                marker::Order::Journaled
            }
        }
    }

    /// The order that markers and superblocks have.
    pub fn of_marked(order: marker::Order) -> Order {
        match order {
            marker::Order::Any => Order::Any,
            marker::Order::Flush => Order::Ordered(Grain::Flush),
            marker::Order::Completion => Order::Ordered(Grain::Completion),
            marker::Order::Journaled => Order::Journaled(Cuts::Flushes),
        }
    }
}

/// What of the past a write depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Grain {
    /// What a flush had promised when it was issued: what a disk with a volatile cache may hold.
    #[default]
    Flush,
    /// All that was answered when it was issued: the crash image of a moment.
    Completion,
}

/// Where an epoch may end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cuts {
    /// At a FLUSH, a FUA or a mark; anywhere if none comes.
    #[default]
    Flushes,
    /// At marks alone: where none comes, or none that fits the journal, nothing is destaged.
    Marks,
    /// At marks; anywhere where nothing more can be answered because none comes.
    MarksOrFull,
}

impl Cuts {
    /// Whether it is marks that count.
    pub fn are_marks(self) -> bool {
        self != Cuts::Flushes
    }
}

/// What a record does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Writes bytes.
    Write,
    /// Writes zeros.
    Zero,
    /// Trims.
    Trim,
    /// A consistency point: an epoch may end here. It changes no bytes of the volume; its payload is its name.
    Mark,
}

/// A write as the log has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Logged {
    /// First byte in the volume.
    pub at: u64,
    /// Bytes; of a mark, those of its name.
    pub len: u64,
    /// What it does.
    pub kind: Kind,
    /// The batch that it is in.
    pub batch: u64,
    /// Where its bytes lie in the log's area; of what has none, anything.
    pub place: u64,
}

/// Columns of a record's row.
const LEN: usize = 1;
const BATCH: usize = 2;

impl Logged {
    /// The same in four numbers: those of records that follow each other have most of their bits in common.
    fn row(&self) -> [u64; 4] {
        let Logged { at, len, kind, batch, place } = *self;
        let kind = match kind {
            Kind::Write => 0,
            Kind::Zero => 1,
            Kind::Trim => 2,
            Kind::Mark => 3,
        };
        [at, len << 2 | kind, batch, place]
    }

    fn of([at, len, batch, place]: [u64; 4]) -> Logged {
        let kind = match len & 3 {
            0 => Kind::Write,
            1 => Kind::Zero,
            2 => Kind::Trim,
            _ => Kind::Mark,
        };
        Logged { at, len: len >> 2, kind, batch, place }
    }

    /// What it holds of the log: its payload in whole blocks and what a header has of it, at least 4 KiB, which bounds the memory for small ones too.
    pub fn room(&self) -> u32 {
        let payload = if self.kind == Kind::Write { self.len } else { 0 };
        let header = 64 + pieces::count(payload) * 4;
        (payload.next_multiple_of(BLOCK as u64) + header).max(4096) as u32
    }

    /// What it shows.
    pub fn holds(&self) -> Holds {
        match self.kind {
            Kind::Write | Kind::Mark => Holds::Bytes,
            Kind::Zero => Holds::Zeros,
            Kind::Trim => Holds::Trimmed,
        }
    }

    /// The bytes of the volume that it changes: none of a mark.
    pub fn range(&self) -> Range<u64> {
        match self.kind {
            Kind::Mark => self.at..self.at,
            _ => self.at..self.at + self.len,
        }
    }
}

/// Records that go to the store together: their positions. Between two of them the store is flushed.
pub type Window = RangeInclusive<u64>;

/// The records of one volume. See the [module](self).
#[derive(Debug)]
pub struct VolumeLog {
    order: Order,
    records: Table<4>,
    /// What records depend on: each from this sequence on, to the next.
    depend: Table<2>,
    /// Durable in the store, and known so by the log.
    frontier: u64,
    acknowledged: u64,
    promised: u64,
    /// Positions at which an epoch may end, behind the frontier, in order.
    cuts: Table<1>,
    /// Bytes of the log that are held.
    held: u64,
    /// Records whose bytes cannot be read any more, and what of them shows.
    lost: BTreeSet<u64>,
    shows_lost: Overlay,
    /// What of its records does not count.
    void: Void,
    fault: Fault,
}

impl VolumeLog {
    /// Of a volume whose records up to `frontier` are durable in the store. Sequences go on behind it.
    pub fn new(order: Order, frontier: u64) -> VolumeLog {
        VolumeLog {
            order,
            records: Table::default(),
            depend: Table::default(),
            frontier,
            acknowledged: frontier,
            promised: frontier,
            cuts: Table::default(),
            held: 0,
            lost: BTreeSet::new(),
            shows_lost: Overlay::default(),
            void: Void::default(),
            fault: Fault::default(),
        }
    }

    /// Plants a fault.
    pub fn plant(&mut self, fault: Fault) {
        self.fault = fault;
    }

    /// An operator has given this up of records that there are, or that a start will find.
    pub fn set_void(&mut self, void: Void) {
        self.void = void;
    }

    /// What of its records does not count.
    pub fn void(&self) -> &Void {
        &self.void
    }

    /// What counts of a record of these bytes.
    pub fn counts(&self, sequence: u64, range: Range<u64>) -> Range<u64> {
        self.void.counts(sequence, range)
    }

    /// Records whose bytes cannot be read any more, and that were not given up.
    pub fn lost(&self) -> impl Iterator<Item = u64> {
        self.lost.iter().copied()
    }

    /// These of its records that cannot be read are given up as a whole: `overlay` shows what they were written over. Each record before the last of them is
    /// looked at once.
    pub fn give_up(&mut self, sequences: &[u64], overlay: &mut Overlay) {
        let mut holes: Vec<(Range<u64>, u64)> = Vec::new();
        let mut given = Vec::with_capacity(sequences.len());
        for &sequence in sequences {
            // (What could be read meanwhile stays.)
            let Some(logged) = self.record(sequence).filter(|_| self.lost.remove(&sequence)) else {
                continue;
            };
            let range = self.counts(sequence, logged.range());
            stretches_of(overlay, &range, sequence, |stretch| holes.push((stretch, sequence)));
            overlay.settle(range.clone(), sequence);
            self.shows_lost.settle(range, sequence);
            given.push(sequence);
        }
        self.void = self.void.with(given, None);
        holes.sort_unstable_by_key(|(hole, _)| hole.start);
        let last = holes.iter().map(|(_, of)| *of).max().unwrap_or(0);
        for sequence in self.frontier + 1..last {
            let Some(logged) = self.record(sequence) else { continue };
            let range = self.counts(sequence, logged.range());
            let first = holes.partition_point(|(hole, _)| hole.end <= range.start);
            let within = holes[first..].iter().take_while(|(hole, _)| hole.start < range.end);
            for (hole, _) in within.filter(|(_, of)| sequence < *of) {
                let both = hole.start.max(range.start)..hole.end.min(range.end);
                overlay.show(both.clone(), sequence, self.holds(&logged, sequence));
                self.shows(both, sequence);
            }
        }
    }

    /// What its records show that are answered, as if they came again.
    pub fn shown(&self) -> Overlay {
        Overlay::of_records(self.frontier + 1..=self.acknowledged, |sequence| {
            let logged = self.record(sequence)?;
            Some((self.counts(sequence, logged.range()), self.holds(&logged, sequence)))
        })
    }

    /// What the record of this sequence shows.
    fn holds(&self, logged: &Logged, sequence: u64) -> Holds {
        if self.lost.contains(&sequence) { Holds::Unreadable } else { logged.holds() }
    }

    /// All records up to here are durable in the store.
    pub fn frontier(&self) -> u64 {
        self.frontier
    }

    /// All records up to here are answered.
    pub fn acknowledged(&self) -> u64 {
        self.acknowledged
    }

    /// All records up to here are covered by a FLUSH or FUA that was answered.
    pub fn promised(&self) -> u64 {
        self.promised
    }

    /// The last sequence that was assigned.
    pub fn last(&self) -> u64 {
        self.frontier + self.records.len() as u64
    }

    /// Bytes of the log that its records hold.
    pub fn held(&self) -> u64 {
        self.held
    }

    /// Whether nothing is dirty.
    pub fn is_clean(&self) -> bool {
        self.records.is_empty()
    }

    /// The record of this sequence, if it is behind the frontier.
    pub fn record(&self, sequence: u64) -> Option<Logged> {
        let at = sequence.checked_sub(self.frontier + 1)?;
        self.records.get(at as usize).map(Logged::of)
    }

    /// What the record of this sequence depends on, if it is behind the frontier.
    pub fn dependency(&self, sequence: u64) -> Option<u64> {
        let there = sequence > self.frontier && sequence <= self.last();
        let at = self.depend.below(0, sequence.saturating_add(1));
        self.depend.column(at.checked_sub(1)?, 1).filter(|_| there)
    }

    /// The record of this sequence lies elsewhere in the log, in no batch of the chain: it is durable there.
    pub fn moved(&mut self, sequence: u64, place: u64) {
        if let Some(logged) = self.record(sequence) {
            let row = Logged { place, batch: 0, ..logged }.row();
            self.records.set((sequence - self.frontier - 1) as usize, row);
        }
    }

    /// The bytes of these records cannot be read any more, and what they still show in `overlay` neither.
    pub fn lose(&mut self, sequences: impl IntoIterator<Item = u64>, overlay: &mut Overlay) {
        for sequence in sequences {
            let write = self.record(sequence).filter(|logged| logged.kind == Kind::Write);
            let Some(logged) = write.filter(|_| !self.void.has(sequence)) else { continue };
            if !self.lost.insert(sequence) {
                continue;
            }
            let range = self.counts(sequence, logged.range());
            overlay.lose(range.clone(), sequence);
            let lost = &mut self.shows_lost;
            let show = |stretch| lost.show(stretch, sequence, Holds::Unreadable);
            stretches_of(overlay, &range, sequence, show);
        }
    }

    /// The bytes of this record can be read after all. Returns whether they could not.
    pub fn find(&mut self, sequence: u64, overlay: &mut Overlay) -> bool {
        let was = self.lost.remove(&sequence);
        if let Some(logged) = self.record(sequence).filter(|_| was) {
            overlay.find(logged.range(), sequence);
            self.shows_lost.settle(logged.range(), sequence);
        }
        was
    }

    /// This record shows here.
    fn shows(&mut self, range: Range<u64>, sequence: u64) {
        match self.lost.contains(&sequence) {
            true => self.shows_lost.show(range, sequence, Holds::Unreadable),
            false => self.shows_lost.discard(range),
        }
    }

    /// Rows that were looked at so far.
    #[cfg(test)]
    pub fn looks(&self) -> u64 {
        self.records.looks.get()
    }

    /// Bytes of what is answered that cannot be read any more.
    pub fn unreadable_bytes(&self) -> u64 {
        self.shows_lost.bytes()
    }

    /// A write gets the next sequence (the first of the pair), and its dependency as of now [depnow]: what had been answered on any
    /// connection [global], or promised.
    ///
    /// A mark of a journaled volume depends on what it stands for (`covers`): what had been answered when it was asked for.
    pub fn assign(
        &mut self,
        logged: Logged,
        covers: Option<u64>,
        overlay: &mut Overlay,
    ) -> (u64, u64) {
        let dependency = match self.order {
            // The position that it stands for, as its caller has said.
            Order::Journaled(_) if logged.kind == Kind::Mark => covers.unwrap_or(self.acknowledged),
            Order::Ordered(_) if self.fault.is(Planted::DependencyStale) => {
                self.dependency(self.last()).unwrap_or(self.frontier)
            }
            Order::Ordered(Grain::Completion) => self.acknowledged,
            Order::Ordered(Grain::Flush) => self.promised,
            Order::Any | Order::Journaled(_) => self.frontier,
        };
        let sequence = self.push(logged, dependency);
        if self.fault.is(Planted::ShownBeforeAnswered) {
            overlay.show(logged.range(), sequence, logged.holds());
        }
        (sequence, dependency)
    }

    fn push(&mut self, logged: Logged, dependency: u64) -> u64 {
        self.held += u64::from(logged.room());
        self.records.push(logged.row());
        let last = self.last();
        if self.depend.last().is_none_or(|[_, on]| on != dependency) {
            self.depend.push([last, dependency]);
        }
        last
    }

    /// The next record to be answered, if its batch and all before it are written [ackorder]: `written` is the last such batch.
    pub fn answerable(&self, written: u64) -> Option<Logged> {
        let next = self.record(self.acknowledged + 1);
        next.filter(|logged| logged.batch <= written || self.fault.is(Planted::AnsweredOutOfOrder))
    }

    /// The next record is answered: it shows from now on [visible], and the position rises.
    pub fn answer(&mut self, overlay: &mut Overlay) -> Option<Logged> {
        let sequence = self.acknowledged + 1;
        let logged = self.record(sequence)?;
        let range = self.counts(sequence, logged.range());
        if !self.fault.is(Planted::ShownBeforeAnswered) {
            overlay.show(range.clone(), sequence, self.holds(&logged, sequence));
        }
        if !self.lost.is_empty() {
            self.shows(range, sequence);
        }
        self.acknowledged = sequence;
        Some(logged)
    }

    /// The last batch that a FLUSH of all up to `position` needs durable; `None` where nothing of it is behind the frontier.
    pub fn batch_of(&self, position: u64) -> Option<u64> {
        self.record(position.min(self.last())).map(|logged| logged.batch)
    }

    /// A FLUSH or FUA of all up to `position` is about to be answered: they are durable. An epoch may end there.
    pub fn promise(&mut self, position: u64) {
        self.promised = self.promised.max(position);
        if self.order == Order::Journaled(Cuts::Flushes) {
            self.cut(position);
        }
    }

    /// The position that the mark of this sequence stands for: all up to it is its image. Where epochs may end at it that is what had been
    /// answered when it was asked for, since what waits for room in the log may be behind it; elsewhere its own.
    pub fn covers(&self, sequence: u64) -> u64 {
        match self.order {
            Order::Journaled(_) => self.dependency(sequence).unwrap_or(sequence),
            _ => sequence,
        }
    }

    /// Whether an epoch may end at this position.
    pub fn is_cut(&self, position: u64) -> bool {
        // Marks change no bytes.
        let from = (self.frontier..=position).rev().find(|&at| !self.is_mark(at));
        let from = from.unwrap_or(position);
        let next = self.cuts.column(self.cuts.below(0, from), 0);
        from <= self.frontier || next.is_some_and(|cut| cut <= position)
    }

    /// Whether the record of this sequence is a mark: it changes no bytes.
    pub fn is_mark(&self, sequence: u64) -> bool {
        self.record(sequence).is_some_and(|logged| logged.kind == Kind::Mark)
    }

    /// A consistency point: an epoch may end here.
    pub fn mark(&mut self, position: u64) {
        if matches!(self.order, Order::Journaled(_)) {
            self.cut(position);
        }
    }

    fn cut(&mut self, position: u64) {
        let at = self.cuts.below(0, position);
        if position > self.frontier && self.cuts.column(at, 0) != Some(position) {
            self.cuts.insert(at, [position]);
        }
    }

    /// The last position up to which all records are in batches up to `durable` [wal], and answered.
    fn durable(&self, durable: u64) -> u64 {
        // Batches rise with the sequence.
        let durable =
            if self.fault.is(Planted::DestagedBeforeDurable) { u64::MAX } else { durable };
        let n = self.records.below(BATCH, durable.saturating_add(1));
        (self.frontier + n as u64).min(self.acknowledged)
    }

    /// The records that may go to the store next; `durable` is the last batch known durable. An `any` window ends at `most` bytes; an
    /// epoch takes the last cut that fits into `most` bytes, with the marks behind it, and where none does and it is `pressed`, as much as fits.
    ///
    /// Unless it `skips` what cannot be read, it ends before such a record, if it has no later versions of all of that. Where the first is one, a window
    /// goes on until it has them: nothing else can come to the store before. An epoch has them or does not, since it ends at a cut.
    pub fn next(&self, durable: u64, most: u64, pressed: bool, skips: bool) -> Option<Window> {
        let mut top = self.durable(durable);
        loop {
            let window = self.next_up_to(top, most, pressed)?;
            if skips {
                return Some(window);
            }
            let Some(first) = self.first_lost(&window) else { return Some(window) };
            if first == self.frontier + 1 {
                return self.replaced(self.durable(durable));
            }
            top = first - 1;
        }
    }

    /// The first record of a window whose bytes cannot be read, and are not hidden by others of it.
    fn first_lost(&self, window: &Window) -> Option<u64> {
        self.lost.range(window.clone()).next()?;
        let writes = self.writes(window);
        writes.iter().filter(|d| d.holds == Holds::Unreadable).map(|d| d.sequence).min()
    }

    /// The shortest window that has later versions of all that cannot be read in it.
    fn replaced(&self, top: u64) -> Option<Window> {
        let first = self.frontier + 1;
        let range = self.counts(first, self.record(first)?.range());
        if matches!(self.order, Order::Journaled(_)) || self.shows_lost.touches(&range) {
            return None;
        }
        let mut left = Overlay::default();
        for sequence in first..=top {
            let range = self.counts(sequence, self.record(sequence)?.range());
            match self.lost.contains(&sequence) {
                true => left.show(range, sequence, Holds::Unreadable),
                false => left.discard(range),
            }
            if left.bytes() == 0 {
                return Some(first..=sequence);
            }
        }
        None
    }

    fn next_up_to(&self, top: u64, most: u64, pressed: bool) -> Option<Window> {
        let first = self.frontier + 1;
        let fits = self.fits(most).min(top);
        let end = match self.order {
            Order::Any => fits,
            // All of it: a window that ends early is two, and right as well.
            Order::Ordered(_) => {
                let ignored = self.fault.is(Planted::DependencyIgnored);
                let on = if ignored { u64::MAX } else { self.frontier + 1 };
                let after = self.depend.column(self.depend.below(1, on), 0);
                fits.min(after.map_or(u64::MAX, |first| first - 1))
            }
            Order::Journaled(_) if self.fault.is(Planted::CutAnywhere) => fits,
            Order::Journaled(_) => {
                let n = self.cuts.below(0, fits + 1);
                let cut = n.checked_sub(1).and_then(|n| self.cuts.column(n, 0));
                let end = self.over_marks(cut.unwrap_or(self.frontier), fits);
                match end >= first {
                    true => end,
                    false if pressed => fits,
                    false => return None,
                }
            }
        };
        (end >= first).then_some(first..=end)
    }

    /// Bytes of the records up to the first place where an epoch may end (where there is none, up to where a mark would be that is named now), if they
    /// are more than `most`: it never ends there.
    pub fn too_large(&self, most: u64) -> Option<u64> {
        let cut = self.cuts.column(self.cuts.below(0, self.frontier + 1), 0);
        let cut = cut.unwrap_or(self.acknowledged);
        let bytes: u64 = (0..(cut - self.frontier) as usize).filter_map(|at| self.bytes(at)).sum();
        (bytes > most).then_some(bytes)
    }

    /// How far the image of a store goes that has all up to this position: over the marks behind it that are durable, as all up to the batch `durable` are.
    pub fn stands_for(&self, position: u64, durable: u64) -> u64 {
        self.over_marks(position, self.durable(durable))
    }

    /// Where the marks behind this position end, or what may be destaged.
    fn over_marks(&self, position: u64, top: u64) -> u64 {
        (position + 1..=top).take_while(|&at| self.is_mark(at)).last().unwrap_or(position)
    }

    /// The last position such that the records up to it have at most so many bytes; at least the first.
    fn fits(&self, most: u64) -> u64 {
        let mut bytes = 0;
        let within = (0..self.records.len()).take_while(|&at| {
            bytes += self.bytes(at).unwrap_or(0);
            at == 0 || bytes <= most
        });
        self.frontier + within.count() as u64
    }

    /// Bytes of the record at this place.
    fn bytes(&self, at: usize) -> Option<u64> {
        self.records.column(at, LEN).map(|len| len >> 2)
    }

    /// What the store is told of a window, in the order of the volume: of each byte the last version [coalesce].
    pub fn writes(&self, window: &Window) -> Vec<Dirty> {
        let mut versions = Overlay::default();
        let trims_first = self.fault.is(Planted::TrimOvertakes);
        for sequence in window.clone() {
            let Some(logged) = self.record(sequence) else { continue };
            let range = self.counts(sequence, logged.range());
            if !(trims_first && logged.kind == Kind::Trim) {
                versions.show(range, sequence, self.holds(&logged, sequence));
            }
        }
        self.misplace(window, &mut versions);
        let mut writes = Vec::with_capacity(versions.extents());
        versions.look(0..u64::MAX, |stretch| {
            if let Stretch::Dirty(dirty) = stretch {
                writes.push(dirty);
            }
        });
        writes
    }

    /// What faults make of the versions of a window.
    fn misplace(&self, window: &Window, versions: &mut Overlay) {
        if self.fault.is(Planted::CoalescedAcross) {
            let later = (window.end() + 1..=self.acknowledged).filter_map(|at| self.record(at));
            later.for_each(|logged| versions.discard(logged.range()));
        }
        if self.fault.is(Planted::TrimOvertakes) {
            // Those that are behind the window too go before its writes, which then hide them.
            for sequence in *window.start()..=self.acknowledged {
                let trim = self.record(sequence).filter(|logged| logged.kind == Kind::Trim);
                let Some(range) = trim.map(|logged| self.counts(sequence, logged.range())) else {
                    continue;
                };
                let mut free = Vec::new();
                versions.look(range, |stretch| match stretch {
                    Stretch::Clean(at, len) => free.push(at..at + len),
                    Stretch::Dirty(_) => {}
                });
                free.into_iter().for_each(|free| versions.show(free, sequence, Holds::Trimmed));
            }
        }
    }

    /// The store has all records up to `position` durably, and the log knows it durably [free, frontier]: they are let go one by one, and
    /// are not shown any more.
    pub fn let_go(
        &mut self,
        position: u64,
        overlay: &mut Overlay,
        mut each: impl FnMut(u64, Logged),
    ) {
        while self.frontier < position {
            let Some(logged) = self.records.pop().map(Logged::of) else { return };
            self.frontier += 1;
            self.held -= u64::from(logged.room());
            overlay.settle(logged.range(), self.frontier);
            if self.lost.remove(&self.frontier) {
                self.shows_lost.settle(logged.range(), self.frontier);
            }
            each(self.frontier, logged);
        }
        self.void.let_go(self.frontier);
        while self.cuts.first().is_some_and(|[cut]| cut <= self.frontier) {
            self.cuts.pop();
        }
        while self.depend.column(1, 0).is_some_and(|first| first <= self.frontier + 1) {
            self.depend.pop();
        }
        if self.records.is_empty() {
            self.depend.clear();
        }
    }

    /// A record that was in the log at a start comes again, in its order and with the dependency that it had: answered, since it may have
    /// been.
    pub fn recover(&mut self, logged: Logged, dependency: u64, overlay: &mut Overlay) {
        let sequence = self.recover_unshown(logged, dependency);
        let range = self.counts(sequence, logged.at..logged.at + logged.len);
        overlay.show(range, sequence, logged.holds());
    }

    /// The same, where many are shown at once ([`VolumeLog::shown`]): its sequence.
    pub fn recover_unshown(&mut self, logged: Logged, dependency: u64) -> u64 {
        let forgotten = self.fault.is(Planted::DependencyForgotten);
        self.acknowledged = self.push(logged, if forgotten { self.frontier } else { dependency });
        if logged.kind == Kind::Mark {
            self.mark(self.covers(self.acknowledged));
        }
        self.acknowledged
    }

    /// So many records come at once.
    pub fn reserve(&mut self, records: usize) {
        self.records.reserve(records);
    }

    /// All that was recovered is durable: it counts as promised, whatever it was [startflush].
    pub fn recovered(&mut self) {
        let last = self.last();
        if last > self.frontier {
            self.promise(last);
        }
    }
}

/// Where a record shows in a range.
fn stretches_of(
    overlay: &Overlay,
    range: &Range<u64>,
    sequence: u64,
    mut each: impl FnMut(Range<u64>),
) {
    overlay.look(range.clone(), |stretch| match stretch {
        Stretch::Dirty(dirty) if dirty.sequence == sequence => each(dirty.at..dirty.at + dirty.len),
        _ => {}
    });
}
