//! What a run of an experiment gives.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::applications::AppFigures;
use super::block::BlockFigures;
use super::spec::{CacheKind, Experiment};
use crate::ssd::Wear;

/// Everything about one run: what was run, on what, and what came out.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// Version of Larder.
    pub version: String,
    /// Seed of the run.
    pub seed: u64,
    /// The trace's name.
    pub trace: String,
    /// Hash of its requests, as in `workload`.
    pub trace_hash: String,
    /// The experiment with every default filled in.
    pub experiment: Experiment,
    /// The workload as it was read.
    pub workload: WorkloadFacts,
    /// One for each cache, in the experiment's order.
    pub caches: Vec<CacheOutcome>,
    /// Each expectation, met or not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub expectations: Vec<Checked>,
}

/// The workload as it was read, warm-up included.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct WorkloadFacts {
    /// Hash of all requests as decoded, whatever format or compression they came in; 16 hexadecimal digits.
    pub trace_hash: String,
    /// Requests of any kind.
    pub requests: u64,
    /// Of these, reads.
    pub reads: u64,
    /// Of these, writes.
    pub writes: u64,
    /// Of these, removals.
    pub removals: u64,
    /// Bytes of keys and values of all requests.
    pub bytes: u64,
    /// Seconds from the first request to the last.
    pub seconds: f64,
    /// Whether the times are the stated rate's, since the trace has none.
    pub times_from_rate: bool,
    /// Malformed records that were passed over.
    pub skipped: u64,
}

/// What one cache did after the warm-up. Ratios are 0 where their denominator is.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CacheOutcome {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// DRAM, bytes: for objects alone, or for everything where the experiment states `memory`.
    pub dram: u64,
    /// Flash, bytes.
    pub flash: u64,

    /// Requests of any kind.
    pub requests: u64,
    /// Reads.
    pub reads: u64,
    /// Reads answered from DRAM.
    pub hits_dram: u64,
    /// Reads answered from flash.
    pub hits_flash: u64,
    /// Bytes of keys and values of reads.
    pub read_bytes: u64,
    /// Of these, answered.
    pub hit_bytes: u64,
    /// Bytes of keys and values that clients set: written by the trace, or brought in after a miss.
    pub set_bytes: u64,
    /// Of these, brought in after a miss.
    pub miss_bytes: u64,
    /// Bytes written to flash.
    pub flash_bytes: u64,

    /// Reads answered, of all reads.
    pub hit_ratio: f64,
    /// Reads answered from DRAM, of all reads.
    pub dram_hit_ratio: f64,
    /// Reads answered from flash, of all reads.
    pub flash_hit_ratio: f64,
    /// Reads not answered, of all reads.
    pub miss_ratio: f64,
    /// Bytes of reads not answered, of the bytes of all reads.
    pub byte_miss_ratio: f64,
    /// Cache-level write amplification: flash bytes over all bytes set by clients.
    pub clwa_of_sets: f64,
    /// The same over bytes brought in after misses only, as Flashield's and lsm-sim's figures have it.
    pub clwa_of_misses: f64,
    /// Device-level write amplification: bytes that the drive programmed, whole pages, over bytes that the cache wrote.
    /// None where nothing was written.
    pub dlwa: Option<f64>,
    /// `clwa_of_sets` × `dlwa`.
    pub write_amplification: Option<f64>,
    /// Bytes written to flash per second of virtual time.
    pub flash_bytes_per_second: f64,
    /// Years that the drive's endurance lasts at this rate and `dlwa`. None where nothing was written.
    pub life_years: Option<f64>,
    /// Erases over the drive's super-blocks, warm-up included.
    pub wear: Option<Wear>,

    /// Reads of flash that requests waited for, where counted.
    pub flash_reads: Option<u64>,
    /// Flash reads of the requests that hit on flash, over their number. None without hits on flash.
    pub flash_reads_per_hit: Option<f64>,
    /// Flash reads of the reads that missed, over their number. None without misses.
    pub flash_reads_per_miss: Option<f64>,
    /// Bytes of records over all bytes written to flash with them. None where unknown, or nothing was written.
    pub flash_fill: Option<f64>,
    /// Objects that left flash never having been read there, of all that left. None where unknown or none left.
    pub unread_share: Option<f64>,
    /// Objects that left DRAM for good though admission wanted them on flash, or without asking it, where known.
    pub evicted_unjudged: Option<u64>,
    /// Objects in DRAM at the end, where known.
    pub dram_objects: Option<u64>,
    /// Objects on flash at the end, where known.
    pub flash_objects: Option<u64>,
    /// DRAM for index and policy, bytes, where known.
    pub metadata_bytes: Option<u64>,
    /// DRAM for index and policy per object on flash, bytes.
    pub metadata_per_flash_object: Option<f64>,

    /// Memory that simulating the cache takes, bytes, where known.
    pub simulator_bytes: Option<u64>,
    /// The same over the objects in DRAM and on flash.
    pub simulator_bytes_per_object: Option<f64>,

    /// How long requests took.
    pub latency: Latencies,
    /// Share of the drive's channels' time spent working.
    pub flash_utilisation: f64,
    /// Share of the backing store's servers' time spent working; where their number is not limited, the mean number of
    /// requests under way.
    pub backend_utilisation: f64,
    /// What is told of block caches alone; beside the others, not in a table of its own.
    #[serde(flatten)]
    pub block: Option<BlockFigures>,
    /// What each application has had, by name, where the experiment has `applications`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub applications: BTreeMap<String, AppFigures>,
    /// Figures over time.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub series: Vec<Point>,
}

/// Latencies by what happened.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Latencies {
    /// All requests.
    pub all: Latency,
    /// Reads.
    pub read: Latency,
    /// Reads answered from DRAM.
    pub hit_dram: Latency,
    /// Reads answered from flash.
    pub hit_flash: Latency,
    /// Reads that the backing store answered.
    pub miss: Latency,
    /// Writes and removals.
    pub write: Latency,
}

/// A distribution of latencies, microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    /// How many.
    pub count: u64,
    /// Mean.
    pub mean_us: f64,
    /// Median.
    pub p50_us: f64,
    /// 90 % took no longer.
    pub p90_us: f64,
    /// 99 % took no longer.
    pub p99_us: f64,
    /// 99.9 % took no longer.
    pub p999_us: f64,
    /// The longest.
    pub max_us: f64,
}

/// One point of the time series: what happened in the interval that ends at `time`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Point {
    /// End of the interval, seconds of virtual time since the trace's first request.
    pub time: f64,
    /// How much of the interval had passed when the run ended, 0 to 1: below 1 for the last one alone.
    pub interval_share: f64,
    /// Requests.
    pub requests: u64,
    /// Reads.
    pub reads: u64,
    /// Reads answered from DRAM, of all reads.
    pub dram_hit_ratio: f64,
    /// Reads answered from flash, of all reads.
    pub flash_hit_ratio: f64,
    /// Bytes written to flash.
    pub flash_bytes: u64,
    /// Flash bytes over bytes set by clients.
    pub clwa_of_sets: f64,
    /// Device-level write amplification; 1 where nothing was written.
    pub dlwa: f64,
    /// Mean latency of reads, microseconds.
    pub latency_read_mean_us: f64,
    /// 99th percentile of the latency of reads, microseconds.
    pub latency_read_p99_us: f64,
}

/// An expectation, met or not.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Checked {
    /// What was expected.
    pub expected: String,
    /// What came out.
    pub found: String,
    /// Whether that is it.
    pub met: bool,
}

impl CacheOutcome {
    /// The figure of this name: where it is in the outcome's JSON, names joined by `_` (`hit_ratio`, `latency_read_p99_us`).
    /// None where there is no such name, or the run gives no value for it: of a distribution of nothing there is the count alone.
    pub fn metric(&self, name: &str) -> Option<f64> {
        self.figures().remove(name)
    }

    /// Every figure that has a value, by name.
    pub fn figures(&self) -> BTreeMap<String, f64> {
        let mut all = BTreeMap::new();
        // Plain data under names that are text: that it cannot be written as JSON does not happen.
        collect(&serde_json::to_value(self).unwrap_or_default(), "", &mut all);
        all
    }

    /// What a cache of a kind tells of itself, with every figure that it may have a value for.
    fn shape(kind: CacheKind) -> CacheOutcome {
        use CacheKind::{Block, FifoLog, FlashieldPaper, Hybrid, Ripq, SetAssociative, Victim};
        let objects = kind != Block;
        let hybrid = kind == Hybrid;
        let any = Latency { count: 1, ..Latency::default() };
        let indexed = match kind {
            Hybrid | Block | SetAssociative | FifoLog | FlashieldPaper => true,
            Victim | Ripq => false,
        };
        let filled = matches!(kind, Hybrid | FifoLog | FlashieldPaper);
        CacheOutcome {
            dlwa: Some(1.0),
            write_amplification: Some(1.0),
            life_years: Some(1.0),
            wear: Some(Wear::default()),
            flash_reads: objects.then_some(0),
            flash_reads_per_hit: objects.then_some(0.0),
            flash_reads_per_miss: objects.then_some(0.0),
            flash_fill: filled.then_some(0.0),
            unread_share: hybrid.then_some(0.0),
            evicted_unjudged: hybrid.then_some(0),
            dram_objects: hybrid.then_some(0),
            flash_objects: indexed.then_some(0),
            metadata_bytes: indexed.then_some(0),
            metadata_per_flash_object: indexed.then_some(0.0),
            simulator_bytes: hybrid.then_some(0),
            simulator_bytes_per_object: hybrid.then_some(0.0),
            block: (!objects).then(BlockFigures::shape),
            latency: Latencies {
                // A block cache has no tier in DRAM; of RIPQ the blocks' buffers are one.
                hit_dram: Latency { count: u64::from(objects), ..any },
                all: any,
                read: any,
                hit_flash: any,
                miss: any,
                write: any,
            },
            ..CacheOutcome::default()
        }
    }
}

/// Names of the figures that caches of this kind have, in a run that gives a value to each.
pub fn figures_of(kind: CacheKind) -> Vec<String> {
    CacheOutcome::shape(kind).figures().into_keys().collect()
}

fn collect(value: &Value, name: &str, all: &mut BTreeMap<String, f64>) {
    match value {
        // No mean and no percentile without anything to take them of.
        Value::Object(map) if map.contains_key("mean_us") && map["count"] == 0 => {
            all.insert(format!("{name}_count"), 0.0);
        }
        Value::Object(map) => {
            for (key, value) in map {
                let name = if name.is_empty() { key.clone() } else { format!("{name}_{key}") };
                collect(value, &name, all);
            }
        }
        // The time series is the only list.
        leaf => all.extend(leaf.as_f64().map(|figure| (name.to_owned(), figure))),
    }
}
