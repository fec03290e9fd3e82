//! Changing an arena's size while it is in use.
//!
//! Growing appends free memory. Shrinking takes memory from the end: free ranges there are withheld, then the objects
//! that lie there are moved down one by one (or given up by the caller), then the end moves.
//!
//! ```text
//!  … | object | free | object | end        withhold: the last two blocks lie beyond the cut
//!             ^ cut                        relocate: the object goes wherever there is room below
//!  … | object | f | end                    cut_off: the rest below the cut is free again
//! ```

use std::collections::TryReserveError;

use super::super::free::FreeBlocks;
use super::{AFTER_FREE, Arena, BLOCK_HEADER, Block, MIN_UNITS, UNIT, USED, arena_units};

/// The end of an arena that is about to go: [`Arena::withhold`] makes one, [`Arena::cut_off`] takes it.
#[derive(Debug)]
#[must_use]
pub struct Tail {
    pub(in crate::dram) cut: u32,
    /// The address at which it begins.
    pub(in crate::dram) first: u32,
    /// Its blocks, where they are not known by their addresses.
    pub(in crate::dram) slots: Option<Vec<u32>>,
    /// Objects that lie in it, the last in address order first. All must be gone before it is cut off.
    pub objects: Vec<Block>,
}

impl Tail {
    /// Whether `block` lies in it.
    pub fn has(&self, block: Block) -> bool {
        match &self.slots {
            Some(slots) => slots.contains(&block.0),
            None => block.0 >= self.first,
        }
    }
}

impl Arena {
    /// Bytes of memory, bookkeeping included: what [`Arena::new`] was asked for.
    pub fn bytes(&self) -> usize {
        (self.end as usize + 1) * UNIT
    }

    /// Appends free memory until there are `bytes` of it.
    ///
    /// # Errors
    /// When the system has no memory for it; then nothing has changed.
    pub fn grow(&mut self, bytes: usize) -> Result<(), TryReserveError> {
        let units = arena_units(bytes);
        if units < self.end + 1 + MIN_UNITS {
            return Ok(());
        }
        let mut mem = std::mem::take(&mut self.mem).into_vec();
        let reserved = mem.try_reserve_exact((units as usize * UNIT).saturating_sub(mem.len()));
        if reserved.is_ok() {
            mem.resize(units as usize * UNIT, 0);
        }
        self.mem = mem.into_boxed_slice();
        reserved?;
        let old = self.end;
        self.end = units - 1;
        self.fit_starts();
        self.put(self.end, 4, USED);
        // What stopped every walk is a block now, and knows of the one before it.
        self.set_units(old, self.end - old);
        self.free(Block(old));
        Ok(())
    }

    /// Begins to shorten the arena to `bytes`: from here to [`Arena::cut_off`] nothing is allocated beyond that length,
    /// and nothing that lies there may be freed.
    pub fn withhold(&mut self, bytes: usize) -> Tail {
        let cut = (arena_units(bytes) - 1).min(self.end);
        let first = self.block_of(cut);
        let (mut at, mut objects) = (first, Vec::new());
        while at < self.end {
            let units = self.units(at);
            if self.is_used(Block(at)) {
                objects.push(Block(at));
            } else {
                // Held as if in use, so that no neighbour joins it.
                self.remove_free(at, units);
                self.put(at, 4, USED);
                let after = self.get(at + units, 0);
                self.put(at + units, 0, after & !AFTER_FREE);
            }
            at += units;
        }
        objects.reverse();
        Tail { cut, first, slots: None, objects }
    }

    /// Copies the first `payload` bytes of a block to another one, never to the withheld end. `None` when there is no room.
    pub fn relocate(&mut self, block: Block, payload: usize) -> Option<Block> {
        let to = self.alloc(payload)?;
        let from = block.0 as usize * UNIT + BLOCK_HEADER;
        self.mem.copy_within(from..from + payload, to.0 as usize * UNIT + BLOCK_HEADER);
        Some(to)
    }

    /// Gives up the withheld end, of which the caller needs nothing any more, and its memory back to the system: at once, so that
    /// a shrink that goes on in steps and is given up on the way keeps nothing beyond what [`Arena::bytes`] says.
    pub fn cut_off(&mut self, tail: Tail) {
        let Tail { cut, first, .. } = tail;
        if first >= self.end {
            return;
        }
        let kept = cut >= first + MIN_UNITS;
        self.end = if kept { cut } else { first };
        self.fit_starts();
        if kept {
            self.put(cut, 0, 0);
            self.put(cut, 4, USED);
            self.set_units(first, cut - first);
            self.put(first, 4, USED);
            self.free(Block(first));
        } else {
            // The block that stops every walk, which knows of the one before it.
            self.set_units(first, 0);
            self.put(first, 4, USED);
        }
        self.release();
    }

    /// Gives memory beyond the end back to the system.
    fn release(&mut self) {
        let mut mem = std::mem::take(&mut self.mem).into_vec();
        mem.truncate(self.bytes());
        self.mem = mem.into_boxed_slice();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_base::Rng;

    #[test]
    fn what_is_kept_stays_whole_over_any_change_of_size() {
        for seed in 0..60 {
            let mut rng = Rng::new(seed);
            let mut arena = Arena::new(48 << 10);
            let mut live: Vec<(Block, usize, u8)> = Vec::new();
            for step in 0..600u32 {
                match rng.below(40) {
                    0 => arena.grow((rng.below(128) as usize) << 10).unwrap(),
                    1 => {
                        let want = (4 + rng.below(90) as usize) << 10;
                        let tail = arena.withhold(want);
                        let before = arena.bytes();
                        for &block in &tail.objects {
                            let at = live.iter().position(|l| l.0 == block).expect("is an object");
                            match arena.relocate(block, live[at].1) {
                                Some(to) => {
                                    assert!(!tail.has(to));
                                    live[at].0 = to;
                                }
                                None => drop(live.swap_remove(at)),
                            }
                        }
                        arena.cut_off(tail);
                        assert!(arena.bytes() <= want.max(4096) || arena.bytes() == before);
                        assert_eq!(
                            arena.mem.len(),
                            arena.bytes(),
                            "seed {seed}: all is given back"
                        );
                    }
                    2..=25 => {
                        let len = rng.below(900) as usize;
                        if let Some(b) = arena.alloc(len) {
                            arena.payload_mut(b)[..len].fill(step as u8);
                            live.push((b, len, step as u8));
                        }
                    }
                    _ if !live.is_empty() => {
                        let at = rng.below(live.len() as u64) as usize;
                        arena.free(live.swap_remove(at).0);
                    }
                    _ => {}
                }
                arena.validate().unwrap_or_else(|e| panic!("seed {seed} step {step}: {e}"));
                for (b, len, fill) in &live {
                    assert!(arena.payload(*b)[..*len].iter().all(|x| x == fill), "seed {seed}");
                }
            }
        }
    }
}
