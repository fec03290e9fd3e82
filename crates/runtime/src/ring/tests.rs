//! One suite over io_uring, threads on a file, threads on a device in memory.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use larder_base::{ByteSize, Rng};

use super::*;
use crate::device::{DeviceOptions, FlashDevice};
use crate::testing::{Fault, FaultyDevice, MemoryDevice};
use crate::{AlignedBuf, IoOp};

const SIZE: u64 = 4 << 20;
const LIMIT: Duration = Duration::from_secs(120);

/// Byte `i` of every test device.
fn byte(i: u64) -> u8 {
    (i ^ (i >> 8) ^ (i >> 16)).wrapping_mul(31) as u8
}

fn expected(offset: u64, len: u32) -> Vec<u8> {
    (offset..offset + u64::from(len)).map(byte).collect()
}

fn fill(device: &dyn Device) {
    let mut all = AlignedBuf::zeroed(SIZE as usize);
    all.iter_mut().enumerate().for_each(|(i, b)| *b = byte(i as u64));
    device.write_at(0, &all).unwrap();
    device.sync().unwrap();
}

fn file(dir: &Path, name: &str, direct: bool) -> Arc<dyn Device> {
    let options =
        DeviceOptions { direct, ..DeviceOptions::new(dir.join(name)).size(ByteSize(SIZE)) };
    let device = FlashDevice::open(&options).unwrap();
    fill(&device);
    Arc::new(device)
}

/// Runs `test` on every kind of ring that this host allows.
fn each_kind(options: RingOptions, test: impl Fn(&mut ReadRing)) {
    let dir = tempfile::tempdir().unwrap();
    let memory = Arc::new(MemoryDevice::new(SIZE as usize));
    fill(&*memory);
    let (direct, buffered) =
        (file(dir.path(), "direct", true), file(dir.path(), "buffered", false));
    let mut kinds = Vec::new();
    if let Ok(mut ring) =
        ReadRing::open(direct.clone(), &RingOptions { choice: RingChoice::Uring, ..options })
    {
        // As on a kernel before 6.1, which defers no completions.
        let (event, depth) = (ring.event.clone(), options.depth);
        let plain = open_uring(direct.clone(), depth, &event, false).unwrap();
        ring.backend = Backend::Uring(Box::new(plain));
        test(&mut ring);
    }
    for (device, choice) in [
        (direct.clone(), RingChoice::Uring),
        (buffered.clone(), RingChoice::Uring),
        (direct, RingChoice::Threads),
        (buffered, RingChoice::Threads),
        (memory as Arc<dyn Device>, RingChoice::Auto),
    ] {
        match ReadRing::open(device, &RingOptions { choice, ..options }) {
            Ok(mut ring) => {
                kinds.push(ring.kind());
                test(&mut ring);
            }
            // A host that forbids io_uring: then the refusal must say so.
            Err(e) => {
                let forbidden = cfg!(without = "io_uring") && choice == RingChoice::Uring;
                assert!(forbidden && e.to_string().contains("io_uring"), "{e}");
            }
        }
    }
    assert!(kinds.iter().filter(|&&k| k == "threads").count() == 3, "{kinds:?}");
}

/// Takes completions until `count` have come.
fn collect(
    ring: &mut ReadRing,
    count: usize,
    mut each: impl FnMut(u64, Result<&[u8], &DeviceError>),
) {
    let start = Instant::now();
    let mut got = 0;
    while got < count {
        ring.wait(Duration::from_millis(500));
        got += ring.completions(&mut each);
        assert!(start.elapsed() < LIMIT, "{got} of {count} after {LIMIT:?}");
    }
    assert_eq!(got, count);
}

#[test]
fn random_reads_of_any_alignment_return_the_right_bytes() {
    each_kind(RingOptions { depth: 32, threads: 3, ..RingOptions::default() }, |ring| {
        let mut rng = Rng::new(11);
        let mut asked: Vec<(u64, u32)> = Vec::new();
        let mut seen = vec![false; 2_000];
        let start = Instant::now();
        while asked.len() < 2_000 || ring.in_flight() > 0 {
            while asked.len() < 2_000 {
                let len = if rng.chance(0.7) { 4096 } else { rng.range(0, 70_000) as u32 };
                let mut offset = rng.below(SIZE - u64::from(len) + 1);
                if len == 4096 {
                    offset = offset / 4096 * 4096;
                }
                if ring.submit(asked.len() as u64, offset, len).is_err() {
                    break;
                }
                asked.push((offset, len));
            }
            ring.wait(Duration::from_millis(500));
            ring.completions(|token, bytes| {
                let (offset, len) = asked[token as usize];
                assert!(bytes.unwrap() == expected(offset, len), "{len} at {offset}");
                assert!(!std::mem::replace(&mut seen[token as usize], true), "completed twice");
            });
            assert!(start.elapsed() < LIMIT);
        }
        assert!(seen.iter().all(|&s| s));
        assert!(ring.buffer_bytes() <= 4 << 20);
    });
}

#[test]
fn depth_and_buffers_are_limits_and_completions_make_room() {
    each_kind(RingOptions { depth: 4, buffer_bytes: 32 << 10, ..RingOptions::default() }, |ring| {
        for token in 0..4 {
            ring.submit(token, token * 4096, 4096).unwrap();
        }
        assert_eq!(ring.submit(4, 0, 4096), Err(Full), "depth");
        collect(ring, 4, |_, b| assert!(b.is_ok()));
        ring.submit(5, 0, 20_000).unwrap();
        assert_eq!(ring.submit(6, 0, 4096), Err(Full), "buffers");
        collect(ring, 1, |_, b| assert!(b.unwrap() == expected(0, 20_000)));
        ring.submit(7, 0, 4096).unwrap();
        collect(ring, 1, |token, b| assert_eq!((token, b.unwrap().len()), (7, 4096)));
    });
}

#[test]
fn impossible_reads_complete_with_their_error_and_wake_the_owner() {
    each_kind(RingOptions { buffer_bytes: 64 << 10, ..RingOptions::default() }, |ring| {
        ring.submit(1, SIZE - 10, 11).unwrap();
        ring.submit(2, u64::MAX, 4096).unwrap();
        ring.submit(3, 0, 65_537).unwrap();
        ring.submit(4, SIZE - 1, 1).unwrap();
        let mut errors = 0;
        collect(ring, 4, |token, result| match (token, result) {
            (1 | 2, Err(DeviceError::OutOfRange { .. }))
            | (3, Err(DeviceError::TooLong { .. })) => errors += 1,
            (4, Ok(bytes)) => assert_eq!(bytes, [byte(SIZE - 1)]),
            (token, result) => panic!("{token}: {result:?}"),
        });
        assert_eq!(errors, 3);
        assert_eq!(ring.in_flight(), 0);
    });
}

/// A "device" whose descriptor is a pipe: its reads end when the test says so, and as short as it says.
#[derive(Debug)]
struct PipeDevice {
    name: Arc<str>,
    reader: OwnedFd,
}

/// A ring of io_uring on a pipe, and the pipe's other end.
fn ring_on_a_pipe() -> (ReadRing, std::fs::File) {
    let (reader, writer) = std::io::pipe().unwrap();
    let device = PipeDevice { name: "pipe".into(), reader: reader.into() };
    let options = RingOptions { choice: RingChoice::Uring, ..RingOptions::default() };
    let ring = ReadRing::open(Arc::new(device), &options).unwrap();
    (ring, OwnedFd::from(writer).into())
}

impl Device for PipeDevice {
    fn name(&self) -> &Arc<str> {
        &self.name
    }
    fn geometry(&self) -> crate::Geometry {
        crate::Geometry { size: 1 << 20, block: 512 }
    }
    fn read_at(&self, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
        unreachable!("the kernel reads")
    }
    fn write_at(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
        unreachable!("the test writes")
    }
    fn sync(&self) -> Result<(), DeviceError> {
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> Result<(), DeviceError> {
        Ok(())
    }
    fn raw(&self) -> Option<BorrowedFd<'_>> {
        Some(self.reader.as_fd())
    }
    fn read_unit(&self) -> u32 {
        1
    }
}

#[test]
#[cfg_attr(
    without = "io_uring",
    ignore = "needs io_uring (a kernel and a container that allow it)"
)]
fn dropping_an_io_uring_waits_until_the_kernel_is_done_with_its_memory() {
    use std::io::Write;
    const PAUSE: Duration = Duration::from_millis(80);
    let (mut ring, mut writer) = ring_on_a_pipe();
    ring.submit(1, 0, 4096).unwrap();
    ring.flush();
    ring.submit(2, 0, 4096).unwrap(); // not flushed: need not be awaited
    let start = Instant::now();
    let feeder = std::thread::spawn(move || {
        std::thread::sleep(PAUSE);
        writer.write_all(&[9; 4096]).unwrap();
        writer
    });
    drop(ring);
    assert!(start.elapsed() >= PAUSE, "dropped after {:?} with a read in flight", start.elapsed());
    drop(feeder.join().unwrap());
}

#[test]
#[cfg_attr(
    without = "io_uring",
    ignore = "needs io_uring (a kernel and a container that allow it)"
)]
fn short_reads_are_continued_where_they_stopped() {
    use std::io::Write;
    let (mut ring, mut writer) = ring_on_a_pipe();
    let bytes = expected(0, 4096);
    ring.submit(1, 0, 4096).unwrap();
    ring.flush();
    for piece in [&bytes[..1], &bytes[1..1000], &bytes[1000..4095]] {
        writer.write_all(piece).unwrap();
        ring.wait(Duration::from_millis(500));
        assert!(ring.pop().is_none(), "not all there yet");
    }
    writer.write_all(&bytes[4095..]).unwrap();
    collect(&mut ring, 1, |_, read| assert!(read.unwrap() == bytes));
    // And one that ends for good.
    ring.submit(2, 0, 4096).unwrap();
    writer.write_all(&bytes[..100]).unwrap();
    drop(writer);
    collect(&mut ring, 1, |_, read| {
        assert!(read.unwrap_err().to_string().contains("ended early"));
    });
}

#[test]
#[cfg_attr(
    without = "io_uring",
    ignore = "needs io_uring (a kernel and a container that allow it)"
)]
fn a_read_whose_signal_was_lost_is_found() {
    use std::io::Write;
    let (mut ring, mut writer) = ring_on_a_pipe();
    assert!(!ring.look(), "nothing is under way");
    let bytes = expected(0, 4096);
    ring.submit(1, 0, 4096).unwrap();
    ring.flush();
    assert!(!ring.look(), "it has not ended");
    writer.write_all(&bytes).unwrap();
    let begun = Instant::now();
    // Nobody asks the descriptor.
    while !ring.look() {
        assert!(begun.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(ring.pop().unwrap().bytes().unwrap(), bytes);
}

#[test]
fn dropping_with_reads_in_flight_leaves_other_memory_alone() {
    // Many rounds, so that the allocator hands the same memory out again at once.
    let dir = tempfile::tempdir().unwrap();
    let device = file(dir.path(), "flash", true);
    for choice in [RingChoice::Auto, RingChoice::Threads] {
        let options = RingOptions { choice, ..RingOptions::default() };
        for round in 0..20u64 {
            let mut ring = ReadRing::open(device.clone(), &options).unwrap();
            for token in 0..64 {
                ring.submit(token, (token * 7 + round) % 1000 * 4096, 4096).unwrap();
            }
            ring.flush();
            drop(ring);
            let canary = vec![0xA5u8; 64 * 4096];
            std::thread::yield_now();
            assert!(canary.iter().all(|&b| b == 0xA5));
        }
    }
}

#[test]
fn dropping_a_ring_of_threads_waits_for_the_read_under_way() {
    let memory = Arc::new(MemoryDevice::new(1 << 20));
    let slow = Arc::new(FaultyDevice::new(memory, 0));
    slow.reads.shut();
    let mut ring =
        ReadRing::open(slow.clone(), &RingOptions { threads: 2, ..RingOptions::default() })
            .unwrap();
    for token in 0..10 {
        ring.submit(token, 0, 4096).unwrap();
    }
    ring.flush();
    assert!(slow.reads.await_waiting(2, LIMIT));
    let start = Instant::now();
    let opener = std::thread::spawn({
        let slow = slow.clone();
        move || {
            std::thread::sleep(Duration::from_millis(30));
            slow.reads.open();
        }
    });
    drop(ring);
    assert!(start.elapsed() >= Duration::from_millis(30), "the threads outlive the ring");
    opener.join().unwrap();
    assert!(slow.count(IoOp::Read) <= 4, "reads that had not begun are not begun");
}

#[test]
fn a_device_error_reaches_its_own_read_only() {
    let memory = Arc::new(MemoryDevice::new(SIZE as usize));
    fill(&*memory);
    let faulty = Arc::new(FaultyDevice::new(memory, 0));
    faulty.arm(Fault { op: Some(IoOp::Read), nth: 5, times: 1, errno: Fault::EIO });
    let mut ring =
        ReadRing::open(faulty, &RingOptions { threads: 1, ..RingOptions::default() }).unwrap();
    assert_eq!(ring.kind(), "threads");
    assert!(ring.fallback_reason().is_some());
    for token in 0..10 {
        ring.submit(token, token * 4096, 4096).unwrap();
    }
    let mut failed = Vec::new();
    collect(&mut ring, 10, |token, result| match result {
        Ok(bytes) => assert!(bytes == expected(token * 4096, 4096)),
        Err(e) => failed.push((token, e.errno())),
    });
    assert_eq!(failed, [(5, Some(Fault::EIO))]);
}

#[test]
#[cfg_attr(without = "loop", ignore = "needs a loop device, and root")]
fn a_medium_error_reaches_its_own_read_only() {
    // A loop device whose file was shortened answers EIO beyond its end, as a disk does for a bad sector.
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    std::fs::write(&image, (0..SIZE).map(byte).collect::<Vec<u8>>()).unwrap();
    let disk = crate::device::tests::Loop::over(&image);
    let device: Arc<dyn Device> =
        Arc::new(FlashDevice::open(&DeviceOptions::new(&disk.0)).unwrap());
    std::fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(SIZE / 2).unwrap();
    for choice in [RingChoice::Auto, RingChoice::Threads] {
        let options = RingOptions { choice, ..RingOptions::default() };
        let mut ring = ReadRing::open(device.clone(), &options).unwrap();
        for token in 0..100 {
            ring.submit(token, token * (SIZE / 100) / 4096 * 4096, 4096).unwrap();
        }
        let mut failed = Vec::new();
        collect(&mut ring, 100, |token, result| match result {
            Ok(bytes) => assert!(bytes == expected(token * (SIZE / 100) / 4096 * 4096, 4096)),
            Err(e) => {
                assert_eq!(e.errno(), Some(libc::EIO), "{e}");
                failed.push(token);
            }
        });
        assert!(!failed.is_empty() && failed.iter().all(|&t| t >= 50), "{failed:?}");
        assert_eq!(ring.in_flight(), 0);
    }
}

#[test]
fn a_truncated_file_is_an_error_not_a_hang() {
    let dir = tempfile::tempdir().unwrap();
    for choice in [RingChoice::Auto, RingChoice::Threads] {
        for direct in [true, false] {
            let path = dir.path().join(format!("{choice:?}{direct}"));
            let options =
                DeviceOptions { direct, ..DeviceOptions::new(&path).size(ByteSize(SIZE)) };
            let device: Arc<dyn Device> = Arc::new(FlashDevice::open(&options).unwrap());
            let mut ring =
                ReadRing::open(device, &RingOptions { choice, ..RingOptions::default() }).unwrap();
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(10_000).unwrap();
            ring.submit(1, 0, 65_536).unwrap();
            ring.submit(2, 1 << 20, 4096).unwrap();
            ring.submit(3, 4096, 4096).unwrap();
            let mut failed = Vec::new();
            collect(&mut ring, 3, |token, result| {
                if let Err(e) = result {
                    assert!(e.to_string().contains("ended early"), "{e}");
                    failed.push(token);
                }
            });
            failed.sort_unstable();
            assert_eq!(failed, [1, 2]);
        }
    }
}

#[test]
fn works_in_a_mio_loop_that_never_reads_the_descriptor() {
    use mio::{Events, Interest, Poll, Token, unix::SourceFd};
    each_kind(RingOptions { depth: 16, ..RingOptions::default() }, |ring| {
        let mut poll = Poll::new().unwrap();
        poll.registry()
            .register(&mut SourceFd(&ring.as_raw_fd()), Token(1), Interest::READABLE)
            .unwrap();
        let mut events = Events::with_capacity(8);
        let (mut sent, mut got) = (0u64, 0u64);
        let start = Instant::now();
        while got < 500 {
            while sent < 500 && ring.submit(sent, sent % 1000 * 4096, 4096).is_ok() {
                sent += 1;
            }
            ring.flush();
            match poll.poll(&mut events, Some(Duration::from_secs(5))) {
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
                other => other.unwrap(),
            }
            assert!(
                !events.is_empty(),
                "{}: a completion was not signalled after {got}",
                ring.kind()
            );
            got += ring
                .completions(|token, b| assert!(b.unwrap() == expected(token % 1000 * 4096, 4096)))
                as u64;
            assert!(start.elapsed() < LIMIT);
        }
    });
}

#[test]
fn a_ring_may_be_made_on_one_thread_and_used_on_another() {
    let dir = tempfile::tempdir().unwrap();
    let device = file(dir.path(), "flash", true);
    let mut ring = ReadRing::open(device, &RingOptions::default()).unwrap();
    let worker = std::thread::spawn(move || {
        ring.submit(1, 4096, 4096).unwrap();
        collect(&mut ring, 1, |_, b| assert!(b.unwrap() == expected(4096, 4096)));
        ring.submit(2, 0, 4096).unwrap();
        ring.flush();
        ring // its read in flight, to be dropped on the first thread
    });
    drop(worker.join().unwrap());
}

#[test]
fn use_on_two_threads_is_an_error_of_the_reads_not_a_hang() {
    let dir = tempfile::tempdir().unwrap();
    let device = file(dir.path(), "flash", true);
    let mut ring = ReadRing::open(device, &RingOptions::default()).unwrap();
    ring.submit(1, 0, 4096).unwrap();
    collect(&mut ring, 1, |_, b| assert!(b.is_ok()));
    let worker = std::thread::spawn(move || {
        let start = Instant::now();
        for token in 0..300 {
            ring.submit(token, 0, 4096).unwrap();
            // The threads do not care; io_uring with a single issuer does.
            let kind = ring.kind();
            collect(&mut ring, 1, |_, b| assert!(b.is_ok() || kind == "io_uring"));
        }
        assert_eq!(ring.in_flight(), 0);
        assert!(start.elapsed() < LIMIT / 4, "failures wake the owner like completions");
    });
    worker.join().unwrap();
}

/// Makes `io_uring_setup` fail on this thread (and those it starts), as a container's seccomp profile does.
#[cfg(target_arch = "x86_64")]
fn forbid_io_uring(errno: i32) {
    let op = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [
        // The system call's number is the first word of `seccomp_data`.
        op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_io_uring_setup as u32, 0, 1),
        op(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | errno as u32, 0, 0),
        op(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: takes integers only.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
    // SAFETY: the program and its filter live across the call, which copies them.
    let rc =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    assert_eq!(rc, 0);
}

#[cfg(target_arch = "x86_64")]
#[test]
fn where_io_uring_is_forbidden_auto_reads_by_threads_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    for (errno, word) in
        [(libc::EPERM, "forbidden"), (libc::ENOSYS, "no io_uring"), (libc::ENOMEM, "memlock")]
    {
        let device = file(dir.path(), word, true);
        let thread = std::thread::spawn(move || {
            forbid_io_uring(errno);
            let mut ring = ReadRing::open(device.clone(), &RingOptions::default()).unwrap();
            assert_eq!(ring.kind(), "threads");
            assert!(ring.fallback_reason().unwrap().contains(word), "{:?}", ring.fallback_reason());
            ring.submit(1, 4096, 4096).unwrap();
            collect(&mut ring, 1, |_, b| assert!(b.unwrap() == expected(4096, 4096)));
            let options = RingOptions { choice: RingChoice::Uring, ..RingOptions::default() };
            let refused = ReadRing::open(device, &options).unwrap_err().to_string();
            assert!(refused.contains(word) && refused.contains("threads"), "{refused}");
        });
        thread.join().unwrap();
    }
}

#[test]
fn choices_are_read_and_refused_in_words() {
    assert_eq!("uring".parse(), Ok(RingChoice::Uring));
    assert!("fast".parse::<RingChoice>().unwrap_err().contains("'fast'"));
    let memory: Arc<dyn Device> = Arc::new(MemoryDevice::new(1 << 20));
    let refused = ReadRing::open(
        memory,
        &RingOptions { choice: RingChoice::Uring, ..RingOptions::default() },
    );
    assert!(refused.unwrap_err().to_string().contains("no descriptor"));
}
