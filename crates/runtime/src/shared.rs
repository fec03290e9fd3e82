//! Memory that outlives the process: a file on tmpfs, mapped.
//!
//! What was stored before a `kill -9` is there for the next process; a reboot takes it away. The flash index lives in
//! such a region (see [`larder_base::Words`]).

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::{ByteSize, Supply, Words};
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use crate::buffer::PAGE;
use crate::lock::{Holder, Refused, lock_exclusive, unlock};
use crate::maps::{Owner, remove_owner, write_owner};

/// Where regions are kept unless something else is asked for.
pub const SHARED_DIR: &str = "/dev/shm";

/// Why a region cannot be had. All but [`SharedError::InUse`] and [`SharedError::Foreign`] are cause to go on with
/// memory of one's own.
#[derive(Debug, thiserror::Error)]
pub enum SharedError {
    /// The file system (or the memory limit) has not the room.
    #[error(
        "shared memory '{path}' needs {} and {} are free there: enlarge it, choose another directory, or do without \
         (then a restart is cold)", ByteSize(*.needed), ByteSize(*.free)
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes wanted.
        needed: u64,
        /// Bytes there are.
        free: u64,
    },
    /// A region of that name has another size: it was made by another configuration.
    #[error(
        "shared memory '{path}' has {found} bytes instead of {wanted}: it belongs to another configuration"
    )]
    SizeDiffers {
        /// The file.
        path: PathBuf,
        /// Its length, bytes.
        found: u64,
        /// The length wanted, bytes.
        wanted: u64,
    },
    /// Something is there that must not be trusted.
    #[error("shared memory '{path}' {why}: remove it, or choose another directory")]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Another process has it mapped.
    #[error(
        "shared memory '{path}' is in use{}: stop the other instance first",
        .holder.as_ref().map(|h| format!(" by {h}")).unwrap_or_default()
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// Who holds it, where that can be seen.
        holder: Option<Holder>,
    },
    /// A name that is not a plain file name.
    #[error(
        "'{0}' is not a name for shared memory: use 1 to 200 letters, digits, '.', '_' and '-'"
    )]
    Name(String),
    /// The operating system refused.
    #[error("cannot {action} shared memory '{path}': {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// A region, mapped and locked. The mapping stays for the life of the process. The lock goes when this is dropped, so
/// keep it as long as the words are in use; and when the process dies, but not before its last store, since the mapping
/// itself keeps the locked file open.
#[derive(Debug)]
pub struct SharedRegion {
    words: &'static [AtomicU64],
    path: PathBuf,
    fresh: bool,
    lock: File,
}

impl SharedRegion {
    /// Opens or creates the region `name` in `dir`. Its memory is reserved at once, so that no later store can fail
    /// for want of room. `bytes` is rounded up to whole pages.
    ///
    /// # Errors
    /// See [`SharedError`]. A region that could not be made whole is not left behind.
    pub fn open(dir: &Path, name: &str, bytes: u64) -> Result<SharedRegion, SharedError> {
        let all = 0..bytes.max(1).div_ceil(8) as usize;
        SharedRegion::open_in_parts(dir, name, bytes, &[all])
    }

    /// The same of which the words of these `parts` alone are reserved, whole pages that do not overlap: to all others
    /// nothing may be stored, nor may they be read, but by way of [`SharedRegion::growing`].
    ///
    /// # Errors
    /// See [`SharedRegion::open`].
    pub fn open_in_parts(
        dir: &Path,
        name: &str,
        bytes: u64,
        parts: &[Range<usize>],
    ) -> Result<SharedRegion, SharedError> {
        let path = region_path(dir, name)?;
        let length = bytes.max(1).checked_next_multiple_of(PAGE as u64).unwrap_or(u64::MAX);
        let failed = |action| {
            let path = path.clone();
            move |source: io::Error| SharedError::Io { path, action, source }
        };
        let file = loop {
            let file = open_private(&path)?;
            lock_exclusive(file.as_fd()).map_err(|refused| match refused {
                Refused::Held(holder) => SharedError::InUse { path: path.clone(), holder },
                Refused::Failed(e) => failed("lock")(e),
            })?;
            let found = file.metadata().map_err(failed("look at"))?;
            // Removed by its former owner between the opening and the lock: another one is there, or none.
            if found.nlink() > 0 {
                check_ownership(&path, &found)?;
                break file;
            }
        };
        let found = file.metadata().map_err(failed("look at"))?.len();
        let fresh = found == 0;
        if !fresh && found != length {
            return Err(SharedError::SizeDiffers { path, found, wanted: length });
        }
        let parts: Vec<Range<u64>> = parts.iter().map(pages).collect();
        if let Err(e) = reserve(&file, &path, length, &parts, fresh) {
            if fresh {
                // Still locked, so it is ours to remove.
                let _ = std::fs::remove_file(&path);
            }
            return Err(e);
        }
        let map = memmap2::MmapOptions::new()
            .len(length as usize)
            .map_raw(&file)
            .map_err(failed("map"))?;
        let start: *const AtomicU64 = map.as_ptr().cast();
        // Never unmapped: that is what makes the words 'static.
        std::mem::forget(map);
        // SAFETY: the mapping starts at a page, has `length` bytes that the file has too (it is private to this user and locked), and stays
        // for the life of the process. Where no memory is reserved for them above, nothing is stored before `Part::back` has reserved it.
        // Other mappings of the file, in this process or another, may store to it at any time, which atomics allow.
        let words = unsafe { std::slice::from_raw_parts(start, length as usize / 8) };
        Ok(SharedRegion { words, path, fresh, lock: file })
    }

    /// The words. Cut them by offset for several users.
    pub fn words(&self) -> &'static [AtomicU64] {
        self.words
    }

    /// Words of the region that are not reserved, or not all: memory is taken for them when it is asked for, and given back. They begin at
    /// a page.
    ///
    /// # Errors
    /// When the system gives out no more open files.
    pub fn growing(&self, part: Range<usize>) -> io::Result<Words> {
        debug_assert!(part.start.is_multiple_of(PAGE / 8));
        let words = &self.words[part.clone()];
        let supply =
            Part { file: self.lock.try_clone()?, part: pages(&part), backed: AtomicU64::new(0) };
        Ok(Words::supplied(words, Arc::new(supply)))
    }

    /// Whether this call made it: then all words are zero. One that was made but never filled because its process died
    /// looks like an old one of zeros: put a mark in it last.
    pub fn is_fresh(&self) -> bool {
        self.fresh
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes down whose it is, beside it, so that it can be removed when its owner is gone (see [`crate::maps`]).
    pub fn set_owner(&self, owner: &Owner) {
        if let Err(error) = write_owner(&self.path, owner) {
            // Without it, only the memory stays should the owner go.
            tracing::warn!("it is not noted whose '{}' is: {error}", self.path.display());
        }
    }

    /// Gives the memory back to the machine when the words are not in use any more. Nobody finds it then.
    ///
    /// # Errors
    /// The file stays.
    pub fn discard(&self) -> io::Result<()> {
        remove_owner(&self.path);
        std::fs::remove_file(&self.path)
    }

    /// Removes the region `name` from `dir`, for a cold start. Nothing happens if there is none.
    ///
    /// # Errors
    /// [`SharedError::InUse`] when another process has it; [`SharedError::Foreign`] when it is not ours.
    pub fn remove(dir: &Path, name: &str) -> Result<(), SharedError> {
        let path = region_path(dir, name)?;
        match std::fs::symlink_metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(SharedError::Io { path, action: "look at", source }),
            Ok(found) => check_ownership(&path, &found)?,
        }
        let file = open_private(&path)?;
        lock_exclusive(file.as_fd()).map_err(|refused| match refused {
            Refused::Held(holder) => SharedError::InUse { path: path.clone(), holder },
            Refused::Failed(source) => {
                SharedError::Io { path: path.clone(), action: "lock", source }
            }
        })?;
        // Removed by its owner meanwhile, and perhaps made anew: what is there then is not what was meant.
        if file.metadata().is_ok_and(|found| found.nlink() == 0) {
            return Ok(());
        }
        remove_owner(&path);
        std::fs::remove_file(&path).map_err(|source| SharedError::Io {
            path,
            action: "remove",
            source,
        })
    }
}

impl Drop for SharedRegion {
    fn drop(&mut self) {
        // Closing would not do: the mapping stays, and with it the open file.
        unlock(self.lock.as_fd());
    }
}

pub(crate) fn region_path(dir: &Path, name: &str) -> Result<PathBuf, SharedError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    let fits = (1..=200).contains(&name.len()) && name.bytes().all(plain) && !name.starts_with('.');
    if fits { Ok(dir.join(name)) } else { Err(SharedError::Name(name.to_owned())) }
}

/// Opens without following a link, made for this user alone if it is not there.
pub(crate) fn open_private(path: &Path) -> Result<File, SharedError> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(PRIVATE)
        .open(path)
        .map_err(|source| cannot_open(path, source))
}

/// Flags of an open that follows no link, and does not wait for what is no file.
pub(crate) const PRIVATE: i32 =
    (OFlags::CLOEXEC.bits() | OFlags::NOFOLLOW.bits() | OFlags::NONBLOCK.bits()) as i32;

/// What that failure of an open means.
pub(crate) fn cannot_open(path: &Path, source: io::Error) -> SharedError {
    let path = path.to_owned();
    match source.raw_os_error() {
        Some(libc::ELOOP) => SharedError::Foreign { path, why: "is a symbolic link".to_owned() },
        // Also what the kernel answers for another user's file in a sticky directory.
        Some(libc::EACCES) if std::fs::symlink_metadata(&path).is_ok() => {
            SharedError::Foreign { path, why: "belongs to another user".to_owned() }
        }
        _ => SharedError::Io { path, action: "open", source },
    }
}

/// Another user who can write the file could shorten it under our feet (SIGBUS) or forge an index.
pub(crate) fn check_ownership(path: &Path, found: &Metadata) -> Result<(), SharedError> {
    let me = rustix::process::geteuid().as_raw();
    let why = if !found.is_file() {
        "is not a regular file".to_owned()
    } else if found.uid() != me {
        format!("belongs to user {} (this is user {me})", found.uid())
    } else if found.mode() & 0o077 != 0 {
        format!("is open to other users (mode {:o})", found.mode() & 0o777)
    } else if found.nlink() != 1 {
        format!("has {} names", found.nlink())
    } else {
        return Ok(());
    };
    Err(SharedError::Foreign { path: path.to_owned(), why })
}

/// The bytes of whole pages that hold these words.
fn pages(words: &Range<usize>) -> Range<u64> {
    // More than there can be stays more than there can be.
    let end = (words.end as u64).saturating_mul(8);
    let end = end.checked_next_multiple_of(PAGE as u64).unwrap_or(u64::MAX);
    words.start as u64 * 8 / PAGE as u64 * PAGE as u64..end
}

/// A part of a region that grows.
struct Part {
    file: File,
    /// Bytes of the file.
    part: Range<u64>,
    /// So many bytes from its start on are known to have memory.
    backed: AtomicU64,
}

impl Supply for Part {
    fn back(&self, words: Range<usize>) -> bool {
        let end = pages(&words).end.min(self.part.end - self.part.start);
        let from = self.backed.load(Ordering::Relaxed);
        if end <= from {
            return true;
        }
        match allocate(&self.file, self.part.start + from, end - from) {
            Ok(()) => self.backed.store(end, Ordering::Relaxed),
            Err(errno) => {
                tracing::warn!(
                    "{} more of shared memory cannot be had: {}",
                    ByteSize(end - from),
                    io::Error::from(errno)
                );
                return false;
            }
        }
        true
    }

    fn give_back(&self, words: Range<usize>) {
        let from = (words.start as u64 * 8).next_multiple_of(PAGE as u64);
        let length = (self.part.end - self.part.start).saturating_sub(from);
        if length == 0 {
            return;
        }
        self.backed.fetch_min(from, Ordering::Relaxed);
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if let Err(error) = rustix::fs::fallocate(&self.file, flags, self.part.start + from, length)
        {
            tracing::debug!(%error, "shared memory is not given back");
        }
    }
}

fn allocate(file: &File, at: u64, length: u64) -> Result<(), Errno> {
    loop {
        match rustix::fs::fallocate(file, FallocateFlags::empty(), at, length) {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

/// Takes the memory now: a store to a page that tmpfs cannot supply would be a SIGBUS.
fn reserve(
    file: &File,
    path: &Path,
    length: u64,
    parts: &[Range<u64>],
    fresh: bool,
) -> Result<(), SharedError> {
    let needed: u64 = parts.iter().map(|part| part.end - part.start).sum();
    let free =
        rustix::fs::fstatvfs(file).map_or(u64::MAX, |v| v.f_bavail.saturating_mul(v.f_frsize));
    // The pages count against the memory limit too, and passing that one ends the process instead of the call.
    let free = free.min(crate::machine::memory_limit().unwrap_or(u64::MAX));
    let no_room = |free| SharedError::NoRoom { path: path.to_owned(), needed, free };
    if fresh && needed > free {
        return Err(no_room(free));
    }
    let failed =
        |source: io::Error| SharedError::Io { path: path.to_owned(), action: "reserve", source };
    if fresh {
        file.set_len(length).map_err(failed)?;
    }
    for part in parts {
        match allocate(file, part.start, part.end - part.start) {
            Ok(()) => {}
            Err(Errno::NOSPC | Errno::FBIG | Errno::NOMEM) => return Err(no_room(free)),
            Err(e) => return Err(failed(e.into())),
        }
    }
    Ok(())
}

/// The kernel's id of this boot: a region (or a claim about one) from another boot is void.
///
/// # Errors
/// When `/proc` is not there or holds something else.
pub fn boot_id() -> io::Result<[u8; 16]> {
    parse_boot_id(&std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "boot_id is not a UUID"))
}

fn parse_boot_id(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.trim().bytes().filter(|&b| b != b'-').collect();
    let mut id = [0; 16];
    if digits.len() != 32 {
        return None;
    }
    for (byte, pair) in id.iter_mut().zip(digits.chunks(2)) {
        let high = char::from(pair[0]).to_digit(16)?;
        let low = char::from(pair[1]).to_digit(16)?;
        *byte = (high << 4 | low) as u8;
    }
    Some(id)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    const BYTES: u64 = 1 << 20;

    #[test]
    fn words_outlive_the_region_and_their_process_alike() {
        let dir = tempfile::tempdir().unwrap();
        let first = SharedRegion::open(dir.path(), "index-1", BYTES).unwrap();
        assert!(first.is_fresh());
        assert_eq!(first.words().len() as u64, BYTES / 8);
        assert_eq!(
            std::fs::metadata(first.path()).unwrap().blocks() * 512,
            BYTES,
            "reserved whole"
        );
        let (left, right) = first.words().split_at(1000);
        let (mut a, mut b) = (Words::from_static(left), Words::from_static(right));
        a.store(7, 42);
        b.store(0, 43);
        let locked = SharedRegion::open(dir.path(), "index-1", BYTES).unwrap_err();
        assert!(matches!(locked, SharedError::InUse { holder: Some(_), .. }), "{locked}");
        drop(first);

        let second = SharedRegion::open(dir.path(), "index-1", BYTES - 100).unwrap();
        assert!(!second.is_fresh());
        let words = Words::from_static(second.words());
        assert_eq!((words.load(7), words.load(1000)), (42, 43));
        drop(second);

        let other = SharedRegion::open(dir.path(), "index-1", 2 * BYTES).unwrap_err();
        assert!(matches!(other, SharedError::SizeDiffers { found: BYTES, .. }), "{other}");
        SharedRegion::remove(dir.path(), "index-1").unwrap();
        SharedRegion::remove(dir.path(), "index-1").unwrap();
        let third = SharedRegion::open(dir.path(), "index-1", 2 * BYTES).unwrap();
        assert!(third.is_fresh() && Words::from_static(third.words()).load(7) == 0);
        assert!(matches!(
            SharedRegion::remove(dir.path(), "index-1"),
            Err(SharedError::InUse { .. })
        ));
    }

    #[test]
    fn a_part_takes_memory_as_it_grows_and_gives_it_back() {
        let dir = tempfile::tempdir().unwrap();
        let page = PAGE / 8;
        let open =
            || SharedRegion::open_in_parts(dir.path(), "grows", 8 << 20, &[0..10, page..2 * page]);
        let region = open().unwrap();
        let held = || std::fs::metadata(region.path()).unwrap().blocks() * 512;
        assert_eq!((held(), region.words().len()), (2 * PAGE as u64, 1 << 20));
        let mut words = region.growing(page..300 * page).unwrap();
        assert_eq!(words.len(), 299 * page);
        assert!(words.supply(page) && held() == 2 * PAGE as u64);
        assert!(words.supply(99 * page + 1) && held() == 101 * PAGE as u64, "{}", held());
        assert!(!words.supply(299 * page + 1));
        words.store(99 * page, 7);
        words.store(9, 8);
        words.give_back(50 * page - 1);
        assert_eq!(held(), 51 * PAGE as u64);
        assert!(words.supply(100 * page) && words.load(99 * page) == 0 && words.load(9) == 8);
        words.store(99 * page, 7);
        drop(region);
        // What it had grown by is there for the next process, which knows nothing of it.
        let region = open().unwrap();
        let mut words = region.growing(page..300 * page).unwrap();
        assert!(words.supply(100 * page) && words.load(99 * page) == 7);
        words.give_back(page);
        assert!(words.supply(100 * page) && words.load(99 * page) == 0 && words.load(9) == 8);
    }

    #[test]
    fn what_is_not_ours_is_never_mapped() {
        let dir = tempfile::tempdir().unwrap();
        let refuse = |name: &str, words: &str| {
            let e = SharedRegion::open(dir.path(), name, BYTES).unwrap_err();
            assert!(e.to_string().contains(words), "{e}");
        };
        let victim = dir.path().join("victim");
        std::fs::write(&victim, b"precious").unwrap();
        symlink(&victim, dir.path().join("link")).unwrap();
        refuse("link", "symbolic link");
        assert!(matches!(
            SharedRegion::remove(dir.path(), "link"),
            Err(SharedError::Foreign { .. })
        ));
        std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o666)).unwrap();
        refuse("victim", "mode 666");
        std::fs::set_permissions(&victim, std::fs::Permissions::from_mode(0o600)).unwrap();
        std::fs::hard_link(&victim, dir.path().join("twin")).unwrap();
        refuse("victim", "2 names");
        assert_eq!(std::fs::read(&victim).unwrap(), b"precious");
        for name in ["", "..", "a/b", ".hidden", &"x".repeat(201)] {
            assert!(
                matches!(SharedRegion::open(dir.path(), name, 1), Err(SharedError::Name(_))),
                "{name}"
            );
        }
        if rustix::process::geteuid().is_root() {
            let theirs = dir.path().join("theirs");
            std::fs::write(&theirs, b"x").unwrap();
            std::os::unix::fs::chown(&theirs, Some(65_534), None).unwrap();
            std::fs::set_permissions(&theirs, std::fs::Permissions::from_mode(0o600)).unwrap();
            refuse("theirs", "user 65534");
        }
    }

    #[test]
    fn no_room_is_an_error_and_leaves_nothing_behind() {
        let dir = tempfile::tempdir_in(SHARED_DIR).or_else(|_| tempfile::tempdir()).unwrap();
        let e = SharedRegion::open(dir.path(), "huge", 1 << 52).unwrap_err();
        assert!(matches!(e, SharedError::NoRoom { .. }), "{e}");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(matches!(
            SharedRegion::open(dir.path(), "max", u64::MAX),
            Err(SharedError::NoRoom { .. })
        ));
    }

    #[test]
    fn boot_ids_are_uuids() {
        assert_eq!(boot_id().unwrap(), boot_id().unwrap());
        let id = parse_boot_id("00ff1122-3344-5566-7788-99aabbccddee\n").unwrap();
        assert_eq!((id[0], id[1], id[15]), (0, 0xff, 0xee));
        for bad in ["", "00ff", "zzff1122-3344-5566-7788-99aabbccddee"] {
            assert_eq!(parse_boot_id(bad), None);
        }
    }
}
