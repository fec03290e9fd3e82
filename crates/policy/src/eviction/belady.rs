//! Belady's MIN (1966): the object whose next request is farthest away goes. It needs the future, so a trace is read
//! twice. Optimal for objects of equal size; for sizes in bytes it is only a good bound.

use larder_base::slab::Slab;

use super::heap::Heap;
use super::queue::Entry;
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

/// Evicts by [`Access::next`].
#[derive(Debug)]
pub struct Belady {
    capacity: u64,
    used: u64,
    slab: Slab<Entry>,
    heap: Heap<u64>,
}

impl Belady {
    /// An empty cache.
    pub fn new(capacity: u64) -> Belady {
        Belady { capacity, used: 0, slab: Slab::new(), heap: Heap::new() }
    }
}

impl Eviction for Belady {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        if !slot.is_none() {
            self.heap.change(slot.0, access.next);
            return Outcome { hit: true, slot };
        }
        let size = u64::from(access.size);
        if size > self.capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.used + size > self.capacity {
            let Some((_, victim)) = self.heap.top() else { break };
            gone.push(self.slab.get(victim).tag, Fate::Dropped);
            self.remove(Slot(victim));
        }
        let at = self.slab.take(Entry::new(access.tag, access.size, 0));
        self.heap.push(access.next, at);
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
