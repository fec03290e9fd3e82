//! The node of a replay: it answers as was recorded.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::RangeInclusive;

use larder_base::Nanos;
use larder_format::recording::Cursor;
use larder_format::recording::bytes::unzigzag;
use larder_policy::block::{
    BlockAccess, BlockCandidate, BlockKind, Hints, Observed, Reason, Rule,
    Verdict as PolicyVerdict, VolumeId,
};

use super::codes::{FURTHEST, kind_of, rule_of, state_of, take_message, verdict_of};
use crate::block::api::{
    BlockEffects, GroupId, IoFailed, IoId, LineId, Merge, OpId, Part, SlotId, Sum, Verdict,
};
use crate::block::node::calls::{Calls, Mail, Message, Out, Questions, Shard};
use crate::block::node::event::{
    Answer, Effects, Ended, Host, JobId, ShardIo, State, StoreOp, Volume, Why,
};
use crate::block::node::failing::FlashError;
use crate::block::node::held::Held;
use crate::block::node::limits::{Admits, Limits};
use crate::block::node::queue::Node;
use crate::block::node::quiet::Changes;
use crate::block::node::ranged::{Discards, Turns};

/// The types of a replay, in which there are no bytes.
pub(super) struct Replay;

impl Host for Replay {
    type Bytes = ();
    type Volume = AVolume;
    type Ticket = ();
    type Failure = ();
    type Extents = ();

    fn part(_: &(), _: u64, _: u64) {}
    fn apart(_: &(), _: u64, _: u64) {}
    fn failure(_: Why) {}
}

/// A volume: what is asked of it the node answers.
#[derive(Clone)]
pub(super) struct AVolume;

impl Volume for AVolume {
    fn state(&self) -> State {
        State::Detached
    }

    fn base(&self) -> u64 {
        0
    }

    fn whole(&self) -> u64 {
        0
    }
}

/// What was answered during one call, as it is answered again.
pub(super) struct Heard<'a> {
    cursor: Cursor<'a>,
    /// Something was asked of which no such answer was recorded: the queue has decided otherwise before.
    astray: bool,
    base: u64,
    whole: u64,
    /// Where in its volume the operation begins that is submitted.
    at: u64,
}

impl<'a> Heard<'a> {
    /// The answers in `bytes`; volumes begin and end where they did `before`, and the operation at `at` of its volume.
    pub(super) fn new(bytes: &'a [u8], before: (u64, u64), at: u64) -> Heard<'a> {
        let (base, whole) = before;
        Heard { cursor: Cursor::new(bytes), astray: false, base, whole, at }
    }

    /// Whether everything was asked that was answered, and nothing else.
    pub(super) fn is_used_up(&self) -> bool {
        !self.astray && self.cursor.left() == 0
    }

    /// Where the volume that was asked for last begins and ends.
    pub(super) fn known(&self) -> (u64, u64) {
        (self.base, self.whole)
    }

    /// The next number, unless nothing is right any more.
    fn next(&mut self) -> Option<u64> {
        let next = if self.astray { None } else { self.cursor.varint("answer").ok() };
        self.astray |= next.is_none();
        next
    }

    /// Of such numbers what `of` makes of them.
    fn value<T>(&mut self, of: impl FnOnce(u64) -> Option<T>) -> Option<T> {
        let value = self.next().and_then(of);
        self.astray |= value.is_none();
        value
    }
}

/// The node, as it is called: everything that a queue speaks to.
#[derive(Clone, Copy)]
pub(super) struct Recorded<'a, 'b> {
    pub heard: &'a RefCell<Heard<'b>>,
    /// Not asked.
    pub limits: &'a Limits,
    pub changes: &'a Changes,
}

impl Recorded<'_, '_> {
    fn value<T>(&self, of: impl FnOnce(u64) -> Option<T>) -> Option<T> {
        self.heard.borrow_mut().value(of)
    }

    fn number(&self) -> u64 {
        self.heard.borrow_mut().next().unwrap_or(0)
    }

    fn yes(&self) -> bool {
        self.value(|n| (n <= 1).then_some(n == 1)).unwrap_or(false)
    }
}

/// Shards ask nothing here: what they would have asked for comes by mail.
impl Questions for Recorded<'_, '_> {
    fn line_bytes(&self) -> u32 {
        0
    }

    fn prefer(&self, _: LineId, _: LineId) -> bool {
        false
    }

    fn keep(&self, _: LineId, _: Option<LineId>) -> bool {
        false
    }

    fn keep_groups(&self, _: GroupId, _: GroupId, _: u32) -> bool {
        false
    }

    fn may_grow(&self, _: LineId) -> bool {
        false
    }
}

impl Calls<Replay> for Recorded<'_, '_> {
    type Shard = Self;

    fn shard<R>(&self, _: u32, f: impl FnOnce(&mut Self, &mut Held<Replay>) -> R) -> R {
        f(&mut { *self }, &mut Held::default())
    }

    fn mailbox<R>(&self, _: usize, f: impl FnOnce(&mut Mail<Replay>) -> R) -> R {
        f(&mut Vec::new())
    }

    fn notify(&self, _: usize) {}

    fn maintain(&self, _: &mut Out<()>) {}
}

impl Node<Replay> for Recorded<'_, '_> {
    type Admission = Self;

    fn is_enabled(&self) -> bool {
        self.yes()
    }

    fn limits(&self) -> &Limits {
        self.limits
    }

    fn ask_budget(&self, _: OpId) {}

    fn changes(&self) -> &Changes {
        self.changes
    }

    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R {
        f(&mut Turns::default())
    }

    fn ask_bits(&self, _: OpId, _: u32, _: u32) {}

    fn give_up(&self, _: Nanos, _: String) {}

    fn id(&self, _: &AVolume) -> VolumeId {
        VolumeId(self.value(|n| u32::try_from(n).ok()).unwrap_or(0))
    }

    fn selects(&self, _: &AVolume) -> bool {
        self.yes()
    }

    fn rule(&self, _: &AVolume, _: u64, _: u64) -> Rule {
        self.value(rule_of).unwrap_or_default()
    }

    fn kind(&self, _: &AVolume, _: u64, _: u64) -> BlockKind {
        self.value(kind_of).unwrap_or(BlockKind::Unknown)
    }

    fn admission<R>(&self, _: &AVolume, f: impl FnOnce(&mut Self) -> R) -> R {
        f(&mut { *self })
    }

    fn refused(&self, _: &AVolume, _: Reason) {}

    fn pass(&self, _: &AVolume, _: u64, (): &()) {}

    fn ended(&self, _: &AVolume, _: usize, _: Nanos, _: &Ended) {}

    fn state(&self, _: &AVolume) -> State {
        self.value(state_of).unwrap_or(State::Detached)
    }

    fn base(&self, _: &AVolume) -> u64 {
        let heard = &mut *self.heard.borrow_mut();
        let (at, last) = (heard.at, heard.base);
        // No operation begins so far behind in the line space, and no volume either.
        let base = |n| Some(last.wrapping_add(unzigzag(n) as u64));
        let found = heard.value(|n| base(n).filter(|b| at.wrapping_add(*b) < FURTHEST));
        heard.base = found.unwrap_or(0u64.wrapping_sub(at));
        heard.base
    }

    fn whole(&self, _: &AVolume) -> u64 {
        let heard = &mut *self.heard.borrow_mut();
        let since = heard.next().map_or(0, unzigzag);
        heard.whole = heard.whole.wrapping_add(since as u64);
        heard.whole
    }

    fn enter(&self, _: &AVolume) -> bool {
        self.yes()
    }

    fn losses(&self, _: &AVolume) -> u64 {
        self.number()
    }

    fn settled(&self, _: &AVolume) -> u64 {
        self.number()
    }

    fn is_paused(&self, _: Nanos) -> bool {
        self.yes()
    }

    fn affords(&self, _: Nanos, _: u64) -> bool {
        self.yes()
    }

    fn pay(&self, _: Nanos, _: u64) -> bool {
        self.yes()
    }

    fn flash_ended(&self, _: Nanos, _: Result<(), FlashError>) {}

    fn changing(&self, _: Nanos, _: RangeInclusive<u32>) {}

    fn enter_turn(&self, _: OpId) -> bool {
        self.yes()
    }

    fn leave_turn(&self, _: OpId) -> Option<OpId> {
        self.number().checked_sub(1).map(OpId)
    }

    fn drain(&self, _: usize, inbox: &mut VecDeque<(OpId, Message<()>)>) {
        let heard = &mut *self.heard.borrow_mut();
        for _ in 0..heard.next().unwrap_or(0) {
            match take_message(&mut heard.cursor) {
                Ok(message) => inbox.push_back(message),
                Err(_) => return heard.astray = true,
            }
        }
    }
}

/// Nothing comes of what it is told.
impl Shard for Recorded<'_, '_> {
    fn submit(&mut self, _: Nanos, _: Part, _: &mut impl BlockEffects) {}
    fn flash_read(
        &mut self,
        _: Nanos,
        _: IoId,
        _: Result<&[u32], IoFailed>,
        _: &mut impl BlockEffects,
    ) {
    }
    fn flash_written(
        &mut self,
        _: Nanos,
        _: IoId,
        _: Result<&[u32], IoFailed>,
        _: &mut impl BlockEffects,
    ) {
    }
    fn merged(
        &mut self,
        _: Nanos,
        _: IoId,
        _: Result<(u32, u32), IoFailed>,
        _: &mut impl BlockEffects,
    ) {
    }
    fn page_loaded(
        &mut self,
        _: Nanos,
        _: IoId,
        _: Result<&[Option<Sum>], IoFailed>,
        _: &mut impl BlockEffects,
    ) {
    }
    fn backing_read(
        &mut self,
        _: Nanos,
        _: IoId,
        _: Result<(), IoFailed>,
        _: &mut impl BlockEffects,
    ) {
    }
    fn backing_changed(
        &mut self,
        _: Nanos,
        _: IoId,
        _: Result<(), IoFailed>,
        _: &mut impl BlockEffects,
    ) {
    }
    fn lock_range(&mut self, _: Nanos, _: OpId, _: LineId, _: LineId, _: &mut impl BlockEffects) {}
    fn unlock_range(&mut self, _: Nanos, _: OpId, _: &mut impl BlockEffects) {}
    // Operators' work asks these, queues do not.
    fn sweep(&mut self, _: u32) -> bool {
        false
    }
    fn dropped(&self) -> u64 {
        0
    }
}

impl Discards for Recorded<'_, '_> {
    fn void_range(&mut self, _: LineId, _: LineId, _: u64) -> [Option<(LineId, LineId)>; 2] {
        [(); 2].map(|()| self.yes().then(|| (LineId(self.number()), LineId(self.number()))))
    }

    fn drop_range(&mut self, _: LineId, _: LineId, _: u64, _: u32) -> Option<u64> {
        self.number().checked_sub(1)
    }
}

impl Admits for Recorded<'_, '_> {
    fn observe(&mut self, _: &BlockAccess) -> Observed {
        // What else there is to say of an access is for admission alone.
        Observed::of((self.number(), self.number()), Hints::default())
    }

    fn wants_victim(&self) -> bool {
        self.yes()
    }

    fn ask(&mut self, _: &BlockCandidate, _: bool) -> Verdict {
        self.value(verdict_of).unwrap_or_default()
    }

    fn ahead(&self, _: Verdict) -> Verdict {
        self.value(verdict_of).unwrap_or_default()
    }

    fn count(&mut self, _: PolicyVerdict) {}
}

/// The host of a replay, which carries nothing out.
pub(super) struct Nothing;

impl Effects<Replay> for Nothing {
    fn flash_read(&mut self, _: ShardIo, _: SlotId, _: LineId, _: u32) {}
    fn flash_write(&mut self, _: ShardIo, _: SlotId, _: u32, (): ()) {}
    fn merge(&mut self, _: ShardIo, _: Merge, (): ()) {}
    fn load(&mut self, _: ShardIo, _: u32) {}
    fn store_read(&mut self, _: JobId, _: &AVolume, _: u64, _: u32, _: bool) {}
    fn store_change(&mut self, _: JobId, _: &AVolume, _: StoreOp<()>) {}
    fn deliver(&mut self, (): &mut (), _: u64, (): ()) {}
    fn answer(&mut self, _: Answer<Replay>) {}
}
