//! The key-value engine.

pub mod api;
