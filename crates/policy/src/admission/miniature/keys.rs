//! The keys of which miniatures know, each once for all of them.

/// No key.
const NONE: u16 = u16::MAX;

/// What is known of a key, whichever miniature holds it. Small: there are many beside little memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    fingerprint: [u32; 2],
    /// Milliseconds of its last read or write; they wrap.
    pub(super) last: u32,
    /// The next of its chain, or of those that are free.
    next: u16,
    pub(super) size: Size,
    /// Miniatures that hold it.
    pub(super) held: u8,
    /// A read missed it: what is written next is the same object, fetched again.
    pub(super) missed: bool,
}

const _: () = assert!(size_of::<Key>() == 20);

impl Key {
    pub(super) fn fingerprint(&self) -> u64 {
        u64::from(self.fingerprint[0]) << 32 | u64::from(self.fingerprint[1])
    }
}

/// Bytes of an object on flash, in two bytes: 11 bits behind the first one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size(u16);

impl Size {
    pub(super) fn of(bytes: u32) -> Size {
        let bytes = bytes.max(1);
        let log = bytes.ilog2();
        let rest = (u64::from(bytes) << 11 >> log) & 0x7ff;
        Size((log as u16) << 11 | rest as u16)
    }

    pub(super) fn bytes(self) -> u32 {
        ((1 << 11 | u64::from(self.0 & 0x7ff)) << (self.0 >> 11) >> 11) as u32
    }
}

/// A bounded table of keys. A key keeps its number as long as it is there.
#[derive(Debug)]
pub(super) struct Keys {
    keys: Vec<Key>,
    heads: Vec<u16>,
    free: u16,
    capacity: usize,
}

impl Keys {
    /// Bytes of a key.
    pub(super) const BYTES: usize = size_of::<Key>() + size_of::<u16>();
    /// The most that there can be.
    pub(super) const MOST: usize = NONE as usize;

    /// Room for so many, at most [`Keys::MOST`].
    pub(super) fn new(capacity: usize) -> Keys {
        let capacity = capacity.clamp(1, Keys::MOST);
        Keys {
            keys: Vec::with_capacity(capacity),
            heads: vec![NONE; capacity],
            free: NONE,
            capacity,
        }
    }

    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(super) fn is_full(&self) -> bool {
        self.free == NONE && self.keys.len() >= self.capacity
    }

    /// Numbers are below this.
    pub(super) fn end(&self) -> u16 {
        self.keys.len() as u16
    }

    fn head(&self, fingerprint: u64) -> usize {
        ((u64::from(fingerprint as u32) * self.heads.len() as u64) >> 32) as usize
    }

    pub(super) fn find(&self, fingerprint: u64) -> Option<u16> {
        let mut at = self.heads[self.head(fingerprint)];
        while at != NONE {
            let key = &self[at];
            if key.fingerprint() == fingerprint {
                return Some(at);
            }
            at = key.next;
        }
        None
    }

    /// Takes in a key that is not there; `None` if there is no place.
    pub(super) fn insert(&mut self, fingerprint: u64, size: Size, now: u32) -> Option<u16> {
        let head = self.head(fingerprint);
        let key = Key {
            fingerprint: [(fingerprint >> 32) as u32, fingerprint as u32],
            next: self.heads[head],
            size,
            last: now,
            held: 0,
            missed: false,
        };
        let at = match self.free {
            NONE if self.keys.len() < self.capacity => {
                self.keys.push(key);
                self.end() - 1
            }
            NONE => return None,
            at => {
                self.free = self[at].next;
                self[at] = key;
                at
            }
        };
        self.heads[head] = at;
        Some(at)
    }

    /// Takes out a key that is there.
    pub(super) fn remove(&mut self, at: u16) {
        let Key { next, .. } = self[at];
        let head = self.head(self[at].fingerprint());
        if self.heads[head] == at {
            self.heads[head] = next;
        } else {
            let mut before = self.heads[head];
            while before != NONE && self[before].next != at {
                before = self[before].next;
            }
            if before != NONE {
                self[before].next = next;
            }
        }
        self[at].held = 0;
        self[at].next = self.free;
        self.free = at;
    }
}

impl std::ops::Index<u16> for Keys {
    type Output = Key;

    fn index(&self, at: u16) -> &Key {
        &self.keys[usize::from(at)]
    }
}

impl std::ops::IndexMut<u16> for Keys {
    fn index_mut(&mut self, at: u16) -> &mut Key {
        &mut self.keys[usize::from(at)]
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::*;

    #[test]
    fn keys_are_found_until_they_are_removed() {
        let mut keys = Keys::new(300);
        let mut model = std::collections::BTreeMap::new();
        let mut rng = Rng::new(3);
        for _ in 0..50_000 {
            let fingerprint = rng.below(600).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            match keys.find(fingerprint) {
                Some(at) => {
                    assert_eq!(model.get(&fingerprint), Some(&at));
                    assert_eq!(keys[at].fingerprint(), fingerprint);
                    keys.remove(at);
                    model.remove(&fingerprint);
                }
                None => {
                    assert!(!model.contains_key(&fingerprint));
                    assert_eq!(keys.is_full(), model.len() == 300);
                    if let Some(at) = keys.insert(fingerprint, Size::of(9), 1) {
                        model.insert(fingerprint, at);
                    }
                }
            }
        }
    }

    #[test]
    fn sizes_are_kept_to_a_two_thousandth() {
        for bytes in (1..5000).chain([1 << 20, 12_345_678, u32::MAX]) {
            let kept = f64::from(Size::of(bytes).bytes()) / f64::from(bytes);
            assert!((1.0 - 1.0 / 2048.0..=1.0).contains(&kept), "{bytes}: {kept}");
        }
        assert_eq!(Size::of(0).bytes(), 1);
    }
}
