//! Larder's caches as a library: [`kv::Cache`], a key-value cache in DRAM and on flash, and [`mod@block`], a cache on flash before block devices.

#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the library stands above the runtime: it reads clocks and starts threads"
)]

pub mod block;
pub mod kv;
mod slot;
