//! Other designs of flash caches, as ideal models: what each could do at its best with the memory for objects that our server has.
//!
//! | model | source |
//! | --- | --- |
//! | [`Kind::S3Fifo`] | Yang et al., "FIFO Queues are All You Need for Cache Eviction" (SOSP '23, §5.4): a FIFO in DRAM and a ghost decide on a FIFO flash |
//! | [`Kind::RejectFirst`] | CacheLib's reject-first admission (Berg et al., OSDI '20) between LRU in DRAM and a FIFO flash |
//! | [`Kind::Clock`] | FIFO with reinsertion on flash behind LRU in DRAM, writes limited by chance |
//! | [`Kind::Kangaroo`] | McAllister et al., "Kangaroo" (SOSP '21): a log before sets, chance before the log, a threshold before the sets |
//!
//! They are ideal in this: their indexes, ghosts and memories of keys are exact and take no DRAM. Records, segments and objects in DRAM
//! take the bytes that they take in [`super::oracle`]. Every read that misses is followed by a write of the object.

mod front;
mod kangaroo;
mod log;

use serde::Serialize;

use super::oracle::{Known, Sizes};
use crate::kv::Counters;
use front::Front;
use kangaroo::Kangaroo;
use log::Log;

/// Which design.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// S3-FIFO with its ghost before a FIFO flash.
    S3Fifo,
    /// LRU and reject-first before a FIFO flash.
    RejectFirst,
    /// LRU before FIFO with reinsertion.
    Clock,
    /// LRU before Kangaroo's log and sets.
    Kangaroo,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 4] = [Kind::S3Fifo, Kind::RejectFirst, Kind::Clock, Kind::Kangaroo];

    /// Its name in tables.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::S3Fifo => "s3_fifo",
            Kind::RejectFirst => "lru_reject_first",
            Kind::Clock => "fifo_reinsertion",
            Kind::Kangaroo => "kangaroo",
        }
    }
}

/// A setting of one of them. What a design does not have is at its neutral value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Setting {
    /// Which design.
    pub kind: Kind,
    /// Of what leaves DRAM and passes otherwise, this share is written.
    pub chance: f64,
    /// Reads in DRAM with which an object passes without having been seen before (S3-FIFO).
    pub reads: u32,
    /// Keys that are remembered, over the objects that flash holds; 0 remembers none.
    pub window: f64,
    /// How many hits on flash are counted for reinsertion; each turn takes one. 0: nothing is written again.
    pub turns: u8,
    /// Whether a hit on flash copies the object to DRAM, as CacheLib does.
    pub copy: bool,
    /// What the log has of the flash (Kangaroo).
    pub log: f64,
    /// Objects of one set that must come together to be written there (Kangaroo).
    pub together: usize,
}

impl Setting {
    /// All of what leaves DRAM, once.
    const fn plain(kind: Kind) -> Setting {
        Setting {
            kind,
            chance: 1.0,
            reads: 0,
            window: 0.0,
            turns: 0,
            copy: false,
            log: 1.0,
            together: 1,
        }
    }

    /// The settings over which a design is run.
    pub fn grid(kind: Kind) -> Vec<Setting> {
        let plain = Setting::plain(kind);
        let mut grid = Vec::new();
        match kind {
            Kind::S3Fifo => {
                for window in [0.25, 1.0, 4.0] {
                    for (reads, turns) in [(1, 0), (1, 1), (1, 3), (2, 0), (2, 1), (2, 3), (4, 1)] {
                        grid.push(Setting { window, reads, turns, ..plain });
                    }
                }
                for chance in [0.3, 0.1, 0.03] {
                    grid.push(Setting { window: 1.0, reads: 2, turns: 1, chance, ..plain });
                }
            }
            Kind::RejectFirst => {
                for window in [0.03, 0.1, 0.3, 1.0, 2.0, 4.0] {
                    for (turns, copy) in [(0, false), (0, true), (1, false)] {
                        grid.push(Setting { window, turns, copy, ..plain });
                    }
                }
                for chance in [0.3, 0.1, 0.03] {
                    grid.push(Setting { window: 1.0, chance, ..plain });
                }
            }
            Kind::Clock => {
                for chance in [1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01] {
                    for (turns, copy) in [(0, false), (1, false), (3, false), (1, true)] {
                        grid.push(Setting { chance, turns, copy, ..plain });
                    }
                }
            }
            Kind::Kangaroo => {
                for chance in [1.0, 0.5, 0.2, 0.07, 0.02] {
                    for (log, together) in [(0.05, 1), (0.05, 2), (0.05, 3), (0.3, 2), (0.3, 4)] {
                        grid.push(Setting { chance, log, together, turns: 1, ..plain });
                    }
                }
            }
        }
        // Nothing is written at all: every design can do that.
        grid.push(Setting { chance: 0.0, ..plain });
        grid
    }
}

/// The flash of a design.
trait Flash {
    /// A read of the object; whether it is there.
    fn read(&mut self, tag: u32) -> bool;
    /// Whether it is there.
    fn holds(&self, tag: u32) -> bool;
    /// Whether a record of so many bytes can be stored.
    fn fits(&self, record: u32) -> bool;
    /// Stores an object that is not there.
    fn write(&mut self, tag: u32, record: u32);
    /// Takes it away, if it is there.
    fn remove(&mut self, tag: u32);
    /// Bytes written so far.
    fn written(&self) -> u64;
}

/// Runs `setting` over a trace; what it did after the first `warmup` requests.
pub fn run(known: &Known, sizes: Sizes, warmup: usize, setting: Setting, seed: u64) -> Counters {
    // As many keys as objects of the trace's mean size fit on flash.
    let objects = (sizes.flash() as f64 / known.mean_record()).max(1.0);
    let window = (objects * setting.window) as u32;
    if setting.kind == Kind::Kangaroo {
        let flash = Kangaroo::new(sizes, setting.log, setting.together, known.objects());
        return Front::new(known, sizes, setting, window, seed, flash).run(warmup);
    }
    let flash = Log::new(sizes, setting.turns, known.objects());
    Front::new(known, sizes, setting, window, seed, flash).run(warmup)
}

/// The fewest misses that mixtures of `points` (bytes written, misses) have which write at most `most`: what their lower hull has there.
/// None if all of them write more.
pub fn hull_at(points: &[(f64, f64)], most: f64) -> Option<f64> {
    let within = |p: &&(f64, f64)| p.0 <= most;
    let least = points.iter().filter(within).map(|p| p.1).min_by(f64::total_cmp)?;
    let mut best = least;
    for &(x0, y0) in points.iter().filter(within) {
        for &(x1, y1) in points.iter().filter(|p| p.0 > most) {
            let mixed = y0 + (y1 - y0) * (most - x0) / (x1 - x0);
            best = best.min(mixed);
        }
    }
    Some(best)
}

#[cfg(test)]
mod tests;
