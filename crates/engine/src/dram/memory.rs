//! What a shard asks of the memory for its objects, so that the same shard runs over the bytes themselves ([`Arena`])
//! and over a record of each object from which the bytes follow ([`CompactArena`](super::CompactArena)).

use std::collections::TryReserveError;
use std::ops::Deref;

use super::arena::{Arena, Block, Tail};
use super::object::{self, Fixed, ObjectHeader, State, extra_bytes, is_short, object_bytes};

/// Memory for objects: blocks back to back in one range of addresses, each in use or free. Which block an allocation
/// gets, what is joined when one is freed and what follows on what are the same for every implementation, call by call.
pub trait ObjectMemory {
    /// Whether tables beside it should take memory as they are filled, not at once: what counts is room for many objects.
    const SPARING: bool = false;

    /// A key as it is handed out.
    type Key<'a>: Deref<Target = [u8]>
    where
        Self: 'a;

    /// A block whose payload holds `payload` bytes; `None` when no free range is long enough.
    fn alloc(&mut self, payload: usize) -> Option<Block>;
    /// Frees a block and joins it with free neighbours. A hand that stood on what is no block's start any more stands on
    /// the free range's start afterwards.
    fn free(&mut self, block: Block, hands: [&mut Block; 2]);
    /// Whether a block of `payload` bytes can be had without freeing anything.
    fn has_room(&self, payload: usize) -> bool;
    /// Whether the block is in use.
    fn is_used(&self, block: Block) -> bool;
    /// The first block in address order: always the same.
    fn first(&self) -> Block;
    /// The block after this one in address order, [`ObjectMemory::first`] after the last.
    fn next(&self, block: Block) -> Block;
    /// Bytes that a block takes, its header included.
    fn block_bytes(&self, block: Block) -> usize;
    /// Free bytes, block headers included, in however many pieces.
    fn free_bytes(&self) -> usize;
    /// Bytes that blocks can take in all.
    fn capacity(&self) -> usize;
    /// Bytes of memory, bookkeeping included: what it was made with.
    fn bytes(&self) -> usize;
    /// Appends free memory until there are `bytes` of it.
    ///
    /// # Errors
    /// When the system has no memory for it; then nothing has changed.
    fn grow(&mut self, bytes: usize) -> Result<(), TryReserveError>;
    /// Begins to shorten it to `bytes`: from here to [`ObjectMemory::cut_off`] nothing is allocated beyond that length, and nothing that
    /// lies there may be freed.
    fn withhold(&mut self, bytes: usize) -> Tail;
    /// Gives up the withheld end, of which the caller needs nothing any more.
    fn cut_off(&mut self, tail: Tail);
    /// Bytes that the process holds for it.
    fn held_bytes(&self) -> usize;
    /// Asks for the cache line of a block's header.
    fn warm(&self, block: Block);
    /// Asks for what of the object's header is kept elsewhere, if anything is. The block's own header is best at hand.
    fn warm_reads(&self, _block: Block) {}
    /// Asks for what freeing the block will look at beside it. The block's own header is best at hand.
    fn warm_neighbours(&self, block: Block);

    /// Where the CAS uniques begin that the objects are given. Asked before there is an object.
    fn count_cas_from(&mut self, _base: u64) {}
    /// Payload bytes of an object with these flags and this CAS.
    fn object_bytes(&self, key_len: usize, value_len: usize, _flags: u32, _cas: u64) -> usize {
        object_bytes(key_len, value_len)
    }
    /// Whether the object in the block can be given this CAS where it lies.
    fn holds_cas(&self, _block: Block, _cas: u64) -> bool {
        true
    }

    /// Writes a new object to a block that was allocated for it: all of its header but the chain's link, which
    /// [`ObjectMemory::set_next`] sets. `hash` is [`larder_base::ObjectHash::dram`] of the key.
    fn fill(
        &mut self,
        block: Block,
        header: &ObjectHeader,
        hash: u32,
        key: &[u8],
        value: [&[u8]; 2],
    );
    /// The object's header.
    fn header(&self, block: Block) -> ObjectHeader;
    /// Writes the header of an object whose flags, application, key and value stay as they are.
    fn set_header(&mut self, block: Block, header: &ObjectHeader);
    /// A second block with all of the object but the chain's link, for an object that makes room where it lies. `None` when no free
    /// range is long enough.
    fn copy_object(&mut self, block: Block) -> Option<Block>;
    /// The chain's link alone.
    fn next_of(&self, block: Block) -> u32;
    /// Changes the chain's link alone.
    fn set_next(&mut self, block: Block, next: u32);
    /// Changes the state bits alone.
    fn set_state(&mut self, block: Block, state: State);
    /// Whether the object has this key, whose [`larder_base::ObjectHash::dram`] is `hash`.
    fn has_key(&self, block: Block, hash: u32, key: &[u8]) -> bool;
    /// The object's key.
    fn key(&self, block: Block, header: &ObjectHeader) -> Self::Key<'_>;
    /// The object's value.
    fn value(&self, block: Block, header: &ObjectHeader) -> &[u8];
    /// Overwrites the start of the object's value.
    fn write_value(&mut self, block: Block, header: &ObjectHeader, bytes: &[u8]);

    /// Walks everything and checks that it holds together. For tests.
    ///
    /// # Errors
    /// What does not hold.
    fn validate(&self) -> Result<(), String>;
}

impl ObjectMemory for Arena {
    type Key<'a> = &'a [u8];

    #[inline]
    fn alloc(&mut self, payload: usize) -> Option<Block> {
        Arena::alloc(self, payload)
    }
    #[inline]
    fn free(&mut self, block: Block, hands: [&mut Block; 2]) {
        let (start, bytes) = Arena::free(self, block);
        let end = start.0 + (bytes / super::UNIT) as u32;
        for hand in hands {
            if hand.0 > start.0 && hand.0 < end {
                *hand = start;
            }
        }
    }
    fn has_room(&self, payload: usize) -> bool {
        Arena::has_room(self, payload)
    }
    #[inline]
    fn is_used(&self, block: Block) -> bool {
        Arena::is_used(self, block)
    }
    #[inline]
    fn first(&self) -> Block {
        Arena::first(self)
    }
    #[inline]
    fn next(&self, block: Block) -> Block {
        Arena::next(self, block)
    }
    #[inline]
    fn block_bytes(&self, block: Block) -> usize {
        Arena::block_bytes(self, block)
    }
    #[inline]
    fn free_bytes(&self) -> usize {
        Arena::free_bytes(self)
    }
    #[inline]
    fn capacity(&self) -> usize {
        Arena::capacity(self)
    }
    fn bytes(&self) -> usize {
        Arena::bytes(self)
    }
    fn grow(&mut self, bytes: usize) -> Result<(), TryReserveError> {
        Arena::grow(self, bytes)
    }
    fn withhold(&mut self, bytes: usize) -> Tail {
        Arena::withhold(self, bytes)
    }
    fn cut_off(&mut self, tail: Tail) {
        Arena::cut_off(self, tail);
    }
    fn held_bytes(&self) -> usize {
        Arena::bytes(self)
    }
    #[inline]
    fn warm(&self, block: Block) {
        Arena::warm(self, block);
    }
    #[inline]
    fn warm_neighbours(&self, block: Block) {
        // The block before it ends in front of its header.
        Arena::warm(self, Arena::next(self, block));
    }

    fn count_cas_from(&mut self, base: u64) {
        self.cas_base = base;
    }
    #[inline]
    fn object_bytes(&self, key_len: usize, value_len: usize, flags: u32, cas: u64) -> usize {
        let long_cas = !is_short(cas, self.cas_base);
        object_bytes(key_len, value_len) + extra_bytes(flags != 0, long_cas)
    }
    #[inline]
    fn holds_cas(&self, block: Block, cas: u64) -> bool {
        is_short(cas, self.cas_base) || Fixed::start_of(self.object_header(block)).has_long_cas()
    }

    #[inline]
    fn fill(
        &mut self,
        block: Block,
        header: &ObjectHeader,
        hash: u32,
        key: &[u8],
        value: [&[u8]; 2],
    ) {
        let value_len = value[0].len() + value[1].len();
        let bytes =
            ObjectMemory::object_bytes(self, key.len(), value_len, header.flags, header.cas);
        let cas_base = self.cas_base;
        let payload = self.payload_mut(block);
        let long_cas = !is_short(header.cas, cas_base);
        let fixed = Fixed::new(header, hash, long_cas, payload.len() - bytes);
        fixed.store(payload);
        object::encode_flags(header, payload);
        let start = payload.first_chunk_mut().expect("a block has room for a header");
        if object::encode(header, start, cas_base) {
            object::encode_long_cas(header, payload);
        }
        let body = &mut payload[fixed.key_at()..];
        let (to, rest) = body.split_at_mut(key.len());
        to.copy_from_slice(key);
        let (first, rest) = rest.split_at_mut(value[0].len());
        first.copy_from_slice(value[0]);
        rest[..value[1].len()].copy_from_slice(value[1]);
    }
    #[inline(always)]
    fn header(&self, block: Block) -> ObjectHeader {
        object::decode(self.payload(block), self.cas_base)
    }
    #[inline]
    fn set_header(&mut self, block: Block, header: &ObjectHeader) {
        let cas_base = self.cas_base;
        if object::encode(header, self.object_header_mut(block), cas_base) {
            object::encode_long_cas(header, self.payload_mut(block));
        }
    }
    fn copy_object(&mut self, block: Block) -> Option<Block> {
        let fixed = Fixed::start_of(self.object_header(block));
        let bytes = self.payload(block).len() - fixed.spare();
        let to = self.relocate(block, bytes)?;
        let payload = self.payload_mut(to);
        let spare = payload.len() - bytes;
        fixed.with_spare(spare).store(payload);
        Some(to)
    }
    #[inline]
    fn next_of(&self, block: Block) -> u32 {
        self.link(block)
    }
    #[inline]
    fn set_next(&mut self, block: Block, next: u32) {
        self.set_link(block, next);
    }
    #[inline]
    fn set_state(&mut self, block: Block, state: State) {
        object::encode_state(self.object_header_mut(block), state);
    }
    #[inline]
    fn has_key(&self, block: Block, hash: u32, key: &[u8]) -> bool {
        let fixed = Fixed::start_of(self.object_header(block));
        fixed.may_be(hash, key.len()) && self.part(block, fixed.key_at(), key.len()) == key
    }
    #[inline]
    fn key(&self, block: Block, header: &ObjectHeader) -> &[u8] {
        let key_at = Fixed::start_of(self.object_header(block)).key_at();
        self.part(block, key_at, usize::from(header.key_len))
    }
    #[inline]
    fn value(&self, block: Block, header: &ObjectHeader) -> &[u8] {
        let key_at = Fixed::start_of(self.object_header(block)).key_at();
        self.part(block, key_at + usize::from(header.key_len), header.value_len as usize)
    }
    fn write_value(&mut self, block: Block, header: &ObjectHeader, bytes: &[u8]) {
        let key_at = Fixed::start_of(self.object_header(block)).key_at();
        let start = key_at + usize::from(header.key_len);
        self.payload_mut(block)[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn validate(&self) -> Result<(), String> {
        Arena::validate(self)
    }
}
