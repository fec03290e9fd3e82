//! How a run begins: formatting, and starting on what the last one left.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::{Killed, UnixSecs, Words};
use larder_engine::block::map::{Making, Map, Replacement, Shape};
use larder_engine::block::node::start::memory::{HEADER_WORDS, Memory};
use larder_engine::block::node::start::places::Places;
use larder_engine::block::node::start::without::start_without;
use larder_engine::block::node::start::{Left, Notes, Refused, Setup, Started, Without};
use larder_engine::block::{BlockConfig, BlockLimits, BlockShard, Fault, MapLog, Regions};
use larder_format::Uuid;
use larder_format::block::superblock::choose;
use larder_format::block::{BlockSuperblock, Volume};
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

/// The start is over before it has changed anything.
#[derive(Debug)]
struct Ended;

/// Memory that is still there when who uses it is gone.
pub(super) struct Lasting(Vec<&'static [AtomicU64]>);

impl Lasting {
    pub(super) fn of(header: &Words, words: &[(Words, Words)]) -> Lasting {
        let all = [header].into_iter().chain(words.iter().flat_map(|(e, s)| [e, s]));
        let lasting = |words: &Words| -> &'static [AtomicU64] {
            (0..words.len()).map(|i| AtomicU64::new(words.load(i))).collect::<Vec<_>>().leak()
        };
        Lasting(all.map(lasting).collect())
    }

    pub(super) fn words(&self) -> (Words, Vec<(Words, Words)>) {
        let words = |cells: &&'static [AtomicU64]| Words::from_static(cells);
        let maps = self.0[1..].chunks_exact(2).map(|m| (words(&m[0]), words(&m[1])));
        (words(&self.0[0]), maps.collect())
    }

    pub(super) fn survived(&self) -> Survived {
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
        self.rotten_log = None;
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
        self.take_contents();
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
                        self.backing_loses();
                    }
                }
            }
        }
    }

    /// Has the store of a volume made durable. An error where the start ends here: it is cut off, or the store does not take it.
    fn flush_at_start(&mut self, name: &str, doomed: bool) -> Result<(), Ended> {
        if doomed && self.rng.chance(0.1) {
            return Err(Ended);
        }
        self.volumes.iter_mut().filter(|v| v.name == name).for_each(|v| v.owed.clear());
        Ok(())
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
        let setup = self.setup(shape);
        let comers = self.comers();
        let void = self.validity.barred.get();
        let voided = void.then_some("it was given up");
        let is_there = self.validity.barred.clone();
        let (mut io, mut note) = (self.io(), Note { is_there, fails: fate == Fate::Refused });
        let changes = self.device.borrow().changes();
        let started = catch_unwind(AssertUnwindSafe(|| {
            let left = Left { superblock: sb, voided, memory: &mut memory, words };
            let judged = left.judge(&comers, &setup, &mut io)?;
            let flush = |volume: &Volume| self.flush_at_start(&volume.name, doomed);
            let ready = match judged.stores_durable(flush) {
                Ok(ready) => ready,
                Err(Ended) => return Ok(None),
            };
            ready.take_over(&mut memory, &mut io, &mut note).map(Some)
        }));
        let mut device = self.device.borrow_mut();
        (device.fuse, device.unwinds, device.blown) = (u64::MAX, false, false);
        (device.fails_in, device.dies) = (None, false);
        drop(device);
        self.fuse.store(u64::MAX, Ordering::Relaxed);
        let started: Result<Option<Started>, Refused> = match (started, &lasting) {
            (Ok(Err(Refused::NotNoted { .. })), Some(lasting)) if !doomed => {
                return Err(lasting.survived());
            }
            (Ok(started), _) => started,
            (Err(payload), Some(lasting)) if payload.is::<Killed>() => {
                return Err(lasting.survived());
            }
            (Err(payload), _) => resume_unwind(payload),
        };
        let started = started.expect("no other start is refused");
        let Some(started) = started else {
            if self.device.borrow().changes() != changes {
                self.fail("a start has changed the device before all stores were durable".into());
            }
            self.seen.early_ends += 1;
            return Err(lasting.expect("only such a start ends early").survived());
        };
        *self.memory.borrow_mut() = memory;
        let (superblock, shards, places, log) = match started {
            Started::With(begun) => {
                self.seen.short_logs += u64::from(begun.damaged);
                self.seen.worked_again += u64::from(void);
                let sb = begun.log.superblock().clone();
                (sb, begun.shards, begun.places, Some(begun.log))
            }
            Started::Without(without) => {
                self.seen.failed_starts += 1;
                (without.superblock, without.shards, without.places, None)
            }
        };
        let begun = (superblock, shards, places, log);
        self.goes_on(begun);
        Ok(())
    }

    /// The device is not there, and volumes are served without it. What memory has of it stays.
    pub(super) fn begin_without(&mut self, survived: Option<Survived>) {
        self.seen.passed_by += 1;
        self.script.push(format!("{} a start without the device", self.time));
        self.take_contents();
        self.begin_limits();
        let random = self.rng.next_u64() >> 16;
        let sb = BlockSuperblock::format(Uuid([2; 16]), KEY, random, self.layout, UnixSecs(1));
        let setup = self.setup(Shape::of(&self.layout));
        let is_there = self.validity.barred.clone();
        let (comers, mut note) = (self.comers(), Note { is_there, fails: false });
        let without = start_without(sb, &comers, &setup, "it is not there", &mut note);
        let Without { superblock, shards, places, .. } = without.expect("it is noted");
        *self.memory.borrow_mut() = Memory::new(Words::heap(HEADER_WORDS), false);
        self.goes_on((superblock, shards, places, None));
        (self.is_passed_by, self.passed_by) = (true, survived);
    }

    /// A run has begun so.
    fn goes_on(&mut self, begun: (BlockSuperblock, Vec<BlockShard>, Places, Option<MapLog>)) {
        let (superblock, shards, places, log) = begun;
        (self.is_passed_by, self.passed_by) = (false, None);
        places.decided.iter().for_each(|decided| self.has_come(decided));
        self.generation = superblock.generation;
        if self.layout.is_sparse() && log.is_some() {
            self.device.borrow_mut().table = Some((self.layout, self.generation));
        }
        self.place(&superblock);
        self.seen.put_aside += self.aside.len() as u64;
        self.former = Some(superblock.clone());
        self.begin_maintenance(log, superblock);
        self.shards = shards;
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            self.shards.iter_mut().for_each(|s| s.plant(fault));
        }
        self.begin_streams();
        self.begin_flushing();
        self.shares.count(&self.shards);
        self.device.borrow_mut().fail = if self.rng.chance(0.5) { 0.0 } else { 0.03 };
        self.know_what_is_durable();
    }

    fn setup(&mut self, shape: Shape) -> Setup {
        let limits = BlockLimits { fills: 40, waiting: 1000 };
        let regions = Regions { groups: self.layout.region_groups, count: self.layout.regions };
        Setup {
            shape,
            making: self.making(),
            config: BlockConfig { line_bytes: LINE as u32, write: self.mode, limits, regions },
            idle: self.habits.idle,
            empty: false,
            random: self.rng.next_u64() as u32,
            fault: self.fault(),
        }
    }

    pub(super) fn making(&mut self) -> Making {
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
}
