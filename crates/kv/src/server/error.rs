//! Why a server could not start.

use std::path::PathBuf;

/// One line naming the thing, its value and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// A host name that does not resolve.
    #[error("listen '{address}': {reason}: give an address of this machine")]
    Resolve {
        /// As configured.
        address: String,
        /// What the resolver says.
        reason: String,
    },
    /// A TCP address that cannot be listened on.
    #[error("listen '{address}': {source}{}", hint(source))]
    Listen {
        /// Which.
        address: String,
        /// Why.
        source: std::io::Error,
    },
    /// The application of a listener.
    #[error("listen: {0}")]
    Application(#[from] larder_policy::application::ApplicationError),
    /// The Unix socket's path is taken.
    #[error("unix-socket '{}': {reason}", path.display())]
    UnixSocket {
        /// Which.
        path: PathBuf,
        /// Why, and what to do.
        reason: String,
    },
    /// Certificates or keys that cannot be used.
    #[error("{key} '{}': {reason}", path.display())]
    Tls {
        /// Which setting.
        key: &'static str,
        /// Which file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The user file.
    #[error("auth-file '{}': {reason}", path.display())]
    Auth {
        /// Which file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A resource of the system.
    #[error("{what}: {source}")]
    System {
        /// What was being made.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The flash could not be made readable for a worker.
    #[error(transparent)]
    Flash(#[from] larder_runtime::DeviceError),
}

fn hint(e: &std::io::Error) -> &'static str {
    match e.kind() {
        std::io::ErrorKind::AddrInUse => {
            ": another process listens there; stop it or choose another port (-p)"
        }
        std::io::ErrorKind::AddrNotAvailable => {
            ": not an address of this machine; see `ip address`"
        }
        std::io::ErrorKind::PermissionDenied => ": ports under 1024 need root; choose another (-p)",
        _ => "",
    }
}
