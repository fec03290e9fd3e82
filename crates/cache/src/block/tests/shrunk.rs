//! Stores that have become smaller while a cache held writes of them, and what is given up of a volume.

use std::path::Path;

use super::back::{builder, ordered, wishes};
use super::*;
use crate::block::Cache;
use crate::block::back::discard::{DiscardWish, Discarded, discard};
use crate::block::back::{BackConfig, Cuts, Grain, Order, Pace};
use larder_volume::open_with;

const BYTES: u64 = 8 << 20;
/// What the store has in the end: no multiple of a line.
const END: u64 = (4 << 20) + 512;

fn open_store(dir: &Path) -> Box<dyn Backing> {
    let uri = format!("file:{}", dir.join("disk").display()).parse().unwrap();
    // Who had it lets go of it a little later.
    let end = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        match open_with(&uri, &OpenOptions::default()) {
            Err(e) if std::time::Instant::now() > end => panic!("{e}"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
            Ok(store) => return store,
        }
    }
}

/// Leaves 4 KiB dirty at the beginning, 4 KiB over the end and 8 KiB beyond it; then the store is cut short.
fn leaves(dir: &Path, back: BackConfig) {
    let cache = builder(dir, Some(back)).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(8192, [1; 4096]).wait().unwrap();
    disk.write(END - 1024, [2; 4096]).wait().unwrap();
    disk.write(6 << 20, [3; 8192]).wait().unwrap();
    disk.flush().wait().unwrap();
    drop((disk, cache));
    resize(dir, END);
}

fn resize(dir: &Path, bytes: u64) {
    File::options().write(true).open(dir.join("disk")).unwrap().set_len(bytes).unwrap();
}

fn is_below(cache: &Cache) {
    let disk = cache.volume("disk").unwrap();
    let read = disk.read(4096, 12288).wait().unwrap();
    assert!(read[..4096].iter().all(|&b| b == 0) && read[4096..8192].iter().all(|&b| b == 1));
    let read = disk.read(END - 2048, 2048).wait().unwrap();
    assert!(read[..1024].iter().all(|&b| b == 0) && read[1024..].iter().all(|&b| b == 2));
}

fn gives_up(dir: &Path, beyond_end: bool, store: bool, yes: bool) -> Result<Discarded, String> {
    let wish = DiscardWish {
        cache: dir.join("cache"),
        volume: "disk".into(),
        beyond_end,
        yes,
        ..DiscardWish::default()
    };
    let store = store.then(|| open_store(dir));
    discard(&wish, store.as_deref()).map_err(|e| e.to_string())
}

#[test]
fn a_shrunk_store_is_only_read_until_it_has_its_size_again() {
    for order in [
        Order::Any,
        Order::Ordered(Grain::Flush),
        Order::Ordered(Grain::Completion),
        Order::Journaled(Cuts::Flushes),
    ] {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let back = || BackConfig { order, pace: Pace::Async, ..BackConfig::default() };
        leaves(dir, BackConfig { pace: Pace::AtBound, ..back() });
        for _ in 0..2 {
            let cache = builder(dir, Some(back())).open().unwrap();
            is_below(&cache);
            let disk = cache.volume("disk").unwrap();
            assert!(disk.write(0, [9; 512]).wait().is_err());
            disk.flush().wait().unwrap();
            let status = cache.core().back_status("disk").unwrap();
            let beyond = status.shrunk.unwrap();
            assert_eq!((beyond.end, beyond.had, beyond.dirty), (END, BYTES, 3072 + 8192));
            assert_eq!(beyond.range, (END, (6 << 20) + 8192));
            let why = cache.core().destage("disk", &mut |_| true).unwrap_err().to_string();
            assert!(why.contains("has become smaller"), "{why}");
            assert!(std::fs::read(dir.join("disk")).unwrap().iter().all(|&b| b == 0));
        }
        // It is restored while it is served, and attached again.
        let cache = builder(dir, Some(back())).open().unwrap();
        assert!(cache.detach("disk", &mut |_| true).unwrap());
        resize(dir, BYTES);
        let disk = cache.attach_as("disk", open_store(dir), &wishes(back())).unwrap();
        assert!(disk.read(6 << 20, 8192).wait().unwrap().iter().all(|&b| b == 3));
        disk.write(0, [9; 512]).wait().unwrap();
        drop(disk);
        is_below(&cache);
        assert!(cache.core().destage("disk", &mut |_| true).unwrap());
        assert!(
            std::fs::read(dir.join("disk")).unwrap()[6 << 20..][..8192].iter().all(|&b| b == 3)
        );
    }
}

#[test]
fn what_lies_beyond_the_end_is_given_up_for_good_and_the_rest_stays() {
    for order in [Order::Any, Order::Ordered(Grain::Flush), Order::Ordered(Grain::Completion)] {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        let back = |pace| BackConfig { order, pace, ..BackConfig::default() };
        leaves(dir, back(Pace::AtBound));
        std::fs::copy(dir.join("cache"), dir.join("copy")).unwrap();
        let why = gives_up(dir, true, false, true).unwrap_err();
        assert!(why.contains("name it"), "{why}");
        for yes in [false, true] {
            let told = gives_up(dir, true, true, yes).unwrap();
            assert_eq!((told.lost_bytes, told.kept_bytes), (8192 + 3072, 4096 + 1024));
            assert_eq!((told.first_byte, told.end_byte), (END, (6 << 20) + 8192));
            assert_eq!((told.done, told.fenced), (yes, yes));
        }
        let why = gives_up(dir, true, true, true).unwrap_err();
        assert!(why.contains("nothing lies beyond"), "{why}");
        // A copy of the cache does not count any more, whatever the size of the store.
        std::fs::rename(dir.join("cache"), dir.join("right")).unwrap();
        std::fs::rename(dir.join("copy"), dir.join("cache")).unwrap();
        for size in [END, BYTES] {
            resize(dir, size);
            let why = builder(dir, Some(back(Pace::AtBound))).open().err().unwrap().to_string();
            assert!(why.contains("does not have them any more"), "{why}");
        }
        resize(dir, END);
        std::fs::rename(dir.join("right"), dir.join("cache")).unwrap();
        let cache = builder(dir, Some(back(Pace::AtBound))).open().unwrap();
        is_below(&cache);
        let status = cache.core().back_status("disk").unwrap();
        assert_eq!((status.status.dirty, status.shrunk), (4096 + 1024, None));
        cache.volume("disk").unwrap().write(0, [9; 512]).wait().unwrap();
        drop(cache);
        // Grown again it has zeros there, and what is written there then.
        resize(dir, BYTES);
        for round in 0..3u8 {
            let cache = builder(dir, Some(back(Pace::AtBound))).open().unwrap();
            is_below(&cache);
            let disk = cache.volume("disk").unwrap();
            let read = disk.read(6 << 20, 8192).wait().unwrap();
            assert!(read.iter().all(|&b| b == 4 * round.min(1)), "{order:?} {round}");
            disk.write(6 << 20, [4; 8192]).wait().unwrap();
            if round == 2 {
                assert!(cache.core().destage("disk", &mut |_| true).unwrap());
                let store = std::fs::read(dir.join("disk")).unwrap();
                assert!(store[END as usize..6 << 20].iter().all(|&b| b == 0));
                assert!(store[6 << 20..][..8192].iter().all(|&b| b == 4));
                assert!(store[..512].iter().all(|&b| b == 9));
            }
        }
    }
}

#[test]
fn what_lies_beyond_the_end_of_a_journaled_volume_is_refused_with_what_to_do() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    let order = Order::Journaled(Cuts::Flushes);
    leaves(dir, BackConfig { order, pace: Pace::AtBound, ..BackConfig::default() });
    let why = gives_up(dir, true, true, true).unwrap_err();
    for word in ["comes to the store as a whole", "restore the store's size", "discard all"] {
        assert!(why.contains(word), "{why}");
    }
    let cache =
        builder(dir, Some(BackConfig { order, pace: Pace::AtBound, ..BackConfig::default() }));
    is_below(&cache.open().unwrap());
}

#[test]
fn all_that_is_dirty_is_given_up_and_the_volume_may_be_served_anew() {
    for (shrinks, carried) in [(false, false), (true, false), (false, true)] {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        leaves(dir, ordered(Pace::AtBound));
        if !shrinks {
            resize(dir, BYTES);
        }
        if carried {
            let cache = builder(dir, Some(ordered(Pace::AtBound))).open().unwrap();
            assert!(cache.detach_dirty("disk", &mut |_| true).unwrap());
        }
        std::fs::copy(dir.join("cache"), dir.join("copy")).unwrap();
        assert!(!gives_up(dir, false, true, false).unwrap().done);
        let told = gives_up(dir, false, true, true).unwrap();
        assert_eq!((told.lost_bytes, told.kept_bytes), (4096 + 4096 + 8192, 0));
        assert!(told.done && told.fenced);
        let why = gives_up(dir, false, true, true).unwrap_err();
        assert!(why.contains("holds nothing"), "{why}");
        for back in [None, Some(ordered(Pace::AtBound)), None] {
            let cache = builder(dir, back.clone()).open().unwrap();
            let disk = cache.volume("disk").unwrap();
            assert!(disk.read(0, END as usize / 4).wait().unwrap().iter().all(|&b| b == 0));
            if back.is_some() {
                drop(disk);
                assert!(cache.detach("disk", &mut |_| true).unwrap());
            }
        }
        std::fs::rename(dir.join("copy"), dir.join("cache")).unwrap();
        if shrinks {
            let why = builder(dir, Some(ordered(Pace::AtBound))).open().err().unwrap().to_string();
            assert!(why.contains("does not count any more"), "{why}");
            continue;
        }
        let cache = builder(dir, Some(ordered(Pace::AtBound))).open().unwrap();
        let read = cache.volume("disk").unwrap().read(8192, 4096).wait().unwrap();
        assert!(read.iter().all(|&b| b == 0), "a copy does not count");
    }
}
