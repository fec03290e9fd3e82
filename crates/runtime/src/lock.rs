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
#[derive(Debug)]
pub enum Refused {
    /// Someone has it.
    Held(Option<Holder>),
    /// The file system cannot lock.
    Failed(io::Error),
}

/// Says to whoever wants what this process has locked that it is about to end, and worth waiting for: by its name in `/proc`.
pub fn say_stopping() {
    // Without it the next start is refused, as it would be by any living process.
    if let Err(error) = fs::write("/proc/self/comm", STOPPING) {
        tracing::debug!(%error, "the process cannot be renamed");
    }
}

/// A living holder may be about to exit. One that does not show in `/proc` has died with I/O in flight, which a slow disk
/// may take seconds to finish (or lives in another container, and is then waited for in vain).
const PATIENCE_WITH_LIVING: Duration = Duration::from_millis(150);
/// One that has said that it stops ([`say_stopping`]) makes durable what there is, and lets requests under way end.
const PATIENCE_WITH_STOPPING: Duration = Duration::from_secs(30);
/// What such a process calls itself: as long as the kernel lets a name be.
const STOPPING: &str = "larder-stopping";
const PATIENCE_WITH_DEAD: Duration = Duration::from_secs(10);

/// Locks the whole file for this open file description, waiting a moment for a former owner to be gone entirely. The lock lasts as
/// long as the description is open.
///
/// # Errors
/// [`Refused`]: somebody has it, or the file system cannot lock.
pub fn lock_exclusive(fd: BorrowedFd<'_>) -> Result<(), Refused> {
    lock_as(fd, libc::F_WRLCK)
}

/// The same against those alone who lock it exclusively; the file need only be open to be read.
pub(crate) fn lock_shared(fd: BorrowedFd<'_>) -> Result<(), Refused> {
    lock_as(fd, libc::F_RDLCK)
}

fn lock_as(fd: BorrowedFd<'_>, kind: libc::c_int) -> Result<(), Refused> {
    wait_for(fd, "", || try_lock_as(fd, kind))
}

/// One attempt at [`lock_exclusive`], for who need not have it.
pub(crate) fn try_lock_exclusive(fd: BorrowedFd<'_>) -> io::Result<bool> {
    try_lock_as(fd, libc::F_WRLCK)
}

fn try_lock_as(fd: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<bool> {
    if set_lock(fd, kind)? {
        if flock(fd, kind).unwrap_or(true) {
            return Ok(true);
        }
        unlock(fd);
    }
    Ok(false)
}

/// Whether another open file has a lock of any part of the file.
pub(crate) fn is_locked_by_another(fd: BorrowedFd<'_>) -> io::Result<bool> {
    is_range_locked(fd, (0, 0))
}

/// Tries again until `attempt` has the lock of `fd`, or a former owner has had its time. `of` is put behind what is said of it.
fn wait_for(
    fd: BorrowedFd<'_>,
    of: &str,
    mut attempt: impl FnMut() -> io::Result<bool>,
) -> Result<(), Refused> {
    let start = Instant::now();
    let mut waiting = false;
    loop {
        if attempt().map_err(Refused::Failed)? {
            if waiting {
                let ms = start.elapsed().as_millis();
                tracing::info!("the former owner is gone, after {ms} ms{of}");
            }
            return Ok(());
        }
        let holder = holder_of(fd);
        let gone = holder.as_ref().is_none_or(|h| is_dying(h.pid));
        let stopping = holder.as_ref().filter(|h| !gone && h.command == STOPPING);
        let patience = match &holder {
            Some(h) if h.pid == std::process::id() => Duration::ZERO,
            Some(_) if stopping.is_some() => PATIENCE_WITH_STOPPING,
            Some(_) if !gone => PATIENCE_WITH_LIVING,
            _ => PATIENCE_WITH_DEAD,
        };
        if !waiting && patience > PATIENCE_WITH_LIVING {
            waiting = true;
            let most = patience.as_secs();
            match stopping {
                Some(h) => tracing::info!(
                    "waiting for process {}, which is stopping, for up to {most} s{of}",
                    h.pid
                ),
                None => tracing::info!("waiting for a former owner's reads and writes to end{of}"),
            }
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

/// It has been killed, and is not gone yet.
fn is_dying(pid: u32) -> bool {
    const SIGKILL: u64 = 1 << (libc::SIGKILL - 1);
    let Ok(status) = fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let of = |name: &str| status.lines().find_map(|l| l.strip_prefix(name)).map(str::trim);
    let killed =
        |name| of(name).is_some_and(|m| u64::from_str_radix(m, 16).is_ok_and(|m| m & SIGKILL != 0));
    of("State:").is_some_and(|s| s.starts_with(['Z', 'X']))
        || killed("SigPnd:")
        || killed("ShdPnd:")
}

// What QEMU locks of an image (`block/file-posix.c`): a byte of the first stretch says "I do this", one of the second "nobody
// else may do this". All are read locks, which do not exclude each other: who comes looks for those of others that are in the
// way. So each open file of one owner can have the same, and programs that know nothing of it and lock the file against
// writers, or whole, are in the way too.
const DOES: i64 = 100;
const REFUSES: i64 = 200;
const READ: u8 = 1;
const WRITE: u8 = 1 << 1;
const WRITE_UNCHANGED: u8 = 1 << 2;
const RESIZE: u8 = 1 << 3;

/// Locks what a served image lies in, waiting a moment for a former owner to be gone entirely: against all that lock it with
/// `flock`, and against QEMU and whoever keeps to its locks; against those alone that write, if it is not for `writing`. The
/// open files of `beside` are the same file's: what is under way on them keeps the next owner away too. `what` names it in
/// the log.
///
/// # Errors
/// [`LockError`].
pub fn lock_image(
    what: &str,
    fd: BorrowedFd<'_>,
    beside: &[BorrowedFd<'_>],
    writing: bool,
) -> Result<(), LockError> {
    let (kind, does, refuses) = if writing {
        (libc::F_WRLCK, READ | WRITE | RESIZE, WRITE | WRITE_UNCHANGED | RESIZE)
    } else {
        (libc::F_RDLCK, READ, WRITE | RESIZE)
    };
    let attempt = || {
        if !flock(fd, kind)? {
            return Ok(false);
        }
        let claimed = claim(fd, does, refuses);
        if matches!(claimed, Ok(true)) {
            // Nobody else has the image by now, so there is nothing in the way of these.
            for fd in beside {
                claim_bytes(*fd, does, refuses)?;
            }
            return Ok(true);
        }
        match claimed {
            // NFS without its lock manager, and the like: then the other kind has to do.
            Err(error) => {
                tracing::debug!("no locks of bytes on '{what}': {error}");
                Ok(true)
            }
            _ => {
                unlock(fd);
                Ok(false)
            }
        }
    };
    wait_for(fd, &format!(" ('{what}')"), attempt).map_err(|refused| match refused {
        Refused::Held(holder) => LockError::Held(holder),
        Refused::Failed(e) => LockError::System(e),
    })
}

/// Lets go of what [`lock_image`] took. Only for who has nothing under way on the open file: else that ends the lock.
pub fn unlock_image(fd: BorrowedFd<'_>) {
    unlock(fd);
}

/// Takes the bytes, then looks whether somebody else's are in the way.
fn claim(fd: BorrowedFd<'_>, does: u8, refuses: u8) -> io::Result<bool> {
    if !claim_bytes(fd, does, refuses)? {
        return Ok(false);
    }
    for bit in 0..8 {
        let at = i64::from(bit);
        if does & 1 << bit != 0 && is_locked(fd, REFUSES + at)?
            || refuses & 1 << bit != 0 && is_locked(fd, DOES + at)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

fn claim_bytes(fd: BorrowedFd<'_>, does: u8, refuses: u8) -> io::Result<bool> {
    for bit in 0..8 {
        for (mask, first) in [(does, DOES), (refuses, REFUSES)] {
            if mask & 1 << bit != 0 && !set_range(fd, libc::F_RDLCK, (first + i64::from(bit), 1))? {
                return Ok(false);
            }
        }
    }
    Ok(true)
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

/// One attempt at the lock of the other kind. `false` when another open file has it.
fn flock(fd: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<bool> {
    let how = if kind == libc::F_RDLCK {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    match rustix::fs::flock(fd, how) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(e.into()),
    }
}

/// One attempt at the whole file, however it grows. `false` when another open file has a lock that is in the way.
fn set_lock(fd: BorrowedFd<'_>, kind: libc::c_int) -> io::Result<bool> {
    set_range(fd, kind, (0, 0))
}

/// The same for bytes from the first on, so many; none for all.
fn set_range(fd: BorrowedFd<'_>, kind: libc::c_int, range: (i64, i64)) -> io::Result<bool> {
    let mut request = request(kind, range);
    match lock_call(fd, libc::F_OFD_SETLK, &mut request) {
        Ok(()) => Ok(true),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Whether another open file has a lock of that byte.
fn is_locked(fd: BorrowedFd<'_>, at: i64) -> io::Result<bool> {
    is_range_locked(fd, (at, 1))
}

/// The same of bytes from the first on, so many; none for all.
fn is_range_locked(fd: BorrowedFd<'_>, range: (i64, i64)) -> io::Result<bool> {
    let mut request = request(libc::F_WRLCK, range);
    lock_call(fd, libc::F_OFD_GETLK, &mut request)?;
    Ok(request.l_type != libc::F_UNLCK as libc::c_short)
}

fn request(kind: libc::c_int, (first, bytes): (i64, i64)) -> libc::flock {
    // SAFETY: `flock` is plain integers, for which all zero is a value.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = kind as libc::c_short;
    request.l_whence = libc::SEEK_SET as libc::c_short;
    // l_pid must be 0 for this kind of lock.
    (request.l_start, request.l_len) = (first, bytes);
    request
}

fn lock_call(fd: BorrowedFd<'_>, how: libc::c_int, request: &mut libc::flock) -> io::Result<()> {
    loop {
        // SAFETY: the descriptor is open for the borrow's life, and the pointer is to a live `flock`, which the call reads
        // and may write, and does not keep.
        let rc = unsafe { libc::fcntl(fd.as_raw_fd(), how, &raw mut *request) };
        if rc == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINTR) {
            return Err(error);
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

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;
    use std::os::fd::OwnedFd;

    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
        SocketType, sendmsg, socketpair,
    };

    use super::*;

    fn open(path: &Path) -> fs::File {
        fs::OpenOptions::new().read(true).write(true).open(path).unwrap()
    }

    /// Puts an open file where no process has it, as those of a dead process are until its last I/O has ended. It is closed
    /// with what is returned.
    fn nobodys(file: fs::File) -> (OwnedFd, OwnedFd) {
        let kind = SocketType::STREAM;
        let (a, b) = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let data = [std::io::IoSlice::new(b"x")];
        sendmsg(&a, &data, &mut control, SendFlags::empty()).unwrap();
        (a, b)
    }

    /// What a dead process has under way past the page cache keeps the next owner away too, until it has ended.
    #[test]
    fn a_former_owner_is_waited_for() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for direct in [false, true] {
            let (first, beside) = (open(file.path()), open(file.path()));
            lock_image("it", first.as_fd(), &[beside.as_fd()], true).unwrap();
            let left = nobodys(if direct {
                drop(first);
                beside
            } else {
                drop(beside);
                first
            });
            let begun = Instant::now();
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(700));
                drop(left);
            });
            let next = open(file.path());
            lock_image("it", next.as_fd(), &[], true).unwrap();
            assert!(begun.elapsed() >= Duration::from_millis(700), "{:?}", begun.elapsed());
            thread.join().unwrap();
        }
    }

    #[test]
    fn images_are_shared_by_readers_alone() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let lock = |writing| {
            let file = open(file.path());
            lock_image("it", file.as_fd(), &[], writing).map(|()| file)
        };
        let writer = lock(true).unwrap();
        assert!(matches!(lock(true), Err(LockError::Held(Some(_)))));
        assert!(matches!(lock(false), Err(LockError::Held(Some(_)))));
        unlock_image(writer.as_fd());
        let readers = (lock(false).unwrap(), lock(false).unwrap());
        assert!(lock(true).is_err());
        drop(readers);
        // QEMU, which writes, and lets others read: bytes 100 + 1 and 200 + 1.
        let qemu = open(file.path());
        assert!(set_range(qemu.as_fd(), libc::F_RDLCK, (101, 1)).unwrap());
        assert!(lock(false).is_err() && lock(true).is_err());
        set_lock(qemu.as_fd(), libc::F_UNLCK).unwrap();
        assert!(set_range(qemu.as_fd(), libc::F_RDLCK, (201, 1)).unwrap());
        assert!(lock(false).is_ok() && lock(true).is_err());
    }
}
