//! Which policy, with which parameters.

use larder_base::ByteSize;
use serde::{Deserialize, Serialize};

use super::miniature::Miniatures;
use super::{Ghost, Pool, RejectFirst};
use crate::learn::{AtLeave, FeatureSet, TrainParams};

/// Names of the policies, as users write them.
pub const POLICY_NAMES: [&str; 8] = [
    "flashiness",
    "flashiness_paper",
    "expected_reads",
    "ghost",
    "reject_first",
    "probability",
    "write_rate",
    "all",
];

/// The policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// A classifier per application, in the improved form.
    Flashiness,
    /// The same in the form of the paper.
    FlashinessPaper,
    /// By the reads that are to be expected.
    #[default]
    ExpectedReads,
    /// Read in DRAM, or known from a ghost queue (S3-FIFO).
    Ghost,
    /// The second time only.
    RejectFirst,
    /// By chance.
    Probability,
    /// By chance, with the chance adjusted to a rate of writes.
    WriteRate,
    /// Everything that leaves DRAM: a victim cache.
    All,
}

impl PolicyName {
    /// The name as users write it.
    pub fn as_str(self) -> &'static str {
        match self {
            PolicyName::Flashiness => "flashiness",
            PolicyName::FlashinessPaper => "flashiness_paper",
            PolicyName::ExpectedReads => "expected_reads",
            PolicyName::Ghost => "ghost",
            PolicyName::RejectFirst => "reject_first",
            PolicyName::Probability => "probability",
            PolicyName::WriteRate => "write_rate",
            PolicyName::All => "all",
        }
    }
}

/// Why admission cannot be set up.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AdmissionError {
    /// No such policy.
    #[error("there is no admission policy '{0}': choose one of {names}", names = POLICY_NAMES.join(", "))]
    UnknownPolicy(String),
    /// A parameter is out of its range.
    #[error("admission.{name} is {value}: it must be {must}")]
    Parameter {
        /// Which parameter, with its table.
        name: &'static str,
        /// What was given.
        value: String,
        /// What it must be.
        must: &'static str,
    },
    /// `write_rate` without a rate.
    #[error(
        "admission policy write_rate needs a rate: set admission.write_rate.bytes_per_second, or give the drive's \
         endurance so that the rate follows from it"
    )]
    NoRate,
    /// The memory given cannot hold the policy's tables.
    #[error(
        "admission policy {policy} needs at least {need} bytes of DRAM per shard and was given {given}: raise the memory limit, lower the window if one is set, or choose another policy"
    )]
    Memory {
        /// Which policy.
        policy: &'static str,
        /// What it needs.
        need: usize,
        /// What it was given.
        given: usize,
    },
}

/// Admission as the configuration file states it. Only the chosen policy's table matters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdmissionConfig {
    /// Which policy.
    pub policy: PolicyName,
    /// Objects that expire sooner than this many seconds are never written to flash. Default 0: no such rule.
    pub min_ttl: u32,
    /// Whether an empty flash is filled with whatever leaves DRAM, liked by the policy or not, until it has been full once or
    /// the write budget lends no more: nothing is displaced by it, and it costs one filling of wear. With `flashiness`,
    /// `ghost` and `reject_first`, which choose by what they have seen; not with policies that are told a chance or a rate
    /// (`probability`, `write_rate`, `flashiness.bytes_per_second`), nor with `flashiness_paper`. Default true.
    pub first_fill: bool,
    /// Parameters of `probability`.
    pub probability: ProbabilityConfig,
    /// Parameters of `reject_first`.
    pub reject_first: RejectFirstConfig,
    /// Parameters of `ghost`.
    pub ghost: GhostConfig,
    /// Parameters of `write_rate`.
    pub write_rate: WriteRateConfig,
    /// Parameters of `expected_reads`.
    pub expected_reads: ExpectedReadsConfig,
    /// Parameters of `flashiness` and `flashiness_paper`.
    pub flashiness: FlashinessConfig,
}

impl Default for AdmissionConfig {
    fn default() -> AdmissionConfig {
        AdmissionConfig {
            policy: PolicyName::default(),
            min_ttl: 0,
            first_fill: true,
            probability: ProbabilityConfig::default(),
            reject_first: RejectFirstConfig::default(),
            ghost: GhostConfig::default(),
            write_rate: WriteRateConfig::default(),
            expected_reads: ExpectedReadsConfig::default(),
            flashiness: FlashinessConfig::default(),
        }
    }
}

impl AdmissionConfig {
    /// Bytes that each of `shards` shards needs for the window of keys that the chosen policy is told to remember; 0 if it is
    /// told none.
    pub fn window_bytes(&self, shards: u64) -> u64 {
        match self.policy {
            PolicyName::RejectFirst if self.reject_first.window > 0 => {
                RejectFirst::bytes_for(self.reject_first.window, shards)
            }
            PolicyName::Ghost if self.ghost.window > 0 => {
                Ghost::bytes_for(self.ghost.window, shards)
            }
            _ => 0,
        }
    }
}

impl AdmissionConfig {
    /// Bytes that miniature caches take of `memory` in `shards` shards.
    pub fn miniature_bytes(&self, memory: u64, shards: u64) -> u64 {
        match self.policy {
            PolicyName::ExpectedReads if self.expected_reads.self_tuning => {
                Miniatures::bytes(memory / shards.max(1)) as u64 * shards
            }
            _ => 0,
        }
    }
}

/// Parameters of `probability`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ProbabilityConfig {
    /// Chance that an object leaving DRAM is written to flash, 0..=1. Default 0.5.
    pub probability: f64,
}

impl Default for ProbabilityConfig {
    fn default() -> ProbabilityConfig {
        ProbabilityConfig { probability: 0.5 }
    }
}

/// Parameters of `reject_first`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RejectFirstConfig {
    /// How many keys, counted in evictions from DRAM, are remembered at least. Default 0: as many as flash holds objects,
    /// as far as memory allows.
    pub window: u64,
}

/// Parameters of `ghost`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GhostConfig {
    /// Reads in DRAM that send an object to flash. Default 1.
    pub reads: u32,
    /// Keys in the ghost queue. Default 0: as many as flash holds objects, as far as memory allows.
    pub window: u64,
}

impl Default for GhostConfig {
    fn default() -> GhostConfig {
        GhostConfig { reads: 1, window: 0 }
    }
}

/// Parameters of `write_rate`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WriteRateConfig {
    /// Bytes per second that the whole cache may write to flash. Default 0: the write budget's rate.
    pub bytes_per_second: ByteSize,
    /// Seconds between adjustments of the chance. Default 60.
    pub interval: u32,
}

impl Default for WriteRateConfig {
    fn default() -> WriteRateConfig {
        WriteRateConfig { bytes_per_second: ByteSize(0), interval: 60 }
    }
}

/// Parameters of `expected_reads`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ExpectedReadsConfig {
    /// Which hits are sought. Default requests.
    pub objective: Objective,
    /// Objects are ranked by the reads expected of them over this power of their size: 0 ignores the size, 1 ranks per byte. By the
    /// objective: 1 for requests, 0 for bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_exponent: Option<f32>,
    /// 0..=10: an object is admitted only if the reads expected of it are worth this many times those that what is about to leave flash
    /// would still have had in the same room. Less writes more. Where a rate of writes is held it is two thirds of this, and down to 0.4
    /// where that is not used. Default 0.9.
    pub price: f32,
    /// Least reads to be expected of what is admitted; down to a quarter where a rate is not used. Default 0.1.
    pub least: f32,
    /// Bytes per second that the whole cache may write to flash: the best of what is offered is admitted, as much as that allows.
    /// Default 0: the write budget's rate, if there is one.
    pub bytes_per_second: ByteSize,
    /// Whether miniature caches over some of the keys measure what it would do to ask less of a write, or more, and the best is taken.
    /// They have a thirty-second of the memory; up to a twelfth where that would be too few keys. Default false.
    pub self_tuning: bool,
}

impl Default for ExpectedReadsConfig {
    fn default() -> ExpectedReadsConfig {
        ExpectedReadsConfig {
            objective: Objective::default(),
            size_exponent: None,
            price: 0.9,
            least: 0.1,
            bytes_per_second: ByteSize(0),
            self_tuning: false,
        }
    }
}

impl ExpectedReadsConfig {
    /// The power of its size that what is expected of an object is divided by.
    pub fn exponent(&self) -> f32 {
        self.size_exponent.unwrap_or(match self.objective {
            Objective::Requests => 1.0,
            Objective::Bytes => 0.0,
        })
    }
}

/// What `flashiness` remembers of keys that are not in DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HistoryKind {
    /// Nothing: an object that was never read is never flashy (Flashield §4.2).
    None,
    /// A table of 6 bytes per object on flash, as far as the policy's memory goes: refetches, updates and time away. An object that was
    /// never read can be flashy if it was fetched again after a miss.
    Sketch,
}

/// At which moments `flashiness` samples an object's features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleAt {
    /// At its reads (Flashield §4.2).
    Reads,
    /// Whenever admission is asked about it: the classifier is trained on what it will be asked.
    Decisions,
}

/// Which hits count, when writes are what is scarce.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Objective {
    /// The share of the reads that are answered: a small object earns as much as a large one and costs less.
    #[default]
    Requests,
    /// The share of the bytes read that are answered: what is read by a byte written is its chance to be read, whatever
    /// the size.
    Bytes,
}

impl Objective {
    /// Its names, as users write them.
    pub const NAMES: [&str; 2] = ["requests", "bytes"];

    /// The name as users write it.
    pub fn as_str(self) -> &'static str {
        match self {
            Objective::Requests => Self::NAMES[0],
            Objective::Bytes => Self::NAMES[1],
        }
    }
}

impl std::str::FromStr for Objective {
    type Err = String;

    /// The objective of this name.
    fn from_str(name: &str) -> Result<Objective, String> {
        let found =
            [Objective::Requests, Objective::Bytes].into_iter().find(|o| o.as_str() == name);
        found.ok_or_else(|| format!("choose {}", Self::NAMES.join(" or ")))
    }
}

/// Parameters of `flashiness`. Those that are `None` follow the form: improved or the paper's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct FlashinessConfig {
    /// n: an object is flashy if it is read at least this often within the horizon. Default 1; 10 or 100 trade hits for
    /// wear.
    pub reads: u32,
    /// The horizon, seconds. Default 0: the time that objects live in the cache, and until that is known the time since
    /// the start, at most an hour.
    pub horizon: u32,
    /// Least score, in standard deviations from the classifier's plane, at which an object is admitted. Default 0.
    pub min_score: f32,
    /// Bytes per second that the whole cache may write to flash: the best-scored of what is offered are admitted, as many as
    /// that allows, whatever their score. Default 0: the write budget's rate, and without one `min_score`.
    pub bytes_per_second: ByteSize,
    /// Where a rate is held: which hits are sought. Default requests.
    pub objective: Objective,
    /// Where a rate is held, objects are ranked by their chance to be read over this power of their size: 0 ignores the
    /// size, 1 ranks per byte. By the objective: 0.5, which gave most hits by number in the measurements, or 0 for bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_exponent: Option<f32>,
    /// Where a rate is held, 0..=10: an object is admitted only if the reads expected of it are worth this many times those
    /// that what is about to leave flash would still have had in the same room. 0 spends the whole rate on the best of what
    /// there is. Default 0.
    pub price: f32,
    /// Divide scores by size, so that segments fill with what earns most hits per byte. Default false.
    pub per_byte: bool,
    /// Seconds before the first training. Default 0: as soon as there are samples enough.
    pub first_training_after: u32,
    /// Labelled samples per application, over all shards, before the first training. Default 1000.
    pub first_training_samples: u32,
    /// Seconds between trainings. Default 0: a quarter of the horizon.
    pub retrain: u32,
    /// Features of the classifier. Improved: extended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub features: Option<FeatureSet>,
    /// Memory of keys that left DRAM. Improved: sketch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<HistoryKind>,
    /// When features are sampled. Improved: decisions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sample_at: Option<SampleAt>,
    /// What an eviction means for a label. Improved: count misses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at_leave: Option<AtLeave>,
    /// Which objects may move. Improved: victims; the paper's: everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pool: Option<Pool>,
    /// Parameters of training.
    pub training: TrainParams,
}

impl Default for FlashinessConfig {
    fn default() -> FlashinessConfig {
        FlashinessConfig {
            reads: 1,
            horizon: 0,
            min_score: 0.0,
            bytes_per_second: ByteSize(0),
            objective: Objective::default(),
            size_exponent: None,
            price: 0.0,
            per_byte: false,
            first_training_after: 0,
            first_training_samples: 1000,
            retrain: 0,
            features: None,
            history: None,
            sample_at: None,
            at_leave: None,
            pool: None,
            training: TrainParams::default(),
        }
    }
}

impl FlashinessConfig {
    /// The power of its size that an object's chance is divided by.
    pub fn exponent(&self) -> f32 {
        self.size_exponent.unwrap_or(match self.objective {
            Objective::Requests => 0.5,
            Objective::Bytes => 0.0,
        })
    }

    /// With every choice that was left to the form made.
    pub fn resolved(&self, paper: bool) -> FlashinessConfig {
        let pick_pool = if paper { Pool::Everything } else { Pool::Victims };
        let pick = |improved, papers| if paper { papers } else { improved };
        FlashinessConfig {
            features: self.features.or(Some(pick(FeatureSet::Extended, FeatureSet::Paper))),
            history: self.history.or(Some(if paper {
                HistoryKind::None
            } else {
                HistoryKind::Sketch
            })),
            sample_at: self.sample_at.or(Some(if paper {
                SampleAt::Reads
            } else {
                SampleAt::Decisions
            })),
            at_leave: self.at_leave.or(Some(if paper {
                AtLeave::Close
            } else {
                AtLeave::CountMisses
            })),
            pool: self.pool.or(Some(pick_pool)),
            ..self.clone()
        }
    }
}

/// What a policy is built from beside its configuration.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setup {
    /// DRAM that its tables may take, bytes.
    pub memory: usize,
    /// Seed of all its draws.
    pub seed: u64,
    /// Bytes that this shard has for objects in DRAM.
    pub dram: u64,
    /// Bytes of this shard's part of the flash.
    pub flash: u64,
    /// Objects that this shard's part of the flash is expected to hold.
    pub objects: u64,
    /// This shard's part of the whole cache, in (0, 1]: rates and sample counts of the configuration are the whole's.
    pub share: f64,
    /// Bytes per second of the whole cache's write budget, if there is one.
    pub budget_rate: Option<f64>,
}

impl AdmissionConfig {
    /// The defaults with this policy.
    ///
    /// # Errors
    /// [`AdmissionError::UnknownPolicy`], listing the names.
    pub fn from_name(name: &str) -> Result<AdmissionConfig, AdmissionError> {
        let policy = match name {
            "flashiness" => PolicyName::Flashiness,
            "flashiness_paper" => PolicyName::FlashinessPaper,
            "expected_reads" => PolicyName::ExpectedReads,
            "ghost" => PolicyName::Ghost,
            "reject_first" => PolicyName::RejectFirst,
            "probability" => PolicyName::Probability,
            "write_rate" => PolicyName::WriteRate,
            "all" => PolicyName::All,
            other => return Err(AdmissionError::UnknownPolicy(other.to_owned())),
        };
        Ok(AdmissionConfig { policy, ..AdmissionConfig::default() })
    }

    /// Checks every parameter, of the policies not chosen too: what is written is meant.
    ///
    /// # Errors
    /// [`AdmissionError::Parameter`] for the first that is out of its range.
    pub fn validate(&self) -> Result<(), AdmissionError> {
        let check =
            |ok: bool, name: &'static str, value: &dyn std::fmt::Display, must: &'static str| {
                if ok {
                    Ok(())
                } else {
                    Err(AdmissionError::Parameter { name, value: value.to_string(), must })
                }
            };
        let p = self.probability.probability;
        check((0.0..=1.0).contains(&p), "probability.probability", &p, "between 0 and 1")?;
        check(self.ghost.reads >= 1, "ghost.reads", &self.ghost.reads, "at least 1")?;
        let i = self.write_rate.interval;
        check((1..=86_400).contains(&i), "write_rate.interval", &i, "between 1 and 86400 seconds")?;
        let e = &self.expected_reads;
        let x = e.exponent();
        check((0.0..=2.0).contains(&x), "expected_reads.size_exponent", &x, "between 0 and 2")?;
        check(
            (0.0..=10.0).contains(&e.price),
            "expected_reads.price",
            &e.price,
            "between 0 and 10",
        )?;
        check(
            (0.0..=100.0).contains(&e.least),
            "expected_reads.least",
            &e.least,
            "between 0 and 100",
        )?;
        let f = &self.flashiness;
        check(f.reads >= 1, "flashiness.reads", &f.reads, "at least 1")?;
        check(f.min_score.is_finite(), "flashiness.min_score", &f.min_score, "a finite number")?;
        let e = f.exponent();
        check((0.0..=2.0).contains(&e), "flashiness.size_exponent", &e, "between 0 and 2")?;
        check((0.0..=10.0).contains(&f.price), "flashiness.price", &f.price, "between 0 and 10")?;
        // The chance of n reads does not say how many are to be expected.
        let one = f.price == 0.0 || f.reads == 1;
        check(one, "flashiness.price", &f.price, "0 where flashiness.reads is above 1")?;
        let s = f.first_training_samples;
        check(s >= 32, "flashiness.first_training_samples", &s, "at least 32")?;
        let t = &f.training;
        check(
            t.lambda.is_finite() && t.lambda > 0.0 && t.lambda <= 1.0,
            "flashiness.training.lambda",
            &t.lambda,
            "above 0 and at most 1",
        )?;
        check(
            (1..=1000).contains(&t.epochs),
            "flashiness.training.epochs",
            &t.epochs,
            "between 1 and 1000",
        )?;
        check(
            (0.0..=0.5).contains(&t.holdout),
            "flashiness.training.holdout",
            &t.holdout,
            "between 0 and 0.5",
        )?;
        if let crate::learn::ClassWeights::Positive(w) = t.class_weights {
            check(
                (0.001..=1000.0).contains(&w),
                "flashiness.training.class_weights",
                &w,
                "between 0.001 and 1000",
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_known_and_no_other() {
        for name in POLICY_NAMES {
            let config = AdmissionConfig::from_name(name).unwrap();
            assert_eq!(config.policy.as_str(), name);
            config.validate().unwrap();
        }
        let text = AdmissionConfig::from_name("lru").unwrap_err().to_string();
        assert!(text.contains("'lru'") && POLICY_NAMES.iter().all(|n| text.contains(n)), "{text}");
    }

    #[test]
    fn ranges_are_checked() {
        let mut c = AdmissionConfig::default();
        c.probability.probability = 1.5;
        let text = c.validate().unwrap_err().to_string();
        assert!(text.contains("probability.probability") && text.contains("1.5"), "{text}");
        let mut c = AdmissionConfig::default();
        c.probability.probability = f64::NAN;
        assert!(c.validate().is_err());
        let mut c = AdmissionConfig::default();
        c.flashiness.training.lambda = f32::INFINITY;
        assert!(c.validate().is_err());
    }

    #[test]
    fn the_objective_chooses_the_exponent_unless_it_is_given() {
        let mut f = FlashinessConfig::default();
        assert_eq!((f.objective, f.exponent()), (Objective::Requests, 0.5));
        f.objective = Objective::Bytes;
        assert_eq!(f.exponent(), 0.0);
        f.size_exponent = Some(1.0);
        assert_eq!(f.exponent(), 1.0);
        for name in Objective::NAMES {
            assert_eq!(name.parse::<Objective>().unwrap().as_str(), name);
        }
        assert!("hits".parse::<Objective>().is_err());
    }

    #[test]
    fn a_price_is_checked() {
        let mut c = AdmissionConfig::default();
        for (price, reads, fits) in
            [(0.5, 1, true), (0.5, 2, false), (0.0, 2, true), (-1.0, 1, false)]
        {
            (c.flashiness.price, c.flashiness.reads) = (price, reads);
            let said = c.validate().map_err(|e| e.to_string());
            assert_eq!(said.is_ok(), fits, "{said:?}");
            assert!(said.is_ok() || said.unwrap_err().contains("admission.flashiness.price is"));
        }
    }

    #[test]
    fn the_forms_differ_where_the_paper_does() {
        let base = FlashinessConfig::default();
        let (improved, paper) = (base.resolved(false), base.resolved(true));
        assert_eq!(paper.features, Some(FeatureSet::Paper));
        assert_eq!(paper.history, Some(HistoryKind::None));
        assert_eq!(improved.history, Some(HistoryKind::Sketch));
        let forced = FlashinessConfig { history: Some(HistoryKind::None), ..base };
        assert_eq!(forced.resolved(false).history, Some(HistoryKind::None));
    }
}
