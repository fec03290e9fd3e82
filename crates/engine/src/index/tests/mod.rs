//! Tests of the whole index: against a naive one, and under kills.

mod kill;
mod model;
mod oracle;
