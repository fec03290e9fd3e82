//! Threads that have lanes, for programs that have none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use larder_base::Nanos;
use larder_policy::block::BlockKind;
use larder_runtime::{AlignedBuf, RingChoice};
use larder_volume::op::{Failure, FailureKind, Outcome};
use mio::Waker;
use parking_lot::Mutex;
use slab::Slab;

use super::lane::Lane;
use super::service::{Answer, Command};
use super::{CacheError, Core, Volume};

/// Requests under way are waited for so long at the end. One that waits for a store that is gone may wait for ever.
const END: Duration = Duration::from_secs(if cfg!(test) { 10 } else { 120 });
/// Meanwhile a thread that has nothing under way looks this often whether the others have.
const SOON: Duration = Duration::from_millis(10);
/// A thread that has nothing to do looks whether it is to end this often, though it is woken for it.
const IDLE: Duration = Duration::from_secs(1);

/// With the buffer of a read, and how often the store may have lost writes by then.
type Hears = Box<dyn FnOnce(Outcome, Option<AlignedBuf>, Option<u64>) + Send>;

/// Hears how a request has ended: at the latest when nobody will do it any more.
pub(super) struct Ended(Option<Hears>);

impl Ended {
    pub(super) fn new(
        hears: impl FnOnce(Outcome, Option<AlignedBuf>, Option<u64>) + Send + 'static,
    ) -> Ended {
        Ended(Some(Box::new(hears)))
    }

    fn tell(mut self, answer: Answer) {
        if let Some(hears) = self.0.take() {
            hears(answer.outcome, answer.buf, answer.losses);
        }
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        if let Some(hears) = self.0.take() {
            let failure = Failure::new(FailureKind::Gone, "the cache is closed");
            hears(Err(failure), None, None);
        }
    }
}

/// A request.
pub(super) struct Ask {
    pub(super) volume: Arc<Volume>,
    pub(super) command: Command,
    pub(super) holds: BlockKind,
    pub(super) ended: Ended,
}

/// What a thread is told.
struct Inbox {
    asks: Mutex<Option<Vec<Ask>>>,
    waker: Arc<Waker>,
}

/// Requests that a lane has, by ticket.
#[derive(Default)]
struct UnderWay(Slab<Ended>);

impl UnderWay {
    fn submit(&mut self, lane: &mut Lane, Ask { volume, command, holds, ended }: Ask) {
        let ticket = self.0.insert(ended);
        lane.submit(&volume, ticket as u64, command, holds);
    }

    fn answer(&mut self, lane: &mut Lane) -> Vec<(Ended, Answer)> {
        let taken = std::iter::from_fn(|| lane.pop());
        let taken = taken.filter_map(|answer| {
            let ended = self.0.try_remove(usize::try_from(answer.ticket).ok()?)?;
            Some((ended, answer))
        });
        taken.collect()
    }
}

fn tell(ended: Vec<(Ended, Answer)>) {
    ended.into_iter().for_each(|(ended, answer)| ended.tell(answer));
}

/// See the [module](self).
pub(super) struct Workers {
    inboxes: Vec<Arc<Inbox>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// Of the threads, however far their end is.
    ids: Vec<ThreadId>,
    stop: Arc<AtomicBool>,
    /// Threads that have, or may have, requests under way: until there are none all go on, since each does what requests of others wait for.
    busy: Arc<AtomicUsize>,
    /// Without threads.
    by_hand: Option<Mutex<(UnderWay, Arc<Core>)>>,
}

impl Workers {
    /// None: requests are done as the program turns the cache.
    pub(super) fn by_hand(core: Arc<Core>) -> Workers {
        Workers {
            inboxes: Vec::new(),
            threads: Mutex::default(),
            ids: Vec::new(),
            stop: Arc::default(),
            busy: Arc::default(),
            by_hand: Some(Mutex::new((UnderWay::default(), core))),
        }
    }

    /// So many threads for `core`, which has as many workers.
    ///
    /// # Errors
    /// When a ring, a descriptor or a thread cannot be had.
    pub(super) fn start(
        core: &Arc<Core>,
        threads: usize,
        ring: RingChoice,
    ) -> Result<Workers, CacheError> {
        let mut workers = Workers {
            inboxes: Vec::new(),
            threads: Mutex::default(),
            ids: Vec::new(),
            stop: Arc::default(),
            busy: Arc::default(),
            by_hand: None,
        };
        let fail =
            |e: std::io::Error| CacheError::System { what: "a thread", reason: e.to_string() };
        for me in 0..threads {
            // A ring belongs to the thread that makes it.
            let (tell, told) = std::sync::mpsc::channel();
            let (core, stop, busy) = (core.clone(), workers.stop.clone(), workers.busy.clone());
            let thread = std::thread::Builder::new()
                .name(format!("larder-block-{me}"))
                .spawn(move || match Lane::new(core, me, ring) {
                    Ok(lane) => {
                        let asks = Mutex::new(Some(Vec::new()));
                        let inbox = Arc::new(Inbox { asks, waker: lane.waker().clone() });
                        // Whoever starts it waits for this.
                        let _ = tell.send(Ok(inbox.clone()));
                        run(lane, &inbox, &stop, &busy);
                    }
                    Err(error) => drop(tell.send(Err(error))),
                })
                .map_err(fail)?;
            workers.ids.push(thread.thread().id());
            workers.threads.lock().push(thread);
            let gone = || std::io::Error::other("it ended at once");
            let inbox = told.recv().map_err(|_| fail(gone()))?.map_err(fail)?;
            workers.inboxes.push(inbox);
        }
        Ok(workers)
    }

    /// Has a request done by thread `worker`, modulo how many there are.
    pub(super) fn ask(&self, worker: usize, core: &Arc<Core>, ask: Ask) {
        if let Some(by_hand) = &self.by_hand {
            let mut ask = Some(ask);
            if !self.stop.load(Ordering::SeqCst) {
                let (under_way, _) = &mut *by_hand.lock();
                core.with_lane(|lane| ask.take().map(|ask| under_way.submit(lane, ask)));
            }
            // If its lane has ended, it hears of that as it goes.
            return drop(ask);
        }
        let inbox = &self.inboxes[worker % self.inboxes.len()];
        let mut asks = inbox.asks.lock();
        let Some(list) = &mut *asks else {
            drop(asks);
            return drop(ask);
        };
        list.push(ask);
        let first = list.len() == 1;
        drop(asks);
        if first {
            // It is looked at within a second even if that fails.
            let _ = inbox.waker.wake();
        }
    }

    /// Without threads: tells who asked what has ended. Returns whether something has not.
    pub(super) fn answer(&self) -> bool {
        let Some(by_hand) = &self.by_hand else { return false };
        let (ended, left) = {
            let (under_way, core) = &mut *by_hand.lock();
            let ended = core.with_lane(|lane| under_way.answer(lane)).unwrap_or_default();
            (ended, !under_way.0.is_empty())
        };
        tell(ended);
        left
    }

    /// Without threads: requests under way end, for `turn` does what is due; those that do not in time hear that the cache is closed.
    pub(super) fn end_by_hand(&self, mut turn: impl FnMut() -> Option<Nanos>) {
        let Some(by_hand) = &self.by_hand else { return };
        self.stop.store(true, Ordering::SeqCst);
        let until = Instant::now() + END;
        while turn().is_some() && self.answer() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        let late = std::mem::take(&mut by_hand.lock().0.0);
        drop(late);
    }

    /// Whether there are threads.
    pub(super) fn are_threads(&self) -> bool {
        self.by_hand.is_none()
    }

    /// Whether the caller is one of the threads.
    pub(super) fn is_one(&self) -> bool {
        let me = std::thread::current().id();
        self.ids.contains(&me)
    }

    /// Requests under way end, others are refused.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        self.inboxes.iter().for_each(|inbox| drop(inbox.waker.wake()));
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.stop();
    }
}

/// However its thread ends, nothing is taken any more, and who has asked hears of it.
struct Closes<'a>(&'a Inbox);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        let late = self.0.asks.lock().take();
        drop(late);
    }
}

/// It has, or may have, requests under way.
struct Busy<'a>(&'a AtomicUsize);

impl<'a> Busy<'a> {
    fn one_of(all: &'a AtomicUsize) -> Busy<'a> {
        all.fetch_add(1, Ordering::SeqCst);
        Busy(all)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn run(mut lane: Lane, inbox: &Inbox, stop: &AtomicBool, all: &AtomicUsize) {
    let closes = Closes(inbox);
    let mut under_way = UnderWay::default();
    let (mut busy, mut until) = (Some(Busy::one_of(all)), None);
    loop {
        let asks = inbox.asks.lock().as_mut().map(std::mem::take).unwrap_or_default();
        asks.into_iter().for_each(|ask| under_way.submit(&mut lane, ask));
        let stopping = stop.load(Ordering::SeqCst);
        if stopping {
            let now = Instant::now();
            if under_way.0.is_empty() && busy.take().is_some() {
                // Nothing is taken any more, and what others have under way may need this thread: it destages volumes, and has mail.
                let late = inbox.asks.lock().take();
                drop(late);
            }
            if all.load(Ordering::SeqCst) == 0 || now > *until.get_or_insert(now + END) {
                return drop(closes);
            }
        }
        if let Err(error) = lane.turn(if stopping && busy.is_none() { SOON } else { IDLE }) {
            return tracing::error!(%error, "a thread of the cache ends");
        }
        tell(under_way.answer(&mut lane));
    }
}
