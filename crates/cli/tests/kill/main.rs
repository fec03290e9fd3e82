//! `larder kv` killed, stopped, restarted and misled: what an answer may be afterwards.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of a process use processes, clocks and threads"
)]

mod client;
mod disk;
mod history;
mod load;
mod mislead;
mod restart;
mod server;
