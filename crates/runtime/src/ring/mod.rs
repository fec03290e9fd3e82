//! Asynchronous reads for one worker.
//!
//! A worker owns one [`ReadRing`], puts its descriptor into its event loop, submits reads while it handles requests,
//! flushes once per turn and takes completions when the descriptor becomes readable:
//!
//! ```no_run
//! # use larder_runtime::*;
//! # fn main() -> Result<(), DeviceError> {
//! # let device = std::sync::Arc::new(FlashDevice::open(&DeviceOptions::new("flash"))?);
//! let mut ring = ReadRing::open(device, &RingOptions::default())?;
//! // Register ring.as_raw_fd() for reading, edge-triggered (as mio does). Then, each turn:
//! if ring.submit(7, 8192, 4096).is_err() {
//!     // Full: try again after a completion.
//! }
//! ring.flush();
//! ring.completions(|token, bytes| match bytes {
//!     Ok(bytes) => println!("{token}: {} bytes", bytes.len()),
//!     Err(e) => println!("{token}: {e}"),
//! });
//! # Ok(())
//! # }
//! ```
//!
//! Two implementations pass the same tests: io_uring, and a pool of threads for hosts that forbid it (many containers
//! do). Devices that have no descriptor of their own (those for tests) use the threads.

mod files;
mod threads;
mod uring;

pub use files::{FileDone, FileHandle, FileOp, FileQueue, Payload};

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::str::FromStr;
use std::sync::Arc;

use rustix::event::{EventfdFlags, eventfd};

use crate::buffer::{AlignedBuf, BufferPool, PAGE};
use crate::device::Device;
use crate::error::DeviceError;

/// Which implementation a ring is to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RingChoice {
    /// io_uring, or the threads where it cannot be had.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// The threads.
    Threads,
}

impl FromStr for RingChoice {
    type Err = String;
    fn from_str(text: &str) -> Result<RingChoice, String> {
        match text {
            "auto" => Ok(RingChoice::Auto),
            "uring" | "io_uring" => Ok(RingChoice::Uring),
            "threads" => Ok(RingChoice::Threads),
            _ => Err(format!("'{text}' is not a way to read: choose auto, uring or threads")),
        }
    }
}

/// Limits of a ring, all taken at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingOptions {
    /// Which implementation.
    pub choice: RingChoice,
    /// Most reads in flight, 1 to 4096.
    pub depth: u32,
    /// Most bytes of buffers; also the longest single read. Taken as needed.
    pub buffer_bytes: usize,
    /// Threads, for that implementation.
    pub threads: u32,
}

impl Default for RingOptions {
    fn default() -> RingOptions {
        RingOptions { choice: RingChoice::Auto, depth: 256, buffer_bytes: 4 << 20, threads: 8 }
    }
}

/// No more reads can be taken now: the ring's depth or its buffers are used up. A completion makes room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ring is full")]
pub struct Full;

/// A read that has ended. Hand it back with [`ReadRing::recycle`] so that its buffer is used again.
#[derive(Debug)]
#[must_use = "recycle it, or its buffer is lost to the ring"]
pub struct Completion {
    token: u64,
    state: Result<Job, DeviceError>,
    /// The buffer of a failed read, on its way back to the pool.
    spent: Option<AlignedBuf>,
}

impl Completion {
    /// The token it was submitted under.
    pub fn token(&self) -> u64 {
        self.token
    }

    /// Exactly the bytes asked for, or why they could not be had.
    ///
    /// # Errors
    /// The device's error.
    pub fn bytes(&self) -> Result<&[u8], &DeviceError> {
        self.state.as_ref().map(Job::wanted)
    }
}

/// One read: whole blocks around the bytes that are wanted.
#[derive(Debug)]
struct Job {
    token: u64,
    /// Where the buffer's first byte lies on the device.
    start: u64,
    /// The wanted bytes within the buffer.
    skip: usize,
    len: usize,
    buf: AlignedBuf,
}

impl Job {
    fn wanted(&self) -> &[u8] {
        &self.buf[self.skip..self.skip + self.len]
    }
}

enum Backend {
    Uring(Box<uring::Uring>),
    Threads(threads::Threads),
}

/// Asynchronous reads of one device for one worker. It may be made on any thread, but must be used on one: after the
/// first flush, reads flushed from another thread fail.
///
/// Dropping it waits for the reads in flight: the kernel (or a thread) writes into its memory until they end.
pub struct ReadRing {
    // Declared first so that it goes first: it waits for whatever still writes into memory.
    backend: Backend,
    device: Arc<dyn Device>,
    /// Signalled whenever there is something to complete.
    event: Arc<OwnedFd>,
    pool: BufferPool,
    /// Reads refused at once: they complete like others.
    refused: VecDeque<(u64, DeviceError)>,
    depth: usize,
    in_flight: usize,
    fallback: Option<String>,
}

impl ReadRing {
    /// A ring on `device`.
    ///
    /// # Errors
    /// [`DeviceError::Ring`] when the implementation asked for cannot be had (with [`RingChoice::Auto`]: neither).
    pub fn open(device: Arc<dyn Device>, options: &RingOptions) -> Result<ReadRing, DeviceError> {
        let refused =
            |ring, reason| DeviceError::Ring { device: device.name().clone(), ring, reason };
        let depth = options.depth.clamp(1, 4096);
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| refused("a ring", format!("eventfd: {e}")))?;
        let event = Arc::new(event);
        let mut fallback = None;
        let mut backend = None;
        if options.choice != RingChoice::Threads {
            match uring::Uring::open(device.clone(), depth, event.clone(), true) {
                Ok(ring) => backend = Some(Backend::Uring(Box::new(ring))),
                Err(reason) if options.choice == RingChoice::Uring => {
                    return Err(refused("io_uring", reason));
                }
                Err(reason) => fallback = Some(reason),
            }
        }
        let backend = match backend {
            Some(b) => b,
            None => threads::Threads::start(
                device.clone(),
                options.threads.clamp(1, 256),
                event.clone(),
            )
            .map(Backend::Threads)
            .map_err(|e| refused("reader threads", e.to_string()))?,
        };
        Ok(ReadRing {
            backend,
            device,
            event,
            pool: BufferPool::new(options.buffer_bytes.max(PAGE)),
            refused: VecDeque::new(),
            depth: depth as usize,
            in_flight: 0,
            fallback,
        })
    }

    /// Which implementation it is: `io_uring` or `threads`.
    pub fn kind(&self) -> &'static str {
        match self.backend {
            Backend::Uring(_) => "io_uring",
            Backend::Threads(_) => "threads",
        }
    }

    /// Why [`RingChoice::Auto`] took the threads.
    pub fn fallback_reason(&self) -> Option<&str> {
        self.fallback.as_deref()
    }

    /// Reads submitted and not yet taken.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Bytes of buffers held now; never more than the option's limit.
    pub fn buffer_bytes(&self) -> usize {
        self.pool.allocated()
    }

    /// Asks for `len` bytes at `offset`. The read starts with the next [`ReadRing::flush`]. A range that the device or
    /// the pool cannot serve is answered as a completion with an error.
    ///
    /// # Errors
    /// [`Full`]: nothing was taken.
    pub fn submit(&mut self, token: u64, offset: u64, len: u32) -> Result<(), Full> {
        if self.in_flight >= self.depth {
            return Err(Full);
        }
        match self.prepare(token, offset, len) {
            Ok(Some(job)) => match &mut self.backend {
                Backend::Uring(ring) => ring.submit(job),
                Backend::Threads(pool) => pool.submit(job),
            },
            Ok(None) => return Err(Full),
            Err(e) => {
                self.refused.push_back((token, e));
                signal(&self.event);
            }
        }
        self.in_flight += 1;
        Ok(())
    }

    /// The job, `None` while there is no buffer for it.
    fn prepare(&mut self, token: u64, offset: u64, len: u32) -> Result<Option<Job>, DeviceError> {
        crate::device::check_range(&*self.device, crate::IoOp::Read, offset, u64::from(len))?;
        // The device's size is a multiple of its blocks, so whole blocks around a range within it lie within it too.
        let unit = u64::from(self.device.read_unit());
        let start = offset / unit * unit;
        let span = ((offset + u64::from(len)).next_multiple_of(unit) - start) as usize;
        if !self.pool.could_hold(span) {
            let limit = self.pool.limit() as u64;
            return Err(DeviceError::TooLong {
                device: self.device.name().clone(),
                offset,
                len: u64::from(len),
                limit,
            });
        }
        let skip = (offset - start) as usize;
        Ok(self.pool.take(span).map(|buf| Job { token, start, skip, len: len as usize, buf }))
    }

    /// Starts what was submitted: at most one system call. To be called once per turn of the event loop.
    pub fn flush(&mut self) {
        match &mut self.backend {
            Backend::Uring(ring) => ring.flush(),
            Backend::Threads(pool) => pool.flush(),
        }
    }

    /// The next read that has ended. Submitting between two calls is fine. Take until `None` before waiting on the
    /// descriptor again.
    pub fn pop(&mut self) -> Option<Completion> {
        let done = if let Some((token, error)) = self.refused.pop_front() {
            Completion { token, state: Err(error), spent: None }
        } else {
            let (job, result) = match &mut self.backend {
                Backend::Uring(ring) => ring.pop()?,
                Backend::Threads(pool) => pool.pop()?,
            };
            match result {
                Ok(()) => Completion { token: job.token, state: Ok(job), spent: None },
                Err(source) => {
                    Completion { token: job.token, state: Err(source), spent: Some(job.buf) }
                }
            }
        };
        self.in_flight -= 1;
        Some(done)
    }

    /// Takes a completion's buffer back.
    pub fn recycle(&mut self, completion: Completion) {
        if let Some(buf) = completion.state.ok().map(|job| job.buf).or(completion.spent) {
            self.pool.give(buf);
        }
    }

    /// Hands every read that has ended to `each` and returns their number.
    pub fn completions(&mut self, mut each: impl FnMut(u64, Result<&[u8], &DeviceError>)) -> usize {
        let mut count = 0;
        while let Some(done) = self.pop() {
            each(done.token(), done.bytes());
            self.recycle(done);
            count += 1;
        }
        count
    }

    /// Clears the descriptor's readiness. Only for level-triggered event loops: call it before taking completions.
    pub fn acknowledge(&self) {
        let mut count = [0u8; 8];
        // EAGAIN means that nothing was signalled.
        let _ = rustix::io::read(&*self.event, &mut count);
    }

    /// Waits until something has ended or the time is over. For callers without an event loop, such as start-up and
    /// tests. Returns whether there is something to take.
    pub fn wait(&mut self, timeout: std::time::Duration) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        self.flush();
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let mut fds = [PollFd::new(&*self.event, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&timeout)).is_ok_and(|n| n > 0);
        self.acknowledge();
        ready
    }
}

impl AsRawFd for ReadRing {
    /// Readable when reads have ended.
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

impl AsFd for ReadRing {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl fmt::Debug for ReadRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadRing")
            .field("kind", &self.kind())
            .field("device", self.device.name())
            .field("depth", &self.depth)
            .field("in_flight", &self.in_flight)
            .finish()
    }
}

/// Makes an eventfd readable.
fn signal(event: &OwnedFd) {
    // EAGAIN (the counter is at its end) means that it is readable anyway.
    let _ = rustix::io::write(event, &1u64.to_ne_bytes());
}

#[cfg(test)]
mod tests;
