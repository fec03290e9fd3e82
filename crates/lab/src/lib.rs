//! Measurements of parts of the engine, on their own, in steady state. `larder bench` and `larder sim` print them; no server and
//! no library links them.
//!
//! - [`index`]: what the flash index costs and how well it answers.
//! - [`packing`]: how much of a segment becomes records.

#![forbid(unsafe_code)]

pub mod index;
pub mod packing;
