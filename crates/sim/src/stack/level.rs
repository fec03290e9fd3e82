//! Frames in LRU order, clean and dirty.

use std::collections::BTreeSet;

use larder_base::slab::{List, Slab};

/// A block that had to leave its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) block: u32,
    pub(super) dirty: bool,
    /// The frame's mark.
    pub(super) mark: bool,
}

#[derive(Debug)]
struct Frame {
    block: u32,
    /// What the owner notes of the frame: of the unified architecture, that it is on flash.
    mark: bool,
}

const NONE: u32 = u32::MAX;

/// A number of frames. Blocks have dense numbers.
#[derive(Debug)]
pub(super) struct Level {
    capacity: u32,
    slab: Slab<Frame>,
    list: List,
    index: Vec<u32>,
    dirty: BTreeSet<u32>,
}

impl Level {
    pub(super) fn new(capacity: u32) -> Level {
        Level {
            capacity,
            slab: Slab::new(),
            list: List::new(),
            index: Vec::new(),
            dirty: BTreeSet::new(),
        }
    }

    pub(super) fn len(&self) -> u32 {
        self.slab.len() as u32
    }

    fn at(&self, block: u32) -> u32 {
        self.index.get(block as usize).copied().unwrap_or(NONE)
    }

    pub(super) fn holds(&self, block: u32) -> bool {
        self.at(block) != NONE
    }

    /// Makes the block the most recent; its frame's mark, if it is here.
    pub(super) fn touch(&mut self, block: u32) -> Option<bool> {
        let at = self.at(block);
        if at == NONE {
            return None;
        }
        self.list.move_to_front(&mut self.slab, at);
        Some(self.slab.get(at).mark)
    }

    /// Takes the least recent block out, where every frame is taken.
    pub(super) fn make_room(&mut self) -> Option<Victim> {
        if self.len() < self.capacity {
            return None;
        }
        let at = self.list.pop_back(&mut self.slab)?;
        let Frame { block, mark } = *self.slab.get(at);
        self.slab.free(at);
        self.index[block as usize] = NONE;
        Some(Victim { block, dirty: self.dirty.remove(&block), mark })
    }

    /// Gives a block that is not here a frame; there must be one.
    pub(super) fn insert(&mut self, block: u32, mark: bool) {
        if self.capacity == 0 {
            return;
        }
        let at = self.slab.take(Frame { block, mark });
        self.list.push_front(&mut self.slab, at);
        if self.index.len() <= block as usize {
            self.index.resize(block as usize + 1, NONE);
        }
        self.index[block as usize] = at;
    }

    /// Every block that is here, in order of their numbers.
    pub(super) fn blocks(&self) -> Vec<u32> {
        let here = |&(_, &at): &(usize, &u32)| at != NONE;
        self.index.iter().enumerate().filter(here).map(|(block, _)| block as u32).collect()
    }

    /// Takes a block out; whether it was dirty, if it was here.
    pub(super) fn remove(&mut self, block: u32) -> Option<bool> {
        let at = self.at(block);
        if at == NONE {
            return None;
        }
        self.list.unlink(&mut self.slab, at);
        self.slab.free(at);
        self.index[block as usize] = NONE;
        Some(self.dirty.remove(&block))
    }

    pub(super) fn set_dirty(&mut self, block: u32, dirty: bool) {
        if dirty && self.holds(block) {
            self.dirty.insert(block);
        } else {
            self.dirty.remove(&block);
        }
    }

    /// All dirty blocks, which are clean from now on.
    pub(super) fn take_dirty(&mut self) -> BTreeSet<u32> {
        std::mem::take(&mut self.dirty)
    }

    pub(super) fn is_dirty(&self, block: u32) -> bool {
        self.dirty.contains(&block)
    }

    /// Whether the frame of the block is marked.
    pub(super) fn mark(&self, block: u32) -> bool {
        let at = self.at(block);
        at != NONE && self.slab.get(at).mark
    }
}
