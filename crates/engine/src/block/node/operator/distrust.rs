//! What a store is no longer trusted with, step by step: its server may have lost writes that it had answered, or somebody else has changed it.
//!
//! - **Losses.** While nothing is under way in the volume's lines it is noted how many losses the store knows of, then it is asked which regions
//!   were not flushed: a loss that comes in between is not taken for settled. What is cached of them leaves the map; then clients are told, while
//!   nothing begins. A power cut does not bring the lines back: the regions keep their bits until they are flushed.
//! - **Changes.** All lines of the volume leave the map, and then, durably, the durable map; those too that were evicted lately. Only then does the
//!   store hear of it: until then its notes say that nothing is proved.

use larder_format::block::Layout;

use super::super::attachment::Step;
use super::steps::OperatorIo;
use super::{Ask, NotDone, Operation};
use crate::block::api::LineId;

/// What a host has for a volume whose store may have lost writes.
pub trait LossesIo: OperatorIo {
    /// Where regions are.
    fn layout(&self) -> Layout;
    /// Whether the lines are the volume's own still: it may have moved before they were given. While they are it cannot.
    fn is_there(&mut self) -> bool;
    /// How often its store may have lost writes that it had answered.
    fn losses(&mut self) -> u64;
    /// Where the map's log is: [`Maintenance::unflushed`](super::super::maintenance::Maintenance::unflushed).
    ///
    /// # Errors
    /// When that cannot be asked.
    fn unflushed(&mut self, regions: (u32, u32)) -> Result<Vec<(u32, u32)>, Self::Error>;
    /// So many of the store's losses are settled: clients are told of them, and answers that wait for that go out. `dropped` lines have left the map.
    fn settle(&mut self, losses: u64, dropped: u64);
}

/// What a host has for a volume whose store somebody else has changed.
pub trait ChangedIo: OperatorIo {
    /// All lines have left the map, so many.
    fn say_dropped(&mut self, dropped: u64);
    /// It is not looked at these changes any more. The store is told that nothing is cached of what it had, if that is `durable`: where the cache was
    /// given up on the way it is not.
    fn accounted(&mut self, durable: bool);
}

impl Operation {
    /// Does a step of [what follows from losses](Operation::losses). Returns what is next.
    ///
    /// # Errors
    /// Those of the host. It is to be given up, as by [`Ask::GiveUp`], and asked for again another time.
    pub fn losses_step<I: LossesIo>(&mut self, step: Step, io: &mut I) -> Result<Ask, I::Error> {
        match step {
            Step::Losses { first, last } => {
                if !io.is_there() {
                    return Ok(Ask::GiveUp(NotDone::Overtaken));
                }
                self.losses = io.losses();
                let layout = io.layout();
                let region = |line: LineId| (line.group().0 / layout.region_groups) as u32;
                let runs = io.unflushed((region(first), region(last)))?;
                self.unflushed(&runs, &layout);
                return Ok(Ask::Again);
            }
            Step::InForce => io.settle(self.losses, self.dropped()),
            _ => {}
        }
        self.done();
        Ok(Ask::Again)
    }

    /// Does a step of [what follows from others' changes](Operation::changed). Returns what is next.
    ///
    /// # Errors
    /// Those of the host. It is to be given up, as by [`Ask::GiveUp`], and asked for again another time.
    pub fn changed_step<I: ChangedIo>(&mut self, step: Step, io: &mut I) -> Result<Ask, I::Error> {
        match step {
            Step::Record => {
                io.say_dropped(self.dropped());
                return self.record(io, |_| Ok(()));
            }
            Step::InForce => io.accounted(self.is_recorded()),
            _ => {}
        }
        self.done();
        Ok(Ask::Again)
    }
}
