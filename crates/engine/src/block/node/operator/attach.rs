//! A volume comes, step by step.
//!
//! | step | is |
//! | --- | --- |
//! | store | durable, whoever has written to it before. That may take long: then it is looked whether the plan still holds |
//! | lines | of whoever had its stretch before leave the map |
//! | record | overtaken, if another volume has come, grown or gone so that the plan holds no more: who asked plans anew |
//! | in force | it is among the volumes; then what was selected of it earlier is selected again |
//!
//! Where the cache is given up on the way it comes all the same, without a cache: its lines are what changes exclude each other by.

use super::super::attachment::Step;
use super::steps::{Change, Recorded, StoreIo};
use super::{Ask, NotDone, Operation};

/// What a host has for a volume that comes.
pub trait AttachIo: StoreIo {
    /// Where the map's log is: [`Change::holds`].
    ///
    /// # Errors
    /// When that cannot be asked.
    fn holds(&mut self, change: Change) -> Result<bool, Self::Error>;
    /// It is among the volumes, and has its lines.
    fn add(&mut self);
    /// What was selected earlier under its name is selected of it: [`Kept::restore`](super::select::Kept::restore). Of others nothing changes.
    fn restore_selection(&mut self);
}

impl Operation {
    /// Does a step of a [volume that comes](super::super::attachment::Attachment::attach). Returns what is next.
    ///
    /// # Errors
    /// Those of the host. It is to be given up, as by [`Ask::GiveUp`].
    pub fn attach_step<I: AttachIo>(&mut self, step: Step, io: &mut I) -> Result<Ask, I::Error> {
        match step {
            Step::Store => {
                io.make_durable()?;
                // Lines that are another volume's by now are not waited for, nor dropped.
                if !io.holds(self.change())? {
                    return Ok(Ask::GiveUp(NotDone::Overtaken));
                }
            }
            Step::Record => return self.record(io, Recorded::is_applied),
            Step::InForce => {
                // Before anybody can select anything of it.
                io.restore_selection();
                io.add();
            }
            _ => {}
        }
        self.done();
        Ok(Ask::Again)
    }
}
