//! What maintenance and a start write to the cache device, charged to the write budget where it leaves them.
//!
//! Lines are charged when they are asked for, the map's log with each write of its own: before the device has it. What queues
//! write they pay for themselves, and who is in here writes down what they may. So no host charges anything, and none forgets to.

use larder_base::Nanos;
use larder_policy::budget::BudgetState;

use super::limits::Limits;
use crate::block::api::IoFailed;
use crate::block::log::LogIo;

/// The write budget, and the file that it is kept in.
pub trait Charges {
    /// The budget.
    fn limits(&self) -> &Limits;
    /// The budget's file is to say this before anything else is written to flash; then [`Limits::kept`]. Only the thread that owns
    /// maintenance is asked for it, and it may block.
    fn keep_budget(&self, now: Nanos, state: BudgetState);
}

/// A budget that is kept in no file.
impl Charges for Limits {
    fn limits(&self) -> &Limits {
        self
    }

    fn keep_budget(&self, _: Nanos, _: BudgetState) {}
}

impl<C: Charges> Charges for &C {
    fn limits(&self) -> &Limits {
        (**self).limits()
    }

    fn keep_budget(&self, now: Nanos, state: BudgetState) {
        (**self).keep_budget(now, state);
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
        self.keep(self.charges.limits().charge(self.now, bytes));
    }

    /// More of the budget is written down, if it is time for that.
    pub(super) fn claim(&self) {
        self.keep(self.charges.limits().due(self.now));
    }

    fn keep(&self, due: Option<BudgetState>) {
        if let Some(state) = due {
            self.charges.keep_budget(self.now, state);
        }
    }
}

impl<I: LogIo, C: Charges> LogIo for Charged<I, C> {
    fn read(&mut self, at: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        self.io.read(at, out)
    }

    fn write(&mut self, at: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        self.keep(self.charges.limits().charge_log(self.now, bytes.len() as u64));
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
