//! Signals to a daemon, from its start on. One that stops it while it still starts ends the start as soon as that can be, and the process in any case: what
//! a start has changed is found again, as after a kill.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use larder_block::backing::{Backing, BackingError, Uri};
use larder_block::cache::Asker;
use larder_block::control::{HowOpened, OpenStore};
use signal_hook::iterator::Signals;
use tracing::error;

use crate::error::CliError;
use crate::signals::Meaning;

/// Signals within so long of the first are the same stop: it often comes as two, to the process and to its group.
const ONE_STOP: Duration = Duration::from_millis(500);
/// A start has so long to end.
const ENDS: Duration = Duration::from_secs(8);
/// Between two looks whether it is to.
const LOOK: Duration = Duration::from_millis(50);

/// See the [module](self).
pub(super) struct Stops {
    signals: Receiver<i32>,
    asker: Arc<Asker>,
    started: Arc<AtomicBool>,
}

impl Stops {
    /// Takes the signals from here on.
    ///
    /// # Errors
    /// When there is no thread to be had.
    pub(super) fn watch(mut signals: Signals) -> Result<Stops, CliError> {
        let (tell, told) = mpsc::channel();
        let (asker, started) = (Arc::<Asker>::default(), Arc::<AtomicBool>::default());
        let (leaves, is_started) = (asker.clone(), started.clone());
        let watch = move || {
            let mut first: Option<Instant> = None;
            for signal in signals.forever() {
                if Meaning::of(signal) == Meaning::Stop {
                    // Whoever asks twice does not want to wait: what is on flash is found again all the same.
                    if first.is_some_and(|first| first.elapsed() > ONE_STOP) {
                        error!("second signal: ending at once");
                        std::process::exit(1);
                    }
                    if first.replace(first.unwrap_or_else(Instant::now)).is_none() {
                        leaves.leaves();
                        ends_in_time(leaves.clone(), is_started.clone());
                    }
                }
                // Where nobody takes it any more the process is about to end.
                let _ = tell.send(signal);
            }
        };
        let spawned = std::thread::Builder::new().name("larder-signals".into()).spawn(watch);
        spawned.map_err(|e| CliError::Runtime(format!("a thread: {e}")))?;
        Ok(Stops { signals: told, asker, started })
    }

    /// A stop came before the start had ended.
    pub(super) fn came_early(&self) -> bool {
        self.asker.is_gone() && !self.started.load(Ordering::SeqCst)
    }

    /// Does a part of the start: what waits there for something that does not answer ends when a stop comes.
    pub(super) fn attends<R>(&self, work: impl FnOnce() -> R) -> R {
        self.asker.attends(work)
    }

    /// Opens a store, unless a stop comes meanwhile.
    ///
    /// # Errors
    /// When one has come.
    pub(super) fn open(
        &self,
        open: &Arc<OpenStore>,
        (name, uri, how): (&str, &Uri, HowOpened),
    ) -> Result<Result<Box<dyn Backing>, BackingError>, CliError> {
        let (tell, told) = mpsc::channel();
        let (opens, of, at) = (open.clone(), name.to_owned(), uri.clone());
        let thread = std::thread::Builder::new().name("block-opens".into());
        // (Where nobody waits for it any more the process is about to end.)
        let spawned = thread.spawn(move || drop(tell.send(opens(&of, &at, how))));
        if spawned.is_err() {
            return Ok(open(name, uri, how));
        }
        loop {
            match told.recv_timeout(LOOK) {
                Ok(opened) => return Ok(opened),
                Err(RecvTimeoutError::Timeout) if !self.asker.is_gone() => {}
                Err(_) => {
                    let why = format!("volume '{name}': its store '{uri}' is not open");
                    return Err(CliError::Runtime(why));
                }
            }
        }
    }

    /// The start has ended. Signals that came meanwhile, and those that come.
    pub(super) fn started(&self) -> impl Iterator<Item = i32> + '_ {
        self.started.store(true, Ordering::SeqCst);
        self.signals.iter()
    }
}

/// A start that goes on for too long after a stop came ends with the process.
fn ends_in_time(asker: Arc<Asker>, started: Arc<AtomicBool>) {
    let ends = move || {
        std::thread::sleep(ENDS);
        if !started.load(Ordering::SeqCst) {
            let waits = asker.waits_for().unwrap_or_else(|| "what it needs".to_owned());
            error!(
                "stopping while it was starting: {waits} has not answered for {} s more: ending at once",
                ENDS.as_secs()
            );
            std::process::exit(1);
        }
    };
    if std::thread::Builder::new().name("larder-ends".into()).spawn(ends).is_err() {
        std::process::exit(1);
    }
}
