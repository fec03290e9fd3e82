//! What the write budget makes of volumes that write back ([`economy`](super::super::economy)).

use larder_base::Nanos;
use larder_policy::budget::Means;

use super::super::economy::Economy;
use super::{Asks, Attached, WriteLog};

impl<B: Clone> WriteLog<B> {
    /// The write budget has this now.
    pub fn afford(&mut self, now: Nanos, means: Means, asks: &mut Asks<B>) {
        if !self.economy.hear(now, means) {
            return;
        }
        let slow = self.economy.is_slow();
        self.volumes.values_mut().for_each(|volume| volume.slow = slow);
        // What waits is due at another time now.
        asks.steps.extend(self.volumes.keys());
        self.acknowledge(now, asks);
    }

    /// What the write budget makes of it.
    pub fn economy(&self) -> &Economy {
        &self.economy
    }
}

impl Attached {
    /// The write budget has it answer no faster than its store. Not one whose store is away, or of which nothing comes to the store before something is
    /// written again, which would hold its clients up; nor one whose epochs end at marks, which may not come before more is written.
    pub(super) fn is_slowed(&self) -> bool {
        let away = self.destager.failures() > 0 || self.aside || self.halted;
        let away = away || self.awaits_look().is_some();
        let away = away || self.closing.is_some() || self.log.unreadable_bytes() > 0;
        self.slow && !away && !self.wants_marks()
    }

    /// What it is to hold at most.
    pub(super) fn bound_now(&self, now: Nanos) -> u64 {
        match self.is_slowed() {
            true => self.throttle.slowed_bound(now),
            false => self.throttle.bound(),
        }
    }
}
