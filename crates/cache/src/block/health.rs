//! How a volume's store does: what failed, told in the log now and then and kept for who asks.

use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use larder_volume::op::{Failure, FailureKind};
use larder_volume::rate_limited::{RateLimited, Unsaid};

/// The last thing that went wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// When.
    pub at: Instant,
    /// What.
    pub what: String,
}

#[derive(Debug, Default)]
struct State {
    failures: u64,
    last: Option<Trouble>,
    lines: RateLimited,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Health(Mutex<State>);

impl Health {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }

    /// An operation of the store of volume `name` failed. What a store does not offer is no failure.
    pub fn failed(&self, name: &str, failure: &Failure, now: Instant) {
        if failure.kind == FailureKind::Unsupported {
            return;
        }
        if let Some(unsaid) = self.count(failure, now) {
            tracing::warn!("volume '{name}': {failure}{unsaid}");
        }
    }

    /// Counts it. If it is to be said: how many others were not.
    fn count(&self, failure: &Failure, now: Instant) -> Option<Unsaid> {
        let mut state = self.state();
        state.failures += 1;
        state.last = Some(Trouble { at: now, what: failure.to_string() });
        state.lines.wrong(now)
    }

    /// How many operations failed, and the last of them.
    pub fn failures(&self) -> (u64, Option<Trouble>) {
        let state = self.state();
        (state.failures, state.last.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn every_failure_is_counted_and_a_line_now_and_then_is_said() {
        let health = Health::default();
        let begun = Instant::now();
        let fail = |what: &str, seconds: u64| {
            let at = begun + Duration::from_secs(seconds);
            health.count(&Failure::new(FailureKind::NoSpace, what), at).map(|more| more.to_string())
        };
        assert_eq!(fail("a", 0).unwrap(), "");
        assert_eq!((fail("b", 1), fail("c", 9)), (None, None));
        assert!(fail("d", 11).unwrap().contains("2 more"));
        assert_eq!(fail("e", 30).unwrap(), "");
        let (count, last) = health.failures();
        assert_eq!((count, last.unwrap().what.as_str()), (5, "e"));
        health.failed("disk", &Failure::new(FailureKind::Unsupported, "no zeroes"), begun);
        assert_eq!(health.failures().0, 5);
    }
}
