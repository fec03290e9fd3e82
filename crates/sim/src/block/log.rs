//! The log of the map in virtual time: the same [`MapLog`], over a device that keeps nothing.

use larder_base::Nanos;
use larder_engine::block::node::quiet::Changes;
use larder_engine::block::node::ranged::Bits;
use larder_engine::block::record::TapedShard;
use larder_engine::block::{
    IoFailed, LogIo, LogShards, LogStep, MapRecord, OpId, SlotId, TableChange,
};
use larder_format::block::log::Held;

use super::BlockSim;
use super::world::{Event, Fx, World};

/// Stands for a shard where a whole range asks for bits.
const RANGE: u32 = u32::MAX;
/// What a table has to record is gathered for so long, and if much waits, or somebody for it, for so long: as in the daemon.
const RECORDS_PACE: Nanos = Nanos::from_millis(100);
const COMMIT_PACE: Nanos = Nanos::from_millis(10);
/// Pages of a shard that are much.
const MUCH: usize = 128;
/// How often it is looked for regions that have become quiet.
const TICK: Nanos = Nanos::from_secs(1);

/// What the log does to the device.
pub(super) enum Done {
    Write(u64, Vec<u8>),
    Punch(u64, u64),
}

/// The device as the log sees it: what is written is noted (with its bytes, where they are a table's), what is read is as
/// formatting leaves it.
#[derive(Default)]
pub(super) struct NotedIo {
    pub writes: Vec<(u64, u32)>,
    pub done: Vec<Done>,
    pub keeps: bool,
    pub flushes: u64,
}

impl LogIo for NotedIo {
    fn read(&mut self, _at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        out.fill(0);
        Ok(())
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        if self.keeps {
            self.done.push(Done::Write(at, bytes.to_vec()));
        } else {
            self.writes.push((at, bytes.len() as u32));
        }
        Ok(())
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        self.done.push(Done::Punch(at, len));
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        self.flushes += 1;
        Ok(())
    }
}

struct Shards<'a> {
    shards: &'a mut [TapedShard],
    world: &'a mut World,
    bits: &'a mut Bits,
    changes: &'a Changes,
    now: Nanos,
}

impl Shards<'_> {
    fn with<R>(
        &mut self,
        shard: u32,
        f: impl FnOnce(&mut TapedShard, Nanos, &mut Fx<'_>) -> R,
    ) -> R {
        let mut fx = Fx { world: self.world, shard, now: self.now };
        f(&mut self.shards[shard as usize], self.now, &mut fx)
    }
}

impl LogShards for Shards<'_> {
    fn records_waiting(&mut self, shard: u32) -> usize {
        self.shards[shard as usize].records_waiting()
    }

    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        self.shards[shard as usize].take_records(most, out);
    }

    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        self.shards[shard as usize].take_pages(most, out);
    }

    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        self.shards[shard as usize].emptied(out);
    }

    fn records_durable(&mut self, shard: u32) {
        self.with(shard, |s, now, fx| s.records_durable(now, fx));
    }

    fn records_lost(&mut self, shard: u32) {
        self.shards[shard as usize].records_lost();
    }

    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        self.shards[shard as usize].state(first, most, out);
    }

    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        self.changes.is_quiet(self.now, region) && self.shards[shard as usize].quiet(region)
    }

    fn intent_ready(&mut self, shard: u32, region: u32) {
        if shard != RANGE {
            self.with(shard, |s, now, fx| s.intent_ready(now, region, fx));
            return;
        }
        self.bits.durable(region, |id| self.world.given.push_back(id));
    }

    fn flush_backing(&mut self, _region: u32) -> Result<(), IoFailed> {
        Ok(())
    }
}

impl BlockSim {
    /// Asks for the bits of a range's regions.
    pub(super) fn ask_range(&mut self, id: OpId, first: u32, last: u32) {
        self.range_bits.wait(id, first, last);
        (first..=last).for_each(|region| self.log.ask(RANGE, region));
        self.world.log_wanted = true;
    }

    /// Sees to it that the log has its turn if it has something to do. A step lasts as long as its writes and flushes,
    /// and counts as done at its end.
    pub(super) fn wake_log(&mut self, now: Nanos) {
        for (shard, region) in std::mem::take(&mut self.world.asks) {
            self.log.ask(shard, region);
        }
        if std::mem::take(&mut self.world.log_wanted) {
            self.schedule_log(Nanos(now.0.max(self.log_free.0)) + self.flush);
        }
        // Every step writes each page that differs, however little: they are gathered.
        let soon = std::mem::take(&mut self.world.commit_wanted);
        if self.world.files.is_some() && (soon || self.pages_wait(1)) {
            let pace = if soon { COMMIT_PACE } else { RECORDS_PACE };
            self.schedule_log(Nanos(now.0.max(self.log_free.0)) + pace);
        }
    }

    /// Whether a shard has so many pages to be written.
    fn pages_wait(&self, count: usize) -> bool {
        self.shards.iter().any(|shard| shard.records_waiting() >= count)
    }

    fn schedule_log(&mut self, at: Nanos) {
        if self.log_due.is_none_or(|due| at < due) {
            self.log_due = Some(at);
            self.world.at(at, Event::Log);
        }
    }

    /// The log's turn.
    pub(super) fn step_log(&mut self, now: Nanos) {
        if self.log_due != Some(now) {
            // Superseded by an earlier turn.
            return;
        }
        self.log_due = None;
        let mut io = NotedIo { keeps: self.world.files.is_some(), ..NotedIo::default() };
        let (world, bits, changes) = (&mut self.world, &mut self.range_bits, &self.changes);
        let mut shards = Shards { shards: &mut self.shards, world, bits, changes, now };
        // The device takes everything, so that the log cannot fail.
        let step = self.log.step(now, &mut shards, &mut io).unwrap_or(LogStep::Idle);
        let before = self.map_bytes_written;
        for (at, len) in io.writes {
            self.map_bytes_written += u64::from(len);
            self.world.drive.write(now, at, len);
        }
        if let World { drive, files: Some(files), .. } = &mut self.world {
            for done in &io.done {
                match done {
                    Done::Write(at, bytes) => {
                        self.map_bytes_written += bytes.len() as u64;
                        files.write_meta(drive, now, *at, bytes);
                    }
                    Done::Punch(at, len) => files.punch(drive, now, *at, *len),
                }
            }
        }
        self.world.charge_map(now, self.map_bytes_written - before);
        self.log_free = now + Nanos(self.flush.0 * io.flushes.saturating_sub(1));
        match step {
            LogStep::Worked if self.world.files.is_some() => {
                let pace = if self.pages_wait(MUCH) { COMMIT_PACE } else { RECORDS_PACE };
                self.schedule_log(self.log_free + pace);
            }
            LogStep::Worked => self.schedule_log(self.log_free + self.flush),
            LogStep::Idle if self.log.regions_set() > 0 => self.schedule_log(now + TICK),
            LogStep::Idle => {}
        }
    }
}
