//! Locks whose kind is a type parameter: the same code is a server's with threads, a simulator's without, and a scheduler test's.
//!
//! An engine that is generic over [`LockKind`] decides what is locked, in which order and for how long; who runs it chooses the
//! kind. A test that explores schedules brings a kind of its own.
//!
//! Each lock has a place in the order in which a thread may take them ([`Rank`]).

mod order;

pub use order::Rank;
use order::{Mark, Place};
use std::cell::{Ref, RefCell, RefMut};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{
    Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError,
};

/// A kind of locks.
pub trait LockKind: 'static {
    /// One at a time.
    type Lock<T>: Lock<T>;
    /// Many that read, or one that writes.
    type Shared<T>: SharedLock<T>;
}

/// A lock around a value.
pub trait Lock<T> {
    /// Unlocks when it is dropped.
    type Guard<'a>: DerefMut<Target = T>
    where
        Self: 'a;

    /// An open lock, with its place in the order.
    fn new(rank: Rank, value: T) -> Self;
    /// Waits until nobody else has it. This thread holds no lock of the same rank or a higher one.
    fn lock(&self) -> Self::Guard<'_>;
    /// The same while this thread may hold others of the same rank: for who locks all of a kind, and nobody else locks two of it.
    fn lock_beside(&self) -> Self::Guard<'_> {
        self.lock()
    }
    /// How often somebody found it taken.
    fn waits(&self) -> u64 {
        0
    }
}

/// A lock that readers share.
pub trait SharedLock<T> {
    /// Unlocks when it is dropped.
    type Read<'a>: Deref<Target = T>
    where
        Self: 'a;
    /// Unlocks when it is dropped.
    type Write<'a>: DerefMut<Target = T>
    where
        Self: 'a;

    /// An open lock, with its place in the order.
    fn new(rank: Rank, value: T) -> Self;
    /// Waits until nobody writes.
    fn read(&self) -> Self::Read<'_>;
    /// Waits until nobody else has it.
    fn write(&self) -> Self::Write<'_>;
}

/// For threads: a mutex that counts who waits. One whose holder panicked is taken all the same: the assertion that failed has been
/// reported, and refusing every later request would help nobody. With debug assertions a thread that breaks the order of ranks panics.
#[derive(Debug)]
pub struct Threads;

/// For a program of one thread: nothing is locked. One that is taken twice panics, so that a run checks how long locks are held.
#[derive(Debug)]
pub struct Single;

impl LockKind for Threads {
    type Lock<T> = Counted<T>;
    type Shared<T> = Ordered<T>;
}

impl LockKind for Single {
    type Lock<T> = RefCell<T>;
    type Shared<T> = RefCell<T>;
}

/// A mutex that counts how often somebody found it taken.
#[derive(Debug)]
pub struct Counted<T> {
    value: Mutex<T>,
    waits: AtomicU64,
    place: Place,
}

/// A lock that is held.
#[derive(Debug)]
pub struct Held<G> {
    guard: G,
    _mark: Mark,
}

impl<G: Deref> Deref for Held<G> {
    type Target = G::Target;

    #[inline]
    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Held<G> {
    #[inline]
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

impl<T> Counted<T> {
    #[inline]
    fn take(&self) -> MutexGuard<'_, T> {
        match self.value.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::WouldBlock) => {
                self.waits.fetch_add(1, Ordering::Relaxed);
                self.value.lock().unwrap_or_else(PoisonError::into_inner)
            }
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
        }
    }
}

impl<T> Lock<T> for Counted<T> {
    type Guard<'a>
        = Held<MutexGuard<'a, T>>
    where
        Self: 'a;

    fn new(rank: Rank, value: T) -> Counted<T> {
        Counted { value: Mutex::new(value), waits: AtomicU64::new(0), place: Place::new(rank) }
    }

    #[inline]
    fn lock(&self) -> Self::Guard<'_> {
        // (The order is looked at first: who breaks it may wait for ever.)
        let mark = self.place.take(false);
        Held { guard: self.take(), _mark: mark }
    }

    fn lock_beside(&self) -> Self::Guard<'_> {
        let mark = self.place.take(true);
        Held { guard: self.take(), _mark: mark }
    }

    fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }
}

/// A lock that readers share.
#[derive(Debug)]
pub struct Ordered<T> {
    value: RwLock<T>,
    place: Place,
}

impl<T> SharedLock<T> for Ordered<T> {
    type Read<'a>
        = Held<RwLockReadGuard<'a, T>>
    where
        Self: 'a;
    type Write<'a>
        = Held<RwLockWriteGuard<'a, T>>
    where
        Self: 'a;

    fn new(rank: Rank, value: T) -> Ordered<T> {
        Ordered { value: RwLock::new(value), place: Place::new(rank) }
    }

    #[inline]
    fn read(&self) -> Self::Read<'_> {
        // (Who reads twice at a time waits for ever if somebody wants to write in between.)
        let mark = self.place.take(false);
        Held { guard: self.value.read().unwrap_or_else(PoisonError::into_inner), _mark: mark }
    }

    fn write(&self) -> Self::Write<'_> {
        let mark = self.place.take(false);
        Held { guard: self.value.write().unwrap_or_else(PoisonError::into_inner), _mark: mark }
    }
}

impl<T> Lock<T> for RefCell<T> {
    type Guard<'a>
        = RefMut<'a, T>
    where
        Self: 'a;

    fn new(_: Rank, value: T) -> RefCell<T> {
        RefCell::new(value)
    }

    #[inline]
    fn lock(&self) -> RefMut<'_, T> {
        self.borrow_mut()
    }
}

impl<T> SharedLock<T> for RefCell<T> {
    type Read<'a>
        = Ref<'a, T>
    where
        Self: 'a;
    type Write<'a>
        = RefMut<'a, T>
    where
        Self: 'a;

    fn new(_: Rank, value: T) -> RefCell<T> {
        RefCell::new(value)
    }

    #[inline]
    fn read(&self) -> Ref<'_, T> {
        self.borrow()
    }

    fn write(&self) -> RefMut<'_, T> {
        self.borrow_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARD: Rank = Rank::new(1, "a shard");
    const NAMES: Rank = Rank::new(2, "names");

    type OfThreads<T> = <Threads as LockKind>::Lock<T>;
    type SharedOfThreads<T> = <Threads as LockKind>::Shared<T>;

    fn bump<L: LockKind>() -> u64 {
        let (lock, shared) = (L::Lock::new(SHARD, 1), L::Shared::new(NAMES, 5));
        *lock.lock() += 1;
        *shared.write() += 1;
        let held = lock.lock();
        let read = shared.read();
        *held + *read
    }

    /// What whoever breaks the order is told.
    fn told(f: impl FnOnce()) -> Option<String> {
        let payload = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).err()?;
        payload.downcast_ref::<String>().cloned()
    }

    #[test]
    fn every_kind_holds_a_value() {
        assert_eq!((bump::<Threads>(), bump::<Single>()), (8, 8));
    }

    #[test]
    #[should_panic(expected = "already")]
    fn a_lock_of_one_thread_is_not_taken_twice() {
        let lock: <Single as LockKind>::Lock<()> = Lock::new(SHARD, ());
        let _held = lock.lock();
        drop(lock.lock());
    }

    #[test]
    fn a_lock_whose_holder_panicked_is_taken() {
        let lock = OfThreads::new(SHARD, 3);
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut held = lock.lock();
            *held = 4;
            panic!("a planted panic");
        }));
        assert!(died.is_err());
        assert_eq!((*lock.lock(), lock.waits()), (4, 0));
    }

    #[cfg(debug_assertions)]
    #[test]
    fn locks_are_taken_in_the_order_of_their_numbers() {
        let (shard, names) = (OfThreads::new(SHARD, ()), SharedOfThreads::new(NAMES, ()));
        {
            let _shard = shard.lock();
            let _names = names.read();
        }
        for read in [true, false] {
            let why = told(|| {
                let (reads, writes) =
                    if read { (Some(names.read()), None) } else { (None, Some(names.write())) };
                drop(shard.lock());
                drop((reads, writes));
            });
            let why = why.expect("the shard is locked under the names");
            let right = "that of a shard (1) is to be taken while that of names (2) is held";
            assert!(why.contains(right), "{why}");
        }
        // Nothing is left of it.
        let _shard = shard.lock();
        let _names = names.write();
    }

    #[cfg(debug_assertions)]
    #[test]
    fn one_lock_of_a_kind_is_held_but_by_who_locks_all() {
        let (one, other) = (OfThreads::new(SHARD, 1), OfThreads::new(SHARD, 2));
        let names = SharedOfThreads::new(NAMES, ());
        let why = told(|| {
            let _one = one.lock();
            drop(other.lock());
        });
        assert!(why.is_some_and(|why| why.contains("that of a shard (1) is held")));
        let why = told(|| {
            let _one = names.read();
            drop(names.read());
        });
        assert!(why.is_some(), "a second reader of the same thread");
        let all = [&one, &other].map(Lock::lock_beside);
        let _names = names.read();
        assert_eq!(*all[0] + *all[1], 3);
        let why = told(|| drop(one.lock_beside()));
        assert!(why.is_some_and(|why| why.contains("that of names (2) is held")));
    }

    /// In whatever order they are let go of.
    #[cfg(debug_assertions)]
    #[test]
    fn a_lock_that_is_let_go_of_is_in_nobodys_way() {
        let (shard, names) = (OfThreads::new(SHARD, ()), SharedOfThreads::new(NAMES, ()));
        let held = shard.lock();
        let read = names.read();
        drop(held);
        assert!(told(|| drop(shard.lock())).is_some());
        drop(read);
        drop(shard.lock());
        // Another thread holds nothing.
        let _names = names.read();
        std::thread::scope(|scope| scope.spawn(|| drop(shard.lock())).join().expect("a lock"));
    }

    #[cfg(not(debug_assertions))]
    #[test]
    fn the_order_costs_nothing_in_a_release() {
        assert_eq!(size_of::<Place>() + size_of::<Mark>(), 0);
    }
}
