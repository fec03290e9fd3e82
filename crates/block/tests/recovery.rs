//! How long it takes to find the map of a cache on its device, after a clean stop or a reboot.
//!
//! The device is a sparse file in which only superblock, snapshot and log are written, as a full cache leaves them: every
//! slot has a line, and half of the log's pages are in use. `LARDER_RECOVERY_GIB` says how large it is:
//!
//! ```sh
//! cargo test --release -p larder-block --test recovery -- --ignored --nocapture
//! ```
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "what is measured is measured with a clock"
)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use larder_base::{ByteSize, Rng, UnixSecs};
use larder_block::cache::open::{format, open};
use larder_block::cache::{CacheConfig, FormatConfig, RulesConfig, Warmth};
use larder_engine::block::address::{Place, Placing};
use larder_engine::block::map::Replacement;
use larder_engine::block::{GROUP_LINES, LineId, WriteMode};
use larder_format::PAGE_SIZE;
use larder_format::block::log::{
    self, Held, LogHead, RECORDS_PER_PAGE, Reach, Record, SLOTS_PER_PAGE,
};
use larder_format::block::superblock::{COPY_BYTES, choose};
use larder_format::block::{
    BlockSuperblock, Layout, Placement, Volume, VolumeState, intents, table,
};
use larder_policy::block::{EvictionBy, VictimPolicy};
use larder_runtime::{RingChoice, machine};
use tempfile::TempDir;

const SHARDS: u32 = 8;
/// Pages that are written at a time.
const STEP: u64 = 1024;

/// The line in `slot`, of all shards' slots: one that may lie there, and in no other.
fn line_in(layout: &Layout, placing: &Placing, slot: u64) -> LineId {
    let per = u64::from(layout.shard_slots());
    let (shard, slot) = ((slot / per) as u32, (slot % per) as u32);
    let row = slot / GROUP_LINES;
    // Ways of a set have tags of their own.
    let place = Place { group_set: row / layout.ways, tag: row % layout.ways };
    placing.line(shard, place, slot % GROUP_LINES)
}

/// Writes the pages `0..count` that begin at `at`, each made by `page`.
fn write_pages(file: &File, at: u64, count: u64, mut page: impl FnMut(u64, &mut [u8])) {
    let mut bytes = vec![0u8; STEP as usize * PAGE_SIZE];
    for first in (0..count).step_by(STEP as usize) {
        let pages = STEP.min(count - first);
        let part = &mut bytes[..pages as usize * PAGE_SIZE];
        for (out, number) in part.chunks_exact_mut(PAGE_SIZE).zip(first..) {
            page(number, out);
        }
        file.write_all_at(part, at + first * PAGE_SIZE as u64).unwrap();
    }
}

/// A device with a full cache on it, and its layout.
fn image(dir: &Path, placement: Placement, bytes: u64) -> (PathBuf, Layout) {
    let path = dir.join("cache");
    let file = File::options().create(true).truncate(true).read(true).write(true).open(&path);
    let file = file.unwrap();
    file.set_len(bytes).unwrap();
    let config = FormatConfig {
        path: path.clone(),
        size: matches!(placement, Placement::Sparse(_)).then_some(ByteSize(bytes)),
        line: 4096,
        placement,
        shards: SHARDS,
        write_log: None,
        yes: true,
        discard_dirty: false,
    };
    let mut seed = [0u8; 32];
    Rng::new(dir.as_os_str().len() as u64 ^ u64::from(std::process::id())).fill(&mut seed);
    let layout = format(&config, seed, UnixSecs(1)).unwrap();
    let mut copies = vec![0u8; 2 * COPY_BYTES];
    file.read_exact_at(&mut copies, 0).unwrap();
    let (a, b) = copies.split_at(COPY_BYTES);
    let mut sb: BlockSuperblock = choose(a, b).unwrap();
    let placing = Placing::of(&layout, sb.key);

    let held = |slot: u64| -> Held {
        Some((line_in(&layout, &placing, slot).0, (slot as u32).wrapping_mul(77) & 0x00ff_ffff))
    };
    if layout.is_sparse() {
        write_pages(&file, layout.table_at(0, 0), layout.snapshot_pages, |number, out| {
            let slots =
                (0..table::SLOTS_PER_PAGE as u32).map(|slot| Some((slot * 77) & 0x00ff_ffff));
            table::encode(out, sb.generation, number, slots);
        });
    }
    // (A table has neither snapshots nor logs.)
    let snapshot_pages = if layout.is_sparse() { 0 } else { layout.snapshot_pages };
    write_pages(&file, layout.snapshot_at(0), snapshot_pages, |number, out| {
        let first = number * SLOTS_PER_PAGE as u64;
        let last = (first + SLOTS_PER_PAGE as u64).min(layout.slots());
        let slots: Vec<Held> = (first..last).map(held).collect();
        log::encode_snapshot(out, sb.generation, number, &slots);
    });
    let mut rng = Rng::new(7);
    write_pages(&file, layout.log_at(0), layout.log_pages / 2, |number, out| {
        let records: Vec<Record> = (0..RECORDS_PER_PAGE)
            .map(|_| rng.below(layout.slots()))
            .map(|slot| Record { slot, holds: held(slot) })
            .collect();
        let head = LogHead { generation: sb.generation, number, epoch: 1, ..LogHead::default() };
        log::encode_log(out, head, &records);
    });
    write_pages(&file, layout.intents_at(), layout.intent_pages(), |number, out| {
        intents::encode(out, number, 1, Reach::default(), &[]);
    });
    let groups = layout.space_lines() / u64::from(GROUP_LINES);
    sb.volumes.push(Volume {
        name: "disk".into(),
        first_group: 0,
        groups,
        bytes: groups * u64::from(GROUP_LINES) * u64::from(layout.line),
        state: VolumeState::Detached,
        identity: [1; 64],
        write_back: None,
    });
    (sb.snapshot, sb.sequence, sb.epoch) = (true, sb.sequence + 1, 1);
    file.write_all_at(&sb.encode(), (sb.copy() * COPY_BYTES) as u64).unwrap();
    file.sync_all().unwrap();
    (path, layout)
}

/// Opens a full cache of `bytes`. Returns how long that took, the processor's time of it, how many records were read, and
/// bytes of DRAM a line.
fn recover(placement: Placement, bytes: u64) -> (Duration, Duration, u64, f64) {
    let dir = TempDir::new().unwrap();
    // Of a sparse cache: before volumes as large as it is.
    let placement = match placement {
        Placement::Sparse(_) => Placement::Sparse(bytes),
        other => other,
    };
    let (path, layout) = image(dir.path(), placement, bytes);
    let config = CacheConfig {
        awaited: Default::default(),
        back: std::collections::BTreeMap::new(),
        back_by_default: None,
        markers: std::collections::BTreeMap::new(),
        moved: std::collections::BTreeSet::new(),
        journals: std::collections::BTreeMap::new(),
        write: WriteMode::WriteThrough,
        replacement: Replacement::Lru,
        reclaim: VictimPolicy::Fifo,
        evict: EvictionBy::default(),
        admission: "all".parse().unwrap(),
        fill_memory: ByteSize(8 << 20),
        readahead: ByteSize(0),
        workers: 1,
        queues: 0,
        ring: RingChoice::Auto,
        trust_unchanged: false,
        state_dir: dir.path().join("state"),
        record: None,
        rules: RulesConfig::default(),
    };
    let processor = || {
        let (user, system) = machine::processor_time();
        user + system
    };
    let (begin, worked) = (Instant::now(), processor());
    let handle = open(&path, config, &[]).unwrap();
    let (took, worked) = (begin.elapsed(), processor() - worked);
    let Warmth::Log(records) = handle.warmth else { panic!("{:?}", handle.warmth) };
    assert_eq!(records, layout.log_pages / 2 * RECORDS_PER_PAGE as u64);
    let map_bytes = handle.cache().stats().map_bytes;
    if placement == Placement::Full {
        // Its cleaner has begun to make room.
        assert!(handle.cache().count_lines() > layout.slots() / 2);
    } else {
        assert_eq!(handle.cache().count_lines(), layout.slots(), "every line is found");
    }
    handle.stop();
    (took, worked, records, map_bytes as f64 / layout.slots() as f64)
}

const PLACEMENTS: [Placement; 4] =
    [Placement::Sets(1), Placement::Sets(8), Placement::Full, Placement::Sparse(0)];

#[test]
fn a_full_map_is_found_whole() {
    for placement in PLACEMENTS {
        recover(placement, 128 << 20);
    }
}

#[test]
#[ignore = "a measurement: takes GiBs of disk and of memory"]
fn seconds_per_tb() {
    let gib = std::env::var("LARDER_RECOVERY_GIB").ok().and_then(|v| v.parse().ok()).unwrap_or(256);
    for placement in PLACEMENTS {
        let mut runs: Vec<_> = (0..3).map(|_| recover(placement, gib << 30)).collect();
        runs.sort_by_key(|run| run.0);
        let (took, worked, records, dram) = runs[1];
        let per_tb = |time: Duration| time.as_secs_f64() * 1e12 / (gib << 30) as f64;
        println!(
            "{placement}: {gib} GiB in {:.2} s ({records} records of the log): {:.1} s per TB, {:.1} s of them the \
             processor's; {dram:.2} bytes of DRAM a line",
            took.as_secs_f64(),
            per_tb(took),
            per_tb(worked),
        );
    }
}
