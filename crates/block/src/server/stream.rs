//! An accepted connection's bytes, whatever it came in by.

use std::io::{self, ErrorKind, IoSlice, Read, Write};

use mio::event::Source;
use mio::net::{TcpStream, UnixStream};

/// A connection's socket.
pub(super) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
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
    /// Fills `buf` with one read. A short read means that the socket is drained (epoll(7), on edge-triggered stream
    /// sockets), which saves the read that would only say so.
    pub(super) fn read(&mut self, buf: &mut [u8]) -> io::Result<Read1> {
        let result = match self {
            Stream::Tcp(s) => s.read(buf),
            Stream::Unix(s) => s.read(buf),
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

    /// Sends as much as the socket takes.
    ///
    /// # Errors
    /// `WouldBlock` when it takes nothing.
    pub(super) fn write(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Tcp(s) => s.write_vectored(slices),
            Stream::Unix(s) => s.write_vectored(slices),
        }
    }

    pub(super) fn source(&mut self) -> &mut dyn Source {
        match self {
            Stream::Tcp(s) => s,
            Stream::Unix(s) => s,
        }
    }
}
