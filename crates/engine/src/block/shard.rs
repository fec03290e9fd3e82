//! One shard of the block cache: which parts may run, what they wait for, and what must be made durable.
//!
//! # What must never happen, and what keeps it from happening
//!
//! **A read returns something older than the last acknowledged write.** Reads and changes of one line exclude each
//! other, and so do changes that share bytes (not those that only share a line: see `merge.rs`), and changes and fills: a change waits for the fetches, fills and reads of its lines that are under way, and for what the backing store is read of its bytes
//! (a fill that has not begun to write is given up instead), and everything else waits for the change. The lines of a
//! change are taken out of the map before it reaches the backing store, and put back, if at all, when both copies are
//! written. So a kill at any moment leaves no line in the map whose two copies may differ.
//!
//! **After a power cut the durable map offers a line that the backing store has changed since.** Before the first
//! change of a line that the durable map may name, the bit of its region in the write-intent map is durable; what
//! recovery finds in regions with a bit is dropped. A change of lines that it cannot name goes *ahead* of the bit, which is
//! asked for all the same: until it is durable no line of the region is filled, so that neither map learns of bytes that
//! the backing store may lose yet. A line that was evicted or dropped may be named until the record of that is durable, and
//! another batch behind it ([`Left`]).
//! A bit is cleared only when no change of the region is under way, the backing store was flushed after the last one,
//! and the log of the map has everything that happened before ([`BlockShard::quiet`]). A run that is cut short may leave
//! changes that went ahead and whose bit was not set: every run flushes the backing store before it uses it.
//!
//! **After a power cut the durable map offers a line whose slot was used for another since.** A slot that the durable
//! map may still think taken is *held*: nothing but the line that lay there is written to it before the record that it
//! is empty is durable ([`BlockShard::take_records`], [`BlockShard::records_durable`]). Checksums would catch nearly all
//! of those, and rot; but nearly is not never. (If the log's last batch rots and the power fails, only checksums catch them.)
//!
//! **A slot is written while it is read, or twice at a time.** A slot is written only while it is in `reserved`; a
//! slot's line is not evicted while anything of that line is under way. In a log of segments a line may leave a slot that
//! is being read; no slot of the segment is written before that is over ([`Map::begin_read`]).
//!
//! **A line that the cleaner moves comes back older than it was.** While a line is *moving*, changes of it wait as they do
//! for fills. The copy is published only if what was read has the line's checksum; the old slot is emptied first, and is
//! held like any other.
//!
//! **A line of a range that was trimmed comes back.** Its region is *void* until the line is out of the map, in which nobody
//! finds it meanwhile: see the header of `voids.rs`.
//!
//! What a table that lies on the device may do besides (sparse placement), and what keeps it from doing so, is in the header
//! of `paging.rs`.
//!
//! # Order
//!
//! Parts that conflict run in the order in which they came. Only groups with something under way are tracked; there is
//! no lock per line.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use larder_base::Nanos;

use super::api::{
    BlockEffects, BlockLimits, BlockStats, GROUP_LINES, GroupId, IoFailed, IoId, LineId, Merge,
    Part, PartKind, SlotId, Sum, Verdict, WriteMode,
};
use super::left::Left;
use super::map::{Map, Slot};
use super::merge::Merging;
use super::paging::Paging;
use super::planted::Planted;
use super::ranges::{Range, Waiting};
use super::regions::RegionSet;
use super::slots::SlotSet;
use super::table::Table;
use super::voids::Voids;

/// Bits of a region of the write-intent map, in groups: a region is this many groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Regions {
    /// Groups of a region.
    pub groups: u64,
    /// Number of regions in the line space.
    pub count: u32,
}

impl Regions {
    /// The region of `line`.
    pub fn of(&self, line: LineId) -> u32 {
        (line.group().0 / self.groups) as u32
    }
}

/// What a shard is made of.
#[derive(Clone, Copy, Debug)]
pub struct BlockConfig {
    /// Bytes of a line: a power of two, 512 to 65,536.
    pub line_bytes: u32,
    /// What writes do to the cache.
    pub write: WriteMode,
    /// Bounds.
    pub limits: BlockLimits,
    /// The regions of the write-intent map.
    pub regions: Regions,
}

/// A change of the map that must become durable: what `slot` holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapRecord {
    /// Which slot of the shard.
    pub slot: SlotId,
    /// The line there and its checksum, or nothing.
    pub holds: Option<(LineId, Sum)>,
}

/// A part that runs.
#[derive(Debug)]
pub(super) struct Active {
    pub part: Part,
    /// Completions that it waits for.
    pub pending: u32,
    pub failed: bool,
    /// Updates in place that are written: what to publish when the backing store has the change.
    pub updated: Vec<(SlotId, LineId, Sum)>,
    /// Slots of updates that failed.
    pub lost: Vec<SlotId>,
    /// Lines of the group to fill from the client's bytes when the change is done.
    pub fill: u16,
    /// Of them, lines that were cached before: admission is not asked again.
    pub renew: u16,
    /// Fills that still need the client's bytes.
    pub refs: u32,
    /// Lines that may still have been under way to flash when the client was answered.
    pub behind: u32,
    /// The client was answered: what is `pending` keeps it, and then `refs`.
    pub answered: bool,
}

/// A stretch of bytes that a part wants of a read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Want {
    pub active: u32,
    pub at: u64,
    pub len: u32,
}

/// An I/O under way, or a buffer that fills still need.
#[derive(Debug)]
pub(super) enum Io {
    FlashRead {
        slot: SlotId,
        first: LineId,
        lines: u32,
        want: Want,
        /// What the lines must have: by the time they are read the slots may be others'.
        sums: [Sum; GROUP_LINES as usize],
    },
    /// The cleaner moves lines; those that lay in the slots, with their checksums.
    Copy {
        from: SlotId,
        to: SlotId,
        lines: Vec<(LineId, Sum)>,
    },
    /// `whole`: the lines of the group that it brings whole, which others may wait for and which are to be filled, on the terms
    /// of `verdict`.
    Fetch {
        group: GroupId,
        at: u64,
        len: u32,
        whole: u16,
        verdict: Verdict,
        wants: Vec<Want>,
        refs: u32,
    },
    Change {
        active: u32,
    },
    /// A line that is overwritten in part, and the checksum that it must have had.
    Merge {
        active: u32,
        merge: Merge,
        sum: Sum,
    },
    Update {
        active: u32,
        slot: SlotId,
        first: LineId,
        lines: u32,
    },
    Fill {
        slot: SlotId,
        first: LineId,
        lines: u32,
        source: FillSource,
    },
    /// A page of the table comes into a frame.
    Load {
        page: u32,
        frame: u32,
    },
}

/// Who keeps the bytes of a fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FillSource {
    Fetch(IoId),
    Active(u32),
}

/// A fill that waits until the durable map knows that its slot is empty, or for its region's bit.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitingFill {
    pub line: LineId,
    pub source: FillSource,
}

/// A group with something under way.
#[derive(Debug, Default)]
pub(super) struct Group {
    /// Flash reads of each line.
    pub reading: [u32; GROUP_LINES as usize],
    /// Lines that a whole fetch brings.
    pub fetching: u16,
    pub fetches: Vec<IoId>,
    /// Lines that are being filled, with the keeper of their bytes.
    pub filling: u16,
    pub fills: Vec<(u32, FillSource)>,
    /// Lines that the cleaner moves.
    pub moving: u16,
    /// Lines that a change has.
    pub changing: u16,
    /// The changes that have them.
    pub changes: Vec<u32>,
    /// Lines that changes overwrite in part and that are to come back.
    pub merging: Vec<Merging>,
    pub waiting: VecDeque<(Part, Nanos)>,
}

impl Group {
    fn is_idle(&self) -> bool {
        self.waiting.is_empty()
            && self.fetches.is_empty()
            && self.fetching | self.filling | self.moving | self.changing == 0
            && self.reading.iter().all(|&n| n == 0)
    }

    pub(super) fn reads(&self) -> u16 {
        (0..GROUP_LINES).filter(|&i| self.reading[i as usize] > 0).fold(0, |m, i| m | 1 << i)
    }
}

/// One shard of the block cache. See the module's header.
#[derive(Debug)]
pub struct BlockShard {
    pub(super) config: BlockConfig,
    pub(super) map: Map,
    pub(super) stats: BlockStats,
    /// False once the cache device cannot be used: every line is a miss, nothing is filled.
    pub(super) enabled: bool,
    pub(super) groups: BTreeMap<GroupId, Group>,
    pub(super) actives: Table<Active>,
    pub(super) ios: Table<Io>,
    /// Slots that are being written, or for which a fill waits.
    pub(super) reserved: BTreeSet<SlotId>,
    pub(super) waiting_fills: BTreeMap<SlotId, WaitingFill>,
    pub(super) fills: u32,
    /// Lines that the cleaner is moving.
    pub(super) copies: u32,
    pub(super) waiting_parts: u32,
    /// Lines of updates that are under way behind replies.
    pub(super) behind: u32,
    /// Slots whose state must be written to the log, and how many times each was recorded so far.
    changed: SlotSet,
    /// What was taken to be written and is not durable yet. (Of a table: slots that are held.)
    pub(super) taken: BTreeSet<SlotId>,
    /// Regions whose bit is known to be durable.
    dirty: BTreeSet<u32>,
    /// Regions whose bit was asked for, and the changes that wait for it.
    asked: BTreeMap<u32, Vec<u32>>,
    pub(super) left: Left,
    /// Ranges of lines that are locked as a whole, first and last, with the operation that has or wants them.
    pub(super) ranges: Vec<Range>,
    pub(super) range_waiting: Waiting,
    /// Regions of which lines may be in the map.
    pub(super) present: RegionSet,
    /// Of them, those whose lines are gone all the same.
    pub(super) voids: Voids,
    /// Where the table is on the device.
    pub(super) paging: Option<Box<Paging>>,
    #[cfg(feature = "planted")]
    pub(super) fault: Option<Planted>,
}

impl BlockShard {
    /// A shard over `map`, in which lines may lie from an earlier run. Slots that are held are recorded as empty again:
    /// whether that was durable is not known.
    pub fn new(config: BlockConfig, mut map: Map) -> BlockShard {
        map.begin();
        let (mut changed, mut present) = (SlotSet::default(), RegionSet::default());
        let slots = if map.sparse().is_some() { 0 } else { map.len() };
        for slot in (0..slots).map(SlotId) {
            match map.get(slot) {
                Slot::Line(line) => present.set(config.regions.of(line)),
                Slot::Held => changed.insert(slot),
                Slot::Free => {}
            }
        }
        let voids = Voids::found(&mut map, &present);
        let mut shard = BlockShard {
            config,
            map,
            stats: BlockStats::default(),
            enabled: true,
            groups: BTreeMap::new(),
            actives: Table::new(),
            ios: Table::new(),
            reserved: BTreeSet::new(),
            waiting_fills: BTreeMap::new(),
            fills: 0,
            copies: 0,
            waiting_parts: 0,
            behind: 0,
            taken: BTreeSet::new(),
            dirty: BTreeSet::new(),
            asked: BTreeMap::new(),
            left: Left::new(changed.clone()),
            changed,
            ranges: Vec::new(),
            range_waiting: VecDeque::new(),
            present,
            voids,
            paging: None,
            #[cfg(feature = "planted")]
            fault: None,
        };
        shard.begin_paging();
        shard
    }

    /// The map is from memory that has outlived a run. A line that is not in it may be in the durable map: the log may have lost its last batch, and
    /// nobody misses that. This holds until [`BlockShard::quiet`] is asked, which the log does only behind a snapshot of this run.
    pub(super) fn distrust_log(&mut self) {
        self.left.distrust();
    }

    /// A shard over `map` that caches nothing: as [`BlockShard::disable`] leaves one.
    pub fn without(config: BlockConfig, map: Map) -> BlockShard {
        BlockShard { enabled: false, ..BlockShard::new(config, map) }
    }

    /// What has happened so far.
    pub fn stats(&self) -> BlockStats {
        BlockStats { cleaned: self.map.cleaning().0, ..self.stats }
    }

    /// Groups of which lines are on their way to flash, and how many of each: the map has not got them yet.
    pub fn filling(&self) -> impl Iterator<Item = (GroupId, u32)> {
        let lines = self.groups.iter().map(|(&group, of)| (group, of.filling.count_ones()));
        lines.filter(|&(_, lines)| lines > 0)
    }

    /// What has not come to its end: I/O of clients, fills, copies and pages of the table, and fills that wait for their
    /// slot. Without clients' requests it is what is done behind the replies.
    pub fn unsettled(&self) -> usize {
        self.ios.len() + self.waiting_fills.len()
    }

    /// The map, to look at.
    pub fn map(&self) -> &Map {
        &self.map
    }

    /// Bytes of a line.
    pub fn line_bytes(&self) -> u32 {
        self.config.line_bytes
    }

    /// Whether the cache is in use (see [`BlockShard::disable`]).
    pub fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Whether nothing is under way.
    pub fn is_idle(&self) -> bool {
        let paging = self.paging.as_ref().is_none_or(|p| p.is_idle());
        self.groups.is_empty() && self.actives.len() == 0 && self.ios.len() == 0 && paging
    }

    /// Lines on their way to flash behind replies, or fetched for it: bounded by [`BlockLimits::fills`].
    pub fn fills_under_way(&self) -> u32 {
        self.fills
    }

    /// What is under way, for messages and tests.
    pub fn under_way(&self) -> String {
        format!(
            "groups {:?}, paging {:?}, waiting fills {}, asked {:?}, ranges {:?}, waiting for ranges {}, I/Os {}",
            self.groups,
            self.paging,
            self.waiting_fills.len(),
            self.asked,
            self.ranges,
            self.range_waiting.len(),
            self.ios.len()
        )
    }

    /// The mask of the lines that bytes `at..at + len` touch, and its group.
    pub(super) fn span(&self, at: u64, len: u32) -> (GroupId, u16) {
        let first = LineId(at / u64::from(self.config.line_bytes));
        let last = LineId((at + u64::from(len) - 1) / u64::from(self.config.line_bytes));
        debug_assert_eq!(first.group(), last.group(), "a part crosses a group");
        let upto = if last.index() + 1 == 16 { u16::MAX } else { (1 << (last.index() + 1)) - 1 };
        (first.group(), upto & !((1u16 << first.index()) - 1))
    }

    pub(super) fn line_start(&self, line: LineId) -> u64 {
        line.0 * u64::from(self.config.line_bytes)
    }

    /// Begins a part. Its answer is one [`BlockEffects::done`], now or during a later completion.
    pub fn submit(&mut self, now: Nanos, part: Part, fx: &mut impl BlockEffects) {
        debug_assert!(part.len > 0);
        let (group, mask) = self.span(part.at, part.len);
        if let Some(page) = self.absent(group)
            && !self.bring_for(now, page, part, fx)
        {
            return;
        }
        let advice = part.kind == PartKind::Prefetch;
        if advice && (self.in_range(group, mask) || self.must_wait(&part, group, mask, usize::MAX))
        {
            // Not worth waiting for.
            fx.done(part.op, Ok(()), false);
            return;
        }
        if self.in_range(group, mask) {
            if self.waiting_parts >= self.config.limits.waiting {
                fx.done(part.op, Err(IoFailed), false);
                return;
            }
            self.waiting_parts += 1;
            self.stats.waited += 1;
            self.range_waiting.push_back((part, now));
            return;
        }
        if self.must_wait(&part, group, mask, usize::MAX) {
            if self.waiting_parts >= self.config.limits.waiting {
                fx.done(part.op, Err(IoFailed), false);
                return;
            }
            self.waiting_parts += 1;
            self.stats.waited += 1;
            self.group(group).waiting.push_back((part, now));
            return;
        }
        self.start(part, group, mask, fx);
        self.tidy(group);
    }

    /// Whether `part` must wait for what is under way in its group, or for one of the first `ahead` that wait.
    fn must_wait(&self, part: &Part, id: GroupId, mask: u16, ahead: usize) -> bool {
        let Some(group) = self.groups.get(&id) else { return false };
        let changes = part.kind.changes();
        let mut earlier = group.waiting.iter().take(ahead);
        let excludes = |p: &Part| match (changes, p.kind.changes()) {
            (true, true) => self.exclude(part, p),
            (false, false) => false,
            _ => self.span(p.at, p.len).1 & mask != 0,
        };
        if earlier.any(|(p, _)| excludes(p)) {
            return true;
        }
        let mut running = group.changes.iter().filter_map(|&a| self.actives.get(a));
        if group.changing & mask != 0 && running.any(|a| excludes(&a.part)) {
            return true;
        }
        if !changes || self.planted(Planted::ChangeIgnoresFill) {
            return false;
        }
        if group.moving & mask != 0 && !self.planted(Planted::CopyIgnoresChange) {
            return true;
        }
        // Fills that wait for the log have written nothing: they are given up, not waited for.
        let given_up = self
            .waiting_fills
            .values()
            .filter(|f| f.line.group() == id)
            .fold(0u16, |m, f| m | 1 << f.line.index());
        let mut fetching = group.fetching;
        if self.planted(Planted::AheadNotAwaited) {
            fetching &= !self.fetched_ahead(group);
        }
        (fetching | group.filling & !given_up | group.reads()) & mask != 0
            || self.is_fetched_exactly(group, part)
    }

    /// Whether bytes of `part` are being read from the backing store for one client alone.
    fn is_fetched_exactly(&self, group: &Group, part: &Part) -> bool {
        let end = part.at + u64::from(part.len);
        !self.planted(Planted::ChangeIgnoresRead)
            && group.fetches.iter().any(|io| match self.ios.get(io.0) {
                Some(&Io::Fetch { whole: 0, at, len, .. }) => {
                    at < end && part.at < at + u64::from(len)
                }
                _ => false,
            })
    }

    /// Whether two changes may not run at the same time: which of them the backing store has last must be the one that flash
    /// has last. Where they share lines and no bytes, see the header of `merge.rs`.
    fn exclude(&self, a: &Part, b: &Part) -> bool {
        !self.planted(Planted::ChangesRace)
            && (self.enabled || !self.planted(Planted::ChangesRaceWithoutCache))
            && a.at < b.at + u64::from(b.len)
            && b.at < a.at + u64::from(a.len)
    }

    /// Lines of the group that are fetched and that no client waits for.
    fn fetched_ahead(&self, group: &Group) -> u16 {
        let ahead = |io: &&IoId| match self.ios.get(io.0) {
            Some(Io::Fetch { wants, .. }) => wants.iter().all(|want| {
                let active = self.actives.get(want.active);
                active.is_some_and(|a| a.part.kind == PartKind::Prefetch)
            }),
            _ => false,
        };
        let lines = |io: &IoId| match self.ios.get(io.0) {
            Some(Io::Fetch { whole, .. }) => *whole,
            _ => 0,
        };
        group.fetches.iter().filter(ahead).fold(0, |mask, io| mask | lines(io))
    }

    fn start(&mut self, part: Part, group: GroupId, mask: u16, fx: &mut impl BlockEffects) {
        self.enter(group);
        if part.kind.changes() {
            self.start_change(part, group, mask, fx);
        } else {
            self.start_read(part, group, mask, fx);
        }
    }

    /// Starts what can start in `group` now, and forgets the group if nothing is left in it.
    pub(super) fn wake(&mut self, now: Nanos, group: GroupId, fx: &mut impl BlockEffects) {
        let mut at = 0;
        while let Some(entry) = self.groups.get(&group) {
            let Some(&(part, since)) = entry.waiting.get(at) else { break };
            let (_, mask) = self.span(part.at, part.len);
            if self.must_wait(&part, group, mask, at) {
                at += 1;
                continue;
            }
            if let Some(entry) = self.groups.get_mut(&group) {
                entry.waiting.remove(at);
            }
            self.waiting_parts -= 1;
            self.stats.longest_wait = self.stats.longest_wait.max(now.saturating_sub(since));
            self.start(part, group, mask, fx);
        }
        self.tidy(group);
        self.grant_ranges(now, fx);
        self.bring_stalled(now, fx);
    }

    pub(super) fn tidy(&mut self, group: GroupId) {
        if self.groups.get(&group).is_some_and(Group::is_idle) {
            self.groups.remove(&group);
        }
    }

    pub(super) fn group(&mut self, group: GroupId) -> &mut Group {
        self.groups.entry(group).or_default()
    }

    /// One completion of `active` is in. Answers the client when it was the last.
    pub(super) fn step(
        &mut self,
        now: Nanos,
        active: u32,
        failed: bool,
        fx: &mut impl BlockEffects,
    ) {
        let Some(a) = self.actives.get_mut(active) else { return };
        a.failed |= failed;
        a.pending -= 1;
        if a.pending > 0 {
            return;
        }
        if a.part.kind.changes() {
            self.finish_change(now, active, fx);
        } else if let Some(a) = self.actives.remove(active) {
            fx.done(a.part.op, if a.failed { Err(IoFailed) } else { Ok(()) }, false);
        }
    }

    // ---- the durable map ----

    /// The state of `slot` differs from what was recorded last.
    pub(super) fn record(&mut self, slot: SlotId) {
        if !self.record_page(slot) {
            self.changed.insert(slot);
        }
    }

    /// Slots whose state waits to be recorded, or pages of the table.
    pub fn records_waiting(&self) -> usize {
        self.changed.len() + self.pages_waiting()
    }

    /// Up to `most` records of slots that changed, for the log. Flush the cache device after this call and before the
    /// records are written: the lines they name must be durable before they are. One batch at a time: answer with
    /// [`BlockShard::records_durable`] or [`BlockShard::records_lost`].
    pub fn take_records(&mut self, most: usize, out: &mut Vec<MapRecord>) {
        debug_assert!(self.taken.is_empty(), "one batch at a time");
        for slot in self.changed.take(most) {
            self.taken.insert(slot);
            let holds = match self.map.get(slot) {
                Slot::Line(line) => Some((line, self.map.sum(slot))),
                Slot::Held | Slot::Free => None,
            };
            out.push(MapRecord { slot, holds });
        }
    }

    /// What the slots from `first` on hold, up to `most` of them, for a snapshot.
    pub fn state(&self, first: SlotId, most: u32, out: &mut Vec<Option<(u64, u32)>>) {
        let last = first.0.saturating_add(most).min(self.map.len());
        out.extend((first.0..last).map(SlotId).map(|slot| match self.get(slot) {
            Slot::Line(line) => Some((line.0, self.map.sum(slot).0)),
            Slot::Held | Slot::Free => None,
        }));
    }

    /// An update in place of `slot` begins: it is recorded when that is over.
    pub(super) fn begin_update(&mut self, slot: SlotId) {
        if !self.planted(Planted::UpdateStaysInMap) {
            self.map.hold(slot);
        }
        // It takes up room meanwhile: a sparse cache that gave it to another line would be fuller when this one comes back.
        self.reserve(slot);
        self.changed.remove(slot);
    }

    /// A slot under update in place: its state is in between, and its region has its bit set.
    pub(super) fn is_update(&self, slot: SlotId) -> bool {
        self.reserved.contains(&slot) && !self.waiting_fills.contains_key(&slot)
    }

    /// The batch is durable: slots that it recorded as empty and that still are may be used.
    pub fn records_durable(&mut self, now: Nanos, fx: &mut impl BlockEffects) {
        self.left.batch();
        for slot in std::mem::take(&mut self.taken) {
            let again = self.changed.contains(slot);
            let update = self.is_update(slot);
            if !again && !update && self.map.get(slot) == Slot::Held {
                self.map.free(slot);
            }
            if !again {
                self.left.settled(slot);
            }
        }
        if self.paging.is_none() && self.changed.len() == 0 {
            self.left.all_settled();
        }
        if self.paging.is_some() || self.planted(Planted::LastBatchBelieved) {
            // (A damaged page of a table says nothing: it is not taken for what it was before.)
            self.left.batch();
        }
        self.pages_durable();
        self.start_waiting_fills(fx);
        self.clean(fx);
        self.bring_stalled(now, fx);
    }

    /// The batch could not be written: its slots wait again.
    pub fn records_lost(&mut self) {
        let taken = std::mem::take(&mut self.taken);
        if self.paging.is_some() {
            self.pages_lost();
        } else {
            self.changed.extend(taken);
        }
    }

    // ---- the write-intent map ----

    /// Whether changes of `line` may begin; else the active part waits for the region's bit.
    pub(super) fn may_change(
        &mut self,
        line: LineId,
        active: u32,
        fx: &mut impl BlockEffects,
    ) -> bool {
        let region = self.config.regions.of(line);
        if self.dirty.contains(&region) || self.planted(Planted::IntentNotAwaited) {
            return true;
        }
        let ahead = self.actives.get(active).is_some_and(|a| self.may_go_ahead(&a.part));
        let waiting = match self.asked.entry(region) {
            Entry::Vacant(entry) => {
                fx.intent(region);
                entry.insert(Vec::new())
            }
            Entry::Occupied(entry) => entry.into_mut(),
        };
        if !ahead {
            waiting.push(active);
        }
        ahead
    }

    /// Whether the durable map can name none of the lines of `part`.
    fn may_go_ahead(&self, part: &Part) -> bool {
        let (group, mask) = self.span(part.at, part.len);
        let lax = self.planted(Planted::LeftIgnored);
        self.left.knows_all()
            && (lax || !self.left.has_region(self.config.regions.of(group.line(0))))
            && (lax || self.left_for_good(group))
            && (0..16)
                .filter(|i| mask & 1 << i != 0)
                .map(|i| group.line(i))
                .all(|line| self.map.find(line).is_none() && (lax || !self.left.has(line)))
    }

    /// Whether the bit of the region of `group` is asked for and not durable.
    pub(super) fn awaits_bit(&self, group: GroupId) -> bool {
        self.asked.contains_key(&self.config.regions.of(group.line(0)))
            && !self.planted(Planted::FillBeforeIntent)
    }

    /// Whether the bit of `region` is known to be durable.
    pub(super) fn is_dirty(&self, region: u32) -> bool {
        self.dirty.contains(&region)
    }

    /// The line in `slot` is about to leave it. Where the region's bit is durable, it stands for that.
    pub(super) fn leave(&mut self, slot: SlotId) {
        if let Slot::Line(line) = self.map.get(slot)
            && !self.dirty.contains(&self.config.regions.of(line))
        {
            self.left.add(slot, line);
        }
    }

    /// The bit of `region` is durable (or the cache was [disabled](BlockShard::disable) because it cannot be).
    pub fn intent_ready(&mut self, now: Nanos, region: u32, fx: &mut impl BlockEffects) {
        self.dirty.insert(region);
        for active in self.asked.remove(&region).unwrap_or_default() {
            self.run_change(now, active, fx);
        }
        self.start_waiting_fills(fx);
    }

    /// Asks whether the bit of `region` may be cleared: no change of it is under way, and none begins from now on
    /// without asking for the bit again. The caller then flushes the backing store, makes all records of all shards
    /// durable that were waiting at this moment, and clears the bit. The durable map has a snapshot that was made since this run
    /// began, if the run began with the memory of another.
    pub fn quiet(&mut self, region: u32) -> bool {
        self.left.trust();
        let regions = self.config.regions;
        let busy = self.asked.contains_key(&region)
            || self.voids.has(region) && !self.planted(Planted::QuietWhileVoid)
            || self
                .ranges
                .iter()
                .any(|r| regions.of(r.first) <= region && region <= regions.of(r.last))
            || self.actives.iter().any(|a| {
                let lax = a.answered && self.planted(Planted::QuietBehindReply);
                a.part.kind.changes() && (!a.answered || a.pending > 0) && !lax && {
                    regions.of(LineId(a.part.at / u64::from(self.config.line_bytes))) == region
                }
            });
        let quiet = !busy || self.planted(Planted::QuietTooEarly);
        if quiet {
            self.dirty.remove(&region);
        }
        quiet
    }

    // ---- when the cache device is lost ----

    /// The cache device cannot be used any more: from now on every line is a miss and nothing is cached. What is under
    /// way ends as it can; clients see no error.
    pub fn disable(&mut self, now: Nanos, fx: &mut impl BlockEffects) {
        if !self.enabled {
            return;
        }
        self.enabled = false;
        let given_up: Vec<SlotId> = self.waiting_fills.keys().copied().collect();
        let mut groups = BTreeSet::new();
        for slot in given_up {
            if let Some(fill) = self.cancel_fill(slot, fx) {
                groups.insert(fill.line.group());
            }
        }
        for group in groups {
            self.wake(now, group, fx);
        }
        // Without a cache there is nothing to distrust.
        for active in std::mem::take(&mut self.asked).into_values().flatten() {
            self.run_change(now, active, fx);
        }
        self.end_paging(now, fx);
    }

    /// The opposite of [`BlockShard::disable`]: the cache is used again, and nothing is in it. `map` is an empty map, and the
    /// durable map is empty too by now, with no bit set in the write-intent map. All lines must be
    /// [locked](BlockShard::lock_range), and every backing store durable since then: changes that were made meanwhile have no
    /// bit. Returns whether it is done. It is not while anything is under way, and not where the placement is sparse.
    pub fn begin_anew(&mut self, mut map: Map) -> bool {
        if self.enabled || self.paging.is_some() || !self.is_idle() {
            return false;
        }
        map.begin();
        if !self.planted(Planted::TakenBackWithLines) {
            self.map = map;
        }
        self.reserved.clear();
        self.waiting_fills.clear();
        (self.fills, self.copies, self.behind) = (0, 0, 0);
        self.changed = SlotSet::default();
        self.taken.clear();
        self.dirty.clear();
        self.asked.clear();
        self.left = Left::new(SlotSet::default());
        self.present = RegionSet::default();
        self.voids = Voids::default();
        self.enabled = true;
        true
    }

    /// The bytes of `line` are in `slot`.
    pub(super) fn publish(&mut self, slot: SlotId, line: LineId, sum: Sum) {
        self.map.publish(slot, line, sum);
        if self.paging.is_none() {
            self.present.set(self.config.regions.of(line));
        }
        self.record(slot);
    }

    /// Takes the line in `slot` out of the map.
    pub(super) fn drop_line(&mut self, slot: SlotId) {
        self.map.drop_line(slot);
        self.record(slot);
        self.stats.dropped += 1;
    }
}
