//! Queues of a program's own threads: requests to volumes without a thread of the cache between.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use larder_runtime::{AlignedBuf, RingChoice};
use larder_volume::op::{Failure, FailureKind, Outcome};
use mio::Waker;
use parking_lot::{Condvar, Mutex};
use slab::Slab;

use super::cache::{CachedVolume, Handles, OfClient};
use super::lane::Lane;
use super::service::{Answer, Command};
use super::{CacheError, Core};

/// A queue that ends looks this often whether it has, though it is woken for it.
const LOOK: Duration = Duration::from_secs(1);

/// A request that has ended.
#[derive(Debug)]
pub struct Completion {
    /// What it was submitted under.
    pub ticket: u64,
    /// How it ended: the extents of a block status, nothing for others.
    pub outcome: Outcome,
    /// The buffer of a read: filled, if it succeeded. That of a write, unless it is still on its way to flash.
    pub buf: Option<AlignedBuf>,
}

/// There are as many requests in the queue as it has room for ([`Queue::DEPTH`]). It gives the request back: submit it again when
/// [`Queue::pop`] has returned something.
#[derive(Debug, thiserror::Error)]
#[error(
    "{} requests are in the queue, which is all it has room for: take completions first",
    Queue::DEPTH
)]
pub struct Full(pub Command);

/// A request that the cache has.
struct UnderWay {
    ticket: u64,
    of: Arc<OfClient>,
}

/// A thread's own queue to the volumes of a cache ([`Cache::queue`](super::Cache::queue)). It has a ring and sessions with the
/// stores of its own, so no request goes through another thread. It is used on the thread that asked for it.
///
/// Requests begin with [`Queue::turn`], and go on with it: call it whenever the descriptor is readable, and after
/// [`Queue::due`]. As long as something is [under way](Queue::under_way) requests of others for the same bytes wait for that,
/// so do not leave it alone then. It also lets go of volumes that were detached. When it goes it waits until all that it has begun is over, as long as stores take.
///
/// It is a handle of the cache. When the cache is closed requests under way still end, others fail, and [`Queue::turn`] says so.
///
/// ```
/// use std::time::Duration;
///
/// use larder_base::ByteSize;
/// use larder_cache::block::{Cache, service::Command};
/// use larder_runtime::AlignedBuf;
///
/// let dir = tempfile::tempdir()?;
/// let disk = dir.path().join("disk");
/// std::fs::File::create(&disk)?.set_len(16 << 20)?;
/// let cache = Cache::builder(dir.path().join("cache"))
///     .create(ByteSize::mib(64))
///     .state_dir(dir.path().join("state"))
///     .volume("disk", &format!("file:{}", disk.display()))?
///     .open()?;
/// let disk = cache.volume("disk").expect("it was named above");
/// let mut queue = cache.queue()?;
/// for n in 0..4u64 {
///     let buf = AlignedBuf::zeroed(4096);
///     queue.submit(&disk, n, Command::Read { offset: n * 4096, buf })?;
/// }
/// let mut read = 0;
/// while queue.under_way() > 0 {
///     // Or a poll of its own, of `queue.as_raw_fd()` among others, and then a turn that does not wait.
///     queue.turn(Duration::from_secs(1))?;
///     while let Some(completion) = queue.pop() {
///         completion.outcome?;
///         read += completion.buf.expect("a read brings its buffer").len();
///     }
/// }
/// assert_eq!(read, 4 * 4096);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Queue {
    /// Goes first, and then its number is another's.
    lane: Lane,
    place: Place,
    under_way: Slab<UnderWay>,
    ended: VecDeque<Completion>,
    /// Goes last: the cache may close with it.
    cache: Arc<Handles>,
    /// A ring belongs to one thread.
    _thread: PhantomData<*const ()>,
}

impl Queue {
    /// Requests in a queue, at most: those that have ended and were not taken are among them.
    pub const DEPTH: usize = 256;

    pub(super) fn new(cache: Arc<Handles>, ring: RingChoice) -> Result<Queue, CacheError> {
        let fail = |reason: String| CacheError::System { what: "a queue", reason };
        let queues = cache.queues().clone();
        let number = queues.take().map_err(fail)?;
        let lane = Lane::new(cache.core().clone(), queues.first + number, ring);
        let lane = lane.map_err(|e| {
            queues.free(number);
            fail(e.to_string())
        })?;
        let gate = Arc::new(Gate {
            thread: std::thread::current().id(),
            busy: AtomicBool::new(false),
            waker: lane.waker().clone(),
        });
        queues.places.lock()[number] = Taken::By(gate.clone());
        let place = Place { queues, number, gate, again: true };
        let (under_way, ended) = (Slab::new(), VecDeque::new());
        Ok(Queue { lane, place, under_way, ended, cache, _thread: PhantomData })
    }

    /// Takes a request; it begins with the next [`Queue::turn`]. `ticket` comes back with its [`Completion`], and so does whatever is
    /// wrong with it: a range that is not the volume's, a volume of another cache, a cache that is closed.
    ///
    /// # Errors
    /// [`Full`], with the request.
    pub fn submit(
        &mut self,
        volume: &CachedVolume,
        ticket: u64,
        command: Command,
    ) -> Result<(), Full> {
        if self.under_way() >= Queue::DEPTH {
            return Err(Full(command));
        }
        let refused = if !volume.is_of(&self.cache) {
            Some(Failure::new(
                FailureKind::Invalid,
                format!(
                    "volume '{}' is one of another cache: submit it to a queue of that",
                    volume.name()
                ),
            ))
        } else if let Some(failure) = volume.refuses_command(&command) {
            Some(failure)
        } else if !self.place.enter() {
            Some(Failure::new(FailureKind::Gone, "the cache is closed"))
        } else {
            None
        };
        if let Some(failure) = refused {
            let buf = match command {
                Command::Read { buf, .. } | Command::Write { buf, .. } => Some(buf),
                _ => None,
            };
            self.ended.push_back(Completion { ticket, outcome: Err(failure), buf });
            return Ok(());
        }
        let (of, holds) = volume.asks();
        let at = self.under_way.insert(UnderWay { ticket, of: of.clone() });
        self.lane.submit(of.volume(), at as u64, command, holds);
        Ok(())
    }

    /// Does what there is to do. Where that is nothing it waits, for `wait` at most. `false`: the cache is closed, and nothing will
    /// happen here any more.
    ///
    /// # Errors
    /// When the system's poll fails.
    pub fn turn(&mut self, wait: Duration) -> io::Result<bool> {
        if !self.place.is_busy() && self.place.queues.is_closed() {
            return Ok(false);
        }
        let wait = if self.ended.is_empty() { wait } else { Duration::ZERO };
        self.lane.turn(wait)?;
        while let Some(answer) = self.lane.pop() {
            self.answer(answer);
        }
        if self.place.is_busy() && self.lane.is_idle() {
            self.place.rest();
        }
        Ok(true)
    }

    fn answer(&mut self, Answer { ticket, outcome, buf, losses, .. }: Answer) {
        let Some(request) = self.under_way.try_remove(ticket as usize) else { return };
        let outcome = request.of.hear(losses, outcome);
        self.ended.push_back(Completion { ticket: request.ticket, outcome, buf });
    }

    /// The next request that has ended.
    pub fn pop(&mut self) -> Option<Completion> {
        self.ended.pop_front()
    }

    /// Requests that were submitted and whose completions were not taken.
    pub fn under_way(&self) -> usize {
        self.under_way.len() + self.ended.len()
    }

    /// After what time a turn is wanted even if the descriptor is not readable. `None`: not before it is.
    pub fn due(&self) -> Option<Duration> {
        match self.ended.is_empty() {
            true => self.lane.wake_at().map(|at| at.saturating_duration_since(Instant::now())),
            false => Some(Duration::ZERO),
        }
    }

    /// Ends what has begun.
    fn settle(&mut self) -> io::Result<()> {
        while self.place.is_busy() {
            self.ended.clear();
            self.turn(LOOK)?;
        }
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if let Err(error) = self.settle() {
            tracing::error!(%error, "a queue cannot wait for what it has begun: its number is not used again");
            self.place.again = false;
        }
    }
}

impl AsRawFd for Queue {
    /// Readable when a [`Queue::turn`] is wanted.
    fn as_raw_fd(&self) -> RawFd {
        self.lane.as_raw_fd()
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("under_way", &self.under_way()).finish_non_exhaustive()
    }
}

/// A queue as who closes the cache sees it.
struct Gate {
    thread: ThreadId,
    /// It has begun something that is not over.
    busy: AtomicBool,
    waker: Arc<Waker>,
}

/// Whose a number is.
enum Taken {
    /// Nobody's.
    Free,
    /// One's who is about to have his queue.
    Coming,
    By(Arc<Gate>),
    /// Never again anybody's.
    Spoiled,
}

/// The queues of a cache.
pub(super) struct Queues {
    /// Number of the first among the workers.
    first: usize,
    closed: AtomicBool,
    places: Mutex<Vec<Taken>>,
    /// One has nothing under way any more.
    rested: Condvar,
}

impl Queues {
    /// Those of a cache that has room for so many, behind its threads.
    pub(super) fn new(core: &Core) -> Queues {
        let (first, most) = (core.config().workers, core.config().queues);
        Queues {
            first,
            closed: AtomicBool::new(false),
            places: Mutex::new((0..most).map(|_| Taken::Free).collect()),
            rested: Condvar::new(),
        }
    }

    /// A number for another queue, or why there is none.
    fn take(&self) -> Result<usize, String> {
        if self.is_closed() {
            return Err("the cache is closed".to_owned());
        }
        let mut places = self.places.lock();
        let free = places.iter().position(|place| matches!(place, Taken::Free));
        let Some(number) = free else {
            return Err(match places.len() {
                0 => "the cache has no room for any: say how many (Builder::queues; without threads there can be none)".to_owned(),
                most => format!("there are {most} already: drop one, or open the cache with room for more (Builder::queues)"),
            });
        };
        places[number] = Taken::Coming;
        Ok(number)
    }

    fn free(&self, number: usize) {
        self.places.lock()[number] = Taken::Free;
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// No request begins any more.
    pub(super) fn refuse(&self) {
        self.closed.store(true, Ordering::SeqCst);
        for place in self.places.lock().iter() {
            if let Taken::By(gate) = place {
                // A thread that waits for nothing is told that there is nothing to wait for.
                let _ = gate.waker.wake();
            }
        }
    }

    /// Waits until what has begun is over, where no request begins any more.
    pub(super) fn wait(&self) {
        let mut places = self.places.lock();
        let busy =
            |place: &Taken| matches!(place, Taken::By(gate) if gate.busy.load(Ordering::SeqCst));
        while places.iter().any(busy) {
            self.rested.wait(&mut places);
        }
    }

    /// Whether one of the calling thread has something under way, which only this thread can end.
    pub(super) fn waits_for_me(&self) -> bool {
        let me = std::thread::current().id();
        self.places.lock().iter().any(|place| {
            matches!(place, Taken::By(gate) if gate.thread == me && gate.busy.load(Ordering::SeqCst))
        })
    }
}

/// A number among the workers, as long as there is its queue.
struct Place {
    queues: Arc<Queues>,
    number: usize,
    gate: Arc<Gate>,
    /// Another may have the number.
    again: bool,
}

impl Place {
    fn is_busy(&self) -> bool {
        self.gate.busy.load(Ordering::Relaxed)
    }

    /// Something is to begin. `false`: it must not. Who closes the cache first says so and then looks who is busy; this is the other
    /// way round, so that one of the two sees the other.
    fn enter(&self) -> bool {
        let before = self.gate.busy.swap(true, Ordering::SeqCst);
        let closed = self.queues.is_closed();
        if closed && !before {
            self.rest();
        }
        !closed
    }

    /// Nothing is under way.
    fn rest(&self) {
        self.gate.busy.store(false, Ordering::SeqCst);
        if self.queues.is_closed() {
            // Who looked before that waits by now.
            drop(self.queues.places.lock());
            self.queues.rested.notify_all();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let taken = if self.again { Taken::Free } else { Taken::Spoiled };
        self.queues.places.lock()[self.number] = taken;
        self.rest();
    }
}
