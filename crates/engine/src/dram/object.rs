//! An object in DRAM: one cache line of header (the block's own 8 bytes included), the key, the value.
//!
//! ```text
//! 0  next u32       4  hash u32      8  cas u64
//! 16 expiry u32     20 flags u32     24 value length u32
//! 28 key length u8  29 state u8      30 application u16
//! 32 written u32    36 last u32      40 reads u32
//! 44 max gap u32    48 first read u32  52 last gap u32     (milliseconds)
//! 56 key, value
//! ```

use larder_base::{AppId, Expiry};
use larder_policy::admission::Features;

use super::arena::{BLOCK_HEADER, Block};
use super::memory::ObjectMemory;

/// Bytes of header before the key.
pub const HEADER_BYTES: usize = 56;
const _: () =
    assert!(HEADER_BYTES + BLOCK_HEADER == 64, "header and block header fill one cache line");

/// Payload bytes of an object.
pub fn object_bytes(key_len: usize, value_len: usize) -> usize {
    HEADER_BYTES + key_len + value_len
}

/// State bits of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State(pub u8);

impl State {
    const CLOCK: u8 = 0b11;
    /// Read since it was stored.
    pub const FETCHED: u8 = 1 << 2;
    /// Marked stale (meta protocol).
    pub const STALE: u8 = 1 << 3;
    /// A client has won the right to refill it.
    pub const WON: u8 = 1 << 4;
    /// Copied into a segment that is not yet durable.
    pub const STAGED: u8 = 1 << 5;
    /// Came back from a reclaimed segment.
    pub const SURVIVOR: u8 = 1 << 6;

    /// Whether `bit` is set.
    pub fn has(self, bit: u8) -> bool {
        self.0 & bit != 0
    }
    /// With `bit` set.
    pub fn with(self, bit: u8) -> State {
        State(self.0 | bit)
    }
    /// With `bit` cleared.
    pub fn without(self, bit: u8) -> State {
        State(self.0 & !bit)
    }
    /// The CLOCK value, 0..=3.
    pub fn clock(self) -> u8 {
        self.0 & Self::CLOCK
    }
    /// With this CLOCK value.
    pub fn with_clock(self, clock: u8) -> State {
        State(self.0 & !Self::CLOCK | clock.min(3))
    }
}

/// The header, read whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectHeader {
    /// Next object in the same table bucket; 0 ends the chain.
    pub next: u32,
    /// [`larder_base::ObjectHash::dram`] of the key.
    pub hash: u32,
    /// CAS unique.
    pub cas: u64,
    /// Expiry.
    pub expiry: Expiry,
    /// Client flags.
    pub flags: u32,
    /// Value length.
    pub value_len: u32,
    /// Key length.
    pub key_len: u8,
    /// State bits.
    pub state: State,
    /// Application.
    pub app: AppId,
    /// When it was written, milliseconds since start (as are the following; spans wrap after 49 days).
    pub written: u32,
    /// Last access.
    pub last: u32,
    /// Reads since it was written.
    pub reads: u32,
    /// Longest time between two reads.
    pub max_gap: u32,
    /// From the write to the first read.
    pub first_read: u32,
    /// Between the last two reads.
    pub last_gap: u32,
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl ObjectHeader {
    /// Reads the header of the object in `block`.
    #[inline]
    pub fn load(memory: &impl ObjectMemory, block: Block) -> ObjectHeader {
        memory.header(block)
    }

    /// Writes the header.
    #[inline]
    pub fn save(&self, memory: &mut impl ObjectMemory, block: Block) {
        memory.set_header(block, self);
    }

    /// Of the header at the start of `payload` what a look-up compares.
    #[inline]
    pub(super) fn hash_and_key_len(payload: &[u8]) -> (u32, usize) {
        let hash = u32::from_le_bytes([payload[4], payload[5], payload[6], payload[7]]);
        (hash, usize::from(payload[28]))
    }

    /// The header at the start of `payload`.
    #[inline]
    pub(super) fn decode(payload: &[u8]) -> ObjectHeader {
        let b: &[u8; HEADER_BYTES] =
            payload[..HEADER_BYTES].try_into().expect("an object has a header");
        ObjectHeader {
            next: u32_at(b, 0),
            hash: u32_at(b, 4),
            cas: u64::from(u32_at(b, 8)) | u64::from(u32_at(b, 12)) << 32,
            expiry: Expiry(u32_at(b, 16)),
            flags: u32_at(b, 20),
            value_len: u32_at(b, 24),
            key_len: b[28],
            state: State(b[29]),
            app: AppId(u16::from_le_bytes([b[30], b[31]])),
            written: u32_at(b, 32),
            last: u32_at(b, 36),
            reads: u32_at(b, 40),
            max_gap: u32_at(b, 44),
            first_read: u32_at(b, 48),
            last_gap: u32_at(b, 52),
        }
    }

    /// Writes the header to the start of `payload`.
    #[inline]
    pub(super) fn encode(&self, payload: &mut [u8]) {
        let b: &mut [u8; HEADER_BYTES] =
            (&mut payload[..HEADER_BYTES]).try_into().expect("an object has a header");
        b[0..4].copy_from_slice(&self.next.to_le_bytes());
        b[4..8].copy_from_slice(&self.hash.to_le_bytes());
        b[8..16].copy_from_slice(&self.cas.to_le_bytes());
        b[16..20].copy_from_slice(&self.expiry.0.to_le_bytes());
        b[20..24].copy_from_slice(&self.flags.to_le_bytes());
        b[24..28].copy_from_slice(&self.value_len.to_le_bytes());
        b[28] = self.key_len;
        b[29] = self.state.0;
        b[30..32].copy_from_slice(&self.app.0.to_le_bytes());
        b[32..36].copy_from_slice(&self.written.to_le_bytes());
        b[36..40].copy_from_slice(&self.last.to_le_bytes());
        b[40..44].copy_from_slice(&self.reads.to_le_bytes());
        b[44..48].copy_from_slice(&self.max_gap.to_le_bytes());
        b[48..52].copy_from_slice(&self.first_read.to_le_bytes());
        b[52..56].copy_from_slice(&self.last_gap.to_le_bytes());
    }

    /// The chain link alone.
    #[inline]
    pub fn next_of(memory: &impl ObjectMemory, block: Block) -> u32 {
        memory.next_of(block)
    }

    /// Changes the chain link alone.
    #[inline]
    pub fn set_next(memory: &mut impl ObjectMemory, block: Block, next: u32) {
        memory.set_next(block, next);
    }

    /// Changes the state bits alone.
    #[inline]
    pub fn set_state(memory: &mut impl ObjectMemory, block: Block, state: State) {
        memory.set_state(block, state);
    }

    /// The key of the object in `block`.
    #[inline]
    pub fn key<'a, M: ObjectMemory>(&self, memory: &'a M, block: Block) -> M::Key<'a> {
        memory.key(block, self)
    }

    /// The value of the object in `block`.
    #[inline]
    pub fn value<'a>(&self, memory: &'a impl ObjectMemory, block: Block) -> &'a [u8] {
        memory.value(block, self)
    }

    /// Counts a read at `now` (milliseconds): the five features of Flashield §3.1.
    #[inline]
    pub fn note_read(&mut self, now: u32) {
        if self.reads == 0 {
            self.first_read = now.wrapping_sub(self.written);
        } else {
            self.last_gap = now.wrapping_sub(self.last);
            self.max_gap = self.max_gap.max(self.last_gap);
        }
        self.reads = self.reads.saturating_add(1);
        self.last = now;
    }

    /// What admission sees of it.
    pub fn features(&self, now: u32, flash_bytes: u32) -> Features {
        let first = self.written.wrapping_add(self.first_read);
        let mean_gap =
            if self.reads > 1 { self.last.wrapping_sub(first) / (self.reads - 1) } else { 0 };
        Features {
            reads: self.reads,
            mean_gap,
            last_gap: self.last_gap,
            max_gap: self.max_gap,
            first_read: self.first_read,
            age: now.wrapping_sub(self.written),
            idle: now.wrapping_sub(self.last),
            size: flash_bytes,
        }
    }

    /// Payload bytes of the object.
    pub fn bytes(&self) -> usize {
        object_bytes(usize::from(self.key_len), self.value_len as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::super::arena::Arena;
    use super::*;

    #[test]
    fn header_survives_the_round_trip_and_counts_reads() {
        let mut arena = Arena::new(4096);
        let b = arena.alloc(object_bytes(3, 5)).unwrap();
        let start = u32::MAX - 10;
        let mut h = ObjectHeader {
            next: 7,
            hash: 9,
            cas: u64::MAX - 3,
            expiry: Expiry(77),
            flags: 0xdead_beef,
            value_len: 5,
            key_len: 3,
            state: State(0).with_clock(2).with(State::WON),
            app: AppId(256),
            written: start,
            last: start,
            reads: 0,
            max_gap: 0,
            first_read: 0,
            last_gap: 0,
        };
        h.note_read(u32::MAX - 4);
        h.note_read(5);
        h.note_read(9);
        h.save(&mut arena, b);
        assert_eq!(ObjectHeader::load(&arena, b), h);
        let f = h.features(19, 40);
        assert_eq!((f.reads, f.first_read, f.last_gap, f.max_gap), (3, 6, 4, 10));
        assert_eq!((f.mean_gap, f.age, f.idle), (7, 30, 10));
        assert!(h.state.has(State::WON) && h.state.clock() == 2 && !h.state.has(State::STALE));
    }
}
