//! Volumes whose store could not be opened at the start, and that are attached when it can be.
//!
//! Each has a thread of its own: a store that keeps whoever opens it waiting keeps no other.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::protocol::Progress;
use super::status::{StoreStatus, VolumeStatus};
use super::{Control, HowOpened};
use crate::backing::Uri;

/// Between the end of one attempt and the next.
pub const RETRY: Duration = Duration::from_secs(5);

/// A volume that waits for its store.
#[derive(Clone, Debug)]
pub struct Absent {
    /// Its name.
    pub name: String,
    /// Its store.
    pub uri: Uri,
    /// It will only be read.
    pub read_only: bool,
    /// Why the store could not be opened, or the volume not be served with it, last.
    pub why: String,
    /// What that was.
    pub how: Lacks,
}

/// What a volume that waits lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lacks {
    /// Its store.
    Store,
    /// Its store is there; something else does not answer, or is not to be had now.
    More,
    /// Nothing that comes by itself: its store is there, and the volume is refused.
    Word,
}

impl Lacks {
    /// The state of its store, in a word.
    fn state(self) -> &'static str {
        match self {
            Lacks::Store | Lacks::More => "waiting",
            Lacks::Word => "refused",
        }
    }

    /// What is the matter with its store.
    fn says(self) -> &'static str {
        match self {
            Lacks::Store => "could not be opened",
            Lacks::More => "is there, and something else that the volume needs is not yet",
            Lacks::Word => "is there, and the volume is not served with it",
        }
    }
}

struct Waiting {
    absent: Absent,
    since: Instant,
    /// Attempts that failed.
    failed: u64,
}

#[derive(Default)]
struct State {
    volumes: BTreeMap<String, Waiting>,
    ended: bool,
}

/// See the [module](self).
#[derive(Default)]
pub(super) struct WaitingVolumes {
    state: Mutex<State>,
    changed: Condvar,
}

impl WaitingVolumes {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn forget(&self, name: &str) -> bool {
        let was = self.state().volumes.remove(name).is_some();
        self.changed.notify_all();
        was
    }

    fn has(&self, name: &str) -> bool {
        let state = self.state();
        !state.ended && state.volumes.contains_key(name)
    }

    /// The store that the volume of that name waits for.
    pub(super) fn store_of(&self, name: &str) -> Option<Uri> {
        let state = self.state();
        state.volumes.get(name).map(|waiting| waiting.absent.uri.clone())
    }

    /// Sleeps until the next attempt. Returns what is to be opened; `None` when there is nothing to wait for any more.
    fn pause(&self, name: &str) -> Option<Absent> {
        let mut state = self.state();
        let waits = |s: &mut State| !s.ended && s.volumes.contains_key(name);
        self.changed.wait_while_for(&mut state, waits, RETRY);
        let waiting = state.volumes.get(name).filter(|_| !state.ended)?;
        Some(waiting.absent.clone())
    }

    /// An attempt failed. What is new about it is said.
    fn failed(&self, name: &str, how: Lacks, why: String) {
        let mut state = self.state();
        let Some(waiting) = state.volumes.get_mut(name) else { return };
        waiting.failed += 1;
        if waiting.absent.why != why || waiting.absent.how != how {
            match how {
                Lacks::Word => tracing::error!(
                    "volume '{name}' is not served though its store is there: {why}"
                ),
                Lacks::More => tracing::warn!("volume '{name}' waits, its store is there: {why}"),
                Lacks::Store => tracing::warn!("volume '{name}' waits for its store: {why}"),
            }
            (waiting.absent.why, waiting.absent.how) = (why, how);
        }
    }

    /// They as they are shown.
    pub(super) fn status(&self) -> Vec<VolumeStatus> {
        let state = self.state();
        let show = |waiting: &Waiting| VolumeStatus {
            name: waiting.absent.name.clone(),
            uri: waiting.absent.uri.to_string(),
            read_only: waiting.absent.read_only,
            rule: larder_policy::block::Rule::ByPolicy.as_str().to_owned(),
            store: StoreStatus {
                state: waiting.absent.how.state().into(),
                since_seconds: Some(waiting.since.elapsed().as_secs()),
                trouble: Some(format!(
                    "{}, and is tried again every {} s: {}",
                    waiting.absent.how.says(),
                    RETRY.as_secs(),
                    waiting.absent.why
                )),
                failures: waiting.failed,
                last_failure: Some(waiting.absent.why.clone()),
                ..StoreStatus::default()
            },
            ..VolumeStatus::default()
        };
        state.volumes.values().map(show).collect()
    }
}

impl Control {
    /// Tries again and again to open the stores of these volumes, and attaches each when its store is there: what is cached
    /// of it is used if it is proved to be unchanged, as with any volume that is attached.
    ///
    /// # Errors
    /// When a thread cannot be had.
    pub fn wait_for(self: &Arc<Self>, absent: Vec<Absent>) -> io::Result<()> {
        for absent in absent {
            let name = absent.name.clone();
            tracing::error!(
                "volume '{name}' is not served yet: {}. It is tried again every {} s; the other volumes are served",
                absent.why,
                RETRY.as_secs()
            );
            let waiting = Waiting { absent, since: Instant::now(), failed: 1 };
            let count = {
                let mut state = self.waiting.state();
                state.volumes.insert(name.clone(), waiting);
                state.volumes.len()
            };
            self.volumes.set_awaited(count);
            let control = self.clone();
            std::thread::Builder::new()
                .name("block-waits".into())
                .spawn(move || control.wait_for_one(&name))?;
        }
        Ok(())
    }

    fn wait_for_one(&self, name: &str) {
        while let Some(absent) = self.waiting.pause(name) {
            let opened = match self.cache.state_dir_trouble() {
                None => {
                    let how = HowOpened { read_only: absent.read_only, ..HowOpened::default() };
                    (self.open)(name, &absent.uri, how).map_err(|e| e.to_string())
                }
                Some(trouble) => Err(trouble),
            };
            let _one = self.cache.changing().volume(name);
            // It may have been attached or put aside by hand meanwhile, or the daemon be about to end.
            if !self.waiting.has(name) {
                return;
            }
            let attached = match opened {
                Ok(store) => {
                    let mut wish = self.cache.config().wish_of(name);
                    wish.back = wish.back.filter(|_| !absent.read_only);
                    let mut go_on = |_: Progress| self.waiting.has(name);
                    self.attach_store(name, store, false, (&wish, &mut go_on)).map_err(|e| {
                        let how = if e.may_pass { Lacks::More } else { Lacks::Word };
                        (how, e.refusal.message)
                    })
                }
                Err(error) => Err((Lacks::Store, error)),
            };
            match attached {
                Ok(_) => {
                    self.forget_waiting(name);
                    return;
                }
                Err((how, why)) => self.waiting.failed(name, how, why),
            }
        }
    }

    /// Nobody waits for that volume any more. Returns whether somebody did.
    pub(super) fn forget_waiting(&self, name: &str) -> bool {
        let was = self.waiting.forget(name);
        self.volumes.set_awaited(self.waiting.state().volumes.len());
        was
    }

    /// No volume is waited for any more, and none is being attached when this returns.
    pub fn end_waiting(&self) {
        self.waiting.state().ended = true;
        self.waiting.changed.notify_all();
        self.cache.changing().settle();
    }
}
