//! Volumes that write back: what a start finds of them, how they come and go, how they are doing.

use std::sync::Arc;

use larder_base::{ByteSize, Nanos};
pub use larder_engine::block::writeback::destager::Pace;
pub use larder_engine::block::writeback::log::Status;
pub use larder_engine::block::writeback::volume_log::{Cuts, Grain, Order};

use super::Core;
use super::open::{CacheConfig, CacheError};
use super::volume::Volume;
pub use words::{BACK, FORM, NotBack, order_name};

mod words;

/// Where the marker of a volume is, which says whether a cache may hold what its store lacks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum MarkerAt {
    /// Beside the store, where its kind has a place for it.
    #[default]
    Beside,
    /// There: a path, or the URI of an NBD export.
    At(String),
    /// There is none, and the operator has said so: nothing tells a cache that is lost, or another that comes.
    Nowhere,
}

/// How a volume writes back.
#[derive(Clone, Debug, PartialEq)]
pub struct BackConfig {
    /// In which order its store gets what was written.
    pub order: Order,
    /// When.
    pub pace: Pace,
    /// Bytes of the log that it may hold; by default an equal share of four fifths of the log, at most 4 GiB.
    pub dirty_max: Option<ByteSize>,
}

impl Default for BackConfig {
    fn default() -> BackConfig {
        BackConfig { order: Order::Ordered(Grain::Flush), pace: Pace::Async, dirty_max: None }
    }
}

/// What is wanted of a volume that comes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BackWish {
    /// It writes back so; `None`: it writes through.
    pub back: Option<BackConfig>,
    /// Where its marker is.
    pub marker: MarkerAt,
}

impl CacheConfig {
    /// What is wanted of a volume of that name where it does not say so itself when it comes.
    pub fn wish_of(&self, name: &str) -> BackWish {
        BackWish {
            back: self.back.get(name).or(self.back_by_default.as_ref()).cloned(),
            marker: self.markers.get(name).cloned().unwrap_or_default(),
        }
    }
}

/// How a volume that writes back is doing.
#[derive(Clone, Debug, PartialEq)]
pub struct BackStatus {
    /// How it writes back.
    pub config: BackConfig,
    /// Its generation: it rises with each attach.
    pub generation: u64,
    /// What the log says.
    pub status: Status,
    /// How long ago the oldest dirty write was logged.
    pub age: Option<Nanos>,
    /// Why nothing is logged any more, if so.
    pub closed: Option<String>,
}

impl Core {
    /// Takes up a volume as [`Core::attach`] does, which writes back if `wish` says so.
    ///
    /// # Errors
    /// As [`Core::attach`]; when its marker says that it must not be served, cannot be read or written, or the cache has no log.
    pub fn attach_as(
        &self,
        volume: &Arc<Volume>,
        trust: bool,
        wish: &BackWish,
    ) -> Result<Result<(), String>, CacheError> {
        if wish.back.is_some() {
            let reason = "this version of the cache cannot write back".to_owned();
            return Err(CacheError::Volume { name: volume.name().to_owned(), reason });
        }
        self.attach(volume, trust)
    }

    /// How a volume that writes back is doing; `None` of others.
    pub fn back_status(&self, _name: &str) -> Option<BackStatus> {
        None
    }

    /// Brings all that is dirty of a volume to its store. `go_on` hears how many bytes of the log it still holds, and may say no. Returns whether
    /// all of it came there.
    ///
    /// # Errors
    /// When there is no such volume, or it does not write back.
    pub fn destage(
        &self,
        name: &str,
        _go_on: &mut dyn FnMut(u64) -> bool,
    ) -> Result<bool, CacheError> {
        let reason = "it does not write back".to_owned();
        Err(CacheError::Volume { name: name.to_owned(), reason })
    }
}
