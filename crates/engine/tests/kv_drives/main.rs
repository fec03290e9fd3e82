//! Several drives under one cache against a plain model: kills, power cuts, drives that fail, are taken out, put back with what they held at any
//! earlier time, replaced, and added.

mod shard;
mod world;

use world::{Change, World};

/// Whatever happens to drives, an answer is the latest version or none.
#[test]
fn no_drive_brings_back_what_was_overwritten() {
    let (mut warm, mut kept, mut hits, mut stale) = (0, 0, 0, 0);
    for seed in 0..60 {
        let mut world = World::new(seed, &[2 << 20, 3 << 20, 2 << 20][..1 + seed as usize % 3]);
        for _ in 0..12 {
            world.operate(2000);
            world.end_and_change();
            world.start();
        }
        world.operate(2000);
        warm += world.warm;
        kept += world.kept;
        hits += world.flash_hits;
        stale += world.put_back;
    }
    assert!(
        warm > 100 && kept > 10_000 && hits > 1_000 && stale > 20,
        "{warm} {kept} {hits} {stale}"
    );
}

/// Drives are filled by their size, and each has what was written to it.
#[test]
fn objects_are_spread_by_capacity() {
    let mut world = World::new(5, &[2 << 20, 6 << 20]);
    world.calm();
    world.store_all(0..20_000, 400);
    let [a, b] = [world.written(0), world.written(1)];
    let times = world.capacity(1) / world.capacity(0);
    assert!(a.abs_diff(b / times) <= 4 * world.segment_bytes(), "{a} {b}, {times} times as large");
    assert!(world.flash_hit_share(10_000..20_000) > 0.2);
}

/// What is on the others stays, and they take what it would have taken.
#[test]
fn a_drive_that_fails_costs_its_share() {
    let mut world = World::new(6, &[3 << 20, 3 << 20, 3 << 20]);
    world.calm();
    world.store_all(0..6_000, 400);
    let before = world.flash_hit_share(0..6_000);
    world.fail(1, true);
    let after = world.flash_hit_share(0..6_000);
    assert!(after > before * 0.55 && after < before * 0.8, "{before} {after}");
    let written = [0, 1, 2].map(|i| world.written(i));
    world.store_all(6_000..12_000, 400);
    assert_eq!(world.written(1), written[1]);
    let [a, c] = [0, 2].map(|i| world.written(i) - written[i]);
    assert!(a.abs_diff(c) <= 4 * world.segment_bytes(), "{a} {c}");
    assert_eq!(world.lost(), 0, "the others were not enough");
    // It is in use again once it takes writes.
    world.fail(1, false);
    world.pass(10);
    world.store_all(12_000..18_000, 400);
    assert!(world.written(1) > written[1]);
    // None takes any: DRAM serves on.
    (0..3).for_each(|i| world.fail(i, true));
    world.store_all(18_000..20_000, 400);
    assert!(world.get_share(19_900..20_000) > 0.9);
}

/// A drive that hangs in a write holds up what it has been given, and nothing else.
#[test]
fn a_drive_that_is_busy_is_not_waited_for() {
    let mut world = World::new(7, &[3 << 20, 3 << 20]);
    world.calm();
    world.hang(0, true);
    world.store_all(0..4_000, 800);
    assert!(world.written(1) > 1 << 20, "{}", world.written(1));
    assert_eq!(world.written(0), 0);
    assert!(world.get_share(0..4_000) > 0.6);
}

/// Others stay warm; the new one begins empty and is filled.
#[test]
fn drives_come_and_go_between_starts() {
    for clean in [true, false] {
        let mut world = World::new(8, &[3 << 20, 3 << 20]);
        world.calm();
        world.store_all(0..4_000, 800);
        let share = world.flash_hit_share(0..4_000);
        // Another one.
        world.end(clean);
        world.change(&Change::Add(3 << 20));
        world.start();
        assert!(world.flash_hit_share(0..4_000) > share * 0.9, "clean {clean}");
        world.store_all(4_000..8_000, 800);
        assert!(world.written(2) > 0);
        // One goes, and comes back: what it held is not believed.
        let share = world.flash_hit_share(4_000..8_000);
        world.end(clean);
        world.change(&Change::TakeOut(0));
        world.start();
        let without = world.flash_hit_share(4_000..8_000);
        assert!(without > 0.4 * share && without < share, "clean {clean}: {without} of {share}");
        world.end(clean);
        world.change(&Change::PutBack);
        world.start();
        let back = world.flash_hit_share(4_000..8_000);
        assert!(back > 0.9 * without && back <= without, "clean {clean}: {back} of {without}");
        world.store_all(8_000..12_000, 800);
        assert!((0..3).all(|i| world.written(i) > 0), "clean {clean}");
    }
}

/// A write budget is the drive's own: what one may not write goes to another.
#[test]
fn each_drive_has_a_write_budget_of_its_own() {
    let mut world = World::new(9, &[3 << 20, 3 << 20]);
    world.calm();
    world.spend(0);
    world.store_all(0..4_000, 800);
    assert_eq!(world.written(0), 0);
    assert!(world.written(1) > 1 << 20);
}

/// Reads that fail forget what is on that drive, and a start after a kill finds the rest.
#[test]
fn an_error_of_one_drive_is_not_another_ones() {
    let mut world = World::new(10, &[3 << 20, 3 << 20]);
    world.calm();
    world.store_all(0..4_000, 800);
    world.fail(0, true);
    let share = world.flash_hit_share(0..4_000);
    world.fail(0, false);
    world.end(false);
    world.start();
    assert!(world.flash_hit_share(0..4_000) >= share * 0.9);
}
