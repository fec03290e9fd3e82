//! What a simulated cache has done.

/// What the cache has done since it was built. All but the present states only grow, so that the difference of two is
/// what was done in between.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counters {
    /// Requests of any kind.
    pub requests: u64,
    /// Reads.
    pub gets: u64,
    /// Reads answered from DRAM.
    pub hits_dram: u64,
    /// Reads answered from flash.
    pub hits_flash: u64,
    /// Bytes of keys and values of reads.
    pub get_bytes: u64,
    /// Of these, of reads that were answered.
    pub hit_bytes: u64,
    /// Bytes of keys and values set, by the trace or after a miss.
    pub set_bytes: u64,
    /// Of these, set after a miss.
    pub miss_bytes: u64,
    /// Bytes written to the device, all of them.
    pub flash_bytes: u64,
    /// Of these, bytes of records that were alive when they were written.
    pub flash_record_bytes: u64,
    /// Objects evicted from DRAM that never reached flash.
    pub dram_evictions: u64,
    /// Objects that left flash.
    pub flash_dropped: u64,
    /// Of these, never read there.
    pub flash_dropped_unread: u64,
    /// Objects put back into DRAM from reclaimed segments.
    pub reinserted: u64,
    /// Flash reads of requests.
    pub flash_reads: u64,
    /// Models installed, over all applications.
    pub models: u64,
}

macro_rules! difference {
    ($a:expr, $b:expr, $($field:ident),+) => { Counters { $($field: $a.$field - $b.$field),+ } };
}

impl Counters {
    /// What was done between `earlier` and these.
    pub fn since(&self, earlier: &Counters) -> Counters {
        difference!(
            self,
            earlier,
            requests,
            gets,
            hits_dram,
            hits_flash,
            get_bytes,
            hit_bytes,
            set_bytes,
            miss_bytes,
            flash_bytes,
            flash_record_bytes,
            dram_evictions,
            flash_dropped,
            flash_dropped_unread,
            reinserted,
            flash_reads,
            models
        )
    }

    /// Reads answered, of all reads.
    pub fn hit_ratio(&self) -> f64 {
        share(self.hits_dram + self.hits_flash, self.gets)
    }

    /// The same by bytes.
    pub fn byte_hit_ratio(&self) -> f64 {
        share(self.hit_bytes, self.get_bytes)
    }

    /// Cache-level write amplification: flash bytes over bytes set by clients, explicitly or after a miss.
    pub fn clwa(&self) -> f64 {
        share(self.flash_bytes, self.set_bytes)
    }

    /// The same over bytes set after a miss only.
    pub fn clwa_of_misses(&self) -> f64 {
        share(self.flash_bytes, self.miss_bytes)
    }

    /// Objects that left flash without having been read there, of all that left.
    pub fn unread_share(&self) -> f64 {
        share(self.flash_dropped_unread, self.flash_dropped)
    }
}

pub(super) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}
