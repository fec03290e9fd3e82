//! The generated OLTP trace with a backup behaves as Fusion-io's did: hit ratios of reads under LRU with everything
//! admitted, warmed by a first run, at 80, 100 and 120 GiB ("Flash based Caching: Opportunities and Challenges", 2013).

use larder_sim::lab::baseline::{Baseline, VictimCache};
use larder_sim::mrc::Interner;
use larder_trace::{Options, open};

const SCALE: f64 = 0.004;
const PUBLISHED: [(f64, f64); 3] = [(80.0, 0.1403), (100.0, 0.2067), (120.0, 0.2798)];

fn hit_ratio(gib: f64) -> f64 {
    // With no flash behind it, a victim cache is LRU in DRAM.
    let mut lru = VictimCache::new((gib * SCALE * f64::from(1 << 30)) as u64, 0);
    let mut interner = Interner::new();
    let (mut reads, mut hits) = (0u64, 0u64);
    for run in 0..2 {
        let trace = format!("gen:oltp-backup?scale={SCALE}");
        let options = Options { pages: Some(8192), ..Options::default() };
        for request in open(&trace, &options).unwrap().reader {
            let request = request.unwrap();
            let hit = lru.request(interner.intern(request.id).unwrap(), 8192);
            if run == 1 && request.op.is_read() {
                reads += 1;
                hits += u64::from(hit);
            }
        }
    }
    hits as f64 / reads as f64
}

#[test]
fn lru_hits_about_as_often_as_published() {
    for (gib, published) in PUBLISHED {
        let ours = hit_ratio(gib);
        eprintln!("{gib} GiB: {ours:.4}, published {published:.4}");
        assert!((ours - published).abs() < 0.05, "{gib} GiB: {ours}, published {published}");
    }
}
