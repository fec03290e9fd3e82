//! Flash as a victim cache of DRAM: whatever DRAM evicts is written to flash.
//!
//! What it holds follows the bytes alone, as in lsm-sim. For the drive under it every object has a place, at random as its
//! tag falls: an object is written by itself when DRAM evicts it, from the start of a page, and pages are not checked for
//! whom they held before. So an object of 300 bytes programs a page of 4 KiB.

use larder_base::slab::{List, Slab};

use super::hybrid::Account;
use super::{Baseline, Counts, Index, NONE};
use crate::device::DeviceOp;

/// Objects begin at multiples of so many bytes.
const PAGE: u64 = 4096;

#[derive(Debug)]
struct Item {
    tag: u32,
    size: u32,
    in_dram: bool,
}

/// LRU in DRAM over LRU on flash, both by bytes. A hit on flash moves the object back to DRAM.
#[derive(Debug)]
pub struct VictimCache {
    dram_capacity: u64,
    flash_capacity: u64,
    dram_bytes: u64,
    flash_bytes: u64,
    slab: Slab<Item>,
    dram: List,
    flash: List,
    index: Index,
    account: Account,
}

impl VictimCache {
    /// An empty cache of these many bytes.
    pub fn new(dram_capacity: u64, flash_capacity: u64) -> VictimCache {
        VictimCache {
            dram_capacity,
            flash_capacity,
            dram_bytes: 0,
            flash_bytes: 0,
            slab: Slab::new(),
            dram: List::new(),
            flash: List::new(),
            index: Index::default(),
            account: Account::default(),
        }
    }

    /// Where on flash the object lies, when it does.
    fn place(&self, tag: u32, bytes: u64) -> u64 {
        let pages = (self.flash_capacity.saturating_sub(bytes) / PAGE).max(1);
        larder_trace::mix(u64::from(tag)) % pages * PAGE
    }

    fn unlink(&mut self, at: u32) {
        let size = u64::from(self.slab.get(at).size);
        if self.slab.get(at).in_dram {
            self.dram.unlink(&mut self.slab, at);
            self.dram_bytes -= size;
        } else {
            self.flash.unlink(&mut self.slab, at);
            self.flash_bytes -= size;
        }
    }

    fn forget(&mut self, at: u32) {
        self.index.set(self.slab.get(at).tag, NONE);
        self.slab.free(at);
    }

    fn insert(&mut self, at: u32) {
        let size = u64::from(self.slab.get(at).size);
        while self.dram_bytes + size > self.dram_capacity {
            let Some(victim) = self.dram.pop_back(&mut self.slab) else { break };
            let bytes = u64::from(self.slab.get(victim).size);
            self.dram_bytes -= bytes;
            while self.flash_bytes + bytes > self.flash_capacity {
                let Some(old) = self.flash.pop_back(&mut self.slab) else { break };
                self.flash_bytes -= u64::from(self.slab.get(old).size);
                self.forget(old);
            }
            if bytes > self.flash_capacity {
                self.forget(victim);
                continue;
            }
            self.slab.get_mut(victim).in_dram = false;
            self.flash.push_front(&mut self.slab, victim);
            self.flash_bytes += bytes;
            let offset = self.place(self.slab.get(victim).tag, bytes);
            self.account.write(offset, bytes as u32);
        }
        self.slab.get_mut(at).in_dram = true;
        self.dram.push_front(&mut self.slab, at);
        self.dram_bytes += size;
    }
}

impl Baseline for VictimCache {
    fn request(&mut self, tag: u32, size: u32) -> bool {
        self.account.counts.requests += 1;
        let at = self.index.get(tag);
        if at != NONE {
            let was_in_dram = self.slab.get(at).in_dram;
            self.unlink(at);
            if self.slab.get(at).size == size {
                self.account.counts.hits += 1;
                self.account.counts.hits_dram += u64::from(was_in_dram);
                if !was_in_dram {
                    let offset = self.place(tag, u64::from(size));
                    self.account.record(DeviceOp::Read { offset, len: size });
                }
                self.insert(at);
                return true;
            }
            self.forget(at);
        }
        self.account.counts.miss_bytes += u64::from(size);
        if u64::from(size) > self.dram_capacity {
            self.account.counts.refused += 1;
            return false;
        }
        let at = self.slab.take(Item { tag, size, in_dram: true });
        self.index.set(tag, at);
        self.insert(at);
        false
    }

    fn remove(&mut self, tag: u32) {
        let at = self.index.get(tag);
        if at != NONE {
            self.unlink(at);
            self.forget(at);
        }
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
}
