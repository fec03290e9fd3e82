//! Finds objects in the arena by key: chains through the objects' own headers, a fixed number of buckets.
//!
//! Fixed because it never has to grow while the arena keeps its size: the arena bounds the number of objects, and one
//! bucket per 256 bytes of arena keeps the mean chain at a few objects even when every object is as small as its header.
//! When the arena changes its size the table is built anew. Four bytes per bucket are
//! 1.0 to 2.1 % of the arena, counted within the memory for objects.

use larder_base::KeyHasher;

use super::arena::Block;
use super::memory::ObjectMemory;
use super::object::ObjectHeader;

/// The buckets of one shard.
pub struct Table {
    heads: Box<[u32]>,
    mask: u32,
    len: usize,
}

impl Table {
    /// Buckets for an arena of this many bytes.
    pub fn for_arena(bytes: usize) -> Table {
        let buckets = Self::buckets(bytes);
        Table { heads: vec![0; buckets].into_boxed_slice(), mask: buckets as u32 - 1, len: 0 }
    }

    fn buckets(arena_bytes: usize) -> usize {
        let want = (arena_bytes / 256).clamp(64, 1 << 30);
        // The power of two nearest from below or above, so that the table stays near 1.6 %.
        let above = want.next_power_of_two();
        if above - want > want - above / 2 { above / 2 } else { above }
    }

    /// Rebuilds the table for an arena that has become `bytes` long, if that asks for another number of buckets.
    pub fn fit(&mut self, arena: &mut impl ObjectMemory, bytes: usize, hasher: &KeyHasher) {
        if Self::buckets(bytes) == self.heads.len() {
            return;
        }
        let before = self.len;
        *self = Table::for_arena(bytes);
        let mut block = arena.first();
        loop {
            if arena.is_used(block) {
                let hash = hasher.hash(&ObjectHeader::load(arena, block).key(arena, block));
                self.link(arena, hash.dram(), block);
            }
            let next = arena.next(block);
            if next == arena.first() {
                break;
            }
            block = next;
        }
        debug_assert_eq!(self.len, before, "every object is linked again");
    }

    /// Bytes that [`Table::for_arena`] takes.
    pub fn bytes_for_arena(bytes: usize) -> usize {
        Self::buckets(bytes) * 4
    }

    /// The object with this key.
    #[inline]
    pub fn find(
        &self,
        arena: &impl ObjectMemory,
        hash: u32,
        key: &[u8],
    ) -> Option<(Block, ObjectHeader)> {
        let mut at = self.heads[(hash & self.mask) as usize];
        while at != 0 {
            let block = Block(at);
            if arena.has_key(block, hash, key) {
                return Some((block, ObjectHeader::load(arena, block)));
            }
            at = ObjectHeader::next_of(arena, block);
        }
        None
    }

    /// Asks for the cache line at which looking for `hash` begins.
    #[inline]
    pub fn warm(&self, hash: u32) {
        larder_base::prefetch(&self.heads, (hash & self.mask) as usize);
    }

    /// Asks for the header of the first object that looking for `hash` meets.
    #[inline]
    pub fn warm_object(&self, arena: &impl ObjectMemory, hash: u32) {
        arena.warm(Block(self.heads[(hash & self.mask) as usize]));
    }

    /// Whether the first object that looking for `hash` meets has this key, when [`Table::warm_object`] has been asked some
    /// time ago. Asks for what is read of it besides, or else for the second object.
    #[inline]
    pub fn warm_further(&self, arena: &impl ObjectMemory, hash: u32, key: &[u8]) -> bool {
        let at = self.heads[(hash & self.mask) as usize];
        if at == 0 {
            return false;
        }
        let found = arena.has_key(Block(at), hash, key);
        if found {
            arena.warm_reads(Block(at));
        } else {
            arena.warm(Block(ObjectHeader::next_of(arena, Block(at))));
        }
        found
    }

    /// The object in `block`, if one is linked there under `hash`: safe to ask of a block that may be gone.
    pub fn holds(
        &self,
        arena: &impl ObjectMemory,
        hash: u32,
        block: Block,
    ) -> Option<ObjectHeader> {
        let mut at = self.heads[(hash & self.mask) as usize];
        while at != 0 {
            if at == block.0 {
                return Some(ObjectHeader::load(arena, block));
            }
            at = ObjectHeader::next_of(arena, Block(at));
        }
        None
    }

    /// Number of buckets: positions for [`Table::chain`].
    pub fn width(&self) -> u32 {
        self.mask + 1
    }

    /// The objects of one bucket.
    pub fn chain<'a, M: ObjectMemory>(
        &self,
        arena: &'a M,
        bucket: u32,
    ) -> impl Iterator<Item = (Block, ObjectHeader)> + use<'a, M> {
        let mut at = self.heads.get(bucket as usize).copied().unwrap_or(0);
        std::iter::from_fn(move || {
            let block = (at != 0).then_some(Block(at))?;
            let h = ObjectHeader::load(arena, block);
            at = ObjectHeader::next_of(arena, block);
            Some((block, h))
        })
    }

    /// Links an object whose header (but for `next`) is in place.
    #[inline]
    pub fn link(&mut self, arena: &mut impl ObjectMemory, hash: u32, block: Block) {
        let slot = (hash & self.mask) as usize;
        ObjectHeader::set_next(arena, block, self.heads[slot]);
        self.heads[slot] = block.0;
        self.len += 1;
    }

    /// Unlinks an object.
    ///
    /// # Panics
    /// If it is not linked: the table would be corrupt.
    pub fn unlink(&mut self, arena: &mut impl ObjectMemory, hash: u32, block: Block) {
        let slot = (hash & self.mask) as usize;
        let next = ObjectHeader::next_of(arena, block);
        let mut at = self.heads[slot];
        if at == block.0 {
            self.heads[slot] = next;
        } else {
            loop {
                assert!(at != 0, "an object that is to be unlinked is linked");
                let after = ObjectHeader::next_of(arena, Block(at));
                if after == block.0 {
                    ObjectHeader::set_next(arena, Block(at), next);
                    break;
                }
                at = after;
            }
        }
        self.len -= 1;
    }

    /// Objects linked.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes taken.
    pub fn memory_bytes(&self) -> usize {
        self.heads.len() * 4
    }
}
