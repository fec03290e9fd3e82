//! Miss counts against libCacheSim's, on real traces where they are present.
//!
//! Figures: libCacheSim as of October 2024 (`tests/golden/libcachesim-2024.csv`) and its Python release 0.3.5
//! (`tests/golden/libcachesim-0.3.5.csv`), miss counts of each policy at several sizes.

use std::path::{Path, PathBuf};

use larder_policy::eviction::{EvictionKind, S3FifoRelease, Unit};
use larder_sim::mrc::{Filter, Items, Job, Sweep, sweep};
use larder_trace::{Format, Options, open};

/// Traces whose ids libCacheSim did not read as these numbers (it hashes those of text formats).
const OTHER_IDS: [&str; 7] = [
    "adaptsize_cdn",
    "mooncake_conv",
    "tencent_rw6040_4k",
    "cloudphysics4k",
    "hplajw4k",
    "w106",
    "orm-busy",
];

struct Golden {
    trace: String,
    unit: Unit,
    algorithm: String,
    size: u64,
    requests: u64,
    misses: u64,
    miss_bytes: u64,
}

fn golden_2024() -> Vec<Golden> {
    include_str!("golden/libcachesim-2024.csv")
        .lines()
        .skip(1)
        .map(|line| {
            let f: Vec<&str> = line.split(',').collect();
            Golden {
                trace: f[0].to_owned(),
                unit: if f[1] == "1" { Unit::Objects } else { Unit::Bytes },
                algorithm: f[2].to_owned(),
                size: f[3].parse().unwrap(),
                requests: f[4].parse().unwrap(),
                misses: f[5].parse().unwrap(),
                miss_bytes: f[7].parse().unwrap(),
            }
        })
        .collect()
}

fn golden_2025() -> Vec<Golden> {
    include_str!("golden/libcachesim-0.3.5.csv")
        .lines()
        .skip(1)
        .map(|line| {
            let f: Vec<&str> = line.split(',').collect();
            Golden {
                trace: f[0].to_owned(),
                unit: Unit::Objects,
                algorithm: format!("{}@2025", f[1]),
                size: f[2].parse().unwrap(),
                requests: f[3].parse().unwrap(),
                misses: f[4].parse().unwrap(),
                miss_bytes: 0,
            }
        })
        .collect()
}

/// Our policy for a name in the files, and how far the count may be off.
///
/// W-TinyLFU agrees exactly where ids are numbers in both programs; libCacheSim hashes the ids of text formats, and its
/// sketch then collides elsewhere. Under 100 objects its window has no room and it refuses everything, which we do not.
/// LIRS agrees exactly where its queue holds two objects or more.
fn policy(algorithm: &str, unit: Unit, size: u64, numbers: bool) -> Option<(EvictionKind, f64)> {
    use EvictionKind as K;
    let bytes = unit == Unit::Bytes;
    Some(match algorithm.trim_end_matches("@2025") {
        "LRU" => (K::Lru, 0.0),
        "FIFO" => (K::Fifo, 0.0),
        "Clock" => (K::Clock(1), 0.0),
        "Sieve" => (K::Sieve, 0.0),
        "Belady" => (K::Belady, 0.0),
        "S3FIFO-0.1000-2" => (K::S3Fifo(S3FifoRelease::R2024), 0.0),
        "S3FIFO" => (K::S3Fifo(S3FifoRelease::R2025), 0.0),
        "ARC" => (K::Arc, 0.0),
        "TwoQ" => (K::TwoQ, 0.0),
        "S4LRU(25:25:25:25)" | "SLRU" => (K::Slru, 0.0),
        "LIRS" => (K::Lirs, if size < 200 { 0.005 } else { 0.0 }),
        "GDSF" => (K::Gdsf, 0.0),
        "LFU" if !bytes => (K::Lfu, 0.0),
        "WTinyLFU-w0.01-SLRU" if !bytes && size >= 100 => {
            (K::WTinyLfu, if numbers { 0.0 } else { 0.02 })
        }
        _ => return None,
    })
}

fn traces() -> PathBuf {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    std::env::var_os("LARDER_SHARED").map_or_else(beside, PathBuf::from).join("traces")
}

/// How many of a trace's figures to check.
#[derive(Clone, Copy, PartialEq)]
enum Figures {
    All,
    /// For each policy the third size.
    OneSize,
}

/// Compares golden counts of a trace; returns what differs.
fn compare(
    trace: &str,
    file: &str,
    format: Option<Format>,
    pages: bool,
    figures: Figures,
) -> Vec<String> {
    let folder = traces();
    let name = folder.join(file).to_string_lossy().into_owned();
    let mut differences = Vec::new();
    for unit in [Unit::Objects, Unit::Bytes] {
        let mut sizes: Vec<u64> =
            golden_2024().iter().filter(|g| g.trace == trace).map(|g| g.size).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let numbers = !OTHER_IDS.contains(&trace);
        let wanted: Vec<(Golden, EvictionKind, f64)> = golden_2024()
            .into_iter()
            .chain(golden_2025())
            .filter(|g| g.trace == trace && g.unit == unit)
            .filter(|g| figures == Figures::All || g.size == sizes[2])
            .filter_map(|g| {
                policy(&g.algorithm, unit, g.size, numbers).map(|(kind, slack)| (g, kind, slack))
            })
            .collect();
        if wanted.is_empty() {
            continue;
        }
        let plan = Sweep {
            jobs: wanted
                .iter()
                .map(|(g, policy, _)| Job { policy: *policy, size: g.size, admission: Filter::All })
                .collect(),
            unit,
            warmup: 0,
            threads: 2,
            seed: 1,
            sample: None,
            curve: false,
        };
        let options = Options { format, pages: pages.then_some(4096), ..Options::default() };
        let open = || Ok(Items::new(open(&name, &options)?.reader));
        let found = sweep(open, &plan, |_, _| ()).unwrap();
        for ((golden, _, slack), row) in wanted.iter().zip(&found.rows) {
            assert_eq!(row.requests, golden.requests, "requests of {trace}");
            let off = row.misses.abs_diff(golden.misses) as f64 / golden.misses as f64;
            let bytes_off =
                unit == Unit::Bytes && *slack == 0.0 && row.miss_bytes != golden.miss_bytes;
            if off > *slack || bytes_off {
                differences.push(format!(
                    "{trace} {unit:?} {} {}: {} misses, {} in libCacheSim ({:+.3} %)",
                    golden.algorithm,
                    golden.size,
                    row.misses,
                    golden.misses,
                    (row.misses as f64 / golden.misses as f64 - 1.0) * 100.0
                ));
            }
        }
    }
    differences
}

#[track_caller]
fn check(trace: &str, file: &str, format: Option<Format>, pages: bool, figures: Figures) {
    let differences = compare(trace, file, format, pages, figures);
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

const VM: &str = "cloudphysics/cloudPhysicsIO.vscsi.zst";
const CLOUD: &str = "tencent/tencent.cut.per_50k.rw_60_40.490.trace.zst";

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn cloud_physics() {
    let file = "cloudphysics/cloudPhysicsIO.oracleGeneral.bin.zst";
    check("cloudPhysicsIO", file, None, false, Figures::All);
}

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn adaptsize_cdn() {
    check("adaptsize_cdn", "adaptsize/request.trace.xz", None, false, Figures::All);
}

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn mooncake() {
    let file = "mooncake/conversation_trace.jsonl.zst";
    check("mooncake_conv", file, None, false, Figures::OneSize);
}

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn a_disk_of_1992_in_pages() {
    check("hplajw4k", "disksim/ajw.1week.srt.zst", None, true, Figures::All);
}

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn cloud_block_storage_in_pages() {
    check("tencent_rw6040_4k", CLOUD, None, true, Figures::OneSize);
}

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn a_virtual_machine_in_pages() {
    check("cloudphysics4k", VM, None, true, Figures::OneSize);
}

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn oltp_of_the_arc_paper() {
    check("arc_oltp", "arc/OLTP.lis.zst", None, false, Figures::OneSize);
}

/// The rest, minutes: `cargo test --release -p larder-sim --test golden_mrc -- --ignored`.
#[test]
#[ignore = "minutes"]
fn every_figure() {
    let keys = Some(Format::U32Be);
    check("mooncake_conv", "mooncake/conversation_trace.jsonl.zst", None, false, Figures::All);
    check("tencent_rw6040_4k", CLOUD, None, true, Figures::All);
    check("cloudphysics4k", VM, None, true, Figures::All);
    check("arc_oltp", "arc/OLTP.lis.zst", None, false, Figures::All);
    check("w106", "caffeine/w106.trace.xz", keys, false, Figures::All);
    check("orm-busy", "caffeine/orm-busy.trace.xz", keys, false, Figures::All);
}
