//! Fully associative placement: a log of segments, 15 bytes of DRAM a slot, and about 90 a segment.
//!
//! ```text
//! entry    64 bits   checksum 24 | line + 1 40      one store makes a line or takes it away
//!                    line + 1 = 0: no line; checksum 0: free, 1: held
//! hint      8 bits   what the replacement policy remembers of the slot
//! index   5.33 bytes hash table from lines to slots, made anew when the map is attached
//! ```
//!
//! Lines go to the next slot of the open segment, so that flash is written segment by segment from its beginning to its
//! end. Nothing is written in place: a line that is written again goes to a new slot, and leaves a hole. Free segments
//! come from the cleaner, which works ahead: as long as fewer than a few are free it takes a closed segment (the one
//! closed first, the emptiest, or the one with the best ratio of benefit to cost), and line by line copies it to
//! another or drops it. Who says which, [`EvictionBy`] does:
//!
//! * `cache`: the replacement policy drops a line for each that comes beyond what the cache may hold (all slots less a
//!   reserve of an eighth), and every line that the cleaner meets moves;
//! * `gc`: the cleaner keeps the hottest lines of its segment, as many as a share of what it cleans allows on the average
//!   (what one segment leaves of it is for the next), and drops the rest. No reserve is needed but the segments being
//!   worked on.
//!
//! The replacement policy sees groups of up to 32 neighbouring slots, and a hand that goes over them
//! ([`SlotPolicy::next_group`]).
//!
//! In shared memory the entries, the hints and the times when segments were closed outlive the process.

use larder_base::Words;
use larder_policy::block::{EvictionBy, MOST_WAYS, SlotBits, SlotPolicy, Survivors};

use super::super::address::Placing;
use super::super::api::{LineId, SlotId, Sum};
use super::index::Index;
use super::segments::{Found, Head, Segments};
use super::{BadEntry, Choice, Clean, Making, Rival, Slot, Want};

const LINE_BITS: u32 = 40;
const LINE_MASK: u64 = (1 << LINE_BITS) - 1;
const FREE: u64 = 0;
const HELD: u64 = 1 << LINE_BITS;
/// Fewest segments of a shard: two are written, a few are free, and some must be left for lines.
pub const LEAST_SEGMENTS: u32 = 8;
/// Groups that the hand passes before a victim is given up.
const HAND: u32 = 64;

fn encode(line: LineId, sum: Sum) -> u64 {
    u64::from(sum.0 & Sum::MASK) << LINE_BITS | (line.0 + 1) & LINE_MASK
}

fn decode(entry: u64) -> Slot {
    match (entry & LINE_MASK, entry) {
        (0, FREE) => Slot::Free,
        (0, _) => Slot::Held,
        (line, _) => Slot::Line(LineId(line - 1)),
    }
}

/// The hints, a byte a slot.
struct Hints<'a>(&'a mut Words);

impl SlotBits for Hints<'_> {
    fn get(&self, slot: u64) -> u8 {
        hint(self.0, slot)
    }

    fn set(&mut self, slot: u64, bits: u8) {
        let (word, shift) = ((slot / 8) as usize, 8 * (slot % 8));
        let rest = self.0.load(word) & !(0xff << shift);
        self.0.store(word, rest | u64::from(bits) << shift);
    }
}

fn hint(words: &Words, slot: u64) -> u8 {
    (words.load((slot / 8) as usize) >> (8 * (slot % 8))) as u8
}

/// A segment that is being cleaned.
#[derive(Debug)]
struct Cleaning {
    segment: u32,
    /// The next slot of it to be looked at.
    next: u32,
    survivors: Survivors,
    /// Lines on their way, and lines that have left it or are to be copied.
    copying: u32,
    copied: u32,
}

/// The map of one shard whose slots are a log.
#[derive(Debug)]
pub struct Full {
    entries: Words,
    /// Hints of the slots, then the time when each segment was closed.
    hints: Words,
    index: Index,
    placing: Placing,
    shard: u32,
    count: u32,
    lines: u32,
    making: Making,
    policy: SlotPolicy,
    /// From [`Full::begin`] on.
    segments: Option<Segments>,
    cleaning: Option<Cleaning>,
    cleaned: u64,
    /// Lines that the cleaner may keep.
    allowance: u32,
    /// Segments in a row whose cleaning gave no room: all of it was to be kept.
    fruitless: u32,
}

impl Full {
    /// Words of entries and of hints.
    pub fn words(segments: u32, lines: u32) -> (usize, usize) {
        let slots = segments as usize * lines as usize;
        (slots, slots.div_ceil(8) + segments as usize)
    }

    /// A map in `entries` and `hints`, which are zero or were one of the same shape: number of segments, and their lines.
    ///
    /// # Panics
    /// If the segments are fewer than [`LEAST_SEGMENTS`], have no power of two of lines, or are more than 2^32 slots.
    pub fn new(
        entries: Words,
        hints: Words,
        placing: Placing,
        shard: u32,
        (count, lines): (u32, u32),
        making: Making,
    ) -> Full {
        assert!(count >= LEAST_SEGMENTS && lines.is_power_of_two(), "segments that cannot be");
        let slots = count.checked_mul(lines).filter(|&s| s < u32::MAX).expect("too many slots");
        let ghosts = u64::from(slots) / 4;
        let mut full = Full {
            index: Index::new(slots),
            entries,
            hints,
            placing,
            shard,
            count,
            lines,
            making,
            policy: SlotPolicy::new(making.replacement, lines.min(MOST_WAYS), ghosts),
            segments: None,
            cleaning: None,
            cleaned: 0,
            allowance: 0,
            fruitless: 0,
        };
        for slot in (0..slots).map(SlotId) {
            if let Slot::Line(line) = full.get(slot) {
                if full.find(line).is_some() {
                    // Never written so: nobody knows which of the two is the line.
                    full.entries.store(slot.0 as usize, HELD);
                } else {
                    full.index.insert(full.placing.hash(line), slot);
                }
            }
        }
        full
    }

    pub(super) fn rest(&self) -> &Words {
        &self.hints
    }

    pub(super) fn rest_mut(&mut self) -> &mut Words {
        &mut self.hints
    }

    pub(super) fn own_rest(&self) -> usize {
        Self::words(self.count, self.lines).1
    }

    pub(super) fn snapshot(&self) -> (Words, Words) {
        (self.entries.snapshot(), self.hints.snapshot())
    }

    pub(super) fn len(&self) -> u32 {
        self.count * self.lines
    }

    pub(super) fn shard(&self) -> u32 {
        self.shard
    }

    pub(super) fn placing(&self) -> &Placing {
        &self.placing
    }

    /// Bytes of memory at most: of the slots, and of the segments. The second do not count where these are large: below 64
    /// lines each they come to more than a byte a line.
    pub(super) fn most_bytes(segments: u32, lines: u32) -> (u64, u64) {
        // Entry, hint, index, and ghosts of policies that have some; the time when a segment was closed.
        let each = Segments::BYTES_EACH + 8;
        (u64::from(segments) * u64::from(lines) * 16, u64::from(segments) * each)
    }

    pub(super) fn memory_bytes(&self) -> u64 {
        let (entries, hints) = Self::words(self.count, self.lines);
        (entries + hints) as u64 * 8
            + self.index.memory_bytes()
            + self.policy.memory_bytes() as u64
            + self.segments.as_ref().map_or(0, Segments::memory_bytes)
    }

    pub(super) fn get(&self, slot: SlotId) -> Slot {
        decode(self.entries.load(slot.0 as usize))
    }

    pub(super) fn sum(&self, slot: SlotId) -> Sum {
        Sum((self.entries.load(slot.0 as usize) >> LINE_BITS) as u32)
    }

    pub(super) fn find(&self, line: LineId) -> Option<SlotId> {
        self.index.find(self.placing.hash(line), |slot| self.get(slot) == Slot::Line(line))
    }

    pub(super) fn hit(&mut self, slot: SlotId) {
        self.policy.hit(&mut Hints(&mut self.hints), u64::from(slot.0));
    }

    /// What was restored is all: the segments are counted.
    pub(super) fn begin(&mut self) {
        let times = (self.len() as usize).div_ceil(8);
        let mut found = vec![Found::default(); self.count as usize];
        for slot in (0..self.len()).map(SlotId) {
            let segment = &mut found[(slot.0 / self.lines) as usize];
            match self.get(slot) {
                Slot::Line(_) => segment.valid += 1,
                Slot::Held => segment.held += 1,
                Slot::Free => {}
            }
        }
        for (number, segment) in found.iter_mut().enumerate() {
            segment.closed = self.hints.load(times + number);
        }
        self.segments = Some(Segments::new(self.lines, self.making.reclaim, found.into_iter()));
    }

    #[cfg(feature = "planted")]
    pub(super) fn plant(&mut self, fault: super::super::Planted) {
        if let Some(segments) = &mut self.segments {
            segments.fault = Some(fault);
        }
    }

    // ---- room ----

    /// The cleaner works while fewer segments than these are free.
    fn low(&self) -> u32 {
        (self.count / 32).clamp(3, 16)
    }

    /// Lines that the cache may hold when the policy evicts: the rest are holes, so that cleaning gains room.
    fn most_lines(&self) -> u32 {
        let reserve = self.count / 8 + self.low() + 1;
        self.count.saturating_sub(reserve).max(1) * self.lines
    }

    /// The line that is to go next, among those that may.
    fn victim(&mut self, busy: impl Fn(SlotId, LineId) -> bool) -> Option<(SlotId, LineId)> {
        let ways = self.lines.min(MOST_WAYS);
        let groups = u64::from(self.len() / ways);
        for _ in 0..HAND.min(self.len() / ways) {
            let group = self.policy.next_group(groups);
            let entries = &self.entries;
            let may = |slot: u64| match decode(entries.load(slot as usize)) {
                Slot::Line(line) => !busy(SlotId(slot as u32), line),
                Slot::Free | Slot::Held => false,
            };
            if let Some(slot) = self.policy.victim(&mut Hints(&mut self.hints), group, may) {
                let slot = SlotId(slot as u32);
                if let Slot::Line(line) = self.get(slot) {
                    return Some((slot, line));
                }
            }
        }
        None
    }

    /// Lines that may come, beside `under_way` others, before one must go for them: one that the policy drops, or some that the
    /// cleaner does when it makes room.
    pub(super) fn free_for(&self, under_way: u32) -> u32 {
        let Some(segments) = &self.segments else { return 0 };
        if !segments.can_fill() {
            return 0;
        }
        let room = if self.making.evict == EvictionBy::Cache {
            self.most_lines().saturating_sub(segments.lines_valid + segments.writing)
        } else {
            // Whoever takes the last segment above these sets the cleaner to work.
            segments.soon_free().saturating_sub(self.low()) * self.lines
        };
        room.saturating_sub(under_way)
    }

    pub(super) fn choose(
        &mut self,
        line: LineId,
        busy: impl Fn(SlotId, LineId) -> bool,
        want: Want,
    ) -> Option<Choice> {
        if line.0 >= LINE_MASK - 1 || want == Want::Free && self.free_for(0) == 0 {
            return None;
        }
        let (low, most) = (self.low(), self.most_lines());
        let segments = self.segments.as_mut()?;
        let slot = SlotId(segments.peek(Head::Fills)?);
        let by_cache = self.making.evict == EvictionBy::Cache;
        let goes = by_cache || want == Want::Displace;
        let full = if want == Want::Displace {
            true
        } else if by_cache {
            segments.lines_valid + segments.writing >= most
        } else {
            want == Want::Contest && segments.soon_free() <= low
        };
        let victim = if full { self.victim(busy) } else { None };
        if full && goes && victim.is_none() {
            return None;
        }
        let rival = victim.map(|(slot, line)| Rival { slot, line, goes });
        Some(Choice { slot, free: true, rival })
    }

    pub(super) fn reserve(&mut self, slot: SlotId) {
        let times = (self.len() as usize).div_ceil(8);
        if let Some((segment, time)) = self.segments.as_mut().and_then(|s| s.take(slot.0)) {
            self.hints.store(times + segment as usize, time);
        }
    }

    pub(super) fn unreserve(&mut self, slot: SlotId) {
        if let Some(segments) = &mut self.segments {
            segments.written(slot.0);
        }
    }

    pub(super) fn begin_read(&mut self, slot: SlotId) {
        if let Some(segments) = &mut self.segments {
            segments.begin_read(slot.0);
        }
    }

    pub(super) fn end_read(&mut self, slot: SlotId) {
        if let Some(segments) = &mut self.segments {
            segments.end_read(slot.0);
        }
    }

    // ---- slots ----

    fn unlink(&mut self, line: LineId, slot: SlotId) {
        let (entries, placing) = (&self.entries, &self.placing);
        self.index.remove(placing.hash(line), slot, |s| match decode(entries.load(s.0 as usize)) {
            Slot::Line(line) => placing.hash(line),
            Slot::Free | Slot::Held => 0,
        });
    }

    pub(super) fn hold(&mut self, slot: SlotId) {
        match self.get(slot) {
            Slot::Line(line) => {
                self.unlink(line, slot);
                self.entries.store(slot.0 as usize, HELD);
                if let Some(segments) = &mut self.segments {
                    segments.lost(slot.0);
                }
            }
            Slot::Free => {
                self.entries.store(slot.0 as usize, HELD);
                if let Some(segments) = &mut self.segments {
                    segments.held(slot.0);
                }
            }
            Slot::Held => {}
        }
    }

    /// The line in `slot` leaves the cache: there may be something to gain by cleaning again.
    pub(super) fn drop_line(&mut self, slot: SlotId) {
        self.fruitless = 0;
        self.hold(slot);
    }

    pub(super) fn evict(&mut self, slot: SlotId) {
        if let Slot::Line(line) = self.get(slot) {
            let hash = self.placing.hash(line);
            self.policy.evict(&mut Hints(&mut self.hints), u64::from(slot.0), hash);
        }
        self.drop_line(slot);
    }

    pub(super) fn free(&mut self, slot: SlotId) {
        debug_assert_eq!(self.get(slot), Slot::Held, "slot {} is not held", slot.0);
        self.entries.store(slot.0 as usize, FREE);
        if let Some(segments) = &mut self.segments {
            segments.freed(slot.0);
        }
    }

    pub(super) fn publish(&mut self, slot: SlotId, line: LineId, sum: Sum) {
        debug_assert!(!matches!(self.get(slot), Slot::Line(_)), "slot {} is taken", slot.0);
        let hash = self.placing.hash(line);
        self.entries.store(slot.0 as usize, encode(line, sum));
        self.index.insert(hash, slot);
        self.policy.insert(&mut Hints(&mut self.hints), u64::from(slot.0), hash);
        if let Some(segments) = &mut self.segments {
            segments.gained(slot.0);
        }
    }

    fn fits(&self, line: LineId) -> bool {
        line.0 < self.placing.lines().min(LINE_MASK - 1)
            && self.placing.shard(line.group()) == self.shard
    }

    pub(super) fn restore(&mut self, slot: SlotId, holds: Option<(LineId, Sum)>) {
        debug_assert!(self.segments.is_none(), "restored after it was begun");
        if let Slot::Line(line) = self.get(slot) {
            self.unlink(line, slot);
        }
        self.entries.store(slot.0 as usize, FREE);
        let Some((line, sum)) = holds else { return };
        if !self.fits(line) {
            self.entries.store(slot.0 as usize, HELD);
            return;
        }
        // The later record is right; what lay elsewhere has a record to come, or lost it.
        if let Some(older) = self.find(line) {
            self.hold(older);
        }
        self.entries.store(slot.0 as usize, encode(line, sum));
        self.index.insert(self.placing.hash(line), slot);
    }

    pub(super) fn validate(&self) -> Result<(), BadEntry> {
        for slot in 0..self.len() {
            let entry = self.entries.load(slot as usize);
            let right = match decode(entry) {
                Slot::Line(line) => self.fits(line),
                Slot::Free | Slot::Held => entry == FREE || entry == HELD,
            };
            if !right {
                return Err(BadEntry { shard: self.shard, slot, entry });
            }
        }
        Ok(())
    }

    pub(super) fn free_while_read(&self) -> Option<u32> {
        self.segments.as_ref().and_then(Segments::free_while_read)
    }

    // ---- cleaning ----

    /// What is to be done next to have free segments: one line of the segment that is being cleaned, or a line too many.
    /// `keep` tells lines that are not to be dropped, `locked` those that must not move (and may be dropped), `busy` those
    /// that something is under way with. A copy's new slot is reserved; [`Full::copied`] ends it.
    pub(super) fn next_clean(
        &mut self,
        mut keep: impl FnMut(LineId) -> bool,
        locked: impl Fn(LineId) -> bool,
        busy: impl Fn(SlotId, LineId) -> bool,
    ) -> Option<Clean> {
        let (low, most) = (self.low(), self.most_lines());
        let by_cache = self.making.evict == EvictionBy::Cache;
        loop {
            let segments = self.segments.as_mut()?;
            let Some(cleaning) = &mut self.cleaning else {
                // Attached with more lines than this run may hold.
                if by_cache && segments.lines_valid > most {
                    let victim = self.victim(&busy);
                    if let Some((slot, _)) = victim.filter(|v| !keep(v.1)) {
                        return Some(Clean::Drop(slot));
                    }
                }
                self.begin_cleaning(low)?;
                continue;
            };
            if cleaning.next == self.lines {
                if cleaning.copying > 0 {
                    return None;
                }
                let (segment, copied) = (cleaning.segment, cleaning.copied);
                self.cleaning = None;
                self.cleaned += 1;
                let empty = segments.cleaned(segment);
                let gain = empty && copied < self.lines;
                self.fruitless = if gain { 0 } else { self.fruitless + 1 };
                continue;
            }
            let slot = SlotId(cleaning.segment * self.lines + cleaning.next);
            let Slot::Line(line) = decode(self.entries.load(slot.0 as usize)) else {
                cleaning.next += 1;
                continue;
            };
            if locked(line) {
                cleaning.next += 1;
                return Some(Clean::Drop(slot));
            }
            let Some(to) = segments.peek(Head::Copies) else {
                if segments.free() + segments.emptied() > 0 || cleaning.copying > 0 {
                    // The log will free what was emptied.
                    return None;
                }
                // No room to move anything (a run that was cut short used it all): something must go.
                cleaning.next += 1;
                return Some(Clean::Drop(slot));
            };
            cleaning.next += 1;
            let hot = self.policy.hotness(&Hints(&mut self.hints), u64::from(slot.0));
            let stays = by_cache || {
                // Lines that were read since that was planned are hotter now: there may be more of them than were allowed.
                let hot = self.allowance > 0 && cleaning.survivors.keep(hot);
                self.allowance -= u32::from(hot);
                hot || keep(line)
            };
            if stays {
                cleaning.copying += 1;
                cleaning.copied += 1;
                let to = SlotId(to);
                self.reserve(to);
                return Some(Clean::Copy { line, from: slot, to });
            }
            return Some(Clean::Drop(slot));
        }
    }

    /// Takes up the next segment, if one is needed and there is one.
    fn begin_cleaning(&mut self, low: u32) -> Option<()> {
        let segments = self.segments.as_mut()?;
        let needed = segments.soon_free() < low;
        if !needed || self.fruitless > segments.closed() {
            return None;
        }
        let segment = segments.pick()?;
        let first = segment * self.lines;
        let share = match self.making.evict {
            EvictionBy::Cache => 1.0,
            EvictionBy::Gc { keep } => keep,
        };
        let valid = (first..first + self.lines)
            .filter(|&s| matches!(decode(self.entries.load(s as usize)), Slot::Line(_)))
            .map(u64::from);
        let bits = Hints(&mut self.hints);
        let hotness: Vec<u8> = valid.map(|slot| self.policy.hotness(&bits, slot)).collect();
        self.allowance = (self.allowance + (f64::from(self.lines) * share) as u32).min(self.lines);
        let survivors = Survivors::plan(hotness, self.allowance);
        self.cleaning = Some(Cleaning { segment, next: 0, survivors, copying: 0, copied: 0 });
        Some(())
    }

    pub(super) fn copied(&mut self) {
        if let Some(cleaning) = &mut self.cleaning {
            cleaning.copying -= 1;
        }
    }

    pub(super) fn cleaning(&self) -> (u64, bool) {
        let waits = self.segments.as_ref().is_some_and(|s| s.emptied() > 0);
        (self.cleaned, waits)
    }
}
