//! Volumes that write back through the whole block engine: queues, shards, slots, the map's log and the write log, over devices that
//! lose what was not flushed.
//!
//! Two or three queues serve a few small volumes, most of which write back, in `any` or `ordered`; the others write through. Clients read, write,
//! zero, trim, flush and ask for the status of the same few lines. What the engine asks for happens late, in any order, and its end is told later
//! still. Stores and slots fail, or stores do not answer for a while; in some runs the log's device fails for good. The process is killed at any step, or the power is cut, in the midst of a start
//! too; the next run reads the map and the log as a server does. Operators, and threads that look after volumes, call the log meanwhile. In some runs
//! volumes change over to be written through and back while clients go on, by the steps of the engine's `Holder`, and any of those may be the last.
//!
//! What is checked: a read is never older than the last answered write of its sectors, nor than what was read before it; after a kill every
//! answered write is there, after a power cut every write that an answered FLUSH or FUA covers; a status never calls a sector a hole that
//! holds data; what the log waits for at its device somebody does; at any moment a line in the map has the bytes of the store; a store alone is what
//! `ordered` promises of it, and has everything where a marker says that nothing is dirty; in the end the stores have everything, and reads give just that.
//!
//! (`writeback_model` has the log alone: what is a prefix of it, journals, markers, and what a start makes of a log that has failed.)
//!
//! One seed replays one run: `LARDER_SEED=17 cargo test -p larder-engine --test block_back` (with `LARDER_TRACE=1` step by step).
//! `LARDER_SEEDS=20000` tries more.

mod device;
mod parts;
#[path = "../block_model/threads.rs"]
mod threads;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use threads::on_two_threads;
use world::{Seen, Setup, World};

const SEEDS: u64 = 800;
const STEPS: u64 = 1_200;

fn run(seed: u64, setup: Setup) -> Result<Seen, String> {
    let mut world = World::new(seed, setup)?;
    world.play(STEPS)?;
    Ok(world.seen)
}

#[test]
fn what_is_written_back_through_queues_and_slots_is_there_and_is_what_is_read() {
    let number = |name| std::env::var(name).ok().and_then(|number| number.parse().ok());
    let seeds = match number("LARDER_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("LARDER_SEEDS").unwrap_or(SEEDS),
    };
    let alone = seeds.end - seeds.start == 1;
    let trace = alone && std::env::var("LARDER_TRACE").is_ok();
    #[allow(clippy::needless_update, reason = "faults are planted with a feature")]
    let setup = Setup { trace, ..Setup::default() };
    let outcomes = on_two_threads(seeds, |seed| {
        let outcome = catch_unwind(AssertUnwindSafe(|| run(seed, setup)));
        (seed, outcome.unwrap_or_else(|_| Err("it panicked".to_owned())))
    });
    let mut seen = Seen::default();
    let mut broken = Vec::new();
    for (seed, outcome) in outcomes {
        match outcome {
            Ok(more) => seen.add(more),
            Err(why) => broken.push(format!("seed {seed}: {why}")),
        }
    }
    broken.iter().take(8).for_each(|why| eprintln!("{why}"));
    assert!(broken.is_empty(), "{} runs are broken; replay one with LARDER_SEED", broken.len());
    if !alone {
        // A test that meets nothing proves nothing.
        seen.assert_met_everything();
    }
}

/// The faults that must be caught: of volumes that write back, and of slots and log whatever they serve.
#[cfg(feature = "planted")]
fn planted() -> Vec<(String, Setup)> {
    use larder_engine::block::Planted as Block;
    use larder_engine::block::writeback::Planted as Log;
    let of_slots = [
        // A destage, which is a change like any other, passes a fetch of its line.
        Block::ChangeIgnoresFill,
        Block::UpdateStaysInMap,
        Block::MergeNotJoined,
    ];
    let block = Block::OF_WRITE_BACK
        .iter()
        .chain(&of_slots)
        .map(|&fault| (format!("{fault:?}"), Setup { fault: Some(fault), ..Setup::default() }));
    let of_the_log = [
        Log::DependencyIgnored,
        Log::FlushNotAwaited,
        Log::FlushBegunBefore,
        Log::WindowNotFlushed,
        Log::TrimOvertakes,
        Log::PinsIgnored,
        Log::FreedBeforeSaid,
        Log::OperatorsAsksDropped,
        // Of volumes that change over while they are served.
        Log::CleanBeforeDrained,
        Log::AnsweredBeforeMarker,
        Log::FailedMarkForgotten,
    ];
    let log = of_the_log
        .into_iter()
        .map(|fault| (format!("{fault:?}"), Setup { in_log: Some(fault), ..Setup::default() }));
    block.chain(log).collect()
}

/// The checker is checked: each planted fault must be caught by one of the first seeds. `LARDER_FAULT=DirtyCalledHole` tries one alone.
#[cfg(feature = "planted")]
#[test]
fn every_planted_fault_of_volumes_that_write_back_is_caught() {
    let only = std::env::var("LARDER_FAULT").ok();
    let faults: Vec<(String, Setup)> =
        planted().into_iter().filter(|(name, _)| only.as_ref().is_none_or(|o| o == name)).collect();
    let caught = on_two_threads(0..faults.len() as u64, |which| {
        let (name, setup) = &faults[which as usize];
        let fails = |seed| match catch_unwind(AssertUnwindSafe(|| run(seed, *setup))) {
            Ok(outcome) => outcome.err(),
            Err(_) => Some("it panicked".to_owned()),
        };
        let caught = (0..4 * SEEDS).find_map(|seed| fails(seed).map(|why| (seed, why)));
        match &caught {
            Some((seed, why)) => println!("{name}: seed {seed}: {}", &why[..why.len().min(160)]),
            None => println!("{name}: not caught"),
        }
        (name.clone(), caught.is_some())
    });
    let missed: Vec<&String> = caught.iter().filter(|(_, is)| !is).map(|(name, _)| name).collect();
    assert!(missed.is_empty(), "not caught: {missed:?}");
}

/// What a source of the log declares that may ask for something: the names of its public functions that have `asks`.
fn calls_in(source: &str) -> impl Iterator<Item = &str> {
    let declared = source.split("pub fn ").skip(1);
    declared.filter_map(|text| {
        let signature = &text[..text.find(" {\n")?];
        signature.contains("asks: &mut Asks<B>").then(|| signature.split('(').next()).flatten()
    })
}

/// A call of the log by which it may ask its device for something is a queue's, which carries that out, or somebody's who does not: all of those are tried
/// in every run.
#[test]
fn every_call_of_the_log_that_may_ask_for_something_is_known_and_tried() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src/block/writeback");
    let files = std::fs::read_dir(dir.join("log")).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "rs"));
    let mut unknown = Vec::new();
    let mut all = 0;
    for path in files.chain([dir.join("log.rs")]) {
        let source = std::fs::read_to_string(&path).unwrap();
        for name in calls_in(&source) {
            all += 1;
            let operators = world::operators::CALLS.iter().map(|(name, _)| *name);
            let mut known = operators.chain(world::operators::OF_A_START).chain(OF_QUEUES);
            if !known.any(|known| known == name) {
                unknown.push(format!("{name} in {}", path.display()));
            }
        }
    }
    assert!(all > 20, "{all}");
    assert!(
        unknown.is_empty(),
        "who makes these calls, and who carries out what they ask for? {unknown:?}"
    );
}

/// Calls that a queue makes alone.
const OF_QUEUES: [&str; 15] = [
    "append",
    "gather",
    "gathered",
    "flush",
    "unpin",
    "written",
    "flushed",
    "step",
    "stored",
    "store_flushed",
    "journaled",
    "journal_flushed",
    "marked",
    "parked",
    "due",
];

/// Who has asks of its own to give to the log may leave them undone: product code goes by `call_log` and `tell_log`, which have them carried out.
#[test]
fn nobody_calls_the_log_past_those_who_have_carried_out_what_it_asks_for() {
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut folders: Vec<_> = ["cache/src", "sim/src", "block/src", "engine/src/block/node"]
        .map(|folder| crates.join(folder))
        .into();
    let (mut seen, mut wrong) = (0, Vec::new());
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            seen += 1;
            let source = std::fs::read_to_string(&path).unwrap_or_default();
            if source.contains("Asks::default()") {
                wrong.push(path.strip_prefix(crates).unwrap().display().to_string());
            }
        }
    }
    assert!(seen > 200, "{seen}");
    assert_eq!(wrong, ["engine/src/block/node/logged.rs"]);
}
