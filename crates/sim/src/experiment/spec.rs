//! What an experiment states: TOML, every key of which is known here.

use std::collections::BTreeMap;

use larder_base::ByteSize;
use larder_engine::kv::ClockMode as EngineClockMode;
use larder_engine::kv::node::{AdmissionNeed, defaults};
use larder_policy::admission::AdmissionConfig;
use larder_policy::application::ApplicationsTable;
use larder_policy::budget::WriteBudgetConfig;
use larder_trace::ValueSizes;
use serde::{Deserialize, Serialize};

use super::baseline::{FifoLog, FlashieldPaper, SetAssociative};
use crate::block::Block;
use crate::device::{Drive, Store, Timing};
use crate::kv::STUDY_OBJECT;

/// A workload and the caches to run on it, side by side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experiment {
    /// One line on what it shows.
    #[serde(default)]
    pub title: String,
    /// Seed of hashing and of all draws.
    #[serde(default = "one")]
    pub seed: u64,
    /// What is asked.
    pub workload: Workload,
    /// What is asked of: at least one, each of a name of its own.
    #[serde(rename = "cache")]
    pub caches: Vec<CacheSpec>,
    /// The drive under each cache.
    #[serde(default)]
    pub ssd: Drive,
    /// How long everything takes.
    #[serde(default)]
    pub timing: Timing,
    /// The store behind block caches.
    #[serde(default)]
    pub store: Store,
    /// What the journals of block caches' volumes lie on. Default: a device of its own like the store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub journal: Option<Store>,
    /// The time series.
    #[serde(default)]
    pub report: Report,
    /// What must come out.
    #[serde(default, skip_serializing_if = "Expectations::is_empty")]
    pub expect: Expectations,
}

fn one() -> u64 {
    1
}

/// What is asked, and how it is read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Workload {
    /// A trace's file, `-` for standard input, or `gen:…`.
    pub trace: String,
    /// The trace's format, where it is not to be told from its contents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub format: Option<String>,
    /// Columns of a csv file, as `--columns` takes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<String>,
    /// Requests per second that give times to a trace without them. Default 10,000.
    #[serde(default = "default_rate")]
    pub rate: f64,
    /// Stop after so many requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit: Option<u64>,
    /// Requests that only fill the caches; nothing is counted before them. Default 0.
    #[serde(default)]
    pub warmup: u64,
    /// Pass over malformed records rather than stop at the first.
    #[serde(default)]
    pub skip_bad: bool,
    /// Sizes of objects by key in place of the trace's own, as `lognormal:300`. Default: the trace's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_sizes: Option<ValueSizes>,
    /// Split block I/O into pages of so many bytes. Default: each I/O is one object.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "page_bytes")]
    pub pages: Option<u32>,
}

/// A size as everywhere else. What 32 bits do not hold is no power of two then, and refused with the reason.
fn page_bytes<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    let size = ByteSize::deserialize(d)?;
    Ok(Some(u32::try_from(size.0).unwrap_or(u32::MAX)))
}

fn default_rate() -> f64 {
    10_000.0
}

/// One cache.
#[allow(clippy::large_enum_variant, reason = "an experiment holds a handful")]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum CacheSpec {
    /// The engine of `larder kv`: CLOCK in DRAM, admission, a log of segments on flash.
    Hybrid(Hybrid),
    /// LRU in DRAM; whatever it evicts is written to LRU on flash.
    Victim(Victim),
    /// RIPQ: a segmented LRU on flash with insertion points and virtual updates (Tang et al., FAST '15).
    Ripq(Ripq),
    /// CacheLib's small-object cache: LRU in DRAM before 4 KiB buckets that are written whole (Berg et al., OSDI '20).
    SetAssociative(SetAssociative),
    /// Navy's block cache: LRU in DRAM before a log of regions in FIFO order, every object indexed in DRAM.
    FifoLog(FifoLog),
    /// The engine of `larder block`, on block reads and writes.
    Block(Block),
    /// Flashield's flash in the paper's form: Bloom filters, a table without chains, objects at any byte of a segment.
    FlashieldPaper(FlashieldPaper),
}

impl CacheSpec {
    /// The name in reports: the one given, or the kind.
    pub fn name(&self) -> &str {
        let name = match self {
            CacheSpec::Hybrid(c) => &c.name,
            CacheSpec::Victim(c) => &c.name,
            CacheSpec::Ripq(c) => &c.name,
            CacheSpec::SetAssociative(c) => &c.name,
            CacheSpec::FifoLog(c) => &c.name,
            CacheSpec::Block(c) => &c.name,
            CacheSpec::FlashieldPaper(c) => &c.name,
        };
        name.as_deref().unwrap_or(self.kind().name())
    }

    /// Its kind.
    pub fn kind(&self) -> CacheKind {
        match self {
            CacheSpec::Hybrid(_) => CacheKind::Hybrid,
            CacheSpec::Victim(_) => CacheKind::Victim,
            CacheSpec::Ripq(_) => CacheKind::Ripq,
            CacheSpec::SetAssociative(_) => CacheKind::SetAssociative,
            CacheSpec::FifoLog(_) => CacheKind::FifoLog,
            CacheSpec::Block(_) => CacheKind::Block,
            CacheSpec::FlashieldPaper(_) => CacheKind::FlashieldPaper,
        }
    }

    /// Whether the outcome tells what each application has had.
    pub fn tells_applications(&self) -> bool {
        matches!(self, CacheSpec::Hybrid(Hybrid { applications: Some(_), .. }))
    }

    /// Bytes of DRAM that it is given: for objects, or for everything where that is stated (`memory`).
    pub fn dram(&self) -> u64 {
        match self {
            CacheSpec::Hybrid(c) => c.memory.or(c.dram).unwrap_or_default().0,
            CacheSpec::Victim(c) => c.dram.0,
            CacheSpec::Ripq(_) | CacheSpec::Block(_) => 0,
            CacheSpec::SetAssociative(c) => c.dram.0,
            CacheSpec::FifoLog(c) => c.dram.0,
            CacheSpec::FlashieldPaper(c) => c.dram.0,
        }
    }

    /// Bytes of flash.
    pub fn flash(&self) -> u64 {
        match self {
            CacheSpec::Hybrid(c) => c.flash.0,
            CacheSpec::Victim(c) => c.flash.0,
            CacheSpec::Ripq(c) => c.flash.0,
            CacheSpec::SetAssociative(c) => c.flash.0,
            CacheSpec::FifoLog(c) => c.flash.0,
            CacheSpec::Block(c) => c.flash.0,
            CacheSpec::FlashieldPaper(c) => c.flash.0,
        }
    }
}

/// A kind of cache: [`CacheSpec`] without its parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheKind {
    /// See [`CacheSpec::Hybrid`].
    Hybrid,
    /// See [`CacheSpec::Victim`].
    Victim,
    /// See [`CacheSpec::Ripq`].
    Ripq,
    /// See [`CacheSpec::SetAssociative`].
    SetAssociative,
    /// See [`CacheSpec::FifoLog`].
    FifoLog,
    /// See [`CacheSpec::Block`].
    Block,
    /// See [`CacheSpec::FlashieldPaper`].
    FlashieldPaper,
}

impl CacheKind {
    /// As the experiment names it.
    pub fn name(self) -> &'static str {
        match self {
            CacheKind::Hybrid => "hybrid",
            CacheKind::Victim => "victim",
            CacheKind::Ripq => "ripq",
            CacheKind::SetAssociative => "set-associative",
            CacheKind::FifoLog => "fifo-log",
            CacheKind::Block => "block",
            CacheKind::FlashieldPaper => "flashield-paper",
        }
    }
}

/// How a read changes an object's CLOCK value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClockMode {
    /// To its maximum: approximates LRU.
    SetMax,
    /// Up by one: approximates MFU.
    Increment,
}

/// The hybrid cache's configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hybrid {
    /// Its name in reports. Default: the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// DRAM with everything in it, as `larder kv -m` has it: objects, index, admission, buffers and tables. This or `dram`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// DRAM for objects alone, for studies that fix it: everything beside them comes on top, as a server has it there, and is reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dram: Option<ByteSize>,
    /// Flash.
    pub flash: ByteSize,
    /// With `memory`: the largest object, as `larder kv -I` has it, at most 1 MiB. Default 1 MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_item: Option<ByteSize>,
    /// With `dram`: bytes of a segment. Default 0: chosen by flash and DRAM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub segment: Option<ByteSize>,
    /// With `dram`: shards, 1, 2 or 4. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shards: Option<u32>,
    /// Mean bytes of a record, by which index and admission are sized, as `larder kv --flash-object-size` has it. Default: with
    /// `memory` as there: 280, or what makes the index fit; with `dram` 320.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mean_record: Option<u64>,
    /// Bits of CLOCK: 1 or 2. Default 2.
    #[serde(default = "clock_bits")]
    pub clock_bits: u8,
    /// What a read does to CLOCK. Default `increment`.
    #[serde(default = "clock_mode")]
    pub clock_mode: ClockMode,
    /// How much of the flash may be hot, percent (Flashield's hot data threshold). Default 70.
    #[serde(default = "hot_percent")]
    pub hot_percent: u8,
    /// How much of a reclaimed segment may go back to DRAM, percent. Default 100.
    #[serde(default = "reinsert_percent")]
    pub reinsert_percent: u8,
    /// Admission, as in `larder kv`'s configuration.
    #[serde(default)]
    pub admission: AdmissionConfig,
    /// The write budget, as in `larder kv`'s configuration.
    #[serde(default)]
    pub write_budget: WriteBudgetConfig,
    /// Shares of the cache by application, as in `larder kv`'s configuration. Stated, be it empty, the outcome tells what each
    /// application has had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub applications: Option<ApplicationsTable>,
    /// What the trace's applications are called, by number. Default: 0 is `default`, the keys without a prefix, and others are
    /// called by their numbers.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub application_names: BTreeMap<String, String>,
}

impl Hybrid {
    /// Mean bytes of a record.
    pub(super) fn object(&self) -> u64 {
        let default = || match self.memory {
            Some(memory) => {
                let need = AdmissionNeed::of(&self.admission);
                defaults::object_size(self.flash.0, memory.0, need)
            }
            None => STUDY_OBJECT,
        };
        self.mean_record.unwrap_or_else(default)
    }
}

fn clock_bits() -> u8 {
    2
}
fn clock_mode() -> ClockMode {
    match defaults::CLOCK_MODE {
        EngineClockMode::SetMax => ClockMode::SetMax,
        EngineClockMode::Increment => ClockMode::Increment,
    }
}
fn hot_percent() -> u8 {
    defaults::HOT_PERCENT
}
fn reinsert_percent() -> u8 {
    defaults::REINSERT_PERCENT
}

/// The victim cache's configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Victim {
    /// Its name in reports. Default: the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// DRAM.
    pub dram: ByteSize,
    /// Flash.
    pub flash: ByteSize,
}

/// RIPQ's configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ripq {
    /// Its name in reports. Default: the kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Flash.
    pub flash: ByteSize,
    /// Bytes of a block. Default 64 KiB.
    #[serde(default = "ripq_block")]
    pub block: ByteSize,
    /// Insertion points (K). Default 8.
    #[serde(default = "ripq_sections")]
    pub sections: u16,
}

fn ripq_block() -> ByteSize {
    ByteSize::kib(64)
}
fn ripq_sections() -> u16 {
    8
}

/// The time series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Report {
    /// Seconds of virtual time from one point to the next. Default 1. It doubles when there are more than `points`.
    pub interval: f64,
    /// Points at most. Default 200; 0 for none.
    pub points: u32,
}

impl Default for Report {
    fn default() -> Report {
        Report { interval: 1.0, points: 200 }
    }
}

/// A range that a figure must be in, both ends included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bound {
    /// At least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min: Option<f64>,
    /// At most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
}

/// Names of caches from the least to the most: once, or several times, where not all of them are in one order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Orders {
    /// All of them.
    One(Vec<String>),
    /// Each of these.
    Several(Vec<Vec<String>>),
}

impl Orders {
    /// Each order by itself.
    pub fn lists(&self) -> &[Vec<String>] {
        match self {
            Orders::One(list) => std::slice::from_ref(list),
            Orders::Several(lists) => lists,
        }
    }
}

/// What must come out, by the names of [`figures_of`](super::figures_of).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Expectations {
    /// For a figure, names of caches from the least to the most, each strictly below the next.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub order: BTreeMap<String, Orders>,
    /// For a cache's name, ranges of its figures.
    #[serde(flatten)]
    pub bounds: BTreeMap<String, BTreeMap<String, Bound>>,
}

impl Expectations {
    /// Whether nothing is expected.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty() && self.bounds.is_empty()
    }
}
