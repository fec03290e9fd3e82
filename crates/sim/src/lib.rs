//! Trace-driven simulation of the stack: policies, engines, flash device.
//!
//! - [`mrc`]: miss ratios of eviction policies over many cache sizes in one decode of a trace.

pub mod mrc;
