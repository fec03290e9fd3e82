//! A log that rots: payload that cannot be read any more, reads that fail for a while, and batches whose headers and footers are gone.
//!
//! Payload rots only where a later batch that is durable knows it durable, or in a parked copy: other rot cannot be told from a torn tail.

use super::*;
use larder_engine::block::writeback::recovery::Recovered;
use larder_engine::block::writeback::scan::Scan;
use larder_format::block::write_log::chain;

impl World {
    /// Some payload of a dirty record rots.
    pub(super) fn rot(&mut self) {
        let scan = self.scan_durable();
        let main = scan.batches.iter().filter(|batch| batch.parked == 0);
        let known = chain::known_durable(main.map(|batch| &batch.link));
        let mut some: Vec<(usize, u64, u64, u64)> = Vec::new();
        let all = scan.batches.unpacked();
        let counts = all.iter().filter(|b| b.parked != 0 || b.link.number <= known);
        for entry in counts.flat_map(|batch| &batch.entries) {
            let record = &entry.record;
            let Some(v) = self.volumes.iter().position(|v| v.attachment == record.attachment)
            else {
                continue;
            };
            let number = self.volumes[v].log.get(record.sequence as usize - 1).copied();
            let frontier = self.frontier(v);
            if let Some(number) = number.filter(|_| record.sequence > frontier)
                && self.writes[number as usize].kind == Kind::Write
                && self.has(v, number, AT + entry.place)
            {
                some.push((v, number, AT + entry.place, record.length));
            }
        }
        if some.is_empty() {
            return;
        }
        let (v, number, place, length) = some[self.rng.below(some.len() as u64) as usize];
        let at = place + self.rng.below(length);
        self.says(|| format!("v{v}: {number} rots at {at}"));
        self.device.rot(at);
        self.rotten.insert(number);
    }

    pub(super) fn frontier(&self, v: usize) -> u64 {
        let status = self.log.status(self.now, self.volumes[v].attachment);
        status.map_or(0, |status| status.positions[0])
    }

    /// The device has a write here, durably and as it is seen.
    fn has(&self, v: usize, number: u64, at: u64) -> bool {
        let sectors = self.writes[number as usize].sectors.clone();
        let bytes = ((sectors.end - sectors.start) * SECTOR) as usize;
        [self.device.read(at, bytes), self.device.durable(at, bytes)].iter().all(|bytes| {
            let mut each = bytes.chunks(SECTOR as usize).zip(sectors.clone());
            each.all(|(bytes, sector)| filled(v, sector, bytes) == Some(number))
        })
    }

    /// Whether a piece of the log, which has bytes of this record, is what was written. Only what rots is not, or what is not given for once.
    pub(super) fn reads(&mut self, v: usize, sequence: u64, piece: &Piece) -> Result<bool, String> {
        let number = self.volumes[v].log.get(sequence as usize - 1).copied().unwrap_or(0);
        let bytes = self.device.read(piece.place, piece.bytes as usize);
        if let Err(which) = pieces::check(piece.sums.as_slice(), 0, bytes) {
            return match self.rotten.contains(&number) {
                true => Ok(false),
                false => Err(format!("v{v}: piece {which} of {piece:?} does not verify")),
            };
        }
        if self.setup.rots && self.rng.chance(0.02) {
            self.says(|| format!("v{v}: {number} is not given"));
            let misses = self.misses.entry(number).or_default();
            *misses += 1;
            if *misses == 4 {
                self.rotten.insert(number);
            }
            return Ok(false);
        }
        self.misses.remove(&number);
        Ok(true)
    }

    /// Whether something rots of what a sector holds: of this write, or one that is newer.
    pub(super) fn is_rotten(&self, v: usize, sector: u64, fresh: u64) -> bool {
        let from = self.writes[fresh as usize].sequence.max(1) as usize - 1;
        let mut newer = self.volumes[v].log.iter().skip(from);
        newer.any(|n| self.rotten.contains(n) && self.writes[*n as usize].sectors.contains(&sector))
    }

    /// What cannot be read is said to be so: of each sector of a volume whether reads of it fail.
    fn failing(&mut self, v: usize) -> Result<Vec<bool>, String> {
        let all = self.volumes[v].store.sectors();
        let mut stretches = Vec::new();
        self.log.look(self.volumes[v].attachment, 0..all * SECTOR, |found| stretches.push(found));
        let mut fails = Vec::new();
        for found in stretches {
            let sectors = clients::sectors_of(&found);
            let bad = matches!(found, Found::Unreadable(..));
            if let Found::Logged(piece) = &found {
                let mut asks = Asks::default();
                self.log.unpin(self.now, piece.pin, &mut asks);
                self.carry(asks)?;
            }
            fails.extend(sectors.map(|_| bad));
        }
        Ok(fails)
    }

    /// Whoever is told that something cannot be read writes it again.
    pub(super) fn mend(&mut self) -> Checked {
        for v in 0..self.volumes.len() {
            if self.volumes[v].over || self.volumes[v].aside {
                continue;
            }
            let fails = self.failing(v)?;
            let said = self.log.status(self.now, self.volumes[v].attachment);
            let said = said.map_or(0, |status| status.unreadable);
            let bytes = fails.iter().filter(|fails| **fails).count() as u64 * SECTOR;
            if said != bytes {
                return Err(format!("v{v}: {bytes} bytes cannot be read, {said} are said"));
            }
            for (sector, _) in (0..).zip(fails).filter(|(_, fails)| *fails) {
                self.mended += 1;
                self.issue_of(v, sector..sector + 1, Kind::Write, false)?;
            }
        }
        Ok(())
    }

    /// Something comes to the store of a volume: where that alone is no image until more of it is there, the marker says so.
    pub(super) fn joins(&mut self, v: usize) -> Checked {
        let status = self.log.status(self.now, self.volumes[v].attachment);
        let joins = status.is_some_and(|status| status.joins);
        if joins && self.frontier(v) >= self.volumes[v].said_joins {
            return Err(format!("v{v}: the store is no image, and its marker does not say so"));
        }
        Ok(())
    }

    /// The marker of a volume says this durably.
    pub(super) fn is_said(&mut self, v: usize, said: Said, frontier: u64) {
        let volume = &mut self.volumes[v];
        match said {
            Said::Joins { last, closed } => {
                volume.said_joins = last;
                if closed {
                    volume.said = Some((Said::Closed, frontier));
                }
            }
            _ => volume.said = Some((said, frontier)),
        }
    }

    /// Whether it is said that what cannot be read stops a volume.
    pub(super) fn is_stopped(&self, v: usize) -> bool {
        let status = self.log.status(self.now, self.volumes[v].attachment);
        self.setup.rots && status.is_some_and(|status| status.is_stopped)
    }

    /// Something of it cannot be read, which is read again from time to time.
    pub(super) fn rereads(&self, v: usize) -> bool {
        let status = self.log.status(self.now, self.volumes[v].attachment);
        self.setup.rots && status.is_some_and(|status| status.unreadable > 0)
    }

    /// What a start after a power cut would read of the log.
    pub(super) fn scan_durable(&self) -> Scan {
        self.scan_with(|at, bytes| bytes.copy_from_slice(self.device.durable(at, bytes.len())))
    }
}

impl World {
    /// A batch that is known durable cannot be read any more, at this start: its header, and mostly its segment's footer, rot or are not given. Which
    /// batches are not found for that.
    pub(super) fn damage(&mut self) -> BTreeSet<u64> {
        let before = self.scan();
        let main = || before.batches.iter().filter(|batch| batch.parked == 0);
        let known = chain::known_durable(main().map(|batch| &batch.link));
        let some: Vec<_> = main().filter(|batch| batch.link.number <= known).collect();
        if some.is_empty() {
            return BTreeSet::new();
        }
        let batch = some[self.rng.below(some.len() as u64) as usize];
        let of = (batch.segment, batch.link.generation);
        let mine = main().filter(|b| (b.segment, b.link.generation) == of);
        let at = mine.filter(|b| b.link.number < batch.link.number).map(|b| b.end).max();
        let bytes = u64::from(self.config.geometry.bytes());
        let first = AT + u64::from(batch.segment) * bytes;
        let at = first + u64::from(self.config.geometry.sector() + at.unwrap_or(0));
        let numbers = |scan: &Scan| -> BTreeSet<u64> {
            scan.batches.iter().filter(|b| b.parked == 0).map(|b| b.link.number).collect()
        };
        let footer = self.rng.chance(0.8).then(|| first + bytes - 1 - self.rng.below(96));
        let given = self.rng.chance(0.7);
        let header = at + self.rng.below(120);
        let flip = |world: &mut World| match given {
            true => [Some(header), footer].iter().flatten().for_each(|&at| world.device.rot(at)),
            false if world.withheld.is_empty() => world.withheld = vec![at, first + bytes - 1],
            false => world.withheld.clear(),
        };
        flip(self);
        let after = self.scan();
        let left = chain::known_durable(
            after.batches.iter().filter(|batch| batch.parked == 0).map(|batch| &batch.link),
        );
        let lost: BTreeSet<u64> = numbers(&before).difference(&numbers(&after)).copied().collect();
        if lost.last().is_none_or(|&last| last > left) {
            // Nothing is lost, or it cannot be told from a torn tail.
            flip(self);
            return BTreeSet::new();
        }
        self.says(|| format!("batches {lost:?} are lost, rot: {given}, footer: {footer:?}"));
        lost
    }

    /// A start has found that batches are lost: a volume that may lack something is called damaged, and others have all that was promised.
    pub(super) fn found_damage(&mut self, found: &Recovered, scan: &Scan, weak: bool) -> Checked {
        for v in 0..self.volumes.len() {
            let mine = &found.volumes[&self.volumes[v].attachment];
            if mine.gap {
                self.gaps += 1;
                self.says(|| format!("v{v} is called damaged"));
                continue;
            }
            self.whole += 1;
            self.kept(v, found, weak)?;
        }
        self.config.run += 1;
        self.log = WriteLog::found(self.config, found, scan);
        self.plant();
        for v in 0..self.volumes.len() {
            let mine = &found.volumes[&self.volumes[v].attachment];
            if mine.gap {
                self.log.give_up_found(self.volumes[v].attachment, mine);
                continue;
            }
            // What lies beside what is not given is not given either; and of a record in a lost batch there may be a torn copy.
            let given = self.withheld.is_empty();
            let lost = mine.records.iter().filter(|r| !r.entry.readable);
            let lost = lost.filter(|r| !given || r.parked.is_some());
            let lost = lost.map(|r| self.volumes[v].log[r.entry.record.sequence as usize - 1]);
            self.rotten.extend(lost);
            self.attach(v, mine.frontier);
            self.log.recover(self.now, self.volumes[v].attachment, mine, scan);
            self.knows_marks(v, mine.frontier);
            self.volumes[v].may_hold = u64::MAX;
            self.check_start(v, mine.last)?;
        }
        self.ended = true;
        Ok(())
    }
}
