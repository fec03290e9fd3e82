//! Reads: hits from flash, misses from the backing store, one backing read for all who wait for a line.

use larder_base::Nanos;

use super::api::{
    BlockEffects, GroupId, IoFailed, IoId, LineId, Part, PartKind, SlotId, Source, Sum, Verdict,
};
use super::fill::is_busy;
use super::map::Slot;
use super::planted::Planted;
use super::shard::{Active, BlockShard, FillSource, Io, Want};

/// Where a line of a read comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum From {
    Fill(FillSource),
    Fetch(IoId),
    Flash(SlotId),
    Backing,
}

impl BlockShard {
    /// The bytes of `part` that lie in line `index` of `group`.
    fn within(&self, part: &Part, line: LineId) -> (u64, u64) {
        let start = self.line_start(line);
        let end = start + u64::from(self.config.line_bytes);
        (part.at.max(start), (part.at + u64::from(part.len)).min(end))
    }

    fn source_of(&mut self, group: GroupId, line: LineId, at: u64, len: u32) -> From {
        let entry = self.group(group);
        if let Some(&(_, source)) = entry.fills.iter().find(|(i, _)| *i == line.index()) {
            return From::Fill(source);
        }
        let fetches = entry.fetches.clone();
        for io in fetches {
            if let Some(Io::Fetch { at: from, len: bytes, whole, .. }) = self.ios.get(io.0)
                && whole & 1 << line.index() != 0
                && *from <= at
                && at + u64::from(len) <= from + u64::from(*bytes)
            {
                return From::Fetch(io);
            }
        }
        match self.enabled.then(|| self.map.find(line)).flatten() {
            Some(slot) => From::Flash(slot),
            None => From::Backing,
        }
    }

    pub(super) fn start_read(
        &mut self,
        part: Part,
        group: GroupId,
        mask: u16,
        fx: &mut impl BlockEffects,
    ) {
        let active = self.actives.insert(Active {
            part,
            pending: 1,
            failed: false,
            updated: Vec::new(),
            lost: Vec::new(),
            fill: 0,
            renew: 0,
            refs: 0,
            behind: 0,
            answered: false,
        });
        let prefetch = part.kind == PartKind::Prefetch;
        let lines: Vec<LineId> =
            (0..16).filter(|i| mask & 1 << i != 0).map(|i| group.line(i)).collect();
        let mut run: Option<(From, LineId, u32, u64, u64)> = None;
        for &line in &lines {
            let (from_byte, to_byte) = self.within(&part, line);
            let from = self.source_of(group, line, from_byte, (to_byte - from_byte) as u32);
            if !prefetch {
                self.stats.read_lines += 1;
                match from {
                    From::Fill(_) | From::Fetch(_) => self.stats.read_shared += 1,
                    From::Flash(_) => self.stats.read_hits += 1,
                    From::Backing => {}
                }
            }
            if let From::Flash(slot) = from {
                self.map.hit(slot);
            }
            // Neighbours from the same source become one I/O.
            run = Some(match run {
                Some((source, first, n, a, _))
                    if match (source, from) {
                        (From::Backing, From::Backing) => true,
                        (From::Flash(s), From::Flash(t)) => t.0 == s.0 + n,
                        (From::Fetch(a), From::Fetch(b)) => a == b,
                        (From::Fill(a), From::Fill(b)) => a == b,
                        _ => false,
                    } =>
                {
                    (source, first, n + 1, a, to_byte)
                }
                Some(done) => {
                    self.issue_read(active, group, done, &part, fx);
                    (from, line, 1, from_byte, to_byte)
                }
                None => (from, line, 1, from_byte, to_byte),
            });
        }
        if let Some(last) = run {
            self.issue_read(active, group, last, &part, fx);
        }
        // The one pending that kept the part from being finished while it was begun.
        self.finish_begin(active, fx);
    }

    fn finish_begin(&mut self, active: u32, fx: &mut impl BlockEffects) {
        let Some(a) = self.actives.get_mut(active) else { return };
        a.pending -= 1;
        if a.pending == 0
            && let Some(a) = self.actives.remove(active)
        {
            fx.done(a.part.op, if a.failed { Err(IoFailed) } else { Ok(()) }, false);
        }
    }

    fn await_one(&mut self, active: u32) {
        if let Some(a) = self.actives.get_mut(active) {
            a.pending += 1;
        }
    }

    fn issue_read(
        &mut self,
        active: u32,
        group: GroupId,
        (from, first, lines, at, end): (From, LineId, u32, u64, u64),
        part: &Part,
        fx: &mut impl BlockEffects,
    ) {
        let len = (end - at) as u32;
        let want = Want { active, at, len };
        let prefetch = part.kind == PartKind::Prefetch;
        match from {
            From::Fill(source) => {
                if !prefetch {
                    let source = self.outer_source(source);
                    fx.deliver(source, part.op, at, len);
                }
            }
            From::Fetch(io) => {
                self.await_one(active);
                if let Some(Io::Fetch { wants, .. }) = self.ios.get_mut(io.0) {
                    wants.push(want);
                }
            }
            From::Flash(slot) => {
                if prefetch {
                    return;
                }
                self.await_one(active);
                let mut sums = [Sum::default(); 16];
                for i in 0..lines {
                    self.group(group).reading[(first.index() + i) as usize] += 1;
                    self.map.begin_read(SlotId(slot.0 + i));
                    sums[i as usize] = self.map.sum(SlotId(slot.0 + i));
                }
                let io = IoId(self.ios.insert(Io::FlashRead { slot, first, lines, want, sums }));
                fx.flash_read(io, slot, first, lines, part.op);
            }
            From::Backing => {
                let room = self.config.limits.fills.saturating_sub(self.fills);
                let fill = self.enabled
                    && (prefetch || part.verdict != Verdict::Reject)
                    && self.finds_room(part, first, lines);
                if fill && room < lines {
                    self.stats.fill_dropped += u64::from(lines);
                } else if !fill && self.enabled && !prefetch {
                    // (What is read ahead in vain is asked for again, and counts then.)
                    self.stats.fill_rejected += u64::from(lines);
                }
                if fill && room >= lines {
                    self.fetch_whole(active, group, first, lines, want, part, fx);
                } else if !prefetch {
                    self.fetch_exactly(active, group, want, fx);
                }
            }
        }
    }

    /// Whether lines that may have free slots only find some: one of them, or each where nobody asks for them yet. (To be read
    /// ahead in pieces would cost the client's own read more than it gains.)
    fn finds_room(&self, part: &Part, first: LineId, lines: u32) -> bool {
        if part.verdict != Verdict::IfFree || self.planted(Planted::IfFreeDisplaces) {
            return true;
        }
        let (groups, reserved) = (&self.groups, &self.reserved);
        let busy = |slot: SlotId, now: Slot| is_busy(groups, reserved, slot, now, false);
        let free = self.map.free_for(first, lines, self.fills, busy);
        if part.kind == PartKind::Prefetch { free == lines } else { free > 0 }
    }

    /// Brings whole lines, to be filled; whoever wants one of them meanwhile waits for this fetch.
    #[expect(
        clippy::too_many_arguments,
        reason = "one call, from the only place that has all of these at hand"
    )]
    fn fetch_whole(
        &mut self,
        active: u32,
        group: GroupId,
        first: LineId,
        lines: u32,
        want: Want,
        part: &Part,
        fx: &mut impl BlockEffects,
    ) {
        self.await_one(active);
        let whole = (first.index()..first.index() + lines).fold(0u16, |m, i| m | 1 << i);
        let (at, len) = (self.line_start(first), lines * self.config.line_bytes);
        let io = IoId(self.ios.insert(Io::Fetch {
            group,
            at,
            len,
            whole,
            verdict: match (part.kind, part.verdict) {
                (_, Verdict::IfFree) => Verdict::IfFree,
                (PartKind::Prefetch, _) => Verdict::Admit,
                (_, verdict) => verdict,
            },
            wants: vec![want],
            refs: 0,
        }));
        self.fills += lines;
        let entry = self.group(group);
        entry.fetching |= whole;
        entry.fetches.push(io);
        fx.backing_read(io, at, len, part.op);
    }

    /// Brings just the bytes that are wanted, for this part alone. A change of any of them waits for it: a store may copy a
    /// sector into the reply while it is changed, and no disk returns half of one write and half of another.
    pub(super) fn fetch_exactly(
        &mut self,
        active: u32,
        group: GroupId,
        want: Want,
        fx: &mut impl BlockEffects,
    ) {
        self.await_one(active);
        let (at, len) = (want.at, want.len);
        let io = IoId(self.ios.insert(Io::Fetch {
            group,
            at,
            len,
            whole: 0,
            verdict: Verdict::Reject,
            wants: vec![want],
            refs: 0,
        }));
        self.group(group).fetches.push(io);
        let op = self.actives.get(active).map(|a| a.part.op).unwrap_or_default();
        fx.backing_read(io, at, len, op);
    }

    /// A [`BlockEffects::flash_read`] is complete: the CRC-32C of each line that was read, or that it failed.
    pub fn flash_read(
        &mut self,
        now: Nanos,
        io: IoId,
        outcome: Result<&[u32], IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        let Some(Io::FlashRead { slot: begin, first, lines, want, sums }) = self.ios.remove(io.0)
        else {
            return;
        };
        let group = first.group();
        for i in 0..lines {
            self.group(group).reading[(first.index() + i) as usize] -= 1;
        }
        if outcome.is_err() {
            self.stats.flash_errors += 1;
        }
        let part = self.actives.get(want.active).map(|a| a.part);
        let mut good_from = want.at;
        let mut at = want.at;
        if let Some(part) = part {
            for i in 0..lines {
                let (line, slot) = (LineId(first.0 + u64::from(i)), SlotId(begin.0 + i));
                let (from, to) = self.within(&part, line);
                let good = match outcome {
                    Ok(_) if self.planted(Planted::SumNotCompared) => true,
                    Ok(crcs) => crcs
                        .get(i as usize)
                        .is_some_and(|&crc| Sum::of(line, crc) == sums[i as usize]),
                    Err(IoFailed) => false,
                };
                if !good {
                    if outcome.is_ok() {
                        self.stats.corrupt += 1;
                    }
                    if good_from < from {
                        fx.deliver(Source::Io(io), part.op, good_from, (from - good_from) as u32);
                    }
                    // Another reader of the line may have dropped it already.
                    let free = self.map.outlives_reads() || !self.is_read(line);
                    if self.map.find(line) == Some(slot) && free && !self.is_moving(line) {
                        self.leave(slot);
                        self.drop_line(slot);
                    }
                    self.stats.read_hits -= 1;
                    self.fetch_exactly(
                        want.active,
                        group,
                        Want { active: want.active, at: from, len: (to - from) as u32 },
                        fx,
                    );
                    good_from = to;
                }
                at = to;
            }
            if good_from < at {
                fx.deliver(Source::Io(io), part.op, good_from, (at - good_from) as u32);
            }
        }
        (0..lines).for_each(|i| self.map.end_read(SlotId(begin.0 + i)));
        fx.release(io);
        self.step(now, want.active, false, fx);
        self.wake(now, group, fx);
    }

    /// Whether the cleaner has `line`: it will find out for itself.
    fn is_moving(&self, line: LineId) -> bool {
        self.groups.get(&line.group()).is_some_and(|g| g.moving & 1 << line.index() != 0)
    }

    /// Whether another flash read of `line` is under way: then its slot must stay as it is.
    fn is_read(&self, line: LineId) -> bool {
        self.groups.get(&line.group()).is_some_and(|g| g.reading[line.index() as usize] > 0)
    }

    /// A [`BlockEffects::backing_read`] is complete.
    pub fn backing_read(
        &mut self,
        now: Nanos,
        io: IoId,
        outcome: Result<(), IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        let Some(Io::Fetch { group, whole, verdict, wants, .. }) = self.ios.get_mut(io.0) else {
            return;
        };
        let (group, whole, verdict, wants) = (*group, *whole, *verdict, std::mem::take(wants));
        let failed = outcome.is_err();
        if failed {
            self.stats.backing_errors += 1;
        }
        let entry = self.group(group);
        entry.fetching &= !whole;
        entry.fetches.retain(|&f| f != io);
        self.fills -= whole.count_ones();
        for want in &wants {
            let Some(part) = self.actives.get(want.active).map(|a| a.part) else { continue };
            if !failed && part.kind == PartKind::Read {
                fx.deliver(Source::Io(io), part.op, want.at, want.len);
            }
        }
        let mut refs = 0;
        if !failed && whole != 0 {
            refs = self.start_fills(group, whole, FillSource::Fetch(io), (verdict, 0), fx);
        }
        if refs == 0 {
            self.ios.remove(io.0);
            fx.release(io);
        } else if let Some(Io::Fetch { refs: kept, .. }) = self.ios.get_mut(io.0) {
            *kept = refs;
        }
        for want in wants {
            self.step(now, want.active, failed, fx);
        }
        self.wake(now, group, fx);
    }
}
