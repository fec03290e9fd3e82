//! Queues and maintenance with the tapes that record them, and as they are called again in a replay. Records of the machines
//! that these call, and what a recording is, are in [`block::record`](crate::block::record).

mod maintenance;
mod queue;

pub use maintenance::{RecordedMaintenance, ReplayedMaintenance};
pub use queue::{RecordedQueue, ReplayedQueue};
