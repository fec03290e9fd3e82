//! Whose the store is, before anything is brought there: the marker was looked at a moment ago.
//!
//! A host looks at the marker of a volume once a second ([`LOOK`]). One that was stopped for long (its machine was suspended, its process was paused) does
//! not know what has become of the store meanwhile: somebody else may have recovered it, and serve it. So nothing of a window or an epoch is begun when the
//! last look that found no other holder began more than [`FRESH`] ago [fresh]. The volume asks for one then ([`Asked::Look`]) and waits; whoever waits at its bound
//! is told after a minute that it failed, as where the store fails.
//!
//! What was sent before is on its way, and no look keeps it from the store. A volume without a marker has nothing that could be looked at.

use larder_base::Nanos;

use super::super::marker::LOOK;
use super::super::planted::Planted;
use super::{Asked, Asks, Attached, WriteLog};

/// A look that began longer ago says nothing of whose the store is now.
pub const FRESH: Nanos = Nanos::from_secs(2);

/// When the marker of a volume was looked at.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Looked {
    /// When the last look began that found no other holder.
    began: Option<Nanos>,
    /// Destage waits for one since then,
    waits: Option<Nanos>,
    /// which is under way,
    asked: bool,
    /// or is asked for then.
    after: Nanos,
}

impl Looked {
    fn is_fresh(&self, now: Nanos) -> bool {
        self.began.is_some_and(|began| now.0 <= began.0 + FRESH.0)
    }
}

impl<B: Clone> WriteLog<B> {
    /// The marker of a volume was found to name no other holder, by a look that began then: destage goes on.
    pub fn looked(&mut self, attachment: u32, began: Nanos, asks: &mut Asks<B>) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        volume.looked.began = volume.looked.began.max(Some(began));
        if volume.awaits_look().is_some() {
            asks.steps.push(attachment);
        }
    }

    /// The look that [`Asked::Look`] wanted has ended, whatever came of it.
    pub fn look_ended(&mut self, now: Nanos, attachment: u32, asks: &mut Asks<B>) {
        let Some(volume) = self.volumes.get_mut(&attachment) else { return };
        (volume.looked.asked, volume.looked.after) = (false, now + LOOK);
        if volume.awaits_look().is_some() {
            asks.steps.push(attachment);
        }
    }

    /// Since when the destage of a volume waits for a look at its marker, if it does.
    pub fn awaits_look(&self, attachment: u32) -> Option<Nanos> {
        self.volumes.get(&attachment)?.awaits_look()
    }

    /// Whether that is fresh enough for more of a volume to come to its store.
    pub(super) fn sees(&self, volume: &Attached, now: Nanos) -> bool {
        let old = self.fault.is(Planted::OldLookCounts);
        !volume.marked || volume.looked.is_fresh(now) || old
    }
}

impl Attached {
    /// Since when its destage waits for a look at its marker. (One that is another's has been looked at.)
    pub(super) fn awaits_look(&self) -> Option<Nanos> {
        self.looked.waits.filter(|_| !self.halted)
    }

    /// Destage was tried: it asks for a look if it waits for one.
    pub(super) fn ask_look<B>(&mut self, now: Nanos, out: &mut Vec<Asked<B>>) {
        let waits = self.destager.is_unseen() && !self.halted;
        let since = self.looked.waits.unwrap_or(now);
        self.looked.waits = waits.then_some(since);
        if waits && !self.looked.asked && now >= self.looked.after {
            self.looked.asked = true;
            out.push(Asked::Look);
        }
    }

    /// When it asks again for the look that it waits for.
    pub(super) fn asks_again(&self) -> Option<Nanos> {
        Some(self.looked.after).filter(|_| !self.looked.asked)
    }

    /// Since when nothing comes to its store though it could: the store fails, or nothing says whose it is.
    pub(super) fn failing_since(&self) -> Option<Nanos> {
        self.destager.failing_since().into_iter().chain(self.awaits_look()).min()
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::destager::{Config as Destage, Destager, Pace};
    use super::super::super::volume_log::{Cuts, Grain, Order};
    use super::super::Append;
    use super::super::marks::tests::{NOW, append, carry, full, log};
    use super::*;
    use crate::block::OpId;

    type Log = WriteLog<Vec<u8>>;
    const OLD: Nanos = Nanos(NOW.0 + FRESH.0 + 1);
    const ORDERS: [Order; 3] =
        [Order::Any, Order::Ordered(Grain::Flush), Order::Journaled(Cuts::Flushes)];

    fn step(log: &mut Log, now: Nanos) -> Vec<Asked<Vec<u8>>> {
        let (mut out, mut asks) = (Vec::new(), Asks::default());
        log.step(now, 1, &mut out, &mut asks);
        carry(log, asks);
        out
    }

    /// With something that may be destaged: `writes` writes of 4 KiB, and a FLUSH behind them.
    fn dirty(order: Order, writes: u64) -> Log {
        let mut log = log(order);
        let mut asks = Asks::default();
        for op in 1..=writes {
            log.append(NOW, Append { at: op << 20, ..append(op) }, &mut asks);
            carry(&mut log, std::mem::take(&mut asks));
        }
        log.flush(NOW, 1, OpId(100), &mut asks);
        carry(&mut log, asks);
        log
    }

    fn begins(out: &[Asked<Vec<u8>>]) -> bool {
        matches!(out, [Asked::Store(..), ..] | [Asked::Journal { .. }])
    }

    #[test]
    fn no_window_and_no_epoch_begins_on_an_old_look_and_the_volume_asks_for_another() {
        for order in ORDERS {
            assert!(
                begins(&step(&mut dirty(order, 1), Nanos(OLD.0 - 1))),
                "{order:?}: it is fresh"
            );
            let mut log = dirty(order, 1);
            assert_eq!(step(&mut log, OLD), [Asked::Look], "{order:?}");
            // It is under way: nothing else is asked for, and nobody wakes.
            assert_eq!((step(&mut log, OLD), log.awaits_look(1)), (vec![], Some(OLD)));
            assert!(log.wakes(OLD).is_none(), "{order:?}: {:?}", log.wakes(OLD));
            assert_eq!(log.status(OLD, 1).unwrap().left, None);
            // The place does not answer, and is asked again later.
            let mut asks = Asks::default();
            log.look_ended(OLD, 1, &mut asks);
            assert_eq!(asks.steps, [1]);
            assert_eq!((step(&mut log, OLD), log.wakes(OLD)), (vec![], Some(OLD + LOOK)));
            assert_eq!(step(&mut log, OLD + LOOK), [Asked::Look], "{order:?}");
            // A look that took too long says nothing of now.
            let mut asks = Asks::default();
            let late = OLD + LOOK + FRESH + Nanos(1);
            log.looked(1, OLD + LOOK, &mut asks);
            log.look_ended(late, 1, &mut asks);
            assert_eq!(step(&mut log, late), [], "{order:?}");
            let mut asks = Asks::default();
            log.looked(1, late, &mut asks);
            assert_eq!(asks.steps, [1]);
            assert!(begins(&step(&mut log, late)), "{order:?}");
            assert_eq!(log.awaits_look(1), None);
        }
    }

    #[test]
    fn a_window_that_is_under_way_goes_on_where_it_was_once_the_marker_was_looked_at() {
        for aside in [false, true] {
            let mut log = dirty(Order::Ordered(Grain::Flush), 3);
            let destage = Destage {
                order: Order::Ordered(Grain::Flush),
                pace: Pace::Async,
                most: 1 << 20,
                depth: 1,
            };
            log.volumes.get_mut(&1).unwrap().destager = Destager::new(destage, 0);
            let out = step(&mut log, NOW);
            let [Asked::Store(first, _)] = out[..] else { panic!("{out:?}") };
            // The process was stopped.
            let (mut out, mut asks) = (Vec::new(), Asks::default());
            let stored = |memory| (memory, Some(1));
            if aside {
                log.put_aside(1);
                log.clients_left(1, &mut asks);
            }
            log.stored(OLD, 1, stored(first.memory()), &mut out, &mut asks);
            if aside {
                // It is begun anew if the volume stays.
                assert!(out.is_empty() && log.is_settled(1), "{out:?}");
                log.resume(1, &mut asks);
                assert_eq!(step(&mut log, OLD), [Asked::Look]);
            } else {
                assert_eq!(out, [Asked::Look]);
            }
            log.looked(1, OLD, &mut asks);
            let out = step(&mut log, OLD);
            let [Asked::Store(next, _)] = out[..] else { panic!("{out:?}") };
            assert_eq!(next.at == first.at, aside);
        }
    }

    #[test]
    fn what_is_tried_again_waits_for_a_look_too() {
        for order in ORDERS {
            let mut log = dirty(order, 1);
            let (mut out, mut asks) = (Vec::new(), Asks::default());
            match step(&mut log, NOW)[..] {
                [Asked::Store(dirty, _)] => {
                    log.stored(NOW, 1, (dirty.memory(), None), &mut out, &mut asks);
                }
                _ => log.journaled(NOW, 1, false, &mut out, &mut asks),
            }
            assert!(out.is_empty(), "{out:?}");
            assert_eq!(step(&mut log, OLD), [Asked::Look], "{order:?}");
            assert!(log.wakes(OLD).is_none(), "{order:?}");
            log.looked(1, OLD, &mut asks);
            assert!(begins(&step(&mut log, OLD)), "{order:?}");
        }
    }

    #[test]
    fn a_volume_without_a_marker_waits_for_no_look() {
        let mut log = dirty(Order::Any, 1);
        let volume = log.volumes.get_mut(&1).unwrap();
        (volume.marked, volume.looked) = (false, Looked::default());
        assert!(begins(&step(&mut log, OLD)));
    }

    #[test]
    fn a_volume_that_comes_or_is_taken_up_is_looked_at_before_anything_comes_to_its_store() {
        let mut log = dirty(Order::Any, 1);
        log.volumes.get_mut(&1).unwrap().looked = Looked::default();
        assert_eq!(step(&mut log, NOW), [Asked::Look]);
    }

    #[test]
    fn who_waits_at_the_bound_of_a_volume_whose_marker_does_not_answer_is_told_after_a_minute() {
        let mut log = full(Order::Ordered(Grain::Flush));
        let asked: Vec<OpId> = log.waiting.iter().map(|append| append.op).collect();
        assert!(!asked.is_empty());
        log.volumes.get_mut(&1).unwrap().slow = true;
        assert!(log.volumes[&1].is_slowed());
        assert_eq!(step(&mut log, OLD), [Asked::Look]);
        // A store that nothing comes to has no rate that clients could be slowed down to.
        assert!(!log.volumes[&1].is_slowed());
        let late = OLD + Nanos::from_secs(60);
        let mut asks = Asks::default();
        log.due(Nanos(late.0 - 1), &mut asks);
        assert!(asks.answers.is_empty(), "{:?}", asks.answers);
        assert!(log.wakes(OLD).is_some_and(|wakes| wakes <= late));
        log.due(late, &mut asks);
        assert!(asked.iter().all(|op| asks.answers.contains(&(*op, true))), "{:?}", asks.answers);
        // It is found, and others wait for a minute again.
        log.looked(1, late, &mut asks);
        step(&mut log, late);
        let mut asks = Asks::default();
        log.append(late, append(900), &mut asks);
        log.due(late, &mut asks);
        assert!(!asks.answers.contains(&(OpId(900), true)), "{:?}", asks.answers);
    }

    #[cfg(feature = "planted")]
    #[test]
    fn that_an_old_look_counts_can_be_planted() {
        let mut log = dirty(Order::Any, 1);
        log.plant(super::super::super::planted::Fault::of(Some(Planted::OldLookCounts)));
        assert!(begins(&step(&mut log, OLD)));
    }
}
