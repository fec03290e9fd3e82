//! Volumes that write back and whose stores are not there at the start, and stores that were recovered meanwhile: the marker decides when it can be
//! read.

use std::path::Path;

use super::back::{builder, ordered, wishes};
use super::*;
use crate::block::back::{
    BackConfig, BackWish, Cuts, Grain, MarkerAt, Order, Pace, RecoverWish, recover,
};
use crate::block::{Builder, Cache};
use larder_volume::open_with;

const BYTES: u64 = 8 << 20;

fn open_store(dir: &Path, name: &str) -> Box<dyn Backing> {
    let uri = format!("file:{}", dir.join(name).display()).parse().unwrap();
    open_with(&uri, &OpenOptions::default()).unwrap()
}

/// A cache that serves `more`, and has served `disk`.
fn only_more(dir: &Path, back: BackConfig) -> Builder {
    let more = dir.join("more");
    if !more.exists() {
        File::create(&more).unwrap().set_len(BYTES).unwrap();
    }
    let builder = Cache::builder(dir.join("cache")).state_dir(dir.join("state")).threads(2);
    let builder = builder.volume("more", &format!("file:{}", more.display())).unwrap();
    builder.write_back("more", back.clone()).write_back("disk", back)
}

fn leaves_dirty(dir: &Path, back: BackConfig) {
    let cache = builder(dir, Some(back)).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 8192]).wait().unwrap();
    disk.zero(4096, 512).wait().unwrap();
    disk.flush().wait().unwrap();
}

fn held(order: Order) -> BackConfig {
    BackConfig { order, pace: Pace::AtBound, ..BackConfig::default() }
}

fn is_what_was_written(cache: &Cache) {
    let read = cache.volume("disk").unwrap().read(0, 12288).wait().unwrap();
    assert!(read[..4096].iter().all(|&b| b == 1) && read[4096..4608].iter().all(|&b| b == 0));
    assert!(read[4608..8192].iter().all(|&b| b == 1) && read[8192..].iter().all(|&b| b == 0));
}

#[test]
fn a_store_that_is_away_keeps_no_other_volume_and_its_dirty_data_wait_for_it() {
    for order in [
        Order::Any,
        Order::Ordered(Grain::Flush),
        Order::Journaled(Cuts::Flushes),
        Order::Journaled(Cuts::Marks),
    ] {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        leaves_dirty(dir, held(order));
        // One that was forgotten is missed; one that is awaited is not.
        let why = only_more(dir, held(order)).open().err().unwrap().to_string();
        assert!(why.contains("'disk'") && why.contains("its store does not have"), "{why}");
        for round in 0..3u8 {
            let cache = only_more(dir, held(order)).awaits("disk").open().unwrap();
            let aside = cache.core().put_aside();
            assert_eq!(aside[0].carried_bytes, Some(8192), "{order:?} {aside:?}");
            let more = cache.volume("more").unwrap();
            more.write(0, [round + 1; 4096]).wait().unwrap();
            assert!(more.read(0, 4096).wait().unwrap().iter().all(|&b| b == round + 1));
            let why = cache.core().forget("disk", &mut || true).unwrap_err().to_string();
            assert!(why.contains("its store does not have"), "{why}");
            assert!(std::fs::read(dir.join("disk")).unwrap().iter().all(|&b| b == 0));
            if round == 0 {
                continue;
            }
            // Its store is there.
            drop(cache.attach_as("disk", open_store(dir, "disk"), &wishes(held(order))).unwrap());
            is_what_was_written(&cache);
            assert!(cache.core().put_aside().is_empty());
            if round == 2 {
                if order == Order::Journaled(Cuts::Marks) {
                    cache.core().mark("disk", "end", &mut || true).unwrap();
                }
                assert!(cache.core().destage("disk", &mut |_| true).unwrap());
                assert!(std::fs::read(dir.join("disk")).unwrap()[..4096].iter().all(|&b| b == 1));
            }
        }
        let cache = builder(dir, Some(held(order))).awaits("more").open().unwrap();
        is_what_was_written(&cache);
    }
}

#[test]
fn a_store_that_was_recovered_while_it_was_awaited_is_served_without_what_the_cache_holds() {
    for through in [false, true] {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        leaves_dirty(dir, ordered(Pace::AtBound));
        let cache = only_more(dir, ordered(Pace::AtBound)).awaits("disk").open().unwrap();
        recover(&*open_store(dir, "disk"), &RecoverWish::default()).unwrap();
        let wish = match through {
            true => BackWish::default(),
            false => wishes(ordered(Pace::AtBound)),
        };
        let disk = cache.attach_as("disk", open_store(dir, "disk"), &wish).unwrap();
        assert!(disk.read(0, 8192).wait().unwrap().iter().all(|&b| b == 0), "{through}");
        disk.write(512, [9; 512]).wait().unwrap();
        drop(disk);
        assert!(cache.core().put_aside().is_empty());
        drop(cache);
        // What was void stays it.
        let back = Some(ordered(Pace::AtBound)).filter(|_| !through);
        for _ in 0..2 {
            let cache = builder(dir, back.clone()).awaits("more").open().unwrap();
            let read = cache.volume("disk").unwrap().read(0, 8192).wait().unwrap();
            assert!(read[..512].iter().all(|&b| b == 0), "{through}");
            assert!(read[512..1024].iter().all(|&b| b == 9), "{through}");
            assert!(read[1024..].iter().all(|&b| b == 0), "{through}");
        }
    }
}

/// Which way it was served before, and whatever it is to do now.
#[test]
fn the_start_after_a_recovery_needs_nothing_special() {
    for back in [None, Some(ordered(Pace::AtBound)), Some(held(Order::Any))] {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let cache = builder(dir, Some(ordered(Pace::AtBound))).admission("all").open().unwrap();
        let disk = cache.volume("disk").unwrap();
        assert!(disk.read(0, 8192).wait().unwrap().iter().all(|&b| b == 0));
        disk.write(0, [1; 8192]).wait().unwrap();
        drop((disk, cache));
        recover(&*open_store(dir, "disk"), &RecoverWish::default()).unwrap();
        // Somebody else serves it meanwhile.
        File::options()
            .write(true)
            .open(dir.join("disk"))
            .unwrap()
            .write_all_at(&[5; 4096], 0)
            .unwrap();
        for _ in 0..2 {
            let cache = builder(dir, back.clone()).open().unwrap();
            let read = cache.volume("disk").unwrap().read(0, 8192).wait().unwrap();
            assert!(read[..4096].iter().all(|&b| b == 5), "{back:?}");
            assert!(read[4096..].iter().all(|&b| b == 0), "{back:?}");
        }
        // Another cache may serve it as well, if this one has written through.
        if back.is_none() {
            std::fs::rename(dir.join("cache"), dir.join("away")).unwrap();
            drop(builder(dir, None).open().unwrap());
        }
    }
}

/// Without a marker nobody but this cache knows, and a recovery has none to make clean.
#[test]
fn without_a_marker_what_is_dirty_waits_for_its_store_as_well() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let back = || ordered(Pace::AtBound);
    let cache = builder(dir, Some(back())).marker("disk", MarkerAt::Nowhere).open().unwrap();
    cache.volume("disk").unwrap().write(0, [1; 8192]).wait().unwrap();
    cache.volume("disk").unwrap().zero(4096, 512).wait().unwrap();
    drop(cache);
    let cache = only_more(dir, back()).awaits("disk").open().unwrap();
    let wish = BackWish { marker: MarkerAt::Nowhere, ..wishes(back()) };
    drop(cache.attach_as("disk", open_store(dir, "disk"), &wish).unwrap());
    is_what_was_written(&cache);
}

/// Each start raises the run of the cache, also one that does not see the marker.
#[test]
fn a_cache_that_was_set_back_is_not_believed_after_starts_whose_store_was_away() {
    for (starts, through) in [(0, false), (1, false), (3, false), (2, true)] {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        leaves_dirty(dir, ordered(Pace::AtBound));
        std::fs::copy(dir.join("cache"), dir.join("older")).unwrap();
        let cache = builder(dir, Some(ordered(Pace::AtBound))).awaits("more").open().unwrap();
        cache.volume("disk").unwrap().write(0, [9; 4096]).wait().unwrap();
        drop(cache);
        std::fs::copy(dir.join("cache"), dir.join("newer")).unwrap();
        std::fs::rename(dir.join("older"), dir.join("cache")).unwrap();
        for _ in 0..starts {
            drop(only_more(dir, ordered(Pace::AtBound)).awaits("disk").open().unwrap());
        }
        let wish = match through {
            true => BackWish::default(),
            false => wishes(ordered(Pace::AtBound)),
        };
        let cache = only_more(dir, ordered(Pace::AtBound)).awaits("disk").open().unwrap();
        let why = cache.attach_as("disk", open_store(dir, "disk"), &wish).err();
        let why = why.expect("an older copy is believed").to_string();
        assert!(why.contains("not of one time"), "{starts}: {why}");
        drop(cache);
        // Nor by a start that sees it.
        let why = builder(dir, wish.back.clone()).awaits("more").open().err().unwrap().to_string();
        assert!(why.contains("not of one time"), "{starts}: {why}");
        assert!(std::fs::read(dir.join("disk")).unwrap().iter().all(|&b| b == 0));
        // The newer one is there: it has waited as often.
        std::fs::rename(dir.join("newer"), dir.join("cache")).unwrap();
        for _ in 0..starts {
            drop(only_more(dir, ordered(Pace::AtBound)).awaits("disk").open().unwrap());
        }
        let cache = only_more(dir, ordered(Pace::AtBound)).awaits("disk").open().unwrap();
        let disk =
            cache.attach_as("disk", open_store(dir, "disk"), &wishes(ordered(Pace::AtBound)));
        assert!(disk.unwrap().read(0, 4096).wait().unwrap().iter().all(|&b| b == 9));
    }
}
