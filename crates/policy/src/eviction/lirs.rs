//! LIRS (Jiang and Zhang, SIGMETRICS '02), as libCacheSim decides.

use larder_base::slab::{List, NIL, Slab};

use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

#[derive(Debug)]
struct Entry {
    tag: u32,
    size: u32,
    in_stack: bool,
    in_queue: bool,
    is_ghost: bool,
    /// Of low inter-reference recency: resident, and in the stack.
    low: bool,
    /// Asked for by the request under way: not to be evicted.
    pinned: bool,
}

/// A stack S of objects by recency: LIR, resident HIR and ghosts (HIR that are no longer resident); a queue Q of
/// resident HIR objects (1 % of the capacity, at least 1); ghosts are bounded by limiting S to twice the capacity.
///
/// As in the reference, and unlike the paper, a hit on a HIR object that has left S demotes the last LIR object, and
/// the object stays HIR. Two deviations: where that would evict the very object that hit (possible when Q holds one
/// object), the reference keeps it without counting it, and here it is not evicted; and where sizes are bytes the
/// reference stops on cases that this implementation passes by evicting once more.
#[derive(Debug)]
pub struct Lirs {
    capacity: u64,
    low_limit: u64,
    high_limit: u64,
    low_bytes: u64,
    high_bytes: u64,
    stack_bytes: u64,
    used: u64,
    /// Links of the stack.
    slab: Slab<Entry>,
    /// Links of the queue and of the ghosts, under the same indices: nothing is in both.
    side: Slab<()>,
    stack: List,
    queue: List,
    ghosts: List,
}

impl Lirs {
    /// An empty cache.
    pub fn new(capacity: u64) -> Lirs {
        let high_limit = ((0.01 * capacity as f64) as u64).max(1).min(capacity);
        Lirs {
            capacity,
            low_limit: capacity - high_limit,
            high_limit,
            low_bytes: 0,
            high_bytes: 0,
            stack_bytes: 0,
            used: 0,
            slab: Slab::new(),
            side: Slab::new(),
            stack: List::new(),
            queue: List::new(),
            ghosts: List::new(),
        }
    }

    fn size(&self, at: u32) -> u64 {
        u64::from(self.slab.get(at).size)
    }

    fn push_stack(&mut self, at: u32) {
        self.stack_bytes += self.size(at);
        self.slab.get_mut(at).in_stack = true;
        self.stack.push_front(&mut self.slab, at);
    }

    fn leave_stack(&mut self, at: u32) {
        self.stack_bytes -= self.size(at);
        let entry = self.slab.get_mut(at);
        entry.in_stack = false;
        entry.low = false;
        self.stack.unlink(&mut self.slab, at);
    }

    fn push_queue(&mut self, at: u32) {
        self.high_bytes += self.size(at);
        self.slab.get_mut(at).in_queue = true;
        self.queue.push_front(&mut self.side, at);
    }

    fn leave_queue(&mut self, at: u32) {
        self.high_bytes -= self.size(at);
        self.slab.get_mut(at).in_queue = false;
        self.queue.unlink(&mut self.side, at);
    }

    fn leave_ghosts(&mut self, at: u32) {
        let entry = self.slab.get_mut(at);
        if entry.is_ghost {
            entry.is_ghost = false;
            self.ghosts.unlink(&mut self.side, at);
        }
    }

    fn free(&mut self, at: u32) {
        self.slab.free(at);
        self.side.free(at);
    }

    /// The last of Q leaves the cache; it stays a ghost while it is in S.
    fn evict_high(&mut self, gone: &mut Departures) -> bool {
        let at = self.queue.back();
        if at == NIL || self.slab.get(at).pinned {
            return false;
        }
        self.leave_queue(at);
        self.used -= self.size(at);
        let entry = self.slab.get_mut(at);
        let tag = entry.tag;
        if entry.in_stack {
            entry.is_ghost = true;
            self.ghosts.push_front(&mut self.side, at);
            gone.push(tag, Fate::Ghost);
        } else {
            gone.push(tag, Fate::Dropped);
            self.free(at);
        }
        true
    }

    /// The last LIR object moves to Q.
    fn demote_low(&mut self, gone: &mut Departures) -> bool {
        // A delete can have left other objects below the last LIR object.
        self.prune(gone);
        let at = self.stack.back();
        if at == NIL || !self.slab.get(at).low || self.slab.get(at).pinned {
            return false;
        }
        let size = self.size(at);
        self.low_bytes -= size;
        self.leave_stack(at);
        if size <= self.high_limit {
            while self.high_bytes + size > self.high_limit && self.evict_high(gone) {}
            self.push_queue(at);
        } else {
            self.used -= size;
            gone.push(self.slab.get(at).tag, Fate::Dropped);
            self.free(at);
        }
        self.prune(gone);
        true
    }

    /// Takes HIR objects off the bottom of S, so that a LIR object is last.
    fn prune(&mut self, gone: &mut Departures) {
        while self.stack.back() != self.stack.front() {
            let at = self.stack.back();
            if self.slab.get(at).low {
                break;
            }
            let was_ghost = self.slab.get(at).is_ghost;
            self.leave_ghosts(at);
            self.leave_stack(at);
            if !self.slab.get(at).in_queue && !self.slab.get(at).pinned {
                let fate = if was_ghost { Fate::Forgotten } else { Fate::Dropped };
                gone.push(self.slab.get(at).tag, fate);
                self.free(at);
            }
        }
    }

    fn make_low_room(&mut self, size: u64, gone: &mut Departures) {
        while self.low_bytes + size > self.low_limit && self.demote_low(gone) {}
    }

    fn hit(&mut self, at: u32, gone: &mut Departures) {
        let size = self.size(at);
        let entry = self.slab.get(at);
        let (in_stack, in_queue, low) = (entry.in_stack, entry.in_queue, entry.low);
        if in_stack {
            self.stack.move_to_front(&mut self.slab, at);
        }
        if in_queue {
            self.queue.move_to_front(&mut self.side, at);
        }
        self.slab.get_mut(at).pinned = true;
        if low {
            self.prune(gone);
        } else if in_stack {
            if in_queue {
                self.leave_queue(at);
                self.used -= size;
            }
            self.make_low_room(size, gone);
            self.slab.get_mut(at).low = true;
            self.low_bytes += size;
            self.used += size;
        } else {
            self.make_low_room(size, gone);
            self.push_stack(at);
        }
        self.slab.get_mut(at).pinned = false;
    }

    fn limit_stack(&mut self, gone: &mut Departures) {
        while self.stack_bytes > 2 * self.capacity {
            let at = self.ghosts.back();
            if at == NIL {
                break;
            }
            self.leave_ghosts(at);
            self.leave_stack(at);
            gone.push(self.slab.get(at).tag, Fate::Forgotten);
            self.free(at);
        }
    }

    /// Makes room as the reference does for an object that nothing remembers; false when it cannot be held.
    fn admit_unknown(&mut self, size: u64, gone: &mut Departures) -> bool {
        if size > self.low_limit || size > self.high_limit {
            return false;
        }
        let low_full = self.low_bytes + size > self.low_limit;
        if low_full && self.high_bytes + size > self.high_limit {
            while self.high_bytes + size > self.high_limit && self.evict_high(gone) {}
        }
        while self.used + size > self.capacity {
            if !self.evict_high(gone) && !self.demote_low(gone) {
                break;
            }
        }
        true
    }

    fn take_in(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Slot {
        let size = u64::from(access.size);
        if !slot.is_none() {
            // A ghost: it comes back as a LIR object, with the size it had.
            let at = slot.0;
            let size = self.size(at);
            if size > self.low_limit {
                self.remove(slot);
                return Slot::NONE;
            }
            self.slab.get_mut(at).pinned = true;
            self.stack.move_to_front(&mut self.slab, at);
            self.make_low_room(size, gone);
            self.leave_ghosts(at);
            while self.used + size > self.capacity {
                let mut moved = false;
                while self.high_bytes >= self.high_limit && self.evict_high(gone) {
                    moved = true;
                }
                if !self.demote_low(gone) && !moved {
                    break;
                }
            }
            let entry = self.slab.get_mut(at);
            entry.low = true;
            entry.pinned = false;
            self.low_bytes += size;
            self.used += size;
            return slot;
        }
        if size > self.capacity || !self.admit_unknown(size, gone) {
            return Slot::NONE;
        }
        let at = self.slab.take(Entry {
            tag: access.tag,
            size: access.size,
            in_stack: false,
            in_queue: false,
            is_ghost: false,
            low: false,
            pinned: false,
        });
        let same = self.side.take(());
        debug_assert_eq!(at, same, "the two slabs are taken from and freed in step");
        self.push_stack(at);
        if self.low_bytes + size <= self.low_limit {
            self.slab.get_mut(at).low = true;
            self.low_bytes += size;
        } else {
            self.push_queue(at);
        }
        self.used += size;
        Slot(at)
    }
}

impl Eviction for Lirs {
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        let hit = !slot.is_none() && !self.slab.get(slot.0).is_ghost;
        let slot = if hit {
            self.hit(slot.0, gone);
            slot
        } else {
            self.take_in(access, slot, gone)
        };
        self.limit_stack(gone);
        Outcome { hit, slot }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        let at = slot.0;
        let size = self.size(at);
        let entry = self.slab.get(at);
        let (in_stack, in_queue, low) = (entry.in_stack, entry.in_queue, entry.low);
        let resident = !entry.is_ghost;
        if low {
            self.low_bytes -= size;
        }
        if low || in_queue {
            self.used -= size;
        }
        self.leave_ghosts(at);
        if in_queue {
            self.leave_queue(at);
        }
        if in_stack {
            self.leave_stack(at);
        }
        self.free(at);
        resident
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn memory_bytes(&self) -> usize {
        self.slab.memory_bytes() + self.side.memory_bytes()
    }

    #[inline]
    fn prefetch(&self, slot: Slot) {
        self.slab.prefetch(slot.0);
    }
}
