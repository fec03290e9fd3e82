//! A set-associative cache for small objects: CacheLib's BigHash.
//!
//! Berg et al., "The CacheLib Caching Engine: Design and Experiences at Scale" (OSDI '20), §4.3, and CacheLib's
//! documentation of Navy. Flash is an array of buckets; an object's hash names its bucket; within the bucket objects
//! leave first in, first out. Every insertion and every removal reads the bucket and writes the whole of it. DRAM holds a
//! Bloom filter for each bucket and nothing for each object.

use std::collections::VecDeque;

use super::hybrid::{Account, Flash, Found, Hybrid, HybridConfig, baseline_by_field};
use super::{Baseline, BaselineError, Counts, IndexSize};
use crate::device::DeviceOp;

/// A bucket's header: checksum, generation, capacity, number of entries, end of the last.
const BUCKET_HEADER: u32 = 24;
/// An entry's: its length, lengths of key and value, hash of the key.
const ENTRY_HEADER: u32 = 20;
/// Hash functions of a bucket's Bloom filter, each with a table of 16 bits: 8 bytes, CacheLib's default.
const FUNCTIONS: u32 = 4;

/// Parameters of the flash part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetParams {
    /// Bytes of a bucket (CacheLib: 4 KiB).
    pub bucket: u32,
}

impl Default for SetParams {
    fn default() -> SetParams {
        SetParams { bucket: 4096 }
    }
}

#[derive(Clone, Debug, Default)]
struct Bucket {
    bloom: u64,
    used: u32,
    /// Oldest first.
    entries: VecDeque<(u32, u32)>,
}

/// Bytes of memory that an empty bucket takes.
pub(crate) const BUCKET_BYTES: u64 = size_of::<Bucket>() as u64;

pub(super) struct Sets {
    bucket: u32,
    seed: u64,
    buckets: Vec<Bucket>,
    objects: u64,
}

fn bloom_bits(hash: u64) -> u64 {
    // 4 bits of the hash for each table.
    (0..FUNCTIONS).fold(0, |bits, f| bits | 1 << (16 * f + (hash >> (4 * f) & 15) as u32))
}

impl Sets {
    fn hash(&self, tag: u32) -> u64 {
        larder_trace::mix(larder_trace::mix(u64::from(tag)) ^ self.seed)
    }

    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.buckets.len() as u128) >> 64) as usize
    }

    fn find(&self, tag: u32) -> Option<(usize, usize)> {
        let home = self.home(self.hash(tag));
        let at = self.buckets[home].entries.iter().position(|&(t, _)| t == tag)?;
        Some((home, at))
    }

    fn rebuild(&mut self, home: usize) {
        let bloom =
            self.buckets[home].entries.iter().fold(0, |b, &(t, _)| b | bloom_bits(self.hash(t)));
        self.buckets[home].bloom = bloom;
    }

    /// Where a bucket lies.
    fn place(&self, home: usize) -> u64 {
        home as u64 * u64::from(self.bucket)
    }

    fn rewrite(&self, home: usize, account: &mut Account) {
        account.background_read(self.place(home), self.bucket);
        account.write(self.place(home), self.bucket);
    }
}

impl Flash for Sets {
    fn lookup(&mut self, tag: u32, account: &mut Account) -> Option<Found> {
        let hash = self.hash(tag);
        let home = self.home(hash);
        let bucket = &self.buckets[home];
        let bits = bloom_bits(hash);
        if bucket.bloom & bits != bits {
            return None;
        }
        account.read(self.place(home), self.bucket);
        let found = bucket.entries.iter().find(|(t, _)| *t == tag);
        account.counts.false_reads += u64::from(found.is_none());
        found.map(|&(_, size)| Found { size, in_memory: false })
    }

    fn contains(&self, tag: u32) -> bool {
        self.find(tag).is_some()
    }

    fn fits(&self, size: u32) -> bool {
        u64::from(size) + u64::from(ENTRY_HEADER) <= u64::from(self.bucket - BUCKET_HEADER)
    }

    fn insert(&mut self, tag: u32, size: u32, account: &mut Account) {
        let hash = self.hash(tag);
        let home = self.home(hash);
        let room = self.bucket - BUCKET_HEADER;
        let need = size + ENTRY_HEADER;
        let bucket = &mut self.buckets[home];
        let mut evicted = 0;
        while bucket.used + need > room {
            let Some((_, old)) = bucket.entries.pop_front() else { break };
            bucket.used -= old + ENTRY_HEADER;
            evicted += 1;
        }
        bucket.entries.push_back((tag, size));
        bucket.used += need;
        bucket.bloom |= bloom_bits(hash);
        self.objects = self.objects + 1 - evicted;
        if evicted > 0 {
            self.rebuild(home);
        }
        self.rewrite(home, account);
    }

    fn remove(&mut self, tag: u32, account: &mut Account) {
        // A bucket whose filter errs is read in vain; it is not written.
        let Some((home, at)) = self.find(tag) else { return };
        if let Some((_, size)) = self.buckets[home].entries.remove(at) {
            self.buckets[home].used -= size + ENTRY_HEADER;
            self.objects -= 1;
        }
        self.rebuild(home);
        self.rewrite(home, account);
    }

    fn index_size(&self) -> IndexSize {
        IndexSize { bytes: 8 * self.buckets.len() as u64, objects: self.objects }
    }
}

/// DRAM before buckets on flash.
pub struct SetAssociative(Hybrid<Sets>);

impl SetAssociative {
    /// Bytes of memory that an empty bucket takes in the simulation.
    pub const BUCKET_BYTES: u64 = BUCKET_BYTES;

    /// An empty cache.
    ///
    /// # Errors
    /// A bucket below 512 bytes or above 1 MiB, less flash than one bucket, no DRAM, a filter that cannot be set up.
    pub fn new(config: &HybridConfig, params: SetParams) -> Result<SetAssociative, BaselineError> {
        let bucket = params.bucket;
        if !(512..=1 << 20).contains(&bucket) {
            let must = "from 512 bytes to 1 MiB".to_owned();
            return Err(BaselineError::Size { what: "bucket", value: u64::from(bucket), must });
        }
        let count = config.flash / u64::from(bucket);
        if count == 0 || count > 1 << 32 {
            let must = format!("from one to 2^32 buckets of {bucket} bytes");
            return Err(BaselineError::Size { what: "flash", value: config.flash, must });
        }
        let buckets = vec![Bucket::default(); count as usize];
        let sets = Sets { bucket, seed: larder_trace::mix(config.seed), buckets, objects: 0 };
        Ok(SetAssociative(Hybrid::new(config, sets)?))
    }
}

baseline_by_field!(SetAssociative);

#[cfg(test)]
mod tests {
    use larder_base::Rng;
    use proptest::prelude::*;

    use super::*;
    use crate::lab::baseline::admission;

    fn config(dram: u64, flash: u64, filter: &str) -> HybridConfig {
        HybridConfig {
            dram,
            flash,
            admission: admission(filter).unwrap(),
            mean_object: 300,
            seed: 3,
        }
    }

    fn cache(dram: u64, buckets: u64, filter: &str) -> SetAssociative {
        SetAssociative::new(&config(dram, buckets * 4096, filter), SetParams::default()).unwrap()
    }

    /// The same by the shortest means: vectors, and no Bloom filter.
    struct Naive {
        capacity: u64,
        dram: Vec<(u32, u32)>,
        buckets: Vec<Vec<(u32, u32)>>,
        written: u64,
    }

    impl Naive {
        fn home(&self, tag: u32) -> usize {
            let hash = larder_trace::mix(larder_trace::mix(u64::from(tag)) ^ larder_trace::mix(3));
            ((u128::from(hash) * self.buckets.len() as u128) >> 64) as usize
        }

        fn enter(&mut self, tag: u32, size: u32) {
            let held = |dram: &[(u32, u32)]| dram.iter().map(|d| u64::from(d.1)).sum::<u64>();
            while held(&self.dram) + u64::from(size) > self.capacity {
                let (t, s) = self.dram.pop().unwrap();
                let home = self.home(t);
                let bucket = &mut self.buckets[home];
                if bucket.iter().any(|e| e.0 == t) || s + 20 > 4096 - 24 {
                    continue;
                }
                bucket.push((t, s));
                while bucket.iter().map(|e| e.1 + 20).sum::<u32>() > 4096 - 24 {
                    bucket.remove(0);
                }
                self.written += 4096;
            }
            self.dram.insert(0, (tag, size));
        }

        fn remove(&mut self, tag: u32) {
            self.dram.retain(|d| d.0 != tag);
            let home = self.home(tag);
            let before = self.buckets[home].len();
            self.buckets[home].retain(|e| e.0 != tag);
            self.written += if self.buckets[home].len() < before { 4096 } else { 0 };
        }

        fn request(&mut self, tag: u32, size: u32) -> bool {
            if let Some(at) = self.dram.iter().position(|d| d.0 == tag) {
                if self.dram[at].1 == size {
                    let item = self.dram.remove(at);
                    self.dram.insert(0, item);
                    return true;
                }
                self.remove(tag);
            } else if let Some(e) = self.buckets[self.home(tag)].iter().find(|e| e.0 == tag) {
                if e.1 == size {
                    self.enter(tag, size);
                    return true;
                }
                self.remove(tag);
            }
            if u64::from(size) <= self.capacity {
                self.enter(tag, size);
            }
            false
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn agrees_with_a_naive_model(seed in any::<u64>(), dram in 2000u64..9000, buckets in 1u64..12) {
            let mut rng = Rng::new(seed);
            let mut real = cache(dram, buckets, "all");
            let mut naive = Naive {
                capacity: dram,
                dram: Vec::new(),
                buckets: vec![Vec::new(); buckets as usize],
                written: 0,
            };
            for step in 0..1500 {
                let tag = rng.below(120) as u32;
                if rng.chance(0.03) {
                    real.remove(tag);
                    naive.remove(tag);
                    continue;
                }
                // An object's size changes now and then; a few fit no bucket, a few no DRAM.
                let size = 50 + (u64::from(tag) * 37 + rng.below(40) / 39 * 11) as u32 % 5000;
                prop_assert_eq!(real.request(tag, size), naive.request(tag, size), "step {}", step);
                prop_assert_eq!(real.counts().flash_bytes, naive.written, "step {}", step);
            }
            let on_flash: usize = naive.buckets.iter().map(Vec::len).sum();
            prop_assert_eq!(real.index_size().unwrap().objects, on_flash as u64);
        }
    }

    /// Every object that enters costs a whole bucket: with objects that never come back, CLWA is 4096 over their size.
    #[test]
    fn an_insertion_writes_four_kibibytes() {
        let mut c = cache(1 << 16, 1000, "all");
        for tag in 0..20_000 {
            assert!(!c.request(tag, 128));
        }
        let counts = c.counts();
        assert_eq!(counts.flash_bytes, counts.flash_writes * 4096);
        assert_eq!(counts.flash_reads, counts.false_reads);
        assert_eq!(counts.flash_writes, 20_000 - (1 << 16) / 128);
        assert!((counts.clwa_of_misses() - 32.0).abs() < 1.0, "{}", counts.clwa_of_misses());
    }

    #[test]
    fn a_filter_divides_the_writes() {
        let mut rng = Rng::new(1);
        let requests: Vec<u32> = (0..60_000).map(|_| rng.below(10_000) as u32).collect();
        let run = |filter: &str| {
            let mut c = cache(1 << 16, 300, filter);
            for &tag in &requests {
                c.request(tag, 300);
            }
            c.counts()
        };
        let (all, tenth) = (run("all"), run("probability:0.1"));
        let reject = run("reject_first");
        assert_eq!(all.rejected, 0);
        let kept = tenth.flash_writes as f64 / (tenth.flash_writes + tenth.rejected) as f64;
        assert!((kept - 0.1).abs() < 0.01, "{kept}");
        assert!(reject.flash_writes < all.flash_writes && reject.rejected > 0);
        assert!(tenth.hits < all.hits && tenth.hits > 0);
    }

    /// The Bloom filters' share of false reads is that of four tables of 16 bits, and a stored object is never missed.
    #[test]
    fn bloom_filters_err_as_calculated() {
        let mut c = cache(257, 2000, "all");
        for tag in 0..60_000u32 {
            c.request(tag, 257);
        }
        let size = c.index_size().unwrap();
        assert_eq!(size.bytes, 16_000);
        let per_bucket = size.objects as f64 / 2000.0;
        assert!((13.0..=14.7).contains(&per_bucket), "{per_bucket}");
        c.reset_counts();
        for tag in 1_000_000..1_050_000u32 {
            let mut account = Account::default();
            c.0.flash.lookup(tag, &mut account);
            c.0.account.counts.flash_reads += account.counts.flash_reads;
        }
        let measured = c.counts().flash_reads as f64 / 50_000.0;
        let expected = (1.0 - (15.0f64 / 16.0).powf(per_bucket)).powi(4);
        assert!((measured - expected).abs() < 0.01, "{measured} {expected}");
        let there: Vec<u32> = (0..60_000).filter(|&t| c.0.flash.contains(t)).collect();
        for tag in there {
            assert!(c.0.flash.lookup(tag, &mut Account::default()).is_some());
        }
    }

    /// What the drive is told: a bucket is read and written where it lies; a hit reads it.
    #[test]
    fn the_drive_is_told_of_whole_buckets() {
        let mut c = cache(300, 8, "all");
        let mut ops = Vec::new();
        c.take_device_ops(&mut ops);
        c.record_device_ops();
        c.request(1, 300);
        c.request(2, 300);
        c.take_device_ops(&mut ops);
        let (DeviceOp::BackgroundRead { offset, len: 4096 }, 2) = (ops[0], ops.len()) else {
            panic!("{ops:?}")
        };
        assert_eq!(ops[1], DeviceOp::Write { offset, len: 4096 });
        assert!(offset.is_multiple_of(4096) && offset < 8 * 4096);
        ops.clear();
        assert!(c.request(1, 300));
        c.take_device_ops(&mut ops);
        assert_eq!(ops[0], DeviceOp::Read { offset, len: 4096 });
    }

    #[test]
    fn sizes_that_cannot_work_are_refused() {
        let bad = |dram, flash, bucket| {
            SetAssociative::new(&config(dram, flash, "all"), SetParams { bucket })
                .err()
                .unwrap()
                .to_string()
        };
        assert_eq!(bad(1000, 1 << 20, 100), "bucket is 100: it must be from 512 bytes to 1 MiB");
        assert!(bad(1000, 100, 4096).starts_with("flash is 100: it must be"));
        assert!(bad(0, 1 << 20, 4096).starts_with("dram is 0"));
        assert!(admission("flashiness").unwrap_err().to_string().contains("choose from all"));
        assert!(admission("probability:2").is_err());
    }
}
