//! What maintenance and a start write to the cache device, charged to the write budget where it leaves them.
//!
//! Lines are charged when they are asked for, the map's log with each write of its own: before the device has it. What queues
//! write they pay for themselves, and who is in here writes down what they may. So no host charges anything, and none forgets to.
//! Where the budget's file cannot be written everything goes on ([`KeptBudget::kept`](larder_policy::budget::KeptBudget::kept)).

use larder_base::Nanos;
use larder_policy::budget::BudgetState;

use super::limits::Limits;
use crate::block::api::IoFailed;
use crate::block::log::LogIo;

/// The write budget, and the file that it is kept in.
pub trait Charges {
    /// The budget.
    fn limits(&self) -> &Limits;
    /// The budget's file is to say this before anything else is written to flash. Returns false if it does not: what that means is
    /// decided here ([`Limits::kept`]). Only the thread that owns maintenance is asked for it, and it may block.
    fn keep_budget(&self, state: BudgetState) -> bool;
}

/// The last word of a run, when nothing is written any more.
pub fn save(charges: &impl Charges, now: Nanos) {
    keep(charges, now, charges.limits().state(now));
}

fn keep(charges: &impl Charges, now: Nanos, due: Option<BudgetState>) {
    if let Some(state) = due {
        let written = charges.keep_budget(state);
        charges.limits().kept(now, state, written);
    }
}

/// A budget that is kept in no file.
impl Charges for Limits {
    fn limits(&self) -> &Limits {
        self
    }

    fn keep_budget(&self, _: BudgetState) -> bool {
        true
    }
}

impl<C: Charges> Charges for &C {
    fn limits(&self) -> &Limits {
        (**self).limits()
    }

    fn keep_budget(&self, state: BudgetState) -> bool {
        (**self).keep_budget(state)
    }
}

/// The cache device for the time of a call, and who pays for what is written there.
pub struct Charged<I, C> {
    pub(super) io: I,
    pub(super) charges: C,
    pub(super) now: Nanos,
}

impl<I, C: Charges> Charged<I, C> {
    /// `io` is the device as the map's log uses it; the call is at `now`.
    pub fn new(io: I, charges: C, now: Nanos) -> Charged<I, C> {
        Charged { io, charges, now }
    }

    /// So many lines of `line_bytes` bytes leave for flash.
    pub(super) fn lines(&self, lines: u32, line_bytes: u32) {
        let bytes = u64::from(lines) * u64::from(line_bytes);
        keep(&self.charges, self.now, self.charges.limits().charge(self.now, bytes));
    }

    /// More of the budget is written down, if it is time for that.
    pub(super) fn claim(&self) {
        keep(&self.charges, self.now, self.charges.limits().due(self.now));
    }
}

impl<I: LogIo, C: Charges> LogIo for Charged<I, C> {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        self.io.read(at, out)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        let due = self.charges.limits().charge_log(self.now, bytes.len() as u64);
        keep(&self.charges, self.now, due);
        self.io.write(at, bytes)
    }

    fn flush(&mut self) -> Result<(), IoFailed> {
        self.io.flush()
    }

    fn punch(&mut self, at: u64, len: u64) -> Result<(), IoFailed> {
        self.io.punch(at, len)
    }

    fn next_data(&mut self, at: u64) -> Option<u64> {
        self.io.next_data(at)
    }
}
