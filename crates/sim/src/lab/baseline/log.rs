//! A log of regions on flash with every object in a DRAM index: Navy's block cache.
//!
//! Berg et al. (OSDI '20), §4.3, and CacheLib's documentation of Navy's Block Cache; with an admission filter in front
//! also the flash cache of Yang et al., "FIFO Queues are All You Need for Cache Eviction" (SOSP '23), §5.4 (there with a
//! FIFO in DRAM, here with LRU). Regions are filled in DRAM, written in one piece, and reclaimed in the order in which
//! they were written; an object that was hit often enough on flash may be written again then.

use std::collections::VecDeque;

use super::hybrid::{Account, Flash, Found, Hybrid, HybridConfig, baseline_by_field};
use super::{Baseline, BaselineError, Counts, Index, IndexSize, NONE};
use crate::device::DeviceOp;

/// A record's header on flash: lengths of key and value, hash, checksums.
const RECORD_HEADER: u64 = 24;
/// DRAM of an indexed object in hundredths of a byte: an 8-byte record in CacheLib's sparse map, 9.25 with the map.
const INDEX_CENTIBYTES: u64 = 925;

/// Parameters of the flash part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogParams {
    /// Bytes of a region (CacheLib: 16 MiB).
    pub region: u64,
    /// Records start at multiples of so many bytes (CacheLib: 512; 1 packs them closely).
    pub align: u32,
    /// An object with at least so many hits since it was written is written again when its region is reclaimed; 0 never.
    pub reinsert: u32,
}

impl Default for LogParams {
    fn default() -> LogParams {
        LogParams { region: 16 << 20, align: 1, reinsert: 0 }
    }
}

#[derive(Clone, Debug)]
struct Item {
    tag: u32,
    size: u32,
    hits: u32,
    open: bool,
    dead: bool,
    /// Where the record starts: in its region while that is open, on flash afterwards.
    at: u64,
}

#[derive(Debug, Default)]
struct Region {
    items: Vec<u32>,
    used: u64,
    /// Where on flash, in regions.
    place: u64,
}

pub(super) struct Log {
    params: LogParams,
    regions: usize,
    /// Oldest first.
    sealed: VecDeque<Region>,
    open: Region,
    items: Vec<Item>,
    free: Vec<u32>,
    index: Index,
    objects: u64,
    record_bytes: u64,
}

impl Log {
    fn record(&self, size: u32) -> u64 {
        (u64::from(size) + RECORD_HEADER).next_multiple_of(u64::from(self.params.align.max(1)))
    }

    /// Appends to the open region, which has room.
    fn append(&mut self, tag: u32, size: u32) {
        let item = Item { tag, size, hits: 0, open: true, dead: false, at: self.open.used };
        let at = match self.free.pop() {
            Some(at) => {
                self.items[at as usize] = item;
                at
            }
            None => {
                self.items.push(item);
                self.items.len() as u32 - 1
            }
        };
        self.open.used += self.record(size);
        self.open.items.push(at);
        self.index.set(tag, at);
        self.objects += 1;
    }

    /// Writes the open region; where flash is full, the oldest makes room first.
    fn seal(&mut self, account: &mut Account) {
        // Places are used in turn until there are none left, then the oldest region's.
        let mut place = self.sealed.len() as u64;
        let mut survivors = Vec::new();
        if self.sealed.len() >= self.regions {
            (place, survivors) = self.reclaim(account);
        }
        let start = place * self.params.region;
        account.write(start, self.params.region as u32);
        self.record_bytes += self.open.used;
        for &at in &self.open.items {
            let item = &mut self.items[at as usize];
            item.open = false;
            item.at += start;
        }
        self.open.place = place;
        self.sealed.push_back(std::mem::take(&mut self.open));
        // No more than a region's worth: the new open region holds them. They start without hits, so that a region
        // of nothing but popular objects cannot go round for ever.
        for (tag, size) in survivors {
            self.append(tag, size);
        }
    }

    /// Frees the oldest region; returns its place and what is worth writing again.
    fn reclaim(&mut self, account: &mut Account) -> (u64, Vec<(u32, u32)>) {
        let mut survivors = Vec::new();
        let oldest = self.sealed.pop_front().unwrap_or_default();
        if self.params.reinsert > 0 {
            let start = oldest.place * self.params.region;
            account.background_read(start, self.params.region as u32);
        }
        for at in oldest.items {
            let item = &self.items[at as usize];
            if !item.dead {
                if self.params.reinsert > 0 && item.hits >= self.params.reinsert {
                    survivors.push((item.tag, item.size));
                }
                self.index.set(item.tag, NONE);
                self.objects -= 1;
            }
            self.free.push(at);
        }
        (oldest.place, survivors)
    }
}

impl Flash for Log {
    fn lookup(&mut self, tag: u32, account: &mut Account) -> Option<Found> {
        let at = self.index.get(tag);
        if at == NONE {
            return None;
        }
        let item = &mut self.items[at as usize];
        item.hits = item.hits.saturating_add(1);
        let item = &self.items[at as usize];
        if !item.open {
            account.read(item.at, self.record(item.size) as u32);
        }
        Some(Found { size: item.size, in_memory: item.open })
    }

    fn contains(&self, tag: u32) -> bool {
        self.index.get(tag) != NONE
    }

    fn fits(&self, size: u32) -> bool {
        self.record(size) <= self.params.region
    }

    fn insert(&mut self, tag: u32, size: u32, account: &mut Account) {
        while self.open.used + self.record(size) > self.params.region {
            self.seal(account);
        }
        self.append(tag, size);
    }

    fn remove(&mut self, tag: u32, _: &mut Account) {
        let at = self.index.get(tag);
        if at != NONE {
            // The space is lost until the region goes.
            self.items[at as usize].dead = true;
            self.index.set(tag, NONE);
            self.objects -= 1;
        }
    }

    fn index_size(&self) -> IndexSize {
        IndexSize { bytes: self.objects * INDEX_CENTIBYTES / 100, objects: self.objects }
    }

    fn record_bytes(&self) -> Option<u64> {
        Some(self.record_bytes)
    }
}

/// DRAM before a log on flash. The open region's buffer is DRAM on top of the configured.
pub struct FifoLog(Hybrid<Log>);

impl FifoLog {
    /// An empty cache.
    ///
    /// # Errors
    /// Less flash than two regions, an empty region, no DRAM, a filter that cannot be set up.
    pub fn new(config: &HybridConfig, params: LogParams) -> Result<FifoLog, BaselineError> {
        let align = u64::from(params.align);
        if !(1..=1 << 30).contains(&align) {
            let must = "from 1 byte to 1 GiB".to_owned();
            return Err(BaselineError::Size { what: "align", value: align, must });
        }
        if !(4096..=1 << 30).contains(&params.region) || align > params.region {
            let must = "from 4 KiB to 1 GiB and no smaller than the alignment (align)";
            let must = must.to_owned();
            return Err(BaselineError::Size { what: "region", value: params.region, must });
        }
        let regions = config.flash / params.region;
        if !(2..=1 << 24).contains(&regions) {
            let must = format!("from 2 to 2^24 regions of {} bytes", params.region);
            return Err(BaselineError::Size { what: "flash", value: config.flash, must });
        }
        let log = Log {
            params,
            regions: regions as usize,
            sealed: VecDeque::new(),
            open: Region::default(),
            items: Vec::new(),
            free: Vec::new(),
            index: Index::default(),
            objects: 0,
            record_bytes: 0,
        };
        Ok(FifoLog(Hybrid::new(config, log)?))
    }
}

baseline_by_field!(FifoLog);

#[cfg(test)]
mod tests {
    use larder_base::Rng;
    use proptest::prelude::*;

    use super::*;
    use crate::lab::baseline::admission;

    fn cache(dram: u64, regions: u64, filter: &str, reinsert: u32) -> FifoLog {
        let params = LogParams { region: 4096, align: 1, reinsert };
        let config = HybridConfig {
            dram,
            flash: regions * 4096,
            admission: admission(filter).unwrap(),
            mean_object: 300,
            seed: 5,
        };
        FifoLog::new(&config, params).unwrap()
    }

    /// (tag, size, hits since it was written)
    type Record = (u32, u32, u32);

    /// The same by the shortest means. The last region is the open one.
    struct Naive {
        capacity: u64,
        regions: usize,
        reinsert: u32,
        dram: Vec<(u32, u32)>,
        log: Vec<Vec<Option<Record>>>,
        /// Bytes of every region that were taken, dead records too.
        used: Vec<u64>,
        written: u64,
    }

    impl Naive {
        fn on_flash(&mut self, tag: u32) -> Option<&mut Option<Record>> {
            self.log.iter_mut().flatten().find(|r| r.is_some_and(|r| r.0 == tag))
        }

        fn push(&mut self, tag: u32, size: u32) {
            let need = u64::from(size) + 24;
            while self.used.last().unwrap() + need > 4096 {
                let mut again = Vec::new();
                if self.log.len() > self.regions {
                    again = self.log.remove(0);
                    self.used.remove(0);
                }
                self.written += 4096;
                self.log.push(Vec::new());
                self.used.push(0);
                for (t, s, hits) in again.into_iter().flatten() {
                    if self.reinsert > 0 && hits >= self.reinsert {
                        self.log.last_mut().unwrap().push(Some((t, s, 0)));
                        *self.used.last_mut().unwrap() += u64::from(s) + 24;
                    }
                }
            }
            self.log.last_mut().unwrap().push(Some((tag, size, 0)));
            *self.used.last_mut().unwrap() += need;
        }

        fn enter(&mut self, tag: u32, size: u32) {
            let held = |dram: &[(u32, u32)]| dram.iter().map(|d| u64::from(d.1)).sum::<u64>();
            while held(&self.dram) + u64::from(size) > self.capacity {
                let (t, s) = self.dram.pop().unwrap();
                if self.on_flash(t).is_none() && s + 24 <= 4096 {
                    self.push(t, s);
                }
            }
            self.dram.insert(0, (tag, size));
        }

        fn remove(&mut self, tag: u32) {
            self.dram.retain(|d| d.0 != tag);
            if let Some(record) = self.on_flash(tag) {
                *record = None;
            }
        }

        fn request(&mut self, tag: u32, size: u32) -> bool {
            if let Some(at) = self.dram.iter().position(|d| d.0 == tag) {
                if self.dram[at].1 == size {
                    let item = self.dram.remove(at);
                    self.dram.insert(0, item);
                    return true;
                }
                self.remove(tag);
            } else if let Some(Some(record)) = self.on_flash(tag) {
                record.2 += 1;
                if record.1 == size {
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
        fn agrees_with_a_naive_model(
            seed in any::<u64>(), dram in 1500u64..9000, regions in 2u64..9, reinsert in 0u32..3,
        ) {
            let mut rng = Rng::new(seed);
            let mut real = cache(dram, regions, "all", reinsert);
            let mut naive = Naive {
                capacity: dram,
                regions: regions as usize,
                reinsert,
                dram: Vec::new(),
                log: vec![Vec::new()],
                used: vec![0],
                written: 0,
            };
            for step in 0..1500 {
                let tag = rng.below(100) as u32;
                if rng.chance(0.03) {
                    real.remove(tag);
                    naive.remove(tag);
                    continue;
                }
                let size = 50 + (u64::from(tag) * 37 + rng.below(40) / 39 * 11) as u32 % 5000;
                prop_assert_eq!(real.request(tag, size), naive.request(tag, size), "step {}", step);
                prop_assert_eq!(real.counts().flash_bytes, naive.written, "step {}", step);
            }
            let live = naive.log.iter().flatten().flatten().count();
            prop_assert_eq!(real.index_size().unwrap().objects, live as u64);
        }
    }

    #[test]
    fn writes_each_object_once_and_reads_flash_once_a_hit() {
        let mut c = cache(4096, 64, "all", 0);
        for tag in 0..1000 {
            c.request(tag, 232);
        }
        // 16 records of 256 bytes to a region.
        let counts = c.counts();
        assert_eq!(counts.flash_writes, (1000 - 17) / 16);
        c.reset_counts();
        for tag in 0..500 {
            c.request(tag, 232);
        }
        let counts = c.counts();
        assert_eq!(counts.flash_reads, counts.hits - counts.hits_dram);
        assert_eq!((counts.hits, counts.false_reads), (500, 0));
        assert!((c.index_size().unwrap().per_object() - 9.25).abs() < 0.01);
    }

    /// Regions are written in turn, the places of reclaimed ones again, and every record is read where it was written.
    #[test]
    fn the_drive_is_told_of_regions_in_turn() {
        let mut c = cache(300, 3, "all", 0);
        c.record_device_ops();
        let mut ops = Vec::new();
        for tag in 0..200 {
            c.request(tag, 232);
        }
        c.take_device_ops(&mut ops);
        let places: Vec<u64> = ops
            .iter()
            .map(|op| match op {
                DeviceOp::Write { offset, len: 4096 } => offset / 4096,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(places, (0..12).map(|n| n % 3).collect::<Vec<_>>());
        // 16 records of 256 bytes: the last full region holds 176 to 191, in place 2.
        ops.clear();
        assert!(c.request(178, 232));
        c.take_device_ops(&mut ops);
        assert_eq!(ops[0], DeviceOp::Read { offset: 2 * 4096 + 2 * 256, len: 256 });
    }

    /// Popular objects that come back at every turn of the log stay, with reinsertion; without, they are lost each time.
    #[test]
    fn reinsertion_keeps_what_is_hit() {
        let run = |reinsert| {
            let mut c = cache(1000, 16, "all", reinsert);
            let mut rng = Rng::new(9);
            let mut fresh = 1000;
            for _ in 0..40_000 {
                let tag = if rng.chance(0.5) {
                    rng.below(100) as u32
                } else {
                    fresh += 1;
                    fresh
                };
                c.request(tag, 200);
            }
            c.counts()
        };
        let (never, once) = (run(0), run(1));
        assert!(once.hits > never.hits + 300, "{never:?} {once:?}");
    }

    /// The ghost filter keeps one-hit objects from flash and costs few hits (S3-FIFO's point).
    #[test]
    fn a_ghost_keeps_one_hit_objects_out() {
        let run = |filter| {
            let mut c = cache(8000, 64, filter, 0);
            let mut rng = Rng::new(9);
            let mut fresh = 10_000;
            for _ in 0..60_000 {
                let tag = if rng.chance(0.6) {
                    rng.below(500) as u32
                } else {
                    fresh += 1;
                    fresh
                };
                c.request(tag, 200);
            }
            c.counts()
        };
        let (all, ghost) = (run("all"), run("ghost"));
        assert!(ghost.flash_bytes * 4 < all.flash_bytes, "{all:?} {ghost:?}");
        assert!(ghost.hits > all.hits, "{all:?} {ghost:?}");
    }

    #[test]
    fn sizes_that_cannot_work_are_refused() {
        let config = HybridConfig {
            dram: 1000,
            flash: 5000,
            admission: admission("all").unwrap(),
            mean_object: 300,
            seed: 1,
        };
        let bad = |params| FifoLog::new(&config, params).err().unwrap().to_string();
        let region = |region| LogParams { region, ..LogParams::default() };
        assert!(bad(region(4096)).starts_with("flash is 5000: it must be from 2 to 2^24 regions"));
        assert!(bad(region(10)).starts_with("region is 10: it must be"));
        let config = HybridConfig { flash: 1 << 20, mean_object: 1, ..config };
        let e = FifoLog::new(&config, region(4096)).err().unwrap().to_string();
        assert_eq!(e, "mean_object is 1: it must be at least 16 bytes");
    }
}
