//! The two copies of a superblock: which is written, and what must be durable before it is.

use larder_format::Superblock;
use larder_format::superblock::Chosen;

use crate::kv::planted::Planted;

/// The pages at the head of a flash.
pub trait Heads {
    /// Why a page was not written, or nothing made durable.
    type Error;
    /// Writes one of the two copies. Where it fails, any part of it may have been written.
    ///
    /// # Errors
    /// If the flash does not take it.
    fn write(&mut self, copy: usize, superblock: &Superblock) -> Result<(), Self::Error>;
    /// Makes both durable as they were written.
    ///
    /// # Errors
    /// If the flash cannot.
    fn sync(&mut self) -> Result<(), Self::Error>;
}

/// The superblock in force and where it lies.
///
/// What must never happen is a power cut that takes both copies. So one is written only while the other is durable.
#[derive(Debug)]
pub struct Superblocks {
    current: Superblock,
    copy: usize,
    /// It is what a run has left that may have been killed before it was durable.
    doubtful: bool,
    #[cfg(feature = "planted")]
    fault: Option<Planted>,
}

impl Superblocks {
    /// Those that were found on a flash.
    pub fn found(chosen: Chosen) -> Superblocks {
        let Chosen { superblock: current, copy, .. } = chosen;
        Superblocks { doubtful: true, ..Superblocks::of(current, copy) }
    }

    /// Of a flash that is formatted: both copies are void, durably, and `first` is to be [written](Superblocks::write).
    pub fn formatted(first: Superblock) -> Superblocks {
        Superblocks::of(first, 1)
    }

    fn of(current: Superblock, copy: usize) -> Superblocks {
        Superblocks {
            current,
            copy,
            doubtful: false,
            #[cfg(feature = "planted")]
            fault: None,
        }
    }

    /// The one in force.
    pub fn current(&self) -> &Superblock {
        &self.current
    }

    /// Puts `next` into force, durably.
    ///
    /// # Errors
    /// If the flash does not take it: the one before stays, and no part of it has changed.
    pub fn write<H: Heads>(&mut self, heads: &mut H, next: Superblock) -> Result<(), H::Error> {
        if self.doubtful && !self.planted(Planted::SuperblockNotAwaited) {
            heads.sync()?;
        }
        self.doubtful = false;
        let other =
            if self.planted(Planted::SuperblockInPlace) { self.copy } else { 1 - self.copy };
        heads.write(other, &next)?;
        heads.sync()?;
        (self.copy, self.current) = (other, next);
        Ok(())
    }

    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Planted) {
        self.fault = Some(fault);
    }

    #[cfg(feature = "planted")]
    fn planted(&self, fault: Planted) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(feature = "planted"))]
    #[inline(always)]
    fn planted(&self, _: Planted) -> bool {
        false
    }
}
