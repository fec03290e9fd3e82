//! Volumes that are put aside with what is dirty: the log keeps what it has of them, copies it out of the way as of others, and destages nothing.

use larder_base::Nanos;

use super::super::destager::Destager;
use super::super::throttle::Throttle;
use super::super::volume_log::VolumeLog;
use super::{Append, Asks, Attach, WriteLog};

impl<B: Clone> WriteLog<B> {
    /// Nothing of a volume is destaged from now on: it goes, and what is dirty stays. What is under way ends.
    pub fn put_aside(&mut self, attachment: u32) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.aside = true;
        }
        self.divide();
    }

    /// Nothing of a volume comes to its store any more, nor to its journal, since they are somebody else's; or again. What is under way ends.
    pub fn halt(&mut self, attachment: u32, halted: bool, asks: &mut Asks<B>) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.halted = halted;
            asks.steps.push(attachment);
        }
    }

    /// Whether that is so.
    pub fn is_halted(&self, attachment: u32) -> bool {
        self.volumes.get(&attachment).is_some_and(|volume| volume.halted)
    }

    /// Changes of a volume are not logged from now on, but answered as failed; or they are logged again.
    pub fn refuse(&mut self, attachment: u32, refuses: bool) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.refuses = refuses;
        }
    }

    /// Whether that is so.
    pub fn is_refused(&self, attachment: u32) -> bool {
        self.volumes.get(&attachment).is_some_and(|volume| volume.refuses)
    }

    /// A change of a volume comes.
    pub(super) fn wait_or_refuse(&mut self, append: Append<B>, asks: &mut Asks<B>) {
        match self.is_refused(append.attachment) {
            true => asks.answers.push((append.op, true)),
            false => self.waiting.push_back(append),
        }
    }

    /// A volume that was to be put aside stays: it is destaged again.
    pub fn resume(&mut self, attachment: u32, asks: &mut Asks<B>) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.aside = false;
            asks.steps.push(attachment);
        }
        self.closes_late(attachment);
        self.divide();
    }

    /// Whether nothing of a volume that is put aside is on its way: no client waits, and its store and journal are asked for nothing.
    pub fn is_settled(&self, attachment: u32) -> bool {
        let settled = |v: &super::Attached| {
            v.aside && v.destager.is_settled() && v.pending.is_empty() && v.noting.is_none()
        };
        self.volumes.get(&attachment).is_none_or(settled)
            && !self.waiting.iter().any(|append| append.attachment == attachment)
    }

    /// Whether all that is logged of a volume is durable.
    pub fn is_durable(&self, attachment: u32) -> bool {
        let last = |v: &super::Attached| v.log.batch_of(v.log.last());
        let last = self.volumes.get(&attachment).and_then(last);
        last.is_none_or(|batch| batch <= self.segments.durable())
    }

    /// Whether a volume is put aside here.
    pub fn is_aside(&self, attachment: u32) -> bool {
        self.volumes.get(&attachment).is_some_and(|volume| volume.aside)
    }

    /// A volume that was put aside is taken up, and writes back as `attach` says from now on. What was logged of it counts as promised: it
    /// is durable. Its order may be another only where nothing is dirty.
    pub fn take_up(&mut self, now: Nanos, attach: Attach, asks: &mut Asks<B>) {
        let attachment = attach.attachment;
        self.settle(attachment, attach.frontier);
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        let epoch = volume.destager.epoch().max(attach.epoch);
        if volume.log.is_clean() {
            volume.log = VolumeLog::new(attach.destage.order, volume.log.frontier());
        }
        volume.log.recovered();
        volume.generation = attach.generation;
        volume.refuses = false;
        volume.destager = Destager::new(attach.destage, epoch);
        volume.pace = attach.destage.pace;
        volume.throttle = Throttle::new(0, now);
        (volume.stated, volume.marker) = (attach.bound, attach.marker);
        (volume.age, volume.marked) = (attach.age, attach.marked);
        volume.stored = volume.stored.max(attach.frontier);
        (volume.untold, volume.aside) = (true, false);
        #[cfg(feature = "planted")]
        {
            let fault = self.fault;
            volume.log.plant(fault);
            volume.destager.plant(fault);
        }
        asks.steps.push(attachment);
        self.divide();
    }
}
