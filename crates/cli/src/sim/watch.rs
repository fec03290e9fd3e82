//! The progress bar of a simulation.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use larder_trace::Reader;

/// Progress over one or two readings of the trace.
pub(super) struct Watch {
    bar: ProgressBar,
    passes: u64,
    pass: u64,
    last_requests: u64,
    last: Instant,
    started: Instant,
}

impl Watch {
    pub(super) fn new(passes: u64) -> Watch {
        let bar = crate::progress::bar(10_000 * passes);
        let now = Instant::now();
        Watch { bar, passes, pass: 0, last_requests: 0, last: now, started: now }
    }

    pub(super) fn tick(&mut self, reader: &dyn Reader, requests: u64) {
        let Some(message) = self.message(Instant::now(), requests) else { return };
        if let Some(fraction) = reader.progress().fraction() {
            self.bar.set_position(self.pass * 10_000 + (fraction * 10_000.0) as u64);
        }
        self.bar.set_message(message);
    }

    /// What to say at `now`, when so many requests of this reading were taken; none so soon after the last.
    fn message(&mut self, now: Instant, requests: u64) -> Option<String> {
        if requests < self.last_requests {
            self.pass = (self.pass + 1).min(self.passes - 1);
            // Of a reading that has only begun no rate is known yet.
            self.started = now;
            self.last = now;
        }
        self.last_requests = requests;
        if now.duration_since(self.last) < Duration::from_millis(200) {
            return None;
        }
        self.last = now;
        let rate = requests as f64 / now.duration_since(self.started).as_secs_f64().max(1e-9);
        let reading =
            if self.passes > 1 { format!("reading {}: ", self.pass + 1) } else { String::new() };
        Some(format!("{reading}{requests} requests  {rate:.0}/s"))
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Belady reads twice: each reading has a rate of its own.
    #[test]
    fn the_rate_is_that_of_this_reading() {
        let mut watch = Watch::new(2);
        let began = watch.started;
        let mut at = |seconds: f64, requests| {
            let now = began + Duration::from_secs_f64(seconds);
            watch.message(now, requests).map(|text| (text, watch.pass))
        };
        assert_eq!(at(0.1, 500), None, "too soon");
        let said = |text: &str, pass| Some((text.to_owned(), pass));
        assert_eq!(at(2.0, 10_000), said("reading 1: 10000 requests  5000/s", 0));
        assert_eq!(at(2.1, 10_200), None, "too soon after the last");
        assert_eq!(at(100.0, 300_000), said("reading 1: 300000 requests  3000/s", 0));
        // The second reading, after a pause, and faster.
        assert_eq!(at(110.0, 100), None);
        assert_eq!(at(111.0, 8_000), said("reading 2: 8000 requests  8000/s", 1));
        assert_eq!(at(114.0, 40_000), said("reading 2: 40000 requests  10000/s", 1));
    }

    #[test]
    fn one_reading_has_no_number() {
        let mut watch = Watch::new(1);
        let now = watch.started + Duration::from_secs(4);
        assert_eq!(watch.message(now, 100).as_deref(), Some("100 requests  25/s"));
    }
}
