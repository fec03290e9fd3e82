//! One key-value cache: what its shards and its log are built from, and what is decided beside them.
//!
//! Whoever runs a cache (the server, the simulator, a replay) builds it from here, so that the same settings make the same cache:
//!
//! - [`defaults`]: sizes where none are given, and which can be given.
//! - [`Plan`]: how the memory is divided.
//! - [`Study`]: the same where a study fixes the DRAM for objects alone.
//! - [`run_setup`]: what shards and log are built from, as [`RunSetup`](super::record::RunSetup) states it.
//! - [`Resizing`]: how shards are taken to another limit while they serve.
//! - [`Training`]: when classifiers are trained, and on what.

pub mod defaults;
mod plan;
mod resizing;
mod setup;
mod study;
mod training;

pub use plan::{APP_WORDS, AdmissionNeed, Plan, PlanError, REGION_HEADER, table_words};
pub use resizing::{Next, Resizing};
pub use setup::{Cache, LogStart, Start, run_setup};
pub use study::{Study, StudyError};
pub use training::{Trained, Training};
