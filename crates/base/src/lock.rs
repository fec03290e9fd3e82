//! Locks whose kind is a type parameter: the same code is a server's with threads, a simulator's without, and a scheduler test's.
//!
//! An engine that is generic over [`LockKind`] decides what is locked, in which order and for how long; who runs it chooses the
//! kind. A test that explores schedules brings a kind of its own.

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

    /// An open lock.
    fn new(value: T) -> Self;
    /// Waits until nobody else has it.
    fn lock(&self) -> Self::Guard<'_>;
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

    /// An open lock.
    fn new(value: T) -> Self;
    /// Waits until nobody writes.
    fn read(&self) -> Self::Read<'_>;
    /// Waits until nobody else has it.
    fn write(&self) -> Self::Write<'_>;
}

/// For threads: a mutex that counts who waits. One whose holder panicked is taken all the same: the assertion that failed has been
/// reported, and refusing every later request would help nobody.
#[derive(Debug)]
pub struct Threads;

/// For a program of one thread: nothing is locked. One that is taken twice panics, so that a run checks how long locks are held.
#[derive(Debug)]
pub struct Single;

impl LockKind for Threads {
    type Lock<T> = Counted<T>;
    type Shared<T> = RwLock<T>;
}

impl LockKind for Single {
    type Lock<T> = RefCell<T>;
    type Shared<T> = RefCell<T>;
}

/// A mutex that counts how often somebody found it taken.
#[derive(Debug, Default)]
pub struct Counted<T> {
    value: Mutex<T>,
    waits: AtomicU64,
}

impl<T> Lock<T> for Counted<T> {
    type Guard<'a>
        = MutexGuard<'a, T>
    where
        Self: 'a;

    fn new(value: T) -> Counted<T> {
        Counted { value: Mutex::new(value), waits: AtomicU64::new(0) }
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, T> {
        match self.value.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::WouldBlock) => {
                self.waits.fetch_add(1, Ordering::Relaxed);
                self.value.lock().unwrap_or_else(PoisonError::into_inner)
            }
            Err(TryLockError::Poisoned(e)) => e.into_inner(),
        }
    }

    fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }
}

impl<T> SharedLock<T> for RwLock<T> {
    type Read<'a>
        = RwLockReadGuard<'a, T>
    where
        Self: 'a;
    type Write<'a>
        = RwLockWriteGuard<'a, T>
    where
        Self: 'a;

    fn new(value: T) -> RwLock<T> {
        RwLock::new(value)
    }

    #[inline]
    fn read(&self) -> RwLockReadGuard<'_, T> {
        RwLock::read(self).unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, T> {
        RwLock::write(self).unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Lock<T> for RefCell<T> {
    type Guard<'a>
        = RefMut<'a, T>
    where
        Self: 'a;

    fn new(value: T) -> RefCell<T> {
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

    fn new(value: T) -> RefCell<T> {
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

    fn bump<L: LockKind>() -> u64 {
        let (lock, shared) = (L::Lock::new(1), L::Shared::new(5));
        *lock.lock() += 1;
        *shared.write() += 1;
        let (a, b) = (shared.read(), shared.read());
        let sum = *lock.lock() + *a + *b;
        drop((a, b));
        sum
    }

    #[test]
    fn every_kind_holds_a_value() {
        assert_eq!((bump::<Threads>(), bump::<Single>()), (14, 14));
    }

    #[test]
    #[should_panic(expected = "already")]
    fn a_lock_of_one_thread_is_not_taken_twice() {
        let lock = <Single as LockKind>::Lock::new(());
        let _held = lock.lock();
        drop(lock.lock());
    }

    #[test]
    fn a_lock_whose_holder_panicked_is_taken() {
        let lock = <Threads as LockKind>::Lock::new(3);
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut held = lock.lock();
            *held = 4;
            panic!("a planted panic");
        }));
        assert!(died.is_err());
        assert_eq!((*lock.lock(), lock.waits()), (4, 0));
    }
}
