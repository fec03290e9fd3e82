//! Cleaning the log of segments: lines move to other slots, or go, so that whole segments become free.
//!
//! The map says what is to be done ([`Map::next_clean`](super::map::Map::next_clean)); here is how. It is driven by what
//! happens anyway: a fill takes slots, a copy ends, the log has freed some. Clients wait for none of it.

use std::collections::BTreeSet;

use larder_base::Nanos;

use super::api::{BlockEffects, IoFailed, IoId, LineId, SlotId, Sum};
use super::fill::is_busy;
use super::map::{Clean, Slot};
use super::planted::Planted;
use super::shard::{BlockShard, Io};

/// Lines that move at a time.
const COPIES: u32 = 64;
/// Lines that are dropped or copied in one call: no client waits long for the shard.
const STEPS: u32 = 512;

/// A run of lines that move together: first slots, and the lines with their checksums.
type Run = (SlotId, SlotId, Vec<(LineId, Sum)>);

impl BlockShard {
    /// Goes on with cleaning, as far as that is needed and can be done now.
    pub(super) fn clean(&mut self, fx: &mut impl BlockEffects) {
        if !self.enabled || self.map.updates_in_place() {
            return;
        }
        let mut run: Option<Run> = None;
        for _ in 0..STEPS {
            if self.copies >= COPIES {
                break;
            }
            let (groups, reserved, ranges) = (&self.groups, &self.reserved, &self.ranges);
            let (voids, regions) = (&self.voids, self.config.regions);
            let next = self.map.next_clean(
                |line| fx.keep(line, None),
                |line| ranges.iter().any(|r| r.has(line)) || voids.has(regions.of(line)),
                |slot, line| is_busy(groups, reserved, slot, Slot::Line(line), false),
            );
            match next {
                None => break,
                Some(Clean::Drop(slot)) => {
                    self.leave(slot);
                    self.map.evict(slot);
                    self.record(slot);
                    self.stats.evicted += 1;
                }
                Some(Clean::Copy { line, from, to }) => {
                    self.reserved.insert(to);
                    self.copies += 1;
                    self.group(line.group()).moving |= 1 << line.index();
                    let moved = (line, self.map.sum(from));
                    match &mut run {
                        Some((f, t, lines))
                            if from.0 == f.0 + lines.len() as u32
                                && to.0 == t.0 + lines.len() as u32 =>
                        {
                            lines.push(moved);
                        }
                        _ => {
                            if let Some(run) = run.replace((from, to, vec![moved])) {
                                self.begin_copy(run, fx);
                            }
                        }
                    }
                }
            }
        }
        if let Some(run) = run {
            self.begin_copy(run, fx);
        }
        if self.map.cleaning().1 {
            // What was emptied becomes free by the log.
            fx.commit_soon();
        }
    }

    fn begin_copy(&mut self, (from, to, lines): Run, fx: &mut impl BlockEffects) {
        let count = lines.len() as u32;
        let io = IoId(self.ios.insert(Io::Copy { from, to, lines }));
        fx.copy(io, from, to, count);
    }

    /// A copy is complete.
    pub(super) fn copied(
        &mut self,
        now: Nanos,
        (from, to, lines): Run,
        outcome: Result<&[u32], IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        if outcome.is_err() {
            self.stats.flash_errors += 1;
        } else {
            self.stats.flash_lines_written += lines.len() as u64;
        }
        let mut groups = BTreeSet::new();
        for (i, &(line, sum)) in (0u32..).zip(&lines) {
            let (old, new) = (SlotId(from.0 + i), SlotId(to.0 + i));
            let here = self.map.find(line) == Some(old) || self.planted(Planted::CopyIgnoresChange);
            let right =
                |crc: &u32| Sum::of(line, *crc) == sum || self.planted(Planted::CopyNotVerified);
            match outcome.ok().and_then(|crcs| crcs.get(i as usize)) {
                _ if !here || !self.enabled => {}
                Some(crc) if right(crc) => {
                    // The old slot first: a kill in between costs a line, and leaves no line twice.
                    let sum = Sum::of(line, *crc);
                    if self.map.get(old) == Slot::Line(line) {
                        self.leave(old);
                        self.map.hold(old);
                    }
                    if !self.planted(Planted::OldCopyNotRecorded) {
                        self.record(old);
                    } else if self.map.get(old) == Slot::Held {
                        self.map.free(old);
                    }
                    self.publish(new, line, sum);
                    self.stats.copied += 1;
                }
                found => {
                    self.stats.corrupt += u64::from(found.is_some());
                    self.leave(old);
                    self.drop_line(old);
                }
            }
            self.unreserve(new);
            self.map.copied();
            self.copies -= 1;
            self.group(line.group()).moving &= !(1 << line.index());
            groups.insert(line.group());
        }
        for group in groups {
            self.wake(now, group, fx);
        }
        self.clean(fx);
    }
}
