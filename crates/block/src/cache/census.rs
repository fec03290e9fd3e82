//! A thread that has time: it counts each volume's lines, takes those of trimmed ranges out of the map, reads what would tell where a file system's metadata is, keeps
//! what the write budget must remember, and looks whether somebody else changes a store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_engine::block::GroupId;
use larder_engine::block::node::share::Count;
use larder_policy::block::VolumeId;
use larder_runtime::AlignedBuf;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::attached::Attached;
use super::{Cache, locked};
use crate::backing::{Session, watch};
use crate::op::Op;

/// Slots that are swept under one lock: a client waits for no more.
const SWEEP_STEP: u32 = 512;
/// Sweeping goes on for so long, then rests for as long.
const SWEEP: Duration = Duration::from_millis(20);
/// The least time between two counts; a count that takes long is made less often, so that it is no load.
const EVERY: Duration = Duration::from_secs(1);
const SHARE_OF_TIME: u32 = 100;
/// Between two looks at whether more of the write budget must be written down.
const SAVE: Duration = Duration::from_millis(100);
/// For one read that a detector wishes.
const PATIENCE: Duration = Duration::from_secs(5);
/// Wishes of one volume that are met in one round.
const WISHES: u32 = 16;

/// Runs until the cache is stopped.
pub(super) fn run(cache: &Cache) {
    let mut next_count = Instant::now();
    let mut next_save = Instant::now() + SAVE;
    let mut next_look = Instant::now();
    let mut removed = false;
    let mut sessions: BTreeMap<VolumeId, Option<Box<dyn Session>>> = BTreeMap::new();
    while !locked(&cache.log_inbox).stopped {
        let now = Instant::now();
        if now >= next_count {
            count(cache);
            next_count = Instant::now() + EVERY.max(now.elapsed() * SHARE_OF_TIME);
        }
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
        let more = cache.sweep(SWEEP);
        std::thread::sleep(if more { SWEEP } else { Duration::from_millis(100) });
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

/// Counts the lines of each volume.
fn count(cache: &Cache) {
    let mut counts: BTreeMap<VolumeId, (Arc<Attached>, u64)> =
        cache.volumes().into_iter().map(|v| (v.id, (v, 0))).collect();
    let of = |group: GroupId| cache.governor.volume_at(cache.at(group.line(0))).map(|v| v.id);
    for cell in &cache.shards {
        let (mut count, mut more) = (Count::default(), true);
        while more {
            // Looked at, and no part of a record. The lock is let go after every turn.
            more = count.turn(&locked(cell).shard, of, |volume, lines| {
                if let Some((_, counted)) = counts.get_mut(&volume) {
                    *counted += lines;
                }
            });
        }
    }
    for (volume, lines) in counts.into_values() {
        volume.account.set(lines);
    }
}

/// Reads what the volume's detector wishes to see.
fn meet_wishes(
    cache: &Cache,
    volume: &Attached,
    sessions: &mut BTreeMap<VolumeId, Option<Box<dyn Session>>>,
) {
    let Some(detector) = &volume.detector else { return };
    for _ in 0..WISHES {
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
