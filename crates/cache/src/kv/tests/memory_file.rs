//! A memory file over a real store: what ends its writing and its reading.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_runtime::Clock;
use larder_runtime::testing::MemoryDevice;

use super::harness::{Client, Site, config};
use crate::kv::{CacheConfig, CacheError, RecordConfig};

fn kept(dir: &Path) -> CacheConfig {
    CacheConfig { flash: None, memory_file: Some(dir.join("mem")), ..config(dir.join("data")) }
}

/// A store in DRAM alone; what opening had to say.
fn open(config: &CacheConfig) -> Result<(Site, String), CacheError> {
    let clock = Arc::new(Clock::start());
    let (store, opened) = crate::kv::open(config, &clock)?;
    let device = Arc::new(MemoryDevice::new(4096));
    let said = [opened.notes, opened.warnings].concat().join("\n");
    Ok((Site { store, clock, device }, said))
}

#[test]
fn a_stop_that_is_hurried_leaves_dram_cold() {
    let dir = tempfile::tempdir().unwrap();
    let config = kept(dir.path());
    let (site, _) = open(&config).unwrap();
    let mut client = Client::new(1, 200);
    (0..500).for_each(|_| client.step(&site));
    config.hurry.store(true, Ordering::Relaxed);
    site.stop(false);
    config.hurry.store(false, Ordering::Relaxed);
    assert!(!dir.path().join("mem.meta").exists());
    assert_eq!(std::fs::metadata(dir.path().join("mem")).unwrap().len(), 0);
    let (site, said) = open(&config).unwrap();
    assert!(said.contains("DRAM is cold"), "{said}");
    assert_eq!(client.check_all(&site), 0);
    site.stop(false);
}

#[test]
fn a_start_that_is_stopped_leaves_what_it_found() {
    let dir = tempfile::tempdir().unwrap();
    let config = kept(dir.path());
    let (site, _) = open(&config).unwrap();
    let mut client = Client::new(2, 200);
    (0..500).for_each(|_| client.step(&site));
    let there = client.check_all(&site);
    site.stop(false);
    config.hurry.store(true, Ordering::Relaxed);
    assert!(matches!(open(&config), Err(CacheError::Stopped)));
    config.hurry.store(false, Ordering::Relaxed);
    let (site, said) = open(&config).unwrap();
    assert!(said.contains("DRAM is warm"), "{said}");
    assert_eq!(client.check_all(&site), there);
    site.stop(false);
}

/// No replay of it would agree.
#[test]
fn a_record_does_not_begin_with_what_a_memory_file_holds() {
    let dir = tempfile::tempdir().unwrap();
    let config = kept(dir.path());
    let (site, _) = open(&config).unwrap();
    let mut client = Client::new(4, 200);
    (0..500).for_each(|_| client.step(&site));
    let there = client.check_all(&site);
    site.stop(false);
    let record = RecordConfig { file: dir.path().join("run.rec"), limit: 1 << 20 };
    let recorded = CacheConfig { record: Some(record), ..config.clone() };
    let refused = open(&recorded).err().unwrap().to_string();
    assert!(refused.contains("begins with an empty cache"), "{refused}");
    assert!(!dir.path().join("run.rec").exists());
    let (site, _) = open(&config).unwrap();
    assert_eq!(client.check_all(&site), there);
    site.stop(false);
}

/// Many lives, each with random requests: stopped, or dropped as a kill would leave it; the client knows what may be answered.
#[test]
fn no_life_serves_what_an_earlier_one_has_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let config = kept(dir.path());
    let mut client = Client::new(3, 300);
    let (mut warm, mut cold) = (0, 0);
    let mut copy: Option<(Vec<u8>, Vec<u8>)> = None;
    let (file, meta) = (dir.path().join("mem"), dir.path().join("mem.meta"));
    for life in 0..40 {
        let config = match client.rng.below(5) {
            0 => CacheConfig { memory_file: None, ..config.clone() },
            1 => CacheConfig { memory: 3 << 20, ..config.clone() },
            _ => config.clone(),
        };
        let (site, said) = open(&config).unwrap();
        warm += u32::from(said.contains("DRAM is warm"));
        cold += u32::from(said.contains("DRAM is cold"));
        client.check_all(&site);
        (0..300).for_each(|_| client.step(&site));
        if client.rng.chance(0.7) {
            site.stop(false);
        } else {
            // The threads end, and nothing is written.
            config.hurry.store(true, Ordering::Relaxed);
            site.stop(false);
            config.hurry.store(false, Ordering::Relaxed);
        }
        if client.rng.chance(0.3)
            && let Some((file_then, meta_then)) = &copy
        {
            std::fs::write(&file, file_then).unwrap();
            std::fs::write(&meta, meta_then).unwrap();
        } else if meta.exists() && life % 3 == 0 {
            copy = Some((std::fs::read(&file).unwrap(), std::fs::read(&meta).unwrap()));
        }
    }
    assert!(warm > 4 && cold > 4, "{warm} {cold}");
}
