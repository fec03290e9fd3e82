//! What is left of volumes that write back: by a clean stop, by a start that is refused, by a cache that returns when its data count no more.

use std::path::Path;

use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState, choose};

use super::*;
use crate::block::back::{BackConfig, Cuts, Grain, Order, Pace, RecoverWish, recover};
use crate::block::{Builder, Cache};

fn builder(dir: &Path, names: &[&str], order: Option<Order>) -> Builder {
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let mut builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(1);
    for name in names {
        let path = dir.join(name);
        if !path.exists() {
            File::create(&path).unwrap().set_len(4 << 20).unwrap();
        }
        builder = builder.volume(name, &format!("file:{}", path.display())).unwrap();
        if let Some(order) = order {
            let back = BackConfig { order, pace: Pace::AtBound, ..BackConfig::default() };
            builder = builder.write_back(name, back);
        }
    }
    builder
}

const ORDERED: Order = Order::Ordered(Grain::Flush);

fn marker(dir: &Path) -> Marker {
    let bytes = std::fs::read(dir.join("disk.larder")).unwrap();
    choose(&bytes[..4096], &bytes[4096..8192]).unwrap().marker
}

fn recovered(dir: &Path) {
    let uri: Uri = format!("file:{}", dir.join("disk").display()).parse().unwrap();
    let store = backing::open_with(&uri, &OpenOptions::default()).unwrap();
    assert!(recover(&*store, &RecoverWish::default()).unwrap().recovered);
}

fn dirty_at_stop(dir: &Path) {
    let cache = builder(dir, &["disk"], Some(ORDERED)).open().unwrap();
    cache.volume("disk").unwrap().write(0, [1; 4096]).wait().unwrap();
}

#[test]
fn a_volume_of_which_nothing_is_dirty_is_left_clean_by_a_stop() {
    for order in [ORDERED, Order::Any, Order::Journaled(Cuts::Flushes)] {
        let dir = TempDir::new().unwrap();
        for written in [false, true] {
            for threads in [0, 1] {
                let builder = builder(dir.path(), &["disk"], Some(order)).threads(threads);
                let cache = builder.open().unwrap();
                assert_eq!(marker(dir.path()).state, MarkerState::Dirty);
                if written && threads > 0 {
                    let disk = cache.volume("disk").unwrap();
                    disk.write(0, [7; 4096]).wait().unwrap();
                    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
                }
                drop(cache);
                let marker = marker(dir.path());
                assert_eq!(marker.state, MarkerState::Clean, "{order:?} {written} {threads}");
            }
        }
        // It may be written through, and what it holds is in its store.
        let cache = builder(dir.path(), &["disk"], None).open().unwrap();
        let read = cache.volume("disk").unwrap().read(0, 4096).wait().unwrap();
        assert!(read.iter().all(|&b| b == 7));
    }
}

#[test]
fn a_stop_leaves_what_is_dirty() {
    let dir = TempDir::new().unwrap();
    dirty_at_stop(dir.path());
    assert_eq!(marker(dir.path()).state, MarkerState::Dirty);
    let why = builder(dir.path(), &["disk"], None).open().unwrap_err().to_string();
    assert!(why.contains("this cache may hold writes of it"), "{why}");
}

#[test]
fn a_cache_whose_data_count_no_more_is_used_written_back_or_through() {
    for order in [None, Some(ORDERED)] {
        let dir = TempDir::new().unwrap();
        dirty_at_stop(dir.path());
        recovered(dir.path());
        for _ in 0..2 {
            let cache = builder(dir.path(), &["disk"], order).open().unwrap();
            let disk = cache.volume("disk").unwrap();
            assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == 0), "{order:?}");
            assert_eq!(cache.core().back_status("disk").map_or(0, |now| now.status.dirty), 0);
        }
        let found =
            crate::block::inspect::inspect(&dir.path().join("cache"), &mut |_, _| true).unwrap();
        let dirty =
            found.dirty_data.as_ref().map_or(0, |d| d.volumes.iter().map(|v| v.bytes).sum());
        assert_eq!((found.faulty(), dirty), (0, 0));
    }
}

#[test]
fn of_a_cache_that_is_an_older_copy_it_is_first_asked_whether_there_is_a_newer_one() {
    let dir = TempDir::new().unwrap();
    dirty_at_stop(dir.path());
    let old = std::fs::read(dir.path().join("cache")).unwrap();
    for _ in 0..2 {
        let cache = builder(dir.path(), &["disk"], Some(ORDERED)).open().unwrap();
        cache.volume("disk").unwrap().write(4096, [2; 4096]).wait().unwrap();
    }
    std::fs::write(dir.path().join("cache"), old).unwrap();
    let why = builder(dir.path(), &["disk"], Some(ORDERED)).open().unwrap_err().to_string();
    let (asked, last) = (why.find("Is there a newer copy"), why.find("recovered as one"));
    assert!(asked.is_some() && asked < last, "{why}");
}

#[test]
fn a_start_that_is_refused_changes_nothing() {
    let dir = TempDir::new().unwrap();
    drop(builder(dir.path(), &["disk"], Some(ORDERED)).open().unwrap());
    // Another cache may hold what the second lacks.
    let away = TempDir::new().unwrap();
    dirty_at_stop(away.path());
    for name in ["disk", "disk.larder"] {
        let to = dir.path().join(name.replace("disk", "other"));
        std::fs::copy(away.path().join(name), to).unwrap();
    }
    let mut marker = marker(away.path());
    (marker.cache, marker.number) = (Uuid([9; 16]), marker.number + 1);
    std::fs::write(dir.path().join("other.larder"), [marker.encode(), marker.encode()].concat())
        .unwrap();
    let before = std::fs::read(dir.path().join("disk.larder")).unwrap();
    for order in [None, Some(ORDERED), Some(Order::Journaled(Cuts::Flushes))] {
        let why = builder(dir.path(), &["disk", "other"], order).open().unwrap_err().to_string();
        assert!(why.contains("may hold writes that the store does not have"), "{why}");
        assert!(!dir.path().join("other.larder.journal").exists());
        assert!(std::fs::read(dir.path().join("disk.larder")).unwrap() == before, "{order:?}");
    }
    let cache = builder(dir.path(), &["disk"], Some(ORDERED)).open().unwrap();
    assert!(cache.core().put_aside().is_empty(), "{:?}", cache.core().put_aside());
}
