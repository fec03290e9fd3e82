//! A connection as a server sees it.
//!
//! ```text
//! space() / received(n) ─▶ [handshake] ─▶ poll() ─▶ Request ─▶ the engine ─▶ done() / data() / fail() ─▶ output()
//! ```

mod connection;
mod export;
mod handshake;
#[cfg(test)]
mod tests;

pub use connection::{Command, Connection, Event, Limits, Request};
pub use export::{BlockSizes, Export, ExportInfo, Exports};
pub use handshake::{Agreed, TlsPolicy};
