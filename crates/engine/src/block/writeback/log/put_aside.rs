//! Volumes that are put aside with what is dirty: the log keeps what it has of them, copies it out of the way as of others, and destages nothing.

use larder_base::Nanos;

use super::super::destager::Destager;
use super::super::planted::Planted;
use super::super::throttle::Throttle;
use super::super::volume_log::{Kind, VolumeLog};
use super::closing::extract;
use super::{Append, Asks, Attach, WriteLog};

/// Whether it is of this volume, and a client waits for it.
pub(super) fn is_change_of<B>(attachment: u32) -> impl Fn(&Append<B>) -> bool {
    move |append| append.attachment == attachment && append.kind != Kind::Mark
}

impl<B: Clone> WriteLog<B> {
    /// Nothing of a volume is destaged from now on: it goes, and what is dirty stays. What is under way ends.
    pub fn put_aside(&mut self, attachment: u32) {
        if let Some(volume) = self.volumes.get_mut(&attachment) {
            volume.aside = true;
            // It wants none of the memory that others wait for.
            self.memory.leave(attachment);
        }
        self.divide();
    }

    /// A volume that is put aside has no clients any more. What they have asked for and is in no batch was not answered, comes to none, since nothing makes
    /// room for it, and is answered as failed. So is a mark; what is in the log is answered and kept.
    pub fn clients_left(&mut self, attachment: u32, asks: &mut Asks<B>) {
        let Some(volume) = self.volumes.get_mut(&attachment).filter(|volume| volume.aside) else {
            return;
        };
        volume.marks.none_comes();
        // What of a window has not begun does not begin.
        asks.steps.push(attachment);
        self.no_marks_wait(attachment);
        self.none_waits(attachment, asks);
    }

    fn no_marks_wait(&mut self, attachment: u32) {
        let is_mark = |append: &Append<B>| append.kind == Kind::Mark;
        self.waiting.retain(|append| append.attachment != attachment || !is_mark(append));
    }

    /// What waits to be logged of a volume is answered as failed, and is not logged.
    pub(super) fn none_waits(&mut self, attachment: u32, asks: &mut Asks<B>) {
        let is_its = is_change_of(attachment);
        let failed = extract(&mut self.waiting, |append| is_its(append));
        asks.answers.extend(failed.into_iter().map(|append| (append.op, true)));
    }

    /// Nothing of a volume comes to its store any more, nor to its journal, since they are somebody else's; or again. What is under way ends. What was
    /// not answered by then fails, and so does what comes: it would be promised for a store that another has.
    pub fn halt(&mut self, attachment: u32, halted: bool, asks: &mut Asks<B>) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        volume.halted = halted;
        asks.steps.push(attachment);
        if halted {
            volume.marks.none_comes();
            self.no_marks_wait(attachment);
            self.none_waits(attachment, asks);
            let failed = self.flushes.extract_if(.., |flush| flush.attachment == attachment);
            asks.answers.extend(failed.map(|flush| (flush.op, true)));
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
        let refused = self.is_refused(append.attachment) || self.is_halted(append.attachment);
        match refused {
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
            let anew = self.fault.is(Planted::SequencesRestarted);
            let from = if anew { 0 } else { volume.log.frontier() };
            volume.log = VolumeLog::new(attach.destage.order, from);
        }
        volume.log.recovered();
        volume.generation = attach.generation;
        volume.refuses = false;
        volume.destager = Destager::new(attach.destage, epoch);
        volume.pace = attach.destage.pace;
        volume.throttle = Throttle::new(0, now);
        (volume.stated, volume.marker) = (attach.bound, attach.marker);
        (volume.age, volume.marked) = (attach.age, attach.marked);
        // Looks of before it was put aside say nothing.
        volume.looked = super::looked::Looked::default();
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

#[cfg(test)]
mod tests {
    use super::super::super::volume_log::{Grain, Order};
    use super::super::marks::tests::{NOW, append, carry, full, log};
    use super::super::{Age, MarkState};
    use super::*;
    use crate::block::OpId;

    /// Nothing is destaged, so that nothing makes room for what waits.
    #[test]
    fn a_volume_that_is_put_aside_does_not_wait_for_writes_that_wait_at_its_bound() {
        let mut log = full(Order::Ordered(Grain::Flush));
        let waiting: Vec<OpId> = log.waiting.iter().map(|append| append.op).collect();
        assert!(!waiting.is_empty(), "nothing waits");
        let mut marks = Vec::new();
        let mut asks = Asks::default();
        for _ in 0..20 {
            marks.extend(log.mark(1, "late", b"late".to_vec(), &mut asks));
        }
        log.put_aside(1);
        log.follow(NOW, &mut asks);
        let answered = carry(&mut log, asks);
        assert!(!answered.iter().any(|op| waiting.contains(op)), "{answered:?}");
        assert!(!log.is_settled(1), "somebody waits");
        let mut asks = Asks::default();
        log.clients_left(1, &mut asks);
        let failed = |op: &OpId| asks.answers.contains(&(*op, true));
        assert!(waiting.iter().all(failed), "{:?}", asks.answers);
        assert!(log.is_settled(1) && log.waiting.is_empty());
        // Marks that had not come to the log yet do not come; it takes others when it stays.
        let states: Vec<MarkState> = marks.iter().map(|&mark| log.mark_state(1, mark)).collect();
        assert!(states.contains(&MarkState::Failed), "{states:?}");
        assert!(!states.contains(&MarkState::Waits), "{states:?}");
        log.resume(1, &mut asks);
        log.volumes.get_mut(&1).unwrap().stated = None;
        log.divide();
        let mut asks = Asks::default();
        let mark = log.mark(1, "stays", b"stays".to_vec(), &mut asks).unwrap();
        log.follow(NOW, &mut asks);
        assert_eq!(log.mark_state(1, mark), MarkState::Waits);
        assert!(!asks.writes.is_empty() || !log.writing.is_empty(), "it is on its way");
    }

    #[test]
    fn nobody_is_told_that_a_store_which_is_anothers_has_what_he_wrote() {
        let mut log = full(Order::Ordered(Grain::Flush));
        let waiting: Vec<OpId> = log.waiting.iter().map(|append| append.op).collect();
        let logged: Vec<OpId> =
            log.volumes[&1].pending.iter().filter_map(|pending| pending.op).collect();
        assert!(!waiting.is_empty() && !logged.is_empty(), "{waiting:?} {logged:?}");
        let mut asks = Asks::default();
        log.halt(1, true, &mut asks);
        log.append(NOW, append(901), &mut asks);
        log.flush(NOW, 1, OpId(902), &mut asks);
        log.follow(NOW, &mut asks);
        let failed = |op: &OpId| asks.answers.contains(&(*op, true));
        let late = [901, 902].map(OpId);
        let all = waiting.iter().chain(&logged).chain(&late);
        assert!(all.clone().all(failed), "{:?}", asks.answers);
        assert_eq!(asks.answers.len(), all.count());
        // It is its own again.
        let mut asks = Asks::default();
        log.halt(1, false, &mut asks);
        log.append(NOW, append(903), &mut asks);
        log.follow(NOW, &mut asks);
        assert!(!asks.answers.contains(&(OpId(903), true)));
    }

    #[test]
    fn a_volume_that_is_put_aside_answers_what_is_logged_though_what_is_dirty_is_too_old() {
        let mut log = log(Order::Ordered(Grain::Flush));
        let age = Age { most: Nanos::from_secs(1), hard: true };
        log.volumes.get_mut(&1).unwrap().age = Some(age);
        let written = |log: &mut WriteLog<Vec<u8>>, now, op| {
            let mut asks = Asks::default();
            log.append(now, append(op), &mut asks);
            for write in std::mem::take(&mut asks.writes) {
                log.written(now, write.number, true, &mut asks);
            }
            if let Some(covers) = asks.flush.take() {
                log.flushed(now, covers, true, &mut asks);
            }
            asks.answers
        };
        assert_eq!(written(&mut log, NOW, 1), [(OpId(1), false)]);
        let later = NOW + Nanos::from_secs(5);
        assert_eq!(written(&mut log, later, 2), []);
        log.put_aside(1);
        let mut asks = Asks::default();
        log.follow(later, &mut asks);
        assert_eq!(asks.answers, [(OpId(2), false)]);
        carry(&mut log, asks);
        assert!(log.is_settled(1));
    }

    #[test]
    fn memory_that_a_volume_waits_for_is_not_kept_from_others_once_it_is_put_aside() {
        let mut log = log(Order::Ordered(Grain::Flush));
        let most = log.config.memory;
        assert!(log.memory.take(1, most, 2) && !log.memory.take(1, 1, 2));
        log.memory.give(1, most).for_each(drop);
        log.put_aside(1);
        assert!(log.memory.take(2, most / 2, 2) && log.memory.take(2, most / 2, 2));
    }
}
