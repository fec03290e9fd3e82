//! Random reads through a ring, to set beside what `fio` gets from the same file:
//!
//! ```text
//! cargo run --release -p larder-runtime --example random_reads -- FILE uring 32 5
//! fio --name=x --filename=FILE --rw=randread --bs=4k --direct=1 --ioengine=io_uring --iodepth=32 --runtime=5 --time_based
//! ```
//!
//! The file must exist (`fallocate` makes unwritten extents, which are not read from the disk: fill it).
//! An event loop as a worker has it: epoll, one flush per turn, each completion followed by a new read.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use std::error::Error;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::Rng;
use larder_runtime::{Device, DeviceOptions, FlashDevice, ReadRing, RingOptions, machine};
use mio::{Events, Interest, Poll, Token, unix::SourceFd};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, choice, depth, seconds] = args.as_slice() else {
        return Err("usage: random_reads FILE auto|uring|threads DEPTH SECONDS".into());
    };
    let (depth, seconds) = (depth.parse::<u32>()?, seconds.parse::<u64>()?);
    let device = Arc::new(FlashDevice::open(&DeviceOptions::new(path))?);
    if let Some(why) = device.why_buffered() {
        eprintln!("buffered: {why}");
    }
    let pages = device.geometry().size / 4096;
    let options = RingOptions { choice: choice.parse()?, depth, ..RingOptions::default() };
    let mut ring = ReadRing::open(device, &options)?;
    let mut poll = Poll::new()?;
    poll.registry().register(&mut SourceFd(&ring.as_raw_fd()), Token(0), Interest::READABLE)?;
    let mut events = Events::with_capacity(16);
    let mut rng = Rng::new(1);
    let mut submit = |ring: &mut ReadRing| ring.submit(0, rng.below(pages) * 4096, 4096);
    let (mut reads, mut turns, mut sum) = (0u64, 0u64, 0u64);
    let start = Instant::now();
    let cpu = machine::processor_time();
    while submit(&mut ring).is_ok() {}
    while start.elapsed() < Duration::from_secs(seconds) {
        ring.flush();
        match poll.poll(&mut events, None) {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            other => other?,
        }
        turns += 1;
        while let Some(done) = ring.pop() {
            sum = sum.wrapping_add(u64::from(done.bytes().map_err(|e| e.to_string())?[0]));
            reads += 1;
            ring.recycle(done);
            let _ = submit(&mut ring);
        }
    }
    let elapsed = start.elapsed().as_secs_f64();
    let (user, system) = machine::processor_time();
    println!(
        "{}: {:.0} reads/s at depth {depth}, {:.1} reads per turn, CPU {:.2} us user + {:.2} us system per read (sum {sum})",
        ring.kind(),
        reads as f64 / elapsed,
        reads as f64 / turns as f64,
        (user - cpu.0).as_secs_f64() * 1e6 / reads as f64,
        (system - cpu.1).as_secs_f64() * 1e6 / reads as f64,
    );
    Ok(())
}
