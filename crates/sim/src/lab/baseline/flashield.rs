//! Flash as the Flashield paper keeps it (Eisenman et al., §3.2, §4.1, §5.3), behind LRU in DRAM: its look-up table and
//! Bloom filters in front of segments in which objects lie at any byte that one of sixteen hash functions names.
//!
//! What DRAM gives up and the filter admits waits in memory until there are twice the bytes of a segment; then the
//! segment is filled, the largest first, written in one piece, and what found no place waits for the next. Segments are
//! reclaimed in the order in which they were written; objects that were read on flash wait again then, up to a share of
//! the segment, all others are gone. The classifier is not part of it: `larder sim run`'s `hybrid` has that.
//!
//! Left open by the paper and filled in its favour: an object that is updated or deleted frees its entry at once.

use std::collections::BTreeMap;

use super::hybrid::{Account, Flash, Found, Hybrid, HybridConfig, baseline_by_field};
use super::paper_index::placement::Bitmap;
use super::paper_index::table::{Bloom, SLOT_BITS};
use super::{Baseline, BaselineError, Counts, Index, IndexSize, NONE};
use crate::device::DeviceOp;
use larder_trace::mix;

/// A record's header on flash.
const RECORD_HEADER: u32 = 24;
/// A look-up reads so much to see whose record is at a place.
const PAGE: u64 = 4096;
/// How much of a reclaimed segment may be kept, percent: as `larder kv` has it.
const KEEP_PERCENT: u64 = 20;
/// The table's slots name segments by 12 bits.
const MAX_SEGMENTS: u64 = 4095;

/// Parameters of the flash part.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PaperParams {
    /// Bytes of a segment (the paper: 512 MB).
    pub segment: u64,
    /// Functions that name an object's place in its segment (the paper: 16).
    pub functions: u32,
    /// Functions that name an object's slot in the table.
    pub choices: u32,
    /// Objects over slots that the table is sized for, by the mean object.
    pub load: f64,
}

impl Default for PaperParams {
    fn default() -> PaperParams {
        PaperParams { segment: 1 << 20, functions: 16, choices: 16, load: 0.95 }
    }
}

#[derive(Clone, Copy, Debug)]
struct Item {
    tag: u32,
    size: u32,
    segment: u32,
    /// Byte of the segment.
    offset: u32,
    /// Placing function.
    function: u8,
    read: bool,
    /// Its entry is gone.
    dead: bool,
}

struct Segment {
    filter: Bloom,
    items: Vec<u32>,
}

pub(super) struct Paper {
    params: PaperParams,
    salt: u64,
    /// In the order of their places; none before the first filling.
    segments: Vec<Option<Segment>>,
    /// The segment to fill next.
    cursor: usize,
    items: Vec<Item>,
    free: Vec<u32>,
    /// The item that each slot names. A real slot holds segment, function and CLOCK bits.
    slots: Vec<u32>,
    /// The item of each object on flash: what look-ups are checked against.
    index: Index,
    objects: u64,
    /// Objects that wait for a segment, and when they came.
    waiting: BTreeMap<u32, (u32, u64)>,
    waiting_bytes: u64,
    arrivals: u64,
    forced: u64,
    placed_bytes: u64,
}

impl Paper {
    fn hash(&self, tag: u32) -> u64 {
        mix(u64::from(tag) ^ self.salt)
    }

    fn slot(&self, hash: u64, choice: u32) -> usize {
        let h = mix(hash ^ u64::from(choice).rotate_left(40));
        ((u128::from(h) * self.slots.len() as u128) >> 64) as usize
    }

    /// Where in a segment the function puts the key; it may be too near the end.
    fn place(&self, hash: u64, function: u32) -> u64 {
        let h = mix(hash ^ u64::from(function).rotate_left(48));
        ((u128::from(h) * u128::from(self.params.segment)) >> 64) as u64
    }

    fn record(size: u32) -> u32 {
        size.saturating_add(RECORD_HEADER)
    }

    /// The item's entry, if it has one, is freed.
    fn forget(&mut self, at: u32) {
        let item = &mut self.items[at as usize];
        if std::mem::replace(&mut item.dead, true) {
            return;
        }
        let tag = item.tag;
        self.index.set(tag, NONE);
        self.objects -= 1;
        let hash = self.hash(tag);
        for choice in 0..self.params.choices {
            let slot = self.slot(hash, choice);
            if self.slots[slot] == at {
                self.slots[slot] = NONE;
                return;
            }
        }
    }

    fn enter(&mut self, at: u32) {
        let tag = self.items[at as usize].tag;
        let hash = self.hash(tag);
        let mut slot = 0;
        for choice in 0..self.params.choices {
            slot = self.slot(hash, choice);
            if self.slots[slot] == NONE {
                break;
            }
        }
        // "the last collided object is evicted to make space for the new key"
        let evicted = self.slots[slot];
        if evicted != NONE {
            self.forget(evicted);
            self.forced += 1;
        }
        self.slots[slot] = at;
        self.index.set(tag, at);
        self.objects += 1;
    }

    fn wait(&mut self, tag: u32, size: u32) {
        self.arrivals += 1;
        if let Some((old, _)) = self.waiting.insert(tag, (size, self.arrivals)) {
            self.waiting_bytes -= u64::from(Self::record(old));
        }
        self.waiting_bytes += u64::from(Self::record(size));
    }

    fn stop_waiting(&mut self, tag: u32) {
        if let Some((size, _)) = self.waiting.remove(&tag) {
            self.waiting_bytes -= u64::from(Self::record(size));
        }
    }

    /// Fills the next segment with what waits and writes it.
    fn fill(&mut self, account: &mut Account) {
        let start = self.cursor as u64 * self.params.segment;
        let len = self.params.segment as u32;
        if let Some(old) = self.segments[self.cursor].take() {
            account.background_read(start, len);
            account.record(DeviceOp::Trim { offset: start, len });
            let mut keep = self.params.segment * KEEP_PERCENT / 100;
            for at in old.items {
                let item = self.items[at as usize];
                if !item.dead {
                    self.forget(at);
                    let bytes = u64::from(Self::record(item.size));
                    if item.read && bytes <= keep {
                        keep -= bytes;
                        self.wait(item.tag, item.size);
                    }
                }
                self.free.push(at);
            }
        }
        let mut order: Vec<(u32, u32, u64)> =
            self.waiting.iter().map(|(&tag, &(size, came))| (tag, size, came)).collect();
        order.sort_by_key(|&(tag, size, came)| (std::cmp::Reverse(size), came, tag));
        let mut map = Bitmap::new(self.params.segment);
        let mut placed = Vec::new();
        for (tag, size, _) in order {
            let hash = self.hash(tag);
            let bytes = u64::from(Self::record(size));
            let fits = |f: &u32| {
                let from = self.place(hash, *f);
                from + bytes <= self.params.segment && map.is_free(from, from + bytes)
            };
            let Some(function) = (0..self.params.functions).find(fits) else { continue };
            let offset = self.place(hash, function);
            map.take(offset, offset + bytes);
            self.placed_bytes += bytes;
            let item = Item {
                tag,
                size,
                segment: self.cursor as u32,
                offset: offset as u32,
                function: function as u8,
                read: false,
                dead: false,
            };
            placed.push(item);
        }
        let mut segment = Segment {
            filter: Bloom::new(placed.len() as u64),
            items: Vec::with_capacity(placed.len()),
        };
        let mut entered = Vec::with_capacity(placed.len());
        for item in placed {
            self.stop_waiting(item.tag);
            segment.filter.add(self.hash(item.tag));
            let at = match self.free.pop() {
                Some(at) => {
                    self.items[at as usize] = item;
                    at
                }
                None => {
                    self.items.push(item);
                    self.items.len() as u32 - 1
                }
            };
            segment.items.push(at);
            entered.push(at);
        }
        account.write(start, len);
        self.segments[self.cursor] = Some(segment);
        self.cursor = (self.cursor + 1) % self.segments.len();
        for at in entered {
            self.enter(at);
        }
        // What is too large for the gaps would wait for ever: the oldest give way.
        while self.waiting_bytes >= 2 * self.params.segment {
            let Some(oldest) = self.waiting.iter().min_by_key(|(_, w)| w.1).map(|(&t, _)| t) else {
                break;
            };
            self.stop_waiting(oldest);
        }
    }
}

impl Flash for Paper {
    fn lookup(&mut self, tag: u32, account: &mut Account) -> Option<Found> {
        if let Some(&(size, _)) = self.waiting.get(&tag) {
            return Some(Found { size, in_memory: true });
        }
        let hash = self.hash(tag);
        for choice in 0..self.params.choices {
            let at = self.slots[self.slot(hash, choice)];
            if at == NONE {
                continue;
            }
            let item = self.items[at as usize];
            let holds = |s: &Segment| s.filter.may_hold(hash);
            if !self.segments[item.segment as usize].as_ref().is_some_and(holds) {
                continue;
            }
            let base = u64::from(item.segment) * self.params.segment;
            if item.tag == tag {
                account.read(base + u64::from(item.offset), Self::record(item.size));
                self.items[at as usize].read = true;
                return Some(Found { size: item.size, in_memory: false });
            }
            // Another's entry: where it would lead this key, another's bytes are.
            let page = self.place(hash, u32::from(item.function)) / PAGE * PAGE;
            account.read(base + page, PAGE as u32);
            account.counts.false_reads += 1;
        }
        None
    }

    fn contains(&self, tag: u32) -> bool {
        self.index.get(tag) != NONE || self.waiting.contains_key(&tag)
    }

    fn fits(&self, size: u32) -> bool {
        u64::from(Self::record(size)) <= self.params.segment / 2
    }

    fn insert(&mut self, tag: u32, size: u32, account: &mut Account) {
        self.wait(tag, size);
        while self.waiting_bytes >= 2 * self.params.segment {
            self.fill(account);
        }
    }

    fn remove(&mut self, tag: u32, _: &mut Account) {
        self.stop_waiting(tag);
        let at = self.index.get(tag);
        if at != NONE {
            self.forget(at);
        }
    }

    fn index_size(&self) -> IndexSize {
        let filters: u64 = self.segments.iter().flatten().map(|s| s.filter.memory_bytes()).sum();
        let slots = (self.slots.len() as u64 * u64::from(SLOT_BITS)).div_ceil(8);
        IndexSize { bytes: slots + filters, objects: self.objects }
    }

    fn record_bytes(&self) -> Option<u64> {
        Some(self.placed_bytes)
    }
}

/// DRAM before Flashield's flash. What waits for a segment, up to two segments' bytes, is DRAM on top of the configured.
pub struct FlashieldPaper(Hybrid<Paper>);

impl FlashieldPaper {
    /// An empty cache.
    ///
    /// # Errors
    /// Less flash than two segments or more than 4095, functions or choices out of range, no DRAM, a filter that cannot be
    /// set up.
    pub fn new(
        config: &HybridConfig,
        params: PaperParams,
    ) -> Result<FlashieldPaper, BaselineError> {
        let bad = |what, value, must: &str| {
            Err(BaselineError::Size { what, value, must: must.to_owned() })
        };
        if !(16 << 10..=1 << 30).contains(&params.segment) || !params.segment.is_multiple_of(PAGE) {
            let must = "a multiple of 4 KiB from 16 KiB to 1 GiB";
            return bad("segment", params.segment, must);
        }
        let segments = config.flash / params.segment;
        if !(2..=MAX_SEGMENTS).contains(&segments) {
            let must = format!("from 2 to {MAX_SEGMENTS} segments of {} bytes", params.segment);
            return bad("flash", config.flash, &must);
        }
        if !(1..=256).contains(&params.functions) {
            return bad("functions", u64::from(params.functions), "from 1 to 256");
        }
        if !(1..=64).contains(&params.choices) {
            return bad("choices", u64::from(params.choices), "from 1 to 64");
        }
        if !(params.load > 0.0 && params.load <= 1.0) {
            let must = "above 0 and at most 100";
            return bad("load, percent,", (params.load * 100.0) as u64, must);
        }
        let objects = config.flash / (config.mean_object.max(1) + u64::from(RECORD_HEADER));
        let slots = (objects as f64 / params.load).ceil().clamp(64.0, f64::from(u32::MAX));
        let paper = Paper {
            params,
            salt: mix(config.seed ^ 0x5a17),
            segments: (0..segments).map(|_| None).collect(),
            cursor: 0,
            items: Vec::new(),
            free: Vec::new(),
            slots: vec![NONE; slots as usize],
            index: Index::default(),
            objects: 0,
            waiting: BTreeMap::new(),
            waiting_bytes: 0,
            arrivals: 0,
            forced: 0,
            placed_bytes: 0,
        };
        Ok(FlashieldPaper(Hybrid::new(config, paper)?))
    }

    /// Objects evicted since all their slots were taken.
    pub fn forced_evictions(&self) -> u64 {
        self.0.flash.forced
    }
}

baseline_by_field!(FlashieldPaper);

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use larder_base::Rng;

    use super::*;
    use crate::lab::baseline::admission;

    fn cache(dram: u64, segments: u64, params: PaperParams, mean: u64) -> FlashieldPaper {
        let config = HybridConfig {
            dram,
            flash: segments * params.segment,
            admission: admission("all").unwrap(),
            mean_object: mean,
            seed: 5,
        };
        FlashieldPaper::new(&config, params).unwrap()
    }

    fn small(choices: u32, load: f64) -> PaperParams {
        PaperParams { segment: 64 << 10, choices, load, ..PaperParams::default() }
    }

    /// Walks everything: no two records overlap, every object that is to be found is named by one slot, no other is.
    fn validate(cache: &FlashieldPaper) {
        let p = &cache.0.flash;
        let mut named: BTreeMap<u32, u32> = BTreeMap::new();
        for &at in p.slots.iter().filter(|&&at| at != NONE) {
            assert!(!p.items[at as usize].dead);
            *named.entry(at).or_default() += 1;
        }
        assert!(named.values().all(|&n| n == 1));
        assert_eq!(named.len() as u64, p.objects);
        let mut living = 0;
        for (number, segment) in p.segments.iter().enumerate() {
            let Some(segment) = segment else { continue };
            let mut spans: Vec<(u32, u32)> = Vec::new();
            for &at in &segment.items {
                let item = &p.items[at as usize];
                assert_eq!(item.segment as usize, number);
                let hash = p.hash(item.tag);
                assert_eq!(p.place(hash, u32::from(item.function)), u64::from(item.offset));
                assert!(segment.filter.may_hold(hash));
                spans.push((item.offset, item.offset + Paper::record(item.size)));
                if !item.dead {
                    living += 1;
                    assert_eq!(p.index.get(item.tag), at);
                    assert!(!p.waiting.contains_key(&item.tag));
                }
            }
            spans.sort_unstable();
            assert!(spans.windows(2).all(|w| w[0].1 <= w[1].0));
            assert!(spans.last().is_none_or(|s| u64::from(s.1) <= p.params.segment));
        }
        assert_eq!(living, p.objects);
        let waits: u64 = p.waiting.values().map(|w| u64::from(Paper::record(w.0))).sum();
        assert_eq!(waits, p.waiting_bytes);
    }

    #[test]
    fn what_is_found_is_what_was_put_there() {
        for (seed, choices, load) in [(1, 16, 0.7), (2, 2, 0.9), (3, 1, 0.5)] {
            let mut rng = Rng::new(seed);
            let mut cache = cache(20_000, 6, small(choices, load), 300);
            let mut sizes: BTreeMap<u32, u32> = BTreeMap::new();
            let mut hits = 0u64;
            for step in 0..40_000u32 {
                let tag = (rng.below(60) * rng.below(60)) as u32;
                if rng.chance(0.02) {
                    cache.remove(tag);
                    sizes.remove(&tag);
                    assert!(!cache.0.flash.contains(tag));
                } else {
                    let fresh = 40 + rng.below(700) as u32;
                    let size = match sizes.get(&tag) {
                        Some(&size) if !rng.chance(0.05) => size,
                        _ => fresh,
                    };
                    let known = sizes.insert(tag, size);
                    let hit = cache.request(tag, size);
                    hits += u64::from(hit);
                    assert!(!hit || known == Some(size), "an old version answered");
                }
                if step % 4000 == 0 {
                    validate(&cache);
                }
            }
            validate(&cache);
            let c = cache.counts();
            assert_eq!(c.hits, hits);
            assert!(c.flash_writes > 20 && c.hits > c.hits_dram, "{c:?}");
            // A Bloom filter of 10 bits and 7 functions errs in 0.8 % of its answers.
            let hits_flash = c.flash_reads - c.false_reads;
            assert!(c.false_reads < hits_flash / 5, "{c:?}");
            assert!(cache.forced_evictions() > 0 || choices == 16, "{choices} choices");
        }
    }

    #[test]
    fn segments_fill_as_the_paper_says_and_the_index_is_as_large() {
        let params = PaperParams { segment: 256 << 10, ..PaperParams::default() };
        let mut cache = cache(1 << 20, 16, params, 300);
        cache.record_device_ops();
        let mut rng = Rng::new(9);
        let mut sizes = Vec::new();
        for _ in 0..60_000 {
            let normal = (0..12).map(|_| rng.unit()).sum::<f64>() - 6.0;
            sizes.push((5.0 + 1.2 * normal).exp().clamp(20.0, 9000.0) as u32);
        }
        for (tag, &size) in sizes.iter().enumerate() {
            cache.request(tag as u32, size);
        }
        let c = cache.counts();
        let share = cache.0.flash.placed_bytes as f64 / c.flash_bytes as f64;
        // Twice the bytes offered, sixteen functions, sizes that spread: nearly all is used (§5.3).
        assert!((0.88..1.0).contains(&share), "{share}");
        let index = cache.index_size().unwrap();
        assert!((3.4..6.0).contains(&index.per_object()), "{index:?} {}", index.per_object());
        let mut ops = Vec::new();
        cache.take_device_ops(&mut ops);
        let written = ops.iter().filter(|op| matches!(op, DeviceOp::Write { .. })).count() as u64;
        assert_eq!(written, c.flash_writes);
        // In turn, a whole segment each.
        for (i, op) in ops.iter().filter(|op| matches!(op, DeviceOp::Write { .. })).enumerate() {
            let offset = (i as u64 % 16) * params.segment;
            assert_eq!(*op, DeviceOp::Write { offset, len: 256 << 10 });
        }
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let config = HybridConfig {
            dram: 1 << 20,
            flash: 16 << 20,
            admission: admission("all").unwrap(),
            mean_object: 300,
            seed: 1,
        };
        let bad = |params| FlashieldPaper::new(&config, params).err().unwrap().to_string();
        let good = PaperParams::default();
        assert!(bad(PaperParams { segment: 5000, ..good }).starts_with("segment is 5000"));
        assert!(bad(PaperParams { segment: 16 << 20, ..good }).starts_with("flash is 16777216"));
        assert!(bad(PaperParams { functions: 0, ..good }).starts_with("functions is 0"));
        assert!(bad(PaperParams { choices: 65, ..good }).starts_with("choices is 65"));
        assert!(bad(PaperParams { load: f64::NAN, ..good }).starts_with("load"));
    }
}
