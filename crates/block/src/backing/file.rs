//! A file or block device.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use larder_runtime::{FileDone, FileHandle, FileOp, FileQueue, PAGE, RingChoice};
use rustix::fs::{AtFlags, FlockOperation, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno as Os;

use super::device_name::lasting_name;
use super::identity::FOREIGN;
use super::notes::{self, Notes};
use super::steps::Steps;
use super::{About, Backing, BackingError, Identity, Session, StoreTrouble, Uri};
use crate::nbd::wire::{Errno, MAX_PAYLOAD};
use crate::op::{Done, Extent, Failure, Op, Outcome};

/// Operations under way in one session.
const DEPTH: u32 = 256;
/// Threads of one session, where there is no io_uring.
const THREADS: u32 = 8;
/// Between two looks at how long a file is that is in use.
const LOOK: Duration = Duration::from_millis(500);
/// Extents of one status.
const MAX_EXTENTS: usize = 256;
/// Offset and length of direct transfers are multiples of this: every device's blocks divide it.
const DIRECT_UNIT: u32 = 4096;

/// See the [module](self).
#[derive(Debug)]
pub struct FileBacking {
    uri: String,
    about: About,
    /// Bytes: it may grow.
    size: Arc<AtomicU64>,
    cut: Arc<Cut>,
    /// A block device.
    device: bool,
    handles: Handles,
    ring: RingChoice,
    notes: Arc<Notes>,
    /// The run that made the last change that was there at the opening, as its notes say; 0 if none says so.
    last_by: u64,
    /// When it was last changed, as it was found at the opening.
    opened_ns: i128,
}

/// The open file, through the page cache and past it.
#[derive(Clone, Debug)]
struct Handles {
    buffered: FileHandle,
    direct: Option<FileHandle>,
}

/// A file that somebody has cut short while it is served. What lay behind its end is gone: it would read as zeroes when it
/// grows again, so it is not read any more.
#[derive(Debug)]
struct Cut {
    /// The fewest bytes that it was seen to have; the most there can be as long as it was not cut.
    end: AtomicU64,
    since: Mutex<Option<Instant>>,
}

impl Cut {
    fn none() -> Cut {
        Cut { end: AtomicU64::new(u64::MAX), since: Mutex::new(None) }
    }

    /// Its first byte that is gone, if any is.
    fn end(&self) -> Option<u64> {
        Some(self.end.load(Ordering::Relaxed)).filter(|&end| end < u64::MAX)
    }

    /// The file was seen to have `found` bytes instead of `wanted`.
    fn look(&self, uri: &str, found: u64, wanted: u64, now: Instant) {
        if found >= wanted || found >= self.end.fetch_min(found, Ordering::SeqCst) {
            return;
        }
        self.since.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(now);
        tracing::error!("backing store {}", Cut::text(uri, found, wanted));
    }

    fn text(uri: &str, end: u64, wanted: u64) -> String {
        format!(
            "'{uri}' was cut short by something else, from {wanted} to {end} bytes: what lay behind is answered with errors; \
             restore the file from a copy, then detach the volume and attach it again"
        )
    }
}

impl FileBacking {
    /// Opens it, and locks it: against other writers, and against writers if it is only to be read. With `direct`, whole
    /// blocks go past the page cache where the file system allows it; other ranges go through it.
    ///
    /// # Errors
    /// [`BackingError::Open`], naming the remedy.
    pub fn open(uri: &Uri, options: &super::OpenOptions) -> Result<FileBacking, BackingError> {
        let Uri::File { path } = uri else {
            return Err(BackingError::Uri { uri: uri.to_string(), reason: "not a file".into() });
        };
        FileBacking::open_path(uri.to_string(), path, options, RingChoice::Auto)
    }

    fn open_path(
        uri: String,
        path: &Path,
        how: &super::OpenOptions,
        ring: RingChoice,
    ) -> Result<FileBacking, BackingError> {
        let (read_only, direct) = (how.read_only, how.direct);
        let bad = |reason: String| BackingError::Open { uri: uri.clone(), reason };
        let mut options = OpenOptions::new();
        options.read(true).write(!read_only);
        let file = options.open(path).map_err(|e| {
            bad(match e.kind() {
                std::io::ErrorKind::NotFound => {
                    "does not exist: name an existing file or block device".into()
                }
                std::io::ErrorKind::PermissionDenied if !read_only => {
                    "this user may not write to it: give the right to, or attach it read-only"
                        .into()
                }
                _ => larder_runtime::plain(&e),
            })
        })?;
        let meta = file.metadata().map_err(|e| bad(e.to_string()))?;
        let device = meta.file_type().is_block_device();
        if !device && !meta.is_file() {
            return Err(bad("is neither a regular file nor a block device".into()));
        }
        if how.lease {
            let (lock, who) = match read_only {
                false => {
                    (FlockOperation::NonBlockingLockExclusive, "another process has it locked")
                }
                true => (
                    FlockOperation::NonBlockingLockShared,
                    "another process has it locked for writing",
                ),
            };
            rustix::fs::flock(&file, lock).map_err(|e| {
                bad(if e == Os::WOULDBLOCK {
                    match larder_runtime::holder(file.as_fd()) {
                        Some(by) if by.pid == std::process::id() => {
                            "is locked by this daemon itself, which has it as another volume or as its cache".into()
                        }
                        Some(by) => format!("{who}, {by}: stop that one first"),
                        None => format!("{who}: stop that one first"),
                    }
                } else {
                    format!("cannot be locked: {e}; say --no-lease if nobody else writes to it")
                })
            })?;
        }
        let size = size_of_file(&file).map_err(|e| bad(format!("its size: {e}")))?;
        if size == 0 {
            return Err(bad("is empty: give it the size that the volume is to have".into()));
        }
        let direct_file = if direct {
            let flags = OFlags::DIRECT.bits() as i32;
            options.custom_flags(flags).open(path).ok()
        } else {
            None
        };
        if direct && direct_file.is_none() {
            tracing::warn!("backing store '{uri}' has no direct access here: using the page cache");
        }
        let handles = Handles {
            buffered: FileHandle::new(OwnedFd::from(file), 1),
            direct: direct_file.map(|f| FileHandle::new(OwnedFd::from(f), DIRECT_UNIT)),
        };
        let about = About {
            size,
            read_only,
            trim: true,
            fast_zero: true,
            status: !device,
            minimum: 1,
            maximum: MAX_PAYLOAD,
        };
        let run = super::nonce().map_err(|e| bad(e.to_string()))?;
        let meta = rustix::fs::fstat(&handles.buffered).map_err(|e| bad(e.to_string()))?;
        let (notes, former) = if device || read_only {
            (Notes::open(None, "", run).0, None)
        } else {
            let place = file_system(&handles.buffered).max(1);
            Notes::open(how.notes.as_deref(), &format!("file-{place:x}-{:x}", meta.st_ino), run)
        };
        let writer = notes::writer(&handles.buffered);
        let last_by = former
            .filter(|f| f.explains(notes::changed_ns(&meta), notes::boot_ns(), writer))
            .map_or(0, |f| f.run);
        let (size, notes) = (Arc::new(AtomicU64::new(size)), Arc::new(notes));
        let opened_ns = notes::changed_ns(&meta);
        let cut = Arc::new(Cut::none());
        Ok(FileBacking { uri, about, size, cut, device, handles, ring, notes, last_by, opened_ns })
    }
}

/// What the file system calls itself; 0 if it does not.
fn file_system(file: impl AsFd) -> u64 {
    rustix::fs::fstatvfs(file).map_or(0, |found| found.f_fsid)
}

/// How long a regular file is, as far as that is known here: a server that has it is not asked, since it may hang.
fn length(file: impl AsFd) -> Option<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(file, "", flags, StatxFlags::SIZE).ok().map(|found| found.stx_size)
}

/// Of a regular file or a block device, bytes: both know where they end.
fn size_of_file(file: &File) -> std::io::Result<u64> {
    let end = rustix::fs::seek(file, SeekFrom::End(0))?;
    Ok(end)
}

impl Backing for FileBacking {
    fn uri(&self) -> &str {
        &self.uri
    }

    fn about(&self) -> About {
        About { size: self.size.load(Ordering::SeqCst), ..self.about }
    }

    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        let bad = |reason: String| BackingError::Open { uri: self.uri.clone(), reason };
        let before = self.about().size;
        let find = || {
            let found = rustix::fs::seek(&self.handles.buffered, SeekFrom::End(0));
            found.map_err(|e| bad(format!("its size: {e}")))
        };
        let mut now = find()?;
        if let Some(bytes) = bytes.filter(|&b| b > now) {
            if self.device {
                return Err(bad(format!("it is a device of {now} bytes: make that larger first")));
            }
            if self.about.read_only {
                return Err(bad("it is open to be read only".into()));
            }
            self.notes.changing(&self.handles.buffered);
            rustix::fs::ftruncate(&self.handles.buffered, bytes)
                .and_then(|()| rustix::fs::fsync(&self.handles.buffered))
                .map_err(|e| bad(format!("it cannot be made larger: {e}")))?;
            self.notes.changed();
            now = find()?;
        }
        if now < before {
            return Err(bad(format!("it had {before} bytes and has {now}: restore its size")));
        }
        if let Some(bytes) = bytes.filter(|&b| b < now) {
            return Err(bad(format!(
                "it has {now} bytes already, more than {bytes}: say no size, or that"
            )));
        }
        self.size.store(now, Ordering::SeqCst);
        Ok(now)
    }

    fn place(&self) -> String {
        // Whatever it is called.
        match rustix::fs::fstat(&self.handles.buffered) {
            Ok(meta) if self.device => format!("device {:x}", meta.st_rdev),
            Ok(meta) => format!("file {:x}:{:x}", meta.st_dev, meta.st_ino),
            Err(_) => self.uri.clone(),
        }
    }

    fn trouble(&self) -> Option<StoreTrouble> {
        let wanted = self.about().size;
        if !self.device
            && let Some(found) = length(&self.handles.buffered)
        {
            self.cut.look(&self.uri, found, wanted, Instant::now());
        }
        let end = self.cut.end()?;
        let since = *self.cut.since.lock().unwrap_or_else(PoisonError::into_inner);
        Some(StoreTrouble {
            state: "shrunk",
            since: since.unwrap_or_else(Instant::now),
            what: Cut::text(&self.uri, end, wanted),
        })
    }

    fn identity(&self) -> Result<Identity, BackingError> {
        let bad = |reason: String| BackingError::Open { uri: self.uri.clone(), reason };
        // The descriptor, not the name: what was cached is this file's, whatever has taken its place meanwhile.
        let stat = || rustix::fs::fstat(&self.handles.buffered).map_err(|e| bad(e.to_string()));
        let mut meta = stat()?;
        if self.device {
            let name = lasting_name(meta.st_rdev).unwrap_or_else(|| self.uri.clone());
            return Ok(Identity::Blind { name, size: self.about().size });
        }
        // Times are as fine as the kernel's ticks: whoever writes next shall have another one.
        if notes::is_recent(&meta) {
            std::thread::sleep(notes::TICK);
            meta = stat()?;
        }
        // Whoever lets go says what the file is like, and so must not pass off somebody else's change as what is cached.
        let mut changed_ns = notes::changed_ns(&meta);
        let own =
            changed_ns == self.opened_ns || self.notes.explains(changed_ns, &self.handles.buffered);
        if !own {
            tracing::warn!(
                "'{}' was changed by something else while it was attached: what is cached of it will not be used again; \
                 write to it by this server alone",
                self.uri
            );
            changed_ns = FOREIGN;
        }
        Ok(Identity::File {
            device: meta.st_dev,
            file_system: file_system(&self.handles.buffered),
            inode: meta.st_ino,
            size: meta.st_size as u64,
            changed_ns,
            run: self.notes.run(),
            last_by: self.last_by,
        })
    }

    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        let queue = FileQueue::open(self.ring, DEPTH, THREADS)
            .map_err(|reason| BackingError::Open { uri: self.uri.clone(), reason })?;
        let session = FileSession {
            uri: self.uri.as_str().into(),
            size: self.size.clone(),
            cut: self.cut.clone(),
            looked: None,
            device: self.device,
            handles: self.handles.clone(),
            notes: self.notes.clone(),
            queue,
            waiting: Vec::new(),
            free: Vec::new(),
            in_flight: 0,
            ready: Vec::new(),
        };
        Ok(Box::new(Steps::new(session)))
    }
}

/// An operation with the queue: what its buffer is put back into.
enum Waiting {
    Free,
    Op { token: u64, op: Shape },
}

/// An operation without its buffer.
#[derive(Clone, Copy)]
enum Shape {
    Read { offset: u64 },
    Write { offset: u64, fua: bool },
    Flush,
    Trim { offset: u64, len: u32, fua: bool, sync: bool },
    WriteZeroes { offset: u64, len: u32, fua: bool, may_punch: bool, fast: bool },
}

struct FileSession {
    uri: Arc<str>,
    size: Arc<AtomicU64>,
    cut: Arc<Cut>,
    /// When it was last looked how long the file is.
    looked: Option<Instant>,
    device: bool,
    handles: Handles,
    notes: Arc<Notes>,
    queue: FileQueue,
    /// By the queue's token.
    waiting: Vec<Waiting>,
    free: Vec<usize>,
    in_flight: usize,
    ready: Vec<Done>,
}

impl FileSession {
    /// The way a transfer takes: past the page cache if everything about it is a multiple of the blocks.
    fn way(&self, offset: u64, bytes: &[u8]) -> &FileHandle {
        let whole = offset.is_multiple_of(u64::from(DIRECT_UNIT))
            && bytes.len().is_multiple_of(DIRECT_UNIT as usize)
            && (bytes.as_ptr() as usize).is_multiple_of(PAGE);
        match &self.handles.direct {
            Some(direct) if whole => direct,
            _ => &self.handles.buffered,
        }
    }

    fn keep(&mut self, token: u64, op: Shape) -> u64 {
        let entry = Waiting::Op { token, op };
        match self.free.pop() {
            Some(index) => {
                self.waiting[index] = entry;
                index as u64
            }
            None => {
                self.waiting.push(entry);
                self.waiting.len() as u64 - 1
            }
        }
    }

    /// The part of a range that consists of whole blocks of a device; all of it in a file.
    fn whole(&self, offset: u64, len: u32) -> (u64, u64) {
        let end = offset + u64::from(len);
        if !self.device {
            return (offset, end - offset);
        }
        let unit = u64::from(DIRECT_UNIT);
        let start = offset.next_multiple_of(unit);
        let end = if end == self.size.load(Ordering::SeqCst) { end } else { end / unit * unit };
        (start, end.saturating_sub(start))
    }

    fn status(&mut self, token: u64, op: Op) {
        let (start, len) = op.range();
        let one = matches!(op, Op::Status { one: true, .. });
        let outcome = if self.device {
            Ok(vec![Extent { len: len as u32, hole: false, zero: false }])
        } else {
            extents(&self.handles.buffered, start, len as u32, one)
                .map_err(|e| self.failure("block status", start, len, e.into()))
        };
        self.ready.push(Done { token, op, outcome });
    }

    fn failure(&self, what: &str, offset: u64, len: u64, e: std::io::Error) -> Failure {
        let errno = match Errno::from_os(e.raw_os_error()) {
            // A block device says EINVAL to a hole that it cannot make.
            _ if e.raw_os_error() == Some(Os::INVAL.raw_os_error())
                && (what == "write zeroes" || what == "trim") =>
            {
                Errno::NotSup
            }
            errno => errno,
        };
        if errno == Errno::NotSup {
            return Failure::new(errno, "this file system has no such way to make zeroes");
        }
        let uri = &self.uri;
        if e.kind() == std::io::ErrorKind::UnexpectedEof && !self.device {
            // It is looked at again only now and then.
            let wanted = self.size.load(Ordering::SeqCst);
            self.cut.look(
                uri,
                length(&self.handles.buffered).unwrap_or(wanted),
                wanted,
                Instant::now(),
            );
        }
        let why = larder_runtime::plain(&e);
        Failure::new(errno, format!("{what} of {len} bytes at {offset} of '{uri}' failed: {why}"))
    }

    fn ended(&mut self, done: FileDone) -> Option<Done> {
        let index = done.token as usize;
        let Waiting::Op { token, op } = std::mem::replace(&mut self.waiting[index], Waiting::Free)
        else {
            return None;
        };
        self.free.push(index);
        if let Shape::Trim { offset, len, fua: true, sync: false } = op
            && done.result.is_ok()
        {
            let key = self.keep(token, Shape::Trim { offset, len, fua: true, sync: true });
            self.queue.submit(key, &self.handles.buffered, FileOp::Sync);
            return None;
        }
        self.in_flight -= 1;
        if !matches!(op, Shape::Read { .. } | Shape::Flush) {
            self.notes.changed();
        }
        let op = match (op, done.op) {
            (Shape::Read { offset }, FileOp::Read { buf, .. }) => Op::Read { offset, buf },
            (Shape::Write { offset, fua }, FileOp::Write { data, .. }) => {
                Op::Write { offset, data, fua }
            }
            (Shape::Trim { offset, len, fua, .. }, _) => Op::Trim { offset, len, fua },
            (Shape::WriteZeroes { offset, len, fua, may_punch, fast }, _) => {
                Op::WriteZeroes { offset, len, fua, may_punch, fast }
            }
            _ => Op::Flush,
        };
        let (start, len) = op.range();
        let outcome: Outcome = match done.result {
            Ok(()) => Ok(Vec::new()),
            Err(e) => Err(self.failure(op.name(), start, len, e)),
        };
        Some(Done { token, op, outcome })
    }
}

impl Session for FileSession {
    fn fd(&self) -> RawFd {
        self.queue.as_raw_fd()
    }

    fn submit(&mut self, token: u64, op: Op) {
        self.in_flight += 1;
        if let Some(end) = self.cut.end() {
            let (offset, len) = op.range();
            if len > 0 && offset + len > end {
                let wanted = self.size.load(Ordering::SeqCst);
                let failure = Failure::new(Errno::Io, Cut::text(&self.uri, end, wanted));
                self.ready.push(Done { token, op, outcome: Err(failure) });
                return;
            }
        }
        if op.changes() && !self.device {
            self.notes.changing(&self.handles.buffered);
        }
        match op {
            Op::Read { offset, buf } => {
                let way = self.way(offset, &buf).clone();
                let key = self.keep(token, Shape::Read { offset });
                self.queue.submit(key, &way, FileOp::Read { offset, buf });
            }
            Op::Write { offset, data, fua } => {
                let way = self.way(offset, &data).clone();
                let key = self.keep(token, Shape::Write { offset, fua });
                self.queue.submit(key, &way, FileOp::Write { offset, data, durable: fua });
            }
            Op::Flush => {
                let key = self.keep(token, Shape::Flush);
                self.queue.submit(key, &self.handles.buffered, FileOp::Sync);
            }
            Op::Trim { offset, len, fua } => {
                let (start, whole) = self.whole(offset, len);
                if whole == 0 {
                    self.ready.push(Done { token, op, outcome: Ok(Vec::new()) });
                    return;
                }
                let key = self.keep(token, Shape::Trim { offset, len, fua, sync: false });
                let punch = FileOp::Punch { offset: start, len: whole };
                self.queue.submit(key, &self.handles.buffered, punch);
            }
            Op::WriteZeroes { offset, len, fua, may_punch, fast } => {
                let shape = Shape::WriteZeroes { offset, len, fua, may_punch, fast };
                let len = u64::from(len);
                let key = self.keep(token, shape);
                let op = if may_punch {
                    FileOp::Punch { offset, len }
                } else {
                    FileOp::Zero { offset, len }
                };
                self.queue.submit(key, &self.handles.buffered, op);
            }
            Op::Status { .. } => self.status(token, op),
        }
    }

    fn flush(&mut self, now: Instant) {
        let due = self.looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK);
        if due && self.in_flight > 0 && !self.device {
            self.looked = Some(now);
            if let Some(found) = length(&self.handles.buffered) {
                let wanted = self.size.load(Ordering::SeqCst);
                self.cut.look(&self.uri, found, wanted, now);
            }
        }
        self.queue.flush();
    }

    fn turn(&mut self, _now: Instant) {}

    fn pop(&mut self) -> Option<Done> {
        if let Some(done) = self.ready.pop() {
            self.in_flight -= 1;
            return Some(done);
        }
        while let Some(done) = self.queue.pop() {
            if let Some(done) = self.ended(done) {
                return Some(done);
            }
        }
        None
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

/// Holes and data of a range of a file.
fn extents(file: impl AsFd, start: u64, len: u32, one: bool) -> Result<Vec<Extent>, Os> {
    let end = start + u64::from(len);
    let mut at = start;
    let mut list = Vec::new();
    while at < end && list.len() < if one { 1 } else { MAX_EXTENTS } {
        let data = match rustix::fs::seek(&file, SeekFrom::Data(at)) {
            Ok(data) => data.min(end),
            // No data from here to the end.
            Err(Os::NXIO) => end,
            // A file system that knows no holes.
            Err(Os::INVAL) => at,
            Err(e) => return Err(e),
        };
        let (until, hole) = if data > at {
            (data, true)
        } else {
            let hole = rustix::fs::seek(&file, SeekFrom::Hole(at)).unwrap_or(end);
            (hole.clamp(at + 1, end), false)
        };
        list.push(Extent { len: (until - at) as u32, hole, zero: hole });
        at = until;
    }
    Ok(list)
}

#[cfg(test)]
#[path = "file_tests.rs"]
pub(crate) mod tests;
