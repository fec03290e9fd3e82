//! Volumes that write back: what their clients write goes to the log, what they read comes from there where it is dirty, and the queue that
//! destages a volume brings it to its store as changes of its own.

use super::*;
use crate::block::node::logged::{ForDevice, JournalPart, LogIo, call_log};
use crate::block::writeback::destager::Outcome;
use crate::block::writeback::log::{
    Append, Asked, Asks, Found, Kept, Lies, MOST_RECORD, Piece, Sums, WriteLog,
};
use crate::block::writeback::overlay::{Dirty, Holds};
use crate::block::writeback::volume_log::Kind as Change;

/// A read of the log under way.
pub(super) enum LogJob {
    /// Of a client's read: where its bytes belong.
    Client(OpId, u64, Piece),
    /// Of a stretch that goes to the store of a volume.
    Destage(u32, Dirty, Piece),
    /// Of a record of a volume that is copied out of the way: which of [`Parking`].
    Park(u32, usize, Piece),
    /// Of a stretch of a volume that goes to its journal: which of [`Epoch`].
    Journal(u32, usize, Piece),
}

impl LogJob {
    fn piece(&self) -> &Piece {
        match self {
            LogJob::Client(_, _, piece)
            | LogJob::Destage(_, _, piece)
            | LogJob::Park(_, _, piece)
            | LogJob::Journal(_, _, piece) => piece,
        }
    }
}

/// Records of a volume that are copied out of the way: those that were read, and how many were not.
pub(super) struct Parking<B> {
    records: Vec<(u64, Option<Piece>, Option<B>)>,
    left: usize,
}

/// An epoch of a volume on its way to the journal, with what was read of it, and how many stretches were not.
pub(super) struct Epoch<B> {
    epoch: u64,
    last: u64,
    stretches: Vec<(Dirty, Option<B>)>,
    left: usize,
    /// Something of it cannot be read.
    failed: bool,
}

/// What an operation does for a volume's destage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Destages {
    /// A stretch goes to the store, with so many bytes of memory.
    Stretch(u32, u32),
    /// The store is flushed.
    Flush(u32),
    /// A part of this client's operation goes to the store, since its volume writes back no more.
    Through(OpId),
}

impl<H: Host> Queue<H> {
    /// The log is called, and what it asks of the device is carried out.
    fn log<N: Node<H>, R>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        f: impl FnOnce(&mut WriteLog<H::Bytes>, &mut Asks<H::Bytes>) -> R,
    ) -> Option<R> {
        let means = node.limits().means(now);
        let f = |log: &mut WriteLog<_>, asks: &mut Asks<_>| {
            log.afford(now, means, asks);
            f(log, asks)
        };
        let me = self.me;
        let result = call_log(node, Some(me), f, |asked| self.for_device(node, now, fx, asked))?;
        self.take_mail(node);
        Some(result)
    }

    /// What the log asks of its device is begun.
    pub(super) fn for_device<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        asked: ForDevice<H::Bytes>,
    ) {
        let ForDevice { writes, flush, gives_up } = asked;
        if let Some(why) = gives_up {
            // What else is on the device is as doubtful, and destage waits for none of it.
            node.give_up(now, why.to_owned());
        }
        for write in writes {
            // It cannot wait for the budget: what else goes to flash does.
            if !node.pay(now, write.len.into()) {
                let _ = node.limits().charge(now, write.len.into());
                node.ask_budget(OpId((self.me as u64) << OP_BITS));
            }
            fx.log_write(write);
        }
        if let Some(covers) = flush {
            fx.log_flush(covers);
        }
    }

    /// A change of a volume that writes back begins: part by part into the log.
    pub(super) fn begin_logged<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        attachment: u32,
        mut op: Operation<H>,
    ) {
        let Kind::Part(kind) = op.kind else { return };
        let (change, most) = match kind {
            PartKind::Zero => (Change::Zero, 1 << 40),
            PartKind::Trim => (Change::Trim, 1 << 40),
            _ => (Change::Write, MOST_RECORD),
        };
        let id = self.next_id();
        let base = node.base(&op.volume);
        let at = op.at.wrapping_sub(base);
        if let Some(bytes) = &op.bytes {
            node.pass(&op.volume, at, bytes);
        }
        let mut appends = Vec::new();
        let mut from = 0;
        while from < op.len {
            let len = (op.len - from).min(most);
            let bytes = op.bytes.as_ref().map(|bytes| H::part(bytes, from, len));
            let sums = bytes.as_ref().map_or(Sums::Many(Box::default()), H::sums);
            // The last is durable when all are: one request is not cut into epochs.
            let (fua, may_punch) = (op.fua && from + len == op.len, op.may_punch);
            let (kind, at) = (change, at + from);
            appends.push(Append { op: id, attachment, kind, at, len, bytes, sums, fua, may_punch });
            from += len;
        }
        op.logged = true;
        self.gathered = true;
        op.pending = appends.len() as u32 + 1;
        self.ops.insert(id, op);
        self.log(node, now, fx, |log, asks| {
            appends.into_iter().for_each(|append| log.gather(append, asks));
        });
        self.step(node, now, fx, id, None);
    }

    /// What clients have written in this turn becomes a batch, if one may be begun: not each write its own.
    pub(super) fn log_gathered<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
    ) {
        self.log(node, now, fx, |log, asks| log.gathered(now, asks));
    }

    /// A FLUSH of a volume that writes back: durable on the cache's flash.
    pub(super) fn flush_logged<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        attachment: u32,
        mut op: Operation<H>,
    ) {
        let id = self.next_id();
        (op.logged, op.pending) = (true, 1);
        self.ops.insert(id, op);
        self.log(node, now, fx, |log, asks| log.flush(now, attachment, id, asks));
    }

    /// What of a read lies where, if anything of it is in the log. Places are bytes of the volume.
    pub(super) fn look<N: Node<H>>(
        node: &N,
        attachment: u32,
        at: u64,
        len: u64,
    ) -> Option<Vec<Found<H::Bytes>>> {
        node.log(|log| {
            let range = at..at + len;
            log.is_dirty(attachment, &range).then(|| {
                let mut found = Vec::new();
                log.look(attachment, range, |each| found.push(each));
                found
            })
        })?
    }

    /// What of a client's read lies in the log is fetched from there; how much was begun. Places are bytes of the volume, the operation's
    /// first byte is `from`.
    pub(super) fn read_logged<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        id: OpId,
        (from, found): (u64, Vec<Found<H::Bytes>>),
    ) {
        for found in found {
            let Some(op) = self.ops.get_mut(&id) else { return };
            match found {
                Found::Clean(..) => {}
                Found::Zeros(at, len) => {
                    if let Some(ticket) = &mut op.ticket {
                        fx.deliver_zeros(ticket, at - from, len);
                    }
                    self.step(node, now, fx, id, None);
                }
                Found::Unreadable(..) => {
                    self.step(node, now, fx, id, Some(H::failure(Why::Failed)))
                }
                Found::Kept(at, len, Kept { bytes, skip }) => {
                    if let Some(ticket) = &mut op.ticket {
                        fx.deliver(ticket, at - from, H::part(&bytes, skip, len));
                    }
                    self.step(node, now, fx, id, None);
                }
                Found::Logged(piece) => {
                    let job = LogJob::Client(id, piece.at - from, piece);
                    self.read_log(fx, job);
                }
            }
        }
    }

    fn read_log(&mut self, fx: &mut impl Effects<H>, job: LogJob) {
        let Piece { place, bytes, .. } = *job.piece();
        let free = self.log_jobs.iter().position(Option::is_none);
        let at = free.unwrap_or_else(|| {
            self.log_jobs.push(None);
            self.log_jobs.len() - 1
        });
        self.log_jobs[at] = Some(job);
        fx.log_read(LogIo(at as u32), place, bytes);
    }

    /// The log was read: the CRC-32C of each 4 KiB from the first byte on, and the bytes; or not.
    pub fn log_read<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        LogIo(io): LogIo,
        read: Option<(&[u32], H::Bytes)>,
    ) {
        let Some(job) = self.log_jobs.get_mut(io as usize).and_then(Option::take) else { return };
        let piece = job.piece();
        let right = read.filter(|(sums, _)| *sums == piece.sums.as_slice());
        let bytes = right.map(|(_, bytes)| H::part(&bytes, piece.skip.into(), piece.len));
        match job {
            LogJob::Client(id, at, piece) => {
                self.log(node, now, fx, |log, asks| log.unpin(now, piece.pin, asks));
                let Some(op) = self.ops.get_mut(&id) else { return };
                let failure = match bytes {
                    Some(bytes) => {
                        op.from_flash += piece.len;
                        if let Some(ticket) = &mut op.ticket {
                            fx.deliver(ticket, at, bytes);
                        }
                        None
                    }
                    None => {
                        // The log may have failed meanwhile: then what it had not made durable is in memory.
                        let (volume, from) = (op.volume.clone(), piece.at - at);
                        let found = node.attachment(&volume).and_then(|attachment| {
                            Self::look(node, attachment, piece.at, piece.len)
                        });
                        let here = |found: &Found<H::Bytes>| matches!(found, Found::Kept(..));
                        if let Some(found) = found.filter(|found| found.iter().all(here)) {
                            op.pending += found.len() as u32;
                            self.read_logged(node, now, fx, id, (from, found));
                            None
                        } else {
                            Some(H::failure(Why::Failed))
                        }
                    }
                };
                self.step(node, now, fx, id, failure);
            }
            LogJob::Destage(attachment, dirty, piece) => {
                self.log(node, now, fx, |log, asks| {
                    log.unpin(now, piece.pin, asks);
                    if bytes.is_none() {
                        log.unread(now, attachment, &dirty);
                    }
                });
                self.destage_stretch(node, now, fx, attachment, dirty, bytes);
            }
            LogJob::Park(attachment, at, _) => {
                if let Some(parking) = self.parking.get_mut(&attachment) {
                    parking.records[at].2 = bytes;
                    parking.left -= 1;
                }
                self.park(node, now, fx, attachment);
            }
            LogJob::Journal(attachment, at, piece) => {
                let dirty = self.epochs.get(&attachment).map(|epoch| epoch.stretches[at].0);
                self.log(node, now, fx, |log, asks| {
                    log.unpin(now, piece.pin, asks);
                    if let Some(dirty) = dirty.filter(|_| bytes.is_none()) {
                        log.unread(now, attachment, &dirty);
                    }
                });
                if let Some(epoch) = self.epochs.get_mut(&attachment) {
                    epoch.failed |= bytes.is_none();
                    epoch.stretches[at].1 = bytes;
                    epoch.left -= 1;
                }
                self.journal(node, now, fx, attachment);
            }
        }
    }

    /// An epoch goes to the journal when all of it is read.
    fn journal<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        attachment: u32,
    ) {
        if self.epochs.get(&attachment).is_some_and(|epoch| epoch.left == 0)
            && let Some(Epoch { epoch, last, stretches, failed, .. }) =
                self.epochs.remove(&attachment)
        {
            if failed {
                return self.journal_ended(node, now, fx, (attachment, false), false);
            }
            let stretch = |(dirty, bytes): (Dirty, Option<H::Bytes>)| {
                let kind = match dirty.holds {
                    Holds::Bytes | Holds::Unreadable => PartKind::Write,
                    Holds::Zeros => PartKind::Zero,
                    Holds::Trimmed => PartKind::Trim,
                };
                JournalPart { at: dirty.at, len: dirty.len, kind, bytes }
            };
            let parts = stretches.into_iter().map(stretch).collect();
            fx.journal_write(attachment, epoch, last, parts);
        }
    }

    /// A journal has an epoch, or its device was flushed (`flushed`), or not.
    pub(super) fn journal_ended<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        (attachment, flushed): (u32, bool),
        done: bool,
    ) {
        self.destager(node, now, fx, attachment, |log, out, asks| match flushed {
            true => log.journal_flushed(now, attachment, done, out, asks),
            false => log.journaled(now, attachment, done, out, asks),
        });
    }

    /// Records of a volume are copied out of the way when all of them are read.
    fn park<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        attachment: u32,
    ) {
        if self.parking.get(&attachment).is_some_and(|parking| parking.left == 0)
            && let Some(Parking { records, .. }) = self.parking.remove(&attachment)
        {
            self.log(node, now, fx, |log, asks| log.parked(now, attachment, records, asks));
        }
    }

    /// A batch was written, or not.
    pub fn log_written<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        batch: u64,
        done: bool,
    ) {
        self.log(node, now, fx, |log, asks| log.written(now, batch, done, asks));
    }

    /// The device under the log was flushed, or not.
    pub fn log_flushed<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        covers: u64,
        done: bool,
    ) {
        self.log(node, now, fx, |log, asks| log.flushed(now, covers, done, asks));
    }

    /// Does what is due in the log, and says when that is to be done again.
    pub fn log_due<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
    ) -> Option<Nanos> {
        self.log(node, now, fx, |log, asks| {
            log.due(now, asks);
            log.wakes(now)
        })?
    }

    // ---- destage ----

    /// A volume's destage goes on, if this is the queue that does it.
    pub(super) fn destage<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        attachment: u32,
    ) {
        self.destager(node, now, fx, attachment, |log, out, asks| {
            log.step(now, attachment, out, asks);
        });
    }

    /// The log is told something of a volume's destage, and what that asks for is begun.
    pub(super) fn destager<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        attachment: u32,
        f: impl FnOnce(&mut WriteLog<H::Bytes>, &mut Vec<Asked<H::Bytes>>, &mut Asks<H::Bytes>),
    ) {
        let mut out = Vec::new();
        self.log(node, now, fx, |log, asks| f(log, &mut out, asks));
        for asked in out {
            match asked {
                Asked::Store(dirty, Some(Lies::Here(Kept { bytes, skip }))) => {
                    let bytes = Some(H::part(&bytes, skip, dirty.len));
                    self.destage_stretch(node, now, fx, attachment, dirty, bytes);
                }
                Asked::Store(dirty, Some(Lies::Log(piece))) => {
                    self.read_log(fx, LogJob::Destage(attachment, dirty, piece));
                }
                Asked::Store(dirty, None) => {
                    self.destage_stretch(node, now, fx, attachment, dirty, None);
                }
                Asked::Park(parks) => {
                    let left = parks.iter().filter(|(_, piece)| piece.is_some()).count();
                    let records =
                        parks.iter().map(|(n, piece)| (*n, piece.clone(), None)).collect();
                    self.parking.insert(attachment, Parking { records, left });
                    for (at, (_, piece)) in parks.into_iter().enumerate() {
                        if let Some(piece) = piece {
                            self.read_log(fx, LogJob::Park(attachment, at, piece));
                        }
                    }
                    self.park(node, now, fx, attachment);
                }
                Asked::Flush => self.destage_flush(node, now, fx, attachment),
                Asked::Journal { epoch, last, pieces } => {
                    let lost = |(dirty, lies): &(Dirty, Option<Lies<H::Bytes>>)| {
                        matches!(dirty.holds, Holds::Bytes | Holds::Unreadable) && lies.is_none()
                    };
                    let failed = pieces.iter().any(lost);
                    let in_log = |lies: &Option<Lies<H::Bytes>>| {
                        lies.as_ref().and_then(Lies::piece).cloned()
                    };
                    let left = pieces.iter().filter(|(_, lies)| in_log(lies).is_some()).count();
                    let here = |lies: &Option<Lies<H::Bytes>>, len| match lies {
                        Some(Lies::Here(Kept { bytes, skip })) => Some(H::part(bytes, *skip, len)),
                        _ => None,
                    };
                    let stretches =
                        pieces.iter().map(|(dirty, lies)| (*dirty, here(lies, dirty.len)));
                    let stretches = stretches.collect();
                    let all = Epoch { epoch, last, stretches, left, failed };
                    self.epochs.insert(attachment, all);
                    for (at, (_, lies)) in pieces.iter().enumerate() {
                        if let Some(piece) = in_log(lies) {
                            self.read_log(fx, LogJob::Journal(attachment, at, piece));
                        }
                    }
                    self.journal(node, now, fx, attachment);
                }
                Asked::FlushJournal => fx.journal_flush(attachment),
                Asked::Mark(said, frontier) => fx.marker_write(attachment, said, frontier),
                Asked::Look => fx.marker_look(attachment),
            }
        }
    }

    /// A stretch goes to the store: what it holds was read, if it holds bytes.
    fn destage_stretch<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        attachment: u32,
        dirty: Dirty,
        bytes: Option<H::Bytes>,
    ) {
        // A record is no longer than that.
        let memory = u32::try_from(dirty.memory()).unwrap_or(u32::MAX);
        let stretch = Destages::Stretch(attachment, memory);
        let kind = match dirty.holds {
            Holds::Bytes if bytes.is_some() => Some(PartKind::Write),
            Holds::Zeros => Some(PartKind::Zero),
            Holds::Trimmed => Some(PartKind::Trim),
            Holds::Bytes | Holds::Unreadable => None,
        };
        let volume = fx.volume(attachment).filter(|volume| node.state(volume) == State::Served);
        let (Some(kind), Some(volume)) = (kind, volume) else {
            return self.destaged(node, now, fx, stretch, None);
        };
        if !volume.enter_destage() {
            return self.destaged(node, now, fx, stretch, None);
        }
        let at = node.base(&volume).wrapping_add(dirty.at);
        let mut op = self.operation(volume, None, BlockKind::Unknown, now, true);
        (op.kind, op.at, op.len, op.bytes) = (Kind::Part(kind), at, dirty.len, bytes);
        // Without its file system's word for it a store need not give up what is trimmed; zeros may be holes.
        op.may_punch = kind == PartKind::Zero;
        op.destages = Some(stretch);
        // Lines that are cached stay cached; of others those are worth a place that the operator has said so of, and, if admission thinks so, those that were
        // read meanwhile.
        let read = kind == PartKind::Write
            && node.log(|log| log.was_read(attachment, dirty.sequence)).unwrap_or_default();
        let advice = if read { Verdict::Admit } else { Verdict::Reject };
        if self.fault.is(Planted::DestagedPastSlots) {
            return self.straight(node, now, fx, op);
        }
        // It never waits for what waits for the log: a full one would wait for itself.
        if self.fault.is(Planted::DestageWaitsForLog) && self.newer(&op).is_some() {
            op.volume.leave();
            return self.destaged(node, now, fx, stretch, None);
        }
        self.begin(node, now, fx, op, advice);
    }

    /// The bytes of a change of all of these bytes that is in the log, or waits for it: for faults alone.
    pub(super) fn newer(&self, of: &Operation<H>) -> Option<H::Bytes> {
        let end = of.at + of.len;
        let covers = |op: &&Operation<H>| op.logged && op.at <= of.at && end <= op.at + op.len;
        let newer =
            self.ops.values().filter(covers).find_map(|op| Some((op.at, op.bytes.as_ref()?)));
        newer.map(|(at, bytes)| H::part(bytes, of.at - at, of.len))
    }

    fn destage_flush<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        attachment: u32,
    ) {
        let Some(volume) = fx.volume(attachment) else {
            return self.destaged(node, now, fx, Destages::Flush(attachment), None);
        };
        let mut op = self.operation(volume, None, BlockKind::Unknown, now, false);
        op.destages = Some(Destages::Flush(attachment));
        self.straight(node, now, fx, op);
    }

    /// A stretch came to the store, or a flush of it has ended; which incarnation of the store that was.
    pub(super) fn destaged<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        destages: Destages,
        outcome: Outcome,
    ) {
        match destages {
            Destages::Stretch(attachment, memory) => {
                self.destager(node, now, fx, attachment, |log, out, asks| {
                    log.stored(now, attachment, (memory.into(), outcome), out, asks);
                });
            }
            Destages::Flush(attachment) => {
                self.destager(node, now, fx, attachment, |log, out, asks| {
                    log.store_flushed(now, attachment, outcome, out, asks);
                });
            }
            // Its end is that of its client's operation.
            Destages::Through(_) => {}
        }
    }

    // ---- a log that has failed ----

    /// A part of a client's change, which has waited for its volume to write back no more, goes to the store.
    #[expect(clippy::too_many_arguments, reason = "what a message has")]
    pub(super) fn through<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        id: OpId,
        (kind, at, len): (PartKind, u64, u64),
        bytes: Option<H::Bytes>,
        may_punch: bool,
    ) {
        let Some(of) = self.ops.get_mut(&id) else { return };
        of.logged = false;
        let (volume, fua, fast) = (of.volume.clone(), of.fua, of.fast);
        if node.state(&volume) != State::Served || !node.enter(&volume) {
            return self.step(node, now, fx, id, Some(H::failure(Why::Failed)));
        }
        let at = node.base(&volume).wrapping_add(at);
        let mut op = self.operation(volume, None, BlockKind::Unknown, now, true);
        (op.kind, op.at, op.len, op.bytes) = (Kind::Part(kind), at, len, bytes);
        (op.fua, op.may_punch, op.fast) = (fua, may_punch, fast);
        op.destages = Some(Destages::Through(id));
        self.begin(node, now, fx, op, Verdict::Reject);
    }

    /// A client's FLUSH likewise.
    pub(super) fn flush_through<N: Node<H>>(
        &mut self,
        node: &N,
        now: Nanos,
        fx: &mut impl Effects<H>,
        id: OpId,
    ) {
        let Some(of) = self.ops.get_mut(&id) else { return };
        of.logged = false;
        let volume = of.volume.clone();
        let mut op = self.operation(volume, None, BlockKind::Unknown, now, false);
        op.destages = Some(Destages::Through(id));
        self.straight(node, now, fx, op);
    }
}
