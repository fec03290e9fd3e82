//! A log that fails, and the starts that find one: what is promised is there, whatever is cut short.

use super::*;
use larder_engine::block::writeback::marker;
use larder_engine::block::writeback::recovery::Recovered;
use larder_engine::block::writeback::scan::Scan;

impl World {
    /// The write numbers of a stretch whose bytes are in memory.
    pub(super) fn kept_in_memory(
        &self,
        v: usize,
        (at, len): (u64, u64),
        Kept { bytes, skip }: &Kept<Bytes>,
    ) -> Result<Vec<u64>, String> {
        let bytes = &bytes.0[*skip as usize..(*skip + len) as usize];
        let numbers = bytes.chunks(SECTOR as usize).zip(at / SECTOR..).map(|(bytes, sector)| {
            let number = filled(v, sector, bytes);
            number.ok_or_else(|| format!("v{v}: sector {sector} has bytes of no write of it"))
        });
        numbers.collect()
    }

    /// What lies below the log: a slot, or the store, of which a slot is filled now and then.
    pub(super) fn below(&mut self, v: usize, sector: u64) -> u64 {
        let stored = self.volumes[v].store.see(sector);
        if !self.uses_slots(v) {
            return stored;
        }
        if let Some(&slot) = self.volumes[v].slots.get(&sector) {
            return slot;
        }
        if self.rng.chance(0.5) && self.volumes[v].view.is_none() {
            self.volumes[v].slots.insert(sector, stored);
        }
        stored
    }

    /// A run whose log fails uses its slots no more, and keeps none of them true; the next one does.
    pub(super) fn uses_slots(&self, v: usize) -> bool {
        self.volumes[v].said.is_none() || self.volumes[v].view.is_some()
    }

    /// The store may have lost something: no slot of it is believed, while slots are used.
    pub(super) fn drop_slots(&mut self, v: usize) {
        if self.uses_slots(v) {
            self.volumes[v].slots.clear();
        }
    }

    /// The log has failed, and now its volume writes through. What waited goes to the store.
    pub(super) fn through(&mut self, op: OpId, append: Option<&Append<Bytes>>) -> Checked {
        self.says(|| format!("{op:?} goes through"));
        if let Some(append) = append {
            let (attachment, range) = (append.attachment, append.at..append.at + append.len);
            if self.log.is_dirty(attachment, &range) {
                return Err(format!("{op:?} is in the store, and reads show what is older"));
            }
            // Of the store alone it shows before what is dirty, and a kill leaves the marker dirty.
            if !self.log.is_clean(attachment) {
                return Err(format!("{op:?} is in the store before what its client knew"));
            }
        }
        if self.ops.remove(&op).is_none() {
            return Err(format!("{op:?} is answered twice"));
        }
        Ok(())
    }

    /// The marker says that the store has all of a volume: it has, durably. The history of the volume ends.
    pub(super) fn check_over(&mut self, v: usize) -> Checked {
        let status = self.log.status(self.now, self.volumes[v].attachment);
        let acknowledged = status.map_or(0, |status| status.positions[1]);
        let mut store = self.volumes[v].store.clone();
        store.crash(&mut self.rng);
        for sector in 0..store.sectors() {
            let has = store.see(sector);
            let want = match &self.volumes[v].view {
                Some(view) => view[sector as usize],
                None => self.last(v, sector, acknowledged),
            };
            if has != want {
                return Err(format!("v{v}: it is clean, sector {sector} has {has}, not {want}"));
            }
        }
        self.volumes[v].over = true;
        // Whoever waits still goes through, or is killed.
        while let Some((op, _)) = self.volumes[v].blocked.pop_front() {
            self.ops.remove(&op);
        }
        Ok(())
    }

    pub(super) fn check_view(
        &self,
        v: usize,
        sector: u64,
        number: Option<u64>,
        want: u64,
    ) -> Checked {
        let right = match number {
            Some(number) => number == want,
            None => self.writes[want as usize].kind != Kind::Write,
        };
        match right {
            true => Ok(()),
            false => Err(format!(
                "v{v}: sector {sector} reads as {number:?}, the start has found {want}"
            )),
        }
    }

    /// A start finds that the log had failed: what is durable in it, from each marker's frontier on, comes to the stores.
    pub(super) fn start_closed(&mut self, found: &Recovered, scan: &Scan) -> Checked {
        self.says(|| "the log had failed".to_owned());
        self.config.run += 1;
        self.log = WriteLog::found(self.config, found, scan);
        self.failing = false;
        self.plant();
        for v in 0..self.volumes.len() {
            let clean = matches!(self.volumes[v].said, Some((Said::Clean, _)));
            if self.volumes[v].over != clean {
                return Err(format!("v{v}: over, and its marker says {:?}", self.volumes[v].said));
            }
            if self.volumes[v].over {
                continue;
            }
            let mine = &found.volumes[&self.volumes[v].attachment];
            if mine.gap {
                return Err(format!("v{v} is called damaged"));
            }
            let said = self.volumes[v].said;
            // What came to the store from memory, and is in no log, is durable before anybody sees it.
            self.volumes[v].store.flush();
            let frontier = mine.frontier.max(said.map_or(0, |(_, frontier)| frontier));
            let judged =
                if said.is_some() { marker::Verdict::Drain } else { marker::Verdict::GoOn };
            if !judged.keeps_lines(self.planted()) {
                self.volumes[v].slots.clear();
            }
            self.attach(v, frontier);
            self.log.recover(self.now, self.volumes[v].attachment, mine, scan);
            self.knows_marks(v, frontier);
            self.says(|| format!("v{v}: {said:?}, frontier {frontier}, last {}", mine.last));
            let view = self.viewed(v, frontier, mine.last);
            self.volumes[v].may_hold = u64::MAX;
            self.promised_in(v, &view)?;
            self.give_up_lost(v, &view)?;
            // Of a volume that a start has found so before nothing has changed but what was not durable.
            self.volumes[v].view = Some(view);
            self.reads_as_viewed(v)?;
        }
        self.starting = None;
        let mut asks = Asks::default();
        self.log.start_closed(self.now, &mut asks);
        self.carry(asks)
    }

    /// What the volume holds: of each sector the last record that is behind the frontier, or what is below.
    fn viewed(&mut self, v: usize, frontier: u64, last: u64) -> Vec<u64> {
        let volume = &self.volumes[v];
        let behind: Vec<u64> = match (frontier..last).is_empty() {
            true => Vec::new(),
            false => volume.log[frontier as usize..last as usize].to_vec(),
        };
        let of = |sector: u64| {
            let has = |n: &&u64| self.writes[**n as usize].sectors.contains(&sector);
            let logged = behind.iter().rev().find(has).copied();
            let below = || *volume.slots.get(&sector).unwrap_or(&volume.store.see(sector));
            logged.unwrap_or_else(below)
        };
        (0..volume.store.sectors()).map(of).collect()
    }

    /// Whatever was promised is there, and the image is one that the volume's order allows.
    fn promised_in(&self, v: usize, view: &[u64]) -> Checked {
        let volume = &self.volumes[v];
        let mut image = Vec::new();
        for &number in view {
            image.push(self.place(v, number)?);
        }
        for &number in &volume.log {
            let write = &self.writes[number as usize];
            if !(write.done <= volume.level || write.fua && write.answered != NEVER) {
                continue;
            }
            for sector in write.sectors.clone() {
                if image[sector as usize] < write.sequence {
                    return Err(format!(
                        "v{v}: {number} was promised, sector {sector} has {}, and the log had failed",
                        view[sector as usize]
                    ));
                }
            }
        }
        self.check_order(v, &image).map_err(|why| format!("v{v}, the log had failed: {why}"))
    }

    /// Nothing is promised any more of what is not there.
    fn give_up_lost(&mut self, v: usize, view: &[u64]) -> Checked {
        let log = self.volumes[v].log.clone();
        for number in log {
            let write = &self.writes[number as usize];
            let mut lost = false;
            for sector in write.sectors.clone() {
                lost |= self.place(v, view[sector as usize])? < write.sequence;
            }
            if lost {
                let write = &mut self.writes[number as usize];
                (write.answered, write.done) = (NEVER, NEVER);
            }
        }
        Ok(())
    }

    fn reads_as_viewed(&mut self, v: usize) -> Checked {
        let all = self.volumes[v].store.sectors();
        let mut stretches = Vec::new();
        self.log.look(self.volumes[v].attachment, 0..all * SECTOR, |found| stretches.push(found));
        for found in stretches {
            self.read_ends(&Reading { volume: v, found, fresh: vec![0; all as usize] })?;
        }
        Ok(())
    }
}
