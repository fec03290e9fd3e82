//! Cached lines that are overwritten in part: their new bytes are laid over the old ones on flash.
//!
//! Changes of one line that share none of its bytes run at the same time, because a store without a cache would run them
//! so: a client whose requests do not begin where lines do, or that writes single sectors, has two such changes wherever a
//! line ends. The backing store gets each at once; on flash they are laid over the line one after the other, in any order.
//! The line comes back into the map when the last change that has a part of it is finished, and only if all of them, on
//! both devices, went well.

use std::collections::VecDeque;

use larder_base::Nanos;

use super::api::{BlockEffects, GroupId, IoFailed, IoId, LineId, Merge, OpId, SlotId, Sum};
use super::fill::is_busy;
use super::map::{Slot, Want};
use super::planted::Planted;
use super::shard::{BlockShard, Io};

/// A line that changes have parts of, and that is to come back.
#[derive(Debug)]
pub(super) struct Merging {
    line: LineId,
    /// Where it will lie.
    slot: SlotId,
    /// What `slot` holds.
    sum: Sum,
    /// It cannot come back.
    lost: bool,
    /// An I/O lays bytes over it.
    running: bool,
    /// What is still to be laid over it: which change, from where to where.
    queue: VecDeque<(u32, u64, u64)>,
}

/// An I/O of the chain of a line.
pub(super) type Next = (IoId, Merge, OpId);

impl BlockShard {
    fn merging(&mut self, line: LineId) -> Option<&mut Merging> {
        let group = self.groups.get_mut(&line.group())?;
        group.merging.iter_mut().find(|m| m.line == line)
    }

    /// `line` is in the map, in `slot`, and the change `active` overwrites bytes `from..to` of it: it leaves the map, to come
    /// back in its slot, or in another if there is one. Else it stays away.
    pub(super) fn begin_merge(
        &mut self,
        slot: SlotId,
        line: LineId,
        active: u32,
        (from, to): (u64, u64),
    ) -> Option<Next> {
        let sum = self.map.sum(slot);
        let place = if self.map.updates_in_place() {
            self.map.hit(slot);
            self.begin_update(slot);
            slot
        } else {
            self.map.drop_line(slot);
            self.record(slot);
            let (groups, reserved) = (&self.groups, &self.reserved);
            let busy = |slot: SlotId, now: Slot| is_busy(groups, reserved, slot, now, false);
            let choice = self.map.choose(line, busy, Want::Place);
            let Some(choice) = choice.filter(|c| c.rival.is_none()) else {
                self.stats.dropped += 1;
                return None;
            };
            self.reserve(choice.slot);
            self.map.begin_read(slot);
            choice.slot
        };
        let queue = VecDeque::new();
        let new = Merging { line, slot: place, sum, lost: false, running: true, queue };
        self.group(line.group()).merging.push(new);
        self.merge_io(
            active,
            Merge { line, from: slot, to: place, at: from, len: (to - from) as u32 },
            sum,
        )
    }

    fn merge_io(&mut self, active: u32, merge: Merge, sum: Sum) -> Option<Next> {
        let op = self.actives.get(active)?.part.op;
        Some((IoId(self.ios.insert(Io::Merge { active, merge, sum })), merge, op))
    }

    /// Whether `line` is being merged, and so in no map.
    pub(super) fn joins_merge(&mut self, line: LineId) -> bool {
        self.merging(line).is_some()
    }

    /// The change `active` overwrites `bytes` of a line that is [being merged](BlockShard::joins_merge), or nothing that could
    /// be laid over it: then the line is lost. Returns whether the change waits for it, and the I/O if one begins now.
    pub(super) fn join_merge(
        &mut self,
        line: LineId,
        active: u32,
        bytes: Option<(u64, u64)>,
    ) -> (bool, Option<Next>) {
        let forgets = self.planted(Planted::MergeNotJoined);
        let Some(merging) = self.merging(line) else { return (false, None) };
        match bytes {
            _ if forgets => return (false, None),
            Some((from, to)) if !merging.lost => merging.queue.push_back((active, from, to)),
            _ => {
                merging.lost = true;
                return (false, None);
            }
        }
        (true, self.next_merge(line))
    }

    /// The next I/O of the chain of `line`, if none is under way.
    fn next_merge(&mut self, line: LineId) -> Option<Next> {
        let merging = self.merging(line).filter(|m| !m.running)?;
        let (active, from, to) = merging.queue.pop_front()?;
        merging.running = true;
        let (slot, sum) = (merging.slot, merging.sum);
        let merge = Merge { line, from: slot, to: slot, at: from, len: (to - from) as u32 };
        self.merge_io(active, merge, sum)
    }

    /// A [`BlockEffects::merge`] is complete: the CRC-32C of the line as it was read, and as it was written.
    pub fn merged(
        &mut self,
        now: Nanos,
        io: IoId,
        outcome: Result<(u32, u32), IoFailed>,
        fx: &mut impl BlockEffects,
    ) {
        let Some(Io::Merge { active, merge: Merge { line, from, to, .. }, sum }) =
            self.ios.remove(io.0)
        else {
            return;
        };
        if from != to {
            self.map.end_read(from);
        }
        let after = match outcome {
            Ok((before, after))
                if Sum::of(line, before) == sum || self.planted(Planted::MergeNotVerified) =>
            {
                self.stats.flash_lines_written += 1;
                Some(Sum::of(line, after))
            }
            Ok(_) => {
                self.stats.corrupt += 1;
                None
            }
            Err(IoFailed) => {
                self.stats.flash_errors += 1;
                None
            }
        };
        let mut given_up = VecDeque::new();
        if let Some(merging) = self.merging(line) {
            merging.running = false;
            match after {
                Some(sum) => merging.sum = sum,
                None => merging.lost = true,
            }
            if merging.lost {
                given_up = std::mem::take(&mut merging.queue);
            }
        }
        if let Some((io, merge, op)) = self.next_merge(line) {
            fx.merge(io, merge, op);
        }
        // A cache that fails is no failure of the write.
        self.step(now, active, false, fx);
        for (waiting, ..) in given_up {
            self.step(now, waiting, false, fx);
        }
    }

    /// A change of `mask` in `group` is finished: lines that no other change has any more come back, or stay away for good.
    pub(super) fn end_merges(&mut self, group: GroupId, mask: u16, failed: bool) {
        let failed = failed && !self.planted(Planted::FailedChangePublished);
        let Some(entry) = self.groups.get_mut(&group) else { return };
        let changing = entry.changing;
        for merging in &mut entry.merging {
            // What the backing store has now is not known.
            merging.lost |= failed && mask & 1 << merging.line.index() != 0;
        }
        let ended = |m: &mut Merging| changing & 1 << m.line.index() == 0;
        let ended: Vec<Merging> = entry.merging.extract_if(.., ended).collect();
        for Merging { line, slot, sum, lost, .. } in ended {
            if lost || !self.enabled {
                self.stats.dropped += 1;
                self.record(slot);
            } else {
                self.publish(slot, line, sum);
                self.stats.updated += 1;
            }
            self.unreserve(slot);
        }
    }
}
