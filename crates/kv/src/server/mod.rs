//! Listeners, workers, and how they start and stop.
//!
//! ```text
//! accepting thread ──round robin──▶ worker 0..n: poll + read ring + connections ──▶ Arc<Store>
//! ```

mod admin;
mod error;
mod listener;
pub(crate) mod shared;
mod stats;
mod store;
mod tls;
mod udp;
pub(crate) mod view;
mod worker;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use larder_cache::kv::ring_for;
use larder_net::accept::WAKE;
use larder_net::listen::UnixPath;
use larder_runtime::{Clock, ReadRing, RingChoice, RingOptions};
use mio::{Poll, Waker};
use tracing::{error, info, warn};

pub use error::ServerError;
pub use larder_engine::kv::node::Crawler;
pub use store::{Span, Store, TellEvicted};
pub use view::View;

use crate::config::{Config, IoChoice, ListenTls};
use crate::connection::{ConnStats, ProtocolConfig};
use crate::protocol::auth::{AuthFile, Users};
use crate::stats::Latency;
use shared::{Shared, WorkerShared};
use worker::Worker;

/// The memcached whose protocol is spoken.
const SPEAKS: &str = "1.6.45";

/// A server that runs. Dropping it without [`Server::stop`] leaves its threads running.
pub struct Server<S: Store> {
    shared: Arc<Shared>,
    store: Arc<S>,
    threads: Vec<JoinHandle<()>>,
    addresses: Vec<SocketAddr>,
    udp_addresses: Vec<SocketAddr>,
    _unix: Option<UnixPath>,
}

fn system(what: &'static str) -> impl FnOnce(std::io::Error) -> ServerError {
    move |source| ServerError::System { what, source }
}

/// The sockets of a configuration, bound and not yet listened on, and who may log in there: to be had before the store is opened, so that an
/// address in use leaves everything else untouched.
pub struct Sockets {
    listeners: Vec<listener::Listener>,
    unix: Option<UnixPath>,
    udp: Vec<udp::UdpEndpoint>,
    certificates: Option<Arc<tls::Certificates>>,
    users: Option<Arc<Users>>,
}

impl Sockets {
    /// Binds them all.
    ///
    /// # Errors
    /// [`ServerError`] for the first that cannot be had, a certificate or a user file that cannot be read.
    pub fn bind(config: &Config) -> Result<Sockets, ServerError> {
        let users = config.auth_file.as_deref().map(read_users).transpose()?;
        let certificates = config.tls.clone().map(tls::Certificates::load).transpose()?;
        let (listeners, unix) = listener::open(config)?;
        let mutual = config.listen.iter().any(|l| l.tls == ListenTls::Mutual);
        if mutual && config.tls.as_ref().is_some_and(|tls| tls.client_ca.is_none()) {
            warn!(
                "mtls: without tls-client-ca nobody can show a certificate that is good: all are refused there"
            );
        }
        Ok(Sockets {
            listeners,
            unix,
            udp: udp::open(&config.udp)?,
            certificates: certificates.map(Arc::new),
            users: users.map(|users| Arc::new(users.into())),
        })
    }
}

fn read_users(path: &Path) -> Result<AuthFile, ServerError> {
    let bad = |reason: String| ServerError::Auth { path: path.to_owned(), reason };
    let text = std::fs::read(path).map_err(|e| bad(format!("cannot be read: {e}")))?;
    AuthFile::parse(&text).map_err(|e| bad(e.to_string()))
}

impl<S: Store> Server<S> {
    /// Binds the sockets and starts the threads: [`Sockets::bind`] and [`Server::start_on`] in one.
    ///
    /// # Errors
    /// As those.
    pub fn start(
        config: Config,
        store: Arc<S>,
        clock: Arc<Clock>,
        on_shutdown: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Server<S>, ServerError> {
        let sockets = Sockets::bind(&config)?;
        Server::start_on(sockets, config, store, clock, on_shutdown)
    }

    /// Listens and starts the threads. `clock` is the one that the store was opened with. `on_shutdown` is called when a client asks for shutdown; it should
    /// bring about a call of [`Server::stop`] on another thread.
    ///
    /// # Errors
    /// [`ServerError`] when a socket or a thread cannot be had, or a listener's application cannot be told
    /// apart from the others.
    pub fn start_on(
        sockets: Sockets,
        config: Config,
        store: Arc<S>,
        clock: Arc<Clock>,
        on_shutdown: Box<dyn Fn() + Send + Sync>,
    ) -> Result<Server<S>, ServerError> {
        let Sockets { mut listeners, unix, mut udp, certificates, users } = sockets;
        store.set_crawler(config.lru_crawler);
        let protocol = ProtocolConfig {
            // Clients judge by these numbers which commands they may use.
            version: format!("{SPEAKS}-larder-{}", env!("CARGO_PKG_VERSION")),
            shutdown_enabled: config.shutdown_enabled,
            flush_enabled: config.flush_enabled,
            dump_enabled: config.dump_enabled,
            debug_commands: config.debugtime_enabled,
            cas_enabled: config.cas_enabled,
            commands_per_turn: config.requests_per_event,
            binary_only: config.binary_only,
            auth: users,
        };
        let id = |name: &Option<String>| name.as_ref().map(|n| store.application(n)).transpose();
        for listener in &mut listeners {
            listener.app = id(&listener.application)?;
        }
        for endpoint in &mut udp {
            endpoint.app = id(&endpoint.application)?;
        }
        listener::listen(&listeners, config.backlog)?;
        let accept_poll = Poll::new().map_err(system("epoll"))?;
        let accept_waker = Waker::new(accept_poll.registry(), WAKE).map_err(system("eventfd"))?;
        let mut polls = Vec::new();
        let mut workers = Vec::new();
        for _ in 0..config.threads {
            let poll = Poll::new().map_err(system("epoll"))?;
            workers.push(WorkerShared {
                queue: Mutex::default(),
                waker: Waker::new(poll.registry(), worker::WAKE).map_err(system("eventfd"))?,
                stats: Mutex::new(ConnStats::default()),
                latency: Mutex::new(Latency::new()),
                ring: Mutex::new(None),
            });
            polls.push(poll);
        }
        let names = listeners
            .iter()
            .map(|l| (l.fd(), l.text().clone()))
            .chain(udp.iter().map(|u| (u.fd, u.text.clone())))
            .collect();
        let udp_addresses = udp.iter().map(|u| u.address).collect();
        let addresses = listeners.iter().filter_map(|l| l.address()).collect();
        let shared = Arc::new(Shared::new(
            config,
            protocol,
            clock,
            workers,
            names,
            certificates,
            accept_waker,
            on_shutdown,
        ));
        // The store outlives the server.
        let told = Arc::downgrade(&shared);
        store.on_evictions(Box::new(move |now, evicted, lost| {
            if let Some(shared) = told.upgrade() {
                shared.hub.tell_evicted(now, evicted, lost, |worker| shared.wake(worker));
            }
        }));
        let mut threads = Vec::new();
        for (i, poll) in polls.into_iter().enumerate() {
            let ring = open_ring(&shared, &*store, i)?;
            let worker = Worker::new(i, store.clone(), shared.clone(), poll, ring)
                .map_err(system("registering the ring"))?;
            let thread = std::thread::Builder::new()
                .name(format!("larder-{i}"))
                .spawn(move || worker.run())
                .map_err(system("starting a worker thread"))?;
            threads.push(thread);
        }
        for endpoint in udp {
            let (store, shared) = (store.clone(), shared.clone());
            let thread = std::thread::Builder::new()
                .name("larder-udp".into())
                .spawn(move || udp::run(&endpoint, &store, &shared))
                .map_err(system("starting a UDP thread"))?;
            threads.push(thread);
        }
        let accepting = shared.clone();
        let thread = std::thread::Builder::new()
            .name("larder-accept".into())
            .spawn(move || listener::run(accept_poll, listeners, &accepting))
            .map_err(system("starting the accepting thread"))?;
        threads.push(thread);
        Ok(Server { shared, store, threads, addresses, udp_addresses, _unix: unix })
    }

    /// The TCP addresses, with the ports that the system chose where it was left to it.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The UDP addresses, likewise.
    pub fn udp_addresses(&self) -> &[SocketAddr] {
        &self.udp_addresses
    }

    /// Every address as it is listened on, for the log.
    pub fn listening(&self) -> Vec<String> {
        self.shared.listeners.iter().map(|(_, text)| text.to_string()).collect()
    }

    /// Calls `tell` from now on when a client sets the verbosity. The first that is given stays.
    pub fn on_verbosity(&self, tell: Box<dyn Fn(u32) + Send + Sync>) {
        self.shared.on_verbosity.set(tell).ok();
    }

    /// Reads certificates and users again, as far as there are files of them. Connections that are open go on as they began; a
    /// file that cannot be used changes nothing. What came of each goes to the log.
    pub fn reload(&self) {
        let shared = &self.shared;
        let mut files = 0;
        if let Some(certificates) = &shared.certificates {
            files += 1;
            match certificates.reload(shared.now_secs()) {
                Ok(()) => info!("TLS certificates read again: new connections have them"),
                Err(e) => error!("the former TLS certificates stay in use: {e}"),
            }
        }
        if let (Some(users), Some(path)) = (&shared.protocol.auth, &shared.config.auth_file) {
            files += 1;
            match read_users(path) {
                Ok(file) => {
                    users.set(file);
                    info!("auth-file '{}' read again", path.display());
                }
                Err(e) => error!("the former users may log in: {e}"),
            }
        }
        if files == 0 {
            info!("nothing to read again: there is neither a certificate nor an auth-file");
        }
    }

    /// What the live page and `/metrics` show.
    pub fn view(&self) -> View<S> {
        View::new(self.shared.clone(), self.store.clone())
    }

    /// Stops accepting, lets requests that have begun finish (up to five seconds), closes all connections and waits
    /// for the threads. The store is not shut down.
    pub fn stop(self) {
        self.shared.begin_stop();
        for thread in self.threads {
            let name = thread.thread().name().unwrap_or("a thread").to_owned();
            if thread.join().is_err() {
                tracing::error!("{name} ended by a panic");
            }
        }
    }
}

fn open_ring<S: Store>(
    shared: &Shared,
    store: &S,
    index: usize,
) -> Result<Option<ReadRing>, ServerError> {
    let Some(device) = store.device() else { return Ok(None) };
    let choice = match shared.config.flash.as_ref().map_or(IoChoice::Auto, |f| f.io) {
        IoChoice::Auto => RingChoice::Auto,
        IoChoice::Uring => RingChoice::Uring,
        IoChoice::Threads => RingChoice::Threads,
    };
    let options = RingOptions { choice, ..RingOptions::default() };
    let options = ring_for(shared.config.max_item_size, options);
    let ring = ReadRing::open(device, &options)?;
    if index == 0 {
        match ring.fallback_reason() {
            Some(reason) => info!("flash is read by threads: io_uring is not available ({reason})"),
            None => info!("flash is read by {}", ring.kind()),
        }
    }
    *shared::lock(&shared.workers[index].ring) = Some(ring.kind());
    Ok(Some(ring))
}

/// How long [`Server::stop`] waits at most, and a little more.
pub const STOP_TIME: Duration = Duration::from_secs(6);
