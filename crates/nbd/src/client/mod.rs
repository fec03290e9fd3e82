//! A connection as a client sees it.
//!
//! ```text
//! submit(token, request) ─▶ output()        space() / received(n) ─▶ poll() ─▶ Ready, Done, Close
//! ```

mod connection;
mod handshake;
mod pending;
mod request;
#[cfg(test)]
mod tests;

pub use connection::{Client, Event};
pub use handshake::Negotiated;
pub use request::{Done, Failure, Outcome, Request};
