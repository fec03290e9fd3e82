//! Maintenance in virtual time: the server's machine, over a drive that keeps nothing.
//!
//! It has its turns when a server's has them. A run may have years, so that ticks at which nothing is to be done are left out, but for the last before
//! something is: that one says when the next is.
//!
//! A turn is as long as its writes and flushes. What it leaves for others, such as the bit that a write waits for, is theirs
//! when it is over, and the next turn begins no earlier.

use larder_base::Nanos;
use larder_engine::block::node::calls::{Copying, Fill, Load};
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::event::ShardIo;
use larder_engine::block::node::maintenance::{AtNode, Effects, Turn};
use larder_engine::block::{IoFailed, LogIo};
use larder_format::block::BlockSuperblock;
use larder_policy::block::VolumeId;

use super::BlockSim;
use super::node::{Blank, Sim, SimNode};
use super::sparse::Files;
use super::world::{Event, World};
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
    fn note_given_up(&mut self, _: &BlockSuperblock) -> bool {
        true
    }
    fn disown(&mut self) {}
    fn given_up(&mut self, _: &str) {}
    fn identity(&mut self, _: &str) -> Option<[u8; 64]> {
        None
    }
}

impl BlockSim {
    /// Sees to it that maintenance has its turn when something is to be done.
    pub(super) fn wake_log(&mut self, now: Nanos) {
        let due = self.node.inbox.borrow().due();
        let mut shards = AtNode::<Sim, SimNode>::new(&self.node, self.node.layout.shards);
        // A turn takes what was left for it, too, whether that is due or not.
        let works = due.is_some() || self.maintenance.has_work(&mut shards);
        let own = works.then_some(self.log_next);
        if let Some(at) = due.into_iter().chain(own).min() {
            let at = Nanos(at.0.max(now.0).max(self.log_free.0));
            if self.log_due.is_none_or(|due| at < due) {
                self.log_due = Some(at);
                self.world.at(at, Event::Log);
            }
        }
    }

    /// Maintenance's turn.
    pub(super) fn step_log(&mut self, now: Nanos) {
        if self.log_due != Some(now) {
            // Superseded by an earlier turn.
            return;
        }
        self.log_due = None;
        self.logged(now);
        let mut begun = Begun::default();
        let (node, machine) = (&self.node, &mut self.maintenance);
        let World { drive, files, .. } = &mut self.world;
        let mut drive =
            DriveIo { now, drive, files: files.as_mut(), flush: self.flush, written: 0 };
        // No budget of a simulation is kept in a file.
        let mut io = Charged::new(&mut drive, &node.limits, now);
        let mut shards = AtNode::<Sim, SimNode>::new(node, node.layout.shards);
        let work = node.inbox.borrow_mut().take();
        node.works();
        machine.take(now, work, &mut shards, &mut io, &mut begun);
        self.log_next = match machine.turn(now, &mut shards, &mut io, &mut begun) {
            Turn::Again | Turn::Over { .. } => now,
            Turn::At(at) => at,
        };
        self.log_free = drive.now;
        self.map_bytes_written += drive.written;
        let late = self.node.has_worked();
        self.carry_out(now, begun);
        if self.log_free > now {
            self.late = Some(late);
            self.world.at(self.log_free, Event::Logged);
        } else {
            self.node.give(late);
        }
    }

    fn carry_out(&mut self, now: Nanos, begun: Begun) {
        let line = u64::from(self.node.layout.line);
        for Fill { shard, io, slot, bytes: Blank(bytes), .. } in begun.fills {
            self.world.write(now, ShardIo { shard, io }, slot, (bytes / line) as u32, true);
        }
        for Load { shard, io, page } in begun.loads {
            self.world.load_page(ShardIo { shard, io }, page, true);
        }
        for Copying { shard, io, from, to, lines } in begun.copies {
            self.world.copy(ShardIo { shard, io }, from, to, lines);
        }
        // What a store of the simulation has answered is durable.
        for (store, number) in begun.flushes {
            self.maintenance.store_flushed(now, store, number, true);
        }
    }

    /// If the I/O of maintenance's last turn is over, what it has left comes to those for whom it is.
    pub(super) fn logged(&mut self, now: Nanos) {
        if now >= self.log_free
            && let Some(late) = self.late.take()
        {
            self.node.give(late);
        }
    }
}
