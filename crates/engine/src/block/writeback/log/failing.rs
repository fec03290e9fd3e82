//! Volumes whose store fails, or whose marker does not say whose that is: who waits at their bound is told so in the end.

use larder_base::Nanos;

use super::put_aside::is_change_of;
use super::{Asks, Attached, WriteLog};

/// A store that fails for so long does not recover by itself.
const LONG: Nanos = Nanos::from_secs(60);

impl<B: Clone> WriteLog<B> {
    /// What waits for room is answered as failed where nothing has come to the store of its volume for long: its client would wait for ever. What is logged stays, and
    /// comes to the store when that works again.
    pub(super) fn fail_late(&mut self, now: Nanos, asks: &mut Asks<B>) {
        let written = self.counts_written();
        let late = |v: &Attached| v.failing_since().is_some_and(|at| now >= at + LONG);
        let late: Vec<u32> =
            self.volumes.iter().filter(|(_, v)| late(v)).map(|(&n, _)| n).collect();
        for attachment in late {
            if self.has_no_room(attachment) {
                self.none_waits(attachment, asks);
            }
            let Some(volume) = self.volumes.get_mut(&attachment) else { continue };
            if volume.is_at_bound(now, written) {
                let failed = volume.pending.iter_mut().filter_map(|pending| pending.op.take());
                asks.answers.extend(failed.map(|op| (op, true)));
            }
        }
    }

    /// Whether changes of a volume wait for room, and not for a batch to begin, which is over soon.
    fn has_no_room(&self, attachment: u32) -> bool {
        self.full || self.volumes.get(&attachment).is_some_and(|v| v.holds_all(0, false))
    }

    /// When [`WriteLog::fail_late`] has something to do of a volume.
    pub(super) fn fails_late(&self, volume: &Attached, now: Nanos) -> Option<Nanos> {
        let late = volume.failing_since()? + LONG;
        let no_room = self.has_no_room(volume.attachment);
        let waits = no_room && self.waiting.iter().any(is_change_of(volume.attachment));
        let is_asked = volume.pending.front().is_some_and(|pending| pending.op.is_some());
        let waits = waits || is_asked && volume.is_at_bound(now, self.counts_written());
        waits.then_some(late)
    }
}

impl Attached {
    /// It holds so much more than it may, because so much of it is under way, that nothing more of it is logged: with `more` bytes that are to be.
    /// Its marks are, as far as that goes: they hold little, and stand for what was answered before.
    pub(super) fn holds_all(&self, more: u64, mark: bool) -> bool {
        let held = self.log.held().saturating_add(more);
        held > 0 && held >= self.throttle.bound() / 4 * if mark { 8 } else { 5 }
    }

    /// What was written to the log first, of what was not answered, waits for room.
    fn is_at_bound(&self, now: Nanos, written: u64) -> bool {
        let first = self.log.answerable(written);
        first.is_some_and(|logged| {
            self.is_over(now) || self.due(now, u64::from(logged.room())).is_none()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::volume_log::{Grain, Order};
    use super::super::marks::tests::{NOW, append, carry, full, log};
    use super::*;
    use crate::block::OpId;

    #[test]
    fn who_waits_at_the_bound_of_a_volume_whose_store_fails_for_a_minute_is_told_that_it_failed() {
        let mut log = full(Order::Ordered(Grain::Flush));
        let asked: Vec<OpId> = log.waiting.iter().map(|append| append.op).collect();
        let logged: Vec<OpId> =
            log.volumes[&1].pending.iter().filter_map(|pending| pending.op).collect();
        assert!(!asked.is_empty() && !logged.is_empty(), "{asked:?} {logged:?}");
        let at = |seconds| NOW + Nanos::from_secs(seconds);
        log.volumes.get_mut(&1).unwrap().destager.fails(NOW);
        let mut asks = Asks::default();
        log.due(at(59), &mut asks);
        assert!(asks.answers.is_empty(), "{:?}", asks.answers);
        assert!(log.wakes(at(59)).is_some_and(|wakes| wakes <= at(60)));
        log.due(at(60), &mut asks);
        let failed = |op: &OpId| asks.answers.contains(&(*op, true));
        assert!(asked.iter().chain(&logged).all(failed), "{:?}", asks.answers);
        // Whoever comes then does not wait, and is not asked for again.
        let mut asks = Asks::default();
        log.append(at(61), append(900), &mut asks);
        log.due(at(61), &mut asks);
        assert_eq!(asks.answers, [(OpId(900), true)]);
        assert!(log.fails_late(&log.volumes[&1], at(61)).is_none());
        // What was logged is not answered twice when there is room.
        log.volumes.get_mut(&1).unwrap().stated = None;
        log.divide();
        log.follow(at(62), &mut asks);
        let twice = carry(&mut log, asks).into_iter().filter(|op| logged.contains(op)).count();
        assert_eq!(twice, 0);
    }

    #[test]
    fn who_waits_for_a_batch_to_begin_and_not_for_room_is_answered_though_the_store_has_failed_for_long()
     {
        let mut log = log(Order::Ordered(Grain::Flush));
        let (mut asks, late) = (Asks::default(), NOW + LONG + LONG);
        for op in 1..=3 {
            log.append(NOW, append(op), &mut asks);
        }
        assert_eq!((log.writing.len(), log.waiting.len()), (2, 1));
        log.volumes.get_mut(&1).unwrap().destager.fails(NOW);
        log.due(late, &mut asks);
        assert!(asks.answers.is_empty(), "{:?}", asks.answers);
        assert!(log.fails_late(&log.volumes[&1], late).is_none());
        assert_eq!(carry(&mut log, asks), [OpId(1), OpId(2), OpId(3)]);
        assert!(log.waiting.is_empty());
    }
}
