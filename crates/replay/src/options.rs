//! What is replayed to whom, and how.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use crate::ReplayError;

/// A server's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// TCP.
    Tcp(SocketAddr),
    /// A unix socket.
    Unix(PathBuf),
}

impl FromStr for Target {
    type Err = ReplayError;

    fn from_str(text: &str) -> Result<Target, ReplayError> {
        if let Some(path) = text.strip_prefix("unix:") {
            if path.is_empty() {
                return Err(ReplayError::Target(text.to_owned()));
            }
            return Ok(Target::Unix(PathBuf::from(path)));
        }
        let mut found = text.to_socket_addrs().map_err(|_| ReplayError::Target(text.to_owned()))?;
        found.next().map(Target::Tcp).ok_or_else(|| ReplayError::Target(text.to_owned()))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Tcp(a) => write!(f, "{a}"),
            Target::Unix(p) => write!(f, "unix:{}", p.display()),
        }
    }
}

/// Which connection a request goes through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The one that its key chooses: the requests of a key keep the order of the trace.
    Key,
    /// Any that has room: even load, order kept only roughly.
    Any,
}

/// How to replay.
#[derive(Clone, Debug)]
pub struct Options {
    /// The server.
    pub target: Target,
    /// Connections in all.
    pub connections: usize,
    /// Requests in flight on each connection.
    pub pipeline: usize,
    /// Threads, at most one per connection.
    pub threads: usize,
    /// Replay at the recorded times divided by this; `None` is a closed loop.
    pub speed: Option<f64>,
    /// Check the bytes and the age of every value that comes back.
    pub verify: bool,
    /// Store the object after a miss.
    pub fill: bool,
    /// Which connection a request goes through.
    pub order: Order,
    /// Requests at the start that are sent and not counted.
    pub warmup: u64,
    /// Put before every key.
    pub key_prefix: String,
    /// A connection that answers nothing for so long has failed.
    pub timeout: Duration,
}

impl Options {
    /// A closed loop with one connection and one request in flight.
    pub fn new(target: Target) -> Options {
        Options {
            target,
            connections: 1,
            pipeline: 1,
            threads: 1,
            speed: None,
            verify: false,
            fill: true,
            order: Order::Key,
            warmup: 0,
            key_prefix: String::new(),
            timeout: Duration::from_secs(30),
        }
    }
}
