//! Fills: lines on their way to flash, behind the reply.

use std::collections::{BTreeMap, BTreeSet};

use larder_base::Nanos;

use super::api::{BlockEffects, GroupId, IoFailed, IoId, LineId, SlotId, Source, Sum, Verdict};
use super::map::{Choice, Slot, Want};
use super::planted::Planted;
use super::shard::{BlockShard, FillSource, Group, Io, WaitingFill};

/// Lines that must stay, before no more are looked at.
const PLACES: usize = 64;

impl BlockShard {
    pub(super) fn outer_source(&self, source: FillSource) -> Source {
        match source {
            FillSource::Fetch(io) => Source::Io(io),
            FillSource::Active(active) => {
                Source::Op(self.actives.get(active).map(|a| a.part.op).unwrap_or_default())
            }
        }
    }

    /// Begins to fill the lines of `mask`, as far as there is room: on the terms of admission's verdict, but for lines of `renew`,
    /// which were cached before and take whatever slot there is. Returns how many need `source` from now on.
    pub(super) fn start_fills(
        &mut self,
        group: GroupId,
        mask: u16,
        source: FillSource,
        (verdict, renew): (Verdict, u16),
        fx: &mut impl BlockEffects,
    ) -> u32 {
        if !self.enabled {
            return 0;
        }
        if verdict != Verdict::IfFree || renew & mask != 0 {
            self.evict_cold(fx);
        }
        let awaits_bit = self.awaits_bit(group);
        let mut refs = 0;
        let mut ready: Vec<(SlotId, LineId, u32)> = Vec::new();
        for line in (0..16).filter(|i| mask & 1 << i != 0).map(|i| group.line(i)) {
            if self.fills >= self.config.limits.fills || self.map.find(line).is_some() {
                self.stats.fill_dropped += 1;
                continue;
            }
            let verdict = if renew & 1 << line.index() != 0 { Verdict::Admit } else { verdict };
            let Some(choice) = self.find_place(line, verdict, fx) else { continue };
            if let Some(rival) = choice.rival {
                if verdict == Verdict::Compete
                    && !self.is_void(rival.line)
                    && !fx.prefer(line, rival.line)
                {
                    self.stats.fill_rejected += 1;
                    continue;
                }
                if rival.goes {
                    self.leave(rival.slot);
                    self.map.evict(rival.slot);
                    self.record(rival.slot);
                    self.stats.evicted += 1;
                }
            }
            self.reserve(choice.slot);
            self.fills += 1;
            refs += 1;
            let entry = self.group(group);
            entry.filling |= 1 << line.index();
            entry.fills.push((line.index(), source));
            let free = choice.free || self.planted(Planted::FillBeforeDurable);
            if free && !awaits_bit {
                push_run(&mut ready, choice.slot, line);
            } else {
                self.waiting_fills.insert(choice.slot, WaitingFill { line, source });
                if !free {
                    fx.commit_soon();
                }
            }
        }
        for (slot, first, lines) in ready {
            self.write_fill(slot, first, lines, source, fx);
        }
        self.clean(fx);
        refs
    }

    /// A place for `line` that may be had: not that of a line that must stay, and none where nothing lies if the volume may
    /// not grow. With [`Verdict::IfFree`] nobody's place at all.
    fn find_place(
        &mut self,
        line: LineId,
        verdict: Verdict,
        fx: &mut impl BlockEffects,
    ) -> Option<Choice> {
        let lax = self.planted(Planted::BusyEvicted);
        let (groups, reserved) = (&self.groups, &self.reserved);
        let mut kept = Vec::new();
        let mut want = match verdict {
            Verdict::Compete => Want::Contest,
            Verdict::IfFree if !self.planted(Planted::IfFreeDisplaces) => Want::Free,
            _ => Want::Place,
        };
        while kept.len() < PLACES {
            let busy = |slot: SlotId, now: Slot| {
                kept.contains(&slot) || is_busy(groups, reserved, slot, now, lax)
            };
            let Some(choice) = self.map.choose(line, busy, want) else { break };
            match choice.rival {
                Some(rival) if rival.goes => {
                    if self.is_void(rival.line) || !fx.keep(rival.line, Some(line)) {
                        return Some(choice);
                    }
                    kept.push(rival.slot);
                }
                _ if fx.may_grow(line) => return Some(choice),
                _ if want == Want::Free => break,
                _ => want = Want::Displace,
            }
        }
        if kept.is_empty() && !matches!(want, Want::Displace | Want::Free) {
            self.stats.fill_dropped += 1;
        } else {
            self.stats.fill_rejected += 1;
        }
        None
    }

    /// `slot` is going to be written, or waits to be.
    pub(super) fn reserve(&mut self, slot: SlotId) {
        self.reserved.insert(slot);
        self.map.reserve(slot);
    }

    /// It is not going to be written any more.
    pub(super) fn unreserve(&mut self, slot: SlotId) {
        self.reserved.remove(&slot);
        self.map.unreserve(slot);
    }

    fn write_fill(
        &mut self,
        slot: SlotId,
        first: LineId,
        lines: u32,
        source: FillSource,
        fx: &mut impl BlockEffects,
    ) {
        let io = IoId(self.ios.insert(Io::Fill { slot, first, lines, source }));
        let source = self.outer_source(source);
        fx.fill(io, slot, first, lines, source);
    }

    /// Begins the fills whose slots are durably empty by now, and whose regions have their bits if they want them.
    pub(super) fn start_waiting_fills(&mut self, fx: &mut impl BlockEffects) {
        let ready: Vec<(SlotId, WaitingFill)> = self
            .waiting_fills
            .iter()
            .filter(|(slot, fill)| {
                self.map.get(**slot) == Slot::Free && !self.awaits_bit(fill.line.group())
            })
            .map(|(&slot, &fill)| (slot, fill))
            .collect();
        let mut runs: Vec<(SlotId, LineId, u32, FillSource)> = Vec::new();
        for (slot, fill) in ready {
            self.waiting_fills.remove(&slot);
            match runs.last_mut() {
                Some((s, l, n, source))
                    if slot.0 == s.0 + *n
                        && fill.line.0 == l.0 + u64::from(*n)
                        && fill.line.group() == l.group()
                        && *source == fill.source =>
                {
                    *n += 1;
                }
                _ => runs.push((slot, fill.line, 1, fill.source)),
            }
        }
        for (slot, first, lines, source) in runs {
            self.write_fill(slot, first, lines, source, fx);
        }
        if self.waiting_fills.keys().any(|&slot| self.map.get(slot) != Slot::Free) {
            fx.commit_soon();
        }
    }

    /// Gives up a fill that waits for the log.
    pub(super) fn cancel_fill(
        &mut self,
        slot: SlotId,
        fx: &mut impl BlockEffects,
    ) -> Option<WaitingFill> {
        let fill = self.waiting_fills.remove(&slot)?;
        self.stats.fill_cancelled += 1;
        self.end_fill(slot, fill.line, fill.source, fx);
        Some(fill)
    }

    /// A fill is over, one way or the other.
    fn end_fill(
        &mut self,
        slot: SlotId,
        line: LineId,
        source: FillSource,
        fx: &mut impl BlockEffects,
    ) {
        self.unreserve(slot);
        self.fills -= 1;
        let entry = self.group(line.group());
        entry.filling &= !(1 << line.index());
        entry.fills.retain(|(i, _)| *i != line.index());
        match source {
            FillSource::Fetch(io) => {
                let last = match self.ios.get_mut(io.0) {
                    Some(Io::Fetch { refs, .. }) => {
                        *refs -= 1;
                        *refs == 0
                    }
                    _ => false,
                };
                if last {
                    self.ios.remove(io.0);
                    fx.release(io);
                }
            }
            FillSource::Active(active) => {
                let last = self.actives.get_mut(active).is_some_and(|a| {
                    a.refs -= 1;
                    a.refs == 0
                });
                if last && let Some(a) = self.actives.remove(active) {
                    fx.release_op(a.part.op);
                }
            }
        }
    }

    /// A [`BlockEffects::flash_write`], [`fill`](BlockEffects::fill) or [`copy`](BlockEffects::copy) is complete: the CRC-32C
    /// of each line that was written, or that it failed.
    pub fn flash_written(
        &mut self,
        now: Nanos,
        io: IoId,
        outcome: Result<&[u32], IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        match self.ios.remove(io.0) {
            Some(Io::Update { active, slot, first, lines }) => {
                self.updated(now, (active, slot, first, lines), outcome, fx);
            }
            Some(Io::Fill { slot, first, lines, source }) => {
                let mut groups = BTreeSet::new();
                if outcome.is_err() {
                    self.stats.flash_errors += 1;
                } else {
                    self.stats.flash_lines_written += u64::from(lines);
                }
                for i in 0..lines {
                    let (slot, line) = (SlotId(slot.0 + i), LineId(first.0 + u64::from(i)));
                    match outcome.ok().and_then(|crcs| crcs.get(i as usize)) {
                        Some(&crc) if self.enabled => {
                            self.publish(slot, line, Sum::of(line, crc));
                            self.stats.fills += 1;
                        }
                        _ => self.stats.fill_dropped += 1,
                    }
                    self.end_fill(slot, line, source, fx);
                    groups.insert(line.group());
                }
                for group in groups {
                    self.wake(now, group, fx);
                }
            }
            Some(Io::Copy { from, to, lines }) => self.copied(now, (from, to, lines), outcome, fx),
            _ => {}
        }
    }
}

fn push_run(runs: &mut Vec<(SlotId, LineId, u32)>, slot: SlotId, line: LineId) {
    match runs.last_mut() {
        Some((s, l, n)) if slot.0 == s.0 + *n && line.0 == l.0 + u64::from(*n) => *n += 1,
        _ => runs.push((slot, line, 1)),
    }
}

/// Whether `slot` is written, or something is under way with the line in it. (`lax`: a planted fault.)
pub(super) fn is_busy(
    groups: &BTreeMap<GroupId, Group>,
    reserved: &BTreeSet<SlotId>,
    slot: SlotId,
    now: Slot,
    lax: bool,
) -> bool {
    reserved.contains(&slot)
        || match now {
            Slot::Line(_) if lax => false,
            Slot::Line(l) => groups.get(&l.group()).is_some_and(|g| {
                let bit = 1u16 << l.index();
                (g.fetching | g.filling | g.moving | g.changing | g.reads()) & bit != 0
            }),
            Slot::Free | Slot::Held => false,
        }
}
