//! Changes of whole ranges: a trim of a volume is one thing, and what is not cached costs it nothing.

use std::collections::VecDeque;

use larder_base::Nanos;

use super::api::{BlockEffects, GroupId, LineId, OpId, Part, SlotId};
use super::map::Slot;
use super::planted::Planted;
use super::shard::BlockShard;

/// A cursor from here on counts slots.
const BY_SLOTS: u64 = 1 << 63;

#[derive(Debug)]
pub(super) struct Range {
    pub first: LineId,
    pub last: LineId,
    op: OpId,
    held: bool,
}

impl Range {
    /// Whether `line` is locked with it, or is to be.
    pub(super) fn has(&self, line: LineId) -> bool {
        self.first <= line && line <= self.last
    }
}

/// Parts that wait for a range, since when.
pub(super) type Waiting = VecDeque<(Part, Nanos)>;

impl BlockShard {
    pub(super) fn in_range(&self, group: GroupId, mask: u16) -> bool {
        !self.ranges.is_empty() && {
            let first = group.line(mask.trailing_zeros());
            let last = group.line(15 - mask.leading_zeros());
            self.ranges.iter().any(|r| r.first <= last && first <= r.last)
        }
    }

    /// Takes the lines `first..=last` for `op`, a change of a range too large to be split into parts. When nothing of it
    /// is under way any more, `done(op)`; from then until [`BlockShard::unlock_range`] nothing of it begins.
    pub fn lock_range(
        &mut self,
        now: Nanos,
        op: OpId,
        first: LineId,
        last: LineId,
        fx: &mut impl BlockEffects,
    ) {
        if self.awaits_edge(op, first, last, fx) {
            return;
        }
        self.ranges.push(Range { first, last, op, held: false });
        self.grant_ranges(now, fx);
    }

    /// Whether lines are locked for `op`, or are to be when what is under way there has ended or its page is there.
    pub fn has_range(&self, op: OpId) -> bool {
        let awaits = self.paging.as_ref().is_some_and(|paging| paging.awaits_for(op));
        awaits || self.ranges.iter().any(|r| r.op == op)
    }

    pub(super) fn grant_ranges(&mut self, _now: Nanos, fx: &mut impl BlockEffects) {
        for at in 0..self.ranges.len() {
            let (first, last) = (self.ranges[at].first, self.ranges[at].last);
            if self.ranges[at].held
                || self.ranges[..at].iter().any(|r| r.first <= last && first <= r.last)
                || (self.groups.range(first.group()..=last.group()).next().is_some()
                    && !self.planted(Planted::RangeNotAwaited))
            {
                continue;
            }
            self.ranges[at].held = true;
            fx.done(self.ranges[at].op, Ok(()), false);
        }
    }

    /// Drops the lines of a locked range, looking at up to `steps` slots or groups from `cursor` on. Returns where to go
    /// on, or `None` when it is finished. Begin at 0; what the cursor counts is the shard's affair.
    ///
    /// Where the bits of its regions are durable, [`BlockShard::void_range`] does most of it at once.
    pub fn drop_range(
        &mut self,
        first: LineId,
        last: LineId,
        cursor: u64,
        steps: u32,
    ) -> Option<u64> {
        if self.paging.is_some() {
            return self.drop_by_pages(first, last, cursor, steps);
        }
        let regions = self.config.regions;
        let (low, high) = (regions.of(first), regions.of(last));
        let slots = u64::from(self.map.len());
        if cursor == 0 {
            // Group by group, where there may be any; or all slots, if that costs less.
            let groups = self.present.count(low, high)
                * regions.groups.div_ceil(self.map.placing().shards());
            if groups * self.map.cost_of_group() > slots {
                return self.drop_by_slots(first, last, 0, steps);
            }
        }
        match cursor.checked_sub(BY_SLOTS) {
            Some(slot) => self.drop_by_slots(first, last, slot, steps),
            None => self.drop_by_groups(first, last, cursor, steps),
        }
    }

    fn drop_by_slots(&mut self, first: LineId, last: LineId, from: u64, steps: u32) -> Option<u64> {
        let from = from.min(u64::from(self.map.len()));
        let until = (from + u64::from(steps)).min(u64::from(self.map.len()));
        self.stats.range_steps += until - from;
        for slot in (from..until).map(|slot| SlotId(slot as u32)) {
            if let Slot::Line(line) = self.map.get(slot)
                && (first..=last).contains(&line)
            {
                self.drop_of_range(slot, line);
            }
        }
        if until < u64::from(self.map.len()) {
            return Some(BY_SLOTS + until);
        }
        self.end_groups(first, last)
    }

    fn drop_by_groups(
        &mut self,
        first: LineId,
        last: LineId,
        cursor: u64,
        steps: u32,
    ) -> Option<u64> {
        let (regions, begin) = (self.config.regions, first.group().0);
        let placing = *self.map.placing();
        let mut next = begin + cursor;
        for _ in 0..steps {
            let group = placing.next_of(self.map.shard(), GroupId(next));
            if group > last.group() {
                break;
            }
            self.stats.range_steps += 1;
            let region = regions.of(group.line(0));
            if !self.present.has(region) {
                let Some(region) = self.present.next(region, regions.of(last)) else {
                    return self.end_groups(first, last);
                };
                next = u64::from(region) * regions.groups;
                continue;
            }
            for (index, slot) in (0..).zip(self.map.find_all(group)) {
                let line = group.line(index);
                if let Some(slot) = slot.filter(|_| (first..=last).contains(&line)) {
                    self.drop_of_range(slot, line);
                }
            }
            next = group.0 + 1;
        }
        if placing.next_of(self.map.shard(), GroupId(next)) > last.group() {
            return self.end_groups(first, last);
        }
        Some(next - begin)
    }

    /// Void regions are in `present` too.
    fn end_groups(&mut self, first: LineId, last: LineId) -> Option<u64> {
        let regions = self.config.regions;
        let mut region = regions.of(first);
        while let Some(found) = self.present.next(region, regions.of(last)) {
            self.forget_region(found, first, last);
            region = found + 1;
        }
        None
    }

    /// If `region` lies in the range, none of its lines is there any more.
    fn forget_region(&mut self, region: u32, first: LineId, last: LineId) {
        let groups = self.config.regions.groups;
        let begin = GroupId(u64::from(region) * groups).line(0);
        let end = GroupId((u64::from(region) + 1) * groups).line(0);
        if first <= begin && end.0 - 1 <= last.0 {
            self.present.clear(region);
            self.forget_void(region);
        }
    }

    /// Takes a line of a range out of the map. Of so many it is not noted which they were, only where.
    pub(super) fn drop_of_range(&mut self, slot: SlotId, line: LineId) {
        let region = self.config.regions.of(line);
        if !self.is_dirty(region) {
            self.left.add_region(region);
        }
        self.drop_line(slot);
    }

    /// Gives a range back, or gives up one that was not granted yet, and begins what waited for it.
    pub fn unlock_range(&mut self, now: Nanos, op: OpId, fx: &mut impl BlockEffects) {
        self.ranges.retain(|r| r.op != op);
        if let Some(paging) = &mut self.paging {
            paging.waits_no_more(op);
        }
        self.grant_ranges(now, fx);
        for (part, since) in std::mem::take(&mut self.range_waiting) {
            self.waiting_parts -= 1;
            self.stats.longest_wait = self.stats.longest_wait.max(now.saturating_sub(since));
            self.submit(now, part, fx);
        }
        self.bring_stalled(now, fx);
    }
}
