//! What all front ends have in common: sockets, why a server cannot start, devices to be looked at. Volumes and what requests are done with are the
//! [cache](crate::cache)'s.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`face`] | devices that a volume is served by beside NBD, to be looked at |

pub mod face;

use std::io;
use std::path::{Path, PathBuf};

use larder_net::listen::{SocketAccess, UnixPath, listen_unix};

pub use face::{Face, FaceStatus};

/// Connections that wait to be accepted, at most.
pub(crate) const BACKLOG: i32 = 1024;

/// Why a server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// An address that is none.
    #[error(
        "'{text}' is not an address to listen on: {reason}; write unix:PATH or tcp:HOST:PORT, each with ,tls=off, on or require where it is wanted, vhost:PATH,volume=NAME, or ublk:[ID],volume=NAME"
    )]
    Address {
        /// As given.
        text: String,
        /// What is wrong.
        reason: String,
    },
    /// A socket that cannot be had.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: String,
        /// Why, and what to do.
        reason: String,
    },
    /// A certificate or key that cannot be used.
    #[error("'{}' {reason}", path.display())]
    Tls {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The system refuses something else.
    #[error("cannot start: {what}: {source}")]
    System {
        /// What was asked for.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// Listens on a path, which lets in whom `access` says, without waiting in accept. What a server that is gone has left there goes away.
///
/// # Errors
/// [`ServerError::Listen`], under `name`.
pub(crate) fn bind_unix(
    name: &str,
    path: &Path,
    access: SocketAccess,
) -> Result<(std::os::unix::net::UnixListener, UnixPath), ServerError> {
    listen_unix(path, access, BACKLOG)
        .map_err(|reason| ServerError::Listen { address: name.to_owned(), reason })
}
