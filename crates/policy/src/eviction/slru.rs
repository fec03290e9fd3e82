//! Segmented LRU (Karedla, Love and Wherry 1994), as libCacheSim decides.

use larder_base::slab::Slab;

use super::queue::{Entry, Queue};
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

/// LRU lists in a row. A hit moves an object to the front of the next list up; a list that has grown too large hands
/// its last object down. A new object enters the lowest list that has room.
///
/// Objects larger than the lowest list's capacity are refused.
#[derive(Debug)]
pub struct Slru {
    capacity: u64,
    slab: Slab<Entry>,
    segments: Vec<Queue>,
    capacities: Vec<u64>,
    used: u64,
}

impl Slru {
    /// An empty cache of four equal segments.
    pub fn new(capacity: u64) -> Slru {
        Slru::with_capacities(capacity, vec![(capacity / 4).max(1); 4])
    }

    /// An empty cache whose segments, from the lowest, have these capacities (1 to 255 of them).
    pub(super) fn with_capacities(capacity: u64, capacities: Vec<u64>) -> Slru {
        Slru {
            capacity,
            slab: Slab::new(),
            segments: vec![Queue::default(); capacities.len()],
            capacities,
            used: 0,
        }
    }

    pub(super) fn accepts(&self, size: u32) -> bool {
        u64::from(size) <= self.capacity && u64::from(size) <= self.capacities[0]
    }

    pub(super) fn has_room(&self, size: u32) -> bool {
        self.used + u64::from(size) <= self.capacity
    }

    /// The next to go, in the lowest list that is not empty.
    pub(super) fn victim(&self) -> Option<Slot> {
        self.segments.iter().find(|s| !s.list.is_empty()).map(|s| Slot(s.list.back()))
    }

    pub(super) fn tag(&self, slot: Slot) -> u32 {
        self.slab.get(slot.0).tag
    }

    pub(super) fn evict(&mut self, gone: &mut Departures) {
        if let Some(victim) = self.victim() {
            gone.push(self.tag(victim), Fate::Dropped);
            self.remove(victim);
        }
    }

    pub(super) fn hit(&mut self, slot: Slot, gone: &mut Departures) {
        let at = slot.0;
        let from = usize::from(self.slab.get(at).place);
        if from + 1 == self.segments.len() {
            self.segments[from].list.move_to_front(&mut self.slab, at);
            return;
        }
        self.segments[from].unlink(&mut self.slab, at);
        self.slab.get_mut(at).place += 1;
        self.segments[from + 1].push_front(&mut self.slab, at);
        self.cool(from + 1, gone);
    }

    /// Hands objects down from segment `top` and those below until each fits again.
    fn cool(&mut self, top: usize, gone: &mut Departures) {
        while self.segments[top].bytes > self.capacities[top] {
            if top == 0 {
                self.evict(gone);
                continue;
            }
            let Some(at) = self.segments[top].pop_back(&mut self.slab) else { return };
            self.slab.get_mut(at).place -= 1;
            self.segments[top - 1].push_front(&mut self.slab, at);
            self.cool(top - 1, gone);
        }
    }

    pub(super) fn insert(&mut self, access: &Access) -> Slot {
        let size = u64::from(access.size);
        let place = (0..self.segments.len())
            .find(|&i| self.segments[i].bytes + size <= self.capacities[i])
            .unwrap_or(0);
        let at = self.slab.take(Entry::new(access.tag, access.size, place as u8));
        self.segments[place].push_front(&mut self.slab, at);
        self.used += size;
        Slot(at)
    }
}

impl Eviction for Slru {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        if !slot.is_none() {
            self.hit(slot, gone);
            return Outcome { hit: true, slot };
        }
        if !self.accepts(access.size) {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while !self.has_room(access.size) {
            self.evict(gone);
        }
        Outcome { hit: false, slot: self.insert(access) }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        let entry = *self.slab.get(slot.0);
        self.segments[usize::from(entry.place)].unlink(&mut self.slab, slot.0);
        self.used -= u64::from(entry.size);
        self.slab.free(slot.0);
        true
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn memory_bytes(&self) -> usize {
        self.slab.memory_bytes()
    }

    #[inline]
    fn prefetch(&self, slot: Slot) {
        self.slab.prefetch(slot.0);
    }
}
