//! `larder kv` killed, stopped, restarted and misled: what an answer may be afterwards.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of a process use processes, clocks and threads"
)]
#![allow(dead_code, reason = "what the soak uses of these modules is not all used here")]

mod client;
mod disk;
mod history;
mod live;
mod load;
mod memory_file;
mod mislead;
mod moves;
mod restart;
mod server;
