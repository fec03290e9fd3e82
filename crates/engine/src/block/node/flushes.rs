//! Making stores durable before bits of the write-intent map go: which flush covers what, and who waits for which.
//!
//! Nobody waits for a store. A region whose bit is to go wants a flush, by number; when the region is due again and that flush
//! has ended well by then, and nothing of the region was changed meanwhile, it is durable.

use std::collections::BTreeMap;

use larder_base::Nanos;

use crate::block::planted::{Fault, Planted};

/// How long a flush may take before it counts as failed. (It may be answered later; nobody believes it then.) A page cache may
/// have much to write.
pub const PATIENCE: Nanos = Nanos::from_secs(120);
/// The same of those of all stores before a cache is taken back, while clients are served.
pub const AHEAD: Nanos = Nanos::from_secs(60);
/// The same once all lines are locked: clients wait. For what is under way to end they wait as long before.
pub const LOCKED: Nanos = Nanos::from_secs(10);

/// Numbers of one store's flushes; they only grow. A flush that begins when it has number N covers what had ended before N was
/// wanted.
#[derive(Debug, Default)]
pub struct Numbers {
    wanted: u64,
    begun: u64,
    durable: u64,
    /// Flushes that ended badly, by the last number that they would have covered.
    failed: u64,
}

impl Numbers {
    /// Wants a flush that covers everything that has ended by now. Returns its number.
    pub fn want(&mut self) -> u64 {
        self.wanted += 1;
        self.wanted
    }

    /// The latest number that was given.
    pub(super) fn latest(&self) -> u64 {
        self.wanted
    }

    /// Whether a flush is wanted that has not begun.
    pub fn is_wanted(&self) -> bool {
        self.begun < self.wanted
    }

    /// Whether one has begun and not ended.
    pub fn is_under_way(&self) -> bool {
        self.begun > self.durable.max(self.failed)
    }

    /// A flush begins: it covers all that is wanted. Returns its number.
    pub fn begin(&mut self) -> u64 {
        self.begun = self.wanted;
        self.begun
    }

    /// The flush that began with this number has ended, well or not.
    pub fn ended(&mut self, number: u64, durable: bool) {
        let last = if durable { &mut self.durable } else { &mut self.failed };
        *last = number.max(*last);
    }

    /// Whether the flush of that number has ended well, or `None` while it is awaited.
    pub fn is_durable(&self, number: u64) -> Option<bool> {
        if self.durable >= number { Some(true) } else { (self.failed >= number).then_some(false) }
    }
}

/// What is asked of a store that has answered a flush.
pub trait Flushed {
    /// What must be known after a power cut, for what is durable to be used then, is durable too. Returns false if it cannot be
    /// made so.
    fn keep_notes(&self) -> bool {
        true
    }
    /// How often it may have lost writes that it had answered.
    fn losses(&self) -> u64 {
        0
    }
    /// For how many of those nothing is cached any more that it may have lost.
    fn settled(&self) -> u64 {
        u64::MAX
    }
    /// A planted fault.
    fn fault(&self) -> Fault {
        Fault::default()
    }
}

/// Whether a flush that a store has `answered` well has made everything durable that it had answered before. What is used after a
/// power cut because it is durable must be known by then for what was written last; and a store that may have lost writes has not
/// made them durable, until they are out of the cache.
pub fn has_made_durable(answered: bool, store: &impl Flushed) -> bool {
    let fault = store.fault();
    answered
        && (store.keep_notes() || fault.is(Planted::NotesNotAwaited))
        && (store.settled() >= store.losses() || fault.is(Planted::LossNotAwaited))
}

/// Regions that wait for a flush of their store. A store is known by a number, such as its volume's first byte.
#[derive(Debug, Default)]
pub struct Flushes {
    /// With the store and the flush's number.
    waiting: BTreeMap<u32, (u64, u64)>,
    /// Flushes that were wanted since the last turn began: one is enough for all regions of a store.
    wanted: Vec<(u64, u64)>,
    #[cfg(feature = "planted")]
    fault: Option<Planted>,
}

impl Flushes {
    /// Plants a fault.
    #[cfg(feature = "planted")]
    pub fn plant(&mut self, fault: Planted) {
        self.fault = Some(fault);
    }

    #[cfg(feature = "planted")]
    fn planted(&self, fault: Planted) -> bool {
        self.fault == Some(fault)
    }

    #[cfg(not(feature = "planted"))]
    #[inline(always)]
    fn planted(&self, _: Planted) -> bool {
        false
    }

    /// The log begins a turn: what it asks from now on is covered by flushes that are wanted from now on.
    pub fn begin_turn(&mut self) {
        self.wanted.clear();
    }

    /// `region` was quiet, and is durable if its store is: whether it is known to be. If not, a flush is wanted, and it is to be
    /// asked again when it is due again.
    pub fn is_durable(
        &mut self,
        region: u32,
        store: u64,
        want: impl FnOnce() -> u64,
        ended: impl FnOnce(u64) -> Option<bool>,
    ) -> bool {
        if let Some(&(_, number)) = self.waiting.get(&region).filter(|w| w.0 == store) {
            let durable = ended(number);
            if durable.is_some() {
                self.waiting.remove(&region);
            }
            return durable == Some(true);
        }
        let wanted = self.wanted.iter().find(|w| w.0 == store).map(|w| w.1);
        let number = wanted.unwrap_or_else(|| {
            let number = want();
            self.wanted.push((store, number));
            number
        });
        self.waiting.insert(region, (store, number));
        self.planted(Planted::ClearedBeforeFlush)
    }

    /// The bit of `region` is asked for: what was wanted to be durable before does not cover what is written from now on.
    pub fn anew(&mut self, region: u32) {
        if !self.planted(Planted::FlushCoversLater) {
            self.waiting.remove(&region);
        }
    }

    /// Nobody waits any more.
    pub fn clear(&mut self) {
        self.waiting.clear();
        self.wanted.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_flush_covers_what_was_wanted_before_it_began() {
        let mut numbers = Numbers::default();
        let first = numbers.want();
        let begun = numbers.begin();
        let second = numbers.want();
        assert!(numbers.is_wanted() && numbers.is_durable(first).is_none());
        numbers.ended(begun, true);
        assert_eq!((numbers.is_durable(first), numbers.is_durable(second)), (Some(true), None));
        let begun = numbers.begin();
        numbers.ended(begun, false);
        assert_eq!(
            (numbers.is_durable(first), numbers.is_durable(second)),
            (Some(true), Some(false))
        );
        assert!(!numbers.is_wanted());
    }

    #[test]
    fn a_flush_counts_when_it_is_noted_and_losses_are_settled() {
        struct Store(bool, u64, u64);
        impl Flushed for Store {
            fn keep_notes(&self) -> bool {
                self.0
            }
            fn losses(&self) -> u64 {
                self.1
            }
            fn settled(&self) -> u64 {
                self.2
            }
        }
        assert!(has_made_durable(true, &Store(true, 2, 2)));
        assert!(!has_made_durable(false, &Store(true, 2, 2)));
        assert!(!has_made_durable(true, &Store(false, 2, 2)));
        assert!(!has_made_durable(true, &Store(true, 2, 1)));
    }

    #[test]
    fn regions_of_a_store_want_one_flush_and_wait_for_it() {
        let (mut flushes, numbers) = (Flushes::default(), RefCell::new(Numbers::default()));
        let ask = |flushes: &mut Flushes, region| {
            let (want, ended) =
                (|| numbers.borrow_mut().want(), |n| numbers.borrow().is_durable(n));
            flushes.is_durable(region, 7, want, ended)
        };
        assert!(!ask(&mut flushes, 1) && !ask(&mut flushes, 2));
        assert_eq!(numbers.borrow().wanted, 1, "one for both");
        let begun = numbers.borrow_mut().begin();
        flushes.begin_turn();
        assert!(!ask(&mut flushes, 1), "it is under way");
        // Region 2 is written to again.
        flushes.anew(2);
        numbers.borrow_mut().ended(begun, true);
        assert!(ask(&mut flushes, 1));
        assert!(!ask(&mut flushes, 2), "another flush");
        assert_eq!(numbers.borrow().wanted, 2);
    }
}
