//! What it costs the cache when a whole volume of 2 TiB is trimmed, over NBD in pieces of 4 GiB, while the cache is full of
//! it: locks, bits of the write-intent map and dropping, without stores and without the client's own time; and what it costs
//! afterwards to take the lines out of the map, which nobody waits for.
//!
//! ```sh
//! cargo test --release -p larder-block --test ranges -- --ignored --nocapture
//! ```
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "what is measured is measured with a clock"
)]

use std::time::{Duration, Instant};

use larder_base::{Nanos, Rng, UnixSecs, Words};
use larder_engine::block::address::{Place, Placing};
use larder_engine::block::map::{Making, Map, Shape};
use larder_engine::block::{
    BlockConfig, BlockEffects, BlockLimits, BlockShard, GROUP_LINES, IoFailed, IoId, LineId, LogIo,
    LogShards, LogStep, MapLog, MapRecord, Merge, OpId, PartKind, Regions, SlotId, Source, Sum,
    WriteMode,
};
use larder_format::block::log::Held;
use larder_format::block::{BlockSuperblock, Layout, Placement};
use larder_format::{PAGE_SIZE, Uuid};
use larder_runtime::machine;

const SHARDS: u32 = 8;
const LINE: u64 = 4096;
const VOLUME: u64 = 2 << 40;
/// What one NBD request can name.
const PIECE: u64 = (4 << 30) - (64 << 10);
/// Slots or groups looked at under one lock, as the daemon does.
const STEP: u32 = 4096;
/// Where fewer groups of a shard may have lines, they go at once, as in the daemon.
const VOID: u64 = 64;
/// What is looked at under one lock behind the reply.
const SWEEP_STEP: u32 = 512;

/// Processor time of the process, in which nothing else goes on.
fn processor() -> Duration {
    let (user, system) = machine::processor_time();
    user + system
}

/// A range is granted at once: nothing else is under way.
#[derive(Default)]
struct Granted(u32);

impl BlockEffects for Granted {
    fn flash_read(&mut self, _: IoId, _: SlotId, _: LineId, _: u32, _: OpId) {}
    fn flash_write(&mut self, _: IoId, _: SlotId, _: LineId, _: u32, _: OpId) {}
    fn fill(&mut self, _: IoId, _: SlotId, _: LineId, _: u32, _: Source) {}
    fn merge(&mut self, _: IoId, _: Merge, _: OpId) {}
    fn copy(&mut self, _: IoId, _: SlotId, _: SlotId, _: u32) {}
    fn backing_read(&mut self, _: IoId, _: u64, _: u32, _: OpId) {}
    fn backing_change(&mut self, _: IoId, _: OpId, _: PartKind, _: u64, _: u32) {}
    fn deliver(&mut self, _: Source, _: OpId, _: u64, _: u32) {}
    fn release(&mut self, _: IoId) {}
    fn done(&mut self, _: OpId, _: Result<(), IoFailed>, _: bool) {
        self.0 += 1;
    }
    fn release_op(&mut self, _: OpId) {}
    fn intent(&mut self, _: u32) {}
    fn commit_soon(&mut self) {}
    fn prefer(&mut self, _: LineId, _: LineId) -> bool {
        true
    }
}

/// A device that takes everything, and was formatted just now.
#[derive(Default)]
struct Empty {
    writes: u64,
    flushes: u64,
}

impl LogIo for Empty {
    fn read(&mut self, _: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        out.fill(0);
        Ok(())
    }
    fn write(&mut self, _: u64, bytes: &[u8]) -> Result<(), IoFailed> {
        self.writes += (bytes.len() / PAGE_SIZE) as u64;
        Ok(())
    }
    fn flush(&mut self) -> Result<(), IoFailed> {
        self.flushes += 1;
        Ok(())
    }
}

/// Only bits are wanted of the log here.
#[derive(Default)]
struct Bits {
    ready: u64,
}

impl LogShards for Bits {
    fn records_waiting(&mut self, _: u32) -> usize {
        0
    }
    fn take_records(&mut self, _: u32, _: usize, _: &mut Vec<MapRecord>) {}
    fn records_durable(&mut self, _: u32) {}
    fn records_lost(&mut self, _: u32) {}
    fn state(&mut self, _: u32, _: SlotId, _: u32, _: &mut Vec<Held>) {}
    fn quiet(&mut self, _: u32, _: u32) -> bool {
        true
    }
    fn intent_ready(&mut self, _: u32, _: u32) {
        self.ready += 1;
    }
    fn flush_backing(&mut self, _: u32) -> Result<(), IoFailed> {
        Ok(())
    }
}

/// What a trim has cost: processor time.
struct Cost {
    lines: u64,
    /// Lines that could be served afterwards, before anything was swept.
    lines_after: u64,
    /// Slots and groups that were looked at.
    steps: u64,
    dropping: Duration,
    /// Behind the reply: slots and groups that were looked at, time, and the longest time in one step.
    swept: (u64, Duration, Duration),
    /// For the bits, and how many pages and flushes they were.
    bits: Duration,
    pages: u64,
    flushes: u64,
    /// Of a step of the log afterwards, when nothing is due.
    idle: Duration,
}

struct Cache {
    layout: Layout,
    shards: Vec<BlockShard>,
    log: MapLog,
    io: Empty,
}

impl Cache {
    /// A cache in which every slot has a line of the volume: its first ones, or others all over it.
    fn full(placement: Placement, bytes: u64, scattered: bool) -> Cache {
        let layout = Layout::of(bytes, LINE as u32, placement, SHARDS).unwrap();
        let placing = Placing::new(SHARDS, layout.group_sets, 5);
        let shape = Shape::of(&layout);
        let regions = Regions { groups: layout.region_groups, count: layout.regions };
        let (line_bytes, limits) = (LINE as u32, BlockLimits::default());
        let config = BlockConfig { line_bytes, write: WriteMode::WriteThrough, limits, regions };
        let lap = u64::from(SHARDS) * u64::from(layout.group_sets);
        // The last one is not whole.
        let laps =
            (VOLUME / LINE / u64::from(GROUP_LINES) / lap).max(u64::from(layout.ways)) as u32;
        let mut rng = Rng::new(3);
        let shards = (0..SHARDS)
            .map(|shard| {
                let (entries, rest) = Map::words(shape);
                let (entries, rest) = (Words::heap(entries), Words::heap(rest));
                let mut map = Map::new(entries, rest, placing, shard, shape, Making::default());
                for slot in 0..map.len() {
                    let (row, index) = (slot / GROUP_LINES, slot % GROUP_LINES);
                    let way = row % layout.ways;
                    let each = laps / layout.ways;
                    let tag = match scattered {
                        true => way * each + rng.below(u64::from(each)) as u32,
                        false => way,
                    };
                    let place = Place { group_set: row / layout.ways, tag };
                    let line = placing.line(shard, place, index);
                    map.restore(SlotId(slot), Some((line, Sum(slot & Sum::MASK))));
                }
                BlockShard::new(config, map)
            })
            .collect();
        let sb = BlockSuperblock::format(Uuid([1; 16]), 5, 9, layout, UnixSecs(1));
        let mut io = Empty::default();
        let idle = Nanos::from_secs(30);
        let log = MapLog::recover(sb, true, idle, &mut io, |_, _| {}).unwrap().log;
        let mut cache = Cache { layout, shards, log, io };
        while cache.log.step(Nanos::ZERO, &mut Bits::default(), &mut cache.io).unwrap()
            == LogStep::Worked
        {}
        (cache.io.writes, cache.io.flushes) = (0, 0);
        cache
    }

    fn lines(&self) -> u64 {
        self.shards.iter().map(|s| u64::from(s.lines())).sum()
    }

    /// Trims the volume in pieces.
    fn trim(&mut self, piece: u64) -> Cost {
        let mut cost = Cost {
            lines: self.lines(),
            lines_after: 0,
            steps: 0,
            dropping: Duration::ZERO,
            swept: (0, Duration::ZERO, Duration::ZERO),
            bits: Duration::ZERO,
            pages: 0,
            flushes: 0,
            idle: Duration::ZERO,
        };
        let now = Nanos::from_secs(1);
        for (at, op) in (0..VOLUME).step_by(piece as usize).zip(0..) {
            let (first, last) = (LineId(at / LINE), LineId((at + piece).min(VOLUME) / LINE - 1));
            let mut granted = Granted::default();
            let begin = processor();
            for shard in &mut self.shards {
                shard.lock_range(now, OpId(op), first, last, &mut granted);
            }
            assert_eq!(granted.0, SHARDS);
            let region = |line: LineId| (line.group().0 / self.layout.region_groups) as u32;
            let mut bits = Bits::default();
            (region(first)..=region(last)).for_each(|r| self.log.ask(u32::MAX, r));
            while bits.ready < u64::from(region(last) - region(first)) + 1 {
                self.log.step(now, &mut bits, &mut self.io).unwrap();
            }
            cost.bits += processor() - begin;
            let begin = processor();
            for shard in &mut self.shards {
                let left = shard.void_range(first, last, VOID);
                for (first, last) in left.into_iter().flatten() {
                    let mut cursor = Some(0);
                    while let Some(from) = cursor {
                        cursor = shard.drop_range(first, last, from, STEP);
                    }
                }
            }
            for shard in &mut self.shards {
                shard.unlock_range(now, OpId(op), &mut granted);
            }
            cost.dropping += processor() - begin;
        }
        (cost.pages, cost.flushes) = (self.io.writes, self.io.flushes);
        let begin = processor();
        for _ in 0..100 {
            let step = self.log.step(Nanos::from_secs(2), &mut Bits::default(), &mut self.io);
            assert_eq!(step.unwrap(), LogStep::Idle);
        }
        cost.idle = (processor() - begin) / 100;
        let steps = |cache: &Cache| cache.shards.iter().map(|s| s.stats().range_steps).sum();
        cost.steps = steps(self);
        cost.lines_after = self.lines();
        let begin = processor();
        for shard in &mut self.shards {
            let mut step = Instant::now();
            while shard.sweep(SWEEP_STEP) {
                cost.swept.2 = cost.swept.2.max(step.elapsed());
                step = Instant::now();
            }
        }
        cost.swept.0 = steps(self) - cost.steps;
        cost.swept.1 = processor() - begin;
        let left = self.shards.iter().map(|s| u64::from(s.map().count()));
        assert_eq!(left.sum::<u64>(), cost.lines_after, "all is swept");
        cost
    }
}

/// The work is bounded by what is there: pieces that nothing lies in cost a step or two, and no piece costs more than its
/// groups or the cache's slots.
#[test]
fn a_trim_is_a_range_and_not_its_lines() {
    for placement in [Placement::Sets(1), Placement::Sets(8), Placement::Full] {
        for scattered in [false, true] {
            let mut cache = Cache::full(placement, 64 << 20, scattered);
            let slots = cache.layout.slots();
            assert_eq!(cache.lines(), slots, "{placement}");
            let cost = cache.trim(PIECE);
            assert_eq!((cost.lines_after, cache.lines()), (0, 0), "{placement}, {scattered}");
            let pieces = VOLUME.div_ceil(PIECE);
            // In the volume there are 33 million groups. What is swept behind is at most a look at each slot, and one more
            // for each region that is taken by itself.
            let steps = cost.steps + cost.swept.0;
            let most =
                if scattered { pieces * slots } else { slots } + 4 * pieces * u64::from(SHARDS);
            assert!(steps <= most, "{placement}: {steps} steps of {most}");
            // A bit a region, 32,512 to a page; a piece may end in the midst of one.
            let pages = u64::from(cache.layout.regions) / 32_512 + 2 * pieces;
            assert!(cost.pages <= pages && cost.flushes <= pieces, "{} pages", cost.pages);
            // Again: nothing is there any more.
            let before = cost.steps + cost.swept.0;
            let again = cache.trim(PIECE).steps - before;
            assert!(again <= 4 * pieces * u64::from(SHARDS), "{placement}: {again} steps");
        }
    }
}

#[test]
#[ignore = "a measurement: takes gigabytes of memory"]
fn seconds_for_two_tib() {
    let gib = std::env::var("LARDER_TRIM_GIB").ok().and_then(|v| v.parse().ok()).unwrap_or(100);
    for placement in [Placement::Sets(1), Placement::Sets(8), Placement::Full] {
        for scattered in [false, true] {
            for piece in [PIECE, VOLUME] {
                let cost = Cache::full(placement, gib << 30, scattered).trim(piece);
                println!(
                    "{placement}, {gib} GiB, {} lines {}, in pieces of {} MiB: {:.3} s in all: dropping {:.3} s ({} steps), bits \
                     {:.3} s ({} pages, {} flushes); behind the reply {:.1} s ({} steps, the longest {:.2} ms), {:.0} us for a step \
                     of the log",
                    cost.lines,
                    if scattered { "all over" } else { "side by side" },
                    piece >> 20,
                    (cost.dropping + cost.bits).as_secs_f64(),
                    cost.dropping.as_secs_f64(),
                    cost.steps,
                    cost.bits.as_secs_f64(),
                    cost.pages,
                    cost.flushes,
                    cost.swept.1.as_secs_f64(),
                    cost.swept.0,
                    cost.swept.2.as_secs_f64() * 1e3,
                    cost.idle.as_secs_f64() * 1e6,
                );
            }
        }
    }
}
