//! The memcached server: protocol, connections, workers, statistics.

#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the server stands above the runtime: it reads clocks and starts threads"
)]

pub mod admin;
pub mod config;
pub mod connection;
#[cfg(any(test, feature = "testing"))]
pub mod model;
pub mod protocol;
pub mod server;
pub mod stats;
pub mod watch;
