//! Looking whether what is cached is what it should be, while clients go on.
//!
//! Every line is read from the cache device and its checksum compared with the map's; on demand it is compared with the
//! store's. Neither holds up anybody: what does not fit is looked at again while its line is locked, and counts only then.
//!
//! The device is read as it lies there, where neighbours of the volume are far from each other; stores are read in the order of
//! the volume, in as large pieces as there are neighbours. Between the two a line is its place and a hash of 64 bits, of some
//! millions of lines at a time: of two lines that differ one in 2^64 would be taken for the other.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use larder_base::{HashKey, KeyHasher};
use larder_engine::block::node::looks::{Entry, Looks as _};
use larder_engine::block::node::operator::Operation;
use larder_engine::block::{LineId, Sum};
use larder_policy::block::VolumeId;
use larder_runtime::{AlignedBuf, Device};
use serde::{Deserialize, Serialize};

use super::open::CacheError;
use super::{Core, locked, watch};
use larder_volume::Alone;

/// Bytes of lines that are looked at in one go.
const BATCH: u64 = 1 << 20;
/// Lines that are looked at before they are compared with their stores: 16 bytes of memory each.
const GATHERED: usize = 2 << 20;
/// Bytes of a store that are read in one go.
const STORE_READ: u64 = 1 << 20;
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
    /// Reads of stores in which they came.
    pub store_reads: u64,
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

/// A line that has its checksum, and a hash of its bytes.
type Seen = (LineId, u64);
type Sessions = BTreeMap<VolumeId, Option<Alone>>;

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

/// What a check has come to.
struct Course<'a> {
    wish: &'a CheckWish,
    sessions: Sessions,
    report: CheckReport,
    /// Lines that are to be compared with their stores.
    seen: Vec<Seen>,
    hasher: KeyHasher,
    /// Requests of clients, when it was last looked.
    asked: u64,
    /// Slots that were looked at, and those of them whose lines were compared too; steps in all.
    looked: u64,
    compared: u64,
    steps: u64,
}

impl Course<'_> {
    fn hash(&self, bytes: &[u8]) -> u64 {
        self.hasher.hash(bytes).0 as u64
    }
}

impl Core {
    /// Looks at every line that is cached. `go_on` hears how many steps of how many are done, and may say no.
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
        let mut course = Course {
            wish,
            sessions: Sessions::new(),
            report: CheckReport { line_bytes: self.layout.line, ..CheckReport::default() },
            seen: Vec::new(),
            hasher: KeyHasher::new(HashKey([0; 16])),
            asked: self.asked_by_clients(),
            looked: 0,
            compared: 0,
            steps: self.layout.slots() * if wish.compare { 2 } else { 1 },
        };
        course.report.interrupted = !self.check_all(only.as_deref(), &mut course, go_on);
        course.report.seconds = begun.elapsed().as_secs_f64();
        Ok(course.report)
    }

    /// Returns whether everything was looked at.
    fn check_all(
        &self,
        only: Option<&super::Attached>,
        course: &mut Course<'_>,
        go_on: &mut dyn FnMut(u64, u64) -> bool,
    ) -> bool {
        let step = (BATCH / u64::from(self.layout.line)).max(1) as u32;
        let per = self.layout.shard_slots();
        // All shards side by side: they take turns with the groups of a volume, and so neighbours are gathered together.
        let places = (0..per).step_by(step as usize);
        for (from, shard) in places.flat_map(|from| (0..self.layout.shards).map(move |s| (from, s)))
        {
            let count = step.min(per - from);
            let done = course.looked + course.compared;
            course.looked += u64::from(count);
            if self.layout.is_sparse() && !self.may_have_lines(shard, from, count) {
                continue;
            }
            if !go_on(done, course.steps) || self.is_stopped() {
                return false;
            }
            let start = Instant::now();
            let mut batch = self.lines_in(shard, from, count);
            if let Some(only) = only {
                let end = only.base() + only.bytes();
                batch.retain(|e| (only.base()..end).contains(&self.at(e.1)));
            }
            if batch.is_empty() {
                continue;
            }
            self.check_batch(shard, &batch, course);
            self.rest(start, course);
            if course.seen.len() + step as usize > GATHERED && !self.compare(course, go_on) {
                return false;
            }
        }
        !course.wish.compare || self.compare(course, go_on)
    }

    fn is_stopped(&self) -> bool {
        locked(&self.log_inbox).stopped
    }

    /// After work that began at `start`: leaves the devices to clients, if they are at work.
    fn rest(&self, start: Instant, course: &mut Course<'_>) {
        let now = self.asked_by_clients();
        if std::mem::replace(&mut course.asked, now) != now {
            std::thread::sleep(start.elapsed().min(MOST_REST));
        }
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
    fn lines_in(&self, shard: u32, from: u32, count: u32) -> Vec<Entry> {
        if self.layout.is_sparse() {
            self.table_entries(shard, from, count)
        } else {
            self.entries(shard, from, count)
        }
    }

    fn check_batch(&self, shard: u32, batch: &[Entry], course: &mut Course<'_>) {
        let line = self.layout.line as usize;
        // Neighbours are read together.
        for run in batch.chunk_by(|a, b| a.0.0 + 1 == b.0.0) {
            let mut buf = AlignedBuf::zeroed(run.len() * line);
            let whole = self.device.read_at(self.layout.slot_at(shard, run[0].0.0), &mut buf);
            for (i, &(slot, at, sum)) in run.iter().enumerate() {
                course.report.lines += 1;
                course.report.unattached +=
                    u64::from(self.node_limits.volume_at(self.at(at)).is_none());
                let mut alone;
                let read = match &whole {
                    Ok(()) => Some(&buf[i * line..(i + 1) * line]),
                    // One that cannot be read must not speak for its neighbours.
                    Err(_) => {
                        alone = AlignedBuf::zeroed(line);
                        let at = self.layout.slot_at(shard, slot.0);
                        self.device.read_at(at, &mut alone).is_ok().then_some(&alone[..])
                    }
                };
                match read {
                    Some(bytes) if Sum::of(at, crc32c::crc32c(bytes)) == sum => {
                        if course.wish.compare {
                            course.seen.push((at, course.hash(bytes)));
                        }
                    }
                    _ => self.look_again(at, false, course),
                }
            }
        }
    }

    /// Compares the lines that were gathered with their stores. Returns whether all were.
    fn compare(&self, course: &mut Course<'_>, go_on: &mut dyn FnMut(u64, u64) -> bool) -> bool {
        let bytes = self.layout.line as usize;
        let most = (STORE_READ / bytes as u64).max(1) as usize;
        let mut lines = std::mem::take(&mut course.seen);
        lines.sort_unstable();
        // Together they are as many steps as slots were looked at for them.
        let (before, steps) = (course.looked + course.compared, course.looked - course.compared);
        let (mut done, all) = (0, lines.len() as u64);
        let runs = lines.chunk_by(|a, b| a.0.0 + 1 == b.0.0 && self.same_volume(a.0, b.0));
        for run in runs.flat_map(|run| run.chunks(most)) {
            if !go_on(before + steps * done / all, course.steps) || self.is_stopped() {
                return false;
            }
            done += run.len() as u64;
            let start = Instant::now();
            // A store whose volume was put aside meanwhile is let go of.
            let volumes = self.volumes();
            course.sessions.retain(|id, _| volumes.iter().any(|v| v.id == *id));
            drop(volumes);
            let first = self.at(run[0].0);
            let Some(volume) = self.node_limits.volume_at(first) else { continue };
            course.report.store_reads += 1;
            match self.store_bytes(&volume, first, run.len() * bytes, &mut course.sessions) {
                Some(store) => {
                    for (&(line, cached), there) in run.iter().zip(store.chunks(bytes)) {
                        course.report.compared += 1;
                        if cached != course.hash(there) {
                            self.look_again(line, true, course);
                        }
                    }
                }
                None => course.report.unanswered += run.len() as u64,
            }
            self.rest(start, course);
        }
        course.compared = course.looked;
        lines.clear();
        course.seen = lines;
        true
    }

    fn same_volume(&self, a: LineId, b: LineId) -> bool {
        let of = |line| self.node_limits.volume_at(self.at(line)).map(|v| v.id);
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
        let open = || watch::open_session(volume);
        let session = sessions.entry(volume.id).or_insert_with(open).as_mut()?;
        let is_over = || locked(&self.log_inbox).stopped;
        let read = watch::read(session, volume.offset_of(at), len, is_over);
        if read.is_none() {
            // What is late would be taken for the answer to the next.
            sessions.remove(&volume.id);
        }
        read
    }

    /// A line that did not fit is looked at again while nothing changes it: it may have been written to, or have moved.
    fn look_again(&self, line: LineId, compare: bool, course: &mut Course<'_>) {
        let Course { wish, sessions, report, .. } = course;
        let shard = self.placing.shard(line.group());
        let volume = self.node_limits.volume_at(self.at(line));
        let mut look = || {
            let (slot, sum) = self.find_sum(shard, line)?;
            let at = self.layout.slot_at(shard, slot.0);
            let mut bytes = AlignedBuf::zeroed(self.layout.line as usize);
            let wrong = if self.device.read_at(at, &mut bytes).is_err() {
                Wrong::Unreadable
            } else if Sum::of(line, crc32c::crc32c(&bytes)) != sum {
                Wrong::Corrupt
            } else if compare && let Some(volume) = &volume {
                let store = self.store_bytes(volume, self.at(line), bytes.len(), sessions)?;
                (store[..] != bytes[..]).then_some(Wrong::Differs)?
            } else {
                return None;
            };
            Some((wrong, at))
        };
        let (id, shards) = self.next_operation();
        let mut operation = Operation::act(id, shards, (line, line));
        let mut found = None;
        // It ends when what is under way in the line's group has ended.
        let go_on = &mut || !locked(&self.log_inbox).stopped;
        let looked = self.carry(&mut operation, go_on, &mut |operation, _| {
            found = look();
            if found.is_some() && wish.drop {
                operation.drop_there((line, line));
            }
            operation.done();
            Ok(true)
        });
        let Some((wrong, device_offset)) = found.filter(|_| matches!(looked, Ok(true))) else {
            return;
        };
        let dropped = operation.dropped();
        match wrong {
            Wrong::Corrupt => report.corrupt += 1,
            Wrong::Unreadable => report.unreadable += 1,
            Wrong::Differs => report.differing += 1,
        }
        report.dropped += dropped;
        let offset = volume.as_ref().map_or(self.at(line), |v| v.offset_of(self.at(line)));
        let name = volume.map_or_else(String::new, |v| v.name.clone());
        let what = wrong.as_str().to_owned();
        report.fault(CheckFault { volume: name, offset, device_offset, what });
    }
}
