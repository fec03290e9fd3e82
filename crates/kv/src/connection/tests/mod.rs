//! Tests of the connection against the model engine.

mod harness;
mod memory;
mod order;
mod socket;
mod table;
