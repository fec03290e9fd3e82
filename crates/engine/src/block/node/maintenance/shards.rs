//! What maintenance uses of the shards, and how it is had of a node.

use larder_base::Nanos;
use larder_format::block::log::Held;
use larder_policy::block::VolumeId;

use crate::block::api::{BlockEffects, IoFailed, OpId, SlotId, Sum};
use crate::block::node::calls::{Fx, Message, Out, Shard, call, send};
use crate::block::node::event::{Host, ShardIo};
use crate::block::node::failing::FlashError;
use crate::block::node::queue::Node;
use crate::block::paging::TableChange;
use crate::block::record::RecordedShard;
use crate::block::shard::{BlockShard, MapRecord};

/// The shards and what is around them. Each call of a shard is one of `BlockShard`, under its lock; what the shard asks for
/// then goes to queues and into the inbox as after every call.
pub trait Shards {
    /// How many there are.
    fn shards(&self) -> u32;
    /// `BlockShard::records_waiting`.
    fn records_waiting(&mut self, shard: u32) -> usize;
    /// `BlockShard::take_records`.
    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>);
    /// `BlockShard::take_pages`.
    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>);
    /// `BlockShard::emptied`.
    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>);
    /// `BlockShard::records_durable`.
    fn records_durable(&mut self, now: Nanos, shard: u32);
    /// `BlockShard::records_lost`.
    fn records_lost(&mut self, shard: u32);
    /// `BlockShard::state`.
    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>);
    /// `BlockShard::quiet`.
    fn quiet(&mut self, shard: u32, region: u32) -> bool;
    /// `BlockShard::intent_ready`.
    fn intent_ready(&mut self, now: Nanos, shard: u32, region: u32);
    /// `BlockShard::flash_written`.
    fn flash_written(&mut self, now: Nanos, io: ShardIo, sums: Result<&[u32], IoFailed>);
    /// `BlockShard::page_loaded`.
    fn page_loaded(&mut self, now: Nanos, io: ShardIo, slots: Result<&[Option<Sum>], IoFailed>);
    /// An I/O of lines or of a page of the table has ended: see
    /// [`Limits::flash_ended`](crate::block::node::limits::Limits::flash_ended).
    fn flash_ended(&mut self, now: Nanos, ended: Result<(), FlashError>);
    /// `BlockShard::sweep`.
    fn sweep(&mut self, shard: u32, steps: u32) -> bool;
    /// `BlockShard::disable`.
    fn disable(&mut self, now: Nanos, shard: u32);
    /// `BlockShard::unsettled`.
    fn unsettled(&mut self, shard: u32) -> usize;
    /// The bits for which the range `op` waits are durable, or not needed any more.
    fn bits_ready(&mut self, op: OpId);
    /// The write budget's file was seen to, for which a write of `op` waits.
    fn budget_kept(&mut self, op: OpId);
    /// Whether clients have left `region` alone for long enough.
    fn is_left_alone(&mut self, now: Nanos, region: u32) -> bool;
    /// The volume whose store has what `region` caches, if it is anybody's.
    fn store_of(&mut self, region: u32) -> Option<VolumeId>;
    /// All volumes.
    fn stores(&mut self) -> Vec<VolumeId>;
}

/// Which volume lies where, as maintenance asks for it.
pub trait Stores {
    /// The volume that has bytes in a region of the line space, if there is one.
    fn store_of(&self, region: u32) -> Option<VolumeId>;
    /// All volumes.
    fn stores(&self) -> Vec<VolumeId>;
}

/// A shard as maintenance calls it: [`BlockShard`], or one with a tape.
pub trait LoggedShard: Shard {
    /// See [`BlockShard::records_waiting`].
    fn records_waiting(&self) -> usize;
    /// See [`BlockShard::take_records`].
    fn take_records(&mut self, most: usize, out: &mut Vec<MapRecord>);
    /// See [`BlockShard::take_pages`].
    fn take_pages(&mut self, most: usize, out: &mut Vec<TableChange>);
    /// See [`BlockShard::emptied`].
    fn emptied(&mut self, out: &mut Vec<(SlotId, u32)>);
    /// See [`BlockShard::records_durable`].
    fn records_durable(&mut self, now: Nanos, fx: &mut impl BlockEffects);
    /// See [`BlockShard::records_lost`].
    fn records_lost(&mut self);
    /// See [`BlockShard::state`].
    fn state(&mut self, first: SlotId, most: u32, out: &mut Vec<Held>);
    /// See [`BlockShard::quiet`].
    fn quiet(&mut self, region: u32) -> bool;
    /// See [`BlockShard::intent_ready`].
    fn intent_ready(&mut self, now: Nanos, region: u32, fx: &mut impl BlockEffects);
    /// See [`BlockShard::disable`].
    fn disable(&mut self, now: Nanos, fx: &mut impl BlockEffects);
    /// See [`BlockShard::unsettled`].
    fn unsettled(&self) -> usize;
}

macro_rules! logged {
    ($($shard:ty)*) => {$(
        impl LoggedShard for $shard {
            fn records_waiting(&self) -> usize {
                BlockShard::records_waiting(self)
            }
            fn take_records(&mut self, most: usize, out: &mut Vec<MapRecord>) {
                <$shard>::take_records(self, most, out);
            }
            fn take_pages(&mut self, most: usize, out: &mut Vec<TableChange>) {
                <$shard>::take_pages(self, most, out);
            }
            fn emptied(&mut self, out: &mut Vec<(SlotId, u32)>) {
                <$shard>::emptied(self, out);
            }
            fn records_durable(&mut self, now: Nanos, fx: &mut impl BlockEffects) {
                <$shard>::records_durable(self, now, fx);
            }
            fn records_lost(&mut self) {
                <$shard>::records_lost(self);
            }
            fn state(&mut self, first: SlotId, most: u32, out: &mut Vec<Held>) {
                <$shard>::state(self, first, most, out);
            }
            fn quiet(&mut self, region: u32) -> bool {
                <$shard>::quiet(self, region)
            }
            fn intent_ready(&mut self, now: Nanos, region: u32, fx: &mut impl BlockEffects) {
                <$shard>::intent_ready(self, now, region, fx);
            }
            fn disable(&mut self, now: Nanos, fx: &mut impl BlockEffects) {
                <$shard>::disable(self, now, fx);
            }
            fn unsettled(&self) -> usize {
                BlockShard::unsettled(self)
            }
        }
    )*};
}

logged!(BlockShard RecordedShard);

/// The shards of a node, for the time of a call.
pub struct AtNode<'a, H: Host, N> {
    node: &'a N,
    shards: u32,
    out: Out<H::Bytes>,
}

impl<'a, H: Host, N: Node<H, Shard: LoggedShard>> AtNode<'a, H, N> {
    /// The `shards` shards of `node`.
    pub fn new(node: &'a N, shards: u32) -> AtNode<'a, H, N> {
        AtNode { node, shards, out: Out::default() }
    }

    fn look<R>(&self, shard: u32, f: impl FnOnce(&mut N::Shard) -> R) -> R {
        self.node.shard(shard, |shard, _| f(shard))
    }

    fn with(&mut self, shard: u32, f: impl FnOnce(&mut N::Shard, &mut Fx<'_, H, N>)) {
        call(self.node, shard, None, &mut self.out, f);
    }
}

impl<H: Host, N: Node<H, Shard: LoggedShard> + Stores> Shards for AtNode<'_, H, N> {
    fn shards(&self) -> u32 {
        self.shards
    }

    fn records_waiting(&mut self, shard: u32) -> usize {
        self.look(shard, |s| s.records_waiting())
    }

    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        self.look(shard, |s| s.take_records(most, out));
    }

    fn take_pages(&mut self, shard: u32, most: usize, out: &mut Vec<TableChange>) {
        self.look(shard, |s| s.take_pages(most, out));
    }

    fn emptied(&mut self, shard: u32, out: &mut Vec<(SlotId, u32)>) {
        self.look(shard, |s| s.emptied(out));
    }

    fn records_durable(&mut self, now: Nanos, shard: u32) {
        self.with(shard, |s, fx| s.records_durable(now, fx));
    }

    fn records_lost(&mut self, shard: u32) {
        self.look(shard, LoggedShard::records_lost);
    }

    fn state(&mut self, shard: u32, first: SlotId, most: u32, out: &mut Vec<Held>) {
        self.look(shard, |s| s.state(first, most, out));
    }

    fn quiet(&mut self, shard: u32, region: u32) -> bool {
        self.look(shard, |s| s.quiet(region))
    }

    fn intent_ready(&mut self, now: Nanos, shard: u32, region: u32) {
        self.with(shard, |s, fx| s.intent_ready(now, region, fx));
    }

    fn flash_written(&mut self, now: Nanos, io: ShardIo, sums: Result<&[u32], IoFailed>) {
        self.with(io.shard, |s, fx| s.flash_written(now, io.io, sums, fx));
    }

    fn page_loaded(&mut self, now: Nanos, io: ShardIo, slots: Result<&[Option<Sum>], IoFailed>) {
        self.with(io.shard, |s, fx| s.page_loaded(now, io.io, slots, fx));
    }

    fn flash_ended(&mut self, now: Nanos, ended: Result<(), FlashError>) {
        self.node.flash_ended(now, ended);
    }

    fn sweep(&mut self, shard: u32, steps: u32) -> bool {
        self.look(shard, |s| s.sweep(steps))
    }

    fn disable(&mut self, now: Nanos, shard: u32) {
        self.with(shard, |s, fx| s.disable(now, fx));
    }

    fn unsettled(&mut self, shard: u32) -> usize {
        self.look(shard, |s| s.unsettled())
    }

    fn bits_ready(&mut self, op: OpId) {
        send(self.node, op, Message::IntentsReady);
    }

    fn budget_kept(&mut self, op: OpId) {
        send(self.node, op, Message::BudgetKept);
    }

    fn is_left_alone(&mut self, now: Nanos, region: u32) -> bool {
        self.node.changes().is_quiet(now, region)
    }

    fn store_of(&mut self, region: u32) -> Option<VolumeId> {
        Stores::store_of(self.node, region)
    }

    fn stores(&mut self) -> Vec<VolumeId> {
        Stores::stores(self.node)
    }
}
