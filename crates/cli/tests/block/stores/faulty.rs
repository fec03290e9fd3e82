//! An NBD server whose store fails, hangs and loses connections as it is told.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use larder_block::backing::{
    self, Backing, BackingError, Capabilities, Identity, OpenOptions, Session,
};
use larder_block::op::{Done, Failure, FailureKind, Op};
use larder_block::server::service::pass_through;
use larder_block::server::{Listen, Server, ServerConfig, Volume, Volumes};

/// What goes wrong.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Every n-th operation fails, every other one of these after it was carried out; 0: none.
    pub(crate) fail_every: AtomicU64,
    /// With this.
    pub(crate) kind: FailureKind,
    /// Only writes, trims and zeroes do.
    pub(crate) changes_alone: AtomicBool,
    /// Nothing is carried out.
    pub(crate) hang: AtomicBool,
    /// Operations that were begun and have not ended.
    pub(crate) under_way: AtomicU64,
    count: AtomicU64,
    pub(crate) reads: AtomicU64,
}

#[derive(Debug)]
struct Faulty {
    inner: Box<dyn Backing>,
    plan: Arc<Plan>,
}

impl Backing for Faulty {
    fn uri(&self) -> &str {
        self.inner.uri()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn identity(&self) -> Result<Identity, BackingError> {
        self.inner.identity()
    }
    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        self.inner.resize(bytes)
    }
    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        let inner = self.inner.session()?;
        let plan = self.plan.clone();
        Ok(Box::new(FaultySession {
            inner,
            plan,
            held: VecDeque::new(),
            ended: VecDeque::new(),
            lost: Vec::new(),
        }))
    }
}

struct FaultySession {
    inner: Box<dyn Session>,
    plan: Arc<Plan>,
    held: VecDeque<(u64, Op)>,
    ended: VecDeque<Done>,
    /// Carried out, and said to have failed.
    lost: Vec<u64>,
}

impl FaultySession {
    fn failure(&self) -> Failure {
        Failure::new(self.plan.kind, "as it was told")
    }

    fn let_go(&mut self) {
        if self.plan.hang.load(Ordering::SeqCst) {
            return;
        }
        while let Some((token, op)) = self.held.pop_front() {
            self.plan.reads.fetch_add(u64::from(matches!(op, Op::Read { .. })), Ordering::SeqCst);
            let number = self.plan.count.fetch_add(1, Ordering::SeqCst) + 1;
            let every = self.plan.fail_every.load(Ordering::SeqCst);
            let spared = self.plan.changes_alone.load(Ordering::SeqCst)
                && matches!(op, Op::Read { .. } | Op::Flush);
            let fails = every > 0 && number.is_multiple_of(every) && !spared;
            if fails && (number / every).is_multiple_of(2) {
                self.ended.push_back(Done { token, op, outcome: Err(self.failure()) });
                continue;
            }
            if fails {
                self.lost.push(token);
            }
            self.inner.submit(token, op);
        }
    }
}

impl Session for FaultySession {
    fn fd(&self) -> RawFd {
        self.inner.fd()
    }
    fn submit(&mut self, token: u64, op: Op) {
        self.plan.under_way.fetch_add(1, Ordering::SeqCst);
        self.held.push_back((token, op));
        self.let_go();
    }
    fn flush(&mut self, now: Instant) {
        self.let_go();
        self.inner.flush(now);
    }
    fn turn(&mut self, now: Instant) {
        self.let_go();
        self.inner.flush(now);
        self.inner.turn(now);
    }
    fn pop(&mut self) -> Option<Done> {
        if let Some(done) = self.ended.pop_front() {
            self.plan.under_way.fetch_sub(1, Ordering::SeqCst);
            return Some(done);
        }
        let done = self.inner.pop()?;
        self.plan.under_way.fetch_sub(1, Ordering::SeqCst);
        match self.lost.iter().position(|&t| t == done.token) {
            Some(at) => {
                self.lost.swap_remove(at);
                Some(Done { outcome: Err(self.failure()), ..done })
            }
            None => Some(done),
        }
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len() + self.ended.len()
    }
    fn wake_at(&self) -> Option<Instant> {
        let mine = (!self.held.is_empty()).then(|| Instant::now() + Duration::from_millis(10));
        mine.into_iter().chain(self.inner.wake_at()).min()
    }
}

/// What it did not end it never will.
impl Drop for FaultySession {
    fn drop(&mut self) {
        self.plan.under_way.fetch_sub(self.in_flight() as u64, Ordering::SeqCst);
    }
}

/// The server.
pub(crate) struct Store {
    pub(crate) plan: Arc<Plan>,
    disk: PathBuf,
    socket: PathBuf,
    server: Option<Server>,
    volume: Option<Arc<Volume>>,
}

impl Store {
    pub(crate) fn start(dir: &Path, bytes: u64, kind: FailureKind) -> Store {
        let disk = dir.join("disk");
        std::fs::File::create(&disk).unwrap().set_len(bytes).unwrap();
        let plan = Plan {
            fail_every: 0.into(),
            kind,
            changes_alone: false.into(),
            hang: false.into(),
            count: 0.into(),
            reads: 0.into(),
            under_way: 0.into(),
        };
        let socket = dir.join("store");
        let mut store = Store { plan: Arc::new(plan), disk, socket, server: None, volume: None };
        store.serve();
        store
    }

    fn serve(&mut self) {
        let uri = format!("file:{}", self.disk.display());
        let options = OpenOptions { lease: false, ..OpenOptions::default() };
        let inner = backing::open_with(&uri.parse().unwrap(), &options).unwrap();
        let backing = Box::new(Faulty { inner, plan: self.plan.clone() });
        let volumes = Arc::new(Volumes::default());
        self.volume = Some(volumes.add(Volume::new("disk", backing, 4096, false)).unwrap());
        let listen = vec![Listen::unix(self.socket.clone())];
        let config = ServerConfig { listen, ..ServerConfig::default() };
        self.server = Some(Server::start(config, volumes, pass_through).unwrap());
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.socket.display())
    }

    /// The export has so many bytes from now on. Connections that are there keep the size that they were told.
    pub(crate) fn grow(&self, bytes: u64) {
        let volume = self.volume.as_ref().unwrap();
        assert_eq!(volume.backing().resize(Some(bytes)).unwrap(), bytes);
        volume.set_size(bytes);
    }

    /// All connections go, and nobody gets another.
    pub(crate) fn leave(&mut self) {
        self.volume = None;
        if let Some(server) = self.server.take() {
            server.stop();
        }
    }

    /// It is there again.
    pub(crate) fn come_back(&mut self) {
        self.serve();
    }

    /// What it keeps its bytes in.
    pub(crate) fn file(&self) -> &Path {
        &self.disk
    }

    /// All connections go; the store comes back after a while.
    pub(crate) fn cut(&mut self, away: Duration) {
        self.server.take().unwrap().stop();
        std::thread::sleep(away);
        self.serve();
    }
}
