//! A flash file or a raw block device.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_base::ByteSize;
use rustix::fs::{Advice, AtFlags, FallocateFlags, OFlags, StatxFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::{CHUNK, Device, Geometry, check_range, os};
use crate::buffer::{AlignedBuf, PAGE};
use crate::error::{DeviceError, IoOp};
use crate::lock::{Refused, lock_exclusive, lock_shared};

/// Which device, and how to open it.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// A regular file (made when absent) or a block device.
    pub path: PathBuf,
    /// Size to create a file with. An existing file must have this size; of a block device only the first so many
    /// bytes are used. `None`: whatever is there.
    pub size: Option<ByteSize>,
    /// Reserve the whole file at once instead of leaving it sparse: it can then never run out of space later.
    pub preallocate: bool,
    /// Go past the page cache where the file system allows it. `false` only for comparisons: through the page cache
    /// every object is cached twice.
    pub direct: bool,
    /// What is smaller than this, in bytes, is refused.
    pub least: u64,
    /// A file of another size than [`DeviceOptions::size`] is made anew with that size, and what it holds is lost.
    pub remake: bool,
    /// Open it to be read only: nothing is made, and it is locked against those who would write.
    pub read_only: bool,
}

impl DeviceOptions {
    /// `path` with the defaults: existing size, sparse, direct.
    pub fn new(path: impl Into<PathBuf>) -> DeviceOptions {
        DeviceOptions {
            path: path.into(),
            size: None,
            preallocate: false,
            direct: true,
            least: PAGE as u64,
            remake: false,
            read_only: false,
        }
    }

    /// The same, to be read only.
    #[must_use]
    pub fn read_only(mut self) -> DeviceOptions {
        self.read_only = true;
        self
    }

    /// The same with a size.
    #[must_use]
    pub fn size(mut self, size: ByteSize) -> DeviceOptions {
        self.size = Some(size);
        self
    }
}

/// A flash file or raw block device, open and locked for this process alone.
///
/// The lock is on the open file itself, so it ends only when the last read or write in flight has ended: after a
/// `kill -9` nothing of the dead process can land on the device once the next one has opened it.
#[derive(Debug)]
pub struct FlashDevice {
    name: Arc<str>,
    file: File,
    /// For a block device: a second descriptor, opened `O_EXCL`, that keeps it from being mounted.
    _claim: Option<File>,
    geometry: Geometry,
    is_block_device: bool,
    created: bool,
    /// Why reads and writes go through the page cache, if they do.
    buffered: Option<String>,
    /// What the address of memory must be a multiple of for direct I/O.
    memory_unit: usize,
}

impl FlashDevice {
    /// Opens (or creates) and locks the device.
    ///
    /// # Errors
    /// One for each way in which `options` cannot be met; nothing is changed on an existing file or device, and no new
    /// file is left behind.
    pub fn open(options: &DeviceOptions) -> Result<FlashDevice, DeviceError> {
        let absent = std::fs::symlink_metadata(&options.path)
            .is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
        let opened = Self::open_or_create(options);
        // One that another process has made and locked meanwhile is not ours to remove.
        if absent && matches!(&opened, Err(e) if !matches!(e, DeviceError::InUse { .. })) {
            let _ = std::fs::remove_file(&options.path);
        }
        opened
    }

    /// Looks whether another process has the file or block device at `path`, and lets go of it again: for who has something
    /// to do before [`FlashDevice::open`] that others would take for success. Anything else that is wrong is left to that call.
    ///
    /// # Errors
    /// [`DeviceError::InUse`].
    pub fn refuse_in_use(path: &Path) -> Result<(), DeviceError> {
        let device = path.display().to_string().into();
        let usable = |m: &Metadata| m.is_file() || m.file_type().is_block_device();
        if !std::fs::metadata(path).is_ok_and(|m| usable(&m)) {
            return Ok(());
        }
        let flags = (OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as i32;
        let Ok(file) = OpenOptions::new().read(true).custom_flags(flags).open(path) else {
            return Ok(());
        };
        match lock_shared(file.as_fd()) {
            Err(Refused::Held(holder)) => Err(DeviceError::InUse { device, holder }),
            Ok(()) | Err(Refused::Failed(_)) => Ok(()),
        }
    }

    fn open_or_create(options: &DeviceOptions) -> Result<FlashDevice, DeviceError> {
        let name: Arc<str> = options.path.display().to_string().into();
        let failed = |action: &'static str| {
            let device = name.clone();
            move |source: io::Error| DeviceError::Open { device, action, source }
        };
        let is_block_device = match std::fs::metadata(&options.path) {
            Ok(found) if found.is_file() => false,
            Ok(found) if found.file_type().is_block_device() => true,
            Ok(found) => {
                return Err(DeviceError::NotADevice { device: name, kind: kind_of(&found) });
            }
            // Without a size there is nothing to create; leave no empty file behind.
            Err(e) if e.kind() == io::ErrorKind::NotFound && options.size.is_some() => false,
            Err(e) if e.kind() == io::ErrorKind::NotFound && parent_exists(&options.path) => {
                return Err(DeviceError::SizeMissing { device: name });
            }
            Err(e) => return Err(failed("open")(e)),
        };
        if !options.path.exists() && !options.read_only && lies_under_dev(&options.path) {
            return Err(DeviceError::UnderDev { device: name });
        }
        let file = OpenOptions::new()
            .read(true)
            .write(!options.read_only)
            .create(!is_block_device && !options.read_only)
            .truncate(false)
            .mode(0o600)
            .custom_flags((OFlags::CLOEXEC | OFlags::NONBLOCK).bits() as i32)
            .open(&options.path)
            .map_err(failed("open"))?;
        // The path may have come to name something else since it was looked at.
        let found = file.metadata().map_err(failed("look at"))?;
        if found.file_type().is_block_device() != is_block_device
            || !(is_block_device || found.is_file())
        {
            return Err(DeviceError::NotADevice { device: name, kind: kind_of(&found) });
        }
        let lock = if options.read_only { lock_shared } else { lock_exclusive };
        lock(file.as_fd()).map_err(|refused| match refused {
            Refused::Held(holder) => DeviceError::InUse { device: name.clone(), holder },
            Refused::Failed(e) => failed("lock")(e),
        })?;

        // O_NONBLOCK was only for the opening (of a pipe, say): io_uring would answer EAGAIN where it has to wait.
        let flags = rustix::fs::fcntl_getfl(&file).map_err(|e| failed("prepare")(e.into()))?;
        let flags = flags - OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(&file, flags).map_err(|e| failed("prepare")(e.into()))?;
        // Only the owner may ask that reads leave the access time alone; others lose a little speed.
        let _ = rustix::fs::fcntl_setfl(&file, flags | OFlags::NOATIME);

        let mut device = FlashDevice {
            name: name.clone(),
            file,
            _claim: None,
            geometry: Geometry { size: 0, block: 512 },
            is_block_device,
            created: false,
            buffered: None,
            memory_unit: 1,
        };
        if is_block_device {
            device.claim(options)?;
        } else {
            device.size_file(options)?;
        }
        let least = options.least.max(PAGE as u64);
        if device.geometry.size < least {
            // As large as it is, not as much of it as could be used.
            let size = match options.size {
                None if !is_block_device => device.file.metadata().map_or(0, |m| m.len()),
                _ => device.geometry.size,
            };
            return Err(DeviceError::TooSmall { device: name, size, least });
        }
        device.go_direct(options.direct).map_err(failed("prepare"))?;
        if device.buffered.is_some() {
            // 4 KiB reads at random must not become 128 KiB ones. Advice: where it is refused, nothing is lost.
            let _ = rustix::fs::fadvise(&device.file, 0, None, Advice::Random);
        } else {
            // What the page cache has of the file, from whoever wrote it, would be looked up and thrown away page by page, by
            // direct writes that the kernel hands to a thread for it.
            let _ = rustix::fs::fadvise(&device.file, 0, None, Advice::DontNeed);
        }
        Ok(device)
    }

    /// A block device: its size, and a claim that keeps others from mounting it.
    fn claim(&mut self, options: &DeviceOptions) -> Result<(), DeviceError> {
        let failed =
            |action, source| DeviceError::Open { device: self.name.clone(), action, source };
        // Opened only after the lock is ours: a former owner's claim is gone by then, so "busy" now means mounted.
        let claim = OpenOptions::new()
            .read(true)
            .custom_flags((OFlags::CLOEXEC | OFlags::EXCL).bits() as i32)
            .open(&options.path)
            .map_err(|e| failed("claim", e))?;
        let size =
            os::block_device_size(self.file.as_fd()).map_err(|e| failed("read the size of", e))?;
        let usable = size / PAGE as u64 * PAGE as u64;
        let wanted = options.size.map_or(usable, |s| s.0 / PAGE as u64 * PAGE as u64);
        if wanted > usable {
            return Err(DeviceError::SizeDiffers {
                device: self.name.clone(),
                found: size,
                wanted,
            });
        }
        let sector = rustix::fs::ioctl_blksszget(&self.file)
            .map_err(|e| failed("read the sector size of", e.into()))?;
        self.geometry = Geometry { size: wanted, block: sector.clamp(512, PAGE as u32) };
        self._claim = Some(claim);
        Ok(())
    }

    /// A regular file: its size, given to it first if it is new.
    fn size_file(&mut self, options: &DeviceOptions) -> Result<(), DeviceError> {
        let failed =
            |action, source| DeviceError::Open { device: self.name.clone(), action, source };
        let mut length = self.file.metadata().map_err(|e| failed("read the size of", e))?.len();
        let wanted = options.size.map(|s| s.0 / PAGE as u64 * PAGE as u64);
        let usable = length / PAGE as u64 * PAGE as u64;
        // What would be refused anyway is left as it is.
        let remake = length > 0
            && options.remake
            && !options.read_only
            && wanted.is_some_and(|w| w != usable && w >= options.least.max(PAGE as u64));
        if length == 0 || remake {
            let Some(size) = wanted else {
                return Err(DeviceError::SizeMissing { device: self.name.clone() });
            };
            if size == 0 {
                return Err(DeviceError::TooSmall {
                    device: self.name.clone(),
                    size,
                    least: PAGE as u64,
                });
            }
            // Checked beforehand because passing the limit raises a signal (SIGXFSZ) that ends the process.
            if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < size) {
                return Err(failed("create", io::Error::from_raw_os_error(libc::EFBIG)));
            }
            if remake {
                rustix::fs::ftruncate(&self.file, 0).map_err(|e| failed("create", e.into()))?;
            }
            if options.preallocate {
                self.reserve(size)?;
            } else {
                rustix::fs::ftruncate(&self.file, size).map_err(|e| failed("create", e.into()))?;
            }
            // The length must survive a power cut together with what will be written, and so must the name.
            self.file.sync_all().map_err(|e| failed("create", e))?;
            if let Some(parent) = options.path.parent() {
                let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
                File::open(parent).and_then(|d| d.sync_all()).map_err(|e| failed("create", e))?;
            }
            self.created = !remake;
            length = size;
        }
        let usable = length / PAGE as u64 * PAGE as u64;
        if let Some(wanted) = wanted.filter(|&w| w != usable) {
            return Err(DeviceError::SizeDiffers {
                device: self.name.clone(),
                found: length,
                wanted,
            });
        }
        self.geometry = Geometry { size: usable, block: 512 };
        Ok(())
    }

    fn reserve(&self, size: u64) -> Result<(), DeviceError> {
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, size) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::NOSPC) => {
                    // Give back what was reserved before the space ran out.
                    let _ = rustix::fs::ftruncate(&self.file, 0);
                    let free =
                        rustix::fs::fstatvfs(&self.file).map_or(0, |v| v.f_bavail * v.f_frsize);
                    return Err(DeviceError::NoSpace {
                        device: self.name.clone(),
                        needed: size,
                        free,
                    });
                }
                Err(e) => {
                    return Err(DeviceError::Open {
                        device: self.name.clone(),
                        action: "reserve the space of",
                        source: e.into(),
                    });
                }
            }
        }
    }

    /// Turns on `O_DIRECT` and proves it by a read; where it cannot be had, notes why.
    fn go_direct(&mut self, wanted: bool) -> io::Result<()> {
        if !wanted {
            self.buffered = Some("direct I/O was turned off".to_owned());
            return Ok(());
        }
        let flags = rustix::fs::fcntl_getfl(&self.file)?;
        if let Err(e) = rustix::fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT) {
            self.buffered =
                Some(format!("the file system refuses O_DIRECT ({})", io::Error::from(e)));
            return Ok(());
        }
        let mut refused = None;
        let mut memory_unit = PAGE as u32;
        let mut block = if self.is_block_device { self.geometry.block } else { PAGE as u32 };
        // Since Linux 6.1 the file system says what it wants; before, a page suits every one in use.
        if let Ok(stat) =
            rustix::fs::statx(&self.file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)
            && stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0
        {
            (memory_unit, block) = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
            if memory_unit == 0 || block == 0 {
                refused = Some("the file system has no direct I/O for this file".to_owned());
            } else if block as usize > PAGE || memory_unit as usize > PAGE {
                refused = Some(format!(
                    "direct I/O would need blocks of {} bytes",
                    block.max(memory_unit)
                ));
            }
        }
        if refused.is_none() {
            let mut page = AlignedBuf::zeroed(PAGE);
            match os::read_full(self.file.as_fd(), 0, &mut page, PAGE) {
                Ok(()) => {}
                Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {
                    refused = Some("the file system refuses direct reads".to_owned());
                }
                // Anything else is the device's own trouble and will show again where it is dealt with.
                Err(_) => {}
            }
        }
        if refused.is_some() {
            rustix::fs::fcntl_setfl(&self.file, flags)?;
            self.buffered = refused;
        } else {
            self.geometry.block = block.next_power_of_two().clamp(512, PAGE as u32);
            self.memory_unit = memory_unit.max(1) as usize;
        }
        Ok(())
    }

    /// Whether I/O goes past the page cache.
    pub fn is_direct(&self) -> bool {
        self.buffered.is_none()
    }

    /// Why I/O goes through the page cache, when it does.
    pub fn why_buffered(&self) -> Option<&str> {
        self.buffered.as_deref()
    }

    /// Whether it is a raw block device rather than a file.
    pub fn is_block_device(&self) -> bool {
        self.is_block_device
    }

    /// Whether this call to [`FlashDevice::open`] made the file.
    pub fn was_created(&self) -> bool {
        self.created
    }

    /// Makes a hole of a range (whole blocks): it takes up no space and reads as zeros from now on, durably after the next
    /// sync.
    ///
    /// # Errors
    /// As [`Device::write_at`]; also where no holes can be made, as on a raw device.
    pub fn punch(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        check_range(self, IoOp::Discard, offset, len)?;
        let result = if self.is_block_device {
            Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
        } else {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.file, punch, offset, len).map_err(io::Error::from)
        };
        match result {
            Err(e) => Err(self.io_error(IoOp::Discard, offset, len)(e)),
            Ok(()) => Ok(()),
        }
    }

    /// Has the first `bytes` of a file take up their space now, so that writes there do not fail for want of it. What they
    /// hold stays. Does nothing on a raw device, and where a file system has no such call.
    ///
    /// # Errors
    /// [`DeviceError::NoSpace`] where there is not as much; [`DeviceError::Open`] for other failures.
    pub fn allocate(&self, bytes: u64) -> Result<(), DeviceError> {
        if self.is_block_device {
            return Ok(());
        }
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::KEEP_SIZE, 0, bytes) {
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::NOSPC | Errno::DQUOT) => {
                    let free =
                        rustix::fs::fstatvfs(&self.file).map_or(0, |v| v.f_bavail * v.f_frsize);
                    return Err(DeviceError::NoSpace {
                        device: self.name.clone(),
                        needed: bytes,
                        free,
                    });
                }
                Err(e) => {
                    return Err(DeviceError::Open {
                        device: self.name.clone(),
                        action: "reserve the space of",
                        source: e.into(),
                    });
                }
            }
        }
    }

    /// The file was removed: nobody finds it any more, and it goes when it is closed.
    pub fn is_unlinked(&self) -> bool {
        !self.is_block_device && self.file.metadata().is_ok_and(|m| m.nlink() == 0)
    }

    /// The first byte from `offset` on that is not in a hole, as far as that can be told; `None` behind the last.
    pub fn next_data(&self, offset: u64) -> Option<u64> {
        if self.is_block_device {
            return Some(offset);
        }
        // All reads and writes say where: nobody minds where the file stands.
        match rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(offset)) {
            Ok(at) => Some(at.max(offset)),
            Err(Errno::NXIO) => None,
            Err(_) => Some(offset),
        }
    }

    /// Bytes that the file takes up on its file system now (less than its size while it is sparse).
    ///
    /// # Errors
    /// [`DeviceError::Open`] when the file cannot be looked at.
    pub fn allocated(&self) -> Result<u64, DeviceError> {
        let found = self.file.metadata().map_err(|source| DeviceError::Open {
            device: self.name.clone(),
            action: "look at",
            source,
        })?;
        Ok(if self.is_block_device { self.geometry.size } else { found.blocks() * 512 })
    }

    fn io_error(&self, op: IoOp, offset: u64, len: u64) -> impl FnOnce(io::Error) -> DeviceError {
        let device = self.name.clone();
        move |source| DeviceError::Io { device, op, offset, len, source }
    }

    /// Whether memory at `start` may be read into or written from directly.
    fn suits_memory(&self, start: *const u8) -> bool {
        !self.is_direct() || (start as usize).is_multiple_of(self.memory_unit)
    }
}

impl Device for FlashDevice {
    fn name(&self) -> &Arc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), DeviceError> {
        check_range(self, IoOp::Read, offset, out.len() as u64)?;
        let fail = self.io_error(IoOp::Read, offset, out.len() as u64);
        let unit = self.read_unit() as usize;
        if offset.is_multiple_of(unit as u64)
            && out.len().is_multiple_of(unit)
            && self.suits_memory(out.as_ptr())
        {
            return os::read_full(self.file.as_fd(), offset, out, unit).map_err(fail);
        }
        // By way of aligned memory, whole blocks at a time.
        let end = offset + out.len() as u64;
        let mut at = offset / unit as u64 * unit as u64;
        let last = end.next_multiple_of(unit as u64);
        let mut bounce = AlignedBuf::zeroed(CHUNK.min((last - at) as usize));
        while at < end {
            let take = bounce.capacity().min(CHUNK).min((last - at) as usize);
            bounce.set_len(take);
            if let Err(e) = os::read_full(self.file.as_fd(), at, &mut bounce, unit) {
                return Err(fail(e));
            }
            let (from, to) = (at.max(offset), (at + take as u64).min(end));
            out[(from - offset) as usize..(to - offset) as usize]
                .copy_from_slice(&bounce[(from - at) as usize..(to - at) as usize]);
            at += take as u64;
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        check_range(self, IoOp::Write, offset, bytes.len() as u64)?;
        let fail = self.io_error(IoOp::Write, offset, bytes.len() as u64);
        let unit = self.geometry.block as usize;
        if self.suits_memory(bytes.as_ptr()) {
            return os::write_full(self.file.as_fd(), offset, bytes, unit).map_err(fail);
        }
        let mut bounce = AlignedBuf::zeroed(CHUNK.min(bytes.len()));
        for (i, chunk) in bytes.chunks(CHUNK).enumerate() {
            bounce.set_len(chunk.len());
            bounce.copy_from_slice(chunk);
            if let Err(e) =
                os::write_full(self.file.as_fd(), offset + (i * CHUNK) as u64, &bounce, unit)
            {
                return Err(fail(e));
            }
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), DeviceError> {
        loop {
            match rustix::fs::fdatasync(&self.file) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(e) => return Err(self.io_error(IoOp::Sync, 0, self.geometry.size)(e.into())),
            }
        }
    }

    fn discard(&self, offset: u64, len: u64) -> Result<(), DeviceError> {
        check_range(self, IoOp::Discard, offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let result = if self.is_block_device {
            os::block_device_discard(self.file.as_fd(), offset, len)
        } else {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&self.file, punch, offset, len).map_err(io::Error::from)
        };
        match result {
            Err(e) if e.raw_os_error() != Some(libc::EOPNOTSUPP) => {
                Err(self.io_error(IoOp::Discard, offset, len)(e))
            }
            _ => Ok(()),
        }
    }

    fn raw(&self) -> Option<BorrowedFd<'_>> {
        Some(self.file.as_fd())
    }

    fn read_unit(&self) -> u32 {
        if self.is_direct() { self.geometry.block } else { 1 }
    }
}

fn kind_of(found: &std::fs::Metadata) -> &'static str {
    let t = found.file_type();
    if t.is_dir() {
        "a directory"
    } else if t.is_char_device() {
        "a character device"
    } else if t.is_fifo() {
        "a pipe"
    } else if t.is_socket() {
        "a socket"
    } else {
        "neither a file nor a block device"
    }
}

/// Whether a file of this path would lie under `/dev`, where a name that is not there is a device that is not there (a
/// mistyped one, one that is not plugged in) and a file would take memory. `/dev/shm` is for files.
fn lies_under_dev(path: &Path) -> bool {
    /// The kernel follows no more.
    const LINKS: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..=LINKS {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let parent = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
        if parent.starts_with("/dev") && !parent.starts_with("/dev/shm") {
            return true;
        }
        // A link that leads nowhere is made by following it, to the last.
        match std::fs::read_link(&path) {
            Ok(link) => path = parent.join(link),
            Err(_) => return false,
        }
    }
    false
}

fn parent_exists(path: &Path) -> bool {
    path.parent().is_none_or(|p| p.as_os_str().is_empty() || p.is_dir())
}
