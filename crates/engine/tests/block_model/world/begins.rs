//! How a run begins: formatting, and starting on what the last one left.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::{Killed, UnixSecs, Words};
use larder_engine::block::address::Placing;
use larder_engine::block::map::{Making, Map, Replacement, Shape};
use larder_engine::block::node::start::memory::{HEADER_WORDS, Memory};
use larder_engine::block::node::start::{Left, Notes, Refused, Setup, Started, start, take_back};
use larder_engine::block::record::RecordedLog;
use larder_engine::block::{BlockConfig, BlockLimits, BlockShard, Fault, LogStats, Regions};
use larder_format::Uuid;
use larder_format::block::BlockSuperblock;
use larder_format::block::superblock::choose;
use larder_policy::block::{EvictionBy, VictimPolicy};

use super::{KEY, LINE, SHARDS, World};
use crate::device::SECTOR;

/// What a kill leaves of memory.
pub(super) struct Survived {
    pub(super) header: Words,
    pub(super) words: Vec<(Words, Words)>,
}

/// The note that the cache must not be used.
struct Note {
    is_there: Rc<Cell<bool>>,
    /// It cannot be made.
    fails: bool,
}

impl Notes for Note {
    fn given_up(&mut self) -> Result<(), String> {
        if self.fails {
            return Err("a fault".to_owned());
        }
        self.is_there.set(true);
        Ok(())
    }

    fn forget(&mut self) {
        self.is_there.set(false);
    }
}

/// What of a start goes wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fate {
    Begins,
    /// The device may fail.
    Fails,
    /// The same, and that cannot be noted.
    Refused,
    /// It is cut off.
    Killed,
}

/// Memory that is still there when who uses it is gone.
struct Lasting(Vec<&'static [AtomicU64]>);

impl Lasting {
    fn of(header: &Words, words: &[(Words, Words)]) -> Lasting {
        let all = [header].into_iter().chain(words.iter().flat_map(|(e, s)| [e, s]));
        let lasting = |words: &Words| -> &'static [AtomicU64] {
            (0..words.len()).map(|i| AtomicU64::new(words.load(i))).collect::<Vec<_>>().leak()
        };
        Lasting(all.map(lasting).collect())
    }

    fn words(&self) -> (Words, Vec<(Words, Words)>) {
        let words = |cells: &&'static [AtomicU64]| Words::from_static(cells);
        let maps = self.0[1..].chunks_exact(2).map(|m| (words(&m[0]), words(&m[1])));
        (words(&self.0[0]), maps.collect())
    }

    fn survived(&self) -> Survived {
        let (header, words) = self.words();
        let words = words.iter().map(|(e, s)| (e.snapshot(), s.snapshot())).collect();
        Survived { header: header.snapshot(), words }
    }
}

impl World {
    pub(super) fn format(&mut self) {
        self.device.borrow_mut().zero();
        // Nobody is charged for it.
        self.device.borrow_mut().charges(None);
        let sb = BlockSuperblock::format(
            Uuid([1; 16]),
            KEY,
            self.rng.next_u64() >> 16,
            self.layout,
            UnixSecs(1),
        );
        let at = sb.copy() as u64 * 65_536;
        let bytes = sb.encode();
        let sectors: Vec<[u8; SECTOR]> =
            bytes.chunks_exact(SECTOR).map(|c| c.try_into().expect("a sector")).collect();
        self.device.borrow_mut().write(at, &sectors);
        self.device.borrow_mut().flush();
        self.validity.barred.set(false);
        self.rotten.clear();
    }

    /// The superblock that rules the device.
    pub(super) fn superblock(&self) -> BlockSuperblock {
        let read = |copy: u64| -> Vec<u8> {
            self.device.borrow().read(copy * 65_536, 65_536 / SECTOR).concat()
        };
        choose(&read(0), &read(1)).expect("a superblock")
    }

    /// Starts the cache on what is on the device, and in memory if that survived. Some starts are cut off: by a kill, or by a
    /// power cut.
    pub(super) fn begin(&mut self, survived: Option<Survived>) {
        let mut survived = survived;
        for left in (0..4).rev() {
            let killed = if self.validity.barred.get() { 0.8 } else { 0.15 };
            let fate = if left > 0 && self.rng.chance(killed) {
                Fate::Killed
            } else if !self.rng.chance(0.06) {
                Fate::Begins
            } else if left > 0 && self.rng.chance(0.3) {
                Fate::Refused
            } else {
                Fate::Fails
            };
            match self.start(survived.take(), fate) {
                Ok(()) => break,
                Err(memory) => {
                    let killed = fate == Fate::Killed;
                    self.seen.kills_in_start += u64::from(killed);
                    self.seen.refused_starts += u64::from(!killed);
                    self.script.push(format!("{} a start is cut off", self.time));
                    if self.rng.chance(0.5) {
                        survived = Some(memory);
                    } else {
                        self.device.borrow_mut().power_cut();
                    }
                }
            }
        }
    }

    /// What the process finds of memory: what survived, nothing, or what an earlier run has left.
    pub(super) fn offered(&mut self, survived: Option<Survived>) -> Option<Survived> {
        match self.rng.below(20) {
            0 => None,
            1 | 2 if self.stale.is_some() => {
                self.seen.other_memory += 1;
                self.stale.take()
            }
            3..6 if survived.is_some() => {
                // It is not found by the next start, but by one after that.
                self.stale = survived;
                None
            }
            _ => survived,
        }
    }

    /// # Errors
    /// What memory has when the start is cut off, or refused.
    fn start(&mut self, survived: Option<Survived>, fate: Fate) -> Result<(), Survived> {
        let doomed = fate == Fate::Killed;
        self.begin_limits();
        let sb = self.superblock();
        self.seen.voided += u64::from(self.validity.barred.get());
        let mut shape = Shape::of(&self.layout);
        if let Shape::Sparse { frames, .. } = &mut shape {
            *frames = self.frames;
        }
        if self.layout.is_sparse() {
            self.device.borrow_mut().table = Some((self.layout, sb.generation));
        }
        let is_old = survived.is_some();
        let Survived { mut header, mut words } = survived.unwrap_or_else(|| {
            let (e, s) = Map::words(shape);
            let words = (0..SHARDS).map(|_| (Words::heap(e), Words::heap(s))).collect();
            Survived { header: Words::heap(HEADER_WORDS), words }
        });
        let mut lasting = None;
        if doomed || fate == Fate::Refused {
            let memory = Lasting::of(&header, &words);
            (header, words) = memory.words();
            lasting = Some(memory);
        }
        self.fuse = Arc::new(AtomicU64::new(u64::MAX));
        header.share_fuse(self.fuse.clone());
        for (entries, sums) in &mut words {
            entries.share_fuse(self.fuse.clone());
            sums.share_fuse(self.fuse.clone());
        }
        if doomed && self.rng.chance(0.5) {
            self.fuse.store(self.rng.below(120), Ordering::Relaxed);
        } else if doomed {
            let mut device = self.device.borrow_mut();
            (device.fuse, device.unwinds) = (self.rng.below(8), true);
        } else if fate != Fate::Begins {
            let mut device = self.device.borrow_mut();
            (device.fails_in, device.dies) = (Some(self.rng.below(12)), self.rng.chance(0.5));
        }
        let mut memory = Memory::new(header, is_old);
        let setup = Setup {
            shape,
            making: self.making(),
            idle: self.habits.idle,
            empty: false,
            random: self.rng.next_u64() as u32,
            fault: self.fault(),
        };
        let comers = self.comers();
        let void = self.validity.barred.get();
        let voided = void.then_some("it was given up");
        let left = Left { superblock: sb, voided, memory: &mut memory, words };
        let is_there = self.validity.barred.clone();
        let (mut io, mut note) = (self.io(), Note { is_there, fails: fate == Fate::Refused });
        let started =
            catch_unwind(AssertUnwindSafe(|| start(left, &comers, &setup, &mut io, &mut note)));
        let mut device = self.device.borrow_mut();
        (device.fuse, device.unwinds, device.blown) = (u64::MAX, false, false);
        (device.fails_in, device.dies) = (None, false);
        drop(device);
        self.fuse.store(u64::MAX, Ordering::Relaxed);
        let started = match (started, &lasting) {
            (Ok(Err(Refused::NotNoted { .. })), Some(lasting)) if !doomed => {
                return Err(lasting.survived());
            }
            (Ok(started), _) => started.expect("no other start is refused"),
            (Err(payload), Some(lasting)) if payload.is::<Killed>() => {
                return Err(lasting.survived());
            }
            (Err(payload), _) => resume_unwind(payload),
        };
        *self.memory.borrow_mut() = memory;
        let (superblock, maps, places, log) = match started {
            Started::With(begun) => {
                self.seen.short_logs += u64::from(begun.damaged);
                self.seen.worked_again += u64::from(void);
                let sb = begun.log.superblock().clone();
                (sb, begun.maps, begun.places, Some(begun.log))
            }
            Started::Without(without) => {
                self.seen.failed_starts += 1;
                (without.superblock, without.maps, without.places, None)
            }
        };
        places.decided.iter().for_each(|decided| self.has_come(decided));
        self.generation = superblock.generation;
        if self.layout.is_sparse() {
            self.device.borrow_mut().table = Some((self.layout, self.generation));
        }
        self.place(&superblock);
        self.seen.put_aside += self.aside.len() as u64;
        self.former = Some(superblock.clone());
        self.begin_maintenance(log, superblock);
        let regions = Regions { groups: self.layout.region_groups, count: self.layout.regions };
        let limits = BlockLimits { fills: 40, waiting: 1000 };
        let config = BlockConfig { line_bytes: LINE as u32, write: self.mode, limits, regions };
        self.shards = maps.into_iter().map(|map| BlockShard::new(config, map)).collect();
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            self.shards.iter_mut().for_each(|s| s.plant(fault));
        }
        self.begin_streams();
        self.begin_flushing();
        if !self.is_enabled() {
            let now = self.now();
            (0..SHARDS as usize).for_each(|shard| self.call(shard, |s, fx| s.disable(now, fx)));
        }
        self.shares.count(&self.shards);
        self.device.borrow_mut().fail = if self.rng.chance(0.5) { 0.0 } else { 0.03 };
        self.know_what_is_durable();
        Ok(())
    }

    fn making(&mut self) -> Making {
        Making {
            replacement: Replacement::ALL[self.rng.below(5) as usize],
            reclaim: VictimPolicy::ALL[self.rng.below(4) as usize],
            evict: match self.rng.below(3) {
                0 => EvictionBy::Cache,
                n => EvictionBy::Gc { keep: n as f64 * 0.4 },
            },
        }
    }

    #[cfg(feature = "planted")]
    pub(super) fn fault(&self) -> Fault {
        Fault::of(self.options.fault)
    }

    #[cfg(not(feature = "planted"))]
    pub(super) fn fault(&self) -> Fault {
        Fault::default()
    }

    /// As a daemon does it while every line is locked. Returns whether the device has taken it.
    pub(super) fn begin_anew(&mut self) -> Result<bool, String> {
        let found = self.superblock();
        let former = self.former.clone().ok_or("nothing has begun")?;
        let random = self.rng.next_u64() as u32;
        let stats = LogStats::default();
        let log = take_back(former, &found, (self.habits.idle, random), stats, &mut self.io());
        #[allow(unused_mut, reason = "faults are planted with a feature")]
        let Ok(mut log) = log else { return Ok(false) };
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            log.plant(fault);
        }
        let (placing, shape) = (Placing::of(&self.layout, KEY), Shape::of(&self.layout));
        let making = Making { evict: EvictionBy::default(), ..self.making() };
        for (i, shard) in self.shards.iter_mut().enumerate() {
            let (entries, sums) = Map::words(shape);
            let (mut entries, mut sums) = (Words::heap(entries), Words::heap(sums));
            entries.share_fuse(self.fuse.clone());
            sums.share_fuse(self.fuse.clone());
            let map = Map::new(entries, sums, placing, i as u32, shape, making);
            if !shard.begin_anew(map) {
                return Err(format!("shard {i} is not taken back: {}", shard.under_way()));
            }
            #[cfg(feature = "planted")]
            if let Some(fault) = self.options.fault {
                shard.plant(fault);
            }
        }
        self.memory.borrow_mut().own(log.superblock());
        self.generation = log.superblock().generation;
        self.former = Some(log.superblock().clone());
        if let Some(machine) = &mut self.maintenance {
            machine.resume(RecordedLog::new(log));
        }
        self.work.give_up = None;
        self.validity.enabled.set(true);
        self.validity.barred.set(false);
        self.validity.asked.set(false);
        self.rotten.clear();
        self.device.borrow_mut().fail = if self.rng.chance(0.5) { 0.0 } else { 0.03 };
        self.know_what_is_durable();
        Ok(true)
    }
}
