//! What a queue asks, tells and asks for, noted on its way.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::RangeInclusive;

use larder_base::Nanos;
use larder_format::recording::bytes::{put, zigzag};
use larder_policy::block::{
    BlockAccess, BlockCandidate, BlockKind, BlockOp, Observed, Reason, Rule,
    Verdict as PolicyVerdict, VolumeId,
};

use super::codes::{kind_code, put_message, rule_code, state_code, verdict_code};
use crate::block::api::{GroupId, LineId, Merge, OpId, Part, SlotId, Source, Verdict};
use crate::block::node::calls::{Calls, Mail, Message, Out, Questions, Told};
use crate::block::node::event::{Answer, Effects, Ended, Host, JobId, ShardIo, State, StoreOp};
use crate::block::node::failing::FlashError;
use crate::block::node::held::Held;
use crate::block::node::limits::{Admits, Asks, Limits};
use crate::block::node::logged::{JournalPart, LogIo};
use crate::block::node::queue::Node;
use crate::block::node::quiet::Changes;
use crate::block::node::ranged::{Discard, Discards, Turns};
use crate::block::record::digest::{Digest, kind_code as part_code};
use crate::block::writeback::log::{Said, ToWrite, WriteLog};

/// What was noted during one call.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Everything that was asked, told and asked for.
    pub digest: Digest,
    /// What was answered.
    pub heard: Vec<u8>,
    /// What was answered last of where a volume begins and where its whole lines end: mostly the same again.
    pub base: u64,
    pub whole: u64,
}

/// A node.
pub(super) struct Noting<'a, N> {
    pub inner: &'a N,
    pub notes: &'a RefCell<Notes>,
}

impl<N> Noting<'_, N> {
    /// It is told something.
    fn told(&self, numbers: &[u64]) {
        self.notes.borrow_mut().digest.all(numbers);
    }

    /// It is asked something, and answers.
    fn heard(&self, numbers: &[u64], answer: u64) {
        let mut notes = self.notes.borrow_mut();
        notes.digest.all(numbers);
        put(&mut notes.heard, answer);
    }

    fn said(&self, numbers: &[u64], yes: bool) -> bool {
        self.heard(numbers, yes.into());
        yes
    }
}

impl<N: Questions> Questions for Noting<'_, N> {
    fn line_bytes(&self) -> u32 {
        self.inner.line_bytes()
    }

    fn prefer(&self, line: LineId, victim: LineId) -> bool {
        self.inner.prefer(line, victim)
    }

    fn keep(&self, victim: LineId, line: Option<LineId>) -> bool {
        self.inner.keep(victim, line)
    }

    fn keep_groups(&self, first: GroupId, last: GroupId, lines: u32) -> bool {
        self.inner.keep_groups(first, last, lines)
    }

    fn may_grow(&self, line: LineId) -> bool {
        self.inner.may_grow(line)
    }

    fn filling(&self, line: LineId, lines: u32, source: Source) {
        self.inner.filling(line, lines, source);
    }

    fn stays(&self, op: OpId) -> bool {
        self.inner.stays(op)
    }

    fn writes_of(&self, op: OpId) -> OpId {
        self.inner.writes_of(op)
    }
}

impl<H: Host, N: Calls<H>> Calls<H> for Noting<'_, N> {
    type Shard = N::Shard;

    fn shard<R>(&self, shard: u32, f: impl FnOnce(&mut N::Shard, &mut Held<H>) -> R) -> R {
        self.inner.shard(shard, f)
    }

    fn mailbox<R>(&self, thread: usize, f: impl FnOnce(&mut Mail<H>) -> R) -> R {
        self.inner.mailbox(thread, f)
    }

    fn notify(&self, thread: usize) {
        self.inner.notify(thread);
    }

    fn maintain(&self, out: &mut Out<H::Bytes>) {
        self.inner.maintain(out);
    }
}

fn told_numbers(told: Told) -> [u64; 6] {
    match told {
        Told::Part(Part { op, kind, at, len, verdict }) => {
            [part_code(kind), op.0, at, len.into(), verdict_code(verdict), 0]
        }
        Told::FlashRead(io, line, ok) => [16, io.0.into(), line.0, ok.into(), 0, 0],
        Told::FlashWritten(io, ok) => [17, io.0.into(), ok.into(), 0, 0, 0],
        Told::Merged(io, ok) => [18, io.0.into(), ok.into(), 0, 0, 0],
        Told::PageLoaded(io, ok) => [19, io.0.into(), ok.into(), 0, 0, 0],
        Told::StoreRead(io, ok) => [20, io.0.into(), ok.into(), 0, 0, 0],
        Told::StoreChanged(io, ok) => [21, io.0.into(), ok.into(), 0, 0, 0],
        Told::Lock(op, first, last) => [22, op.0, first.0, last.0, 0, 0],
        Told::Unlock(op) => [23, op.0, 0, 0, 0, 0],
        Told::Discard => [24, 0, 0, 0, 0, 0],
    }
}

impl<H: Host, N: Node<H>> Node<H> for Noting<'_, N> {
    type Admission = N::Admission;

    fn is_enabled(&self) -> bool {
        self.said(&[1], self.inner.is_enabled())
    }

    // A run with volumes that write back is not recorded.
    fn attachment(&self, volume: &H::Volume) -> Option<u32> {
        self.inner.attachment(volume)
    }

    fn log<R>(&self, f: impl FnOnce(&mut WriteLog<H::Bytes>) -> R) -> Option<R> {
        self.inner.log(f)
    }

    fn destages(&self, attachment: u32) -> usize {
        self.inner.destages(attachment)
    }

    /// Not asked: what is asked of them has calls of its own.
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn ask_budget(&self, op: OpId) {
        self.told(&[2, op.0]);
        self.inner.ask_budget(op);
    }

    /// As [`limits`](Self::limits).
    fn changes(&self) -> &Changes {
        self.inner.changes()
    }

    /// As [`limits`](Self::limits).
    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        self.inner.turns(f)
    }

    fn ask_bits(&self, op: OpId, first: u32, last: u32) {
        self.told(&[3, op.0, first.into(), last.into()]);
        self.inner.ask_bits(op, first, last);
    }

    /// What it follows from is told.
    fn give_up(&self, now: Nanos, why: String) {
        self.inner.give_up(now, why);
    }

    fn pauses(&self, pause: Nanos) {
        self.inner.pauses(pause);
    }

    fn id(&self, volume: &H::Volume) -> VolumeId {
        let id = self.inner.id(volume);
        self.heard(&[4], id.0.into());
        id
    }

    fn selects(&self, volume: &H::Volume) -> bool {
        self.said(&[5], self.inner.selects(volume))
    }

    fn rule(&self, volume: &H::Volume, at: u64, len: u64) -> Rule {
        let rule = self.inner.rule(volume, at, len);
        self.heard(&[6, at, len], rule_code(rule));
        rule
    }

    fn kind(&self, volume: &H::Volume, at: u64, len: u64) -> BlockKind {
        let kind = self.inner.kind(volume, at, len);
        self.heard(&[7, at, len], kind_code(kind));
        kind
    }

    /// As [`limits`](Self::limits).
    fn admission<R>(&self, volume: &H::Volume, f: impl FnOnce(&mut N::Admission) -> R) -> R {
        self.inner.admission(volume, f)
    }

    fn asks<A: Asks>(&self, volume: &H::Volume, asks: A) -> A::Answer {
        self.inner.asks(volume, NotingAsks { asks, notes: self.notes })
    }

    fn refused(&self, volume: &H::Volume, reason: Reason) {
        self.told(&[8, reason as u64]);
        self.inner.refused(volume, reason);
    }

    fn pass(&self, volume: &H::Volume, at: u64, bytes: &H::Bytes) {
        self.told(&[9, at]);
        self.inner.pass(volume, at, bytes);
    }

    /// The same is in the answer.
    fn ended(&self, volume: &H::Volume, me: usize, now: Nanos, ended: &Ended) {
        self.inner.ended(volume, me, now, ended);
    }

    fn state(&self, volume: &H::Volume) -> State {
        let state = self.inner.state(volume);
        self.heard(&[10], state_code(state));
        state
    }

    fn base(&self, volume: &H::Volume) -> u64 {
        let base = self.inner.base(volume);
        let notes = &mut *self.notes.borrow_mut();
        notes.digest.add(11);
        put(&mut notes.heard, zigzag(base.wrapping_sub(notes.base) as i64));
        notes.base = base;
        base
    }

    fn whole(&self, volume: &H::Volume) -> u64 {
        let whole = self.inner.whole(volume);
        let notes = &mut *self.notes.borrow_mut();
        notes.digest.add(12);
        put(&mut notes.heard, zigzag(whole.wrapping_sub(notes.whole) as i64));
        notes.whole = whole;
        whole
    }

    fn enter(&self, volume: &H::Volume) -> bool {
        self.said(&[13], self.inner.enter(volume))
    }

    fn losses(&self, volume: &H::Volume) -> u64 {
        let losses = self.inner.losses(volume);
        self.heard(&[14], losses);
        losses
    }

    fn settled(&self, volume: &H::Volume) -> u64 {
        let settled = self.inner.settled(volume);
        self.heard(&[15], settled);
        settled
    }

    fn is_paused(&self, now: Nanos) -> bool {
        self.said(&[16, now.0], self.inner.is_paused(now))
    }

    fn affords(&self, now: Nanos, bytes: u64) -> bool {
        self.said(&[17, now.0, bytes], self.inner.affords(now, bytes))
    }

    fn pay(&self, now: Nanos, bytes: u64) -> bool {
        self.said(&[18, now.0, bytes], self.inner.pay(now, bytes))
    }

    /// How it ended is in the record, and what follows from it is no queue's decision.
    fn flash_ended(&self, now: Nanos, ended: Result<(), FlashError>) {
        self.inner.flash_ended(now, ended);
    }

    fn changing(&self, now: Nanos, regions: RangeInclusive<u32>) {
        self.told(&[19, now.0, (*regions.start()).into(), (*regions.end()).into()]);
        self.inner.changing(now, regions);
    }

    fn enter_turn(&self, op: OpId) -> bool {
        self.said(&[20, op.0], self.inner.enter_turn(op))
    }

    fn leave_turn(&self, op: OpId) -> Option<OpId> {
        let next = self.inner.leave_turn(op);
        self.heard(&[21, op.0], next.map_or(0, |next| next.0 + 1));
        next
    }

    fn drain(&self, me: usize, inbox: &mut VecDeque<(OpId, Message<H::Bytes>)>) {
        let from = inbox.len();
        self.inner.drain(me, inbox);
        let notes = &mut *self.notes.borrow_mut();
        put(&mut notes.heard, (inbox.len() - from) as u64);
        for (op, message) in inbox.range(from..) {
            put_message(&mut notes.heard, *op, message);
        }
    }

    fn discard(&self, discard: &mut Discard, shard: &mut N::Shard) -> bool {
        discard.turn(&mut NotingDiscards { inner: shard, notes: self.notes })
    }

    fn telling(&self, shard: u32, told: Told) {
        self.told(&[22, shard.into()]);
        self.told(&told_numbers(told));
        self.inner.telling(shard, told);
    }
}

/// A shard whose lines go.
struct NotingDiscards<'a, D> {
    inner: &'a mut D,
    notes: &'a RefCell<Notes>,
}

/// A stretch of lines, or none.
type Left = Option<(LineId, LineId)>;

impl<D: Discards> Discards for NotingDiscards<'_, D> {
    fn void_range(&mut self, first: LineId, last: LineId, least: u64) -> [Left; 2] {
        let left = self.inner.void_range(first, last, least);
        let notes = &mut *self.notes.borrow_mut();
        notes.digest.all(&[23, first.0, last.0, least]);
        for stretch in left {
            put(&mut notes.heard, stretch.is_some().into());
            for line in stretch.into_iter().flat_map(|(first, last)| [first, last]) {
                put(&mut notes.heard, line.0);
            }
        }
        left
    }

    fn drop_range(&mut self, first: LineId, last: LineId, cursor: u64, steps: u32) -> Option<u64> {
        let next = self.inner.drop_range(first, last, cursor, steps);
        let notes = &mut *self.notes.borrow_mut();
        notes.digest.all(&[24, first.0, last.0, cursor, steps.into()]);
        put(&mut notes.heard, next.map_or(0, |next| next.wrapping_add(1)));
        next
    }
}

/// Somebody who asks an admission.
struct NotingAsks<'a, A> {
    asks: A,
    notes: &'a RefCell<Notes>,
}

impl<A: Asks> Asks for NotingAsks<'_, A> {
    type Answer = A::Answer;

    fn ask(self, admission: &mut impl Admits) -> A::Answer {
        self.asks.ask(&mut NotingAdmits { inner: admission, notes: self.notes })
    }
}

/// An admission.
struct NotingAdmits<'a, A> {
    inner: &'a mut A,
    notes: &'a RefCell<Notes>,
}

impl<A: Admits> Admits for NotingAdmits<'_, A> {
    fn observe(&mut self, access: &BlockAccess) -> Observed {
        let observed = self.inner.observe(access);
        let notes = &mut *self.notes.borrow_mut();
        let &BlockAccess { volume, offset, bytes, op, kind, now } = access;
        notes.digest.all(&[25, volume.0.into(), offset, bytes]);
        notes.digest.all(&[u64::from(op == BlockOp::Write), kind_code(kind), now.0]);
        let (start, end) = observed.sequential();
        put(&mut notes.heard, start);
        put(&mut notes.heard, end);
        observed
    }

    fn wants_victim(&self) -> bool {
        let wants = self.inner.wants_victim();
        let notes = &mut *self.notes.borrow_mut();
        notes.digest.add(26);
        put(&mut notes.heard, wants.into());
        wants
    }

    fn ask(&mut self, candidate: &BlockCandidate, compete: bool) -> Verdict {
        let said = self.inner.ask(candidate, compete);
        let notes = &mut *self.notes.borrow_mut();
        let (line, kind) = (candidate.line, kind_code(candidate.kind));
        notes.digest.all(&[27, line.volume.0.into(), line.offset, kind, compete.into()]);
        put(&mut notes.heard, verdict_code(said));
        said
    }

    fn ahead(&self, said: Verdict) -> Verdict {
        let ahead = self.inner.ahead(said);
        let notes = &mut *self.notes.borrow_mut();
        notes.digest.all(&[28, verdict_code(said)]);
        put(&mut notes.heard, verdict_code(ahead));
        ahead
    }

    fn count(&mut self, verdict: PolicyVerdict) {
        let refused = match verdict {
            PolicyVerdict::Admit => 0,
            PolicyVerdict::IfFree => 1,
            PolicyVerdict::Reject(reason) => 2 + reason as u64,
        };
        self.notes.borrow_mut().digest.all(&[29, refused]);
        self.inner.count(verdict);
    }
}

/// A host.
pub(super) struct NotingFx<'a, E> {
    pub inner: &'a mut E,
    pub notes: &'a RefCell<Notes>,
}

impl<E> NotingFx<'_, E> {
    fn asked(&self, numbers: &[u64]) {
        self.notes.borrow_mut().digest.all(numbers);
    }
}

impl<H: Host, E: Effects<H>> Effects<H> for NotingFx<'_, E> {
    fn flash_read(&mut self, io: ShardIo, slot: SlotId, line: LineId, lines: u32) {
        self.asked(&[40, io.shard.into(), io.io.0.into(), slot.0.into(), line.0, lines.into()]);
        self.inner.flash_read(io, slot, line, lines);
    }

    fn flash_write(&mut self, io: ShardIo, slot: SlotId, lines: u32, bytes: H::Bytes) {
        self.asked(&[41, io.shard.into(), io.io.0.into(), slot.0.into(), lines.into()]);
        self.inner.flash_write(io, slot, lines, bytes);
    }

    fn merge(&mut self, io: ShardIo, merge: Merge, bytes: H::Bytes) {
        let Merge { line, from, to, at, len } = merge;
        self.asked(&[42, io.shard.into(), io.io.0.into(), line.0, from.0.into(), to.0.into()]);
        self.asked(&[at, len.into()]);
        self.inner.merge(io, merge, bytes);
    }

    fn load(&mut self, io: ShardIo, page: u32) {
        self.asked(&[43, io.shard.into(), io.io.0.into(), page.into()]);
        self.inner.load(io, page);
    }

    fn store_read(&mut self, job: JobId, volume: &H::Volume, at: u64, len: u32, ahead: bool) {
        self.asked(&[44, job.0.into(), at, len.into(), ahead.into()]);
        self.inner.store_read(job, volume, at, len, ahead);
    }

    fn store_change(&mut self, job: JobId, volume: &H::Volume, change: StoreOp<H::Bytes>) {
        let (tag, at, len, flags) = match &change {
            StoreOp::Write { at, len, fua, .. } => (0, *at, *len, [*fua, false, false]),
            StoreOp::Zero { at, len, fua, may_punch, fast } => {
                (1, *at, *len, [*fua, *may_punch, *fast])
            }
            StoreOp::Trim { at, len, fua } => (2, *at, *len, [*fua, false, false]),
            StoreOp::Flush => (3, 0, 0, [false; 3]),
            StoreOp::Status { at, len, one } => (4, *at, *len, [*one, false, false]),
        };
        self.asked(&[45, job.0.into(), tag, at, len]);
        self.asked(&flags.map(u64::from));
        self.inner.store_change(job, volume, change);
    }

    fn log_write(&mut self, write: ToWrite<H::Bytes>) {
        self.inner.log_write(write);
    }

    fn log_flush(&mut self, covers: u64) {
        self.inner.log_flush(covers);
    }

    fn log_read(&mut self, io: LogIo, at: u64, len: u32) {
        self.inner.log_read(io, at, len);
    }

    fn journal_write(
        &mut self,
        attachment: u32,
        epoch: u64,
        last: u64,
        parts: Vec<JournalPart<H::Bytes>>,
    ) {
        self.inner.journal_write(attachment, epoch, last, parts);
    }

    fn journal_flush(&mut self, attachment: u32) {
        self.inner.journal_flush(attachment);
    }

    fn marker_write(&mut self, attachment: u32, said: Said, frontier: u64) {
        self.inner.marker_write(attachment, said, frontier);
    }

    fn marker_look(&mut self, attachment: u32) {
        self.inner.marker_look(attachment);
    }

    fn deliver_zeros(&mut self, ticket: &mut H::Ticket, at: u64, len: u64) {
        self.inner.deliver_zeros(ticket, at, len);
    }

    fn volume(&mut self, attachment: u32) -> Option<H::Volume> {
        self.inner.volume(attachment)
    }

    fn deliver(&mut self, ticket: &mut H::Ticket, at: u64, bytes: H::Bytes) {
        self.asked(&[46, at]);
        self.inner.deliver(ticket, at, bytes);
    }

    fn answer(&mut self, answer: Answer<H>) {
        self.asked(&[47, answer.outcome.is_err().into(), answer.losses.unwrap_or(u64::MAX)]);
        if let Some(Ended { kind, at, len, holds, began, failed, hit, asked_store, .. }) =
            answer.ended
        {
            self.asked(&[part_code(kind), at, len, kind_code(holds), began.0]);
            self.asked(&[failed, hit, asked_store].map(u64::from));
        }
        if let Some(Ended { from_flash, shared, .. }) = answer.ended {
            self.asked(&[from_flash, shared]);
        }
        self.inner.answer(answer);
    }
}
