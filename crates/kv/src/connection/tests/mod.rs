//! Tests of the connection against the model engine.

mod harness;
mod order;
mod socket;
mod table;
