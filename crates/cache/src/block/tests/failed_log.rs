//! A cache device that fails under the write log: what was answered comes to the stores from memory, then volumes write through.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_base::Rng;
use larder_format::block::marker::{MarkerState, choose};
use larder_runtime::FileOp;

use super::*;
use crate::block::back::offline::{ExportWish, export};
use crate::block::back::{BackConfig, BackWish, Cuts, Grain, MarkerAt, Order, Pace};
use crate::block::{Builder, Cache};

/// What fails of a cache, of what its workers ask for.
#[derive(Debug, Default)]
pub(in crate::block) struct Faults {
    pub reads: AtomicBool,
    pub writes: AtomicBool,
    pub flushes: AtomicBool,
    /// A marker says that the log has failed, and nothing more.
    pub marks: AtomicBool,
}

impl Faults {
    pub(in crate::block) fn of(&self, op: &FileOp, result: io::Result<()>) -> io::Result<()> {
        let fails = match op {
            FileOp::Read { .. } => &self.reads,
            FileOp::Write { .. } => &self.writes,
            FileOp::Sync => &self.flushes,
            _ => return result,
        };
        let failed = || io::Error::from_raw_os_error(5);
        result.and_then(|()| if fails.load(Ordering::SeqCst) { Err(failed()) } else { Ok(()) })
    }
}

const BYTES: u64 = 8 << 20;
pub(super) const LINE: u64 = 4096;

fn builder(dir: &Path, order: Order, pace: Pace) -> Builder {
    let path = dir.join("disk");
    if !path.exists() {
        File::create(&path).unwrap().set_len(BYTES).unwrap();
    }
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(2);
    let builder = builder.volume("disk", &format!("file:{}", path.display())).unwrap();
    builder.write_back("disk", BackConfig { order, pace, ..BackConfig::default() })
}

pub(super) fn marker(dir: &Path) -> MarkerState {
    let bytes = std::fs::read(dir.join("disk.larder")).unwrap();
    choose(&bytes[..4096], &bytes[4096..8192]).unwrap().marker.state
}

/// Until the volume writes through.
pub(super) fn goes_through(cache: &Cache) {
    let end = Instant::now() + Duration::from_secs(60);
    while let Some(status) = cache.core().back_status("disk") {
        assert!(Instant::now() < end, "{status:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Clients that write lines of their own, and flush now and then, while the device begins to fail.
fn under_load(order: Order, fail: impl Fn(&Faults)) {
    const CLIENTS: u64 = 4;
    let dir = TempDir::new().unwrap();
    let cache = builder(dir.path(), order, Pace::Async).open().unwrap();
    let lines = BYTES / LINE / CLIENTS;
    let written: Vec<Vec<u8>> = std::thread::scope(|scope| {
        let client = |client: u64| {
            let cache = &cache;
            move || {
                let disk = cache.volume("disk").unwrap();
                let mut rng = Rng::new(client);
                let mut plain = vec![0u8; lines as usize];
                for i in 0..600u64 {
                    let (line, byte) = (rng.below(lines), 1 + rng.below(255) as u8);
                    let at = (client * lines + line) * LINE;
                    disk.write(at, [byte; LINE as usize]).wait().unwrap();
                    plain[line as usize] = byte;
                    if i % 40 == 0 {
                        disk.flush().wait().unwrap();
                    }
                    let line = rng.below(lines);
                    let at = (client * lines + line) * LINE;
                    let read = disk.read(at, LINE as usize).wait().unwrap();
                    assert!(read.iter().all(|&b| b == plain[line as usize]));
                }
                plain
            }
        };
        let clients: Vec<_> = (0..CLIENTS).map(|n| scope.spawn(client(n))).collect();
        std::thread::sleep(Duration::from_millis(20));
        fail(&cache.core().faults);
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    goes_through(&cache);
    assert_eq!(marker(dir.path()), MarkerState::Clean);
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [0xee; 512]).wait().unwrap();
    disk.flush().wait().unwrap();
    let store = std::fs::read(dir.path().join("disk")).unwrap();
    assert!(store[..512].iter().all(|&b| b == 0xee));
    for (line, &byte) in written.iter().flatten().enumerate().skip(1) {
        let at = line * LINE as usize;
        assert!(store[at..at + LINE as usize].iter().all(|&b| b == byte), "{order:?}, line {line}");
    }
    // The next start writes back anew: what the log holds is void.
    drop((disk, cache));
    let cache = builder(dir.path(), order, Pace::Async).open().unwrap();
    assert_eq!(cache.core().back_status("disk").unwrap().status.dirty, 0);
    let read = cache.volume("disk").unwrap().read(0, LINE as usize).wait().unwrap();
    assert!(read[..512].iter().all(|&b| b == 0xee));
    assert_eq!(marker(dir.path()), MarkerState::Dirty);
}

pub(super) const ORDERS: [Order; 4] = [
    Order::Any,
    Order::Ordered(Grain::Flush),
    Order::Ordered(Grain::Completion),
    Order::Journaled(Cuts::Flushes),
];

#[test]
fn no_write_is_lost_when_the_log_cannot_be_flushed_under_load() {
    for order in ORDERS {
        under_load(order, |faults| faults.flushes.store(true, Ordering::SeqCst));
    }
}

#[test]
fn no_write_is_lost_when_the_log_cannot_be_written_under_load() {
    for order in ORDERS {
        under_load(order, |faults| faults.writes.store(true, Ordering::SeqCst));
    }
}

#[test]
fn a_start_that_finds_a_failed_log_brings_what_it_has_to_the_store() {
    let dir = TempDir::new().unwrap();
    let order = Order::Ordered(Grain::Flush);
    let cache = builder(dir.path(), order, Pace::AtBound).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    // It has a slot, too.
    disk.read(8192, 4096).wait().unwrap();
    disk.flush().wait().unwrap();
    let faults = &cache.core().faults;
    faults.marks.store(true, Ordering::SeqCst);
    faults.flushes.store(true, Ordering::SeqCst);
    disk.write(8192, [2; 4096]).wait().unwrap();
    // It is answered only when the marker says that the store has it.
    let flush = disk.flush();
    let end = Instant::now() + Duration::from_secs(60);
    while marker(dir.path()) != MarkerState::Closing {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
    let waits = disk.write(0, [9; 512]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(!flush.is_done() && !waits.is_done());
    let copy = TempDir::new().unwrap();
    for name in ["cache", "disk", "disk.larder"] {
        std::fs::copy(dir.path().join(name), copy.path().join(name)).unwrap();
    }
    faults.marks.store(false, Ordering::SeqCst);
    flush.wait().unwrap();
    waits.wait().unwrap();
    goes_through(&cache);
    drop((disk, cache));
    // As if it had been killed meanwhile. (A file that was copied has another identity.)
    for name in ["cache", "disk", "disk.larder"] {
        let bytes = std::fs::read(copy.path().join(name)).unwrap();
        let file = File::options().write(true).open(dir.path().join(name)).unwrap();
        file.write_all_at(&bytes, 0).unwrap();
    }
    assert_eq!(marker(dir.path()), MarkerState::Closing);
    let cache = builder(dir.path(), order, Pace::AtBound).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == 1));
    disk.flush().wait().unwrap();
    goes_through(&cache);
    assert_eq!(marker(dir.path()), MarkerState::Clean);
    disk.write(4096, [3; 4096]).wait().unwrap();
    disk.flush().wait().unwrap();
    let store = std::fs::read(dir.path().join("disk")).unwrap();
    assert!(store[..4096].iter().all(|&b| b == 1) && store[4096..8192].iter().all(|&b| b == 3));
    // What the log had is in the store, and older than what was written through since: nobody takes it for dirty.
    disk.write(0, [4; 4096]).wait().unwrap();
    disk.flush().wait().unwrap();
    let why = cache.core().take_back().unwrap_err().to_string();
    assert!(why.contains("in use"), "{why}");
    drop((disk, cache));
    let wish = ExportWish {
        cache: dir.path().join("cache"),
        volume: "disk".to_owned(),
        file: dir.path().join("out"),
        base: Some(dir.path().join("disk")),
    };
    let done = export(&wish, &mut |_, _| true).unwrap().unwrap();
    assert_eq!(done.bytes, 0);
    let file = |name: &str| std::fs::read(dir.path().join(name)).unwrap();
    assert!(file("out") == file("disk") && file("out")[..4096].iter().all(|&b| b == 4));
    // And it may write back again.
    let cache = builder(dir.path(), order, Pace::AtBound).open().unwrap();
    let read = cache.volume("disk").unwrap().read(0, 4096).wait().unwrap();
    assert!(read.iter().all(|&b| b == 4));
}

#[test]
fn without_a_marker_a_flush_fails_once_the_log_has() {
    let dir = TempDir::new().unwrap();
    let order = Order::Ordered(Grain::Flush);
    let builder = builder(dir.path(), order, Pace::AtBound).marker("disk", MarkerAt::Nowhere);
    let cache = builder.open().unwrap();
    let disk = cache.volume("disk").unwrap();
    // (Before the write, which may be flushed by itself.)
    cache.core().faults.flushes.store(true, Ordering::SeqCst);
    // One of the two fails: the write, if the log is flushed by itself before it is answered.
    if disk.write(0, [1; 4096]).wait().is_err() {
        return;
    }
    disk.flush().wait().unwrap_err();
    // All the same it comes to the store.
    let end = Instant::now() + Duration::from_secs(60);
    while std::fs::read(dir.path().join("disk")).unwrap()[..4096].iter().any(|&b| b != 1) {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_is_dirty_in_a_cache_whose_file_is_removed_comes_to_its_store() {
    for order in ORDERS {
        let dir = TempDir::new().unwrap();
        let cache = builder(dir.path(), order, Pace::AtBound).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        disk.write(LINE, [7; LINE as usize]).wait().unwrap();
        disk.flush().wait().unwrap();
        assert!(cache.core().back_status("disk").unwrap().status.dirty > 0);
        std::fs::remove_file(dir.path().join("cache")).unwrap();
        goes_through(&cache);
        let store = std::fs::read(dir.path().join("disk")).unwrap();
        assert!(store[LINE as usize..2 * LINE as usize].iter().all(|&b| b == 7), "{order:?}");
        assert_eq!(marker(dir.path()), MarkerState::Clean);
    }
}

/// Until the cache is taken back. (It is given up by another thread, and a busy disk may take its time.)
fn taken_back(cache: &Cache) {
    let end = Instant::now() + Duration::from_secs(120);
    while let Err(why) = cache.core().take_back() {
        assert!(Instant::now() < end, "{why}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What was in the log before its failure counts no more, and what is written after it was taken back does, also for a start.
#[test]
fn a_cache_whose_log_failed_is_taken_back_and_its_volumes_write_back_again() {
    for order in ORDERS {
        let dir = TempDir::new().unwrap();
        let cache = builder(dir.path(), order, Pace::AtBound).open().unwrap();
        let (disk, core) = (cache.volume("disk").unwrap(), cache.core());
        let back = BackConfig { order, pace: Pace::AtBound, ..BackConfig::default() };
        let wish = BackWish { back: Some(back), ..BackWish::default() };
        for round in 1..=3 {
            disk.write(0, [round; 4096]).wait().unwrap();
            disk.write(8192, [round; 4096]).wait().unwrap();
            disk.flush().wait().unwrap();
            assert!(core.back_status("disk").unwrap().status.dirty > 0);
            // The store has what it needs, and its marker cannot be told so.
            core.faults.marks.store(true, Ordering::SeqCst);
            core.faults.writes.store(true, Ordering::SeqCst);
            disk.write(LINE, [round; LINE as usize]).wait().unwrap();
            let end = Instant::now() + Duration::from_secs(60);
            while core.is_enabled() {
                assert!(Instant::now() < end, "it is not given up");
                std::thread::sleep(Duration::from_millis(5));
            }
            core.faults.writes.store(false, Ordering::SeqCst);
            let why = core.take_back().unwrap_err().to_string();
            assert!(why.contains("'disk' is not all in the store"), "{why}");
            core.faults.marks.store(false, Ordering::SeqCst);
            goes_through(&cache);
            let why = core.change_over("disk", &wish, &mut |_| true).unwrap_err().to_string();
            assert!(why.contains("the cache is not used"), "{why}");
            taken_back(&cache);
            assert_eq!(core.could_write_back(), ["disk"]);
            disk.write(0, [0x10 + round; 4096]).wait().unwrap();
            assert_eq!(marker(dir.path()), MarkerState::Clean);
            assert!(core.change_over("disk", &wish, &mut |_| true).unwrap());
            assert!(core.could_write_back().is_empty());
            let through = BackWish::default();
            assert!(core.change_over("disk", &through, &mut |_| true).unwrap());
            assert!(core.could_write_back().is_empty(), "it is an operator's wish");
            assert!(core.change_over("disk", &wish, &mut |_| true).unwrap());
            assert_eq!(core.back_status("disk").unwrap().status.dirty, 0);
            disk.write(4096, [0x20 + round; 4096]).wait().unwrap();
            disk.flush().wait().unwrap();
            assert_eq!(marker(dir.path()), MarkerState::Dirty);
            let read = disk.read(0, 12288).wait().unwrap();
            assert_eq!([read[0], read[4096], read[8192]], [0x10 + round, 0x20 + round, round]);
        }
        // The next start finds what is dirty since, and nothing else.
        drop((disk, cache));
        let cache = builder(dir.path(), order, Pace::AtBound).open().unwrap();
        let disk = cache.volume("disk").unwrap();
        assert_eq!(cache.core().back_status("disk").unwrap().status.dirty, 4096);
        let read = disk.read(0, 12288).wait().unwrap();
        assert_eq!([read[0], read[4096], read[8192]], [0x13, 0x23, 3], "{order:?}");
        assert!(cache.core().destage("disk", &mut |_| true).unwrap());
        let store = std::fs::read(dir.path().join("disk")).unwrap();
        assert_eq!([store[0], store[4096], store[8192]], [0x13, 0x23, 3], "{order:?}");
    }
}

/// Before or after all of it came to its store: nothing of it is in the log, though the device says still that it may be.
#[test]
fn a_volume_that_was_detached_from_a_cache_out_of_use_does_not_keep_that_from_being_taken_back() {
    for order in ORDERS {
        for late in [false, true] {
            let dir = TempDir::new().unwrap();
            let cache = builder(dir.path(), order, Pace::AtBound).open().unwrap();
            let (disk, core) = (cache.volume("disk").unwrap(), cache.core());
            disk.write(0, [1; 4096]).wait().unwrap();
            disk.flush().wait().unwrap();
            core.faults.writes.store(true, Ordering::SeqCst);
            disk.write(LINE, [2; LINE as usize]).wait().unwrap();
            let end = Instant::now() + Duration::from_secs(60);
            while core.is_enabled() {
                assert!(Instant::now() < end, "it is not given up");
                std::thread::sleep(Duration::from_millis(5));
            }
            if late {
                goes_through(&cache);
            }
            drop(disk);
            assert!(cache.detach("disk", &mut |_| true).unwrap());
            assert_eq!(marker(dir.path()), MarkerState::Clean);
            core.faults.writes.store(false, Ordering::SeqCst);
            taken_back(&cache);
            // And it comes again as it was.
            let uri: Uri = format!("file:{}", dir.path().join("disk").display()).parse().unwrap();
            let end = Instant::now() + Duration::from_secs(60);
            let store = loop {
                match backing::open_with(&uri, &OpenOptions::default()) {
                    Ok(store) => break store,
                    Err(error) => assert!(Instant::now() < end, "{error}"),
                }
                std::thread::sleep(Duration::from_millis(5));
            };
            let back = BackConfig { order, pace: Pace::AtBound, ..BackConfig::default() };
            let wish = BackWish { back: Some(back), ..BackWish::default() };
            let disk = cache.attach_as("disk", store, &wish).unwrap();
            let read = disk.read(0, 8192).wait().unwrap();
            assert_eq!([read[0], read[4096]], [1, 2], "{order:?} {late}");
            disk.write(0, [3; 4096]).wait().unwrap();
            disk.flush().wait().unwrap();
            assert_eq!(core.back_status("disk").unwrap().status.dirty, 4096);
        }
    }
}

/// One that is written through since then, and stops so.
#[test]
fn a_start_finds_nothing_dirty_in_a_log_that_failed_and_was_taken_back() {
    let dir = TempDir::new().unwrap();
    let order = Order::Ordered(Grain::Flush);
    let cache = builder(dir.path(), order, Pace::AtBound).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(0, [1; 4096]).wait().unwrap();
    cache.core().faults.flushes.store(true, Ordering::SeqCst);
    disk.flush().wait().unwrap();
    goes_through(&cache);
    cache.core().faults.flushes.store(false, Ordering::SeqCst);
    taken_back(&cache);
    disk.write(0, [2; 4096]).wait().unwrap();
    disk.read(0, 4096).wait().unwrap();
    drop((disk, cache));
    let through = Cache::builder(dir.path().join("cache")).state_dir(dir.path().join("state"));
    let through = through.threads(2);
    let uri = format!("file:{}", dir.path().join("disk").display());
    let cache = through.volume("disk", &uri).unwrap().open().unwrap();
    let disk = cache.volume("disk").unwrap();
    assert!(disk.read(0, 4096).wait().unwrap().iter().all(|&b| b == 2));
    assert!(cache.core().back_status("disk").is_none());
}

/// It is no longer there to be carried anywhere.
#[test]
fn what_is_dirty_is_not_put_aside_in_a_cache_whose_file_was_removed() {
    let dir = TempDir::new().unwrap();
    let order = Order::Ordered(Grain::Flush);
    let cache = builder(dir.path(), order, Pace::AtBound).open().unwrap();
    let disk = cache.volume("disk").unwrap();
    disk.write(LINE, [7; LINE as usize]).wait().unwrap();
    drop(disk);
    std::fs::remove_file(dir.path().join("cache")).unwrap();
    // (When it was found to be gone the log is closed, and what it had may be in the store already: then the volume may go.)
    if let Err(why) = cache.detach_dirty("disk", &mut |_| true) {
        let why = why.to_string();
        let told = ["was removed", "does not write back", "write log is closed"];
        assert!(told.iter().any(|w| why.contains(w)), "{why}");
    }
    goes_through(&cache);
    let store = std::fs::read(dir.path().join("disk")).unwrap();
    assert!(store[LINE as usize..2 * LINE as usize].iter().all(|&b| b == 7));
    assert_eq!(marker(dir.path()), MarkerState::Clean);
}
