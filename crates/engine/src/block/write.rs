//! Changes: writes, zeros and trims. The backing store always has them; what the cache does follows from the mode.

use larder_base::Nanos;

use super::api::{
    BlockEffects, GroupId, IoFailed, IoId, LineId, Part, PartKind, SlotId, Sum, Verdict, WriteMode,
};
use super::merge::Next;
use super::planted::Planted;
use super::shard::{Active, BlockShard, FillSource, Io};

impl BlockShard {
    pub(super) fn start_change(
        &mut self,
        part: Part,
        group: GroupId,
        mask: u16,
        fx: &mut impl BlockEffects,
    ) {
        // Fills of these lines that still wait for the log have written nothing yet.
        let given_up: Vec<SlotId> = self
            .waiting_fills
            .iter()
            .filter(|(_, f)| f.line.group() == group && mask & 1 << f.line.index() != 0)
            .map(|(&slot, _)| slot)
            .collect();
        for slot in given_up {
            self.cancel_fill(slot, fx);
        }
        let active = self.actives.insert(Active {
            part,
            pending: 0,
            failed: false,
            updated: Vec::new(),
            lost: Vec::new(),
            fill: 0,
            renew: 0,
            refs: 0,
            behind: 0,
            answered: false,
        });
        let entry = self.group(group);
        entry.changing |= mask;
        entry.changes.push(active);
        let first = group.line(mask.trailing_zeros());
        if !self.enabled || self.may_change(first, active, fx) {
            self.run_change(Nanos::ZERO, active, fx);
        }
    }

    /// The region's bit is durable: the change goes to both devices.
    pub(super) fn run_change(&mut self, _now: Nanos, active: u32, fx: &mut impl BlockEffects) {
        let Some(part) = self.actives.get(active).map(|a| a.part) else { return };
        let (group, mask) = self.span(part.at, part.len);
        let line_bytes = u64::from(self.config.line_bytes);
        let end = part.at + u64::from(part.len);
        let mut updates: Vec<(SlotId, LineId, u32)> = Vec::new();
        let (mut fill, mut renew) = (0u16, 0u16);
        let mut merges: Vec<Next> = Vec::new();
        let mut joined = 0;
        for index in (0..16).filter(|i| mask & 1 << i != 0) {
            let line = group.line(index);
            let start = self.line_start(line);
            let whole =
                part.kind == PartKind::Write && part.at <= start && start + line_bytes <= end;
            self.stats.write_lines += 1;
            let merge = part.kind == PartKind::Write
                && self.enabled
                && self.config.write != WriteMode::WriteAround;
            let (from, to) = (part.at.max(start), end.min(start + line_bytes));
            if self.joins_merge(line) {
                // Another change of other bytes of the line is under way.
                self.stats.write_hits += 1;
                let bytes = merge.then_some((from, to));
                let (waits, next) = self.join_merge(line, active, bytes);
                joined += u32::from(waits && next.is_none());
                merges.extend(next);
                continue;
            }
            match self.map.find(line) {
                Some(slot) => {
                    self.stats.write_hits += 1;
                    let update =
                        whole && self.enabled && self.config.write != WriteMode::WriteAround;
                    if update && !self.map.updates_in_place() {
                        // A new copy, in another slot, behind the reply.
                        self.map.hold(slot);
                        self.record(slot);
                        (fill, renew) = (fill | 1 << index, renew | 1 << index);
                    } else if update {
                        self.map.hit(slot);
                        self.begin_update(slot);
                        match updates.last_mut() {
                            Some((s, l, n))
                                if slot.0 == s.0 + *n && line.0 == l.0 + u64::from(*n) =>
                            {
                                *n += 1
                            }
                            _ => updates.push((slot, line, 1)),
                        }
                    } else if self.planted(Planted::PartialWriteKeepsLine) {
                    } else if merge {
                        merges.extend(self.begin_merge(slot, line, active, (from, to)));
                    } else {
                        self.drop_line(slot);
                    }
                }
                None => {
                    if whole && self.enabled && self.config.write == WriteMode::WriteThrough {
                        if part.verdict == Verdict::Reject {
                            self.stats.fill_rejected += 1;
                        } else {
                            fill |= 1 << index;
                        }
                    }
                }
            }
        }
        if let Some(a) = self.actives.get_mut(active) {
            (a.fill, a.renew) = (fill, renew);
            a.pending = 1 + joined + (updates.len() + merges.len()) as u32;
        }
        let io = IoId(self.ios.insert(Io::Change { active }));
        fx.backing_change(io, part.op, part.kind, part.at, part.len);
        for (slot, first, lines) in updates {
            let io = IoId(self.ios.insert(Io::Update { active, slot, first, lines }));
            fx.flash_write(io, slot, first, lines, part.op);
        }
        for (io, merge, op) in merges {
            fx.merge(io, merge, op);
        }
    }

    /// A [`BlockEffects::backing_change`] is complete.
    pub fn backing_changed(
        &mut self,
        now: Nanos,
        io: IoId,
        outcome: Result<(), IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        let Some(Io::Change { active }) = self.ios.remove(io.0) else { return };
        match outcome {
            Ok(()) => self.answer(active, fx),
            Err(IoFailed) => self.stats.backing_errors += 1,
        }
        self.step(now, active, outcome.is_err(), fx);
    }

    /// The backing store has the change `active`: the client is answered, if there is room behind replies. What is still
    /// under way on flash belongs to lines that are in no map and that nobody else gets meanwhile.
    fn answer(&mut self, active: u32, fx: &mut impl BlockEffects) {
        let Some(part) = self.actives.get(active).map(|a| a.part) else { return };
        // All of them may be under way, in one I/O or in several.
        let lines = self.span(part.at, part.len).1.count_ones();
        let room = self.behind + lines <= self.config.limits.fills;
        let Some(a) = self.actives.get_mut(active) else { return };
        if a.pending == 1 || !self.enabled || !room {
            return;
        }
        self.behind += lines;
        (a.behind, a.answered) = (lines, true);
        fx.done(a.part.op, Ok(()), true);
    }

    pub(super) fn updated(
        &mut self,
        now: Nanos,
        (active, slot, first, lines): (u32, SlotId, LineId, u32),
        outcome: Result<&[u32], IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        if outcome.is_err() {
            self.stats.flash_errors += 1;
        } else {
            self.stats.flash_lines_written += u64::from(lines);
        }
        if let Some(a) = self.actives.get_mut(active) {
            for i in 0..lines {
                let (slot, line) = (SlotId(slot.0 + i), LineId(first.0 + u64::from(i)));
                match outcome.ok().and_then(|crcs| crcs.get(i as usize)) {
                    Some(&crc) => a.updated.push((slot, line, Sum::of(line, crc))),
                    None => a.lost.push(slot),
                }
            }
        }
        // A cache that fails is no failure of the write.
        self.step(now, active, false, fx);
    }

    /// `active` has its lines no longer; another change may have a part of one.
    fn end_change(&mut self, group: GroupId, active: u32) {
        let entry = self.group(group);
        entry.changes.retain(|&other| other != active);
        let left = entry.changes.clone();
        let masks = left.iter().filter_map(|&other| self.actives.get(other));
        let changing = masks.fold(0, |m, a| m | self.span(a.part.at, a.part.len).1);
        self.group(group).changing = changing;
    }

    /// Both copies are written, or as far as they will be.
    pub(super) fn finish_change(&mut self, now: Nanos, active: u32, fx: &mut impl BlockEffects) {
        let Some(a) = self.actives.get_mut(active) else { return };
        let (part, failed, fill, renew) = (a.part, a.failed, a.fill, a.renew);
        let answered = a.answered;
        self.behind -= std::mem::take(&mut a.behind);
        let (updated, lost) = (std::mem::take(&mut a.updated), std::mem::take(&mut a.lost));
        let (group, mask) = self.span(part.at, part.len);
        for (slot, line, sum) in updated {
            if (failed && !self.planted(Planted::FailedChangePublished)) || !self.enabled {
                // What the backing store has now is not known: neither is in the map.
                self.stats.dropped += 1;
                self.record(slot);
            } else {
                self.publish(slot, line, sum);
                self.stats.updated += 1;
            }
            self.unreserve(slot);
        }
        for slot in lost {
            self.unreserve(slot);
            self.stats.dropped += 1;
            self.record(slot);
        }
        self.end_change(group, active);
        self.end_merges(group, mask, failed);
        let refs = if failed || fill == 0 || !self.enabled {
            0
        } else {
            let terms = (part.verdict, renew);
            self.start_fills(group, fill, FillSource::Active(active), terms, fx)
        };
        if !answered {
            fx.done(part.op, if failed { Err(IoFailed) } else { Ok(()) }, refs > 0);
        } else if refs == 0 {
            fx.release_op(part.op);
        }
        if refs == 0 {
            self.actives.remove(active);
        } else if let Some(a) = self.actives.get_mut(active) {
            a.refs = refs;
            a.answered = true;
        }
        self.wake(now, group, fx);
        self.clean(fx);
    }
}
