//! What is remembered of lines: how often each was read and written, how long it was away, and whether the cache would hold it.
//!
//! Three bytes a line in a set-associative table. Admission is not told what leaves the cache, so the table models it: a line that was
//! admitted is held until as many other admitted lines were touched since as the cache has lines (the stack distance of Mattson et
//! al., 1970, in steps of an epoch).

use larder_base::LazyWords;

use crate::block::access::mix;
use crate::block::{BlockOp, VolumeId};
use crate::packed::{self, SET_WORDS, Set, WAYS};

/// An epoch passes when keys were touched that amount to such a part of the places. A key amounts to the epochs for which it was idle, over
/// [`WHOLE`], and to 1 at most: so that `WHOLE` epochs have as many different keys as half of the places, however often each is touched.
const EPOCHS_PER_TURN: u64 = 16;
const WHOLE: u32 = 8;
/// Epochs that five bits tell apart, and those after which an untouched key is forgotten.
const EPOCHS: usize = 32;
const KEPT: u32 = 24;
/// With every so many keys that an epoch counts, the next set forgets such keys: all sets do within five epochs, so that none of a
/// key's epochs comes round.
const SWEEP_EVERY: u64 = 6;
const _: () = assert!(
    KEPT as u64 + 1 + (SWEEP_EVERY * EPOCHS_PER_TURN).div_ceil(WAYS as u64) < EPOCHS as u64
);

/// What is left of the count of idle lines after each epoch, and how many of them must have been seen for their reads to count.
const IDLE_KEPT: f32 = 1.0 - 1.0 / EPOCHS_PER_TURN as f32;
const LEAST_IDLE: f32 = 32.0;

/// Levels of a count of reads and of writes, and of a time away.
pub(super) const READS: usize = 8;
pub(super) const WRITES: usize = 4;
pub(super) const AWAY: usize = 6;
/// Counts are exact up to this level, and from there on each level stands for twice as many as the one before.
const EXACT: u32 = 2;

/// What is remembered of a line, the access that is under way included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Past {
    /// Level of the reads: their number up to 2, then 3 for three or four, 4 for five to eight, and so on to 7.
    pub(super) reads: u32,
    /// The same of writes, up to 3.
    pub(super) writes: u32,
    /// How long it was away before its last access, over the time that the cache keeps an untouched line: 0 not known, 1 below an eighth, 2 below
    /// a half, 3 less, 4 less than twice as long, 5 longer.
    pub(super) away: u32,
    /// It was admitted, and was held at its last access.
    pub(super) held: bool,
}

/// ```text
/// 23..14 tag 10 | 13..11 reads 3 | 10..9 writes 2 | 8..6 away 3 | 5 held 1 | 4..0 epoch of the last access 5
/// ```
#[derive(Clone, Copy)]
struct Entry {
    tag: u32,
    past: Past,
    last: u32,
}

impl Entry {
    fn unpack(bits: u32) -> Entry {
        let past = Past {
            reads: bits >> 11 & 7,
            writes: bits >> 9 & 3,
            away: bits >> 6 & 7,
            held: bits & HELD != 0,
        };
        Entry { tag: bits >> 14, past, last: bits & 31 }
    }

    fn pack(self) -> u32 {
        let Past { reads, writes, away, held } = self.past;
        self.tag << 14
            | reads << 11
            | writes << 9
            | away << 6
            | if held { HELD } else { 0 }
            | self.last
    }
}

const HELD: u32 = 1 << 5;

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Lines {
    /// Sets are cache lines.
    entries: LazyWords,
    sets: u64,
    epoch: usize,
    /// Keys that were touched in the present epoch, in parts of `WHOLE`; and whole ones of an epoch that is over.
    parts: u64,
    per_epoch: u64,
    /// The set that forgets next.
    sweep: u64,
    /// Keys that were touched in epochs that are over: the clock.
    clock: u32,
    /// All touches.
    touches: u64,
    /// Lines of the cache.
    lines: u64,
    /// Lines that are held, by the epoch of their last access.
    held: [u64; EPOCHS],
    /// Whole epochs that the cache keeps an untouched line.
    kept: u32,
    /// The same on the clock.
    lifetime: u32,
    /// As many lines were admitted as the cache has.
    full: bool,
    /// Held lines that were not touched for half a lifetime, and those of them that were read within the other half. Both fade.
    idle_lines: f32,
    idle_reads: f32,
}

impl Lines {
    /// A memory of `keys` keys for a cache of so many lines.
    pub(super) fn new(keys: u64, lines: u64) -> Lines {
        let sets = keys.div_ceil(WAYS as u64).max(4);
        let per_epoch = (sets * WAYS as u64).div_ceil(EPOCHS_PER_TURN);
        let mut new = Lines {
            entries: LazyWords::whole(sets as usize * SET_WORDS),
            sets,
            epoch: 0,
            parts: 0,
            per_epoch,
            sweep: 0,
            clock: 0,
            touches: 0,
            lines: lines.max(1),
            held: [0; EPOCHS],
            kept: KEPT,
            lifetime: 0,
            full: false,
            idle_lines: 0.0,
            idle_reads: 0.0,
        };
        new.age();
        new
    }

    /// Bytes that a memory of `keys` keys takes.
    pub(super) fn bytes_for(keys: u64) -> u128 {
        u128::from(keys.div_ceil(WAYS as u64).max(4)) * (SET_WORDS as u128) * 8
    }

    fn place(&self, fingerprint: u64) -> (usize, u32) {
        packed::place(fingerprint, self.sets)
    }

    /// Epochs since an entry was touched last.
    #[inline]
    fn idle_of(&self, bits: u32) -> u32 {
        (self.epoch as u32).wrapping_sub(bits) & (EPOCHS as u32 - 1)
    }

    #[inline]
    fn find(&self, start: usize, tag: u32) -> (Set, Option<usize>) {
        let set = Set::load(&self.entries, start);
        let known = set.find(tag, |bits| self.idle_of(bits) < KEPT);
        (set, known)
    }

    /// The clock: keys touched since the start, each as far as it is another than those of the last epochs. It wraps.
    pub(super) fn clock(&self) -> u32 {
        self.clock.wrapping_add((self.parts / u64::from(WHOLE)) as u32)
    }

    /// How long the cache keeps a line that is not touched, on the clock. Before anything has left: as long as it would if all were admitted.
    pub(super) fn lifetime(&self) -> u32 {
        self.lifetime
    }

    /// Whether a line that is admitted displaces another.
    pub(super) fn is_full(&self) -> bool {
        self.full
    }

    /// How often a held line that was not touched for half a lifetime is still read, per lifetime. That is what a line earns which leaves
    /// for another: half of the cache lies idle for so long, and has these reads. None before enough were seen.
    pub(super) fn reads_of_idle(&self) -> f32 {
        // What the second half of a lifetime brings, doubled.
        if self.idle_lines < LEAST_IDLE { 0.0 } else { 2.0 * self.idle_reads / self.idle_lines }
    }

    /// What is remembered of a key.
    pub(super) fn recall(&self, fingerprint: u64) -> Past {
        let (start, tag) = self.place(fingerprint);
        let (set, known) = self.find(start, tag);
        known.map_or(Past::default(), |way| Entry::unpack(set.entry(way)).past)
    }

    /// The key was read or written.
    pub(super) fn touch(&mut self, fingerprint: u64, op: BlockOp) {
        self.touches += 1;
        let (start, tag) = self.place(fingerprint);
        let (mut set, known) = self.find(start, tag);
        let idle = known.map_or(WHOLE, |way| self.idle_of(set.entry(way)).min(WHOLE));
        if idle > 0 {
            self.pass(idle);
            // This set may have been swept.
            set = Set::load(&self.entries, start);
        }
        let known = known.filter(|&way| set.entry(way) >> 14 == tag);
        let last = self.epoch as u32;
        let (way, mut entry) = match known {
            Some(way) => {
                let bits = set.entry(way);
                let (idle, mut entry) = (self.idle_of(bits), Entry::unpack(bits));
                entry.past.away = self.away(idle);
                if entry.past.held {
                    self.held[entry.last as usize % EPOCHS] -= 1;
                    entry.past.held = idle <= self.kept;
                    if entry.past.held && idle * 2 > self.kept && op == BlockOp::Read {
                        self.idle_reads += 1.0;
                    }
                }
                (way, entry)
            }
            None => {
                // An empty place, or the one touched longest ago.
                let victim = set.oldest(self.epoch as u32);
                self.forget(set.entry(victim));
                (victim, Entry { tag, past: Past::default(), last })
            }
        };
        entry.last = last;
        if entry.past.held {
            self.held[self.epoch] += 1;
        }
        match op {
            BlockOp::Read => entry.past.reads = self.counted(entry.past.reads, READS),
            BlockOp::Write => entry.past.writes = self.counted(entry.past.writes, WRITES),
        }
        set.put(way, entry.pack());
        set.save(&mut self.entries, start);
    }

    /// The line was admitted, or was not.
    pub(super) fn admitted(&mut self, fingerprint: u64, yes: bool) {
        let (start, tag) = self.place(fingerprint);
        let (mut set, known) = self.find(start, tag);
        let Some(way) = known else { return };
        let mut entry = Entry::unpack(set.entry(way));
        if entry.past.held != yes {
            let held = &mut self.held[entry.last as usize % EPOCHS];
            *held = if yes { *held + 1 } else { held.saturating_sub(1) };
            entry.past.held = yes;
            set.put(way, entry.pack());
            set.save(&mut self.entries, start);
        }
    }

    fn forget(&mut self, bits: u32) {
        if bits & HELD != 0 {
            let held = &mut self.held[bits as usize % EPOCHS];
            *held = held.saturating_sub(1);
        }
    }

    /// The level of a time away.
    fn away(&self, idle: u32) -> u32 {
        match idle {
            idle if idle * 8 <= self.kept => 1,
            idle if idle * 2 <= self.kept => 2,
            idle if idle <= self.kept => 3,
            idle if idle <= 2 * self.kept => 4,
            _ => 5,
        }
    }

    /// The level after one more: of those at the level of so many, as many rise as makes the next stand for twice as many.
    fn counted(&self, level: u32, levels: usize) -> u32 {
        if level + 1 >= levels as u32 {
            return level;
        }
        let halvings = level.saturating_sub(EXACT);
        let chance = mix(0, VolumeId(0), self.touches);
        level + u32::from(halvings == 0 || chance >> (64 - halvings) == 0)
    }

    /// Counts a key that was idle for so many epochs, with which the next may begin.
    fn pass(&mut self, idle: u32) {
        let (before, whole) = (self.parts, u64::from(WHOLE));
        self.parts += u64::from(idle);
        let over = self.parts >= self.per_epoch * whole;
        if over || self.parts / (SWEEP_EVERY * whole) > before / (SWEEP_EVERY * whole) {
            let start = self.sweep as usize * SET_WORDS;
            let mut set = Set::load(&self.entries, start);
            for way in 0..WAYS {
                let bits = set.entry(way);
                if bits != 0 && self.idle_of(bits) >= KEPT {
                    self.forget(bits);
                    set.put(way, 0);
                }
            }
            set.save(&mut self.entries, start);
            self.sweep = (self.sweep + 1) % self.sets;
        }
        if over {
            self.clock = self.clock.wrapping_add(self.per_epoch as u32);
            self.parts -= self.per_epoch * whole;
            self.age();
            self.epoch = (self.epoch + 1) % EPOCHS;
        }
    }

    /// At the end of an epoch: how long the cache keeps what is not touched.
    fn age(&mut self) {
        if self.full {
            let back = (self.kept / 2) as usize;
            let idle = self.held[(self.epoch + EPOCHS - back) % EPOCHS];
            self.idle_lines = self.idle_lines * IDLE_KEPT + idle as f32;
            self.idle_reads *= IDLE_KEPT;
        }
        let mut younger = 0;
        for back in 0..KEPT {
            let held = self.held[(self.epoch + EPOCHS - back as usize) % EPOCHS];
            if younger + held >= self.lines {
                // Of the epoch in which the last line lies a part.
                let part = (self.lines - younger) as f64 / held.max(1) as f64;
                self.kept = (back + u32::from(part >= 0.5)).max(1);
                let epochs = f64::from(back) + part;
                self.lifetime = (epochs * self.per_epoch as f64) as u32;
                self.full = true;
                return;
            }
            younger += held;
        }
        self.kept = KEPT;
        let whole = self.per_epoch.saturating_mul(KEPT.into());
        // A cache that was full once and is not by now admits little: what it holds stays as long as it is remembered.
        let life = if self.full { whole } else { self.lines.min(whole) };
        self.lifetime = u32::try_from(life).unwrap_or(u32::MAX / 4).min(u32::MAX / 4);
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.entries.whole_bytes()
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    /// Spreads small numbers over all 64 bits.
    fn key(n: u64) -> u64 {
        Rng::new(n).next_u64()
    }

    #[test]
    fn remembers_reads_and_writes_apart() {
        let mut lines = Lines::new(4096, 2048);
        assert_eq!(lines.recall(key(1)), Past::default());
        for _ in 0..2 {
            lines.touch(key(1), BlockOp::Read);
        }
        lines.touch(key(1), BlockOp::Write);
        let past = lines.recall(key(1));
        assert_eq!((past.reads, past.writes, past.away, past.held), (2, 1, 1, false));
        lines.admitted(key(1), true);
        assert!(lines.recall(key(1)).held);
    }

    #[test]
    fn a_level_of_reads_stands_for_twice_as_many_as_the_one_before() {
        let mut lines = Lines::new(1 << 16, 1 << 15);
        let mut mean = [0.0; 3];
        for n in 0..2_000 {
            let mut reached = [0u32; 8];
            for read in 1..=40 {
                lines.touch(key(n), BlockOp::Read);
                let level = lines.recall(key(n)).reads as usize;
                if reached[level] == 0 {
                    reached[level] = read;
                }
            }
            for (level, mean) in (3..).zip(&mut mean) {
                *mean += f64::from(reached[level]) / 2_000.0;
            }
        }
        // From 2 on: one read, then two, then four more in the mean, whether a line rises early or late.
        for (mean, expected) in mean.into_iter().zip([3.0, 5.0, 9.0]) {
            assert!((mean - expected).abs() < 0.3, "{mean}, not {expected}");
        }
    }

    /// Lines that are all admitted and touched once: the cache keeps one for as many others as it has lines.
    #[test]
    fn the_lifetime_is_that_of_least_recently_used() {
        const LINES: u64 = 10_000;
        let mut lines = Lines::new(4 * LINES, LINES);
        for n in 0..4 * LINES {
            lines.touch(key(n), BlockOp::Read);
            lines.admitted(key(n), true);
        }
        assert!(lines.is_full());
        let life = f64::from(lines.lifetime());
        assert!((life / LINES as f64 - 1.0).abs() < 0.05, "{life}");
        // Half of them are admitted: twice as long.
        for n in 4 * LINES..12 * LINES {
            lines.touch(key(n), BlockOp::Read);
            lines.admitted(key(n), n % 2 == 0);
        }
        let life = f64::from(lines.lifetime());
        assert!((life / LINES as f64 - 2.0).abs() < 0.15, "{life}");
    }

    /// Each line is admitted when it first comes, and three in ten come once more after three quarters of a lifetime. So 13 times a
    /// line was touched and left alone for half a lifetime, and 3 times it was read in the other half.
    #[test]
    fn reads_of_idle_lines_are_those_of_the_second_half_of_a_lifetime_doubled() {
        const LINES: u64 = 8192;
        let mut lines = Lines::new(2 * LINES, LINES);
        assert_eq!(lines.reads_of_idle(), 0.0);
        let back = (LINES as f64 * 0.75 / 1.3) as u64;
        let again = |n: u64| mix(1, VolumeId(0), n) % 10 < 3;
        for n in 0..30 * LINES {
            lines.touch(key(n), BlockOp::Read);
            lines.admitted(key(n), true);
            if n >= back && again(n - back) {
                lines.touch(key(n - back), BlockOp::Read);
            }
        }
        let expected = 2.0 * 3.0 / 13.0;
        let found = lines.reads_of_idle();
        assert!((found / expected - 1.0).abs() < 0.1, "{found}, not {expected}");
    }

    /// Lines that are touched often make none that are touched seldom forgotten, as long as there is room for all.
    #[test]
    fn what_is_touched_seldom_is_remembered_beside_what_is_touched_often() {
        let mut lines = Lines::new(4096, 2048);
        let mut rng = Rng::new(6);
        let mut known = 0;
        for i in 0..400_000u64 {
            let often = rng.below(500);
            lines.touch(key(often), BlockOp::Write);
            // Each of 1,000 once in 20,000 touches of the others.
            if i % 20 == 0 {
                let seldom = key(10_000 + i / 20 % 1000);
                if i > 40_000 {
                    known += u32::from(lines.recall(seldom).reads > 0);
                }
                lines.touch(seldom, BlockOp::Read);
            }
        }
        assert!(known > 17_600, "{known} of 18,000");
    }

    #[test]
    fn what_is_held_is_what_least_recently_used_would_hold() {
        const LINES: u64 = 4_000;
        let mut lines = Lines::new(3 * LINES, LINES);
        let mut rng = Rng::new(8);
        // A stack of all keys, the one touched last at the end.
        let mut stack: Vec<u64> = Vec::new();
        let (mut agree, mut all) = (0u32, 0u32);
        for i in 0..60_000 {
            let n = (rng.below(100) * rng.below(100)).max(1) + rng.below(2) * 40 * rng.below(100);
            let place = stack.iter().rposition(|&k| k == n);
            let distance = place.map_or(u64::MAX, |at| (stack.len() - at) as u64);
            let hit = distance <= LINES;
            if let Some(at) = place {
                stack.remove(at);
            }
            stack.push(n);
            lines.touch(key(n), BlockOp::Read);
            let held = lines.recall(key(n)).held;
            lines.admitted(key(n), true);
            // Times are kept in whole epochs, and the lifetime is rounded to one: what lies so near to the edge may be told either way.
            if i > 20_000 && distance.abs_diff(LINES) > 3 * lines.per_epoch / 2 {
                all += 1;
                agree += u32::from(held == hit);
            }
        }
        // Of the keys that were never seen 2 % have another's past.
        assert!(f64::from(agree) > 0.98 * f64::from(all) && all > 30_000, "{agree} of {all}");
    }

    #[test]
    fn counts_of_what_is_held_agree_under_anything() {
        let mut lines = Lines::new(2_000, 700);
        let mut rng = Rng::new(3);
        for _ in 0..200_000 {
            let n = key(rng.below(9_000));
            lines.touch(n, if rng.chance(0.3) { BlockOp::Write } else { BlockOp::Read });
            if rng.chance(0.5) {
                lines.admitted(n, rng.chance(0.7));
            }
        }
        let mut found = [0u64; EPOCHS];
        for set in 0..lines.sets {
            let set = Set::load(&lines.entries, set as usize * SET_WORDS);
            for way in 0..WAYS {
                let bits = set.entry(way);
                if bits & HELD != 0 {
                    found[bits as usize % EPOCHS] += 1;
                }
            }
        }
        assert_eq!(found, lines.held);
    }
}
