//! Labelled samples of all applications in one bounded store.

use larder_base::AppId;

use super::Sample;
use super::features::Packed;

const NONE: u32 = u32::MAX;

/// A sliding window of labelled samples per application, in one slab: when it is full, the application that has most loses
/// its oldest. So a busy application cannot crowd out a quiet one, and what is learnt follows the present.
#[derive(Debug)]
pub(crate) struct Reservoir {
    slab: Vec<Node>,
    capacity: usize,
    queues: Box<[Queue]>,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// Marked: positive.
    x: Packed,
    /// The next younger of the same application.
    next: u32,
}

#[derive(Clone, Copy, Debug)]
struct Queue {
    oldest: u32,
    youngest: u32,
    len: u32,
    positives: u32,
}

/// Bytes that a sample is given when a policy's memory is divided: more than it takes. Fixed, since how many there are
/// decides what is learnt.
pub(crate) const RESERVED_BYTES: usize = 36;
const _: () = assert!(RESERVED_BYTES >= size_of::<Node>());
/// Samples by which the store grows.
const STEP: usize = 256;

impl Reservoir {
    /// A store of at most `capacity` samples for `apps` applications.
    pub(crate) fn new(capacity: usize, apps: usize) -> Reservoir {
        let empty = Queue { oldest: NONE, youngest: NONE, len: 0, positives: 0 };
        Reservoir {
            slab: Vec::new(),
            capacity: capacity.max(1),
            queues: vec![empty; apps].into_boxed_slice(),
        }
    }

    pub(crate) fn push(&mut self, app: AppId, sample: Sample) {
        let node = Node { x: Packed::of(&sample.x).marked(sample.positive), next: NONE };
        let at = if self.slab.len() < self.capacity {
            if self.slab.len() == self.slab.capacity() {
                self.slab.reserve_exact(STEP.min(self.capacity - self.slab.len()));
            }
            self.slab.push(node);
            self.slab.len() as u32 - 1
        } else {
            let at = self.drop_oldest();
            self.slab[at as usize] = node;
            at
        };
        let q = &mut self.queues[app.index()];
        if q.len == 0 {
            q.oldest = at;
        } else {
            self.slab[q.youngest as usize].next = at;
        }
        q.youngest = at;
        q.len += 1;
        q.positives += u32::from(sample.positive);
    }

    /// Frees the oldest node of the application that has most.
    fn drop_oldest(&mut self) -> u32 {
        let mut largest = 0;
        for i in 1..self.queues.len() {
            if self.queues[i].len > self.queues[largest].len {
                largest = i;
            }
        }
        let q = &mut self.queues[largest];
        let at = q.oldest;
        q.oldest = self.slab[at as usize].next;
        q.len -= 1;
        q.positives -= u32::from(self.slab[at as usize].x.mark());
        at
    }

    pub(crate) fn len(&self, app: AppId) -> u32 {
        self.queues[app.index()].len
    }

    /// Whether an application has as many samples as it will ever have: the store is full, and no other has more.
    pub(crate) fn has_its_part(&self, app: AppId) -> bool {
        let most = self.queues.iter().map(|q| q.len).max().unwrap_or(0);
        self.slab.len() == self.capacity && self.len(app) >= most
    }

    pub(crate) fn positives(&self, app: AppId) -> u32 {
        self.queues[app.index()].positives
    }

    /// The samples of an application, oldest first.
    pub(crate) fn iter(&self, app: AppId) -> impl Iterator<Item = Sample> + '_ {
        let q = self.queues[app.index()];
        let mut at = q.oldest;
        (0..q.len).map(move |_| {
            let node = &self.slab[at as usize];
            at = node.next;
            Sample { x: node.x.vector(), positive: node.x.mark() }
        })
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.slab.capacity() * size_of::<Node>() + self.queues.len() * size_of::<Queue>()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use larder_base::Rng;

    use super::super::{DIMENSIONS, SURVIVOR};
    use super::*;

    #[test]
    fn equals_a_naive_store() {
        let mut rng = Rng::new(2);
        let mut store = Reservoir::new(50, AppId::COUNT);
        let mut naive: Vec<VecDeque<Sample>> = vec![VecDeque::new(); AppId::COUNT];
        for i in 0..5000u16 {
            // One application is far busier than the others.
            let app = AppId(if rng.chance(0.9) { 0 } else { rng.below(5) as u16 });
            let mut x = [0; DIMENSIONS];
            (x[0], x[SURVIVOR]) = (i, (i % 2) << 10);
            let sample = Sample { x, positive: rng.chance(0.3) };
            if naive.iter().map(VecDeque::len).sum::<usize>() == 50 {
                let most = naive.iter().map(VecDeque::len).max().unwrap();
                naive.iter_mut().find(|q| q.len() == most).unwrap().pop_front();
            }
            store.push(app, sample);
            naive[app.index()].push_back(sample);
            for a in 0..5 {
                let app = AppId(a);
                assert!(store.iter(app).eq(naive[app.index()].iter().copied()));
                assert_eq!(store.len(app) as usize, naive[app.index()].len());
                assert_eq!(
                    store.positives(app) as usize,
                    naive[app.index()].iter().filter(|s| s.positive).count()
                );
            }
        }
        assert!(store.len(AppId(3)) >= 9, "quiet applications keep their part");
        assert!(store.memory_bytes() <= 50 * RESERVED_BYTES + AppId::COUNT * 16);
    }
}
