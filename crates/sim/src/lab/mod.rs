//! What no server runs: other caches to measure against, and studies of one machine of the engine by itself.
//!
//! - [`baseline`]: other flash caches and the Flashield paper's own index, to measure against.
//! - [`block_levels`]: admission policies of the block cache at equal flash writes.
//! - [`block_study`]: admission and replacement of the block cache on block traces.
//! - [`kv_study`]: admission policies of the key-value cache at equal flash writes.
//! - [`theory`]: closed forms of a translation layer's write amplification.

pub mod baseline;
pub mod block_levels;
pub mod block_study;
pub mod kv_study;
pub mod theory;
