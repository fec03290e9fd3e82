//! The order in which a thread may take locks, checked where the program has debug assertions; elsewhere nothing is kept of it.
//!
//! Two threads that take the same locks in different orders may wait for each other for ever, and a test meets that by chance at best.
//! That a thread takes a lock whose number is not above those that it holds is met by every run.

/// The place of a lock in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Locks with higher numbers may be taken while this one is held.
    pub number: u16,
    /// What is locked, for whoever breaks the order.
    pub name: &'static str,
}

impl Rank {
    /// The place `number` in the order, of the lock of `name`.
    pub const fn new(number: u16, name: &'static str) -> Rank {
        Rank { number, name }
    }
}

#[cfg(debug_assertions)]
mod checked {
    use std::cell::RefCell;

    use super::Rank;

    thread_local! {
        /// What this thread holds.
        static HELD: RefCell<Vec<Rank>> = const { RefCell::new(Vec::new()) };
    }

    /// A lock's rank.
    #[derive(Debug)]
    pub(in crate::lock) struct Place(Rank);

    impl Place {
        pub(in crate::lock) fn new(rank: Rank) -> Place {
            Place(rank)
        }

        /// The lock is about to be taken; beside others of the same rank, if that is said.
        ///
        /// # Panics
        /// If one is held of a higher rank, or of the same.
        pub(in crate::lock) fn take(&self, beside: bool) -> Mark {
            let Place(rank) = *self;
            let in_the_way = |held: &Rank| {
                if beside { held.number > rank.number } else { held.number >= rank.number }
            };
            // (A thread that ends has lost its list, and what it holds still is let go of by its destructors.)
            let found = HELD.try_with(|held| held.borrow().iter().copied().find(in_the_way));
            if let Ok(Some(held)) = found {
                panic!(
                    "order of locks: that of {} ({}) is to be taken while that of {} ({}) is held: let go of it first, or take \
                     them in the order of their numbers",
                    rank.name, rank.number, held.name, held.number
                );
            }
            let _ = HELD.try_with(|held| held.borrow_mut().push(rank));
            Mark(rank)
        }
    }

    /// As long as it is there the lock counts as held.
    #[derive(Debug)]
    pub(in crate::lock) struct Mark(Rank);

    impl Drop for Mark {
        fn drop(&mut self) {
            let _ = HELD.try_with(|held| {
                let mut held = held.borrow_mut();
                if let Some(at) = held.iter().rposition(|rank| *rank == self.0) {
                    held.remove(at);
                }
            });
        }
    }
}

#[cfg(not(debug_assertions))]
mod checked {
    use super::Rank;

    /// A lock's rank, of which nothing is kept.
    #[derive(Debug)]
    pub(in crate::lock) struct Place;

    impl Place {
        #[inline(always)]
        pub(in crate::lock) fn new(_: Rank) -> Place {
            Place
        }

        #[inline(always)]
        pub(in crate::lock) fn take(&self, _beside: bool) -> Mark {
            Mark
        }
    }

    /// Nothing.
    #[derive(Debug)]
    pub(in crate::lock) struct Mark;
}

pub(super) use checked::{Mark, Place};
