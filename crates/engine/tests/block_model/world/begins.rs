//! How a run begins: formatting, and starting on what the last one left.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use larder_base::{UnixSecs, Words};
use larder_engine::block::address::{Place, Placing};
use larder_engine::block::map::{Making, Map, Replacement, Shape, Slot};
use larder_engine::block::record::TapedLog;
use larder_engine::block::{
    BlockConfig, BlockLimits, BlockShard, FoundPage, GROUP_LINES, IoFailed, LineId, LogStats,
    MapLog, Regions, SlotId, Sum, read_table,
};
use larder_format::Uuid;
use larder_format::block::BlockSuperblock;
use larder_format::block::log::Held;
use larder_policy::block::{EvictionBy, VictimPolicy};

use super::flushing::IDLE;
use super::{KEY, LINE, PAGE_GROUPS, SHARDS, World};
use crate::device::SECTOR;

impl World {
    pub(super) fn format(&mut self) {
        self.device.borrow_mut().zero();
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

    /// Starts the cache on what is on the device, and in memory if that survived. A start that the device fails is tried again,
    /// after a reboot.
    pub(super) fn begin(&mut self, survived: Option<Vec<(Words, Words)>>) {
        let mut begun = self.start(survived);
        for _ in 0..2 {
            begun = begun.or_else(|IoFailed| self.start(None));
        }
        begun.expect("a device that works");
    }

    fn start(&mut self, survived: Option<Vec<(Words, Words)>>) -> Result<(), IoFailed> {
        let read = |world: &World, copy: u64| -> Vec<u8> {
            world.device.borrow().read(copy * 65_536, 65_536 / SECTOR).concat()
        };
        let sb = larder_format::block::superblock::choose(&read(self, 0), &read(self, 1))
            .expect("a superblock");
        self.generation = sb.generation;
        if self.layout.is_sparse() {
            self.device.borrow_mut().table = Some((self.layout, sb.generation));
        }
        let placing = Placing::of(&self.layout, KEY);
        let mut shape = Shape::of(&self.layout);
        if let Shape::Sparse { frames, .. } = &mut shape {
            *frames = self.frames;
        }
        let slots = shape.slots();
        let shared = survived.is_some();
        let mut words: Vec<(Words, Words)> = survived.unwrap_or_else(|| {
            let (e, s) = Map::words(shape);
            (0..SHARDS).map(|_| (Words::heap(e), Words::heap(s))).collect()
        });
        self.fuse = Arc::new(AtomicU64::new(u64::MAX));
        let making = Making {
            replacement: Replacement::ALL[self.rng.below(5) as usize],
            reclaim: VictimPolicy::ALL[self.rng.below(4) as usize],
            evict: match self.rng.below(3) {
                0 => EvictionBy::Cache,
                n => EvictionBy::Gc { keep: n as f64 * 0.4 },
            },
        };
        let mut maps: Vec<Map> = words
            .drain(..)
            .enumerate()
            .map(|(i, (mut entries, mut sums))| {
                entries.share_fuse(self.fuse.clone());
                sums.share_fuse(self.fuse.clone());
                Map::new(entries, sums, placing, i as u32, shape, making)
            })
            .collect();
        let recovered = MapLog::recover(sb, shared, IDLE, &mut self.io(), |slot, held: Held| {
            let map = &mut maps[(slot / u64::from(slots)) as usize];
            map.restore(
                SlotId((slot % u64::from(slots)) as u32),
                held.map(|(l, s)| (LineId(l), Sum(s))),
            );
        })?;
        let damaged = recovered.damaged;
        #[allow(unused_mut, reason = "faults are planted with a feature")]
        let mut log = recovered.log;
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            log.plant(fault);
        }
        for slot in damaged.into_iter().flatten() {
            let map = &mut maps[(slot / u64::from(slots)) as usize];
            let slot = SlotId((slot % u64::from(slots)) as u32);
            if map.get(slot) == Slot::Free {
                map.hold(slot);
            }
        }
        let regions = Regions { groups: self.layout.region_groups, count: self.layout.regions };
        if !shared && self.layout.is_sparse() {
            let sb = log.superblock().clone();
            let per = (PAGE_GROUPS * GROUP_LINES) as u64;
            read_table(&sb, &mut self.io(), |found: FoundPage<'_>| {
                let Some(slots) = found.slots else { return true };
                let map = &mut maps[found.shard as usize];
                let before = slots.iter().flatten().count();
                for (i, held) in (0u64..).zip(slots.iter_mut()) {
                    let slot = u64::from(found.page) * per + i;
                    let place = Place { group_set: (slot / 16) as u32, tag: 0 };
                    let line = placing.line(found.shard, place, (slot % 16) as u32);
                    if log.is_set(regions.of(line)) {
                        *held = None;
                    }
                }
                let lines = slots.iter().flatten().count();
                if lines > 0 {
                    map.sparse_mut().expect("a sparse map").found(found.page, lines as u32);
                }
                lines != before
            })?;
        } else if !shared {
            for map in &mut maps {
                for slot in (0..map.len()).map(SlotId) {
                    let Slot::Line(line) = map.get(slot) else { continue };
                    if log.is_set(regions.of(line)) || !log.is_whole() {
                        map.hold(slot);
                    }
                }
            }
        }
        let next = |sb: &mut BlockSuperblock| sb.epoch += 1;
        let taken = if log.is_whole() {
            log.update(&mut self.io(), next)
        } else {
            self.seen.short_logs += 1;
            log.begin_anew(&mut self.io(), next)
        };
        taken.map_err(|_| IoFailed)?;
        self.begin_maintenance(log);
        let limits = BlockLimits { fills: 40, waiting: 1000 };
        let config = BlockConfig { line_bytes: LINE as u32, write: self.mode, limits, regions };
        self.shards = maps.into_iter().map(|map| BlockShard::new(config, map)).collect();
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            self.shards.iter_mut().for_each(|s| s.plant(fault));
        }
        self.begin_streams();
        self.begin_limits();
        self.begin_flushing();
        self.shares.count(&self.shards);
        self.device.borrow_mut().fail = if self.rng.chance(0.5) { 0.0 } else { 0.03 };
        self.know_what_is_durable();
        Ok(())
    }

    /// As a daemon does it while every line is locked. Returns whether the device has taken it.
    pub(super) fn begin_anew(&mut self) -> Result<bool, String> {
        let read = |world: &World, copy: u64| -> Vec<u8> {
            world.device.borrow().read(copy * 65_536, 65_536 / SECTOR).concat()
        };
        let sb = larder_format::block::superblock::choose(&read(self, 0), &read(self, 1))
            .map_err(|e| e.to_string())?;
        let epoch = sb.epoch + 1;
        let log = MapLog::take_back(sb, epoch, IDLE, LogStats::default(), &mut self.io());
        #[allow(unused_mut, reason = "faults are planted with a feature")]
        let Ok(mut log) = log else { return Ok(false) };
        #[cfg(feature = "planted")]
        if let Some(fault) = self.options.fault {
            log.plant(fault);
        }
        let (placing, shape) = (Placing::of(&self.layout, KEY), Shape::of(&self.layout));
        let making = Making {
            replacement: Replacement::ALL[self.rng.below(5) as usize],
            reclaim: VictimPolicy::ALL[self.rng.below(4) as usize],
            evict: EvictionBy::default(),
        };
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
        self.generation = log.superblock().generation;
        if let Some(machine) = &mut self.maintenance {
            machine.resume(TapedLog::new(log));
        }
        self.validity.enabled.set(true);
        self.validity.barred.set(false);
        self.rotten.clear();
        self.device.borrow_mut().fail = if self.rng.chance(0.5) { 0.0 } else { 0.03 };
        self.know_what_is_durable();
        Ok(true)
    }
}
