//! The block cache as a library: volumes, requests as futures, coming and going, ends of every kind.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test of threads waits for them"
)]

use std::fs::File;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use larder_base::{ByteSize, Rng};
use larder_cache::block::open::Warmth;
use larder_cache::block::{Builder, Cache, CachedVolume};
use larder_policy::block::BlockKind;
use larder_volume::op::FailureKind;
use larder_volume::{About, Backing, BackingError, Identity, OpenOptions, Session, Uri, open_with};

const MIB: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(120);

struct Dir(tempfile::TempDir);

impl Dir {
    fn new() -> Dir {
        Dir(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn disk(&self, name: &str, bytes: u64) -> String {
        let path = self.path(name);
        if !path.exists() {
            File::create(&path).unwrap().set_len(bytes).unwrap();
        }
        format!("file:{}", path.display())
    }

    fn builder(&self) -> Builder {
        let cache = Cache::builder(self.path("cache")).create(ByteSize(32 * MIB));
        cache.state_dir(self.path("state")).volume("disk", &self.disk("disk", 8 * MIB)).unwrap()
    }

    /// Opens it; the last cache may be about to let go of it.
    fn open(&self) -> Cache {
        let end = Instant::now() + PATIENCE;
        loop {
            match self.builder().open() {
                Ok(cache) => return cache,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn settled(cache: &Cache) {
    assert_eq!(cache.core().settle(PATIENCE).unwrap(), 0);
}

fn read(disk: &CachedVolume, at: u64, len: usize) -> Vec<u8> {
    disk.read(at, len).wait().unwrap().to_vec()
}

/// Requests of several threads, several under way on each, against a plain copy of what each may touch.
#[test]
fn requests_of_many_against_a_model() {
    let dir = Dir::new();
    let cache = dir.open();
    std::thread::scope(|scope| {
        for who in 0..4u64 {
            let disk = cache.volume("disk").unwrap();
            scope.spawn(move || {
                let (from, mut rng) = (who * 2 * MIB, Rng::new(who));
                let mut model = vec![0u8; 2 << 20];
                for round in 0..40u8 {
                    // What is under way at once lies apart.
                    let mut pending = Vec::new();
                    for part in 0..8usize {
                        let at = part * (256 << 10) + rng.below(100_000) as usize;
                        let len = rng.range(1, 100_000) as usize;
                        let (range, offset) = (at..at + len, from + at as u64);
                        match rng.below(4) {
                            0 => {
                                model[range.clone()].fill(round + 1);
                                pending.push(disk.write(offset, &model[range]));
                            }
                            1 => {
                                model[range].fill(0);
                                pending.push(disk.zero(offset, len as u64));
                            }
                            _ => {
                                let found = disk.read(offset, len);
                                assert!(found.wait().unwrap()[..] == model[range], "{who} {round}");
                            }
                        }
                    }
                    pending.into_iter().for_each(|p| p.wait().unwrap());
                }
                disk.flush().wait().unwrap();
                assert!(read(&disk, from, 2 << 20) == model);
            });
        }
    });
    let stats = cache.stats();
    assert!(stats.engine.fills > 0 && stats.engine.read_hits > 0, "{stats:?}");
    assert_eq!((stats.engine.corrupt, stats.engine.backing_errors), (0, 0));
}

#[test]
fn what_was_cached_is_there_again_however_it_ended() {
    let dir = Dir::new();
    let cache = dir.open();
    assert!(matches!(cache.warmth(), Warmth::Cold(_) | Warmth::Log(_)), "{:?}", cache.warmth());
    let disk = cache.volume("disk").unwrap();
    disk.write(0, vec![5; 1 << 20]).wait().unwrap();
    settled(&cache);
    // A client that is left does not keep it from closing.
    cache.close();
    assert_eq!(disk.read(0, 512).wait().unwrap_err().kind, FailureKind::Gone);
    drop((disk, cache));
    let cache = dir.open();
    let hits = |cache: &Cache| {
        let disk = cache.volume("disk").unwrap();
        assert!(read(&disk, 0, 1 << 20).iter().all(|&b| b == 5));
        cache.stats().engine.read_hits
    };
    assert_eq!(hits(&cache), 256);
    // The last handle goes while a request is under way: it ends, and then the cache does.
    let pending = cache.volume("disk").unwrap().write(0, vec![6; 4096]);
    drop(cache);
    pending.wait().unwrap();
    let cache = dir.open();
    let disk = cache.volume("disk").unwrap();
    assert!(read(&disk, 0, 4096).iter().all(|&b| b == 6));
    assert!(read(&disk, 4096, 4096).iter().all(|&b| b == 5));
    assert!(cache.stats().engine.read_hits > 0);
}

#[test]
fn what_no_volume_can_do_says_so() {
    let dir = Dir::new();
    let cache = dir.open();
    assert!(cache.volume("other").is_none() && cache.volume("").is_none());
    let disk = cache.volume("disk").unwrap();
    assert_eq!((disk.name(), disk.bytes()), ("disk", 8 * MIB));
    let kind = |failure: larder_volume::op::Failure| failure.kind;
    assert_eq!(kind(disk.read(8 * MIB - 1, 2).wait().unwrap_err()), FailureKind::Invalid);
    assert_eq!(kind(disk.read(u64::MAX, 2).wait().unwrap_err()), FailureKind::Invalid);
    assert_eq!(kind(disk.write(8 * MIB, [1]).wait().unwrap_err()), FailureKind::Invalid);
    assert_eq!(kind(disk.trim(0, 0).wait().unwrap_err()), FailureKind::Invalid);
    let error = cache.attach("disk", store(&dir, "other")).unwrap_err().to_string();
    assert!(error.contains("exists already"), "{error}");
    drop((disk, cache));
    let same = dir.builder().volume("twin", &dir.disk("disk", 0)).unwrap().open();
    let error = same.unwrap_err().to_string();
    assert!(error.contains("volume 'twin'"), "{error}");
    assert!(dir.builder().volume("x", "ftp://x").is_err());
    let file = dir.path("data");
    std::fs::write(&file, vec![1; 1 << 20]).unwrap();
    let over = Cache::builder(&file).create(ByteSize(32 * MIB)).open().unwrap_err().to_string();
    assert!(over.contains("is no block cache"), "{over}");
    assert_eq!(std::fs::read(&file).unwrap(), vec![1; 1 << 20], "nothing is formatted over");
}

fn store(dir: &Dir, name: &str) -> Box<dyn Backing> {
    let uri: Uri = dir.disk(name, 4 * MIB).parse().unwrap();
    let notes = Some(dir.path("state").join("stores"));
    open_with(&uri, &OpenOptions { notes, ..OpenOptions::default() }).unwrap()
}

#[test]
fn volumes_come_grow_and_go() {
    let dir = Dir::new();
    let cache = dir.open();
    let late = cache.attach("late", store(&dir, "late")).unwrap();
    assert_eq!(cache.volumes(), ["disk", "late"]);
    late.write(0, vec![7; 1 << 20]).wait().unwrap();
    settled(&cache);
    assert_eq!(cache.grow("late", Some(6 * MIB)).unwrap(), 6 * MIB);
    assert_eq!(late.bytes(), 6 * MIB);
    late.write(5 * MIB, [8; 4096]).wait().unwrap();
    // It waits for its clients as long as it is told to.
    let mut asked = 0;
    let aside = cache.detach("late", &mut |_| {
        asked += 1;
        asked < 3
    });
    assert!(!aside.unwrap() && asked == 3, "{asked}");
    assert_eq!(read(&late, 0, 1), [7]);
    drop(late);
    assert!(cache.detach("late", &mut |_| true).unwrap());
    assert!(cache.volume("late").is_none() && cache.detach("late", &mut |_| true).is_err());
    // With what was cached of it.
    let end = Instant::now() + PATIENCE;
    let uri: Uri = dir.disk("late", 0).parse().unwrap();
    let notes = Some(dir.path("state").join("stores"));
    let store = loop {
        match open_with(&uri, &OpenOptions { notes: notes.clone(), ..OpenOptions::default() }) {
            Ok(store) => break store,
            Err(error) => assert!(Instant::now() < end, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let late = cache.attach("late", store).unwrap();
    let before = cache.stats().engine.read_hits;
    assert!(read(&late, 0, 1 << 20).iter().all(|&b| b == 7));
    assert_eq!(read(&late, 5 * MIB, 4096), [8; 4096]);
    assert!(cache.stats().engine.read_hits >= before + 256);
}

/// Without threads all is done by the calls of the program: requests, fills, coming and going of volumes, the end.
#[test]
fn a_cache_without_threads() {
    let dir = Dir::new();
    let open = || dir.builder().threads(0).readahead(ByteSize(0)).open().unwrap();
    let see = |cache: &Cache, path: &Path| {
        let disk = cache.volume("disk").unwrap();
        let write = disk.write(4096, vec![3; 64 << 10]);
        assert!(!write.is_done() && std::fs::read(path).unwrap()[4096] != 3);
        while !write.is_done() {
            cache.turn().unwrap();
        }
        write.wait().unwrap();
        let end = Instant::now() + PATIENCE;
        while cache.stats().engine.fills < 16 {
            assert!(Instant::now() < end, "{:?}", cache.stats());
            std::thread::sleep(cache.turn().unwrap().min(Duration::from_millis(5)));
        }
        let read = disk.read(0, 64 << 10);
        while !read.is_done() {
            cache.turn().unwrap();
        }
        let found = read.wait().unwrap();
        assert!(found[..4096].iter().all(|&b| b == 0) && found[4096..].iter().all(|&b| b == 3));
    };
    let cache = open();
    see(&cache, &dir.path("disk"));
    let late = cache.attach("late", store(&dir, "late")).unwrap();
    assert_eq!(cache.grow("late", Some(5 * MIB)).unwrap(), 5 * MIB);
    drop(late);
    assert!(cache.detach("late", &mut |_| true).unwrap());
    cache.close();
    assert!(cache.turn().is_none());
    drop(cache);
    let cache = open();
    assert!(matches!(cache.warmth(), Warmth::Log(_)), "{:?}", cache.warmth());
    let disk = cache.volume("disk").unwrap();
    let again = disk.read(4096, 60 << 10);
    while !again.is_done() {
        cache.turn().unwrap();
    }
    assert!(again.wait().unwrap().iter().all(|&b| b == 3));
    assert_eq!(cache.stats().engine.read_hits, 15);
}

/// Lines of a volume that is far larger than the cache, each read once: those that the program calls metadata are kept, in
/// place of data that was read three times; the others are not.
#[test]
fn a_programs_tag_decides() {
    let dir = Dir::new();
    let cache = Cache::builder(dir.path("cache"))
        .create(ByteSize(8 * MIB))
        .state_dir(dir.path("state"))
        .admission("two_lbs")
        .readahead(ByteSize(0))
        .volume("disk", &dir.disk("disk", 64 * MIB))
        .unwrap()
        .open()
        .unwrap();
    let disk = cache.volume("disk").unwrap();
    let slots = cache.core().layout().slots();
    let see = |lines: std::ops::Range<u64>, tag| {
        let tagged = disk.holding(tag);
        lines.for_each(|line| drop(tagged.read(line * 4096, 4096).wait().unwrap()));
    };
    for _ in 0..3 {
        see(0..5 * slots, BlockKind::Data);
        settled(&cache);
    }
    let mut kept = Vec::new();
    for (first, tag) in [(6 * slots, BlockKind::Data), (8 * slots, BlockKind::Metadata)] {
        see(first..first + 64, tag);
        settled(&cache);
        let before = cache.stats().engine.read_hits;
        see(first..first + 64, tag);
        settled(&cache);
        kept.push(cache.stats().engine.read_hits - before);
    }
    assert!(kept[0] < 32 && kept[1] == 64, "of 64 lines each, data and metadata: {kept:?}");
}

/// A store that is asked who it is while its volume is taken up: by then nobody may find the volume, who would be past the cache.
#[derive(Debug)]
struct Watched {
    store: Box<dyn Backing>,
    cache: Cache,
    found: Arc<AtomicBool>,
}

impl Backing for Watched {
    fn uri(&self) -> &str {
        self.store.uri()
    }
    fn about(&self) -> About {
        self.store.about()
    }
    fn identity(&self) -> Result<Identity, BackingError> {
        self.found.fetch_or(self.cache.volume("late").is_some(), Ordering::SeqCst);
        self.store.identity()
    }
    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        self.store.resize(bytes)
    }
    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        self.found.fetch_or(self.cache.volume("late").is_some(), Ordering::SeqCst);
        self.store.session()
    }
}

#[test]
fn a_volume_is_found_when_it_has_its_place_and_not_before() {
    let dir = Dir::new();
    let cache = dir.open();
    let found = Arc::new(AtomicBool::new(false));
    let (store, watched) = (store(&dir, "late"), found.clone());
    let store = Watched { store, cache: cache.clone(), found: watched };
    let late = cache.attach("late", Box::new(store)).unwrap();
    assert!(!found.load(Ordering::SeqCst), "it was found on the way");
    assert!(cache.volume("late").is_some());
    drop(late);
    cache.close();
}

#[test]
fn a_cache_without_threads_ends_with_requests_under_way() {
    let dir = Dir::new();
    let open = || dir.builder().threads(0).open().unwrap();
    let cache = open();
    let disk = cache.volume("disk").unwrap();
    let write = disk.write(4096, [3; 4096]);
    drop((disk, cache));
    write.wait().unwrap();
    // The next finds the device free.
    let cache = open();
    let disk = cache.volume("disk").unwrap();
    let read = disk.read(4096, 4096);
    cache.close();
    assert_eq!(read.wait().unwrap(), [3; 4096][..]);
    assert_eq!(disk.flush().wait().unwrap_err().kind, FailureKind::Gone);
}

/// Closes the cache when it is told that a request has ended.
struct Closes(Cache);

impl Wake for Closes {
    fn wake(self: Arc<Self>) {
        self.0.close();
    }
}

#[test]
fn who_is_told_by_a_thread_of_the_cache_may_close_it() {
    for threads in [1, 0] {
        let dir = Dir::new();
        let cache = dir.builder().threads(threads).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        let mut write = pin!(disk.write(0, vec![1; 1 << 20]));
        let waker = Waker::from(Arc::new(Closes(cache.clone())));
        let mut context = Context::from_waker(&waker);
        let end = Instant::now() + PATIENCE;
        while write.as_mut().poll(&mut context).is_pending() {
            assert!(Instant::now() < end);
            cache.turn();
            std::thread::sleep(Duration::from_millis(1));
        }
        cache.close();
        assert_eq!(disk.flush().wait().unwrap_err().kind, FailureKind::Gone);
        drop((waker, disk, cache));
        drop(dir.open());
    }
}

#[test]
fn beside_a_device_lie_no_notes() {
    let error = Cache::builder("/dev/null").open().unwrap_err().to_string();
    assert!(error.contains("state_dir"), "{error}");
}
