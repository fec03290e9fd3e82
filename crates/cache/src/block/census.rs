//! A thread that has time: it counts each volume's lines, and takes those of trimmed ranges out of the map.
//! What concerns a store is done on others ([`watch`](super::watch)).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use larder_base::Nanos;
use larder_engine::block::GroupId;
use larder_engine::block::node::logged::tell_log;
use larder_engine::block::node::looks::Looks as _;
use larder_engine::block::node::maintenance::{Census, Lines};
use larder_engine::block::node::owners::Whose;
use larder_engine::block::node::share::Count;
use larder_policy::block::VolumeId;
use larder_volume::watch;

use super::aside::{Aside, AsideVolumes};
use super::watch::{Watch, Watchers};
use super::{Core, locked};

/// What its rounds keep.
#[derive(Default)]
pub(super) struct Rounds {
    machine: Census,
    lines: Lined,
    /// It was said that the file of the cache is gone.
    removed: bool,
    /// The state directory is looked at again then.
    look_at_state_dir: Nanos,
    /// Without threads: what they would keep of each volume.
    watches: BTreeMap<VolumeId, Watch>,
}

/// Runs until the cache is stopped.
pub(super) fn run(cache: &Arc<Core>) {
    let (mut rounds, mut watchers) = (Rounds::default(), Watchers::default());
    while !locked(&cache.log_inbox).stopped {
        watchers.follow(cache);
        let next = rounds.turn(cache);
        std::thread::sleep(Duration::from_nanos(next.saturating_sub(cache.now()).0));
    }
    watchers.end();
}

impl Rounds {
    /// One round. Returns when the next is due.
    pub(super) fn turn(&mut self, cache: &Core) -> Nanos {
        let now = cache.now();
        if !self.removed && cache.is_unlinked() {
            self.removed = true;
            tracing::error!(
                "the file of the cache, '{}', was removed: what is cached is served until the daemon stops, and is gone then",
                cache.path().display()
            );
            if cache.back.get().is_some() {
                // No other start finds what is dirty there: it comes to the stores while it can be read.
                tell_log(cache, now, |log, asks| {
                    log.close(now, "the file of the cache was removed", asks);
                });
            }
        }
        if now >= self.look_at_state_dir {
            cache.look_at_state_dir();
            self.look_at_state_dir = now + Nanos(watch::LOOK.as_nanos() as u64);
        }
        if cache.hand.get().is_some() {
            self.watch(cache);
        }
        let mut counted = Counted { cache, lines: std::mem::take(&mut self.lines) };
        let next = self.machine.round(|| cache.now(), &mut counted);
        self.lines = counted.lines;
        next
    }

    fn watch(&mut self, cache: &Core) {
        let volumes = cache.volumes();
        self.watches.retain(|id, _| volumes.iter().any(|v| v.id == *id));
        for volume in &volumes {
            self.watches.entry(volume.id).or_default().turn(cache, volume);
        }
    }
}

/// What a count has found so far.
#[derive(Default)]
struct Lined {
    /// The volumes that were put aside when it began.
    aside: Option<AsideVolumes>,
    by_volume: BTreeMap<Whose, u64>,
}

/// Shards whose lines are counted, and how many each volume has.
struct Counted<'a> {
    cache: &'a Core,
    lines: Lined,
}

impl Lines for Counted<'_> {
    fn shards(&self) -> u32 {
        self.cache.layout.shards
    }

    fn sweep(&mut self, shard: u32, steps: u32) -> bool {
        self.cache.sweep(shard, steps)
    }

    fn count(&mut self, shard: u32, count: &mut Count) -> bool {
        let Counted { cache, lines } = self;
        let Lined { aside, by_volume } = lines;
        let aside = aside.get_or_insert_with(|| cache.aside_volumes());
        let of = |group: GroupId| {
            let volume = cache.node_limits.volume_at(cache.at(group.line(0)));
            let attached = volume.map(|v| Whose::Attached(v.id));
            attached.or_else(|| Aside::at(aside, group).map(Whose::Aside))
        };
        // Looked at, and no part of a record.
        cache.count(shard, count, of, |volume, more| {
            *by_volume.entry(volume).or_default() += more;
        })
    }

    fn counted(&mut self) {
        let Lined { aside, by_volume } = std::mem::take(&mut self.lines);
        let lines = |whose| by_volume.get(&whose).copied().unwrap_or(0);
        for volume in self.cache.volumes() {
            volume.account.set(lines(Whose::Attached(volume.id)));
        }
        if let Some(aside) = aside.filter(|all| !all.is_empty()) {
            self.cache.count_aside(&aside, |at| lines(Whose::Aside(at)));
        }
    }
}
