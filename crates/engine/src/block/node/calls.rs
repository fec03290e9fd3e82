//! How a shard is called: behind its lock, with the bytes that it speaks of; and how what it asks for comes to those who do it.
//!
//! The kind of lock is the host's ([`Calls`]): a mutex where there are threads, a cell where there are none. The order is the
//! same in all: what is for queues is put into their mailboxes before the shard is let go, so that the end of an operation,
//! which any thread may find, comes behind the bytes that were delivered for it, by whomever. What is for maintenance follows
//! when the shard is free. Nobody is woken under a lock, and only who put something into an empty mailbox wakes its owner; who
//! calls looks into his own mailbox afterwards and is not woken.

use larder_base::Nanos;

use super::coalesce::{Piece, Waiting};
use super::event::{Came, Host, ShardIo};
use super::held::Held;
use super::logged::ForDevice;
use super::ranged::Discards;
use crate::block::api::{
    BlockEffects, GroupId, IoFailed, IoId, LineId, Merge, OpId, Part, PartKind, SlotId, Source, Sum,
};
use crate::block::record::RecordedShard;
use crate::block::shard::BlockShard;

/// Bits of an operation's number that its queue counts; above them is the number of the thread that has it.
pub const OP_BITS: u32 = 48;

/// Whose operation that is.
#[inline]
pub fn thread_of(op: OpId) -> usize {
    (op.0 >> OP_BITS) as usize
}

/// A shard as it is called: [`BlockShard`], or one with a tape.
pub trait Shard: Discards {
    /// See [`BlockShard::submit`].
    fn submit(&mut self, now: Nanos, part: Part, fx: &mut impl BlockEffects);
    /// See [`BlockShard::flash_read`].
    fn flash_read(&mut self, now: Nanos, io: IoId, sums: Sums<'_>, fx: &mut impl BlockEffects);
    /// See [`BlockShard::flash_written`].
    fn flash_written(&mut self, now: Nanos, io: IoId, sums: Sums<'_>, fx: &mut impl BlockEffects);
    /// See [`BlockShard::merged`].
    fn merged(
        &mut self,
        now: Nanos,
        io: IoId,
        sums: Result<(u32, u32), IoFailed>,
        fx: &mut impl BlockEffects,
    );
    /// See [`BlockShard::page_loaded`].
    fn page_loaded(
        &mut self,
        now: Nanos,
        io: IoId,
        slots: Result<&[Option<Sum>], IoFailed>,
        fx: &mut impl BlockEffects,
    );
    /// See [`BlockShard::backing_read`].
    fn backing_read(
        &mut self,
        now: Nanos,
        io: IoId,
        result: Result<(), IoFailed>,
        fx: &mut impl BlockEffects,
    );
    /// See [`BlockShard::backing_changed`].
    fn backing_changed(
        &mut self,
        now: Nanos,
        io: IoId,
        result: Result<(), IoFailed>,
        fx: &mut impl BlockEffects,
    );
    /// See [`BlockShard::lock_range`].
    fn lock_range(
        &mut self,
        now: Nanos,
        op: OpId,
        first: LineId,
        last: LineId,
        fx: &mut impl BlockEffects,
    );
    /// See [`BlockShard::unlock_range`].
    fn unlock_range(&mut self, now: Nanos, op: OpId, fx: &mut impl BlockEffects);
    /// See [`BlockShard::sweep`].
    fn sweep(&mut self, steps: u32) -> bool;
    /// Lines that were taken out of the map so far, by whomever: of [`BlockShard::stats`].
    fn dropped(&self) -> u64;
}

/// Checksums of lines, or that there are none.
type Sums<'a> = Result<&'a [u32], IoFailed>;

macro_rules! shard {
    ($($shard:ty)*) => {$(
        impl Shard for $shard {
            #[inline]
            fn submit(&mut self, now: Nanos, part: Part, fx: &mut impl BlockEffects) {
                <$shard>::submit(self, now, part, fx);
            }

            #[inline]
            fn flash_read(
                &mut self,
                now: Nanos,
                io: IoId,
                sums: Sums<'_>,
                fx: &mut impl BlockEffects,
            ) {
                <$shard>::flash_read(self, now, io, sums, fx);
            }

            fn flash_written(
                &mut self,
                now: Nanos,
                io: IoId,
                sums: Sums<'_>,
                fx: &mut impl BlockEffects,
            ) {
                <$shard>::flash_written(self, now, io, sums, fx);
            }

            fn merged(
                &mut self,
                now: Nanos,
                io: IoId,
                sums: Result<(u32, u32), IoFailed>,
                fx: &mut impl BlockEffects,
            ) {
                <$shard>::merged(self, now, io, sums, fx);
            }

            fn page_loaded(
                &mut self,
                now: Nanos,
                io: IoId,
                slots: Result<&[Option<Sum>], IoFailed>,
                fx: &mut impl BlockEffects,
            ) {
                <$shard>::page_loaded(self, now, io, slots, fx);
            }

            fn backing_read(
                &mut self,
                now: Nanos,
                io: IoId,
                result: Result<(), IoFailed>,
                fx: &mut impl BlockEffects,
            ) {
                <$shard>::backing_read(self, now, io, result, fx);
            }

            fn backing_changed(
                &mut self,
                now: Nanos,
                io: IoId,
                result: Result<(), IoFailed>,
                fx: &mut impl BlockEffects,
            ) {
                <$shard>::backing_changed(self, now, io, result, fx);
            }

            fn lock_range(
                &mut self,
                now: Nanos,
                op: OpId,
                first: LineId,
                last: LineId,
                fx: &mut impl BlockEffects,
            ) {
                <$shard>::lock_range(self, now, op, first, last, fx);
            }

            fn unlock_range(&mut self, now: Nanos, op: OpId, fx: &mut impl BlockEffects) {
                <$shard>::unlock_range(self, now, op, fx);
            }

            fn sweep(&mut self, steps: u32) -> bool {
                <$shard>::sweep(self, steps)
            }

            fn dropped(&self) -> u64 {
                self.stats().dropped
            }
        }
    )*};
}

shard!(BlockShard RecordedShard);

/// What a queue tells a shard. (What it brings along, bytes and checksums, is the host's.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// A part of an operation.
    Part(Part),
    /// Lines were read from flash, the first of which is this; or not.
    FlashRead(IoId, LineId, bool),
    /// Lines were written to flash, or not.
    FlashWritten(IoId, bool),
    /// Bytes were laid over a line, or not.
    Merged(IoId, bool),
    /// A page of the table was read, or not.
    PageLoaded(IoId, bool),
    /// The store was read, or not.
    StoreRead(IoId, bool),
    /// The store was changed, or not.
    StoreChanged(IoId, bool),
    /// A range is to be locked: whose, its first and its last line.
    Lock(OpId, LineId, LineId),
    /// A range is to be unlocked.
    Unlock(OpId),
    /// Lines of a range go.
    Discard,
}

/// Something for the thread whose operation it is about.
#[derive(Debug)]
pub enum Message<B> {
    /// Bytes for a read, from `at` of the line space on.
    Deliver {
        /// First byte.
        at: u64,
        /// Bytes.
        len: u32,
        /// The bytes.
        bytes: B,
        /// Where they come from.
        came: Came,
    },
    /// A part is finished.
    Done {
        /// And failed.
        failed: bool,
    },
    /// Read lines from flash.
    FlashRead {
        /// Answered with this.
        io: ShardIo,
        /// First slot.
        slot: SlotId,
        /// First line.
        line: LineId,
        /// How many.
        lines: u32,
    },
    /// Update lines on flash.
    FlashWrite {
        /// Answered with this.
        io: ShardIo,
        /// First slot.
        slot: SlotId,
        /// How many lines.
        lines: u32,
        /// Their bytes.
        bytes: B,
    },
    /// Lay bytes over a part of a line on flash.
    Merge {
        /// Answered with this.
        io: ShardIo,
        /// Which line and stretch.
        merge: Merge,
        /// The bytes.
        bytes: B,
    },
    /// Read a page of the table.
    Load(Load),
    /// Read from the backing store.
    BackingRead(Piece),
    /// Change the backing store.
    BackingChange(Piece),
    /// The bits of a range are durable.
    IntentsReady,
    /// A range may lock its lines now.
    RangeTurn,
    /// The write budget's file was seen to: writes that could not be paid for are tried again.
    BudgetKept,
    /// A part of a change is in the write log, or a flush of it is over.
    Logged {
        /// And failed.
        failed: bool,
    },
    /// The destage of the volume with this attachment number may go on.
    Destage(u32),
    /// A volume's journal was written or flushed.
    Journal {
        /// The volume's attachment number.
        attachment: u32,
        /// It was flushed; else it has an epoch.
        flushed: bool,
        /// And that went well.
        done: bool,
    },
    /// The marker of the volume with this attachment number says what its failed log is to have it say, or not.
    Marked {
        /// The volume's attachment number.
        attachment: u32,
        /// It does.
        done: bool,
    },
    /// A part of a change that waited for a log that has failed goes to the store itself.
    Through {
        /// What it does.
        kind: PartKind,
        /// First byte in the volume.
        at: u64,
        /// Bytes.
        len: u64,
        /// A write's bytes.
        bytes: Option<B>,
        /// A hole will do.
        may_punch: bool,
    },
    /// A FLUSH likewise.
    FlushThrough,
    /// What the write log asks of its device since somebody has called it who carries nothing out.
    ForDevice(Box<ForDevice<B>>),
}

impl<B> Message<B> {
    /// What it is to requests for the store.
    pub(super) fn waiting(&self) -> Waiting {
        match *self {
            Message::BackingRead(piece) => Waiting::Read(piece),
            Message::BackingChange(piece) => Waiting::Change(piece),
            Message::FlashWrite { .. } | Message::Merge { .. } => Waiting::Beside,
            _ => Waiting::Other,
        }
    }
}

/// Lines to be written to flash behind the reply.
#[derive(Debug)]
pub struct Fill<B> {
    /// Which shard.
    pub shard: u32,
    /// Its number for the I/O.
    pub io: IoId,
    /// First slot.
    pub slot: SlotId,
    /// How many lines.
    pub lines: u32,
    /// The bytes of the lines.
    pub bytes: B,
}

/// Lines to be moved on flash.
#[derive(Clone, Copy, Debug)]
pub struct Copying {
    /// Which shard.
    pub shard: u32,
    /// Its number for the I/O.
    pub io: IoId,
    /// First slot.
    pub from: SlotId,
    /// First slot of where they go.
    pub to: SlotId,
    /// How many.
    pub lines: u32,
}

/// A page of the table to be read.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Of which shard.
    pub shard: u32,
    /// The shard's number for the I/O.
    pub io: IoId,
    /// Which page.
    pub page: u32,
}

/// What calls of shards have asked for.
#[derive(Debug)]
pub struct Out<B> {
    /// For queues.
    pub messages: Vec<(OpId, Message<B>)>,
    /// For maintenance: lines to be written,
    pub fills: Vec<Fill<B>>,
    /// lines to be moved,
    pub copies: Vec<Copying>,
    /// bits of regions to be made durable (shard and region),
    pub asks: Vec<(u32, u32)>,
    /// pages of the table that no queue reads,
    pub loads: Vec<Load>,
    /// and the log to be written soon.
    pub commit: bool,
}

impl<B> Default for Out<B> {
    fn default() -> Out<B> {
        Out {
            messages: Vec::new(),
            fills: Vec::new(),
            copies: Vec::new(),
            asks: Vec::new(),
            loads: Vec::new(),
            commit: false,
        }
    }
}

impl<B> Out<B> {
    /// Whether maintenance has something to do.
    #[inline]
    pub fn is_for_maintenance(&self) -> bool {
        self.commit
            || !self.fills.is_empty()
            || !self.copies.is_empty()
            || !self.asks.is_empty()
            || !self.loads.is_empty()
    }
}

/// What a shard asks while it is called, answered at once.
pub trait Questions {
    /// Bytes of a line.
    fn line_bytes(&self) -> u32;
    /// Whether admission would rather have `line` cached than `victim`.
    fn prefer(&self, line: LineId, victim: LineId) -> bool;
    /// See [`BlockEffects::keep`].
    fn keep(&self, victim: LineId, line: Option<LineId>) -> bool;
    /// See [`BlockEffects::keep_groups`].
    fn keep_groups(&self, first: GroupId, last: GroupId, lines: u32) -> bool;
    /// See [`BlockEffects::may_grow`].
    fn may_grow(&self, line: LineId) -> bool;
    /// Lines begin to be filled from `source`.
    fn filling(&self, _line: LineId, _lines: u32, _source: Source) {}
    /// Whether the thread that has `op` stays as long as there are operations. (Others may wait for a page of the table too:
    /// who may go away at any time does not read it.)
    fn stays(&self, _op: OpId) -> bool {
        true
    }
    /// Whose mailbox has the writes to flash of `op`. They may be asked for when the operation has ended, and what waits for
    /// the line waits for them: who may go away at any time does not do them.
    fn writes_of(&self, op: OpId) -> OpId {
        op
    }
}

/// Shards behind locks, and mailboxes.
pub trait Calls<H: Host>: Questions {
    /// The kind of shard.
    type Shard: Shard;
    /// Does `f` with shard `shard` locked, and the bytes that it may ask for.
    fn shard<R>(&self, shard: u32, f: impl FnOnce(&mut Self::Shard, &mut Held<H>) -> R) -> R;
    /// Does `f` with the mailbox of `thread` locked.
    fn mailbox<R>(&self, thread: usize, f: impl FnOnce(&mut Mail<H>) -> R) -> R;
    /// Wakes `thread`: its mailbox was empty.
    fn notify(&self, thread: usize);
    /// Leaves for maintenance what [`Out`] has for it, and wakes it if need be.
    fn maintain(&self, out: &mut Out<H::Bytes>);
}

/// What is in a mailbox.
pub type Mail<H> = Vec<(OpId, Message<<H as Host>::Bytes>)>;

/// Calls shard `shard` on behalf of thread `me`, if it has a mailbox, which is to look into it afterwards.
#[inline]
pub fn call<H: Host, N: Calls<H>, R>(
    node: &N,
    shard: u32,
    me: Option<usize>,
    out: &mut Out<H::Bytes>,
    f: impl FnOnce(&mut N::Shard, &mut Fx<'_, H, N>) -> R,
) -> R {
    let mut wake = Wake::default();
    let result = node.shard(shard, |engine, held| {
        let result = f(engine, &mut Fx { held, out, shard, node });
        for (op, message) in out.messages.drain(..) {
            let thread = thread_of(op);
            if put(node, thread, op, message) && Some(thread) != me {
                wake.add(thread);
            }
        }
        result
    });
    wake.each(|thread| node.notify(thread));
    if out.is_for_maintenance() {
        node.maintain(out);
    }
    result
}

/// Puts a message into a mailbox. Returns whether its owner is to be woken.
pub(super) fn put<H: Host, N: Calls<H>>(
    node: &N,
    thread: usize,
    op: OpId,
    message: Message<H::Bytes>,
) -> bool {
    node.mailbox(thread, |mail| {
        mail.push((op, message));
        mail.len() == 1
    })
}

/// Leaves a message for the thread that has `op`, and wakes it.
pub fn send<H: Host, N: Calls<H>>(node: &N, op: OpId, message: Message<H::Bytes>) {
    let thread = thread_of(op);
    if put(node, thread, op, message) {
        node.notify(thread);
    }
}

/// Threads that are to be woken: the first 64 each by its bit, others at once in a list, which is hardly ever needed.
#[derive(Default)]
pub(super) struct Wake {
    few: u64,
    more: Vec<usize>,
}

impl Wake {
    pub(super) fn add(&mut self, thread: usize) {
        match thread {
            0..64 => self.few |= 1 << thread,
            thread => self.more.push(thread),
        }
    }

    pub(super) fn each(mut self, mut wake: impl FnMut(usize)) {
        while self.few != 0 {
            wake(self.few.trailing_zeros() as usize);
            self.few &= self.few - 1;
        }
        self.more.into_iter().for_each(wake);
    }
}

/// What a shard asks for while it is called.
pub struct Fx<'a, H: Host, N> {
    /// The bytes that it speaks of.
    pub held: &'a mut Held<H>,
    /// What it has asked for.
    pub out: &'a mut Out<H::Bytes>,
    shard: u32,
    node: &'a N,
}

impl<H: Host, N: Questions> Fx<'_, H, N> {
    fn tell(&mut self, op: OpId, message: Message<H::Bytes>) {
        self.out.messages.push((op, message));
    }

    fn io(&self, io: IoId) -> ShardIo {
        ShardIo { shard: self.shard, io }
    }

    fn lines(&self, source: Source, line: LineId, lines: u32) -> H::Bytes {
        let bytes = u64::from(self.node.line_bytes());
        self.held.bytes(source, line.0 * bytes, u64::from(lines) * bytes)
    }
}

impl<H: Host, N: Questions> BlockEffects for Fx<'_, H, N> {
    fn flash_read(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, op: OpId) {
        let io = self.io(io);
        self.tell(op, Message::FlashRead { io, slot, line, lines });
    }

    fn flash_write(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, op: OpId) {
        let (io, bytes) = (self.io(io), self.lines(Source::Op(op), line, lines));
        self.tell(self.node.writes_of(op), Message::FlashWrite { io, slot, lines, bytes });
    }

    fn fill(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, source: Source) {
        let bytes = self.lines(source, line, lines);
        self.node.filling(line, lines, source);
        self.out.fills.push(Fill { shard: self.shard, io, slot, lines, bytes });
    }

    fn merge(&mut self, io: IoId, merge: Merge, op: OpId) {
        let bytes = self.held.bytes(Source::Op(op), merge.at, u64::from(merge.len));
        let io = self.io(io);
        self.tell(self.node.writes_of(op), Message::Merge { io, merge, bytes });
    }

    fn copy(&mut self, io: IoId, from: SlotId, to: SlotId, lines: u32) {
        self.out.copies.push(Copying { shard: self.shard, io, from, to, lines });
    }

    fn load(&mut self, io: IoId, page: u32, op: OpId) {
        let load = Load { shard: self.shard, io, page };
        if self.node.stays(op) {
            self.tell(op, Message::Load(load));
        } else {
            self.out.loads.push(load);
        }
    }

    fn backing_read(&mut self, io: IoId, at: u64, len: u32, op: OpId) {
        let shard = self.shard;
        self.tell(op, Message::BackingRead(Piece { shard, io, at, len }));
    }

    fn backing_change(&mut self, io: IoId, op: OpId, _kind: PartKind, at: u64, len: u32) {
        let shard = self.shard;
        self.tell(op, Message::BackingChange(Piece { shard, io, at, len }));
    }

    fn deliver(&mut self, source: Source, op: OpId, at: u64, len: u32) {
        let bytes = self.held.bytes(source, at, u64::from(len));
        let came = self.held.came(source, op);
        self.tell(op, Message::Deliver { at, len, bytes, came });
    }

    fn release(&mut self, io: IoId) {
        self.held.release(io);
    }

    fn done(&mut self, op: OpId, result: Result<(), IoFailed>, holds: bool) {
        if !holds {
            self.held.release_part(op);
        }
        self.tell(op, Message::Done { failed: result.is_err() });
    }

    fn release_op(&mut self, op: OpId) {
        self.held.release_part(op);
    }

    fn intent(&mut self, region: u32) {
        self.out.asks.push((self.shard, region));
    }

    fn commit_soon(&mut self) {
        self.out.commit = true;
    }

    fn prefer(&mut self, line: LineId, victim: LineId) -> bool {
        self.node.prefer(line, victim)
    }

    fn keep(&mut self, victim: LineId, line: Option<LineId>) -> bool {
        self.node.keep(victim, line)
    }

    fn keep_groups(&mut self, first: GroupId, last: GroupId, lines: u32) -> bool {
        self.node.keep_groups(first, last, lines)
    }

    fn may_grow(&mut self, line: LineId) -> bool {
        self.node.may_grow(line)
    }
}
