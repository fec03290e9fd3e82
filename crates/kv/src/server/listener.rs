//! Sockets to listen on, and the thread that accepts.

use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::AppId;
use larder_net::accept::{self, Door, Pause};
use larder_net::listen::{SocketAccess, UnixPath};
use larder_net::stream::{Socket, Stream};
use mio::Poll;
use tracing::{debug, info, warn};

use super::ServerError;
use super::shared::{ConnInfo, Shared};
use crate::config::{Config, ListenAddress, ListenTls};

/// What memcached says to a connection over the limit.
const TOO_MANY: &[u8] = b"ERROR Too many open connections\r\n";

/// A socket that is being listened on.
pub(super) struct Listener {
    /// Its name as `stats conns` writes it: `tcp:127.0.0.1:11211`, `unix:/run/larder.sock`.
    socket: accept::Listener,
    /// How its connections are secured.
    tls: ListenTls,
    /// Name of the application that it serves; `None`: each key's own.
    pub(super) application: Option<String>,
    /// The same, once the store knows it.
    pub(super) app: Option<AppId>,
}

impl Listener {
    pub(super) fn text(&self) -> &Arc<str> {
        self.socket.name()
    }

    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// TCP: the address (with the port the system chose, if it was left to it).
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.socket.address()
    }
}

/// Binds every socket of the configuration, so that an address in use is found before anything else is touched. TCP
/// listens only from [`listen`] on: until then clients are refused, not kept waiting.
///
/// # Errors
/// The first that cannot be had. The defaults `::1` and `::` are left out quietly where there is no IPv6.
pub(super) fn open(config: &Config) -> Result<(Vec<Listener>, Option<UnixPath>), ServerError> {
    let mut list = Vec::new();
    for (i, address) in config.listen.iter().enumerate() {
        match open_tcp(address) {
            Ok(listeners) => list.extend(listeners),
            Err(ServerError::Listen { source, .. })
                if i > 0
                    && ["::1", "::"].contains(&address.host.as_str())
                    && is_no_ipv6(&source) =>
            {
                debug!("no IPv6 on this machine: not listening on {}", address.host);
            }
            Err(e) => return Err(e),
        }
    }
    let mut unix_path = None;
    if let Some((path, mask)) = &config.unix {
        let (listener, guard) = open_unix(path, *mask, config.backlog)?;
        list.push(listener);
        unix_path = Some(guard);
    }
    Ok((list, unix_path))
}

/// Whether a socket cannot be had for want of IPv6.
fn is_no_ipv6(source: &std::io::Error) -> bool {
    // EAFNOSUPPORT has no ErrorKind of its own in every version of the library.
    matches!(source.kind(), ErrorKind::AddrNotAvailable | ErrorKind::Unsupported)
        || source.raw_os_error() == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error())
}

/// Lets clients come.
///
/// # Errors
/// The first that cannot listen: another server has been quicker.
pub(super) fn listen(listeners: &[Listener], backlog: u32) -> Result<(), ServerError> {
    for listener in listeners {
        let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
        listener.socket.listen(backlog).map_err(|source| ServerError::Listen {
            address: listener.text().to_string(),
            source,
        })?;
    }
    Ok(())
}

fn open_tcp(address: &ListenAddress) -> Result<Vec<Listener>, ServerError> {
    let text = if address.host.contains(':') {
        format!("[{}]:{}", address.host, address.port)
    } else {
        format!("{}:{}", address.host, address.port)
    };
    let resolved: Vec<SocketAddr> = (address.host.as_str(), address.port)
        .to_socket_addrs()
        .map_err(|e| ServerError::Resolve { address: text.clone(), reason: e.to_string() })?
        .collect();
    let mut out: Vec<Listener> = Vec::new();
    for addr in resolved {
        if out.iter().any(|l| l.address() == Some(addr)) {
            continue;
        }
        let socket = accept::Listener::bind(addr, tcp_text)
            .map_err(|source| ServerError::Listen { address: text.clone(), source })?;
        out.push(Listener {
            socket,
            tls: address.tls,
            application: address.application.clone(),
            app: None,
        });
    }
    Ok(out)
}

/// memcached writes the bare address and port for both families, v6 in brackets.
fn tcp_text(addr: SocketAddr) -> String {
    let family = if addr.is_ipv6() { "tcp6" } else { "tcp" };
    format!("{family}:{addr}")
}

fn open_unix(path: &Path, mask: u32, backlog: u32) -> Result<(Listener, UnixPath), ServerError> {
    let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
    let name = format!("unix:{}", path.display());
    let (socket, guard) = accept::Listener::unix(path, SocketAccess::mode(mask), backlog, &name)
        .map_err(|reason| ServerError::UnixSocket { path: path.to_owned(), reason })?;
    Ok((Listener { socket, tls: ListenTls::Off, application: None, app: None }, guard))
}

/// A connection on its way to a worker.
pub(crate) struct NewConn {
    pub(super) stream: Stream,
    pub(super) info: Arc<ConnInfo>,
}

/// What a connection has of its listener.
struct Entrance {
    text: Arc<str>,
    tls: ListenTls,
    app: Option<AppId>,
}

/// Deals connections round-robin to the workers.
struct Dealer<'a> {
    shared: &'a Shared,
    entrances: Vec<Entrance>,
    next: usize,
}

/// Accepts until the server stops.
pub(super) fn run(poll: Poll, listeners: Vec<Listener>, shared: &Shared) {
    let (sockets, entrances) = listeners
        .into_iter()
        .map(|l| {
            let entrance = Entrance { text: l.text().clone(), tls: l.tls, app: l.app };
            (l.socket, entrance)
        })
        .unzip();
    accept::run(poll, sockets, &mut Dealer { shared, entrances, next: 0 });
}

impl Dealer<'_> {
    fn is_full(&self) -> bool {
        self.shared.counters.connections.load(Ordering::Relaxed)
            >= u64::from(self.shared.config.max_connections)
    }
}

impl Door for Dealer<'_> {
    fn is_stopping(&self) -> bool {
        self.shared.stopping()
    }

    /// Where connections over the limit are told so, they come in for that.
    fn has_room(&self) -> bool {
        self.shared.config.maxconns_fast || !self.is_full()
    }

    fn take(&mut self, listener: usize, socket: Socket, peer: Option<SocketAddr>) {
        let (shared, entrance) = (self.shared, &self.entrances[listener]);
        let mut stream = Stream::new(socket, peer);
        match (&shared.certificates, entrance.tls) {
            (Some(certificates), how) => match certificates.accept(how) {
                Ok(session) => session.into_iter().for_each(|session| stream.start_tls(session)),
                Err(e) => return debug!("a connection was not accepted: {e}"),
            },
            (None, ListenTls::Off | ListenTls::Default) => {}
            (None, _) => return debug!("a connection was not accepted: TLS without a certificate"),
        }
        if self.is_full() {
            return reject(stream, shared);
        }
        shared.counters.connections.fetch_add(1, Ordering::Relaxed);
        shared.counters.total_connections.fetch_add(1, Ordering::Relaxed);
        let info = Arc::new(ConnInfo::new(
            stream.as_raw_fd(),
            // The peer of a Unix socket has no name; memcached shows the server's path.
            peer.map_or_else(|| entrance.text.to_string(), tcp_text),
            entrance.text.clone(),
            entrance.app,
            shared.now_secs(),
        ));
        shared.add_connection(&info);
        shared.hand_over(self.next, NewConn { stream, info });
        self.next = (self.next + 1) % shared.workers.len();
    }

    fn pause(&mut self, why: Pause) {
        let counters = &self.shared.counters;
        counters.accepting.store(0, Ordering::Relaxed);
        if counters.listen_disabled.fetch_add(1, Ordering::Relaxed) > 0 {
            return;
        }
        match why {
            Pause::Full => warn!("not accepting for now: the connection limit is reached"),
            Pause::Exhausted(e) => {
                warn!("not accepting for now: cannot accept: {e}; raise ulimit -n");
            }
        }
    }

    fn resume(&mut self, after: Duration) {
        let counters = &self.shared.counters;
        counters.accepting.store(1, Ordering::Relaxed);
        counters.listen_disabled_us.fetch_add(after.as_micros() as u64, Ordering::Relaxed);
    }
}

fn reject(mut stream: Stream, shared: &Shared) {
    if shared.counters.rejected.fetch_add(1, Ordering::Relaxed) == 0 {
        info!(
            "connections are refused: the limit of {} is reached (-c)",
            shared.config.max_connections
        );
    }
    // With TLS it would take a handshake to say it. Whoever does not take it is refused all the same.
    if stream.is_plain() {
        stream.write(TOO_MANY).ok();
    }
}
