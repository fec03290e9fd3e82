//! Kills, power cuts, and what a start makes of the log.

use super::*;
use larder_engine::block::writeback::Fault as Planting;
use larder_engine::block::writeback::log::Attach;
use larder_engine::block::writeback::recovery::{Recovered, recover};
use larder_engine::block::writeback::scan::{ReadFailed, Scan, scan};
use larder_format::block::superblock::WriteLogArea;

impl World {
    pub(super) fn planted(&self) -> Planting {
        #[cfg(feature = "planted")]
        return Planting::of(self.setup.fault);
        #[cfg(not(feature = "planted"))]
        Planting::default()
    }

    pub(super) fn attach(&mut self, v: usize, frontier: u64) {
        let attach = self.attach_of(v, frontier);
        self.log.attach(self.now, attach);
        (self.volumes[v].begun, self.volumes[v].let_go) = (frontier, frontier);
        if self.volumes[v].aside {
            self.log.put_aside(self.volumes[v].attachment);
        }
    }

    pub(super) fn attach_of(&self, v: usize, frontier: u64) -> Attach {
        let volume = &self.volumes[v];
        Attach {
            attachment: volume.attachment,
            volume: Uuid([7; 16]),
            generation: 1,
            destage: volume.destage,
            bound: Some(volume.bound),
            age: volume.age,
            frontier,
            epoch: 0,
            marker: volume.marker,
            marked: true,
        }
    }

    /// Larder is killed, or the power is cut, and it starts again.
    pub(super) fn restart(&mut self, power: bool) -> Checked {
        self.says(|| (if power { "power cut" } else { "kill" }).to_owned());
        // What is under way comes in part, or not at all.
        let mut ios = std::mem::take(&mut self.ios);
        while !ios.is_empty() {
            let which = self.rng.below(ios.len() as u64) as usize;
            match ios.swap_remove(which) {
                Io::Write { write, bytes } => {
                    let part = self.device.part(&mut self.rng, bytes.len());
                    let some = self.rng.chance(0.6).then_some(part);
                    self.device.write(write.at, bytes, some);
                }
                Io::Flush { mark, .. } if self.rng.chance(0.5) => self.device.flush(mark, true),
                Io::Mark { volume, said, frontier } if self.rng.chance(0.5) => {
                    self.is_said(volume, said, frontier);
                    if said == Said::Clean {
                        self.check_over(volume)?;
                    }
                }
                Io::Store { volume, dirty, lies } if self.rng.chance(0.5) => {
                    self.joins(volume)?;
                    if let Some(Lies::Log(piece)) = &lies
                        && !self.reads(volume, dirty.sequence, piece)?
                    {
                        continue;
                    }
                    if lies.is_none() && dirty.holds == Holds::Bytes {
                        // It was parked as lost meanwhile.
                        continue;
                    }
                    for (sector, number) in self.destaged(volume, &dirty, lies.as_ref())? {
                        if self.uses_slots(volume) {
                            self.volumes[volume].slots.remove(&sector);
                        }
                        if self.rng.chance(0.7) {
                            self.volumes[volume].store.write(sector, number);
                        }
                    }
                }
                Io::FlushStore(volume) if self.rng.chance(0.5) => {
                    self.volumes[volume].store.flush()
                }
                _ => {}
            }
        }
        self.device.crash(&mut self.rng, power);
        // A log that failed has only what was promised.
        let weak = power || self.log.closed().is_some();
        if power {
            for v in 0..self.volumes.len() {
                if self.rng.chance(0.5) {
                    self.volumes[v].store.crash(&mut self.rng);
                    self.drop_slots(v);
                }
            }
        }
        self.ops.clear();
        self.marks.clear();
        self.volumes.iter_mut().for_each(|volume| volume.blocked.clear());
        self.start(weak)
    }

    fn start(&mut self, weak: bool) -> Checked {
        // Nothing depends on a footer, but that rot of what only it knows durable is told from a torn tail.
        for segment in 0..u64::from(self.config.segments) {
            if self.rng.chance(0.05) && !self.setup.rots {
                let end = AT + (segment + 1) * u64::from(self.config.geometry.bytes());
                self.device.rot(end - 1 - self.rng.below(96));
            }
        }
        let damage = self.setup.damages && self.starting.is_none() && self.rng.chance(0.5);
        let damaged = if damage { self.damage() } else { BTreeSet::new() };
        let scan = self.scan();
        let sealed = self.config.geometry.bytes() - self.config.geometry.sector();
        let by_footer = scan.batches.iter().filter(|batch| batch.end == sealed);
        self.sealed += by_footer.map(|b| b.link.generation).collect::<BTreeSet<u64>>().len() as u64;
        let numbers: Vec<(u32, u64)> = self.volumes.iter().map(|v| (v.attachment, 0)).collect();
        let found = recover(&scan.batches, &numbers, self.planted());
        self.says(|| format!("found {:?}, {:?}", found.chain.next, found.chain.damaged));
        for b in &scan.batches {
            self.says(|| {
                format!(
                    "{} run {} gen {} known {} seg {} hash {:x} before {:x}",
                    b.link.number,
                    b.link.run,
                    b.link.generation,
                    b.link.known,
                    b.segment,
                    b.link.hash,
                    b.link.before
                )
            });
        }
        let lost = found.chain.damaged.iter().flat_map(|lost| lost.start..lost.end);
        if lost.clone().any(|number| !damaged.contains(&number)) && damaged.is_empty() {
            return Err(format!("batches {:?} are called damaged", found.chain.damaged));
        }
        if self.volumes.iter().any(|volume| volume.said.is_some()) {
            return self.start_closed(&found, &scan);
        }
        if !damaged.is_empty() {
            return self.found_damage(&found, &scan, weak);
        }
        for v in 0..self.volumes.len() {
            self.kept(v, &found, weak)?;
        }
        self.config.run += 1;
        self.log = WriteLog::found(self.config, &found, &scan);
        self.plant();
        for v in 0..self.volumes.len() {
            let mine = &found.volumes[&self.volumes[v].attachment];
            self.attach(v, mine.frontier);
            self.log.recover(self.now, self.volumes[v].attachment, mine, &scan);
            self.knows_marks(v, mine.frontier);
            for &number in &self.volumes[v].log {
                self.writes[number as usize].at = Some(self.now);
            }
            let held =
                self.log.status(self.now, self.volumes[v].attachment).map_or(0, |s| s.held.0);
            self.volumes[v].may_hold = self.volumes[v].bound.max(held);
        }
        let last = |volume: &Volume| found.volumes[&volume.attachment].last;
        self.starting = Some(self.volumes.iter().map(last).collect());
        let mut asks = Asks::default();
        self.log.start(&mut asks);
        for v in 0..self.volumes.len() {
            let last = found.volumes[&self.volumes[v].attachment].last;
            self.check_start(v, last)?;
        }
        self.carry(asks)
    }

    /// The log hears the names of the marks that it has, and of that which the store has.
    pub(super) fn knows_marks(&mut self, v: usize, frontier: u64) {
        self.log.set_joins(self.volumes[v].attachment, self.volumes[v].said_joins);
        if let Some(mark) = self.mark_among(v, frontier) {
            self.log.had_mark(self.volumes[v].attachment, mark);
        }
        for (sequence, piece) in self.log.unnamed_marks(self.volumes[v].attachment) {
            let bytes = self.device.read(piece.place, piece.bytes as usize).to_vec();
            self.log.name_mark(self.volumes[v].attachment, sequence, &piece, &bytes);
        }
    }

    /// Of a volume's log that is left which was to be there.
    pub(super) fn kept(&mut self, v: usize, found: &Recovered, weak: bool) -> Checked {
        let volume = &self.volumes[v];
        let mine = &found.volumes[&volume.attachment];
        if mine.gap {
            return Err(format!("v{v} is called damaged"));
        }
        if mine.last > volume.log.len() as u64 {
            return Err(format!("v{v}: {} records are found, of {}", mine.last, volume.log.len()));
        }
        self.says(|| format!("v{v}: frontier {}, last {}", mine.frontier, mine.last));
        for &number in &volume.log[mine.last as usize..] {
            let write = &self.writes[number as usize];
            let flushed = write.done <= volume.level || write.fua && write.answered != NEVER;
            if flushed || !weak && write.done != NEVER {
                return Err(format!("v{v}: {number} was promised and is lost"));
            }
        }
        // Nothing is promised of those any more. Before the start ends they may be found all the same.
        for &number in &self.volumes[v].log[mine.last as usize..] {
            let write = &mut self.writes[number as usize];
            (write.answered, write.done) = (NEVER, NEVER);
        }
        Ok(())
    }

    /// What a start has found is durable, and everybody may see it: what it has not found is gone for good.
    pub(super) fn started(&mut self) {
        if !self.log.is_started() {
            return;
        }
        let Some(found) = self.starting.take() else { return };
        self.says(|| "started".to_owned());
        self.tick += 1;
        for (volume, last) in self.volumes.iter_mut().zip(found) {
            volume.log.truncate(last as usize);
            volume.placed = volume.placed.min(volume.log.len());
            volume.level = self.tick;
            for &number in &volume.log {
                let write = &mut self.writes[number as usize];
                write.done = write.done.min(self.tick);
            }
        }
    }

    /// The volume is a prefix of its log.
    pub(super) fn check_start(&mut self, v: usize, last: u64) -> Checked {
        let all = self.volumes[v].store.sectors();
        let mut stretches = Vec::new();
        self.log.look(self.volumes[v].attachment, 0..all * SECTOR, |found| stretches.push(found));
        let mut sector = 0;
        for found in stretches {
            let numbers: Vec<Option<u64>> = match &found {
                Found::Clean(_, len) => (sector..sector + len / SECTOR)
                    .map(|sector| Some(self.below(v, sector)))
                    .collect(),
                Found::Zeros(_, len) => (0..len / SECTOR).map(|_| None).collect(),
                Found::Kept(..) => return Err(format!("v{v}: {found:?}")),
                Found::Unreadable(_, len) => {
                    for sector in sector..sector + len / SECTOR {
                        let want = self.last(v, sector, last);
                        if !self.is_rotten(v, sector, want) {
                            return Err(format!("v{v}: {found:?}, and {want} does not rot"));
                        }
                    }
                    sector += len / SECTOR;
                    continue;
                }
                Found::Logged(piece) => {
                    let want = self.last(v, piece.at / SECTOR, last);
                    let reads = self.reads(v, self.writes[want as usize].sequence, piece)?;
                    let numbers = if reads { self.piece(v, piece)? } else { Vec::new() };
                    let mut asks = Asks::default();
                    self.log.unpin(self.now, piece.pin, &mut asks);
                    self.carry(asks)?;
                    if !reads {
                        sector += piece.len / SECTOR;
                        continue;
                    }
                    numbers.into_iter().map(Some).collect()
                }
            };
            for number in numbers {
                let want = self.last(v, sector, last);
                let right = match number {
                    Some(number) => number == want,
                    None => self.writes[want as usize].kind != Kind::Write,
                };
                if !right {
                    return Err(format!(
                        "v{v}: sector {sector} holds {number:?}, the prefix has {want}"
                    ));
                }
                sector += 1;
            }
        }
        Ok(())
    }

    /// What a start reads of the log.
    pub(super) fn scan(&self) -> Scan {
        self.scan_with(|at, bytes| bytes.copy_from_slice(self.device.read(at, bytes.len())))
    }

    pub(super) fn scan_with(&self, read: impl Fn(u64, &mut [u8])) -> Scan {
        let Config { at, geometry, segments, .. } = self.config;
        let area = WriteLogArea { at, geometry, segments };
        scan(&area, CACHE, &mut |at, bytes| {
            let range = at..at + bytes.len() as u64;
            if self.withheld.iter().any(|at| range.contains(at)) {
                return Err(ReadFailed);
            }
            read(at, bytes);
            Ok(())
        })
    }
}
