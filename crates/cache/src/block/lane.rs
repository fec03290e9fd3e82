//! A thread's own way to the volumes of a cache: requests go in, answers come out.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_policy::block::BlockKind;
use larder_runtime::RingChoice;
use mio::{Events, Poll, Token, Waker};

use super::cached::Cached;
use super::service::{Answer, Command, Service};
use super::{Core, Volume};

/// What wakes its thread from others.
const WAKE: Token = Token(0);

/// See the [module](self). It is used on one thread.
pub struct Lane {
    cached: Cached,
    poll: Poll,
    events: Events,
    waker: Arc<Waker>,
}

impl Lane {
    /// That of worker `me` of `core`.
    ///
    /// # Errors
    /// When a ring or a descriptor cannot be had.
    pub(super) fn new(core: Arc<Core>, me: usize, ring: RingChoice) -> io::Result<Lane> {
        let poll = Poll::new()?;
        let waker = Arc::new(Waker::new(poll.registry(), WAKE)?);
        let cached = Cached::new(core, me, poll.registry().try_clone()?, WAKE.0 + 1, ring)?;
        Ok(Lane { cached, poll, events: Events::with_capacity(256), waker })
    }

    /// Ends a [`Lane::turn`] that waits, from any thread.
    pub(super) fn waker(&self) -> &Arc<Waker> {
        &self.waker
    }

    /// Nothing is under way, and no answer was left.
    pub(super) fn is_idle(&self) -> bool {
        self.cached.is_idle()
    }

    /// A [`Lane::turn`] is wanted at this time even if nothing happens.
    pub(super) fn wake_at(&self) -> Option<Instant> {
        self.cached.wake_at()
    }

    /// Takes a request, whose range lies within the volume; it begins with the next [`Lane::turn`]. `ticket` comes back with the answer.
    /// `holds` says what is there, where the program knows: admission need not find out.
    pub fn submit(
        &mut self,
        volume: &Arc<Volume>,
        ticket: u64,
        command: Command,
        holds: BlockKind,
    ) {
        self.cached.submit_tagged(volume, ticket, command, holds);
    }

    /// Does what there is to do. Where that is nothing it waits, for `wait` at most.
    ///
    /// # Errors
    /// When the system's poll fails.
    pub fn turn(&mut self, wait: Duration) -> io::Result<()> {
        let now = Instant::now();
        self.cached.flush(now);
        let due = self.cached.wake_at().map(|at| at.saturating_duration_since(now));
        let wait = if self.cached.has_answers() { Duration::ZERO } else { wait };
        match self.poll.poll(&mut self.events, Some(due.unwrap_or(wait).min(wait))) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            _ => {}
        }
        let now = Instant::now();
        for event in self.events.iter().filter(|event| event.token() != WAKE) {
            self.cached.ready(event, now);
        }
        self.cached.flush(now);
        Ok(())
    }

    /// The same without waiting, and without asking which descriptor is ready: for who has all I/O done on its own thread. Returns whether
    /// there was something to do.
    pub(super) fn step(&mut self) -> bool {
        self.cached.step()
    }

    #[cfg(test)]
    pub(super) fn deferred(&self) -> usize {
        self.cached.deferred()
    }

    /// The next request that has ended.
    pub fn pop(&mut self) -> Option<Answer> {
        let answer = self.cached.pop();
        // Buffers of writes that were on their way to flash when those ended: a program brings its own for each request.
        while self.cached.spent().is_some() {}
        answer
    }
}

impl AsRawFd for Lane {
    fn as_raw_fd(&self) -> RawFd {
        self.poll.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use larder_base::ByteSize;

    use crate::block::Cache;

    const WAIT: std::time::Duration = std::time::Duration::from_secs(120);

    #[test]
    fn buffers_of_writes_are_let_go_of_when_their_lines_are_on_flash() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap().set_len(8 << 20).unwrap();
        let cache = Cache::builder(dir.path().join("cache")).create(ByteSize::mib(32)).threads(0);
        let cache = cache.volume("disk", &format!("file:{}", path.display())).unwrap();
        let cache = cache.open().unwrap();
        let disk = cache.volume("disk").unwrap();
        for round in 0..8 {
            let write = |n: u64| disk.write((round * 16 + n) * 4096, [1; 4096]);
            let writes: Vec<_> = (0..16).map(write).collect();
            while !writes.iter().all(|write| write.is_done()) {
                cache.turn().unwrap();
            }
        }
        assert_eq!(cache.core().settle(WAIT).unwrap(), 0);
        assert!(cache.stats().engine.fills >= 128, "they were cached: {:?}", cache.stats().engine);
        for _ in 0..32 {
            let flush = disk.flush();
            while !flush.is_done() {
                cache.turn().unwrap();
            }
        }
        assert_eq!(cache.core().with_lane(|lane| lane.deferred()), Some(0));
    }
}
