//! Time as typed arguments. Monotonic time and TTL seconds are different types, so one cannot stand in for the other.

use std::fmt;
use std::ops::{Add, Sub};

/// Monotonic time or a span of it, in nanoseconds since the start of the run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The start of the run.
    pub const ZERO: Nanos = Nanos(0);

    /// A span of whole seconds.
    pub const fn from_secs(secs: u64) -> Nanos {
        Nanos(secs * 1_000_000_000)
    }

    /// A span of whole milliseconds.
    pub const fn from_millis(millis: u64) -> Nanos {
        Nanos(millis * 1_000_000)
    }

    /// A span of whole microseconds.
    pub const fn from_micros(micros: u64) -> Nanos {
        Nanos(micros * 1_000)
    }

    /// Whole milliseconds, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// Seconds as a float, for rates and reports.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// `self - earlier`, or zero when `earlier` is later.
    pub const fn saturating_sub(self, earlier: Nanos) -> Nanos {
        Nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add for Nanos {
    type Output = Nanos;
    fn add(self, other: Nanos) -> Nanos {
        Nanos(self.0.saturating_add(other.0))
    }
}

impl Sub for Nanos {
    type Output = Nanos;
    fn sub(self, other: Nanos) -> Nanos {
        self.saturating_sub(other)
    }
}

/// Wall-clock time in whole seconds since 1970, the unit of expiry. Good until the year 2106.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnixSecs(pub u32);

/// The two clocks at one moment: monotonic time for intervals, wall time for expiry. Every input of an engine carries it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Now {
    /// Monotonic time since the start of the run.
    pub mono: Nanos,
    /// Wall-clock seconds.
    pub wall: UnixSecs,
}

impl Now {
    /// Milliseconds since the start of the run, in the 32 bits that object headers keep (wraps after 49 days; spans
    /// are taken with wrapping subtraction).
    pub fn millis32(self) -> u32 {
        self.mono.as_millis() as u32
    }
}

/// When an object expires: an absolute wall-clock second, or never.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Expiry(pub u32);

impl Expiry {
    /// No expiry.
    pub const NEVER: Expiry = Expiry(0);
    /// Already expired, whatever the time is: what a negative expiry on the wire means.
    pub const PAST: Expiry = Expiry(1);

    /// Expires at this second (a time of zero becomes [`Expiry::PAST`], since 0 stands for never).
    pub fn at(when: UnixSecs) -> Expiry {
        Expiry(when.0.max(1))
    }

    /// Whether an object with this expiry is gone at `now`.
    pub fn is_past(self, now: UnixSecs) -> bool {
        self.0 != 0 && self.0 <= now.0
    }

    /// Seconds left, `None` for never. Zero when past.
    pub fn remaining(self, now: UnixSecs) -> Option<u32> {
        (self.0 != 0).then(|| self.0.saturating_sub(now.0))
    }
}

impl fmt::Debug for Expiry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { f.write_str("never") } else { write!(f, "at {}", self.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiry_is_to_the_second() {
        let e = Expiry::at(UnixSecs(100));
        assert!(!e.is_past(UnixSecs(99)));
        assert!(e.is_past(UnixSecs(100)));
        assert_eq!(e.remaining(UnixSecs(97)), Some(3));
        assert!(!Expiry::NEVER.is_past(UnixSecs(u32::MAX)));
        assert!(Expiry::PAST.is_past(UnixSecs(1)));
    }
}
