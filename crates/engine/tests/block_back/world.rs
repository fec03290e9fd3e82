//! The world around the queues: clients, devices that take their time, maintenance, and what must hold.

mod changes;
mod clients;
mod node;
pub(crate) mod operators;
mod start;
mod truth;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use larder_base::{Nanos, Rng};
use larder_engine::block::map::Slot;
use larder_engine::block::node::calls::{Copying, Fill, Load, Message, OP_BITS, send};
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::event::{ShardIo, StoreOp};
use larder_engine::block::node::failing::FlashError;
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::node::maintenance::{AtNode, Effects, Maintenance, Turn};
use larder_engine::block::node::queue::Queue;
use larder_engine::block::node::start::memory::Memory;
use larder_engine::block::writeback::destager::{self, Pace};
use larder_engine::block::writeback::log::{Config, Found, Said};
use larder_engine::block::writeback::marker::LOOK;
use larder_engine::block::writeback::throttle::Age;
use larder_engine::block::writeback::volume_log::{Grain, Order};
use larder_engine::block::{IoFailed, Merge, OpId, SlotId};
use larder_format::Uuid;
use larder_format::block::write_log::SegmentGeometry;
use larder_format::block::{BlockSuperblock, Layout};
use larder_policy::block::VolumeId;

use crate::device::{Device, SECTOR, Store};
use crate::parts::{Bytes, Carried, Effect, Io, LINE, Model, Vol, filled, flat, sums};
use changes::Beside;
use clients::Op;
use node::Shared;
use truth::Truth;

type Checked = Result<(), String>;

const SHARDS: u32 = 2;
const KEY: u64 = 0x5eed;
const CACHE: Uuid = Uuid([7; 16]);

/// What a history is made of.
#[derive(Clone, Copy, Default)]
pub(crate) struct Setup {
    /// A fault of the block engine, and one of the write log.
    #[cfg(feature = "planted")]
    pub(crate) fault: Option<larder_engine::block::Planted>,
    #[cfg(feature = "planted")]
    pub(crate) in_log: Option<larder_engine::block::writeback::Planted>,
    /// The steps are printed.
    pub(crate) trace: bool,
}

/// How often what was met.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) reads: u64,
    pub(crate) logged_reads: u64,
    pub(crate) changes: u64,
    pub(crate) flushes: u64,
    pub(crate) status: u64,
    pub(crate) dirty_status: u64,
    pub(crate) destaged: u64,
    pub(crate) store_failures: u64,
    pub(crate) flash_failures: u64,
    pub(crate) fills: u64,
    pub(crate) merges: u64,
    pub(crate) updates: u64,
    pub(crate) hits: u64,
    pub(crate) ranges: u64,
    pub(crate) kills: u64,
    pub(crate) power_cuts: u64,
    pub(crate) warm: u64,
    pub(crate) through: u64,
    pub(crate) images: u64,
    pub(crate) failed_images: u64,
    pub(crate) closed: u64,
    pub(crate) failed_flushes: u64,
    pub(crate) operators: u64,
    pub(crate) operators_io: u64,
    pub(crate) went_through: u64,
    pub(crate) came_back: u64,
    pub(crate) stayed: u64,
    pub(crate) failed_marks: u64,
}

impl Seen {
    fn all(&mut self) -> [(&'static str, &mut u64); 28] {
        macro_rules! all { ($($f:ident)*) => { [$((stringify!($f), &mut self.$f)),*] } }
        all!(reads logged_reads changes flushes status dirty_status destaged store_failures flash_failures fills
            merges updates hits ranges kills power_cuts warm through images failed_images closed failed_flushes
            operators operators_io went_through came_back stayed failed_marks)
    }

    pub(crate) fn add(&mut self, mut other: Seen) {
        let others = other.all().map(|(_, n)| *n);
        self.all().into_iter().zip(others).for_each(|((_, n), more)| *n += more);
    }

    pub(crate) fn assert_met_everything(&mut self) {
        println!("{self:?}");
        let hardly: Vec<&str> =
            self.all().into_iter().filter(|(_, n)| **n < 20).map(|(name, _)| name).collect();
        assert!(hardly.is_empty(), "hardly met: {hardly:?}");
    }
}

/// How a volume writes back.
#[derive(Clone, Copy, Debug)]
struct Kind {
    destage: destager::Config,
    bound: u64,
    age: Option<Age>,
}

/// What a process has.
struct Life {
    shared: Shared,
    queues: Vec<Queue<Model>>,
    maintenance: Maintenance,
    memory: Memory,
}

/// An I/O under way.
struct Doing {
    io: Io,
    /// Of a copy or a merge: what it has read.
    read: Option<Vec<u8>>,
    /// What it brought, once it has happened at the device.
    landed: Option<Landed>,
    /// Much happens while it is under way.
    is_slow: bool,
}

enum Landed {
    Bytes(Vec<u8>),
    Extents(Vec<crate::parts::Extent>),
    Done,
    Failed,
}

pub(crate) struct World {
    rng: Rng,
    setup: Setup,
    now: Nanos,
    /// Counts what clients do and hear.
    tick: u64,
    layout: Layout,
    log: Config,
    device: Rc<RefCell<Device>>,
    stores: Vec<Store>,
    /// Volumes that write back, and those that write through.
    kinds: Vec<Option<Kind>>,
    queues: usize,
    /// `None` in the midst of a restart alone.
    life: Option<Life>,
    doing: Vec<Doing>,
    ops: BTreeMap<u64, Op>,
    next_op: u64,
    truth: Vec<Truth>,
    /// What a start has found is durable.
    started: bool,
    /// The power was cut since then.
    weak: bool,
    /// Of a thousand changes and reads of stores so many fail.
    failures: u64,
    /// Markers cannot be written, now and then.
    marks_fail: bool,
    store_failed: u64,
    /// By volume: when what its clients waited for was let go of.
    let_go: Vec<u64>,
    /// The log's device has begun to fail; it may do so in this run; and volumes have markers, which say what is left of it.
    failing: bool,
    may_fail: bool,
    marked: bool,
    /// The stores do not answer.
    stuck: bool,
    /// Reads of devices and stores take their time.
    slow_reads: bool,
    /// How often crashes happen: in some runs there is one long life, in which segments come round.
    crashes: f64,
    /// The loss of the cache is tried at every I/O of a store or the log.
    loses: bool,
    /// Volumes change over between writing back and through.
    changes: bool,
    /// Of each volume what is said of it.
    beside: Vec<Beside>,
    /// The number that the next volume gets that comes to write back.
    next_attachment: u32,
    pub(crate) seen: Seen,
}

fn kind(rng: &mut Rng, area: u64) -> Kind {
    let orders = [Order::Any, Order::Ordered(Grain::Flush), Order::Ordered(Grain::Completion)];
    let order = orders[rng.below(3) as usize];
    let pace = match rng.below(6) {
        0 => Pace::AtBound,
        1 => Pace::Periodic(Nanos::from_millis(rng.range(1, 200))),
        _ => Pace::Async,
    };
    let most = [8 << 10, 32 << 10, 1 << 20][rng.below(3) as usize];
    let depth = rng.range(1, 5) as u32;
    let age = (pace != Pace::AtBound && rng.chance(0.3))
        .then(|| Age { most: Nanos::from_millis(rng.range(5, 200)), hard: rng.chance(0.5) });
    let bound = [24 << 10, 64 << 10, area / 3, area][rng.below(4) as usize];
    Kind { destage: destager::Config { order, pace, most, depth }, bound, age }
}

impl World {
    pub(crate) fn new(seed: u64, setup: Setup) -> Result<World, String> {
        let mut rng = Rng::new(seed);
        let layout = match rng.below(2) {
            0 => Layout::new((2 << 20) + (1 << 18), LINE as u32, 2, SHARDS),
            _ => Layout::full_of((2 << 20) + 64 * LINE, LINE as u32, SHARDS, 4),
        };
        let layout = layout.expect("a layout");
        let segment: u32 = if rng.chance(0.3) { 32 << 10 } else { 16 << 10 };
        let geometry = SegmentGeometry::new(segment, SECTOR as u32).expect("a geometry");
        let segments = rng.range(8, 16) as u32;
        let memory = if rng.chance(0.7) { 64 << 20 } else { rng.range(1, 40_000) };
        let at = layout.device.next_multiple_of(4096);
        let (cache, run, depth, wall) = (CACHE, 1, rng.range(1, 4) as u32, 1 << 60);
        let log = Config { cache, run, at, geometry, segments, depth, memory, wall };
        let area = u64::from(segment) * u64::from(segments);
        let device = Rc::new(RefCell::new(Device::new(at + area)));
        start::format(&device, layout, &mut rng);
        let count = rng.range(1, 4) as usize;
        let sectors = |rng: &mut Rng| 8 * rng.range(24, 48) + rng.below(8);
        let stores: Vec<Store> = (0..count).map(|_| Store::new(sectors(&mut rng))).collect();
        let mut kinds: Vec<Option<Kind>> = (0..count).map(|_| Some(kind(&mut rng, area))).collect();
        if count > 1 && rng.chance(0.3) {
            kinds[count - 1] = None;
        }
        let may_change = seed % 4 == 1;
        let order = |v: usize| kinds[v].map(|kind| kind.destage.order);
        let beside = (0..count).map(|v| changes::beside(v, order(v))).collect();
        let mut world = World {
            setup,
            now: Nanos(1),
            tick: 0,
            layout,
            log,
            device,
            truth: stores.iter().map(|store| Truth::new(store.sectors())).collect(),
            stores,
            kinds,
            queues: rng.range(2, 4) as usize,
            life: None,
            doing: Vec::new(),
            ops: BTreeMap::new(),
            next_op: 1,
            started: false,
            weak: false,
            marks_fail: true,
            failures: [0, 0, 5, 30][rng.below(4) as usize],
            store_failed: 0,
            let_go: vec![0; count],
            failing: false,
            may_fail: rng.chance(0.2),
            marked: rng.chance(0.7),
            stuck: false,
            slow_reads: rng.chance(0.3),
            crashes: [0.05, 0.3, 1.0][rng.below(3) as usize],
            loses: seed % 16 == 9,
            changes: false,
            beside,
            next_attachment: count as u32 + 1,
            seen: Seen::default(),
            rng,
        };
        // (Where the log fails that has its own steps.)
        world.changes = may_change && world.marked && !world.may_fail;
        if world.changes {
            // Lives are to be long enough for more than one.
            world.crashes = world.crashes.min(0.15);
        }
        world.begin(None, truth::Look::Killed, true)?;
        Ok(world)
    }

    fn life(&mut self) -> &mut Life {
        self.life.as_mut().expect("a run")
    }

    fn says(&self, what: impl FnOnce() -> String) {
        if self.setup.trace {
            println!("{:>9.3} ms {:>5}  {}", self.now.0 as f64 / 1e6, self.tick, what());
        }
    }

    /// A queue is called.
    fn tell<R>(
        &mut self,
        queue: usize,
        f: impl FnOnce(&mut Queue<Model>, &Shared, Nanos, &mut Carried) -> R,
    ) -> Result<R, String> {
        let now = self.now;
        let Life { shared, queues, .. } = self.life();
        let mut carried = Carried::new(queue, &shared.volumes);
        let result = f(&mut queues[queue], shared, now, &mut carried);
        for said in carried.said {
            match said {
                Effect::Io(io) => self.push(io),
                Effect::Deliver(op, at, bytes) => self.delivered(op, at, bytes.as_slice())?,
                Effect::Zeros(op, at, len) => self.delivered(op, at, &vec![0; len as usize])?,
                Effect::Answer(op, outcome) => self.answered(op, outcome)?,
            }
        }
        Ok(result)
    }

    /// An I/O is asked for.
    fn push(&mut self, mut io: Io) {
        match &mut io {
            Io::LogFlush(_, _, mark) => *mark = self.device.borrow().mark(),
            Io::StoreChange(_, _, volume, _, mark) => *mark = self.stores[volume.number].mark(),
            Io::StoreFlush(volume, _, mark) => *mark = self.stores[volume.0 as usize].mark(),
            Io::Look(_, began) => *began = self.now,
            _ => {}
        }
        self.says(|| format!("begins {io:?}"));
        let is_slow = self.slow_reads && self.rng.chance(0.2);
        self.doing.push(Doing { io, read: None, landed: None, is_slow });
    }

    /// A queue looks into its mailbox. Returns whether there was anything.
    fn look_into_mail(&mut self, queue: usize) -> Result<bool, String> {
        self.tell(queue, |queue, node, now, fx| {
            queue.take_mail(node);
            let any = queue.turn(node, now, fx);
            queue.tick(node, now, fx);
            any
        })
    }

    // ---- maintenance ----

    fn maintain(
        &mut self,
        f: impl FnOnce(
            &mut Maintenance,
            Nanos,
            &mut AtNode<'_, Model, Shared>,
            &mut Charged<crate::device::MapIo, &larder_engine::block::node::limits::Limits>,
            &mut Begun,
        ),
    ) {
        let (now, device) = (self.now, self.device.clone());
        let Life { shared, maintenance, .. } = self.life();
        let mut io = Charged::new(crate::device::MapIo(device), &*shared.limits, now);
        let mut begun = Begun::default();
        f(maintenance, now, &mut AtNode::new(shared, SHARDS), &mut io, &mut begun);
        if begun.given_up {
            shared.enabled.set(false);
        }
        begun.io.into_iter().for_each(|io| self.push(io));
    }

    /// A turn of maintenance.
    fn step_log(&mut self) {
        let work = std::mem::take(&mut *self.life().shared.work.borrow_mut());
        self.maintain(|m, now, shards, io, fx| m.take(now, work, shards, io, fx));
        self.maintain(|m, now, shards, io, fx| {
            let _: Turn = m.turn(now, shards, io, fx);
        });
    }

    // ---- devices ----

    fn store_fails(&mut self) -> bool {
        let fails = self.failures > 0 && self.rng.below(1000) < self.failures;
        self.seen.store_failures += u64::from(fails);
        fails
    }

    /// An I/O of the slots fails. (Those of the log do not: `writeback_model` has one that fails.)
    fn flash_fails(&mut self) -> bool {
        let fails = self.failures > 0 && self.rng.below(1000) < self.failures;
        self.seen.flash_failures += u64::from(fails);
        fails
    }

    /// The sectors that a change of a store fills, each with the number of the write.
    fn filled_by(&self, volume: &Vol, change: &StoreOp<Bytes>) -> Vec<(u64, u64)> {
        let v = volume.number;
        let sectors = |at: u64, len: u64| at / SECTOR as u64..(at + len).div_ceil(SECTOR as u64);
        let mut all: Vec<(u64, u64)> = Vec::new();
        match change {
            StoreOp::Write { at, len, bytes, .. } => {
                let sectors = sectors(*at, *len).zip(bytes.as_slice().chunks_exact(SECTOR));
                // (What is no write's is seen by whoever reads it.)
                all.extend(sectors.map(|(s, b)| (s, filled(v, s, b).unwrap_or(u64::MAX - 1))));
            }
            StoreOp::Zero { at, len, .. } | StoreOp::Trim { at, len, .. } => {
                all.extend(sectors(*at, *len).map(|s| (s, 0)));
            }
            StoreOp::Flush | StoreOp::Status { .. } => {}
        }
        let end = self.stores[v].sectors();
        all.retain(|(sector, _)| *sector < end);
        all
    }

    /// A store changes; of one that fails some sectors.
    fn change_store(&mut self, volume: &Vol, change: &StoreOp<Bytes>, mark: usize, torn: bool) {
        let v = volume.number;
        if matches!(change, StoreOp::Flush) && !torn {
            self.stores[v].flush(mark);
        }
        let fua = match change {
            StoreOp::Write { fua, .. } | StoreOp::Zero { fua, .. } | StoreOp::Trim { fua, .. } => {
                *fua
            }
            StoreOp::Flush | StoreOp::Status { .. } => false,
        };
        for (sector, number) in self.filled_by(volume, change) {
            if !torn || self.rng.chance(0.5) {
                self.stores[v].write(sector, number);
            }
        }
        if fua && !torn {
            let mark = self.stores[v].mark();
            self.stores[v].flush(mark);
        }
    }

    /// It happens at the device, if it has not; `None`: it goes on.
    fn lands(&mut self, which: usize) -> Option<Landed> {
        let done = Some(Landed::Done);
        let doing = &mut self.doing[which];
        let read = doing.read.take();
        // (What is asked for stays in its place: it is put back below.)
        let io = std::mem::replace(&mut doing.io, Io::StoreFlush(VolumeId(0), 0, 0));
        let is_slots =
            matches!(io, Io::FlashRead(..) | Io::FlashWrite(..) | Io::Copy(..) | Io::Merge(..));
        let flash_fails = is_slots && self.flash_fails();
        let landed = match &io {
            _ if flash_fails => {
                self.cut_short(&io, read.as_deref());
                Some(Landed::Failed)
            }
            Io::FlashRead(_, at, slot, _, lines) => {
                let at = self.slot_at(at.shard, *slot);
                let bytes = *lines as usize * LINE as usize;
                Some(Landed::Bytes(self.device.borrow().read(at, bytes).to_vec()))
            }
            Io::FlashWrite(_, at, slot, bytes) => {
                let at = self.slot_at(at.shard, *slot);
                self.device.borrow_mut().write(at, bytes.as_slice());
                Some(Landed::Bytes(bytes.as_slice().to_vec()))
            }
            Io::Copy(at, from, to, lines) => match read {
                Some(bytes) => {
                    self.device.borrow_mut().write(self.slot_at(at.shard, *to), &bytes);
                    Some(Landed::Bytes(bytes))
                }
                None => {
                    let at = self.slot_at(at.shard, *from);
                    let bytes = *lines as usize * LINE as usize;
                    self.doing[which].read = Some(self.device.borrow().read(at, bytes).to_vec());
                    None
                }
            },
            Io::Merge(_, at, merge, bytes) => match read {
                Some(before) => {
                    let after = laid_over(&before, *merge, bytes);
                    self.device.borrow_mut().write(self.slot_at(at.shard, merge.to), &after);
                    Some(Landed::Bytes([before, after].concat()))
                }
                None => {
                    let at = self.slot_at(at.shard, merge.from);
                    let bytes = self.device.borrow().read(at, LINE as usize).to_vec();
                    self.doing[which].read = Some(bytes);
                    None
                }
            },
            Io::StoreRead(_, _, volume, at, len) => match self.store_fails() {
                true => Some(Landed::Failed),
                false => {
                    let (v, mut bytes) = (volume.number, Vec::new());
                    for sector in at / SECTOR as u64..(at + len) / SECTOR as u64 {
                        let number = match sector < self.stores[v].sectors() {
                            true => self.stores[v].see(sector),
                            false => 0,
                        };
                        bytes.extend(crate::parts::fill(v, number, sector));
                    }
                    Some(Landed::Bytes(bytes))
                }
            },
            Io::StoreChange(_, _, volume, StoreOp::Status { at, len, .. }, _) => {
                let store = &self.stores[volume.number];
                let extent = |sector| match store.see(sector) {
                    0 => crate::parts::Extent::Hole,
                    _ => crate::parts::Extent::Data,
                };
                let sectors = at / SECTOR as u64..(at + len) / SECTOR as u64;
                Some(Landed::Extents(sectors.map(extent).collect()))
            }
            Io::StoreChange(_, _, volume, change, mark) => {
                let fails = !matches!(change, StoreOp::Flush) && self.store_fails();
                self.change_store(volume, change, *mark, fails);
                if fails { Some(Landed::Failed) } else { done }
            }
            Io::StoreFlush(volume, _, mark) => {
                self.stores[volume.0 as usize].flush(*mark);
                done
            }
            Io::LogWrite(_, write) if self.failing && self.rng.chance(0.7) => {
                self.device.borrow_mut().write_torn(&mut self.rng, write.at, &flat(write));
                Some(Landed::Failed)
            }
            Io::LogWrite(_, write) => {
                self.device.borrow_mut().write(write.at, &flat(write));
                done
            }
            Io::LogFlush(..) if self.failing && self.rng.chance(0.5) => Some(Landed::Failed),
            Io::LogFlush(_, _, mark) => {
                self.device.borrow_mut().flush(*mark);
                done
            }
            Io::Mark(_, _, said) => {
                let fails = self.marked && *said != Said::Clean && self.rng.chance(0.2);
                if fails { Some(Landed::Failed) } else { done }
            }
            Io::Look(..) => {
                let fails = self.store_fails();
                if fails { Some(Landed::Failed) } else { done }
            }
            Io::LogRead(_, _, at, len) => {
                Some(Landed::Bytes(self.device.borrow().read(*at, *len as usize).to_vec()))
            }
        };
        self.doing[which].io = io;
        landed
    }

    /// An I/O happens, or is reported.
    fn advance(&mut self, hurry: bool) -> Checked {
        let count = self.doing.len() as u64;
        if count == 0 {
            return Ok(());
        }
        let which = self.rng.below(count) as usize;
        let is_read = matches!(
            self.doing[which].io,
            Io::StoreRead(..) | Io::FlashRead(..) | Io::LogRead(..) | Io::Copy(..) | Io::Merge(..)
        );
        let is_stores = matches!(self.doing[which].io, Io::StoreChange(..) | Io::StoreFlush(..));
        let of_the_log =
            matches!(self.doing[which].io, Io::LogWrite(..) | Io::LogFlush(..) | Io::Mark(..));
        let is_changed = is_stores || of_the_log;
        let waits = self.doing[which].is_slow && is_read && !self.rng.chance(0.02);
        if !hurry && (waits || self.stuck && is_stores) {
            return Ok(());
        }
        if self.doing[which].landed.is_none() {
            self.doing[which].landed = self.lands(which);
            if is_changed {
                self.lose_at_io()?;
            }
            if self.doing[which].landed.is_none() || self.rng.chance(0.5) {
                return Ok(());
            }
        }
        let Doing { io, landed, .. } = self.doing.swap_remove(which);
        self.says(|| format!("ends {io:?}"));
        self.ends(io, landed.expect("it happened"))?;
        if is_changed { self.lose_at_io() } else { Ok(()) }
    }

    fn ends(&mut self, io: Io, landed: Landed) -> Checked {
        let bytes = match &landed {
            Landed::Bytes(bytes) => bytes.clone(),
            _ => Vec::new(),
        };
        let sums = sums(&bytes);
        let fails = matches!(landed, Landed::Failed);
        if fails && matches!(io, Io::StoreRead(..) | Io::StoreChange(..)) {
            // (Who comes from now on may still have joined it.)
            self.store_failed = self.tick;
        }
        let written = if fails { Err(FlashError::Device) } else { Ok(&sums[..]) };
        match io {
            Io::FlashRead(q, io, _, line, _) => self.tell(q, |queue, node, now, _| {
                let read = written.map(|sums| (sums, Bytes::new(bytes)));
                queue.flash_read(node, now, io, line, read);
            }),
            Io::FlashWrite(Some(q), io, ..) => {
                self.seen.updates += 1;
                self.tell(q, |queue, node, now, _| {
                    queue.flash_written(node, now, io, written);
                })
            }
            Io::FlashWrite(None, io, ..) => {
                self.seen.fills += 1;
                self.maintain(|m, now, shards, _, _| m.flash_written(now, shards, io, written));
                Ok(())
            }
            Io::Copy(io, ..) => {
                self.maintain(|m, now, shards, _, _| m.flash_written(now, shards, io, written));
                Ok(())
            }
            Io::Merge(q, io, ..) => {
                self.seen.merges += 1;
                let both = written.map(|sums| (sums[0], sums[1]));
                self.tell(q, |queue, node, now, _| queue.merged(node, now, io, both))
            }
            Io::StoreRead(q, job, ..) => {
                let read = match landed {
                    Landed::Bytes(bytes) => Ok(Bytes::new(bytes)),
                    _ => Err(IoFailed),
                };
                self.tell(q, |queue, node, now, fx| queue.store_read(node, now, fx, job, read))
            }
            Io::StoreChange(q, job, _, change, _) => {
                let outcome = match landed {
                    Landed::Extents(extents) => Ok(extents),
                    Landed::Failed => Err(IoFailed),
                    _ => Ok(Vec::new()),
                };
                let is_change = !matches!(change, StoreOp::Flush | StoreOp::Status { .. });
                self.seen.destaged += u64::from(is_change);
                self.tell(q, |queue, node, now, fx| {
                    queue.store_changed(node, now, fx, job, outcome);
                })
            }
            Io::StoreFlush(volume, number, _) => {
                self.maintain(|m, now, _, _, _| m.store_flushed(now, volume, number, true));
                Ok(())
            }
            Io::LogWrite(q, write) => self.tell(q, |queue, node, now, fx| {
                queue.log_written(node, now, fx, write.number, !fails);
            }),
            Io::LogFlush(q, covers, _) => {
                self.tell(q, |queue, node, now, fx| {
                    queue.log_flushed(node, now, fx, covers, !fails);
                })?;
                self.starts()
            }
            Io::Mark(q, attachment, said) => {
                let shared = &self.life().shared;
                if said == Said::Clean && !fails {
                    shared.over.borrow_mut().insert(attachment);
                }
                let message = Message::Marked { attachment, done: !fails };
                send(shared, OpId((q as u64) << OP_BITS), message);
                self.seen.closed += u64::from(said == Said::Clean);
                Ok(())
            }
            Io::Look(attachment, began) => {
                let (now, shared) = (self.now, &self.life().shared);
                tell_log(shared, now, |log, asks| {
                    if !fails {
                        log.looked(attachment, began, asks);
                    }
                    log.look_ended(now, attachment, asks);
                });
                Ok(())
            }
            Io::LogRead(q, io, ..) => {
                self.seen.logged_reads += 1;
                self.tell(q, |queue, node, now, fx| {
                    let read = Some((&sums[..], Bytes::new(bytes)));
                    queue.log_read(node, now, fx, io, read);
                })
            }
        }
    }

    // ---- what must hold ----

    /// What clients would read of a volume now, sector by sector.
    fn content(&mut self, v: usize) -> Result<Vec<u64>, String> {
        let sectors = self.stores[v].sectors();
        let mut found = Vec::new();
        if let Some(attachment) = self.attachment(v) {
            let mut log = self.life().shared.log.borrow_mut();
            log.look(attachment, 0..sectors * SECTOR as u64, |each| found.push(each));
        } else {
            found.push(Found::Clean(0, sectors * SECTOR as u64));
        }
        let mut content = Vec::new();
        let now = self.now;
        for found in found {
            let from = content.len() as u64;
            match found {
                Found::Clean(_, len) => {
                    let end = from + len / SECTOR as u64;
                    content.extend((from..end).map(|sector| self.stores[v].see(sector)));
                }
                Found::Zeros(_, len) => content.extend((0..len / SECTOR as u64).map(|_| 0)),
                Found::Logged(piece) => {
                    let device = self.device.clone();
                    let device = device.borrow();
                    let bytes = device.read(piece.place, piece.bytes as usize);
                    if sums(bytes) != piece.sums.as_slice() {
                        return Err(format!("v{v}: {piece:?} does not verify"));
                    }
                    let bytes = &bytes[piece.skip as usize..][..piece.len as usize];
                    for (sector, bytes) in (from..).zip(bytes.chunks_exact(SECTOR)) {
                        let Some(number) = filled(v, sector, bytes) else {
                            return Err(format!("v{v}: sector {sector} has no write's bytes"));
                        };
                        content.push(number);
                    }
                    drop(device);
                    let shared = &self.life().shared;
                    tell_log(shared, now, |log, asks| log.unpin(now, piece.pin, asks));
                }
                Found::Unreadable(..) | Found::Kept(..) => return Err(format!("v{v}: {found:?}")),
            }
        }
        Ok(content)
    }

    /// What slots hold is what the store has.
    fn check_slots(&mut self) -> Checked {
        let (layout, device) = (self.layout, self.device.clone());
        let (Some(Life { shared, .. }), stores) = (&self.life, &self.stores) else {
            return Ok(());
        };
        for (number, cell) in (0u32..).zip(&shared.cells).filter(|_| shared.enabled.get()) {
            let (shard, _) = &*cell.borrow();
            shard.map().validate().map_err(|e| e.to_string())?;
            for slot in (0..shard.map().len()).map(SlotId) {
                let Slot::Line(line) = shard.get(slot) else { continue };
                let at = line.0 * LINE;
                let of = shared.volumes.iter().find(|v| (v.base..v.whole).contains(&at));
                let Some(volume) = of else {
                    return Err(format!("{line:?} is cached, and nobody's"));
                };
                let device = device.borrow();
                let bytes = device.read(layout.slot_at(number, slot.0), LINE as usize);
                let first = (at - volume.base) / SECTOR as u64;
                for (sector, bytes) in (first..).zip(bytes.chunks_exact(SECTOR)) {
                    let has = filled(volume.number, sector, bytes);
                    let store = stores[volume.number].see(sector);
                    if has != Some(store) {
                        return Err(format!(
                            "v{}: a slot has {has:?} of sector {sector}, the store {store}",
                            volume.number
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// The cache device is gone: what do the stores alone hold? Nothing else changes, so it can be asked at any time.
    fn lose_cache(&mut self) -> Checked {
        for v in 0..self.stores.len() {
            // (Stores may have lost something, too, when the power was cut.)
            let look = if self.weak { truth::Look::PowerCut } else { truth::Look::Killed };
            self.check_unmarked(v, self.stores[v].image(), look)?;
            let completion = match self.kinds[v].map(|kind| kind.destage.order) {
                Some(Order::Ordered(grain)) => grain == Grain::Completion,
                _ => continue,
            };
            // One of a log that has failed writes through in the end: its store is then what any disk with a volatile cache is. So is that of one that
            // has changed over.
            let of = self.attachment(v);
            let over = of.is_none_or(|of| self.life().shared.over.borrow().contains(&of));
            let mut store = self.stores[v].clone();
            if self.loses {
                // As it is, with whatever has come of what is under way, and behind a power cut of its own.
                self.check_lost(v, &store, completion && !over)?;
                self.comes_in_part(v, &mut store);
                self.check_lost(v, &store, completion && !over)?;
            }
            if self.loses || self.rng.chance(0.5) {
                store.power_cut(&mut self.rng);
                self.check_unmarked(v, store.image(), truth::Look::PowerCut)?;
            }
            self.check_lost(v, &store, completion && !over)?;
            self.seen.images += 1;
            self.seen.failed_images += u64::from(self.failing);
        }
        Ok(())
    }

    fn check_lost(&self, v: usize, store: &Store, completion: bool) -> Checked {
        let image = self.truth[v].check_image(store.image(), completion);
        image.map_err(|why| format!("v{v}, cache lost: {why}"))
    }

    /// Any sectors of what is on its way to a store are there.
    fn comes_in_part(&mut self, v: usize, store: &mut Store) {
        for Doing { io, landed, .. } in &self.doing {
            let Io::StoreChange(_, _, volume, change, _) = io else { continue };
            if volume.number != v || landed.is_some() {
                continue;
            }
            for (sector, number) in self.filled_by(volume, change) {
                if self.rng.chance(0.5) {
                    store.write(sector, number);
                }
            }
        }
    }

    /// What has happened at a device, or is told now, leaves stores that are what their orders promise.
    fn lose_at_io(&mut self) -> Checked {
        if self.loses { self.lose_cache() } else { Ok(()) }
    }

    // ---- what happens next ----

    /// Time passes, and what is due is done.
    fn pass(&mut self, far: bool) -> Checked {
        let now = self.now;
        let wakes = self.life().shared.log.borrow().wakes(now);
        // (A look that takes a minute is as with a store that fails.)
        let looks = self.doing.iter().any(|doing| matches!(doing.io, Io::Look(..)));
        self.now = match wakes {
            Some(at) if !far && (!looks || at <= now + LOOK) => at.max(self.now),
            _ => Nanos(self.now.0 + self.rng.below(60_000_000)),
        };
        self.due()
    }

    fn due(&mut self) -> Checked {
        let queue = self.rng.below(self.queues as u64) as usize;
        self.tell(queue, |queue, node, now, fx| queue.log_due(node, now, fx)).map(drop)
    }

    fn act(&mut self) -> Checked {
        self.now.0 += self.rng.below(200_000);
        self.failing |= self.may_fail && self.started && self.rng.below(400) == 0;
        match self.rng.below(1000) {
            0..320 if self.started && self.ops.len() < 20 => self.submit()?,
            320..325 => self.stuck ^= true,
            325..850 => self.advance(false)?,
            850..910 => self.step_log(),
            910..960 => {
                let far = self.rng.chance(0.2);
                self.pass(far)?;
            }
            // (What a start makes of a log that has failed, `writeback_model` tries.)
            960..970 if self.failing => {}
            960..970 if self.rng.chance(self.crashes) => {
                let power = self.rng.chance(0.5);
                self.restart(power)?;
            }
            970..972 if !self.started => self.restart(true)?,
            972..975 if self.started => self.operate(),
            975..985 => self.lose_cache()?,
            _ => {}
        }
        for queue in 0..self.queues {
            while self.rng.chance(0.7) && self.look_into_mail(queue)? {}
        }
        if self.changes && self.started {
            if self.rng.chance(0.04) {
                let v = self.rng.below(self.stores.len() as u64) as usize;
                self.change_over(v);
            }
            if self.rng.chance(0.6) {
                self.go_on_ways()?;
            }
        }
        self.check_carried()?;
        if self.rng.chance(0.1) { self.check_slots() } else { Ok(()) }
    }

    pub(crate) fn play(&mut self, steps: u64) -> Checked {
        for _ in 0..steps {
            self.act()?;
        }
        self.settle()
    }

    /// Goes on until all that was asked for is over.
    fn quiet(&mut self, what: &str, done: impl Fn(&mut World) -> bool) -> Checked {
        let mut idle = 0;
        for _ in 0..60_000 {
            let mut any = !self.doing.is_empty();
            self.advance(true)?;
            for queue in 0..self.queues {
                any |= self.look_into_mail(queue)?;
            }
            if !any || self.rng.chance(0.1) {
                self.step_log();
                self.go_on_ways()?;
            }
            if !any && self.doing.is_empty() {
                if done(self) {
                    return Ok(());
                }
                idle += 1;
                self.pass(idle % 4 == 0)?;
                if idle > 2_000 {
                    break;
                }
            }
        }
        let ops: Vec<String> = self.ops.values().take(4).map(|op| format!("{op:?}")).collect();
        let log = format!("{:?}", self.life().shared.log.borrow());
        Err(format!("{what}: it does not come to an end: {ops:?}, {}", &log[..log.len().min(3000)]))
    }

    /// No more failures: all that waits ends, and all comes to the stores.
    fn settle(&mut self) -> Checked {
        (self.failures, self.stuck, self.failing) = (0, false, false);
        self.marks_fail = false;
        self.says(|| "no more failures".to_owned());
        self.quiet("start", |world| world.started)?;
        self.quiet("answers", |world| world.ops.is_empty())?;
        self.end_ways()?;
        self.check_slots()?;
        for v in 0..self.stores.len() {
            if let Some(attachment) = self.attachment(v) {
                let now = self.now;
                let shared = &self.life().shared;
                tell_log(shared, now, |log, asks| log.drain(attachment, true, asks));
            }
        }
        self.quiet("drain", |world| {
            let log = world.life().shared.log.borrow();
            log.attached().all(|attachment| log.is_clean(attachment))
        })?;
        self.tick += 1;
        for v in 0..self.stores.len() {
            for sector in 0..self.stores[v].sectors() {
                let has = self.stores[v].see(sector);
                if !self.truth[v].may_hold(sector, has, truth::Look::Read(self.tick)) {
                    let of = self.truth[v].of(sector);
                    return Err(format!("v{v}: the store has {has} in sector {sector}: {of}"));
                }
            }
        }
        self.check_slots()?;
        // What is then read is that, from wherever it comes.
        for v in 0..self.stores.len() {
            self.read_all(v)?;
        }
        self.quiet("last reads", |world| world.ops.is_empty())?;
        self.check_slots()?;
        let life = self.life.as_ref().expect("a run");
        for cell in &life.shared.cells {
            self.seen.hits += cell.borrow().0.stats().read_hits;
        }
        Ok(())
    }
}

/// What maintenance has asked for during a call.
#[derive(Default)]
struct Begun {
    io: Vec<Io>,
    given_up: bool,
}

impl Effects<Bytes> for Begun {
    fn fill(&mut self, Fill { shard, io, slot, bytes, .. }: Fill<Bytes>) {
        self.io.push(Io::FlashWrite(None, ShardIo { shard, io }, slot, bytes));
    }

    fn copy(&mut self, Copying { shard, io, from, to, lines }: Copying) {
        self.io.push(Io::Copy(ShardIo { shard, io }, from, to, lines));
    }

    fn load(&mut self, _: Load) {
        unreachable!("no table lies on the device");
    }

    fn store_flush(&mut self, store: VolumeId, number: u64) {
        self.io.push(Io::StoreFlush(store, number, 0));
    }

    fn note_given_up(&mut self, _: &BlockSuperblock) -> Result<(), String> {
        Ok(())
    }

    fn disown(&mut self) {}

    fn given_up(&mut self, _: &str) {
        self.given_up = true;
    }

    fn identity(&mut self, _: &str) -> Option<[u8; 64]> {
        None
    }
}

/// A line with bytes laid over it.
fn laid_over(before: &[u8], merge: Merge, bytes: &Bytes) -> Vec<u8> {
    let mut after = before.to_vec();
    let first = (merge.at - merge.line.0 * LINE) as usize;
    after[first..first + bytes.as_slice().len()].copy_from_slice(bytes.as_slice());
    after
}
