//! The daemon's loop: listeners, workers, and how they start and stop.
//!
//! ```text
//! accepting thread ──round robin──▶ worker 0..n: one poll, its connections, a Service of its own ──▶ stores, flash
//! ```
//!
//! | module | what it is |
//! | --- | --- |
//! | `worker` | connections, requests, replies |
//! | `listen` | sockets to listen on, and the thread that accepts |
//!
//! A request stays on the thread that its connection was dealt to, from the socket to the reply.

mod export;
mod guests;
pub(crate) mod listen;
#[cfg(test)]
mod tests;
mod tls;
mod words;
mod worker;

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_net::accept::WAKE;
use larder_net::listen::{SocketAccess, UnixPath};
use larder_net::stream::Stream;
pub use larder_net::tls::TlsFiles;
use mio::{Poll, Registry, Waker};
use parking_lot::Mutex;
use tracing::warn;

pub use crate::cache::{Client, Told, Volume, VolumeError, Volumes, health, service, volume};
use crate::nbd::server::{Limits, TlsPolicy};
use crate::rate_limited::RateLimited;
pub use crate::served::{Face, ServerError};
use guests::Guest;
pub use listen::{Address, Listen};
use service::Service;
use worker::Worker;

/// How a server is to be.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Where to listen.
    pub listen: Vec<Listen>,
    /// Whom Unix sockets let in.
    pub sockets: SocketAccess,
    /// Workers.
    pub threads: usize,
    /// Connections at a time; more are refused, unless one makes way.
    pub connections: u64,
    /// Of them, from one address over TCP (of IPv6, one network of 64 bits).
    pub per_peer: u64,
    /// Where there are too many, a connection that has never asked anything makes way for another after so long a silence.
    pub gives_way: Duration,
    /// What each of them may have under way.
    pub limits: Limits,
    /// Bytes of buffers of one worker, for all its connections.
    pub buffer_bytes: usize,
    /// A certificate; without one there is no TLS. [`Listen::tls`] says who must begin it.
    pub tls: Option<TlsFiles>,
    /// For a handshake as a whole, TLS's included; and for a client that keeps memory without going on while others wait for some.
    pub timeout: Duration,
    /// The same for a client that keeps buffers once others have waited for some as long as this. It goes on as long as its socket
    /// takes or brings 64 KiB a second for some part of this time: long enough for a network that loses packets, since whoever is
    /// closed loses what it has asked for.
    pub impatience: Duration,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig {
            listen: Vec::new(),
            sockets: SocketAccess::OWNER,
            threads: 2,
            connections: 1024,
            per_peer: 768,
            gives_way: Duration::from_secs(10),
            limits: Limits::default(),
            buffer_bytes: 256 << 20,
            tls: None,
            timeout: Duration::from_secs(30),
            impatience: Duration::from_secs(2),
        }
    }
}

fn system(what: &'static str) -> impl FnOnce(io::Error) -> ServerError {
    move |source| ServerError::System { what, source }
}

/// Counters of a server. They only grow, but for `connections`.
#[derive(Debug, Default)]
pub struct Counters {
    /// Connections now.
    pub connections: AtomicU64,
    /// Connections ever.
    pub accepted: AtomicU64,
    /// Connections refused because there were too many.
    pub refused: AtomicU64,
    /// Connections closed for others because they never asked anything.
    pub made_way: AtomicU64,
    /// Requests that were not begun because nobody was there any more to be answered.
    pub abandoned: AtomicU64,
    /// Connections closed because the client broke the protocol.
    pub broken: AtomicU64,
    /// Connections closed because TLS was required and not begun, or did not come about.
    pub tls_refused: AtomicU64,
    /// Requests taken.
    pub requests: AtomicU64,
    /// Requests answered with an error of the store.
    pub failed: AtomicU64,
}

/// A connection on its way to a worker.
struct Dealt {
    stream: Stream,
    /// What its listener says of TLS.
    tls: TlsPolicy,
    /// Counts it among those of its peer's address, as long as it lives.
    guest: Option<Guest>,
    /// Workers that have found none of theirs to make way for it.
    asked: usize,
}

/// A worker as others see it.
struct WorkerDoor {
    queue: Mutex<VecDeque<Dealt>>,
    waker: Waker,
}

/// What the threads of a server share.
struct Shared {
    config: ServerConfig,
    volumes: Arc<Volumes>,
    counters: Arc<Counters>,
    workers: Vec<WorkerDoor>,
    stopping: AtomicBool,
    /// Workers that have, or may have, requests under way.
    busy: AtomicUsize,
    /// When a line was last said about connections that are refused.
    refusals: Mutex<RateLimited>,
    certificate: Option<tls::Certificates>,
}

impl Shared {
    /// Hands a connection to a worker.
    fn hand(&self, worker: usize, dealt: Dealt) {
        let worker = &self.workers[worker];
        worker.queue.lock().push_back(dealt);
        if let Err(e) = worker.waker.wake() {
            warn!("a worker cannot be woken: {e}");
        }
    }

    fn stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// There are too many connections, and `why` no other makes way for this one.
    fn refused(&self, why: &str) {
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        if let Some(unsaid) = self.refusals.lock().wrong(Instant::now()) {
            let most = self.config.connections;
            warn!(
                "a connection is refused: the limit of {most} (--connections) is reached, and {why}{unsaid}"
            );
        }
    }
}

/// What a server needs before it can be reached: sockets that are bound, and the certificate. Clients that come meanwhile
/// wait until it is started. Dropped, the sockets go.
pub struct Doors {
    listeners: Vec<listen::Listener>,
    certificate: Option<tls::Certificates>,
}

impl Doors {
    /// Loads the certificate and opens the sockets that `config` names, so that what is wrong with them is known before
    /// anything else is begun.
    ///
    /// # Errors
    /// [`ServerError`] naming the file that cannot be used, or the socket that cannot be had.
    pub fn open(config: &ServerConfig) -> Result<Doors, ServerError> {
        let certificate = config.tls.as_ref().map(tls::Certificates::load).transpose()?;
        let listeners = listen::open(&config.listen, certificate.is_some(), config.sockets)?;
        Ok(Doors { listeners, certificate })
    }

    /// Where is listened: the paths of Unix sockets, and TCP addresses with the ports that the system chose.
    pub fn places(&self) -> (Vec<PathBuf>, Vec<SocketAddr>) {
        let paths = self.listeners.iter().filter_map(|l| l.path.as_ref());
        let paths = paths.map(|guard| guard.path().to_owned()).collect();
        (paths, self.listeners.iter().filter_map(listen::Listener::address).collect())
    }
}

/// A server that runs, until it is stopped or dropped.
pub struct Server {
    shared: Arc<Shared>,
    accept_waker: Arc<Waker>,
    threads: Vec<JoinHandle<()>>,
    addresses: Vec<SocketAddr>,
    _paths: Vec<UnixPath>,
}

impl Server {
    /// Opens the sockets and starts the threads. `service` makes what each worker does its requests with: it is told
    /// the worker's number, where to register descriptors, and the first token that is free for them.
    ///
    /// # Errors
    /// [`ServerError`] when a socket or a thread cannot be had.
    pub fn start<S, F>(
        config: ServerConfig,
        volumes: Arc<Volumes>,
        service: F,
    ) -> Result<Server, ServerError>
    where
        S: Service + Send + 'static,
        F: FnMut(usize, Registry, usize) -> io::Result<S>,
    {
        let doors = Doors::open(&config)?;
        Server::start_behind(doors, config, volumes, service)
    }

    /// The same behind doors that were opened before, by the same `config`.
    ///
    /// # Errors
    /// [`ServerError`] when a thread cannot be had.
    pub fn start_behind<S, F>(
        doors: Doors,
        config: ServerConfig,
        volumes: Arc<Volumes>,
        mut service: F,
    ) -> Result<Server, ServerError>
    where
        S: Service + Send + 'static,
        F: FnMut(usize, Registry, usize) -> io::Result<S>,
    {
        let Doors { mut listeners, certificate } = doors;
        let addresses = listeners.iter().filter_map(|l| l.address()).collect();
        let paths = listeners.iter_mut().filter_map(|l| l.path.take()).collect();
        let accept_poll = Poll::new().map_err(system("epoll"))?;
        let accept_waker = Waker::new(accept_poll.registry(), WAKE).map_err(system("eventfd"))?;
        let mut polls = Vec::new();
        let mut workers = Vec::new();
        for _ in 0..config.threads.max(1) {
            let poll = Poll::new().map_err(system("epoll"))?;
            let waker = Waker::new(poll.registry(), worker::WAKE).map_err(system("eventfd"))?;
            workers.push(WorkerDoor { queue: Mutex::default(), waker });
            polls.push(poll);
        }
        let shared = Arc::new(Shared {
            config,
            volumes,
            counters: Arc::default(),
            workers,
            stopping: AtomicBool::new(false),
            busy: AtomicUsize::new(0),
            refusals: Mutex::default(),
            certificate,
        });
        // From here on, what was started is stopped when the value is dropped.
        let mut server = Server {
            shared: shared.clone(),
            accept_waker: Arc::new(accept_waker),
            threads: Vec::new(),
            addresses,
            _paths: paths,
        };
        for (index, poll) in polls.into_iter().enumerate() {
            let registry = poll.registry().try_clone().map_err(system("epoll"))?;
            let service =
                service(index, registry, worker::SERVICE).map_err(system("a worker's rings"))?;
            let worker = Worker::new(index, shared.clone(), poll, service);
            let thread = std::thread::Builder::new()
                .name(format!("block-{index}"))
                .spawn(move || worker.run())
                .map_err(system("a thread"))?;
            server.threads.push(thread);
        }
        let thread = std::thread::Builder::new()
            .name("block-accept".into())
            .spawn(move || listen::run(accept_poll, listeners, &shared))
            .map_err(system("a thread"))?;
        server.threads.push(thread);
        Ok(server)
    }

    /// The TCP addresses listened on, with the ports that the system chose.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// What is exported.
    pub fn volumes(&self) -> &Arc<Volumes> {
        &self.shared.volumes
    }

    /// Reads the certificate, its key and the clients' authorities again, for connections that begin TLS from here on. What came
    /// of it goes to the log.
    pub fn reload(&self) {
        match self.shared.certificate.as_ref().map(tls::Certificates::reload) {
            None => tracing::info!("nothing to read again: there is no certificate"),
            Some(Ok(())) => {
                tracing::info!("TLS certificates read again: new connections have them");
            }
            Some(Err(e)) => tracing::error!("the former TLS certificates stay in use: {e}"),
        }
    }

    /// What has been done.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.shared.counters
    }

    /// Takes no more connections, answers what is under way, ends.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.shared.stopping.store(true, Ordering::SeqCst);
        // A thread that cannot be woken ends at its next event.
        let _ = self.accept_waker.wake();
        for worker in &self.shared.workers {
            let _ = worker.waker.wake();
        }
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so on stderr already.
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}
