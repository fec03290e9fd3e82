//! A thread that serves queues: requests on their way between the kernel and the cache.
//!
//! A turn: wait; take what the driver has given; start what the service has collected; answer what has ended. Memory is
//! bounded by the pool of buffers: requests that find none wait, and their number by the queues' depth.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use larder_runtime::{AlignedBuf, Batch, BufferPool, Pile};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token};
use rustix::io::Errno as Os;
use tracing::{debug, warn};

use super::UblkCounters;
use super::abi::SECTOR;
use super::port::Port;
use super::request::{self, Shape, What};
use crate::cache::service::Command;
use crate::cache::service::{Answer, Service};
use crate::cache::{Told, Volume};
use crate::op::FailureKind;

/// Token of the waker.
pub(super) const WAKE: usize = usize::MAX;
const PORT: usize = 0;
/// The first token for the service.
pub(super) const SERVICE: usize = 1 << 40;
/// Requests that wait for memory are tried again after this.
const STARVED_RETRY: Duration = Duration::from_millis(5);
/// Between two looks at orders, if nothing happens.
const LOOK: Duration = Duration::from_millis(500);

/// What a worker is told.
pub(super) enum Order<P> {
    /// Serve these queues.
    Serve(Job<P>),
    /// Answer what has begun, begin nothing new, and leave the queues.
    Leave,
    /// Leave the queues at once.
    Drop,
}

/// Queues to serve.
pub(super) struct Job<P> {
    pub volume: Arc<Volume>,
    /// All queues of the disk are one client.
    pub told: Arc<Told>,
    pub shape: Shape,
    /// Opens the queues: on the thread that serves them.
    pub open: Box<dyn FnOnce() -> io::Result<P> + Send>,
}

/// What a worker tells.
#[derive(Debug)]
pub(super) enum Report {
    /// It serves its queues.
    Serving,
    /// It has left its queues: the driver wanted it so, or it was told to, or something failed.
    Left(Result<(), String>),
}

/// Where a slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// At the driver.
    Asked,
    /// Here, waiting for memory.
    Waiting,
    /// At the service.
    Busy(Owed),
    /// Left as it is, for whoever serves the queue next.
    Held,
    /// The driver wants it no more.
    Over,
}

/// What an answer brings, if it is a good one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owed {
    /// Data.
    Data,
    /// So many bytes written.
    Bytes(u32),
    /// Nothing.
    Done,
}

/// The queues that are being served.
struct Serving<P> {
    port: P,
    volume: Arc<Volume>,
    told: Arc<Told>,
    shape: Shape,
    slots: Vec<State>,
    /// What is asked for in those that wait, in their order.
    waiting: VecDeque<(usize, What)>,
    over: usize,
    busy: usize,
    /// Nothing new is begun.
    leaving: bool,
}

/// The thread's own.
pub(super) struct Worker<S, P> {
    pub name: String,
    pub service: S,
    pub poll: Poll,
    pub pool: BufferPool,
    pub counters: Arc<UblkCounters>,
    pub orders: Receiver<Order<P>>,
    pub reports: Sender<Report>,
    serving: Option<Serving<P>>,
    /// Of the queues served now: answers to requests of others are late.
    epoch: u32,
    now: Instant,
    /// Answered since the driver was last told.
    answered: Pile,
    freed: bool,
    /// The driver may have given more than was taken in this turn.
    more: bool,
}

impl<S: Service, P: Port> Worker<S, P> {
    pub(super) fn new(
        name: String,
        service: S,
        poll: Poll,
        buffer_bytes: usize,
        counters: Arc<UblkCounters>,
        orders: Receiver<Order<P>>,
        reports: Sender<Report>,
    ) -> Worker<S, P> {
        Worker {
            name,
            service,
            poll,
            pool: BufferPool::new(buffer_bytes),
            counters,
            orders,
            reports,
            serving: None,
            epoch: 0,
            now: Instant::now(),
            answered: Pile::default(),
            freed: false,
            more: false,
        }
    }

    /// Until nobody can give orders any more.
    pub(super) fn run(mut self) {
        let mut events = Events::with_capacity(128);
        loop {
            let timeout = self.timeout().unwrap_or(LOOK).min(LOOK);
            if let Err(e) = self.poll.poll(&mut events, Some(timeout))
                && e.kind() != io::ErrorKind::Interrupted
            {
                warn!("{}: cannot poll: {e}", self.name);
            }
            self.now = Instant::now();
            for event in &events {
                // The driver and the orders are looked at in any case.
                if event.token().0 >= SERVICE && event.token().0 != WAKE {
                    self.service.ready(event, self.now);
                }
            }
            loop {
                match self.orders.try_recv() {
                    Ok(order) => self.obey(order),
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => return self.leave(Ok(())),
                }
            }
            self.turn();
        }
    }

    fn timeout(&self) -> Option<Duration> {
        let starved = self.serving.as_ref().is_some_and(|s| !s.waiting.is_empty());
        if self.more || (starved && self.freed) {
            return Some(Duration::ZERO);
        }
        let retry = starved.then(|| Instant::now() + STARVED_RETRY);
        let at = [retry, self.service.wake_at()].into_iter().flatten().min()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    fn obey(&mut self, order: Order<P>) {
        match order {
            Order::Serve(job) => match self.begin_serving(job) {
                Ok(()) => self.report(Report::Serving),
                Err(e) => self.leave(Err(e)),
            },
            Order::Leave => {
                if let Some(serving) = &mut self.serving {
                    serving.leaving = true;
                    for (slot, _) in serving.waiting.drain(..) {
                        serving.slots[slot] = State::Held;
                    }
                }
            }
            Order::Drop => self.leave(Ok(())),
        }
    }

    fn begin_serving(&mut self, job: Job<P>) -> Result<(), String> {
        self.leave(Ok(()));
        let mut port = (job.open)().map_err(|e| format!("its queues cannot be opened: {e}"))?;
        let fd = port.fd();
        self.poll
            .registry()
            .register(&mut SourceFd(&fd), Token(PORT), Interest::READABLE)
            .and_then(|()| port.fetch())
            .map_err(|e| format!("its queues cannot be served: {e}"))?;
        self.epoch = self.epoch.wrapping_add(1);
        self.serving = Some(Serving {
            slots: vec![State::Asked; port.slots()],
            port,
            volume: job.volume,
            told: job.told,
            shape: job.shape,
            waiting: VecDeque::new(),
            over: 0,
            busy: 0,
            leaving: false,
        });
        Ok(())
    }

    fn report(&self, report: Report) {
        // Nobody listens any more when the daemon ends.
        let _ = self.reports.send(report);
    }

    /// The queues are let go of, if there are any.
    fn leave(&mut self, how: Result<(), String>) {
        if let Some(serving) = self.serving.take() {
            let fd = serving.port.fd();
            // It goes with the descriptor at the latest.
            let _ = self.poll.registry().deregister(&mut SourceFd(&fd));
            drop(serving);
            self.report(Report::Left(how));
        } else if how.is_err() {
            self.report(Report::Left(how));
        }
    }

    /// Does what there is to do.
    pub(super) fn turn(&mut self) {
        self.take_answers();
        self.freed = false;
        self.more = false;
        let mut result = self.take_requests();
        if result.is_ok() {
            result = self.retry();
        }
        self.service.flush(self.now);
        // What was there at once, in memory, is answered in the same turn.
        self.take_answers();
        self.answered.clear();
        let Some(serving) = &mut self.serving else { return };
        let result = result.and_then(|()| serving.port.submit());
        if let Err(e) = result {
            self.leave(Err(format!("the driver cannot be asked any more: {e}")));
        } else if serving.over == serving.slots.len() || (serving.leaving && serving.busy == 0) {
            self.leave(Ok(()));
        }
    }

    fn take_requests(&mut self) -> io::Result<()> {
        let Some(serving) = &mut self.serving else { return Ok(()) };
        // Each slot once: others have their turn too.
        let mut left = serving.slots.len();
        while left > 0 {
            let Some(serving) = &mut self.serving else { return Ok(()) };
            let Some((slot, result)) = serving.port.next() else { return Ok(()) };
            left -= 1;
            if serving.slots.get(slot) != Some(&State::Asked) {
                warn!("{}: the driver has given slot {slot}, which it did not have", self.name);
                continue;
            }
            match result {
                0 if serving.leaving => serving.slots[slot] = State::Held,
                0 => {
                    self.counters.requests.fetch_add(1, Ordering::Relaxed);
                    // The volume may have grown: then the disk is told after it, and asks for more.
                    serving.shape.sectors = serving.volume.capabilities().size / SECTOR;
                    let what = request::parse(&serving.port.descriptor(slot), &serving.shape);
                    let wants_memory = matches!(what, What::Read { .. } | What::Write { .. });
                    if wants_memory && !serving.waiting.is_empty() {
                        // Nobody passes those that wait for memory: they could wait for ever.
                        serving.wait(slot, what);
                    } else {
                        self.begin(slot, what)?;
                    }
                }
                _ => {
                    serving.slots[slot] = State::Over;
                    serving.over += 1;
                    // The device goes, or another is to serve it.
                    if result != -Os::NODEV.raw_os_error() {
                        return Err(io::Error::from_raw_os_error(result.saturating_neg()));
                    }
                }
            }
        }
        self.more = true;
        Ok(())
    }

    /// Requests that wait for memory.
    fn retry(&mut self) -> io::Result<()> {
        loop {
            let Some(serving) = &mut self.serving else { return Ok(()) };
            let Some((slot, what)) = serving.waiting.pop_front() else { return Ok(()) };
            let before = serving.waiting.len();
            self.begin(slot, what)?;
            let Some(serving) = &mut self.serving else { return Ok(()) };
            if serving.waiting.len() > before {
                // It waits on, ahead of the others.
                serving.waiting.rotate_right(1);
                return Ok(());
            }
        }
    }

    /// Begins a request, or lets it wait for memory.
    fn begin(&mut self, slot: usize, what: What) -> io::Result<()> {
        let Some(serving) = &mut self.serving else { return Ok(()) };
        let mut owed = Owed::Done;
        let command = match what {
            What::Read { offset, len } => match self.pool.take(len as usize) {
                Some(buf) => {
                    owed = Owed::Data;
                    Command::Read { offset, buf }
                }
                None => {
                    serving.wait(slot, what);
                    return Ok(());
                }
            },
            What::Write { offset, len, fua } => match self.pool.take(len as usize) {
                Some(mut buf) => match serving.port.take_data(slot, &mut buf) {
                    Ok(()) => {
                        owed = Owed::Bytes(len);
                        Command::Write { offset, buf, fua }
                    }
                    Err(e) => {
                        self.pool.give(buf);
                        self.counters.refused.fetch_add(1, Ordering::Relaxed);
                        warn!("{}: the data of a write cannot be had: {e}", self.name);
                        return self.commit(slot, request::result(FailureKind::Failed));
                    }
                },
                None => {
                    serving.wait(slot, what);
                    return Ok(());
                }
            },
            What::Flush => Command::Flush,
            What::Discard { offset, len } => Command::Trim { offset, len, fua: false },
            What::WriteZeroes { offset, len, fua, may_punch } => {
                Command::WriteZeroes { offset, len, fua, may_punch, fast: false }
            }
            What::Refused { kind, why } => {
                let refused = self.counters.refused.fetch_add(1, Ordering::Relaxed) + 1;
                if refused <= 10 || refused.is_power_of_two() {
                    warn!("{}: a request is refused: {why}", self.name);
                }
                return self.commit(slot, request::result(kind));
            }
        };
        serving.slots[slot] = State::Busy(owed);
        serving.busy += 1;
        let volume = serving.volume.clone();
        let ticket = u64::from(self.epoch) << 32 | slot as u64;
        self.service.submit(&volume, ticket, command);
        Ok(())
    }

    /// Answers a request, which is not with the service.
    fn commit(&mut self, slot: usize, result: i32) -> io::Result<()> {
        let Some(serving) = &mut self.serving else { return Ok(()) };
        serving.slots[slot] = State::Asked;
        serving.port.commit(slot, result)
    }

    fn take_answers(&mut self) {
        while let Some(answer) = self.service.pop() {
            let mut told = self.answer(answer);
            if told.is_ok()
                && self.answered.is_full(Batch::BLOCKS.send)
                && let Some(serving) = &mut self.serving
            {
                told = serving.port.submit();
            }
            if let Err(e) = told {
                self.leave(Err(format!("the driver cannot be answered any more: {e}")));
            }
        }
        while let Some(buf) = self.service.spent() {
            self.give(Some(buf));
        }
    }

    fn answer(&mut self, Answer { ticket, outcome, buf, losses, .. }: Answer) -> io::Result<()> {
        let slot = (ticket & u64::from(u32::MAX)) as usize;
        let ours = (ticket >> 32) as u32 == self.epoch;
        let serving = self.serving.as_mut().filter(|_| ours);
        let owed = serving.as_ref().and_then(|s| match s.slots.get(slot) {
            Some(State::Busy(owed)) => Some(*owed),
            _ => None,
        });
        let (Some(serving), Some(owed)) = (serving, owed) else {
            self.give(buf);
            return Ok(());
        };
        serving.busy -= 1;
        let result = match serving.told.hear(losses, outcome) {
            Err(failure) => {
                self.counters.failed.fetch_add(1, Ordering::Relaxed);
                debug!("{}: a request failed: {failure}", self.name);
                request::result(failure.kind)
            }
            Ok(_) => match (owed, &buf) {
                (Owed::Data, Some(data)) => match serving.port.give_data(slot, data) {
                    Ok(()) => data.len() as i32,
                    Err(e) => {
                        warn!("{}: the data of a read cannot be handed over: {e}", self.name);
                        request::result(FailureKind::Failed)
                    }
                },
                // A service that breaks its word: no data is better than wrong data.
                (Owed::Data, None) => request::result(FailureKind::Failed),
                (Owed::Bytes(len), _) => len as i32,
                (Owed::Done, _) => 0,
            },
        };
        self.give(buf);
        self.commit(slot, result)
    }

    fn give(&mut self, buf: Option<AlignedBuf>) {
        if let Some(buf) = buf {
            self.pool.give(buf);
            self.freed = true;
        }
    }
}

impl<P> Serving<P> {
    fn wait(&mut self, slot: usize, what: What) {
        self.slots[slot] = State::Waiting;
        self.waiting.push_back((slot, what));
    }
}
