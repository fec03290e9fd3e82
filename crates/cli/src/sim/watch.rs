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
        if requests < self.last_requests {
            self.pass = (self.pass + 1).min(self.passes - 1);
            // Of a reading that has only begun no rate is known yet.
            self.started = Instant::now();
            self.last = self.started;
        }
        self.last_requests = requests;
        let bar = &self.bar;
        if self.last.elapsed() < Duration::from_millis(200) {
            return;
        }
        self.last = Instant::now();
        if let Some(fraction) = reader.progress().fraction() {
            bar.set_position(self.pass * 10_000 + (fraction * 10_000.0) as u64);
        }
        let rate = requests as f64 / self.started.elapsed().as_secs_f64().max(1e-9);
        let reading =
            if self.passes > 1 { format!("reading {}: ", self.pass + 1) } else { String::new() };
        bar.set_message(format!("{reading}{requests} requests  {rate:.0}/s"));
    }

    pub(super) fn finish(&self) {
        self.bar.finish_and_clear();
    }
}
