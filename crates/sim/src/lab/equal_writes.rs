//! The table `equal-writes`: who misses least of all reads for the same bytes written to flash, given the same memory and flash?
//!
//! A cell is a trace, a size of flash, a size of memory and a budget. Memory is all of it, as a server's `-m`, and is divided as the server
//! divides it. Ours runs as it is configured by default, with the budget as its write budget. A rival runs over a grid of its settings;
//! its point is the fewest misses that the lower hull of what they write and miss has at 1.02 times the budget. Rivals are the
//! engine's other policies, and designs of others ([`super::rivals`]), which have the memory for objects that the policy `all` leaves.
//! The oracle ([`super::oracle`]) is no rival: it says what there is to gain.

mod spec;

use std::path::Path;

use larder_base::ByteSize;
use larder_engine::kv::node::defaults;
use larder_policy::admission::{AdmissionConfig, Objective, PolicyName};
use larder_policy::budget::{WriteBudgetConfig, YEAR_SECONDS};
use larder_trace::{Request, TraceError};
use serde::Serialize;

use super::oracle::{self, Known, Search, TooLong};
use super::rivals;
use crate::kv::workload::footprint;
use crate::kv::{CacheConfig, CacheError, Counters, HybridCache, Server, Sizes};

pub use spec::{Cell, Role, SpecError, Table, TraceSpec};

/// By how much a rival may write more than the budget.
pub const SLACK: f64 = 1.02;

/// Why a cell was not measured.
#[derive(Debug, thiserror::Error)]
pub enum CellError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The trace is too long.
    #[error(transparent)]
    TooLong(#[from] TooLong),
    /// The engine cannot be built of sizes with which the server starts.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Misses after the warm-up, as shares of all reads and of their bytes, and what was written for them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Misses {
    /// By number.
    pub requests: f64,
    /// By bytes.
    pub bytes: f64,
    /// Bytes written to flash.
    pub written: u64,
}

impl Misses {
    fn of(c: &Counters) -> Misses {
        Misses {
            requests: 1.0 - c.hit_ratio(),
            bytes: 1.0 - c.byte_hit_ratio(),
            written: c.flash_bytes,
        }
    }
}

/// A rival at a budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Rival {
    /// Its name.
    pub name: &'static str,
    /// Misses by number at the budget; none where all settings write more.
    pub requests: Option<f64>,
    /// By bytes.
    pub bytes: Option<f64>,
}

/// All systems at one budget.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct AtBudget {
    /// As a share of what `all` writes.
    pub level: f64,
    /// In bytes, after the warm-up.
    pub budget: u64,
    /// Ours by its defaults with this budget.
    pub ours: Misses,
    /// The others.
    pub rivals: Vec<Rival>,
    /// The offline heuristic that seeks hits by number.
    pub oracle: Misses,
}

impl AtBudget {
    /// The rival with the fewest misses by number.
    pub fn best(&self) -> Option<(&'static str, f64)> {
        let with = |r: &Rival| r.requests.map(|misses| (r.name, misses));
        self.rivals.iter().filter_map(with).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// By how much ours misses more than the best of the others, as a share of all reads: below 0 where it is first. None where ours
    /// writes more than it may: that is no result.
    pub fn behind(&self) -> Option<f64> {
        let kept = self.ours.written as f64 <= SLACK * self.budget as f64;
        self.best().filter(|_| kept).map(|(_, misses)| self.ours.requests - misses)
    }
}

/// What became of a cell.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Which.
    #[serde(flatten)]
    pub cell: Cell,
    /// Whether settings were chosen on its trace.
    pub role: Role,
    /// Of generated traces and of all draws.
    pub seed: u64,
    /// Requests.
    pub requests: u64,
    /// Distinct objects.
    pub objects: u64,
    /// Bytes of all objects, keys and values.
    pub footprint: u64,
    /// All of the memory, bytes.
    pub memory: u64,
    /// Flash, bytes.
    pub flash: u64,
    /// Mean bytes of an object for which the server sizes its index: what it takes where it is told nothing.
    pub object: u32,
    /// Why a server does not start with so little memory or flash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub does_not_start: Option<String>,
    /// The least memory, bytes, with which one starts then; none if the flash is too small for any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_memory: Option<u64>,
    /// What `all` writes after the warm-up, and misses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all: Option<Misses>,
    /// Each budget; none where the server does not start.
    pub budgets: Vec<AtBudget>,
}

/// A rival, and what each of its settings writes and misses.
type Points = (&'static str, Vec<Misses>);

/// Engine runs of one cell.
struct Engine<'a> {
    requests: &'a [Request],
    warmup: usize,
    seconds: f64,
    sizes: Sizes,
    objects: f64,
    seed: u64,
}

impl Engine<'_> {
    fn run(&self, admission: &AdmissionConfig, budget: Option<u64>) -> Result<Misses, CacheError> {
        let mut config = CacheConfig {
            sizes: self.sizes,
            admission: admission.clone(),
            seed: self.seed,
            ..CacheConfig::default()
        };
        if let Some(budget) = budget {
            config.budget = self.budget(budget);
        }
        let mut cache = HybridCache::new(&config)?;
        let mut warm = Counters::default();
        for (i, request) in self.requests.iter().enumerate() {
            if i == self.warmup {
                warm = cache.counters();
            }
            cache.request(request);
        }
        Ok(Misses::of(&cache.counters().since(&warm)))
    }

    /// A drive whose endurance comes to this budget over the counted part of the trace.
    fn budget(&self, bytes: u64) -> WriteBudgetConfig {
        let years = WriteBudgetConfig::default();
        let a_second = bytes as f64 / self.seconds;
        WriteBudgetConfig {
            tbw: Some(ByteSize((a_second * years.years * YEAR_SECONDS) as u64)),
            device_write_amplification: 1.0,
            ..years
        }
    }

    /// Every setting of the engine's policies that a rival is run with, when `all` writes so many bytes. What `all` does is a point of
    /// `probability`, whose chance is 1 there.
    fn grid(&self, all: u64) -> Vec<(PolicyName, Vec<AdmissionConfig>)> {
        grid(all as f64 / self.seconds, self.objects, self.seconds)
    }
}

/// See [`Engine::grid`]; `pace` is bytes a second, `objects` what flash holds of the mean size.
fn grid(pace: f64, objects: f64, seconds: f64) -> Vec<(PolicyName, Vec<AdmissionConfig>)> {
    let with = |policy| AdmissionConfig { policy, ..AdmissionConfig::default() };
    let mut grid = Vec::new();
    let mut add = |policy, change: &dyn Fn(&mut AdmissionConfig, f64), values: &[f64]| {
        let of = |&value: &f64| {
            let mut config = with(policy);
            change(&mut config, value);
            config
        };
        grid.push((policy, values.iter().map(of).collect::<Vec<_>>()));
    };
    let rate = |level: f64| ByteSize((level * pace) as u64 + 1);
    let window = |share: f64| ((objects * share) as u64).max(64);
    add(
        PolicyName::Probability,
        &|c, p| c.probability.probability = p,
        &[0.0, 0.02, 0.06, 0.2, 0.5, 1.0],
    );
    add(
        PolicyName::RejectFirst,
        &|c, share| c.reject_first.window = window(share),
        &[0.03, 0.1, 0.3, 1.0, 2.0],
    );
    for reads in [1, 2] {
        let set = |c: &mut AdmissionConfig, share| {
            c.ghost.window = window(share);
            c.ghost.reads = reads;
        };
        add(PolicyName::Ghost, &set, &[0.1, 0.5, 1.5]);
    }
    add(
        PolicyName::WriteRate,
        &|c, level| {
            c.write_rate.bytes_per_second = rate(level);
            c.write_rate.interval = ((seconds / 200.0) as u32).max(1);
        },
        &[0.02, 0.06, 0.2, 0.6],
    );
    let rates = [0.02, 0.06, 0.2, 0.6, 0.0];
    // A rate of 0 is none: the policy as it is.
    let free = |level: f64| if level == 0.0 { ByteSize(0) } else { rate(level) };
    add(PolicyName::Flashiness, &|c, level| c.flashiness.bytes_per_second = free(level), &rates);
    add(
        PolicyName::ExpectedReads,
        &|c, level| c.expected_reads.bytes_per_second = free(level),
        &rates,
    );
    let price = |c: &mut AdmissionConfig, price| c.expected_reads.price = price as f32;
    add(PolicyName::ExpectedReads, &price, &[0.2, 0.45, 1.8, 3.6]);
    grid
}

/// The least memory with which a server starts before this flash, in steps of 64 KiB; none if it starts with none.
fn least_memory(server: Server) -> Option<u64> {
    const STEP: u64 = 64 << 10;
    let starts = |steps: u64| {
        let server = Server { memory: steps * STEP, ..server };
        server.divide(&AdmissionConfig::default(), 0).is_ok()
    };
    let mut enough = (0..24).map(|doubled| 1 << doubled).find(|&steps| starts(steps))?;
    let mut short = enough / 2;
    while enough - short > 1 {
        let middle = (short + enough) / 2;
        if starts(middle) { enough = middle } else { short = middle }
    }
    Some(enough * STEP)
}

impl Table {
    /// Runs of one cell, for progress.
    pub fn steps(&self) -> u64 {
        let rivals: usize =
            rivals::Kind::ALL.into_iter().map(|kind| rivals::Setting::grid(kind).len()).sum();
        let ours: usize = grid(1.0, 1.0, 1.0).iter().map(|(_, settings)| settings.len()).sum();
        // `all` first; ours and the oracle at each budget.
        (1 + ours + rivals + 2 * self.budgets.len()) as u64
    }

    /// Measures a cell. `step` is called after each run with what ran.
    ///
    /// # Errors
    /// A trace that cannot be read. A server that does not start is no error.
    pub fn measure(
        &self,
        cell: &Cell,
        traces: &Path,
        seed: u64,
        step: &mut dyn FnMut(&'static str),
    ) -> Result<Outcome, CellError> {
        let spec = self.trace(&cell.trace);
        let requests = spec.map_or(Ok(Vec::new()), |t| t.requests(traces, seed))?;
        let (bytes, objects) = footprint(&requests);
        let flash = (bytes as f64 * cell.flash) as u64;
        let mut outcome = Outcome {
            cell: cell.clone(),
            role: spec.map_or(Role::Tuned, |t| t.role),
            seed,
            requests: requests.len() as u64,
            objects,
            footprint: bytes,
            memory: (flash as f64 * cell.memory) as u64,
            flash,
            object: defaults::OBJECT_SIZE,
            does_not_start: None,
            least_memory: None,
            all: None,
            budgets: Vec::new(),
        };
        let server = Server {
            memory: outcome.memory,
            flash,
            object: outcome.object,
            max_item: defaults::MAX_ITEM,
        };
        let sizes = Sizes::Server(server);
        // Ours has to start, and so has `all`, by which budgets are measured.
        let started = server.divide(&AdmissionConfig::default(), 0);
        let model = match started.and_then(|_| oracle::Sizes::of(&sizes)) {
            Ok(model) => model,
            Err(e) => {
                outcome.does_not_start = Some(e.to_string());
                outcome.least_memory = least_memory(server);
                return Ok(outcome);
            }
        };
        let warmup = requests.len() / 3;
        let time =
            |at: usize| requests.get(at).and_then(|r| r.time).map_or(0.0, |t| t.as_secs_f64());
        let engine = Engine {
            requests: &requests,
            warmup,
            seconds: (time(requests.len().saturating_sub(1)) - time(warmup)).max(1.0),
            sizes,
            objects: cell.flash * objects as f64,
            seed,
        };
        let of_all = AdmissionConfig { policy: PolicyName::All, ..AdmissionConfig::default() };
        let all = engine.run(&of_all, None)?;
        step("all");
        outcome.all = Some(all);
        let known = Known::of(&requests)?;
        let points = points(&engine, all, &known, model, step);
        for &level in &self.budgets {
            let budget = (all.written as f64 * level) as u64;
            let ours = engine.run(&AdmissionConfig::default(), Some(budget))?;
            step("ours");
            let search = Search {
                sizes: model,
                warmup,
                counted_from: warmup,
                budget,
                memory: oracle::Memory::NextRead,
                objective: Objective::Requests,
                tolerance: 0.01,
                most_runs: 24,
            };
            let oracle = Misses::of(&search.find(&known).counters);
            step("oracle");
            let most = SLACK * budget as f64;
            let at = |points: &[Misses], figure: fn(&Misses) -> f64| {
                let hull: Vec<_> = points.iter().map(|p| (p.written as f64, figure(p))).collect();
                rivals::hull_at(&hull, most)
            };
            let rivals = points
                .iter()
                .map(|(name, points)| Rival {
                    name,
                    requests: at(points, |p| p.requests),
                    bytes: at(points, |p| p.bytes),
                })
                .collect();
            outcome.budgets.push(AtBudget { level, budget, ours, rivals, oracle });
        }
        Ok(outcome)
    }
}

/// What each rival's settings write and miss.
fn points(
    engine: &Engine<'_>,
    all: Misses,
    known: &Known,
    model: oracle::Sizes,
    step: &mut dyn FnMut(&'static str),
) -> Vec<Points> {
    let mut points: Vec<Points> = Vec::new();
    for (policy, settings) in engine.grid(all.written) {
        let name = policy.as_str();
        // A window for which there is too little memory is no setting that a server takes.
        let found = settings.iter().filter_map(|config| {
            let found = engine.run(config, None).ok();
            step(name);
            found
        });
        let found: Vec<_> = found.collect();
        match points.iter_mut().find(|p| p.0 == name) {
            Some((_, points)) => points.extend(found),
            None => points.push((name, found)),
        }
    }
    for kind in rivals::Kind::ALL {
        let mut found = Vec::new();
        for setting in rivals::Setting::grid(kind) {
            let run = rivals::run(known, model, engine.warmup, setting, engine.seed);
            found.push(Misses::of(&run));
            step(kind.as_str());
        }
        points.push((kind.as_str(), found));
    }
    points
}

#[cfg(test)]
mod tests;
