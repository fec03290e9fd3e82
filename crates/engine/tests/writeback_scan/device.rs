//! A device with a write log, written as a cache writes it, and damaged as no cache does.

use std::ops::Range;

use larder_base::Rng;
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::recovery::{Dirty, Recovered, Volume, recover};
use larder_engine::block::writeback::scan::{ReadFailed, Scan, scan};
use larder_format::Uuid;
use larder_format::block::superblock::WriteLogArea;
use larder_format::block::write_log::{
    Batch, Flags, Footer, Frontier, Head, Item, Kind, Parked, Record, Room, SegmentGeometry,
    SegmentHeader, Shape, VolumeFrontier, batch, pieces,
};

pub(crate) const CACHE: Uuid = Uuid([0xca; 16]);
pub(crate) const VOLUMES: [(u32, u64); 2] = [(1, 0), (2, 0)];
const LAYOUT: u64 = (1 << 20) - 5;

/// A segment that is written to.
struct Open {
    header: SegmentHeader,
    segment: u32,
    room: Room,
    batches: Vec<Batch>,
    /// Number and hash of the last batch of its chain.
    last: (u64, u64),
}

/// Where a batch lies on the device.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub(crate) number: u64,
    pub(crate) header: Range<usize>,
    pub(crate) payload: Range<usize>,
}

/// What was written to a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Truth {
    pub(crate) record: Record,
    pub(crate) payload: Vec<u8>,
}

pub(crate) struct Device {
    pub(crate) bytes: Vec<u8>,
    pub(crate) area: WriteLogArea,
    /// Bytes that cannot be read.
    pub(crate) bad: Vec<Range<u64>>,
    pub(crate) truth: Vec<Truth>,
    pub(crate) generation: u64,
    pub(crate) run: u64,
    /// The last batch that is known durable, as new batches will say.
    pub(crate) known: u64,
    /// What a FRONTIER says of the chain and of volumes.
    pub(crate) oldest: (u64, u64),
    pub(crate) frontiers: [u64; 2],
    open: Option<Open>,
    main: (u64, u64),
    rng: Rng,
}

impl Device {
    pub(crate) fn new(sector: u32) -> Device {
        let geometry = SegmentGeometry::new(64 << 10, sector).unwrap();
        let area = WriteLogArea::with_segments(LAYOUT, 12 * (64 << 10), geometry).unwrap();
        Device {
            bytes: vec![0; area.end() as usize],
            area,
            bad: Vec::new(),
            truth: Vec::new(),
            generation: 10,
            run: 5,
            known: 0,
            oldest: (11, 1),
            frontiers: [0; 2],
            open: None,
            main: (0, 0),
            rng: Rng::new(7),
        }
    }

    /// The number of the last batch of the main chain.
    pub(crate) fn last(&self) -> u64 {
        self.main.0
    }

    /// The last sequence of a volume.
    pub(crate) fn sequence(&self, volume: u32) -> u64 {
        let mine = self.truth.iter().filter(|t| t.record.attachment == volume);
        mine.map(|t| t.record.sequence).max().unwrap_or(0)
    }

    /// The first byte of a segment.
    pub(crate) fn at(&self, segment: u32) -> usize {
        self.area.segment_at(segment) as usize
    }

    /// Begins a segment of the main chain; the one before stays without a footer.
    pub(crate) fn begin(&mut self, segment: u32) {
        self.begins(segment, None);
    }

    /// Begins a segment that is parked for a volume.
    pub(crate) fn begin_parked(&mut self, segment: u32, attachment: u32) {
        let parked = Parked { attachment, volume: Uuid([attachment as u8; 16]), generation: 1 };
        self.begins(segment, Some(parked));
    }

    fn begins(&mut self, segment: u32, parked: Option<Parked>) {
        self.generation += 1;
        let geometry = self.area.geometry;
        let last = if parked.is_some() { (0, 0) } else { self.main };
        let header = SegmentHeader {
            cache: CACHE,
            generation: self.generation,
            first: last.0 + 1,
            run: self.run,
            time: 1,
            geometry,
            parked,
        };
        let at = self.at(segment);
        header.encode(&mut self.bytes[at..at + geometry.sector() as usize]);
        let room = Room::new(geometry);
        self.open = Some(Open { header, segment, room, batches: Vec::new(), last });
    }

    fn frontier(&self, more: &[Record]) -> Frontier {
        let volume = |&(attachment, _): &(u32, u64)| {
            let here = more.iter().filter(|r| r.attachment == attachment).map(|r| r.sequence);
            VolumeFrontier {
                attachment,
                frontier: self.frontiers[attachment as usize - 1],
                last: here.max().unwrap_or(0).max(self.sequence(attachment)),
                marker: 3,
                unreadable: Vec::new(),
            }
        };
        Frontier {
            oldest_generation: self.oldest.0,
            oldest_batch: self.oldest.1,
            volumes: VOLUMES.iter().map(volume).collect(),
        }
    }

    /// A write of `bytes` random bytes, the next of its volume.
    pub(crate) fn write(&mut self, volume: u32, bytes: u64) -> Truth {
        let sequence = self.sequence(volume) + 1;
        let record = Record {
            attachment: volume,
            generation: 1,
            sequence,
            dependency: 0,
            offset: self.rng.below(1 << 30),
            length: bytes,
            kind: Kind::Write,
            flags: Flags::default(),
        };
        let mut payload = vec![0; bytes as usize];
        self.rng.fill(&mut payload);
        Truth { record, payload }
    }

    /// Writes a batch with one record of `bytes` to each of these volumes, after a FRONTIER if it is the first of its segment or
    /// `said`.
    pub(crate) fn batch(&mut self, to: &[(u32, u64)], said: bool) -> Written {
        let mut records = Vec::new();
        for &(volume, bytes) in to {
            let truth = self.write(volume, bytes);
            self.truth.push(truth.clone());
            records.push((truth, None));
        }
        let first = self.open.as_ref().is_some_and(|open| open.batches.is_empty());
        self.put(records, said || first)
    }

    /// Writes copies of records to the open segment, which is parked.
    pub(crate) fn park(&mut self, records: &[(Truth, Vec<u32>)]) -> Written {
        let records = records.iter().map(|(truth, sums)| (truth.clone(), Some(sums.clone())));
        let records = records.collect();
        self.put(records, false)
    }

    fn put(&mut self, records: Vec<(Truth, Option<Vec<u32>>)>, said: bool) -> Written {
        let mine: Vec<Record> = records.iter().map(|(t, _)| t.record).collect();
        let table = said.then(|| self.frontier(&mine).encode());
        let table = table.as_ref();
        let front = table.map(|table| {
            let record = Record::frontier(table.len());
            Item { record, payload: table, sums: None }
        });
        let items: Vec<Item<'_>> = front
            .into_iter()
            .chain(records.iter().map(|(truth, sums)| Item {
                record: truth.record,
                payload: &truth.payload,
                sums: sums.as_deref(),
            }))
            .collect();
        let shape = Shape::of(items.iter().map(|item| &item.record)).unwrap();
        let (open, sector) = (self.open.as_mut().unwrap(), self.area.geometry.sector());
        let at = open.room.take(shape).expect("the segment has room");
        let is_parked = open.header.parked.is_some();
        let head = Head {
            cache: CACHE,
            generation: open.header.generation,
            at,
            parked: open.header.parked.map_or(0, |p| p.attachment),
            number: open.last.0 + 1,
            run: self.run,
            before: open.last.1,
            known: if is_parked { 0 } else { self.known },
            time: 2,
        };
        let from = self.area.segment_at(open.segment) as usize + at as usize;
        let bytes = shape.bytes(sector) as usize;
        let batch = batch::encode(&mut self.bytes[from..from + bytes], &head, &items);
        open.last = (head.number, batch.hash);
        if !is_parked {
            self.main = open.last;
        }
        open.batches.push(batch);
        let payload = from + shape.header_bytes() as usize;
        Written { number: head.number, header: from..payload, payload: payload..from + bytes }
    }

    /// Seals the open segment, all of which is durable.
    pub(crate) fn seal(&mut self) -> Range<usize> {
        let open = self.open.take().unwrap();
        let footer = Footer {
            cache: CACHE,
            generation: open.header.generation,
            parked: open.header.parked.map_or(0, |p| p.attachment),
            known: open.last.0,
            batches: open.batches,
        };
        let bytes = footer.encode(self.area.geometry);
        let end = self.at(open.segment + 1);
        self.bytes[end - bytes.len()..end].copy_from_slice(&bytes);
        if open.header.parked.is_none() {
            self.known = open.last.0;
        }
        end - bytes.len()..end
    }

    /// A start found the log up to this batch, and goes on in the segment that it lies in.
    pub(crate) fn restart_behind(&mut self, segment: u32, scan: &Scan, recovered: &Recovered) {
        let geometry = self.area.geometry;
        let header = self.at(segment);
        let header = SegmentHeader::decode(&self.bytes[header..], CACHE).unwrap();
        let mut room = Room::new(geometry);
        let mut batches = Vec::new();
        let mine = recovered.chain.batches.iter().map(|&i| &scan.batches[i]);
        for scanned in mine.filter(|scanned| scanned.segment == segment) {
            let at = room.used();
            let place = batch::decode(
                &self.bytes[self.at(segment) + at as usize..],
                &larder_format::block::write_log::Place {
                    cache: CACHE,
                    generation: header.generation,
                    at,
                    segment: geometry.bytes(),
                },
            );
            let batch = place.unwrap();
            assert_eq!(batch.head.number, scanned.link.number);
            assert_eq!(room.take(batch.contents.shape()), Some(at));
            batches.push(batch);
        }
        self.run += 1;
        self.main = (recovered.chain.next - 1, recovered.chain.before);
        self.generation = scan.generation;
        let found = |t: &Truth| {
            let volume = &recovered.volumes[&t.record.attachment];
            t.record.sequence <= volume.last
        };
        self.truth.retain(found);
        self.open = Some(Open { header, segment, room, batches, last: self.main });
    }

    pub(crate) fn scan(&self) -> Scan {
        let sector = u64::from(self.area.geometry.sector());
        scan(&self.area, CACHE, &mut |at, out: &mut [u8]| {
            let end = at + out.len() as u64;
            assert!(at.is_multiple_of(sector) && end.is_multiple_of(sector), "{at}..{end}");
            assert!(out.len() <= 1 << 20 && at >= self.area.at && end <= self.area.end());
            if self.bad.iter().any(|bad| bad.start < end && at < bad.end) {
                out.fill(0xee);
                return Err(ReadFailed);
            }
            out.copy_from_slice(&self.bytes[at as usize..end as usize]);
            Ok(())
        })
    }

    pub(crate) fn recover(&self) -> (Scan, Recovered) {
        let scan = self.scan();
        let recovered = recover(&scan.batches, &VOLUMES, Fault::default());
        self.check(&scan, &recovered);
        (scan, recovered)
    }

    /// Every record was written, under its sums, and what can be read of it is what was written.
    pub(crate) fn check(&self, scan: &Scan, recovered: &Recovered) {
        for dirty in recovered.volumes.values().flat_map(|volume| &volume.records) {
            let entry = &dirty.entry;
            let is = |t: &&Truth| Record { flags: entry.record.flags, ..t.record } == entry.record;
            let truth = self.truth.iter().find(is).expect("a record that was never written");
            let lost = entry.record.flags.unreadable;
            let want: Vec<u32> = pieces::sums(if lost { &[] } else { &truth.payload }).collect();
            assert_eq!(scan.sums(entry), want);
        }
    }

    /// The payload of a record, if it can be read and its sums hold.
    pub(crate) fn payload(&self, scan: &Scan, dirty: &Dirty) -> Option<&[u8]> {
        let from = (self.area.at + dirty.entry.place) as usize;
        let bytes = &self.bytes[from..from + dirty.entry.record.payload_bytes() as usize];
        let whole = pieces::check(scan.sums(&dirty.entry), 0, bytes).is_ok();
        (whole && dirty.entry.readable).then_some(bytes)
    }

    /// Refuses anything but all records of the volumes up to `last`, readable.
    pub(crate) fn has_all(&self, last: [u64; 2]) -> (Scan, Recovered) {
        let (scan, recovered) = self.recover();
        for (&(volume, _), last) in VOLUMES.iter().zip(last) {
            let found = &recovered.volumes[&volume];
            assert!(!found.gap, "volume {volume}");
            assert_eq!(found.last, last, "volume {volume}");
            self.are_whole(&scan, found);
        }
        (scan, recovered)
    }

    pub(crate) fn are_whole(&self, scan: &Scan, found: &Volume) {
        for dirty in &found.records {
            let is = |t: &&Truth| t.record == dirty.entry.record;
            let truth = self.truth.iter().find(is).expect("a record that was never written");
            assert_eq!(self.payload(scan, dirty), Some(&truth.payload[..]));
        }
    }

    pub(crate) fn rot(&mut self, at: usize) {
        self.bytes[at] ^= 0x40;
    }
}
