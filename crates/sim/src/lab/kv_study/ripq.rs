//! RIPQ driven as the hybrid cache is, to be compared with it at equal flash writes.

use larder_base::Rng;
use larder_trace::Request;

use crate::kv::{Counters, MAX_VALUE};
use crate::lab::baseline::{Baseline, Ripq};
use crate::mrc::Interner;

/// Insertion points, as in the Flashield paper's comparison.
const SECTIONS: u64 = 8;

/// What RIPQ does with `requests` after the first `warmup` of them; `count_filling`: what it writes before counts too. Returns
/// the counts after the warm-up and those from the start. All
/// of its DRAM is block buffers, one for each insertion point; a block is at most a quarter of a section. A miss is taken
/// in with `chance`: RIPQ itself admits all, so this is what makes it write less. A set replaces the object: the version on
/// flash is dead, and the new one is taken in by the same draw.
pub(super) fn run(
    requests: &[Request],
    (warmup, count_filling): (usize, bool),
    (dram, flash): (u64, u64),
    chance: f64,
    seed: u64,
) -> (Counters, Counters) {
    let block = (dram / SECTIONS).max(4096).min(flash / SECTIONS / 4).max(1);
    let mut cache = Ripq::new(flash, block, SECTIONS as usize);
    let mut interner = Interner::new();
    let mut rng = Rng::new(seed ^ 0x7269_7071);
    let mut counters = Counters::default();
    let mut warm = Counters::default();
    for (i, r) in requests.iter().enumerate() {
        if i == warmup {
            warm = Counters { flash_bytes: cache.counts().flash_bytes, ..counters };
        }
        counters.requests += 1;
        let Some(tag) = interner.intern(r.id) else { continue };
        let bytes = u64::from(r.key_bytes().clamp(8, 250)) + r.size.min(MAX_VALUE);
        let size = bytes as u32;
        let taken = rng.unit() < chance;
        if r.op.is_read() {
            counters.gets += 1;
            counters.get_bytes += bytes;
            let before = cache.counts().hits_dram;
            if cache.holds(tag, size) {
                cache.request(tag, size);
                let in_dram = cache.counts().hits_dram > before;
                counters.hits_dram += u64::from(in_dram);
                counters.hits_flash += u64::from(!in_dram);
                counters.hit_bytes += bytes;
            } else {
                counters.miss_bytes += bytes;
                counters.set_bytes += bytes;
                if taken {
                    cache.request(tag, size);
                }
            }
        } else {
            cache.remove(tag);
            if r.op.is_write() && !r.op.is_removal() {
                counters.set_bytes += bytes;
                if taken {
                    cache.request(tag, size);
                }
            }
        }
    }
    counters.flash_bytes = cache.counts().flash_bytes;
    let mut after = counters.since(&warm);
    if count_filling {
        after.flash_bytes = counters.flash_bytes;
    }
    (after, counters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_trace::{Op, generate};

    #[test]
    fn chance_and_updates() {
        let spec = "zipf?objects=20000&requests=60000&writes=0.05&seed=2";
        let requests: Vec<Request> = generate::parse(spec).unwrap().map(|r| r.unwrap()).collect();
        let sizes = (1 << 20, 7 << 20);
        let all = run(&requests, (20_000, false), sizes, 1.0, 1).0;
        let few = run(&requests, (20_000, false), sizes, 0.1, 1).0;
        let filled = run(&requests, (20_000, true), sizes, 0.1, 1).0;
        assert!(filled.flash_bytes > few.flash_bytes && filled.gets == few.gets);
        let none = run(&requests, (20_000, false), sizes, 0.0, 1).0;
        assert_eq!(
            all.gets + requests[20_000..].iter().filter(|r| r.op.is_write()).count() as u64,
            40_000
        );
        assert!(all.flash_bytes > few.flash_bytes * 2 && few.flash_bytes > 0, "{all:?} {few:?}");
        assert_eq!((none.flash_bytes, none.hits_flash + none.hits_dram), (0, 0));
        assert!(all.hit_ratio() > 0.2 && all.hits_dram > 0 && all.hits_flash > 0);
        // An update of the same size is not a hit and is written again.
        let set = Request { op: Op::Set, ..Request::get(1, 100) };
        let get = Request::get(1, 100);
        let c = run(&[set, get, set, get], (0, false), (64 << 10, 1 << 20), 1.0, 1).0;
        assert_eq!((c.gets, c.hits_dram + c.hits_flash, c.miss_bytes), (2, 2, 0));
        assert_eq!(c.set_bytes, 2 * (16 + 100));
    }
}
