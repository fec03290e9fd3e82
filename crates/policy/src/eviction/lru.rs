//! Least recently used, and first in first out.

use larder_base::slab::Slab;

use super::queue::{Entry, Queue};
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

/// What both share: one queue, the victim at its back; they differ in whether a hit moves the object.
#[derive(Debug)]
struct OneQueue<const MOVE_ON_HIT: bool> {
    capacity: u64,
    slab: Slab<Entry>,
    queue: Queue,
}

impl<const MOVE_ON_HIT: bool> OneQueue<MOVE_ON_HIT> {
    fn new(capacity: u64) -> Self {
        OneQueue { capacity, slab: Slab::new(), queue: Queue::default() }
    }

    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        if !slot.is_none() {
            if MOVE_ON_HIT {
                self.queue.list.move_to_front(&mut self.slab, slot.0);
            }
            return Outcome { hit: true, slot };
        }
        if u64::from(access.size) > self.capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.queue.bytes + u64::from(access.size) > self.capacity {
            let Some(victim) = self.queue.pop_back(&mut self.slab) else { break };
            gone.push(self.slab.get(victim).tag, Fate::Dropped);
            self.slab.free(victim);
        }
        let at = self.slab.take(Entry::new(access.tag, access.size, 0));
        self.queue.push_front(&mut self.slab, at);
        Outcome { hit: false, slot: Slot(at) }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        self.queue.unlink(&mut self.slab, slot.0);
        self.slab.free(slot.0);
        true
    }
}

/// Least recently used.
#[derive(Debug)]
pub struct Lru(OneQueue<true>);

/// First in, first out.
#[derive(Debug)]
pub struct Fifo(OneQueue<false>);

macro_rules! one_queue {
    ($name:ident) => {
        impl $name {
            /// An empty cache of `capacity` (objects or bytes, as the sizes of the requests are).
            pub fn new(capacity: u64) -> $name {
                $name(OneQueue::new(capacity))
            }
        }

        impl Eviction for $name {
            #[inline]
            fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
                self.0.request(access, slot, gone)
            }

            fn remove(&mut self, slot: Slot) -> bool {
                self.0.remove(slot)
            }

            fn used(&self) -> u64 {
                self.0.queue.bytes
            }

            fn memory_bytes(&self) -> usize {
                self.0.slab.memory_bytes()
            }

            #[inline]
            fn prefetch(&self, slot: Slot) {
                self.0.slab.prefetch(slot.0);
            }
        }
    };
}

one_queue!(Lru);
one_queue!(Fifo);
