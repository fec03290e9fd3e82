//! Room that is kept free ahead of large writes.
//!
//! The marks of free room are a few hundredths of the memory, which is no room for an object of a tenth of it: a write would evict what
//! has not been judged. So where large objects come, more is kept free, and less again when they are fewer.

/// What is smaller is not large, however little the memory: it finds room in what the marks keep free.
pub(super) const LEAST: usize = 64 << 10;
/// Objects above this part of the memory have room kept for two of them from the first one on, up to half of the memory.
const HUGE: usize = 16;
/// Above this part for four of them, up to an eighth.
const LARGE: usize = 128;
/// Above this part for two more each time that one has found none, up to a quarter.
const ONCE_MISSED: usize = 1024;

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Ahead {
    bytes: usize,
    /// One was written that the room is for, since it was looked at last.
    used: bool,
}

impl Ahead {
    /// Bytes that are to be free beyond the marks.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// An object that takes `bytes` of a memory of `capacity` bytes was written.
    pub(super) fn wrote(&mut self, bytes: usize, capacity: usize) {
        if bytes < LEAST {
            return;
        }
        if bytes > capacity / HUGE {
            self.bytes = self.bytes.max((2 * bytes).min(capacity / 2));
        } else if bytes > capacity / LARGE {
            self.bytes = self.bytes.max((4 * bytes).min(capacity / 8));
        }
        self.used |= bytes >= self.bytes / 8;
    }

    /// A write of so many bytes has found no room.
    pub(super) fn missed(&mut self, bytes: usize, capacity: usize) {
        if bytes >= LEAST && bytes > capacity / ONCE_MISSED {
            self.bytes = self.bytes.max((self.bytes + 2 * bytes).min(capacity / 4));
        }
    }

    /// There is as much room as is wanted: if none of it was needed, less will do.
    pub(super) fn settle(&mut self) {
        if !std::mem::take(&mut self.used) {
            self.bytes -= self.bytes.div_ceil(16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_follows_what_is_written() {
        let (capacity, mib) = (224 << 20, 1 << 20);
        let mut ahead = Ahead::default();
        // Small beside the memory: nothing, until one finds no room.
        ahead.wrote(mib, capacity);
        assert_eq!(ahead.bytes(), 0);
        ahead.missed(mib, capacity);
        assert_eq!(ahead.bytes(), 2 * mib);
        ahead.missed(1000, capacity);
        ahead.wrote(2 * mib, capacity);
        assert_eq!(ahead.bytes(), 8 * mib);
        ahead.missed(2 * mib, capacity);
        assert_eq!(ahead.bytes(), 12 * mib);
        // While they come it stays; what is much smaller does not count.
        for _ in 0..100 {
            ahead.wrote(2 * mib, capacity);
            ahead.settle();
        }
        assert_eq!(ahead.bytes(), 12 * mib);
        for _ in 0..100 {
            ahead.wrote(1000, capacity);
            ahead.settle();
        }
        assert!(ahead.bytes() < mib, "{}", ahead.bytes());
        // A large one has room from the first on, and takes at most half.
        ahead.wrote(40 * mib, capacity);
        assert_eq!(ahead.bytes(), 80 * mib);
        ahead.wrote(100 * mib, capacity);
        assert_eq!(ahead.bytes(), 112 * mib);
        for _ in 0..300 {
            ahead.settle();
        }
        assert_eq!(ahead.bytes(), 0);
        // Nor is room kept for small ones in a small memory.
        ahead.wrote(60_000, 100_000);
        ahead.missed(60_000, 100_000);
        assert_eq!(ahead.bytes(), 0);
    }
}
