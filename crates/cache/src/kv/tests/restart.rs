//! What outlives a stop beside the objects, and what a refused start leaves behind.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use larder_base::{AppId, ByteSize};
use larder_policy::budget::{BudgetState, WriteBudgetConfig};
use larder_runtime::testing::MemoryDevice;
use larder_runtime::{Clock, DataDir, Device};

use super::harness::{Client, Site, config, open, open_in};
use crate::kv::warm::Region;
use crate::kv::{CacheConfig, CacheError, Warmth, locked};

fn flash_bytes(site: &Site) -> BTreeMap<String, u64> {
    site.stats().applications.into_iter().map(|a| (a.name, a.flash_bytes)).collect()
}

#[test]
fn applications_keep_their_ids_and_their_bytes_on_flash() {
    let dir = tempfile::tempdir().unwrap();
    // One shard: so little memory in several would evict much before it is taken to flash.
    let config = CacheConfig { max_item: 256 << 10, ..config(dir.path().to_owned()) };
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    let mut client = Client::new(5, 1_500);
    client.patient = true;
    let mut ids: Option<Vec<AppId>> = None;
    for round in 0..3 {
        let (site, opened) = open(&config, device.clone()).unwrap();
        let now = ["app0:x", "app1:x", "app2:x"].map(|key| site.store.app(key.as_bytes()));
        // The ids of the first run hold in every later one, though keys come in another order.
        let first = ids.get_or_insert_with(|| now.to_vec());
        assert_eq!(now[..], first[..], "round {round}");
        if round > 0 {
            assert_eq!(opened.warmth, Some(Warmth::Checkpoint));
            let there = client.check_all(&site);
            // How many depends on how fast the cleaner was.
            assert!(there > 0, "{there} of {} kept", opened.kept);
        }
        for _ in 0..6_000 {
            client.step(&site);
        }
        site.store.shutdown(site.clock.now());
        let before = flash_bytes(&site);
        let used = site.stats().flash.unwrap().used_bytes;
        let sum: u64 = before.values().sum();
        assert!(
            before.values().filter(|b| **b > 20_000).count() == 3 && sum <= used + (64 << 10),
            "{before:?}"
        );
        drop(site);
        let (site, _) = open(&config, device.clone()).unwrap();
        assert_eq!(flash_bytes(&site), before);
        site.stop(round == 2);
    }
}

/// A record bears the number of its application, which the next start would give to another one: while the file of names cannot be
/// written nothing comes to flash, from the cleaner or from a stop.
#[test]
fn nothing_comes_to_flash_while_names_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path().to_owned());
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    // No file can take the place of a directory.
    let in_the_way = dir.path().join("applications.json");
    std::fs::create_dir_all(in_the_way.join("x")).unwrap();
    let mut client = Client::new(5, 1_500);
    let (site, _) = open(&config, device.clone()).unwrap();
    (0..3_000).for_each(|_| client.step(&site));
    assert!(client.check_all(&site) > 0);
    site.stop(false);
    std::fs::remove_dir_all(&in_the_way).unwrap();
    let (site, opened) = open(&config, device).unwrap();
    assert_eq!((opened.kept, flash_bytes(&site).values().sum::<u64>()), (0, 0));
    client.check_all(&site);
    site.stop(true);
}

/// Six bytes a second: as good as none, but for the first fill, which is lent once.
fn poor(dir: &std::path::Path) -> CacheConfig {
    let budget = WriteBudgetConfig { tbw: Some(ByteSize(1_000_000_000)), ..Default::default() };
    CacheConfig { budget, ..config(dir.to_owned()) }
}

/// A process that is killed leaves the file of the write budget as it is at that moment.
#[test]
fn a_kill_earns_no_write_budget() {
    let dir = tempfile::tempdir().unwrap();
    let (config, file) = (poor(dir.path()), dir.path().join("budget.json"));
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    let mut client = Client::new(6, 1_500);
    let mut written = 0;
    for round in 0..4 {
        let (site, _) = open(&config, device.clone()).unwrap();
        for _ in 0..8_000 {
            client.step(&site);
        }
        let flash = site.stats().flash.unwrap();
        written += flash.bytes_written;
        assert!(round > 0 || flash.bytes_written > 256 << 10, "{}", flash.bytes_written);
        let at_the_kill = std::fs::read(&file).expect("it is there before anything is written");
        let state: BudgetState = serde_json::from_slice(&at_the_kill).unwrap();
        assert!(state.spent >= written, "{written} bytes, and the file says {state:?}");
        site.stop(round == 3);
        std::fs::write(&file, at_the_kill).unwrap();
    }
    // (The padding of segments is written whether there is budget for it or not.)
    assert!(written <= (4 << 20) + (256 << 10), "{written} bytes in four runs");
}

/// What an earlier version wrote down knows of nothing that is owed.
#[test]
fn a_budget_file_without_what_is_owed_is_read() {
    let text = r#"{"saved":1,"loan":2,"debt":3,"spent":4}"#;
    let state: BudgetState = serde_json::from_str(text).unwrap();
    assert_eq!(state, BudgetState { saved: 1, loan: 2, debt: 3, spent: 4, owed: 0 });
}

/// Everything that a stop writes counts: the padding of segments that are not full, and the checkpoint.
#[test]
fn clean_stops_count_against_the_write_budget() {
    let dir = tempfile::tempdir().unwrap();
    let config = poor(dir.path());
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    let mut client = Client::new(7, 1_500);
    let mut written = 0;
    for round in 0..12 {
        let (site, _) = open(&config, device.clone()).unwrap();
        for _ in 0..3_000 {
            client.step(&site);
        }
        site.store.shutdown(site.clock.now());
        written += site.stats().flash.unwrap().bytes_written;
        written += std::fs::metadata(dir.path().join("checkpoint")).unwrap().len();
        let state: BudgetState =
            serde_json::from_slice(&std::fs::read(dir.path().join("budget.json")).unwrap())
                .unwrap();
        assert_eq!(state.spent, written, "after {round} stops");
        if round == 11 {
            site.stop(true);
            assert!(written > 1 << 20 && state.loan <= (4 << 20) - written, "{written} {state:?}");
        }
    }
}

/// A stop during the start ends it, and what was warm stays warm; a stop that is hurried ends with what is there.
#[test]
fn a_hurried_start_and_a_hurried_stop_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path().to_owned());
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    let mut client = Client::new(8, 1_500);
    let (site, _) = open(&config, device.clone()).unwrap();
    for _ in 0..6_000 {
        client.step(&site);
    }
    site.stop(false);
    let size = std::fs::metadata(dir.path().join("checkpoint")).unwrap().len();
    config.hurry.store(true, Ordering::Relaxed);
    let refused = open(&config, device.clone()).err().unwrap();
    assert!(matches!(refused, CacheError::Stopped), "{refused}");
    config.hurry.store(false, Ordering::Relaxed);
    let (site, opened) = open(&config, device.clone()).unwrap();
    assert_eq!(opened.warmth, Some(Warmth::Checkpoint));
    assert!(client.check_all(&site) > 100 && size > 0);

    config.hurry.store(true, Ordering::Relaxed);
    site.stop(false);
    assert!(!dir.path().join("checkpoint").exists());
    config.hurry.store(false, Ordering::Relaxed);
    let (site, opened) = open(&config, device).unwrap();
    assert_eq!(opened.warmth, Some(Warmth::Memory));
    assert!(client.check_all(&site) > 100);
    site.stop(true);
}

/// An index that has grown is gone on with as it is: after a kill, in the middle of a step or not, and after a stop, by its checkpoint.
#[test]
fn a_grown_index_outlives_the_process() {
    let dir = tempfile::tempdir().unwrap();
    let config = CacheConfig { flash_object_size: 4096, ..config(dir.path().to_owned()) };
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    let mut client = Client::new(10, 80_000);
    (client.small, client.patient) = (true, true);
    let buckets = |site: &Site| -> Vec<u32> {
        let node = &site.store.node;
        (0..node.shards()).map(|i| node.lock(i).index().buckets()).collect()
    };
    let memory = |site: &Site| -> u64 {
        let shared = |name| ["objects", "flash_index"].contains(&name);
        site.stats().memory.iter().filter(|(name, _)| shared(*name)).map(|(_, bytes)| bytes).sum()
    };
    let (site, _) = open(&config, device.clone()).unwrap();
    let (base, before) = (buckets(&site), memory(&site));
    for round in 0..40 {
        (0..20_000).for_each(|_| client.step(&site));
        // In the middle, where it has a long way to go.
        if round >= 2 && site.stats().index_grown > 6 * base.len() as u64 {
            break;
        }
    }
    let (grown, kept) =
        (buckets(&site), site.store.node.totals(site.clock.now().mono).flash_objects);
    assert!(grown.iter().sum::<u32>() > base.iter().sum::<u32>() * 5 / 4, "{base:?} {grown:?}");
    assert!(memory(&site) <= before + (4 << 10), "{before} bytes, {}", memory(&site));
    // Without a checkpoint: the index is in memory alone.
    config.hurry.store(true, Ordering::Relaxed);
    site.stop(false);
    config.hurry.store(false, Ordering::Relaxed);
    let (site, opened) = open(&config, device.clone()).unwrap();
    assert_eq!(opened.warmth, Some(Warmth::Memory));
    assert_eq!(site.stats().index_grown, 0);
    assert!(opened.kept > kept * 9 / 10, "{} of {kept}", opened.kept);
    assert!(buckets(&site).iter().zip(&grown).all(|(is, was)| is >= was));
    assert!(memory(&site) <= before + (4 << 10), "{before} bytes, {}", memory(&site));
    let there = client.check_all(&site);
    assert!(there >= opened.kept * 9 / 10, "{there} of {}", opened.kept);
    (0..20_000).for_each(|_| client.step(&site));
    let grown = buckets(&site);
    site.stop(false);
    let (site, opened) = open(&config, device).unwrap();
    assert_eq!(opened.warmth, Some(Warmth::Checkpoint));
    assert!(buckets(&site).iter().zip(&grown).all(|(is, was)| is >= was));
    let there = client.check_all(&site);
    assert!(there >= opened.kept * 9 / 10, "{there} of {}", opened.kept);
    site.store.node.validate().unwrap();
    site.stop(true);
}

#[test]
fn a_start_with_another_flash_that_is_refused_leaves_the_index_of_the_one_before() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path().to_owned());
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    let mut client = Client::new(9, 1_500);
    let (site, _) = open(&config, device.clone()).unwrap();
    for _ in 0..6_000 {
        client.step(&site);
    }
    // Without a checkpoint: the index is in memory alone.
    config.hurry.store(true, Ordering::Relaxed);
    site.stop(false);
    let refused = open(&config, Arc::new(MemoryDevice::new(4 << 20))).err().unwrap();
    assert!(matches!(refused, CacheError::Stopped), "{refused}");
    config.hurry.store(false, Ordering::Relaxed);
    let (site, opened) = open(&config, device).unwrap();
    assert_eq!(opened.warmth, Some(Warmth::Memory));
    assert!(client.check_all(&site) > 100);
    site.stop(true);
}

/// A checkpoint holds what is used, not what there is room for.
#[test]
fn an_empty_cache_has_a_small_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let config =
        CacheConfig { flash_object_size: 64, memory: 32 << 20, ..config(dir.path().to_owned()) };
    let (site, _) = open(&config, Arc::new(MemoryDevice::new(64 << 20))).unwrap();
    let room = site.store.plan().region_words as u64 * 8;
    site.stop(true);
    let bytes = std::fs::metadata(dir.path().join("checkpoint")).unwrap().len();
    assert!(room > 2 << 20 && bytes < 8 << 10, "{bytes} bytes of {room}");
}

#[test]
fn a_refused_start_leaves_nothing_behind() {
    let top = tempfile::tempdir().unwrap();
    let data = top.path().join("a/b");
    let clock = Arc::new(Clock::start());
    let refused = |config: CacheConfig| crate::kv::open(&config, &clock).err().unwrap();
    // Sizes that cannot work, with a flash file that would have been made.
    let impossible = CacheConfig {
        memory: 2 << 20,
        flash: Some(data.join("flash")),
        flash_size: Some(1 << 30),
        flash_object_size: 64,
        ..config(data.clone())
    };
    let e = refused(impossible);
    assert!(matches!(e, CacheError::Plan(_)), "{e}");
    assert!(!top.path().join("a").exists());
    // Somebody's file.
    let file = top.path().join("archive.gz");
    let bytes = [&[0x1f, 0x8b, 8, 0][..], &vec![7; 32 << 20]].concat();
    std::fs::write(&file, &bytes).unwrap();
    let e = refused(CacheConfig { flash: Some(file.clone()), ..config(data.clone()) });
    assert!(matches!(e, CacheError::Foreign { .. }), "{e}");
    assert!(!top.path().join("a").exists() && std::fs::read(&file).unwrap() == bytes);
    // A file that is too small says how large it is and how large it must be.
    std::fs::write(&file, vec![0; 5000]).unwrap();
    let e = refused(CacheConfig { flash: Some(file.clone()), ..config(data.clone()) }).to_string();
    assert!(e.contains("archive.gz") && e.contains("5000 bytes") && e.contains("at least"), "{e}");
    // What was there before stays.
    std::fs::create_dir(top.path().join("a")).unwrap();
    std::fs::write(top.path().join("a/mine"), b"x").unwrap();
    drop(refused(CacheConfig { flash: Some(file), ..config(data) }));
    assert_eq!(std::fs::read_dir(top.path().join("a")).unwrap().count(), 1);
}

/// Changes a number in what the last run wrote down, in the same file.
fn rewrite(dir: &std::path::Path, change: impl FnOnce(&mut serde_json::Value)) {
    let path = dir.join("run.json");
    let mut said = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut said);
    std::fs::write(&path, said.to_string()).unwrap();
}

/// Where files do not say when they were made, one of a directory that was put back may have the number of another: only the
/// memory, which is not copied with it, is believed.
#[test]
fn without_times_of_making_no_checkpoint_is_written_or_believed() {
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path().to_owned());
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    let mut client = Client::new(9, 1_500);
    client.patient = true;
    let unborn = || {
        let dir = DataDir::open(dir.path(), 1).unwrap().without_births();
        open_in(&config, device.clone(), dir).unwrap()
    };
    let checkpoint = dir.path().join("checkpoint");
    let (site, opened) = unborn();
    let warned = opened.warnings.join(" ");
    assert!(warned.contains("when a file was made") && warned.contains("cold"), "{warned}");
    for _ in 0..6_000 {
        client.step(&site);
    }
    site.stop(false);
    assert!(!checkpoint.exists());
    let (site, opened) = unborn();
    assert_eq!(opened.warmth, Some(Warmth::Memory));
    assert!(client.check_all(&site) > 100);
    let uuid = locked(&site.store.flash().unwrap().drives[0].superblock).current().uuid.to_string();
    site.stop(false);
    Region::forget(&uuid);
    let (site, opened) = unborn();
    assert!(matches!(opened.warmth, Some(Warmth::Cold(_))), "{:?}", opened.warmth);
    site.stop(false);
    Region::forget(&uuid);

    // One that an earlier version has written.
    let (site, _) = open(&config, device.clone()).unwrap();
    site.stop(false);
    assert!(checkpoint.exists());
    rewrite(dir.path(), |run| run["born"] = 0.into());
    let (site, opened) = unborn();
    let Some(Warmth::Cold(why)) = opened.warmth else { panic!("{:?}", opened.warmth) };
    assert!(why.contains("no checkpoint is believed"), "{why}");
    site.stop(false);
    Region::forget(&uuid);
}

/// An earlier version would have divided the memory otherwise for the same settings: the cache stays as it is, and nobody is told
/// at each start what he can do nothing about.
#[test]
fn a_cache_that_another_version_has_divided_opens_warm_and_quietly() {
    // So large that an index for it is smaller than any for the objects that are there.
    const OTHER: u32 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let config = config(dir.path().to_owned());
    let now = CacheConfig { flash_object_size: OTHER, ..config.clone() };
    let device: Arc<dyn Device> = Arc::new(MemoryDevice::new(4 << 20));
    let mut client = Client::new(10, 1_500);
    let (site, _) = open(&config, device.clone()).unwrap();
    for _ in 0..6_000 {
        client.step(&site);
    }
    let plan = *site.store.plan();
    site.stop(false);
    for round in 0..3 {
        let (site, opened) = open(&now, device.clone()).unwrap();
        assert_eq!(opened.warmth, Some(Warmth::Checkpoint));
        let (found, kept) = (site.store.plan(), client.check_all(&site));
        assert!(kept > 100, "{round}: {kept}");
        assert_eq!((found.shards, found.buckets), (plan.shards, plan.buckets));
        // First it is the settings that are others.
        let said = opened.notes.join(" ");
        assert_eq!(said.contains("stays as it was divided"), round == 0, "{said}");
        assert!(opened.warnings.is_empty(), "{:?}", opened.warnings);
        site.stop(round == 2);
        rewrite(dir.path(), |run| run["flash"]["object_size"] = OTHER.into());
    }
}
