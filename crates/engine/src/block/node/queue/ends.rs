//! What ends: I/O of the cache device, requests to stores, operations.

use super::*;
use crate::block::node::event::Ended;
use crate::block::node::failing::FlashError;

/// An I/O of the cache device has ended: what its shard is told of it.
fn heard<H: Host, N: Node<H>, T>(
    node: &N,
    now: Nanos,
    ended: Result<T, FlashError>,
) -> Result<T, IoFailed> {
    node.flash_ended(now, ended.as_ref().map(|_| ()).map_err(|&error| error));
    ended.map_err(IoFailed::from)
}

impl<H: Host> Queue<H> {
    /// Lines were read: the CRC-32C of each, and their bytes, of which the first belong to `line`; or why not.
    pub fn flash_read<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        ShardIo { shard, io }: ShardIo,
        line: LineId,
        read: Result<(&[u32], H::Bytes), FlashError>,
    ) {
        let read = heard(node, now, read);
        let at = line.0 * u64::from(self.config.line_bytes);
        let told = Told::FlashRead(io, line, read.is_ok());
        self.call(node, shard, told, |s, fx| match read {
            Ok((crcs, bytes)) => {
                fx.held.keep_read(io, at, bytes);
                s.flash_read(now, io, Ok(crcs), fx);
            }
            Err(IoFailed) => s.flash_read(now, io, Err(IoFailed), fx),
        });
    }

    /// Lines were written: the CRC-32C of each, or why not.
    pub fn flash_written<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        ShardIo { shard, io }: ShardIo,
        crcs: Result<&[u32], FlashError>,
    ) {
        let crcs = heard(node, now, crcs);
        let told = Told::FlashWritten(io, crcs.is_ok());
        self.call(node, shard, told, |s, fx| s.flash_written(now, io, crcs, fx));
    }

    /// Bytes were laid over a line: its CRC-32C before and after, or why not.
    pub fn merged<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        ShardIo { shard, io }: ShardIo,
        crcs: Result<(u32, u32), FlashError>,
    ) {
        let crcs = heard(node, now, crcs);
        let told = Told::Merged(io, crcs.is_ok());
        self.call(node, shard, told, |s, fx| s.merged(now, io, crcs, fx));
    }

    /// A page of the table was read: what its slots have, or why not.
    pub fn page_loaded<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        ShardIo { shard, io }: ShardIo,
        slots: Result<&[Option<Sum>], FlashError>,
    ) {
        let slots = heard(node, now, slots);
        let told = Told::PageLoaded(io, slots.is_ok());
        self.call(node, shard, told, |s, fx| s.page_loaded(now, io, slots, fx));
    }

    /// A store was read: the bytes, or why not.
    pub fn store_read<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        job: JobId,
        read: Result<H::Bytes, H::Failure>,
    ) {
        match self.jobs.take(job) {
            Some(Job::Whole(id)) => {
                let failure = match read {
                    Ok(bytes) => {
                        let ticket = self.ops.get_mut(&id).and_then(|op| op.ticket.as_mut());
                        if let Some(ticket) = ticket {
                            fx.deliver(ticket, 0, bytes);
                        }
                        None
                    }
                    Err(failure) => Some(failure),
                };
                self.step(node, now, fx, id, failure);
            }
            Some(Job::Pieces(id, pieces)) => {
                let bytes = match read {
                    Ok(bytes) => {
                        if let Some(op) = self.ops.get(&id) {
                            let at = pieces.at().wrapping_sub(node.base(&op.volume));
                            node.pass(&op.volume, at, &bytes);
                        }
                        Some(bytes)
                    }
                    Err(failure) => {
                        self.note(id, failure);
                        None
                    }
                };
                self.fetched(node, now, id, &pieces, bytes);
            }
            None => {}
        }
    }

    /// A store has done something else, or not.
    pub fn store_changed<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        job: JobId,
        outcome: Result<H::Extents, H::Failure>,
    ) {
        match self.jobs.take(job) {
            Some(Job::Whole(id)) => {
                let failure = match outcome {
                    Ok(extents) => {
                        if let Some(op) = self.ops.get_mut(&id) {
                            op.extents = extents;
                        }
                        None
                    }
                    Err(failure) => Some(failure),
                };
                if self.ops.get(&id).is_some_and(|op| op.range.is_some()) {
                    self.range_over(node, now, id);
                }
                self.step(node, now, fx, id, failure);
            }
            Some(Job::Pieces(id, pieces)) => {
                let result = match outcome {
                    Ok(_) => Ok(()),
                    Err(failure) => {
                        self.note(id, failure);
                        Err(IoFailed)
                    }
                };
                self.changed(node, now, &pieces, result);
            }
            None => {}
        }
    }

    /// What the store said is more use to the client than that it failed.
    fn note(&mut self, id: OpId, failure: H::Failure) {
        if let Some(op) = self.ops.get_mut(&id) {
            op.failure.get_or_insert(failure);
        }
    }

    /// One thing that `id` waited for is over.
    pub(super) fn step<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        id: OpId,
        failure: Option<H::Failure>,
    ) {
        let Some(op) = self.ops.get_mut(&id) else { return };
        if failure.is_some() && op.failure.is_none() {
            op.failure = failure;
        }
        op.pending -= 1;
        if op.pending > 0 {
            return;
        }
        let Some(op) = self.ops.remove(&id) else { return };
        if op.range.is_some() {
            self.next_range(node, id);
        }
        self.finish(node, now, fx, op);
    }

    /// An operation is over.
    pub(super) fn finish<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        op: Operation<H>,
    ) {
        if let Some(Destages::Through(of)) = op.destages {
            if op.placed {
                op.volume.leave();
            }
            return self.step(node, now, fx, of, op.failure);
        }
        if let Some(destages) = op.destages {
            // The life of the store as of now: what was lost before counts against it.
            let outcome = op.failure.is_none().then(|| node.losses(&op.volume));
            if op.placed {
                op.volume.leave();
            }
            return self.destaged(node, now, fx, destages, outcome);
        }
        let failed = op.failure.is_some();
        let base = if op.placed { node.base(&op.volume) } else { 0 };
        let ended = match op.kind {
            Kind::Part(kind) if op.placed => Some(Ended {
                kind,
                at: op.at.wrapping_sub(base),
                len: op.len,
                holds: op.holds,
                began: op.began,
                failed,
                hit: kind == PartKind::Read && !failed && !op.asked_store && !op.waited,
                asked_store: op.asked_store,
                from_flash: op.from_flash,
                shared: op.shared,
            }),
            _ => None,
        };
        let volume = op.volume;
        if let Some(ticket) = op.ticket {
            if let Some(ended) = &ended {
                node.ended(&volume, self.me, now, ended);
            }
            let durable = op.fua || op.kind == Kind::Flush;
            let told = durable.then(|| volume.told_of(node.losses(&volume)));
            let losses = told.map(|(_, told)| told);
            let laid = (op.at, op.len);
            let extents = match op.dirty.is_empty() {
                true => op.extents,
                false => H::overlay(op.extents, laid, &op.dirty),
            };
            let outcome = op.failure.map_or(Ok(extents), Err);
            let answer = Answer { ticket, outcome, bytes: op.bytes, losses, ended };
            // If the store may have lost writes, it waits until nothing of them is cached any more: who is told of the loss
            // must not find them afterwards.
            match told {
                Some((last, _))
                    if node.settled(&volume) < last && node.state(&volume) != State::Unplaced =>
                {
                    volume.want_settled();
                    self.untold.push((volume.clone(), last, answer));
                }
                _ => fx.answer(answer),
            }
        } else if !op.asked_store {
            self.streams.was_there(op.at);
        }
        if op.placed {
            volume.leave();
        }
    }

    /// Gives answers that have waited for what a store has lost.
    pub fn tell<N: Node<H>>(&mut self, node: &N, fx: &mut impl Effects<H>) {
        let ready = |(volume, last, _): &mut (H::Volume, u64, Answer<H>)| {
            node.state(volume) == State::Detached || node.settled(volume) >= *last
        };
        self.untold.extract_if(.., ready).for_each(|(_, _, answer)| fx.answer(answer));
    }
}
