//! The key-value cache under a virtual clock: the engine of `larder kv`, driven by traces.
//!
//! - [`HybridCache`]: shards and flash log over a device that leaves the bytes of values out.
//! - [`workload`]: the timed workloads on which policies are compared.
//! - [`study`]: admission policies at equal flash writes.

mod cache;
mod counters;
mod flash;
mod ripq;
pub mod study;
pub mod workload;

pub use cache::{
    CacheConfig, CacheError, Drawn, EPOCH, HybridCache, MAX_VALUE, STUDY_OBJECT, Server, Sizes,
    hash_key, study_of,
};
pub use counters::Counters;
