//! What keeps lines from flash: the operator's rule, a full file system, the write budget. As a daemon asks for it.

use larder_base::{ByteSize, Nanos};
use larder_engine::block::node::backoff::Backoff;
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::failing::Failures;
use larder_engine::block::node::limits::Limits;
use larder_policy::budget::{KeptBudget, WriteBudget, WriteBudgetConfig, YEAR_SECONDS};

use super::{FAILURES, LINE, World};
use crate::device::Io;
use crate::parts::{Event, Purse};

/// The device for the time of a call, and who is charged.
pub(super) type Charging = Charged<Io, Purse>;

impl World {
    /// A process begins with what the file of the budget says.
    pub(super) fn begin_limits(&mut self) {
        let pauses = Backoff::new(Nanos::from_millis(4), Nanos::from_millis(32));
        let size = ByteSize(self.layout.capacity() * LINE);
        let budget = self.budgeted.then(|| {
            // A line each 2 ms.
            let rate = LINE as f64 * 500.0;
            let config = WriteBudgetConfig {
                tbw: Some(ByteSize((rate * YEAR_SECONDS) as u64)),
                years: 1.0,
                device_write_amplification: 1.0,
                ..WriteBudgetConfig::default()
            };
            let budget = WriteBudget::new(&config, size, self.purse.file(), self.now());
            let budget = budget.expect("a budget");
            // So little that queues often wait for more.
            let kept = KeptBudget::new(&budget, size, LINE).with_ahead(LINE);
            (budget, Some(kept))
        });
        let mut limits = Limits::new(budget, pauses);
        limits.failures = Failures::of(FAILURES);
        self.purse.begin(limits);
        let charged = self.budgeted.then(|| self.purse.clone());
        self.device.borrow_mut().charges(charged);
    }

    /// Every byte that is written is charged, and nothing else.
    pub(super) fn check_charged(&self) {
        let bytes = |event: &Event| match event {
            Event::FlashWrite(_, _, bytes) => u64::from(bytes.lines().1) * LINE,
            Event::Copy(.., lines) => u64::from(*lines) * LINE,
            Event::Merge(..) => LINE,
            Event::FlashRead(..)
            | Event::Load(..)
            | Event::BackingRead(..)
            | Event::BackingChange(..) => 0,
        };
        let under_way = self.doing.iter().filter(|d| d.landed.is_none());
        let under_way = under_way.map(|d| bytes(&d.event)).sum();
        self.device.borrow_mut().check_charged(under_way);
    }

    /// Whether the file system has no room for lines.
    pub(super) fn finds_no_space(&mut self) -> bool {
        self.fills_up && !self.draining && self.rng.chance(0.1)
    }
}
