//! RIPQ (Tang, Huang, Lloyd, Kumar and Li, FAST '15): a priority queue on flash, written in large blocks.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::hybrid::Account;
use super::{Baseline, Counts, Index, NONE};
use crate::device::DeviceOp;

#[derive(Debug)]
struct Item {
    tag: u32,
    size: u32,
    /// Where its bytes are.
    physical: u32,
    /// Where it ranks; the physical block until it is asked for again.
    virtual_block: u32,
    /// Replaced by an update or deleted: not to be kept when its block goes.
    dead: bool,
    /// Where in its block, once that is sealed.
    offset: u32,
}

#[derive(Debug, Default)]
struct Block {
    section: usize,
    is_virtual: bool,
    /// Still being filled, in memory.
    active: bool,
    /// Bytes that rank here.
    bytes: u64,
    /// Items that rank here.
    ranked: u32,
    /// Items whose bytes are here, in order of arrival ([`NONE`] where one left); physical blocks only.
    items: Vec<u32>,
    /// Where on flash, in blocks: sealed physical blocks of a cache with places.
    place: u32,
}

#[derive(Debug, Default)]
struct Section {
    /// Sealed blocks, newest first.
    blocks: VecDeque<u32>,
    active_physical: u32,
    active_virtual: u32,
    /// Bytes that rank in the sealed blocks.
    bytes: u64,
}

/// A segmented LRU of K sections on flash, each with an insertion point: an active physical block that collects bytes in
/// memory, and an active virtual block that collects objects asked for again ("virtual update"). Objects enter the last
/// section and rise by one with each hit; when a physical block leaves the last section, objects that rank elsewhere are
/// written again there (materialised), the others are evicted.
///
/// Sections are as long as the bytes that rank in them ([`Ripq::new`], which agrees with lsm-sim). Deleted objects and the
/// ends of blocks take room on flash too: with places ([`Ripq::placed`]) the flash holds no more blocks than fit on it,
/// and the oldest makes room when there is none.
#[derive(Debug)]
pub struct Ripq {
    block_bytes: u64,
    section_bytes: u64,
    sections: Vec<Section>,
    blocks: Vec<Block>,
    free_blocks: Vec<u32>,
    items: Vec<Item>,
    free_items: Vec<u32>,
    index: Index,
    account: Account,
    /// Places that no block has, where blocks have places; the first is taken first.
    places: Option<BinaryHeap<Reverse<u32>>>,
}

impl Ripq {
    /// An empty cache of `flash_bytes`, in blocks of `block_bytes`, with `sections` (K, at least 1) insertion points.
    pub fn new(flash_bytes: u64, block_bytes: u64, sections: usize) -> Ripq {
        let sections = sections.max(1);
        let mut ripq = Ripq {
            block_bytes,
            section_bytes: flash_bytes / sections as u64,
            sections: Vec::new(),
            blocks: Vec::new(),
            free_blocks: Vec::new(),
            items: Vec::new(),
            free_items: Vec::new(),
            index: Index::default(),
            account: Account::default(),
            places: None,
        };
        for section in 0..sections {
            let active_physical = ripq.new_block(section, false);
            let active_virtual = ripq.new_block(section, true);
            ripq.sections.push(Section { active_physical, active_virtual, ..Section::default() });
        }
        ripq
    }

    /// As [`Ripq::new`], with a place on flash for every block, which bounds their number.
    pub fn placed(flash_bytes: u64, block_bytes: u64, sections: usize) -> Ripq {
        let places = (flash_bytes / block_bytes.max(1)).clamp(1, u64::from(u32::MAX)) as u32;
        let mut ripq = Ripq::new(flash_bytes, block_bytes, sections);
        ripq.places = Some((0..places).map(Reverse).collect());
        ripq
    }

    /// Whether object `tag` is held with this size, so that a request for it would hit.
    pub fn holds(&self, tag: u32, size: u32) -> bool {
        let at = self.index.get(tag);
        at != NONE && self.items[at as usize].size == size
    }

    fn new_block(&mut self, section: usize, is_virtual: bool) -> u32 {
        let block = Block { section, is_virtual, active: true, ..Block::default() };
        if let Some(at) = self.free_blocks.pop() {
            self.blocks[at as usize] = block;
            return at;
        }
        self.blocks.push(block);
        self.blocks.len() as u32 - 1
    }

    fn new_item(&mut self, item: Item) -> u32 {
        if let Some(at) = self.free_items.pop() {
            self.items[at as usize] = item;
            return at;
        }
        self.items.push(item);
        self.items.len() as u32 - 1
    }

    fn last(&self) -> usize {
        self.sections.len() - 1
    }

    /// The item no longer ranks where it did.
    fn unrank(&mut self, at: u32) {
        let Item { size, virtual_block, .. } = self.items[at as usize];
        let block = &mut self.blocks[virtual_block as usize];
        block.bytes -= u64::from(size);
        block.ranked -= 1;
        if !block.active {
            self.sections[block.section].bytes -= u64::from(size);
        }
    }

    /// An active block is full: it joins its section.
    fn seal(&mut self, section: usize, is_virtual: bool) {
        let new = self.new_block(section, is_virtual);
        let target = &mut self.sections[section];
        let active =
            if is_virtual { &mut target.active_virtual } else { &mut target.active_physical };
        let sealed = std::mem::replace(active, new);
        let block = &mut self.blocks[sealed as usize];
        block.active = false;
        target.bytes += block.bytes;
        target.blocks.push_front(sealed);
    }

    /// Writes the object into `section`'s active block, sealing blocks and evicting as needed.
    fn add(&mut self, tag: u32, size: u32, section: usize) {
        loop {
            let active = self.sections[section].active_physical;
            if self.blocks[active as usize].bytes + u64::from(size) <= self.block_bytes {
                break;
            }
            if self.places.as_ref().is_some_and(BinaryHeap::is_empty) && self.evict_oldest() {
                continue;
            }
            self.write(active);
            self.seal(section, false);
            self.seal(section, true);
            self.settle(section);
        }
        let active = self.sections[section].active_physical;
        let item =
            Item { tag, size, physical: active, virtual_block: active, dead: false, offset: 0 };
        let at = self.new_item(item);
        let block = &mut self.blocks[active as usize];
        block.bytes += u64::from(size);
        block.ranked += 1;
        block.items.push(at);
        self.index.set(tag, at);
    }

    /// A full block goes to flash.
    fn write(&mut self, block: u32) {
        let place = match &mut self.places {
            Some(places) => places.pop().map_or(0, |Reverse(place)| place),
            None => 0,
        };
        let block = &mut self.blocks[block as usize];
        block.place = place;
        let mut offset = 0;
        for &at in block.items.iter().filter(|&&at| at != NONE) {
            let item = &mut self.items[at as usize];
            // What was deleted while it was in memory is not written.
            if !item.dead {
                item.offset = offset;
                offset += item.size;
            }
        }
        self.account.write(u64::from(place) * self.block_bytes, self.block_bytes as u32);
    }

    /// Ranks the item in `section`'s active virtual block.
    fn rank(&mut self, at: u32, section: usize) {
        let size = u64::from(self.items[at as usize].size);
        let active = self.sections[section].active_virtual;
        let block = &mut self.blocks[active as usize];
        block.bytes += size;
        block.ranked += 1;
        self.items[at as usize].virtual_block = active;
        while self.blocks[self.sections[section].active_virtual as usize].bytes > self.block_bytes {
            self.seal(section, true);
            self.settle(section);
        }
    }

    fn settle(&mut self, start: usize) {
        self.balance(start);
        let last = self.last();
        while self.sections[last].bytes > self.section_bytes && self.evict() {}
    }

    /// Sections that have grown too large push their oldest blocks into the next.
    fn balance(&mut self, start: usize) {
        for section in start..self.last() {
            while self.sections[section].bytes > self.section_bytes {
                let Some(oldest) = self.pop_block(section) else { break };
                let block = &mut self.blocks[oldest as usize];
                block.section = section + 1;
                let next = &mut self.sections[section + 1];
                next.bytes += block.bytes;
                next.blocks.push_front(oldest);
            }
        }
    }

    fn pop_block(&mut self, section: usize) -> Option<u32> {
        let oldest = self.sections[section].blocks.pop_back()?;
        self.sections[section].bytes -= self.blocks[oldest as usize].bytes;
        Some(oldest)
    }

    /// The oldest block of the last section leaves the flash.
    fn evict(&mut self) -> bool {
        let Some(oldest) = self.pop_block(self.last()) else { return false };
        self.drop_block(oldest);
        true
    }

    /// The oldest block of the last section that has one leaves the flash.
    fn evict_oldest(&mut self) -> bool {
        let Some(oldest) = (0..self.sections.len()).rev().find_map(|s| self.pop_block(s)) else {
            return false;
        };
        self.drop_block(oldest);
        true
    }

    fn drop_block(&mut self, oldest: u32) {
        let items = std::mem::take(&mut self.blocks[oldest as usize].items);
        let Block { is_virtual, place, .. } = self.blocks[oldest as usize];
        if let Some(places) = &mut self.places
            && !is_virtual
        {
            places.push(Reverse(place));
            let (offset, len) = (u64::from(place) * self.block_bytes, self.block_bytes as u32);
            if items.iter().any(|&at| at != NONE && self.items[at as usize].virtual_block != oldest)
            {
                self.account.background_read(offset, len);
            }
            self.account.record(DeviceOp::Trim { offset, len });
        }
        let items: Vec<u32> = items.into_iter().filter(|&at| at != NONE).collect();
        // All leave their virtual blocks before any is written again: writing can evict further blocks.
        for &at in &items {
            if self.items[at as usize].virtual_block != oldest {
                self.unrank(at);
            }
        }
        for at in items {
            let Item { tag, size, virtual_block, dead, .. } = self.items[at as usize];
            if !dead {
                self.index.set(tag, NONE);
            }
            self.free_items.push(at);
            if virtual_block != oldest {
                let section = self.blocks[virtual_block as usize].section;
                self.add(tag, size, section);
            }
        }
        if !is_virtual || self.blocks[oldest as usize].ranked == 0 {
            self.free_blocks.push(oldest);
        }
        self.balance(0);
    }

    fn bury(&mut self, at: u32) {
        self.unrank(at);
        let item = &mut self.items[at as usize];
        item.virtual_block = item.physical;
        item.dead = true;
        self.index.set(item.tag, NONE);
    }
}

impl Baseline for Ripq {
    fn request(&mut self, tag: u32, size: u32) -> bool {
        self.account.counts.requests += 1;
        let at = self.index.get(tag);
        if at != NONE {
            if self.items[at as usize].size == size {
                self.account.counts.hits += 1;
                let Item { physical, virtual_block, .. } = self.items[at as usize];
                let section = self.blocks[virtual_block as usize].section.saturating_sub(1);
                self.unrank(at);
                if self.blocks[physical as usize].active {
                    // Its bytes are still in memory: they move to the better block.
                    self.account.counts.hits_dram += 1;
                    let items = &mut self.blocks[physical as usize].items;
                    if let Some(place) = items.iter().rposition(|&i| i == at) {
                        items[place] = NONE;
                    }
                    self.index.set(tag, NONE);
                    self.free_items.push(at);
                    self.add(tag, size, section);
                } else {
                    let place = self.blocks[physical as usize].place;
                    let offset = u64::from(place) * self.block_bytes
                        + u64::from(self.items[at as usize].offset);
                    self.account.record(DeviceOp::Read { offset, len: size });
                    self.rank(at, section);
                }
                return true;
            }
            self.bury(at);
        }
        self.account.counts.miss_bytes += u64::from(size);
        if u64::from(size) >= self.block_bytes {
            self.account.counts.refused += 1;
            return false;
        }
        self.add(tag, size, self.last());
        false
    }

    fn remove(&mut self, tag: u32) {
        let at = self.index.get(tag);
        if at != NONE {
            self.bury(at);
        }
    }

    fn counts(&self) -> Counts {
        self.account.counts
    }

    fn reset_counts(&mut self) {
        self.account.counts = Counts::default();
    }

    fn record_device_ops(&mut self) {
        self.account.recording = true;
    }

    fn take_device_ops(&mut self, out: &mut Vec<DeviceOp>) {
        out.append(&mut self.account.ops);
    }
}
