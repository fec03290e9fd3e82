//! The crash model of the log's segments: one log of few segments for two volumes, with reuse, FRONTIERs, parking, runs and rot. It follows
//! `Chain` of `models/write_back.py`: destaging is one step, a batch is one place of a segment.

use std::collections::BTreeMap;

use larder_base::Rng;
use larder_engine::block::writeback::recovery::{Entry, Recovered, Scanned, recover};
use larder_engine::block::writeback::segments::{Config, Oldest, Placed, Purpose, Segments, Size};
use larder_engine::block::writeback::{Fault, Planted};
use larder_format::block::write_log::{Flags, Frontier, Kind, Link, Record, VolumeFrontier, chain};

const SEGMENTS: u32 = 7;
const BATCHES: u32 = 3;
const VOLUMES: usize = 2;
const BLOCKS: u64 = 3;
/// A batch is one place of a segment.
const ONE: Size = Size { bytes: 1, footer: 0 };

/// A volume: what its log should hold, and its store.
#[derive(Default)]
struct Volume {
    attachment: u32,
    /// Block and number of the write of each sequence, from 1.
    truth: Vec<(u64, u64)>,
    store: [u64; BLOCKS as usize],
    frontier: u64,
    /// The frontier that the newest FRONTIER says durably; until then its records are not let go.
    promised: u64,
    away: bool,
    /// Where each record behind the frontier is: the batch, and the parked segment's generation if it is one.
    place: BTreeMap<u64, (u64, Option<u64>)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rot {
    Header,
    Payload,
}

#[derive(Clone, Default)]
struct Slot {
    durable: Option<Scanned>,
    written: Option<Scanned>,
    rot: Option<Rot>,
}

pub(super) struct Chain {
    rng: Rng,
    volumes: [Volume; VOLUMES],
    attachments: u32,
    medium: Vec<[Slot; BATCHES as usize]>,
    segments: Segments,
    run: u64,
    /// Hash of the last batch.
    before: u64,
    next: u64,
    last_said: ([(u32, u64, u64); VOLUMES], Oldest),
    /// Copies that are not durable: the parked generation, the volume, its attachment number and the sequences.
    copies: Vec<(u64, usize, u32, Vec<u64>)>,
    rots: u32,
    over: bool,
    fault: Option<Planted>,
}

fn hash(link: &Link) -> u64 {
    let mix = |h: u64, v: u64| (h ^ v).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    [link.number, link.run, link.generation, link.before].into_iter().fold(7, mix)
}

impl Chain {
    pub(super) fn new(seed: u64, fault: Option<Planted>) -> Chain {
        let mut chain = Chain {
            rng: Rng::new(seed),
            volumes: Default::default(),
            attachments: VOLUMES as u32,
            medium: vec![Default::default(); SEGMENTS as usize],
            segments: Segments::new(config()),
            run: 1,
            before: 0,
            next: 1,
            last_said: Default::default(),
            copies: Vec::new(),
            rots: 0,
            over: false,
            fault,
        };
        chain.volumes.iter_mut().zip(1..).for_each(|(v, number)| v.attachment = number);
        chain.plant();
        chain
    }

    fn plant(&mut self) {
        #[cfg(feature = "planted")]
        self.segments.plant(Fault::of(self.fault));
    }

    fn planted(&self) -> Fault {
        #[cfg(feature = "planted")]
        {
            Fault::of(self.fault)
        }
        #[cfg(not(feature = "planted"))]
        {
            Fault::default()
        }
    }

    // ---- appending ----

    fn frontiers(&self) -> [(u32, u64, u64); VOLUMES] {
        let of = |v: &Volume| (v.attachment, v.frontier, v.truth.len() as u64);
        [of(&self.volumes[0]), of(&self.volumes[1])]
    }

    fn frontier(&self) -> Frontier {
        let mut volumes: Vec<VolumeFrontier> = self
            .frontiers()
            .iter()
            .map(|&(attachment, frontier, last)| VolumeFrontier {
                attachment,
                frontier,
                last,
                marker: 0,
                unreadable: Vec::new(),
            })
            .collect();
        volumes.sort_by_key(|v| v.attachment);
        let Oldest { generation, batch } = self.segments.oldest();
        Frontier { oldest_generation: generation, oldest_batch: batch, volumes }
    }

    /// Writes a batch: `records` are volume, sequence and block.
    fn append(&mut self, purpose: Purpose, records: &[(usize, u64, u64)], front: bool) -> bool {
        let n = records.len() as u32;
        let Some(placed) = self.segments.place(purpose, ONE, ONE, n) else { return false };
        let frontier = (front || placed.opens).then(|| self.frontier());
        if let Some(frontier) = &frontier {
            let Frontier { oldest_generation: generation, oldest_batch: batch, .. } = *frontier;
            self.segments.says(placed.number);
            self.last_said = (self.frontiers(), Oldest { generation, batch });
        }
        let link = Link {
            number: placed.number,
            run: self.run,
            generation: placed.generation,
            hash: 0,
            before: self.before,
            known: placed.known,
        };
        let link = Link { hash: hash(&link), ..link };
        self.before = link.hash;
        let entries =
            records.iter().map(|&(v, sequence, block)| self.entry(v, sequence, block, true));
        let entries = entries.collect();
        for &(v, sequence, _) in records {
            self.volumes[v].place.insert(sequence, (placed.number, None));
        }
        self.put(
            placed,
            Scanned {
                link,
                parked: 0,
                segment: placed.segment,
                end: placed.at + 1,
                footer: 0,
                entries,
                frontier,
            },
        );
        true
    }

    fn put(&mut self, placed: Placed, batch: Scanned) {
        self.medium[placed.segment as usize][placed.at as usize].written = Some(batch);
    }

    fn entry(&self, v: usize, sequence: u64, block: u64, readable: bool) -> Entry {
        let record = Record {
            attachment: self.volumes[v].attachment,
            generation: 1,
            sequence,
            dependency: 0,
            offset: block,
            length: 1,
            kind: Kind::Write,
            flags: Flags { unreadable: !readable, ..Flags::default() },
        };
        // What is written is the number of the write.
        let place = self.volumes[v].truth.get(sequence as usize - 1).map_or(self.next, |t| t.1);
        Entry { record, place, readable: true, sums: 0 }
    }

    fn write(&mut self) {
        let mut new: Vec<(usize, u64, u64, u64)> = Vec::new();
        for _ in 0..self.rng.below(2) + 1 {
            let (v, block) = (self.rng.below(VOLUMES as u64) as usize, self.rng.below(BLOCKS));
            let before = new.iter().filter(|r| r.0 == v).count();
            new.push((v, (self.volumes[v].truth.len() + before) as u64 + 1, block, 0));
        }
        for record in &mut new {
            record.3 = self.next;
            self.next += 1;
        }
        // The truth first, for what is written; taken back if there is no room.
        new.iter().for_each(|r| self.volumes[r.0].truth.push((r.2, r.3)));
        let records: Vec<(usize, u64, u64)> = new.iter().map(|r| (r.0, r.1, r.2)).collect();
        if !self.append(Purpose::Clients, &records, false) {
            new.iter().for_each(|r| {
                self.volumes[r.0].truth.pop();
            });
        }
    }

    fn note(&mut self) {
        let news = (self.frontiers(), self.segments.oldest());
        if news != self.last_said && self.segments.last() > 0 {
            self.append(Purpose::Frontier, &[], true);
        }
    }

    fn flush(&mut self) {
        for batch in self.segments.written() + 1..=self.segments.last() {
            self.segments.ended(batch);
        }
        for slot in self.medium.iter_mut().flatten() {
            if let Some(batch) = slot.written.take() {
                *slot = Slot { durable: Some(batch), written: None, rot: None };
            }
        }
        let upto = self.segments.flush_begins();
        self.segments.flushed(upto);
        for v in &mut self.volumes {
            v.promised = v.truth.len() as u64;
        }
        for (generation, v, attachment, sequences) in std::mem::take(&mut self.copies) {
            self.take_place(generation, v, attachment, &sequences);
        }
    }

    /// A parked copy is durable, and takes its original's place.
    fn take_place(&mut self, generation: u64, v: usize, attachment: u32, sequences: &[u64]) {
        if self.volumes[v].attachment != attachment {
            return;
        }
        for sequence in sequences {
            match self.volumes[v].place.get_mut(sequence) {
                Some(place) if place.1.is_none() => {
                    let batch = std::mem::replace(place, (0, Some(generation))).0;
                    self.segments.let_go(batch);
                }
                _ => self.segments.let_go_parked(generation, Some(1)),
            }
        }
    }

    // ---- destaging and parking ----

    /// The record as it can be read, if it can.
    fn read(&self, v: usize, sequence: u64) -> Option<u64> {
        let &(batch, parked) = self.volumes[v].place.get(&sequence)?;
        let attachment = self.volumes[v].attachment;
        let is = |slot: &&Slot| {
            let found = slot.written.as_ref().or(slot.durable.as_ref());
            found.is_some_and(|b| match parked {
                Some(generation) => b.parked == attachment && b.link.generation == generation,
                None => b.parked == 0 && b.link.number == batch && b.link.run <= self.run,
            } && b.entries.iter().any(|e| e.record.sequence == sequence && e.record.attachment == attachment))
        };
        let slot = self.medium.iter().flatten().filter(is).max_by_key(|slot| {
            slot.written.as_ref().or(slot.durable.as_ref()).map(|b| (b.link.run, b.link.generation))
        })?;
        let batch = slot.written.as_ref().or(slot.durable.as_ref())?;
        let entry = batch
            .entries
            .iter()
            .find(|e| e.record.sequence == sequence && e.record.attachment == attachment)?;
        (slot.rot.is_none() && !entry.record.flags.unreadable).then_some(entry.place)
    }

    fn destage(&mut self) {
        let v = self.rng.below(VOLUMES as u64) as usize;
        let sequence = self.volumes[v].frontier + 1;
        let volume = &self.volumes[v];
        if volume.away || sequence > volume.truth.len() as u64 {
            return;
        }
        let Some(&(batch, parked)) = volume.place.get(&sequence) else { return };
        if parked.is_none() && batch > self.segments.durable() {
            return;
        }
        // What cannot be read stops it.
        let Some(value) = self.read(v, sequence) else { return };
        let block = volume.truth[sequence as usize - 1].0;
        self.volumes[v].store[block as usize] = value;
        self.volumes[v].frontier = sequence;
        // The store has it durably: here in one step.
        match self.volumes[v].place.remove(&sequence) {
            Some((_, Some(generation))) => self.segments.let_go_parked(generation, Some(1)),
            Some((batch, None)) => self.segments.let_go(batch),
            None => {}
        }
    }

    fn park(&mut self) {
        let Some(batches) = self.segments.to_park() else { return };
        for v in 0..VOLUMES {
            let volume = &self.volumes[v];
            if !volume.away {
                continue;
            }
            let held = |(&sequence, &(batch, parked)): (&u64, &(u64, Option<u64>))| {
                (parked.is_none() && batches.contains(&batch) && sequence > volume.frontier)
                    .then_some(sequence)
            };
            let sequences: Vec<u64> = volume.place.iter().filter_map(held).collect();
            let attachment = volume.attachment;
            let waits = self.copies.iter().any(|copy| copy.1 == v && copy.2 == attachment);
            if sequences.is_empty() || waits {
                continue;
            }
            for two in sequences.chunks(2) {
                let Some(placed) = self.segments.park(attachment, ONE, two.len() as u32) else {
                    return;
                };
                let entries = two.iter().map(|&sequence| {
                    let block = self.volumes[v].truth[sequence as usize - 1].0;
                    let readable = self.read(v, sequence).is_some();
                    let entry = self.entry(v, sequence, block, readable);
                    match self.fault {
                        // What rotted, under a fresh checksum.
                        Some(Planted::DamageParkedAsData) if !readable => {
                            Entry { place: u64::MAX, ..self.entry(v, sequence, block, true) }
                        }
                        _ => entry,
                    }
                });
                let entries: Vec<Entry> = entries.collect();
                let link = Link {
                    number: placed.number,
                    run: self.run,
                    generation: placed.generation,
                    hash: 0,
                    before: 0,
                    known: 0,
                };
                let batch = Scanned {
                    link: Link { hash: hash(&link), ..link },
                    parked: attachment,
                    segment: placed.segment,
                    end: placed.at + 1,
                    footer: 0,
                    entries,
                    frontier: None,
                };
                self.put(placed, batch);
                if self.fault == Some(Planted::CopyNotAwaited) {
                    self.take_place(placed.generation, v, attachment, two);
                    continue;
                }
                self.copies.push((placed.generation, v, attachment, two.to_vec()));
            }
        }
    }

    fn attach_anew(&mut self) {
        let v = self.rng.below(VOLUMES as u64) as usize;
        self.attachments += 1;
        let gone = std::mem::replace(
            &mut self.volumes[v],
            Volume { attachment: self.attachments, ..Volume::default() },
        );
        for (batch, parked) in gone.place.into_values() {
            match parked {
                Some(generation) => self.segments.let_go_parked(generation, Some(1)),
                None => self.segments.let_go(batch),
            }
        }
        let (mine, others) = std::mem::take(&mut self.copies)
            .into_iter()
            .partition(|c: &(u64, usize, u32, Vec<u64>)| c.2 == gone.attachment);
        self.copies = others;
        let mine: Vec<(u64, usize, u32, Vec<u64>)> = mine;
        for (generation, _, _, sequences) in mine {
            self.segments.let_go_parked(generation, Some(sequences.len() as u32));
        }
    }

    /// In what a later durable batch knows durable, or in a parked copy: other rot looks like a torn tail.
    fn rot(&mut self) {
        if self.rots >= 2 {
            return;
        }
        // What a void batch knew is forgotten with it.
        let whole = self.medium.iter().flatten().filter(|slot| slot.rot.is_none());
        let links: Vec<Link> = whole
            .filter_map(|slot| slot.durable.as_ref().filter(|b| b.parked == 0))
            .map(|batch| batch.link)
            .collect();
        let Oldest { generation, batch } = self.segments.oldest();
        let chain = chain::read(&links, generation, batch);
        let known = chain.batches.iter().map(|&i| links[i].known).max().unwrap_or(0);
        let oldest = self.segments.oldest().generation;
        let parked: Vec<u64> = self.segments.parked().iter().map(|p| p.generation).collect();
        let used = |b: &Scanned| match b.parked {
            0 => b.link.generation >= oldest && b.link.number <= known,
            _ => parked.contains(&b.link.generation),
        };
        let places: Vec<(usize, usize)> = (0..SEGMENTS as usize)
            .flat_map(|s| (0..BATCHES as usize).map(move |i| (s, i)))
            .filter(|&(s, i)| {
                let slot = &self.medium[s][i];
                slot.rot.is_none()
                    && slot.written.is_none()
                    && slot.durable.as_ref().is_some_and(used)
            })
            .collect();
        if !places.is_empty() {
            let (s, i) = places[self.rng.below(places.len() as u64) as usize];
            let how = if self.rng.chance(0.5) { Rot::Header } else { Rot::Payload };
            self.medium[s][i].rot = Some(how);
            self.rots += 1;
        }
    }

    // ---- a start ----

    fn power_cut(&mut self) -> Result<(), String> {
        for slot in self.medium.iter_mut().flatten() {
            let Some(written) = slot.written.take() else { continue };
            match self.rng.below(4) {
                0 | 1 => *slot = Slot { durable: Some(written), written: None, rot: None },
                2 => {}
                _ => *slot = Slot::default(),
            }
        }
        let mut scanned = Vec::new();
        for segment in &self.medium {
            // The segment's header comes with its first batch, and names its generation.
            let Some(first) = &segment[0].durable else { continue };
            let generation = first.link.generation;
            for slot in segment.iter().filter(|slot| slot.rot != Some(Rot::Header)) {
                let Some(batch) = slot.durable.as_ref().filter(|b| b.link.generation == generation)
                else {
                    continue;
                };
                let mut batch = batch.clone();
                if slot.rot == Some(Rot::Payload) {
                    batch.frontier = None;
                    batch.entries.iter_mut().for_each(|e| e.readable = false);
                }
                scanned.push(batch);
            }
        }
        let numbers: Vec<(u32, u64)> = self.volumes.iter().map(|v| (v.attachment, 0)).collect();
        let recovered = recover(&scanned, &numbers, self.planted());
        for v in 0..VOLUMES {
            self.check(v, &recovered)?;
        }
        if !self.over {
            self.resume(recovered);
        }
        Ok(())
    }

    fn check(&mut self, v: usize, recovered: &Recovered) -> Result<(), String> {
        let volume = &self.volumes[v];
        let found = &recovered.volumes[&volume.attachment];
        if found.gap {
            if self.rots == 0 {
                return Err(format!("volume {v} is called damaged, and nothing rotted"));
            }
            // It refuses reads: the operator decides.
            self.over = true;
            return Ok(());
        }
        if found.last < volume.promised {
            return Err(format!("volume {v}: promised {}, found {}", volume.promised, found.last));
        }
        if found.last > volume.truth.len() as u64 {
            return Err(format!("volume {v}: {} records, of {}", found.last, volume.truth.len()));
        }
        for block in 0..BLOCKS {
            let want = volume.truth[..found.last as usize]
                .iter()
                .rev()
                .find(|t| t.0 == block)
                .map_or(0, |t| t.1);
            let over = found.records.iter().rev().find(|d| d.entry.record.offset == block);
            let got = match over {
                Some(d) if d.entry.record.flags.unreadable || !d.entry.readable => None,
                Some(d) => Some(d.entry.place),
                None => Some(volume.store[block as usize]),
            };
            match got {
                None if self.rots == 0 => {
                    return Err(format!(
                        "volume {v}, block {block}: unreadable, and nothing rotted"
                    ));
                }
                Some(got) if got != want => {
                    return Err(format!(
                        "volume {v}, block {block}: holds {got}, the prefix has {want}"
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn resume(&mut self, recovered: Recovered) {
        let Recovered { chain, volumes, live, parked, generation } = recovered;
        for volume in &mut self.volumes {
            let found = &volumes[&volume.attachment];
            volume.truth.truncate(found.last as usize);
            (volume.promised, volume.frontier) = (found.last, found.frontier);
            let place = |d: &larder_engine::block::writeback::recovery::Dirty| {
                (d.entry.record.sequence, (d.batch, d.parked))
            };
            volume.place = found.records.iter().map(place).collect();
        }
        self.segments = Segments::found(config(), &live, &parked, (generation, chain.next - 1));
        self.plant();
        self.run += 1;
        self.before = chain.before;
        self.copies.clear();
        self.last_said = Default::default();
    }

    /// Both stores are back: everything is destaged, and the log empties.
    fn drain(&mut self) -> Result<(), String> {
        self.volumes.iter_mut().for_each(|v| v.away = false);
        for _ in 0..60 {
            (0..8).for_each(|_| self.destage());
            self.note();
            self.flush();
        }
        let dirty = self.volumes.iter().any(|v| v.frontier < v.truth.len() as u64);
        if self.rots == 0 && (dirty || self.segments.free() < 3) {
            return Err(format!("a full log hangs, dirty: {dirty}: {:?}", self.segments));
        }
        Ok(())
    }

    pub(super) fn play(&mut self, steps: u64) -> Result<(), String> {
        for _ in 0..steps {
            match self.rng.below(1_000) {
                0..270 => self.write(),
                270..385 => self.flush(),
                385..615 => self.destage(),
                615..700 => self.note(),
                700..800 => self.park(),
                800..830 => {
                    let v = self.rng.below(VOLUMES as u64) as usize;
                    self.volumes[v].away = !self.volumes[v].away;
                }
                830..836 => self.rot(),
                836..852 => self.power_cut()?,
                852..860 => self.attach_anew(),
                _ => {}
            }
            if self.over {
                return Ok(());
            }
        }
        self.drain()
    }
}

fn config() -> Config {
    Config { segments: SEGMENTS, room: BATCHES, footer: (0, 1), reserve: 2 }
}
