//! What every server needs of the network, whatever protocol it speaks: sockets, TLS, the live page.
//!
//! | module | what it gives |
//! | --- | --- |
//! | [`listen`] | sockets to listen on, and paths of Unix sockets that go with the server |
//! | [`accept`] | the loop of the thread that accepts |
//! | [`stream`] | an accepted connection's bytes, plain or by TLS |
//! | [`tls`] | certificates, read again on command; versions, ciphers, what is asked of clients |
//! | [`page`] | the live page, `/metrics` and `/healthz` over HTTP, and the style and script of all pages |
//! | [`metrics`] | metrics as OpenMetrics text |
//!
//! A server says what it takes and what it does with it; nothing here knows memcached's protocol or NBD.

#![forbid(unsafe_code)]
// Servers live in time.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

pub mod accept;
pub mod listen;
pub mod metrics;
pub mod page;
pub mod stream;
pub mod tls;
