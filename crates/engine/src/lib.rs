//! Cache engines as state machines: no clock, no thread, no I/O.

pub mod kv;
pub mod segment;
