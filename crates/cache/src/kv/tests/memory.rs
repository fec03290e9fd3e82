//! `cache_memlimit` on a store under load.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_runtime::testing::MemoryDevice;

use super::harness::{Client, config, open};
use crate::kv::CacheConfig;
use crate::kv::CacheStats;

#[test]
fn the_limit_changes_under_load_and_memory_follows() {
    let dir = tempfile::tempdir().unwrap();
    let config = CacheConfig { memory: 16 << 20, ..config(dir.path().to_owned()) };
    let (site, _) = open(&config, Arc::new(MemoryDevice::new(6 << 20))).unwrap();
    let mut client = Client::new(3, 30_000);
    for round in 0..9 {
        for _ in 0..4_000 {
            client.step(&site);
        }
        let limit = [24u64 << 20, 10 << 20, 17 << 20][round % 3];
        assert!(site.store.set_memory_limit(limit), "{limit}");
        let used = |stats: &CacheStats| stats.memory.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let follows = |used: u64| used <= limit && used > limit * 8 / 10;
        let began = Instant::now();
        while !follows(used(&site.stats())) && began.elapsed() < Duration::from_secs(120) {
            client.step(&site);
        }
        let stats = site.stats();
        assert_eq!((stats.memory_limit, site.store.memory_limit()), (limit, limit));
        assert!(follows(used(&stats)), "{limit}: {:?}", stats.memory);
        site.store.node.validate().unwrap();
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
    let config = CacheConfig { flash: None, no_eviction: true, memory: 3 << 20, ..small };
    let clock = Arc::new(larder_runtime::Clock::start());
    let (store, _) = crate::kv::open(&config, &clock).unwrap();
    assert!(!store.set_memory_limit(2 << 20));
    assert!(store.set_memory_limit(9 << 20));
    store.shutdown(clock.now());
}
