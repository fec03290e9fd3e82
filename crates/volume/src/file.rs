//! A file or block device.
//!
//! What a flush that failed may have taken with it is kept account of in `syncs`.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_runtime::{FileDone, FileHandle, FileOp, FileQueue, LockError, PAGE, RingChoice};
use mio::unix::SourceFd;
use mio::{Interest, Registry, Token};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{AtFlags, OFlags, SeekFrom, StatxFlags};
use rustix::io::Errno as Os;

use super::at_path::AtPath;
use super::change_markers::{self, Notes};
use super::device_name::lasting_name;
use super::emulation::Steps;
use super::identity::FOREIGN;
use super::marker::Image;
use super::pages::{Pages, Visitor};
use super::syncs::{Beside, Syncs};
use super::watch::{Found, LOOK, TICK, Watch};
use super::{Backing, BackingError, Capabilities, Flushing, Identity, Session, StoreTrouble, Uri};
use crate::op::{Done, Extent, Failure, FailureKind, MAX_PAYLOAD, Op, Outcome};

/// Operations under way in one session.
const DEPTH: u32 = 256;
/// Threads of one session, where there is no io_uring.
const THREADS: u32 = 8;
/// Extents of one status.
const MAX_EXTENTS: usize = 256;
/// A flush that has ended looks so often whether those beside it have.
const LOOK_BESIDE: Duration = Duration::from_millis(1);
/// Offset and length of direct transfers are multiples of this: every device's blocks divide it.
const DIRECT_UNIT: u32 = 4096;

/// See the [module](self).
#[derive(Debug)]
pub struct FileBacking {
    uri: String,
    path: PathBuf,
    about: Capabilities,
    /// Bytes: it may grow.
    size: Arc<AtomicU64>,
    cut: Arc<Cut>,
    /// A block device.
    device: bool,
    handles: Handles,
    /// Where there are two ways.
    pages: Option<Arc<Pages>>,
    ring: RingChoice,
    watch: Arc<Watch>,
    /// The run that made the last change that was there at the opening, as its notes say; 0 if none says so.
    last_by: u64,
    /// The run that had it before and has changed nothing, as they say.
    idle: u64,
    /// Its open sessions have it too.
    lock: Arc<ImageLock>,
    syncs: Arc<Syncs>,
}

/// What keeps others from the file. It goes with whoever has it last, at once: what the kernel still has of a queue that is
/// closed would keep it for some time.
#[derive(Debug)]
struct ImageLock {
    handles: Handles,
    held: bool,
    /// Something may be under way that nobody waits for.
    left: AtomicBool,
}

impl Drop for ImageLock {
    fn drop(&mut self) {
        if self.held && !self.left.load(Ordering::SeqCst) {
            larder_runtime::unlock_image(self.handles.buffered.as_fd());
            if let Some(direct) = &self.handles.direct {
                larder_runtime::unlock_image(direct.as_fd());
            }
        }
    }
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
        self.since.lock().get_or_insert(now);
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
        FileBacking::open_path(uri.to_string(), path, options, options.ring)
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
        let place = AtPath::new(&uri, path, &meta, device, ring != RingChoice::Caller);
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
        if how.lease {
            lock(&uri, &handles, read_only).map_err(&bad)?;
        }
        let left = AtomicBool::new(false);
        let lock = Arc::new(ImageLock { handles: handles.clone(), held: how.lease, left });
        let pages = handles.direct.as_ref().map(|_| {
            // Nothing is read ahead into the page cache: what is read or written past it would meet that there.
            let advice = rustix::fs::Advice::Random;
            if let Err(error) = rustix::fs::fadvise(&handles.buffered, 0, None, advice) {
                tracing::debug!(%error, "'{uri}' is read ahead by the kernel");
            }
            Arc::new(Pages::new(block_of(&handles.buffered)))
        });
        let about = Capabilities {
            size,
            read_only,
            trim: true,
            fast_zero: true,
            status: !device,
            flush: Flushing::Offered,
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
        let writer = change_markers::writer(&handles.buffered);
        let changed_ns = change_markers::changed_ns(&meta);
        let last_by = former
            .filter(|f| f.explains(changed_ns, change_markers::boot_ns(), writer))
            .map_or(0, |f| f.run);
        let idle = former.and_then(|f| f.idle()).unwrap_or(0);
        let found = Found { changed_ns, size: meta.st_size as u64 };
        let watch = Arc::new(Watch::new(&uri, notes, place, found, device, how.watch));
        let (size, cut) = (Arc::new(AtomicU64::new(size)), Arc::new(Cut::none()));
        Ok(FileBacking {
            uri,
            path: path.to_owned(),
            about,
            size,
            cut,
            device,
            handles,
            pages,
            ring,
            watch,
            last_by,
            idle,
            lock,
            syncs: Arc::default(),
        })
    }
}

/// Keeps others from the file: flock and what QEMU honours.
fn lock(uri: &str, handles: &Handles, read_only: bool) -> Result<(), String> {
    let beside: Vec<_> = handles.direct.iter().map(AsFd::as_fd).collect();
    let locked = larder_runtime::lock_image(uri, handles.buffered.as_fd(), &beside, !read_only);
    let who = if read_only {
        "another process has it locked for writing"
    } else {
        "another process has it locked"
    };
    locked.map_err(|e| match e {
        LockError::Held(Some(by)) if by.pid == std::process::id() => {
            "is locked by this daemon itself, which has it as another volume or as its cache".into()
        }
        LockError::Held(Some(by)) => format!("{who}, {by}: stop that one first"),
        LockError::Held(None) => format!("{who}: stop that one first"),
        LockError::System(e) => {
            format!("cannot be locked: {e}; say --no-lease if nobody else writes to it")
        }
    })
}

/// Bytes of a block of the file system, as far as it says.
fn block_of(file: impl AsFd) -> u64 {
    rustix::fs::fstat(file).map_or(4096, |meta| meta.st_blksize as u64)
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

    fn capabilities(&self) -> Capabilities {
        Capabilities { size: self.size.load(Ordering::SeqCst), ..self.about }
    }

    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        let bad = |reason: String| BackingError::Open { uri: self.uri.clone(), reason };
        let before = self.capabilities().size;
        let find = || {
            let found = rustix::fs::seek(&self.handles.buffered, SeekFrom::End(0));
            found.map_err(|e| bad(format!("its size: {e}")))
        };
        let mut now = find()?;
        // Before it is made larger: zeros would take the place of what was cut off, without a word.
        if now < before {
            return Err(bad(format!(
                "it had {before} bytes and has {now}: it was cut short outside Larder, and what lay behind is gone from it; \
                 restore its size and what it held, then ask again"
            )));
        }
        if let Some(bytes) = bytes.filter(|&b| b > now) {
            if self.device {
                return Err(bad(format!("it is a device of {now} bytes: make that larger first")));
            }
            if self.about.read_only {
                return Err(bad("it is open to be read only".into()));
            }
            let start = self.watch.begins(&self.handles.buffered);
            let made = rustix::fs::ftruncate(&self.handles.buffered, bytes)
                .and_then(|()| rustix::fs::fsync(&self.handles.buffered));
            if made.is_ok() {
                self.watch.resized(bytes);
            }
            self.watch.ended(start, made.is_ok());
            if made.is_err() {
                self.syncs.ledger.lost();
            }
            made.map_err(|e| bad(format!("it cannot be made larger: {e}")))?;
            now = find()?;
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
        let wanted = self.capabilities().size;
        if !self.device
            && let Some(found) = length(&self.handles.buffered)
        {
            self.cut.look(&self.uri, found, wanted, Instant::now());
        }
        let Some(end) = self.cut.end() else {
            let moved = self.watch.moved(&self.handles.buffered);
            let moved = moved.map(|(since, what)| StoreTrouble { state: "moved", since, what });
            let changed = || {
                let (since, what) = self.watch.trouble()?;
                Some(StoreTrouble { state: "changed", since, what })
            };
            return moved.or_else(changed);
        };
        let since = *self.cut.since.lock();
        Some(StoreTrouble {
            state: "shrunk",
            since: since.unwrap_or_else(Instant::now),
            what: Cut::text(&self.uri, end, wanted),
        })
    }

    fn look(&self) -> u64 {
        self.watch.look(&self.handles.buffered)
    }

    fn look_at_place(&self) {
        self.watch.look_at_place(&self.handles.buffered);
    }

    fn accounted(&self, changes: u64) {
        self.watch.accounted(changes);
    }

    fn losses(&self) -> u64 {
        self.syncs.ledger.losses()
    }

    fn keep_notes(&self) -> bool {
        self.watch.notes().keep()
    }

    fn image(&self) -> Option<Image> {
        let file = &self.handles.buffered;
        Some(Image::new(&self.path, file, self.device, &self.watch, &self.syncs))
    }

    fn sessions(&self) -> usize {
        Arc::strong_count(&self.lock) - 1
    }

    fn identity(&self) -> Result<Identity, BackingError> {
        let bad = |reason: String| BackingError::Open { uri: self.uri.clone(), reason };
        // The descriptor, not the name: what was cached is this file's, whatever has taken its place meanwhile.
        let stat = || rustix::fs::fstat(&self.handles.buffered).map_err(|e| bad(e.to_string()));
        let mut meta = stat()?;
        if self.device {
            let name = lasting_name(meta.st_rdev).unwrap_or_else(|| self.uri.clone());
            return Ok(Identity::Blind { name, size: self.capabilities().size });
        }
        // Times are as fine as the kernel's ticks: whoever writes next shall have another one.
        if change_markers::is_recent(&meta) {
            std::thread::sleep(TICK);
            meta = stat()?;
        }
        // Whoever lets go says what the file is like, and so must not pass off somebody else's change as what is cached.
        let mut changed_ns = change_markers::changed_ns(&meta);
        let found = Found { changed_ns, size: meta.st_size as u64 };
        if !self.watch.is_own(&self.handles.buffered, found) {
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
            run: self.watch.notes().run(),
            last_by: self.last_by,
            idle: self.idle,
            mark: change_markers::writer(&self.handles.buffered).unwrap_or(0),
            read_only: self.about.read_only,
        })
    }

    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        let queue = FileQueue::open(self.ring, DEPTH, THREADS)
            .map_err(|reason| BackingError::Open { uri: self.uri.clone(), reason })?;
        // Who has sessions made has noted by which run it has the file.
        self.watch.notes().attached();
        let visitor = self.pages.as_ref().map(Pages::visitor).transpose().map_err(|e| {
            BackingError::Open { uri: self.uri.clone(), reason: format!("a descriptor: {e}") }
        })?;
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|e| {
            BackingError::Open { uri: self.uri.clone(), reason: format!("a descriptor: {e}") }
        })?;
        let session = FileSession {
            uri: self.uri.as_str().into(),
            size: self.size.clone(),
            cut: self.cut.clone(),
            looked: None,
            device: self.device,
            handles: self.handles.clone(),
            watch: self.watch.clone(),
            lock: self.lock.clone(),
            syncs: self.syncs.clone(),
            beside: Vec::new(),
            look_again: None,
            event: Arc::new(event),
            queue,
            visitor,
            held_up: BTreeMap::new(),
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
    /// `start`: when it began to change the file, 0 if it does not. `sync`: its number among [`Syncs`], 0 if it makes nothing
    /// durable, and what a flush covers.
    Op {
        token: u64,
        op: Shape,
        start: i64,
        sync: (u64, u64),
    },
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
    watch: Arc<Watch>,
    lock: Arc<ImageLock>,
    syncs: Arc<Syncs>,
    /// In their order.
    beside: Vec<Beside>,
    look_again: Option<Instant>,
    /// Tells that one of those has ended. Who does not watch it looks again after a while.
    event: Arc<OwnedFd>,
    queue: FileQueue,
    /// Goes after the queue: what was under way there has ended then.
    visitor: Option<Visitor>,
    /// What waits for its turn in a page, by the queue's token.
    held_up: BTreeMap<u64, (FileHandle, FileOp)>,
    /// By the queue's token.
    waiting: Vec<Waiting>,
    free: Vec<usize>,
    in_flight: usize,
    ready: Vec<Done>,
}

impl FileSession {
    /// The way a transfer takes: past the page cache if everything about it is a multiple of the blocks.
    fn way(&self, offset: u64, bytes: &[u8]) -> (FileHandle, bool) {
        let whole = offset.is_multiple_of(u64::from(DIRECT_UNIT))
            && bytes.len().is_multiple_of(DIRECT_UNIT as usize)
            && (bytes.as_ptr() as usize).is_multiple_of(PAGE);
        match &self.handles.direct {
            Some(direct) if whole => (direct.clone(), true),
            _ => (self.handles.buffered.clone(), false),
        }
    }

    /// Begins an operation on pages that the other way may be under way in, or has it wait for its turn there.
    fn begin(&mut self, key: u64, (way, direct): (FileHandle, bool), op: FileOp) {
        if let Some(visitor) = &mut self.visitor {
            let pages = visitor.pages();
            let claim = match &op {
                FileOp::Read { offset, buf } => {
                    Some(pages.claim(*offset, buf.len() as u64, direct, false))
                }
                FileOp::Write { offset, data, .. } => {
                    Some(pages.claim(*offset, data.len() as u64, direct, true))
                }
                // A part of a page becomes zeroes in the page cache.
                FileOp::Punch { offset, len } | FileOp::Zero { offset, len } => {
                    let whole = pages.is_whole(*offset, *len);
                    (!whole).then(|| pages.claim(*offset, *len, false, true))
                }
                _ => None,
            };
            if let Some(claim) = claim
                && !visitor.enter(key, claim)
            {
                self.held_up.insert(key, (way, op));
                return;
            }
        }
        self.queue.submit(key, &way, op);
    }

    /// Begins what has waited and may.
    fn take_turns(&mut self) {
        let Some(visitor) = self.visitor.as_mut().filter(|_| !self.held_up.is_empty()) else {
            return;
        };
        for key in visitor.turns() {
            if let Some((way, op)) = self.held_up.remove(&key) {
                self.queue.submit(key, &way, op);
            }
        }
        self.queue.flush();
    }

    fn keep(&mut self, token: u64, op: Shape, start: i64) -> u64 {
        let syncs = matches!(
            op,
            Shape::Flush | Shape::Write { fua: true, .. } | Shape::Trim { sync: true, .. }
        );
        let sync = syncs.then(|| (self.syncs.begins(), self.syncs.ledger.covers()));
        let entry = Waiting::Op { token, op, start, sync: sync.unwrap_or_default() };
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
        let kind = match FailureKind::from_os(e.raw_os_error()) {
            // A block device says EINVAL to a hole that it cannot make.
            _ if e.raw_os_error() == Some(Os::INVAL.raw_os_error())
                && (what == "write zeroes" || what == "trim") =>
            {
                FailureKind::Unsupported
            }
            kind => kind,
        };
        if kind == FailureKind::Unsupported {
            return Failure::new(kind, "this file system has no such way to make zeroes");
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
        Failure::new(kind, format!("{what} of {len} bytes at {offset} of '{uri}' failed: {why}"))
    }

    /// Keeps the account of what is durable when `op` has ended. A flush that has ended well may have to wait for others.
    fn account(&self, op: &Op, well: bool, sync: u64, covers: u64) -> Option<u64> {
        if sync == 0 {
            if well && op.changes() {
                self.syncs.ledger.answered();
            }
            return None;
        }
        let flush = matches!(op, Op::Flush);
        // What it says of a failure must be known before it counts as ended.
        if !well && self.syncs.ledger.lost() {
            let uri = &self.uri;
            tracing::error!("backing store '{uri}': what was written may not be on the disk");
        }
        let beside = self.syncs.ended(sync);
        if well && flush && beside.is_none() {
            self.syncs.ledger.flushed(covers);
        }
        beside.filter(|_| well && flush)
    }

    /// A flush that has ended well, as have those that were beside it, or badly: then the ledger says so.
    fn confirmed(&mut self) -> Option<Done> {
        let at = self.beside.iter().position(|b| self.syncs.have_ended(b.last, &self.event))?;
        let Beside { covers, done, .. } = self.beside.remove(at);
        self.syncs.ledger.flushed(covers);
        self.in_flight -= 1;
        Some(done)
    }

    fn look_beside(&mut self, now: Instant) {
        if self.look_again.is_some_and(|at| at <= now) {
            self.look_again = (!self.beside.is_empty()).then(|| now + LOOK_BESIDE);
        }
    }

    fn ended(&mut self, done: FileDone) -> Option<Done> {
        let index = done.token as usize;
        let Waiting::Op { token, op, start, sync: (sync, covers) } =
            std::mem::replace(&mut self.waiting[index], Waiting::Free)
        else {
            return None;
        };
        #[cfg(test)]
        let done = match sync != 0 && self.syncs.fails.swap(false, Ordering::SeqCst) {
            true => FileDone { result: Err(Os::IO.into()), ..done },
            false => done,
        };
        if let Some(visitor) = &mut self.visitor {
            visitor.leave(done.token);
        }
        self.free.push(index);
        if let Shape::Trim { offset, len, fua: true, sync: false } = op
            && done.result.is_ok()
        {
            let key = self.keep(token, Shape::Trim { offset, len, fua: true, sync: true }, start);
            self.queue.submit(key, &self.handles.buffered, FileOp::Sync);
            return None;
        }
        self.in_flight -= 1;
        if start != 0 {
            // (What makes zeroes of zeroes may change nothing.)
            let wrote = matches!(&done.op, FileOp::Write { data, .. } if !data.is_empty());
            self.watch.ended(start, wrote && done.result.is_ok());
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
        let beside = self.account(&op, outcome.is_ok(), sync, covers);
        let done = Done { token, op, outcome };
        let Some(last) = beside else { return Some(done) };
        self.in_flight += 1;
        self.look_again = Some(Instant::now() + LOOK_BESIDE);
        self.beside.push(Beside { last, covers, done });
        None
    }
}

impl Session for FileSession {
    fn fd(&self) -> RawFd {
        self.queue.as_raw_fd()
    }

    fn attach(&mut self, registry: &Registry, first: usize) -> std::io::Result<()> {
        let watch = |fd: RawFd, token: usize| {
            registry.register(&mut SourceFd(&fd), Token(token), Interest::READABLE)
        };
        watch(self.queue.as_raw_fd(), first)?;
        watch(self.event.as_raw_fd(), first + 2)?;
        self.visitor.as_ref().map_or(Ok(()), |visitor| watch(visitor.fd(), first + 1))
    }

    fn detach(&mut self, registry: &Registry) {
        let own = [self.queue.as_raw_fd(), self.event.as_raw_fd()].map(Some);
        for fd in own.into_iter().chain([self.visitor.as_ref().map(Visitor::fd)]) {
            // It goes with the descriptor at the latest.
            let _ = fd.map(|fd| registry.deregister(&mut SourceFd(&fd)));
        }
    }

    fn submit(&mut self, token: u64, op: Op) {
        self.in_flight += 1;
        if let Some(end) = self.cut.end() {
            let (offset, len) = op.range();
            if len > 0 && offset + len > end {
                let wanted = self.size.load(Ordering::SeqCst);
                let failure = Failure::new(FailureKind::Failed, Cut::text(&self.uri, end, wanted));
                self.ready.push(Done { token, op, outcome: Err(failure) });
                return;
            }
        }
        let changes = op.changes() && !self.device;
        let began = if changes { self.watch.begins(&self.handles.buffered) } else { 0 };
        match op {
            Op::Read { offset, buf } => {
                let way = self.way(offset, &buf);
                let key = self.keep(token, Shape::Read { offset }, began);
                self.begin(key, way, FileOp::Read { offset, buf });
            }
            Op::Write { offset, data, fua } => {
                let way = self.way(offset, &data);
                let key = self.keep(token, Shape::Write { offset, fua }, began);
                self.begin(key, way, FileOp::Write { offset, data, durable: fua });
            }
            Op::Flush => {
                let key = self.keep(token, Shape::Flush, began);
                self.queue.submit(key, &self.handles.buffered, FileOp::Sync);
            }
            Op::Trim { offset, len, fua } => {
                let (start, whole) = self.whole(offset, len);
                if whole == 0 {
                    if began != 0 {
                        self.watch.ended(began, false);
                    }
                    self.ready.push(Done { token, op, outcome: Ok(Vec::new()) });
                    return;
                }
                let key = self.keep(token, Shape::Trim { offset, len, fua, sync: false }, began);
                let punch = FileOp::Punch { offset: start, len: whole };
                self.begin(key, (self.handles.buffered.clone(), false), punch);
            }
            Op::WriteZeroes { offset, len, fua, may_punch, fast } => {
                let shape = Shape::WriteZeroes { offset, len, fua, may_punch, fast };
                let len = u64::from(len);
                let key = self.keep(token, shape, began);
                let op = if may_punch {
                    FileOp::Punch { offset, len }
                } else {
                    FileOp::Zero { offset, len }
                };
                self.begin(key, (self.handles.buffered.clone(), false), op);
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

    fn turn(&mut self, now: Instant) {
        self.look_beside(now);
        self.take_turns();
    }

    fn pop(&mut self) -> Option<Done> {
        self.take_turns();
        if let Some(done) = self.ready.pop() {
            self.in_flight -= 1;
            return Some(done);
        }
        while let Some(done) = self.queue.pop() {
            if let Some(done) = self.ended(done) {
                return Some(done);
            }
        }
        self.confirmed()
    }

    fn wake_at(&self) -> Option<Instant> {
        self.look_again.filter(|_| !self.beside.is_empty())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for FileSession {
    fn drop(&mut self) {
        // What is under way is carried out all the same.
        for waiting in &self.waiting {
            if let Waiting::Op { start, sync, .. } = waiting {
                self.syncs.ended(sync.0);
                self.lock.left.store(true, Ordering::SeqCst);
                if *start != 0 {
                    self.watch.ended(*start, false);
                }
            }
        }
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
mod tests;
