//! Making a volume's store durable, on a thread of its own: a store that hangs holds up nobody else.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_engine::block::node::flushes::{Flushed, Numbers, PATIENCE, has_made_durable};
use larder_volume::Alone;
use larder_volume::op::Op;

use super::locked;
use super::volume::Volume;

#[derive(Default)]
struct State {
    numbers: Numbers,
    stop: bool,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// A way to make a volume's store durable. Its thread ends when this is dropped.
pub(super) struct Flusher {
    shared: Arc<Shared>,
    by: By,
}

/// Who flushes.
enum By {
    Thread(Option<JoinHandle<()>>),
    /// Whoever wants it.
    Caller(Mutex<Alone>, Arc<Volume>),
}

impl Flusher {
    pub(super) fn new(session: Alone, volume: Arc<Volume>) -> Flusher {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        let theirs = shared.clone();
        let spawned = std::thread::Builder::new()
            .name("block-flush".into())
            .spawn(move || run(session, &volume, &theirs));
        // Without it no bit is ever cleared: the next start after a power cut knows less.
        let thread = spawned
            .inspect_err(|error| tracing::warn!(%error, "no thread to make a volume durable"))
            .ok();
        Flusher { shared, by: By::Thread(thread) }
    }

    /// Without a thread: a flush has ended when it was wanted.
    pub(super) fn by_hand(session: Alone, volume: Arc<Volume>) -> Flusher {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        Flusher { shared, by: By::Caller(Mutex::new(session), volume) }
    }

    /// Wants a flush that covers everything that has ended by now. Returns its number, for [`Flusher::is_durable`].
    pub(super) fn want(&self) -> u64 {
        let number = locked(&self.shared.state).numbers.want();
        match &self.by {
            By::Thread(_) => self.shared.changed.notify_all(),
            By::Caller(session, volume) => {
                let began = locked(&self.shared.state).numbers.begin();
                one(&mut locked(session), volume, &self.shared, began);
            }
        }
        number
    }

    /// Whether the flush of that number has ended well, or `None` while it is under way.
    pub(super) fn is_durable(&self, number: u64) -> Option<bool> {
        locked(&self.shared.state).numbers.is_durable(number)
    }

    /// Everything that has ended on any session of the store is durable when this returns true. Waits no longer than
    /// `timeout`.
    pub(super) fn flush(&self, timeout: Duration) -> bool {
        let number = self.want();
        let state = locked(&self.shared.state);
        let (state, _) = self
            .shared
            .changed
            .wait_timeout_while(state, timeout, |s| s.numbers.is_durable(number).is_none())
            .unwrap_or_else(PoisonError::into_inner);
        state.numbers.is_durable(number) == Some(true)
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        locked(&self.shared.state).stop = true;
        self.shared.changed.notify_all();
        if let By::Thread(thread) = &mut self.by
            && let Some(thread) = thread.take()
        {
            // With it goes its session, and with the last of them the store: another may want it then. A thread that
            // panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

fn run(mut session: Alone, volume: &Volume, shared: &Shared) {
    loop {
        let number = {
            let state = locked(&shared.state);
            let mut state = shared
                .changed
                .wait_while(state, |s| !s.stop && !s.numbers.is_wanted())
                .unwrap_or_else(PoisonError::into_inner);
            if state.stop {
                return;
            }
            state.numbers.begin()
        };
        one(&mut session, volume, shared, number);
    }
}

impl Flushed for Volume {
    fn keep_notes(&self) -> bool {
        self.backing().keep_notes()
    }

    fn losses(&self) -> u64 {
        self.backing().losses()
    }

    fn settled(&self) -> u64 {
        Volume::settled(self)
    }
}

/// One flush, begun under that number.
fn one(session: &mut Alone, volume: &Volume, shared: &Shared, number: u64) {
    let durable = has_made_durable(flush_once(session, number, shared), volume);
    locked(&shared.state).numbers.ended(number, durable);
    shared.changed.notify_all();
}

fn flush_once(session: &mut Alone, token: u64, shared: &Shared) -> bool {
    session.submit(token, Op::Flush);
    let until = Instant::now() + Duration::from_nanos(PATIENCE.0);
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match session.next(left, || locked(&shared.state).stop) {
            // Those that were given up earlier end late.
            Some(done) if done.token != token => {}
            Some(done) => return done.outcome.is_ok(),
            None => return false,
        }
    }
}
