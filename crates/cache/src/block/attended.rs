//! Work that an operator waits for, on a thread of its own: whoever asked is heard all the while, also where a store or the place of a marker does not answer,
//! and may say no.
//!
//! What waits for such a place looks whether it is [unwanted](is_unwanted), and ends then. A write of a marker is not broken off: whether it is there would
//! not be known.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use super::Core;
use super::open::CacheError;
use super::operators::LOOK;

thread_local! {
    /// Whoever waits for the work of this thread has said no.
    static UNWANTED: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Between two tries to have what another thread has.
const TRY: Duration = Duration::from_millis(5);

/// Whether whoever waits for what this thread does waits no longer.
pub(super) fn is_unwanted() -> bool {
    UNWANTED.with_borrow(|flag| flag.as_ref().is_some_and(|flag| flag.load(Ordering::SeqCst)))
}

/// Whether somebody may say that he waits no longer for what this thread does.
pub(super) fn is_attended() -> bool {
    UNWANTED.with_borrow(Option::is_some)
}

/// What this thread does from here on is not broken off: it sets right what was done.
pub(super) fn finishes() {
    UNWANTED.set(None);
}

/// Locks what somebody may have who waits for a place that does not answer. `None` if this is unwanted by then.
pub(super) fn lock_wanted<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    if !is_attended() {
        return Some(super::locked(mutex));
    }
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if is_unwanted() => return None,
            Err(TryLockError::WouldBlock) => std::thread::sleep(TRY),
        }
    }
}

impl Core {
    /// Does `work`, which is given a way to ask whoever waits for it: so does this, with what was said last or `first`, while it is silent. Once `go_on` has
    /// said no it is not asked again.
    ///
    /// # Errors
    /// Those of `work`.
    pub(super) fn attended<S: Copy + Send, R: Send>(
        &self,
        first: S,
        go_on: &mut dyn FnMut(S) -> bool,
        work: impl FnOnce(&mut dyn FnMut(S) -> bool) -> Result<R, CacheError> + Send,
    ) -> Result<R, CacheError> {
        if self.hand.get().is_some() || is_attended() {
            return work(go_on);
        }
        let unwanted = Arc::new(AtomicBool::new(false));
        let (says, said) = mpsc::channel::<S>();
        let (answers, answered) = mpsc::channel::<bool>();
        let flag = unwanted.clone();
        let run = move || {
            UNWANTED.set(Some(flag));
            // (Whoever asks is there until this ends.)
            let mut asks = |state| says.send(state).is_ok() && answered.recv().unwrap_or(false);
            work(&mut asks)
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("block-operator".into());
            let thread = thread
                .spawn_scoped(scope, run)
                .map_err(|e| CacheError::System { what: "a thread", reason: e.to_string() })?;
            let (mut last, mut wanted) = (first, true);
            loop {
                let asks = said.recv_timeout(LOOK);
                match asks {
                    Ok(state) => last = state,
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                wanted = wanted && go_on(last);
                if !wanted {
                    unwanted.store(true, Ordering::SeqCst);
                }
                if asks.is_ok() {
                    // It waits for this.
                    let _ = answers.send(wanted);
                }
            }
            let ended_early = || CacheError::System {
                what: "an operator's work",
                reason: "its thread ended early".to_owned(),
            };
            thread.join().unwrap_or_else(|_| Err(ended_early()))
        })
    }
}
