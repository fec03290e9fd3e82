//! Sockets to listen on, and the thread that accepts.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_net::accept::{self, Door, Pause};
use larder_net::listen::{SocketAccess, UnixPath};
use larder_net::stream::{Socket, Stream};
use mio::Poll;
use tracing::{debug, warn};

use super::guests::Guests;
use super::{Dealt, ServerError, Shared};
use crate::nbd::server::TlsPolicy;
use crate::rate_limited::RateLimited;
use crate::served::BACKLOG;

/// An address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// `unix:PATH`; who may connect is [`ServerConfig::sockets`](super::ServerConfig)'s.
    Unix(PathBuf),
    /// `tcp:HOST:PORT`; port 0 leaves the choice to the system.
    Tcp(String),
}

/// Where to listen, and whether for TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen {
    /// The address.
    pub address: Address,
    /// `,tls=off`, `,tls=on` (a client may begin it) or `,tls=require`. Where nothing is said, a server with a certificate
    /// requires it over TCP, and offers it on a Unix socket, which is guarded by its mode.
    pub tls: Option<TlsPolicy>,
}

impl Listen {
    /// On a Unix socket.
    pub fn unix(path: impl Into<PathBuf>) -> Listen {
        Listen { address: Address::Unix(path.into()), tls: None }
    }

    /// On `HOST:PORT`.
    pub fn tcp(address: impl Into<String>) -> Listen {
        Listen { address: Address::Tcp(address.into()), tls: None }
    }

    /// Whether it cannot be without a certificate.
    pub fn wants_tls(&self) -> bool {
        !matches!(self.tls, None | Some(TlsPolicy::Off))
    }

    /// Whether, beside a certificate, nobody comes in over TCP without TLS.
    pub fn is_strict(&self) -> bool {
        matches!(self.address, Address::Unix(_))
            || matches!(self.policy(true), Ok(TlsPolicy::Required))
    }

    /// What clients are told of TLS.
    fn policy(&self, certificate: bool) -> Result<TlsPolicy, ServerError> {
        match (self.tls, certificate, &self.address) {
            (None | Some(TlsPolicy::Off), false, _) | (Some(TlsPolicy::Off), true, _) => {
                Ok(TlsPolicy::Off)
            }
            (Some(_), false, _) => Err(ServerError::Listen {
                address: self.to_string(),
                reason: "there is no certificate: give one and its key, or leave tls= out".into(),
            }),
            (Some(policy), true, _) => Ok(policy),
            (None, true, Address::Tcp(_)) => Ok(TlsPolicy::Required),
            (None, true, Address::Unix(_)) => Ok(TlsPolicy::Offered),
        }
    }
}

impl FromStr for Listen {
    type Err = ServerError;

    fn from_str(text: &str) -> Result<Listen, ServerError> {
        let bad = |reason: &str| ServerError::Address { text: text.into(), reason: reason.into() };
        let (plain, tls) = match text.rsplit_once(",tls=") {
            None => (text, None),
            Some((plain, "off")) => (plain, Some(TlsPolicy::Off)),
            Some((plain, "on")) => (plain, Some(TlsPolicy::Offered)),
            Some((plain, "require")) => (plain, Some(TlsPolicy::Required)),
            Some(_) => return Err(bad("tls= is off, on or require")),
        };
        if let Some(path) = plain.strip_prefix("unix:") {
            return match path {
                "" => Err(bad("the path is missing")),
                _ if path.len() > 107 => Err(bad("a socket's path has at most 107 bytes")),
                _ => Ok(Listen { address: Address::Unix(path.into()), tls }),
            };
        }
        let Some(address) = plain.strip_prefix("tcp:") else {
            return Err(bad("it begins with neither unix: nor tcp:"));
        };
        let Some((host, port)) = address.rsplit_once(':') else {
            return Err(bad("the port is missing"));
        };
        if host.is_empty() {
            return Err(bad("the host is missing"));
        }
        if port.parse::<u16>().is_err() {
            return Err(bad("the port is not a number up to 65535"));
        }
        Ok(Listen { address: Address::Tcp(address.to_owned()), tls })
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            Address::Unix(path) => write!(f, "unix:{}", path.display())?,
            Address::Tcp(address) => write!(f, "tcp:{address}")?,
        }
        match self.tls {
            None => Ok(()),
            Some(TlsPolicy::Off) => f.write_str(",tls=off"),
            Some(TlsPolicy::Offered) => f.write_str(",tls=on"),
            Some(TlsPolicy::Required) => f.write_str(",tls=require"),
        }
    }
}

/// A socket that is being listened on.
pub(super) struct Listener {
    socket: accept::Listener,
    tls: TlsPolicy,
    pub(super) path: Option<UnixPath>,
}

impl Listener {
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.socket.address()
    }
}

/// Opens them all. `certificate`: there is one.
///
/// # Errors
/// The first that cannot be had.
pub(super) fn open(
    list: &[Listen],
    certificate: bool,
    access: SocketAccess,
) -> Result<Vec<Listener>, ServerError> {
    let mut out = Vec::new();
    for listen in list {
        let tls = listen.policy(certificate)?;
        match &listen.address {
            Address::Unix(path) => out.push(open_unix(listen, path, tls, access)?),
            Address::Tcp(address) => open_tcp(listen, address, tls, &mut out)?,
        }
    }
    Ok(out)
}

fn open_tcp(
    listen: &Listen,
    address: &str,
    tls: TlsPolicy,
    out: &mut Vec<Listener>,
) -> Result<(), ServerError> {
    let bad = |reason: String| ServerError::Listen { address: listen.to_string(), reason };
    let resolved = address.to_socket_addrs().map_err(|e| bad(e.to_string()))?;
    for addr in resolved {
        let socket = accept::Listener::bind(addr, |_| listen.to_string());
        let socket = socket.and_then(|socket| socket.listen(BACKLOG).map(|()| socket));
        out.push(Listener { socket: socket.map_err(|e| bad(e.to_string()))?, tls, path: None });
    }
    Ok(())
}

fn open_unix(
    listen: &Listen,
    path: &Path,
    tls: TlsPolicy,
    access: SocketAccess,
) -> Result<Listener, ServerError> {
    let name = listen.to_string();
    let (socket, guard) = accept::Listener::unix(path, access, BACKLOG, &name)
        .map_err(|reason| ServerError::Listen { address: name, reason })?;
    Ok(Listener { socket, tls, path: Some(guard) })
}

/// Deals connections round-robin to the workers.
struct Dealer<'a> {
    shared: &'a Shared,
    /// Of each listener, its name and what its clients are told of TLS.
    entrances: Vec<(String, TlsPolicy)>,
    next: usize,
    guests: Guests,
    exhausted: RateLimited,
}

/// Accepts until the server stops.
pub(super) fn run(poll: Poll, listeners: Vec<Listener>, shared: &Shared) {
    let entrances = listeners.iter().map(|l| (l.socket.name().to_string(), l.tls)).collect();
    let sockets = listeners.into_iter().map(|l| l.socket).collect();
    let (guests, exhausted) = Default::default();
    accept::run(poll, sockets, &mut Dealer { shared, entrances, next: 0, guests, exhausted });
}

impl Door for Dealer<'_> {
    fn is_stopping(&self) -> bool {
        self.shared.stopping()
    }

    /// Whom there is no room for comes in to be refused: another may make way.
    fn has_room(&self) -> bool {
        true
    }

    fn take(&mut self, listener: usize, socket: Socket, peer: Option<SocketAddr>) {
        let (name, tls) = &self.entrances[listener];
        match peer {
            Some(peer) => debug!("{name}: a connection from {peer}"),
            None => debug!("{name}: a connection from a client of the socket"),
        }
        socket.make_room();
        let stream = Stream::new(socket, peer);
        self.deal(Dealt { stream, tls: *tls, guest: None, asked: 0 });
    }

    fn pause(&mut self, why: Pause) {
        let Pause::Exhausted(e) = why else { return };
        if let Some(unsaid) = self.exhausted.wrong(Instant::now()) {
            warn!("cannot accept: {e}; raise ulimit -n{unsaid}");
        }
    }

    fn resume(&mut self, _: Duration) {}
}

impl Dealer<'_> {
    fn deal(&mut self, mut dealt: Dealt) {
        let shared = self.shared;
        let counters = &shared.counters;
        // Dropping it closes it: before the handshake NBD has no words for more. The worker looks for one that makes way for it.
        let most = shared.config.connections.saturating_add(shared.workers.len() as u64);
        if counters.connections.load(Ordering::Relaxed) >= most {
            return shared.refused("more come at a time");
        }
        if let Some(peer) = dealt.stream.peer() {
            let Some(guest) = self.guests.admit(peer.ip(), shared.config.per_peer) else {
                counters.refused.fetch_add(1, Ordering::Relaxed);
                if let Some(unsaid) = shared.refusals.lock().wrong(Instant::now()) {
                    warn!(
                        "a connection from {peer} is refused: its address has {} already; --connections-per-peer allows more{unsaid}",
                        shared.config.per_peer
                    );
                }
                return;
            };
            dealt.guest = Some(guest);
        }
        counters.connections.fetch_add(1, Ordering::Relaxed);
        counters.accepted.fetch_add(1, Ordering::Relaxed);
        shared.hand(self.next, dealt);
        self.next = (self.next + 1) % shared.workers.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        let listen = |text: &str| text.parse::<Listen>();
        assert_eq!(listen("unix:/run/x").unwrap(), Listen::unix("/run/x"));
        assert_eq!(listen("tcp:[::1]:0").unwrap(), Listen::tcp("[::1]:0"));
        for (word, policy) in
            [("off", TlsPolicy::Off), ("on", TlsPolicy::Offered), ("require", TlsPolicy::Required)]
        {
            let text = format!("tcp:h:1,tls={word}");
            assert_eq!(listen(&text).unwrap().tls, Some(policy));
            assert_eq!(listen(&text).unwrap().to_string(), text);
        }
        for text in [
            "",
            "unix:",
            "tcp:",
            "tcp::1",
            "tcp:host",
            "tcp:h:x",
            "tcp:h:65536",
            "udp:h:1",
            "tcp:h:1,tls=",
            "tcp:h:1,tls=yes",
            "tcp:h:1,x",
            ",tls=on",
        ] {
            let error = listen(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("'{text}' is not")), "{error}");
        }
        assert!(listen(&format!("unix:/{}", "x".repeat(107))).is_err());
    }

    #[test]
    fn what_clients_are_told_of_tls() {
        let policy = |text: &str, certificate| {
            text.parse::<Listen>().unwrap().policy(certificate).map_err(|e| e.to_string())
        };
        assert_eq!(policy("tcp:h:1", false), Ok(TlsPolicy::Off));
        assert_eq!(policy("tcp:h:1", true), Ok(TlsPolicy::Required));
        assert_eq!(policy("unix:/x", true), Ok(TlsPolicy::Offered));
        for (word, wanted) in
            [("off", TlsPolicy::Off), ("on", TlsPolicy::Offered), ("require", TlsPolicy::Required)]
        {
            for at in ["tcp:h:1", "unix:/x"] {
                let text = format!("{at},tls={word}");
                assert_eq!(policy(&text, true), Ok(wanted));
                match policy(&text, false) {
                    Ok(found) => assert_eq!((found, wanted), (TlsPolicy::Off, TlsPolicy::Off)),
                    Err(e) => assert!(word != "off" && e.contains(&text), "{e}"),
                }
            }
        }
    }
}
