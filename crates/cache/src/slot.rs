//! Where something that was begun leaves what it came to, for a future of no particular runtime or for who blocks.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// One result.
pub(crate) struct Slot<T> {
    state: Mutex<State<T>>,
    filled: Condvar,
}

struct State<T> {
    came: Option<T>,
    done: bool,
    waker: Option<Waker>,
}

impl<T> Default for Slot<T> {
    fn default() -> Slot<T> {
        let state = State { came: None, done: false, waker: None };
        Slot { state: Mutex::new(state), filled: Condvar::new() }
    }
}

impl<T> Slot<T> {
    /// Nothing panics while it holds this lock.
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The first that is given counts.
    pub(crate) fn fill(&self, came: T) {
        let mut state = self.lock();
        if state.done {
            return;
        }
        state.came = Some(came);
        state.done = true;
        let waker = state.waker.take();
        drop(state);
        self.filled.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Whether it was filled.
    pub(crate) fn is_done(&self) -> bool {
        self.lock().done
    }

    /// Blocks until it is filled.
    pub(crate) fn wait(&self) -> T {
        let mut state = self.lock();
        loop {
            if let Some(came) = state.came.take() {
                return came;
            }
            state = self.filled.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// For a future.
    pub(crate) fn poll(&self, context: &mut Context<'_>) -> Poll<T> {
        let mut state = self.lock();
        if let Some(came) = state.came.take() {
            return Poll::Ready(came);
        }
        match &mut state.waker {
            Some(waker) => waker.clone_from(context.waker()),
            none => *none = Some(context.waker().clone()),
        }
        Poll::Pending
    }
}
