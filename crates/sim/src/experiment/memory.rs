//! What an experiment takes of memory before its first request, told before it is taken.

use super::spec::{CacheSpec, Experiment};
use crate::lab::baseline::BUCKET_BYTES;

/// Bytes of the translation layer's maps for a logical page: where it lies, and for each physical page which it holds.
const MAP_ENTRY: u64 = 4;
/// Bytes of the tables for an object that the flash can hold: a slot of the index, and what admission remembers.
const INDEX_ENTRY: u64 = 8;
/// Bytes of the block cache's map for a line.
const LINE_ENTRY: u64 = 7;

impl Experiment {
    /// Bytes of the tables whose size follows from sizes alone: the drives' maps, and the caches' tables by bucket, by line or
    /// by expected object (these as they are once flash is filled). Objects come on top as the trace brings them.
    pub fn table_bytes(&self) -> u64 {
        let drive = |flash: u64| {
            let capacity = flash.max(self.ssd.capacity.0);
            let physical = 1.0 + self.ssd.over_provisioning;
            ((capacity / self.ssd.page.0.max(1) * MAP_ENTRY) as f64 * (1.0 + physical)) as u64
        };
        let tables = |c: &CacheSpec| match c {
            CacheSpec::Hybrid(c) => c.flash.0 / c.object().max(1) * INDEX_ENTRY,
            CacheSpec::SetAssociative(c) => {
                (c.flash.0 / c.bucket.0.max(1)).saturating_mul(BUCKET_BYTES)
            }
            CacheSpec::Block(c) => c.flash.0 / c.line.0.max(1) * LINE_ENTRY,
            // Theirs grow with what they hold.
            CacheSpec::Victim(_) | CacheSpec::Ripq(_) | CacheSpec::FifoLog(_) => 0,
            // At most 4,095 segments: the drive's maps are larger.
            CacheSpec::FlashieldPaper(_) => 0,
        };
        let each = |c: &CacheSpec| tables(c).saturating_add(drive(c.flash()));
        self.caches.iter().map(each).fold(0, u64::saturating_add)
    }
}
