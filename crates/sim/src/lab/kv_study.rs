//! Which admission policy gives the most hits for the same bytes written to flash?
//!
//! In each cell (a workload, a seed, a share of DRAM) every policy first runs as it is configured by default. Then each
//! policy's own knob is turned until the bytes that it writes to flash after the warm-up agree with the wanted level, and
//! hit ratios are compared there. A level is a share of what `all` (a victim cache) writes.

mod ripq;

use std::collections::BTreeMap;
use std::path::PathBuf;

use larder_engine::kv::node::Study;
use larder_policy::admission::{AdmissionConfig, Objective, PolicyName};
use larder_policy::learn::ClassWeights;
use larder_trace::{Request, TraceError};
use serde::Serialize;

use crate::kv::workload::{Workload, footprint};
use crate::kv::{CacheConfig, CacheError, Counters, HybridCache, Sizes, study_of};

/// What to compare.
#[derive(Clone, Debug)]
pub struct Plan {
    /// On what.
    pub workloads: Vec<Workload>,
    /// Seeds 1..=seeds.
    pub seeds: u64,
    /// Requests per run.
    pub requests: u64,
    /// DRAM and flash together, as a share of the bytes of all objects.
    pub cache_share: f64,
    /// DRAM as shares of DRAM and flash together.
    pub dram_shares: Vec<f64>,
    /// Shares of what `all` writes.
    pub levels: Vec<f64>,
    /// Which policies.
    pub policies: Vec<PolicyName>,
    /// RIPQ too (the model of [`crate::lab::baseline`]), with all of its DRAM as block buffers and misses taken in by chance.
    pub ripq: bool,
    /// Whether each policy also runs by its defaults.
    pub free_runs: bool,
    /// Sizes of values are multiplied by this.
    pub size_scale: u32,
    /// Whether bytes written while caches warm up count too.
    pub count_filling: bool,
    /// Weights of the classes in the training of classifiers.
    pub class_weights: ClassWeights,
    /// How far the bytes written may be from the level, as a share of it.
    pub tolerance: f64,
    /// Runs in search of one knob, at most.
    pub most_runs: u32,
    /// Where shared traces lie.
    pub traces: PathBuf,
    /// `flashiness.objective` of all runs.
    pub objective: Objective,
    /// `flashiness.size_exponent` of the tuned runs; none: the objective's.
    pub size_exponent: Option<f32>,
    /// `flashiness.price` of the tuned runs.
    pub price: f32,
    /// Whether an empty flash is filled with whatever leaves DRAM in the free runs. Never in those at a level: they compare
    /// what policies choose.
    pub first_fill: bool,
}

/// Why a comparison ended.
#[derive(Debug, thiserror::Error)]
pub enum StudyError {
    /// A trace could not be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A cache could not be built.
    #[error(
        "workload {workload}, DRAM share {dram_share}: {source}; more --requests make larger caches"
    )]
    Cache {
        /// On which workload.
        workload: &'static str,
        /// With which share of DRAM.
        dram_share: f64,
        /// Why.
        source: CacheError,
    },
}

/// One run, after its warm-up.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Workload.
    pub workload: &'static str,
    /// Seed.
    pub seed: u64,
    /// DRAM as a share of the cache.
    pub dram_share: f64,
    /// Policy.
    pub policy: &'static str,
    /// Level asked for, as a share of what `all` writes; none: the policy's defaults.
    pub level: Option<f64>,
    /// Bytes written over those of the level (or of `all`).
    pub writes: f64,
    /// Whether that is within the tolerance.
    pub reached: bool,
    /// The parameter that was found, as the configuration names it.
    pub knob: Option<String>,
    /// Reads answered.
    pub hit_ratio: f64,
    /// Of all reads, those answered from DRAM.
    pub dram_hit_ratio: f64,
    /// Of all reads, those answered from flash.
    pub flash_hit_ratio: f64,
    /// By bytes.
    pub byte_hit_ratio: f64,
    /// Reads answered, warm-up included.
    pub hit_ratio_from_start: f64,
    /// Bytes written over the flash's capacity, warm-up included: how often the flash was filled.
    pub fills: f64,
    /// Bytes written to flash.
    pub flash_bytes: u64,
    /// Flash bytes over bytes set.
    pub clwa_of_sets: f64,
    /// Flash bytes over bytes set after misses.
    pub clwa_of_misses: f64,
    /// Share of the objects leaving flash that were never read there.
    pub unread: f64,
    /// Objects evicted from DRAM that never reached flash.
    pub dram_evictions: u64,
    /// Evictions on the request path, warm-up included.
    pub direct_evictions: u64,
    /// Models trained, warm-up included.
    pub models: u64,
    /// Precision of the classifiers by their own account, weighed by decisions.
    pub precision: Option<f64>,
    /// Recall likewise.
    pub recall: Option<f64>,
    /// DRAM of the policy's tables, bytes.
    pub admission_bytes: u64,
    /// CPU time per request, if a clock was given.
    pub nanos_per_request: Option<f64>,
}

/// What `larder bench admission` runs between two looks at the screen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Workload.
    pub workload: Workload,
    /// DRAM as a share of the cache.
    pub dram_share: f64,
}

impl Plan {
    /// The parts of the work, which can run side by side.
    pub fn groups(&self) -> Vec<Group> {
        let shares = &self.dram_shares;
        self.workloads
            .iter()
            .flat_map(|&workload| {
                shares.iter().map(move |&dram_share| Group { workload, dram_share })
            })
            .collect()
    }

    /// Who is compared, in order.
    pub fn contenders(&self) -> Vec<Contender> {
        let policies = self.policies.iter().map(|&p| Contender::Policy(p));
        policies.chain(self.ripq.then_some(Contender::Ripq)).collect()
    }

    /// Searches of a knob and free runs in all, for progress.
    pub fn steps(&self) -> u64 {
        let contenders = self.contenders();
        let tuned = contenders.iter().filter(|c| Knob::of(**c).is_some()).count();
        let free = if self.free_runs { contenders.len() } else { 0 };
        let per_cell = free + tuned * self.levels.len();
        self.groups().len() as u64 * self.seeds * per_cell as u64
    }

    /// A policy by its defaults.
    fn configured(&self, policy: PolicyName) -> AdmissionConfig {
        AdmissionConfig { policy, first_fill: self.first_fill, ..AdmissionConfig::default() }
    }

    /// Runs one group. `step` is called after each step; `clock` gives CPU time in nanoseconds.
    ///
    /// # Errors
    /// A trace that cannot be read, a cache that cannot be built.
    pub fn run(
        &self,
        group: Group,
        step: &mut dyn FnMut(&Outcome),
        clock: Option<fn() -> u64>,
    ) -> Result<Vec<Outcome>, StudyError> {
        let mut outcomes = Vec::new();
        let mut hints: BTreeMap<(usize, usize), (u32, f64)> = BTreeMap::new();
        for seed in 1..=self.seeds {
            let mut requests = group.workload.requests(seed, self.requests, &self.traces)?;
            for r in &mut requests {
                r.size *= u64::from(self.size_scale);
            }
            let mut cell = Cell::new(self, group, seed, &requests, clock);
            let all = cell.run(&self.configured(PolicyName::All))?;
            cell.all = all.counters.flash_bytes;
            let contenders = self.contenders();
            for &contender in contenders.iter().filter(|_| self.free_runs) {
                let run = match contender {
                    Contender::Policy(PolicyName::All) => all.clone(),
                    // It has no default without a budget: a quarter of what `all` writes stands in.
                    Contender::Policy(PolicyName::WriteRate) => {
                        cell.run_with(Knob::WriteRate, 0, 0.125)?
                    }
                    Contender::Policy(policy) => {
                        cell.run(&cell.trained(self.configured(policy)))?
                    }
                    Contender::Ripq => cell.run_with(Knob::Ripq, 0, 1.0)?,
                };
                let outcome = cell.outcome(contender, None, &run, None);
                step(&outcome);
                outcomes.push(outcome);
            }
            for (l, &level) in self.levels.iter().enumerate() {
                let target = level * cell.all as f64;
                for (p, &contender) in contenders.iter().enumerate() {
                    let Some(knob) = Knob::of(contender) else { continue };
                    let start = hints.get(&(l, p)).copied().unwrap_or((0, knob.guess(level)));
                    let found = cell.search(knob, start, target)?;
                    hints.insert((l, p), (found.stage, found.position));
                    let shown = knob.show(found.stage, found.position, &cell);
                    let outcome = cell.outcome(contender, Some(level), &found.run, Some(shown));
                    step(&outcome);
                    outcomes.push(outcome);
                }
            }
        }
        Ok(outcomes)
    }
}

/// Who is compared: a policy of the engine, or RIPQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contender {
    /// A policy in front of this engine's flash.
    Policy(PolicyName),
    /// RIPQ, which has a flash layout of its own.
    Ripq,
}

impl Contender {
    /// Its name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Contender::Policy(p) => p.as_str(),
            Contender::Ripq => "ripq",
        }
    }
}

#[derive(Clone, Debug)]
struct Run {
    counters: Counters,
    /// Warm-up included.
    whole: Counters,
    direct: u64,
    models: u64,
    precision: Option<f64>,
    recall: Option<f64>,
    admission_bytes: u64,
    nanos: Option<u64>,
}

/// A setting, and the logarithm of what it writes over the target.
type Point = (f64, f64);

struct Found {
    stage: u32,
    position: f64,
    run: Run,
}

struct Cell<'a> {
    plan: &'a Plan,
    group: Group,
    seed: u64,
    requests: &'a [Request],
    mean_record: u64,
    cache_bytes: u64,
    seconds: f64,
    /// Bytes that `all` writes after the warm-up.
    all: u64,
    clock: Option<fn() -> u64>,
}

impl<'a> Cell<'a> {
    fn new(
        plan: &'a Plan,
        group: Group,
        seed: u64,
        requests: &'a [Request],
        clock: Option<fn() -> u64>,
    ) -> Cell<'a> {
        let (bytes, objects) = footprint(requests);
        let last = requests.last().and_then(|r| r.time).map_or(0.0, |t| t.as_secs_f64());
        Cell {
            plan,
            group,
            seed,
            requests,
            mean_record: bytes / objects.max(1) + 40,
            cache_bytes: (bytes as f64 * plan.cache_share) as u64,
            seconds: last.max(1.0),
            all: 0,
            clock,
        }
    }

    fn warmup(&self) -> usize {
        self.requests.len() / 3
    }

    fn flash(&self) -> u64 {
        self.cache_bytes - self.dram()
    }

    fn dram(&self) -> u64 {
        (self.cache_bytes as f64 * self.group.dram_share) as u64
    }

    /// Objects that fit on flash.
    fn flash_objects(&self) -> f64 {
        (self.flash() / self.mean_record) as f64
    }

    /// Classifiers are trained as the plan says.
    fn trained(&self, mut admission: AdmissionConfig) -> AdmissionConfig {
        admission.flashiness.training.class_weights = self.plan.class_weights;
        admission.flashiness.objective = self.plan.objective;
        admission.expected_reads.objective = self.plan.objective;
        admission
    }

    fn run_with(&mut self, knob: Knob, stage: u32, position: f64) -> Result<Run, StudyError> {
        if knob == Knob::Ripq {
            let sizes = (self.dram(), self.flash());
            let chance = Knob::chance(position);
            let started = self.clock.map(|c| c());
            let filling = self.plan.count_filling;
            let (counters, whole) =
                ripq::run(self.requests, (self.warmup(), filling), sizes, chance, self.seed);
            let nanos = started.and_then(|s| self.clock.map(|c| c() - s));
            let none = Run {
                counters,
                whole,
                direct: 0,
                models: 0,
                precision: None,
                recall: None,
                admission_bytes: 0,
                nanos,
            };
            return Ok(none);
        }
        self.run(&knob.set(stage, position, self))
    }

    fn run(&mut self, admission: &AdmissionConfig) -> Result<Run, StudyError> {
        let config = CacheConfig {
            sizes: Sizes::Study(Study {
                object: self.mean_record,
                ..study_of(self.dram(), self.flash())
            }),
            admission: admission.clone(),
            seed: self.seed,
            ..CacheConfig::default()
        };
        let (workload, dram_share) = (self.group.workload.name, self.group.dram_share);
        let mut cache = HybridCache::new(&config).map_err(|source| StudyError::Cache {
            workload,
            dram_share,
            source,
        })?;
        let mut started = None;
        let mut warm = Counters::default();
        for (i, request) in self.requests.iter().enumerate() {
            if i == self.warmup() {
                warm = cache.counters();
                started = self.clock.map(|c| c());
            }
            cache.request(request);
        }
        let nanos = started.and_then(|s| self.clock.map(|c| c() - s));
        let (mut decided, mut precise, mut called, mut recalled) = (0.0, 0.0, 0.0, 0.0);
        for m in cache.models() {
            let weight = f64::from(m.scored);
            if let Some(p) = m.precision {
                decided += weight;
                precise += weight * f64::from(p);
            }
            if let Some(r) = m.recall {
                called += weight;
                recalled += weight * f64::from(r);
            }
        }
        let mean = |sum: f64, weight: f64| (weight > 0.0).then(|| sum / weight);
        let whole = cache.counters();
        let mut counters = whole.since(&warm);
        if self.plan.count_filling {
            counters.flash_bytes = whole.flash_bytes;
        }
        Ok(Run {
            counters,
            whole,
            direct: cache.shard_stats().evictions_direct,
            models: cache.counters().models,
            precision: mean(precise, decided),
            recall: mean(recalled, called),
            admission_bytes: cache.admission_memory(),
            nanos,
        })
    }

    fn outcome(
        &self,
        contender: Contender,
        level: Option<f64>,
        run: &Run,
        knob: Option<String>,
    ) -> Outcome {
        let c = &run.counters;
        let target = self.all.max(1) as f64 * level.unwrap_or(1.0);
        let writes = c.flash_bytes as f64 / target;
        let of_gets = |n: u64| if c.gets == 0 { 0.0 } else { n as f64 / c.gets as f64 };
        Outcome {
            workload: self.group.workload.name,
            seed: self.seed,
            dram_share: self.group.dram_share,
            policy: contender.as_str(),
            level,
            writes,
            reached: level.is_none() || (writes - 1.0).abs() <= self.plan.tolerance,
            knob,
            hit_ratio: c.hit_ratio(),
            dram_hit_ratio: of_gets(c.hits_dram),
            flash_hit_ratio: of_gets(c.hits_flash),
            byte_hit_ratio: c.byte_hit_ratio(),
            hit_ratio_from_start: run.whole.hit_ratio(),
            fills: run.whole.flash_bytes as f64 / self.flash().max(1) as f64,
            flash_bytes: c.flash_bytes,
            clwa_of_sets: c.clwa(),
            clwa_of_misses: c.clwa_of_misses(),
            unread: c.unread_share(),
            dram_evictions: c.dram_evictions,
            direct_evictions: run.direct,
            models: run.models,
            precision: run.precision,
            recall: run.recall,
            admission_bytes: run.admission_bytes,
            nanos_per_request: run.nanos.map(|n| n as f64 / c.requests.max(1) as f64),
        }
    }

    /// Turns the knob until the bytes written agree with `target`, or as near as it gets.
    fn search(
        &mut self,
        knob: Knob,
        (stage, start): (u32, f64),
        target: f64,
    ) -> Result<Found, StudyError> {
        let mut stage = stage;
        let mut best: Option<(f64, Found)> = None;
        // Per stage: the nearest settings known to write too little and too much, with the logarithm of writes / target.
        let (mut low, mut high): (Option<Point>, Option<Point>) = (None, None);
        let mut position = start;
        let mut stride = 0.1;
        for _ in 0..self.plan.most_runs {
            let run = self.run_with(knob, stage, position)?;
            let written = run.counters.flash_bytes.max(1) as f64;
            let off = (written / target.max(1.0)).ln();
            if best.as_ref().is_none_or(|(b, _)| off.abs() < b.abs()) {
                best = Some((off, Found { stage, position, run }));
            }
            // A little inside the tolerance, so that two policies agree within it.
            if off.abs() <= self.plan.tolerance * 0.9 {
                break;
            }
            if off > 0.0 {
                high = Some((position, off))
            } else {
                low = Some((position, off))
            }
            position = match (low, high) {
                (Some((a, fa)), Some((b, fb))) => {
                    if b - a < 1e-5 {
                        break;
                    }
                    let straight = a + (b - a) * fa / (fa - fb);
                    straight.clamp(a + (b - a) * 0.05, b - (b - a) * 0.05)
                }
                (None, Some((b, f))) => {
                    if b <= 0.0 {
                        // Too much whatever the setting: a stricter stage, if there is one.
                        if stage + 1 >= knob.stages() {
                            break;
                        }
                        stage += 1;
                        (low, high) = (None, None);
                        position = 0.5;
                        continue;
                    }
                    stride *= 2.0;
                    (b - (stride * f).clamp(stride / 8.0, stride)).max(0.0)
                }
                (Some((a, f)), None) => {
                    if a >= 1.0 {
                        break;
                    }
                    stride *= 2.0;
                    (a + (stride * -f).clamp(stride / 8.0, stride)).min(1.0)
                }
                (None, None) => break,
            };
        }
        match best {
            Some((_, found)) => Ok(found),
            None => {
                let run = self.run_with(knob, stage, start)?;
                Ok(Found { stage, position: start, run })
            }
        }
    }
}

/// A policy's own parameter that makes it write more or less, on a scale from 0 (least) to 1 (most).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Knob {
    Probability,
    WriteRate,
    RejectFirst,
    Ghost,
    Flashiness { paper: bool },
    ExpectedReads,
    Ripq,
}

impl Knob {
    fn of(contender: Contender) -> Option<Knob> {
        let Contender::Policy(policy) = contender else { return Some(Knob::Ripq) };
        match policy {
            PolicyName::All => None,
            PolicyName::Probability => Some(Knob::Probability),
            PolicyName::WriteRate => Some(Knob::WriteRate),
            PolicyName::RejectFirst => Some(Knob::RejectFirst),
            PolicyName::Ghost => Some(Knob::Ghost),
            PolicyName::Flashiness => Some(Knob::Flashiness { paper: false }),
            PolicyName::FlashinessPaper => Some(Knob::Flashiness { paper: true }),
            PolicyName::ExpectedReads => Some(Knob::ExpectedReads),
        }
    }

    /// Where to start for a level.
    fn guess(self, level: f64) -> f64 {
        match self {
            Knob::Probability => level,
            Knob::WriteRate => level / 2.0,
            Knob::RejectFirst | Knob::Ghost => 0.7,
            Knob::Flashiness { paper: false } | Knob::ExpectedReads => level / 2.0,
            Knob::Flashiness { paper: true } => 0.5,
            // It writes what it takes in, and a part of it again.
            Knob::Ripq => 1.0 + (level / 1.5).log10() / 3.0,
        }
    }

    /// Kinds of setting, from loose to strict.
    fn stages(self) -> u32 {
        if self == Knob::Ghost { 4 } else { 1 }
    }

    fn window(position: f64, cell: &Cell<'_>) -> u64 {
        let most = (cell.flash_objects() * 4.0).max(128.0);
        (64.0 * (most / 64.0).powf(position)).round() as u64
    }

    /// Of RIPQ's misses that are taken in: three decades.
    fn chance(position: f64) -> f64 {
        10f64.powf((position - 1.0) * 3.0)
    }

    fn score(position: f64) -> f32 {
        (8.0 * (0.5 - position)) as f32
    }

    /// Bytes per second: up to twice what `all` writes.
    fn rate(position: f64, cell: &Cell<'_>) -> u64 {
        let filling = if cell.plan.count_filling {
            0.0
        } else {
            cell.warmup() as f64 / cell.requests.len().max(1) as f64
        };
        let counted = cell.seconds * (1.0 - filling);
        (2.0 * position * cell.all as f64 / counted.max(1e-9)) as u64 + 1
    }

    fn set(self, stage: u32, position: f64, cell: &Cell<'_>) -> AdmissionConfig {
        let mut c =
            cell.trained(AdmissionConfig { first_fill: false, ..AdmissionConfig::default() });
        match self {
            Knob::Ripq => {}
            Knob::Probability => {
                c.policy = PolicyName::Probability;
                c.probability.probability = position;
            }
            Knob::WriteRate => {
                c.policy = PolicyName::WriteRate;
                c.write_rate.bytes_per_second = larder_base::ByteSize(Self::rate(position, cell));
                c.write_rate.interval = ((cell.seconds / 200.0) as u32).max(1);
            }
            Knob::RejectFirst => {
                c.policy = PolicyName::RejectFirst;
                c.reject_first.window = Self::window(position, cell);
            }
            Knob::Ghost => {
                c.policy = PolicyName::Ghost;
                c.ghost.reads = stage + 1;
                c.ghost.window = Self::window(position, cell);
            }
            Knob::ExpectedReads => {
                c.policy = PolicyName::ExpectedReads;
                let rate = larder_base::ByteSize(Self::rate(position, cell));
                c.expected_reads.bytes_per_second = rate;
                c.expected_reads.size_exponent = cell.plan.size_exponent;
                // Its own price, as in a server that is told a budget, unless one is asked for.
                if cell.plan.price > 0.0 {
                    c.expected_reads.price = cell.plan.price;
                }
            }
            Knob::Flashiness { paper } => {
                c.policy = if paper { PolicyName::FlashinessPaper } else { PolicyName::Flashiness };
                if paper {
                    c.flashiness.min_score = Self::score(position);
                } else {
                    let rate = larder_base::ByteSize(Self::rate(position, cell));
                    c.flashiness.bytes_per_second = rate;
                    c.flashiness.size_exponent = cell.plan.size_exponent;
                    c.flashiness.price = cell.plan.price;
                }
            }
        }
        c
    }

    fn show(self, stage: u32, position: f64, cell: &Cell<'_>) -> String {
        match self {
            Knob::Flashiness { paper: false } | Knob::ExpectedReads => {
                format!("bytes_per_second {}", Self::rate(position, cell))
            }
            Knob::Probability => format!("probability {position:.3}"),
            Knob::WriteRate => format!("bytes_per_second {}", Self::rate(position, cell)),
            Knob::RejectFirst => format!("window {}", Self::window(position, cell)),
            Knob::Ghost => format!("reads {}, window {}", stage + 1, Self::window(position, cell)),
            Knob::Ripq => format!("chance {:.4}", Self::chance(position)),
            Knob::Flashiness { .. } => format!("min_score {:.3}", Self::score(position)),
        }
    }
}

/// Median, least and greatest of some figures.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Median (of an even number, the mean of the middle two).
    pub median: f64,
    /// Least.
    pub least: f64,
    /// Greatest.
    pub greatest: f64,
}

impl Spread {
    /// Of `figures`, if there are any.
    pub fn of(figures: impl IntoIterator<Item = f64>) -> Option<Spread> {
        let mut all: Vec<f64> = figures.into_iter().collect();
        all.sort_by(f64::total_cmp);
        let (&least, &greatest) = (all.first()?, all.last()?);
        let median = (all[(all.len() - 1) / 2] + all[all.len() / 2]) / 2.0;
        Some(Spread { median, least, greatest })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(policies: &[PolicyName]) -> Plan {
        Plan {
            workloads: vec![Workload::named("churn").unwrap()],
            seeds: 2,
            requests: 40_000,
            cache_share: 0.3,
            dram_shares: vec![0.125],
            levels: vec![0.4],
            policies: policies.to_vec(),
            tolerance: 0.02,
            most_runs: 10,
            traces: PathBuf::new(),
            objective: Objective::Requests,
            size_exponent: None,
            price: 0.0,
            first_fill: false,
            ripq: true,
            free_runs: true,
            size_scale: 1,
            class_weights: ClassWeights::Balanced,
            count_filling: false,
        }
    }

    #[test]
    fn writes_are_brought_to_the_level() {
        let policies = [PolicyName::All, PolicyName::Probability, PolicyName::RejectFirst];
        let plan = plan(&policies);
        let mut steps = 0;
        let group = plan.groups()[0];
        let outcomes = plan.run(group, &mut |_| steps += 1, None).unwrap();
        assert_eq!(steps, plan.steps());
        assert_eq!(outcomes.len(), 2 * (4 + 3));
        let all = outcomes.iter().find(|o| o.policy == "all").unwrap();
        for o in outcomes
            .iter()
            .filter(|o| o.level.is_some() && ["probability", "ripq"].contains(&o.policy))
        {
            assert!(o.reached && (o.writes - 1.0).abs() <= 0.02, "{o:?}");
            assert!(o.hit_ratio < all.hit_ratio + 0.05 && o.flash_hit_ratio > 0.0);
        }
        let again = plan.run(group, &mut |_| {}, None).unwrap();
        let figures = |all: &[Outcome]| -> Vec<(f64, u64)> {
            all.iter().map(|o| (o.hit_ratio, o.flash_bytes)).collect()
        };
        assert_eq!(figures(&outcomes), figures(&again));
    }

    /// `flashiness` at three tenths of what `all` writes, seed 1, twice: by `plan` and by what `change` makes of it.
    fn before_and_after(workload: &str, change: fn(&mut Plan)) -> [Outcome; 2] {
        let mut plan = Plan {
            workloads: vec![Workload::named(workload).unwrap()],
            seeds: 1,
            requests: 120_000,
            cache_share: 0.1,
            levels: vec![0.3],
            ripq: false,
            free_runs: false,
            ..plan(&[PolicyName::Flashiness])
        };
        let run =
            |plan: &Plan| plan.run(plan.groups()[0], &mut |_| {}, None).unwrap().pop().unwrap();
        let before = run(&plan);
        change(&mut plan);
        [before, run(&plan)]
    }

    #[test]
    fn who_seeks_bytes_finds_more_of_them() {
        let [requests, bytes] = before_and_after("churn", |plan| plan.objective = Objective::Bytes);
        assert!(requests.reached && bytes.reached, "{requests:?} {bytes:?}");
        // By number they are about the same here: with 64 KiB classifiers are trained from few samples.
        assert!(bytes.byte_hit_ratio > requests.byte_hit_ratio + 0.01, "{requests:?} {bytes:?}");
    }

    #[test]
    fn a_price_spares_writes_where_popularity_stands_still() {
        let [spent, spared] = before_and_after("scan", |plan| plan.price = 1.0);
        assert!(spent.reached, "{spent:?}");
        assert!(spared.flash_bytes * 10 < spent.flash_bytes * 7, "{spent:?} {spared:?}");
        assert!(spared.hit_ratio > spent.hit_ratio - 0.005, "{spent:?} {spared:?}");
    }

    #[test]
    fn medians() {
        assert_eq!(Spread::of([]), None);
        let s = Spread::of([3.0, 1.0, 2.0]).unwrap();
        assert_eq!((s.median, s.least, s.greatest), (2.0, 1.0, 3.0));
        assert_eq!(Spread::of([1.0, 2.0]).unwrap().median, 1.5);
    }
}
