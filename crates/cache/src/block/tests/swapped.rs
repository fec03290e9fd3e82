//! An operator who gives a cache the store of another volume, a copy, or an older copy of the cache: nothing comes to a store that is not its volume's, and
//! nothing is given up for one.

use std::path::{Path, PathBuf};

use larder_volume::{Backing, OpenOptions, open_with};

use super::*;
use crate::block::back::discard::{DiscardWish, discard};
use crate::block::back::offline::{ExportWish, export};
use crate::block::back::{
    BackConfig, BackWish, Cuts, Grain, MarkerAt, Order, Pace, RecoverError, RecoverWish, recover,
};
use crate::block::{Builder, Cache};

const BYTES: u64 = 4 << 20;

/// Volumes, each with its store, that write back when their log is full.
fn builder(dir: &Path, volumes: &[(&str, &str)]) -> Builder {
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let mut builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(1);
    for (name, store) in volumes {
        let path = dir.join(store);
        if !path.exists() {
            File::create(&path).unwrap().set_len(BYTES).unwrap();
        }
        builder = builder.volume(name, &format!("file:{}", path.display())).unwrap();
        builder = builder.write_back(name, back());
    }
    builder
}

fn back() -> BackConfig {
    let order = Order::Ordered(Grain::Flush);
    BackConfig { order, pace: Pace::AtBound, ..BackConfig::default() }
}

fn open_store(path: PathBuf) -> Box<dyn Backing> {
    let uri = format!("file:{}", path.display()).parse().unwrap();
    // Workers let go of a store a moment after its volume has gone.
    let end = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        match open_with(&uri, &OpenOptions::default()) {
            Ok(store) => return store,
            Err(error) => assert!(std::time::Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn why(builder: Builder) -> String {
    builder.open().unwrap_err().to_string()
}

/// Leaves `a` dirty with 1, and `b` with 2, if that is wanted.
fn dirty(dir: &Path, markers: bool, names: &[&str]) {
    let mut builder = builder(dir, &[("a", "a.img"), ("b", "b.img")]);
    if markers {
        for name in ["a", "b"] {
            builder = builder.marker(name, at(dir, name));
        }
    }
    let cache = builder.open().unwrap();
    for (name, byte) in [("a", 1), ("b", 2)] {
        if names.contains(&name) {
            cache.volume(name).unwrap().write(0, [byte; 4096]).wait().unwrap();
            cache.volume(name).unwrap().flush().wait().unwrap();
        }
    }
}

fn at(dir: &Path, name: &str) -> MarkerAt {
    MarkerAt::At(dir.join(format!("{name}.marker")).display().to_string())
}

/// With their own stores both have what they had.
fn all_is_there(builder: Builder, dirty: &[(&str, u8)]) {
    let cache = builder.open().unwrap();
    for (name, byte) in dirty {
        let read = cache.volume(name).unwrap().read(0, 4096).wait().unwrap();
        assert!(read.iter().all(|b| b == byte), "{name}");
    }
}

const OWN: [(&str, &str); 2] = [("a", "a.img"), ("b", "b.img")];
const SWAPPED: [(&str, &str); 2] = [("a", "b.img"), ("b", "a.img")];

#[test]
fn volumes_whose_stores_are_swapped_are_refused_and_named() {
    for of in [&["a", "b"][..], &["a"], &["b"]] {
        let dir = TempDir::new().unwrap();
        dirty(dir.path(), false, of);
        let said = why(builder(dir.path(), &SWAPPED));
        assert!(said.contains("of volume 'b' of this cache"), "{said}");
        let all = [("a", 1), ("b", 2)];
        let left: Vec<(&str, u8)> = all.into_iter().filter(|(n, _)| of.contains(n)).collect();
        all_is_there(builder(dir.path(), &OWN), &left);
    }
}

#[test]
fn a_store_that_was_swapped_under_its_marker_is_refused_until_the_operator_vouches_for_it() {
    let dir = TempDir::new().unwrap();
    dirty(dir.path(), true, &["a", "b"]);
    let with = |volumes: &[(&str, &str)]| {
        let builder = builder(dir.path(), volumes);
        builder.marker("a", at(dir.path(), "a")).marker("b", at(dir.path(), "b"))
    };
    let said = why(with(&SWAPPED));
    assert!(said.contains("not the one that it had"), "{said}");
    all_is_there(with(&OWN), &[("a", 1), ("b", 2)]);
    // A whole copy is another file, and may be vouched for.
    std::fs::copy(dir.path().join("a.img"), dir.path().join("copy")).unwrap();
    let copied = [("a", "copy"), ("b", "b.img")];
    let said = why(with(&copied));
    assert!(said.contains("say that the store was moved"), "{said}");
    all_is_there(with(&copied).store_moved("a"), &[("a", 1), ("b", 2)]);
    all_is_there(with(&copied), &[("a", 1), ("b", 2)]);
    assert!(why(with(&OWN)).contains("not the one that it had"));
}

#[test]
fn another_file_at_the_stores_path_with_the_old_marker_beside_it_is_left_alone() {
    let dir = TempDir::new().unwrap();
    dirty(dir.path(), false, &["a"]);
    std::fs::rename(dir.path().join("a.img"), dir.path().join("away")).unwrap();
    std::fs::write(dir.path().join("a.img"), vec![99; BYTES as usize]).unwrap();
    let said = why(builder(dir.path(), &OWN));
    assert!(said.contains("not the one that it had"), "{said}");
    assert!(std::fs::read(dir.path().join("a.img")).unwrap().iter().all(|&b| b == 99));
    std::fs::rename(dir.path().join("away"), dir.path().join("a.img")).unwrap();
    all_is_there(builder(dir.path(), &OWN), &[("a", 1)]);
    // A store that is renamed with its marker is the same one.
    for of in ["a.img", "a.img.larder"] {
        let to = of.replace("a.img", "new.img");
        std::fs::rename(dir.path().join(of), dir.path().join(to)).unwrap();
    }
    all_is_there(builder(dir.path(), &[("a", "new.img"), ("b", "b.img")]), &[("a", 1)]);
}

#[test]
fn without_a_marker_the_cache_knows_its_store_again() {
    let dir = TempDir::new().unwrap();
    let with = |volumes: &[(&str, &str)]| {
        let builder = builder(dir.path(), volumes);
        builder.marker("a", MarkerAt::Nowhere).marker("b", MarkerAt::Nowhere)
    };
    let cache = with(&OWN).open().unwrap();
    cache.volume("a").unwrap().write(0, [1; 4096]).wait().unwrap();
    drop(cache);
    let said = why(with(&SWAPPED));
    assert!(said.contains("not the one that it had"), "{said}");
    all_is_there(with(&OWN), &[("a", 1)]);
}

#[test]
fn what_was_put_aside_is_not_taken_up_over_another_store() {
    for marker in [MarkerAt::Beside, MarkerAt::Nowhere] {
        let dir = TempDir::new().unwrap();
        let of = [("a", "a.img"), ("b", "b.img"), ("c", "c.img")];
        let mut with = builder(dir.path(), &of);
        for (name, _) in of {
            with = with.marker(name, marker.clone());
        }
        let cache = with.open().unwrap();
        for (name, byte) in [("a", 1), ("b", 2)] {
            cache.volume(name).unwrap().write(0, [byte; 4096]).wait().unwrap();
            assert!(cache.detach_dirty(name, &mut |_| true).unwrap());
        }
        let wish = BackWish { back: Some(back()), marker: marker.clone(), ..BackWish::default() };
        let attach =
            |name: &str, of: &str| cache.attach_as(name, open_store(dir.path().join(of)), &wish);
        for _ in 0..2 {
            let said = attach("a", "b.img").unwrap_err().to_string();
            let word = if marker == MarkerAt::Beside { "of volume 'b'" } else { "not the one" };
            assert!(said.contains(word), "{said}");
        }
        let disk = attach("a", "a.img").unwrap();
        assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == 1));
        let disk = attach("b", "b.img").unwrap();
        assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == 2));
    }
}

#[test]
fn a_volume_under_a_new_name_is_told_the_old_one() {
    let dir = TempDir::new().unwrap();
    dirty(dir.path(), false, &["a"]);
    let said = why(builder(dir.path(), &[("vm", "a.img")]));
    assert!(said.contains("serve the store under the name 'a'"), "{said}");
    assert!(!said.contains("not have them any more"), "{said}");
    all_is_there(builder(dir.path(), &OWN), &[("a", 1)]);
}

/// Nothing is dirty, so nothing is refused. The cache must be readable afterwards.
#[test]
fn clean_stores_that_are_swapped_renamed_or_copied_with_their_markers_are_served() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), &OWN).open().unwrap();
    for (name, byte) in [("a", 1), ("b", 2)] {
        cache.volume(name).unwrap().write(0, [byte; 4096]).wait().unwrap();
        assert!(cache.detach(name, &mut |_| true).unwrap());
    }
    drop(cache);
    let swapped = [("a", 2), ("b", 1)];
    for _ in 0..2 {
        all_is_there(builder(dir.path(), &SWAPPED), &swapped);
    }
    let cache = builder(dir.path(), &SWAPPED).open().unwrap();
    for name in ["a", "b"] {
        assert!(cache.detach(name, &mut |_| true).unwrap());
    }
    drop(cache);
    for of in ["a.img", "a.img.larder"] {
        let to = of.replace("a.img", "copy.img");
        std::fs::copy(dir.path().join(of), dir.path().join(to)).unwrap();
    }
    let three = [("a", "b.img"), ("b", "a.img"), ("c", "copy.img")];
    for _ in 0..2 {
        all_is_there(builder(dir.path(), &three), &[("a", 2), ("b", 1), ("c", 1)]);
    }
}

/// A volume that comes to the store of another of this cache has a name of its own for its marker; what lies beside that store has the other's
/// (`Holder::former`).
#[test]
fn clean_journaled_stores_that_are_swapped_are_served_with_the_journals_beside_them() {
    let dir = TempDir::new().unwrap();
    let journaled = |volumes: &[(&str, &str)]| {
        let order = Order::Journaled(Cuts::Flushes);
        let mut with = builder(dir.path(), volumes);
        for (name, _) in volumes {
            with = with.write_back(name, BackConfig { order, ..back() });
        }
        with
    };
    let cache = journaled(&OWN).open().unwrap();
    for (name, byte) in [("a", 1), ("b", 2)] {
        cache.volume(name).unwrap().write(0, [byte; 4096]).wait().unwrap();
        assert!(cache.detach(name, &mut |_| true).unwrap());
    }
    drop(cache);
    for round in 0..2 {
        let cache = journaled(&SWAPPED).open().unwrap();
        for (name, byte, store) in [("a", 2, "b.img"), ("b", 1, "a.img")] {
            let disk = cache.volume(name).unwrap();
            assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == byte), "{name}");
            disk.write(4096, [10 * byte + round; 4096]).wait().unwrap();
            assert!(cache.core().destage(name, &mut |_| true).unwrap());
            assert_eq!(cache.core().back_status(name).unwrap().journal_failure, None);
            let stored = std::fs::read(dir.path().join(store)).unwrap();
            assert!(stored[4096..8192].iter().all(|&b| b == 10 * byte + round), "{name}");
        }
    }
}

#[test]
fn what_is_dirty_of_one_volume_is_not_given_up_with_another() {
    let dir = TempDir::new().unwrap();
    dirty(dir.path(), false, &["a", "b"]);
    let wish = |yes| DiscardWish {
        cache: dir.path().join("cache"),
        volume: "a".into(),
        yes,
        ..DiscardWish::default()
    };
    let store = open_store(dir.path().join("b.img"));
    let said = discard(&wish(true), Some(&*store)).unwrap_err().to_string();
    assert!(said.contains("of volume 'b' of this cache"), "{said}");
    drop(store);
    all_is_there(builder(dir.path(), &OWN), &[("a", 1), ("b", 2)]);
    let store = open_store(dir.path().join("a.img"));
    assert!(discard(&wish(true), Some(&*store)).unwrap().done);
    drop(store);
    all_is_there(builder(dir.path(), &OWN), &[("a", 0), ("b", 2)]);
}

#[test]
fn what_is_dirty_is_given_up_with_no_other_file_than_its_store() {
    let dir = TempDir::new().unwrap();
    dirty(dir.path(), false, &["a"]);
    let wish = |yes, moved| DiscardWish {
        cache: dir.path().join("cache"),
        volume: "a".into(),
        yes,
        moved,
        ..DiscardWish::default()
    };
    let other = dir.path().join("other.img");
    std::fs::write(&other, std::fs::read(dir.path().join("a.img")).unwrap()).unwrap();
    for (marked, why) in [(false, "has none"), (true, "is not the one that it had")] {
        if marked {
            std::fs::copy(dir.path().join("a.img.larder"), dir.path().join("other.img.larder"))
                .unwrap();
        }
        let store = open_store(other.clone());
        // What is only asked is refused as well.
        for yes in [false, true] {
            let said = discard(&wish(yes, false), Some(&*store)).unwrap_err().to_string();
            assert!(said.contains(why), "{said}");
        }
    }
    all_is_there(builder(dir.path(), &OWN), &[("a", 1)]);
    let store = open_store(other);
    assert!(discard(&wish(true, true), Some(&*store)).unwrap().done);
}

#[test]
fn a_store_that_names_another_marker_is_not_recovered_by_what_lies_beside_it() {
    let dir = TempDir::new().unwrap();
    dirty(dir.path(), true, &["a"]);
    let store = open_store(dir.path().join("a.img"));
    let error = recover(&*store, &RecoverWish::default()).unwrap_err();
    if matches!(error, RecoverError::NoMarker(_)) {
        return; // This file system keeps no attributes.
    }
    assert!(matches!(error, RecoverError::Elsewhere { .. }), "{error}");
    assert!(error.to_string().contains("a.marker"), "{error}");
    // The wrong place by name is refused as well, while the other one is there and dirty.
    let place = dir.path().join("a.img.larder").display().to_string();
    let wish = RecoverWish { marker: Some(place), ..RecoverWish::default() };
    assert!(matches!(recover(&*store, &wish), Err(RecoverError::Elsewhere { .. })));
    // Once that is lost it is enough.
    std::fs::remove_file(dir.path().join("a.marker")).unwrap();
    assert!(recover(&*store, &wish).unwrap().recovered);
}

#[test]
fn doing_without_a_marker_does_not_pass_over_one_that_is_dirty() {
    for markers in [false, true] {
        let dir = TempDir::new().unwrap();
        dirty(dir.path(), markers, &["a"]);
        std::fs::rename(dir.path().join("cache"), dir.path().join("away")).unwrap();
        let plain = |back: bool| {
            let of = builder(dir.path(), &[("a", "a.img")]).marker("a", MarkerAt::Nowhere);
            if back { of } else { without_back(dir.path()) }
        };
        for back in [true, false] {
            let said = why(plain(back));
            assert!(said.contains("may hold writes that the store does not have"), "{said}");
        }
    }
}

fn without_back(dir: &Path) -> Builder {
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(1);
    let uri = format!("file:{}", dir.join("a.img").display());
    builder.volume("a", &uri).unwrap().marker("a", MarkerAt::Nowhere)
}

#[test]
fn a_copy_of_a_cache_from_before_a_flush_of_its_volume_is_refused() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), &[("a", "a.img")]).open().unwrap();
    let disk = cache.volume("a").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    disk.flush().wait().unwrap();
    std::fs::copy(dir.path().join("cache"), dir.path().join("copy")).unwrap();
    for _ in 0..2 {
        disk.write(0, [2; 4096]).wait().unwrap();
    }
    assert!(cache.core().destage("a", &mut |_| true).unwrap());
    drop(disk);
    // As if it had been killed: what a stop says is not there.
    std::fs::copy(dir.path().join("a.img.larder"), dir.path().join("marker")).unwrap();
    drop(cache);
    std::fs::copy(dir.path().join("marker"), dir.path().join("a.img.larder")).unwrap();
    std::fs::copy(dir.path().join("copy"), dir.path().join("cache")).unwrap();
    let said = why(builder(dir.path(), &[("a", "a.img")]));
    assert!(said.contains("not of one time"), "{said}");
}

#[test]
fn a_cache_that_holds_what_no_store_has_is_not_formatted_without_a_word_for_that() {
    let dir = TempDir::new().unwrap();
    dirty(dir.path(), false, &["a"]);
    let path = dir.path().join("cache");
    let config = FormatConfig { path, yes: true, ..format_config(&dir, SHAPE, 192 << 20) };
    let said = open::format(&config, [3; 32], UnixSecs(1)).unwrap_err().to_string();
    assert!(said.contains("volume 'a': 4 KiB"), "{said}");
    all_is_there(builder(dir.path(), &OWN), &[("a", 1)]);
    let config = FormatConfig { discard_dirty: true, ..config };
    open::format(&config, [3; 32], UnixSecs(1)).unwrap();
}

/// What it holds cannot be seen: it may be dirty.
#[test]
fn a_device_with_a_write_log_of_a_former_format_is_not_formatted_without_a_word_for_that() {
    use larder_format::block::superblock::{COPY_BYTES, FEATURE_FORMER_WRITE_LOG};
    let dir = TempDir::new().unwrap();
    dirty(dir.path(), false, &["a"]);
    let path = dir.path().join("cache");
    let mut head = std::fs::read(&path).unwrap()[..2 * COPY_BYTES].to_vec();
    for copy in head.chunks_exact_mut(COPY_BYTES) {
        copy[16..24].copy_from_slice(&FEATURE_FORMER_WRITE_LOG.to_le_bytes());
        let crc = crc32c::crc32c(&copy[12..]).to_le_bytes();
        copy[8..12].copy_from_slice(&crc);
    }
    File::options().write(true).open(&path).unwrap().write_all_at(&head, 0).unwrap();
    let config = FormatConfig { path, yes: true, ..format_config(&dir, SHAPE, 192 << 20) };
    let refused = open::format(&config, [3; 32], UnixSecs(1)).unwrap_err();
    assert!(matches!(refused, CacheError::Dirty { .. }), "{refused}");
    let said = refused.to_string();
    assert!(said.contains("write log of a former format"), "{said}");
    let said = why(builder(dir.path(), &OWN));
    assert!(said.contains("write log of a former format"), "{said}");
    assert_eq!(std::fs::read(&config.path).unwrap()[..2 * COPY_BYTES], head, "it is changed");
    let config = FormatConfig { discard_dirty: true, ..config };
    open::format(&config, [3; 32], UnixSecs(1)).unwrap();
}

#[test]
fn a_journal_that_is_the_store_by_another_name_is_refused_and_nothing_of_the_store_is_changed() {
    use crate::block::back::journal::Journal;
    use larder_volume::Timeouts;
    use larder_volume::journal::{Site, Use};
    let dir = TempDir::new().unwrap();
    let read_only = |name: &str| {
        let uri = format!("file:{}", dir.path().join(name).display()).parse().unwrap();
        let options = OpenOptions { read_only: true, lease: false, ..OpenOptions::default() };
        open_with(&uri, &options).unwrap()
    };
    for name in ["disk", "journal"] {
        File::create(dir.path().join(name)).unwrap().set_len(128 << 20).unwrap();
    }
    let own = open_store(dir.path().join("disk"));
    let at = dir.path().join("journal").display().to_string();
    let site = Site::of(&*own, Some(&at)).unwrap();
    let uuid = larder_format::Uuid([7; 16]);
    let mut journal = Journal::open(&site, &[uuid], Use::Make, Timeouts::default()).unwrap();
    journal.is_apart(&*own, [9; 16]).unwrap();
    let (why, left) = journal.is_apart(&*read_only("journal"), [9; 16]).unwrap_err();
    assert!(!left, "the probe is there still");
    assert!(why.contains("the store itself by another name"), "{why}");
    for name in ["disk", "journal"] {
        let bytes = std::fs::read(dir.path().join(name)).unwrap();
        assert!(bytes.iter().all(|&b| b == 0), "{name}");
    }
}

/// The marker is clean: its store has everything, and what an older copy of the cache has is void.
#[test]
fn an_older_copy_of_a_cache_beside_a_clean_marker_is_served_and_nothing_that_it_has_counts() {
    for through in [false, true] {
        let dir = TempDir::new().unwrap();
        let dir = dir.path();
        dirty(dir, false, &["a", "b"]);
        let older = std::fs::read(dir.join("cache")).unwrap();
        let cache = builder(dir, &OWN).open().unwrap();
        for name in ["a", "b"] {
            let volume = cache.volume(name).unwrap();
            volume.write(0, [9; 4096]).wait().unwrap();
            volume.read(0, 4096).wait().unwrap();
            drop(volume);
            assert!(cache.detach(name, &mut |_| true).unwrap());
        }
        drop(cache);
        File::options()
            .write(true)
            .open(dir.join("cache"))
            .unwrap()
            .write_all_at(&older, 0)
            .unwrap();
        for _ in 0..2 {
            let mut builder = Cache::builder(dir.join("cache")).state_dir(dir.join("state"));
            builder = builder.threads(1);
            for (name, store) in OWN {
                let uri = format!("file:{}", dir.join(store).display());
                builder = builder.volume(name, &uri).unwrap();
                builder = if through { builder } else { builder.write_back(name, back()) };
            }
            let cache = builder.open().unwrap();
            for name in ["a", "b"] {
                let read = cache.volume(name).unwrap().read(0, 4096).wait().unwrap();
                assert!(read.iter().all(|&b| b == 9), "{name}, through {through}");
                let status = cache.core().back_status(name);
                assert_eq!(status.map(|status| status.status.dirty), (!through).then_some(0));
            }
        }
    }
}

/// What is said is a way out: nothing is lost by it.
#[test]
fn a_cache_whose_marker_is_lost_is_exported_over_its_store_and_then_given_up() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    dirty(dir, false, &["a"]);
    std::fs::remove_file(dir.join("a.img.larder")).unwrap();
    let said = why(builder(dir, &OWN));
    for word in ["put it back", "export what is dirty over a copy", "discard what it holds"] {
        assert!(said.contains(word), "{said}");
    }
    let (cache, volume) = (dir.join("cache"), "a".to_owned());
    let base = Some(dir.join("a.img"));
    let wish =
        ExportWish { cache: cache.clone(), volume: volume.clone(), file: dir.join("new"), base };
    let done = export(&wish, &mut |_, _| true).unwrap().unwrap();
    assert_eq!((done.bytes, done.unreadable_bytes, done.gap), (4096, 0, false));
    let wish = DiscardWish { cache, volume, yes: true, ..DiscardWish::default() };
    assert!(discard(&wish, Some(&*open_store(dir.join("a.img")))).unwrap().done);
    let image = std::fs::read(dir.join("new")).unwrap();
    File::options().write(true).open(dir.join("a.img")).unwrap().write_all_at(&image, 0).unwrap();
    all_is_there(builder(dir, &OWN), &[("a", 1)]);
}

/// Beside its other name there is no marker, and the store says where it is.
#[test]
fn a_store_by_another_name_is_refused_and_the_place_of_its_marker_is_named() {
    let dir = TempDir::new().unwrap();
    let dir = dir.path();
    dirty(dir, false, &["a"]);
    std::fs::hard_link(dir.join("a.img"), dir.join("second.img")).unwrap();
    for (name, store) in [("a", "second.img"), ("other", "second.img")] {
        let mut builder = builder(dir, &[(name, store), ("b", "b.img")]);
        if name == "other" {
            builder = Cache::builder(dir.join("other")).create(ByteSize::mib(192));
            builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state2")).threads(1);
            let uri = format!("file:{}", dir.join(store).display());
            builder = builder.volume(name, &uri).unwrap().write_back(name, back());
        }
        let said = why(builder);
        let named = format!("says that its marker is '{}'", dir.join("a.img.larder").display());
        assert!(said.contains(&named), "{said}");
    }
}
