//! What a cache counts.

use serde::Serialize;

/// What a cache holds and has done. Counters run from its start (or the last `stats reset`); sizes are of this moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct CacheStats {
    /// Objects held, in DRAM and on flash.
    pub items: u64,
    /// Objects in DRAM.
    pub dram_items: u64,
    /// Bytes that objects in DRAM take (keys, values, headers).
    pub dram_bytes: u64,
    /// DRAM for objects and indexes, bytes.
    pub memory_limit: u64,
    /// DRAM by what it is used for, bytes.
    pub memory: Vec<(&'static str, u64)>,
    /// Objects stored.
    pub total_items: u64,
    /// Bytes of keys and values that clients stored: what cache-level write amplification divides by.
    pub client_bytes: u64,
    /// Objects evicted from DRAM that did not go to flash.
    pub evictions: u64,
    /// Of these, though admission wanted them on flash, or without asking it: a write needed the room before the cleaner came.
    pub evicted_unjudged: u64,
    /// Of these, never read.
    pub evicted_unfetched: u64,
    /// Objects removed because they had expired.
    pub reclaimed: u64,
    /// Of these, removed though nobody asked for them.
    pub crawler_reclaimed: u64,
    /// Of these, never read.
    pub expired_unfetched: u64,
    /// Reads that found an expired object.
    pub get_expired: u64,
    /// Reads that found an object that flush_all had removed.
    pub get_flushed: u64,
    /// Times that a thread had to wait for a shard's lock.
    pub lock_waits: u64,
    /// Index entries that were forgotten because too many verifications were under way.
    pub unverified: u64,
    /// Steps by which the flash index has grown since the start, over all shards.
    pub index_grown: u64,
    /// And shrunk.
    pub index_shrunk: u64,
    /// The flash tier.
    pub flash: Option<FlashStats>,
    /// Per application.
    pub applications: Vec<AppStats>,
    /// How recording goes, if the run is recorded.
    pub record: Option<super::RecordStats>,
    /// How capturing goes, if requests are captured.
    pub capture: Option<super::CaptureStats>,
    /// What an operator should look at: one line each.
    pub alarms: Vec<String>,
}

/// The flash tier of a cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct FlashStats {
    /// Path.
    pub path: String,
    /// Admission policy.
    pub admission: String,
    /// Bytes for segments.
    pub capacity_bytes: u64,
    /// Bytes of records in segments.
    pub used_bytes: u64,
    /// Objects.
    pub items: u64,
    /// Objects among these that CLOCK has given up (readable until their segment is reclaimed).
    pub ghosts: u64,
    /// Segments.
    pub segments: u64,
    /// Segments filled.
    pub segments_used: u64,
    /// Segments written.
    pub segments_written: u64,
    /// Segments reclaimed.
    pub segments_reclaimed: u64,
    /// Objects written.
    pub objects_written: u64,
    /// Objects dropped when their segment was reclaimed.
    pub objects_dropped: u64,
    /// Of these, never read since they were written: unread writes.
    pub objects_dropped_unread: u64,
    /// Objects whose place in the index was taken from them.
    pub forced_evictions: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Bytes written again because reclaimed objects were kept.
    pub bytes_rewritten: u64,
    /// Reads of the device for requests.
    pub reads: u64,
    /// Reads that found another key, or an older life of the segment.
    pub false_reads: u64,
    /// Bytes read.
    pub bytes_read: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Records whose checksum did not match.
    pub checksum_errors: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Times that an object was kept from flash, by reason; one that is judged again counts again.
    pub rejected: Vec<(&'static str, u64)>,
    /// Objects that the policy turned away and that went to flash because it was being filled for the first time.
    pub first_filled: u64,
    /// The setting that admission has found by itself; `None` where it looks for none.
    pub tuning: Option<TuningStats>,
    /// The write budget, bytes per second; `None` when no endurance is given.
    pub budget_bytes_per_second: Option<f64>,
    /// Bytes that the budget would grant now.
    pub budget_available_bytes: Option<u64>,
    /// Years that the flash lasts at the rate observed; `None` when no endurance is given or nothing was written.
    pub expected_life_years: Option<f64>,
    /// What the drive reports of its own life, where it does: bytes that hosts wrote to it.
    pub drive_host_bytes: Option<u64>,
    /// Bytes it wrote to NAND, where it says.
    pub drive_nand_bytes: Option<u64>,
    /// Share of its rated life used, per cent.
    pub drive_used_percent: Option<u64>,
    /// Why flash is out of use.
    pub degraded: Option<String>,
    /// Drive by drive, where there are several.
    pub drives: Vec<DriveStats>,
}

/// One of several drives.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DriveStats {
    /// Its place among the drives: it stays when others come or go.
    pub place: usize,
    /// Path.
    pub path: String,
    /// Bytes for segments.
    pub capacity_bytes: u64,
    /// Bytes of segments that are filled.
    pub used_bytes: u64,
    /// Bytes written.
    pub bytes_written: u64,
    /// Segments reclaimed.
    pub segments_reclaimed: u64,
    /// Reads that failed.
    pub read_errors: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Its write budget, bytes per second; `None` when no endurance is given.
    pub budget_bytes_per_second: Option<f64>,
    /// Bytes that the budget would grant now.
    pub budget_available_bytes: Option<u64>,
    /// Years that it lasts at the rate observed; `None` when no endurance is given or nothing was written.
    pub expected_life_years: Option<f64>,
    /// What the drive reports of its own life, where it does: bytes that hosts wrote to it.
    pub host_bytes: Option<u64>,
    /// Bytes it wrote to NAND, where it says.
    pub nand_bytes: Option<u64>,
    /// Share of its rated life used, per cent.
    pub used_percent: Option<u64>,
    /// Whether writes to it fail.
    pub degraded: bool,
}

impl CacheStats {
    /// Cache-level write amplification: bytes written to flash for each byte that clients stored.
    pub fn clwa(&self) -> Option<f64> {
        let flash = self.flash.as_ref()?;
        (self.client_bytes > 0).then(|| flash.bytes_written as f64 / self.client_bytes as f64)
    }
}

/// The setting that admission has found by itself, by miniature caches over some of the keys. Means over the shards.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TuningStats {
    /// What is asked of a write is multiplied by this.
    pub thrift: f64,
    /// Why: `too_little_memory`, `too_early`, `fewest_misses` or `write_rate`.
    pub reason: &'static str,
    /// The part of the reads, 0..=1, that miniatures with this setting miss.
    pub misses: f64,
    /// The part of the reads that the best of the settings beside it would miss less.
    pub gain: f64,
}

impl FlashStats {
    /// Device-level write amplification over the drive's life: NAND bytes for each byte that hosts wrote. `None` where the
    /// drive does not tell.
    pub fn dlwa(&self) -> Option<f64> {
        let (host, nand) = (self.drive_host_bytes?, self.drive_nand_bytes?);
        (host > 0).then(|| nand as f64 / host as f64)
    }
}

/// One application (keys with a common prefix).
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct AppStats {
    /// The prefix.
    pub name: String,
    /// Reads.
    pub gets: u64,
    /// Reads that hit.
    pub hits: u64,
    /// Reads that hit flash.
    pub flash_hits: u64,
    /// Stores.
    pub sets: u64,
    /// Bytes in DRAM.
    pub dram_bytes: u64,
    /// Bytes on flash.
    pub flash_bytes: u64,
    /// Version of its model of flashiness; 0 before the first.
    pub model_version: u64,
    /// Samples that the model was trained on.
    pub model_samples: u64,
    /// Share of objects predicted flashy that were.
    pub precision: Option<f64>,
    /// Share of flashy objects that were predicted.
    pub recall: Option<f64>,
    /// Share of its writes to flash that were never read.
    pub unread_writes: Option<f64>,
}
