//! Admission before the cache: what misses is taken in only when a filter says so.

use std::fmt;
use std::str::FromStr;

use larder_base::{AppId, Nanos, ObjectHash};
use larder_policy::admission::{
    Admission, AdmissionConfig, AdmissionError, AdmissionPolicy, Candidate, Features, Setup,
    Verdict,
};

/// A filter by name. Those that judge by what happened to an object in DRAM have no place here: they need the whole
/// cache.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Filter {
    /// Everything is taken in.
    #[default]
    All,
    /// With a fixed chance, drawn anew at each miss.
    Probability(f64),
    /// At the second miss within as many misses as the cache holds objects.
    RejectFirst,
}

impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Filter::All => f.write_str("all"),
            Filter::Probability(p) => write!(f, "probability:{p}"),
            Filter::RejectFirst => f.write_str("reject_first"),
        }
    }
}

impl FromStr for Filter {
    type Err = String;

    fn from_str(text: &str) -> Result<Filter, String> {
        match text {
            "all" => return Ok(Filter::All),
            "reject_first" | "reject-first" => return Ok(Filter::RejectFirst),
            _ => {}
        }
        let chance = text.strip_prefix("probability:").and_then(|p| p.parse::<f64>().ok());
        chance.filter(|p| (0.0..=1.0).contains(p)).map(Filter::Probability).ok_or_else(|| {
            format!(
                "unknown admission '{text}': choose from all, reject_first, probability:P (0 to 1)"
            )
        })
    }
}

/// DRAM that a filter's table may take: enough for tens of millions of keys.
const MEMORY: usize = 256 << 20;

/// The production code of the filter, for a cache expected to hold `objects`.
pub(super) struct Gate(Admission);

impl Gate {
    /// `None` when everything is admitted.
    pub(super) fn new(
        filter: Filter,
        objects: u64,
        seed: u64,
    ) -> Result<Option<Gate>, AdmissionError> {
        let mut config = match filter {
            Filter::All => return Ok(None),
            Filter::Probability(_) => AdmissionConfig::from_name("probability")?,
            Filter::RejectFirst => AdmissionConfig::from_name("reject_first")?,
        };
        if let Filter::Probability(probability) = filter {
            config.probability.probability = probability;
        }
        let setup = Setup {
            memory: MEMORY,
            seed,
            dram: 0,
            flash: 0,
            objects,
            share: 1.0,
            budget_rate: None,
        };
        Ok(Some(Gate(Admission::new(&config, &setup)?)))
    }

    /// Whether the object, which missed, is taken in.
    #[inline]
    pub(super) fn admits(&mut self, id: u64, size: u32) -> bool {
        let mixed = larder_trace::mix(id);
        let hash = ObjectHash(u128::from(mixed) << 32 | u128::from(larder_trace::mix(mixed)) >> 32);
        let features = Features { size, ..Features::default() };
        let candidate =
            Candidate { hash, app: AppId::DEFAULT, features, survivor: false, ttl: u32::MAX };
        matches!(self.0.judge(&candidate, Nanos::ZERO), Verdict::Admit { .. })
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }
}
