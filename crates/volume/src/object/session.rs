//! A worker's way to a volume's thread, which has the HTTP client and everything that waits for it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use object_store::ObjectStore;
use object_store::path::Path;
use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use tokio::sync::mpsc as queue;
use tokio::task::{JoinSet, LocalSet};

use super::chunks::Chunks;
use super::requests::Requests;
use super::{Setup, attach, keep};
use crate::op::{Done, Failure, FailureKind, Op, Outcome};
use crate::{Identity, Session, Timeouts};

/// How often a read-only attachment looks whether a writer has come.
const LOOK: Duration = Duration::from_secs(5);
/// At the end, for what is under way and for the lease to be let go.
const END: Duration = Duration::from_secs(10);

/// What one worker's session and the thread share.
struct Port {
    event: OwnedFd,
    done: Mutex<Vec<Done>>,
}

enum Command {
    Ops(Arc<Port>, Vec<(u64, Op)>),
    Identity(mpsc::SyncSender<Result<Identity, String>>),
    Resize(Option<u64>, mpsc::SyncSender<Result<u64, String>>),
    Stop,
}

/// The thread and the way to it.
pub(super) struct Hub {
    commands: queue::UnboundedSender<Command>,
    thread: Option<JoinHandle<()>>,
    lost: Arc<AtomicBool>,
}

/// Of one thread.
pub(crate) fn runtime() -> io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Whoever starts a daemon wants to hear soon what is wrong.
pub(super) fn at_first(timeout: Timeouts) -> Timeouts {
    Timeouts { silence: timeout.connect, give_up: Some(timeout.connect), ..timeout }
}

impl Hub {
    /// Attaches the volume. Returns its size too.
    pub(super) fn start(
        uri: String,
        store: Box<dyn ObjectStore>,
        prefix: Path,
        setup: Setup,
    ) -> Result<(Hub, u64), String> {
        let (commands, inbox) = queue::unbounded_channel();
        let (tell, told) = mpsc::sync_channel(1);
        let lost = Arc::new(AtomicBool::new(false));
        let fence = lost.clone();
        let thread = std::thread::Builder::new()
            .name("object-store".into())
            .spawn(move || {
                let runtime = match runtime() {
                    Ok(runtime) => runtime,
                    Err(e) => return drop(tell.send(Err(e.to_string()))),
                };
                let work = run(uri, store, prefix, setup, fence, inbox, tell);
                LocalSet::new().block_on(&runtime, work);
                // Requests that were given up are not waited for.
                runtime.shutdown_background();
            })
            .map_err(|e| format!("a thread: {e}"))?;
        let size = told.recv().map_err(|_| "its thread has ended".to_owned())??;
        Ok((Hub { commands, thread: Some(thread), lost }, size))
    }

    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    pub(super) fn identity(&self) -> Result<Identity, String> {
        let (tell, told) = mpsc::sync_channel(1);
        let gone = || "its thread has ended".to_owned();
        self.commands.send(Command::Identity(tell)).map_err(|_| gone())?;
        told.recv().map_err(|_| gone())?
    }

    /// Makes it as large as that, or looks how large it is.
    pub(super) fn resize(&self, bytes: Option<u64>) -> Result<u64, String> {
        let (tell, told) = mpsc::sync_channel(1);
        let gone = || "its thread has ended".to_owned();
        self.commands.send(Command::Resize(bytes, tell)).map_err(|_| gone())?;
        told.recv().map_err(|_| gone())?
    }

    pub(super) fn session(&self) -> io::Result<ObjectSession> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let port = Arc::new(Port { event, done: Mutex::default() });
        let commands = self.commands.clone();
        Ok(ObjectSession { commands, port, batch: Vec::new(), ready: Vec::new(), in_flight: 0 })
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let _ = self.commands.send(Command::Stop);
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

async fn run(
    uri: String,
    store: Box<dyn ObjectStore>,
    prefix: Path,
    setup: Setup,
    lost: Arc<AtomicBool>,
    mut inbox: queue::UnboundedReceiver<Command>,
    tell: mpsc::SyncSender<Result<u64, String>>,
) {
    let timeout = setup.options.timeout;
    let requests = Requests::new(uri, store, at_first(timeout));
    let chunks = match attach(requests, &prefix, &setup, lost).await {
        Ok(chunks) => chunks,
        Err(e) => return drop(tell.send(Err(e))),
    };
    chunks.requests.set_patience(timeout);
    let _ = tell.send(Ok(chunks.manifest().size));
    let keeper = tokio::task::spawn_local(keep(chunks.clone(), prefix.clone(), LOOK));
    let mut under_way = JoinSet::new();
    while let Some(command) = inbox.recv().await {
        match command {
            Command::Ops(port, ops) => {
                while under_way.try_join_next().is_some() {}
                for (token, op) in ops {
                    let (port, chunks) = (port.clone(), chunks.clone());
                    under_way.spawn_local(async move {
                        let (op, outcome) = execute(&chunks, op).await;
                        port.done.lock().push(Done { token, op, outcome });
                        // EAGAIN (the counter is at its end) means that it is readable anyway.
                        let _ = rustix::io::write(&port.event, &1u64.to_ne_bytes());
                    });
                }
            }
            Command::Identity(tell) => {
                let _ = tell.send(identity(&chunks));
            }
            Command::Resize(bytes, tell) => {
                // What clients ask goes on meanwhile.
                let chunks = chunks.clone();
                under_way.spawn_local(async move {
                    let _ = tell.send(chunks.resize(bytes).await);
                });
            }
            Command::Stop => break,
        }
    }
    keeper.abort();
    let rest = async { while under_way.join_next().await.is_some() {} };
    let quiet = tokio::time::timeout(END, rest).await.is_ok();
    if quiet && !chunks.is_fenced() {
        let free = chunks.holding.renew(&chunks.requests, &prefix, true);
        if tokio::time::timeout(END, free).await.is_err() {
            tracing::warn!(
                "backing store '{}': the lease could not be let go: it ends by itself",
                chunks.requests.uri()
            );
        }
    }
}

fn identity(chunks: &Chunks) -> Result<Identity, String> {
    if chunks.is_fenced() {
        return Err("it is not used any more".into());
    }
    let manifest = chunks.manifest();
    Ok(Identity::Objects {
        volume: manifest.number().unwrap_or_default(),
        size: manifest.size,
        generation: manifest.generation,
        changed: manifest.changed,
        digest: chunks.digest(),
    })
}

/// Does one operation, and hands it back with its buffer.
async fn execute(chunks: &Rc<Chunks>, mut op: Op) -> (Op, Outcome) {
    let outcome = match &mut op {
        Op::Read { offset, buf } => chunks.read(*offset, buf).await,
        Op::Write { offset, data, .. } => {
            chunks.change(*offset, data.len() as u64, Some(data)).await
        }
        // What was answered is in the store.
        Op::Flush => Ok(()),
        Op::Trim { offset, len, .. } => {
            let (from, len) = chunks.whole_chunks(*offset, u64::from(*len));
            if len == 0 { Ok(()) } else { chunks.change(from, len, None).await }
        }
        Op::WriteZeroes { offset, len, fast, .. } => {
            let len = u64::from(*len);
            if *fast && chunks.whole_chunks(*offset, len) != (*offset, len) {
                let text = "parts of chunks must be written";
                Err(Failure::new(FailureKind::Unsupported, text))
            } else {
                chunks.change(*offset, len, None).await
            }
        }
        Op::Status { offset, len, one } => {
            let extents = chunks.status(*offset, *len, *one);
            return (op, Ok(extents));
        }
    };
    (op, outcome.map(|()| Vec::new()))
}

/// One worker's way to the thread.
pub(super) struct ObjectSession {
    commands: queue::UnboundedSender<Command>,
    port: Arc<Port>,
    batch: Vec<(u64, Op)>,
    ready: Vec<Done>,
    in_flight: usize,
}

impl Session for ObjectSession {
    fn fd(&self) -> RawFd {
        self.port.event.as_raw_fd()
    }

    fn submit(&mut self, token: u64, op: Op) {
        self.in_flight += 1;
        self.batch.push((token, op));
    }

    fn flush(&mut self, _now: Instant) {
        if self.batch.is_empty() {
            return;
        }
        let ops = Command::Ops(self.port.clone(), std::mem::take(&mut self.batch));
        if let Err(queue::error::SendError(Command::Ops(_, ops))) = self.commands.send(ops) {
            // The thread is no more: nothing is left without an answer.
            let failure = Failure::new(FailureKind::Failed, "the backing store's thread has ended");
            let ended = |(token, op)| Done { token, op, outcome: Err(failure.clone()) };
            self.port.done.lock().extend(ops.into_iter().map(ended));
            let _ = rustix::io::write(&self.port.event, &1u64.to_ne_bytes());
        }
    }

    fn turn(&mut self, _now: Instant) {}

    fn pop(&mut self) -> Option<Done> {
        if self.ready.is_empty() {
            self.ready = std::mem::take(&mut *self.port.done.lock());
            self.ready.reverse();
        }
        let done = self.ready.pop()?;
        self.in_flight -= 1;
        Some(done)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}
