//! What wakes a worker: an eventfd in its event loop.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// An eventfd that several may signal.
#[derive(Clone, Debug)]
pub(super) struct Event(Arc<OwnedFd>);

impl Event {
    pub(super) fn new() -> io::Result<Event> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Event(Arc::new(fd)))
    }

    /// Makes it readable.
    pub(super) fn signal(&self) {
        // EAGAIN (the counter is at its end) means that it is readable anyway.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Makes it unreadable until the next signal.
    pub(super) fn acknowledge(&self) {
        let mut count = [0u8; 8];
        // EAGAIN means that nothing was signalled.
        let _ = rustix::io::read(&*self.0, &mut count);
    }

    /// Waits for a signal or the end of the time, and acknowledges. Whether there was a signal.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let timeout = Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: i64::from(timeout.subsec_nanos()),
        };
        let mut fds = [PollFd::new(&*self.0, PollFlags::IN)];
        let ready = poll(&mut fds, Some(&timeout)).is_ok_and(|n| n > 0);
        self.acknowledge();
        ready
    }
}

impl AsRawFd for Event {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl AsFd for Event {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
