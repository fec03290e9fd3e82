//! Statistics: what is counted, and how `stats` shows it.

mod latency;
mod prefix;
pub(crate) mod render;

pub use latency::{Latency, Percentiles};
pub use prefix::PrefixStats;

pub use larder_cache::kv::{AppStats, CacheStats, FlashStats};
