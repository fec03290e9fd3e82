//! What a start has found of the log, and how it goes on from there.

use larder_format::block::write_log::Kind as RecordKind;

use super::super::overlay::{Holds, Overlay};
use super::super::planted::Planted;
use super::super::recovery::{Records, VolumeIn};
use super::super::scan::Scan;
use super::super::volume_log::{Kind, Logged};
use super::{Asks, Start, Sums, WriteLog};
use larder_base::Nanos;

impl<B: Clone> WriteLog<B> {
    /// What a start has found of a volume that was just attached, and read with `scan`: dirty and answered. What its frontier covers, which may
    /// be a marker's, is let go.
    pub fn recover<R: Records>(
        &mut self,
        now: Nanos,
        attachment: u32,
        found: &VolumeIn<R>,
        scan: &Scan,
    ) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        volume.log.reserve(found.records.len());
        volume.sums.reserve(found.records.len());
        let mut lost = Vec::new();
        for bad in &found.unreadable {
            // All of them are of records up to the frontier that lists them.
            let range = bad.offset..bad.offset + bad.length;
            match volume.log.void().lists(found.frontier) {
                true => volume.given_up += bad.length,
                false => volume.bad.add(volume.log.void().within_end(found.frontier, range)),
            }
        }
        for dirty in found.records.each() {
            let record = &dirty.entry.record;
            if record.sequence <= volume.log.frontier() {
                // A failed log leaves out nothing: the store has it.
                if record.kind != RecordKind::Mark {
                    volume.bad.remove(record.offset..record.offset + record.length);
                }
                match dirty.parked {
                    Some(generation) => self.segments.let_go_parked(generation, Some(1)),
                    None => self.segments.let_go(dirty.batch),
                }
                continue;
            }
            let kind = match record.kind {
                RecordKind::Zero => Kind::Zero,
                RecordKind::Trim => Kind::Trim,
                RecordKind::Mark => Kind::Mark,
                _ => Kind::Write,
            };
            let logged = Logged {
                at: record.offset,
                len: record.length,
                kind,
                batch: if dirty.parked.is_some() { 0 } else { dirty.batch },
                place: dirty.entry.place,
            };
            let sequence = volume.log.recover_unshown(logged, record.dependency);
            let sums = matches!(kind, Kind::Write | Kind::Mark)
                .then(|| Sums::new(scan.sums(&dirty.entry)));
            volume.sums.push(sums.as_ref());
            volume.answered_at(sequence, now);
            if let Some(generation) = dirty.parked {
                volume.parked.push([record.sequence, generation]);
            }
            if kind == Kind::Mark {
                volume.marks.found(record.sequence, volume.log.covers(record.sequence));
                continue;
            }
            let whole = logged.at..logged.at + logged.len;
            if volume.log.void().has(sequence) {
                let given = volume.log.void().within_end(sequence, whole);
                volume.given_up += given.end - given.start;
                continue;
            }
            if kind == Kind::Write && !dirty.entry.readable {
                lost.push(sequence);
            }
        }
        volume.overlay = volume.log.shown();
        volume.log.lose(lost, &mut volume.overlay);
        if self.start == Start::Started {
            volume.log.recovered();
        }
    }

    /// What a start has found of a volume that does not go on with it is void. Returns the dirty bytes that are lost with it, each counted once.
    pub fn give_up_found<R: Records>(&mut self, attachment: u32, found: &VolumeIn<R>) -> u64 {
        if self.volumes.contains_key(&attachment) {
            return 0;
        }
        for dirty in found.records.each() {
            match dirty.parked {
                Some(generation) => self.segments.let_go_parked(generation, Some(1)),
                None => self.segments.let_go(dirty.batch),
            }
        }
        let mut lost = Overlay::default();
        for (sequence, dirty) in (1..).zip(found.records.each()) {
            let record = &dirty.entry.record;
            if record.kind != RecordKind::Mark {
                lost.show(record.offset..record.offset + record.length, sequence, Holds::Zeros);
            }
        }
        lost.bytes()
    }

    /// All volumes that can be had now are attached and have what was found of them. That is flushed [startflush], then the first batch of this
    /// run is written, and flushed too; when that is durable, what was found counts as promised, and [`WriteLog::is_started`] says that the
    /// volumes may be read and written. Until then a crash may make more of the last run's batches whole; from then on they are void [run].
    pub fn start(&mut self, asks: &mut Asks<B>) {
        if self.start != Start::Found {
            return;
        }
        if self.fault.is(Planted::StartNotFlushed) {
            self.segments.sure();
            return self.starts(asks);
        }
        self.start = Start::Flushed;
        (self.flush_wanted, self.flushing) = (false, Some(self.segments.flush_begins()));
        asks.flush = self.flushing;
    }

    /// Whether volumes may be read and written.
    pub fn is_started(&self) -> bool {
        self.start == Start::Started
    }

    pub(super) fn starts(&mut self, asks: &mut Asks<B>) {
        self.start = Start::Started;
        for (&attachment, volume) in &mut self.volumes {
            volume.log.recovered();
            asks.steps.push(attachment);
        }
    }
}
