//! Maintenance in virtual time: the server's machine, over a drive that keeps nothing, in the order of the engine's
//! [`round`](larder_engine::block::node::round).
//!
//! A round is as long as the log's writes and flushes in it. What it leaves for others, such as the bit that a write waits for, is
//! theirs when it is over; then it is looked which fills have ended, and the next round begins no earlier.

use larder_base::Nanos;
use larder_engine::block::node::calls::{Copying, Fill, Load};
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::event::ShardIo;
use larder_engine::block::node::failing::FlashError;
use larder_engine::block::node::limits::Limits;
use larder_engine::block::node::maintenance::{AtNode, Effects, Left, Turn, Work};
use larder_engine::block::node::record::RecordedMaintenance;
use larder_engine::block::node::round::{self, Rounds};
use larder_engine::block::{IoFailed, LogIo};
use larder_format::block::BlockSuperblock;
use larder_policy::block::VolumeId;

use super::BlockSim;
use super::node::{Blank, Sim, SimNode};
use super::sparse::Files;
use super::world::{Event, Kept, World};
use crate::device::drive::Drive;

/// The drive as the log uses it: what is written is not kept but for pages of a table, and what is read is as formatting leaves
/// it.
struct DriveIo<'a> {
    /// When what was asked for is done.
    now: Nanos,
    drive: &'a mut Drive,
    files: Option<&'a mut Files>,
    /// What a flush takes.
    flush: Nanos,
    written: u64,
}

impl LogIo for DriveIo<'_> {
    fn read(&mut self, _at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        out.fill(0);
        Ok(())
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        self.written += bytes.len() as u64;
        let done = match &mut self.files {
            Some(files) => files.write_meta(self.drive, self.now, at, bytes),
            None => self.drive.write(self.now, at, bytes.len() as u32),
        };
        self.now = Nanos(self.now.0.max(done.0));
        Ok(())
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        if let Some(files) = &mut self.files {
            files.punch(self.drive, self.now, at, len);
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        self.now = self.now + self.flush;
        Ok(())
    }
}

/// What a turn has asked for.
#[derive(Default)]
struct Begun {
    fills: Vec<Fill<Blank>>,
    copies: Vec<Copying>,
    loads: Vec<Load>,
    flushes: Vec<(VolumeId, u64)>,
}

impl Effects<Blank> for Begun {
    fn fill(&mut self, fill: Fill<Blank>) {
        self.fills.push(fill);
    }

    fn copy(&mut self, copying: Copying) {
        self.copies.push(copying);
    }

    fn load(&mut self, load: Load) {
        self.loads.push(load);
    }

    fn store_flush(&mut self, store: VolumeId, number: u64) {
        self.flushes.push((store, number));
    }

    /// (The drive does not fail, and a simulation has no end.)
    fn note_given_up(&mut self, _: &BlockSuperblock) -> Result<(), String> {
        Ok(())
    }
    fn disown(&mut self) {}
    fn given_up(&mut self, _: &str) {}
    fn identity(&mut self, _: &str) -> Option<[u8; 64]> {
        None
    }
}

impl BlockSim {
    /// Sees to it that maintenance has its round when something is to be done. Where nothing is, it has none at its ticks either: time
    /// may pass at once.
    pub(super) fn wake_log(&mut self, now: Nanos) {
        if self.log_idles {
            self.maintenance.idled(now);
        }
        let mut shards = AtNode::<Sim, SimNode>::new(&self.node, self.node.layout.shards);
        let inbox = self.node.inbox.borrow();
        self.log_idles = inbox.is_empty() && !self.maintenance.has_work(&mut shards);
        if self.log_idles {
            return;
        }
        let due = inbox.due(self.maintenance.wakes());
        let at = due.max(now).max(self.log_free);
        if self.log_due.is_none_or(|due| at < due) {
            self.log_due = Some(at);
            self.world.at(at, Event::Log);
        }
    }

    /// Maintenance's round.
    pub(super) fn step_log(&mut self, now: Nanos) {
        if self.log_due != Some(now) {
            // Superseded by an earlier one.
            return;
        }
        self.log_due = None;
        self.logged(now);
        let Left { work, .. } = self.node.inbox.borrow_mut().take();
        self.log_free = now;
        let mut working = Working { sim: self, now, begun: Begun::default() };
        round::round(&mut working, Left { work, tasks: Vec::new(), stop: false });
    }

    /// The I/O of maintenance's last turn is over: what it has left comes to those for whom it is, and the machine is told what has
    /// ended of what it has asked for.
    pub(super) fn logged(&mut self, now: Nanos) {
        if now < self.log_free {
            return;
        }
        if let Some(late) = self.late.take() {
            self.node.give(late);
            self.end_io(now);
        }
    }

    fn end_io(&mut self, now: Nanos) {
        let BlockSim { node, maintenance, world, .. } = self;
        let mut shards = AtNode::<Sim, SimNode>::new(node, node.layout.shards);
        while let Some(kept) = world.take_kept(now) {
            match kept {
                Kept::Written(io, lines) => {
                    let sums = lines.map(super::sums);
                    maintenance.flash_written(now, &mut shards, io, sums);
                }
                Kept::Loaded(io, page) => {
                    let slots = world.files.as_ref().map(|f| f.page(io.shard, page));
                    let slots = slots.as_deref().ok_or(FlashError::Damaged);
                    maintenance.page_loaded(now, &mut shards, io, slots);
                }
            }
        }
    }
}

/// Maintenance in a round.
struct Working<'a> {
    sim: &'a mut BlockSim,
    /// When the round has begun.
    now: Nanos,
    begun: Begun,
}

impl Working<'_> {
    /// Calls the machine; the log's I/O follows that of the round before it.
    fn at_work<R>(
        &mut self,
        f: impl FnOnce(
            &mut RecordedMaintenance,
            &mut AtNode<'_, Sim, SimNode>,
            &mut Charged<&mut DriveIo<'_>, &Limits>,
            &mut Begun,
        ) -> R,
    ) -> R {
        let BlockSim { node, maintenance, world, flush, log_free, map_bytes_written, late, .. } =
            &mut *self.sim;
        let World { drive, files, .. } = world;
        let mut drive =
            DriveIo { now: *log_free, drive, files: files.as_mut(), flush: *flush, written: 0 };
        // No budget of a simulation is kept in a file.
        let mut io = Charged::new(&mut drive, &node.limits, self.now);
        let mut shards = AtNode::<Sim, SimNode>::new(node, node.layout.shards);
        node.works(late.take().unwrap_or_default());
        let result = f(maintenance, &mut shards, &mut io, &mut self.begun);
        *late = Some(node.has_worked());
        *log_free = drive.now;
        *map_bytes_written += drive.written;
        result
    }
}

impl Rounds for Working<'_> {
    type Bytes = Blank;
    type Task = ();

    /// With the log's I/O so far.
    fn now(&self) -> Nanos {
        self.sim.log_free
    }

    fn machine(&mut self) -> &mut RecordedMaintenance {
        &mut self.sim.maintenance
    }

    fn take(&mut self, now: Nanos, work: Work<Blank>) {
        self.at_work(|machine, shards, io, fx| machine.take(now, work, shards, io, fx));
    }

    fn turn(&mut self, now: Nanos) -> Turn {
        self.at_work(|machine, shards, io, fx| machine.turn(now, shards, io, fx))
    }

    /// What a store of the simulation has answered is durable.
    fn next_flushed(&mut self) -> Option<(VolumeId, u64, bool)> {
        self.sim.flushed.pop_front().map(|(store, number)| (store, number, true))
    }

    fn begin_io(&mut self) {
        let line = u64::from(self.sim.node.layout.line);
        let world = &mut self.sim.world;
        for Fill { shard, io, slot, bytes: Blank(bytes), .. } in self.begun.fills.drain(..) {
            world.fill(self.now, ShardIo { shard, io }, slot, (bytes / line) as u32);
        }
        for Load { shard, io, page } in self.begun.loads.drain(..) {
            world.load_page(ShardIo { shard, io }, page);
        }
        for Copying { shard, io, from, to, lines } in self.begun.copies.drain(..) {
            world.copy(ShardIo { shard, io }, from, to, lines);
        }
    }

    /// Nobody operates a simulation.
    fn task(&mut self, (): ()) {}

    fn end_io(&mut self) {
        self.sim.flushed.extend(self.begun.flushes.drain(..));
        let free = self.sim.log_free;
        if free > self.now {
            self.sim.world.at(free, Event::Logged);
        } else {
            self.sim.logged(self.now);
        }
    }
}
