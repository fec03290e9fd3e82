//! What must hold.

use super::*;
use larder_engine::block::writeback::recovery::recover;

impl World {
    /// A write's place in its volume's log; 0 of what was there before all.
    pub(super) fn place(&self, v: usize, number: u64) -> Result<u64, String> {
        let Some(write) = self.writes.get(number as usize) else {
            return Err(format!("v{v}: there is no write {number}"));
        };
        let sequence = write.sequence;
        let there = sequence.checked_sub(1).and_then(|at| self.volumes[v].log.get(at as usize));
        if number > 0 && there != Some(&number) {
            return Err(format!("v{v}: write {number} is back, which was lost before"));
        }
        Ok(sequence)
    }

    /// The last write of a sector among the first so many of the log.
    pub(super) fn last(&self, v: usize, sector: u64, most: u64) -> u64 {
        let log = &self.volumes[v].log;
        let log = &log[..log.len().min(most as usize)];
        let has = |n: &&u64| self.writes[**n as usize].sectors.contains(&sector);
        log.iter().rev().find(has).copied().unwrap_or(0)
    }

    /// The sectors of a stretch that goes to the store, each with the write that fills it.
    pub(super) fn destaged(
        &self,
        v: usize,
        dirty: &Dirty,
        lies: Option<&Lies<Bytes>>,
    ) -> Result<Vec<(u64, u64)>, String> {
        let sectors = dirty.at / SECTOR..(dirty.at + dirty.len) / SECTOR;
        let whose = self.volumes[v].log.get(dirty.sequence as usize - 1).copied();
        let whose = whose.ok_or_else(|| format!("v{v}: {dirty:?} is of no write"))?;
        let zeros = self.writes[whose as usize].kind != Kind::Write;
        match (dirty.holds, lies) {
            (Holds::Bytes, Some(lies)) if !zeros => {
                let numbers = match lies {
                    Lies::Log(piece) => self.piece(v, piece)?,
                    Lies::Here(kept) => self.kept_in_memory(v, (dirty.at, dirty.len), kept)?,
                };
                if numbers.iter().any(|n| *n != whose) || numbers.len() as u64 * SECTOR != dirty.len
                {
                    return Err(format!("v{v}: {dirty:?} of {whose} has bytes of {numbers:?}"));
                }
            }
            (Holds::Zeros | Holds::Trimmed, None) if zeros => {}
            other => return Err(format!("v{v}: {dirty:?} of {whose} holds {other:?}")),
        }
        Ok(sectors.map(|sector| (sector, whose)).collect())
    }

    /// What is on its way to stores takes no more memory than there is, but for one stretch of each volume; and what is taken is given back.
    fn check_memory(&self) -> Checked {
        let of = |io: &Io| match io {
            Io::Store { dirty, .. } => Some(dirty.memory()),
            _ => None,
        };
        let mut sum = 0;
        let mut largest = vec![0; self.volumes.len()];
        for io in &self.ios {
            if let (Some(bytes), Io::Store { volume, .. }) = (of(io), io) {
                sum += bytes;
                largest[*volume] = largest[*volume].max(bytes);
            }
        }
        let (taken, firsts): (u64, u64) = (self.log.memory(), largest.iter().sum());
        if taken != sum || sum.saturating_sub(firsts) > self.config.memory {
            let most = self.config.memory;
            return Err(format!("{sum} bytes go to stores, {taken} are taken, {most} may be"));
        }
        Ok(())
    }

    /// What a volume has let go of is in its store as a start would find the log after a power cut now.
    pub(super) fn check_said(&mut self) -> Checked {
        if self.log.closed().is_some() || !self.log.is_started() {
            return Ok(());
        }
        let mut rose = false;
        for volume in &mut self.volumes {
            let status = self.log.status(self.now, volume.attachment);
            let frontier = status.map_or(0, |status| status.positions[0]);
            rose |= frontier > volume.let_go;
            volume.let_go = volume.let_go.max(frontier);
        }
        // All of the log is read for it.
        self.looks += u64::from(rose);
        if !rose || self.setup.fault.is_none() && !self.looks.is_multiple_of(8) {
            return Ok(());
        }
        let numbers: Vec<(u32, u64)> = self.volumes.iter().map(|v| (v.attachment, 0)).collect();
        let found = recover(&self.scan_durable().batches, &numbers, self.planted());
        for (v, volume) in self.volumes.iter().enumerate() {
            let status = self.log.status(self.now, volume.attachment);
            let frontier = status.map_or(0, |status| status.positions[0]);
            let said = found.volumes[&volume.attachment].frontier;
            if said < frontier && frontier > volume.begun {
                return Err(format!("v{v}: all up to {frontier} is let go, {said} is durable"));
            }
        }
        Ok(())
    }

    /// A volume holds no more of the log than it may, but for what is not answered.
    pub(super) fn check_held(&mut self) -> Checked {
        self.check_memory()?;
        for v in 0..self.volumes.len() {
            if self.volumes[v].aside {
                continue;
            }
            let Some(status) = self.log.status(self.now, self.volumes[v].attachment) else {
                continue;
            };
            let [frontier, acknowledged, promised, last] = status.positions;
            if !(frontier <= acknowledged && promised <= acknowledged && acknowledged <= last) {
                return Err(format!("v{v}: positions {:?}", status.positions));
            }
            let stored = self.log.stored_mark(self.volumes[v].attachment).map(str::to_owned);
            // With nothing but marks behind the frontier those that are durable count too.
            let behind = &self.volumes[v].log[frontier as usize..acknowledged as usize];
            let marks = behind.iter().take_while(|n| self.writes[**n as usize].kind == Kind::Mark);
            let upto = frontier..=frontier + marks.count() as u64;
            let is = || upto.clone().any(|upto| stored == self.mark_among(v, upto));
            if self.starting.is_none() && !is() {
                return Err(format!("v{v}: the store has mark {stored:?}, as is said"));
            }
            let room = |n: &u64| {
                let write = &self.writes[*n as usize];
                let bytes = (write.sectors.end - write.sectors.start) * SECTOR;
                let bytes = if write.kind == Kind::Write { bytes } else { 0 };
                (bytes + 64 + pieces::count(bytes) * 4).max(4096)
            };
            let log = &self.volumes[v].log;
            let answered = frontier as usize..acknowledged as usize;
            let held: u64 = log[answered.clone()].iter().map(room).sum();
            if status.held.0 != log[frontier as usize..last as usize].iter().map(room).sum::<u64>()
            {
                return Err(format!("v{v}: it says that it holds {}", status.held.0));
            }
            // One record it may always hold.
            if held > self.volumes[v].may_hold && answered.len() > 1 {
                return Err(format!("v{v}: it holds {held} of {}", self.volumes[v].may_hold));
            }
            let volume = &mut self.volumes[v];
            volume.may_hold = volume.may_hold.min(held).max(volume.bound);
        }
        Ok(())
    }

    /// The cache device is gone: what do the stores hold? Nothing else changes, so it can be asked at any time.
    pub(super) fn lose_cache(&mut self) -> Checked {
        self.lost += 1;
        for v in 0..self.volumes.len() {
            let mut store = self.volumes[v].store.clone();
            if self.loses {
                // As it is, with whatever has come of what is under way, and behind a power cut of its own.
                self.check_lost(v, &store)?;
                self.comes_in_part(v, &mut store);
                self.check_lost(v, &store)?;
            }
            if self.loses || self.rng.chance(0.5) {
                store.crash(&mut self.rng);
            }
            self.check_lost(v, &store)?;
        }
        Ok(())
    }

    fn check_lost(&self, v: usize, store: &Store) -> Checked {
        self.check_image(v, store).map_err(|why| format!("v{v}, cache lost: {why}"))
    }

    /// Any sectors of what is on its way to a store are there.
    fn comes_in_part(&mut self, v: usize, store: &mut Store) {
        for io in &self.ios {
            let Io::Store { volume, dirty, .. } = io else { continue };
            let number = self.volumes[*volume].log.get(dirty.sequence as usize - 1);
            let Some(&number) = number.filter(|_| *volume == v) else { continue };
            for sector in dirty.at / SECTOR..(dirty.at + dirty.len) / SECTOR {
                if self.rng.chance(0.5) {
                    store.write(sector, number);
                }
            }
        }
    }

    fn check_image(&self, v: usize, store: &Store) -> Checked {
        let volume = &self.volumes[v];
        let mut image = Vec::new();
        for sector in 0..store.sectors() {
            image.push(self.place(v, store.see(sector))?);
        }
        let frontier = self.log.status(self.now, volume.attachment).map_or(0, |s| s.positions[0]);
        for (sector, place) in (0..).zip(&image) {
            let safe = self.last(v, sector, frontier);
            // What was left out is said to be so, or there is something newer.
            let said = || {
                self.rotten.contains(&safe)
                    && self
                        .log
                        .is_dirty(volume.attachment, &(sector * SECTOR..(sector + 1) * SECTOR))
            };
            if *place < self.place(v, safe)? && !said() {
                return Err(format!(
                    "sector {sector} has {} of the log, older than {safe}, which status called safe",
                    place
                ));
            }
        }
        if frontier < volume.said_joins {
            return Ok(());
        }
        self.check_order(v, &image)
    }

    /// What the volume's order promises of an image: of each sector the place of the write that it has.
    pub(super) fn check_order(&self, v: usize, image: &[u64]) -> Checked {
        let volume = &self.volumes[v];
        if volume.letter == 'a' {
            return Ok(());
        }
        // Writes of which the image lacks something.
        let lacks = |n: &&u64| {
            let write = &self.writes[**n as usize];
            write.sectors.clone().any(|sector| image[sector as usize] < write.sequence)
        };
        let lacking: Vec<u64> = volume.log.iter().filter(lacks).copied().collect();
        let mut there: BTreeSet<u64> = image.iter().copied().filter(|place| *place > 0).collect();
        while let Some(place) = there.pop_last() {
            let number = volume.log[place as usize - 1];
            let write = &self.writes[number as usize];
            for &other in &lacking {
                let before = &self.writes[other as usize];
                let known = match volume.letter {
                    'c' => before.done <= write.issued,
                    _ => {
                        before.done <= write.level || before.fua && before.answered <= write.issued
                    }
                };
                if known {
                    return Err(format!(
                        "{number} is there, and not all of {other}, which its client knew"
                    ));
                }
            }
        }
        Ok(())
    }
}
