//! What the live page shows: the latest status, rates over the last seconds, and a few minutes of past.

use std::collections::VecDeque;

use serde::Serialize;

use super::super::status::{LatencyStatus, Status};
use crate::cache::Latencies;

/// Seconds of past that the page shows.
const HISTORY: usize = 300;
/// Seconds that rates and percentiles are taken over.
const WINDOW: usize = 5;

/// One answer of `/api/live.json`. Rates are per second over the last five seconds.
#[derive(Debug, Default, Serialize)]
pub struct Live {
    /// Everything that is counted, since the start.
    pub status: Status,
    /// Requests.
    pub operations_per_second: Operations,
    /// Bytes read and written by clients.
    pub bytes_per_second: Bytes,
    /// Share of reads answered without asking the store or waiting for it; `None` without reads.
    pub hit_ratio: Option<f64>,
    /// Latencies.
    pub latency: LatencyStatus,
    /// Bytes written to flash per second.
    pub flash_write_bytes_per_second: f64,
    /// Processors in use.
    pub cpu_cores: f64,
    /// One point per second, oldest first.
    pub history: Vec<Point>,
}

/// Requests a second.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Operations {
    /// Reads.
    pub reads: f64,
    /// Writes, zeroes and trims.
    pub writes: f64,
}

/// Bytes a second.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Bytes {
    /// That clients read.
    pub read: f64,
    /// That they wrote.
    pub written: f64,
}

/// One second.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Point {
    /// Seconds since the start.
    pub at: u64,
    /// Reads.
    pub reads: f64,
    /// Writes.
    pub writes: f64,
    /// Share of reads answered without asking the store or waiting for it; `None` without reads.
    pub hits: Option<f64>,
    /// 99th percentile of the latency of hits, microseconds; `None` without hits.
    pub p99_hit: Option<f64>,
    /// Of misses.
    pub p99_miss: Option<f64>,
    /// Of writes.
    pub p99_write: Option<f64>,
    /// Bytes written to flash.
    pub flash_writes: f64,
}

#[derive(Clone, Copy, Default)]
struct Sums {
    reads: u64,
    hits: u64,
    read_bytes: u64,
    writes: u64,
    write_bytes: u64,
    flash: u64,
    cpu: f64,
}

impl Sums {
    fn of(status: &Status) -> Sums {
        let t = &status.totals;
        Sums {
            reads: t.reads,
            hits: t.read_hits,
            read_bytes: t.read_bytes,
            writes: t.writes,
            write_bytes: t.write_bytes,
            flash: status.flash.bytes_written,
            cpu: status.cpu_seconds.user + status.cpu_seconds.system,
        }
    }
}

struct Past {
    /// Seconds since the start.
    at: f64,
    sums: Sums,
    latencies: Latencies,
}

/// Keeps the last samples.
#[derive(Default)]
pub(super) struct Sampler {
    latest: Option<Status>,
    past: VecDeque<Past>,
    history: VecDeque<Point>,
}

fn percentiles(latencies: &Latencies) -> LatencyStatus {
    LatencyStatus {
        hit: latencies.hit.percentiles(),
        miss: latencies.miss.percentiles(),
        write: latencies.write.percentiles(),
    }
}

impl Sampler {
    /// A sample, a second after the last one.
    pub(super) fn push(&mut self, status: Status, latencies: Latencies) {
        let sums = Sums::of(&status);
        // Whole seconds are too coarse where a tick was late; never at a standstill.
        let last = self.past.back().map_or(0.0, |p| p.at);
        let at = (status.uptime_seconds as f64).max(last + 0.5);
        if let Some(before) = self.past.back() {
            let span = at - before.at;
            let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / span;
            let reads = sums.reads.saturating_sub(before.sums.reads);
            let hits = sums.hits.saturating_sub(before.sums.hits);
            let recent = percentiles(&latencies.since(&before.latencies));
            self.history.push_back(Point {
                at: at as u64,
                reads: rate(sums.reads, before.sums.reads),
                writes: rate(sums.writes, before.sums.writes),
                hits: (reads > 0).then(|| hits as f64 / reads as f64),
                p99_hit: Some(recent.hit.p99).filter(|&p| p > 0.0),
                p99_miss: Some(recent.miss.p99).filter(|&p| p > 0.0),
                p99_write: Some(recent.write.p99).filter(|&p| p > 0.0),
                flash_writes: rate(sums.flash, before.sums.flash),
            });
            if self.history.len() > HISTORY {
                self.history.pop_front();
            }
        }
        self.past.push_back(Past { at, sums, latencies });
        if self.past.len() > WINDOW + 1 {
            self.past.pop_front();
        }
        self.latest = Some(status);
    }

    pub(super) fn live(&self) -> Live {
        let (Some(status), Some(first), Some(last)) =
            (&self.latest, self.past.front(), self.past.back())
        else {
            return Live::default();
        };
        let span = (last.at - first.at).max(1e-3);
        let (now, then) = (last.sums, first.sums);
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / span;
        let reads = now.reads.saturating_sub(then.reads);
        Live {
            status: status.clone(),
            operations_per_second: Operations {
                reads: rate(now.reads, then.reads),
                writes: rate(now.writes, then.writes),
            },
            bytes_per_second: Bytes {
                read: rate(now.read_bytes, then.read_bytes),
                written: rate(now.write_bytes, then.write_bytes),
            },
            hit_ratio: (reads > 0)
                .then(|| now.hits.saturating_sub(then.hits) as f64 / reads as f64),
            latency: percentiles(&last.latencies.since(&first.latencies)),
            flash_write_bytes_per_second: rate(now.flash, then.flash),
            cpu_cores: (now.cpu - then.cpu).max(0.0) / span,
            history: self.history.iter().copied().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::status::TotalStatus;
    use super::*;

    fn sample(second: u64, reads: u64, hits: u64) -> Status {
        let totals = TotalStatus { reads, read_hits: hits, ..TotalStatus::default() };
        Status { uptime_seconds: second, totals, ..Status::default() }
    }

    #[test]
    fn rates_are_over_the_window() {
        let mut s = Sampler::default();
        assert!(s.live().history.is_empty());
        for second in 1..20 {
            s.push(sample(second, second * 100, second * 75), Latencies::default());
        }
        let live = s.live();
        assert!((live.operations_per_second.reads - 100.0).abs() < 1e-6);
        assert!((live.hit_ratio.unwrap() - 0.75).abs() < 1e-6);
        assert_eq!(live.history.len(), 18);
        for second in 20..2 * HISTORY as u64 {
            s.push(sample(second, 1900, 1425), Latencies::default());
        }
        assert!(s.live().hit_ratio.is_none(), "nobody reads any more");
        assert_eq!(s.live().history.len(), HISTORY);
    }
}
