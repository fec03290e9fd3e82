//! Expired objects are removed though nobody asks for them.

use std::sync::Arc;

use larder_base::{AppId, Expiry};
use larder_engine::kv::api::{
    Effects, FlashRead, Op, Outcome, Reply, Request, Store as Write, StoreMode,
};

use crate::kv::CacheConfig;

struct Quiet;

impl Effects for Quiet {
    fn reply(&mut self, _: Reply<'_>) {}
    fn verify(&mut self, _: FlashRead) {}
    fn wake_cleaner(&mut self) {}
}

#[test]
fn expired_objects_leave_dram_and_curr_items_by_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let config = CacheConfig { flash: None, ..super::harness::config(dir.path().to_owned()) };
    let clock = Arc::new(larder_runtime::Clock::start());
    let (store, _) = crate::kv::open(&config, &clock).unwrap();
    let put = |key: &[u8], seconds: u32| {
        let now = clock.now();
        let expiry = match seconds {
            0 => Expiry::NEVER,
            n => Expiry(now.wall.0 + n),
        };
        let value = b"v";
        let write = Write {
            mode: StoreMode::Set,
            value,
            flags: 0,
            expiry,
            compare_cas: None,
            new_cas: None,
            invalidate: false,
            vivify: None,
        };
        let (hash, app) = (store.hash(key), AppId::DEFAULT);
        let request = Request { key, hash, app, op: Op::Store(write) };
        assert_eq!(store.execute(now, &request, None, &mut Quiet), Outcome::Done);
    };
    let items = || store.stats(clock.now()).items;
    let until = |what: &str, want: u64| {
        for _ in 0..6_000 {
            if items() == want {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("{what}: {} objects, and not {want}", items());
    };
    (0..100u32).for_each(|i| put(format!("stays{i}").as_bytes(), 0));
    (0..100u32).for_each(|i| put(format!("goes{i}").as_bytes(), 1));
    until("in the background", 100);
    assert_eq!(store.stats(clock.now()).crawler_reclaimed, 100);
    // Turned off they stay; a pass that is asked for then is refused, and takes them when it is on again.
    store.set_crawler(false);
    (0..100u32).for_each(|i| put(format!("goes{i}").as_bytes(), 1));
    clock.debug_advance(10);
    assert!(!store.crawl() && items() == 200);
    store.set_crawler(true);
    assert!(store.crawl());
    until("by a pass", 100);
    store.shutdown(clock.now());
}
