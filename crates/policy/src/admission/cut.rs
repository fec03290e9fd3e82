//! The score from which objects are admitted, held so that a rate of writes is met.
//!
//! A fixed threshold leaves the rate of writes to the workload: too few objects pass and the budget is wasted, or too many
//! and it is spent on whatever comes first. Here the best of what is offered is admitted, as much as the rate allows.

use larder_base::Nanos;

/// Candidates that are remembered to know how scores are spread, at least and at most.
const REMEMBERED: (usize, usize) = (32, 512);
/// Candidates between two adjustments.
const EVERY: u32 = 128;
/// What was not admitted, or too much, is made up for over this many adjustments.
const MADE_UP_OVER: f64 = 8.0;
/// Most that is saved or owed, in adjustments' worth of the rate.
const SAVED: f64 = 32.0;

/// A candidate as it is remembered: what it is scored by, and not its score, which changes as more is learnt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Offered<S> {
    pub(super) of: S,
    pub(super) bytes: u32,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Cut<S> {
    /// Bytes per second of this shard.
    rate: f64,
    remembered: usize,
    seen: Vec<Offered<S>>,
    next: usize,
    since: u32,
    started: Option<Nanos>,
    /// Bytes in the present stretch.
    offered: f64,
    admitted: f64,
    /// Mean seconds of a stretch and bytes offered in it, smoothed.
    stretch: f64,
    stretch_bytes: f64,
    /// Bytes saved; negative when owed.
    credit: f64,
    value: f32,
    /// Of the candidates whose score is exactly the cut, the share that is admitted (by bytes), and the part of one that is
    /// due.
    tied: f64,
    due: f64,
}

impl<S: Copy> Cut<S> {
    /// Bytes that a cut takes of `memory`.
    pub(super) fn bytes_of(memory: usize) -> usize {
        (memory / 32 / size_of::<Offered<S>>()).clamp(REMEMBERED.0, REMEMBERED.1)
            * size_of::<Offered<S>>()
    }

    /// A cut that holds `rate` bytes per second, in [`Cut::bytes_of`] `memory`.
    pub(super) fn new(rate: f64, memory: usize) -> Cut<S> {
        let remembered = Self::bytes_of(memory) / size_of::<Offered<S>>();
        Cut {
            rate,
            remembered,
            seen: Vec::with_capacity(remembered),
            next: 0,
            since: 0,
            started: None,
            offered: 0.0,
            admitted: 0.0,
            stretch: 0.0,
            stretch_bytes: 0.0,
            credit: 0.0,
            value: f32::NEG_INFINITY,
            tied: 1.0,
            due: 0.0,
        }
    }

    pub(super) fn set_rate(&mut self, rate: f64) {
        self.rate = rate;
    }

    /// Whether the candidate of this score is admitted; `wanted`: it may be. What is not counts among the offered all the
    /// same: the cut falls no lower because dearer objects are kept out. `rescore` gives the present score of one that was seen before.
    pub(super) fn admits(
        &mut self,
        score: f32,
        candidate: Offered<S>,
        wanted: bool,
        now: Nanos,
        rescore: impl Fn(&Offered<S>) -> f32,
    ) -> bool {
        let bytes = f64::from(candidate.bytes);
        if self.seen.len() < self.remembered {
            self.seen.push(candidate);
        } else {
            self.seen[self.next] = candidate;
        }
        self.next = (self.next + 1) % self.remembered;
        self.offered += bytes;
        self.since += 1;
        let started = *self.started.get_or_insert(now);
        if self.since >= EVERY && now > started {
            self.adjust((now - started).as_secs_f64(), rescore);
            self.started = Some(now);
        }
        let passes = match score.total_cmp(&self.value) {
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Equal => {
                self.due += self.tied;
                let now_due = self.due >= 1.0;
                self.due -= f64::from(u8::from(now_due));
                now_due
            }
        };
        let admitted = passes && wanted;
        if admitted {
            self.admitted += bytes;
        }
        admitted
    }

    fn adjust(&mut self, seconds: f64, rescore: impl Fn(&Offered<S>) -> f32) {
        let smooth = |old: f64, new: f64| if old == 0.0 { new } else { old * 0.75 + new * 0.25 };
        self.stretch = smooth(self.stretch, seconds);
        self.stretch_bytes = smooth(self.stretch_bytes, self.offered);
        let usual = self.rate * self.stretch;
        self.credit = (self.credit + self.rate * seconds - self.admitted)
            .clamp(-SAVED * usual, SAVED * usual);
        let allowed = (usual + self.credit / MADE_UP_OVER).max(0.0);
        let share = (allowed / self.stretch_bytes.max(1.0)).min(1.0);
        (self.since, self.offered, self.admitted) = (0, 0.0, 0.0);
        if share >= 1.0 {
            (self.value, self.tied) = (f32::NEG_INFINITY, 1.0);
            return;
        }
        let mut scores: Vec<(f32, f64)> =
            self.seen.iter().map(|s| (rescore(s), f64::from(s.bytes))).collect();
        scores.sort_by(|a, b| b.0.total_cmp(&a.0));
        let room = scores.iter().map(|s| s.1).sum::<f64>() * share;
        let (mut above, mut at) = (0.0, 0);
        while at < scores.len() {
            let level = scores[at].0;
            let same = scores[at..].iter().take_while(|s| s.0 == level);
            let (count, bytes) = same.fold((0, 0.0), |(n, sum), s| (n + 1, sum + s.1));
            if above + bytes >= room {
                (self.value, self.tied) =
                    (level, ((room - above) / bytes.max(1.0)).clamp(0.0, 1.0));
                return;
            }
            above += bytes;
            at += count;
        }
        (self.value, self.tied) = (f32::NEG_INFINITY, 1.0);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.seen.capacity() * size_of::<Offered<S>>()
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    /// Offers `count` candidates of 100 bytes, one a millisecond; returns those admitted and their mean score.
    fn offer(
        cut: &mut Cut<u16>,
        from: u64,
        count: u64,
        score: impl Fn(&mut Rng) -> u16,
    ) -> (u64, f64) {
        let mut rng = Rng::new(from + 1);
        let (mut admitted, mut sum) = (0, 0.0);
        for i in 0..count {
            let s = score(&mut rng);
            let offered = Offered { of: s, bytes: 100 };
            let now = Nanos::from_millis(from + i);
            if cut.admits(f32::from(s), offered, true, now, |s| f32::from(s.of)) {
                admitted += 1;
                sum += f64::from(s);
            }
        }
        (admitted, sum / admitted.max(1) as f64)
    }

    #[test]
    fn the_best_are_admitted_at_the_rate() {
        // 100 kB/s are offered, 20 kB/s allowed.
        let mut cut = Cut::new(20_000.0, 1 << 20);
        offer(&mut cut, 0, 2000, |r| r.below(1000) as u16);
        let (admitted, mean) = offer(&mut cut, 2000, 20_000, |r| r.below(1000) as u16);
        assert!((3800..=4200).contains(&admitted), "{admitted}");
        assert!(mean > 870.0, "the best fifth has a mean of 900: {mean}");
    }

    #[test]
    fn ties_are_shared_out() {
        let mut cut = Cut::new(30_000.0, 1 << 20);
        offer(&mut cut, 0, 2000, |_| 7);
        let (admitted, _) = offer(&mut cut, 2000, 20_000, |_| 7);
        assert!((5700..=6300).contains(&admitted), "{admitted}");
    }

    #[test]
    fn more_than_is_offered_admits_all_and_a_change_is_followed() {
        let mut cut = Cut::new(1e6, 1 << 20);
        assert_eq!(offer(&mut cut, 0, 3000, |r| r.below(9) as u16).0, 3000);
        cut.set_rate(10_000.0);
        offer(&mut cut, 3000, 10_000, |r| r.below(900) as u16);
        let (admitted, _) = offer(&mut cut, 13_000, 10_000, |r| 100 + r.below(900) as u16);
        assert!((900..=1100).contains(&admitted), "{admitted}");
    }
}
