//! Where the bytes lie: one trait, a flash file or raw block device behind it, and devices for tests in
//! [`testing`](crate::testing).

mod flash;
mod joined;
mod os;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use crate::error::{DeviceError, IoOp};

pub use flash::{DeviceOptions, FlashDevice};
pub use joined::JoinedDevices;
pub(crate) use os::read_shortfall;

/// The most bytes of one system call: longer operations are cut, so that a segment's write does not hold up the reads
/// behind it in the device's queue.
pub const CHUNK: usize = 1 << 20;

/// How large a device is and in what units it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Usable bytes: a multiple of [`PAGE`](crate::PAGE).
    pub size: u64,
    /// Unit of writes and discards, bytes: a power of two from 512 to 4096. Reads may be of any range; they move whole
    /// blocks.
    pub block: u32,
}

/// A device that a cache may be kept on. Operations are synchronous; [`ReadRing`](crate::ReadRing) makes reads
/// asynchronous.
///
/// A write is durable after a later [`Device::sync`] has returned. When a sync fails, whatever was written since the
/// last one may be lost even if a later sync succeeds (the kernel forgets such pages): treat those ranges as void.
pub trait Device: Send + Sync + fmt::Debug {
    /// Its path, or a name for errors and logs.
    fn name(&self) -> &Arc<str>;

    /// Its size and unit.
    fn geometry(&self) -> Geometry;

    /// Fills `out` from `offset`. Any range within the device.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], or [`DeviceError::Io`] with the contents of `out` unspecified.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError>;

    /// Writes `bytes` at `offset`: whole blocks.
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`], [`DeviceError::Misaligned`], or [`DeviceError::Io`]: then any part of the range may
    /// have been written.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Makes every write that has returned durable.
    ///
    /// # Errors
    /// [`DeviceError::Io`]: see above on what that means for earlier writes.
    fn sync(&self) -> Result<(), DeviceError>;

    /// Says that a range (whole blocks) is no longer needed. Its contents are unspecified from then on. A device that
    /// knows no discard ignores it.
    ///
    /// # Errors
    /// As [`Device::write_at`].
    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError>;

    /// The open file for rings that let the kernel read, `None` where reads must go through [`Device::read_at`].
    fn raw(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The open files for such rings, where a device is made of several; see [`Device::file_at`].
    fn files(&self) -> Option<Vec<BorrowedFd<'_>>> {
        self.raw().map(|file| vec![file])
    }

    /// Which of the files holds the bytes at `offset`, and where.
    fn file_at(&self, offset: u64) -> (u32, u64) {
        (0, offset)
    }

    /// What lies at `offset`, for errors.
    fn name_at(&self, _offset: u64) -> &Arc<str> {
        self.name()
    }

    /// Checks a range; see [`check_range`].
    ///
    /// # Errors
    /// [`DeviceError::OutOfRange`] or [`DeviceError::Misaligned`].
    fn check(&self, op: IoOp, offset: u64, len: u64) -> Result<(), DeviceError> {
        range_fits(self.name(), self.geometry(), op, offset, len)
    }

    /// Unit in bytes, offset and length, of reads through [`Device::raw`]: 1 when they go through the page cache.
    fn read_unit(&self) -> u32 {
        self.geometry().block
    }
}

/// Checks that a range lies on a device and, for anything but a read, covers whole blocks.
///
/// # Errors
/// [`DeviceError::OutOfRange`] or [`DeviceError::Misaligned`].
pub fn check_range(
    device: &dyn Device,
    op: IoOp,
    offset: u64,
    len: u64,
) -> Result<(), DeviceError> {
    device.check(op, offset, len)
}

fn range_fits(
    name: &Arc<str>,
    Geometry { size, block }: Geometry,
    op: IoOp,
    offset: u64,
    len: u64,
) -> Result<(), DeviceError> {
    if offset.checked_add(len).is_none_or(|end| end > size) {
        return Err(DeviceError::OutOfRange { device: name.clone(), op, offset, len, size });
    }
    let unit = u64::from(block);
    if op != IoOp::Read && (!offset.is_multiple_of(unit) || !len.is_multiple_of(unit)) {
        return Err(DeviceError::Misaligned { device: name.clone(), op, offset, len, block });
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
