//! `reject_first`: the second time only.

use larder_base::{Nanos, ObjectHash};

use super::recent::RecentKeys;
use super::simple::UNRANKED;
use super::{
    AdmissionError, AdmissionPolicy, Candidate, Reason, RejectFirstConfig, Setup, Verdict,
};

/// Admits a key the second time that it leaves DRAM within a window of evictions (CacheLib's `RejectFirstAP`). False
/// admissions of keys seen once: about 7 %.
#[derive(Debug)]
pub struct RejectFirst {
    recent: RecentKeys,
}

/// Below this a window means nothing.
pub(super) const LEAST_WINDOW: u64 = 64;

impl RejectFirst {
    /// With the parameters of `config`.
    ///
    /// # Errors
    /// [`AdmissionError::Memory`] when the configured window does not fit, or memory does not hold even 64 keys.
    pub fn new(config: &RejectFirstConfig, setup: &Setup) -> Result<RejectFirst, AdmissionError> {
        let fits = RecentKeys::window_for(setup.memory);
        let window = if config.window == 0 {
            setup.objects.clamp(LEAST_WINDOW, fits.max(LEAST_WINDOW))
        } else {
            share_of(config.window, setup.share).max(LEAST_WINDOW)
        };
        if window > fits {
            let need = RecentKeys::bytes_for(window) as usize;
            return Err(AdmissionError::Memory {
                policy: "reject_first",
                need,
                given: setup.memory,
            });
        }
        Ok(RejectFirst { recent: RecentKeys::new(window) })
    }

    /// Bytes that each of `shards` shards takes for a window of so many keys in all.
    pub(super) fn bytes_for(window: u64, shards: u64) -> u64 {
        let part = share_of(window, 1.0 / shards as f64).max(LEAST_WINDOW);
        RecentKeys::bytes_for(part)
    }
}

/// A shard's part of a whole.
pub(super) fn share_of(whole: u64, share: f64) -> u64 {
    (whole as f64 * share).ceil() as u64
}

impl AdmissionPolicy for RejectFirst {
    fn judge(&mut self, candidate: &Candidate, _: Nanos) -> Verdict {
        let seen = self.recent.note(candidate.hash.fingerprint());
        // What survived on flash has been seen before by definition.
        if seen || candidate.survivor { UNRANKED } else { Verdict::Reject(Reason::FirstSeen) }
    }

    #[inline]
    fn warm_candidate(&self, hash: ObjectHash) {
        self.recent.warm(hash.fingerprint());
    }

    fn memory_bytes(&self) -> usize {
        self.recent.memory_bytes()
    }

    fn grow_as_filled(&mut self) {
        self.recent.grow_as_filled();
    }

    fn spared_bytes(&self) -> usize {
        self.recent.spared_bytes()
    }
}
