//! What carries operations out behind a worker's back: io_uring, or a pool of threads where that cannot be had; or, if it is asked for, the
//! worker itself.
//!
//! Both know operations only as [`Work`], so that [`ReadRing`](super::ReadRing) and [`FileQueue`](super::FileQueue)
//! stand on the same two.

mod caller;
mod threads;
mod uring;

use std::io;

use io_uring::squeue;

use super::RingChoice;
use super::event::Event;
pub(super) use uring::{Setup, Uring};

/// One operation, and how either back end does it.
///
/// # Safety
/// An entry from [`Work::entry`] points only into memory that `self` owns or shares, and that does not move when `self`
/// does; a descriptor that it names stays open while `self` or its [`Work::Context`] is there.
pub(super) unsafe trait Work: Send + 'static {
    /// What all operations of a back end share.
    type Context: Send + Sync + 'static;
    /// How an operation fails.
    type Error: Send + 'static;

    /// What the kernel is to be asked for: all that is left to do, or a part of it.
    fn entry(&mut self, context: &Self::Context) -> squeue::Entry;

    /// The kernel did `n` bytes (or succeeded, where none are to be moved).
    fn advance(&mut self, n: usize) -> Moved;

    /// The error for one of the operating system's.
    fn failed(&self, context: &Self::Context, error: io::Error) -> Self::Error;

    /// Does the whole of it on this thread.
    fn perform(&mut self, context: &Self::Context) -> Result<(), Self::Error>;
}

/// What a transfer's result means.
pub(super) enum Moved {
    Over(io::Result<()>),
    /// There is more to move.
    GoOn,
}

/// What all transfers share: `moved` bytes before, `n` more now, of `whole`. The number moved that the next one goes on
/// from, a multiple of `unit` (direct transfers go on at whole blocks); `None` where there is nothing to go on from.
pub(super) fn go_on_from(moved: usize, n: usize, unit: usize) -> Option<usize> {
    let aligned = (moved + n) / unit * unit;
    (aligned > moved).then_some(aligned)
}

type Done<W> = (W, Result<(), <W as Work>::Error>);

/// One of the three.
pub(super) enum Backend<W: Work> {
    Uring(Box<Uring<W>>),
    Threads(threads::Threads<W>),
    Caller(caller::Caller<W>),
}

/// A back end as asked for, and why it is not the first choice.
pub(super) struct Opened<W: Work> {
    pub backend: Backend<W>,
    pub fallback: Option<String>,
}

impl<W: Work> Backend<W> {
    /// `uring` opens the ring; `threads` is the pool's size and what its threads are called. An error has the name of
    /// the implementation that failed, and the reason in words.
    pub(super) fn open(
        choice: RingChoice,
        context: impl Fn() -> W::Context,
        uring: impl FnOnce(W::Context) -> Result<Uring<W>, String>,
        (threads, name): (u32, &str),
        event: &Event,
    ) -> Result<Opened<W>, (&'static str, String)> {
        let mut fallback = None;
        if choice == RingChoice::Caller {
            let backend = Backend::Caller(caller::Caller::new(context(), event.clone()));
            return Ok(Opened { backend, fallback });
        }
        if choice != RingChoice::Threads {
            match uring(context()) {
                Ok(ring) => {
                    return Ok(Opened { backend: Backend::Uring(Box::new(ring)), fallback });
                }
                Err(reason) if choice == RingChoice::Uring => return Err(("io_uring", reason)),
                Err(reason) => fallback = Some(reason),
            }
        }
        let pool = threads::Threads::start(context(), threads.clamp(1, 256), name, event.clone())
            .map_err(|e| ("threads", e.to_string()))?;
        Ok(Opened { backend: Backend::Threads(pool), fallback })
    }

    pub(super) fn kind(&self) -> &'static str {
        match self {
            Backend::Uring(_) => "io_uring",
            Backend::Threads(_) => "threads",
            Backend::Caller(_) => "caller",
        }
    }

    /// Takes an operation, which starts with the next flush. The caller keeps within the depth.
    pub(super) fn submit(&mut self, work: W) {
        match self {
            Backend::Uring(ring) => ring.submit(work),
            Backend::Threads(pool) => pool.submit(work),
            Backend::Caller(caller) => caller.submit(work),
        }
    }

    /// Starts what was submitted.
    pub(super) fn flush(&mut self) {
        match self {
            Backend::Uring(ring) => ring.flush(),
            Backend::Threads(pool) => pool.flush(),
            Backend::Caller(_) => {}
        }
    }

    /// Looks for operations that have ended and were not signalled, which only a kernel can do. Returns whether there are any.
    pub(super) fn look(&mut self) -> bool {
        match self {
            Backend::Uring(ring) => ring.look(),
            Backend::Threads(_) | Backend::Caller(_) => false,
        }
    }

    /// The next operation that has ended. The owner may sleep only after `None`.
    pub(super) fn pop(&mut self) -> Option<Done<W>> {
        match self {
            Backend::Uring(ring) => ring.pop(),
            Backend::Threads(pool) => pool.pop(),
            Backend::Caller(caller) => caller.pop(),
        }
    }
}
