//! The log of the map in virtual time: the same [`MapLog`], over a device that keeps nothing.

use larder_base::Nanos;
use larder_engine::block::node::calls::{Calls, Copying, Fill, Fx, Load, Message, Out, call, send};
use larder_engine::block::node::event::{Effects, ShardIo};
use larder_engine::block::node::ranged::Bits;
use larder_engine::block::record::TapedShard;
use larder_engine::block::{IoFailed, LogIo, LogShards, LogStep, MapRecord, SlotId, TableChange};
use larder_format::block::log::Held;

use super::BlockSim;
use super::node::{Blank, ForLog, Sim, SimNode};
use super::world::{Event, World};

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
    node: &'a SimNode,
    out: Out<Blank>,
    bits: &'a mut Bits,
    now: Nanos,
}

impl Shards<'_> {
    fn with(
        &mut self,
        shard: u32,
        f: impl FnOnce(&mut TapedShard, Nanos, &mut Fx<'_, Sim, SimNode>),
    ) {
        let now = self.now;
        call(self.node, shard, None, &mut self.out, |s, fx| f(s, now, fx));
    }

    fn shard<R>(&self, shard: u32, f: impl FnOnce(&mut TapedShard) -> R) -> R {
        self.node.shard(shard, |shard, _| f(shard))
    }
}

impl LogShards for Shards<'_> {
    fn records_waiting(&mut self, shard: u32) -> usize {
        self.shard(shard, |s| s.records_waiting())
    }

    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        self.shard(shard, |s| s.take_records(most, out));
    }

    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        self.shard(shard, |s| s.take_pages(most, out));
    }

    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        self.shard(shard, |s| s.emptied(out));
    }

    fn records_durable(&mut self, shard: u32) {
        self.with(shard, |s, now, fx| s.records_durable(now, fx));
    }

    fn records_lost(&mut self, shard: u32) {
        self.shard(shard, |s| s.records_lost());
    }

    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        self.shard(shard, |s| s.state(first, most, out));
    }

    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        self.node.changes.is_quiet(self.now, region) && self.shard(shard, |s| s.quiet(region))
    }

    fn intent_ready(&mut self, shard: u32, region: u32) {
        if shard != RANGE {
            self.with(shard, |s, now, fx| s.intent_ready(now, region, fx));
            return;
        }
        let node = self.node;
        self.bits.durable(region, |id| send(node, id, Message::IntentsReady));
    }

    fn flush_backing(&mut self, _region: u32) -> Result<(), IoFailed> {
        Ok(())
    }
}

impl BlockSim {
    /// Does what shards have left for the log's thread. Returns whether that was anything.
    pub(super) fn serve_log(&mut self) -> bool {
        let ForLog { out, bits } = self.node.for_log.take();
        let any = out.is_for_maintenance() || !bits.is_empty();
        let (now, line) = (self.world.now, u64::from(self.node.layout.line));
        for Fill { shard, io, slot, bytes: Blank(bytes) } in out.fills {
            self.charge(now, bytes);
            self.world.write(now, ShardIo { shard, io }, slot, (bytes / line) as u32);
        }
        for Copying { shard, io, from, to, lines } in out.copies {
            self.charge(now, u64::from(lines) * line);
            self.world.copy(ShardIo { shard, io }, from, to, lines);
        }
        for Load { shard, io, page } in out.loads {
            self.world.load(ShardIo { shard, io }, page);
        }
        self.log_wanted |= !out.asks.is_empty() || !bits.is_empty();
        for (shard, region) in out.asks {
            self.log.ask(shard, region);
        }
        for (op, first, last) in bits {
            self.range_bits.wait(op, first, last);
            (first..=last).for_each(|region| self.log.ask(RANGE, region));
        }
        match self.world.files {
            Some(_) => self.commit_wanted |= out.commit,
            None => self.log_wanted |= out.commit,
        }
        any
    }

    /// So many bytes of lines leave for the drive.
    fn charge(&self, now: Nanos, bytes: u64) {
        // (No budget of a simulation is kept in a file.)
        let _ = self.node.limits.charge(now, bytes);
    }

    /// Sees to it that the log has its turn if it has something to do. A step lasts as long as its writes and flushes,
    /// and counts as done at its end.
    pub(super) fn wake_log(&mut self, now: Nanos) {
        if std::mem::take(&mut self.log_wanted) {
            self.schedule_log(Nanos(now.0.max(self.log_free.0)) + self.flush);
        }
        // Every step writes each page that differs, however little: they are gathered.
        let soon = std::mem::take(&mut self.commit_wanted);
        if self.world.files.is_some() && (soon || self.pages_wait(1)) {
            let pace = if soon { COMMIT_PACE } else { RECORDS_PACE };
            self.schedule_log(Nanos(now.0.max(self.log_free.0)) + pace);
        }
    }

    /// Whether a shard has so many pages to be written.
    fn pages_wait(&self, count: usize) -> bool {
        self.node.any(|shard| shard.records_waiting() >= count)
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
        let (node, bits) = (&self.node, &mut self.range_bits);
        let mut shards = Shards { node, out: Out::default(), bits, now };
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
        let _ = self.node.limits.charge_log(now, self.map_bytes_written - before);
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
