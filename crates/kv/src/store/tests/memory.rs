//! `cache_memlimit` on a store under load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_runtime::testing::MemoryDevice;

use super::harness::{Client, config, open};
use crate::server::Store;
use crate::stats::StoreStats;
use crate::store::StoreConfig;

#[test]
fn the_limit_changes_under_load_and_memory_follows() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig { memory: 16 << 20, ..config(dir.path().to_owned()) };
    let (site, _) = open(&config, Arc::new(MemoryDevice::new(6 << 20))).unwrap();
    let mut client = Client::new(3, 30_000);
    for round in 0..9 {
        for _ in 0..4_000 {
            client.step(&site);
        }
        let limit = [24u64 << 20, 10 << 20, 17 << 20][round % 3];
        assert!(site.store.set_memory_limit(limit), "{limit}");
        let used = |stats: &StoreStats| stats.memory.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let follows = |used: u64| used <= limit && used > limit * 8 / 10;
        let began = Instant::now();
        while !follows(used(&site.stats())) && began.elapsed() < Duration::from_secs(120) {
            client.step(&site);
        }
        let stats = site.stats();
        assert_eq!((stats.memory_limit, site.store.memory_limit()), (limit, limit));
        assert!(follows(used(&stats)), "{limit}: {:?}", stats.memory);
        for cell in &site.store.cells {
            cell.lock().validate().unwrap();
        }
    }
    assert!(client.check_all(&site) > 1_000);
    // What cannot be is refused, and changes nothing.
    for wrong in [1 << 20, 1 << 60] {
        assert!(!site.store.set_memory_limit(wrong));
        assert_eq!(site.store.memory_limit(), 17 << 20);
    }
    site.stop(true);
}

#[test]
fn without_evictions_the_limit_only_rises() {
    let dir = tempfile::tempdir().unwrap();
    let small = config(dir.path().to_owned());
    let config = StoreConfig { flash: None, no_eviction: true, memory: 3 << 20, ..small };
    let clock = Arc::new(larder_runtime::Clock::start());
    let (store, _) = crate::store::open(&config, &clock).unwrap();
    assert!(!store.set_memory_limit(2 << 20));
    assert!(store.set_memory_limit(9 << 20));
    store.shutdown(clock.now());
}

/// Thousands of changes come quicker than memory follows: one that was overtaken is not carried out, or what is resident
/// would go up to the highest of them long after a low one was asked for.
#[test]
fn a_limit_that_was_overtaken_is_not_grown_to() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig { memory: 16 << 20, ..config(dir.path().to_owned()) };
    let (site, _) = open(&config, Arc::new(MemoryDevice::new(6 << 20))).unwrap();
    let arenas = || {
        let bytes = site.store.cells.iter().map(|c| c.lock().unrecorded().config().arena_bytes);
        bytes.collect::<Vec<_>>()
    };
    let before = arenas();
    let mut asked = 0;
    // By the time that a shard's turn comes, the limit is the old one again.
    let newest = || {
        asked += 1;
        if asked == 1 { 128 << 20 } else { 16 << 20 }
    };
    assert_eq!(site.store.divide(&site.clock, newest).ok().flatten(), Some(16 << 20));
    // But for what is lost where objects do not end at the cut.
    let same = |(a, b): (&usize, &usize)| a.abs_diff(*b) <= b / 16;
    assert!(arenas().iter().zip(&before).all(same), "{before:?}, then {:?}", arenas());
    site.stop(true);
}

/// Changes that come quicker than a walk over the shards: none of them is starved by those before it.
#[test]
fn all_shards_give_up_memory_however_often_the_limit_changes() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig { memory: 24 << 20, ..config(dir.path().to_owned()) };
    let (site, _) = open(&config, Arc::new(MemoryDevice::new(6 << 20))).unwrap();
    assert!(site.store.cells.len() > 1, "several shards are what this is about");
    let held = || {
        let bytes = site.store.cells.iter().map(|c| c.lock().unrecorded().object_memory_held());
        bytes.collect::<Vec<_>>()
    };
    assert_eq!(site.store.divide(&site.clock, || 96 << 20).ok().flatten(), Some(96 << 20));
    let most = site.store.plan().resized(18 << 20).unwrap().arena_bytes;
    assert!(held().iter().all(|&bytes| bytes > 2 * most), "{:?}", held());
    // Another limit at every look, 17 or 18 MiB, for as long as every shard needs for its steps; then one that none has to
    // shrink for: who is still large by then was never reached.
    let mut asked = 0u64;
    let looks = 2 * site.store.cells.len() as u64 * (96 / site.store.cells.len() as u64 / 2 + 2);
    let mut reached = Vec::new();
    let newest = || {
        asked += 1;
        match asked {
            n if n <= looks && n.is_multiple_of(2) => 17 << 20,
            n if n <= looks => 18 << 20,
            n if n == looks + 1 => {
                reached = held();
                18 << 20
            }
            _ => 18 << 20,
        }
    };
    assert!(site.store.divide(&site.clock, newest).is_ok());
    assert!(reached.iter().all(|&bytes| bytes <= most), "{reached:?} of {most}");
    site.stop(true);
}
