//! The world as the log sees it.

use larder_engine::block::{IoFailed, LogShards, MapRecord, SlotId, TableChange};
use larder_format::block::log::Held;

use super::World;

/// The shards as the log sees them: the world goes on between its calls.
pub(super) struct InWorld<'a>(pub(super) &'a mut World);

impl InWorld<'_> {
    fn meanwhile(&mut self) {
        while self.0.rng.chance(0.3) {
            self.0.advance();
        }
    }
}

impl LogShards for InWorld<'_> {
    fn records_waiting(&mut self, shard: u32) -> usize {
        self.0.shards[shard as usize].records_waiting()
    }
    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        let from = out.len();
        self.0.shards[shard as usize].take_records(most, out);
        self.0.writing.extend(out[from..].iter().map(|&r| (shard as usize, r)));
        self.meanwhile();
    }
    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        self.0.shards[shard as usize].take_pages(most.min(2), out);
        let cleared = out.iter().filter(|c| matches!(c, TableChange::Cleared { .. })).count();
        self.0.seen.cleared_pages += cleared as u64;
        self.meanwhile();
    }
    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        self.0.shards[shard as usize].emptied(out);
        self.meanwhile();
    }
    fn records_durable(&mut self, shard: u32) {
        self.meanwhile();
        let now = self.0.now();
        self.0.recorded(shard as usize, true);
        self.0.call(shard as usize, |s, fx| s.records_durable(now, fx));
    }
    fn records_lost(&mut self, shard: u32) {
        self.0.recorded(shard as usize, false);
        self.0.shards[shard as usize].records_lost();
    }
    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        self.0.shards[shard as usize].state(first, most, out);
        self.meanwhile();
    }
    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        self.meanwhile();
        let now = self.0.now();
        let flushing = &self.0.flushing;
        (self.0.time < flushing.hurried || flushing.changes.is_quiet(now, region))
            && self.0.shards[shard as usize].quiet(region)
    }
    fn intent_ready(&mut self, shard: u32, region: u32) {
        self.0.flushing.flushes.anew(region);
        let now = self.0.now();
        self.0.call(shard as usize, |s, fx| s.intent_ready(now, region, fx));
        self.0.waiting.durable(region);
        self.0.go_on();
    }
    fn flush_backing(&mut self, region: u32) -> Result<(), IoFailed> {
        if self.0.region_is_durable(region) { Ok(()) } else { Err(IoFailed) }
    }
}
