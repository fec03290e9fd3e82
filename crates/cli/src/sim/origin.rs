//! Where the figures of an output come from.

use larder_trace::HashOf;
use serde::Serialize;

/// What every output names, so that it can be made again.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Origin {
    /// Of the program.
    version: &'static str,
    seed: u64,
    /// The trace's name.
    trace: String,
    /// Of the requests that were simulated.
    trace_hash: String,
}

/// A row of an output that is a list: its figures, and where they come from.
#[derive(Debug, Serialize)]
pub(super) struct Named<'a, T> {
    #[serde(flatten)]
    figures: &'a T,
    #[serde(flatten)]
    origin: &'a Origin,
}

impl Origin {
    pub(super) fn new(seed: u64, trace: &str, hash: &HashOf) -> Origin {
        let (version, trace) = (env!("CARGO_PKG_VERSION"), trace.to_owned());
        Origin { version, seed, trace, trace_hash: hash.text() }
    }

    pub(super) fn of<'a, T: Serialize>(&'a self, rows: &'a [T]) -> Vec<Named<'a, T>> {
        rows.iter().map(|figures| Named { figures, origin: self }).collect()
    }

    /// The line under a table.
    pub(super) fn line(&self) -> String {
        let Origin { version, seed, trace, trace_hash } = self;
        format!("larder {version}, seed {seed}, trace {trace}, hash {trace_hash}")
    }

    pub(super) fn facts(&self) -> [(&'static str, String); 4] {
        [
            ("version", self.version.to_owned()),
            ("seed", self.seed.to_string()),
            ("trace", self.trace.clone()),
            ("trace hash", self.trace_hash.clone()),
        ]
    }
}
