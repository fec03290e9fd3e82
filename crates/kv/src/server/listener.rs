//! Sockets to listen on, and the thread that accepts.

use std::fmt::Write as _;
use std::io::{self, ErrorKind, Write as _};
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, RawFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use larder_base::AppId;
use larder_runtime::listen::{SocketAccess, UnixPath, bind_tcp, listen_unix};
use mio::net::{TcpListener, UnixListener};
use mio::{Events, Interest, Poll, Token};
use socket2::SockRef;
use tracing::{debug, info, warn};

use super::ServerError;
use super::shared::{ConnInfo, Shared};
use super::stream::Stream;
use super::tls::{Certificates, TlsStream};
use crate::config::{Config, ListenAddress, ListenTls};

/// What memcached says to a connection over the limit.
const TOO_MANY: &[u8] = b"ERROR Too many open connections\r\n";

enum Socket1 {
    Tcp { listener: TcpListener, tls: ListenTls },
    Unix(UnixListener),
}

/// A socket that is being listened on.
pub(super) struct Listener {
    socket: Socket1,
    /// As `stats conns` writes it: `tcp:127.0.0.1:11211`, `unix:/run/larder.sock`.
    pub(super) text: Arc<str>,
    pub(super) fd: RawFd,
    /// TCP: the address (with the port the system chose, if it was left to it).
    pub(super) address: Option<SocketAddr>,
    /// Name of the application that it serves; `None`: each key's own.
    pub(super) application: Option<String>,
    /// The same, once the store knows it.
    pub(super) app: Option<AppId>,
}

/// Binds every socket of the configuration, so that an address in use is found before anything else is touched. TCP
/// listens only from [`listen`] on: until then clients are refused, not kept waiting.
///
/// # Errors
/// The first that cannot be had. The default `::1` is left out quietly where there is no IPv6.
pub(super) fn open(config: &Config) -> Result<(Vec<Listener>, Option<UnixPath>), ServerError> {
    let mut list = Vec::new();
    for (i, address) in config.listen.iter().enumerate() {
        match open_tcp(address) {
            Ok(listeners) => list.extend(listeners),
            Err(ServerError::Listen { source, .. })
                if i > 0
                    && address.host == "::1"
                    && matches!(
                        source.kind(),
                        ErrorKind::AddrNotAvailable | ErrorKind::Unsupported
                    ) =>
            {
                debug!("no IPv6 on this machine: not listening on ::1");
            }
            // EAFNOSUPPORT has no ErrorKind of its own in every version of the library.
            Err(ServerError::Listen { source, .. })
                if i > 0
                    && address.host == "::1"
                    && source.raw_os_error()
                        == Some(rustix::io::Errno::AFNOSUPPORT.raw_os_error()) =>
            {
                debug!("no IPv6 on this machine: not listening on ::1");
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

/// Lets clients come.
///
/// # Errors
/// The first that cannot listen: another server has been quicker.
pub(super) fn listen(listeners: &[Listener], backlog: u32) -> Result<(), ServerError> {
    for listener in listeners {
        if let Socket1::Tcp { listener: socket, .. } = &listener.socket {
            let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
            SockRef::from(socket).listen(backlog).map_err(|source| ServerError::Listen {
                address: listener.text.to_string(),
                source,
            })?;
        }
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
        if out.iter().any(|l| l.address == Some(addr)) {
            continue;
        }
        let socket = bind_tcp(addr)
            .map_err(|source| ServerError::Listen { address: text.clone(), source })?;
        let listener = TcpListener::from_std(socket.into());
        let addr = listener.local_addr().unwrap_or(addr);
        out.push(Listener {
            fd: listener.as_raw_fd(),
            text: tcp_text(addr).into(),
            address: Some(addr),
            application: address.application.clone(),
            app: None,
            socket: Socket1::Tcp { listener, tls: address.tls },
        });
    }
    Ok(out)
}

fn tcp_text(addr: SocketAddr) -> String {
    let mut text = String::new();
    let family = if addr.is_ipv6() { "tcp6" } else { "tcp" };
    // memcached writes the bare address and port for both families, v6 in brackets.
    let _ = write!(text, "{family}:{addr}");
    text
}

fn open_unix(path: &Path, mask: u32, backlog: u32) -> Result<(Listener, UnixPath), ServerError> {
    let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
    let (listener, guard) = listen_unix(path, SocketAccess::mode(mask), backlog)
        .map_err(|reason| ServerError::UnixSocket { path: path.to_owned(), reason })?;
    let listener = UnixListener::from_std(listener);
    let text = format!("unix:{}", path.display()).into();
    let fd = listener.as_raw_fd();
    let socket = Socket1::Unix(listener);
    Ok((Listener { fd, text, address: None, application: None, app: None, socket }, guard))
}

/// A connection on its way to a worker.
pub(crate) struct NewConn {
    pub(super) stream: Stream,
    pub(super) info: Arc<ConnInfo>,
}

impl Listener {
    fn source(&mut self) -> &mut dyn mio::event::Source {
        match &mut self.socket {
            Socket1::Tcp { listener, .. } => listener,
            Socket1::Unix(listener) => listener,
        }
    }

    fn accept(&self, certificates: Option<&Certificates>) -> io::Result<(Stream, String)> {
        match &self.socket {
            Socket1::Tcp { listener, tls } => {
                let (socket, peer) = listener.accept()?;
                let session = match (certificates, tls) {
                    (Some(certificates), how) => certificates.accept(*how)?,
                    (None, ListenTls::Off | ListenTls::Default) => None,
                    (None, _) => return Err(io::Error::other("TLS without a certificate")),
                };
                let stream = match session {
                    None => Stream::Tcp(socket),
                    Some(session) => Stream::Tls(Box::new(TlsStream::new(socket, session))),
                };
                Ok((stream, tcp_text(peer)))
            }
            Socket1::Unix(listener) => {
                let (socket, _) = listener.accept()?;
                // The peer of a Unix socket has no name; memcached shows the server's path.
                Ok((Stream::Unix(socket), self.text.to_string()))
            }
        }
    }
}

/// Token of the waker in the accepting thread's poll.
pub(super) const WAKE: Token = Token(usize::MAX);

/// Accepts until the server stops, dealing connections round-robin to the workers.
pub(super) fn run(mut poll: Poll, mut listeners: Vec<Listener>, shared: &Shared) {
    let mut events = Events::with_capacity(64);
    let mut next = 0usize;
    let mut accepting = true;
    let mut paused_since = None;
    set_accepting(&mut listeners, &poll, true, true);
    loop {
        // Out of descriptors: the listeners stay readable, so wait a moment for some to be closed.
        let timeout = (paused_since.is_some()).then_some(std::time::Duration::from_millis(10));
        if let Err(e) = poll.poll(&mut events, timeout)
            && e.kind() != ErrorKind::Interrupted
        {
            warn!("the accepting thread cannot poll: {e}");
            return;
        }
        if shared.stopping() {
            set_accepting(&mut listeners, &poll, false, false);
            return;
        }
        if !accepting
            && shared.counters.connections.load(Ordering::Relaxed)
                < u64::from(shared.config.max_connections)
        {
            set_accepting(&mut listeners, &poll, true, true);
            accepting = true;
            shared.counters.accepting.store(1, Ordering::Relaxed);
            if let Some(since) = paused_since.take() {
                let waited: Instant = since;
                shared
                    .counters
                    .listen_disabled_us
                    .fetch_add(waited.elapsed().as_micros() as u64, Ordering::Relaxed);
            }
        }
        if !accepting {
            continue;
        }
        // Every listener is tried on every event: they are few, and a readiness left over from a pause is not lost.
        'all: for listener in &listeners {
            loop {
                let full = shared.counters.connections.load(Ordering::Relaxed)
                    >= u64::from(shared.config.max_connections);
                if full && !shared.config.maxconns_fast {
                    pause(
                        shared,
                        &mut paused_since,
                        &mut accepting,
                        "the connection limit is reached",
                    );
                    break 'all;
                }
                match listener.accept(shared.certificates.as_deref()) {
                    Ok((stream, _)) if full => reject(stream, shared),
                    Ok((stream, peer)) => {
                        shared.counters.connections.fetch_add(1, Ordering::Relaxed);
                        shared.counters.total_connections.fetch_add(1, Ordering::Relaxed);
                        let info = Arc::new(ConnInfo::new(
                            stream.fd(),
                            peer,
                            listener.text.clone(),
                            listener.app,
                            shared.now_secs(),
                        ));
                        shared.add_connection(&info);
                        shared.hand_over(next, NewConn { stream, info });
                        next = (next + 1) % shared.workers.len();
                    }
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) if is_exhaustion(&e) => {
                        pause(
                            shared,
                            &mut paused_since,
                            &mut accepting,
                            &format!("cannot accept: {e}; raise ulimit -n"),
                        );
                        break 'all;
                    }
                    // The peer went away between its connect and our accept, and the like: nothing of ours.
                    Err(e) => debug!("a connection was not accepted: {e}"),
                }
            }
        }
        if !accepting {
            set_accepting(&mut listeners, &poll, false, true);
        }
    }
}

fn pause(shared: &Shared, since: &mut Option<Instant>, accepting: &mut bool, why: &str) {
    *accepting = false;
    *since = Some(Instant::now());
    shared.counters.accepting.store(0, Ordering::Relaxed);
    if shared.counters.listen_disabled.fetch_add(1, Ordering::Relaxed) == 0 {
        warn!("not accepting for now: {why}");
    }
}

fn is_exhaustion(e: &io::Error) -> bool {
    use rustix::io::Errno;
    e.raw_os_error().is_some_and(|code| {
        [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM]
            .iter()
            .any(|x| x.raw_os_error() == code)
    })
}

fn reject(mut stream: Stream, shared: &Shared) {
    if shared.counters.rejected.fetch_add(1, Ordering::Relaxed) == 0 {
        info!(
            "connections are refused: the limit of {} is reached (-c)",
            shared.config.max_connections
        );
    }
    match &mut stream {
        Stream::Tcp(s) => drop(s.write(TOO_MANY)),
        Stream::Unix(s) => drop(s.write(TOO_MANY)),
        // It would take a handshake to say it.
        Stream::Tls(_) => {}
    }
}

/// Adds the listeners to the poll, or takes them out. Adding them anew also reports connections that already wait.
fn set_accepting(listeners: &mut [Listener], poll: &Poll, on: bool, log: bool) {
    for (i, listener) in listeners.iter_mut().enumerate() {
        let done = if on {
            poll.registry().register(listener.source(), Token(i), Interest::READABLE)
        } else {
            poll.registry().deregister(listener.source())
        };
        if let Err(e) = done
            && log
        {
            warn!("listener {}: {e}", listener.text);
        }
    }
}
