//! Adaptive Replacement Cache (Megiddo and Modha, FAST '03, Figure 4), with sizes, as libCacheSim decides.

use larder_base::slab::Slab;

use super::queue::{Entry, Queue};
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

/// Two LRU lists, of objects seen once (T1) and more often (T2), each with ghosts (B1, B2); a hit on a ghost moves the
/// target of T1's size towards the list that would have kept it.
#[derive(Debug)]
pub struct Arc {
    capacity: u64,
    /// The paper's p: the target of T1's size.
    target: f64,
    slab: Slab<Entry>,
    t1: Queue,
    t2: Queue,
    b1: Queue,
    b2: Queue,
}

const T1: u8 = 0;
const T2: u8 = 1;
const B1: u8 = 2;
const B2: u8 = 3;

impl Arc {
    /// An empty cache.
    pub fn new(capacity: u64) -> Arc {
        Arc {
            capacity,
            target: 0.0,
            slab: Slab::new(),
            t1: Queue::default(),
            t2: Queue::default(),
            b1: Queue::default(),
            b2: Queue::default(),
        }
    }

    /// The paper's REPLACE: the last of T1 or T2 becomes a ghost.
    fn replace(&mut self, was_in_b2: bool, gone: &mut Departures) {
        let t1 = self.t1.bytes as f64;
        let from_t1 = self.t1.bytes > 0 && (t1 > self.target || (t1 == self.target && was_in_b2));
        let (from, to, place) = if from_t1 || self.t2.bytes == 0 {
            (&mut self.t1, &mut self.b1, B1)
        } else {
            (&mut self.t2, &mut self.b2, B2)
        };
        if let Some(at) = from.pop_back(&mut self.slab) {
            let entry = self.slab.get_mut(at);
            entry.place = place;
            gone.push(entry.tag, Fate::Ghost);
            to.push_front(&mut self.slab, at);
        }
    }

    fn forget(&mut self, place: u8, gone: &mut Departures) {
        let ghosts = if place == B1 { &mut self.b1 } else { &mut self.b2 };
        if let Some(at) = ghosts.pop_back(&mut self.slab) {
            gone.push(self.slab.get(at).tag, Fate::Forgotten);
            self.slab.free(at);
        }
    }

    /// Makes room for an object that no list knows (the paper's case IV).
    fn evict_for_unknown(&mut self, size: u64, gone: &mut Departures) {
        if self.t1.bytes + self.b1.bytes + size > self.capacity {
            if self.b1.bytes > 0 {
                self.forget(B1, gone);
                self.replace(false, gone);
            } else if let Some(at) = self.t1.pop_back(&mut self.slab) {
                gone.push(self.slab.get(at).tag, Fate::Dropped);
                self.slab.free(at);
            } else {
                self.replace(false, gone);
            }
        } else {
            let total = self.t1.bytes + self.b1.bytes + self.t2.bytes + self.b2.bytes;
            if total >= self.capacity * 2 && self.b2.bytes > 0 {
                self.forget(B2, gone);
            }
            self.replace(false, gone);
        }
    }
}

impl Eviction for Arc {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        let mut ghost = None;
        if !slot.is_none() {
            let at = slot.0;
            let place = self.slab.get(at).place;
            match place {
                T1 => {
                    self.t1.unlink(&mut self.slab, at);
                    self.slab.get_mut(at).place = T2;
                    self.t2.push_front(&mut self.slab, at);
                    return Outcome { hit: true, slot };
                }
                T2 => {
                    self.t2.list.move_to_front(&mut self.slab, at);
                    return Outcome { hit: true, slot };
                }
                B1 => {
                    let delta = (self.b2.bytes as f64 / self.b1.bytes as f64).max(1.0);
                    self.target = (self.target + delta).min(self.capacity as f64);
                    self.b1.unlink(&mut self.slab, at);
                }
                _ => {
                    let delta = (self.b1.bytes as f64 / self.b2.bytes as f64).max(1.0);
                    self.target = (self.target - delta).max(0.0);
                    self.b2.unlink(&mut self.slab, at);
                }
            }
            self.slab.free(at);
            ghost = Some(place);
        }
        let size = u64::from(access.size);
        if size > self.capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.used() + size > self.capacity {
            match ghost {
                Some(place) => self.replace(place == B2, gone),
                None => self.evict_for_unknown(size, gone),
            }
        }
        let place = if ghost.is_some() { T2 } else { T1 };
        let at = self.slab.take(Entry::new(access.tag, access.size, place));
        let queue = if ghost.is_some() { &mut self.t2 } else { &mut self.t1 };
        queue.push_front(&mut self.slab, at);
        Outcome { hit: false, slot: Slot(at) }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        let place = self.slab.get(slot.0).place;
        let queue = match place {
            T1 => &mut self.t1,
            T2 => &mut self.t2,
            B1 => &mut self.b1,
            _ => &mut self.b2,
        };
        queue.unlink(&mut self.slab, slot.0);
        self.slab.free(slot.0);
        place <= T2
    }

    fn used(&self) -> u64 {
        self.t1.bytes + self.t2.bytes
    }

    fn memory_bytes(&self) -> usize {
        self.slab.memory_bytes()
    }

    #[inline]
    fn prefetch(&self, slot: Slot) {
        self.slab.prefetch(slot.0);
    }
}
