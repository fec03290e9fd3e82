//! Looking whether what is cached is what it should be, while clients go on.
//!
//! Every line is read from the cache device and its checksum compared with the map's; on demand its bytes are compared with
//! the store's. Neither holds up anybody: what does not fit is looked at again while its line is locked, and counts only then.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_engine::block::map::Slot;
use larder_engine::block::{LineId, SlotId, Sum};
use larder_policy::block::VolumeId;
use larder_runtime::{AlignedBuf, Device};
use serde::{Deserialize, Serialize};

use super::open::CacheError;
use super::{Cache, census, locked};
use crate::backing::Session;

/// Bytes of lines that are looked at in one go.
const BATCH: u64 = 1 << 20;
/// Faults that are listed.
const MOST_LISTED: usize = 100;
/// The longest rest after a batch, when clients are at work: as long as it took, but no longer.
const MOST_REST: Duration = Duration::from_millis(200);

/// What is to be looked at.
#[derive(Clone, Debug, Default)]
pub struct CheckWish {
    /// Only lines of this volume.
    pub volume: Option<String>,
    /// Compare with the stores too.
    pub compare: bool,
    /// Drop what is wrong.
    pub drop: bool,
}

/// Something that is wrong.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CheckFault {
    /// The volume; empty if its line is of none that is attached.
    pub volume: String,
    /// First byte of the line in it (in the line space, without a volume).
    pub offset: u64,
    /// Where it lies on the cache device.
    pub device_offset: u64,
    /// What is wrong with it.
    pub what: String,
}

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CheckReport {
    /// Bytes of a line.
    pub line_bytes: u32,
    /// Lines that were looked at.
    pub lines: u64,
    /// Of them, of volumes that are not attached: their checksums are compared, their stores are not at hand.
    pub unattached: u64,
    /// Lines that were compared with their stores.
    pub compared: u64,
    /// Lines that do not have their checksum.
    pub corrupt: u64,
    /// Lines that cannot be read.
    pub unreadable: u64,
    /// Lines that differ from their stores.
    pub differing: u64,
    /// Lines that could not be compared, because their stores did not answer.
    pub unanswered: u64,
    /// Lines that were dropped, because that was asked for.
    pub dropped: u64,
    /// The first faults.
    pub faults: Vec<CheckFault>,
    /// Whoever asked has gone: not everything was looked at.
    pub interrupted: bool,
    /// Seconds that it took.
    pub seconds: f64,
}

impl CheckReport {
    /// How many faults there are.
    pub fn faulty(&self) -> u64 {
        self.corrupt + self.unreadable + self.differing
    }

    fn fault(&mut self, fault: CheckFault) {
        if self.faults.len() < MOST_LISTED {
            self.faults.push(fault);
        }
    }
}

/// Where a line lies, and its checksum.
type Entry = (SlotId, LineId, Sum);
type Sessions = BTreeMap<VolumeId, Option<Box<dyn Session>>>;

#[derive(Clone, Copy, PartialEq)]
enum Wrong {
    Corrupt,
    Unreadable,
    Differs,
}

impl Wrong {
    fn as_str(self) -> &'static str {
        match self {
            Wrong::Corrupt => "it does not have its checksum",
            Wrong::Unreadable => "it cannot be read",
            Wrong::Differs => "it differs from its store",
        }
    }
}

impl Cache {
    /// Looks at every line that is cached. `go_on` hears how many slots of how many were looked at, and may say no.
    ///
    /// # Errors
    /// When the volume is not attached, or the cache is out of use.
    pub fn check(
        &self,
        wish: &CheckWish,
        go_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<CheckReport, CacheError> {
        let only = wish.volume.as_deref().map(|name| self.attached(name)).transpose()?;
        if !self.is_enabled() {
            return Err(CacheError::System {
                what: "the cache",
                reason: "it is out of use: `larder block status` says why".into(),
            });
        }
        let begun = Instant::now();
        let mut report = CheckReport { line_bytes: self.layout.line, ..CheckReport::default() };
        let mut sessions = Sessions::new();
        let step = (BATCH / u64::from(self.layout.line)).max(1) as u32;
        let per = self.layout.shard_slots();
        let total = self.layout.slots();
        let mut seen = self.asked_by_clients();
        for shard in 0..self.layout.shards {
            for from in (0..per).step_by(step as usize) {
                if self.layout.is_sparse() && !self.has_lines(shard, from, step.min(per - from)) {
                    continue;
                }
                let done = u64::from(shard) * u64::from(per) + u64::from(from);
                if !go_on(done, total) || locked(&self.log_inbox).stopped {
                    report.interrupted = true;
                    report.seconds = begun.elapsed().as_secs_f64();
                    return Ok(report);
                }
                let start = Instant::now();
                let mut batch = self.entries(shard, from, step.min(per - from));
                if let Some(only) = &only {
                    let end = only.base + only.bytes();
                    batch.retain(|e| (only.base..end).contains(&self.at(e.1)));
                }
                if batch.is_empty() {
                    continue;
                }
                // A store whose volume was put aside meanwhile is let go of.
                let volumes = self.volumes();
                sessions.retain(|id, _| volumes.iter().any(|v| v.id == *id));
                drop(volumes);
                self.check_batch(shard, &batch, wish, &mut sessions, &mut report);
                let now = self.asked_by_clients();
                if std::mem::replace(&mut seen, now) != now {
                    std::thread::sleep(start.elapsed().min(MOST_REST));
                }
            }
        }
        report.seconds = begun.elapsed().as_secs_f64();
        Ok(report)
    }

    /// Requests of clients so far: whether they are at work.
    pub(super) fn asked_by_clients(&self) -> u64 {
        let counters = |v: &super::Attached| {
            let c = &v.counters;
            c.reads.load(Ordering::Relaxed) + c.writes.load(Ordering::Relaxed)
        };
        self.volumes().iter().map(|v| counters(v)).sum()
    }

    /// The lines in slots `from..from + count` of a shard.
    fn entries(&self, shard: u32, from: u32, count: u32) -> Vec<Entry> {
        if self.layout.is_sparse() {
            return self.table_entries(shard, from, count);
        }
        let cell = locked(&self.shards[shard as usize]);
        let slots = (from..from + count).map(SlotId);
        slots
            .filter_map(|slot| match cell.shard.get(slot) {
                Slot::Line(line) => Some((slot, line, cell.shard.map().sum(slot))),
                Slot::Free | Slot::Held => None,
            })
            .collect()
    }

    fn check_batch(
        &self,
        shard: u32,
        batch: &[Entry],
        wish: &CheckWish,
        sessions: &mut Sessions,
        report: &mut CheckReport,
    ) {
        let line = self.layout.line as usize;
        let mut good: Vec<(LineId, AlignedBuf)> = Vec::new();
        // Neighbours are read together.
        for run in batch.chunk_by(|a, b| a.0.0 + 1 == b.0.0) {
            let mut buf = AlignedBuf::zeroed(run.len() * line);
            let whole = self.device.read_at(self.layout.slot_at(shard, run[0].0.0), &mut buf);
            for (i, &(slot, at, sum)) in run.iter().enumerate() {
                report.lines += 1;
                report.unattached += u64::from(self.governor.volume_at(self.at(at)).is_none());
                let mut own = AlignedBuf::zeroed(line);
                let read = match &whole {
                    Ok(()) => {
                        own.copy_from_slice(&buf[i * line..(i + 1) * line]);
                        true
                    }
                    // One that cannot be read must not speak for its neighbours.
                    Err(_) => {
                        self.device.read_at(self.layout.slot_at(shard, slot.0), &mut own).is_ok()
                    }
                };
                if read && Sum::of(at, crc32c::crc32c(&own)) == sum {
                    if wish.compare {
                        good.push((at, own));
                    }
                } else {
                    self.look_again(shard, at, false, wish.drop, sessions, report);
                }
            }
        }
        if wish.compare {
            self.compare(shard, good, wish.drop, sessions, report);
        }
    }

    /// Compares lines with their stores.
    fn compare(
        &self,
        shard: u32,
        mut lines: Vec<(LineId, AlignedBuf)>,
        drop: bool,
        sessions: &mut Sessions,
        report: &mut CheckReport,
    ) {
        let bytes = self.layout.line as usize;
        lines.sort_by_key(|l| l.0);
        for run in lines.chunk_by(|a, b| a.0.0 + 1 == b.0.0 && self.same_volume(a.0, b.0)) {
            let first = self.at(run[0].0);
            let Some(volume) = self.governor.volume_at(first) else { continue };
            match self.store_bytes(&volume, first, run.len() * bytes, sessions) {
                Some(store) => {
                    for ((line, cached), there) in run.iter().zip(store.chunks(bytes)) {
                        report.compared += 1;
                        if cached[..] != *there {
                            self.look_again(shard, *line, true, drop, sessions, report);
                        }
                    }
                }
                None => report.unanswered += run.len() as u64,
            }
        }
    }

    fn same_volume(&self, a: LineId, b: LineId) -> bool {
        let of = |line| self.governor.volume_at(self.at(line)).map(|v| v.id);
        of(a) == of(b)
    }

    /// Bytes of a volume's store, from `at` in the line space.
    fn store_bytes(
        &self,
        volume: &super::Attached,
        at: u64,
        len: usize,
        sessions: &mut Sessions,
    ) -> Option<AlignedBuf> {
        let open = || volume.volume().backing().session().ok();
        let session = sessions.entry(volume.id).or_insert_with(open).as_mut()?;
        let read = census::read(&mut **session, at - volume.base, len, self);
        if read.is_none() {
            // What is late would be taken for the answer to the next.
            sessions.remove(&volume.id);
        }
        read
    }

    /// A line that did not fit is looked at again while nothing changes it: it may have been written to, or have moved.
    fn look_again(
        &self,
        shard: u32,
        line: LineId,
        compare: bool,
        drop: bool,
        sessions: &mut Sessions,
        report: &mut CheckReport,
    ) {
        let volume = self.governor.volume_at(self.at(line));
        // It ends when what is under way in the line's group has ended.
        let found = self.with_range(line, line, &mut || !locked(&self.log_inbox).stopped, |out| {
            let (slot, sum) = {
                let cell = locked(&self.shards[shard as usize]);
                let slot = cell.shard.find(line)?;
                (slot, cell.shard.map().sum(slot))
            };
            let at = self.layout.slot_at(shard, slot.0);
            let mut bytes = AlignedBuf::zeroed(self.layout.line as usize);
            let wrong = if self.device.read_at(at, &mut bytes).is_err() {
                Some(Wrong::Unreadable)
            } else if Sum::of(line, crc32c::crc32c(&bytes)) != sum {
                Some(Wrong::Corrupt)
            } else if compare && let Some(volume) = &volume {
                let store = self.store_bytes(volume, self.at(line), bytes.len(), sessions)?;
                (store[..] != bytes[..]).then_some(Wrong::Differs)
            } else {
                None
            };
            let wrong = wrong?;
            let dropped = if drop { self.drop_locked(line, line, out) } else { 0 };
            Some((wrong, at, dropped))
        });
        let Some((wrong, device_offset, dropped)) = found.flatten() else { return };
        match wrong {
            Wrong::Corrupt => report.corrupt += 1,
            Wrong::Unreadable => report.unreadable += 1,
            Wrong::Differs => report.differing += 1,
        }
        report.dropped += dropped;
        if let Some(volume) = &volume {
            volume.lines.fetch_sub(dropped as i64, Ordering::Relaxed);
        }
        let offset = self.at(line) - volume.as_ref().map_or(0, |v| v.base);
        let name = volume.map_or_else(String::new, |v| v.name.clone());
        let what = wrong.as_str().to_owned();
        report.fault(CheckFault { volume: name, offset, device_offset, what });
    }
}
