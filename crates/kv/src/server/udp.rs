//! memcached's UDP frames, on a thread of their own.
//!
//! Each datagram holds one or more whole commands behind an 8-byte header; the answer comes back in as many datagrams as
//! it needs, under the same request id (memcached's doc/protocol.txt, "UDP protocol"):
//!
//! ```text
//! | request id u16 | number of this datagram u16 | datagrams in all u16 | 0 u16 | text …     (big endian)
//! ```
//!
//! UDP is off unless asked for: its senders can be forged, so that a server open to the world answers whom it was told
//! to. Flash is read synchronously here: what matters is that it works, TCP is the way to be fast.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use larder_base::AppId;
use socket2::{Domain, Protocol, Socket, Type};
use tracing::{debug, warn};

use super::ServerError;
use super::admin::WorkerAdmin;
use super::shared::{Shared, lock};
use super::store::{Span, Store};
use crate::config::ListenAddress;
use crate::connection::{ConnContext, Connection, Progress, SideEffects};
use crate::watch::{Lines, Watch};

/// Bytes of the header.
const HEADER: usize = 8;
/// Bytes of a datagram: fits an Ethernet frame. memcached's value.
const DATAGRAM: usize = 1400;
/// Bytes of answers to one request: the most that the header can number, or less.
const ANSWER_MAX: usize = 32 << 20;
/// How often a waiting thread looks whether the server stops.
const TICK: Duration = Duration::from_millis(100);

/// A UDP socket that is served.
pub(super) struct UdpEndpoint {
    socket: UdpSocket,
    pub(super) fd: RawFd,
    /// As `stats conns` writes it.
    pub(super) text: Arc<str>,
    pub(super) address: SocketAddr,
    /// Name of the application that it serves.
    pub(super) application: Option<String>,
    /// The same, once the store knows it.
    pub(super) app: Option<AppId>,
}

/// Opens the sockets of the configuration.
///
/// # Errors
/// The first that cannot be had; `::1` or `::` after another address is left out quietly where there is no IPv6.
pub(super) fn open(addresses: &[ListenAddress]) -> Result<Vec<UdpEndpoint>, ServerError> {
    let mut list: Vec<UdpEndpoint> = Vec::new();
    for (i, address) in addresses.iter().enumerate() {
        let text = format!("udp:{}:{}", address.host, address.port);
        let resolved = (address.host.as_str(), address.port)
            .to_socket_addrs()
            .map_err(|e| ServerError::Resolve { address: text.clone(), reason: e.to_string() })?;
        for addr in resolved {
            if addr.port() != 0 && list.iter().any(|e| e.address == addr) {
                continue;
            }
            match bind(addr) {
                Ok(endpoint) => {
                    let application = address.application.clone();
                    list.push(UdpEndpoint { application, ..endpoint });
                }
                Err(e) if i > 0 && ["::1", "::"].contains(&address.host.as_str()) => {
                    debug!("not listening on {text}: {e}");
                }
                Err(source) => return Err(ServerError::Listen { address: text, source }),
            }
        }
    }
    Ok(list)
}

fn bind(addr: SocketAddr) -> io::Result<UdpEndpoint> {
    let socket = Socket::new(Domain::for_address(addr), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_cloexec(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&addr.into())?;
    let socket = UdpSocket::from(socket);
    socket.set_read_timeout(Some(TICK))?;
    let address = socket.local_addr()?;
    let family = if address.is_ipv6() { "udp6" } else { "udp" };
    let fd = socket.as_raw_fd();
    let text = format!("{family}:{address}").into();
    Ok(UdpEndpoint { socket, fd, text, address, application: None, app: None })
}

/// Serves one socket until the server stops.
pub(super) fn run<S: Store>(endpoint: &UdpEndpoint, store: &Arc<S>, shared: &Arc<Shared>) {
    let mut datagram = vec![0; 1 << 16];
    let mut turn = Turn {
        app: endpoint.app,
        admin: WorkerAdmin::new(shared.clone(), store.clone(), None),
        lines: Lines::new(shared.hub.clone()),
        fd: endpoint.fd,
        store,
        shared,
        side: SideEffects::default(),
        reads: Vec::new(),
        bytes: Vec::new(),
    };
    while !shared.stopping() {
        let (len, peer) = match endpoint.socket.recv_from(&mut datagram) {
            Ok(received) => received,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => continue,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            // An earlier answer could not be delivered: nothing of ours.
            Err(e) if e.kind() == ErrorKind::ConnectionRefused => continue,
            Err(e) => {
                warn!("{}: {e}", endpoint.text);
                return;
            }
        };
        let Some((header, text)) = datagram[..len].split_first_chunk::<HEADER>() else { continue };
        let request = [header[0], header[1]];
        let answer = if header[4..6] == [0, 1] {
            turn.answer(text)
        } else {
            b"SERVER_ERROR multi-packet request not supported\r\n".to_vec()
        };
        for frame in frames(request, &answer) {
            if let Err(e) = endpoint.socket.send_to(&frame, peer) {
                debug!("{}: to {peer}: {e}", endpoint.text);
                break;
            }
        }
    }
}

/// An answer, divided.
fn frames(request: [u8; 2], answer: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    let parts = answer.chunks(DATAGRAM - HEADER);
    let total = u16::try_from(parts.len()).unwrap_or(u16::MAX);
    parts.zip(0..total).map(move |(part, number)| {
        let mut frame = Vec::with_capacity(HEADER + part.len());
        frame.extend_from_slice(&request);
        frame.extend_from_slice(&number.to_be_bytes());
        frame.extend_from_slice(&total.to_be_bytes());
        frame.extend_from_slice(&[0, 0]);
        frame.extend_from_slice(part);
        frame
    })
}

struct Turn<'a, S: Store> {
    app: Option<AppId>,
    admin: WorkerAdmin<S>,
    lines: Lines,
    fd: RawFd,
    store: &'a Arc<S>,
    shared: &'a Arc<Shared>,
    side: SideEffects,
    reads: Vec<(crate::connection::ReadToken, S::Read)>,
    bytes: Vec<u8>,
}

impl<S: Store> Turn<'_, S> {
    /// Executes the commands of one datagram; what is not whole at its end is dropped.
    fn answer(&mut self, mut text: &[u8]) -> Vec<u8> {
        let now = self.shared.clock.now();
        let mut conn = Connection::new(&self.shared.protocol, self.shared.big.clone());
        let mut answer = Vec::new();
        loop {
            let fed = conn.feed(text, now);
            text = &text[fed..];
            lock(&self.shared.udp_stats).bytes_read += fed as u64;
            let progress = self.process(&mut conn);
            while !self.reads.is_empty() {
                self.read(&mut conn);
            }
            let output = conn.output();
            answer.extend_from_slice(output);
            let sent = output.len();
            conn.sent(sent, now);
            lock(&self.shared.udp_stats).bytes_written += sent as u64;
            if answer.len() > ANSWER_MAX {
                answer.clear();
                answer.extend_from_slice(b"SERVER_ERROR answer too large for UDP\r\n");
                break;
            }
            match progress {
                Progress::NeedInput if text.is_empty() => break,
                // Whatever waited has been read or sent.
                Progress::NeedInput | Progress::OutputFull | Progress::WaitingForFlash => {}
                Progress::WaitingForMemory | Progress::WaitingForRoom => {
                    answer.extend_from_slice(b"SERVER_ERROR out of memory\r\n");
                    break;
                }
                Progress::Close | Progress::Shutdown { .. } => break,
            }
        }
        for read in std::mem::take(&mut self.side.verifies) {
            let span = self.store.verify_span(&read);
            let ok = self.fetch(span);
            self.store.verify(self.shared.clock.now(), &read, ok.then_some(&self.bytes));
        }
        self.lines.publish(|worker| self.shared.wake(worker));
        if std::mem::take(&mut self.side.wake_cleaner) {
            self.store.wake_cleaner();
        }
        answer
    }

    fn process(&mut self, conn: &mut Connection<S::Read>) -> Progress {
        // Statistics ask for everybody's counters, these among them: not while they are locked.
        let mut stats = lock(&self.shared.udp_stats).clone();
        let (now, store) = (self.shared.clock.now(), self.store);
        let progress = conn.process(now, &**store, &mut self.context(&mut stats));
        *lock(&self.shared.udp_stats) = stats;
        progress
    }

    /// Performs the first of the reads that were asked for.
    fn read(&mut self, conn: &mut Connection<S::Read>) {
        let (token, read) = self.reads.remove(0);
        let ok = self.fetch(self.store.span(&read));
        let bytes = std::mem::take(&mut self.bytes);
        let mut stats = lock(&self.shared.udp_stats).clone();
        let (now, store) = (self.shared.clock.now(), self.store);
        let mut context = self.context(&mut stats);
        conn.flash_done(now, &**store, &mut context, token, ok.then_some(&bytes[..]));
        *lock(&self.shared.udp_stats) = stats;
        self.bytes = bytes;
    }

    fn context<'c>(
        &'c mut self,
        stats: &'c mut crate::connection::ConnStats,
    ) -> ConnContext<'c, S::Read> {
        ConnContext {
            config: &self.shared.protocol,
            stats,
            reads: &mut self.reads,
            side: &mut self.side,
            admin: &mut self.admin,
            detail: self.shared.detail.load(std::sync::atomic::Ordering::Relaxed),
            app: self.app,
            watch: self.lines.any().then_some(Watch { lines: &mut self.lines, fd: self.fd }),
        }
    }

    /// Reads flash into `self.bytes`, and tells whether that succeeded.
    fn fetch(&mut self, span: Span) -> bool {
        let Some(device) = self.store.device() else { return false };
        self.bytes.resize(span.len as usize, 0);
        match device.read_at(span.offset, &mut self.bytes) {
            Ok(()) => true,
            Err(e) => {
                self.store.read_failed(&e);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_divided_and_numbered() {
        let answer: Vec<u8> = (0..3000u32).map(|i| i as u8).collect();
        let parts: Vec<Vec<u8>> = frames([7, 9], &answer).collect();
        assert_eq!(parts.iter().map(Vec::len).collect::<Vec<_>>(), [1400, 1400, 224]);
        for (i, part) in parts.iter().enumerate() {
            assert_eq!(part[..HEADER], [7, 9, 0, i as u8, 0, 3, 0, 0]);
        }
        assert_eq!(parts.iter().flat_map(|p| &p[HEADER..]).copied().collect::<Vec<_>>(), answer);
        assert_eq!(frames([0, 1], b"").count(), 0);
    }

    #[test]
    fn the_largest_answer_can_be_numbered() {
        assert!(ANSWER_MAX.div_ceil(DATAGRAM - HEADER) <= usize::from(u16::MAX));
    }
}
