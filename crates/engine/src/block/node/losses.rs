//! Which losses of a store the clients of its volume hear of.
//!
//! A store may lose writes that it had answered. Clients who wrote them through hear of that with their next FLUSH. What a volume that writes back has
//! written is in the write log until the store has it durably, and what the store loses meanwhile comes to it again: no client lost anything, whatever
//! the volume does later.

use std::sync::atomic::{AtomicU64, Ordering};

/// The volume writes through.
const THROUGH: u64 = u64::MAX;

/// The losses of one volume's store, as far as clients are concerned. Counts are how often the store may have lost writes that it had answered.
#[derive(Debug)]
pub struct Losses {
    /// The store's count when the volume began to write back; [`THROUGH`].
    began: AtomicU64,
    /// Losses while it wrote back.
    excused: AtomicU64,
}

impl Default for Losses {
    fn default() -> Losses {
        Losses { began: AtomicU64::new(THROUGH), excused: AtomicU64::new(0) }
    }
}

impl Losses {
    /// The volume writes back from now on, and its store, with this count, has everything durably.
    pub fn begins(&self, count: u64) {
        self.began.store(count, Ordering::SeqCst);
    }

    /// It writes through from now on. The store, with this count, has everything durably.
    pub fn ends(&self, count: u64) {
        let began = self.began.load(Ordering::SeqCst);
        if began != THROUGH {
            // In this order: who looks in between hears of fewer, and of the rest the next time.
            self.excused.fetch_add(count.saturating_sub(began), Ordering::SeqCst);
            self.began.store(THROUGH, Ordering::SeqCst);
        }
    }

    /// The last loss that matters to clients, where the store's count is this.
    pub fn last(&self, count: u64) -> u64 {
        count.min(self.began.load(Ordering::SeqCst))
    }

    /// How many of the losses up to this one clients hear of.
    pub fn told(&self, last: u64) -> u64 {
        last.saturating_sub(self.excused.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_under_write_back_is_told_to_nobody_and_what_was_lost_before_or_behind_is() {
        let losses = Losses::default();
        let told = |count| losses.told(losses.last(count));
        assert_eq!((told(0), told(2)), (0, 2));
        losses.begins(2);
        assert_eq!((told(2), told(5)), (2, 2), "lost before it wrote back");
        losses.ends(5);
        assert_eq!((told(5), told(6)), (2, 3));
        losses.begins(6);
        losses.ends(6);
        losses.ends(7);
        assert_eq!(told(7), 4, "it wrote through");
    }
}
