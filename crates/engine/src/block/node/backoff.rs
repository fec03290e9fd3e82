//! The file system under the cache is full: nothing new is written for a while, longer each time, instead of failing line by
//! line.

use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::Nanos;

/// The first pause.
const FIRST: Nanos = Nanos::from_secs(1);
/// The longest pause.
const LONGEST: Nanos = Nanos::from_secs(300);

/// The pause of a full file system. Read without a lock at every access; see the [module](self).
#[derive(Debug)]
pub struct Backoff {
    first: Nanos,
    longest: Nanos,
    /// Nothing new is written before this time, nanoseconds.
    until: AtomicU64,
    /// Length of the last pause, nanoseconds.
    last: AtomicU64,
    pauses: AtomicU64,
}

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff::new(FIRST, LONGEST)
    }
}

impl Backoff {
    /// Pauses of `first` to `longest`.
    pub fn new(first: Nanos, longest: Nanos) -> Backoff {
        let zero = AtomicU64::default;
        Backoff { first, longest, until: zero(), last: zero(), pauses: zero() }
    }

    /// A write found no space. Begins a pause, unless one is running, and returns its length.
    pub fn full(&self, now: Nanos) -> Option<Nanos> {
        let until = self.until.load(Ordering::Relaxed);
        if now.0 < until {
            // The write was under way when the pause began.
            return None;
        }
        // After as long again without a failure the first pause comes again.
        let last = Nanos(self.last.load(Ordering::Relaxed));
        let pause = match now.saturating_sub(Nanos(until)) <= last {
            true => Nanos(last.0.saturating_mul(2)).min(self.longest),
            false => self.first,
        };
        // Of several writes that fail at once one begins the pause.
        let (ordering, end) = (Ordering::Relaxed, now + pause);
        self.until.compare_exchange(until, end.0, ordering, ordering).ok()?;
        self.last.store(pause.0, Ordering::Relaxed);
        self.pauses.fetch_add(1, Ordering::Relaxed);
        Some(pause)
    }

    /// What is left of the pause, if one is running.
    pub fn left(&self, now: Nanos) -> Option<Nanos> {
        let until = Nanos(self.until.load(Ordering::Relaxed));
        (now < until).then(|| until.saturating_sub(now))
    }

    /// Pauses so far.
    pub fn pauses(&self) -> u64 {
        self.pauses.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_begin_anew() {
        let backoff = Backoff::default();
        let mut now = Nanos::from_secs(10);
        assert_eq!(backoff.left(now), None);
        let mut lengths = Vec::new();
        for _ in 0..11 {
            let pause = backoff.full(now).unwrap();
            lengths.push(pause.0 / 1_000_000_000);
            assert_eq!(backoff.full(now + Nanos::from_millis(5)), None, "one is running");
            assert_eq!(backoff.left(now), Some(pause));
            assert!(backoff.left(now + pause).is_none());
            now = now + pause + Nanos::from_millis(10);
        }
        assert_eq!(lengths, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(backoff.pauses(), 11);
        let later = now + Nanos::from_secs(700);
        assert_eq!(backoff.full(later), Some(Nanos::from_secs(1)));
    }
}
