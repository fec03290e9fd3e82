//! Pure decisions of the flash cache: admission, eviction, learning, write budget.
//!
//! Nothing here touches objects, devices or clocks. The servers and the simulator run this same code.

#![forbid(unsafe_code)]

pub mod admission;
pub mod application;
pub mod block;
pub mod budget;
pub mod eviction;
mod follow;
pub mod learn;
mod means;
mod packed;
