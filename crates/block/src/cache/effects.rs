//! What a shard asks for while it is locked.

use std::collections::BTreeMap;

use larder_engine::block::{BlockEffects, IoFailed, IoId, LineId, OpId, PartKind, SlotId, Source};
use larder_runtime::Payload;

use super::ops::{self, Kind};
use super::{Cache, locked};
use crate::nbd::wire::Errno;
use crate::op::Failure;

/// Something to be done when the shard has been let go.
#[derive(Debug)]
pub(super) enum Action {
    FlashRead { io: IoId, slot: SlotId, lines: u32 },
    FlashWrite { io: IoId, slot: SlotId, data: Payload },
    BackingRead { io: IoId, at: u64, len: u32 },
    Change { io: IoId, op: OpId, kind: PartKind, at: u64, len: u32 },
}

/// The effects of one call, or several, of one shard.
pub(super) struct Fx<'a> {
    pub(super) cache: &'a Cache,
    /// Who calls.
    pub(super) worker: usize,
    pub(super) bufs: &'a mut BTreeMap<u32, (u64, Payload)>,
    pub(super) actions: &'a mut Vec<Action>,
    /// Operations of the caller's that have ended.
    pub(super) ended: &'a mut Vec<u32>,
    /// Why what was just completed has failed.
    pub(super) failure: Option<Failure>,
    /// Fills wait for the log.
    pub(super) commit: bool,
    /// Regions to be marked.
    pub(super) intents: Vec<u32>,
}

impl Fx<'_> {
    /// The bytes `at..at + len` of the line space.
    fn bytes(&self, source: Source, at: u64, len: usize) -> Option<Payload> {
        match source {
            Source::Io(io) => {
                let (start, buf) = self.bufs.get(&io.0)?;
                Some(buf.part((at - start) as usize, len))
            }
            Source::Op(op) => {
                let (worker, index) = ops::place(op);
                let mut table = locked(&self.cache.desks.get(worker)?.ops);
                let op = table.get(index)?;
                let Kind::Write { data, .. } = &op.kind else { return None };
                Some(data.part((at - op.start) as usize, len))
            }
        }
    }

    /// An operation needs to be looked at by the worker that took it.
    fn tell(&mut self, worker: usize, index: u32) {
        if worker == self.worker {
            self.ended.push(index);
            return;
        }
        let Some(desk) = self.cache.desks.get(worker) else { return };
        locked(&desk.ended).push(index);
        // EAGAIN (the counter is at its end) means that it is readable anyway.
        let _ = rustix::io::write(&desk.event, &1u64.to_ne_bytes());
    }
}

impl BlockEffects for Fx<'_> {
    fn flash_read(&mut self, io: IoId, slot: SlotId, lines: u32) {
        self.actions.push(Action::FlashRead { io, slot, lines });
    }

    fn flash_write(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, source: Source) {
        let line_bytes = self.cache.options.line_bytes;
        let at = line.0 * u64::from(line_bytes);
        match self.bytes(source, at, (lines * line_bytes) as usize) {
            Some(data) => self.actions.push(Action::FlashWrite { io, slot, data }),
            // The engine names sources that it has not released; a payload of nothing fails as a write.
            None => {
                let data = Payload::new(larder_runtime::AlignedBuf::zeroed(0));
                self.actions.push(Action::FlashWrite { io, slot, data });
            }
        }
    }

    fn backing_read(&mut self, io: IoId, at: u64, len: u32) {
        self.actions.push(Action::BackingRead { io, at, len });
    }

    fn backing_change(&mut self, io: IoId, op: OpId, kind: PartKind, at: u64, len: u32) {
        self.actions.push(Action::Change { io, op, kind, at, len });
    }

    fn deliver(&mut self, source: Source, op: OpId, at: u64, len: u32) {
        let bytes = self.bytes(source, at, len as usize);
        let (worker, index) = ops::place(op);
        let Some(desk) = self.cache.desks.get(worker) else { return };
        let mut table = locked(&desk.ops);
        let Some(op) = table.get(index) else { return };
        match (&mut op.kind, bytes) {
            (Kind::Read(buf), Some(bytes)) => {
                let from = (at - op.start) as usize;
                buf[from..from + bytes.len()].copy_from_slice(&bytes);
            }
            // No bytes are better than wrong ones.
            _ => {
                let text = "the cache has lost the bytes of a read";
                op.failure = Some(Failure::new(Errno::Io, text));
            }
        }
    }

    fn release(&mut self, io: IoId) {
        self.bufs.remove(&io.0);
    }

    fn done(&mut self, op: OpId, result: Result<(), IoFailed>, holds: bool) {
        let (worker, index) = ops::place(op);
        let Some(desk) = self.cache.desks.get(worker) else { return };
        let over = {
            let mut table = locked(&desk.ops);
            let Some(op) = table.get(index) else { return };
            if result.is_err() && op.failure.is_none() {
                let unknown = || Failure::new(Errno::Io, "too much is under way for this range");
                op.failure = Some(self.failure.clone().unwrap_or_else(unknown));
            }
            op.holds += u32::from(holds);
            op.left -= 1;
            op.left == 0
        };
        if over {
            self.tell(worker, index);
        }
    }

    fn release_op(&mut self, op: OpId) {
        let (worker, index) = ops::place(op);
        let Some(desk) = self.cache.desks.get(worker) else { return };
        let over = {
            let mut table = locked(&desk.ops);
            let Some(op) = table.get(index) else { return };
            op.holds -= 1;
            op.holds == 0 && op.answered
        };
        if over {
            self.tell(worker, index);
        }
    }

    fn intent(&mut self, region: u32) {
        self.intents.push(region);
    }

    fn commit_soon(&mut self) {
        self.commit = true;
    }

    fn prefer(&mut self, line: LineId, victim: LineId) -> bool {
        self.cache.prefers(line, victim)
    }
}
