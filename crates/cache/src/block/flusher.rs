//! Making a volume's store durable, on a thread of its own: a store that hangs holds up nobody else.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_engine::block::node::flushes::{Flushed, Numbers, PATIENCE, has_made_durable};
use larder_volume::Alone;
use larder_volume::op::Op;

use super::locked;
use super::volume::Volume;

/// A store that was not flushed for so long is left alone until it is.
const REST: Duration = Duration::from_secs(5);

#[derive(Default)]
struct State {
    numbers: Numbers,
    stop: bool,
}

impl State {
    /// Whether the flush of that number has ended well, or `None` while it is under way. Once this has ended none does.
    fn is_durable(&self, number: u64) -> Option<bool> {
        self.numbers.is_durable(number).or(self.stop.then_some(false))
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// A way to make a volume's store durable, until it [ends](Flusher::end). Whoever waits for the store waits without a lock.
pub(super) struct Flusher {
    shared: Arc<Shared>,
    by: By,
}

/// Who flushes. No lock is held while somebody does.
enum By {
    /// A thread, until somebody waits for its end.
    Thread(Mutex<Option<JoinHandle<()>>>),
    /// Whoever looks whether a flush has ended, with this as long as nobody else has it.
    Caller(Mutex<Option<(Alone, Arc<Volume>)>>),
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
        Flusher { shared, by: By::Thread(Mutex::new(thread)) }
    }

    /// Without a thread: a flush has ended when somebody looks whether it has.
    pub(super) fn by_hand(session: Alone, volume: Arc<Volume>) -> Flusher {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new() });
        Flusher { shared, by: By::Caller(Mutex::new(Some((session, volume)))) }
    }

    /// Wants a flush that covers everything that has ended by now. Returns its number, for [`Flusher::is_durable`].
    pub(super) fn want(&self) -> u64 {
        let number = locked(&self.shared.state).numbers.want();
        self.shared.changed.notify_all();
        number
    }

    /// Whether the flush of that number has ended well, or `None` while it is under way. Once this has ended none does.
    pub(super) fn is_durable(&self, number: u64) -> Option<bool> {
        self.flush_by_hand();
        locked(&self.shared.state).is_durable(number)
    }

    /// Without a thread: a flush that is wanted is done.
    fn flush_by_hand(&self) {
        let By::Caller(mine) = &self.by else { return };
        let Some((mut session, volume)) = locked(mine).take() else { return };
        let mut state = locked(&self.shared.state);
        let began = state.numbers.is_wanted().then(|| state.numbers.begin());
        drop(state);
        if let Some(number) = began {
            one(&mut session, &volume, &self.shared, number);
        }
        *locked(mine) = Some((session, volume));
    }

    /// Waits for so long at most until the flush of that number has ended. Returns as [`Flusher::is_durable`].
    pub(super) fn wait(&self, number: u64, timeout: Duration) -> Option<bool> {
        self.flush_by_hand();
        let state = locked(&self.shared.state);
        let waited = self
            .shared
            .changed
            .wait_timeout_while(state, timeout, |s| s.is_durable(number).is_none());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_durable(number)
    }

    /// Everything that has ended on any session of the store is durable when this returns true. Waits no longer than
    /// `timeout`.
    pub(super) fn flush(&self, timeout: Duration) -> bool {
        let number = self.want();
        self.wait(number, timeout) == Some(true)
    }

    /// No flush begins any more, and none under way is waited for, by anybody. The session is gone behind this, and with the last of
    /// them the store: another may want it then.
    pub(super) fn end(&self) {
        locked(&self.shared.state).stop = true;
        self.shared.changed.notify_all();
        match &self.by {
            By::Thread(thread) => {
                let thread = locked(thread).take();
                // A thread that panicked has said so on stderr already.
                thread.map(JoinHandle::join).and_then(Result::ok).unwrap_or_default();
            }
            By::Caller(mine) => {
                let mine = locked(mine).take();
                drop(mine);
            }
        }
    }
}

impl Drop for Flusher {
    fn drop(&mut self) {
        self.end();
    }
}

fn run(mut session: Alone, volume: &Volume, shared: &Shared) {
    loop {
        let number = {
            let nothing = |s: &mut State| !s.stop && !s.numbers.is_wanted();
            let state = locked(&shared.state);
            let waited = shared.changed.wait_timeout_while(state, REST, nothing);
            let (mut state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
            if waited.timed_out() {
                drop(state);
                session.rest();
                let waited = shared.changed.wait_while(locked(&shared.state), nothing);
                state = waited.unwrap_or_else(PoisonError::into_inner);
            }
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
