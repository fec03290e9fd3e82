//! Why a block cache cannot be simulated.

use larder_policy::budget::BudgetError;

use crate::device::drive::DriveError;

/// Why a block cache cannot be built.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BlockError {
    /// A key of the cache has a value that cannot be meant.
    #[error("{key} is {value}: {must}")]
    Key {
        /// The key.
        key: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        must: String,
    },
    /// What may be written cannot be had.
    #[error(transparent)]
    Budget(#[from] BudgetError),
    /// The drive cannot be built.
    #[error(transparent)]
    Drive(#[from] DriveError),
}
