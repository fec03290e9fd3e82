//! Batches: what waits becomes one write of the device, numbered, with its header.

use std::collections::{BTreeMap, VecDeque};

use larder_base::Nanos;
use larder_format::block::write_log::batch::{Head, encode_header_of};
use larder_format::block::write_log::{
    BLOCK, Flags, Frontier, Kind as RecordKind, Record, SegmentHeader, Shape, VolumeFrontier,
    footer, pieces,
};

use super::super::segments::{Placed, Purpose, Size};
use super::super::volume_log::{Kind, Logged, VolumeLog};
use super::footers::Writing;
use super::{Append, Asks, Attached, Config, Flushing, Pending, Start, WriteLog};

/// A batch to be written at once, as it is: `head`, then each payload where it belongs, zeros between and behind them.
#[derive(Clone, Debug)]
pub struct ToWrite<B> {
    /// The batch: what its end is told with.
    pub number: u64,
    /// First byte on the device.
    pub at: u64,
    /// Bytes in all: whole sectors.
    pub len: u32,
    /// The first bytes.
    pub head: Vec<u8>,
    /// Payloads, each with how many bytes come before it.
    pub payload: Vec<(u32, B)>,
}

impl Config {
    /// How large a batch of this shape is.
    pub(super) fn size(&self, shape: Shape) -> Size {
        Size { bytes: shape.bytes(self.geometry.sector()), footer: footer::of_batch(shape) }
    }
}

impl<B> Append<B> {
    fn logged(&self, batch: u64, place: u64) -> Logged {
        Logged { at: self.at, len: self.len, kind: self.kind, batch, place }
    }

    fn record(&self, generation: u64) -> Record {
        let kind = match self.kind {
            Kind::Write => RecordKind::Write,
            Kind::Zero => RecordKind::Zero,
            Kind::Trim => RecordKind::Trim,
            Kind::Mark => RecordKind::Mark,
        };
        let may_punch = self.may_punch && matches!(self.kind, Kind::Zero | Kind::Trim);
        Record {
            attachment: self.attachment,
            generation,
            // Given when it has its place.
            sequence: 1,
            dependency: 0,
            offset: self.at,
            length: self.len,
            kind,
            flags: Flags { fua: self.fua, may_punch, unreadable: false },
        }
    }
}

impl<B: Clone> WriteLog<B> {
    /// As long as fewer batches are under way than may be, all that waits becomes one more. What the log is to know rides along.
    pub(super) fn form(&mut self, now: Nanos, asks: &mut Asks<B>) {
        while self.closed.is_none() && self.writing.len() < self.config.depth as usize {
            self.full = false;
            if !(self.form_clients(now, asks) || self.form_frontier(now, asks)) {
                break;
            }
        }
        if self.full {
            // Room is wanted from all, also from those whose time has not come.
            let durable = self.segments.durable();
            let begin = self.volumes.iter().filter(|(_, volume)| volume.may_begin(durable));
            asks.steps.extend(begin.map(|(&attachment, _)| attachment));
            asks.steps.extend(self.parks(now));
        }
    }

    fn form_clients(&mut self, now: Nanos, asks: &mut Asks<B>) -> bool {
        if self.start != Start::Started || self.kept.is_full() {
            return false;
        }
        let table = Record::frontier(self.frontier().bytes());
        let Some(mut with) = Shape::default().with(&table) else { return false };
        let segment = self.config.segments();
        let (mut records, mut chosen) = (Vec::new(), Vec::new());
        // What comes of each volume, and whether no more of it does.
        let mut planned: BTreeMap<u32, (u64, bool)> = BTreeMap::new();
        for (at, append) in self.waiting.iter().enumerate() {
            let volume = self.volumes.get(&append.attachment);
            let generation = volume.map_or(0, |v| v.generation);
            let record = append.record(generation);
            // Others do not wait for a volume that holds too much, nor do its marks.
            let is_mark = append.kind == Kind::Mark;
            let (more, waits) = planned.entry(append.attachment).or_default();
            if volume.is_some_and(|v| v.holds_all(*more, is_mark)) || *waits && !is_mark {
                *waits |= !is_mark;
                continue;
            }
            // No more than a batch may have, and a segment.
            let shape = with.with(&record).filter(|&shape| segment.fits(self.config.size(shape)));
            let Some(shape) = shape else { break };
            *more = more.saturating_add(append.logged(0, 0).room().into());
            with = shape;
            records.push(record);
            chosen.push(at);
        }
        let Some(alone) = Shape::of(&records).filter(|_| !records.is_empty()) else { return false };
        let tells = self.tells();
        let bytes = if tells { with } else { alone };
        let count = records.len() as u32;
        let place = (self.config.size(bytes), self.config.size(with));
        let placed = self.segments.place(Purpose::Clients, place.0, place.1, count);
        self.full |= placed.is_none();
        let Some(placed) = placed else { return false };
        let tells = tells || placed.opens;
        let header = if tells { with } else { alone }.header_bytes();
        let first = self.first(&placed) + u64::from(header);
        let mut sums = Vec::new();
        let mut payload = Vec::new();
        let mut table = None;
        if tells {
            table = Some(self.say(placed.number));
        }
        let mut end = table.as_ref().map_or(0, |table| table.len() as u64);
        let mut chosen = self.take(&chosen);
        for record in &mut records {
            let Some(append) = chosen.pop_front() else { break };
            let Some(volume) = self.volumes.get_mut(&append.attachment) else { continue };
            let bytes = record.payload_bytes();
            let from = if bytes == 0 { end } else { end.next_multiple_of(BLOCK as u64) };
            let logged = append.logged(placed.number, first + from - self.config.at);
            let covers = (append.kind == Kind::Mark).then(|| volume.marks.next()).flatten();
            (record.sequence, record.dependency) =
                volume.log.assign(logged, covers, &mut volume.overlay);
            if append.kind == Kind::Mark {
                let (sequence, batch) = (record.sequence, placed.number);
                let position = volume.log.covers(sequence);
                volume.marks.formed(sequence, position, batch);
                let (op, attachment, position) =
                    (append.op, append.attachment, position.min(volume.log.acknowledged()));
                self.flushes.push(Flushing { op, attachment, position, batch });
                self.flush_wanted = true;
            }
            volume.pending.push_back(Pending { op: Some(append.op), fua: append.fua });
            sums.extend_from_slice(append.sums.as_slice());
            let has_bytes = matches!(append.kind, Kind::Write | Kind::Mark);
            volume.sums.push(has_bytes.then_some(&append.sums));
            if let Some(bytes) = append.bytes {
                let of = (append.attachment, record.sequence);
                self.kept.keep(placed.number, of, append.len, bytes.clone());
                payload.push((from as u32, bytes));
            }
            end = end.max(from + bytes);
        }
        self.write(now, &placed, table, records, (sums, payload), asks);
        true
    }

    /// These of what waits, ascending.
    fn take(&mut self, chosen: &[usize]) -> VecDeque<Append<B>> {
        if chosen.last().is_some_and(|last| last + 1 == chosen.len()) {
            return self.waiting.drain(..chosen.len()).collect();
        }
        let (mut taken, mut left) = (VecDeque::new(), VecDeque::new());
        let mut next = chosen.iter().copied().peekable();
        for (at, append) in self.waiting.drain(..).enumerate() {
            match next.next_if_eq(&at) {
                Some(_) => taken.push_back(append),
                None => left.push_back(append),
            }
        }
        self.waiting = left;
        taken
    }

    /// A batch of a FRONTIER alone, where one is wanted and rides on no other.
    fn form_frontier(&mut self, now: Nanos, asks: &mut Asks<B>) -> bool {
        let first = self.start == Start::Wanted;
        let tells = self.tells() && self.start == Start::Started;
        let wanted = first || tells || self.full && self.segments.would_free();
        if !wanted {
            return false;
        }
        let table = Record::frontier(self.frontier().bytes());
        let Some(shape) = Shape::default().with(&table) else { return false };
        let size = self.config.size(shape);
        let purpose = if first || self.releases() { Purpose::Release } else { Purpose::Frontier };
        let placed = self.segments.place(purpose, size, size, 0);
        self.full |= placed.is_none();
        let Some(placed) = placed else { return false };
        if first {
            self.start = Start::Begun(placed.number);
        }
        let table = self.say(placed.number);
        self.write(now, &placed, Some(table), Vec::new(), (Vec::new(), Vec::new()), asks);
        true
    }

    /// A FRONTIER would let go of a record in the oldest segment.
    fn releases(&self) -> bool {
        let last = self.segments.last_of_oldest();
        let holds =
            |log: &VolumeLog| log.record(log.frontier() + 1).is_some_and(|r| r.batch <= last);
        self.volumes.values().any(|v| v.untold && v.stored > v.log.frontier() && holds(&v.log))
    }

    /// Some volume's window waits until the log knows that its store has it.
    fn tells(&self) -> bool {
        self.volumes.values().any(|volume| volume.untold)
    }

    /// First byte on the device of a batch that has its place.
    pub(super) fn first(&self, placed: &Placed) -> u64 {
        let geometry = self.config.geometry;
        let segment = u64::from(placed.segment) * u64::from(geometry.bytes());
        self.config.at + segment + u64::from(geometry.sector() + placed.at)
    }

    /// What a FRONTIER says now.
    fn frontier(&self) -> Frontier {
        let oldest = self.segments.oldest();
        let volume = |(&attachment, volume): (&u32, &Attached)| VolumeFrontier {
            attachment,
            frontier: volume.stored,
            last: volume.log.last(),
            marker: volume.marker,
            unreadable: volume.unreadable().listed(),
        };
        Frontier {
            oldest_generation: oldest.generation,
            oldest_batch: oldest.batch,
            volumes: self.volumes.iter().map(volume).collect(),
        }
    }

    /// The batch of this number says how far all are: the table, and from now on it is waited for.
    fn say(&mut self, batch: u64) -> Vec<u8> {
        let table = self.frontier().encode();
        self.segments.says(batch);
        for volume in self.volumes.values_mut().filter(|volume| volume.untold) {
            volume.untold = false;
            volume.noting = Some(batch);
        }
        self.flush_wanted = true;
        table
    }

    /// The batch leaves.
    fn write(
        &mut self,
        now: Nanos,
        placed: &Placed,
        table: Option<Vec<u8>>,
        mut records: Vec<Record>,
        (mut sums, mut payload): (Vec<u32>, Vec<(u32, B)>),
        asks: &mut Asks<B>,
    ) {
        let geometry = self.config.geometry;
        let sector = geometry.sector();
        if let Some(table) = &table {
            records.insert(0, Record::frontier(table.len()));
            sums.splice(0..0, pieces::sums(table));
        }
        let time = self.config.wall + now.0;
        let mut head = Vec::new();
        let mut at = self.first(placed);
        if placed.at == 0 {
            head.resize(sector as usize, 0);
            SegmentHeader {
                cache: self.config.cache,
                generation: placed.generation,
                first: placed.number,
                run: self.config.run,
                time,
                geometry,
                parked: None,
            }
            .encode(&mut head);
            at -= u64::from(sector);
        }
        let before = head.len();
        // It was seen to be one when the batch was placed.
        let shape = Shape::of(&records).unwrap_or_default();
        head.resize(before + shape.header_bytes() as usize, 0);
        let batch = encode_header_of(
            &mut head[before..],
            &Head {
                cache: self.config.cache,
                generation: placed.generation,
                at: sector + placed.at,
                parked: 0,
                number: placed.number,
                run: self.config.run,
                before: self.before,
                known: placed.known,
                time,
            },
            records,
            sums,
        );
        self.before = batch.hash;
        let Placed { segment, generation, .. } = *placed;
        self.footers.add(Writing { segment, generation, parked: 0 }, batch);
        let behind = head.len() as u32;
        payload.iter_mut().for_each(|(from, _)| *from += behind);
        head.extend(table.into_iter().flatten());
        let len = before as u32 + shape.bytes(sector);
        let write = ToWrite { number: placed.number, at, len, head, payload };
        self.writing.insert(placed.number, (write.clone(), 0));
        asks.writes.push(write);
        self.seal(asks);
    }
}
