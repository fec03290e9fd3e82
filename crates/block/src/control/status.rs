//! Everything that is counted, as it is shown: by `status`, by the live page and by `/metrics`.

use std::collections::BTreeMap;

pub use crate::cache::AsideVolume;
pub use crate::served::FaceStatus;
use larder_runtime::latency::Percentiles;
use serde::{Deserialize, Serialize};

/// Counts by name.
pub type Counts = BTreeMap<String, u64>;

/// A daemon at one moment. Counters run from its start.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// Version of Larder.
    pub version: String,
    /// Seconds since the start.
    pub uptime_seconds: u64,
    /// Conditions that an operator should look at.
    pub alarms: Vec<String>,
    /// The cache.
    pub cache: CacheStatus,
    /// What went to flash.
    pub flash: FlashStatus,
    /// Share of reads answered without asking the store or waiting for it; `None` before the first.
    pub hit_ratio: Option<f64>,
    /// What clients did with all volumes, those that are detached by now among them.
    pub totals: TotalStatus,
    /// Latencies of requests by how they were answered.
    pub latency: LatencyStatus,
    /// Verdicts on requests, part by part: admitted, into free slots only, and rejected by reason.
    pub verdicts: Counts,
    /// The volumes.
    pub volumes: Vec<VolumeStatus>,
    /// Volumes that were put aside: they are known, not attached, and keep their lines until others need the room.
    pub put_aside: Vec<AsideVolume>,
    /// The recording, where one was asked for.
    pub recording: Option<RecordingStatus>,
    /// Clients' connections.
    pub connections: ConnectionStatus,
    /// Devices: disks of guests and of this host.
    pub faces: Vec<FaceStatus>,
    /// Every counter of the engine and of the map's log.
    pub counters: Counts,
    /// Resident memory of the process, bytes.
    pub resident_bytes: u64,
    /// Processor time used, seconds.
    pub cpu_seconds: ProcessorTime,
}

/// Seconds of processor time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessorTime {
    /// In the process itself.
    pub user: f64,
    /// In the kernel, for it.
    pub system: f64,
}

/// The cache device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheStatus {
    /// Its path.
    pub path: String,
    /// Its name in every start.
    pub uuid: String,
    /// Why it is out of use; `None` when it is in use.
    pub given_up: Option<String>,
    /// How the map was found at the start.
    pub warmth: String,
    /// Bytes of a line.
    pub line_bytes: u32,
    /// Where a line may lie: direct, set:W or full.
    pub placement: String,
    /// Lines that fit.
    pub slots: u64,
    /// Lines that are there (counted now and then).
    pub lines: u64,
    /// DRAM of the map, bytes.
    pub map_bytes: u64,
    /// Write mode.
    pub write: String,
    /// Admission policy.
    pub admission: String,
    /// Replacement policy.
    pub replacement: String,
    /// Regions that are marked as being written to.
    pub regions_marked: u64,
    /// Bytes of volumes that are selected to be cached always.
    pub pinned_bytes: u64,
    /// How many may be, for them to be kept from eviction.
    pub pinned_most_bytes: u64,
}

/// A recording.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RecordingStatus {
    /// Records written.
    pub records: u64,
    /// Bytes written.
    pub bytes: u64,
    /// Why it has ended; `None` while it goes on.
    pub ended: Option<String>,
}

/// Writes to the cache device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlashStatus {
    /// Bytes written: lines, the map's log and snapshots.
    pub bytes_written: u64,
    /// Bytes that clients wrote.
    pub client_bytes: u64,
    /// Bytes filled because a read missed.
    pub read_fill_bytes: u64,
    /// Cache-level write amplification: bytes written to flash for each byte written to the cache by clients or misses.
    pub clwa: Option<f64>,
    /// Operations of the device that failed.
    pub errors: u64,
    /// Lines whose checksum did not match.
    pub corrupt: u64,
    /// The write budget, bytes a second.
    pub budget_bytes_per_second: Option<f64>,
    /// Bytes that it grants now.
    pub budget_available_bytes: Option<u64>,
    /// Years that the drive lasts at the rate since the start.
    pub expected_life_years: Option<f64>,
    /// Share of its rated life that is used, per cent, as the drive reports.
    pub drive_used_percent: Option<u64>,
    /// Bytes that hosts wrote to the drive in its life, as it reports.
    pub drive_host_bytes: Option<u64>,
    /// Bytes that it wrote to NAND in its life, as it reports.
    pub drive_nand_bytes: Option<u64>,
}

/// Latencies, from the moment that a request is taken from its connection to its answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct LatencyStatus {
    /// Reads answered without asking the store or waiting for it.
    pub hit: Percentiles,
    /// Other reads.
    pub miss: Percentiles,
    /// Writes, zeroes and trims.
    pub write: Percentiles,
}

/// What clients did with all volumes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TotalStatus {
    /// Reads.
    pub reads: u64,
    /// Of them, answered without asking the store or waiting for it.
    pub read_hits: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes, zeroes and trims.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
}

/// A volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct VolumeStatus {
    /// Its name.
    pub name: String,
    /// Its store.
    pub uri: String,
    /// Bytes.
    pub bytes: u64,
    /// It is only read.
    pub read_only: bool,
    /// It is served without the cache.
    pub pass_through: bool,
    /// Connections of clients that have asked something and are still there: one client may have several.
    pub clients: u64,
    /// Lines in the cache.
    pub lines: u64,
    /// Lines that others leave it.
    pub floor: u64,
    /// Lines that it may have at most.
    pub ceiling: Option<u64>,
    /// Reads.
    pub reads: u64,
    /// Of them, answered without asking the store or waiting for it.
    pub read_hits: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes, zeroes and trims.
    pub writes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Lines that began to be filled.
    pub filled: u64,
    /// Reads of metadata, as far as recognised.
    pub metadata_reads: u64,
    /// Of them, answered without asking the store or waiting for it.
    pub metadata_hits: u64,
    /// File systems recognised on it.
    pub file_systems: Vec<FileSystem>,
    /// How it is cached where nothing else is selected.
    pub rule: String,
    /// Stretches of it that are selected.
    pub selected: u64,
    /// Verdicts on its requests.
    pub verdicts: Counts,
    /// How it writes back; `None`: it writes through.
    pub write_back: Option<BackVolume>,
    /// It is written through for want of write budget, and writes back like this, as `--write` says it, when there is budget again.
    pub through_for_budget: Option<String>,
    /// Of a volume that waits for its store: bytes that the store lacks, and the write log has. `None`: it may not lack any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kept_dirty_bytes: Option<u64>,
    /// Its store.
    pub store: StoreStatus,
}

/// A volume that writes back.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BackVolume {
    /// As `--write` says it: `back:ordered`.
    pub mode: String,
    /// In which order the store gets what was written: `any` or `ordered`.
    pub order: String,
    /// Bytes that are dirty, each counted once.
    pub dirty_bytes: u64,
    /// Bytes of the write log that it holds: dirty ones, those that were overwritten since, headers and padding.
    pub held_bytes: u64,
    /// Bytes of the write log that it may hold now.
    pub bound_bytes: u64,
    /// The same as it was stated, if it was: more where the log has no room for that beside the other volumes.
    pub stated_bytes: Option<u64>,
    /// It holds nearly all that it may: writes are as slow as its store.
    pub nearly_full: bool,
    /// Age of the oldest dirty write, seconds.
    pub oldest_seconds: Option<f64>,
    /// Bytes of the write log a second that are destaged, as measured last.
    pub destage_bytes_per_second: f64,
    /// At that rate, until nothing is dirty; `None` while nothing is destaged.
    pub seconds_left: Option<f64>,
    /// Bytes of the write log that were destaged so far.
    pub destaged_bytes: u64,
    /// The generation of the volume: it rises with each attach.
    pub generation: u64,
    /// Its store or marker keeps a second holder out. Else it is unfenced: nothing but a look at the marker does.
    pub fenced: bool,
    /// The last epoch that was begun, where its store gets epochs through a journal.
    pub epoch: Option<u64>,
    /// Failures of the store, or its flush, since destaging worked last.
    pub failures: u64,
    /// For want of write budget its clients are answered no faster than its store takes what is dirty.
    pub slowed_for_budget: bool,
    /// How old the oldest dirty write may become, seconds; none where it waits for the log to fill up.
    pub age_max_seconds: Option<f64>,
    /// Writes are not answered while it is older.
    pub age_hard: bool,
    /// It is older.
    pub age_over: bool,
    /// Name of the last consistency point that the store has, with all that was written before it.
    pub stored_mark: Option<String>,
    /// Name of the last that is durable at all; empty where it could not be read.
    pub last_mark: Option<String>,
    /// Nothing is destaged: a consistency point that fits the journal is waited for, and the log fills up or what is dirty ages.
    pub waits_for_mark: bool,
    /// Bytes before the first mark that waits, if they are more than an epoch takes,
    pub large_mark_bytes: Option<u64>,
    /// and how many those are.
    pub epoch_bytes: Option<u64>,
    /// How often an epoch ended at none since the start, though they are to end at those alone,
    pub missed_marks: u64,
    /// and whether the last one did, so that what the store has is no consistency point.
    pub off_mark: bool,
    /// Bytes that cannot be read any more: reads of them fail until they are written again or trimmed.
    pub unreadable_bytes: u64,
    /// Nothing is destaged for that: the order does not go on without them.
    pub unreadable_stops: bool,
    /// The same, because no more stretches can be listed, and what is to come to the store next would leave more.
    pub unreadable_unlisted: bool,
    /// Bytes that could not be read and were given up by an operator's word, since the start.
    pub given_up_bytes: u64,
    /// They were written again, and all that was logged meanwhile goes to the store at once: until it is there the store alone is no image.
    pub unreadable_joins: bool,
    /// Why nothing is logged any more, if so.
    pub closed: Option<String>,
    /// Why its journal fails, if it does: what is dirty waits for that, not for the store.
    pub journal_failure: Option<String>,
    /// What is wrong with its marker or journal, or was in the last ten minutes: something has removed them or written over them.
    pub troubles: Vec<String>,
    /// Its store has become smaller than it was, so it is only read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shrunk: Option<ShrunkStore>,
    /// All writes up to this one are durable in the store.
    pub frontier: u64,
    /// All up to this one are answered.
    pub acknowledged: u64,
    /// All up to this one are covered by an answered flush.
    pub promised: u64,
    /// The last.
    pub last: u64,
}

/// A store that has become smaller, of a volume that may be dirty beyond its end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ShrunkStore {
    /// Bytes that it has.
    pub store_bytes: u64,
    /// Bytes that it had.
    pub had_bytes: u64,
    /// Dirty bytes beyond its end,
    pub dirty_bytes: u64,
    /// the first of them,
    pub first_byte: u64,
    /// and the first behind the last.
    pub end_byte: u64,
    /// The same in words.
    pub text: String,
}

/// A file system that was recognised.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct FileSystem {
    /// Which: `ext4` or `xfs`.
    pub kind: String,
    /// Its first byte in the volume.
    pub offset: u64,
}

/// A volume's store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StoreStatus {
    /// `ok`; `waiting`: it was not there at the start, and the volume is not served yet; `refused`: it is there by now, and the volume is not served with
    /// it, as `trouble` says; `lost`: it is not reached; `shrunk`: it was cut short; `moved`: its file is not the one at its path any more; `changed`: something else has written to it within the last
    /// hour, or while the volume was not attached here, if it came within the last hour; `failing`: an operation of the last minute failed.
    pub state: String,
    /// Seconds that it has not been ok.
    pub since_seconds: Option<u64>,
    /// What is the matter.
    pub trouble: Option<String>,
    /// Times that it was found changed by something else: what was cached of it was dropped.
    pub foreign_changes: u64,
    /// Times that it may have lost writes that it had answered and not made durable: what was cached of such writes was dropped, and every client's
    /// next flush failed, or they came to it again from the write log.
    pub losses: u64,
    /// Whether it is asked to make durable what it has answered: `offered`; `missing`: it cannot be asked, and clients of NBD are not offered
    /// FLUSH; `needless`: what it has answered is durable, by its kind or by the operator's word. Empty while it waits.
    pub flush: String,
    /// Operations that failed.
    pub failures: u64,
    /// The last of them.
    pub last_failure: Option<String>,
    /// Seconds since then.
    pub last_failure_seconds: Option<u64>,
}

/// Connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ConnectionStatus {
    /// Now.
    pub open: u64,
    /// Ever.
    pub accepted: u64,
    /// Refused because there were too many.
    pub refused: u64,
    /// Closed because there were too many and they had never asked anything.
    pub made_way: u64,
    /// Requests that were not begun because nobody was there any more to be answered.
    pub abandoned: u64,
    /// Closed because the client broke the protocol.
    pub broken: u64,
    /// Closed because TLS was required and not begun, or did not come about: a certificate that was not accepted, or none.
    pub tls_refused: u64,
    /// Requests taken.
    pub requests: u64,
}

impl Status {
    /// What writes do, in words: the cache's mode, and how many volumes write back instead.
    pub fn writes(&self) -> String {
        let back = self.volumes.iter().filter(|v| v.write_back.is_some()).count();
        match back {
            0 => self.cache.write.clone(),
            n if n == self.volumes.len() => "writes back".to_owned(),
            n => format!("{}, {n} of {} volumes write back", self.cache.write, self.volumes.len()),
        }
    }
}

impl VolumeStatus {
    /// How its writing back does, in a word or two; `None`: it writes through.
    pub fn back_state(&self) -> Option<String> {
        let back = self.write_back.as_ref()?;
        let store = self.store.state.as_str();
        Some(match (&back.closed, back.failures) {
            (Some(_), _) => "closed".to_owned(),
            _ if back.shrunk.is_some() => "store shrunk, read-only".to_owned(),
            _ if matches!(store, "lost" | "shrunk" | "moved") => format!("store {store}"),
            (None, 0) if back.slowed_for_budget => "slowed".to_owned(),
            (None, 0) if store == "failing" => "store failing".to_owned(),
            (None, 0) => "ok".to_owned(),
            (None, n) => format!("{n} failed"),
        })
    }

    /// Share of its reads that were answered without asking the store or waiting for it.
    pub fn hit_ratio(&self) -> Option<f64> {
        (self.reads > 0).then(|| self.read_hits as f64 / self.reads as f64)
    }
}

impl FlashStatus {
    /// Device-level write amplification over the drive's life, where the drive tells.
    pub fn dlwa(&self) -> Option<f64> {
        let (host, nand) = (self.drive_host_bytes?, self.drive_nand_bytes?);
        (host > 0).then(|| nand as f64 / host as f64)
    }
}
