//! What lies on the cache device of a block cache.
//!
//! ```text
//! 0            64 KiB        128 KiB
//! +------------+-------------+---------+------------+-------+------------+-------+------- ... ---------+
//! | superblock | superblock  | intents | snapshot 0 | log 0 | snapshot 1 | log 1 | slots of lines      |
//! | copy 0     | copy 1      |         |            |       |            |       | (from a full MiB on)|
//! +------------+-------------+---------+------------+-------+------------+-------+------- ... ---------+
//! ```
//!
//! * [`superblock`]: identity, layout, the volumes, and which snapshot rules.
//! * [`intents`]: one bit a region: the backing store of a region with a bit may have changes that the map on the device
//!   does not know of.
//! * [`log`]: pages of records, each the whole state of a slot; and snapshots, the state of all slots. The durable map is
//!   the ruling snapshot with its log replayed over it, and then the other log, if that is of the next generation (a
//!   snapshot that was under way).
//!
//! A sparse device has the [`table`] in place of snapshots and logs: a page says what lies in its slots, and is written
//! where it lies.
//!
//! Behind the slots, from a full MiB on, a device may have a [`write_log`]: what clients wrote and the backing stores lack. The
//! superblock says where ([`WriteLogArea`](superblock::WriteLogArea)); the layout ends before it. Beside the stores lie the [`marker`], which says which cache has such data, and the
//! [`journal`] of an order that needs one.
//!
//! Integers are little endian. Every page has a checksum; a page that fails it is as if it had not been written.

pub mod intents;
pub mod journal;
pub mod layout;
pub mod log;
pub mod marker;
pub mod superblock;
pub mod table;
pub mod write_log;

pub use layout::{Layout, LayoutError, Placement, UnknownPlacement};
pub use superblock::{BlockSuperblock, BlockSuperblockError, Volume, VolumeState};
