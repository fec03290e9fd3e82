//! DRAM in front of flash, whatever the organisation of the flash: LRU by bytes, and an admission filter for what it
//! evicts.

use larder_base::slab::{List, Slab};
use larder_base::{AppId, Nanos, ObjectHash};
use larder_policy::admission::{
    Access, Admission, AdmissionConfig, AdmissionPolicy, Candidate, Departure, Features, Setup,
    Verdict,
};

use super::{Baseline, BaselineError, Counts, Index, IndexSize, NONE};
use crate::device::DeviceOp;

/// What the caches with DRAM in front have in common.
#[derive(Clone, Debug)]
pub struct HybridConfig {
    /// Bytes of DRAM for objects (the index is reported beside it).
    pub dram: u64,
    /// Bytes of flash.
    pub flash: u64,
    /// Which of DRAM's victims go to flash ([`super::admission`] names the filters that work here).
    pub admission: AdmissionConfig,
    /// Expected mean size of an object, by which the filter's window is chosen: as many keys as flash holds objects.
    pub mean_object: u64,
    /// Seed of the filter's draws and of the hash functions.
    pub seed: u64,
}

/// A look-up that found the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) size: u32,
    /// It was still in a write buffer: no read of flash.
    pub(super) in_memory: bool,
}

/// What was done so far.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) counts: Counts,
    pub(super) recording: bool,
    pub(super) ops: Vec<DeviceOp>,
}

impl Account {
    pub(super) fn record(&mut self, op: DeviceOp) {
        if self.recording {
            self.ops.push(op);
        }
    }

    /// A look-up reads.
    pub(super) fn read(&mut self, offset: u64, len: u32) {
        self.counts.flash_reads += 1;
        self.record(DeviceOp::Read { offset, len });
    }

    /// The cache reads in order to write.
    pub(super) fn background_read(&mut self, offset: u64, len: u32) {
        self.record(DeviceOp::BackgroundRead { offset, len });
    }

    pub(super) fn write(&mut self, offset: u64, len: u32) {
        self.counts.flash_writes += 1;
        self.counts.flash_bytes += u64::from(len);
        self.record(DeviceOp::Write { offset, len });
    }
}

/// The flash behind the DRAM. Costs are counted where they arise.
pub(super) trait Flash {
    /// Looks `tag` up as a request does.
    fn lookup(&mut self, tag: u32, account: &mut Account) -> Option<Found>;
    /// Whether it is there, at no cost: what the copy in DRAM knows of itself.
    fn contains(&self, tag: u32) -> bool;
    /// Whether an object of so many bytes can be stored at all.
    fn fits(&self, size: u32) -> bool;
    /// Stores an object that is not there and fits.
    fn insert(&mut self, tag: u32, size: u32, account: &mut Account);
    /// Removes an object that may be there.
    fn remove(&mut self, tag: u32, account: &mut Account);
    fn index_size(&self) -> IndexSize;
    /// Bytes of records that were written.
    fn record_bytes(&self) -> Option<u64> {
        None
    }
}

struct Item {
    tag: u32,
    size: u32,
    reads: u32,
}

/// LRU over `F`. A hit on flash copies the object into DRAM and leaves it where it is; when DRAM evicts a copy whose
/// original is still on flash, nothing is written. That is what CacheLib does (its "NvmClean" items).
pub(super) struct Hybrid<F> {
    capacity: u64,
    bytes: u64,
    slab: Slab<Item>,
    list: List,
    index: Index,
    admission: Admission,
    seed: u64,
    now: Nanos,
    pub(super) flash: F,
    pub(super) account: Account,
}

impl<F: Flash> Hybrid<F> {
    pub(super) fn new(config: &HybridConfig, flash: F) -> Result<Hybrid<F>, BaselineError> {
        if config.dram == 0 {
            let must = "at least 1 byte".to_owned();
            return Err(BaselineError::Size { what: "dram", value: 0, must });
        }
        if config.mean_object < 16 {
            // The filter's tables are sized by it.
            let (what, value) = ("mean_object", config.mean_object);
            return Err(BaselineError::Size { what, value, must: "at least 16 bytes".to_owned() });
        }
        let objects = (config.flash / config.mean_object).max(64);
        let setup = Setup {
            // 16 bytes a key of the window, twice what the ghost queue takes.
            memory: (objects as usize).saturating_mul(16).saturating_add(64 << 10),
            seed: config.seed,
            objects,
            share: 1.0,
            dram: 0,
            flash: 0,
            budget_rate: None,
        };
        Ok(Hybrid {
            capacity: config.dram,
            bytes: 0,
            slab: Slab::new(),
            list: List::new(),
            index: Index::default(),
            admission: Admission::new(&config.admission, &setup)?,
            seed: config.seed,
            now: Nanos::ZERO,
            flash,
            account: Account::default(),
        })
    }

    fn hash(&self, tag: u32) -> ObjectHash {
        let a = larder_trace::mix(u64::from(tag) ^ self.seed.rotate_left(32));
        ObjectHash(u128::from(a) << 64 | u128::from(larder_trace::mix(a)))
    }

    fn access(&self, tag: u32, size: u32) -> Access {
        Access { hash: self.hash(tag), app: AppId::DEFAULT, at: self.now, size }
    }

    /// Brings the object into DRAM.
    fn enter(&mut self, tag: u32, size: u32) {
        while self.bytes + u64::from(size) > self.capacity {
            let Some(victim) = self.list.pop_back(&mut self.slab) else { break };
            self.evict(victim);
        }
        let at = self.slab.take(Item { tag, size, reads: 0 });
        self.list.push_front(&mut self.slab, at);
        self.index.set(tag, at);
        self.bytes += u64::from(size);
    }

    /// The object, which is in no list any more, leaves DRAM; to flash if it may.
    fn evict(&mut self, at: u32) {
        let &Item { tag, size, reads } = self.slab.get(at);
        self.forget(at);
        if self.flash.contains(tag) {
            return;
        }
        let access = self.access(tag, size);
        if !self.flash.fits(size) {
            self.account.counts.refused += 1;
            self.admission.on_departure(&access, Departure::Evicted);
            return;
        }
        let features = Features { reads, size, ..Features::default() };
        let candidate = Candidate {
            hash: access.hash,
            app: AppId::DEFAULT,
            features,
            survivor: false,
            ttl: u32::MAX,
        };
        if let Verdict::Admit { .. } = self.admission.judge(&candidate, self.now) {
            self.flash.insert(tag, size, &mut self.account);
            self.admission.on_departure(&access, Departure::Moved);
        } else {
            self.account.counts.rejected += 1;
            self.admission.on_departure(&access, Departure::Evicted);
        }
    }

    fn forget(&mut self, at: u32) {
        let &Item { tag, size, .. } = self.slab.get(at);
        self.bytes -= u64::from(size);
        self.index.set(tag, NONE);
        self.slab.free(at);
    }

    /// Takes the object out of both tiers; whether it was in DRAM.
    fn discard(&mut self, tag: u32) -> bool {
        let at = self.index.get(tag);
        if at != NONE {
            self.list.unlink(&mut self.slab, at);
            self.forget(at);
        }
        self.flash.remove(tag, &mut self.account);
        at != NONE
    }
}

impl<F: Flash> Baseline for Hybrid<F> {
    fn request(&mut self, tag: u32, size: u32) -> bool {
        self.account.counts.requests += 1;
        self.now = Nanos(self.now.0 + 1000);
        let at = self.index.get(tag);
        let present = if at != NONE {
            let stored = self.slab.get(at).size;
            if stored == size {
                self.account.counts.hits += 1;
                self.account.counts.hits_dram += 1;
                self.list.unlink(&mut self.slab, at);
                self.list.push_front(&mut self.slab, at);
                let item = self.slab.get_mut(at);
                item.reads = item.reads.saturating_add(1);
                let features = Features { reads: item.reads, size, ..Features::default() };
                let access = self.access(tag, size);
                self.admission.on_read(&access, &features);
                return true;
            }
            Some(stored)
        } else {
            let found = self.flash.lookup(tag, &mut self.account);
            if let Some(Found { size: stored, in_memory }) = found
                && stored == size
            {
                self.account.counts.hits += 1;
                self.account.counts.hits_dram += u64::from(in_memory);
                let access = self.access(tag, size);
                self.admission.on_flash_read(&access);
                if u64::from(size) <= self.capacity {
                    self.enter(tag, size);
                }
                return true;
            }
            found.map(|f| f.size)
        };
        if let Some(stored) = present {
            let was_in_dram = self.discard(tag);
            if was_in_dram {
                let access = self.access(tag, stored);
                self.admission.on_departure(&access, Departure::Updated);
            }
        }
        self.account.counts.miss_bytes += u64::from(size);
        if u64::from(size) > self.capacity {
            self.account.counts.refused += 1;
            return false;
        }
        let access = self.access(tag, size);
        self.admission.on_write(&access, present.is_some());
        self.enter(tag, size);
        false
    }

    fn remove(&mut self, tag: u32) {
        self.discard(tag);
        let access = self.access(tag, 0);
        self.admission.on_departure(&access, Departure::Removed);
    }

    fn counts(&self) -> Counts {
        self.account.counts
    }

    fn reset_counts(&mut self) {
        self.account.counts = Counts::default();
    }

    fn record_device_ops(&mut self) {
        self.account.recording = true;
    }

    fn take_device_ops(&mut self, out: &mut Vec<DeviceOp>) {
        out.append(&mut self.account.ops);
    }

    fn index_size(&self) -> Option<IndexSize> {
        Some(self.flash.index_size())
    }

    fn record_bytes(&self) -> Option<u64> {
        self.flash.record_bytes()
    }
}

/// Makes `$name` a [`Baseline`] that passes everything on to its field `.0`.
macro_rules! baseline_by_field {
    ($name:ident) => {
        impl Baseline for $name {
            fn request(&mut self, tag: u32, size: u32) -> bool {
                self.0.request(tag, size)
            }
            fn remove(&mut self, tag: u32) {
                self.0.remove(tag);
            }
            fn counts(&self) -> Counts {
                self.0.counts()
            }
            fn reset_counts(&mut self) {
                self.0.reset_counts();
            }
            fn record_device_ops(&mut self) {
                self.0.record_device_ops();
            }
            fn take_device_ops(&mut self, out: &mut Vec<DeviceOp>) {
                self.0.take_device_ops(out);
            }
            fn index_size(&self) -> Option<IndexSize> {
                self.0.index_size()
            }
            fn record_bytes(&self) -> Option<u64> {
                self.0.record_bytes()
            }
        }
    };
}
pub(super) use baseline_by_field;
