//! `larder block`: the daemon as a process and the library beside the simulator. One program, since each that is linked takes its
//! time: `cargo test -p larder-cli --test block stores::` runs those of one module.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of processes use processes, clocks, threads and files"
)]

#[path = "../browser/mod.rs"]
mod browser;
mod config;
mod control;
mod crowd;
mod daemon;
mod faults;
mod fixture;
mod foreign;
mod lockstep;
mod maps;
mod own;
mod page;
mod record;
mod restart;
mod scan;
mod signals;
mod sim;
mod stores;
mod tls;
mod upkeep;
mod upset;
mod write_back;
