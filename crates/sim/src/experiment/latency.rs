//! Distributions of latencies.

use hdrhistogram::Histogram;
use larder_base::Nanos;

use super::outcome::{Latencies, Latency};

/// Longer latencies count as an hour.
const LONGEST: u64 = 3_600_000_000_000;

/// What a request met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Met {
    Dram,
    Flash,
    Miss,
    Write,
}

fn histogram(digits: u8) -> Histogram<u64> {
    // The bounds are constants in range.
    Histogram::new_with_bounds(1, LONGEST, digits)
        .unwrap_or_else(|_| unreachable!("a histogram of constant bounds"))
}

/// Latencies by what was met.
pub(super) struct Recorder {
    /// Nanoseconds, to three digits; in the order of [`Met`].
    met: [Histogram<u64>; 4],
}

impl Recorder {
    pub(super) fn new() -> Recorder {
        Recorder { met: std::array::from_fn(|_| histogram(3)) }
    }

    #[inline]
    pub(super) fn record(&mut self, met: Met, latency: Nanos) {
        self.met[met as usize].saturating_record(latency.0.clamp(1, LONGEST));
    }

    pub(super) fn reset(&mut self) {
        self.met.iter_mut().for_each(Histogram::reset);
    }

    pub(super) fn latencies(&self) -> Latencies {
        let [dram, flash, miss, write] = &self.met;
        let sum = |parts: &[&Histogram<u64>]| {
            let mut all = histogram(3);
            for part in parts {
                // Of the same bounds, they fit.
                all.add(*part).ok();
            }
            summary(&all)
        };
        Latencies {
            all: sum(&[dram, flash, miss, write]),
            read: sum(&[dram, flash, miss]),
            hit_dram: summary(dram),
            hit_flash: summary(flash),
            miss: summary(miss),
            write: summary(write),
        }
    }
}

fn summary(h: &Histogram<u64>) -> Latency {
    if h.is_empty() {
        return Latency::default();
    }
    let us = |nanos: u64| nanos as f64 / 1000.0;
    Latency {
        count: h.len(),
        mean_us: h.mean() / 1000.0,
        p50_us: us(h.value_at_quantile(0.5)),
        p90_us: us(h.value_at_quantile(0.9)),
        p99_us: us(h.value_at_quantile(0.99)),
        p999_us: us(h.value_at_quantile(0.999)),
        max_us: us(h.max()),
    }
}

/// A coarse distribution that is cheap to keep for each point of a time series: eight ranges an octave, so that a
/// percentile is right to 6 %.
#[derive(Clone, Debug, Default)]
pub(super) struct Coarse {
    counts: Vec<u32>,
    total: u64,
}

const PER_OCTAVE: u32 = 8;

impl Coarse {
    fn bin(nanos: u64) -> usize {
        let n = nanos.max(u64::from(PER_OCTAVE));
        let octave = n.ilog2();
        let within = (n >> (octave - 3)) as u32 - PER_OCTAVE;
        ((octave - 3) * PER_OCTAVE + within) as usize
    }

    /// The middle of a bin.
    fn value(bin: usize) -> f64 {
        let (octave, within) = (bin as u32 / PER_OCTAVE + 3, bin as u32 % PER_OCTAVE);
        (f64::from(PER_OCTAVE + within) + 0.5) * 2f64.powi(octave as i32 - 3)
    }

    #[inline]
    pub(super) fn record(&mut self, latency: Nanos) {
        let bin = Self::bin(latency.0);
        if self.counts.len() <= bin {
            self.counts.resize(bin + 1, 0);
        }
        self.counts[bin] += 1;
        self.total += 1;
    }

    pub(super) fn merge(&mut self, other: &Coarse) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (a, b) in self.counts.iter_mut().zip(&other.counts) {
            *a += b;
        }
        self.total += other.total;
    }

    /// The latency that a share `q` did not exceed, microseconds; 0 of nothing.
    pub(super) fn quantile_us(&self, q: f64) -> f64 {
        let rank = (q * self.total as f64).ceil() as u64;
        let mut sum = 0;
        for (bin, &count) in self.counts.iter().enumerate() {
            sum += u64::from(count);
            if sum >= rank && sum > 0 {
                return Self::value(bin) / 1000.0;
            }
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_of_known_numbers() {
        let mut r = Recorder::new();
        for i in 1..=1000u64 {
            r.record(Met::Flash, Nanos(i * 1000));
        }
        r.record(Met::Write, Nanos(u64::MAX));
        let l = r.latencies();
        assert_eq!((l.hit_flash.count, l.all.count, l.miss), (1000, 1001, Latency::default()));
        for (found, wanted) in
            [(l.read.p50_us, 500.0), (l.read.p99_us, 990.0), (l.read.max_us, 1000.0)]
        {
            assert!((found - wanted).abs() < 0.002 * wanted, "{found} {wanted}");
        }
        r.reset();
        assert_eq!(r.latencies().all.count, 0);
    }

    #[test]
    fn coarse_percentiles_are_within_six_percent() {
        let mut whole = Coarse::default();
        let mut halves = [Coarse::default(), Coarse::default()];
        for i in 1..=100_000u64 {
            whole.record(Nanos(i * 37));
            halves[(i % 2) as usize].record(Nanos(i * 37));
        }
        let [mut merged, other] = halves;
        merged.merge(&other);
        for q in [0.01, 0.5, 0.99, 1.0] {
            let wanted = q * 100_000.0 * 37.0 / 1000.0;
            let found = whole.quantile_us(q);
            assert!((found - wanted).abs() < 0.0626 * wanted, "{q}: {found} {wanted}");
            assert_eq!(found, merged.quantile_us(q));
        }
        assert_eq!(Coarse::default().quantile_us(0.5), 0.0);
        // Every bin's middle is in that bin.
        for bin in 0..Coarse::bin(LONGEST) {
            assert_eq!(Coarse::bin(Coarse::value(bin) as u64), bin);
        }
    }
}
