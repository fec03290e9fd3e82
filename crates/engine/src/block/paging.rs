//! Sparse placement: pages of the table come into memory when they are asked for, and go.
//!
//! A part is begun only when the page of its group is in a frame; until then it waits here, with those that came after it.
//! A page stays while anything is under way in its groups, while it differs from what the device has, or while a slot of it
//! is held; so whatever the shard does with lines that it has begun to work on finds them.
//!
//! # Why this is sound
//!
//! A slot is no other line's, so what it holds is this line's, as it was at some time. Whether it is as the backing store is
//! follows, as for the other placements, from the write-intent map: a change of a line that the durable map may name waits
//! for the region's bit, and [`BlockShard::left_for_good`] says which lines those may be. What is new:
//!
//! **The space of a line is given back before the durable map has forgotten it,** and what it names is a hole. A slot that is
//! emptied is held; its hole is made after the page that says so is durable ([`BlockShard::emptied`]).
//!
//! **A hole is made where a line was written meanwhile.** A held slot is written only when it is free, and it becomes free
//! after its hole was made ([`BlockShard::records_durable`]).
//!
//! **A page leaves memory and the device's copy is not as it was.** A page that differs from the device's copy does not
//! leave. One that is void, the device's copy notwithstanding, says so in its state; when it comes back, all its slots are
//! held.
//!
//! **A page comes back as it was before it was void.** Only pages that are in no frame are read, and only those that are in
//! one, or void, are written; a void one is not read. One that became void while it was read has no lines in its state.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use larder_base::Nanos;

use super::api::{BlockEffects, GroupId, IoFailed, IoId, LineId, OpId, Part, SlotId, Sum};
use super::map::Slot;
use super::map::sparse::Content;
use super::planted::Planted;
use super::shard::{BlockShard, Io};

/// Pages that are voided for one fill.
const VOIDS: u32 = 4;

/// What becomes of a page of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TableChange {
    /// Page `page` has these lines.
    Page {
        /// Which page of the shard.
        page: u32,
        /// The checksum of the line in each slot.
        slots: Vec<Option<Sum>>,
    },
    /// Pages `first..first + count` have none.
    Cleared {
        /// The first.
        first: u32,
        /// How many.
        count: u32,
    },
}

/// A set of pages: a bit each.
#[derive(Debug, Default)]
struct Pages {
    bits: Vec<u64>,
    len: usize,
}

impl Pages {
    fn insert(&mut self, page: u32) {
        let (word, bit) = (page as usize / 64, 1 << (page % 64));
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        self.len += usize::from(self.bits[word] & bit == 0);
        self.bits[word] |= bit;
    }

    fn has(&self, page: u32) -> bool {
        self.bits.get(page as usize / 64).is_some_and(|word| word >> (page % 64) & 1 != 0)
    }

    fn remove(&mut self, page: u32) {
        if self.has(page) {
            self.bits[page as usize / 64] &= !(1 << (page % 64));
            self.len -= 1;
        }
    }

    /// The first page from `from` on.
    fn next(&self, from: u32) -> Option<u32> {
        let mut at = from as usize / 64;
        let mut word = self.bits.get(at)? & u64::MAX << (from % 64);
        while word == 0 {
            at += 1;
            word = *self.bits.get(at)?;
        }
        Some(at as u32 * 64 + word.trailing_zeros())
    }
}

/// What waits for a page.
#[derive(Debug, Default)]
struct Awaited {
    parts: VecDeque<(Part, Nanos)>,
    ranges: Vec<(OpId, LineId, LineId)>,
    /// It is being read; else it waits for a frame.
    loading: bool,
}

/// See the [module](self).
#[derive(Debug, Default)]
pub(super) struct Paging {
    awaited: BTreeMap<u32, Awaited>,
    /// Pages that the device's copy differs from.
    dirty: Pages,
    /// Those that were taken to be written and are not durable yet, and those that were void and in no frame.
    taken: BTreeSet<u32>,
    taken_void: Vec<(u32, u32)>,
    /// Pages of which the device's copy may name lines that this one does not: of an earlier run, or of a range that was
    /// dropped.
    unsettled: BTreeSet<u32>,
}

impl Paging {
    pub(super) fn is_idle(&self) -> bool {
        self.awaited.is_empty()
    }

    pub(super) fn awaits_for(&self, op: OpId) -> bool {
        self.awaited.values().any(|awaited| awaited.ranges.iter().any(|r| r.0 == op))
    }

    /// The range of `op` waits for no page any more: a page that comes later must not grant it to nobody.
    pub(super) fn waits_no_more(&mut self, op: OpId) {
        for awaited in self.awaited.values_mut() {
            awaited.ranges.retain(|r| r.0 != op);
        }
        // One that nobody waits for and that is not being read would never be.
        self.awaited.retain(|_, a| a.loading || !a.parts.is_empty() || !a.ranges.is_empty());
    }
}

impl BlockShard {
    /// At the start: what is in memory may differ from what the device has.
    pub(super) fn begin_paging(&mut self) {
        let Some(map) = self.map.sparse() else { return };
        let mut paging = Paging::default();
        for page in 0..map.pages() {
            if map.is_here(page) {
                paging.unsettled.insert(page);
            }
            if map.is_here(page) || map.is_void(page) {
                paging.dirty.insert(page);
            }
        }
        self.paging = Some(Box::new(paging));
    }

    /// The page of `group`, if it must come into memory first.
    pub(super) fn absent(&self, group: GroupId) -> Option<u32> {
        let map = self.map.sparse().filter(|_| self.enabled)?;
        Some(map.page_of(group)).filter(|&page| !map.is_here(page))
    }

    /// Sees to it that the page of `part` comes into memory. Returns whether it is there; else the part waits for it.
    pub(super) fn bring_for(
        &mut self,
        now: Nanos,
        page: u32,
        part: Part,
        fx: &mut impl BlockEffects,
    ) -> bool {
        if self.waiting_parts >= self.config.limits.waiting {
            fx.done(part.op, Err(IoFailed), false);
            return false;
        }
        let waits = self.paging.as_ref().is_some_and(|p| p.awaited.contains_key(&page));
        if !waits && self.bring(page, part.op, fx) {
            return true;
        }
        self.waiting_parts += 1;
        self.stats.waited += 1;
        if let Some(paging) = &mut self.paging {
            paging.awaited.entry(page).or_default().parts.push_back((part, now));
        }
        false
    }

    /// Finds a frame for `page`, which is in none, and reads it if need be. Returns whether it is there.
    fn bring(&mut self, page: u32, op: OpId, fx: &mut impl BlockEffects) -> bool {
        let lax = self.planted(Planted::FrameTakenDirty);
        let forgets = self.planted(Planted::VoidForgotten);
        let (groups, ranges) = (&self.groups, &self.ranges);
        let (Some(paging), Some(map)) = (&mut self.paging, self.map.sparse_mut()) else {
            return true;
        };
        let pinned = |other: u32, (first, last): (GroupId, GroupId)| {
            let edge = |r: &super::ranges::Range| {
                r.first.group() <= last
                    && first <= r.last.group()
                    && !(r.first <= first.line(0) && last.line(15) <= r.last)
            };
            (!lax && (paging.dirty.has(other) || paging.taken.contains(&other)))
                || groups.range(first..=last).next().is_some()
                || ranges.iter().any(edge)
        };
        let Some(frame) = map.claim(page, lax, pinned) else {
            // Some are written soon, and then can be had.
            paging.awaited.entry(page).or_default().loading = false;
            fx.commit_soon();
            return false;
        };
        if map.is_void(page) && !forgets {
            self.install(page, frame, &Content::Held);
            return true;
        }
        if map.lines_in(page) == 0 && !map.is_void(page) {
            map.install(page, frame, &Content::Free);
            return true;
        }
        let io = IoId(self.ios.insert(Io::Load { page, frame }));
        if let Some(paging) = &mut self.paging {
            paging.awaited.entry(page).or_default().loading = true;
        }
        fx.load(io, page, op);
        false
    }

    /// The page comes into a frame; one of which the device's copy is not right is written soon.
    fn install(&mut self, page: u32, frame: u32, content: &Content<'_>) {
        if let (Some(map), Some(paging)) = (self.map.sparse_mut(), &mut self.paging) {
            map.install(page, frame, content);
            if matches!(content, Content::Held) {
                paging.dirty.insert(page);
            }
        }
    }

    /// A [`BlockEffects::load`] is complete: the checksum of the line in each slot of the page, or that it could not be read
    /// or is not whole. Then its lines are lost.
    pub fn page_loaded(
        &mut self,
        now: Nanos,
        io: IoId,
        outcome: Result<&[Option<Sum>], IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        let Some(Io::Load { page, frame }) = self.ios.remove(io.0) else { return };
        let forgets = self.planted(Planted::VoidForgotten);
        let Some(map) = self.map.sparse_mut() else { return };
        if !self.enabled {
            // Nobody waits for it any more.
            map.unclaim(frame);
            return;
        }
        match outcome {
            Ok(slots) if forgets => self.install(page, frame, &Content::Slots(slots)),
            // It had lines when it was asked for: it was void meanwhile, and the device knows by now.
            _ if !map.is_void(page) && map.lines_in(page) == 0 => {
                map.install(page, frame, &Content::Free);
            }
            Ok(slots) if !map.is_void(page) => map.install(page, frame, &Content::Slots(slots)),
            _ => {
                let lost = map.void(page);
                self.stats.dropped += u64::from(lost);
                self.stats.flash_errors += u64::from(outcome.is_err());
                self.install(page, frame, &Content::Held);
            }
        }
        self.page_here(now, page, fx);
        self.bring_stalled(now, fx);
    }

    /// Whether `io` reads a page of the table, and one of so many slots (`None`: it was not read).
    pub(super) fn awaits_page(&self, io: IoId, slots: Option<usize>) -> bool {
        let per = self.map.sparse().map_or(0, |m| m.page_slots() as usize);
        matches!(self.ios.get(io.0), Some(Io::Load { .. })) && slots.is_none_or(|n| n == per)
    }

    /// What waited for the page goes on.
    fn page_here(&mut self, now: Nanos, page: u32, fx: &mut impl BlockEffects) {
        let awaited = self.paging.as_mut().and_then(|p| p.awaited.remove(&page));
        let Some(Awaited { parts, ranges, .. }) = awaited else { return };
        for (part, since) in parts {
            self.waiting_parts -= 1;
            self.stats.longest_wait = self.stats.longest_wait.max(now.saturating_sub(since));
            self.submit(now, part, fx);
        }
        for (op, first, last) in ranges {
            self.lock_range(now, op, first, last, fx);
        }
    }

    /// Finds frames for pages that wait for one.
    pub(super) fn bring_stalled(&mut self, now: Nanos, fx: &mut impl BlockEffects) {
        let Some(paging) = &self.paging else { return };
        if paging.awaited.values().all(|a| a.loading) {
            return;
        }
        let stalled: Vec<(u32, OpId)> = paging
            .awaited
            .iter()
            .filter(|(_, a)| !a.loading)
            .filter_map(|(&page, a)| {
                let op = a.parts.front().map(|p| p.0.op).or(a.ranges.first().map(|r| r.0));
                Some((page, op?))
            })
            .collect();
        for (page, op) in stalled {
            let here = self.map.sparse().is_some_and(|m| m.is_here(page));
            if here || self.bring(page, op, fx) {
                self.page_here(now, page, fx);
            } else if self
                .paging
                .as_ref()
                .is_some_and(|p| p.awaited.get(&page).is_some_and(|a| !a.loading))
            {
                // No frame for this one is none for the next.
                break;
            }
        }
    }

    /// Whether a range must wait for a page of which it covers a part, and that has lines: to tell those in the range from
    /// the others the page must be in memory.
    pub(super) fn awaits_edge(
        &mut self,
        op: OpId,
        first: LineId,
        last: LineId,
        fx: &mut impl BlockEffects,
    ) -> bool {
        let Some(map) = self.map.sparse().filter(|_| self.enabled) else { return false };
        let edges = self.pages_in(first, last).map(|(low, high)| [low, high]);
        let absent = edges.into_iter().flatten().find(|&page| {
            let (from, to) = map.groups_of(page);
            let whole = first <= from.line(0) && to.line(15) <= last;
            !whole && !map.is_here(page) && map.lines_in(page) > 0
        });
        let Some(page) = absent else { return false };
        let waits = self.paging.as_ref().is_some_and(|p| p.awaited.contains_key(&page));
        if !waits && self.bring(page, op, fx) {
            // The other edge is still to be looked at.
            return self.awaits_edge(op, first, last, fx);
        }
        if let Some(paging) = &mut self.paging {
            paging.awaited.entry(page).or_default().ranges.push((op, first, last));
        }
        true
    }

    /// The first and the last page that have slots for lines of the range.
    fn pages_in(&self, first: LineId, last: LineId) -> Option<(u32, u32)> {
        let map = self.map.sparse()?;
        let (placing, shard) = (map.placing(), map.shard());
        let low = placing.next_of(shard, first.group());
        if low > last.group() {
            return None;
        }
        let behind = (last.group().0 + placing.shards() - u64::from(shard)) % placing.shards();
        let high = GroupId(last.group().0 - behind);
        Some((map.page_of(low), map.page_of(high)))
    }

    /// Drops lines of a locked range page by page: see [`BlockShard::drop_range`].
    pub(super) fn drop_by_pages(
        &mut self,
        first: LineId,
        last: LineId,
        cursor: u64,
        steps: u32,
    ) -> Option<u64> {
        let (low, high) = self.pages_in(first, last)?;
        let mut left = i64::from(steps.max(1));
        let mut page = low + cursor as u32;
        while page <= high {
            if left <= 0 {
                return Some(u64::from(page - low));
            }
            let map = self.map.sparse_mut()?;
            let per = map.page_slots();
            if map.is_here(page) {
                left -= i64::from(per);
                self.stats.range_steps += u64::from(per);
                let dropped = self.stats.dropped;
                for slot in (page * per..(page + 1) * per).map(SlotId) {
                    if matches!(self.map.get(slot), Slot::Line(l) if (first..=last).contains(&l)) {
                        self.drop_line(slot);
                    }
                }
                if let Some(paging) = self.paging.as_mut().filter(|_| self.stats.dropped > dropped)
                {
                    // Of all of them together: one by one they would take memory that nobody has counted.
                    paging.unsettled.insert(page);
                }
            } else {
                left -= 1;
                self.stats.range_steps += 1;
                if map.lines_in(page) > 0 {
                    self.stats.dropped += u64::from(self.void(page));
                }
            }
            page += 1;
        }
        None
    }

    /// The page, which is in no frame, has no lines any more.
    fn void(&mut self, page: u32) -> u32 {
        let (Some(map), Some(paging)) = (self.map.sparse_mut(), &mut self.paging) else { return 0 };
        let lines = map.void(page);
        paging.dirty.insert(page);
        lines
    }

    /// Makes room for a fill: the lines of pages that nobody has asked for in a while go together. Of those that are in
    /// memory the map chooses one by one.
    pub(super) fn evict_cold(&mut self, fx: &mut impl BlockEffects) {
        for _ in 0..VOIDS {
            let Some(map) = self.map.sparse_mut() else { return };
            if map.has_room(u64::from(super::api::GROUP_LINES)) {
                return;
            }
            let Some(page) = map.cold_page() else { return };
            let ((first, last), lines) = (map.groups_of(page), map.lines_in(page));
            let awaited = self.paging.as_ref().is_some_and(|p| p.awaited.contains_key(&page));
            // Whom nobody keeps counts as gone: it is asked about what really goes only.
            if awaited || fx.keep_groups(first, last, lines) {
                continue;
            }
            self.stats.evicted += u64::from(self.void(page));
            fx.commit_soon();
        }
    }

    /// The state of `slot` differs from what the device has.
    pub(super) fn record_page(&mut self, slot: SlotId) -> bool {
        let Some(per) = self.map.sparse().map(|m| m.page_slots()) else { return false };
        if let Some(paging) = &mut self.paging {
            paging.dirty.insert(slot.0 / per);
        }
        true
    }

    /// Whether the durable map names no line of `group` that this one does not.
    pub(super) fn left_for_good(&self, group: GroupId) -> bool {
        let (Some(map), Some(paging)) = (self.map.sparse(), &self.paging) else { return true };
        let page = map.page_of(group);
        !map.is_void(page) && !paging.unsettled.contains(&page)
    }

    /// Pages that wait to be written.
    pub(super) fn pages_waiting(&self) -> usize {
        self.paging.as_ref().map_or(0, |p| p.dirty.len)
    }

    /// What became of pages of the table: up to `most` that have lines, and those that have none. Flush the cache device
    /// after this call and before any of it is written. One batch at a time: when it is durable, make holes of what
    /// [`BlockShard::emptied`] says, and answer with [`BlockShard::records_durable`]; else with
    /// [`BlockShard::records_lost`].
    pub fn take_pages(&mut self, most: usize, out: &mut Vec<TableChange>) {
        debug_assert!(self.taken.is_empty(), "one batch at a time");
        let Some(mut paging) = self.paging.take() else { return };
        let (mut at, mut count) = (0, 0);
        while let Some(page) = paging.dirty.next(at)
            && count < most
            && let Some(map) = self.map.sparse()
        {
            at = page + 1;
            paging.dirty.remove(page);
            let per = map.page_slots();
            if map.is_here(page) {
                count += 1;
                out.push(TableChange::Page { page, slots: map.image(page) });
                paging.taken.insert(page);
                let slots = (page * per..(page + 1) * per).map(SlotId);
                let held = slots
                    .filter(|&s| map.get(s) == Slot::Held && !self.is_update(s))
                    .collect::<Vec<_>>();
                self.taken.extend(held);
            } else if map.is_void(page) {
                match out.last_mut() {
                    Some(TableChange::Cleared { first, count }) if *first + *count == page => {
                        *count += 1;
                    }
                    _ => out.push(TableChange::Cleared { first: page, count: 1 }),
                }
                match paging.taken_void.last_mut() {
                    Some((first, count)) if *first + *count == page => *count += 1,
                    _ => paging.taken_void.push((page, 1)),
                }
            }
        }
        self.paging = Some(paging);
    }

    /// Runs of slots, first and number, that the batch has made durably empty and that nobody will write before
    /// [`BlockShard::records_durable`]: their space can be given back.
    pub fn emptied(&self, out: &mut Vec<(SlotId, u32)>) {
        let (Some(map), Some(paging)) = (self.map.sparse(), &self.paging) else { return };
        let per = map.page_slots();
        for &slot in &self.taken {
            // One that will be filled at once need not be a hole before.
            if self.waiting_fills.contains_key(&slot) || map.get(slot) != Slot::Held {
                continue;
            }
            match out.last_mut() {
                Some((first, count)) if first.0 + *count == slot.0 => *count += 1,
                _ => out.push((slot, 1)),
            }
        }
        out.extend(paging.taken_void.iter().map(|&(first, n)| (SlotId(first * per), n * per)));
    }

    /// The batch is durable.
    pub(super) fn pages_durable(&mut self) {
        let (Some(map), Some(paging)) = (self.map.sparse_mut(), &mut self.paging) else { return };
        let cleared = std::mem::take(&mut paging.taken_void);
        let cleared = cleared.into_iter().flat_map(|(first, count)| first..first + count);
        for page in std::mem::take(&mut paging.taken).into_iter().chain(cleared) {
            if !paging.dirty.has(page) {
                // (What was dropped since is not in it.)
                paging.unsettled.remove(&page);
            }
            map.settle(page);
        }
    }

    /// The batch could not be written.
    pub(super) fn pages_lost(&mut self) {
        let Some(paging) = &mut self.paging else { return };
        let cleared = std::mem::take(&mut paging.taken_void);
        let cleared = cleared.into_iter().flat_map(|(first, count)| first..first + count);
        for page in std::mem::take(&mut paging.taken).into_iter().chain(cleared) {
            paging.dirty.insert(page);
        }
    }

    /// The cache is out of use: nothing waits for pages any more.
    pub(super) fn end_paging(&mut self, now: Nanos, fx: &mut impl BlockEffects) {
        while let Some(page) =
            self.paging.as_ref().and_then(|p| p.awaited.first_key_value().map(|(&page, _)| page))
        {
            self.page_here(now, page, fx);
        }
    }
}
