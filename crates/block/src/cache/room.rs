//! When the file system under the cache is full: filling rests, longer each time, instead of failing line by line.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::Nanos;

use super::{Cache, locked};

/// The first rest, and the longest.
const REST: (Nanos, Nanos) = (Nanos::from_secs(1), Nanos::from_secs(300));

/// Whether there is room for what was never written. See the [module](self).
#[derive(Default)]
pub(super) struct Room {
    /// Nothing is filled before that, nanoseconds since the start.
    until: AtomicU64,
    /// Rests so far.
    rests: AtomicU64,
    /// How long the last one was.
    last: Mutex<Nanos>,
}

/// Whether `error` says that there is no room.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

impl Room {
    /// A line did not fit. If nothing rests already, filling rests from now on: returns for how long.
    pub(super) fn full(&self, now: Nanos) -> Option<Nanos> {
        let mut last = locked(&self.last);
        let until = Nanos(self.until.load(Ordering::Relaxed));
        if now < until {
            // It was on its way.
            return None;
        }
        // As long again without a failure, and it begins anew.
        let rest = match now.saturating_sub(until) <= *last {
            true => Nanos(last.0 * 2).min(REST.1),
            false => REST.0,
        };
        *last = rest;
        self.until.store((now + rest).0, Ordering::Relaxed);
        self.rests.fetch_add(1, Ordering::Relaxed);
        Some(rest)
    }

    /// How long filling rests yet.
    pub(super) fn rests(&self, now: Nanos) -> Option<Nanos> {
        let until = Nanos(self.until.load(Ordering::Relaxed));
        (now < until).then(|| until.saturating_sub(now))
    }

    /// How often it has begun to rest.
    pub(super) fn count(&self) -> u64 {
        self.rests.load(Ordering::Relaxed)
    }
}

impl Cache {
    /// The file system under the cache is full: how long nothing is filled yet, if so, and how often that has begun.
    pub fn filling_rests(&self) -> (Option<Nanos>, u64) {
        let room = &self.governor.room;
        (room.rests(self.now()), room.count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rests_grow_and_begin_anew() {
        let room = Room::default();
        let mut now = Nanos::from_secs(10);
        assert_eq!(room.rests(now), None);
        let mut lengths = Vec::new();
        for _ in 0..11 {
            let rest = room.full(now).unwrap();
            lengths.push(rest.0 / 1_000_000_000);
            assert_eq!(room.full(now + Nanos::from_millis(5)), None, "it rests already");
            assert_eq!(room.rests(now), Some(rest));
            assert!(room.rests(now + rest).is_none());
            now = now + rest + Nanos::from_millis(10);
        }
        assert_eq!(lengths, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(room.count(), 11);
        let later = now + Nanos::from_secs(700);
        assert_eq!(room.full(later), Some(Nanos::from_secs(1)));
    }

    #[test]
    fn what_says_that_there_is_no_room() {
        for (errno, full) in [(28, true), (122, true), (5, false)] {
            assert_eq!(is_full(&io::Error::from_raw_os_error(errno)), full, "{errno}");
        }
    }
}
