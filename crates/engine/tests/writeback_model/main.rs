//! The crash model of write-back: random histories of one volume, with kills, power cuts, a store and a journal's device that crash apart,
//! and the loss of the cache device at the end, in every order. What must hold is what `models/write_back.py` says; each rule that is
//! left out must break it, in every order that needs it.
//!
//! One seed replays one history: `LARDER_SEED=17 cargo test -p larder-engine --test writeback_model`.

mod chain;
mod world;

use chain::Chain;
use world::{ORDERS, World};

const SEEDS: u64 = 10_000;
const STEPS: u64 = 150;

#[test]
fn no_history_breaks_a_promise() {
    let seed = std::env::var("LARDER_SEED").ok().and_then(|s| s.parse::<u64>().ok());
    let seeds = seed.map_or(0..SEEDS, |seed| seed..seed + 1);
    for (name, order, _) in ORDERS {
        for seed in seeds.clone() {
            if let Err(why) = World::new(seed, order, None).play(STEPS) {
                panic!("{name}, seed {seed}: {why}\nreplay with LARDER_SEED={seed}");
            }
        }
    }
}

#[test]
fn no_history_of_the_log_breaks_a_promise() {
    let seed = std::env::var("LARDER_SEED").ok().and_then(|s| s.parse::<u64>().ok());
    for seed in seed.map_or(0..SEEDS, |seed| seed..seed + 1) {
        if let Err(why) = Chain::new(seed, None).play(STEPS) {
            panic!("log, seed {seed}: {why}\nreplay with LARDER_SEED={seed}");
        }
    }
}

#[cfg(feature = "planted")]
#[test]
fn every_planted_fault_is_caught_in_every_order_that_needs_the_rule() {
    use larder_engine::block::writeback::Planted;
    let orders = |fault: Planted| match fault {
        Planted::DestagedBeforeDurable
        | Planted::AnsweredOutOfOrder
        | Planted::WindowNotFlushed
        | Planted::LostNotRewritten
        | Planted::LivesIgnored => "acfj",
        Planted::DependencyIgnored | Planted::DependencyForgotten | Planted::FrontierNotNoted => {
            "cf"
        }
        Planted::ShownBeforeAnswered => "c",
        Planted::JournalNotFlushed | Planted::NoJournal | Planted::CutAnywhere => "j",
        Planted::FreedBeforeSaid
        | Planted::NoReserve
        | Planted::RetiredInAnyOrder
        | Planted::FrontierNotRepeated
        | Planted::CopyNotAwaited
        | Planted::DamageParkedAsData
        | Planted::OldestIgnored
        | Planted::GapIgnored => "l",
    };
    let mut missed = Vec::new();
    for &fault in Planted::ALL {
        if orders(fault) == "l" {
            match (0..SEEDS).find(|&seed| Chain::new(seed, Some(fault)).play(STEPS).is_err()) {
                Some(seed) => println!("{fault:?}, log: seed {seed}"),
                None => missed.push(format!("{fault:?}, log")),
            }
        }
        for (name, order, letter) in ORDERS {
            if !orders(fault).contains(letter) {
                continue;
            }
            let caught =
                (0..SEEDS).find(|&seed| World::new(seed, order, Some(fault)).play(STEPS).is_err());
            match caught {
                Some(seed) => println!("{fault:?}, {name}: seed {seed}"),
                None => missed.push(format!("{fault:?}, {name}")),
            }
        }
    }
    assert!(missed.is_empty(), "not caught: {missed:?}");
}
