//! Cache engines as state machines: no clock, no thread, no I/O.

#![forbid(unsafe_code)]

pub mod block;
pub mod dram;
pub mod index;
pub mod kv;
mod record;
pub mod segment;
