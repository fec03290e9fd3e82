//! Statistics: what is counted.

mod latency;
mod prefix;

pub use latency::{Latency, Percentiles};
pub use prefix::PrefixStats;

pub use larder_cache::kv::{AppStats, CacheStats, FlashStats};
