//! A connection as a client sees it.
//!
//! ```text
//! submit(token, op) ─▶ output()        space() / received(n) ─▶ poll() ─▶ Ready, Done, Close
//! ```

mod connection;
mod handshake;
mod pending;
#[cfg(test)]
mod tests;

pub use connection::{Client, Event};
pub use handshake::Negotiated;
