//! A sample of what was judged, followed for one lifetime of the cache, whether it was admitted or not.

use larder_base::Rng;

/// Entries of a set.
const WAYS: usize = 8;

/// What is followed. Times are ticks, which wrap.
#[derive(Clone, Copy, Debug, Default)]
struct Followed<T> {
    /// 0: none.
    tag: u32,
    until: u32,
    /// Until then another judgement of it may take the place of the one that is kept.
    window: u32,
    offered: u8,
    of: T,
}

/// Follows a part of what is judged, chosen by hash and so large that the table is about three quarters full. `T` is what is kept of each.
///
/// Of the judgements of one thing within one lifetime each is kept with equal chance (reservoir sampling, Vitter 1985): the
/// k-th replaces the one that is kept with chance 1/k.
#[derive(Debug)]
pub(crate) struct Follow<T> {
    sets: Box<[[Followed<T>; WAYS]]>,
    /// Hashes up to this are followed.
    threshold: u64,
    hand: usize,
    /// Of the present round of the hand: how many were found, and for how many there was no place.
    found: usize,
    refused: usize,
    rng: Rng,
}

impl<T: Copy + Default> Follow<T> {
    /// Bytes of each that is followed.
    pub(crate) const BYTES: usize = size_of::<Followed<T>>();

    /// One that takes about `memory` bytes.
    pub(crate) fn new(memory: usize, seed: u64) -> Follow<T> {
        let sets = (memory / (WAYS * Self::BYTES)).max(4);
        Follow {
            sets: vec![[Followed::default(); WAYS]; sets].into_boxed_slice(),
            threshold: u64::MAX,
            hand: 0,
            found: 0,
            refused: 0,
            rng: Rng::new(seed),
        }
    }

    /// The same that begins with one in `parts` of all.
    #[must_use]
    pub(crate) fn beginning_with(self, parts: u64) -> Follow<T> {
        Follow { threshold: u64::MAX / parts.max(1), ..self }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.sets.len() * WAYS * Self::BYTES
    }

    /// Whether it belongs to those that are followed. (The fingerprint's bits are mixed anew: key memories take sets from them.)
    #[inline]
    pub(crate) fn follows(&self, fingerprint: u64) -> bool {
        mixed(fingerprint) <= self.threshold
    }

    fn place(&self, fingerprint: u64) -> (usize, u32) {
        let set = (u128::from(fingerprint) * self.sets.len() as u128) >> 64;
        (set as usize, (fingerprint as u32).max(1))
    }

    /// What is kept of it and until when it is followed, as long as that is to come.
    #[inline]
    pub(crate) fn of(&mut self, fingerprint: u64, now: u32) -> Option<(&mut T, u32)> {
        if !self.follows(fingerprint) {
            return None;
        }
        let (set, tag) = self.place(fingerprint);
        let followed = self.sets[set].iter_mut().find(|f| f.tag == tag)?;
        (!is_past(followed.until, now)).then_some((&mut followed.of, followed.until))
    }

    /// Something was judged. Follows it, if there is room, for `lifetime`.
    pub(crate) fn judged(&mut self, fingerprint: u64, now: u32, lifetime: u32, of: T) {
        if !self.follows(fingerprint) {
            return;
        }
        let (set, tag) = self.place(fingerprint);
        let until = now.wrapping_add(lifetime.max(2));
        let new = Followed { tag, until, window: until, offered: 1, of };
        if let Some(known) = self.sets[set].iter().position(|f| f.tag == tag) {
            let was = self.sets[set][known];
            let offered = was.offered.saturating_add(1);
            if is_past(was.window, now) {
                return;
            }
            let takes = self.rng.below(u64::from(offered)) == 0;
            let window = was.window;
            let kept = &mut self.sets[set][known];
            kept.offered = offered;
            if takes {
                *kept = Followed { window, offered, ..new };
            }
            return;
        }
        match self.sets[set].iter_mut().find(|f| f.tag == 0) {
            Some(place) => *place = new,
            None => self.refused += 1,
        }
    }

    /// Takes out those of the next set whose lifetime is over. Called with each judgement: within as many of them as there are sets
    /// everything comes to its end.
    pub(crate) fn next(&mut self, now: u32, mut ended: impl FnMut(T)) {
        let set = &mut self.sets[self.hand];
        // Mostly none has come to its end.
        let (mut found, mut over) = (0, false);
        for followed in &*set {
            let there = followed.tag != 0;
            found += usize::from(there);
            over |= there & is_past(followed.until, now);
        }
        if over {
            for followed in set.iter_mut().filter(|of| of.tag != 0 && is_past(of.until, now)) {
                ended(followed.of);
                *followed = Followed::default();
                found -= 1;
            }
        }
        self.found += found;
        self.hand += 1;
        if self.hand == self.sets.len() {
            self.hand = 0;
            self.review();
        }
    }

    /// After each round: more are followed, or fewer.
    fn review(&mut self) {
        let places = self.sets.len() * WAYS;
        if self.refused > places / 16 {
            self.threshold -= self.threshold / 4;
        } else if self.found < places / 2 {
            self.threshold = self.threshold.saturating_add(self.threshold / 16);
        }
        (self.found, self.refused) = (0, 0);
    }

    #[cfg(test)]
    pub(crate) fn sets(&self) -> usize {
        self.sets.len()
    }
}

/// Whether a tick lies before now, or at it.
pub(crate) fn is_past(at: u32, now: u32) -> bool {
    now.wrapping_sub(at) < 1 << 31
}

fn mixed(fingerprint: u64) -> u64 {
    fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: u32 = 3_600_000;

    #[test]
    fn each_judgement_is_kept_equally_often() {
        const JUDGED: u32 = 6;
        let mut counts = [0u32; JUDGED as usize];
        let mut follow = Follow::<u32>::new(1 << 12, 7);
        for round in 0..12_000u32 {
            let key = Rng::new(round.into()).next_u64();
            let begin = round.wrapping_mul(4_000_000);
            for n in 0..JUDGED {
                follow.judged(key, begin.wrapping_add(n * 1000), LIFE, n);
            }
            for _ in 0..follow.sets() {
                follow.next(begin.wrapping_add(3_700_000), |n| counts[n as usize] += 1);
            }
        }
        let expected = 12_000.0 / f64::from(JUDGED);
        let chi2: f64 = counts.iter().map(|c| (f64::from(*c) - expected).powi(2) / expected).sum();
        assert!(chi2 < 15.1, "χ² {chi2} with 5 degrees of freedom (1 % point 15.09): {counts:?}");
    }

    #[test]
    fn as_many_are_followed_as_there_is_room_for() {
        let mut follow = Follow::<u32>::new(64 << 10, 1);
        let mut rng = Rng::new(3);
        let places = follow.sets.len() * WAYS;
        let mut refused = 0;
        for i in 0..400_000u64 {
            // A hundred times as many as there are places are judged in each lifetime.
            let now = (i * (u64::from(LIFE) / (100 * places as u64))) as u32;
            follow.next(now, |_| {});
            let before = follow.refused;
            follow.judged(rng.next_u64(), now, LIFE, 0);
            refused += usize::from(i > 350_000 && follow.refused > before);
        }
        let used = follow.sets.iter().flatten().filter(|f| f.tag != 0).count();
        assert!(used * 2 > places && refused < 25_000, "{used} of {places}, {refused} refused");
    }
}
