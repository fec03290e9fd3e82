//! One shard's memory for objects: a fixed range carved by a two-level segregated fit (TLSF: Masmano, Ripoll, Crespo,
//! Real, ECRTS 2004), so that `-m` holds exactly under any mix of sizes.
//!
//! Why not slab classes: memory stuck in the wrong class is what memcached's users complain of (evictions by surprise
//! when sizes shift). Why not the process's allocator: its fragmentation is not ours to bound. Blocks lie back to back
//! and know their neighbours, so the CLOCK hand walks them in address order: what it evicts is adjacent and coalesces,
//! and room for one large object can always be made by clearing a run of neighbours.
//!
//! ```text
//! block: | its units u31, the block before is free | next of its chain u31, in use | payload …          |
//! free:  | its units u31, 0                        | next of its list u31, 0       | prev u32 | … | units u32 |
//! ```
//!
//! A free block says at its end how long it is, for the block behind it, which is in use: two free ones never touch.

mod resize;

use super::free::{FreeBlocks, FreeLists};
use super::object::HEADER_BYTES;
pub use resize::Tail;

/// Granularity of blocks, bytes.
pub const UNIT: usize = 8;
/// Bytes in front of a block's payload.
pub(super) const BLOCK_HEADER: usize = 8;
/// Smallest block, units: an object header alone is as large.
pub(super) const MIN_UNITS: u32 = 4;

/// With a block's units: the block before it is free.
const AFTER_FREE: u32 = 1 << 31;
/// With a block's link: it is in use.
const USED: u32 = 1 << 31;

/// Units of which the start of one block is known, if one begins there (1 MiB): so that blocks are found from the memory's end.
const REGION_BITS: u32 = 17;

/// A block's place: its offset in units. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u32);

/// The memory of one shard's objects.
pub struct Arena {
    mem: Box<[u8]>,
    end: u32,
    lists: FreeLists,
    /// A block that begins in each region; 0 where none is known.
    starts: Vec<u32>,
    /// Where the CAS uniques begin that objects hold at no further cost.
    pub(super) cas_base: u64,
}

/// Units of an arena of `bytes`.
pub(super) fn arena_units(bytes: usize) -> u32 {
    (bytes / UNIT).clamp(4096 / UNIT, (1 << 31) - 1) as u32
}

pub(super) fn units_of(payload: usize) -> u32 {
    (((payload + BLOCK_HEADER).div_ceil(UNIT)) as u32).max(MIN_UNITS)
}

/// What a block of this payload takes of the memory for objects.
pub fn footprint(payload: usize) -> usize {
    units_of(payload) as usize * UNIT
}

impl FreeBlocks for Arena {
    fn lists(&self) -> &FreeLists {
        &self.lists
    }
    fn lists_mut(&mut self) -> &mut FreeLists {
        &mut self.lists
    }
    #[inline]
    fn units(&self, unit: u32) -> u32 {
        self.get(unit, 0) & !AFTER_FREE
    }
    fn is_free(&self, unit: u32) -> bool {
        self.get(unit, 4) & USED == 0
    }
    fn next_free(&self, unit: u32) -> u32 {
        self.get(unit, 4)
    }
    fn prev_free(&self, unit: u32) -> u32 {
        self.get(unit, 8)
    }
    fn set_next_free(&mut self, unit: u32, next: u32) {
        self.put(unit, 4, next);
    }
    fn set_prev_free(&mut self, unit: u32, prev: u32) {
        self.put(unit, 8, prev);
    }
    #[inline]
    fn set_free_links(&mut self, unit: u32, next: u32, prev: u32) {
        let at = unit as usize * UNIT + 4;
        let links = u64::from(next) | u64::from(prev) << 32;
        self.mem[at..at + 8].copy_from_slice(&links.to_le_bytes());
    }
}

impl Arena {
    /// An arena of `bytes` (at least 4 KiB, at most 16 GiB), wholly free. The system zeroes the memory lazily.
    pub fn new(bytes: usize) -> Arena {
        let units = arena_units(bytes);
        let mut arena = Arena {
            mem: vec![0u8; units as usize * UNIT].into_boxed_slice(),
            end: units - 1,
            lists: FreeLists::new(),
            starts: Vec::new(),
            cas_base: 0,
        };
        arena.fit_starts();
        // Unit 0 is never a block (0 means none); the last unit is a used block of no size that stops every walk.
        arena.put(arena.end, 4, USED);
        arena.set_free(1, arena.end - 1);
        arena
    }

    #[inline]
    fn get(&self, unit: u32, byte: usize) -> u32 {
        let at = unit as usize * UNIT + byte;
        u32::from_le_bytes(self.mem[at..at + 4].try_into().expect("four bytes"))
    }

    #[inline]
    fn put(&mut self, unit: u32, byte: usize, value: u32) {
        let at = unit as usize * UNIT + byte;
        self.mem[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// Changes a block's length, and nothing else of it.
    fn set_units(&mut self, unit: u32, units: u32) {
        let flag = self.get(unit, 0) & AFTER_FREE;
        self.put(unit, 0, units | flag);
    }

    /// Makes a block of `units` that is in use, behind one that is.
    fn set_used(&mut self, unit: u32, units: u32) {
        self.put(unit, 0, units);
        self.put(unit, 4, USED);
        self.starts[(unit >> REGION_BITS) as usize] = unit;
    }

    /// Makes a block of `units` that is free, behind one that is in use, and lists it.
    fn set_free(&mut self, unit: u32, units: u32) {
        let end = unit + units;
        self.put(unit, 0, units);
        self.put(end - 1, UNIT - 4, units);
        let after = self.get(end, 0);
        self.put(end, 0, after | AFTER_FREE);
        self.insert_free(unit, units);
        self.starts[(unit >> REGION_BITS) as usize] = unit;
    }

    /// The block at `unit` is none any more.
    fn forget_start(&mut self, unit: u32) {
        let start = &mut self.starts[(unit >> REGION_BITS) as usize];
        if *start == unit {
            *start = 0;
        }
    }

    /// As many regions as the memory has.
    fn fit_starts(&mut self) {
        let regions = (self.end >> REGION_BITS) as usize + 1;
        self.starts.resize(regions, 0);
        if let Some(last) = self.starts.last_mut().filter(|start| **start >= self.end) {
            *last = 0;
        }
    }

    /// The block of which `unit`, which is not behind the end, is part; the end itself is one.
    fn block_of(&self, unit: u32) -> u32 {
        let regions = &self.starts[..=(unit >> REGION_BITS) as usize];
        let known = regions.iter().rev().find(|&&start| start != 0 && start <= unit);
        let mut at = known.copied().unwrap_or(1);
        while at < self.end && at + self.units(at) <= unit {
            at += self.units(at);
        }
        at
    }

    /// Asks for the cache line of a block's header.
    #[inline]
    pub fn warm(&self, block: Block) {
        larder_base::prefetch(&self.mem, block.0 as usize * UNIT);
    }

    /// A block whose payload holds `payload` bytes; `None` when no free range is long enough.
    pub fn alloc(&mut self, payload: usize) -> Option<Block> {
        if payload > self.mem.len() {
            return None;
        }
        let want = units_of(payload);
        let unit = self.find(want)?;
        let have = self.units(unit);
        self.remove_free(unit, have);
        let rest = have - want;
        if rest >= MIN_UNITS {
            self.set_used(unit, want);
            self.set_free(unit + want, rest);
        } else {
            self.set_used(unit, have);
            let after = self.get(unit + have, 0);
            self.put(unit + have, 0, after & !AFTER_FREE);
        }
        Some(Block(unit))
    }

    /// Frees a block and joins it with free neighbours. Returns the free range: its first block and its bytes.
    pub fn free(&mut self, block: Block) -> (Block, usize) {
        let mut unit = block.0;
        debug_assert!(self.is_used(block), "free of a free block");
        let mut units = self.units(unit);
        let after = unit + units;
        if self.is_free(after) {
            let more = self.units(after);
            self.remove_free(after, more);
            self.forget_start(after);
            units += more;
        }
        if self.get(unit, 0) & AFTER_FREE != 0 {
            let before = self.get(unit - 1, UNIT - 4);
            self.forget_start(unit);
            unit -= before;
            self.remove_free(unit, before);
            units += before;
        }
        self.set_free(unit, units);
        (Block(unit), units as usize * UNIT)
    }

    /// Whether a block of `payload` bytes can be had without freeing anything.
    pub fn has_room(&self, payload: usize) -> bool {
        payload <= self.mem.len() && self.find(units_of(payload)).is_some()
    }

    /// Whether the block is in use.
    #[inline]
    pub fn is_used(&self, block: Block) -> bool {
        !self.is_free(block.0)
    }

    /// The link of a block in use: 31 bits, its owner's.
    #[inline]
    pub(super) fn link(&self, block: Block) -> u32 {
        self.get(block.0, 4) & !USED
    }

    /// Changes the link of a block in use.
    #[inline]
    pub(super) fn set_link(&mut self, block: Block, link: u32) {
        debug_assert!(self.is_used(block) && link & USED == 0);
        self.put(block.0, 4, link | USED);
    }

    /// The first block in address order.
    pub fn first(&self) -> Block {
        Block(1)
    }

    /// The block after this one in address order, wrapping at the end.
    pub fn next(&self, block: Block) -> Block {
        let next = block.0 + self.units(block.0);
        if next >= self.end { Block(1) } else { Block(next) }
    }

    /// Bytes that a block takes from the arena, its header included.
    pub fn block_bytes(&self, block: Block) -> usize {
        self.units(block.0) as usize * UNIT
    }

    /// The payload of a block.
    #[inline]
    pub fn payload(&self, block: Block) -> &[u8] {
        let start = block.0 as usize * UNIT;
        let bytes = self.units(block.0) as usize * UNIT;
        &self.mem[start + BLOCK_HEADER..start + bytes]
    }

    /// The payload of a block, to change.
    #[inline]
    pub fn payload_mut(&mut self, block: Block) -> &mut [u8] {
        let start = block.0 as usize * UNIT;
        let bytes = self.units(block.0) as usize * UNIT;
        &mut self.mem[start + BLOCK_HEADER..start + bytes]
    }

    /// The header of the object in a block.
    #[inline]
    pub(super) fn object_header(&self, block: Block) -> &[u8; HEADER_BYTES] {
        let start = block.0 as usize * UNIT + BLOCK_HEADER;
        self.mem[start..].first_chunk().expect("a block has room for a header")
    }

    /// The header of the object in a block, to change.
    #[inline]
    pub(super) fn object_header_mut(&mut self, block: Block) -> &mut [u8; HEADER_BYTES] {
        let start = block.0 as usize * UNIT + BLOCK_HEADER;
        self.mem[start..].first_chunk_mut().expect("a block has room for a header")
    }

    /// `len` bytes of a block's payload, from the one at `at` on.
    #[inline]
    pub(super) fn part(&self, block: Block, at: usize, len: usize) -> &[u8] {
        let start = block.0 as usize * UNIT + BLOCK_HEADER + at;
        &self.mem[start..start + len]
    }

    /// The whole memory, for the runtime to advise the kernel on before it is used.
    pub fn memory_mut(&mut self) -> &mut [u8] {
        &mut self.mem
    }

    /// Free bytes, block headers included, in however many pieces.
    pub fn free_bytes(&self) -> usize {
        self.lists.units as usize * UNIT
    }

    /// Bytes that blocks can take in all.
    pub fn capacity(&self) -> usize {
        (self.end as usize - 1) * UNIT
    }

    /// Walks everything: neighbours agree on their sizes, no two free blocks touch, the lists hold exactly the free
    /// blocks. For tests.
    pub fn validate(&self) -> Result<(), String> {
        let (mut at, mut was_free, mut free) = (1u32, false, 0u32);
        let mut starts: Vec<u32> = self.starts.iter().copied().filter(|&s| s != 0).collect();
        while at < self.end {
            let units = self.units(at);
            if units < MIN_UNITS || units > self.end - at {
                return Err(format!("block at {at} has {units} units"));
            }
            let is_free = self.is_free(at);
            if is_free && was_free {
                return Err(format!("two free blocks touch at {at}"));
            }
            if is_free && self.get(at + units - 1, UNIT - 4) != units {
                return Err(format!("block at {at} says another length at its end"));
            }
            if (self.get(at, 0) & AFTER_FREE != 0) != was_free {
                return Err(format!("block at {at} does not know of the one before it"));
            }
            free += if is_free { units } else { 0 };
            starts.retain(|&start| start != at);
            was_free = is_free;
            at += units;
        }
        if (self.get(at, 0) & AFTER_FREE != 0) != was_free || self.is_free(at) {
            return Err("the end does not know of the block before it".to_owned());
        }
        if !starts.is_empty() {
            return Err(format!("no blocks begin at {starts:?}"));
        }
        let listed = self.check_lists()?;
        if listed != free || free != self.lists.units {
            return Err(format!(
                "free units: walked {free}, listed {listed}, counted {}",
                self.lists.units
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;

    #[test]
    fn random_allocations_stay_apart_and_come_back() {
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let mut arena = Arena::new(64 << 10);
            let whole = arena.free_bytes();
            let mut live: Vec<(Block, usize, u8)> = Vec::new();
            for step in 0..2_000u32 {
                if rng.chance(0.55) {
                    let len =
                        if rng.chance(0.05) { rng.below(20_000) } else { rng.below(700) } as usize;
                    if let Some(b) = arena.alloc(len) {
                        let fill = step as u8;
                        arena.payload_mut(b)[..len].fill(fill);
                        live.push((b, len, fill));
                    }
                } else if !live.is_empty() {
                    let (b, len, fill) = live.swap_remove(rng.below(live.len() as u64) as usize);
                    assert!(arena.payload(b)[..len].iter().all(|&x| x == fill), "seed {seed}");
                    arena.free(b);
                }
                if step % 100 == 0 {
                    arena.validate().unwrap();
                }
            }
            for (b, len, fill) in live {
                assert!(arena.payload(b)[..len].iter().all(|&x| x == fill));
                arena.free(b);
            }
            arena.validate().unwrap();
            assert_eq!(arena.free_bytes(), whole);
        }
    }

    #[test]
    fn too_large_is_none() {
        let mut arena = Arena::new(4096);
        assert!(arena.alloc(5000).is_none());
        assert!(arena.alloc(usize::MAX).is_none());
        assert!(arena.alloc(3900).is_some());
    }
}
