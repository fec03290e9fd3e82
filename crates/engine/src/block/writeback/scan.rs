//! Reads the write log at a start: every batch that may count, for [`recover`](super::recovery::recover).
//!
//! Segments are read from the newest generation to the oldest.
//!
//! | segment | what is read |
//! | --- | --- |
//! | sealed: its footer verifies | the footer, and the newest FRONTIER that it knows |
//! | not sealed | all headers of batches, and their FRONTIERs |
//! | of the main chain, and older than what a FRONTIER in a sealed segment calls the oldest | its header: it is free |
//! | its header does not verify | what its footer or its first batch says of the generation decides how it is read |
//! | another cache's | its header |
//!
//! A footer is written when all before it is durable, so the batches of a sealed segment are known durable, and their payload is not
//! read. Batches above the number known durable are the tail: their payload is verified, and one that is torn is left out. Behind
//! bytes that are no batch the scan goes on at the next sector that is one, since what follows damage counts; what was written before
//! the segment was reused has another generation. A batch names its position, so a client's copy of a log is not taken for one.
//!
//! What the device does not give is damage there, never an empty log: [`Scan::unreadable`] has it, the scan goes on behind it, and a
//! record of the tail with a payload that cannot be read stays, as one that cannot be read. If the log ends before bytes that
//! could not be read, nothing tells whether it went on there.
//!
//! Each parked segment is a chain of its own, and is cut at its end here. Its last copies may be torn: they stay as copies that cannot
//! be read, and count only where nothing better is left.
//!
//! DRAM: 1 MiB, or one footer where that is longer, and what is returned: of a record of 4 KiB about 16 bytes, and of a batch 80.

use std::collections::BTreeMap;
use std::ops::Range;

use larder_format::Uuid;
use larder_format::block::superblock::WriteLogArea;
use larder_format::block::write_log::{
    BLOCK, Batch, Footer, Frontier, Kind, Link, PartError, Place, SegmentHeader, batch, chain,
    footer, pieces,
};

use super::packed::{PackedEntries, PlaceOf};
use super::planted::Fault;
use super::recovery::{
    Batches, Entry, Recovered, RecoveredPacked, Scanned, Seen, recover, recover_in,
};

mod reader;

use reader::Reader;
pub use reader::{ReadAt, ReadFailed};

/// What a start has read of the log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    /// The batches that may count. The highest number known durable that anything in the main chain says is in one of their links,
    /// though its batch may have said less. Those of a segment that has a footer, though that may not verify, end where the segment does:
    /// nothing is to be appended.
    pub batches: BatchList,
    /// The highest generation that a segment has, also where no batch of it is left: later ones are higher.
    pub generation: u64,
    /// Bytes of the device that could not be read, ascending.
    pub unreadable: Vec<Range<u64>>,
    /// Segments whose header is damaged, or cannot be read, ascending.
    pub damaged: Vec<u32>,
    /// Of the newest segments of the main chain that have no footer, what it would say of the batches that are there: generation, and batches. Which of
    /// them count is not said.
    pub open: Vec<(u64, Vec<Batch>)>,
    sums: SumList,
}

impl Scan {
    /// The checksums of the pieces of an entry's payload, for later reads of it.
    pub fn sums(&self, entry: &Entry) -> &[u32] {
        let count = pieces::count(entry.record.payload_bytes()) as usize;
        self.sums.get(entry.sums, count)
    }

    /// What a start makes of it ([`recover`]). The records of its batches are let go, since a log that is full of small writes has millions;
    /// their checksums stay.
    pub fn recover(&mut self, volumes: &[(u32, u64)], fault: Fault) -> Recovered {
        let found = recover(&self.batches, volumes, fault);
        self.batches.let_go_of_entries();
        found
    }

    /// The same, with records in few bytes.
    pub fn recover_packed(&mut self, volumes: &[(u32, u64)], fault: Fault) -> RecoveredPacked {
        let found = recover_in(&self.batches, volumes, fault);
        self.batches.let_go_of_entries();
        found
    }
}

/// Batches with their records, in few bytes. As a slice it has what is known of them but for their records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchList {
    all: Vec<Seen>,
    places: Vec<PlaceOf>,
    entries: PackedEntries,
    /// By their places in the list.
    frontiers: BTreeMap<u32, Frontier>,
}

impl std::ops::Deref for BatchList {
    type Target = [Seen];

    fn deref(&self) -> &[Seen] {
        &self.all
    }
}

impl<'a> IntoIterator for &'a BatchList {
    type Item = &'a Seen;
    type IntoIter = std::slice::Iter<'a, Seen>;

    fn into_iter(self) -> Self::IntoIter {
        self.all.iter()
    }
}

impl Batches for BatchList {
    fn count(&self) -> usize {
        self.all.len()
    }

    fn seen(&self, at: usize) -> Seen {
        self.all[at]
    }

    fn frontier(&self, at: usize) -> Option<&Frontier> {
        self.frontiers.get(&(at as u32))
    }

    fn entries(&self, at: usize) -> impl Iterator<Item = Entry> + '_ {
        self.entries.of(self.places.get(at).copied().unwrap_or_default())
    }
}

impl BatchList {
    /// All of them with their records: about 100 bytes for each of those.
    pub fn unpacked(&self) -> Vec<Scanned> {
        let of = |(at, seen): (usize, &Seen)| {
            let Seen { link, parked, segment, end, footer } = *seen;
            let entries = Batches::entries(self, at).collect();
            let frontier = self.frontier(at).cloned();
            Scanned { link, parked, segment, end, footer, entries, frontier }
        };
        self.all.iter().enumerate().map(of).collect()
    }

    fn push(&mut self, batch: Scanned) {
        if let Some(frontier) = batch.frontier.clone() {
            self.frontiers.insert(self.all.len() as u32, frontier);
        }
        if self.all.len() == self.all.capacity() {
            // Not to twice as many: there may be millions.
            let more = self.all.len() / 8 + 1024;
            self.all.reserve_exact(more);
            self.places.reserve_exact(more);
        }
        self.all.push(batch.seen());
        self.places.push(self.entries.add(&batch.entries));
    }

    /// Other entries of a batch in the place of those that it has.
    fn set_entries(&mut self, at: usize, entries: &[Entry]) {
        self.places[at] = self.entries.add(entries);
    }

    /// Their records are not needed any more.
    fn let_go_of_entries(&mut self) {
        self.entries.clear();
        self.places = Vec::new();
    }

    /// Leaves out those that are torn.
    fn leave_out(&mut self, torn: &[bool]) {
        let mut frontiers = std::mem::take(&mut self.frontiers);
        let mut left = 0;
        for (at, _) in torn.iter().enumerate().filter(|(_, torn)| !**torn) {
            (self.all[left], self.places[left]) = (self.all[at], self.places[at]);
            if let Some(frontier) = frontiers.remove(&(at as u32)) {
                self.frontiers.insert(left as u32, frontier);
            }
            left += 1;
        }
        self.all.truncate(left);
        self.places.truncate(left);
    }
}

/// Checksums in a row, in chunks: nothing that is kept is moved when more come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct SumList {
    /// Each with the number of its first.
    chunks: Vec<(u32, Vec<u32>)>,
    len: u32,
}

/// Checksums of a chunk. Those of one record are in one.
const SUMS: usize = 16 << 10;

impl SumList {
    /// Keeps those of a record: the number of the first.
    fn add(&mut self, sums: &[u32]) -> u32 {
        let first = self.len;
        let fits = |(_, chunk): &&mut (u32, Vec<u32>)| chunk.capacity() - chunk.len() >= sums.len();
        match self.chunks.last_mut().filter(fits) {
            Some((_, chunk)) => chunk.extend_from_slice(sums),
            None => {
                let mut chunk = Vec::with_capacity(SUMS.max(sums.len()));
                chunk.extend_from_slice(sums);
                self.chunks.push((first, chunk));
            }
        }
        // An area has fewer sums than 32 bits can number.
        self.len = first.saturating_add(sums.len() as u32);
        first
    }

    fn get(&self, first: u32, count: usize) -> &[u32] {
        let at = self.chunks.partition_point(|(of, _)| *of <= first);
        let chunk = at.checked_sub(1).and_then(|at| self.chunks.get(at));
        let mine = chunk.and_then(|(of, chunk)| {
            let from = (first - of) as usize;
            chunk.get(from..from.saturating_add(count))
        });
        mine.unwrap_or(&[])
    }
}

/// Reads the log in `area` of the device. `read` fills its buffer, at most 1 MiB, from a byte of the device on; both are multiples of
/// the log's sector.
pub fn scan<'a>(area: &WriteLogArea, cache: Uuid, read: &'a mut ReadAt<'a>) -> Scan {
    let reader = Reader::new(area.geometry.sector(), read);
    let mut scanner = Scanner {
        area: *area,
        cache,
        reader,
        found: Scan::default(),
        tail: Vec::new(),
        free: 0,
        guess: 0,
    };
    let mut segments: Vec<Segment> =
        (0..area.segments).filter_map(|segment| scanner.segment(segment)).collect();
    segments.sort_by_key(|segment| std::cmp::Reverse(segment.generation));
    for segment in &segments {
        scanner.found.generation = scanner.found.generation.max(segment.generation);
        scanner.batches_of(segment);
    }
    scanner.verify_tail();
    scanner.found.unreadable = scanner.reader.unreadable();
    scanner.found
}

/// A segment of this cache.
#[derive(Clone, Copy, Debug)]
struct Segment {
    number: u32,
    generation: u64,
    /// The attachment number that it is parked for; 0 in the main chain.
    parked: u32,
}

/// Least bytes of a read, where there are so many.
const LEAST: u32 = 4096;
/// Of so many segments without a footer what it would say is kept: of those that a crash has left. Older ones have none for another reason.
const OPEN: usize = 4;

/// Where the table of a FRONTIER lies in the area, and its checksums.
type Table = (Range<u64>, Vec<u32>);

/// A batch as it was found, and the table of its FRONTIER, if it begins with one.
struct FoundBatch {
    scanned: Scanned,
    table: Option<Table>,
}

/// A batch that may be in the tail: its place among those found, and the table of its FRONTIER.
struct Tail {
    at: usize,
    table: Option<Range<u64>>,
}

struct Scanner<'a> {
    area: WriteLogArea,
    cache: Uuid,
    reader: Reader<'a>,
    found: Scan,
    /// Batches of the main chain in segments without a footer.
    tail: Vec<Tail>,
    /// Segments of the main chain of an older generation are free.
    free: u64,
    /// How long a footer may be.
    guess: usize,
}

impl Scanner<'_> {
    fn sector(&self) -> u32 {
        self.area.geometry.sector()
    }

    /// Bytes `range` of a segment, and what else was read with them; up to the byte `until` of the segment they may be read ahead.
    fn bytes(&mut self, segment: u32, range: Range<u32>, until: u32) -> &[u8] {
        let at = self.area.segment_at(segment);
        let of = |byte: u32| at + u64::from(byte);
        self.reader.bytes(of(range.start)..of(range.end), of(until.max(range.end)))
    }

    /// What the header of a segment says, or what is left to say it; nothing if there is nothing of this cache.
    fn segment(&mut self, number: u32) -> Option<Segment> {
        let (sector, cache, geometry) = (self.sector(), self.cache, self.area.geometry);
        let header = SegmentHeader::decode(self.bytes(number, 0..sector, sector), cache);
        match header {
            Ok(SegmentHeader { generation, parked, geometry: of, .. }) if of == geometry => {
                let parked = parked.map_or(0, |parked| parked.attachment);
                return Some(Segment { number, generation, parked });
            }
            Err(PartError::Cache { .. }) => return None,
            _ => {}
        }
        let at = self.area.segment_at(number);
        let lost = self.reader.is_unreadable(at..at + u64::from(sector));
        let left = self.generation_left(number, lost);
        // One that was never written is not damaged.
        if lost || left.is_some() || header != Err(PartError::Absent) {
            self.found.damaged.push(number);
        }
        left
    }

    /// The generation of a segment whose header is not there: the later of those that its first batch and its footer name. `ahead`: more than those is
    /// read, since there may be more.
    fn generation_left(&mut self, number: u32, ahead: bool) -> Option<Segment> {
        // No segment has generation 0: what is whole otherwise says which it has.
        let named = |error: PartError| match error {
            PartError::Generation { found } => Some(found),
            _ => None,
        };
        let first = self.batch(number, 0, self.sector(), ahead).err().and_then(named);
        let first = first.and_then(|generation| {
            let batch = self.batch(number, generation, self.sector(), ahead).ok()?;
            Some(Segment { number, generation, parked: batch.head.parked })
        });
        let last = self.footer(number, 0).err().and_then(named);
        let last = last.and_then(|generation| {
            let footer = self.footer(number, generation).ok()?;
            Some(Segment { number, generation, parked: footer.parked })
        });
        [first, last].into_iter().flatten().max_by_key(|segment| segment.generation)
    }

    /// The batch at a position of a segment, if its header is whole there. `ahead`: what follows in the segment is read with it.
    fn batch(
        &mut self,
        segment: u32,
        generation: u64,
        at: u32,
        ahead: bool,
    ) -> Result<Batch, PartError> {
        let all = self.area.geometry.bytes();
        let place = Place { cache: self.cache, generation, at, segment: all };
        let end = at.saturating_add(BLOCK as u32).min(all);
        let until = if ahead { all } else { end.next_multiple_of(LEAST).min(all) };
        match batch::decode(self.bytes(segment, at..end, until), &place) {
            Err(PartError::Short { need, .. }) => {
                let end = u32::try_from(need).ok().and_then(|need| at.checked_add(need));
                // What says more than there is room for is torn.
                let end = end.filter(|&end| end <= all).ok_or(PartError::Torn)?;
                batch::decode(self.bytes(segment, at..end, until.max(end)), &place)
            }
            read => read,
        }
    }

    /// The footer of a segment.
    fn footer(&mut self, segment: u32, generation: u64) -> Result<Footer, PartError> {
        let (cache, geometry) = (self.cache, self.area.geometry);
        let all = geometry.bytes();
        // As long as the one before, or more; one that is longer is read again.
        let least = footer::END_BYTES.next_multiple_of(LEAST as usize);
        let mut last = self.guess.max(least).min(all as usize);
        loop {
            let from = all.saturating_sub(u32::try_from(last).unwrap_or(all));
            let bytes = self.bytes(segment, from..all, all);
            match Footer::decode(bytes, cache, generation, geometry) {
                Err(PartError::Short { need, .. }) if need > last => {
                    last = need;
                    self.guess = need.next_multiple_of(64 << 10);
                }
                read => return read,
            }
        }
    }

    fn batches_of(&mut self, segment: &Segment) {
        let &Segment { number, generation, parked } = segment;
        if parked == 0 && generation < self.free {
            return;
        }
        let footer = self.footer(number, generation);
        let end = self.area.geometry.bytes() - self.sector();
        // There is one, or there may be, and a later start may read it: what is appended now would not be in it.
        let at = self.area.segment_at(number);
        let doubtful = !matches!(footer, Err(PartError::Absent | PartError::Generation { .. }))
            || self.reader.is_unreadable(at + u64::from(end)..at + u64::from(end + self.sector()));
        let footer = footer.ok().filter(|f| f.parked == parked);
        let is_sealed = footer.is_some();
        let mut batches: Vec<FoundBatch> = match footer {
            Some(footer) => {
                let known = footer.known;
                let of = footer.batches.iter().map(|batch| self.found_batch(number, batch));
                let mut batches: Vec<FoundBatch> = of.collect();
                if let Some(last) = batches.last_mut() {
                    last.scanned.link.known = last.scanned.link.known.max(known);
                }
                batches
            }
            None => {
                let batches = self.walk(segment);
                let found = batches.iter().map(|batch| self.found_batch(number, batch)).collect();
                if parked == 0 && !doubtful && self.found.open.len() < OPEN {
                    self.found.open.push((generation, batches));
                }
                found
            }
        };
        if doubtful {
            batches.iter_mut().for_each(|batch| batch.scanned.end = end);
        }
        if parked != 0 {
            self.parked(batches, generation);
            return;
        }
        if is_sealed {
            // The newest says all that the ones before it said.
            for FoundBatch { scanned, table } in batches.iter_mut().rev() {
                scanned.frontier = table.as_ref().and_then(|table| self.table(table, false));
                if let Some(frontier) = &scanned.frontier {
                    self.free = self.free.max(frontier.oldest_generation.min(generation));
                    break;
                }
            }
        } else {
            for FoundBatch { scanned, table } in &mut batches {
                scanned.frontier = table.as_ref().and_then(|table| self.table(table, true));
            }
        }
        for FoundBatch { scanned, table } in batches {
            if !is_sealed {
                let table = table.map(|table| table.0);
                self.tail.push(Tail { at: self.found.batches.count(), table });
            }
            self.found.batches.push(scanned);
        }
    }

    /// The batches of a segment without a footer, as their headers say.
    fn walk(&mut self, segment: &Segment) -> Vec<Batch> {
        let (sector, all) = (self.sector(), self.area.geometry.bytes());
        let mut batches = Vec::new();
        let mut at = sector;
        while at < all {
            match self.batch(segment.number, segment.generation, at, true) {
                Ok(batch) if batch.head.parked == segment.parked => {
                    at = at.saturating_add(batch.bytes(sector));
                    batches.push(batch);
                }
                _ => at = at.saturating_add(sector),
            }
        }
        batches
    }

    fn found_batch(&mut self, segment: u32, batch: &Batch) -> FoundBatch {
        let (head, shape) = (&batch.head, batch.contents.shape());
        let first = self.area.segment_at(segment) - self.area.at;
        let payload = first + u64::from(head.at) + u64::from(shape.header_bytes());
        let mut table = None;
        let mut entries = Vec::with_capacity(shape.records() as usize);
        for entry in batch.contents.entries() {
            let place = payload + u64::from(entry.payload.start);
            if entry.record.kind == Kind::Frontier {
                let end = payload + u64::from(entry.payload.end);
                table = Some((place..end, entry.sums.to_vec()));
                continue;
            }
            let sums = self.found.sums.add(entry.sums);
            let readable = !entry.record.flags.unreadable;
            entries.push(Entry { record: *entry.record, place, readable, sums });
        }
        let scanned = Scanned {
            link: batch.link(),
            parked: head.parked,
            segment,
            end: head.at + shape.bytes(self.sector()) - self.sector(),
            footer: footer::of_batch(shape),
            entries,
            frontier: None,
        };
        FoundBatch { scanned, table }
    }

    /// The FRONTIER whose table this is, if it is whole.
    fn table(&mut self, (table, sums): &Table, ahead: bool) -> Option<Frontier> {
        let bytes = self.payload(table.clone(), ahead);
        pieces::check(sums, 0, bytes).ok()?;
        Frontier::decode(bytes).ok()
    }

    /// Payload at these bytes of the area; `ahead`, with what follows in its segment.
    fn payload(&mut self, range: Range<u64>, ahead: bool) -> &[u8] {
        let bytes = (range.end - range.start) as usize;
        let segment = u64::from(self.area.geometry.bytes());
        let until = if ahead { range.end.next_multiple_of(segment) } else { range.end };
        let at = self.area.at;
        let found = self.reader.bytes(at + range.start..at + range.end, at + until);
        found.get(..bytes).unwrap_or(found)
    }

    /// Keeps of a parked segment what its chain has, and finds out which of its last copies can be read.
    fn parked(&mut self, batches: Vec<FoundBatch>, generation: u64) {
        let mut batches: Vec<Scanned> = batches.into_iter().map(|batch| batch.scanned).collect();
        let links: Vec<Link> = batches.iter().map(|batch| batch.link).collect();
        let known = chain::known_durable(&links);
        let mut counts = vec![false; batches.len()];
        for at in chain::read(&links, generation, 1).batches {
            counts[at] = true;
        }
        let mut counts = counts.into_iter();
        batches.retain(|_| counts.next() == Some(true));
        for batch in &mut batches {
            if batch.link.number > known {
                for entry in &mut batch.entries {
                    entry.readable &= self.check(entry);
                }
            }
        }
        batches.into_iter().for_each(|batch| self.found.batches.push(batch));
    }

    /// Whether the payload of an entry is what its sums say.
    fn check(&mut self, entry: &Entry) -> bool {
        let bytes = entry.record.payload_bytes();
        let sums = self.found.sums(entry).to_vec();
        let payload = self.payload(entry.place..entry.place + bytes, true);
        pieces::check(&sums, 0, payload).is_ok()
    }

    /// Leaves out what is torn above the number known durable.
    fn verify_tail(&mut self) {
        let mut batches = std::mem::take(&mut self.found.batches);
        let main = |batch: &&Seen| batch.parked == 0;
        let known = chain::known_durable(batches.iter().filter(main).map(|batch| &batch.link));
        let mut torn = vec![false; batches.count()];
        for Tail { at, table } in std::mem::take(&mut self.tail) {
            let Link { number, generation, .. } = batches.seen(at).link;
            if number <= known || generation < self.free {
                continue;
            }
            torn[at] |= match &table {
                Some(table) if batches.frontier(at).is_none() => !self.is_lost(table),
                _ => false,
            };
            let mut entries: Vec<Entry> = Batches::entries(&batches, at).collect();
            let mut changed = false;
            for entry in &mut entries {
                if entry.readable && !self.check(entry) {
                    let end = entry.place + entry.record.payload_bytes();
                    (entry.readable, changed) = (false, true);
                    torn[at] |= !self.is_lost(&(entry.place..end));
                }
            }
            if changed {
                batches.set_entries(at, &entries);
            }
        }
        batches.leave_out(&torn);
        // What the torn ones knew is so.
        let last = batches.all.iter_mut().filter(|batch| batch.parked == 0);
        if let Some(last) = last.max_by_key(|batch| batch.link.generation) {
            last.link.known = last.link.known.max(known);
        }
        self.found.batches = batches;
    }

    /// Whether the device did not give some of these bytes of the area.
    fn is_lost(&self, range: &Range<u64>) -> bool {
        self.reader.is_unreadable(self.area.at + range.start..self.area.at + range.end)
    }
}
