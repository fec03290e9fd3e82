//! Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69R1).

use larder_base::slab::Slab;

use super::heap::Heap;
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

#[derive(Debug)]
struct Entry {
    tag: u32,
    size: u32,
    uses: u64,
}

/// The object with the least `age + uses / size` goes; age is the priority of the last victim. Among equals the one
/// asked for longest ago goes.
#[derive(Debug)]
pub struct Gdsf {
    capacity: u64,
    used: u64,
    age: f64,
    requests: u64,
    slab: Slab<Entry>,
    /// Negated, so that the least is on top: (−priority, −time of the last request).
    heap: Heap<(f64, i64)>,
}

impl Gdsf {
    /// An empty cache.
    pub fn new(capacity: u64) -> Gdsf {
        Gdsf { capacity, used: 0, age: 0.0, requests: 0, slab: Slab::new(), heap: Heap::new() }
    }

    fn key(&self, uses: u64, size: u32) -> (f64, i64) {
        // The factor keeps small quotients in the range where doubles differ, as in libCacheSim.
        (-(self.age + uses as f64 * 1.0e6 / f64::from(size)), -(self.requests as i64))
    }
}

impl Eviction for Gdsf {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        self.requests += 1;
        if !slot.is_none() {
            let entry = self.slab.get_mut(slot.0);
            entry.uses += 1;
            let (uses, size) = (entry.uses, entry.size);
            self.heap.change(slot.0, self.key(uses, size));
            return Outcome { hit: true, slot };
        }
        let size = u64::from(access.size);
        if size > self.capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.used + size > self.capacity {
            let Some(((negated, _), victim)) = self.heap.top() else { break };
            self.age = -negated;
            gone.push(self.slab.get(victim).tag, Fate::Dropped);
            self.remove(Slot(victim));
        }
        let at = self.slab.take(Entry { tag: access.tag, size: access.size, uses: 1 });
        self.heap.push(self.key(1, access.size), at);
        self.used += size;
        Outcome { hit: false, slot: Slot(at) }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        self.heap.remove(slot.0);
        self.used -= u64::from(self.slab.get(slot.0).size);
        self.slab.free(slot.0);
        true
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn memory_bytes(&self) -> usize {
        self.slab.memory_bytes() + self.heap.memory_bytes()
    }
}
