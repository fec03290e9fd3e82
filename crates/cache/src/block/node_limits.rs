//! What has the last word over admission: what is selected, each volume's share, and the drive's write budget.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use larder_base::Nanos;
use larder_engine::block::node::limits::Limits;
use larder_engine::block::node::operator::select::Kept;
use larder_engine::block::node::owners::Placed;
use larder_engine::block::node::quiet::{Changes, QUIET};
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::node::setup;
use larder_engine::block::node::share::{Pins, Share};
use larder_engine::block::{LineId, Source};
use larder_policy::block::{Rule, Selection, VolumeId};
use larder_policy::budget::{BudgetError, WriteBudgetConfig};
use larder_runtime::latency::LatencyHistogram;

use super::attached::Attached;
use super::budget::BudgetFile;
use super::locked;
use super::select::Keeping;

/// Fills whose time is remembered, to say since when a line is cached.
const RECENT: usize = 16_384;

/// What has the last word over admission, as it is configured.
#[derive(Clone, Debug, Default)]
pub struct RulesConfig {
    /// Floor and ceiling of volumes, by name.
    pub shares: Vec<(String, Share)>,
    /// The drive's endurance and the wanted life.
    pub budget: WriteBudgetConfig,
}

impl RulesConfig {
    pub(super) fn share(&self, volume: &str) -> Share {
        // The last one counts.
        self.shares.iter().rev().find(|s| s.0 == volume).map(|s| s.1).unwrap_or_default()
    }
}

/// The write budget at this moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct BudgetNow {
    /// Bytes per second, if there is a limit.
    pub rate: Option<f64>,
    /// Bytes that may be written now.
    pub available: Option<u64>,
}

/// Latencies of requests, from the moment that they are taken from the connection to their answer.
#[derive(Clone, Debug, Default)]
pub struct Latencies {
    /// Reads answered without asking the store or waiting for it.
    pub hit: LatencyHistogram,
    /// Other reads.
    pub miss: LatencyHistogram,
    /// Writes, zeroes and trims.
    pub write: LatencyHistogram,
}

impl Latencies {
    /// Adds another's.
    pub fn add(&mut self, other: &Latencies) {
        self.hit.add(&other.hit);
        self.miss.add(&other.miss);
        self.write.add(&other.write);
    }

    /// What was recorded since `earlier`, a copy of this one.
    pub fn since(&self, earlier: &Latencies) -> Latencies {
        Latencies {
            hit: self.hit.since(&earlier.hit),
            miss: self.miss.since(&earlier.miss),
            write: self.write.since(&earlier.write),
        }
    }
}

/// See the [module](self).
pub(super) struct NodeLimits {
    placed: RwLock<Placed<Arc<Attached>>>,
    next_id: AtomicU32,
    pub(super) selection: RwLock<Selection>,
    pub(super) selecting: Keeping,
    pins: Pins,
    /// What keeps lines from flash, and what writing them costs.
    pub(super) limits: Limits,
    latencies: Vec<Mutex<Latencies>>,
    recent: Mutex<VecDeque<(LineId, u32, Nanos)>>,
    /// Counts detached volumes: workers let go of theirs when it changes.
    pub(super) gone: AtomicU64,
    /// Whose turn it is to lock a large range.
    pub(super) ranges: Mutex<Turns>,
    /// When each region of the write-intent map was last changed.
    pub(super) changes: Changes,
    /// Something is prefetched for an operator.
    pub(super) prefetching: AtomicBool,
    pub(super) path: PathBuf,
    pub(super) uuid: String,
    /// Why the cache is out of use.
    pub(super) given_up: Mutex<Option<String>>,
    /// Why that could not be noted for later starts.
    pub(super) not_noted: Mutex<Option<String>>,
}

impl NodeLimits {
    pub(super) fn new(
        config: &super::CacheConfig,
        superblock: &larder_format::block::BlockSuperblock,
        path: PathBuf,
        budget: &BudgetFile,
    ) -> Result<NodeLimits, BudgetError> {
        let layout = superblock.layout;
        let uuid = superblock.uuid.to_string();
        let limits = setup::limits(&config.rules.budget, &layout, budget.read(), true)?;
        Ok(NodeLimits {
            placed: RwLock::default(),
            next_id: AtomicU32::new(0),
            selection: RwLock::default(),
            selecting: Keeping::default(),
            pins: Pins::new(layout.capacity() * u64::from(layout.line)),
            limits,
            latencies: (0..=config.workers + config.queues).map(|_| Mutex::default()).collect(),
            recent: Mutex::default(),
            gone: AtomicU64::new(0),
            ranges: Mutex::default(),
            changes: Changes::new(layout.regions, QUIET),
            prefetching: AtomicBool::new(false),
            path,
            uuid,
            given_up: Mutex::default(),
            not_noted: Mutex::default(),
        })
    }

    // ---- volumes ----

    /// A number that no volume of this run had.
    pub(super) fn next_id(&self) -> VolumeId {
        VolumeId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// The volumes are these from now on.
    pub(super) fn set_volumes(&self, volumes: Vec<Arc<Attached>>) {
        self.placed.write().unwrap_or_else(PoisonError::into_inner).set(volumes);
        self.govern();
    }

    /// A volume of which no line is cached lies at `base` from now on.
    pub(super) fn moved(&self, volume: &Attached, base: u64) {
        let mut placed = self.placed.write().unwrap_or_else(PoisonError::into_inner);
        volume.set_base(base);
        placed.moved();
    }

    fn govern(&self) {
        let placed = self.placed.read().unwrap_or_else(PoisonError::into_inner);
        let selection = self.selection.read().unwrap_or_else(PoisonError::into_inner);
        placed.govern(&selection, &self.pins);
    }

    /// What is pinned.
    pub(super) fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Bytes that are pinned, and how many may be for them to be kept from eviction.
    pub(super) fn pinned(&self) -> (u64, u64) {
        self.pins.pinned()
    }

    /// Changes what is selected.
    pub(super) fn select<R>(&self, change: impl FnOnce(&mut Selection) -> R) -> R {
        let result = change(&mut self.selection.write().unwrap_or_else(PoisonError::into_inner));
        self.govern();
        result
    }

    /// What is selected of a volume.
    pub(super) fn kept(&self, volume: VolumeId) -> Kept {
        Kept::of(&self.selection.read().unwrap_or_else(PoisonError::into_inner), volume)
    }

    /// The volume at a byte of the line space.
    pub(super) fn volume_at(&self, at: u64) -> Option<Arc<Attached>> {
        self.placed.read().unwrap_or_else(PoisonError::into_inner).at(at).cloned()
    }

    /// The volume that has bytes in `from..to` of the line space.
    pub(super) fn volume_within(&self, from: u64, to: u64) -> Option<Arc<Attached>> {
        self.placed.read().unwrap_or_else(PoisonError::into_inner).within(from, to).cloned()
    }

    // ---- what stays and what may come ----

    /// The rule for bytes of a volume.
    pub(super) fn rule(&self, volume: &Attached, offset: u64, bytes: u64) -> Rule {
        if !volume.selected.load(Ordering::Relaxed) {
            return Rule::ByPolicy;
        }
        let selection = self.selection.read().unwrap_or_else(PoisonError::into_inner);
        selection.rule(volume.id, offset, bytes)
    }

    /// Lines begin to be filled.
    pub(super) fn filling(&self, line: LineId, at: u64, lines: u32, source: Source, now: Nanos) {
        if let Some(volume) = self.volume_at(at) {
            volume.counters.filling(lines, source);
        }
        let mut recent = locked(&self.recent);
        if recent.len() == RECENT {
            recent.pop_front();
        }
        recent.push_back((line, lines, now));
    }

    /// When a line was last filled, if that is remembered.
    pub(super) fn filled_at(&self, line: LineId) -> Option<Nanos> {
        let recent = locked(&self.recent);
        let found = recent
            .iter()
            .rev()
            .find(|(first, lines, _)| *first <= line && line.0 < first.0 + u64::from(*lines));
        found.map(|(_, _, at)| *at)
    }

    // ---- the write budget ----

    pub(super) fn budget_now(&self, now: Nanos) -> BudgetNow {
        let (rate, available) = self.limits.budget(now).unzip();
        BudgetNow { rate, available }
    }

    // ---- counters ----

    pub(super) fn record(&self, worker: usize, record: impl FnOnce(&mut Latencies)) {
        record(&mut locked(&self.latencies[worker.min(self.latencies.len() - 1)]));
    }

    pub(super) fn latencies(&self) -> Latencies {
        let mut sum = Latencies::default();
        self.latencies.iter().for_each(|l| sum.add(&locked(l)));
        sum
    }
}
