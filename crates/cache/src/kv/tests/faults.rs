//! The whole store on a device that fails, at every number of operation: no panic, no wrong value, and what the operator
//! is told.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::Rng;
use larder_format::PAGE_SIZE;
use larder_format::superblock::choose;
use larder_runtime::testing::{Fault, FaultyDevice, MemoryDevice};
use larder_runtime::{Device, IoOp};

use super::harness::{Client, Site, config, open};
use crate::kv::CacheConfig;

const FLASH: usize = 4 << 20;
const KEYS: u64 = 1_500;
const STEPS: u32 = 3_000;

fn device(seed: u64) -> Arc<FaultyDevice> {
    Arc::new(FaultyDevice::new(Arc::new(MemoryDevice::new(FLASH)), seed))
}

/// Load with whatever is armed; then the device is sound again and the store is opened anew. How many operations failed.
fn scenario(seed: u64, arm: impl Fn(&FaultyDevice)) -> u64 {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path().to_owned());
    let faulty = device(seed);
    let as_device: Arc<dyn Device> = faulty.clone();
    arm(&faulty);
    let mut client = Client::new(seed, KEYS);
    match open(&config, as_device.clone()) {
        Ok((site, _)) => {
            for _ in 0..STEPS {
                client.step(&site);
            }
            client.check_all(&site);
            site.stop(false);
        }
        // A start may be refused, in words; a second one with a sound device must not be.
        Err(e) => assert!(e.to_string().len() > 20, "{e}"),
    }
    let fired = faulty.fired();
    faulty.heal();
    let again = match open(&config, as_device.clone()) {
        Err(e) if e.to_string().contains("--format-flash") => {
            // The fault hit in the middle of formatting: nothing had been stored yet.
            assert_eq!(client.hits, 0, "{e}");
            open(&super::super::CacheConfig { format_flash: true, ..config }, as_device)
        }
        other => other,
    };
    let (site, _) = again.unwrap_or_else(|e| panic!("seed {seed}: not opened again: {e}"));
    client.check_all(&site);
    for _ in 0..500 {
        client.step(&site);
    }
    site.stop(true);
    fired
}

#[test]
fn a_failure_at_every_operation_number() {
    let mut met = 0;
    // Opening takes about ten operations, a run of this load some thousand, most of them reads of single objects: the
    // first one by one, then ever fewer.
    let mut nth = 0;
    while nth < 300 {
        met += u64::from(scenario(nth, |d| d.arm(Fault::nth(nth))) > 0);
        nth += 1 + nth / 12;
    }
    assert!(met > 20, "hardly any fault was met: {met}");
}

#[test]
fn every_write_and_every_sync_fails_once() {
    for op in [IoOp::Write, IoOp::Sync] {
        for nth in 0..12 {
            let errno = [Fault::EIO, Fault::ENOSPC][nth as usize % 2];
            scenario(1000 + nth, |d| d.arm(Fault { op: Some(op), nth, times: 1, errno }));
        }
    }
}

#[test]
fn a_device_that_dies_and_one_that_fills_up() {
    for nth in [0, 2, 5, 13, 100] {
        scenario(2000 + nth, |d| d.arm(Fault::dead_from(nth)));
        scenario(3000 + nth, |d| d.arm(Fault::from(IoOp::Write, nth, Fault::ENOSPC)));
        scenario(4000 + nth, |d| d.arm(Fault::from(IoOp::Read, nth, Fault::EIO)));
    }
}

#[test]
fn a_slow_device_holds_up_the_cleaner_and_not_the_requests() {
    let dir = tempfile::tempdir().unwrap();
    let slow = device(7);
    let (site, _) = open(&config(dir.path().to_owned()), slow.clone()).unwrap();
    // So long that nothing else on a busy machine is taken for it.
    const WRITE: Duration = Duration::from_secs(2);
    slow.delay(IoOp::Write, WRITE);
    let enough = slow.count(IoOp::Write) + 5;
    let mut client = Client::new(7, KEYS);
    client.paced = false;
    let (mut longest, start) = (Duration::ZERO, Instant::now());
    while slow.count(IoOp::Write) < enough && start.elapsed() < Duration::from_secs(120) {
        let began = Instant::now();
        client.step(&site);
        longest = longest.max(began.elapsed());
    }
    assert!(slow.count(IoOp::Write) >= enough, "the cleaner wrote");
    assert!(longest < WRITE * 9 / 10, "a request waited {longest:?} for a write");
    slow.heal();
    client.check_all(&site);
    site.stop(true);
}

/// Waits for what other threads bring about.
fn eventually(what: &str, client: &mut Client, site: &Site, holds: impl Fn(&Site) -> bool) {
    let start = Instant::now();
    while !holds(site) {
        assert!(start.elapsed() < Duration::from_secs(120), "not in two minutes: {what}");
        for _ in 0..200 {
            client.step(site);
        }
    }
}

#[test]
fn flash_out_of_use_shows_in_the_statistics_and_so_does_its_return() {
    let dir = tempfile::tempdir().unwrap();
    let faulty = device(9);
    let (site, _) = open(&config(dir.path().to_owned()), faulty.clone()).unwrap();
    let mut client = Client::new(9, KEYS);
    let degraded = |site: &Site| site.stats().flash.unwrap().degraded.is_some();
    eventually("something is on flash", &mut client, &site, |s| {
        s.stats().flash.unwrap().segments_written > 2
    });
    assert!(!degraded(&site) && site.stats().alarms.is_empty());
    faulty.arm(Fault::from(IoOp::Write, 0, Fault::ENOSPC));
    eventually("writes fail", &mut client, &site, degraded);
    let stats = site.stats();
    assert!(stats.flash.as_ref().unwrap().write_errors > 0);
    assert!(stats.alarms.iter().any(|a| a.contains("writes fail")), "{:?}", stats.alarms);
    // Served all the same, from both tiers.
    let (hits, from_flash) = (client.hits, client.from_flash);
    for _ in 0..2_000 {
        client.step(&site);
    }
    assert!(client.hits > hits && client.from_flash > from_flash);
    faulty.heal();
    eventually("flash is in use again", &mut client, &site, |s| !degraded(s));
    client.check_all(&site);
    site.stop(true);
}

#[test]
fn where_objects_are_smaller_than_was_said_the_index_grows() {
    let dir = tempfile::tempdir().unwrap();
    let config = CacheConfig { flash_object_size: 1 << 20, ..config(dir.path().to_owned()) };
    let (site, _) = open(&config, Arc::new(MemoryDevice::new(FLASH))).unwrap();
    let mut client = Client::new(11, KEYS);
    eventually("the index has grown", &mut client, &site, |s| s.stats().index_grown > 0);
    assert!(site.stats().alarms.is_empty());
    client.check_all(&site);
    site.store.node.validate().unwrap();
    site.stop(true);
}

/// What a killed run has left may not be durable, and one superblock is always whole.
#[test]
fn a_superblock_is_durable_before_its_other_copy_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path().to_owned());
    let memory = Arc::new(MemoryDevice::new(FLASH));
    for syncs in [[0, 0], [1, 0], [0, 1], [1, 1]] {
        let (site, _) = open(&config, memory.clone()).unwrap();
        site.stop(true);
        // Two starts that end in the middle, one after the other.
        for nth in syncs {
            let faulty = Arc::new(FaultyDevice::new(memory.clone(), 1));
            faulty.arm(Fault::from(IoOp::Sync, nth, Fault::EIO));
            if let Ok((site, _)) = open(&config, faulty.clone()) {
                site.stop(true);
            }
            assert!(faulty.fired() > 0, "{syncs:?}");
        }
        // The power goes: of each copy as much has landed as chance has it, whatever a sector is.
        let (live, durable) = (memory.live(), memory.durable());
        let mut rng = Rng::new(7);
        for _ in 0..200 {
            let copies = [0, PAGE_SIZE].map(|at| {
                let landed = rng.below(512) as usize;
                let mut page = durable[at..at + PAGE_SIZE].to_vec();
                page[..landed].copy_from_slice(&live[at..at + landed]);
                page
            });
            let chosen = choose(&copies[0], &copies[1]);
            assert!(chosen.is_ok(), "{syncs:?}: {:?}", chosen.err());
        }
    }
}
