//! An accepted connection's bytes, whatever it came in by.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};

use larder_runtime::make_room;
use mio::event::Source;
use mio::net::{TcpStream, UnixStream};

use crate::tls::Tls;

/// A socket.
#[derive(Debug)]
pub enum Socket {
    /// Over TCP.
    Tcp(TcpStream),
    /// On this machine.
    Unix(UnixStream),
}

impl Read for Socket {
    #[inline]
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => s.read(buf),
            Socket::Unix(s) => s.read(buf),
        }
    }
}

impl Write for Socket {
    #[inline]
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        match self {
            Socket::Tcp(s) => s.write(buf),
            Socket::Unix(s) => s.write(buf),
        }
    }

    #[inline]
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

impl Socket {
    /// Gives it room for several large messages, where it has not enough by default: a Unix socket.
    pub fn make_room(&self) {
        if let Socket::Unix(unix) = self {
            make_room(unix);
        }
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Socket::Tcp(s) => s.as_raw_fd(),
            Socket::Unix(s) => s.as_raw_fd(),
        }
    }
}

/// A connection's socket, and TLS on it once that has begun.
#[derive(Debug)]
pub struct Stream {
    socket: Socket,
    tls: Option<Box<Tls>>,
    peer: Option<SocketAddr>,
}

/// What one [`Stream::read`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// This many bytes; there may be more.
    Some(usize),
    /// This many bytes (perhaps none), and no more until the poll says so.
    Last(usize),
    /// The peer sends no more.
    End,
}

impl Stream {
    /// A plain one. `peer`: where it comes from, over TCP.
    pub fn new(socket: Socket, peer: Option<SocketAddr>) -> Stream {
        Stream { socket, tls: None, peer }
    }

    /// From here on all bytes go through TLS.
    pub fn start_tls(&mut self, session: Tls) {
        self.tls = Some(Box::new(session));
    }

    /// Fills `buf` with one read. A short read of a plain socket means that it is drained (epoll(7), on edge-triggered
    /// stream sockets), which saves the read that would only say so.
    ///
    /// # Errors
    /// The socket's; `InvalidData` for what TLS refuses.
    #[inline]
    pub fn read(&mut self, buf: &mut [u8]) -> io::Result<Received> {
        let (result, plain) = match &mut self.tls {
            None => (self.socket.read(buf), true),
            Some(tls) => (tls.read(&mut self.socket, buf), false),
        };
        match result {
            Ok(0) => Ok(Received::End),
            Ok(n) if plain && n < buf.len() => Ok(Received::Last(n)),
            Ok(n) => Ok(Received::Some(n)),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(Received::Last(0)),
            Err(e) if e.kind() == ErrorKind::Interrupted => Ok(Received::Some(0)),
            Err(e) => Err(e),
        }
    }

    /// Sends as much of `bytes` as the socket takes.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing.
    #[inline]
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.write(bytes),
            Some(tls) => tls.write(&mut self.socket, &[IoSlice::new(bytes)]),
        }
    }

    /// Sends as much of them all as the socket takes.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing.
    #[inline]
    pub fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            None => self.socket.write_vectored(slices),
            Some(tls) => tls.write(&mut self.socket, slices),
        }
    }

    /// Where it comes from, over TCP.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// TLS has begun and is not agreed upon.
    pub fn is_handshaking(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_handshaking())
    }

    /// Without TLS: a short write means that the socket takes no more.
    pub fn is_plain(&self) -> bool {
        self.tls.is_none()
    }

    /// Bytes taken by [`Stream::write`] still wait in this process.
    pub fn wants_write(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Sends what waits in this process.
    ///
    /// # Errors
    /// `WouldBlock` when the socket takes no more.
    pub fn flush(&mut self) -> io::Result<()> {
        self.tls.as_mut().map_or(Ok(()), |tls| tls.flush(&mut self.socket))
    }

    /// Says goodbye where the transport has a word for it.
    pub fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close(&mut self.socket);
        }
    }

    /// For the poll.
    pub fn source(&mut self) -> &mut dyn Source {
        match &mut self.socket {
            Socket::Tcp(s) => s,
            Socket::Unix(s) => s,
        }
    }
}

impl AsRawFd for Stream {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}
