//! Threads that serve volumes to a test, which sees each as a store.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_runtime::{AlignedBuf, Payload};
use larder_volume::op::{Done, Op};
use larder_volume::{Backing, BackingError, Capabilities, Identity, Session};
use mio::{Events, Poll, Registry, Token, Waker};
use rustix::event::{EventfdFlags, eventfd};

use super::locked;
use crate::block::service::{Answer, Command, Service};
use crate::block::{Client, Told, Volume, Volumes};

/// What a session is told of.
type Ended = Arc<Mutex<VecDeque<(u64, Answer)>>>;

struct Ask {
    volume: Arc<Volume>,
    command: Command,
    token: u64,
    ended: Ended,
}

struct Thread {
    asks: mpsc::Sender<Ask>,
    waker: Arc<Waker>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
pub(super) struct Served {
    inner: Arc<Inner>,
}

struct Inner {
    volumes: Arc<Volumes>,
    threads: Mutex<Vec<Thread>>,
    next: AtomicUsize,
    stop: Arc<AtomicBool>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner").field("volumes", &self.volumes).finish_non_exhaustive()
    }
}

impl Served {
    pub(super) fn start<S: Service>(
        volumes: Arc<Volumes>,
        threads: usize,
        service: impl Fn(usize, Registry, usize) -> io::Result<S> + Send + Sync + 'static,
    ) -> Served {
        let (service, stop) = (Arc::new(service), Arc::new(AtomicBool::new(false)));
        let start = |me| {
            let poll = Poll::new().unwrap();
            let waker = Arc::new(Waker::new(poll.registry(), Token(0)).unwrap());
            let (asks, asked) = mpsc::channel();
            let (service, stop) = (service.clone(), stop.clone());
            let thread = std::thread::spawn(move || {
                let registry = poll.registry().try_clone().unwrap();
                run(service(me, registry, 1).unwrap(), poll, &asked, &stop);
            });
            Thread { asks, waker, thread: Some(thread) }
        };
        let threads = Mutex::new((0..threads).map(start).collect());
        let inner = Inner { volumes, threads, next: AtomicUsize::new(0), stop };
        Served { inner: Arc::new(inner) }
    }

    pub(super) fn volumes(&self) -> &Arc<Volumes> {
        &self.inner.volumes
    }

    pub(super) fn client(&self, name: &str) -> Box<dyn Backing> {
        Box::new(Through { volume: self.volumes().find(name).unwrap(), served: self.inner.clone() })
    }

    /// What is under way ends.
    pub(super) fn stop(self) {}
}

impl Drop for Served {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::SeqCst);
        for thread in &mut *locked(&self.inner.threads) {
            thread.waker.wake().unwrap();
            if let Some(thread) = thread.thread.take() {
                // A thread that panicked has said so.
                let _ = thread.join();
            }
        }
    }
}

fn run(mut service: impl Service, mut poll: Poll, asked: &mpsc::Receiver<Ask>, stop: &AtomicBool) {
    let mut events = Events::with_capacity(64);
    let mut under_way: Vec<Option<(u64, Ended)>> = Vec::new();
    loop {
        while let Ok(Ask { volume, command, token, ended }) = asked.try_recv() {
            service.submit(&volume, under_way.len() as u64, command);
            under_way.push(Some((token, ended)));
        }
        let now = Instant::now();
        service.flush(now);
        let mut any = false;
        while let Some(answer) = service.pop() {
            any = true;
            let (token, ended) = under_way[answer.ticket as usize].take().unwrap();
            locked(&ended).push_back((token, answer));
        }
        if stop.load(Ordering::SeqCst) && under_way.iter().all(Option::is_none) {
            return;
        }
        let wait = service.wake_at().map_or(Duration::from_millis(100), |at| at - now.min(at));
        match poll.poll(&mut events, Some(if any { Duration::ZERO } else { wait })) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => panic!("{error}"),
            _ => {}
        }
        let now = Instant::now();
        events.iter().filter(|e| e.token().0 > 0).for_each(|event| service.ready(event, now));
    }
}

/// A volume as its clients see it.
#[derive(Debug)]
struct Through {
    volume: Arc<Volume>,
    served: Arc<Inner>,
}

impl Backing for Through {
    fn uri(&self) -> &str {
        self.volume.name()
    }
    fn capabilities(&self) -> Capabilities {
        self.volume.capabilities()
    }
    fn identity(&self) -> Result<Identity, BackingError> {
        self.volume.backing().identity()
    }
    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        self.volume.backing().resize(bytes)
    }
    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        let threads = locked(&self.served.threads);
        let thread = &threads[self.served.next.fetch_add(1, Ordering::Relaxed) % threads.len()];
        Ok(Box::new(Connection {
            told: Told::new(&self.volume),
            _client: Client::new(&self.volume),
            volume: self.volume.clone(),
            asks: thread.asks.clone(),
            waker: thread.waker.clone(),
            ops: Vec::new(),
            in_flight: 0,
            ended: Ended::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        }))
    }
}

/// One client, on one of the threads.
struct Connection {
    told: Told,
    _client: Client,
    volume: Arc<Volume>,
    asks: mpsc::Sender<Ask>,
    waker: Arc<Waker>,
    /// Under way, by number: what it was submitted under, and what it is.
    ops: Vec<Option<(u64, Op)>>,
    in_flight: usize,
    ended: Ended,
    event: OwnedFd,
}

impl Session for Connection {
    /// Nobody waits for it: tests look.
    fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    fn submit(&mut self, token: u64, op: Op) {
        let (op, command) = match op {
            Op::Read { offset, buf } => {
                let empty = AlignedBuf::zeroed(0);
                (Op::Read { offset, buf: empty }, Command::Read { offset, buf })
            }
            Op::Write { offset, data, fua } => {
                let mut buf = AlignedBuf::zeroed(data.len());
                buf.copy_from_slice(&data);
                (Op::Write { offset, data, fua }, Command::Write { offset, buf, fua })
            }
            Op::Flush => (Op::Flush, Command::Flush),
            Op::Trim { offset, len, fua } => {
                (Op::Trim { offset, len, fua }, Command::Trim { offset, len, fua })
            }
            Op::WriteZeroes { offset, len, fua, may_punch, fast } => (
                Op::WriteZeroes { offset, len, fua, may_punch, fast },
                Command::WriteZeroes { offset, len, fua, may_punch, fast },
            ),
            Op::Status { offset, len, one } => {
                (Op::Status { offset, len, one }, Command::Status { offset, len, one })
            }
        };
        let number = self.ops.len() as u64;
        self.ops.push(Some((token, op)));
        self.in_flight += 1;
        let (volume, ended) = (self.volume.clone(), self.ended.clone());
        self.asks.send(Ask { volume, command, token: number, ended }).unwrap();
        self.waker.wake().unwrap();
    }

    fn flush(&mut self, _: Instant) {}
    fn turn(&mut self, _: Instant) {}

    fn pop(&mut self) -> Option<Done> {
        let (number, answer) = locked(&self.ended).pop_front()?;
        let (token, mut op) = self.ops[number as usize].take().unwrap();
        self.in_flight -= 1;
        if let (Op::Read { buf, .. }, Some(filled)) = (&mut op, answer.buf) {
            *buf = filled;
        }
        let outcome = self.told.hear(answer.losses, answer.outcome);
        Some(Done { token, op, outcome })
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

/// Bytes that are to be written.
pub(super) fn payload(len: usize, fill: u8) -> Payload {
    let mut buf = AlignedBuf::zeroed(len);
    buf.fill(fill);
    Payload::new(buf)
}
