//! Work that an operator waits for, on a thread of its own: whoever asked is heard all the while, also where a store or the place of a marker does not answer,
//! and may say no.
//!
//! What waits for such a place says [what for](waits_for), looks whether it is [unwanted](is_unwanted), and ends then. A write of a marker has a moment
//! more: whether it is there would not be known.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::Duration;

use super::open::CacheError;
use super::operators::LOOK;
use super::{Core, locked};

/// Whoever waits for what a thread does.
#[derive(Debug, Default)]
pub struct Asker {
    /// He has said no.
    gone: AtomicBool,
    /// What that thread waits for now, if it waits for something that may not answer.
    waits_for: Mutex<Option<String>>,
}

impl Asker {
    /// He waits no longer.
    pub fn leaves(&self) {
        self.gone.store(true, Ordering::SeqCst);
    }

    /// Whether he does.
    pub fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst)
    }

    /// What is waited for that may not answer, if something is.
    pub fn waits_for(&self) -> Option<String> {
        locked(&self.waits_for).clone()
    }

    /// Does `work` on this thread: what waits there for something that does not answer looks whether he has gone, and ends then.
    pub fn attends<R>(self: &Arc<Self>, work: impl FnOnce() -> R) -> R {
        let before = ASKER.replace(Some(self.clone()));
        let done = work();
        ASKER.set(before);
        done
    }
}

thread_local! {
    /// Whoever waits for the work of this thread, if he may say no.
    static ASKER: RefCell<Option<Arc<Asker>>> = const { RefCell::new(None) };
}

/// Between two tries to have what another thread has.
const TRY: Duration = Duration::from_millis(5);

/// Whether whoever waits for what this thread does waits no longer.
pub(super) fn is_unwanted() -> bool {
    ASKER.with_borrow(|asker| asker.as_ref().is_some_and(|asker| asker.is_gone()))
}

/// Whether somebody may say that he waits no longer for what this thread does.
pub(super) fn is_attended() -> bool {
    ASKER.with_borrow(Option::is_some)
}

/// What this thread does from here on is not broken off: it sets right what was done.
pub(super) fn finishes() {
    ASKER.set(None);
}

/// This thread waits for something that may not answer, as long as this lives.
pub(super) struct Waits(Option<(Arc<Asker>, Option<String>)>);

/// For what is called `what`.
pub(super) fn waits_for(what: &str) -> Waits {
    let asker = ASKER.with_borrow(Clone::clone);
    Waits(asker.map(|asker| {
        let before = locked(&asker.waits_for).replace(what.to_owned());
        (asker, before)
    }))
}

impl Drop for Waits {
    fn drop(&mut self) {
        if let Some((asker, before)) = self.0.take() {
            *locked(&asker.waits_for) = before;
        }
    }
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
        self.attended_by(&Arc::default(), first, go_on, work)
    }

    /// The same, where what is waited for is to be known.
    ///
    /// # Errors
    /// Those of `work`.
    pub(super) fn attended_by<S: Copy + Send, R: Send>(
        &self,
        asker: &Arc<Asker>,
        first: S,
        go_on: &mut dyn FnMut(S) -> bool,
        work: impl FnOnce(&mut dyn FnMut(S) -> bool) -> Result<R, CacheError> + Send,
    ) -> Result<R, CacheError> {
        if self.hand.get().is_some() || is_attended() {
            return work(go_on);
        }
        let (says, said) = mpsc::channel::<S>();
        let (answers, answered) = mpsc::channel::<bool>();
        let of = asker.clone();
        let run = move || {
            // (Whoever asks is there until this ends.)
            let mut asks = |state| says.send(state).is_ok() && answered.recv().unwrap_or(false);
            of.attends(|| work(&mut asks))
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
                    asker.leaves();
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
