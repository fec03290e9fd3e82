//! A device that fails on command, around any other.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use larder_base::Rng;

use super::locked;
use crate::device::{Device, Geometry};
use crate::error::{DeviceError, IoOp};

/// When an operation is to fail, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Which operations count; `None` for all of them.
    pub op: Option<IoOp>,
    /// The number of the first one to fail, from 0, counted from when the fault is armed.
    pub nth: u64,
    /// How many fail from then on; `u64::MAX` for a device that has died.
    pub times: u64,
    /// The error number: `EIO` (5), `ENOSPC` (28) …
    pub errno: i32,
}

impl Fault {
    /// The operating system's number for a medium error.
    pub const EIO: i32 = libc::EIO;
    /// The operating system's number for a full disk.
    pub const ENOSPC: i32 = libc::ENOSPC;

    /// Operation number `nth` of any kind fails once with EIO: run a scenario with 0, 1, 2 … until none fires.
    pub fn nth(nth: u64) -> Fault {
        Fault { op: None, nth, times: 1, errno: Self::EIO }
    }

    /// The device dies before operation number `nth` of any kind: it and all later ones fail with EIO. Together with
    /// [`MemoryDevice::power_cut`](super::MemoryDevice::power_cut): the power goes at that operation.
    pub fn dead_from(nth: u64) -> Fault {
        Fault { op: None, nth, times: u64::MAX, errno: Self::EIO }
    }

    /// From the `nth` operation of this kind on, all of them fail.
    pub fn from(op: IoOp, nth: u64, errno: i32) -> Fault {
        Fault { op: Some(op), nth, times: u64::MAX, errno }
    }
}

/// A door that operations of a [`FaultyDevice`] wait at while it is shut.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct GateState {
    shut: bool,
    waiting: usize,
}

impl Gate {
    /// Lets nothing through from now on.
    pub fn shut(&self) {
        locked(&self.state).shut = true;
    }

    /// Lets everything through.
    pub fn open(&self) {
        locked(&self.state).shut = false;
        self.changed.notify_all();
    }

    /// Waits until `count` operations stand before the shut door. False when that takes longer than `limit`.
    pub fn await_waiting(&self, count: usize, limit: Duration) -> bool {
        let state = locked(&self.state);
        let result = self.changed.wait_timeout_while(state, limit, |s| s.waiting < count);
        result.is_ok_and(|(_, timeout)| !timeout.timed_out())
    }

    fn pass(&self) {
        let mut state = locked(&self.state);
        if state.shut {
            state.waiting += 1;
            self.changed.notify_all();
            while state.shut {
                state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
            }
            state.waiting -= 1;
        }
    }
}

/// Wraps a device: fails operation number k, tears the write that fails, rots what reads return, stalls.
pub struct FaultyDevice {
    inner: Arc<dyn Device>,
    state: Mutex<Plan>,
    /// Reads wait here while it is shut.
    pub reads: Gate,
    /// Writes wait here while it is shut.
    pub writes: Gate,
}

struct Plan {
    faults: Vec<Armed>,
    counts: BTreeMap<IoOp, u64>,
    fired: u64,
    delays: BTreeMap<IoOp, Duration>,
    rot: BTreeMap<u64, u8>,
    rng: Rng,
}

struct Armed {
    fault: Fault,
    seen: u64,
}

impl FaultyDevice {
    /// A device that behaves as `inner` does until told otherwise. `seed` decides how failing writes are torn.
    pub fn new(inner: Arc<dyn Device>, seed: u64) -> FaultyDevice {
        let plan = Plan {
            faults: Vec::new(),
            counts: BTreeMap::new(),
            fired: 0,
            delays: BTreeMap::new(),
            rot: BTreeMap::new(),
            rng: Rng::new(seed),
        };
        FaultyDevice {
            inner,
            state: Mutex::new(plan),
            reads: Gate::default(),
            writes: Gate::default(),
        }
    }

    /// Arms a fault beside those already armed.
    pub fn arm(&self, fault: Fault) {
        locked(&self.state).faults.push(Armed { fault, seen: 0 });
    }

    /// Disarms all faults, rot and delays.
    pub fn heal(&self) {
        let mut plan = locked(&self.state);
        plan.faults.clear();
        plan.rot.clear();
        plan.delays.clear();
    }

    /// How many operations have failed on command.
    pub fn fired(&self) -> u64 {
        locked(&self.state).fired
    }

    /// How many operations of a kind were asked for.
    pub fn count(&self, op: IoOp) -> u64 {
        locked(&self.state).counts.get(&op).copied().unwrap_or(0)
    }

    /// Every operation of this kind takes so much longer (of real time).
    pub fn delay(&self, op: IoOp, by: Duration) {
        locked(&self.state).delays.insert(op, by);
    }

    /// Flips the bits of `mask` in the byte at `offset` on every read, until that byte is written anew.
    pub fn rot(&self, offset: u64, mask: u8) {
        *locked(&self.state).rot.entry(offset).or_insert(0) ^= mask;
    }

    /// Counts the operation; its error if it is to fail, with a random number for tearing it.
    fn begin(&self, op: IoOp, offset: u64, len: u64) -> Result<(), (DeviceError, u64)> {
        match op {
            IoOp::Read => self.reads.pass(),
            IoOp::Write => self.writes.pass(),
            IoOp::Sync | IoOp::Discard => {}
        }
        let mut plan = locked(&self.state);
        *plan.counts.entry(op).or_insert(0) += 1;
        let mut errno = None;
        for armed in &mut plan.faults {
            if armed.fault.op.is_none_or(|kind| kind == op) {
                if armed.seen >= armed.fault.nth && armed.seen - armed.fault.nth < armed.fault.times
                {
                    errno = Some(armed.fault.errno);
                }
                armed.seen += 1;
            }
        }
        let delay = plan.delays.get(&op).copied();
        let failed = errno.map(|errno| {
            plan.fired += 1;
            let source = io::Error::from_raw_os_error(errno);
            (
                DeviceError::Io { device: self.inner.name().clone(), op, offset, len, source },
                plan.rng.next_u64(),
            )
        });
        drop(plan);
        if let Some(delay) = delay {
            std::thread::sleep(delay);
        }
        failed.map_or(Ok(()), Err)
    }
}

impl Device for FaultyDevice {
    fn name(&self) -> &Arc<str> {
        self.inner.name()
    }

    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        self.begin(IoOp::Read, offset, out.len() as u64).map_err(|(e, _)| e)?;
        self.inner.read_at(offset, out)?;
        for (&at, &mask) in
            locked(&self.state).rot.range(offset..offset.saturating_add(out.len() as u64))
        {
            out[(at - offset) as usize] ^= mask;
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        let begun = self.begin(IoOp::Write, offset, bytes.len() as u64);
        let block = self.geometry().block as usize;
        let landed = match &begun {
            Ok(()) => bytes.len(),
            // A write that fails may have landed in part: some leading blocks.
            Err((_, random)) => (random % (bytes.len() / block + 1) as u64) as usize * block,
        };
        self.inner.write_at(offset, &bytes[..landed])?;
        locked(&self.state).rot.retain(|&at, _| at < offset || at >= offset + landed as u64);
        begun.map_err(|(e, _)| e)
    }

    fn sync(&self) -> Result<(), DeviceError> {
        self.begin(IoOp::Sync, 0, 0).map_err(|(e, _)| e)?;
        self.inner.sync()
    }

    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        self.begin(IoOp::Discard, offset, len).map_err(|(e, _)| e)?;
        self.inner.discard(offset, len)
    }
}

impl fmt::Debug for FaultyDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyDevice").field("inner", &self.inner).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PAGE;
    use crate::testing::MemoryDevice;

    fn device() -> (Arc<MemoryDevice>, FaultyDevice) {
        let memory = Arc::new(MemoryDevice::new(64 * PAGE));
        (memory.clone(), FaultyDevice::new(memory, 1))
    }

    #[test]
    fn every_operation_of_a_scenario_fails_in_turn() {
        let scenario = |d: &FaultyDevice| -> Result<(), DeviceError> {
            d.write_at(0, &[1; 4096])?;
            d.sync()?;
            d.read_at(0, &mut [0; 100])?;
            d.discard(0, 4096)
        };
        let mut failures = Vec::new();
        for k in 0.. {
            let (_, d) = device();
            d.arm(Fault::nth(k));
            match scenario(&d) {
                Err(DeviceError::Io { op, source, .. }) => {
                    assert_eq!(source.raw_os_error(), Some(Fault::EIO));
                    failures.push(op);
                }
                Err(other) => panic!("{other}"),
                Ok(()) => break,
            }
        }
        assert_eq!(failures, [IoOp::Write, IoOp::Sync, IoOp::Read, IoOp::Discard]);
    }

    #[test]
    fn a_full_disk_stays_full_until_healed_and_failed_writes_are_torn() {
        let (memory, d) = device();
        d.arm(Fault::from(IoOp::Write, 2, Fault::ENOSPC));
        let results: Vec<bool> = (0..6).map(|i| d.write_at(i * 8192, &[7; 8192]).is_ok()).collect();
        assert_eq!(results, [true, true, false, false, false, false]);
        assert_eq!((d.fired(), d.count(IoOp::Write)), (4, 6));
        let landed: Vec<usize> =
            memory.live().chunks(8192).map(|c| c.iter().filter(|&&b| b == 7).count()).collect();
        assert_eq!(landed[..2], [8192, 8192]);
        assert!(landed[2..6].iter().all(|n| n % 512 == 0));
        assert!(landed[2..6].iter().any(|&n| n > 0 && n < 8192), "{landed:?}");
        d.heal();
        d.write_at(16384, &[7; 8192]).unwrap();
    }

    #[test]
    fn the_power_goes_at_every_operation_in_turn() {
        // Two pages, each synced before the next: whatever the moment, the second is never there without the first.
        for k in 0..=4 {
            for seed in 0..50 {
                let (memory, d) = device();
                d.arm(Fault::dead_from(k));
                let done = (|| {
                    d.write_at(0, &[1; 4096])?;
                    d.sync()?;
                    d.write_at(4096, &[2; 4096])?;
                    d.sync()
                })();
                assert_eq!(done.is_ok(), k == 4);
                let after = memory.power_cut(&mut Rng::new(seed)).live();
                let (first, second) = (&after[..4096], &after[4096..8192]);
                assert!(first == [1; 4096] || (k <= 1 && second == [0; 4096]), "{k} {seed}");
                assert!(k < 4 || second == [2; 4096]);
            }
        }
    }

    #[test]
    fn rot_lasts_until_the_byte_is_written() {
        let (_, d) = device();
        d.rot(5000, 0x10);
        let mut page = [0; 4096];
        d.read_at(4096, &mut page).unwrap();
        assert_eq!((page[904], page.iter().filter(|&&b| b != 0).count()), (0x10, 1));
        d.write_at(4096, &[0; 4096]).unwrap();
        d.read_at(4096, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
    }

    #[test]
    fn the_gate_holds_reads() {
        let (_, d) = device();
        let d = Arc::new(d);
        d.reads.shut();
        let reader = std::thread::spawn({
            let d = d.clone();
            move || d.read_at(0, &mut [0; 10]).is_ok()
        });
        assert!(d.reads.await_waiting(1, Duration::from_secs(10)));
        assert!(!reader.is_finished());
        d.reads.open();
        assert!(reader.join().unwrap());
    }
}
