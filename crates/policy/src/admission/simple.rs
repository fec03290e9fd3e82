//! `all` and `probability`.

use larder_base::{Nanos, Rng};

use super::{AdmissionPolicy, Candidate, ProbabilityConfig, Reason, Setup, Verdict};

/// The score of what a policy without a ranking admits.
pub(super) const UNRANKED: Verdict = Verdict::Admit { score: 0.0 };

/// A victim cache: everything that leaves DRAM goes to flash.
#[derive(Clone, Copy, Debug)]
pub struct All;

impl AdmissionPolicy for All {
    fn judge(&mut self, _: &Candidate, _: Nanos) -> Verdict {
        UNRANKED
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}

/// Each object that leaves DRAM goes to flash with a fixed probability, drawn anew each time: an object that is fetched
/// often gets there sooner or later.
#[derive(Clone, Debug)]
pub struct Probability {
    probability: f64,
    rng: Rng,
}

impl Probability {
    /// With the parameters of `config`.
    pub fn new(config: &ProbabilityConfig, setup: &Setup) -> Probability {
        Probability { probability: config.probability, rng: Rng::new(setup.seed) }
    }
}

impl AdmissionPolicy for Probability {
    fn judge(&mut self, _: &Candidate, _: Nanos) -> Verdict {
        if self.rng.chance(self.probability) { UNRANKED } else { Verdict::Reject(Reason::Chance) }
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}
