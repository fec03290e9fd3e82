//! Objects that are followed for one lifetime of flash after they were judged, whether they went there or not.

use larder_base::{Nanos, Rng};

use super::table::Like;

/// Objects of a set.
const WAYS: usize = 8;

/// An object that is followed.
#[derive(Clone, Copy, Debug, Default)]
struct Followed {
    /// 0: none.
    tag: u32,
    /// Ticks.
    until: u32,
    /// Until then another judgement of it may take the place of the one that is kept.
    window: u32,
    like: u16,
    /// Sixteenths of doublings.
    size: u16,
    reads: u8,
    late: u8,
    offered: u8,
    marks: u8,
}

const _: () = assert!(size_of::<Followed>() == 20);

const ADMITTED: u8 = 1;
/// Reads no longer count: it was overwritten, or removed.
const FROZEN: u8 = 2;
/// It was missed and is expected to be fetched again.
const MISSED: u8 = 4;
/// A time is kept in units of 2^20 ns, about a millisecond, and wraps after 52 days.
const TICK_SHIFT: u32 = 20;

fn tick(now: Nanos) -> u32 {
    (now.0 >> TICK_SHIFT) as u32
}

/// What became of one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Became {
    pub like: Like,
    pub log2_size: f32,
    pub admitted: bool,
    /// Reads within the lifetime, and those of its second half.
    pub reads: u32,
    pub late: u32,
}

/// Follows a part of the objects, chosen by hash and so large that the table is about three quarters full.
///
/// Of the judgements of an object within one lifetime each is kept with equal chance (reservoir sampling, Vitter 1985): the
/// k-th replaces the one that is kept with chance 1/k.
#[derive(Debug)]
pub(super) struct Follow {
    sets: Box<[[Followed; WAYS]]>,
    /// Objects of hashes up to this are followed.
    threshold: u64,
    hand: usize,
    /// Of the present round of the hand: how many were found, and for how many there was no place.
    found: usize,
    refused: usize,
    rng: Rng,
}

impl Follow {
    /// Bytes of one object.
    pub(super) const BYTES: usize = size_of::<Followed>();

    /// One that takes about `memory` bytes.
    pub(super) fn new(memory: usize, seed: u64) -> Follow {
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

    pub(super) fn memory_bytes(&self) -> usize {
        self.sets.len() * WAYS * Self::BYTES
    }

    /// Whether it belongs to those that are followed. (The fingerprint's bits are mixed anew: key memories take sets from them.)
    #[inline]
    pub(super) fn follows(&self, fingerprint: u64) -> bool {
        mixed(fingerprint) <= self.threshold
    }

    fn place(&self, fingerprint: u64) -> (usize, u32) {
        let set = (u128::from(fingerprint) * self.sets.len() as u128) >> 64;
        (set as usize, (fingerprint as u32).max(1))
    }

    /// The object, as long as its reads count.
    fn counting(&mut self, fingerprint: u64, now: Nanos) -> Option<&mut Followed> {
        if !self.follows(fingerprint) {
            return None;
        }
        let (set, tag) = self.place(fingerprint);
        let now = tick(now);
        let of = self.sets[set].iter_mut().find(|f| f.tag == tag)?;
        (of.marks & FROZEN == 0 && !is_past(of.until, now)).then_some(of)
    }

    /// A read, in whichever tier; one that missed would have been answered by flash.
    pub(super) fn read(&mut self, fingerprint: u64, now: Nanos, lifetime: Nanos, missed: bool) {
        let half = tick(Nanos(lifetime.0 / 2));
        let Some(of) = self.counting(fingerprint, now) else { return };
        of.reads = of.reads.saturating_add(1);
        if is_past(of.until.wrapping_sub(half), tick(now)) {
            of.late = of.late.saturating_add(1);
        }
        if missed {
            of.marks |= MISSED;
        }
    }

    /// A write. `update`: the key was in the cache. One behind a miss fetches the same object again.
    pub(super) fn write(&mut self, fingerprint: u64, now: Nanos, update: bool) {
        let Some(of) = self.counting(fingerprint, now) else { return };
        if update || of.marks & MISSED == 0 {
            of.marks |= FROZEN;
        }
        of.marks &= !MISSED;
    }

    /// It was deleted, or has expired.
    pub(super) fn removed(&mut self, fingerprint: u64, now: Nanos) {
        if let Some(of) = self.counting(fingerprint, now) {
            of.marks |= FROZEN;
        }
    }

    /// An object was judged. Follows it, if there is room.
    pub(super) fn judged(
        &mut self,
        fingerprint: u64,
        now: Nanos,
        lifetime: Nanos,
        (like, log2_size, admitted): (Like, f32, bool),
    ) {
        if !self.follows(fingerprint) {
            return;
        }
        let (set, tag) = self.place(fingerprint);
        let (at, until) = (tick(now), tick(now).wrapping_add(tick(lifetime).max(2)));
        let new = Followed {
            tag,
            until,
            window: until,
            like: like.number(),
            size: (log2_size * 16.0) as u16,
            reads: 0,
            late: 0,
            offered: 1,
            marks: if admitted { ADMITTED } else { 0 },
        };
        if let Some(known) = self.sets[set].iter().position(|f| f.tag == tag) {
            let was = self.sets[set][known];
            let offered = was.offered.saturating_add(1);
            if is_past(was.window, at) {
                return;
            }
            let takes = self.rng.below(u64::from(offered)) == 0;
            let window = was.window;
            let of = &mut self.sets[set][known];
            of.offered = offered;
            if takes {
                *of = Followed { window, offered, ..new };
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
    pub(super) fn next(&mut self, now: Nanos, mut became: impl FnMut(Became)) {
        let now = tick(now);
        for of in &mut self.sets[self.hand] {
            if of.tag != 0 && is_past(of.until, now) {
                became(Became {
                    like: Like::of_number(of.like),
                    log2_size: f32::from(of.size) / 16.0,
                    admitted: of.marks & ADMITTED != 0,
                    reads: of.reads.into(),
                    late: of.late.into(),
                });
                *of = Followed::default();
            }
            self.found += usize::from(of.tag != 0);
        }
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
}

/// Whether a tick lies before now, or at it.
fn is_past(at: u32, now: u32) -> bool {
    now.wrapping_sub(at) < 1 << 31
}

fn mixed(fingerprint: u64) -> u64 {
    fingerprint.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32)
}

#[cfg(test)]
mod tests {
    use super::super::table;
    use super::*;
    use crate::learn::{Features, History};

    const HOUR: Nanos = Nanos::from_secs(3600);

    fn secs(s: u64) -> Nanos {
        Nanos::from_secs(s)
    }

    fn like(reads: u32) -> Like {
        let f = Features { reads, age: 1, ..Features::default() };
        table::like(&f, History::default(), false, 0, HOUR)
    }

    fn ended(follow: &mut Follow, now: Nanos) -> Vec<Became> {
        let mut all = Vec::new();
        for _ in 0..follow.sets.len() {
            follow.next(now, |became| all.push(became));
        }
        all
    }

    #[test]
    fn reads_count_for_one_lifetime_and_late_are_those_of_its_second_half() {
        let mut follow = Follow::new(1 << 12, 1);
        follow.judged(1, secs(0), HOUR, (like(0), 8.0, true));
        for at in [10, 1700, 1900, 3500, 3700] {
            follow.read(1, secs(at), HOUR, false);
        }
        assert_eq!(ended(&mut follow, secs(3000)), []);
        let all = ended(&mut follow, secs(3601));
        let became = Became { like: like(0), log2_size: 8.0, admitted: true, reads: 4, late: 2 };
        assert_eq!(all, [became]);
        assert_eq!(ended(&mut follow, secs(9999)), []);
    }

    #[test]
    fn misses_count_until_the_object_changes() {
        let mut follow = Follow::new(1 << 12, 1);
        for key in 1..=3 {
            follow.judged(key, secs(0), HOUR, (like(0), 8.0, false));
            follow.read(key, secs(1), HOUR, true);
            follow.write(key, secs(2), false); // fetched again
            follow.read(key, secs(3), HOUR, false);
        }
        follow.write(1, secs(4), false); // out of the blue: another object
        follow.write(2, secs(4), true);
        follow.removed(3, secs(4));
        for key in 1..=3 {
            follow.read(key, secs(5), HOUR, false);
        }
        assert!(ended(&mut follow, secs(3601)).iter().all(|became| became.reads == 2));
    }

    #[test]
    fn each_judgement_is_kept_equally_often() {
        const JUDGED: u32 = 6;
        let mut counts = [0u32; JUDGED as usize];
        let mut follow = Follow::new(1 << 12, 7);
        for round in 0..12_000u64 {
            let key = Rng::new(round).next_u64();
            let begin = secs(round * 4000);
            for n in 0..JUDGED {
                follow.judged(
                    key,
                    begin + secs(u64::from(n)),
                    HOUR,
                    (like(n.min(2)), f32::from(n as u16), false),
                );
            }
            for became in ended(&mut follow, begin + secs(3700)) {
                counts[became.log2_size as usize] += 1;
            }
        }
        let expected = 12_000.0 / f64::from(JUDGED);
        let chi2: f64 = counts.iter().map(|c| (f64::from(*c) - expected).powi(2) / expected).sum();
        assert!(chi2 < 15.1, "χ² {chi2} with 5 degrees of freedom (1 % point 15.09): {counts:?}");
    }

    #[test]
    fn as_many_are_followed_as_there_is_room_for() {
        let mut follow = Follow::new(64 << 10, 1);
        let mut rng = Rng::new(3);
        let places = follow.sets.len() * WAYS;
        let mut refused = 0;
        for i in 0..400_000u64 {
            // A hundred times as many as there are places are judged in each lifetime.
            let now = Nanos(i * (HOUR.0 / (100 * places as u64)));
            follow.next(now, |_| {});
            let before = follow.refused;
            follow.judged(rng.next_u64(), now, HOUR, (like(0), 8.0, false));
            refused += usize::from(i > 350_000 && follow.refused > before);
        }
        let used = follow.sets.iter().flatten().filter(|f| f.tag != 0).count();
        assert!(used * 2 > places && refused < 25_000, "{used} of {places}, {refused} refused");
    }
}
