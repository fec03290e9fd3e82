//! Volumes that write back, against what can be worked out by hand and against Holland's model.

use std::collections::BTreeSet;

use larder_engine::block::writeback::overlay::{Holds, Overlay};
use larder_engine::block::writeback::volume_log::{Cuts, Kind, Logged, Order, VolumeLog};
use larder_trace::{Options, open};

use super::*;
use crate::stack::{self, Architecture, Config as StackConfig, Policy};

const PAGE: u64 = 4096;

/// A drive and a network that take next to no time, so that what is measured is the store.
fn quick() -> Timing {
    Timing {
        flash_read_us: 1.0,
        flash_program_us: 1.0,
        flash_erase_us: 0.0,
        flash_flush_us: 1.0,
        network_packet_us: 0.0,
        network_bit_ns: 0.0,
        ..Timing::default()
    }
}

fn back(write: &str, more: &str) -> Block {
    let text = format!(
        "flash = \"128m\"\nwrite_log = \"32m\"\nvolume = \"64m\"\nwrite = '{write}'\nreadahead = 0\nshards = 1\n{more}"
    );
    toml::from_str(&text).unwrap()
}

fn sim_of(spec: &Block, timing: &Timing, write_us: f64, flush_us: f64) -> BlockSim {
    let drive = |bytes| Drive::new(&DriveSpec::default(), timing, bytes, 1);
    let store = Store { write_us, flush_us: Some(flush_us), ..Store::default() };
    BlockSim::new(spec, (&store, &store), timing, drive, 7).unwrap()
}

/// Requests, one after the other, until so many seconds are over.
fn until(
    sim: &mut BlockSim,
    requests: &mut impl Iterator<Item = Request>,
    seconds: f64,
) -> Vec<Answered> {
    let mut answered = Vec::new();
    while sim.now().as_secs_f64() < seconds {
        sim.request(0, &requests.next().unwrap(), &mut answered).unwrap();
    }
    answered
}

/// Pages of the volume at random.
fn pages(seed: u64) -> impl Iterator<Item = Request> {
    let mut rng = Rng::new(seed);
    std::iter::repeat_with(move || write(rng.below(1 << 14) * PAGE, PAGE))
}

#[test]
fn a_write_is_answered_when_the_log_has_it_and_comes_to_the_store_afterwards() {
    let mut sim = sim_of(&back("back:ordered", ""), &Timing::default(), 1000.0, 1000.0);
    let s = 1_000_000;
    // The first batch of the log is flushed at once, for what it says of the log: then it is idle.
    let mut a = run(
        &mut sim,
        [at(1, write(1 << 20, PAGE)), at(s, write(0, PAGE)), at(s + 10_000, read(0, PAGE))],
    );
    a.remove(0);
    // Head and payload of the batch are pages of the drive on channels of their own.
    assert!((micros(&a[0]) - 21.0).abs() < 0.01, "{}", micros(&a[0]));
    assert!((micros(&a[1]) - 88.0).abs() < 0.01, "{}", micros(&a[1]));
    assert!(!a[0].reached_store && !a[1].reached_store && a[1].from_flash == PAGE);
    assert_eq!(sim.ages().dirty, PAGE);
    assert!(sim.drain());
    let (sums, ages) = (sim.sums(), sim.ages());
    let stored = (sums.store.writes, sums.store.write_bytes, sums.store.flushes);
    assert_eq!(stored, (2, 2 * PAGE, 2));
    assert!(sums.log_bytes_written >= PAGE && sums.destaged >= PAGE, "{sums:?}");
    assert_eq!((ages.dirty, ages.most_dirty, ages.stalls), (0, PAGE, 0));
    // It would be flushed in the log after 50 ms, but the drain came first; then it was written and flushed.
    let age = ages.oldest.as_secs_f64() * 1e3;
    assert!((2.0..53.0).contains(&age), "{age}");
    assert!(ages.age <= 2.0 * ages.oldest.as_secs_f64().powi(2), "{ages:?}");
}

/// `ordered,grain=completion` sustains D/(Ts+Tf): the design's table, for clients of each depth before a store of each speed. At the
/// bound nobody waits for long.
#[test]
fn a_window_is_as_wide_as_the_client_is_deep() {
    for (ms, depth) in [(1.0, 1), (1.0, 16), (1.0, 64), (10.0, 1), (10.0, 16), (10.0, 64)] {
        let more = format!("load = \"closed\"\ndepth = {depth}\ndirty_max = \"2m\"");
        let spec = back("back:ordered,grain=completion", &more);
        let mut sim = sim_of(&spec, &quick(), ms * 1000.0, ms * 1000.0);
        let mut requests = pages(1);
        // The throttle measures the store over some seconds.
        let measured = if ms > 1.0 { 25.0 } else { 14.0 };
        until(&mut sim, &mut requests, measured);
        let (before, began) = (sim.sums(), sim.now().as_secs_f64());
        let answered = until(&mut sim, &mut requests, measured * 1.4);
        let seconds = sim.now().as_secs_f64() - began;
        let window = 2.0 * ms / 1000.0;
        let (depth, rate) = (f64::from(depth), answered.len() as f64 / seconds);
        let wanted = depth / window;
        let destaged = (sim.sums().store.writes - before.store.writes) as f64 / seconds;
        let mut waits: Vec<f64> = answered.iter().map(|a| micros(a) / 1e6).collect();
        waits.sort_by(f64::total_cmp);
        let p99 = waits[waits.len() * 99 / 100];
        let gaps = answered.windows(2).map(|a| (a[1].done - a[0].done).as_secs_f64());
        let gap = gaps.fold(0.0, f64::max);
        let text = format!(
            "{ms} ms, depth {depth}: {rate:.1}/s answered, {destaged:.1}/s destaged, of {wanted}; p99 {p99:.4} s, gap {gap:.4} s, {:?}",
            sim.ages()
        );
        assert!((rate / wanted - 1.0).abs() < 0.05, "{text}");
        assert!((destaged / wanted - 1.0).abs() < 0.05, "{text}");
        assert!(p99 <= 5.0 * depth / rate, "{text}");
        assert!(gap <= 2.0 * window, "{text}");
    }
}

/// With a flush after each n writes a window of `grain=flush` has what was written between two of them.
#[test]
fn between_two_flushes_lies_a_window() {
    for (every, depth) in [(8, 1), (64, 1), (64, 16)] {
        let more = format!(
            "load = \"closed\"\ndepth = {depth}\ndirty_max = \"2m\"\nflush_every = {every}"
        );
        let mut sim = sim_of(&back("back:ordered", &more), &quick(), 10_000.0, 10_000.0);
        let mut requests = pages(2);
        until(&mut sim, &mut requests, 20.0);
        let began = (sim.now().as_secs_f64(), sim.sums().store);
        let answered = until(&mut sim, &mut requests, 40.0);
        let writes = answered.iter().filter(|a| !a.flush).count() as f64;
        let rate = writes / (sim.now().as_secs_f64() - began.0);
        let store = sim.sums().store;
        let wide =
            (store.writes - began.1.writes) as f64 / (store.flushes - began.1.flushes) as f64;
        let least = f64::from(every) / 0.02;
        assert!(rate > 0.95 * least && rate < 1.05 * least, "{every}, {depth}: {rate}");
        assert!((wide / f64::from(every) - 1.0).abs() < 0.05, "{every}, {depth}: {wide}");
        assert!(answered.iter().any(|a| a.flush && !a.failed));
    }
}

/// Whatever the order and the pace: what clients have written comes to the store, all of it, and nothing else does.
#[test]
fn nothing_dirty_is_lost_in_a_run_that_drains() {
    let orders = ["any", "ordered", "ordered,grain=completion", "journaled"];
    let paces = ["async", "periodic:1", "none"];
    for (order, pace) in orders.iter().flat_map(|o| paces.map(|p| (o, p))) {
        for (depth, most) in [(1, 1 << 3), (32, 1 << 3), (64, 1 << 7)] {
            let write_mode = format!("back:{order},destage={pace}");
            let more =
                format!("load = \"closed\"\ndepth = {depth}\ndirty_max = \"1m\"\nflush_every = 50");
            let mut sim = sim_of(&back(&write_mode, &more), &Timing::default(), 1000.0, 500.0);
            let mut rng = Rng::new(3);
            let mut written = BTreeSet::new();
            let mut answered = Vec::new();
            for number in 0..3000 {
                let page = rng.below(1 << 14).min((1 << 14) - most);
                let len = rng.range(1, most);
                let request = if rng.chance(0.3) {
                    read(page * PAGE, len * PAGE)
                } else {
                    written.extend(page..page + len);
                    write(page * PAGE, len * PAGE)
                };
                sim.request(number, &request, &mut answered).unwrap();
            }
            sim.finish(&mut answered);
            let what = format!("{write_mode}, depth {depth}, up to {most} pages");
            assert_eq!(answered.iter().filter(|a| !a.flush).count(), 3000, "{what}");
            assert!(answered.iter().all(|a| !a.failed), "{what}");
            assert!(sim.drain(), "{what}");
            settle(&mut sim);
            let stored: BTreeSet<u64> = sim
                .world
                .stored
                .iter()
                .flat_map(|&(_, at, len)| at / PAGE..(at + len) / PAGE)
                .collect();
            assert_eq!(stored, written, "{what}");
            assert_eq!(sim.ages().dirty, 0, "{what}");
        }
    }
}

/// More than the bound comes at once, before anything of it was answered.
#[test]
fn a_burst_larger_than_the_bound_is_answered() {
    let more = "load = \"closed\"\ndepth = 64\ndirty_max = \"1m\"";
    for pace in ["async", "none", "periodic:3600"] {
        let spec = back(&format!("back:ordered,destage={pace}"), more);
        let mut sim = sim_of(&spec, &quick(), 1000.0, 1000.0);
        let a = run(&mut sim, (0..200).map(|i| write(i * 256 * 1024, 256 * 1024)));
        assert_eq!(a.len(), 200, "{pace}");
        assert!(sim.now() < Nanos::from_secs(60), "{pace}: {:?}", sim.now());
        assert!(sim.ages().stalls > 0, "{pace}");
    }
}

/// Trims, and volumes beside each other.
#[test]
fn what_is_trimmed_in_the_log_is_trimmed_in_the_store() {
    let mut sim = sim_of(&back("back:any", ""), &Timing::default(), 1000.0, 1000.0);
    let s = 1_000_000;
    let trim = Request::block(TraceOp::Trim, 3, 0, 64 * PAGE);
    let other = Request::block(TraceOp::Write, 5, 0, PAGE);
    let a = run(
        &mut sim,
        [
            at(1, Request { app: 3, ..write(1 << 20, PAGE) }),
            at(s, Request { app: 3, ..write(0, 4 * PAGE) }),
            at(s + 1000, trim),
            at(s + 2000, Request { app: 3, ..read(0, PAGE) }),
            at(s + 3000, other),
            at(s + 3500, Request { app: 3, ..read(0, PAGE) }),
        ],
    );
    assert!(a.iter().all(|a| !a.reached_store && !a.failed), "{a:?}");
    assert!(sim.drain());
    // The write is hidden behind the trim.
    assert_eq!(sim.world.stored, [(3, 1 << 20, PAGE), (5, 0, PAGE)]);
    assert_eq!(sim.sums().store.writes, 3);
}

/// Holland's policies of writing flash back: synchronously (that is write-through), at once, periodically, and not before they must. `naive`
/// of `larder sim stack` and the engine agree in who beats whom: writes wait for the store under `s` alone, and the store gets the fewer
/// writes the later they come.
///
/// What differs: the engine gathers what comes while a window is on its way, so that `a` writes less than `s`, where the model writes each block; under
/// `n` the engine destages all that is dirty when half of the bound is held, the model the one block whose frame is needed.
#[test]
fn hollands_policies_rank_alike_in_his_model_and_in_the_engine() {
    const TRACE: &str = "gen:fileserver?size=64m&set=2m&requests=40000&outside=0.1&writes=0.4";
    let options = Options { pages: Some(4096), ..Options::default() };
    let mut engine = Vec::new();
    let mut model = Vec::new();
    for (policy, mode) in [
        ("s", "hdd-ssd"),
        ("a", "back:any"),
        ("p1", "back:any,destage=periodic:1"),
        ("n", "back:any,destage=none"),
    ] {
        let config = StackConfig {
            architecture: Architecture::Naive,
            ram_blocks: 1,
            flash_blocks: 4096,
            ram_policy: Policy::Synchronous,
            flash_policy: policy.parse().unwrap(),
            timing: stack::Timing::default(),
            restart: None,
            seed: 1,
        };
        let mut reader = open(TRACE, &options).unwrap().reader;
        let figures = stack::run(&config, 1, 0, &mut *reader, |_, _| ()).unwrap();
        model.push((figures.write_mean_us, figures.counts.filer_writes));

        let more = "load = \"closed\"\ndepth = 1\nadmission = \"all\"";
        let spec = match mode.starts_with("back") {
            true => Block {
                flash: ByteSize::mib(256),
                write_log: Some(ByteSize::mib(128)),
                ..back(mode, more)
            },
            false => Block { write_log: None, ..back(mode, more) },
        };
        let mut sim = sim_of(&spec, &Timing::default(), 92.0, 92.0);
        let requests = open(TRACE, &options).unwrap().reader.map(|r| r.unwrap());
        let answered = run(&mut sim, requests);
        let writes: Vec<f64> =
            answered.iter().filter(|a| a.kind == PartKind::Write).map(micros).collect();
        let mean = writes.iter().sum::<f64>() / writes.len() as f64;
        engine.push((mean, sim.sums().store.writes));
    }
    for (who, all) in [("model", &model), ("engine", &engine)] {
        let [s, a, p, n] = all[..] else { unreachable!() };
        assert!([a, p, n].iter().all(|other| other.0 < 0.6 * s.0), "{who}: {all:?}");
        assert!(s.1 >= a.1 && a.1 > p.1 && p.1 > n.1, "{who}: {all:?}");
    }
}

/// First clients go as fast as the store; that is more than the write budget has, so the volume is written through, and writes back when there is budget
/// again. Nothing is lost on the way.
#[test]
fn for_want_of_write_budget_a_volume_slows_down_goes_through_and_comes_back() {
    // 1 MB a second, a minute of which may be saved up.
    let more = "[write_budget]\ntbw = 31557600000000\nyears = 1.0\ndevice_write_amplification = 1.0\n\
                burst_hours = 0.016666\nfirst_fill = false";
    let mut sim = sim_of(&back("back:ordered", more), &quick(), 1000.0, 1000.0);
    let (mut pages, mut written, mut answered) = (pages(5), BTreeSet::new(), Vec::new());
    let (mut changes, mut slow) = (Vec::new(), 0);
    // 8 MB a second for a quarter of a minute, then now and then a write.
    let times = (0..30_000).map(|i| i * 500).chain((0..30).map(|i| 300_000_000 + i * 1_000_000));
    for time in times {
        let request = at(time, pages.next().unwrap());
        written.insert(request.offset / PAGE);
        sim.request(0, &request, &mut answered).unwrap();
        let back = sim.node.back.as_ref().unwrap();
        slow += usize::from(back.log.borrow().economy().is_slow() && back.through() == 0);
        if changes.last() != Some(&back.through()) {
            changes.push(back.through());
        }
    }
    sim.finish(&mut answered);
    assert!(answered.iter().all(|a| !a.failed));
    assert_eq!(changes, [0, 1, 0]);
    assert!(slow > 1000, "{slow}");
    assert!(sim.drain());
    settle(&mut sim);
    let stored: BTreeSet<u64> =
        sim.world.stored.iter().flat_map(|&(_, at, len)| at / PAGE..(at + len) / PAGE).collect();
    assert_eq!(stored, written);
}

/// What was told to the log of a volume: a write of these bytes, or a flush.
enum Told {
    Write(u64, u64),
    Flush,
}

/// Checks that epochs are those that the engine's own records of a volume give for what was told: each ends where they let one end, and has of each
/// byte the version that they have. Returns where they end.
fn as_the_engine_has_them(sim: &BlockSim, told: &[Told]) -> Vec<u64> {
    let order = Order::Journaled(Cuts::Flushes);
    let (mut log, mut overlay) = (VolumeLog::new(order, 0), Overlay::default());
    let mut told = told.iter();
    let mut ends = Vec::new();
    for (number, (_, epoch, last, parts)) in (1..).zip(&sim.world.epochs) {
        // All that was answered and flushed when it began.
        while log.promised() < *last {
            match told.next().expect("an epoch ends behind all that was told") {
                Told::Flush => log.promise(log.acknowledged()),
                &Told::Write(at, len) => {
                    let batch = log.last() + 1;
                    let logged = Logged { at, len, kind: Kind::Write, batch, place: batch << 20 };
                    log.assign(logged, None, &mut overlay);
                    log.answer(&mut overlay);
                }
            }
        }
        let window = log.next(*last, defaults::EPOCH.0, false, false).expect("an epoch");
        assert_eq!((*epoch, *last), (number, *window.end()), "{ends:?}");
        let of_engine: Vec<_> = log.writes(&window).iter().map(|d| (d.at, d.len)).collect();
        assert!(log.writes(&window).iter().all(|dirty| dirty.holds == Holds::Bytes));
        let of_journal: Vec<_> = parts.iter().map(|part| (part.at, part.len)).collect();
        assert_eq!(of_journal, of_engine, "epoch {epoch}");
        assert!(parts.iter().all(|p| p.kind == PartKind::Write && p.bytes.is_some()));
        log.let_go(*last, &mut overlay, |_, _| {});
        ends.push(*last);
    }
    ends
}

/// A write each 125 µs, with a flush beside each eighth, which covers those before it. An epoch has what was flushed while the last one was on its way,
/// and each page once: so the oldest write that the store lacks is between one cycle and two old.
#[test]
fn an_epoch_has_what_was_flushed_while_the_last_was_on_its_way() {
    const EVERY: u64 = 8;
    let mut sim = sim_of(&back("back:journaled", "flush_every = 8"), &quick(), 1000.0, 1000.0);
    let (mut rng, mut told, mut answered) = (Rng::new(11), Vec::new(), Vec::new());
    for number in 0..16_000 {
        // Some are written again before the store has them.
        let page = rng.below(64) * PAGE;
        sim.request(number, &at(number * 125, write(page, PAGE)), &mut answered).unwrap();
        if number % EVERY == EVERY - 1 {
            told.push(Told::Flush);
        }
        told.push(Told::Write(page, PAGE));
        if number == 2_000 {
            sim.reset();
        }
    }
    sim.finish(&mut answered);
    let ages = sim.ages();
    let ends = as_the_engine_has_them(&sim, &told);
    assert!(ends.iter().all(|end| end % EVERY == EVERY - 1), "{ends:?}");
    let epochs = &sim.world.epochs[ends.len() / 2..];
    let count = (epochs.len() - 1) as f64;
    let cycle = (epochs.last().unwrap().0 - epochs[0].0).as_secs_f64() / count;
    let writes = (epochs.last().unwrap().2 - epochs[0].2) as f64 / count;
    assert!((writes / (cycle * 8000.0) - 1.0).abs() < 0.05, "{writes} in {cycle}");
    let parts = epochs.iter().map(|(.., parts)| parts.len() as f64).sum::<f64>() / (count + 1.0);
    assert!(parts < 0.9 * writes, "{parts} of {writes}");
    let age = ages.age / ages.time.as_secs_f64();
    assert!((1.2 * cycle..2.0 * cycle).contains(&age), "{age} of {cycle}");
    assert!(ages.oldest.as_secs_f64() < 2.5 * cycle, "{ages:?} of {cycle}");
    // A commit, descriptors and data of each.
    let sums = sim.sums();
    let bytes: u64 = sim.world.epochs.iter().flat_map(|(.., parts)| parts).map(|p| p.len).sum();
    assert_eq!(sums.epochs, ends.len() as u64);
    assert_eq!(sums.journal_bytes_written, bytes + sums.epochs * (PAGE + 512));
    // The journal is a device of its own: the store is told of each byte once.
    assert!(sums.store.write_bytes <= bytes, "{:?}", sums.store);
}

/// Epochs where there is no flush: they end anywhere, at the bound or the age, as the engine has it.
#[test]
fn without_flushes_an_epoch_begins_when_the_bound_or_the_age_presses() {
    let dirty = |more: &str, seconds: u64| {
        let mut sim = sim_of(&back("back:journaled", more), &quick(), 1000.0, 1000.0);
        let requests = pages(3)
            .take(seconds as usize * 10)
            .enumerate()
            .map(|(i, r)| at(i as u64 * 100_000, r));
        run(&mut sim, requests);
        let epochs: Vec<_> = sim.world.epochs.iter().map(|(at, ..)| at.as_secs_f64()).collect();
        (epochs, sim.ages().oldest.as_secs_f64())
    };
    // 10 pages a second: half of 1 MiB after 12.8 s.
    let (epochs, _) = dirty("dirty_max = \"1m\"", 20);
    assert!(epochs.first().is_some_and(|at| (11.0..14.0).contains(at)), "{epochs:?}");
    let (epochs, oldest) = dirty("dirty_age_max = \"5\"", 20);
    assert!(epochs.len() >= 3 && oldest < 5.5, "{epochs:?}, {oldest}");
    let (epochs, _) = dirty("", 20);
    assert!(epochs.is_empty(), "{epochs:?}");
}

/// At the bound an epoch takes, one after the other, its data, commit and flush in the journal, its writes in place, 64 at a time, and a flush of the store.
#[test]
fn a_journal_takes_the_times_that_are_stated_of_it() {
    for journal_ms in [0.1, 1.0, 10.0] {
        let timing = quick();
        let more = "load = \"closed\"\ndepth = 16\nflush_every = 8\ndirty_max = \"1m\"";
        let drive = |bytes| Drive::new(&DriveSpec::default(), &timing, bytes, 1);
        let times =
            |ms: f64| Store { write_us: ms * 1e3, flush_us: Some(ms * 1e3), ..Store::default() };
        let stores = (&times(1.0), &times(journal_ms));
        let spec = back("back:journaled", more);
        let mut sim = BlockSim::new(&spec, stores, &timing, drive, 7).unwrap();
        until(&mut sim, &mut pages(9), 10.0);
        let epochs = &sim.world.epochs;
        let epochs = &epochs[epochs.len() - 50..];
        let took = (epochs[49].0 - epochs[0].0).as_secs_f64() * 1e3;
        let wanted = |parts: usize| 3.0 * journal_ms + parts.div_ceil(64) as f64 + 1.0;
        let all: f64 = epochs[..49].iter().map(|(.., parts)| wanted(parts.len())).sum();
        assert!((took / all - 1.0).abs() < 0.05, "{journal_ms}: {took} ms, not {all}");
    }
}
