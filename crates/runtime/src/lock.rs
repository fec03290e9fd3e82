//! Exclusive locks that belong to the open file itself.
//!
//! An open-file-description lock (`F_OFD_SETLK`) is let go when the last reference to the open file goes. A read or
//! write in flight holds such a reference, so after a `kill -9` the lock stays until the dead process's last write has
//! landed: whoever gets the lock knows that nothing of the former owner is still to come. A lock of the process
//! (`F_SETLK`), or one on a file beside the device, would not tell.
//!
//! The other kind of lock that belongs to an open file, `flock`, is taken with it: programs that serve disk images hold that
//! one (`larder block`'s own volumes too), so that nobody's served image becomes a flash device, and no flash device an image.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

/// A process that holds a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its process id.
    pub pid: u32,
    /// Its command name, as the kernel has it.
    pub command: String,
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} ({})", self.pid, self.command)
    }
}

/// How a lock was refused.
pub(crate) enum Refused {
    /// Someone has it.
    Held(Option<Holder>),
    /// The file system cannot lock.
    Failed(io::Error),
}

/// A living holder may be about to exit. One that does not show in `/proc` has died with I/O in flight, which a slow disk
/// may take seconds to finish (or lives in another container, and is then waited for in vain).
const PATIENCE_WITH_LIVING: Duration = Duration::from_millis(150);
const PATIENCE_WITH_DEAD: Duration = Duration::from_secs(10);

/// Locks the whole file for this open file description, waiting a moment for a former owner to be gone entirely.
pub(crate) fn lock_exclusive(fd: BorrowedFd<'_>) -> Result<(), Refused> {
    lock_as(fd, libc::F_WRLCK)
}

/// The same against those alone who lock it exclusively; the file need only be open to be read.
pub(crate) fn lock_shared(fd: BorrowedFd<'_>) -> Result<(), Refused> {
    lock_as(fd, libc::F_RDLCK)
}

fn lock_as(fd: BorrowedFd<'_>, kind: libc::c_int) -> Result<(), Refused> {
    let start = Instant::now();
    let mut waiting = false;
    loop {
        if set_lock(fd, kind).map_err(Refused::Failed)? {
            if flock(fd, kind) {
                return Ok(());
            }
            unlock(fd);
        }
        let holder = holder_of(fd);
        let patience = match &holder {
            Some(h) if h.pid == std::process::id() => Duration::ZERO,
            Some(_) => PATIENCE_WITH_LIVING,
            None => PATIENCE_WITH_DEAD,
        };
        if holder.is_none() && !waiting {
            waiting = true;
            tracing::info!("waiting for a former owner's reads and writes to end");
        }
        if start.elapsed() >= patience {
            return Err(Refused::Held(holder));
        }
        // Looking through /proc takes its time on a large host: more and more seldom.
        std::thread::sleep(
            (start.elapsed() / 4).clamp(Duration::from_millis(5), Duration::from_millis(250)),
        );
    }
}

/// A file that is locked as long as this lives. It stays behind: whether somebody has it is in the lock, not in the file.
#[derive(Debug)]
pub struct LockFile {
    _file: fs::File,
}

/// Why a [`LockFile`] cannot be had.
#[derive(Debug)]
pub enum LockError {
    /// Somebody has it.
    Held(Option<Holder>),
    /// The system refuses it.
    System(io::Error),
}

impl LockFile {
    /// Makes the file if it is not there, for this user alone, and locks it.
    ///
    /// # Errors
    /// [`LockError`].
    pub fn take(path: &Path) -> Result<LockFile, LockError> {
        let mut options = fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(path).map_err(LockError::System)?;
        lock_exclusive(file.as_fd()).map_err(|refused| match refused {
            Refused::Held(holder) => LockError::Held(holder),
            Refused::Failed(e) => LockError::System(e),
        })?;
        Ok(LockFile { _file: file })
    }
}

/// Who has a lock of either kind on the same file, by another open file.
pub fn holder(fd: BorrowedFd<'_>) -> Option<Holder> {
    holder_of(fd)
}

/// Lets the lock go although the open file stays, as it does while it is mapped.
pub(crate) fn unlock(fd: BorrowedFd<'_>) {
    // Fails only for a descriptor that is not open, and this one is.
    let _ = set_lock(fd, libc::F_UNLCK);
    let _ = rustix::fs::flock(fd, FlockOperation::Unlock);
}

/// One attempt at the lock of the other kind. `false` when another open file has it; a file system without it is no obstacle.
fn flock(fd: BorrowedFd<'_>, kind: libc::c_int) -> bool {
    let how = if kind == libc::F_RDLCK {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    rustix::fs::flock(fd, how) != Err(rustix::io::Errno::WOULDBLOCK)
}

/// One attempt. `false` when another open file has a lock that is in the way.
fn set_lock(fd: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<bool> {
    // SAFETY: `flock` is plain integers, for which all zero is a value.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    // l_start = l_len = 0: the whole file, however it grows; l_pid must be 0 for this kind of lock.
    loop {
        // SAFETY: the descriptor is open for the borrow's life, and the pointer is to a live `flock`, which
        // F_OFD_SETLK only reads.
        let rc = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const request) };
        if rc == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => return Ok(false),
            Some(libc::EINTR) => {}
            _ => return Err(error),
        }
    }
}

/// Looks through `/proc` for a process with a lock on the same file. The kernel does not say who holds a lock of this
/// kind (`F_OFD_GETLK` answers -1), but `fdinfo` lists the locks of each descriptor.
fn holder_of(fd: BorrowedFd<'_>) -> Option<Holder> {
    let place = |meta: fs::Metadata| (meta.dev(), meta.ino());
    // By whatever name.
    let target = fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok().map(place)?;
    let me = fd.as_raw_fd().to_string();
    let my_pid = std::process::id();
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(descriptors) = fs::read_dir(process.path().join("fd")) else { continue };
        for entry in descriptors.flatten() {
            let number = entry.file_name();
            if pid == my_pid && number == *me {
                continue;
            }
            let info = fs::read_to_string(process.path().join("fdinfo").join(&number));
            if info.is_ok_and(|text| text.lines().any(|l| l.starts_with("lock:")))
                && fs::metadata(entry.path()).ok().map(place) == Some(target)
            {
                let command = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
                return Some(Holder { pid, command: command.trim().to_owned() });
            }
        }
    }
    None
}
