//! In which order candidates are tried.

use larder_engine::kv::node::defaults;
use larder_policy::admission::PolicyName;

use super::{AdviseError, Bounds, Candidate, Measured, Model, Question, cost};

/// Candidates of one wave, which can be measured side by side. Its length does not depend on the number of threads, so the
/// answer does not either.
const WAVE: usize = 8;
/// Steps around the best: by powers of two to the one over these, one after the other, each for as long as it finds something cheaper,
/// but in no more rounds than [`ROUNDS`].
const STEPS: [u32; 3] = [2, 4, 8];
const ROUNDS: u32 = 4;
/// By smaller steps than the first, only what costs up to so many times the cheapest is looked around.
const NEAR: f64 = 1.15;
/// Steps of the grid: a factor of four, down to this many below all objects.
const DRAM_STEPS: i32 = 5;
const FLASH_STEPS: i32 = 4;

/// What is to be measured next.
pub type Wave = Vec<Candidate>;

/// Whether two would measure the same: steps on different ways to a size round to different bytes.
fn alike(a: &Candidate, b: &Candidate) -> bool {
    let near = |a: u64, b: u64| a.abs_diff(b) <= a / 1024;
    a.policy == b.policy && near(a.dram, b.dram) && near(a.flash, b.flash)
}

/// The search: hands out waves of candidates and takes in what was measured of them.
#[derive(Debug)]
pub struct Search {
    question: Question,
    policies: Vec<PolicyName>,
    bounds: Bounds,
    least: (u64, u64),
    /// Pairs of sizes in the grid that no server takes, or that the sample cannot tell, and why not the first of them.
    refused: Vec<(u64, u64)>,
    why_refused: Option<AdviseError>,
    /// Not yet tried, the dearest first.
    grid: Vec<Candidate>,
    tried: Vec<Candidate>,
    measured: Vec<Measured>,
    /// Which of [`STEPS`], and its rounds so far.
    step: usize,
    rounds: u32,
}

impl Search {
    /// A search over these sizes of the whole (none: a grid by what the trace holds) and policies.
    ///
    /// # Errors
    /// No size that can be simulated.
    pub fn new(
        model: &Model,
        question: &Question,
        dram: &[u64],
        flash: &[u64],
        policies: &[PolicyName],
    ) -> Result<Search, AdviseError> {
        let (dram_least, flash_least) = model.least();
        let item = u64::from(defaults::MAX_ITEM);
        let least = (dram_least.max(2 * item), flash_least.max(defaults::LEAST_FLASH));
        let whole = model.footprint() as f64 * 1.1;
        let steps = |steps: i32, least: u64| -> Vec<u64> {
            let mut all: Vec<u64> = (0..=steps)
                .map(|k| (whole / 4f64.powi(k)) as u64)
                .filter(|&s| s >= least)
                .collect();
            if all.is_empty() {
                all.push(least);
            }
            all
        };
        let drams = if dram.is_empty() { steps(DRAM_STEPS, least.0) } else { dram.to_vec() };
        let mut flashes = flash.to_vec();
        if flashes.is_empty() {
            flashes = steps(FLASH_STEPS, least.1);
            if let Some(most) = question.most_flash {
                flashes.retain(|&f| f <= most);
                if most >= least.1 && (most as f64) < whole {
                    flashes.push(most);
                }
            }
            flashes.push(0);
        }
        let check = |what: &str, sizes: &[u64], least: u64| {
            // No flash is a cache too; no DRAM is none.
            let small = sizes.iter().find(|&&s| s < least && (s != 0 || what == "dram"));
            small.map_or(Ok(()), |&s| {
                let (s, least) = (larder_base::ByteSize(s), larder_base::ByteSize(least));
                Err(AdviseError::Sizes {
                    what: format!(
                        "--{what} {s} is less than the {least} that a server takes and this sample can tell"
                    ),
                    remedy: "give more, or of a long trace a larger --sample-requests".to_owned(),
                })
            })
        };
        check("dram", &drams, least.0)?;
        check("flash", &flashes, least.1)?;
        let mut search = Search {
            question: question.clone(),
            policies: policies.to_vec(),
            bounds: model.bounds(),
            least,
            refused: Vec::new(),
            why_refused: None,
            grid: Vec::new(),
            tried: Vec::new(),
            measured: Vec::new(),
            step: 0,
            rounds: 0,
        };
        for &dram in &drams {
            for &flash in &flashes {
                search.add(dram, flash);
            }
        }
        if search.grid.is_empty()
            && let Some(why) = search.why_refused
        {
            return Err(why);
        }
        search.sort();
        Ok(search)
    }

    fn add(&mut self, dram: u64, flash: u64) {
        let policies = if flash == 0 { &self.policies[..1] } else { &self.policies[..] };
        for &policy in policies {
            let c = Candidate { dram, flash, policy };
            match self.bounds.check(&c) {
                Ok(()) => self.grid.push(c),
                Err(why) => {
                    self.why_refused.get_or_insert(why);
                    if !self.refused.contains(&(dram, flash)) {
                        self.refused.push((dram, flash));
                    }
                }
            }
        }
    }

    fn sort(&mut self) {
        let q = &self.question;
        let key = |c: &Candidate| cost(q, c.dram, c.flash);
        self.grid.sort_by(|a, b| {
            key(b)
                .total_cmp(&key(a))
                .then(b.dram.cmp(&a.dram))
                .then(b.policy.as_str().cmp(a.policy.as_str()))
        });
    }

    /// Whether something no larger has met the target under the same policy (or without flash).
    fn needless(&self, c: &Candidate) -> bool {
        let name = c.policy.as_str();
        self.tried.iter().any(|t| alike(t, c))
            || self.measured.iter().any(|m| {
                m.meets
                    && m.dram <= c.dram
                    && m.flash <= c.flash
                    && (m.policy == name || m.policy == "none")
            })
    }

    /// The next candidates; none when the search is over. All of a wave are to be [taken](Search::take) before the next.
    pub fn next_wave(&mut self) -> Wave {
        loop {
            let mut wave = Wave::new();
            while wave.len() < WAVE
                && let Some(c) = self.grid.pop()
            {
                if !self.needless(&c) && !wave.iter().any(|w| alike(w, &c)) {
                    wave.push(c);
                }
            }
            if !wave.is_empty() {
                self.tried.extend_from_slice(&wave);
                return wave;
            }
            if !self.refine() {
                return wave;
            }
        }
    }

    /// Puts cheaper neighbours of the best of each policy into the grid. Returns false when there are none, by any step.
    fn refine(&mut self) -> bool {
        while let Some(&step) = STEPS.get(self.step) {
            self.add_neighbours(step);
            self.rounds += 1;
            if self.grid.is_empty() || self.rounds >= ROUNDS {
                self.step += 1;
                self.rounds = 0;
            }
            if !self.grid.is_empty() {
                self.sort();
                self.grid.dedup();
                return true;
            }
        }
        false
    }

    fn add_neighbours(&mut self, step: u32) {
        let most = self.answer().map_or(f64::MAX, |m| NEAR * m.cost);
        let best: Vec<(u64, u64, String)> = self
            .policies
            .iter()
            .map(|p| p.as_str())
            .chain(["none"])
            .filter_map(|p| self.cheapest(|m| m.policy == p))
            .filter(|m| step == STEPS[0] || m.cost <= most)
            .map(|m| (m.dram, m.flash, m.policy.to_owned()))
            .collect();
        let limit = self.question.most_flash.unwrap_or(u64::MAX);
        for (dram, flash, name) in best {
            let now = cost(&self.question, dram, flash);
            let by = |bytes: u64, parts: i32| {
                (bytes as f64 * 2f64.powf(f64::from(parts) / f64::from(step))) as u64
            };
            for (d, f) in [(-1, 0), (0, -1), (-2, 0), (0, -2), (-1, -1), (-2, 1), (1, -1), (1, -2)]
            {
                let (d, f) = (by(dram, d), by(flash, f));
                let policy = self.policies.iter().find(|p| p.as_str() == name);
                let policy = policy.copied().unwrap_or(self.policies[0]);
                let c = Candidate { dram: d, flash: f, policy };
                let fits = d >= self.least.0 && (f == 0 || f >= self.least.1 && f <= limit);
                if fits
                    && self.bounds.check(&c).is_ok()
                    && cost(&self.question, d, f) < now
                    && !self.tried.iter().any(|t| alike(t, &c))
                {
                    self.grid.push(c);
                }
            }
        }
    }

    /// Takes in what was measured; once, where a candidate came twice.
    pub fn take(&mut self, measured: impl IntoIterator<Item = Measured>) {
        for m in measured {
            if !self.measured.contains(&m) {
                self.measured.push(m);
            }
        }
    }

    /// Candidates still in the grid; refinement may add some.
    pub fn left(&self) -> usize {
        self.grid.len()
    }

    /// How many pairs of sizes were left out because no server takes them or the sample cannot tell them, and why the first was.
    pub fn refused(&self) -> Option<(usize, &AdviseError)> {
        Some((self.refused.len(), self.why_refused.as_ref()?))
    }

    /// All that was measured, from cheap to dear.
    pub fn measured(&self) -> Vec<&Measured> {
        let mut all: Vec<&Measured> = self.measured.iter().collect();
        // Of the same cost and hits, what writes least first.
        all.sort_by(|a, b| {
            (a.cost.total_cmp(&b.cost))
                .then(b.hit_ratio.total_cmp(&a.hit_ratio))
                .then(a.flash_bytes_per_second.total_cmp(&b.flash_bytes_per_second))
        });
        all
    }

    fn cheapest(&self, which: impl Fn(&Measured) -> bool) -> Option<&Measured> {
        self.measured().into_iter().find(|m| m.meets && which(m))
    }

    /// What meets the target at least cost; of equal cost, with the most hits; of equal hits, with the fewest writes.
    pub fn answer(&self) -> Option<&Measured> {
        self.cheapest(|_| true)
    }

    /// The cheapest of another policy, or else of other sizes.
    pub fn runner_up(&self) -> Option<&Measured> {
        let answer = self.answer()?;
        self.cheapest(|m| m.policy != answer.policy).or_else(|| self.cheapest(|m| m != answer))
    }

    /// What comes nearest, for when nothing meets the target.
    pub fn nearest(&self) -> Option<&Measured> {
        self.measured.iter().max_by(|a, b| a.hit_ratio.total_cmp(&b.hit_ratio))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_makes_no_other_candidate() {
        let of = |dram, flash, policy| Candidate { dram, flash, policy };
        let one = of(500_000, 4_000_000, PolicyName::Ghost);
        assert!(alike(&one, &of(499_999, 4_000_001, PolicyName::Ghost)));
        assert!(!alike(&one, &of(499_999, 4_000_001, PolicyName::All)));
        assert!(!alike(&one, &of(500_000, 0, PolicyName::Ghost)));
        assert!(!alike(&one, &of(495_000, 4_000_000, PolicyName::Ghost)));
    }
}
