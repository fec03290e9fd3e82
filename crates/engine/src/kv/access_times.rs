//! When objects on flash were last read.
//!
//! The meta protocol's `h` and `l` flags must be true for objects on flash, whose index entries have no room for a time.
//! A record holds both as of its move; what happened since is kept here for the objects read most recently: eight bytes
//! each, a fixed number, four to a set, the oldest of a set giving way. For an object that has been pushed out the
//! answer falls back to what its record says.

use larder_base::LazyWords;

/// A fixed-size, four-way table from key fingerprints to seconds.
pub(super) struct AccessTimes {
    /// Upper half: 32 bits of fingerprint (0 = empty); lower half: Unix seconds.
    slots: LazyWords,
    sets: u64,
}

const WAYS: usize = 4;
/// Percent of the places in use from which on a table that grows is an array.
const WHOLE_FROM: usize = 60;

impl AccessTimes {
    /// Room for about `entries` objects; `sparing`: memory is taken as it is filled.
    pub(super) fn new(entries: usize, sparing: bool) -> AccessTimes {
        let sets = entries.div_ceil(WAYS).max(1);
        // Sets are read as halves of lines.
        let words = (sets * WAYS).next_multiple_of(2 * WAYS);
        let slots =
            if sparing { LazyWords::growing(words, WHOLE_FROM) } else { LazyWords::whole(words) };
        AccessTimes { slots, sets: sets as u64 }
    }

    /// The words of the set at `at`.
    #[inline]
    fn set(&self, at: usize) -> [u64; WAYS] {
        let line = self.slots.line(at / (2 * WAYS) * (2 * WAYS));
        std::array::from_fn(|i| line[at % (2 * WAYS) + i])
    }

    fn set_of(&self, fingerprint: u64) -> (usize, u32) {
        let set = ((u128::from(fingerprint) * u128::from(self.sets)) >> 64) as usize;
        (set * WAYS, (fingerprint as u32).max(1))
    }

    /// Asks for the cache line of the key's set.
    #[inline]
    pub(super) fn warm(&self, fingerprint: u64) {
        self.slots.warm(self.set_of(fingerprint).0);
    }

    /// When the object was last read from flash, if that is known.
    pub(super) fn get(&self, fingerprint: u64) -> Option<u32> {
        let (at, tag) = self.set_of(fingerprint);
        self.set(at).iter().find(|&&s| (s >> 32) as u32 == tag).map(|&s| s as u32)
    }

    /// Remembers a read.
    pub(super) fn put(&mut self, fingerprint: u64, secs: u32) {
        let (at, tag) = self.set_of(fingerprint);
        let set = self.set(at);
        let place = set
            .iter()
            .position(|&s| (s >> 32) as u32 == tag)
            .unwrap_or_else(|| (0..WAYS).min_by_key(|&i| set[i] as u32).expect("a set has ways"));
        self.slots.set(at + place, u64::from(tag) << 32 | u64::from(secs));
    }

    /// Forgets an object: it has been overwritten or removed.
    pub(super) fn remove(&mut self, fingerprint: u64) {
        let (at, tag) = self.set_of(fingerprint);
        for (i, s) in self.set(at).into_iter().enumerate() {
            if (s >> 32) as u32 == tag {
                self.slots.set(at + i, 0);
            }
        }
    }

    /// Bytes of the table when it is whole.
    pub(super) fn memory_bytes(&self) -> usize {
        self.sets as usize * WAYS * 8
    }

    /// Bytes by which it is smaller by now.
    pub(super) fn spared_bytes(&self) -> usize {
        self.memory_bytes().saturating_sub(self.slots.held_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_a_set_gives_way() {
        for sparing in [false, true] {
            the_oldest_gives_way(AccessTimes::new(4, sparing));
        }
    }

    fn the_oldest_gives_way(mut t: AccessTimes) {
        for i in 1..=5u64 {
            t.put(i, 100 + i as u32);
        }
        assert_eq!(t.get(1), None);
        assert_eq!(t.get(5), Some(105));
        t.put(2, 300);
        t.remove(3);
        assert_eq!((t.get(2), t.get(3), t.get(4)), (Some(300), None, Some(104)));
    }
}
