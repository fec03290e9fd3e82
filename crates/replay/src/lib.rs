//! Replays a trace against any memcached server over its text protocol, or block I/O against an export of an NBD server
//! ([`run_volume`]), and measures.
//!
//! [`run`] starts the workers; each owns one epoll and its connections, and keeps every connection's pipeline full
//! (closed loop) or sends at the recorded times. Requests for one object go through one connection in the order of the
//! trace, unless [`Order::Any`] is asked for.

#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a load generator is measured in wall time and runs threads; it stands above the runtime"
)]

mod connection;
mod content;
mod options;
mod protocol;
mod report;
mod source;
mod volume;
mod worker;

pub use options::{Options, Order, Target};
pub use report::{Latency, OpReport, Report, Snapshot};
pub use volume::{VolumeOpReport, VolumeOptions, VolumeReport, run_volume};

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_trace::{Reader, TraceError};

use source::Source;
use worker::Worker;

/// Why a replay could not run to its end.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The target is no address.
    #[error("'{0}' is not a server's address: write HOST:PORT (127.0.0.1:11211) or unix:PATH")]
    Target(String),
    /// No connection could be made.
    #[error("cannot connect to {target}: {source}; is a memcached server listening there?")]
    Connect {
        /// The address.
        target: String,
        /// The reason.
        source: io::Error,
    },
    /// The event queue could not be set up.
    #[error("cannot set up polling: {0}")]
    Poll(io::Error),
    /// The trace failed on the way.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A timed replay of a trace without times.
    #[error(
        "the trace has no times, so it cannot be replayed by them: leave --timed out, or give --rate REQUESTS_PER_SECOND"
    )]
    Untimed,
    /// The export cannot be had.
    #[error(transparent)]
    Export(#[from] larder_volume::BackingError),
    /// A trace of something else before an export.
    #[error(
        "the trace has a '{0}', which is no block I/O: replay it against a memcached server (--to HOST:PORT)"
    )]
    NotBlocks(&'static str),
    /// A worker came to an unexpected end.
    #[error("a worker thread panicked")]
    Panicked,
}

/// Replays `trace` and returns what was measured. `progress` is called about five times a second.
///
/// # Errors
/// When no connection can be made or kept, or the trace cannot be read. What was measured up to then comes with the
/// error.
pub fn run(
    trace: Box<dyn Reader>,
    options: &Options,
    mut progress: impl FnMut(&Snapshot),
) -> Result<Report, (ReplayError, Option<Box<Report>>)> {
    let threads = options.threads.clamp(1, options.connections.max(1));
    let source = Arc::new(Source::new(trace, threads, options));
    let started = Instant::now();
    let mut workers = Vec::new();
    for index in 0..threads {
        // Connections are spread as evenly as they go.
        let connections = options.connections.max(1) / threads
            + usize::from(index < options.connections.max(1) % threads);
        let worker = Worker::new(index, connections, options.clone(), Arc::clone(&source), started)
            .map_err(|e| (e, None))?;
        workers.push(worker);
    }
    let handles: Vec<_> =
        workers.into_iter().map(|w| std::thread::spawn(move || w.run())).collect();
    let mut last = Instant::now();
    while handles.iter().any(|h| !h.is_finished()) {
        std::thread::sleep(Duration::from_millis(5));
        if last.elapsed() >= Duration::from_millis(200) {
            last = Instant::now();
            progress(&source.snapshot(started.elapsed()));
        }
    }
    let mut outcome = Ok(());
    let mut total = report::Tally::default();
    for handle in handles {
        match handle.join() {
            Ok((tally, result)) => {
                total.merge(&tally);
                if outcome.is_ok() {
                    outcome = result;
                }
            }
            Err(_) => outcome = Err(ReplayError::Panicked),
        }
    }
    let elapsed = started.elapsed();
    progress(&source.snapshot(elapsed));
    let (failure, skipped) = source.finish();
    if let (Ok(()), Some(e)) = (&outcome, failure) {
        outcome = Err(e);
    }
    let peak_lag = source.lag.load(Ordering::Relaxed);
    let report = total.report(options, threads, elapsed, skipped, peak_lag);
    match outcome {
        Ok(()) => Ok(report),
        Err(e) => Err((e, Some(Box::new(report)))),
    }
}
