//! An accepted connection's bytes, whatever it came in by.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};

use mio::net::{TcpStream, UnixStream};
use mio::{Interest, Registry, Token};

use super::tls::TlsStream;

/// A connection's socket.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
    Tls(Box<TlsStream>),
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
    /// Fills `buf` with one read. A short read of a plain socket means that it is drained (epoll(7), on edge-triggered
    /// stream sockets), which saves the read that would only say so.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<Read1> {
        let result = match self {
            Stream::Tcp(s) => s.read(buf),
            Stream::Unix(s) => s.read(buf),
            Stream::Tls(s) => {
                return match s.read(buf) {
                    Ok(0) => Ok(Read1::End),
                    Ok(n) => Ok(Read1::Some(n)),
                    Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(Read1::Last(0)),
                    Err(e) if e.kind() == ErrorKind::Interrupted => Ok(Read1::Some(0)),
                    Err(e) => Err(e),
                };
            }
        };
        match result {
            Ok(0) => Ok(Read1::End),
            Ok(n) if n < buf.len() => Ok(Read1::Last(n)),
            Ok(n) => Ok(Read1::Some(n)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(Read1::Last(0)),
            Err(e) if e.kind() == ErrorKind::Interrupted => Ok(Read1::Some(0)),
            Err(e) => Err(e),
        }
    }

    /// Sends as much of `bytes` as the socket takes.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing.
    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.write(bytes),
            Stream::Unix(s) => s.write(bytes),
            Stream::Tls(s) => s.write(bytes),
        }
    }

    /// Bytes taken by [`Stream::write`] still wait in this process.
    pub(super) fn wants_write(&self) -> bool {
        matches!(self, Stream::Tls(s) if s.wants_write())
    }

    /// Sends what waits in this process.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Tls(s) => s.flush(),
            _ => Ok(()),
        }
    }

    /// TLS is not agreed upon yet.
    pub(super) fn is_handshaking(&self) -> bool {
        matches!(self, Stream::Tls(s) if s.is_handshaking())
    }

    /// A short write means that the socket takes no more.
    pub(super) fn is_plain(&self) -> bool {
        !matches!(self, Stream::Tls(_))
    }

    /// Says goodbye where the transport has a word for it.
    pub(super) fn close(&mut self) {
        if let Stream::Tls(s) = self {
            s.close();
        }
    }

    pub(super) fn register(
        &mut self,
        registry: &Registry,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        match self {
            Stream::Tcp(s) => registry.register(s, token, interest),
            Stream::Unix(s) => registry.register(s, token, interest),
            Stream::Tls(s) => registry.register(s.socket(), token, interest),
        }
    }

    pub(super) fn reregister(
        &mut self,
        registry: &Registry,
        token: Token,
        interest: Interest,
    ) -> io::Result<()> {
        match self {
            Stream::Tcp(s) => registry.reregister(s, token, interest),
            Stream::Unix(s) => registry.reregister(s, token, interest),
            Stream::Tls(s) => registry.reregister(s.socket(), token, interest),
        }
    }

    pub(super) fn deregister(&mut self, registry: &Registry) -> io::Result<()> {
        match self {
            Stream::Tcp(s) => registry.deregister(s),
            Stream::Unix(s) => registry.deregister(s),
            Stream::Tls(s) => registry.deregister(s.socket()),
        }
    }

    pub(super) fn fd(&self) -> RawFd {
        match self {
            Stream::Tcp(s) => s.as_raw_fd(),
            Stream::Unix(s) => s.as_raw_fd(),
            Stream::Tls(s) => s.socket_ref().as_raw_fd(),
        }
    }
}
