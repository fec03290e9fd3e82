//! `cache_memlimit` on a store under load.

use std::sync::Arc;

use larder_runtime::testing::MemoryDevice;

use super::harness::{Client, config, open};
use crate::server::Store;
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
        assert!(site.store.set_memory_limit(site.clock.now(), limit), "{limit}");
        let stats = site.stats();
        assert_eq!((stats.memory_limit, site.store.memory_limit()), (limit, limit));
        let used: u64 = stats.memory.iter().map(|(_, bytes)| bytes).sum();
        assert!(used <= limit && used > limit * 8 / 10, "{used} of {limit}: {:?}", stats.memory);
        for cell in &site.store.cells {
            cell.lock().validate().unwrap();
        }
    }
    assert!(client.check_all(&site) > 1_000);
    // What cannot be is refused, and changes nothing.
    for wrong in [1 << 20, 1 << 60] {
        assert!(!site.store.set_memory_limit(site.clock.now(), wrong));
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
    assert!(!store.set_memory_limit(clock.now(), 2 << 20));
    assert!(store.set_memory_limit(clock.now(), 9 << 20));
    store.shutdown(clock.now());
}
