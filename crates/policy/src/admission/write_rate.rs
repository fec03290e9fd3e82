//! `write_rate`: a chance that follows a rate of writes.

use larder_base::{Nanos, Rng};

use super::simple::UNRANKED;
use super::{AdmissionError, AdmissionPolicy, Candidate, Reason, Setup, Verdict, WriteRateConfig};

/// Admits by chance and adjusts the chance at intervals so that the bytes admitted hold a rate (the idea of CacheLib's
/// `DynamicRandomAP`, Berg et al., OSDI 2020, §4.3).
///
/// The chance of the next interval is what the rate allows in it, over what the last interval offered; and what earlier
/// intervals wrote too much or too little is made up for over the next ten intervals, so that the mean over a long
/// time is the rate whatever the load does. Debt and credit are bounded by ten intervals' worth: an idle night does
/// not buy a morning of unlimited writes.
#[derive(Debug)]
pub struct WriteRate {
    rng: Rng,
    /// This shard's rate, bytes per second.
    rate: f64,
    share: f64,
    /// The rate was configured: the write budget does not change it.
    fixed: bool,
    interval: Nanos,
    /// Start of the running interval.
    started: Option<Nanos>,
    /// Bytes judged and admitted in it.
    offered: f64,
    admitted: f64,
    /// Bytes allowed so far and not written (negative: written too much).
    credit: f64,
    chance: f64,
}

/// Intervals over which errors are made up for.
const MEMORY: f64 = 10.0;

impl WriteRate {
    /// With the parameters of `config`.
    ///
    /// # Errors
    /// [`AdmissionError::NoRate`] when neither the configuration nor the write budget gives a rate.
    pub fn new(config: &WriteRateConfig, setup: &Setup) -> Result<WriteRate, AdmissionError> {
        let fixed = config.bytes_per_second.0 > 0;
        let whole = if fixed { Some(config.bytes_per_second.0 as f64) } else { setup.budget_rate };
        let whole = whole.filter(|r| r.is_finite() && *r > 0.0).ok_or(AdmissionError::NoRate)?;
        Ok(WriteRate {
            rng: Rng::new(setup.seed),
            rate: whole * setup.share,
            share: setup.share,
            fixed,
            interval: Nanos::from_secs(u64::from(config.interval)),
            started: None,
            offered: 0.0,
            admitted: 0.0,
            credit: 0.0,
            chance: 1.0,
        })
    }

    /// The chance now.
    pub fn chance(&self) -> f64 {
        self.chance
    }

    fn adjust(&mut self, now: Nanos) {
        let started = *self.started.get_or_insert(now);
        let elapsed = now - started;
        if elapsed < self.interval {
            return;
        }
        let elapsed = elapsed.as_secs_f64();
        let seconds = self.interval.as_secs_f64();
        let bound = self.rate * seconds * MEMORY;
        self.credit = (self.credit + self.rate * elapsed - self.admitted).clamp(-bound, bound);
        let allowed = (self.rate * seconds + self.credit / MEMORY).max(0.0);
        let expected = self.offered * seconds / elapsed;
        self.chance = if expected > 0.0 { (allowed / expected).min(1.0) } else { 1.0 };
        (self.started, self.offered, self.admitted) = (Some(now), 0.0, 0.0);
    }
}

impl AdmissionPolicy for WriteRate {
    fn judge(&mut self, candidate: &Candidate, now: Nanos) -> Verdict {
        self.adjust(now);
        let bytes = f64::from(candidate.features.size);
        self.offered += bytes;
        // A load that jumps within an interval must not run away: no interval admits more than its own part, the credit,
        // and one interval's part more.
        let ceiling = 2.0 * self.rate * self.interval.as_secs_f64() + self.credit.max(0.0);
        if self.admitted + bytes <= ceiling.max(bytes) && self.rng.chance(self.chance) {
            self.admitted += bytes;
            UNRANKED
        } else {
            Verdict::Reject(Reason::Chance)
        }
    }

    fn set_budget_rate(&mut self, bytes_per_second: f64) {
        if !self.fixed && bytes_per_second.is_finite() && bytes_per_second > 0.0 {
            self.rate = bytes_per_second * self.share;
        }
    }

    fn memory_bytes(&self) -> usize {
        0
    }
}
