//! What a simulated cache is given: sizes, and what a start draws.

use larder_base::{ByteSize, Nanos};
use larder_engine::kv::node::defaults::{self, SizeError};
use larder_engine::kv::node::start::cas_bits;
use larder_engine::kv::node::{AdmissionNeed, LogStart, Plan, Study};
use larder_engine::kv::record::RunSetup;
use larder_engine::kv::{Drives, FlashGeometry};
use larder_policy::admission::AdmissionConfig;

use super::cache::CacheError;

/// DRAM and flash of a [`HybridCache`](super::HybridCache). Sizes are bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Sizes {
    /// As a server has them: all of its memory is divided, as `-m` is.
    Server(Server),
    /// A server's, of which a cache for this share of the objects is simulated.
    Sample(Server, f64),
    /// As a study fixes them: DRAM is for objects alone.
    Study(Study),
}

/// Sizes of a server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Server {
    /// DRAM with everything in it, as `-m`: objects, index, admission, buffers and tables.
    pub memory: u64,
    /// Flash, as `--flash-size`; 0 for none.
    pub flash: u64,
    /// Mean bytes of an object on flash, as `--flash-object-size`.
    pub object: u32,
    /// Largest object, as `-I`; values of more than [`MAX_VALUE`](super::MAX_VALUE) are cut.
    pub max_item: u32,
}

impl Server {
    /// The division, as a server that is started with these sizes makes it.
    ///
    /// # Errors
    /// Sizes that a server refuses.
    pub fn divide(
        &self,
        admission: &AdmissionConfig,
        salt: u32,
    ) -> Result<(Plan, FlashGeometry), CacheError> {
        let &Server { memory, flash, object, max_item } = self;
        let (object, item) = (u64::from(object), u64::from(max_item));
        let wrong = |what, value, source| CacheError::Size { what, value: ByteSize(value), source };
        defaults::check_memory(memory, item).map_err(|e| match e {
            SizeError::LittleMemory => wrong("memory", memory, e),
            _ => wrong("max_item", item, e),
        })?;
        let need = AdmissionNeed::of(admission);
        if flash == 0 {
            let plan = Plan::new(memory, item, None, need)?;
            return Ok((plan, FlashGeometry { salt, ..FlashGeometry::NONE }));
        }
        defaults::check_object_size(object).map_err(|e| wrong("object", object, e))?;
        defaults::check_flash(flash, memory, object).map_err(|e| wrong("flash", flash, e))?;
        let geometry = Plan::geometry(memory, flash, item)?;
        let plan = Plan::new(memory, item, Some((&geometry, self.object)), need)?;
        let (segments, segment_bytes) = (geometry.segments(), geometry.segment_bytes());
        Ok((plan, FlashGeometry { salt, segments, segment_bytes, drives: Drives::ONE }))
    }
}

impl Sizes {
    pub(crate) fn divide(
        &self,
        admission: &AdmissionConfig,
        salt: u32,
    ) -> Result<(Plan, FlashGeometry), CacheError> {
        match self {
            Sizes::Server(server) => server.divide(admission, salt),
            Sizes::Sample(server, share) => {
                let (plan, flash) = server.divide(admission, salt)?;
                Ok(plan.sampled(flash, *share))
            }
            Sizes::Study(study) => Ok(study.divide(AdmissionNeed::of(admission), salt)?),
        }
    }

    pub(super) fn max_item(&self) -> u32 {
        match self {
            Sizes::Server(server) | Sizes::Sample(server, _) => server.max_item,
            Sizes::Study(study) => study.max_item as u32,
        }
    }
}

/// What a start draws by chance or is told, beside its configuration.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// Larder's version.
    pub larder: String,
    /// UUID of the flash.
    pub uuid: String,
    /// The secret with which keys are hashed.
    pub hash_key: [u8; 16],
    /// Mixed into the records' checksums.
    pub salt: u32,
    /// The first CAS unique.
    pub cas_base: u64,
    /// How many each shard counts from there, as a power of two.
    pub cas_bits: u32,
    /// Seed of admission's draws.
    pub seed: u64,
    /// Seed of training.
    pub training_seed: u64,
    /// Where the log begins.
    pub log: LogStart,
}

impl Drawn {
    /// All of it from one seed.
    pub fn from_seed(seed: u64) -> Drawn {
        Drawn {
            larder: String::new(),
            uuid: String::new(),
            hash_key: hash_key(seed),
            salt: seed as u32,
            cas_base: 0,
            // What a compact header has room for.
            cas_bits: 32,
            seed: seed.wrapping_mul(31),
            training_seed: seed,
            log: LogStart::default(),
        }
    }

    /// What the run of a server has drawn.
    pub fn by(run: &RunSetup) -> Drawn {
        let (first, log) = (&run.shards[0], run.log.as_ref());
        Drawn {
            larder: run.larder.clone(),
            uuid: run.uuid.clone(),
            hash_key: run.hash_key,
            salt: run.salt,
            cas_base: first.cas_base,
            cas_bits: cas_bits(run.shards.len()),
            seed: first.seed,
            training_seed: first.cas_base,
            log: log.map_or_else(LogStart::default, |log| LogStart {
                generation_floor: log.generation_floor,
                budget_state: log.budget_state,
                budget_at: Nanos(log.budget_at),
            }),
        }
    }
}

/// The secret with which keys are hashed.
pub fn hash_key(seed: u64) -> [u8; 16] {
    let mut key = [0; 16];
    larder_base::Rng::new(seed).fill(&mut key);
    key
}
