//! SIEVE (Zhang et al., "SIEVE is simpler than LRU", NSDI '24, Algorithm 1).

use larder_base::slab::{NIL, Slab};

use super::queue::{Entry, Queue};
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

/// One queue and a hand that walks from its back to its front, clearing visited bits; the first object without one is
/// the victim. New objects enter at the front, and survivors keep their places.
#[derive(Debug)]
pub struct Sieve {
    capacity: u64,
    slab: Slab<Entry>,
    queue: Queue,
    /// Where the next search starts; [`NIL`] is the back.
    hand: u32,
}

impl Sieve {
    /// An empty cache.
    pub fn new(capacity: u64) -> Sieve {
        Sieve { capacity, slab: Slab::new(), queue: Queue::default(), hand: NIL }
    }

    fn evict(&mut self, gone: &mut Departures) {
        let mut at = if self.hand == NIL { self.queue.list.back() } else { self.hand };
        loop {
            let entry = self.slab.get_mut(at);
            if entry.uses == 0 {
                break;
            }
            entry.uses = 0;
            at = self.slab.before(at);
            if at == NIL {
                at = self.queue.list.back();
            }
        }
        self.hand = self.slab.before(at);
        gone.push(self.slab.get(at).tag, Fate::Dropped);
        self.queue.unlink(&mut self.slab, at);
        self.slab.free(at);
    }
}

impl Eviction for Sieve {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        if !slot.is_none() {
            self.slab.get_mut(slot.0).uses = 1;
            return Outcome { hit: true, slot };
        }
        if u64::from(access.size) > self.capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.queue.bytes + u64::from(access.size) > self.capacity {
            self.evict(gone);
        }
        let at = self.slab.take(Entry::new(access.tag, access.size, 0));
        self.queue.push_front(&mut self.slab, at);
        Outcome { hit: false, slot: Slot(at) }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        if self.hand == slot.0 {
            self.hand = self.slab.before(slot.0);
        }
        self.queue.unlink(&mut self.slab, slot.0);
        self.slab.free(slot.0);
        true
    }

    fn used(&self) -> u64 {
        self.queue.bytes
    }

    fn memory_bytes(&self) -> usize {
        self.slab.memory_bytes()
    }

    #[inline]
    fn prefetch(&self, slot: Slot) {
        self.slab.prefetch(slot.0);
    }
}
