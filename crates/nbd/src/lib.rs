//! The NBD protocol, fixed newstyle, after `doc/proto.md` of the NetworkBlockDevice project, as state machines over bytes.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`wire`] | numbers, flags and headers |
//! | [`server`] | a connection as a server sees it: bytes in, requests out; replies in, bytes out |
//! | [`client`] | a connection as a client sees it: requests in, bytes out; bytes in, results out |
//! | [`output`] | what is to be sent: short messages copied, large payloads by reference |
//!
//! Neither side owns a socket: the caller reads into [`server::Connection::space`], says how much came, takes what it
//! means, and sends what [`output::Output`] holds. Payloads are read straight into the buffer in which they will be
//! written, and sent from the buffer into which they were read.
//!
//! Every length that arrives is checked before memory is taken for it, and all memory for payloads comes from the
//! caller's [`BufferPool`](larder_runtime::BufferPool), which has a limit.

#![forbid(unsafe_code)]

pub mod client;
pub mod output;
pub mod server;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;
pub mod wire;
