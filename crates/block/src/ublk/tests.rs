//! A worker with a driver of the tests' own, and a volume in a file.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use larder_base::Rng;
use tempfile::TempDir;

use super::abi::{DESCRIPTOR_BYTES, op};
use super::port::Port;
use super::request::Shape;
use super::worker::{Job, Order, Report};
use super::*;
use crate::backing::{self, Timeouts};
use crate::cache::Told;
use crate::cache::service::{PassThrough, pass_through};

const VOLUME: u64 = 8 << 20;
const SLOTS: usize = 32;
const TRANSFER: u32 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(30);
const NODEV: i32 = -19;

fn descriptor(op_flags: u32, sectors: u32, start: u64) -> [u8; DESCRIPTOR_BYTES] {
    let mut out = [0u8; DESCRIPTOR_BYTES];
    out[..4].copy_from_slice(&op_flags.to_ne_bytes());
    out[4..8].copy_from_slice(&sectors.to_ne_bytes());
    out[8..16].copy_from_slice(&start.to_ne_bytes());
    out
}

/// What the worker and the test see of the driver.
#[derive(Default)]
struct Driver {
    given: VecDeque<(usize, i32)>,
    descriptors: Vec<[u8; DESCRIPTOR_BYTES]>,
    data: Vec<Vec<u8>>,
    answers: Vec<Vec<i32>>,
    fetched: bool,
    closed: bool,
    no_data: bool,
}

struct Shared {
    driver: Mutex<Driver>,
    changed: Condvar,
    event: OwnedFd,
}

impl Shared {
    fn with<T>(&self, change: impl FnOnce(&mut Driver) -> T) -> T {
        let mut driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
        let out = change(&mut driver);
        self.changed.notify_all();
        out
    }
}

struct FakePort(Arc<Shared>);

impl Drop for FakePort {
    fn drop(&mut self) {
        self.0.with(|d| d.closed = true);
    }
}

impl Port for FakePort {
    fn slots(&self) -> usize {
        SLOTS
    }

    fn fd(&self) -> RawFd {
        self.0.event.as_raw_fd()
    }

    fn fetch(&mut self) -> io::Result<()> {
        self.0.with(|d| d.fetched = true);
        Ok(())
    }

    fn next(&mut self) -> Option<(usize, i32)> {
        self.0.with(|d| d.given.pop_front())
    }

    fn descriptor(&self, slot: usize) -> [u8; DESCRIPTOR_BYTES] {
        self.0.with(|d| d.descriptors[slot])
    }

    fn take_data(&mut self, slot: usize, into: &mut [u8]) -> io::Result<()> {
        self.0.with(|d| {
            if d.no_data {
                return Err(io::Error::other("no data"));
            }
            into.copy_from_slice(&d.data[slot]);
            Ok(())
        })
    }

    fn give_data(&mut self, slot: usize, from: &[u8]) -> io::Result<()> {
        self.0.with(|d| d.data[slot] = from.to_vec());
        Ok(())
    }

    fn commit(&mut self, slot: usize, result: i32) -> io::Result<()> {
        self.0.with(|d| d.answers[slot].push(result));
        Ok(())
    }

    fn submit(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Bench {
    dir: TempDir,
    volume: Arc<Volume>,
    shared: Arc<Shared>,
    orders: Option<mpsc::Sender<Order<FakePort>>>,
    reports: mpsc::Receiver<Report>,
    waker: Waker,
    thread: Option<JoinHandle<()>>,
    counters: Arc<UblkCounters>,
}

impl Bench {
    fn start(read_only: bool, buffers: usize) -> Bench {
        let dir = TempDir::new().unwrap();
        File::create(dir.path().join("disk")).unwrap().set_len(VOLUME).unwrap();
        let uri = format!("file:{}", dir.path().join("disk").display()).parse().unwrap();
        let store = backing::open(&uri, read_only, false, Timeouts::default()).unwrap();
        let volume = Arc::new(Volume::new("disk", store, 4096, false));
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let driver = Driver {
            descriptors: vec![[0; DESCRIPTOR_BYTES]; SLOTS],
            data: vec![Vec::new(); SLOTS],
            answers: vec![Vec::new(); SLOTS],
            ..Driver::default()
        };
        let shared =
            Arc::new(Shared { driver: Mutex::new(driver), changed: Condvar::new(), event });
        let (orders, told) = mpsc::channel();
        let (tell, reports) = mpsc::channel();
        let poll = Poll::new().unwrap();
        let waker = Waker::new(poll.registry(), Token(WAKE)).unwrap();
        let registry = poll.registry().try_clone().unwrap();
        let service = pass_through(0, registry, SERVICE).unwrap();
        let counters: Arc<UblkCounters> = Arc::default();
        let worker = Worker::<PassThrough, FakePort>::new(
            "test".into(),
            service,
            poll,
            buffers,
            counters.clone(),
            told,
            tell,
        );
        let thread = std::thread::spawn(move || worker.run());
        let port = FakePort(shared.clone());
        let shape = Shape::new(&volume.capabilities(), TRANSFER);
        let served = volume.clone();
        let told = Arc::new(Told::new(&served));
        let job = Job { volume: served, told, shape, open: Box::new(move || Ok(port)) };
        orders.send(Order::Serve(job)).unwrap();
        waker.wake().unwrap();
        let bench = Bench {
            dir,
            volume,
            shared,
            orders: Some(orders),
            reports,
            waker,
            thread: Some(thread),
            counters,
        };
        assert!(matches!(bench.report(), Report::Serving));
        assert!(bench.shared.with(|d| d.fetched));
        bench
    }

    fn report(&self) -> Report {
        self.reports.recv_timeout(PATIENCE).unwrap()
    }

    fn tell(&self, order: Order<FakePort>) {
        self.orders.as_ref().unwrap().send(order).unwrap();
        self.waker.wake().unwrap();
    }

    /// The driver gives a slot back.
    fn give(&self, slot: usize, result: i32) {
        self.shared.with(|d| d.given.push_back((slot, result)));
        rustix::io::write(self.shared.event.as_fd(), &1u64.to_ne_bytes()).unwrap();
    }

    fn put(&self, slot: usize, descriptor: [u8; DESCRIPTOR_BYTES], data: Vec<u8>) {
        self.shared.with(|d| {
            d.descriptors[slot] = descriptor;
            d.data[slot] = data;
        });
        self.give(slot, 0);
    }

    /// The oldest answer under that slot.
    fn answer(&self, slot: usize) -> i32 {
        let end = Instant::now() + PATIENCE;
        let mut driver = self.shared.driver.lock().unwrap();
        while driver.answers[slot].is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "slot {slot} is not answered");
            driver = self.shared.changed.wait_timeout(driver, left).unwrap().0;
        }
        driver.answers[slot].remove(0)
    }

    fn ask(&self, op_flags: u32, sectors: u32, start: u64, data: Vec<u8>) -> i32 {
        self.put(3, descriptor(op_flags, sectors, start), data);
        self.answer(3)
    }

    fn disk(&self) -> Vec<u8> {
        std::fs::read(self.dir.path().join("disk")).unwrap()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.orders = None;
        let _ = self.waker.wake();
        let ended = self.thread.take().unwrap().join();
        assert!(std::thread::panicking() || ended.is_ok(), "the worker has panicked");
    }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0u8; len];
    Rng::new(seed).fill(&mut out);
    out
}

/// The disk is told after the volume has grown: what it asks for then is there.
#[test]
fn what_lies_behind_the_old_end_is_done_once_the_volume_has_grown() {
    let bench = Bench::start(false, 4 << 20);
    let end = VOLUME / 512;
    assert!(bench.ask(u32::from(op::READ), 8, end, Vec::new()) < 0);
    let more = bench.volume.backing().resize(Some(2 * VOLUME)).unwrap();
    assert!(bench.ask(u32::from(op::READ), 8, end, Vec::new()) < 0, "nobody has said so");
    bench.volume.set_size(more);
    let data = bytes(9, 4096);
    assert_eq!(bench.ask(u32::from(op::WRITE), 8, 2 * end - 8, data.clone()), 4096);
    assert_eq!(bench.disk()[2 * VOLUME as usize - 4096..], data);
    assert!(bench.ask(u32::from(op::READ), 8, 2 * end - 7, Vec::new()) < 0);
}

#[test]
fn what_is_asked_for_is_done() {
    let bench = Bench::start(false, 4 << 20);
    let data = bytes(1, 8192);
    assert_eq!(bench.ask(u32::from(op::WRITE), 16, 100, data.clone()), 8192);
    assert_eq!(bench.disk()[51200..59392], data);
    assert_eq!(bench.ask(u32::from(op::WRITE) | op::FUA, 16, 120, data.clone()), 8192);
    assert_eq!(bench.ask(u32::from(op::READ), 8, 104, Vec::new()), 4096);
    assert_eq!(bench.shared.with(|d| d.data[3].clone()), data[2048..6144]);
    assert_eq!(bench.ask(u32::from(op::FLUSH), 0, 0, Vec::new()), 0);
    assert_eq!(bench.ask(u32::from(op::WRITE_ZEROES), 8, 104, Vec::new()), 0);
    let zeroes = u32::from(op::WRITE_ZEROES) | op::NOUNMAP | op::FUA;
    assert_eq!(bench.ask(zeroes, 1, 112, Vec::new()), 0);
    let disk = bench.disk();
    assert_eq!(disk[51200..53248], data[..2048]);
    assert!(disk[53248..57856].iter().all(|&b| b == 0));
    assert_eq!(disk[57856..59392], data[6656..]);
    assert_eq!(bench.ask(u32::from(op::DISCARD), 64, 0, Vec::new()), 0);
    assert_eq!(bench.counters.requests.load(Ordering::Relaxed), 7);
    assert_eq!(bench.counters.refused.load(Ordering::Relaxed), 0);
}

#[test]
fn what_cannot_be_done_is_answered_with_an_error() {
    let bench = Bench::start(false, 4 << 20);
    let sectors = VOLUME / 512;
    assert_eq!(bench.ask(u32::from(op::READ), 2, sectors - 1, Vec::new()), -22);
    assert_eq!(bench.ask(13, 8, 0, Vec::new()), -95);
    assert_eq!(bench.ask(u32::from(op::WRITE), u32::MAX, 0, Vec::new()), -22);
    bench.shared.with(|d| d.no_data = true);
    assert_eq!(bench.ask(u32::from(op::WRITE), 8, 0, Vec::new()), -5);
    assert_eq!(bench.counters.refused.load(Ordering::Relaxed), 4);
    // None of that keeps the next from being done.
    assert_eq!(bench.ask(u32::from(op::READ), 1, sectors - 1, Vec::new()), 512);
    let bench = Bench::start(true, 4 << 20);
    for change in [op::WRITE, op::DISCARD, op::WRITE_ZEROES] {
        assert_eq!(bench.ask(u32::from(change), 8, 0, vec![1; 4096]), -1);
    }
    assert_eq!(bench.ask(u32::from(op::READ), 8, 0, Vec::new()), 4096);
    assert!(bench.disk().iter().all(|&b| b == 0));
}

/// Memory for one request at a time, and every slot wants some.
#[test]
fn requests_wait_for_memory() {
    let bench = Bench::start(false, TRANSFER as usize);
    let sectors = TRANSFER / 512;
    let at = |slot: usize| (slot % 8) as u64 * u64::from(sectors);
    for slot in 0..SLOTS {
        let write = descriptor(u32::from(op::WRITE), sectors, at(slot));
        bench.put(slot, write, bytes(slot as u64, TRANSFER as usize));
    }
    for slot in 0..SLOTS {
        assert_eq!(bench.answer(slot), TRANSFER as i32);
    }
    // In their order: they were given in that, and there was memory for one.
    let last = SLOTS - 8;
    for slot in last..SLOTS {
        let start = at(slot) as usize * 512;
        let found = &bench.disk()[start..start + TRANSFER as usize];
        assert!(found == bytes(slot as u64, TRANSFER as usize), "slot {slot}");
    }
}

#[test]
fn the_driver_takes_the_device_away() {
    let bench = Bench::start(false, 1 << 20);
    assert_eq!(bench.ask(u32::from(op::READ), 8, 0, Vec::new()), 4096);
    for slot in 0..SLOTS - 1 {
        bench.give(slot, NODEV);
    }
    assert!(bench.reports.recv_timeout(Duration::from_millis(100)).is_err(), "one is still there");
    bench.give(SLOTS - 1, NODEV);
    assert!(matches!(bench.report(), Report::Left(Ok(()))));
    assert!(bench.shared.with(|d| d.closed));
    // An error that is none of those: the device cannot be served.
    let bench = Bench::start(false, 1 << 20);
    bench.give(0, -22);
    assert!(matches!(bench.report(), Report::Left(Err(_))));
}

/// A stop while the disk is in use: what has begun is answered, and the rest is for the next daemon.
#[test]
fn what_has_begun_is_answered_before_it_leaves() {
    let bench = Bench::start(false, 8 << 20);
    for slot in 0..8 {
        let write = descriptor(u32::from(op::WRITE), 2048, slot as u64 * 2048);
        bench.put(slot, write, vec![7; 1 << 20]);
    }
    // The first of them are answered: the others were given with them.
    assert_eq!(bench.answer(0), 1 << 20);
    bench.tell(Order::Leave);
    bench.put(20, descriptor(u32::from(op::READ), 8, 0), Vec::new());
    assert!(matches!(bench.report(), Report::Left(Ok(()))));
    let answers = bench.shared.with(|d| (d.closed, d.answers.clone()));
    assert!(answers.0);
    let disk = bench.disk();
    for (slot, answered) in answers.1.iter().enumerate().take(8).skip(1) {
        let there = disk[slot << 20..(slot + 1) << 20].iter().all(|&b| b == 7);
        assert!(answered.is_empty() || there, "slot {slot} is answered, and not written");
    }
}

/// A driver that gives slots that it does not have, and descriptors of garbage: answers, and no panic.
#[test]
fn garbage() {
    let bench = Bench::start(false, 2 << 20);
    for (slot, result) in [(SLOTS, 0), (usize::MAX, 0), (usize::MAX, NODEV)] {
        bench.give(slot, result);
    }
    let mut rng = Rng::new(5);
    for _ in 0..200 {
        for slot in 0..SLOTS {
            let mut raw = [0u8; DESCRIPTOR_BYTES];
            rng.fill(&mut raw);
            if rng.below(2) == 0 {
                let kind = rng.below(8) as u32 | (rng.below(1 << 16) as u32) << 8;
                let (sectors, start) = (rng.below(4096) as u32, rng.below(VOLUME / 256));
                raw = descriptor(kind, sectors, start);
            }
            let words = u32::from_ne_bytes([raw[4], raw[5], raw[6], raw[7]]) as usize;
            bench.put(slot, raw, vec![0x5a; words.saturating_mul(512).min(TRANSFER as usize)]);
        }
        for slot in 0..SLOTS {
            let answer = bench.answer(slot);
            assert!((-200..=TRANSFER as i32).contains(&answer), "{answer}");
        }
    }
    // The same slot twice: the second is none of ours any more.
    bench.put(1, descriptor(u32::from(op::READ), 8, 0), Vec::new());
    bench.give(1, 0);
    assert_eq!(bench.answer(1), 4096);
    assert_eq!(bench.ask(u32::from(op::READ), 8, 0, Vec::new()), 4096);
}

#[test]
fn addresses() {
    let listen = |text: &str| text.parse::<UblkListen>();
    let of = |id, volume: &str| UblkListen { id, volume: volume.into() };
    for (text, want) in [
        ("ublk:", of(None, "")),
        ("ublk:0", of(Some(0), "")),
        ("ublk:7,volume=disk", of(Some(7), "disk")),
        ("ublk:,volume=a,b=c", of(None, "a,b=c")),
    ] {
        assert_eq!(listen(text).unwrap(), want);
        assert_eq!(want.to_string(), text);
    }
    for (text, why) in [
        ("ublk", "colon"),
        ("ublk0", "colon"),
        ("ublk:x", "not one"),
        ("ublk:+1", "not one"),
        ("ublk:-1", "not one"),
        ("ublk:1048576", "below"),
        ("ublk:99999999999999999999", "below"),
        ("ublk:1,", "volume=NAME"),
        ("ublk:1,volume=", "missing"),
        ("ublk:1,disk", "volume=NAME"),
    ] {
        assert!(UblkListen::is_meant(text));
        let error = listen(text).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// Where there is no ublk, the message names what is missing and what else there is.
#[test]
#[cfg_attr(without = "no-ublk", ignore = "needs a kernel without ublk (no /dev/ublk-control)")]
fn a_kernel_without_ublk() {
    let error = UblkDoors::open(&["ublk:0,volume=disk".parse().unwrap()], false);
    let error = error.err().unwrap().to_string();
    for word in ["ublk:0,volume=disk", "this kernel has no ublk", "modprobe ublk_drv", "nbd-client"]
    {
        assert!(error.contains(word), "{error}");
    }
    let twice: Vec<UblkListen> = Vec::new();
    assert_eq!(UblkDoors::open(&twice, false).unwrap().count(), 0);
}
