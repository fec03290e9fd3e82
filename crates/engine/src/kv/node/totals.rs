//! What a node holds and has done, over all shards.

use std::collections::BTreeMap;

use larder_base::lock::{Lock, LockKind};
use larder_base::{AppId, Nanos};
use larder_policy::admission::{
    AdmissionPolicy as _, AppReport, ModelReport, Reason, Tuned, Tuning,
};

use super::node::Node;
use crate::dram::ObjectMemory;
use crate::kv::index_room::IndexFull;
use crate::kv::index_size::IndexSteps;
use crate::kv::log::LogStats;
use crate::kv::stats::{AppStats, ShardStats};
use crate::kv::too_large::TooLarge;

/// What a node holds and has done.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// The shards' counters, added up.
    pub shards: ShardStats,
    /// How often the lock of a shard was found taken.
    pub lock_waits: u64,
    /// Expired objects that left though nobody had asked for them.
    pub expired_unasked: u64,
    /// Flushed objects in whose place their key was stored again.
    pub flushed_replaced: u64,
    /// Suspects that were forgotten because too many verifications were under way.
    pub unverified: u64,
    /// Steps by which the flash indexes have changed their size.
    pub index_steps: IndexSteps,
    /// Objects in DRAM.
    pub dram_objects: u64,
    /// Bytes that they take.
    pub dram_bytes: u64,
    /// Objects that the flash index leads to.
    pub flash_objects: u64,
    /// Of these, those that leave with their segment unless they are read.
    pub ghosts: u64,
    /// Objects that an empty flash was filled with whatever admission thought of them.
    pub first_filled: u64,
    /// The setting that admission has found; `None` where it looks for none.
    pub tuning: Option<Tunings>,
    /// Objects that admission refused, by reason.
    pub rejected: Vec<(&'static str, u64)>,
    /// The flash index is too small for the objects that come to flash.
    pub index_full: Option<IndexFull>,
    /// Objects that flash cannot hold for their size, and the longest record that it takes.
    pub too_large: TooLarge,
    /// Bytes of memory by component.
    pub memory: Vec<(&'static str, u64)>,
    /// Counters by application, [`AppId::COUNT`] of them.
    pub apps: Vec<AppStats>,
    /// What admission says of each application.
    pub reports: BTreeMap<AppId, AppReport>,
    /// The logs of all drives together; `None` without flash.
    pub log: Option<LogTotals>,
    /// Drive by drive, where there are several.
    pub drives: Vec<DriveTotals>,
}

/// What one of several drives has taken, and may take.
#[derive(Clone, Copy, Debug)]
pub struct DriveTotals {
    /// Its place.
    pub drive: usize,
    /// Bytes that can hold records.
    pub capacity: u64,
    /// Its log.
    pub log: LogTotals,
}

/// The settings that the shards' admission has found by itself. Means are those of the shards.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tunings {
    /// What is asked of a write is multiplied by this (the geometric mean).
    pub thrift: f64,
    /// Why: the furthest that a shard has come to.
    pub reason: Tuned,
    /// The part of the reads, 0..=1, that miniatures with these settings miss.
    pub misses: f64,
    /// The part of the reads that the best of the other settings that are tried would miss less.
    pub gain: f64,
}

impl Tunings {
    fn of(shards: &[Tuning]) -> Option<Tunings> {
        let reason = shards.iter().map(|shard| shard.reason).max()?;
        let mean =
            |of: fn(&Tuning) -> f64| shards.iter().map(of).sum::<f64>() / shards.len() as f64;
        Some(Tunings {
            thrift: mean(|shard| f64::from(shard.thrift).ln()).exp(),
            reason,
            misses: mean(|shard| shard.misses),
            gain: mean(Tuning::gain),
        })
    }
}

/// What the log has done, and what it may do.
#[derive(Clone, Copy, Debug)]
pub struct LogTotals {
    /// Its counters.
    pub stats: LogStats,
    /// Bytes a second that the write budget allows; `None` without one.
    pub budget_rate: Option<f64>,
    /// Bytes that it allows now.
    pub budget_available: Option<u64>,
    /// Years that the drive lasts if writing goes on as it did so far, where its endurance is known.
    pub expected_life_years: Option<f64>,
}

impl LogTotals {
    /// This drive's and those of others, together.
    fn and(self, other: LogTotals) -> LogTotals {
        let both = |a: Option<u64>, b: Option<u64>| Some(a?.saturating_add(b?));
        LogTotals {
            stats: self.stats.and(&other.stats),
            budget_rate: self.budget_rate.zip(other.budget_rate).map(|(a, b)| a + b),
            budget_available: both(self.budget_available, other.budget_available),
            // The first that ends.
            expected_life_years: match (self.expected_life_years, other.expected_life_years) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            },
        }
    }
}

/// Adds what another shard's decisions say of the same classifier: shares are weighed by the decisions they are of.
fn merge_models(all: &mut ModelReport, part: &ModelReport) {
    let (a, b) = (f64::from(all.scored), f64::from(part.scored));
    let weigh = |x: Option<f32>, y: Option<f32>| match (x, y) {
        (Some(x), Some(y)) if a + b > 0.0 => {
            Some(((f64::from(x) * a + f64::from(y) * b) / (a + b)) as f32)
        }
        (x, y) => x.or(y),
    };
    all.precision = weigh(all.precision, part.precision);
    all.recall = weigh(all.recall, part.recall);
    all.scored = all.scored.saturating_add(part.scored);
    all.samples = all.samples.saturating_add(part.samples);
    all.version = all.version.max(part.version);
    all.trained_samples = all.trained_samples.max(part.trained_samples);
}

fn merge_reports(all: &mut AppReport, part: &AppReport) {
    all.dropped += part.dropped;
    all.dropped_unread += part.dropped_unread;
    match (&mut all.model, &part.model) {
        (Some(all), Some(part)) => merge_models(all, part),
        (all @ None, part) => *all = part.clone(),
        (Some(_), None) => {}
    }
}

impl<L: LockKind, M: ObjectMemory> Node<L, M> {
    /// What the node holds and has done by `now` of a clock that began with it. Locks one shard after the other.
    pub fn totals(&self, now: Nanos) -> Totals {
        let mut all = Totals {
            apps: vec![AppStats::default(); AppId::COUNT],
            index_full: self.index_full(),
            too_large: self.too_large(),
            rejected: Reason::ALL.iter().map(|reason| (reason.as_str(), 0)).collect(),
            ..Totals::default()
        };
        let mut tunings = Vec::new();
        for i in 0..self.shards() {
            all.lock_waits += self.waits(i);
            let shard = self.lock(i);
            all.shards.add(shard.stats());
            all.expired_unasked += shard.expired_unasked();
            all.flushed_replaced += shard.flushed_replaced();
            all.unverified += shard.unverified();
            all.index_steps.add(shard.index_steps());
            all.dram_objects += shard.dram_objects() as u64;
            all.dram_bytes += (shard.dram_capacity() - shard.dram_free_bytes()) as u64;
            all.flash_objects += shard.index().len();
            all.ghosts += shard.index().ghosts();
            for (id, app) in all.apps.iter_mut().enumerate() {
                app.add(shard.apps().of(AppId(id as u16)));
            }
            for (part, (name, bytes)) in shard.memory().into_iter().enumerate() {
                match all.memory.get_mut(part) {
                    Some(entry) => entry.1 += bytes as u64,
                    None => all.memory.push((name, bytes as u64)),
                }
            }
            all.first_filled += shard.admission().first_filled();
            tunings.extend(shard.admission().tuning());
            for (sum, (_, count)) in all.rejected.iter_mut().zip(shard.admission().rejected()) {
                sum.1 += count;
            }
            for report in shard.admission().report() {
                match all.reports.get_mut(&report.app) {
                    Some(sum) => merge_reports(sum, &report),
                    None => drop(all.reports.insert(report.app, report)),
                }
            }
        }
        all.tuning = Tunings::of(&tunings);
        // A copy: whoever looks must not change what a log is granted.
        let mut reports = self.report.lock().clone();
        reports.sort_by_key(|report| report.drive);
        let each = reports.into_iter().filter_map(|report| {
            let mut budget = report.budget?;
            let stats = report.stats;
            let budget_rate = budget.rate();
            let each_second = stats.bytes_written as f64 / now.as_secs_f64().max(1.0);
            let log = LogTotals {
                stats,
                budget_rate,
                budget_available: budget_rate.is_some().then(|| budget.available(now)),
                expected_life_years: budget
                    .expected_life_years(each_second)
                    .filter(|years| years.is_finite()),
            };
            let (drive, capacity) = (report.drive, report.capacity);
            Some((DriveTotals { drive, capacity, log }, report.memory_bytes as u64))
        });
        let each: Vec<_> = each.collect();
        if !each.is_empty() {
            all.memory.push(("segment_buffers", each.iter().map(|(_, bytes)| bytes).sum()));
        }
        all.log = each.iter().map(|(drive, _)| drive.log).reduce(LogTotals::and);
        if each.len() > 1 {
            all.drives = each.into_iter().map(|(drive, _)| drive).collect();
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_is_the_mean_of_the_shards() {
        assert_eq!(Tunings::of(&[]), None);
        let shard = |thrift, reason| {
            let mut tuning = Tuning::default();
            (tuning.thrift, tuning.reason, tuning.misses) = (thrift, reason, 0.5);
            tuning
        };
        let all = Tunings::of(&[shard(0.5, Tuned::TooEarly), shard(2.0, Tuned::Rate)]).unwrap();
        assert!((all.thrift - 1.0).abs() < 1e-6, "{all:?}");
        assert_eq!((all.reason, all.misses, all.gain), (Tuned::Rate, 0.5, 0.5));
    }

    #[test]
    fn shares_of_shards_are_weighed_by_their_decisions() {
        let report = |scored, precision, recall| ModelReport {
            app: AppId(1),
            version: 1,
            trained_at: larder_base::Nanos::ZERO,
            trained_samples: 5,
            samples: 1,
            positive_share: None,
            scored,
            precision,
            recall,
            horizon: larder_base::Nanos::ZERO,
            weights: None,
        };
        let mut all = report(300, Some(0.5), None);
        merge_models(&mut all, &report(100, Some(0.9), Some(0.25)));
        assert!((all.precision.unwrap() - 0.6).abs() < 1e-6);
        assert_eq!((all.recall, all.scored), (Some(0.25), 400));
        merge_models(&mut all, &report(0, None, None));
        assert!((all.precision.unwrap() - 0.6).abs() < 1e-6);
    }
}
