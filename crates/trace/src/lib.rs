//! Readers, writers and generators of workloads.
