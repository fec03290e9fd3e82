//! How a volume's store does: what failed, told in the log now and then and kept for who asks.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::nbd::wire::Errno;
use crate::op::Failure;

/// Between two lines of one volume in the log.
const QUIET: Duration = Duration::from_secs(10);

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
    /// When a line was last said, and how many failures have gone unsaid since.
    said: Option<Instant>,
    unsaid: u64,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub struct Health(Mutex<State>);

impl Health {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An operation of the store of volume `name` failed. What a store does not offer is no failure.
    pub fn failed(&self, name: &str, failure: &Failure, now: Instant) {
        if failure.errno == Errno::NotSup {
            return;
        }
        if let Some(unsaid) = self.count(failure, now) {
            let more = match unsaid {
                0 => String::new(),
                n => format!(" (and {n} more since the last such line)"),
            };
            tracing::warn!("volume '{name}': {failure}{more}");
        }
    }

    /// Counts it. If it is to be said: how many others were not.
    fn count(&self, failure: &Failure, now: Instant) -> Option<u64> {
        let mut state = self.state();
        state.failures += 1;
        state.last = Some(Trouble { at: now, what: failure.to_string() });
        if state.said.is_some_and(|at| now.saturating_duration_since(at) < QUIET) {
            state.unsaid += 1;
            return None;
        }
        state.said = Some(now);
        Some(std::mem::take(&mut state.unsaid))
    }

    /// How many operations failed, and the last of them.
    pub fn failures(&self) -> (u64, Option<Trouble>) {
        let state = self.state();
        (state.failures, state.last.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_now_and_then_says_how_many_there_were() {
        let health = Health::default();
        let begun = Instant::now();
        let fail = |what: &str, seconds: u64| {
            health.count(&Failure::new(Errno::NoSpc, what), begun + Duration::from_secs(seconds))
        };
        assert_eq!(fail("a", 0), Some(0));
        assert_eq!((fail("b", 1), fail("c", 9)), (None, None));
        assert_eq!(fail("d", 11), Some(2));
        assert_eq!(fail("e", 30), Some(0));
        let (count, last) = health.failures();
        assert_eq!((count, last.unwrap().what.as_str()), (5, "e"));
        health.failed("disk", &Failure::new(Errno::NotSup, "no zeroes"), begun);
        assert_eq!(health.failures().0, 5);
    }
}
