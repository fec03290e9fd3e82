//! What the world is made of: events, operations, I/O under way, and what a sector may be.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;

use larder_engine::block::node::charged::Charges;
use larder_engine::block::node::event::{
    Answer, Effects, Host, JobId, ShardIo, State, StoreOp, Volume, Why,
};
use larder_engine::block::node::failing::FlashError;
use larder_engine::block::node::limits::Limits;
use larder_engine::block::{IoFailed, LineId, Merge, OpId, PartKind, SlotId};

use larder_policy::budget::BudgetState;

use crate::device::SECTOR;

/// Sectors of a line of 4 KiB.
pub(crate) const PER_LINE: u64 = 4096 / SECTOR as u64;

/// How often what was met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) hits: u64,
    pub(crate) shared: u64,
    pub(crate) updates: u64,
    pub(crate) evicted: u64,
    pub(crate) cancelled: u64,
    pub(crate) fills_dropped: u64,
    pub(crate) corrupt: u64,
    pub(crate) rotten_maps: u64,
    /// Logs whose last page has rotted when a line had been changed that left with it, or was changed then.
    pub(crate) rotten_ends: u64,
    /// Lines that only a log names which has lost its last batch, in slots that are others' by now.
    pub(crate) misfits: u64,
    pub(crate) short_logs: u64,
    pub(crate) flash_errors: u64,
    pub(crate) backing_errors: u64,
    pub(crate) kills: u64,
    pub(crate) kills_in_store: u64,
    pub(crate) kills_in_log: u64,
    pub(crate) power_cuts: u64,
    pub(crate) stops: u64,
    pub(crate) warm_lines: u64,
    pub(crate) lost_devices: u64,
    pub(crate) taken_back: u64,
    pub(crate) snapshots: u64,
    pub(crate) cleared: u64,
    pub(crate) ranges: u64,
    pub(crate) waited: u64,
    /// Writes of lines that waited until the write budget's file said more.
    pub(crate) unpaid: u64,
    pub(crate) copied: u64,
    pub(crate) cleaned: u64,
    pub(crate) logs: u64,
    pub(crate) voids: u64,
    pub(crate) sweeps: u64,
    pub(crate) drops: u64,
    /// Of sparse caches: runs, pages that were read, that were dropped as a whole, and holes.
    pub(crate) sparse: u64,
    pub(crate) loads: u64,
    pub(crate) cleared_pages: u64,
    pub(crate) holes: u64,
    /// Reads of the backing store for what is read ahead.
    pub(crate) ahead_reads: u64,
    /// Parts behind the last whole line of a volume, and changes without a cache.
    pub(crate) tails: u64,
    pub(crate) uncached: u64,
    /// Lines that may have free slots only: those that had some, and those for which there was none.
    pub(crate) free_fills: u64,
    pub(crate) free_refused: u64,
    /// Sectors that the backing store has forgotten while it was used, lines that were dropped for that, and clients' flushes.
    pub(crate) forgotten: u64,
    pub(crate) distrusted: u64,
    pub(crate) flushes: u64,
    /// Parts that the write budget had nothing for, or a full file system no room.
    pub(crate) over_budget: u64,
    pub(crate) no_space: u64,
    /// Ranges that waited for their turn.
    pub(crate) queued: u64,
    /// Lines that stayed because they are pinned, or of a volume with no more than its floor; lines whose volume had all it may.
    pub(crate) stayed: u64,
    pub(crate) at_ceiling: u64,
    /// Regions that a flush was found to have made durable.
    pub(crate) covered: u64,
    /// Devices that were given up because everything failed.
    pub(crate) given_up: u64,
    /// Starts: those that were cut off, of them before all stores were durable, that the device has failed, without the device, that a note has voided,
    /// that have begun all the same, and that were offered the memory of an earlier run.
    pub(crate) kills_in_start: u64,
    pub(crate) early_ends: u64,
    pub(crate) failed_starts: u64,
    pub(crate) passed_by: u64,
    pub(crate) voided: u64,
    pub(crate) worked_again: u64,
    pub(crate) other_memory: u64,
    /// Volumes: what happened to them between two runs; those that came with their lines and without, and that were put aside.
    pub(crate) changed_between: u64,
    pub(crate) came_warm: u64,
    pub(crate) came_cold: u64,
    pub(crate) put_aside: u64,
    /// While others were served: volumes that came, that went (of which some left bits), and that were forgotten.
    pub(crate) attached: u64,
    pub(crate) detached: u64,
    pub(crate) left_undurable: u64,
    pub(crate) forgot: u64,
    /// Stops while fills or copies were under way.
    pub(crate) busy_stops: u64,
    /// Volumes that have grown while they were served: where they lay, and by a move.
    pub(crate) grown: u64,
    pub(crate) moved: u64,
    /// Stops that were cut off.
    pub(crate) kills_in_stop: u64,
    /// Batches of records that had no room for all that waited, writes of the device that took long, and changes that were left to a volume
    /// that clients had turned to.
    pub(crate) full_batches: u64,
    pub(crate) slow_writes: u64,
    pub(crate) rests: u64,
    /// Lines that an operator gave up to wait for.
    pub(crate) given_up_lines: u64,
    /// Power cuts while records waited and volumes had no bit.
    pub(crate) behind: u64,
    /// Notes that the cache was given up that could not be made, ends of runs in which nothing said it, and starts that were refused for
    /// want of such a note.
    pub(crate) unnoted: u64,
    pub(crate) unsaid: u64,
    pub(crate) refused_starts: u64,
}

impl Seen {
    pub(crate) fn add(&mut self, o: Seen) {
        macro_rules! sum { ($($f:ident)*) => { $(self.$f += o.$f;)* } }
        sum!(reads writes hits shared updates evicted cancelled fills_dropped corrupt rotten_maps rotten_ends misfits short_logs flash_errors backing_errors kills kills_in_store
            kills_in_log power_cuts stops warm_lines lost_devices taken_back snapshots cleared ranges waited copied cleaned logs
            voids sweeps drops sparse loads cleared_pages holes ahead_reads tails uncached free_fills free_refused
            forgotten distrusted flushes over_budget no_space queued stayed at_ceiling covered given_up kills_in_start early_ends failed_starts passed_by
            voided worked_again other_memory changed_between came_warm came_cold put_aside attached detached left_undurable forgot busy_stops
            grown moved kills_in_stop full_batches slow_writes rests given_up_lines behind
            unnoted unsaid refused_starts unpaid);
    }

    /// What a start may lose lines by.
    pub(crate) fn losses(&self) -> [u64; 7] {
        [
            self.rotten_maps,
            self.short_logs,
            self.failed_starts,
            self.passed_by,
            self.kills_in_start,
            self.refused_starts,
            self.changed_between,
        ]
    }

    pub(crate) fn assert_met_everything(&self) {
        let all = [
            self.reads,
            self.writes,
            self.hits,
            self.shared,
            self.updates,
            self.evicted,
            self.cancelled,
            self.fills_dropped,
            self.corrupt,
            self.rotten_maps,
            self.rotten_ends,
            self.short_logs,
            self.flash_errors,
            self.backing_errors,
            self.kills,
            self.kills_in_store,
            self.kills_in_log,
            self.power_cuts,
            self.stops,
            self.warm_lines,
            self.lost_devices,
            self.taken_back,
            self.snapshots,
            self.cleared,
            self.ranges,
            self.waited,
            self.copied,
            self.cleaned,
            self.logs,
            self.voids,
            self.sweeps,
            self.drops,
            self.sparse,
            self.loads,
            self.cleared_pages,
            self.holes,
            self.ahead_reads,
            self.tails,
            self.uncached,
            self.free_fills,
            self.free_refused,
            self.forgotten,
            self.distrusted,
            self.given_up_lines,
            self.flushes,
            self.over_budget,
            self.no_space,
            self.queued,
            self.stayed,
            self.at_ceiling,
            self.covered,
            self.given_up,
            self.kills_in_start,
            self.early_ends,
            self.failed_starts,
            self.passed_by,
            self.voided,
            self.worked_again,
            self.other_memory,
            self.changed_between,
            self.came_warm,
            self.came_cold,
            self.put_aside,
            self.attached,
            self.detached,
            self.left_undurable,
            self.forgot,
            self.busy_stops,
            self.grown,
            self.moved,
            self.kills_in_stop,
            self.full_batches,
            self.slow_writes,
            self.rests,
            self.behind,
            self.unnoted,
            self.refused_starts,
            self.unpaid,
        ];
        println!("{self:?}");
        assert!(all.iter().all(|&n| n >= 20), "something was hardly met: {self:?}");
    }
}

/// The types that the model brings.
pub(crate) struct Model;

/// Bytes that belong somewhere in the line space: sectors of a run that others may have too.
#[derive(Clone)]
pub(crate) struct Bytes {
    /// Where the first belongs, bytes.
    pub(crate) at: u64,
    all: Rc<Vec<[u8; SECTOR]>>,
    from: usize,
    count: usize,
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} sectors at {}", self.count, self.at)
    }
}

impl Bytes {
    pub(crate) fn new(at: u64, sectors: Vec<[u8; SECTOR]>) -> Bytes {
        Bytes { at, count: sectors.len(), all: Rc::new(sectors), from: 0 }
    }

    pub(crate) fn sectors(&self) -> &[[u8; SECTOR]] {
        &self.all[self.from..self.from + self.count]
    }

    /// The line in which they begin, and how many they are.
    pub(crate) fn lines(&self) -> (LineId, u32) {
        (LineId(self.at / 4096), (self.count as u64 / PER_LINE) as u32)
    }
}

impl Host for Model {
    type Bytes = Bytes;
    type Volume = Stretch;
    type Ticket = OpId;
    type Failure = IoFailed;
    type Extents = ();

    fn part(bytes: &Bytes, from: u64, len: u64) -> Bytes {
        let (skip, count) = ((from as usize) / SECTOR, (len as usize) / SECTOR);
        assert!(skip + count <= bytes.count, "{from} {len} of {bytes:?}");
        let all = bytes.all.clone();
        Bytes { at: bytes.at + from, all, from: bytes.from + skip, count }
    }

    fn apart(bytes: &Bytes, from: u64, len: u64) -> Bytes {
        Model::part(bytes, from, len)
    }

    fn failure(_why: Why) -> IoFailed {
        IoFailed
    }
}

/// The volume that lies in a stretch of the line space, as an operation asks for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    /// Bytes of the line space.
    pub(crate) base: u64,
    pub(crate) whole: u64,
    /// Whose operation it is, or who is read ahead of.
    pub(crate) op: OpId,
    /// Its lines may have free slots only.
    pub(crate) if_free: bool,
}

impl Volume for Stretch {
    fn state(&self) -> State {
        State::Served
    }

    fn base(&self) -> u64 {
        self.base
    }

    fn whole(&self) -> u64 {
        self.whole
    }
}

/// An I/O.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    FlashRead(ShardIo, SlotId, LineId, u32),
    Copy(ShardIo, SlotId, SlotId, u32),
    Merge(ShardIo, Merge, Bytes),
    FlashWrite(ShardIo, SlotId, Bytes),
    Load(ShardIo, u32),
    /// Where in the line space, bytes, and whether it is read ahead.
    BackingRead(JobId, Stretch, u64, u32, bool),
    /// The bytes of a write, or zeros.
    BackingChange(JobId, Stretch, u64, u64, Option<Bytes>),
}

impl Event {
    /// The shard that has asked for it.
    pub(crate) fn shard(&self) -> Option<usize> {
        match self {
            Event::FlashRead(io, ..)
            | Event::Copy(io, ..)
            | Event::Merge(io, ..)
            | Event::FlashWrite(io, ..)
            | Event::Load(io, _) => Some(io.shard as usize),
            Event::BackingRead(..) | Event::BackingChange(..) => None,
        }
    }
}

/// What the queue has asked for.
#[derive(Debug)]
pub(crate) enum Said {
    Io(Event),
    Deliver(OpId, u64, Bytes),
    Answer(OpId, bool),
}

/// In its order.
#[derive(Debug, Default)]
pub(crate) struct Carried(pub(crate) Vec<Said>);

impl Carried {
    fn io(&mut self, event: Event) {
        self.0.push(Said::Io(event));
    }
}

impl Effects<Model> for Carried {
    fn flash_read(&mut self, io: ShardIo, slot: SlotId, line: LineId, lines: u32) {
        self.io(Event::FlashRead(io, slot, line, lines));
    }

    fn flash_write(&mut self, io: ShardIo, slot: SlotId, lines: u32, bytes: Bytes) {
        assert_eq!(bytes.lines().1, lines);
        self.io(Event::FlashWrite(io, slot, bytes));
    }

    fn merge(&mut self, io: ShardIo, merge: Merge, bytes: Bytes) {
        self.io(Event::Merge(io, merge, bytes));
    }

    fn load(&mut self, io: ShardIo, page: u32) {
        self.io(Event::Load(io, page));
    }

    fn store_read(&mut self, job: JobId, volume: &Stretch, at: u64, len: u32, ahead: bool) {
        self.io(Event::BackingRead(job, *volume, volume.base + at, len, ahead));
    }

    fn store_change(&mut self, job: JobId, volume: &Stretch, change: StoreOp<Bytes>) {
        let (at, len, bytes) = match change {
            StoreOp::Write { at, len, bytes, .. } => (at, len, Some(bytes)),
            StoreOp::Zero { at, len, .. } | StoreOp::Trim { at, len, .. } => (at, len, None),
            StoreOp::Flush | StoreOp::Status { .. } => unreachable!("no client asks for it"),
        };
        self.io(Event::BackingChange(job, *volume, volume.base + at, len, bytes));
    }

    fn deliver(&mut self, op: &mut OpId, at: u64, bytes: Bytes) {
        self.0.push(Said::Deliver(*op, at, bytes));
    }

    fn answer(&mut self, answer: Answer<Model>) {
        self.0.push(Said::Answer(answer.ticket, answer.outcome.is_err()));
    }
}

/// A client's operation, or an operator's.
pub(crate) struct Op {
    pub(crate) kind: PartKind,
    pub(crate) at: u64,
    pub(crate) value: u64,
    /// What a read got, by sector.
    pub(crate) got: Vec<Option<u64>>,
    /// What a read may get because it was so when it began.
    pub(crate) allowed: Vec<BTreeSet<u64>>,
    pub(crate) began: u64,
    /// An operator's.
    pub(crate) operators: bool,
}

/// An I/O under way.
pub(crate) struct Doing {
    pub(crate) event: Event,
    /// Of a copy: what it has read.
    pub(crate) read: Option<Vec<[u8; SECTOR]>>,
    /// What it brought, once it has happened at the device.
    pub(crate) landed: Option<Result<Vec<[u8; SECTOR]>, FlashError>>,
    /// Maintenance has asked for it.
    pub(crate) upkeep: bool,
}

/// What a sector may be.
#[derive(Default)]
pub(crate) struct Truth {
    pub(crate) settled: BTreeSet<u64>,
    pub(crate) flying: Vec<(OpId, u64)>,
    pub(crate) acked: Vec<(u64, u64)>,
}

pub(crate) fn sector(value: u64) -> [u8; SECTOR] {
    let mut out = [0; SECTOR];
    out[..8].copy_from_slice(&value.to_le_bytes());
    out
}

pub(crate) fn value(sector: &[u8; SECTOR]) -> u64 {
    u64::from_le_bytes(sector[..8].try_into().expect("8 bytes"))
}

pub(crate) fn crcs(sectors: &[[u8; SECTOR]]) -> Vec<u32> {
    sectors
        .chunks(PER_LINE as usize)
        .map(|line| line.iter().fold(0, |crc, s| crc32c_append(crc, s)))
        .collect()
}

/// The engine never computes a checksum, so any good one does here.
pub(crate) fn crc32c_append(crc: u32, bytes: &[u8]) -> u32 {
    bytes.chunks_exact(8).fold(crc, |c, b| {
        let word = u64::from_le_bytes(b.try_into().expect("8 bytes"));
        let mixed = (word ^ u64::from(c).rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as u32 ^ mixed as u32 ^ c.rotate_left(5)
    })
}

/// The write budget, and its file, which outlives the process.
#[derive(Clone, Default)]
pub(crate) struct Purse {
    limits: Rc<Limits>,
    file: Rc<Cell<Option<BudgetState>>>,
    /// Bytes of which the file was to know, and could not be written: a kill forgets them.
    forgiven: Rc<Cell<u64>>,
}

impl Purse {
    /// Another process has these limits, and the same file.
    pub(crate) fn begin(&mut self, limits: Limits) {
        self.limits = Rc::new(limits);
        self.forgiven.set(0);
    }

    /// What the file says.
    pub(crate) fn file(&self) -> Option<BudgetState> {
        self.file.get()
    }

    /// Bytes that were charged.
    pub(crate) fn spent(&self) -> u64 {
        self.limits.spent()
    }

    /// Bytes of which the file knows, or was to know when it could not be written.
    pub(crate) fn kept(&self) -> u64 {
        self.file().map_or(0, |state| state.spent).max(self.forgiven.get())
    }
}

impl Charges for Purse {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Now and then the file cannot be written, by what it is to say.
    fn keep_budget(&self, state: BudgetState) -> bool {
        let fails = (state.spent ^ state.saved) % 11 == 3;
        if fails {
            self.forgiven.set(state.spent);
        } else {
            self.file.set(Some(state));
        }
        !fails
    }
}
