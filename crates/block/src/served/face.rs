//! Devices that are a volume's face beside NBD: disks of guests and of this host, to be looked at.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A device that a volume is served by, beside NBD.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FaceStatus {
    /// `vhost-user-blk` or `ublk`.
    pub face: String,
    /// Where, as it was asked for.
    pub address: String,
    /// The volume's name.
    pub volume: String,
    /// The disk's node, of a disk of this host that is there.
    pub device: Option<String>,
    /// A front end is connected; of a disk of this host, it is there.
    pub connected: bool,
    /// Queues that run.
    pub queues: u64,
    /// Requests that one of them may hold (of a guest's disk: descriptors).
    pub queue_size: u64,
    /// What was agreed on.
    pub features: Vec<String>,
    /// Its size as it was told last, bytes.
    pub bytes: u64,
    /// It is told when the volume grows: nobody has to connect again.
    pub grows: bool,
    /// Requests taken.
    pub requests: u64,
    /// Requests answered with an error of the store.
    pub failed: u64,
    /// Requests that were malformed or beyond the volume.
    pub refused: u64,
    /// Requests that an earlier front end or run had begun, and that were done again.
    pub resumed: u64,
}

/// A device.
#[derive(Clone, Debug)]
pub struct Face {
    /// Where it is, as it was asked for.
    pub address: String,
    /// Its volume.
    pub volume: String,
    /// What it counts.
    pub counted: Arc<dyn Counted>,
}

/// What a device counts.
pub trait Counted: fmt::Debug + Send + Sync {
    /// How it is now; address and volume are its face's to say.
    fn status(&self) -> FaceStatus;
}

impl Face {
    /// How it is now.
    pub fn status(&self) -> FaceStatus {
        let (address, volume) = (self.address.clone(), self.volume.clone());
        FaceStatus { address, volume, ..self.counted.status() }
    }
}
