//! A thread's own way to the volumes of a cache: requests go in, answers come out.

use std::io;
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

    /// The next request that has ended.
    pub fn pop(&mut self) -> Option<Answer> {
        self.cached.pop()
    }
}
