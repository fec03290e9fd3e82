//! A shard's memory for objects grows or shrinks while the shard serves, one bounded step at a time.

use std::collections::TryReserveError;

use larder_base::Now;
use larder_policy::admission::Departure;

use super::shard::KvShard;
use crate::dram::{Arena, Block, CompactArena, ObjectHeader, ObjectMemory, State};

/// Bytes by which one step changes an arena: bounds how long the shard stays locked (about a millisecond).
const STEP: usize = 2 << 20;
/// The smallest arena.
const LEAST: usize = 4096;

/// Memory for objects that a host may advise the system on.
pub trait Resizable: ObjectMemory + Sized {
    /// The memory itself; nothing where it is no range of bytes.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl Resizable for Arena {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.memory_mut()
    }
}

impl Resizable for CompactArena {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut []
    }
}

impl<M: ObjectMemory> KvShard<M> {
    /// Sets the marks of free room at which the cleaner is called and rests: they follow the arena's size.
    pub fn set_marks(&mut self, free_low: usize, free_high: usize) {
        self.marks = (free_low, free_high);
        self.fit_marks();
    }

    /// Where the index has taken much of the memory, the marks lie within what is left.
    pub(super) fn fit_marks(&mut self) {
        let arena = self.arena.bytes();
        self.config.free_low = self.marks.0.min(arena / 2);
        self.config.free_high = self.marks.1.min(arena / 4 * 3);
    }

    /// Takes the memory for objects one step closer to `bytes`, less what the index has grown by. Returns whether more steps are needed.
    ///
    /// A smaller arena loses objects by rank, as a write that needs room makes it lose them. With
    /// [`ShardConfig::no_eviction`](super::ShardConfig::no_eviction) it must not be made smaller.
    ///
    /// # Errors
    /// When the system has no memory to grow by; the arena stays as it is.
    pub fn resize(&mut self, now: Now, bytes: usize) -> Result<bool, TryReserveError> {
        self.flush_if_due(now);
        self.divided = bytes;
        let more = self.fit_arena(now, STEP.max(self.arena.bytes() / 256))?;
        if !more {
            self.table.fit(&mut self.arena, bytes, &self.config.hasher);
            self.sweep.restart();
            self.config.arena_bytes = self.arena.bytes();
        }
        Ok(more)
    }

    /// Whether the memory for objects is larger than it would be with `bytes` for them and what the index has grown by.
    pub fn shrinks_to(&self, bytes: usize) -> bool {
        self.arena.bytes() > self.arena_within(bytes)
    }

    /// What objects have of `bytes`.
    pub(super) fn arena_within(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.index_size.taken(&self.index)).max(LEAST)
    }

    /// Takes the memory for objects up to `step` bytes closer to the size that it should have. Returns whether more is needed.
    pub(super) fn fit_arena(&mut self, now: Now, step: usize) -> Result<bool, TryReserveError> {
        let bytes = self.arena_within(self.divided);
        let have = self.arena.bytes();
        let more = if bytes > have {
            self.arena.grow(bytes.min(have + step))?;
            self.arena.bytes() > have && have + step < bytes
        } else {
            self.shrink(now, bytes.max(have.saturating_sub(step)));
            // The end falls on the start of a block: a little below the cut, never above it.
            self.arena.bytes() > bytes
        };
        if !more {
            self.fit_marks();
        }
        Ok(more)
    }

    fn shrink(&mut self, now: Now, bytes: usize) {
        // Room below for what lies above: twice as much as could lie there, since it comes in pieces.
        let wanted = 2 * self.arena.bytes().saturating_sub(bytes);
        let mut walked = 0;
        while self.arena.free_bytes() < wanted && walked < 4 * self.arena.capacity() {
            walked += self.arena.block_bytes(self.hand);
            self.clock_step(now, true, walked < 2 * self.arena.capacity());
        }
        let mut tail = self.arena.withhold(bytes);
        for block in std::mem::take(&mut tail.objects) {
            self.move_out(now, block);
        }
        for hand in [&mut self.hand, &mut self.scan] {
            if tail.has(*hand) {
                *hand = self.arena.first();
            }
        }
        self.arena.cut_off(tail);
    }

    /// Moves an object out of the withheld end of the arena, or evicts it where there is no room.
    fn move_out(&mut self, now: Now, block: Block) {
        let mut h = ObjectHeader::load(&self.arena, block);
        let hash = self.hash_of(block, &h);
        let Some(to) = self.arena.copy_object(block) else {
            self.count_eviction(now, block, &h);
            self.take_out(hash, block, &h, Some((now, Departure::Evicted)));
            return;
        };
        if h.state.has(State::STAGED) {
            // The log knows it by its block: the copy in the open segment is nobody's now.
            self.staged_bytes -= self.arena.block_bytes(block);
            self.note_staged_dead(hash);
            h.state = h.state.without(State::STAGED);
        }
        self.table.unlink(&mut self.arena, hash.dram(), block);
        h.save(&mut self.arena, to);
        self.table.link(&mut self.arena, hash.dram(), to);
        let (from, to) = (self.arena.block_bytes(block), self.arena.block_bytes(to));
        let app = self.apps.of_mut(h.app);
        app.dram_bytes = app.dram_bytes + to as u64 - from as u64;
    }
}
