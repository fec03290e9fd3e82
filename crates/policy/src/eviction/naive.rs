//! The policies once more, in the plainest form that can be written: vectors, linear search, no slots. The property
//! tests compare victims with these one by one.

use std::collections::BTreeMap;

use super::sketch::CountingBloom;

/// Index 0 is the front (most recent).
pub(super) type Queue = Vec<u32>;

/// One policy over tags whose sizes are in `sizes`.
pub(super) trait Naive {
    /// Serves a request; returns whether it hit, and appends the tags that stopped being resident.
    fn request(&mut self, tag: u32, size: u64, victims: &mut Vec<u32>) -> bool;
    /// Deletes an object.
    fn remove(&mut self, tag: u32);
}

#[derive(Default)]
pub(super) struct Sizes(BTreeMap<u32, u64>);

impl Sizes {
    fn of(&self, queue: &Queue) -> u64 {
        queue.iter().map(|t| self.0[t]).sum()
    }
}

fn take(queue: &mut Queue, tag: u32) -> bool {
    let at = queue.iter().position(|&t| t == tag);
    at.map(|at| queue.remove(at)).is_some()
}

/// LRU, FIFO and CLOCK.
pub(super) struct OneQueue {
    pub(super) capacity: u64,
    pub(super) move_on_hit: bool,
    /// Highest count; 0 for LRU and FIFO.
    pub(super) most: u32,
    pub(super) queue: Queue,
    pub(super) uses: BTreeMap<u32, u32>,
    pub(super) sizes: Sizes,
}

impl OneQueue {
    pub(super) fn new(capacity: u64, move_on_hit: bool, most: u32) -> OneQueue {
        let (queue, uses, sizes) = Default::default();
        OneQueue { capacity, move_on_hit, most, queue, uses, sizes }
    }
}

impl Naive for OneQueue {
    fn request(&mut self, tag: u32, size: u64, victims: &mut Vec<u32>) -> bool {
        if self.queue.contains(&tag) {
            if self.move_on_hit {
                take(&mut self.queue, tag);
                self.queue.insert(0, tag);
            }
            let uses = self.uses.entry(tag).or_default();
            *uses = (*uses + 1).min(self.most);
            return true;
        }
        if size > self.capacity {
            return false;
        }
        while self.sizes.of(&self.queue) + size > self.capacity {
            let last = self.queue.pop().unwrap();
            let uses = self.uses.entry(last).or_default();
            if *uses > 0 {
                *uses -= 1;
                self.queue.insert(0, last);
            } else {
                victims.push(last);
            }
        }
        self.queue.insert(0, tag);
        self.uses.insert(tag, 0);
        self.sizes.0.insert(tag, size);
        false
    }

    fn remove(&mut self, tag: u32) {
        take(&mut self.queue, tag);
    }
}

/// SIEVE: the hand is a position in the queue.
pub(super) struct Sieve {
    pub(super) capacity: u64,
    queue: Queue,
    visited: BTreeMap<u32, bool>,
    /// The object that the hand points to.
    hand: Option<u32>,
    sizes: Sizes,
}

impl Sieve {
    pub(super) fn new(capacity: u64) -> Sieve {
        let (queue, visited, hand, sizes) = Default::default();
        Sieve { capacity, queue, visited, hand, sizes }
    }

    fn towards_front(&self, tag: u32) -> Option<u32> {
        let at = self.queue.iter().position(|&t| t == tag).unwrap();
        (at > 0).then(|| self.queue[at - 1])
    }
}

impl Naive for Sieve {
    fn request(&mut self, tag: u32, size: u64, victims: &mut Vec<u32>) -> bool {
        if self.queue.contains(&tag) {
            self.visited.insert(tag, true);
            return true;
        }
        if size > self.capacity {
            return false;
        }
        while self.sizes.of(&self.queue) + size > self.capacity {
            let mut at = self.hand.unwrap_or(*self.queue.last().unwrap());
            while self.visited[&at] {
                self.visited.insert(at, false);
                at = self.towards_front(at).unwrap_or(*self.queue.last().unwrap());
            }
            self.hand = self.towards_front(at);
            take(&mut self.queue, at);
            victims.push(at);
        }
        self.queue.insert(0, tag);
        self.visited.insert(tag, false);
        self.sizes.0.insert(tag, size);
        false
    }

    fn remove(&mut self, tag: u32) {
        if self.hand == Some(tag) {
            self.hand = self.towards_front(tag);
        }
        take(&mut self.queue, tag);
    }
}

/// Policies whose victim is the least of a key: LFU, GDSF and (negated) Belady.
pub(super) struct Ranked {
    pub(super) capacity: u64,
    pub(super) rank: Rank,
    resident: BTreeMap<u32, (u64, u64)>,
    sizes: Sizes,
    age: f64,
    keys: BTreeMap<u32, f64>,
    time: u64,
}

pub(super) enum Rank {
    Lfu,
    Gdsf,
}

impl Ranked {
    pub(super) fn new(capacity: u64, rank: Rank) -> Ranked {
        let (resident, sizes, keys) = Default::default();
        Ranked { capacity, rank, resident, sizes, age: 0.0, keys, time: 0 }
    }

    fn key(&self, uses: u64, size: u64) -> f64 {
        match self.rank {
            Rank::Lfu => uses as f64,
            Rank::Gdsf => self.age + uses as f64 * 1.0e6 / size as f64,
        }
    }
}

impl Naive for Ranked {
    fn request(&mut self, tag: u32, size: u64, victims: &mut Vec<u32>) -> bool {
        self.time += 1;
        if let Some(&(uses, _)) = self.resident.get(&tag) {
            self.resident.insert(tag, (uses + 1, self.time));
            let key = self.key(uses + 1, self.sizes.0[&tag]);
            self.keys.insert(tag, key);
            return true;
        }
        if size > self.capacity {
            return false;
        }
        while self.resident.keys().map(|t| self.sizes.0[t]).sum::<u64>() + size > self.capacity {
            let least = *self
                .resident
                .iter()
                .min_by(|a, b| {
                    let by_key = self.keys[a.0].total_cmp(&self.keys[b.0]);
                    by_key.then(a.1.1.cmp(&b.1.1))
                })
                .unwrap()
                .0;
            self.age = self.keys[&least];
            self.resident.remove(&least);
            victims.push(least);
        }
        self.sizes.0.insert(tag, size);
        self.resident.insert(tag, (1, self.time));
        let key = self.key(1, size);
        self.keys.insert(tag, key);
        false
    }

    fn remove(&mut self, tag: u32) {
        self.resident.remove(&tag);
    }
}

/// S3-FIFO, the release of 2024.
pub(super) struct S3Fifo {
    pub(super) capacity: u64,
    small: Queue,
    main: Queue,
    ghost: Queue,
    uses: BTreeMap<u32, u32>,
    sizes: Sizes,
    ghost_sizes: Sizes,
}

impl S3Fifo {
    pub(super) fn new(capacity: u64) -> S3Fifo {
        let (small, main, ghost, uses, sizes, ghost_sizes) = Default::default();
        S3Fifo { capacity, small, main, ghost, uses, sizes, ghost_sizes }
    }

    fn small_capacity(&self) -> u64 {
        (self.capacity / 10).max(1)
    }
}

impl Naive for S3Fifo {
    fn request(&mut self, tag: u32, size: u64, victims: &mut Vec<u32>) -> bool {
        if self.small.contains(&tag) || self.main.contains(&tag) {
            *self.uses.get_mut(&tag).unwrap() += 1;
            return true;
        }
        let remembered = take(&mut self.ghost, tag);
        let small_capacity = self.small_capacity();
        if size > small_capacity {
            return false;
        }
        while self.sizes.of(&self.small) + self.sizes.of(&self.main) + size > self.capacity {
            let main_full = self.sizes.of(&self.main) > self.capacity - small_capacity;
            if main_full || self.small.is_empty() {
                let last = self.main.pop().unwrap();
                let uses = self.uses.get_mut(&last).unwrap();
                if *uses > 0 {
                    *uses = (*uses).min(3) - 1;
                    self.main.insert(0, last);
                    // The reference looks for a victim in main until it finds one.
                    while let Some(last) = self.main.pop() {
                        let uses = self.uses.get_mut(&last).unwrap();
                        if *uses == 0 {
                            victims.push(last);
                            break;
                        }
                        *uses = (*uses).min(3) - 1;
                        self.main.insert(0, last);
                    }
                } else {
                    victims.push(last);
                }
                continue;
            }
            // The reference looks for a victim in small until it finds one, or small is empty.
            while let Some(last) = self.small.pop() {
                if self.uses[&last] >= 2 {
                    self.uses.insert(last, 0);
                    self.main.insert(0, last);
                    continue;
                }
                victims.push(last);
                let gone = self.sizes.0[&last];
                let room = self.capacity * 9 / 10;
                if gone <= room {
                    while self.ghost_sizes.of(&self.ghost) + gone > room {
                        self.ghost.pop();
                    }
                    self.ghost.insert(0, last);
                    self.ghost_sizes.0.insert(last, gone);
                }
                break;
            }
        }
        let queue = if remembered { &mut self.main } else { &mut self.small };
        queue.insert(0, tag);
        self.uses.insert(tag, 0);
        self.sizes.0.insert(tag, size);
        false
    }

    fn remove(&mut self, tag: u32) {
        take(&mut self.small, tag);
        take(&mut self.main, tag);
        take(&mut self.ghost, tag);
    }
}

/// Segmented LRU of four segments.
pub(super) struct Slru {
    pub(super) capacity: u64,
    segments: [Queue; 4],
    sizes: Sizes,
}

impl Slru {
    pub(super) fn new(capacity: u64) -> Slru {
        let (segments, sizes) = Default::default();
        Slru { capacity, segments, sizes }
    }

    fn limit(&self) -> u64 {
        (self.capacity / 4).max(1)
    }

    fn evict(&mut self, victims: &mut Vec<u32>) {
        let lowest = self.segments.iter_mut().find(|s| !s.is_empty()).unwrap();
        victims.push(lowest.pop().unwrap());
    }

    fn settle(&mut self, segment: usize, victims: &mut Vec<u32>) {
        while self.sizes.of(&self.segments[segment]) > self.limit() {
            if segment == 0 {
                self.evict(victims);
            } else {
                let last = self.segments[segment].pop().unwrap();
                self.segments[segment - 1].insert(0, last);
                self.settle(segment - 1, victims);
            }
        }
    }
}

impl Naive for Slru {
    fn request(&mut self, tag: u32, size: u64, victims: &mut Vec<u32>) -> bool {
        let limit = self.limit();
        if let Some(from) = self.segments.iter().position(|s| s.contains(&tag)) {
            let to = (from + 1).min(3);
            take(&mut self.segments[from], tag);
            self.segments[to].insert(0, tag);
            if to > from {
                self.settle(to, victims);
            }
            return true;
        }
        if size > limit {
            return false;
        }
        while self.segments.iter().map(|s| self.sizes.of(s)).sum::<u64>() + size > self.capacity {
            self.evict(victims);
        }
        let to = self.segments.iter().position(|s| self.sizes.of(s) + size <= limit).unwrap_or(0);
        self.segments[to].insert(0, tag);
        self.sizes.0.insert(tag, size);
        false
    }

    fn remove(&mut self, tag: u32) {
        for segment in &mut self.segments {
            take(segment, tag);
        }
    }
}

/// 2Q.
pub(super) struct TwoQ {
    pub(super) capacity: u64,
    a1_in: Queue,
    a1_out: Queue,
    main: Queue,
    sizes: Sizes,
}

impl TwoQ {
    pub(super) fn new(capacity: u64) -> TwoQ {
        let (a1_in, a1_out, main, sizes) = Default::default();
        TwoQ { capacity, a1_in, a1_out, main, sizes }
    }
}

impl Naive for TwoQ {
    fn request(&mut self, tag: u32, size: u64, victims: &mut Vec<u32>) -> bool {
        if self.a1_in.contains(&tag) {
            return true;
        }
        if take(&mut self.main, tag) {
            self.main.insert(0, tag);
            return true;
        }
        let (in_room, out_room) = ((self.capacity / 4).max(1), self.capacity / 2);
        let main_room = self.capacity - in_room;
        let remembered = take(&mut self.a1_out, tag);
        if size > in_room {
            return false;
        }
        while self.sizes.of(&self.a1_in) + self.sizes.of(&self.main) + size > self.capacity {
            if self.sizes.of(&self.a1_in) > in_room || self.main.is_empty() {
                let last = self.a1_in.pop().unwrap();
                victims.push(last);
                let gone = self.sizes.0[&last];
                if gone <= out_room {
                    while self.sizes.of(&self.a1_out) + gone > out_room {
                        self.a1_out.pop();
                    }
                    self.a1_out.insert(0, last);
                }
            } else {
                victims.push(self.main.pop().unwrap());
            }
        }
        if remembered {
            if size > main_room {
                return false;
            }
            while self.sizes.of(&self.main) + size > main_room {
                victims.push(self.main.pop().unwrap());
            }
            self.main.insert(0, tag);
        } else {
            self.a1_in.insert(0, tag);
        }
        self.sizes.0.insert(tag, size);
        false
    }

    fn remove(&mut self, tag: u32) {
        take(&mut self.a1_in, tag);
        take(&mut self.a1_out, tag);
        take(&mut self.main, tag);
    }
}

/// ARC for objects of size 1, after the paper's Figure 4.
pub(super) struct Arc {
    pub(super) capacity: usize,
    p: f64,
    t1: Queue,
    t2: Queue,
    b1: Queue,
    b2: Queue,
}

impl Arc {
    pub(super) fn new(capacity: usize) -> Arc {
        let (t1, t2, b1, b2) = Default::default();
        Arc { capacity, p: 0.0, t1, t2, b1, b2 }
    }

    fn replace(&mut self, in_b2: bool, victims: &mut Vec<u32>) {
        let t1 = self.t1.len() as f64;
        if !self.t1.is_empty() && (t1 > self.p || (in_b2 && t1 == self.p)) || self.t2.is_empty() {
            let last = self.t1.pop().unwrap();
            victims.push(last);
            self.b1.insert(0, last);
        } else {
            let last = self.t2.pop().unwrap();
            victims.push(last);
            self.b2.insert(0, last);
        }
    }
}

impl Naive for Arc {
    fn request(&mut self, tag: u32, _size: u64, victims: &mut Vec<u32>) -> bool {
        let c = self.capacity;
        if take(&mut self.t1, tag) || take(&mut self.t2, tag) {
            self.t2.insert(0, tag);
            return true;
        }
        let full = self.t1.len() + self.t2.len() >= c;
        if self.b1.contains(&tag) {
            let delta = (self.b2.len() as f64 / self.b1.len() as f64).max(1.0);
            self.p = (self.p + delta).min(c as f64);
            take(&mut self.b1, tag);
            if full {
                self.replace(false, victims);
            }
            self.t2.insert(0, tag);
        } else if self.b2.contains(&tag) {
            let delta = (self.b1.len() as f64 / self.b2.len() as f64).max(1.0);
            self.p = (self.p - delta).max(0.0);
            take(&mut self.b2, tag);
            if full {
                self.replace(true, victims);
            }
            self.t2.insert(0, tag);
        } else {
            if full {
                if self.t1.len() + self.b1.len() >= c {
                    if self.b1.is_empty() {
                        victims.push(self.t1.pop().unwrap());
                    } else {
                        self.b1.pop();
                        self.replace(false, victims);
                    }
                } else {
                    let all = self.t1.len() + self.t2.len() + self.b1.len() + self.b2.len();
                    if all >= 2 * c {
                        self.b2.pop();
                    }
                    self.replace(false, victims);
                }
            }
            self.t1.insert(0, tag);
        }
        false
    }

    fn remove(&mut self, tag: u32) {
        for queue in [&mut self.t1, &mut self.t2, &mut self.b1, &mut self.b2] {
            take(queue, tag);
        }
    }
}

/// W-TinyLFU in objects of size 1, over the same sketch.
pub(super) struct WTinyLfu {
    pub(super) capacity: usize,
    window: Queue,
    probation: Queue,
    protected: Queue,
    sketch: CountingBloom,
    hits: usize,
}

impl WTinyLfu {
    pub(super) fn new(capacity: usize) -> WTinyLfu {
        let main = capacity - (capacity / 100).max(1);
        let (window, probation, protected) = Default::default();
        let sketch = CountingBloom::new((main as u64).max(1));
        WTinyLfu { capacity, window, probation, protected, sketch, hits: 0 }
    }

    fn main_capacity(&self) -> usize {
        self.capacity - (self.capacity / 100).max(1)
    }

    fn main_victim(&mut self) -> &mut Queue {
        if self.probation.is_empty() { &mut self.protected } else { &mut self.probation }
    }

    fn enter_main(&mut self, tag: u32) {
        let main = self.main_capacity();
        let lower = (main / 5).max(1);
        if self.probation.len() < lower || self.protected.len() >= main * 4 / 5 {
            self.probation.insert(0, tag);
        } else {
            self.protected.insert(0, tag);
        }
    }
}

impl Naive for WTinyLfu {
    fn request(&mut self, tag: u32, _size: u64, victims: &mut Vec<u32>) -> bool {
        let main = self.main_capacity();
        if take(&mut self.window, tag) {
            self.window.insert(0, tag);
            return true;
        }
        let was_protected = self.protected.contains(&tag);
        if was_protected || self.probation.contains(&tag) {
            take(&mut self.probation, tag);
            take(&mut self.protected, tag);
            self.protected.insert(0, tag);
            while !was_protected && self.protected.len() > main * 4 / 5 {
                let last = self.protected.pop().unwrap();
                self.probation.insert(0, last);
                while self.probation.len() > (main / 5).max(1) {
                    victims.push(self.probation.pop().unwrap());
                }
            }
            self.sketch.add(u64::from(tag));
            self.hits += 1;
            if self.hits >= 32 * main {
                self.hits = 0;
                self.sketch.halve();
            }
            return true;
        }
        // As in the reference, once room is needed candidates leave the window until one loses, or none is left.
        let mut going =
            self.window.len() + self.probation.len() + self.protected.len() >= self.capacity;
        while going {
            let Some(&candidate) = self.window.last() else {
                let victim = self.main_victim().pop().unwrap();
                victims.push(victim);
                break;
            };
            if self.probation.len() + self.protected.len() < main {
                self.window.pop();
                self.enter_main(candidate);
            } else {
                let other = *self.main_victim().last().unwrap();
                let seen = self.sketch.estimate(u64::from(candidate));
                self.window.pop();
                if seen > self.sketch.estimate(u64::from(other)) {
                    self.main_victim().pop();
                    victims.push(other);
                    self.enter_main(candidate);
                } else {
                    victims.push(candidate);
                    going = false;
                }
            }
            self.sketch.add(u64::from(candidate));
        }
        self.window.insert(0, tag);
        self.sketch.add(u64::from(tag));
        false
    }

    fn remove(&mut self, tag: u32) {
        take(&mut self.window, tag);
        take(&mut self.probation, tag);
        take(&mut self.protected, tag);
    }
}

/// Belady for objects of size 1: knows the whole trace.
pub(super) fn belady_hits(trace: &[u32], capacity: usize) -> Vec<bool> {
    let mut resident: Queue = Vec::new();
    let mut hits = Vec::new();
    for (now, &tag) in trace.iter().enumerate() {
        hits.push(resident.contains(&tag));
        if resident.contains(&tag) {
            continue;
        }
        if resident.len() == capacity {
            let next = |t: u32| trace[now..].iter().position(|&x| x == t).unwrap_or(usize::MAX);
            let farthest = (0..resident.len()).max_by_key(|&i| next(resident[i])).unwrap();
            resident.swap_remove(farthest);
        }
        resident.push(tag);
    }
    hits
}
