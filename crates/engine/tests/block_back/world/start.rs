//! How a run begins: on an empty device, or on what the last one has left. And how it ends: by a kill, or a power cut.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use larder_base::{Nanos, Rng, UnixSecs, Words};
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Making, Map, Replacement, Shape};
use larder_engine::block::node::backoff::Backoff;
use larder_engine::block::node::charged::Charged;
use larder_engine::block::node::limits::Limits;
use larder_engine::block::node::logged::{ForDevice, call_log};
use larder_engine::block::node::maintenance::{Maintenance, Pace, Work};
use larder_engine::block::node::queue::{Config, Queue};
use larder_engine::block::node::quiet::Changes;
use larder_engine::block::node::ranged::Turns;
use larder_engine::block::node::start::memory::{HEADER_WORDS, Memory};
use larder_engine::block::node::start::places::Comer;
use larder_engine::block::node::start::{Left, Notes, Setup as StartSetup, Started};
use larder_engine::block::record::RecordedLog;
use larder_engine::block::writeback::holder::Logged;
use larder_engine::block::writeback::log::{Attach, WriteLog};
use larder_engine::block::writeback::scan::scan;
use larder_engine::block::{
    BlockConfig, BlockLimits, Fault, GROUP_LINES, Regions, SlotId, WriteMode,
};
use larder_format::Uuid;
use larder_format::block::BlockSuperblock;
use larder_format::block::Layout;
use larder_format::block::superblock::{COPY_BYTES, WriteLogArea, choose};
use larder_policy::block::{EvictionBy, VictimPolicy};

use super::node::Shared;
use super::truth::Look;
use super::{CACHE, Checked, KEY, Life, SHARDS, World};
use crate::device::{Device, MapIo, SECTOR, Store};
use crate::parts::{Io, LINE, Vol, flat};

/// A client that has read so many bytes in sequence is read ahead of.
const LEAST: u64 = 6 * LINE;

/// Memory that outlives the process.
pub(super) struct Survived {
    header: Words,
    words: Vec<(Words, Words)>,
}

struct NoNote;

impl Notes for NoNote {
    fn given_up(&mut self) -> Result<(), String> {
        Err("nothing fails here".to_owned())
    }

    fn forget(&mut self) {}
}

/// An empty device.
pub(super) fn format(device: &RefCell<Device>, layout: Layout, rng: &mut Rng) {
    let random = rng.next_u64() >> 16;
    let sb = BlockSuperblock::format(CACHE, KEY, random, layout, UnixSecs(1));
    let at = (sb.copy() * COPY_BYTES) as u64;
    let mut device = device.borrow_mut();
    device.write(at, &sb.encode());
    let mark = device.mark();
    device.flush(mark);
}

fn comer(number: usize, store: &Store) -> Comer {
    let name = format!("volume {number}");
    let bytes = store.sectors() * SECTOR as u64;
    Comer { name, bytes, identity: [number as u8 + 1; 64], proves: Box::new(|_, _| Ok(())) }
}

impl World {
    fn fault(&self) -> Fault {
        #[cfg(feature = "planted")]
        return Fault::of(self.setup.fault);
        #[cfg(not(feature = "planted"))]
        Fault::default()
    }

    fn start_setup(&mut self) -> StartSetup {
        let making = Making {
            replacement: Replacement::ALL[self.rng.below(5) as usize],
            reclaim: VictimPolicy::ALL[self.rng.below(4) as usize],
            evict: EvictionBy::Cache,
        };
        let limits = BlockLimits { fills: 40, waiting: 1000 };
        let regions = Regions { groups: self.layout.region_groups, count: self.layout.regions };
        let modes = [WriteMode::WriteThrough, WriteMode::WriteThrough, WriteMode::WriteUpdate];
        let write = modes[self.rng.below(3) as usize];
        StartSetup {
            shape: Shape::of(&self.layout),
            making,
            config: BlockConfig { line_bytes: LINE as u32, write, limits, regions },
            idle: Nanos::from_millis(30),
            empty: false,
            random: self.rng.next_u64() as u32,
            fault: self.fault(),
        }
    }

    /// A process begins; what it finds in memory, if that is the last one's.
    pub(super) fn begin(&mut self, survived: Option<Survived>, look: Look, first: bool) -> Checked {
        let setup = self.start_setup();
        let copy = |n: u64| self.device.borrow().read(n * COPY_BYTES as u64, COPY_BYTES).to_vec();
        let superblock = choose(&copy(0), &copy(1)).expect("a superblock");
        let is_old = survived.is_some();
        let Survived { header, words } = survived.unwrap_or_else(|| {
            let (entries, rest) = Map::words(setup.shape);
            let words = (0..SHARDS).map(|_| (Words::heap(entries), Words::heap(rest))).collect();
            Survived { header: Words::heap(HEADER_WORDS), words }
        });
        let mut memory = Memory::new(header, is_old);
        let limits =
            Rc::new(Limits::new(None, Backoff::new(Nanos::from_millis(4), Nanos::from_millis(32))));
        let comers: Vec<Comer> =
            self.stores.iter().enumerate().map(|(n, store)| comer(n, store)).collect();
        let mut io = Charged::new(MapIo(self.device.clone()), &*limits, self.now);
        let left = Left { superblock, voided: None, memory: &mut memory, words };
        let judged = left.judge(&comers, &setup, &mut io).expect("a start");
        let stores = &mut self.stores;
        let ready = judged.stores_durable(|volume| -> Result<(), ()> {
            let of = |n: &usize| volume.name == format!("volume {n}");
            if let Some(n) = (0..stores.len()).find(of) {
                let mark = stores[n].mark();
                stores[n].flush(mark);
            }
            Ok(())
        });
        let started = ready.expect("stores flush").take_over(&mut memory, &mut io, &mut NoNote);
        let Started::With(begun) = started.expect("it begins") else {
            return Err("a start does without the device".to_owned());
        };
        self.seen.warm += begun.shards.iter().map(|shard| u64::from(shard.lines())).sum::<u64>();
        let superblock = begun.log.superblock().clone();
        let volumes: Vec<Vol> = (0..self.stores.len())
            .map(|number| {
                let name = format!("volume {number}");
                let mut known = superblock.volumes.iter();
                let known = known.find(|v| v.name == name).expect("it has come");
                let base = known.first_group * u64::from(GROUP_LINES) * LINE;
                let whole = base + known.bytes / LINE * LINE;
                let attachment = self.beside[number].attached;
                Vol { number, attachment, base, whole }
            })
            .collect();
        #[allow(unused_mut, reason = "faults are planted with a feature")]
        let mut shards = begun.shards;
        #[cfg(feature = "planted")]
        if let Some(fault) = self.setup.fault {
            shards.iter_mut().for_each(|shard| shard.plant(fault));
        }
        let pace = Pace {
            gather: Nanos::ZERO,
            records: Nanos::from_millis([0, 20][self.rng.below(2) as usize]),
            commit: Nanos::ZERO,
            tick: Nanos::ZERO,
            steps: 2,
            ..Pace::default()
        };
        let maintenance =
            Maintenance::new(pace, Some(RecordedLog::new(begun.log)), superblock.clone());
        let ahead = [0, 0, 64 << 10][self.rng.below(3) as usize];
        let config = Config {
            range_groups: 1,
            range_steps: 7,
            least_void: 0,
            ..Config::new(&self.layout, Placing::of(&self.layout, KEY), ahead)
        };
        let queues: Vec<Queue<_>> =
            (0..self.queues).map(|q| Queue::new(q, config).with_least(LEAST)).collect();
        let shared = Shared {
            cells: shards
                .into_iter()
                .map(|shard| RefCell::new((shard, Default::default())))
                .collect(),
            mail: queues.iter().map(|_| RefCell::default()).collect(),
            work: RefCell::new(Work::default()),
            turns: RefCell::new(Turns::of(2)),
            changes: Changes::new(self.layout.regions, Nanos::from_millis(30)),
            limits,
            log: RefCell::new(WriteLog::new(self.log)),
            volumes,
            over: RefCell::default(),
            enabled: Cell::new(true),
            coin: RefCell::new(self.rng.fork(3)),
            region: self.layout.region_groups * u64::from(GROUP_LINES) * LINE,
        };
        self.life = Some(Life { shared, queues, maintenance, memory });
        #[cfg(feature = "planted")]
        if let Some(fault) = self.setup.fault {
            self.life().queues.iter_mut().for_each(|queue| queue.plant(fault));
        }
        match first {
            true => {
                self.plant_in_log();
                (0..self.stores.len()).for_each(|v| self.attach(v, 0));
                self.started = true;
                Ok(())
            }
            false => self.begin_log(look),
        }
    }

    fn plant_in_log(&mut self) {
        #[cfg(feature = "planted")]
        {
            let fault = larder_engine::block::writeback::Fault::of(self.setup.in_log);
            self.life().shared.log.borrow_mut().plant(fault);
        }
    }

    fn attach(&mut self, v: usize, frontier: u64) {
        let Some(attach) = self.attach_of(v, frontier) else { return };
        let now = self.now;
        self.life().shared.log.borrow_mut().attach(now, attach);
    }

    /// How the log is to have a volume, if that writes back.
    pub(super) fn attach_of(&self, v: usize, frontier: u64) -> Option<Attach> {
        let kind = self.kinds[v]?;
        Some(Attach {
            attachment: self.attachment(v)?,
            volume: Uuid([v as u8 + 1; 16]),
            generation: if self.changes { self.beside[v].record.generation } else { 1 },
            destage: kind.destage,
            bound: Some(kind.bound),
            age: kind.age,
            frontier,
            epoch: 0,
            marker: 0,
            marked: self.marked,
        })
    }

    /// The log as the last run has left it.
    fn begin_log(&mut self, look: Look) -> Checked {
        let (at, geometry, segments) = (self.log.at, self.log.geometry, self.log.segments);
        let area = WriteLogArea { at, geometry, segments };
        let device = self.device.clone();
        let mut found = scan(&area, CACHE, &mut |at, bytes| {
            bytes.copy_from_slice(device.borrow().read(at, bytes.len()));
            Ok(())
        });
        let numbers = self.numbers();
        let mine = found.recover_packed(&numbers, self.fault_in_log());
        if !mine.chain.damaged.is_empty() {
            return Err(format!("batches {:?} are called damaged", mine.chain.damaged));
        }
        self.log.run += 1;
        self.started = false;
        let mut frontiers = Vec::with_capacity(self.stores.len());
        for v in 0..self.stores.len() {
            let of = mine.volumes.get(&self.beside[v].record.attachment);
            let logged = of.map_or(Logged::default(), |of| Logged {
                frontier: of.frontier,
                last: of.last,
                gap: of.gap,
                ..Logged::default()
            });
            frontiers.push(self.comes_at_start(v, logged)?);
        }
        let (now, config) = (self.now, self.log);
        *self.life().shared.log.borrow_mut() = WriteLog::found(config, &mine, &found);
        self.plant_in_log();
        for (v, frontier) in (0..).zip(frontiers) {
            let (Some(frontier), Some(attachment)) = (frontier, self.attachment(v)) else {
                continue;
            };
            self.attach(v, frontier);
            let Some(of) = mine.volumes.get(&attachment) else { continue };
            if of.gap {
                return Err(format!("attachment {attachment} is called damaged"));
            }
            self.life().shared.log.borrow_mut().recover(now, attachment, of, &found);
        }
        let mut asked = ForDevice::default();
        let shared = &self.life().shared;
        call_log(shared, None, |log, asks| log.start(asks), |first| asked = first);
        for write in asked.writes {
            self.push(Io::LogWrite(0, write));
        }
        if let Some(covers) = asked.flush {
            self.push(Io::LogFlush(0, covers, 0));
        }
        for v in 0..self.stores.len() {
            let content = self.content(v)?;
            for (sector, found) in (0..).zip(content) {
                if !self.truth[v].may_hold(sector, found, look) {
                    let of = self.truth[v].of(sector);
                    return Err(format!("v{v}: a start finds {found} in sector {sector}: {of}"));
                }
            }
        }
        self.check_slots()?;
        self.starts()
    }

    pub(super) fn fault_in_log(&self) -> larder_engine::block::writeback::Fault {
        #[cfg(feature = "planted")]
        return larder_engine::block::writeback::Fault::of(self.setup.in_log);
        #[cfg(not(feature = "planted"))]
        Default::default()
    }

    /// What was found is durable, if it is: clients may come.
    pub(super) fn starts(&mut self) -> Checked {
        if self.started || !self.life().shared.log.borrow().is_started() {
            return Ok(());
        }
        (self.started, self.weak) = (true, false);
        self.tick += 1;
        for v in 0..self.stores.len() {
            let content = self.content(v)?;
            self.truth[v].starts(self.tick, &content);
        }
        Ok(())
    }

    /// Larder is killed, or the power is cut, and it starts again.
    pub(super) fn restart(&mut self, power: bool) -> Checked {
        self.says(|| (if power { "power cut" } else { "kill" }).to_owned());
        if power {
            self.seen.power_cuts += 1
        } else {
            self.seen.kills += 1
        }
        self.cut_off();
        let life = self.life.take().expect("a run");
        let snapshot = |cell: &RefCell<(_, _)>| {
            let shard: &(larder_engine::block::BlockShard, _) = &cell.borrow();
            shard.0.map().snapshot()
        };
        let words = life.shared.cells.iter().map(snapshot).collect();
        let survived = Survived { header: life.memory.snapshot(), words };
        drop(life);
        self.ops.clear();
        self.forget_ways();
        if power {
            self.device.borrow_mut().power_cut(&mut self.rng);
            for store in &mut self.stores {
                if self.rng.chance(0.5) {
                    store.power_cut(&mut self.rng);
                }
            }
        }
        // (What a power cut took is gone, also for a start after one that did not come to its end.)
        self.weak |= power;
        let look = if self.weak { Look::PowerCut } else { Look::Killed };
        // (Memory may be lost with the process too.)
        let survived = (!power && self.rng.chance(0.8)).then_some(survived);
        self.begin(survived, look, false)
    }

    /// What is under way comes in part, or not at all.
    fn cut_off(&mut self) {
        for doing in std::mem::take(&mut self.doing) {
            if doing.landed.is_some() || self.rng.chance(0.3) {
                continue;
            }
            match doing.io {
                Io::LogWrite(_, write) => {
                    let bytes = flat(&write);
                    match self.rng.chance(0.5) {
                        true => self.device.borrow_mut().write(write.at, &bytes),
                        false => self.torn(write.at, &bytes),
                    }
                }
                Io::LogFlush(_, _, mark) => self.device.borrow_mut().flush(mark),
                io @ (Io::FlashWrite(..) | Io::Copy(..) | Io::Merge(..)) => {
                    self.cut_short(&io, doing.read.as_deref());
                }
                Io::StoreChange(_, _, volume, change, mark) => {
                    self.change_store(&volume, &change, mark, true);
                }
                Io::StoreFlush(volume, _, mark) => self.stores[volume.0 as usize].flush(mark),
                Io::FlashRead(..) | Io::StoreRead(..) => {}
                Io::LogRead(..) | Io::Mark(..) | Io::Look(..) => {}
            }
        }
    }

    /// A write of slots comes in part; of what reads first nothing as long as it has not.
    pub(super) fn cut_short(&mut self, io: &Io, read: Option<&[u8]>) {
        let (shard, slot, bytes) = match (io, read) {
            (Io::FlashWrite(_, io, slot, bytes), _) => (io.shard, slot, bytes.as_slice().to_vec()),
            (Io::Copy(io, _, to, _), Some(bytes)) => (io.shard, to, bytes.to_vec()),
            (Io::Merge(_, io, merge, bytes), Some(before)) => {
                (io.shard, &merge.to, super::laid_over(before, *merge, bytes))
            }
            _ => return,
        };
        self.torn(self.slot_at(shard, *slot), &bytes);
    }

    fn torn(&mut self, at: u64, bytes: &[u8]) {
        self.device.borrow_mut().write_torn(&mut self.rng, at, bytes);
    }

    pub(super) fn slot_at(&self, shard: u32, slot: SlotId) -> u64 {
        self.layout.slot_at(shard, slot.0)
    }
}
