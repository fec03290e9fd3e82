//! Devices, rings, shared memory and clocks beneath the servers: the only place, with the servers themselves, where
//! bytes reach a disk and time is read.
//!
//! | module | what it gives |
//! | --- | --- |
//! | [`device`] | a flash file or raw block device, locked, `O_DIRECT` where the file system allows it |
//! | [`ring`] | asynchronous reads for one worker: io_uring, or a pool of threads that call `pread` |
//! | [`FileQueue`] | reads, writes, syncs and holes on any number of files, by the same two means |
//! | [`batch`] | how many requests a worker passes on together |
//! | [`CommandRing`] | commands that drivers define themselves, by io_uring |
//! | [`buffer`] | page-aligned buffers from a bounded pool |
//! | [`shared`] | memory that outlives the process, on tmpfs |
//! | [`clock`] | wall and monotonic time, read together, once per turn |
//! | [`datadir`] | the data directory: lock, version, whole replacement of files |
//! | [`machine`] | memory, processors, free space; what this process uses |
//! | [`latency`] | histograms of latencies, and percentiles |
//! | [`record`](mod@record) | the file of `--record`, written by a thread of its own |
//! | [`extents`] | where a file's bytes lie on the disk |
//! | [`wear`] | what an NVMe drive reports of its wear |
//! | [`testing`] | devices in memory that lose power, fail, rot and stall on command |

// This crate is the line below which nothing reads a clock or starts a thread: it is where clocks and threads live.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod batch;
pub mod buffer;
pub mod clock;
pub mod datadir;
pub mod device;
mod error;
pub mod extents;
pub mod latency;
mod lock;
pub mod machine;
pub mod maps;
pub mod record;
pub mod ring;
pub mod shared;
mod slices;
pub mod testing;
mod unix;
pub mod wear;

pub use batch::{Batch, Pile};
pub use buffer::{AlignedBuf, BufferPool, PAGE};
pub use clock::{Clock, TurnClock};
pub use datadir::{DataDir, DataDirError, FileMark, SharedDir};
pub use device::{Device, DeviceOptions, FlashDevice, Geometry, JoinedDevices};
pub use error::{DeviceError, IoOp, plain};
pub use extents::{ExtentsError, FileExtent, FileExtents};
pub use lock::{
    Holder, LockError, LockFile, Refused, holder, lock_exclusive, lock_image, say_stopping,
    unlock_image,
};
pub use ring::{
    COMMAND_BYTES, CommandRing, Completion, FileDone, FileHandle, FileOp, FileQueue, Full, Payload,
    ReadRing, RingChoice, RingOptions,
};
pub use shared::{SHARED_DIR, SharedError, SharedRegion, boot_id};
pub use slices::prefer_slices;
pub use unix::make_room;
pub use wear::Wear;
