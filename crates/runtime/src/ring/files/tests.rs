use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Duration;

use larder_base::Rng;
use tempfile::TempDir;

use super::*;

/// Each test runs on all implementations, as tests of their own.
macro_rules! on_all {
    ($($(#[$needs:meta])* $test:ident),* $(,)?) => {
        mod threads {
            use super::*;
            $(#[test] $(#[$needs])* fn $test() {
                super::$test(&|depth| FileQueue::open(RingChoice::Threads, depth, 3).unwrap());
            })*
        }
        mod caller {
            use super::*;
            $(#[test] $(#[$needs])* fn $test() {
                super::$test(&|depth| FileQueue::open(RingChoice::Caller, depth, 1).unwrap());
            })*
        }
        mod uring {
            use super::*;
            $(#[test] $(#[$needs])*
            #[cfg_attr(
                without = "io_uring",
                ignore = "needs io_uring (a kernel and a container that allow it)"
            )]
            fn $test() {
                super::$test(&|depth| FileQueue::open(RingChoice::Uring, depth, 1).unwrap());
            })*
        }
    };
}

on_all!(
    random_operations_against_a_model,
    errors_come_back_with_their_buffers,
    #[cfg_attr(
        without = "direct",
        ignore = "needs a temporary directory with direct transfers (TMPDIR)"
    )]
    direct,
    dropping_waits,
);

/// A queue of this depth.
type Opening<'a> = &'a dyn Fn(u32) -> FileQueue;

fn file(dir: &TempDir, size: u64, flags: i32) -> (std::fs::File, FileHandle) {
    let path = dir.path().join("file");
    let plain = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path);
    let plain = plain.unwrap();
    plain.set_len(size).unwrap();
    let mut options = OpenOptions::new();
    let opened = options.read(true).write(true).custom_flags(flags).open(&path).unwrap();
    (plain, FileHandle::new(opened.into(), 1))
}

fn run(queue: &mut FileQueue, count: usize) -> Vec<FileDone> {
    let mut done = Vec::new();
    for _ in 0..1000 {
        while let Some(d) = queue.pop() {
            done.push(d);
        }
        if done.len() >= count {
            return done;
        }
        queue.wait(Duration::from_secs(10));
    }
    panic!("{} of {count} ended", done.len());
}

fn filled(len: usize, seed: u64) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len);
    let mut rng = Rng::new(seed);
    buf.iter_mut().for_each(|b| *b = rng.below(256) as u8);
    buf
}

/// More than the depth at once, against a plain copy of the file.
fn random_operations_against_a_model(queue: Opening) {
    let mut queue = queue(8);
    let dir = TempDir::new().unwrap();
    const SIZE: usize = 1 << 20;
    let (plain, handle) = file(&dir, SIZE as u64, 0);
    let mut model = vec![0u8; SIZE];
    let mut rng = Rng::new(5);
    for round in 0..30u64 {
        // One in each stretch, so that they may end in any order.
        let mut expected = Vec::new();
        for stretch in 0..40usize {
            let base = stretch * (SIZE / 40);
            let start = base + rng.below(10_000) as usize;
            let len = rng.range(1, 10_000) as usize;
            let token = stretch as u64;
            let range = start..start + len;
            let (offset, len64) = (start as u64, len as u64);
            expected.push(None);
            match rng.below(5) {
                0 | 1 => {
                    let data = Payload::new(filled(len + 9, round * 100 + token)).part(9, len);
                    model[range].copy_from_slice(&data);
                    let durable = rng.chance(0.1);
                    queue.submit(token, &handle, FileOp::Write { offset, data, durable });
                }
                2 => {
                    model[range].fill(0);
                    queue.submit(token, &handle, FileOp::Punch { offset, len: len64 });
                }
                3 => queue.submit(token, &handle, FileOp::Sync),
                _ => {
                    expected[stretch] = Some(model[range].to_vec());
                    let buf = AlignedBuf::zeroed(len);
                    queue.submit(token, &handle, FileOp::Read { offset, buf });
                }
            }
        }
        assert_eq!(queue.in_flight(), 40);
        let done = run(&mut queue, 40);
        assert_eq!((done.len(), queue.in_flight()), (40, 0));
        for FileDone { token, op, result } in done {
            result.unwrap();
            if let FileOp::Read { buf, .. } = op {
                assert!(buf[..] == expected[token as usize].as_ref().unwrap()[..]);
            }
        }
    }
    let mut now = vec![0; SIZE];
    plain.read_exact_at(&mut now, 0).unwrap();
    assert!(now == model, "{}", queue.kind());
}

fn errors_come_back_with_their_buffers(queue: Opening) {
    let mut queue = queue(4);
    let dir = TempDir::new().unwrap();
    let (plain, handle) = file(&dir, 10_000, 0);
    plain.write_all_at(b"last", 9996).unwrap();
    queue.submit(1, &handle, FileOp::Read { offset: 9996, buf: AlignedBuf::zeroed(5) });
    queue.submit(2, &handle, FileOp::Read { offset: 20_000, buf: AlignedBuf::zeroed(5) });
    let read_only =
        FileHandle::new(std::fs::File::open(dir.path().join("file")).unwrap().into(), 1);
    let data = Payload::new(AlignedBuf::zeroed(5));
    queue.submit(3, &read_only, FileOp::Write { offset: 0, data, durable: false });
    let mut done = run(&mut queue, 3);
    done.sort_by_key(|d| d.token);
    let [a, b, c] = &done[..] else { panic!() };
    for d in [a, b] {
        let kind = d.result.as_ref().unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::UnexpectedEof, "{}", queue.kind());
        assert!(matches!(&d.op, FileOp::Read { buf, .. } if buf.len() == 5));
    }
    assert_eq!(c.result.as_ref().unwrap_err().raw_os_error(), Some(libc::EBADF));
}

/// Direct transfers of whole blocks.
fn direct(queue: Opening) {
    let mut queue = queue(4);
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("direct");
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_DIRECT);
    let opened = options.open(&path).unwrap();
    opened.set_len(1 << 20).unwrap();
    let handle = FileHandle::new(opened.into(), 4096);
    let data = Payload::new(filled(64 << 10, 1));
    queue.submit(1, &handle, FileOp::Write { offset: 8192, data: data.clone(), durable: true });
    run(&mut queue, 1).pop().unwrap().result.unwrap();
    queue.submit(2, &handle, FileOp::Read { offset: 8192, buf: AlignedBuf::zeroed(64 << 10) });
    let done = run(&mut queue, 1).pop().unwrap();
    done.result.unwrap();
    assert!(matches!(&done.op, FileOp::Read { buf, .. } if buf[..] == data[..]));
}

/// Dropping a queue with operations under way waits for them, so their memory is not written to afterwards.
fn dropping_waits(queue: Opening) {
    let dir = TempDir::new().unwrap();
    let mut queue = queue(16);
    let (_, handle) = file(&dir, 1 << 20, 0);
    for i in 0..16 {
        queue.submit(i, &handle, FileOp::Read { offset: 0, buf: AlignedBuf::zeroed(1 << 20) });
    }
    queue.flush();
}
