//! Its pacing, with a clock of the test: when it wants to be woken, and what it does late.

use std::cell::Cell;

use larder_base::{ByteSize, UnixSecs};
use larder_format::Uuid;
use larder_format::block::Layout;
use larder_policy::budget::{BudgetState, WriteBudgetConfig};

use super::*;
use crate::block::api::{IoId, LineId, OpId};
use crate::block::log::MapLog;
use crate::block::node::calls::Out;
use crate::block::node::limits::Limits;
use crate::block::node::setup;

const LINE: u32 = 4096;
const DISK: VolumeId = VolumeId(7);

fn at(millis: u64) -> Nanos {
    Nanos::from_millis(millis)
}

/// Shards of which one has so many records, and what they were told.
#[derive(Default)]
struct Few {
    records: usize,
    durable: u32,
    ready: Vec<(u32, u32)>,
    ranges: Vec<OpId>,
    paid: Vec<OpId>,
    disabled: u32,
    written: u32,
    ended: Vec<Result<(), FlashError>>,
    /// Steps of a sweep that are left.
    voids: u32,
    busy: bool,
}

impl Shards for Few {
    fn shards(&self) -> u32 {
        2
    }
    fn records_waiting(&mut self, shard: u32) -> usize {
        if shard == 0 { self.records } else { 0 }
    }
    fn take_records(&mut self, shard: u32, most: usize, out: &mut Vec<MapRecord>) {
        let take = self.records_waiting(shard).min(most).min(100);
        self.records -= take;
        let record = MapRecord { slot: SlotId(0), holds: Some((LineId(0), Sum(0))) };
        out.extend(std::iter::repeat_n(record, take));
    }
    fn take_pages(&mut self, _: u32, _: usize, _: &mut Vec<TableChange>) {}
    fn emptied(&mut self, _: u32, _: &mut Vec<(SlotId, u32)>) {}
    fn records_durable(&mut self, _: Nanos, shard: u32) {
        self.durable += u32::from(shard == 0);
    }
    fn records_lost(&mut self, _: u32) {}
    fn state(&mut self, _: u32, _: SlotId, most: u32, out: &mut Vec<Held>) {
        out.extend((0..most).map(|_| None));
    }
    fn quiet(&mut self, _: u32, _: u32) -> bool {
        !self.busy
    }
    fn intent_ready(&mut self, _: Nanos, shard: u32, region: u32) {
        self.ready.push((shard, region));
    }
    fn flash_written(&mut self, _: Nanos, _: ShardIo, _: Result<&[u32], IoFailed>) {
        self.written += 1;
    }
    fn page_loaded(&mut self, _: Nanos, _: ShardIo, _: Result<&[Option<Sum>], IoFailed>) {}
    fn flash_ended(&mut self, _: Nanos, ended: Result<(), FlashError>) {
        self.ended.push(ended);
    }
    fn sweep(&mut self, _: u32, _: u32) -> bool {
        self.voids = self.voids.saturating_sub(1);
        self.voids > 0
    }
    fn disable(&mut self, _: Nanos, _: u32) {
        self.disabled += 1;
    }
    fn unsettled(&mut self, _: u32) -> usize {
        0
    }
    fn bits_ready(&mut self, op: OpId) {
        self.ranges.push(op);
    }
    fn budget_kept(&mut self, op: OpId) {
        self.paid.push(op);
    }
    fn is_left_alone(&mut self, now: Nanos, _: u32) -> bool {
        now >= at(40_000)
    }
    fn store_of(&mut self, region: u32) -> Option<VolumeId> {
        (region < 8).then_some(DISK)
    }
    fn stores(&mut self) -> Vec<VolumeId> {
        vec![DISK]
    }
}

/// A device that takes everything, until it fails.
#[derive(Default)]
struct Device {
    writes: u32,
    fails: bool,
}

impl LogIo for Device {
    fn read(&mut self, _: u64, out: &mut [u8]) -> Result<(), IoFailed> {
        out.fill(0);
        Ok(())
    }
    fn write(&mut self, _: u64, _: &[u8]) -> Result<(), IoFailed> {
        self.writes += 1;
        if self.fails { Err(IoFailed) } else { Ok(()) }
    }
    fn flush(&mut self) -> Result<(), IoFailed> {
        if self.fails { Err(IoFailed) } else { Ok(()) }
    }
}

/// What it has asked for.
#[derive(Default)]
struct Asked {
    fills: u32,
    flushes: Vec<(VolumeId, u64)>,
    said: Vec<String>,
    /// Why it is noted nowhere, as it was said last.
    unnoted: Option<String>,
    /// Nothing can be noted.
    unable: bool,
}

impl Effects<()> for Asked {
    fn fill(&mut self, _: Fill<()>) {
        self.fills += 1;
    }
    fn copy(&mut self, _: Copying) {}
    fn load(&mut self, _: Load) {}
    fn store_flush(&mut self, store: VolumeId, number: u64) {
        self.flushes.push((store, number));
    }
    fn note_given_up(&mut self, _: &BlockSuperblock) -> Result<(), String> {
        self.said.push(if self.unable { "not noted" } else { "noted" }.into());
        if self.unable { Err("no directory".into()) } else { Ok(()) }
    }
    fn unnoted(&mut self, why: Option<&str>) {
        self.unnoted = why.map(str::to_owned);
    }
    fn disown(&mut self) {
        self.said.push("disowned".into());
    }
    fn given_up(&mut self, why: &str) {
        self.said.push(format!("given up: {why}"));
    }
    fn not_durable(&mut self, store: VolumeId) {
        assert_eq!(store, DISK);
        self.said.push("not durable".into());
    }
    fn identity(&mut self, volume: &str) -> Option<[u8; 64]> {
        (volume == "served").then_some([7; 64])
    }
    fn stopped(&mut self) {
        self.said.push("stopped".into());
    }
    fn sweeping(&mut self, late: bool) {
        self.said.push(format!("sweeping {late}"));
    }
}

struct Bench {
    machine: Maintenance,
    shards: Few,
    device: Device,
    asked: Asked,
}

impl Bench {
    fn new() -> Bench {
        let layout = Layout::new(64 << 20, LINE, 8, 2).unwrap();
        let sb = BlockSuperblock::format(Uuid([1; 16]), 5, 9, layout, UnixSecs(1));
        let log = RecordedLog::new(MapLog::fresh(sb.clone(), at(30_000)));
        let mut machine = Maintenance::new(Pace::default(), Some(log), sb);
        machine.commit = false;
        let mut bench = Bench {
            machine,
            shards: Few::default(),
            device: Device::default(),
            asked: Asked::default(),
        };
        // (The first step finds nothing.)
        assert_eq!(bench.turn(200), Turn::At(at(400)));
        bench
    }

    fn turn(&mut self, millis: u64) -> Turn {
        let Bench { machine, shards, device, asked } = self;
        let mut io = Charged::new(device, Limits::default(), at(millis));
        machine.turn(at(millis), shards, &mut io, asked)
    }

    fn take(&mut self, millis: u64, work: Work<()>) {
        let Bench { machine, shards, device, asked } = self;
        let mut io = Charged::new(device, Limits::default(), at(millis));
        machine.take(at(millis), work, shards, &mut io, asked);
    }

    fn hurry(&mut self, millis: u64) -> u64 {
        let Bench { machine, shards, device, asked } = self;
        let mut io = Charged::new(device, Limits::default(), at(millis));
        machine.hurry(at(millis), (0, 9), shards, &mut io, asked)
    }

    /// Turns until it is over, without any time.
    fn end(&mut self, millis: u64) -> Turn {
        self.machine.stop(at(millis));
        loop {
            match self.turn(millis) {
                Turn::Again => {}
                turn => return turn,
            }
        }
    }
}

/// A write budget with a file.
struct Purse {
    limits: Limits,
    file: Cell<u64>,
    /// The file cannot be written.
    full: Cell<bool>,
}

impl Purse {
    fn new() -> Purse {
        let tbw = Some(ByteSize(1 << 50));
        let config = WriteBudgetConfig { tbw, ..WriteBudgetConfig::default() };
        let layout = Layout::new(64 << 20, LINE, 8, 2).unwrap();
        let limits = setup::limits(&config, &layout, None, true).unwrap();
        Purse { limits, file: Cell::new(0), full: Cell::new(false) }
    }
}

impl Charges for Purse {
    fn limits(&self) -> &Limits {
        &self.limits
    }
    fn keep_budget(&self, state: BudgetState) -> bool {
        if !self.full.get() {
            assert!(state.spent > self.file.get());
            self.file.set(state.spent);
        }
        !self.full.get()
    }
}

fn asks(asks: &[(u32, u32)]) -> Work<()> {
    Work { asks: asks.to_vec(), ..Work::default() }
}

fn fill() -> Fill<()> {
    Fill { shard: 0, io: IoId(3), slot: SlotId(0), lines: 1, bytes: () }
}

/// Queues write no file: what they may write is written down by who owns this machine, ahead of time, and at once where they wait.
#[test]
fn the_budget_is_written_down_for_queues_that_wait_and_ahead_of_time() {
    let (mut bench, purse) = (Bench::new(), Purse::new());
    let pay = |millis, bytes| purse.limits.pay(at(millis), bytes);
    assert!(!pay(201, 4096) && purse.file.get() == 0, "nothing is in the file");
    let Bench { machine, shards, device, asked } = &mut bench;
    let mut io = Charged::new(device, &purse, at(201));
    let work = Work { budget: vec![OpId(5), OpId(6)], ..Work::default() };
    machine.take(at(201), work, shards, &mut io, asked);
    assert_eq!(shards.paid, [OpId(5), OpId(6)]);
    let first = purse.file.get();
    assert!(first >= 8192 && pay(201, 4096) && pay(201, 4096));
    machine.turn(at(202), shards, &mut io, asked);
    assert_eq!(purse.file.get(), first, "there is enough");
    assert!(pay(203, first / 4 * 3));
    machine.turn(at(204), shards, &mut io, asked);
    let second = purse.file.get();
    assert!(second > first, "little is left: more is written down before anybody waits");
    assert!(!pay(205, second) && pay(205, second - purse.limits.spent()) && !pay(205, 1));
}

/// Clients' writes go on where the budget's file cannot be written. It is counted, and tried again with the next claim.
#[test]
fn a_budget_that_cannot_be_written_down_holds_up_no_queue_and_is_counted() {
    let (mut bench, purse) = (Bench::new(), Purse::new());
    purse.full.set(true);
    let pay = |millis, bytes| purse.limits.pay(at(millis), bytes);
    let Bench { machine, shards, device, asked } = &mut bench;
    let mut io = Charged::new(device, &purse, at(201));
    assert!(!pay(201, 4096));
    let work = Work { budget: vec![OpId(5)], ..Work::default() };
    machine.take(at(201), work, shards, &mut io, asked);
    assert!(pay(201, 4096) && purse.file.get() == 0);
    assert_eq!(purse.limits.unkept(), 1);
    purse.full.set(false);
    while pay(202, 1 << 16) {}
    machine.turn(at(203), shards, &mut io, asked);
    assert!(purse.file.get() > purse.limits.spent() && pay(203, 1 << 16));
    assert_eq!(purse.limits.unkept(), 1);
}

#[test]
fn records_are_written_at_the_tick_or_with_what_comes_earlier() {
    let mut bench = Bench::new();
    bench.shards.records = 5;
    assert_eq!(bench.turn(290), Turn::At(at(400)), "not yet");
    assert_eq!(bench.shards.durable, 0);
    // Woken for something else they are due after 100 ms.
    assert_eq!(bench.turn(300), Turn::Again);
    assert_eq!(bench.shards.durable, 1);
    assert_eq!(bench.turn(301), Turn::At(at(501)));
    bench.shards.records = 5;
    assert_eq!(bench.turn(501), Turn::Again);
    assert_eq!((bench.shards.durable, bench.shards.records), (2, 0));
}

#[test]
fn somebody_who_waits_for_records_waits_ten_milliseconds() {
    let mut bench = Bench::new();
    bench.shards.records = 5;
    bench.take(203, Work { commit: true, ..Work::default() });
    assert_eq!(bench.turn(203), Turn::At(at(210)));
    assert_eq!(bench.turn(210), Turn::Again);
    assert_eq!(bench.shards.durable, 1);
    // With nothing left nobody waits.
    assert_eq!(bench.turn(211), Turn::At(at(411)));
}

/// Fills and flushes are looked at while they are under way, from the last look on.
#[test]
fn what_is_under_way_is_looked_at() {
    let mut bench = Bench::new();
    bench.machine.has_looked(at(201));
    assert_eq!(bench.machine.wakes(), at(400));
    bench.take(201, Work { fills: vec![fill()], asks: vec![(0, 1)], ..Work::default() });
    assert_eq!(bench.machine.wakes(), at(203));
    bench.turn(203);
    bench.machine.has_looked(at(204));
    assert_eq!(bench.machine.wakes(), at(206));
    let io = ShardIo { shard: 0, io: IoId(3) };
    bench.machine.flash_written(at(206), &mut bench.shards, io, Ok(&[0]));
    assert_eq!(bench.machine.wakes(), at(400));
    // A flush of a store.
    bench.turn(70_000);
    bench.machine.has_looked(at(70_001));
    assert_eq!((bench.asked.flushes.len(), bench.machine.wakes()), (1, at(70_021)));
    bench.machine.store_flushed(at(70_021), DISK, 1, true);
    assert_eq!(bench.machine.wakes(), at(70_200));
}

/// Where nothing is to do turns at ticks change nothing but when the next are due, and may be left out.
#[test]
fn ticks_at_which_nothing_is_to_do_may_be_left_out() {
    for later in [2000, 2001, 2050, 2199, 2200, 2201] {
        let (mut all, mut few) = (Bench::new(), Bench::new());
        assert!(!few.machine.has_work(&mut few.shards));
        for tick in (400..later).step_by(200) {
            assert!(!all.machine.has_work(&mut all.shards));
            assert_eq!(all.turn(tick), Turn::At(at(tick + 200)));
        }
        few.machine.idled(at(later));
        (all.shards.records, few.shards.records) = (5, 5);
        for millis in [later, later + 90, later + 110, later + 200] {
            assert_eq!(all.machine.wakes(), few.machine.wakes(), "{later}, {millis}");
            assert_eq!(all.turn(millis), few.turn(millis), "{later}, {millis}");
            assert_eq!(all.shards.durable, few.shards.durable, "{later}, {millis}");
        }
        assert_eq!(few.shards.durable, 1);
    }
}

#[test]
fn it_steps_sixteen_times_in_a_row() {
    let mut bench = Bench::new();
    bench.shards.records = 100_000;
    let mut turns = 1;
    while bench.turn(400) == Turn::Again {
        turns += 1;
    }
    assert_eq!((turns, bench.shards.durable), (16, 16));
    // What is left does not wait for the next tick.
    assert_eq!(bench.turn(401), Turn::At(at(410)));
    assert_eq!(bench.turn(410), Turn::Again);
}

#[test]
fn bits_are_not_waited_for() {
    let mut bench = Bench::new();
    bench.take(201, asks(&[(1, 3), (0, 4)]));
    let ranges = vec![(OpId(5), 3, 5), (OpId(6), 8, 8)];
    bench.take(201, Work { ranges, ..Work::default() });
    assert_eq!(bench.turn(201), Turn::At(at(400)));
    assert_eq!(bench.shards.ready, [(1, 3), (0, 4)]);
    assert_eq!(bench.shards.ranges, [OpId(5), OpId(6)]);
    assert_eq!(bench.machine.regions_set(), 4);
}

#[test]
fn a_bit_goes_behind_the_flush_that_covers_it_when_it_is_due_again() {
    let mut bench = Bench::new();
    bench.take(201, asks(&[(1, 3), (0, 4)]));
    bench.turn(201);
    assert!(matches!(bench.turn(35_000), Turn::At(_)), "clients may come back");
    assert!(bench.asked.flushes.is_empty());
    bench.turn(70_000);
    assert_eq!(bench.asked.flushes, [(DISK, 1)], "one for both");
    bench.turn(100_100);
    assert_eq!(bench.machine.regions_set(), 2, "it has not ended");
    bench.machine.store_flushed(at(100_200), DISK, 1, true);
    bench.turn(100_200);
    assert_eq!(bench.machine.regions_set(), 2, "they are not due");
    bench.turn(131_000);
    assert_eq!(bench.machine.regions_set(), 0);
    assert_eq!(bench.asked.flushes.len(), 1);
}

#[test]
fn a_flush_that_fails_covers_nothing() {
    let mut bench = Bench::new();
    bench.take(201, asks(&[(0, 1)]));
    bench.turn(201);
    bench.turn(70_000);
    bench.machine.store_flushed(at(70_100), DISK, 1, false);
    bench.turn(101_000);
    bench.turn(132_000);
    assert_eq!((bench.machine.regions_set(), &bench.asked.flushes[1..]), (1, &[(DISK, 2)][..]));
    bench.machine.store_flushed(at(132_100), DISK, 2, true);
    bench.turn(163_000);
    assert_eq!(bench.machine.regions_set(), 0);
}

/// It was tried once, with a time that was to come: what was not quiet then was looked at half a minute later.
#[test]
fn who_is_in_a_hurry_is_served_as_soon_as_regions_are_quiet() {
    let mut bench = Bench::new();
    bench.take(201, asks(&[(0, 1), (0, 2), (1, 9)]));
    bench.turn(201);
    bench.shards.busy = true;
    assert_eq!(bench.hurry(300), 3);
    assert!(bench.asked.flushes.is_empty());
    bench.shards.busy = false;
    assert_eq!(bench.hurry(400), 3);
    assert_eq!(bench.asked.flushes, [(DISK, 1)]);
    // As soon as the store is durable, with nobody asking.
    bench.machine.store_flushed(at(450), DISK, 1, true);
    while bench.turn(450) == Turn::Again {}
    assert_eq!(bench.machine.regions_set(), 1, "the last is nobody's");
    assert_eq!(bench.hurry(500), 1);
}

#[test]
fn fills_are_begun_at_once_and_ended_for_the_end() {
    let mut bench = Bench::new();
    bench.take(201, Work { fills: vec![fill(), fill()], ..Work::default() });
    assert_eq!((bench.asked.fills, bench.machine.is_busy()), (2, true));
    assert_eq!(bench.end(300), Turn::At(at(500)), "they are under way");
    let Bench { machine, shards, .. } = &mut bench;
    for _ in 0..2 {
        machine.flash_written(at(301), shards, ShardIo { shard: 0, io: IoId(3) }, Ok(&[0]));
    }
    assert_eq!(bench.end(301), Turn::Over { settled: true });
    assert_eq!((bench.shards.written, bench.asked.said.join(", ")), (2, "stopped".into()));
    assert_eq!(bench.shards.ended, [Ok(()), Ok(())]);
    let sb = bench.machine.superblock().unwrap();
    assert_eq!(sb.clean_epoch, sb.epoch);
}

#[test]
fn the_end_waits_for_ten_seconds_for_fills_and_five_for_stores() {
    let mut bench = Bench::new();
    bench.take(201, Work { fills: vec![fill()], asks: vec![(0, 1)], ..Work::default() });
    bench.turn(201);
    bench.end(1000);
    assert!(matches!(bench.end(10_999), Turn::At(_)));
    assert!(bench.asked.flushes.is_empty());
    assert_eq!(bench.end(11_000), Turn::At(at(16_000)), "a flush of the store");
    assert_eq!(bench.asked.flushes, [(DISK, 1)]);
    assert_eq!(bench.end(15_999), Turn::At(at(16_000)));
    assert_eq!(bench.end(16_000), Turn::Over { settled: false });
    // The store has not answered: its region keeps its bit, and that is said.
    assert_eq!(bench.machine.regions_set(), 1);
    assert_eq!(bench.asked.said, ["not durable", "stopped"]);
}

#[test]
fn the_end_puts_aside_what_is_served_then() {
    use larder_format::block::{Volume, VolumeState};
    let mut bench = Bench::new();
    let volume = |name: &str, first_group, state| Volume {
        name: name.to_owned(),
        first_group,
        groups: 1,
        bytes: 4096,
        state,
        identity: [1; 64],
        write_back: None,
    };
    let Bench { machine, shards, device, asked } = &mut bench;
    let mut io = Charged::new(device, Limits::default(), at(300));
    let added = machine.change_superblock(at(300), false, shards, &mut io, asked, |sb| {
        sb.volumes = vec![
            volume("served", 0, VolumeState::Attached),
            volume("not served", 1, VolumeState::Attached),
            volume("aside", 2, VolumeState::Detached),
        ];
    });
    assert!(added);
    assert_eq!(bench.end(300), Turn::Over { settled: true });
    let volumes = &bench.machine.superblock().unwrap().volumes;
    let left: Vec<_> = volumes.iter().map(|v| (v.state, v.identity[0])).collect();
    let expected =
        [(VolumeState::Detached, 7), (VolumeState::Attached, 1), (VolumeState::Detached, 1)];
    assert_eq!(left, expected);
}

#[test]
fn the_end_sweeps_for_three_seconds() {
    let mut bench = Bench::new();
    bench.shards.voids = 1_000_000;
    bench.machine.stop(at(1000));
    for millis in [1000, 1001, 1100, 3999] {
        assert_eq!(bench.turn(millis), Turn::Again);
    }
    assert_eq!(bench.asked.said, ["sweeping false"]);
    assert_eq!(bench.end(4001), Turn::Over { settled: true });
    assert_eq!(bench.asked.said[1..], ["sweeping true", "stopped"]);
}

/// The device fails and the state directory is full or gone: what says it first ends the trying.
#[test]
fn what_could_not_be_noted_at_a_give_up_is_noted_later() {
    let mut bench = Bench::new();
    (bench.device.fails, bench.asked.unable) = (true, true);
    bench.take(201, Work { ranges: vec![(OpId(5), 3, 5)], ..Work::default() });
    bench.turn(201);
    assert_eq!(bench.asked.said[..2], ["not noted", "disowned"]);
    assert_eq!(bench.asked.unnoted.as_deref(), Some("no directory"));
    let tries = |bench: &Bench| {
        bench.asked.said.iter().filter(|said| said.ends_with("noted")).cloned().collect::<Vec<_>>()
    };
    // At each tick, not at each turn.
    let tick = bench.machine.pace().tick.0 / 1_000_000;
    for turn in 0..4 {
        bench.turn(202 + turn);
    }
    assert_eq!(tries(&bench), ["not noted"]);
    bench.turn(202 + tick);
    assert_eq!(tries(&bench), ["not noted"; 2]);
    bench.asked.unable = false;
    bench.turn(204 + 2 * tick);
    bench.turn(205 + 3 * tick);
    assert_eq!(tries(&bench), ["not noted", "not noted", "noted"]);
    assert_eq!(bench.asked.unnoted, None);
    // Where the device says it no note is missing, and nobody is told that one is.
    let mut bench = Bench::new();
    bench.asked.unable = true;
    bench.take(300, Work { give_up: Some("it failed".into()), ..Work::default() });
    bench.turn(300);
    bench.turn(301 + 2 * tick);
    assert_eq!(tries(&bench), ["not noted"]);
    assert_eq!(bench.asked.unnoted, None);
}

#[test]
fn a_log_that_cannot_be_written_ends_the_cache_and_keeps_nobody_waiting() {
    let mut bench = Bench::new();
    let ranges = vec![(OpId(5), 3, 5)];
    bench.device.fails = true;
    bench.take(201, Work { ranges, asks: vec![(1, 2)], ..Work::default() });
    bench.turn(201);
    // In the order of a start, and before anything goes on.
    assert_eq!(bench.asked.said[..2], ["noted", "disowned"]);
    assert!(bench.asked.said[2].starts_with("given up: the cache device did not take"));
    assert_eq!((bench.shards.disabled, &bench.shards.ranges[..]), (2, &[OpId(5)][..]));
    assert!(bench.machine.superblock().is_none() && bench.machine.line_space().is_some());
    // From now on no bit is needed.
    let ranges = vec![(OpId(6), 3, 5)];
    bench.take(202, Work { ranges, asks: vec![(1, 2)], ..Work::default() });
    assert_eq!((bench.shards.ready.len(), bench.shards.ranges.len()), (1, 2));
    assert_eq!(bench.end(300), Turn::Over { settled: false });
    assert_eq!(bench.asked.said.len(), 3);
}

#[test]
fn the_inbox_wakes_for_what_cannot_wait() {
    let mut inbox: Inbox<(), ()> = Inbox::new(Pace::default());
    let fills = |n: usize| Out { fills: (0..n).map(|_| fill()).collect(), ..Out::default() };
    // Its owner is at work: it looks before it sleeps.
    assert!(!inbox.leave(at(1), &mut fills(1)));
    assert_eq!(inbox.sleep(at(200)), at(3));
    assert!(!inbox.leave(at(2), &mut fills(3)));
    assert_eq!(inbox.take().work.fills.len(), 4);
    // It sleeps for long: the first fill has it sleep for less, the others need not.
    assert_eq!(inbox.sleep(at(200)), at(200));
    assert!(inbox.leave(at(10), &mut fills(1)));
    assert!(!inbox.leave(at(11), &mut fills(1)));
    assert!(!inbox.leave(at(11), &mut Out { commit: true, ..Out::default() }));
    assert_eq!(inbox.due(at(200)), at(12));
    // A batch of them, and bits, are begun at once.
    assert!(inbox.leave(at(11), &mut fills(62)));
    let work = inbox.take().work;
    assert_eq!((work.fills.len(), work.commit), (64, true));
    inbox.sleep(at(300));
    assert!(inbox.leave(at(20), &mut Out { asks: vec![(0, 1)], ..Out::default() }));
    assert!(!inbox.ask_bits(at(20), OpId(1), 0, 1), "it has been woken");
    assert_eq!(inbox.due(at(200)), at(20));
    inbox.take();
    // An operator's task is due whatever the time, and so is the end.
    inbox.sleep(at(300));
    assert!(inbox.task(()));
    assert!(!inbox.stop(), "it has been woken");
    assert_eq!(inbox.due(at(200)), Nanos::ZERO);
    let left = inbox.take();
    assert_eq!((left.tasks.len(), left.stop, inbox.is_empty()), (1, true, true));
}
