//! Which closed segment of a log is reclaimed next, and what survives in it.
//!
//! Used by the block cache's log of segments and by the simulated flash translation layer, whose segments are super-blocks.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use larder_base::Rng;

/// How the victim is chosen among the closed segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VictimPolicy {
    /// The fewest valid pages; among equals the one closed first.
    Greedy,
    /// The one closed first ("tail drop" of a log).
    Fifo,
    /// Any.
    Random,
    /// The highest age × (1 − u) / 2u, where u is the share of valid pages and age the time since the segment was closed,
    /// counted in pages written (Rosenblum and Ousterhout, SOSP '91, as Fusion-io's study writes it).
    CostBenefit,
}

impl VictimPolicy {
    /// Every policy.
    pub const ALL: [VictimPolicy; 4] =
        [VictimPolicy::Greedy, VictimPolicy::Fifo, VictimPolicy::Random, VictimPolicy::CostBenefit];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            VictimPolicy::Greedy => "greedy",
            VictimPolicy::Fifo => "fifo",
            VictimPolicy::Random => "random",
            VictimPolicy::CostBenefit => "cost-benefit",
        }
    }
}

impl fmt::Display for VictimPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for VictimPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<VictimPolicy, String> {
        VictimPolicy::ALL.into_iter().find(|p| p.name() == text).ok_or_else(|| {
            let names = VictimPolicy::ALL.map(VictimPolicy::name).join(", ");
            format!("unknown victim policy '{text}': choose from {names}")
        })
    }
}

/// The closed segments, in the order that the policy needs. Valid pages are counted by the caller, who tells of each change.
///
/// FIFO and greedy take logarithmic time; cost-benefit looks at every closed segment, as ages change all scores.
#[derive(Debug)]
pub struct SegmentPicker {
    policy: VictimPolicy,
    /// (valid pages or 0, when closed, segment): the first is the victim of greedy and FIFO.
    order: BTreeSet<(u32, u64, u32)>,
    /// For random and cost-benefit: all of them, and where each is.
    list: Vec<u32>,
    position: Vec<u32>,
    closed_at: Vec<u64>,
}

impl SegmentPicker {
    /// None closed, of `segments` segments.
    pub fn new(policy: VictimPolicy, segments: usize) -> SegmentPicker {
        SegmentPicker {
            policy,
            order: BTreeSet::new(),
            list: Vec::new(),
            position: vec![u32::MAX; segments],
            closed_at: vec![0; segments],
        }
    }

    fn key(&self, segment: u32, valid: u32) -> (u32, u64, u32) {
        let first = if self.policy == VictimPolicy::Greedy { valid } else { 0 };
        (first, self.closed_at[segment as usize], segment)
    }

    fn ordered(&self) -> bool {
        matches!(self.policy, VictimPolicy::Greedy | VictimPolicy::Fifo)
    }

    /// Whether a segment is closed.
    #[inline]
    pub fn is_closed(&self, segment: u32) -> bool {
        self.position[segment as usize] != u32::MAX
    }

    /// A segment with `valid` valid pages was closed at `now`, counted in pages written. It must not be closed already.
    pub fn insert(&mut self, segment: u32, valid: u32, now: u64) {
        debug_assert!(!self.is_closed(segment));
        self.closed_at[segment as usize] = now;
        self.position[segment as usize] = self.list.len() as u32;
        self.list.push(segment);
        if self.ordered() {
            self.order.insert(self.key(segment, valid));
        }
    }

    /// A page of `segment` became invalid; `valid` are left.
    #[inline]
    pub fn invalidated(&mut self, segment: u32, valid: u32) {
        if self.policy == VictimPolicy::Greedy && self.is_closed(segment) {
            self.order.remove(&self.key(segment, valid + 1));
            self.order.insert(self.key(segment, valid));
        }
    }

    /// Takes the victim out. `valid` are the valid pages of every segment, `pages` the pages of one.
    pub fn take(&mut self, valid: &[u32], pages: u32, now: u64, rng: &mut Rng) -> Option<u32> {
        if self.list.is_empty() {
            return None;
        }
        let segment = match self.policy {
            VictimPolicy::Greedy | VictimPolicy::Fifo => self.order.first()?.2,
            VictimPolicy::Random => self.list[rng.below(self.list.len() as u64) as usize],
            VictimPolicy::CostBenefit => {
                let score = |segment: u32| {
                    let share = f64::from(valid[segment as usize]) / f64::from(pages);
                    let age = now.saturating_sub(self.closed_at[segment as usize]) as f64;
                    if share == 0.0 { f64::INFINITY } else { age * (1.0 - share) / (2.0 * share) }
                };
                // Ties (among empty segments) go to the one closed first.
                let better = |&a: &u32, &b: &u32| {
                    let by_score = score(a).total_cmp(&score(b));
                    by_score.then(self.closed_at[b as usize].cmp(&self.closed_at[a as usize]))
                };
                self.list.iter().copied().max_by(better)?
            }
        };
        self.remove(segment, valid[segment as usize]);
        Some(segment)
    }

    /// Takes a segment with `valid` valid pages out that is not the victim: it became empty by itself, say.
    pub fn remove(&mut self, segment: u32, valid: u32) {
        if !self.is_closed(segment) {
            return;
        }
        if self.ordered() {
            self.order.remove(&self.key(segment, valid));
        }
        let at = self.position[segment as usize] as usize;
        self.list.swap_remove(at);
        if let Some(&moved) = self.list.get(at) {
            self.position[moved as usize] = at as u32;
        }
        self.position[segment as usize] = u32::MAX;
    }

    /// The closed segments, in no order.
    pub fn segments(&self) -> &[u32] {
        &self.list
    }

    /// Bytes of memory that a segment takes at most.
    pub const BYTES_EACH: usize = 16 + 40;

    /// Bytes of memory: about 16 for each segment, and 40 more where an order is kept.
    pub fn memory_bytes(&self) -> usize {
        self.position.capacity() * 4
            + self.list.capacity() * 4
            + self.closed_at.capacity() * 8
            + self.order.len() * 40
    }
}

/// Who makes room in a log of segments (Fusion-io's comparison).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EvictionBy {
    /// The cache: its replacement policy drops lines, which leaves holes; the cleaner copies every valid line of its
    /// victim. Lines are dropped in the right order, and flash is written for each line that is moved.
    Cache,
    /// The cleaner: it copies the hottest valid lines of its victim, at most this share of what it cleans, and drops the rest. Fewer
    /// bytes are moved, and what is dropped depends on where it lies.
    Gc {
        /// 0 to 1; with 0 nothing is ever moved.
        keep: f64,
    },
}

impl Default for EvictionBy {
    fn default() -> EvictionBy {
        EvictionBy::Gc { keep: 0.2 }
    }
}

impl fmt::Display for EvictionBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EvictionBy::Cache => f.write_str("cache"),
            EvictionBy::Gc { keep } => write!(f, "gc:{keep}"),
        }
    }
}

impl FromStr for EvictionBy {
    type Err = String;

    fn from_str(text: &str) -> Result<EvictionBy, String> {
        let keep = match text.split_once(':') {
            None if text == "cache" => return Ok(EvictionBy::Cache),
            None if text == "gc" => return Ok(EvictionBy::default()),
            Some(("gc", share)) => share.parse::<f64>().ok().filter(|s| (0.0..=0.95).contains(s)),
            _ => None,
        };
        keep.map(|keep| EvictionBy::Gc { keep }).ok_or_else(|| {
            format!("'{text}' does not say who evicts: write cache, gc, or gc:SHARE with the share of a segment that may be kept, 0 to 0.95")
        })
    }
}

/// Which lines of a reclaimed segment are kept by [`EvictionBy::Gc`]: the hottest, up to a number. Hotness is whatever the
/// replacement policy says ([`SlotPolicy::hotness`](super::SlotPolicy::hotness)); 0 is never kept.
#[derive(Clone, Copy, Debug)]
pub struct Survivors {
    least: u8,
    /// Lines of exactly the least hotness that may still be kept.
    of_least: u32,
}

impl Survivors {
    /// Looks at the hotness of every valid line of the segment, of which at most `most` survive.
    pub fn plan(hotness: impl IntoIterator<Item = u8>, most: u32) -> Survivors {
        let mut lines = [0u32; 256];
        for hot in hotness {
            lines[usize::from(hot)] += 1;
        }
        let mut left = most;
        for hot in (1..=255u8).rev() {
            let here = lines[usize::from(hot)];
            if here >= left {
                return Survivors { least: hot, of_least: left };
            }
            left -= here;
        }
        Survivors { least: 1, of_least: u32::MAX }
    }

    /// Whether the next line, in any order, is kept.
    pub fn keep(&mut self, hotness: u8) -> bool {
        if hotness == self.least && hotness > 0 {
            let kept = self.of_least > 0;
            self.of_least = self.of_least.saturating_sub(1);
            return kept;
        }
        hotness > self.least
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGES: u32 = 64;

    /// The victim by looking at everything.
    fn naive(policy: VictimPolicy, closed: &[(u32, u64)], valid: &[u32], now: u64) -> u32 {
        let score = |&(segment, at): &(u32, u64)| {
            let u = f64::from(valid[segment as usize]) / f64::from(PAGES);
            match policy {
                VictimPolicy::Greedy => -u,
                VictimPolicy::Fifo => 0.0,
                VictimPolicy::CostBenefit if u == 0.0 => f64::INFINITY,
                VictimPolicy::CostBenefit => (now - at) as f64 * (1.0 - u) / (2.0 * u),
                VictimPolicy::Random => unreachable!("has no one victim"),
            }
        };
        let best = closed.iter().map(score).fold(f64::NEG_INFINITY, f64::max);
        let equal = closed.iter().filter(|s| score(s) == best);
        equal.min_by_key(|&&(_, at)| at).unwrap().0
    }

    #[test]
    fn looking_at_everything_agrees() {
        for policy in [VictimPolicy::Greedy, VictimPolicy::Fifo, VictimPolicy::CostBenefit] {
            let mut rng = Rng::new(policy as u64);
            let mut picker = SegmentPicker::new(policy, 40);
            let mut valid = [0u32; 40];
            let mut closed: Vec<(u32, u64)> = Vec::new();
            for now in 1..5_000u64 {
                let segment = rng.below(40) as u32;
                if !picker.is_closed(segment) {
                    valid[segment as usize] = rng.below(u64::from(PAGES) + 1) as u32;
                    picker.insert(segment, valid[segment as usize], now);
                    closed.push((segment, now));
                } else if valid[segment as usize] > 0 && rng.chance(0.8) {
                    valid[segment as usize] -= 1;
                    picker.invalidated(segment, valid[segment as usize]);
                } else if rng.chance(0.05) {
                    picker.remove(segment, valid[segment as usize]);
                    closed.retain(|&(s, _)| s != segment);
                }
                if closed.len() > 30 {
                    let wanted = naive(policy, &closed, &valid, now);
                    assert_eq!(picker.take(&valid, PAGES, now, &mut rng), Some(wanted), "{policy}");
                    closed.retain(|&(s, _)| s != wanted);
                }
                assert_eq!(picker.segments().len(), closed.len());
            }
        }
    }

    #[test]
    fn random_takes_each_once() {
        let mut picker = SegmentPicker::new(VictimPolicy::Random, 50);
        (0..50).for_each(|s| picker.insert(s, 1, 0));
        let mut rng = Rng::new(1);
        let mut taken: Vec<u32> =
            std::iter::from_fn(|| picker.take(&[1; 50], PAGES, 1, &mut rng)).collect();
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..50));
    }

    #[test]
    fn the_hottest_survive_and_no_more_than_may() {
        let mut rng = Rng::new(3);
        for _ in 0..300 {
            let lines: Vec<u8> = (0..rng.below(200)).map(|_| rng.below(8) as u8).collect();
            let most = rng.below(120) as u32;
            let mut survivors = Survivors::plan(lines.iter().copied(), most);
            let (mut kept, mut gone) = (Vec::new(), Vec::new());
            for &hot in &lines {
                if survivors.keep(hot) { kept.push(hot) } else { gone.push(hot) }
            }
            let warm = lines.iter().filter(|&&h| h > 0).count();
            assert_eq!(kept.len(), warm.min(most as usize), "{lines:?} {most}");
            assert!(kept.iter().min() >= gone.iter().max() || kept.is_empty() || gone.is_empty());
        }
    }

    #[test]
    fn names_read_back() {
        for policy in VictimPolicy::ALL {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        for by in [EvictionBy::Cache, EvictionBy::default(), EvictionBy::Gc { keep: 0.0 }] {
            assert_eq!(by.to_string().parse(), Ok(by));
        }
        for bad in ["", "gc:2", "gc:x", "log"] {
            assert!(bad.parse::<EvictionBy>().unwrap_err().contains("gc:SHARE"));
        }
    }
}
