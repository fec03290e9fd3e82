//! The store as a whole, its threads and its flash included.

mod dump;
mod faults;
mod harness;
mod lockstep;
mod memory;
mod memory_file;
mod restart;
mod told;
