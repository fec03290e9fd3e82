//! The memcached server: protocol, connections, workers, statistics.

// The server stands above the line: it starts threads and reads clocks.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod connection;
pub mod model;
pub mod protocol;
