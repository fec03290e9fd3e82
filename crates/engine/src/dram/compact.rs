//! Memory for objects without their bytes, for simulation: where every key is an id of eight bytes and a filler and
//! every value the start of one pattern, an object is 48 bytes, whatever its size.
//!
//! Addresses, sizes and lists are those of [`Arena`](super::Arena), block by block, so that a shard decides the same over
//! either; only that the blocks' memory is not there. A block is known by the number of its slot, not by its address.
//!
//! ```text
//! slot: 0 chain's next u32   4 block before u32   8 block after u32 (slots; 0: none)
//!      12 bits 31 used, 29-30 units more than asked for, 21-28 key length, 0-20 value length
//!      16 application (9 bits) and state (7 bits)    18 cas u40
//!      24 expiry u32  28 written u32  32 from the write to the last access u32  36 of reads 4 × u8  40 id u64
//! free:  0 list's next u32                           16 units u32   24 list's previous u32
//! ```

use std::collections::TryReserveError;
use std::ops::Deref;
use std::sync::Arc;

use larder_base::{AppId, Expiry};

use super::accesses::Accesses;
use super::arena::{Block, MIN_UNITS, Tail, UNIT, arena_units, units_of};
use super::free::{FreeBlocks, FreeLists};
use super::memory::ObjectMemory;
use super::object::{ObjectHeader, State, object_bytes};

/// Bytes of an object's id, the start of its key.
const ID_LEN: usize = 8;
/// Slots that are added at a time.
const CHUNK: usize = 256;

const USED: u32 = 1 << 31;
const VALUE_BITS: u32 = 21;
const KEY_SHIFT: u32 = VALUE_BITS;
const SLACK_SHIFT: u32 = 29;
const STATE_BITS: u32 = 7;

/// Zeros take no memory: the system maps one page of them everywhere.
static ZEROS: [u8; 1 << VALUE_BITS] = [0; 1 << VALUE_BITS];

/// What all keys and values are made of.
#[derive(Clone, Debug)]
pub struct Contents {
    /// None: zeros.
    pattern: Option<Arc<[u8]>>,
}

impl Contents {
    /// What keys are filled up with.
    pub const FILLER: u8 = b'k';
    /// The longest value that [`CompactArena`] can describe.
    pub const LONGEST: usize = (1 << VALUE_BITS) - 1;

    /// Values of zeros.
    pub fn zeros() -> Contents {
        Contents { pattern: None }
    }

    /// Values of up to `longest` bytes, which must not exceed [`Contents::LONGEST`], that are not all alike.
    pub fn new(longest: usize) -> Contents {
        assert!(longest <= Self::LONGEST, "values of {longest} bytes");
        Contents { pattern: Some((0..longest).map(|i| ((i * 31) >> 3) as u8).collect()) }
    }

    /// The value of this length.
    #[inline]
    pub fn value(&self, len: usize) -> &[u8] {
        match &self.pattern {
            Some(pattern) => &pattern[..len],
            None => &ZEROS[..len],
        }
    }

    /// Bytes of memory.
    pub fn memory_bytes(&self) -> usize {
        self.pattern.as_ref().map_or(0, |p| p.len())
    }

    /// The key of this id and length, at least eight bytes.
    #[inline]
    pub fn key_of(id: u64, len: u8) -> Key {
        let mut key = Key { bytes: [Contents::FILLER; 255], len };
        key.bytes[..ID_LEN].copy_from_slice(&id.to_le_bytes());
        key
    }

    /// Writes the key of this id, `key.len()` bytes and at least eight.
    #[inline]
    pub fn key(id: u64, key: &mut [u8]) {
        key[..ID_LEN].copy_from_slice(&id.to_le_bytes());
        key[ID_LEN..].fill(Self::FILLER);
    }
}

/// A key by value, of an id and a filler.
#[derive(Clone, Copy)]
pub struct Key {
    bytes: [u8; 255],
    len: u8,
}

impl Key {
    /// Makes it the key of this id and length, which is at least eight.
    #[inline]
    pub fn set(&mut self, id: u64, len: u8) -> &[u8] {
        self.bytes[..ID_LEN].copy_from_slice(&id.to_le_bytes());
        self.len = len;
        self
    }
}

impl Deref for Key {
    type Target = [u8];
    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

/// Three quarters of a cache line: every other slot lies whole in one.
#[derive(Clone, Copy)]
struct Slot([u8; SLOT]);

const SLOT: usize = 48;

/// Slots from the start of a cache line on.
#[repr(align(64))]
struct Chunk([Slot; CHUNK]);

impl Slot {
    #[inline]
    fn u32(&self, at: usize) -> u32 {
        u32::from_le_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]])
    }
    #[inline]
    fn set_u32(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    #[inline]
    fn is_used(&self) -> bool {
        self.0[LENGTHS + 3] & 0x80 != 0
    }
}

const NEXT: usize = 0;
const BEFORE: usize = 4;
const AFTER: usize = 8;
const LENGTHS: usize = 12;
const APP_STATE: usize = 16;
const CAS: usize = 18;
const EXPIRY: usize = 24;
const WRITTEN: usize = 28;
const SPAN: usize = 32;
const READS: usize = 36;
const ID: usize = 40;
const FREE_UNITS: usize = 16;
const FREE_PREV: usize = 24;

/// See the module.
pub struct CompactArena {
    chunks: Vec<Box<Chunk>>,
    /// First of the slots that no block has, chained by their `next`; 0 ends.
    spare: u32,
    /// Units, the first and the last of which are no block's.
    end: u32,
    lists: FreeLists,
    /// The first block of an end that is withheld; 0 when none is.
    withheld: u32,
    contents: Contents,
}

impl CompactArena {
    /// As [`Arena::new`](super::Arena::new), for objects that consist of `contents`.
    pub fn new(bytes: usize, contents: Contents) -> CompactArena {
        let mut arena = CompactArena {
            chunks: Vec::new(),
            spare: 0,
            end: arena_units(bytes) - 1,
            lists: FreeLists::new(),
            withheld: 0,
            contents,
        };
        let (first, whole) = (arena.take_slot(), arena.end - 1);
        debug_assert_eq!(first, 1, "slot 0 means none");
        arena.set_free(first, whole);
        arena
    }

    #[inline]
    fn slot(&self, slot: u32) -> &Slot {
        &self.chunks[slot as usize / CHUNK].0[slot as usize % CHUNK]
    }

    #[inline]
    fn slot_mut(&mut self, slot: u32) -> &mut Slot {
        &mut self.chunks[slot as usize / CHUNK].0[slot as usize % CHUNK]
    }

    fn take_slot(&mut self) -> u32 {
        if self.spare == 0 {
            let start = (self.chunks.len() * CHUNK) as u32;
            self.chunks.push(Box::new(Chunk([Slot([0; SLOT]); CHUNK])));
            // Slot 0 stays unused.
            for slot in (start.max(1)..start + CHUNK as u32).rev() {
                self.drop_slot(slot);
            }
        }
        let slot = self.spare;
        self.spare = self.slot(slot).u32(NEXT);
        // Until it is wanted it is here.
        self.warm(Block(self.spare));
        *self.slot_mut(slot) = Slot([0; SLOT]);
        slot
    }

    fn drop_slot(&mut self, slot: u32) {
        let next = self.spare;
        self.slot_mut(slot).set_u32(NEXT, next);
        self.spare = slot;
    }

    /// Makes a block one of `units` that is free, and lists it.
    fn set_free(&mut self, slot: u32, units: u32) {
        let s = self.slot_mut(slot);
        s.set_u32(LENGTHS, 0);
        s.set_u32(FREE_UNITS, units);
        self.insert_free(slot, units);
    }

    /// Takes `gone`, which follows `slot`, out of the order of addresses.
    fn absorb_after(&mut self, slot: u32, gone: u32) {
        let after = self.slot(gone).u32(AFTER);
        self.slot_mut(slot).set_u32(AFTER, after);
        if after != 0 {
            self.slot_mut(after).set_u32(BEFORE, slot);
        }
        self.drop_slot(gone);
    }

    fn too_large(&self, payload: usize) -> bool {
        payload > (self.end as usize + 1) * UNIT
    }
}

impl FreeBlocks for CompactArena {
    fn lists(&self) -> &FreeLists {
        &self.lists
    }
    fn lists_mut(&mut self) -> &mut FreeLists {
        &mut self.lists
    }
    #[inline]
    fn units(&self, slot: u32) -> u32 {
        let s = self.slot(slot);
        if !s.is_used() {
            return s.u32(FREE_UNITS);
        }
        let lengths = s.u32(LENGTHS);
        let (key, value) = (lengths >> KEY_SHIFT & 0xFF, lengths & ((1 << VALUE_BITS) - 1));
        units_of(object_bytes(key as usize, value as usize)) + (lengths >> SLACK_SHIFT & 3)
    }
    fn is_free(&self, slot: u32) -> bool {
        !self.slot(slot).is_used()
    }
    fn next_free(&self, slot: u32) -> u32 {
        self.slot(slot).u32(NEXT)
    }
    fn prev_free(&self, slot: u32) -> u32 {
        self.slot(slot).u32(FREE_PREV)
    }
    fn set_next_free(&mut self, slot: u32, next: u32) {
        self.slot_mut(slot).set_u32(NEXT, next);
    }
    fn set_prev_free(&mut self, slot: u32, prev: u32) {
        self.slot_mut(slot).set_u32(FREE_PREV, prev);
    }
}

impl ObjectMemory for CompactArena {
    const SPARING: bool = true;

    type Key<'a> = Key;

    fn alloc(&mut self, payload: usize) -> Option<Block> {
        if self.too_large(payload) {
            return None;
        }
        let want = units_of(payload);
        let slot = self.find(want)?;
        let have = self.units(slot);
        self.remove_free(slot, have);
        let mut slack = have - want;
        if slack >= MIN_UNITS {
            let rest = self.take_slot();
            let after = self.slot(slot).u32(AFTER);
            let r = self.slot_mut(rest);
            r.set_u32(BEFORE, slot);
            r.set_u32(AFTER, after);
            if after != 0 {
                self.slot_mut(after).set_u32(BEFORE, rest);
            }
            self.slot_mut(slot).set_u32(AFTER, rest);
            self.set_free(rest, slack);
            slack = 0;
        }
        // The lengths follow when it is filled.
        self.slot_mut(slot).set_u32(LENGTHS, USED | slack << SLACK_SHIFT);
        Some(Block(slot))
    }

    fn free(&mut self, block: Block, hands: [&mut Block; 2]) {
        debug_assert!(self.is_used(block), "free of a free block");
        let mut slot = block.0;
        let mut units = self.units(slot);
        let (before, after) = (self.slot(slot).u32(BEFORE), self.slot(slot).u32(AFTER));
        let mut gone = [0; 2];
        if after != 0 && after != self.withheld && !self.slot(after).is_used() {
            let more = self.units(after);
            self.remove_free(after, more);
            self.absorb_after(slot, after);
            units += more;
            gone[0] = after;
        }
        if before != 0 && !self.slot(before).is_used() {
            let more = self.units(before);
            self.remove_free(before, more);
            self.absorb_after(before, slot);
            units += more;
            gone[1] = slot;
            slot = before;
        }
        self.set_free(slot, units);
        for hand in hands {
            if gone.contains(&hand.0) {
                *hand = Block(slot);
            }
        }
    }

    fn has_room(&self, payload: usize) -> bool {
        !self.too_large(payload) && self.find(units_of(payload)).is_some()
    }

    #[inline]
    fn is_used(&self, block: Block) -> bool {
        self.slot(block.0).is_used()
    }

    #[inline]
    fn first(&self) -> Block {
        // What is split or joined keeps the slot of its start.
        Block(1)
    }

    #[inline]
    fn next(&self, block: Block) -> Block {
        // A hand that walks comes there next, and neighbours by address are not neighbours in memory.
        let next = Block(self.slot(block.0).u32(AFTER).max(1));
        self.warm(next);
        next
    }

    #[inline]
    fn block_bytes(&self, block: Block) -> usize {
        self.units(block.0) as usize * UNIT
    }

    #[inline]
    fn free_bytes(&self) -> usize {
        self.lists.units as usize * UNIT
    }

    #[inline]
    fn capacity(&self) -> usize {
        (self.end as usize - 1) * UNIT
    }

    fn bytes(&self) -> usize {
        (self.end as usize + 1) * UNIT
    }

    fn grow(&mut self, bytes: usize) -> Result<(), TryReserveError> {
        let units = arena_units(bytes);
        if units < self.end + 1 + MIN_UNITS {
            return Ok(());
        }
        let more = units - 1 - self.end;
        self.end = units - 1;
        let mut last = self.first().0;
        while self.slot(last).u32(AFTER) != 0 {
            last = self.slot(last).u32(AFTER);
        }
        if self.slot(last).is_used() {
            let slot = self.take_slot();
            self.slot_mut(slot).set_u32(BEFORE, last);
            self.slot_mut(last).set_u32(AFTER, slot);
            self.set_free(slot, more);
        } else {
            let units = self.units(last);
            self.remove_free(last, units);
            self.set_free(last, units + more);
        }
        Ok(())
    }

    fn withhold(&mut self, bytes: usize) -> Tail {
        let cut = (arena_units(bytes) - 1).min(self.end);
        let (mut at, mut first) = (self.first().0, 1);
        while at != 0 && first + self.units(at) <= cut {
            first += self.units(at);
            at = self.slot(at).u32(AFTER);
        }
        self.withheld = at;
        let (mut slots, mut objects) = (Vec::new(), Vec::new());
        while at != 0 {
            slots.push(at);
            if self.slot(at).is_used() {
                objects.push(Block(at));
            } else {
                let units = self.units(at);
                self.remove_free(at, units);
            }
            at = self.slot(at).u32(AFTER);
        }
        objects.reverse();
        Tail { cut, first, slots: Some(slots), objects }
    }

    fn cut_off(&mut self, tail: Tail) {
        let Tail { cut, first, slots, .. } = tail;
        self.withheld = 0;
        let slots = slots.unwrap_or_default();
        let Some((&slot, rest)) = slots.split_first() else { return };
        rest.iter().for_each(|&gone| self.drop_slot(gone));
        let before = self.slot(slot).u32(BEFORE);
        if cut < first + MIN_UNITS && before != 0 {
            self.end = first;
            self.slot_mut(before).set_u32(AFTER, 0);
            self.drop_slot(slot);
            return;
        }
        self.end = cut;
        self.slot_mut(slot).set_u32(AFTER, 0);
        if before != 0 && !self.slot(before).is_used() {
            let units = self.units(before);
            self.remove_free(before, units);
            self.absorb_after(before, slot);
            self.set_free(before, units + cut - first);
        } else {
            self.set_free(slot, cut - first);
        }
    }

    fn held_bytes(&self) -> usize {
        self.chunks.len() * size_of::<Chunk>() + self.chunks.capacity() * size_of::<Box<Chunk>>()
    }

    #[inline]
    fn warm(&self, block: Block) {
        if let Some(chunk) = self.chunks.get(block.0 as usize / CHUNK) {
            let slot = &chunk.0[block.0 as usize % CHUNK];
            larder_base::prefetch(&slot.0, 0);
            larder_base::prefetch(&slot.0, SLOT - 1);
        }
    }

    #[inline]
    fn warm_neighbours(&self, block: Block) {
        let slot = self.slot(block.0);
        self.warm(Block(slot.u32(BEFORE)));
        self.warm(Block(slot.u32(AFTER)));
    }

    fn fill(
        &mut self,
        block: Block,
        header: &ObjectHeader,
        _hash: u32,
        key: &[u8],
        value: [&[u8]; 2],
    ) {
        debug_assert!(key.len() >= ID_LEN && key[ID_LEN..].iter().all(|&b| b == Contents::FILLER));
        debug_assert!(
            value[1].is_empty() && value[0] == self.contents.value(header.value_len as usize),
            "values are the start of the pattern"
        );
        let mut id = [0; ID_LEN];
        id.copy_from_slice(&key[..ID_LEN]);
        let slot = self.slot_mut(block.0);
        slot.0[ID..].copy_from_slice(&id);
        let slack = slot.u32(LENGTHS) & (3 << SLACK_SHIFT);
        let lengths = u32::from(header.key_len) << KEY_SHIFT | header.value_len;
        slot.set_u32(LENGTHS, USED | slack | lengths);
        self.set_header(block, header);
    }

    #[inline]
    fn header(&self, block: Block) -> ObjectHeader {
        let s = self.slot(block.0);
        let lengths = s.u32(LENGTHS);
        let app_state = u16::from_le_bytes([s.0[APP_STATE], s.0[APP_STATE + 1]]);
        let mut cas = [0; 8];
        cas[..5].copy_from_slice(&s.0[CAS..CAS + 5]);
        let reads = s.u32(READS).to_le_bytes();
        ObjectHeader {
            cas: u64::from_le_bytes(cas),
            expiry: Expiry(s.u32(EXPIRY)),
            flags: 0,
            value_len: lengths & ((1 << VALUE_BITS) - 1),
            key_len: (lengths >> KEY_SHIFT) as u8,
            state: State(app_state as u8 & ((1 << STATE_BITS) - 1)),
            app: AppId(app_state >> STATE_BITS),
            written: s.u32(WRITTEN),
            accesses: Accesses::from_parts(s.u32(SPAN), reads),
        }
    }

    #[inline]
    fn set_header(&mut self, block: Block, header: &ObjectHeader) {
        debug_assert!(header.flags == 0 && header.cas >> 40 == 0, "no flags, short CAS uniques");
        let s = self.slot_mut(block.0);
        let app_state = header.app.0 << STATE_BITS | u16::from(header.state.0);
        s.0[APP_STATE..APP_STATE + 2].copy_from_slice(&app_state.to_le_bytes());
        s.0[CAS..CAS + 5].copy_from_slice(&header.cas.to_le_bytes()[..5]);
        s.set_u32(EXPIRY, header.expiry.0);
        s.set_u32(WRITTEN, header.written);
        s.set_u32(SPAN, header.accesses.span_code());
        s.set_u32(READS, u32::from_le_bytes(header.accesses.read_bytes()));
    }

    fn copy_object(&mut self, block: Block) -> Option<Block> {
        let lengths = self.slot(block.0).u32(LENGTHS) & !(3 << SLACK_SHIFT);
        let (key, value) = (lengths >> KEY_SHIFT & 0xFF, lengths & ((1 << VALUE_BITS) - 1));
        let to = self.alloc(object_bytes(key as usize, value as usize))?;
        let from = *self.slot(block.0);
        let slot = self.slot_mut(to.0);
        let slack = slot.u32(LENGTHS) & (3 << SLACK_SHIFT);
        slot.set_u32(LENGTHS, slack | lengths);
        slot.0[APP_STATE..].copy_from_slice(&from.0[APP_STATE..]);
        Some(to)
    }
    #[inline]
    fn next_of(&self, block: Block) -> u32 {
        self.slot(block.0).u32(NEXT)
    }

    #[inline]
    fn set_next(&mut self, block: Block, next: u32) {
        self.slot_mut(block.0).set_u32(NEXT, next);
    }

    #[inline]
    fn set_state(&mut self, block: Block, state: State) {
        let s = self.slot_mut(block.0);
        let old = u16::from_le_bytes([s.0[APP_STATE], s.0[APP_STATE + 1]]);
        let new = old >> STATE_BITS << STATE_BITS | u16::from(state.0);
        s.0[APP_STATE..APP_STATE + 2].copy_from_slice(&new.to_le_bytes());
    }

    #[inline]
    fn has_key(&self, block: Block, _hash: u32, key: &[u8]) -> bool {
        let slot = self.slot(block.0);
        (slot.u32(LENGTHS) >> KEY_SHIFT & 0xFF) as usize == key.len()
            && key.get(..ID_LEN) == Some(&slot.0[ID..])
    }

    #[inline]
    fn key(&self, block: Block, header: &ObjectHeader) -> Key {
        let mut id = [0; ID_LEN];
        id.copy_from_slice(&self.slot(block.0).0[ID..]);
        Contents::key_of(u64::from_le_bytes(id), header.key_len)
    }

    #[inline]
    fn value(&self, _block: Block, header: &ObjectHeader) -> &[u8] {
        self.contents.value(header.value_len as usize)
    }

    fn write_value(&mut self, _block: Block, _header: &ObjectHeader, bytes: &[u8]) {
        debug_assert_eq!(bytes, self.contents.value(bytes.len()), "values are the pattern's start");
    }

    fn validate(&self) -> Result<(), String> {
        let (mut at, mut before, mut address, mut free) = (1u32, 0u32, 1u32, 0u32);
        let mut was_free = false;
        loop {
            let (slot, units) = (self.slot(at), self.units(at));
            if slot.u32(BEFORE) != before || units < MIN_UNITS {
                return Err(format!(
                    "block {at} of {units} units at {address} behind block {}, not {before}",
                    slot.u32(BEFORE)
                ));
            }
            if !slot.is_used() && was_free {
                return Err(format!("two free blocks touch at {address}"));
            }
            was_free = !slot.is_used();
            free += if was_free { units } else { 0 };
            address += units;
            (before, at) = (at, slot.u32(AFTER));
            if at == 0 {
                break;
            }
        }
        let listed = self.check_lists()?;
        if address != self.end || listed != free || free != self.lists.units {
            return Err(format!(
                "blocks end at {address} of {}; free units: walked {free}, listed {listed}, counted {}",
                self.end, self.lists.units
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::super::accesses::Gaps;
    use super::super::arena::Arena;
    use super::*;

    fn header(rng: &mut Rng, key_len: usize, value_len: usize) -> ObjectHeader {
        let mut small = |n| rng.below(n) as u32;
        ObjectHeader {
            cas: u64::from(small(1 << 32)) << 6,
            expiry: Expiry(small(1 << 32)),
            flags: 0,
            value_len: value_len as u32,
            key_len: key_len as u8,
            state: State(small(128) as u8),
            app: AppId(small(257) as u16),
            written: small(1 << 32),
            accesses: Accesses::known(
                small(1 << 32),
                small(1 << 32),
                Gaps { max: small(1 << 32), first_read: small(1 << 32), last: small(1 << 32) },
            ),
        }
    }

    impl CompactArena {
        /// Where a block lies, by all that lie before it.
        fn address(&self, block: Block) -> u32 {
            let (mut at, mut address) = (block.0, 1);
            while self.slot(at).u32(BEFORE) != 0 {
                at = self.slot(at).u32(BEFORE);
                address += self.units(at);
            }
            address
        }
    }

    /// Both forms are asked the same, at random, and give the same block (by its address) each time, with hands that
    /// wander over them.
    #[test]
    fn every_block_lies_where_the_arena_puts_it() {
        let contents = Contents::new(40_000);
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let bytes = (8 + rng.below(120) as usize) << 10;
            let (mut a, mut c) = (Arena::new(bytes), CompactArena::new(bytes, contents.clone()));
            let mut live: Vec<(Block, Block, ObjectHeader, u64)> = Vec::new();
            let (mut hands, mut others) = ([a.first(); 2], [c.first(); 2]);
            for step in 0..3000u64 {
                let (key, value) = (
                    8 + rng.below(40) as usize,
                    if rng.chance(0.03) { rng.below(30_000) } else { rng.below(700) } as usize,
                );
                if rng.chance(0.55) {
                    let payload = object_bytes(key, value);
                    let (to_a, to_c) = (ObjectMemory::alloc(&mut a, payload), c.alloc(payload));
                    assert_eq!(to_a.is_some(), to_c.is_some(), "seed {seed} step {step}");
                    if let (Some(to_a), Some(to_c)) = (to_a, to_c) {
                        let mut h = header(&mut rng, key, value);
                        if rng.chance(0.7) {
                            // As objects are when they are new.
                            h.accesses = Accesses::default();
                        }
                        let mut k = vec![0; key];
                        Contents::key(step, &mut k);
                        a.fill(to_a, &h, 0, &k, [contents.value(value), b""]);
                        c.fill(to_c, &h, 0, &k, [contents.value(value), b""]);
                        live.push((to_a, to_c, h, step));
                    }
                } else if !live.is_empty() {
                    let at = rng.below(live.len() as u64) as usize;
                    let (in_a, in_c, ..) = live.swap_remove(at);
                    let [x, y] = &mut hands;
                    ObjectMemory::free(&mut a, in_a, [x, y]);
                    let [x, y] = &mut others;
                    c.free(in_c, [x, y]);
                }
                if !live.is_empty() && rng.chance(0.8) {
                    let at = rng.below(live.len() as u64) as usize;
                    let (in_a, in_c, h, _) = &mut live[at];
                    h.note_read(h.last().wrapping_add(rng.below(1 << 20) as u32));
                    h.save(&mut a, *in_a);
                    h.save(&mut c, *in_c);
                    assert_eq!(c.header(*in_c), *h);
                }
                if !live.is_empty() && rng.chance(0.2) {
                    let at = rng.below(live.len() as u64) as usize;
                    let (in_a, in_c, ..) = &mut live[at];
                    let to = (a.copy_object(*in_a), c.copy_object(*in_c));
                    assert_eq!(to.0.is_some(), to.1.is_some(), "seed {seed} step {step}");
                    if let (Some(to_a), Some(to_c)) = to {
                        let [x, y] = &mut hands;
                        ObjectMemory::free(&mut a, *in_a, [x, y]);
                        let [x, y] = &mut others;
                        c.free(*in_c, [x, y]);
                        (*in_a, *in_c) = (to_a, to_c);
                    }
                }
                if rng.chance(0.02) {
                    let bytes = (8 + rng.below(120) as usize) << 10;
                    if bytes > ObjectMemory::bytes(&a) {
                        ObjectMemory::grow(&mut a, bytes).unwrap();
                        c.grow(bytes).unwrap();
                    } else {
                        let (in_a, in_c) =
                            (ObjectMemory::withhold(&mut a, bytes), c.withhold(bytes));
                        assert_eq!(in_a.objects.len(), in_c.objects.len());
                        for (&from_a, &from_c) in in_a.objects.iter().zip(&in_c.objects) {
                            let at = live.iter().position(|l| l.0 == from_a).unwrap();
                            assert_eq!(live[at].1, from_c);
                            match (a.copy_object(from_a), c.copy_object(from_c)) {
                                (Some(to_a), Some(to_c)) => (live[at].0, live[at].1) = (to_a, to_c),
                                (None, None) => drop(live.swap_remove(at)),
                                (to_a, to_c) => {
                                    panic!("seed {seed} step {step}: {to_a:?} {to_c:?}")
                                }
                            }
                        }
                        for i in 0..2 {
                            assert_eq!(in_a.has(hands[i]), in_c.has(others[i]));
                            if in_a.has(hands[i]) {
                                (hands[i], others[i]) = (a.first(), c.first());
                            }
                        }
                        ObjectMemory::cut_off(&mut a, in_a);
                        c.cut_off(in_c);
                    }
                    assert_eq!(ObjectMemory::bytes(&a), c.bytes(), "seed {seed} step {step}");
                    c.validate().unwrap_or_else(|e| panic!("seed {seed} step {step}: {e}"));
                    a.validate().unwrap_or_else(|e| panic!("seed {seed} step {step}: {e}"));
                }
                for _ in 0..rng.below(4) {
                    let i = rng.below(2) as usize;
                    hands[i] = ObjectMemory::next(&a, hands[i]);
                    others[i] = c.next(others[i]);
                }
                for i in 0..2 {
                    assert_eq!(hands[i].0, c.address(others[i]), "seed {seed} step {step}");
                    assert_eq!(a.is_used(hands[i]), c.is_used(others[i]));
                    assert_eq!(a.block_bytes(hands[i]), c.block_bytes(others[i]));
                }
                assert_eq!((a.free_bytes(), a.capacity()), (c.free_bytes(), c.capacity()));
                let payload = rng.below(3000) as usize;
                assert_eq!(ObjectMemory::has_room(&a, payload), c.has_room(payload));
                if step % 250 == 0 {
                    c.validate().unwrap_or_else(|e| panic!("seed {seed} step {step}: {e}"));
                    for (in_a, in_c, h, id) in &live {
                        assert_eq!(in_a.0, c.address(*in_c));
                        assert_eq!((a.header(*in_a), c.header(*in_c)), (*h, *h));
                        assert_eq!(a.key(*in_a, h), &*c.key(*in_c, h));
                        assert_eq!(a.value(*in_a, h), c.value(*in_c, h));
                        let mut k = vec![0; usize::from(h.key_len)];
                        Contents::key(*id, &mut k);
                        assert!(c.has_key(*in_c, 0, &k));
                        k[3] ^= 1;
                        assert!(!c.has_key(*in_c, 0, &k));
                    }
                }
            }
            // So many bytes for each block there ever was at once, and what is left of chunks.
            let bytes = bytes.max(128 << 10);
            assert!(c.held_bytes() < (bytes / 40 + 2 * CHUNK) * SLOT + 4096);
        }
    }

    #[test]
    fn states_and_links_change_alone() {
        let mut c = CompactArena::new(4096, Contents::new(100));
        let b = c.alloc(object_bytes(9, 100)).unwrap();
        let mut h = header(&mut Rng::new(3), 9, 100);
        let mut key = [0; 9];
        Contents::key(77, &mut key);
        c.fill(b, &h, 0, &key, [Contents::new(100).value(100), b""]);
        c.set_state(b, State(0x55));
        c.set_next(b, 99);
        h.state = State(0x55);
        assert_eq!((c.header(b), c.next_of(b)), (h, 99));
        h.cas = (1 << 40) - 1;
        h.app = AppId(AppId::COUNT as u16 - 1);
        c.set_header(b, &h);
        assert_eq!((c.header(b), c.next_of(b)), (h, 99));
        assert_eq!(c.block_bytes(b), super::super::footprint(object_bytes(9, 100)));
    }
}
