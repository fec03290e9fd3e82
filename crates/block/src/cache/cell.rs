//! A shard behind its lock, with the bytes that it speaks of.

use std::collections::BTreeMap;

use larder_engine::block::node::coalesce::{Piece, Waiting};
use larder_engine::block::record::TapedShard;
use larder_engine::block::{
    BlockEffects, GroupId, IoFailed, IoId, LineId, Merge, OpId, PartKind, SlotId, Source,
};
use larder_runtime::Payload;

use super::Cache;

/// What is guarded by a shard's lock.
pub(super) struct Cell {
    pub shard: TapedShard,
    pub tables: Tables,
}

/// Bytes that the engine may still ask for.
#[derive(Default)]
pub(super) struct Tables {
    /// Of reads that are complete: where the first byte belongs, and the bytes.
    buffers: BTreeMap<IoId, (u64, Payload)>,
    /// Of writes: where the first byte belongs, the bytes, and how many parts need them.
    payloads: BTreeMap<OpId, (u64, Payload, u32)>,
    /// While the engine hears that the store was read: which read. Whoever is handed its bytes then has waited for it.
    fetched: Option<IoId>,
}

impl Tables {
    /// A read is complete.
    pub(super) fn keep_buffer(&mut self, io: IoId, at: u64, bytes: Payload) {
        self.buffers.insert(io, (at, bytes));
    }

    /// The engine is about to hear of this read of the store, or has heard (`None`).
    pub(super) fn hears_of(&mut self, fetch: Option<IoId>) {
        self.fetched = fetch;
    }

    /// A part of a write is about to be submitted.
    pub(super) fn keep_payload(&mut self, op: OpId, at: u64, bytes: &Payload) {
        self.payloads.entry(op).or_insert_with(|| (at, bytes.clone(), 0)).2 += 1;
    }

    fn drop_payload(&mut self, op: OpId) {
        if let Some((_, _, parts)) = self.payloads.get_mut(&op) {
            *parts -= 1;
            if *parts == 0 {
                self.payloads.remove(&op);
            }
        }
    }

    fn bytes(&self, source: Source, at: u64, len: u64) -> Payload {
        let held = match source {
            Source::Op(op) => self.payloads.get(&op).map(|(start, bytes, _)| (*start, bytes)),
            Source::Io(io) => self.buffers.get(&io).map(|(start, bytes)| (*start, bytes)),
        };
        // The engine says when it needs no more of them: the model test checks that it asks for none after that.
        let (start, bytes) = held.expect("bytes that the engine has not released");
        bytes.part((at - start) as usize, len as usize)
    }
}

/// Something for the worker whose client's operation it is about.
#[derive(Debug)]
pub(super) enum Message {
    /// Bytes for a read. It has waited for the store: its own fetch, or another's. What is held for a fill is at hand.
    Deliver { at: u64, bytes: Payload, waited: bool },
    /// A part is finished.
    Done { failed: bool },
    /// Read lines from flash.
    FlashRead { shard: u32, io: IoId, slot: SlotId, line: LineId, lines: u32 },
    /// Update lines on flash.
    FlashWrite { shard: u32, io: IoId, slot: SlotId, bytes: Payload },
    /// Lay bytes over a part of a line on flash.
    Merge { shard: u32, io: IoId, merge: Merge, bytes: Payload },
    /// Read a page of the table.
    Load(Load),
    /// Read from the backing store.
    BackingRead { shard: u32, io: IoId, at: u64, len: u32 },
    /// Change the backing store.
    BackingChange { shard: u32, io: IoId, at: u64, len: u32 },
    /// The bits of a range are durable.
    IntentsReady,
    /// A range may lock its lines now.
    RangeTurn,
}

impl Message {
    /// What it is to requests for the store.
    pub(super) fn waiting(&self) -> Waiting {
        match *self {
            Message::BackingRead { shard, io, at, len } => {
                Waiting::Read(Piece { shard, io, at, len })
            }
            Message::BackingChange { shard, io, at, len } => {
                Waiting::Change(Piece { shard, io, at, len })
            }
            Message::FlashWrite { .. } | Message::Merge { .. } => Waiting::Beside,
            _ => Waiting::Other,
        }
    }
}

/// Lines to be written to flash behind the reply.
#[derive(Debug)]
pub(super) struct Fill {
    pub shard: u32,
    pub io: IoId,
    pub slot: SlotId,
    pub bytes: Payload,
}

/// Lines to be moved on flash.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copying {
    pub shard: u32,
    pub io: IoId,
    pub from: SlotId,
    pub to: SlotId,
    pub lines: u32,
}

/// A page of the table to be read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub shard: u32,
    pub io: IoId,
    pub page: u32,
}

/// What an engine's call has asked for.
#[derive(Default)]
pub(super) struct Out {
    pub messages: Vec<(OpId, Message)>,
    pub fills: Vec<Fill>,
    pub copies: Vec<Copying>,
    /// Shard and region.
    pub asks: Vec<(u32, u32)>,
    /// Pages of the table that are wanted by who is no worker.
    pub loads: Vec<Load>,
    pub commit: bool,
}

impl Out {
    /// Whether the log's thread has something to do.
    pub(super) fn wakes_log(&self) -> bool {
        self.commit
            || !self.fills.is_empty()
            || !self.copies.is_empty()
            || !self.asks.is_empty()
            || !self.loads.is_empty()
    }
}

pub(super) struct Fx<'a> {
    pub tables: &'a mut Tables,
    pub out: &'a mut Out,
    pub shard: u32,
    pub cache: &'a Cache,
}

impl BlockEffects for Fx<'_> {
    fn flash_read(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, op: OpId) {
        let shard = self.shard;
        self.out.messages.push((op, Message::FlashRead { shard, io, slot, line, lines }));
    }

    fn flash_write(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, op: OpId) {
        let line_bytes = u64::from(self.cache.line_bytes());
        let bytes =
            self.tables.bytes(Source::Op(op), line.0 * line_bytes, u64::from(lines) * line_bytes);
        let shard = self.shard;
        self.out.messages.push((op, Message::FlashWrite { shard, io, slot, bytes }));
    }

    fn fill(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, source: Source) {
        let line_bytes = u64::from(self.cache.line_bytes());
        let bytes = self.tables.bytes(source, line.0 * line_bytes, u64::from(lines) * line_bytes);
        self.cache.filling(line, lines, source);
        self.out.fills.push(Fill { shard: self.shard, io, slot, bytes });
    }

    fn merge(&mut self, io: IoId, merge: Merge, op: OpId) {
        let bytes = self.tables.bytes(Source::Op(op), merge.at, u64::from(merge.len));
        self.out.messages.push((op, Message::Merge { shard: self.shard, io, merge, bytes }));
    }

    fn copy(&mut self, io: IoId, from: SlotId, to: SlotId, lines: u32) {
        self.out.copies.push(Copying { shard: self.shard, io, from, to, lines });
    }

    fn load(&mut self, io: IoId, page: u32, op: OpId) {
        let load = Load { shard: self.shard, io, page };
        // Others may wait for the page too: who may go away at any time is not to be relied upon.
        if self.cache.is_worker(op) {
            self.out.messages.push((op, Message::Load(load)));
        } else {
            self.out.loads.push(load);
        }
    }

    fn backing_read(&mut self, io: IoId, at: u64, len: u32, op: OpId) {
        self.out.messages.push((op, Message::BackingRead { shard: self.shard, io, at, len }));
    }

    fn backing_change(&mut self, io: IoId, op: OpId, _kind: PartKind, at: u64, len: u32) {
        let shard = self.shard;
        self.out.messages.push((op, Message::BackingChange { shard, io, at, len }));
    }

    fn deliver(&mut self, source: Source, op: OpId, at: u64, len: u32) {
        let bytes = self.tables.bytes(source, at, u64::from(len));
        let waited = matches!(source, Source::Io(io) if self.tables.fetched == Some(io));
        self.out.messages.push((op, Message::Deliver { at, bytes, waited }));
    }

    fn release(&mut self, io: IoId) {
        self.tables.buffers.remove(&io);
    }

    fn done(&mut self, op: OpId, result: Result<(), IoFailed>, holds: bool) {
        if !holds {
            self.tables.drop_payload(op);
        }
        self.out.messages.push((op, Message::Done { failed: result.is_err() }));
    }

    fn release_op(&mut self, op: OpId) {
        self.tables.drop_payload(op);
    }

    fn intent(&mut self, region: u32) {
        self.out.asks.push((self.shard, region));
    }

    fn commit_soon(&mut self) {
        self.out.commit = true;
    }

    fn prefer(&mut self, line: LineId, victim: LineId) -> bool {
        self.cache.prefer(line, victim)
    }

    fn keep(&mut self, victim: LineId, line: Option<LineId>) -> bool {
        self.cache.keep(victim, line)
    }

    fn keep_groups(&mut self, first: GroupId, last: GroupId, lines: u32) -> bool {
        self.cache.keep_groups(first, last, lines)
    }

    fn may_grow(&mut self, line: LineId) -> bool {
        self.cache.may_grow(line)
    }
}
