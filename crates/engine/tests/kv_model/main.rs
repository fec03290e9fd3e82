//! The key-value engine against a plain map that knows what a cache may forget.
//!
//! Random operations over a tiny DRAM and a tiny flash, with reads of flash that complete late and out of order, device
//! faults, bit rot, and kills between any two stores followed by recovery: the node's own starts and stops, which are killed too, power
//! cuts, runs without flash, files of what was in DRAM, and copies that are put back. Keys are chosen so that many share the tag
//! and buckets of the flash index: what happens once in millions of keys in the field happens here all the time.
//!
//! What is checked: a hit returns exactly the latest acknowledged version (value, flags, CAS, expiry); a positive answer
//! to any other operation is one that the latest version warrants; a CAS unique is never given out twice; after a kill
//! nothing older than the last acknowledged write of a key is there; a start finds a superblock, and none older than one that was
//! durable. A cache may forget: a miss is always allowed.
//!
//! One seed replays one run: `LARDER_SEED=17 cargo test -p larder-engine --test kv_model`.

mod dram;
mod heads;
mod model;
mod seen;
mod starts;
mod world;

use world::{Options, World};

/// Seeds of the ordinary run.
const SEEDS: u64 = 2_000;
const STEPS: u32 = 700;

fn run(seed: u64, options: Options) -> Result<(), String> {
    let mut world = World::new(seed, options);
    for _ in 0..STEPS {
        world.step()?;
    }
    world.finish()
}

fn seeds() -> std::ops::Range<u64> {
    match std::env::var("LARDER_SEED").ok().and_then(|s| s.parse::<u64>().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..SEEDS,
    }
}

#[test]
fn two_thousand_seeds() {
    let mut seen = seen::Seen::default();
    for seed in seeds() {
        let mut world = World::new(seed, Options::default());
        let result = (0..STEPS).try_for_each(|_| world.step()).and_then(|()| world.finish());
        if let Err(why) = result {
            panic!("seed {seed}: {why}\nreplay with LARDER_SEED={seed}");
        }
        seen.add(world.seen());
    }
    if std::env::var("LARDER_SEED").is_err() {
        // A test that meets nothing proves nothing.
        seen.assert_met_everything();
    }
}

#[test]
fn a_run_replays_from_its_seed() {
    for seed in 0..20 {
        let transcript = |seed| {
            let mut world = World::new(seed, Options::default());
            for _ in 0..STEPS {
                world.step().unwrap();
            }
            world.transcript()
        };
        assert_eq!(transcript(seed), transcript(seed), "seed {seed}");
    }
}

/// The checker is checked: each planted fault must be caught.
#[cfg(feature = "planted")]
#[test]
fn every_planted_fault_is_caught_within_a_thousand_seeds() {
    use larder_engine::kv::Planted::*;
    let all = [
        SetKeepsEntry,
        DeleteKeepsEntry,
        StalePublished,
        GoneEntryBelieved,
        StagedChangeMissed,
        CasNotCompared,
        CasReused,
        FlushKeepsFlash,
        ExpiredServed,
        SuspectRestoredBlindly,
        TwinKept,
        DeadTwinPublished,
        FlushForgotten,
        KeyNotCompared,
        ReclaimLeavesEntries,
        RestoredUnderNewCas,
        CheckpointOfAnotherRun,
        SuperblockNotAwaited,
        SuperblockInPlace,
        MemoryFileOfAnotherRun,
        MemoryFileDescribedFirst,
        DueFlushForgotten,
        UnkeptNameWritten,
    ];
    let mut missed = Vec::new();
    for fault in all {
        let caught = (0..1_000).find(|&seed| run(seed, Options { planted: Some(fault) }).is_err());
        match caught {
            Some(seed) => println!("{fault:?}: caught at seed {seed}"),
            None => missed.push(fault),
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}

/// Failures found by random seeds stay as tests of their own.
#[test]
fn regressions() {
    for (seed, what) in model::REGRESSIONS {
        if let Err(why) = run(*seed, Options::default()) {
            panic!("seed {seed} ({what}): {why}");
        }
    }
}
