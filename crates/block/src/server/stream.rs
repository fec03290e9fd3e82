//! An accepted connection's bytes, whatever it came in by.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::sync::Arc;

use larder_runtime::make_room;
use mio::event::Source;
use mio::net::{TcpStream, UnixStream};
use rustls::ServerConfig;

use super::guests::Guest;
use super::tls::Tls;
use crate::nbd::server::TlsPolicy;

/// A socket.
pub(super) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => s.read(buf),
            Socket::Unix(s) => s.read(buf),
        }
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => s.write(buf),
            Socket::Unix(s) => s.write(buf),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => s.write_vectored(slices),
            Socket::Unix(s) => s.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A connection's socket, and TLS on it once that has begun.
pub(super) struct Stream {
    socket: Socket,
    tls: Option<Box<Tls>>,
    policy: TlsPolicy,
    /// Over TCP.
    peer: Option<SocketAddr>,
    /// Counts it among those of its peer's address.
    _guest: Option<Guest>,
}

/// What one [`Stream::read`] found.
pub(super) enum Read1 {
    /// This many bytes; there may be more.
    Some(usize),
    /// This many bytes (perhaps none), and no more until the poll says so.
    Last(usize),
    /// The peer sends no more.
    End,
}

impl Stream {
    pub(super) fn new(socket: Socket, policy: TlsPolicy, peer: Option<SocketAddr>) -> Stream {
        if let Socket::Unix(unix) = &socket {
            make_room(unix);
        }
        Stream { socket, tls: None, policy, peer, _guest: None }
    }

    /// What its listener says of TLS.
    pub(super) fn policy(&self) -> TlsPolicy {
        self.policy
    }

    /// From here on all bytes go through TLS.
    ///
    /// # Errors
    /// When rustls refuses the configuration.
    pub(super) fn start_tls(&mut self, config: Arc<ServerConfig>) -> io::Result<()> {
        self.tls = Some(Box::new(Tls::new(config)?));
        Ok(())
    }

    /// Fills `buf` with one read. A short read of a plain socket means that it is drained (epoll(7), on edge-triggered
    /// stream sockets), which saves the read that would only say so.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<Read1> {
        let (result, plain) = match &mut self.tls {
            None => (self.socket.read(buf), true),
            Some(tls) => (tls.read(&mut self.socket, buf), false),
        };
        match result {
            Ok(0) => Ok(Read1::End),
            Ok(n) if plain && n < buf.len() => Ok(Read1::Last(n)),
            Ok(n) => Ok(Read1::Some(n)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(Read1::Last(0)),
            Err(e) if e.kind() == ErrorKind::Interrupted => Ok(Read1::Some(0)),
            Err(e) => Err(e),
        }
    }

    /// Sends as much as the socket takes.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing.
    pub(super) fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.write_vectored(slices),
            Some(tls) => tls.write(&mut self.socket, slices),
        }
    }

    /// Whose it is, for the log.
    pub(super) fn peer(&self) -> String {
        self.peer.map_or_else(|| "a client of a unix socket".into(), |peer| peer.to_string())
    }

    /// Where it comes from, over TCP.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// It is one of its address's as long as it lives.
    pub(super) fn count(&mut self, guest: Guest) {
        self._guest = Some(guest);
    }

    /// TLS has begun and is not agreed upon.
    pub(super) fn agrees_on_tls(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_handshaking())
    }

    /// A short write means that the socket takes no more.
    pub(super) fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Bytes taken by [`Stream::write`] still wait in this process.
    pub(super) fn wants_write(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Sends what waits in this process.
    ///
    /// # Errors
    /// `WouldBlock` when the socket takes no more.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.tls.as_mut().map_or(Ok(()), |tls| tls.flush(&mut self.socket))
    }

    /// Says goodbye where the transport has a word for it.
    pub(super) fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close(&mut self.socket);
        }
    }

    pub(super) fn source(&mut self) -> &mut dyn Source {
        match &mut self.socket {
            Socket::Tcp(s) => s,
            Socket::Unix(s) => s,
        }
    }
}
