//! The victim cache and RIPQ against utah-scs/lsm-sim's counts, on real sizes where the traces are present.
//!
//! Figures: `tests/golden/lsm-sim-victim-ripq.csv`.

use std::path::Path;

use larder_sim::device::DeviceOp;
use larder_sim::lab::baseline::{Baseline, Counts, Ripq, VictimCache};
use larder_sim::mrc::{Interner, Items};
use larder_trace::{Options, open};

struct Figure {
    trace: &'static str,
    policy: &'static str,
    dram: u64,
    flash: u64,
    block: u64,
    sections: usize,
    requests: u64,
    hits: u64,
    hit_ratio: f64,
    clwa: f64,
}

fn figures(trace: &str) -> Vec<Figure> {
    include_str!("golden/lsm-sim-victim-ripq.csv")
        .lines()
        .skip(1)
        .map(|line| {
            let f: Vec<&'static str> = line.split(',').collect();
            Figure {
                trace: f[0],
                policy: f[1],
                dram: f[3].parse().unwrap(),
                flash: f[4].parse().unwrap(),
                block: f[5].parse().unwrap_or(0),
                sections: f[6].parse().unwrap_or(0),
                requests: f[7].parse().unwrap(),
                hits: f[8].parse().unwrap(),
                hit_ratio: f[9].parse().unwrap(),
                clwa: f[12].parse().unwrap(),
            }
        })
        .filter(|f| f.trace == trace)
        .collect()
}

fn check(trace: &str, file: &str) {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let folder = std::env::var_os("LARDER_SHARED").map_or_else(beside, Into::into);
    let folder = folder.join("traces/kv");
    let name = folder.join(file).to_string_lossy().into_owned();
    let items = Items::new(open(&name, &Options::default()).unwrap().reader);
    let mut interner = Interner::new();
    let requests: Vec<(u32, u32)> = items
        .map(|item| {
            let item = item.unwrap();
            (interner.intern(item.id).unwrap(), item.size)
        })
        .collect();
    let (mut found, mut placed) = (Vec::new(), Vec::new());
    for figure in figures(trace) {
        let mut cache: Box<dyn Baseline> = match figure.policy {
            "victim" => Box::new(VictimCache::new(figure.dram, figure.flash)),
            _ => Box::new(Ripq::new(figure.flash, figure.block, figure.sections)),
        };
        for &(tag, size) in &requests {
            cache.request(tag, size);
        }
        let counts: Counts = cache.counts();
        assert_eq!(counts.requests, figure.requests);
        let what = format!("{} {} {} K={}", trace, figure.policy, figure.flash, figure.sections);
        eprintln!(
            "{what}: hit ratio {:.6} ({}), CLWA {:.4}; lsm-sim {:.6} ({}), {:.4}",
            counts.hit_ratio(),
            counts.hits,
            counts.clwa_of_misses(),
            figure.hit_ratio,
            figure.hits,
            figure.clwa
        );
        // All rows but one agree to the request; RIPQ with sections of seven blocks is off by 50 hits in 1.2 million.
        assert!((counts.hit_ratio() / figure.hit_ratio - 1.0).abs() < 0.0005, "{what}: hit ratio");
        assert!((counts.clwa_of_misses() / figure.clwa - 1.0).abs() < 0.001, "{what}: CLWA");
        if figure.flash != 3_670_016 || figure.sections != 8 {
            assert_eq!(counts.hits, figure.hits, "{what}");
        }
        found.push((figure.clwa, counts.clwa_of_misses()));
        if figure.policy == "ripq" {
            placed.push(with_places(&what, &figure, &requests));
        }
    }
    for (a, b) in placed.iter().zip(placed.iter().skip(1)) {
        assert_eq!(a.0 < b.0, a.1 < b.1, "the order of hit ratios with places: {placed:?}");
    }
    for (a, b) in found.iter().zip(found.iter().skip(1)) {
        assert_eq!(a.0 < b.0, a.1 < b.1, "the order of CLWA");
    }
}

/// RIPQ as `larder sim run` has it: no more blocks than the flash holds, each at its place. Hit ratios, theirs and ours.
fn with_places(what: &str, figure: &Figure, requests: &[(u32, u32)]) -> (f64, f64) {
    let mut cache = Ripq::placed(figure.flash, figure.block, figure.sections);
    cache.record_device_ops();
    let mut ops = Vec::new();
    let blocks = (figure.flash / figure.block) as usize;
    let mut held = vec![false; blocks];
    let (mut written, mut live, mut most) = (0, 0usize, 0);
    for &(tag, size) in requests {
        cache.request(tag, size);
        cache.take_device_ops(&mut ops);
        for op in ops.drain(..) {
            match op {
                DeviceOp::Write { offset, len } => {
                    assert!(u64::from(len) == figure.block && offset % figure.block == 0);
                    let place = &mut held[(offset / figure.block) as usize];
                    assert!(!std::mem::replace(place, true), "{what}: a block over another");
                    written += u64::from(len);
                    live += 1;
                    most = most.max(live);
                }
                DeviceOp::Trim { offset, .. } => {
                    assert!(std::mem::take(&mut held[(offset / figure.block) as usize]));
                    live -= 1;
                }
                DeviceOp::Read { offset, len } | DeviceOp::BackgroundRead { offset, len } => {
                    assert!(held[(offset / figure.block) as usize], "{what}: a read of nothing");
                    assert!(offset % figure.block + u64::from(len) <= figure.block);
                }
            }
        }
    }
    let counts = cache.counts();
    assert!(written == counts.flash_bytes && most <= blocks, "{what}: {most} of {blocks} blocks");
    // Sections of seven blocks feel it most that deleted bytes and the ends of blocks take room.
    let (hits, clwa) =
        (counts.hit_ratio() / figure.hit_ratio - 1.0, counts.clwa_of_misses() / figure.clwa - 1.0);
    assert!(hits.abs() < 0.03 && clwa.abs() < 0.04, "{what}: {hits} {clwa}");
    eprintln!(
        "{what}, with places: hit ratio {:.6} ({:+.2} %), CLWA {:.4} ({:+.2} %)",
        counts.hit_ratio(),
        hits * 100.0,
        counts.clwa_of_misses(),
        clwa * 100.0
    );
    (figure.hit_ratio, counts.hit_ratio())
}

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn adaptsize() {
    check("adaptsize64k", "kv_adaptsize64k.lsmsim.csv.zst");
}

#[test]
#[cfg_attr(without = "shared", ignore = "needs the shared traces (LARDER_SHARED=DIR)")]
fn zipf() {
    check("zipf09", "kv_zipf09.lsmsim.csv.zst");
}
