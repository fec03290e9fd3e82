//! The cache device and the stores of the model.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use larder_base::Rng;
use larder_engine::block::{IoFailed, LogIo};

pub(crate) const SECTOR: usize = 512;

/// The cache device: slots, the map and the write log. What is written is volatile until a flush covers it.
pub(crate) struct Device {
    /// What a read returns.
    live: Vec<u8>,
    /// What a power cut leaves for certain.
    durable: Vec<u8>,
    /// Sectors that were written and not flushed, in order.
    unflushed: VecDeque<(usize, [u8; SECTOR])>,
    /// Sectors that were flushed so far.
    flushed: usize,
}

impl Device {
    pub(crate) fn new(bytes: u64) -> Device {
        let zeros = vec![0; bytes as usize];
        Device { live: zeros.clone(), durable: zeros, unflushed: VecDeque::new(), flushed: 0 }
    }

    pub(crate) fn read(&self, at: u64, bytes: usize) -> &[u8] {
        &self.live[at as usize..][..bytes]
    }

    pub(crate) fn write(&mut self, at: u64, bytes: &[u8]) {
        for (i, sector) in bytes.chunks_exact(SECTOR).enumerate() {
            let at = at as usize + i * SECTOR;
            self.live[at..at + SECTOR].copy_from_slice(sector);
            self.unflushed.push_back((at, sector.try_into().expect("a sector")));
        }
    }

    /// A write that was cut off: some of its sectors, in no order.
    pub(crate) fn write_torn(&mut self, rng: &mut Rng, at: u64, bytes: &[u8]) {
        let share = [0.1, 0.5, 1.0][rng.below(3) as usize];
        for (i, sector) in bytes.chunks_exact(SECTOR).enumerate() {
            if rng.chance(share) {
                self.write(at + (i * SECTOR) as u64, sector);
            }
        }
    }

    /// What a flush covers that begins now.
    pub(crate) fn mark(&self) -> usize {
        self.flushed + self.unflushed.len()
    }

    /// A flush that began at `mark` has ended.
    pub(crate) fn flush(&mut self, mark: usize) {
        while self.flushed < mark
            && let Some((at, sector)) = self.unflushed.pop_front()
        {
            self.durable[at..at + SECTOR].copy_from_slice(&sector);
            self.flushed += 1;
        }
    }

    /// Of what is not flushed any sectors stay.
    pub(crate) fn power_cut(&mut self, rng: &mut Rng) {
        let lost = [0.1, 0.5, 0.9][rng.below(3) as usize];
        self.flushed += self.unflushed.len();
        for (at, sector) in std::mem::take(&mut self.unflushed) {
            if !rng.chance(lost) {
                self.durable[at..at + SECTOR].copy_from_slice(&sector);
            }
            let durable = &self.durable[at..at + SECTOR];
            self.live[at..at + SECTOR].copy_from_slice(durable);
        }
    }
}

/// The device as the map's log uses it.
#[derive(Clone)]
pub(crate) struct MapIo(pub(crate) Rc<RefCell<Device>>);

impl LogIo for MapIo {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        out.copy_from_slice(self.0.borrow().read(at, out.len()));
        Ok(())
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        self.0.borrow_mut().write(at, bytes);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        let mark = self.0.borrow().mark();
        self.0.borrow_mut().flush(mark);
        Ok(())
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        self.0.borrow_mut().write(at, &vec![0; len as usize]);
        Ok(())
    }
}

/// A store: of each sector the number of the write that filled it, 0 if it holds zeros.
#[derive(Clone)]
pub(crate) struct Store {
    seen: Vec<u64>,
    durable: Vec<u64>,
    /// What was written and not flushed, in order.
    pending: VecDeque<(u64, u64)>,
    flushed: usize,
}

impl Store {
    pub(crate) fn new(sectors: u64) -> Store {
        let zeros = vec![0; sectors as usize];
        Store { seen: zeros.clone(), durable: zeros, pending: VecDeque::new(), flushed: 0 }
    }

    pub(crate) fn sectors(&self) -> u64 {
        self.seen.len() as u64
    }

    pub(crate) fn see(&self, sector: u64) -> u64 {
        self.seen[sector as usize]
    }

    pub(crate) fn image(&self) -> &[u64] {
        &self.seen
    }

    pub(crate) fn write(&mut self, sector: u64, number: u64) {
        self.seen[sector as usize] = number;
        self.pending.push_back((sector, number));
    }

    pub(crate) fn mark(&self) -> usize {
        self.flushed + self.pending.len()
    }

    pub(crate) fn flush(&mut self, mark: usize) {
        while self.flushed < mark
            && let Some((sector, number)) = self.pending.pop_front()
        {
            self.durable[sector as usize] = number;
            self.flushed += 1;
        }
    }

    /// What is not flushed may be lost; of each sector any version stays.
    pub(crate) fn power_cut(&mut self, rng: &mut Rng) {
        self.flushed += self.pending.len();
        for (sector, number) in std::mem::take(&mut self.pending) {
            if rng.chance(0.5) {
                self.durable[sector as usize] = number;
            }
        }
        self.seen.clone_from(&self.durable);
    }
}
