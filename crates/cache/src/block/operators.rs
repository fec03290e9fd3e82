//! What an operator asks of a cache that runs is done by the engine's machine
//! ([`operator`](larder_engine::block::node::operator)), on the thread of who asks: here it waits, and goes to the log's thread with what concerns the durable map.
//!
//! Operations go on beside each other; none holds a lock while it waits. Of what shards tell them each takes its own out of the one mailbox
//! that all operators have.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use larder_base::ByteSize;
use larder_engine::block::node::attachment::Step;
use larder_engine::block::node::operator::steps::{OperatorIo, Waits};
use larder_engine::block::node::operator::{Ask, NotDone, Operation};
use larder_engine::block::{LineId, OpId};

use super::attached::Attached;
use super::log::LogThread;
use super::open::CacheError;
use super::shard::{Message, Out};
use super::{Core, OP_BITS, Time, locked};

/// Between two looks at what is waited for.
pub(super) const LOOK: Duration = Duration::from_millis(100);
/// The log's thread has so long to begin what it is asked for.
const ANSWER: Duration = Duration::from_secs(60);
/// The same at first where fills are waited for.
const SETTLE: Duration = Duration::from_micros(20);

/// What was planned holds no more.
pub(super) const OVERTAKEN: &str = "it was put aside or moved in the meantime: try again";

/// What operations have in common.
#[derive(Debug, Default)]
pub(super) struct Operators {
    /// How many there were.
    begun: AtomicU64,
    /// Those that wait or work now.
    at_work: AtomicUsize,
    /// Those that were given lines and have not looked yet. Locked under the mailbox alone.
    given: Mutex<BTreeSet<OpId>>,
}

impl Operators {
    /// Whether an operation is under way.
    pub(super) fn are_at_work(&self) -> bool {
        self.at_work.load(Ordering::SeqCst) > 0
    }
}

/// An operation is under way as long as this lives. Then nothing in the mailbox is its own any more.
struct AtWork<'a> {
    cache: &'a Core,
    id: OpId,
}

impl<'a> AtWork<'a> {
    fn new(cache: &'a Core, id: OpId) -> AtWork<'a> {
        cache.operators.at_work.fetch_add(1, Ordering::SeqCst);
        AtWork { cache, id }
    }
}

impl Drop for AtWork<'_> {
    fn drop(&mut self) {
        let mailbox = &self.cache.mailboxes[self.cache.operator()];
        locked(&mailbox.inbox).retain(|(op, _)| *op != self.id);
        locked(&self.cache.operators.given).remove(&self.id);
        self.cache.operators.at_work.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Core {
    /// Who has the operators' mailbox, behind the workers'.
    pub(super) fn operator(&self) -> usize {
        self.mailboxes.len() - 1
    }

    /// A new number for an operation, and how many shards there are.
    pub(super) fn next_operation(&self) -> (OpId, u32) {
        let number = self.operators.begun.fetch_add(1, Ordering::Relaxed) + 1;
        (OpId((self.operator() as u64) << OP_BITS | number), self.layout.shards)
    }

    pub(super) fn no_volume(&self, name: &str) -> CacheError {
        let names: Vec<String> = self.volumes().iter().map(|v| v.name.clone()).collect();
        let aside = self.put_aside().into_iter().find(|aside| aside.name == name);
        let reason = match names.len() {
            _ if aside.is_some() => {
                match aside.and_then(|aside| aside.carried_bytes).filter(|bytes| *bytes > 0) {
                    Some(bytes) => format!(
                        "it is not served: it was put aside, or its store was not there at the start, and the cache has {} that its store lacks: they come there \
                         when it is attached as a volume that writes back, or when the store that it waits for is there",
                        ByteSize(bytes)
                    ),
                    None => {
                        "it was put aside, and nothing of it is dirty: attach it first".to_owned()
                    }
                }
            }
            0 => "it is not attached; no volume is".to_owned(),
            _ => format!("it is not attached; these are: {}", names.join(", ")),
        };
        CacheError::Volume { name: name.to_owned(), reason }
    }

    /// The volume of that name.
    ///
    /// # Errors
    /// When there is none.
    pub fn attached(&self, name: &str) -> Result<Arc<Attached>, CacheError> {
        self.volume(name).ok_or_else(|| self.no_volume(name))
    }

    /// Has `job` done on the log's thread.
    ///
    /// # Errors
    /// When the thread has ended, or does not begin the job within 60 s: then it is never done.
    pub(super) fn on_log<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut LogThread) -> R + Send + 'static,
    ) -> Result<R, CacheError> {
        self.on_log_within(ANSWER, job)
    }

    /// The same, which waits so long for the job to begin. A job that has begun is waited for until it has ended: whoever is told that it
    /// failed acts as though nothing had been done.
    pub(super) fn on_log_within<R: Send + 'static>(
        &self,
        timeout: Duration,
        job: impl FnOnce(&mut LogThread) -> R + Send + 'static,
    ) -> Result<R, CacheError> {
        let fail =
            |reason: &str| CacheError::System { what: "the map's log", reason: reason.to_owned() };
        let stopping = "the cache is stopping";
        let (tell, told) = mpsc::channel();
        // Locked while the job is done.
        let wanted = Arc::new(Mutex::new(true));
        let still = wanted.clone();
        let mut inbox = locked(&self.log_inbox);
        if inbox.stopped {
            return Err(fail(stopping));
        }
        let wakes = inbox.mail.task(Box::new(move |log| {
            let still = locked(&still);
            if *still {
                // (Whoever asked is there: it waits for this lock before it goes.)
                let _ = tell.send(job(log));
            }
        }));
        drop(inbox);
        if wakes {
            self.log_wake.notify_one();
        }
        if self.hand.get().is_some() {
            self.turn();
        }
        match told.recv_timeout(timeout) {
            Ok(result) => Ok(result),
            Err(RecvTimeoutError::Disconnected) => Err(fail(stopping)),
            Err(RecvTimeoutError::Timeout) => {
                *locked(&wanted) = false;
                told.try_recv().map_err(|_| fail("the cache device does not answer"))
            }
        }
    }

    /// Waits until nothing is done behind the replies any more: all fills have ended, one way or the other, and the
    /// durable map says of every slot what it holds. For whoever counts what a request does; while others ask, it may
    /// take any time. Returns what was left after `timeout`: I/O, fills that wait for their slot, and slots to record.
    ///
    /// # Errors
    /// When the log's thread does not answer.
    pub fn settle(&self, timeout: Duration) -> Result<usize, CacheError> {
        let until = Instant::now() + timeout;
        let mut pause = SETTLE;
        loop {
            // A job there has the log step, too: what waits for a slot to be durably empty does not wait for its pace.
            let left = self.on_log(|log| log.unsettled())?;
            if left == 0 || Instant::now() >= until {
                return Ok(left);
            }
            self.pause(pause);
            pause = (pause * 2).min(LOOK);
        }
    }

    /// Carries an operation through. `go_on` is asked while lines are waited for; `act` does what the operation asks for and tells it, and says whether
    /// it goes on. Returns whether it came to its end: not if one of them has said no, or it took longer than it may.
    ///
    /// # Errors
    /// Those of `act`.
    pub(super) fn carry(
        &self,
        operation: &mut Operation,
        go_on: &mut dyn FnMut() -> bool,
        act: &mut dyn FnMut(&mut Operation, Step) -> Result<bool, CacheError>,
    ) -> Result<bool, CacheError> {
        let done = self.carry_by(operation, go_on, &mut |operation, step| {
            let next = |goes_on| if goes_on { Ask::Again } else { Ask::GiveUp(NotDone::Unwanted) };
            act(operation, step).map(next)
        })?;
        Ok(done.is_ok())
    }

    /// The same, where `step` says what is next.
    ///
    /// # Errors
    /// Those of `step`.
    pub(super) fn carry_by(
        &self,
        operation: &mut Operation,
        go_on: &mut dyn FnMut() -> bool,
        step: &mut dyn FnMut(&mut Operation, Step) -> Result<Ask, CacheError>,
    ) -> Result<Result<(), NotDone>, CacheError> {
        let _at_work = AtWork::new(self, operation.id());
        let mut out = Out::default();
        loop {
            let ask = match operation.next(self, self.now(), &mut out) {
                Ask::Do(what) => step(operation, what),
                ask => Ok(ask),
            };
            let why = match ask {
                Ok(Ask::Over) => return Ok(Ok(())),
                Ok(Ask::Again | Ask::Do(_)) => continue,
                Ok(Ask::Pause(time)) => {
                    self.pause(Duration::from_nanos(time.0));
                    continue;
                }
                Ok(Ask::Lines) if self.await_lines(operation, go_on) => continue,
                Ok(Ask::Lines) => Ok(Err(NotDone::Unwanted)),
                Ok(Ask::GiveUp(why)) => Ok(Err(why)),
                Err(error) => Err(error),
            };
            operation.give_up(self, self.now(), &mut out);
            return why;
        }
    }

    /// The same of an operation whose steps `io` is asked for, as `step` does them.
    ///
    /// # Errors
    /// Those of `io`.
    pub(super) fn carry_over<I: OperatorIo<Error = CacheError>>(
        &self,
        operation: &mut Operation,
        io: &mut I,
        step: impl Fn(&mut Operation, Step, &mut I) -> Result<Ask, CacheError>,
    ) -> Result<Result<(), NotDone>, CacheError> {
        // Both who waits for lines and who does a step ask it.
        let io = RefCell::new(io);
        let go_on = &mut || io.borrow_mut().goes_on(Waits::Lines);
        self.carry_by(operation, go_on, &mut |operation, what| {
            step(operation, what, *io.borrow_mut())
        })
    }

    /// Waits a while for a shard to give an operation its lines. False if `go_on` has said no, or it would wait in vain.
    fn await_lines(&self, operation: &mut Operation, go_on: &mut dyn FnMut() -> bool) -> bool {
        if self.was_given(operation, Duration::ZERO) {
            return true;
        }
        if !go_on() {
            return false;
        }
        if self.turn().is_none() {
            self.was_given(operation, LOOK);
            return true;
        }
        // Without threads nothing has happened but in this turn. Where time stands nothing will.
        self.was_given(operation, Duration::ZERO) || matches!(self.time, Time::Runs(_))
    }

    /// Waits for so long until there is mail for the operation. Returns whether there is.
    fn was_given(&self, operation: &mut Operation, timeout: Duration) -> bool {
        let mailbox = &self.mailboxes[self.operator()];
        let until = Instant::now() + timeout;
        let mut mail = locked(&mailbox.inbox);
        loop {
            let mut given = locked(&self.operators.given);
            let came = mail.drain(..).filter(|(_, m)| matches!(m, Message::Done { .. }));
            let before = given.len();
            given.extend(came.map(|(op, _)| op));
            if given.len() > before {
                // It may be others'.
                mailbox.changed.notify_all();
            }
            if given.remove(&operation.id()) {
                operation.given();
                return true;
            }
            drop(given);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            let woken = mailbox.changed.wait_timeout(mail, left);
            mail = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Does `act` while nothing is under way in lines `first..=last`, and nothing begins. `None` if `go_on` has said no.
    pub(super) fn with_lines<R>(
        &self,
        (first, last): (LineId, LineId),
        go_on: &mut dyn FnMut() -> bool,
        act: impl FnOnce() -> R,
    ) -> Option<R> {
        let (id, shards) = self.next_operation();
        let mut operation = Operation::act(id, shards, (first, last));
        let (mut act, mut result) = (Some(act), None);
        let done = self.carry(&mut operation, go_on, &mut |operation, _| {
            result = act.take().map(|act| act());
            operation.done();
            Ok(true)
        });
        result.filter(|_| matches!(done, Ok(true)))
    }

    pub(super) fn lines_of(&self, base: u64, bytes: u64) -> (LineId, LineId) {
        let line = u64::from(self.layout.line);
        (LineId(base / line), LineId((base + bytes.max(1) - 1) / line))
    }

    /// Drops the lines that hold bytes `start..start + bytes` of a volume. Returns how many there were; `None` if `go_on`
    /// has said no.
    ///
    /// # Errors
    /// When the volume is not attached, or the range is not in it.
    pub fn drop_lines(
        &self,
        name: &str,
        range: Option<(u64, u64)>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<u64>, CacheError> {
        let volume = self.attached(name)?;
        let (start, bytes) = range.unwrap_or((0, volume.bytes()));
        check_range(&volume, start, bytes)?;
        self.drop_ranges(&volume, &[(start, bytes)], go_on)
    }

    /// The same of several ranges, which lie in the volume.
    pub(super) fn drop_ranges(
        &self,
        volume: &Attached,
        ranges: &[(u64, u64)],
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Option<u64>, CacheError> {
        let (id, shards) = self.next_operation();
        let lines =
            ranges.iter().map(|(start, bytes)| self.lines_of(volume.base() + start, *bytes));
        let mut operation = Operation::drop_lines(id, shards, lines);
        let done = self.carry(&mut operation, go_on, &mut |_, _| Ok(true))?;
        Ok(done.then_some(operation.dropped()))
    }
}

/// Whether the range lies in the volume.
pub(super) fn check_range(volume: &Attached, start: u64, bytes: u64) -> Result<(), CacheError> {
    if start.checked_add(bytes).is_some_and(|end| end <= volume.bytes()) && bytes > 0 {
        return Ok(());
    }
    let reason = format!(
        "bytes {start} to {} are not in it: it has {} bytes",
        start.saturating_add(bytes),
        volume.bytes()
    );
    Err(CacheError::Volume { name: volume.name.clone(), reason })
}
