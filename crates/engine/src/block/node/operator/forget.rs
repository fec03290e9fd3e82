//! A volume that was put aside is forgotten, step by step: its lines leave the map, then the superblock knows it no more, then nothing is
//! selected under its name.

use super::super::attachment::Step;
use super::steps::{OperatorIo, Recorded};
use super::{Ask, NotDone, Operation};

/// What a host has for a volume that is forgotten.
pub trait ForgetIo: OperatorIo {
    /// What was selected of it is not kept any more.
    ///
    /// # Errors
    /// When that cannot be made so: should the volume come back, it holds again.
    fn forget_selection(&mut self) -> Result<(), Self::Error>;
}

impl Operation {
    /// Does a step of a [volume that is forgotten](super::super::attachment::Attachment::forget). Returns what is next.
    ///
    /// # Errors
    /// Those of the host. It is to be given up, as by [`Ask::GiveUp`].
    pub fn forget_step<I: ForgetIo>(&mut self, step: Step, io: &mut I) -> Result<Ask, I::Error> {
        match step {
            Step::Record => {
                let durable = |recorded: Recorded| {
                    recorded.is_applied()?;
                    if recorded.durable { Ok(()) } else { Err(NotDone::GivenUp) }
                };
                return self.record(io, durable);
            }
            Step::InForce => io.forget_selection()?,
            _ => {}
        }
        self.done();
        Ok(Ask::Again)
    }
}
