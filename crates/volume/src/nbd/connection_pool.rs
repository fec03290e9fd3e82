//! One session for several workers: for servers that take one connection only. Requests go to a thread and come back
//! by an eventfd; it costs two hand-overs a request, which such servers leave no way around.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::{NbdSession, interrupted};
use crate::Session;
use crate::op::{Done, Op};

const WAKE: Token = Token(0);
const SESSION: Token = Token(1);

/// What one worker's session and the thread share.
struct Port {
    event: OwnedFd,
    done: Mutex<Vec<Done>>,
}

#[derive(Default)]
struct Inbox {
    /// With the token of whoever sent it.
    ops: Vec<(Arc<Port>, u64, Op)>,
    stop: bool,
}

struct Shared {
    inbox: Mutex<Inbox>,
    waker: Waker,
    native_fua: bool,
}

/// The thread and the way to it.
pub(super) struct Hub {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Hub {
    pub(super) fn start(session: NbdSession) -> io::Result<Hub> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKE)?;
        poll.registry().register(&mut SourceFd(&session.fd()), SESSION, Interest::READABLE)?;
        let native_fua = session.native_fua();
        let shared = Arc::new(Shared { inbox: Mutex::default(), waker, native_fua });
        let thread = std::thread::Builder::new().name("nbd-backing".into()).spawn({
            let shared = shared.clone();
            move || run(poll, session, &shared)
        })?;
        Ok(Hub { shared, thread: Some(thread) })
    }

    /// Has the thread look at its session.
    pub(super) fn wake(&self) {
        if let Err(e) = self.shared.waker.wake() {
            tracing::error!("the thread of a backing store cannot be woken: {e}");
        }
    }

    pub(super) fn session(&self) -> io::Result<HubSession> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let port = Arc::new(Port { event, done: Mutex::default() });
        let shared = self.shared.clone();
        Ok(HubSession { shared, port, batch: Vec::new(), ready: Vec::new(), in_flight: 0 })
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.shared.inbox.lock().stop = true;
        let _ = self.shared.waker.wake();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

fn run(mut poll: Poll, mut session: NbdSession, shared: &Shared) {
    let mut events = Events::with_capacity(8);
    // By the session's token.
    let mut owners: Vec<Option<(Arc<Port>, u64)>> = Vec::new();
    let mut free = Vec::new();
    loop {
        let timeout = session.wake_at().map(|at| at.saturating_duration_since(Instant::now()));
        if let Err(e) = poll.poll(&mut events, timeout).or_else(interrupted) {
            tracing::error!("the thread of a backing store cannot poll: {e}");
            return;
        }
        let (ops, stop) = {
            let mut inbox = shared.inbox.lock();
            (std::mem::take(&mut inbox.ops), inbox.stop)
        };
        if stop {
            return;
        }
        for (port, token, op) in ops {
            let owner = Some((port, token));
            let index = free.pop().unwrap_or_else(|| {
                owners.push(None);
                owners.len() - 1
            });
            owners[index] = owner;
            session.submit(index as u64, op);
        }
        session.turn(Instant::now());
        while let Some(Done { token, op, outcome }) = session.pop() {
            let index = token as usize;
            let Some((port, token)) = owners[index].take() else { continue };
            free.push(index);
            port.done.lock().push(Done { token, op, outcome });
            // EAGAIN (the counter is at its end) means that it is readable anyway.
            let _ = rustix::io::write(&port.event, &1u64.to_ne_bytes());
        }
    }
}

/// One worker's way to the thread.
pub(super) struct HubSession {
    shared: Arc<Shared>,
    port: Arc<Port>,
    batch: Vec<(Arc<Port>, u64, Op)>,
    ready: Vec<Done>,
    in_flight: usize,
}

impl Session for HubSession {
    fn fd(&self) -> RawFd {
        self.port.event.as_raw_fd()
    }

    fn submit(&mut self, token: u64, op: Op) {
        self.in_flight += 1;
        self.batch.push((self.port.clone(), token, op));
    }

    fn flush(&mut self, _now: Instant) {
        if self.batch.is_empty() {
            return;
        }
        self.shared.inbox.lock().ops.append(&mut self.batch);
        if let Err(e) = self.shared.waker.wake() {
            tracing::error!("the thread of a backing store cannot be woken: {e}");
        }
    }

    fn turn(&mut self, _now: Instant) {}

    fn pop(&mut self) -> Option<Done> {
        if self.ready.is_empty() {
            self.ready = std::mem::take(&mut *self.port.done.lock());
            self.ready.reverse();
        }
        let done = self.ready.pop()?;
        self.in_flight -= 1;
        Some(done)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn native_fua(&self) -> bool {
        self.shared.native_fua
    }
}
