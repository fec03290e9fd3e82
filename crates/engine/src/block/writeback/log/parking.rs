//! Parking: what one volume still holds of the oldest segment while others need room is copied to a segment of its own, whatever the cause
//! (its store is away, or has no room, or may not have it yet). So one stuck store does not fill the log for all.
//!
//! The copy is durable before the original is let go [parked], and keeps its sequences and checksums: a start puts both together. What cannot be
//! read any more is parked without payload, and fails as before [parkbad].

use larder_base::Nanos;
use larder_format::block::write_log::batch::{Head, encode_header_of};
use larder_format::block::write_log::record::MAX_RECORDS;
use larder_format::block::write_log::{
    BLOCK, Flags, Kind as RecordKind, Parked as ParkedFor, Record, SegmentHeader, Shape, pieces,
};

use super::super::overlay::Dirty;
use super::super::planted::Planted;
use super::super::segments::Placed;
use super::super::volume_log::Kind;
use super::footers::Writing;
use super::{Asks, Piece, ToWrite, WriteLog, pin, unpin};

/// Numbers of parked batches have this bit, where one is told from a batch of the chain.
const PARKED: u64 = 1 << 63;
/// So often, one after the other, reads of a record for a copy may fail before it counts as lost,
const PARK_TRIES: u32 = 10;
/// and so long it is waited between two.
const PARK_PAUSE: Nanos = Nanos::from_secs(1);
/// Most bytes that are copied at a time.
pub(super) const MOST: u64 = 512 << 10;

/// A record that is to be copied, and where it lies; `None` of one without payload, or that cannot be read.
pub type Parks = Vec<(u64, Option<Piece>)>;

/// What is being parked.
#[derive(Debug)]
pub(super) struct Parking {
    attachment: u32,
    /// What is copied, and where its payload will be.
    records: Vec<(u64, u64, bool)>,
    generation: u64,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
enum State {
    /// Nothing is copied: what counts as lost is read again.
    Rereading,
    /// The originals are read.
    Reading,
    /// The copy is written.
    Writing,
    /// It is; a flush is to begin.
    Written,
    /// And has begun.
    Flushing,
}

impl Parking {
    /// Nothing is copied: what counts as lost of a volume is read again.
    pub(super) fn rereads(attachment: u32) -> Parking {
        Parking { attachment, records: Vec::new(), generation: 0, state: State::Rereading }
    }
}

impl<B: Clone> WriteLog<B> {
    /// Which volume is to park something now.
    pub(super) fn parks(&self, now: Nanos) -> Option<u32> {
        // The last free segment is for the FRONTIER that frees others.
        let room = self.segments.free() > 1;
        if self.parking.is_some()
            || now < self.park_after
            || self.closed.is_some()
            || self.waiting.is_empty() && !self.full
            || !room
        {
            return None;
        }
        let batches = self.segments.to_park()?;
        let holds = |volume: &super::Attached| {
            let first = volume.log.record(volume.log.frontier() + volume.parked.len() as u64 + 1);
            first.is_some_and(|logged| batches.contains(&logged.batch))
        };
        self.volumes.iter().find(|(_, volume)| holds(volume)).map(|(&attachment, _)| attachment)
    }

    /// Begins to park what a volume holds of the oldest segment: what is to be read for it.
    pub(super) fn park(&mut self, now: Nanos, attachment: u32) -> Option<Parks> {
        if self.parks(now) != Some(attachment) {
            return None;
        }
        let batches = self.segments.to_park()?;
        let volume = self.volumes.get(&attachment)?;
        let first = volume.log.frontier() + volume.parked.len() as u64 + 1;
        let (mut parks, mut bytes) = (Parks::new(), 0);
        for sequence in first.. {
            let Some(logged) = volume.log.record(sequence) else { break };
            let full = bytes + logged.len > MOST || parks.len() as u32 + 1 >= MAX_RECORDS;
            if !batches.contains(&logged.batch) || (full && !parks.is_empty()) {
                break;
            }
            let dirty = Dirty { at: logged.at, len: logged.len, sequence, holds: logged.holds() };
            let piece = match logged.kind {
                Kind::Write | Kind::Mark => {
                    bytes += logged.len;
                    volume.piece(&self.config, &dirty)
                }
                Kind::Zero | Kind::Trim => None,
            };
            parks.push((sequence, piece));
        }
        if parks.is_empty() {
            return None;
        }
        for (_, piece) in &parks {
            if let Some(piece) = piece {
                pin(&mut self.segments, piece.pin);
            }
        }
        let (records, state) = (Vec::new(), State::Reading);
        self.parking = Some(Parking { attachment, records, generation: 0, state });
        Some(parks)
    }

    /// What [`Asked::Park`](super::Asked::Park) wanted was read: of each its bytes, if they could be read. Its pieces are unpinned.
    pub fn parked(
        &mut self,
        now: Nanos,
        attachment: u32,
        read: Vec<(u64, Option<Piece>, Option<B>)>,
        asks: &mut Asks<B>,
    ) {
        for (_, piece, _) in &read {
            if let Some(piece) = piece {
                unpin(&mut self.segments, piece.pin);
            }
        }
        if self.closed.is_some() {
            return;
        }
        if self.parking.take_if(|parking| parking.state == State::Rereading).is_some() {
            self.was_reread(attachment, &read, asks);
            return self.form(now, asks);
        }
        // What could not be read may be read later: only what fails again and again is parked as lost.
        let failed = |(_, piece, bytes): &(u64, Option<Piece>, Option<B>)| {
            piece.is_some() && bytes.is_none()
        };
        let mut again = false;
        for one in &read {
            let record = (attachment, one.0);
            if failed(one) {
                let tries = self.park_tries.entry(record).or_default();
                *tries += 1;
                again |= *tries <= PARK_TRIES;
            } else {
                self.park_tries.remove(&record);
            }
        }
        if again {
            self.park_after = now + PARK_PAUSE;
            self.parking = None;
            return self.form(now, asks);
        }
        self.park_tries.clear();
        let begun = self.copies(now, attachment, read);
        match begun {
            Some(write) => {
                self.writing.insert(write.number, (write.clone(), 0));
                asks.writes.push(write);
            }
            None => self.parking = None,
        }
        // What was read may have been all that kept a segment.
        self.form(now, asks);
    }

    fn copies(
        &mut self,
        now: Nanos,
        attachment: u32,
        read: Vec<(u64, Option<Piece>, Option<B>)>,
    ) -> Option<ToWrite<B>> {
        let volume = self.volumes.get(&attachment)?;
        let (mut records, mut sums, mut payload, mut of) = (vec![], vec![], vec![], vec![]);
        let mut end = 0u64;
        for (sequence, _, bytes) in read {
            let Some(logged) = volume.log.record(sequence) else { continue };
            // It may have come to the store meanwhile: then it is not needed, and what follows it is.
            let kind = match logged.kind {
                Kind::Write => RecordKind::Write,
                Kind::Zero => RecordKind::Zero,
                Kind::Trim => RecordKind::Trim,
                Kind::Mark => RecordKind::Mark,
            };
            let payload_wanted = matches!(logged.kind, Kind::Write | Kind::Mark);
            let lost = payload_wanted && bytes.is_none();
            let unreadable = lost && !self.fault.is(Planted::DamageParkedAsData);
            let record = Record {
                attachment,
                generation: volume.generation,
                sequence,
                dependency: volume.log.dependency(sequence).unwrap_or(0),
                offset: logged.at,
                length: logged.len,
                kind,
                flags: Flags { fua: false, may_punch: false, unreadable },
            };
            let length = record.payload_bytes();
            let from = if length == 0 { end } else { end.next_multiple_of(BLOCK as u64) };
            if length > 0 {
                let known = volume.sums.get(sequence, volume.log.frontier())?;
                if lost && !unreadable {
                    sums.extend(pieces::sums(&vec![0; length as usize]));
                } else {
                    sums.extend_from_slice(known.as_slice());
                }
                payload.extend(bytes.map(|bytes| (from as u32, bytes)));
                end = from + length;
            }
            of.push((sequence, from, lost));
            records.push(record);
        }
        let shape = Shape::of(&records).filter(|_| !records.is_empty())?;
        let geometry = self.config.geometry;
        let sector = geometry.sector();
        let size = self.config.size(shape);
        let placed = self.segments.park(attachment, size, records.len() as u32)?;
        let mut head = Vec::new();
        let mut at = self.first(&placed);
        let time = self.config.wall + now.0;
        let generation = volume.generation;
        if placed.opens {
            head.resize(sector as usize, 0);
            SegmentHeader {
                cache: self.config.cache,
                generation: placed.generation,
                first: 1,
                run: self.config.run,
                time,
                geometry,
                parked: Some(ParkedFor { attachment, volume: volume.uuid, generation }),
            }
            .encode(&mut head);
            at -= u64::from(sector);
        }
        let before = head.len();
        head.resize(before + shape.header_bytes() as usize, 0);
        let batch = encode_header_of(
            &mut head[before..],
            &Head {
                cache: self.config.cache,
                generation: placed.generation,
                at: sector + placed.at,
                parked: attachment,
                number: placed.number,
                run: self.config.run,
                before: self.parked_before.get(&placed.generation).copied().unwrap_or(0),
                known: 0,
                time,
            },
            records,
            sums,
        );
        // Nothing is added to segments that are let go.
        self.parked_before.retain(|&generation, _| self.segments.has_parked(generation));
        self.parked_before.insert(placed.generation, batch.hash);
        let Placed { segment, generation, .. } = placed;
        self.footers.add(Writing { segment, generation, parked: attachment }, batch);
        let first = self.first(&placed) + u64::from(shape.header_bytes()) - self.config.at;
        let behind = head.len() as u32;
        payload.iter_mut().for_each(|(from, _)| *from += behind);
        let parking = self.parking.as_mut()?;
        parking.records = of.iter().map(|&(seq, from, lost)| (seq, first + from, lost)).collect();
        (parking.generation, parking.state) = (placed.generation, State::Writing);
        self.parks_written += 1;
        let len = before as u32 + shape.bytes(sector);
        Some(ToWrite { number: PARKED | self.parks_written, at, len, head, payload })
    }

    /// A batch that was written is a parked one.
    pub(super) fn is_parked(number: u64) -> bool {
        number & PARKED != 0
    }

    /// The copy is written.
    pub(super) fn copy_written(&mut self) {
        if let Some(parking) = &mut self.parking {
            parking.state = State::Written;
            self.flush_wanted = true;
        }
    }

    /// The copy waits for a flush that begins now.
    pub(super) fn copy_flushes(&mut self) {
        if let Some(parking) = self.parking.as_mut().filter(|p| p.state == State::Written) {
            parking.state = State::Flushing;
        }
    }

    /// Whether records are being copied out of the way.
    pub fn is_parking(&self) -> bool {
        self.parking.is_some()
    }

    /// Whether a copy waits for a flush.
    pub(super) fn copy_waits(&self) -> bool {
        self.parking.as_ref().is_some_and(|parking| parking.state == State::Written)
    }

    /// A flush has ended well: if the copy was waiting for it, the originals are let go.
    pub(super) fn copy_flushed(&mut self) {
        let early = self.fault.is(Planted::CopyNotAwaited);
        let durable =
            |p: &Parking| p.state == State::Flushing || (early && p.state > State::Reading);
        let Some(parking) = self.parking.take_if(|parking| durable(parking)) else { return };
        let Some(volume) = self.volumes.get_mut(&parking.attachment) else {
            // It has gone meanwhile.
            return self.segments.let_go_parked(parking.generation, None);
        };
        let lost: Vec<u64> = parking.records.iter().filter(|r| r.2).map(|r| r.0).collect();
        let mut found = false;
        for (sequence, place, lost) in parking.records {
            let Some(logged) = volume.log.record(sequence) else {
                // The store has it by now.
                self.segments.let_go_parked(parking.generation, Some(1));
                continue;
            };
            volume.log.moved(sequence, place);
            volume.parked.push([sequence, parking.generation]);
            if lost {
                volume.sums.lose(sequence);
                volume.rereads.remove(sequence);
            } else {
                // What could not be read where it was can be read here.
                found |= volume.find(sequence);
            }
            self.segments.let_go(logged.batch);
        }
        if !lost.is_empty() || found {
            volume.log.lose(lost, &mut volume.overlay);
            volume.destager.makes_anew();
        }
    }
}
