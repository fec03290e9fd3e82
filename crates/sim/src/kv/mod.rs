//! The key-value cache under a virtual clock: the engine of `larder kv`, driven by traces.
//!
//! - [`HybridCache`]: shards and flash log over a device that leaves the bytes of values out.
//! - [`workload`]: the timed workloads on which policies are compared.

mod apps;
mod cache;
mod counters;
mod flash;
mod given;
pub mod workload;

pub(crate) use cache::key_len;
pub use cache::{CacheConfig, CacheError, EPOCH, HybridCache, MAX_VALUE, STUDY_OBJECT, study_of};
pub use counters::Counters;
pub use given::{Drawn, Server, Sizes, hash_key};
