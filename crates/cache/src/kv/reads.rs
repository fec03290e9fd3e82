//! Threads that read flash for look-ups, each with a ring of its own.
//!
//! A look-up that must read goes to the thread of its shard's hash, which reads, executes it again with the bytes, and wakes who waits.
//! Its queue is as long as there are look-ups under way, which the program decides; background reads are bounded by the engine.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use larder_engine::kv::api::{Fetched, FlashRead};
use larder_runtime::{Clock, Device, ReadRing, RingOptions};
use mio::unix::SourceFd;
use mio::{Events, Interest, Poll, Token, Waker};
use slab::Slab;
use std::os::fd::AsRawFd;

use super::{CacheError, Core, locked};

const RING: Token = Token(0);
const MAIL: Token = Token(1);

/// What a request asks for beside its answer: collected under the lock, carried out after it.
#[derive(Debug, Default)]
pub(super) struct Side {
    pub(super) verifies: Vec<FlashRead>,
    pub(super) wake_cleaner: bool,
}

/// A request that goes on when a read has ended.
pub(super) trait Resume: Send {
    /// Executes it, with what was read. `Some`: it needs another read. `None`: it has ended, and who waits for it knows.
    fn resume(
        &mut self,
        core: &Core,
        clock: &Clock,
        fetched: Option<Fetched<'_>>,
        side: &mut Side,
    ) -> Option<FlashRead>;
}

enum Job {
    /// A read that a request waits for.
    Request(FlashRead, Box<dyn Resume>),
    /// A background read.
    Verify(FlashRead),
}

impl Job {
    fn read(&self) -> &FlashRead {
        match self {
            Job::Request(read, _) | Job::Verify(read) => read,
        }
    }
}

struct Mailbox {
    jobs: Mutex<VecDeque<Job>>,
    waker: Waker,
    stop: AtomicBool,
}

impl Mailbox {
    fn put(&self, job: Job) {
        let mut jobs = locked(&self.jobs);
        // Once it has stopped nobody takes anything out; a look-up that is dropped has found nothing.
        if self.stop.load(Ordering::Acquire) {
            drop(jobs);
            drop(job);
            return;
        }
        let first = jobs.is_empty();
        jobs.push_back(job);
        drop(jobs);
        if first {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            tracing::error!(%error, "a thread that reads flash cannot be woken");
        }
    }
}

/// Options of a ring on which objects of up to `max_item` bytes can be read: a single read must hold the largest, with its header.
pub fn ring_for(max_item: u32, options: RingOptions) -> RingOptions {
    let largest = max_item as usize + (64 << 10);
    RingOptions { buffer_bytes: options.buffer_bytes.max(2 * largest), ..options }
}

/// The threads, if there are any: without flash there are none.
pub(super) struct Readers {
    mail: Vec<Arc<Mailbox>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl Readers {
    pub(super) fn start(
        core: &Arc<Core>,
        clock: &Arc<Clock>,
        threads: usize,
        ring: &RingOptions,
    ) -> Result<Readers, CacheError> {
        let mut readers = Readers { mail: Vec::new(), threads: Mutex::default() };
        let Some(device) = core.device() else { return Ok(readers) };
        for i in 0..threads {
            match Readers::one(i, core, clock, &device, ring) {
                Ok((mail, thread)) => {
                    readers.mail.push(mail);
                    locked(&readers.threads).push(thread);
                }
                Err(error) => {
                    readers.stop();
                    return Err(error);
                }
            }
        }
        Ok(readers)
    }

    fn one(
        number: usize,
        core: &Arc<Core>,
        clock: &Arc<Clock>,
        device: &Arc<dyn Device>,
        ring: &RingOptions,
    ) -> Result<(Arc<Mailbox>, JoinHandle<()>), CacheError> {
        let system =
            |source| CacheError::System { what: "start a thread that reads flash", source };
        let poll = Poll::new().map_err(system)?;
        let waker = Waker::new(poll.registry(), MAIL).map_err(system)?;
        let ring = ReadRing::open(device.clone(), ring)?;
        poll.registry()
            .register(&mut SourceFd(&ring.as_raw_fd()), RING, Interest::READABLE)
            .map_err(system)?;
        let jobs = Mutex::default();
        let mail = Arc::new(Mailbox { jobs, waker, stop: AtomicBool::new(false) });
        let reader = Reader {
            core: core.clone(),
            clock: clock.clone(),
            mail: mail.clone(),
            poll,
            ring,
            waiting: VecDeque::new(),
            reading: Slab::new(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("larder-read-{number}"))
            .spawn(move || reader.run())
            .map_err(system)?;
        Ok((mail, thread))
    }

    fn mail(&self, read: &FlashRead) -> Option<&Mailbox> {
        let threads = self.mail.len().max(1);
        self.mail.get(read.hash.0 as usize % threads).map(|mail| &**mail)
    }

    /// Reads, and goes on with the request then: here and now where there are no threads.
    pub(super) fn read(
        &self,
        core: &Core,
        clock: &Clock,
        read: FlashRead,
        mut request: Box<dyn Resume>,
    ) {
        if let Some(mail) = self.mail(&read) {
            mail.put(Job::Request(read, request));
            return;
        }
        let (mut side, mut next) = (Side::default(), Some(read));
        while let Some(read) = next {
            let bytes = core.read(&read);
            let fetched = Some(Fetched { read: &read, bytes: bytes.as_deref() });
            next = request.resume(core, clock, fetched, &mut side);
        }
        self.carry_out(core, clock, side);
    }

    /// Does what a request asked for beside its answer.
    pub(super) fn carry_out(&self, core: &Core, clock: &Clock, side: Side) {
        for read in side.verifies {
            match self.mail(&read) {
                Some(mail) => mail.put(Job::Verify(read)),
                None => core.verify(clock.now(), &read, core.read(&read).as_deref()),
            }
        }
        if side.wake_cleaner {
            core.wake_cleaner();
        }
    }

    /// Whether the calling thread is one of them.
    pub(super) fn is_one(&self) -> bool {
        let me = std::thread::current().id();
        locked(&self.threads).iter().any(|thread| thread.thread().id() == me)
    }

    /// Ends the threads, once what is under way has ended.
    pub(super) fn stop(&self) {
        for mail in &self.mail {
            {
                let _jobs = locked(&mail.jobs);
                mail.stop.store(true, Ordering::Release);
            }
            mail.wake();
        }
        for thread in std::mem::take(&mut *locked(&self.threads)) {
            if thread.join().is_err() {
                tracing::error!("a thread that reads flash had died");
            }
        }
    }
}

struct Reader {
    core: Arc<Core>,
    clock: Arc<Clock>,
    mail: Arc<Mailbox>,
    poll: Poll,
    ring: ReadRing,
    /// Jobs that the ring has no room for yet.
    waiting: VecDeque<Job>,
    /// Reads under way, by token.
    reading: Slab<Job>,
}

/// However its thread ends, nothing is taken any more; look-ups that it had have found nothing.
impl Drop for Reader {
    fn drop(&mut self) {
        let mut jobs = locked(&self.mail.jobs);
        self.mail.stop.store(true, Ordering::Release);
        let late = std::mem::take(&mut *jobs);
        drop(jobs);
        drop(late);
    }
}

impl Reader {
    fn run(mut self) {
        let mut events = Events::with_capacity(2);
        loop {
            let stop = self.mail.stop.load(Ordering::Acquire);
            self.waiting.append(&mut locked(&self.mail.jobs));
            self.submit();
            let ended = self.complete();
            self.submit();
            let idle = self.reading.is_empty() && self.waiting.is_empty();
            if stop && idle {
                return;
            }
            if ended > 0 {
                continue;
            }
            let reading = self.ring.in_flight() > 0;
            let most = reading.then_some(ReadRing::OVERDUE);
            match self.poll.poll(&mut events, most) {
                Ok(()) if reading && events.is_empty() => {
                    self.ring.look();
                }
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => tracing::error!(%error, "a thread that reads flash cannot wait"),
            }
        }
    }

    /// Puts into the ring what it has room for.
    fn submit(&mut self) {
        while let Some(job) = self.waiting.pop_front() {
            let span = self.core.span(job.read());
            let token = self.reading.insert(job);
            if self.ring.submit(token as u64, span.offset, span.len).is_err() {
                let job = self.reading.remove(token);
                self.waiting.push_front(job);
                break;
            }
        }
        self.ring.flush();
    }

    /// Goes on with what has been read; tells how many reads had ended.
    fn complete(&mut self) -> usize {
        let mut ended = 0;
        self.ring.acknowledge();
        while let Some(done) = self.ring.pop() {
            ended += 1;
            let job = self.reading.remove(done.token() as usize);
            let bytes = match done.bytes() {
                Ok(bytes) => Some(bytes),
                Err(error) => {
                    self.core.read_failed(error);
                    None
                }
            };
            let mut side = Side::default();
            match job {
                Job::Verify(read) => self.core.verify(self.clock.now(), &read, bytes),
                Job::Request(read, mut request) => {
                    let fetched = Some(Fetched { read: &read, bytes });
                    let next = request.resume(&self.core, &self.clock, fetched, &mut side);
                    if let Some(next) = next {
                        self.waiting.push_back(Job::Request(next, request));
                    }
                }
            }
            self.waiting.extend(side.verifies.into_iter().map(Job::Verify));
            if side.wake_cleaner {
                self.core.wake_cleaner();
            }
            self.ring.recycle(done);
        }
        ended
    }
}
