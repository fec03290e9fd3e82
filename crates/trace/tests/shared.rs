//! The shared traces, where they are: every file is recognised and holds as many requests as its description and the
//! golden tables say.

use std::collections::HashSet;
use std::path::PathBuf;

use larder_trace::{Format, Op, Options, open};

fn shared(name: &str) -> String {
    let beside = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let root = std::env::var_os("LARDER_SHARED").map_or_else(beside, PathBuf::from);
    root.join("traces").join(name).to_string_lossy().into_owned()
}

/// File, format told, pages, requests, distinct ids (0: not stated).
#[rustfmt::skip]
const EXPECTED: &[(&str, Format, bool, u64, u64)] = &[
    ("cloudphysics/cloudPhysicsIO.oracleGeneral.bin.zst", Format::OracleGeneral, false, 113_872, 48_974),
    ("cloudphysics/cloudPhysicsIO.vscsi.zst", Format::Vscsi1, false, 113_872, 48_974),
    ("cloudphysics/cloudPhysicsIO.csv.zst", Format::Csv, false, 113_872, 48_974),
    // Requests in pages: n_req of golden/libcachesim-2024.csv.
    ("cloudphysics/cloudPhysicsIO.vscsi.zst", Format::Vscsi1, true, 1_141_869, 0),
    ("disksim/ajw.1week.srt.zst", Format::Srt, true, 73_384, 0),
    ("tencent/tencent.cut.per_50k.rw_60_40.490.trace.zst", Format::FlashNet, true, 146_960, 0),
    ("msr/msr.cut.per_10k.rw_20_80.105.trace.zst", Format::Replayer, false, 10_000, 0),
    ("msr/traceB.trace.zst", Format::Replayer, false, 15_245, 0),
    ("tencent/tencent.cut.per_50k.most_size_thpt.222.trace.zst", Format::FlashNet, false, 50_000, 0),
    ("tencent/tencent.cut.per_50k.rw_60_40.490.trace.zst", Format::FlashNet, false, 50_000, 0),
    ("tencent/tencent.cut.per_50k.rw_65_35.211.trace.zst", Format::FlashNet, false, 50_000, 0),
    ("disksim/ajw.1week.srt.zst", Format::Srt, false, 44_519, 0),
    ("mqsim/wsrch-small.trace.zst", Format::MqSim, false, 24_783, 0),
    ("blkparse/ycsb_rocksdb_ext4.blkparse.txt.zst", Format::BlkParse, false, 9_887, 0),
    ("arc/OLTP.lis.zst", Format::Arc, false, 914_145, 186_880),
    ("lirs/2_pools.trace.gz", Format::Lirs, false, 100_000, 0),
    ("lirs/loop.trace.gz", Format::Lirs, false, 505_500, 0),
    ("adaptsize/request.trace.xz", Format::WebCacheSim, false, 66_987, 0),
    ("mooncake/conversation_trace.jsonl.zst", Format::Mooncake, false, 288_500, 0),
    ("kv/kv_adaptsize64k.lsmsim.csv.zst", Format::Memcachier, false, 66_297, 0),
    ("cachelib/kv_traces_1.csv.zst", Format::CacheLib, false, 691, 0),
    ("cachelib/block_traces_1.csv.zst", Format::CacheLib, false, 1_023, 0),
];

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn every_shared_trace_is_recognised_and_complete() {
    let mut wrong = Vec::new();
    for &(name, format, pages, requests, objects) in EXPECTED {
        let file = shared(name);
        let options = Options { pages: pages.then_some(4096), ..Options::default() };
        let trace = open(&file, &options).unwrap();
        if trace.format != Some(format) {
            wrong.push(format!("{name}: told as {:?}: {}", trace.format, trace.explanation));
            continue;
        }
        let mut seen = HashSet::new();
        let mut count = 0;
        let mut last = None;
        for request in trace.reader {
            let request = request.unwrap();
            assert!(request.time >= last, "{name}: time goes back");
            last = request.time;
            seen.insert(request.id);
            count += 1;
        }
        if (requests > 0 && count != requests) || (objects > 0 && seen.len() as u64 != objects) {
            wrong.push(format!("{name} (pages {pages}): {count} requests, {} objects", seen.len()));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn keys_alone_need_their_format() {
    for (name, format, requests) in [
        ("caffeine/web07.trace.xz", Format::U32Be, 76_118),
        ("caffeine/scarab-recs.trace.xz", Format::I64Be, 1_245_184),
    ] {
        let file = shared(name);
        let options = Options { format: Some(format), ..Options::default() };
        assert_eq!(open(&file, &options).unwrap().reader.filter(|r| r.is_ok()).count(), requests);
    }
}

/// The write shares that the traces' description states.
#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn writes_are_told_from_reads() {
    for (name, low, high) in [
        ("cloudphysics/cloudPhysicsIO.vscsi.zst", 0.585, 0.595),
        ("msr/msr.cut.per_10k.rw_20_80.105.trace.zst", 0.79, 0.81),
        ("msr/traceB.trace.zst", 0.09, 0.11),
        ("disksim/ajw.1week.srt.zst", 0.70, 0.72),
        ("mqsim/wsrch-small.trace.zst", 0.0, 0.005),
        ("blkparse/ycsb_rocksdb_ext4.blkparse.txt.zst", 0.08, 0.10),
        ("tencent/tencent.cut.per_50k.rw_60_40.490.trace.zst", 0.17, 0.405),
    ] {
        let file = shared(name);
        let (mut writes, mut all) = (0u64, 0u64);
        for request in open(&file, &Options::default()).unwrap().reader {
            writes += u64::from(request.unwrap().op == Op::Write);
            all += 1;
        }
        let share = writes as f64 / all as f64;
        assert!((low..=high).contains(&share), "{name}: {share}");
    }
}
