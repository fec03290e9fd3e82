//! Figures over time.

use std::ops::Range;

use larder_base::Nanos;

use super::latency::{Coarse, Met};
use super::outcome::Point;
use super::spec::Report;
use crate::device::drive::Traffic;

/// What happened in one interval.
#[derive(Clone, Debug, Default)]
struct Interval {
    requests: u64,
    hits_dram: u64,
    hits_flash: u64,
    misses: u64,
    set_bytes: u64,
    flash_bytes: u64,
    traffic: Traffic,
    latency: u128,
    reads: Coarse,
}

impl Interval {
    fn merge(&mut self, other: &Interval) {
        self.requests += other.requests;
        self.hits_dram += other.hits_dram;
        self.hits_flash += other.hits_flash;
        self.misses += other.misses;
        self.set_bytes += other.set_bytes;
        self.flash_bytes += other.flash_bytes;
        self.traffic.written += other.traffic.written;
        self.traffic.programmed += other.traffic.programmed;
        self.latency += other.latency;
        self.reads.merge(&other.reads);
    }
}

/// One request, for the series.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) at: Nanos,
    pub(super) met: Met,
    pub(super) latency: Nanos,
    pub(super) set_bytes: u64,
    pub(super) flash_bytes: u64,
}

/// A series of at most so many intervals: when there are more, each two become one.
pub(super) struct Series {
    most: usize,
    interval: u64,
    start: Nanos,
    intervals: Vec<Interval>,
    /// The interval that was asked for last, and what lies in it, since the start: mostly the next event does.
    index: usize,
    within: Range<u64>,
    /// The latest event, nanoseconds since the start.
    latest: u64,
    traffic: Traffic,
}

impl Series {
    /// A series that begins at `start`.
    pub(super) fn new(report: &Report, start: Nanos) -> Series {
        Series {
            most: report.points as usize,
            interval: ((report.interval * 1e9) as u64).max(1),
            start,
            intervals: Vec::new(),
            index: 0,
            within: 0..0,
            latest: 0,
            traffic: Traffic::default(),
        }
    }

    /// The interval of `at`.
    #[inline]
    fn of(&mut self, at: Nanos) -> Option<&mut Interval> {
        let since = at.saturating_sub(self.start).0;
        if !self.within.contains(&since) {
            self.go_to(since);
        }
        self.latest = self.latest.max(since);
        self.intervals.get_mut(self.index)
    }

    /// Makes the interval of what is `since` nanoseconds after the start the present one. Where there are to be none there
    /// is none.
    fn go_to(&mut self, since: u64) {
        if self.most == 0 {
            return;
        }
        while since / self.interval >= self.most as u64 {
            self.interval *= 2;
            self.intervals = self
                .intervals
                .chunks(2)
                .map(|pair| {
                    let mut first = pair[0].clone();
                    if let Some(second) = pair.get(1) {
                        first.merge(second);
                    }
                    first
                })
                .collect();
        }
        self.index = (since / self.interval) as usize;
        let begin = since - since % self.interval;
        self.within = begin..begin.saturating_add(self.interval);
        if self.intervals.len() <= self.index {
            self.intervals.resize(self.index + 1, Interval::default());
        }
    }

    pub(super) fn add(&mut self, event: &Event) {
        let Some(i) = self.of(event.at) else { return };
        i.requests += 1;
        i.set_bytes += event.set_bytes;
        i.flash_bytes += event.flash_bytes;
        match event.met {
            Met::Dram => i.hits_dram += 1,
            Met::Flash => i.hits_flash += 1,
            Met::Miss => i.misses += 1,
            Met::Write => return,
        }
        i.latency += u128::from(event.latency.0);
        i.reads.record(event.latency);
    }

    /// The drive's traffic since counting began has changed.
    pub(super) fn traffic(&mut self, at: Nanos, now: Traffic) {
        let before = std::mem::replace(&mut self.traffic, now);
        let Some(i) = self.of(at) else { return };
        i.traffic.written += now.written - before.written;
        i.traffic.programmed += now.programmed - before.programmed;
    }

    pub(super) fn points(&self) -> Vec<Point> {
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let point = |(number, i): (usize, &Interval)| {
            let reads = i.hits_dram + i.hits_flash + i.misses;
            let end = self.start.0 as f64 + (number + 1) as f64 * self.interval as f64;
            let passed = self.latest.saturating_sub(number as u64 * self.interval);
            Point {
                time: end / 1e9,
                interval_share: (passed as f64 / self.interval as f64).min(1.0),
                requests: i.requests,
                reads,
                dram_hit_ratio: share(i.hits_dram, reads),
                flash_hit_ratio: share(i.hits_flash, reads),
                flash_bytes: i.flash_bytes,
                clwa_of_sets: share(i.flash_bytes, i.set_bytes),
                dlwa: i.traffic.amplification(),
                latency_read_mean_us: i.latency as f64 / reads.max(1) as f64 / 1000.0,
                latency_read_p99_us: i.reads.quantile_us(0.99),
            }
        };
        self.intervals.iter().enumerate().map(point).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_add_up_however_often_intervals_are_joined() {
        let report = Report { interval: 0.5, points: 10 };
        let start = Nanos::from_secs(100);
        let mut series = Series::new(&report, start);
        let event = |i: u64| Event {
            at: start + Nanos::from_millis(i * 10),
            met: if i.is_multiple_of(4) { Met::Miss } else { Met::Flash },
            latency: Nanos::from_micros(100 + i % 4),
            set_bytes: 10,
            flash_bytes: 5,
        };
        for i in 0..3000 {
            series.add(&event(i));
        }
        let now = start + Nanos::from_secs(30);
        series.traffic(now, Traffic { written: 300, programmed: 450 });
        let points = series.points();
        // 30 s in at most ten intervals: of 4 s.
        assert_eq!(points.len(), 8);
        assert_eq!((points[0].time, points[1].time), (104.0, 108.0));
        // The run ends after 30 s, in the middle of the last interval.
        assert_eq!((points[6].interval_share, points[7].interval_share), (1.0, 0.5));
        assert_eq!(points.iter().map(|p| p.requests).sum::<u64>(), 3000);
        assert_eq!(points.iter().map(|p| p.flash_bytes).sum::<u64>(), 15_000);
        assert!((points[3].flash_hit_ratio - 0.75).abs() < 1e-9);
        assert!(
            (points[3].latency_read_mean_us - 101.5).abs() < 1e-9 && points[3].clwa_of_sets == 0.5
        );
        assert_eq!((points[0].dlwa, points[7].dlwa), (1.0, 1.5));
        // A jump of years makes few points, not many.
        series.add(&Event { at: Nanos::from_secs(1 << 30), ..event(0) });
        assert!(series.points().len() <= 10);
        let mut none = Series::new(&Report { interval: 1.0, points: 0 }, start);
        none.add(&event(1));
        assert!(none.points().is_empty());
    }
}
