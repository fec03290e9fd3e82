//! What the cleaner waits on: a shard that is short of room, a model that has been fitted, a time, or the stop.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_base::{AppId, Nanos};
use larder_policy::learn::Model;

use super::locked;

/// A clock that a test has stopped, or moves, is looked at this often.
const LOOK: Duration = Duration::from_secs(1);

/// What the cleaner is told, and by whom it is woken; and the threads of further drives, who hear only that shards are short of room.
#[derive(Default)]
pub(super) struct Notifier {
    state: Mutex<State>,
    changed: Condvar,
    /// The cleaner rests.
    rested: Condvar,
    stop: AtomicBool,
}

#[derive(Default)]
struct State {
    heard: Heard,
    /// Nothing is left to be done until `due`.
    resting: bool,
    due: Nanos,
    /// Further drives' threads.
    drives: Vec<OfDrive>,
}

/// The thread of a further drive.
struct OfDrive {
    place: usize,
    rung: bool,
    resting: bool,
    due: Nanos,
}

/// What has come since the cleaner listened last.
#[derive(Default)]
pub(super) struct Heard {
    /// A shard is short of room, or something else is to be looked at.
    pub(super) rung: bool,
    /// Models that were asked for.
    pub(super) fitted: Vec<(AppId, Option<Model>)>,
}

impl Heard {
    fn is_silence(&self) -> bool {
        !self.rung && self.fitted.is_empty()
    }
}

impl Notifier {
    /// Wakes the cleaner, and the threads of further drives.
    pub(super) fn notify(&self) {
        let mut state = locked(&self.state);
        state.heard.rung = true;
        state.drives.iter_mut().for_each(|drive| drive.rung = true);
        let several = !state.drives.is_empty();
        drop(state);
        if several {
            self.changed.notify_all();
        } else {
            self.changed.notify_one();
        }
    }

    /// Wakes the thread of the drive at this place.
    pub(super) fn pass(&self, drive: usize) {
        let mut state = locked(&self.state);
        match state.drives.iter_mut().find(|other| other.place == drive) {
            Some(other) => other.rung = true,
            None => state.heard.rung = true,
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The thread of the further drive at this place is to be woken, too. Returns its number here.
    pub(super) fn join(&self, place: usize) -> usize {
        let mut state = locked(&self.state);
        state.drives.push(OfDrive { place, rung: false, resting: false, due: Nanos::ZERO });
        state.drives.len() - 1
    }

    /// Whether a drive's thread has been called.
    pub(super) fn hear_of(&self, number: usize) -> bool {
        let mut state = locked(&self.state);
        let mine = &mut state.drives[number];
        mine.resting = false;
        std::mem::take(&mut mine.rung)
    }

    /// A drive's thread waits until it is called, or `now` says `due`.
    pub(super) fn rest_of(&self, number: usize, due: Nanos, now: impl Fn() -> Nanos) {
        let mut state = locked(&self.state);
        state.drives[number].due = due;
        while !state.drives[number].rung && !self.stopped() {
            let left = due.saturating_sub(now());
            if left == Nanos::ZERO {
                return;
            }
            state.drives[number].resting = true;
            self.rested.notify_all();
            state = wait(&self.changed, state, Duration::from_nanos(left.0).min(LOOK));
        }
    }

    /// A model that was asked for, or none.
    pub(super) fn fitted(&self, app: AppId, model: Option<Model>) {
        locked(&self.state).heard.fitted.push((app, model));
        self.changed.notify_all();
    }

    /// The cleaner is to end.
    pub(super) fn stop(&self) {
        // Under the lock, or it would be missed between the cleaner's look and its wait.
        let state = locked(&self.state);
        self.stop.store(true, Ordering::Release);
        drop(state);
        self.changed.notify_all();
        self.rested.notify_all();
    }

    /// Whether the cleaner is to end.
    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Takes what has come.
    pub(super) fn hear(&self) -> Heard {
        let mut state = locked(&self.state);
        state.resting = false;
        std::mem::take(&mut state.heard)
    }

    /// Waits until something comes, or `now` says `due`. While a model is being fitted not all is done.
    pub(super) fn rest(&self, due: Nanos, fitting: bool, now: impl Fn() -> Nanos) {
        let mut state = locked(&self.state);
        state.due = due;
        while state.heard.is_silence() && !self.stopped() {
            let left = due.saturating_sub(now());
            if left == Nanos::ZERO {
                return;
            }
            if !fitting {
                state.resting = true;
                self.rested.notify_all();
            }
            state = wait(&self.changed, state, Duration::from_nanos(left.0).min(LOOK));
        }
    }

    /// Waits until the cleaner rests with nothing to do by `now`.
    pub(super) fn settle(&self, now: Nanos) {
        let mut state = locked(&self.state);
        loop {
            let rests = |d: &OfDrive| d.resting && !d.rung && d.due > now;
            let cleaner = state.resting && state.heard.is_silence() && state.due > now;
            if self.stopped() || cleaner && state.drives.iter().all(rests) {
                return;
            }
            for drive in &mut state.drives {
                if drive.resting && drive.due <= now {
                    drive.rung = true;
                    self.changed.notify_all();
                }
            }
            if state.resting && state.due <= now {
                state.heard.rung = true;
                self.changed.notify_all();
            }
            state = wait(&self.rested, state, LOOK);
        }
    }
}

fn wait<'a>(on: &Condvar, state: MutexGuard<'a, State>, most: Duration) -> MutexGuard<'a, State> {
    match on.wait_timeout(state, most) {
        Ok((state, _)) => state,
        Err(poisoned) => PoisonError::into_inner(poisoned).0,
    }
}
