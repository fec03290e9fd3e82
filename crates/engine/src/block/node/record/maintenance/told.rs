//! What maintenance tells shards and its host, noted; and both as they are in a replay.

use std::cell::RefCell;

use larder_base::Nanos;
use larder_format::block::BlockSuperblock;
use larder_format::block::log::Held;
use larder_policy::block::VolumeId;

use crate::block::api::{IoFailed, OpId, SlotId, Sum};
use crate::block::log::LogShards;
use crate::block::node::calls::{Copying, Fill, Load};
use crate::block::node::event::ShardIo;
use crate::block::node::failing::FlashError;
use crate::block::node::maintenance::{Effects, Shards};
use crate::block::paging::TableChange;
use crate::block::record::digest::Digest;
use crate::block::record::log::{Heard, Noting, Told};
use crate::block::shard::MapRecord;

impl<S: Shards> Noting<'_, S> {
    fn told(&self, numbers: &[u64]) {
        self.heard.borrow_mut().digest.all(numbers);
    }
}

/// Shards as the log sees them, of those that maintenance has.
struct Seen<'a, S>(&'a mut S, Nanos);

impl<S: Shards> LogShards for Seen<'_, S> {
    fn records_waiting(&mut self, shard: u32) -> usize {
        self.0.records_waiting(shard)
    }

    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        self.0.take_records(shard, most, out);
    }

    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        self.0.take_pages(shard, most, out);
    }

    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        self.0.emptied(shard, out);
    }

    fn records_durable(&mut self, shard: u32) {
        self.0.records_durable(self.1, shard);
    }

    fn records_lost(&mut self, shard: u32) {
        self.0.records_lost(shard);
    }

    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        self.0.state(shard, first, most, out);
    }

    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        self.0.quiet(shard, region)
    }

    fn intent_ready(&mut self, shard: u32, region: u32) {
        self.0.intent_ready(self.1, shard, region);
    }

    /// Maintenance knows itself.
    fn flush_backing(&mut self, _: u32) -> Result<(), IoFailed> {
        Err(IoFailed)
    }
}

impl<S: Shards> Noting<'_, S> {
    /// What the log has of shards too is noted as it is there.
    fn seen<R>(&mut self, now: Nanos, f: impl FnOnce(&mut Noting<'_, Seen<'_, S>>) -> R) -> R {
        let (heard, layout) = (self.heard, self.layout);
        f(&mut Noting { inner: &mut Seen(&mut *self.inner, now), heard, layout })
    }
}

/// A shard is told of an I/O that has ended: a write, or a page of the table that was read.
pub(super) fn note_ended(digest: &mut Digest, written: bool, io: [u64; 3]) {
    digest.add(if written { 20 } else { 21 });
    digest.all(&io);
}

impl<S: Shards> Shards for Noting<'_, S> {
    fn shards(&self) -> u32 {
        self.layout.shards
    }

    fn records_waiting(&mut self, shard: u32) -> usize {
        self.seen(Nanos::ZERO, |s| s.records_waiting(shard))
    }

    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        self.seen(Nanos::ZERO, |s| s.take_records(shard, most, out));
    }

    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        self.seen(Nanos::ZERO, |s| s.take_pages(shard, most, out));
    }

    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        self.seen(Nanos::ZERO, |s| s.emptied(shard, out));
    }

    fn records_durable(&mut self, now: Nanos, shard: u32) {
        self.seen(now, |s| s.records_durable(shard));
    }

    fn records_lost(&mut self, shard: u32) {
        self.seen(Nanos::ZERO, |s| s.records_lost(shard));
    }

    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        self.seen(Nanos::ZERO, |s| s.state(shard, first, most, out));
    }

    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        self.seen(Nanos::ZERO, |s| s.quiet(shard, region))
    }

    fn intent_ready(&mut self, now: Nanos, shard: u32, region: u32) {
        self.seen(now, |s| s.intent_ready(shard, region));
    }

    fn flash_written(&mut self, now: Nanos, io: ShardIo, sums: Result<&[u32], IoFailed>) {
        let numbers = [io.shard.into(), io.io.0.into(), sums.is_ok().into()];
        note_ended(&mut self.heard.borrow_mut().digest, true, numbers);
        self.inner.flash_written(now, io, sums);
    }

    fn page_loaded(&mut self, now: Nanos, io: ShardIo, slots: Result<&[Option<Sum>], IoFailed>) {
        let numbers = [io.shard.into(), io.io.0.into(), slots.is_ok().into()];
        note_ended(&mut self.heard.borrow_mut().digest, false, numbers);
        self.inner.page_loaded(now, io, slots);
    }

    /// What has ended is in the record, and what follows comes with other work.
    fn flash_ended(&mut self, now: Nanos, ended: Result<(), FlashError>) {
        self.inner.flash_ended(now, ended);
    }

    fn sweep(&mut self, shard: u32, steps: u32) -> bool {
        let more = self.inner.sweep(shard, steps);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[22, shard.into(), steps.into()]);
        heard.answers.push(more);
        more
    }

    fn disable(&mut self, now: Nanos, shard: u32) {
        self.told(&[23, shard.into()]);
        self.inner.disable(now, shard);
    }

    /// Asked by who waits, and decided upon by nobody here.
    fn unsettled(&mut self, shard: u32) -> usize {
        self.inner.unsettled(shard)
    }

    fn bits_ready(&mut self, op: OpId) {
        self.told(&[24, op.0]);
        self.inner.bits_ready(op);
    }

    fn budget_kept(&mut self, op: OpId) {
        self.told(&[28, op.0]);
        self.inner.budget_kept(op);
    }

    fn is_left_alone(&mut self, now: Nanos, region: u32) -> bool {
        let alone = self.inner.is_left_alone(now, region);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[25, now.0, region.into()]);
        heard.answers.push(alone);
        alone
    }

    fn store_of(&mut self, region: u32) -> Option<VolumeId> {
        let store = self.inner.store_of(region);
        let mut heard = self.heard.borrow_mut();
        heard.digest.all(&[26, region.into()]);
        heard.numbers.push(store.map_or(0, |store| u64::from(store.0) + 1));
        store
    }

    fn stores(&mut self) -> Vec<VolumeId> {
        let stores = self.inner.stores();
        let mut heard = self.heard.borrow_mut();
        heard.digest.add(27);
        heard.numbers.push(stores.len() as u64);
        heard.numbers.extend(stores.iter().map(|store| u64::from(store.0)));
        stores
    }
}

impl Shards for Told<'_> {
    fn shards(&self) -> u32 {
        self.layout.shards
    }

    fn records_waiting(&mut self, shard: u32) -> usize {
        LogShards::records_waiting(self, shard)
    }

    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        LogShards::take_records(self, shard, most, out);
    }

    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        LogShards::take_pages(self, shard, most, out);
    }

    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        LogShards::emptied(self, shard, out);
    }

    fn records_durable(&mut self, _: Nanos, _: u32) {}

    fn records_lost(&mut self, _: u32) {}

    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        LogShards::state(self, shard, first, most, out);
    }

    fn quiet(&mut self, _: u32, _: u32) -> bool {
        self.answer()
    }

    fn intent_ready(&mut self, _: Nanos, _: u32, _: u32) {}

    fn flash_written(&mut self, _: Nanos, _: ShardIo, _: Result<&[u32], IoFailed>) {}

    fn page_loaded(&mut self, _: Nanos, _: ShardIo, _: Result<&[Option<Sum>], IoFailed>) {}

    fn flash_ended(&mut self, _: Nanos, _: Result<(), FlashError>) {}

    fn sweep(&mut self, _: u32, _: u32) -> bool {
        self.answer()
    }

    fn disable(&mut self, _: Nanos, _: u32) {}

    fn unsettled(&mut self, _: u32) -> usize {
        0
    }

    fn bits_ready(&mut self, _: OpId) {}

    fn budget_kept(&mut self, _: OpId) {}

    fn is_left_alone(&mut self, _: Nanos, _: u32) -> bool {
        self.answer()
    }

    fn store_of(&mut self, _: u32) -> Option<VolumeId> {
        self.number().checked_sub(1).and_then(|id| u32::try_from(id).ok()).map(VolumeId)
    }

    fn stores(&mut self) -> Vec<VolumeId> {
        let count = self.number().min(self.numbers.len() as u64);
        (0..count).map(|_| VolumeId(u32::try_from(self.number()).unwrap_or(0))).collect()
    }
}

/// A host.
pub(super) struct NotingFx<'a, E> {
    pub inner: &'a mut E,
    pub heard: &'a RefCell<Heard>,
}

impl<E> NotingFx<'_, E> {
    fn asked(&self, numbers: &[u64]) {
        self.heard.borrow_mut().digest.all(numbers);
    }
}

impl<B, E: Effects<B>> Effects<B> for NotingFx<'_, E> {
    fn fill(&mut self, fill: Fill<B>) {
        self.asked(&[40, fill.shard.into(), fill.io.0.into(), fill.slot.0.into()]);
        self.inner.fill(fill);
    }

    fn copy(&mut self, copying: Copying) {
        let Copying { shard, io, from, to, lines } = copying;
        self.asked(&[41, shard.into(), io.0.into(), from.0.into(), to.0.into(), lines.into()]);
        self.inner.copy(copying);
    }

    fn load(&mut self, load: Load) {
        self.asked(&[42, load.shard.into(), load.io.0.into(), load.page.into()]);
        self.inner.load(load);
    }

    fn store_flush(&mut self, store: VolumeId, number: u64) {
        self.asked(&[43, store.0.into(), number]);
        self.inner.store_flush(store, number);
    }

    fn note_given_up(&mut self, superblock: &BlockSuperblock) -> Result<(), String> {
        self.asked(&[44]);
        let noted = self.inner.note_given_up(superblock);
        self.heard.borrow_mut().answers.push(noted.is_ok());
        noted
    }

    fn unnoted(&mut self, why: Option<&str>) {
        self.inner.unnoted(why);
    }

    fn not_durable(&mut self, store: VolumeId) {
        self.inner.not_durable(store);
    }

    fn disown(&mut self) {
        self.asked(&[46]);
        self.inner.disown();
    }

    fn given_up(&mut self, why: &str) {
        self.asked(&[45]);
        self.inner.given_up(why);
    }

    /// What the superblock says of volumes a replay does not know.
    fn identity(&mut self, volume: &str) -> Option<[u8; 64]> {
        self.inner.identity(volume)
    }

    fn stopped(&mut self) {
        self.asked(&[47]);
        self.inner.stopped();
    }

    fn sweeping(&mut self, late: bool) {
        self.asked(&[48, late.into()]);
        self.inner.sweeping(late);
    }
}

/// The host of a replay, which carries nothing out.
impl Effects<()> for Told<'_> {
    fn fill(&mut self, _: Fill<()>) {}
    fn copy(&mut self, _: Copying) {}
    fn load(&mut self, _: Load) {}
    fn store_flush(&mut self, _: VolumeId, _: u64) {}
    fn note_given_up(&mut self, _: &BlockSuperblock) -> Result<(), String> {
        if self.answer() { Ok(()) } else { Err(String::new()) }
    }
    fn disown(&mut self) {}
    fn given_up(&mut self, _: &str) {}
    fn identity(&mut self, _: &str) -> Option<[u8; 64]> {
        None
    }
}
