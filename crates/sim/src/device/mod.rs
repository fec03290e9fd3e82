//! What stands below and behind a cache: the drive and the store, and what caches tell the drive.
//!
//! - [`Drive`], [`Timing`], [`Store`]: what an experiment states of them.
//! - `drive`: a translation layer that makes writes of writes, and channels that take time.
//! - `store`: a filer over a network, or disks, behind block caches.
//! - `backend`: the store that answers what caches of objects miss.

pub(crate) mod backend;
pub(crate) mod drive;
mod spec;
pub(crate) mod store;

pub use spec::{Drive, Store, StoreKind, Timing};

/// What the drive below is told, in the order it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceOp {
    /// A request waits for these bytes.
    Read {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// The cache reads these bytes, and no request waits.
    BackgroundRead {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// The cache writes these bytes, and no request waits.
    Write {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// The cache has no use for these bytes any more.
    Trim {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
}
