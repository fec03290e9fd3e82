//! Trace-driven simulation of the stack: policies, engines, flash device.
//!
//! - [`baseline`]: a victim cache and RIPQ, to measure against.
//! - [`mrc`]: miss ratios of eviction policies over many cache sizes in one decode of a trace.
//! - [`ssd`]: a flash translation layer with garbage collection, wear and timing.

pub mod baseline;
pub mod mrc;
pub mod ssd;
