//! `larder kv`: the server as a process and the library beside the simulator. `cargo test -p larder-cli --test kv kill::` runs the
//! tests of one module.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of processes use processes, clocks, threads and files"
)]

#[path = "../browser/mod.rs"]
mod browser;
mod charts;
mod client;
mod drives;
mod history;
mod kill;
mod large;
mod load;
mod lockstep;
mod memory;
mod page;
mod record;
mod server;
mod sim;
mod soak;
mod usage;
