//! What the write budget must remember over restarts, in a file of the state directory.
//!
//! Only one party has it: who starts the cache, and then the thread of maintenance. So it is written under no lock, and no queue waits
//! for it: one that may write no more asks that thread, and goes on when the file says more
//! ([`Limits::pay`]).

use std::path::PathBuf;

use larder_base::Nanos;
use larder_engine::block::node::charged::{self, Charges};
use larder_engine::block::node::limits::Limits;
use larder_format::block::BlockSuperblock;
use larder_policy::budget::BudgetState;

use super::open::CacheConfig;

/// See the [module](self).
pub(super) struct BudgetFile {
    path: PathBuf,
}

impl BudgetFile {
    /// That of the cache of this superblock.
    pub(super) fn new(config: &CacheConfig, superblock: &BlockSuperblock) -> BudgetFile {
        BudgetFile { path: config.state_dir.join(format!("block-budget-{}.json", superblock.uuid)) }
    }

    /// What an earlier run has left, if there is anything that makes sense.
    pub(super) fn read(&self) -> Option<BudgetState> {
        std::fs::read(&self.path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok())
    }

    /// It says this from now on. If it cannot be written, that is said; returns false.
    fn write(&self, state: &BudgetState) -> bool {
        let saved = serde_json::to_vec(state).map_err(std::io::Error::other).and_then(|bytes| {
            // A state directory that was moved away is not made anew in the place that it is to come back to.
            match self.path.parent() {
                Some(dir) if !dir.is_dir() => Err(std::io::ErrorKind::NotFound.into()),
                _ => super::store_file(&self.path, &bytes),
            }
        });
        if let Err(error) = &saved {
            tracing::warn!(
                %error,
                "'{}' cannot be written: the cache goes on, and a start after a kill knows less of what was written to it, and \
                 allows more. Make room in the state directory",
                self.path.display()
            );
        }
        saved.is_ok()
    }
}

/// The write budget with its file, for the time of a call.
pub(super) struct Purse<'a> {
    pub limits: &'a Limits,
    pub file: &'a BudgetFile,
}

impl Purse<'_> {
    /// The last word, when nothing is written any more.
    pub(super) fn save(&self, now: Nanos) {
        charged::save(self, now);
    }
}

impl Charges for Purse<'_> {
    fn limits(&self) -> &Limits {
        self.limits
    }

    fn keep_budget(&self, state: BudgetState) -> bool {
        self.file.write(&state)
    }
}
