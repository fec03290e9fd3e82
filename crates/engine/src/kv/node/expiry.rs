//! When expired objects leave DRAM though nobody asks for them: what is due in each second of wall time, or all that a client has
//! asked to be looked through.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use larder_base::{Now, UnixSecs};

use super::schedule::Around;

/// What removes expired objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Crawler {
    /// It is turned on.
    pub enabled: bool,
    /// A client has asked for all objects to be looked through, and that goes on.
    pub running: bool,
    /// How often clients have asked for that.
    pub starts: u64,
}

/// What clients want of it.
pub(super) struct CrawlerState {
    enabled: AtomicBool,
    /// A client wants all objects looked through, now.
    wanted: AtomicBool,
    starts: AtomicU64,
}

impl CrawlerState {
    pub(super) fn new() -> CrawlerState {
        CrawlerState { enabled: true.into(), wanted: false.into(), starts: 0.into() }
    }

    pub(super) fn turn(&self, on: bool) {
        self.enabled.store(on, Ordering::Relaxed);
    }

    /// False when it is turned off. One pass that is under way serves whoever asks meanwhile.
    pub(super) fn begin(&self) -> bool {
        let on = self.enabled.load(Ordering::Relaxed);
        if on && !self.wanted.swap(true, Ordering::Relaxed) {
            self.starts.fetch_add(1, Ordering::Relaxed);
        }
        on
    }

    /// All objects have been looked through.
    pub(super) fn done(&self) {
        self.wanted.store(false, Ordering::Relaxed);
    }

    pub(super) fn report(&self) -> Crawler {
        Crawler {
            enabled: self.enabled.load(Ordering::Relaxed),
            running: self.wanted.load(Ordering::Relaxed),
            starts: self.starts.load(Ordering::Relaxed),
        }
    }
}

/// A pass over the shards.
#[derive(Clone, Copy, Debug)]
struct Pass {
    shard: usize,
    /// To the end of each shard's table, whatever is known of expiries.
    all: bool,
    /// Passes over the shard that are to come, if that has been decided.
    left: Option<u8>,
}

/// Where the removal of expired objects stands.
#[derive(Debug, Default)]
pub(super) struct Expiring {
    /// The second that has been seen to.
    second: UnixSecs,
    pass: Option<Pass>,
}

/// What a piece of the removal came to in a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expired {
    /// A pass over it was under way before.
    pub(super) was_under_way: bool,
    /// It has not come to the end of the shard.
    pub(super) more: bool,
}

impl Expiring {
    /// Removes some, from one shard. Returns whether there is more to do at once.
    pub(super) fn step(&mut self, now: Now, around: &mut impl Around) -> bool {
        let mut pass = match self.pass.take() {
            Some(pass) => pass,
            None => {
                let crawler = around.crawler();
                if !crawler.enabled || !crawler.running && now.wall == self.second {
                    return false;
                }
                self.second = now.wall;
                Pass { shard: 0, all: crawler.running, left: None }
            }
        };
        while pass.shard < around.count() {
            if let Some(expired) = around.expire(now, pass.shard, pass.all) {
                // A pass that is under way may have gone past what has expired since.
                let left = pass.left.unwrap_or(1 + u8::from(pass.all && expired.was_under_way));
                let left = left - u8::from(!expired.more);
                if left > 0 {
                    pass.left = Some(left);
                } else {
                    (pass.shard, pass.left) = (pass.shard + 1, None);
                }
                self.pass = Some(pass);
                return true;
            }
            (pass.shard, pass.left) = (pass.shard + 1, None);
        }
        if pass.all {
            around.crawled();
        }
        false
    }
}
