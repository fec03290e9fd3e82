//! One key-value cache: what its shards and its log are built from, and what is decided beside them.
//!
//! Whoever runs a cache (the server, the simulator, a replay) builds it from here, so that the same settings make the same cache:
//!
//! - [`defaults`]: sizes where none are given, and which can be given.
//! - [`Plan`]: how the memory is divided.
//! - [`Study`]: the same where a study fixes the DRAM for objects alone.
//! - [`run_setup`]: what shards and log are built from, as [`RunSetup`](super::record::RunSetup) states it.
//! - [`Node`]: the shards behind their locks, and the names of applications; what any thread calls.
//! - [`Maintenance`]: what one thread does beside the requests. It owns the log. A record of what it decides replays alone:
//!   [`ReplayedMaintenance`].
//! - [`DriveUpkeep`]: the same for each further drive, which has a log of its own.
//! - [`start`]: what of the last run can be believed, and in which order starts and stops make things durable.
//! - [`Resizing`]: how shards are taken to another limit while they serve.
//! - [`Training`]: when classifiers are trained, and on what.

pub mod defaults;
mod drive;
mod expiry;
mod maintenance;
#[expect(clippy::module_inception, reason = "a node is made of the machines in this folder")]
mod node;
mod plan;
mod record;
mod region;
mod resizing;
mod schedule;
mod setup;
pub mod start;
mod study;
mod totals;
mod training;
mod turns;

pub use drive::{DriveEffects, DriveUpkeep};
pub use expiry::Crawler;
pub use maintenance::{LogReport, Maintenance, MaintenanceEffects, StateIo};
pub use node::{AtRest, Follow, MemoryError, Node};
pub use plan::{AdmissionNeed, Plan, PlanError};
pub use record::{ReplayedApplications, ReplayedMaintenance};
pub use region::{REGION_HEADER, RegionLayout};
pub use resizing::{Next, Resizing};
pub use schedule::Turn;
pub use setup::{Cache, LogStart, Start, budget_rate, run_setup};
pub use study::{Study, StudyError};
pub use totals::{DriveTotals, LogTotals, Totals, Tunings};
pub use training::{Trained, Training};
