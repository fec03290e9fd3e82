//! Which super-block to clean.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use larder_base::Rng;

/// How the cleaner chooses its victim among the closed super-blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VictimPolicy {
    /// The fewest valid pages; among equals the one closed first.
    Greedy,
    /// The one closed first ("tail drop" of a log).
    Fifo,
    /// Any.
    Random,
    /// The highest age × (1 − u) / 2u, where u is the share of valid pages and age the time since the block was closed,
    /// counted in pages programmed (Rosenblum and Ousterhout, SOSP '91, as Fusion-io's study writes it).
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

/// The closed super-blocks, in the order that the policy needs.
#[derive(Debug)]
pub(super) struct Closed {
    policy: VictimPolicy,
    /// (valid pages or 0, when closed, block): the first is the victim of greedy and FIFO.
    order: BTreeSet<(u32, u64, u32)>,
    /// For random and cost-benefit: all of them, and where each is.
    list: Vec<u32>,
    position: Vec<u32>,
    closed_at: Vec<u64>,
}

impl Closed {
    pub(super) fn new(policy: VictimPolicy, blocks: usize) -> Closed {
        Closed {
            policy,
            order: BTreeSet::new(),
            list: Vec::new(),
            position: vec![u32::MAX; blocks],
            closed_at: vec![0; blocks],
        }
    }

    fn key(&self, block: u32, valid: u32) -> (u32, u64, u32) {
        let first = if self.policy == VictimPolicy::Greedy { valid } else { 0 };
        (first, self.closed_at[block as usize], block)
    }

    fn ordered(&self) -> bool {
        matches!(self.policy, VictimPolicy::Greedy | VictimPolicy::Fifo)
    }

    pub(super) fn is_closed(&self, block: u32) -> bool {
        self.position[block as usize] != u32::MAX
    }

    pub(super) fn insert(&mut self, block: u32, valid: u32, now: u64) {
        self.closed_at[block as usize] = now;
        self.position[block as usize] = self.list.len() as u32;
        self.list.push(block);
        if self.ordered() {
            self.order.insert(self.key(block, valid));
        }
    }

    /// A page of `block` became invalid; `valid` are left.
    pub(super) fn invalidated(&mut self, block: u32, valid: u32) {
        if self.policy == VictimPolicy::Greedy && self.is_closed(block) {
            self.order.remove(&self.key(block, valid + 1));
            self.order.insert(self.key(block, valid));
        }
    }

    /// Takes the victim out.
    pub(super) fn take(
        &mut self,
        valid: &[u32],
        pages_per_block: u32,
        now: u64,
        rng: &mut Rng,
    ) -> Option<u32> {
        if self.list.is_empty() {
            return None;
        }
        let block = match self.policy {
            VictimPolicy::Greedy | VictimPolicy::Fifo => self.order.first()?.2,
            VictimPolicy::Random => self.list[rng.below(self.list.len() as u64) as usize],
            VictimPolicy::CostBenefit => {
                let score = |block: u32| {
                    let share = f64::from(valid[block as usize]) / f64::from(pages_per_block);
                    let age = (now - self.closed_at[block as usize]) as f64;
                    if share == 0.0 { f64::INFINITY } else { age * (1.0 - share) / (2.0 * share) }
                };
                // Ties (among empty blocks) go to the one closed first.
                let better = |&a: &u32, &b: &u32| {
                    let by_score = score(a).total_cmp(&score(b));
                    by_score.then(self.closed_at[b as usize].cmp(&self.closed_at[a as usize]))
                };
                self.list.iter().copied().max_by(better)?
            }
        };
        if self.ordered() {
            self.order.remove(&self.key(block, valid[block as usize]));
        }
        let at = self.position[block as usize] as usize;
        self.list.swap_remove(at);
        if let Some(&moved) = self.list.get(at) {
            self.position[moved as usize] = at as u32;
        }
        self.position[block as usize] = u32::MAX;
        Some(block)
    }

    pub(super) fn blocks(&self) -> &[u32] {
        &self.list
    }
}
