//! The system calls that no safe wrapper covers, and the loops that make partial ones whole.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::Errno;

/// Size of a block device, bytes (`BLKGETSIZE64`).
pub(super) fn block_device_size(fd: BorrowedFd<'_>) -> io::Result<u64> {
    /// `_IOR(0x12, 114, size_t)`: the number carries the size of a pointer, though the answer has always 64 bits.
    const BLKGETSIZE64: libc::Ioctl =
        (2 << 30 | (size_of::<usize>() as u32) << 16 | 0x12 << 8 | 114) as libc::Ioctl;
    let mut bytes = 0u64;
    // SAFETY: the descriptor is open for the borrow's life; the request stores one u64 through the pointer.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), BLKGETSIZE64, &raw mut bytes) };
    if rc == 0 { Ok(bytes) } else { Err(io::Error::last_os_error()) }
}

/// Discards a range of a block device (`BLKDISCARD`).
pub(super) fn block_device_discard(fd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<()> {
    /// `_IO(0x12, 119)`.
    const BLKDISCARD: libc::Ioctl = (0x12 << 8 | 119) as libc::Ioctl;
    let range = [offset, len];
    // SAFETY: the descriptor is open for the borrow's life; the request reads two u64 through the pointer.
    let rc = unsafe { libc::ioctl(fd.as_raw_fd(), BLKDISCARD, range.as_ptr()) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Reads until `out` is full. `unit` is what direct reads must be multiples of (1 for buffered ones).
pub(super) fn read_full(
    fd: BorrowedFd<'_>,
    mut offset: u64,
    out: &mut [u8],
    unit: usize,
) -> io::Result<()> {
    let mut done = 0;
    while done < out.len() {
        let end = out.len().min(done + super::CHUNK);
        match rustix::io::pread(fd, &mut out[done..end], offset) {
            Ok(n) => {
                let whole = if done + n == out.len() { n } else { n / unit * unit };
                if whole == 0 {
                    return Err(read_shortfall());
                }
                done += whole;
                offset += whole as u64;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// A read that ended before the device did.
pub(crate) fn read_shortfall() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the device ended early (was it truncated?)")
}

/// Writes all of `bytes`.
pub(super) fn write_full(
    fd: BorrowedFd<'_>,
    mut offset: u64,
    bytes: &[u8],
    unit: usize,
) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let end = bytes.len().min(done + super::CHUNK);
        match rustix::io::pwrite(fd, &bytes[done..end], offset) {
            Ok(n) => {
                let whole = if done + n == bytes.len() { n } else { n / unit * unit };
                if whole == 0 {
                    return Err(io::Error::new(
                        io::ErrorKind::WriteZero,
                        "the device took no bytes",
                    ));
                }
                done += whole;
                offset += whole as u64;
            }
            Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}
