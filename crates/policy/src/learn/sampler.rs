//! Samples with labels, one per object, in bounded memory.

use larder_base::{AppId, Nanos, Rng};
use serde::{Deserialize, Serialize};

use super::features::{Packed, Vector};
use super::followed::{Followed, Tracked};

/// What an object's eviction means for its label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AtLeave {
    /// Reads count until the object leaves the cache (Flashield §3.1).
    Close,
    /// Misses of the same key count too, until it is overwritten: flash would have served them. Otherwise a policy
    /// that rejects an object teaches itself that nobody reads it.
    CountMisses,
}

/// Bounds of a [`Sampler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerLimits {
    /// Objects followed at a time.
    pub tracked: usize,
}

/// Follows a hash-sampled subset of the objects: of each it keeps the features at one access, chosen uniformly over its
/// accesses in a window (the k-th replaces the one kept with probability 1/k, Flashield §4.2), and counts the reads within
/// one horizon after it.
///
/// The window of an object starts at its first access and lasts one horizon; an object closes one horizon after the access
/// that was kept and may then be sampled anew. The subset is chosen by hash, so an object is followed from its first access
/// on or not at all, and shrinks by half when the table is full (as in SHARDS, Waldspurger et al., FAST 2015).
#[derive(Debug)]
pub struct Sampler {
    followed: Followed,
    limits: SamplerLimits,
    /// Fingerprints below this are followed.
    threshold: u64,
    /// Most followed at a time since the threshold last changed.
    peak: usize,
    /// When the threshold may be raised again.
    reviewed: Nanos,
    at_leave: AtLeave,
    rng: Rng,
}

/// A sample whose label is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed {
    /// Whose object it is.
    pub app: AppId,
    /// The features at the kept access.
    pub x: Vector,
    /// Reads within the horizon.
    pub reads: u32,
    /// Whether one of them came late: no more than half a horizon before the label closed.
    pub late: bool,
    /// What the caller noted at the kept access.
    pub note: u8,
}

/// Bytes that one followed object is given when a policy's memory is divided: more than it takes. Fixed, since how many are
/// followed decides what is learnt.
pub(crate) const TRACKED_BYTES: usize = 132;
const _: () = assert!(TRACKED_BYTES >= Followed::MOST_BYTES);

impl Sampler {
    /// A sampler that follows everything until it is full.
    pub fn new(limits: SamplerLimits, at_leave: AtLeave, seed: u64) -> Sampler {
        Sampler {
            followed: Followed::default(),
            limits: SamplerLimits { tracked: limits.tracked.max(1) },
            threshold: u64::MAX,
            peak: 0,
            reviewed: Nanos::ZERO,
            at_leave,
            rng: Rng::new(seed),
        }
    }

    /// Whether this object belongs to the followed subset. Cheap: everything else starts with it.
    #[inline]
    pub fn follows(&self, fingerprint: u64) -> bool {
        fingerprint <= self.threshold
    }

    /// Share of the objects that is followed.
    pub fn rate(&self) -> f64 {
        self.threshold as f64 / u64::MAX as f64
    }

    /// Objects followed now.
    pub fn len(&self) -> usize {
        self.followed.len()
    }

    /// Whether none is.
    pub fn is_empty(&self) -> bool {
        self.followed.len() == 0
    }

    /// Offers an access as the sample of its object. `features` is called only if it is kept, and yields the vector and
    /// the note. Count the access itself with [`Sampler::read`] *before*, since only later reads are the label's.
    pub fn offer(
        &mut self,
        fingerprint: u64,
        app: AppId,
        now: Nanos,
        horizon: Nanos,
        features: impl FnOnce() -> (Vector, u8),
    ) {
        if !self.follows(fingerprint) {
            return;
        }
        if let Some(at) = self.followed.find(fingerprint) {
            let t = self.followed.at(at);
            if now > t.window_end {
                return;
            }
            t.offered = t.offered.saturating_add(1);
            if self.rng.below(u64::from(t.offered)) != 0 {
                return;
            }
            let (x, note) = features();
            (t.x, t.note) = (Packed::of(&x), note);
            t.app = app;
            t.reads = 0;
            t.marks = 0;
            self.followed.set_deadline(at, now + horizon);
            return;
        }
        if self.followed.len() >= self.limits.tracked {
            self.halve(now, horizon);
            if !self.follows(fingerprint) || self.followed.len() >= self.limits.tracked {
                return;
            }
        }
        let (x, note) = features();
        let deadline = now + horizon;
        self.followed.insert(Tracked {
            fingerprint,
            window_end: deadline,
            deadline,
            x: Packed::of(&x),
            app,
            offered: 1,
            reads: 0,
            place: 0,
            note,
            marks: 0,
        });
        self.peak = self.peak.max(self.followed.len());
    }

    /// The followed object, unless its reads no longer count.
    #[inline]
    fn counting(&mut self, fingerprint: u64) -> Option<&mut Tracked> {
        if !self.follows(fingerprint) {
            return None;
        }
        let at = self.followed.find(fingerprint)?;
        Some(self.followed.at(at)).filter(|t| !t.has(Tracked::FROZEN))
    }

    /// A read that was a hit, in either tier.
    pub fn read(&mut self, fingerprint: u64, now: Nanos, horizon: Nanos) {
        if let Some(t) = self.counting(fingerprint) {
            t.count(now, horizon);
        }
    }

    /// A read that missed.
    pub fn miss(&mut self, fingerprint: u64, now: Nanos, horizon: Nanos) {
        if self.at_leave == AtLeave::Close {
            return;
        }
        if let Some(t) = self.counting(fingerprint) {
            t.count(now, horizon);
            t.marks |= Tracked::MISSED;
        }
    }

    /// A write. `update`: the key was in the cache. A write after a miss fetches the same object again; any other makes a
    /// new one, and reads of that are not the sample's.
    pub fn write(&mut self, fingerprint: u64, update: bool) {
        // One that does not count stays so, and that it was missed means nothing any more.
        if let Some(t) = self.counting(fingerprint) {
            if update || !t.has(Tracked::MISSED) {
                t.marks |= Tracked::FROZEN;
            }
            t.marks &= !Tracked::MISSED;
        }
    }

    /// The object was evicted from DRAM without going to flash.
    pub fn evicted(&mut self, fingerprint: u64) {
        if self.at_leave == AtLeave::Close {
            self.removed(fingerprint);
        }
    }

    /// The object was deleted, or expired.
    pub fn removed(&mut self, fingerprint: u64) {
        if let Some(t) = self.counting(fingerprint) {
            t.marks |= Tracked::FROZEN;
        }
    }

    /// The next sample whose label has closed by `now`. Call it before counting anything that happens at `now`.
    #[inline]
    pub fn next_closed(&mut self, now: Nanos, horizon: Nanos) -> Option<Closed> {
        if self.followed.first_deadline()? >= now {
            return None;
        }
        let t = self.followed.take_first()?;
        self.review(now, horizon);
        let (x, late) = (t.x.vector(), t.has(Tracked::LATE));
        Some(Closed { app: t.app, x, reads: t.reads, late, note: t.note })
    }

    /// Halves the followed subset, dropping what falls out of it.
    fn halve(&mut self, now: Nanos, horizon: Nanos) {
        self.threshold /= 2;
        self.followed.keep_to(self.threshold);
        self.peak = self.followed.len();
        self.reviewed = now + horizon + horizon;
    }

    /// Doubles the subset when the table has stayed below a third of its limit for two horizons.
    fn review(&mut self, now: Nanos, horizon: Nanos) {
        if now < self.reviewed {
            return;
        }
        if self.peak * 3 < self.limits.tracked {
            self.threshold = self.threshold.saturating_mul(2) | 1;
        }
        self.peak = self.followed.len();
        self.reviewed = now + horizon + horizon;
    }

    /// Heap bytes in use.
    pub fn memory_bytes(&self) -> usize {
        self.followed.memory_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::super::DIMENSIONS;
    use super::*;

    const HOUR: Nanos = Nanos::from_secs(3600);

    fn sampler(at_leave: AtLeave, tracked: usize, seed: u64) -> Sampler {
        Sampler::new(SamplerLimits { tracked }, at_leave, seed)
    }

    fn marked(mark: u16) -> (Vector, u8) {
        let mut x = [0; DIMENSIONS];
        x[0] = mark;
        (x, 0)
    }

    fn secs(s: u64) -> Nanos {
        Nanos::from_secs(s)
    }

    #[test]
    fn each_access_is_kept_equally_often() {
        const ACCESSES: u64 = 8;
        const OBJECTS: u64 = 16_000;
        let mut s = sampler(AtLeave::Close, usize::MAX, 11);
        for fp in 0..OBJECTS {
            for k in 0..ACCESSES {
                s.read(fp, secs(k), HOUR);
                s.offer(fp, AppId(0), secs(k), HOUR, || marked(k as u16));
            }
        }
        let mut counts = [0f64; ACCESSES as usize];
        while let Some(c) = s.next_closed(secs(10_000), HOUR) {
            counts[usize::from(c.x[0])] += 1.0;
            assert_eq!(
                u64::from(c.reads),
                ACCESSES - 1 - u64::from(c.x[0]),
                "only later reads count"
            );
        }
        assert_eq!(counts.iter().sum::<f64>(), OBJECTS as f64, "one sample per object");
        let expected = OBJECTS as f64 / ACCESSES as f64;
        let chi2: f64 = counts.iter().map(|c| (c - expected).powi(2) / expected).sum();
        assert!(chi2 < 18.5, "χ² {chi2} with 7 degrees of freedom (1 % point 18.48): {counts:?}");
    }

    #[test]
    fn the_label_ends_with_the_horizon() {
        let mut s = sampler(AtLeave::Close, 100, 1);
        s.offer(1, AppId(0), secs(0), secs(10), || marked(0));
        assert_eq!(s.next_closed(secs(10), secs(10)), None);
        s.read(1, secs(0), HOUR);
        assert_eq!(s.next_closed(secs(11), secs(10)).unwrap().reads, 1);
        s.read(1, secs(0), HOUR);
        assert!(s.is_empty() && s.next_closed(secs(99), secs(10)).is_none());
    }

    #[test]
    fn late_is_the_second_half_of_the_horizon() {
        for (at, late) in [(1, false), (4, false), (5, true), (10, true)] {
            let mut s = sampler(AtLeave::CountMisses, 100, 1);
            s.offer(1, AppId(0), secs(0), secs(10), || marked(0));
            s.read(1, secs(1), secs(10));
            s.miss(1, secs(at), secs(10));
            s.read(1, secs(at), secs(10));
            assert_eq!(s.next_closed(secs(11), secs(10)).unwrap().late, late, "{at}");
        }
    }

    #[test]
    fn updates_and_removals_end_the_counting() {
        for end in [
            |s: &mut Sampler| s.write(1, true),
            |s: &mut Sampler| s.removed(1),
            |s: &mut Sampler| s.evicted(1),
        ] {
            let mut s = sampler(AtLeave::Close, 100, 1);
            s.offer(1, AppId(0), secs(0), secs(10), || marked(0));
            s.read(1, secs(0), HOUR);
            end(&mut s);
            s.read(1, secs(0), HOUR);
            s.miss(1, secs(0), HOUR);
            assert_eq!(s.next_closed(secs(11), secs(10)).unwrap().reads, 1);
        }
    }

    #[test]
    fn misses_count_until_the_object_changes() {
        let mut s = sampler(AtLeave::CountMisses, 100, 1);
        s.offer(1, AppId(0), secs(0), secs(10), || marked(0));
        s.evicted(1);
        s.miss(1, secs(0), HOUR);
        s.write(1, false); // fetched again
        s.read(1, secs(0), HOUR);
        s.write(1, false); // written out of the blue: another object
        s.read(1, secs(0), HOUR);
        assert_eq!(s.next_closed(secs(11), secs(10)).unwrap().reads, 2);
    }

    #[test]
    fn memory_is_bounded_and_the_subset_recovers() {
        let mut s = sampler(AtLeave::CountMisses, 100, 1);
        let mut rng = Rng::new(5);
        for t in 0..50_000 {
            while s.next_closed(secs(t), secs(600)).is_some() {}
            s.offer(rng.next_u64(), AppId(0), secs(t), secs(600), || marked(0));
            assert!(s.len() <= 100);
            if t % 100 == 0 {
                s.followed.validate();
            }
        }
        let low = s.rate();
        assert!(low < 0.3, "{low}");
        // Now hardly anything comes: the subset grows again.
        for t in 0..200u64 {
            let now = secs(50_000 + t * 600);
            while s.next_closed(now, secs(600)).is_some() {}
            s.offer(t, AppId(0), now, secs(600), || marked(0));
        }
        assert!(s.rate() > 0.9, "{}", s.rate());
    }
}
