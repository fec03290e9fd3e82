//! What the shards and the log of a cache are built from.

use larder_base::{ByteSize, HashKey, Nanos};
use larder_policy::admission::AdmissionConfig;
use larder_policy::budget::{BudgetError, BudgetState, WriteBudget, WriteBudgetConfig};

use super::plan::Plan;
use crate::kv::config::{ClockMode, FlashGeometry, MOST_DRIVES};
use crate::kv::record::{
    AppsSetup, DriveSetup, LogSetup, RunSetup, SetupError, ShardSeed, ShardSetup,
};

/// How long a flash that fails every write is left alone.
const RETRY_AFTER: Nanos = Nanos::from_secs(5);
/// What a run says that is to begin where there are no CAS uniques left.
const CAS_LEFT: &str = "so low that every shard has some left: each start takes 2^48 of 2^64, and this flash, or memory file, has had \
                        too many; format the flash, or remove the file";

/// The settings of a cache, beside the sizes that a [`Plan`] divides.
#[derive(Clone, Debug)]
pub struct Cache {
    /// Largest object, bytes.
    pub max_item: u32,
    /// Answer "out of memory" instead of evicting.
    pub no_eviction: bool,
    /// What a read does to CLOCK.
    pub clock_mode: ClockMode,
    /// Largest CLOCK value: 1 for one bit, 3 for two.
    pub clock_max: u8,
    /// How much of the flash may be hot, percent.
    pub hot_percent: u8,
    /// How much of a reclaimed segment may go back to DRAM, percent.
    pub reinsert_percent: u8,
    /// Admission.
    pub admission: AdmissionConfig,
    /// The write budget.
    pub budget: WriteBudgetConfig,
    /// Applications.
    pub applications: AppsSetup,
}

/// What is another at every start. Nothing of it is drawn here.
#[derive(Clone, Debug)]
pub struct Start {
    /// Larder's version.
    pub larder: String,
    /// UUID of the flash; of the run, without flash.
    pub uuid: String,
    /// The secret with which keys are hashed.
    pub hash_key: HashKey,
    /// The first CAS unique.
    pub cas_base: u64,
    /// How many each shard counts from there, as a power of two: in parts of their own, so that no two keys ever show the same one.
    pub cas_bits: u32,
    /// Seed of admission's draws.
    pub seed: u64,
    /// The flash; no segments without one.
    pub flash: FlashGeometry,
    /// The log; `None` without flash.
    pub log: Option<LogStart>,
}

/// Where a log begins.
#[derive(Clone, Copy, Debug, Default)]
pub struct LogStart {
    /// Generations given out are above this.
    pub generation_floor: u64,
    /// What the write budget remembers of former starts.
    pub budget_state: Option<BudgetState>,
    /// When the write budget begins.
    pub budget_at: Nanos,
}

/// Bytes a second that a write budget allows; `None` without one.
///
/// # Errors
/// One that cannot be.
pub fn budget_rate(
    budget: &WriteBudgetConfig,
    capacity: ByteSize,
    state: Option<BudgetState>,
    at: Nanos,
) -> Result<Option<f64>, BudgetError> {
    Ok(WriteBudget::new(budget, capacity, state, at)?.rate())
}

/// All that shards and log are built from, as a record states it: what is recorded is what runs.
///
/// # Errors
/// A write budget that cannot be, and a start for which no CAS uniques are left.
pub fn run_setup(cache: &Cache, plan: &Plan, start: &Start) -> Result<RunSetup, SetupError> {
    // Without flash nothing is admitted anywhere, and no policy needs its tables.
    let admission = if start.flash.segments == 0 {
        AdmissionConfig::from_name("all")?
    } else {
        let mut admission = cache.admission.clone();
        // One setting for whoever wants every byte accounted for.
        admission.first_fill &= cache.budget.first_fill;
        admission
    };
    // None is ever given out twice.
    let cas = (plan.shards as u64) << start.cas_bits;
    if start.cas_base.checked_add(cas).is_none() {
        let (what, value) = ("the first CAS unique", start.cas_base);
        return Err(SetupError::Value { what, value, must: CAS_LEFT });
    }
    let budget_rate = match start.log {
        Some(log) => {
            // Each drive has a budget of its own.
            let parts = (0..MOST_DRIVES).filter_map(|drive| start.flash.part(drive));
            let rates = parts.map(|(own, _)| {
                let capacity = ByteSize(own.capacity());
                budget_rate(&cache.budget, capacity, log.budget_state, log.budget_at)
            });
            rates.sum::<Result<Option<f64>, _>>()?
        }
        None => None,
    };
    let room = |bytes: usize| if cache.no_eviction { 0 } else { bytes as u64 };
    Ok(RunSetup {
        kv: RunSetup::VERSION,
        larder: start.larder.clone(),
        uuid: start.uuid.clone(),
        hash_key: start.hash_key.0,
        salt: start.flash.salt,
        segments: start.flash.segments,
        segment_bytes: start.flash.segment_bytes,
        drives: match start.flash.drives.is_one() {
            true => Vec::new(),
            false => start.flash.drives.all().iter().map(DriveSetup::from).collect(),
        },
        shard: ShardSetup {
            arena_bytes: plan.arena_bytes as u64,
            max_object: cache.max_item,
            no_eviction: cache.no_eviction,
            clock_increment: cache.clock_mode == ClockMode::Increment,
            clock_max: cache.clock_max,
            free_low: room(plan.free_low),
            free_high: room(plan.free_high),
            flash_min_record: 0,
            access_times: plan.access_times as u64,
            buckets: plan.buckets,
            index_most: plan.index_most,
            admission_memory: plan.admission_bytes as u64,
            objects: plan.objects,
            share_bits: (1.0 / plan.shards as f64).to_bits(),
            budget_rate_bits: budget_rate.map(f64::to_bits),
        },
        shards: (0..plan.shards as u64)
            .map(|i| ShardSeed {
                cas_base: start.cas_base.saturating_add(i << start.cas_bits),
                seed: start.seed ^ i,
            })
            .collect(),
        admission,
        applications: cache.applications.clone(),
        log: start.log.map(|log| LogSetup {
            hot_percent: cache.hot_percent,
            reinsert_percent: cache.reinsert_percent,
            retry_after: RETRY_AFTER.0,
            generation_floor: log.generation_floor,
            budget: cache.budget.clone(),
            budget_state: log.budget_state,
            budget_at: log.budget_at.0,
        }),
    })
}
