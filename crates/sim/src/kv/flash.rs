//! The simulated cache's flash: what segments hold, with the bytes of values left out.
//!
//! Every key is an id of eight bytes and a filler, every value the start of one pattern ([`Contents`]). So a record is
//! its header and its id; the rest is put back when it is read, byte for byte. 29 to 39 bytes an object, whatever
//! its size.

use std::sync::Arc;

use larder_engine::kv::api::FlashRead;
use larder_engine::kv::{IoFailed, SegmentIo};
use larder_format::PAGE_SIZE;
use larder_format::page::{EXTENT_ALIGN, SMALL_MAX};
use larder_format::record::FIXED_LEN;

/// Bytes of an object's id, the start of its key.
pub(super) const ID_LEN: usize = 8;
const FILLER: u8 = b'k';
/// A dead record, in the header's bits (the layout is in `larder_format::record`).
const DEAD: u8 = 1 << 6;

/// What all keys and values are made of.
#[derive(Clone)]
pub(super) struct Contents {
    pattern: Arc<[u8]>,
}

impl Contents {
    /// For values of up to `longest` bytes.
    pub(super) fn new(longest: usize) -> Contents {
        Contents { pattern: (0..longest).map(|i| ((i * 31) >> 3) as u8).collect() }
    }

    /// The value of this length.
    #[inline]
    pub(super) fn value(&self, len: usize) -> &[u8] {
        &self.pattern[..len]
    }

    /// The key of this id, `key.len()` bytes and at least [`ID_LEN`].
    #[inline]
    pub(super) fn key(id: u64, key: &mut [u8]) {
        key[..ID_LEN].copy_from_slice(&id.to_le_bytes());
        key[ID_LEN..].fill(FILLER);
    }
}

/// The lengths in a record's header.
#[derive(Clone, Copy)]
struct Head {
    header: usize,
    key: usize,
    value: usize,
}

impl Head {
    /// `None` where no record starts.
    #[inline]
    fn read(bytes: &[u8]) -> Option<Head> {
        let fixed: &[u8; FIXED_LEN] = bytes.first_chunk()?;
        let (key, bits) = (usize::from(fixed[7]), fixed[8]);
        let optional = [(3, 4), (4, 4), (5, 2)];
        let optional: usize =
            optional.iter().map(|&(bit, len)| usize::from(bits >> bit & 1) * len).sum();
        let value =
            usize::from(fixed[4]) | usize::from(fixed[5]) << 8 | usize::from(fixed[6]) << 16;
        (key >= ID_LEN).then_some(Head { header: FIXED_LEN + optional, key, value })
    }

    /// Bytes that are kept.
    fn kept(self) -> usize {
        self.header + ID_LEN
    }

    /// Bytes of the record.
    fn len(self) -> usize {
        self.header + self.key + self.value
    }
}

#[derive(Default)]
struct Stored {
    /// Headers and ids, in the order of their places.
    heads: Vec<u8>,
    /// Small records: where in `heads` each page's begin; a segment of large ones has none.
    pages: Vec<u32>,
    /// Large records: where each is, and where in `heads`.
    extents: Vec<(u32, u32)>,
}

/// What the drive below is told, in the order it happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceOp {
    /// A request waits for these bytes.
    Read {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// The cache reads these bytes, and no request waits.
    BackgroundRead {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// The cache writes these bytes, and no request waits.
    Write {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
    /// The cache has no use for these bytes any more.
    Trim {
        /// From where.
        offset: u64,
        /// How many.
        len: u32,
    },
}

/// The segments of one device.
pub(super) struct Flash {
    segments: Vec<Stored>,
    segment_bytes: u32,
    contents: Contents,
    scratch: Vec<u8>,
    /// What happened since it was last emptied, when anyone asks.
    pub(super) ops: Option<Vec<DeviceOp>>,
}

impl Flash {
    pub(super) fn new(segments: u16, segment_bytes: u32, contents: Contents) -> Flash {
        let segments = (0..=segments).map(|_| Stored::default()).collect();
        Flash { segments, segment_bytes, contents, scratch: Vec::new(), ops: None }
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
            |s: &Stored| s.heads.capacity() + s.pages.capacity() * 4 + s.extents.capacity() * 8;
        self.segments.iter().map(|s| stored(s) + size_of::<Stored>()).sum::<usize>()
            + self.contents.pattern.len()
            + self.scratch.capacity()
    }

    /// The bytes that a request waits for, of the present filling. Where a living record of `wanted` is among them,
    /// the other records' values may be anything: nobody looks at them.
    pub(super) fn span(&mut self, read: &FlashRead, wanted: Option<u64>) -> Option<&[u8]> {
        let offset = self.offset_of(read.at.segment) + u64::from(read.at.offset);
        self.note(DeviceOp::Read { offset, len: read.at.len });
        self.bytes(read, wanted)
    }

    /// The bytes of a verification, for which no request waits.
    pub(super) fn verify(&mut self, read: &FlashRead) -> Option<&[u8]> {
        let offset = self.offset_of(read.at.segment) + u64::from(read.at.offset);
        self.note(DeviceOp::BackgroundRead { offset, len: read.at.len });
        self.bytes(read, None)
    }

    fn bytes(&mut self, read: &FlashRead, wanted: Option<u64>) -> Option<&[u8]> {
        let at = read.at;
        let stored = self.segments.get(usize::from(at.segment))?;
        let len = at.len as usize;
        if at.offset as usize + len > self.segment_bytes as usize {
            return None;
        }
        if self.scratch.len() < len {
            self.scratch.resize(len, 0);
        }
        let out = &mut self.scratch[..len];
        if stored.pages.is_empty() {
            let found = stored.extents.binary_search_by_key(&at.offset, |e| e.0).ok()?;
            let head = &stored.heads[stored.extents[found].1 as usize..];
            let end = restore(head, &self.contents, out, true)?.1;
            out[end..].fill(0);
        } else {
            let page = at.offset as usize / PAGE_SIZE;
            let range = page_range(stored, page)?;
            let heads = &stored.heads[range];
            let whole = !wanted.is_some_and(|id| holds(heads, id));
            restore_page(heads, &self.contents, out, whole, wanted)?;
        }
        Some(&self.scratch[..len])
    }
}

fn page_range(stored: &Stored, page: usize) -> Option<std::ops::Range<usize>> {
    let start = *stored.pages.get(page)? as usize;
    let end = stored.pages.get(page + 1).map_or(stored.heads.len(), |&e| e as usize);
    Some(start..end)
}

fn id_in(head: &[u8], lengths: Head) -> u64 {
    let bytes: [u8; ID_LEN] =
        head[lengths.header..lengths.kept()].try_into().unwrap_or([0; ID_LEN]);
    u64::from_le_bytes(bytes)
}

/// Whether a living record of `id` is among the heads.
fn holds(mut heads: &[u8], id: u64) -> bool {
    while let Some(lengths) = Head::read(heads) {
        if heads[8] & DEAD == 0 && id_in(heads, lengths) == id {
            return true;
        }
        heads = &heads[lengths.kept()..];
    }
    false
}

/// Puts the record of the first head back to the start of `out`. Returns the bytes of head and record; `None` where
/// there is none or it does not fit.
fn restore(
    head: &[u8],
    contents: &Contents,
    out: &mut [u8],
    value: bool,
) -> Option<(usize, usize)> {
    let lengths = Head::read(head)?;
    let (kept, len) = (lengths.kept(), lengths.len());
    let out = out.get_mut(..len)?;
    out[..kept].copy_from_slice(&head[..kept]);
    let value_at = lengths.header + lengths.key;
    out[kept..value_at].fill(FILLER);
    if value {
        out[value_at..].copy_from_slice(contents.value(lengths.value));
    }
    Some((kept, len))
}

fn restore_page(
    mut heads: &[u8],
    contents: &Contents,
    out: &mut [u8],
    whole: bool,
    wanted: Option<u64>,
) -> Option<()> {
    let mut at = 0;
    while let Some(lengths) = Head::read(heads) {
        let value = whole || wanted == Some(id_in(heads, lengths));
        let (kept, len) = restore(heads, contents, &mut out[at..], value)?;
        heads = &heads[kept..];
        at += len;
    }
    out[at..].fill(0);
    Some(())
}

impl SegmentIo for Flash {
    type Buffer = Vec<u8>;

    fn write(&mut self, segment: u16, bytes: &[u8]) -> Result<(), IoFailed> {
        let offset = self.offset_of(segment);
        self.note(DeviceOp::Write { offset, len: bytes.len() as u32 });
        let Stored { heads, pages, extents } =
            self.segments.get_mut(usize::from(segment)).ok_or(IoFailed)?;
        heads.clear();
        pages.clear();
        extents.clear();
        if Head::read(bytes).is_some_and(|head| head.len() > SMALL_MAX) {
            let mut at = 0;
            while let Some(head) = bytes.get(at..).and_then(Head::read) {
                extents.push((at as u32, heads.len() as u32));
                heads.extend_from_slice(&bytes[at..at + head.kept()]);
                at += head.len().next_multiple_of(EXTENT_ALIGN);
            }
        } else {
            for page in bytes.chunks_exact(PAGE_SIZE) {
                pages.push(heads.len() as u32);
                let mut rest = page;
                while let Some(head) = Head::read(rest) {
                    heads.extend_from_slice(&rest[..head.kept()]);
                    rest = &rest[head.len()..];
                }
            }
        }
        // Segments differ in how many objects they hold: growth by doubling would cost half as much again.
        heads.shrink_to(heads.len() + heads.len() / 16);
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
            for &(at, head) in &stored.extents {
                bytes[end..at as usize].fill(0);
                let head = &stored.heads[head as usize..];
                let out = bytes.get_mut(at as usize..).ok_or(IoFailed)?;
                end = at as usize + restore(head, &self.contents, out, true).ok_or(IoFailed)?.1;
            }
            bytes[end..].fill(0);
        } else {
            for (number, page) in bytes.chunks_exact_mut(PAGE_SIZE).enumerate() {
                let range = page_range(stored, number).ok_or(IoFailed)?;
                let heads = &stored.heads[range];
                restore_page(heads, &self.contents, page, true, None).ok_or(IoFailed)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use larder_base::{AppId, Expiry, HashKey, KeyHasher, Rng};
    use larder_engine::segment::SegmentBuilder;
    use larder_format::record::OPTIONAL_LEN;
    use larder_format::{Filling, Kind, RecordMeta};

    use super::*;

    /// Header and id at most.
    const MAX_HEAD: usize = FIXED_LEN + OPTIONAL_LEN + ID_LEN;

    /// What is written comes back byte for byte, dead records, gaps and all.
    #[test]
    fn segments_come_back_byte_for_byte() {
        let hasher = KeyHasher::new(HashKey([4; 16]));
        let mut rng = Rng::new(9);
        let contents = Contents::new(100_000);
        let mut flash = Flash::new(4, 64 << 12, Contents::new(100_000));
        for round in 0..12u64 {
            let kind = if round % 3 == 2 { Kind::Large } else { Kind::Small };
            let segment = (round % 4) as u16 + 1;
            let filling = Filling { salt: 7, segment, generation: round + 1 };
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
            let stored = &flash.segments[usize::from(segment)];
            assert!(stored.heads.len() as u64 <= fill.records * MAX_HEAD as u64);
        }
    }

    #[test]
    fn operations_are_told_to_who_asks() {
        let mut flash = Flash::new(2, 4096, Contents::new(10));
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
