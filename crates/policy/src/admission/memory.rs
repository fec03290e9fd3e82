//! What is remembered of keys after they left DRAM: a set-associative table of one word per key.

use larder_base::{LazyWords, Nanos};

use crate::learn::History;

const WAYS: usize = 8;
/// Percent of the places in use from which on a memory that grows is an array.
const WHOLE_FROM: usize = 80;
/// Unit of the time in an entry: 2^28 ns, about 268 ms. 20 bits of it wrap after 78 hours.
const TICK_SHIFT: u32 = 28;

/// A bounded memory of recently written keys: how often each was fetched again after a miss, how often it was updated, and
/// how long it stayed away. Eight bytes per key; in a full set the least recently written key is forgotten.
///
/// ```text
/// 63..44 tag 20 | 43..38 refetches 6 | 37..32 updates 6 | 31 missed 1 | 30..20 away 11 | 19..0 last 20
/// ```
/// `away` is a logarithm with 6 bits after the point. A false match has probability 8 × 2^-20 per look-up.
#[derive(Debug)]
pub(crate) struct KeyMemory {
    /// Sets begin cache lines.
    entries: LazyWords,
    sets: u64,
}

#[derive(Clone, Copy)]
struct Entry {
    tag: u64,
    refetches: u64,
    updates: u64,
    missed: bool,
    away: u64,
    last: u64,
}

impl Entry {
    fn unpack(word: u64) -> Entry {
        Entry {
            tag: word >> 44,
            refetches: word >> 38 & 63,
            updates: word >> 32 & 63,
            missed: word >> 31 & 1 == 1,
            away: word >> 20 & 0x7ff,
            last: word & 0xf_ffff,
        }
    }

    fn pack(self) -> u64 {
        self.tag << 44
            | self.refetches << 38
            | self.updates << 32
            | u64::from(self.missed) << 31
            | self.away << 20
            | self.last
    }
}

fn tick(now: Nanos) -> u64 {
    now.0 >> TICK_SHIFT & 0xf_ffff
}

impl KeyMemory {
    /// A memory of `keys` keys, but at most `bytes` bytes.
    pub(crate) fn new(keys: u64, bytes: usize) -> KeyMemory {
        let sets = keys.div_ceil(WAYS as u64).min((bytes / (8 * WAYS)) as u64).max(1);
        KeyMemory { entries: LazyWords::whole(sets as usize * WAYS), sets }
    }

    /// From now on takes memory as it is filled. What was remembered is forgotten.
    pub(crate) fn grow_as_filled(&mut self) {
        self.entries = LazyWords::growing(self.entries.len(), WHOLE_FROM);
    }

    fn place(&self, fingerprint: u64) -> (usize, u64) {
        let set = (u128::from(fingerprint) * u128::from(self.sets)) >> 64;
        // The set comes from the upper bits, the tag from the lower; a tag of zero would look like an empty slot.
        (set as usize * WAYS, (fingerprint & 0xf_ffff).max(1))
    }

    /// The key's set, as it is, and which of its words is the key's.
    #[inline]
    fn find(&self, start: usize, tag: u64) -> ([u64; WAYS], Option<usize>) {
        let set = self.entries.line(start);
        (set, set.iter().position(|e| e >> 44 == tag))
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
        let (set, Some(at)) = self.find(start, tag) else {
            return History { first_life: true, ..History::default() };
        };
        let e = Entry::unpack(set[at]);
        // Known from the write that began this life alone?
        let first_life = e.refetches == 0 && e.updates == 0;
        History {
            first_life,
            refetches: e.refetches as u8,
            updates: e.updates as u8,
            away: unlog(e.away),
        }
    }

    /// A read missed this key.
    pub(crate) fn miss(&mut self, fingerprint: u64) {
        let (start, tag) = self.place(fingerprint);
        if let (set, Some(at)) = self.find(start, tag) {
            self.entries.set(start + at, set[at] | 1 << 31);
        }
    }

    /// The key was written.
    pub(crate) fn write(&mut self, fingerprint: u64, update: bool, now: Nanos) {
        let (start, tag) = self.place(fingerprint);
        let last = tick(now);
        let (set, known) = self.find(start, tag);
        if let Some(at) = known {
            let mut e = Entry::unpack(set[at]);
            if e.missed && !update {
                e.refetches = (e.refetches + 1).min(63);
            } else {
                e.updates = (e.updates + 1).min(63);
            }
            e.missed = false;
            let ticks = last.wrapping_sub(e.last) & 0xf_ffff;
            e.away = log(((ticks << TICK_SHIFT) / 1_000_000).min(u64::from(u32::MAX)) as u32);
            e.last = last;
            self.entries.set(start + at, e.pack());
            return;
        }
        // The empty slot, or the one written longest ago.
        let age = |word: u64| if word == 0 { u64::MAX } else { last.wrapping_sub(word) & 0xf_ffff };
        let mut victim = 0;
        for i in 1..WAYS {
            if age(set[i]) > age(set[victim]) {
                victim = i;
            }
        }
        let new = Entry { tag, refetches: 0, updates: 0, missed: false, away: 0, last };
        self.entries.set(start + victim, new.pack());
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

/// log2(1 + x) with 6 bits after the point, at most 11 bits.
fn log(x: u32) -> u64 {
    u64::from(crate::learn::log2_fixed(x) >> 4).min(0x7ff)
}

/// The smallest x whose [`log`] is at least `l`.
fn unlog(l: u64) -> u32 {
    let (whole, fraction) = (l >> 6, l & 63);
    (((1u64 << whole) + (fraction << whole).div_ceil(64)) - 1).min(u64::from(u32::MAX)) as u32
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
        m.miss(fp);
        m.write(fp, false, Nanos::from_secs(110));
        let h = m.recall(fp);
        assert_eq!((h.first_life, h.refetches, h.updates), (false, 1, 0));
        assert!((98_000..102_500).contains(&h.away), "{}", h.away);
        m.write(fp, true, Nanos::from_secs(111));
        assert_eq!((m.recall(fp).refetches, m.recall(fp).updates), (1, 1));
        m.write(fp, false, Nanos::from_secs(112));
        assert_eq!(m.recall(fp).updates, 2, "a write nobody had asked for is an update");
    }

    #[test]
    fn logs_invert() {
        for x in [0, 1, 2, 3, 7, 100, 1000, 123_456, u32::MAX] {
            let back = unlog(log(x));
            assert!(
                back <= x.saturating_add(1) && f64::from(back) >= f64::from(x) * 0.97 - 1.0,
                "{x} {back}"
            );
        }
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
        let mut m = KeyMemory::new(10_000, 8 * 1024);
        assert_eq!(m.memory_bytes(), 8 * 1024);
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
            "the last 500 of 1024 places: {}",
            known(&keys[4500..])
        );
        assert!(known(&keys[..3000]) < 10);
    }
}
