//! `larder sim`, `larder trace` and what writes files, as people and scripts run them. `cargo test -p larder-cli --test sim sweep::`
//! runs the tests of one module.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests of processes use processes, clocks, threads and files"
)]

mod advise;
mod bounds;
#[path = "../browser/mod.rs"]
mod browser;
mod commands;
mod equal_writes;
mod interrupt;
mod oracle;
mod outputs;
mod run;
mod sweep;
mod trace;
mod trace_damage;
