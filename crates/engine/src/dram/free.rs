//! Free blocks by size class: the two-level segregated fit of [`Arena`](super::Arena) and
//! [`CompactArena`](super::compact::CompactArena), which differ in where a block's links lie, not in which block is taken.

/// Of blocks below 512 bytes, which most are, each size is a class of its own: what an object leaves is where the next one of its size goes,
/// and holes are neither split nor left over.
const SL_BITS: u32 = 5;
const SL: usize = 1 << SL_BITS;
const FL: usize = 27;

/// Blocks of the exact class that are looked at when no larger class has one.
const LOOKS: u32 = 8;

/// The heads of the lists, and which are not empty. A block's number is never zero: that means none.
#[derive(Debug)]
pub(super) struct FreeLists {
    heads: [[u32; SL]; FL],
    fl_map: u32,
    sl_map: [u32; FL],
    /// Units of all blocks that are free.
    pub units: u32,
}

impl FreeLists {
    pub(super) fn new() -> FreeLists {
        FreeLists { heads: [[0; SL]; FL], fl_map: 0, sl_map: [0; FL], units: 0 }
    }
}

fn class_of(units: u32) -> (usize, usize) {
    if units < SL as u32 {
        return (0, units as usize);
    }
    let fl = 31 - units.leading_zeros();
    let sl = (units >> (fl - SL_BITS)) as usize & (SL - 1);
    ((fl - SL_BITS + 1) as usize, sl)
}

/// The first class all of whose blocks hold `units`.
fn class_for(units: u32) -> (usize, usize) {
    if units < SL as u32 {
        return (0, units as usize);
    }
    let fl = 31 - units.leading_zeros();
    class_of(units + (1 << (fl - SL_BITS)) - 1)
}

/// Memory whose free blocks are in [`FreeLists`].
pub(super) trait FreeBlocks {
    fn lists(&self) -> &FreeLists;
    fn lists_mut(&mut self) -> &mut FreeLists;
    /// Size of a block.
    fn units(&self, block: u32) -> u32;
    fn is_free(&self, block: u32) -> bool;
    /// Links of a free block; 0 means none.
    fn next_free(&self, block: u32) -> u32;
    fn prev_free(&self, block: u32) -> u32;
    fn set_next_free(&mut self, block: u32, next: u32);
    fn set_prev_free(&mut self, block: u32, prev: u32);
    /// Both links.
    #[inline]
    fn set_free_links(&mut self, block: u32, next: u32, prev: u32) {
        self.set_next_free(block, next);
        self.set_prev_free(block, prev);
    }

    /// Puts a free block of `units` at the head of its class.
    fn insert_free(&mut self, block: u32, units: u32) {
        let (fl, sl) = class_of(units);
        let head = self.lists().heads[fl][sl];
        self.set_free_links(block, head, 0);
        if head != 0 {
            self.set_prev_free(head, block);
        }
        let lists = self.lists_mut();
        lists.heads[fl][sl] = block;
        lists.fl_map |= 1 << fl;
        lists.sl_map[fl] |= 1 << sl;
        lists.units += units;
    }

    /// Takes a free block of `units` out of its list.
    fn remove_free(&mut self, block: u32, units: u32) {
        let (fl, sl) = class_of(units);
        let (next, prev) = (self.next_free(block), self.prev_free(block));
        if next != 0 {
            self.set_prev_free(next, prev);
        }
        if prev != 0 {
            self.set_next_free(prev, next);
        }
        let lists = self.lists_mut();
        if prev == 0 {
            lists.heads[fl][sl] = next;
            if next == 0 {
                lists.sl_map[fl] &= !(1 << sl);
                if lists.sl_map[fl] == 0 {
                    lists.fl_map &= !(1 << fl);
                }
            }
        }
        lists.units -= units;
    }

    /// A free block of at least `units`.
    fn find(&self, units: u32) -> Option<u32> {
        let (fl, sl) = class_for(units);
        if fl >= FL {
            return None;
        }
        let lists = self.lists();
        let here = lists.sl_map[fl] & (u32::MAX << sl);
        if here != 0 {
            return Some(lists.heads[fl][here.trailing_zeros() as usize]);
        }
        let above = if fl + 1 < FL { lists.fl_map & (u32::MAX << (fl + 1)) } else { 0 };
        if above != 0 {
            let fl = above.trailing_zeros() as usize;
            return Some(lists.heads[fl][lists.sl_map[fl].trailing_zeros() as usize]);
        }
        // The rounding up of `class_for` passes over blocks of the exact class that may fit: look at its first few.
        let (fl, sl) = class_of(units);
        let mut at = lists.heads[fl][sl];
        for _ in 0..LOOKS {
            if at == 0 {
                break;
            }
            if self.units(at) >= units {
                return Some(at);
            }
            at = self.next_free(at);
        }
        None
    }

    /// Units of all blocks that are listed, after every list was walked.
    ///
    /// # Errors
    /// What is wrong with a list, in words.
    fn check_lists(&self) -> Result<u32, String> {
        let mut listed = 0;
        for (fl, row) in self.lists().heads.iter().enumerate() {
            for (sl, &head) in row.iter().enumerate() {
                if (head != 0) != (self.lists().sl_map[fl] & (1 << sl) != 0) {
                    return Err(format!("class {fl}/{sl}: the map disagrees with the list"));
                }
                let (mut at, mut before) = (head, 0);
                while at != 0 {
                    if class_of(self.units(at)) != (fl, sl) || !self.is_free(at) {
                        return Err(format!("block {at} in the list of class {fl}/{sl}"));
                    }
                    if self.prev_free(at) != before {
                        return Err(format!("block {at} does not know the one before it"));
                    }
                    listed += self.units(at);
                    (before, at) = (at, self.next_free(at));
                }
            }
        }
        Ok(listed)
    }
}
