//! Other flash caches, as models to measure against: a victim cache and RIPQ.
//!
//! Both are written after utah-scs/lsm-sim, the simulator of the Flashield authors' group, and agree with its counts:
//! every miss brings the object in, and cache-level write amplification is flash bytes written over bytes missed.

mod ripq;
mod victim;

use serde::Serialize;

pub use ripq::Ripq;
pub use victim::VictimCache;

/// Counts of a baseline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Requests.
    pub requests: u64,
    /// Requests for an object that was there with the same size.
    pub hits: u64,
    /// Of these, hits served from DRAM.
    pub dram_hits: u64,
    /// Bytes of the requests that missed: what the application writes to the cache.
    pub miss_bytes: u64,
    /// Bytes written to flash.
    pub flash_bytes: u64,
    /// Objects written to flash, again and again counted (the victim cache), or blocks (RIPQ).
    pub flash_writes: u64,
    /// Objects that the cache could not take, larger than a block or than DRAM.
    pub refused: u64,
}

impl Counts {
    /// Cache-level write amplification: flash bytes written over bytes missed; 0 before any miss.
    pub fn clwa(&self) -> f64 {
        if self.miss_bytes == 0 { 0.0 } else { self.flash_bytes as f64 / self.miss_bytes as f64 }
    }

    /// Hits over requests.
    pub fn hit_ratio(&self) -> f64 {
        if self.requests == 0 { 0.0 } else { self.hits as f64 / self.requests as f64 }
    }
}

/// A cache over objects named by dense tags.
pub trait Baseline {
    /// A request for object `tag` of `size` bytes, which is brought in on a miss. Returns whether it hit. An object of
    /// another size than before is an update, and misses.
    fn request(&mut self, tag: u32, size: u32) -> bool;

    /// The object was deleted.
    fn remove(&mut self, tag: u32);

    /// Counts so far.
    fn counts(&self) -> Counts;

    /// Starts counting anew, as after warming up.
    fn reset_counts(&mut self);
}

/// A table from dense tags to indices.
#[derive(Debug, Default)]
struct Index(Vec<u32>);

const NONE: u32 = u32::MAX;

impl Index {
    fn get(&self, tag: u32) -> u32 {
        self.0.get(tag as usize).copied().unwrap_or(NONE)
    }

    fn set(&mut self, tag: u32, at: u32) {
        if self.0.len() <= tag as usize {
            self.0.resize(tag as usize + 1, NONE);
        }
        self.0[tag as usize] = at;
    }
}
