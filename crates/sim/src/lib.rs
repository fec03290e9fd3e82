//! Trace-driven simulation of the stack: policies, engines, flash device.
//!
//! - [`advise`]: which DRAM, flash and admission meet a target at least cost.
//! - [`block`]: the engine of `larder block` under a virtual clock.
//! - [`device`]: the drive below a cache and the store behind it.
//! - [`experiment`]: whole-stack experiments from TOML: caches side by side over drives, in virtual time.
//! - [`kv`]: the engine of `larder kv` under a virtual clock.
//! - [`lab`]: what no server runs: other caches to measure against, and studies of one machine by itself.
//! - [`mrc`]: miss ratios of eviction policies over many cache sizes in one decode of a trace.
//! - [`replay`]: what `larder kv --record` wrote, decided again by the same engine.
//! - [`report`]: results as one HTML file with figures.
//! - [`ssd`]: a flash translation layer with garbage collection, wear and timing.
//! - [`stack`]: RAM and flash on a client of a file server, in three architectures.
//! - [`sweep`]: an experiment at many values of its keys, resumable; results as CSV and Parquet.

#![forbid(unsafe_code)]

pub mod advise;
pub mod block;
pub mod device;
pub mod experiment;
pub mod kv;
pub mod lab;
pub mod mrc;
pub mod replay;
pub mod report;
pub mod ssd;
pub mod stack;
pub mod sweep;
