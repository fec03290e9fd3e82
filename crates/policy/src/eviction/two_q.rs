//! 2Q, the full version (Johnson and Shasha, VLDB '94), as libCacheSim decides.

use larder_base::slab::Slab;

use super::queue::{Entry, Queue};
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

/// New objects enter a FIFO (A1in, a quarter of the capacity) and leave it into a ghost FIFO (A1out, half); an object
/// asked for while it is a ghost enters the main LRU (Am). A hit in A1in changes nothing.
#[derive(Debug)]
pub struct TwoQ {
    capacity: u64,
    in_capacity: u64,
    out_capacity: u64,
    main_capacity: u64,
    slab: Slab<Entry>,
    a1_in: Queue,
    a1_out: Queue,
    main: Queue,
}

const IN: u8 = 0;
const OUT: u8 = 1;
const MAIN: u8 = 2;

impl TwoQ {
    /// An empty cache.
    pub fn new(capacity: u64) -> TwoQ {
        let in_capacity = ((capacity as f64 * 0.25) as u64).max(1).min(capacity);
        TwoQ {
            capacity,
            in_capacity,
            out_capacity: (capacity as f64 * 0.5) as u64,
            main_capacity: capacity - in_capacity,
            slab: Slab::new(),
            a1_in: Queue::default(),
            a1_out: Queue::default(),
            main: Queue::default(),
        }
    }

    fn evict_main(&mut self, gone: &mut Departures) -> bool {
        let Some(at) = self.main.pop_back(&mut self.slab) else { return false };
        gone.push(self.slab.get(at).tag, Fate::Dropped);
        self.slab.free(at);
        true
    }

    fn evict_in(&mut self, gone: &mut Departures) {
        let Some(at) = self.a1_in.pop_back(&mut self.slab) else { return };
        let entry = self.slab.get_mut(at);
        let (tag, size) = (entry.tag, u64::from(entry.size));
        if size > self.out_capacity {
            gone.push(tag, Fate::Dropped);
            self.slab.free(at);
            return;
        }
        entry.place = OUT;
        gone.push(tag, Fate::Ghost);
        while self.a1_out.bytes + size > self.out_capacity {
            let Some(old) = self.a1_out.pop_back(&mut self.slab) else { break };
            gone.push(self.slab.get(old).tag, Fate::Forgotten);
            self.slab.free(old);
        }
        self.a1_out.push_front(&mut self.slab, at);
    }
}

impl Eviction for TwoQ {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        let mut remembered = false;
        if !slot.is_none() {
            match self.slab.get(slot.0).place {
                IN => return Outcome { hit: true, slot },
                MAIN => {
                    self.main.list.move_to_front(&mut self.slab, slot.0);
                    return Outcome { hit: true, slot };
                }
                _ => {
                    self.a1_out.unlink(&mut self.slab, slot.0);
                    self.slab.free(slot.0);
                    remembered = true;
                }
            }
        }
        let size = u64::from(access.size);
        if size > self.in_capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.used() + size > self.capacity {
            if self.a1_in.bytes > self.in_capacity || !self.evict_main(gone) {
                self.evict_in(gone);
            }
        }
        if remembered {
            if size > self.main_capacity {
                return Outcome { hit: false, slot: Slot::NONE };
            }
            while self.main.bytes + size > self.main_capacity {
                self.evict_main(gone);
            }
        }
        let place = if remembered { MAIN } else { IN };
        let at = self.slab.take(Entry::new(access.tag, access.size, place));
        let queue = if remembered { &mut self.main } else { &mut self.a1_in };
        queue.push_front(&mut self.slab, at);
        Outcome { hit: false, slot: Slot(at) }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        let place = self.slab.get(slot.0).place;
        let queue = match place {
            IN => &mut self.a1_in,
            MAIN => &mut self.main,
            _ => &mut self.a1_out,
        };
        queue.unlink(&mut self.slab, slot.0);
        self.slab.free(slot.0);
        place != OUT
    }

    fn used(&self) -> u64 {
        self.a1_in.bytes + self.main.bytes
    }

    fn memory_bytes(&self) -> usize {
        self.slab.memory_bytes()
    }

    #[inline]
    fn prefetch(&self, slot: Slot) {
        self.slab.prefetch(slot.0);
    }
}
