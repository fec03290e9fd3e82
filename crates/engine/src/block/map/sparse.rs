//! Sparse placement: each line has a slot of its own, and DRAM holds a window of the table that says which are taken.
//!
//! The slots are a sparse file as large as the line space; what is not cached is a hole in it. The table, a page for so many
//! neighbouring slots of a shard, lies on the device. A fixed number of its pages is in *frames*; of the others only a
//! *state* is kept: how many lines they have, and whether the device's copy is still right.
//!
//! ```text
//! entry   32 bits   valid 1 | held 1 | zero 4 | rank 2 | sum 24      of a slot of a page that is in a frame
//! state   32 bits   frame 19 (0: none) | rank 2 | void 1 | lines 10  of a page
//! ```
//!
//! A page that is *void* has no lines, whatever the device's copy says. One that is in no frame and is not void is on the
//! device as it is. What lies in a page that is in no frame is not seen here: [`Sparse::find`] and [`Sparse::get`] say that
//! nothing is there, so the shard asks only when it has seen to it that the page is in a frame.
//!
//! Both arrays are [`Words`]. A page comes into a frame with the store of its state, after the entries; it leaves it with one
//! store too. So a kill between any two leaves each page in one frame or none. The number of lines of a page that is in a
//! frame may be off by one then; it is counted again.

use std::collections::BTreeSet;

use larder_base::Words;

use super::super::address::{Place, Placing};
use super::super::api::{GROUP_LINES, GroupId, LineId, SlotId, Sum};
use super::{BadEntry, Choice, Rival, Slot, Want};

const VALID: u32 = 1 << 31;
const HELD: u32 = 1 << 30;
const RANK_SHIFT: u32 = 24;
const RANK: u32 = 3 << RANK_SHIFT;

const LINES: u32 = (1 << 10) - 1;
const VOID: u32 = 1 << 10;
const PAGE_RANK_SHIFT: u32 = 11;
const PAGE_RANK: u32 = 3 << PAGE_RANK_SHIFT;
const FRAME_SHIFT: u32 = 13;
/// Most frames of a shard.
const MOST_FRAMES: u32 = (1 << 19) - 2;

/// Bytes of DRAM for the frames of all shards together.
const FRAME_MEMORY: u64 = 32 << 20;
/// Frames that a shard has at least, if it has as many pages.
const LEAST_FRAMES: u64 = 64;
/// Slots, or pages, that are looked at for one that may go.
const LOOKS: u32 = 8192;

/// Frames of a shard with `pages` pages of `slots` slots, one of `shards`.
pub fn frames_for(pages: u32, slots: u32, shards: u32) -> u32 {
    let share = FRAME_MEMORY / u64::from(shards.max(1)) / (u64::from(slots) * 4);
    share.max(LEAST_FRAMES).min(u64::from(pages)).min(u64::from(MOST_FRAMES)) as u32
}

/// What comes into a frame.
#[derive(Debug)]
pub enum Content<'a> {
    /// What the device has.
    Slots(&'a [Option<Sum>]),
    /// Nothing, durably.
    Free,
    /// Nothing, but the durable map may say otherwise.
    Held,
}

/// The map of a shard whose slots are a sparse file. See the module's header.
#[derive(Debug)]
pub struct Sparse {
    entries: Words,
    states: Words,
    placing: Placing,
    shard: u32,
    pages: u32,
    /// Slots of a page.
    per: u32,
    /// Lines that may be there at a time.
    most: u64,
    /// The page in each frame, or that is to come there.
    owner: Vec<Option<u32>>,
    /// Frames that were used since the hand came by.
    recent: Vec<bool>,
    frame_hand: u32,
    /// Where lines are looked for that may go: a frame, and a slot of it.
    line_hand: (u32, u32),
    /// Where pages are.
    page_hand: u32,
    lines: u64,
    /// Of them, in pages that are in no frame.
    cold: u64,
    /// Slots that are going to be filled: they need room too.
    pending: BTreeSet<SlotId>,
}

impl Sparse {
    /// Words that entries and states take.
    pub fn words(pages: u32, per: u32, frames: u32) -> (usize, usize) {
        (frames as usize * per as usize / 2, (pages as usize).div_ceil(2))
    }

    /// A map in `entries` and `states`, which are zero or were one of the same shape: `(pages, slots of each, frames)`.
    ///
    /// # Panics
    /// If a page has an odd number of slots, or more than its state can count.
    pub fn new(
        entries: Words,
        states: Words,
        placing: Placing,
        shard: u32,
        (pages, per, frames): (u32, u32, u32),
        most: u64,
    ) -> Sparse {
        assert!(per.is_multiple_of(2) && per <= LINES, "pages of {per} slots");
        let mut map = Sparse {
            entries,
            states,
            placing,
            shard,
            pages,
            per,
            most,
            owner: vec![None; frames as usize],
            recent: vec![false; frames as usize],
            frame_hand: 0,
            line_hand: (0, 0),
            page_hand: 0,
            lines: 0,
            cold: 0,
            pending: BTreeSet::new(),
        };
        for page in 0..pages {
            let state = map.state(page);
            if state == 0 {
                continue;
            }
            let mut count = state & LINES;
            // Two pages in a frame are `validate`'s to find.
            if let Some(frame) = map.frame(page).filter(|&f| f < frames) {
                map.owner[frame as usize] = Some(page);
                count = (0..per).filter(|&i| map.load(frame * per + i) & VALID != 0).count() as u32;
                if count != state & LINES {
                    map.set_state(page, state & !LINES | count);
                }
            } else {
                map.cold += u64::from(count);
            }
            map.lines += u64::from(count);
        }
        map
    }

    /// Bytes of memory: the same, whatever is cached.
    pub fn memory_bytes(&self) -> u64 {
        let frames = self.owner.capacity() * size_of::<Option<u32>>() + self.recent.capacity();
        ((self.entries.len() + self.states.len()) * 8 + frames) as u64
    }

    pub(super) fn rest(&self) -> &Words {
        &self.states
    }

    pub(super) fn rest_mut(&mut self) -> &mut Words {
        &mut self.states
    }

    pub(super) fn own_rest(&self) -> usize {
        (self.pages as usize).div_ceil(2)
    }

    /// A copy of the words as they are: entries and states.
    pub fn snapshot(&self) -> (Words, Words) {
        (self.entries.snapshot(), self.states.snapshot())
    }

    /// Number of slots.
    pub(super) fn len(&self) -> u32 {
        self.pages * self.per
    }

    /// The number of the shard whose map it is.
    pub fn shard(&self) -> u32 {
        self.shard
    }

    /// How the line space is placed.
    pub fn placing(&self) -> &Placing {
        &self.placing
    }

    /// Number of pages.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Slots of a page.
    pub fn page_slots(&self) -> u32 {
        self.per
    }

    /// Whether it is as it is made: without lines, and without anything that an earlier run has left.
    pub fn is_new(&self) -> bool {
        (0..self.own_rest()).all(|word| self.states.load(word) == 0)
    }

    /// Lines in the cache.
    pub fn lines(&self) -> u64 {
        self.lines
    }

    fn load(&self, at: u32) -> u32 {
        (self.entries.load(at as usize / 2) >> (32 * (at % 2))) as u32
    }

    fn store(&mut self, at: u32, entry: u32) {
        let (word, shift) = (at as usize / 2, 32 * (at % 2));
        let rest = self.entries.load(word) & !(u64::from(u32::MAX) << shift);
        self.entries.store(word, rest | u64::from(entry) << shift);
    }

    fn state(&self, page: u32) -> u32 {
        (self.states.load(page as usize / 2) >> (32 * (page % 2))) as u32
    }

    fn set_state(&mut self, page: u32, state: u32) {
        let (word, shift) = (page as usize / 2, 32 * (page % 2));
        let rest = self.states.load(word) & !(u64::from(u32::MAX) << shift);
        self.states.store(word, rest | u64::from(state) << shift);
    }

    fn frame(&self, page: u32) -> Option<u32> {
        (self.state(page) >> FRAME_SHIFT).checked_sub(1)
    }

    /// Where the entry of `slot` is, if its page is in a frame.
    fn place(&self, slot: SlotId) -> Option<u32> {
        Some(self.frame(slot.0 / self.per)? * self.per + slot.0 % self.per)
    }

    fn entry(&self, slot: SlotId) -> u32 {
        self.place(slot).map_or(0, |at| self.load(at))
    }

    /// Changes the entry of `slot`, and the number of lines with it.
    fn set_entry(&mut self, slot: SlotId, entry: u32) {
        let Some(at) = self.place(slot) else {
            debug_assert!(false, "the page of {slot:?} is in no frame");
            return;
        };
        let before = self.load(at) & VALID != 0;
        self.store(at, entry);
        let (page, after) = (slot.0 / self.per, entry & VALID != 0);
        if before != after {
            let state = self.state(page);
            let lines = state & LINES;
            let lines = if after { lines + 1 } else { lines.saturating_sub(1) };
            self.set_state(page, state & !LINES | lines);
            self.lines = if after { self.lines + 1 } else { self.lines.saturating_sub(1) };
        }
    }

    fn slot_of(&self, line: LineId) -> SlotId {
        SlotId(self.placing.place(line.group()).group_set * GROUP_LINES + line.index())
    }

    fn line_of(&self, slot: SlotId) -> LineId {
        let place = Place { group_set: slot.0 / GROUP_LINES, tag: 0 };
        self.placing.line(self.shard, place, slot.0 % GROUP_LINES)
    }

    /// The page that `group` belongs to.
    pub fn page_of(&self, group: GroupId) -> u32 {
        self.slot_of(group.line(0)).0 / self.per
    }

    /// The groups that page `page` is about: those from the first to the last that are of this shard.
    pub fn groups_of(&self, page: u32) -> (GroupId, GroupId) {
        let first = self.line_of(SlotId(page * self.per)).group();
        let last = self.line_of(SlotId((page + 1) * self.per - 1)).group();
        (first, last)
    }

    /// Whether the page is in a frame.
    pub fn is_here(&self, page: u32) -> bool {
        self.frame(page).is_some()
    }

    /// Whether the page has no lines, whatever the device's copy says.
    pub fn is_void(&self, page: u32) -> bool {
        self.state(page) & VOID != 0
    }

    /// Lines of the page.
    pub fn lines_in(&self, page: u32) -> u32 {
        self.state(page) & LINES
    }

    /// What `slot` holds, as far as its page is in a frame.
    pub fn get(&self, slot: SlotId) -> Slot {
        let entry = self.entry(slot);
        if entry & VALID != 0 {
            Slot::Line(self.line_of(slot))
        } else if entry & HELD != 0 {
            Slot::Held
        } else {
            Slot::Free
        }
    }

    /// The checksum of the line in `slot`.
    pub fn sum(&self, slot: SlotId) -> Sum {
        Sum(self.entry(slot) & Sum::MASK)
    }

    /// The slot where `line` lies, if its page is in a frame.
    pub fn find(&self, line: LineId) -> Option<SlotId> {
        let slot = self.slot_of(line);
        (self.entry(slot) & VALID != 0).then_some(slot)
    }

    /// The line in `slot` was used.
    pub fn hit(&mut self, slot: SlotId) {
        let Some(at) = self.place(slot) else { return };
        let entry = self.load(at);
        if entry & RANK != RANK {
            self.store(at, entry + (1 << RANK_SHIFT));
        }
        self.touch(slot.0 / self.per);
    }

    /// The page was used.
    pub fn touch(&mut self, page: u32) {
        if let Some(frame) = self.frame(page) {
            self.recent[frame as usize] = true;
        }
    }

    /// The line's slot; with somebody to make room if the cache is full.
    pub(super) fn choose(
        &mut self,
        line: LineId,
        busy: impl Fn(SlotId, Slot) -> bool,
        want: Want,
    ) -> Option<Choice> {
        let slot = self.slot_of(line);
        let now = self.get(slot);
        if !self.is_here(slot.0 / self.per) || matches!(now, Slot::Line(_)) || busy(slot, now) {
            return None;
        }
        let free = now == Slot::Free;
        if self.has_room(1) && want != Want::Displace {
            return Some(Choice { slot, free, rival: None });
        }
        if want == Want::Free {
            return None;
        }
        let rival = self.victim(busy)?;
        Some(Choice { slot, free, rival: Some(rival) })
    }

    /// Whether the slot of `line`, which does not lie there, could be written.
    pub(super) fn has_free(&self, line: LineId, busy: impl Fn(SlotId, Slot) -> bool) -> bool {
        let slot = self.slot_of(line);
        self.is_here(slot.0 / self.per) && !busy(slot, self.get(slot))
    }

    /// Lines that may come, beside `under_way` others, before one must go for them.
    pub(super) fn free_for(&self, under_way: u32) -> u32 {
        let taken = self.lines + self.pending.len() as u64 + u64::from(under_way);
        u32::try_from(self.most.saturating_sub(taken)).unwrap_or(u32::MAX)
    }

    /// Whether so many lines more may be there.
    pub fn has_room(&self, lines: u64) -> bool {
        self.lines + self.pending.len() as u64 + lines <= self.most
    }

    /// CLOCK over the slots of the pages that are in frames: what was used has more rounds to live.
    fn victim(&mut self, busy: impl Fn(SlotId, Slot) -> bool) -> Option<Rival> {
        let frames = self.owner.len() as u32;
        let mut looks = 0;
        while looks < LOOKS.max(4 * self.per) {
            let (frame, index) = self.line_hand;
            let page = self.owner[frame as usize].filter(|&p| self.frame(p) == Some(frame));
            let more = |page: &u32| index < self.per && self.lines_in(*page) > 0;
            let Some(page) = page.filter(more) else {
                self.line_hand = ((frame + 1) % frames, 0);
                looks += 1;
                continue;
            };
            self.line_hand.1 += 1;
            looks += 1;
            let at = frame * self.per + index;
            let entry = self.load(at);
            if entry & VALID == 0 {
                continue;
            }
            if entry & RANK != 0 {
                self.store(at, entry - (1 << RANK_SHIFT));
                continue;
            }
            let slot = SlotId(page * self.per + index);
            let line = self.line_of(slot);
            if !busy(slot, Slot::Line(line)) {
                return Some(Rival { slot, line, goes: true });
            }
        }
        None
    }

    /// The next page that is in no frame and whose lines may go: it was in none for a round.
    pub fn cold_page(&mut self) -> Option<u32> {
        if self.cold == 0 {
            return None;
        }
        for _ in 0..LOOKS.min(2 * self.pages) {
            let page = self.page_hand;
            self.page_hand = (page + 1) % self.pages;
            let state = self.state(page);
            if state & LINES == 0 || self.frame(page).is_some() {
                continue;
            }
            if state & PAGE_RANK == 0 {
                return Some(page);
            }
            self.set_state(page, state - (1 << PAGE_RANK_SHIFT));
        }
        None
    }

    /// The page, which is in no frame, has no lines any more. Returns how many it had.
    pub fn void(&mut self, page: u32) -> u32 {
        let lines = self.lines_in(page);
        debug_assert!(!self.is_here(page), "page {page} is in a frame");
        self.set_state(page, VOID);
        self.lines -= u64::from(lines);
        self.cold -= u64::from(lines);
        lines
    }

    /// The device's copy of the page says what is there.
    pub fn settle(&mut self, page: u32) {
        let state = self.state(page);
        if state & VOID != 0 {
            self.set_state(page, state & !VOID);
        }
    }

    /// A frame for `page`, which is in none: of a page that is not `pinned` and has no slot that is held. (`lax`: a planted
    /// fault.)
    pub fn claim(
        &mut self,
        page: u32,
        lax: bool,
        pinned: impl Fn(u32, (GroupId, GroupId)) -> bool,
    ) -> Option<u32> {
        let frames = self.owner.len() as u32;
        // Every one twice: if there is none, something is under way that will end, and be told.
        for _ in 0..2 * frames {
            let frame = self.frame_hand;
            self.frame_hand = (frame + 1) % frames;
            if let Some(other) = self.owner[frame as usize] {
                // One that is still to come has not got it.
                if self.frame(other) != Some(frame)
                    || std::mem::take(&mut self.recent[frame as usize])
                {
                    continue;
                }
                if pinned(other, self.groups_of(other)) {
                    continue;
                }
                if !lax && (0..self.per).any(|i| self.load(frame * self.per + i) & HELD != 0) {
                    continue;
                }
                let state = self.state(other);
                let left = state & (LINES | VOID) | 1 << PAGE_RANK_SHIFT;
                self.set_state(other, left);
                self.cold += u64::from(state & LINES);
            }
            self.owner[frame as usize] = Some(page);
            return Some(frame);
        }
        None
    }

    /// A frame that was claimed is not needed.
    pub fn unclaim(&mut self, frame: u32) {
        self.owner[frame as usize] = None;
    }

    /// The page comes into `frame`, which was claimed for it.
    pub fn install(&mut self, page: u32, frame: u32, content: &Content<'_>) {
        let entry = |index: u32| match content {
            Content::Slots(slots) => match slots.get(index as usize) {
                Some(Some(sum)) => VALID | sum.0 & Sum::MASK,
                _ => 0,
            },
            Content::Free => 0,
            Content::Held => HELD,
        };
        let mut lines = 0;
        for index in (0..self.per).step_by(2) {
            let (low, high) = (entry(index), entry(index + 1));
            lines += (low >> 31) + (high >> 31);
            let word = u64::from(low) | u64::from(high) << 32;
            self.entries.store((frame * self.per + index) as usize / 2, word);
        }
        let before = self.state(page);
        self.lines = self.lines + u64::from(lines) - u64::from(before & LINES);
        self.cold -= u64::from(before & LINES);
        self.set_state(page, before & VOID | lines | (frame + 1) << FRAME_SHIFT);
        self.recent[frame as usize] = false;
    }

    /// What the page, which is in a frame, has in each slot.
    pub fn image(&self, page: u32) -> Vec<Option<Sum>> {
        let slots = (page * self.per..(page + 1) * self.per).map(SlotId);
        slots
            .map(|slot| self.entry(slot))
            .map(|entry| (entry & VALID != 0).then_some(Sum(entry & Sum::MASK)))
            .collect()
    }

    /// At a start: the page has so many lines on the device.
    pub fn found(&mut self, page: u32, lines: u32) {
        debug_assert!(self.state(page) == 0, "page {page} is known");
        self.set_state(page, lines & LINES | 1 << PAGE_RANK_SHIFT);
        self.lines += u64::from(lines & LINES);
        self.cold += u64::from(lines & LINES);
    }

    pub(super) fn reserve(&mut self, slot: SlotId) {
        self.pending.insert(slot);
    }

    pub(super) fn unreserve(&mut self, slot: SlotId) {
        self.pending.remove(&slot);
    }

    /// Empties `slot`: from now on it is held.
    pub fn hold(&mut self, slot: SlotId) {
        self.set_entry(slot, HELD);
    }

    /// The durable map knows that `slot`, which is held, is empty.
    pub fn free(&mut self, slot: SlotId) {
        self.set_entry(slot, 0);
    }

    /// The bytes of `line` are in `slot` and have checksum `sum`.
    pub fn publish(&mut self, slot: SlotId, line: LineId, sum: Sum) {
        debug_assert_eq!(self.slot_of(line), slot, "a line in another's slot");
        self.set_entry(slot, VALID | sum.0 & Sum::MASK);
        self.touch(slot.0 / self.per);
    }

    /// Whether every state and entry is one that this version writes.
    ///
    /// # Errors
    /// The first that is not.
    pub(super) fn validate(&self) -> Result<(), BadEntry> {
        let bad = |slot, entry: u32| BadEntry { shard: self.shard, slot, entry: entry.into() };
        for page in 0..self.pages {
            let state = self.state(page);
            let frame = self.frame(page);
            let right = state & LINES <= self.per
                && frame.is_none_or(|f| self.owner.get(f as usize) == Some(&Some(page)));
            if !right {
                return Err(bad(page * self.per, state));
            }
            let Some(frame) = frame else { continue };
            for index in 0..self.per {
                let entry = self.load(frame * self.per + index);
                let known = VALID | HELD | RANK | Sum::MASK;
                if entry & !known != 0 || entry & (VALID | HELD) == VALID | HELD {
                    return Err(bad(page * self.per + index, entry));
                }
            }
        }
        Ok(())
    }
}
