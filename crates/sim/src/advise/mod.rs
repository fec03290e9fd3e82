//! Which DRAM, flash and admission meet a target at least cost?
//!
//! Candidates are simulated with the engine of `larder kv` on a [`Sample`] of the trace, in caches scaled as the sample is: the
//! memory of the whole is divided as a server divides `-m`, and the parts are scaled. The drive's endurance and the wanted life become the write budget, as in the server: what a policy would write beyond it is
//! not written, so the life is held and its price shows in the hit ratio. The [`Search`] runs the grid of sizes from cheap to
//! dear, leaving out what is larger than something that met the target already, and then tries smaller steps around the best.
//!
//! A policy that ranks what it is offered spends the budget that it is given, and more writes are not always more hits: what
//! is on flash lives shorter. So `flashiness` is tried at several [rates of writes](WriteLimit).

mod sample;
mod search;

use larder_base::ByteSize;
use larder_engine::kv::node::defaults;
use larder_policy::admission::{AdmissionConfig, Objective, PolicyName};
use larder_policy::budget::{WriteBudgetConfig, YEAR_SECONDS};
use larder_trace::Request;
use serde::Serialize;

use crate::kv::workload::footprint;
use crate::kv::{CacheConfig, CacheError, HybridCache, Server, Sizes};

pub use sample::{GROUPS, Sample, ratio};
pub use search::{Search, Wave};

/// What is wanted, and what it costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Question {
    /// Reads answered, of all reads.
    pub target_hit_ratio: f64,
    /// Cost of 10^9 bytes of DRAM.
    pub dram_cost: f64,
    /// Cost of 10^9 bytes of flash.
    pub flash_cost: f64,
    /// Bytes that may be written to the drive in its life.
    pub endurance_bytes: u64,
    /// Years that it is to last.
    pub years: f64,
    /// Bytes that the drive programs for each byte written to it.
    pub device_write_amplification: f64,
    /// Most flash, such as the drive's capacity; none for no limit.
    pub most_flash: Option<u64>,
    /// Which hits `flashiness` seeks where a rate is held.
    pub admission_objective: Objective,
    /// Times the reads that a write costs which it has to be worth: `admission.flashiness.price`.
    pub price: f32,
    /// Seed of sampling and of all draws.
    pub seed: u64,
}

/// One thing to buy: sizes of the whole, not of the sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// Bytes of DRAM with everything in it, as a server's `-m`.
    pub dram: u64,
    /// Bytes of flash; 0 for none.
    pub flash: u64,
    /// Admission; without flash it does not matter.
    pub policy: PolicyName,
}

/// What holds the writes of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WriteLimit {
    /// The write budget that endurance and years make: what a server does that is told them and nothing else.
    Budget,
    /// This rate besides, bytes per second of the whole: `admission.flashiness.bytes_per_second`.
    Rate(u64),
    /// The classifier's threshold alone, without a budget, as in a server that is not told the endurance. The life that
    /// comes of it is measured, not held.
    Threshold,
}

/// Parts of what the budget lets `flashiness` write that are tried as rates too.
const PARTS: [u64; 2] = [4, 16];

/// What a server is told so that it does what was simulated, of the whole.
#[derive(Clone, Debug, PartialEq)]
pub struct Told {
    /// Sizes, and what objects are like.
    pub server: Server,
    /// Admission; without flash it does not matter.
    pub admission: AdmissionConfig,
    /// The drive's life. Without an endurance there is no budget.
    pub budget: WriteBudgetConfig,
}

impl Told {
    /// The same for a share of the objects: what is bytes of the whole, or bytes per second.
    fn scaled(&self, rate: f64) -> Told {
        let part = |bytes: ByteSize| ByteSize(((bytes.0 as f64 * rate) as u64).max(1));
        let mut of_sample = self.clone();
        let held = &mut of_sample.admission.flashiness.bytes_per_second;
        if held.0 > 0 {
            *held = part(*held);
        }
        of_sample.budget.tbw = self.budget.tbw.map(part);
        of_sample
    }
}

/// What a candidate does and costs.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// What a server is told.
    #[serde(skip)]
    pub told: Told,
    /// Bytes of DRAM with everything in it, as a server's `-m`.
    pub dram: u64,
    /// Bytes of flash.
    pub flash: u64,
    /// Admission; `none` without flash.
    pub policy: &'static str,
    /// What holds its writes; none without flash.
    pub write_limit: Option<WriteLimit>,
    /// Cost of both.
    pub cost: f64,
    /// Reads answered, of all reads.
    pub hit_ratio: f64,
    /// Its standard error by sampling; 0 when the whole trace was simulated.
    pub hit_ratio_error: f64,
    /// Bytes of reads not answered, of the bytes of all reads.
    pub byte_miss_ratio: f64,
    /// Hit ratio less the target.
    pub hit_ratio_margin: f64,
    /// Of all reads, those answered from flash.
    pub flash_hit_ratio: f64,
    /// Bytes written to flash per second, of the whole.
    pub flash_bytes_per_second: f64,
    /// Years that the drive lasts, at least the wanted where a write budget holds it; none where nothing is written.
    pub life_years: Option<f64>,
    /// Those less the wanted.
    pub life_years_margin: Option<f64>,
    /// Whether the write budget turned writes away: more endurance would give more hits.
    pub budget_binds: bool,
    /// Whether the drive lasts the wanted years, and the target is met by 1.64 standard errors (95 in 100 samples).
    pub meets: bool,
}

impl Measured {
    /// The standard error in words; none where nothing was left out of the sample.
    pub fn error_text(&self) -> Option<String> {
        (self.hit_ratio_error > 0.0).then(|| format!("{:.4}", self.hit_ratio_error))
    }

    /// Whether admission made no difference between the two: the same sizes, hits and writes.
    pub fn equals(&self, other: &Measured) -> bool {
        (self.dram, self.flash) == (other.dram, other.flash)
            && self.hit_ratio == other.hit_ratio
            && self.flash_bytes_per_second == other.flash_bytes_per_second
    }
}

/// Why a question cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum AdviseError {
    /// No times, so no rate of writes.
    #[error(
        "the trace has no times, so the drive's life cannot be told: give --rate REQUESTS per second"
    )]
    Untimed,
    /// Too few requests.
    #[error("the trace has {0} requests that can be counted: at least 1000 are needed")]
    Short(u64),
    /// No size can be simulated.
    #[error("{what}: {remedy}")]
    Sizes {
        /// What is the matter.
        what: String,
        /// What to do.
        remedy: String,
    },
    /// A cache cannot be built.
    #[error("--dram {dram}, --flash {flash}: {source}")]
    Cache {
        /// Its DRAM.
        dram: ByteSize,
        /// Its flash.
        flash: ByteSize,
        /// Why.
        source: CacheError,
    },
}

/// A sample, ready for candidates.
#[derive(Debug)]
pub struct Model {
    sample: Sample,
    seconds: f64,
    /// Bytes of all objects, of the whole, as estimated.
    footprint: u64,
    objects: u64,
    /// What a server of any size is told of the objects.
    server: Server,
}

/// Which candidates can be simulated: those that a server takes, and that are not too small for the sample.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    server: Server,
    rate: f64,
}

impl Bounds {
    /// # Errors
    /// Why this one cannot.
    pub fn check(&self, c: &Candidate) -> Result<(), AdviseError> {
        let (dram, flash) = (ByteSize(c.dram), ByteSize(c.flash));
        let failed = |source| AdviseError::Cache { dram, flash, source };
        let admission = AdmissionConfig { policy: c.policy, ..AdmissionConfig::default() };
        let server = Server { memory: c.dram, flash: c.flash, ..self.server };
        let (plan, _) = server.divide(&admission, 0).map_err(failed)?;
        let left = (plan.shards * plan.arena_bytes) as u64;
        let told = (left as f64 * self.rate) as u64;
        if self.rate < 1.0 && told < LEAST_DRAM {
            return Err(AdviseError::Sizes {
                what: format!(
                    "--dram {dram} beside {flash} of flash leaves objects {}, too little for this sample to tell",
                    ByteSize(left)
                ),
                remedy: "give more, or a larger --sample-requests".to_owned(),
            });
        }
        Ok(())
    }
}

/// Least bytes of simulated DRAM for objects: a few segments of 16 KiB.
const LEAST_DRAM: u64 = 96 << 10;
/// Least bytes of simulated flash: sixteen segments.
const LEAST_FLASH: u64 = 256 << 10;
/// Bytes of a record beside key and value, about.
const RECORD_HEADER: u64 = 40;
/// The share of the requests that only fills the caches.
const WARMUP: usize = 3;

impl Model {
    /// Of this sample.
    ///
    /// # Errors
    /// A trace without times, or with hardly any requests.
    pub fn new(sample: Sample) -> Result<Model, AdviseError> {
        let requests = sample.requests();
        if requests.len() < 1000 {
            return Err(AdviseError::Short(requests.len() as u64));
        }
        let seconds = sample.seconds().ok_or(AdviseError::Untimed)?;
        let (bytes, objects) = footprint(requests);
        let (least, most) = defaults::OBJECT_SIZE_BOUNDS;
        let rate = sample.rate();
        Ok(Model {
            seconds,
            footprint: (bytes as f64 / rate) as u64,
            objects: (objects as f64 / rate) as u64,
            server: Server {
                memory: 0,
                flash: 0,
                object: (bytes / objects.max(1) + RECORD_HEADER).clamp(least, most) as u32,
                max_item: defaults::MAX_ITEM,
            },
            sample,
        })
    }

    /// The sample.
    pub fn sample(&self) -> &Sample {
        &self.sample
    }

    /// Bytes of all objects of the whole trace, as estimated.
    pub fn footprint(&self) -> u64 {
        self.footprint
    }

    /// Objects of the whole trace, as estimated.
    pub fn objects(&self) -> u64 {
        self.objects
    }

    /// Least DRAM and flash that can be told from this sample.
    pub fn least(&self) -> (u64, u64) {
        let rate = self.sample.rate();
        ((LEAST_DRAM as f64 / rate).ceil() as u64, (LEAST_FLASH as f64 / rate).ceil() as u64)
    }

    /// What says which candidates can be simulated.
    pub fn bounds(&self) -> Bounds {
        Bounds { server: self.server, rate: self.sample.rate() }
    }

    /// Bytes per second that the budget allows the whole.
    fn budget_rate(question: &Question) -> f64 {
        question.endurance_bytes as f64
            / question.device_write_amplification
            / (question.years * YEAR_SECONDS)
    }

    /// Simulates one candidate: once, or with `flashiness` at each [`WriteLimit`] that could differ.
    ///
    /// # Errors
    /// Sizes that the engine cannot work with.
    pub fn measure(&self, q: &Question, c: Candidate) -> Result<Vec<Measured>, AdviseError> {
        let budget = self.measure_at(q, c, WriteLimit::Budget)?;
        let mut all = vec![budget];
        if c.flash > 0 && c.policy == PolicyName::Flashiness {
            // Parts of what it writes when it may, not of the budget: of one that never binds the parts do not bind either.
            let spent = all[0].flash_bytes_per_second.min(Self::budget_rate(q));
            let rates = PARTS.iter().map(|part| spent as u64 / part).filter(|&rate| rate > 0);
            for limit in rates.map(WriteLimit::Rate).chain([WriteLimit::Threshold]) {
                all.push(self.measure_at(q, c, limit)?);
            }
        }
        Ok(all)
    }

    /// What a server is told of this candidate: nothing else is simulated.
    pub fn told(&self, q: &Question, c: Candidate, limit: WriteLimit) -> Told {
        let mut admission = AdmissionConfig { policy: c.policy, ..AdmissionConfig::default() };
        if matches!(c.policy, PolicyName::Flashiness | PolicyName::FlashinessPaper) {
            admission.flashiness.price = q.price;
        }
        let seeks =
            [PolicyName::Flashiness, PolicyName::FlashinessPaper, PolicyName::ExpectedReads];
        if seeks.contains(&c.policy) {
            // A server is told it once, for all that seek hits of a kind.
            admission.flashiness.objective = q.admission_objective;
            admission.expected_reads.objective = q.admission_objective;
        }
        if let WriteLimit::Rate(bytes) = limit {
            admission.flashiness.bytes_per_second = ByteSize(bytes);
        }
        let budget = match limit {
            WriteLimit::Threshold => WriteBudgetConfig::default(),
            WriteLimit::Budget | WriteLimit::Rate(_) => WriteBudgetConfig {
                tbw: Some(ByteSize(q.endurance_bytes)),
                years: q.years,
                device_write_amplification: q.device_write_amplification,
                // A trace of minutes must not live on hours of savings.
                burst_hours: (self.seconds / 3600.0 / 50.0).clamp(0.01, 6.0),
                ..WriteBudgetConfig::default()
            },
        };
        let server = Server { memory: c.dram, flash: c.flash, ..self.server };
        Told { server, admission, budget }
    }

    fn measure_at(
        &self,
        q: &Question,
        c: Candidate,
        limit: WriteLimit,
    ) -> Result<Measured, AdviseError> {
        let rate = self.sample.rate();
        let told = self.told(q, c, limit);
        let Told { server, admission, budget } = told.scaled(rate);
        let config = CacheConfig {
            sizes: if rate < 1.0 { Sizes::Sample(server, rate) } else { Sizes::Server(server) },
            admission,
            budget,
            seed: q.seed,
            ..CacheConfig::default()
        };
        let failed = |source| AdviseError::Cache {
            dram: ByteSize(c.dram),
            flash: ByteSize(c.flash),
            source,
        };
        let mut cache = HybridCache::new(&config).map_err(failed)?;
        let requests = self.sample.requests();
        let warmup = requests.len() / WARMUP;
        let mut groups = [(0u64, 0u64); GROUPS];
        let mut warm = cache.counters();
        for (i, r) in requests.iter().enumerate() {
            if i == warmup {
                warm = cache.counters();
            }
            let tier = cache.request(r);
            if i >= warmup && r.op.is_read() {
                let group = &mut groups[self.sample.group(r.id)];
                group.0 += 1;
                group.1 += u64::from(tier.is_some());
            }
        }
        let counts = cache.counters().since(&warm);
        let (hit_ratio, hit_ratio_error) = ratio(&groups, rate);
        let time = |r: Option<&Request>| r.and_then(|r| r.time).map_or(0.0, |t| t.as_secs_f64());
        let counted = time(requests.last()) - time(requests.get(warmup));
        let written = if counted > 0.0 { counts.flash_bytes as f64 / counted / rate } else { 0.0 };
        let allowed = Self::budget_rate(q);
        let holds = limit != WriteLimit::Threshold;
        let life_years = (written > 0.0).then(|| {
            // The first filling is lent: in the long run the budget is the bound.
            let held = if holds { written.min(allowed) } else { written };
            q.endurance_bytes as f64 / q.device_write_amplification / held / YEAR_SECONDS
        });
        let hit_ratio_margin = hit_ratio - q.target_hit_ratio;
        Ok(Measured {
            told,
            dram: c.dram,
            flash: c.flash,
            policy: if c.flash == 0 { "none" } else { c.policy.as_str() },
            write_limit: (c.flash > 0).then_some(limit),
            cost: cost(q, c.dram, c.flash),
            hit_ratio,
            hit_ratio_error,
            byte_miss_ratio: 1.0 - counts.byte_hit_ratio(),
            hit_ratio_margin,
            flash_hit_ratio: counts.hits_flash as f64 / (counts.gets.max(1)) as f64,
            flash_bytes_per_second: written,
            life_years,
            life_years_margin: life_years.map(|years| years - q.years),
            budget_binds: holds && written > 0.9 * allowed,
            meets: hit_ratio_margin >= 1.64 * hit_ratio_error
                && life_years.is_none_or(|years| years >= q.years * (1.0 - 1e-9)),
        })
    }
}

/// What DRAM and flash cost together.
pub fn cost(q: &Question, dram: u64, flash: u64) -> f64 {
    (dram as f64 * q.dram_cost + flash as f64 * q.flash_cost) / 1e9
}

#[cfg(test)]
mod tests;
