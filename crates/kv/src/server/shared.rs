//! What the server's threads share.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use larder_base::AppId;
use larder_runtime::Clock;
use mio::Waker;

use super::listener::NewConn;
use super::tls::Certificates;
use crate::config::Config;
use crate::connection::{BigBuffers, Budget, ConnStats, ProtocolConfig};
use crate::stats::{Latency, PrefixStats};
use crate::watch::Hub;

/// Takes a lock also after a thread died holding it: what these locks guard is whole after every statement.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counters that are not a worker's.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Connections open now.
    pub(crate) connections: AtomicU64,
    /// Connections ever accepted.
    pub(crate) total_connections: AtomicU64,
    /// Connections refused over the limit.
    pub(crate) rejected: AtomicU64,
    /// Times that accepting was paused.
    pub(crate) listen_disabled: AtomicU64,
    /// Microseconds spent so.
    pub(crate) listen_disabled_us: AtomicU64,
    /// 1 while accepting.
    pub(crate) accepting: AtomicU64,
    /// Connections closed for being idle.
    pub(crate) idle_kicks: AtomicU64,
    /// Times that a connection's requests had to wait for other connections' turn.
    pub(crate) yields: AtomicU64,
    /// Failed TLS handshakes and broken TLS records.
    pub(crate) tls_errors: AtomicU64,
    /// Flash reads that failed.
    pub(crate) read_errors: AtomicU64,
    /// Flash reads whose end the kernel did not signal.
    pub(crate) signals_lost: AtomicU64,
}

/// What a connection is doing, in memcached's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum ConnState {
    /// Waits for a command.
    Read,
    /// Is executing commands.
    Parse,
    /// Waits for the body of a store.
    Body,
    /// Waits for the client to take its answers.
    Write,
    /// Waits for flash or for memory.
    Wait,
}

/// What `stats conns` tells about a connection.
#[derive(Debug)]
pub(crate) struct ConnInfo {
    pub(crate) fd: RawFd,
    pub(crate) peer: String,
    pub(crate) listen: Arc<str>,
    /// The application of the listener it came by.
    pub(crate) app: Option<AppId>,
    state: AtomicU8,
    last_command: AtomicU32,
}

impl ConnInfo {
    pub(crate) fn new(
        fd: RawFd,
        peer: String,
        listen: Arc<str>,
        app: Option<AppId>,
        now: u32,
    ) -> ConnInfo {
        ConnInfo {
            fd,
            peer,
            listen,
            app,
            state: AtomicU8::new(ConnState::Read as u8),
            last_command: AtomicU32::new(now),
        }
    }

    pub(crate) fn set_state(&self, state: ConnState) {
        self.state.store(state as u8, Ordering::Relaxed);
    }

    pub(crate) fn state_text(&self) -> &'static str {
        match self.state.load(Ordering::Relaxed) {
            s if s == ConnState::Parse as u8 => "conn_parse_cmd",
            s if s == ConnState::Body as u8 => "conn_nread",
            s if s == ConnState::Write as u8 => "conn_mwrite",
            s if s == ConnState::Wait as u8 => "conn_io_queue",
            _ => "conn_read",
        }
    }

    /// Seconds since the server's start.
    pub(crate) fn touch(&self, now: u32) {
        self.last_command.store(now, Ordering::Relaxed);
    }

    pub(crate) fn last_command(&self) -> u32 {
        self.last_command.load(Ordering::Relaxed)
    }
}

/// A worker, as the others see it.
pub(crate) struct WorkerShared {
    pub(crate) queue: Mutex<VecDeque<NewConn>>,
    pub(crate) waker: Waker,
    /// Its counters as of its last turn, published before any answer of that turn is sent.
    pub(crate) stats: Mutex<ConnStats>,
    pub(crate) latency: Mutex<Latency>,
    /// How its ring reads (`io_uring`, `threads`), once it is open.
    pub(crate) ring: Mutex<Option<&'static str>>,
}

/// How far the server has come in stopping.
const RUNNING: u8 = 0;
const STOPPING: u8 = 1;

/// One server's common state.
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) protocol: ProtocolConfig,
    pub(crate) big: Arc<BigBuffers>,
    pub(crate) clock: Arc<Clock>,
    pub(crate) workers: Vec<WorkerShared>,
    pub(crate) counters: Counters,
    pub(crate) connections: Mutex<BTreeMap<RawFd, Arc<ConnInfo>>>,
    /// Descriptor and address of each listening socket.
    pub(crate) listeners: Vec<(RawFd, Arc<str>)>,
    pub(crate) detail: AtomicBool,
    pub(crate) prefixes: Mutex<PrefixStats>,
    pub(crate) verbosity: AtomicU32,
    /// Who watches what happens.
    pub(crate) hub: Arc<Hub>,
    /// Told when a client sets the verbosity.
    pub(crate) on_verbosity: OnceLock<Box<dyn Fn(u32) + Send + Sync>>,
    /// What `stats reset` subtracts from the workers' counters: they are only ever added to.
    pub(crate) baseline: Mutex<ConnStats>,
    /// Counters of what came by UDP.
    pub(crate) udp_stats: Mutex<ConnStats>,
    stop: AtomicU8,
    /// With TLS.
    pub(crate) certificates: Option<Arc<Certificates>>,
    pub(crate) accept_waker: Waker,
    /// Told when a client asks for shutdown.
    pub(crate) on_shutdown: Box<dyn Fn() + Send + Sync>,
}

impl Shared {
    #[allow(clippy::too_many_arguments, reason = "called once, by the server's start")]
    pub(crate) fn new(
        config: Config,
        protocol: ProtocolConfig,
        clock: Arc<Clock>,
        workers: Vec<WorkerShared>,
        listeners: Vec<(RawFd, Arc<str>)>,
        certificates: Option<Arc<Certificates>>,
        accept_waker: Waker,
        on_shutdown: Box<dyn Fn() + Send + Sync>,
    ) -> Shared {
        let detail = AtomicBool::new(config.stats_detail);
        let prefixes = Mutex::new(PrefixStats::new(config.prefix_delimiter));
        let big = Arc::new(BigBuffers {
            input: Budget::new(config.buffer_limit),
            output: Budget::new(config.buffer_limit),
            ..BigBuffers::default()
        });
        let verbosity = match config.effective.log.log_level.as_str() {
            "debug" => 1,
            "trace" => 2,
            "all" => 3,
            _ => 0,
        };
        let hub = Hub::new(clock.now(), config.watcher_bytes, config.worker_bytes);
        Shared {
            hub: Arc::new(hub),
            config,
            protocol,
            big,
            clock,
            workers,
            counters: Counters { accepting: AtomicU64::new(1), ..Counters::default() },
            connections: Mutex::new(BTreeMap::new()),
            listeners,
            detail,
            prefixes,
            verbosity: AtomicU32::new(verbosity),
            on_verbosity: OnceLock::new(),
            baseline: Mutex::new(ConnStats::default()),
            udp_stats: Mutex::new(ConnStats::default()),
            stop: AtomicU8::new(RUNNING),
            certificates,
            accept_waker,
            on_shutdown,
        }
    }

    /// Seconds since the start.
    pub(crate) fn now_secs(&self) -> u32 {
        (self.clock.now().mono.0 / 1_000_000_000) as u32
    }

    pub(crate) fn add_connection(&self, info: &Arc<ConnInfo>) {
        lock(&self.connections).insert(info.fd, info.clone());
    }

    /// Must be called before the descriptor is closed, or a new connection could already bear its number.
    pub(crate) fn remove_connection(&self, info: &ConnInfo) {
        lock(&self.connections).remove(&info.fd);
    }

    /// A connection has been closed: the accepting thread may be waiting for that.
    pub(crate) fn connection_closed(&self) {
        self.counters.connections.fetch_sub(1, Ordering::Relaxed);
        if self.counters.accepting.load(Ordering::Relaxed) == 0 {
            self.accept_waker.wake().ok();
        }
    }

    pub(crate) fn hand_over(&self, worker: usize, conn: NewConn) {
        let worker = &self.workers[worker];
        lock(&worker.queue).push_back(conn);
        worker.waker.wake().ok();
    }

    /// Has a worker look at what it has to send.
    pub(crate) fn wake(&self, worker: usize) {
        self.workers[worker].waker.wake().ok();
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire) != RUNNING
    }

    /// Stops accepting; workers finish what they have received.
    pub(crate) fn begin_stop(&self) {
        self.stop.store(STOPPING, Ordering::Release);
        self.accept_waker.wake().ok();
        for worker in &self.workers {
            worker.waker.wake().ok();
        }
    }

    /// The workers' counters, summed, since the last reset.
    pub(crate) fn totals(&self) -> ConnStats {
        let mut sum = self.raw_totals();
        sum.subtract(&lock(&self.baseline));
        sum
    }

    pub(crate) fn raw_totals(&self) -> ConnStats {
        let mut sum = lock(&self.udp_stats).clone();
        for worker in &self.workers {
            sum.add(&lock(&worker.stats));
        }
        sum
    }

    /// The workers' latency histograms, merged.
    pub(crate) fn latency(&self) -> Latency {
        let mut sum = Latency::new();
        for worker in &self.workers {
            sum.add(&lock(&worker.latency));
        }
        sum
    }

    pub(crate) fn reset_stats(&self) {
        *lock(&self.baseline) = self.raw_totals();
        let c = &self.counters;
        for counter in [
            &c.total_connections,
            &c.rejected,
            &c.listen_disabled,
            &c.listen_disabled_us,
            &c.idle_kicks,
            &c.yields,
        ] {
            counter.store(0, Ordering::Relaxed);
        }
        lock(&self.prefixes).clear();
        self.hub.reset_counters();
    }
}
