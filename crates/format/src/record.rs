//! One object on flash.
//!
//! ```text
//!  0        4           7    8      9              13             21
//! +--------+-----------+----+------+--------------+--------------+ - - - - - + - - - - + - - - -+-----+-------+
//! | crc32c | value len | key| bits | last access  | cas          | expiry    | client  | app    | key | value |
//! |        | u24       | len| u8   | u32 Unix s   | u64          | u32 Unix s| flags   | u16    |     |       |
//! |        |           | u8 |      |              |              |           | u32     |        |     |       |
//! +--------+-----------+----+------+--------------+--------------+ - - - - - + - - - - + - - - -+-----+-------+
//!                                                                 only when the bit says so
//! bits: 0 fetched  1 stale  2 won  3 has expiry  4 has client flags  5 has application  6 dead  7 long value
//! ```
//!
//! Of a value of 16 MiB or more the upper 8 bits of its length come behind the application, as one byte that bit 7 announces.
//!
//! A record need not lie in one segment: one that begins at the end of a large segment may go on in those that follow it on the
//! device, as if there were no border. Where records begin and end in such a segment is not on flash: the segment table knows it.
//!
//! The checksum (CRC-32C) covers everything after itself and starts from a seed made of the device's salt, the segment's
//! number and its generation ([`Filling::seed`]). So bytes that an earlier filling left behind, or that belong to
//! another segment or another device, never verify: for equal bytes two seeds give two checksums. The index has
//! no room for a generation; this is where it is checked.
//!
//! A key length of zero is not a record; it ends a page.

use larder_base::{AppId, Expiry, UnixSecs};

use crate::le;

/// Bytes of a record before its optional fields, its key and its value.
pub const FIXED_LEN: usize = 21;
/// Bytes of the checksum, which comes first.
pub const CRC_LEN: usize = 4;
/// Bytes of all optional fields together.
pub const OPTIONAL_LEN: usize = 4 + 4 + 2 + 1;
/// The shortest record: a key of one byte and no value.
pub const MIN_RECORD_LEN: usize = FIXED_LEN + 1;
/// The longest key.
pub const MAX_KEY_LEN: usize = 255;
/// The longest value that a header can describe: 1 GiB, the most that memcached takes.
pub const MAX_VALUE_LEN: usize = 1 << 30;
/// The longest record.
pub const MAX_RECORD_LEN: usize = MAX_HEAD_LEN + MAX_VALUE_LEN;
/// The most that comes before a value.
pub const MAX_HEAD_LEN: usize = FIXED_LEN + OPTIONAL_LEN + MAX_KEY_LEN;
/// The longest value whose length has no further byte.
const MAX_SHORT_VALUE: usize = (1 << 24) - 1;

const AT_VALUE_LEN: usize = 4;
const AT_KEY_LEN: usize = 7;
const AT_BITS: usize = 8;
const AT_LAST_ACCESS: usize = 9;
const AT_CAS: usize = 13;

const _: () = assert!(
    AT_CAS + 8 == FIXED_LEN && AT_LAST_ACCESS + 4 == AT_CAS && AT_BITS + 1 == AT_LAST_ACCESS
);
const _: () =
    assert!(AT_VALUE_LEN == CRC_LEN && AT_VALUE_LEN + 3 == AT_KEY_LEN && AT_KEY_LEN + 1 == AT_BITS);

const FETCHED: u8 = 1;
const STALE: u8 = 1 << 1;
const WON: u8 = 1 << 2;
const HAS_EXPIRY: u8 = 1 << 3;
const HAS_FLAGS: u8 = 1 << 4;
const HAS_APP: u8 = 1 << 5;
const DEAD: u8 = 1 << 6;
const LONG: u8 = 1 << 7;

/// Which filling of which segment of which device: what a record's checksum is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filling {
    /// The device's salt , from the superblock.
    pub salt: u32,
    /// Segment number, from 1 on.
    pub segment: u16,
    /// How often segments have been filled before, never repeated on one device.
    pub generation: u64,
}

impl Filling {
    /// Where the checksums of this filling's records start from.
    pub fn seed(self) -> u32 {
        let mut bytes = [0; 14];
        bytes[..8].copy_from_slice(&self.generation.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.segment.to_le_bytes());
        bytes[10..].copy_from_slice(&self.salt.to_le_bytes());
        crc32c::crc32c(&bytes)
    }
}

/// What a record says of its object, beside key and value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordMeta {
    /// CAS unique.
    pub cas: u64,
    /// When it expires. Takes 4 bytes unless [`Expiry::NEVER`].
    pub expiry: Expiry,
    /// Client flags. Take 4 bytes unless 0.
    pub flags: u32,
    /// Application. Takes 2 bytes unless [`AppId::DEFAULT`].
    pub app: AppId,
    /// Wall-clock second of its last access, as of the move to flash.
    pub last_access: UnixSecs,
    /// It has been read since it was written.
    pub fetched: bool,
    /// It is stale (meta protocol).
    pub stale: bool,
    /// The right to refill it has been handed out (meta protocol).
    pub won: bool,
}

impl RecordMeta {
    fn bits(&self, value_len: usize) -> u8 {
        let mut bits = 0;
        for (set, bit) in [
            (self.fetched, FETCHED),
            (self.stale, STALE),
            (self.won, WON),
            (self.expiry != Expiry::NEVER, HAS_EXPIRY),
            (self.flags != 0, HAS_FLAGS),
            (self.app != AppId::DEFAULT, HAS_APP),
            (value_len > MAX_SHORT_VALUE, LONG),
        ] {
            if set {
                bits |= bit;
            }
        }
        bits
    }
}

const fn optional_len(bits: u8) -> usize {
    let expiry = if bits & HAS_EXPIRY != 0 { 4 } else { 0 };
    let flags = if bits & HAS_FLAGS != 0 { 4 } else { 0 };
    let app = if bits & HAS_APP != 0 { 2 } else { 0 };
    let long = if bits & LONG != 0 { 1 } else { 0 };
    expiry + flags + app + long
}

/// Bytes that an object takes on flash, before any padding.
pub fn record_len(meta: &RecordMeta, key_len: usize, value_len: usize) -> usize {
    FIXED_LEN + optional_len(meta.bits(value_len)) + key_len + value_len
}

/// Writes a record to the start of `out` and returns its length.
///
/// # Panics
/// When the key is empty or longer than [`MAX_KEY_LEN`], the value longer than [`MAX_VALUE_LEN`], or `out` shorter than
/// [`record_len`]: the caller has checked all three, they are not input.
pub fn encode_into(
    out: &mut [u8],
    meta: &RecordMeta,
    key: &[u8],
    value: &[u8],
    filling: Filling,
) -> usize {
    let head = put_head(out, meta, key, value.len());
    let len = head + value.len();
    out[head..len].copy_from_slice(value);
    seal(&mut out[..len], filling);
    len
}

/// What comes before a value, and how much of it there is: for a record that is laid down in parts. The checksum is of the
/// whole record.
///
/// # Panics
/// As [`encode_into`] does.
pub fn encode_head(
    meta: &RecordMeta,
    key: &[u8],
    value: &[u8],
    filling: Filling,
) -> ([u8; MAX_HEAD_LEN], usize) {
    let mut out = [0; MAX_HEAD_LEN];
    let len = put_head(&mut out, meta, key, value.len());
    let crc = crc32c::crc32c_append(filling.seed(), &out[CRC_LEN..len]);
    let crc = crc32c::crc32c_append(crc, value);
    out[..CRC_LEN].copy_from_slice(&crc.to_le_bytes());
    (out, len)
}

/// Writes all that comes before a value but its checksum, and returns the length of it.
fn put_head(out: &mut [u8], meta: &RecordMeta, key: &[u8], value_len: usize) -> usize {
    assert!((1..=MAX_KEY_LEN).contains(&key.len()), "key of {} bytes", key.len());
    assert!(value_len <= MAX_VALUE_LEN, "value of {value_len} bytes");
    let bits = meta.bits(value_len);
    let len = FIXED_LEN + optional_len(bits) + key.len();
    let out = &mut out[..len];
    out[AT_VALUE_LEN..AT_KEY_LEN].copy_from_slice(&(value_len as u32).to_le_bytes()[..3]);
    out[AT_KEY_LEN] = key.len() as u8;
    out[AT_BITS] = bits;
    out[AT_LAST_ACCESS..AT_CAS].copy_from_slice(&meta.last_access.0.to_le_bytes());
    out[AT_CAS..FIXED_LEN].copy_from_slice(&meta.cas.to_le_bytes());
    let mut at = FIXED_LEN;
    let mut put = |bytes: &[u8]| {
        out[at..at + bytes.len()].copy_from_slice(bytes);
        at += bytes.len();
    };
    if bits & HAS_EXPIRY != 0 {
        put(&meta.expiry.0.to_le_bytes());
    }
    if bits & HAS_FLAGS != 0 {
        put(&meta.flags.to_le_bytes());
    }
    if bits & HAS_APP != 0 {
        put(&meta.app.0.to_le_bytes());
    }
    if bits & LONG != 0 {
        put(&[(value_len >> 24) as u8]);
    }
    put(key);
    debug_assert_eq!(at, len);
    len
}

fn seal(record: &mut [u8], filling: Filling) {
    let crc = crc32c::crc32c_append(filling.seed(), &record[CRC_LEN..]);
    record[..CRC_LEN].copy_from_slice(&crc.to_le_bytes());
}

/// Marks the record that starts at `bytes[0]` dead and seals it again, in a segment that is not yet written. Readers skip
/// dead records: an object that changed after it was placed must not be found through another key's index entry.
/// Returns false, and changes nothing, when no whole record starts there.
pub fn mark_dead(bytes: &mut [u8], filling: Filling) -> bool {
    let Step::Record(raw) = step(bytes) else { return false };
    let len = raw.bytes.len();
    bytes[AT_BITS] |= DEAD;
    seal(&mut bytes[..len], filling);
    true
}

/// What starts at some offset.
pub(crate) enum Step<'a> {
    /// The lengths of a record; nothing is verified.
    Record(Raw<'a>),
    /// No record: a key length of zero, or too few bytes for the shortest record.
    End,
    /// Lengths that run over the end: not a whole record.
    Malformed,
}

/// Reads the lengths at the start of `bytes`.
pub(crate) fn step(bytes: &[u8]) -> Step<'_> {
    if bytes.len() < MIN_RECORD_LEN || bytes[AT_KEY_LEN] == 0 {
        return Step::End;
    }
    match lengths(bytes) {
        Some((key_at, value_at, len)) if len <= bytes.len() => {
            Step::Record(Raw { bytes: &bytes[..len], key_at, value_at })
        }
        _ => Step::Malformed,
    }
}

/// Where the key and the value of the record at the start of `bytes` begin, and how long it is. There are at least
/// [`MIN_RECORD_LEN`] bytes; it may run over their end.
fn lengths(bytes: &[u8]) -> Option<(usize, usize, usize)> {
    let bits = bytes[AT_BITS];
    let key_at = FIXED_LEN + optional_len(bits);
    let value_at = key_at + usize::from(bytes[AT_KEY_LEN]);
    let mut value_len = le(&bytes[AT_VALUE_LEN..AT_KEY_LEN]) as usize;
    if bits & LONG != 0 {
        value_len |= usize::from(*bytes.get(key_at - 1)?) << 24;
    }
    Some((key_at, value_at, value_at + value_len))
}

/// What the first bytes of a record say of it, of which nothing is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claimed<'a> {
    /// The key.
    pub key: &'a [u8],
    /// The application.
    pub app: AppId,
    /// Bytes of the whole record.
    pub len: usize,
}

/// What the record that begins with `bytes` says of itself; the rest of it need not be there. `None` where none begins, or
/// not all that comes before the value is there.
pub fn claimed(bytes: &[u8]) -> Option<Claimed<'_>> {
    if bytes.len() < MIN_RECORD_LEN || bytes[AT_KEY_LEN] == 0 {
        return None;
    }
    let (key_at, value_at, len) = lengths(bytes)?;
    let head = bytes.get(..value_at)?;
    Some(Claimed { key: &head[key_at..], app: meta_of(head).app, len })
}

/// The bounds of a record whose checksum has not been looked at.
#[derive(Clone, Copy)]
pub(crate) struct Raw<'a> {
    bytes: &'a [u8],
    key_at: usize,
    value_at: usize,
}

impl<'a> Raw<'a> {
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn key(&self) -> &'a [u8] {
        &self.bytes[self.key_at..self.value_at]
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.bytes[AT_BITS] & DEAD != 0
    }

    /// The record, if its checksum holds for this seed ([`Filling::seed`]).
    pub(crate) fn verify(self, seed: u32) -> Option<Record<'a>> {
        let stored = le(&self.bytes[..CRC_LEN]) as u32;
        (crc32c::crc32c_append(seed, &self.bytes[CRC_LEN..]) == stored).then_some(Record(self))
    }
}

/// A record whose checksum has been verified.
#[derive(Clone, Copy)]
pub struct Record<'a>(Raw<'a>);

impl std::fmt::Debug for Record<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Record")
            .field("key", &self.key())
            .field("value_len", &self.value().len())
            .field("meta", &self.meta())
            .finish()
    }
}

impl<'a> Record<'a> {
    /// The key, 1 to 255 bytes.
    pub fn key(&self) -> &'a [u8] {
        self.0.key()
    }

    /// The value.
    pub fn value(&self) -> &'a [u8] {
        &self.0.bytes[self.0.value_at..]
    }

    /// Bytes of the whole record, header included, padding not.
    #[allow(clippy::len_without_is_empty, reason = "no record is empty")]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Everything beside key and value.
    pub fn meta(&self) -> RecordMeta {
        meta_of(self.0.bytes)
    }
}

/// What a record, or all of it before its value, says beside key and value.
fn meta_of(b: &[u8]) -> RecordMeta {
    let bits = b[AT_BITS];
    let mut at = FIXED_LEN;
    let mut take = |present: u8, len: usize| {
        if bits & present == 0 {
            return 0;
        }
        at += len;
        le(&b[at - len..at])
    };
    let expiry = Expiry(take(HAS_EXPIRY, 4) as u32);
    let flags = take(HAS_FLAGS, 4) as u32;
    let app = AppId(take(HAS_APP, 2) as u16);
    RecordMeta {
        cas: le(&b[AT_CAS..FIXED_LEN]),
        expiry,
        flags,
        app,
        last_access: UnixSecs(le(&b[AT_LAST_ACCESS..AT_CAS]) as u32),
        fetched: bits & FETCHED != 0,
        stale: bits & STALE != 0,
        won: bits & WON != 0,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use larder_base::Rng;
    use proptest::prelude::*;

    use super::*;
    use crate::page::{Find, find_extent};

    pub(crate) const FILLING: Filling = Filling { salt: 0xfeed, segment: 17, generation: 3 };

    pub(crate) fn any_meta(rng: &mut Rng) -> RecordMeta {
        RecordMeta {
            cas: rng.next_u64(),
            expiry: Expiry(if rng.chance(0.5) { 0 } else { rng.next_u64() as u32 }),
            flags: if rng.chance(0.5) { 0 } else { rng.next_u64() as u32 },
            app: AppId(if rng.chance(0.5) { 0 } else { rng.below(257) as u16 }),
            last_access: UnixSecs(rng.next_u64() as u32),
            fetched: rng.chance(0.5),
            stale: rng.chance(0.5),
            won: rng.chance(0.5),
        }
    }

    fn encoded(meta: &RecordMeta, key: &[u8], value: &[u8]) -> Vec<u8> {
        let mut out = vec![0xaa; record_len(meta, key.len(), value.len())];
        assert_eq!(encode_into(&mut out, meta, key, value, FILLING), out.len());
        out
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn round_trip(seed: u64, key_len in 1usize..=255, value_len in 0usize..3000) {
            let mut rng = Rng::new(seed);
            let meta = any_meta(&mut rng);
            let (mut key, mut value) = (vec![0; key_len], vec![0; value_len]);
            rng.fill(&mut key);
            rng.fill(&mut value);
            let bytes = encoded(&meta, &key, &value);
            let Find::Found(r) = find_extent(&bytes, &key, FILLING) else { panic!("lost") };
            prop_assert_eq!(r.meta(), meta);
            prop_assert_eq!(r.key(), &key[..]);
            prop_assert_eq!(r.value(), &value[..]);
            prop_assert_eq!(r.len(), bytes.len());
        }
    }

    #[test]
    fn the_layout_is_pinned() {
        let meta = RecordMeta {
            cas: 0x1122_3344_5566_7788,
            expiry: Expiry(0x0a0b_0c0d),
            flags: 0x0102_0304,
            app: AppId(0x0105),
            last_access: UnixSecs(0x6543_2101),
            fetched: true,
            stale: false,
            won: true,
        };
        let bytes = encoded(&meta, b"key", b"value");
        let expected: &[u8] = &[
            5,
            0,
            0,
            3,
            0b0011_1101,
            0x01,
            0x21,
            0x43,
            0x65,
            0x88,
            0x77,
            0x66,
            0x55,
            0x44,
            0x33,
            0x22,
            0x11,
            0x0d,
            0x0c,
            0x0b,
            0x0a,
            0x04,
            0x03,
            0x02,
            0x01,
            0x05,
            0x01,
            b'k',
            b'e',
            b'y',
            b'v',
            b'a',
            b'l',
            b'u',
            b'e',
        ];
        assert_eq!(&bytes[CRC_LEN..], expected);
        assert_eq!(record_len(&RecordMeta::default(), 1, 0), MIN_RECORD_LEN);
    }

    /// A record in parts is the same record, and a value of 16 MiB or more has its length in full.
    #[test]
    fn a_record_in_parts_is_the_same() {
        let mut rng = Rng::new(8);
        for len in [0, 1, 700, MAX_SHORT_VALUE, MAX_SHORT_VALUE + 1, (40 << 20) + 3] {
            let (meta, mut value) = (any_meta(&mut rng), vec![7; len]);
            let edge = len.min(50);
            rng.fill(&mut value[len - edge..]);
            let whole = encoded(&meta, b"key", &value);
            let (head, head_len) = encode_head(&meta, b"key", &value, FILLING);
            assert!(whole == [&head[..head_len], &value].concat(), "{len}");
            let Find::Found(r) = find_extent(&whole, b"key", FILLING) else { panic!("{len}") };
            assert!(r.value() == value && r.meta() == meta, "{len}");
            let said = Claimed { key: b"key", app: meta.app, len: whole.len() };
            assert_eq!(claimed(&whole[..head_len]), Some(said));
            assert_eq!(claimed(&whole[..head_len - 1]), None);
        }
        assert_eq!(claimed(&[0; 64]), None);
    }

    #[test]
    fn another_filling_never_verifies() {
        let bytes = encoded(&RecordMeta::default(), b"key", b"value");
        let mut others: Vec<Filling> = (0..64)
            .map(|bit| Filling { generation: FILLING.generation ^ 1 << bit, ..FILLING })
            .collect();
        others
            .extend((0..12).map(|bit| Filling { segment: FILLING.segment ^ 1 << bit, ..FILLING }));
        others.extend((0..32).map(|bit| Filling { salt: FILLING.salt ^ 1 << bit, ..FILLING }));
        others.extend(
            (0..5000).filter(|&g| g != 3).map(|generation| Filling { generation, ..FILLING }),
        );
        for other in others {
            assert!(matches!(find_extent(&bytes, b"key", other), Find::Corrupt), "{other:?}");
        }
    }

    #[test]
    fn a_dead_record_is_not_found() {
        let mut bytes = encoded(&RecordMeta::default(), b"key", b"value");
        assert!(mark_dead(&mut bytes, FILLING));
        assert!(matches!(find_extent(&bytes, b"key", FILLING), Find::Absent));
        assert!(!mark_dead(&mut [0; 64], FILLING));
        assert!(!mark_dead(&mut [0xff; 64], FILLING));
    }

    #[test]
    #[should_panic(expected = "key of 0 bytes")]
    fn an_empty_key_is_refused() {
        encode_into(&mut [0; 64], &RecordMeta::default(), b"", b"", FILLING);
    }
}
