//! Memory of what is dirty in the write log, as the allocator sees it: all that a log with one volume has on the heap, divided by the dirty extents.
//!
//! The bound is 40 bytes a dirty extent of 4 KiB: records, overlay, checksums, times, dependencies, and what containers have to spare. A start that finds
//! them takes 60 at most meanwhile.
//! `cargo test -p larder-engine --release --test writeback_memory -- --nocapture` prints the figures, and how long a write and a lookup take.
#![allow(clippy::unwrap_used, unsafe_code, reason = "a test counts what is allocated")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::BTreeMap;

use larder_base::{Nanos, Rng};
use larder_engine::block::OpId;
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::destager::{self, Pace};
use larder_engine::block::writeback::log::{
    Append, Asked, Asks, Attach, Config, Found, Lies, MEMORY_OF_BLOCK, MOST_RECORD, Sums, WriteLog,
};
use larder_engine::block::writeback::recovery::Records as _;
use larder_engine::block::writeback::scan::scan;
use larder_engine::block::writeback::volume_log::{Grain, Kind, Order};
use larder_format::Uuid;
use larder_format::block::superblock::WriteLogArea;
use larder_format::block::write_log::{SegmentGeometry, pieces, segment::SEGMENT_BYTES};

struct Counting;

thread_local! {
    /// Bytes of the heap that this thread has in use, each allocation with what an allocator adds.
    static USED: Cell<isize> = const { Cell::new(0) };
    /// The most that there was.
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn used() -> isize {
    USED.with(Cell::get)
}

fn count(bytes: isize) {
    // A thread that ends counts no more.
    let now = USED.try_with(|used| {
        used.set(used.get() + bytes);
        used.get()
    });
    let _ = now.and_then(|now| PEAK.try_with(|peak| peak.set(peak.get().max(now))));
}

/// What glibc takes for so many bytes: 8 more, in whole 16.
fn taken(layout: Layout) -> usize {
    (layout.size() + 8).next_multiple_of(16).max(32)
}

// SAFETY: the system's allocator, and a count beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(taken(layout) as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(taken(layout) as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

const BLOCK: u64 = 4096;
/// Dirty extents: a million where the compiler has made the test fast.
const EXTENTS: u64 = if cfg!(debug_assertions) { 1 << 18 } else { 1 << 20 };
/// Blocks of the volume: 1 TiB.
const BLOCKS: u64 = 1 << 28;
/// Bytes a dirty extent of 4 KiB, at most.
const MOST: f64 = MEMORY_OF_BLOCK as f64;
/// The same while a start finds them.
const MOST_AT_START: f64 = 60.0;
/// Bytes of a batch's header or a footer, at most.
const MOST_HEAD: u64 = 1 << 20;

/// Nanoseconds that this thread was on a processor; 0 where that cannot be told.
fn on_processor() -> u64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0)
}

fn config(run: u64) -> Config {
    Config {
        cache: Uuid([7; 16]),
        run,
        at: 1 << 20,
        geometry: SegmentGeometry::new(SEGMENT_BYTES, 512).unwrap(),
        segments: 4096,
        depth: 2,
        memory: 64 << 20,
        wall: 1 << 60,
    }
}

fn attach(order: Order) -> Attach {
    Attach {
        attachment: 1,
        volume: Uuid([1; 16]),
        generation: 1,
        destage: destager::Config { order, pace: Pace::AtBound, most: 64 << 20, depth: 64 },
        bound: Some(1 << 50),
        age: None,
        marked: false,
        frontier: 0,
        epoch: 0,
        marker: 1,
    }
}

/// A log with one volume whose device and store do at once what they are asked for.
struct World {
    log: WriteLog<()>,
    now: Nanos,
    rng: Rng,
    /// What it has written to its device but for payload, which is zeros, if that is kept: by the first byte.
    device: Option<BTreeMap<u64, Vec<u8>>>,
    /// Bytes of the heap before there was a log.
    before: isize,
    /// Writes, and nanoseconds of this thread before them.
    writes: (u64, u64),
}

impl World {
    fn new(order: Order) -> World {
        let before = used();
        let mut log = WriteLog::new(config(1));
        log.attach(Nanos(0), attach(order));
        let writes = (0, on_processor());
        World { log, now: Nanos(0), rng: Rng::new(1), device: None, before, writes }
    }

    /// The device has done what it was asked for; neither volume is stepped.
    fn carry(&mut self, mut asks: Asks<()>) {
        loop {
            for mut write in std::mem::take(&mut asks.writes) {
                if let Some(device) = &mut self.device {
                    device.insert(write.at, std::mem::take(&mut write.head));
                }
                self.log.written(self.now, write.number, true, &mut asks);
            }
            let Some(covers) = asks.flush.take() else { break };
            self.log.flushed(self.now, covers, true, &mut asks);
        }
        assert!(asks.writes.is_empty());
    }

    /// So many writes of `len` bytes come at once; where each begins `at` says.
    fn write(&mut self, batch: u64, len: u64, at: &mut impl FnMut(&mut Rng) -> u64) {
        let mut asks = Asks::default();
        for n in 0..batch {
            let at = at(&mut self.rng);
            let sums: Vec<u32> = match &self.device {
                Some(_) => pieces::sums(&vec![0; len as usize]).collect(),
                None => (0..len.div_ceil(BLOCK)).map(|_| self.rng.below(1 << 32) as u32).collect(),
            };
            let sums = Sums::new(&sums);
            let append = Append {
                op: OpId(n),
                attachment: 1,
                kind: Kind::Write,
                at,
                len,
                bytes: Some(()),
                sums,
                fua: false,
                may_punch: false,
            };
            self.log.gather(append, &mut asks);
        }
        self.log.gathered(self.now, &mut asks);
        self.carry(asks);
        self.now.0 += 100_000;
        self.writes.0 += batch;
    }

    /// A FLUSH comes.
    fn flush(&mut self) {
        let mut asks = Asks::default();
        self.log.flush(self.now, 1, OpId(0), &mut asks);
        self.carry(asks);
    }

    /// Everything is in the store up to this position, or a window behind it.
    fn destage(&mut self, position: u64) {
        let mut asks = Asks::default();
        self.log.drain(1, true, &mut asks);
        self.carry(asks);
        while self.log.status(self.now, 1).unwrap().positions[0] < position {
            let (mut out, mut asks) = (Vec::new(), Asks::default());
            self.now.0 += 1_000_000_000;
            self.log.due(self.now, &mut asks);
            self.log.step(self.now, 1, &mut out, &mut asks);
            while !out.is_empty() {
                for asked in std::mem::take(&mut out) {
                    let log = &mut self.log;
                    match asked {
                        Asked::Store(dirty, lies) => {
                            if let Some(Lies::Log(piece)) = lies {
                                log.unpin(self.now, piece.pin, &mut asks);
                            }
                            let done = (dirty.memory(), Some(1));
                            log.stored(self.now, 1, done, &mut out, &mut asks);
                        }
                        Asked::Flush => {
                            log.store_flushed(self.now, 1, Some(1), &mut out, &mut asks);
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
            self.carry(asks);
        }
        let mut asks = Asks::default();
        self.log.drain(1, false, &mut asks);
        self.carry(asks);
    }

    fn dirty(&self) -> u64 {
        self.log.status(self.now, 1).unwrap().dirty
    }

    fn last(&self) -> u64 {
        self.log.status(self.now, 1).unwrap().positions[3]
    }

    /// Bytes of the heap a dirty extent of this length.
    fn bytes(&self, extent: u64) -> f64 {
        let used = used() - self.before;
        used as f64 / (self.dirty() / extent) as f64
    }

    /// Looks at so many blocks: nanoseconds for each.
    fn lookups(&mut self, n: u64, blocks: u64) -> f64 {
        let began = on_processor();
        let (mut found, mut pins) = (0u64, Vec::new());
        for _ in 0..n {
            let at = self.rng.below(blocks) * BLOCK;
            self.log.look(1, at..at + BLOCK, |one| {
                if let Found::Logged(piece) = one {
                    found += 1;
                    pins.push(piece.pin);
                }
            });
            for pin in pins.drain(..) {
                self.log.unpin(self.now, pin, &mut Asks::default());
            }
        }
        let took = (on_processor() - began) as f64 / n as f64;
        println!("lookup: {took:.0} ns, {} of 1,000 dirty", found * 1000 / n);
        took
    }

    fn say(&self, what: &str, extent: u64) -> f64 {
        let bytes = self.bytes(extent);
        let each = (on_processor() - self.writes.1) as f64 / self.writes.0 as f64;
        let count = self.dirty() / extent;
        println!("{what}: {count} extents, {bytes:.1} bytes each; {each:.0} ns a write");
        bytes
    }
}

fn anywhere(rng: &mut Rng) -> u64 {
    rng.below(BLOCKS) * BLOCK
}

#[test]
fn a_dirty_extent_of_4_kib_takes_40_bytes_of_memory_at_most() {
    let mut world = World::new(Order::Any);
    while world.last() < EXTENTS {
        world.write(32, BLOCK, &mut anywhere);
    }
    assert!(world.say("random 4 KiB", BLOCK) <= MOST);
    world.lookups(1 << 16, BLOCKS);
    // From now on half of it comes to the store again and again, and as much is written.
    for round in 1..=3 {
        world.destage(world.last() - EXTENTS / 2);
        let bytes = world.bytes(BLOCK);
        println!("half of it destaged: {bytes:.1} bytes each");
        assert!(bytes <= MOST, "round {round}");
        world.writes = (0, on_processor());
        let end = world.last() + EXTENTS / 2;
        while world.last() < end {
            world.write(32, BLOCK, &mut anywhere);
        }
        assert!(world.say("and written again", BLOCK) <= MOST, "round {round}");
    }
    world.destage(world.last());
    assert_eq!(world.dirty(), 0);
    let left = used() - world.before;
    println!("all destaged: {left} bytes");
    assert!(left < 512 << 10);
}

#[test]
fn so_it_does_where_each_write_has_a_time_and_a_dependency_of_its_own_and_is_read() {
    for grain in [Grain::Completion, Grain::Flush] {
        let mut world = World::new(Order::Ordered(grain));
        // (A segment that is open holds its headers: 14 bytes for each of 65,536 extents, 4 for each of these.)
        while world.last() < 1 << 18 {
            world.write(1, BLOCK, &mut anywhere);
            world.now.0 += 10_000_000;
            if grain == Grain::Flush {
                world.flush();
            }
        }
        let mut pins = Vec::new();
        world.log.look(1, 0..BLOCKS * BLOCK, |one| {
            if let Found::Logged(piece) = one {
                pins.push(piece.pin);
            }
        });
        pins.into_iter().for_each(|pin| world.log.unpin(world.now, pin, &mut Asks::default()));
        assert!(world.say("one at a time", BLOCK) <= MOST, "{grain:?}");
    }
}

#[test]
fn overwrites_take_memory_for_their_records_alone() {
    let mut world = World::new(Order::Any);
    let blocks = EXTENTS / 4;
    while world.last() < EXTENTS {
        world.write(32, BLOCK, &mut |rng| rng.below(blocks) * BLOCK);
    }
    world.say("overwrites, four records an extent", BLOCK);
    world.lookups(1 << 16, blocks);
    let used = (used() - world.before) as f64;
    println!("{:.1} bytes a record", used / EXTENTS as f64);
    assert!(used / EXTENTS as f64 <= MOST);
}

#[test]
fn long_writes_take_little_more_than_their_checksums() {
    for (len, most) in [(2 * BLOCK, MOST), (256 << 10, 400.0)] {
        assert!(len <= MOST_RECORD);
        let mut world = World::new(Order::Any);
        let mut next = 0;
        while world.last() < (EXTENTS * BLOCK / len).min(1 << 18) {
            world.write(2, len, &mut |_| {
                next += len;
                next - len
            });
        }
        assert!(world.say(&format!("in order, {} KiB", len >> 10), len) <= most);
    }
}

/// Bytes of a device on which this was written, and nothing else.
fn read(device: &BTreeMap<u64, Vec<u8>>, at: u64, out: &mut [u8]) {
    out.fill(0);
    let end = at + out.len() as u64;
    for (&from, bytes) in device.range(at.saturating_sub(MOST_HEAD)..end) {
        let to = from + bytes.len() as u64;
        let (start, stop) = (from.max(at), to.min(end));
        if start < stop {
            let mine = &bytes[(start - from) as usize..(stop - from) as usize];
            out[(start - at) as usize..(stop - at) as usize].copy_from_slice(mine);
        }
    }
}

/// Memory of a start that finds a log of random writes of 4 KiB, with so many in a batch: bytes a record at most, and afterwards.
fn start_with(batch: u64) -> (f64, f64) {
    let mut world = World::new(Order::Any);
    world.device = Some(BTreeMap::new());
    while world.last() < EXTENTS {
        world.write(batch, BLOCK, &mut anywhere);
        if world.last().is_multiple_of(1 << 12) {
            world.flush();
        }
    }
    world.flush();
    let (device, records) = (world.device.take().unwrap(), world.last());
    let dirty = world.dirty();
    drop(world);
    let config = config(2);
    let area = WriteLogArea { at: config.at, geometry: config.geometry, segments: config.segments };
    let (before, began) = (used(), on_processor());
    PEAK.with(|peak| peak.set(before));
    let mut device = |at: u64, out: &mut [u8]| {
        read(&device, at, out);
        Ok(())
    };
    let mut scanned = scan(&area, config.cache, &mut device);
    let found = scanned.recover_packed(&[(1, 0)], Fault::default());
    let mut log: WriteLog<()> = WriteLog::found(config, &found, &scanned);
    log.attach(Nanos(0), attach(Order::Any));
    log.recover(Nanos(0), 1, &found.volumes[&1], &scanned);
    let took = (on_processor() - began) / records;
    assert_eq!(found.volumes[&1].records.len() as u64, records);
    drop((found, scanned));
    assert_eq!(log.status(Nanos(0), 1).unwrap().dirty, dirty);
    let bytes = |used: isize| (used - before) as f64 / records as f64;
    let (most, kept) = (bytes(PEAK.with(Cell::get)), bytes(used()));
    println!(
        "{batch} writes a batch: {most:.1} bytes a record at most, {kept:.1} kept; {took} ns each"
    );
    (most, kept)
}

#[test]
fn a_start_that_finds_dirty_data_takes_60_bytes_of_memory_a_record_at_most() {
    let (most, kept) = start_with(32);
    assert!(most <= MOST_AT_START && kept <= MOST, "{most} {kept}");
}

#[test]
fn a_start_whose_batches_have_one_record_takes_that_and_what_it_keeps_of_a_batch() {
    let (most, kept) = start_with(1);
    assert!(most <= MOST_AT_START + 120.0 && kept <= MOST, "{most} {kept}");
}
