//! Why an experiment cannot be run.

use larder_policy::application::ApplicationError;
use larder_policy::budget::BudgetError;
use larder_trace::TraceError;

use crate::block::BlockError;
use crate::device::drive::DriveError;
use crate::kv::CacheError;
use crate::lab::baseline::BaselineError;
use crate::ssd::GeometryError;

/// Why an experiment cannot be run, or ended early.
#[derive(Debug, thiserror::Error)]
pub enum ExperimentError {
    /// The text is not an experiment.
    #[error("'{file}' line {line}: {message}")]
    Parse {
        /// The file's name as given.
        file: String,
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        message: String,
    },
    /// A key has a value that cannot be meant.
    #[error("{key} is {value}: {must}")]
    Value {
        /// The key, with its table.
        key: String,
        /// Its value.
        value: String,
        /// What it must be.
        must: String,
    },
    /// A figure is expected of a cache whose kind does not have it.
    #[error("{key} names '{figure}', which cache '{cache}' of kind {kind} does not have.{has}")]
    NoFigure {
        /// The table of the key.
        key: String,
        /// The figure.
        figure: String,
        /// The cache's name.
        cache: String,
        /// Its kind.
        kind: &'static str,
        /// Figures that may have been meant, and every figure that it has, in sentences.
        has: String,
    },
    /// A cache cannot be built.
    #[error("cache '{name}': {source}")]
    Cache {
        /// Its name.
        name: String,
        /// Why.
        source: CacheError,
    },
    /// What may be written for a cache cannot be had.
    #[error("cache '{name}': {source}")]
    Budget {
        /// The cache's name.
        name: String,
        /// Why.
        source: BudgetError,
    },
    /// A cache's applications cannot be set up.
    #[error("cache '{name}': {source}")]
    Applications {
        /// The cache's name.
        name: String,
        /// Why.
        source: ApplicationError,
    },
    /// A modelled cache cannot be built.
    #[error("cache '{name}': {source}")]
    Baseline {
        /// Its name.
        name: String,
        /// Why.
        source: BaselineError,
    },
    /// The drive cannot be built.
    #[error("ssd under cache '{name}': {source}")]
    Drive {
        /// The cache's name.
        name: String,
        /// Why.
        source: GeometryError,
    },
    /// The trace cannot be opened or read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The trace ended before anything was counted.
    #[error(
        "workload.warmup is {warmup}: trace '{trace}' has {requests} requests, so that none is left to count"
    )]
    NothingCounted {
        /// The trace.
        trace: String,
        /// The warm-up.
        warmup: u64,
        /// Requests in all.
        requests: u64,
    },
    /// More objects than can be numbered.
    #[error(
        "the trace has more than 2^32 - 1 objects, which the baselines cannot number: set workload.limit"
    )]
    TooManyObjects,
}

impl ExperimentError {
    /// Whether what was asked for cannot be meant, rather than that it went wrong on the way.
    pub fn is_usage(&self) -> bool {
        match self {
            ExperimentError::Trace(e) => matches!(
                e,
                TraceError::Spec { .. }
                    | TraceError::UnknownFormat { .. }
                    | TraceError::Undetected { .. }
                    | TraceError::Open { .. }
            ),
            _ => true,
        }
    }
}

pub(super) fn value(
    key: impl Into<String>,
    value: impl std::fmt::Display,
    must: impl Into<String>,
) -> ExperimentError {
    ExperimentError::Value { key: key.into(), value: value.to_string(), must: must.into() }
}

/// Why the drive under the cache of this name cannot be built.
pub(super) fn drive(cache: &str, error: DriveError) -> ExperimentError {
    match error {
        DriveError::Capacity { capacity, must } => {
            value(format!("ssd.capacity under cache '{cache}'"), capacity, must)
        }
        DriveError::Geometry(source) => ExperimentError::Drive { name: cache.to_owned(), source },
    }
}

/// Why the block cache of this name cannot be built.
pub(super) fn block(cache: &str, error: BlockError) -> ExperimentError {
    match error {
        BlockError::Key { key, value: found, must } => {
            value(format!("cache '{cache}' {key}"), found, must)
        }
        BlockError::Budget(source) => ExperimentError::Budget { name: cache.to_owned(), source },
        BlockError::Drive(error) => drive(cache, error),
    }
}
