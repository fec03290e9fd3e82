//! The devices of the model: the log's, which has real bytes, and the stores, whose sectors say which write filled them.
//!
//! Both keep what is flushed. Of the rest a power cut keeps any sectors of any writes.

use std::rc::Rc;

use larder_base::Rng;

/// A write that the log's device has and has not flushed.
struct Pending {
    at: usize,
    bytes: Rc<Vec<u8>>,
    /// The sectors that came, or all.
    some: Option<Vec<bool>>,
    /// A flush of it has failed: no flush makes it durable any more.
    doubtful: bool,
}

/// The log's device: bytes, in sectors that are written as a whole or not at all.
pub(super) struct LogDevice {
    sector: usize,
    durable: Vec<u8>,
    seen: Vec<u8>,
    pending: Vec<Pending>,
    /// Writes that were flushed so far.
    flushed: usize,
}

impl LogDevice {
    pub(super) fn new(bytes: usize, sector: usize) -> LogDevice {
        let zeros = vec![0; bytes];
        LogDevice { sector, durable: zeros.clone(), seen: zeros, pending: Vec::new(), flushed: 0 }
    }

    pub(super) fn read(&self, at: u64, bytes: usize) -> &[u8] {
        &self.seen[at as usize..at as usize + bytes]
    }

    /// What is there for good.
    pub(super) fn durable(&self, at: u64, bytes: usize) -> &[u8] {
        &self.durable[at as usize..at as usize + bytes]
    }

    /// A write ends; `some`: in part.
    pub(super) fn write(&mut self, at: u64, bytes: Rc<Vec<u8>>, some: Option<Vec<bool>>) {
        let write = Pending { at: at as usize, bytes, some, doubtful: false };
        copy(&mut self.seen, &write, self.sector);
        self.pending.push(write);
    }

    /// A byte rots.
    pub(super) fn rot(&mut self, at: u64) {
        let at = at as usize;
        self.seen[at] ^= 4;
        self.durable[at] ^= 4;
        for write in &mut self.pending {
            let within = at.checked_sub(write.at).filter(|within| *within < write.bytes.len());
            if let Some(within) = within {
                Rc::make_mut(&mut write.bytes)[within] ^= 4;
            }
        }
    }

    /// Any of a write's sectors.
    pub(super) fn part(&self, rng: &mut Rng, bytes: usize) -> Vec<bool> {
        let chance = [0.0, 0.5, 0.9][rng.below(3) as usize];
        (0..bytes / self.sector).map(|_| rng.chance(chance)).collect()
    }

    /// A flush begins: what it covers.
    pub(super) fn mark(&self) -> usize {
        self.flushed + self.pending.len()
    }

    /// A flush ends that covers so much.
    pub(super) fn flush(&mut self, mark: usize, done: bool) {
        let covered = mark.saturating_sub(self.flushed).min(self.pending.len());
        if !done {
            self.pending[..covered].iter_mut().for_each(|write| write.doubtful = true);
            return;
        }
        if self.pending[..covered].iter().any(|write| write.doubtful) {
            let durable = &mut self.durable;
            let sure = self.pending[..covered].iter().filter(|write| !write.doubtful);
            sure.for_each(|write| copy(durable, write, self.sector));
            // What is doubtful stays, and with it the order of all.
            return;
        }
        for write in self.pending.drain(..covered) {
            copy(&mut self.durable, &write, self.sector);
        }
        self.flushed += covered;
    }

    /// Power is cut; or Larder is killed (`power` is false), which takes only what a failed flush has left in doubt.
    pub(super) fn crash(&mut self, rng: &mut Rng, power: bool) {
        let lost = [0.1, 0.5, 0.9][rng.below(3) as usize];
        let doubt = self.pending.iter().any(|write| write.doubtful);
        if !power && !doubt {
            return;
        }
        let mut pending = std::mem::take(&mut self.pending);
        self.flushed += pending.len();
        for write in &mut pending {
            if rng.chance(lost) {
                let part = self.part(rng, write.bytes.len());
                match &mut write.some {
                    None => write.some = Some(part),
                    Some(some) => some.iter_mut().zip(part).for_each(|(s, p)| *s &= p),
                }
            }
            copy(&mut self.durable, write, self.sector);
        }
        self.seen.copy_from_slice(&self.durable);
    }
}

fn copy(to: &mut [u8], write: &Pending, sector: usize) {
    for (i, bytes) in write.bytes.chunks(sector).enumerate() {
        if write.some.as_ref().is_none_or(|some| some[i]) {
            let at = write.at + i * sector;
            to[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }
}

/// A store: of each sector the number of the write that filled it last.
#[derive(Clone)]
pub(super) struct Store {
    durable: Vec<u64>,
    pending: Vec<(u64, u64)>,
    /// Crashes that may have lost something.
    pub(super) life: u64,
}

impl Store {
    pub(super) fn new(sectors: u64) -> Store {
        Store { durable: vec![0; sectors as usize], pending: Vec::new(), life: 0 }
    }

    pub(super) fn write(&mut self, sector: u64, number: u64) {
        self.pending.push((sector, number));
    }

    pub(super) fn see(&self, sector: u64) -> u64 {
        let last = self.pending.iter().rev().find(|(s, _)| *s == sector);
        last.map_or(self.durable[sector as usize], |(_, number)| *number)
    }

    pub(super) fn flush(&mut self) {
        for (sector, number) in self.pending.drain(..) {
            self.durable[sector as usize] = number;
        }
    }

    /// What is not flushed may be lost, and a write that is older than one that stays may stay in its place.
    pub(super) fn lose(&mut self, rng: &mut Rng) {
        let mut pending = std::mem::take(&mut self.pending);
        // Of each sector any version.
        pending.sort_by_key(|(sector, _)| *sector);
        for versions in pending.chunk_by(|a, b| a.0 == b.0) {
            let which = rng.below(versions.len() as u64 + 1) as usize;
            if let Some((sector, number)) = versions.get(which) {
                self.durable[*sector as usize] = *number;
            }
        }
    }

    pub(super) fn crash(&mut self, rng: &mut Rng) {
        if !self.pending.is_empty() {
            self.life += 1;
            self.lose(rng);
        }
    }

    pub(super) fn sectors(&self) -> u64 {
        self.durable.len() as u64
    }
}
