//! What the store tells of what leaves it.

use std::sync::{Arc, Mutex};

use larder_base::Expiry;
use larder_engine::kv::api::{Op, Outcome, Request, Store as Write, StoreMode};

use super::harness::config;
use crate::kv::{CacheConfig, Core};

/// Takes no answer.
struct Nobody;

impl larder_engine::kv::api::Effects for Nobody {
    fn reply(&mut self, _: larder_engine::kv::api::Reply<'_>) {}
    fn verify(&mut self, _: larder_engine::kv::api::FlashRead) {}
    fn wake_cleaner(&mut self) {}
}

fn set(store: &Core, clock: &larder_runtime::Clock, key: &str, value: &[u8]) {
    let write = Write {
        mode: StoreMode::Set,
        value,
        flags: 0,
        expiry: Expiry::NEVER,
        compare_cas: None,
        new_cas: None,
        invalidate: false,
        vivify: None,
    };
    let key = key.as_bytes();
    let (hash, app) = (store.hash(key), store.app(key));
    let request = Request { key, hash, app, op: Op::Store(write) };
    assert!(matches!(store.execute(clock.now(), &request, None, &mut Nobody), Outcome::Done));
}

fn dram_alone(dir: &std::path::Path) -> (Arc<Core>, Arc<larder_runtime::Clock>) {
    let small = config(dir.to_owned());
    let config = CacheConfig { flash: None, ..small };
    let clock = Arc::new(larder_runtime::Clock::start());
    (crate::kv::open(&config, &clock).unwrap().0, clock)
}

#[test]
fn evictions_are_told_while_somebody_watches_and_not_noted_else() {
    let dir = tempfile::tempdir().unwrap();
    let (store, clock) = dram_alone(dir.path());
    let told = Arc::new(Mutex::new((Vec::new(), 0)));
    let to = told.clone();
    store.on_evictions(Box::new(move |_, evicted, lost| {
        let mut told = to.lock().unwrap();
        told.0.extend_from_slice(evicted);
        told.1 += lost;
    }));
    let fill = |from: usize| {
        for i in from..from + 3_000 {
            set(&store, &clock, &format!("key {i}"), &[b'v'; 1000]);
        }
    };
    fill(0);
    assert!(store.stats(clock.now()).evictions > 0);
    assert!(told.lock().unwrap().0.is_empty(), "nobody watches");
    store.watch_evictions(true);
    let before = store.stats(clock.now()).evictions;
    fill(3_000);
    let new = store.stats(clock.now()).evictions - before;
    // The rest is with the cleaner, or comes with the next request of each shard.
    let enough = || {
        let told = told.lock().unwrap();
        told.0.len() as u64 + told.1 >= new
    };
    let start = std::time::Instant::now();
    while !enough() && start.elapsed().as_secs() < 60 {
        for shard in 0..store.node.shards() {
            let (evicted, lost) = store.node.take_evicted(shard);
            store.tell(clock.now(), &evicted, lost);
        }
    }
    let (evicted, lost) = std::mem::take(&mut *told.lock().unwrap());
    assert!(evicted.len() as u64 + lost >= new && new > 0, "{} of {new}", evicted.len());
    let first = &evicted[0];
    assert!(first.key.starts_with(b"key ") && first.size == 1000 && !first.fetched, "{first:?}");
    store.watch_evictions(false);
    fill(6_000);
    assert!(told.lock().unwrap().0.is_empty());
    let noted = |shard| store.node.take_evicted(shard).0.len();
    assert!((0..store.node.shards()).all(|shard| noted(shard) == 0));
    store.shutdown(clock.now());
}

/// memcached's `t/issue_183.t`.
#[test]
fn an_object_that_a_flush_took_counts_as_reclaimed_when_it_is_stored_again() {
    let dir = tempfile::tempdir().unwrap();
    let (store, clock) = dram_alone(dir.path());
    set(&store, &clock, "key", b"1");
    assert!(store.flush_all(clock.now(), clock.now().wall));
    assert_eq!(store.stats(clock.now()).reclaimed, 0);
    for _ in 0..2 {
        set(&store, &clock, "key", b"1");
        assert_eq!(store.stats(clock.now()).reclaimed, 1);
    }
    store.shutdown(clock.now());
}
