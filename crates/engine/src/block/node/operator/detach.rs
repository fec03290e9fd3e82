//! A volume goes, step by step.
//!
//! | step | is |
//! | --- | --- |
//! | clients leave | waited for as long as who asked waits |
//! | it is closed | from here on nobody begins anything, whatever becomes of the operation; given up, it is open again |
//! | lines | what was under way ends |
//! | bits go | what its store has lost is dropped before; who asked may wait no longer: then bits stay |
//! | record | its store is known by what it is now, behind all that was made durable |
//! | in force | it is among the volumes no more; then its selection, its store's flushes, and its sessions go |

use larder_base::Nanos;

use super::super::attachment::Step;
use super::steps::{OperatorIo, Waits};
use super::{Ask, NotDone, Operation};

/// Between two looks at whether clients have left.
const CLIENTS: Nanos = Nanos::from_millis(100);

/// What a host has for a volume that goes.
pub trait DetachIo: OperatorIo {
    /// Clients that use it.
    fn clients(&mut self) -> u64;
    /// Who asks something of it from now on is refused.
    fn close(&mut self);
    /// It stays after all, and its clients too.
    fn reopen(&mut self);
    /// If its store may have lost writes that it had answered, what is cached of them is dropped and clients hear of it, as far as that goes now. (An
    /// [operation](Operation::losses) of its own.)
    fn settle_losses(&mut self);
    /// What its store is known by, as of now: zeros if that cannot be found out, by which it is never known again.
    fn identity(&mut self) -> [u8; 64];
    /// It is among the volumes no more, and no line is its own.
    fn remove(&mut self);
    /// Nothing is selected by its number any more. (By its name it is.)
    fn deselect(&mut self);
    /// Where the map's log is: [`Maintenance::forget_store`](super::super::maintenance::Maintenance::forget_store).
    fn forget_store(&mut self);
    /// Sessions with its store, its admission, and whatever else there is of it ends.
    fn end(&mut self);
}

impl Operation {
    /// Does a step of a [volume that goes](super::super::attachment::Attachment::detach). Returns what is next.
    ///
    /// # Errors
    /// Those of the host. It is to be given up, as by [`Ask::GiveUp`]; then [`Operation::detach_given_up`].
    pub fn detach_step<I: DetachIo>(&mut self, step: Step, io: &mut I) -> Result<Ask, I::Error> {
        match step {
            Step::Clients => match io.clients() {
                0 => {}
                clients if io.goes_on(Waits::Clients(clients)) => return Ok(Ask::Pause(CLIENTS)),
                _ => return Ok(Ask::GiveUp(NotDone::Unwanted)),
            },
            Step::Close => io.close(),
            Step::Bits { first, last } => {
                io.settle_losses();
                return self.hurry_bits((first, last), io);
            }
            Step::Record => {
                self.known_by(io.identity());
                // (One that is not there has gone.)
                return self.record(io, |_| Ok(()));
            }
            Step::InForce => {
                io.remove();
                io.deselect();
                // The log asks for the flush of a store that has an owner. Forgotten before, its flushes would be numbered anew, and one that was
                // under way would be taken for one that began later.
                io.forget_store();
                io.end();
            }
            _ => {}
        }
        self.done();
        Ok(Ask::Again)
    }

    /// It was given up: nothing was recorded, and the volume is in use as before.
    pub fn detach_given_up(&self, io: &mut impl DetachIo) {
        io.reopen();
    }
}
