//! The simulated cache's flash: what segments hold, with the bytes of values left out.
//!
//! Every key is an id of eight bytes and a filler, every value the start of one pattern ([`Contents`]). So a record is
//! its header and its id; the rest is put back when it is read, byte for byte. Numbers are kept as short as they are: some
//! twenty bytes an object, whatever its size.
//!
//! ```text
//! entry: | bits u8 | key length u8 | bytes of id, of cas: 4 bits each | id - | cas above the segment's least - |
//!        | value length, varint | last access before the segment's latest, varint |
//!        | application, varint, expiry u32, flags u32: where the bits say so | checksum u32: where it does not follow |
//! ```
//!
//! A record's checksum follows from its bytes and the generation of its segment, which is found by trial when the segment
//! is written: the next few are tried on the first record.

use larder_engine::dram::Contents;
use larder_engine::kv::api::{FlashRead, Location};
use larder_engine::kv::node::StateIo;
use larder_engine::kv::{IoFailed, SegmentIo};
use larder_format::geometry::run_bits;
use larder_format::page::{EXTENT_ALIGN, SMALL_MAX};
use larder_format::record::{FIXED_LEN, OPTIONAL_LEN};
use larder_format::{Filling, PAGE_SIZE};
use larder_policy::budget::BudgetState;

use crate::device::DeviceOp;

/// Bytes of an object's id, the start of its key.
pub(super) const ID_LEN: usize = 8;
/// A dead record, in the header's bits (the layout is in `larder_format::record`).
const DEAD: u8 = 1 << 6;
const HAS_EXPIRY: u8 = 1 << 3;
const HAS_FLAGS: u8 = 1 << 4;
const HAS_APP: u8 = 1 << 5;
/// The upper 8 bits of the value's length follow, where they are not 0.
const LONG: u8 = 1 << 7;
/// The checksum is kept, in an entry's bits, in place of [`LONG`], which follows from the length.
const HAS_CRC: u8 = 1 << 7;
/// Generations that are tried on either side of the highest that was found.
const GENERATIONS: u64 = 16;
/// Places in a record's header.
const AT_VALUE: usize = 4;
const AT_KEY: usize = 7;
const AT_BITS: usize = 8;
const AT_LAST: usize = 9;
const AT_CAS: usize = 13;

/// A record without the bytes that follow from its lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Head {
    /// None: what the record's bytes have in the segment's filling.
    crc: Option<[u8; 4]>,
    bits: u8,
    key: usize,
    value: usize,
    last: u32,
    cas: u64,
    id: u64,
    optional: [u8; OPTIONAL_LEN],
}

fn optional_len(bits: u8) -> usize {
    let field = |bit: u8, len| if bits & bit != 0 { len } else { 0 };
    field(HAS_EXPIRY, 4) + field(HAS_FLAGS, 4) + field(HAS_APP, 2) + field(LONG, 1)
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b))
}

impl Head {
    /// `None` where no record starts.
    fn read(record: &[u8]) -> Option<Head> {
        let fixed: &[u8; FIXED_LEN] = record.first_chunk()?;
        let (key, bits) = (usize::from(fixed[AT_KEY]), fixed[AT_BITS]);
        if key < ID_LEN {
            return None;
        }
        let header = FIXED_LEN + optional_len(bits);
        let mut optional = [0; OPTIONAL_LEN];
        optional[..header - FIXED_LEN].copy_from_slice(record.get(FIXED_LEN..header)?);
        let long = if bits & LONG != 0 { usize::from(record[header - 1]) << 24 } else { 0 };
        Some(Head {
            crc: Some([fixed[0], fixed[1], fixed[2], fixed[3]]),
            bits,
            key,
            value: number(&fixed[AT_VALUE..AT_KEY]) as usize | long,
            last: number(&fixed[AT_LAST..AT_CAS]) as u32,
            cas: number(&fixed[AT_CAS..]),
            id: number(record.get(header..header + ID_LEN)?),
            optional,
        })
    }

    fn header(&self) -> usize {
        FIXED_LEN + optional_len(self.bits)
    }

    /// Bytes of the record.
    fn len(&self) -> usize {
        self.header() + self.key + self.value
    }

    /// Puts the record back to the start of `out` and returns its length; `None` where it does not fit.
    fn restore(&self, seed: u32, contents: &Contents, out: &mut [u8]) -> Option<usize> {
        let out = out.get_mut(..self.len())?;
        self.begin(contents, out)?;
        let crc = self.crc.unwrap_or_else(|| checksum(seed, out));
        out[..AT_VALUE].copy_from_slice(&crc);
        Some(out.len())
    }

    /// Puts as much of it back as `out` takes, which is all before the value at least, and its checksum if that is kept.
    fn begin(&self, contents: &Contents, out: &mut [u8]) -> Option<()> {
        let (header, value_at) = (self.header(), self.header() + self.key);
        out.get(..value_at)?;
        self.lengths(out);
        out[AT_LAST..AT_CAS].copy_from_slice(&self.last.to_le_bytes());
        out[AT_CAS..FIXED_LEN].copy_from_slice(&self.cas.to_le_bytes());
        out[FIXED_LEN..header].copy_from_slice(&self.optional[..header - FIXED_LEN]);
        Contents::key(self.id, &mut out[header..value_at]);
        let here = self.value.min(out.len() - value_at);
        out[value_at..value_at + here].copy_from_slice(&contents.value(self.value)[..here]);
        out[..AT_VALUE].copy_from_slice(&self.crc.unwrap_or_default());
        Some(())
    }

    /// Writes what says how long the record is.
    fn lengths(&self, out: &mut [u8]) {
        out[AT_VALUE..AT_KEY].copy_from_slice(&(self.value as u32).to_le_bytes()[..3]);
        out[AT_KEY] = self.key as u8;
        out[AT_BITS] = self.bits;
    }
}

fn checksum(seed: u32, record: &[u8]) -> [u8; 4] {
    crc32c::crc32c_append(seed, &record[AT_VALUE..]).to_le_bytes()
}

fn put_varint(out: &mut Vec<u8>, mut n: u32) {
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

#[inline]
fn take_varint(bytes: &[u8], at: &mut usize) -> u32 {
    let (mut n, mut shift) = (0, 0);
    loop {
        let b = bytes[*at];
        *at += 1;
        n |= u32::from(b & 0x7F) << shift;
        shift += 7;
        if b < 0x80 || shift > 28 {
            return n;
        }
    }
}

fn bytes_of(n: u64) -> usize {
    (64 - n.leading_zeros() as usize).div_ceil(8)
}

/// The number in the first `len` bytes, of which there are at least eight or else only they.
#[inline]
fn short(bytes: &[u8], len: usize) -> u64 {
    match bytes.first_chunk::<8>() {
        Some(eight) if len < 8 => u64::from_le_bytes(*eight) & ((1 << (8 * len)) - 1),
        Some(eight) => u64::from_le_bytes(*eight),
        None => number(&bytes[..len]),
    }
}

#[derive(Default)]
struct Stored {
    /// The records, in the order of their places.
    entries: Vec<u8>,
    /// Small records: where in `entries` each page's begin; a segment of large ones has none.
    pages: Vec<u32>,
    /// Large records: where each is, and where in `entries`.
    extents: Vec<(u32, u32)>,
    /// The least CAS unique, and the latest time of access.
    cas: u64,
    last: u32,
    /// Where checksums of this filling start from.
    seed: u32,
}

impl Stored {
    fn push(&mut self, head: &Head) {
        let cas = head.cas - self.cas;
        let (id_len, cas_len) = (bytes_of(head.id), bytes_of(cas));
        let out = &mut self.entries;
        let bits = head.bits & !LONG | if head.crc.is_some() { HAS_CRC } else { 0 };
        out.extend([bits, head.key as u8, (id_len | cas_len << 4) as u8]);
        out.extend(&head.id.to_le_bytes()[..id_len]);
        out.extend(&cas.to_le_bytes()[..cas_len]);
        put_varint(out, head.value as u32);
        put_varint(out, self.last - head.last);
        let fixed = optional_len(head.bits & !HAS_APP & !LONG);
        if head.bits & HAS_APP != 0 {
            put_varint(out, number(&head.optional[fixed..fixed + 2]) as u32);
        }
        out.extend(&head.optional[..fixed]);
        out.extend(head.crc.into_iter().flatten());
    }

    /// The entry at `at`, and where the next one begins.
    #[inline]
    fn entry(&self, start: usize) -> (Head, usize) {
        let e = &self.entries[start..];
        let (bits, lens) = (e[0] & !HAS_CRC, usize::from(e[2]));
        let mut at = 3;
        let id = short(&e[at..], lens & 15);
        at += lens & 15;
        let cas = self.cas + short(&e[at..], lens >> 4);
        at += lens >> 4;
        let value = take_varint(e, &mut at) as usize;
        let last = self.last - take_varint(e, &mut at);
        let fixed = optional_len(bits & !HAS_APP);
        let mut optional = [0; OPTIONAL_LEN];
        if bits & HAS_APP != 0 {
            let app = take_varint(e, &mut at) as u16;
            optional[fixed..fixed + 2].copy_from_slice(&app.to_le_bytes());
        }
        optional[..fixed].copy_from_slice(&e[at..at + fixed]);
        at += fixed;
        let crc = (e[0] & HAS_CRC != 0).then(|| [e[at], e[at + 1], e[at + 2], e[at + 3]]);
        at += crc.map_or(0, |crc| crc.len());
        let long = value >> 24 > 0;
        let bits = if long { bits | LONG } else { bits };
        if long {
            optional[optional_len(bits) - 1] = (value >> 24) as u8;
        }
        let head = Head { crc, bits, key: usize::from(e[1]), value, last, cas, id, optional };
        (head, start + at)
    }

    /// Where the entry at `start` ends, and whether it is of a living record with this id and length of key. Nothing else of
    /// it is looked at: a search passes over many.
    #[inline]
    fn pass(&self, start: usize, (id, key): (u64, usize)) -> (usize, bool) {
        let e = &self.entries[start..];
        let (bits, lens) = (e[0], usize::from(e[2]));
        let found = usize::from(e[1]) == key && bits & DEAD == 0 && short(&e[3..], lens & 15) == id;
        let mut at = 3 + (lens & 15) + (lens >> 4);
        // Where varints end, of up to eight bytes: the second or third end is wanted.
        let next =
            e[at..].first_chunk().map_or_else(|| number(&e[at..]), |b| u64::from_le_bytes(*b));
        let ends = !next & 0x8080_8080_8080_8080;
        let ends = ends & ends.wrapping_sub(1);
        let ends = if bits & HAS_APP != 0 { ends & ends.wrapping_sub(1) } else { ends };
        if ends != 0 {
            at += ends.trailing_zeros() as usize / 8 + 1;
        } else {
            for _ in 0..2 + u32::from(bits & HAS_APP != 0) {
                take_varint(e, &mut at);
            }
        }
        at += optional_len(bits & !HAS_APP & !HAS_CRC) + if bits & HAS_CRC != 0 { 4 } else { 0 };
        (start + at, found)
    }

    /// About where among the extents the one at `offset` is.
    #[inline]
    fn guess(&self, offset: u32, segment_bytes: u32) -> usize {
        let last = self.extents.len().saturating_sub(1) as u64;
        (last * u64::from(offset) / u64::from(segment_bytes.max(1))) as usize
    }

    /// Where the entry of the extent at `offset` begins. Extents are of like sizes, so that few are looked at.
    #[inline]
    fn extent(&self, offset: u32, segment_bytes: u32) -> Option<usize> {
        let mut at = self.guess(offset, segment_bytes);
        while self.extents.get(at)?.0 > offset {
            at = at.checked_sub(1)?;
        }
        while self.extents.get(at)?.0 < offset {
            at += 1;
        }
        let (found, from) = *self.extents.get(at)?;
        (found == offset).then_some(from as usize)
    }

    /// Where the entries of a page lie.
    fn page(&self, page: usize) -> Option<std::ops::Range<usize>> {
        let start = *self.pages.get(page)? as usize;
        let end = self.pages.get(page + 1).map_or(self.entries.len(), |&e| e as usize);
        Some(start..end)
    }

    /// Puts a page back, whole.
    fn restore_page(&self, page: usize, contents: &Contents, out: &mut [u8]) -> Option<()> {
        let range = self.page(page)?;
        let (mut from, mut to) = (range.start, 0);
        while from < range.end {
            let (head, next) = self.entry(from);
            to += head.restore(self.seed, contents, &mut out[to..])?;
            from = next;
        }
        out[to..].fill(0);
        Some(())
    }

    /// Puts the living record of `id` and a key of so many bytes back, which is in this page, and returns its length;
    /// `None` if it is not.
    fn restore_one(
        &self,
        page: usize,
        contents: &Contents,
        out: &mut [u8],
        wanted: (u64, usize),
    ) -> Option<usize> {
        let range = self.page(page)?;
        let mut from = range.start;
        while from < range.end {
            let (next, found) = self.pass(from, wanted);
            if found {
                return self.entry(from).0.restore(self.seed, contents, out);
            }
            from = next;
        }
        None
    }
}

/// The segments of one device.
pub(super) struct Flash {
    segments: Vec<Stored>,
    segment_bytes: u32,
    /// Large records begin at multiples of so many bytes.
    align: usize,
    salt: u32,
    /// The highest generation that was met.
    generation: u64,
    contents: Contents,
    scratch: Vec<u8>,
    /// The records of the segment that is being written.
    heads: Vec<(u32, Head)>,
    /// Where the first of them begins.
    first: u32,
    /// What happened since it was last emptied, when anyone asks.
    pub(super) ops: Option<Vec<DeviceOp>>,
}

impl Flash {
    pub(super) fn new(salt: u32, segments: u16, segment_bytes: u32, contents: Contents) -> Flash {
        let align = EXTENT_ALIGN << run_bits(segments);
        let segments = (0..=segments).map(|_| Stored::default()).collect();
        Flash {
            segments,
            segment_bytes,
            align,
            salt,
            generation: 0,
            contents,
            scratch: Vec::new(),
            heads: Vec::new(),
            first: 0,
            ops: None,
        }
    }

    fn offset_of(&self, segment: u16) -> u64 {
        u64::from(segment.saturating_sub(1)) * u64::from(self.segment_bytes)
    }

    fn note(&mut self, op: DeviceOp) {
        if let Some(ops) = &mut self.ops {
            ops.push(op);
        }
    }

    /// Bytes of memory.
    pub(super) fn memory_bytes(&self) -> usize {
        let stored =
            |s: &Stored| s.entries.capacity() + s.pages.capacity() * 4 + s.extents.capacity() * 8;
        self.segments.iter().map(|s| stored(s) + size_of::<Stored>()).sum::<usize>()
            + self.contents.memory_bytes()
            + self.scratch.capacity()
            + self.heads.capacity() * size_of::<(u32, Head)>()
    }

    /// Asks for the cache line that says where the bytes at `at` are kept.
    #[inline]
    pub(super) fn warm_place(&self, at: &Location) {
        let Some(stored) = self.segments.get(usize::from(at.segment)) else { return };
        if stored.pages.is_empty() {
            larder_base::prefetch(&stored.extents, stored.guess(at.offset, self.segment_bytes));
        } else {
            larder_base::prefetch(&stored.pages, at.offset as usize / PAGE_SIZE);
        }
    }

    /// Asks for the cache lines from which the bytes at `at` would be put back: the second step.
    #[inline]
    pub(super) fn warm(&self, at: &Location) {
        let Some(stored) = self.segments.get(usize::from(at.segment)) else { return };
        if stored.pages.is_empty() {
            if let Some(from) = stored.extent(at.offset, self.segment_bytes) {
                larder_base::prefetch(&stored.entries, from);
            }
        } else if let Some(range) = stored.page(at.offset as usize / PAGE_SIZE) {
            for line in 0..range.len().div_ceil(64).min(6) {
                larder_base::prefetch(&stored.entries, range.start + line * 64);
            }
        }
    }

    /// The bytes that a request waits for, of the present filling. Where a living record with the `wanted` id and length of
    /// key is among them, it alone: nobody looks at the rest, and a search finds it at once.
    pub(super) fn span(&mut self, read: &FlashRead, wanted: (u64, usize)) -> Option<&[u8]> {
        let offset = self.offset_of(read.at.segment) + u64::from(read.at.offset);
        self.note(DeviceOp::Read { offset, len: read.at.len });
        self.bytes(read.at, Some(wanted))
    }

    /// The bytes of a verification, for which no request waits.
    pub(super) fn verify(&mut self, read: &FlashRead) -> Option<&[u8]> {
        let offset = self.offset_of(read.at.segment) + u64::from(read.at.offset);
        self.note(DeviceOp::BackgroundRead { offset, len: read.at.len });
        self.bytes(read.at, None)
    }

    fn bytes(&mut self, at: Location, wanted: Option<(u64, usize)>) -> Option<&[u8]> {
        let stored = self.segments.get(usize::from(at.segment))?;
        let len = at.len as usize;
        // An extent may run on into the next segments: all of it is kept where it begins.
        if !at.extent && at.offset as usize + len > self.segment_bytes as usize {
            return None;
        }
        if self.scratch.len() < len {
            self.scratch.resize(len, 0);
        }
        let out = &mut self.scratch[..len];
        if at.extent {
            let (head, _) = stored.entry(stored.extent(at.offset, self.segment_bytes)?);
            let end = head.restore(stored.seed, &self.contents, out)?;
            // What follows in the last page is never looked at.
            return Some(&self.scratch[..end]);
        }
        let page = at.offset as usize / PAGE_SIZE;
        if let Some(wanted) = wanted
            && let Some(end) = stored.restore_one(page, &self.contents, out, wanted)
        {
            return Some(&self.scratch[..end]);
        }
        stored.restore_page(page, &self.contents, out)?;
        Some(&self.scratch[..len])
    }
}

/// A simulation is not gone on with.
impl StateIo for Flash {
    fn keep_names(&mut self, _: &[Vec<u8>]) -> bool {
        true
    }
    fn keep_budget(&mut self, _: BudgetState) -> bool {
        true
    }
}

impl SegmentIo for Flash {
    type Buffer = Vec<u8>;

    fn begins_at(&mut self, first: u32) {
        self.first = first;
    }

    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        let first = std::mem::take(&mut self.first) as usize;
        let offset = self.offset_of(segment);
        self.note(DeviceOp::Write { offset, len: bytes.len() as u32 });
        let stored = self.segments.get_mut(usize::from(segment)).ok_or(IoFailed)?;
        stored.entries.clear();
        stored.pages.clear();
        stored.extents.clear();
        self.heads.clear();
        if first > 0 || Head::read(bytes).is_some_and(|head| head.len() > SMALL_MAX) {
            let mut at = first;
            while let Some(head) = bytes.get(at..).and_then(Head::read) {
                self.heads.push((at as u32, head));
                at += head.len().next_multiple_of(self.align);
            }
        } else {
            for (number, page) in bytes.chunks_exact(PAGE_SIZE).enumerate() {
                let mut at = 0;
                while let Some(head) = page.get(at..).and_then(Head::read) {
                    self.heads.push(((number * PAGE_SIZE + at) as u32, head));
                    at += head.len();
                }
            }
            stored.pages.resize(bytes.len() / PAGE_SIZE, 0);
        }
        // Which filling this is: the checksum of the first that is here as a whole tells.
        let whole = |at: u32, head: &Head| bytes.get(at as usize..at as usize + head.len());
        if let Some((head, record)) =
            self.heads.iter().find_map(|(at, head)| Some((head, whole(*at, head)?)))
        {
            let first = self.generation.saturating_sub(GENERATIONS);
            let found = (first..=self.generation + GENERATIONS).find_map(|generation| {
                let seed = Filling { salt: self.salt, segment, generation }.seed();
                (Some(checksum(seed, record)) == head.crc).then_some((generation, seed))
            });
            if let Some((generation, seed)) = found {
                stored.seed = seed;
                self.generation = self.generation.max(generation);
            }
        }
        for (at, head) in &mut self.heads {
            let Some(record) = whole(*at, head) else { continue };
            head.crc = head.crc.filter(|&crc| crc != checksum(stored.seed, record));
        }
        stored.cas = self.heads.iter().map(|(_, head)| head.cas).min().unwrap_or(0);
        stored.last = self.heads.iter().map(|(_, head)| head.last).max().unwrap_or(0);
        let mut page = 0;
        for (at, head) in &self.heads {
            let from = stored.entries.len() as u32;
            if stored.pages.is_empty() {
                stored.extents.push((*at, from));
            }
            while page < stored.pages.len() && page * PAGE_SIZE <= *at as usize {
                stored.pages[page] = from;
                page += 1;
            }
            stored.push(head);
        }
        let end = stored.entries.len() as u32;
        stored.pages[page..].fill(end);
        // Segments differ in how many objects they hold: growth by doubling would cost half as much again.
        stored.entries.shrink_to_fit();
        Ok(())
    }

    fn read(&mut self, segment: u16, bytes: &mut [u8]) -> Result<(), IoFailed> {
        let offset = self.offset_of(segment);
        self.note(DeviceOp::BackgroundRead { offset, len: bytes.len() as u32 });
        // The log reads a whole segment only to fill it anew.
        self.note(DeviceOp::Trim { offset, len: bytes.len() as u32 });
        let stored = self.segments.get(usize::from(segment)).ok_or(IoFailed)?;
        if stored.pages.is_empty() {
            let mut end = 0;
            for &(at, from) in &stored.extents {
                bytes[end..at as usize].fill(0);
                let out = bytes.get_mut(at as usize..).ok_or(IoFailed)?;
                let (head, _) = stored.entry(from as usize);
                if head.len() > out.len() {
                    // It goes on in the next segment. The bytes of its value here are of no use to anybody without those.
                    head.begin(&self.contents, out).ok_or(IoFailed)?;
                    return Ok(());
                }
                end =
                    at as usize + head.restore(stored.seed, &self.contents, out).ok_or(IoFailed)?;
            }
            bytes[end..].fill(0);
        } else {
            for (number, page) in bytes.chunks_exact_mut(PAGE_SIZE).enumerate() {
                stored.restore_page(number, &self.contents, page).ok_or(IoFailed)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use larder_base::{AppId, Expiry, HashKey, KeyHasher, Rng};
    use larder_engine::segment::SegmentBuilder;
    use larder_format::{Kind, RecordMeta};

    use super::*;

    /// An entry at most.
    const MAX_ENTRY: usize = 3 + 4 + 8 + 8 + 5 + OPTIONAL_LEN;

    /// What is written comes back byte for byte, dead records, gaps and all.
    #[test]
    fn segments_come_back_byte_for_byte() {
        let hasher = KeyHasher::new(HashKey([4; 16]));
        let mut rng = Rng::new(9);
        let contents = Contents::new(100_000);
        let mut flash = Flash::new(7, 4, 64 << 12, Contents::new(100_000));
        for round in 0..12u64 {
            let kind = if round % 3 == 2 { Kind::Large } else { Kind::Small };
            let segment = (round % 4) as u16 + 1;
            // A leap in the generations is met with checksums that are kept.
            let generation = if round < 8 { round + 1 } else { round + 1000 };
            let filling = Filling { salt: 7, segment, generation };
            let buffer = vec![0xAAu8; 64 << 12];
            let mut builder = SegmentBuilder::new(kind, filling, buffer);
            // Some segments are written hardly filled.
            let most = if round % 5 == 4 { 3 } else { u64::MAX };
            let mut offered = 0;
            while !builder.is_full_enough() && offered < most {
                offered += 1;
                let id = rng.below(300);
                let mut key = vec![0; 8 + rng.below(30) as usize];
                Contents::key(id, &mut key);
                let low = if kind == Kind::Large { SMALL_MAX as u64 } else { 0 };
                let high = if kind == Kind::Large { 60_000 } else { 900 };
                let value = contents.value(rng.range(low, high) as usize);
                let meta = RecordMeta {
                    cas: rng.next_u64(),
                    expiry: if rng.chance(0.5) { Expiry(9) } else { Expiry::NEVER },
                    flags: rng.below(2) as u32,
                    app: AppId(rng.below(3) as u16),
                    ..RecordMeta::default()
                };
                builder.offer(hasher.hash(&key), &meta, &key, value).ok();
            }
            let (bytes, fill) = builder.finish();
            flash.write(segment, &bytes).unwrap();
            let mut back = vec![0x55u8; bytes.len()];
            flash.read(segment, &mut back).unwrap();
            assert!(back == bytes, "round {round}, {fill:?}");
            search(&mut flash, &bytes, kind, filling);
            let stored = &flash.segments[usize::from(segment)];
            let most = MAX_ENTRY + if round < 8 { 0 } else { 4 };
            assert!(stored.entries.len() as u64 <= fill.records * most as u64);
        }
    }

    /// What is given to a search for one key leads to the same as the whole page, or extent, does.
    fn search(flash: &mut Flash, bytes: &[u8], kind: Kind, filling: Filling) {
        let mut found = 0;
        for walked in larder_format::walk(bytes, kind, filling) {
            let record = walked.record;
            let offset = record.value().as_ptr() as usize - bytes.as_ptr() as usize;
            let start = offset + record.value().len() - record.len();
            let extent = kind == Kind::Large;
            let (offset, len) = if extent {
                (start as u32, record.len() as u32)
            } else {
                ((start / PAGE_SIZE * PAGE_SIZE) as u32, PAGE_SIZE as u32)
            };
            let Filling { segment, generation, .. } = filling;
            let at = Location { segment, generation, offset, len, extent };
            for absent in [false, true] {
                let mut key = record.key().to_vec();
                // Another key of the same length, or one of the same id and another length.
                if absent && found % 2 == 0 {
                    key.push(Contents::FILLER);
                } else if absent {
                    key[7] ^= 1;
                }
                let id = number(&key[..ID_LEN]);
                let given = flash.bytes(at, Some((id, key.len()))).unwrap();
                let find = if extent { larder_format::find_extent } else { larder_format::find };
                match find(given, &key, filling) {
                    larder_format::Find::Found(r) => {
                        assert!(!absent || r.len() != record.len() || r.key() != record.key());
                        assert!(r.key() == key && r.value() == flash_value(r.value().len()));
                        found += 1;
                    }
                    larder_format::Find::Absent => assert!(absent, "{record:?}"),
                    larder_format::Find::Corrupt => panic!("{record:?}, absent: {absent}"),
                }
            }
        }
        assert!(found > 0);
    }

    /// Records that go on in the next segments are kept where they begin, and found there; what lies before a segment's first record
    /// is not taken for one.
    #[test]
    fn records_that_go_on_come_back_whole() {
        let hasher = KeyHasher::new(HashKey([4; 16]));
        let mut rng = Rng::new(10);
        let (size, segments) = (16 << 12, 40u16);
        let largest = Contents::LONGEST;
        let contents = Contents::new(largest);
        let mut flash = Flash::new(7, segments, size as u32, Contents::new(largest));
        let mut rest: Option<(larder_engine::segment::Rest, usize)> = None;
        let mut placed_all = Vec::new();
        for segment in 1..=segments {
            let generation = u64::from(segment);
            let filling = Filling { salt: 7, segment, generation };
            let mut b = SegmentBuilder::new(Kind::Large, filling, vec![0xAAu8; size]);
            let mut goes_on = None;
            if let Some((mut of, len)) = rest.take() {
                b.go_on(&mut of, contents.value(len));
                goes_on = (of.bytes() > 0).then_some((of, len));
            }
            while goes_on.is_none() && !b.is_full_enough() {
                let id = rng.below(1 << 40);
                let mut key = vec![0; 8 + rng.below(30) as usize];
                Contents::key(id, &mut key);
                let len = match rng.chance(0.1) {
                    _ if segment == segments => 2000,
                    true => rng.range(60_000, 200_000),
                    false => rng.range(2000, 30_000),
                } as usize;
                let len = if segment == 20 { largest } else { len };
                let meta =
                    RecordMeta { cas: rng.below(1 << 40), app: AppId(3), ..RecordMeta::default() };
                let value = contents.value(len);
                let Ok((placed, of)) =
                    b.offer_beyond(hasher.hash(&key), &meta, &key, value, 1 << 30)
                else {
                    continue;
                };
                placed_all.push((segment, placed, key, len));
                goes_on = of.map(|of| (of, len));
            }
            rest = goes_on;
            let (bytes, fill) = b.finish();
            flash.begins_at(fill.begins as u32);
            flash.write(segment, &bytes).unwrap();
            let mut back = vec![0x55u8; size];
            flash.read(segment, &mut back).unwrap();
            let (from, to) = (fill.begins as usize, fill.cut.map_or(size, |at| at as usize));
            assert!(back[from..to] == bytes[from..to], "segment {segment}");
            if fill.cut.is_some() {
                assert_eq!(
                    larder_format::claimed(&back[to..]),
                    larder_format::claimed(&bytes[to..])
                );
            }
        }
        let mut long = 0;
        for (segment, placed, key, len) in &placed_all {
            let offset = placed.offset();
            let bytes = larder_format::record_len(
                &RecordMeta { app: AppId(3), ..RecordMeta::default() },
                key.len(),
                *len,
            );
            let generation = u64::from(*segment);
            let at =
                Location { segment: *segment, generation, offset, len: bytes as u32, extent: true };
            let given = flash.bytes(at, Some((number(&key[..ID_LEN]), key.len()))).unwrap();
            let filling = Filling { salt: 7, segment: *segment, generation };
            let found = larder_format::find_extent(given, key, filling).found().unwrap();
            assert!(found.value() == contents.value(*len));
            long += usize::from(bytes > size - offset as usize);
        }
        assert!(long > 10, "{long} of {}", placed_all.len());
    }

    fn flash_value(len: usize) -> Vec<u8> {
        Contents::new(len).value(len).to_vec()
    }

    #[test]
    fn operations_are_told_to_who_asks() {
        let mut flash = Flash::new(0, 2, 4096, Contents::new(10));
        flash.write(1, &[0; 4096]).unwrap();
        flash.ops = Some(Vec::new());
        flash.write(2, &[0; 4096]).unwrap();
        let mut page = [1; 4096];
        flash.read(2, &mut page).unwrap();
        assert_eq!(page, [0; 4096]);
        assert!(flash.write(3, &[0; 4096]).is_err());
        let (offset, len) = (4096, 4096);
        let wanted = [
            DeviceOp::Write { offset, len },
            DeviceOp::BackgroundRead { offset, len },
            DeviceOp::Trim { offset, len },
        ];
        assert_eq!(flash.ops.unwrap()[..3], wanted);
    }
}
