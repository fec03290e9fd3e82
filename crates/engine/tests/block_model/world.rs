//! The world around the engine: clients, devices that take their time, and what clients may be told.

mod ahead;
mod attaching;
mod begins;
mod checks;
mod ends;
mod flushing;
mod gone;
mod in_log;
mod limited;
mod node;
mod pace;
mod ranged;
mod takeback;
mod volumes;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::{Killed, Nanos, Rng, Words};
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::event::{Op as Asked, Submit};
use larder_engine::block::node::failing::{FlashError, page_slots};
use larder_engine::block::node::held::Held;
use larder_engine::block::node::maintenance::Work;
use larder_engine::block::node::operator::Operation;
use larder_engine::block::node::queue::Queue;
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::node::record::RecordedMaintenance;
use larder_engine::block::node::start::memory::{HEADER_WORDS, Memory};
use larder_engine::block::{
    BlockShard, GROUP_LINES, IoFailed, LineId, MapRecord, Merge, OpId, PartKind, SlotId, Verdict,
    WriteMode,
};
use larder_format::block::{BlockSuperblock, Layout};
use larder_policy::block::BlockKind;

use crate::device::{Device, Io, SECTOR};
use crate::parts::{
    Bytes, Doing, Event, Model, Op, PER_LINE, Purse, Seen, Stretch, Truth, crcs, sector, value,
};
use crate::shares::Shares;
use attaching::Working;
use begins::Survived;
use flushing::Flushing;
use gone::Gone;
use in_log::{Identities, Validity};
use limited::Charging;
use node::Waiting;
use pace::Habits;
use takeback::Returning;
use volumes::{Store, stores};

const LINE: u64 = 4096;
const SHARDS: u32 = 2;
const WAYS: u32 = 2;
/// Lines of a segment and segments of a shard, where the slots are a log.
const SEGMENT: u32 = 4;
const SEGMENTS: u32 = 8;
/// Stretches of groups in use, volumes: each in a region of its own, with so many lines (the last group is not whole).
const STRETCHES: u64 = 4;
const GROUPS_EACH: u64 = 3;
/// Regions of a sparse cache: with so many there is always room for a volume of two, wherever the others lie.
const REGIONS: u64 = 2 * STRETCHES;
const VOLUME_LINES: u64 = GROUPS_EACH * GROUP_LINES as u64 - 5;
const KEY: u64 = 0x5eed;
/// Ranges that may be locked at a time.
const TURNS: usize = 2;
/// Operations of the device that fail one after the other before it is given up.
const FAILURES: u32 = 4;
/// From this seed on the cache is sparse; before, it has sets or a log.
pub(crate) const SPARSE_FROM: u64 = 2_000;
/// Lines that a sparse cache may hold, groups of a page of its table, and pages of each shard that memory may have room for:
/// from one to more than are in use.
const MOST_LINES: u64 = 48;
const PAGE_GROUPS: u32 = 2;
const FRAMES: [u32; 8] = [1, 2, 2, 3, 3, 4, 6, 12];

#[derive(Clone, Copy, Default)]
pub(crate) struct Options {
    #[cfg(feature = "planted")]
    pub(crate) fault: Option<larder_engine::block::Planted>,
    /// This I/O of the cache device, counted from 0, fails.
    pub(crate) fail_device: Option<u64>,
    /// This I/O of the backing store does.
    pub(crate) fail_backing: Option<u64>,
}

pub(crate) struct World {
    rng: Rng,
    time: u64,
    layout: Layout,
    device: Rc<RefCell<Device>>,
    backing: BTreeMap<u64, u64>,
    /// I/Os of it so far.
    backing_ios: u64,
    /// Sectors of the backing store that were changed since it was last flushed, with what is durable there.
    volatile: BTreeMap<u64, u64>,
    shards: Vec<BlockShard>,
    /// Not there while it is at work.
    maintenance: Option<RecordedMaintenance>,
    /// What is left for it, and its I/O that has ended while it was at work.
    work: Work<Bytes>,
    ended: usize,
    /// Stores to the maps left before a kill.
    fuse: Arc<AtomicU64>,
    queue: Queue<Model>,
    held: Vec<Held<Model>>,
    waiting: Waiting,
    /// Of clients, by their tickets, and an operator's ranges.
    ops: BTreeMap<OpId, Op>,
    doing: Vec<Doing>,
    truth: BTreeMap<u64, Truth>,
    rotten: BTreeSet<(usize, SlotId)>,
    /// A page of a log has rotted that is read by starts on this generation and the next.
    rotten_log: Option<u64>,
    gone: Gone,
    next_op: u64,
    backing_failed_at: u64,
    validity: Validity,
    mode: WriteMode,
    seen: Seen,
    script: Vec<String>,
    error: Option<String>,
    options: Options,
    draining: bool,
    /// The log is slow: much is not durable when the power fails.
    lazy_log: bool,
    /// Reads of the cache device are slow: much happens while they are under way.
    slow_reads: bool,
    /// At what pace maintenance and clients do what they do.
    habits: Habits,
    /// Clients trim more than they do anything else: what is void stays so for a while.
    trims: bool,
    /// Slots that the durable map may still think taken: by a line, or by one that is not known.
    durable: BTreeMap<(usize, SlotId), Option<LineId>>,
    /// Records that are being written, by shard.
    writing: Vec<(usize, MapRecord)>,
    /// That of the superblock.
    generation: u64,
    /// Pages of the table that memory has room for, in a shard.
    frames: u32,
    /// Stores of volumes, and the places of those that were put aside.
    volumes: Vec<Store>,
    /// What stores are known by when a run ends.
    identities: Identities,
    aside: Vec<u64>,
    /// A volume that comes, goes or is forgotten.
    working: Option<Working>,
    /// What binds the memory of the maps to the run, and memory of an earlier run that turns up again.
    memory: Rc<RefCell<Memory>>,
    stale: Option<Survived>,
    /// A cache that is taken back.
    returning: Returning,
    /// It is given up now and then.
    is_fragile: bool,
    /// The device was not there at the start; and what memory has of an earlier run then.
    is_passed_by: bool,
    passed_by: Option<Survived>,
    /// The superblock with which the run has begun, or was taken back.
    former: Option<BlockSuperblock>,
    /// How far is read ahead, bytes; 0: not at all.
    most_ahead: u64,
    flushing: Flushing,
    /// The store is flushed at once, and no region has to be quiet for a while: half of the runs, in which bits go soon.
    flushes_at_once: bool,
    slow_store: bool,
    /// Whose turn it is to lock a range.
    turns: Turns,
    shares: Rc<Shares>,
    /// Ranges that the backing store forgets when they are locked.
    forgetting: BTreeSet<OpId>,
    /// Operations whose operator does not wait for lines.
    impatient: BTreeSet<OpId>,
    /// Operations of operators, but for the attachment; and who was given lines since they were looked at.
    operations: BTreeMap<OpId, Operation>,
    given: BTreeSet<OpId>,
    /// What keeps lines from flash, as in a daemon. In some runs there is a write budget, or the file system is full at times.
    purse: Purse,
    budgeted: bool,
    fills_up: bool,
    /// Whether lines that the client asks for that reads in sequence may have free slots only.
    scans_if_free: bool,
    /// Where a client that reads in sequence has come to, in sectors.
    scan: Option<u64>,
}

impl World {
    pub(crate) fn new(seed: u64, options: Options) -> World {
        let mut rng = Rng::new(seed);
        let layout = if seed >= SPARSE_FROM {
            // A slot for every line of the stretches, and no more.
            let span = REGIONS * (1 << 20);
            let layout =
                Layout::sparse_of(MOST_LINES * LINE, LINE as u32, span, SHARDS, PAGE_GROUPS);
            layout.expect("a layout")
        } else if rng.chance(0.5) {
            let layout = Layout::new((2 << 20) + (1 << 18), LINE as u32, WAYS, SHARDS);
            let layout = layout.expect("a layout");
            assert_eq!(layout.group_sets, 1, "a tiny cache");
            layout
        } else {
            let slots = u64::from(SHARDS * SEGMENTS * SEGMENT) * LINE;
            let layout = Layout::full_of((2 << 20) + slots, LINE as u32, SHARDS, SEGMENT);
            let layout = layout.expect("a layout");
            assert_eq!(layout.segments(), SEGMENTS, "a tiny cache");
            layout
        };
        let stretch = layout.region_groups * u64::from(GROUP_LINES);
        let shares = Shares::new(STRETCHES, stretch, SHARDS, layout.capacity());
        let device = Rc::new(RefCell::new(Device::new(layout.device, rng.fork(1))));
        let mode = [
            WriteMode::WriteThrough,
            WriteMode::WriteThrough,
            WriteMode::WriteUpdate,
            WriteMode::WriteAround,
        ][rng.below(4) as usize];
        let mut world = World {
            rng,
            time: 1,
            layout,
            device,
            backing: BTreeMap::new(),
            backing_ios: 0,
            volatile: BTreeMap::new(),
            shards: Vec::new(),
            maintenance: None,
            work: Work::default(),
            ended: 0,
            fuse: Arc::new(AtomicU64::new(u64::MAX)),
            queue: Queue::new(0, ahead::queue_config(&layout, 0)),
            held: Vec::new(),
            waiting: Waiting::default(),
            ops: BTreeMap::new(),
            doing: Vec::new(),
            truth: BTreeMap::new(),
            rotten: BTreeSet::new(),
            rotten_log: None,
            gone: Gone::default(),
            next_op: 1,
            backing_failed_at: 0,
            validity: Validity::default(),
            mode,
            seen: Seen::default(),
            script: Vec::new(),
            error: None,
            options,
            draining: false,
            lazy_log: false,
            slow_reads: false,
            habits: Habits::default(),
            trims: false,
            durable: BTreeMap::new(),
            writing: Vec::new(),
            generation: 0,
            frames: 0,
            volumes: Vec::new(),
            identities: Identities::default(),
            aside: Vec::new(),
            working: None,
            memory: Rc::new(RefCell::new(Memory::new(Words::heap(HEADER_WORDS), false))),
            stale: None,
            returning: Returning::default(),
            is_fragile: seed % 8 == 6,
            is_passed_by: false,
            passed_by: None,
            former: None,
            most_ahead: 0,
            purse: Purse::default(),
            budgeted: false,
            fills_up: false,
            flushing: Flushing::new(0, Nanos::from_millis(30)),
            flushes_at_once: seed.is_multiple_of(2),
            slow_store: seed % 4 == 1,
            turns: Turns::of(TURNS),
            shares: Rc::new(shares),
            forgetting: BTreeSet::new(),
            impatient: BTreeSet::new(),
            operations: BTreeMap::new(),
            given: BTreeSet::new(),
            scans_if_free: false,
            scan: None,
        };
        world.volumes = stores(if world.rng.chance(0.5) { 0 } else { world.rng.below(PER_LINE) });
        world.frames = FRAMES[world.rng.below(FRAMES.len() as u64) as usize];
        world.most_ahead = [0, 0, 64 << 10, 256 << 10][world.rng.below(4) as usize];
        world.lazy_log = world.rng.chance(0.25);
        world.slow_reads = world.rng.chance(0.25);
        world.trims = world.rng.chance(0.15);
        world.habits = Habits::of(seed, &mut world.rng);
        world.scans_if_free = seed % 5 < 2;
        world.budgeted = seed % 7 == 3;
        world.fills_up = seed % 7 == 5;
        world.seen.logs += u64::from(layout.segment > 0);
        world.seen.sparse += u64::from(layout.is_sparse());
        world.device.borrow_mut().fail_io = options.fail_device;
        world.format();
        world.begin(None);
        world
    }

    pub(crate) fn seen(&self) -> Seen {
        self.seen
    }

    /// I/Os of the cache device and of the backing store so far.
    pub(crate) fn ios(&self) -> (u64, u64) {
        (self.device.borrow().ios, self.backing_ios)
    }

    pub(crate) fn transcript(&self) -> Vec<String> {
        self.script.clone()
    }

    fn now(&self) -> Nanos {
        Nanos(self.time * 1_000_000)
    }

    fn io(&self) -> Charging {
        Charged::new(Io(self.device.clone()), self.purse.clone(), self.now())
    }

    // ---- what clients do ----

    fn random_sector(&mut self) -> u64 {
        let (first, sectors) = self.any_part();
        first + self.rng.below(sectors)
    }

    /// Where the volume of a sector ends; it may end within a line.
    fn end_of_stretch(&self, at: u64) -> u64 {
        self.volume_at(at).map_or(self.region_of(at), |v| self.volumes[v].end())
    }

    /// Where the last whole line of its volume ends: what lies behind is never cached.
    fn end_of_lines(&self, at: u64) -> u64 {
        self.end_of_stretch(at) / PER_LINE * PER_LINE
    }

    fn submit_random(&mut self) {
        let kind = match self.rng.below(100) {
            0..50 => PartKind::Read,
            50..85 => PartKind::Write,
            85..90 => PartKind::Zero,
            90..94 => PartKind::Trim,
            _ => PartKind::Prefetch,
        };
        let mut at = self.random_sector();
        let mut len = self.rng.range(1, 30);
        if self.rng.chance(0.6) {
            // Whole lines, as file systems do.
            at = at / PER_LINE * PER_LINE;
            len = len.div_ceil(PER_LINE) * PER_LINE;
        }
        len = len.min(self.end_of_stretch(at) - at);
        let kind = self.habitual(kind, at);
        let verdict = [
            Verdict::Admit,
            Verdict::Admit,
            Verdict::Admit,
            Verdict::Compete,
            Verdict::IfFree,
            Verdict::Reject,
        ][self.rng.below(6) as usize];
        self.submit_op(kind, at, len, verdict);
    }

    /// The volume of a sector, as `op` asks for it.
    fn stretch(&self, at: u64, op: OpId, if_free: bool) -> Stretch {
        let base = self.base_of(at) * SECTOR as u64;
        Stretch { base, whole: self.end_of_lines(at) * SECTOR as u64, op, if_free }
    }

    /// An operation on sectors `at..at + len` of a volume.
    fn submit_op(&mut self, kind: PartKind, at: u64, len: u64, verdict: Verdict) {
        self.submit_longer(kind, at, len, len, verdict);
    }

    /// The same, of which `asked` sectors are asked for: those behind the volume's end are nobody's.
    fn submit_longer(&mut self, kind: PartKind, at: u64, len: u64, asked: u64, verdict: Verdict) {
        let op = OpId(self.next_op);
        self.next_op += 1;
        self.script.push(format!("{} {op:?} {kind:?} {at} {asked}", self.time));
        self.begin_op(op, kind, at, len, false);
        // (Of the others admission says nothing.)
        let is_judged = matches!(kind, PartKind::Read | PartKind::Write);
        let volume = self.stretch(at, op, is_judged && verdict == Verdict::IfFree);
        self.seen.tails += u64::from(at + len > self.end_of_lines(at));
        let sectors = SECTOR as u64;
        let (from, bytes, fua) = (at * sectors - volume.base, asked * sectors, false);
        let op_asked = match kind {
            PartKind::Read => Asked::Read { at: from, len: bytes },
            PartKind::Write => {
                let content = Bytes::new(at * sectors, vec![sector(op.0); len as usize]);
                Asked::Write { at: from, len: bytes, bytes: content, fua }
            }
            PartKind::Zero => {
                Asked::Zero { at: from, len: bytes, fua, may_punch: true, fast: false }
            }
            PartKind::Trim => Asked::Trim { at: from, len: bytes, fua },
            PartKind::Prefetch => Asked::Advise { at: from, len: bytes },
        };
        let submit = Submit { volume, ticket: op, op: op_asked, holds: BlockKind::Unknown };
        self.tell(false, verdict, |queue, node, now, fx| queue.submit(node, now, fx, submit));
    }

    fn begin_op(&mut self, op: OpId, kind: PartKind, at: u64, len: u64, operators: bool) {
        let value = if kind == PartKind::Write { op.0 } else { 0 };
        let mut allowed = Vec::new();
        for s in at..at + len {
            let truth = self
                .truth
                .entry(s)
                .or_insert_with(|| Truth { settled: [0].into(), ..Truth::default() });
            if kind.changes() {
                truth.flying.push((op, value));
            }
            let mut set = truth.settled.clone();
            set.extend(truth.flying.iter().map(|f| f.1));
            allowed.push(set);
        }
        if kind.changes() {
            self.seen.writes += 1;
        } else {
            self.seen.reads += 1;
        }
        let op_state = Op {
            kind,
            at,
            value,
            got: vec![None; len as usize],
            allowed,
            began: self.time,
            operators,
        };
        self.ops.insert(op, op_state);
    }

    // ---- effects ----

    fn fail(&mut self, why: String) {
        self.error.get_or_insert(why);
    }

    fn deliver(&mut self, op: OpId, at: u64, bytes: &Bytes) {
        let Some(o) = self.ops.get_mut(&op) else {
            return self.fail(format!("bytes for {op:?}, which is over"));
        };
        for (to, from) in o.got[at as usize / SECTOR..].iter_mut().zip(bytes.sectors()) {
            *to = Some(value(from));
        }
    }

    /// An I/O is asked for.
    fn begin_io(&mut self, event: Event) {
        self.begin_io_of(event, false);
    }

    fn begin_io_of(&mut self, mut event: Event, upkeep: bool) {
        match &mut event {
            Event::BackingRead(_, stretch, at, len, ahead) => {
                let (op, at, len, ahead) = (stretch.op, *at, *len, *ahead);
                self.store_is_asked(op, at, len, ahead);
            }
            // Of a range as a whole, what lies behind the volume's end is nobody's.
            Event::BackingChange(_, _, at, len, None)
                if *at / SECTOR as u64 == self.region_of(*at / SECTOR as u64) =>
            {
                let end = self.end_of_stretch(*at / SECTOR as u64) * SECTOR as u64;
                *len = (*len).min(end - *at);
                self.seen.voids += u64::from(self.shards.iter().any(|s| s.wants_sweep()));
            }
            _ => {}
        }
        self.check_slots(&event);
        self.check_changes(&event);
        self.doing.push(Doing { event, read: None, landed: None, upkeep });
    }

    /// The client has its answer.
    fn finish_op(&mut self, op: OpId, failed: bool) {
        let Some(o) = self.ops.remove(&op) else {
            return self.fail(format!("{op:?} is answered twice"));
        };
        let Op { kind, at, value, began, got, allowed, .. } = o;
        if failed && self.backing_failed_at < began {
            return self.fail(format!("{op:?} failed though the backing store did not"));
        }
        for (i, s) in (at..).zip(0..got.len()).map(|(s, i)| (i, s)) {
            let truth = self.truth.get_mut(&s).expect("it was begun");
            if kind.changes() {
                truth.flying.retain(|f| f.0 != op);
                if failed {
                    // It may have happened, before a read that is under way looked or after.
                    truth.settled.insert(value);
                    truth.acked.push((self.time, value));
                } else {
                    // Writes that were answered while this one was under way may have come before it or after.
                    let beside = truth.acked.iter().filter(|a| a.0 >= began).map(|a| a.1);
                    truth.settled = beside.chain([value]).collect();
                    truth.acked.push((self.time, value));
                }
                continue;
            }
            if failed || kind == PartKind::Prefetch {
                continue;
            }
            let Some(v) = got[i] else {
                self.error.get_or_insert(format!("{op:?}: sector {s} was not delivered"));
                return;
            };
            let since: Vec<u64> =
                truth.acked.iter().filter(|a| a.0 >= began).map(|a| a.1).collect();
            if !allowed[i].contains(&v)
                && !since.contains(&v)
                && !truth.flying.iter().any(|f| f.1 == v)
            {
                let known = &truth.settled;
                self.error.get_or_insert(format!(
                    "{op:?}: sector {s} is {v}, allowed {:?}, since {since:?}, settled {known:?}",
                    allowed[i]
                ));
                return;
            }
            if truth.flying.is_empty() && since.is_empty() && truth.settled.contains(&v) {
                truth.settled = [v].into();
            }
        }
    }

    // ---- devices ----

    fn flash_at(&self, shard: usize, slot: SlotId) -> u64 {
        self.layout.slot_at(shard as u32, slot.0)
    }

    /// One I/O happens, or is reported.
    fn advance(&mut self) {
        self.go_on();
        if self.doing.is_empty() {
            return;
        }
        let at = self.rng.below(self.doing.len() as u64) as usize;
        let share = match self.doing[at].event {
            // Of some lines only: the others go on.
            Event::FlashRead(_, _, line, _) if line.0.is_multiple_of(5) => 0.005,
            Event::Copy(..) => 0.2,
            _ => 1.0,
        };
        if self.slow_reads && !self.draining && !self.rng.chance(share) {
            return;
        }
        if self.is_slow_write(at) {
            return;
        }
        if self.doing[at].landed.is_none() {
            let event = self.doing[at].event.clone();
            let shard = event.shard().unwrap_or_default();
            let outcome = match event {
                Event::FlashRead(_, slot, _, lines) => {
                    if self.device.borrow_mut().fails() {
                        Err(FlashError::Device)
                    } else {
                        Ok(self
                            .device
                            .borrow()
                            .read(self.flash_at(shard, slot), lines as usize * PER_LINE as usize))
                    }
                }
                Event::Copy(_, from, to, lines) => match self.doing[at].read.take() {
                    Some(bytes) => self.write_flash(shard, to, bytes),
                    None if self.device.borrow_mut().fails() => {
                        self.device.borrow_mut().not_written(u64::from(lines) * LINE);
                        Err(FlashError::Device)
                    }
                    None => {
                        // First it reads; what else happens may come in between.
                        let (from, sectors) =
                            (self.flash_at(shard, from), lines as usize * PER_LINE as usize);
                        let bytes = self.device.borrow().read(from, sectors);
                        self.doing[at].read = Some(bytes);
                        return;
                    }
                },
                Event::Merge(_, merge, bytes) => match self.doing[at].read.take() {
                    Some(before) => {
                        let after = overlay(&before, merge, &bytes);
                        let written = self.write_flash(shard, merge.to, after);
                        written.map(|after| [before, after].concat())
                    }
                    None if self.device.borrow_mut().fails() => {
                        self.device.borrow_mut().not_written(LINE);
                        Err(FlashError::Device)
                    }
                    None => {
                        let from = self.flash_at(shard, merge.from);
                        let bytes = self.device.borrow().read(from, PER_LINE as usize);
                        self.doing[at].read = Some(bytes);
                        return;
                    }
                },
                Event::FlashWrite(_, slot, bytes) => {
                    self.write_flash(shard, slot, bytes.sectors().to_vec())
                }
                Event::Load(_, page) => {
                    let at = self.layout.table_at(shard as u32, page);
                    if self.device.borrow_mut().fails() {
                        Err(FlashError::Device)
                    } else {
                        Ok(self.device.borrow().read(at, 4096 / SECTOR))
                    }
                }
                Event::BackingRead(_, _, at, len, _) => {
                    if self.backing_fails() {
                        Err(FlashError::Device)
                    } else {
                        let first = at / SECTOR as u64;
                        let count = u64::from(len) / SECTOR as u64;
                        Ok((first..first + count)
                            .map(|s| sector(self.backing.get(&s).copied().unwrap_or(0)))
                            .collect())
                    }
                }
                Event::BackingChange(_, _, at, len, bytes) => {
                    let torn = self.backing_fails();
                    self.change_backing(at, len, bytes.as_ref(), torn);
                    if torn { Err(FlashError::Device) } else { Ok(Vec::new()) }
                }
            };
            self.doing[at].landed = Some(outcome);
            if self.rng.chance(0.5) {
                return;
            }
        }
        let Doing { event, landed, upkeep, .. } = self.doing.swap_remove(at);
        // One that ends while maintenance is at work its shard hears of at once.
        let at_work = self.maintenance.is_none();
        self.ended += usize::from(upkeep && at_work);
        let upkeep = upkeep && !at_work;
        let outcome = landed.expect("it happened");
        if outcome.is_err() && event.shard().is_none() {
            self.backing_failed_at = self.time;
        }
        let all = Verdict::Admit;
        match event {
            Event::FlashRead(io, slot, line, _) => {
                self.check_read(io.shard as usize, slot, line);
                self.tell(false, all, |queue, node, now, _| match outcome {
                    Ok(read) => {
                        let (sums, bytes) = (crcs(&read), Bytes::new(line.0 * LINE, read));
                        queue.flash_read(node, now, io, line, Ok((&sums, bytes)));
                    }
                    Err(e) => queue.flash_read(node, now, io, line, Err(e)),
                });
            }
            Event::FlashWrite(io, ..) | Event::Copy(io, ..) => {
                let sums = outcome.map(|b| crcs(&b));
                let sums = sums.as_deref().map_err(|&e| e);
                if upkeep {
                    self.maintain(|m, now, shards, _, _| m.flash_written(now, shards, io, sums));
                } else {
                    self.tell(false, all, |q, node, now, _| q.flash_written(node, now, io, sums));
                }
            }
            Event::Merge(io, ..) => {
                let sums = outcome.map(|b| crcs(&b)).map(|s| (s[0], s[1]));
                self.tell(false, all, |q, node, now, _| q.merged(node, now, io, sums));
            }
            Event::Load(io, page) => {
                self.seen.loads += 1;
                let at = (io.shard, page);
                let slots = outcome.and_then(|bytes| {
                    page_slots(&self.layout, self.generation, at, &bytes.concat())
                });
                let slots = slots.as_deref().map_err(|&e| e);
                if upkeep {
                    self.maintain(|m, now, shards, _, _| m.page_loaded(now, shards, io, slots));
                } else {
                    self.tell(false, all, |q, node, now, _| q.page_loaded(node, now, io, slots));
                }
            }
            Event::BackingRead(job, stretch, at, _, ahead) => {
                let read = outcome.map(|sectors| Bytes::new(at, sectors)).map_err(IoFailed::from);
                let if_free = stretch.if_free && !ahead;
                self.tell(if_free, all, |q, node, now, fx| q.store_read(node, now, fx, job, read));
            }
            Event::BackingChange(job, stretch, ..) => {
                let result = outcome.map(|_| ()).map_err(IoFailed::from);
                // (In a log a line that is written again goes to another slot, on no terms.)
                let if_free = stretch.if_free && self.layout.segment == 0;
                self.tell(if_free, all, |q, node, now, fx| {
                    q.store_changed(node, now, fx, job, result);
                });
            }
        }
    }

    fn write_flash(
        &mut self,
        shard: usize,
        slot: SlotId,
        bytes: Vec<[u8; SECTOR]>,
    ) -> Result<Vec<[u8; SECTOR]>, FlashError> {
        let to = self.flash_at(shard, slot);
        let lines = bytes.len() as u32 / PER_LINE as u32;
        if self.finds_no_space() {
            self.device.borrow_mut().not_written(u64::from(lines) * LINE);
            return Err(FlashError::NoSpace);
        }
        if self.device.borrow_mut().fails() {
            let mut device = self.device.borrow_mut();
            match device.dead {
                true => device.not_written(u64::from(lines) * LINE),
                false => device.write_torn(to, &bytes),
            }
            return Err(FlashError::Device);
        }
        self.device.borrow_mut().write(to, &bytes);
        for i in 0..lines {
            self.rotten.remove(&(shard, SlotId(slot.0 + i)));
        }
        Ok(bytes)
    }

    /// No segment may be written anew while it is read: a client would wait for the store though its line was on flash.
    fn check_read_segments(&mut self) {
        for (shard, cell) in (0u32..).zip(&self.shards) {
            if let Some(segment) = cell.map().free_while_read() {
                let why = format!("shard {shard}: segment {segment} is free, and is read");
                self.error.get_or_insert(why);
            }
        }
    }

    fn backing_fails(&mut self) -> bool {
        let chosen = self.options.fail_backing == Some(self.backing_ios);
        self.backing_ios += 1;
        let fails = chosen || (!self.draining && self.rng.chance(0.01));
        if fails {
            self.backing_failed_at = self.time;
        }
        fails
    }

    fn change_backing(&mut self, at: u64, len: u64, bytes: Option<&Bytes>, torn: bool) {
        let first = at / SECTOR as u64;
        for (i, s) in (first..first + len / SECTOR as u64).enumerate() {
            if !torn || self.rng.chance(0.5) {
                self.put_backing(s, bytes.map_or(0, |bytes| value(&bytes.sectors()[i])));
            }
        }
    }

    // ---- what happens next ----

    /// Whether bits, or more of the write budget, are asked for that maintenance has not heard of.
    fn is_asked(&self) -> bool {
        let Work { asks, ranges, budget, .. } = &self.work;
        !asks.is_empty() || !ranges.is_empty() || !budget.is_empty()
    }

    fn count(&mut self) {
        self.seen.holes += std::mem::take(&mut self.device.borrow_mut().holes);
        self.seen.unnoted += self.validity.refused.take();
        self.seen.stayed += self.shares.stayed.get();
        self.seen.at_ceiling += self.shares.at_ceiling.get();
        for shard in &self.shards {
            let s = shard.stats();
            self.seen.hits += s.read_hits;
            self.seen.shared += s.read_shared;
            self.seen.updates += s.updated;
            self.seen.evicted += s.evicted;
            self.seen.cancelled += s.fill_cancelled;
            self.seen.fills_dropped += s.fill_dropped;
            self.seen.corrupt += s.corrupt;
            self.seen.flash_errors += s.flash_errors;
            self.seen.backing_errors += s.backing_errors;
            self.seen.waited += s.waited;
            self.seen.copied += s.copied;
            self.seen.cleaned += s.cleaned;
        }
    }

    fn act(&mut self) -> Result<(), String> {
        let share = if self.returning.is_under_way() { 0.02 } else { 0.03 };
        if (!self.is_enabled() || self.returning.is_under_way()) && self.rng.chance(share) {
            // A device that must not be used is taken back, or the next process finds it.
            match self.rng.below(6) {
                0 => self.kill(),
                1 | 2 => self.power_cut(),
                _ => self.begin_taking_back(),
            }
            return Ok(());
        }
        self.change_habits();
        let idle = self.ops.len() < if self.trims { 2 } else { 24 };
        match self.rng.below(1000) {
            0..100 if idle && self.most_ahead > 0 && !self.trims => self.scan_on(),
            0..300 if idle => self.submit_random(),
            300..304 if self.ops.len() < 24 => self.begin_range(),
            447..449 if self.ops.len() < 24 => self.begin_drop(),
            // The durable map names for long what was dropped.
            556..560 if self.ops.len() < 24 => self.begin_forgetting(),
            // A client's flush: of another session than the log's.
            560..563 => {
                self.seen.flushes += 1;
                self.store_is_durable();
            }
            563..569 => self.begin_attachment(),
            // The device is given up though it works again at once; that may not be noted but on itself.
            573..579 if self.is_fragile => {
                self.validity.unnoted.set(self.is_enabled() && self.rng.chance(0.7));
                self.work.give_up.get_or_insert("everything fails".to_owned());
            }
            // A volume that was to go stays: its bits are in a hurry still, and clients write.
            569..573 => self.hurry_any(),
            579..583 if idle => self.change_what_has_gone(),
            540..556 if self.lazy_log && idle => self.begin_drop(),
            304..308 => (0..if self.lazy_log { 4 } else { 1 }).for_each(|_| self.rot()),
            308..312 => {
                // A kill in the middle of what comes next.
                let stores = self.rng.below(40);
                self.fuse.store(stores, Ordering::Relaxed);
            }
            312..316 => {
                let left = self.rng.below(8);
                self.device.borrow_mut().fuse = left;
            }
            316..319 => self.kill(),
            319..325 => self.power_cut(),
            325..327 => self.stop()?,
            327 => {
                self.seen.lost_devices += 1;
                self.device.borrow_mut().dead = true;
            }
            328..440 => {
                // A client that waits for a bit is served by a slow log too.
                if !self.lazy_log || self.is_asked() || self.rng.chance(0.05) {
                    self.step_log();
                    // What was asked for while the log wrote is not durable: the power fails here more often than elsewhere.
                    if self.is_asked() && self.rng.chance(0.03) {
                        self.power_cut();
                    }
                }
            }
            449..490 if self.trims && self.ops.len() < 4 => self.begin_range(),
            441..447 | 490..540 if self.trims || self.rng.chance(0.2) => {
                let (shard, steps) = (self.rng.below(u64::from(SHARDS)), self.rng.range(1, 30));
                let shard = &mut self.shards[shard as usize];
                self.seen.sweeps += u64::from(shard.wants_sweep());
                shard.sweep(steps as u32);
            }
            440 => {
                // A quiet spell: regions become quiet too, and lines are counted.
                self.shares.count(&self.shards);
                self.spell();
            }
            _ => self.advance(),
        }
        Ok(())
    }

    pub(crate) fn step(&mut self) -> Result<(), String> {
        self.time += 1;
        let outcome = catch_unwind(AssertUnwindSafe(|| -> Result<(), String> {
            self.act()?;
            self.go_on();
            self.flush_on();
            if self.rng.chance(0.7) {
                self.attach_on();
                self.take_back_on();
            }
            Ok(())
        }));
        match outcome {
            Ok(result) => result?,
            Err(payload) if payload.is::<Killed>() => {
                self.seen.kills_in_store += 1;
                self.kill();
            }
            Err(payload) => resume_unwind(payload),
        }
        if self.device.borrow().blown {
            self.seen.kills_in_log += 1;
            if self.rng.chance(0.5) { self.kill() } else { self.power_cut() }
        }
        self.check_read_segments();
        self.check_notes();
        self.check_charged();
        let complaint = self.device.borrow_mut().complaint.take();
        if let Some(why) = self.error.take().or(complaint) {
            return Err(why);
        }
        if self.rng.chance(0.2) {
            self.check_map()?;
        }
        Ok(())
    }

    pub(crate) fn finish(&mut self) -> Result<(), String> {
        self.drain()?;
        self.check_map()?;
        self.stop()?;
        if let Some(why) = self.error.take() {
            return Err(why);
        }
        self.count();
        Ok(())
    }
}

/// A line with bytes laid over it.
fn overlay(before: &[[u8; SECTOR]], merge: Merge, bytes: &Bytes) -> Vec<[u8; SECTOR]> {
    let mut after = before.to_vec();
    let first = ((merge.at - merge.line.0 * LINE) / SECTOR as u64) as usize;
    after[first..first + bytes.sectors().len()].copy_from_slice(bytes.sectors());
    after
}
