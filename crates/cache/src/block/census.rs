//! A thread that has time: it counts each volume's lines, takes those of trimmed ranges out of the map, reads what would tell where a file system's metadata is, keeps
//! what the write budget must remember, and looks whether somebody else changes a store.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use larder_base::Nanos;
use larder_engine::block::GroupId;
use larder_engine::block::node::maintenance::{Census, Lines, MOST_LOOKS, SWEEP_STEP, Turn};
use larder_engine::block::node::share::Count;
use larder_policy::block::VolumeId;
use larder_runtime::AlignedBuf;

use super::attached::Attached;
use super::{Core, locked};
use larder_volume::op::Op;
use larder_volume::{Alone, watch};

/// Between two looks at whether more of the write budget must be written down.
const SAVE: Nanos = Nanos::from_millis(100);
/// For one read that a detector wishes.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two rounds.
const ROUND: Nanos = Nanos::from_millis(100);

/// What its rounds keep.
#[derive(Default)]
pub(super) struct Rounds {
    machine: Census,
    lines: BTreeMap<VolumeId, u64>,
    next_save: Nanos,
    next_look: Nanos,
    /// It was said that the file of the cache is gone.
    removed: bool,
    sessions: BTreeMap<VolumeId, Option<Alone>>,
}

/// Runs until the cache is stopped.
pub(super) fn run(cache: &Core) {
    let mut rounds = Rounds::default();
    while !locked(&cache.log_inbox).stopped {
        let next = rounds.turn(cache);
        std::thread::sleep(Duration::from_nanos(next.saturating_sub(cache.now()).0));
    }
    cache.governor.save_budget(cache.now());
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
        }
        if now >= self.next_save {
            cache.governor.keep_budget(now);
            self.next_save = now + SAVE;
        }
        let volumes = cache.volumes();
        // Without threads it may be an operator's call that goes on here, which has the lines that would be waited for.
        let waits = cache.is_at_desk();
        if !waits {
            volumes.iter().for_each(|volume| cache.look_for_losses(volume));
        }
        if now >= self.next_look && !waits {
            volumes.iter().for_each(|volume| cache.look_at(volume));
            self.next_look = cache.now() + Nanos(watch::LOOK.as_nanos() as u64);
        }
        self.sessions.retain(|id, _| volumes.iter().any(|v| v.id == *id));
        for volume in &volumes {
            meet_wishes(cache, volume, &mut self.sessions);
        }
        drop(volumes);
        let mut counted = Counted { cache, lines: std::mem::take(&mut self.lines) };
        let next = loop {
            let now = cache.now();
            match self.machine.turn(now, &mut counted) {
                Turn::Again => {}
                Turn::At(at) => break at.min(now + ROUND),
                Turn::Over { .. } => break now + ROUND,
            }
        };
        self.lines = counted.lines;
        next
    }
}

impl Core {
    /// Takes lines of trimmed ranges out of the map, for about so long. Returns whether there are more.
    pub(super) fn sweep(&self, time: Duration) -> bool {
        let begun = Instant::now();
        for cell in &self.shards {
            loop {
                // The lock is let go after every step.
                if !locked(cell).shard.sweep(SWEEP_STEP) {
                    break;
                }
                if begun.elapsed() >= time {
                    return true;
                }
            }
        }
        false
    }
}

/// Shards whose lines are counted, and how many each volume has.
struct Counted<'a> {
    cache: &'a Core,
    lines: BTreeMap<VolumeId, u64>,
}

impl Lines for Counted<'_> {
    fn shards(&self) -> u32 {
        self.cache.layout.shards
    }

    fn sweep(&mut self, shard: u32, steps: u32) -> bool {
        locked(&self.cache.shards[shard as usize]).shard.sweep(steps)
    }

    fn count(&mut self, shard: u32, count: &mut Count) -> bool {
        let Counted { cache, lines } = self;
        let of = |group: GroupId| cache.governor.volume_at(cache.at(group.line(0))).map(|v| v.id);
        // Looked at, and no part of a record.
        count.turn(&locked(&cache.shards[shard as usize]).shard, of, |volume, more| {
            *lines.entry(volume).or_default() += more;
        })
    }

    fn counted(&mut self) {
        let mut lines = std::mem::take(&mut self.lines);
        for volume in self.cache.volumes() {
            volume.account.set(lines.remove(&volume.id).unwrap_or(0));
        }
    }
}

/// A way to the volume's store for this thread.
pub(super) fn open_session(volume: &Attached) -> Option<Alone> {
    Alone::new(volume.volume.backing().session().ok()?).ok()
}

/// Reads what the volume's detector wishes to see.
fn meet_wishes(cache: &Core, volume: &Attached, sessions: &mut BTreeMap<VolumeId, Option<Alone>>) {
    let Some(detector) = &volume.detector else { return };
    for _ in 0..MOST_LOOKS {
        let Some((offset, bytes)) = locked(detector).next_wanted() else { return };
        let session = sessions.entry(volume.id).or_insert_with(|| open_session(volume));
        let Some(open) = session else { return };
        match read(open, offset, bytes as usize, cache) {
            Some(buf) => {
                locked(detector).observe(offset, &buf);
            }
            // What is late would be taken for the answer to the next: another session, another time.
            None => {
                sessions.remove(&volume.id);
                return;
            }
        }
    }
}

/// One read of a store, which is waited for as long as is decent. After `None` the session is not to be used again.
pub(super) fn read(
    session: &mut Alone,
    offset: u64,
    len: usize,
    cache: &Core,
) -> Option<AlignedBuf> {
    session.submit(0, Op::Read { offset, buf: AlignedBuf::zeroed(len) });
    let done = session.next(PATIENCE, || locked(&cache.log_inbox).stopped)?;
    match (done.op, done.outcome) {
        (Op::Read { buf, .. }, Ok(_)) => Some(buf),
        _ => None,
    }
}
