//! Reads, writes, syncs and holes on any number of files, for one worker.
//!
//! Like [`ReadRing`](super::ReadRing), it is a descriptor in the worker's event loop: submit while requests are handled,
//! flush once per turn, take what has ended when the descriptor is readable. What is submitted beyond the depth waits
//! in the queue's own list, so nothing is ever refused; the caller bounds it by what it takes from its clients.
//!
//! Operations may end in any order, and nothing orders two of them that are under way at once: whoever needs a write to
//! be durable waits for it, then submits [`FileOp::Sync`].

#[cfg(test)]
mod tests;
mod work;

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use super::RingChoice;
use super::backend::{Backend, Opened, Setup, Uring};
use super::event::Event;
use crate::buffer::AlignedBuf;

/// A part of a buffer that several may read at once: a client's write goes to the backing store and to flash from the
/// same memory.
#[derive(Clone, Debug)]
pub struct Payload {
    buf: Arc<AlignedBuf>,
    start: usize,
    len: usize,
}

impl Payload {
    /// The whole buffer.
    pub fn new(buf: AlignedBuf) -> Payload {
        let len = buf.len();
        Payload { buf: Arc::new(buf), start: 0, len }
    }

    /// `len` bytes from `start` of this part.
    ///
    /// # Panics
    /// If it is shorter.
    pub fn part(&self, start: usize, len: usize) -> Payload {
        assert!(start.checked_add(len).is_some_and(|end| end <= self.len));
        Payload { buf: self.buf.clone(), start: self.start + start, len }
    }

    /// The buffer, if nobody else has a part of it.
    pub fn into_buf(self) -> Option<AlignedBuf> {
        Arc::into_inner(self.buf)
    }

    /// The buffer.
    ///
    /// # Errors
    /// The payload again, as long as somebody else has a part of it.
    pub fn try_into_buf(self) -> Result<AlignedBuf, Payload> {
        let Payload { buf, start, len } = self;
        Arc::try_unwrap(buf).map_err(|buf| Payload { buf, start, len })
    }

    /// Bytes that the whole buffer takes.
    pub fn capacity(&self) -> usize {
        self.buf.capacity()
    }
}

impl Deref for Payload {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.buf[self.start..self.start + self.len]
    }
}

/// An open file or block device.
#[derive(Clone, Debug)]
pub struct FileHandle {
    fd: Arc<OwnedFd>,
    /// What a transfer that ended short goes on at a multiple of.
    unit: u32,
}

impl FileHandle {
    /// `unit` is what offsets and lengths must be multiples of: 1 unless the file was opened with `O_DIRECT`.
    pub fn new(fd: OwnedFd, unit: u32) -> FileHandle {
        FileHandle { fd: Arc::new(fd), unit: unit.max(1) }
    }

    /// What offsets and lengths must be multiples of.
    pub fn unit(&self) -> u32 {
        self.unit
    }
}

impl AsFd for FileHandle {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One operation on a file.
#[derive(Debug)]
pub enum FileOp {
    /// Fill the whole buffer from `offset`. Ends with [`io::ErrorKind::UnexpectedEof`] where the file does.
    Read {
        /// Start, bytes.
        offset: u64,
        /// What is filled.
        buf: AlignedBuf,
    },
    /// Write all of it at `offset`.
    Write {
        /// Start, bytes.
        offset: u64,
        /// What is written.
        data: Payload,
        /// Ends only once it is durable (`RWF_DSYNC`).
        durable: bool,
    },
    /// Make every write that has ended durable (`fdatasync`).
    Sync,
    /// Make a hole (`FALLOC_FL_PUNCH_HOLE`): it reads as zeroes.
    Punch {
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// Make the range read as zeroes and keep its room (`FALLOC_FL_ZERO_RANGE`).
    Zero {
        /// Start, bytes.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// An operation that has ended, with its buffer.
#[derive(Debug)]
pub struct FileDone {
    /// What it was submitted under.
    pub token: u64,
    /// The operation.
    pub op: FileOp,
    /// How it ended. After an error any part of it may have been done.
    pub result: io::Result<()>,
}

/// An operation on its way.
struct Job {
    token: u64,
    file: FileHandle,
    op: FileOp,
    /// Bytes moved so far.
    moved: usize,
}

/// See the [module](self). It may be made on any thread, but must be used on one.
///
/// Dropping it waits for what the kernel (or a thread) is doing.
pub struct FileQueue {
    // Declared first so that it goes first: it waits for whatever still moves memory.
    backend: Backend<Job>,
    event: Event,
    waiting: VecDeque<Job>,
    depth: usize,
    /// Of them, in the back end.
    started: usize,
    fallback: Option<String>,
}

impl FileQueue {
    /// A queue that has `depth` operations under way at most, with so many threads if it comes to them.
    ///
    /// # Errors
    /// When the implementation asked for cannot be had (with [`RingChoice::Auto`]: neither), in words.
    pub fn open(choice: RingChoice, depth: u32, threads: u32) -> Result<FileQueue, String> {
        let depth = depth.clamp(1, 4096);
        let event = Event::new().map_err(|e| format!("eventfd: {e}"))?;
        let Opened { backend, fallback } = Backend::open(
            choice,
            || (),
            |()| Uring::open((), &Setup { depth, defer: true, codes: work::CODES }, event.clone()),
            (threads, "io"),
            &event,
        )
        .map_err(|(what, reason)| match what {
            "threads" => format!("threads: {reason}"),
            _ => reason,
        })?;
        // What is over when it is submitted waits for nothing.
        let depth = if choice == RingChoice::Caller { usize::MAX } else { depth as usize };
        Ok(FileQueue { backend, event, waiting: VecDeque::new(), depth, started: 0, fallback })
    }

    /// Which implementation it is: `io_uring`, `threads` or `caller`.
    pub fn kind(&self) -> &'static str {
        self.backend.kind()
    }

    /// Why [`RingChoice::Auto`] took the threads.
    pub fn fallback_reason(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// Operations submitted and not taken.
    pub fn in_flight(&self) -> usize {
        self.started + self.waiting.len()
    }

    /// Adds an operation; it starts with the next [`FileQueue::flush`].
    pub fn submit(&mut self, token: u64, file: &FileHandle, op: FileOp) {
        self.waiting.push_back(Job { token, file: file.clone(), op, moved: 0 });
        if matches!(self.backend, Backend::Caller(_)) {
            self.start_waiting();
        }
    }

    fn start_waiting(&mut self) {
        while self.started < self.depth {
            let Some(job) = self.waiting.pop_front() else { return };
            self.started += 1;
            self.backend.submit(job);
        }
    }

    /// Starts what was submitted: at most one system call. To be called once per turn of the event loop.
    pub fn flush(&mut self) {
        self.start_waiting();
        self.backend.flush();
    }

    /// The next operation that has ended. Take until `None` before waiting on the descriptor again.
    pub fn pop(&mut self) -> Option<FileDone> {
        let Some((job, result)) = self.backend.pop() else {
            // What waited for room starts now, since the owner may sleep after this.
            if !self.waiting.is_empty() && self.started < self.depth {
                self.flush();
            }
            return None;
        };
        self.started -= 1;
        Some(FileDone { token: job.token, op: job.op, result })
    }

    /// Clears the descriptor's readiness. Only for level-triggered event loops: call it before taking completions.
    pub fn acknowledge(&self) {
        self.event.acknowledge();
    }

    /// Waits until something has ended or the time is over. For callers without an event loop, such as start-up and
    /// tests. Returns whether there is something to take.
    pub fn wait(&mut self, timeout: std::time::Duration) -> bool {
        self.flush();
        self.event.wait(timeout)
    }
}

impl AsRawFd for FileQueue {
    /// Readable when operations have ended.
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl fmt::Debug for FileQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileQueue")
            .field("kind", &self.kind())
            .field("depth", &self.depth)
            .field("in_flight", &self.in_flight())
            .finish()
    }
}
