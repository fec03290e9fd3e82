//! Exact LRU miss ratios of every size in one pass: stack distances (Mattson, Gecsei, Slutz and Traiger 1970), counted
//! with a binary indexed tree over the times of last requests (Bennett and Kruskal 1975).

use super::sweep::{Row, ratio};

/// Takes a sequence of object tags; keeps how often each stack distance occurred.
///
/// Time is O(log objects) a request; memory 12 bytes an object and 16 bytes a distance that occurred.
#[derive(Debug, Default)]
pub struct StackDistances {
    /// The position of each object's last request; `u32::MAX` when there is none.
    last: Vec<u32>,
    /// The tag whose last request is at each position; `u32::MAX` where it has moved on.
    at: Vec<u32>,
    /// Number of live positions, as a binary indexed tree.
    tree: Vec<u32>,
    live: u32,
    next: u32,
    /// Requests and bytes by distance: `hits[d]` would hit in a cache of d + 1 objects and not in a smaller one.
    hits: Vec<(u64, u64)>,
    requests: u64,
    request_bytes: u64,
}

const NONE: u32 = u32::MAX;

impl StackDistances {
    /// Nothing seen yet.
    pub fn new() -> StackDistances {
        StackDistances::default()
    }

    fn add(&mut self, position: u32, by: i32) {
        let mut i = position as usize + 1;
        while i < self.tree.len() {
            self.tree[i] = self.tree[i].wrapping_add_signed(by);
            i += i & i.wrapping_neg();
        }
    }

    /// Live positions before `position`.
    fn before(&self, position: u32) -> u32 {
        let mut i = position as usize;
        let mut sum = 0u32;
        while i > 0 {
            sum = sum.wrapping_add(self.tree[i]);
            i &= i - 1;
        }
        sum
    }

    /// Moves the live positions together, in order, with room for as many again.
    fn compact(&mut self) {
        let mut kept = 0u32;
        for position in 0..self.next as usize {
            let tag = self.at[position];
            if tag != NONE {
                self.at[kept as usize] = tag;
                self.last[tag as usize] = kept;
                kept += 1;
            }
        }
        self.next = kept;
        let room = (kept as usize * 2).max(1 << 12);
        self.at.truncate(kept as usize);
        self.at.resize(room, NONE);
        // A tree of `kept` ones: each node holds how many of the first `kept` positions it covers.
        self.tree.clear();
        self.tree.resize(room + 1, 0);
        for i in 1..=room {
            let low = i - (i & i.wrapping_neg());
            self.tree[i] = (i.min(kept as usize) - low.min(kept as usize)) as u32;
        }
    }

    /// One request; `counted` is false during warm-up.
    pub fn request(&mut self, tag: u32, bytes: u32, counted: bool) {
        if self.last.len() <= tag as usize {
            self.last.resize(tag as usize + 1, NONE);
        }
        if self.next as usize == self.at.len() {
            self.compact();
        }
        let last = self.last[tag as usize];
        if counted {
            self.requests += 1;
            self.request_bytes += u64::from(bytes);
        }
        if last != NONE {
            // Objects asked for since: those whose last request is later.
            let distance = (self.live - self.before(last) - 1) as usize;
            if counted {
                if self.hits.len() <= distance {
                    self.hits.resize(distance + 1, (0, 0));
                }
                self.hits[distance].0 += 1;
                self.hits[distance].1 += u64::from(bytes);
            }
        }
        self.forget(tag);
        let position = self.next;
        self.next += 1;
        self.at[position as usize] = tag;
        self.last[tag as usize] = position;
        self.add(position, 1);
        self.live += 1;
    }

    /// The object is deleted: its next request misses at every size.
    ///
    /// For LRU this keeps the curve exact only up to the objects that a smaller cache had already evicted and a hole
    /// would have kept; curves of traces with deletes are therefore upper bounds of the hit ratio, within the number of
    /// deletes.
    pub fn forget(&mut self, tag: u32) {
        if let Some(last) = self.last.get_mut(tag as usize)
            && *last != NONE
        {
            let position = std::mem::replace(last, NONE);
            self.at[position as usize] = NONE;
            self.add(position, -1);
            self.live -= 1;
        }
    }

    /// The curve so far.
    pub fn curve(&self) -> LruCurve {
        let mut sum = (0, 0);
        let hits = self
            .hits
            .iter()
            .map(|&(n, bytes)| {
                sum = (sum.0 + n, sum.1 + bytes);
                sum
            })
            .collect();
        LruCurve { hits, requests: self.requests, request_bytes: self.request_bytes }
    }
}

/// Exact LRU hits for every size in objects.
#[derive(Debug)]
pub struct LruCurve {
    /// Hits and bytes hit in a cache of index + 1 objects.
    hits: Vec<(u64, u64)>,
    /// Requests counted.
    pub requests: u64,
    /// Bytes asked for.
    pub request_bytes: u64,
}

impl LruCurve {
    /// The size at which nothing more is gained.
    pub fn footprint(&self) -> u64 {
        self.hits.len() as u64
    }

    /// Misses and bytes missed in a cache of `size` objects.
    pub fn misses(&self, size: u64) -> (u64, u64) {
        let at = usize::try_from(size).unwrap_or(usize::MAX).min(self.hits.len());
        let (hits, bytes) = if at == 0 { (0, 0) } else { self.hits[at - 1] };
        (self.requests - hits, self.request_bytes - bytes)
    }

    /// The point of the curve at `size`.
    pub fn row(&self, size: u64) -> Row {
        let (misses, miss_bytes) = self.misses(size);
        Row {
            policy: "lru",
            size,
            admission: None,
            requests: self.requests,
            misses,
            request_bytes: self.request_bytes,
            miss_bytes,
            miss_ratio: ratio(misses, self.requests),
            byte_miss_ratio: ratio(miss_bytes, self.request_bytes),
            sample_rate: None,
            miss_ratio_error: None,
            curve: true,
        }
    }

    /// About `points` sizes from 1 to `objects`, those of the whole trace, evenly spaced on a logarithmic scale; of one
    /// point it is the last.
    pub fn sizes(&self, points: usize, objects: u64) -> Vec<u64> {
        let top = objects.max(self.footprint()).max(1);
        let between = points.saturating_sub(1);
        let mut sizes: Vec<u64> = (0..between)
            .map(|i| (top as f64).powf(i as f64 / between as f64).round() as u64)
            .collect();
        sizes.push(top);
        sizes.dedup();
        sizes
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    #[test]
    fn agrees_with_a_list() {
        let mut rng = Rng::new(21);
        let mut stack = StackDistances::new();
        let mut list: Vec<u32> = Vec::new();
        let mut by_distance = vec![0u64; 400];
        for i in 0..30_000 {
            let tag = (rng.below(400) * rng.below(400) / 400) as u32;
            if rng.chance(0.01) {
                stack.forget(tag);
                list.retain(|&t| t != tag);
                continue;
            }
            stack.request(tag, 2, i >= 100);
            if let Some(at) = list.iter().position(|&t| t == tag) {
                list.remove(at);
                by_distance[at] += u64::from(i >= 100);
            }
            list.insert(0, tag);
        }
        let curve = stack.curve();
        for size in [0, 1, 2, 10, 100, 399, 1000] {
            let hits: u64 = by_distance.iter().take(size).sum();
            assert_eq!(
                curve.misses(size as u64),
                (curve.requests - hits, 2 * (curve.requests - hits))
            );
        }
        let sizes = curve.sizes(20, 400);
        assert_eq!((sizes[0], *sizes.last().unwrap()), (1, 400));
        assert_eq!(curve.misses(400), curve.misses(curve.footprint()), "nothing more is gained");
        assert_eq!(curve.sizes(1, 400), [400]);
    }
}
