//! Lines in the log about what goes wrong again and again: one now and then, which says how many were left out.

use std::time::{Duration, Instant};

/// Between two lines about the same thing.
const QUIET: Duration = Duration::from_secs(10);

/// What is said of one thing.
#[derive(Debug, Default)]
pub struct RateLimited {
    /// When a line was last said, and how many have gone unsaid since.
    said: Option<Instant>,
    unsaid: u64,
    /// Of what was said last nobody has said that it is over.
    stands: bool,
    lines: Lines,
}

/// Lines that were said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// That it goes wrong.
    pub wrong: u64,
    /// That it goes well again.
    pub well: u64,
}

/// Lines that were left out before one that is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsaid(u64);

impl std::fmt::Display for Unsaid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, " (and {n} more since the last such line)"),
        }
    }
}

impl RateLimited {
    /// It goes wrong at `now`. If that is to be said: how many others were not.
    pub fn wrong(&mut self, now: Instant) -> Option<Unsaid> {
        if self.said.is_some_and(|at| now.saturating_duration_since(at) < QUIET) {
            self.unsaid += 1;
            return None;
        }
        (self.said, self.stands) = (Some(now), true);
        self.lines.wrong += 1;
        Some(Unsaid(std::mem::take(&mut self.unsaid)))
    }

    /// It goes well. Whether that is to be said: once after each line that said otherwise.
    pub fn well(&mut self) -> bool {
        self.lines.well += u64::from(self.stands);
        std::mem::take(&mut self.stands)
    }

    /// What was said until now.
    pub fn lines(&self) -> Lines {
        self.lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_now_and_then_says_how_many_there_were() {
        let mut quiet = RateLimited::default();
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        assert!(!quiet.well(), "nothing was wrong");
        assert_eq!(quiet.wrong(at(0)).unwrap().to_string(), "");
        assert!(quiet.well() && !quiet.well());
        assert_eq!((quiet.wrong(at(1)), quiet.wrong(at(9))), (None, None));
        assert!(!quiet.well(), "nobody has heard that anything was wrong");
        let said = quiet.wrong(at(11)).unwrap();
        assert_eq!(said.to_string(), " (and 2 more since the last such line)");
        assert_eq!(quiet.wrong(at(30)), Some(Unsaid(0)));
        assert!(quiet.well());
        assert_eq!(quiet.lines(), Lines { wrong: 3, well: 2 });
    }
}
