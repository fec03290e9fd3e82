//! Commands that drivers define themselves (`IORING_OP_URING_CMD`, Linux 5.19): ioctls that may end later.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use io_uring::squeue::Entry128;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};

use super::event::Event;

/// Bytes that a command may have.
pub const COMMAND_BYTES: usize = 80;

/// A ring of such commands, for one thread. An eventfd becomes readable when one has ended.
pub struct CommandRing {
    ring: IoUring<Entry128, cqueue::Entry>,
    event: Event,
}

impl fmt::Debug for CommandRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommandRing").finish_non_exhaustive()
    }
}

impl CommandRing {
    /// A ring for `depth` commands at a time.
    ///
    /// # Errors
    /// The system's, when it has no io_uring, forbids it, or grants fewer.
    pub fn open(depth: u32) -> io::Result<CommandRing> {
        // Without interrupts of a thread that is at work: what has ended is looked for in each turn.
        let eager = IoUring::builder().setup_coop_taskrun().build(depth);
        let ring = match eager {
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => IoUring::builder().build(depth)?,
            other => other?,
        };
        let event = Event::new()?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(CommandRing { ring, event })
    }

    /// Queues a command, which [`CommandRing::submit`] starts: `code` and `body` as the driver of `file` defines them. A
    /// full queue is submitted first.
    ///
    /// # Safety
    /// Memory that the command names must be valid for what the driver does with it until the command has ended, and
    /// nobody may rely on what is in it meanwhile. `file` must stay open until the command has been submitted.
    ///
    /// # Errors
    /// The system's, when the full queue cannot be submitted.
    pub unsafe fn push(
        &mut self,
        file: BorrowedFd<'_>,
        code: u32,
        body: &[u8; COMMAND_BYTES],
        token: u64,
    ) -> io::Result<()> {
        let fd = Fd(file.as_raw_fd());
        let entry = opcode::UringCmd80::new(fd, code).cmd(*body).build().user_data(token);
        if self.ring.submission().is_full() {
            self.submit()?;
        }
        // SAFETY: by this function's contract.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Starts what was queued.
    ///
    /// # Errors
    /// The system's.
    pub fn submit(&mut self) -> io::Result<()> {
        loop {
            if self.ring.submission().is_empty() {
                return Ok(());
            }
            match self.ring.submit() {
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                Err(e) => return Err(e),
                Ok(_) => {}
            }
        }
    }

    /// The next command that has ended: its token, and what the driver says of it, an error as a negative number.
    pub fn pop(&mut self) -> Option<(u64, i32)> {
        self.ring.completion().next().map(|entry| (entry.user_data(), entry.result()))
    }

    /// The descriptor is not readable any more, until something ends: before looking at what has.
    pub fn acknowledge(&self) {
        self.event.acknowledge();
    }

    /// Waits for the end of a command, no longer than `limit`. `None`: the time is over.
    ///
    /// # Errors
    /// The system's.
    pub fn wait(&mut self, limit: Duration) -> io::Result<Option<(u64, i32)>> {
        let end = Instant::now() + limit;
        loop {
            self.submit()?;
            if let Some(ended) = self.pop() {
                return Ok(Some(ended));
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(None);
            }
            let time = Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
            match self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time)) {
                Err(e) if !matches!(e.raw_os_error(), Some(libc::EINTR | libc::ETIME)) => {
                    return Err(e);
                }
                _ => {}
            }
        }
    }
}

impl AsRawFd for CommandRing {
    /// The eventfd, to be watched edge-triggered.
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}
