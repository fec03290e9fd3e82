//! The cache device in memory, and the write budget with its file.

use std::cell::{Cell, RefCell};

use larder_base::Nanos;
use larder_engine::block::node::charged::{self, Charged, Charges};
use larder_engine::block::node::limits::Limits;
use larder_engine::block::node::setup;
use larder_engine::block::{IoFailed, LogIo};
use larder_format::block::Layout;
use larder_policy::budget::{BudgetError, BudgetState};

use super::super::spec::Block;
use super::bytes::Carried;

/// A device that takes no time, the write budget, and what the budget's file says.
pub(super) struct Medium {
    pub flash: RefCell<Vec<u8>>,
    pub limits: Limits,
    /// The budget's file.
    pub file: Cell<Option<BudgetState>>,
}

impl Charges for Medium {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn keep_budget(&self, state: BudgetState) -> bool {
        self.file.set(Some(state));
        true
    }
}

impl Medium {
    /// `file`: what the last run has left.
    ///
    /// # Errors
    /// A budget that cannot be meant.
    pub(super) fn new(
        flash: Vec<u8>,
        layout: &Layout,
        spec: &Block,
        file: Option<BudgetState>,
    ) -> Result<Medium, BudgetError> {
        Ok(Medium {
            flash: RefCell::new(flash),
            limits: setup::limits(&spec.write_budget, layout, file, true)?,
            file: Cell::new(file),
        })
    }

    pub(super) fn read<B: Carried>(&self, at: u64, len: u64) -> B {
        B::read(&self.flash.borrow(), at, len)
    }

    pub(super) fn write(&self, at: u64, bytes: &impl Carried) {
        bytes.write(&mut self.flash.borrow_mut(), at);
    }

    /// The last word of a run.
    pub(super) fn save(&self, now: Nanos) {
        charged::save(self, now);
    }
}

/// The device as the log uses it.
pub(super) struct MediumIo<'a>(&'a Medium);

impl MediumIo<'_> {
    pub(super) fn of(medium: &Medium, now: Nanos) -> Charged<MediumIo<'_>, &Medium> {
        Charged::new(MediumIo(medium), medium, now)
    }
}

impl LogIo for MediumIo<'_> {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        let flash = self.0.flash.borrow();
        out.copy_from_slice(&flash[at as usize..at as usize + out.len()]);
        Ok(())
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        let mut flash = self.0.flash.borrow_mut();
        flash[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        Ok(())
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        self.0.flash.borrow_mut()[at as usize..(at + len) as usize].fill(0);
        Ok(())
    }
}
