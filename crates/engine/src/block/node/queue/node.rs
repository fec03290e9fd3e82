//! What a queue's operations go by that the queue does not know itself: shards, mailboxes, volumes, rules, admission, budget.

use std::collections::VecDeque;
use std::marker::PhantomData;
use std::ops::RangeInclusive;

use larder_base::Nanos;
use larder_policy::block::{BlockAccess, BlockKind, Reason, Rule, VolumeId};

use crate::block::api::{OpId, Verdict};
use crate::block::node::calls::{Calls, Message, Told};
use crate::block::node::event::{Ended, Host, State, Volume};
use crate::block::node::failing::{Failing, FlashError};
use crate::block::node::limits::{self, Admits, Allows, Asks, Limits};
use crate::block::node::quiet::Changes;
use crate::block::node::ranged::{Discard, Turns};
use crate::block::writeback::log::WriteLog;

/// What queues share: shards, mailboxes, and what is decided for all of them.
pub trait Node<H: Host>: Calls<H> {
    /// Admission of a volume.
    type Admission: Admits;

    /// The cache is in use; otherwise nothing is cached and no bit is needed.
    fn is_enabled(&self) -> bool;
    /// What keeps lines from flash.
    fn limits(&self) -> &Limits;
    /// The budget's file is to say more, for `op`'s write: maintenance is to hear of it (`Inbox::ask_budget`), and
    /// [`Message::BudgetKept`] says that it was seen to.
    fn ask_budget(&self, op: OpId);
    /// When regions were last changed.
    fn changes(&self) -> &Changes;
    /// Does `f` with the turns of large ranges locked.
    fn turns<R>(&self, f: impl FnOnce(&mut Turns) -> R) -> R;
    /// The bits of regions `first..=last` are to be durable; [`Message::IntentsReady`] says when they are.
    fn ask_bits(&self, op: OpId, first: u32, last: u32);
    /// The cache is to be given up, for this reason: maintenance is to hear of it (`Inbox::give_up`).
    fn give_up(&self, now: Nanos, why: String);
    /// Nothing new is cached for so long, since the file system under the cache has no room.
    fn pauses(&self, _pause: Nanos) {}

    /// The attachment number of a volume that writes back.
    #[inline]
    fn attachment(&self, _volume: &H::Volume) -> Option<u32> {
        None
    }
    /// Does `f` with the write log locked; nothing where there is none.
    #[inline]
    fn log<R>(&self, _f: impl FnOnce(&mut WriteLog<H::Bytes>) -> R) -> Option<R> {
        None
    }
    /// The thread whose queue destages a volume.
    fn destages(&self, _attachment: u32) -> usize {
        0
    }
    /// The number of a volume, for policies.
    fn id(&self, volume: &H::Volume) -> VolumeId;
    /// Whether the operator has said anything of bytes of it.
    fn selects(&self, volume: &H::Volume) -> bool;
    /// What, of bytes `at..at + len` of it.
    fn rule(&self, volume: &H::Volume, at: u64, len: u64) -> Rule;
    /// What these bytes hold, as far as is known.
    fn kind(&self, volume: &H::Volume, at: u64, len: u64) -> BlockKind;
    /// Does `f` with its admission locked. Rules, and what keeps lines from flash, are asked meanwhile; what bytes hold is not, since
    /// that may be locked too.
    fn admission<R>(&self, volume: &H::Volume, f: impl FnOnce(&mut Self::Admission) -> R) -> R;
    /// The same, of what asks any kind of admission.
    #[inline]
    fn asks<A: Asks>(&self, volume: &H::Volume, asks: A) -> A::Answer {
        self.admission(volume, |admission| asks.ask(admission))
    }
    /// A part of an advice is refused, for which admission was not asked.
    fn refused(&self, volume: &H::Volume, reason: Reason);
    /// Bytes of it pass by, from `at` on.
    fn pass(&self, volume: &H::Volume, at: u64, bytes: &H::Bytes);
    /// A client's operation on it has ended, on thread `me`.
    fn ended(&self, volume: &H::Volume, me: usize, now: Nanos, ended: &Ended);

    // What else a queue asks, and what it tells: no host has another answer, but a recording takes note of each here.

    /// See [`Volume::state`].
    #[inline]
    fn state(&self, volume: &H::Volume) -> State {
        volume.state()
    }
    /// See [`Volume::base`].
    #[inline]
    fn base(&self, volume: &H::Volume) -> u64 {
        volume.base()
    }
    /// See [`Volume::whole`].
    #[inline]
    fn whole(&self, volume: &H::Volume) -> u64 {
        volume.whole()
    }
    /// See [`Volume::enter`].
    #[inline]
    fn enter(&self, volume: &H::Volume) -> bool {
        volume.enter()
    }
    /// See [`Volume::losses`].
    #[inline]
    fn losses(&self, volume: &H::Volume) -> u64 {
        volume.losses()
    }
    /// See [`Volume::settled`].
    #[inline]
    fn settled(&self, volume: &H::Volume) -> u64 {
        volume.settled()
    }
    /// Whether nothing new is written for want of space. See [`Allows`].
    #[inline]
    fn is_paused(&self, now: Nanos) -> bool {
        self.limits().is_paused(now)
    }
    /// Whether the write budget has something for so many bytes.
    #[inline]
    fn affords(&self, now: Nanos, bytes: u64) -> bool {
        self.limits().affords(now, bytes)
    }
    /// See [`Limits::pay`].
    #[must_use = "where it is not paid for nothing may be written"]
    #[inline]
    fn pay(&self, now: Nanos, bytes: u64) -> bool {
        self.limits().pay(now, bytes)
    }
    /// An I/O of the cache device has ended. See [`Limits::flash_ended`].
    #[inline]
    fn flash_ended(&self, now: Nanos, ended: Result<(), FlashError>) {
        match self.limits().flash_ended(now, ended) {
            None => {}
            Some(Failing::Pauses(pause)) => self.pauses(pause),
            Some(Failing::GivesUp(why)) => self.give_up(now, why),
        }
    }
    /// See [`Changes::changing`].
    #[inline]
    fn changing(&self, now: Nanos, regions: RangeInclusive<u32>) {
        self.changes().changing(now, regions);
    }
    /// See [`Turns::enter`].
    fn enter_turn(&self, op: OpId) -> bool {
        self.turns(|turns| turns.enter(op))
    }
    /// See [`Turns::leave`].
    fn leave_turn(&self, op: OpId) -> Option<OpId> {
        self.turns(|turns| turns.leave(op))
    }
    /// Takes what is in the mailbox of thread `me` into `inbox`.
    #[inline]
    fn drain(&self, me: usize, inbox: &mut VecDeque<(OpId, Message<H::Bytes>)>) {
        self.mailbox(me, |mail| inbox.extend(mail.drain(..)));
    }
    /// One turn of `discard` at a shard that is locked. Returns whether there is more to do.
    fn discard(&self, discard: &mut Discard, shard: &mut Self::Shard) -> bool {
        discard.turn(shard)
    }
    /// Shard `shard` is about to be called.
    #[inline]
    fn telling(&self, _shard: u32, _told: Told) {}
}

/// What keeps lines from flash, as a node says it.
pub(super) struct Allowed<'a, H, N>(&'a N, PhantomData<H>);

impl<H: Host, N: Node<H>> Allows for Allowed<'_, H, N> {
    fn is_paused(&self, now: Nanos) -> bool {
        self.0.is_paused(now)
    }

    fn affords(&self, now: Nanos, bytes: u64) -> bool {
        self.0.affords(now, bytes)
    }
}

pub(super) fn allowed<H: Host, N: Node<H>>(node: &N) -> Allowed<'_, H, N> {
    Allowed(node, PhantomData)
}

/// What is asked of admission for the parts of an access. See [`limits::judge`].
pub(super) struct Judging<'a, L, P, R> {
    pub limits: L,
    pub access: &'a BlockAccess,
    pub line_bytes: u32,
    pub parts: P,
    pub rule: R,
    pub out: &'a mut Vec<Verdict>,
}

impl<L, P, R> Asks for Judging<'_, L, P, R>
where
    L: Allows,
    P: Iterator<Item = (u64, u32, BlockKind)>,
    R: Fn(u64, u64) -> Rule,
{
    type Answer = Verdict;

    fn ask(self, admission: &mut impl Admits) -> Verdict {
        let Judging { limits, access, line_bytes, parts, rule, out } = self;
        limits::judge(&limits, admission, access, line_bytes, parts, rule, out)
    }
}
