//! An object in DRAM: 32 bytes of header (the block's own 8 included), what few objects have, the key, the value.
//!
//! ```text
//! -8 block's length     -4 chain's next, in use   (the block's header, see the arena)
//!  0 u32: key length 8 bits, bytes to spare 5, has flags 1, has a long CAS 1, tag 8, application 9
//!  4 u64: CAS 38 bits, from the write to the last access 19, state 7
//! 12 expiry u32         16 written u32 (milliseconds)
//! 20 reads u8           21 max gap u8        22 first read u8      23 last gap u8
//! 24 flags u32, if it has any        the CAS's upper half u32, if it is long        key, value
//! ```
//!
//! The value's length follows from the block's and the bytes to spare. A CAS unique is kept as its distance from the first that
//! the shard gives out; one that lies elsewhere (a client's own, or that of another run) is long.

use larder_base::{AppId, Expiry};
use larder_policy::admission::Features;

use super::accesses::{Accesses, SPAN_CODE_BITS};
use super::arena::{BLOCK_HEADER, Block, MIN_UNITS, UNIT};
use super::memory::ObjectMemory;

/// Bytes of header that every object has, behind the block's own.
pub const HEADER_BYTES: usize = 24;
const _: () = assert!(HEADER_BYTES + BLOCK_HEADER == 32, "two headers fill a cache line");

/// Payload bytes of an object without flags or a long CAS.
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

/// The header, read whole but for the chain's link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectHeader {
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
    /// When it was written, milliseconds since start (they wrap after 49 days).
    pub written: u32,
    /// Its accesses since.
    pub accesses: Accesses,
}

impl ObjectHeader {
    /// Reads the header of the object in `block`.
    #[inline]
    pub fn load(memory: &impl ObjectMemory, block: Block) -> ObjectHeader {
        memory.header(block)
    }

    /// Writes the header. Lengths, flags and application stay as they are, and the CAS is one that
    /// [`ObjectMemory::holds_cas`] allows.
    #[inline]
    pub fn save(&self, memory: &mut impl ObjectMemory, block: Block) {
        memory.set_header(block, self);
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

    /// The last access, milliseconds since start.
    #[inline]
    pub fn last(&self) -> u32 {
        self.written.wrapping_add(self.accesses.span())
    }

    /// Accessed at `now` (milliseconds), but not read.
    #[inline]
    pub fn touch(&mut self, now: u32) {
        self.accesses.touch(self.written, now);
    }

    /// Counts a read at `now` (milliseconds).
    #[inline]
    pub fn note_read(&mut self, now: u32) {
        self.accesses.note_read(self.written, now);
    }

    /// What admission sees of it.
    pub fn features(&self, now: u32, flash_bytes: u32) -> Features {
        self.accesses.features(now.wrapping_sub(self.written), flash_bytes)
    }
}

/// The first word of a header: what does not change while the object lies in its block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fixed(u32);

const SPARE_SHIFT: u32 = 8;
const SPARE: u32 = 0x1f;
const HAS_FLAGS: u32 = 1 << 13;
const LONG_CAS: u32 = 1 << 14;
const TAG_SHIFT: u32 = 15;
const APP_SHIFT: u32 = 23;
const _: () = assert!(AppId::COUNT <= 1 << (32 - APP_SHIFT));
/// What a block has beyond the bytes of its object: less than one more unit, and less than a block of its own.
const _: () = assert!((UNIT - 1) + (MIN_UNITS as usize - 1) * UNIT <= SPARE as usize);

/// Of a key's hash in DRAM those bits that the table's buckets tell apart last.
#[inline]
fn tag(hash: u32) -> u32 {
    hash >> 24
}

impl Fixed {
    /// That of a new object whose block has `spare` bytes more than it needs.
    #[inline]
    pub(super) fn new(header: &ObjectHeader, hash: u32, long_cas: bool, spare: usize) -> Fixed {
        debug_assert!(spare <= SPARE as usize, "{spare} bytes to spare");
        let app = header.app.index() as u32;
        let flags = if header.flags != 0 { HAS_FLAGS } else { 0 };
        let long = if long_cas { LONG_CAS } else { 0 };
        let (spare, key_len) = ((spare as u32 & SPARE) << SPARE_SHIFT, u32::from(header.key_len));
        Fixed(app << APP_SHIFT | tag(hash) << TAG_SHIFT | long | flags | spare | key_len)
    }

    /// That of the object whose header this is.
    #[inline]
    pub(super) fn start_of(header: &[u8; HEADER_BYTES]) -> Fixed {
        Fixed(u32_at(header, 0))
    }

    #[inline]
    pub(super) fn store(self, payload: &mut [u8]) {
        payload[..4].copy_from_slice(&self.0.to_le_bytes());
    }

    #[inline]
    pub(super) fn key_len(self) -> usize {
        (self.0 & 0xff) as usize
    }

    /// Whether a key of this length and hash may be the object's.
    #[inline]
    pub(super) fn may_be(self, hash: u32, key_len: usize) -> bool {
        let known = self.0 & (0xff << TAG_SHIFT | 0xff);
        key_len <= 0xff && known == tag(hash) << TAG_SHIFT | key_len as u32
    }

    /// Bytes of the block behind the value.
    #[inline]
    pub(super) fn spare(self) -> usize {
        (self.0 >> SPARE_SHIFT & SPARE) as usize
    }

    pub(super) fn with_spare(self, spare: usize) -> Fixed {
        debug_assert!(spare <= SPARE as usize, "{spare} bytes to spare");
        Fixed(self.0 & !(SPARE << SPARE_SHIFT) | (spare as u32 & SPARE) << SPARE_SHIFT)
    }

    /// Whether there is anything between the header and the key.
    #[inline]
    fn has_extra(self) -> bool {
        self.0 & (HAS_FLAGS | LONG_CAS) != 0
    }

    #[inline]
    fn has_flags(self) -> bool {
        self.0 & HAS_FLAGS != 0
    }

    #[inline]
    pub(super) fn has_long_cas(self) -> bool {
        self.0 & LONG_CAS != 0
    }

    #[inline]
    fn app(self) -> AppId {
        AppId((self.0 >> APP_SHIFT) as u16)
    }

    /// Where the key begins in the payload.
    #[inline]
    pub(super) fn key_at(self) -> usize {
        HEADER_BYTES + extra_bytes(self.has_flags(), self.has_long_cas())
    }
}

/// Bytes between the header and the key.
#[inline]
pub(super) fn extra_bytes(has_flags: bool, long_cas: bool) -> usize {
    4 * (usize::from(has_flags) + usize::from(long_cas))
}

const CAS_BITS: u32 = 38;
const STATE_SHIFT: u32 = CAS_BITS + SPAN_CODE_BITS;
const _: () = assert!(STATE_SHIFT + 7 == 64);
/// Where the state's byte lies, and how far up in it.
const STATE_AT: usize = 11;

/// Whether a CAS is kept as its distance from `base`.
#[inline]
pub(super) fn is_short(cas: u64, base: u64) -> bool {
    cas.wrapping_sub(base) >> CAS_BITS == 0
}

#[inline]
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The header at the start of `payload`.
#[inline(always)]
pub(super) fn decode(payload: &[u8], cas_base: u64) -> ObjectHeader {
    let (b, rest) =
        payload.split_first_chunk::<HEADER_BYTES>().expect("a block has room for a header");
    let fixed = Fixed::start_of(b);
    let changing = u64::from_le_bytes(b[4..12].try_into().expect("eight bytes"));
    let (mut flags, mut cas) = (0, cas_base.wrapping_add(changing & ((1 << CAS_BITS) - 1)));
    if fixed.has_extra() {
        (flags, cas) = decode_extra(fixed, rest, changing, cas);
    }
    let span = (changing >> CAS_BITS) as u32 & ((1 << SPAN_CODE_BITS) - 1);
    let key_len = fixed.key_len();
    ObjectHeader {
        cas,
        expiry: Expiry(u32_at(b, 12)),
        flags,
        value_len: (payload.len() - fixed.key_at() - key_len - fixed.spare()) as u32,
        key_len: key_len as u8,
        state: State((changing >> STATE_SHIFT) as u8),
        app: fixed.app(),
        written: u32_at(b, 16),
        accesses: Accesses::from_parts(span, [b[20], b[21], b[22], b[23]]),
    }
}

/// Flags and CAS of an object that has a field for one of them. Apart, since few have: the others need fewer registers.
#[inline(never)]
fn decode_extra(fixed: Fixed, rest: &[u8], changing: u64, short_cas: u64) -> (u32, u64) {
    let flags = if fixed.has_flags() { u32_at(rest, 0) } else { 0 };
    let cas = if fixed.has_long_cas() {
        let upper = u32_at(rest, extra_bytes(fixed.has_flags(), false));
        u64::from(upper) << 32 | changing & u64::from(u32::MAX)
    } else {
        short_cas
    };
    (flags, cas)
}

/// Writes to the start of a payload what may change while the object lies in its block. Its [`Fixed`] word is there. Returns whether the CAS is
/// a long one, of which [`encode_long_cas`] writes the upper half.
#[inline]
#[must_use]
pub(super) fn encode(header: &ObjectHeader, b: &mut [u8; HEADER_BYTES], cas_base: u64) -> bool {
    let long_cas = Fixed::start_of(b).has_long_cas();
    let cas = if long_cas {
        header.cas & u64::from(u32::MAX)
    } else {
        debug_assert!(is_short(header.cas, cas_base), "no room for a long CAS");
        header.cas.wrapping_sub(cas_base) & ((1 << CAS_BITS) - 1)
    };
    let span = u64::from(header.accesses.span_code()) << CAS_BITS;
    let changing = u64::from(header.state.0) << STATE_SHIFT | span | cas;
    b[4..12].copy_from_slice(&changing.to_le_bytes());
    b[12..16].copy_from_slice(&header.expiry.0.to_le_bytes());
    b[16..20].copy_from_slice(&header.written.to_le_bytes());
    b[20..24].copy_from_slice(&header.accesses.read_bytes());
    long_cas
}

/// Writes the upper half of an object's long CAS.
pub(super) fn encode_long_cas(header: &ObjectHeader, payload: &mut [u8]) {
    let Some((b, rest)) = payload.split_first_chunk_mut() else { return };
    let at = extra_bytes(Fixed::start_of(b).has_flags(), false);
    rest[at..at + 4].copy_from_slice(&((header.cas >> 32) as u32).to_le_bytes());
}

/// Writes the flags of a new object, whose [`Fixed`] word is there.
#[inline]
pub(super) fn encode_flags(header: &ObjectHeader, payload: &mut [u8]) {
    if header.flags != 0 {
        payload[HEADER_BYTES..HEADER_BYTES + 4].copy_from_slice(&header.flags.to_le_bytes());
    }
}

/// Changes the state alone.
#[inline]
pub(super) fn encode_state(header: &mut [u8; HEADER_BYTES], state: State) {
    let lowest = header[STATE_AT] & 1;
    header[STATE_AT] = state.0 << 1 | lowest;
}

#[cfg(test)]
mod tests {
    use larder_base::Rng;

    use super::super::accesses::Gaps;
    use super::super::arena::Arena;
    use super::*;

    fn draw(rng: &mut Rng) -> u32 {
        (rng.next_u64() as u32) >> rng.below(32)
    }

    /// Every field at random, many of them at their ends.
    fn random(rng: &mut Rng, cas_base: u64) -> ObjectHeader {
        let cas = match rng.below(4) {
            0 => rng.next_u64(),
            1 => cas_base + (1 << CAS_BITS) - 1 + rng.below(2),
            2 => cas_base.wrapping_sub(rng.below(2)),
            _ => cas_base + (rng.next_u64() >> (64 - CAS_BITS)),
        };
        ObjectHeader {
            cas,
            expiry: Expiry(draw(rng)),
            flags: if rng.chance(0.5) { 0 } else { draw(rng) },
            value_len: if rng.chance(0.1) { 70_000 } else { rng.below(300) as u32 },
            key_len: 1 + rng.below(255) as u8,
            state: State(rng.below(128) as u8),
            app: AppId(rng.below(AppId::COUNT as u64) as u16),
            written: rng.next_u64() as u32,
            accesses: Accesses::known(
                draw(rng),
                draw(rng),
                Gaps { max: draw(rng), first_read: draw(rng), last: draw(rng) },
            ),
        }
    }

    /// An object of this header, with a key and a value that say where they begin and end.
    fn put(arena: &mut Arena, h: &ObjectHeader, hash: u32) -> (Block, Vec<u8>, Vec<u8>) {
        let key = vec![h.key_len; usize::from(h.key_len)];
        let value = vec![!h.key_len; h.value_len as usize];
        let bytes = arena.object_bytes(key.len(), value.len(), h.flags, h.cas);
        let block = arena.alloc(bytes).unwrap();
        arena.fill(block, h, hash, &key, [&value, b""]);
        (block, key, value)
    }

    #[test]
    fn a_header_is_half_a_cache_line() {
        let mut arena = Arena::new(4096);
        let before = arena.free_bytes();
        arena.alloc(object_bytes(10, 22)).unwrap();
        assert_eq!(before - arena.free_bytes(), 64);
    }

    #[test]
    fn every_field_comes_back_beside_any_others() {
        let mut arena = Arena::new(1 << 20);
        for seed in 0..4_000 {
            let mut rng = Rng::new(seed);
            let base = rng.next_u64() >> 1;
            arena.count_cas_from(base);
            let (h, hash) = (random(&mut rng, base), rng.next_u64() as u32);
            let (block, key, value) = put(&mut arena, &h, hash);
            arena.set_next(block, 1 << 30 | 5);
            assert_eq!(ObjectHeader::load(&arena, block), h, "seed {seed}");
            assert_eq!((h.key(&arena, block), h.value(&arena, block)), (&key[..], &value[..]));
            assert!(arena.has_key(block, hash, &key) && arena.is_used(block));
            assert!(!arena.has_key(block, hash ^ 1 << 24, &key), "another tag");
            assert!(!arena.has_key(block, hash, &key[1..]));

            // What may change, one after another.
            let mut now = h;
            for step in 0..12 {
                let other = random(&mut rng, base);
                match step % 6 {
                    0 => now.state = other.state,
                    1 => now.expiry = other.expiry,
                    2 => now.written = other.written,
                    3 => now.accesses = other.accesses,
                    4 if arena.holds_cas(block, other.cas) => now.cas = other.cas,
                    _ => {
                        now.state = other.state;
                        ObjectHeader::set_state(&mut arena, block, now.state);
                    }
                }
                now.save(&mut arena, block);
                assert_eq!(ObjectHeader::load(&arena, block), now, "seed {seed}");
                assert_eq!(
                    (now.key(&arena, block), now.value(&arena, block)),
                    (&key[..], &value[..])
                );
                assert!(arena.has_key(block, hash, &key));
                assert_eq!((arena.next_of(block), arena.is_used(block)), (1 << 30 | 5, true));
            }
            let mut hands = [arena.first(), arena.first()];
            let [x, y] = &mut hands;
            ObjectMemory::free(&mut arena, block, [x, y]);
            arena.validate().unwrap();
        }
    }

    #[test]
    fn only_what_needs_it_has_room_for_flags_and_a_long_cas() {
        let mut arena = Arena::new(4096);
        arena.count_cas_from(1000);
        let bytes = |flags, cas| arena.object_bytes(3, 5, flags, cas) - object_bytes(3, 5);
        let last = 1000 + (1 << CAS_BITS) - 1;
        assert_eq!([bytes(0, 1000), bytes(0, last), bytes(1, 1000)], [0, 0, 4]);
        assert_eq!([bytes(0, 999), bytes(0, last + 1), bytes(7, u64::MAX)], [4, 4, 8]);
        let mut h = random(&mut Rng::new(3), 1000);
        (h.flags, h.cas) = (0, 1001);
        let (short, ..) = put(&mut arena, &h, 1);
        h.cas = 7;
        let (long, ..) = put(&mut arena, &h, 1);
        assert!(arena.holds_cas(short, last) && !arena.holds_cas(short, 7));
        assert!(arena.holds_cas(long, last) && arena.holds_cas(long, 7));
    }

    #[test]
    fn an_object_moves_into_a_longer_block_whole() {
        for seed in 0..500 {
            let mut rng = Rng::new(seed);
            let mut arena = Arena::new(1 << 20);
            let (h, hash) = (random(&mut rng, 0), rng.next_u64() as u32);
            let (block, key, value) = put(&mut arena, &h, hash);
            // A hole that is longer by less than a block of its own.
            let more = rng.below(4) as usize * UNIT;
            let bytes = arena.object_bytes(key.len(), value.len(), h.flags, h.cas);
            let hole = arena.alloc(bytes + more).unwrap();
            let behind = arena.alloc(10).unwrap();
            arena.free(hole);
            let to = arena.copy_object(block).unwrap();
            assert_eq!(ObjectHeader::load(&arena, to), h);
            assert_eq!((h.key(&arena, to), h.value(&arena, to)), (&key[..], &value[..]));
            assert!(arena.has_key(to, hash, &key) && arena.is_used(behind));
        }
    }

    #[test]
    fn reads_are_counted_over_the_wrap_of_time() {
        let start = u32::MAX - 10;
        let mut h = ObjectHeader {
            written: start,
            accesses: Accesses::default(),
            ..random(&mut Rng::new(1), 0)
        };
        assert_eq!(h.last(), start);
        h.note_read(u32::MAX - 4);
        h.note_read(5);
        h.note_read(9);
        let f = h.features(19, 40);
        assert_eq!((f.reads, f.first_read, f.last_gap, f.max_gap), (3, 6, 4, 10));
        assert_eq!((f.mean_gap, f.age, f.idle, f.size), (7, 30, 10, 40));
        h.touch(17);
        assert_eq!((h.last(), h.features(19, 40).reads), (17, 3));
        let state = State(0).with_clock(2).with(State::WON);
        assert!(state.has(State::WON) && state.clock() == 2 && !state.has(State::STALE));
    }
}
