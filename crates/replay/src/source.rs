//! The trace, shared by the workers: whoever runs dry decodes the next batch and deals it out.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use larder_trace::{Reader, Request, mix};
use parking_lot::Mutex;

use crate::ReplayError;
use crate::options::{Options, Order};
use crate::report::Snapshot;

/// Requests decoded under one lock.
const BATCH: usize = 512;
/// A worker that has so many waiting holds back the others' decoding: memory is bounded.
const WAITING: usize = 1 << 16;

/// A request with what the workers need to know about it.
#[derive(Clone, Copy)]
pub(crate) struct Item {
    pub(crate) request: Request,
    /// The object over all applications.
    pub(crate) object: u64,
    /// Past the warm-up.
    pub(crate) counted: bool,
    /// It has waited for the fetch of its object, which has ended when it is in a queue again.
    pub(crate) held: bool,
}

struct State {
    reader: Box<dyn Reader>,
    read: u64,
    done: bool,
    failure: Option<ReplayError>,
}

pub(crate) struct Source {
    state: Mutex<State>,
    inboxes: Vec<Mutex<VecDeque<Item>>>,
    order: Order,
    warmup: u64,
    timed: bool,
    /// A worker failed: the others stop.
    stop: AtomicBool,
    progress: (AtomicU64, AtomicU64),
    pub(crate) completed: AtomicU64,
    pub(crate) gets: AtomicU64,
    pub(crate) hits: AtomicU64,
    pub(crate) errors: AtomicU64,
    /// Furthest behind its time that a request was sent (timed replay), in nanoseconds.
    pub(crate) lag: AtomicU64,
}

/// What [`Source::take`] found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    Some,
    /// Nothing at the moment: another worker's queue is full.
    Later,
    /// The trace is at its end.
    End,
}

/// The object that a request names, over all applications.
pub(crate) fn object_of(request: &Request) -> u64 {
    mix(request.id ^ mix(u64::from(request.app)))
}

impl Source {
    pub(crate) fn new(reader: Box<dyn Reader>, threads: usize, options: &Options) -> Source {
        Source {
            state: Mutex::new(State { reader, read: 0, done: false, failure: None }),
            inboxes: (0..threads).map(|_| Mutex::new(VecDeque::new())).collect(),
            order: options.order,
            warmup: options.warmup,
            timed: options.speed.is_some(),
            stop: AtomicBool::new(false),
            progress: (AtomicU64::new(0), AtomicU64::new(0)),
            completed: AtomicU64::new(0),
            gets: AtomicU64::new(0),
            hits: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            lag: AtomicU64::new(0),
        }
    }

    /// Moves the next requests of worker `me` into `out`.
    pub(crate) fn take(&self, me: usize, out: &mut VecDeque<Item>) -> Taken {
        if self.stop.load(Ordering::Relaxed) {
            return Taken::End;
        }
        let from_inbox = |out: &mut VecDeque<Item>| {
            let mut inbox = self.inboxes[me].lock();
            let some = !inbox.is_empty();
            out.append(&mut inbox);
            some
        };
        let shared = self.order == Order::Key && self.inboxes.len() > 1;
        if shared && from_inbox(out) {
            return Taken::Some;
        }
        let mut state = self.state.lock();
        // Another worker may have dealt while this one waited for the lock.
        if shared && from_inbox(out) {
            return Taken::Some;
        }
        if shared && self.inboxes.iter().any(|i| i.lock().len() > WAITING) {
            return Taken::Later;
        }
        if state.done {
            return Taken::End;
        }
        let mut mine = false;
        for _ in 0..BATCH {
            let request = match state.reader.next() {
                Some(Ok(request)) => request,
                Some(Err(e)) => {
                    state.failure = Some(e.into());
                    state.done = true;
                    break;
                }
                None => {
                    state.done = true;
                    break;
                }
            };
            if self.timed && request.time.is_none() {
                state.failure = Some(ReplayError::Untimed);
                state.done = true;
                break;
            }
            let item = Item {
                request,
                object: object_of(&request),
                counted: state.read >= self.warmup,
                held: false,
            };
            state.read += 1;
            let owner = if shared { (item.object >> 32) as usize % self.inboxes.len() } else { me };
            if owner == me {
                out.push_back(item);
                mine = true;
            } else {
                self.inboxes[owner].lock().push_back(item);
            }
        }
        let p = state.reader.progress();
        self.progress.0.store(p.done, Ordering::Relaxed);
        self.progress.1.store(p.total.unwrap_or(0), Ordering::Relaxed);
        match (mine, state.done) {
            (true, _) => Taken::Some,
            (false, true) => Taken::End,
            (false, false) => Taken::Later,
        }
    }

    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(crate) fn snapshot(&self, elapsed: Duration) -> Snapshot {
        let total = self.progress.1.load(Ordering::Relaxed);
        let done = self.progress.0.load(Ordering::Relaxed);
        Snapshot {
            elapsed,
            completed: self.completed.load(Ordering::Relaxed),
            gets: self.gets.load(Ordering::Relaxed),
            hits: self.hits.load(Ordering::Relaxed),
            errors: self.errors.load(Ordering::Relaxed),
            fraction: (total > 0).then(|| (done as f64 / total as f64).min(1.0)),
        }
    }

    /// The trace's failure, if any, and the number of records passed over.
    pub(crate) fn finish(&self) -> (Option<ReplayError>, u64) {
        let mut state = self.state.lock();
        let skipped = state.reader.skipped();
        (state.failure.take(), skipped)
    }
}
