//! Which admission policy of the block cache gives the most hits for the same bytes written to flash?
//!
//! Each policy runs over a grid of its settings, the same in every cell (a workload and a size of cache). The first third of a workload warms up; hits
//! and bytes are those behind it. A level is a share of the bytes that `all` writes. A policy's figure at a level is the most hits that
//! the upper hull of its points (and of the origin: no cache) has at that many bytes: settings between which one may mix are
//! compared, and nobody gains by a setting that happens to lie near a level.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use larder_base::ByteSize;
use larder_engine::block::WriteMode;
use larder_policy::block::{BlockAdmissionConfig, Replacement};
use larder_trace::{Op, Options, Request, TraceError};
use serde::Serialize;

use super::block_study::{BlockCache, BlockCacheSpec, Placement};

/// Bytes of a line.
const LINE: u32 = 4096;
/// Bytes beyond a level that still count as that level, as a share of it.
const TOLERANCE: f64 = 0.02;

/// A workload by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockWorkload {
    /// Its name.
    pub name: &'static str,
    /// One line on it.
    pub about: &'static str,
    /// Features, settings and defaults of `expected_reads` were chosen on it; what is claimed is claimed on the others.
    pub chosen_on: bool,
    source: Source,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// File below the traces' directory. One of keys is read as reads of a line each.
    File(&'static str),
    /// A generator.
    Made(&'static str),
}

const fn workload(
    name: &'static str,
    about: &'static str,
    chosen_on: bool,
    source: Source,
) -> BlockWorkload {
    BlockWorkload { name, about, chosen_on, source }
}

/// All workloads.
pub const BLOCK_WORKLOADS: [BlockWorkload; 15] = [
    workload(
        "cloudphysics",
        "a virtual machine's disk for two hours, 59 % writes",
        true,
        Source::File("cloudphysics/cloudPhysicsIO.vscsi.zst"),
    ),
    workload(
        "msr-105",
        "a cut of 10,000 requests of an enterprise's volumes, 80 % writes",
        true,
        Source::File("msr/msr.cut.per_10k.rw_20_80.105.trace.zst"),
    ),
    workload(
        "tencent-211",
        "a cut of 50,000 requests of cloud volumes, 35 % writes",
        true,
        Source::File("tencent/tencent.cut.per_50k.rw_65_35.211.trace.zst"),
    ),
    workload(
        "tencent-222",
        "a cut of 50,000 requests of cloud volumes, the highest throughput",
        true,
        Source::File("tencent/tencent.cut.per_50k.most_size_thpt.222.trace.zst"),
    ),
    workload(
        "hplajw",
        "a workstation of 1992 for a week, 71 % writes",
        true,
        Source::File("disksim/ajw.1week.srt.zst"),
    ),
    workload("arc-oltp", "the OLTP trace of the ARC paper", true, Source::File("arc/OLTP.lis.zst")),
    workload(
        "backup",
        "transactions, and a backup that reads everything in order",
        true,
        Source::Made("oltp-backup?scale=0.001"),
    ),
    workload("tpch", "scans of a data warehouse's tables", true, Source::Made("tpch?scale=0.005")),
    workload(
        "msr-b",
        "15,245 requests of an enterprise's volumes, 10 % writes",
        false,
        Source::File("msr/traceB.trace.zst"),
    ),
    workload(
        "tencent-490",
        "a cut of 50,000 requests of cloud volumes, 40 % writes",
        false,
        Source::File("tencent/tencent.cut.per_50k.rw_60_40.490.trace.zst"),
    ),
    workload(
        "rocksdb",
        "YCSB on RocksDB on ext4, 9 % writes",
        false,
        Source::File("blkparse/ycsb_rocksdb_ext4.blkparse.txt.zst"),
    ),
    workload(
        "websearch",
        "a web search engine's disk, reads alone",
        false,
        Source::File("mqsim/wsrch-small.trace.zst"),
    ),
    workload("arc-p3", "the P3 trace of the ARC paper", false, Source::File("arc/P3.lis.zst")),
    workload(
        "specsfs",
        "a file server whose metadata is marked",
        false,
        Source::Made("specsfs?scale=0.001"),
    ),
    workload("tpcc", "order entry", false, Source::Made("tpcc?scale=0.001")),
];

impl BlockWorkload {
    /// The workload of this name.
    pub fn named(name: &str) -> Option<BlockWorkload> {
        BLOCK_WORKLOADS.into_iter().find(|w| w.name == name)
    }

    /// What must lie below the directory of traces for it, if anything.
    pub fn needs(&self, traces: &Path) -> Option<PathBuf> {
        match self.source {
            Source::File(path) => Some(traces.join(path)),
            Source::Made(_) => None,
        }
    }

    /// Its reads, writes and trims.
    ///
    /// # Errors
    /// A trace that is absent or malformed.
    pub fn requests(&self, traces: &Path) -> Result<Vec<Request>, TraceError> {
        let name = match self.source {
            Source::File(path) => traces.join(path).display().to_string(),
            Source::Made(text) => format!("gen:{text}"),
        };
        let mut all = Vec::new();
        for request in larder_trace::open(&name, &Options::default())?.reader {
            let request = request?;
            if request.op.is_block() {
                all.push(request);
            } else if request.op == Op::Get {
                let offset = request.id.wrapping_mul(LINE.into());
                all.push(Request::block(Op::Read, request.app, offset, LINE.into()));
            }
        }
        Ok(all)
    }
}

/// Bytes of the lines that are read or written.
pub fn block_footprint(requests: &[Request]) -> u64 {
    let mut lines = HashSet::new();
    for r in requests.iter().filter(|r| r.op != Op::Trim && r.size > 0) {
        let line = u64::from(LINE);
        let last = r.offset.saturating_add(r.size - 1) / line;
        lines.extend((r.offset / line..=last).map(|n| (r.app, n)));
    }
    lines.len() as u64 * u64::from(LINE)
}

/// Policies that are compared.
pub const BLOCK_CONTENDERS: [&str; 9] = [
    "all",
    "seqr",
    "sseqr",
    "tc",
    "seqr+tc",
    "sseqr+tc",
    "two_lbs",
    "sseqr+two_lbs",
    "expected_reads",
];

/// The settings over which a contender is run; none where the name is none of theirs.
pub fn block_settings(contender: &str) -> Vec<String> {
    let touches = |before: &str| {
        let one = |segment, threshold| format!("{before}(segment={segment},threshold={threshold})");
        let of = |segment| [2, 3, 4, 6].map(|threshold| one(segment, threshold));
        ["4k", "16k", "64k", "256k"].into_iter().flat_map(of).collect()
    };
    let levels = |before: &str| {
        let of = |ageing| {
            ["compare", "admit", "reject"]
                .map(|writes| format!("{before}(ageing={ageing},writes={writes})"))
        };
        [4, 16, 64].into_iter().flat_map(of).collect()
    };
    match contender {
        "all" => vec!["all".to_owned()],
        "seqr" => ["seqr", "seqr(free=on)"].map(str::to_owned).to_vec(),
        "sseqr" => {
            let of = |length| ["", ",free=on"].map(|free| format!("sseqr(length={length}{free})"));
            ["64k", "256k", "1m", "4m", "16m"].into_iter().flat_map(of).collect()
        }
        "tc" => touches("touch_count"),
        "seqr+tc" => touches("seqr+tc"),
        "sseqr+tc" => touches("sseqr+tc"),
        "two_lbs" => levels("two_lbs"),
        "sseqr+two_lbs" => levels("sseqr+two_lbs"),
        "expected_reads" => {
            let prices = [0.0, 0.2, 2.0, 4.0].map(|price| format!("least=0,price={price}"));
            let least = [0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 25.0]
                .map(|least| format!("least={least}"));
            let all = prices.into_iter().chain(least);
            all.map(|parameters| format!("expected_reads({parameters})")).collect()
        }
        _ => Vec::new(),
    }
}

/// What one setting did, behind the warm-up.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BlockPoint {
    /// Workload.
    pub workload: &'static str,
    /// Cache as a share of the lines that the workload touches.
    pub cache: f64,
    /// Bytes of it.
    pub flash: u64,
    /// Contender.
    pub policy: &'static str,
    /// Its setting.
    pub setting: String,
    /// Of the lines read, those that hit.
    pub line_hit_ratio: f64,
    /// Bytes written to flash.
    pub flash_bytes: u64,
    /// The same over the bytes that clients wrote, if they wrote any.
    pub clwa_of_writes: Option<f64>,
    /// DRAM of the policy's tables, bytes.
    pub admission_bytes: u64,
}

/// One run over requests of which the first third warms up. `touched` are the bytes of its lines.
///
/// # Errors
/// A setting that cannot be, or a cache too small to be one.
pub fn block_point(
    workload: &BlockWorkload,
    requests: &[Request],
    touched: u64,
    cache: f64,
    (policy, setting): (&'static str, &str),
) -> Result<BlockPoint, String> {
    let admission: BlockAdmissionConfig =
        setting.parse().map_err(|e| format!("'{setting}': {e}"))?;
    let bytes = (touched as f64 * cache) as u64;
    let mut study = BlockCache::new(BlockCacheSpec {
        bytes,
        line_bytes: LINE,
        placement: Placement::Full,
        replacement: Replacement::Lru,
        admission,
        writes: WriteMode::WriteThrough,
        drive: None,
        backing_bytes: 0,
        seed: 1,
    })
    .map_err(|e| format!("{} in {}: {e}", workload.name, ByteSize(bytes)))?;
    for (i, request) in requests.iter().enumerate() {
        if i == requests.len() / 3 {
            study.count();
        }
        study.request(request);
    }
    let outcome = study.outcome();
    Ok(BlockPoint {
        workload: workload.name,
        cache,
        flash: bytes,
        policy,
        setting: setting.to_owned(),
        line_hit_ratio: outcome.line_hit_ratio(),
        flash_bytes: outcome.flash_bytes,
        clwa_of_writes: (outcome.written_bytes > 0).then(|| outcome.clwa_of_writes()),
        admission_bytes: outcome.admission_memory,
    })
}

/// The most hits that mixtures of `points`, (bytes, hits) each, and of nothing at all have at `level` times `all` bytes.
pub fn most_hits(points: &[(u64, f64)], all: u64, level: f64) -> f64 {
    let most = (1.0 + TOLERANCE) * level * all as f64;
    let mut points: Vec<(f64, f64)> = points.iter().map(|&(x, y)| (x as f64, y)).collect();
    points.push((0.0, 0.0));
    let mut best: f64 = 0.0;
    for &(x, y) in points.iter().filter(|p| p.0 <= most) {
        best = best.max(y);
        for &(beyond, other) in points.iter().filter(|p| p.0 > most) {
            best = best.max(y + (other - y) * (most - x) / (beyond - x));
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_can_be() {
        for policy in BLOCK_CONTENDERS {
            let settings = block_settings(policy);
            assert!(!settings.is_empty(), "{policy}");
            for setting in settings {
                let config = setting.parse::<BlockAdmissionConfig>();
                assert!(config.is_ok(), "{setting}: {config:?}");
            }
        }
        assert!(block_settings("tc+all").is_empty());
    }

    #[test]
    fn hits_at_a_level_lie_on_the_upper_hull() {
        let points = [(50, 0.2), (100, 0.5), (200, 0.6), (150, 0.1)];
        let at = |bytes: f64| most_hits(&points, 100, bytes / 100.0 / (1.0 + TOLERANCE));
        // Between nothing and (100, 0.5), over (50, 0.2).
        assert!((at(50.0) - 0.25).abs() < 1e-9);
        assert!((at(100.0) - 0.5).abs() < 1e-9);
        assert!((at(150.0) - 0.55).abs() < 1e-9);
        assert!((at(1000.0) - 0.6).abs() < 1e-9, "more bytes are not needed");
        assert_eq!(most_hits(&[], 100, 1.0), 0.0);
    }

    #[test]
    fn made_workloads_run_and_repeat() {
        let backup = BlockWorkload::named("backup").unwrap();
        assert_eq!(backup.needs(Path::new("/traces")), None);
        let requests = backup.requests(Path::new("")).unwrap();
        let (requests, touched) = (&requests[..20_000], block_footprint(&requests[..20_000]));
        let run = |policy: &'static str| {
            block_point(&backup, requests, touched, 0.1, (policy, policy)).unwrap()
        };
        let (all, expected) = (run("all"), run("expected_reads"));
        assert!(all.flash_bytes > 0 && all.line_hit_ratio > 0.0, "{all:?}");
        assert_eq!(expected, run("expected_reads"));
        let refused = block_point(&backup, requests, touched, 0.1, ("all", "al"));
        assert!(refused.unwrap_err().contains("'al'"));
    }
}
