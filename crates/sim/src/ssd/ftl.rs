//! The flash translation layer.

use larder_base::{ByteSize, Rng, Short};
use larder_policy::block::{SegmentPicker, VictimPolicy};
use serde::Serialize;

use super::wear::Wear;

const NONE: u32 = u32::MAX;

/// The shape of the device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Geometry {
    /// Pages that the host sees.
    pub logical_pages: u32,
    /// Pages of a super-block: pages of an erase block × the blocks striped together.
    pub pages_per_block: u32,
    /// (Physical − logical) / logical pages. Open super-blocks, and the free one that cleaning needs, come on top, so
    /// that this is the α − 1 of the closed forms.
    pub over_provisioning: f64,
    /// Host streams, each with an open super-block of its own (1 for an ordinary drive).
    pub streams: u16,
    /// Whether copies made by the cleaner go to a super-block of their own, rather than to their stream's.
    pub separate_cleaning: bool,
    /// The cleaner's choice.
    pub victim: VictimPolicy,
}

impl Geometry {
    /// Bytes of memory that simulating such a drive takes, nearly: four for each logical and each physical page.
    pub fn memory_bytes(&self) -> u64 {
        let logical = f64::from(self.logical_pages);
        (4.0 * logical * (2.0 + self.over_provisioning.max(0.0))) as u64
    }
}

/// A shape that cannot work.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum GeometryError {
    /// Nothing to write to.
    #[error("{what} is {}: give {remedy}", Short(*value))]
    Bad {
        /// The field.
        what: &'static str,
        /// Its value.
        value: f64,
        /// What would do.
        remedy: &'static str,
    },
    /// The maps cannot be had.
    #[error("its maps take {0} of memory, which cannot be had: give fewer or larger pages")]
    Memory(ByteSize),
}

/// Decides what the cleaner does with a valid page: the cache above may prefer to drop it ("GC-based eviction", as in
/// Fusion-io's study), which costs no copy.
pub trait Keep {
    /// Whether the page is to be copied; otherwise it is dropped, and the logical page reads as empty.
    fn keep(&mut self, page: u32) -> bool;
}

/// Every valid page is copied, as by a drive that knows nothing of the cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoEviction;

impl Keep for NoEviction {
    fn keep(&mut self, _page: u32) -> bool {
        true
    }
}

/// Counts since the start or the last reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Pages that the host wrote.
    pub host_pages: u64,
    /// Valid pages that the cleaner copied.
    pub copied_pages: u64,
    /// Valid pages that the cleaner dropped.
    pub dropped_pages: u64,
    /// Mapped pages that the host trimmed.
    pub trimmed_pages: u64,
    /// Super-blocks erased.
    pub erases: u64,
}

impl Traffic {
    /// Pages programmed over pages written by the host: device-level write amplification. 1 before any write.
    pub fn write_amplification(&self) -> f64 {
        if self.host_pages == 0 {
            return 1.0;
        }
        (self.host_pages + self.copied_pages) as f64 / self.host_pages as f64
    }
}

#[derive(Clone, Copy, Debug)]
struct Open {
    block: u32,
    filled: u32,
}

/// What one host write made the device do, for timing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Pages programmed, the host's own included.
    pub programs: u32,
    /// Pages read by the cleaner.
    pub reads: u32,
    /// Super-blocks erased.
    pub erases: u32,
}

/// A simulated SSD. It maps pages; it stores no data.
#[derive(Debug)]
pub struct Ssd {
    geometry: Geometry,
    /// Physical page of each logical page.
    map: Vec<u32>,
    /// Logical page of each physical page, [`NONE`] when invalid.
    reverse: Vec<u32>,
    valid: Vec<u32>,
    erased: Vec<u32>,
    /// Stream of each super-block, which its pages keep when copied.
    stream: Vec<u16>,
    free: Vec<u32>,
    closed: SegmentPicker,
    /// One for each stream, then the cleaner's own when separate.
    open: Vec<Open>,
    /// Pages programmed since the start: the device's clock.
    clock: u64,
    traffic: Traffic,
    rng: Rng,
    moving: Vec<u32>,
}

impl Ssd {
    /// An empty device; `seed` is for random victims.
    ///
    /// # Errors
    /// Zero sizes, over-provisioning that is not positive, more than 2^32 − 1 physical pages.
    pub fn new(geometry: Geometry, seed: u64) -> Result<Ssd, GeometryError> {
        let bad = |what, value, remedy| Err(GeometryError::Bad { what, value, remedy });
        if geometry.logical_pages == 0 {
            return bad("logical_pages", 0.0, "at least 1");
        }
        if geometry.pages_per_block == 0 {
            return bad("pages_per_block", 0.0, "at least 1");
        }
        if geometry.streams == 0 {
            return bad("streams", 0.0, "at least 1");
        }
        let extra = geometry.over_provisioning;
        if !(extra > 0.0 && extra <= 100.0) {
            return bad("over_provisioning", extra, "a share over 0, such as 0.07 for 7 %");
        }
        let per_block = u64::from(geometry.pages_per_block);
        let data = (f64::from(geometry.logical_pages) * (1.0 + extra)).round() as u64;
        let open = u64::from(geometry.streams) + u64::from(geometry.separate_cleaning);
        // One more that cleaning writes to before it has erased its victim; what is open when cleaning starts is full.
        let blocks = data.div_ceil(per_block) + open + 1;
        let pages = blocks * per_block;
        if pages >= u64::from(NONE) {
            return bad("physical pages", pages as f64, "fewer than 2^32 - 1, with larger pages");
        }
        let blocks = blocks as usize;
        // Refused rather than the end of the process: these are the largest by far.
        let table = |entries: usize| {
            let mut table = Vec::new();
            let had = table.try_reserve_exact(entries);
            had.map_err(|_| GeometryError::Memory(ByteSize(geometry.memory_bytes())))?;
            table.resize(entries, NONE);
            Ok(table)
        };
        let mut ssd = Ssd {
            geometry,
            map: table(geometry.logical_pages as usize)?,
            reverse: table(pages as usize)?,
            valid: vec![0; blocks],
            erased: vec![0; blocks],
            stream: vec![0; blocks],
            free: (0..blocks as u32).rev().collect(),
            closed: SegmentPicker::new(geometry.victim, blocks),
            open: Vec::new(),
            clock: 0,
            traffic: Traffic::default(),
            rng: Rng::new(seed),
            moving: Vec::new(),
        };
        for index in 0..open as usize {
            let block = ssd.take_free(index);
            ssd.open.push(Open { block, filled: 0 });
        }
        Ok(ssd)
    }

    fn take_free(&mut self, index: usize) -> u32 {
        // The free list is never empty here: cleaning keeps one, and the constructor adds all that are open.
        let block =
            self.free.pop().unwrap_or_else(|| unreachable!("a free super-block is reserved"));
        self.stream[block as usize] = index as u16;
        block
    }

    /// The shape.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Counts so far.
    pub fn traffic(&self) -> Traffic {
        self.traffic
    }

    /// Starts counting traffic anew, as after filling the device. Wear is kept.
    pub fn reset_traffic(&mut self) {
        self.traffic = Traffic::default();
    }

    /// Whether the logical page holds data.
    ///
    /// # Panics
    /// If `page` is beyond the device.
    pub fn is_mapped(&self, page: u32) -> bool {
        self.map[page as usize] != NONE
    }

    fn invalidate(&mut self, page: u32) -> bool {
        let old = std::mem::replace(&mut self.map[page as usize], NONE);
        if old == NONE {
            return false;
        }
        self.reverse[old as usize] = NONE;
        let block = old / self.geometry.pages_per_block;
        self.valid[block as usize] -= 1;
        self.closed.invalidated(block, self.valid[block as usize]);
        true
    }

    fn program(&mut self, index: usize, page: u32) {
        let per_block = self.geometry.pages_per_block;
        if self.open[index].filled == per_block {
            let full = self.open[index].block;
            self.closed.insert(full, self.valid[full as usize], self.clock);
            let block = self.take_free(index);
            self.open[index] = Open { block, filled: 0 };
        }
        let open = &mut self.open[index];
        let at = open.block * per_block + open.filled;
        open.filled += 1;
        let block = open.block as usize;
        self.valid[block] += 1;
        self.map[page as usize] = at;
        self.reverse[at as usize] = page;
        self.clock += 1;
    }

    /// The host writes a page through `stream`.
    ///
    /// # Panics
    /// If the page or the stream is beyond the geometry.
    pub fn write(&mut self, page: u32, stream: u16, keep: &mut impl Keep) -> Work {
        assert!(stream < self.geometry.streams, "stream {stream} of {}", self.geometry.streams);
        let mut work = Work::default();
        self.invalidate(page);
        let index = usize::from(stream);
        if self.open[index].filled == self.geometry.pages_per_block {
            self.make_room(keep, &mut work);
        }
        self.program(index, page);
        work.programs += 1;
        self.traffic.host_pages += 1;
        work
    }

    /// The host discards a page.
    ///
    /// # Panics
    /// If the page is beyond the device.
    pub fn trim(&mut self, page: u32) {
        if self.invalidate(page) {
            self.traffic.trimmed_pages += 1;
        }
    }

    /// Cleans until a super-block can be opened while one more stays free for cleaning.
    fn make_room(&mut self, keep: &mut impl Keep, work: &mut Work) {
        while self.free.len() < 2 {
            let per_block = self.geometry.pages_per_block;
            let Some(victim) = self.closed.take(&self.valid, per_block, self.clock, &mut self.rng)
            else {
                return;
            };
            let mut moving = std::mem::take(&mut self.moving);
            moving.clear();
            let first = (victim * per_block) as usize;
            let pages = &mut self.reverse[first..first + per_block as usize];
            for page in pages {
                if *page != NONE {
                    moving.push(*page);
                    *page = NONE;
                }
            }
            self.valid[victim as usize] = 0;
            let index = if self.geometry.separate_cleaning {
                self.open.len() - 1
            } else {
                usize::from(self.stream[victim as usize])
            };
            for &page in &moving {
                if keep.keep(page) {
                    self.program(index, page);
                    self.traffic.copied_pages += 1;
                    work.reads += 1;
                    work.programs += 1;
                } else {
                    self.map[page as usize] = NONE;
                    self.traffic.dropped_pages += 1;
                }
            }
            self.moving = moving;
            self.erased[victim as usize] += 1;
            self.traffic.erases += 1;
            work.erases += 1;
            self.free.push(victim);
        }
    }

    /// Erase counts.
    pub fn wear(&self) -> Wear {
        Wear::of(&self.erased)
    }

    /// How many closed super-blocks have how many valid pages, in `bins` equal ranges from none to all.
    pub fn valid_distribution(&self, bins: usize) -> Vec<u64> {
        let bins = bins.max(1);
        let mut counts = vec![0; bins];
        for &block in self.closed.segments() {
            let share =
                f64::from(self.valid[block as usize]) / f64::from(self.geometry.pages_per_block);
            counts[((share * bins as f64) as usize).min(bins - 1)] += 1;
        }
        counts
    }

    /// Checks that both maps and all counts agree.
    ///
    /// # Panics
    /// When they do not.
    pub fn validate(&self) {
        let per_block = self.geometry.pages_per_block;
        let mut valid = vec![0; self.valid.len()];
        for (page, &at) in self.map.iter().enumerate() {
            if at != NONE {
                assert_eq!(self.reverse[at as usize] as usize, page);
                valid[(at / per_block) as usize] += 1;
            }
        }
        assert_eq!(valid, self.valid);
        let mapped = self.map.iter().filter(|&&at| at != NONE).count();
        assert_eq!(self.reverse.iter().filter(|&&p| p != NONE).count(), mapped);
        let blocks = self.free.len() + self.open.len() + self.closed.segments().len();
        assert_eq!(blocks, self.valid.len());
        assert!(!self.free.is_empty());
    }
}
