//! What flash cannot hold for its size.

use std::fmt;

use larder_base::ByteSize;

/// Objects that were not offered to admission, since their records are longer than flash takes
/// ([`FlashGeometry::longest_record`](super::FlashGeometry::longest_record)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TooLarge {
    /// How often one was met that had to leave DRAM, or be looked at for it.
    pub objects: u64,
    /// The longest of their records, bytes.
    pub longest: u64,
    /// The longest that flash takes, bytes.
    pub limit: u64,
}

impl TooLarge {
    /// Counts one.
    pub(super) fn met(&mut self, record: u64) {
        self.objects += 1;
        self.longest = self.longest.max(record);
    }

    /// Adds another shard's.
    pub(super) fn add(&mut self, other: &TooLarge) {
        self.objects += other.objects;
        self.longest = self.longest.max(other.longest);
        self.limit = self.limit.max(other.limit);
    }
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} objects of up to {} are in DRAM alone, and leave the cache when they leave it: this flash takes objects of up to {}, a part \
             of itself. A larger flash takes them",
            self.objects,
            ByteSize(self.longest),
            ByteSize(self.limit)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_too_large_is_told() {
        let mut all = TooLarge { limit: 8 << 20, ..TooLarge::default() };
        all.met(9 << 20);
        let mut other = TooLarge { limit: 8 << 20, ..TooLarge::default() };
        other.met(10 << 20);
        other.met(9 << 20);
        all.add(&other);
        assert_eq!(all, TooLarge { objects: 3, longest: 10 << 20, limit: 8 << 20 });
        let told = all.to_string();
        for part in ["3 objects", "10 MiB", "8 MiB", "larger flash"] {
            assert!(told.contains(part), "{told}");
        }
    }
}
