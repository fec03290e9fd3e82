//! How a [`Cache`] is opened.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use larder_base::ByteSize;
use larder_engine::kv::node::AdmissionNeed;
use larder_engine::kv::node::defaults::{self, SizeError};
use larder_policy::admission::{AdmissionConfig, AdmissionError};
use larder_policy::budget::WriteBudgetConfig;
use larder_runtime::{Clock, RingOptions};

use super::cache::{Cache, Opening};
use super::{CacheConfig, CacheError, open, open_without_threads, ring_for};

/// The file that is the flash, in the directory that [`Builder::flash`] names.
const FLASH_FILE: &str = "flash";
/// Most reading threads.
const MOST_THREADS: usize = 64;

/// What a [`Cache`] is opened with; [`Cache::builder`] begins one.
#[derive(Clone, Debug)]
pub struct Builder {
    memory: Option<ByteSize>,
    directory: Option<PathBuf>,
    flash: Option<ByteSize>,
    object_size: Option<u32>,
    max_object: u32,
    admission: Result<AdmissionConfig, AdmissionError>,
    budget: WriteBudgetConfig,
    threads: Option<usize>,
    ring: RingOptions,
}

impl Default for Builder {
    fn default() -> Builder {
        Builder {
            memory: None,
            directory: None,
            flash: None,
            object_size: None,
            max_object: defaults::MAX_ITEM,
            admission: Ok(AdmissionConfig::default()),
            budget: WriteBudgetConfig::default(),
            threads: None,
            ring: RingOptions::default(),
        }
    }
}

impl Builder {
    /// DRAM for objects, index, admission and buffers together; 1 MiB at least. Without it, an eighth of the machine's memory, between 64 MiB and
    /// 8 GiB.
    #[must_use]
    pub fn memory(mut self, bytes: ByteSize) -> Builder {
        self.memory = Some(bytes);
        self
    }

    /// Flash: a file of `bytes` in `directory`, which is made if it is not there and belongs to this cache alone. It also holds what makes the
    /// next start warm. 16 MiB at least. Without flash nothing outlives the process.
    #[must_use]
    pub fn flash(mut self, directory: impl Into<PathBuf>, bytes: ByteSize) -> Builder {
        self.directory = Some(directory.into());
        self.flash = Some(bytes);
        self
    }

    /// The mean size of an object on flash, bytes: the index is divided for it (4 bytes of DRAM an object, 6 where admission weighs
    /// reads against sizes), which follows the objects that come. 280 by default, or, if that index does not fit the memory, the least that does.
    #[must_use]
    pub fn object_size(mut self, bytes: u32) -> Builder {
        self.object_size = Some(bytes);
        self
    }

    /// The largest object, key and value together, bytes; 1 MiB by default, at most half of the memory.
    #[must_use]
    pub fn max_object(mut self, bytes: u32) -> Builder {
        self.max_object = bytes;
        self
    }

    /// Which objects are worth a write to flash: `flashiness`, `flashiness_paper`, `expected_reads`, `ghost`, `reject_first`,
    /// `probability`, `write_rate` or `all`. [`Builder::open`] refuses any other.
    #[must_use]
    pub fn admission(mut self, policy: &str) -> Builder {
        self.admission = AdmissionConfig::from_name(policy);
        self
    }

    /// The drive bears `tbw` bytes of writes and is to last `years`: writes keep to that rate.
    #[must_use]
    pub fn endurance(mut self, tbw: ByteSize, years: f64) -> Builder {
        self.budget = WriteBudgetConfig { tbw: Some(tbw), years, ..self.budget };
        self
    }

    /// Threads that read flash for [`Cache::get`] and its kin, at most 64; as many as processors, at most 4, by default. None are started
    /// without flash. With 0 the cache has no threads at all: who calls it reads, and the program calls [`Cache::turn`].
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Builder {
        self.threads = Some(threads);
        self
    }

    /// Opens the cache: warm if it was there, after a clean stop or a kill.
    ///
    /// # Errors
    /// What cannot be opened, or what does not fit: nothing has been overwritten then.
    pub fn open(self) -> Result<Cache, CacheError> {
        let processors = larder_runtime::machine::processors();
        let threads = self.threads.unwrap_or(processors.min(4)).min(MOST_THREADS);
        let memory = self.memory.map_or_else(
            || defaults::memory(larder_runtime::machine::usable_memory().unwrap_or(0)),
            |bytes| bytes.0,
        );
        let admission = self.admission.map_err(CacheError::Admission)?;
        let object_size = match (self.object_size, &self.flash) {
            (Some(bytes), _) => bytes,
            (None, Some(flash)) => {
                defaults::object_size(flash.0, memory, AdmissionNeed::of(&admission)) as u32
            }
            (None, None) => defaults::OBJECT_SIZE,
        };
        let config = CacheConfig {
            memory,
            max_item: self.max_object,
            no_eviction: false,
            clock_max: defaults::CLOCK_MAX,
            clock_mode: defaults::CLOCK_MODE,
            data_dir: self.directory.clone().unwrap_or_default(),
            flash: self.directory.map(|directory| directory.join(FLASH_FILE)),
            flash_size: self.flash.map(|bytes| bytes.0),
            further: Vec::new(),
            flash_object_size: object_size,
            format_flash: false,
            admission,
            budget: self.budget,
            applications: Default::default(),
            memory_file: None,
            record: None,
            capture: None,
            hurry: Default::default(),
        };
        let wrong = |what, bytes, source| CacheError::Size { what, size: ByteSize(bytes), source };
        let (item, object) = (u64::from(config.max_item), u64::from(config.flash_object_size));
        defaults::check_memory(memory, item).map_err(|e| match e {
            SizeError::LittleMemory => wrong("memory", memory, e),
            _ => wrong("largest object", item, e),
        })?;
        defaults::check_object_size(object)
            .map_err(|e| wrong("mean object on flash", object, e))?;
        if let Some(flash) = config.flash_size {
            defaults::check_flash(flash, memory, object).map_err(|e| wrong("flash", flash, e))?;
        }
        let clock = Arc::new(Clock::start());
        let (core, opened, upkeep) = if threads == 0 {
            let (core, opened, upkeep) = open_without_threads(&config, &clock)?;
            (core, opened, Some(upkeep))
        } else {
            let (core, opened) = open(&config, &clock)?;
            (core, opened, None)
        };
        let ring = ring_for(self.max_object, self.ring);
        Cache::over(Opening { core, clock, opened, upkeep, threads, ring })
    }
}

/// The lifetime of an object, to the second that is no earlier.
pub(super) fn seconds(ttl: Duration) -> u32 {
    let whole = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
    u32::try_from(whole).unwrap_or(u32::MAX)
}
