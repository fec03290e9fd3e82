//! Markers and journals that something removes, or writes over, while their volume is served.

use std::path::Path;

use larder_format::Uuid;
use larder_format::block::marker::{Marker, MarkerState, choose};

use super::hanging::{GoesOn, Hanging, State};
use super::*;
use crate::block::back::{
    BackConfig, BackStatus, BackWish, Cuts, Grain, MarkerAt, Order, Pace, RecoverWish, recover,
};
use crate::block::{Builder, Cache};

fn builder(dir: &Path, order: Order) -> Builder {
    let path = dir.join("disk");
    if !path.exists() {
        File::create(&path).unwrap().set_len(4 << 20).unwrap();
    }
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(1);
    let builder = builder.volume("disk", &format!("file:{}", path.display())).unwrap();
    let back = BackConfig { order, pace: Pace::AtBound, ..BackConfig::default() };
    builder.write_back("disk", back)
}

const ORDERED: Order = Order::Ordered(Grain::Flush);
const JOURNALED: Order = Order::Journaled(Cuts::Flushes);

fn marker(dir: &Path) -> Marker {
    let bytes = std::fs::read(dir.join("disk.larder")).unwrap();
    choose(&bytes[..4096], &bytes[4096..8192]).unwrap().marker
}

fn look(cache: &Cache) {
    let volume = cache.core().volume("disk").unwrap();
    cache.core().look_at_marker(&volume, false);
    cache.core().look_at_journal(&volume);
}

fn status(cache: &Cache) -> BackStatus {
    cache.core().back_status("disk").unwrap()
}

/// Until something is told of marker or journal that has this in it.
fn told(cache: &Cache, what: &str) {
    for _ in 0..500 {
        if status(cache).troubles.iter().any(|told| told.contains(what)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("'{what}' is not told: {:?}", status(cache));
}

#[test]
fn a_marker_that_is_removed_while_its_volume_is_served_is_told_and_written_again() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), ORDERED).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    look(&cache);
    assert!(status(&cache).troubles.is_empty(), "{:?}", status(&cache));
    let was = marker(dir.path());
    std::fs::remove_file(dir.path().join("disk.larder")).unwrap();
    look(&cache);
    told(&cache, "was removed while the volume is served, and was written again");
    let now = marker(dir.path());
    assert_eq!((now.state, now.cache, now.generation), (was.state, was.cache, was.generation));
    assert!(now.number > was.number);
    // So does one that is damaged, or put back.
    for what in ["was damaged", "was put back to an older copy"] {
        let mut bytes = std::fs::read(dir.path().join("disk.larder")).unwrap();
        match what {
            "was damaged" => [20, 4096 + 20].into_iter().for_each(|at| bytes[at] ^= 1),
            _ => bytes = [was.encode(), was.encode()].concat(),
        }
        std::fs::write(dir.path().join("disk.larder"), bytes).unwrap();
        look(&cache);
        told(&cache, what);
        assert!(marker(dir.path()).number > was.number);
    }
    // It is gone when the volume is detached, too.
    std::fs::remove_file(dir.path().join("disk.larder")).unwrap();
    drop(disk);
    assert!(cache.detach("disk", &mut |_| true).unwrap());
    assert_eq!(marker(dir.path()).state, MarkerState::Clean);
}

#[test]
fn what_is_no_marker_in_place_of_one_is_told_and_left_as_it_is() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), ORDERED).open().unwrap();
    cache.volume("disk").unwrap().write(0, [1; 4096]).wait().unwrap();
    let path = dir.path().join("disk.larder");
    std::fs::write(&path, b"a note of somebody").unwrap();
    look(&cache);
    told(&cache, "is no marker");
    assert_eq!(std::fs::read(&path).unwrap(), b"a note of somebody");
    // Once it is moved away the marker is there again.
    std::fs::remove_file(&path).unwrap();
    look(&cache);
    told(&cache, "was written again");
    assert_eq!(marker(dir.path()).state, MarkerState::Dirty);
}

#[test]
fn nothing_comes_to_a_store_whose_marker_names_another_holder() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), ORDERED).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    let was = marker(dir.path());
    let other = Marker { cache: Uuid([9; 16]), host: "there".into(), ..was.clone() };
    let recovered =
        Marker { state: MarkerState::Clean, generation: was.generation + 1, ..was.clone() };
    let path = dir.path().join("disk.larder");
    for (there, word) in [(other, "on host 'there'"), (recovered, "was recovered")] {
        let there = Marker { number: was.number + 5, ..there };
        std::fs::write(&path, [there.encode(), there.encode()].concat()).unwrap();
        look(&cache);
        told(&cache, word);
        let why = cache.core().destage("disk", &mut |_| true).unwrap_err().to_string();
        assert!(why.contains("nothing comes to the store"), "{why}");
        assert!(std::fs::read(dir.path().join("disk")).unwrap().iter().all(|&b| b == 0));
        assert_eq!(marker(dir.path()), there, "it is left as it is");
        // What is acknowledged now would be void, what is read may be old by now.
        disk.write(4096, [2; 4096]).wait().unwrap_err();
        disk.flush().wait().unwrap_err();
        disk.read(0, 4096).wait().unwrap_err();
        disk.zero(4096, 4096).wait().unwrap_err();
        let why = cache.core().mark("disk", "safe", &mut || true).unwrap_err().to_string();
        assert!(why.contains(word), "{why}");
    }
    // All goes on when it is put back.
    std::fs::write(&path, [was.encode(), was.encode()].concat()).unwrap();
    look(&cache);
    assert!(status(&cache).troubles.is_empty(), "{:?}", status(&cache));
    assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == 1));
    disk.write(8192, [3; 4096]).wait().unwrap();
    disk.flush().wait().unwrap();
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    let store = std::fs::read(dir.path().join("disk")).unwrap();
    assert_eq!((store[0], store[4096], store[8192]), (1, 0, 3));
}

#[test]
fn a_journal_that_is_removed_or_emptied_while_it_is_served_is_told_and_made_anew() {
    for (case, how) in ["was removed", "was emptied", "was damaged"].into_iter().enumerate() {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("disk.larder.journal");
        let cache = builder(dir.path(), JOURNALED).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        let lose = || match case {
            0 => std::fs::remove_file(&path).unwrap(),
            1 => {
                let file = File::options().write(true).open(&path).unwrap();
                file.write_all_at(&[0; 8192], 0).unwrap();
            }
            _ => File::options().write(true).open(&path).unwrap().set_len(0).unwrap(),
        };
        disk.write(0, [1; 4096]).wait().unwrap();
        assert!(cache.core().destage("disk", &mut |_| true).unwrap());
        // Nothing is on its way, then something is.
        for byte in [2, 3] {
            lose();
            if byte == 2 {
                look(&cache);
                told(&cache, how);
            }
            disk.write(0, [byte; 4096]).wait().unwrap();
            assert!(cache.core().destage("disk", &mut |_| true).unwrap());
            told(&cache, how);
            assert_eq!(status(&cache).journal_failure, None);
            assert_eq!(std::fs::read(dir.path().join("disk")).unwrap()[0], byte);
        }
        let keep = ["disk", "disk.larder", "disk.larder.journal"].map(|name| dir.path().join(name));
        let kept = keep.clone().map(|path| std::fs::read(path).unwrap());
        drop((disk, cache));
        // The cache is lost: the journal that was made anew is as good.
        for (path, bytes) in keep.iter().zip(kept) {
            std::fs::write(path, bytes).unwrap();
        }
        let uri: Uri = format!("file:{}", dir.path().join("disk").display()).parse().unwrap();
        let store = backing::open_with(&uri, &OpenOptions::default()).unwrap();
        let recovered = recover(&*store, &RecoverWish::default()).unwrap();
        assert!(recovered.recovered && recovered.torn.is_none(), "{how}: {recovered:?}");
    }
}

#[test]
fn a_journal_that_is_another_volumes_by_now_takes_nothing_and_is_told() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("disk.larder.journal");
    let cache = builder(dir.path(), JOURNALED).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let head = choose(&bytes[..4096], &bytes[4096..8192]).unwrap().marker;
    let others = Marker { volume: Uuid([9; 16]), number: head.number + 1, ..head };
    let file = File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[others.encode(), others.encode()].concat(), 0).unwrap();
    look(&cache);
    told(&cache, "is the journal of another volume");
    let mut looks = 0;
    let all = cache.core().destage("disk", &mut |_| {
        looks += 1;
        looks < 5
    });
    assert!(!all.unwrap());
    assert!(status(&cache).journal_failure.unwrap().contains("another volume"));
    assert!(std::fs::read(dir.path().join("disk")).unwrap().iter().all(|&b| b == 0));
}

#[test]
fn nothing_more_is_begun_or_said_of_a_volume_whose_marker_names_another_while_a_window_is_under_way()
 {
    let dir = TempDir::new().unwrap();
    let (path, state) = (dir.path().join("hanging.marker"), Arc::new(State::default()));
    let _goes_on = GoesOn(state.clone());
    let read = || {
        let bytes = std::fs::read(&path).unwrap();
        choose(&bytes[..4096], &bytes[4096..8192]).unwrap().marker
    };
    let put = |marker: &Marker| {
        std::fs::write(&path, [marker.encode(), marker.encode()].concat()).unwrap();
    };
    let cache = builder(dir.path(), ORDERED).open().unwrap();
    let back = BackConfig { order: ORDERED, pace: Pace::AtBound, ..BackConfig::default() };
    let marker = MarkerAt::At(path.display().to_string());
    let wish = BackWish { back: Some(back), marker, ..BackWish::default() };
    let store = Box::new(Hanging(state.clone()));
    let volume = cache.attach_as("hanging", store, &wish).unwrap();
    volume.write(0, [1; 4096]).wait().unwrap();
    let was = read();
    let others = Marker { cache: Uuid([9; 16]), host: "there".into(), ..was.clone() };
    let others = Marker { number: was.number + 5, ..others };
    let look = || {
        let volume = cache.core().volume("hanging").unwrap();
        cache.core().look_at_marker(&volume, true);
    };
    let frontier = || cache.core().back_status("hanging").unwrap().status.positions[0];
    let keeps_off = || {
        let why = cache.core().destage("hanging", &mut |_| true).unwrap_err().to_string();
        assert!(why.contains("on host 'there'"), "{why}");
        assert_eq!((read(), frontier()), (others.clone(), 0));
    };
    state.hangs.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let flush = scope.spawn(|| cache.core().destage("hanging", &mut |_| true));
        State::seen(&state.waits);
        put(&others);
        look();
        let why = flush.join().unwrap().unwrap_err().to_string();
        assert!(why.contains("nothing comes to the store any more"), "{why}");
    });
    volume.write(8192, [2; 4096]).wait().unwrap_err();
    let asked = state.asked.load(Ordering::SeqCst);
    state.hangs.store(false, Ordering::SeqCst);
    let until = Instant::now() + Duration::from_secs(60);
    while state.ended.load(Ordering::SeqCst) < asked {
        assert!(Instant::now() < until, "what was under way does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(200));
    look();
    keeps_off();
    assert_eq!(state.asked.load(Ordering::SeqCst), asked, "more is asked of the store");
    drop(volume);
    let why = cache.detach("hanging", &mut |_| true).unwrap_err().to_string();
    assert!(why.contains("on host 'there'"), "{why}");
    look();
    keeps_off();
    assert_eq!(state.asked.load(Ordering::SeqCst), asked, "more is asked of the store");
    // It is its own again.
    put(&was);
    look();
    assert!(cache.core().destage("hanging", &mut |_| true).unwrap());
    assert_eq!(frontier(), 1);
    assert!(cache.detach("hanging", &mut |_| true).unwrap());
    assert_eq!((read().state, read().cache), (MarkerState::Clean, was.cache));
}

/// The log has failed, and says what its markers are: whose a marker is is looked at all the same.
#[test]
fn a_volume_whose_log_has_failed_goes_on_when_its_marker_is_its_own_again() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), ORDERED).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    let was = marker(dir.path());
    let others = Marker { cache: Uuid([9; 16]), host: "there".into(), ..was.clone() };
    let others = Marker { number: was.number + 5, ..others };
    let path = dir.path().join("disk.larder");
    cache.core().faults.flushes.store(true, Ordering::SeqCst);
    std::fs::write(&path, [others.encode(), others.encode()].concat()).unwrap();
    // (What was written before may have been flushed by itself.)
    let more = disk.write(4096, [2; 4096]).wait();
    let until = Instant::now() + Duration::from_secs(60);
    while status(&cache).closed.is_none() {
        assert!(Instant::now() < until, "the log does not fail");
        std::thread::sleep(Duration::from_millis(5));
    }
    look(&cache);
    disk.flush().wait().unwrap_err();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(marker(dir.path()), others, "it is left as it is");
    assert!(std::fs::read(dir.path().join("disk")).unwrap().iter().all(|&b| b == 0));
    std::fs::write(&path, [was.encode(), was.encode()].concat()).unwrap();
    look(&cache);
    while cache.core().back_status("disk").is_some() {
        assert!(Instant::now() < until, "{:?}", status(&cache));
        std::thread::sleep(Duration::from_millis(5));
    }
    disk.flush().wait().unwrap();
    assert_eq!(marker(dir.path()).state, MarkerState::Clean);
    let store = std::fs::read(dir.path().join("disk")).unwrap();
    assert!(store[0] == 1 && (store[4096] == 2 || more.is_err()));
}

/// As when the write budget has it write back again at that moment.
#[test]
fn a_volume_that_is_being_detached_does_not_change_over_and_no_marker_names_this_cache_then() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), ORDERED).open().unwrap();
    cache.volume("disk").unwrap().write(0, [1; 4096]).wait().unwrap();
    assert!(cache.core().change_over("disk", &BackWish::default(), &mut |_| true).unwrap());
    assert_eq!(marker(dir.path()).state, MarkerState::Clean);
    let back = BackConfig { order: ORDERED, pace: Pace::AtBound, ..BackConfig::default() };
    let wish = BackWish { back: Some(back), ..BackWish::default() };
    let (mut client, mut said) = (Some(cache.volume("disk").unwrap()), None);
    let gone = cache.detach("disk", &mut |_| {
        if client.take().is_some() {
            said = Some(cache.core().change_over("disk", &wish, &mut |_| true));
        }
        true
    });
    assert!(gone.unwrap());
    let why = said.unwrap().unwrap_err().to_string();
    assert!(why.contains("changed over or detached already"), "{why}");
    assert_eq!(marker(dir.path()).state, MarkerState::Clean);
}

/// A volume of which a start found something goes on before its marker is written: that is of the run before then. One of this run that could not be written
/// may be there.
#[test]
fn a_marker_of_the_run_that_wrote_it_last_is_a_volumes_own_and_so_is_one_of_this_run_and_no_later()
{
    let dir = TempDir::new().unwrap();
    drop(builder(dir.path(), ORDERED).open().unwrap());
    let cache = builder(dir.path(), ORDERED).open().unwrap();
    cache.volume("disk").unwrap().write(0, [1; 4096]).wait().unwrap();
    let core = cache.core();
    let attachment = core.volume("disk").unwrap().attachment().unwrap();
    let written = core.back.get().unwrap().written(attachment).unwrap();
    let now = marker(dir.path());
    assert_eq!(written.state.run, now.run);
    assert_eq!(written.durable_run.load(Ordering::Relaxed), now.run);
    // As if nothing of this run were known to be written.
    written.durable_run.store(now.run - 1, Ordering::Relaxed);
    let path = dir.path().join("disk.larder");
    for run in [now.run - 1, now.run] {
        let there = Marker { run, ..now.clone() };
        std::fs::write(&path, [there.encode(), there.encode()].concat()).unwrap();
        look(&cache);
        assert!(status(&cache).troubles.is_empty(), "{run}: {:?}", status(&cache).troubles);
        assert_eq!(marker(dir.path()), there, "{run}: it is not written anew");
    }
    let later = Marker { run: now.run + 1, ..now.clone() };
    std::fs::write(&path, [later.encode(), later.encode()].concat()).unwrap();
    look(&cache);
    told(&cache, "nothing comes to the store any more");
    // (It is left as it was found, for a stop that says so itself.)
    std::fs::write(&path, [now.encode(), now.encode()].concat()).unwrap();
    look(&cache);
    assert!(status(&cache).troubles.is_empty(), "{:?}", status(&cache).troubles);
}

/// It waits for no one: any cache may serve its store.
#[test]
fn a_volume_of_which_nothing_is_dirty_goes_as_if_nothing_were_to_be_kept() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), ORDERED).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    drop(disk);
    assert!(cache.detach_dirty("disk", &mut |_| true).unwrap());
    assert_eq!(marker(dir.path()).state, MarkerState::Clean);
    assert_eq!(std::fs::read(dir.path().join("disk")).unwrap()[0], 1);
}

/// One request is not cut into epochs, so that no cache that is lost leaves a part of it.
#[test]
fn a_write_that_is_to_be_durable_is_in_one_epoch() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), JOURNALED).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write_durably(0, vec![1; 3 << 20]).wait().unwrap();
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert_eq!(status(&cache).status.epoch, 1, "{:?}", status(&cache));
}

/// It is looked at all the time while the log says so.
#[test]
fn a_volume_whose_failed_log_is_in_its_store_is_nobody_elses() {
    for _ in 0..20 {
        let dir = TempDir::new().unwrap();
        let cache = builder(dir.path(), ORDERED).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        cache.core().faults.flushes.store(true, Ordering::SeqCst);
        disk.write(0, [1; 4096]).wait().unwrap();
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !ended.load(Ordering::SeqCst) {
                        look(&cache);
                    }
                });
            }
            let flushed = disk.flush().wait();
            let until = Instant::now() + Duration::from_secs(60);
            while cache.core().back_status("disk").is_some() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            ended.store(true, Ordering::SeqCst);
            flushed.unwrap();
        });
        assert!(cache.core().back_status("disk").is_none());
        assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == 1));
        disk.write(4096, [2; 4096]).wait().unwrap();
        disk.flush().wait().unwrap();
    }
}
