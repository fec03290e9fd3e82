//! CLOCK: FIFO with second chances (Corbató 1968), here with a counter of one to three bits.

use larder_base::slab::Slab;

use super::queue::{Entry, Queue};
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

/// The hand is the back of a queue: an object with a positive counter loses one and goes to the front; the first with
/// zero is the victim. A hit raises the counter up to 2^bits − 1.
#[derive(Debug)]
pub struct Clock {
    capacity: u64,
    most: u8,
    slab: Slab<Entry>,
    queue: Queue,
}

impl Clock {
    /// An empty cache; `bits` in 1..=7 is the counter's width.
    pub fn new(capacity: u64, bits: u8) -> Clock {
        let most = (1u8 << bits.clamp(1, 7)) - 1;
        Clock { capacity, most, slab: Slab::new(), queue: Queue::default() }
    }
}

impl Eviction for Clock {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        if !slot.is_none() {
            let entry = self.slab.get_mut(slot.0);
            entry.uses = (entry.uses + 1).min(self.most);
            return Outcome { hit: true, slot };
        }
        if u64::from(access.size) > self.capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.queue.bytes + u64::from(access.size) > self.capacity {
            let at = self.queue.list.back();
            let entry = self.slab.get_mut(at);
            if entry.uses > 0 {
                entry.uses -= 1;
                self.queue.list.move_to_front(&mut self.slab, at);
            } else {
                gone.push(entry.tag, Fate::Dropped);
                self.queue.unlink(&mut self.slab, at);
                self.slab.free(at);
            }
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
