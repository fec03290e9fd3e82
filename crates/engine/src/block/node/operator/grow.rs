//! A volume grows, step by step, and moves if it must.
//!
//! | step | is |
//! | --- | --- |
//! | hold | of one that moves: nobody begins anything on it until the operation is over or given up, and what was begun ends, or it is late |
//! | store | durable; what it is known by is asked behind it, since it must not forget what is remembered here |
//! | lines, bits | of where it lay, and lines of where it will lie |
//! | record | overtaken, if the volume is not as it was |
//! | in force | its place, of which no line is cached; its size; then who waits goes on |

use larder_base::Nanos;

use super::super::attachment::{Attachment, Step};
use super::steps::{Recorded, StoreIo};
use super::{Ask, NotDone, Operation};

/// Between two looks at whether what was begun has ended.
const HELD: Nanos = Nanos::from_millis(1);

/// What a host has for a volume that grows.
pub trait GrowIo: StoreIo {
    /// Who comes waits from now on. It may be asked for again.
    fn hold(&mut self);
    /// Whether anything is under way that has begun before.
    fn is_used(&mut self) -> bool;
    /// Who waits goes on.
    fn release(&mut self);
    /// What its store is known by, as of now.
    ///
    /// # Errors
    /// When that cannot be found out.
    fn identity(&mut self) -> Result<[u8; 64], Self::Error>;
    /// It lies elsewhere, from this group on: no line of it is cached.
    fn moved(&mut self, first_group: u64);
    /// It has so many bytes.
    fn grown(&mut self, bytes: u64);
}

impl Operation {
    /// Does a step of a [volume that grows](Attachment::grow). Returns what is next.
    ///
    /// # Errors
    /// Those of the host. It is to be given up, as by [`Ask::GiveUp`]; then [`Operation::grow_given_up`].
    pub fn grow_step<I: GrowIo>(&mut self, step: Step, io: &mut I) -> Result<Ask, I::Error> {
        match step {
            Step::Hold => {
                io.hold();
                if io.is_used() {
                    let late = self.is_in_vain(io.now());
                    return Ok(if late { Ask::GiveUp(NotDone::Late) } else { Ask::Pause(HELD) });
                }
            }
            Step::Store => {
                io.make_durable()?;
                self.known_by(io.identity()?);
            }
            Step::Bits { first, last } => return self.hurry_bits((first, last), io),
            Step::Record => return self.record(io, Recorded::is_applied),
            Step::InForce => {
                if let Some((growth, bytes)) = self.way().and_then(Attachment::grows) {
                    if growth.moves_from.is_some() {
                        io.moved(growth.first_group);
                    }
                    io.grown(bytes);
                }
                self.release(io);
            }
            _ => {}
        }
        self.done();
        Ok(Ask::Again)
    }

    fn release(&self, io: &mut impl GrowIo) {
        if self.way().is_some_and(Attachment::moves) {
            io.release();
        }
    }

    /// It was given up: the volume lies where it lay, and has the size that it had.
    pub fn grow_given_up(&self, io: &mut impl GrowIo) {
        self.release(io);
    }
}
