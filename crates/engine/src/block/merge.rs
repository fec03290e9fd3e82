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

#[cfg(test)]
mod tests {
    use larder_base::Words;
    use larder_policy::block::{EvictionBy, VictimPolicy};

    use super::super::address::Placing;
    use super::super::api::{BlockLimits, Part, PartKind, Source, Verdict, WriteMode};
    use super::super::map::{Making, Map, Replacement, Shape};
    use super::super::shard::{BlockConfig, Regions};
    use super::*;

    /// What the engine asked for that matters here.
    #[derive(Debug, PartialEq)]
    enum Asked {
        Fill(IoId),
        Merge(IoId, Merge, OpId),
        Change(IoId, OpId),
        Read(IoId),
        Done(OpId, bool, bool),
        Release(OpId),
    }

    #[derive(Default)]
    struct Fx(Vec<Asked>);

    impl BlockEffects for Fx {
        fn flash_read(&mut self, io: IoId, _: SlotId, _: LineId, _: u32, _: OpId) {
            self.0.push(Asked::Read(io));
        }
        fn flash_write(&mut self, io: IoId, _: SlotId, _: LineId, _: u32, _: OpId) {
            self.0.push(Asked::Fill(io));
        }
        fn fill(&mut self, io: IoId, _: SlotId, _: LineId, _: u32, _: Source) {
            self.0.push(Asked::Fill(io));
        }
        fn merge(&mut self, io: IoId, merge: Merge, op: OpId) {
            self.0.push(Asked::Merge(io, merge, op));
        }
        fn copy(&mut self, _: IoId, _: SlotId, _: SlotId, _: u32) {}
        fn backing_read(&mut self, io: IoId, _: u64, _: u32, _: OpId) {
            self.0.push(Asked::Read(io));
        }
        fn backing_change(&mut self, io: IoId, op: OpId, _: PartKind, _: u64, _: u32) {
            self.0.push(Asked::Change(io, op));
        }
        fn deliver(&mut self, _: Source, _: OpId, _: u64, _: u32) {}
        fn release(&mut self, _: IoId) {}
        fn done(&mut self, op: OpId, result: Result<(), IoFailed>, holds: bool) {
            self.0.push(Asked::Done(op, result.is_ok(), holds));
        }
        fn release_op(&mut self, op: OpId) {
            self.0.push(Asked::Release(op));
        }
        fn intent(&mut self, _: u32) {}
        fn commit_soon(&mut self) {}
        fn prefer(&mut self, _: LineId, _: LineId) -> bool {
            true
        }
    }

    const LINE: u64 = 4096;
    const NOW: Nanos = Nanos(1);

    struct Bench {
        shard: BlockShard,
        fx: Fx,
    }

    impl Bench {
        /// Line 0 is cached, with the checksum of `crc`; the bit of its region is durable.
        fn new(crc: u32) -> Bench {
            let shape = Shape::Sets { group_sets: 4, ways: 2 };
            let (entries, sums) = Map::words(shape);
            let making = Making {
                replacement: Replacement::Lru,
                reclaim: VictimPolicy::Greedy,
                evict: EvictionBy::Cache,
            };
            let placing = Placing::new(1, 4, 7);
            let map = Map::new(Words::heap(entries), Words::heap(sums), placing, 0, shape, making);
            let config = BlockConfig {
                line_bytes: LINE as u32,
                write: WriteMode::WriteThrough,
                limits: BlockLimits::default(),
                regions: Regions { groups: 64, count: 1 },
            };
            let mut bench = Bench { shard: BlockShard::new(config, map), fx: Fx::default() };
            bench.shard.intent_ready(NOW, 0, &mut bench.fx);
            bench.write(1, 0, LINE);
            let Asked::Change(io, OpId(1)) = bench.fx.0[0] else { panic!("{:?}", bench.fx.0) };
            bench.changed(io, true);
            let [Asked::Fill(io), Asked::Done(OpId(1), true, true)] = bench.asked()[..] else {
                panic!("no fill");
            };
            bench.shard.flash_written(NOW, io, Ok(&[crc]), &mut bench.fx);
            assert_eq!(bench.asked(), [Asked::Release(OpId(1))]);
            bench
        }

        fn submit(&mut self, kind: PartKind, op: u64, at: u64, len: u64) {
            let part = Part { op: OpId(op), kind, at, len: len as u32, verdict: Verdict::Admit };
            self.shard.submit(NOW, part, &mut self.fx);
        }

        fn write(&mut self, op: u64, at: u64, len: u64) {
            self.submit(PartKind::Write, op, at, len);
        }

        fn changed(&mut self, io: IoId, good: bool) {
            self.fx.0.clear();
            let outcome = if good { Ok(()) } else { Err(IoFailed) };
            self.shard.backing_changed(NOW, io, outcome, &mut self.fx);
        }

        fn merged(&mut self, io: IoId, outcome: Result<(u32, u32), IoFailed>) {
            self.shard.merged(NOW, io, outcome, &mut self.fx);
        }

        fn asked(&mut self) -> Vec<Asked> {
            std::mem::take(&mut self.fx.0)
        }

        fn is_cached(&self) -> Option<Sum> {
            let map = self.shard.map();
            map.find(LineId(0)).map(|slot| map.sum(slot))
        }
    }

    /// Two writes of different sectors of the line: their I/Os on the store, and that of the merge of the first.
    fn two_writes(bench: &mut Bench) -> (IoId, IoId, IoId) {
        bench.write(2, 0, 512);
        bench.write(3, 512, 512);
        let asked = bench.asked();
        let [Asked::Change(first, _), Asked::Merge(merge, _, OpId(2)), Asked::Change(second, _)] =
            asked[..]
        else {
            panic!("{asked:?}");
        };
        assert_eq!(bench.shard.stats().waited, 0);
        (first, second, merge)
    }

    #[test]
    fn writes_that_share_a_line_and_no_bytes_do_not_wait_for_one_another() {
        let mut bench = Bench::new(10);
        let (first, second, merge) = two_writes(&mut bench);
        // A read of the line waits for both.
        bench.submit(PartKind::Read, 4, 0, LINE);
        bench.merged(merge, Ok((10, 11)));
        let asked = bench.asked();
        let [Asked::Merge(next, Merge { at: 512, len: 512, .. }, OpId(3))] = asked[..] else {
            panic!("{asked:?}");
        };
        bench.changed(second, true);
        assert_eq!(bench.asked(), [Asked::Done(OpId(3), true, true)]);
        bench.changed(first, true);
        assert_eq!(bench.asked(), [Asked::Done(OpId(2), true, false)]);
        assert_eq!(bench.is_cached(), None, "bytes of the second are not on flash yet");
        bench.merged(next, Ok((11, 12)));
        assert_eq!(bench.is_cached(), Some(Sum::of(LineId(0), 12)));
        let asked = bench.asked();
        assert!(matches!(asked[..], [Asked::Release(OpId(3)), Asked::Read(_)]), "{asked:?}");
    }

    #[test]
    fn a_line_does_not_come_back_when_one_of_its_changes_failed() {
        for failing in 0..4 {
            let mut bench = Bench::new(10);
            let (first, second, merge) = two_writes(&mut bench);
            // The first fails on flash, or it finds what it did not write, or the second does.
            let outcome = match failing {
                0 => Err(IoFailed),
                1 => Ok((9, 11)),
                _ => Ok((10, 11)),
            };
            bench.merged(merge, outcome);
            if let [Asked::Merge(next, ..)] = bench.asked()[..] {
                assert!(failing > 1);
                bench.merged(next, if failing == 2 { Ok((99, 12)) } else { Ok((11, 12)) });
            }
            bench.changed(first, failing != 3);
            assert_eq!(bench.asked(), [Asked::Done(OpId(2), failing != 3, false)]);
            bench.changed(second, true);
            assert_eq!(
                bench.asked(),
                [Asked::Done(OpId(3), true, false)],
                "a cache never fails a write"
            );
            assert_eq!(bench.is_cached(), None, "{failing}");
            assert!(bench.shard.is_idle());
        }
    }

    #[test]
    fn a_trim_of_a_part_takes_the_line_from_writes_beside_it() {
        let mut bench = Bench::new(10);
        let (first, second, merge) = two_writes(&mut bench);
        bench.submit(PartKind::Trim, 4, 1024, 512);
        let asked = bench.asked();
        let [Asked::Change(third, OpId(4))] = asked[..] else { panic!("{asked:?}") };
        bench.merged(merge, Ok((10, 11)));
        for io in [first, second, third] {
            bench.changed(io, true);
        }
        assert_eq!(bench.is_cached(), None);
        assert!(bench.shard.is_idle());
    }

    /// A store copies a sector into the reply while another thread changes it: the client would get half of each.
    #[test]
    fn a_change_waits_for_a_read_of_its_bytes_that_brings_no_line() {
        let mut bench = Bench::new(10);
        let line = LineId(1).0 * LINE;
        let part = Part {
            op: OpId(2),
            kind: PartKind::Read,
            at: line,
            len: 1024,
            verdict: Verdict::Reject,
        };
        bench.shard.submit(NOW, part, &mut bench.fx);
        let [Asked::Read(read)] = bench.asked()[..] else { panic!("no read") };
        // Beside it, not behind.
        bench.write(3, line + 1024, 512);
        let [Asked::Change(beside, OpId(3))] = bench.asked()[..] else { panic!("no change") };
        bench.changed(beside, true);
        bench.asked();
        bench.write(4, line + 512, 512);
        assert_eq!(bench.asked(), []);
        // A whole range too.
        bench.shard.lock_range(NOW, OpId(5), LineId(1), LineId(1), &mut bench.fx);
        assert_eq!(bench.asked(), []);
        bench.shard.backing_read(NOW, read, Ok(()), &mut bench.fx);
        let asked = bench.asked();
        let [Asked::Done(OpId(2), true, _), Asked::Change(change, OpId(4))] = asked[..] else {
            panic!("{asked:?}");
        };
        bench.changed(change, true);
        let asked = bench.asked();
        assert!(asked.contains(&Asked::Done(OpId(5), true, false)), "{asked:?}");
    }

    #[test]
    fn a_region_is_not_quiet_while_a_line_is_updated_behind_a_reply() {
        let mut bench = Bench::new(10);
        bench.write(2, 0, LINE);
        let asked = bench.asked();
        let [Asked::Change(io, _), Asked::Fill(update)] = asked[..] else { panic!("{asked:?}") };
        bench.changed(io, true);
        assert_eq!(bench.asked(), [Asked::Done(OpId(2), true, true)]);
        assert!(!bench.shard.quiet(0));
        // The same bytes again wait for the update.
        bench.write(3, 0, LINE);
        assert_eq!(bench.asked(), []);
        bench.shard.flash_written(NOW, update, Ok(&[20]), &mut bench.fx);
        let asked = bench.asked();
        let [Asked::Release(OpId(2)), Asked::Change(..), Asked::Fill(_)] = asked[..] else {
            panic!("{asked:?}");
        };
    }

    #[test]
    fn so_many_updates_are_behind_replies_and_no_more() {
        let mut bench = Bench::new(10);
        bench.shard.config.limits.fills = 0;
        bench.write(2, 0, LINE);
        let asked = bench.asked();
        let [Asked::Change(io, _), Asked::Fill(update)] = asked[..] else { panic!("{asked:?}") };
        bench.changed(io, true);
        assert_eq!(bench.asked(), [], "the client waits");
        bench.shard.flash_written(NOW, update, Ok(&[20]), &mut bench.fx);
        assert_eq!(bench.asked(), [Asked::Done(OpId(2), true, false)]);
    }
}
