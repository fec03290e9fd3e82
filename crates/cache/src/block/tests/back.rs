//! Volumes that write back, through the library: what is written is read back before it is in the store, after a stop, and from the store in the
//! end; the marker beside the store says who may serve it.

use std::path::Path;

use larder_base::Rng;

use super::*;
use crate::block::back::{Age, BackConfig, Cuts, Grain, MarkerAt, Order, Pace};
use crate::block::{Builder, Cache};

const BYTES: u64 = 8 << 20;

pub(super) fn builder(dir: &Path, back: Option<BackConfig>) -> Builder {
    let path = dir.join("disk");
    if !path.exists() {
        File::create(&path).unwrap().set_len(BYTES).unwrap();
    }
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(2);
    let builder = builder.volume("disk", &format!("file:{}", path.display())).unwrap();
    match back {
        Some(back) => builder.write_back("disk", back),
        None => builder,
    }
}

pub(super) fn ordered(pace: Pace) -> BackConfig {
    BackConfig { order: Order::Ordered(Grain::Flush), pace, ..BackConfig::default() }
}

fn store(dir: &Path) -> Vec<u8> {
    std::fs::read(dir.join("disk")).unwrap()
}

#[test]
fn what_is_written_back_is_read_at_once_and_comes_to_the_store_when_it_is_wanted_there() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(4096, [7; 8192]).wait().unwrap();
    disk.write(5000, [8; 100]).wait().unwrap();
    disk.flush().wait().unwrap();
    let mut wanted = vec![0u8; 16384];
    wanted[4096..12288].fill(7);
    wanted[5000..5100].fill(8);
    assert!(disk.read(0, 16384).wait().unwrap()[..] == wanted[..]);
    assert!(store(dir.path()).iter().all(|&b| b == 0), "nothing is in the store yet");
    let status = cache.core().back_status("disk").unwrap();
    assert_eq!(status.status.dirty, 8192);
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert!(store(dir.path())[..16384] == wanted[..]);
    assert_eq!(cache.core().back_status("disk").unwrap().status.dirty, 0);
    assert!(disk.read(0, 16384).wait().unwrap()[..] == wanted[..]);
}

#[test]
fn dirty_data_is_data_and_dirty_zeros_are_no_hole() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    for at in 0..4 {
        disk.write(65536 + at * 4096, [1; 4096]).wait().unwrap();
    }
    disk.zero(65536 + 16384, 4096).wait().unwrap();
    let extents = disk.status(0, 1 << 20).wait().unwrap();
    let said: Vec<_> = extents.iter().map(|e| (e.len, e.hole, e.zero)).collect();
    let rest = (1 << 20) - 65536 - 5 * 4096;
    let wanted =
        [(65536, true, true), (16384, false, false), (4096, false, true), (rest, true, true)];
    assert_eq!(said, wanted);
}

/// A line that is only written is not worth a place; one that was read while it was dirty is asked for again, and lies on flash already.
#[test]
fn lines_that_were_read_while_dirty_are_cached_when_the_store_has_them() {
    let dir = TempDir::new().unwrap();
    let builder = builder(dir.path(), Some(ordered(Pace::AtBound)));
    let cache = builder.admission("all").open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 1 << 16]).wait().unwrap();
    disk.write(1 << 20, [2; 1 << 16]).wait().unwrap();
    assert!(disk.read(1 << 20, 1 << 16).wait().unwrap().iter().all(|&b| b == 2));
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    let hits = |at: u64, byte: u8| {
        let before = cache.stats().engine.read_hits;
        assert!(disk.read(at, 1 << 16).wait().unwrap().iter().all(|&b| b == byte));
        cache.stats().engine.read_hits - before
    };
    assert_eq!(hits(0, 1), 0, "nobody had read it");
    let end = std::time::Instant::now() + Duration::from_secs(20);
    while hits(1 << 20, 2) == 0 {
        assert!(std::time::Instant::now() < end, "what was read while it was dirty is not cached");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn dirty_data_is_there_after_a_stop_and_until_its_cache_is_given_up() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    disk.zero(4096, 4096).wait().unwrap();
    disk.write(8192, [3; 512]).wait().unwrap();
    drop((disk, cache));
    // Without write-back it is refused: its store is older.
    let why = builder(dir.path(), None).open().err().unwrap().to_string();
    assert!(why.contains("hold writes of it") && why.contains("back:ordered"), "{why}");
    for _ in 0..2 {
        let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        let read = disk.read(0, 12288).wait().unwrap();
        assert!(read[..4096].iter().all(|&b| b == 1) && read[8192..8704].iter().all(|&b| b == 3));
        assert_eq!(cache.core().back_status("disk").unwrap().status.dirty, 8704);
    }
    // Another cache is refused as well.
    std::fs::rename(dir.path().join("cache"), dir.path().join("away")).unwrap();
    let why = builder(dir.path(), None).open().err().unwrap().to_string();
    assert!(why.contains("have its store recovered"), "{why}");
    std::fs::rename(dir.path().join("away"), dir.path().join("cache")).unwrap();
    let cache = builder(dir.path(), Some(ordered(Pace::Async))).open().unwrap();
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert!(store(dir.path())[..4096].iter().all(|&b| b == 1));
    assert!(cache.detach("disk", &mut |_| true).unwrap());
    drop(cache);
    let cache = builder(dir.path(), None).open().unwrap();
    let read = cache.volume("disk").unwrap().read(0, 12288).wait().unwrap();
    assert!(read[..4096].iter().all(|&b| b == 1) && read[8192..8704].iter().all(|&b| b == 3));
}

#[test]
fn random_operations_are_what_a_plain_file_would_have_done() {
    for (seed, order) in
        [Order::Any, Order::Ordered(Grain::Flush), Order::Ordered(Grain::Completion)]
            .into_iter()
            .enumerate()
    {
        let dir = TempDir::new().unwrap();
        let mut plain = vec![0u8; BYTES as usize];
        let mut rng = Rng::new(seed as u64);
        for round in 0..4 {
            let pace = if round % 2 == 0 { Pace::Async } else { Pace::AtBound };
            let config = BackConfig {
                order,
                pace,
                dirty_max: Some(ByteSize::mib(16)),
                ..BackConfig::default()
            };
            let cache = builder(dir.path(), Some(config)).open().unwrap();
            let disk = cache.volume("disk").unwrap();
            for _ in 0..150 {
                let at = rng.below(BYTES / 512) * 512;
                let most = if rng.chance(0.05) { 1 << 20 } else { 24 << 10 };
                let len = ((1 + rng.below(most / 512)) * 512).min(BYTES - at);
                let range = at as usize..(at + len) as usize;
                match rng.below(10) {
                    0..5 => {
                        let byte = rng.next_u64() as u8;
                        plain[range].fill(byte);
                        disk.write(at, vec![byte; len as usize]).wait().unwrap();
                    }
                    5 => {
                        plain[range].fill(0);
                        disk.zero(at, len).wait().unwrap();
                    }
                    6 => disk.flush().wait().unwrap(),
                    _ => {
                        let read = disk.read(at, len as usize).wait().unwrap();
                        assert!(read[..] == plain[range], "{order:?} round {round} at {at}");
                    }
                }
            }
            if round == 3 {
                assert!(cache.core().destage("disk", &mut |_| true).unwrap());
                assert!(store(dir.path()) == plain, "{order:?}");
            }
        }
    }
}

#[test]
fn a_volume_without_a_marker_says_so_or_does_without() {
    let dir = TempDir::new().unwrap();
    let back = builder(dir.path(), Some(ordered(Pace::Async)));
    let cache = back.marker("disk", MarkerAt::Nowhere).open().unwrap();
    cache.volume("disk").unwrap().write(0, [1; 4096]).wait().unwrap();
    drop(cache);
    assert!(!dir.path().join("disk.larder").exists());
}

/// The cache is lost at a random moment: store and journal together are what the volume was at a flush, or where an epoch had to end elsewhere.
#[test]
fn a_journaled_store_is_a_cut_whenever_its_cache_is_lost() {
    const LINES: u64 = 32;
    for seed in 0..12 {
        let dir = TempDir::new().unwrap();
        let mut rng = Rng::new(seed);
        let order = Order::Journaled(crate::block::back::Cuts::Flushes);
        let config = BackConfig { order, pace: Pace::Async, ..BackConfig::default() };
        let cache = builder(dir.path(), Some(config)).threads(0).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        let done = |pending: crate::block::Pending<()>| {
            while !pending.is_done() {
                cache.turn().unwrap();
            }
            pending.wait().unwrap();
        };
        let mut plain = vec![0u8; (LINES * 4096) as usize];
        let mut cuts = vec![plain.clone()];
        for _ in 0..rng.range(20, 200) {
            let (line, byte) = (rng.below(LINES), rng.next_u64() as u8);
            let range = (line * 4096) as usize..((line + 1) * 4096) as usize;
            if rng.chance(0.1) {
                plain[range].fill(0);
                done(disk.zero(line * 4096, 4096));
            } else {
                plain[range].fill(byte);
                done(disk.write(line * 4096, [byte; 4096]));
            }
            if rng.chance(0.2) {
                done(disk.flush());
                cuts.push(plain.clone());
            }
            for _ in 0..rng.below(6) {
                cache.turn().unwrap();
            }
            if rng.chance(0.1) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let status = cache.core().back_status("disk").unwrap();
        let marker = std::fs::read(dir.path().join("disk.larder")).unwrap();
        let [a, b] = [&marker[..4096], &marker[4096..8192]];
        let marker = larder_format::block::marker::choose(a, b).unwrap().marker;
        // Before anything ends in good order.
        let image = std::fs::read(dir.path().join("disk")).unwrap();
        let path = dir.path().join("disk.larder.journal");
        let journal = std::fs::read(&path).unwrap();
        drop((disk, cache));
        std::fs::write(dir.path().join("disk"), image).unwrap();
        std::fs::write(&path, journal).unwrap();
        let uri: Uri = format!("file:{}", dir.path().join("disk").display()).parse().unwrap();
        let options = OpenOptions { watch: false, ..OpenOptions::default() };
        let backing = backing::open_with(&uri, &options).unwrap();
        let of = crate::block::back::journal::Of {
            volume: marker.volume,
            cache: marker.cache,
            generation: marker.generation,
        };
        let site = larder_volume::journal::Site::of(&*backing, None).unwrap();
        let for_use = larder_volume::journal::Use::Apply;
        let journal = crate::block::back::journal::Journal::open(
            &site,
            &[marker.volume],
            for_use,
            larder_volume::Timeouts::default(),
        );
        let applied = journal.unwrap().apply(of, &*backing).unwrap();
        let left = store(dir.path());
        let at = cuts.iter().rposition(|cut| left[..plain.len()] == cut[..]);
        assert!(at.is_some(), "seed {seed}: {applied:?} {status:?}");
    }
}

/// A cache that was left with dirty data: a write of 20 KiB, parts of which are hidden by a shorter one, zeros and a trim.
fn left_dirty(dir: &Path) -> Vec<u8> {
    let cache = builder(dir, Some(ordered(Pace::AtBound))).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(1 << 20, [0xa5; 20480]).wait().unwrap();
    disk.write((1 << 20) + 5000, [0x5a; 1000]).wait().unwrap();
    disk.zero((1 << 20) + 8192, 512).wait().unwrap();
    disk.write(4 << 20, [0xc3; 4096]).wait().unwrap();
    disk.trim(4 << 20, 512).wait().unwrap();
    disk.flush().wait().unwrap();
    drop((disk, cache));
    let mut wanted = vec![0u8; BYTES as usize];
    let mut fill = |at: usize, len: usize, byte| wanted[at..at + len].fill(byte);
    fill(1 << 20, 20480, 0xa5);
    fill((1 << 20) + 5000, 1000, 0x5a);
    fill((1 << 20) + 8192, 512, 0);
    fill(4 << 20, 4096, 0xc3);
    fill(4 << 20, 512, 0);
    wanted
}

/// Where these bytes lie in the cache's file.
fn find(dir: &Path, bytes: &[u8]) -> u64 {
    let cache = std::fs::read(dir.join("cache")).unwrap();
    cache.windows(bytes.len()).position(|found| found == bytes).unwrap() as u64
}

fn rot(dir: &Path, at: u64) {
    let file = File::options().write(true).open(dir.join("cache")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[0xff], at).unwrap();
}

fn wish(dir: &Path, file: &str, base: Option<&str>) -> crate::block::back::offline::ExportWish {
    crate::block::back::offline::ExportWish {
        cache: dir.join("cache"),
        volume: "disk".into(),
        file: dir.join(file),
        base: base.map(|base| dir.join(base)),
    }
}

#[test]
fn dirty_data_of_a_cache_that_is_not_in_use_is_verified_without_its_store() {
    let dir = TempDir::new().unwrap();
    left_dirty(dir.path());
    std::fs::remove_file(dir.path().join("disk")).unwrap();
    let look = || {
        let found = crate::block::inspect::inspect(&dir.path().join("cache"), &mut |_, _| true);
        found.unwrap()
    };
    let found = look();
    assert_eq!(found.faulty(), 0, "{found:?}");
    let log = found.dirty_data.unwrap();
    let [disk] = &log.volumes[..] else { panic!("{log:?}") };
    assert_eq!((disk.bytes, disk.records, disk.sequences), (24576, 5, Some((1, 5))));
    assert!(!disk.gap);
    assert_eq!(log.looked_at, 20480 + 1000 + 4096);
    // Rot in the second piece of the first write, of which two stretches show; the batch is in the tail or known durable.
    let at = find(dir.path(), &[0xa5; 20480]) + 4096;
    rot(dir.path(), at);
    let found = look();
    let log = found.dirty_data.as_ref().unwrap();
    // Rot in the last batches of a log cannot be told from its end.
    let [disk] = &log.volumes[..] else { return assert_eq!(found.faulty(), 0) };
    if disk.records < 5 && !disk.gap {
        return;
    }
    assert!(found.faulty() > 0);
    if disk.sequences == Some((1, 5)) {
        let at: Vec<(Option<u64>, u64)> = log.faults.iter().map(|f| (f.offset, f.bytes)).collect();
        let first = 1 << 20;
        assert_eq!(at, [(Some(first + 4096), 904), (Some(first + 6000), 2192)]);
        assert!(log.faults.iter().all(|f| f.volume == "disk" && f.sequence == 1));
        assert!(log.faults[0].remedy.contains("export"));
    } else {
        assert!(disk.gap, "{log:?}");
    }
}

#[test]
fn what_is_dirty_is_exported_at_its_offsets_alone_or_over_an_image() {
    let dir = TempDir::new().unwrap();
    let wanted = left_dirty(dir.path());
    let before = std::fs::read(dir.path().join("cache")).unwrap();
    let export = |file, base| {
        let wish = wish(dir.path(), file, base);
        crate::block::back::offline::export(&wish, &mut |_, _| true)
    };
    let done = export("alone", None).unwrap().unwrap();
    assert_eq!((done.bytes, done.zeros, done.extents, done.last), (24576, 1024, 2, 5));
    assert!(std::fs::read(dir.path().join("alone")).unwrap() == wanted);
    let why = export("alone", None).unwrap_err().to_string();
    assert!(why.contains("there already"), "{why}");
    let mut base = vec![7u8; BYTES as usize];
    std::fs::write(dir.path().join("image"), &base).unwrap();
    export("whole", Some("image")).unwrap().unwrap();
    for range in [(1 << 20)..(1 << 20) + 20480, (4 << 20)..(4 << 20) + 4096] {
        base[range.clone()].copy_from_slice(&wanted[range]);
    }
    assert!(std::fs::read(dir.path().join("whole")).unwrap() == base);
    // Whoever asked has gone: nothing is left.
    let gone = wish(dir.path(), "gone", None);
    assert!(crate::block::back::offline::export(&gone, &mut |_, _| false).unwrap().is_none());
    let names = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name());
    assert!(!names.into_iter().any(|name| name.to_string_lossy().starts_with("gone")));
    let other = crate::block::back::offline::ExportWish { volume: "other".into(), ..gone };
    let why =
        crate::block::back::offline::export(&other, &mut |_, _| true).unwrap_err().to_string();
    assert!(why.contains("it knows disk"), "{why}");
    assert!(std::fs::read(dir.path().join("cache")).unwrap() == before, "it was changed");
}

#[test]
fn an_export_lists_what_rots_and_keeps_the_rest() {
    let dir = TempDir::new().unwrap();
    let wanted = left_dirty(dir.path());
    // A start makes all that it found known durable: what rots then is damage, and no torn tail.
    drop(builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap());
    let at = find(dir.path(), &[0xa5; 20480]) + 4096;
    rot(dir.path(), at);
    let wish = wish(dir.path(), "out", None);
    let done = crate::block::back::offline::export(&wish, &mut |_, _| true).unwrap().unwrap();
    let first = 1 << 20;
    assert_eq!(done.unreadable_bytes, 904 + 2192, "{done:?}");
    let lost: Vec<(u64, u64)> = done.unreadable.iter().map(|s| (s.offset, s.bytes)).collect();
    assert_eq!(lost, [(first + 4096, 904), (first + 6000, 2192)]);
    let mut wanted = wanted;
    for (at, bytes) in lost {
        wanted[at as usize..(at + bytes) as usize].fill(0);
    }
    assert!(std::fs::read(dir.path().join("out")).unwrap() == wanted);
}

#[test]
fn an_explanation_says_what_of_a_line_is_dirty_and_since_when() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(4096, [1; 4096]).wait().unwrap();
    std::thread::sleep(Duration::from_millis(30));
    disk.write(4096, [2; 512]).wait().unwrap();
    disk.write(8192 + 512, [3; 512]).wait().unwrap();
    let dirty = |at| cache.core().explain("disk", at).unwrap().dirty.unwrap();
    assert_eq!(dirty(0), crate::block::DirtyOf::default());
    // The first write still shows, behind the second.
    let (old, young) = (dirty(5000), dirty(8192));
    assert_eq!((old.bytes, young.bytes), (4096, 512));
    // Times are kept to the millisecond.
    assert!(old.for_seconds.unwrap() >= young.for_seconds.unwrap() + 0.028, "{old:?} {young:?}");
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert_eq!(dirty(5000), crate::block::DirtyOf::default());
}

#[test]
fn a_write_log_that_cannot_be_leaves_no_file_behind() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("cache");
    let config = FormatConfig {
        write_log: Some(ByteSize(10 << 20)),
        ..format_config(&dir, SHAPE, 64 << 20)
    };
    let why = open::format(&config, [3; 32], UnixSecs(1)).unwrap_err().to_string();
    assert!(why.contains("too few"), "{why}");
    assert!(!path.exists());
}

fn backing(dir: &Path) -> Box<dyn backing::Backing> {
    let uri: Uri = format!("file:{}", dir.join("disk").display()).parse().unwrap();
    let options = OpenOptions { watch: false, ..OpenOptions::default() };
    super::backing::open_with(&uri, &options).unwrap()
}

pub(super) fn wishes(back: BackConfig) -> crate::block::back::BackWish {
    crate::block::back::BackWish { back: Some(back), ..Default::default() }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    std::fs::copy(from.join("cache"), to.join("cache")).unwrap();
}

/// Moves a store with its marker, and its cache, to another place: as another host would have them.
fn moves(from: &Path, to: &Path) {
    for name in ["disk", "disk.larder", "cache"] {
        std::fs::rename(from.join(name), to.join(name)).unwrap();
    }
}

#[test]
fn a_volume_that_was_put_aside_with_what_is_dirty_is_taken_up_elsewhere_and_a_copy_counts_no_more()
{
    for order in [Order::Any, Order::Ordered(Grain::Flush)] {
        let back = || BackConfig { age: None, order, pace: Pace::AtBound, dirty_max: None };
        let (dir, other, copied) =
            (TempDir::new().unwrap(), TempDir::new().unwrap(), TempDir::new().unwrap());
        let cache = builder(dir.path(), Some(back())).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        disk.write(0, [1; 8192]).wait().unwrap();
        disk.zero(4096, 512).wait().unwrap();
        disk.write(1 << 20, [2; 1024]).wait().unwrap();
        drop(disk);
        assert!(cache.detach_dirty("disk", &mut |_| true).unwrap());
        let aside = cache.core().put_aside();
        assert_eq!(aside[0].carried_bytes, Some(8192 + 1024), "{aside:?}");
        let why = cache.core().forget("disk", &mut || true).unwrap_err().to_string();
        assert!(why.contains("its store does not have"), "{why}");
        assert!(store(dir.path()).iter().all(|&b| b == 0));
        drop(cache);
        let found = crate::block::inspect::inspect(&dir.path().join("cache"), &mut |_, _| true);
        let found = found.unwrap();
        assert!(found.volumes[0].write_back.as_ref().unwrap().carried, "{found:?}");
        let dirty = &found.dirty_data.as_ref().unwrap().volumes[0];
        assert_eq!((dirty.bytes, dirty.records), (8192 + 1024, 3));
        // Nobody else may have it, nor this one write through.
        copy(dir.path(), copied.path());
        let why = builder(dir.path(), None).open().err().unwrap().to_string();
        assert!(why.contains("this cache may hold writes of it"), "{why}");
        moves(dir.path(), other.path());
        for round in 0..3u8 {
            let cache = builder(other.path(), Some(back())).open().unwrap();
            let disk = cache.volume("disk").unwrap();
            let read = disk.read(0, 8192).wait().unwrap();
            assert!(read[..4096].iter().all(|&b| b == 1), "{order:?} {round}");
            assert!(read[4096..4608].iter().all(|&b| b == 0) && read[4608] == 1);
            let read = disk.read(1 << 20, 1024).wait().unwrap();
            assert!(read.iter().all(|&b| b == if round == 0 { 2 } else { 2 + round }));
            disk.write(1 << 20, [3 + round; 1024]).wait().unwrap();
            drop(disk);
            if round == 1 {
                // Once more.
                assert!(cache.detach_dirty("disk", &mut |_| true).unwrap());
            }
        }
        // The copy was made before it was taken up.
        std::fs::rename(other.path().join("cache"), other.path().join("right")).unwrap();
        std::fs::copy(copied.path().join("cache"), other.path().join("cache")).unwrap();
        let why = builder(other.path(), Some(back())).open().err().unwrap().to_string();
        assert!(why.contains("recovered"), "{why}");
        std::fs::rename(other.path().join("right"), other.path().join("cache")).unwrap();
        let cache = builder(other.path(), Some(back())).open().unwrap();
        assert!(cache.core().destage("disk", &mut |_| true).unwrap());
        assert!(store(other.path())[1 << 20..][..1024].iter().all(|&b| b == 5));
        assert!(store(other.path())[..4096].iter().all(|&b| b == 1));
    }
}

#[test]
fn a_volume_put_aside_with_what_is_dirty_stays_in_a_log_that_others_fill_and_comes_back() {
    let dir = TempDir::new().unwrap();
    let more = dir.path().join("more");
    File::create(&more).unwrap().set_len(BYTES).unwrap();
    let both = || {
        let more = format!("file:{}", more.display());
        let builder = builder(dir.path(), Some(ordered(Pace::AtBound)));
        builder.volume("more", &more).unwrap().write_back("more", ordered(Pace::Async))
    };
    let cache = both().open().unwrap();
    let disk = cache.volume("disk").unwrap();
    for i in 0..64u64 {
        disk.write(i * 8192, [i as u8 + 1; 4096]).wait().unwrap();
    }
    drop(disk);
    assert!(cache.detach_dirty("disk", &mut |_| true).unwrap());
    // All of the log several times: what was put aside is copied out of the way.
    let fill = |cache: &Cache| {
        let more = cache.volume("more").unwrap();
        for i in 0..600u64 {
            more.write(i % 16 * (256 << 10), vec![i as u8; 256 << 10]).wait().unwrap();
        }
    };
    fill(&cache);
    let check = |cache: &Cache| {
        let disk = cache.volume("disk").unwrap();
        for i in 0..64u64 {
            let read = disk.read(i * 8192, 4096).wait().unwrap();
            assert!(read.iter().all(|&b| b == i as u8 + 1), "{i}");
        }
    };
    // In the same run.
    let disk = cache.attach_as("disk", backing(dir.path()), &wishes(ordered(Pace::AtBound)));
    drop(disk.unwrap());
    check(&cache);
    assert!(cache.detach_dirty("disk", &mut |_| true).unwrap());
    drop(cache);
    // A start that does not have it keeps it.
    let only = Cache::builder(dir.path().join("cache")).state_dir(dir.path().join("state"));
    let only = only.threads(2).volume("more", &format!("file:{}", more.display())).unwrap();
    let cache = only.write_back("more", ordered(Pace::Async)).open().unwrap();
    assert_eq!(cache.core().put_aside()[0].carried_bytes, Some(64 * 4096));
    fill(&cache);
    drop(cache);
    let cache = both().open().unwrap();
    check(&cache);
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    for i in 0..64usize {
        assert!(store(dir.path())[i * 8192..][..4096].iter().all(|&b| b == i as u8 + 1));
    }
}

#[test]
fn a_journaled_volume_is_taken_up_with_the_journal_that_it_left() {
    let dir = TempDir::new().unwrap();
    let order = Order::Journaled(crate::block::back::Cuts::Flushes);
    let back = || BackConfig { age: None, order, pace: Pace::Async, dirty_max: None };
    let mut rng = Rng::new(7);
    let mut plain = vec![0u8; BYTES as usize];
    for round in 0..4 {
        let cache = builder(dir.path(), Some(back())).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        assert!(disk.read(0, 1 << 20).wait().unwrap()[..] == plain[..1 << 20], "{round}");
        for _ in 0..50 {
            let (line, byte) = (rng.below(256), rng.next_u64() as u8);
            plain[(line * 4096) as usize..][..4096].fill(byte);
            disk.write(line * 4096, [byte; 4096]).wait().unwrap();
            if rng.chance(0.2) {
                disk.flush().wait().unwrap();
            }
        }
        drop(disk);
        assert!(cache.detach_dirty("disk", &mut |_| true).unwrap());
    }
    let cache = builder(dir.path(), Some(back())).open().unwrap();
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert!(store(dir.path()) == plain);
}

/// Four threads write, read and flush, each its own part of the volume, while it changes over again and again. What was answered is read; in
/// the end all of it is in the store.
#[test]
fn a_volume_changes_over_under_load_and_nothing_is_lost() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), None).open().unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    const PART: u64 = 1 << 20;
    let parts: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4u64)
            .map(|n| {
                let (disk, stop) = (cache.volume("disk").unwrap(), &stop);
                scope.spawn(move || {
                    let mut rng = Rng::new(n);
                    let mut part = vec![0u8; PART as usize];
                    while !stop.load(Ordering::Relaxed) {
                        let at = rng.below(PART / 512) * 512;
                        let len = ((1 + rng.below(16)) * 512).min(PART - at);
                        let range = at as usize..(at + len) as usize;
                        match rng.below(8) {
                            0..4 => {
                                let byte = rng.next_u64() as u8;
                                part[range].fill(byte);
                                disk.write(n * PART + at, vec![byte; len as usize]).wait().unwrap();
                            }
                            4 => {
                                part[range].fill(0);
                                disk.zero(n * PART + at, len).wait().unwrap();
                            }
                            5 => disk.flush().wait().unwrap(),
                            _ => {
                                let read = disk.read(n * PART + at, len as usize).wait().unwrap();
                                assert!(read[..] == part[range], "client {n} at {at}");
                            }
                        }
                    }
                    part
                })
            })
            .collect();
        let orders = [
            ordered(Pace::Async),
            ordered(Pace::AtBound),
            BackConfig { order: Order::Any, ..ordered(Pace::Async) },
            BackConfig {
                order: Order::Journaled(crate::block::back::Cuts::Flushes),
                ..ordered(Pace::Async)
            },
        ];
        let through = crate::block::back::BackWish::default();
        for back in orders.iter().cycle().take(12) {
            assert!(cache.change_over("disk", &wishes(back.clone()), &mut |_| true).unwrap());
            let status = cache.core().back_status("disk").unwrap();
            assert_eq!(status.config.order, back.order);
            std::thread::sleep(Duration::from_millis(60));
            assert!(cache.change_over("disk", &through, &mut |_| true).unwrap());
            assert!(cache.core().back_status("disk").is_none());
            std::thread::sleep(Duration::from_millis(30));
        }
        stop.store(true, Ordering::Relaxed);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    for (n, part) in parts.iter().enumerate() {
        assert!(store(dir.path())[n * PART as usize..][..PART as usize] == part[..], "client {n}");
    }
    // It was not remembered, and its marker is clean.
    drop(cache);
    let cache = builder(dir.path(), None).open().unwrap();
    // What is so already is done.
    let done = cache.change_over("disk", &crate::block::back::BackWish::default(), &mut |_| true);
    assert!(done.unwrap());
}

#[test]
fn a_volume_that_changed_over_is_found_so_after_a_kill() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), None).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    assert!(cache.change_over("disk", &wishes(ordered(Pace::AtBound)), &mut |_| true).unwrap());
    disk.write(0, [2; 4096]).wait().unwrap();
    drop((disk, cache));
    assert!(store(dir.path())[..4096].iter().all(|&b| b == 1));
    let why = builder(dir.path(), None).open().err().unwrap().to_string();
    assert!(why.contains("this cache may hold writes of it"), "{why}");
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let read = cache.volume("disk").unwrap().read(0, 4096).wait().unwrap();
    assert!(read.iter().all(|&b| b == 2));
    // Whoever asked waits no longer: it is as it was.
    let through = crate::block::back::BackWish::default();
    let done = cache.change_over("disk", &through, &mut |_| false).unwrap();
    if !done {
        assert!(cache.core().back_status("disk").is_some());
    }
    cache.volume("disk").unwrap().write(0, [3; 4096]).wait().unwrap();
    let read = cache.volume("disk").unwrap().read(0, 4096).wait().unwrap();
    assert!(read.iter().all(|&b| b == 3));
}

#[test]
fn a_mark_is_durable_when_it_is_answered_and_known_after_a_restart_and_in_the_marker() {
    let dir = TempDir::new().unwrap();
    let last = |cache: &Cache| {
        let status = cache.core().back_status("disk").unwrap();
        let stored = status.stored_mark == status.last_mark;
        status.last_mark.map(|name| (name, stored))
    };
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    assert_eq!(last(&cache), None);
    disk.consistency_point("before the move").unwrap();
    disk.consistency_point("nightly").unwrap();
    let status = cache.core().back_status("disk").unwrap().status;
    assert_eq!((status.dirty, status.positions), (4096, [0, 3, 2, 3]));
    assert_eq!(last(&cache), Some(("nightly".into(), false)));
    disk.write(0, [2; 512]).wait().unwrap();
    let why = disk.consistency_point("").unwrap_err().to_string();
    assert!(why.contains("1 to 255 bytes"), "{why}");
    assert!(disk.consistency_point(&"x".repeat(256)).is_err());
    drop((disk, cache));
    // Neither is taken for a write.
    let found =
        crate::block::inspect::inspect(&dir.path().join("cache"), &mut |_, _| true).unwrap();
    assert_eq!((found.faulty(), found.dirty_data.unwrap().volumes[0].bytes), (0, 4096));
    let cache = builder(dir.path(), Some(ordered(Pace::AtBound))).open().unwrap();
    assert_eq!(last(&cache), Some(("nightly".into(), false)));
    let read = cache.volume("disk").unwrap().read(0, 4096).wait().unwrap();
    assert!(read[..512].iter().all(|&b| b == 2) && read[512..].iter().all(|&b| b == 1));
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert_eq!(last(&cache), Some(("nightly".into(), true)));
    assert!(store(dir.path())[..512].iter().all(|&b| b == 2));
    assert!(cache.detach("disk", &mut |_| true).unwrap());
    let marker = std::fs::read(dir.path().join("disk.larder")).unwrap();
    let [a, b] = [&marker[..4096], &marker[4096..8192]];
    let marker = larder_format::block::marker::choose(a, b).unwrap().marker;
    assert_eq!(marker.mark.as_deref(), Some("nightly"));
}

#[test]
fn a_volume_that_writes_through_has_no_marks() {
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), None).open().unwrap();
    let why = cache.volume("disk").unwrap().consistency_point("a").unwrap_err().to_string();
    assert!(why.contains("does not write back"), "{why}");
}

/// The cache is lost at a random moment: what `recover` makes of store and journal is what the volume was at the mark that it names.
#[test]
fn where_marks_alone_count_a_recovered_store_is_at_the_mark_that_is_named() {
    const LINES: u64 = 32;
    let (mut marked, mut unmarked) = (0, 0);
    for seed in 0..24 {
        let dir = TempDir::new().unwrap();
        let mut rng = Rng::new(seed);
        let order = Order::Journaled(Cuts::Marks);
        let config = BackConfig { order, ..BackConfig::default() };
        let cache = builder(dir.path(), Some(config)).threads(0).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        let done = |pending: crate::block::Pending<()>| {
            while !pending.is_done() {
                cache.turn().unwrap();
            }
            pending.wait().unwrap();
        };
        let mut plain = vec![0u8; (LINES * 4096) as usize];
        let mut marks = vec![plain.clone()];
        for _ in 0..rng.range(20, 150) {
            let (line, byte) = (rng.below(LINES), rng.next_u64() as u8);
            plain[(line * 4096) as usize..((line + 1) * 4096) as usize].fill(byte);
            done(disk.write(line * 4096, [byte; 4096]));
            if rng.chance(0.2) {
                done(disk.flush());
            }
            if rng.chance(0.1) {
                marks.push(plain.clone());
                let sequence = disk.consistency_point(&(marks.len() - 1).to_string()).unwrap();
                assert!(sequence > 0);
            }
            for _ in 0..rng.below(6) {
                cache.turn().unwrap();
            }
            if rng.chance(0.1) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        cache.core().look_at_marker(&cache.core().volume("disk").unwrap(), true);
        let files = ["disk", "disk.larder", "disk.larder.journal"];
        let lost = files.map(|name| std::fs::read(dir.path().join(name)).unwrap());
        let status = cache.core().back_status("disk").unwrap();
        assert_eq!((status.status.missed_marks, status.status.off_mark), (0, false));
        drop((disk, cache));
        for (name, bytes) in files.iter().zip(lost) {
            std::fs::write(dir.path().join(name), bytes).unwrap();
        }
        let uri: Uri = format!("file:{}", dir.path().join("disk").display()).parse().unwrap();
        let options = OpenOptions { watch: false, ..OpenOptions::default() };
        let backing = backing::open_with(&uri, &options).unwrap();
        let told = crate::block::back::recover(&*backing, &Default::default()).unwrap();
        assert!(told.recovered, "{told:?}");
        let at: usize = told.mark.as_deref().map_or(0, |name| name.parse().unwrap());
        let left = store(dir.path());
        assert!(left[..plain.len()] == marks[at][..], "seed {seed}: {told:?} {status:?}");
        *(if at > 0 { &mut marked } else { &mut unmarked }) += 1;
    }
    assert!(marked > 10 && unmarked < 12, "{marked} of them had a mark");
}

#[test]
fn without_a_mark_nothing_is_destaged_unless_somebody_asks_for_all() {
    let dir = TempDir::new().unwrap();
    let order = Order::Journaled(Cuts::Marks);
    let age = Some(Age { most: larder_base::Nanos::from_millis(100), hard: false });
    let config = BackConfig { order, age, ..BackConfig::default() };
    let cache = builder(dir.path(), Some(config)).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    let status = || cache.core().back_status("disk").unwrap().status;
    disk.write(0, [1; 4096]).wait().unwrap();
    disk.flush().wait().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(store(dir.path()).iter().all(|&b| b == 0));
    let now = status();
    assert!(now.no_mark && now.is_old && now.dirty == 4096, "{now:?}");
    disk.consistency_point("first").unwrap();
    let wait = |f: &dyn Fn() -> bool| {
        for _ in 0..500 {
            if f() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("{:?}", status());
    };
    wait(&|| store(dir.path())[0] == 1 && status().positions[0] == status().positions[3]);
    let now = status();
    assert_eq!((now.no_mark, now.off_mark, now.missed_marks), (false, false, 0), "{now:?}");
    // All of it is wanted there, mark or not.
    disk.write(4096, [2; 4096]).wait().unwrap();
    assert!(cache.core().destage("disk", &mut |_| true).unwrap());
    assert!(store(dir.path())[4096] == 2);
    let now = status();
    assert_eq!((now.off_mark, now.missed_marks), (true, 1), "{now:?}");
    disk.consistency_point("second").unwrap();
    wait(&|| !status().off_mark);
    assert_eq!(cache.core().back_status("disk").unwrap().stored_mark.as_deref(), Some("second"));
}

#[test]
fn what_nears_its_age_is_destaged_before_its_time() {
    let dir = TempDir::new().unwrap();
    let age = Some(Age { most: larder_base::Nanos::from_millis(200), hard: true });
    let pace = Pace::Periodic(larder_base::Nanos::from_secs(3600));
    let cache = builder(dir.path(), Some(BackConfig { age, ..ordered(pace) })).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    for round in 1..5u8 {
        disk.write(0, vec![round; 4096]).wait().unwrap();
        let mut looks = 0;
        while store(dir.path())[0] != round {
            looks += 1;
            assert!(looks < 300, "round {round}: {:?}", cache.core().back_status("disk"));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
    let none = BackConfig { age, ..ordered(Pace::AtBound) };
    drop((disk, cache));
    let why = builder(dir.path(), Some(none)).open().unwrap_err().to_string();
    assert!(why.contains("destage=none") && why.contains("leave one of the two out"), "{why}");
}
