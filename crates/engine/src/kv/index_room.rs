//! Whether the flash index has room for what comes to flash.
//!
//! An index that was sized for larger objects than come forces older entries out, and what they led to is lost though it is still on
//! flash. Nothing else shows that: flash is written, and looks full.

use std::fmt;

use larder_base::ByteSize;
use larder_format::page::SMALL_MAX;

use crate::index::FlashIndex;

/// So many insertions are looked at together until the index is found too small: more than this part of them force others out. One that is
/// sized rightly has fewer than one in ten thousand.
const LOOK: u32 = 1024;
const FROM: f64 = 0.02;
/// It has room again when as many insertions as it has room for, which pass over all of the flash, have a smaller part than this.
const UNTIL: f64 = 0.005;

/// Insertions, and entries that they forced out.
#[derive(Debug, Default)]
struct Looked {
    inserted: u64,
    forced: u64,
}

impl Looked {
    /// The share of so many insertions, once there were as many.
    fn share(&mut self, forced: u64, of: u64) -> Option<f64> {
        self.inserted += 1;
        self.forced = self.forced.saturating_add(forced);
        if self.inserted < of {
            return None;
        }
        let Looked { inserted, forced } = std::mem::take(self);
        Some((forced as f64 / inserted as f64).min(1.0))
    }
}

/// What a shard keeps of its index's insertions.
#[derive(Debug, Default)]
pub(super) struct IndexRoom {
    /// Objects that the index has room for.
    objects: u64,
    look: Looked,
    turn: Looked,
    short: f64,
    /// The share of the insertions that were last looked at together.
    last: f64,
}

impl IndexRoom {
    /// Of an index that has room for so many objects.
    pub(super) fn new(objects: u64) -> IndexRoom {
        IndexRoom { objects, ..IndexRoom::default() }
    }

    /// An entry was inserted, and forced so many out.
    pub(super) fn inserted(&mut self, forced: u64) {
        if let Some(share) = self.look.share(forced, u64::from(LOOK)) {
            self.last = share;
            if self.short == 0.0 && share > FROM {
                self.short = share;
                self.turn = Looked::default();
            }
        }
        if let Some(share) = self.turn.share(forced, self.objects.max(u64::from(LOOK)))
            && self.short > 0.0
        {
            self.short = if share > UNTIL { share } else { 0.0 };
        }
    }

    /// Whether insertions have forced others out of late.
    pub(super) fn forces(&self) -> bool {
        self.last > UNTIL
    }

    /// The index has room for so many objects now: what was seen before says nothing any more of what it forces out.
    pub(super) fn resized(&mut self, objects: u64) {
        (self.objects, self.last, self.look) = (objects, 0.0, Looked::default());
        self.turn = Looked::default();
    }

    /// The share of insertions that force others out, while the index is too small; else 0.
    pub(super) fn short(&self) -> f64 {
        self.short
    }
}

/// The mean size of objects of which `capacity` bytes hold as many as `slots` slots are for: those of more than [`SMALL_MAX`] bytes take several.
fn size_for(capacity: u64, slots: f64) -> u64 {
    let each = capacity as f64 / slots.max(1.0);
    if each <= SMALL_MAX as f64 { each as u64 } else { (each * FlashIndex::SLOTS_PER_WIDE) as u64 }
}

/// The flash index is too small for the objects that come to flash.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexFull {
    /// The share of objects coming to flash for each of which another is lost.
    pub lost: f64,
    /// The mean size of objects on flash that the index has room for, bytes.
    pub sized_for: u64,
    /// The one that would do, bytes.
    pub fits: u64,
}

impl IndexFull {
    /// Of a flash of `capacity` bytes whose index has `slots` slots to be filled, and whose shards lose these shares.
    pub(super) fn of(
        capacity: u64,
        slots: u64,
        shares: impl ExactSizeIterator<Item = f64>,
    ) -> Option<IndexFull> {
        let lost = shares.len().max(1) as f64;
        let lost = shares.sum::<f64>() / lost;
        // Not on account of one shard of many, which another size would not help.
        if lost < UNTIL {
            return None;
        }
        // Whichever is forced out is as old as it may be: of those that come the share `exp(-h)` stays until its segment is written anew,
        // and on average `(1 - exp(-h)) / h` of what would be there is.
        let hazard = -(1.0 - lost).max(0.001).ln();
        let wanted = slots as f64 * hazard / lost;
        let (sized_for, fits) = (size_for(capacity, slots as f64), size_for(capacity, wanted));
        Some(IndexFull { lost, sized_for, fits })
    }
}

impl fmt::Display for IndexFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the index has room for objects of {} in the mean and cannot grow further, and those that come are smaller: for {:.0} % of them \
             another one on flash is lost. It needs room for objects of {}: give it more memory and start again",
            ByteSize(self.sized_for),
            self.lost * 100.0,
            ByteSize(self.fits),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is said after so many insertions in a row that force none out, or one each.
    fn after(room: &mut IndexRoom, rows: &[(u32, bool)]) -> f64 {
        for &(inserted, forced) in rows {
            (0..inserted).for_each(|_| room.inserted(forced.into()));
        }
        room.short()
    }

    #[test]
    fn it_is_short_from_two_percent_on_until_there_is_half_a_percent() {
        let room = &mut IndexRoom::new(10_000);
        assert_eq!(after(room, &[(20, true), (1004, false)]), 0.0);
        assert_eq!(after(room, &[(512, true), (512, false)]), 0.5);
        // Those that follow a reclaimed segment find room: that is not all there is.
        assert_eq!(after(room, &[(6_000, false)]), 0.5);
        let share = after(room, &[(3_000, true), (1_000, false)]);
        assert!((0.25..0.35).contains(&share), "{share}");
        assert!(after(room, &[(9_900, false), (100, true)]) > 0.0);
        assert_eq!(after(room, &[(19_000, false)]), 0.0);
        // Entries may force out more than one each.
        let mut room = IndexRoom::new(0);
        (0..LOOK).for_each(|_| room.inserted(u64::MAX));
        assert_eq!(room.short(), 1.0);
    }

    #[test]
    fn it_says_which_size_would_do() {
        // 100 MB for 100,000 objects of 1,000 bytes, and half of those that come do not find room.
        let full = IndexFull::of(100_000_000, 100_000, [0.4, 0.6].into_iter()).unwrap();
        assert_eq!(full, IndexFull { lost: 0.5, sized_for: 1000, fits: 721 });
        assert!(full.to_string().contains("50 %") && full.to_string().contains("721 B"), "{full}");
        // Of objects that take 2.7 slots each, and of some that would take one.
        let blocks = IndexFull::of(100_000_000, 65_000, [0.5].into_iter()).unwrap();
        assert_eq!((blocks.sized_for, blocks.fits), (4153, 2996));
        let fewer = IndexFull::of(100_000_000, 90_000, [0.5].into_iter()).unwrap();
        assert_eq!((fewer.sized_for, fewer.fits), (3000, 801));
        // One of very many shards.
        let one = (0..64).map(|i| if i == 0 { 0.02 } else { 0.0 });
        assert_eq!(IndexFull::of(100_000_000, 100_000, one), None);
        assert_eq!(IndexFull::of(0, 0, [].into_iter()), None);
        assert!(IndexFull::of(1 << 40, 0, [1.0].into_iter()).is_some());
    }
}
