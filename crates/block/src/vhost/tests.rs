//! A driver that does what it should, and one that does not, against a device with a file behind it.

use std::fs::File;
use std::os::fd::AsRawFd;

use larder_base::Rng;
use tempfile::TempDir;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend, VhostUserProtocolFeatures as Protocol};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Bytes, FileOffset, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::config::{Shape, WRITEBACK, feature};
use super::device::QUIET;
use super::inflight::Inflight;
use super::request::{self, Range, Table, What, kind, parse, status};
use super::*;
use crate::backing::{self, Timeouts};
use crate::cache::Volume;
use crate::cache::service::pass_through;

const VOLUME: u64 = 4 << 20;
/// Guest memory: queue q has its rings at q * RINGS, the rest is for data.
const MEMORY: u64 = 6 << 20;
const RINGS: u64 = 0x10000;
const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x8000;
const DATA: u64 = 0x100000;
const SIZE: u16 = 128;
/// Where the front end has the guest's memory, to its own eyes.
const USER: u64 = 0x7f00_0000_0000;

/// A descriptor.
#[derive(Clone, Copy)]
struct D {
    at: u64,
    len: u32,
    flags: u16,
    next: u16,
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

fn put(memory: &Memory, table: u64, index: u16, d: D) {
    let at = table + u64::from(index) * 16;
    memory.write_obj(d.at, GuestAddress(at)).unwrap();
    memory.write_obj(d.len, GuestAddress(at + 8)).unwrap();
    memory.write_obj(d.flags, GuestAddress(at + 12)).unwrap();
    memory.write_obj(d.next, GuestAddress(at + 14)).unwrap();
}

fn shared_memory() -> (File, Memory) {
    let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(MEMORY).unwrap();
    let part = FileOffset::new(file.try_clone().unwrap(), 0);
    let ranges = [(GuestAddress(0), MEMORY as usize, Some(part))];
    (file, Memory::from_ranges_with_files(ranges).unwrap())
}

struct Bench {
    dir: TempDir,
    server: Option<VhostServer>,
    volume: Option<Arc<Volume>>,
}

impl Bench {
    fn start(read_only: bool, buffers: usize) -> Bench {
        let dir = TempDir::new().unwrap();
        File::create(dir.path().join("disk")).unwrap().set_len(VOLUME).unwrap();
        let mut bench = Bench { dir, server: None, volume: None };
        bench.again(read_only, buffers);
        bench
    }

    fn again(&mut self, read_only: bool, buffers: usize) {
        (self.server, self.volume) = (None, None);
        let uri = format!("file:{}", self.dir.path().join("disk").display()).parse().unwrap();
        let store = backing::open(&uri, read_only, false, Timeouts::default()).unwrap();
        let volumes = Arc::new(Volumes::default());
        self.volume = Some(volumes.add(Volume::new("disk", store, 4096, false)).unwrap());
        let listen = [format!("vhost:{},volume=disk", self.socket()).parse().unwrap()];
        let server = VhostServer::start(&listen, &volumes, buffers, pass_through).unwrap();
        self.server = Some(server);
    }

    fn socket(&self) -> String {
        self.dir.path().join("socket").display().to_string()
    }

    fn disk(&self) -> Vec<u8> {
        std::fs::read(self.dir.path().join("disk")).unwrap()
    }

    fn counters(&self) -> &VhostCounters {
        self.server.as_ref().unwrap().counters().next().unwrap().1
    }
}

/// A front end with a guest in it, whose driver asks for one thing at a time on each queue.
struct Driver {
    front: Frontend,
    file: File,
    memory: Memory,
    queues: Vec<Side>,
}

struct Side {
    kick: EventFd,
    call: EventFd,
    available: u16,
    used: u16,
}

impl Driver {
    fn connect(bench: &Bench) -> Driver {
        let (file, memory) = shared_memory();
        Driver::with(bench, file, memory)
    }

    fn with(bench: &Bench, file: File, memory: Memory) -> Driver {
        let mut front = Frontend::connect(bench.socket(), 64).unwrap();
        front.set_owner().unwrap();
        front.get_features().unwrap();
        let offered = front.get_protocol_features().unwrap();
        let wanted = Protocol::MQ
            | Protocol::CONFIG
            | Protocol::REPLY_ACK
            | Protocol::INFLIGHT_SHMFD
            | Protocol::BACKEND_REQ;
        assert!(offered.contains(wanted));
        front.set_protocol_features(wanted).unwrap();
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        Driver { front, file, memory, queues: Vec::new() }
    }

    fn negotiate(&mut self, without: u64) {
        let features = self.front.get_features().unwrap();
        self.front.set_features(features & !without).unwrap();
        self.share();
    }

    fn share(&mut self) {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY,
            userspace_addr: USER,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        };
        self.front.set_mem_table(&[region]).unwrap();
    }

    /// Sets up another queue, which begins at `base`.
    fn queue(&mut self, base: u16) {
        let index = self.queues.len();
        let at = USER + index as u64 * RINGS;
        let side = Side {
            kick: EventFd::new(0).unwrap(),
            call: EventFd::new(0).unwrap(),
            available: base,
            used: base,
        };
        self.front.set_vring_num(index, SIZE).unwrap();
        let config = VringConfigData {
            queue_max_size: SIZE,
            queue_size: SIZE,
            flags: 0,
            desc_table_addr: at,
            used_ring_addr: at + USED,
            avail_ring_addr: at + AVAILABLE,
            log_addr: None,
        };
        self.front.set_vring_addr(index, &config).unwrap();
        self.front.set_vring_base(index, base).unwrap();
        self.front.set_vring_call(index, &side.call).unwrap();
        self.front.set_vring_kick(index, &side.kick).unwrap();
        self.front.set_vring_enable(index, true).unwrap();
        self.queues.push(side);
    }

    fn rings(queue: usize) -> u64 {
        queue as u64 * RINGS
    }

    /// Makes a chain available.
    fn offer(&mut self, queue: usize, head: u16) {
        let side = &mut self.queues[queue];
        let at = Driver::rings(queue) + AVAILABLE;
        let slot = u64::from(side.available % SIZE);
        self.memory.write_obj(head, GuestAddress(at + 4 + 2 * slot)).unwrap();
        side.available = side.available.wrapping_add(1);
        let idx = side.available;
        self.memory.store(idx, GuestAddress(at + 2), std::sync::atomic::Ordering::Release).unwrap();
    }

    fn kick(&self, queue: usize) {
        self.queues[queue].kick.write(1).unwrap();
    }

    fn used(&self, queue: usize) -> u16 {
        let at = GuestAddress(Driver::rings(queue) + USED + 2);
        self.memory.load(at, std::sync::atomic::Ordering::Acquire).unwrap()
    }

    /// Waits until one more is answered: its head and length.
    fn answer(&mut self, queue: usize) -> (u32, u32) {
        let end = Instant::now() + Duration::from_secs(120);
        while self.used(queue) == self.queues[queue].used {
            assert!(Instant::now() < end, "no answer");
            std::thread::sleep(Duration::from_micros(50));
        }
        let side = &mut self.queues[queue];
        let slot = u64::from(side.used % SIZE);
        side.used = side.used.wrapping_add(1);
        let at = Driver::rings(queue) + USED + 4 + 8 * slot;
        let head = self.memory.read_obj(GuestAddress(at)).unwrap();
        (head, self.memory.read_obj(GuestAddress(at + 4)).unwrap())
    }

    /// Lays out a request in descriptors from `head` on: header, data in pieces, status. Returns where the status is.
    fn lay(&self, queue: usize, head: u16, request: (u32, u64), data: &[(u64, u32)]) -> u64 {
        let table = Driver::rings(queue);
        let at = DATA + u64::from(head) * 32 + queue as u64 * 0x1000;
        self.memory.write_obj(request.0, GuestAddress(at)).unwrap();
        self.memory.write_obj(0u32, GuestAddress(at + 4)).unwrap();
        self.memory.write_obj(request.1, GuestAddress(at + 8)).unwrap();
        self.memory.write_obj(0xffu8, GuestAddress(at + 16)).unwrap();
        put(&self.memory, table, head, D { at, len: 16, flags: NEXT, next: head + 1 });
        let flags = if request.0 == kind::IN || request.0 == kind::GET_ID { WRITE } else { 0 };
        let mut index = head + 1;
        for &(at, len) in data {
            put(&self.memory, table, index, D { at, len, flags: flags | NEXT, next: index + 1 });
            index += 1;
        }
        put(&self.memory, table, index, D { at: at + 16, len: 1, flags: WRITE, next: 0 });
        at + 16
    }

    /// Asks, and returns the status and the length of the answer.
    fn ask(&mut self, queue: usize, request: (u32, u64), data: &[(u64, u32)]) -> (u8, u32) {
        let at = self.lay(queue, 0, request, data);
        self.offer(queue, 0);
        self.kick(queue);
        let (head, len) = self.answer(queue);
        assert_eq!(head, 0);
        (self.memory.read_obj(GuestAddress(at)).unwrap(), len)
    }

    fn bytes(&self, at: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.memory.read_slice(&mut out, GuestAddress(at)).unwrap();
        out
    }

    fn ranges(&self, at: u64, ranges: &[(u64, u32, u32)]) -> (u64, u32) {
        for (i, &(sector, sectors, flags)) in ranges.iter().enumerate() {
            let at = at + 16 * i as u64;
            self.memory.write_obj(sector, GuestAddress(at)).unwrap();
            self.memory.write_obj(sectors, GuestAddress(at + 8)).unwrap();
            self.memory.write_obj(flags, GuestAddress(at + 12)).unwrap();
        }
        (at, 16 * ranges.len() as u32)
    }
}

const BUFFER: u64 = DATA + 0x10000;

#[test]
fn addresses() {
    let parse = |text: &str| text.parse::<VhostListen>();
    assert_eq!(
        parse("vhost:/run/x").unwrap(),
        VhostListen { path: "/run/x".into(), volume: "".into() }
    );
    let named = parse("vhost:/run/x,volume=a,b").unwrap();
    assert_eq!(named, VhostListen { path: "/run/x".into(), volume: "a,b".into() });
    assert_eq!(named.to_string(), "vhost:/run/x,volume=a,b");
    for text in
        ["", "vhost:", "vhost:,volume=a", "vhost:/x,", "vhost:/x,volume=", "vhost:/x,queues=1"]
    {
        let error = parse(text).unwrap_err().to_string();
        assert!(error.starts_with(&format!("'{text}' is not")), "{error}");
    }
    assert!(parse(&format!("vhost:/{}", "x".repeat(107))).is_err());
}

/// Reads, writes, discards and zeroes on two queues, against a model of the volume.
#[test]
fn random_requests_against_a_model() {
    let bench = Bench::start(false, 64 << 20);
    let mut driver = Driver::connect(&bench);
    driver.negotiate(0);
    driver.queue(0);
    driver.queue(0);
    let mut model = vec![0u8; VOLUME as usize];
    let mut rng = Rng::new(5);
    for step in 0..600u32 {
        let queue = rng.below(2) as usize;
        let sector = rng.below(VOLUME / 512);
        let most = (VOLUME / 512 - sector).min(400);
        let sectors = rng.range(1, most + 1);
        let (from, bytes) = ((sector * 512) as usize, (sectors * 512) as usize);
        // Its data lie in two pieces, split anywhere.
        let cut = rng.below(bytes as u64 - 1) as u32 + 1;
        let pieces = [(BUFFER, cut), (BUFFER + 0x80000, bytes as u32 - cut)];
        match rng.below(5) {
            0 | 1 => {
                assert_eq!(driver.ask(queue, (kind::IN, sector), &pieces), (0, bytes as u32 + 1));
                let mut read = driver.bytes(BUFFER, cut as usize);
                read.extend(driver.bytes(BUFFER + 0x80000, bytes - cut as usize));
                assert!(read == model[from..from + bytes], "step {step}");
            }
            2 => {
                let data: Vec<u8> = (0..bytes).map(|i| (i as u32 ^ step) as u8).collect();
                let (a, b) = data.split_at(cut as usize);
                driver.memory.write_slice(a, GuestAddress(BUFFER)).unwrap();
                driver.memory.write_slice(b, GuestAddress(BUFFER + 0x80000)).unwrap();
                assert_eq!(driver.ask(queue, (kind::OUT, sector), &pieces), (0, 1));
                model[from..from + bytes].copy_from_slice(&data);
            }
            3 => {
                let half = sectors / 2;
                let list = [(sector, half as u32, 1), (sector + half, (sectors - half) as u32, 0)];
                let data = driver.ranges(BUFFER, &list);
                assert_eq!(driver.ask(queue, (kind::WRITE_ZEROES, 0), &[data]), (0, 1));
                model[from..from + bytes].fill(0);
            }
            _ => {
                assert_eq!(driver.ask(queue, (kind::FLUSH, 0), &[]), (0, 1));
            }
        }
    }
    assert!(bench.disk() == model);
    let data = driver.ranges(BUFFER, &[(8, 16, 0)]);
    assert_eq!(driver.ask(0, (kind::DISCARD, 0), &[data]), (0, 1));
    assert_eq!(driver.ask(0, (kind::GET_ID, 0), &[(BUFFER, 20)]), (0, 21));
    assert_eq!(driver.bytes(BUFFER, 6), b"disk\0\0");
    // The guest is told.
    assert!(driver.queues[0].call.read().unwrap() > 0);
    // The driver may choose durable writes.
    let flags = VhostUserConfigFlags::WRITABLE;
    driver.front.set_config(WRITEBACK as u32, flags, &[0]).unwrap();
    let (_, space) =
        driver.front.get_config(0, 60, VhostUserConfigFlags::empty(), &[0; 60]).unwrap();
    assert_eq!((&space[..8], space[WRITEBACK]), (&(VOLUME / 512).to_le_bytes()[..], 0));
    assert_eq!(driver.ask(1, (kind::OUT, 3), &[(BUFFER, 512)]), (0, 1));
    // A stopped queue says where it is, and goes on from there.
    let base = driver.front.get_vring_base(1).unwrap();
    assert_eq!(base, u32::from(driver.queues[1].available));
}

/// A volume that grows while a guest has it: the configuration space says so, what lies behind the old end can be had, and a
/// front end that has given a socket for it is told to look.
#[test]
fn a_volume_that_grows_is_a_larger_disk() {
    for listens in [true, false] {
        let bench = Bench::start(false, 64 << 20);
        let mut driver = Driver::connect(&bench);
        driver.negotiate(0);
        let (mut mine, theirs) = UnixStream::pair().unwrap();
        if listens {
            driver.front.set_backend_request_fd(&theirs).unwrap();
        }
        drop(theirs);
        driver.queue(0);
        let end = VOLUME / 512;
        assert_eq!(driver.ask(0, (kind::IN, end), &[(BUFFER, 512)]), (status::IOERR, 1));
        let face = || bench.server.as_ref().unwrap().faces().next().unwrap().status();
        let until = Instant::now() + Duration::from_secs(20);
        while face().queues == 0 {
            assert!(Instant::now() < until, "{:?}", face());
            std::thread::sleep(Duration::from_millis(5));
        }
        let seen = face();
        assert_eq!((seen.queues, seen.queue_size, seen.grows), (1, u64::from(SIZE), listens));
        assert_eq!((&*seen.face, &*seen.volume, seen.connected), ("vhost-user-blk", "disk", true));
        assert_eq!((seen.bytes, seen.requests, seen.refused), (VOLUME, 1, 1));
        assert!(seen.features.iter().any(|f| f == "flush"), "{seen:?}");
        let volume = bench.volume.as_ref().unwrap();
        volume.set_size(volume.backing().resize(Some(2 * VOLUME)).unwrap());
        mine.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut told = [0u8; 12];
        if listens {
            std::io::Read::read_exact(&mut mine, &mut told).unwrap();
            // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, version 1, no payload.
            assert_eq!(told, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        } else {
            while face().bytes == VOLUME {
                assert!(Instant::now() < until, "{:?}", face());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        let none = VhostUserConfigFlags::empty();
        let (_, space) = driver.front.get_config(0, 60, none, &[0; 60]).unwrap();
        assert_eq!(space[..8], (2 * end).to_le_bytes());
        assert_eq!(driver.ask(0, (kind::IN, 2 * end - 1), &[(BUFFER, 512)]), (0, 513));
        assert_eq!(driver.ask(0, (kind::IN, 2 * end), &[(BUFFER, 512)]), (status::IOERR, 1));
        // Nothing else comes by it, and it goes with the front end.
        drop(driver);
        assert_eq!(std::io::Read::read(&mut mine, &mut told).unwrap(), 0);
    }
}

impl Bench {
    fn grow(&self, bytes: u64) {
        let volume = self.volume.as_ref().unwrap();
        volume.set_size(volume.backing().resize(Some(bytes)).unwrap());
    }
}

/// The device's own channel to a front end.
struct Heard(UnixStream);

impl Heard {
    fn of(driver: &mut Driver) -> Heard {
        let (mine, theirs) = UnixStream::pair().unwrap();
        driver.front.set_backend_request_fd(&theirs).unwrap();
        mine.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Heard(mine)
    }

    /// Waits for the message that the configuration space is another.
    fn change(&mut self) {
        let mut told = [0u8; 12];
        std::io::Read::read_exact(&mut self.0, &mut told).unwrap();
        assert_eq!(told, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    }

    /// Nothing more is said for longer than the device looks and waits.
    fn nothing(&mut self) {
        self.0.set_read_timeout(Some(2 * LOOK + Duration::from_millis(500))).unwrap();
        let read = std::io::Read::read(&mut self.0, &mut [0; 1]);
        assert_eq!(read.unwrap_err().kind(), ErrorKind::WouldBlock);
        self.0.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    }
}

fn capacity(driver: &mut Driver) -> u64 {
    let none = VhostUserConfigFlags::empty();
    let (_, space) = driver.front.get_config(0, 60, none, &[0; 60]).unwrap();
    u64::from_le_bytes(space[..8].try_into().unwrap()) * 512
}

/// A front end that connects again does not read the configuration space again by itself (QEMU does not): it is told to when
/// its queues begin, and not where it has read it.
#[test]
fn a_front_end_that_comes_again_is_told_of_the_size() {
    let bench = Bench::start(false, 64 << 20);
    let mut driver = Driver::connect(&bench);
    let mut heard = Heard::of(&mut driver);
    driver.negotiate(0);
    assert_eq!(capacity(&mut driver), VOLUME);
    driver.queue(0);
    heard.nothing();
    drop(driver);
    bench.grow(2 * VOLUME);
    let mut driver = Driver::connect(&bench);
    let mut heard = Heard::of(&mut driver);
    driver.negotiate(0);
    driver.queue(0);
    heard.change();
    assert_eq!(capacity(&mut driver), 2 * VOLUME);
    assert_eq!(driver.ask(0, (kind::IN, 2 * VOLUME / 512 - 1), &[(BUFFER, 512)]), (0, 513));
    // Another queue begins: it has read the size meanwhile.
    driver.queue(0);
    heard.nothing();
    // It is told before its guest's queues begin, when front ends forget it, and when they do.
    drop(driver);
    let mut driver = Driver::connect(&bench);
    let mut heard = Heard::of(&mut driver);
    driver.negotiate(0);
    assert_eq!(capacity(&mut driver), 2 * VOLUME);
    bench.grow(3 * VOLUME);
    heard.change();
    driver.queue(0);
    heard.change();
    assert_eq!(capacity(&mut driver), 3 * VOLUME);
}

/// Front ends that never read what they are told, that have hung up there, or give another channel: a volume that grows all the
/// time is served on, the guest's garbage with it.
#[test]
fn a_volume_grows_under_guests_and_front_ends_that_do_what_they_must_not() {
    let bench = Bench::start(false, 64 << 20);
    let mut rng = Rng::new(11);
    let mut size = VOLUME;
    for round in 0..4 {
        let mut driver = Driver::connect(&bench);
        driver.negotiate(if round % 2 == 0 { feature::EVENT_IDX } else { 0 });
        let (mine, theirs) = UnixStream::pair().unwrap();
        driver.front.set_backend_request_fd(&theirs).unwrap();
        let kept = match round {
            // Full: nothing can be written to it.
            0 => {
                theirs.set_nonblocking(true).unwrap();
                while std::io::Write::write(&mut &theirs, &[0; 4096]).is_ok() {}
                Some(mine)
            }
            // Nobody is there.
            1 => None,
            2 => {
                mine.shutdown(std::net::Shutdown::Both).unwrap();
                Some(mine)
            }
            // Another one takes its place.
            _ => {
                let (mine, theirs) = UnixStream::pair().unwrap();
                driver.front.set_backend_request_fd(&theirs).unwrap();
                Some(mine)
            }
        };
        drop(theirs);
        driver.queue(0);
        size += 1 << 20;
        bench.grow(size);
        let until = Instant::now() + LOOK + QUIET + Duration::from_millis(100);
        while Instant::now() < until {
            garbage(&mut driver, &mut rng, size / 512);
            std::thread::sleep(Duration::from_millis(5));
        }
        drop((driver, kept));
    }
    assert_eq!(bench.disk().len() as u64, size);
    let mut driver = Driver::connect(&bench);
    let mut heard = Heard::of(&mut driver);
    driver.negotiate(0);
    driver.queue(0);
    heard.change();
    assert_eq!(capacity(&mut driver), size);
    assert_eq!(driver.ask(0, (kind::IN, size / 512 - 1), &[(BUFFER, 512)]), (0, 513));
    assert_eq!(driver.ask(0, (kind::IN, size / 512), &[(BUFFER, 512)]), (status::IOERR, 1));
}

/// What is no socket is refused, and the next front end is served.
#[test]
fn a_channel_that_is_none() {
    let bench = Bench::start(false, 64 << 20);
    let mut driver = Driver::connect(&bench);
    driver.negotiate(0);
    let file = driver.file.try_clone().unwrap();
    assert!(driver.front.set_backend_request_fd(&file).is_err());
    drop(driver);
    let mut driver = Driver::connect(&bench);
    driver.negotiate(0);
    driver.queue(0);
    assert_eq!(driver.ask(0, (kind::IN, 0), &[(BUFFER, 512)]), (0, 513));
}

#[test]
fn requests_that_must_be_refused() {
    for read_only in [false, true] {
        let bench = Bench::start(read_only, 64 << 20);
        let mut driver = Driver::connect(&bench);
        driver.negotiate(feature::EVENT_IDX);
        driver.queue(0);
        let before = bench.disk();
        let end = VOLUME / 512;
        let refused = |driver: &mut Driver, code, request, data: &[(u64, u32)]| {
            assert_eq!(driver.ask(0, request, data), (code, 1), "{request:?}");
        };
        refused(&mut driver, status::IOERR, (kind::IN, end), &[(BUFFER, 512)]);
        refused(&mut driver, status::IOERR, (kind::IN, end - 1), &[(BUFFER, 1024)]);
        refused(&mut driver, status::IOERR, (kind::IN, u64::MAX), &[(BUFFER, 512)]);
        refused(&mut driver, status::IOERR, (kind::OUT, u64::MAX / 512 + 1), &[(BUFFER, 512)]);
        refused(&mut driver, status::IOERR, (kind::IN, 0), &[(BUFFER, 511)]);
        refused(&mut driver, status::IOERR, (kind::OUT, end), &[(BUFFER, 512)]);
        // Thirteen times 4 MiB: more than the longest.
        let much = vec![(BUFFER, 4 << 20); 13];
        refused(&mut driver, status::IOERR, (kind::IN, 0), &much);
        refused(&mut driver, status::UNSUPP, (77, 0), &[]);
        let bad_range = driver.ranges(BUFFER, &[(end - 1, 2, 0)]);
        refused(&mut driver, status::IOERR, (kind::DISCARD, 0), &[bad_range]);
        refused(&mut driver, status::IOERR, (kind::WRITE_ZEROES, 0), &[(BUFFER, 15)]);
        if read_only {
            refused(&mut driver, status::IOERR, (kind::OUT, 0), &[(BUFFER, 512)]);
            let range = driver.ranges(BUFFER, &[(0, 2, 0)]);
            refused(&mut driver, status::IOERR, (kind::WRITE_ZEROES, 0), &[range]);
        } else {
            let unmap = driver.ranges(BUFFER, &[(0, 2, 1)]);
            refused(&mut driver, status::UNSUPP, (kind::DISCARD, 0), &[unmap]);
        }
        // It still works.
        assert_eq!(driver.ask(0, (kind::IN, 0), &[(BUFFER, 4096)]), (0, 4097));
        assert!(bench.disk() == before);
        assert!(bench.counters().refused.load(Ordering::Relaxed) > 10);
    }
}

/// More is asked for at once than there is memory for: all of it is answered.
#[test]
fn more_than_fits_into_the_buffers() {
    // The least that a device takes is one request of the longest, 32 MiB.
    let bench = Bench::start(false, 1);
    let mut driver = Driver::connect(&bench);
    driver.negotiate(0);
    driver.queue(0);
    for i in 0..42u16 {
        driver.lay(0, 3 * i, (kind::IN, 0), &[(BUFFER, 2 << 20)]);
        driver.offer(0, 3 * i);
    }
    driver.kick(0);
    let mut heads: Vec<u32> = (0..42)
        .map(|_| driver.answer(0))
        .map(|(head, len)| {
            assert_eq!(len, (2 << 20) + 1);
            head
        })
        .collect();
    heads.sort_unstable();
    assert_eq!(heads, (0..42).map(|i| 3 * i).collect::<Vec<u32>>());
}

/// What an earlier run had begun and not answered is done again, and nothing else.
#[test]
fn requests_under_way_survive_the_device() {
    let mut bench = Bench::start(false, 64 << 20);
    let (file, memory) = shared_memory();
    let mut driver = Driver::with(&bench, file.try_clone().unwrap(), memory);
    let asked = VhostUserInflight::new(0, 0, 1, SIZE);
    let (shape, kept) = driver.front.get_inflight_fd(&asked).unwrap();
    driver.front.set_inflight_fd(&shape, kept.as_raw_fd()).unwrap();
    driver.negotiate(0);
    driver.queue(0);
    for sector in 0..5 {
        assert_eq!(driver.ask(0, (kind::OUT, sector), &[(BUFFER, 512)]), (0, 1));
    }
    drop(driver);
    // The device is gone; three requests were made available, of which it had begun the first and the third.
    bench.again(false, 64 << 20);
    let memory = Memory::from_ranges_with_files([(
        GuestAddress(0),
        MEMORY as usize,
        Some(FileOffset::new(file.try_clone().unwrap(), 0)),
    )])
    .unwrap();
    let mut driver = Driver::with(&bench, file, memory);
    {
        let again = kept.try_clone().unwrap();
        let mut map = Inflight::adopt(again, 0, shape.mmap_size, 1, SIZE).unwrap();
        assert!(map.recover(0, SIZE, 5).is_empty());
        map.begin(0, 9);
        map.begin(0, 3);
    }
    driver.front.set_inflight_fd(&shape, kept.as_raw_fd()).unwrap();
    driver.negotiate(0);
    // The queue as it is before it is set up: 9 and 3 taken, 6 not.
    for (head, byte) in [(9u16, 9u8), (3, 3), (6, 6)] {
        let from = BUFFER + u64::from(head) * 512;
        driver.memory.write_slice(&[byte; 512], GuestAddress(from)).unwrap();
        driver.lay(0, head, (kind::OUT, u64::from(head)), &[(from, 512)]);
    }
    let available = Driver::rings(0) + AVAILABLE;
    for (i, head) in [9u16, 3, 6].iter().enumerate() {
        driver.memory.write_obj(*head, GuestAddress(available + 4 + 2 * (5 + i as u64))).unwrap();
    }
    driver.memory.write_obj(8u16, GuestAddress(available + 2)).unwrap();
    driver.queue(5);
    driver.queues[0].available = 8;
    let mut heads: Vec<u32> = (0..3).map(|_| driver.answer(0).0).collect();
    heads.sort_unstable();
    assert_eq!(heads, [3, 6, 9]);
    let disk = bench.disk();
    for sector in [3usize, 6, 9] {
        assert!(disk[sector * 512..(sector + 1) * 512].iter().all(|&b| b == sector as u8));
    }
    assert_eq!(bench.counters().resumed.load(Ordering::Relaxed), 2);
    // Nothing is left, and the queue goes on.
    assert_eq!(driver.ask(0, (kind::IN, 0), &[(BUFFER, 512)]), (0, 513));
    let map = Inflight::adopt(kept, 0, shape.mmap_size, 1, SIZE).unwrap();
    assert!(map.recover(0, SIZE, driver.used(0)).is_empty());
}

/// Front ends that say what they must not are dropped; the next is served.
#[test]
fn front_ends_that_break_the_protocol() {
    let bench = Bench::start(false, 64 << 20);
    let attempts: [fn(&mut Driver) -> bool; 8] = [
        |d| d.front.set_features(u64::MAX).is_err(),
        |d| d.front.set_vring_num(0, 100).is_err(),
        |d| d.front.set_vring_num(0, 0x8000).is_err(),
        |d| d.front.set_vring_num(63, 4096).is_err(),
        |d| {
            // A file shorter than the memory it is said to be.
            d.file.set_len(4096).unwrap();
            let region = VhostUserMemoryRegionInfo {
                guest_phys_addr: 0,
                memory_size: MEMORY,
                userspace_addr: USER,
                mmap_offset: 0,
                mmap_handle: d.file.as_raw_fd(),
            };
            d.front.set_mem_table(&[region]).is_err()
        },
        |d| {
            // A ring that does not lie in the memory.
            d.negotiate(0);
            let config = VringConfigData {
                queue_max_size: SIZE,
                queue_size: SIZE,
                flags: 0,
                desc_table_addr: USER + MEMORY - 16,
                used_ring_addr: USER + USED,
                avail_ring_addr: USER + AVAILABLE,
                log_addr: None,
            };
            let set = d.front.set_vring_addr(0, &config);
            set.is_err() || d.front.set_vring_kick(0, &EventFd::new(0).unwrap()).is_err()
        },
        |d| {
            let file = tempfile::tempfile().unwrap();
            let it = VhostUserInflight::new(1 << 20, 0, 1, SIZE);
            d.front.set_inflight_fd(&it, file.as_raw_fd()).is_err()
        },
        |d| {
            let huge = VhostUserInflight::new(0, 0, u16::MAX, u16::MAX);
            d.front.get_inflight_fd(&huge).is_err()
        },
    ];
    for (i, attempt) in attempts.iter().enumerate() {
        let mut driver = Driver::connect(&bench);
        assert!(attempt(&mut driver), "attempt {i}");
        drop(driver);
        // And bytes that are no message at all.
        use std::io::Write;
        let mut raw = std::os::unix::net::UnixStream::connect(bench.socket()).unwrap();
        raw.write_all(&[0xff; 64]).unwrap();
        drop(raw);
        let mut driver = Driver::connect(&bench);
        driver.negotiate(0);
        driver.queue(0);
        assert_eq!(driver.ask(0, (kind::IN, 0), &[(BUFFER, 512)]), (0, 513), "attempt {i}");
    }
}

/// A guest that writes random bytes into its first queue, and kicks: descriptors, headers with sectors below `sectors`, chains
/// that are none, and now and then an index that cannot be.
fn garbage(driver: &mut Driver, rng: &mut Rng, sectors: u64) {
    for index in 0..SIZE {
        let d = D {
            at: match rng.below(4) {
                0 => rng.below(u64::MAX),
                1 => rng.below(2 * MEMORY),
                _ => DATA + 16 * rng.below(4096),
            },
            len: match rng.below(4) {
                0 => rng.below(u64::from(u32::MAX)) as u32,
                1 => 16,
                _ => 512 * rng.below(9) as u32,
            },
            flags: rng.below(8) as u16,
            next: rng.below(u64::from(SIZE) + 3) as u16,
        };
        put(&driver.memory, 0, index, d);
    }
    for _ in 0..64 {
        let at = GuestAddress(DATA + 16 * rng.below(4096));
        let kinds = [0, 1, 4, 8, 11, 13, 99];
        driver.memory.write_obj(kinds[rng.below(7) as usize] as u32, at).unwrap();
        driver.memory.write_obj(rng.below(sectors), GuestAddress(at.0 + 8)).unwrap();
    }
    for _ in 0..rng.below(40) {
        let none = u64::from(rng.chance(0.02));
        let head = rng.below(u64::from(SIZE) + none) as u16;
        driver.offer(0, head);
    }
    if rng.chance(0.05) {
        let at = GuestAddress(AVAILABLE + 2);
        driver.memory.write_obj(rng.below(65536) as u16, at).unwrap();
    }
    driver.kick(0);
}

/// Rings and descriptors full of random bytes: the device stays, its memory does too, and other volumes with it.
#[test]
fn a_guest_that_writes_garbage_into_its_rings() {
    let bench = Bench::start(false, 64 << 20);
    let mut rng = Rng::new(77);
    for round in 0..60 {
        let mut driver = Driver::connect(&bench);
        driver.negotiate(if round % 2 == 0 { feature::EVENT_IDX } else { 0 });
        driver.queue(0);
        for _ in 0..20 {
            garbage(&mut driver, &mut rng, 9000);
        }
        drop(driver);
    }
    assert_eq!(bench.disk().len() as u64, VOLUME);
    let mut driver = Driver::connect(&bench);
    driver.negotiate(0);
    driver.queue(0);
    assert_eq!(driver.ask(0, (kind::IN, 0), &[(BUFFER, 512)]), (0, 513));
    assert!(bench.counters().requests.load(Ordering::Relaxed) > 1000);
}

fn shape() -> Shape {
    Shape {
        sectors: VOLUME / 512,
        max_transfer: 1 << 20,
        size_max: 8192,
        read_only: false,
        discard: true,
        preferred: 4096,
    }
}

/// Chains that only look like ones.
#[test]
fn chains_that_are_none() {
    let memory = Memory::from_ranges(&[(GuestAddress(0), 0x20000)]).unwrap();
    let table = Table { at: GuestAddress(0), len: 16 };
    let parse = |head| parse(&memory, table, head, &shape());
    // In a circle.
    for i in 0..16u16 {
        put(&memory, 0, i, D { at: 0x1000, len: 16, flags: NEXT, next: (i + 1) % 16 });
    }
    assert_eq!(parse(3), Err(request::Malformed::Endless));
    assert!(matches!(parse(16), Err(request::Malformed::Index { index: 16, len: 16 })));
    put(&memory, 0, 0, D { at: 0x1000, len: 16, flags: NEXT, next: 200 });
    assert!(matches!(parse(0), Err(request::Malformed::Index { index: 200, .. })));
    // No status; nothing at all.
    put(&memory, 0, 0, D { at: 0x1000, len: 16, flags: 0, next: 0 });
    assert_eq!(parse(0), Err(request::Malformed::NoStatus));
    put(&memory, 0, 0, D { at: 0x1000, len: 0, flags: WRITE, next: 0 });
    assert_eq!(parse(0), Err(request::Malformed::NoStatus));
    // To be read behind to be written.
    put(&memory, 0, 0, D { at: 0x1000, len: 16, flags: WRITE | NEXT, next: 1 });
    put(&memory, 0, 1, D { at: 0x1000, len: 16, flags: 0, next: 0 });
    assert_eq!(parse(0), Err(request::Malformed::Order));
    // Beyond the memory, at its end, and around the end of all addresses.
    for (at, len) in [(0x20000, 1), (0x1fff0, 17), (u64::MAX, 2), (0, u32::MAX)] {
        put(&memory, 0, 0, D { at, len, flags: WRITE, next: 0 });
        assert!(matches!(parse(0), Err(request::Malformed::Memory { .. })), "{at:#x} {len}");
    }
    // Tables in tables, empty ones, ones that go on.
    for (len, flags) in [(0, INDIRECT), (15, INDIRECT), (32, INDIRECT | NEXT)] {
        put(&memory, 0, 0, D { at: 0x2000, len, flags, next: 1 });
        assert_eq!(parse(0), Err(request::Malformed::Table));
    }
    put(&memory, 0, 0, D { at: 0x2000, len: 32, flags: INDIRECT, next: 0 });
    put(&memory, 0x2000, 0, D { at: 0x3000, len: 16, flags: INDIRECT, next: 0 });
    assert_eq!(parse(0), Err(request::Malformed::Table));
    // A table that is long and good.
    put(&memory, 0, 0, D { at: 0x8000, len: 16 * 1024, flags: INDIRECT, next: 0 });
    memory.write_obj(kind::IN, GuestAddress(0x3000)).unwrap();
    memory.write_obj(5u64, GuestAddress(0x3008)).unwrap();
    put(&memory, 0x8000, 0, D { at: 0x3000, len: 16, flags: NEXT, next: 1 });
    for i in 1..1000u16 {
        put(&memory, 0x8000, i, D { at: 0x4000, len: 512, flags: NEXT | WRITE, next: i + 1 });
    }
    put(&memory, 0x8000, 1000, D { at: 0x3010, len: 1, flags: WRITE, next: 0 });
    let parsed = parse(0).unwrap();
    let What::Read { offset, len, into } = parsed.what else { panic!() };
    assert_eq!((offset, len, into.len()), (5 * 512, 999 * 512, 999));
}

/// Anything at all: what is accepted lies within the memory and the volume.
#[test]
fn random_chains() {
    let memory = Memory::from_ranges(&[(GuestAddress(0x1000), 0x8000)]).unwrap();
    let mut rng = Rng::new(1234);
    let (mut accepted, mut refused, mut malformed) = (0, 0, 0);
    for _ in 0..30_000 {
        for index in 0..8u16 {
            let d = D {
                at: if rng.chance(0.03) { rng.below(u64::MAX) } else { 0x2000 + rng.below(0x6000) },
                len: if rng.chance(0.03) {
                    rng.below(1 << 32) as u32
                } else {
                    16 + 496 * rng.below(2) as u32
                },
                flags: [1, 1, 3, 3, 2, 2, 2, 4][rng.below(8) as usize],
                next: if rng.chance(0.03) { rng.below(65536) as u16 } else { index + 1 },
            };
            put(&memory, 0x1000, index, d);
            let at = d.at.clamp(0x2000, 0x7000);
            let what = [0u32, 1, 4, 8, 11, 13, 7][rng.below(7) as usize];
            memory.write_obj(what, GuestAddress(at)).unwrap();
            let sector = if rng.chance(0.03) { rng.below(u64::MAX) } else { rng.below(9000) };
            memory.write_obj(sector, GuestAddress(at + 8)).unwrap();
        }
        let table = Table { at: GuestAddress(0x1000), len: 8 };
        let parsed = parse(&memory, table, rng.below(9) as u16, &shape());
        let inside = |offset: u64, len: u32| assert!(len > 0 && offset + u64::from(len) <= VOLUME);
        let held = |pieces: &[request::Piece]| {
            for p in pieces {
                assert!(p.len > 0 && p.at.0 >= 0x1000 && p.at.0 + u64::from(p.len) <= 0x9000);
            }
        };
        match parsed.map(|p| p.what) {
            Err(_) => malformed += 1,
            Ok(What::Refused { .. }) => refused += 1,
            Ok(what) => {
                accepted += 1;
                match what {
                    What::Read { offset, len, into: pieces }
                    | What::Write { offset, len, from: pieces } => {
                        inside(offset, len);
                        held(&pieces);
                        assert_eq!(pieces.iter().map(|p| p.len).sum::<u32>(), len);
                    }
                    What::Discard(list) | What::WriteZeroes(list) => {
                        list.iter().for_each(|&Range { offset, len, .. }| inside(offset, len));
                    }
                    What::Id(pieces) => held(&pieces),
                    _ => {}
                }
            }
        }
    }
    assert!(accepted > 500 && refused > 500 && malformed > 500, "{accepted} {refused} {malformed}");
}
