//! W-TinyLFU (Einziger, Friedman and Manes, ACM Transactions on Storage 2017), as libCacheSim's 2024 release decides.

use larder_base::slab::Slab;

use super::kind::Unit;
use super::queue::{Queue, Sized32};
use super::sketch::CountingBloom;
use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

#[derive(Debug)]
struct Entry {
    tag: u32,
    size: u32,
    fingerprint: u64,
    place: u8,
}

impl Sized32 for Entry {
    fn size(&self) -> u32 {
        self.size
    }
}

/// Entries of a sketch for capacities in bytes: 115 MiB of counters.
const MOST_ENTRIES: u64 = 1 << 22;

const WINDOW: u8 = 0;
const PROBATION: u8 = 1;
const PROTECTED: u8 = 2;

/// An LRU window (1 %) before a segmented LRU (two lists, 1:4). What falls out of the window enters the main part only
/// when the sketch has seen it more often than the main part's victim. Counters are halved every 32 × capacity hits in
/// the main part.
///
/// Where sizes are bytes, the sketch has an entry for each KiB of capacity, four million at most (the reference has one
/// for each byte), so counts agree with the reference exactly only where objects are counted.
#[derive(Debug)]
pub struct WTinyLfu {
    capacity: u64,
    window_capacity: u64,
    main_capacity: u64,
    probation_capacity: u64,
    protected_capacity: u64,
    slab: Slab<Entry>,
    window: Queue,
    probation: Queue,
    protected: Queue,
    sketch: CountingBloom,
    hits: u64,
}

impl WTinyLfu {
    /// An empty cache.
    pub fn new(capacity: u64, unit: Unit) -> WTinyLfu {
        let window_capacity = ((capacity as f64 * 0.01) as u64).max(1).min(capacity);
        let main_capacity = capacity - window_capacity;
        let entries = match unit {
            Unit::Objects => main_capacity,
            Unit::Bytes => main_capacity.div_ceil(1024).min(MOST_ENTRIES),
        };
        WTinyLfu {
            capacity,
            window_capacity,
            main_capacity,
            probation_capacity: ((1.0 / 5.0 * main_capacity as f64) as u64).max(1),
            protected_capacity: (4.0 / 5.0 * main_capacity as f64) as u64,
            slab: Slab::new(),
            window: Queue::default(),
            probation: Queue::default(),
            protected: Queue::default(),
            sketch: CountingBloom::new(entries.max(1)),
            hits: 0,
        }
    }

    fn main_used(&self) -> u64 {
        self.probation.bytes + self.protected.bytes
    }

    fn hit_main(&mut self, at: u32, gone: &mut Departures) {
        if self.slab.get(at).place == PROTECTED {
            self.protected.list.move_to_front(&mut self.slab, at);
        } else {
            self.probation.unlink(&mut self.slab, at);
            self.slab.get_mut(at).place = PROTECTED;
            self.protected.push_front(&mut self.slab, at);
            while self.protected.bytes > self.protected_capacity {
                let Some(last) = self.protected.pop_back(&mut self.slab) else { break };
                self.slab.get_mut(last).place = PROBATION;
                self.probation.push_front(&mut self.slab, last);
                while self.probation.bytes > self.probation_capacity {
                    self.evict_main(gone);
                }
            }
        }
        let fingerprint = self.slab.get(at).fingerprint;
        self.sketch.add(fingerprint);
        self.hits += 1;
        if self.hits >= 32 * self.main_capacity {
            self.hits = 0;
            self.sketch.halve();
        }
    }

    fn main_victim(&self) -> u32 {
        if self.probation.list.is_empty() {
            self.protected.list.back()
        } else {
            self.probation.list.back()
        }
    }

    fn evict_main(&mut self, gone: &mut Departures) {
        let victim = self.main_victim();
        gone.push(self.slab.get(victim).tag, Fate::Dropped);
        self.remove(Slot(victim));
    }

    fn enter_main(&mut self, at: u32, gone: &mut Departures) {
        let size = u64::from(self.slab.get(at).size);
        let place = if self.probation.bytes + size <= self.probation_capacity {
            PROBATION
        } else if self.protected.bytes + size <= self.protected_capacity {
            PROTECTED
        } else {
            while self.main_used() + size > self.main_capacity {
                self.evict_main(gone);
            }
            PROBATION
        };
        self.slab.get_mut(at).place = place;
        let queue = if place == PROBATION { &mut self.probation } else { &mut self.protected };
        queue.push_front(&mut self.slab, at);
    }

    fn evict(&mut self, gone: &mut Departures) {
        loop {
            let candidate = self.window.list.back();
            if self.window.list.is_empty() {
                self.evict_main(gone);
                return;
            }
            let (size, fingerprint) = {
                let entry = self.slab.get(candidate);
                (u64::from(entry.size), entry.fingerprint)
            };
            let mut evicted = false;
            if self.main_used() + size <= self.main_capacity {
                self.window.unlink(&mut self.slab, candidate);
                self.enter_main(candidate, gone);
            } else {
                // A main part of no capacity (caches of one object) has no victim, and the candidate loses.
                let wins = self.main_used() > 0 && {
                    let victim = self.slab.get(self.main_victim()).fingerprint;
                    self.sketch.estimate(fingerprint) > self.sketch.estimate(victim)
                };
                if wins {
                    self.evict_main(gone);
                    self.window.unlink(&mut self.slab, candidate);
                    self.enter_main(candidate, gone);
                } else {
                    gone.push(self.slab.get(candidate).tag, Fate::Dropped);
                    self.remove(Slot(candidate));
                    evicted = true;
                }
            }
            self.sketch.add(fingerprint);
            if evicted {
                return;
            }
        }
    }
}

impl Eviction for WTinyLfu {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        if !slot.is_none() {
            if self.slab.get(slot.0).place == WINDOW {
                self.window.list.move_to_front(&mut self.slab, slot.0);
            } else {
                self.hit_main(slot.0, gone);
            }
            return Outcome { hit: true, slot };
        }
        let size = u64::from(access.size);
        if size > self.window_capacity || size > self.probation_capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.used() + size > self.capacity {
            self.evict(gone);
        }
        let at = self.slab.take(Entry {
            tag: access.tag,
            size: access.size,
            fingerprint: access.fingerprint,
            place: WINDOW,
        });
        self.window.push_front(&mut self.slab, at);
        self.sketch.add(access.fingerprint);
        Outcome { hit: false, slot: Slot(at) }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        let queue = match self.slab.get(slot.0).place {
            WINDOW => &mut self.window,
            PROBATION => &mut self.probation,
            _ => &mut self.protected,
        };
        queue.unlink(&mut self.slab, slot.0);
        self.slab.free(slot.0);
        true
    }

    fn used(&self) -> u64 {
        self.window.bytes + self.main_used()
    }

    fn memory_bytes(&self) -> usize {
        self.slab.memory_bytes() + self.sketch.memory_bytes()
    }

    #[inline]
    fn prefetch(&self, slot: Slot) {
        self.slab.prefetch(slot.0);
    }
}
