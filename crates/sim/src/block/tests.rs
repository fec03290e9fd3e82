mod back;
mod stack;

use larder_base::{ByteSize, Rng};
use larder_trace::{Class, Op as TraceOp, Request};

use super::*;
use crate::device::Drive as DriveSpec;

fn spec(placement: &str, write: &str, admission: &str) -> Block {
    let text = format!(
        "flash = \"12m\"\nplacement = '{placement}'\nwrite = '{write}'\nadmission = '{admission}'\ndepth = 8\nreadahead = 0\nshards = 1"
    );
    toml::from_str(&text).unwrap()
}

fn sim(spec: &Block) -> BlockSim {
    let timing = Timing::default();
    let drive = |bytes| Drive::new(&DriveSpec::default(), &timing, bytes, 1);
    BlockSim::new(spec, (&Store::default(), &Store::default()), &timing, drive, 7).unwrap()
}

fn at(us: u64, request: Request) -> Request {
    Request { time: Some(Nanos::from_micros(us)), ..request }
}

fn read(offset: u64, size: u64) -> Request {
    Request::block(TraceOp::Read, 0, offset, size)
}

fn write(offset: u64, size: u64) -> Request {
    Request::block(TraceOp::Write, 0, offset, size)
}

fn run(sim: &mut BlockSim, requests: impl IntoIterator<Item = Request>) -> Vec<Answered> {
    let mut answered = Vec::new();
    for (number, request) in requests.into_iter().enumerate() {
        sim.request(number as u64, &request, &mut answered).unwrap();
    }
    sim.finish(&mut answered);
    answered
}

/// Fills that nobody waits for may still be under way.
fn settle(sim: &mut BlockSim) {
    while sim.node.any(|s| !s.is_idle()) && sim.turn() {}
    assert!(!sim.node.any(|s| !s.is_idle()));
    assert!(sim.world.asked.is_empty() && sim.queue.under_way() == 0);
    assert!(sim.node.cells.iter().all(|cell| cell.borrow().1.is_empty()));
}

fn micros(a: &Answered) -> f64 {
    a.done.saturating_sub(a.came).as_secs_f64() * 1e6
}

/// A read that misses costs the store's time, one that hits flash's; a write what the store takes, cached or not.
#[test]
fn latencies_are_the_closed_forms_where_nothing_waits() {
    let mut sim = sim(&spec("set:8", "hdd-ssd", "all"));
    let s = 1_000_000;
    let requests = [
        at(s, read(0, 4096)),
        at(2 * s, read(0, 4096)),
        at(3 * s, write(0, 4096)),
        at(4 * s, read(0, 4096)),
        at(5 * s, write(1 << 20, 4096)),
        at(6 * s, read(1 << 20, 4096)),
        at(7 * s, write(512, 512)),
        at(8 * s, read(0, 4096)),
    ];
    let a = run(&mut sim, requests);
    assert_eq!(a.len(), 8);
    let filer = |service: f64| 2.0 * 8.2 + 32.768 + service;
    let near = |found: f64, wanted: f64| (found - wanted).abs() < 0.01;
    let miss = |found: f64| near(found, filer(92.0)) || near(found, filer(7952.0));
    assert!(miss(micros(&a[0])) && a[0].reached_store, "{:?}", a[0]);
    assert!(near(micros(&a[1]), 88.0) && a[1].from_flash == 4096 && !a[1].reached_store);
    // The first write of a region waits until its bit is durable: the drive's time for a page, and for a flush.
    assert!(near(micros(&a[2]), 21.0 + 100.0 + filer(92.0)), "{}", micros(&a[2]));
    assert!(near(micros(&a[3]), 88.0) && a[3].from_flash == 4096, "an update stays cached");
    assert!(near(micros(&a[5]), 88.0) && a[5].from_flash == 4096, "a write allocates");
    let merged = near(micros(&a[7]), 88.0) && a[7].from_flash == 4096;
    assert!(merged, "a line that is partly overwritten stays cached");
}

#[test]
fn write_modes_do_as_their_names_say() {
    for (mode, cached_hit, new_hit) in
        [("hdd-ssd", true, true), ("hdd-upd", true, false), ("hdd-inv", false, false)]
    {
        let mut sim = sim(&spec("set:4", mode, "all"));
        let s = 1_000_000;
        let a = run(
            &mut sim,
            [
                at(s, read(0, 4096)),
                at(2 * s, write(0, 4096)),
                at(3 * s, read(0, 4096)),
                at(4 * s, write(8192, 4096)),
                at(5 * s, read(8192, 4096)),
            ],
        );
        assert_eq!(!a[2].reached_store, cached_hit, "{mode}");
        assert_eq!(!a[4].reached_store, new_hit, "{mode}");
        assert!(a[1].reached_store && a[3].reached_store, "the store has every write");
    }
}

#[test]
fn those_who_come_meanwhile_share_one_read_of_the_store() {
    let mut sim = sim(&spec("set:8", "hdd-ssd", "all"));
    let a = run(&mut sim, (0..5).map(|i| at(100 + i, read(0, 4096))));
    assert_eq!(a.iter().filter(|a| a.reached_store).count(), 1);
    assert_eq!(a.iter().filter(|a| a.shared == 4096).count(), 4);
    assert_eq!(sim.sums().store.reads, 1);
}

#[test]
fn a_trim_of_a_whole_range_is_one_change_of_the_store() {
    let mut sim = sim(&spec("set:8", "hdd-ssd", "all"));
    let s = 1_000_000;
    let trim = Request::block(TraceOp::Trim, 0, 0, 64 << 20);
    let small = Request::block(TraceOp::Trim, 0, 0, 65_536);
    let a = run(
        &mut sim,
        [
            at(s, read(4096, 4096)),
            at(2 * s, trim),
            at(3 * s, read(4096, 4096)),
            at(4 * s, read(4096, 4096)),
            at(5 * s, small),
            at(6 * s, read(4096, 4096)),
        ],
    );
    assert_eq!(a.len(), 6);
    assert_eq!(sim.sums().store.writes, 2);
    let reached: Vec<bool> = a.iter().map(|a| a.reached_store).collect();
    assert_eq!(reached, [true, true, true, false, true, true]);
    settle(&mut sim);
}

/// As many as there is depth for, and no more.
/// A request of many groups is one of the store, of a mebibyte at most: as in the daemon.
#[test]
fn pieces_of_a_request_are_one_request_to_the_store() {
    let mut sim = sim(&spec("set:8", "hdd-ssd", "all"));
    let s = 1_000_000;
    let (mib, miss) = (1 << 20, |of: &mut BlockSim, request| {
        let before = of.world.store.counts();
        run(of, [request]);
        settle(of);
        let after = of.world.store.counts();
        let reads = (after.reads - before.reads, after.read_bytes - before.read_bytes);
        (reads, after.writes - before.writes)
    });
    assert_eq!(miss(&mut sim, at(s, read(0, mib))), ((1, mib), 0));
    assert_eq!(miss(&mut sim, at(2 * s, read(2 * mib, 3 * mib / 2))), ((2, 3 * mib / 2), 0));
    assert_eq!(miss(&mut sim, at(3 * s, write(0, mib))), ((0, 0), 1));
    // What is cached in between parts it.
    assert_eq!(miss(&mut sim, at(4 * s, read(6 * mib, 4096))), ((1, 4096), 0));
    let around = at(5 * s, read(6 * mib - 65_536, 131_072));
    assert_eq!(miss(&mut sim, around), ((2, 131_072 - 4096), 0));
}

/// A volume at its ceiling takes the places of its own lines; one with no more than its floor loses none to others.
#[test]
fn volumes_have_their_shares() {
    let mut lines = Vec::new();
    for (volume, share) in [("9", "..50%"), ("1", "..10%"), ("0", "60%..")] {
        let shares = [(volume.to_owned(), share.to_owned())].into();
        let mut sim = sim(&Block { shares, ..spec("set:16", "hdd-ssd", "all") });
        let mut rng = Rng::new(3);
        let mut requests = Vec::new();
        for i in 0..12_000u64 {
            // Volume 0 has a fourth of the requests, and what it reads would all find room.
            let (app, lines) = if rng.chance(0.25) { (0, 1200) } else { (1, 8000) };
            let request = read(rng.below(lines) * 4096, 4096);
            requests.push(at(1000 * i, Request { app, ..request }));
        }
        run(&mut sim, requests);
        settle(&mut sim);
        let (slots, mut counts) = (sim.slots(), BTreeMap::new());
        for cell in &sim.node.cells {
            let mut slots = Vec::new();
            larder_engine::block::BlockShard::state(
                &cell.borrow().0,
                larder_engine::block::SlotId(0),
                u32::MAX,
                &mut slots,
            );
            for (line, _) in slots.iter().flatten() {
                let (volume, _) = sim.node.space.borrow().unmap(line * 4096).unwrap();
                *counts.entry(volume).or_insert(0u64) += 1;
            }
        }
        lines.push((slots, counts[&0], counts[&1]));
    }
    let [(slots, fair, _), (_, beside, capped), (_, floored, _)] = lines[..] else { panic!() };
    assert!(fair < slots / 2, "{lines:?}");
    assert!(capped <= slots / 10 && beside > fair, "{lines:?}");
    assert!(floored > fair + slots / 20, "{lines:?}");
}

/// What is selected is cached always, if admission likes it or not, and stays; or never. As in the daemon.
#[test]
fn what_is_selected_is_cached_always_or_never() {
    let select = |rule: &str, start, bytes| Select {
        volume: 0,
        rule: rule.to_owned(),
        start: ByteSize(start),
        bytes: Some(ByteSize(bytes)),
    };
    let (mib, s) = (1 << 20, 1_000_000);
    // The second range of the same bytes wins.
    let select = vec![
        select("always", 0, 2 * mib),
        select("never", mib, mib),
        select("never", 8 * mib, mib),
    ];
    let spec =
        |admission: &str| Block { select: select.clone(), ..spec("set:16", "hdd-ssd", admission) };
    // Touched three times before it is cached.
    let mut sim = sim(&spec("touch_count(threshold=3)"));
    let twice = |sim: &mut BlockSim, second: u64, offset| {
        let asked =
            [at(second * s, read(offset, 4096)), at(second * s + s / 2, read(offset, 4096))];
        let reached: Vec<bool> = run(sim, asked).iter().map(|a| a.reached_store).collect();
        (reached[0], reached[1])
    };
    assert_eq!(twice(&mut sim, 1, 0), (true, false), "always");
    assert_eq!(twice(&mut sim, 2, 4 * mib), (true, true), "by policy");
    assert_eq!(twice(&mut sim, 3, mib + 4096), (true, true), "never");
    let mut sim = super::tests::sim(&spec("all"));
    assert_eq!(twice(&mut sim, 1, 8 * mib), (true, true), "never");
    assert_eq!(twice(&mut sim, 2, 4 * mib), (true, false), "by policy");
    // More than there is room for passes by; what is pinned is there still.
    assert_eq!(twice(&mut sim, 3, 4096), (true, false), "always");
    let slots = sim.slots();
    let flood = (0..4 * slots).map(|i| at(4 * s + i * 1000, read((1 << 28) + i * 4096 * 3, 4096)));
    let flood: Vec<_> = flood.collect();
    run(&mut sim, flood);
    settle(&mut sim);
    let later = 10 + 4 * slots / 1000;
    assert_eq!(twice(&mut sim, later, 4096), (false, false), "always");
    assert!(twice(&mut sim, later + 1, 4 * mib).0, "by policy");
    let wrong =
        |select: Select| Block { select: vec![select], ..spec("all") }.validate().unwrap_err();
    let never = select[1].clone();
    assert!(wrong(Select { rule: "often".into(), ..never.clone() }).2.contains("always, never"));
    assert!(wrong(Select { bytes: None, ..never.clone() }).2.contains("how long"));
    let all = Select { rule: "always".into(), start: ByteSize(0), bytes: None, ..never };
    assert!(wrong(all).2.contains("how many bytes a volume has"));
}

/// More is selected than the cache may hold of what is pinned, but of volumes that do not come: what is there is kept from being evicted, as in
/// a server, which sums up the volumes that are attached.
#[test]
fn what_never_comes_is_not_pinned() {
    let mib = 1 << 20;
    let select = [(0, 2 * mib), (7, 64 * mib)].map(|(volume, bytes)| Select {
        volume,
        rule: "always".to_owned(),
        start: ByteSize(0),
        bytes: Some(ByteSize(bytes)),
    });
    let spec = Block {
        select: select.into(),
        volume: ByteSize(256 * mib),
        ..spec("set:16", "hdd-ssd", "all")
    };
    let mut sim = sim(&spec);
    let s = 1_000_000;
    let pinned = (0..512).map(|i| at(s + i * 1000, read(i * 4096, 4096)));
    let flood = (0..12_000).map(|i| at(3 * s + i * 1000, read(16 * mib + i * 4096, 4096)));
    run(&mut sim, pinned.chain(flood));
    settle(&mut sim);
    let again = run(&mut sim, (0..512).map(|i| at(30 * s + i * 1000, read(i * 4096, 4096))));
    let missed = again.iter().filter(|a| a.reached_store).count();
    assert_eq!(missed, 0, "of 512 lines that are pinned");
}

#[test]
fn a_closed_loop_keeps_its_depth() {
    let time = |depth: u32| {
        let spec = Block { load: Load::Closed, depth, ..spec("set:8", "hdd-ssd", "all") };
        let mut sim = sim(&spec);
        let a = run(&mut sim, (0..4000).map(|i| read(i * 65_536, 4096)));
        assert_eq!(a.len(), 4000);
        let mut at: Vec<(Nanos, i32)> =
            a.iter().flat_map(|a| [(a.came, 1), (a.done, -1)]).collect();
        // Of one moment, the end comes first.
        at.sort_by_key(|&(t, d)| (t, d));
        let (mut now, mut most) = (0, 0);
        for (_, d) in at {
            now += d;
            most = most.max(now);
        }
        assert_eq!(most as u32, depth);
        a.iter().map(|a| a.done).max().unwrap().as_secs_f64()
    };
    let (one, sixteen) = (time(1), time(16));
    assert!((one / sixteen - 16.0).abs() < 1.5, "{one} {sixteen}");
}

/// Whatever is asked, everything is answered, nothing is left behind, and the bytes add up.
#[test]
fn accounts_agree_under_any_requests() {
    for (number, placement) in
        ["direct", "set:2", "set:16", "sparse:8g", "full"].into_iter().enumerate()
    {
        for write in ["hdd-ssd", "hdd-upd", "hdd-inv"] {
            for admission in ["all", "sseqr(length=64k)+tc", "two_lbs", "expected_reads"] {
                let spec = Block {
                    shards: 2,
                    replacement: ["lru", "clock", "fifo", "lru", "sieve"][number].to_owned(),
                    ..spec(placement, write, admission)
                };
                let mut sim = sim(&spec);
                let mut rng = Rng::new(5);
                let requests: Vec<Request> = (0..3000u64)
                    .map(|i| {
                        let op = match rng.below(20) {
                            0..11 => TraceOp::Read,
                            11..19 => TraceOp::Write,
                            _ => TraceOp::Trim,
                        };
                        let offset = rng.below(6000) * 4096 + rng.below(2) * 512;
                        let most = if rng.chance(0.02) { 40 << 20 } else { 40_000 };
                        let size = 1 + rng.below(most);
                        let class = Class::ALL[rng.below(3) as usize];
                        let app = rng.below(2) as u32;
                        let request = Request { class, ..Request::block(op, app, offset, size) };
                        at(i * rng.below(400), request)
                    })
                    .collect();
                let mut requests = requests;
                requests.sort_by_key(|r| r.time);
                let a = run(&mut sim, requests.iter().copied());
                assert_eq!(a.len(), requests.len());
                assert!(a.iter().all(|a| !a.failed && a.done >= a.came));
                let bytes =
                    |kind| -> u64 { a.iter().filter(|a| a.kind == kind).map(|a| a.bytes).sum() };
                let asked =
                    |op| -> u64 { requests.iter().filter(|r| r.op == op).map(|r| r.size).sum() };
                assert_eq!(bytes(PartKind::Read), asked(TraceOp::Read));
                assert_eq!(bytes(PartKind::Write), asked(TraceOp::Write));
                settle(&mut sim);
                let sums = sim.sums();
                assert_eq!(sums.store.write_bytes, asked(TraceOp::Write), "write-through");
                for a in a.iter().filter(|a| a.kind == PartKind::Read) {
                    assert!(a.from_flash + a.shared <= a.bytes);
                    assert_eq!(a.from_flash + a.shared == a.bytes, !a.reached_store, "{a:?}");
                }
                assert!(sums.engine.read_hits > 0, "{placement} {write}");
                let evicts = admission == "all" && write == "hdd-ssd";
                assert!(sums.engine.evicted > 0 || !evicts, "{placement}");
                assert_eq!(sums.line_bytes_written, sums.engine.flash_lines_written * 4096);
                let lines = sim.lines();
                let slots = sim.slots();
                assert!(lines > 0 && lines <= slots, "{placement} {write}: {lines} of {slots}");
            }
        }
    }
}

/// Reads of a hot sixth and of all the rest in turns, and writes of either, some of them over what is cached: the same for
/// each cache.
fn hot_and_cold(count: u64) -> Vec<Request> {
    let mut rng = Rng::new(11);
    (0..count)
        .map(|i| {
            let line = if rng.chance(0.7) { rng.below(1000) } else { rng.below(6000) };
            let make = if rng.chance(0.3) { write } else { read };
            at(i * 1000, make(line * 4096, 4096))
        })
        .collect()
}

/// `reclaim` and `evict` reach the engine: what is moved and what hits depends on them.
#[test]
fn who_reclaims_and_who_evicts_makes_a_difference() {
    let outcome = |reclaim: &str, evict: &str| {
        let (reclaim, evict) = (reclaim.to_owned(), evict.to_owned());
        let mut sim = sim(&Block { reclaim, evict, ..spec("full", "hdd-ssd", "all") });
        run(&mut sim, hot_and_cold(30_000));
        settle(&mut sim);
        let sums = sim.sums();
        let e = sums.engine;
        assert!(e.cleaned > 10 && e.evicted > 0, "{e:?}");
        assert_eq!(sums.line_bytes_written, e.flash_lines_written * 4096);
        assert!(e.copied < e.flash_lines_written);
        (e.copied, e.read_hits as f64 / e.read_lines as f64)
    };
    let mut seen = std::collections::BTreeSet::new();
    for reclaim in ["fifo", "greedy", "cost-benefit", "random"] {
        let (by_cache, few, none) =
            (outcome(reclaim, "cache"), outcome(reclaim, "gc"), outcome(reclaim, "gc:0"));
        assert_eq!(none.0, 0, "{reclaim}: nothing may be kept");
        assert!(few.0 > 0 && by_cache.0 > 2 * few.0, "{reclaim}: {by_cache:?} {few:?}");
        assert!(few.1 > none.1, "{reclaim}: hot lines stay: {few:?} {none:?}");
        seen.insert((by_cache.0, few.0));
    }
    assert_eq!(seen.len(), 4, "each choice moves other lines: {seen:?}");
}

/// New lines are held to the drive's endurance; the map's log is charged as well, and not held back.
#[test]
fn a_write_budget_holds_new_lines_back() {
    // A million bytes a second, and a burst of 36 seconds to be saved up first.
    let text = "tbw = \"157788g\"\nyears = 5\ndevice_write_amplification = 1.0\nburst_hours = 0.01\nfirst_fill = false";
    let write_budget: larder_policy::budget::WriteBudgetConfig = toml::from_str(text).unwrap();
    let rate = write_budget.tbw.unwrap().0 as f64 / (5.0 * larder_policy::budget::YEAR_SECONDS);
    let mut rng = Rng::new(3);
    let requests: Vec<Request> =
        (0..30_000).map(|i| at(i * 1000, read(rng.below(30_000) * 4096, 4096))).collect();
    let free = spec("set:8", "hdd-ssd", "all");
    let held = Block { write_budget, ..free.clone() };
    let mut written = Vec::new();
    for (spec, limited) in [(&free, false), (&held, true)] {
        let mut sim = sim(spec);
        run(&mut sim, requests.iter().copied());
        settle(&mut sim);
        let (sums, seconds) = (sim.sums(), sim.now().as_secs_f64());
        let bytes = (sums.line_bytes_written + sums.map_bytes_written) as f64;
        let refused = sums.verdicts.rejected(larder_policy::block::Reason::Budget);
        assert_eq!(refused > 0, limited, "{refused}");
        if limited {
            let most = rate * seconds;
            assert!((0.8 * most..1.05 * most).contains(&bytes), "{bytes} of {most}");
        }
        written.push(bytes);
    }
    assert!(written[1] < written[0] / 2.0, "{written:?}");
    let wrong = larder_policy::budget::WriteBudgetConfig { years: 0.0, ..held.write_budget };
    let timing = Timing::default();
    let drive = |bytes| Drive::new(&DriveSpec::default(), &timing, bytes, 1);
    let wrong = Block { write_budget: wrong, ..free };
    let e = BlockSim::new(&wrong, (&Store::default(), &Store::default()), &timing, drive, 7)
        .err()
        .unwrap();
    assert!(e.to_string().contains("write_budget.years is 0"), "{e}");
}

/// More pages of the table than memory has room for: each line is there when it is asked for again, one read of the table
/// later; and the same in a record.
#[test]
fn pages_of_a_table_come_and_go() {
    const PLACES: u64 = 9000;
    const STEP: u64 = 63 * 65_536;
    let spec = Block {
        flash: ByteSize::gib(2),
        volume: ByteSize::gib(48),
        ..spec("sparse:64g", "hdd-ssd", "all")
    };
    let mut sim = sim(&spec);
    let round = |from: u64| (0..PLACES).map(move |i| at((from + i) * 20_000, read(i * STEP, 4096)));
    let first = run(&mut sim, round(0));
    assert!(first.iter().all(|a| a.reached_store));
    assert_eq!(sim.sums().table_reads, 0, "a page without lines is known as such");
    let again = run(&mut sim, round(PLACES));
    assert!(again.iter().all(|a| !a.reached_store && a.from_flash == 4096));
    // A clock does not help against a cycle, but for what waited to be written when its hand came by.
    let reads = sim.sums().table_reads;
    assert!((PLACES * 9 / 10..=PLACES).contains(&reads), "{reads}");
    let two = again.iter().filter(|a| (micros(a) - 2.0 * 88.0).abs() < 25.0).count() as u64;
    assert!(two >= PLACES * 9 / 10, "one read more each: {two}");
    assert!(sim.sums().map_bytes_written >= PLACES * 4096);
    // What memory holds does not follow from what the cache does.
    assert!(sim.memory().0 < 34 << 20, "{}", sim.memory().0);
    settle(&mut sim);
    assert_eq!(sim.lines(), PLACES);
    // A trim takes pages with all their lines, unread.
    let trim = Request::block(TraceOp::Trim, 0, 0, 1 << 30);
    let last = 2 * PLACES * 20_000;
    let steps = (0..37).map(|i| at(last + i, Request { offset: i << 30, ..trim }));
    assert_eq!(run(&mut sim, steps).len(), 37);
    settle(&mut sim);
    assert_eq!((sim.lines(), sim.sums().table_reads <= reads + 2 * 37), (0, true));
    // Scattered so thinly over a small drive, the table itself would not fit.
    let mut small = BlockSim::new(
        &Block { flash: ByteSize::mib(16), ..spec },
        (&Store::default(), &Store::default()),
        &Timing::default(),
        |bytes| Drive::new(&DriveSpec::default(), &Timing::default(), bytes, 1),
        7,
    )
    .unwrap();
    let mut answered = Vec::new();
    let stop = (0..).zip(round(0)).find_map(|(n, r)| small.request(n, &r, &mut answered).err());
    assert_eq!(stop, Some(Stop::Table));
}

#[test]
fn what_cannot_be_meant_is_named() {
    let refuse = |spec: &Block, words: &str| {
        let timing = Timing::default();
        let drive = |bytes| Drive::new(&DriveSpec::default(), &timing, bytes, 1);
        let error = spec.validate().err().map(|(f, v, m)| format!("{f} {v} {m}")).or_else(|| {
            BlockSim::new(spec, (&Store::default(), &Store::default()), &timing, drive, 7)
                .err()
                .map(|e| e.to_string())
        });
        let error = error.expect("an error");
        assert!(error.contains(words), "'{error}' lacks '{words}'");
    };
    let good = spec("set:8", "hdd-ssd", "all");
    refuse(&spec("set:17", "hdd-ssd", "all"), "placement 'set:17'");
    refuse(&spec("sparse:0", "hdd-ssd", "all"), "placement 'sparse:0'");
    refuse(&spec("sparser", "hdd-ssd", "all"), "placement 'sparser'");
    refuse(&spec("sparse:1m", "hdd-ssd", "all"), "room for volumes of 1048576 bytes");
    refuse(&spec("set:8", "back", "all"), "write 'back'");
    refuse(&spec("set:8", "hdd-ssd", "none"), "admission 'none'");
    refuse(&Block { replacement: "mru".into(), ..good.clone() }, "replacement 'mru'");
    let full = spec("full", "hdd-ssd", "all");
    let reclaim = |of: &Block, reclaim: &str| Block { reclaim: reclaim.into(), ..of.clone() };
    let evict = |of: &Block, evict: &str| Block { evict: evict.into(), ..of.clone() };
    refuse(
        &reclaim(&full, "lru"),
        "reclaim 'lru' choose one of greedy, fifo, random, cost-benefit",
    );
    refuse(&evict(&full, "gc:1"), "evict 'gc:1' write cache, gc, or gc:SHARE");
    let alone = "it is of the placement full alone, and this cache has set:8: leave it out";
    refuse(&reclaim(&good, "greedy"), &format!("reclaim 'greedy' {alone}"));
    refuse(&evict(&good, "cache"), &format!("evict 'cache' {alone}"));
    refuse(
        &evict(&spec("sparse", "hdd-ssd", "all"), "gc:0.5"),
        "this cache has sparse: leave it out",
    );
    for said in
        [reclaim(&good, "fifo"), evict(&good, "gc"), evict(&good, "gc:0.2"), evict(&full, "gc:0")]
    {
        said.validate().unwrap();
    }
    refuse(&Block { depth: 0, ..good.clone() }, "depth 0");
    refuse(&Block { flash: ByteSize::kib(64), ..good.clone() }, "flash");
    refuse(&Block { line: ByteSize(5000), ..good }, "a line of 5000 bytes");
}

// ---- records ----

/// A record in memory.
#[derive(Clone, Default)]
struct Kept(std::sync::Arc<std::sync::Mutex<Vec<larder_format::recording::Chunk>>>);

impl larder_format::recording::ChunkSink for Kept {
    fn put(&mut self, chunk: larder_format::recording::Chunk) -> bool {
        self.0.lock().unwrap().push(chunk);
        true
    }

    fn is_open(&self) -> bool {
        true
    }
}

/// What may happen to volumes: they come, are refused, grow, go and come back.
fn tape_volumes(
    tape: larder_engine::block::record::BlockTape,
    superblock: &larder_format::block::BlockSuperblock,
) {
    use larder_engine::block::record::{Arrival, VolumesTape};
    use larder_engine::block::volumes::{Coming, grow, put_aside, take_up};
    let (mut sb, mut tape) = (superblock.clone(), VolumesTape::new(Some(tape)));
    let (mut now, mut refused) = (Nanos::ZERO, [0, 0]);
    for round in 0..20u64 {
        for (name, bytes) in [("v0", 1 << 20), ("v1", (1 + round) << 22), ("ä", 1 << 60)] {
            now = now + Nanos::from_millis(7);
            let unchanged = round % 3 > 0;
            let coming = Coming { name: name.into(), bytes, unchanged, identity: [9; 64] };
            let outcome = take_up(&mut sb, &coming);
            // One fits nowhere, and one is smaller than it was now and then.
            refused[usize::from(name.is_ascii())] += u32::from(outcome.is_err());
            let stream = outcome.is_ok().then_some(round as u16);
            let share = (round, (round % 2 > 0).then_some(1 << 40));
            let of = Arrival { name: name.into(), bytes, unchanged, share, stream };
            tape.came(now, &of, &outcome);
            let more = bytes + (round << 21);
            tape.grew(now, name, more, &grow(&mut sb, name, more, [8; 64]));
            tape.went(now, name, unchanged, put_aside(&mut sb, name, [7; 64]));
        }
    }
    assert!(refused[0] == 20 && (1..40).contains(&refused[1]), "{refused:?}");
    tape.end_recording();
}

/// Runs random requests with every stream recorded; returns the record as a file of version `version` of its setup. From
/// version 2 on volumes come and go beside it, and one of three came late.
fn recorded(spec: &Block, requests: u64) -> Vec<u8> {
    use larder_engine::block::record::{BlockRunSetup, BlockTape, SharedTape, VolumeSetup};
    use larder_format::recording::{Ended, end_chunk, file_header, seal};
    let kept = Kept::default();
    let mut sim = sim(spec);
    let config = shard_config(spec, &sim.node.layout).unwrap();
    let seed = sim.maintenance.superblock().unwrap().key;
    let volume = |n: u32| VolumeSetup { name: format!("v{n}"), bytes: spec.flash.0 * 16, seed };
    let setup = BlockRunSetup::new(
        sim.maintenance.superblock().unwrap(),
        &config,
        spec.making().unwrap(),
        larder_engine::block::node::quiet::QUIET,
        &spec.admission().unwrap(),
        (0..2).map(volume).collect(),
        2,
    );
    assert_eq!(setup.block, 9);
    setup.validate().unwrap();
    let tape = |stream: usize| BlockTape::new(stream as u16, Box::new(kept.clone()));
    let shards = sim.node.cells.len();
    for (stream, cell) in sim.node.cells.iter().enumerate() {
        cell.borrow_mut().0.record(tape(stream));
    }
    sim.maintenance.record(SharedTape::new(Some(tape(shards + 1))), tape(shards));
    // The only worker; nobody prefetches.
    let queue = SharedTape::new(Some(tape(shards + 3)));
    sim.queue.record(queue.clone());
    for volume in 0..2u32 {
        sim.node.add_volume(volume).unwrap();
        let stream = setup.streams().unwrap() - 2 + volume as usize;
        sim.node.admissions.borrow_mut().get_mut(&volume).unwrap().record(tape(stream));
    }
    tape_volumes(tape(shards + 2), sim.maintenance.superblock().unwrap());
    sim.node.add_volume(2).unwrap();
    sim.node.admissions.borrow_mut().get_mut(&2).unwrap().record_later(
        tape(setup.streams().unwrap()),
        Nanos::from_millis(3),
        &volume(2),
    );
    let apps = 3;
    let mut rng = Rng::new(9);
    let requests: Vec<Request> = (0..requests)
        .map(|i| {
            let op = [TraceOp::Read, TraceOp::Write, TraceOp::Read][rng.below(3) as usize];
            let op = if rng.chance(0.01) { TraceOp::Trim } else { op };
            let size = if op == TraceOp::Trim { 40 << 20 } else { 1 + rng.below(40_000) };
            let (app, offset) = (rng.below(apps) as u32, rng.below(6000) * 4096);
            let class = Class::ALL[rng.below(3) as usize];
            at(i * 300, Request { class, ..Request::block(op, app, offset, size) })
        })
        .collect();
    run(&mut sim, requests);
    // Long enough for regions to become quiet.
    let now = sim.now();
    sim.run_until(now + Nanos::from_secs(20));
    settle(&mut sim);
    sim.node.each(StoredShard::end_recording);
    sim.maintenance.end_recording();
    queue.end_recording();
    sim.node.admissions.borrow_mut().values_mut().for_each(|a| a.end_recording());
    let mut file = file_header(&serde_json::to_vec(&setup).unwrap()).unwrap();
    let mut counts = vec![0; setup.streams().unwrap() + 1];
    for c in kept.0.lock().unwrap().iter() {
        file.extend_from_slice(&seal(c.stream, c.first, c.records, &c.payload));
        file.extend_from_slice(&c.payload);
        counts[usize::from(c.stream)] += u64::from(c.records);
    }
    file.extend_from_slice(&end_chunk(Ended::Stopped, &counts));
    file
}

fn replayed(file: &[u8]) -> Result<crate::replay::BlockReport, crate::replay::ReplayError> {
    let mut file = crate::replay::RecordFile::open(std::io::Cursor::new(file))?;
    crate::replay::replay_block(&mut file, 1 << 30, &mut |_| {})
}

#[test]
fn what_was_recorded_is_decided_again_and_a_change_is_found() {
    for (placement, replacement, write, admission) in [
        ("set:4", "lru", "hdd-ssd", "all"),
        ("set:4", "clock", "hdd-upd", "sseqr(length=64k)+tc"),
        ("set:4", "fifo", "hdd-ssd", "two_lbs"),
        ("sparse:8g", "lru", "hdd-ssd", "two_lbs"),
        ("full", "sieve", "hdd-ssd", "all"),
        ("set:4", "lru", "hdd-ssd", "expected_reads"),
    ] {
        let replacement = replacement.to_owned();
        let mut spec = Block { shards: 2, replacement, ..spec(placement, write, admission) };
        if placement == "full" {
            (spec.reclaim, spec.evict) = ("cost-benefit".to_owned(), "cache".to_owned());
        }
        let file = recorded(&spec, 2500);
        let report = replayed(&file).unwrap();
        assert_eq!(report.difference, None);
        assert!(report.complete && report.compared == report.records, "{report:?}");
        assert_eq!((report.shards, report.streams.len()), (2, 10));
        assert_eq!((report.volumes, report.changes), (3, 180));
        assert_eq!(report.streams[3].0, "maintenance");
        assert_eq!(report.streams[5].0, "queue of worker 0");
        assert_eq!(report.streams[6], ("queue of the prefetch".to_owned(), 0));
        assert_eq!(report.streams[9].0, "admission of volume 'v2' (attachment 1)");
        let used = || report.streams.iter().enumerate().filter(|(stream, _)| *stream != 6);
        assert!(used().all(|(_, (_, n))| *n > 50), "{report:?}");
        for (stream, (name, count)) in used() {
            let mut changed = std::io::Cursor::new(file.clone());
            let at = count * 2 / 3;
            assert!(crate::replay::flip_block_decision(&mut changed, stream, at).unwrap());
            let found = replayed(changed.get_ref()).unwrap().difference.unwrap();
            assert_eq!((&found.stream, found.record), (name, at));
            assert!(!crate::replay::flip_block_decision(&mut changed, stream, *count).unwrap());
        }
    }
}

/// What an earlier version wrote was decided otherwise, and a later one's is not known.
#[test]
fn records_of_other_versions_are_refused() {
    let spec = Block { shards: 2, ..spec("set:4", "hdd-ssd", "two_lbs") };
    let file = recorded(&spec, 50);
    assert_eq!(&file[20..30], b"{\"block\":9");
    for version in [b'5', b'6', b'7', b'8'] {
        let mut other = file.clone();
        other[29] = version;
        let len = u32::from_le_bytes(other[12..16].try_into().unwrap()) as usize;
        let crc = crc32c::crc32c(&other[20..20 + len]);
        other[16..20].copy_from_slice(&crc.to_le_bytes());
        let said = replayed(&other).unwrap_err().to_string();
        let version = char::from(version);
        let words = format!("of version {version}, and this larder reads version 9");
        assert!(said.contains(&words), "{said}");
    }
}

/// Chunks with bytes changed and sound checksums: an error or a difference, and never a panic.
#[test]
fn mangled_records_are_refused_or_differ() {
    mangled("set:4");
    mangled("sparse:8g");
}

fn mangled(placement: &str) {
    use larder_format::recording::{CHUNK_HEADER, ChunkHeader, seal};
    let file = recorded(&spec(placement, "hdd-ssd", "two_lbs"), 150);
    let setup = u32::from_le_bytes(file[12..16].try_into().unwrap()) as usize + 20;
    let mut rng = Rng::new(21);
    let (mut refused, mut differ) = (0, 0);
    for _ in 0..1500 {
        let mut bytes = file.clone();
        let mut offset = setup;
        let mut chunks = Vec::new();
        while offset < bytes.len() {
            let head: [u8; CHUNK_HEADER] = bytes[offset..offset + CHUNK_HEADER].try_into().unwrap();
            let header = ChunkHeader::parse(&head).unwrap();
            if header.records > 0 {
                chunks.push((offset, header));
            }
            offset += CHUNK_HEADER + header.len as usize;
        }
        let (offset, header) = chunks[rng.below(chunks.len() as u64) as usize];
        let payload = offset + CHUNK_HEADER..offset + CHUNK_HEADER + header.len as usize;
        for _ in 0..rng.range(1, 4) {
            let at = payload.start + rng.below(header.len.into()) as usize;
            bytes[at] = rng.next_u64() as u8;
        }
        let head = seal(header.stream, header.first, header.records, &bytes[payload.clone()]);
        bytes[offset..offset + CHUNK_HEADER].copy_from_slice(&head);
        match replayed(&bytes) {
            Err(_) => refused += 1,
            Ok(report) => differ += u32::from(report.difference.is_some()),
        }
    }
    assert!(refused > 100 && differ > 100, "{refused} {differ}");
}

/// The requests of a scan, one after the other, with pauses.
fn scan(from: u64, requests: u64) -> impl Iterator<Item = Request> {
    (0..requests).map(move |i| at(1000 + i * 400, read(from + i * 4096, 4096)))
}

#[test]
fn streams_are_read_ahead_of_as_the_daemon_does_it() {
    let reached = |readahead: u64, volume: u64, admission: &str| {
        let spec = Block {
            readahead: ByteSize::kib(readahead),
            volume: ByteSize(volume),
            ..spec("set:8", "hdd-ssd", admission)
        };
        let mut sim = sim(&spec);
        let answered = run(&mut sim, scan(0, 1000));
        settle(&mut sim);
        let bytes = sim.sums().store.read_bytes;
        (answered.iter().filter(|a| a.reached_store).count(), bytes)
    };
    assert_eq!(reached(0, 0, "all"), (1000, 1000 * 4096));
    // Until it is a stream (128 KiB) each read asks the store; then hardly one does.
    let (asked, bytes) = reached(1024, 0, "all");
    assert!((32..80).contains(&asked), "{asked}");
    assert!((1000 * 4096..1000 * 4096 + (1 << 20)).contains(&bytes), "{bytes}");
    // Nothing behind the end of a volume, and nothing of what admission keeps out.
    assert_eq!(reached(1024, 1000 * 4096, "all").1, 1000 * 4096);
    assert_eq!(reached(1024, 0, "seqr").1, 1000 * 4096);
}

#[test]
fn what_is_cached_is_not_read_ahead_again() {
    let spec = Block { readahead: ByteSize::mib(1), ..spec("set:8", "hdd-ssd", "all") };
    let mut sim = sim(&spec);
    run(&mut sim, scan(0, 1000));
    settle(&mut sim);
    let before = sim.sums().store.read_bytes;
    let second = scan(0, 1000).map(|r| at(r.time.unwrap().0 / 1000 + 9_000_000, r));
    let answered = run(&mut sim, second);
    let lines = sim.lines();
    assert!(lines > 950, "{lines}");
    let missed = answered.iter().filter(|a| a.reached_store).count();
    let again = sim.sums().store.read_bytes - before;
    assert!(missed < 20 && again <= (missed as u64 + 256) * 4096, "{missed} {again}");
}

/// 24 MiB of working set, 64 MiB of cache and a scan of twenty times that, at an eighth: by default a stream has free slots, and
/// displaces nothing.
#[test]
fn a_scan_leaves_the_working_set_alone() {
    const LINES: u64 = 768;
    for placement in ["set:8", "direct", "full", "sparse:8g"] {
        let kept = |admission: Option<&str>| {
            let mut spec = spec(placement, "hdd-ssd", "all");
            spec.flash = ByteSize::mib(10);
            spec.readahead = ByteSize::mib(1);
            spec.admission = admission.map_or_else(default_of_admission, str::to_owned);
            let mut sim = sim(&spec);
            let mut rng = Rng::new(4);
            let mut time = 0;
            let mut working_set = |sim: &mut BlockSim, time: &mut u64| {
                let mut lines: Vec<u64> = (0..LINES).collect();
                rng.shuffle(&mut lines);
                let before = sim.sums().engine;
                let requests = lines.iter().map(|line| {
                    *time += 5000;
                    at(*time, read(line * 4096, 4096))
                });
                run(sim, requests.collect::<Vec<_>>());
                settle(sim);
                (sim.sums().engine.read_hits - before.read_hits) as f64 / LINES as f64
            };
            working_set(&mut sim, &mut time);
            let before = working_set(&mut sim, &mut time);
            let evicted = sim.sums().engine.evicted;
            let requests = (0..2400).map(|i| {
                time += 5000;
                at(time, read((8 << 20) + i * 65536, 65536))
            });
            run(&mut sim, requests.collect::<Vec<_>>());
            settle(&mut sim);
            let (evicted, lines) = (sim.sums().engine.evicted - evicted, sim.lines());
            (working_set(&mut sim, &mut time) / before, evicted, lines as f64 / sim.slots() as f64)
        };
        let (all, by_default) = (kept(Some("all")), kept(None));
        assert!(all.0 < 0.4, "{placement}: {all:?} the test shows nothing");
        // (What comes before the stream is recognised may displace lines: three requests.)
        assert!(by_default.0 > 0.93 && by_default.1 <= 48, "{placement}: {by_default:?}");
        // What is free is taken all the same; a log keeps some segments for its cleaner.
        assert!(by_default.2 > if placement == "full" { 0.7 } else { 0.9 }, "{by_default:?}");
    }
}

fn default_of_admission() -> String {
    toml::from_str::<Block>("flash = \"1m\"").unwrap().admission
}

/// Into an empty cache a stream is read ahead as it is where all is admitted.
#[test]
fn a_stream_is_read_ahead_while_slots_are_free() {
    let reached = |admission: &str, flash: u64| {
        let mut spec = spec("set:8", "hdd-ssd", admission);
        (spec.readahead, spec.flash) = (ByteSize::mib(1), ByteSize::mib(flash));
        let mut sim = sim(&spec);
        let answered = run(&mut sim, scan(0, 2000));
        settle(&mut sim);
        let asked = |from: usize| answered[from..].iter().filter(|a| a.reached_store).count();
        (asked(0), asked(1500))
    };
    assert_eq!(reached("seqr(free=on)", 32).0, reached("all", 32).0);
    assert_eq!(reached("seqr", 16).0, 2000);
    // In a cache of a quarter of that it goes on until that is full, and ends there.
    let (asked, at_the_end) = reached("seqr(free=on)", 4);
    assert!(asked < 1700 && at_the_end > 400, "{asked} {at_the_end}");
}

/// What an experiment does not say is as the daemon has it.
#[test]
fn what_nobody_says_is_as_the_engine_has_it() {
    use larder_engine::block::map::Making;
    use larder_engine::block::node::defaults;
    let block: Block = toml::from_str("flash = \"64m\"").unwrap();
    assert_eq!(block.placement(), Ok(defaults::PLACEMENT));
    assert_eq!(block.write_mode(), Ok(defaults::WRITE));
    let (replacement, reclaim) = (defaults::REPLACEMENT, defaults::RECLAIM);
    assert_eq!(block.making(), Ok(Making { replacement, reclaim, evict: defaults::evict() }));
    assert_eq!((block.line, block.shards), (ByteSize(defaults::LINE.into()), defaults::SHARDS));
    assert_eq!((block.fill_memory, block.readahead), (defaults::FILL_MEMORY, defaults::READAHEAD));
    let wrong = Block { fill_memory: ByteSize(0), ..block }.validate().unwrap_err();
    assert!(wrong.0 == "fill_memory" && wrong.2.contains("1 MiB"), "{wrong:?}");
}
