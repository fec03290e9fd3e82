//! When objects on flash were last read.
//!
//! The meta protocol's `h` and `l` flags must be true for objects on flash, whose index entries have no room for a time.
//! A record holds both as of its move; what happened since is kept here for the objects read most recently: eight bytes
//! each, a fixed number, four to a set, the oldest of a set giving way. For an object that has been pushed out the
//! answer falls back to what its record says.

/// A fixed-size, four-way table from key fingerprints to seconds.
pub(super) struct AccessTimes {
    /// Upper half: 32 bits of fingerprint (0 = empty); lower half: Unix seconds.
    slots: Box<[u64]>,
    sets: u64,
}

const WAYS: usize = 4;

impl AccessTimes {
    /// Room for about `entries` objects.
    pub(super) fn new(entries: usize) -> AccessTimes {
        let sets = entries.div_ceil(WAYS).max(1);
        AccessTimes { slots: vec![0; sets * WAYS].into_boxed_slice(), sets: sets as u64 }
    }

    fn set_of(&self, fingerprint: u64) -> (usize, u32) {
        let set = ((u128::from(fingerprint) * u128::from(self.sets)) >> 64) as usize;
        (set * WAYS, (fingerprint as u32).max(1))
    }

    /// Asks for the cache line of the key's set.
    #[inline]
    pub(super) fn warm(&self, fingerprint: u64) {
        larder_base::prefetch(&self.slots, self.set_of(fingerprint).0);
    }

    /// When the object was last read from flash, if that is known.
    pub(super) fn get(&self, fingerprint: u64) -> Option<u32> {
        let (at, tag) = self.set_of(fingerprint);
        self.slots[at..at + WAYS].iter().find(|&&s| (s >> 32) as u32 == tag).map(|&s| s as u32)
    }

    /// Remembers a read.
    pub(super) fn put(&mut self, fingerprint: u64, secs: u32) {
        let (at, tag) = self.set_of(fingerprint);
        let set = &mut self.slots[at..at + WAYS];
        let place = set
            .iter()
            .position(|&s| (s >> 32) as u32 == tag)
            .unwrap_or_else(|| (0..WAYS).min_by_key(|&i| set[i] as u32).expect("a set has ways"));
        set[place] = u64::from(tag) << 32 | u64::from(secs);
    }

    /// Forgets an object: it has been overwritten or removed.
    pub(super) fn remove(&mut self, fingerprint: u64) {
        let (at, tag) = self.set_of(fingerprint);
        for s in &mut self.slots[at..at + WAYS] {
            if (*s >> 32) as u32 == tag {
                *s = 0;
            }
        }
    }

    /// Bytes taken.
    pub(super) fn memory_bytes(&self) -> usize {
        self.slots.len() * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_a_set_gives_way() {
        let mut t = AccessTimes::new(4);
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
