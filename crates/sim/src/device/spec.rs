//! The drive, its times, the network and the store, as an experiment states them.

use larder_base::{ByteSize, Endurance};
use serde::{Deserialize, Serialize};

use crate::ssd::VictimPolicy;

/// The drive: a page-mapped flash translation layer and its endurance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Drive {
    /// Capacity that the host sees. Default 0: the cache's flash.
    pub capacity: ByteSize,
    /// The unit of mapping. Default 4 KiB.
    pub page: ByteSize,
    /// A super-block, erased together. Default 0: a 64th of the capacity, between 64 KiB and 64 MiB.
    pub block: ByteSize,
    /// Physical space beyond the capacity, as a share of it. Default 0.07.
    pub over_provisioning: f64,
    /// The cleaner's choice. Default greedy.
    #[serde(with = "victim_name")]
    pub victim: VictimPolicy,
    /// Whether the drive is told of segments that are about to be filled anew. Default false, as `larder kv` has it.
    pub trim: bool,
    /// Endurance as what may be written to it in its life, in terabytes of 10^12 bytes. Default: by `dwpd`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tbw: Option<Endurance>,
    /// Endurance as drive writes per day over the warranty. Default 1.
    pub dwpd: f64,
    /// Years of warranty that `dwpd` is stated for. Default 5.
    pub warranty_years: f64,
}

impl Default for Drive {
    fn default() -> Drive {
        Drive {
            capacity: ByteSize(0),
            page: ByteSize::kib(4),
            block: ByteSize(0),
            over_provisioning: 0.07,
            victim: VictimPolicy::Greedy,
            trim: false,
            tbw: None,
            dwpd: 1.0,
            warranty_years: 5.0,
        }
    }
}

mod victim_name {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    use crate::ssd::VictimPolicy;

    pub(super) fn serialize<S: Serializer>(v: &VictimPolicy, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(v.name())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<VictimPolicy, D::Error> {
        String::deserialize(d)?.parse().map_err(D::Error::custom)
    }
}

/// How long things take, microseconds. Defaults are Holland's (FAST '13), per 4 KiB.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Timing {
    /// A request's own work, or a hit in DRAM. Default 0.4.
    pub dram_us: f64,
    /// Reading 4 KiB of flash. Default 88.
    pub flash_read_us: f64,
    /// Programming 4 KiB of flash. Default 21.
    pub flash_program_us: f64,
    /// Erasing a block. Default 3,500.
    pub flash_erase_us: f64,
    /// Channels of the drive, each doing one thing at a time. Default 8.
    pub channels: u32,
    /// Whether a read passes the writes that wait on its channel. Default true.
    pub read_priority: bool,
    /// The backing store, fast: from its memory or read ahead. Default 92.
    pub backend_fast_us: f64,
    /// The backing store, slow. Default 7,952.
    pub backend_slow_us: f64,
    /// The share of fast answers. Default 0.9.
    pub backend_fast_share: f64,
    /// Requests that the backing store works on at once; 0 for any number. Default 0.
    pub backend_servers: u32,
    /// A packet on the network to the backing store, one each way. Default 8.2.
    pub network_packet_us: f64,
    /// A bit on that network, nanoseconds. Default 1.
    pub network_bit_ns: f64,
    /// A flush of a block cache's device, microseconds. Default 100.
    pub flash_flush_us: f64,
}

impl Default for Timing {
    fn default() -> Timing {
        Timing {
            dram_us: 0.4,
            flash_read_us: 88.0,
            flash_program_us: 21.0,
            flash_erase_us: 3_500.0,
            channels: 8,
            read_priority: true,
            backend_fast_us: 92.0,
            backend_slow_us: 7_952.0,
            backend_fast_share: 0.9,
            backend_servers: 0,
            network_packet_us: 8.2,
            network_bit_ns: 1.0,
            flash_flush_us: 100.0,
        }
    }
}

/// The store behind block caches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Store {
    /// `filer`: Holland's, behind the network of `[timing]`, which also says how fast it reads. `disk`: local disks.
    /// Default `filer`.
    pub kind: StoreKind,
    /// A write of the filer, microseconds. Default 92 (Holland).
    pub write_us: f64,
    /// A flush of the store, microseconds. Default: of a filer a write's time, of disks `disk_ms`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flush_us: Option<f64>,
    /// Disks, striped. Default 1.
    pub disks: u32,
    /// Bytes on one disk before the next one's turn. Default 64 KiB.
    pub stripe: ByteSize,
    /// How long a disk takes to answer a random request, milliseconds. Default 12.6 (Azor).
    pub disk_ms: f64,
    /// Random requests a second of one disk that has several to choose from. Default 150.
    pub disk_iops: f64,
    /// Sequential reads of one disk, 10^6 bytes a second. Default 100.
    pub disk_read_mb: f64,
    /// Sequential writes of one disk, 10^6 bytes a second. Default 90.
    pub disk_write_mb: f64,
}

/// Which model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoreKind {
    /// A file server behind a network.
    #[default]
    Filer,
    /// Disks of this machine.
    Disk,
}

impl Default for Store {
    fn default() -> Store {
        Store {
            kind: StoreKind::Filer,
            write_us: 92.0,
            flush_us: None,
            disks: 1,
            stripe: ByteSize::kib(64),
            disk_ms: 12.6,
            disk_iops: 150.0,
            disk_read_mb: 100.0,
            disk_write_mb: 90.0,
        }
    }
}
