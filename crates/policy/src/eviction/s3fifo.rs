//! S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP '23), as libCacheSim decides.

use larder_base::slab::Slab;

use super::queue::{Entry, Queue};
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

/// Which release of libCacheSim to agree with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum S3FifoRelease {
    /// 2024: a new object always enters the small queue.
    R2024,
    /// 2025 (0.3.5): until the first eviction, a new object enters the main queue once the small one is full.
    R2025,
}

/// A small FIFO (a tenth) that filters what enters the main FIFO (the rest, CLOCK with counts up to 3), and a ghost
/// FIFO of 0.9 of the capacity that remembers what the small queue dropped. Two uses in the small queue promote.
/// Main is evicted from only when it is larger than its size, or the small queue is empty.
///
/// Deviation: the reference refuses every object when the small queue's capacity is not larger than one object
/// (caches under 20 objects); here the small queue holds at least 1, and takes objects of exactly its capacity.
#[derive(Debug)]
pub struct S3Fifo {
    capacity: u64,
    small_capacity: u64,
    main_capacity: u64,
    ghost_capacity: u64,
    release: S3FifoRelease,
    evicted: bool,
    slab: Slab<Entry>,
    small: Queue,
    main: Queue,
    ghost: Queue,
}

const SMALL: u8 = 0;
const MAIN: u8 = 1;
const GHOST: u8 = 2;

/// Uses in the small queue that promote.
const PROMOTE: u8 = 2;

impl S3Fifo {
    /// An empty cache.
    pub fn new(capacity: u64, release: S3FifoRelease) -> S3Fifo {
        let small_capacity = ((capacity as f64 * 0.10) as u64).max(1).min(capacity);
        S3Fifo {
            capacity,
            small_capacity,
            main_capacity: capacity - small_capacity,
            ghost_capacity: (capacity as f64 * 0.90) as u64,
            release,
            evicted: false,
            slab: Slab::new(),
            small: Queue::default(),
            main: Queue::default(),
            ghost: Queue::default(),
        }
    }

    fn evict(&mut self, gone: &mut Departures) {
        self.evicted = true;
        if self.main.bytes > self.main_capacity || self.small.bytes == 0 {
            self.evict_main(gone);
        } else {
            self.evict_small(gone);
        }
    }

    fn evict_small(&mut self, gone: &mut Departures) {
        while let Some(at) = self.small.pop_back(&mut self.slab) {
            let entry = self.slab.get_mut(at);
            if entry.uses >= PROMOTE {
                entry.uses = 0;
                entry.place = MAIN;
                self.main.push_front(&mut self.slab, at);
                continue;
            }
            let (tag, size) = (entry.tag, u64::from(entry.size));
            if size > self.ghost_capacity {
                gone.push(tag, Fate::Dropped);
                self.slab.free(at);
                return;
            }
            entry.place = GHOST;
            gone.push(tag, Fate::Ghost);
            while self.ghost.bytes + size > self.ghost_capacity {
                let Some(old) = self.ghost.pop_back(&mut self.slab) else { break };
                gone.push(self.slab.get(old).tag, Fate::Forgotten);
                self.slab.free(old);
            }
            self.ghost.push_front(&mut self.slab, at);
            return;
        }
    }

    fn evict_main(&mut self, gone: &mut Departures) {
        while let Some(at) = self.main.pop_back(&mut self.slab) {
            let entry = self.slab.get_mut(at);
            if entry.uses == 0 {
                gone.push(entry.tag, Fate::Dropped);
                self.slab.free(at);
                return;
            }
            entry.uses = entry.uses.min(3) - 1;
            self.main.push_front(&mut self.slab, at);
        }
    }
}

impl Eviction for S3Fifo {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        let mut remembered = false;
        if !slot.is_none() {
            let entry = self.slab.get_mut(slot.0);
            if entry.place != GHOST {
                entry.uses = entry.uses.saturating_add(1);
                return Outcome { hit: true, slot };
            }
            self.ghost.unlink(&mut self.slab, slot.0);
            self.slab.free(slot.0);
            remembered = true;
        }
        let size = u64::from(access.size);
        if size > self.small_capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.used() + size > self.capacity {
            self.evict(gone);
        }
        let to_main = remembered
            || (self.release == S3FifoRelease::R2025
                && !self.evicted
                && self.small.bytes >= self.small_capacity);
        let place = if to_main { MAIN } else { SMALL };
        let at = self.slab.take(Entry::new(access.tag, access.size, place));
        let queue = if to_main { &mut self.main } else { &mut self.small };
        queue.push_front(&mut self.slab, at);
        Outcome { hit: false, slot: Slot(at) }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        let place = self.slab.get(slot.0).place;
        let queue = match place {
            SMALL => &mut self.small,
            MAIN => &mut self.main,
            _ => &mut self.ghost,
        };
        queue.unlink(&mut self.slab, slot.0);
        self.slab.free(slot.0);
        place != GHOST
    }

    fn used(&self) -> u64 {
        self.small.bytes + self.main.bytes
    }

    fn memory_bytes(&self) -> usize {
        self.slab.memory_bytes()
    }

    #[inline]
    fn prefetch(&self, slot: Slot) {
        self.slab.prefetch(slot.0);
    }
}
