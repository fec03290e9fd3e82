//! How long a start takes that finds a write log full of dirty data, and how much memory the log then takes: a log of random writes of 4 KiB, written
//! by the engine's own log to a sparse file (the payload is zeros), then read as a start does.
//!
//! ```text
//! cargo run --release -p larder-cache --example write_log_start -- FILE [GIB OF DIRTY DATA, 10] [WRITES IN A BATCH, 32]
//! ```
#![allow(
    clippy::disallowed_types,
    clippy::disallowed_methods,
    reason = "a program reads its arguments and the clock"
)]

use std::error::Error;
use std::time::Instant;

use larder_base::{ByteSize, Nanos, Rng};
use larder_engine::block::OpId;
use larder_engine::block::writeback::Fault;
use larder_engine::block::writeback::destager::{self, Pace};
use larder_engine::block::writeback::log::{Append, Asks, Attach, Config, Sums, ToWrite, WriteLog};
use larder_engine::block::writeback::recovery::Records as _;
use larder_engine::block::writeback::scan::{ReadFailed, scan};
use larder_engine::block::writeback::volume_log::{Kind, Order};
use larder_format::Uuid;
use larder_format::block::superblock::WriteLogArea;
use larder_format::block::write_log::{SegmentGeometry, pieces, segment::SEGMENT_BYTES};
use larder_runtime::{AlignedBuf, Device, DeviceOptions, FlashDevice};

const CACHE: Uuid = Uuid([7; 16]);
const AT: u64 = 1 << 20;
const BLOCK: u64 = 4096;

fn status(what: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(what)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) << 10
}

fn attach(frontier: u64) -> Attach {
    let (order, pace) = (Order::Any, Pace::AtBound);
    Attach {
        attachment: 1,
        volume: Uuid([1; 16]),
        generation: 1,
        destage: destager::Config { order, pace, most: 64 << 20, depth: 64 },
        bound: Some(1 << 50),
        age: None,
        marked: false,
        frontier,
        epoch: 0,
        marker: 1,
    }
}

/// Carries out what the log asks for, until it asks for nothing.
fn carry(
    device: &FlashDevice,
    log: &mut WriteLog<()>,
    now: Nanos,
    mut asks: Asks<()>,
) -> Result<(), Box<dyn Error>> {
    loop {
        let (writes, flush) = (std::mem::take(&mut asks.writes), asks.flush.take());
        if writes.is_empty() && flush.is_none() {
            return Ok(());
        }
        for ToWrite { number, at, head, .. } in writes {
            // The payload is zeros, as the file is where nothing was written.
            let mut bytes = AlignedBuf::zeroed(head.len().next_multiple_of(BLOCK as usize));
            bytes[..head.len()].copy_from_slice(&head);
            // A head begins at a sector of 512 bytes.
            device.write_at(at, &bytes[..head.len().next_multiple_of(512)])?;
            log.written(now, number, true, &mut asks);
        }
        if let Some(covers) = flush {
            log.flushed(now, covers, true, &mut asks);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let path = arguments.first().ok_or("give a FILE")?;
    let gib: u64 = arguments.get(1).map_or(Ok(10), |n| n.parse())?;
    let batch: u64 = arguments.get(2).map_or(Ok(32), |n| n.parse())?;
    let writes = (gib << 30) / BLOCK;
    let geometry = SegmentGeometry::new(SEGMENT_BYTES, 512)?;
    let segments = u32::try_from(((gib << 30) * 3 / 2).div_ceil(SEGMENT_BYTES.into()))? + 8;
    let area = WriteLogArea { at: AT, geometry, segments };
    let config = Config {
        cache: CACHE,
        run: 1,
        at: AT,
        geometry,
        segments,
        depth: 2,
        memory: 64 << 20,
        wall: 1 << 60,
    };
    let mut rng = Rng::new(1);
    let made = std::path::Path::new(path).exists();
    if !made {
        let options =
            DeviceOptions { direct: false, ..DeviceOptions::new(path) }.size(ByteSize(area.end()));
        let device = FlashDevice::open(&options)?;
        let mut log: WriteLog<()> = WriteLog::new(config);
        log.attach(Nanos(0), attach(0));
        let sums = Sums::new(&pieces::sums(&[0; BLOCK as usize]).collect::<Vec<u32>>());
        let (mut now, mut done) = (Nanos(0), 0);
        while done < writes {
            let mut asks = Asks::default();
            // No form of a batch before all of it is there.
            for n in 0..batch.min(writes - done) {
                let append = Append {
                    op: OpId(n),
                    attachment: 1,
                    kind: Kind::Write,
                    at: rng.below(64 << 18) * BLOCK,
                    len: BLOCK,
                    bytes: Some(()),
                    sums: sums.clone(),
                    fua: false,
                    may_punch: false,
                };
                log.append(now, append, &mut asks);
            }
            done += batch.min(writes - done);
            carry(&device, &mut log, now, asks)?;
            now.0 += 1_000_000_000;
            let mut asks = Asks::default();
            log.due(now, &mut asks);
            carry(&device, &mut log, now, asks)?;
        }
        device.sync()?;
        if let Some(status) = log.status(now, 1) {
            println!("written: {:?}, {} bytes of log", status.positions, log.bytes());
        }
    }
    let before = status("VmRSS");
    let began = Instant::now();
    let device = FlashDevice::open(&DeviceOptions::new(path))?;
    let mut reads = (0u64, 0u64);
    let mut read = |at: u64, bytes: &mut [u8]| {
        reads = (reads.0 + 1, reads.1 + bytes.len() as u64);
        device.read_at(at, bytes).map_err(|_| ReadFailed)
    };
    let mut scanned = scan(&area, CACHE, &mut read);
    let at_scan = began.elapsed();
    let found = scanned.recover_packed(&[(1, 0)], Fault::default());
    let at_recover = began.elapsed();
    let config = Config { run: 2, ..config };
    let mut log: WriteLog<()> = WriteLog::found(config, &found, &scanned);
    let mine = found.volumes.get(&1).ok_or("no volume")?;
    let records = mine.records.len();
    log.attach(Nanos(0), attach(mine.frontier));
    log.recover(Nanos(0), 1, mine, &scanned);
    let at_log = began.elapsed();
    drop((found, scanned));
    let at_drop = began.elapsed();
    let mut asks = Asks::default();
    log.start(&mut asks);
    device.sync()?;
    carry(&device, &mut log, Nanos(0), asks)?;
    let mut pieces = 0;
    log.look(1, 0..1 << 20, |_| pieces += 1);
    let at_read = began.elapsed();
    let peak = status("VmHWM");
    let extents = log.status(Nanos(0), 1).map_or(0, |status| status.dirty / BLOCK).max(1);
    println!("{records} records, {extents} blocks dirty, {pieces} stretches in the first MiB");
    println!("{} reads of {} in all", reads.0, ByteSize(reads.1));
    println!(
        "scan {at_scan:.2?}, recovery {:.2?}, log {:.2?}, given back {:.2?}, start {:.2?}: {at_read:.2?} to the first read",
        at_recover - at_scan,
        at_log - at_recover,
        at_drop - at_log,
        at_read - at_drop
    );
    let kept = status("VmRSS").saturating_sub(before);
    println!(
        "memory: {} kept, {:.0} bytes a record; {} at most",
        ByteSize(kept),
        kept as f64 / records as f64,
        ByteSize(peak)
    );
    Ok(())
}
