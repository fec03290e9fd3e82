//! The cache device fails while the store is gone: what can be read is read, what was answered waits for the store, and where both are lost the
//! marker says so.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::atomic::AtomicU8;

use larder_format::block::marker::MarkerState;
use larder_volume::op::{Failure, FailureKind};
use larder_volume::{BackingError, Capabilities, Identity, Session, marker::Image};
use mio::Registry;
use mio::event::Event;

use super::failed_log::{LINE, ORDERS, goes_through, marker};
use super::*;
use crate::block::back::{BackConfig, BackWish, Order, Pace, RecoverWish, recover};
use crate::block::{Cache, CachedVolume, Pending};

/// The store answers; or it does not; or whatever it is asked fails.
const HERE: u8 = 0;
const HANGS: u8 = 1;
const FAILS: u8 = 2;

/// A file that may be gone.
#[derive(Debug)]
struct Away {
    file: Box<dyn Backing>,
    how: Arc<AtomicU8>,
}

impl Backing for Away {
    fn uri(&self) -> &str {
        self.file.uri()
    }
    fn capabilities(&self) -> Capabilities {
        self.file.capabilities()
    }
    fn identity(&self) -> Result<Identity, BackingError> {
        self.file.identity()
    }
    fn place(&self) -> String {
        self.file.place()
    }
    fn resize(&self, bytes: Option<u64>) -> Result<u64, BackingError> {
        self.file.resize(bytes)
    }
    fn image(&self) -> Option<Image> {
        self.file.image()
    }
    fn session(&self) -> Result<Box<dyn Session>, BackingError> {
        let (session, how) = (self.file.session()?, self.how.clone());
        Ok(Box::new(Way { session, how, held: VecDeque::new(), ended: VecDeque::new() }))
    }
}

struct Way {
    session: Box<dyn Session>,
    how: Arc<AtomicU8>,
    /// Asked for while it hung.
    held: VecDeque<(u64, Op)>,
    ended: VecDeque<Done>,
}

impl Way {
    fn is(&self, how: u8) -> bool {
        self.how.load(Ordering::SeqCst) == how
    }
}

impl Session for Way {
    fn fd(&self) -> RawFd {
        self.session.fd()
    }
    fn attach(&mut self, registry: &Registry, first: usize) -> io::Result<()> {
        self.session.attach(registry, first)
    }
    fn detach(&mut self, registry: &Registry) {
        self.session.detach(registry);
    }
    fn ready(&mut self, at: usize, event: &Event, now: Instant) {
        self.session.ready(at, event, now);
    }
    fn submit(&mut self, token: u64, op: Op) {
        match self.how.load(Ordering::SeqCst) {
            HANGS => self.held.push_back((token, op)),
            FAILS => {
                let outcome = Err(Failure::new(FailureKind::Failed, "a test"));
                self.ended.push_back(Done { token, op, outcome });
            }
            _ => self.session.submit(token, op),
        }
    }
    fn flush(&mut self, now: Instant) {
        self.session.flush(now);
    }
    fn turn(&mut self, now: Instant) {
        self.session.turn(now);
    }
    fn pop(&mut self) -> Option<Done> {
        if !self.held.is_empty() && !self.is(HANGS) {
            for (token, op) in std::mem::take(&mut self.held) {
                self.submit(token, op);
            }
            self.session.flush(Instant::now());
        }
        self.ended.pop_front().or_else(|| self.session.pop())
    }
    fn in_flight(&self) -> usize {
        self.held.len() + self.ended.len() + self.session.in_flight()
    }
    fn wake_at(&self) -> Option<Instant> {
        let looks = !self.held.is_empty() || !self.ended.is_empty();
        let soon = looks.then(|| Instant::now() + Duration::from_millis(1));
        soon.into_iter().chain(self.session.wake_at()).min()
    }
}

/// A cache with one volume that writes back, whose store may be gone.
fn begun(dir: &Path, order: Order, how: &Arc<AtomicU8>) -> (Cache, CachedVolume) {
    let builder = Cache::builder(dir.join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.join("state")).threads(2);
    let cache = builder.open().unwrap();
    let disk = attach(&cache, dir, order, how).unwrap();
    (cache, disk)
}

fn file(dir: &Path) -> Box<dyn Backing> {
    let path = dir.join("disk");
    if !path.exists() {
        File::create(&path).unwrap().set_len(8 << 20).unwrap();
    }
    let uri: Uri = format!("file:{}", path.display()).parse().unwrap();
    backing::open_with(&uri, &OpenOptions { watch: false, ..OpenOptions::default() }).unwrap()
}

fn attach(
    cache: &Cache,
    dir: &Path,
    order: Order,
    how: &Arc<AtomicU8>,
) -> Result<CachedVolume, Box<dyn std::error::Error>> {
    let back = BackConfig { order, pace: Pace::AtBound, ..BackConfig::default() };
    let wish = BackWish { back: Some(back), ..BackWish::default() };
    let away = Away { file: file(dir), how: how.clone() };
    Ok(cache.attach_as("disk", Box::new(away), &wish)?)
}

/// Until the cache is given up.
fn given_up(cache: &Cache) {
    let end = Instant::now() + Duration::from_secs(60);
    while cache.core().is_enabled() {
        assert!(Instant::now() < end, "it is not given up");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// How it ends, in time.
fn ended<R>(what: Pending<R>) -> Result<R, Failure> {
    let end = Instant::now() + Duration::from_secs(60);
    while !what.is_done() {
        assert!(Instant::now() < end, "it does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    what.wait()
}

fn line(dir: &Path, line: u64) -> u8 {
    let store = std::fs::read(dir.join("disk")).unwrap();
    let bytes = &store[(line * LINE) as usize..((line + 1) * LINE) as usize];
    assert!(bytes.iter().all(|b| *b == bytes[0]), "line {line}");
    bytes[0]
}

#[test]
fn what_a_failing_cache_has_is_read_while_its_store_is_gone_and_comes_there_when_it_is_back() {
    for (order, away) in ORDERS.into_iter().flat_map(|order| [(order, HANGS), (order, FAILS)]) {
        let (dir, how) = (TempDir::new().unwrap(), Arc::new(AtomicU8::new(HERE)));
        let (cache, disk) = begun(dir.path(), order, &how);
        ended(disk.write(LINE, [1; LINE as usize])).unwrap();
        ended(disk.flush()).unwrap();
        how.store(away, Ordering::SeqCst);
        ended(disk.write(2 * LINE, [2; LINE as usize])).unwrap();
        cache.core().faults.flushes.store(true, Ordering::SeqCst);
        let flush = disk.flush();
        given_up(&cache);
        let (write, clean) =
            (disk.write(3 * LINE, [3; LINE as usize]), disk.read(9 * LINE, LINE as usize));
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(100));
            for at in [1, 2u8] {
                let read = ended(disk.read(u64::from(at) * LINE, LINE as usize)).unwrap();
                assert!(read.iter().all(|&b| b == at), "{order:?}, {away}: line {at}");
            }
            let status = cache.core().back_status("disk").unwrap().status;
            assert_eq!(status.dirty, 2 * LINE, "{order:?}, {away}");
        }
        // What only the store has fails as the store does, and what is to be durable there waits for it.
        assert!(!flush.is_done() && !write.is_done(), "{order:?}, {away}");
        assert_eq!(clean.is_done(), away == FAILS, "{order:?}");
        assert_eq!(marker(dir.path()), MarkerState::Closing, "{order:?}, {away}");
        assert_eq!([1, 2, 3].map(|at| line(dir.path(), at)), [0; 3], "{order:?}, {away}");
        how.store(HERE, Ordering::SeqCst);
        assert_eq!(ended(clean).is_ok(), away == HANGS, "{order:?}");
        ended(flush).unwrap();
        ended(write).unwrap();
        goes_through(&cache);
        assert_eq!(marker(dir.path()), MarkerState::Clean, "{order:?}, {away}");
        assert_eq!([1, 2, 3].map(|at| line(dir.path(), at)), [1, 2, 3], "{order:?}, {away}");
    }
}

#[test]
fn where_cache_and_store_are_gone_nothing_is_read_and_another_cache_waits_for_a_recovery() {
    // (Each waits for a stop that has requests which wait for the store.)
    std::thread::scope(|scope| ORDERS.map(|order| scope.spawn(move || both_gone(order))).map(drop));
}

fn both_gone(order: Order) {
    let (dir, how) = (TempDir::new().unwrap(), Arc::new(AtomicU8::new(HERE)));
    let (cache, disk) = begun(dir.path(), order, &how);
    ended(disk.write(LINE, [1; LINE as usize])).unwrap();
    ended(disk.flush()).unwrap();
    how.store(FAILS, Ordering::SeqCst);
    let faults = &cache.core().faults;
    for fault in [&faults.reads, &faults.writes, &faults.flushes] {
        fault.store(true, Ordering::SeqCst);
    }
    // (It is answered from memory, or not.)
    let _write = disk.write(2 * LINE, [2; LINE as usize]);
    given_up(&cache);
    for at in [1, 9] {
        assert!(ended(disk.read(at * LINE, LINE as usize)).is_err(), "{order:?}: line {at}");
    }
    // What the log alone had can be brought nowhere, and nobody says that it is durable.
    let (flush, write) = (disk.flush(), disk.write(3 * LINE, [3; LINE as usize]));
    std::thread::sleep(Duration::from_millis(300));
    for waits in [flush, write] {
        assert!(!waits.is_done() || waits.wait().is_err(), "{order:?}");
    }
    assert_eq!(marker(dir.path()), MarkerState::Closing, "{order:?}");
    drop((disk, cache));
    // The store is back, the cache is not: only the operator's yes makes the store whole without it.
    how.store(HERE, Ordering::SeqCst);
    std::fs::remove_file(dir.path().join("cache")).unwrap();
    std::fs::remove_dir_all(dir.path().join("state")).unwrap();
    let builder = Cache::builder(dir.path().join("cache")).create(ByteSize::mib(192));
    let builder = builder.write_log(ByteSize::mib(96)).state_dir(dir.path().join("state"));
    let cache = builder.threads(2).open().unwrap();
    let why = attach(&cache, dir.path(), order, &how).unwrap_err().to_string();
    assert!(why.contains("may hold writes that the store does not have"), "{order:?}: {why}");
    let done = recover(&*file(dir.path()), &RecoverWish::default()).unwrap();
    assert!(done.recovered && done.was == "closing", "{order:?}: {done:?}");
    let disk = attach(&cache, dir.path(), order, &how).unwrap();
    let read = ended(disk.read(LINE, LINE as usize)).unwrap();
    assert!(read.iter().all(|&b| b == 0), "{order:?}");
}
