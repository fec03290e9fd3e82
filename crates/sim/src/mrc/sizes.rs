//! The size that each object has by what the trace said so far.

use super::items::{Item, Said};

/// Nothing is known: not seen, or removed.
const UNSEEN: u32 = 0;
/// Only reads without a size named it: it is charged as a key alone.
const NAMED: u32 = u32::MAX;
/// Reads said different sizes: what it is charged with is open.
const VARIED: u32 = 1 << 31;

/// Last known sizes by tag. Takes no memory before the first store or read without a size.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    known: Vec<u32>,
    tracking: bool,
}

impl Sizes {
    /// The bytes that `item` is about, and whether an object that is in a cache must be charged anew with them.
    ///
    /// Reads of another size than before charge nothing, as in libCacheSim: in traces of reads alone the size of the
    /// first request stands until the object leaves.
    #[inline]
    pub(super) fn of(&mut self, tag: u32, item: &Item) -> (u32, bool) {
        if !self.tracking {
            if item.said == Said::Asked {
                return (item.size, false);
            }
            self.tracking = true;
            self.known.resize(tag as usize, VARIED);
        }
        self.track(tag as usize, item)
    }

    fn track(&mut self, tag: usize, item: &Item) -> (u32, bool) {
        if self.known.len() <= tag {
            self.known.resize(tag + 1, UNSEEN);
        }
        let known = &mut self.known[tag];
        if item.removes {
            *known = UNSEEN;
            return (item.size, false);
        }
        let before = *known;
        let size = before & !VARIED;
        // Half of what 32 bits hold leaves a bit; what is larger is charged at each store.
        let plain = if item.size < VARIED { item.size } else { VARIED };
        match item.said {
            Said::Nothing if before == NAMED || size == 0 => {
                *known = NAMED;
                (item.size, false)
            }
            Said::Nothing => (size, false),
            Said::Stored => {
                *known = plain;
                (item.size, before != UNSEEN && before != item.size)
            }
            Said::Asked if before == NAMED || before == UNSEEN => {
                *known = plain;
                (item.size, before == NAMED)
            }
            Said::Asked => {
                if size != item.size {
                    *known = plain | VARIED;
                }
                (item.size, false)
            }
        }
    }

    /// Bytes of memory held.
    pub(super) fn memory_bytes(&self) -> usize {
        self.known.capacity() * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stores_charge_and_reads_without_a_size_take_what_is_known() {
        let mut sizes = Sizes::default();
        let item = |said, size| Item { said, ..Item::get(1, size) };
        assert_eq!(sizes.of(0, &item(Said::Asked, 70)), (70, false));
        assert_eq!(sizes.memory_bytes(), 0, "reads alone need no sizes");
        for (said, size, answer) in [
            (Said::Nothing, 9, (9, false)),
            (Said::Stored, 100, (100, true)),
            (Said::Stored, 100, (100, false)),
            (Said::Nothing, 9, (100, false)),
            (Said::Stored, 50, (50, true)),
            (Said::Asked, 60, (60, false)),
            // Charged with 50 still, or with 60 where it was brought in since.
            (Said::Stored, 60, (60, true)),
            (Said::Stored, u32::MAX, (u32::MAX, true)),
            (Said::Nothing, 9, (9, false)),
            (Said::Asked, 60, (60, true)),
        ] {
            assert_eq!(sizes.of(1, &item(said, size)), answer, "{said:?} {size}");
        }
        sizes.of(1, &Item { removes: true, ..Item::get(1, 1) });
        assert_eq!(sizes.of(1, &item(Said::Stored, 7)), (7, false));
        // Tag 0 was read before sizes were kept.
        assert_eq!(sizes.of(0, &item(Said::Stored, 70)), (70, true));
    }
}
