//! Keys listed by a connection over a cache.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test of a cache has its threads and its clock"
)]

use std::collections::BTreeSet;
use std::sync::Arc;

use larder_engine::kv::ClockMode;
use larder_policy::admission::AdmissionConfig;

use larder_cache::kv::CacheConfig;
use larder_kv::connection::{
    Admin, BigBuffers, ConnContext, ConnStats, Connection, Progress, ProtocolConfig, SMALL,
    SideEffects,
};

struct Nobody;

impl Admin for Nobody {
    fn stats(&mut self, _arguments: &[u8], _out: &mut Vec<u8>) {}
}

#[test]
fn every_key_in_dram_is_listed_once_and_memory_stays_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let config = CacheConfig {
        memory: 2 << 20,
        max_item: 64 << 10,
        no_eviction: false,
        clock_max: 3,
        clock_mode: ClockMode::SetMax,
        data_dir: dir.path().to_owned(),
        flash: None,
        flash_size: None,
        further: Vec::new(),
        flash_object_size: 1024,
        format_flash: false,
        admission: AdmissionConfig::from_name("all").unwrap(),
        budget: Default::default(),
        applications: Default::default(),
        memory_file: None,
        record: None,
        capture: None,
        hurry: Default::default(),
    };
    let clock = Arc::new(larder_runtime::Clock::start());
    let (store, _) = larder_cache::kv::open(&config, &clock).unwrap();
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
