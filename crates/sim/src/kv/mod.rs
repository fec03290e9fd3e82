//! The key-value cache under a virtual clock: the engine of `larder kv`, driven by traces.
//!
//! - [`HybridCache`]: shards and flash log over an in-memory device.
//! - [`workload`]: the timed workloads on which policies are compared.
//! - [`study`]: admission policies at equal flash writes.

mod cache;
pub mod study;
pub mod workload;

pub use cache::{CacheConfig, CacheError, Counters, HybridCache};
