//! Cache engines as state machines: no clock, no thread, no I/O.

pub mod index;
pub mod kv;
pub mod segment;
