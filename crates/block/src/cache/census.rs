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
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::attached::Attached;
use super::{Cache, locked};
use crate::backing::{Session, watch};
use crate::op::Op;

/// Between two looks at whether more of the write budget must be written down.
const SAVE: Duration = Duration::from_millis(100);
/// For one read that a detector wishes.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two rounds.
const ROUND: Nanos = Nanos::from_millis(100);

/// Runs until the cache is stopped.
pub(super) fn run(cache: &Cache) {
    let (mut machine, mut lines) = (Census::default(), Counted { cache, lines: BTreeMap::new() });
    let mut next_save = Instant::now() + SAVE;
    let mut next_look = Instant::now();
    let mut removed = false;
    let mut sessions: BTreeMap<VolumeId, Option<Box<dyn Session>>> = BTreeMap::new();
    while !locked(&cache.log_inbox).stopped {
        let now = Instant::now();
        if !removed && cache.is_unlinked() {
            removed = true;
            tracing::error!(
                "the file of the cache, '{}', was removed: what is cached is served until the daemon stops, and is gone then",
                cache.path().display()
            );
        }
        if now >= next_save {
            cache.governor.keep_budget(cache.now());
            next_save = now + SAVE;
        }
        let volumes = cache.volumes();
        volumes.iter().for_each(|volume| cache.look_for_losses(volume));
        if now >= next_look {
            volumes.iter().for_each(|volume| cache.look_at(volume));
            next_look = Instant::now() + watch::LOOK;
        }
        sessions.retain(|id, _| volumes.iter().any(|v| v.id == *id));
        for volume in &volumes {
            meet_wishes(cache, volume, &mut sessions);
        }
        drop(volumes);
        let next = loop {
            let now = cache.now();
            match machine.turn(now, &mut lines) {
                Turn::Again => {}
                Turn::At(at) => break at.saturating_sub(now).min(ROUND),
                Turn::Over { .. } => return,
            }
        };
        std::thread::sleep(Duration::from_nanos(next.0));
    }
    cache.governor.save_budget(cache.now());
}

impl Cache {
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
    cache: &'a Cache,
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

/// Reads what the volume's detector wishes to see.
fn meet_wishes(
    cache: &Cache,
    volume: &Attached,
    sessions: &mut BTreeMap<VolumeId, Option<Box<dyn Session>>>,
) {
    let Some(detector) = &volume.detector else { return };
    for _ in 0..MOST_LOOKS {
        let Some((offset, bytes)) = locked(detector).next_wanted() else { return };
        let session =
            sessions.entry(volume.id).or_insert_with(|| volume.volume.backing().session().ok());
        let Some(open) = session else { return };
        match read(&mut **open, offset, bytes as usize, cache) {
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
    session: &mut dyn Session,
    offset: u64,
    len: usize,
    cache: &Cache,
) -> Option<AlignedBuf> {
    session.submit(0, Op::Read { offset, buf: AlignedBuf::zeroed(len) });
    let until = Instant::now() + PATIENCE;
    loop {
        session.flush(Instant::now());
        session.turn(Instant::now());
        if let Some(done) = session.pop() {
            return match (done.op, done.outcome) {
                (Op::Read { buf, .. }, Ok(_)) => Some(buf),
                _ => None,
            };
        }
        if Instant::now() >= until || locked(&cache.log_inbox).stopped {
            return None;
        }
        // SAFETY: the session keeps its descriptor open as long as it lives, and it outlives this call.
        let fd = unsafe { rustix::fd::BorrowedFd::borrow_raw(session.fd()) };
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let wait = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        // Interrupted or not: it is looked at again.
        let _ = poll(&mut fds, Some(&wait));
    }
}
