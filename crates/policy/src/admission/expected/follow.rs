//! Objects that are followed for one lifetime of flash after they were judged, whether they went there or not.

use larder_base::Nanos;

use super::table::Like;
use crate::follow::{self, is_past};

/// What is kept of an object that is followed. Bytes, so that nothing is lost to alignment.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    like: [u8; 2],
    /// Sixteenths of doublings.
    size: [u8; 2],
    reads: u8,
    late: u8,
    marks: u8,
}

const _: () = assert!(follow::Follow::<Kept>::BYTES == 20);

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

/// Follows a part of the objects. See [`follow::Follow`].
#[derive(Debug)]
pub(super) struct Follow(follow::Follow<Kept>);

impl Follow {
    /// Bytes of one object.
    pub(super) const BYTES: usize = follow::Follow::<Kept>::BYTES;

    /// One that takes about `memory` bytes.
    pub(super) fn new(memory: usize, seed: u64) -> Follow {
        Follow(follow::Follow::new(memory, seed))
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.0.memory_bytes()
    }

    /// Whether it belongs to those that are followed.
    #[inline]
    pub(super) fn follows(&self, fingerprint: u64) -> bool {
        self.0.follows(fingerprint)
    }

    /// The object, as long as its reads count, and when its lifetime ends.
    fn counting(&mut self, fingerprint: u64, now: Nanos) -> Option<(&mut Kept, u32)> {
        self.0.of(fingerprint, tick(now)).filter(|(of, _)| of.marks & FROZEN == 0)
    }

    /// A read, in whichever tier; one that missed would have been answered by flash.
    pub(super) fn read(&mut self, fingerprint: u64, now: Nanos, lifetime: Nanos, missed: bool) {
        let half = tick(Nanos(lifetime.0 / 2));
        let Some((of, until)) = self.counting(fingerprint, now) else { return };
        of.reads = of.reads.saturating_add(1);
        if is_past(until.wrapping_sub(half), tick(now)) {
            of.late = of.late.saturating_add(1);
        }
        if missed {
            of.marks |= MISSED;
        }
    }

    /// A write. `update`: the key was in the cache. One behind a miss fetches the same object again.
    pub(super) fn write(&mut self, fingerprint: u64, now: Nanos, update: bool) {
        let Some((of, _)) = self.counting(fingerprint, now) else { return };
        if update || of.marks & MISSED == 0 {
            of.marks |= FROZEN;
        }
        of.marks &= !MISSED;
    }

    /// It was deleted, or has expired.
    pub(super) fn removed(&mut self, fingerprint: u64, now: Nanos) {
        if let Some((of, _)) = self.counting(fingerprint, now) {
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
        let kept = Kept {
            like: like.number().to_le_bytes(),
            size: ((log2_size * 16.0) as u16).to_le_bytes(),
            reads: 0,
            late: 0,
            marks: if admitted { ADMITTED } else { 0 },
        };
        self.0.judged(fingerprint, tick(now), tick(lifetime), kept);
    }

    /// Takes out some whose lifetime is over. Called with each judgement.
    pub(super) fn next(&mut self, now: Nanos, mut became: impl FnMut(Became)) {
        self.0.next(tick(now), |of| {
            became(Became {
                like: Like::of_number(u16::from_le_bytes(of.like)),
                log2_size: f32::from(u16::from_le_bytes(of.size)) / 16.0,
                admitted: of.marks & ADMITTED != 0,
                reads: of.reads.into(),
                late: of.late.into(),
            });
        });
    }
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
        for _ in 0..follow.0.sets() {
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
}
