//! What steps of an operator's work have in common, and what every host supplies for them.
//!
//! A host implements [`OperatorIo`], and for each kind of operation that it has the trait of that kind, in which is what only a host has: sessions,
//! files, its lists of volumes, words. In which order that is asked for, how long is waited, and what follows from what came of it is said here
//! and in the modules of the kinds. Nothing here blocks but what the host does so: who may not block says that something is not there yet, and is
//! asked again after an [`Ask::Pause`].

use larder_base::Nanos;
use larder_format::block::BlockSuperblock;

use super::super::super::log::LogIo;
use super::super::attachment::Attachment;
use super::super::charged::{Charged, Charges};
use super::super::maintenance::{Effects, Shards};
use super::super::record::RecordedMaintenance;
use super::{Ask, NotDone, Operation};

/// Between two looks at bits that are to go.
pub(super) const BITS: Nanos = Nanos::from_millis(20);
/// So often is looked at one time. What has not come about by then does not where time stands.
const LOOKS: u32 = 1000;

/// What an operation waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// So many clients are to leave.
    Clients(u64),
    /// What is under way in lines is to end.
    Lines,
    /// So many regions are to become durable.
    Bits(u64),
}

/// What came of a change of the superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// The volume was as it was when this was planned. Otherwise nothing has changed.
    pub applied: bool,
    /// It is durable: not where the cache is given up, by this too.
    pub durable: bool,
}

impl Recorded {
    /// What must have come of it where what was planned holds for the volume as it was.
    pub(super) fn is_applied(self) -> Result<(), NotDone> {
        if self.applied { Ok(()) } else { Err(NotDone::Overtaken) }
    }
}

/// What every host supplies.
pub trait OperatorIo {
    /// Why something cannot be done, in the host's words. The operation is given up then.
    type Error;
    /// The time.
    fn now(&self) -> Nanos;
    /// Whether who asked waits on.
    fn goes_on(&mut self, waits: Waits) -> bool;
    /// Whether the cache is in use.
    fn is_enabled(&self) -> bool;
    /// Where the map's log is: [`Change::make`], and whatever of the host's own goes with the change, before anybody else can make one.
    ///
    /// # Errors
    /// When nothing was done.
    fn record(&mut self, change: Change) -> Result<Recorded, Self::Error>;
    /// Where the map's log is: [`Maintenance::hurry`](super::super::maintenance::Maintenance::hurry).
    ///
    /// # Errors
    /// When nothing was done.
    fn hurry(&mut self, regions: (u32, u32)) -> Result<u64, Self::Error>;
}

/// What a host has for a volume whose store is to be durable.
pub trait StoreIo: OperatorIo {
    /// All that was written to its store before, by anybody, becomes durable, and what must be known of it then.
    ///
    /// # Errors
    /// When it does not.
    fn make_durable(&mut self) -> Result<(), Self::Error>;
}

/// What an operation changes in the superblock.
#[derive(Clone, Debug)]
pub struct Change(pub(super) Option<Box<Attachment>>);

impl Change {
    /// The volume's way, of an operation that is one.
    pub fn way(&self) -> Option<&Attachment> {
        self.0.as_deref()
    }

    /// Whether the durable map begins anew with it: see [`Attachment::is_anew`].
    pub fn is_anew(&self) -> bool {
        self.way().is_none_or(Attachment::is_anew)
    }

    /// Whether it could be made now: the volume is as it was when this was planned. `line_space` is the superblock in force, or what the cache had
    /// when it was given up.
    pub fn holds(&self, line_space: Option<&BlockSuperblock>) -> bool {
        let applies = |way: &Attachment, sb: &BlockSuperblock| way.apply(&mut sb.clone());
        self.way().zip(line_space).is_none_or(|(way, sb)| applies(way, sb))
    }

    /// Makes it. Where the cache was given up it is made in memory alone.
    pub fn make<B>(
        &self,
        machine: &mut RecordedMaintenance,
        now: Nanos,
        shards: &mut impl Shards,
        io: &mut Charged<impl LogIo, impl Charges>,
        fx: &mut impl Effects<B>,
    ) -> Recorded {
        let mut applied = false;
        let change = |sb: &mut BlockSuperblock| {
            applied = self.way().is_none_or(|attachment| attachment.apply(sb));
        };
        let durable = machine.change_superblock(now, self.is_anew(), shards, io, fx, change);
        Recorded { applied, durable }
    }
}

impl Operation {
    /// Whether something that is looked at again and again does not come about, since time stands.
    pub(super) fn is_in_vain(&mut self, now: Nanos) -> bool {
        if self.looked != now {
            (self.looked, self.looks) = (now, 0);
        }
        self.looks += 1;
        self.looks >= LOOKS
    }

    /// [`Step::Record`](super::super::attachment::Step::Record). `must` says what has to have come of it.
    pub(super) fn record<I: OperatorIo>(
        &mut self,
        io: &mut I,
        must: impl FnOnce(Recorded) -> Result<(), NotDone>,
    ) -> Result<Ask, I::Error> {
        let recorded = io.record(self.change())?;
        self.is_recorded = recorded.durable;
        if let Err(why) = must(recorded) {
            return Ok(Ask::GiveUp(why));
        }
        self.done();
        Ok(Ask::Again)
    }

    /// [`Step::Bits`](super::super::attachment::Step::Bits): where the cache is given up no bit stands for anything any more.
    pub(super) fn hurry_bits<I: OperatorIo>(
        &mut self,
        regions: (u32, u32),
        io: &mut I,
    ) -> Result<Ask, I::Error> {
        let left = io.hurry(regions)?;
        let now = io.now();
        let waits = io.is_enabled() && (left == 0 || io.goes_on(Waits::Bits(left)));
        let waits = waits && !self.is_in_vain(now);
        self.bits(now, left, waits);
        Ok(Ask::Again)
    }
}
