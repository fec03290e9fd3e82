//! Decisions of the block cache: which lines deserve flash, which leave it, and what is a file system's metadata.
//!
//! | | |
//! | --- | --- |
//! | [`BlockAdmission`] | `all`, `seqr`, `sseqr`, `touch_count`, `two_lbs`, `expected_reads` and chains of them |
//! | [`SlotPolicy`] | which of a group's lines goes: LRU, CLOCK, SIEVE, S3-FIFO in at most 8 bits a slot |
//! | [`SegmentPicker`], [`Survivors`] | which segment of a log is reclaimed, and what is kept of it |
//! | [`detect::Detector`] | which blocks are a file system's metadata, from what passes by |
//! | [`Selection`] | what is cached always, never, or as admission decides |

mod access;
mod admission;
pub mod detect;
mod reclaim;
mod selection;
mod slots;

pub use access::{
    BlockAccess, BlockCandidate, BlockKind, BlockOp, Hints, LineId, Observed, Reason, Verdict,
    VerdictCounts, Victim, VolumeId,
};
pub use admission::{
    BLOCK_ADMISSION_DEFAULT, BLOCK_POLICY_NAMES, BlockAdmission, BlockAdmissionConfig,
    BlockAdmissionError, BlockSetup, ExpectedReadsConfig, Rotation, SequentialConfig, StageConfig,
    TouchCountConfig, TwoLevelConfig, TwoLevelWrites,
};
pub use reclaim::{EvictionBy, SegmentPicker, Survivors, VictimPolicy};
pub use selection::{Rule, Selected, Selection, SelectionError};
pub use slots::{Ghosts, MOST_WAYS, Replacement, SlotBits, SlotPolicy};
