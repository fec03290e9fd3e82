//! Other flash caches, as models to measure against.
//!
//! | model | source |
//! | --- | --- |
//! | [`VictimCache`], [`Ripq`] | utah-scs/lsm-sim, the simulator of the Flashield authors' group, with whose counts they agree |
//! | [`SetAssociative`] | CacheLib's small-object cache, BigHash (Berg et al., OSDI '20, §4.3, and its documentation) |
//! | [`FifoLog`] | Navy's block cache (the same), and S3-FIFO before a FIFO flash (Yang et al., SOSP '23, §5.4) |
//! | [`FlashieldPaper`] | Flashield's flash as a cache: the paper's table and filters before its segments (§3.2, §4.1) |
//! | [`paper_index`] | Flashield's flash index and placement as the paper has them (§3.2, §4.1, §5.3) |
//!
//! In all of them every miss brings the object in, and cache-level write amplification is flash bytes written over bytes
//! missed.

mod flashield;
mod hybrid;
mod log;
pub mod paper_index;
mod ripq;
mod sets;
mod victim;

use larder_policy::admission::{AdmissionConfig, AdmissionError};
use serde::Serialize;

use crate::device::DeviceOp;

pub use flashield::{FlashieldPaper, PaperParams};
pub use hybrid::HybridConfig;
pub use log::{FifoLog, LogParams};
pub use ripq::Ripq;
pub(crate) use sets::BUCKET_BYTES;
pub use sets::{SetAssociative, SetParams};
pub use victim::VictimCache;

/// Why a baseline cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum BaselineError {
    /// A size that cannot work.
    #[error("{what} is {value}: it must be {must}")]
    Size {
        /// Which.
        what: &'static str,
        /// As given.
        value: u64,
        /// What it must be.
        must: String,
    },
    /// An admission filter that cannot be set up.
    #[error(transparent)]
    Admission(#[from] AdmissionError),
    /// An admission filter that these caches do not take.
    #[error(
        "admission '{0}': choose from all, reject_first, ghost, probability:P (0 to 1); the others judge by times \
         and features that only the whole engine keeps"
    )]
    UnknownAdmission(String),
}

/// The admission filter that `text` names: `all`, `reject_first`, `ghost`, or `probability:P`.
///
/// # Errors
/// [`BaselineError::UnknownAdmission`].
pub fn admission(text: &str) -> Result<AdmissionConfig, BaselineError> {
    let unknown = || BaselineError::UnknownAdmission(text.to_owned());
    if let Some(p) = text.strip_prefix("probability:") {
        let p: f64 = p.parse().map_err(|_| unknown())?;
        if !(0.0..=1.0).contains(&p) {
            return Err(unknown());
        }
        let mut config = AdmissionConfig::from_name("probability")?;
        config.probability.probability = p;
        return Ok(config);
    }
    match text {
        "all" | "reject_first" | "ghost" => Ok(AdmissionConfig::from_name(text)?),
        _ => Err(unknown()),
    }
}

/// Counts of a baseline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Requests.
    pub requests: u64,
    /// Requests for an object that was there with the same size.
    pub hits: u64,
    /// Of these, hits served from DRAM.
    pub hits_dram: u64,
    /// Bytes of the requests that missed: what the application writes to the cache.
    pub miss_bytes: u64,
    /// Bytes written to flash.
    pub flash_bytes: u64,
    /// Writes to flash: objects (the victim cache), blocks (RIPQ), buckets (set-associative), regions (the log).
    pub flash_writes: u64,
    /// Objects that the cache could not take, larger than a block, a bucket or DRAM.
    pub refused: u64,
    /// Objects that the admission filter kept from flash.
    pub rejected: u64,
    /// Reads of flash by look-ups, where the model has them (set-associative, log): hits, and those in vain.
    pub flash_reads: u64,
    /// Of these, reads that did not find the object: a Bloom filter was wrong.
    pub false_reads: u64,
}

/// DRAM that names what is on flash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct IndexSize {
    /// Bytes of the index, Bloom filters included.
    pub bytes: u64,
    /// Objects on flash.
    pub objects: u64,
}

impl IndexSize {
    /// Bytes an object; 0 without objects.
    pub fn per_object(&self) -> f64 {
        if self.objects == 0 { 0.0 } else { self.bytes as f64 / self.objects as f64 }
    }
}

impl Counts {
    /// Cache-level write amplification: flash bytes written over bytes missed; 0 before any miss.
    pub fn clwa_of_misses(&self) -> f64 {
        if self.miss_bytes == 0 { 0.0 } else { self.flash_bytes as f64 / self.miss_bytes as f64 }
    }

    /// Hits over requests.
    pub fn hit_ratio(&self) -> f64 {
        if self.requests == 0 { 0.0 } else { self.hits as f64 / self.requests as f64 }
    }
}

/// A cache over objects named by dense tags.
pub trait Baseline {
    /// A request for object `tag` of `size` bytes, which is brought in on a miss. Returns whether it hit. An object of
    /// another size than before is an update, and misses.
    fn request(&mut self, tag: u32, size: u32) -> bool;

    /// The object was deleted.
    fn remove(&mut self, tag: u32);

    /// Counts so far.
    fn counts(&self) -> Counts;

    /// Starts counting anew, as after warming up.
    fn reset_counts(&mut self);

    /// From now on [`Baseline::take_device_ops`] has something to give.
    fn record_device_ops(&mut self);

    /// What was read from and written to which place on flash since the last call, in order, is appended to `out`. A
    /// request waits for the reads that are no background reads.
    fn take_device_ops(&mut self, out: &mut Vec<DeviceOp>);

    /// DRAM of the flash index by now, for models whose source defines one.
    fn index_size(&self) -> Option<IndexSize> {
        None
    }

    /// Bytes of records that were written to flash, where what is written is more than records.
    fn record_bytes(&self) -> Option<u64> {
        None
    }
}

/// A table from dense tags to indices.
#[derive(Debug, Default)]
struct Index(Vec<u32>);

const NONE: u32 = u32::MAX;

impl Index {
    fn get(&self, tag: u32) -> u32 {
        self.0.get(tag as usize).copied().unwrap_or(NONE)
    }

    fn set(&mut self, tag: u32, at: u32) {
        if self.0.len() <= tag as usize {
            self.0.resize(tag as usize + 1, NONE);
        }
        self.0[tag as usize] = at;
    }
}
