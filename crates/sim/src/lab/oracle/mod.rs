//! The best offline heuristic that is known here for a log-structured flash cache behind DRAM, with a write budget.
//!
//! It knows the future, and no cache that does not can be expected to do as well. It is a heuristic and no bound: nothing proves that
//! no other choice has more hits.
//!
//! An object that leaves DRAM is written if the reads that come during the life that flash would give it, per byte of its record, are
//! at least a threshold; at the tail of the log the same judgement decides on writing it again. How long objects live follows from what
//! is written, so each run takes it from the runs before, while the threshold is turned down from where nothing is written until the
//! budget is spent, or all is written that is read again. The most hits on that way that keep to the budget are the result: fewer writes
//! may hit more. What is written while the caches warm up is not counted, so the way is gone twice: under the threshold from the
//! start, and with whatever is read again written until then.
//!
//! **What is counted.** Objects in DRAM take what the engine's arena gives them (a header of 32 bytes, key and value, in units of 8).
//! Records on flash take the engine's header, key and value; large ones begin at multiples of 64 bytes. Segments are written whole, as
//! soon as the next record does not fit into 99 % of one; the segment that is being filled is one of the flash's, and what is in it is
//! read from memory. Left out are pages, which small records do not cross in the engine, the second open segment, of large records,
//! and the DRAM that objects take until their segment is written: the model has a little more room than a server.

mod known;
mod run;

use larder_policy::admission::{AdmissionConfig, Objective, PolicyName};
use larder_trace::Request;
use serde::Serialize;

pub(in crate::lab) use known::{Ask, Step};
pub use known::{Known, TooLong};
pub use run::Setting;

use crate::kv::{self, CacheConfig, CacheError, Counters, HybridCache};
use run::{Asked, Seen};

/// Sizes, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sizes {
    /// DRAM for objects.
    pub dram: u64,
    /// Of a segment.
    pub segment: u32,
    /// How many segments the flash has.
    pub segments: u16,
}

impl Sizes {
    /// What a cache of these sizes has for objects, and how its flash is divided. Admission has the least: an oracle remembers no keys.
    ///
    /// # Errors
    /// Sizes that cannot work.
    pub fn of(sizes: &kv::Sizes) -> Result<Sizes, CacheError> {
        let admission = AdmissionConfig { policy: PolicyName::All, ..AdmissionConfig::default() };
        let (plan, flash) = sizes.divide(&admission, 0)?;
        let dram = (plan.arena_bytes * plan.shards) as u64;
        Ok(Sizes { dram, segment: flash.segment_bytes, segments: flash.segments })
    }

    /// Bytes of all segments.
    pub fn flash(&self) -> u64 {
        u64::from(self.segment) * u64::from(self.segments)
    }

    /// What records may take of a segment.
    pub(in crate::lab) fn room(&self) -> u64 {
        u64::from(self.segment) - u64::from(self.segment) / 100
    }

    /// Segments that hold what is on flash, beside the one that is being filled.
    pub(in crate::lab) fn live(&self) -> usize {
        usize::from(self.segments).saturating_sub(1)
    }
}

/// What the engine does with `requests` after the first `warmup` of them if it writes all that leaves DRAM: shares of that are budgets.
///
/// # Errors
/// Sizes that cannot work.
pub fn all(
    requests: &[Request],
    sizes: kv::Sizes,
    warmup: usize,
    seed: u64,
) -> Result<Counters, CacheError> {
    let admission = AdmissionConfig { policy: PolicyName::All, ..AdmissionConfig::default() };
    let config = CacheConfig { sizes, admission, seed, ..CacheConfig::default() };
    let mut cache = HybridCache::new(&config)?;
    let mut warm = Counters::default();
    for (i, request) in requests.iter().enumerate() {
        if i == warmup {
            warm = cache.counters();
        }
        cache.request(request);
    }
    Ok(cache.counters().since(&warm))
}

/// Which object leaves DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Memory {
    /// The one that was asked for the longest ago.
    Lru,
    /// The one that is read next the latest.
    NextRead,
}

/// What is sought.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Search {
    /// Of the cache.
    pub sizes: Sizes,
    /// Requests that only warm up.
    pub warmup: usize,
    /// From which request on bytes written count: the warm-up's end, or 0.
    pub counted_from: usize,
    /// Bytes that may be written to flash from there on.
    pub budget: u64,
    /// Which object leaves DRAM.
    pub memory: Memory,
    /// Hits of which kind.
    pub objective: Objective,
    /// By how much more than the budget may be written, as a share of it.
    pub tolerance: f64,
    /// Runs, at most, between the last threshold that keeps to the budget and the first that does not.
    pub most_runs: u32,
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// After the warm-up; bytes written from [`Search::counted_from`] on.
    pub counters: Counters,
    /// From the start.
    pub whole: Counters,
    /// With which it was found.
    pub setting: Setting,
    /// Bytes written after the warm-up over the budget.
    pub writes: f64,
}

/// What a threshold is multiplied by from run to run, on the way down.
const STRIDE: f64 = 0.6;
/// The same while nothing is written at all.
const LONG_STRIDE: f64 = 0.1;
/// Runs more where all that is worth anything was written.
const SETTLE: usize = 4;

impl Search {
    /// The most hits of all settings that keep to the budget.
    pub fn find(&self, known: &Known) -> Found {
        let [even, open] = [false, true].map(|open_warmup| {
            self.turn(known, Setting { threshold: 0.0, memory: self.memory, open_warmup })
        });
        if self.is_better(&open, &even) { open } else { even }
    }

    /// Whoever keeps to the budget is better than who does not, then who hits more.
    fn is_better(&self, a: &Found, b: &Found) -> bool {
        let rank = |f: &Found| {
            let over = (f.writes - 1.0 - self.tolerance).max(0.0);
            let hits = match self.objective {
                Objective::Requests => f.counters.hits_dram + f.counters.hits_flash,
                Objective::Bytes => f.counters.hit_bytes,
            };
            (over, hits)
        };
        let ((over_a, hits_a), (over_b, hits_b)) = (rank(a), rank(b));
        over_a < over_b || over_a == over_b && hits_a > hits_b
    }

    /// Turns the threshold of `setting` down from where nothing is written, until the budget is spent or all is written that is read
    /// again; then between the last two. How long objects live follows from run to run.
    fn turn(&self, known: &Known, setting: Setting) -> Found {
        let asked = Asked {
            sizes: self.sizes,
            warmup: self.warmup,
            counted_from: self.counted_from,
            objective: self.objective,
        };
        let attempt = |threshold: f64, seen: &mut Seen| {
            let setting = Setting { threshold, ..setting };
            let run = run::run(known, asked, setting, seen);
            let writes = run.counters.flash_bytes as f64 / self.budget.max(1) as f64;
            seen.learn(&run, self.sizes.live());
            Found { counters: run.counters, whole: run.whole, setting, writes }
        };
        let mut seen = Seen::nothing(known.len());
        let (least, most) = known.gains(self.objective);
        let mut threshold = most;
        let mut best = attempt(threshold, &mut seen);
        let mut keep = |found: Found| {
            if self.is_better(&found, &best) {
                best = found;
            }
            found.writes
        };
        // The last that kept to the budget, with what had been seen then, and the first that did not.
        let mut within = (threshold, seen.clone());
        let mut over = None;
        while threshold > least {
            let stride = if seen.is_idle() { LONG_STRIDE } else { STRIDE };
            threshold = (threshold * stride).max(least * 0.99);
            if keep(attempt(threshold, &mut seen)) > 1.0 + self.tolerance {
                over = Some(threshold);
                break;
            }
            within = (threshold, seen.clone());
        }
        let Some(mut over) = over else {
            // All that is worth anything was written: a few runs more, until lives have settled.
            for _ in 0..SETTLE {
                keep(attempt(threshold, &mut seen));
            }
            return best;
        };
        let (mut threshold, mut seen) = within;
        for _ in 0..self.most_runs {
            let middle = (threshold * over).sqrt();
            let writes = keep(attempt(middle, &mut seen));
            if (writes - 1.0).abs() <= self.tolerance * 0.5 {
                break;
            }
            if writes > 1.0 {
                over = middle
            } else {
                threshold = middle
            }
            if threshold / over < 1.0 + 1e-6 {
                // Lives have moved since one of the two was tried.
                (threshold, over) = (threshold * 1.05, over / 1.05);
            }
        }
        best
    }
}

#[cfg(test)]
mod tests;
