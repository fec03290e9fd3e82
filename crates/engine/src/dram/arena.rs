//! One shard's memory for objects: a fixed range carved by a two-level segregated fit (TLSF: Masmano, Ripoll, Crespo,
//! Real, ECRTS 2004), so that `-m` holds exactly under any mix of sizes.
//!
//! Why not slab classes: memory stuck in the wrong class is what memcached's users complain of (evictions by surprise
//! when sizes shift). Why not the process's allocator: its fragmentation is not ours to bound. Blocks lie back to back
//! and know their neighbours, so the CLOCK hand walks them in address order: what it evicts is adjacent and coalesces,
//! and room for one large object can always be made by clearing a run of neighbours.
//!
//! ```text
//! block: | size u32 (units; bit 31 = used) | previous block's size u32 | payload …            |
//! free:  |                                  |                           | next u32 | prev u32 |
//! ```

mod resize;

use super::free::{FreeBlocks, FreeLists};
pub use resize::Tail;

/// Granularity of blocks, bytes.
pub const UNIT: usize = 16;
/// Bytes in front of a block's payload.
pub(super) const BLOCK_HEADER: usize = 8;
/// Smallest block, units: an object header alone is as large.
pub(super) const MIN_UNITS: u32 = 4;

const USED: u32 = 1 << 31;

/// A block's place: its offset in units. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u32);

/// The memory of one shard's objects.
pub struct Arena {
    mem: Box<[u8]>,
    end: u32,
    lists: FreeLists,
}

/// Units of an arena of `bytes`.
pub(super) fn arena_units(bytes: usize) -> u32 {
    (bytes / UNIT).clamp(4096 / UNIT, (1 << 30) - 1) as u32
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
        self.get(unit, 0) & !USED
    }
    fn is_free(&self, unit: u32) -> bool {
        self.get(unit, 0) & USED == 0
    }
    fn next_free(&self, unit: u32) -> u32 {
        self.get(unit, 8)
    }
    fn prev_free(&self, unit: u32) -> u32 {
        self.get(unit, 12)
    }
    fn set_next_free(&mut self, unit: u32, next: u32) {
        self.put(unit, 8, next);
    }
    fn set_prev_free(&mut self, unit: u32, prev: u32) {
        self.put(unit, 12, prev);
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
        };
        // Unit 0 is never a block (0 means none); the last unit is a used block of no size that stops every walk.
        let whole = arena.end - 1;
        arena.put(arena.end, 0, USED);
        arena.put(arena.end, 4, whole);
        arena.put(1, 0, whole);
        arena.put(1, 4, 0);
        arena.insert_free(1, whole);
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

    fn set_units(&mut self, unit: u32, units: u32, used: bool) {
        self.put(unit, 0, units | if used { USED } else { 0 });
        self.put(unit + units, 4, units);
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
            self.set_units(unit, want, true);
            self.set_units(unit + want, rest, false);
            self.insert_free(unit + want, rest);
        } else {
            self.set_units(unit, have, true);
        }
        Some(Block(unit))
    }

    /// Frees a block and joins it with free neighbours. Returns the free range: its first block and its bytes.
    pub fn free(&mut self, block: Block) -> (Block, usize) {
        let mut unit = block.0;
        debug_assert!(self.is_used(block), "free of a free block");
        let mut units = self.units(unit);
        let after = unit + units;
        if self.get(after, 0) & USED == 0 {
            let more = self.units(after);
            self.remove_free(after, more);
            units += more;
        }
        let before = self.get(unit, 4);
        if before != 0 && self.get(unit - before, 0) & USED == 0 {
            unit -= before;
            self.remove_free(unit, before);
            units += before;
        }
        self.set_units(unit, units, false);
        self.insert_free(unit, units);
        (Block(unit), units as usize * UNIT)
    }

    /// Whether a payload of `payload` bytes would lie in this block and waste less than a block of its own.
    pub fn fits_in_place(&self, block: Block, payload: usize) -> bool {
        let (want, have) = (units_of(payload), self.units(block.0));
        want <= have && have - want < MIN_UNITS
    }

    /// Whether a block of `payload` bytes can be had without freeing anything.
    pub fn has_room(&self, payload: usize) -> bool {
        payload <= self.mem.len() && self.find(units_of(payload)).is_some()
    }

    /// Whether the block is in use.
    pub fn is_used(&self, block: Block) -> bool {
        self.get(block.0, 0) & USED != 0
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
        let (mut at, mut before, mut was_free, mut free) = (1u32, 0u32, false, 0u32);
        while at < self.end {
            let units = self.units(at);
            if units < MIN_UNITS || at + units > self.end {
                return Err(format!("block at {at} has {units} units"));
            }
            if self.get(at, 4) != before {
                return Err(format!(
                    "block at {at}: neighbour of {} units, not {before}",
                    self.get(at, 4)
                ));
            }
            let is_free = self.get(at, 0) & USED == 0;
            if is_free && was_free {
                return Err(format!("two free blocks touch at {at}"));
            }
            free += if is_free { units } else { 0 };
            (before, was_free) = (units, is_free);
            at += units;
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
