//! Admission: whether an object goes to flash.
//!
//! One [`Admission`] per shard. The engine tells it what happens ([`AdmissionPolicy::on_write`] and its like) and asks it
//! about objects that could move to flash ([`AdmissionPolicy::judge`]). Whatever it says, the write budget, the
//! application's share and the room on flash have the last word, and they are the engine's.

mod config;
mod cut;
mod expected;
mod flashiness;
mod ghost;
mod memory;
mod miniature;
mod policy;
mod price;
mod recent;
mod reject_first;
mod simple;
mod write_rate;

pub use crate::learn::Features;
pub use config::{
    AdmissionConfig, AdmissionError, ExpectedReadsConfig, FlashinessConfig, GhostConfig,
    HistoryKind, Objective, POLICY_NAMES, PolicyName, ProbabilityConfig, RejectFirstConfig,
    SampleAt, Setup, WriteRateConfig,
};
pub use expected::ExpectedReads;
pub use flashiness::Flashiness;
pub use ghost::Ghost;
pub use miniature::{Tuned, Tuning};
pub use policy::{Admission, AdmissionPolicy, AppReport, ModelReport};
pub use reject_first::RejectFirst;
pub use simple::{All, Probability};
pub use write_rate::WriteRate;

use larder_base::{AppId, Nanos, ObjectHash};
use serde::{Deserialize, Serialize};

/// An object about which admission must decide.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Which object.
    pub hash: ObjectHash,
    /// Whose.
    pub app: AppId,
    /// What is known of it.
    pub features: Features,
    /// It comes back from a reclaimed segment, where it was read.
    pub survivor: bool,
    /// Seconds until it expires; `u32::MAX` for never.
    pub ttl: u32,
}

/// Why an object is not written to flash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Never read since it was written.
    Unread,
    /// The classifier expects too few reads.
    NotFlashy,
    /// First seen recently; the next time counts.
    FirstSeen,
    /// The random draw fell against it.
    Chance,
    /// The write budget is spent.
    Budget,
    /// It expires before it could pay.
    ShortTtl,
    /// Its application is at its ceiling.
    AppCeiling,
    /// Too large or too small for flash.
    Size,
}

impl Reason {
    /// Every reason, in the order of their declaration.
    pub const ALL: [Reason; 8] = [
        Reason::Unread,
        Reason::NotFlashy,
        Reason::FirstSeen,
        Reason::Chance,
        Reason::Budget,
        Reason::ShortTtl,
        Reason::AppCeiling,
        Reason::Size,
    ];

    /// The reason as statistics name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Unread => "unread",
            Reason::NotFlashy => "not_flashy",
            Reason::FirstSeen => "first_seen",
            Reason::Chance => "chance",
            Reason::Budget => "budget",
            Reason::ShortTtl => "short_ttl",
            Reason::AppCeiling => "app_ceiling",
            Reason::Size => "size",
        }
    }
}

/// What admission says of a candidate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Verdict {
    /// Write it; higher scores first.
    Admit {
        /// Rank among the admitted: higher goes first.
        score: f32,
    },
    /// Do not.
    Reject(Reason),
}

/// Which objects the cleaner offers to a policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    /// Only those that CLOCK is about to evict from DRAM (every policy but `flashiness_paper`).
    Victims,
    /// Any object in DRAM, best score first (`flashiness_paper`: movement and eviction are decoupled, Flashield §4).
    Everything,
}

/// How an object left DRAM, or changed there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// CLOCK took it and it was not written to flash.
    Evicted,
    /// It went to flash.
    Moved,
    /// A newer version replaced it.
    Updated,
    /// Deleted, flushed or expired.
    Removed,
}

/// One access, as admission sees it.
#[derive(Clone, Copy, Debug)]
pub struct Access {
    /// Which object.
    pub hash: ObjectHash,
    /// Whose.
    pub app: AppId,
    /// When.
    pub at: Nanos,
    /// Bytes it takes on flash.
    pub size: u32,
}

#[cfg(test)]
mod tests;
