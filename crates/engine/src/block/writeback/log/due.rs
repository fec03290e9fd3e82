//! What the log does by time, and when that is.

use larder_base::Nanos;

use super::super::planted::Planted;
use super::{Asks, Attached, FLUSH_EVERY, WriteLog};

impl<B: Clone> WriteLog<B> {
    /// Does what is due.
    pub fn due(&mut self, now: Nanos, asks: &mut Asks<B>) {
        self.acknowledge(now, asks);
        self.form(now, asks);
        self.fail_late(now, asks);
        self.flush_device(now, asks);
        let durable = self.counts_durable();
        let due = |v: &Attached| v.wakes(durable).is_some_and(|at| now >= at);
        asks.steps.extend(self.volumes.iter().filter(|(_, v)| due(v)).map(|(&n, _)| n));
        asks.steps.extend(self.rereads().filter(|(at, _)| now >= *at).map(|(_, n)| n));
    }

    /// Somebody has changed something who writes nothing: what waited for that goes on.
    pub fn follow(&mut self, now: Nanos, asks: &mut Asks<B>) {
        self.acknowledge(now, asks);
        if !self.waiting.is_empty() {
            self.form(now, asks);
        }
        self.flush_device(now, asks);
        if self.fault.is(Planted::OperatorsAsksDropped) {
            (asks.writes, asks.flush) = (Vec::new(), None);
        }
    }

    /// The batches and footers that are being written, and what the flush of the device that is under way makes durable: whoever has to do with
    /// that has not said yet how it ended.
    pub fn under_way(&self) -> (Vec<u64>, Option<u64>) {
        let batches = self.writing.keys().copied();
        (batches.chain(self.footers.under_way()).collect(), self.flushing)
    }

    /// When [`WriteLog::due`] is to be called, if nothing happens before.
    pub fn wakes(&self, now: Nanos) -> Option<Nanos> {
        // A batch that waits for one before it is not flushed sooner for being looked at.
        let can = self.flushing.is_none() && self.segments.flush_begins() > self.segments.durable();
        let flush = self.unflushed_since.filter(|_| can && self.closed.is_none());
        let flush = flush.map(|since| Nanos(since.0 + FLUSH_EVERY.0));
        let (written, durable) = (self.counts_written(), self.counts_durable());
        let of = |volume: &Attached| {
            let answer = volume
                .log
                .answerable(written)
                .filter(|_| !volume.is_over(now) && !volume.stands())
                .and_then(|logged| volume.due(now, u64::from(logged.room())));
            let late = self.fails_late(volume, now);
            answer.into_iter().chain(volume.wakes(durable)).chain(late).min()
        };
        let slow = |v: &Attached| v.is_slowed() && v.log.answerable(written).is_some();
        let look = self.economy.looks().filter(|_| self.volumes.values().any(slow));
        let park = (self.full && self.park_after > now).then_some(self.park_after);
        let reread = self.rereads().map(|(at, _)| at);
        let waits = flush.into_iter().chain(park).chain(reread);
        waits.chain(look).chain(self.volumes.values().filter_map(of)).min()
    }
}
