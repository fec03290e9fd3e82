//! Several clients of one filer, and what keeps their caches alike.
//!
//! As in the study: a write takes every other host's copy of the block away, at once and at no cost in time; what is
//! counted is how often that happens. A block that another host has dirty is written down there before it is read here,
//! and the reader waits for that. Blocks are written whole, so that a copy which a write takes away need not be saved.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use larder_base::Nanos;
use serde::Serialize;

use super::client::{Counts, Stack};
use super::{Config, Restart};
use crate::mrc::Interner;

/// What consistency cost, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Shared {
    /// Writes that another host's copy had to be taken away for.
    pub invalidating_writes: u64,
    /// Copies that were taken away.
    pub invalidations: u64,
    /// Reads that another host had to write a dirty block down for.
    pub recalls: u64,
}

impl Shared {
    pub(super) fn since(&self, earlier: &Shared) -> Shared {
        Shared {
            invalidating_writes: self.invalidating_writes - earlier.invalidating_writes,
            invalidations: self.invalidations - earlier.invalidations,
            recalls: self.recalls - earlier.recalls,
        }
    }
}

struct Host {
    stack: Stack,
    /// When each of its threads is ready.
    ready: BinaryHeap<Reverse<Nanos>>,
}

/// The hosts of a workload, each with caches of its own, as they first ask.
pub(super) struct Hosts {
    config: Config,
    threads: u16,
    hosts: BTreeMap<u16, Host>,
    blocks: Interner,
    shared: Shared,
    /// The latest time that anybody has come to.
    now: Nanos,
}

/// A block that was asked for.
pub(super) struct Served {
    pub issued: Nanos,
    pub done: Nanos,
}

impl Hosts {
    pub(super) fn new(config: &Config, threads: u16) -> Hosts {
        Hosts {
            config: *config,
            threads: threads.max(1),
            hosts: BTreeMap::new(),
            blocks: Interner::new(),
            shared: Shared::default(),
            now: Nanos::ZERO,
        }
    }

    /// The next thread of `host` that is ready reads or writes `block`.
    pub(super) fn ask(&mut self, host: u16, block: u64, read: bool) -> Served {
        // 2^32 - 1 blocks of 4 KiB are 16 TiB; a larger set shares the last number.
        let block = self.blocks.intern(block).unwrap_or(u32::MAX - 1);
        let (config, threads, start) = (self.config, self.threads, self.now);
        let mine = self.hosts.entry(host).or_insert_with(|| {
            let config = Config { seed: config.seed ^ u64::from(host) << 32, ..config };
            // Who comes later begins when it comes.
            let ready = (0..threads).map(|_| Reverse(start)).collect();
            Host { stack: Stack::new(&config), ready }
        });
        let issued = mine.ready.pop().map_or(start, |Reverse(at)| at);
        let begin =
            if self.hosts.len() > 1 { self.agree(host, issued, block, read) } else { issued };
        let Some(mine) = self.hosts.get_mut(&host) else { return Served { issued, done: issued } };
        let done = if read {
            mine.stack.read_block(begin, block).0
        } else {
            mine.stack.write_block(begin, block)
        };
        mine.ready.push(Reverse(done));
        self.now = Nanos(self.now.0.max(issued.0));
        Served { issued, done }
    }

    /// What the other hosts must do before `host` goes on; returns when it may.
    fn agree(&mut self, host: u16, now: Nanos, block: u32, read: bool) -> Nanos {
        let mut begin = now;
        let mut copies = 0;
        for (_, other) in self.hosts.iter_mut().filter(|(number, _)| **number != host) {
            if read {
                if let Some(done) = other.stack.recall(now, block) {
                    self.shared.recalls += 1;
                    begin = Nanos(begin.0.max(done.0));
                }
            } else {
                copies += u64::from(other.stack.forget(block));
            }
        }
        self.shared.invalidations += copies;
        self.shared.invalidating_writes += u64::from(copies > 0);
        begin
    }

    /// Every host starts again.
    pub(super) fn restart(&mut self, restart: Restart) {
        for host in self.hosts.values_mut() {
            host.stack.restart(self.now, restart.warm);
        }
    }

    pub(super) fn now(&self) -> Nanos {
        self.now
    }

    pub(super) fn counts(&self) -> Counts {
        let mut sum = Counts::default();
        self.hosts.values().for_each(|h| sum.add(&h.stack.counts()));
        sum
    }

    pub(super) fn shared(&self) -> Shared {
        self.shared
    }

    /// Seconds that the filer has worked, for all hosts.
    pub(super) fn filer_seconds(&self) -> f64 {
        self.hosts.values().map(|h| h.stack.filer_seconds()).sum()
    }

    pub(super) fn count(&self) -> usize {
        self.hosts.len()
    }

    #[cfg(test)]
    pub(super) fn validate(&self) -> Result<(), String> {
        for block in 0..self.blocks.len() as u32 {
            let of = |f: fn(&Stack, u32) -> bool| {
                self.hosts.values().filter(|h| f(&h.stack, block)).count()
            };
            let (copies, dirty) = (of(Stack::holds), of(Stack::is_dirty));
            if dirty > 1 || dirty == 1 && copies > 1 {
                return Err(format!("block {block}: {copies} hosts have it, {dirty} dirty"));
            }
        }
        self.hosts.values().try_for_each(|h| h.stack.validate(self.blocks.len() as u32))
    }
}
