//! Latency as the server sees it: from the read of a request to the last byte of its answer handed to the system.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Histograms of sampled requests, nanoseconds (1 µs to 60 s, two digits): about 20 KiB each.
#[derive(Debug)]
pub struct Latency {
    /// Answered without reading flash.
    dram: Histogram<u64>,
    /// Waited for flash.
    flash: Histogram<u64>,
}

/// Percentiles in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
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

fn histogram() -> Histogram<u64> {
    // The bounds are constants for which construction cannot fail.
    Histogram::new_with_bounds(100, 60_000_000_000, 2).expect("constant bounds are valid")
}

impl Latency {
    /// Nothing recorded.
    pub fn new() -> Latency {
        Latency { dram: histogram(), flash: histogram() }
    }

    /// One request.
    pub fn record(&mut self, nanos: u64, waited_for_flash: bool) {
        let h = if waited_for_flash { &mut self.flash } else { &mut self.dram };
        h.saturating_record(nanos);
    }

    /// Adds another worker's.
    pub fn add(&mut self, other: &Latency) {
        // The bounds are the same, so adding cannot fail.
        self.dram.add(&other.dram).ok();
        self.flash.add(&other.flash).ok();
    }

    /// What was recorded since `earlier`, a copy of this one.
    pub fn since(&self, earlier: &Latency) -> Latency {
        let mut diff = Latency { dram: self.dram.clone(), flash: self.flash.clone() };
        diff.dram.subtract(&earlier.dram).ok();
        diff.flash.subtract(&earlier.flash).ok();
        diff
    }

    /// Requests answered from DRAM, or by a miss.
    pub fn dram(&self) -> Percentiles {
        percentiles(&self.dram)
    }

    /// Requests that waited for flash.
    pub fn flash(&self) -> Percentiles {
        percentiles(&self.flash)
    }
}

impl Default for Latency {
    fn default() -> Latency {
        Latency::new()
    }
}

fn percentiles(h: &Histogram<u64>) -> Percentiles {
    let at = |q: f64| h.value_at_quantile(q) as f64 / 1e3;
    if h.is_empty() {
        return Percentiles::default();
    }
    Percentiles {
        samples: h.len(),
        p50: at(0.5),
        p90: at(0.9),
        p99: at(0.99),
        p999: at(0.999),
        max: h.max() as f64 / 1e3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_kept_apart_and_differences_are_taken() {
        let mut a = Latency::new();
        for i in 1..=100 {
            a.record(i * 1_000, false);
        }
        let mut before = Latency::new();
        before.add(&a);
        a.record(5_000_000, true);
        a.record(u64::MAX, true);
        assert_eq!(a.dram().samples, 100);
        assert!((a.dram().p50 - 50.0).abs() < 1.0, "{:?}", a.dram());
        let diff = a.since(&before);
        assert_eq!((diff.dram().samples, diff.flash().samples), (0, 2));
    }
}
