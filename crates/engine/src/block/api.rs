//! What the block engine is asked, what it asks for, and the units of both.
//!
//! The engine never sees a byte of data. It is told *where* (an address in the line space) and *how much*, and answers
//! with [`BlockEffects`]: read this slot, write that range, hand these bytes of that buffer to this client. Checksums are
//! taken by the caller from the bytes it moves and come in with the completions. So the server, the simulator and the
//! crash tests run the same code, and a simulation needs no memory for data.
//!
//! ```text
//! volume    a client's disk; its bytes are mapped to a range of the line space when it is attached
//! line      unit of caching, 4 to 64 KiB; `LineId` numbers the lines of all volumes
//! group     16 neighbouring lines: unit of placement, of sharding and of locking. A part never crosses a group
//! slot      where a line may lie on the cache device; `SlotId` numbers the slots of one shard
//! region    a stretch of the line space with one bit in the write-intent map
//! ```

use larder_base::Nanos;

/// Lines of a group: the width of the masks that the engine computes with.
pub const GROUP_LINES: u32 = 16;

/// A line of the line space, which holds the lines of all volumes side by side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LineId(pub u64);

/// A group of [`GROUP_LINES`] lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u64);

impl LineId {
    /// The group it belongs to.
    pub fn group(self) -> GroupId {
        GroupId(self.0 / u64::from(GROUP_LINES))
    }

    /// Its place in the group, 0 to 15.
    pub fn index(self) -> u32 {
        (self.0 % u64::from(GROUP_LINES)) as u32
    }
}

impl GroupId {
    /// Its line number `index` (0 to 15).
    pub fn line(self, index: u32) -> LineId {
        LineId(self.0 * u64::from(GROUP_LINES) + u64::from(index))
    }
}

/// A place for a line on the cache device, counted from the first slot of the shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// The client's operation that a part belongs to: the caller's number, which the engine only hands back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

/// One I/O that the engine asked for: the engine's number, unique among those under way in a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IoId(pub u32);

/// 24 bits of the checksum of a line's bytes, salted with the line's number (see [`Sum::of`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Sum(pub u32);

impl Sum {
    /// The bits in use.
    pub const MASK: u32 = 0x00ff_ffff;

    /// The checksum kept for `line` when the CRC-32C of its bytes is `crc`. Salted, so that a line that was written to
    /// another's slot does not pass for it.
    pub fn of(line: LineId, crc: u32) -> Sum {
        let salt = (line.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as u32;
        let mixed = (crc ^ salt).wrapping_mul(0x85eb_ca6b);
        Sum((mixed ^ (mixed >> 15)) & Self::MASK)
    }
}

/// What a part does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// Reads; every byte arrives by [`BlockEffects::deliver`] before [`BlockEffects::done`].
    Read,
    /// Writes the bytes that the client sent.
    Write,
    /// Writes zeros (`WRITE_ZEROES`).
    Zero,
    /// Gives the range back to the backing store (`TRIM`).
    Trim,
    /// Brings whole lines into the cache, past admission but for [`Verdict::IfFree`]; delivers nothing (`CACHE`).
    Prefetch,
}

impl PartKind {
    /// Whether the bytes of the range may differ afterwards.
    pub fn changes(self) -> bool {
        matches!(self, PartKind::Write | PartKind::Zero | PartKind::Trim)
    }
}

/// The share of one operation that falls into one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Whose.
    pub op: OpId,
    /// What.
    pub kind: PartKind,
    /// First byte, as an address in the line space (line number × line size + offset).
    pub at: u64,
    /// Bytes, at least one; `at` and `at + len - 1` are in the same group.
    pub len: u32,
    /// What admission said of this access, when it was asked (reads that miss, writes that would allocate).
    pub verdict: Verdict,
}

/// What admission says of an access. It is asked before the part is submitted, because it judges the client's whole
/// operation, not the pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verdict {
    /// Lines that are missing may be cached.
    #[default]
    Admit,
    /// They may be cached in a free slot, or in place of a line that [`BlockEffects::prefer`] ranks below them.
    Compete,
    /// They may be cached in a free slot; no line leaves for them.
    IfFree,
    /// They are not cached; those that are stay.
    Reject,
}

impl Verdict {
    /// What holds for an access of whose parts these were said, as far as reading ahead of it goes.
    #[must_use]
    pub fn and(self, other: Verdict) -> Verdict {
        match (self, other) {
            (Verdict::Reject, _) | (_, Verdict::Reject) => Verdict::Reject,
            (Verdict::Compete, _) | (_, Verdict::Compete) => Verdict::Compete,
            (Verdict::IfFree, _) | (_, Verdict::IfFree) => Verdict::IfFree,
            (Verdict::Admit, Verdict::Admit) => Verdict::Admit,
        }
    }
}

/// Where the bytes of a flash write come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The bytes that the client sent with its write.
    Op(OpId),
    /// The buffer of a backing read that is complete and not released.
    Io(IoId),
}

/// A cached line of which a client overwrites a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Merge {
    /// The line.
    pub line: LineId,
    /// Where it lies.
    pub from: SlotId,
    /// Where it goes; may be the same slot.
    pub to: SlotId,
    /// First byte that is overwritten, as an address in the line space.
    pub at: u64,
    /// Bytes.
    pub len: u32,
}

/// Why a device did not do as it was asked. The engine only needs to know that it failed; the caller has the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoFailed;

/// What the engine asks of its caller, while it is being called. Each request that takes an [`IoId`] is answered once
/// by the completion named beside it. The caller may perform requests in any order.
pub trait BlockEffects {
    /// Read `lines` whole lines, the first of which is `line`, from `slot` and the next ones into a buffer, on behalf of
    /// `op`; answer with `BlockShard::flash_read`.
    fn flash_read(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, op: OpId);
    /// Write `lines` whole lines, the first of which is `line`, to `slot` and the next ones, from the bytes of `op`, which
    /// may wait for it; answer with `BlockShard::flash_written`, with the checksums of what was written.
    fn flash_write(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, op: OpId);
    /// The same from `source`, for nobody who waits; answer with `BlockShard::flash_written` too.
    fn fill(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, source: Source);
    /// Read a line, lay the bytes over it that the client sent with `op` and that fall into the stretch, and write it; `op`
    /// may wait for it. Answer with `BlockShard::merged`, with the checksums of what was read and of what was written.
    fn merge(&mut self, io: IoId, merge: Merge, op: OpId);
    /// Copy `lines` whole lines from slot `from` and the next ones to slot `to` and the next ones, for nobody who waits;
    /// answer with `BlockShard::flash_written`, with the checksums of what was read and written.
    fn copy(&mut self, io: IoId, from: SlotId, to: SlotId, lines: u32);
    /// Read page `page` of the shard's table, on behalf of `op` (others may wait for it too); answer with
    /// `BlockShard::page_loaded`. Asked for where the placement is sparse only.
    fn load(&mut self, _io: IoId, _page: u32, _op: OpId) {}
    /// Read from the backing store into a buffer, on behalf of `op` (others may join it); answer with
    /// `BlockShard::backing_read`.
    fn backing_read(&mut self, io: IoId, at: u64, len: u32, op: OpId);
    /// Perform `kind` (a write from the client's bytes, zeros, or a trim) on the backing store; answer with
    /// `BlockShard::backing_changed`.
    fn backing_change(&mut self, io: IoId, op: OpId, kind: PartKind, at: u64, len: u32);
    /// Hand bytes `at..at + len` to the client, from the buffer of a read that is complete or from the bytes that another
    /// client sent and that are held.
    fn deliver(&mut self, source: Source, op: OpId, at: u64, len: u32);
    /// The buffer of `io` is no longer needed.
    fn release(&mut self, io: IoId);
    /// This part is finished. For a write that succeeds while `holds` is true the client may be answered, but the bytes
    /// it sent are still the source of a fill or an update: keep them until [`BlockEffects::release_op`].
    fn done(&mut self, op: OpId, result: Result<(), IoFailed>, holds: bool);
    /// A part of `op` that was done with `holds` needs its bytes no longer.
    fn release_op(&mut self, op: OpId);
    /// A change of `region` waits until its bit is durable in the write-intent map, or its fills do; answer with
    /// `BlockShard::intent_ready`. Asked once for a region until it is answered.
    fn intent(&mut self, region: u32);
    /// A fill waits for the map's log: write it soon.
    fn commit_soon(&mut self);
    /// Whether admission would rather have `line` cached than `victim` (asked for [`Verdict::Compete`] only).
    fn prefer(&mut self, line: LineId, victim: LineId) -> bool;
    /// Whether `victim` must stay where it is: it is pinned, its volume has no more than its floor, or the volume of `line`
    /// may only take what is its own. `line` is what would take the place, `None` when it is only about room.
    fn keep(&mut self, _victim: LineId, _line: Option<LineId>) -> bool {
        false
    }
    /// Whether the `lines` lines that lie, nobody knows here where, in the shard's groups from `first` to `last` must stay: one
    /// that is there or might be is pinned, or their volumes would have less than their floors. If not, all of them go. Asked
    /// for where the placement is sparse only.
    fn keep_groups(&mut self, _first: GroupId, _last: GroupId, _lines: u32) -> bool {
        false
    }
    /// Whether `line` may take a place in which nothing lies, so that its volume has more afterwards.
    fn may_grow(&mut self, _line: LineId) -> bool {
        true
    }
}

/// Write-through policies (Azor's names: disk = `hdd`, flash = `ssd`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteMode {
    /// To backing and to flash; lines that are missing are allocated.
    #[default]
    WriteThrough,
    /// To backing, and to flash where the line is cached already.
    WriteUpdate,
    /// To backing; the cached copy is dropped (write-around).
    WriteAround,
}

/// How much of what may be under way in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockLimits {
    /// Fills under way or waiting; beyond, lines are not cached. Updates of as many lines may be under way behind replies; beyond,
    /// the client waits for them.
    pub fills: u32,
    /// Parts waiting for others in all groups together; the caller should stop reading from clients before it comes to
    /// this. Beyond, parts are refused as failed.
    pub waiting: u32,
}

impl Default for BlockLimits {
    fn default() -> BlockLimits {
        BlockLimits { fills: 256, waiting: 65_536 }
    }
}

/// What a shard has done. All counters only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockStats {
    /// Lines that clients read.
    pub read_lines: u64,
    /// Of them, served from flash.
    pub read_hits: u64,
    /// Of them, served from a fetch or fill that was under way.
    pub read_shared: u64,
    /// Lines that clients wrote, zeroed or trimmed.
    pub write_lines: u64,
    /// Of them, lines that were cached.
    pub write_hits: u64,
    /// Fills that were completed.
    pub fills: u64,
    /// Lines not filled because admission rejected them, or let them have a free slot only and there was none.
    pub fill_rejected: u64,
    /// Lines not filled because too many fills were under way, or every candidate slot was busy.
    pub fill_dropped: u64,
    /// Fills given up because a write came in between.
    pub fill_cancelled: u64,
    /// Lines evicted to make room.
    pub evicted: u64,
    /// Cached lines that a write updated beside the backing store (with `full`, an update of a whole line is a fill).
    pub updated: u64,
    /// Lines dropped by a write, a trim or an error.
    pub dropped: u64,
    /// Lines whose checksum did not match: dropped and read from backing.
    pub corrupt: u64,
    /// Flash reads and writes that failed.
    pub flash_errors: u64,
    /// Backing reads and changes that failed.
    pub backing_errors: u64,
    /// Lines written to flash.
    pub flash_lines_written: u64,
    /// Of them, lines that the cleaner of a log moved.
    pub copied: u64,
    /// Segments that it cleaned.
    pub cleaned: u64,
    /// Slots and groups that were looked at to drop ranges.
    pub range_steps: u64,
    /// Parts that waited for another.
    pub waited: u64,
    /// The longest time that a part waited.
    pub longest_wait: Nanos,
}

impl BlockStats {
    /// Adds another shard's.
    pub fn add(&mut self, other: &BlockStats) {
        self.read_lines += other.read_lines;
        self.read_hits += other.read_hits;
        self.read_shared += other.read_shared;
        self.write_lines += other.write_lines;
        self.write_hits += other.write_hits;
        self.fills += other.fills;
        self.fill_rejected += other.fill_rejected;
        self.fill_dropped += other.fill_dropped;
        self.fill_cancelled += other.fill_cancelled;
        self.evicted += other.evicted;
        self.updated += other.updated;
        self.dropped += other.dropped;
        self.corrupt += other.corrupt;
        self.flash_errors += other.flash_errors;
        self.backing_errors += other.backing_errors;
        self.flash_lines_written += other.flash_lines_written;
        self.copied += other.copied;
        self.cleaned += other.cleaned;
        self.range_steps += other.range_steps;
        self.waited += other.waited;
        self.longest_wait = self.longest_wait.max(other.longest_wait);
    }
}
