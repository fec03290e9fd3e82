//! Least frequently used, in constant time (Shah, Mitra and Matani 2010); the oldest of the least used goes first.

use larder_base::slab::{List, NIL, Slab};

use super::{Access, Departures, Eviction, Fate, Outcome, Slot};

#[derive(Debug)]
struct Entry {
    tag: u32,
    size: u32,
    bucket: u32,
}

#[derive(Debug)]
struct Bucket {
    uses: u64,
    members: List,
}

/// Objects hang in buckets by number of uses since they came in; buckets are in order of uses. Within a bucket the
/// object that entered the bucket first is the victim.
#[derive(Debug)]
pub struct Lfu {
    capacity: u64,
    used: u64,
    slab: Slab<Entry>,
    buckets: Slab<Bucket>,
    /// From the least uses to the most.
    order: List,
}

impl Lfu {
    /// An empty cache.
    pub fn new(capacity: u64) -> Lfu {
        Lfu { capacity, used: 0, slab: Slab::new(), buckets: Slab::new(), order: List::new() }
    }

    fn leave_bucket(&mut self, at: u32) -> u64 {
        let id = self.slab.get(at).bucket;
        let bucket = self.buckets.get_mut(id);
        bucket.members.unlink(&mut self.slab, at);
        let uses = bucket.uses;
        if bucket.members.is_empty() {
            self.order.unlink(&mut self.buckets, id);
            self.buckets.free(id);
        }
        uses
    }

    fn enter_bucket(&mut self, at: u32, id: u32) {
        self.slab.get_mut(at).bucket = id;
        self.buckets.get_mut(id).members.push_back(&mut self.slab, at);
    }

    fn hit(&mut self, at: u32) {
        let old = self.slab.get(at).bucket;
        let uses = self.buckets.get(old).uses + 1;
        let after = self.buckets.after(old);
        if after != NIL && self.buckets.get(after).uses == uses {
            self.leave_bucket(at);
            self.enter_bucket(at, after);
        } else if self.buckets.get(old).members.len() == 1 {
            self.buckets.get_mut(old).uses = uses;
        } else {
            self.leave_bucket(at);
            let new = self.buckets.take(Bucket { uses, members: List::new() });
            self.order.insert_after(&mut self.buckets, old, new);
            self.enter_bucket(at, new);
        }
    }
}

impl Eviction for Lfu {
    #[inline]
    fn request(&mut self, access: &Access, slot: Slot, gone: &mut Departures) -> Outcome {
        if !slot.is_none() {
            self.hit(slot.0);
            return Outcome { hit: true, slot };
        }
        let size = u64::from(access.size);
        if size > self.capacity {
            return Outcome { hit: false, slot: Slot::NONE };
        }
        while self.used + size > self.capacity {
            let victim = self.buckets.get(self.order.front()).members.front();
            gone.push(self.slab.get(victim).tag, Fate::Dropped);
            self.remove(Slot(victim));
        }
        let front = self.order.front();
        let id = if front != NIL && self.buckets.get(front).uses == 1 {
            front
        } else {
            let id = self.buckets.take(Bucket { uses: 1, members: List::new() });
            self.order.push_front(&mut self.buckets, id);
            id
        };
        let at = self.slab.take(Entry { tag: access.tag, size: access.size, bucket: id });
        self.enter_bucket(at, id);
        self.used += size;
        Outcome { hit: false, slot: Slot(at) }
    }

    fn remove(&mut self, slot: Slot) -> bool {
        self.leave_bucket(slot.0);
        self.used -= u64::from(self.slab.get(slot.0).size);
        self.slab.free(slot.0);
        true
    }

    fn used(&self) -> u64 {
        self.used
    }

    fn memory_bytes(&self) -> usize {
        self.slab.memory_bytes() + self.buckets.memory_bytes()
    }

    #[inline]
    fn prefetch(&self, slot: Slot) {
        self.slab.prefetch(slot.0);
    }
}
