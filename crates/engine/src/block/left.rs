//! Lines that have left the map, and that the durable map may still name.
//!
//! A slot does not count as empty as soon as the batch that says so is durable. If the log loses its last batch to damage, nobody misses it: after
//! a power cut the line that left with that batch is named again, with the checksum that it had. A change of such a line waits for its region's bit;
//! the page that has the bit also has the length of the log. Once the next batch is durable, the one before would be missed without such a note (see
//! the header of `log.rs`).
//!
//! A run that begins with the memory of the last one does not know what the last batch said, nor whether it is still there. Until the log has a snapshot
//! of that memory, the durable map may name any line ([`Left::distrust`]).

use std::collections::{BTreeMap, BTreeSet};

use super::api::{LineId, SlotId};
use super::regions::RegionSet;
use super::slots::SlotSet;

/// See the [module](self). Not all of them: what leaves while the bit of its region is durable is not noted.
#[derive(Debug, Default)]
pub(super) struct Left {
    /// Slots of which nobody knows what the durable map has there: from an earlier run.
    unknown: SlotSet,
    slots: BTreeMap<SlotId, LineId>,
    /// The same the other way round: a line may have left several.
    lines: BTreeSet<(LineId, SlotId)>,
    /// Regions of which more lines have left than are noted one by one.
    regions: RegionSet,
    /// What was settled with the last batch.
    last: Last,
    /// The durable map may name any line.
    distrusted: bool,
}

/// What the last batch of the log says of empty slots. Nothing behind it proves that there was such a batch.
#[derive(Debug, Default)]
struct Last {
    /// Of slots of which nobody knew what the durable map had there.
    unknown: bool,
    lines: BTreeSet<LineId>,
    regions: RegionSet,
}

impl Left {
    pub(super) fn new(unknown: SlotSet) -> Left {
        Left { unknown, ..Left::default() }
    }

    /// `line` leaves `slot`.
    pub(super) fn add(&mut self, slot: SlotId, line: LineId) {
        self.forget(slot);
        self.slots.insert(slot, line);
        self.lines.insert((line, slot));
    }

    /// Lines of `region` leave: any of them.
    pub(super) fn add_region(&mut self, region: u32) {
        self.regions.set(region);
    }

    /// Whether lines of `region` have left that nobody noted.
    pub(super) fn has_region(&self, region: u32) -> bool {
        self.regions.has(region) || self.last.regions.has(region)
    }

    /// Another batch is durable; what it settles is said next. The one before cannot be lost any more without being missed.
    pub(super) fn batch(&mut self) {
        self.last = Last::default();
    }

    /// What an earlier run has left may be named by the durable map.
    pub(super) fn distrust(&mut self) {
        self.distrusted = true;
    }

    /// The durable map has a snapshot that was begun since.
    pub(super) fn trust(&mut self) {
        self.distrusted = false;
    }

    /// The durable map has every slot as it is.
    pub(super) fn all_settled(&mut self) {
        if !self.regions.is_empty() {
            self.last.regions = std::mem::take(&mut self.regions);
        }
    }

    /// The durable map has `slot` as it is.
    pub(super) fn settled(&mut self, slot: SlotId) {
        self.last.unknown |= self.unknown.contains(slot);
        let line = self.forget(slot);
        self.last.lines.extend(line);
    }

    /// Returns the line that had left `slot`.
    fn forget(&mut self, slot: SlotId) -> Option<LineId> {
        self.unknown.remove(slot);
        let line = self.slots.remove(&slot)?;
        self.lines.remove(&(line, slot));
        Some(line)
    }

    /// Whether there is no slot that any line may have left.
    pub(super) fn knows_all(&self) -> bool {
        self.unknown.len() == 0 && !self.last.unknown && !self.distrusted
    }

    /// Whether `line` is one of them.
    pub(super) fn has(&self, line: LineId) -> bool {
        let mut left = self.lines.range((line, SlotId(0))..=(line, SlotId(u32::MAX)));
        left.next().is_some() || self.last.lines.contains(&line)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use larder_base::{Nanos, Words};
    use larder_policy::block::{EvictionBy, VictimPolicy};

    use super::super::address::Placing;
    use super::super::api::{
        BlockEffects, BlockLimits, IoFailed, IoId, Merge, OpId, Part, PartKind, Source, Verdict,
        WriteMode,
    };
    use super::super::map::{Making, Map, Replacement, Shape};
    use super::super::shard::{BlockConfig, BlockShard, Regions};
    use super::*;

    const LINE: u32 = 4096;
    const NOW: Nanos = Nanos(1);

    /// I/O that was asked for.
    #[derive(Default)]
    pub(in crate::block) struct Fx {
        pub(in crate::block) flash: Vec<IoId>,
        pub(in crate::block) store: Vec<IoId>,
        pub(in crate::block) bits: u32,
    }

    impl BlockEffects for Fx {
        fn flash_read(&mut self, io: IoId, _: SlotId, _: LineId, _: u32, _: OpId) {
            self.flash.push(io);
        }
        fn flash_write(&mut self, io: IoId, _: SlotId, _: LineId, _: u32, _: OpId) {
            self.flash.push(io);
        }
        fn fill(&mut self, io: IoId, _: SlotId, _: LineId, _: u32, _: Source) {
            self.flash.push(io);
        }
        fn merge(&mut self, _: IoId, _: Merge, _: OpId) {}
        fn copy(&mut self, _: IoId, _: SlotId, _: SlotId, _: u32) {}
        fn backing_read(&mut self, io: IoId, _: u64, _: u32, _: OpId) {
            self.store.push(io);
        }
        fn backing_change(&mut self, io: IoId, _: OpId, _: PartKind, _: u64, _: u32) {
            self.store.push(io);
        }
        fn deliver(&mut self, _: Source, _: OpId, _: u64, _: u32) {}
        fn release(&mut self, _: IoId) {}
        fn done(&mut self, _: OpId, _: Result<(), IoFailed>, _: bool) {}
        fn release_op(&mut self, _: OpId) {}
        fn intent(&mut self, _: u32) {
            self.bits += 1;
        }
        fn commit_soon(&mut self) {}
        fn prefer(&mut self, _: LineId, _: LineId) -> bool {
            true
        }
    }

    fn submit(shard: &mut BlockShard, fx: &mut Fx, op: u64, kind: PartKind) {
        let part = Part { op: OpId(op), kind, at: 0, len: LINE, verdict: Verdict::Admit };
        shard.submit(NOW, part, fx);
    }

    /// A batch becomes durable. Returns how many records the shard had for it.
    fn batch(shard: &mut BlockShard, fx: &mut Fx) -> usize {
        let mut records = Vec::new();
        shard.take_records(100, &mut records);
        shard.records_durable(NOW, fx);
        records.len()
    }

    /// Line 0 was cached, durably, and has left the map, durably; its region has no bit.
    fn without_its_line() -> (BlockShard, Fx) {
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
            line_bytes: LINE,
            write: WriteMode::WriteThrough,
            limits: BlockLimits::default(),
            regions: Regions { groups: 64, count: 1 },
        };
        let (mut shard, mut fx) = (BlockShard::new(config, map), Fx::default());
        shard.intent_ready(NOW, 0, &mut fx);
        submit(&mut shard, &mut fx, 1, PartKind::Write);
        shard.backing_changed(NOW, fx.store.remove(0), Ok(()), &mut fx);
        shard.flash_written(NOW, fx.flash.remove(0), Ok(&[10]), &mut fx);
        assert!(shard.quiet(0) && batch(&mut shard, &mut fx) == 1);
        submit(&mut shard, &mut fx, 2, PartKind::Read);
        // Its checksum is not that of what was written.
        shard.flash_read(NOW, fx.flash.remove(0), Ok(&[11]), &mut fx);
        shard.backing_read(NOW, fx.store.remove(0), Ok(()), &mut fx);
        assert!(shard.is_idle() && shard.lines() == 0);
        assert_eq!(batch(&mut shard, &mut fx), 1);
        (shard, fx)
    }

    /// If the log lost the batch with which the line left, nobody would miss it: a start would believe the line, which was changed since.
    #[test]
    fn a_line_that_left_with_the_last_batch_is_not_changed_ahead_of_its_bit() {
        let (mut shard, mut fx) = without_its_line();
        submit(&mut shard, &mut fx, 3, PartKind::Write);
        assert_eq!((fx.bits, fx.store.len()), (1, 0), "it waits for the bit");
        shard.intent_ready(NOW, 0, &mut fx);
        assert_eq!(fx.store.len(), 1);
    }

    #[test]
    fn a_line_that_left_before_the_last_batch_is_changed_ahead_of_its_bit() {
        let (mut shard, mut fx) = without_its_line();
        // (Its records are other shards'.)
        assert_eq!(batch(&mut shard, &mut fx), 0);
        submit(&mut shard, &mut fx, 3, PartKind::Write);
        assert_eq!((fx.bits, fx.store.len()), (1, 1));
    }
}
