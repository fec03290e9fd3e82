//! A session on a thread that waits for it.

use std::io;
use std::time::{Duration, Instant};

use mio::{Events, Poll};

use crate::op::{Done, Op};
use crate::{Session, TOKENS};

/// A session with a poll of its own, for a thread that does nothing else.
pub struct Alone {
    session: Box<dyn Session>,
    poll: Poll,
    events: Events,
}

impl Alone {
    /// Takes a session that was not asked anything yet.
    ///
    /// # Errors
    /// When a poll cannot be had.
    pub fn new(mut session: Box<dyn Session>) -> io::Result<Alone> {
        let poll = Poll::new()?;
        session.attach(poll.registry(), 0)?;
        Ok(Alone { session, poll, events: Events::with_capacity(TOKENS) })
    }

    /// Takes an operation; it starts with the next [`Alone::next`].
    pub fn submit(&mut self, token: u64, op: Op) {
        self.session.submit(token, op);
    }

    /// Nothing will be asked for a while: connections by which nothing is asked go.
    pub fn rest(&mut self) {
        self.session.rest();
    }

    /// The next operation that has ended, or `None` when `timeout` is over. Where `is_over` says so it ends before, within 20 ms.
    pub fn next(&mut self, timeout: Duration, mut is_over: impl FnMut() -> bool) -> Option<Done> {
        const GLANCE: Duration = Duration::from_millis(20);
        let until = Instant::now() + timeout;
        loop {
            let now = Instant::now();
            if self.session.wake_at().is_some_and(|at| at <= now) {
                self.session.turn(now);
            }
            self.session.flush(now);
            if let Some(done) = self.session.pop() {
                return Some(done);
            }
            if now >= until || is_over() {
                return None;
            }
            // Interrupted or not: it is looked at again.
            let _ = self.poll.poll(&mut self.events, Some(GLANCE.min(until - now)));
            let now = Instant::now();
            for event in &self.events {
                self.session.ready(event.token().0, event, now);
            }
        }
    }
}
