//! Admission policies of the block cache side by side on one trace, full placement, LRU, 4 KiB lines:
//! `block_study TRACE SIZES WARMUP POLICY…`, sizes separated by commas.

use larder_base::ByteSize;
use larder_policy::block::Replacement;
use larder_sim::block_study::{BlockCache, BlockCacheSpec, Placement, Writes};
use larder_trace::{Options, open};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [trace, sizes, warmup, policies @ ..] = arguments.as_slice() else {
        return Err("block_study TRACE SIZES WARMUP POLICY…".into());
    };
    let warmup: u64 = warmup.parse()?;
    let mut caches = Vec::new();
    for size in sizes.split(',') {
        for policy in policies {
            // A policy may be followed by a replacement: seqr/sieve.
            let (admission, replacement) = policy.split_once('/').unwrap_or((policy, "lru"));
            caches.push(BlockCache::new(BlockCacheSpec {
                bytes: size.parse::<ByteSize>()?.0,
                line_bytes: 4096,
                placement: Placement::Full,
                replacement: replacement.parse::<Replacement>()?,
                admission: admission.parse()?,
                writes: Writes::Allocate,
                backing_bytes: 0,
                seed: 1,
            })?);
        }
    }
    for (n, request) in (0u64..).zip(open(trace, &Options::default())?.reader) {
        let request = request?;
        if n == warmup {
            caches.iter_mut().for_each(BlockCache::count);
        }
        caches.iter_mut().for_each(|cache| cache.request(&request));
    }
    println!(
        "{:<40} {:>9} {:>9} {:>9} {:>11} {:>6} {:>9}",
        "policy", "size", "hits", "metadata", "to flash", "CLWA", "DRAM"
    );
    for cache in &caches {
        let (spec, o) = (cache.spec(), cache.outcome());
        println!(
            "{:<40} {:>9} {:>7.2} % {:>7.2} % {:>11} {:>6.2} {:>9}",
            format!("{} {}", spec.admission, spec.replacement),
            ByteSize(spec.bytes).to_string(),
            100.0 * o.hit_ratio(),
            100.0 * o.metadata_hit_ratio(),
            ByteSize(o.flash_bytes).to_string(),
            o.clwa(),
            ByteSize(o.admission_memory).to_string(),
        );
    }
    Ok(())
}
