//! The caches that an experiment can hold, behind one trait.

use std::collections::BTreeMap;

use larder_engine::kv::AppStats;
use larder_engine::kv::ClockMode as EngineClockMode;
use larder_engine::kv::api::Tier;
use larder_engine::kv::node::{Study, defaults};
use larder_trace::Request;

use super::applications::{self, AppFigures};
use super::error::ExperimentError;
use super::spec::{CacheSpec, ClockMode, Hybrid};
use crate::device::DeviceOp;
use crate::kv::{CacheConfig, HybridCache, MAX_VALUE, Server, Sizes, study_of};
use crate::lab::baseline::{Baseline, BaselineError, Ripq, VictimCache};

/// One request as a cache meets it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) request: &'a Request,
    /// The object, numbered from 0; 0 where no cache of the run asks for numbers.
    pub(super) tag: u32,
}

/// Bytes of key and value of a request: what ratios by bytes count. Values beyond [`MAX_VALUE`] count as that much.
pub(super) fn bytes_of(request: &Request) -> u64 {
    let key = if request.op.is_block() { 0 } else { request.key_bytes() };
    (request.size.min(MAX_VALUE) + u64::from(key)).max(1)
}

/// What a request did to flash.
#[derive(Debug, Default)]
pub(super) struct Effects {
    /// In the order they happened.
    pub(super) ops: Vec<DeviceOp>,
}

/// States and counts since the start.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    /// Objects that left flash, and of these never read there.
    pub(super) dropped: Option<(u64, u64)>,
    /// Bytes of records that were written to flash.
    pub(super) record_bytes: Option<u64>,
    /// Objects that left DRAM though admission wanted them on flash, or without asking it.
    pub(super) evicted_unjudged: Option<u64>,
    /// Objects in DRAM.
    pub(super) dram_objects: Option<u64>,
    /// Objects on flash.
    pub(super) flash_objects: Option<u64>,
    /// DRAM beside the objects.
    pub(super) metadata_bytes: Option<u64>,
    /// Memory of the simulation.
    pub(super) simulator_bytes: Option<u64>,
}

/// A cache under simulation. A read that misses is followed by a write of the object.
pub(super) trait Cache: Send {
    /// Carries out a request; says where a read was answered from.
    fn request(&mut self, asked: &Asked<'_>, effects: &mut Effects) -> Option<Tier>;

    /// A request that is to come: the next that was not announced.
    fn announce(&mut self, _request: &Request) {}

    /// States and counts.
    fn totals(&self) -> Totals;

    /// What each application has done and has, by name, where the cache tells them apart.
    fn applications(&self) -> BTreeMap<String, AppStats> {
        BTreeMap::new()
    }

    /// What each has had since it had `before`.
    fn since(&self, _before: &BTreeMap<String, AppStats>) -> BTreeMap<String, AppFigures> {
        BTreeMap::new()
    }
}

/// Builds the cache that `spec` states.
pub(super) fn build(spec: &CacheSpec, seed: u64) -> Result<Box<dyn Cache>, ExperimentError> {
    Ok(match spec {
        CacheSpec::Hybrid(c) => {
            let mut cache = HybridCache::new(&config(c, spec.name(), seed)?).map_err(|source| {
                ExperimentError::Cache { name: spec.name().to_owned(), source }
            })?;
            cache.record_device_ops();
            Box::new(cache)
        }
        CacheSpec::Victim(c) => Modelled::boxed(VictimCache::new(c.dram.0, c.flash.0)),
        CacheSpec::Ripq(c) => {
            Modelled::boxed(Ripq::placed(c.flash.0, c.block.0, usize::from(c.sections)))
        }
        CacheSpec::SetAssociative(c) => {
            Modelled::boxed(c.build(seed).map_err(|e| modelled(spec, e))?)
        }
        CacheSpec::FifoLog(c) => Modelled::boxed(c.build(seed).map_err(|e| modelled(spec, e))?),
        CacheSpec::FlashieldPaper(c) => {
            Modelled::boxed(c.build(seed).map_err(|e| modelled(spec, e))?)
        }
        CacheSpec::Block(_) => unreachable!("a block cache has a lane of its own"),
    })
}

fn modelled(spec: &CacheSpec, source: BaselineError) -> ExperimentError {
    ExperimentError::Baseline { name: spec.name().to_owned(), source }
}

/// Whether the cache goes by numbers of objects.
pub(super) fn needs_tags(spec: &CacheSpec) -> bool {
    !matches!(spec, CacheSpec::Hybrid(_) | CacheSpec::Block(_))
}

fn sizes(c: &Hybrid) -> Sizes {
    if let Some(memory) = c.memory {
        let object = c.object().min(1 << 30) as u32;
        let max_item = c.max_item.map_or(defaults::MAX_ITEM, |n| n.0.min(MAX_VALUE) as u32);
        return Sizes::Server(Server { memory: memory.0, flash: c.flash.0, object, max_item });
    }
    let study = study_of(c.dram.unwrap_or_default().0, c.flash.0);
    Sizes::Study(Study {
        segment: c.segment.map_or(0, |s| u32::try_from(s.0).unwrap_or(u32::MAX)),
        shards: c.shards.unwrap_or(study.shards),
        object: c.object(),
        ..study
    })
}

fn config(c: &Hybrid, name: &str, seed: u64) -> Result<CacheConfig, ExperimentError> {
    let (applications, names) = applications::stated(name, c)?;
    Ok(CacheConfig {
        sizes: sizes(c),
        clock_mode: match c.clock_mode {
            ClockMode::SetMax => EngineClockMode::SetMax,
            ClockMode::Increment => EngineClockMode::Increment,
        },
        clock_max: if c.clock_bits == 1 { 1 } else { 3 },
        hot_percent: c.hot_percent,
        reinsert_percent: c.reinsert_percent,
        admission: c.admission.clone(),
        budget: c.write_budget.clone(),
        applications,
        names,
        seed,
    })
}

impl Cache for HybridCache {
    fn request(&mut self, asked: &Asked<'_>, effects: &mut Effects) -> Option<Tier> {
        let tier = HybridCache::request(self, asked.request);
        self.take_device_ops(&mut effects.ops);
        tier
    }

    fn announce(&mut self, request: &Request) {
        HybridCache::announce(self, request);
    }

    fn totals(&self) -> Totals {
        let counters = self.counters();
        let metadata = self.metadata_memory();
        Totals {
            dropped: Some((counters.flash_dropped, counters.flash_dropped_unread)),
            record_bytes: Some(counters.flash_record_bytes),
            evicted_unjudged: Some(self.shard_stats().evictions_unjudged),
            dram_objects: Some(self.dram_objects()),
            flash_objects: Some(self.flash_objects()),
            metadata_bytes: Some(metadata),
            simulator_bytes: Some(self.simulator_memory()),
        }
    }

    fn applications(&self) -> BTreeMap<String, AppStats> {
        HybridCache::applications(self)
    }

    fn since(&self, before: &BTreeMap<String, AppStats>) -> BTreeMap<String, AppFigures> {
        let (dram, flash) = (self.dram_capacity(), self.flash_capacity());
        let figures = |(name, now): (String, AppStats)| {
            let before = before.get(&name).copied().unwrap_or_default();
            (name, AppFigures::of(&now, &before, dram, flash))
        };
        HybridCache::applications(self).into_iter().map(figures).collect()
    }
}

/// A baseline.
struct Modelled<B>(B);

impl<B: Baseline + Send + 'static> Modelled<B> {
    fn boxed(mut cache: B) -> Box<dyn Cache> {
        cache.record_device_ops();
        Box::new(Modelled(cache))
    }
}

impl<B: Baseline + Send> Cache for Modelled<B> {
    fn request(&mut self, asked: &Asked<'_>, effects: &mut Effects) -> Option<Tier> {
        let (op, cache) = (asked.request.op, &mut self.0);
        if op.is_removal() {
            cache.remove(asked.tag);
            cache.take_device_ops(&mut effects.ops);
            return None;
        }
        if !op.is_read() && !op.is_write() {
            return None;
        }
        let before = cache.counts().hits_dram;
        let size = bytes_of(asked.request) as u32;
        if op.is_write() {
            // A new version, whatever its size.
            cache.remove(asked.tag);
        }
        let hit = cache.request(asked.tag, size);
        let in_dram = cache.counts().hits_dram > before;
        cache.take_device_ops(&mut effects.ops);
        if op.is_write() || !hit {
            return None;
        }
        Some(if in_dram { Tier::Dram } else { Tier::Flash })
    }

    fn totals(&self) -> Totals {
        let index = self.0.index_size();
        Totals {
            record_bytes: self.0.record_bytes(),
            flash_objects: index.map(|i| i.objects),
            metadata_bytes: index.map(|i| i.bytes),
            ..Totals::default()
        }
    }
}
