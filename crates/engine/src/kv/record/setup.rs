//! What shards and log were built from: the head of a record, from which a replay builds the same.

use std::sync::Arc;

use larder_base::{ByteSize, HashKey, KeyHasher, Nanos, Words};
use larder_format::geometry::{MAX_SEGMENT_BYTES, MAX_SEGMENTS, Numbers};
use larder_policy::admission::{
    Admission, AdmissionConfig, AdmissionError, AdmissionPolicy, Setup,
};
use larder_policy::application::{ApplicationError, Applications, ApplicationsConfig};
use larder_policy::budget::{BudgetError, BudgetState, WriteBudget, WriteBudgetConfig};
use larder_policy::learn::{self, LearnError, Model, TrainingSet};
use serde::{Deserialize, Serialize};

use crate::dram::{Arena, ObjectMemory};
use crate::index::{Attached, FlashIndex, IndexError};
use crate::kv::config::{
    ClockMode, DriveSegments, Drives, FlashGeometry, MOST_DRIVES, ShardConfig,
};
use crate::kv::log::{FlashLog, LogConfig, SegmentTable};
use crate::kv::shard::KvShard;

/// Percent of the words of a flash index in use, about half of the flash, from which on one that grows is an array: each request
/// reads two lines of it.
const INDEX_WHOLE_FROM: usize = 25;

/// Why shards and log cannot be built from a setup.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// Another version.
    #[error(
        "the record of the key-value cache is of version {0}, and this larder reads version {VERSION}: replay it with the larder that wrote it"
    )]
    Version(u32),
    /// A number that no run has.
    #[error("{what} is {value}: it must be {must}")]
    Value {
        /// Which.
        what: &'static str,
        /// What it says.
        value: u64,
        /// What it must be.
        must: &'static str,
    },
    /// Admission.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// The write budget.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// The applications.
    #[error(transparent)]
    Application(#[from] ApplicationError),
    /// The index.
    #[error(transparent)]
    Index(#[from] IndexError),
}

/// What is alike in all shards. Sizes are bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ShardSetup {
    /// See [`ShardConfig::arena_bytes`].
    pub arena_bytes: u64,
    /// See [`ShardConfig::max_object`].
    pub max_object: u32,
    /// See [`ShardConfig::no_eviction`].
    pub no_eviction: bool,
    /// A read raises the rank by one instead of setting it to the highest.
    pub clock_increment: bool,
    /// See [`ShardConfig::clock_max`].
    pub clock_max: u8,
    /// See [`ShardConfig::free_low`].
    pub free_low: u64,
    /// See [`ShardConfig::free_high`].
    pub free_high: u64,
    /// See [`ShardConfig::flash_min_record`].
    pub flash_min_record: u32,
    /// See [`ShardConfig::access_times`].
    pub access_times: u64,
    /// Buckets of the flash index at first.
    pub buckets: u32,
    /// See [`ShardConfig::index_most`].
    #[serde(default)]
    pub index_most: u32,
    /// See [`Setup::memory`].
    pub admission_memory: u64,
    /// See [`Setup::objects`].
    pub objects: u64,
    /// The bits of [`Setup::share`]: decimal fractions are not exact.
    pub share_bits: u64,
    /// The bits of [`Setup::budget_rate`].
    pub budget_rate_bits: Option<u64>,
}

/// What differs from shard to shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardSeed {
    /// See [`ShardConfig::cas_base`].
    pub cas_base: u64,
    /// See [`Setup::seed`].
    pub seed: u64,
}

/// What the log was built from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LogSetup {
    /// See [`LogConfig::hot_percent`].
    pub hot_percent: u8,
    /// See [`LogConfig::reinsert_percent`].
    pub reinsert_percent: u8,
    /// See [`LogConfig::retry_after`], nanoseconds.
    pub retry_after: u64,
    /// Generations given out are above this.
    pub generation_floor: u64,
    /// The write budget.
    pub budget: WriteBudgetConfig,
    /// What the budget remembered.
    pub budget_state: Option<BudgetState>,
    /// When the budget began, monotonic nanoseconds.
    pub budget_at: u64,
}

/// The applications at the start: their shares, and the names that records on flash may bear.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AppsSetup {
    /// As configured.
    pub config: ApplicationsConfig,
    /// Names by id, from 1.
    pub names: Vec<Vec<u8>>,
}

impl AppsSetup {
    /// The applications, with the ids that records on flash bear: those known before first, in their order, then those
    /// that only the configuration names.
    ///
    /// # Errors
    /// Names that cannot be.
    pub fn applications(&self) -> Result<Applications, ApplicationError> {
        let unshared = ApplicationsConfig { shares: Default::default(), ..self.config.clone() };
        let mut applications = Applications::new(&unshared)?;
        applications.restore(self.names.iter().map(Vec::as_slice));
        for name in self.config.shares.keys().filter(|n| *n != "default" && *n != "other") {
            applications.register(name)?;
        }
        Ok(applications)
    }
}

/// The version that is written and read: another one's streams are others, and so is what the engine decides. Those that did not say
/// are of version 1.
const VERSION: u32 = 10;

fn version_that_was_not_said() -> u32 {
    1
}

/// What a run was built from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunSetup {
    /// The version of the record: [`RunSetup::VERSION`].
    #[serde(default = "version_that_was_not_said")]
    pub kv: u32,
    /// Larder's version.
    pub larder: String,
    /// UUID of the flash; of the run, without flash.
    pub uuid: String,
    /// The secret with which keys are hashed.
    pub hash_key: [u8; 16],
    /// Mixed into the records' checksums.
    pub salt: u32,
    /// Segments of the flash; 0 without flash.
    pub segments: u16,
    /// Bytes of one.
    pub segment_bytes: u32,
    /// Drives by place, where there are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drives: Vec<DriveSetup>,
    /// What is alike in all shards.
    pub shard: ShardSetup,
    /// What is not.
    pub shards: Vec<ShardSeed>,
    /// Admission.
    pub admission: AdmissionConfig,
    /// Applications.
    pub applications: AppsSetup,
    /// The log; `None` without flash.
    pub log: Option<LogSetup>,
}

/// One of several drives: see [`DriveSegments`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveSetup {
    /// See [`Numbers::small_before`].
    pub small_before: u16,
    /// See [`Numbers::small`].
    pub small: u16,
    /// See [`Numbers::large_before`].
    pub large_before: u16,
    /// Its segments.
    pub segments: u16,
}

impl From<&DriveSegments> for DriveSetup {
    fn from(drive: &DriveSegments) -> DriveSetup {
        let (Numbers { small_before, small, large_before }, segments) =
            (drive.numbers, drive.segments);
        DriveSetup { small_before, small, large_before, segments }
    }
}

impl From<&DriveSetup> for DriveSegments {
    fn from(drive: &DriveSetup) -> DriveSegments {
        let DriveSetup { small_before, small, large_before, segments } = *drive;
        DriveSegments { numbers: Numbers { small_before, small, large_before }, segments }
    }
}

/// Whose a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// That shard's.
    Shard(usize),
    /// The log's.
    Log,
    /// Maintenance's.
    Maintenance,
    /// The names of applications.
    Applications,
}

impl std::fmt::Display for Whose {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Whose::Shard(shard) => write!(f, "shard {shard}"),
            Whose::Log => f.write_str("log"),
            Whose::Maintenance => f.write_str("maintenance"),
            Whose::Applications => f.write_str("applications"),
        }
    }
}

impl RunSetup {
    /// The version that is written and read.
    pub const VERSION: u32 = VERSION;

    /// Fits a model of these samples, as admission says.
    ///
    /// # Errors
    /// [`LearnError`].
    pub fn train(&self, samples: &TrainingSet, seed: u64) -> Result<Model, LearnError> {
        learn::train(samples, &self.admission.flashiness.training, seed)
    }

    /// How many streams a record has.
    pub fn streams(&self) -> usize {
        self.shards.len() + usize::from(self.log.is_some()) + 2
    }

    /// Whose this stream is; `None` if there is none of this number.
    pub fn whose(&self, stream: usize) -> Option<Whose> {
        let all = (0..self.shards.len()).map(Whose::Shard);
        let log = self.log.as_ref().map(|_| Whose::Log);
        all.chain(log).chain([Whose::Maintenance, Whose::Applications]).nth(stream)
    }

    /// The stream of maintenance. That of the names of applications follows it.
    pub fn maintenance_stream(&self) -> usize {
        self.streams() - 2
    }

    /// The flash.
    pub fn flash(&self) -> FlashGeometry {
        let (salt, segments, segment_bytes) = (self.salt, self.segments, self.segment_bytes);
        if self.drives.is_empty() {
            return FlashGeometry { salt, segments, segment_bytes, drives: Drives::ONE };
        }
        let drives: Vec<_> = self.drives.iter().map(DriveSegments::from).collect();
        FlashGeometry::of_drives(salt, segment_bytes, segments, &drives)
    }

    /// Hashes keys as the run did.
    pub fn hasher(&self) -> KeyHasher {
        KeyHasher::new(HashKey(self.hash_key))
    }

    /// Bytes of memory that shards and log take, about.
    pub fn memory_bytes(&self) -> u64 {
        let s = &self.shard;
        let words = FlashIndex::words_for(s.buckets) as u64 * 8;
        // A tenth of an arena is its table, at most.
        let one = [s.arena_bytes, s.arena_bytes / 10, words, s.admission_memory]
            .iter()
            .chain(&[s.access_times.saturating_mul(8)])
            .fold(0u64, |sum, &n| sum.saturating_add(n));
        one.saturating_mul(self.shards.len() as u64)
            .saturating_add(3 * u64::from(self.segment_bytes))
    }

    /// Whether a run can have been built from this.
    ///
    /// # Errors
    /// The first number that none has.
    pub fn validate(&self) -> Result<(), SetupError> {
        let check = |ok: bool, what, value: u64, must| {
            if ok { Ok(()) } else { Err(SetupError::Value { what, value, must }) }
        };
        if self.kv != VERSION {
            return Err(SetupError::Version(self.kv));
        }
        let (s, n) = (&self.shard, self.shards.len());
        let sound = n.is_power_of_two() && n <= 256;
        check(sound, "the number of shards", n as u64, "a power of two, at most 256")?;
        let arena = s.arena_bytes;
        let sound = (4096..=16 << 30).contains(&arena);
        check(sound, "arena_bytes", arena, "between 4 KiB and 16 GiB")?;
        for (what, room) in [("free_low", s.free_low), ("free_high", s.free_high)] {
            check(room <= arena, what, room, "at most arena_bytes")?;
        }
        let largest = u64::from(s.max_object);
        check((128..=129 << 20).contains(&largest), "max_object", largest, "128 to 129 MiB")?;
        let clock = u64::from(s.clock_max);
        check((1..=3).contains(&clock), "clock_max", clock, "1 to 3")?;
        check(s.buckets >= 1, "buckets", u64::from(s.buckets), "at least 1")?;
        let most = u64::from(FlashIndex::most_buckets(s.buckets));
        let sound = u64::from(s.index_most) <= most;
        check(sound, "index_most", u64::from(s.index_most), "at most eight times buckets")?;
        check(s.access_times <= 1 << 32, "access_times", s.access_times, "at most 2^32")?;
        check(
            self.segments <= MAX_SEGMENTS,
            "segments",
            u64::from(self.segments),
            "at most 65520",
        )?;
        let bytes = u64::from(self.segment_bytes);
        let sound = bytes >= 4096 && bytes.is_multiple_of(4096) && bytes <= MAX_SEGMENT_BYTES;
        check(sound, "segment_bytes", bytes, "a multiple of 4096 up to 256 MiB")?;
        let drives = self.drives.len() as u64;
        check(drives <= MOST_DRIVES as u64, "drives", drives, "at most 16")?;
        let apart = self.drives.iter().enumerate().all(|(i, a)| {
            let a = DriveSegments::from(a);
            let others = self.drives[i + 1..].iter().map(DriveSegments::from);
            others.into_iter().all(|b| !a.numbers.overlap(a.segments, &b.numbers, b.segments))
        });
        check(apart, "drives", drives, "drives whose segments have numbers of their own")?;
        let can_be = |d: &DriveSetup| {
            let drive = DriveSegments::from(d);
            d.segments == 0 || drive.numbers.can_be(d.segments, self.segments)
        };
        let sound = self.drives.iter().all(can_be);
        check(sound, "segments", u64::from(self.segments), "at least the number of each segment")?;
        let has_log = self.log.is_some();
        check(
            has_log == (self.segments > 0),
            "segments",
            u64::from(self.segments),
            "0 without a log",
        )?;
        if let Some(log) = &self.log {
            let (hot, back) = (u64::from(log.hot_percent), u64::from(log.reinsert_percent));
            check(hot <= 100, "hot_percent", hot, "at most 100")?;
            check(back <= 100, "reinsert_percent", back, "at most 100")?;
            let floor = log.generation_floor;
            check(floor < 1 << 55, "generation_floor", floor, "below 2^55")?;
        }
        Ok(())
    }

    /// What shard `i` is built from.
    ///
    /// # Errors
    /// Shares that cannot be.
    ///
    /// # Panics
    /// If there is no shard `i`.
    pub fn shard_config(&self, i: usize) -> Result<ShardConfig, SetupError> {
        let s = &self.shard;
        let shares = self.applications.applications()?.shares(&self.applications.config)?;
        Ok(ShardConfig {
            arena_bytes: s.arena_bytes as usize,
            index_buckets: s.buckets,
            index_most: s.index_most,
            max_object: s.max_object,
            no_eviction: s.no_eviction,
            clock_mode: if s.clock_increment { ClockMode::Increment } else { ClockMode::SetMax },
            clock_max: s.clock_max,
            free_low: s.free_low as usize,
            free_high: s.free_high as usize,
            flash: self.flash(),
            shards: self.shards.len() as u32,
            flash_min_record: s.flash_min_record,
            cas_base: self.shards[i].cas_base,
            access_times: s.access_times as usize,
            shares: Arc::new(shares),
            hasher: self.hasher(),
        })
    }

    /// Admission of shard `i`.
    ///
    /// # Errors
    /// A parameter out of range.
    ///
    /// # Panics
    /// If there is no shard `i`.
    pub fn admission(&self, i: usize) -> Result<Admission, SetupError> {
        let s = &self.shard;
        let setup = Setup {
            memory: s.admission_memory as usize,
            seed: self.shards[i].seed,
            dram: s.arena_bytes,
            flash: (f64::from_bits(s.share_bits) * self.flash().capacity() as f64) as u64,
            objects: s.objects,
            share: f64::from_bits(s.share_bits),
            budget_rate: s.budget_rate_bits.map(f64::from_bits),
        };
        Ok(Admission::new(&self.admission, &setup)?)
    }

    /// Shard `i`, empty.
    ///
    /// # Errors
    /// Parameters that cannot work.
    ///
    /// # Panics
    /// If there is no shard `i`.
    pub fn build_shard(&self, i: usize) -> Result<KvShard, SetupError> {
        self.shard_over(i, Arena::new(self.shard.arena_bytes as usize))
    }

    /// Shard `i`, empty, over `memory`. Where that is sparing, tables beside it take memory as they are filled.
    ///
    /// # Errors
    /// Parameters that cannot work.
    ///
    /// # Panics
    /// If there is no shard `i`.
    pub fn shard_over<M: ObjectMemory>(
        &self,
        i: usize,
        memory: M,
    ) -> Result<KvShard<M>, SetupError> {
        let mut admission = self.admission(i)?;
        let (buckets, most) = (self.shard.buckets, self.shard.index_most.max(self.shard.buckets));
        let words = FlashIndex::words_for(most);
        let words = if M::SPARING {
            admission.grow_as_filled();
            // Of what it has at first.
            let share = u64::from(buckets) as f64 / f64::from(most);
            Words::growing(words, (INDEX_WHOLE_FROM as f64 * share).ceil() as usize)
        } else {
            Words::heap(words)
        };
        Ok(KvShard::with_memory(self.shard_config(i)?, admission, words, memory)?)
    }

    /// Shard `i` over the words of its index: attached to what is in them where `generations` are given
    /// ([`SegmentTable::live_generations`]), else empty. Says what of the index was kept.
    ///
    /// # Errors
    /// Parameters that cannot work; words that hold no index of this layout.
    ///
    /// # Panics
    /// If there is no shard `i`.
    pub fn shard_in(
        &self,
        i: usize,
        words: Words,
        generations: Option<&[u64]>,
    ) -> Result<(KvShard, Attached), SetupError> {
        let (config, admission) = (self.shard_config(i)?, self.admission(i)?);
        Ok(match generations {
            None => (KvShard::new(config, admission, words)?, Attached::default()),
            Some(generations) => KvShard::attach(config, admission, words, generations)?,
        })
    }

    /// What the log of the drive at a place goes by; `None` without one.
    pub fn log_config(&self, drive: usize) -> Option<LogConfig> {
        let (log, (flash, part)) = (self.log.as_ref()?, self.flash().part(drive)?);
        Some(LogConfig {
            flash,
            part,
            largest: u64::from(self.shard.max_object).min(self.flash().longest_record()),
            hot_percent: log.hot_percent,
            reinsert_percent: log.reinsert_percent,
            retry_after: Nanos(log.retry_after),
        })
    }

    /// The log, empty; `None` without flash.
    ///
    /// # Errors
    /// A budget that cannot work.
    pub fn build_log(&self) -> Result<Option<FlashLog<Vec<u8>>>, SetupError> {
        let Some(log) = &self.log else { return Ok(None) };
        let mut table = SegmentTable::create(Words::heap(SegmentTable::words_for(self.segments)));
        table.raise_generation(log.generation_floor);
        self.log_over(table, vec![vec![0; self.segment_bytes as usize]; 3])
    }

    /// The log over `table`, with these three buffers of a segment each; `None` without flash.
    ///
    /// # Errors
    /// A budget that cannot work.
    pub fn log_over<B: AsRef<[u8]> + AsMut<[u8]>>(
        &self,
        table: SegmentTable,
        buffers: Vec<B>,
    ) -> Result<Option<FlashLog<B>>, SetupError> {
        let state = self.log.as_ref().and_then(|log| log.budget_state);
        self.log_of(0, table, state, buffers)
    }

    /// The log of the drive at a place, whose budget remembers `state`; `None` without one.
    ///
    /// # Errors
    /// A budget that cannot work.
    pub fn log_of<B: AsRef<[u8]> + AsMut<[u8]>>(
        &self,
        drive: usize,
        table: SegmentTable,
        state: Option<BudgetState>,
        buffers: Vec<B>,
    ) -> Result<Option<FlashLog<B>>, SetupError> {
        let (Some(log), Some(config)) = (&self.log, self.log_config(drive)) else {
            return Ok(None);
        };
        let capacity = ByteSize(config.flash.capacity());
        let budget = WriteBudget::new(&log.budget, capacity, state, Nanos(log.budget_at))?;
        Ok(Some(FlashLog::new(config, table, budget, buffers)))
    }
}
