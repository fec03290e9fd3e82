//! Devices that are a volume's face beside NBD: disks of guests and of this host, to be looked at.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use crate::control::status::FaceStatus;
use crate::ublk::{self, UblkCounters};
use crate::vhost::{self, VhostCounters};

/// A device.
#[derive(Clone, Debug)]
pub struct Face {
    /// Where it is, as it was asked for.
    pub address: String,
    /// Its volume.
    pub volume: String,
    /// What it counts.
    pub counted: Counted,
}

/// What a device counts.
#[derive(Clone, Debug)]
pub enum Counted {
    /// A guest's disk.
    Vhost(Arc<VhostCounters>),
    /// A disk of this host.
    Ublk(Arc<UblkCounters>),
}

fn words(names: Vec<&str>) -> Vec<String> {
    names.into_iter().map(str::to_owned).collect()
}

impl Face {
    /// How it is now.
    pub fn status(&self) -> FaceStatus {
        let (address, volume) = (self.address.clone(), self.volume.clone());
        match &self.counted {
            Counted::Vhost(c) => {
                let state = c.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
                FaceStatus {
                    face: "vhost-user-blk".into(),
                    address,
                    volume,
                    device: None,
                    connected: c.connected.load(Ordering::Relaxed) > 0,
                    queues: state.queues.into(),
                    queue_size: state.queue_size.into(),
                    features: words(vhost::config::feature::names(state.features)),
                    bytes: state.sectors * vhost::config::SECTOR,
                    grows: state.told,
                    requests: c.requests.load(Ordering::Relaxed),
                    failed: c.failed.load(Ordering::Relaxed),
                    refused: c.refused.load(Ordering::Relaxed),
                    resumed: c.resumed.load(Ordering::Relaxed),
                }
            }
            Counted::Ublk(c) => {
                let state = c.state.lock().unwrap_or_else(PoisonError::into_inner).clone();
                let connected = state.is_some();
                let disk = state.unwrap_or_default();
                FaceStatus {
                    face: "ublk".into(),
                    address,
                    volume,
                    device: connected.then(|| format!("/dev/ublkb{}", disk.id)),
                    connected,
                    queues: disk.queues.into(),
                    queue_size: disk.depth.into(),
                    features: words(ublk::abi::flag::names(disk.flags)),
                    bytes: disk.sectors * ublk::abi::SECTOR,
                    grows: disk.grows,
                    requests: c.requests.load(Ordering::Relaxed),
                    failed: c.failed.load(Ordering::Relaxed),
                    refused: c.refused.load(Ordering::Relaxed),
                    resumed: 0,
                }
            }
        }
    }
}
