//! What a queue is told and what it asks of its host: the types of both.
//!
//! A host brings types of its own ([`Host`]): buffers, volumes, what it answers a client with. A queue passes them on and looks
//! into none of them. What it is told are calls of [`Queue`](super::queue::Queue), one for each kind of event, so that a hit
//! pays for no match; what it asks for are [`Effects`].

use larder_base::Nanos;
use larder_policy::block::BlockKind;

use crate::block::api::{IoId, LineId, Merge, PartKind, SlotId};
use crate::block::node::logged::{JournalPart, LogIo};
use crate::block::writeback::log::{Said, Sums, ToWrite};

/// The types that a host brings.
pub trait Host {
    /// Bytes that several may share: a handle, cheap to clone.
    type Bytes: Clone;
    /// A volume as this queue's thread knows it: a handle, cheap to clone.
    type Volume: Volume;
    /// What the host needs to answer a client's operation. It holds what is delivered to a read.
    type Ticket;
    /// Why an operation failed.
    type Failure: Clone;
    /// What a status tells, nothing for other operations.
    type Extents: Default;

    /// `len` bytes of `bytes` from `from` on.
    fn part(bytes: &Self::Bytes, from: u64, len: u64) -> Self::Bytes;
    /// The same of a longer read of a store, which may be kept for a long time: it may be better copied.
    fn apart(bytes: &Self::Bytes, from: u64, len: u64) -> Self::Bytes;
    /// Why an operation fails of which the queue says it, or of whose I/O nothing more is known.
    fn failure(why: Why) -> Self::Failure;
    /// The CRC-32C of each 4 KiB of the bytes of a write, for the write log. Asked only where there is one.
    fn sums(_bytes: &Self::Bytes) -> Sums {
        Sums::Many(Box::default())
    }
    /// What a store said of bytes `at..at + len` of a volume, with what the write log has of them laid over it: first byte, bytes, and whether
    /// they are zeros. Asked only where there is a log.
    fn overlay(
        extents: Self::Extents,
        (_at, _len): (u64, u64),
        _dirty: &[(u64, u64, bool)],
    ) -> Self::Extents {
        extents
    }
}

/// Whether operations on a volume are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// They are.
    Served,
    /// It has no place in the line space: nothing of it is cached, and its store alone orders its operations.
    Unplaced,
    /// It was detached.
    Detached,
    /// Another writer has its store.
    Lost,
}

/// A volume. All operations on it that a queue has begun and not ended are counted ([`Volume::enter`]).
pub trait Volume: Clone {
    /// Whether operations on it are taken.
    fn state(&self) -> State;
    /// The address of its first byte in the line space, as far as the bytes go that it is asked for here (modulo 2⁶⁴: only
    /// the sum of it and an offset need be an address). It does not change while an operation is counted.
    fn base(&self) -> u64;
    /// The address behind its last whole line.
    fn whole(&self) -> u64;
    /// Another operation on it begins, and its base stays until [`Volume::leave`]. False while it moves, or changes over
    /// between writing through and writing back.
    fn enter(&self) -> bool {
        true
    }
    /// The same of what is destaged of it: that goes on while clients wait for the volume to change over.
    fn enter_destage(&self) -> bool {
        self.enter()
    }
    /// The operation has ended.
    fn leave(&self) {}
    /// How often its store may have lost writes that it had answered.
    fn losses(&self) -> u64 {
        0
    }
    /// The last of so many losses that matters to clients, and how many of those up to it they hear of: see
    /// [`Losses`](super::losses::Losses).
    fn told_of(&self, losses: u64) -> (u64, u64) {
        (losses, losses)
    }
    /// For how many of those nothing is cached any more that the store may have lost.
    fn settled(&self) -> u64 {
        u64::MAX
    }
    /// Somebody waits for [`Volume::settled`].
    fn want_settled(&self) {}
}

/// Why an operation fails, as far as a queue knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The store failed.
    Failed,
    /// The volume was detached.
    Detached,
    /// Another writer has the volume's store.
    Lost,
}

/// What is asked of a volume. Places are bytes of the volume; ranges lie in it.
#[derive(Clone, Debug)]
pub enum Op<B> {
    /// Read. What is read is [delivered](Effects::deliver).
    Read {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
    },
    /// Write.
    Write {
        /// First byte.
        at: u64,
        /// How many.
        len: u64,
        /// The bytes.
        bytes: B,
        /// Answered when it is durable.
        fua: bool,
    },
    /// Make durable what was answered.
    Flush,
    /// Write zeros.
    Zero {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// Answered when it is durable.
        fua: bool,
        /// A hole will do.
        may_punch: bool,
        /// Fail unless that is faster than writing.
        fast: bool,
    },
    /// Give bytes back to the store.
    Trim {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// Answered when it is durable.
        fua: bool,
    },
    /// Which parts are holes or zeros.
    Status {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// The first extent is enough.
        one: bool,
    },
    /// These bytes will be read soon. Answered when they were fetched, as far as they may be cached.
    Advise {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
    },
}

/// A client's operation.
pub struct Submit<H: Host> {
    /// On which volume.
    pub volume: H::Volume,
    /// What it is answered with.
    pub ticket: H::Ticket,
    /// What is asked.
    pub op: Op<H::Bytes>,
    /// What the bytes hold, if the client says so.
    pub holds: BlockKind,
}

/// What a store is asked beside reads. Places are bytes of the volume.
#[derive(Debug)]
pub enum StoreOp<B> {
    /// Write.
    Write {
        /// First byte.
        at: u64,
        /// How many.
        len: u64,
        /// The bytes.
        bytes: B,
        /// Ends when it is durable.
        fua: bool,
    },
    /// Write zeros.
    Zero {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// Ends when it is durable.
        fua: bool,
        /// A hole will do.
        may_punch: bool,
        /// Fail unless that is faster than writing.
        fast: bool,
    },
    /// Take bytes back.
    Trim {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// Ends when it is durable.
        fua: bool,
    },
    /// Make durable what has ended.
    Flush,
    /// Which parts are holes or zeros.
    Status {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u64,
        /// The first extent is enough.
        one: bool,
    },
}

/// An I/O of the cache device that a shard has asked for: answered once, with this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardIo {
    /// Which shard.
    pub shard: u32,
    /// The shard's number for it.
    pub io: IoId,
}

/// A request to a store: answered once, with this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobId(pub u32);

/// Where bytes of a read came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Came {
    /// From flash.
    Flash,
    /// They were at hand: on their way to flash, or to the store.
    AtHand,
    /// With a request to the store that ended now.
    Store {
        /// It was asked for this operation; otherwise for another, which this one has joined.
        own: bool,
    },
}

/// What became of a client's operation on a volume that is cached.
#[derive(Clone, Copy, Debug)]
pub struct Ended {
    /// What it did.
    pub kind: PartKind,
    /// First byte in the volume.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// What the client says that it holds.
    pub holds: BlockKind,
    /// When it came.
    pub began: Nanos,
    /// It failed.
    pub failed: bool,
    /// A read was answered without asking the store or waiting for it: from flash, or from bytes that were at hand. This is
    /// what counts as a hit, in every host.
    pub hit: bool,
    /// The store was asked on its behalf.
    pub asked_store: bool,
    /// Bytes that came from flash.
    pub from_flash: u64,
    /// Bytes that others had asked the store for, or had brought.
    pub shared: u64,
}

/// An operation that is over.
pub struct Answer<H: Host> {
    /// What it came with.
    pub ticket: H::Ticket,
    /// How it ended.
    pub outcome: Result<H::Extents, H::Failure>,
    /// A write's bytes: others may still have them.
    pub bytes: Option<H::Bytes>,
    /// Of what is durable now, or failed to be: how many losses of the store until now its client hears of. Nothing of them is cached
    /// any more.
    pub losses: Option<u64>,
    /// What became of it; `None` of what went straight to the store, or was refused.
    pub ended: Option<Ended>,
}

/// What a queue asks of its host. Each request of I/O is answered once, by the call of the queue that is named beside it.
/// Nothing is locked here; requests may be carried out in any order.
pub trait Effects<H: Host> {
    /// Read `lines` lines, the first of which is `line`, from a slot and the next ones; `Queue::flash_read`.
    fn flash_read(&mut self, io: ShardIo, slot: SlotId, line: LineId, lines: u32);
    /// Write lines to a slot and the next ones; `Queue::flash_written`. They are charged to the write budget.
    fn flash_write(&mut self, io: ShardIo, slot: SlotId, lines: u32, bytes: H::Bytes);
    /// Read a line, lay bytes over it and write it; `Queue::merged`. It is charged to the write budget.
    fn merge(&mut self, io: ShardIo, merge: Merge, bytes: H::Bytes);
    /// Read a page of the table; `Queue::page_loaded`.
    fn load(&mut self, io: ShardIo, page: u32);
    /// Read from a volume's store; `Queue::store_read`. No client waits for what is read `ahead`.
    fn store_read(&mut self, job: JobId, volume: &H::Volume, at: u64, len: u32, ahead: bool);
    /// Ask it for something else; `Queue::store_changed`.
    fn store_change(&mut self, job: JobId, volume: &H::Volume, change: StoreOp<H::Bytes>);
    /// These bytes belong `at` bytes behind the first of a read. All of them come before its answer.
    fn deliver(&mut self, ticket: &mut H::Ticket, at: u64, bytes: H::Bytes);
    /// An operation is over.
    fn answer(&mut self, answer: Answer<H>);

    // What only a host with a write log is asked for.

    /// Write a batch of the log; `Queue::log_written`. Batches may be written in any order.
    fn log_write(&mut self, _write: ToWrite<H::Bytes>) {
        debug_assert!(false, "there is no write log");
    }
    /// Flush the device under the log, with all that was written when this is asked; `Queue::log_flushed`.
    fn log_flush(&mut self, _covers: u64) {
        debug_assert!(false, "there is no write log");
    }
    /// Read bytes of the device from this one on; `Queue::log_read`.
    fn log_read(&mut self, _io: LogIo, _at: u64, _len: u32) {
        debug_assert!(false, "there is no write log");
    }
    /// The journal of a volume is to have an epoch, and its commit, which says that it holds all up to the record `last`. Its end comes as
    /// [`Message::Journal`](super::calls::Message::Journal).
    fn journal_write(
        &mut self,
        _attachment: u32,
        _epoch: u64,
        _last: u64,
        _parts: Vec<JournalPart<H::Bytes>>,
    ) {
        debug_assert!(false, "there is no journal");
    }
    /// The journal's device is to be flushed; its end comes likewise.
    fn journal_flush(&mut self, _attachment: u32) {
        debug_assert!(false, "there is no journal");
    }
    /// The marker of a volume is to say this of its log, which has failed, and that the store has all up to the record `frontier`. Its end comes as
    /// [`Message::Marked`](super::calls::Message::Marked).
    fn marker_write(&mut self, _attachment: u32, _said: Said, _frontier: u64) {
        debug_assert!(false, "there is no marker");
    }
    /// The marker of a volume is to be looked at. What is found is told to the log, and that it has ended:
    /// [`WriteLog::looked`](crate::block::writeback::log::WriteLog::looked),
    /// [`WriteLog::look_ended`](crate::block::writeback::log::WriteLog::look_ended).
    fn marker_look(&mut self, _attachment: u32) {
        debug_assert!(false, "there is no marker");
    }
    /// Zeros belong `at` bytes behind the first of a read.
    fn deliver_zeros(&mut self, _ticket: &mut H::Ticket, _at: u64, _len: u64) {
        debug_assert!(false, "there is no write log");
    }
    /// The volume with this attachment number, if it is still there.
    fn volume(&mut self, _attachment: u32) -> Option<H::Volume> {
        None
    }
}
