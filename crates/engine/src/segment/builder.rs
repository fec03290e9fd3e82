//! Filling one segment in memory.

use larder_base::ObjectHash;
use larder_format::page::{EXTENT_ALIGN, Find, Kind, SMALL_MAX, find_extent, locate};
use larder_format::record::{
    Filling, MAX_HEAD_LEN, RecordMeta, encode_head, encode_into, mark_dead, record_len,
};
use larder_format::{PAGE_SIZE, find};

use crate::index::Place;

use super::{LONGEST_EXTENT, extent_length};

/// Functions that name a page for a key: 4 bits in the index.
pub const FUNCTIONS: u8 = 16;
/// A record goes on in the next segment if it is larger than this part of a segment: what smaller ones leave at the end is little.
const CUT_PART: usize = 64;
/// Bytes of it that lie in the segment where it begins, at least: all that comes before the value.
const LEAST_BEGUN: usize = 512;

const _: () = assert!(LEAST_BEGUN >= MAX_HEAD_LEN);

/// 256 bits: a few per record.
const SEEN_WORDS_PER_PAGE: usize = 4;

const _: () = assert!(PAGE_SIZE <= u16::MAX as usize && SMALL_MAX <= PAGE_SIZE);

/// Which of the pages that the functions name an object goes to. Measured (`larder bench packing`, 16 functions, as many
/// bytes offered as the segment has): the first fit fills 95.7 % with records of 280 bytes, all that pages can hold, and
/// 98.2 % with log-normal sizes, looking at 2 pages per object; the others look at 16 and fill less.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The first that has room (Flashield §4.2, with pages in place of byte offsets).
    #[default]
    FirstFit,
    /// The one with the least room that is enough. At one size all pages but a few fill up early, and late comers find
    /// none of those few.
    BestFit,
    /// The one with the most room. Keeps all pages equally full (the power of many choices; Azar et al., STOC '94): best
    /// at one size, but at mixed sizes what is left is spread thin over all pages.
    Emptiest,
}

/// Where an object was placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placed {
    /// In the page that this function of its hash names.
    Page {
        /// The lowest function that names that page, 0..16.
        function: u8,
        /// Where its record starts in the segment, bytes.
        offset: u32,
    },
    /// At an extent of its own.
    Extent {
        /// Where its record starts in the segment, in units of 64 bytes (22 bits).
        start64: u32,
        /// What a read must cover from there: [`extent_bytes`](super::extent_bytes). It may reach over the end of the segment.
        length: u16,
    },
}

impl Placed {
    /// Where the record starts in the segment, bytes.
    pub fn offset(self) -> u32 {
        match self {
            Placed::Page { offset, .. } => offset,
            Placed::Extent { start64, .. } => start64 * EXTENT_ALIGN as u32,
        }
    }
}

impl From<Placed> for Place {
    fn from(placed: Placed) -> Place {
        match placed {
            Placed::Page { function, .. } => Place::Page { function },
            Placed::Extent { start64, length } => Place::Extent { start64, length },
        }
    }
}

/// Why an object was not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// None of its pages, or no stretch at the end, has room, with those behind it on which it may go on. It may go into the next segment.
    #[error("no room for the object in this segment")]
    Full,
    /// Its record belongs into the other kind of segment.
    #[error("the object belongs into the other kind of segment")]
    OtherKind,
    /// Its extent would not fit into the index.
    #[error("the object is larger than the index can describe")]
    TooLarge,
}

/// When a segment counts as full enough to be written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FullMark {
    /// Free share of its bytes at or below which it is full, whatever is offered next.
    pub free_share: f64,
    /// Objects refused in a row that make it full: the sizes at hand do not fit any more.
    pub refusals: u32,
}

impl Default for FullMark {
    /// At 1 % free, sizes that still fit are getting rare; 16 refusals in a row say that those at hand do not.
    fn default() -> FullMark {
        FullMark { free_share: 0.01, refusals: 16 }
    }
}

/// What a segment holds and what filling it took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fill {
    /// Bytes of the segment.
    pub capacity: u64,
    /// Records placed, the dead included.
    pub records: u64,
    /// Their bytes.
    pub record_bytes: u64,
    /// Of these, keys and values.
    pub payload_bytes: u64,
    /// Records placed and marked dead since.
    pub dead: u64,
    /// Bytes of the dead.
    pub dead_bytes: u64,
    /// Bytes lost to the alignment of large records.
    pub padding: u64,
    /// Objects offered that belong into this kind of segment.
    pub offered: u64,
    /// Bytes of their records.
    pub offered_bytes: u64,
    /// Of the offered, refused as [`NoRoom::Full`].
    pub refused: u64,
    /// Pages looked at for room.
    pub tries: u64,
    /// Bytes before the first record that begins here: the end of one that began in an earlier segment.
    pub begins: u64,
    /// Where the record begins that goes on in the next segment, bytes; it is counted here as far as it lies here.
    pub cut: Option<u64>,
}

/// What is still to be laid down of a record that has been begun in a segment, and goes on in those behind it.
#[derive(Clone, Debug)]
pub struct Rest {
    head: [u8; MAX_HEAD_LEN],
    head_len: usize,
    /// Bytes of the record that lie in segments.
    done: usize,
    len: usize,
}

impl Rest {
    /// Bytes that are to follow.
    pub fn bytes(&self) -> usize {
        self.len - self.done
    }

    /// Lays down as much as `out` takes. The value is the one that the record was begun with.
    fn lay(&mut self, out: &mut [u8], value: &[u8]) -> usize {
        let taken = self.bytes().min(out.len());
        let out = &mut out[..taken];
        let of_head = self.head_len.saturating_sub(self.done).min(taken);
        if of_head > 0 {
            out[..of_head].copy_from_slice(&self.head[self.done..self.done + of_head]);
        }
        let from = (self.done + of_head).saturating_sub(self.head_len);
        out[of_head..].copy_from_slice(&value[from..from + taken - of_head]);
        self.done += taken;
        taken
    }
}

impl Fill {
    /// Share of the segment's bytes that are living records.
    pub fn utilisation(&self) -> f64 {
        (self.record_bytes - self.dead_bytes) as f64 / self.capacity as f64
    }

    /// Share of the segment's bytes that nothing has been placed in.
    pub fn free_share(&self) -> f64 {
        1.0 - (self.record_bytes + self.padding) as f64 / self.capacity as f64
    }
}

/// Fills the memory of one segment with objects.
///
/// A small object may go to any of the pages that the functions of its hash name; objects are packed inside a page from its
/// start. A large object goes behind the last one. The index is told of them when the segment is durable, not before,
/// so an object that changes until then is [removed](SegmentBuilder::remove) from the buffer or simply not published.
#[derive(Debug)]
pub struct SegmentBuilder<B> {
    kind: Kind,
    filling: Filling,
    buffer: B,
    choice: Choice,
    functions: u8,
    /// Small: bytes used of each page.
    levels: Vec<u16>,
    /// Small: one bit per hash that was placed, 256 bits per page. Says of nearly every object that no older version of it is
    /// here, without a walk over the headers of its page.
    seen: Vec<u64>,
    /// Large: where the next record goes, and at multiples of what.
    cursor: usize,
    align: usize,
    fill: Fill,
    refused_in_a_row: u32,
    mark: FullMark,
}

impl<B: AsRef<[u8]> + AsMut<[u8]>> SegmentBuilder<B> {
    /// A builder over the memory of a whole segment; what that memory holds does not matter.
    ///
    /// # Panics
    /// When the buffer is not a positive number of pages, or longer than 22 bits of 64 bytes can address.
    pub fn new(kind: Kind, filling: Filling, buffer: B) -> SegmentBuilder<B> {
        let len = buffer.as_ref().len();
        assert!(len > 0 && len.is_multiple_of(PAGE_SIZE), "segment of {len} bytes");
        assert!(len as u64 <= larder_format::geometry::MAX_SEGMENT_BYTES, "segment of {len} bytes");
        let pages = match kind {
            Kind::Small => len / PAGE_SIZE,
            Kind::Large => 0,
        };
        SegmentBuilder {
            kind,
            filling,
            buffer,
            choice: Choice::default(),
            functions: FUNCTIONS,
            levels: vec![0; pages],
            seen: vec![0; pages * SEEN_WORDS_PER_PAGE],
            cursor: 0,
            align: EXTENT_ALIGN,
            fill: Fill { capacity: len as u64, ..Fill::default() },
            refused_in_a_row: 0,
            mark: FullMark::default(),
        }
    }

    /// Another way to choose among the pages, or fewer functions (1..=16): to measure what they give.
    #[must_use]
    pub fn with_choice(mut self, choice: Choice, functions: u8) -> SegmentBuilder<B> {
        assert!((1..=FUNCTIONS).contains(&functions), "{functions} functions");
        self.choice = choice;
        self.functions = functions;
        self
    }

    /// Large records begin at multiples of `align` bytes, itself one of 64.
    #[must_use]
    pub fn with_align(mut self, align: usize) -> SegmentBuilder<B> {
        assert!(align > 0 && align.is_multiple_of(EXTENT_ALIGN), "records at multiples of {align}");
        self.align = align;
        self
    }

    /// Another mark for [`is_full_enough`](SegmentBuilder::is_full_enough).
    #[must_use]
    pub fn with_mark(mut self, mark: FullMark) -> SegmentBuilder<B> {
        self.mark = mark;
        self
    }

    /// Small or large.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Which filling this is.
    pub fn filling(&self) -> Filling {
        self.filling
    }

    /// What it holds so far.
    pub fn fill(&self) -> &Fill {
        &self.fill
    }

    /// Whether nothing has been placed.
    pub fn is_empty(&self) -> bool {
        self.fill.records == 0 && self.fill.begins == 0
    }

    /// Whether it is time to write it: little room is left, or what comes does not fit.
    pub fn is_full_enough(&self) -> bool {
        self.refused_in_a_row >= self.mark.refusals
            || self.fill.free_share() <= self.mark.free_share
    }

    /// Places an object. When the page it goes to already holds a record of the same key (an older version that was placed
    /// before the object changed), that one is marked dead: a page never shows two versions.
    ///
    /// # Errors
    /// See [`NoRoom`].
    pub fn offer(
        &mut self,
        hash: ObjectHash,
        meta: &RecordMeta,
        key: &[u8],
        value: &[u8],
    ) -> Result<Placed, NoRoom> {
        self.offer_beyond(hash, meta, key, value, 0).map(|(placed, _)| placed)
    }

    /// The same where a large record may go on in the segments that follow on the device, as far as `beyond` bytes. With the
    /// [`Rest`] this segment is full, and the builders of the next segments [go on](SegmentBuilder::go_on).
    ///
    /// # Errors
    /// See [`NoRoom`].
    pub fn offer_beyond(
        &mut self,
        hash: ObjectHash,
        meta: &RecordMeta,
        key: &[u8],
        value: &[u8],
        beyond: usize,
    ) -> Result<(Placed, Option<Rest>), NoRoom> {
        let len = record_len(meta, key.len(), value.len());
        let whole = self.buffer.as_ref().len();
        match self.kind {
            Kind::Small if len > SMALL_MAX => return Err(NoRoom::OtherKind),
            Kind::Large if len <= SMALL_MAX => return Err(NoRoom::OtherKind),
            Kind::Large if len > LONGEST_EXTENT => return Err(NoRoom::TooLarge),
            Kind::Small | Kind::Large => {}
        }
        self.fill.offered += 1;
        self.fill.offered_bytes += len as u64;
        let placed = match self.kind {
            Kind::Small => self.choose_page(hash, len),
            Kind::Large => self.choose_extent(len, beyond),
        };
        let Some(placed) = placed else {
            self.fill.refused += 1;
            self.refused_in_a_row += 1;
            return Err(NoRoom::Full);
        };
        self.refused_in_a_row = 0;
        let at = placed.offset() as usize;
        match self.kind {
            Kind::Small => {
                if self.see(hash) {
                    self.kill_in_page(at / PAGE_SIZE, key);
                }
                self.levels[at / PAGE_SIZE] += len as u16;
            }
            Kind::Large if at + len > whole => {
                let rest = self.begin(at, meta, key, value);
                return Ok((placed, Some(rest)));
            }
            Kind::Large => {
                let end = (at + len).next_multiple_of(self.align).min(self.buffer.as_ref().len());
                self.fill.padding += (end - at - len) as u64;
                self.cursor = end;
                self.buffer.as_mut()[at + len..end].fill(0);
            }
        }
        encode_into(&mut self.buffer.as_mut()[at..], meta, key, value, self.filling);
        self.fill.records += 1;
        self.fill.record_bytes += len as u64;
        self.fill.payload_bytes += (key.len() + value.len()) as u64;
        Ok((placed, None))
    }

    /// Begins a record that runs over the end.
    fn begin(&mut self, at: usize, meta: &RecordMeta, key: &[u8], value: &[u8]) -> Rest {
        let (head, head_len) = encode_head(meta, key, value, self.filling);
        let mut rest = Rest { head, head_len, done: 0, len: head_len + value.len() };
        let taken = rest.lay(&mut self.buffer.as_mut()[at..], value);
        self.cursor = self.buffer.as_ref().len();
        self.fill.records += 1;
        self.fill.record_bytes += taken as u64;
        self.fill.payload_bytes += (key.len() + taken.saturating_sub(head_len)) as u64;
        self.fill.cut = Some(at as u64);
        rest
    }

    /// Goes on with a record that was begun in the segment before, with the same value: the first thing that a segment holds.
    pub fn go_on(&mut self, rest: &mut Rest, value: &[u8]) {
        debug_assert!(self.is_empty() && self.kind == Kind::Large);
        let buffer = self.buffer.as_mut();
        let taken = rest.lay(buffer, value);
        let end = taken.next_multiple_of(self.align).min(buffer.len());
        buffer[taken..end].fill(0);
        self.cursor = end;
        self.fill.begins = end as u64;
        self.fill.record_bytes += taken as u64;
        self.fill.payload_bytes += taken as u64;
        self.fill.padding += (end - taken) as u64;
    }

    fn choose_page(&mut self, hash: ObjectHash, len: usize) -> Option<Placed> {
        let pages = self.levels.len() as u32;
        let most = (PAGE_SIZE - len) as u16;
        let mut best: Option<(u8, u32, u16)> = None;
        for function in 0..self.functions {
            let page = hash.page(function, pages);
            let level = self.levels[page as usize];
            self.fill.tries += 1;
            if level > most {
                continue;
            }
            // Strictly better only: of two functions that name the same page the lower one is kept.
            let better = best.is_none_or(|(_, _, so_far)| match self.choice {
                Choice::FirstFit => false,
                Choice::BestFit => level > so_far,
                Choice::Emptiest => level < so_far,
            });
            if better {
                best = Some((function, page, level));
            }
            let done = match self.choice {
                Choice::FirstFit => true,
                Choice::BestFit => level == most,
                Choice::Emptiest => level == 0,
            };
            if done {
                break;
            }
        }
        let (function, page, level) = best?;
        Some(Placed::Page { function, offset: page * PAGE_SIZE as u32 + u32::from(level) })
    }

    fn choose_extent(&mut self, len: usize, beyond: usize) -> Option<Placed> {
        self.fill.tries += 1;
        let whole = self.buffer.as_ref().len();
        let room = whole - self.cursor;
        let goes_on = len > whole / CUT_PART && room >= LEAST_BEGUN && len <= room + beyond;
        if len > room && !goes_on {
            return None;
        }
        let start64 = (self.cursor / EXTENT_ALIGN) as u32;
        extent_length(len).map(|length| Placed::Extent { start64, length })
    }

    /// The record of `key` at a place that [`offer`](SegmentBuilder::offer) returned, while the segment is in memory.
    pub fn find(&self, placed: Placed, key: &[u8]) -> Find<'_> {
        let bytes = self.buffer.as_ref();
        match placed {
            Placed::Page { offset, .. } => {
                let page = offset as usize / PAGE_SIZE;
                let start = page * PAGE_SIZE;
                let level = self.levels.get(page).map_or(0, |&l| usize::from(l));
                find(&bytes[start..start + level], key, self.filling)
            }
            Placed::Extent { .. } => find_extent(
                &bytes[(placed.offset() as usize).min(self.cursor)..self.cursor],
                key,
                self.filling,
            ),
        }
    }

    /// Marks the record of `key` at `placed` dead: it was deleted or overwritten before the segment was written. Its bytes
    /// are not reused. Returns whether it was there.
    pub fn remove(&mut self, placed: Placed, key: &[u8]) -> bool {
        match placed {
            Placed::Page { offset, .. } => self.kill_in_page(offset as usize / PAGE_SIZE, key),
            Placed::Extent { .. } => {
                let Some(len) = self.find(placed, key).found().map(|r| r.len()) else {
                    return false;
                };
                let at = placed.offset() as usize;
                self.kill(at, len)
            }
        }
    }

    /// Notes that an object of this hash is placed; whether one may have been before.
    fn see(&mut self, hash: ObjectHash) -> bool {
        let bits = self.seen.len() as u64 * 64;
        let bit = (u128::from(hash.fingerprint()) * u128::from(bits)) >> 64;
        let (word, mask) = ((bit / 64) as usize, 1 << (bit % 64));
        let before = self.seen[word] & mask != 0;
        self.seen[word] |= mask;
        before
    }

    fn kill_in_page(&mut self, page: usize, key: &[u8]) -> bool {
        let Some(&level) = self.levels.get(page) else { return false };
        let start = page * PAGE_SIZE;
        let used = &self.buffer.as_ref()[start..start + usize::from(level)];
        let Some(at) = locate(used, key) else { return false };
        self.kill(start + at.start, at.len())
    }

    fn kill(&mut self, at: usize, len: usize) -> bool {
        let killed = mark_dead(&mut self.buffer.as_mut()[at..at + len], self.filling);
        debug_assert!(killed, "a record was just found there");
        self.fill.dead += 1;
        self.fill.dead_bytes += len as u64;
        killed
    }

    /// Zeroes what is unused and gives back the memory, ready to be written, with what it holds.
    pub fn finish(mut self) -> (B, Fill) {
        let bytes = self.buffer.as_mut();
        match self.kind {
            Kind::Small => {
                for (page, &level) in bytes.chunks_exact_mut(PAGE_SIZE).zip(&self.levels) {
                    page[usize::from(level)..].fill(0);
                }
            }
            Kind::Large => bytes[self.cursor..].fill(0),
        }
        (self.buffer, self.fill)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use larder_base::{Expiry, HashKey, KeyHasher, Rng, UnixSecs};
    use larder_format::walk;

    use super::*;

    const FILLING: Filling = Filling { salt: 5, segment: 9, generation: 77 };

    fn hasher() -> KeyHasher {
        KeyHasher::new(HashKey([3; 16]))
    }

    fn meta(rng: &mut Rng) -> RecordMeta {
        RecordMeta {
            cas: rng.next_u64(),
            expiry: Expiry(rng.below(3) as u32 * 1_000_000),
            flags: rng.below(2) as u32,
            last_access: UnixSecs(9),
            fetched: rng.chance(0.5),
            ..RecordMeta::default()
        }
    }

    /// Every choice against a naive model that keeps each page as a list of lengths.
    #[test]
    fn small_segments_against_a_naive_model() {
        let hasher = hasher();
        for seed in 0..60 {
            let mut rng = Rng::new(seed);
            let pages = rng.range(1, 40) as u32;
            let functions = rng.range(1, 16) as u8;
            let choice = [Choice::FirstFit, Choice::BestFit, Choice::Emptiest][(seed % 3) as usize];
            let dirt = vec![0xa5u8; pages as usize * PAGE_SIZE];
            let mut builder =
                SegmentBuilder::new(Kind::Small, FILLING, dirt).with_choice(choice, functions);
            let mut model: Vec<Vec<usize>> = vec![Vec::new(); pages as usize];
            let mut placed_at = BTreeMap::new();
            for i in 0..pages * 30 {
                let key = format!("{seed}-{i}").into_bytes();
                let value = vec![i as u8; rng.below(900) as usize];
                let m = meta(&mut rng);
                let len = record_len(&m, key.len(), value.len());
                let hash = hasher.hash(&key);
                let rooms: Vec<(u8, u32, usize)> = (0..functions)
                    .map(|f| (f, hash.page(f, pages)))
                    .map(|(f, p)| (f, p, model[p as usize].iter().sum::<usize>()))
                    .filter(|&(_, _, used)| used + len <= PAGE_SIZE)
                    .collect();
                let want = match choice {
                    Choice::FirstFit => rooms.first(),
                    Choice::BestFit => {
                        rooms.iter().min_by_key(|&&(f, _, used)| (PAGE_SIZE - used, f))
                    }
                    Choice::Emptiest => rooms.iter().min_by_key(|&&(f, _, used)| (used, f)),
                };
                let got = builder.offer(hash, &m, &key, &value);
                match want {
                    None => assert_eq!(got, Err(NoRoom::Full)),
                    Some(&(f, p, used)) => {
                        let offset = p * PAGE_SIZE as u32 + used as u32;
                        assert_eq!(got, Ok(Placed::Page { function: f, offset }));
                        model[p as usize].push(len);
                        placed_at.insert(key, (got.unwrap(), value));
                    }
                }
            }
            for (key, (placed, value)) in &placed_at {
                assert_eq!(builder.find(*placed, key).found().unwrap().value(), value);
            }
            let (bytes, fill) = builder.finish();
            assert_eq!(fill.records as usize, placed_at.len());
            assert_eq!(fill.record_bytes as usize, model.iter().flatten().sum::<usize>());
            assert_eq!(fill.offered, u64::from(pages) * 30);
            assert_eq!(fill.offered - fill.refused, fill.records);
            let mut seen = walk(&bytes, Kind::Small, FILLING);
            assert_eq!(seen.by_ref().count(), placed_at.len());
            assert_eq!(seen.corrupt(), 0);
            for (key, (placed, value)) in &placed_at {
                let Placed::Page { function, .. } = placed else { panic!("{placed:?}") };
                let page = hasher.hash(key).page(*function, pages) as usize;
                let page = &bytes[page * PAGE_SIZE..][..PAGE_SIZE];
                assert_eq!(find(page, key, FILLING).found().unwrap().value(), value);
            }
        }
    }

    #[test]
    fn large_segments_against_a_naive_model() {
        for seed in 0..40 {
            let mut rng = Rng::new(seed);
            let size = rng.range(2, 64) as usize * PAGE_SIZE;
            let mut builder = SegmentBuilder::new(Kind::Large, FILLING, vec![0xa5u8; size]);
            let mut end = 0;
            let mut truth = BTreeMap::new();
            for i in 0..100u32 {
                let key = i.to_le_bytes();
                let value = vec![i as u8; rng.range(900, 9000) as usize];
                let m = meta(&mut rng);
                let len = record_len(&m, 4, value.len());
                let got = builder.offer(hasher().hash(&key), &m, &key, &value);
                let start = end / 64 * 64 + if end % 64 == 0 { 0 } else { 64 };
                if len <= SMALL_MAX {
                    assert_eq!(got, Err(NoRoom::OtherKind));
                } else if start + len > size {
                    assert_eq!(got, Err(NoRoom::Full));
                } else {
                    let length = (len as f64 / 4096.0).ceil() as u16;
                    let placed = Placed::Extent { start64: (start / 64) as u32, length };
                    assert_eq!(got, Ok(placed));
                    assert_eq!(builder.find(placed, &key).found().unwrap().value(), value);
                    end = start + len;
                    truth.insert(start, (key, value));
                }
            }
            let (bytes, fill) = builder.finish();
            assert_eq!(fill.records as usize, truth.len());
            let walked: BTreeMap<_, _> = walk(&bytes, Kind::Large, FILLING)
                .map(|w| {
                    (w.offset, (w.record.key().try_into().unwrap(), w.record.value().to_vec()))
                })
                .collect();
            assert_eq!(walked, truth);
        }
    }

    #[test]
    fn a_page_never_shows_two_versions() {
        let hash = hasher().hash(b"key");
        let mut b = SegmentBuilder::new(Kind::Small, FILLING, vec![1u8; PAGE_SIZE]);
        let m = RecordMeta::default();
        let old = b.offer(hash, &m, b"key", b"old").unwrap();
        let new = b.offer(hash, &m, b"key", b"new").unwrap();
        assert_ne!(old, new);
        assert_eq!(b.fill().dead, 1);
        assert_eq!(b.find(old, b"key").found().unwrap().value(), b"new");
        assert!(b.remove(new, b"key"));
        assert!(!b.remove(new, b"key"));
        assert!(matches!(b.find(new, b"key"), Find::Absent));
        let (bytes, fill) = b.finish();
        assert_eq!(walk(&bytes, Kind::Small, FILLING).count(), 0);
        assert_eq!((fill.records, fill.dead, fill.utilisation()), (2, 2, 0.0));
    }

    /// Few keys, placed over and over and removed: each page shows the version placed there last, unless removed.
    #[test]
    fn versions_and_removals_against_a_model() {
        for seed in 0..60 {
            let mut rng = Rng::new(1000 + seed);
            let pages = rng.range(1, 6) as u32;
            let mut b =
                SegmentBuilder::new(Kind::Small, FILLING, vec![3u8; pages as usize * PAGE_SIZE]);
            let mut model: BTreeMap<(u32, Vec<u8>), Vec<u8>> = BTreeMap::new();
            let mut places = Vec::new();
            let (mut placed_bytes, mut dead) = (0, 0);
            for version in 0..200u32 {
                let key = format!("k{}", rng.below(12)).into_bytes();
                if rng.chance(0.3) && !places.is_empty() {
                    let (placed, key): &(Placed, Vec<u8>) =
                        &places[rng.below(places.len() as u64) as usize];
                    let page = placed.offset() / PAGE_SIZE as u32;
                    let was = model.remove(&(page, key.clone())).is_some();
                    dead += u64::from(was);
                    assert_eq!(b.remove(*placed, key), was);
                    continue;
                }
                let value = vec![version as u8; rng.below(500) as usize];
                if let Ok(placed) =
                    b.offer(hasher().hash(&key), &RecordMeta::default(), &key, &value)
                {
                    let page = placed.offset() / PAGE_SIZE as u32;
                    placed_bytes +=
                        record_len(&RecordMeta::default(), key.len(), value.len()) as u64;
                    dead += u64::from(model.insert((page, key.clone()), value).is_some());
                    places.push((placed, key));
                }
            }
            for (placed, key) in &places {
                let want = model.get(&(placed.offset() / PAGE_SIZE as u32, key.clone()));
                assert_eq!(
                    b.find(*placed, key).found().map(|r| r.value()),
                    want.map(Vec::as_slice)
                );
            }
            let (bytes, fill) = b.finish();
            assert_eq!((fill.record_bytes, fill.dead), (placed_bytes, dead));
            let walked: BTreeMap<_, _> = walk(&bytes, Kind::Small, FILLING)
                .map(|w| {
                    (
                        ((w.offset / PAGE_SIZE) as u32, w.record.key().to_vec()),
                        w.record.value().to_vec(),
                    )
                })
                .collect();
            assert_eq!(walked, model);
        }
    }

    #[test]
    fn a_removed_extent_is_gone() {
        let mut b = SegmentBuilder::new(Kind::Large, FILLING, vec![1u8; 4 * PAGE_SIZE]);
        let m = RecordMeta::default();
        let one = b.offer(hasher().hash(b"a"), &m, b"a", &[7; 5000]).unwrap();
        let two = b.offer(hasher().hash(b"b"), &m, b"b", &[8; 5000]).unwrap();
        assert!(!b.remove(one, b"b"));
        assert!(b.remove(one, b"a"));
        assert!(!b.remove(one, b"a"));
        assert!(b.find(two, b"b").found().is_some());
        assert!(b.find(Placed::Extent { start64: 1 << 20, length: 1 }, b"b").found().is_none());
        let (bytes, _) = b.finish();
        assert_eq!(walk(&bytes, Kind::Large, FILLING).count(), 1);
    }

    /// Records that go on in the next segments: no gaps, and each is found in the bytes as they lie one behind the other.
    #[test]
    fn records_go_on_in_the_next_segment() {
        let mut rng = Rng::new(77);
        let size = 4 * PAGE_SIZE;
        let (mut bytes, mut truth, mut whole) = (Vec::new(), Vec::new(), 0);
        let mut rest: Option<(Rest, Vec<u8>)> = None;
        let segments = 60;
        for segment in 1..=segments {
            let filling = Filling { segment, ..FILLING };
            let mut b = SegmentBuilder::new(Kind::Large, filling, vec![0xEEu8; size]);
            let mut going_on = None;
            if let Some((mut of, value)) = rest.take() {
                b.go_on(&mut of, &value);
                assert!(!b.is_empty());
                going_on = (of.bytes() > 0).then_some((of, value));
            }
            let mut number = 0;
            while going_on.is_none() && !b.is_full_enough() {
                number += 1;
                let key = format!("{segment}/{number}").into_bytes();
                let most = if rng.chance(0.1) { 5 * size as u64 } else { 5000 };
                let value = vec![(segment + number) as u8; rng.range(1100, most) as usize];
                let beyond = usize::from(segments - segment) * size;
                let m = meta(&mut rng);
                let hash = hasher().hash(&key);
                let Ok((placed, of)) = b.offer_beyond(hash, &m, &key, &value, beyond) else {
                    assert!(beyond < 5 * size || b.fill().free_share() * (size as f64) < 512.0);
                    continue;
                };
                truth.push((segment, placed, key, value.clone(), m));
                going_on = of.map(|of| (of, value));
            }
            rest = going_on;
            let (buffer, fill) = b.finish();
            let end = fill.cut.map_or(size, |at| at as usize);
            let within = walk(&buffer, Kind::Large, filling).within(fill.begins as usize..end);
            whole += within.count();
            assert_eq!(fill.cut.is_some(), fill.begins < size as u64 && rest.is_some());
            bytes.extend(buffer);
        }
        assert!(rest.is_none() && truth.len() > 100, "{}", truth.len());
        let mut cut = 0;
        for (segment, placed, key, value, m) in &truth {
            let at = (usize::from(*segment) - 1) * size + placed.offset() as usize;
            let Placed::Extent { length, .. } = *placed else { panic!("{placed:?}") };
            let to = (at + crate::segment::extent_bytes(length) as usize).min(bytes.len());
            let filling = Filling { segment: *segment, ..FILLING };
            let found = find_extent(&bytes[at..to], key, filling).found().expect("it is there");
            assert!(found.value() == value && found.meta() == *m);
            cut += usize::from(placed.offset() as usize + found.len() > size);
        }
        assert_eq!(whole + cut, truth.len());
        assert!(cut > 20, "{cut}");
    }

    #[test]
    fn full_enough() {
        let mut b = SegmentBuilder::new(Kind::Small, FILLING, vec![0u8; 64 * PAGE_SIZE]);
        let mut i = 0u32;
        while !b.is_full_enough() {
            i += 1;
            let key = i.to_le_bytes();
            let _ = b.offer(hasher().hash(&key), &RecordMeta::default(), &key, &[0; 255]);
        }
        // 14 records of 280 bytes fill 95.7 % of a page: only the refusals can tell that it is full.
        assert!(b.fill().utilisation() > 0.94, "{:?}", b.fill());
    }
}
