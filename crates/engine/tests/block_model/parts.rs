//! What the world is made of: events, operations, I/O under way, and what a sector may be.

use std::collections::BTreeSet;
use std::rc::Rc;

use larder_base::Rng;
use larder_engine::block::node::ranged::Progress;
use larder_engine::block::{
    BlockEffects, GroupId, IoFailed, IoId, LineId, Merge, OpId, PartKind, SlotId, Source,
};

use crate::device::SECTOR;
use crate::shares::Shares;

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
    /// What is read ahead: stretches, and reads of the backing store for them.
    pub(crate) aheads: u64,
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
}

impl Seen {
    pub(crate) fn add(&mut self, o: Seen) {
        macro_rules! sum { ($($f:ident)*) => { $(self.$f += o.$f;)* } }
        sum!(reads writes hits shared updates evicted cancelled fills_dropped corrupt rotten_maps short_logs flash_errors backing_errors kills kills_in_store
            kills_in_log power_cuts stops warm_lines lost_devices taken_back snapshots cleared ranges waited copied cleaned logs
            voids sweeps drops sparse loads cleared_pages holes aheads ahead_reads tails uncached free_fills free_refused
            forgotten distrusted flushes over_budget no_space queued stayed at_ceiling covered given_up);
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
            self.aheads,
            self.ahead_reads,
            self.tails,
            self.uncached,
            self.free_fills,
            self.free_refused,
            self.forgotten,
            self.distrusted,
            self.flushes,
            self.over_budget,
            self.no_space,
            self.queued,
            self.stayed,
            self.at_ceiling,
            self.covered,
            self.given_up,
        ];
        println!("{self:?}");
        assert!(all.iter().all(|&n| n >= 20), "something was hardly met: {self:?}");
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    FlashRead(IoId, SlotId, LineId, u32),
    Copy(IoId, SlotId, SlotId, u32),
    Merge(IoId, Merge, OpId),
    FlashWrite(IoId, SlotId, LineId, u32, Source),
    BackingRead(IoId, u64, u32, OpId),
    BackingChange(IoId, OpId, PartKind, u64, u32),
    Deliver(Source, OpId, u64, u32),
    Release(IoId),
    Done(OpId, Result<(), IoFailed>, bool),
    ReleaseOp(OpId),
    Intent(u32),
    Load(IoId, u32),
}

pub(crate) struct Fx {
    pub(crate) events: Vec<Event>,
    pub(crate) coin: Rng,
    /// Lines begin to be filled that may have free slots only.
    pub(crate) if_free: bool,
    pub(crate) shares: Rc<Shares>,
}

impl BlockEffects for Fx {
    fn flash_read(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, _op: OpId) {
        self.events.push(Event::FlashRead(io, slot, line, lines));
    }
    fn merge(&mut self, io: IoId, merge: Merge, op: OpId) {
        self.events.push(Event::Merge(io, merge, op));
    }
    fn copy(&mut self, io: IoId, from: SlotId, to: SlotId, lines: u32) {
        self.events.push(Event::Copy(io, from, to, lines));
    }
    fn flash_write(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, op: OpId) {
        self.events.push(Event::FlashWrite(io, slot, line, lines, Source::Op(op)));
    }
    fn fill(&mut self, io: IoId, slot: SlotId, line: LineId, lines: u32, source: Source) {
        self.events.push(Event::FlashWrite(io, slot, line, lines, source));
    }
    fn backing_read(&mut self, io: IoId, at: u64, len: u32, op: OpId) {
        self.events.push(Event::BackingRead(io, at, len, op));
    }
    fn backing_change(&mut self, io: IoId, op: OpId, kind: PartKind, at: u64, len: u32) {
        self.events.push(Event::BackingChange(io, op, kind, at, len));
    }
    fn deliver(&mut self, source: Source, op: OpId, at: u64, len: u32) {
        self.events.push(Event::Deliver(source, op, at, len));
    }
    fn release(&mut self, io: IoId) {
        self.events.push(Event::Release(io));
    }
    fn done(&mut self, op: OpId, result: Result<(), IoFailed>, holds: bool) {
        self.events.push(Event::Done(op, result, holds));
    }
    fn release_op(&mut self, op: OpId) {
        self.events.push(Event::ReleaseOp(op));
    }
    fn intent(&mut self, region: u32) {
        self.events.push(Event::Intent(region));
    }
    fn load(&mut self, io: IoId, page: u32, _op: OpId) {
        self.events.push(Event::Load(io, page));
    }
    fn commit_soon(&mut self) {}
    fn prefer(&mut self, line: LineId, victim: LineId) -> bool {
        assert!(!self.if_free, "{victim:?} is to go for {line:?}, which may have a free slot only");
        let preferred = self.coin.chance(0.5);
        if !preferred {
            self.shares.not_taken(victim, line);
        }
        preferred
    }
    fn keep(&mut self, victim: LineId, line: Option<LineId>) -> bool {
        // (Where it is about room the cleaner asks.)
        let displaces = self.if_free && line.is_some();
        assert!(!displaces, "{victim:?} is to go for {line:?}, which may have a free slot only");
        self.shares.keep(victim, line)
    }
    fn keep_groups(&mut self, first: GroupId, last: GroupId, lines: u32) -> bool {
        assert!(lines > 0, "nobody goes from {first:?} on");
        assert!(!self.if_free, "{lines} lines are to go for one that may have a free slot only");
        self.shares.keep_page(first, last, lines)
    }
    fn may_grow(&mut self, line: LineId) -> bool {
        self.shares.may_grow(line)
    }
}

/// A client's operation.
pub(crate) struct Op {
    pub(crate) kind: PartKind,
    pub(crate) at: u64,
    pub(crate) value: u64,
    pub(crate) parts: u32,
    pub(crate) holds: u32,
    pub(crate) failed: bool,
    /// What a read got, by sector.
    pub(crate) got: Vec<Option<u64>>,
    /// What a read may get because it was so when it began.
    pub(crate) allowed: Vec<BTreeSet<u64>>,
    pub(crate) began: u64,
    pub(crate) range: Option<RangeOp>,
    /// Nobody asked for it.
    pub(crate) ahead: bool,
    /// The backing store was asked on its behalf.
    pub(crate) asked_store: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RangeOp {
    pub(crate) progress: Progress,
    pub(crate) intents: bool,
}

/// An I/O under way.
pub(crate) struct Doing {
    pub(crate) shard: usize,
    pub(crate) event: Event,
    /// Of a copy: what it has read.
    pub(crate) read: Option<Vec<[u8; SECTOR]>>,
    /// What it brought, once it has happened at the device.
    pub(crate) landed: Option<Result<Vec<[u8; SECTOR]>, IoFailed>>,
}

/// What a read has brought: where it begins, bytes, and its sectors.
pub(crate) type Buffer = (u64, Vec<[u8; SECTOR]>);

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
