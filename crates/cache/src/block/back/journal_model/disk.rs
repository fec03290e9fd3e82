//! A disk that loses what was not flushed: a store, or a journal's place.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use larder_base::Rng;
use larder_volume::op::{Done, Failure, FailureKind, Op, Outcome};
use larder_volume::{Backing, BackingError, Capabilities, Flushing, Identity, Session};

use super::super::locked;

/// What is written whole or not at all, bytes.
const SECTOR: u64 = 512;
type Sector = [u8; SECTOR as usize];

/// The power of all of a history: it goes at an I/O.
#[derive(Clone, Debug, Default)]
pub(super) struct Power(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    left: Option<u64>,
    off: bool,
}

/// What becomes of an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Current {
    On,
    /// The power goes in the midst of it.
    Goes,
    Off,
}

impl Power {
    /// It goes at the I/O behind so many.
    pub(super) fn goes_after(&self, ios: u64) {
        locked(&self.0).left = Some(ios);
    }

    pub(super) fn comes_back(&self) {
        *locked(&self.0) = State::default();
    }

    pub(super) fn is_off(&self) -> bool {
        locked(&self.0).off
    }

    /// An I/O begins.
    pub(super) fn io(&self) -> Current {
        let mut state = locked(&self.0);
        if state.off {
            return Current::Off;
        }
        match &mut state.left {
            Some(0) => {
                *state = State { left: None, off: true };
                Current::Goes
            }
            Some(left) => {
                *left -= 1;
                Current::On
            }
            None => Current::On,
        }
    }
}

#[derive(Debug)]
struct Inner {
    rng: Rng,
    durable: BTreeMap<u64, Sector>,
    /// Written and not flushed, in their order.
    pending: Vec<(u64, Sector)>,
    /// Seen, and on no disk: a flush of them has failed.
    forgotten: BTreeMap<u64, Sector>,
    /// Sectors that cannot be read until they are written.
    bad: BTreeSet<u64>,
    losses: u64,
    /// The share of I/O that fails.
    fails: f64,
}

/// One, which outlives those who open it.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    name: &'static str,
    bytes: u64,
    power: Power,
    inner: Arc<Mutex<Inner>>,
}

fn failure(kind: FailureKind) -> Failure {
    Failure::new(kind, "")
}

impl Inner {
    fn see(&self, sector: u64) -> Sector {
        let pending = self.pending.iter().rev().find(|(at, _)| *at == sector).map(|(_, s)| *s);
        pending
            .or_else(|| self.forgotten.get(&sector).copied())
            .or_else(|| self.durable.get(&sector).copied())
            .unwrap_or([0; SECTOR as usize])
    }

    fn write(&mut self, at: u64, bytes: &[u8], share: f64) {
        let mut done = 0;
        while done < bytes.len() {
            let (sector, skip) = ((at + done as u64) / SECTOR, (at + done as u64) % SECTOR);
            let len = (bytes.len() - done).min((SECTOR - skip) as usize);
            if self.rng.chance(share) {
                let mut now = self.see(sector);
                now[skip as usize..skip as usize + len].copy_from_slice(&bytes[done..done + len]);
                self.bad.remove(&sector);
                self.forgotten.remove(&sector);
                self.pending.push((sector, now));
            }
            done += len;
        }
    }

    /// Each sector is as it was, or as any write since has left it.
    fn crash(&mut self) {
        let pending = std::mem::take(&mut self.pending);
        if !pending.is_empty() || !self.forgotten.is_empty() {
            self.losses += 1;
        }
        self.forgotten.clear();
        let sectors: BTreeSet<u64> = pending.iter().map(|(at, _)| *at).collect();
        for sector in sectors {
            let mut all = vec![None];
            all.extend(pending.iter().filter(|(at, _)| *at == sector).map(|(_, s)| Some(*s)));
            let one = self.rng.below(all.len() as u64) as usize;
            if let Some(is) = all[one] {
                self.durable.insert(sector, is);
            }
        }
    }
}

impl Disk {
    pub(super) fn new(name: &'static str, bytes: u64, power: &Power, rng: Rng) -> Disk {
        let inner = Inner {
            rng,
            durable: BTreeMap::new(),
            pending: Vec::new(),
            forgotten: BTreeMap::new(),
            bad: BTreeSet::new(),
            losses: 0,
            fails: 0.0,
        };
        Disk { name, bytes, power: power.clone(), inner: Arc::new(Mutex::new(inner)) }
    }

    /// So much of its I/O fails from now on.
    pub(super) fn fails(&self, share: f64) {
        locked(&self.inner).fails = share;
    }

    pub(super) fn is_failing(&self) -> bool {
        locked(&self.inner).fails > 0.0
    }

    /// Power cut, or the server that has it has died.
    pub(super) fn crash(&self) {
        locked(&self.inner).crash();
    }

    /// What is read now, whatever fails.
    pub(super) fn peek(&self, at: u64, len: u64) -> Vec<u8> {
        let inner = locked(&self.inner);
        let sectors = at / SECTOR..(at + len).div_ceil(SECTOR);
        let bytes: Vec<u8> = sectors.flat_map(|sector| inner.see(sector)).collect();
        let skip = (at % SECTOR) as usize;
        bytes[skip..skip + len as usize].to_vec()
    }

    /// A sector that was ever written rots: its bytes change, or it cannot be read. False: none was.
    pub(super) fn rots(&self, range: std::ops::Range<u64>) -> bool {
        let mut inner = locked(&self.inner);
        let all: Vec<u64> = inner
            .durable
            .range(range.start / SECTOR..range.end / SECTOR)
            .map(|(&at, _)| at)
            .collect();
        if all.is_empty() {
            return false;
        }
        let sector = all[inner.rng.below(all.len() as u64) as usize];
        if inner.rng.chance(0.5) {
            inner.bad.insert(sector);
            return true;
        }
        let at = inner.rng.below(SECTOR) as usize;
        if let Some(bytes) = inner.durable.get_mut(&sector) {
            bytes[at] ^= 1;
        }
        true
    }

    /// A sector cannot be read until it is written.
    pub(super) fn spoils(&self, at: u64) {
        locked(&self.inner).bad.insert(at / SECTOR);
    }

    /// All that it has is seen, and is not on the disk: a flush has failed.
    pub(super) fn forgets(&self) {
        let mut inner = locked(&self.inner);
        let all = std::mem::take(&mut inner.durable);
        inner.forgotten.extend(all);
    }

    /// All of a range is zeros, durably.
    pub(super) fn wipe(&self, range: std::ops::Range<u64>) {
        let mut inner = locked(&self.inner);
        let is_out = |sector: &u64| !(range.start / SECTOR..range.end / SECTOR).contains(sector);
        inner.durable.retain(|sector, _| is_out(sector));
        inner.pending.retain(|(sector, _)| is_out(sector));
        inner.forgotten.retain(|sector, _| is_out(sector));
        inner.bad.retain(is_out);
    }

    /// Does an operation.
    pub(super) fn perform(&self, op: &mut Op) -> Outcome {
        let current = self.power.io();
        if current == Current::Off {
            return Err(failure(FailureKind::Failed));
        }
        let mut inner = locked(&self.inner);
        let share = inner.fails;
        let fails = inner.rng.chance(share);
        let ends_well = current == Current::On && !fails;
        match op {
            Op::Read { offset, buf } => {
                let sectors = *offset / SECTOR..(*offset + buf.len() as u64).div_ceil(SECTOR);
                if !ends_well || sectors.clone().any(|sector| inner.bad.contains(&sector)) {
                    return Err(failure(FailureKind::Failed));
                }
                drop(inner);
                let bytes = self.peek(*offset, buf.len() as u64);
                buf.copy_from_slice(&bytes);
                return Ok(Vec::new());
            }
            Op::Write { offset, data, .. } => {
                inner.write(*offset, data, if ends_well { 1.0 } else { 0.5 });
            }
            Op::WriteZeroes { offset, len, .. } => {
                let zeros = vec![0; *len as usize];
                inner.write(*offset, &zeros, if ends_well { 1.0 } else { 0.5 });
            }
            Op::Flush => {
                let pending = match ends_well {
                    true => std::mem::take(&mut inner.pending),
                    false if current == Current::Goes => {
                        // Some of it was on its way.
                        if inner.rng.chance(0.5) {
                            std::mem::take(&mut inner.pending)
                        } else {
                            Vec::new()
                        }
                    }
                    false => {
                        // As with a file: what it had is clean, and perhaps nowhere.
                        inner.losses += 1;
                        let pending = std::mem::take(&mut inner.pending);
                        let (mut kept, mut gone) = (Vec::new(), Vec::new());
                        for one in pending {
                            if inner.rng.chance(0.5) { kept.push(one) } else { gone.push(one) }
                        }
                        inner.forgotten.extend(gone);
                        kept
                    }
                };
                inner.durable.extend(pending);
            }
            Op::Trim { .. } | Op::Status { .. } => {
                return Err(failure(FailureKind::Unsupported));
            }
        }
        match ends_well {
            true => Ok(Vec::new()),
            false if inner.rng.chance(0.3) => Err(failure(FailureKind::NoSpace)),
            false => Err(failure(FailureKind::Failed)),
        }
    }
}

impl Backing for Disk {
    fn uri(&self) -> &str {
        self.name
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            size: self.bytes,
            read_only: false,
            trim: false,
            flush: Flushing::Offered,
            fast_zero: false,
            status: false,
            minimum: 1,
            maximum: 32 << 20,
        }
    }
    fn identity(&self) -> Result<Identity, BackingError> {
        Ok(Identity::Blind { name: self.name.to_owned(), size: self.bytes })
    }
    fn resize(&self, _: Option<u64>) -> Result<u64, BackingError> {
        Ok(self.bytes)
    }
    fn losses(&self) -> u64 {
        locked(&self.inner).losses
    }
    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        Ok(Box::new(Way { disk: self.clone(), ended: VecDeque::new() }))
    }
}

/// A session that does at once what it is asked for.
struct Way {
    disk: Disk,
    ended: VecDeque<Done>,
}

impl Session for Way {
    fn fd(&self) -> RawFd {
        -1
    }
    fn attach(&mut self, _: &mio::Registry, _: usize) -> std::io::Result<()> {
        Ok(())
    }
    fn submit(&mut self, token: u64, mut op: Op) {
        let outcome = self.disk.perform(&mut op);
        self.ended.push_back(Done { token, op, outcome });
    }
    fn flush(&mut self, _: Instant) {}
    fn turn(&mut self, _: Instant) {}
    fn pop(&mut self) -> Option<Done> {
        self.ended.pop_front()
    }
    fn in_flight(&self) -> usize {
        self.ended.len()
    }
}
