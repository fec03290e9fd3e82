//! The cache as a whole, its threads and its flash included.

mod expiry;
mod faults;
mod harness;
mod lockstep;
mod memory;
mod memory_file;
mod restart;
mod told;
