//! When a region of the write-intent map is quiet enough for its bit to go.
//!
//! Quiet at one moment is not enough: the next write would only have to ask for the bit again, and wait for it.

use std::ops::RangeInclusive;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use larder_base::Nanos;

/// A region that has changed within this time keeps its bit.
pub const QUIET: Nanos = Nanos::from_secs(30);

/// When each region was last changed by a client. Written without a lock.
#[derive(Debug)]
pub struct Changes {
    quiet: Nanos,
    regions: u32,
    /// Units of [`Changes::UNITS`] to a quiet time since the start, and one: [`PART`] regions each, where one of them has changed.
    /// (There are up to four million regions, and most caches see few of them.)
    last: Vec<OnceLock<Box<[AtomicU32]>>>,
}

/// Regions whose times are kept together.
const PART: u32 = 1024;

impl Changes {
    /// What is a quiet time is measured in so many parts.
    const UNITS: u64 = 30;

    /// Of so many regions, of which one is quiet after `quiet`.
    pub fn new(regions: u32, quiet: Nanos) -> Changes {
        let parts = (0..regions.div_ceil(PART)).map(|_| OnceLock::new());
        Changes { quiet, regions, last: parts.collect() }
    }

    fn unit(&self, now: Nanos) -> u32 {
        u32::try_from(now.0 / (self.quiet.0 / Changes::UNITS).max(1)).unwrap_or(u32::MAX - 1) + 1
    }

    /// Bytes of `regions` are about to change.
    pub fn changing(&self, now: Nanos, regions: RangeInclusive<u32>) {
        let unit = self.unit(now);
        for region in regions.filter(|region| *region < self.regions) {
            let part = self.last[(region / PART) as usize]
                .get_or_init(|| (0..PART).map(|_| AtomicU32::new(0)).collect());
            part[(region % PART) as usize].store(unit, Ordering::Relaxed);
        }
    }

    /// Whether no client has changed `region` for a quiet time.
    pub fn is_quiet(&self, now: Nanos, region: u32) -> bool {
        let part = self.last.get((region / PART) as usize).and_then(OnceLock::get);
        let last = part.map_or(0, |part| part[(region % PART) as usize].load(Ordering::Relaxed));
        last == 0 || u64::from(self.unit(now).saturating_sub(last)) >= Changes::UNITS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_is_quiet_after_its_last_change() {
        let changes = Changes::new(8, QUIET);
        let at = Nanos::from_secs;
        assert!(changes.is_quiet(at(0), 3) && changes.is_quiet(at(0), 99));
        changes.changing(at(100), 2..=4);
        changes.changing(at(120), 4..=9);
        for (region, from) in [(1, 0), (2, 130), (3, 130), (4, 150), (7, 150)] {
            for now in 100..200 {
                // (Of the same second nothing is said.)
                let quiet = now >= from;
                let known = now < 120 && region >= 4;
                assert!(known || changes.is_quiet(at(now), region) == quiet, "{region} {now}");
            }
        }
        let soon = Changes::new(1, Nanos::from_millis(30));
        soon.changing(Nanos::from_millis(5), 0..=0);
        assert!(!soon.is_quiet(Nanos::from_millis(34), 0));
        assert!(soon.is_quiet(Nanos::from_millis(35), 0));
    }
}
