//! What the device offers, and its configuration space (virtio 1.2, 5.2.3 and 5.2.4).

use crate::backing::Capabilities;

/// Bytes of a sector, the unit of all offsets in virtio-blk.
pub const SECTOR: u64 = 512;
/// Queues that a front end may use.
pub const MAX_QUEUES: usize = 64;
/// Descriptors of a queue, at most: QEMU's limit too.
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// Ranges of one discard or write-zeroes request.
pub const MAX_RANGES: u32 = 32;
/// Sectors of one such range: just below 2 GiB, whole pages of 4 KiB.
pub const MAX_RANGE_SECTORS: u32 = (1 << 22) - 8;
/// Pieces of a request's data: with header and status they fill a queue of 128, the front ends' default.
const SEG_MAX: u32 = 126;
/// The longest read or write, bytes.
const MAX_TRANSFER: u32 = 32 << 20;
/// Bytes of the space that mean something.
pub const SPACE: usize = 60;
/// Bytes that front ends may ask for: what is beyond the known ones is zero.
pub const SPACE_READ: usize = 256;
/// Where `writeback` lies.
pub const WRITEBACK: usize = 32;

/// Feature bits.
pub mod feature {
    /// `size_max` holds.
    pub const SIZE_MAX: u64 = 1 << 1;
    /// `seg_max` holds.
    pub const SEG_MAX: u64 = 1 << 2;
    /// Nothing may be written.
    pub const RO: u64 = 1 << 5;
    /// `blk_size` holds.
    pub const BLK_SIZE: u64 = 1 << 6;
    /// There is a flush; without it every write is durable when it is answered.
    pub const FLUSH: u64 = 1 << 9;
    /// `topology` holds.
    pub const TOPOLOGY: u64 = 1 << 10;
    /// The driver may choose by `writeback`.
    pub const CONFIG_WCE: u64 = 1 << 11;
    /// Several queues.
    pub const MQ: u64 = 1 << 12;
    /// Discard.
    pub const DISCARD: u64 = 1 << 13;
    /// Write zeroes.
    pub const WRITE_ZEROES: u64 = 1 << 14;
    /// Indirect descriptors.
    pub const INDIRECT: u64 = 1 << 28;
    /// Notifications are asked for by index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// vhost-user's own features can be agreed on.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
    /// Virtio 1.
    pub const VERSION_1: u64 = 1 << 32;

    /// What the bits of `features` mean, for people.
    pub fn names(features: u64) -> Vec<&'static str> {
        let all = [
            (SIZE_MAX, "size-max"),
            (SEG_MAX, "seg-max"),
            (RO, "read-only"),
            (BLK_SIZE, "blk-size"),
            (FLUSH, "flush"),
            (TOPOLOGY, "topology"),
            (CONFIG_WCE, "config-wce"),
            (MQ, "mq"),
            (DISCARD, "discard"),
            (WRITE_ZEROES, "write-zeroes"),
            (INDIRECT, "indirect-desc"),
            (EVENT_IDX, "event-idx"),
            (VERSION_1, "version-1"),
        ];
        all.iter().filter(|(bit, _)| features & bit != 0).map(|(_, name)| *name).collect()
    }
}

/// A volume as a driver sees it.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Whole sectors of the volume.
    pub sectors: u64,
    /// The longest read or write, bytes.
    pub max_transfer: u32,
    /// Bytes of one piece of data that drivers are told to keep to.
    pub size_max: u32,
    /// Nothing may be written.
    pub read_only: bool,
    /// A discard does something.
    pub discard: bool,
    /// The cache's line, bytes: what requests are best multiples of.
    pub preferred: u32,
}

impl Shape {
    /// Before the volume has come: no front end sees it.
    pub fn none() -> Shape {
        let size_max = (MAX_TRANSFER / SEG_MAX / 4096 * 4096).max(4096);
        Shape {
            sectors: 0,
            max_transfer: MAX_TRANSFER,
            size_max,
            read_only: true,
            discard: false,
            preferred: 4096,
        }
    }

    /// That of a store with lines of `preferred` bytes before it.
    pub fn new(about: &Capabilities, preferred: u32) -> Shape {
        let max_transfer = MAX_TRANSFER.min(about.maximum) / 4096 * 4096;
        Shape {
            sectors: about.size / SECTOR,
            max_transfer,
            // Whoever keeps to both limits can ask for nothing that is too long.
            size_max: (max_transfer / SEG_MAX / 4096 * 4096).max(4096),
            read_only: about.read_only,
            discard: about.trim && !about.read_only,
            preferred: preferred.max(4096),
        }
    }

    /// The features offered.
    pub fn features(&self) -> u64 {
        use feature::*;
        let common = SIZE_MAX | SEG_MAX | BLK_SIZE | TOPOLOGY | MQ | FLUSH | CONFIG_WCE;
        let ring = INDIRECT | EVENT_IDX | PROTOCOL_FEATURES | VERSION_1;
        let changes = match (self.read_only, self.discard) {
            (true, _) => RO,
            (false, true) => DISCARD | WRITE_ZEROES,
            (false, false) => WRITE_ZEROES,
        };
        common | ring | changes
    }

    /// The configuration space; `writeback` is the driver's choice.
    pub fn space(&self, writeback: bool) -> [u8; SPACE] {
        let mut out = [0u8; SPACE];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.sectors.to_le_bytes());
        put(8, &self.size_max.to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &(SECTOR as u32).to_le_bytes());
        // Writes of less than 4 KiB cost a read somewhere; lines are a preference.
        put(24, &[3]);
        put(26, &8u16.to_le_bytes());
        put(28, &(self.preferred / SECTOR as u32).to_le_bytes());
        put(WRITEBACK, &[u8::from(writeback)]);
        put(34, &(MAX_QUEUES as u16).to_le_bytes());
        if self.discard {
            put(36, &MAX_RANGE_SECTORS.to_le_bytes());
            put(40, &MAX_RANGES.to_le_bytes());
            put(44, &8u32.to_le_bytes());
        }
        if !self.read_only {
            put(48, &MAX_RANGE_SECTORS.to_le_bytes());
            put(52, &MAX_RANGES.to_le_bytes());
            put(56, &[1]);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backing::Flushing;

    #[test]
    fn whoever_keeps_to_the_limits_is_never_refused() {
        for maximum in [1 << 20, 3 << 20, 32 << 20, u32::MAX] {
            let about = Capabilities {
                size: (1 << 30) + 700,
                read_only: false,
                trim: true,
                fast_zero: true,
                status: true,
                flush: Flushing::Offered,
                minimum: 1,
                maximum,
            };
            let shape = Shape::new(&about, 4096);
            assert!(SEG_MAX * shape.size_max <= shape.max_transfer, "{shape:?}");
            assert!(shape.max_transfer <= maximum);
            let space = shape.space(true);
            assert_eq!(u64::from_le_bytes(space[..8].try_into().unwrap()), (1 << 21) + 1);
            assert_eq!((space[WRITEBACK], shape.space(false)[WRITEBACK]), (1, 0));
            let read_only = Shape { read_only: true, discard: false, ..shape };
            assert_eq!(read_only.space(true)[36..57], [0; 21]);
            assert_eq!(read_only.features() & (feature::DISCARD | feature::WRITE_ZEROES), 0);
            assert_ne!(read_only.features() & feature::RO, 0);
        }
    }
}
