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

mod backend;
mod commands;
mod event;
mod files;

pub use commands::{COMMAND_BYTES, CommandRing};
pub use files::{FileDone, FileHandle, FileOp, FileQueue, Payload};

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use io_uring::{opcode, squeue, types};

use crate::buffer::{AlignedBuf, BufferPool, PAGE};
use crate::device::{Device, read_shortfall};
use crate::error::{DeviceError, IoOp};
use backend::{Backend, Moved, Opened, Setup, Uring, Work, go_on_from};
use event::Event;

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
    /// The thread that asks: each operation is over when it is submitted. For programs that want no threads.
    Caller,
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
    /// In which of its files that is, and where there.
    file: (u32, u64),
    /// The wanted bytes within the buffer.
    skip: usize,
    len: usize,
    /// Bytes of the buffer filled so far.
    filled: usize,
    /// What a read that ended short goes on at a multiple of.
    unit: usize,
    buf: AlignedBuf,
}

impl Job {
    fn wanted(&self) -> &[u8] {
        &self.buf[self.skip..self.skip + self.len]
    }
}

// SAFETY: the entry points into the buffer, which is the job's own and whose memory does not move with it. The device's files are
// registered with the ring (`open_uring`) and kept open by it.
unsafe impl Work for Job {
    type Context = Arc<dyn Device>;
    type Error = DeviceError;

    fn entry(&mut self, _: &Arc<dyn Device>) -> squeue::Entry {
        let rest = &mut self.buf[self.filled..];
        let (file, start) = self.file;
        opcode::Read::new(types::Fixed(file), rest.as_mut_ptr(), rest.len() as u32)
            .offset(start + self.filled as u64)
            .build()
    }

    fn advance(&mut self, n: usize) -> Moved {
        if self.filled + n >= self.buf.len() {
            return Moved::Over(Ok(()));
        }
        match go_on_from(self.filled, n, self.unit) {
            Some(filled) => {
                self.filled = filled;
                Moved::GoOn
            }
            None => Moved::Over(Err(read_shortfall())),
        }
    }

    fn failed(&self, device: &Arc<dyn Device>, source: io::Error) -> DeviceError {
        DeviceError::Io {
            device: device.name_at(self.start).clone(),
            op: IoOp::Read,
            offset: self.file.1 + self.skip as u64,
            len: self.len as u64,
            source,
        }
    }

    fn perform(&mut self, device: &Arc<dyn Device>) -> Result<(), DeviceError> {
        device.read_at(self.start, &mut self.buf)
    }
}

/// A ring that reads the device's file; with deferred completions if `defer` says so.
fn open_uring(
    device: Arc<dyn Device>,
    depth: u32,
    event: &Event,
    defer: bool,
) -> Result<Uring<Job>, String> {
    let Some(files) = device.files() else {
        return Err("the device has no descriptor of its own".to_owned());
    };
    let files: Vec<RawFd> = files.iter().map(|file| file.as_raw_fd()).collect();
    let mut ring =
        Uring::open(device, &Setup { depth, defer, codes: &[opcode::Read::CODE] }, event.clone())?;
    ring.register(&files)?;
    Ok(ring)
}

/// Asynchronous reads of one device for one worker. It may be made on any thread, but must be used on one: after the
/// first flush, reads flushed from another thread fail.
///
/// Dropping it waits for the reads in flight: the kernel (or a thread) writes into its memory until they end.
pub struct ReadRing {
    // Declared first so that it goes first: it waits for whatever still writes into memory.
    backend: Backend<Job>,
    device: Arc<dyn Device>,
    /// Signalled whenever there is something to complete.
    event: Event,
    pool: BufferPool,
    /// Reads refused at once: they complete like others.
    refused: VecDeque<(u64, DeviceError)>,
    depth: usize,
    in_flight: usize,
    fallback: Option<String>,
    /// A signal was lost, which was said.
    lost_one: bool,
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
        let event = Event::new().map_err(|e| refused("a ring", format!("eventfd: {e}")))?;
        let Opened { backend, fallback } = Backend::open(
            options.choice,
            || device.clone(),
            |device| open_uring(device, depth, &event, true),
            (options.threads, "read"),
            &event,
        )
        .map_err(|(ring, reason)| refused(ring, reason))?;
        Ok(ReadRing {
            backend,
            device,
            event,
            pool: BufferPool::new(options.buffer_bytes.max(PAGE)),
            refused: VecDeque::new(),
            depth: depth as usize,
            in_flight: 0,
            fallback,
            lost_one: false,
        })
    }

    /// Which implementation it is: `io_uring` or `threads`.
    pub fn kind(&self) -> &'static str {
        self.backend.kind()
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
            Ok(Some(job)) => self.backend.submit(job),
            Ok(None) => return Err(Full),
            Err(e) => {
                self.refused.push_back((token, e));
                self.event.signal();
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
        let (skip, len, unit) = ((offset - start) as usize, len as usize, unit as usize);
        let file = self.device.file_at(start);
        let job = |buf| Job { token, start, file, skip, len, filled: 0, unit, buf };
        Ok(self.pool.take(span).map(job))
    }

    /// Starts what was submitted: at most one system call. To be called once per turn of the event loop.
    pub fn flush(&mut self) {
        self.backend.flush();
    }

    /// After so long without a word of reads that are under way their owner should [look](ReadRing::look).
    pub const OVERDUE: Duration = Duration::from_millis(250);

    /// Looks for reads that have ended although the descriptor says nothing: a signal was seen to be lost (Linux 6.18, once in some
    /// hundred thousand reads of one at a time), and whoever waited for that read would wait for ever. Returns whether there is something
    /// to take.
    pub fn look(&mut self) -> bool {
        let found = self.backend.look();
        if found && !std::mem::replace(&mut self.lost_one, true) {
            let device = self.device.name();
            tracing::warn!(%device, "a read had ended and the kernel had not said so; it is found now");
        }
        found
    }

    /// The next read that has ended. Submitting between two calls is fine. Take until `None` before waiting on the
    /// descriptor again.
    pub fn pop(&mut self) -> Option<Completion> {
        let done = if let Some((token, error)) = self.refused.pop_front() {
            Completion { token, state: Err(error), spent: None }
        } else {
            let (job, result) = self.backend.pop()?;
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
        self.event.acknowledge();
    }

    /// Waits until something has ended or the time is over. For callers without an event loop, such as start-up and
    /// tests. Returns whether there is something to take.
    pub fn wait(&mut self, timeout: Duration) -> bool {
        self.flush();
        self.event.wait(timeout)
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

#[cfg(test)]
mod tests;
