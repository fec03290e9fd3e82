//! The engine's types of calls and queues, with the daemon's bytes, volumes and answers.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_engine::block::node;
use larder_engine::block::node::calls;
pub(super) use larder_engine::block::node::calls::{Copying, Load};
use larder_engine::block::node::event::{Host, State, Volume as _, Why};
use larder_engine::block::node::held::Held;
use larder_engine::block::writeback::log::Sums;
use larder_format::block::write_log::pieces;
use larder_runtime::Payload;

use super::cached::bytes::copy;
use super::cached::client::Client;
use super::{Attached, Core};
use crate::block::volume::Volume;
use larder_volume::op::{Extent, Failure, FailureKind};

/// Pieces of a read from the store share its buffer up to this length, bytes: beyond, each has its own, since a line that waits
/// to be filled must not hold a megabyte.
const SHARED: usize = 256 << 10;

/// The types that the daemon brings.
pub(super) struct Daemon;

pub(super) type Message = calls::Message<Payload>;
pub(super) type Out = calls::Out<Payload>;
pub(super) type Fill = calls::Fill<Payload>;
pub(super) type Fx<'a> = calls::Fx<'a, Daemon, Core>;

/// What a shard's lock guards. It is called by the engine, through [`Core`]'s `Calls`.
pub(super) struct LockedShard {
    shard: node::StoredShard,
    /// Bytes that it may still ask for.
    held: Held<Daemon>,
}

impl LockedShard {
    pub(super) fn new(shard: node::StoredShard) -> LockedShard {
        LockedShard { shard, held: Held::default() }
    }

    #[inline]
    pub(super) fn parts(&mut self) -> (&mut node::StoredShard, &mut Held<Daemon>) {
        (&mut self.shard, &mut self.held)
    }
}

impl Host for Daemon {
    type Bytes = Payload;
    type Volume = Known;
    type Ticket = Client;
    type Failure = Failure;
    type Extents = Vec<Extent>;

    #[inline]
    fn part(bytes: &Payload, from: u64, len: u64) -> Payload {
        bytes.part(from as usize, len as usize)
    }

    fn apart(bytes: &Payload, from: u64, len: u64) -> Payload {
        let part = bytes.part(from as usize, len as usize);
        if bytes.len() <= SHARED { part } else { copy(&part) }
    }

    fn sums(bytes: &Payload) -> Sums {
        Sums::new(&pieces::sums(bytes).collect::<Vec<_>>())
    }

    fn overlay(extents: Vec<Extent>, range: (u64, u64), dirty: &[(u64, u64, bool)]) -> Vec<Extent> {
        overlay(&extents, range, dirty)
    }

    fn failure(why: Why) -> Failure {
        match why {
            Why::Failed => Failure::new(FailureKind::Failed, "the backing store failed"),
            Why::Detached => Failure::new(FailureKind::Gone, "the volume was detached"),
            Why::Lost => Failure::new(FailureKind::Failed, "another writer has the volume"),
        }
    }
}

/// What the store says of a range, with what is dirty laid over it. An answer may be shorter than its range. Neighbours that are alike are
/// one: a client asks where its file's data begins and ends, not how it was written.
fn overlay(extents: &[Extent], (at, _): (u64, u64), dirty: &[(u64, u64, bool)]) -> Vec<Extent> {
    let mut all: Vec<Extent> = Vec::new();
    let mut push = |bytes: u64, of: Extent| match all.last_mut() {
        Some(last) if (last.hole, last.zero) == (of.hole, of.zero) => last.len += bytes as u32,
        _ if bytes > 0 => all.push(Extent { len: bytes as u32, ..of }),
        _ => {}
    };
    let mut from = at;
    for extent in extents {
        let end = from + u64::from(extent.len);
        for &(start, len, zero) in dirty {
            let (start, stop) = (start.max(from), (start + len).min(end));
            if start >= stop {
                continue;
            }
            push(start - from, *extent);
            push(stop - start, Extent { len: 0, hole: false, zero });
            from = stop;
        }
        push(end - from, *extent);
        from = end;
    }
    all
}

/// A volume as one worker knows it.
#[derive(Clone)]
pub(super) struct Known(pub Arc<KnownVolume>);

pub(super) struct KnownVolume {
    /// Kept, so that its place in memory is nobody else's.
    pub volume: Arc<Volume>,
    /// Which of the worker's sessions is the one on its store.
    pub session: usize,
    /// As the cache has it, if it has a place there.
    pub attached: Option<Arc<Attached>>,
}

impl Known {
    /// As the cache has it. Of those without a place there the queue asks nothing that needs it.
    #[inline]
    pub(super) fn attached(&self) -> &Attached {
        self.0.attached.as_deref().expect("a volume that has its place")
    }

    /// Whether its marker says that another has its store.
    #[inline]
    fn is_others(&self) -> bool {
        let others = |attached: &Arc<Attached>| {
            attached.others.load(Ordering::Relaxed) && attached.attachment().is_some()
        };
        self.0.attached.as_ref().is_some_and(others)
    }
}

impl larder_engine::block::node::event::Volume for Known {
    fn state(&self) -> State {
        match () {
            () if self.0.volume.is_closed() => State::Detached,
            () if self.0.volume.backing().is_lost() || self.is_others() => State::Lost,
            () if self.0.attached.is_none() => State::Unplaced,
            () => State::Served,
        }
    }

    #[inline]
    fn base(&self) -> u64 {
        self.attached().base()
    }

    #[inline]
    fn whole(&self) -> u64 {
        self.base() + self.attached().cached_bytes()
    }

    fn enter(&self) -> bool {
        self.attached().gate.enter()
    }

    fn enter_destage(&self) -> bool {
        self.attached().gate.enter_destage()
    }

    fn leave(&self) {
        self.attached().gate.leave();
    }

    fn losses(&self) -> u64 {
        self.0.volume.backing().losses()
    }

    fn told_of(&self, losses: u64) -> (u64, u64) {
        let of = self.0.volume.losses();
        let last = of.last(losses);
        (last, of.told(last))
    }

    fn settled(&self) -> u64 {
        self.0.volume.settled()
    }

    fn want_settled(&self) {
        self.0.volume.want_settled();
    }
}

impl Known {
    /// It was put aside: the worker lets go of it when nothing is under way.
    pub(super) fn is_gone(&self) -> bool {
        self.state() == State::Detached
    }

    /// What is written to it goes to the write log.
    pub(super) fn writes_back(&self) -> bool {
        self.0.attached.as_ref().is_some_and(|attached| attached.attachment().is_some())
    }
}
