//! The block cache as a library: volumes, requests as futures, coming and going, ends of every kind.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test of threads waits for them"
)]

use std::fs::File;
use std::future::Future;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};
use std::time::{Duration, Instant};

use larder_base::{ByteSize, Rng};
use larder_cache::block::open::Warmth;
use larder_cache::block::service::Command;
use larder_cache::block::{Builder, Cache, CachedVolume, Completion, Full, Queue};
use larder_policy::block::BlockKind;
use larder_runtime::AlignedBuf;
use larder_volume::op::FailureKind;
use larder_volume::{
    Backing, BackingError, Capabilities, Identity, OpenOptions, Session, Uri, open_with,
};

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

/// A store that many names lead to.
#[derive(Debug)]
struct Same(Box<dyn Backing>);

impl Backing for Same {
    fn uri(&self) -> &str {
        self.0.uri()
    }
    fn place(&self) -> String {
        "nbd://one".to_owned()
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    fn identity(&self) -> Result<Identity, BackingError> {
        self.0.identity()
    }
    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        self.0.resize(bytes)
    }
    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        self.0.session()
    }
}

/// Its clients go on writing while a detach waits for them: nobody else may have its store by then.
#[test]
fn nobody_has_the_store_or_the_name_of_a_volume_that_goes() {
    let dir = Dir::new();
    let cache = dir.open();
    let late = cache.attach("late", Box::new(Same(store(&dir, "late")))).unwrap();
    let mut said = Vec::new();
    let aside = cache.detach("late", &mut |_| {
        let twin = Box::new(Same(store(&dir, "twin")));
        said.push(cache.attach("twin", twin).map(drop));
        said.push(cache.attach("late", store(&dir, "other")).map(drop));
        said.push(cache.grow("late", None).map(drop));
        said.push(cache.detach("late", &mut |_| false).map(drop));
        said.push(cache.core().take_back().inspect_err(|e| {
            assert!(e.to_string().contains("is being attached, detached or resized"), "{e}");
        }));
        false
    });
    assert!(!aside.unwrap(), "it has a client");
    assert!(said.len() == 5 && said.iter().all(Result::is_err), "{said:?}");
    assert_eq!(cache.volumes(), ["disk", "late"]);
    // Then everything is as before.
    drop(late);
    assert!(cache.detach("late", &mut |_| true).unwrap());
    cache.attach("twin", Box::new(Same(store(&dir, "again")))).unwrap();
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
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
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

fn buffer(bytes: &[u8]) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(bytes.len());
    buf.copy_from_slice(bytes);
    buf
}

fn read_of(offset: u64, len: usize) -> Command {
    Command::Read { offset, buf: AlignedBuf::zeroed(len) }
}

fn write_of(offset: u64, bytes: &[u8]) -> Command {
    Command::Write { offset, buf: buffer(bytes), fua: false }
}

/// All that is under way in a queue, in the order in which it ends.
fn completions(queue: &mut Queue) -> Vec<Completion> {
    let (mut ended, end) = (Vec::new(), Instant::now() + PATIENCE);
    while queue.under_way() > 0 {
        assert!(Instant::now() < end, "{queue:?}");
        queue.turn(PATIENCE).unwrap();
        ended.extend(std::iter::from_fn(|| queue.pop()));
    }
    ended
}

/// Threads with a queue each, many requests under way, against a plain copy of what each may touch; what they share is a line at
/// either end.
#[test]
fn queues_of_many_threads_against_a_model() {
    const PART: u64 = 256 << 10;
    const LEN: u64 = 7 * PART + 200_000;
    let dir = Dir::new();
    let cache = dir.open();
    std::thread::scope(|scope| {
        for who in 0..4u64 {
            let cache = cache.clone();
            scope.spawn(move || {
                let (disk, mut queue) = (cache.volume("disk").unwrap(), cache.queue().unwrap());
                let (from, mut rng) = (who * LEN, Rng::new(who));
                let mut model = vec![0u8; LEN as usize];
                for round in 0..40u8 {
                    let mut reads = Vec::new();
                    for part in 0..8u64 {
                        let at = (part * PART + rng.below(100_000)) as usize;
                        let range = at..at + rng.range(1, 100_000) as usize;
                        let offset = from + at as u64;
                        let command = match rng.below(4) {
                            0 => {
                                model[range.clone()].fill(round + 1);
                                write_of(offset, &model[range])
                            }
                            1 => {
                                model[range.clone()].fill(0);
                                let len = range.len() as u32;
                                Command::Trim { offset, len, fua: false }
                            }
                            _ => {
                                reads.push((part, range.clone()));
                                read_of(offset, range.len())
                            }
                        };
                        if let Command::Trim { offset, len, .. } = command {
                            queue.submit(&disk, 99, command).unwrap();
                            completions(&mut queue).into_iter().for_each(|c| {
                                if let Some((_, range)) = reads.iter().find(|r| r.0 == c.ticket) {
                                    assert!(c.buf.unwrap()[..] == model[range.clone()]);
                                }
                                c.outcome.unwrap();
                            });
                            let zeroes = vec![0; len as usize];
                            queue.submit(&disk, 99, write_of(offset, &zeroes)).unwrap();
                        } else {
                            queue.submit(&disk, part, command).unwrap();
                        }
                    }
                    for completion in completions(&mut queue) {
                        let of = |r: &&(u64, _)| r.0 == completion.ticket;
                        if let Some((part, range)) = reads.iter().find(of) {
                            let found = completion.buf.as_ref().unwrap();
                            assert!(found[..] == model[range.clone()], "{who} {round} {part}");
                        }
                        completion.outcome.unwrap();
                    }
                }
                queue.submit(&disk, 7, Command::Flush).unwrap();
                let flushed = completions(&mut queue);
                assert_eq!((flushed.len(), flushed[0].ticket), (1, 7));
                // The last of them are left to its end.
                for at in (0..PART).step_by(4096) {
                    queue.submit(&disk, 0, write_of(from + at, &[9; 4096])).unwrap();
                }
                model[..PART as usize].fill(9);
                drop(queue);
                assert!(read(&disk, from, LEN as usize) == model);
            });
        }
    });
    let stats = cache.stats();
    assert!(stats.engine.fills > 0 && stats.engine.updated > 0, "{stats:?}");
    assert_eq!((stats.engine.corrupt, stats.engine.backing_errors), (0, 0));
    // Nothing was left behind in a mailbox that nobody looks into.
    settled(&cache);
}

/// Requests end well or are refused, and whoever turns hears that there is nothing more; what was answered is there at the next start.
#[test]
fn a_cache_is_closed_while_queues_are_at_work() {
    const LINES: u64 = 64;
    let dir = Dir::new();
    let cache = dir.open();
    let under_way = Arc::new(std::sync::Barrier::new(4));
    let threads: Vec<_> = (0..3u64)
        .map(|who| {
            let (cache, under_way) = (cache.clone(), under_way.clone());
            std::thread::spawn(move || {
                let (disk, mut queue) = (cache.volume("disk").unwrap(), cache.queue().unwrap());
                let at = |line: u64| (who * LINES + line) * 4096;
                let mut written = [0u8; LINES as usize];
                for round in 1..=u8::MAX {
                    for line in 0..LINES {
                        let bytes = [round; 4096];
                        queue.submit(&disk, line, write_of(at(line), &bytes)).unwrap();
                    }
                    if round == 2 {
                        under_way.wait();
                    }
                    let mut gone = false;
                    for completion in completions(&mut queue) {
                        match completion.outcome {
                            Ok(_) => written[completion.ticket as usize] = round,
                            Err(failure) => {
                                assert_eq!(failure.kind, FailureKind::Gone);
                                gone = true;
                            }
                        }
                    }
                    if gone {
                        break;
                    }
                }
                while queue.turn(PATIENCE).unwrap() {}
                written
            })
        })
        .collect();
    under_way.wait();
    cache.close();
    let written: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    assert!(cache.queue().is_err());
    drop(cache);
    let cache = dir.open();
    let disk = cache.volume("disk").unwrap();
    for (at, round) in written.iter().flatten().enumerate() {
        assert_eq!(read(&disk, at as u64 * 4096, 4096), [*round; 4096], "{at}");
    }
}

#[test]
fn a_volume_goes_when_queues_have_done_with_it() {
    let dir = Dir::new();
    let cache = dir.open();
    let late = cache.attach("late", store(&dir, "late")).unwrap();
    let (go, gone) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let worker = cache.clone();
        scope.spawn(move || {
            let mut queue = worker.queue().unwrap();
            for line in 0..200u64 {
                queue.submit(&late, line, write_of(line * 4096, &[5; 4096])).unwrap();
            }
            // The client has gone, what it asked for has not.
            drop(late);
            go.send(()).unwrap();
            assert!(completions(&mut queue).iter().all(|c| c.outcome.is_ok()));
            // It has a queue for other volumes still.
            let disk = worker.volume("disk").unwrap();
            queue.submit(&disk, 1, read_of(0, 4096)).unwrap();
            assert!(completions(&mut queue)[0].outcome.is_ok());
        });
        gone.recv().unwrap();
        assert!(cache.detach("late", &mut |_| true).unwrap());
    });
    assert!(cache.volume("late").is_none());
    assert_eq!(std::fs::read(dir.path("late")).unwrap()[..200 * 4096], [5; 200 * 4096]);
}

/// The thread that closes has begun something in a queue of its own: it cannot wait for that.
#[test]
fn who_has_a_queue_may_close_the_cache() {
    let dir = Dir::new();
    let cache = dir.open();
    let (disk, mut queue) = (cache.volume("disk").unwrap(), cache.queue().unwrap());
    queue.submit(&disk, 1, write_of(0, &[1; 4096])).unwrap();
    cache.close();
    queue.submit(&disk, 2, write_of(0, &[2; 4096])).unwrap();
    let mut ended = completions(&mut queue);
    ended.sort_by_key(|completion| completion.ticket);
    assert!(ended[0].outcome.is_ok());
    let refused = &ended[1];
    assert_eq!(refused.outcome.as_ref().unwrap_err().kind, FailureKind::Gone);
    assert!(refused.buf.is_some(), "it has its buffer back");
    while queue.turn(PATIENCE).unwrap() {}
    drop((disk, queue, cache));
    let cache = dir.open();
    let disk = cache.volume("disk").unwrap();
    assert_eq!(read(&disk, 0, 4096), [1; 4096]);
    // With its last handle, a queue, it closes too.
    let mut queue = cache.queue().unwrap();
    queue.submit(&disk, 1, write_of(0, &[3; 4096])).unwrap();
    drop((disk, cache, queue));
    let cache = dir.open();
    assert_eq!(read(&cache.volume("disk").unwrap(), 0, 4096), [3; 4096]);
}

#[test]
fn a_queue_has_bounds_and_says_what_is_wrong() {
    let (dir, other) = (Dir::new(), Dir::new());
    let cache = dir.builder().queues(2).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    let mut queue = cache.queue().unwrap();
    let second = cache.queue().unwrap();
    let error = cache.queue().unwrap_err().to_string();
    assert!(error.contains("Builder::queues"), "{error}");
    drop(second);
    drop(cache.queue().unwrap());
    for n in 0..Queue::DEPTH as u64 {
        queue.submit(&disk, n, read_of(0, 512)).unwrap();
    }
    let Err(Full(Command::Read { buf, .. })) = queue.submit(&disk, 0, read_of(0, 512)) else {
        panic!("there is room for no more");
    };
    assert_eq!(buf.len(), 512);
    // They end, and are in the queue as long as nobody takes them.
    let (mut poll, mut events) = (mio::Poll::new().unwrap(), mio::Events::with_capacity(4));
    let (fd, reads) = (queue.as_raw_fd(), mio::Interest::READABLE);
    poll.registry().register(&mut mio::unix::SourceFd(&fd), mio::Token(0), reads).unwrap();
    queue.turn(Duration::ZERO).unwrap();
    while queue.due() != Some(Duration::ZERO) {
        poll.poll(&mut events, Some(PATIENCE)).unwrap();
        assert!(!events.is_empty(), "nothing was told");
        queue.turn(Duration::ZERO).unwrap();
    }
    assert!(queue.submit(&disk, 0, read_of(0, 512)).is_err());
    assert_eq!(completions(&mut queue).len(), Queue::DEPTH);
    let mut kind = |volume: &CachedVolume, command| {
        queue.submit(volume, 0, command).unwrap();
        completions(&mut queue)[0].outcome.as_ref().unwrap_err().kind
    };
    assert_eq!(kind(&disk, read_of(8 * MIB - 1, 2)), FailureKind::Invalid);
    assert_eq!(kind(&disk, Command::Trim { offset: 0, len: 0, fua: false }), FailureKind::Invalid);
    let strange = other.open();
    assert_eq!(kind(&strange.volume("disk").unwrap(), read_of(0, 512)), FailureKind::Invalid);
    let by_hand = Dir::new().builder().threads(0).open().unwrap();
    let error = by_hand.queue().unwrap_err().to_string();
    assert!(error.contains("threads"), "{error}");
}
