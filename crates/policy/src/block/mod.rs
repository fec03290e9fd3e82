//! Decisions of the block cache: which lines deserve flash, which leave it, and what is a file system's metadata.
//!
//! | | |
//! | --- | --- |
//! | [`BlockAdmission`] | `all`, `seqr`, `sseqr`, `touch_count`, `two_lbs` and chains of them |
//! | [`Selection`] | what is cached always, never, or as admission decides |

mod access;
mod admission;
mod selection;

pub use access::{
    BlockAccess, BlockCandidate, BlockKind, BlockOp, LineId, Observed, Reason, Verdict,
    VerdictCounts, Victim, VolumeId,
};
pub use admission::{
    BLOCK_POLICY_NAMES, BlockAdmission, BlockAdmissionConfig, BlockAdmissionError, BlockSetup,
    Rotation, SequentialConfig, StageConfig, TouchCountConfig, TwoLevelConfig, TwoLevelWrites,
};
pub use selection::{Rule, Selected, Selection, SelectionError};
