//! Keys listed, and expired objects removed, over a real store.

use std::collections::BTreeSet;
use std::sync::Arc;

use larder_base::{AppId, Expiry};
use larder_engine::kv::api::{Effects, FlashRead, Op, Reply, Request, Store as Write, StoreMode};

use crate::connection::{
    Admin, BigBuffers, ConnContext, ConnStats, Connection, Engine, Progress, ProtocolConfig, SMALL,
    SideEffects, Step,
};
use crate::server::Store;
use crate::store::StoreConfig;

struct Nobody;

struct Quiet;

impl Effects for Quiet {
    fn reply(&mut self, _: Reply<'_>) {}
    fn verify(&mut self, _: FlashRead) {}
    fn wake_cleaner(&mut self) {}
}

impl Admin for Nobody {
    fn stats(&mut self, _arguments: &[u8], _out: &mut Vec<u8>) {}
}

#[test]
fn every_key_in_dram_is_listed_once_and_memory_stays_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig { flash: None, ..super::harness::config(dir.path().to_owned()) };
    let clock = Arc::new(larder_runtime::Clock::start());
    let (store, _) = crate::store::open(&config, &clock).unwrap();
    let protocol = ProtocolConfig::default();
    let mut conn = Connection::new(&protocol, Arc::new(BigBuffers::default()));
    let (mut stats, mut reads) = (ConnStats::default(), Vec::new());
    let (mut side, mut admin) = (SideEffects::default(), Nobody);
    let mut run = |input: &[u8]| {
        let (mut got, mut fed, mut most) = (Vec::new(), 0, 0);
        loop {
            fed += conn.feed(&input[fed..], clock.now());
            let mut ctx = ConnContext {
                config: &protocol,
                stats: &mut stats,
                reads: &mut reads,
                side: &mut side,
                admin: &mut admin,
                detail: false,
                app: None,
                watch: None,
            };
            let progress = conn.process(clock.now(), &store, &mut ctx);
            most = most.max(conn.memory());
            got.extend_from_slice(conn.output());
            conn.sent(conn.output().len(), clock.now());
            if progress == Progress::NeedInput && fed == input.len() {
                return (String::from_utf8(got).unwrap(), most);
            }
        }
    };
    let mut sets = Vec::new();
    for i in 0..5_000 {
        sets.extend_from_slice(format!("set key:{i} {i} 0 1 noreply\r\nx\r\n").as_bytes());
    }
    sets.extend_from_slice(b"set gone 0 -1 1 noreply\r\nx\r\n");
    assert_eq!(run(&sets).0, "");
    for kind in ["all", "hash", "1"] {
        let (text, most) = run(format!("lru_crawler metadump {kind}\r\nmn\r\n").as_bytes());
        let lines = text.strip_prefix("OK\r\n").unwrap().strip_suffix("END\r\nMN\r\n").unwrap();
        let keys: BTreeSet<&str> = lines.lines().map(|l| l.split(' ').next().unwrap()).collect();
        assert_eq!((lines.lines().count(), keys.len()), (5_000, 5_000));
        assert!(keys.contains("key=key%3A4999") && !keys.contains("key=gone"));
        assert!(most < 4 * SMALL, "{most} bytes of buffers");
    }
    let (text, _) = run(b"lru_crawler mgdump hash\r\n");
    assert!(text.starts_with("OK\r\nmg key:") && text.ends_with("\r\nEN\r\n"));
    assert_eq!(text.lines().count(), 5_002);
    assert_eq!(run(b"lru_crawler metadump 2\r\n").0, "OK\r\nEND\r\n");
    assert_eq!(run(b"lru_crawler metadump x\r\n").0, "BADCLASS invalid class id\r\n");
    store.shutdown(clock.now());
}

#[test]
fn expired_objects_leave_dram_and_curr_items_by_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let config = StoreConfig { flash: None, ..super::harness::config(dir.path().to_owned()) };
    let clock = Arc::new(larder_runtime::Clock::start());
    let (store, _) = crate::store::open(&config, &clock).unwrap();
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
        assert_eq!(store.execute(now, &request, None, &mut Quiet), Step::Done);
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
