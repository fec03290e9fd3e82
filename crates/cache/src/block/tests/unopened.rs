//! A marker whose place hangs before it is open: whoever comes with it hears of that in time, and nobody else of it at all.

use std::path::Path;

use larder_volume::open_with;
use larder_volume::testing::Hangs;

use super::back::{builder, ordered, wishes};
use super::silent::{AT_MOST, in_time};
use super::*;
use crate::block::back::{BackWish, MarkerAt, Pace};

fn open_store(dir: &Path, name: &str) -> Box<dyn Backing> {
    let path = dir.join(name);
    if !path.exists() {
        File::create(&path).unwrap().set_len(8 << 20).unwrap();
    }
    let uri = format!("file:{}", path.display()).parse().unwrap();
    open_with(&uri, &OpenOptions::default()).unwrap()
}

fn marker_at(dir: &Path, name: &str) -> MarkerAt {
    MarkerAt::At(dir.join(name).display().to_string())
}

fn says_where_and_how_long(why: &str, name: &str) {
    assert!(why.contains(name) && why.contains("has not answered for"), "{why}");
}

#[test]
fn a_volume_that_comes_with_a_marker_that_hangs_is_refused_in_time_and_nobody_else_waits() {
    let (dir, away) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let wish =
        BackWish { marker: marker_at(away.path(), "more.m"), ..wishes(ordered(Pace::AtBound)) };
    let hangs = Hangs::new(away.path());
    let comes = || cache.attach_as("more", open_store(dir.path(), "more"), &wish);
    let why = std::thread::scope(|scope| {
        let attaching = scope.spawn(|| in_time("an attach", comes));
        let disk = cache.volume("disk").unwrap();
        disk.write(0, [1; 4096]).wait().unwrap();
        assert!(cache.core().destage("disk", &mut |_| true).unwrap());
        drop(disk);
        assert!(cache.detach("disk", &mut |_| true).unwrap());
        let again = &wishes(ordered(Pace::AtBound));
        cache.attach_as("third", open_store(dir.path(), "third"), again).unwrap();
        assert!(!attaching.is_finished(), "others have waited for it");
        attaching.join().unwrap().err().unwrap().to_string()
    });
    says_where_and_how_long(&why, "more.m");
    // Whoever tries again does not wait again, and takes no other thread.
    let begun = Instant::now();
    for _ in 0..20 {
        let why = in_time("an attach", comes).err().unwrap().to_string();
        says_where_and_how_long(&why, "more.m");
    }
    assert!(begun.elapsed() < Duration::from_secs(100), "{:?}", begun.elapsed());
    drop(hangs);
    let until = Instant::now() + AT_MOST;
    while let Err(why) = comes() {
        assert!(Instant::now() < until, "{why}");
        std::thread::sleep(Duration::from_millis(5));
    }
    cache.volume("more").unwrap().write(0, [2; 4096]).wait().unwrap();
}

#[test]
fn a_volume_that_changes_over_to_a_marker_that_hangs_stays_as_it_is_and_its_clients_do_not_wait() {
    let (dir, away) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let more = cache.attach("more", open_store(dir.path(), "more")).unwrap();
    let wish =
        BackWish { marker: marker_at(away.path(), "over.m"), ..wishes(ordered(Pace::AtBound)) };
    let hangs = Hangs::new(away.path());
    let why = std::thread::scope(|scope| {
        let over = || cache.change_over("more", &wish, &mut |_| true);
        let changing = scope.spawn(move || in_time("a change over", over));
        for at in 0..8 {
            more.write(at * 4096, [at as u8 + 1; 4096]).wait().unwrap();
        }
        assert!(!changing.is_finished(), "its clients have waited for it");
        changing.join().unwrap().unwrap_err().to_string()
    });
    says_where_and_how_long(&why, "over.m");
    assert!(cache.core().back_status("more").is_none());
    more.write(0, [9; 4096]).wait().unwrap();
    drop(hangs);
    let until = Instant::now() + AT_MOST;
    while let Err(why) = cache.change_over("more", &wish, &mut |_| true) {
        assert!(Instant::now() < until, "{why}");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(cache.core().back_status("more").is_some());
}

#[test]
fn a_start_with_a_marker_that_hangs_is_refused_in_time_and_changes_nothing() {
    let (dir, away) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let with = || {
        let builder = builder(dir.path(), Some(ordered(Pace::AtBound)));
        builder.marker("disk", marker_at(away.path(), "start.m")).open()
    };
    let cache = with().unwrap();
    cache.volume("disk").unwrap().write(0, [1; 4096]).wait().unwrap();
    drop(cache);
    let hangs = Hangs::new(away.path());
    says_where_and_how_long(&in_time("a start", with).err().unwrap().to_string(), "start.m");
    // One that writes through looks at it too, and so does one that is said to have none.
    let through = || {
        let builder = builder(dir.path(), None);
        builder.marker("disk", marker_at(away.path(), "start.m")).open()
    };
    says_where_and_how_long(&in_time("a start", through).err().unwrap().to_string(), "start.m");
    let without = || {
        let builder = builder(dir.path(), Some(ordered(Pace::AtBound)));
        builder.marker("disk", MarkerAt::Nowhere).open()
    };
    says_where_and_how_long(&in_time("a start", without).err().unwrap().to_string(), "start.m");
    drop(hangs);
    let until = Instant::now() + AT_MOST;
    let cache = loop {
        match with() {
            Ok(cache) => break cache,
            Err(why) => assert!(Instant::now() < until, "{why}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let read = cache.volume("disk").unwrap().read(0, 4096).wait().unwrap();
    assert!(read.iter().all(|&b| b == 1));
}
