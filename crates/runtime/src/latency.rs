//! Latencies in histograms of fixed size, and their percentiles.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Samples.
    pub samples: u64,
    /// Median.
    pub p50: f64,
    /// 90 %.
    pub p90: f64,
    /// 99 %.
    pub p99: f64,
    /// 99.9 %.
    pub p999: f64,
    /// Slowest.
    pub max: f64,
}

/// Nanoseconds from 100 ns to 60 s with two digits: about 20 KiB.
#[derive(Clone, Debug)]
pub struct LatencyHistogram(Histogram<u64>);

impl LatencyHistogram {
    /// Nothing recorded.
    pub fn new() -> LatencyHistogram {
        // The bounds are constants for which construction cannot fail.
        let histogram = Histogram::new_with_bounds(100, 60_000_000_000, 2);
        LatencyHistogram(histogram.expect("constant bounds are valid"))
    }

    /// One request; what lies beyond the bounds counts as the bound.
    pub fn record(&mut self, nanos: u64) {
        self.0.saturating_record(nanos);
    }

    /// Adds another's.
    pub fn add(&mut self, other: &LatencyHistogram) {
        // The bounds are the same, so adding cannot fail.
        self.0.add(&other.0).ok();
    }

    /// What was recorded since `earlier`, a copy of this one.
    pub fn since(&self, earlier: &LatencyHistogram) -> LatencyHistogram {
        let mut diff = self.clone();
        diff.0.subtract(&earlier.0).ok();
        diff
    }

    /// Its percentiles; all zero when nothing was recorded.
    pub fn percentiles(&self) -> Percentiles {
        let h = &self.0;
        if h.is_empty() {
            return Percentiles::default();
        }
        let at = |q: f64| h.value_at_quantile(q) as f64 / 1e3;
        Percentiles {
            samples: h.len(),
            p50: at(0.5),
            p90: at(0.9),
            p99: at(0.99),
            p999: at(0.999),
            max: h.max() as f64 / 1e3,
        }
    }
}

impl Default for LatencyHistogram {
    fn default() -> LatencyHistogram {
        LatencyHistogram::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_and_differences() {
        let mut all = LatencyHistogram::new();
        assert_eq!(all.percentiles(), Percentiles::default());
        for i in 1..=100 {
            all.record(i * 1_000);
        }
        let before = all.clone();
        all.record(5_000_000);
        all.record(u64::MAX);
        let p = before.percentiles();
        assert!(p.samples == 100 && (p.p50 - 50.0).abs() < 1.0, "{p:?}");
        assert_eq!(all.since(&before).percentiles().samples, 2);
    }
}
