//! What no server runs: other caches to measure against, and studies of one machine of the engine by itself.
//!
//! - [`baseline`]: other flash caches and the Flashield paper's own index, to measure against.
//! - [`block_levels`]: admission policies of the block cache at equal flash writes.
//! - [`block_study`]: admission and replacement of the block cache on block traces.
//! - [`kv_study`]: admission policies of the key-value cache at equal flash writes.
//! - [`oracle`]: the best offline heuristic that is known here for a flash log with a write budget.
//! - [`rivals`]: other designs of flash caches, as ideal models.
//! - [`equal_writes`]: who misses least for the same bytes written to flash.
//! - [`theory`]: closed forms of a translation layer's write amplification.

pub mod baseline;
pub mod block_levels;
pub mod block_study;
pub mod equal_writes;
pub mod kv_study;
pub mod oracle;
pub mod rivals;
pub mod theory;
