//! What is remembered of keys after they left DRAM: a set-associative table of three bytes per key.

use larder_base::{LazyWords, Nanos};

use crate::learn::History;
use crate::packed::{self, SET_WORDS, Set, WAYS};

/// Percent of the words in use from which on a memory that grows is an array.
const WHOLE_FROM: usize = 60;
/// An epoch passes when as many different keys were written in it as are such a part of the places. Keys that are written again and
/// again make no others forgotten.
const EPOCHS_PER_TURN: u64 = 16;
/// Epochs that five bits tell apart, and those after which an unwritten key is forgotten.
const EPOCHS: usize = 32;
const KEPT: u32 = 24;
/// With every so many keys that an epoch counts, the next set forgets such keys: all sets do within five epochs, so that none of a
/// key's epochs comes round.
const SWEEP_EVERY: u64 = 6;
const _: () = assert!(
    KEPT as u64 + 1 + (SWEEP_EVERY * EPOCHS_PER_TURN).div_ceil(WAYS as u64) < EPOCHS as u64
);
/// What the levels of a count stand for.
const COUNTS: [u8; 4] = [0, 1, 2, 4];
/// The shortest time away that is told from none is 2^6 ms; a level is one and a half octaves.
const AWAY_FROM: u32 = 6;

/// A bounded memory of recently written keys: how often each was fetched again after a miss, how often it was updated, and
/// how long it stayed away. Three bytes and a bit per key; in a full set the least recently written key is forgotten.
///
/// ```text
/// 23..14 tag 10 | 13..12 refetches 2 | 11..10 updates 2 | 9 missed 1 | 8..5 away 4 | 4..0 epoch of the last write 5
/// ```
/// Counts and times are logarithms. A false match has probability 21 × 2^-10 per look-up at most: about 2 % of the keys that were never
/// seen have another's past.
#[derive(Debug)]
pub(crate) struct KeyMemory {
    /// Sets are cache lines; each ends with a byte that is not used.
    entries: LazyWords,
    sets: u64,
    epoch: usize,
    /// Keys that were written in the present epoch, and in one that is over.
    keys: u64,
    per_epoch: u64,
    /// The set that forgets next.
    sweep: u64,
    /// All writes.
    writes: u64,
    /// When each began.
    starts: [Nanos; EPOCHS],
}

#[derive(Clone, Copy)]
struct Entry {
    tag: u32,
    refetches: u32,
    updates: u32,
    missed: bool,
    away: u32,
    last: u32,
}

impl Entry {
    fn unpack(bits: u32) -> Entry {
        Entry {
            tag: bits >> 14,
            refetches: bits >> 12 & 3,
            updates: bits >> 10 & 3,
            missed: bits & MISSED != 0,
            away: bits >> 5 & 15,
            last: bits & 31,
        }
    }

    fn pack(self) -> u32 {
        self.tag << 14
            | self.refetches << 12
            | self.updates << 10
            | if self.missed { MISSED } else { 0 }
            | self.away << 5
            | self.last
    }
}

const MISSED: u32 = 1 << 9;

impl KeyMemory {
    /// A memory of `keys` keys, but at most `bytes` bytes.
    pub(crate) fn new(keys: u64, bytes: usize) -> KeyMemory {
        let sets = keys.div_ceil(WAYS as u64).min((bytes / (8 * SET_WORDS)) as u64).max(1);
        KeyMemory {
            entries: LazyWords::whole(sets as usize * SET_WORDS),
            sets,
            epoch: 0,
            keys: 0,
            per_epoch: (sets * WAYS as u64).div_ceil(EPOCHS_PER_TURN),
            sweep: 0,
            writes: 0,
            starts: [Nanos::ZERO; EPOCHS],
        }
    }

    /// From now on takes memory as it is filled. What was remembered is forgotten.
    pub(crate) fn grow_as_filled(&mut self) {
        self.entries = LazyWords::growing(self.entries.len(), WHOLE_FROM);
    }

    fn place(&self, fingerprint: u64) -> (usize, u32) {
        packed::place(fingerprint, self.sets)
    }

    /// Epochs since an entry was written last.
    #[inline]
    fn age(&self, bits: u32) -> u32 {
        (self.epoch as u32).wrapping_sub(bits) & (EPOCHS as u32 - 1)
    }

    /// The key's set, as it is, and which of its entries is the key's.
    #[inline]
    fn find(&self, start: usize, tag: u32) -> (Set, Option<usize>) {
        let set = Set::load(&self.entries, start);
        let known = set.find(tag, |bits| self.age(bits) < KEPT);
        (set, known)
    }

    /// Asks for the cache line that leads to the key's set.
    #[inline]
    pub(crate) fn expect(&self, fingerprint: u64) {
        self.entries.expect(self.place(fingerprint).0);
    }

    /// Asks for the cache line of the key's set.
    #[inline]
    pub(crate) fn warm(&self, fingerprint: u64) {
        self.entries.warm(self.place(fingerprint).0);
    }

    /// Asks for what changes when the key is written.
    #[inline]
    pub(crate) fn warm_to_write(&self, fingerprint: u64) {
        self.entries.warm_to_set(self.place(fingerprint).0);
    }

    /// What is known of a key.
    pub(crate) fn recall(&self, fingerprint: u64) -> History {
        let (start, tag) = self.place(fingerprint);
        let (set, Some(way)) = self.find(start, tag) else {
            return History { first_life: true, ..History::default() };
        };
        let e = Entry::unpack(set.entry(way));
        // Known from the write that began this life alone?
        let first_life = e.refetches == 0 && e.updates == 0;
        History {
            first_life,
            refetches: COUNTS[e.refetches as usize & 3],
            updates: COUNTS[e.updates as usize & 3],
            away: unlog(e.away),
        }
    }

    /// A read missed this key.
    pub(crate) fn miss(&mut self, fingerprint: u64) {
        let (start, tag) = self.place(fingerprint);
        let (mut set, known) = self.find(start, tag);
        if let Some(way) = known {
            set.put(way, set.entry(way) | MISSED);
            set.save(&mut self.entries, start);
        }
    }

    /// The key was written.
    pub(crate) fn write(&mut self, fingerprint: u64, update: bool, now: Nanos) {
        self.writes += 1;
        let (start, tag) = self.place(fingerprint);
        let (mut set, known) = self.find(start, tag);
        if known.is_none_or(|way| self.age(set.entry(way)) > 0) {
            self.pass(now);
        }
        if let Some(way) = known {
            let mut e = Entry::unpack(set.entry(way));
            if e.missed && !update {
                e.refetches = self.counted(e.refetches);
            } else {
                e.updates = self.counted(e.updates);
            }
            e.missed = false;
            e.away = log(((now - self.middle(e.last as usize, now)).0 / 1_000_000)
                .min(u64::from(u32::MAX)) as u32);
            e.last = self.epoch as u32;
            set.put(way, e.pack());
        } else {
            // An empty place, or the one written longest ago.
            let victim = set.oldest(self.epoch as u32);
            let last = self.epoch as u32;
            let new = Entry { tag, refetches: 0, updates: 0, missed: false, away: 0, last };
            set.put(victim, new.pack());
        }
        self.forget_old(&mut set);
        set.save(&mut self.entries, start);
    }

    /// Empties the places of keys that were not written for so long.
    fn forget_old(&self, set: &mut Set) {
        const { assert!(KEPT == 24, "what is old") };
        for way in set.old(self.epoch as u32) {
            set.put(way, 0);
        }
    }

    /// Counts a key that was not written in this epoch before, with which the next may begin.
    fn pass(&mut self, now: Nanos) {
        if self.starts[self.epoch] == Nanos::ZERO {
            self.starts[self.epoch] = now;
        }
        self.keys += 1;
        if self.keys.is_multiple_of(SWEEP_EVERY) || self.keys >= self.per_epoch {
            let start = self.sweep as usize * SET_WORDS;
            let mut set = Set::load(&self.entries, start);
            self.forget_old(&mut set);
            set.save(&mut self.entries, start);
            self.sweep = (self.sweep + 1) % self.sets;
        }
        if self.keys >= self.per_epoch {
            self.keys = 0;
            self.epoch = (self.epoch + 1) % EPOCHS;
            self.starts[self.epoch] = now;
        }
    }

    /// The middle of an epoch: when a write in it was, as well as that is known.
    fn middle(&self, epoch: usize, now: Nanos) -> Nanos {
        let from = self.starts[epoch % EPOCHS];
        let to = if epoch == self.epoch { now } else { self.starts[(epoch + 1) % EPOCHS] };
        Nanos(from.0 + to.0.saturating_sub(from.0) / 2)
    }

    /// The level after one more: of those at two, half.
    fn counted(&self, level: u32) -> u32 {
        match level {
            0 | 1 => level + 1,
            2 => 2 + (self.writes.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 63) as u32,
            _ => 3,
        }
    }

    /// Bytes of the table when it is whole.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.entries.whole_bytes()
    }

    /// Bytes by which it is smaller by now.
    pub(crate) fn spared_bytes(&self) -> usize {
        self.memory_bytes().saturating_sub(self.entries.held_bytes())
    }
}

/// The level of so many milliseconds: 0 for less than 2^6, and one for each octave and a half above.
fn log(ms: u32) -> u32 {
    let halves = u32::from(crate::learn::log2_fixed(ms) >> 9);
    if halves < 2 * AWAY_FROM { 0 } else { (1 + (halves - 2 * AWAY_FROM) / 3).min(15) }
}

/// The milliseconds that a level stands for: the middle of what it spans.
fn unlog(level: u32) -> u32 {
    if level == 0 {
        return 0;
    }
    // 2^(6 + 1.5 (level - 1) + 0.75), in eighths of octaves.
    let eighths = 8 * AWAY_FROM + 12 * (level - 1) + 6;
    const EIGHTH: [u64; 8] = [1000, 1091, 1189, 1297, 1414, 1542, 1682, 1834];
    ((EIGHTH[eighths as usize % 8] << (eighths / 8)) / 1000).min(u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    #[test]
    fn remembers_refetches_and_updates() {
        let mut m = KeyMemory::new(1000, 1 << 20);
        let fp = 0x1234_5678_9abc_def0;
        assert!(m.recall(fp).first_life);
        m.miss(fp);
        m.write(fp, false, Nanos::from_secs(10));
        assert_eq!(
            m.recall(fp),
            History { first_life: true, ..History::default() },
            "the first write knows nothing of a past"
        );
        // Others are written meanwhile, so that epochs pass: some two hundred keys in a hundred seconds.
        let mut rng = Rng::new(1);
        for i in 0..200 {
            m.write(rng.next_u64(), false, Nanos::from_millis(10_000 + i * 500));
        }
        m.miss(fp);
        m.write(fp, false, Nanos::from_secs(110));
        let h = m.recall(fp);
        assert_eq!((h.first_life, h.refetches, h.updates), (false, 1, 0));
        // Within an octave and a half.
        assert!((35_000..170_000).contains(&h.away), "{}", h.away);
        m.write(fp, true, Nanos::from_secs(111));
        assert_eq!((m.recall(fp).refetches, m.recall(fp).updates), (1, 1));
        m.write(fp, false, Nanos::from_secs(112));
        assert_eq!(m.recall(fp).updates, 2, "a write nobody had asked for is an update");
        for _ in 0..8 {
            m.write(fp, false, Nanos::from_secs(113));
        }
        assert_eq!(m.recall(fp).updates, 4, "more are not told apart");
    }

    #[test]
    fn logs_invert() {
        for x in [0, 1, 63, 64, 100, 1000, 123_456, 90_000_000, 300_000_000] {
            let (level, back) = (log(x), unlog(log(x)));
            if level == 0 {
                assert!(x < 64 && back == 0, "{x} {back}");
            } else {
                // Half of an octave and a half.
                let off = (f64::from(back) / f64::from(x)).log2();
                assert!(off.abs() < 0.85, "{x} {back}");
            }
            assert_eq!(log(back), level, "{x}");
        }
        assert_eq!(log(u32::MAX), 15);
    }

    /// What is said of a key that never was.
    #[test]
    fn few_take_another_keys_past_for_theirs() {
        let mut m = KeyMemory::new(20_000, 1 << 20);
        let mut rng = Rng::new(5);
        for i in 0..60_000 {
            m.write(rng.next_u64(), false, Nanos::from_millis(i));
        }
        let knows = |m: &KeyMemory, k: u64| {
            let (start, tag) = m.place(k);
            m.find(start, tag).1.is_some()
        };
        let known = (0..20_000).filter(|_| knows(&m, rng.next_u64())).count();
        assert!(known < 20_000 * 25 / 1000, "{known}");
    }

    /// Epochs are counted modulo 32: what has not been written for longer is forgotten, and not taken for young.
    #[test]
    fn what_is_not_written_is_forgotten() {
        let mut m = KeyMemory::new(2100, 1 << 20);
        let mut rng = Rng::new(6);
        let old: Vec<u64> = (0..200).map(|_| rng.next_u64()).collect();
        old.iter().for_each(|&k| m.write(k, false, Nanos::from_secs(1)));
        let knows = |m: &KeyMemory, k: u64| {
            let (start, tag) = m.place(k);
            m.find(start, tag).1.is_some()
        };
        assert!(old.iter().all(|&k| knows(&m, k)));
        // A few keys are written again and again, so that nothing is displaced, and half of the sets have none of them.
        let few: Vec<u64> = (0..1000).map(|_| rng.next_u64() / 2).collect();
        let mut round = 0;
        while round < 200 {
            for &k in &few {
                m.write(k, false, Nanos::from_secs(2 + round));
            }
            round += 1;
            if round >= 4 {
                let known = old.iter().filter(|&&k| knows(&m, k)).count();
                assert!(known < 12, "{round}: {known}");
            }
        }
    }

    /// Counters that change all the time leave the others' past alone.
    #[test]
    fn a_few_keys_that_are_written_again_and_again_make_no_others_forgotten() {
        let mut m = KeyMemory::new(2100, 1 << 20);
        let mut rng = Rng::new(7);
        let keys: Vec<u64> = (0..1000).map(|_| rng.next_u64()).collect();
        for i in 0..100_000u64 {
            if let Some(&k) = keys.get(i as usize) {
                m.write(k, false, Nanos::from_millis(i));
            }
            m.write(spread(i % 20), true, Nanos::from_millis(i));
        }
        let known = keys.iter().filter(|&&k| {
            let (start, tag) = m.place(k);
            m.find(start, tag).1.is_some()
        });
        assert!(known.count() > 990);
        assert_eq!(m.recall(spread(3)).updates, 4);
    }

    fn spread(n: u64) -> u64 {
        Rng::new(n).next_u64()
    }

    #[test]
    fn one_that_grows_remembers_the_same() {
        let (mut whole, mut grown) = (KeyMemory::new(4000, 1 << 20), KeyMemory::new(4000, 1 << 20));
        grown.grow_as_filled();
        let mut rng = Rng::new(8);
        let mut keys = vec![rng.next_u64()];
        for i in 0..20_000u64 {
            // Old keys and new ones: it fills up, and is full at last.
            let key = if rng.chance(0.4) {
                let key = rng.next_u64();
                keys.push(key);
                key
            } else {
                keys[rng.below(keys.len() as u64) as usize]
            };
            for m in [&mut whole, &mut grown] {
                if i % 3 == 0 {
                    m.miss(key);
                }
                m.write(key, i % 5 == 0, Nanos::from_secs(i));
            }
            let key = keys[rng.below(keys.len() as u64) as usize];
            assert_eq!(whole.recall(key), grown.recall(key));
            if i == 500 {
                assert!(grown.spared_bytes() > whole.memory_bytes() / 2);
            }
        }
        assert_eq!((whole.spared_bytes(), grown.spared_bytes()), (0, 0));
        assert!((0..whole.entries.len()).all(|i| whole.entries.get(i) == grown.entries.get(i)));
    }

    #[test]
    fn keeps_the_latest_in_bounded_memory() {
        let mut m = KeyMemory::new(10_000, 3 * 1024);
        assert_eq!(m.memory_bytes(), 3 * 1024);
        let mut rng = Rng::new(3);
        let keys: Vec<u64> = (0..5000).map(|_| rng.next_u64()).collect();
        for (i, &k) in keys.iter().enumerate() {
            m.write(k, false, Nanos::from_secs(i as u64));
        }
        let knows = |k: u64| {
            let (start, tag) = m.place(k);
            m.find(start, tag).1.is_some()
        };
        let known = |range: &[u64]| range.iter().filter(|&&k| knows(k)).count();
        assert!(
            known(&keys[4500..]) > 480,
            "the last 500 of 1008 places: {}",
            known(&keys[4500..])
        );
        // As many as are taken for others.
        assert!(known(&keys[..3000]) < 100);
    }
}
