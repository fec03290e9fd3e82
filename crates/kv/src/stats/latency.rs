//! Latency as the server sees it: from the read of a request to the last byte of its answer handed to the system.

use larder_runtime::latency::LatencyHistogram;
pub use larder_runtime::latency::Percentiles;

/// Histograms of sampled requests.
#[derive(Debug, Default)]
pub struct Latency {
    /// Answered without reading flash.
    dram: LatencyHistogram,
    /// Waited for flash.
    flash: LatencyHistogram,
}

impl Latency {
    /// Nothing recorded.
    pub fn new() -> Latency {
        Latency::default()
    }

    /// One request.
    pub fn record(&mut self, nanos: u64, waited_for_flash: bool) {
        if waited_for_flash { self.flash.record(nanos) } else { self.dram.record(nanos) }
    }

    /// Adds another worker's.
    pub fn add(&mut self, other: &Latency) {
        self.dram.add(&other.dram);
        self.flash.add(&other.flash);
    }

    /// What was recorded since `earlier`, a copy of this one.
    pub fn since(&self, earlier: &Latency) -> Latency {
        Latency { dram: self.dram.since(&earlier.dram), flash: self.flash.since(&earlier.flash) }
    }

    /// Requests answered from DRAM, or by a miss.
    pub fn dram(&self) -> Percentiles {
        self.dram.percentiles()
    }

    /// Requests that waited for flash.
    pub fn flash(&self) -> Percentiles {
        self.flash.percentiles()
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
