//! Where a file's bytes lie on the disk below its file system.
//!
//! The file system is asked with `FIEMAP` (Linux, Documentation/filesystems/fiemap.rst), and what lies between its device and
//! the whole disk, partitions and loop devices, is read from sysfs. Layers that move blocks about (device mapper, RAID, file
//! systems without a device of their own) are refused: an address on them is none of the disk's.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Pieces of one file that are listed at most.
pub const MOST_EXTENTS: usize = 65_536;
/// Pieces that are asked for at a time.
const BATCH: usize = 128;

/// Why it cannot be said where a file lies.
#[derive(Debug, thiserror::Error)]
pub enum ExtentsError {
    /// The system refuses.
    #[error("'{}': {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is no file.
    #[error("'{}' is no regular file: name one", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// Its file system does not tell, or does not lie on a disk.
    #[error("'{}': {reason}", path.display())]
    Nowhere {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// It is in more pieces than are listed.
    #[error("'{}' lies in more than {MOST_EXTENTS} pieces: defragment it, or name ranges", path.display())]
    TooMany {
        /// The file.
        path: PathBuf,
    },
}

/// A stretch of a file on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// First byte in the file.
    pub logical: u64,
    /// First byte on the disk (from [`FileExtents::of`]: the whole disk, not the partition).
    pub physical: u64,
    /// Bytes.
    pub bytes: u64,
}

/// Where a file lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileExtents {
    /// The whole disk.
    pub disk: Disk,
    /// Its stretches, in the order of the file. Whole blocks: the last may go beyond the end of the file.
    pub extents: Vec<FileExtent>,
    /// Bytes that have no place of their own: compressed, kept with the inode, not written yet.
    pub unplaced: u64,
}

/// A whole disk, and where a file system's device begins on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// Its name: `nbd0`, `vda`.
    pub name: String,
    /// First byte of the file system's device.
    pub start: u64,
    /// Bytes of the disk, where the addresses are its own (they are not where a loop device has an offset).
    pub bytes: Option<u64>,
}

impl FileExtents {
    /// Where the file at `path` lies. What is in memory only is written out first.
    ///
    /// # Errors
    /// [`ExtentsError`].
    pub fn of(path: &Path) -> Result<FileExtents, ExtentsError> {
        let io = |source| ExtentsError::Io { path: path.to_owned(), source };
        // Not blocking: a pipe must not hold us. What it is, is looked at when it is open.
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(io)?;
        if !file.metadata().map_err(io)?.is_file() {
            return Err(ExtentsError::NotAFile { path: path.to_owned() });
        }
        let device = rustix::fs::fstat(&file).map_err(|e| io(e.into()))?.st_dev;
        let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
        let disk = Disk::below(Path::new("/sys/dev/block"), major, minor)
            .map_err(|reason| ExtentsError::Nowhere { path: path.to_owned(), reason })?;
        let (mut extents, mut unplaced, mut from) = (Vec::new(), 0, 0);
        loop {
            let batch = fiemap(&file, from).map_err(|e| match e.raw_os_error() {
                Some(libc::EOPNOTSUPP | libc::ENOTTY) => ExtentsError::Nowhere {
                    path: path.to_owned(),
                    reason: "its file system does not say where files lie".to_owned(),
                },
                _ => io(e),
            })?;
            let Some(last) = batch.last() else { break };
            let (end, is_last) = (last.logical.saturating_add(last.length), last.flags & LAST != 0);
            for piece in &batch {
                if piece.flags & (UNKNOWN | DELALLOC | ENCODED | INLINE | TAIL) != 0 {
                    unplaced += piece.length;
                } else if piece.length > 0 {
                    let physical = piece.physical.saturating_add(disk.start);
                    extents.push(FileExtent {
                        logical: piece.logical,
                        physical,
                        bytes: piece.length,
                    });
                }
            }
            if extents.len() > MOST_EXTENTS {
                return Err(ExtentsError::TooMany { path: path.to_owned() });
            }
            if is_last || end <= from {
                break;
            }
            from = end;
        }
        Ok(FileExtents { disk, extents, unplaced })
    }
}

impl Disk {
    /// The disk below block device `major:minor`; `sys` is `/sys/dev/block`.
    fn below(sys: &Path, major: u32, minor: u32) -> Result<Disk, String> {
        let mut dir =
            std::fs::canonicalize(sys.join(format!("{major}:{minor}"))).map_err(|_| {
                "its file system has no block device of its own (as with btrfs, overlayfs or NFS)"
                    .to_owned()
            })?;
        let number = |dir: &Path, name: &str| -> Option<u64> {
            std::fs::read_to_string(dir.join(name)).ok()?.trim().parse().ok()
        };
        let mut start = 0;
        if dir.join("partition").exists() {
            let sectors = number(&dir, "start")
                .ok_or("where its partition begins cannot be read from sysfs")?;
            start = sectors.saturating_mul(512);
            dir = dir.parent().ok_or("its partition has no disk")?.to_owned();
        }
        let name = dir.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        for (layer, what) in [("dm", "a device-mapper volume (LVM, dm-crypt)"), ("md", "RAID")] {
            if dir.join(layer).exists() {
                return Err(format!(
                    "it lies on {what}, {name}: addresses there are not the disk's"
                ));
            }
        }
        let offset = number(&dir, "loop/offset").unwrap_or(0);
        let bytes = number(&dir, "size").map(|sectors| sectors.saturating_mul(512));
        Ok(Disk { name, start: start.saturating_add(offset), bytes: bytes.filter(|_| offset == 0) })
    }
}

const LAST: u32 = 0x1;
const UNKNOWN: u32 = 0x2;
const DELALLOC: u32 = 0x4;
const ENCODED: u32 = 0x8;
const INLINE: u32 = 0x200;
const TAIL: u32 = 0x400;

/// `struct fiemap_extent` of `linux/fiemap.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Piece {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap`, with room for the answer.
#[repr(C)]
struct Fiemap {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    pieces: [Piece; BATCH],
}

const _: () = assert!(size_of::<Piece>() == 56 && size_of::<Fiemap>() == 32 + 56 * BATCH);

/// The pieces of `file` from byte `from` on, as many as are told at once.
fn fiemap(file: &File, from: u64) -> io::Result<Vec<Piece>> {
    /// `_IOWR('f', 11, struct fiemap)`: of the structure without its array.
    const FS_IOC_FIEMAP: libc::Ioctl =
        (3 << 30 | 32 << 16 | (b'f' as u32) << 8 | 11) as libc::Ioctl;
    const SYNC: u32 = 1;
    let mut map = Box::new(Fiemap {
        start: from,
        length: u64::MAX - from,
        flags: SYNC,
        mapped: 0,
        count: BATCH as u32,
        reserved: 0,
        pieces: [Piece::default(); BATCH],
    });
    // SAFETY: the descriptor is open for the borrow's life. The request reads the 32 bytes of the header and writes them
    // and at most `count` pieces behind them, which are there: the layout is the kernel's.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut *map) };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(map.pieces[..(map.mapped as usize).min(BATCH)].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{FileExt, symlink};

    /// A directory as sysfs has it.
    fn sys() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let put = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("block/nbd0/size", "8192\n");
        put("block/nbd0/nbd0p2/partition", "2\n");
        put("block/nbd0/nbd0p2/start", "2048\n");
        put("block/dm-0/size", "100\n");
        put("block/dm-0/dm/name", "home\n");
        put("block/loop3/size", "100\n");
        put("block/loop3/loop/offset", "1048576\n");
        std::fs::create_dir(dir.path().join("dev")).unwrap();
        for (number, to) in
            [("43:0", "nbd0"), ("43:2", "nbd0/nbd0p2"), ("253:0", "dm-0"), ("7:3", "loop3")]
        {
            symlink(dir.path().join("block").join(to), dir.path().join("dev").join(number))
                .unwrap();
        }
        dir
    }

    #[test]
    fn the_disk_below_a_partition_and_layers_that_are_refused() {
        let dir = sys();
        let below = |major, minor| Disk::below(&dir.path().join("dev"), major, minor);
        let nbd = |start| Disk { name: "nbd0".into(), start, bytes: Some(4 << 20) };
        assert_eq!(below(43, 0), Ok(nbd(0)));
        assert_eq!(below(43, 2), Ok(nbd(1 << 20)));
        let at_offset = Disk { name: "loop3".into(), start: 1 << 20, bytes: None };
        assert_eq!(below(7, 3), Ok(at_offset));
        assert!(below(253, 0).unwrap_err().contains("device-mapper"));
        assert!(below(0, 45).unwrap_err().contains("no block device"));
    }

    /// A file of two stretches with a hole between: its folder, its path and its bytes.
    fn placed() -> (tempfile::TempDir, std::path::PathBuf, Vec<u8>) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let mut bytes = vec![0u8; 3 << 20];
        let mut state = 88_172_645_463_325_252u64;
        for chunk in bytes.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            chunk.copy_from_slice(&state.to_le_bytes());
        }
        let file = File::create(&path).unwrap();
        file.write_all_at(&bytes[..1 << 20], 0).unwrap();
        file.write_all_at(&bytes[2 << 20..], 2 << 20).unwrap();
        file.sync_all().unwrap();
        (dir, path, bytes)
    }

    #[test]
    #[cfg_attr(
        without = "disk",
        ignore = "needs a temporary directory on a disk, with ext4, XFS or F2FS (TMPDIR)"
    )]
    fn places_are_those_of_what_was_written() {
        let (_dir, path, _) = placed();
        let found = FileExtents::of(&path).unwrap();
        let placed: u64 = found.extents.iter().map(|e| e.bytes).sum();
        assert_eq!(placed + found.unplaced, 2 << 20, "{found:?}");
        let inside = |e: &FileExtent| e.logical + e.bytes <= 1 << 20 || e.logical >= 2 << 20;
        assert!(found.extents.iter().all(inside), "{found:?}");
    }

    /// What a file holds is found at the places that are named, read past the file system.
    #[test]
    #[cfg_attr(
        without = "disk-to-read",
        ignore = "needs the right to read the disk of the temporary directory (root)"
    )]
    fn the_bytes_are_where_it_says() {
        let (_dir, path, bytes) = placed();
        let found = FileExtents::of(&path).unwrap();
        let disk = Path::new("/dev").join(&found.disk.name);
        // Past the page cache of the disk, which knows nothing of what the file system writes.
        let disk = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(disk);
        let disk = disk.unwrap();
        for extent in &found.extents {
            let mut there = crate::AlignedBuf::zeroed(extent.bytes as usize);
            disk.read_exact_at(&mut there, extent.physical).unwrap();
            let at = extent.logical as usize;
            assert!(there[..] == bytes[at..at + there.len()], "{extent:?}");
        }
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        assert!(matches!(FileExtents::of(dir.path()), Err(ExtentsError::NotAFile { .. })));
        assert!(matches!(FileExtents::of(&dir.path().join("none")), Err(ExtentsError::Io { .. })));
    }
}
